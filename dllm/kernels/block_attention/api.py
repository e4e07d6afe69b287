"""Block attention: the two public functions, and what computes them on which platform."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from dllm.core.types import UserError
from dllm.kernels.block_attention import gpu, tpu, vjp
from dllm.kernels.block_attention.ref import reference
from dllm.ops.masks import Mask

IMPLEMENTATIONS = ("mosaic_tpu", "mosaic_gpu", "xla", "reference")


def block_attention(
    q: Float[Array, "B Q H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    *,
    scale: float,
    segment_ids: Int[Array, "B S"] | None = None,
    kv_lengths: Int[Array, "B"] | None = None,
    implementation: str | None = None,
    tiles: tpu.Tiles | None = None,
    interpret: Any = False,
) -> Float[Array, "B Q H K"]:
    """Returns softmax(scale q k^T) v over the keys that the mask allows, zeros where it allows none; H / G query heads to a key head.

    Queries have the indices 0..Q-1, keys 0..S-1; the mask compares these.

    segment_ids     a query reads keys of its own segment only
    kv_lengths      of each row, the keys that are there
    implementation  "mosaic_tpu", "mosaic_gpu", "xla" (tile by tile, without a kernel), "reference" (the whole square of scores); None: the
                    kernel of the `platform`
    tiles           of the TPU kernel, if not those that it chooses
    interpret       what Pallas takes, to run a kernel on a CPU

    Raises NotImplementedError, with a line that says why, for a case that the kernel doesn't serve, and for a platform without one.
    """
    return attention_and_lse(
        q, k, v, mask, scale=scale, segment_ids=segment_ids, kv_lengths=kv_lengths, implementation=implementation, tiles=tiles,
        interpret=interpret,
    )[0]  # fmt: skip


def attention_and_lse(
    q: Float[Array, "B Q H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    *,
    scale: float,
    segment_ids: Int[Array, "B S"] | None = None,
    kv_lengths: Int[Array, "B"] | None = None,
    implementation: str | None = None,
    tiles: tpu.Tiles | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B Q H K"], Float[Array, "B H Q"]]:
    """Returns what block_attention does, and the log-sum-exp of each query's scores, -inf where it reads none. Both have gradients."""
    implementation = _chosen(implementation)
    if implementation == "reference":
        return reference(q, k, v, mask, scale=scale, segment_ids=segment_ids, kv_lengths=kv_lengths)
    return vjp.attend(vjp.How(implementation, scale, tiles, interpret), q, k, v, mask, segment_ids, kv_lengths)


def decode_attention(
    q_BQHK: Float[Array, "B Q H K"],
    k_NBSGK: Float[Array, "N B S G K"],
    v_NBSGK: Float[Array, "N B S G K"],
    layer: Int[Array, ""],
    lengths_B: Int[Array, "B"],
    mask: Mask,
    *,
    scale: float,
    implementation: str | None = None,
    interpret: Any = False,
) -> Float[Array, "B Q H K"]:
    """Returns attention of a pass's Q rows over a cache's `layer`, into which their keys and values were written; without derivative.

    Query row r of batch row b has index lengths[b] + r, slot s has index s. Slots from lengths + Q on aren't read; those before `lengths`
    are read by every row, whatever the mask, which tells about the pass's own rows. The cache is read where it lies.

    implementation, interpret, and NotImplementedError: as block_attention.
    """
    implementation = _chosen(implementation)
    if implementation == "reference":
        k, v = k_NBSGK[layer], v_NBSGK[layer]
        return reference(q_BQHK, k, v, mask, scale=scale, kv_lengths=lengths_B + q_BQHK.shape[1], start=lengths_B)[0]
    if implementation == "xla":
        raise NotImplementedError("decoding has no form without a kernel here")
    kernel = tpu.decode if implementation == "mosaic_tpu" else gpu.decode
    return kernel(q_BQHK, k_NBSGK, v_NBSGK, layer, lengths_B, mask, scale=scale, interpret=interpret)


def platform() -> str:
    """Returns what is compiled for, "tpu", "gpu" or "cpu": what the mesh is made of, if one is set (jax.set_mesh), else JAX's default.

    So a program that is compiled ahead of time, for devices that aren't here, gets their kernels.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def _chosen(implementation: str | None) -> str:
    if implementation is None:
        here = platform()
        if here not in ("tpu", "gpu", "cuda"):
            raise NotImplementedError(f"there is no attention kernel for the platform {here}")
        return "mosaic_tpu" if here == "tpu" else "mosaic_gpu"
    if implementation not in IMPLEMENTATIONS:
        raise UserError(f"implementation {implementation!r}; it can be {' or '.join(map(repr, IMPLEMENTATIONS))}")
    return implementation
