"""The ordinary autoregressive objective: each token given all before it. The first is given BOS alone, if the model has a BOS of its own
(gpt); if it has none (qwen3 with mask_id = -1), the first is not scored."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dllm.ops import masks

MODEL = "autoregressive"  # what it goes with, as samplers.loop.kind says it


@dataclasses.dataclass(frozen=True)
class Config:
    """The objective has nothing to set."""


def loss(
    functions: Any, tokens_BL: Int[Array, "B L"], key: jax.Array, config: Config
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Returns (mean cross-entropy in nats a scored token, {loss, bpc}: also in bits); nothing is random here."""
    logprobs_BL = token_logprobs(functions, tokens_BL)
    nats = -jnp.mean(logprobs_BL[:, first_scored(functions) :])
    return nats, {"loss": nats, "bpc": nats / jnp.log(2.0)}


def first_scored(functions: Any) -> int:
    """Returns the position of the first token that the model gives a probability."""
    return 1 - functions.lead


def token_logprobs(functions: Any, tokens_BL: Int[Array, "B L"]) -> Float[Array, "B L"]:
    """Returns log p(token l | tokens before l), in nats; 0 for a token that isn't scored."""
    positions_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1], dtype=jnp.int32)[None], tokens_BL.shape)
    first_B1 = tokens_BL[:, :1]
    if first_scored(functions):
        logits_BLV, _ = functions.forward(None, tokens_BL, positions_BL, masks.causal)
        logp_BLV = jax.nn.log_softmax(logits_BLV[:, :-1])
        logp_BL = jnp.take_along_axis(logp_BLV, tokens_BL[:, 1:, None], -1)[:, :, 0]
        return jnp.concatenate([jnp.zeros_like(first_B1, logp_BL.dtype), logp_BL], 1)
    read_BL = jnp.concatenate([jnp.full_like(first_B1, functions.vocab), tokens_BL[:, :-1]], 1)
    logits_BLV, _ = functions.forward(None, read_BL, positions_BL, masks.causal)
    return jnp.take_along_axis(jax.nn.log_softmax(logits_BLV), tokens_BL[:, :, None], -1)[:, :, 0]
