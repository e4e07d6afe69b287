"""Speculation without a drafter: the draft is what followed the last few tokens where they stood before in the text (prompt lookup; an
n-gram draft, https://github.com/apoorvumang/prompt-lookup-decoding). The training-free baseline of speculative samplers.

One forward a cycle, over [seed, draft, ...]: the seed is the last settled token, whose keys and values aren't cached yet. Row by row a
token is drawn from the target's own law, and the text goes on along the draft while that is what is drawn; the first token that differs, or
the one behind the whole draft, ends the cycle. What is emitted are draws from the target given the text before: exact for any draft, and no
law of the draft is needed. The draw for a position has the slot that `autoregressive` gives it, so that, numerics aside, each request's
tokens are the very ones that it would get there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dllm.core.types import UserError
from dllm.ops import masks
from dllm.ops.draws import Draws, Purpose, Slot, categorical
from dllm.ops.passes import count
from dllm.ops.settings import Settings, shape_logits
from dllm.samplers.loop import Prompt, Samples, chosen, pick, put, read_prompt, seed

LEFT_TO_RIGHT = True  # prompts are prefixes; max_new and stop are obeyed
MODEL = ("autoregressive", "uno")  # what it goes with, as samplers.loop.kind says it


@dataclasses.dataclass(frozen=True)
class Options:
    length: int = 8  # rows of a forward: the seed, and length - 1 drafted tokens
    ngram: int = 3  # the last tokens that are looked up; where they never stood before, fewer, down to one


def sample(
    functions: Any, options: Options, settings: Settings, draws: Draws, prompt: Prompt, order_BL: Int[Array, "B L"] | None = None
) -> Samples:
    """Returns one sequence a row, with the model's own law under the settings. Given tokens are a prefix of each row.

    `functions` has forward(cache, tokens_BQ, positions_BQ, mask) -> (logits_BQV, cache), empty_cache(batch, slots), vocab and lead, as for
    `autoregressive`. Each cycle is counted as one `verify`, also where nothing was found: then it emits one token. `proposed` counts
    drafted tokens that a draw was compared with, `accepted` those that it equalled. There is no order to hand in. Raises UserError for
    options out of range.
    """
    for key, least in (("length", 2), ("ngram", 1)):
        if getattr(options, key) < least:
            raise UserError(f"{key} is {getattr(options, key)}; make it {least} or more{', or use autoregressive' * (key == 'length')}")
    (batch, length), lead, rows = prompt.tokens.shape, functions.lead, options.length
    column_BQ = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32)[None], (batch, rows))

    def step(state):
        tokens_BL, logprobs_BL, settled_B, end_B, passes, proposed_B, accepted_B, cache, draws = state
        live_B, at_BQ = settled_B < end_B, settled_B[:, None] + column_BQ
        seed_B1 = seed(functions, tokens_BL, settled_B)
        drafted_BW, found_B = look_up(tokens_BL, settled_B, options.ngram, rows - 1)
        row_B = jnp.maximum(settled_B - 1 + lead, 0)
        inputs_BQ = jnp.concatenate([seed_B1, drafted_BW], 1)
        logits_BQV, cache = functions.forward(cache.replace(lengths_B=row_B), inputs_BQ, row_B[:, None] + column_BQ, masks.causal)
        law_BQV = shape_logits(logits_BQV, settings)

        # A row of the forward is drawn from if all draws before it were the drafted tokens. The last has no draft to compare with.
        drafts_BQ = jnp.concatenate([drafted_BW, jnp.full_like(seed_B1, -1)], 1)
        drafts_BQ = jnp.where(found_B[:, None], drafts_BQ, -1)
        drawn_BQ, draws = _walk(draws, at_BQ, law_BQV, drafts_BQ, live_B, end_B)
        same_BQ = drawn_BQ == drafts_BQ
        new_BQ = (jnp.cumsum(~same_BQ, 1) - ~same_BQ == 0) & (at_BQ < end_B[:, None])
        stop_BQ = new_BQ & (drawn_BQ[:, :, None] == settings.stop[:, None, :]).any(2)
        new_BQ &= jnp.cumsum(stop_BQ, 1) - stop_BQ == 0  # up to the first stop
        tokens_BL = put(tokens_BL, at_BQ, drawn_BQ, new_BQ)
        logprobs_BL = put(logprobs_BL, at_BQ, chosen(law_BQV, drawn_BQ).astype(jnp.float32), new_BQ)

        settled_B = settled_B + new_BQ.sum(1, dtype=jnp.int32)
        end_B = jnp.where(stop_BQ.any(1), settled_B, end_B)
        proposed_B = proposed_B + (new_BQ & (drafts_BQ >= 0)).sum(1, dtype=jnp.int32)
        accepted_B = accepted_B + (new_BQ & same_BQ).sum(1, dtype=jnp.int32)
        passes = count(passes, "verify", live_B, rows)
        return tokens_BL, logprobs_BL, settled_B, end_B, passes, proposed_B, accepted_B, cache, draws

    # Behind the last token there is room for a forward, so that none of its rows is dropped.
    given_B, end_B, cache, passes = read_prompt(functions, settings, prompt, lead + rows - 1)
    none = jnp.zeros((batch,), jnp.int32)
    logprobs_BL = jnp.zeros((batch, length), jnp.float32)
    state = (prompt.tokens * prompt.given, logprobs_BL, given_B, end_B, passes, none, none, cache, draws)
    state = lax.while_loop(lambda s: (s[2] < s[3]).any(), step, state)
    tokens_BL, logprobs_BL, settled_B, _, passes, proposed_B, accepted_B, _, draws = state
    return Samples(tokens_BL, settled_B, logprobs_BL, passes, proposed_B, accepted_B, draws)


def look_up(tokens_BL: Int[Array, "B L"], settled_B: Int[Array, "B"], ngram: int, width: int) -> tuple[Int[Array, "B W"], Bool[Array, "B"]]:
    """Returns (a draft, whether there is one) for the text of the first `settled` tokens of each row.

    Of the earlier places whose last tokens are the text's last ones, the longest match wins, of `ngram` tokens at most, and of equals the
    latest. The draft is what followed it; where that runs into the text's end, it goes on with the draft itself, so that a text with a
    period goes on with it:

        text  a b c x a b c        draft  x a b c x a ...
    """
    _, length = tokens_BL.shape
    end_BL, last_B1 = jnp.arange(length, dtype=jnp.int32)[None], settled_B[:, None] - 1  # a place is named by its last token
    match_BL, matched_BL = (end_BL < last_B1), jnp.zeros_like(tokens_BL)
    for k in range(min(ngram, length)):
        before_BL = jnp.pad(tokens_BL[:, : length - k], ((0, 0), (k, 0)))
        match_BL &= (end_BL >= k) & (before_BL == pick(tokens_BL, jnp.maximum(last_B1 - k, 0)))
        matched_BL += match_BL
    best_B1 = jnp.argmax(matched_BL * length + end_BL * (matched_BL > 0), 1).astype(jnp.int32)[:, None]
    found_B = (matched_BL > 0).any(1)
    period_B1 = jnp.maximum(last_B1 - best_B1, 1)
    draft_BW = pick(tokens_BL, jnp.maximum(best_B1 + 1 + jnp.arange(width, dtype=jnp.int32)[None] % period_B1, 0))
    return draft_BW, found_B


def _walk(
    draws: Draws,
    at_BQ: Int[Array, "B Q"],
    law_BQV: Float[Array, "B Q V"],
    drafts_BQ: Int[Array, "B Q"],
    live_B: Bool[Array, "B"],
    end_B: Int[Array, "B"],
) -> tuple[Int[Array, "B Q"], Draws]:
    """Returns (a token drawn from each row's law, draws). Behind the first that isn't the drafted one, and from `end` on, it is no draw:
    the slot is then free for a later cycle, whose law has read another text."""

    def draw(carry, row):
        on_B, draws = carry
        at_B, law_BV, drafted_B = row
        on_B &= at_B < end_B
        token_B1, draws = categorical(draws, Slot(Purpose.TOKEN, at_B[:, None], jnp.zeros_like(end_B), on_B[:, None]), law_BV[:, None])
        return (on_B & (token_B1[:, 0] == drafted_B), draws), token_B1[:, 0]

    (_, draws), drawn_QB = lax.scan(draw, (live_B, draws), (at_BQ.T, jnp.swapaxes(law_BQV, 0, 1), drafts_BQ.T))
    return drawn_QB.T, draws
