"""What a compiled sampler costs beside its floor: the network passes that it runs, each as a bare jitted forward of the same shapes.

The loop of a sampler runs to its slowest row, so the passes that are executed are not those that `Samples.passes` counts for each row.
They are counted by a second program, of the same sampler, settings and draws, whose forwards tell the host of every call; the program
that is timed is the one of production.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Int

from dllm.core.types import UserError
from dllm.ops import masks
from dllm.ops.draws import KeyedDraws
from dllm.ops.settings import make_settings
from dllm.samplers.loop import compile_sampler, make_prompt

# In a program's text: operations that wait for the host. (send and recv between devices are something else.)
_LEAVES = re.compile(r"\b(infeed|outfeed)(?:-start|-done)?\(|custom_call_target=\"([^\"]*callback[^\"]*)\"|(is_host_transfer=true)")


class Pass(NamedTuple):
    """A kind of network pass that a sampler runs."""

    name: str  # draft, verify or forward: a function of the bound model
    columns: int  # ranks (draft, verify) or query rows (forward) of its logits


@dataclass(frozen=True)
class Program:
    """A sampler compiled for `batch` rows as `evals.generate` compiles it, with what it is called with."""

    run: Any  # jax.stages.Compiled
    arguments: tuple[Any, ...]
    batch: int
    compile_seconds: float  # trace, lower and compile
    passes: dict[Any, int]  # that its loop executes on these arguments
    samples: Any  # what it returns on these arguments

    def memory(self) -> dict[str, int]:
        """Returns bytes of arguments, outputs and temporaries, as the compiler planned them."""
        plan = self.run.memory_analysis()
        return {kind: int(getattr(plan, f"{kind}_size_in_bytes")) for kind in ("argument", "output", "temp")}


@dataclass(frozen=True)
class Timing:
    """Seconds, warm, each with the wait for its result: R repetitions of one call of the sampler, then each pass as often as it executes.

    The first axis is the clock: wall time, and CPU time of the whole process, which other processes on a busy machine disturb less (and
    which says nothing of an accelerator).
    """

    sampler_2R: np.ndarray
    passes_2R: dict[Any, np.ndarray]  # all calls of a repetition together

    def ratio(self, quantile: float = 0.5) -> tuple[float, float]:
        """Returns (wall, CPU) of the sampler's time over its floor, executed passes by kind x the time of each, over repetitions."""
        wall, cpu = np.quantile(self.sampler_2R / sum(self.passes_2R.values()), quantile, axis=1)
        return float(wall), float(cpu)


def leaves_device(text: str) -> list[str]:
    """Returns the host operations in a compiled program's text: infeeds, outfeeds, host transfers, targets of callbacks. [] is right."""
    return sorted({next(filter(None, found)) for found in _LEAVES.findall(text)})


def prepare(
    sampler: ModuleType, model: ModuleType, config: Any, options: Any, variables: Any, batch: int, given: int, seed: int
) -> Program:
    """Returns the program, with neutral settings and a random prefix of `given` tokens in each row.

    Raises UserError if the sampler and the model don't fit, and in the rare case that the two programs round a draw apart.
    """
    rows = np.random.default_rng(seed).integers(config.vocab, size=(batch, given)).tolist()
    draws = KeyedDraws(jax.random.key(seed), jnp.arange(batch, dtype=jnp.int32))
    arguments = (variables, make_settings(batch, config.vocab), draws, make_prompt(rows, config.length))
    return compile_and_count(sampler, model, config, options, arguments)


def _kind(name: str, *args: Any) -> Pass:
    return Pass(name, args[1].shape[1] if name == "forward" else args[-1])


