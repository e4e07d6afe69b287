"""Executed passes, what leaves the device, the floor's own results, and the loop on the host."""

from types import ModuleType

import jax
import numpy as np
import pytest
from jax.experimental import io_callback

from dllm.core.types import UserError
from dllm.evals import speed
from dllm.evals.speed import Pass
from dllm.models import gpt, hybrid
from dllm.ops.windows import window_table
from dllm.samplers import ancestral, autoregressive, confidence, self_speculative
from tests.samplers.tables import Functions, law_ancestral, law_self_speculative, make_tables

HYBRID = hybrid.Config(vocab=5, length=8, width=16, n_noncausal=1, n_causal=1, heads=2, mlp=32)
GPT = gpt.Config(vocab=5, length=8, width=16, layers=2, heads=2, mlp=32)
ROWS = 4


def windows(rate, **options):
    return self_speculative.Options(window="constant", rate=rate, **options)


# The executed passes of these are known without looking: windows are fixed, and a window of one rank is judged once.
PROGRAMS = {
    "ancestral": (ancestral, hybrid, ancestral.Options("constant", 3.0), 0, {Pass("draft", 3): 3}),
    "ancestral prompted": (ancestral, hybrid, ancestral.Options("constant", 3.0), 5, {Pass("draft", 3): 1}),
    "confidence": (confidence, hybrid, confidence.Options("constant", 2.0), 0, {Pass("draft", 8): 4}),
    "chain": (self_speculative, hybrid, windows(1.0), 0, {Pass("draft", 1): 8, Pass("verify", 1): 8}),
    "block": (self_speculative, hybrid, windows(1.0, verification="block"), 6, {Pass("draft", 1): 2, Pass("verify", 1): 2}),
    "autoregressive": (autoregressive, gpt, autoregressive.Options(), 0, {Pass("forward", 1): 8}),
    "autoregressive prompted": (autoregressive, gpt, autoregressive.Options(), 3, {Pass("forward", 1): 5, Pass("forward", 8): 1}),
}


def prepare(name):
    sampler, model, options, given, _ = PROGRAMS[name]
    config = {hybrid: HYBRID, gpt: GPT}[model]
    variables = model.init(config, jax.random.key(0))
    return speed.prepare(sampler, model, config, options, variables, ROWS, given, seed=0), (model, config, variables)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    """Executed passes are counted, nothing leaves the device, and the floor is made of calls that give what the model gives."""
    program, (model, config, variables) = prepare(name)
    assert program.passes == PROGRAMS[name][-1]
    assert speed.leaves_device(program.run.as_text()) == []
    assert all(size > 0 for size in program.memory().values())
    bare = speed.bare_passes(model, config, variables, ROWS, program.passes)
    for kind, call in bare.items():
        results = [x.shape for x in jax.tree.leaves(call())]
        assert ((ROWS, kind.columns, 5) in results) == (kind != Pass("forward", 8))  # a prefill's logits aren't used
        assert ((ROWS, 8, 16) in results) == (kind.name == "draft" and "self_speculative" in PROGRAMS[name][0].__name__)
        assert [x.shape for x in jax.tree.leaves(call())] == results  # what was donated came back
    timing = speed.time_program(program, bare, repetitions=3)
    assert timing.sampler_2R.shape == (2, 3)
    assert (timing.sampler_2R[0] > 0).all()
    floor_R = sum(timing.passes_2R[kind][0] for kind in program.passes)
    assert timing.ratio()[0] == pytest.approx(np.median(timing.sampler_2R[0] / floor_R))
    assert timing.ratio(0.0)[0] <= timing.ratio()[0] <= timing.ratio(1.0)[0]


