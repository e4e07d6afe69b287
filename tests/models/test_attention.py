import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.models import attention as attention_module
from dllm.models.attention import attention, cached_attention
from dllm.models.cache import Cache
from dllm.ops import masks

B, L, H, G, K, BLOCK = 2, 12, 4, 2, 8, 4


def dense(q, k, v, mask, segment=None):
    """The definition, head by head, with the whole 2L x 2L square."""
    allow = jnp.broadcast_to(mask.dense(2 * L, 2 * L)[None], (B, 2 * L, 2 * L))
    if segment is not None:
        allow &= segment[:, :, None] == segment[:, None]
    k, v = (jnp.repeat(x, H // G, 2) for x in (k, v))
    score = jnp.where(allow[:, None], jnp.einsum("bqhk,bshk->bhqs", q, k) / K**0.5, -jnp.inf)
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(score), v)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_clean_noisy_in_two_parts_is_the_whole_square(causal, packed, float64):
    """Values and gradients. Without a prefix (a document's first block) only the own block counts."""
    mask = masks.CleanNoisy(BLOCK, L, causal)
    rows = jnp.array([[1] * 4 + [2] * 8, [1] * 8 + [0] * 4])
    segment = jnp.concatenate([rows, rows], 1) if packed else None
    qkv = [jax.random.normal(jax.random.key(i), (B, 2 * L, heads, K), jnp.float64) for i, heads in enumerate((H, G, G))]
    scored = lambda f: jax.jit(jax.value_and_grad(lambda qkv: jnp.sin(f(*qkv)).sum()))(qkv)
    ours = scored(lambda q, k, v: attention(q, k, v, mask, segment_BL=segment))
    for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(scored(lambda q, k, v: dense(q, k, v, mask, segment))), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-12)


def test_frozen_clean_rows_have_no_gradient_and_leave_the_noisy_rows_theirs(float64):
    """Where the clean rows are a constant of what is trained, the gradient of the noisy rows is the whole one."""
    clean, noisy = ([jax.random.normal(jax.random.key(i + n), (B, L, h, K), jnp.float64) for i, h in enumerate((H, G, G))] for n in (0, 9))

    def loss(clean, noisy, frozen):
        q, k, v = (jnp.concatenate(pair, 1) for pair in zip(clean, noisy, strict=True))
        return jnp.sin(attention(q, k, v, masks.CleanNoisy(BLOCK, L, True, frozen))).sum()

    whole, frozen = (jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)(clean, noisy, frozen) for frozen in (False, True))
    np.testing.assert_allclose(frozen[0], whole[0], atol=1e-12)
    for mine, theirs in zip(frozen[1][1], whole[1][1], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-12)
    assert all(not x.any() for x in frozen[1][0])
    assert all(x.any() for x in whole[1][0])


def test_clean_noisy_holds_no_whole_square():
    length = 512
    shapes = [jax.ShapeDtypeStruct((1, 2 * length, heads, K), jnp.float32) for heads in (1, 1, 1)]
    memory = jax.jit(lambda q, k, v: attention(q, k, v, masks.CleanNoisy(BLOCK, length))).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.2 * 4 * (2 * length) ** 2  # two copies of half a square, scores and weights


def test_bfloat16_follows_float32():
    mask, qkv = masks.CleanNoisy(BLOCK, L), [jax.random.normal(jax.random.key(i), (B, 2 * L, h, K)) for i, h in enumerate((H, G, G))]
    half = attention(*(x.astype(jnp.bfloat16) for x in qkv), mask)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), attention(*qkv, mask), atol=0.05)


@pytest.mark.parametrize(
    "mask", [masks.causal, masks.tail, masks.BlockCausal(4), masks.CleanNoisy(1, 2)], ids=lambda mask: type(mask).__name__
)
def test_a_long_cache_is_read_in_chunks_to_the_same_numbers(mask, monkeypatch, float64):
    """21 slots in chunks of 8: the last overlaps the one before. Slots that aren't filled hold numbers that would show."""
    slots, Q = 21, 4
    keys, values = (50 * jax.random.normal(jax.random.key(i), (3, 4, slots, G, K), jnp.float64) for i in (1, 2))
    q = jax.random.normal(jax.random.key(0), (4, Q, H, K), jnp.float64)
    cache = Cache(keys, values, jnp.array([0, 4, 8, 17], jnp.int32))
    run = lambda rows: jax.jit(lambda q, cache: cached_attention(q, cache, jnp.int32(1), mask))(q[rows], jax.tree.map(rows_of(rows), cache))
    rows_of = lambda rows: lambda x: x[:, rows] if x.ndim == 5 else x[rows]
    whole = run(slice(0, 4))
    monkeypatch.setattr(attention_module, "CHUNK", 8)
    chunked = run(slice(0, 4))
    np.testing.assert_allclose(chunked, whole, atol=1e-12)
    for b in range(4):  # a row's numbers don't hang on how far its neighbours are
        np.testing.assert_array_equal(run(slice(b, b + 1)), chunked[b : b + 1])


def test_a_long_cache_is_not_copied():
    slots = 8192
    cache = jax.eval_shape(lambda: Cache.empty(2, 1, slots, 2, 64, jnp.float32))
    q = jax.ShapeDtypeStruct((1, 4, 4, 64), jnp.float32)
    memory = jax.jit(lambda q, cache: cached_attention(q, cache, jnp.int32(1), masks.causal)).lower(q, cache).compile().memory_analysis()
    layer = 2 * slots * 2 * 64 * 4
    assert memory.temp_size_in_bytes < 0.2 * layer
