"""A run's configuration: the one-level dict of a config file, as frozen dataclasses and the modules that its names stand for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from dllm.core.config import require, to_dataclass
from dllm.core.lookup import lookup
from dllm.core.types import UserError
from dllm.data.corpus import ALPHABET, DataConfig
from dllm.train.optim import OptimConfig
from dllm.train.sharding import MeshConfig


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Cadences count steps, 0 = never. init_from: a workdir whose weights this run starts with, "" = none."""

    seed: int
    steps: int
    batch: int
    log_every: int
    eval_every: int
    eval_batches: int
    sample_every: int
    save_every: int
    init_from: str

    def __post_init__(self):
        require(self, "train", ("steps", "batch"), "positive", lambda x: x >= 1)
        cadences = ("log_every", "eval_every", "eval_batches", "sample_every", "save_every")
        require(self, "train", cadences, "0 or more", lambda x: x >= 0)
        require(self, "train", ("seed",), "0 or more, below 2**32", lambda x: 0 <= x < 2**32)


@dataclasses.dataclass(frozen=True)
class Part:
    """What a name of the config stands for: a module, and the config that goes with it."""

    name: str
    module: ModuleType
    config: Any  # the module's own dataclass

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, **dataclasses.asdict(self.config)}


@dataclasses.dataclass(frozen=True)
class Run:
    data: DataConfig
    model: Part  # a module of dllm.models
    objective: Part  # of dllm.diffusion
    optim: OptimConfig
    train: TrainConfig
    mesh: MeshConfig
    sampler: Part | None  # of dllm.samplers, for the samples printed during training

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns the resolved config, as config.json holds it."""
        as_dict = lambda part: part.to_dict() if isinstance(part, Part) else {"name": ""} if part is None else dataclasses.asdict(part)
        return {field.name: as_dict(getattr(self, field.name)) for field in dataclasses.fields(self)}


def part(kind: str, config_class: str, section: Mapping[str, Any], where: str) -> Part:
    """Returns the module dllm.<kind>.<section["name"]> with its `config_class`, filled from the rest of the section."""
    if not isinstance(section.get("name"), str):
        raise UserError(f"missing key {where}.name (str)")
    module = lookup(kind, section["name"])
    fields = {key: value for key, value in section.items() if key != "name"}
    return Part(section["name"], module, to_dataclass(getattr(module, config_class), fields, where))


def run_config(config: Mapping[str, Any]) -> Run:
    """Returns the run that a config describes. Raises UserError for unknown, missing and mistyped keys and sections that disagree."""
    names = [field.name for field in dataclasses.fields(Run)]
    for name in [*config, *names]:
        if name not in names:
            raise UserError(f"unknown section {name} in the config; there are: {', '.join(names)}")
        if not isinstance(config.get(name), Mapping):
            raise UserError(f"the config's section {name} is missing" if name not in config else f"the config's {name} must be a section")
    run = Run(
        data=to_dataclass(DataConfig, config["data"], "data"),
        model=part("models", "Config", config["model"], "model"),
        objective=part("diffusion", "Config", config["objective"], "objective"),
        optim=to_dataclass(OptimConfig, config["optim"], "optim"),
        train=to_dataclass(TrainConfig, config["train"], "train"),
        mesh=to_dataclass(MeshConfig, config["mesh"], "mesh"),
        sampler=part("samplers", "Options", config["sampler"], "sampler") if config["sampler"].get("name") else None,
    )
    sizes = [key for key in ("length", "width", "heads", "mlp", "layers") if hasattr(run.model.config, key)]
    require(run.model.config, "model", sizes, "positive", lambda x: x >= 1)
    if run.model.config.vocab != len(ALPHABET):
        raise UserError(f"model.vocab is {run.model.config.vocab}, and the corpora have {len(ALPHABET)} symbols; make it that many")
    if run.data.length != run.model.config.length:
        raise UserError(f"data.length is {run.data.length} and model.length {run.model.config.length}; make them equal")
    return run


# What may differ when a run goes on: how often it reports and saves, what it prints, and on how many devices.
FREE = ("train.log_every", "train.eval_every", "train.eval_batches", "train.sample_every", "train.save_every", "mesh.", "sampler.")


def is_resolved(config: Any) -> bool:
    """Returns whether this can be what `Run.to_dict` gives: sections, and those among them that sampling and evaluation read."""
    sections = isinstance(config, Mapping) and all(isinstance(section, Mapping) for section in config.values())
    return sections and {"data", "model", "objective"} <= set(config)


def check_same(old: Mapping[str, Any], new: Mapping[str, Any], workdir: Any) -> None:
    """Returns None if the run `new` may go on in the workdir of run `old`. Raises UserError naming the first key that forbids it."""
    flat = lambda config: {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}
    old, new = flat(old), flat(new)
    for key in [*new, *old]:
        was, now = old.get(key, "absent"), new.get(key, "absent")
        if was != now and not (isinstance(was, list) and was == list(now)) and not key.startswith(FREE):
            raise UserError(f"{workdir} holds a run with {key}={was!r}, not {now!r}; use its value, or another --workdir")
