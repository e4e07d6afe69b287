"""One update, and one evaluation, as jitted functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from dllm.train import optim, sharding
from dllm.train.run import Run
from dllm.train.state import EVAL, STEP, TrainState, abstract, layout, stream

Metrics = dict[str, Any]  # scalars
Batch = dict[str, Any]  # tokens [B L] int32, and what fields its rows have (data/tokens.py)


def loss(run: Run, params: Any, batch: Batch, key: jax.Array) -> tuple[Any, Metrics]:
    """Returns (loss, metrics) of the run's model and objective, which is handed the batch's further fields by name, `segment_BL=`."""
    functions = run.model.module.bind(run.model.config, {"params": params})
    extras = {f"{name}_BL": x_BL for name, x_BL in batch.items() if name != "tokens"}
    return run.objective.module.loss(functions, batch["tokens"], key, run.objective.config, **extras)


def gradients(run: Run, params: Any, batch: Batch, key: jax.Array) -> tuple[Any, Metrics]:
    """Returns (gradients of the trained parameters, metrics). Those of frozen ones are never built: they are constants here.

    With train.accumulate = M they are means over M parts of the batch, made one after the other in the memory of one: weighted by the
    `tokens` of an objective that counts them, so that they are the whole batch's. The noise is each part's own.
    """
    trained, frozen = optim.split(params, run.optim.train_only)
    part = jax.grad(lambda trained, batch, key: loss(run, optim.merge(trained, frozen), batch, key), has_aux=True)
    if run.train.accumulate == 1:
        return part(trained, batch, key)

    # A device's rows stay its own: row b goes to part b % M.
    parts = jax.tree.map(lambda x_BL: x_BL.reshape(-1, run.train.accumulate, x_BL.shape[1]).swapaxes(0, 1), batch)
    shapes = jax.eval_shape(part, trained, jax.tree.map(lambda x_MBL: x_MBL[0], parts), key)

    def add(carry: tuple[Any, Any], micro: tuple[Any, Batch]) -> tuple[tuple[Any, Any], None]:
        number, batch = micro
        found = part(trained, batch, jax.random.fold_in(key, number))
        tokens = found[1].get("tokens", 1.0)
        return (jax.tree.map(lambda total, x: total + tokens * x, carry[0], found), carry[1] + tokens), None

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), jnp.float32(0)
    (sums, tokens), _ = jax.lax.scan(add, nothing, (jnp.arange(run.train.accumulate, dtype=jnp.int32), parts))
    grads, metrics = jax.tree.map(lambda x: x / jnp.maximum(tokens, 1), sums)
    return grads, metrics | ({"tokens": tokens} if "tokens" in metrics else {})


def make_train_step(run: Run, mesh: Mesh) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Returns the jitted step (state, batch) -> (state, metrics). It takes the old state's buffers for the new one.

    metrics: the objective's, and `grad_norm`, before clipping. All are of the state that came in: if they are finite, the new state is too.
    """
    tx = optim.optimizer(run.optim, run.train.steps)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        grads, metrics = gradients(run, state.params, batch, jax.random.fold_in(stream(run.train.seed, STEP), state.step))
        trained, frozen = optim.split(state.params, run.optim.train_only)
        averaged, still = optim.split(state.ema, run.optim.train_only)
        updates, opt_state = tx.update(grads, state.opt_state, trained)
        trained = optax.apply_updates(trained, updates)
        averaged = optim.ema_update(run.optim, state.step, averaged, trained)
        state = TrainState(state.step + 1, optim.merge(trained, frozen), optim.merge(averaged, still), opt_state)
        return state, {**metrics, "grad_norm": optax.tree.norm(grads)}

    where = layout(abstract(run, mesh))
    return jax.jit(
        train_step,
        donate_argnums=0,
        compiler_options=_compiler_options(mesh),
        in_shardings=(where, sharding.batch_sharding(mesh)),
        out_shardings=(where, sharding.replicated(mesh)),
    )


def _compiler_options(mesh: Mesh) -> dict[str, Any] | None:
    """Returns what XLA is told beyond its defaults.

    Left alone, the TPU compiler makes a product with a sliced weight in parts, a slice each, and adds to the result in memory every time:
    a step of SDAR-8B on 16 v6e then moves 6.7 TB through each chip's memory, and 2.3 TB where the weight is gathered first.
    """
    if mesh.devices.flat[0].platform != "tpu" or mesh.shape["tensor"] > 1:
        return None
    return {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


def make_eval_step(run: Run, mesh: Mesh) -> Callable[[Any, Batch, Int[Array, ""]], Metrics]:
    """Returns the jitted (params, batch, index) -> metrics. The index of a batch is its seed: every evaluation draws the same noise."""

    def eval_step(params: Any, batch: Batch, index: Int[Array, ""]) -> Metrics:
        return loss(run, params, batch, jax.random.fold_in(stream(run.train.seed, EVAL), index))[1]

    where = layout(abstract(run, mesh))
    return jax.jit(
        eval_step,
        compiler_options=_compiler_options(mesh),
        in_shardings=(where.params, sharding.batch_sharding(mesh), sharding.replicated(mesh)),
        out_shardings=sharding.replicated(mesh),
    )


def put(batch: Batch, mesh: Mesh) -> Batch:
    """Returns the global batch of which `batch`, numpy arrays, is this process's slice."""
    return {name: sharding.put_batch(x_BL, mesh) for name, x_BL in batch.items()}


def evaluate(eval_step: Callable[..., Metrics], params: Any, batches: Iterable[Batch], mesh: Mesh) -> dict[str, float]:
    """Returns the mean of each metric over the batches (numpy); of an objective that counts its `tokens`, the mean over these."""
    with jax.set_mesh(mesh):
        rows = [eval_step(params, put(batch, mesh), jnp.int32(i)) for i, batch in enumerate(batches)]
    rows = [to_row(row) for row in rows]
    weights = [row.get("tokens", 1.0) for row in rows]
    return {key: sum(w * row[key] for w, row in zip(weights, rows)) / max(sum(weights), 1) for key in rows[0]}


def to_row(metrics: Metrics) -> dict[str, float]:
    """Returns the metrics as numbers, the loss first. Waits for the step that they are of."""
    metrics = jax.device_get(metrics)
    return {key: float(metrics[key]) for key in ("loss", *sorted(metrics.keys() - {"loss"}))}
