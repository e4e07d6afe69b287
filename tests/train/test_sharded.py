"""Eight devices against one: losses and gradients of every family, and checkpoints that move from mesh to mesh."""

from __future__ import annotations

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.paths import named_leaves
from dllm.data.pipeline import train_batches
from dllm.train import checkpoint, sharding, step
from dllm.train.state import TrainState, abstract, create
from tests.train import tiny

MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)]  # data, fsdp, tensor
ROWS, LENGTH, STEPS = 16, 12, 20
TOKENS = np.random.default_rng(0).integers(0, 27, (STEPS, ROWS, LENGTH)).astype(np.int32)

SHAPE = {"length": LENGTH, "width": 32, "layers": 2, "heads": 4, "head_width": 8, "mlp": 32, "block": 4}
BLOCK = {"objective": {"name": "block_diffusion"}}
QWEN3 = {"name": "qwen3", **SHAPE, "vocab": 28, "mask_id": 27, "kv_heads": 2}
UNO = {"name": "uno", **SHAPE, "vocab": 27, "kv_heads": 2, "rank": 4, "alpha": 8.0}
FAMILIES = {
    "ssmd": {"model": tiny.CONFIG["model"] | {"length": LENGTH, "width": 32, "heads": 4}},
    "kv_heads=2": {"model": QWEN3, **BLOCK},
    "kv_heads=1": {"model": QWEN3 | {"kv_heads": 1}, **BLOCK},
    "moe": {"model": QWEN3 | {"experts": 4, "experts_per_token": 2}, **BLOCK},
    "uno": {
        "model": UNO,
        "objective": {"name": "uno", "tv": 1.0, "kl": 0.1, "survival": "length"},
        "optim__train_only": "^lora/",
        "train__init_from": "base",
    },
}


def make_run(family, mesh=(1, 1, 1), **overrides):
    """Returns a run whose optimizer's first moment is, after one update, a tenth of the gradient: nothing is clipped."""
    mesh = dict(zip(sharding.AXES, mesh))
    return tiny.run(data__length=LENGTH, train__batch=ROWS, optim__clip=0.0, optim__lr=1e-3, mesh=mesh, **FAMILIES[family], **overrides)


def moved(state: TrainState) -> TrainState:
    """Returns the state with noise on every parameter: gains and adapters begin at constants that could hide a mistake."""
    leaves, tree = jax.tree.flatten(jax.device_get(state.params))
    keys = jax.random.split(jax.random.key(3), len(leaves))
    leaves = [x + 0.05 * jax.random.normal(key, x.shape, x.dtype) for x, key in zip(leaves, keys)]
    params = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), jax.tree.unflatten(tree, leaves), state.params)
    return state.replace(params=params, ema=jax.tree.map(jnp.copy, params))


@functools.cache
def program(run):
    """Returns (mesh, train step), compiled once for all tests."""
    mesh = sharding.make_mesh(run.mesh)
    return mesh, step.make_train_step(run, mesh)


@functools.cache
def trained(run, steps):
    """Returns (losses of the updates, gradients of the first, the last state)."""
    mesh, train_step = program(run)
    with jax.set_mesh(mesh):
        state, rows = moved(create(run, mesh)), []
        for tokens_BL in TOKENS[:steps]:
            state, metrics = train_step(state, step.put({"tokens": tokens_BL}, mesh))
            rows.append(metrics)
            if len(rows) == 1:
                grads = {name: 10 * x for name, x in named_leaves(jax.device_get(state.opt_state)).items() if "/mu/" in name}
    return np.array([row["loss"] for row in jax.device_get(rows)]), grads, state


def check(family, mesh, steps, **overrides):
    """Holds a mesh to one device: a gradient's error is measured against the largest entry of its array."""
    losses, grads, _ = trained(make_run(family, **overrides), steps)
    losses8, grads8, state = trained(make_run(family, mesh, **overrides), steps)
    worst = {name: np.abs(grads8[name] - g).max() / np.abs(g).max() for name, g in grads.items()}
    assert max(worst.values()) < 1e-5, worst
    assert all(g.any() for g in grads.values())
    np.testing.assert_allclose(losses8, losses, rtol=1e-5)
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state)} == {8}
    split = [leaf for leaf in jax.tree.leaves(state.params) if not leaf.is_fully_replicated]
    assert bool(split) == (mesh != (8, 1, 1)), "parameters lie in slices"
    return max(worst.values()), np.abs(losses8 / losses - 1).max()


