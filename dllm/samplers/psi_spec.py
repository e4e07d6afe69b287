"""Lossless speculative sampling by an autoregressive model's own adapter: Uno's Psi-Spec (arXiv 2609.04010, Algorithm 1), and beyond it.

A cycle of L rows drafts L - 1 tokens and judges them, in two forwards:

- draft: rows [seed, noise, ...]. The seed is the last settled token, whose keys and values aren't cached yet; its row is the frozen
  model's, and gives the law of the next token, the *clean* one, which is never rejected. Each noise row, where the adapter acts, gives the
  law of the token behind it given the settled text: the draft is independent tokens from these.
- verify: rows [clean, draft, ...] of the frozen model: the target's law of every drafted token, and of one behind them. The accepted
  tokens, and the one drawn in place of the first rejected or behind the last, join the text: 2 to L + 1 tokens.

The cache holds all settled rows but the seed's. The law is the frozen model's under the settings, whatever the adapter (of finite numbers),
the noise, L, the number of denoising steps and the verification: conditional on all that was drawn before, each emitted token has the
target's law.

single_pass does both in one forward of 2 L - 1 rows, [seed, draft, ...; noise, ...]: it judges the last cycle's draft, and its noise rows,
which have read that draft, are the next one's, valid if all was accepted. If not, the next forward has no draft to judge: it emits one
token, and drafts.

tree and tree_rejection offer several candidates for each drafted position. The verifying pass reads a tree of them (ops/trees.py) and keeps
the rows of the path that is accepted.

adaptive (lengths and costs) chooses L anew before each cycle, or stretch of plain tokens, for the whole batch, from what earlier cycles
accepted. It has seen none of
the cycle's own draws, so each row's law is as before, whatever its neighbours. Its tokens are not: they hang on the lengths, and so on
all rows of the batch.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.experimental import checkify
from jaxtyping import Array, Bool, Float, Int

from dllm.core.types import UserError
from dllm.ops import masks, trees
from dllm.ops.draws import Draws, Purpose, Slot, categorical, uniform
from dllm.ops.passes import count
from dllm.ops.settings import Settings, shape_logits
from dllm.samplers.accept import draw_candidates, judge, walk, walk_rejecting
from dllm.samplers.loop import Prompt, Samples, chosen, put, read_prompt, seed

LEFT_TO_RIGHT = True  # prompts are prefixes; max_new and stop are obeyed
MODEL = ("uno",)  # what it goes with, as samplers.loop.kind says it
TREES = ("tree", "tree_rejection")

# Of the adaptive length.
FADE = 0.95  # what a count is worth after one more test of its depth
PRIOR = 2.0  # tests that a depth's acceptance begins with, at the rate of all depths
EXPLORE = 0.02  # of the cost so far, what trying a longer length than the best may have lost
MARGIN = 1.1  # what drafting has to promise over plain autoregression: measured costs and rates of few tests err by as much
STRETCH = 16  # tokens of plain autoregression until the next choice: of a small model's pass the choice would be a tenth


@dataclasses.dataclass(frozen=True)
class Options:
    """length        rows of a forward: one seed and length - 1 noise rows, so as many drafted tokens; 1: plain autoregression
    verification  chain
                  block     (arXiv 2403.10444) accepts more
                  tree      of the likeliest candidates: tokens are drawn from the target as far as the tree holds them
                  tree_rejection  of candidates drawn without replacement, judged one after the other: better where the draft is good
                            and the temperature isn't low
    steps         denoising steps of a draft, each a forward
    draft         sampled   from the draft's law
                  greedy    its likeliest tokens, judged as what they are: a law of one token
                  risd_lossy  its likeliest tokens, judged as if they were sampled: the published I-DLM sampler (arXiv 2604.11035), which
                            samples another law than the model's. A negative control
    single_pass   verify and draft in one forward
    children, nodes  of a tree: candidates for each drafted position, and rows of the verifying pass
    lengths       adaptive: the lengths to choose from before each cycle, ascending from 1; (): always `length`. Those that can't pay are
                  left out of the program
    costs         what a cycle of each of these takes, in passes of plain autoregression, for the batch and machine at hand
    """

    length: int = 8
    verification: Literal["chain", "block", "tree", "tree_rejection"] = "chain"
    steps: int = 1
    draft: Literal["sampled", "greedy", "risd_lossy"] = "sampled"
    single_pass: bool = False
    children: int = 4
    nodes: int = 16
    lengths: tuple[int, ...] = ()
    costs: tuple[float, ...] = ()


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
    record: Any  # adaptive: a Record; else None
    draws: Any


@struct.dataclass
class Record:
    """What the adaptive length is chosen by."""

    tested: Any  # [B W] float32, how often each depth of a draft was judged; a depth's earlier tests weigh less
    accepted: Any  # [B W]
    spent: Any  # [] float32, costs of all cycles so far
    explored: Any  # [] float32, of these, what trying longer lengths lost by the estimates of the time


def sample(
    functions: Any, options: Options, settings: Settings, draws: Draws, prompt: Prompt, order_BL: Int[Array, "B L"] | None = None
) -> Samples:
    """Returns one sequence a row, with the frozen model's law under the settings (draft = risd_lossy excepted). Given tokens are a prefix.

    `functions` is an uno model's (dllm/models/uno.py); where no id of its own begins a sequence (lead = 0), every prompt has a token.
    `proposed` counts drafted tokens that were judged, `accepted` those among them that joined the text. There is no order to hand in.
    Raises UserError for options out of range.
    """
    _check(options)
    options = _worthwhile(options)
    state = run(functions, options, settings, begin(functions, options, settings, draws, prompt))
    return Samples(state.tokens, state.settled, state.logprobs, state.passes, state.proposed, state.accepted, state.draws)


def _check(options: Options) -> None:
    if options.length < 1:
        raise UserError(f"length is {options.length}; make it 1 (plain autoregression) or more")
    if options.steps < 1:
        raise UserError(f"steps is {options.steps}; make it 1 or more")
    for key, choices in (("verification", ("chain", "block", *TREES)), ("draft", ("sampled", "greedy", "risd_lossy"))):
        if getattr(options, key) not in choices:
            raise UserError(f"no {key} {getattr(options, key)!r}; there are: {', '.join(choices)}")
    if options.single_pass and (options.steps > 1 or options.length < 2 or options.lengths):
        raise UserError("single_pass drafts at least one token, in one step: set length to 2 or more, steps to 1, and no lengths")
    if options.verification in TREES:
        if options.single_pass or options.draft != "sampled":
            raise UserError(f"verification={options.verification} has a draft and passes of its own: leave out draft and single_pass")
        if options.children < 1 or options.nodes < 2:
            raise UserError(f"children is {options.children} and nodes {options.nodes}; make them 1 or more, and 2 or more")
    if options.lengths and (options.lengths[0] != 1 or (np.diff(options.lengths) < 1).any()):
        raise UserError(f"lengths is {options.lengths}; let them begin with 1 (plain autoregression) and ascend")
    if len(options.costs) != len(options.lengths) or not all(0 < cost < np.inf for cost in options.costs):
        raise UserError(f"costs is {options.costs} and lengths {options.lengths}; give each length the cost of its cycle, above 0")


def _worthwhile(options: Options) -> Options:
    """Returns the options without lengths whose cycle can't pay even if every draft is accepted: L + 1 tokens for its cost."""
    if not options.lengths:
        return options
    kept = [(n, cost) for n, cost in zip(options.lengths, options.costs) if n == 1 or (n + 1) * options.costs[0] > cost]
    lengths, costs = (tuple(x) for x in zip(*kept))
    if len(kept) == 1:
        return dataclasses.replace(options, length=1, lengths=(), costs=())
    return dataclasses.replace(options, lengths=lengths, costs=costs)


