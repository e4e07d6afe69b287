"""Block diffusion: left to right by blocks, several tokens a pass inside a block, on an exact key/value cache (BD3-LM, arXiv 2503.09573).

A block of MASK tokens is denoised in passes: each reads the finished blocks from the cache and the block as it stands, and settles some
of the masked positions. A full block is *committed*: its keys and values, which the last noisy pass computed beside masks, are computed
once more from the clean tokens. Finished blocks are never revised.

What law is sampled, for a model whose conditionals are those of one joint law:

- The settled set depends on the tokens settled before it alone (sequential, random, entropy_bounded, and whatever reads the confidence
  max, margin or neg_entropy): the divergence KL(model || sampler) is the sum over passes of the expected total correlation of the settled
  set. So one token a pass is exact, whatever the order; more a pass cost what those tokens tell of each other.
- The set depends on what was drawn (confidence "sampled" in static, dynamic and factor, the habit of the public decoders): a position is
  settled *because* its draw was likely, which sharpens the law silently, even at one token a pass, and as tau goes to 1 too. With the
  fallback "leftmost" that bias vanishes as tau goes to 1.
- A temperature other than 1 shapes the law and, with the confidence law "tempered", the confidences: a lower one settles more a pass.

The public decoders compare either the drawn token's probability or the largest with tau, each under a law of its own; `confidence` and
`confidence_law` say which. (tests/samplers/test_block_diffusion.py enumerates the laws.)
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dllm.core.types import UserError
from dllm.ops import masks
from dllm.ops.draws import Draws, Purpose, Slot, categorical, permutation
from dllm.ops.passes import count
from dllm.ops.settings import Settings, shape_logits
from dllm.samplers.loop import Prompt, Samples, chosen, pick, prefill, put, require_fit, to_sequence

LEFT_TO_RIGHT = True  # prompts are prefixes; max_new and stop are obeyed


@dataclasses.dataclass(frozen=True)
class Options:
    """Which masked positions a pass settles: never none, never one that is settled or given.

    select  static           the n of highest confidence
            dynamic          all whose confidence is above tau; where these are fewer than n, n by `fallback`
            sequential       the n leftmost
            random           n at random
            entropy_bounded  by ascending entropy, the longest prefix whose entropies sum to less than gamma (arXiv 2505.24857)
            factor           by descending confidence c, up to the first k-th with (k + 1)(1 - c) >= factor (arXiv 2505.22618)
    """

    select: str = "dynamic"
    n: int = 1
    tau: float = 0.9
    gamma: float = 0.35
    factor: float = 1.0
    confidence: str = "max"  # max: the largest probability; sampled: that of the drawn token; margin: largest less second; neg_entropy
    confidence_law: str = "tempered"  # read from: raw (T = 1); tempered (T, or 1 where T = 0); filtered (T, top-k, top-p, min-p)
    inclusive: bool = False  # dynamic takes a confidence of exactly tau too
    fallback: str = "topk"  # of dynamic: topk, by confidence; leftmost
    commit: str = "fused"  # fused: in one pass with the first look at the next block, 2 blocks wide; separate: in a pass of its own


_CHOICES = {
    "select": ("static", "dynamic", "sequential", "random", "entropy_bounded", "factor"),
    "confidence": ("max", "sampled", "margin", "neg_entropy"),
    "confidence_law": ("raw", "tempered", "filtered"),
    "fallback": ("topk", "leftmost"),
    "commit": ("fused", "separate"),
}

# How public decoders choose, at their default thresholds and without their defects. Their laws, given exact conditionals:
PRESETS = {
    # Biased, even at one token a pass: a position is settled because its draw was likely. With top_k = 1 every confidence is 1.
    "sdar_generate": Options(tau=0.85, confidence="sampled", confidence_law="filtered"),
    # Biased likewise; top-k and top-p don't raise the confidences.
    "opencompass": Options(tau=0.95, confidence="sampled"),
    # Biased where a draw passes tau; exact in the limit of tau = 1.
    "jetengine": Options(tau=0.9, confidence="sampled", fallback="leftmost"),
    # Biased, as sdar_generate.
    "lmdeploy": Options(tau=0.9, confidence="sampled", confidence_law="filtered", inclusive=True),
    # Biased; the temperature doesn't reach the confidences.
    "fastdllm_v1": Options(tau=0.9, confidence="sampled", confidence_law="raw", inclusive=True),
    # Meant for temperature 0, where there is no law, only a text; above it, off by the total correlation of what a pass settles.
    "fastdllm_v2": Options(tau=0.9, confidence="max", confidence_law="raw"),
    # Biased, even at n = 1; n is block / steps.
    "llada": Options(select="static", confidence="sampled", confidence_law="raw"),
}


@struct.dataclass
class State:
    """The run between two passes. cache.lengths_B is where each row's present block starts: what lies before is in the cache."""

    tokens: Any  # [B L] int32, MASK where nothing is settled
    logprobs: Any  # [B L] float32
    given: Any  # [B] int32, length of the prompt
    end: Any  # [B] int32, the position before which the text ends: by max_new, by a stop, or with the context
    cycle: Any  # [B] int32, passes that looked at the present block
    rank: Any  # [B L] int32, where each position stands in a random order; None unless select is random
    cache: Any
    passes: Any  # ops.passes.Passes
    draws: Any  # the door


