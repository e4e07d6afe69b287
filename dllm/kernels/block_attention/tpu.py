"""Block attention on TPUs: Pallas kernels for Mosaic. Forward, backward, and few queries over a long cache.

The online softmax and its backward pass from the saved log-sum-exp are those of FlashAttention-2 (Dao, arXiv 2307.08691). A grid step is a
tile that the mask doesn't empty (tiles.steps): others cost nothing. The R = H / G query heads of a key head share a step, so that keys are
loaded, and the mask is evaluated, once for all of them. What is one number for each query lies in [.., 128], the same in all lanes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from dllm.core.types import UserError
from dllm.kernels.block_attention.tiles import FIRST, LAST, VISITED, WHOLE, Visits, behind, steps, transposed, visits, whole
from dllm.ops.masks import Ancestors, CleanNoisy, Mask

LANES = 128
LEAST, MASKED = -1e30, -2e30  # the start of the running maximum, and what is masked: so far below it that its weight is 0
VMEM = 32 * 2**20  # bytes that the compiler grants a kernel: of 64 MiB on v5p, 128 on v5e and v6e
PARAMS = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM)
ROWS = 2048  # of queries times heads, in a step of the decode form
NN, NT = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ()))  # a b and a b^T


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Queries and keys to a tile, multiples of 128."""

    query: int
    key: int

    def __post_init__(self):
        if self.query < 1 or self.key < 1 or self.query % LANES or self.key % LANES:
            raise UserError(f"tiles of {self.query} x {self.key}; make both a multiple of {LANES}")