def begin(functions: Any, options: Options, settings: Settings, draws: Draws, prompt: Prompt) -> State:
    """Returns the state before the first cycle: the prompt but for its last token is in the cache."""
    # Behind the last token there is room for a cycle, so that no row that is read is dropped.
    widest = max(options.lengths or (options.length,))
    rows = 2 * widest if options.single_pass else max(widest, options.nodes if options.verification in TREES else 0)
    given_B, end_B, cache, passes = read_prompt(functions, settings, prompt, functions.lead + rows)
    batch, length = prompt.tokens.shape
    none, waiting, record = jnp.zeros((batch,), jnp.int32), None, None
    if options.single_pass:
        width = options.length - 1
        law = jnp.zeros((batch, width, functions.vocab), jnp.promote_types(jnp.float32, _law_type(functions, cache)))
        waiting = jnp.zeros((batch, width), jnp.int32), law, none
    if options.lengths:
        no_test_BW, nothing = jnp.zeros((batch, widest - 1), jnp.float32), jnp.zeros((), jnp.float32)
        record = Record(no_test_BW, no_test_BW, nothing, nothing)
    logprobs_BL = jnp.zeros((batch, length), jnp.float32)
    return State(prompt.tokens * prompt.given, logprobs_BL, given_B, end_B, none, cache, passes, none, none, waiting, record, draws)


