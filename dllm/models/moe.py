"""A sparse SwiGLU MLP: a router picks a few of many experts for each token (Qwen3-MoE, SDAR-30B-A3B)."""

from __future__ import annotations

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from dllm.ops import mesh

# Experts lie over `tensor`; their two inner axes as the dense MLP's.
RULES = ((r"moe/router$", ("fsdp", None)), (r"moe/(gate|up)$", ("tensor", "fsdp", None)), (r"moe/down$", ("tensor", None, "fsdp")))


class SparseMLP(nn.Module):
    """Returns the weighted sum, for each token, of its `active` likeliest experts, the weights being the router's, normalised to 1.

    router probabilities = softmax(x W) in float32, the largest `active` of them renormalised, cast to x's type. The pairs (token, expert)
    are sorted by expert, so that no expert computes more than its own. On TPU each expert is a group of a ragged product; elsewhere XLA
    would make that a dense product with all experts (jax 0.12, CPU and H200: `experts` times the work), hence tiles.
    """

    experts: int
    active: int
    width: int
    gain: float = 1.0
    param_dtype: str = "float32"

    @nn.compact
    def __call__(self, x_BLD: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        (B, _, D), E, F = x_BLD.shape, self.experts, self.width
        weight = lambda name, shape, gain=1.0: self.param(name, nn.initializers.normal(gain * shape[-2] ** -0.5), shape, self.param_dtype)
        router_DE = weight("router", (D, E))
        gate_EDF, up_EDF, down_EFD = weight("gate", (E, D, F)), weight("up", (E, D, F)), weight("down", (E, F, D), self.gain)

        # Each device takes its rows' pairs, and of these the ones of the experts that it has.
        rows, experts = mesh.axes(B, E)
        weights = (w.astype(x_BLD.dtype) for w in (gate_EDF, up_EDF, down_EFD))  # what is gathered over `fsdp` is of the activations' type
        specs = PartitionSpec(rows), PartitionSpec(), *[PartitionSpec(experts)] * 3
        run = functools.partial(_mix_experts, active=self.active, axis=experts if math.prod(mesh.sizes().values()) > 1 else None)
        return mesh.divided(run, specs, PartitionSpec(rows))(x_BLD, router_DE.astype(x_BLD.dtype), *weights)


def _mix_experts(x_BLD: Array, router_DE: Array, *weights: Array, active: int, axis: str | None) -> Array:
    """Returns SparseMLP's sum for some rows; with `axis`, each device along it adds what the experts whose weights it holds give."""
    D, E = x_BLD.shape[-1], len(weights[0])
    x_TD = x_BLD.reshape(-1, D)
    logits_TE = (x_TD @ router_DE).astype(jnp.promote_types(x_TD.dtype, jnp.float32))
    share_TA, expert_TA = lax.top_k(jax.nn.softmax(logits_TE), active)
    share_TA = (share_TA / share_TA.sum(-1, keepdims=True)).astype(x_TD.dtype)

    own_P = expert_TA.reshape(-1) - (lax.axis_index(axis) * E if axis else 0)
    own_P = jnp.where((own_P >= 0) & (own_P < E), own_P, E)  # pairs of other devices' experts come last
    order_P = jnp.argsort(own_P, stable=True)  # pair p is token p // active
    sizes_E = jnp.bincount(own_P, length=E + 1)[:E].astype(jnp.int32)
    x_PD = x_TD[order_P // active]
    y_PD = lax.platform_dependent(x_PD, sizes_E, *weights, tpu=ragged, default=tiled)
    y_PD = jnp.where((own_P[order_P] < E)[:, None], y_PD * share_TA.reshape(-1)[order_P][:, None], 0)
    y_TD = jnp.zeros_like(x_TD).at[order_P // active].add(y_PD)
    return (lax.psum(y_TD, axis) if axis else y_TD).reshape(x_BLD.shape)


def ragged(
    x_PD: Float[Array, "P D"],
    sizes_E: Int[Array, "E"],
    gate_EDF: Float[Array, "E D F"],
    up_EDF: Float[Array, "E D F"],
    down_EFD: Float[Array, "E F D"],
) -> Float[Array, "P D"]:
    """Returns the SwiGLU of each row under its expert's weights; the first sizes[0] rows are those of expert 0, and so on."""
    product = lambda x, w: lax.ragged_dot(x, w.astype(x.dtype), sizes_E)
    return product(nn.silu(product(x_PD, gate_EDF)) * product(x_PD, up_EDF), down_EFD)


def tiled(
    x_PD: Float[Array, "P D"],
    sizes_E: Int[Array, "E"],
    gate_EDF: Float[Array, "E D F"],
    up_EDF: Float[Array, "E D F"],
    down_EFD: Float[Array, "E F D"],
) -> Float[Array, "P D"]:
    """Returns the same as `ragged`. Each group is padded to whole tiles of a quarter of its mean size, and the tiles are gone through.

    So the work is at most 5/4 of the rows' own, however they are spread.
    """
    (P, D), E = x_PD.shape, len(sizes_E)
    tile = max(1, P // (4 * E))
    tiles = (P + E * (tile - 1)) // tile  # as many as any spread can need
    tiles_E = -(-sizes_E // tile)
    last_E = jnp.cumsum(tiles_E)
    expert_N = jnp.minimum(jnp.searchsorted(last_E, jnp.arange(tiles), side="right"), E - 1)
    shift_E = (last_E - tiles_E) * tile - (jnp.cumsum(sizes_E) - sizes_E)  # from a group's first row to its first tile's
    slot_P = jnp.arange(P) + jnp.repeat(shift_E, sizes_E, total_repeat_length=P)
    x_NTD = jnp.zeros((tiles * tile, D), x_PD.dtype).at[slot_P].set(x_PD, unique_indices=True).reshape(tiles, tile, D)
    return _through_tiles(x_NTD, expert_N, (gate_EDF, up_EDF, down_EFD)).reshape(-1, D)[slot_P]


def _swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    product = lambda x, w: x @ w.astype(x.dtype)
    return product(nn.silu(product(x, gate)) * product(x, up), down)


@jax.custom_vjp
def _through_tiles(x_NTD: Array, expert_N: Array, weights: tuple[Array, ...]) -> Array:
    return lax.map(lambda tile: _swiglu(tile[0], *(w[tile[1]] for w in weights)), (x_NTD, expert_N))


def _forward(*arguments):
    return _through_tiles(*arguments), arguments


def _backward(arguments, dy_NTD):
    """By hand, since scan's own would add a gradient of all experts at every tile; this adds each tile's in place, and recomputes it."""
    x_NTD, expert_N, weights = arguments

    def step(grads, tile):
        x, expert, dy = tile
        dx, *dw = jax.vjp(_swiglu, x, *(w[expert] for w in weights))[1](dy)
        return tuple(g.at[expert].add(d) for g, d in zip(grads, dw)), dx

    grads, dx_NTD = lax.scan(step, tuple(map(jnp.zeros_like, weights)), (x_NTD, expert_N, dy_NTD))
    return dx_NTD, None, grads


_through_tiles.defvjp(_forward, _backward)