class _Block(NamedTuple):
    """The present block of each row."""

    position: Int[Array, "B W"]
    tokens: Int[Array, "B W"]
    open: Bool[Array, "B W"]  # to be settled: MASK, and neither given nor beyond the context


def sample(
    functions: Any, options: Options, settings: Settings, draws: Draws, prompt: Prompt, order_BL: Int[Array, "B L"] | None = None
) -> Samples:
    """Returns one sequence a row; the law is that of the module's docstring. Given tokens are a prefix of each row.

    `functions` has forward(cache, tokens_BQ, positions_BQ, mask, at_BW) -> (logits_BWV, cache) with logits of row i for token i,
    empty_cache(batch, slots), block and mask_id. `order_BL` is a permutation of the positions for select = random, uniform by default.

    max_new and stop cut the text, they don't change it: a row ends as soon as all positions up to its last or up to a drawn stop are
    settled, with the tokens that it would have had without. The grid of blocks starts at position 0; the prompt's last, incomplete
    block is denoised with what is given of it. `logprobs` are those of each token in the pass that settled it; their sum is the
    likelihood of nothing. Raises UserError on options out of range and on a model without a MASK.
    """
    state = begin(functions, options, settings, draws, prompt, order_BL)
    state = lax.while_loop(lambda state: _live(functions, state).any(), lambda state: step(functions, options, settings, state), state)
    written_BL = jnp.arange(prompt.tokens.shape[1], dtype=jnp.int32)[None] < state.end[:, None]
    none = jnp.zeros_like(state.end)
    return Samples(state.tokens * written_BL, state.end, state.logprobs * written_BL, state.passes, none, none, state.draws)


def compile_stream(
    model: ModuleType, config: Any, options: Options
) -> Callable[[Any, Settings, Draws, Prompt], Iterator[list[Int[np.ndarray, "T"]]]]:
    """Returns stream(variables, settings, draws, prompt), an iterator over the text as it becomes final, one program for all calls.

    Each item holds, for every row, the ids that joined its settled prefix since the last item, none for some rows but not for all.
    Joined together they are `sample`'s tokens behind the prompt. Raises UserError as `sample` does.
    """
    require_fit(sys.modules[__name__], model, config)

    @jax.jit
    def start(variables, settings, draws, prompt):
        state = begin(model.bind(config, variables), options, settings, draws, prompt)
        return state.replace(draws=None)  # the caller's own arrays: they must not be donated

    def advance(variables, settings, draws, state):
        functions = model.bind(config, variables)
        final_B = _final(functions, state)
        waiting = lambda state: _live(functions, state).any() & (_final(functions, state) == final_B).all()
        state = lax.while_loop(waiting, lambda state: step(functions, options, settings, state), state.replace(draws=draws))
        return state.replace(draws=None), state.tokens + 0, _final(functions, state), _live(functions, state).any()

    advance = jax.jit(advance, donate_argnums=3)

    def stream(variables, settings, draws, prompt):
        state = start(variables, settings, draws, prompt)
        told_B, live = jax.device_get(state.given), True
        while live:
            state, *news = advance(variables, settings, draws, state)
            tokens_BL, final_B, live = jax.device_get(news)
            if (final_B > told_B).any():
                yield [row[told:final] for row, told, final in zip(tokens_BL, told_B, final_B, strict=True)]
            told_B = final_B

    return stream