def run(functions: Any, options: Options, settings: Settings, state: State) -> State:
    """Returns the state in which every row is finished."""
    return lax.while_loop(lambda state: (state.settled < state.end).any(), lambda state: step(functions, options, settings, state), state)


def step(functions: Any, options: Options, settings: Settings, state: State) -> State:
    """Returns the state after one cycle. Rows that are finished run along, and change nothing."""
    checkify.debug_check((state.cache.lengths_B == jnp.maximum(state.settled + functions.lead - 1, 0)).all(), "the cache's frontier is off")
    return (_adaptive if options.lengths else _cycle)(functions, options, settings, state)


def _cycle(functions: Any, options: Options, settings: Settings, state: State) -> State:
    if options.length == 1:
        return _one(functions, settings, state)
    if options.verification in TREES:
        return _tree(functions, options, settings, state)
    return (_single_pass if options.single_pass else _two_pass)(functions, options, settings, state)


def _adaptive(functions: Any, options: Options, settings: Settings, state: State) -> State:
    number, loss = _choose(options, state)
    state = state.replace(record=state.record.replace(explored=state.record.explored + loss))

    def cycle(length: int, cost: float, state: State) -> State:
        state = state.replace(record=state.record.replace(spent=state.record.spent + cost))
        return _cycle(functions, dataclasses.replace(options, length=length), settings, state)

    first, *longer = (functools.partial(cycle, *each) for each in zip(options.lengths, options.costs))
    more = lambda carry: (carry[0] < STRETCH) & (carry[1].settled < carry[1].end).any()
    plain = lambda state: lax.while_loop(more, lambda carry: (carry[0] + 1, first(carry[1])), (jnp.int32(0), state))[1]
    return lax.switch(number, [plain, *longer], state)


def _choose(options: Options, state: State) -> tuple[Int[Array, ""], Float[Array, ""]]:
    """Returns (which of options.lengths the next cycle has, the tokens that it loses by not being the best, in passes).

    The best settles most tokens for its cost, as the acceptance of each depth in the live rows' drafts so far lets expect: the clean
    token, the one behind it, and behind each accepted draft another, as far as there is room. Now and then the next longer one is
    tried, so that a drafter which was useless gets another chance; the cost of that is bounded.
    """
    record, live_B = state.record, state.settled < state.end
    tested_W, accepted_W = (jnp.where(live_B[:, None], x_BW, 0).sum(0) for x_BW in (record.tested, record.accepted))
    all_depths = (accepted_W.sum() + 1) / (tested_W.sum() + 2)
    rate_W = (accepted_W + PRIOR * all_depths) / (tested_W + PRIOR)
    settles_E = jnp.concatenate([jnp.ones((2,), jnp.float32), jnp.cumprod(rate_W)])
    room_BE = _columns(state.settled, len(settles_E)) < state.end[:, None]
    upto_E = jnp.cumsum(settles_E * room_BE.sum(0))
    tokens_K = upto_E[jnp.asarray([length if length > 1 else 0 for length in options.lengths])]
    cost_K = jnp.asarray(options.costs, jnp.float32)
    worth_K = tokens_K / cost_K * jnp.where(jnp.arange(len(cost_K)) == 0, MARGIN, 1)
    best = jnp.argmax(worth_K)
    longer = jnp.minimum(best + 1, len(options.lengths) - 1)
    loss = cost_K[longer] * (1 - worth_K[longer] / worth_K[best])
    probe = (tokens_K[longer] > tokens_K[best]) & (record.explored + loss <= EXPLORE * record.spent)
    return jnp.where(probe, longer, best), jnp.where(probe, loss, 0)


