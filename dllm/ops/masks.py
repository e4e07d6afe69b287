"""Attention masks as small static specs: which key a query may read, told by their indices in the sequence, never by rotary positions.

A spec holds no array and is registered static, so it goes through jit, scan and remat as an argument and is part of their cache key.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@dataclasses.dataclass(frozen=True)
class Mask:
    """What all masks share: pictures. A kind of mask adds `allowed`."""

    def dense(self, queries: int, keys: int) -> Bool[Array, "Q S"]:
        """Returns the mask of query rows 0..Q-1 over key columns 0..S-1. For tests and pictures only."""
        allowed = self.allowed(jnp.arange(queries)[:, None], jnp.arange(keys)[None])
        return jnp.broadcast_to(allowed, (queries, keys))

    def show(self, queries: int = 4, keys: int = 4) -> str:
        """Returns the picture: a line for each query, `x` where it reads the key of that column."""
        return "\n".join(" ".join("x" if allow else "." for allow in row) for row in self.dense(queries, keys).tolist())


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """Every query reads every key.

    x x x x
    x x x x
    x x x x
    x x x x
    """

    def allowed(self, query_index: Int[Array, "..."], key_index: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Returns True everywhere, in the shape the two index arrays broadcast to."""
        return jnp.ones(jnp.broadcast_shapes(query_index.shape, key_index.shape), bool)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """A query reads the keys up to and including its own index.

    x . . .
    x x . .
    x x x .
    x x x x
    """

    def allowed(self, query_index: Int[Array, "..."], key_index: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Returns key <= query, in the shape the two index arrays broadcast to."""
        return key_index <= query_index


full = Full()
causal = Causal()
