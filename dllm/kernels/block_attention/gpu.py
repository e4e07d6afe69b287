"""Block attention on Hopper GPUs, in Mosaic GPU: the forward pass, and the decode form over a cache.

One warpgroup loads tiles of keys and values by TMA into rings of slots; one or two others multiply 64 rows each by wgmma, with softmax
in chunks (Milakov and Gimelshein, arXiv 1805.02867). Two of them take turns, so that the products of one run beside the exponentials
of the other (FlashAttention-3, arXiv 2407.08608, section 3.1). Tiles that the mask empties are neither loaded nor computed, and only
those that it cuts evaluate it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from dllm.kernels.block_attention.tiles import visits
from dllm.ops.masks import Ancestors, CleanNoisy, Mask

ROWS = 64  # of queries to a warpgroup: what wgmma multiplies
PROCESSORS = 132  # of an H100 or H200; the decode form cuts the keys into parts until its blocks fill them
LOW = -1e30  # below every score, and finite: rows that read nothing make no NaN
LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Keys to a tile, and slots of each ring. Rings, queries and log-sum-exps share 227 KB."""

    keys: int
    slots: int


TILES = {64: Tile(128, 4), 128: Tile(128, 2), 256: Tile(64, 2)}  # by head width


def forward(
    q_BQHK: Float[Array, "B Q H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGK: Float[Array, "B S G K"],
    mask: Mask,
    *,
    scale: float,
    segment_ids: Int[Array, "B S"] | None = None,
    kv_lengths: Int[Array, "B"] | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B Q H K"], Float[Array, "B H Q"]]:
    """Returns (softmax(scale q k^T) v, the log-sum-exp of each query's scores in float32): ref.reference, queries from index 0.

    interpret  plgpu.InterpretGPUParams() runs it on a CPU
    Raises NotImplementedError for what wgmma doesn't serve, float32 and other head widths, and for a tree, which decode serves.
    """
    (B, Q, H, K), (S, G) = q_BQHK.shape, k_BSGK.shape[1:3]
    tile = _tile(q_BQHK, k_BSGK, v_BSGK, scale)
    if isinstance(mask, Ancestors):
        raise NotImplementedError("the GPU kernel serves a tree's mask in its decode form only")
    line_rows = 2 * ROWS
    line_T, code_TW, count_T = _schedule(mask, Q, S, line_rows, tile.keys)
    length_B = jnp.full((B,), S, jnp.int32) if kv_lengths is None else jnp.minimum(kv_lengths, S).astype(jnp.int32)
    # A line's tiles ascend: those that begin before the row's end come first.
    listed_TW = np.arange(code_TW.shape[1])[None] < count_T[:, None]
    reached_BTW = listed_TW[None] & (jnp.asarray(code_TW // 2 * tile.keys)[None] < length_B[:, None, None])
    steps_BT = reached_BTW.sum(-1, dtype=jnp.int32)
    q_BQHK, k_BSGK, v_BSGK = _pad(q_BQHK, line_rows), _pad(k_BSGK, tile.keys), _pad(v_BSGK, tile.keys)
    segments = None
    if segment_ids is not None:
        segment_ids = segment_ids.astype(jnp.int32)
        segments = _pad(segment_ids[:, :Q], line_rows), _pad(segment_ids, tile.keys)

    def body(q_ref, k_ref, v_ref, line_ref, code_ref, steps_ref, length_ref, segment_refs, out_ref, lse_ref, **scratch):
        batch, head, line = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("line")
        kv_head, length = lax.div(head, jnp.int32(H // G)), length_ref[batch]
        rows = pl.ds(line_ref[line] * line_rows + lax.axis_index("wg") * ROWS, ROWS)

        def place(step):
            return lax.shift_right_logical(code_ref[line, step], 1) * tile.keys

        def loads(step):
            keys = pl.ds(place(step), tile.keys)
            return k_ref.at[batch, keys, kv_head], v_ref.at[batch, keys, kv_head]

        def look(step):
            if segment_refs is None:
                return ((code_ref[line, step] & 1) == 0) | (place(step) + tile.keys > length), None
            return True, _load(segment_refs[1].at[batch, pl.ds(place(step), tile.keys)], 0)

        def allowed(step, segment):
            query, key = rows.start + _index(tile, 0), place(step) + _index(tile, 1)
            allow = _allowed(mask, query, key, jnp.zeros((), jnp.int32)) & (key < length)
            if segment is None:
                return allow
            own = _load(segment_refs[0].at[batch, rows], 1)
            return allow & (_down(own, allow.shape) == lax.broadcast_in_dim(segment, allow.shape, [1]))

        ends = q_ref.at[batch, rows, head], out_ref.at[batch, rows, head], lse_ref.at[batch, head, rows]
        _attend(*ends, steps_ref[batch, line], loads, look, allowed, scale, _interpreted_add if interpret else _add, **scratch)

    out_BQHK, lse_BHQ = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(q_BQHK.shape, q_BQHK.dtype), jax.ShapeDtypeStruct((B, H, q_BQHK.shape[1]), jnp.float32)),
        scratch_types=_scratch(tile, K, q_BQHK.dtype, 2),
        grid=(H, len(line_T), B),
        grid_names=("head", "line", "batch"),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(q_BQHK, k_BSGK, v_BSGK, jnp.asarray(line_T), jnp.asarray(code_TW), steps_BT, length_B, segments)
    return out_BQHK[:, :Q], lse_BHQ[:, :, :Q]


def decode(
    q_BQHK: Float[Array, "B Q H K"],
    k_NBSGK: Float[Array, "N B S G K"],
    v_NBSGK: Float[Array, "N B S G K"],
    layer: Int[Array, ""],
    lengths_B: Int[Array, "B"],
    mask: Mask,
    *,
    scale: float,
    interpret: Any = False,
) -> Float[Array, "B Q H K"]:
    """Returns attention of a pass's rows over the keys and values of `layer`, into which they were written (Cache.write).

    Query row r has index length + r, slot s has index s; slots from length + Q on are neither loaded nor read, and those before length
    are read by every row, as all masks have it. The query heads of a key head share its tiles. The keys are cut into parts, each with a
    block of its own, and what these give is merged by their log-sum-exps (flash decoding).
    Raises NotImplementedError where forward does, and for a cache shorter than a tile.
    """
    (B, Q, H, K), (N, _, S, G) = q_BQHK.shape, k_NBSGK.shape[:4]
    R = H // G
    tile = _tile(q_BQHK, k_NBSGK, v_NBSGK, scale)
    if tile.keys > S:
        raise NotImplementedError(f"the GPU kernel wants a cache of {tile.keys} slots or more; this one has {S}")
    groups = 1 if Q * R <= ROWS else 2
    line_rows = groups * ROWS
    q_BGRK = _pad(q_BQHK.reshape(B, Q, G, R, K).swapaxes(1, 2).reshape(B, G, Q * R, K), line_rows, 2)
    k_PSGK, v_PSGK = (c.reshape(N * B, S, G, K) for c in (k_NBSGK, v_NBSGK))  # the TMA unit counts five axes
    lines = q_BGRK.shape[2] // line_rows
    parts = max(1, min(PROCESSORS // (lines * B * G), S // tile.keys))
    words = _words(mask.ancestors_BNN, Q, R, line_rows) if isinstance(mask, Ancestors) else None

    def body(q_ref, k_ref, v_ref, layer_ref, length_ref, word_ref, out_ref, lse_ref, **scratch):
        part, line, pair = lax.axis_index("part"), lax.axis_index("line"), lax.axis_index("pair")
        batch, kv_head = lax.div(pair, jnp.int32(G)), lax.rem(pair, jnp.int32(G))
        plane, start = layer_ref[0] * B + batch, length_ref[batch]
        rows = pl.ds(line * line_rows + lax.axis_index("wg") * ROWS, ROWS)
        tiles = jnp.minimum(lax.div(start + (Q + tile.keys - 1), jnp.int32(tile.keys)), -(-S // tile.keys))
        each = lax.div(tiles + (parts - 1), jnp.int32(parts))
        steps = jnp.maximum(jnp.minimum(tiles - part * each, each), 0)

        def place(step):
            first = (part * each + step) * tile.keys
            return first, jnp.minimum(first, S - tile.keys)  # the cache's last tile begins earlier, and leaves out what was read

        def loads(step):
            keys = pl.ds(place(step)[1], tile.keys)
            return k_ref.at[plane, keys, kv_head], v_ref.at[plane, keys, kv_head]

        def look(step):
            return place(step)[0] + tile.keys > start, None

        def allowed(step, _):
            first, at = place(step)
            row, key = rows.start + _index(tile, 0), at + _index(tile, 1)
            within = (key >= first) & (key < start + Q)
            if word_ref is None:
                return within & _allowed(mask, start + lax.div(row, jnp.full_like(row, R)), key, start)
            column, allow = key - start, key < start
            for w in range(word_ref.shape[1]):
                word = _down(_load(word_ref.at[batch, w, rows], 1), column.shape)
                bit = lax.shift_right_logical(word, column & 31) & 1
                allow |= (lax.shift_right_logical(column, jnp.full_like(column, 5)) == w) & (bit == 1)
            return within & allow

        ends = q_ref.at[batch, kv_head, rows], out_ref.at[part, pair, rows], lse_ref.at[part, pair, rows]
        _attend(*ends, steps, loads, look, allowed, scale, _interpreted_add if interpret else _add, **scratch)

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((parts, B * G, lines * line_rows, K), q_BQHK.dtype),
            jax.ShapeDtypeStruct((parts, B * G, lines * line_rows), jnp.float32),
        ),
        scratch_types=_scratch(tile, K, q_BQHK.dtype, groups),
        grid=(parts, lines, B * G),
        grid_names=("part", "line", "pair"),
        num_threads=groups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    out_PXRK, lse_PXR = kernel(q_BGRK, k_PSGK, v_PSGK, layer.astype(jnp.int32)[None], lengths_B.astype(jnp.int32), words)
    out_XRK = out_PXRK[0] if parts == 1 else _merge(out_PXRK, lse_PXR)
    return out_XRK[:, : Q * R].reshape(B, G, Q, R, K).swapaxes(1, 2).reshape(B, Q, H, K)


def _attend(
    q_from, out_to, lse_to, steps, loads: Callable, look: Callable, allowed: Callable, scale: float, add: Callable,
    *, q, k, v, lse, q_ready, k_ready, v_ready, k_free, v_free, turn=None,
):  # fmt: skip
    """The kernel of one block: attention of each computing warpgroup's 64 rows over the tiles of steps 0, 1, ..

    loads(step) are the slices of keys and values in the device's memory. look(step), done early, gives (whether the tile is cut, what is
    to be known of it then); of a cut tile, scores stay where allowed(step, known). A barrier `ready` tells that a slot was filled, one
    `free` that all have read it.
    """
    (groups, rows, width), (slots, keys) = q.shape, k.shape[:2]
    group = lax.axis_index("wg")
    slot_of = lambda step: lax.rem(step, jnp.int32(slots))

    def pass_turn():
        if turn is not None:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

    @pl.when(group < groups)
    def _consumer():
        if groups == 2:
            plgpu.set_max_registers(232, action="increase")
        mine = q.at[group]
        plgpu.copy_gmem_to_smem(q_from, mine, q_ready.at[group])
        plgpu.barrier_wait(q_ready.at[group])
        pl.when(group == 1)(pass_turn)

        def read(step, carry):
            mixed, most, total = carry
            slot, (cut, known) = slot_of(step), look(step)
            plgpu.barrier_wait(k_ready.at[slot])

            def product(score_ref):
                plgpu.wgmma(score_ref, mine, k.at[slot].transpose((1, 0)))
                pass_turn()
                return score_ref[...]

            score = pl.run_scoped(product, plgpu.ACC((rows, keys), jnp.float32))
            plgpu.barrier_arrive(k_free.at[slot])
            hide = lambda score: jnp.where(allowed(step, known), score, -jnp.inf)
            score = hide(score) if cut is True else lax.cond(cut, hide, lambda score: score, score)

            # In units of log 2, so that scaling and the exponent's difference are one instruction.
            new = jnp.maximum(most, score.max(1) * (scale * LOG2E))
            keep, weight = jnp.exp2(most - new), jnp.exp2(score * (scale * LOG2E) - _down(new, score.shape))
            total, mixed = total * keep + weight.sum(1), mixed * _down(keep, mixed.shape)
            weight = weight.astype(v.dtype)
            if turn is not None:
                plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_ready.at[slot])
            if turn is not None:
                plgpu.barrier_wait(turn)
            mixed = add(mixed, weight, v.at[slot])
            plgpu.barrier_arrive(v_free.at[slot])
            return mixed, new, total

        mixed = plgpu.layout_cast(jnp.zeros((rows, width), jnp.float32), plgpu.Layout.WGMMA)
        most, total = (plgpu.layout_cast(jnp.full((rows,), x, jnp.float32), plgpu.Layout.WGMMA.reduce(1)) for x in (LOW, 0))
        mixed, most, total = lax.fori_loop(0, steps, read, (mixed, most, total))
        pl.when(group == 0)(pass_turn)

        mine[...] = (mixed * _down(1 / jnp.where(total > 0, total, 1), mixed.shape)).astype(q.dtype)
        lse.at[group][...] = jnp.where(total > 0, most * (1 / LOG2E) + jnp.log(total), -jnp.inf)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mine, out_to)
        plgpu.copy_smem_to_gmem(lse.at[group], lse_to)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(group == groups)
    def _producer():
        if groups == 2:
            plgpu.set_max_registers(40, action="decrease")

        @pl.loop(0, steps + slots)  # a round more: every slot is waited for, so that no phase of a barrier ends unseen
        def _fill(step):
            slot = slot_of(step)
            for tile_at, ring, ready, free in ((0, k, k_ready, k_free), (1, v, v_ready, v_free)):
                pl.when(step >= slots)(functools.partial(plgpu.barrier_wait, free.at[slot]))

                @pl.when(step < steps)
                def _copy(tile_at=tile_at, ring=ring, ready=ready):
                    plgpu.copy_gmem_to_smem(loads(step)[tile_at], ring.at[slot], ready.at[slot])


def _add(mixed, weight, v_ref):
    return pl.run_state(lambda mixed_ref: plgpu.wgmma(mixed_ref, weight, v_ref))(plgpu.ACC.init(mixed))


def _interpreted_add(mixed, weight, v_ref):
    """_add where interpret mode (jax 0.12.0) has neither: an accumulator that begins with a value, a factor in registers."""
    mixed += jnp.dot(weight, v_ref[...], preferred_element_type=jnp.float32)
    plgpu.commit_smem()  # reads that aren't wgmma's, before what is loaded next
    return mixed


def _allowed(mask: Mask, query: Array, key: Array, start: Array) -> Array:
    """Returns mask.allowed; [clean ; noisy] by an equal expression, as booleans have no `not` in Mosaic GPU (jax 0.11.2, 0.12.0)."""
    if not isinstance(mask, CleanNoisy):
        return mask.allowed(query, key, start)
    (noisy_query, query_at), (noisy_key, key_at) = (mask._place(index, start) for index in (query, key))
    query_block, key_block = (lax.div(at, jnp.full_like(at, mask.block)) for at in (query_at, key_at))
    upto = key_at <= query_at if mask.causal else key_block <= query_block
    noisy = jnp.where(noisy_key, (key_block == query_block) & upto, key_block < query_block)
    return jnp.where(noisy_query, noisy, upto & (key < start + mask.length))


def _scratch(tile: Tile, width: int, dtype: Any, groups: int) -> dict[str, Any]:
    layout = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)  # what wgmma reads: rows of 128 bytes, by eights
    ring = plgpu.SMEM((tile.slots, tile.keys, width), dtype, transforms=layout)
    ready, free = plgpu.Barrier(num_barriers=tile.slots), plgpu.Barrier(num_arrivals=groups, num_barriers=tile.slots)
    scratch = dict(
        q=plgpu.SMEM((groups, ROWS, width), dtype, transforms=layout),  # and the result, in the end
        k=ring,
        v=ring,
        lse=plgpu.SMEM((groups, ROWS), jnp.float32),
        q_ready=plgpu.Barrier(num_barriers=groups),
        k_ready=ready,
        v_ready=ready,
        k_free=free,
        v_free=free,
    )
    if groups == 2:
        scratch["turn"] = plgpu.Barrier(num_arrivals=2)
    return scratch


@functools.lru_cache(maxsize=64)
def _schedule(mask: Mask, queries: int, keys: int, tile_q: int, tile_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (line_T, code_TW, count_T): the lines of tiles, the longest first, so that the blocks which start last are short, and the
    tiles each visits, as twice the tile, plus one if the mask leaves it whole."""
    lines, tiles = visits(mask, queries, keys, tile_q, tile_k), -(-keys // tile_k)
    whole_TS = np.ones((len(lines.count_T), tiles), bool)
    for query in range(queries):
        whole_S = np.zeros((tiles,), bool)
        for low, high in mask.ranges(query, query):
            whole_S[-(-low // tile_k) : min(high, keys) // tile_k] = True
        whole_TS[query // tile_q] &= whole_S
    line_T = np.argsort(-lines.count_T, kind="stable").astype(np.int32)
    code_TW = lines.tile_TW * 2 + np.take_along_axis(whole_TS, lines.tile_TW, 1)
    return line_T, code_TW[line_T].astype(np.int32), lines.count_T[line_T]


def _words(ancestors_BNN: Array, queries: int, heads: int, line_rows: int) -> Array:
    """Returns, of each row of the decode form's tiles, its ancestors as the bits of words, [B W rows] int32."""
    B, N, _ = ancestors_BNN.shape
    bits = jnp.pad(ancestors_BNN[:, :queries], ((0, 0), (0, 0), (0, -N % 32))).reshape(B, queries, -1, 32)
    words_BQW = (bits.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)[None, None, None]).sum(-1, dtype=jnp.uint32)
    return _pad(lax.bitcast_convert_type(words_BQW, jnp.int32).repeat(heads, 1).swapaxes(1, 2), line_rows, 2)


def _merge(out_PXRK: Array, lse_PXR: Array) -> Array:
    """Returns the result over all keys, of those over each part of them: each counts by exp(log-sum-exp)."""
    weight_PXR = jax.nn.softmax(jnp.maximum(lse_PXR, LOW), axis=0)
    return (weight_PXR[..., None] * out_PXRK).sum(0).astype(out_PXRK.dtype)


def _tile(q: Array, k: Array, v: Array, scale: float) -> Tile:
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k.dtype != q.dtype or v.dtype != q.dtype:
        raise NotImplementedError(f"the GPU kernel multiplies bfloat16 or float16; q, k, v are {q.dtype}, {k.dtype}, {v.dtype}")
    if q.shape[-1] not in TILES:
        raise NotImplementedError(f"the GPU kernel serves head widths {', '.join(map(str, TILES))}; this one is {q.shape[-1]}")
    if scale <= 0:
        raise NotImplementedError(f"the GPU kernel wants a positive scale; it is {scale}")
    return TILES[q.shape[-1]]


def _pad(x: Array, multiple: int, axis: int = 1) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = 0, -x.shape[axis] % multiple
    return jnp.pad(x, widths) if widths[axis][1] else x


def _load(ref, axis: int) -> Array:
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(axis), optimized=False)


def _index(tile: Tile, axis: int) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, tile.keys), axis, layout=plgpu.Layout.WGMMA)


def _down(column: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(column, shape, [0])