def _note(record: Record | None, where_BW: Bool[Array, "B W"], column_B: Int[Array, "B"]) -> Record | None:
    """Returns the record after a draft whose columns up to `column` were judged, and those before it accepted."""
    if record is None:
        return None
    column_BW = jnp.arange(where_BW.shape[1])[None]
    width = [(0, 0), (0, record.tested.shape[1] - where_BW.shape[1])]
    tested_BW = jnp.pad(where_BW & (column_BW <= column_B[:, None]), width)
    accepted_BW = jnp.pad(where_BW & (column_BW < column_B[:, None]), width)
    add = lambda old_BW, seen_BW: jnp.where(tested_BW, FADE * old_BW + seen_BW, old_BW)
    return record.replace(tested=add(record.tested, tested_BW), accepted=add(record.accepted, accepted_BW))


def _law_type(functions: Any, cache: Any) -> Any:
    row = jnp.zeros((len(cache.lengths_B), 1), jnp.int32)
    return jax.eval_shape(lambda cache: functions.forward(cache, row, row, masks.causal)[0], cache).dtype


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
    logits_B1V, cache = _rows(functions, state.cache, seed(functions, state.tokens, state.settled))
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


class Draft(NamedTuple):
    """What a cycle knows after its drafting passes."""

    clean_B1: Any
    clean_B1V: Any  # its law
    at_BW: Any  # positions of the drafted tokens
    where_BW: Any  # which of them are in the text
    logits_BWV: Any  # behind the noise rows
    cache: Any
    passes: Any
    draws: Any


def _draft_passes(functions: Any, options: Options, settings: Settings, state: State) -> Draft:
    width, cycle_B, draws = options.length - 1, state.cycle, state.draws
    live_B, at_BW = state.settled < state.end, _columns(state.settled + 1, width)
    where_BW, at_B1 = at_BW < state.end[:, None], state.settled[:, None]

    noise_BW, draws = _noise(functions, draws, at_BW, cycle_B * options.steps, where_BW)
    gate_BQ = jnp.broadcast_to(jnp.arange(options.length)[None] > 0, (len(at_BW), options.length))
    passes, cache = state.passes, state.cache
    for number in range(options.steps):
        rows_BQ = jnp.concatenate([seed(functions, state.tokens, state.settled), noise_BW], 1)
        logits_BQV, cache = _rows(functions, cache.replace(lengths_B=state.cache.lengths_B), rows_BQ, gate_BQ)
        passes = count(passes, "draft", live_B, options.length)
        if number == 0:
            clean_B1V = shape_logits(logits_BQV[:, :1], settings)  # the seed's row is the same in every step
        if number + 1 < options.steps:
            draft_BWV = shape_logits(logits_BQV[:, 1:], settings)
            slot = Slot(Purpose.NOISE, at_BW, cycle_B * options.steps + number + 1, where_BW)
            noise_BW, draws = categorical(draws, slot, _renoise(functions, noise_BW, draft_BWV, number, options.steps))
    clean_B1, draws = categorical(draws, Slot(Purpose.CLEAN, at_B1, cycle_B, live_B[:, None]), clean_B1V)
    return Draft(clean_B1, clean_B1V, at_BW, where_BW, logits_BQV[:, 1:], cache, passes, draws)


def _two_pass(functions: Any, options: Options, settings: Settings, state: State) -> State:
    cycle_B, live_B = state.cycle, state.settled < state.end
    clean_B1, clean_B1V, at_BW, where_BW, logits_BWV, cache, passes, draws = _draft_passes(functions, options, settings, state)
    draft_BWV = shape_logits(logits_BWV, settings)
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
    passes, record = count(passes, "verify", live_B, options.length), _note(state.record, where_BW, verdict.column)
    state = state.replace(cache=cache.replace(lengths_B=state.cache.lengths_B), passes=passes, record=record)
    return _join(state, settings, tokens_BE, law_BEV, column_B1[:, 0], (1, jnp.full_like(cycle_B, options.length - 1)), verdict.draws)


