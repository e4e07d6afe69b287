"""A release is read wherever a workdir is, and says in one line what is wrong with it."""

import json
import shutil

import jax
import numpy as np
import pytest

from dllm.core.paths import named_leaves
from dllm.core.types import UserError
from dllm.train import checkpoint, release, sharding
from dllm.train.state import create
from tests.train import tiny

RUN = tiny.run(data__path="/somewhere/text8", train__init_from="/elsewhere")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A release of a run's fresh weights, never changed; and these."""
    folder, mesh = tmp_path_factory.mktemp("release"), sharding.make_mesh(RUN.mesh)
    params = jax.device_get(create(RUN, mesh).ema)
    release.write(folder, RUN.to_dict(), params, 7, {"words.txt.gz": b"words"})
    return folder, params


@pytest.fixture
def copy(written, tmp_path):
    return shutil.copytree(written[0], tmp_path / "copy")


def rewrite(folder, change):
    """Changes the arrays of weights.npz."""
    with np.load(folder / "weights.npz") as file:
        arrays = dict(file)
    change(arrays)
    np.savez(folder / "weights.npz", **arrays)


def test_round_trip(written):
    folder, params = written
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "weights.npz", "words.txt.gz"]
    loaded = checkpoint.load_run(folder)
    assert (loaded.step, loaded.model_module.__name__, loaded.model_config) == (7, "dllm.models.hybrid", RUN.model.config)
    theirs, ours = named_leaves(loaded.variables), named_leaves({"params": params})
    assert list(theirs) == list(ours)
    for name, leaf in ours.items():
        assert theirs[name].dtype == leaf.dtype == np.float32
        np.testing.assert_array_equal(theirs[name], leaf.astype(np.float16).astype(np.float32), err_msg=name)
        np.testing.assert_allclose(theirs[name], leaf, rtol=2**-11, atol=1e-7, err_msg=name)
    over = checkpoint.load_run(folder, 7, mesh=sharding.make_mesh(sharding.MeshConfig(1, 2, 2)))
    assert len(over.variables["params"]["head"]["kernel"].sharding.device_set) == 4
    np.testing.assert_array_equal(over.variables["params"]["head"]["kernel"], loaded.variables["params"]["head"]["kernel"])


def test_the_config_names_no_place(written):
    text = (written[0] / "config.json").read_text()
    assert "somewhere" not in text
    assert "elsewhere" not in text
    wanted = RUN.to_dict()
    wanted["data"]["path"] = wanted["train"]["init_from"] = "(left out)"
    assert json.loads(text) == json.loads(json.dumps(wanted))
    assert RUN.to_dict()["data"]["path"] == "/somewhere/text8"


def test_the_same_bytes_again(written, tmp_path):
    release.write(tmp_path, RUN.to_dict(), written[1], 7, {"words.txt.gz": b"words"})
    assert (tmp_path / "weights.npz").read_bytes() == (written[0] / "weights.npz").read_bytes()


def test_what_can_not_be_released(written, tmp_path):
    large = jax.tree.map(lambda x: x * 0 + 1e5, written[1])
    with pytest.raises(UserError, match="float16 doesn't"):
        release.write(tmp_path, RUN.to_dict(), large, 7, {})
    assert list(tmp_path.iterdir()) == []
    before = (written[0] / "weights.npz").read_bytes()
    with pytest.raises(UserError, match="holds a release already"):
        release.write(written[0], RUN.to_dict(), written[1], 8, {})
    assert (written[0] / "weights.npz").read_bytes() == before
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="holds a training run"):
        release.write(tmp_path, RUN.to_dict(), written[1], 7, {})


def test_a_run_is_no_release(copy):
    assert release.is_release(copy)
    (copy / "checkpoints").mkdir()
    assert not release.is_release(copy)
    with pytest.raises(UserError, match="holds no checkpoint"):
        checkpoint.load_run(copy)


def test_another_step(written):
    with pytest.raises(UserError, match="is a release of step 7, and has no step 8"):
        checkpoint.load_run(written[0], 8)


@pytest.mark.parametrize("size", [0, 10, 1000, -1])
def test_truncated_weights(copy, size):
    path = copy / "weights.npz"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=r"weights\.npz is damaged or unreadable .*: restore"):
        checkpoint.load_run(copy)


def test_damaged_weights(copy):
    path = copy / "weights.npz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"weights\.npz is damaged or unreadable"):
        checkpoint.load_run(copy)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a.pop("params/gain"), r"gain is absent, not \[16\]"),
        (lambda a: a.update({"params/gain": a["params/gain"][:3]}), r"gain is \[3\], not \[16\]"),
        (lambda a: a.update({"params/more": np.zeros(2)}), r"more is \[2\], not absent"),
        (lambda a: a.pop("step"), r"damaged or unreadable \(.*step"),
        (lambda a: a.update(step=np.zeros(3)), "damaged or unreadable"),
        (lambda a: a.update({"params/gain": np.array(["x"] * 16, object)}), "damaged or unreadable"),
        (lambda a: a.update({"params/gain": np.array(["x"] * 16)}), "params/gain holds <U1, not numbers"),
    ],
)
def test_weights_of_another_model(copy, change, message):
    rewrite(copy, change)
    with pytest.raises(UserError, match=message) as error:
        checkpoint.load_run(copy)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text, message", [("", "is not JSON"), ("[]", "no section model"), ('{"model": 3}', "no section model")])
def test_bad_config(copy, text, message):
    (copy / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        checkpoint.load_run(copy)
    (copy / "config.json").unlink()
    with pytest.raises(UserError, match="cannot read"):
        checkpoint.load_run(copy)
