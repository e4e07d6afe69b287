"""The call sites of attention: over a pass's own rows, and over the cache. TPUs and GPUs run the kernels of kernels/block_attention.

Where a mesh is set each device computes the heads, and the rows of the batch, that lie on it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dllm.kernels.block_attention import block_attention, decode_attention, platform
from dllm.models.cache import Cache
from dllm.ops import mesh
from dllm.ops.masks import CleanNoisy, Mask

SQUARE = 1024  # rows of which XLA makes all scores at once, faster than tile by tile; of longer sequences it never does
CHUNK = 512  # cached keys read at a time where the cache is longer: no copy of a layer's keys, and none read behind the longest row


def attention(
    q_BLHK: Float[Array, "B L H K"],
    k_BLGK: Float[Array, "B L G K"],
    v_BLGK: Float[Array, "B L G K"],
    mask: Mask,
    segment_BL: Int[Array, "B L"] | None = None,
) -> Float[Array, "B L H K"]:
    """Returns grouped-query attention, softmax(q k^T / sqrt(K)) v, with H / G query heads to a key head.

    Queries and keys are the same rows, of index 0 and up; the mask compares these. `segment` numbers the documents of packed rows: a row
    reads only keys of its own document.
    """
    kv_heads = mesh.spread_heads(q_BLHK.shape[2], k_BLGK.shape[2])
    k_BLGK, v_BLGK = (jnp.repeat(x, kv_heads // x.shape[2], 2) for x in (k_BLGK, v_BLGK))
    axes = mesh.axes(q_BLHK.shape[0], kv_heads)
    heads, rows = PartitionSpec(axes[0], None, axes[1]), PartitionSpec(axes[0])
    return mesh.divided(_attention, (heads, heads, heads, rows, rows), heads)(q_BLHK, k_BLGK, v_BLGK, mask, segment_BL)


def cached_attention(q_BQHK: Float[Array, "B Q H K"], cache: Cache, layer: Int[Array, ""], mask: Mask) -> Float[Array, "B Q H K"]:
    """Returns attention over the keys and values of `layer`, into which this pass's rows were written (Cache.write).

    Query row r has index length + r, slot s has index s; the mask compares these. What lies beyond length + Q is not read.
    """
    axes = mesh.axes(q_BQHK.shape[0], cache.k.shape[3])
    heads, rows, slots = PartitionSpec(axes[0], None, axes[1]), PartitionSpec(axes[0]), PartitionSpec(None, axes[0], None, axes[1])
    return mesh.divided(_cached_attention, (heads, Cache(slots, slots, rows), PartitionSpec(), rows), heads)(q_BQHK, cache, layer, mask)


def _by_kernel(attend: Callable[[], Array]) -> Array | None:
    """Returns what the platform's kernel gives, None where it doesn't serve the case, with a line in the log; CPUs have none."""
    if platform() == "cpu":
        return None
    try:
        return attend()
    except NotImplementedError as reason:
        _say_once(f"attention runs without its kernel: {reason}")
        return None


@functools.cache
def _say_once(text: str) -> None:
    logging.getLogger(__name__).warning(text)


def _attention(q_BLHK: Any, k_BLGK: Any, v_BLGK: Any, mask: Mask, segment_BL: Any) -> Array:
    """Returns attention of the rows and heads of one device."""
    attend = functools.partial(block_attention, q_BLHK, k_BLGK, v_BLGK, mask, scale=q_BLHK.shape[-1] ** -0.5, segment_ids=segment_BL)
    if (mixed_BLHK := _by_kernel(attend)) is not None:
        return mixed_BLHK
    if q_BLHK.shape[1] > SQUARE:
        return attend(implementation="xla")
    if isinstance(mask, CleanNoisy) and mask.length % mask.block == 0:
        return clean_noisy_in_xla(q_BLHK, k_BLGK, v_BLGK, mask, segment_BL)
    index_L = jnp.arange(q_BLHK.shape[1], dtype=jnp.int32)
    allow_BLL = mask.allowed(index_L[None, :, None], index_L[None, None], jnp.zeros((1, 1, 1), jnp.int32))
    if segment_BL is not None:
        allow_BLL &= segment_BL[:, :, None] == segment_BL[:, None, :]
    return _mix(q_BLHK, k_BLGK, v_BLGK, allow_BLL)


def _cached_attention(q_BQHK: Any, cache: Cache, layer: Any, mask: Mask) -> Array:
    """Returns attention over the cached rows and heads of one device."""
    scale = q_BQHK.shape[-1] ** -0.5
    attend = functools.partial(decode_attention, q_BQHK, cache.k, cache.v, layer, cache.lengths_B, mask, scale=scale)
    mixed_BQHK = _by_kernel(attend)
    return cached_in_xla(q_BQHK, cache, layer, mask) if mixed_BQHK is None else mixed_BQHK


def cached_in_xla(q_BQHK: Float[Array, "B Q H K"], cache: Cache, layer: Int[Array, ""], mask: Mask) -> Float[Array, "B Q H K"]:
    """Returns what cached_attention does, without a kernel."""
    (B, Q, H, K), S, G = q_BQHK.shape, *cache.k.shape[2:4]
    start_B11 = cache.lengths_B[:, None, None]
    query_index = start_B11 + jnp.arange(Q, dtype=jnp.int32)[None, :, None]

    def allowed(key_index):
        return mask.allowed(query_index, key_index, start_B11) & (key_index < start_B11 + Q)

    if S <= CHUNK:
        k_BSGK, v_BSGK = (lax.dynamic_index_in_dim(c, layer, 0, keepdims=False) for c in (cache.k, cache.v))
        return _mix(q_BQHK, k_BSGK, v_BSGK, allowed(jnp.arange(S, dtype=jnp.int32)[None, None]))

    # Softmax in chunks (Milakov and Gimelshein, arXiv 1805.02867): of what was read so far, the largest score, and sums less by that.
    q_BQGRK = q_BQHK.reshape(B, Q, G, H // G, K)
    wide = jnp.promote_types(q_BQHK.dtype, jnp.float32)

    def read(c, state):
        most_BGRQ, total_BGRQ, mixed_BGRQK = state
        first = jnp.minimum(c * CHUNK, S - CHUNK)  # the last chunk begins earlier, and leaves out what was read
        zero = jnp.zeros_like(first)
        part = lambda kept: lax.dynamic_slice(kept, (layer.astype(first.dtype), zero, first, zero, zero), (1, B, CHUNK, G, K))[0]
        key_index = (first + jnp.arange(CHUNK, dtype=jnp.int32))[None, None]
        allow_BQC = allowed(key_index) & (key_index >= c * CHUNK)
        score_BGRQC = jnp.einsum("bqgrk,bcgk->bgrqc", q_BQGRK, part(cache.k), preferred_element_type=wide) * K**-0.5
        score_BGRQC = jnp.where(allow_BQC[:, None, None], score_BGRQC, -1e30)
        new_BGRQ = jnp.maximum(most_BGRQ, score_BGRQC.max(-1))
        keep_BGRQ, weight_BGRQC = jnp.exp(most_BGRQ - new_BGRQ), jnp.exp(score_BGRQC - new_BGRQ[..., None])
        more = jnp.einsum("bgrqc,bcgk->bgrqk", weight_BGRQC.astype(cache.v.dtype), part(cache.v), preferred_element_type=wide)
        return new_BGRQ, total_BGRQ * keep_BGRQ + weight_BGRQC.sum(-1), mixed_BGRQK * keep_BGRQ[..., None] + more

    shape = (B, G, H // G, Q)
    state = jnp.full(shape, -1e30, wide), jnp.zeros(shape, wide), jnp.zeros((*shape, K), wide)
    chunks = jnp.minimum(-(-(cache.lengths_B.max() + Q) // CHUNK), -(-S // CHUNK))
    _, total_BGRQ, mixed_BGRQK = lax.fori_loop(jnp.int32(0), chunks, read, state)
    mixed_BGRQK = (mixed_BGRQK / total_BGRQ[..., None]).astype(cache.v.dtype)
    return mixed_BGRQK.transpose(0, 3, 1, 2, 4).reshape(B, Q, H, K)


def _mix(
    q_BQHK: Float[Array, "B Q H K"], k_BSGK: Float[Array, "B S G K"], v_BSGK: Float[Array, "B S G K"], allow_BQS: Bool[Array, "#B Q S"]
) -> Float[Array, "B Q H K"]:
    (B, Q, H, K), G = q_BQHK.shape, k_BSGK.shape[2]
    q_BQGRK = q_BQHK.reshape(B, Q, G, H // G, K)
    att_BGRQS = jnp.einsum("bqgrk,bsgk->bgrqs", q_BQGRK, k_BSGK, preferred_element_type=jnp.promote_types(q_BQHK.dtype, jnp.float32))
    att_BGRQS = jax.nn.softmax(jnp.where(allow_BQS[:, None, None], att_BGRQS * K**-0.5, -1e30))
    return jnp.einsum("bgrqs,bsgk->bqgrk", att_BGRQS.astype(v_BSGK.dtype), v_BSGK).reshape(B, Q, H, K)


def clean_noisy_in_xla(
    q_BQHK: Float[Array, "B Q H K"],
    k_BQGK: Float[Array, "B Q G K"],
    v_BQGK: Float[Array, "B Q G K"],
    mask: CleanNoisy,
    segment_BQ: Int[Array, "B Q"] | None,
) -> Float[Array, "B Q H K"]:
    """Returns attention under [clean ; noisy]: the clean rows over themselves; the noisy ones over the clean keys and over those of their
    own block, merged by their log-sum-exps. Twice L x L scores and L x block, where the whole square would be 2L x 2L."""
    (B, Q, H, K), G, L, W = q_BQHK.shape, k_BQGK.shape[2], mask.length, mask.block
    wide = jnp.promote_types(q_BQHK.dtype, jnp.float32)
    index_Q, zero = jnp.arange(Q, dtype=jnp.int32), jnp.zeros((), jnp.int32)
    blocks = lambda x: x[:, L:].reshape(B, L // W, W, *x.shape[2:])
    clean_q, clean_k, clean_v = (lax.stop_gradient(x[:, :L]) if mask.frozen else x[:, :L] for x in (q_BQHK, k_BQGK, v_BQGK))

    prefix_BQL = mask.allowed(index_Q[None, :, None], index_Q[None, None, :L], zero)
    at_NW = index_Q[L:].reshape(L // W, W)
    own_BNWW = mask.allowed(at_NW[None, :, :, None], at_NW[None, :, None, :], zero)
    if segment_BQ is not None:
        prefix_BQL &= segment_BQ[:, :, None] == segment_BQ[:, None, :L]
        own_BNWW &= blocks(segment_BQ)[:, :, :, None] == blocks(segment_BQ)[:, :, None, :]
    clean_BLHK = _mix(clean_q, clean_k, clean_v, prefix_BQL[:, :L])

    score = lambda spec, q, k, allow: jnp.where(allow, jnp.einsum(spec, q, k, preferred_element_type=wide) * K**-0.5, -1e30)
    q_BQGRK = q_BQHK.reshape(B, Q, G, H // G, K)
    prefix_BGRLL = score("bqgrk,bsgk->bgrqs", q_BQGRK[:, L:], clean_k, prefix_BQL[:, None, None, L:])
    own_BGRNWW = score("bnqgrk,bnsgk->bgrnqs", blocks(q_BQGRK), blocks(k_BQGK), own_BNWW[:, None, None])
    own_BGRL = jax.nn.logsumexp(own_BGRNWW, -1).reshape(B, G, H // G, L)
    total_BGRL = jnp.logaddexp(jax.nn.logsumexp(prefix_BGRLL, -1), own_BGRL)

    weight = lambda scores, total: jnp.exp(scores - total[..., None]).astype(v_BQGK.dtype)
    mixed_BLGRK = jnp.einsum("bgrqs,bsgk->bqgrk", weight(prefix_BGRLL, total_BGRL), clean_v)
    own_BGRNWW = weight(own_BGRNWW, total_BGRL.reshape(B, G, H // G, L // W, W))
    own_BNWGRK = jnp.einsum("bgrnqs,bnsgk->bnqgrk", own_BGRNWW, blocks(v_BQGK))
    mixed_BLGRK += own_BNWGRK.reshape(mixed_BLGRK.shape)
    return jnp.concatenate([clean_BLHK, mixed_BLGRK.reshape(B, L, H, K)], 1)
