import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.diffusion import next_token, ssmd
from dllm.diffusion.corruption import any_order
from dllm.models import gpt, hybrid
from tests.models.test_decoder import shaken

CONFIG = hybrid.Config(vocab=5, length=8, width=16, n_noncausal=2, n_causal=1, heads=2, mlp=24)
TOKENS = jax.random.randint(jax.random.key(0), (4, 8), 0, 5)
KEY = jax.random.key(1)
BITS = np.log(2)


@functools.partial(jax.jit, static_argnums=0)
def run(config, variables, tokens, key, given=None):
    return ssmd.loss(hybrid.bind(config, variables), tokens, key, ssmd.Config(), given)


@pytest.fixture(scope="module")
def variables():
    return {"params": shaken(hybrid.init(CONFIG, jax.random.key(2))["params"])}


def reference(variables, tokens, key, given):
    """The paper's sum, written as loops in float64 over the model's logits."""
    order, revealed = any_order(key, *tokens.shape, given)
    ranked = np.take_along_axis(np.asarray(tokens), np.asarray(order), 1)
    both = jax.jit(lambda *args: hybrid.bind(CONFIG, variables).both(*args))(jnp.asarray(ranked), order, revealed)
    log_p, log_q = (np.log(np.exp(x) / np.exp(x).sum(-1, keepdims=True)) for x in np.asarray(both, np.float64))
    loss, bound, own = 0.0, 0.0, []
    for b, i in enumerate(revealed.tolist()):
        own_length = CONFIG.length if given is None else int((~given[b]).sum())
        share = 1 / len(tokens) if given is None else own_length / int((~given).sum())
        weight = share * len(tokens) / (CONFIG.length - i)
        for d in range(i, CONFIG.length):
            p, q = log_p[b, d], log_p[b, d] if d == 0 else log_q[b, d]
            bound -= weight * p[ranked[b, d]] / len(tokens)
            loss -= weight * (p[ranked[b, d]] + q[ranked[b, d]]) / len(tokens)
            if d > 0:
                own.append((weight, -p[ranked[b, d]], -q[ranked[b, d]], 1 - np.abs(np.exp(p) - np.exp(q)).sum() / 2))
    weight, draft, causal, agreement = np.array(own).T
    mean = lambda x: (weight * x).sum() / weight.sum()
    return dict(loss=loss, draft_bpc=bound / BITS, draft_ce=mean(draft) / BITS, causal_ce=mean(causal) / BITS, agreement=mean(agreement))


@pytest.mark.parametrize("given", [None, [0, 3, 7, 1]])
def test_ssmd_against_loops(variables, given):
    """Given: so many positions, the first of some rows and the last of others. A row counts by those that aren't."""
    if given is not None:
        place = jnp.arange(CONFIG.length)[None]
        given = jnp.where(jnp.arange(4)[:, None] % 2 == 0, place, CONFIG.length - 1 - place) < jnp.array(given)[:, None]
    for seed in range(5):
        total, metrics = run(CONFIG, variables, TOKENS, jax.random.key(seed), given)
        want = reference(variables, TOKENS, jax.random.key(seed), given)
        assert metrics.keys() - {"tokens"} == want.keys()
        assert given is None or metrics["tokens"] == (~given).sum()
        for name, value in want.items():
            np.testing.assert_allclose(metrics[name], value, rtol=2e-5, err_msg=name)
        assert total == metrics["loss"]


def test_prefix_tokens_are_read_and_never_in_the_loss():
    """With logits that don't depend on the tokens, changing a prefix changes nothing; changing anything else does."""
    logits = jax.random.normal(jax.random.key(3), (8, 5))
    table = types.SimpleNamespace(both=lambda tokens, order, revealed: (logits[order], logits[order] * 2))
    given = jnp.broadcast_to(jnp.arange(CONFIG.length)[None] < 3, TOKENS.shape)
    loss = lambda tokens: float(ssmd.loss(table, tokens, KEY, ssmd.Config(), given)[0])
    assert loss(TOKENS.at[:, :3].set(4)) == loss(TOKENS)
    assert loss(TOKENS.at[:, 3:].set(4)) != loss(TOKENS)


