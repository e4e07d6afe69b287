from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.ops.passes import count, nfe, nfe_weighted, no_passes
from dllm.ops.windows import window_table


def passes(table):
    i = n = 0
    while i < len(table):
        i, n = i + int(table[i]), n + 1
    assert i == len(table)
    return n


@pytest.mark.parametrize(
    "length, rate, expect",
    [
        (256, 0.002, 256),
        (256, 0.005, 141),
        (256, 0.01, 80),
        (256, 0.02, 44),
        (256, 0.04, 24),
        (256, 0.083, 12),
        (1024, 0.01, 92),
        (1024, 0.083, 12),
    ],
)
def test_cosine_passes(length, rate, expect):
    """The numbers of outer passes that are known for the cosine window."""
    assert passes(window_table("cosine", length, rate)) == expect


def test_shapes():
    np.testing.assert_array_equal(window_table("linear", 4, 4.0), [1, 2, 2, 1])  # i + 1, cut at the end
    np.testing.assert_array_equal(window_table("constant", 4, 3.0), [3, 3, 2, 1])
    assert passes(window_table("cosine", 64, 1.0)) == 1


@pytest.mark.parametrize("shape, rate", [("cosine", 0.0), ("cosine", 1.5), ("linear", 0.5), ("constant", 0.0), ("square", 1.0)])
def test_bad_windows(shape, rate):
    with pytest.raises(UserError):
        window_table(shape, 8, rate)


def test_passes():
    p = no_passes(2)
    live = jnp.asarray([True, False])
    p = count(count(count(p, "noncausal", live, 64), "causal", live, 8), "causal", ~live, 8)
    np.testing.assert_array_equal(p.query_tokens, [72, 8])
    np.testing.assert_array_equal(nfe(p), [1, 0])
    np.testing.assert_allclose(nfe_weighted(p, 11, 1), [1, 1 / 12])
    p = count(count(p, "prefill", live, 64), "ar", live, 1)
    np.testing.assert_array_equal(nfe(p), [2, 0])
    np.testing.assert_allclose(nfe_weighted(p, 11, 1), [2, 1 / 12])
