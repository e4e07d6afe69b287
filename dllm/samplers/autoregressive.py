"""Plain left-to-right sampling with a KV cache, one token a pass."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from dllm.core.types import UserError
from dllm.ops import masks
from dllm.ops.draws import Draws, Purpose, Slot, categorical
from dllm.ops.passes import count
from dllm.ops.settings import Settings, shape_logits
from dllm.samplers.loop import Prompt, Samples, chosen, put, read_prompt, seed

LEFT_TO_RIGHT = True  # prompts are prefixes; max_new and stop are obeyed
MODEL = ("autoregressive", "uno")  # what it goes with, as samplers.loop.kind says it


@dataclasses.dataclass(frozen=True)
class Options:
    """grow  slots of the cache that a pass reads at first, and how many more when the text has filled these: a loop of its own each time,
    to be compiled. 0: all slots from the start. The text is the same; of a small model on CPU the slots are most of a pass
    """

    grow: int = 0


def sample(
    functions: Any, options: Options, settings: Settings, draws: Draws, prompt: Prompt, order_BL: Int[Array, "B L"] | None = None
) -> Samples:
    """Returns one sequence a row, with the model's own law under the settings. Given tokens are a prefix of each row.

    `functions` has forward(cache, tokens_BQ, positions_BQ, mask) -> (logits_BQV, cache), empty_cache(batch, slots) and vocab. Of a gpt
    that is the id that begins a sequence: row t reads the token before position t. A qwen3 has no such id: its row t reads token t, and
    every prompt has a token at least. There is no order to hand in.
    """
    if options.grow < 0:
        raise UserError(f"grow must be 1 or more, or 0 for all slots, got {options.grow}")
    batch, length = prompt.tokens.shape
    filled_B, end_B, cache, passes = read_prompt(functions, settings, prompt, 0)

    def live(state, stop):
        return state[2] < jnp.minimum(state[3], stop)

    def step(state, stop):
        tokens_BL, logprobs_BL, filled_B, end_B, passes, cache, draws = state
        live_B1 = live(state, stop)[:, None]
        at_B1 = filled_B[:, None]
        row_B1 = jnp.maximum(at_B1 - 1 + functions.lead, 0)
        inputs_B1 = seed(functions, tokens_BL, filled_B)
        logits_B1V, cache = functions.forward(cache.replace(lengths_B=row_B1[:, 0]), inputs_B1, row_B1, masks.causal)
        law_B1V = shape_logits(logits_B1V, settings)
        drawn_B1, draws = categorical(draws, Slot(Purpose.TOKEN, at_B1, jnp.full((batch,), 0), live_B1), law_B1V)
        tokens_BL = put(tokens_BL, at_B1, drawn_B1, live_B1)
        logprobs_BL = put(logprobs_BL, at_B1, chosen(law_B1V, drawn_B1).astype(jnp.float32), live_B1)
        stopped_B1 = (drawn_B1 == settings.stop).any(1, keepdims=True)
        filled_B = filled_B + live_B1[:, 0]
        end_B = jnp.where((live_B1 & stopped_B1)[:, 0], filled_B, end_B)
        return tokens_BL, logprobs_BL, filled_B, end_B, count(passes, "ar", live_B1[:, 0], 1), cache, draws

    state = (prompt.tokens * prompt.given, jnp.zeros((batch, length), jnp.float32), filled_B, end_B, passes, cache, draws)
    stops = [*range(options.grow, length, options.grow)] if options.grow else []
    for stop in [*stops, length]:  # a row that is longer already waits: what it would write falls behind the slots
        *rest, whole, draws = state
        near = whole.replace(k=whole.k[:, :, :stop], v=whole.v[:, :, :stop])
        run = functools.partial(lax.while_loop, lambda s, stop=stop: live(s, stop).any(), lambda s, stop=stop: step(s, stop))
        *rest, near, draws = run((*rest, near, draws))
        if stop < length:
            whole = whole.replace(k=whole.k.at[:, :, :stop].set(near.k), v=whole.v.at[:, :, :stop].set(near.v))
        state = (*rest, whole, draws)
    tokens_BL, logprobs_BL, filled_B, _, passes, _, draws = state
    none = jnp.zeros((batch,), jnp.int32)
    return Samples(tokens_BL, filled_B, logprobs_BL, passes, none, none, draws)
