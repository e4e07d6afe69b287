"""What a drafter is worth on a trained run: tokens a cycle beside floor and ceiling, wall time, short replies, and the text's law.

Everything is measured on continuations of held-out prompts, each row its own, without a stop: of exactly `new` tokens. A *way* to decode is
a sampler with its options. A cycle of `chain`, `block`, `tree` and `tree_rejection` is two passes (a drafting and a verifying one), one of
`single_pass` and `prompt_lookup` a single one.

A measurement is a Unit: the settings of rows that are measured together, and a call that returns the rest of each. Rows:
dllm/evals/speculation_rows.py.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Integer

from dllm.core.types import UserError
from dllm.evals import drafters, lossless, results
from dllm.evals.stats import Metric
from dllm.ops import masks
from dllm.ops.draws import KeyedDraws
from dllm.ops.settings import make_settings
from dllm.samplers import autoregressive, prompt_lookup, psi_spec
from dllm.samplers.loop import Samples, lead, make_prompt

TWO_PASSES = {name: (psi_spec, {"verification": name}) for name in ("chain", "block", "tree", "tree_rejection")}
DRAFTING = TWO_PASSES | {"single_pass": (psi_spec, {"single_pass": True}), "prompt_lookup": (prompt_lookup, {})}
PLAIN = {"autoregressive": (autoregressive, {}), "one": (psi_spec, {"length": 1})}  # one: the sampler that drafts, without a draft
DRAFTS = {"greedy": (psi_spec, {"draft": "greedy"}), "risd_lossy": (psi_spec, {"draft": "risd_lossy"})}
WAYS = PLAIN | DRAFTING | DRAFTS | {"adaptive": (psi_spec, {})}
DRAFTERS = ("adapter", "unigram", "skip_bigram", "perfect")
LEAST = 0.01  # passes that a cycle costs at least, whatever a busy machine's clock says


@dataclass(frozen=True)
class Way:
    """One way to decode."""

    name: str
    sampler: ModuleType
    options: Any

    def setting(self) -> dict[str, Any]:
        """Returns what its rows are known by."""
        setting: dict[str, Any] = {"way": self.name}
        if self.name == "adaptive":
            return setting | {"lengths": list(self.options.lengths)}
        setting |= {"length": self.options.length} if hasattr(self.options, "length") else {}
        trees = getattr(self.options, "verification", "") in psi_spec.TREES
        return setting | ({"children": self.options.children, "nodes": self.options.nodes} if trees else {})

    def label(self) -> str:
        return self.name if self.name in (*PLAIN, "adaptive") else f"{self.name} {self.options.length}"


@dataclass(frozen=True)
class Setup:
    """What the programs of a table share."""

    run: Any  # as train.checkpoint.load_run returns it, of an uno model
    prompts_NG: np.ndarray  # request r is given prompt r mod N
    new: int  # tokens that there is room for behind a prompt
    temperature: float
    seed: int

    def setting(self) -> dict[str, Any]:
        """Returns what its rows are known by."""
        num, given = self.prompts_NG.shape
        return {"num": num, "given": given, "new": self.new, "temperature": self.temperature, "seed": self.seed}


class Unit(NamedTuple):
    """Rows that are measured together."""

    table: str
    settings: list[dict[str, Any]]
    measure: Callable[[], list[dict[str, Any]]]


class Turns(NamedTuple):
    """R calls of one program."""

    seconds_2R: np.ndarray  # wall, and CPU seconds of the process
    cycles_R: np.ndarray  # that its loop ran


def make_way(name: str, length: int = 1, tree: tuple[int, int] = (4, 16), costs: Mapping[int, float] | None = None) -> Way:
    """Returns the way called `name`; `tree` is (children, nodes), `costs` the cycle's cost at each length of `adaptive`."""
    sampler, changes = WAYS[name]
    if changes.get("verification") in psi_spec.TREES:
        changes = changes | {"children": tree[0], "nodes": tree[1]}
    if name == "adaptive":
        changes = {"lengths": tuple(costs), "costs": tuple(costs.values())}
    if "length" in (f.name for f in dataclasses.fields(sampler.Options)):
        changes = {"length": length} | changes
    return Way(name, sampler, sampler.Options(**changes))


# -- programs


