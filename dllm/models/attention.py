"""The one call site of attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dllm.ops.masks import CleanNoisy, Mask


def attention(
    q_BQHK: Float[Array, "B Q H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGK: Float[Array, "B S G K"],
    mask: Mask,
    start_B: Int[Array, "B"] | None = None,
    segment_BL: Int[Array, "B L"] | None = None,
) -> Float[Array, "B Q H K"]:
    """Returns grouped-query attention, softmax(q k^T / sqrt(K)) v, with H / G query heads to a key head.

    Query row r has index start + r, key column s has index s; the mask compares these. With `start_B` the keys are a cache of which
    only start + Q columns are filled. Without it queries and keys are the same rows, from index 0. `segment` numbers the documents of
    packed rows (no cache then): a row reads only keys of its own document.
    """
    if start_B is None and isinstance(mask, CleanNoisy) and mask.length % mask.block == 0:
        return _clean_noisy(q_BQHK, k_BSGK, v_BSGK, mask, segment_BL)
    B, Q, H, K = q_BQHK.shape
    S, G = k_BSGK.shape[1:3]
    first_B11 = jnp.zeros((1, 1, 1), jnp.int32) if start_B is None else start_B[:, None, None]
    query_index, key_index = first_B11 + jnp.arange(Q, dtype=jnp.int32)[None, :, None], jnp.arange(S, dtype=jnp.int32)[None, None]
    allow_BQS = mask.allowed(query_index, key_index, first_B11)
    if start_B is not None:
        allow_BQS &= key_index < first_B11 + Q
    if segment_BL is not None:
        allow_BQS &= segment_BL[:, :, None] == segment_BL[:, None, :]
    q_BQGRK = q_BQHK.reshape(B, Q, G, H // G, K)
    att_BGRQS = jnp.einsum("bqgrk,bsgk->bgrqs", q_BQGRK, k_BSGK, preferred_element_type=jnp.promote_types(q_BQHK.dtype, jnp.float32))
    att_BGRQS = jax.nn.softmax(jnp.where(allow_BQS[:, None, None], att_BGRQS * K**-0.5, -1e30))
    return jnp.einsum("bgrqs,bsgk->bqgrk", att_BGRQS.astype(v_BSGK.dtype), v_BSGK).reshape(B, Q, H, K)


def _clean_noisy(
    q_BQHK: Float[Array, "B Q H K"],
    k_BQGK: Float[Array, "B Q G K"],
    v_BQGK: Float[Array, "B Q G K"],
    mask: CleanNoisy,
    segment_BQ: Int[Array, "B Q"] | None,
) -> Float[Array, "B Q H K"]:
    """Returns attention under [clean ; noisy] in two parts, merged by their log-sum-exps: all rows over the clean keys, the noisy rows over
    those of their own block. 2L x L scores and L x block of them, where the whole square would be 2L x 2L."""
    (B, Q, H, K), G, L, W = q_BQHK.shape, k_BQGK.shape[2], mask.length, mask.block
    wide = jnp.promote_types(q_BQHK.dtype, jnp.float32)
    index_Q, zero = jnp.arange(Q, dtype=jnp.int32), jnp.zeros((), jnp.int32)
    q_BQGRK = q_BQHK.reshape(B, Q, G, H // G, K)
    blocks = lambda x: x[:, L:].reshape(B, L // W, W, *x.shape[2:])

    prefix_BQL = mask.allowed(index_Q[None, :, None], index_Q[None, None, :L], zero)
    at_NW = index_Q[L:].reshape(L // W, W)
    own_BNWW = mask.allowed(at_NW[None, :, :, None], at_NW[None, :, None, :], zero)
    if segment_BQ is not None:
        prefix_BQL &= segment_BQ[:, :, None] == segment_BQ[:, None, :L]
        own_BNWW &= blocks(segment_BQ)[:, :, :, None] == blocks(segment_BQ)[:, :, None, :]

    score = lambda spec, q, k, allow: jnp.where(allow, jnp.einsum(spec, q, k, preferred_element_type=wide) * K**-0.5, -1e30)
    prefix_BGRQL = score("bqgrk,bsgk->bgrqs", q_BQGRK, k_BQGK[:, :L], prefix_BQL[:, None, None])
    own_BGRNWW = score("bnqgrk,bnsgk->bgrnqs", blocks(q_BQGRK), blocks(k_BQGK), own_BNWW[:, None, None])
    total_BGRQ = jax.nn.logsumexp(prefix_BGRQL, -1)
    noisy_BGRL = jnp.logaddexp(total_BGRQ[..., L:], jax.nn.logsumexp(own_BGRNWW, -1).reshape(B, G, H // G, L))
    total_BGRQ = jnp.concatenate([total_BGRQ[..., :L], noisy_BGRL], -1)

    weight = lambda scores, total: jnp.exp(scores - total[..., None]).astype(v_BQGK.dtype)
    mixed_BQGRK = jnp.einsum("bgrqs,bsgk->bqgrk", weight(prefix_BGRQL, total_BGRQ), v_BQGK[:, :L])
    own_BGRNWW = weight(own_BGRNWW, noisy_BGRL.reshape(B, G, H // G, L // W, W))
    own_BNWGRK = jnp.einsum("bgrnqs,bnsgk->bnqgrk", own_BGRNWW, blocks(v_BQGK))
    return mixed_BQGRK.at[:, L:].add(own_BNWGRK.reshape(B, L, G, H // G, K)).reshape(B, Q, H, K)
