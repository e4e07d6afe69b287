"""Meshes and partition specs. Parallelism is `jax.jit` with these shardings; no other code knows how many devices there are."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dllm.core.paths import map_named
from dllm.core.types import UserError

AXES = ("data", "fsdp", "tensor")
Rules = tuple[tuple[str, tuple[str | None, ...]], ...]

COUNTERS: Rules = ((r"(^|/)(step|count)$", ()),)  # what a training state holds besides parameters and their moments


SILENCE = 30  # seconds after which a process counts as dead
MEETING = 300  # seconds that processes wait for each other at the start
GRACE = 3  # seconds that the first process, on which all hang, leaves to the others to say what is wrong
LOST = "another process of this run has ended or can't be reached; start all of them again, and they go on from the last checkpoint"


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices each axis spans: copies of the model, slices of its parameters, slices of its products. data = -1: the rest."""

    data: int
    fsdp: int
    tensor: int


@contextlib.contextmanager
def joined_processes() -> Iterator[None]:
    """Joins the run's other processes where $JAX_COORDINATOR_ADDRESS (host:port of the first) says that there are some.

    $JAX_NUM_PROCESSES and $JAX_PROCESS_ID say how many and which; unset, the cluster is asked (Slurm, MPI, a TPU pod). A process that fails
    inside prints why and ends at once. The others notice, by a broken connection or by its silence, and end too.

    Raises UserError where the variables don't describe a run of several processes, and where these don't meet.
    """
    several = _join()
    try:
        yield
    except Exception as e:
        if not several:
            raise
        known = isinstance(e, UserError)
        if known:
            print(f"error: {e}", file=sys.stderr)
        elif known := _of_another(e):
            print(f"error: {LOST} ({str(e).splitlines()[0][:200]})", file=sys.stderr)
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        if isinstance(e, UserError) and jax.process_index() == 0:
            time.sleep(GRACE)
        os._exit(2 if known else 1)  # the interpreter's own end would wait for threads and processes that wait for this one


def _of_another(e: BaseException) -> bool:
    """Returns whether the error is of the connection to other processes."""
    words = ("gloo", "nccl", "heartbeat", "coordination", "barrier", "unavailable:")
    return isinstance(e, RuntimeError) and any(word in str(e).lower() for word in words)


def _join() -> bool:
    address, count, index = (os.environ.get(f"JAX_{name}", "") for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"))
    if not address:
        if count or index:
            name = "JAX_NUM_PROCESSES" if count else "JAX_PROCESS_ID"
            raise UserError(f"{name} is set and JAX_COORDINATOR_ADDRESS isn't; set that to host:port of process 0, or unset {name}")
        return False
    if not re.fullmatch(r".+:\d+", address):
        raise UserError(f"JAX_COORDINATOR_ADDRESS is {address!r}; make it host:port of process 0")
    for name, value in (("JAX_NUM_PROCESSES", count), ("JAX_PROCESS_ID", index)):
        if value and not value.isdecimal():
            raise UserError(f"{name} is {value!r}; make it a whole number")
    if count and index and not int(index) < int(count):
        raise UserError(f"JAX_PROCESS_ID is {index} and JAX_NUM_PROCESSES {count}; number the processes from 0 to {int(count) - 1}")
    # JAX would take SIGTERM for itself; what to do at it is the program's to say.
    jax.config.update("jax_enable_preemption_service", False)
    numbers = dict(num_processes=int(count) if count else None, process_id=int(index) if index else None)
    # JAX aborts where they don't meet, before anything could be caught: so what it is about is said first.
    who = f"process {index or '?'} of {count or '?'}"
    print(f"{who}, meeting at {address}: all must come within {MEETING} s, each with a number of its own", flush=True)
    waits = dict(heartbeat_timeout_seconds=SILENCE, shutdown_timeout_seconds=SILENCE, initialization_timeout=MEETING)
    try:
        jax.distributed.initialize(**numbers, **waits)
    except (ValueError, RuntimeError) as e:
        reason = str(e).strip().splitlines()[0][:200]
        raise UserError(f"the processes of this run don't meet at JAX_COORDINATOR_ADDRESS={address}: {reason}") from e
    return jax.process_count() > 1


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
    return mesh_of((data, config.fsdp, config.tensor), jax.devices()[: data * inner])


def mesh_of(shape: tuple[int, int, int], devices: list[Any]) -> Mesh:
    """Returns the mesh over all of `devices`, neighbours by the axes behind; an axis may take a part of a TPU slice's side."""
    placed = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * 3)


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


def process_rows(mesh: Mesh) -> tuple[int, int]:
    """Returns (index, count): which of how many equal slices of a batch this process feeds.

    Processes whose devices hold the same rows, because `tensor` reaches over them, feed the same slice. Raises UserError where a process
    has no device in the mesh, or some but not all of another's rows.
    """
    held: dict[int, set[int]] = {process: set() for process in range(jax.process_count())}
    for device, (rows,) in batch_sharding(mesh).devices_indices_map((batch_rows(mesh),)).items():
        held[device.process_index].add(rows.start or 0)
    for process, rows in held.items():
        if not rows:
            raise UserError(f"the mesh of {mesh.size} devices has none of process {process}'s; set mesh.data=-1, or start fewer processes")
    slices = sorted({tuple(sorted(rows)) for rows in held.values()})
    if len(slices) * len(slices[0]) != batch_rows(mesh) or len({*map(len, slices)}) > 1:
        raise UserError("the processes' devices share some rows of a batch and not others; make mesh.tensor divide a process's devices")
    return slices.index(tuple(sorted(held[jax.process_index()]))), len(slices)


def put_batch(local: np.ndarray, mesh: Mesh) -> jax.Array:
    """Returns the global batch of which `local` [B / processes, ...] is this process's slice."""
    return jax.make_array_from_process_local_data(batch_sharding(mesh), local)


def make_poll(mesh: Mesh) -> Callable[[bool], bool]:
    """Returns poll(asked) -> whether any process had asked at its call before this one; of a lone process, whether it asks now.

    All processes call it equally often, and all get the same answers. (One call late, so that none waits for the devices.)
    """
    if jax.process_count() == 1:
        return lambda asked: asked
    rows = batch_rows(mesh) // process_rows(mesh)[1]
    most = jax.jit(jnp.max, out_shardings=replicated(mesh))
    ask = lambda asked: most(put_batch(np.full(rows, asked, np.int32), mesh))
    before = ask(False)

    def poll(asked: bool) -> bool:
        nonlocal before
        answer, before = bool(before), ask(asked)
        return answer

    return poll
