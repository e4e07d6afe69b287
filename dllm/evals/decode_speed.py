"""What decoding by blocks costs: single forward passes with and without a cache, whole samplers beside them, and the memory of a loop.

See dllm/evals/speed.py for how executed passes are counted, and for what a sampler is timed against.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dllm.core.types import UserError
from dllm.evals import speed
from dllm.ops import masks, passes
from dllm.ops.draws import KeyedDraws
from dllm.ops.settings import make_settings
from dllm.samplers.loop import compile_sampler, empty_prompt, make_prompt


class Forward(NamedTuple):
    """A forward pass, by what its cost hangs on. The cache is filled up to the pass's own rows."""

    mask: masks.Mask | type[masks.Ancestors]  # of a tree its class: the tree itself is data
    rows: int
    logits: int  # rows whose logits are computed; 0: none, the pass fills the cache
    slots: int  # of the cache; 0: there is none, the rows are the whole sequence
    gated: bool = False  # some rows have the adapter

    def name(self) -> str:
        """Returns what the samplers use a pass of this shape for, and its rows."""
        if not self.logits:
            return f"prefill_{self.rows}"
        if self.mask is masks.Ancestors:
            return f"tree_{self.rows}"
        if self.gated or (isinstance(self.mask, masks.Causal) and self.rows > 1):
            return f"{'draft' if self.gated else 'verify'}_{self.rows}"
        if not isinstance(self.mask, masks.BlockCausal):
            return {masks.Tail: "draft", masks.CleanNoisy: "verify", masks.Causal: "ar"}[type(self.mask)] + f"_{self.rows}"
        return f"{'fused' if self.rows > self.mask.block else 'block'}_{self.rows}"


def block_pass(block: int, context: int) -> Forward:
    """Returns the pass that denoises, or commits, a block behind `context` tokens in the cache."""
    return Forward(masks.BlockCausal(block), block, block, context + block)


def fused_pass(block: int, context: int) -> Forward:
    """Returns the pass that commits a block and denoises the next."""
    return Forward(masks.BlockCausal(block), 2 * block, block, context + 2 * block)


def ar_pass(context: int) -> Forward:
    """Returns the pass that reads one token."""
    return Forward(masks.causal, 1, 1, context + 1)


def draft_pass(rows: int, context: int) -> Forward:
    """Returns the pass of a seed and noise rows."""
    return Forward(masks.causal, rows, rows, context + rows, gated=True)


def verify_pass(rows: int, context: int) -> Forward:
    """Returns the pass that judges a draft behind a token that is settled."""
    return Forward(masks.causal, rows, rows, context + rows)


def uncached_pass(block: int, context: int, mask: masks.Mask | None = None) -> Forward:
    """Returns the pass that denoises a block (or, causal, judges so many tokens) without a cache: it reads the context anew."""
    return Forward(masks.BlockCausal(block) if mask is None else mask, context + block, block, 0)


def kind(
    name: str,
    cache: Any,
    tokens_BQ: Any,
    positions_BQ: Any,
    mask: masks.Mask,
    at_BW: Any = None,
    segment_BQ: Any = None,
    gate_BQ: Any = None,
    window: int = 1,
) -> Forward:
    """Returns which Forward a sampler's call of the model's `forward` is. More rows than two blocks, or causal ones than `window` that
    aren't gated: a prompt, whose logits go unused."""
    rows, gated = tokens_BQ.shape[1], gate_BQ is not None
    if isinstance(mask, masks.Ancestors):
        return Forward(masks.Ancestors, rows, rows, cache.k.shape[2])
    most = {masks.BlockCausal: lambda: 2 * mask.block, masks.Causal: lambda: rows if gated else window}.get(type(mask), lambda: rows)()
    logits = 0 if rows > most else rows if at_BW is None else at_BW.shape[1]
    return Forward(mask, rows, logits, cache.k.shape[2], gated)


