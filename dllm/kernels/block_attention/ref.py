"""The definition of block attention: what every kernel has to equal. It makes the whole square of scores."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from dllm.ops.masks import CleanNoisy, Mask


def reference(
    q: Float[Array, "B Q H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    *,
    scale: float,
    segment_ids: Int[Array, "B S"] | None = None,
    kv_lengths: Int[Array, "B"] | None = None,
    start: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B Q H K"], Float[Array, "B H Q"]]:
    """Returns (softmax(scale q k^T) v, the log-sum-exp of each query's scores), softmax in float32 or wider.

    Where CleanNoisy is frozen, the clean rows' queries, keys and values get no gradient.
    Queries have the indices start, start + 1, .. (start: 0), keys 0, 1, ... A query reads what the mask allows, of its own segment, before
    kv_lengths. One that reads nothing gives zeros, and -inf.
    """
    (B, Q, H, K), (S, G) = q.shape, k.shape[1:3]
    if isinstance(mask, CleanNoisy) and mask.frozen:
        q, k, v = (jnp.concatenate([lax.stop_gradient(x[:, : mask.length]), x[:, mask.length :]], 1) for x in (q, k, v))
    start_B11 = jnp.zeros((B, 1, 1), jnp.int32) if start is None else start[:, None, None]
    query_index, key_index = start_B11 + jnp.arange(Q, dtype=jnp.int32)[None, :, None], jnp.arange(S, dtype=jnp.int32)[None, None]
    allow_BQS = jnp.broadcast_to(mask.allowed(query_index, key_index, start_B11), (B, Q, S))
    if segment_ids is not None:
        allow_BQS &= segment_ids[:, :Q, None] == segment_ids[:, None, :]
    if kv_lengths is not None:
        allow_BQS &= key_index < kv_lengths[:, None, None]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q_BQGRK, k, v = q.astype(wide).reshape(B, Q, G, H // G, K), k.astype(wide), v.astype(wide)
    score_BGRQS = jnp.einsum("bqgrk,bsgk->bgrqs", q_BQGRK, k, precision="highest") * scale
    score_BGRQS = jnp.where(allow_BQS[:, None, None], score_BGRQS, -jnp.inf)
    lse_BGRQ = jax.nn.logsumexp(score_BGRQS, -1)
    weight_BGRQS = jnp.exp(score_BGRQS - jnp.where(jnp.isfinite(lse_BGRQ), lse_BGRQ, 0)[..., None])
    out_BQGRK = jnp.einsum("bgrqs,bsgk->bqgrk", weight_BGRQS, v, precision="highest")
    return out_BQGRK.reshape(B, Q, H, K).astype(q.dtype), lse_BGRQ.reshape(B, H, Q)
