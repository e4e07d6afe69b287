"""The samplers on the real models: the law of a hybrid network, many devices, prompts, and what the compiled program holds."""

from __future__ import annotations

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.diffusion.next_token import token_logprobs
from dllm.models import gpt, hybrid, qwen3
from dllm.ops.draws import KeyedDraws
from dllm.ops.passes import KINDS
from dllm.ops.settings import make_settings
from dllm.samplers import ancestral, autoregressive, block_diffusion, confidence, self_speculative, self_verified
from dllm.samplers.loop import compile_sampler, empty_prompt, make_prompt, require_fit, require_prefix
from dllm.train.sharding import MeshConfig, batch_sharding, make_mesh, shardings
from tests.samplers.tables import Tables, distance, law_self_speculative
from tests.samplers.test_laws import law_ssmd

SMALL = hybrid.Config(vocab=5, length=8, width=16, n_noncausal=1, n_causal=1, heads=2, mlp=32, gain=1.0)
ROWS = 8
SAMPLERS = {
    "ancestral": (ancestral, ancestral.Options(rate=0.2)),
    "confidence": (confidence, confidence.Options(rate=0.2)),
    "chain": (self_speculative, self_speculative.Options(window="constant", rate=4.0, n_verify=2)),
    "block": (self_speculative, self_speculative.Options(window="linear", rate=4.0, n_verify=3, verification="block")),
}
PROMPT = [[], [1, 2, 3], [None, 4, None, 0], [3] * 8, [1], [2, None, 2], [0, 0], [None] * 7 + [1]]


def keyed(seed=0):
    return KeyedDraws(jax.random.key(seed), jnp.arange(ROWS, dtype=jnp.int32))


@functools.cache
def small():
    return jax.tree.map(lambda x: 2.0 * x, hybrid.init(SMALL, jax.random.key(0)))


@functools.cache
def program(name):
    """Returns the jitted sampler; every test calls it with the same shapes."""
    return compile_sampler(SAMPLERS[name][0], hybrid, SMALL, SAMPLERS[name][1])


def draw(name, seed=0, prompt=PROMPT, temperature=1.0, variables=None):
    variables = small() if variables is None else variables
    return program(name)(variables, make_settings(ROWS, 5, temperature=temperature), keyed(seed), make_prompt(prompt, 8))


@pytest.mark.parametrize(
    "name, n_verify, verification, n_causal",
    [
        ("D", 1, "chain", 1),
        ("2", 2, "block", 2),
        pytest.param("D", 1, "chain", 2, marks=pytest.mark.slow),
        pytest.param("2", 2, "block", 1, marks=pytest.mark.slow),
    ],
)
def test_law_of_a_hybrid_network(name, n_verify, verification, n_causal):
    """The sampler's passes (draft, then the tail on a window, with its cache) give the law that the training forward describes:
    tables are read off `both` for every text and every number of revealed ranks. The network computes in float32."""
    config = hybrid.Config(vocab=2, length=3, width=16, n_noncausal=1, n_causal=n_causal, heads=2, mlp=32, gain=1.0)
    variables, order, length = hybrid.init(config, jax.random.key(0)), (2, 0, 1), 3
    variables = jax.tree.map(lambda x: x * 2.0, variables)  # laws far from uniform
    texts = list(itertools.product(range(2), repeat=length))
    tables = Tables(np.zeros((length, 2**length, length, 2)), np.zeros((length, 2**length, length, 2)))
    both = jax.jit(lambda x, i: hybrid.bind(config, variables).both(x, jnp.tile(jnp.asarray(order, jnp.int32), (len(texts), 1)), i))
    for i in range(length):
        draft, target = (np.asarray(jax.nn.softmax(x)) for x in both(jnp.asarray(texts, jnp.int32), jnp.full((len(texts),), i, jnp.int32)))
        for x, p, q in zip(texts, draft, target, strict=True):
            for d in range(i, length):
                tables.draft[i, tables.code(x[:i]), d], tables.target[i, tables.code(x[:d]), d] = p[d], q[d]
    ranks = law_self_speculative(tables, {"D": lambda i: length, "2": lambda i: 2}[name], n_verify, verification)
    expect = {tuple(x[order.index(k)] for k in range(length)): p for x, p in ranks.items()}
    got = law_ssmd(hybrid.bind(config, variables), name, n_verify, verification, order=order, rows=64, tolerance=2e-6)
    assert max(expect.values()) > 0.2
    assert distance(got, expect) < 2e-6


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("sizes", [(4, 1, 1), pytest.param((2, 2, 1), marks=pytest.mark.slow)])
def test_four_devices_give_the_samples_of_one(sizes, name):
    """(On an empty prompt all positions look alike to a network: most-confident-first would break ties by rounding. Hence row 1 on.)

    Where each device has the whole model nothing goes between them: each loop ends with its own slowest row.
    """
    prompt = [PROMPT[1], *PROMPT[1:]]
    one = draw(name, prompt=prompt)
    mesh = make_mesh(MeshConfig(*sizes))
    with jax.set_mesh(mesh):
        variables = jax.device_put(small(), shardings(small(), hybrid.RULES, mesh))
        settings, rows = jax.device_put((make_settings(ROWS, 5), make_prompt(prompt, 8)), batch_sharding(mesh))
        draws = KeyedDraws(jax.random.key(0), jax.device_put(jnp.arange(ROWS, dtype=jnp.int32), batch_sharding(mesh)))
        run = program(name).lower(variables, settings, draws, rows).compile()
        four = run(variables, settings, draws, rows)
    collectives = re.findall(r"all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute", run.as_text())
    assert bool(collectives) == (sizes != (4, 1, 1))
    assert len(four.tokens.sharding.device_set) == 4
    np.testing.assert_array_equal(one.tokens, four.tokens)
    np.testing.assert_allclose(one.logprobs, four.logprobs, atol=1e-5)
    assert {k: getattr(one.passes, k).tolist() for k in KINDS} == {k: getattr(four.passes, k).tolist() for k in KINDS}


