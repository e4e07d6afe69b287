"""Self-verified block diffusion: a block is drafted in parallel and judged by the same weights at block length 1.

At block length 1 a block-diffusion model is autoregressive: the law of token i is that of a MASK row at position i which reads the clean
rows before it, and itself. One forward over [drafts ; MASK rows] gives it for a whole window. The judge of a draft is the MASK row at its
position: the row that holds it has read it, and would tell what is there, not what is likely there.

One cache, filled under the causal mask, serves both passes. Verifying writes the drafts' clean rows where the cache wants them, so accepted
drafts are kept by moving the frontier. A token drawn after a rejection has none yet: every draft begins with the last settled token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from dllm.core.types import UserError
from dllm.models.cache import Cache
from dllm.ops import masks
from dllm.ops.draws import Draws, Purpose, Slot, categorical
from dllm.ops.passes import count
from dllm.ops.settings import Settings, shape_logits
from dllm.samplers.accept import Verification, judge
from dllm.samplers.loop import Prompt, Samples, chosen, pick, prefill, put

LEFT_TO_RIGHT = True  # prompts are prefixes; max_new and stop are obeyed


@dataclasses.dataclass(frozen=True)
class Options:
    window: int = 0  # tokens drafted and judged together; 0: the model's block
    draft_passes: int = 1  # each draws its share of the window, leftmost first, having read the shares before
    verification: Verification = "chain"  # chain or block


def sample(
    functions: Any, options: Options, settings: Settings, draws: Draws, prompt: Prompt, order_BL: Int[Array, "B L"] | None = None
) -> Samples:
    """Returns one sequence a row, with the law of the model at block length 1 under the settings. Given tokens are a prefix of each row.

    `functions` is a block-diffusion model's (dllm/models/qwen3.py). Any window, number of draft passes and verification give the same
    law; they differ in passes. There is no order to hand in. Drafts behind a rejection are dropped. Raises UserError for options out of
    range and for a model without a MASK token.
    """
    if getattr(functions, "mask_id", -1) < 0:
        raise UserError("self_verified drafts with MASK tokens, and this model has none; use the sampler autoregressive")
    if options.verification not in ("chain", "block"):
        raise UserError(f"no verification {options.verification!r}; there are: chain, block")
    if options.window < 0:
        raise UserError(f"window must be 1 or more, or 0 for the model's block, got {options.window}")
    batch, length = prompt.tokens.shape
    window = min(options.window or functions.block, length)
    if not 1 <= options.draft_passes <= window:
        raise UserError(f"draft_passes must be 1 to the window's {window}, got {options.draft_passes}")
    share = -(-window // options.draft_passes)
    column_BW = jnp.broadcast_to(jnp.arange(window, dtype=jnp.int32)[None], (batch, window))
    begin_B = prompt.given.sum(1, dtype=jnp.int32)
    end_B = jnp.minimum(length, jnp.where(settings.max_new < length, begin_B + settings.max_new, length))

    def law(logits_BWV):
        is_mask_V = jnp.arange(logits_BWV.shape[-1]) == functions.mask_id
        return shape_logits(jnp.where(is_mask_V[None, None], -jnp.inf, logits_BWV), settings)

    def step(state):
        tokens_BL, logprobs_BL, settled_B, end_B, cycle_B, passes, proposed_B, accepted_B, cache, draws = state
        live_B = settled_B < end_B
        at_BW = settled_B[:, None] + column_BW
        where_BW = at_BW < end_B[:, None]

        last_B1 = pick(tokens_BL, jnp.maximum(settled_B - 1, 0)[:, None])
        drafted_BW, shares = jnp.full((batch, window), functions.mask_id, jnp.int32), []
        for first in range(0, window, share):
            logits_BWV, cache = draft(functions, cache, last_B1, drafted_BW, settled_B)
            passes = count(passes, "draft", live_B, window + 1)
            shares.append(law(logits_BWV[:, first : first + share]))
            mine = slice(first, first + share)
            drawn, draws = categorical(draws, Slot(Purpose.DRAFT, at_BW[:, mine], cycle_B, where_BW[:, mine]), shares[-1])
            drafted_BW = drafted_BW.at[:, mine].set(drawn)
        draft_BWV = jnp.concatenate(shares, 1)

        logits_BWV, cache = verify(functions, cache, drafted_BW, settled_B)
        passes = count(passes, "verify", live_B, 2 * window)
        target_BWV = law(logits_BWV)
        accept = Slot(Purpose.ACCEPT, at_BW, cycle_B, where_BW)
        verdict = judge(draws, accept, drafted_BW, draft_BWV, target_BWV, options.verification)
        rejected_B = verdict.column < window
        settled_BW = jnp.where(column_BW == verdict.column[:, None], verdict.token[:, None], drafted_BW)
        new_BW = where_BW & (column_BW <= verdict.column[:, None])
        stop_BW = new_BW & (settled_BW[:, :, None] == settings.stop[:, None, :]).any(2)
        new_BW &= jnp.cumsum(stop_BW, 1) - stop_BW == 0  # up to the first stop
        tokens_BL = put(tokens_BL, at_BW, settled_BW, new_BW)
        logprobs_BL = put(logprobs_BL, at_BW, chosen(target_BWV, settled_BW).astype(jnp.float32), new_BW)

        new_B = new_BW.sum(1, dtype=jnp.int32)
        settled_B = settled_B + new_B
        end_B = jnp.where(stop_BW.any(1), settled_B, end_B)
        proposed_B, accepted_B = proposed_B + new_B, accepted_B + new_B - (rejected_B & (verdict.column < new_B))
        return tokens_BL, logprobs_BL, settled_B, end_B, cycle_B + 1, passes, proposed_B, accepted_B, cache, verdict.draws

    # Behind the last token there is room for a verifying pass, so that none of its rows is dropped. The last given token is read by the
    # first draft.
    cache = functions.empty_cache(batch, length + 2 * window)
    cache, passes = prefill(functions, cache, prompt.tokens, begin_B - 1, end_B > begin_B, masks.causal)
    none = jnp.zeros((batch,), jnp.int32)
    logprobs_BL = jnp.zeros((batch, length), jnp.float32)
    state = (prompt.tokens * prompt.given, logprobs_BL, begin_B, end_B, none, passes, none, none, cache, draws)
    state = lax.while_loop(lambda s: (s[2] < s[3]).any(), step, state)
    tokens_BL, logprobs_BL, settled_B, _, _, passes, proposed_B, accepted_B, _, draws = state
    return Samples(tokens_BL, settled_B, logprobs_BL, passes, proposed_B, accepted_B, draws)


def draft(
    functions: Any, cache: Cache, last_B1: Int[Array, "B 1"], window_BW: Int[Array, "B W"], settled_B: Int[Array, "B"]
) -> tuple[Float[Array, "B W V"], Cache]:
    """Returns (logits, cache) of a window of drafted tokens and MASKs at positions settled.. that read each other and all before them.

    The last settled token goes first, and its clean row into the cache. Where nothing is settled, the window begins in its place.
    """
    window = window_BW.shape[1]
    begun_B1 = (settled_B > 0).astype(jnp.int32)[:, None]
    beyond_B1 = jnp.full_like(last_B1, functions.mask_id)
    rows_BQ = jnp.where(begun_B1 == 1, jnp.concatenate([last_B1, window_BW], 1), jnp.concatenate([window_BW, beyond_B1], 1))
    start_B1 = settled_B[:, None] - begun_B1
    position_BQ = start_B1 + jnp.arange(window + 1, dtype=jnp.int32)[None]
    at_BW = begun_B1 + jnp.arange(window, dtype=jnp.int32)[None]
    return functions.forward(cache.replace(lengths_B=start_B1[:, 0]), rows_BQ, position_BQ, masks.tail, at_BW)


def verify(functions: Any, cache: Cache, drafted_BW: Int[Array, "B W"], settled_B: Int[Array, "B"]) -> tuple[Float[Array, "B W V"], Cache]:
    """Returns (logits, cache): the law at block length 1 of each position settled.. given the drafted tokens before it.

    The cache holds the clean rows of all that is settled; the drafts' are added behind them.
    """
    column_BW = jnp.broadcast_to(jnp.arange(drafted_BW.shape[1], dtype=jnp.int32)[None], drafted_BW.shape)
    rows_BQ = jnp.concatenate([drafted_BW, jnp.full_like(drafted_BW, functions.mask_id)], 1)
    position_BQ = jnp.tile(settled_B[:, None] + column_BW, (1, 2))
    window = drafted_BW.shape[1]
    mask = masks.CleanNoisy(1, window)
    return functions.forward(cache.replace(lengths_B=settled_B), rows_BQ, position_BQ, mask, window + column_BW)
