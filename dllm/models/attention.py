"""The one call site of attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dllm.ops.masks import Mask


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
    B, Q, H, K = q_BQHK.shape
    S, G = k_BSGK.shape[1:3]
    first_B11 = jnp.zeros((1, 1, 1), jnp.int32) if start_B is None else start_B[:, None, None]
    query_index, key_index = first_B11 + jnp.arange(Q)[None, :, None], jnp.arange(S)[None, None, :]
    allow_BQS = mask.allowed(query_index, key_index, first_B11)
    if start_B is not None:
        allow_BQS &= key_index < first_B11 + Q
    if segment_BL is not None:
        allow_BQS &= segment_BL[:, :, None] == segment_BL[:, None, :]
    q_BQGRK = q_BQHK.reshape(B, Q, G, H // G, K)
    att_BGRQS = jnp.einsum("bqgrk,bsgk->bgrqs", q_BQGRK, k_BSGK, preferred_element_type=jnp.promote_types(q_BQHK.dtype, jnp.float32))
    att_BGRQS = jax.nn.softmax(jnp.where(allow_BQS[:, None, None], att_BGRQS * K**-0.5, -1e30))
    return jnp.einsum("bgrqs,bsgk->bqgrk", att_BGRQS.astype(v_BSGK.dtype), v_BSGK).reshape(B, Q, H, K)
