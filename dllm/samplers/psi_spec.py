"""Lossless speculative sampling by an autoregressive model's own adapter: Uno's Psi-Spec (arXiv 2609.04010, Algorithm 1), and beyond it.

A cycle of L rows drafts L - 1 tokens and judges them, in two forwards:

- draft: rows [seed, noise, ...]. The seed is the last settled token, whose keys and values aren't cached yet; its row is the frozen
  model's, and gives the law of the next token, the *clean* one, which is never rejected. Each noise row, where the adapter acts, gives the
  law of the token behind it given the settled text: the draft is independent tokens from these.
- verify: rows [clean, draft, ...] of the frozen model: the target's law of every drafted token, and of one behind them. The accepted
  tokens, and the one drawn in place of the first rejected or behind the last, join the text: 2 to L + 1 tokens.

The cache holds all settled rows but the seed's. The law is the frozen model's under the settings, whatever the adapter, the noise, L, the
number of denoising steps and the verification: conditional on all that was drawn before, each emitted token has the target's law.

single_pass does both in one forward of 2 L - 1 rows, [seed, draft, ...; noise, ...]: it judges the last cycle's draft, and its noise rows,
which have read that draft, are the next one's, valid if all was accepted. If not, the next forward has no draft to judge: it emits one
token, and drafts.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.experimental import checkify
from jaxtyping import Array, Bool, Float, Int

from dllm.core.types import UserError
from dllm.ops import masks
from dllm.ops.draws import Draws, Purpose, Slot, categorical, uniform
from dllm.ops.passes import count
from dllm.ops.settings import Settings, shape_logits
from dllm.samplers.accept import judge
from dllm.samplers.loop import Prompt, Samples, chosen, pick, prefill, put

LEFT_TO_RIGHT = True  # prompts are prefixes; max_new and stop are obeyed
MODEL = ("uno",)  # what it goes with, as samplers.loop.kind says it


@dataclasses.dataclass(frozen=True)
class Options:
    """length        rows of a forward: one seed and length - 1 noise rows, so as many drafted tokens; 1: plain autoregression
    verification  chain, or block (arXiv 2403.10444), which accepts more
    steps         denoising steps of a draft, each a forward
    draft         sampled   from the draft's law
                  greedy    its likeliest tokens, judged as what they are: a law of one token
                  risd_lossy  its likeliest tokens, judged as if they were sampled: the published I-DLM sampler (arXiv 2604.11035), which
                            samples another law than the model's. A negative control
    single_pass   verify and draft in one forward
    """

    length: int = 8
    verification: Literal["chain", "block"] = "chain"
    steps: int = 1
    draft: Literal["sampled", "greedy", "risd_lossy"] = "sampled"
    single_pass: bool = False


@struct.dataclass
class State:
    """The run between two cycles. cache.lengths_B = settled rows - 1: the last settled token, the seed, is not in the cache."""

    tokens: Any  # [B L] int32
    logprobs: Any  # [B L] of each token under the target
    settled: Any  # [B] int32, tokens that are final, the prompt among them
    end: Any  # [B] int32, tokens of the text; its own length once a stop was drawn
    cycle: Any  # [B] int32
    cache: Any
    passes: Any
    proposed: Any  # [B] int32
    accepted: Any  # [B] int32
    waiting: Any  # single_pass: (tokens [B W], their law [B W V], how many wait to be judged [B]: 0 or W); else None
    draws: Any


def sample(
    functions: Any, options: Options, settings: Settings, draws: Draws, prompt: Prompt, order_BL: Int[Array, "B L"] | None = None
) -> Samples:
    """Returns one sequence a row, with the frozen model's law under the settings (draft = risd_lossy excepted). Given tokens are a prefix.

    `functions` is an uno model's (dllm/models/uno.py); where no id of its own begins a sequence (lead = 0), every prompt has a token.
    `proposed` counts drafted tokens that were judged, `accepted` those among them that joined the text. There is no order to hand in.
    Raises UserError for options out of range.
    """
    _check(options)
    state = begin(functions, options, settings, draws, prompt)
    state = lax.while_loop(lambda state: (state.settled < state.end).any(), lambda state: step(functions, options, settings, state), state)
    return Samples(state.tokens, state.settled, state.logprobs, state.passes, state.proposed, state.accepted, state.draws)


def _check(options: Options) -> None:
    if options.length < 1:
        raise UserError(f"length is {options.length}; make it 1 (plain autoregression) or more")
    if options.steps < 1:
        raise UserError(f"steps is {options.steps}; make it 1 or more")
    for key, choices in (("verification", ("chain", "block")), ("draft", ("sampled", "greedy", "risd_lossy"))):
        if getattr(options, key) not in choices:
            raise UserError(f"no {key} {getattr(options, key)!r}; there are: {', '.join(choices)}")
    if options.single_pass and (options.steps > 1 or options.length < 2):
        raise UserError("single_pass drafts at least one token, in one step: set length to 2 or more and steps to 1")


def begin(functions: Any, options: Options, settings: Settings, draws: Draws, prompt: Prompt) -> State:
    """Returns the state before the first cycle: the prompt but for its last token is in the cache."""
    (batch, length), lead = prompt.tokens.shape, functions.lead
    given_B = prompt.given.sum(1, dtype=jnp.int32)
    end_B = jnp.minimum(length, jnp.where(settings.max_new < length, given_B + settings.max_new, length))
    begin_B1 = jnp.full((batch, 1), functions.vocab, jnp.int32)
    inputs_BL = jnp.concatenate([begin_B1, prompt.tokens[:, :-1]], 1) if lead else prompt.tokens
    # Behind the last token there is room for a cycle, so that no row that is read is dropped.
    cache = functions.empty_cache(batch, length + lead + 2 * options.length)
    cache, passes = prefill(functions, cache, inputs_BL, given_B - 1 + lead, end_B > given_B, masks.causal)
    none, waiting = jnp.zeros((batch,), jnp.int32), None
    if options.single_pass:
        width = options.length - 1
        law = jnp.zeros((batch, width, functions.vocab), jnp.promote_types(jnp.float32, _law_type(functions, cache)))
        waiting = jnp.zeros((batch, width), jnp.int32), law, none
    logprobs_BL = jnp.zeros((batch, length), jnp.float32)
    return State(prompt.tokens * prompt.given, logprobs_BL, given_B, end_B, none, cache, passes, none, none, waiting, draws)


def step(functions: Any, options: Options, settings: Settings, state: State) -> State:
    """Returns the state after one cycle. Rows that are finished run along, and change nothing."""
    checkify.debug_check((state.cache.lengths_B == jnp.maximum(state.settled + functions.lead - 1, 0)).all(), "the cache's frontier is off")
    if options.length == 1:
        return _one(functions, settings, state)
    return (_single_pass if options.single_pass else _two_pass)(functions, options, settings, state)


def _law_type(functions: Any, cache: Any) -> Any:
    row = jnp.zeros((len(cache.lengths_B), 1), jnp.int32)
    return jax.eval_shape(lambda cache: functions.forward(cache, row, row, masks.causal)[0], cache).dtype


def _seed(functions: Any, state: State) -> Int[Array, "B 1"]:
    """Returns the last settled token, or the id that begins a sequence."""
    last_B1 = pick(state.tokens, jnp.maximum(state.settled - 1, 0)[:, None])
    return jnp.where(state.settled[:, None] == 0, functions.vocab, last_B1) if functions.lead else last_B1


def _columns(start_B: Int[Array, "B"], columns: int) -> Int[Array, "B W"]:
    return start_B[:, None] + jnp.arange(columns, dtype=jnp.int32)[None]


def _join(
    state: State, settings: Settings, tokens_BE: Array, law_BEV: Array, column_B: Array, drafts: tuple[int, Array], draws: Draws
) -> State:
    """Returns the state with each row's tokens up to `column` settled, cut behind a stop and at its end; law: what they were judged by.

    drafts: (the first column of the draft, how many columns of it were judged [B]).
    """
    at_BE = _columns(state.settled, tokens_BE.shape[1])
    new_BE = (at_BE < state.end[:, None]) & (at_BE - state.settled[:, None] <= column_B[:, None])
    stop_BE = new_BE & (tokens_BE[:, :, None] == settings.stop[:, None, :]).any(2)
    new_BE &= jnp.cumsum(stop_BE, 1) - stop_BE == 0  # up to the first stop
    new_B = new_BE.sum(1, dtype=jnp.int32)
    settled_B = state.settled + new_B
    first, judged_B = drafts
    accepted_B = jnp.clip(jnp.minimum(new_B, column_B) - first, 0)
    return state.replace(
        tokens=put(state.tokens, at_BE, tokens_BE, new_BE),
        logprobs=put(state.logprobs, at_BE, chosen(law_BEV, tokens_BE).astype(jnp.float32), new_BE),
        settled=settled_B,
        end=jnp.where(stop_BE.any(1), settled_B, state.end),
        cycle=state.cycle + 1,
        cache=state.cache.replace(lengths_B=state.cache.lengths_B + new_B),
        proposed=state.proposed + jnp.clip(jnp.minimum(new_B - first, judged_B), 0),
        accepted=state.accepted + accepted_B,
        draws=draws,
    )


def _one(functions: Any, settings: Settings, state: State) -> State:
    """Plain autoregression: one row, one token."""
    live_B = state.settled < state.end
    logits_B1V, cache = _rows(functions, state.cache, _seed(functions, state))
    law_B1V, at_B1 = shape_logits(logits_B1V, settings), state.settled[:, None]
    token_B1, draws = categorical(state.draws, Slot(Purpose.CLEAN, at_B1, state.cycle, live_B[:, None]), law_B1V)
    state = state.replace(cache=cache.replace(lengths_B=state.cache.lengths_B), passes=count(state.passes, "ar", live_B, 1))
    none = jnp.zeros_like(state.settled)
    return _join(state, settings, token_B1, law_B1V, none, (1, none), draws)


def _rows(functions: Any, cache: Any, tokens_BQ: Array, gate_BQ: Bool[Array, "B Q"] | None = None) -> tuple[Array, Any]:
    """Returns (logits, cache) of rows behind the cache."""
    position_BQ = _columns(cache.lengths_B, tokens_BQ.shape[1])
    if gate_BQ is None:
        return functions.forward(cache, tokens_BQ, position_BQ, masks.causal)
    return functions.forward(cache, tokens_BQ, position_BQ, masks.causal, gate_BQ=gate_BQ)


def _noise(functions: Any, draws: Draws, at_BW: Array, cycle_B: Array, where_BW: Array) -> tuple[Array, Draws]:
    """Returns the ids of noise rows."""
    if functions.noise_range == 1:
        return functions.make_noise(jnp.zeros_like(at_BW)), draws
    ids_BW, draws = uniform(draws, Slot(Purpose.NOISE, at_BW, cycle_B, where_BW), functions.noise_range)
    return functions.make_noise(ids_BW), draws


def _draft(options: Options, draws: Draws, slot: Slot, law_BWV: Array) -> tuple[Array, Array, Draws]:
    """Returns (drafted tokens, the law that they are judged by, draws)."""
    if options.draft == "sampled":
        drafted_BW, draws = categorical(draws, slot, law_BWV)
        return drafted_BW, law_BWV, draws
    best_BW = jnp.argmax(law_BWV, -1).astype(jnp.int32)
    only_BWV = jnp.where(jnp.arange(law_BWV.shape[-1])[None, None] == best_BW[:, :, None], 0.0, -jnp.inf).astype(law_BWV.dtype)
    return best_BW, only_BWV if options.draft == "greedy" else law_BWV, draws


def _two_pass(functions: Any, options: Options, settings: Settings, state: State) -> State:
    width, cycle_B, draws = options.length - 1, state.cycle, state.draws
    live_B, at_BW = state.settled < state.end, _columns(state.settled + 1, width)
    where_BW, at_B1 = at_BW < state.end[:, None], state.settled[:, None]

    noise_BW, draws = _noise(functions, draws, at_BW, cycle_B * options.steps, where_BW)
    gate_BQ = jnp.broadcast_to(jnp.arange(options.length)[None] > 0, (len(at_BW), options.length))
    passes, cache = state.passes, state.cache
    for number in range(options.steps):
        rows_BQ = jnp.concatenate([_seed(functions, state), noise_BW], 1)
        logits_BQV, cache = _rows(functions, cache.replace(lengths_B=state.cache.lengths_B), rows_BQ, gate_BQ)
        passes = count(passes, "draft", live_B, options.length)
        if number == 0:
            clean_B1V = shape_logits(logits_BQV[:, :1], settings)  # the seed's row is the same in every step
        draft_BWV = shape_logits(logits_BQV[:, 1:], settings)
        if number + 1 < options.steps:
            slot = Slot(Purpose.NOISE, at_BW, cycle_B * options.steps + number + 1, where_BW)
            noise_BW, draws = categorical(draws, slot, _renoise(functions, noise_BW, draft_BWV, number, options.steps))
    clean_B1, draws = categorical(draws, Slot(Purpose.CLEAN, at_B1, cycle_B, live_B[:, None]), clean_B1V)
    drafted_BW, draft_BWV, draws = _draft(options, draws, Slot(Purpose.DRAFT, at_BW, cycle_B, where_BW), draft_BWV)

    rows_BQ = jnp.concatenate([clean_B1, drafted_BW], 1)
    logits_BQV, cache = _rows(functions, cache.replace(lengths_B=state.cache.lengths_B + 1), rows_BQ)  # the seed's row is kept
    law_BQV = shape_logits(logits_BQV, settings)
    last_B1 = state.settled[:, None] + options.length
    bonus = law_BQV[:, -1], Slot(Purpose.RESIDUAL, last_B1, cycle_B, last_B1 < state.end[:, None])
    accept = Slot(Purpose.ACCEPT, at_BW, cycle_B, where_BW)
    verdict = judge(draws, accept, drafted_BW, draft_BWV, law_BQV[:, :-1], options.verification, bonus)

    column_B1 = verdict.column[:, None] + 1  # of the token drawn behind the accepted ones
    tokens_BE = jnp.concatenate([rows_BQ, jnp.zeros_like(clean_B1)], 1)
    tokens_BE = jnp.where(jnp.arange(options.length + 1)[None] == column_B1, verdict.token[:, None], tokens_BE)
    law_BEV = jnp.concatenate([clean_B1V, law_BQV], 1)
    passes = count(passes, "verify", live_B, options.length)
    state = state.replace(cache=cache.replace(lengths_B=state.cache.lengths_B), passes=passes)
    return _join(state, settings, tokens_BE, law_BEV, column_B1[:, 0], (1, jnp.full_like(cycle_B, width)), verdict.draws)


def _renoise(functions: Any, noise_BW: Array, draft_BWV: Float[Array, "B W V"], number: int, steps: int) -> Float[Array, "B W I"]:
    """Returns the logits of the noise rows' next state, of uniform-state diffusion (Duo, arXiv 2506.10892) or of masked.

    State z_t keeps the token x with chance alpha_t = 1 - t and else is noise, pi. With x from the draft, z_s given z_t follows
    (alpha_t/alpha_s [z_t = z_s] + (1 - alpha_t/alpha_s) pi(z_t)) (alpha_s x(z_s) + (1 - alpha_s) pi(z_s)), s = t - 1/steps.
    """
    kept_t, kept_s = number / steps, (number + 1) / steps
    ids = functions.vocab + functions.lead
    noise = functions.make_noise(jnp.arange(functions.noise_range, dtype=jnp.int32))
    pi_I = jnp.zeros((ids,), draft_BWV.dtype).at[noise].set(1 / functions.noise_range)
    same_BWI = (jnp.arange(ids)[None, None] == noise_BW[:, :, None]).astype(draft_BWV.dtype)
    token_BWI = jnp.pad(jnp.exp(draft_BWV), ((0, 0), (0, 0), (0, ids - draft_BWV.shape[-1])))
    before = kept_t / kept_s * same_BWI + (1 - kept_t / kept_s) * pi_I[noise_BW][:, :, None]
    return jnp.log(before * (kept_s * token_BWI + (1 - kept_s) * pi_I[None, None]))


def _single_pass(functions: Any, options: Options, settings: Settings, state: State) -> State:
    width, cycle_B, (drafted_BW, draft_BWV, waiting_B) = options.length - 1, state.cycle, state.waiting
    live_B, at_BW = state.settled < state.end, _columns(state.settled, width)
    rows = 2 * width + 1
    column_BQ = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32)[None], (len(at_BW), rows))
    gate_BQ = column_BQ > waiting_B[:, None]
    # The noise row behind row r stands for the token at settled + r - 1. Only the first `width` noise rows are read.
    noise_at_BW = _columns(state.settled, rows - 1)
    used_BW = gate_BQ[:, 1:] & (column_BQ[:, 1:] <= waiting_B[:, None] + width) & (noise_at_BW < state.end[:, None])
    noise_BW, draws = _noise(functions, state.draws, noise_at_BW, cycle_B, used_BW)
    draft_rows_BW = jnp.concatenate([drafted_BW, noise_BW[:, width:]], 1)
    rows_BQ = jnp.concatenate([_seed(functions, state), jnp.where(gate_BQ[:, 1:], noise_BW, draft_rows_BW)], 1)
    logits_BQV, cache = _rows(functions, state.cache, rows_BQ, gate_BQ)
    passes = count(state.passes, "verify", live_B, rows)

    take = lambda x_BQV, at_BW: jnp.take_along_axis(x_BQV, at_BW[:, :, None], 1)
    law_BEV = shape_logits(logits_BQV[:, : width + 1], settings)  # where nothing waits, the first alone is the target's
    where_BW = (at_BW < state.end[:, None]) & (column_BQ[:, :width] < waiting_B[:, None])
    last_B1 = (state.settled + waiting_B)[:, None]
    bonus = take(law_BEV, waiting_B[:, None])[:, 0], Slot(Purpose.RESIDUAL, last_B1, cycle_B, last_B1 < state.end[:, None])
    accept = Slot(Purpose.ACCEPT, at_BW, cycle_B, where_BW)
    verdict = judge(draws, accept, drafted_BW, draft_BWV, law_BEV[:, :-1], options.verification, bonus)
    column_B = jnp.minimum(verdict.column, waiting_B)
    tokens_BE = jnp.concatenate([drafted_BW, drafted_BW[:, :1]], 1)
    tokens_BE = jnp.where(column_BQ[:, : width + 1] == column_B[:, None], verdict.token[:, None], tokens_BE)

    # The next draft, from the noise rows behind what was judged: of use where all of that was accepted.
    whole_B = verdict.column == width
    next_BWV = shape_logits(take(logits_BQV, waiting_B[:, None] + 1 + column_BQ[:, :width]), settings)
    next_at_BW = _columns(state.settled + waiting_B + 1, width)
    slot = Slot(Purpose.DRAFT, next_at_BW, cycle_B, whole_B[:, None] & (next_at_BW < state.end[:, None]))
    next_BW, next_BWV, draws = _draft(options, verdict.draws, slot, next_BWV)
    waiting = next_BW, next_BWV, jnp.where(whole_B, width, 0)
    state = state.replace(cache=cache.replace(lengths_B=state.cache.lengths_B), passes=passes, waiting=waiting)
    return _join(state, settings, tokens_BE, law_BEV, column_B, (0, waiting_B), draws)