def test_gradient_reaches_every_parameter_and_rank_zero_teaches_the_draft_once(variables):
    grads = jax.jit(jax.grad(lambda v: ssmd.loss(hybrid.bind(CONFIG, v), TOKENS, KEY, ssmd.Config())[0]))(variables)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert (jnp.abs(leaf).reshape(leaf.shape[0], -1).max(1) > 0).mean() > 0.7, path  # an unused symbol's row may be zero
    draft, target = jax.random.normal(jax.random.key(3), (2, 1, 2, 5))

    def loss(draft, target):
        table = types.SimpleNamespace(both=lambda tokens, order, revealed: (draft, target))
        return ssmd.loss(table, jnp.array([[1, 2]]), jax.random.key(0), ssmd.Config())[0]

    order, revealed = any_order(jax.random.key(0), 1, 2)
    assert revealed.tolist() == [0]
    draft_grad, target_grad = jax.grad(loss, (0, 1))(draft, target)
    hot = jax.nn.one_hot(jnp.array([[1, 2]])[0, order[0]], 5)
    np.testing.assert_allclose(draft_grad[0], (jax.nn.softmax(draft[0]) - hot) / 2, atol=1e-6)
    np.testing.assert_allclose(target_grad[0, 1], (jax.nn.softmax(target[0, 1]) - hot[1]) / 2, atol=1e-6)
    assert (target_grad[0, 0] == 0).all()


def test_model_without_causal_layers_has_the_bound_alone():
    config = hybrid.Config(vocab=5, length=8, width=16, n_noncausal=1, n_causal=0, heads=2, mlp=24)
    total, metrics = run(config, hybrid.init(config, KEY), TOKENS, KEY)
    assert set(metrics) == {"loss", "draft_bpc", "draft_ce"}
    np.testing.assert_allclose(total / BITS, metrics["draft_bpc"], rtol=1e-6)


def test_agreement_is_one_when_the_target_is_the_draft(variables):
    silent = {"params": {**variables["params"], "gain": jnp.zeros(CONFIG.width)}}
    _, metrics = run(CONFIG, silent, TOKENS, KEY)
    np.testing.assert_allclose(metrics["agreement"], 1, rtol=1e-6)
    np.testing.assert_allclose(metrics["causal_ce"], metrics["draft_ce"], rtol=1e-6)


def test_the_bound_is_exact_for_independent_tokens():
    """For logits that depend on the position alone, the bound is the cross-entropy whatever (order, i): its weights sum to one."""
    logits = jnp.zeros((4, 8, 5)).at[:, :, 0].set(1.0)
    table = types.SimpleNamespace(both=lambda *_: (logits, None))
    nats = -float(jax.nn.log_softmax(logits)[0, 0, 3])
    for seed in range(3):
        loss, _ = ssmd.loss(table, jnp.full((4, 8), 3), jax.random.key(seed), ssmd.Config())
        np.testing.assert_allclose(loss, nats, rtol=1e-6)


def test_the_tv_term_weighs_by_survival_and_moves_the_draft_alone():
    """Against loops, on tables; its gradient with respect to the target's logits is zero."""
    draft, target = jax.random.normal(jax.random.key(3), (2, 4, 8, 5))
    table = lambda d, t: types.SimpleNamespace(both=lambda *_: (d, t))
    config = ssmd.Config(tv=2.0)
    total, metrics = ssmd.loss(table(draft, target), TOKENS, KEY, config)
    _, revealed = any_order(KEY, 4, 8)
    p, q = (np.asarray(jax.nn.softmax(x), np.float64) for x in (draft, target))
    want = 0.0
    for b, i in enumerate(revealed.tolist()):
        survival = 1.0
        for d in range(i, 8):
            tv = 0.0 if d == 0 else np.abs(p[b, d] - q[b, d]).sum() / 2
            want += survival * tv / (8 - i) / 4
            survival *= 1 - tv
    np.testing.assert_allclose(metrics["tv"], want, rtol=1e-5)
    plain = lambda d, t: ssmd.loss(table(d, t), TOKENS, KEY, ssmd.Config())[0]
    np.testing.assert_allclose(total, plain(draft, target) + 2 * want, rtol=1e-5)
    added = jax.grad(lambda d, t: ssmd.loss(table(d, t), TOKENS, KEY, config)[0] - plain(d, t), (0, 1))(draft, target)
    assert float(jnp.abs(added[0]).max()) > 1e-3
    np.testing.assert_allclose(added[1], 0, atol=1e-7)