def arguments(
    setup: Setup, requests: Integer[np.ndarray, "B"], new: int | None = None, temperature: float | None = None, number: int = 0
) -> tuple[Any, ...]:
    """Returns (settings, draws, prompt) of the requests; those of another `number` are drawn independently."""
    rows = setup.prompts_NG[requests % len(setup.prompts_NG)]
    prompt = make_prompt(rows.tolist(), rows.shape[1] + setup.new)
    warm = setup.temperature if temperature is None else temperature
    settings = make_settings(len(rows), setup.run.model_config.vocab, temperature=warm, max_new=setup.new if new is None else new)
    key = jax.random.fold_in(jax.random.key(setup.seed), number)
    return settings, KeyedDraws(key, jnp.asarray(requests, jnp.int32)), prompt


def compile_way(setup: Setup, way: Way, batch: int, draft: Callable[..., drafters.Draft] | None = None) -> Callable[..., Samples]:
    """Returns the compiled program, a function of `arguments` of `batch` requests. draft: one of `make_drafts`; None: the adapter."""
    run = setup.run

    def decode(variables, settings, draws, prompt):
        functions = run.model_module.bind(run.model_config, variables)
        if draft is not None:
            functions = drafters.with_drafter(functions, draft(functions, settings, draws))
        return way.sampler.sample(functions, way.options, settings, draws, prompt)

    compiled = jax.jit(decode).lower(run.variables, *arguments(setup, np.arange(batch))).compile()
    return functools.partial(compiled, run.variables)


def make_drafts(names: Iterable[str], rows: Iterable[np.ndarray], vocab: int, depth: int, paths: int) -> dict[str, Any]:
    """Returns what `compile_way` takes for each of the DRAFTERS named: tables of the training text `rows` for drafts of `depth` tokens,
    and perfect marginals by `paths` continuations."""
    tables = {
        "unigram": lambda: drafters.from_unigrams(drafters.unigrams(rows, vocab)),
        "skip_bigram": lambda: drafters.from_skip_bigrams(drafters.skip_bigrams(rows, vocab, depth)),
    }

    def make(name: str) -> Any:
        if name in tables:
            table = tables[name]()
            return lambda *_: table
        perfect = lambda functions, settings, draws: drafters.perfect_marginals(functions, settings, draws.key, draws.request, paths)
        return perfect if name == "perfect" else None

    return {name: make(name) for name in names}


def collect(setup: Setup, program: Callable[..., Samples], batch: int, count: int, **how: Any) -> Samples:
    """Returns the samples of requests 0 ... count - 1, as numpy arrays, without draws."""
    parts = [
        jax.device_get(program(*arguments(setup, np.arange(start, start + batch), **how)).replace(draws=None))
        for start in range(0, count, batch)
    ]
    return jax.tree.map(lambda *x: np.concatenate(x)[:count], *parts)


def cycles(samples: Samples) -> Integer[np.ndarray, "B"]:
    """Returns the cycles that each row took part in; a token of plain autoregression is one."""
    return np.asarray(samples.passes.verify) + np.asarray(samples.passes.ar)


# -- length: tokens a cycle


def a_cycle(samples: Samples, given: int) -> dict[str, Metric]:
    """Returns ratios of sums over the sequences; the last cycle of each counts as far as it is in the text."""
    accepted_B, proposed_B, cycles_B = (np.asarray(x, np.float64) for x in (samples.accepted, samples.proposed, cycles(samples)))
    new_B = np.asarray(samples.lengths, np.float64) - given
    metrics = {"tokens_per_cycle": Metric(new_B, cycles_B), "accepted_per_cycle": Metric(accepted_B, cycles_B)}
    return metrics | {"accept_rate": Metric(accepted_B, proposed_B)}


def length_units(
    setup: Setup, names: Sequence[str], lengths: Sequence[int], drafts: Mapping[str, Any], batch: int, ceiling: tuple[int, int], tree: Any
) -> list[Unit]:
    """Returns a unit for each length, way, and, of two passes, drafter in `drafts` (others have the adapter, or a draft of their own).

    ceiling: (prompts, paths) of the drafter "perfect".
    """
    units = []
    for length in lengths:
        for name in names:
            for drafter in drafts if name in TWO_PASSES else ("adapter",):
                few = dataclasses.replace(setup, prompts_NG=setup.prompts_NG[: ceiling[0]]) if drafter == "perfect" else setup
                way = make_way(name, length, tree)
                setting = few.setting() | way.setting() | ({} if name == "prompt_lookup" else {"drafter": drafter})
                setting |= {"paths": ceiling[1]} if drafter == "perfect" else {}
                units.append(Unit("length", [setting], functools.partial(_length, few, way, drafts.get(drafter), batch)))
    return units


