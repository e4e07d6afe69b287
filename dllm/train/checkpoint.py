"""Checkpoints: all of orbax is in this file.

A workdir's checkpoints/STEP holds five items, each restorable alone: params, ema, train {step, opt_state}, data (the position of the data
iterator) and config. orbax writes a step beside its place and renames it: a run that is killed leaves whole steps and rubbish, never a
broken step. Copies and full disks leave those too, so a step counts only if all its items are there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import grain
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from dllm.core.config import writable_folder
from dllm.core.paths import map_named, named_leaves
from dllm.core.types import UserError
from dllm.data import tokenizers
from dllm.models.decoder import BlockConfig
from dllm.samplers.loop import kind, lead
from dllm.train import converted, release, sharding
from dllm.train.run import Run, check_same, is_resolved, part
from dllm.train.state import TrainState

KEEP = 3
PADDED = 128  # ids of a character model at most, should its vocabulary be padded
ITEMS = ("params", "ema", "train", "data", "config")
_HANDLERS = {
    "params": ocp.StandardCheckpointHandler,
    "ema": ocp.StandardCheckpointHandler,
    "train": ocp.StandardCheckpointHandler,
    "data": grain.checkpoint.CheckpointHandler,
    "config": ocp.JsonCheckpointHandler,
}


def complete_steps(workdir: str | Path) -> list[int]:
    """Returns the steps that have a whole checkpoint, ascending."""
    folder = Path(workdir) / "checkpoints"
    whole = lambda step: (step / "_CHECKPOINT_METADATA").is_file() and all((step / item).is_dir() for item in ITEMS)
    return sorted(int(step.name) for step in folder.glob("*") if step.name.isdecimal() and whole(step))


@contextlib.contextmanager
def manager(workdir: str | Path, writing: bool) -> Iterator[ocp.CheckpointManager]:
    """Yields orbax's manager. With `writing`, the rubbish of killed runs is removed and incomplete steps are renamed out of the way.

    Raises UserError where the checkpoints can't be written.
    """
    folder = Path(workdir).absolute() / "checkpoints"
    if writing and jax.process_index() == 0:
        writable_folder(folder)
        _tidy(folder)
        for step in folder.iterdir():
            if step.name.isdecimal() and int(step.name) not in complete_steps(workdir):
                step.rename(step.with_name(f"incomplete-{step.name}"))  # else orbax would refuse to save below this step
    options = ocp.CheckpointManagerOptions(max_to_keep=KEEP, create=writing, save_root_metadata=False)
    manager = ocp.CheckpointManager(folder, options=options, item_handlers={item: make() for item, make in _HANDLERS.items()})
    # After a failure, what is still under way calls back into orbax's closed event loop, and each call would print a traceback.
    hook = sys.unraisablehook
    sys.unraisablehook = lambda e: None if "Event loop is closed" in str(e.exc_value) else hook(e)
    try:
        yield manager
        finish(manager)
    except BaseException as e:
        if jax.process_count() == 1 or not isinstance(e, jax.errors.JaxRuntimeError):  # else it would wait for a process that is gone
            with contextlib.suppress(Exception):  # one error is enough
                manager.close()
        if writing and jax.process_index() == 0:
            _tidy(folder)
        raise
    manager.close()
    sys.unraisablehook = hook


def _tidy(folder: Path) -> None:
    """Removes what an interrupted save left."""
    for step in folder.iterdir():
        if ocp.utils.is_tmp_checkpoint(step):
            shutil.rmtree(step, ignore_errors=True)


def save(manager: ocp.CheckpointManager, step: int, state: TrainState, batches: Any, config: dict[str, Any]) -> None:
    """Copies the state and goes on; the writing itself is done in the background, until the manager is closed or saves again.

    Raises UserError if this step, or the one before, can't be written.
    """
    args = ocp.args.Composite(
        params=ocp.args.StandardSave(state.params),
        ema=ocp.args.StandardSave(state.ema),
        train=ocp.args.StandardSave({"step": state.step, "opt_state": state.opt_state}),
        data=grain.checkpoint.CheckpointSave(batches),
        config=ocp.args.JsonSave(config),
    )
    with _writing(manager):
        saved = manager.save(step, args=args)
    if not saved:
        raise RuntimeError(f"orbax refused to save step {step} after steps {manager.all_steps()}")


def finish(manager: ocp.CheckpointManager) -> None:
    """Returns when all that was saved is on disk. Raises UserError if it can't be."""
    with _writing(manager):
        manager.wait_until_finished()


