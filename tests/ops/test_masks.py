import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.ops import masks


@pytest.mark.parametrize("mask", [masks.full, masks.causal, masks.BlockCausal(2), masks.CleanNoisy(1, 2)])
def test_picture_in_the_docstring_is_what_show_draws(mask):
    assert "\n\n" + mask.show() in inspect.getdoc(type(mask))


def test_dense_against_numpy():
    np.testing.assert_array_equal(masks.causal.dense(3, 5), np.tri(3, 5, dtype=bool))
    np.testing.assert_array_equal(masks.full.dense(3, 5), np.ones((3, 5), bool))


@pytest.mark.parametrize("mask", [masks.full, masks.causal])
def test_allowed_broadcasts_its_indices(mask):
    """With a cache, queries stand at per-row indices: allowed(index [B Q 1], index [1 1 S]) is the rows of `dense` at these indices."""
    query_BQ1 = jnp.array([[0, 1], [2, 3]])[:, :, None]
    np.testing.assert_array_equal(
        mask.allowed(query_BQ1, jnp.arange(4)[None, None], query_BQ1 * 0), np.asarray(mask.dense(4, 4)).reshape(2, 2, 4)
    )


def test_static_through_jit_and_compared_by_value():
    traced = []

    @jax.jit
    def count(mask, x):
        traced.append(mask)
        return x + mask.dense(2, 2).sum()

    assert [int(count(m, 0)) for m in (masks.full, masks.Full(), masks.causal)] == [4, 4, 3]
    assert traced == [masks.full, masks.causal]