def choose(queries: int, keys: int, group: int, head_width: int, itemsize: int) -> Tiles:
    """Returns the tiles, for `group` query heads to a key head: of 512, 256 and 128 the largest of which eight make the length, less
    where the dq kernel, which keeps most, wouldn't fit VMEM. Raises NotImplementedError where none fits."""
    width = -(-head_width // LANES) * LANES

    def fits(query, key):
        blocks = 2 * itemsize * width * (3 * group * query + 2 * key)  # q, do, dq; k, v: loaded while the last ones are used
        return blocks + 4 * group * query * (width + 2 * LANES) + 4 * 4 * query * key <= VMEM * 5 // 8  # the rest is for products

    query, key = (next((t for t in (512, 256) if length >= 8 * t), LANES) for length in (queries, keys))
    while query > LANES and not fits(query, key):
        query //= 2
    while key > LANES and not fits(query, key):
        key //= 2
    if not fits(query, key):
        raise NotImplementedError(f"{group} query heads to a key head, {head_width} wide, of {itemsize} bytes, don't fit a TPU's VMEM")
    return Tiles(query, key)


def forward(
    q: Float[Array, "B Q H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    *,
    scale: float,
    segment_ids: Int[Array, "B S"] | None = None,
    kv_lengths: Int[Array, "B"] | None = None,
    tiles: Tiles | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B Q H K"], Float[Array, "B H Q"]]:
    """Returns (out, log-sum-exp) as ref.reference defines them.

    tiles      those of `choose` where None
    interpret  True, or pltpu.InterpretParams(...), runs it on a CPU
    Raises NotImplementedError for types other than bfloat16 and float32, for heads wider than 256, and where no tile fits VMEM.
    """
    form = _Form.of(q, k, v, mask, scale, tiles, segment_ids, kv_lengths)
    R, K = form.group, form.head_width

    def kernel(at, q_ref, k_ref, v_ref, sides, out_ref, lse_ref, most_ref, total_ref, mixed_ref, *column_refs):
        @pl.when(at.begins)
        def _():
            _begin(most_ref, total_ref, mixed_ref)
            form.keep_segments(sides, column_refs)

        def visit(masked):
            k, v = k_ref[...], v_ref[...]
            if masked:
                allow, v = form.allowed(at, sides, column_refs), form.inside(v, at.key, form.tiles.key, form.keys)
            for r in range(R):
                score = form.dot(q_ref[r], k, NT) * scale
                score = jnp.where(allow, score, MASKED) if masked else score
                _mix_in(score, v, r, most_ref, total_ref, mixed_ref, form.dot)

        form.visit(at, visit)

        @pl.when(at.ends)
        def _():
            for r in range(R):
                out_ref[r] = _mean(r, total_ref, mixed_ref).astype(out_ref.dtype)
                total = total_ref[r]
                lse_ref[r : r + 1] = jnp.where(total == 0, -jnp.inf, most_ref[r] + jnp.log(total)).T[:1]

    out, lse = form.call(
        kernel,
        "forward",
        form.visits,
        inputs=(("query", form.split(q)), ("key", k.swapaxes(1, 2)), ("key", v.swapaxes(1, 2))),
        outputs=(("query", q.dtype), ("row", jnp.float32)),
        kept=((R, form.tiles.query, LANES), (R, form.tiles.query, LANES), (R, form.tiles.query, K)),
        products=2,
        interpret=interpret,
    )
    return form.join(out), lse.reshape(form.batch, -1, form.queries)


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
    tiles: Tiles | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B Q H K"], Float[Array, "B S G K"], Float[Array, "B S G K"]]:
    """Returns the gradients of q, k and v, given what forward returned and the gradients of that.

    Of score s with weight p = exp(s - lse), the gradient is p (d_out v^T - sum(d_out out) + d_lse). Where CleanNoisy is frozen, its clean
    rows get zeros, and their tiles aren't visited.
    """
    form = _Form.of(q, k, v, mask, scale, tiles, segment_ids, kv_lengths)
    B, R, Q, K, tile = form.batch, form.group, form.queries, form.head_width, form.tiles
    rows = lambda x: x.reshape(B, form.kv_heads, R, Q)
    delta = jnp.einsum("bqhk,bqhk->bhq", d_out, out, preferred_element_type=jnp.float32, precision="highest") - d_lse
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)  # so that a query that reads nothing has weights of 0
    inputs = (
        ("query", form.split(q)),
        ("key", k.swapaxes(1, 2)),
        ("key", v.swapaxes(1, 2)),
        ("query", form.split(d_out.astype(q.dtype))),
        ("row", rows(lse)),
        ("row", rows(delta)),
    )

    def query_kernel(at, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, sides, dq_ref, dq_kept, lse_kept, delta_kept, *column_refs):
        @pl.when(at.begins)
        def _():
            dq_kept[...] = jnp.zeros_like(dq_kept)
            for r in range(R):
                lse_kept[r], delta_kept[r] = _column(lse_ref[r : r + 1]), _column(delta_ref[r : r + 1])
            form.keep_segments(sides, column_refs)

        def visit(masked):
            k, v = k_ref[...], v_ref[...]
            if masked:
                allow, k = form.allowed(at, sides, column_refs), form.inside(k, at.key, tile.key, form.keys)
            for r in range(R):
                weight = jnp.exp(form.dot(q_ref[r], k, NT) * scale - _lanes(lse_kept[r], tile.key))
                slope = weight * (form.dot(do_ref[r], v, NT) - _lanes(delta_kept[r], tile.key)) * scale
                slope = jnp.where(allow, slope, 0.0) if masked else slope
                dq_kept[r] += form.dot(slope.astype(k.dtype), k, NN)

        form.visit(at, visit)

        @pl.when(at.ends)
        def _():
            for r in range(R):
                dq_ref[r] = form.thaw(dq_kept[r], at.query, tile.query).astype(dq_ref.dtype)

    flipped = dataclasses.replace(form, by_keys=True)  # squares of keys x queries: what belongs to a query lies in a row as it is

    def key_kernel(at, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, sides, dk_ref, dv_ref, dk_kept, dv_kept, *column_refs):
        @pl.when(at.begins)
        def _():
            dk_kept[...], dv_kept[...] = jnp.zeros_like(dk_kept), jnp.zeros_like(dv_kept)
            flipped.keep_segments(sides, column_refs)

        def visit(masked):
            k, v = k_ref[...], v_ref[...]
            if masked:
                allow = flipped.allowed(at, sides, column_refs)
            for r in range(R):
                q, do = q_ref[r], do_ref[r]
                if masked:
                    q, do = (flipped.inside(x, at.query, tile.query, flipped.queries) for x in (q, do))
                weight = jnp.exp(flipped.dot(k, q, NT) * scale - lse_ref[r : r + 1])
                slope = weight * (flipped.dot(v, do, NT) - delta_ref[r : r + 1]) * scale
                if masked:
                    weight, slope = jnp.where(allow, weight, 0.0), jnp.where(allow, slope, 0.0)
                dv_kept[...] += flipped.dot(weight.astype(do.dtype), do, NN)
                dk_kept[...] += flipped.dot(slope.astype(q.dtype), q, NN)

        flipped.visit(at, visit)

        @pl.when(at.ends)
        def _():
            for kept, ref in ((dk_kept, dk_ref), (dv_kept, dv_ref)):
                ref[...] = flipped.thaw(kept[...], at.key, tile.key).astype(ref.dtype)

    column = (R, tile.query, LANES)
    (dq,) = form.call(
        query_kernel,
        "backward_queries",
        behind(form.visits, form.frozen // tile.query),
        inputs=inputs,
        outputs=(("query", q.dtype),),
        kept=((R, tile.query, K), column, column),
        products=3,
        interpret=interpret,
    )
    dk, dv = flipped.call(
        key_kernel,
        "backward_keys",
        behind(transposed(form.visits, -(-form.keys // tile.key)), form.frozen // tile.key),
        inputs=inputs,
        outputs=(("key", k.dtype), ("key", v.dtype)),
        kept=((tile.key, K), (tile.key, K)),
        products=4,
        interpret=interpret,
    )
    return form.join(dq), dk.swapaxes(1, 2), dv.swapaxes(1, 2)


@dataclasses.dataclass(frozen=True)
class _At:
    """A grid step: its tiles of queries and keys, its flags (tiles.steps), and how many keys its batch row has."""

    query: Array
    key: Array
    flags: Array
    limit: Array

    @property
    def begins(self) -> Array:
        return self.flags & FIRST != 0

    @property
    def ends(self) -> Array:
        return self.flags & LAST != 0


@dataclasses.dataclass(frozen=True)
class _Form:
    """What the forward and backward kernels share: shapes, tiles, which scores count, and the Pallas call."""

    mask: Mask
    scale: float
    batch: int
    kv_heads: int
    group: int
    queries: int
    keys: int
    head_width: int
    tiles: Tiles
    dot: Callable[..., Array]
    segment_ids: Any  # [B S] or None
    kv_lengths: Any  # [B] or None
    by_keys: bool = False  # a line is a tile of keys, and squares of scores are keys x queries

    @classmethod
    def of(cls, q: Array, k: Array, v: Array, mask: Mask, scale: float, tiles: Tiles | None, segment_ids: Any, kv_lengths: Any) -> _Form:
        (B, Q, H, K), (S, G) = q.shape, k.shape[1:3]
        check(q, k, v)
        tiles = tiles or choose(Q, S, H // G, K, q.dtype.itemsize)
        return cls(mask, scale, B, G, H // G, Q, S, K, tiles, _dot(q.dtype), segment_ids, kv_lengths)

    @property
    def visits(self) -> Visits:
        return visits(self.mask, self.queries, self.keys, self.tiles.query, self.tiles.key)

    @property
    def frozen(self) -> int:
        """Rows from the first on that get no gradient."""
        return self.mask.length if isinstance(self.mask, CleanNoisy) and self.mask.frozen else 0

    def split(self, q: Array) -> Array:
        """Returns [B Q H K] as [B G R Q K]."""
        return q.reshape(self.batch, self.queries, self.kv_heads, self.group, self.head_width).transpose(0, 2, 3, 1, 4)

    def join(self, q: Array) -> Array:
        """Returns [B G R Q K] as [B Q H K]."""
        return q.transpose(0, 3, 1, 2, 4).reshape(self.batch, self.queries, -1, self.head_width)

    def indices(self, at: _At) -> tuple[Array, Array]:
        """Returns those of the tile's queries and keys, along the square's axes."""
        query_axis, key_axis = (1, 0) if self.by_keys else (0, 1)
        along = lambda first, size, axis: first * size + lax.broadcasted_iota(jnp.int32, (1, size) if axis else (size, 1), axis)
        return along(at.query, self.tiles.query, query_axis), along(at.key, self.tiles.key, key_axis)

    def keep_segments(self, sides: Mapping[str, Any], column_refs: Sequence[Any]) -> None:
        """Lays the line's segments down a column, where there are segments."""
        for ref in column_refs:
            ref[...] = _column(sides["key_segment" if self.by_keys else "query_segment"][...])

    def allowed(self, at: _At, sides: Mapping[str, Any], column_refs: Sequence[Any]) -> Array:
        """Returns which scores of the tile count."""
        query, key = self.indices(at)
        allow = sides["own"][...] != 0 if "own" in sides else self.mask.allowed(query, key, jnp.int32(0))
        if self.kv_lengths is not None or self.keys % self.tiles.key:
            allow &= key < at.limit
        if self.by_keys and self.queries % self.tiles.query:
            allow &= query < self.queries
        for ref in column_refs:
            row = sides["query_segment" if self.by_keys else "key_segment"][...]
            allow &= _lanes(ref[...], row.shape[1]) == row
        return allow

    def visit(self, at: _At, visit: Callable[[bool], None]) -> None:
        """Calls visit(whether scores are to be masked) where the step has a tile, and a key in it."""
        size = self.tiles.key
        visited = (at.flags & VISITED != 0) & (at.key * size < at.limit)
        clear = (at.flags & WHOLE != 0) & ((at.key + 1) * size <= at.limit)
        if self.segment_ids is not None:
            pl.when(visited)(lambda: visit(True))
            return
        pl.when(visited & clear)(lambda: visit(False))
        pl.when(visited & jnp.logical_not(clear))(lambda: visit(True))

    def inside(self, x: Array, tile: Array, size: int, length: int) -> Array:
        """Returns a tile's rows with zeros behind the array's end, where memory may hold anything: 0 times that need not be 0."""
        return x if length % size == 0 else _rows_from(x, tile * size, 0, length)

    def thaw(self, x: Array, tile: Array, size: int) -> Array:
        """Returns a tile's gradients with zeros in the rows that get none."""
        return x if self.frozen % size == 0 else _rows_from(x, tile * size, self.frozen, 2**31 - 1)

    def call(
        self,
        kernel: Callable[..., None],
        name: str,
        lines: Visits,
        *,
        inputs: Sequence[tuple[str, Array]],
        outputs: Sequence[tuple[str, Any]],
        kept: Sequence[tuple[int, ...]],
        products: int,
        interpret: Any,
    ) -> Sequence[Array]:
        """Returns kernel's outputs. kernel(at, *input refs, side refs, *output refs, *what is kept along a line, *segments in a column).

        inputs, outputs  (kind, array or type): "query" [B G R Q K], "key" [B G S K], "row" [B G R Q]
        kept             shapes, float32
        products         matrix products of a tile, for the estimate of cost
        """
        B, G, R, Q, S, K = self.batch, self.kv_heads, self.group, self.queries, self.keys, self.head_width
        tile_q, tile_k = self.tiles.query, self.tiles.key
        clear = whole(self.mask, Q, S, tile_q, tile_k)
        plan = steps(lines, clear.T if self.by_keys else clear)
        limit_B = jnp.full((B,), S, jnp.int32) if self.kv_lengths is None else jnp.minimum(self.kv_lengths, S).astype(jnp.int32)

        def place(b, n, line_ref, tile_ref, flags_ref, limit_ref):
            line, tile = line_ref[n], tile_ref[n]
            if self.by_keys:  # a tile that is not computed isn't loaded either: another step has the same
                return tile if self.kv_lengths is None else jnp.where(line * tile_k < limit_ref[b], tile, 0), line
            return line, tile if self.kv_lengths is None else jnp.minimum(tile, _last(limit_ref[b], tile_k))

        whole_shape = {"query": (B, G, R, Q, K), "key": (B, G, S, K), "row": (B, G, R, Q)}
        square = (lambda q, k: (k, q)) if self.by_keys else (lambda q, k: (q, k))
        blocks = {
            "query": ((None, None, R, tile_q, K), lambda b, g, q, k: (b, g, 0, q, 0)),
            "key": ((None, None, tile_k, K), lambda b, g, q, k: (b, g, k, 0)),
            "row": ((None, None, R, tile_q), lambda b, g, q, k: (b, g, 0, q)),
            "query_segment": ((None, 1, tile_q), lambda b, g, q, k: (b, 0, q)),
            "key_segment": ((None, 1, tile_k), lambda b, g, q, k: (b, 0, k)),
            "own": ((None, *square(tile_q, tile_k)), lambda b, g, q, k: (b, *square(q, k))),
        }

        def spec(kind):
            shape, index = blocks[kind]
            return pl.BlockSpec(shape, lambda b, g, n, *lists: index(b, g, *place(b, n, *lists)))

        sides, columns = {}, []
        if self.segment_ids is not None:
            segment_B1S = self.segment_ids.astype(jnp.int32)[:, None]
            sides |= {"query_segment": segment_B1S[:, :, :Q], "key_segment": segment_B1S}
            columns.append(pltpu.VMEM((square(tile_q, tile_k)[0], LANES), jnp.int32))
        if isinstance(self.mask, Ancestors):  # a tree is small: its own array, of the size of the mask's, in place of indices
            query, key = jnp.arange(Q, dtype=jnp.int32)[None, :, None], jnp.arange(S, dtype=jnp.int32)[None, None]
            own_BQS = self.mask.allowed(query, key, jnp.zeros((1, 1, 1), jnp.int32)).astype(jnp.int32)
            own_BQS = jnp.broadcast_to(own_BQS, (B, Q, S))
            sides["own"] = own_BQS.swapaxes(1, 2) if self.by_keys else own_BQS

        def body(line_ref, tile_ref, flags_ref, limit_ref, *refs):
            n = pl.program_id(2)
            query, key = (tile_ref[n], line_ref[n]) if self.by_keys else (line_ref[n], tile_ref[n])
            kernel(_At(query, key, flags_ref[n], limit_ref[pl.program_id(0)]), *refs)

        area = B * G * R * lines.total * tile_q * tile_k
        loads = {"query": len(lines.count_T), "row": len(lines.count_T), "key": lines.total}
        if self.by_keys:
            loads = {"query": lines.total, "row": lines.total, "key": len(lines.count_T)}
        size = {"query": R * tile_q * K, "row": R * tile_q, "key": tile_k * K}
        moved = [(kind, x.dtype.itemsize) for kind, x in inputs] + [(kind, jnp.dtype(dtype).itemsize) for kind, dtype in outputs]
        return pl.pallas_call(
            body,
            [jax.ShapeDtypeStruct(whole_shape[kind], dtype) for kind, dtype in outputs],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=4,
                grid=(B, G, len(plan.line)),
                in_specs=[*(spec(kind) for kind, _ in inputs), {kind: spec(kind) for kind in sides}],
                out_specs=[spec(kind) for kind, _ in outputs],
                scratch_shapes=[*(pltpu.VMEM(shape, jnp.float32) for shape in kept), *columns],
            ),
            compiler_params=PARAMS,
            cost_estimate=pl.CostEstimate(
                flops=2 * products * K * area,
                transcendentals=area,
                bytes_accessed=B * G * sum(loads[kind] * size[kind] * itemsize for kind, itemsize in moved),
            ),
            interpret=interpret,
            name=f"block_attention_{name}",
        )(plan.line, plan.tile, plan.flags, limit_B, *(x for _, x in inputs), sides)


def decode(
    q_BQHK: Float[Array, "B Q H K"],
    k_NBSGK: Float[Array, "N B S G K"],
    v_NBSGK: Float[Array, "N B S G K"],
    layer: Int[Array, ""],
    lengths_B: Int[Array, "B"],
    mask: Mask,
    *,
    scale: float,
    tile: int | None = None,
    interpret: Any = False,
) -> Float[Array, "B Q H K"]:
    """Returns attention of a pass's rows over the keys and values of `layer`, into which they were written (Cache.write).

    Query row r has index length + r, slot s has index s; tiles of slots from length + Q on are neither loaded nor computed. Slots before
    length are read by every row, as all masks have it: only tiles that hold rows of the pass evaluate the mask.

    tile  slots to a tile; by default 512, or less where VMEM wants it
    Raises NotImplementedError where `forward` does.
    """
    check(q_BQHK, k_NBSGK, v_NBSGK)
    (B, Q, H, K), (S, G) = q_BQHK.shape, k_NBSGK.shape[2:4]
    R = H // G
    tile_q = min(-(-Q // 8) * 8, max(ROWS // H // 8 * 8, 8))
    lines = -(-Q // tile_q)
    slot = -(-G // 8) * 8 * -(-K // LANES) * LANES * q_BQHK.dtype.itemsize
    tile_k = tile or next((t for t in (512, 256) if 4 * t * slot <= VMEM // 4 and t <= S), LANES)
    dot = _dot(q_BQHK.dtype)
    q_BQHK = jnp.pad(q_BQHK, ((0, 0), (0, lines * tile_q - Q), (0, 0), (0, 0)))
    q_BTGXK = q_BQHK.reshape(B, lines, tile_q, G, R, K).transpose(0, 1, 3, 4, 2, 5).reshape(B, lines, G, R * tile_q, K)

    # XLA lays out a bfloat16 cache of one key head as if that axis weren't there, and would copy it to have the axis back.
    heads = () if G == 1 and k_NBSGK.dtype == jnp.bfloat16 else (G,)
    k_NBSGK, v_NBSGK = (c.reshape(*c.shape[:3], *heads, K) for c in (k_NBSGK, v_NBSGK))

    sides = {}
    if isinstance(mask, Ancestors):
        start_B11, row_Q = lengths_B[:, None, None], jnp.arange(Q, dtype=jnp.int32)
        own_BQQ = mask.allowed(start_B11 + row_Q[None, :, None], start_B11 + row_Q[None, None], start_B11)
        sides["own"] = jnp.pad(own_BQQ.astype(jnp.float32), ((0, 0), (0, lines * tile_q - Q), (0, -Q % LANES)))

    def limit(length):
        return jnp.minimum(length + Q, S)

    def kernel(layer_ref, length_ref, q_ref, k_ref, v_ref, sides, out_ref, most_ref, total_ref, mixed_ref):
        length, line, step = length_ref[pl.program_id(0)], pl.program_id(1), pl.program_id(2)
        end = limit(length)

        @pl.when(step == 0)
        def _():
            _begin(most_ref, total_ref, mixed_ref)

        def visit(masked):
            if masked:
                key = step * tile_k + lax.broadcasted_iota(jnp.int32, (1, tile_k), 1)
                if sides:
                    rows = lax.broadcasted_iota(jnp.int32, (sides["own"].shape[1], tile_k), 0)
                    here = jnp.where(rows == key - length, 1.0, 0.0)  # a product with it puts the pass's rows where they lie in the tile
                    allow = (lax.dot_general(sides["own"][...], here, NN) > 0) | (key < length)
                else:
                    query = length + line * tile_q + lax.broadcasted_iota(jnp.int32, (tile_q, 1), 0)
                    allow = mask.allowed(query, key, length)
                allow &= key < end
            # All heads' rows are turned at once: a head's alone, which lie apart, take a program three to eight times as long.
            k_GCK, v_GCK = (jnp.swapaxes(ref[...], 0, 1) if heads else ref[...][None] for ref in (k_ref, v_ref))
            for g in range(G):
                score, v = dot(q_ref[g], k_GCK[g], NT) * scale, v_GCK[g]
                if masked:
                    score = jnp.where(allow[None], score.reshape(R, tile_q, tile_k), MASKED).reshape(R * tile_q, tile_k)
                    v = _rows_from(v, step * tile_k, 0, end)
                _mix_in(score, v, g, most_ref, total_ref, mixed_ref, dot)

        visited, clear = step * tile_k < end, (step + 1) * tile_k <= length
        pl.when(clear)(lambda: visit(False))
        pl.when(visited & jnp.logical_not(clear))(lambda: visit(True))

        @pl.when(step == pl.num_programs(2) - 1)
        def _():
            for g in range(G):
                out_ref[g] = _mean(g, total_ref, mixed_ref).astype(out_ref.dtype)

    rows = lambda: pl.BlockSpec((None, None, G, R * tile_q, K), lambda b, i, j, *_: (b, i, 0, 0, 0))

    def slots():
        def index(b, i, j, layer_ref, length_ref):
            return layer_ref[0], b, jnp.minimum(j, _last(limit(length_ref[b]), tile_k)), *[0] * len(heads), 0

        return pl.BlockSpec((None, None, tile_k, *heads, K), index)

    out_BTGXK = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(q_BTGXK.shape, q_BQHK.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, lines, _last(limit(lengths_B.max()), tile_k) + 1),
            in_specs=[
                rows(),
                slots(),
                slots(),
                {kind: pl.BlockSpec((None, tile_q, own.shape[2]), lambda b, i, j, *_: (b, i, 0)) for kind, own in sides.items()},
            ],
            out_specs=rows(),
            scratch_shapes=[pltpu.VMEM((G, R * tile_q, width), jnp.float32) for width in (LANES, LANES, K)],
        ),
        compiler_params=PARAMS,
        cost_estimate=pl.CostEstimate(
            flops=4 * B * H * lines * tile_q * S * K,
            transcendentals=B * H * lines * tile_q * S,
            bytes_accessed=(2 * q_BQHK.size + 2 * lines * B * S * G * K) * q_BQHK.dtype.itemsize,
        ),
        interpret=interpret,
        name="block_attention_decode",
    )(layer.astype(jnp.int32)[None], lengths_B.astype(jnp.int32), q_BTGXK, k_NBSGK, v_NBSGK, sides)
    out_BQHK = out_BTGXK.reshape(B, lines, G, R, tile_q, K).transpose(0, 1, 4, 2, 3, 5).reshape(B, lines * tile_q, H, K)
    return out_BQHK[:, :Q]


def check(q: Array, k: Array, v: Array) -> None:
    """Raises NotImplementedError for arrays that the kernels don't serve."""
    if q.dtype not in (jnp.bfloat16, jnp.float32) or k.dtype != q.dtype or v.dtype != q.dtype:
        raise NotImplementedError(f"the TPU kernel multiplies bfloat16 or float32; q, k, v are {q.dtype}, {k.dtype}, {v.dtype}")
    if q.shape[-1] > 256:
        raise NotImplementedError(f"the TPU kernel serves heads up to 256 wide; these are {q.shape[-1]}")


def _begin(most_ref: Any, total_ref: Any, mixed_ref: Any) -> None:
    most_ref[...] = jnp.full_like(most_ref, LEAST)
    total_ref[...] = jnp.zeros_like(total_ref)
    mixed_ref[...] = jnp.zeros_like(mixed_ref)


def _mix_in(score: Array, v: Array, r: int, most_ref: Any, total_ref: Any, mixed_ref: Any, dot: Callable[..., Array]) -> None:
    """Adds a tile to the running maximum, sum of weights and weighted values of the rows."""
    before = most_ref[r]
    most = jnp.maximum(before, score.max(-1, keepdims=True))
    weight, kept = jnp.exp(score - _lanes(most, score.shape[1])), jnp.exp(before - most)
    most_ref[r] = most
    total_ref[r] = kept * total_ref[r] + weight.sum(-1, keepdims=True)
    mixed_ref[r] = _lanes(kept, v.shape[1]) * mixed_ref[r] + dot(weight.astype(v.dtype), v, NN)


def _mean(r: int, total_ref: Any, mixed_ref: Any) -> Array:
    """Returns the weighted mean of the values, 0 of none."""
    total = total_ref[r]
    return mixed_ref[r] / _lanes(jnp.where(total == 0, 1.0, total), mixed_ref.shape[-1])


def _dot(dtype: Any) -> Callable[[Array, Array, Any], Array]:
    """Returns the product that sums in float32. By default a TPU rounds float32 factors to bfloat16."""
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return lambda a, b, dims: lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _lanes(x: Array, width: int) -> Array:
    """Returns [rows, width] of [rows, 128], whose lanes are all the same."""
    return jnp.tile(x, (1, -(-width // LANES)))[:, :width]


def _column(row: Array) -> Array:
    """Returns [n, 128], all lanes the same, of [1, n]."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def _rows_from(x: Array, index: Array, first: int | Array, end: int | Array) -> Array:
    """Returns x, whose row 0 has that index, with zeros outside first..end-1."""
    at = index + lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where((at >= first) & (at < end), x, jnp.zeros_like(x))


def _last(limit: Array, size: int) -> Array:
    """Returns the tile of the last of `limit` keys."""
    return lax.div(jnp.maximum(limit - 1, 0), jnp.int32(size))
