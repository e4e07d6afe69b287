"""Meshes and partition specs. Parallelism is `jax.jit` with these shardings; no other code knows how many devices there are."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dllm.core.paths import map_named
from dllm.core.types import UserError

AXES = ("data", "fsdp", "tensor")
Rules = tuple[tuple[str, tuple[str | None, ...]], ...]

COUNTERS: Rules = ((r"(^|/)(step|count)$", ()),)  # what a training state holds besides parameters and their moments


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices each axis spans: copies of the model, slices of its parameters, slices of its products. data = -1: the rest."""

    data: int
    fsdp: int
    tensor: int


def join_processes() -> None:
    """Joins the run's other processes where $JAX_COORDINATOR_ADDRESS (host:port of the first) says that there are some.

    $JAX_NUM_PROCESSES and $JAX_PROCESS_ID say how many and which; unset, the cluster is asked (Slurm, MPI, a TPU pod).
    """
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        number = lambda name: int(os.environ[name]) if name in os.environ else None
        jax.distributed.initialize(num_processes=number("JAX_NUM_PROCESSES"), process_id=number("JAX_PROCESS_ID"))


def make_mesh(config: MeshConfig) -> Mesh:
    """Returns the mesh ("data", "fsdp", "tensor") over the first devices of all processes. Raises UserError if they don't suffice."""
    inner, have = config.fsdp * config.tensor, jax.device_count()
    if config.fsdp < 1 or config.tensor < 1 or (config.data < 1 and config.data != -1):
        raise UserError(f"mesh sizes must be positive (mesh.data may be -1), not {config.data} x {config.fsdp} x {config.tensor}")
    if config.data == -1 and have % inner:
        raise UserError(f"mesh.fsdp x mesh.tensor = {inner} doesn't divide the {have} devices")
    data = have // inner if config.data == -1 else config.data
    if data * inner > have:
        raise UserError(f"mesh {data} x {config.fsdp} x {config.tensor} wants {data * inner} devices, there are {have}; set mesh.data=-1")
    devices = jax.devices()[: data * inner]
    return jax.make_mesh((data, config.fsdp, config.tensor), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def partition_specs(tree: Any, rules: Rules, mesh: Mesh) -> Any:
    """Returns the PartitionSpec of every leaf, by the first rule whose regular expression occurs in the leaf's path.

    A rule names an array's *last* axes, so it serves a layer's array, the scanned stack of them, and the optimizer's moments alike. A mesh
    axis that doesn't divide its dimension is left out. Raises ValueError for a leaf that no rule names.
    """

    def spec(name: str, leaf: Any) -> PartitionSpec:
        for pattern, axes in rules:
            if re.search(pattern, name):
                axes = (None,) * (leaf.ndim - len(axes)) + axes
                return PartitionSpec(*(a if a and n % mesh.shape[a] == 0 else None for a, n in zip(axes, leaf.shape)))
        raise ValueError(f"no partition rule matches {name!r} {leaf.shape}; add one to the model's RULES")

    return map_named(spec, tree)


def shardings(tree: Any, rules: Rules, mesh: Mesh) -> Any:
    """Returns the NamedSharding of every leaf; see partition_specs."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition_specs(tree, rules, mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: its rows over (data, fsdp)."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def batch_rows(mesh: Mesh) -> int:
    """Returns by how much a batch must be divisible."""
    return math.prod(mesh.shape[a] for a in ("data", "fsdp"))


def put_batch(local: np.ndarray, mesh: Mesh) -> jax.Array:
    """Returns the global batch of which `local` [B / processes, ...] is this process's slice."""
    return jax.make_array_from_process_local_data(batch_sharding(mesh), local)
