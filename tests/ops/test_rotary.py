import jax.numpy as jnp
import numpy as np

from dllm.ops.rotary import rotary_table, rotate

rng = np.random.default_rng(0)


def test_rotate_against_complex_numbers():
    x, positions, theta, K = rng.normal(size=(2, 3, 2, 8)).astype(np.float32), np.array([[0, 1, 7], [5, 5, 100]]), 100.0, 8
    z = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[:, :, None, None] * theta ** (-np.arange(4) / 4))
    got = rotate(jnp.asarray(x), rotary_table(jnp.asarray(positions)[:, :, None], K, theta))
    np.testing.assert_allclose(got, np.concatenate([z.real, z.imag], -1), atol=1e-5)


def test_groups_turn_by_their_own_position():
    """With P = 2 the first half of the channel pairs turns by positions[..., 0], the second by positions[..., 1]."""
    x, positions = jnp.asarray(rng.normal(size=(2, 5, 1, 8)), jnp.float32), jnp.asarray(rng.integers(0, 50, (2, 5, 2)))
    got = rotate(x, rotary_table(positions, 8, 1e3))
    for pair, group in [(0, 0), (1, 0), (2, 1), (3, 1)]:
        angle = np.asarray(positions[:, :, group]) * 1e3 ** (-(pair % 2) / 2)  # each group has the whole range of frequencies
        a, b = np.asarray(x[:, :, 0, pair]), np.asarray(x[:, :, 0, pair + 4])
        np.testing.assert_allclose(got[:, :, 0, pair], a * np.cos(angle) - b * np.sin(angle), atol=1e-5)
        np.testing.assert_allclose(got[:, :, 0, pair + 4], b * np.cos(angle) + a * np.sin(angle), atol=1e-5)


def test_scores_depend_on_the_offset_between_the_two_sides():
    """Crossed tables (queries by next, keys by current and next) make a score a function of next - current of the key and next - next."""
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def score(query_next, key_current, key_next):
        at = lambda *p: rotary_table(jnp.asarray(p)[None, None], 8, 1e2)
        return float((rotate(q, at(query_next, query_next)) * rotate(k, at(key_current, key_next))).sum())

    np.testing.assert_allclose(score(9, 4, 6), score(29, 24, 26), atol=1e-4)
    assert abs(score(9, 4, 6) - score(9, 5, 6)) > 1e-2
    assert abs(score(9, 4, 6) - score(9, 4, 7)) > 1e-2


def test_bfloat16_stays():
    x = jnp.ones((1, 2, 1, 4), jnp.bfloat16)
    assert rotate(x, rotary_table(jnp.array([[[0], [3]]]), 4, 1e4)).dtype == jnp.bfloat16
