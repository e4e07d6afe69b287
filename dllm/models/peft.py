"""An adapter merged into the weights it adapts, and in PEFT's file format, both ways.

PEFT's format says nothing of a gate, and what loads it applies the adapter to every row. That is another model than Uno: its law is neither
the frozen model's nor a draft for it. Folders that are written here say so, in the key `uno` of adapter_config.json and in README.md.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dllm.core.config import read_json, to_dataclass
from dllm.core.paths import map_named, named_leaves
from dllm.core.types import UserError
from dllm.models import qwen3, uno
from dllm.models.hf import TENSORS
from dllm.models.sources import DTYPES, library, opened

NOTE = "The adapter of an Uno drafter: it acts on noise rows alone (a gate for each row). Applied to every row it is another model."
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
OWN = ("noise", "noise_low", "noise_high", "noise_mask", "block")  # of uno.Config, what PEFT has no key for

# Our product, and the module that PEFT adapts: q, and self_attn.q_proj of the layer {n}.
MODULES = {name: TENSORS[f"stack/layers/{name}/kernel"].removesuffix(".weight") for name in uno.TARGETS}
PROJECTIONS = {path.rpartition(".")[2]: name for name, path in MODULES.items()}

# Keys of adapter_config.json that are read, or mean nothing for what the adapter computes. All others must be empty.
READ = ("uno", "r", "lora_alpha", "target_modules", "bias", "peft_type", "task_type", "init_lora_weights")
MEANINGLESS = ("auto_mapping", "base_model_name_or_path", "inference_mode", "layers_pattern", "loftq_config", "lora_dropout")
MEANINGLESS += ("megatron_core", "peft_version", "qalora_group_size", "revision")
FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian"),  # others start from changed base weights
}


class Place(NamedTuple):
    """Where a tensor goes: its transpose is `leaf[layer]`."""

    leaf: str
    layer: int
    shape: tuple[int, ...]  # of the tensor, as it is stored


# -- in the weights


def merge(config: uno.Config, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the frozen model's parameters with the adapter added to its kernels: a qwen3's or gpt's of the same shape, whose every row
    is as one with an open gate. The sum is float32 or wider, then rounded to the kernels' type."""
    return _add(config, {name: tree for name, tree in params.items() if name != "lora"}, params["lora"], 1.0)


def unmerge(config: uno.Config, merged: Mapping[str, Any], lora: Any) -> dict[str, Any]:
    """Returns the parameters that `merge` was given, up to the rounding of a sum and a difference."""
    return {**_add(config, merged, lora, -1.0), "lora": lora}


def _add(config: uno.Config, params: Mapping[str, Any], lora: Any, sign: float) -> dict[str, Any]:
    scale, adapter = sign * config.alpha / config.rank, named_leaves(lora)

    def term(name: str, kernel: Any) -> Any:
        path = name.removesuffix("/kernel")
        if f"{path}/a" not in adapter:
            return kernel
        wide = jnp.promote_types(kernel.dtype, jnp.float32)
        a, b = (adapter[f"{path}/{side}"].astype(wide) for side in "ab")
        product = jnp.einsum("nir,nro->nio", a, b, precision="highest")
        return (kernel.astype(wide) + scale * product).astype(kernel.dtype)

    return map_named(term, dict(params))


# -- in PEFT's files


def base(config: uno.Config) -> qwen3.Config:
    """Returns the frozen model's config. Raises UserError where that is a gpt, which no public family knows."""
    if config.begins:
        raise UserError("the adapter's base begins its texts with an id of its own, as a gpt does; PEFT's format is for bases of qwen3")
    return qwen3.Config(**{field.name: getattr(config, field.name) for field in dataclasses.fields(qwen3.Config)})


def places(config: uno.Config) -> dict[str, Place]:
    """Returns {tensor: its place} for an adapter of this shape; `lora_A` [rank, in] is our a [in, rank], turned, `lora_B` b."""
    found = {}
    for leaf, like in named_leaves(jax.eval_shape(lambda: uno.init(config, jax.random.key(0))["params"]["lora"])).items():
        *_, name, side = leaf.split("/")
        for n in range(like.shape[0]):
            tensor = f"base_model.model.{MODULES[name].format(n=n)}.lora_{side.upper()}.weight"
            found[tensor] = Place(f"lora/{leaf}", n, like.shape[:0:-1])
    return found


def save(folder: str | Path, config: uno.Config, params: Mapping[str, Any], base_name: str | None) -> list[Path]:
    """Writes the adapter as PEFT loads it, and returns the files. `base_name`: what a loader is told of the frozen model.

    Raises UserError for an adapter that has no such form.
    """
    base(config)
    folder, leaves = Path(folder), {f"lora/{name}": np.asarray(leaf) for name, leaf in named_leaves(params["lora"]).items()}
    whole = int(config.alpha) if config.alpha == int(config.alpha) else config.alpha
    said = {
        "uno": {"note": NOTE} | {key: getattr(config, key) for key in OWN},
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": config.rank,
        "lora_alpha": whole,
        "lora_dropout": 0.0,
        "target_modules": [MODULES[name].rpartition(".")[2] for name in config.targets.split(",")],
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(leaves[place.leaf][place.layer].T) for name, place in places(config).items()}
    library("safetensors.numpy").save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(said, indent=2) + "\n")
    (folder / "README.md").write_text(f"{NOTE} Loading it as an ordinary adapter gives neither the base model nor a faster one.\n")
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)  # the library makes files that only their owner can read
    return [folder / WEIGHTS, folder / CONFIG, folder / "README.md"]