def _length(setup: Setup, way: Way, draft: Any, batch: int) -> list[dict[str, Any]]:
    num, given = setup.prompts_NG.shape
    batch = min(batch, num)
    program = compile_way(setup, way, batch, draft)
    clock = time.perf_counter()
    samples = collect(setup, program, batch, num)
    row: dict[str, Any] = {"passes_per_cycle": 2 if way.name in TWO_PASSES else 1, "cycles": int(cycles(samples).sum())}
    row["ms_per_cycle"] = 1e3 * (time.perf_counter() - clock) / row["cycles"]  # of one row: what the ceiling costs
    for name, metric in a_cycle(samples, given).items():
        row |= {name: results.number(metric.value), f"{name}_stderr": results.number(metric.stderr)}
    return [row]


# -- speed and reply: wall time, in turns


def take_turns(
    setup: Setup, programs: Mapping[str, Callable[..., Samples]], batch: int, news: Sequence[int], repetitions: int
) -> dict[tuple[str, int], Turns]:
    """Returns the Turns of each (program, number of new tokens). All programs take turns over the same requests, other ones each time; a
    first repetition isn't counted."""
    taken: dict[tuple[str, int], list[Any]] = {(name, new): [] for new in news for name in programs}
    for repetition in range(repetitions + 1):
        requests = np.arange(repetition * batch, (repetition + 1) * batch)
        for new in news:
            inputs = jax.block_until_ready(arguments(setup, requests, new))
            first = repetition % len(programs)  # each program begins in turn: the one behind the host's own work is the slowest
            for name, program in [*programs.items()][first:] + [*programs.items()][:first]:
                wall, cpu = time.perf_counter(), time.process_time()
                samples = jax.block_until_ready(program(*inputs))
                seconds = time.perf_counter() - wall, time.process_time() - cpu
                taken[name, new].append((*seconds, cycles(samples).max()))  # all rows begin together: the loop runs to the slowest
    columns = {which: np.asarray(each[1:], np.float64).T for which, each in taken.items()}
    return {which: Turns(x_3R[:2], x_3R[2]) for which, x_3R in columns.items()}


def cycle_seconds(turns: Mapping[tuple[str, int], Turns], name: str, new: int) -> float:
    """Returns the wall time of a cycle of the loop: of replies of `new` tokens less those of 1, in which are the prompt and the call."""
    whole, one = turns[name, new], turns[name, 1]
    return float(np.median((whole.seconds_2R[0] - np.median(one.seconds_2R[0])) / (whole.cycles_R - 1)))


def baseline(turns: Mapping[tuple[str, int], Turns], new: int) -> str:
    """Returns the faster of the two plain ways."""
    return min(PLAIN, key=lambda name: np.median(turns[name, new].seconds_2R[0]))


def speed_row(turns: Mapping[tuple[str, int], Turns], name: str, batch: int, new: int) -> dict[str, Any]:
    """Returns wall time and speed-up of a way: against the baseline in the same repetition, median and quartiles over repetitions."""
    plain, ours = baseline(turns, new), turns[name, new]
    ratio_2R = turns[plain, new].seconds_2R / np.maximum(ours.seconds_2R, 1e-9)
    low, middle, high = np.quantile(ratio_2R[0], (0.25, 0.5, 0.75)).tolist()
    row = {"ms_per_token": 1e3 * float(np.median(ours.seconds_2R[0])) / (batch * new), "speedup": middle, "speedup_quartiles": [low, high]}
    row["speedup_cpu"] = float(np.median(ratio_2R[1])) if jax.default_backend() == "cpu" else None
    return row | {"baseline": plain, "tokens_per_cycle": float(new * len(ours.cycles_R) / ours.cycles_R.sum())}


def fit(costs: Mapping[int, float]) -> tuple[float, float]:
    """Returns (a, b) of the line a + b L through the costs by length, by least squares; of one length b = 0."""
    if len(costs) < 2:
        return next(iter(costs.values())), 0.0
    slope, level = np.polyfit(list(costs), list(costs.values()), 1)
    return float(level), float(slope)


def calibrate(setup: Setup, programs: Mapping[int, Callable[..., Samples]], batch: int, repetitions: int) -> dict[int, float]:
    """Returns what a cycle of each length costs in passes of length 1, which is among them: what `adaptive` chooses by."""
    named = {str(length): program for length, program in programs.items()}
    turns = take_turns(setup, named, batch, (1, setup.new), repetitions)
    took = {length: cycle_seconds(turns, str(length), setup.new) for length in programs}
    return {length: max(float(seconds / took[1]), LEAST) if took[1] > 0 else float(length) for length, seconds in took.items()}


