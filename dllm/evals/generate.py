"""Samples of a loaded run, in batches: what the programs `sample` and `sweep` share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dllm.core.config import to_dataclass
from dllm.core.lookup import lookup
from dllm.core.types import UserError
from dllm.data.corpus import encode
from dllm.ops import passes as counting
from dllm.ops.draws import KeyedDraws
from dllm.ops.settings import make_settings
from dllm.samplers.loop import Prompt, compile_sampler, empty_prompt, make_prompt, require_fit, require_prefix

OPEN = "?"  # in a prompt: this position is for the sampler to fill


@dataclass(frozen=True)
class Request:
    """The settings that a command line or a sweep may ask for. `banned` and `stop` are characters; `max_new` 0 is no limit."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    banned: str = ""
    max_new: int = 0
    stop: str = ""

    def changed(self) -> dict[str, Any]:
        """Returns the settings that are not at their defaults."""
        return {k: v for k, v in asdict(self).items() if v != getattr(Request, k)}


@dataclass(frozen=True)
class Task:
    """A sampler of a run, its options and settings, checked to fit one another."""

    run: Any  # as train.checkpoint.load_run returns it
    sampler: ModuleType
    options: Any  # sampler.Options
    request: Request


@dataclass(frozen=True)
class Generated:
    """What `generate` returns, as numpy arrays over samples."""

    tokens_BL: np.ndarray
    lengths_B: np.ndarray
    new_B: np.ndarray  # tokens that the sampler had to find: the length less what was given
    passes: counting.Passes
    nfe_B: np.ndarray
    nfe_weighted_B: np.ndarray
    proposed_B: np.ndarray
    accepted_B: np.ndarray
    seconds_per_sample: float  # median over batches, without compilation


def make_task(run: Any, sampler: str, options: Mapping[str, Any], settings: Mapping[str, Any]) -> Task:
    """Returns the task. Raises UserError on unknown names and keys, on a sampler that the model or a setting doesn't go with, and on values
    that the sampler refuses: it is traced for one row, so that they show before any work."""
    module = lookup("samplers", sampler)
    left_to_right = getattr(module, "LEFT_TO_RIGHT", False)
    require_fit(module, run.model_module)
    request = to_dataclass(Request, settings, "setting")
    if not left_to_right and (request.max_new or request.stop):
        raise UserError(f"max_new and stop are for left-to-right samplers; {sampler} fills every position: drop the setting")
    task = Task(run, module, to_dataclass(module.Options, options, f"{sampler}.option"), request)
    config, draws = run.model_config, KeyedDraws(jax.random.key(0), jnp.arange(1, dtype=jnp.int32))
    rows = _settings(request, 1, config.vocab), draws, empty_prompt(1, config.length)
    jax.eval_shape(compile_sampler(module, run.model_module, config, task.options), run.variables, *rows)
    return task


def parse_prompt(text: str) -> list[int | None]:
    """Returns ids, None where the text has `?`. "the ????? was" gives two words and leaves five positions open.

    Raises UserError on a character outside the alphabet.
    """
    encode(text.replace(OPEN, " "), "the prompt")  # for its error, which names the place
    return [None if c == OPEN else int(encode(c)[0]) for c in text]


def check_request(task: Task, num: int, batch: int, row: list[int | None]) -> Prompt:
    """Returns the prompt `row` for one sequence. Raises UserError where it doesn't fit model or sampler, or nothing is asked for."""
    if num < 1 or batch < 1:
        raise UserError(f"the number of samples and the batch must be at least 1, not {num} and {batch}")
    prompt = make_prompt([row], task.run.model_config.length)
    if getattr(task.sampler, "LEFT_TO_RIGHT", False):
        require_prefix(prompt)
    return prompt


def generate(task: Task, *, num: int, batch: int, seed: int, row: list[int | None] | None = None, mesh: Mesh | None = None) -> Generated:
    """Returns `num` samples. Sample n depends on the seed and n alone, not on the batch it is drawn in (numerics aside).

    `row` is a prompt for all of them: ids, None at open positions. On a mesh the rows of a batch lie over (data, fsdp), and the run's
    variables must be there. Raises UserError where the prompt doesn't fit the model or the sampler.
    """
    prompt = check_request(task, num, batch, row or [])
    devices = mesh.shape["data"] * mesh.shape["fsdp"] if mesh else 1
    batch, config = -(-min(batch, num) // devices) * devices, task.run.model_config
    prompt = jax.tree.map(lambda x_1L: jnp.repeat(x_1L, batch, 0), prompt)
    settings = _settings(task.request, batch, config.vocab)
    run, parts, seconds = None, [], []
    for start in range(0, num, batch):  # the last batch may reach beyond `num`; all have one shape, one program
        draws = KeyedDraws(jax.random.key(seed), jnp.arange(start, start + batch, dtype=jnp.int32))
        rows = settings, draws.request, prompt
        if mesh:
            rows = jax.device_put(rows, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
        arguments = (task.run.variables, rows[0], draws.replace(request=rows[1]), rows[2])
        if run is None:
            with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
                run = compile_sampler(task.sampler, task.run.model_module, config, task.options).lower(*arguments).compile()
        clock = time.perf_counter()
        s = jax.block_until_ready(run(*arguments))
        seconds.append(time.perf_counter() - clock)
        parts.append(jax.device_get((s.tokens, s.lengths, s.passes, s.proposed, s.accepted)))
    tokens, lengths, passes, proposed, accepted = jax.tree.map(lambda *x: np.concatenate(x)[:num], *parts)
    layers = getattr(config, "n_noncausal", 1), getattr(config, "n_causal", 0)  # a model without the two parts has no causal passes
    return Generated(
        tokens_BL=tokens,
        lengths_B=lengths,
        new_B=lengths - sum(token is not None for token in row or []),
        passes=passes,
        nfe_B=counting.nfe(passes),
        nfe_weighted_B=np.asarray(counting.nfe_weighted(passes, *layers), np.float64),
        proposed_B=proposed,
        accepted_B=accepted,
        seconds_per_sample=float(np.median(seconds)) / batch,
    )


def _settings(request: Request, batch: int, vocab: int) -> Any:
    numbers = {k: getattr(request, k) for k in ("temperature", "top_k", "top_p", "min_p")}
    ids = {k: encode(getattr(request, k), f"setting {k}").tolist() for k in ("banned", "stop")}
    return make_settings(batch, vocab, **numbers, **ids, max_new=request.max_new or None)
