"""A released model: a folder that serves as a workdir wherever a trained model is read, small enough to be committed.

    config.json    the run's config, without the places on the machine it was trained on
    words.txt.gz   the training vocabulary, for the metric spelling; of a character model only
    tokenizer/     the run's tokenizer, if it has one
    weights.npz    the EMA weights in float16, under their paths in the model, "params/head/kernel", and the `step` they are of

float16 rounds a weight to 11 bits, bfloat16 to 8, and both halve the file. Measured on 128 held-out chunks with the model `mini`: the
draft's mean cross-entropy changes by less than 1e-5 bits either way, that of one chunk by 6e-5 (float16) and 5e-4 (bfloat16). Weights are
read back into the model's own dtype.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dllm.core.config import read_json, write_atomic
from dllm.core.paths import map_named, named_leaves
from dllm.core.types import UserError
from dllm.train import sharding
from dllm.train.run import part

WEIGHTS = "weights.npz"
LEFT_OUT = "(left out)"
MACHINE = (("data", "path"), ("train", "init_from"))  # keys of the config that name places


def is_release(workdir: str | Path) -> bool:
    """Returns whether the folder is a release, and no run's."""
    return (Path(workdir) / WEIGHTS).is_file() and not (Path(workdir) / "checkpoints").exists()


def write(folder: str | Path, config: Mapping[str, Any], params: Any, step: int, extra: Mapping[str, bytes]) -> list[Path]:
    """Writes the release and returns its files, the weights last. `extra`: words.txt.gz, or the files of tokenizer/, by their paths.

    Raises UserError if a weight doesn't fit in float16, or the folder holds a run or a release.
    """
    folder = Path(folder)
    if (folder / WEIGHTS).exists():
        raise UserError(f"{folder} holds a release already; delete it, or give this one a folder of its own")
    if (folder / "checkpoints").exists():
        raise UserError(f"{folder} holds a training run; give the release a folder of its own")
    config = {section: dict(keys) for section, keys in config.items()}
    for section, key in MACHINE:
        config.setdefault(section, {})[key] = LEFT_OUT if config[section].get(key) else ""
    arrays = {"step": np.int64(step)}
    for name, leaf in named_leaves(jax.device_get(params)).items():
        with np.errstate(over="ignore"):
            arrays[f"params/{name}"] = np.asarray(leaf, np.float32).astype(np.float16)
        if not np.isfinite(arrays[f"params/{name}"]).all():
            raise UserError(f"the weight {name} holds numbers that float16 doesn't; this model can't be released")
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    files = {"config.json": json.dumps(config, indent=2) + "\n", **extra, WEIGHTS: buffer.getvalue()}
    for name, data in files.items():
        write_atomic(folder / name, data)
    return [folder / name for name in files]


def load(workdir: str | Path, step: int | None, mesh: Mesh | None) -> tuple[dict[str, Any], ModuleType, Any, dict[str, Any], int]:
    """Returns (config, model module, model config, {"params": weights}, step), over `mesh` or on the first device.

    Raises UserError where a file is missing or damaged, the weights are not the config's, or the release is not of that step.
    """
    path, config = Path(workdir) / WEIGHTS, read_json(Path(workdir) / "config.json")
    for section in ("model", "data", "objective"):  # what sampling and evaluation read
        if not isinstance(config, Mapping) or not isinstance(config.get(section), Mapping):
            raise UserError(f"{Path(workdir) / 'config.json'} has no section {section}: restore the file as it was released")
    model = part("models", "Config", config["model"], "model")
    like = jax.eval_shape(lambda: model.module.init(model.config, jax.random.key(0))["params"])
    try:
        with open(path, "rb") as opened, np.load(opened) as file:  # np.load leaves a damaged file open
            stored = int(file["step"])
            arrays = {name.removeprefix("params/"): file[name] for name in file.files if name != "step"}
        if strange := [name for name, array in arrays.items() if array.dtype.kind != "f"]:
            raise ValueError(f"params/{strange[0]} holds {arrays[strange[0]].dtype.str}, not numbers")
    except (OSError, KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as e:
        reason = (str(e).strip() or type(e).__name__).splitlines()[0][:120]
        raise UserError(f"{path} is damaged or unreadable ({reason}): restore the file as it was released") from None
    if step is not None and step != stored:
        raise UserError(f"{workdir} is a release of step {stored}, and has no step {step}")
    wanted = named_leaves(like)
    for name in sorted({*wanted, *arrays}):
        was = f"{list(arrays[name].shape)}" if name in arrays else "absent"
        now = f"{list(wanted[name].shape)}" if name in wanted else "absent"
        if was != now:
            raise UserError(f"{path} is of another model: {name} is {was}, not {now}; restore the files as they were released")
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    layout = named_leaves(sharding.shardings(like, model.module.RULES, mesh)) if mesh else dict.fromkeys(wanted, one)
    params = map_named(lambda name, leaf: jax.device_put(arrays[name].astype(leaf.dtype), layout[name]), like)
    return dict(config), model.module, model.config, {"params": params}, stored