@pytest.mark.parametrize("name", SAMPLERS)
def test_infilling(name):
    """Given tokens stay, everything else is drawn; a full prompt costs no pass."""
    samples = draw(name)
    for tokens, logprobs, row in zip(samples.tokens.tolist(), samples.logprobs.tolist(), PROMPT, strict=True):
        for position, token in enumerate([*row, *[None] * (8 - len(row))]):
            assert logprobs[position] < 0 if token is None else (tokens[position], logprobs[position]) == (token, 0.0)
    assert samples.passes.noncausal[3] == 0
    assert samples.passes.noncausal[0] > 0
    assert samples.lengths.tolist() == [8] * ROWS


@pytest.mark.parametrize("name", SAMPLERS)
def test_one_program_and_nothing_leaves_the_device(name):
    """Calls of one shape share one executable, whose text holds no callback, infeed or outfeed."""
    draw(name)
    compiled = program(name)._cache_size()
    assert (draw(name, seed=1, temperature=2.0).tokens != draw(name).tokens).any()
    assert program(name)._cache_size() == compiled
    text = program(name).lower(small(), make_settings(ROWS, 5), keyed(), make_prompt(PROMPT, 8)).compile().as_text()
    assert not any(word in text for word in ("callback", "infeed", "outfeed"))


def test_counts():
    """Windows of 4 over 8 ranks, two judgements a window: the passes add up, and acceptance lies between none and all."""
    samples = draw("chain", prompt=[[]] * ROWS)
    noncausal, causal = np.asarray(samples.passes.noncausal), np.asarray(samples.passes.causal)
    assert (noncausal >= 2).all()
    assert (causal >= noncausal).all()
    assert (causal <= 2 * noncausal).all()
    np.testing.assert_array_equal(samples.passes.query_tokens, 8 * noncausal + 4 * causal)
    np.testing.assert_array_equal(samples.proposed, 8)  # a chain judges every token of a row once
    assert 0 < samples.accepted.sum() < samples.proposed.sum()
    agreeing = jax.tree_util.tree_map_with_path(lambda path, x: x * 0 if "gain" in jax.tree_util.keystr(path) else x, small())
    samples = draw("chain", prompt=[[]] * ROWS, variables=agreeing)
    assert samples.accepted.sum() >= samples.proposed.sum() - 1  # the target is the draft, up to rounding
    assert set(samples.passes.noncausal.tolist()) <= {2, 3}


def test_gpt_reads_prompts_and_caches():
    """The log-probabilities of the samples are those of one uncached forward, with and without a prefix."""
    config = gpt.Config(vocab=5, length=8, width=16, layers=2, heads=2, mlp=32)
    variables = gpt.init(config, jax.random.key(0))
    run = compile_sampler(autoregressive, gpt, config, autoregressive.Options())
    samples = run(variables, make_settings(3, 5), KeyedDraws(jax.random.key(0), jnp.arange(3)), make_prompt([[], [1], [4, 3, 2]], 8))
    assert samples.tokens[2, :3].tolist() == [4, 3, 2]
    assert samples.passes.ar.tolist() == [8, 7, 5]
    assert samples.passes.prefill.tolist() == [0, 1, 1]
    expect = jax.jit(lambda v, x: token_logprobs(gpt.bind(config, v), x))(variables, samples.tokens)
    given = jnp.arange(8)[None] < jnp.asarray([0, 1, 3])[:, None]
    np.testing.assert_allclose(samples.logprobs, jnp.where(given, 0, expect), atol=1e-5)


