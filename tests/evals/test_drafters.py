"""Floors and ceiling: what they are, by hand and by enumeration, and that the sampler which they run in keeps its law."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.evals.drafters import from_skip_bigrams, from_unigrams, perfect_marginals, skip_bigrams, unigrams, with_drafter
from dllm.models import uno
from dllm.ops import masks
from dllm.ops.draws import KeyedDraws
from dllm.ops.settings import make_settings, shape_logits
from dllm.samplers import autoregressive, psi_spec
from dllm.samplers.loop import make_prompt

CONFIG = uno.Config(vocab=3, length=24, width=16, layers=2, heads=2, kv_heads=1, head_width=8, mlp=20, rank=2, block=3)
ROWS = [np.asarray([0, 1, 2, 0, 1]), np.asarray([2]), np.asarray([], int), np.asarray([1, 1, 0, 2])]


@functools.cache
def weights(config=CONFIG):
    """Far from uniform, and the adapter far from silent."""
    params = uno.init(config, jax.random.key(1))["params"]
    loud = jax.tree.map(lambda x: 0.5 * jax.random.normal(jax.random.key(2), x.shape), params["lora"])
    return {"params": {**jax.tree.map(lambda x: 1.5 * x, params), "lora": loud}}


def test_unigrams_by_hand():
    np.testing.assert_allclose(unigrams(ROWS, 3, alpha=0.5), np.asarray([3.5, 4.5, 3.5]) / 11.5, rtol=1e-6)


def test_skip_bigrams_by_hand():
    """Pairs two apart, 0-2 1-0 2-1 and 1-0 1-2; three apart, 0-0 1-1 and 1-2. None across rows."""
    tables = skip_bigrams(ROWS, 3, depth=2, alpha=1.0)
    two = np.asarray([[1, 1, 2], [3, 1, 2], [1, 2, 1]])
    three = np.asarray([[2, 1, 1], [1, 2, 2], [1, 1, 1]])
    for table, counts in zip(tables, (two, three)):
        np.testing.assert_allclose(table[:3], counts / counts.sum(1, keepdims=True), rtol=1e-6)
        np.testing.assert_allclose(table[3], unigrams(ROWS, 3), rtol=1e-6)
    np.testing.assert_allclose(skip_bigrams(ROWS, 3, 9).sum(-1), 1, rtol=1e-6)  # deeper than any row is long


def test_bad_corpora():
    for bad, words in (
        ([], "is empty"),
        ([np.asarray([], int)], "is empty"),
        ([np.asarray([0, 3])], "from 0 to 3, outside the vocabulary"),
    ):
        with pytest.raises(UserError, match=words):
            unigrams(bad, 3)
        with pytest.raises(UserError, match=words):
            skip_bigrams(bad, 3, 1)
    with pytest.raises(UserError, match="smaller vocabularies"):
        skip_bigrams(ROWS, 100_000, 1)
    with pytest.raises(UserError, match="a draft of 3 tokens wants as many skip-bigram tables, and there are 2"):
        from_skip_bigrams(skip_bigrams(ROWS, 3, 2))(None, jnp.zeros((1, 1), jnp.int32), None, 3)


@pytest.mark.parametrize("closed", [[1, 1], [2, 4]])
def test_only_open_rows_are_the_drafts(closed):
    """Closed rows, their keys and values, and passes without a gate are the frozen model's, bit for bit; an open row has the draft of its
    distance from the last closed one."""
    tokens = jnp.asarray([[0, 1, 2, 1, 0, 2], [2, 2, 1, 0, 0, 1]])
    gate = jnp.arange(6)[None] >= jnp.asarray(closed)[:, None]
    tables = skip_bigrams(ROWS, 3, 5)

    @jax.jit
    def run(variables):
        real = uno.bind(CONFIG, variables)
        ours = with_drafter(real, from_skip_bigrams(tables))
        cache = real.empty_cache(2, 16)
        cache = real.forward(cache, tokens[:, :3], jnp.tile(jnp.arange(3), (2, 1)), masks.causal)[1].replace(lengths_B=jnp.full((2,), 3))
        positions = jnp.tile(3 + jnp.arange(6), (2, 1))
        at = jnp.asarray([[0, 5], [3, 4]])
        gated = [f.forward(cache, tokens, positions, masks.causal, gate_BQ=gate) for f in (real, ours)]
        few = ours.forward(cache, tokens, positions, masks.causal, at, gate_BQ=gate)[0]
        plain = [f.forward(cache, tokens, positions, masks.causal)[0] for f in (real, ours)]
        return gated, few, plain, at

    ((theirs, kept), (ours, cache)), few, plain, at = run(weights())
    np.testing.assert_array_equal(*plain)
    np.testing.assert_array_equal(few, np.take_along_axis(np.asarray(ours), np.asarray(at)[:, :, None], 1))
    np.testing.assert_array_equal(cache.lengths_B, kept.lengths_B)
    for row, count in enumerate(closed):
        np.testing.assert_array_equal(ours[row, :count], theirs[row, :count])
        for a, b in ((cache.k, kept.k), (cache.v, kept.v)):
            np.testing.assert_array_equal(a[:, row, : 3 + count], b[:, row, : 3 + count])
        seed = int(tokens[row, count - 1])
        np.testing.assert_allclose(ours[row, count:], np.log(tables[: 6 - count, seed]), rtol=1e-6)


def exact_marginals(functions, text, width, temperature):
    """[W V]: the law of the token w + 2 places behind the text, by all continuations."""
    paths = np.asarray(list(itertools.product(range(3), repeat=width)))
    rows = jnp.asarray(np.concatenate([np.tile(text, (len(paths), 1)), paths], 1))
    logits = functions.forward(None, rows, jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape), masks.causal)[0]
    law = np.asarray(jax.nn.softmax(logits / temperature))[:, len(text) - 1 :]  # of the token behind the text, and each behind it
    weight = np.cumprod(np.take_along_axis(law[:, :-1], paths[:, :, None], 2)[:, :, 0], 1)
    return np.stack([(weight[:, w, None] * law[:, w + 1]).sum(0) / 3 ** (width - 1 - w) for w in range(width)])


@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_perfect_marginals_converge(temperature):
    """4,096 paths against the enumeration of all: within 5 standard errors of a mean of numbers in [0, 1], .039; a hundred are worse."""
    text, width = [2, 1, 2], 3
    functions = jax.jit(
        lambda v, x: uno.bind(CONFIG, v).forward(None, x, jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape), masks.causal)[0]
    )
    bare = dataclasses.make_dataclass("Bare", ["forward"])(lambda cache, x, positions, mask: (functions(weights(), x), None))
    expect = exact_marginals(bare, text, width, temperature)
    np.testing.assert_allclose(expect.sum(1), 1, rtol=1e-5)

    settings = make_settings(2, 3, temperature=temperature)

    @functools.partial(jax.jit, static_argnums=(1,))
    def run(variables, paths, request):
        real = uno.bind(CONFIG, variables)
        draft = perfect_marginals(real, settings, jax.random.key(5), request + jnp.arange(2), paths)
        tokens, at = jnp.asarray([text, text]), jnp.tile(jnp.arange(3), (2, 1))
        cache = real.forward(real.empty_cache(2, 16), tokens, at, masks.causal)[1].replace(lengths_B=jnp.full((2,), 2))
        return jnp.exp(shape_logits(draft(cache, tokens[:, 2:], at[:, 2:], width), settings))

    estimate = lambda paths, request: np.asarray(run(weights(), paths, jnp.int32(request)))
    many, few = estimate(4096, 0), estimate(100, 0)
    assert np.abs(many - expect).max() < 0.039
    assert np.abs(many - expect).sum() < np.abs(few - expect).sum()
    for a, b in itertools.combinations(expect, 2):
        assert np.abs(a - b).max() > 0.15  # depths are told apart
    np.testing.assert_allclose(estimate(100, 1)[0], few[1], atol=1e-6)  # it hangs on the request, not on the row
    assert np.abs(few[0] - few[1]).max() > 1e-4


WIDE = dataclasses.replace(CONFIG, vocab=11)
REQUESTS = 24


@functools.cache
def program(kind, single_pass=False):
    rng = np.random.default_rng(0)
    corpus = [rng.integers(0, 11, 200)]
    drafts = {
        "unigrams": lambda *_: from_unigrams(unigrams(corpus, 11)),
        "skip_bigrams": lambda *_: from_skip_bigrams(skip_bigrams(corpus, 11, 7)),
        "ceiling": lambda real, settings, draws: perfect_marginals(real, settings, jax.random.key(9), draws.request, 64),
    }

    def run(variables, settings, draws, prompt):
        real = uno.bind(WIDE, variables)
        if kind == "autoregressive":
            return autoregressive.sample(real, autoregressive.Options(), settings, draws, prompt)
        ours = real if kind == "adapter" else with_drafter(real, drafts[kind](real, settings, draws))
        return psi_spec.sample(ours, psi_spec.Options(length=4, single_pass=single_pass), settings, draws, prompt)

    return jax.jit(run)


def draw(kind, requests=range(REQUESTS), temperature=1.0, single_pass=False):
    requests = list(requests)
    settings = make_settings(len(requests), 11, temperature=temperature)
    prompt = make_prompt([[r % 11, (3 * r) % 11] for r in requests], 24)
    return program(kind, single_pass)(weights(WIDE), settings, KeyedDraws(jax.random.key(0), jnp.asarray(requests, jnp.int32)), prompt)


@pytest.mark.parametrize(
    "kind, single_pass", [("skip_bigrams", False), pytest.param("ceiling", False, marks=pytest.mark.slow), ("ceiling", True)]
)
def test_greedy_text_is_the_models(kind, single_pass):
    """Drafts of any kind leave the target alone; the ceiling's, at temperature 0, are the text itself: all are accepted."""
    ours = draw(kind, temperature=0.0, single_pass=single_pass)
    np.testing.assert_array_equal(ours.tokens, draw("autoregressive", temperature=0.0).tokens)
    if kind == "ceiling":
        np.testing.assert_array_equal(ours.accepted, ours.proposed)
        assert ours.proposed.sum() > 10 * REQUESTS


def test_floor_and_ceiling():
    """The model's marginals are accepted more often than a uniform corpus's counts, and than an adapter's that isn't trained."""
    rate = {}
    for kind in ("unigrams", "ceiling", "adapter"):
        samples = draw(kind)
        rate[kind] = float(samples.accepted.sum() / samples.proposed.sum())
    assert rate["ceiling"] > rate["unigrams"] + 0.1
    assert rate["ceiling"] > rate["adapter"] + 0.1


@pytest.mark.slow
def test_a_request_does_not_depend_on_its_neighbours():
    together = draw("ceiling")
    for request in (5, 2):
        alone = draw("ceiling", [request])
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[request])
        np.testing.assert_array_equal(alone.accepted[0], together.accepted[request])