def begin(
    functions: Any, options: Options, settings: Settings, draws: Draws, prompt: Prompt, order_BL: Int[Array, "B L"] | None = None
) -> State:
    """Returns the state before the first denoising pass: the whole blocks of each prompt are in the cache."""
    _check(functions, options)
    batch, length = prompt.tokens.shape
    given_B = prompt.given.sum(1, dtype=jnp.int32)
    end_B = jnp.minimum(length, jnp.where(settings.max_new < length, given_B + settings.max_new, length))
    tokens_BL = jnp.where(prompt.given, prompt.tokens, functions.mask_id).astype(jnp.int32)
    rank_BL = None
    if options.select == "random":
        order_BL = permutation(draws, length) if order_BL is None else order_BL
        rank_BL = to_sequence(jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (batch, length)), order_BL)
    block = functions.block
    cache, rows_B = functions.empty_cache(batch, -(-length // block) * block), given_B // block * block
    cache, passes = prefill(functions, cache, tokens_BL, rows_B, end_B > given_B, masks.BlockCausal(block), block)
    logprobs_BL, cycle_B = jnp.zeros((batch, length), jnp.float32), jnp.zeros((batch,), jnp.int32)
    return State(tokens_BL, logprobs_BL, given_B, end_B, cycle_B, rank_BL, cache, passes, draws)


def step(functions: Any, options: Options, settings: Settings, state: State) -> State:
    """Returns the state after one forward pass, in which an unfinished row denoises its block or commits it (fused: and denoises the next).

    Rows are at phases of their own. The rows of a forward that a row has no use for write behind its part of the cache, and are
    overwritten before they are read.
    """
    block, length = functions.block, state.tokens.shape[1]
    if length <= block:  # nothing is ever committed, and the cache has no room for a pass over two blocks
        options = dataclasses.replace(options, commit="separate")
    now = _block(functions, state)
    denoise_B = _unfinished(state, now)
    commit_B = ~denoise_B & _continues(functions, state)
    logits_BWV, cache = _forward(functions, options, state.cache, now, commit_B)
    passes = count(state.passes, "denoise", denoise_B, block)
    if options.commit == "fused":
        passes, denoise_B = count(passes, "denoise", commit_B, 2 * block), denoise_B | commit_B
    else:
        passes = count(passes, "commit", commit_B, block)
    cache = cache.replace(lengths_B=state.cache.lengths_B + block * commit_B)
    state = state.replace(cache=cache, passes=passes, cycle=jnp.where(commit_B, 0, state.cycle))

    now = _block(functions, state)  # of a row that committed: the next one
    open_BW = now.open & denoise_B[:, None]
    logits_BWV = jnp.where(jnp.arange(logits_BWV.shape[-1])[None, None] == functions.mask_id, -jnp.inf, logits_BWV)
    law_BWV = shape_logits(logits_BWV, settings)
    slot = Slot(Purpose.TOKEN, now.position, state.cycle, open_BW)
    seen_BWV = law_BWV if options.confidence_law == "filtered" else shape_logits(logits_BWV, _unfiltered(options, settings))
    if _reads_draws(options):
        drawn_BW, draws = categorical(state.draws, slot, law_BWV)
        settle_BW = _select(options, jnp.exp(chosen(seen_BWV, drawn_BW)), open_BW)
    else:
        score_BW = _score(options, seen_BWV, None if state.rank is None else pick(state.rank, now.position))
        settle_BW = _select(options, score_BW, open_BW)
        drawn_BW, draws = categorical(state.draws, slot._replace(where=settle_BW), law_BWV)

    tokens_BL = put(state.tokens, now.position, drawn_BW, settle_BW)
    logprobs_BL = put(state.logprobs, now.position, chosen(law_BWV, drawn_BW).astype(jnp.float32), settle_BW)
    # A stop counts once everything before it is settled, and never in the prompt.
    tokens_BW = jnp.where(settle_BW, drawn_BW, now.tokens)
    settled_BW = jnp.cumsum(now.open & ~settle_BW, 1) == 0
    stop_BW = (tokens_BW[:, :, None] == settings.stop[:, None]).any(-1) & settled_BW & (now.position >= state.given[:, None])
    end_B = jnp.minimum(state.end, jnp.where(stop_BW, now.position + 1, length).min(1))
    return state.replace(tokens=tokens_BL, logprobs=logprobs_BL, end=end_B, cycle=state.cycle + denoise_B, draws=draws)


def _check(functions: Any, options: Options) -> None:
    if getattr(functions, "mask_id", -1) < 0:
        raise UserError("block_diffusion needs a model with a MASK id; this one has none: autoregressive is the sampler for it")
    for key, choices in _CHOICES.items():
        if getattr(options, key) not in choices:
            raise UserError(f"no {key} {getattr(options, key)!r}; there are: {', '.join(choices)}")
    entropies = options.confidence == "neg_entropy"
    if entropies and options.select == "factor":
        raise UserError("factor reads a confidence between 0 and 1; neg_entropy is none: choose max, sampled or margin")
    if options.select == "dynamic" and not (options.tau <= 0 if entropies else 0 <= options.tau <= 1):
        raise UserError(f"tau is {options.tau}; with confidence {options.confidence} make it {'0 or less' if entropies else '0 to 1'}")
    for key, low in (("n", 1), ("gamma", 0), ("factor", 0)):
        if not getattr(options, key) >= low:
            raise UserError(f"{key} must be {low} or more, got {getattr(options, key)}")


def _forward(functions: Any, options: Options, cache: Any, now: _Block, commit_B: Array) -> tuple[Array, Any]:
    """Returns (logits [B W V], cache): of the present block, and with a fused commit of the next block where a row commits."""
    block, mask = functions.block, masks.BlockCausal(functions.block)
    one = lambda cache: functions.forward(cache, now.tokens, now.position, mask)
    if options.commit == "separate":
        return one(cache)

    def two(cache):
        tokens_BQ = jnp.concatenate([now.tokens, jnp.full_like(now.tokens, functions.mask_id)], 1)
        position_BQ = jnp.concatenate([now.position, now.position + block], 1)
        at_BW = jnp.arange(block, dtype=jnp.int32)[None] + block * commit_B[:, None]
        return functions.forward(cache, tokens_BQ, position_BQ, mask, at_BW)

    return lax.cond(commit_B.any(), two, one, cache)


def _block(functions: Any, state: State) -> _Block:
    length = state.tokens.shape[1]
    position_BW = state.cache.lengths_B[:, None] + jnp.arange(functions.block, dtype=jnp.int32)[None]
    inside_BW = position_BW < length
    tokens_BW = jnp.where(inside_BW, pick(state.tokens, position_BW), functions.mask_id)
    open_BW = (tokens_BW == functions.mask_id) & inside_BW & (position_BW >= state.given[:, None])
    return _Block(position_BW, tokens_BW, open_BW)


def _unfinished(state: State, now: _Block) -> Bool[Array, "B"]:
    """Returns whether the present block lacks a token of the text."""
    return (now.open & (now.position < state.end[:, None])).any(1)


def _continues(functions: Any, state: State) -> Bool[Array, "B"]:
    """Returns whether the text goes on behind the present block."""
    return state.end > state.cache.lengths_B + functions.block


def _live(functions: Any, state: State) -> Bool[Array, "B"]:
    return _unfinished(state, _block(functions, state)) | _continues(functions, state)


def _final(functions: Any, state: State) -> Int[Array, "B"]:
    """Returns the length of each row's settled prefix, cut at its end."""
    settled_B = (jnp.cumsum(_block(functions, state).open, 1) == 0).sum(1, dtype=jnp.int32)
    return jnp.minimum(state.end, state.cache.lengths_B + settled_B)


def _unfiltered(options: Options, settings: Settings) -> Settings:
    """Returns the settings of the law that confidences are read from."""
    raw = (settings.temperature == 0) | (options.confidence_law == "raw")
    return settings.replace(temperature=jnp.where(raw, 1, settings.temperature), filtered=False)


def _reads_draws(options: Options) -> bool:
    return options.confidence == "sampled" and options.select in ("static", "dynamic", "factor")


def _score(options: Options, law_BWV: Float[Array, "B W V"], rank_BW: Int[Array, "B W"] | None) -> Float[Array, "B W"]:
    """Returns what positions are ranked by, the highest first, where that doesn't hang on a draw. No sort over the vocabulary."""
    if options.select == "random":
        return -rank_BW.astype(law_BWV.dtype)
    if options.select == "sequential":
        return -jnp.broadcast_to(jnp.arange(law_BWV.shape[1], dtype=law_BWV.dtype)[None], law_BWV.shape[:2])
    if options.select == "entropy_bounded" or options.confidence == "neg_entropy":
        return jnp.where(law_BWV > -jnp.inf, jnp.exp(law_BWV) * law_BWV, 0).sum(-1)
    best_BW = law_BWV.max(-1)
    if options.confidence == "max":
        return jnp.exp(best_BW)
    others_BWV = jnp.arange(law_BWV.shape[-1])[None, None] != law_BWV.argmax(-1, keepdims=True)
    return jnp.exp(best_BW) - jnp.exp(jnp.where(others_BWV, law_BWV, -jnp.inf).max(-1))


def _select(options: Options, score_BW: Float[Array, "B W"], open_BW: Bool[Array, "B W"]) -> Bool[Array, "B W"]:
    """Returns the positions to settle: a subset of the open ones, at least one where there are any; ties go to the left."""
    score_BW = jnp.where(open_BW, score_BW, -jnp.inf)
    order_BW = jnp.argsort(-score_BW, 1, stable=True)
    rank_BW = jnp.argsort(order_BW, 1)
    sorted_BW = jnp.take_along_axis(score_BW, order_BW, 1)
    best_BW = open_BW & (rank_BW < options.n)
    if options.select == "dynamic":
        sure_BW = open_BW & (score_BW >= options.tau if options.inclusive else score_BW > options.tau)
        enough_B1 = sure_BW.sum(1, keepdims=True) >= jnp.minimum(options.n, open_BW.sum(1, keepdims=True))
        left_BW = open_BW & (jnp.cumsum(open_BW, 1) <= options.n)
        return jnp.where(enough_B1, sure_BW, left_BW if options.fallback == "leftmost" else best_BW)
    if options.select == "entropy_bounded":
        fits_BW = jnp.cumsum(-sorted_BW, 1) < options.gamma
    elif options.select == "factor":
        count_W = jnp.arange(1, score_BW.shape[1] + 1, dtype=score_BW.dtype)
        fits_BW = (count_W[None] + 1) * (1 - sorted_BW) < options.factor
    else:
        return best_BW
    prefix_BW = jnp.cumsum(~fits_BW.at[:, 0].set(True), 1) == 0
    return open_BW & jnp.take_along_axis(prefix_BW, rank_BW, 1)