@pytest.mark.parametrize("family, mesh", [("ssmd", (2, 2, 2)), pytest.param("moe", (1, 2, 4), marks=pytest.mark.slow), ("uno", (2, 2, 2))])
def test_eight_devices_train_as_one(family, mesh):
    print(check(family, mesh, STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_mesh_trains_as_one_device(family, mesh):
    print(check(family, mesh, STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 2, 2), (8, 1, 1)])
def test_accumulated_parts_on_eight_devices(mesh):
    """The same parts on one device: each has noise of its own, so the whole batch at once would have another loss."""
    print(check("ssmd", mesh, 3, train__accumulate=2))
    losses, *_ = trained(make_run("ssmd", train__accumulate=2), 3)
    assert losses[0] != trained(make_run("ssmd"), STEPS)[0][0]


# Checkpoints


def new_batches():
    return train_batches(np.arange(2000, dtype=np.uint8) % 27, LENGTH, ROWS, 0)


def advance(run, state, batches, steps):
    """Returns (state, losses) after so many updates."""
    (mesh, train_step), losses = program(run), []
    with jax.set_mesh(mesh):
        for _ in range(steps):
            state, metrics = train_step(state, step.put(next(batches), mesh))
            losses.append(metrics["loss"])
    return state, jax.device_get(losses)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns (a workdir with step 3, written on a 2 x 2 x 2 mesh, the state in it, the losses of the three updates behind it)."""
    run, workdir, batches = make_run("ssmd", (2, 2, 2)), tmp_path_factory.mktemp("saved"), new_batches()
    mesh = sharding.make_mesh(run.mesh)
    state, _ = advance(run, create(run, mesh), batches, 3)
    with checkpoint.manager(workdir, writing=True) as manager:
        checkpoint.save(manager, 3, state, batches, run.to_dict())
        checkpoint.finish(manager)
    held = named_leaves(jax.device_get(state))
    return workdir, held, advance(run, state, batches, 3)[1]


MORE = [pytest.param(mesh, marks=pytest.mark.slow) for mesh in ((4, 1, 1), (1, 2, 2), (1, 2, 4))]


@pytest.mark.parametrize("mesh", [(1, 1, 1), (8, 1, 1), *MORE])
def test_a_checkpoint_moves_to_another_mesh(saved, mesh, tmp_path):
    """The same bits, laid out anew, and the same losses from there."""
    workdir, held, losses = saved
    run, batches = make_run("ssmd", mesh), new_batches()
    with checkpoint.manager(shutil.copytree(workdir, tmp_path / "run"), writing=True) as manager:
        state = checkpoint.restore(manager, 3, abstract(run, sharding.make_mesh(run.mesh)), batches, run)
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state)} == {int(np.prod(mesh))}
    there = named_leaves(jax.device_get(state))
    assert list(there) == list(held)
    for name, leaf in there.items():
        assert np.asarray(leaf).tobytes() == np.asarray(held[name]).tobytes(), name
    np.testing.assert_allclose(advance(run, state, batches, 3)[1], losses, rtol=1e-5)


def test_a_checkpoint_of_more_processes(saved, tmp_path):
    """Each wrote where its batches were, the same place; whoever restores reads one of the files, whatever his own number."""
    data = shutil.copytree(saved[0], tmp_path / "run") / "checkpoints" / "3" / "data"
    (file,) = data.glob("process_*.json")
    for number in range(2):
        (data / f"process_{number}-of-2.json").write_text(file.read_text())
    file.unlink()
    run, batches, expected = make_run("ssmd"), new_batches(), new_batches()
    with checkpoint.manager(tmp_path / "run", writing=False) as manager:
        checkpoint.restore(manager, 3, abstract(run, sharding.make_mesh(run.mesh)), batches, run)
    for _ in range(3):
        next(expected)
    np.testing.assert_array_equal(next(batches)["tokens"], next(expected)["tokens"])


def test_what_a_process_feeds():
    """A lone one feeds all rows. (Several: tests/train/test_processes.py.)"""
    mesh = sharding.make_mesh(sharding.MeshConfig(2, 2, 2))
    assert sharding.process_rows(mesh) == (0, 1)
    poll = sharding.make_poll(mesh)
    assert [poll(False), poll(True)] == [False, True]
