"""The key/value cache: an argument and a result of a forward pass, nothing that is stored between calls."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int


@struct.dataclass
class Cache:
    """Keys and values of all layers, and how far each row is filled.

    A forward pass writes its rows from `lengths_B` on and reads what lies before. Only the caller moves `lengths_B`: forward to keep
    what was written, not at all or back to forget it. (Fields are Any because tree transforms put shapes and specs into them.)
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
        """Returns the cache with slots [length, length + Q) of `layer` set; what falls beyond S is dropped.

        One scatter with B as a batching dimension: in place in a loop, and without collectives when B is sharded.
        """
        slot = self.lengths_B[:, None] + jnp.arange(k.shape[1], dtype=jnp.int32)[None]
        at = jnp.stack([jnp.broadcast_to(layer.astype(jnp.int32), slot.shape), slot], -1)  # [B Q 2]
        dims = lax.ScatterDimensionNumbers(
            update_window_dims=(2, 3),
            inserted_window_dims=(0, 2),
            scatter_dims_to_operand_dims=(0, 2),
            operand_batching_dims=(1,),
            scatter_indices_batching_dims=(0,),
        )

        def put(into, rows):
            return lax.scatter(into, at, rows, dims, mode="drop", unique_indices=True, indices_are_sorted=True)

        return self.replace(k=put(self.k, k), v=put(self.v, v))
