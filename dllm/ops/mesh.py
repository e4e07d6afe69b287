"""What model and sampler code knows of the mesh that is set (jax.set_mesh): over which axes its arrays lie. Without one, nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

ROWS = ("data", "fsdp")  # the axes that batches lie over


def sizes() -> dict[str, int]:
    """Returns the devices along each axis that is XLA's to divide; those that a surrounding shard_map has divided already are left out."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name: n for name, n, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True) if kind == AxisType.Auto}


def axes(rows: int, heads: int) -> tuple[tuple[str, ...] | None, str | None]:
    """Returns the mesh axes that a batch of `rows` and its `heads` lie over, None where an axis's devices don't divide them."""
    here = sizes()
    found = tuple(name for name in ROWS if name in here)
    divide = rows % math.prod(here[name] for name in found) == 0
    return found if found and divide else None, "tensor" if "tensor" in here and heads % here["tensor"] == 0 else None


def constrain(x: Array, spec: PartitionSpec) -> Array:
    """Returns x, laid over the mesh by its spec where a mesh is set."""
    return lax.with_sharding_constraint(x, spec) if sizes() else x


def spread_heads(heads: int, kv_heads: int) -> int:
    """Returns how many key heads attention holds: `kv_heads`, or so many copies of them that each slice along `tensor` has whole ones."""
    slices = sizes().get("tensor", 1)
    wanted = math.lcm(kv_heads, slices)
    return wanted if heads % wanted == 0 else kv_heads


def divided(f: Callable[..., Any], in_specs: tuple[Any, ...], out_specs: Any) -> Callable[..., Any]:
    """Returns f as each device runs it on its part of the arguments, by these specs; f itself without a mesh, or on one device.

    A kernel needs this: XLA divides no custom call.
    """
    here = sizes()
    if math.prod(here.values()) == 1:
        return f
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names=frozenset(here), check_vma=False)
