import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.models import hybrid
from tests.models.test_decoder import shaken

CONFIG = hybrid.Config(vocab=5, length=8, width=16, n_noncausal=2, n_causal=2, heads=2, mlp=24)
B, L, V, W = 4, CONFIG.length, CONFIG.vocab, 3
TOKENS = jax.random.randint(jax.random.key(0), (B, L), 0, V)
ORDER = jnp.argsort(jax.random.uniform(jax.random.key(1), (B, L)), 1)
REVEALED = jnp.array([0, 1, 4, 7])


def make(config):
    return {"params": shaken(hybrid.init(config, jax.random.key(2))["params"])}


@pytest.fixture(scope="module")
def variables():
    return make(CONFIG)


@pytest.fixture(scope="module")
def call():
    """Returns call(name, variables, *args), jitted, for the default config."""

    @functools.partial(jax.jit, static_argnames=("name", "window"))
    def call(name, variables, *args, **window):
        return getattr(hybrid.bind(CONFIG, variables), name)(*args, **window)

    return call


def speculate(call, variables, tokens, order=ORDER, revealed=REVEALED, start=None, window=W):
    """Returns (draft, target) logits of the window at `start`, as a sampler gets them: draft, then verify on its hidden states."""
    draft, hidden = call("draft", variables, tokens, order, revealed, window=window)
    return draft, call("verify", variables, hidden, tokens, order, revealed if start is None else start, window=window)


def test_no_leak_by_substitution(call, variables):
    """For d >= i, changing the token of rank d changes no draft logit and no target logit of rank <= d. But those behind d do change."""
    draft, target = call("both", variables, TOKENS, ORDER, REVEALED)
    drafted, verified = speculate(call, variables, TOKENS)
    for row, i in enumerate(REVEALED.tolist()):
        for d in range(i, L):
            changed = TOKENS.at[row, d].set((TOKENS[row, d] + 1) % V)
            draft_, target_ = call("both", variables, changed, ORDER, REVEALED)
            np.testing.assert_array_equal(draft_, draft)
            np.testing.assert_array_equal(target_[row, : d + 1], target[row, : d + 1])
            assert d == L - 1 or float(jnp.abs(target_ - target)[row, d + 1 :].max(-1).min()) > 1e-4
            drafted_, verified_ = speculate(call, variables, changed)
            np.testing.assert_array_equal(drafted_, drafted)
            np.testing.assert_array_equal(verified_[row, : d + 1 - i], verified[row, : d + 1 - i])
            assert not i <= d < min(i + W, L) - 1 or float(jnp.abs(verified_ - verified)[row, d + 1 - i :].max()) > 1e-4


def embedded(config, variables):
    """Returns logits(delta_BLD) of `both` and of draft + verify, where delta is added to the embedding of each rank's own token."""

    def run(name):
        def logits(delta_BLD):
            # Real tokens get a row of their own in a longer embedding table, so that a gradient per token exists.
            rows = variables["params"]["embed"]["embedding"][TOKENS] + delta_BLD
            table = jnp.concatenate([rows.reshape(B * L, -1), variables["params"]["embed"]["embedding"][config.vocab :]])
            params = {**variables["params"], "embed": {"embedding": table}}
            ids = jnp.arange(B * L).reshape(B, L)
            module = hybrid.Hybrid(dataclasses.replace(config, vocab=B * L))  # MASK is B * L; the head is that of the weights
            params["head"] = {"kernel": jnp.pad(params["head"]["kernel"], ((0, 0), (0, B * L - V)))}
            if name == "both":
                return module.apply({"params": params}, ids, ORDER, REVEALED, method="both")
            draft, hidden = module.apply({"params": params}, ids, ORDER, REVEALED, W, method="draft")
            return draft, module.apply({"params": params}, hidden, ids, ORDER, REVEALED, W, method="verify")

        return logits

    return run("both"), run("window")


