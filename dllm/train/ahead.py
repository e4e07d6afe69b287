"""A run's train step and its sampler over abstract arrays, for meshes of devices that aren't here: what is compiled ahead of time."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dllm.core.types import UserError
from dllm.ops.draws import KeyedDraws
from dllm.ops.settings import make_settings
from dllm.samplers.loop import compile_sampler, empty_prompt
from dllm.train import sharding, state, step
from dllm.train.run import Run


class Program(NamedTuple):
    function: Any  # jitted; trace, lower and compile it with the mesh set
    arguments: tuple[Any, ...]  # shapes, types and shardings
    sizes: dict[str, int]  # bytes a device of `parameters`, `ema` and `optimizer`


def make_mesh(config: sharding.MeshConfig, devices: list[Any]) -> Mesh:
    """Returns the mesh of train.sharding over these devices. Raises UserError where it doesn't take all of them."""
    inner = max(config.fsdp * config.tensor, 1)
    shape = (len(devices) // inner if config.data == -1 else config.data, config.fsdp, config.tensor)
    if min(shape) < 1 or math.prod(shape) != len(devices):
        text = f"a mesh of {config.data} x {config.fsdp} x {config.tensor} (data, fsdp, tensor) doesn't divide {len(devices)} devices"
        raise UserError(f"{text}; set mesh.fsdp and mesh.tensor so that their product does, and mesh.data=-1")
    return sharding.mesh_of(shape, devices)


def train_program(run: Run, mesh: Mesh) -> Program:
    """Returns the run's train step; rows hold tokens alone. Raises UserError where the batch can't be shared out."""
    here = state.abstract(run, mesh)
    rows, parts = run.train.batch, run.train.accumulate
    _require_rows(rows, mesh, parts)
    batch = _over_rows({"tokens": jax.ShapeDtypeStruct((rows, run.data.length), jnp.int32)}, mesh)
    sizes = {"parameters": here.params, "ema": here.ema, "optimizer": here.opt_state}
    return Program(step.make_train_step(run, mesh), (here, batch), {key: _per_device(tree) for key, tree in sizes.items()})


def sampler_program(run: Run, mesh: Mesh, rows: int, length: int) -> Program:
    """Returns the run's sampler for `rows` sequences of `length` positions; none is given, and all settings are at their defaults.

    Raises UserError for a run without a sampler, and where the rows can't be shared out.
    """
    if run.sampler is None:
        raise UserError("the run has no sampler; set sampler.name")
    _require_rows(rows, mesh, 1)
    model, params = run.model, state.abstract(run, mesh).params
    sampler = compile_sampler(run.sampler.module, model.module, model.config, run.sampler.config)
    request = jax.ShapeDtypeStruct((rows,), jnp.int32)
    of_rows = jax.eval_shape(lambda: (make_settings(rows, model.config.vocab), empty_prompt(rows, length)))
    settings, prompt, request = _over_rows((*of_rows, request), mesh)
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=sharding.replicated(mesh))
    sizes = {"parameters": _per_device(params), "ema": 0, "optimizer": 0}
    return Program(sampler, ({"params": params}, settings, KeyedDraws(key, request), prompt), sizes)


def _require_rows(rows: int, mesh: Mesh, parts: int) -> None:
    if rows % (sharding.batch_rows(mesh) * parts):
        text = f" x train.accumulate = {sharding.batch_rows(mesh) * parts}" if parts > 1 else f" = {sharding.batch_rows(mesh)}"
        raise UserError(f"{rows} rows can't be shared out; make them a multiple of the mesh's data x fsdp{text}")


def _over_rows(tree: Any, mesh: Mesh) -> Any:
    where = sharding.batch_sharding(mesh)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def _per_device(tree: Any) -> int:
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
