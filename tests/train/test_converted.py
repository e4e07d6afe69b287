"""A converted model's folder: what is written is read, on one device or many; what is damaged is named; what fails leaves no model."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.paths import named_leaves
from dllm.core.types import UserError
from dllm.models import hf, public, qwen3
from dllm.models.variables import check_variables
from dllm.train import converted
from dllm.train.checkpoint import load_run, warm_start
from dllm.train.sharding import MeshConfig, make_mesh
from dllm.train.state import TrainState
from tests.train import tiny

SMALL = dict(vocab=24, mask_id=23, length=8, width=16, mlp=8, layers=2, heads=4, kv_heads=2, head_width=4)
CONFIG = dataclasses.replace(public.MODELS["sdar-30b-a3b"], **SMALL, experts=4, experts_per_token=2)  # bfloat16


def sections(config):
    return {"data": {}, "model": {"name": "qwen3", **dataclasses.asdict(config)}, "objective": {}}


def write(folder, config=CONFIG):
    like, rng = hf.abstract(config), np.random.default_rng(0)
    with converted.writing(folder, sections(config), {"tok.bin": b"tokens"}, like) as arrays:
        for array in arrays.values():
            array[...] = rng.normal(size=array.shape)
        return {name: np.array(array) for name, array in arrays.items()}


@pytest.mark.parametrize("mesh", [None, (1, 2, 2)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_written_is_read(mesh, dtype, tmp_path):
    config = dataclasses.replace(CONFIG, param_dtype=dtype)
    written = write(tmp_path / "w", config)
    mesh = make_mesh(MeshConfig(*mesh)) if mesh else None
    loaded = load_run(tmp_path / "w", mesh=mesh)
    check_variables(qwen3, config, loaded.variables)
    assert (loaded.model_config, loaded.model_module, loaded.step, loaded.config) == (config, qwen3, 0, sections(config))
    for name, array in named_leaves(loaded.variables["params"]).items():
        assert np.asarray(array).tobytes() == written[name].tobytes()
        assert array.is_fully_replicated == (mesh is None or name.endswith("scale"))
    assert (tmp_path / "w" / "tokenizer" / "tok.bin").read_bytes() == b"tokens"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_run_starts_from_it(dtype, tmp_path):
    """In the weights' own type or a wider one: small steps are lost on bfloat16 parameters."""
    written = write(tmp_path / "w")
    params = qwen3.init(dataclasses.replace(CONFIG, param_dtype=dtype), jax.random.key(0))["params"]
    run, state = tiny.run(train__init_from=str(tmp_path / "w")), TrainState(jnp.int32(0), params, params, {})
    state, text = warm_start(state, run, make_mesh(MeshConfig(1, 1, 1)))
    assert f"{len(written)} of {len(written)} parameters loaded" in text
    assert all((a == written[name]).all() and a.dtype == dtype for name, a in named_leaves(state.params).items())


def test_nothing_is_overwritten_and_failures_leave_no_model(tmp_path):
    with pytest.raises(ZeroDivisionError), converted.writing(tmp_path / "w", sections(CONFIG), {}, hf.abstract(CONFIG)):
        _ = 1 / 0
    assert not converted.is_converted(tmp_path / "w")
    assert [path.name for path in (tmp_path / "w").iterdir()] == [".lock"]
    write(tmp_path / "w")
    for name in ("weights", "checkpoints"):
        with pytest.raises(UserError, match="w holds a model already; give the new one a folder of its own"):
            write(tmp_path / "w")
        (tmp_path / "w" / "weights").rename(tmp_path / "w" / "checkpoints") if name == "weights" else None
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write in --dst=.*file"):
        write(tmp_path / "file")


def damage(kind, folder):
    weights, scale = folder / "weights", folder / "weights" / "norm" / "scale.npy"
    if kind == "truncated":
        scale.write_bytes(scale.read_bytes()[:-2])
    if kind == "no numpy":
        scale.write_bytes(b"GARBAGE!" * 40)
    if kind == "missing":
        scale.unlink()
    if kind == "too many":
        np.save(weights / "norm" / "bias.npy", np.zeros(3))
    if kind == "dtype":
        np.save(scale, np.zeros(16, np.float32))
    if kind == "shape":
        np.save(scale, np.zeros(15, np.uint16))
    if kind == "config":
        (folder / "config.json").write_text("{}")
    if kind == "no config":
        (folder / "config.json").unlink()


@pytest.mark.parametrize(
    "kind, says",
    [
        ("truncated", r"norm/scale.npy is damaged or unreadable \(.*\); convert"),
        ("no numpy", r"norm/scale.npy is damaged or unreadable"),
        ("missing", r"weights is of another model: norm/scale is absent, and should be there; convert the checkpoint again"),
        ("too many", r"weights is of another model: norm/bias is there, and should be absent"),
        ("dtype", r"norm/scale.npy holds float32, and the model bfloat16"),
        ("shape", r"weights is of another model: norm/scale is \[15\], not \[16\]"),
        ("config", r"config.json is not a converted model's; convert"),
        ("no config", r"cannot read .*config.json"),
    ],
)
def test_damage_is_named(kind, says, tmp_path):
    write(tmp_path)
    damage(kind, tmp_path)
    with pytest.raises(UserError, match=says):
        load_run(tmp_path)


def test_it_has_one_step(tmp_path):
    write(tmp_path)
    assert load_run(tmp_path, step=0).step == 0
    with pytest.raises(UserError, match=r"is a converted model, which has no step 5; drop --step"):
        load_run(tmp_path, step=5)
