import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.diffusion.corruption import any_order

draw = jax.jit(any_order, static_argnums=(1, 2))


@pytest.mark.parametrize("batch, length", [(8, 8), (4, 100), (100, 3)])
def test_revealed_is_stratified(batch, length):
    """Every bin of width L / B that the shifted grid hits holds its share: sorted, i_b is within one of the grid through u."""
    for seed in range(20):
        _, revealed = draw(jax.random.key(seed), batch, length)
        assert revealed.min() >= 0
        assert revealed.max() <= length - 1
        if batch == length:
            assert sorted(revealed.tolist()) == list(range(length))
        gaps = np.diff(np.sort(revealed))
        assert gaps.max() <= length / batch + 1


def test_orders_are_uniform_and_revealed_is_uniform():
    orders, revealed = zip(*(draw(jax.random.key(seed), 64, 3) for seed in range(200)))
    orders, revealed = np.concatenate(orders), np.concatenate(revealed)
    codes, counts = np.unique(orders @ [9, 3, 1], return_counts=True)
    assert len(codes) == 6
    expected = len(orders) / 6
    assert ((counts - expected) ** 2 / expected).sum() < 25  # chi-square, 5 degrees of freedom: false alarm 1.4e-4
    np.testing.assert_allclose(np.bincount(revealed) / len(revealed), 1 / 3, atol=0.01)


def test_given_positions_come_first_and_are_always_revealed():
    given = jnp.array([0, 1, 5, 9] * 8)
    for seed in range(20):
        order, revealed = jax.jit(lambda key: any_order(key, 32, 10, jnp.arange(10)[None] < given[:, None]))(jax.random.key(seed))
        np.testing.assert_array_equal(np.sort(order, 1), np.arange(10)[None].repeat(32, 0))
        assert (revealed >= given).all()
        assert (revealed <= 9).all()
        for row, n in zip(order, given.tolist()):
            assert set(row[:n].tolist()) == set(range(n))
    assert (order[0::4, 0] != 0).any()  # nothing given, nothing fixed


def test_no_row_has_nothing_masked_even_where_float32_rounds_up(monkeypatch):
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape=(): jnp.full(shape, np.float32(1 - 2**-24)))
    _, revealed = any_order(jax.random.key(0), 1, 100)
    assert revealed.tolist() == [99]