@functools.cache
def qwen3_ar():
    """Returns (config, variables) of a small autoregressive qwen3, with laws far from uniform."""
    config = qwen3.Config(vocab=5, length=8, width=16, layers=2, heads=2, kv_heads=1, head_width=8, mlp=32, block=1, mask_id=-1)
    return config, jax.tree.map(lambda x: 2.0 * x, qwen3.init(config, jax.random.key(0)))


@pytest.mark.parametrize("grow", [0, 3, 8, 20])
def test_an_autoregressive_qwen3_reads_the_token_before(grow):
    """Row i predicts token i + 1: samples have the log-probabilities of one uncached forward, whatever the prompts' lengths, and are the
    same however the cache grows."""
    config, variables = qwen3_ar()
    run = compile_sampler(autoregressive, qwen3, config, autoregressive.Options(grow=grow))
    prompts = [[2], [1, 3], [4, 3, 2, 0, 1, 1, 2], [3] * 8, [0]]
    settings = make_settings(5, 5, max_new=[9, 9, 9, 9, 3])
    samples = run(variables, settings, KeyedDraws(jax.random.key(0), jnp.arange(5)), make_prompt(prompts, 8))
    for row, tokens in zip(prompts, samples.tokens.tolist(), strict=True):
        assert tokens[: len(row)] == row
    assert samples.lengths.tolist() == [8, 8, 8, 8, 4]
    assert samples.passes.ar.tolist() == [7, 6, 1, 0, 3]
    assert samples.passes.prefill.tolist() == [0, 1, 1, 0, 0]
    expect = jax.jit(lambda v, x: token_logprobs(qwen3.bind(config, v), x))(variables, samples.tokens)
    new = (jnp.arange(8)[None] >= jnp.asarray([len(row) for row in prompts])[:, None]) & (jnp.arange(8)[None] < samples.lengths[:, None])
    np.testing.assert_allclose(samples.logprobs, jnp.where(new, expect, 0), atol=1e-5)
    assert float(expect[0, 0]) == 0.0
    whole = compile_sampler(autoregressive, qwen3, config, autoregressive.Options())
    plain = whole(variables, settings, KeyedDraws(jax.random.key(0), jnp.arange(5)), make_prompt(prompts, 8))
    np.testing.assert_array_equal(samples.tokens, plain.tokens)


def test_what_goes_with_what():
    """A mode that the model doesn't have is an error, not garbage: https://github.com/inclusionAI/dInfer/issues/14"""
    config, _ = qwen3_ar()
    masked = qwen3.Config(mask_id=27, vocab=28)
    for sampler in (block_diffusion, self_verified):
        require_fit(sampler, qwen3, masked)
        with pytest.raises(
            UserError, match="qwen3 of mask_id=-1: autoregressive and prompt_lookup are for gpt, uno, and qwen3 with mask_id=-1"
        ):
            require_fit(sampler, qwen3, config)
    require_fit(autoregressive, qwen3, config)
    for sampler, model, settings in ((autoregressive, qwen3, masked), (ancestral, qwen3, masked), (block_diffusion, gpt, gpt.Config())):
        with pytest.raises(UserError, match="doesn't go with the model"):
            require_fit(sampler, model, settings)


def test_bad_prompts_and_options():
    with pytest.raises(UserError, match="context is 8"):
        make_prompt([[0] * 9], 8)
    with pytest.raises(UserError, match="prefix"):
        require_prefix(make_prompt([[None, 1]], 8))
    for sampler, model in ((autoregressive, hybrid), (ancestral, gpt)):
        with pytest.raises(UserError, match="doesn't go with the model"):
            compile_sampler(sampler, model, None, sampler.Options())
    functions = hybrid.bind(SMALL, small())
    for bad in (dict(n_verify=0), dict(rate=0.0), dict(window="square")):
        with pytest.raises(UserError):
            self_speculative.sample(functions, self_speculative.Options(**bad), make_settings(ROWS, 5), keyed(), empty_prompt(ROWS, 8))
