"""The key/value cache: an argument and a result of a forward pass, nothing that is stored between calls."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from dllm.core.types import UserError
from dllm.kernels.block_attention import platform
from dllm.ops import mesh


@struct.dataclass
class Cache:
    """Keys and values of all layers, and how far each row is filled.

    A forward pass writes its rows from `lengths_B` on and reads what lies before. Only the caller moves `lengths_B`: forward to keep
    what was written, not at all or back to forget it; `keep` keeps some of it. (Fields are Any because tree transforms put shapes and
    specs into them.)
    """

    k: Any  # [N B S G K]
    v: Any  # [N B S G K]
    lengths_B: Any  # [B] int32

    @classmethod
    def empty(cls, layers: int, batch: int, slots: int, kv_heads: int, head_width: int, dtype: Any) -> Cache:
        """Returns a cache of zeros in which no row is filled."""
        shape = (layers, batch, slots, kv_heads, head_width)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((batch,), jnp.int32))

    def write(self, layer: Int[Array, ""], k: Float[Array, "B Q G K"], v: Float[Array, "B Q G K"]) -> Cache:
        """Returns the cache with slots [length, length + Q) of `layer` set; what falls beyond S is dropped (see require_room).

        One scatter with B as a batching dimension: in place in a loop, and without collectives when B is sharded.
        Raises UserError where Q is more than S: no row could have room.
        """
        if k.shape[1] > self.k.shape[2]:
            raise UserError(f"a pass over {k.shape[1]} rows doesn't fit a cache of {self.k.shape[2]} slots; make the cache longer")
        slot_BQ = self.lengths_B[:, None] + jnp.arange(k.shape[1], dtype=jnp.int32)[None]
        return self.replace(k=_put(self.k, layer, slot_BQ, k), v=_put(self.v, layer, slot_BQ, v))

    def keep(self, rows_BQ: Int[Array, "B Q"], n_B: Int[Array, "B"]) -> Cache:
        """Returns the cache after a pass of which n rows count: those of index rows[:, :n] in the pass (its row 0 lies in slot length),
        moved to slots [length, length + n) in that order, and the lengths moved behind them.

        What their keys were rotated by stays. Each scatter comes after the gather of all that it moves: no row is read after it was
        overwritten; in place in a loop.
        """
        slots, column_1Q = self.k.shape[2], jnp.arange(rows_BQ.shape[1], dtype=jnp.int32)[None]
        kept_BQ = column_1Q < n_B[:, None]
        from_BQ = self.lengths_B[:, None] + rows_BQ
        to_BQ = jnp.where(kept_BQ, self.lengths_B[:, None] + column_1Q, slots + column_1Q)  # beyond the end: dropped
        take = lax.GatherDimensionNumbers(
            offset_dims=(2, 3),
            collapsed_slice_dims=(0, 2),
            start_index_map=(0, 2),
            operand_batching_dims=(1,),
            start_indices_batching_dims=(0,),
        )

        def move(layer, x):
            rows_BQGK = lax.gather(x, _places(layer, from_BQ), take, (1, 1, 1, *x.shape[3:]), mode="clip")
            return _put(x, layer, to_BQ, rows_BQGK)

        # Layer by layer: for all at once XLA would turn the whole cache on a TPU, so that a slot's layers lie side by side.
        moved = lambda x: lax.fori_loop(jnp.int32(0), jnp.int32(x.shape[0]), move, x)
        return self.replace(k=moved(self.k), v=moved(self.v), lengths_B=self.lengths_B + n_B)


def _places(layer: Int[Array, ""], slot_BQ: Int[Array, "B Q"]) -> Int[Array, "B Q 2"]:
    return jnp.stack([jnp.broadcast_to(layer.astype(jnp.int32), slot_BQ.shape), slot_BQ], -1)


def _put(x: Array, layer: Int[Array, ""], slot_BQ: Int[Array, "B Q"], rows_BQGK: Array) -> Array:
    """Returns a cache's array with these slots of `layer` set; what lies beyond the end is dropped."""
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=(2, 3),
        inserted_window_dims=(0, 2),
        scatter_dims_to_operand_dims=(0, 2),
        operand_batching_dims=(1,),
        scatter_indices_batching_dims=(0,),
    )
    at_BQ2 = _places(layer, slot_BQ)
    return _laid_out(lax.scatter(x, at_BQ2, rows_BQGK, dims, mode="drop", unique_indices=True, indices_are_sorted=True))


def _laid_out(x: Array) -> Array:
    """Returns a cache's array x [N B S G K], on TPUs with slots next to K in memory where a device has one head: so the decode kernel reads
    it. XLA would put that head there, and copy all layers' keys for every layer's kernel."""
    devices = mesh.sizes().get("tensor", 1) if mesh.axes(x.shape[1], x.shape[3])[1] else 1
    if platform() != "tpu" or x.shape[3] > devices or x.dtype != jnp.bfloat16:
        return x
    return with_layout_constraint(x, Layout(major_to_minor=(0, 1, 3, 2, 4)))


def require_room(cache: Cache, rows: int) -> None:
    """Raises UserError unless every row of the batch has slots for a pass over `rows` rows. For the host: it reads `lengths_B`.

    (A program can't raise: a write beyond the end is dropped, and what attends to it reads other keys. A loop that runs on the device
    makes a cache with room for its last pass; one that is driven from outside asks here before each pass.)
    """
    lengths, slots = np.asarray(cache.lengths_B), cache.k.shape[2]
    if (lengths + rows > slots).any():
        b = int(lengths.argmax())
        raise UserError(
            f"row {b} of the cache is filled to {lengths[b]} of {slots} slots; there is no room for {rows} more: make it longer"
        )
