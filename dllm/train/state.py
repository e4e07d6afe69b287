"""The training state, made under jit and laid out over a mesh; and the three streams of randomness of a run."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from dllm.train import optim, sharding
from dllm.train.run import Run

INIT, STEP, EVAL, SAMPLE = range(4)


def stream(seed: int, purpose: int) -> jax.Array:
    """Returns the key of one purpose. Fold the step into it: then a resumed run needs no saved key."""
    return jax.random.fold_in(jax.random.key(seed), purpose)


@struct.dataclass
class TrainState:
    step: Any  # int32 [], updates done
    params: Any  # the model's "params"
    ema: Any  # the same tree
    opt_state: Any  # of the trained parameters only


def fresh(run: Run) -> TrainState:
    """Returns the state before the first update. Call it inside jit."""
    params = run.model.module.init(run.model.config, stream(run.train.seed, INIT))["params"]
    trained, _ = optim.split(params, run.optim.train_only)
    opt_state = optim.optimizer(run.optim, run.train.steps).init(trained)
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, ema=jax.tree.map(jnp.copy, params), opt_state=opt_state)


def abstract(run: Run, mesh: Mesh) -> TrainState:
    """Returns the state's shapes, dtypes and shardings."""
    shapes = jax.eval_shape(functools.partial(fresh, run))
    layout = sharding.shardings(shapes, run.model.module.RULES + sharding.COUNTERS, mesh)
    return jax.tree.map(lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), shapes, layout)


def layout(state: TrainState) -> TrainState:
    """Returns the state's shardings."""
    return jax.tree.map(lambda leaf: leaf.sharding, state)


def create(run: Run, mesh: Mesh) -> TrainState:
    """Returns the state before the first update, each device holding its own slices from the start."""
    return jax.jit(functools.partial(fresh, run), out_shardings=layout(abstract(run, mesh)))()
