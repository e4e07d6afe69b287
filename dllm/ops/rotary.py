"""Rotary position embedding (Su et al. 2021, RoFormer), rotate-half layout, with the table as data: the caller says who stands where."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Table = tuple[Float[Array, "B L C"], Float[Array, "B L C"]]  # cosines and sines of the K / 2 rotary pairs of a head


def rotary_table(positions: Int[Array, "B L P"], head_width: int, theta: float) -> Table:
    """Returns the cosines and sines [B, L, K / 2] that turn a head's K / 2 channel pairs.

    The pairs fall into P equal groups; group p is turned by positions[..., p], each group with the full range of frequencies:
    pair j of n = K / 2P has angle position * theta^(-j / n). P = 1 is the usual table.
    """
    per_group = head_width // (2 * positions.shape[-1])
    frequency = theta ** (-jnp.arange(per_group, dtype=jnp.float32) / per_group)
    angle = positions.astype(jnp.float32)[..., None] * jnp.expand_dims(frequency, range(positions.ndim))
    angle = angle.reshape(*positions.shape[:-1], -1)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Float[Array, "B L H K"], table: Table) -> Float[Array, "B L H K"]:
    """Returns x with channel pair (c, c + K / 2) of every head turned by the table's angle c."""
    cos, sin = (t[:, :, None, :] for t in table)
    a, b = jnp.split(x.astype(jnp.promote_types(x.dtype, jnp.float32)), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
