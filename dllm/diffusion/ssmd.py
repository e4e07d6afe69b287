"""The objective of self-speculative masked diffusion: draft and target cross-entropy on the masked tokens, from one forward.

    loss = E 1/(L - i) sum_{d >= i} [ CE(draft_d) + CE(target_d) ]      order uniform, i uniform over 0..L-1     (paper eq. 7, per token)

The draft's half is the masked-diffusion (any-order autoregressive) bound, so E[draft half] / ln 2 bounds the bits a character
(Hoogeboom et al. 2022). The target's half with the same weight is a design choice, no likelihood.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dllm.diffusion.corruption import any_order


@dataclasses.dataclass(frozen=True)
class Config:
    """The objective has nothing to set."""


def loss(
    functions: Any, tokens_BL: Int[Array, "B L"], key: jax.Array, config: Config, given_B: Int[Array, "B"] | None = None
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Returns (loss in nats a masked token, metrics). Tokens are in sequence order.

    The first `given_B` positions of a row are its prefix: read, and never in the loss. At rank 0 the target is the draft by
    definition; its cross-entropy is counted there, without a gradient.

    Metrics in bits: `draft_bpc`, the bound a character (with a prefix: a character after it). `draft_ce` and `causal_ce` average over
    the same tokens with the same weights, those where the model has a target of its own: masked, and not of rank 0. `agreement` is the
    mean of 1 - TV(draft, target) over these. Without causal layers the last two are absent.
    """
    B, L = tokens_BL.shape
    order_BL, revealed_B = any_order(key, B, L, given_B)
    ranked_BL = jnp.take_along_axis(tokens_BL, order_BL, 1)
    draft_BLV, target_BLV = functions.both(ranked_BL, order_BL, revealed_B)

    rank_BL = jnp.broadcast_to(jnp.arange(L)[None], (B, L))
    weight_BL = jnp.where(rank_BL >= revealed_B[:, None], 1.0 / (L - revealed_B)[:, None], 0.0)  # each row sums to 1
    own_BL = jnp.where(rank_BL > 0, weight_BL, 0.0)

    def own_bits(x_BL):
        return jnp.sum(own_BL * x_BL) / jnp.sum(own_BL) / jnp.log(2.0)

    draft_BLV = jax.nn.log_softmax(draft_BLV)
    draft_BL = cross_entropy(draft_BLV, ranked_BL)
    draft = jnp.sum(weight_BL * draft_BL) / B
    metrics = {"draft_bpc": draft / jnp.log(2.0), "draft_ce": own_bits(draft_BL)}
    if target_BLV is None:
        return draft, {"loss": draft, **metrics}

    target_BLV = jax.nn.log_softmax(target_BLV)
    target_BL = jnp.where(rank_BL > 0, cross_entropy(target_BLV, ranked_BL), jax.lax.stop_gradient(draft_BL))
    total = draft + jnp.sum(weight_BL * target_BL) / B
    overlap_BL = jnp.sum(jnp.exp(jnp.minimum(draft_BLV, target_BLV)), -1)  # 1 - TV
    agreement = jnp.sum(own_BL * overlap_BL) / jnp.sum(own_BL)
    return total, {"loss": total, **metrics, "causal_ce": own_bits(target_BL), "agreement": agreement}


def cross_entropy(logprobs_BLV: Float[Array, "B L V"], tokens_BL: Int[Array, "B L"]) -> Float[Array, "B L"]:
    """Returns -log p(token), in nats."""
    return -jnp.take_along_axis(logprobs_BLV, tokens_BL[:, :, None], -1)[:, :, 0]