def with_adaptive(
    setup: Setup, ways: Sequence[Way], lengths: Sequence[int], batch: int, repetitions: int
) -> tuple[dict[str, Any], dict[int, float]]:
    """Returns (programs of the ways, which have `one` and `chain` at each length among them, and of `adaptive`; the costs it goes by)."""
    programs = {way.label(): compile_way(setup, way, batch) for way in ways}
    chains = {1: programs["one"]} | {length: programs[f"chain {length}"] for length in lengths}
    costs = calibrate(setup, chains, batch, repetitions)
    return programs | {"adaptive": compile_way(setup, make_way("adaptive", costs=costs), batch)}, costs


def speed_unit(setup: Setup, names: Sequence[str], lengths: Sequence[int], batch: int, repetitions: int, tree: tuple[int, int]) -> Unit:
    """Returns the unit of a batch: rows of the plain ways, of each way at each length, of `adaptive`, and of the cycle's cost by length.

    Raises UserError where a reply may be done in one cycle.
    """
    _several_cycles(setup, lengths)
    ways = [*map(make_way, PLAIN), *(make_way(name, length, tree) for name in dict.fromkeys(["chain", *names]) for length in lengths)]
    nominal = dict.fromkeys((1, *lengths), 1.0)
    known = setup.setting() | {"batch": batch, "repetitions": repetitions}
    settings = [known | way.setting() for way in [*ways, make_way("adaptive", costs=nominal)]] + [known | {"lengths": list(lengths)}]

    def measure() -> list[dict[str, Any]]:
        programs, costs = with_adaptive(setup, ways, lengths, batch, repetitions)
        turns = take_turns(setup, programs, batch, (1, setup.new), repetitions)
        one_pass, rows, by_length = cycle_seconds(turns, baseline(turns, setup.new), setup.new), [], {}
        for name in programs:
            took = cycle_seconds(turns, name, setup.new)
            cost = took / one_pass if min(took, one_pass) > 0 else None  # else the clock is too coarse
            rows.append(speed_row(turns, name, batch, setup.new) | {"cycle_ms": 1e3 * took, "cost": cost})
            if name.startswith("chain ") and cost is not None:
                by_length[int(name.removeprefix("chain "))] = cost
        rows[-1]["costs"] = list(costs.values())
        level, slope = fit(by_length) if by_length else (None, None)
        return [*rows, {"costs": [by_length.get(n) for n in lengths], "level": level, "slope": slope}]  # None: too coarse a clock

    return Unit("speed", settings, measure)


def reply_unit(setup: Setup, length: int, lengths: Sequence[int], replies: Sequence[int], repetitions: int) -> Unit:
    """Returns the unit of replies of so many tokens, one at a time, by programs with room for the longest: plain, `chain` at `length` and
    `adaptive`."""
    _several_cycles(setup, lengths)
    ways = [*map(make_way, PLAIN), *(make_way("chain", each) for each in dict.fromkeys([length, *lengths]))]
    shown = [*ways[:3], make_way("adaptive", costs=dict.fromkeys((1, *lengths), 1.0))]
    known = setup.setting() | {"batch": 1, "repetitions": repetitions}
    settings = [known | way.setting() | {"reply": new} for new in replies for way in shown]

    def measure() -> list[dict[str, Any]]:
        programs, _ = with_adaptive(setup, ways, lengths, 1, repetitions)
        programs = {way.label(): programs[way.label()] for way in shown}
        turns = take_turns(setup, programs, 1, replies, repetitions)
        return [speed_row(turns, name, 1, new) for new in replies for name in programs]

    return Unit("reply", settings, measure)


def _several_cycles(setup: Setup, lengths: Sequence[int]) -> None:
    if setup.new <= max(lengths) + 1:
        raise UserError(
            f"a cycle of length {max(lengths)} may write {max(lengths) + 1} tokens, and a reply has {setup.new}; ask for longer ones"
        )


# -- lossless


