"""The derivative of block attention, shared by the implementations: from the output and the saved log-sum-exp, never from saved weights."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from dllm.kernels.block_attention import gpu, tpu, xla
from dllm.ops.masks import Mask


@dataclasses.dataclass(frozen=True)
class How:
    """What computes attention: "mosaic_tpu", "mosaic_gpu" or "xla"; the scores' scale; the TPU form's tiles; the interpreter's setting."""

    implementation: str
    scale: float
    tiles: tpu.Tiles | None = None
    interpret: Any = False


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    how: How,
    q: Float[Array, "B Q H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    segment_ids: Int[Array, "B S"] | None,
    kv_lengths: Int[Array, "B"] | None,
) -> tuple[Float[Array, "B Q H K"], Float[Array, "B H Q"]]:
    """Returns (out, log-sum-exp) as ref.reference defines them; both have right gradients, so that results can be merged."""
    options: dict[str, Any] = dict(scale=how.scale, segment_ids=segment_ids, kv_lengths=kv_lengths, interpret=how.interpret)
    if how.implementation == "mosaic_tpu":
        return tpu.forward(q, k, v, mask, tiles=how.tiles, **options)
    if how.implementation == "mosaic_gpu":
        return gpu.forward(q, k, v, mask, **options)
    return xla.forward(q, k, v, mask, scale=how.scale, segment_ids=segment_ids, kv_lengths=kv_lengths)


def _forward(how, q, k, v, mask, segment_ids, kv_lengths):
    out, lse = attend(how, q, k, v, mask, segment_ids, kv_lengths)
    return (out, lse), (q, k, v, mask, segment_ids, kv_lengths, out, lse)


def _backward(how, saved, given):
    q, k, v, mask, segment_ids, kv_lengths, out, lse = saved
    options: dict[str, Any] = dict(scale=how.scale, segment_ids=segment_ids, kv_lengths=kv_lengths)
    if how.implementation == "mosaic_tpu":
        gradients = tpu.backward(q, k, v, mask, out, lse, *given, tiles=how.tiles, interpret=how.interpret, **options)
    else:
        gradients = xla.backward(q, k, v, mask, out, lse, *given, **options)
    return *gradients, None, None, None


attend.defvjp(_forward, _backward)