def load(folder: str | Path, frozen: qwen3.Config, block: int = 0) -> tuple[uno.Config, dict[str, np.ndarray]]:
    """Returns (config, {name: array}) of the drafter that a PEFT folder makes of the base `frozen`; names as lora/stack/layers/q/a.

    `block`: noise rows that were trained together, where the folder doesn't say; of the noise it is then taken to be uniform over all ids
    but 0. Raises UserError, naming it, for every key and tensor that is missing, left over, or not as an adapter of this base has it.
    """
    folder = Path(folder)
    config = _config(folder, frozen, block)
    wanted, file = places(config), folder / WEIGHTS
    if not file.is_file():
        raise UserError(f"{folder} has no {WEIGHTS}; pass the folder of an adapter that PEFT saved as safetensors")
    arrays: dict[str, np.ndarray] = {}
    with opened(file) as tensors:
        names = set(tensors.keys())
        layers = {int(part) for name in names for part in name.split(".") if part.isdecimal()}
        if layers != set(range(config.layers)):
            raise UserError(f"{file} adapts {len(layers)} layers, and the base has {config.layers}; use the base that it was trained on")
        if odd := sorted(wanted.keys() ^ names):
            is_ = "lacks" if odd[0] in wanted else "has"
            raise UserError(f"{file} {is_} the tensor {odd[0]}, and {CONFIG} targets {config.targets}; restore the two files")
        for name, place in wanted.items():
            part = tensors.get_slice(name)
            if part.get_dtype() not in DTYPES:
                raise UserError(f"{file}: {name} is of type {part.get_dtype()}; it can be {', '.join(DTYPES)}")
            if tuple(part.get_shape()) != place.shape:
                shapes = f"{part.get_shape()}, and rank {config.rank} on this base wants {list(place.shape)}"
                raise UserError(f"the tensor {name} of {file} is {shapes}; use the {CONFIG} and the base that belong to it")
            into = arrays.setdefault(place.leaf, np.empty((config.layers, *place.shape[::-1]), np.float32))
            into[place.layer] = tensors.get_tensor(name).T
            if not np.isfinite(into[place.layer]).all():
                raise UserError(f"the tensor {name} of {file} has numbers that aren't finite; restore the file")
    return config, arrays


def _config(folder: Path, frozen: qwen3.Config, block: int) -> uno.Config:
    """Returns the drafter that adapter_config.json describes."""
    where = folder / CONFIG
    said = read_json(where)
    if not isinstance(said, dict):
        raise UserError(f"{where} is no object of keys; restore it")
    for key, values in FIXED.items():
        if said.get(key) not in values:
            raise UserError(f"{where} has {key}={said.get(key)!r}, which this adapter doesn't know; it wants {values[0]!r}")
    for key, value in said.items():
        if key not in READ + MEANINGLESS and value not in (None, False, [], {}):
            raise UserError(f"{where} has {key}={value!r}, which this adapter doesn't know; it wants none")
    for key in ("r", "lora_alpha"):
        if type(said.get(key)) not in (int, float):
            raise UserError(f"{where} has {key}={said.get(key)!r}; it wants a number")
    modules = said.get("target_modules")
    if not isinstance(modules, list) or not modules or not all(isinstance(m, str) for m in modules) or len(set(modules)) < len(modules):
        raise UserError(f"{where} has target_modules={modules!r}; it wants a list of {', '.join(PROJECTIONS)}, each once")
    for module in modules:
        if module not in PROJECTIONS:
            raise UserError(f"{where} targets {module!r}; it can target {', '.join(PROJECTIONS)}")
    targets = ",".join(name for name in uno.TARGETS if name in {PROJECTIONS[module] for module in modules})
    own = said.get("uno", {})
    if not isinstance(own, dict):
        raise UserError(f"{where} has uno={own!r}; it wants an object of keys")
    own = {key: value for key, value in own.items() if key != "note"}
    if block and own.get("block", block) != block:
        raise UserError(f"{where} says that {own['block']} noise rows were trained together, and --block {block}; drop --block")
    if not block and "block" not in own:
        raise UserError(f"{where} doesn't say how many noise rows were trained together; pass --block")
    if odd := sorted(own.keys() - {*OWN}):
        raise UserError(f"{where} has {odd[0]!r} under `uno`, which this adapter doesn't know; it knows {', '.join(OWN)}")
    fields = dict(rank=said["r"], alpha=said["lora_alpha"], targets=targets, block=block)
    config = to_dataclass(uno.Config, dataclasses.asdict(frozen) | fields | own, str(where))
    try:
        uno.build(config)
    except UserError as e:
        raise UserError(f"{where}: {e}") from None
    return config
