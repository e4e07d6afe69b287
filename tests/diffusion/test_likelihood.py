"""The sampler's likelihood and expected passes against the sampler itself: enumerated through its jitted loop, and simulated."""

from __future__ import annotations

import functools
import inspect
import itertools
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from dllm.diffusion import likelihood as module
from dllm.ops.draws import KeyedDraws, enumerate_scripts
from dllm.ops.settings import make_settings
from dllm.ops.windows import window_table
from dllm.samplers import self_speculative
from dllm.samplers.loop import empty_prompt
from tests.samplers.tables import Functions, make_tables
from tests.samplers.test_laws import WINDOWS, options_window

pytestmark = pytest.mark.usefixtures("float64")


def texts(tables):
    return list(itertools.product(range(tables.vocab), repeat=tables.length))


def log_tables(tables):
    """Returns (log draft, log target) [X D D] of the true tokens of every text X."""
    D = tables.length
    draft, target = np.full((2, tables.vocab**D, D, D), np.nan)  # what lies before the diagonal must not be read
    for n, x in enumerate(texts(tables)):
        for i, d in itertools.combinations_with_replacement(range(D), 2):
            draft[n, i, d] = tables.p(x[:i], d)[x[d]]
            target[n, i, d] = tables.target[i, tables.code(x[:d]), d][x[d]]  # that of rank 0 means nothing, and must not matter
    return np.log(draft), np.log(target)


def options(name, length, n_verify):
    return self_speculative.Options(**options_window(name, length), n_verify=n_verify)


def computed(tables, opts, source=module):
    """Returns [X 3]: p(x), and p(x) times the expected non-causal and causal passes given x."""
    table = window_table(opts.window, tables.length, opts.rate)
    found = jax.jit(jax.vmap(lambda p, q: source.likelihood(p, q, table, opts.n_verify)))(*log_tables(tables))
    p = np.exp(found.log_p)
    return np.stack([p, *(np.where(p > 0, p * passes, 0) for passes in (found.noncausal, found.causal))], 1)


def enumerated(tables, opts, rows=512):
    """The same, by all scripts through the production sampler."""
    order_BL, prompt = jnp.tile(jnp.arange(tables.length), (rows, 1)), empty_prompt(rows, tables.length)

    @jax.jit
    def run(draws):
        samples = self_speculative.sample(Functions(tables), opts, make_settings(rows, tables.vocab), draws, prompt, order_BL)
        return (samples.tokens, samples.passes.noncausal, samples.passes.causal), samples.draws

    out = {x: np.zeros(3) for x in texts(tables)}
    sizes = dict(length=tables.length, cycles=tables.length * (opts.n_verify + 1), vocab=tables.vocab, rows=rows)
    for probability, (tokens, noncausal, causal) in enumerate_scripts(run, **sizes):
        out[tuple(tokens.tolist())] += probability * np.array([1.0, noncausal, causal])
    return np.stack([out[x] for x in texts(tables)])


