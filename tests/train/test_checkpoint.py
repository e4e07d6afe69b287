from __future__ import annotations

import shutil

import jax
import numpy as np
import pytest

from dllm.core.paths import named_leaves
from dllm.core.types import UserError
from dllm.data.pipeline import train_batches
from dllm.train import checkpoint, sharding
from dllm.train.state import abstract, create
from tests.train import tiny

IDS = np.arange(2000, dtype=np.uint8) % 27


def new_batches():
    return train_batches(IDS, 16, 8, 0)


def write(workdir, run, *steps):
    """Saves the fresh state of `run` as each of `steps`, after as many batches; returns it."""
    mesh, batches = sharding.make_mesh(run.mesh), new_batches()
    state, done = create(run, mesh), 0
    with checkpoint.manager(workdir, writing=True) as manager:
        for step in steps:
            for _ in range(step - done):
                next(batches)
            done = step
            checkpoint.save(manager, step, state.replace(step=state.step + step), batches, run.to_dict())
    return state


def read(workdir, run, step, batches=None):
    with checkpoint.manager(workdir, writing=True) as manager:
        return checkpoint.restore(manager, step, abstract(run, sharding.make_mesh(run.mesh)), batches or new_batches(), run)


def assert_equal(a, b):
    a, b = named_leaves(jax.device_get(a)), named_leaves(jax.device_get(b))
    assert list(a) == list(b)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A workdir with steps 10 and 20, written on one device, never changed; and the state in it."""
    workdir = tmp_path_factory.mktemp("saved")
    return workdir, write(workdir, tiny.run(), 10, 20)


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "run")


def test_restore_on_other_devices_gives_the_same_state_and_data(saved):
    workdir, state = saved
    run = tiny.run(mesh={"data": 1, "fsdp": 2, "tensor": 2})
    batches = new_batches()
    restored = read(workdir, run, 20, batches)
    assert_equal(restored, state.replace(step=state.step + 20))
    assert len(restored.params["head"]["kernel"].sharding.device_set) == 4
    reference = new_batches()
    for _ in range(20):
        next(reference)
    np.testing.assert_array_equal(next(batches)["tokens"], next(reference)["tokens"])


def test_load_run_needs_the_checkpoint_only(copy, saved, monkeypatch):
    for path in copy.iterdir():
        if path.name != "checkpoints":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    monkeypatch.chdir(copy.parent)
    loaded = checkpoint.load_run("run")
    assert (loaded.step, loaded.model_module.__name__, loaded.model_config) == (20, "dllm.models.hybrid", tiny.run().model.config)
    assert_equal(loaded.variables, {"params": saved[1].ema})
    over = checkpoint.load_run("run", 10, mesh=sharding.make_mesh(sharding.MeshConfig(2, 2, 1)))
    assert over.step == 10
    assert len(jax.tree.leaves(over.variables)[0].sharding.device_set) == 4
    assert_equal(over.variables, loaded.variables)


def test_no_checkpoint_and_no_such_step(copy, tmp_path):
    with pytest.raises(UserError, match="holds no checkpoint"):
        checkpoint.load_run(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no checkpoint of step 15; there are: 10, 20"):
        checkpoint.load_run(copy, 15)


def test_half_a_step_folder_is_passed_over(copy):
    """One that a copy left incomplete, an empty stray one, and what a killed save leaves."""
    folder = copy / "checkpoints"
    shutil.copytree(folder / "20", folder / "30")
    shutil.rmtree(folder / "30" / "train")
    (folder / "40").mkdir()
    shutil.copytree(folder / "20", folder / "50.orbax-checkpoint-tmp")
    assert checkpoint.complete_steps(copy) == [10, 20]
    assert checkpoint.load_run(copy).step == 20
    write(copy, tiny.run(), 25)  # below the strays: orbax alone would refuse
    assert checkpoint.complete_steps(copy) == [10, 20, 25]
    assert sorted(path.name for path in folder.iterdir()) == ["10", "20", "25", "incomplete-30", "incomplete-40"]


def test_only_the_last_steps_are_kept(copy):
    write(copy, tiny.run(), 30, 40)
    assert checkpoint.complete_steps(copy) == [20, 30, 40]


def test_truncated_files_are_named_as_damage(copy):
    for path in (copy / "checkpoints" / "20" / "ema").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match="checkpoints/20 is damaged"):
        checkpoint.load_run(copy)
    assert checkpoint.load_run(copy, 10).step == 10


def test_another_architecture_names_the_leaf(copy):
    """Here the configs agree, as after an edit of the model's code: the stored tree itself is compared."""
    run, wider = tiny.run(), tiny.run(model__width=32)
    like = abstract(wider, sharding.make_mesh(run.mesh))
    message = r"of another model: params/causal/layers/attn_norm/scale is float32 \[1, 16\], not float32 \[1, 32\]"
    with checkpoint.manager(copy, writing=True) as manager, pytest.raises(UserError, match=message):
        checkpoint.restore(manager, 20, like, new_batches(), run)


def test_another_run_names_the_key(copy):
    for override, key in [({"optim__lr": 0.5}, "optim.lr=0.01, not 0.5"), ({"train__seed": 1}, "train.seed=0, not 1")]:
        with pytest.raises(UserError, match=key):
            read(copy, tiny.run(**override), 20)
    read(copy, tiny.run(train__save_every=7, train__log_every=3, train__eval_every=0), 20)


def test_warm_start_takes_what_fits_and_says_the_rest(saved):
    workdir, state = saved
    run = tiny.run(model__n_noncausal=3, train__seed=5, train__init_from=str(workdir))
    mesh = sharding.make_mesh(run.mesh)
    fresh = create(run, mesh)
    started, text = checkpoint.warm_start(fresh, run, mesh)
    theirs, ours = named_leaves(state.ema), named_leaves(fresh.params)
    for name, leaf in named_leaves(started.params).items():
        np.testing.assert_array_equal(leaf, ours[name] if name.startswith("stack/") else theirs[name], err_msg=name)
    assert_equal(started.params, started.ema)
    assert f"step 20: {len([n for n in ours if not n.startswith('stack/')])} of {len(ours)} parameters loaded; new: stack/" in text
    assert not {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(started.params)} & {
        leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(started.ema)
    }, "the step donates both"


def test_warm_start_from_a_stranger_is_an_error(saved):
    other = dict(model=dict(tiny.GPT, width=32, mlp=64, layers=3), objective={"name": "next_token"})
    run = tiny.run(**other, train__init_from=str(saved[0]))
    mesh = sharding.make_mesh(run.mesh)
    with pytest.raises(UserError, match="none of its parameters"):
        checkpoint.warm_start(create(run, mesh), run, mesh)


def test_warm_start_leaves_nothing_frozen_at_random(saved):
    run = tiny.run(model__mlp=64, optim__train_only="^(causal|join|gain)", train__init_from=str(saved[0]))
    mesh = sharding.make_mesh(run.mesh)
    with pytest.raises(UserError, match=r"has no stack/layers/down/kernel of this shape, and optim\.train_only freezes it"):
        checkpoint.warm_start(create(run, mesh), run, mesh)
