import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.models.attention import attention
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