def prepare(
    sampler: ModuleType, model: ModuleType, config: Any, options: Any, variables: Any, batch: int, given: Sequence[int], new: int, seed: int
) -> speed.Program:
    """Returns the sampler's program, counted, with neutral settings. Row b is given given[b mod len(given)] random tokens.

    All rows write up to one end, the first of a block where the longest prompt has got `new` tokens. Raises UserError as
    `speed.compile_and_count` does.
    """
    rng, mask_id, block = np.random.default_rng(seed), config.mask_id, config.block
    prompts = [rng.integers(config.vocab - (mask_id >= 0), size=given[b % len(given)]) for b in range(batch)]
    window = max(getattr(options, "lengths", ()) or (getattr(options, "length", 1),))  # rows that psi_spec verifies at once
    end = -(-(max(given) + new) // block) * block
    length = max(end, 3 * block, window + 1)  # `kind` tells a prompt by its length
    prompt = make_prompt([(ids + (ids >= mask_id) * (mask_id >= 0)).tolist() for ids in prompts], length)
    draws = KeyedDraws(jax.random.key(seed), jnp.arange(batch, dtype=jnp.int32))
    settings = make_settings(batch, config.vocab, max_new=[end - len(ids) for ids in prompts])
    arguments = (variables, settings, draws, prompt)
    return speed.compile_and_count(sampler, model, config, options, arguments, functools.partial(kind, window=window))


def written(program: speed.Program) -> int:
    """Returns the tokens that a run writes, over all rows."""
    return int(program.samples.lengths.sum() - program.arguments[-1].given.sum())


def passes_a_token(program: speed.Program) -> dict[str, float]:
    """Returns passes a written token by kind, over all rows. (Those that a row took part in: the loop runs to its slowest row.)"""
    new = int(program.samples.lengths.sum() - program.arguments[-1].given.sum())
    return {
        kind: program.batch * mean / new for kind, mean in passes.mean_by_kind(program.samples.passes).items() if kind != "query_tokens"
    }


def bare_forward(
    model: ModuleType, config: Any, variables: Any, batch: int, forward: Forward, most_bytes: float = np.inf
) -> Callable[[], Any]:
    """Returns a call of the jitted forward alone, compiled. The cache is donated and comes back, in place as in a loop.

    Raises UserError where the program's temporaries are more than `most_bytes`; nothing was run then.
    """
    filled = max(forward.slots - forward.rows, 0)
    rows = jnp.broadcast_to(jnp.arange(forward.rows, dtype=jnp.int32)[None], (batch, forward.rows))
    at_BW = rows[:, forward.rows - forward.logits :] if 0 < forward.logits < forward.rows else None
    gate = (rows > 0,) if forward.gated else ()
    path_BQQ = jnp.broadcast_to(jnp.tril(jnp.ones((forward.rows, forward.rows), bool))[None], (batch, forward.rows, forward.rows))
    mask = masks.Ancestors(path_BQQ) if forward.mask is masks.Ancestors else forward.mask
    inputs = rows % config.vocab, filled + rows, mask, at_BW, *gate  # arguments: a loop's are no constants

    def step(variables, cache, tokens_BQ, positions_BQ, mask, at_BW, *gate):
        further = (None, *gate) if gate else ()
        logits_BWV, cache = model.bind(config, variables).forward(cache, tokens_BQ, positions_BQ, mask, at_BW, *further)
        return cache, logits_BWV if forward.logits else None

    fresh = lambda: model.bind(config, {}).empty_cache(batch, forward.slots).replace(lengths_B=jnp.full((batch,), filled, jnp.int32))
    cache = jax.eval_shape(fresh) if forward.slots else None
    run = jax.jit(step, donate_argnums=1).lower(variables, cache, *inputs).compile()
    if run.memory_analysis().temp_size_in_bytes > most_bytes:
        raise UserError(f"{run.memory_analysis().temp_size_in_bytes / 2**30:.1f} GiB of temporaries")
    kept = [fresh() if forward.slots else None]

    def call() -> Any:
        kept[0], logits_BWV = run(variables, kept[0], *inputs)
        return kept[0], logits_BWV

    return call


def time_forwards(calls: dict[str, Callable[[], Any]], repetitions: int, budget: float) -> dict[str, float]:
    """Returns the median wall seconds of each call. They take turns, over `repetitions`; each has about `budget` seconds in all.

    A short call is made several times a turn; one that fills the budget is made once, after the first, which also was a trial if that
    filled the budget alone.
    """
    first = {name: speed.seconds(call, 1)[0] for name, call in calls.items()}
    once = {name: took if took > budget else speed.seconds(calls[name], 1)[0] for name, took in first.items()}
    times = {name: max(1, int(budget / repetitions / took)) for name, took in once.items()}
    turns = {name: 0 if first[name] > budget else min(repetitions, max(1, int(budget / took))) for name, took in once.items()}
    taken = {name: [] if turns[name] else [took] for name, took in once.items()}
    for turn in range(repetitions):
        for name, call in calls.items():
            if turn < turns[name]:
                taken[name].append(speed.seconds(call, times[name])[0] / times[name])
    return {name: float(np.median(each)) for name, each in taken.items()}


def loop_memory(
    sampler: ModuleType, model: ModuleType, config: Any, options: Any, variables: Any, batch: int, length: int
) -> dict[str, int]:
    """Returns bytes: {"temp": of the decode loop's temporaries, "cache": of the key/value cache, "alias": of what it updates in place}.

    The loop is the last `while` of the sampler's program, compiled alone with its state, the cache among it, as a donated argument: what
    the program wants for the prompt, and the cache itself, are no part of "temp". Nothing is run or allocated; `variables` may be shapes.
    """
    arguments = jax.eval_shape(
        lambda: (
            make_settings(batch, config.vocab, max_new=length),
            KeyedDraws(jax.random.key(0), jnp.arange(batch, dtype=jnp.int32)),
            empty_prompt(batch, length),
        )
    )
    traced = compile_sampler(sampler, model, config, options).trace(variables, *arguments)
    loop = [equation for equation in traced.jaxpr.jaxpr.eqns if equation.primitive is lax.while_p][-1]
    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, weak_type=x.aval.weak_type) for x in loop.invars]
    constants = loop.params["cond_nconsts"] + loop.params["body_nconsts"]
    run = jax.jit(lambda fixed, state: loop.primitive.bind(*fixed, *state, **loop.params), donate_argnums=1)
    # What the machine code is like makes no difference to the plan of its buffers, and half of the compile time.
    quick = {"xla_backend_optimization_level": "0"} if jax.default_backend() == "cpu" else None
    plan = run.lower(shapes[:constants], shapes[constants:]).compile(quick).memory_analysis()
    cache = [x for x in shapes[constants:] if len(x.shape) == 5]  # [N B S G K], keys and values: nothing else has five axes
    size = lambda x: x.size * x.dtype.itemsize
    return {"temp": int(plan.temp_size_in_bytes), "cache": sum(map(size, cache)), "alias": int(plan.alias_size_in_bytes)}
