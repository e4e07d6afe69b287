"""Links are those of the spec's list of reported defects: each names the behaviour that a test holds the objective to."""

import functools
import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.data.packing import pack
from dllm.diffusion import block_diffusion as bd
from dllm.models import qwen3
from tests.diffusion.joint import Joint, random_joint
from tests.models.test_decoder import shaken

LENGTH, BLOCK = 8, 4
SHAPE = dict(width=16, layers=2, heads=2, kv_heads=1, head_width=8, mlp=24, remat=False)
MODEL = qwen3.Config(vocab=6, length=LENGTH, block=BLOCK, mask_id=5, **SHAPE)
TOKENS = jax.random.randint(jax.random.key(0), (4, LENGTH), 0, 5)
TRAINED = jnp.arange(LENGTH)[None] >= jnp.array([0, 3, 7, 6])[:, None]
KEY = jax.random.key(1)


@pytest.fixture(scope="module")
def variables():
    return {"params": shaken(qwen3.init(MODEL, jax.random.key(2))["params"], 0.1)}


@functools.partial(jax.jit, static_argnums=(0, 1))
def graded(model, config, variables, tokens, key, segment=None, trained=None):
    """Returns ((loss, metrics), gradients) of the real model."""
    run = lambda v: bd.loss(qwen3.bind(model, v), tokens, key, config, segment_BL=segment, trained_BL=trained)
    return jax.value_and_grad(run, has_aux=True)(variables)


def gap(a, b):
    """The largest difference of two trees, as a share of the largest entry."""
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(b))
    return max(float(jnp.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)) / scale


def masks_of(size):
    return [np.array(m, bool) for m in itertools.product([False, True], repeat=size)]


