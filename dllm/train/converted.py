"""A converted model: a folder that serves as a workdir wherever a trained model is read.

    config.json    the sections that sampling and evaluation read: model, data, objective
    tokenizer/     the tokenizer's files
    weights/       each parameter as stack/layers/q/kernel.npy, in the model's own dtype; bfloat16 as the integers of its bits

Files of plain arrays, because a model may be larger than the memory: they are filled in place, tensor by tensor, and each device reads its
own slice. Its step is 0.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dllm.core.config import read_json, write_atomic
from dllm.core.paths import map_named, named_leaves
from dllm.core.types import UserError
from dllm.train import sharding
from dllm.train.run import is_resolved, part
from dllm.train.workdir import locked

WEIGHTS = "weights"
TOKENIZER = "tokenizer"


def is_converted(workdir: str | Path) -> bool:
    """Returns whether the folder is a converted model, and no run's."""
    return (Path(workdir) / WEIGHTS).is_dir() and not (Path(workdir) / "checkpoints").exists()


@contextlib.contextmanager
def writing(
    workdir: str | Path, config: Mapping[str, Any], tokenizer: Mapping[str, bytes], like: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[dict[str, np.ndarray]]:
    """Yields arrays on disk, {name: array} in the shapes and dtypes of `like`, to be filled. At the end the folder is the model.

    Whatever goes wrong inside leaves no model there. Raises UserError if the folder holds one, or a run, or can't be written.
    """
    workdir = Path(workdir)
    if (workdir / "checkpoints").exists() or (workdir / WEIGHTS).exists() or (workdir / "weights.npz").exists():
        raise UserError(f"{workdir} holds a model already; give the new one a folder of its own")
    with locked(workdir, "converting", "--dst"):
        parts = workdir / f".{WEIGHTS}.part"
        shutil.rmtree(parts, ignore_errors=True)
        try:
            arrays = {name: _open(parts / f"{name}.npy", leaf.dtype, leaf.shape) for name, leaf in like.items()}
            yield arrays
            for array in arrays.values():
                array.base.flush() if array.dtype == jnp.bfloat16 else array.flush()
            for name, data in tokenizer.items():
                write_atomic(workdir / TOKENIZER / name, data)
            write_atomic(workdir / "config.json", json.dumps(config, indent=2) + "\n")
            parts.rename(workdir / WEIGHTS)
        finally:
            shutil.rmtree(parts, ignore_errors=True)


def load(workdir: str | Path, step: int | None, mesh: Mesh | None) -> tuple[dict[str, Any], ModuleType, Any, dict[str, Any], int]:
    """Returns (config, model module, model config, {"params": weights}, step), over `mesh` or on the first device.

    Raises UserError where a file is missing or damaged, or the weights are not the config's.
    """
    workdir = Path(workdir)
    if step:
        raise UserError(f"{workdir} is a converted model, which has no step {step}; drop --step")
    config = read_json(workdir / "config.json")
    if not is_resolved(config):
        raise UserError(f"{workdir / 'config.json'} is not a converted model's; convert the checkpoint again")
    model = part("models", "Config", config["model"], "model")
    like = jax.eval_shape(lambda: model.module.init(model.config, jax.random.key(0))["params"])
    wanted, folder = named_leaves(like), workdir / WEIGHTS
    found = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.npy")}
    if different := sorted(wanted.keys() ^ found.keys()):
        is_, be = ("absent", "there") if different[0] in wanted else ("there", "absent")
        raise UserError(f"{folder} is of another model: {different[0]} is {is_}, and should be {be}; convert the checkpoint again")
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    layout = named_leaves(sharding.shardings(like, model.module.RULES, mesh)) if mesh else dict.fromkeys(wanted, one)

    def read(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        array = _open(found[name], leaf.dtype)
        if array.shape != leaf.shape:
            shapes = f"{list(array.shape)}, not {list(leaf.shape)}"
            raise UserError(f"{folder} is of another model: {name} is {shapes}; convert the checkpoint again")
        return jax.make_array_from_callback(leaf.shape, layout[name], lambda index: np.array(array[index]))

    return dict(config), model.module, model.config, {"params": map_named(read, like)}, 0


def _open(path: Path, dtype: Any, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """Returns the array of the file, made if `shape` is given. numpy's format has no bfloat16."""
    stored = np.dtype(np.uint16) if dtype == jnp.bfloat16 else np.dtype(dtype)
    try:
        if shape is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            return np.lib.format.open_memmap(path, "w+", stored, shape).view(dtype)
        array = np.load(path, mmap_mode="r")
    except OSError as e:
        raise UserError(f"cannot open {path}: {e.strerror or e}") from None
    except ValueError as e:
        raise UserError(f"{path} is damaged or unreadable ({str(e).splitlines()[0][:120]}); convert the checkpoint again") from None
    if array.dtype != stored:
        raise UserError(f"{path} holds {array.dtype}, and the model {np.dtype(dtype)}; convert the checkpoint again")
    return array.view(dtype)
