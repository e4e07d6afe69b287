"""Gain and acceptance by rank and window start, on a small hybrid with random weights."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.data.tokenizers import CHARACTERS
from dllm.diffusion import ssmd
from dllm.diffusion.corruption import any_order
from dllm.evals import ranks
from dllm.models import hybrid

LENGTH = 12
CONFIG = hybrid.Config(length=LENGTH, width=16, n_noncausal=1, n_causal=1, heads=2, mlp=32, remat=False)
TOKENS = np.random.default_rng(0).integers(0, 27, (5, LENGTH))
STARTS = (0, 1, 4, 11)


@functools.cache
def fresh(config):
    return hybrid.init(config, jax.random.key(1))["params"]


def loaded(gain, config=CONFIG):
    """A run whose causal output is multiplied by `gain`: with 0 the target is the draft."""
    params = fresh(config) | ({"gain": jnp.full((config.width,), gain)} if config.n_causal else {})
    return SimpleNamespace(model_module=hybrid, model_config=config, variables={"params": params}, tokenizer=CHARACTERS)


@jax.jit
def laws(ranked_BL, order_BL, revealed_B):
    return hybrid.bind(CONFIG, loaded(1.0).variables).both(ranked_BL, order_BL, revealed_B)


@pytest.fixture(scope="module")
def found():
    return ranks.by_rank(loaded(1.0), TOKENS, STARTS, seed=3)


def test_default_starts():
    assert ranks.default_starts(64) == (0, 1, 2, 4, 8, 16, 32, 48, 63)
    assert ranks.default_starts(32) == (0, 1, 2, 4, 8, 16, 24, 31)
    assert ranks.default_starts(1) == (0,)


def test_ranks_before_the_start_are_left_out_and_rank_0_is_tied(found):
    for s, start in enumerate(STARTS):
        for values in (found.gain, found.acceptance):
            assert np.isnan(values[:, s, :start]).all()
            assert np.isfinite(values[:, s, start:]).all()
    assert np.abs(found.gain[:, 0, 0]).max() == 0
    assert found.acceptance[:, 0, 0] == pytest.approx(1, abs=1e-6)
    assert (np.abs(found.gain[:, 0, 1:]) > 1e-3).all()
    assert (found.acceptance[:, 0, 1:] < 0.999).all()


def test_a_target_that_is_the_draft_gains_nothing():
    found = ranks.by_rank(loaded(0.0), TOKENS, STARTS)
    assert np.nanmax(np.abs(found.gain)) == pytest.approx(0, abs=1e-6)
    assert np.nanmin(found.acceptance) == pytest.approx(1, abs=1e-6)


def test_values_are_those_of_the_laws(found):
    """Chunk 4 in its own order, start 4, written out in numpy."""
    start = 4
    order_BL = jnp.tile(any_order(jax.random.fold_in(jax.random.key(3), 4), 1, LENGTH)[0], (LENGTH, 1))
    ranked_BL = jnp.take_along_axis(jnp.tile(jnp.asarray(TOKENS[4:5], jnp.int32), (LENGTH, 1)), order_BL, 1)
    probability = [np.exp(np.asarray(x[0], np.float64)) for x in laws(ranked_BL, order_BL, jnp.full((LENGTH,), start, jnp.int32))]
    draft_LV, target_LV = (p / p.sum(axis=1, keepdims=True) for p in probability)
    at = np.arange(start, LENGTH), np.asarray(ranked_BL)[0, start:]
    assert found.gain[4, 2, start:] == pytest.approx(np.log2(target_LV[at] / draft_LV[at]), abs=1e-4)
    assert found.acceptance[4, 2, start:] == pytest.approx(np.minimum(draft_LV, target_LV).sum(axis=1)[start:], abs=1e-5)


def test_a_chunks_order_depends_on_seed_and_number_alone(found, monkeypatch):
    monkeypatch.setattr(ranks, "ROWS", 8)  # two chunks a pass; the last of five is alone
    np.testing.assert_allclose(ranks.by_rank(loaded(1.0), TOKENS, STARTS, seed=3).gain, found.gain, atol=1e-5)
    np.testing.assert_allclose(ranks.by_rank(loaded(1.0), TOKENS[:2], STARTS, seed=3).gain, found.gain[:2], atol=1e-5)
    other = ranks.by_rank(loaded(1.0), TOKENS[:2], STARTS, seed=4)
    assert np.nanmax(np.abs(other.gain - found.gain[:2])) > 0.1


def test_averages_are_the_objectives_metrics():
    key, tokens_BL = jax.random.key(5), jnp.asarray(np.random.default_rng(1).integers(0, 27, (LENGTH, LENGTH)), jnp.int32)
    order_BL, revealed_B = any_order(key, LENGTH, LENGTH)
    ranked_BL = jnp.take_along_axis(tokens_BL, order_BL, 1)
    gain_BL, acceptance_BL = jax.device_get(jax.jit(ranks.compare_laws)(*laws(ranked_BL, order_BL, revealed_B), ranked_BL, revealed_B))
    metrics = ssmd.loss(SimpleNamespace(both=laws), tokens_BL, key, ssmd.Config())[1]
    weight_BL = np.where(np.isnan(gain_BL), 0, 1 / (LENGTH - np.asarray(revealed_B))[:, None])
    weight_BL[:, 0] = 0
    average = lambda x_BL: (weight_BL * np.nan_to_num(x_BL)).sum() / weight_BL.sum()
    assert average(gain_BL) == pytest.approx(float(metrics["draft_ce"] - metrics["causal_ce"]), abs=1e-5)
    assert average(acceptance_BL) == pytest.approx(float(metrics["agreement"]), abs=1e-5)


def test_by_offset():
    """Length 4, bins 0, 1, 2-3: what lies beyond the end is nan, and the chunk is the unit of the stderr."""
    assert ranks.offset_bins(4) == [(0, 1), (1, 2), (2, 4)]
    assert ranks.offset_bins(12)[-2:] == [(4, 8), (8, 12)]
    values = np.array([[[1.0, 2, 3, 5], [np.nan, np.nan, 4, 6]], [[3.0, 2, 5, 7], [np.nan, np.nan, 8, 6]]])
    mean, stderr = ranks.by_offset(values, (0, 2))
    np.testing.assert_allclose(mean, [[2, 2, 5], [6, 6, np.nan]])
    np.testing.assert_allclose(stderr, [[1, 0, 1], [2, 0, np.nan]])
    assert np.isnan(ranks.by_offset(values[:1], (0, 2))[1]).all()


def test_bad_input():
    with pytest.raises(UserError, match="no causal layers"):
        ranks.by_rank(
            loaded(0.0, hybrid.Config(length=LENGTH, width=16, n_noncausal=1, n_causal=0, heads=2, mlp=32, remat=False)), TOKENS, STARTS
        )
    with pytest.raises(UserError, match="can't start at rank 12; ranks go from 0 to 11"):
        ranks.by_rank(loaded(1.0), TOKENS, (0, 12))