def sparse_law(draft, target, starts, tokens):
    """Returns p(tokens of ranks >= starts[0]) of the sampler that `sparse_elbo` describes, step by step. draft, target: [I, L, V]."""
    length = len(tokens)

    def begin(k):  # F(start_k)
        total, chain = 0.0, 1.0
        for j in range(starts[k], length):
            p, q = draft[k, j, tokens[j]], target[k, j, tokens[j]]
            total += chain * max(q - p, 0.0) * behind(j + 1)
            chain *= min(p, q)
        return total + chain

    def behind(j):
        if j == length:
            return 1.0
        last = max(k for k in range(len(starts)) if starts[k] < j)
        if j in starts:
            return begin(starts.index(j))
        return target[last, j, tokens[j]] * behind(j + 1)

    return begin(0)


@pytest.mark.parametrize("starts", [(0,), (0, 1, 2, 3), (0, 2), (1, 2), (0, 1, 3)])
def test_sparse_elbo_is_the_law_of_its_sampler(starts):
    """Equal to the step-by-step law, and its probabilities of all continuations sum to one."""
    length, vocab, rng = 4, 3, np.random.default_rng(0)
    draft, target = rng.dirichlet(np.full(vocab, 0.7), (2, len(starts), length))
    total = 0.0
    for text in itertools.product(range(vocab), repeat=length - starts[0]):
        tokens = (0,) * starts[0] + text
        drafted, targeted = (jnp.log(jnp.asarray(table[:, np.arange(length), tokens], jnp.float32)) for table in (draft, target))
        logp = ssmd.sparse_elbo(drafted, targeted, jnp.asarray(starts))
        np.testing.assert_allclose(jnp.exp(logp), sparse_law(draft, target, starts, tokens), rtol=1e-5)
        total += float(jnp.exp(logp))
    np.testing.assert_allclose(total, 1, rtol=1e-5)


def test_rows_share_their_text_and_order_for_the_elbo(variables):
    """The groups' starts rise, i stays uniform over all ranks, and the loss has finite gradients."""
    seen = []
    for seed in range(200):
        order, revealed = any_order(jax.random.key(seed), 4, 8)
        tokens, order, revealed = ssmd._share(TOKENS, order, revealed, None, 2)
        assert (tokens[0] == tokens[1]).all()
        assert (order[2] == order[3]).all()
        assert revealed[0] < revealed[1]
        assert revealed[2] < revealed[3]
        seen += revealed.tolist()
    counts = np.bincount(seen, minlength=8)
    assert abs(counts - 100).max() < 40  # four standard deviations of a binomial
    config = ssmd.Config(elbo=1.0, prefixes=2)
    loss = lambda v: ssmd.loss(hybrid.bind(CONFIG, v), TOKENS, KEY, config)
    (total, metrics), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables)
    assert np.isfinite(total)
    assert 0 < metrics["elbo"] < total
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    with pytest.raises(UserError, match="prefixes"):
        ssmd.loss(hybrid.bind(CONFIG, variables), TOKENS[:3], KEY, config)
    with pytest.raises(UserError, match="prefixes"):
        ssmd.Config(elbo=1.0)


def test_next_token_is_the_chain_rule_of_a_model_that_reads_only_what_is_before():
    """Each prefix alone, cut after the token, gives the same log-probability; position 0 is judged from BOS alone."""
    config = gpt.Config(vocab=5, length=6, width=16, layers=2, heads=2, mlp=24)
    variables = {"params": shaken(gpt.init(config, KEY)["params"])}
    tokens = TOKENS[:, :6]
    logprobs = jax.jit(lambda tokens: next_token.token_logprobs(gpt.bind(config, variables), tokens))
    whole = logprobs(tokens)
    for n in range(1, 7):
        np.testing.assert_allclose(logprobs(tokens[:, :n])[:, -1], whole[:, n - 1], atol=1e-5)
    loss, metrics = next_token.loss(gpt.bind(config, variables), tokens, KEY, next_token.Config())
    np.testing.assert_allclose(loss, -whole.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["bpc"], loss / BITS, rtol=1e-6)
    every = jnp.arange(5)[:, None]  # all one-token texts: their probabilities sum to one
    np.testing.assert_allclose(jnp.exp(logprobs(every)).sum(), 1, rtol=1e-5)
