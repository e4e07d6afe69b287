"""The ordinary autoregressive objective: each token given all before it, the first given BOS alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dllm.ops import masks


@dataclasses.dataclass(frozen=True)
class Config:
    """The objective has nothing to set."""


def loss(
    functions: Any, tokens_BL: Int[Array, "B L"], key: jax.Array, config: Config
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Returns (mean cross-entropy in nats, {loss, bpc}); nothing is random here."""
    nats = -jnp.mean(token_logprobs(functions, tokens_BL))
    return nats, {"loss": nats, "bpc": nats / jnp.log(2.0)}


def token_logprobs(functions: Any, tokens_BL: Int[Array, "B L"]) -> Float[Array, "B L"]:
    """Returns log p(token l | tokens before l), in nats."""
    bos_B1 = jnp.full_like(tokens_BL[:, :1], functions.vocab)
    read_BL = jnp.concatenate([bos_B1, tokens_BL[:, :-1]], 1)
    positions_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1], dtype=jnp.int32)[None], tokens_BL.shape)
    logits_BLV, _ = functions.forward(None, read_BL, positions_BL, masks.causal)
    return jnp.take_along_axis(jax.nn.log_softmax(logits_BLV), tokens_BL[:, :, None], -1)[:, :, 0]