def compile_and_count(
    sampler: ModuleType, model: ModuleType, config: Any, options: Any, arguments: tuple[Any, ...], kind: Callable[..., Any] = _kind
) -> Program:
    """Returns the program of these arguments, (variables, settings, draws, prompt), compiled, and counted by `kind` (see count_passes).

    Raises UserError if the sampler and the model don't fit, and in the rare case that the two programs round a draw apart.
    """
    clock = time.perf_counter()
    run = compile_sampler(sampler, model, config, options).lower(*arguments).compile()
    took = time.perf_counter() - clock
    passes, counted = count_passes(sampler, model, config, options, arguments, kind)
    samples = run(*arguments)
    if not jax.tree.all(jax.tree.map(np.array_equal, counted.passes, samples.passes)):
        raise UserError("the program that counts passes rounded a draw to another side: choose another seed")
    return Program(run, arguments, len(samples.lengths), took, passes, samples)


def count_passes(
    sampler: ModuleType, model: ModuleType, config: Any, options: Any, arguments: tuple[Any, ...], kind: Callable[..., Any] = _kind
) -> tuple[dict[Any, int], Any]:
    """Returns (passes that the sampler's loop executes on these arguments, the Samples). It compiles a program for this alone.

    kind(name, *arguments of the function) says which kind of pass a call is. The kinds are in order of their first call.
    """
    counts: Counter[Any] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **further: Any) -> Any:
            this = kind(name, *args, **further)
            io_callback(lambda: counts.update([this]), None, ordered=True)
            return function(*args, **further)

        return call

    def bind(config: Any, variables: Any) -> Any:
        functions = model.bind(config, variables)
        names = {"draft", "verify", "forward"} & set(functions._fields)
        return functions._replace(**{name: counted(name, getattr(functions, name)) for name in names})

    watched = ModuleType(model.__name__)
    watched.bind, watched.Functions = bind, model.Functions
    samples = compile_sampler(sampler, watched, config, options)(*arguments)
    jax.effects_barrier()
    return dict(counts), samples


