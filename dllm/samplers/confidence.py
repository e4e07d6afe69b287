"""The second baseline: draw a token for every masked position, reveal the W(i) that the model is surest of (MaskGIT, arXiv 2202.04200).

It samples no law that has a name: positions and tokens depend on each other. Its samples look better and vary less.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from dllm.ops.draws import Draws, Purpose, Slot, categorical
from dllm.ops.passes import count, no_passes
from dllm.ops.settings import Settings, shape_logits
from dllm.samplers.loop import Prompt, Samples, chosen, make_windows, pick, put, to_ranks, to_sequence


@dataclasses.dataclass(frozen=True)
class Options:
    window: str = "cosine"  # shape of W(i): cosine, linear, constant
    rate: float = 0.05  # see dllm.ops.windows


def sample(
    functions: Any, options: Options, settings: Settings, draws: Draws, prompt: Prompt, order_BL: Int[Array, "B L"] | None = None
) -> Samples:
    """Returns one sequence a row, W(i) tokens a pass, by descending probability of the drawn token; ties to the earlier rank.

    `functions` has draft(tokens_BL, order_BL, revealed_B, window) -> (logits_BWV, hidden). The ranks are re-sorted in every pass.
    """
    batch, length = prompt.tokens.shape
    width, _ = make_windows(options.window, options.rate, prompt)
    order_BL, tokens_BL, revealed_B = to_ranks(prompt, draws, order_BL)

    def step(state):
        tokens_BL, order_BL, logprobs_BL, revealed_B, cycle, passes, draws = state
        live_B = revealed_B < length
        logits_BLV, _ = functions.draft(tokens_BL, order_BL, revealed_B, length)  # column c is rank revealed + c
        law_BLV = shape_logits(logits_BLV, settings)
        column = jnp.arange(length, dtype=jnp.int32)[None]
        rank_BL = revealed_B[:, None] + column
        open_BL = rank_BL < length
        slot = Slot(Purpose.DRAFT, pick(order_BL, rank_BL), jnp.full((batch,), cycle), open_BL)
        drawn_BL, draws = categorical(draws, slot, law_BLV)
        score_BL = chosen(law_BLV, drawn_BL)
        tokens_BL = put(tokens_BL, rank_BL, drawn_BL, open_BL)
        logprobs_BL = put(logprobs_BL, rank_BL, score_BL.astype(jnp.float32), open_BL)
        # Sort the open ranks by score, behind the revealed ones, which stay as they are.
        key_BL = put(jnp.full_like(score_BL, -jnp.inf), rank_BL, -score_BL, open_BL)
        first_BL = jnp.argsort(key_BL, 1, stable=True)
        tokens_BL, order_BL, logprobs_BL = (jnp.take_along_axis(x, first_BL, 1) for x in (tokens_BL, order_BL, logprobs_BL))
        revealed_B = revealed_B + jnp.where(live_B, width(revealed_B), 0)
        return tokens_BL, order_BL, logprobs_BL, revealed_B, cycle + 1, count(passes, "noncausal", live_B, length), draws

    state = (tokens_BL, order_BL, jnp.zeros((batch, length), jnp.float32), revealed_B, jnp.int32(0), no_passes(batch), draws)
    tokens_BL, order_BL, logprobs_BL, _, _, passes, draws = lax.while_loop(lambda s: (s[3] < length).any(), step, state)
    none = jnp.zeros((batch,), jnp.int32)
    return Samples(to_sequence(tokens_BL, order_BL), none + length, to_sequence(logprobs_BL, order_BL), passes, none, none, draws)
