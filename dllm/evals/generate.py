"""Samples of a loaded run, in batches: what the programs `sample` and `sweep` share."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Integer

from dllm.core.config import to_dataclass
from dllm.core.lookup import lookup
from dllm.core.types import UserError
from dllm.data.tokenizers import CHARACTERS, Tokenizer
from dllm.ops import passes as counting
from dllm.ops.draws import KeyedDraws
from dllm.ops.settings import make_settings
from dllm.samplers.loop import (
    Prompt,
    Samples,
    compile_sampler,
    empty_prompt,
    frame,
    hide,
    make_prompt,
    opening,
    require_fit,
    require_prefix,
)

OPEN = "?"  # in a prompt of characters or residues: this position is for the sampler to fill
WIDTH = 32  # texts of several lengths are padded to a multiple of it


@dataclass(frozen=True)
class Request:
    """The settings that a command line or a sweep may ask for. `max_new` 0 is no limit but the model's context.

    `banned` and `stop` are characters; of a run with a tokenizer one token's text, or ids: "151643,151645".
    """

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
    module, config = lookup("samplers", sampler), run.model_config
    left_to_right = getattr(module, "LEFT_TO_RIGHT", False)
    require_fit(module, run.model_module, config)
    request = to_dataclass(Request, settings, "setting")
    if not left_to_right and (request.max_new or request.stop):
        raise UserError(f"max_new and stop are for left-to-right samplers; {sampler} fills every position: drop the setting")
    mask, theirs = getattr(config, "mask_id", -1), run.tokenizer.mask
    if mask >= 0 and theirs is not None and mask != theirs:
        raise UserError(f"model.mask_id is {mask}, and the tokenizer's MASK is {theirs}: the run's files don't belong together")
    task = Task(run, module, to_dataclass(module.Options, options, f"{sampler}.option"), request)
    rows = _settings(task, 1), KeyedDraws(jax.random.key(0), jnp.arange(1, dtype=jnp.int32)), empty_prompt(1, canvas(task, 0))
    jax.eval_shape(compile_sampler(module, run.model_module, config, task.options), run.variables, *rows)
    return task


def remark(task: Task) -> str:
    """Returns what a user should know of the options and the run beside their being allowed, a line, or ""."""
    trained = getattr(task.run.model_config, "block", 0)
    asked = max(getattr(task.options, "lengths", ()) or (getattr(task.options, "length", 0),))
    if getattr(task.sampler, "MODEL", ()) != ("uno",) or asked <= trained + 1:
        return ""
    rows = f"trained on {trained} noise rows, and a length of {asked} has {asked - 1}"
    return f"note: the adapter was {rows}: the law is the same, but fewer drafts may be accepted"


def parse_prompt(text: str, tokenizer: Tokenizer = CHARACTERS) -> list[int | None]:
    """Returns the ids of a prompt, None where a text of characters has `?`. "the ????? was" gives two words and five open positions.

    A BOS goes before it if the tokenizer's texts begin with one. The prompt of a protein is all of it: "M?????" has six residues.
    Raises UserError on a character outside the alphabet.
    """
    if hasattr(tokenizer, "forbidden"):
        ids = [i for part in re.split(r"([?])", text) for i in ([None] if part == OPEN else tokenizer.encode(part, "the prompt"))]
        return [tokenizer.bos, *ids, tokenizer.eos] if ids else []
    if tokenizer != CHARACTERS:
        return [tokenizer.bos] * tokenizer.begins + tokenizer.encode(text, "the prompt")
    tokenizer.encode(text.replace(OPEN, " "), "the prompt")  # for its error, which names the place
    return [None if c == OPEN else tokenizer.encode(c)[0] for c in text]


def canvas(task: Task, given: int) -> int:
    """Returns how many positions a sequence has room for: the model's context; from left to right, `given` and max_new if that is set,
    in whole blocks. Raises UserError where that is more than the context."""
    length = task.run.model_config.length
    if not getattr(task.sampler, "LEFT_TO_RIGHT", False) or not task.request.max_new:
        return length
    wanted = given + task.request.max_new
    if wanted > length:
        text = f"a prompt of {given} and max_new of {task.request.max_new} are {wanted} tokens, and the model's context is {length}"
        raise UserError(f"{text}: lower setting.max_new, or shorten the prompt")
    block = getattr(task.run.model_config, "block", 1)  # a block that is cut short would be another text
    return min(-(-wanted // block) * block, length)


def forbidden(task: Task) -> tuple[int, ...]:
    """Returns the ids that the run never writes, where its texts have lengths of their own (proteins); else none."""
    return getattr(task.run.tokenizer, "forbidden", ()) if getattr(task.run.model_config, "pad_id", -1) >= 0 else ()


def check_request(task: Task, num: int, batch: int, row: list[int | None], texts_NL: Integer[np.ndarray, "N L"] | None = None) -> Prompt:
    """Returns the prompt of one sequence: `row`, or the opening that the model wants where it is empty.

    Where texts have lengths of their own, those of the samples are `row`'s, or one after the other those of `texts`, real ones: then the
    prompt has as many rows. Raises UserError where it doesn't fit model or sampler, or nothing is asked for.
    """
    if num < 1 or batch < 1:
        raise UserError(f"the number of samples and the batch must be at least 1, not {num} and {batch}")
    config = task.run.model_config
    for token in row:
        if token is not None and token == getattr(config, "mask_id", -1):
            raise UserError(f"the prompt holds the id {token}, MASK, which stands for a hidden token: take it out")
        if token is not None and not 0 <= token < config.vocab:
            raise UserError(f"the prompt holds the id {token}, and the model has {config.vocab}: use the run's own tokenizer")
    if never := forbidden(task):
        if not row and texts_NL is None:
            raise UserError("a protein's length must be told: give a prompt of its residues, ? for each that is open, or real ones' data")
        rows = [row] if row else hide(texts_NL[:num], never)
        longest = max(len(each) - next((n for n, i in enumerate(reversed(each)) if i != config.pad_id), 0) for each in rows)
        if longest > config.length:
            raise UserError(f"the prompt has {longest} tokens, and the model's context is {config.length}: shorten it")
        if all(i is not None for each in rows for i in each):
            raise UserError("the prompt has no open position: put ? for each residue that is to be written")
        width = min(-(-longest // WIDTH) * WIDTH, config.length)
        return frame([each[:width] for each in rows], width, never, config.pad_id)
    row = row or opening(task.run.model_module, config, task.run.tokenizer)
    make_prompt([row], config.length)  # for its error
    prompt = make_prompt([row], max(canvas(task, len(row)), len(row)))
    if getattr(task.sampler, "LEFT_TO_RIGHT", False):
        require_prefix(prompt)
    return prompt


def generate(
    task: Task,
    *,
    num: int,
    batch: int,
    seed: int,
    row: list[int | None] | None = None,
    texts_NL: Integer[np.ndarray, "N L"] | None = None,
    mesh: Mesh | None = None,
) -> Generated:
    """Returns `num` samples. Sample n depends on the seed and n alone, not on the batch it is drawn in (numerics aside).

    `row` is a prompt for all of them: ids, None at open positions; `texts` have the lengths of samples that have their own
    (`check_request`). On a mesh the rows of a batch lie over (data, fsdp), and the run's variables must be there. Raises UserError where
    the prompt doesn't fit the model or the sampler.
    """
    prompt = check_request(task, num, batch, row or [], texts_NL)
    batch = whole_batch(min(batch, num), mesh)
    parts, seconds = zip(*draw(task, prompt, range(0, num, batch), batch=batch, seed=seed, mesh=mesh))
    config, (tokens, lengths, passes, proposed, accepted) = task.run.model_config, jax.tree.map(lambda *x: np.concatenate(x)[:num], *parts)
    given_N = np.asarray(prompt.given).sum(1)
    if forbidden(task):  # padding is no part of a sequence
        lengths = (tokens != config.pad_id).sum(1, dtype=np.int32)
        given_N -= (np.asarray(prompt.tokens) == config.pad_id).sum(1)
    layers = getattr(config, "n_noncausal", 1), getattr(config, "n_causal", 0)  # a model without the two parts has no causal passes
    return Generated(
        tokens_BL=tokens,
        lengths_B=lengths,
        new_B=lengths - np.resize(given_N, num),
        passes=passes,
        nfe_B=counting.nfe(passes),
        nfe_weighted_B=np.asarray(counting.nfe_weighted(passes, *layers), np.float64),
        proposed_B=proposed,
        accepted_B=accepted,
        seconds_per_sample=float(np.median(seconds)) / batch,
    )


def whole_batch(batch: int, mesh: Mesh | None) -> int:
    """Returns the batch, rounded up to a multiple of the devices that its rows lie over."""
    devices = mesh.shape["data"] * mesh.shape["fsdp"] if mesh else 1
    return -(-batch // devices) * devices


def draw(
    task: Task, prompt: Prompt, starts: Iterable[int], *, batch: int, seed: int, mesh: Mesh | None = None
) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Yields for each of `starts` the samples start, .. start + `batch` - 1: ((tokens, lengths, passes, proposed, accepted), seconds).

    The arrays are numpy's. All batches are drawn by one program; the seconds don't hold its compilation. `prompt` is one row, or several
    that the samples take in turn (`check_request`), `batch` a `whole_batch`.
    """
    settings, run, prompts = _settings(task, batch), None, jax.device_get(prompt)
    for start in starts:
        turn_B = np.arange(start, start + batch) % len(prompts.tokens)
        prompt = jax.tree.map(lambda x_NL, turn_B=turn_B: jnp.asarray(x_NL[turn_B]), prompts)
        draws = KeyedDraws(jax.random.key(seed), jnp.arange(start, start + batch, dtype=jnp.int32))
        rows = settings, draws.request, prompt
        if mesh:
            rows = jax.device_put(rows, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
        arguments = (task.run.variables, rows[0], draws.replace(request=rows[1]), rows[2])
        if run is None:
            sampler = compile_sampler(task.sampler, task.run.model_module, task.run.model_config, task.options)
            with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
                run = sampler.lower(*arguments).compile()
        clock = time.perf_counter()
        s: Samples = jax.block_until_ready(run(*arguments))
        seconds = time.perf_counter() - clock
        yield jax.device_get((s.tokens, s.lengths, s.passes, s.proposed, s.accepted)), seconds


def stream(task: Task, *, seed: int, row: list[int | None] | None = None) -> Iterator[str]:
    """Yields the text of sample 0, of those that `generate` returns, piece by piece as it becomes final; the prompt's is the first piece.

    Raises UserError where the prompt doesn't fit, and for a sampler that settles its text at the end only.
    """
    if not hasattr(task.sampler, "compile_stream"):
        name = task.sampler.__name__.rpartition(".")[2]
        raise UserError(f"the text of the sampler {name} becomes final at its end; stream block_diffusion, or drop --stream")
    prompt = check_request(task, 1, 1, row or [])
    ids, shown = np.asarray(prompt.tokens)[np.asarray(prompt.given)].tolist(), ""
    draws = KeyedDraws(jax.random.key(seed), jnp.arange(1, dtype=jnp.int32))
    pieces = task.sampler.compile_stream(task.run.model_module, task.run.model_config, task.options)
    for new in itertools.chain([[]], pieces(task.run.variables, _settings(task, 1), draws, prompt)):
        ids += [int(i) for news in new for i in news]
        text = task.run.tokenizer.decode(ids).rstrip("\ufffd")  # half a character waits for its other half
        if text.startswith(shown):
            yield text[len(shown) :]
            shown = text


def _settings(task: Task, batch: int) -> Any:
    numbers = {k: getattr(task.request, k) for k in ("temperature", "top_k", "top_p", "min_p")}
    ids = {k: task.run.tokenizer.named(getattr(task.request, k), f"setting {k}") for k in ("banned", "stop")}
    ids["banned"] += [i for i in forbidden(task) if i < task.run.model_config.vocab]
    return make_settings(batch, task.run.model_config.vocab, **numbers, **ids, max_new=task.request.max_new or None)