def test_no_leak_by_gradient(variables):
    """The derivative of every draft and target logit by the embedded token of rank d >= i: zero, but for targets of ranks > d."""
    for logits, first in zip(embedded(CONFIG, variables), (jnp.zeros_like(REVEALED), REVEALED)):
        rows = jax.eval_shape(logits, jnp.zeros((B, L, CONFIG.width)))[0].shape[1]

        @jax.jit
        def sensitivity(row, logits=logits):
            """[draft or target, B, token's rank]: how much row `row` moves with each token. A random direction of V misses no zero."""
            direction = jax.random.normal(jax.random.key(5), (V,))
            value = lambda delta: jnp.stack([(x[:, row, :V] * direction[None]).sum() for x in logits(delta)])
            return jnp.abs(jax.jacrev(value)(jnp.zeros((B, L, CONFIG.width)))).sum(-1)

        for row in range(rows):
            moved = np.asarray(sensitivity(row))
            for b, i in enumerate(REVEALED.tolist()):
                rank = int(first[b]) + row
                if rank < i or rank >= L:
                    continue
                assert (moved[0, b, i:] == 0).all()
                assert (moved[0, b, :i] > 0).all()
                assert (moved[1, b, max(rank, i) :] == 0).all()
                assert (moved[1, b, :rank] > 0).all()


@pytest.mark.parametrize("n_causal", [1, 2])
@pytest.mark.parametrize("pairing", ["crossed", "paired"])
def test_verify_is_the_slice_of_both(n_causal, pairing):
    config = dataclasses.replace(CONFIG, n_causal=n_causal, pairing=pairing)
    variables = make(config)

    @jax.jit
    def run(tokens, start):
        functions = hybrid.bind(config, variables)
        draft, hidden = functions.draft(tokens, ORDER, REVEALED, L)
        return functions.both(tokens, ORDER, REVEALED), draft, functions.verify(hidden, tokens, ORDER, start, W)

    for start in [jnp.full((B,), s) for s in range(L)] + [REVEALED]:
        (draft, target), drafted, verified = run(TOKENS, start)
        for b in range(B):
            s, n, i = int(start[b]), min(W, L - int(start[b])), int(REVEALED[b])
            np.testing.assert_allclose(verified[b, :n], target[b, s : s + n], atol=2e-5)
            np.testing.assert_allclose(drafted[b, : L - i], draft[b, i:], atol=2e-5)


def test_the_window_ignores_what_draft_saw_behind_it(call, variables):
    """A sampler drafts first and learns the window's tokens then: the prefilled keys of ranks >= start must not count."""
    rubbish = jnp.where(jnp.arange(L)[None] < REVEALED[:, None], TOKENS, (TOKENS + 2) % V)
    _, hidden = call("draft", variables, rubbish, ORDER, REVEALED, window=W)
    got = call("verify", variables, hidden, TOKENS, ORDER, REVEALED, window=W)
    np.testing.assert_array_equal(got, speculate(call, variables, TOKENS)[1])


def test_rank_order_equals_sequence_order(call, variables):
    """The non-causal part's logits don't depend on the order of its rows: any order with the same revealed set gives them permuted."""
    given = jnp.arange(L)[None] < REVEALED[:, None]
    orders = [jnp.argsort(jax.random.uniform(jax.random.key(seed), (B, L)) - given, 1) for seed in (7, 8)]
    identity = jnp.broadcast_to(jnp.arange(L)[None], (B, L))
    in_sequence = lambda logits, order: np.take_along_axis(np.asarray(logits), np.argsort(order, 1)[:, :, None], 1)
    ranked = lambda order: jnp.take_along_axis(TOKENS, order, 1)
    want, _ = call("both", variables, TOKENS, identity, REVEALED)
    for order in orders:
        got, target = call("both", variables, ranked(order), order, REVEALED)
        np.testing.assert_allclose(in_sequence(got, order), want, atol=2e-5)
        assert float(jnp.abs(target - call("both", variables, TOKENS, identity, REVEALED)[1]).max()) > 1e-2  # the causal part does depend


def test_positions_matter(call, variables):
    """Another order with the same tokens in rank order is another text."""
    draft, target = call("both", variables, TOKENS, ORDER, REVEALED)
    draft_, target_ = call("both", variables, TOKENS, ORDER[:, ::-1], REVEALED)
    assert float(jnp.abs(draft - draft_)[2:].max()) > 1e-2
    assert float(jnp.abs(target - target_)[2:].max()) > 1e-2


def test_target_starts_as_the_draft_with_gain_zero_and_without_residual_does_not(variables):
    silent = {"params": {**variables["params"], "gain": jnp.zeros(CONFIG.width)}}
    both = lambda config: jax.jit(lambda v: hybrid.bind(config, v).both(TOKENS, ORDER, REVEALED))(silent)
    draft, target = both(CONFIG)
    np.testing.assert_array_equal(draft, target)
    draft_, target_ = both(dataclasses.replace(CONFIG, residual=False))
    np.testing.assert_array_equal(draft_, draft)
    np.testing.assert_array_equal(target_, jnp.zeros_like(target_))  # nothing but gain * causal is left


