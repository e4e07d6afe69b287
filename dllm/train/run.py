"""A run's configuration: the one-level dict of a config file, as frozen dataclasses and the modules that its names stand for."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax

from dllm.core.config import require, to_dataclass
from dllm.core.lookup import lookup
from dllm.core.paths import named_leaves
from dllm.core.types import UserError
from dllm.data.corpus import Corpus, DataConfig, Rows
from dllm.samplers.loop import kind
from dllm.train.optim import OptimConfig
from dllm.train.sharding import MeshConfig


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Cadences count steps, 0 = never. init_from: a workdir whose weights this run starts with, "" = none. accumulate: parts that a
    step's batch is cut into, one after the other, where its activations don't fit together."""

    seed: int
    steps: int
    batch: int
    log_every: int
    eval_every: int
    eval_batches: int
    sample_every: int
    save_every: int
    init_from: str
    accumulate: int = 1

    def __post_init__(self):
        require(self, "train", ("steps", "batch", "accumulate"), "positive", lambda x: x >= 1)
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
    vocab = getattr(lookup("data", run.data.name), "VOCAB", None)
    if vocab is not None:
        _check_vocab(run, vocab)
    own, wanted = kind(run.model.module, run.model.config), getattr(run.objective.module, "MODEL", None)
    if wanted not in (None, own):
        mask = f" of mask_id={run.model.config.mask_id}" if hasattr(run.model.config, "mask_id") else ""
        raise UserError(
            f"the objective {run.objective.name} doesn't go with the model {run.model.name}{mask}: ssmd is for hybrid, next_token for gpt, "
            "and for qwen3 with mask_id=-1, block_diffusion for qwen3 with a mask_id, uno for uno"
        )
    if own == "uno":
        _check_adapter(run)
    stages(run)
    length, context = run.data.length, run.model.config.length
    require(run.data, "data", ("length",), "positive", lambda x: x >= 1)
    if not hasattr(run.model.config, "block") and length != context:
        raise UserError(f"data.length is {length} and model.length {context}; make them equal")
    if length > context:
        raise UserError(f"data.length is {length} and model.length, the longest sequence, {context}; make the first at most that")
    return run


def stages(run: Run) -> tuple[tuple[int, Run], ...]:
    """Returns (updates done where it begins, the run that it trains by) of each stage; of most objectives there is one, the run itself.

    Raises UserError where the config's stages don't end with the model.
    """
    if not hasattr(run.objective.module, "stages"):
        return ((0, run),)

    def with_block(block: int) -> Run:
        return dataclasses.replace(run, model=dataclasses.replace(run.model, config=dataclasses.replace(run.model.config, block=block)))

    found = run.objective.module.stages(run.objective.config, run.model.config.block, run.train.steps)
    return tuple((first, with_block(block)) for first, block in found)


def _check_adapter(run: Run) -> None:
    """Returns None if a run that trains an adapter trains that alone, on a model that there is."""
    names = named_leaves(jax.eval_shape(functools.partial(run.model.module.init, run.model.config), jax.random.key(0))["params"])
    frozen = [name for name in names if re.search(run.optim.train_only, name) and not name.startswith("lora/")]
    if frozen:
        raise UserError(
            f"optim.train_only={run.optim.train_only!r} trains {frozen[0]}, and the model {run.model.name} verifies with what isn't its "
            "adapter; make it '^lora/'"
        )
    if not run.train.init_from:
        raise UserError(
            f"train.init_from is empty, and of the model {run.model.name} only the adapter is trained; set it to the base's workdir"
        )


def _check_vocab(run: Run, vocab: int) -> None:
    model, exact = run.model.config, not hasattr(run.model.config, "mask_id")
    if model.vocab < vocab or (exact and model.vocab != vocab):
        mend = "make it that many" if exact else "make it that many, or more, for MASK"
        raise UserError(f"model.vocab is {model.vocab}, and the corpus has {vocab} symbols; {mend}")


def check_corpus(run: Run, corpus: Corpus, mask: int | None = None) -> None:
    """Returns None if the run can be trained on the corpus; `mask` is its tokenizer's MASK id, if that has one.

    Raises UserError where model and corpus have other vocabularies, the corpus holds the model's MASK, or a field that the objective
    doesn't take.
    """
    _check_vocab(run, corpus.vocab - (mask == corpus.vocab - 1))
    own = getattr(run.model.config, "mask_id", -1)
    if own >= 0 and mask not in (None, own):
        raise UserError(f"model.mask_id is {own}, and the corpus's tokenizer has MASK at {mask}; make them equal")
    for split in ("train", "valid", "test"):
        part = getattr(corpus, split)
        holds = part.holds if isinstance(part, Rows) else lambda token, text=part: (text == token).any()
        if 0 <= own < corpus.vocab and holds(own):
            raise UserError(f"model.mask_id is {own}, and the {split} split of the corpus {corpus.name} holds it; choose an unused id")
    extras = corpus.train.extras if isinstance(corpus.train, Rows) else ()
    takes = inspect.signature(run.objective.module.loss).parameters
    for name in extras:
        if f"{name}_BL" not in takes:
            raise UserError(
                f"the corpus has the field {name}, and the objective {run.objective.name} doesn't take it; use rows without it, "
                "or an objective that does"
            )


# What may differ when a run goes on: how often it reports and saves, what it prints, and on how many devices.
FREE = ("train.log_every", "train.eval_every", "train.eval_batches", "train.sample_every", "train.save_every", "mesh.", "sampler.")


def is_resolved(config: Any) -> bool:
    """Returns whether this can be what `Run.to_dict` gives: sections, and those among them that sampling and evaluation read."""
    sections = isinstance(config, Mapping) and all(isinstance(section, Mapping) for section in config.values())
    return sections and {"data", "model", "objective"} <= set(config)


def check_same(old: Mapping[str, Any], new: Mapping[str, Any], workdir: Any) -> None:
    """Returns None if the run `new` may go on in the workdir of run `old`. Raises UserError naming the first key that forbids it."""
    with contextlib.suppress(UserError):
        old = run_config(old).to_dict()  # keys that a config hadn't then, with their defaults
    flat = lambda config: {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}
    old, new = flat(old), flat(new)
    for key in [*new, *old]:
        was, now = old.get(key, "absent"), new.get(key, "absent")
        if was != now and not (isinstance(was, list) and was == list(now)) and not key.startswith(FREE):
            raise UserError(f"{workdir} holds a run with {key}={was!r}, not {now!r}; use its value, or another --workdir")
