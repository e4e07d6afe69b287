"""A sparse SwiGLU MLP: a router picks a few of many experts for each token (Qwen3-MoE, SDAR-30B-A3B)."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# Experts lie over `tensor`; their two inner axes as the dense MLP's.
RULES = ((r"moe/router$", ("fsdp", None)), (r"moe/(gate|up)$", ("tensor", "fsdp", None)), (r"moe/down$", ("tensor", None, "fsdp")))


class SparseMLP(nn.Module):
    """Returns the weighted sum, for each token, of its `active` likeliest experts, the weights being the router's, normalised to 1.

    router probabilities = softmax(x W) in float32, the largest `active` of them renormalised, cast to x's type. Tokens are sorted by
    expert, so that each expert's product is one group of a ragged product and no expert computes a token that isn't its own.
    """

    experts: int
    active: int
    width: int
    gain: float = 1.0
    param_dtype: str = "float32"

    @nn.compact
    def __call__(self, x_BLD: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        (B, L, D), E, F = x_BLD.shape, self.experts, self.width
        weight = lambda name, shape, gain=1.0: self.param(name, nn.initializers.normal(gain * shape[-2] ** -0.5), shape, self.param_dtype)
        router_DE = weight("router", (D, E))
        gate_EDF, up_EDF, down_EFD = weight("gate", (E, D, F)), weight("up", (E, D, F)), weight("down", (E, F, D), self.gain)

        x_TD = x_BLD.reshape(-1, D)
        logits_TE = (x_TD @ router_DE.astype(x_TD.dtype)).astype(jnp.promote_types(x_TD.dtype, jnp.float32))
        share_TA, expert_TA = lax.top_k(jax.nn.softmax(logits_TE), self.active)
        share_TA = (share_TA / share_TA.sum(-1, keepdims=True)).astype(x_TD.dtype)

        order = jnp.argsort(expert_TA.reshape(-1), stable=True)  # pair p is token p // active
        sizes_E = jnp.bincount(expert_TA.reshape(-1), length=E).astype(jnp.int32)
        x_PD = x_TD[order // self.active]
        product = lambda x, w: lax.ragged_dot(x, w.astype(x.dtype), sizes_E)
        y_PD = product(nn.silu(product(x_PD, gate_EDF)) * product(x_PD, up_EDF), down_EFD)
        y_PD = y_PD * share_TA.reshape(-1)[order][:, None]
        return jnp.zeros_like(x_TD).at[order // self.active].add(y_PD).reshape(B, L, D)
