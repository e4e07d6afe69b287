"""Windowed self-speculative sampling of a hybrid model ("Self-Speculative Masked Diffusions", arXiv 2510.03929, section 3 and appendix D).

In a uniform random order, one non-causal pass drafts the next W(i) ranks; up to `n_verify` passes of the causal tail judge them on the
same hidden states, each from where the last one stopped. Then the next non-causal pass reads what is settled.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from dllm.core.types import UserError
from dllm.ops.draws import Draws, Purpose, Slot, categorical
from dllm.ops.passes import count, no_passes
from dllm.ops.settings import Settings, shape_logits
from dllm.samplers.accept import Verification, judge
from dllm.samplers.loop import Prompt, Samples, chosen, make_windows, pick, put, to_ranks, to_sequence


@dataclasses.dataclass(frozen=True)
class Options:
    window: str = "cosine"  # shape of W(i): cosine, linear, constant
    rate: float = 0.05  # see dllm.ops.windows
    n_verify: int = 2  # N, causal passes a draft at most
    verification: Verification = "chain"  # chain or block


def sample(
    functions: Any, options: Options, settings: Settings, draws: Draws, prompt: Prompt, order_BL: Int[Array, "B L"] | None = None
) -> Samples:
    """Returns one sequence a row.

    `functions` has draft(tokens_BL, order_BL, revealed_B, window) -> (logits_BWV, hidden) and
    verify(hidden, tokens_BL, order_BL, start_B, window) -> logits_BWV; both in rank order, columns are ranks revealed.. and start.. .

    The law, given the order: with N >= W, windows drawn from the target, autoregressively within a window. With a smaller N a window
    may end early, at the N-th rejection. The first rank of all has no target (no token was read): its draft is its target.

    Drafts behind a rejection are kept in a chain: no test has looked at them. Block verification has looked at all of them, so they
    are drawn anew.
    """
    if options.n_verify < 1:
        raise UserError(f"n_verify must be 1 or more, got {options.n_verify}")
    if options.verification not in ("chain", "block"):
        raise UserError(f"no verification {options.verification!r}; there are: chain, block")
    batch, length = prompt.tokens.shape
    width, window = make_windows(options.window, options.rate, prompt)
    order_BL, tokens_BL, revealed_B = to_ranks(prompt, draws, order_BL)
    cycles = options.n_verify + 1  # draws of one outer step: the draft, and N judgements

    def outer(state):
        tokens_BL, logprobs_BL, start_B, step, passes, proposed_B, accepted_B, draws = state
        live_B = start_B < length
        rank_BW = start_B[:, None] + jnp.arange(window, dtype=jnp.int32)[None]
        end_B = start_B + jnp.where(live_B, width(start_B), 0)
        logits_BWV, hidden = functions.draft(tokens_BL, order_BL, start_B, window)
        draft_BWV = shape_logits(logits_BWV, settings)
        passes = count(passes, "noncausal", live_B, length)
        cycle = lambda n: jnp.full((batch,), step * cycles + n)
        slot = Slot(Purpose.DRAFT, rank_BW, cycle(0), rank_BW < end_B[:, None])
        drafted_BW, draws = categorical(draws, slot, draft_BWV)
        tokens_BL = put(tokens_BL, rank_BW, drafted_BW, slot.where)

        def inner(state):
            tokens_BL, logprobs_BL, settled_B, n, passes, proposed_B, accepted_B, draws = state
            live_B = settled_B < end_B
            target_BWV = shape_logits(functions.verify(hidden, tokens_BL, order_BL, start_B, window), settings)
            target_BWV = jnp.where((rank_BW == 0)[:, :, None], draft_BWV, target_BWV)
            passes = count(passes, "causal", live_B, window)
            where_BW = (rank_BW >= settled_B[:, None]) & (rank_BW < end_B[:, None])
            verdict = judge(
                draws,
                Slot(Purpose.ACCEPT, rank_BW, cycle(n + 1), where_BW),
                pick(tokens_BL, rank_BW),
                draft_BWV,
                target_BWV,
                options.verification,
            )
            draws, rejected_B = verdict.draws, verdict.column < window
            stop_B = jnp.where(rejected_B, start_B + verdict.column, end_B)
            tokens_BL = put(tokens_BL, stop_B[:, None], verdict.token[:, None], rejected_B[:, None])
            now_B = stop_B + rejected_B
            new_BW = where_BW & (rank_BW < now_B[:, None])
            logprobs_BL = put(logprobs_BL, rank_BW, chosen(target_BWV, pick(tokens_BL, rank_BW)).astype(jnp.float32), new_BW)
            if options.verification == "block":
                behind_BW = where_BW & (rank_BW >= now_B[:, None]) & (n + 1 < options.n_verify)
                again_BW, draws = categorical(draws, Slot(Purpose.DRAFT, rank_BW, cycle(n + 1), behind_BW), draft_BWV)
                tokens_BL = put(tokens_BL, rank_BW, again_BW, behind_BW)
            proposed_B = proposed_B + new_BW.sum(1, dtype=jnp.int32)
            accepted_B = accepted_B + new_BW.sum(1, dtype=jnp.int32) - rejected_B
            return tokens_BL, logprobs_BL, jnp.where(live_B, now_B, settled_B), n + 1, passes, proposed_B, accepted_B, draws

        more = lambda s: (s[3] < options.n_verify) & (s[2] < end_B).any()
        state = (tokens_BL, logprobs_BL, start_B, jnp.int32(0), passes, proposed_B, accepted_B, draws)
        tokens_BL, logprobs_BL, settled_B, _, passes, proposed_B, accepted_B, draws = lax.while_loop(more, inner, state)
        return tokens_BL, logprobs_BL, settled_B, step + 1, passes, proposed_B, accepted_B, draws

    none = jnp.zeros((batch,), jnp.int32)
    state = (tokens_BL, jnp.zeros((batch, length), jnp.float32), revealed_B, jnp.int32(0), no_passes(batch), none, none, draws)
    tokens_BL, logprobs_BL, _, _, passes, proposed_B, accepted_B, draws = lax.while_loop(lambda s: (s[2] < length).any(), outer, state)
    return Samples(
        to_sequence(tokens_BL, order_BL), none + length, to_sequence(logprobs_BL, order_BL), passes, proposed_B, accepted_B, draws
    )
