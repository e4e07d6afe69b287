"""The masked-diffusion baseline: in a uniform random order, reveal W(i) independent draws from the draft law a pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from dllm.ops.draws import Draws, Purpose, Slot, categorical
from dllm.ops.passes import count, no_passes
from dllm.ops.settings import Settings, shape_logits
from dllm.samplers.loop import Prompt, Samples, chosen, make_windows, put, to_ranks, to_sequence


@dataclasses.dataclass(frozen=True)
class Options:
    window: str = "cosine"  # shape of W(i): cosine, linear, constant
    rate: float = 0.05  # see dllm.ops.windows


def sample(
    functions: Any, options: Options, settings: Settings, draws: Draws, prompt: Prompt, order_BL: Int[Array, "B L"] | None = None
) -> Samples:
    """Returns one sequence a row, exactly W(i) tokens a pass.

    `functions` has draft(tokens_BL, order_BL, revealed_B, window) -> (logits_BWV, hidden). Tokens are drawn from the softmax and
    positions are chosen apart from them: a joint draw of token-or-mask in float32 loses rare tokens and looks better than it is.
    """
    batch, length = prompt.tokens.shape
    width, window = make_windows(options.window, options.rate, prompt)
    order_BL, tokens_BL, revealed_B = to_ranks(prompt, draws, order_BL)

    def step(state):
        tokens_BL, logprobs_BL, revealed_B, cycle, passes, draws = state
        live_B = revealed_B < length
        logits_BWV, _ = functions.draft(tokens_BL, order_BL, revealed_B, window)
        law_BWV = shape_logits(logits_BWV, settings)
        rank_BW = revealed_B[:, None] + jnp.arange(window, dtype=jnp.int32)[None]
        end_B = revealed_B + jnp.where(live_B, width(revealed_B), 0)
        where_BW = rank_BW < end_B[:, None]
        drawn_BW, draws = categorical(draws, Slot(Purpose.DRAFT, rank_BW, jnp.full((batch,), cycle), where_BW), law_BWV)
        tokens_BL = put(tokens_BL, rank_BW, drawn_BW, where_BW)
        logprobs_BL = put(logprobs_BL, rank_BW, chosen(law_BWV, drawn_BW).astype(jnp.float32), where_BW)
        return tokens_BL, logprobs_BL, end_B, cycle + 1, count(passes, "noncausal", live_B, length), draws

    state = (tokens_BL, jnp.zeros((batch, length), jnp.float32), revealed_B, jnp.int32(0), no_passes(batch), draws)
    tokens_BL, logprobs_BL, revealed_B, _, passes, draws = lax.while_loop(lambda s: (s[2] < length).any(), step, state)
    none = jnp.zeros((batch,), jnp.int32)
    return Samples(to_sequence(tokens_BL, order_BL), none + length, to_sequence(logprobs_BL, order_BL), passes, none, none, draws)