def lossless_units(
    setup: Setup, names: Sequence[str], length: int, lengths: Sequence[int], batch: int, each: int, permutations: int, tree: tuple[int, int]
) -> list[Unit]:
    """Returns a unit for each way: is what it writes, `each` texts a prompt, of the law of plain autoregression? In float32.

    The way `autoregressive`, of other draws, is the floor; `risd_lossy` has another law, and is to be caught. `adaptive` goes by costs
    that let it draft whatever the machine. Every row also says for how many prompts the text at temperature 0 isn't token for token the
    plain one, and by how much the two likeliest tokens differ where the first other token is.
    """
    setup = dataclasses.replace(setup, run=_in_float32(setup.run))
    batch, num = min(batch, len(setup.prompts_NG)), len(setup.prompts_NG)
    costs = {n: 1.0 if n == 1 else 1 + n / 8 for n in (1, *lengths)}
    known = setup.setting() | {"each": each, "permutations": permutations}
    numbers = {name: number for number, name in enumerate(WAYS, 1)}  # of draws: 0 is the reference

    def write(way: Way, number: int) -> tuple[Samples, Samples]:
        with jax.default_matmul_precision("highest"):
            program = compile_way(setup, way, batch)
        drawn = collect(setup, program, batch, num * each, number=number)
        return drawn, collect(setup, program, batch, num, temperature=0.0)

    reference = functools.cache(lambda: write(make_way("autoregressive"), 0))

    def measure(way: Way) -> list[dict[str, Any]]:
        drawn, likeliest = write(way, numbers[way.name])
        theirs, plain = reference()
        verdict = lossless.judge(_texts(setup, theirs), _texts(setup, drawn), permutations, setup.seed)
        row: dict[str, Any] = {"p_value": verdict.p_value, "score": verdict.score, "texts": num * each}
        row["features"] = {name: dataclasses.asdict(feature) for name, feature in verdict.features.items()}
        row |= {name: results.number(metric.value) for name, metric in a_cycle(drawn, setup.prompts_NG.shape[1]).items()}
        return [row | greedy_differences(setup, likeliest, plain)]

    ways = [make_way(name, length, tree, costs) for name in dict.fromkeys([*PLAIN, *names, "adaptive", *DRAFTS])]
    return [Unit("lossless", [known | way.setting()], functools.partial(measure, way)) for way in ways]


def _in_float32(run: Any) -> Any:
    config = dataclasses.replace(run.model_config, dtype="float32", param_dtype="float32")
    return dataclasses.replace(run, model_config=config, variables=jax.tree.map(lambda x: x.astype(jnp.float32), run.variables))


def _texts(setup: Setup, samples: Samples) -> lossless.Texts:
    num, given = setup.prompts_NG.shape
    request_R = np.arange(len(samples.lengths))
    return lossless.Texts(samples.tokens, np.full_like(request_R, given), samples.lengths, request_R % num, samples.logprobs)


def greedy_differences(setup: Setup, ours: Samples, plain: Samples) -> dict[str, Any]:
    """Returns {greedy_prompts, greedy_mismatches: texts that differ, greedy_ties: those whose two likeliest tokens have one logit where the
    texts part, greedy_margins: by how much these logits differ, of each such text}."""
    differ_BL = np.asarray(ours.tokens) != np.asarray(plain.tokens)
    rows = np.flatnonzero(differ_BL.any(1))
    margins = _margins(setup.run, np.asarray(plain.tokens)[rows], differ_BL[rows].argmax(1)) if len(rows) else np.zeros(0)
    found = {"greedy_prompts": len(differ_BL), "greedy_mismatches": len(rows), "greedy_ties": int((margins == 0).sum())}
    return found | {"greedy_margins": margins.tolist()}


def _margins(run: Any, tokens_BL: Integer[np.ndarray, "B L"], at_B: Integer[np.ndarray, "B"]) -> Float[np.ndarray, "B"]:
    """Returns the two largest logits' difference for the token at `at`, given those before it."""
    config, first = run.model_config, lead(run.model_config)
    begin_B1 = np.full((len(tokens_BL), 1), config.vocab)
    inputs_BL = jnp.asarray(np.concatenate([begin_B1, tokens_BL[:, :-1]], 1) if first else tokens_BL, jnp.int32)
    position_BL = jnp.broadcast_to(jnp.arange(inputs_BL.shape[1], dtype=jnp.int32)[None], inputs_BL.shape)
    row_B1 = jnp.asarray(at_B - 1 + first, jnp.int32)[:, None]

    @jax.jit
    def best(variables):
        functions = run.model_module.bind(config, variables)
        return jax.lax.top_k(functions.forward(None, inputs_BL, position_BL, masks.causal, row_B1)[0][:, 0], 2)[0]

    with jax.default_matmul_precision("highest"):
        top_B2 = np.asarray(best(run.variables), np.float64)
    return top_B2[:, 0] - top_B2[:, 1]
