"""The metrics that run a network: gen_nll and bound; and generate."""

from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.diffusion import next_token, ssmd
from dllm.evals import bound, gen_nll
from dllm.evals.generate import generate, make_task, parse_prompt
from dllm.evals.stats import Context
from dllm.models import gpt, hybrid
from dllm.ops import masks

LENGTH = 12


def loaded(module, config):
    return SimpleNamespace(model_module=module, model_config=config, variables=module.init(config, jax.random.key(1)))


@pytest.fixture(scope="module")
def judge():
    return loaded(gpt, gpt.Config(length=LENGTH, width=16, layers=1, heads=2, mlp=32))


@pytest.fixture(scope="module")
def run():
    return loaded(hybrid, hybrid.Config(length=LENGTH, width=16, n_noncausal=1, n_causal=1, heads=2, mlp=32))


def test_gen_nll_is_the_judges_log_likelihood(judge):
    tokens_BL = np.random.default_rng(0).integers(0, 27, (5, LENGTH))
    lengths_B = np.array([LENGTH, 1, 4, LENGTH, 7])
    metric = gen_nll.evaluate(tokens_BL, lengths_B, Context(judge=judge))["gen_nll"]
    functions = gpt.bind(judge.model_config, judge.variables)
    forward = jax.jit(lambda read: functions.forward(None, read, jnp.arange(LENGTH)[None], masks.causal)[0])
    for b, length in enumerate(lengths_B):
        logits_LV = np.asarray(forward(jnp.asarray([[27, *tokens_BL[b, :-1]]], jnp.int32))[0], np.float64)
        log_p_LV = logits_LV - np.log(np.exp(logits_LV).sum(axis=1, keepdims=True))
        assert metric.numerator_B[b] == pytest.approx(-log_p_LV[np.arange(length), tokens_BL[b, :length]].sum(), rel=1e-4)
    assert metric.denominator_B.tolist() == lengths_B.tolist()


def test_gen_nll_refuses_what_the_judge_cannot_read(judge):
    with pytest.raises(UserError, match="judge reads 12"):
        gen_nll.evaluate(np.zeros((2, LENGTH + 1), int), np.array([1, 1]), Context(judge=judge))
    with pytest.raises(UserError, match="not id 27"):
        gen_nll.evaluate(np.full((2, LENGTH), 27), np.array([1, 1]), Context(judge=judge))


def test_bound_scores_each_chunk_with_its_own_fixed_draws():
    module, objective = ModuleType("model"), ModuleType("objective")
    module.bind = lambda config, variables: variables
    objective.loss = lambda functions, tokens_BL, key, config: (0.0, {"mean": tokens_BL.mean(), "noise": jax.random.uniform(key)})
    context = Context(run=SimpleNamespace(model_module=module, model_config=None, variables=0.0), objective=(objective, None), seed=3)
    tokens_BL = np.random.default_rng(0).integers(0, 27, (bound.CHUNKS + 3, LENGTH))  # the last pass is not full
    metrics = bound.evaluate(tokens_BL, np.full(len(tokens_BL), LENGTH), context)
    assert metrics["mean"].numerator_B == pytest.approx(tokens_BL.mean(axis=1), rel=1e-6)
    noise_B = metrics["noise"].numerator_B
    assert len(set(noise_B)) == len(noise_B)
    again = bound.evaluate(tokens_BL[:2], np.full(2, LENGTH), context)  # a chunk's draws don't depend on how many there are
    assert again["noise"].numerator_B.tolist() == noise_B[:2].tolist()