def nats_of_masks(joint):
    """Returns {mask: sum of -log p(x_l | the tokens not masked), l masked, for each text}: every mask of a block, all blocks at once."""
    texts, nats = jnp.asarray(joint.texts()), {}
    denoise = jax.jit(lambda noisy: bd.denoising_nats(joint, texts, noisy))
    for mask in masks_of(joint.block):
        masked = jnp.asarray(np.tile(mask, joint.length // joint.block))[None]
        nats[tuple(mask.tolist())] = np.where(masked, denoise(jnp.where(masked, joint.mask_id, texts)), 0).sum(1)
    return nats


def expected(joint, low, high):
    """Returns E[loss] of every text with t ~ U[low, high], by enumeration of masks and Gauss-Legendre quadrature over t (exact here)."""
    node, weight = np.polynomial.legendre.leggauss(8)
    t, weight = low + (high - low) * (node + 1) / 2, weight / 2
    total = 0
    for mask, nats in nats_of_masks(joint).items():
        m = sum(mask)
        if m:
            total = total + nats * (weight * t ** (m - 1) * (1 - t) ** (len(mask) - m)).sum()
    return total


def test_with_true_conditionals_the_bound_is_the_entropy(float64):
    """V = 3, B = 3: over [0, 1] exact for each text; a clipped interval, or all masked, is worth the numbers of a closed form."""
    joint = random_joint(3, 3, 3)
    law = joint.law.ravel()
    np.testing.assert_allclose(expected(joint, 0, 1), -np.log(law), atol=1e-12)
    assert law @ expected(joint, 0, 1) == pytest.approx(joint.entropy(), abs=1e-12)

    def closed(low, high):
        """The same from entropies of subsets: no network, no rows."""
        total = 0.0
        for mask in masks_of(3)[1:]:
            m, known = mask.sum(), tuple(np.flatnonzero(mask))
            shown = joint.law.sum(known)
            entropy = lambda p: -(p * np.log(p)).sum()
            for l in known:
                with_l = joint.law.sum(tuple(i for i in known if i != l))
                powers = np.polynomial.Polynomial([0] * (m - 1) + [1]) * np.polynomial.Polynomial([1, -1]) ** int(3 - m)
                total += (entropy(with_l) - entropy(shown)) * (powers.integ()(high) - powers.integ()(low)) / (high - low)
        return total

    assert law @ expected(joint, 1e-3, 1) == pytest.approx(closed(1e-3, 1), abs=1e-12)
    assert 0 < closed(1e-3, 1) - joint.entropy() < 2e-3
    assert law @ expected(joint, 0.3, 0.8) == pytest.approx(closed(0.3, 0.8), abs=1e-12)
    assert closed(0.3, 0.8) > joint.entropy() + 0.005  # biased as a likelihood
    marginals = sum(-(p * np.log(p)).sum() for p in (joint.law.sum(tuple({0, 1, 2} - {l})) for l in range(3)))
    texts = jnp.asarray(joint.texts())
    per_text = jax.jit(jax.vmap(lambda text: bd.loss(joint, text[None], KEY, bd.Config(low=1.0))[0]))(texts)
    assert 3 * (law @ per_text) == pytest.approx(marginals, abs=1e-12)


def test_two_blocks_of_true_conditionals_read_the_clean_block_before(float64):
    joint = random_joint(2, 4, 2, seed=1)
    np.testing.assert_allclose(expected(joint, 0, 1), -np.log(joint.law.ravel()), atol=1e-12)


@pytest.mark.parametrize(
    "config", [bd.Config(), bd.Config(low=0.3, high=0.8), bd.Config(low=0.2, high=0.8, complementary=True), bd.Config(sdar_public=True)]
)
def test_the_loss_has_the_mean_that_enumeration_gives(config):
    """Keyed draws, 3000 batches of all texts of two blocks. Fails by chance once in 15,000 (4 standard errors), sees an error of 3 %.

    sdar_public redraws a row without a mask, so its mean is another; there the texts' rows are compared with the law of its own noise.
    """
    joint = random_joint(2, 4, 2, seed=2)
    texts = jnp.asarray(joint.texts())
    losses = np.asarray(jax.jit(jax.lax.map, static_argnums=0)(lambda k: bd.loss(joint, texts, k, config)[0], jax.random.split(KEY, 3000)))
    if config.sdar_public:
        want = public_mean(joint)
    else:
        want = expected(joint, config.low, config.high).mean() / joint.length
    stderr = losses.std() / np.sqrt(len(losses))
    assert stderr < 0.007 * want
    assert abs(losses.mean() - want) < 4 * stderr


def public_mean(joint):
    """E[loss] of sdar_public: t for the whole row; noise that masks nothing is drawn again (nine times more: then it is one in 10^7)."""
    texts, node_weight = jnp.asarray(joint.texts()), np.polynomial.legendre.leggauss(8)
    rate, weight = bd.LOWEST + (1 - bd.LOWEST) * (node_weight[0] + 1) / 2, node_weight[1] / 2
    denoise = jax.jit(lambda noisy: bd.denoising_nats(joint, texts, noisy))
    total, something = 0.0, 0.0
    for mask in masks_of(joint.length)[1:]:
        m, masked = mask.sum(), jnp.asarray(mask)[None]
        chance = rate**m * (1 - rate) ** (joint.length - m)
        nats = np.where(masked, denoise(jnp.where(masked, joint.mask_id, texts)), 0).sum(1).mean()
        total, something = total + nats * (weight * chance / rate).sum(), something + (weight * chance).sum()
    return total / something / joint.length


def test_realised_weights_are_the_bound_times_b_over_b_plus_1():
    """Per mask: 1 over the realised share, and nothing for an empty one. Over [0, 1] all mask sizes are as likely, hence the factor."""
    trained = jnp.ones((2000, 4), bool).at[:, 3].set(False)
    noise = bd.corrupt(KEY, trained, 4, bd.Config(weight="realised"))
    count = np.asarray(noise.masked_BL.sum(1))
    np.testing.assert_allclose(noise.weight_BL, np.where(noise.masked_BL, 3 / np.maximum(count, 1)[:, None], 0), rtol=1e-6)
    assert abs(np.bincount(count, minlength=4) / 2000 - 0.25).max() < 0.04  # 4 standard deviations
    assert not noise.masked_BL[:, 3].any()


def test_rates_are_stratified_over_the_batch_and_uniform_at_every_place():
    rates = np.stack([bd.stratified(jax.random.key(i), (2, 5), 0.2, 0.7) for i in range(400)])
    strata = np.sort(np.floor((rates.reshape(400, -1) - 0.2) / 0.05).astype(int))
    assert (strata == np.arange(10)).all()
    assert abs(rates.mean(0) - 0.45).max() < 4 * 0.5 / np.sqrt(12 * 400)
    trained = jnp.ones((1, 4000), bool)
    noise = bd.corrupt(KEY, trained, 4, bd.Config(low=0.5, high=0.5))
    assert abs(noise.masked_BL.mean() - 0.5) < 0.032
    np.testing.assert_allclose(noise.weight_BL, noise.masked_BL * 2.0)


def test_complement_masks_what_the_mask_does_not():
    trained = jnp.arange(40)[None] % 8 > 1
    noise = bd.corrupt(KEY, trained, 4, bd.Config(low=0.1, high=0.9, complementary=True))
    assert (noise.masked_BL[0] ^ noise.masked_BL[1])[trained[0]].all()
    assert not noise.masked_BL[:, ~trained[0]].any()
    one, other = np.asarray(noise.weight_BL)
    for block in range(10):
        own = slice(4 * block, 4 * block + 4)
        if one[own].any() and other[own].any():
            assert 1 / one[own].max() + 1 / other[own].max() == pytest.approx(1, abs=1e-6)


def test_sdar_public_draws_one_rate_a_document_and_leaves_no_row_unmasked():
    """Rows of one trained token show the redraws: masked always, by force (with the weight of the last rate) where ten draws failed."""
    segment = jnp.repeat(jnp.array([[1, 2, 3]]), 4, axis=1)
    noise = bd.corrupt(KEY, jnp.ones((1, 12), bool), 4, bd.Config(sdar_public=True), segment)
    for document in range(3):
        weights = set(np.asarray(noise.weight_BL[0, 4 * document : 4 * document + 4]).tolist()) - {0.0}
        assert len(weights) <= 1
    trained = jnp.zeros((3000, 4), bool).at[:, 2].set(True)
    noise = bd.corrupt(KEY, trained, 4, bd.Config(sdar_public=True))
    assert (noise.masked_BL == trained).all()
    # t is redrawn with the mask, so a masked token's rate has density 2 p, and its weight 1/p the mean 2.
    assert abs(np.asarray(noise.weight_BL[:, 2]).mean() - 2) < 0.15
    nothing = bd.corrupt(KEY, jnp.zeros((1, 4), bool), 4, bd.Config(sdar_public=True))
    assert not nothing.masked_BL.any()


def test_a_noisy_block_never_reads_its_own_clean_tokens(variables):
    """https://github.com/JetAstra/SDAR/issues/11: by substitution and by gradient; clean tokens of earlier blocks are read."""
    functions = qwen3.bind(MODEL, variables)
    noisy = TOKENS.at[:, 1::2].set(MODEL.mask_id)

    @jax.jit
    def logits(clean):  # of the noisy rows
        captured = []
        spy = functions._replace(forward=lambda *a: captured.append(functions.forward(*a)) or captured[0])
        bd.denoising_nats(spy, clean, noisy)
        return captured[0][0]

    before = logits(TOKENS)
    for l in range(LENGTH):
        changed = np.abs(logits(TOKENS.at[:, l].set((TOKENS[:, l] + 1) % 5)) - before).max((0, 2)) > 0
        assert changed.tolist() == [k // BLOCK > l // BLOCK for k in range(LENGTH)]
    nats = jax.jit(lambda tokens, noisy: bd.denoising_nats(functions, tokens, noisy))
    later = nats(TOKENS, noisy.at[:, BLOCK:].set(0))[:, :BLOCK]
    np.testing.assert_array_equal(later, nats(TOKENS, noisy)[:, :BLOCK])  # nor another block's noisy tokens


def test_one_block_is_full_attention_diffusion_and_needs_no_clean_rows(variables):
    """A block of L: the shortcut without clean rows gives what [clean ; noisy] gives."""
    whole = qwen3.Config(**vars(MODEL) | {"block": LENGTH})
    noisy = TOKENS.at[:, ::2].set(MODEL.mask_id)
    short = jax.jit(lambda: bd.denoising_nats(qwen3.bind(whole, variables), TOKENS, noisy))()
    longer = jnp.concatenate([TOKENS, TOKENS[:, :1]], 1), jnp.concatenate([noisy, noisy[:, :1]], 1)  # a ninth token: no shortcut
    both = jax.jit(lambda: bd.denoising_nats(qwen3.bind(whole, variables), *longer))()
    np.testing.assert_allclose(short, both[:, :LENGTH], atol=1e-5)


def test_blocks_of_one_all_masked_are_an_exact_autoregressive_likelihood(variables):
    """Texts' probabilities sum to one, and the loss draws nothing: it is the same for every key."""
    config = qwen3.Config(**vars(MODEL) | {"block": 1, "length": 3})
    texts = jnp.array(list(itertools.product(range(5), repeat=3)))
    score = jax.jit(lambda key: jax.vmap(lambda x: bd.loss(qwen3.bind(config, variables), x[None], key, bd.Config(low=1.0))[0])(texts))
    np.testing.assert_allclose(jnp.exp(-3 * score(KEY)).sum(), 1, rtol=1e-5)
    np.testing.assert_array_equal(score(KEY), score(jax.random.key(9)))


COMPLEMENTARY = bd.Config(low=0.1, high=0.9, complementary=True, weight="realised")


@pytest.mark.parametrize("config", [bd.Config(), pytest.param(COMPLEMENTARY, marks=pytest.mark.slow)])
def test_gradient_does_not_depend_on_the_split_into_micro_batches(variables, config):
    """https://github.com/JetAstra/SDAR/issues/27: rows of unequal numbers of trained tokens, where a mean of means would be wrong."""
    (whole, metrics), grads = graded(MODEL, config, variables, TOKENS, KEY, None, TRAINED)
    for parts in (2, 4):
        split = bd.Config(**vars(config) | {"parts": parts})
        (total, others), others_grads = graded(MODEL, split, variables, TOKENS, KEY, None, TRAINED)
        np.testing.assert_allclose(total, whole, rtol=1e-5)
        assert others["tokens"] == metrics["tokens"] == TRAINED.sum()
        assert gap(others_grads, grads) < 1e-5
    with pytest.raises(UserError, match=r"objective.parts=3"):
        graded(MODEL, bd.Config(parts=3), variables, TOKENS, KEY)


@pytest.mark.slow
def test_micro_batches_weighted_by_their_tokens_are_the_batch(variables):
    """https://github.com/JetAstra/SDAR/issues/27: the rule for whoever accumulates outside. All is masked, so noise plays no part."""
    config = bd.Config(low=1.0)
    _, want = graded(MODEL, config, variables, TOKENS, KEY, None, TRAINED)
    halves = [graded(MODEL, config, variables, TOKENS[rows], KEY, None, TRAINED[rows]) for rows in (slice(0, 2), slice(2, 4))]
    tokens = [float(metrics["tokens"]) for (_, metrics), _ in halves]
    assert tokens[0] != tokens[1]
    mean = jax.tree.map(lambda a, b: (tokens[0] * a + tokens[1] * b) / sum(tokens), halves[0][1], halves[1][1])
    assert gap(mean, want) < 1e-5
    plain = jax.tree.map(lambda a, b: (a + b) / 2, halves[0][1], halves[1][1])
    assert gap(plain, want) > 1e-2


def test_packed_documents_weigh_what_they_weigh_alone(variables):
    """Two documents in a row, or in a row each: the same loss and gradient, prompts and padding included."""
    documents = [([0, 1], [2, 3, 4]), ([4], [3, 1])]
    one = pack(documents, 12, BLOCK, 0, train_padding=False)
    two = pack(documents, LENGTH, BLOCK, 0, train_padding=False)
    assert (len(one["tokens"]), len(two["tokens"])) == (1, 2)
    model = qwen3.Config(**vars(MODEL) | {"length": 12})
    for config in (bd.Config(low=1.0), bd.Config(low=1.0, weight="realised")):
        results = [graded(model, config, variables, r["tokens"], KEY, r["segment"], r["trained"]) for r in (one, two)]
        (packed, metrics), grads = results[0]
        np.testing.assert_allclose(packed, results[1][0][0], rtol=1e-5)
        assert metrics["tokens"] == 5
        assert gap(grads, results[1][1]) < 1e-5
    mixed = one | {"segment": np.ones_like(one["segment"])}  # the second document would read the first
    assert abs(graded(model, bd.Config(low=1.0), variables, mixed["tokens"], KEY, mixed["segment"], mixed["trained"])[0][0] - packed) > 1e-3


def seen_tokens(tokens, segment, trained, config):
    """Returns the noisy rows that the objective shows a model of length 8."""
    seen = []

    def forward(cache, tokens_BQ, positions_BQ, mask, at_BW=None, segment_BQ=None):
        seen.append(np.asarray(tokens_BQ[:, tokens.shape[1] :]))
        return jnp.zeros((len(tokens), tokens.shape[1], 6)), cache

    functions = types.SimpleNamespace(forward=forward, block=BLOCK, mask_id=5, vocab=6)
    total, metrics = bd.loss(functions, jnp.asarray(tokens), KEY, config, segment_BL=jnp.asarray(segment), trained_BL=jnp.asarray(trained))
    return seen[0], total, metrics


def test_prompts_are_read_and_padding_is_a_switch():
    """https://github.com/ZHZisZZ/dllm/issues/81: trained padding is at most a block's rest; untrained, it is neither scored nor shown, or
    the model would read off where the text ends. What fills a row up never counts."""
    documents = [([0, 1], [2, 3, 4])]
    off, on = (pack(documents, 12, BLOCK, 0, train_padding) for train_padding in (False, True))
    config = bd.Config(low=1.0)
    seen, total, metrics = seen_tokens(off["tokens"], off["segment"], off["trained"], config)
    assert seen[0, :8].tolist() == [0, 1, 5, 5, 5, 5, 5, 5]
    assert metrics["tokens"] == 3
    assert total == pytest.approx(math.log(5), rel=1e-6)  # flat logits: the normaliser counts what is scored, no padding
    seen, total, metrics = seen_tokens(on["tokens"], on["segment"], on["trained"], config)
    assert seen[0, :8].tolist() == [0, 1, 5, 5, 5, 5, 5, 5]
    assert metrics["tokens"] == 3 + 3
    assert total == pytest.approx(math.log(5), rel=1e-6)
    for seed in range(20):  # whatever is drawn, a prompt is shown
        noise = bd.corrupt(jax.random.key(seed), TRAINED, BLOCK, bd.Config())
        assert not (noise.masked_BL & ~TRAINED).any()


def test_mask_id_is_the_models_and_is_never_predicted(variables):
    """https://github.com/hxhcreate/DARE/issues/13: the objective has no mask id of its own. And whatever logit a model gives MASK, it
    has no share in the loss."""
    joint = random_joint(3, 3, 3)
    total = lambda model: jax.jit(lambda texts: bd.loss(model, texts, KEY, bd.Config())[0])(joint.texts())
    loud, silent = total(joint), total(Joint(joint.law, 3, -9.0))
    np.testing.assert_allclose(loud, silent, rtol=1e-6)
    none = qwen3.Config(**vars(MODEL) | {"mask_id": -1})
    with pytest.raises(UserError, match="MASK"):
        graded(none, bd.Config(), variables, TOKENS, KEY)
    for mask_id in (0, 5):
        seen = []
        model = types.SimpleNamespace(block=BLOCK, mask_id=mask_id)
        model.forward = lambda cache, tokens, *_: seen.append(tokens) or (jnp.zeros((4, LENGTH, 6)), None)  # noqa: B023
        bd.loss(model, jnp.ones((4, LENGTH), jnp.int32), KEY, bd.Config(low=1.0))
        assert (seen[0][:, LENGTH:] == mask_id).all()
        assert (seen[0][:, :LENGTH] == 1).all()


def test_bfloat16_logits_are_scored_in_float32(variables):
    model = qwen3.Config(**vars(MODEL) | {"dtype": "bfloat16"})
    (total, _), grads = graded(model, bd.Config(), variables, TOKENS, KEY, None, TRAINED)
    assert total.dtype == jnp.float32
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(grads))
    exact = graded(MODEL, bd.Config(), variables, TOKENS, KEY, None, TRAINED)[0][0]
    assert abs(total - exact) < 0.02 * exact


@pytest.mark.parametrize(
    "bad, text",
    [
        (dict(low=0.0), "0 < low"),
        (dict(low=0.9, high=0.8), "0 < low"),
        (dict(low=0.3, high=0.8, complementary=True), "must be 1"),
        (dict(low=0.3, sdar_public=True), "sdar_public settles"),
        (dict(parts=0), "objective.parts"),
    ],
)
def test_bad_configs_are_refused(bad, text):
    with pytest.raises(UserError, match=text):
        bd.Config(**bad)