def _tree(functions: Any, options: Options, settings: Settings, state: State) -> State:
    cycle_B, live_B = state.cycle, state.settled < state.end
    clean_B1, clean_B1V, at_BW, where_BW, logits_BWV, cache, passes, draws = _draft_passes(functions, options, settings, state)
    children, rejecting = min(options.children, functions.vocab), options.verification == "tree_rejection"
    if rejecting:
        draft_BWV = shape_logits(logits_BWV, settings)
        slot = Slot(Purpose.DRAFT, at_BW, cycle_B, where_BW)
        candidates_BWK, there_BWK, draws = draw_candidates(draws, slot, draft_BWV, children)
        # Weights that don't know which tokens were drawn: an accept test succeeds every other time.
        halves_11K = -jnp.log(2.0) * jnp.arange(1, children + 1, dtype=jnp.float32)[None, None]
        weight_BWK = jnp.where(there_BWK, halves_11K, -jnp.inf)
    else:
        weight_BWK, candidates_BWK = lax.top_k(_ranking(logits_BWV, settings), children)
        weight_BWK = jnp.where(where_BW[:, :, None], weight_BWK, -jnp.inf)
    tree = trees.best_first(weight_BWK, options.nodes)

    tokens_BN, cache = trees.tokens_at(tree, clean_B1, candidates_BWK), cache.replace(lengths_B=state.cache.lengths_B + 1)
    position_BN = cache.lengths_B[:, None] + tree.depth_BN
    logits_BNV, cache = functions.forward(cache, tokens_BN, position_BN, masks.Ancestors(tree.ancestors_BNN))
    law_BNV = shape_logits(logits_BNV, settings)
    behind_BE = _columns(state.settled + 1, options.length)
    slot = Slot(Purpose.TOKEN, behind_BE, cycle_B, behind_BE < state.end[:, None])
    if rejecting:
        path = walk_rejecting(draws, slot, tree, tokens_BN, draft_BWV, law_BNV, children)
    else:
        path = walk(draws, slot, tree, tokens_BN, law_BNV)

    column_B = path.accepted_B + 1  # of the token drawn behind the accepted ones
    tokens_BE = jnp.concatenate([jnp.take_along_axis(tokens_BN, path.nodes_BE, 1), jnp.zeros_like(clean_B1)], 1)
    tokens_BE = jnp.where(jnp.arange(options.length + 1)[None] == column_B[:, None], path.token_B[:, None], tokens_BE)
    law_BEV = jnp.concatenate([clean_B1V, jnp.take_along_axis(law_BNV, path.nodes_BE[:, :, None], 1)], 1)
    cache = cache.keep(path.nodes_BE, column_B)  # the root's row among them
    judged_BW = jnp.arange(options.length - 1)[None] < path.judged_B[:, None]
    passes, record = count(passes, "verify", live_B, options.nodes), _note(state.record, judged_BW, path.accepted_B)
    state = state.replace(cache=cache.replace(lengths_B=state.cache.lengths_B), passes=passes, record=record)
    return _join(state, settings, tokens_BE, law_BEV, column_B, (1, path.judged_B), path.draws)


def _ranking(logits_BWV: Float[Array, "B W V"], settings: Settings) -> Float[Array, "B W V"]:
    """Returns the log-probabilities that choose a tree's candidates: of the law under the settings, but without filters, which leave the
    order as it is, and at temperature 1 where it is 0, since a law of one token has no second."""
    warm_B = jnp.where(settings.temperature == 0, 1, settings.temperature)
    return shape_logits(logits_BWV, settings.replace(temperature=warm_B, filtered=False))


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
    next_BWI = before * (kept_s * token_BWI + (1 - kept_s) * pi_I[None, None])
    # A draft may come to exclude a token that it wrote before: then nothing is left, and the row stays as it is.
    return jnp.log(jnp.where(next_BWI.sum(-1, keepdims=True) > 0, next_BWI, same_BWI))


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
    rows_BQ = jnp.concatenate([seed(functions, state.tokens, state.settled), jnp.where(gate_BQ[:, 1:], noise_BW, draft_rows_BW)], 1)
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
    waiting = next_BW, next_BWV, width * whole_B.astype(jnp.int32)
    state = state.replace(cache=cache.replace(lengths_B=state.cache.lengths_B), passes=passes, waiting=waiting)
    return _join(state, settings, tokens_BE, law_BEV, column_B, (0, waiting_B), draws)
