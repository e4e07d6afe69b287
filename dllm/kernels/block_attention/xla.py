"""Block attention without a kernel: loops over the visited tiles, one at a time, so that no square of scores is made but a tile's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dllm.kernels.block_attention.tiles import Visits, behind, visits
from dllm.ops.masks import CleanNoisy, Mask

TILE = 512


def forward(
    q: Float[Array, "B Q H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    *,
    scale: float,
    segment_ids: Int[Array, "B S"] | None = None,
    kv_lengths: Int[Array, "B"] | None = None,
    tile: int = TILE,
) -> tuple[Float[Array, "B Q H K"], Float[Array, "B H Q"]]:
    """Returns (out, log-sum-exp) as ref.reference does: a loop over the visited tiles, one at a time.

    Softmax in parts (Milakov and Gimelshein, arXiv 1805.02867): of what a query has read so far, the largest score, and sums less by that.
    """
    (B, Q, H, K), (S, G) = q.shape, k.shape[1:3]
    tile_q, tile_k = min(tile, Q), min(tile, S)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    line_X, tile_X = _pairs(visits(mask, Q, S, tile_q, tile_k))
    allowed = _allowed(mask, Q, S, tile_q, tile_k, segment_ids, kv_lengths)
    q_BQGRK, k, v = _padded(q, 1, tile_q).reshape(B, -1, G, H // G, K), _padded(k, 1, tile_k), _padded(v, 1, tile_k)

    def visit(state, at):
        line, column = at
        part = lambda x: lax.dynamic_slice_in_dim(x, line * tile_q, tile_q, 3)
        most, total, mixed = map(part, state)
        q_t, k_t, v_t = _cut(q_BQGRK, line, tile_q), _cut(k, column, tile_k), _cut(v, column, tile_k)
        score = jnp.einsum("bqgrk,bsgk->bgrqs", q_t, k_t, preferred_element_type=wide) * scale
        score = jnp.where(allowed(line, column)[:, None, None], score, -jnp.inf)
        new = jnp.maximum(most, score.max(-1, keepdims=True))
        less = jnp.where(jnp.isfinite(new), new, 0)  # of a query that has read nothing
        weight, keep = jnp.exp(score - less), jnp.exp(most - less)
        more = jnp.einsum("bgrqs,bsgk->bgrqk", weight.astype(v.dtype), v_t, preferred_element_type=wide)
        new = new, total * keep + weight.sum(-1, keepdims=True), mixed * keep + more
        put = lambda x, x_t: lax.dynamic_update_slice_in_dim(x, x_t, line * tile_q, 3)
        return tuple(map(put, state, new)), None

    shape = (B, G, H // G, q_BQGRK.shape[1])
    state = jnp.full((*shape, 1), -jnp.inf, wide), jnp.zeros((*shape, 1), wide), jnp.zeros((*shape, K), wide)
    (most, total, mixed), _ = lax.scan(visit, state, (line_X, tile_X))
    lse = (most + jnp.log(total))[..., 0].reshape(B, H, -1)[:, :, :Q]
    out = (mixed / jnp.where(total > 0, total, 1)).transpose(0, 3, 1, 2, 4).reshape(B, -1, H, K)[:, :Q]
    return out.astype(q.dtype), lse


def backward(
    q: Float[Array, "B Q H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    out: Float[Array, "B Q H K"],
    lse: Float[Array, "B H Q"],
    d_out: Float[Array, "B Q H K"],
    d_lse: Float[Array, "B H Q"],
    *,
    scale: float,
    segment_ids: Int[Array, "B S"] | None = None,
    kv_lengths: Int[Array, "B"] | None = None,
    tile: int = TILE,
) -> tuple[Float[Array, "B Q H K"], Float[Array, "B S G K"], Float[Array, "B S G K"]]:
    """Returns the gradients of q, k and v, from the output and the saved log-sum-exp.

    Of score s with weight p = exp(s - lse), the gradient is p (d_out v^T - sum(d_out out) + d_lse).
    """
    (B, Q, H, K), (S, G) = q.shape, k.shape[1:3]
    tile_q, tile_k = min(tile, Q), min(tile, S)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    frozen = mask.length if isinstance(mask, CleanNoisy) and mask.frozen else 0
    lines = behind(visits(mask, Q, S, tile_q, tile_k), frozen // tile_q)
    allowed = _allowed(mask, Q, S, tile_q, tile_k, segment_ids, kv_lengths)

    heads = lambda x: _padded(x, 1, tile_q).reshape(B, -1, G, H // G, K)
    rows = lambda x: _padded(x, 2, tile_q).reshape(B, G, H // G, -1)
    delta = jnp.einsum("bqhk,bqhk->bhq", d_out, out, preferred_element_type=wide) - d_lse
    arrays_q = heads(q), heads(d_out.astype(q.dtype))
    arrays_row = rows(jnp.where(lse == -jnp.inf, jnp.inf, lse)), rows(delta)  # a query that reads nothing has weights of 0
    arrays_k = _padded(k, 1, tile_k), _padded(v, 1, tile_k)

    def visit(sums, at):
        (dq, dk, dv), (line, column) = sums, at
        first_q, first_k = line * tile_q, column * tile_k
        of_q = lambda x, axis=1: lax.dynamic_slice_in_dim(x, first_q, tile_q, axis)
        of_k = lambda x: lax.dynamic_slice_in_dim(x, first_k, tile_k, 1)
        add = lambda x, more, first: lax.dynamic_update_slice_in_dim(
            x, lax.dynamic_slice_in_dim(x, first, more.shape[1], 1) + more, first, 1
        )
        dot = functools.partial(jnp.einsum, preferred_element_type=wide)
        (q_t, do_t), (lse_t, delta_t), (k_t, v_t) = map(of_q, arrays_q), (of_q(x, 3) for x in arrays_row), map(of_k, arrays_k)

        query = (first_q + jnp.arange(tile_q, dtype=jnp.int32))[None, :, None]
        allow = (allowed(line, column) & (query < Q) & (query >= frozen))[:, None, None]
        weight = jnp.where(allow, jnp.exp(dot("bqgrk,bsgk->bgrqs", q_t, k_t) * scale - lse_t[..., None]), 0)
        slope = weight * (dot("bqgrk,bsgk->bgrqs", do_t, v_t) - delta_t[..., None]) * scale
        slope, weight = slope.astype(q.dtype), weight.astype(q.dtype)
        dq = add(dq, dot("bgrqs,bsgk->bqgrk", slope, k_t), first_q)
        dk = add(dk, dot("bgrqs,bqgrk->bsgk", slope, q_t), first_k)
        return (dq, dk, add(dv, dot("bgrqs,bqgrk->bsgk", weight, do_t), first_k)), None

    zeros = tuple(jnp.zeros(x.shape, wide) for x in (arrays_q[0], *arrays_k))
    (dq, dk, dv), _ = lax.scan(visit, zeros, _pairs(lines))
    live = (jnp.arange(dk.shape[1]) >= frozen)[None, :, None, None]
    dk, dv = (jnp.where(live, x, 0)[:, :S] for x in (dk, dv))
    return dq[:, :Q].reshape(q.shape).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _pairs(lines: Visits) -> tuple[Int[Array, "X"], Int[Array, "X"]]:
    """Returns (line, tile) of each visit."""
    line_X = np.repeat(np.arange(len(lines.count_T)), lines.count_T).astype(np.int32)
    return jnp.asarray(line_X), jnp.asarray(np.concatenate([tile_W[:n] for tile_W, n in zip(lines.tile_TW, lines.count_T, strict=True)]))


def _allowed(mask: Mask, queries: int, keys: int, tile_q: int, tile_k: int, segment_ids: Any, kv_lengths: Any) -> Callable[..., Any]:
    """Returns (line, tile) -> which of that tile's scores count, [B or 1, tile_q, tile_k]."""
    end_B11 = jnp.full((1, 1, 1), keys, jnp.int32) if kv_lengths is None else jnp.minimum(kv_lengths, keys)[:, None, None]
    segments = None if segment_ids is None else (_padded(segment_ids[:, :queries], 1, tile_q), _padded(segment_ids, 1, tile_k))

    def allowed(line: Int[Array, ""], column: Int[Array, ""]) -> Bool[Array, "..."]:
        query = (line * tile_q + jnp.arange(tile_q, dtype=jnp.int32))[None, :, None]
        key = (column * tile_k + jnp.arange(tile_k, dtype=jnp.int32))[None, None]
        allow = mask.allowed(query, key, jnp.zeros((1, 1, 1), jnp.int32)) & (key < end_B11)
        if segments is not None:
            allow &= _cut(segments[0], line, tile_q)[:, :, None] == _cut(segments[1], column, tile_k)[:, None]
        return allow

    return allowed


def _cut(x: Array, number: Int[Array, ""], size: int) -> Array:
    return lax.dynamic_slice_in_dim(x, number * size, size, 1)


def _padded(x: Array, axis: int, multiple: int) -> Array:
    pads = [(0, 0)] * x.ndim
    pads[axis] = 0, -x.shape[axis] % multiple
    return jnp.pad(x, pads)