def restore(manager: ocp.CheckpointManager, step: int, like: TrainState, batches: Any, run: Run) -> TrainState:
    """Returns the state of `step`, laid out as `like` (shapes, dtypes and shardings), and sets the iterator `batches` to where it was.

    Raises UserError if the checkpoint is of another run or another model, or damaged.
    """
    config = _config(manager, step)
    check_same(config, run.to_dict(), manager.directory.parent)
    trees = {"params": like.params, "ema": like.ema, "train": {"step": like.step, "opt_state": like.opt_state}}
    for item, tree in trees.items():
        _check_tree(manager, step, item, tree)
    args = {item: ocp.args.StandardRestore(tree) for item, tree in trees.items()}
    items = _restore(manager, step, **args)
    with _reading(manager, step):
        # Each process wrote the same position. grain would look for its own file alone, and there may be another number of processes now.
        file, *_ = sorted((manager.directory / str(step) / "data").glob("process_*.json"))
        batches.set_state(json.loads(file.read_text()))
    return TrainState(items["train"]["step"], items["params"], items["ema"], items["train"]["opt_state"])


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A trained model, as sampling and evaluation want it."""

    config: dict[str, dict[str, Any]]  # the run's, resolved
    model_module: ModuleType
    model_config: Any
    variables: dict[str, Any]  # {"params": the EMA weights}
    step: int
    workdir: Path

    @functools.cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """What its ids are of: the tokenizer in the workdir, or the characters. Raises UserError if that can't be the model's."""
        tokenizer, vocab = tokenizers.beside(self.workdir), self.model_config.vocab
        if tokenizer == tokenizers.CHARACTERS and vocab > PADDED:
            raise UserError(
                f"the model has {vocab} ids, and {self.workdir / tokenizers.FOLDER} isn't there: put its tokenizer's files there"
            )
        if tokenizer != tokenizers.CHARACTERS and vocab < tokenizer.vocab - (tokenizer.mask is not None):
            text = f"the model has {vocab} ids, and the tokenizer in {self.workdir / tokenizers.FOLDER} {tokenizer.vocab}"
            raise UserError(f"{text}: they don't belong together")
        return tokenizer


def load_run(workdir: str | Path, step: int | None = None, mesh: Mesh | None = None) -> Loaded:
    """Returns the model that a workdir's checkpoint holds, at `step` or the last one, over `mesh` or on the first device.

    Nothing but the checkpoint is read (and the tokenizer, when it is asked for), and it may come from any number of devices; a release's
    folder (`train.release`) does as well.
    Raises UserError if there is none, or it is damaged.
    """
    if converted.is_converted(workdir):
        return Loaded(*converted.load(workdir, step, mesh), Path(workdir))
    if release.is_release(workdir):
        return Loaded(*release.load(workdir, step, mesh), Path(workdir))
    steps = complete_steps(workdir)
    if not steps:
        raise UserError(f"{workdir} holds no checkpoint; pass the --workdir of a training run")
    if step is not None and step not in steps:
        raise UserError(f"{workdir} has no checkpoint of step {step}; there are: {', '.join(map(str, steps))}")
    step = steps[-1] if step is None else step
    with manager(workdir, writing=False) as reader:
        config = _config(reader, step)
        model = part("models", "Config", config["model"], "model")
        like = jax.eval_shape(lambda: model.module.init(model.config, jax.random.key(0))["params"])
        _check_tree(reader, step, "ema", like)
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        layout = sharding.shardings(like, model.module.RULES, mesh) if mesh else jax.tree.map(lambda _: one, like)
        like = jax.tree.map(lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), like, layout)
        params = _restore(reader, step, ema=ocp.args.StandardRestore(like))["ema"]
    return Loaded(config, model.module, model.config, {"params": params}, step, Path(workdir))


def warm_start(state: TrainState, run: Run, mesh: Mesh) -> tuple[TrainState, str]:
    """Returns (the state with the EMA weights of train.init_from where path and shape agree, a line that says which do).

    A weight of a narrower type, bfloat16 for float32, is widened.

    Raises UserError if none does, or if one that doesn't is not trained either; and for an adapter, where that model isn't its base.
    """
    workdir = run.train.init_from
    loaded = load_run(workdir, mesh=mesh)
    if kind(run.model.module, run.model.config) == "uno":
        _check_base(loaded, run)
    theirs, ours = named_leaves(loaded.variables["params"]), named_leaves(state.params)
    fits = lambda a, b: a.shape == b.shape and jnp.promote_types(a.dtype, b.dtype) == b.dtype
    same = [n for n in ours if n in theirs and fits(theirs[n], ours[n])]
    if not same:
        raise UserError(f"train.init_from={workdir}: none of its parameters has the path and shape of one of this model's")
    new, unused = [n for n in ours if n not in same], [n for n in theirs if n not in same]
    frozen = [name for name in new if not re.search(run.optim.train_only, name)]
    if frozen:
        thing = f"train.init_from={workdir} has no {frozen[0]} of this shape"
        raise UserError(f"{thing}, and optim.train_only freezes it; train it too, or make the models equal")
    take = lambda name, leaf: jax.device_put(theirs[name].astype(leaf.dtype), leaf.sharding) if name in same else leaf
    params, ema = map_named(take, state.params), map_named(lambda name, leaf: jnp.copy(take(name, leaf)), state.params)
    text = f"{workdir} step {loaded.step}: {len(same)} of {len(ours)} parameters loaded"
    text += f"; new: {', '.join(new)}" * bool(new) + f"; not used: {', '.join(unused)}" * bool(unused)
    return state.replace(params=params, ema=ema), text


def _check_base(loaded: Loaded, run: Run) -> None:
    """Returns None if the adapter's frozen model is the one loaded, or has this base and adapter: weights alone don't tell heads."""
    workdir, theirs, ours = run.train.init_from, loaded.model_config, run.model.config
    if (what := kind(loaded.model_module, theirs)) not in ("autoregressive", "uno"):
        raise UserError(f"train.init_from={workdir} holds a model that is {what}, and an adapter's base is autoregressive; use such a one")
    # What a gpt's config leaves out is the block's default, and its BOS the loop's to say.
    default = {f.name: f.default for f in dataclasses.fields(BlockConfig)} | {"tied": False}
    value = lambda config, key: bool(lead(config)) if key == "begins" else getattr(config, key, default.get(key))
    free = ("length", "block", "mask_id", "dtype", "param_dtype", "remat", "targets", "noise", "noise_low", "noise_high", "noise_mask")
    for key in [f.name for f in dataclasses.fields(ours)]:
        was, now = value(theirs, key), value(ours, key)
        if key not in free and was not in (dataclasses.MISSING, None) and was != now:
            raise UserError(
                f"train.init_from={workdir} has {key}={was}, and the model {key}={now}; an adapter's base stays: make them equal"
            )


def _restore(manager: ocp.CheckpointManager, step: int, **args: Any) -> Any:
    """Returns the items that args name."""
    with _reading(manager, step):
        return manager.restore(step, args=ocp.args.Composite(**args))


def _config(manager: ocp.CheckpointManager, step: int) -> dict[str, dict[str, Any]]:
    """Returns the config of the run that wrote the step."""
    config = _restore(manager, step, config=ocp.args.JsonRestore())["config"]
    with _reading(manager, step):
        if not is_resolved(config):
            raise ValueError("its config is not a run's")
    return config


def _check_tree(manager: ocp.CheckpointManager, step: int, item: str, like: Any) -> None:
    """Returns None if the stored item has the leaves of `like`: orbax itself casts another dtype silently."""
    with _reading(manager, step) as where:
        metadata = manager.item_metadata(step)[item].tree
    describe = lambda tree: {name: f"{leaf.dtype} {list(leaf.shape)}" for name, leaf in named_leaves(tree).items()}
    stored, wanted = describe(metadata), describe(like)
    for name in sorted({*stored, *wanted}):
        was, now = stored.get(name, "absent"), wanted.get(name, "absent")
        if was != now:
            raise UserError(f"{where} is of another model: {item}/{name} is {was}, not {now}; use its config, or another --workdir")


@contextlib.contextmanager
def _writing(manager: ocp.CheckpointManager) -> Iterator[None]:
    """Turns a failed write, of this step or of the one before (that went on in the background), into a UserError."""
    try:
        yield
    except Exception as e:
        if not (isinstance(e, OSError) or "os_error_code" in str(e)):
            raise
        reason = e.strerror if isinstance(e, OSError) else str(e).rpartition(": ")[2].partition(" [")[0]
        raise UserError(f"cannot write a checkpoint in {manager.directory}: {reason}; make room and run the same command again") from e


@contextlib.contextmanager
def _reading(manager: ocp.CheckpointManager, step: int) -> Iterator[str]:
    """Yields the checkpoint's name for messages; whatever goes wrong inside is damage (truncated files surface as many types)."""
    where = f"checkpoint {manager.directory}/{step}"
    try:
        yield where
    except (PermissionError, MemoryError) as e:
        raise UserError(f"cannot read {where}: {e}") from e
    except Exception as e:
        if "RESOURCE_EXHAUSTED" in str(e):
            raise UserError(f"{where} doesn't fit in this device's memory; use more devices") from e
        reason = (str(e).strip() or type(e).__name__).splitlines()[0][:120]
        raise UserError(f"{where} is damaged or unreadable ({reason} ...); move that folder away to go on from the one before") from e