def test_bound_of_a_real_run(run, judge):
    tokens_BL = np.random.default_rng(1).integers(0, 27, (9, LENGTH))
    lengths_B = np.full(9, LENGTH)
    metrics = bound.evaluate(tokens_BL, lengths_B, Context(run=run, objective=(ssmd, ssmd.Config())))
    assert {"draft_bpc", "draft_ce", "causal_ce", "causal_gain"} <= set(metrics)
    gain = metrics["causal_gain"]
    assert gain.value == pytest.approx(metrics["draft_ce"].value - metrics["causal_ce"].value, abs=1e-6)
    flat = SimpleNamespace(**vars(run) | {"variables": jax.tree.map(jnp.zeros_like, run.variables)})  # knows nothing: uniform
    blank = bound.evaluate(tokens_BL, lengths_B, Context(run=flat, objective=(ssmd, ssmd.Config())))
    assert blank["draft_bpc"].value == pytest.approx(np.log2(27), rel=1e-5)
    assert blank["causal_gain"].value == pytest.approx(0, abs=1e-5)
    exact = bound.evaluate(tokens_BL, lengths_B, Context(run=judge, objective=(next_token, next_token.Config())))
    nats = gen_nll.evaluate(tokens_BL, lengths_B, Context(judge=judge))["gen_nll"]
    assert exact["bpc"].value == pytest.approx(nats.value / np.log(2), rel=1e-5)
    assert exact["bpc"].stderr == pytest.approx(nats.stderr / np.log(2), rel=1e-4)


def test_samples_do_not_depend_on_the_batch(run):
    task = make_task(run, "self_speculative", {"rate": 0.3, "n_verify": 2}, {"temperature": 0.7})
    row = parse_prompt("ab??c")
    whole = generate(task, num=5, batch=5, seed=1, row=row)
    parts = generate(task, num=5, batch=2, seed=1, row=row)
    assert whole.tokens_BL.tolist() == parts.tokens_BL.tolist()
    assert whole.nfe_B.tolist() == parts.nfe_B.tolist()
    assert len({tuple(x) for x in whole.tokens_BL.tolist()}) > 1
    assert (whole.tokens_BL[:, [0, 1, 4]] == [1, 2, 3]).all()
    assert (whole.new_B == LENGTH - 3).all()
    other = generate(task, num=5, batch=5, seed=2, row=row)
    assert whole.tokens_BL.tolist() != other.tokens_BL.tolist()


def test_weighted_passes_use_the_models_layers(run):
    g = generate(make_task(run, "self_speculative", {"rate": 0.3, "n_verify": 2}, {}), num=4, batch=4, seed=0)
    assert g.nfe_weighted_B == pytest.approx((g.passes.noncausal + g.passes.causal) / 2)  # 1 + 1 layers
    assert (g.passes.causal > 0).all()


@pytest.mark.parametrize(
    ("sampler", "options", "settings", "message"),
    [
        ("nothing", {}, {}, "there are: ancestral"),
        ("autoregressive", {}, {}, "doesn't go with the model hybrid"),
        ("ancestral", {"n_verify": 2}, {}, "n_verify"),
        ("ancestral", {"rate": "fast"}, {}, "rate"),
        ("ancestral", {}, {"heat": 1.0}, "heat"),
        ("ancestral", {}, {"stop": " "}, "left-to-right"),
        ("ancestral", {}, {"max_new": 3}, "left-to-right"),
    ],
)
def test_tasks_that_do_not_fit(run, sampler, options, settings, message):
    with pytest.raises(UserError, match=message):
        make_task(run, sampler, options, settings)


def test_prompts():
    assert parse_prompt("a? b") == [1, None, 0, 2]
    with pytest.raises(UserError, match="the prompt has 'A' at offset 2"):
        parse_prompt("a?A")


def test_prompts_that_do_not_fit(run, judge):
    with pytest.raises(UserError, match="context is 12"):
        generate(make_task(run, "ancestral", {}, {}), num=1, batch=1, seed=0, row=parse_prompt("a" * 13))
    with pytest.raises(UserError, match="prefix"):
        generate(make_task(judge, "autoregressive", {}, {}), num=1, batch=1, seed=0, row=parse_prompt("a?a"))


def test_left_to_right_settings(judge):
    g = generate(make_task(judge, "autoregressive", {}, {"max_new": 3, "stop": "e", "banned": "xyz"}), num=20, batch=20, seed=0, row=[1, 2])
    assert (g.lengths_B <= 5).all()
    assert (g.new_B == g.lengths_B - 2).all()
    assert (g.nfe_B == g.new_B).all()
    stopped_B = g.lengths_B < 5
    assert (g.tokens_BL[stopped_B, g.lengths_B[stopped_B] - 1] == 5).all()