def test_without_causal_layers_it_is_a_plain_masked_diffusion_model():
    config = dataclasses.replace(CONFIG, n_causal=0)
    variables = hybrid.init(config, jax.random.key(0))
    assert set(variables["params"]) == {"embed", "stack", "norm", "head"}
    functions = hybrid.bind(config, variables)
    draft, target = jax.jit(lambda v: hybrid.bind(config, v).both(TOKENS, ORDER, REVEALED))(variables)
    assert draft.shape == (B, L, V)
    assert target is None
    drafted, hidden = jax.jit(lambda v: hybrid.bind(config, v).draft(TOKENS, ORDER, REVEALED, W))(variables)
    assert drafted.shape == (B, W, V)
    with pytest.raises(UserError, match="n_causal=0"):
        functions.verify(hidden, TOKENS, ORDER, REVEALED, W)


def test_drafting_costs_the_noncausal_part_and_the_tail_s_keys():
    """Of one causal layer only the join and the keys and values are in the compiled draft: 5 d^2 a row of its 16 d^2 and attention."""

    def flops(n_causal):
        config = hybrid.Config(length=32, width=64, n_noncausal=1, n_causal=n_causal, heads=2, mlp=192)
        variables = jax.eval_shape(lambda key: hybrid.init(config, key), jax.random.key(0))
        row, number = jax.ShapeDtypeStruct((4, 32), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.int32)
        draft = jax.jit(lambda v, tokens, order, revealed: hybrid.bind(config, v).draft(tokens, order, revealed, 8))
        return draft.lower(variables, row, row, number).compile().cost_analysis()["flops"]

    products = 2 * 4 * 32 * 64**2  # of one d x d matrix
    assert 5 * products < flops(1) - flops(0) < 6 * products


def test_bfloat16_and_remat_run(variables):
    config = dataclasses.replace(CONFIG, dtype="bfloat16", remat=True)
    draft, target = jax.jit(lambda v: hybrid.bind(config, v).both(TOKENS, ORDER, REVEALED))(variables)
    wanted = jax.jit(lambda v: hybrid.bind(CONFIG, v).both(TOKENS, ORDER, REVEALED))(variables)
    for got, want in zip((draft, target), wanted):
        assert got.dtype == jnp.float32
        assert 0 < float(jnp.abs(jax.nn.softmax(got) - jax.nn.softmax(want)).max()) < 0.1


@pytest.mark.parametrize("change", [dict(width=18), dict(pairing="same"), dict(n_noncausal=0), dict(n_causal=-1), dict(dtype="int8")])
def test_a_config_that_makes_no_model_is_a_user_error(change):
    with pytest.raises(UserError, match=next(iter(change))):
        hybrid.build(dataclasses.replace(CONFIG, **change))


def test_a_causal_part_with_heads_and_mlp_of_its_own(call):
    """Shapes are its own, draft + verify still equal `both`, and it doesn't read what it predicts."""
    config = dataclasses.replace(CONFIG, causal_heads=4, causal_mlp=40)
    variables = make(config)
    shapes = jax.tree.map(jnp.shape, variables["params"])
    kernels = lambda part: sorted({leaf for leaf in jax.tree.leaves(shapes[part], is_leaf=lambda x: isinstance(x, tuple)) if len(leaf) > 2})
    assert any(40 in leaf for leaf in kernels("causal"))
    assert not any(40 in leaf for leaf in kernels("stack"))
    functions = hybrid.bind(config, variables)
    draft, target = jax.jit(functions.both)(TOKENS, ORDER, REVEALED)
    drafted, hidden = jax.jit(lambda *args: functions.draft(*args, W))(TOKENS, ORDER, REVEALED)
    verified = jax.jit(lambda *args: functions.verify(*args, W))(hidden, TOKENS, ORDER, REVEALED)
    for row, i in enumerate(REVEALED.tolist()):
        columns = slice(i, min(i + W, L))
        np.testing.assert_allclose(drafted[row, : min(W, L - i)], draft[row, columns], atol=1e-5)
        first = int(i == 0)  # rank 0 has no target
        np.testing.assert_allclose(verified[row, first : min(W, L - i)], target[row, columns][first:], atol=1e-5)
    with pytest.raises(UserError, match="causal_heads"):
        hybrid.build(dataclasses.replace(CONFIG, causal_heads=3))