def bare_passes(model: ModuleType, config: Any, variables: Any, batch: int, kinds: Iterable[Pass]) -> dict[Pass, Callable[[], Any]]:
    """Returns for each kind a call of the jitted forward alone: the same shapes, and as results what a sampler of these kinds keeps.

    A draft returns its hidden part where there are verifications; a forward of more than one row is a prefill, and returns the cache
    alone. The cache is donated and comes back, in place as in a loop.
    """
    order_BL = jnp.tile(jnp.arange(config.length, dtype=jnp.int32), (batch, 1))
    rows = order_BL % config.vocab, order_BL, jnp.full((batch,), config.length // 2, jnp.int32)  # arguments: a loop's are no constants
    hides = any(kind.name == "verify" for kind in kinds)

    def draft(columns: int) -> Callable[[], Any]:
        run = jax.jit(lambda variables, *rows: model.bind(config, variables).draft(*rows, columns)[: 1 + hides])
        return lambda: run(variables, *rows)

    def verify(columns: int) -> Callable[[], Any]:
        hidden = draft(columns)()[1]
        run = jax.jit(lambda variables, hidden, *rows: model.bind(config, variables).verify(hidden, *rows, columns))
        return lambda: run(variables, hidden, *rows)

    def forward(columns: int) -> Callable[[], Any]:
        def step(variables: Any, cache: Any, tokens_BQ: Any, positions_BQ: Any) -> Any:
            logits_BQV, cache = model.bind(config, variables).forward(cache, tokens_BQ, positions_BQ, masks.causal)
            return cache, logits_BQV if columns == 1 else None

        run, inputs = jax.jit(step, donate_argnums=1), (rows[0][:, :columns], order_BL[:, :columns])
        kept = [model.bind(config, variables).empty_cache(batch, config.length)]

        def call() -> Any:
            kept[0], logits = run(variables, kept[0], *inputs)
            return kept[0], logits

        return call

    return {kind: {"draft": draft, "verify": verify, "forward": forward}[kind.name](kind.columns) for kind in kinds}


def time_program(program: Program, bare: Mapping[Any, Callable[[], Any]], repetitions: int) -> Timing:
    """Returns the timing over `repetitions`, after one that isn't counted. Sampler and floor take turns, and about as long: whatever else
    the machine does meets both. (Few calls of a short pass would mostly slip through between two interruptions.)"""

    sampler, passes = [], {kind: [] for kind in program.passes}
    for _ in range(repetitions + 1):
        sampler.append(seconds(lambda: program.run(*program.arguments), 1))
        for kind, executed in program.passes.items():
            passes[kind].append(seconds(bare[kind], executed))
    return Timing(np.array(sampler[1:]).T, {kind: np.array(each[1:]).T for kind, each in passes.items()})


def seconds(call: Callable[[], Any], times: int) -> list[float]:
    """Returns [wall, CPU] seconds of so many calls, each with the wait for its result."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(times):
        jax.block_until_ready(call())
    return [time.perf_counter() - wall, time.process_time() - cpu]


def host_loop(draft: Any, verify: Any, table: Int[np.ndarray, "L"], n_verify: int, batch: int, seed: int) -> Int[np.ndarray, "B L"]:
    """Returns samples in rank order, by what one would write without this package: a Python loop around jitted passes, draws in numpy.

    draft(tokens_BL, order_BL, start_B) -> (logits_BWV, hidden), verify(hidden, tokens_BL, order_BL, start_B) -> logits_BWV, windows from
    `table`. The law is that of self_speculative with a chain; n_verify = 0 is ancestral, and `verify` is then not called.
    """
    rng, length, window = np.random.default_rng(seed), len(table), int(table.max())
    row_B1 = np.arange(batch)[:, None]
    order_BL = rng.permuted(np.tile(np.arange(length, dtype=np.int32), (batch, 1)), axis=1)
    tokens_BL, start_B = np.zeros((batch, length + window), np.int32), np.zeros(batch, np.int32)  # columns behind the end catch the surplus
    draw = lambda log_p: np.argmax(log_p + rng.gumbel(size=log_p.shape), axis=-1)
    take = lambda law_BWV, tokens_BW: np.take_along_axis(law_BWV, tokens_BW[:, :, None], axis=2)[:, :, 0]
    while (start_B < length).any():
        live_B, rank_BW = start_B < length, start_B[:, None] + np.arange(window, dtype=np.int32)
        end_B = start_B + np.where(live_B, table[np.minimum(start_B, length - 1)], 0)
        logits_BWV, hidden = draft(tokens_BL[:, :length], order_BL, start_B)
        draft_BWV = _log_softmax(np.asarray(logits_BWV))
        tokens_BL[row_B1, rank_BW] = np.where(rank_BW < end_B[:, None], draw(draft_BWV), tokens_BL[row_B1, rank_BW])
        settled_B = end_B if n_verify == 0 else start_B
        for _ in range(n_verify):
            if (settled_B >= end_B).all():
                break
            target_BWV = _log_softmax(np.asarray(verify(hidden, tokens_BL[:, :length], order_BL, start_B)))
            target_BWV = np.where((rank_BW == 0)[:, :, None], draft_BWV, target_BWV)
            drafted_BW = tokens_BL[row_B1, rank_BW]
            log_ratio_BW = take(target_BWV, drafted_BW) - take(draft_BWV, drafted_BW)
            judged_BW = (rank_BW >= settled_B[:, None]) & (rank_BW < end_B[:, None])
            hit_BW = judged_BW & (-rng.exponential(size=rank_BW.shape) >= log_ratio_BW)
            at_B, rejected_B = hit_BW.argmax(axis=1), hit_BW.any(axis=1)
            p_BV, q_BV = (np.exp(law_BWV[np.arange(batch), at_B]) for law_BWV in (draft_BWV, target_BWV))
            excess_BV = np.maximum(q_BV - p_BV, 0)
            with np.errstate(divide="ignore"):
                token_B = draw(np.log(np.where(excess_BV.any(axis=1, keepdims=True), excess_BV, q_BV)))
            stop_B = start_B + at_B.astype(np.int32)
            tokens_BL[rejected_B, stop_B[rejected_B]] = token_B[rejected_B]
            settled_B = np.where(rejected_B, stop_B + 1, end_B)
        start_B = settled_B
    return tokens_BL[:, :length]


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