def test_verifications_are_those_of_the_slowest_row():
    """Rows advance on their own, and the loop runs to the last: at least as many passes as any row counts, at most as many as all do."""
    config = HYBRID
    variables = jax.tree.map(lambda x: 3.0 * x, hybrid.init(config, jax.random.key(0)))  # drafts that are often rejected
    program = speed.prepare(self_speculative, hybrid, config, windows(4.0, n_verify=3), variables, ROWS, 0, seed=0)
    counted = program.run(*program.arguments).passes
    assert program.passes[Pass("draft", 4)] == counted.noncausal.max()
    assert counted.causal.max() <= program.passes[Pass("verify", 4)] < counted.causal.sum()
    assert program.passes[Pass("verify", 4)] > program.passes[Pass("draft", 4)]


def test_a_count_of_other_draws_is_refused(monkeypatch):
    """The counting program must have taken the passes of the timed one."""
    right = speed.count_passes

    def other(*args):
        passes, samples = right(*args)
        return passes, samples.replace(passes=samples.passes.replace(noncausal=samples.passes.noncausal + 1))

    monkeypatch.setattr(speed, "count_passes", other)
    with pytest.raises(UserError, match="choose another seed"):
        prepare("ancestral")


def leaky(leak):
    """A sampler that tells the host about every pass."""
    sampler = ModuleType("leaky")

    def sample(functions, options, settings, draws, prompt, order_BL=None):
        draft = lambda *args: (leak(args[2]), functions.draft(*args))[1]
        return ancestral.sample(functions._replace(draft=draft), options, settings, draws, prompt, order_BL)

    sampler.sample = sample
    return sampler


@pytest.mark.parametrize(
    "leak",
    [
        lambda x: jax.debug.print("{}", x),
        lambda x: io_callback(lambda x: None, None, x),
        lambda x: io_callback(lambda x: None, None, x, ordered=True),
    ],
)
def test_callbacks_in_a_loop_are_seen(leak):
    program = speed.prepare(leaky(leak), hybrid, HYBRID, ancestral.Options(), hybrid.init(HYBRID, jax.random.key(0)), ROWS, 0, seed=0)
    assert any("callback" in found for found in speed.leaves_device(program.run.as_text()))


def test_lines_of_a_program():
    """Host operations as XLA writes them, and neighbours that are none: names of variables, products, transfers between devices."""
    assert speed.leaves_device('%i = ((f32[3]), token[]) infeed(%t), infeed_config=""') == ["infeed"]
    assert speed.leaves_device("%o = token[] outfeed(%x, %t), outfeed_shape=f32[3]") == ["outfeed"]
    assert speed.leaves_device("%s = (f32[3], u32[], token[]) send(%x, %t), channel_id=1, is_host_transfer=true") == [
        "is_host_transfer=true"
    ]
    quiet = '%callback.1 = f32[3] custom-call(%x), custom_call_target="__onednn$matmul", metadata={op_name="jit(no_callback)/infeed"}'
    assert speed.leaves_device(quiet) == []
    assert speed.leaves_device("%s = (f32[3], u32[], token[]) send(%x, %t), channel_id=1") == []


@pytest.mark.parametrize("n_verify", [0, 1, 3])
def test_law_of_the_loop_on_the_host(n_verify):
    """20,000 samples against the enumerated law of 27 strings. Chi-square of 26 degrees: above 80 once in 10^7; a law that is off by 5 %
    in total variation has a noncentrality of 4 n tv^2 = 200 at least."""
    tables, n = make_tables(3, 3), 20_000
    table, functions = window_table("constant", 3, 2.0), Functions(tables)
    draft = jax.jit(lambda *rows: functions.draft(*rows, 2))
    verify = jax.jit(lambda *rows: functions.verify(*rows, 2))
    tokens_BL = speed.host_loop(draft, verify, table, n_verify, n, seed=0)
    width = lambda i: 2
    law = law_self_speculative(tables, width, n_verify, "chain") if n_verify else law_ancestral(tables, width)
    counts = dict.fromkeys(law, 0)
    for text in map(tuple, tokens_BL.tolist()):
        counts[text] += 1
    assert sum((counts[x] - n * p) ** 2 / (n * p) for x, p in law.items()) < 80
