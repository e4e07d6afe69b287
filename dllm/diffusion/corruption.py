"""Which tokens are hidden, and in which order they come back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def any_order(
    key: jax.Array, batch: int, length: int, given_BL: Bool[Array, "B L"] | None = None
) -> tuple[Int[Array, "B L"], Int[Array, "B"]]:
    """Returns (order, revealed): a uniformly random order of the positions for each row, and how many of its ranks are revealed.

    revealed is uniform over given..L-1 in every row, and stratified over the batch with one shared offset u, which takes most of the
    noise out of the loss (as MD4 draws its times):  i_b = n_b + floor((L - n_b) ((u + b / B) mod 1)).
    The n_b positions of `given`, of which there are fewer than L, come first in the order, and are always revealed.
    """
    order_key, offset_key = jax.random.split(key)
    given_BL = jnp.zeros((batch, length), bool) if given_BL is None else given_BL
    given_B = given_BL.sum(1, dtype=jnp.int32)
    order_BL = jnp.argsort(jax.random.uniform(order_key, (batch, length)) - given_BL, axis=1)
    part_B = (jax.random.uniform(offset_key) + jnp.arange(batch) / batch) % 1.0
    revealed_B = given_B + jnp.floor((length - given_B) * part_B).astype(jnp.int32)
    return order_BL.astype(jnp.int32), jnp.minimum(revealed_B, length - 1)  # the product may round up to L - n
