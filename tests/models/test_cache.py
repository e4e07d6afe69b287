"""What the cache says when it is full, and which rows it keeps. What it holds is tested with the decoder: tests/models/test_decoder.py,
test_qwen3.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dllm.core.types import UserError
from dllm.models import attention as attention_module
from dllm.models.attention import attention, cached_attention
from dllm.models.cache import Cache, require_room
from dllm.ops import masks


def test_a_pass_that_would_not_fit_is_an_error_before_it():
    cache = Cache.empty(1, 3, 8, 1, 2, jnp.float32).replace(lengths_B=jnp.asarray([2, 5, 0]))
    require_room(cache, 3)
    with pytest.raises(UserError, match=r"row 1 of the cache is filled to 5 of 8 slots; there is no room for 4 more"):
        require_room(cache, 4)


def test_a_pass_longer_than_the_cache_does_not_compile():
    cache, rows = Cache.empty(1, 3, 8, 1, 2, jnp.float32), jnp.zeros((3, 9, 1, 2))
    with pytest.raises(UserError, match="9 rows doesn't fit a cache of 8 slots"):
        jax.jit(lambda c: c.write(jnp.int32(0), rows, rows))(cache)


def numbered(lengths):
    """A cache in which every number is its own."""
    shape = (2, len(lengths), 8, 2, 3)
    k = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    return Cache(k, -k - 1, jnp.asarray(lengths, jnp.int32))


def kept(cache, rows, n):
    """The definition, slot by slot."""
    k, v = np.array(cache.k), np.array(cache.v)
    for b, start in enumerate(np.asarray(cache.lengths_B)):
        for to, row in enumerate(rows[b][: n[b]]):
            k[:, b, start + to] = cache.k[:, b, start + row]
            v[:, b, start + to] = cache.v[:, b, start + row]
    return k, v


@pytest.mark.parametrize(
    "rows, n",
    [
        ([[0, 2, 3], [0, 1, 2], [0, 3, 4]], [3, 3, 2]),  # a tree's paths
        ([[3, 2, 1], [2, 0, 1], [1, 1, 1]], [3, 3, 3]),  # overlapping, in any order
        ([[4, 0, 0], [9, 9, 9], [0, 0, 0]], [1, 0, 0]),
    ],
)
def test_keep_moves_the_rows_that_count_and_no_other(rows, n):
    cache = numbered([0, 3, 2])
    after = jax.jit(Cache.keep)(cache, jnp.asarray(rows, jnp.int32), jnp.asarray(n, jnp.int32))
    k, v = kept(cache, rows, n)
    np.testing.assert_array_equal(after.k, k)
    np.testing.assert_array_equal(after.v, v)
    np.testing.assert_array_equal(after.lengths_B, np.asarray(cache.lengths_B) + n)


def test_keep_up_to_the_last_slot():
    """Rows that don't count may stand for slots beyond the end."""
    cache, rows = numbered([4, 6]), [[0, 3, 3, 3], [0, 1, 7, 7]]
    after = cache.keep(jnp.asarray(rows, jnp.int32), jnp.asarray([4, 2], jnp.int32))
    np.testing.assert_array_equal(after.k, kept(cache, rows, [4, 2])[0])
    np.testing.assert_array_equal(after.lengths_B, [8, 8])


def test_keep_in_a_loop_holds_no_second_cache_and_needs_no_other_device():
    cache = jax.eval_shape(lambda: Cache.empty(8, 8, 2048, 2, 16, jnp.float32))
    rows, n = jnp.tile(jnp.asarray([[0, 2, 5, 6]], jnp.int32), (8, 1)), jnp.full((8,), 3, jnp.int32)
    loop = lambda cache: lax.while_loop(lambda c: (c.lengths_B < 1024).any(), lambda c: c.keep(rows, n), cache)
    memory = jax.jit(loop, donate_argnums=0).lower(cache).compile().memory_analysis()
    size = sum(x.size * x.dtype.itemsize for x in (cache.k, cache.v))
    assert memory.temp_size_in_bytes < 0.05 * size
    assert memory.alias_size_in_bytes >= size

    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    at = lambda spec: lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    over = Cache(*(at(P(None, "data"))(x) for x in (cache.k, cache.v)), at(P("data"))(cache.lengths_B))
    text = jax.jit(Cache.keep).lower(over, *(at(P("data"))(x) for x in (rows, n))).compile().as_text()
    assert not any(name in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


TREE = jnp.asarray([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], bool)
PATHS = [[0], [0, 1], [0, 2], [0, 1, 3]]


@pytest.mark.parametrize("chunk", [512, 8])
def test_a_tree_reads_its_paths_whether_the_cache_is_short_or_read_in_chunks(chunk, monkeypatch, float64):
    """Each node's row is the last one of a causal pass over its path. 21 slots in chunks of 8; unfilled slots hold numbers that show."""
    monkeypatch.setattr(attention_module, "CHUNK", chunk)
    keys, values = (50 * jax.random.normal(jax.random.key(i), (3, 4, 21, 2, 8), jnp.float64) for i in (1, 2))
    q = jax.random.normal(jax.random.key(0), (4, 4, 4, 8), jnp.float64)
    cache = Cache(keys, values, jnp.asarray([0, 4, 7, 17], jnp.int32))
    mask = masks.Ancestors(jnp.tile(TREE[None], (4, 1, 1)))
    got = jax.jit(lambda q, cache, mask: cached_attention(q, cache, jnp.int32(1), mask))(q, cache, mask)
    for node, path in enumerate(PATHS):
        rows = jnp.tile(jnp.asarray([path], jnp.int32), (4, 1))
        plain = cache.keep(rows, jnp.full((4,), len(path))).replace(lengths_B=cache.lengths_B)
        want = cached_attention(q[:, jnp.asarray(path)], plain, jnp.int32(1), masks.causal)[:, -1]
        np.testing.assert_allclose(got[:, node], want, atol=1e-12)


def test_a_tree_without_a_cache():
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 4, heads, 8)) for i, heads in enumerate((4, 2, 2)))
    got = attention(q, k, v, masks.Ancestors(jnp.tile(TREE[None], (2, 1, 1))))
    for node, path in enumerate(PATHS):
        at = jnp.asarray(path)
        np.testing.assert_allclose(got[:, node], attention(q[:, at], k[:, at], v[:, at], masks.causal)[:, -1], atol=1e-6)