# All windows with N = 1..4 on 4 ranks of 2 and of 3 symbols. By default those of 2 that differ in their law or their passes.
CASES = list(itertools.product([2, 3], WINDOWS, [1, 2, 3, 4]))
QUICK = [(2, "1", 1), (2, "2", 1), (2, "2", 2), (2, "i+1", 1), *((2, "D", n) for n in (1, 2, 3, 4))]
CASES = [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize("vocab, name, n_verify", CASES)
def test_likelihood_and_passes_of_every_text(vocab, name, n_verify):
    """p(x | sigma), and the mean passes of the paths that end in x, both kinds, for each x."""
    tables, opts = make_tables(vocab, 4), options(name, 4, n_verify)
    got = computed(tables, opts)
    assert abs(got[:, 0].sum() - 1) < 1e-12
    np.testing.assert_allclose(got, enumerated(tables, opts), rtol=0, atol=1e-10)


def test_forbidden_tokens():
    """A target of zero, of the draft too, and the two equal: some texts are then impossible, and others have one way only."""
    tables = make_tables(3, 3, seed=1, sparse=True)
    never = tables.target == tables.target.min(-1, keepdims=True)
    for law in (tables.target, tables.draft):
        law[never & (np.arange(3) == 1)] = 0
        law /= law.sum(-1, keepdims=True)
    tables.target[1:, :, 2] = tables.draft[1:, :, 2]
    opts = options("D", 3, 2)
    with np.errstate(divide="ignore"):  # log 0
        got = computed(tables, opts)
    assert (got[:, 0] == 0).any()
    np.testing.assert_allclose(got, enumerated(tables, opts), rtol=0, atol=1e-10)


# Of the module's text, each with a mistake in it: the comparison above must see it.
BROKEN = {
    "accepts with the larger probability": ("jnp.minimum(log_draft, log_target), jnp", "jnp.maximum(log_draft, log_target), jnp"),
    "never replaces": ("log_target + jnp.log(-jnp.expm1(gap)), ZERO)", "ZERO, ZERO)"),
    "replaces with the target": ("log_target + jnp.log(-jnp.expm1(gap))", "log_target"),
    "forgets what follows a restart": ("f = logsumexp(end_W + f_W)", "f = logsumexp(end_W)"),
    "forgets the N-th rejection": ("log_g_IN[:, -1] + replace_I, ZERO)", "ZERO, ZERO)"),
    "goes on after the N-th rejection": ("one_less_IN = jnp.pad(", "one_less_IN = jnp.logaddexp(0, 0) + jnp.pad("),
    "has a target of its own at rank 0": ("jnp.where(first_DD, log_draft_DD, log_target_DD)", "log_target_DD"),
    "counts no pass for an N-th rejection": ("nth_I + log_passes_1N[:, -1]", "nth_I"),
    "counts the rejections of a window only": ("jnp.arange(1, n_verify + 1,", "jnp.arange(n_verify,"),
    "counts passes from the second on": ("jnp.logaddexp(f, logsumexp(end_W + noncausal_W))", "logsumexp(end_W + noncausal_W)"),
}


@functools.cache
def truth():
    return enumerated(make_tables(2, 4), options("D", 4, 2))


@pytest.mark.parametrize("mistake", BROKEN)
def test_broken_variants_are_caught(mistake):
    source, (right, wrong) = inspect.getsource(module), BROKEN[mistake]
    assert source.count(right) == 1
    broken = ModuleType("broken")
    exec(source.replace(right, wrong), vars(broken))
    tables, opts = make_tables(2, 4), options("D", 4, 2)
    assert not np.abs(computed(tables, opts, broken) - truth()).max() < 1e-3
    assert np.abs(computed(tables, opts) - truth()).max() < 1e-10


def test_passes_of_simulated_samples():
    """200,000 keyed samples of 8 ranks, more than can be enumerated: mean passes within .5 % of those expected under the sampler's own law.
    The means' standard errors are below .08 % (checked), so a false alarm is a matter of 6 sigma, once in 10^9 draws of the key."""
    tables, opts, n = make_tables(2, 8), self_speculative.Options(window="constant", rate=4.0, n_verify=2), 200_000
    expect = computed(tables, opts).sum(0)
    assert expect[0] == pytest.approx(1, abs=1e-12)

    @jax.jit
    def run(key):
        draws, order_BL = KeyedDraws(key, jnp.arange(n, dtype=jnp.int32)), jnp.tile(jnp.arange(8), (n, 1))
        samples = self_speculative.sample(Functions(tables), opts, make_settings(n, 2), draws, empty_prompt(n, 8), order_BL)
        return samples.passes.noncausal, samples.passes.causal

    for passes_B, mean in zip(map(np.asarray, run(jax.random.key(0))), expect[1:], strict=True):
        assert passes_B.std() / np.sqrt(n) < 0.0008 * mean
        assert passes_B.mean() == pytest.approx(mean, rel=0.005)


def random_logits(length, vocab, seed=0, spread=1.0):
    """Returns logits of (draft, target), [D D V] each, and tokens: targets above and below their drafts."""
    rng = np.random.default_rng(seed)
    draft = rng.normal(size=(length, length, vocab)) * spread
    return draft, draft + 0.5 * rng.normal(size=draft.shape), rng.integers(0, vocab, length)


def log_p_of_logits(logits, tokens_D, table, n_verify):
    true = lambda x_DDV: jnp.take_along_axis(jax.nn.log_softmax(x_DDV), jnp.asarray(tokens_D)[None, :, None], 2)[:, :, 0]
    return module.likelihood(true(logits[0]), true(logits[1]), table, n_verify).log_p


@pytest.mark.parametrize("shape, rate, n_verify", [("constant", 256.0, 1), ("cosine", 0.2, 4)])
def test_long_texts_in_float32(shape, rate, n_verify):
    """256 ranks, some 800 nats: float32 agrees with float64, and its gradients are finite."""
    *logits, tokens_D = random_logits(256, 27)
    table = window_table(shape, 256, rate)
    run = jax.jit(jax.value_and_grad(lambda logits: log_p_of_logits(logits, tokens_D, table, n_verify)))
    exact, _ = run(tuple(map(jnp.asarray, logits)))
    found, gradients = run(tuple(jnp.asarray(x, jnp.float32) for x in logits))
    assert (exact.dtype, found.dtype) == (jnp.float64, jnp.float32)
    assert -1200 < exact < -600
    assert found == pytest.approx(float(exact), abs=2e-3)
    assert all(np.isfinite(g).all() and np.any(g) for g in gradients)


@pytest.mark.parametrize("name, n_verify", [("D", 1), ("D", 2)])
def test_gradient(name, n_verify):
    """Against central differences, for every logit: targets above and below their drafts, and tokens that one or both of them rule out."""
    *logits, tokens_D = with_impossible_tokens(*random_logits(4, 3))
    opts = options(name, 4, n_verify)
    table = window_table(opts.window, 4, opts.rate)
    flat, back = ravel_pytree(tuple(map(jnp.asarray, logits)))
    log_p = lambda flat: log_p_of_logits(back(flat), tokens_D, table, n_verify)
    gradient = jax.jit(jax.grad(log_p))(flat)
    steps = 1e-5 * jnp.eye(len(flat))
    difference = jax.jit(jax.vmap(lambda step: (log_p(flat + step) - log_p(flat - step)) / 2e-5))(steps)
    assert (np.abs(gradient) > 0.01).sum() > 10
    np.testing.assert_allclose(gradient, difference, rtol=0, atol=1e-8)


def with_impossible_tokens(draft, target, tokens_D):
    """With none revealed, rank 2 must be a replacement, and rank 3 is out of reach; some other tokens are ruled out too."""
    draft[0, 2, tokens_D[2]] = target[0, 3, tokens_D[3]] = -np.inf
    draft[1, 2, (tokens_D[2] + 1) % 3] = target[1:3, 2, (tokens_D[2] + 1) % 3] = -np.inf
    return draft, target, tokens_D


def test_an_impossible_text():
    """With three verifications the first pass would have to settle all ranks. Nothing there is nan but the passes of what never happens."""
    *logits, tokens_D = with_impossible_tokens(*random_logits(4, 3))
    log_p = lambda logits: log_p_of_logits(logits, tokens_D, np.array([4, 3, 2, 1]), 3)
    value, gradients = jax.jit(jax.value_and_grad(log_p))(tuple(map(jnp.asarray, logits)))
    assert value == -np.inf
    assert all((g == 0).all() for g in gradients)


def test_gradient_is_finite_where_draft_and_target_agree():
    *logits, tokens_D = random_logits(4, 3)
    same = (jnp.asarray(logits[0]),) * 2
    gradients = jax.jit(jax.grad(lambda logits: log_p_of_logits(logits, tokens_D, np.array([4, 3, 2, 1]), 2)))(same)
    assert all(np.isfinite(g).all() for g in gradients)


def test_windows_that_reach_beyond_the_end_are_refused():
    square = jnp.zeros((3, 3))
    for table, n_verify in (([3, 3, 1], 1), ([0, 1, 1], 1), ([1, 1, 1], 0)):
        with pytest.raises(ValueError, match="windows must lie"):
            module.likelihood(square, square, np.array(table), n_verify)
