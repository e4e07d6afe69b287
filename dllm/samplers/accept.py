"""The accept/resample routine of all speculative samplers, in log space.

A draft of W columns is judged against a target. Either way of judging leaves the tokens up to and including the resampled one
distributed exactly as under the target:

- chain: columns are accepted one after the other with probability min(1, target/draft), up to the first rejection
  (Leviathan et al., arXiv 2211.17192).
- block: the longest prefix of the draft that passes its test is accepted, and the test of a prefix weighs all of its columns together;
  never fewer tokens in expectation (Sun et al., arXiv 2403.10444, Algorithm 2).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from dllm.ops.draws import Draws, Purpose, Slot, categorical, first

Verification = Literal["chain", "block"]


class Verdict(NamedTuple):
    column: Int[Array, "B"]  # the first column that is not accepted; W if all that count are
    token: Int[Array, "B"]  # the token to put there; without a bonus meaningless if column is W
    draws: Draws


def judge(
    draws: Draws,
    slot: Slot,
    tokens_BW: Int[Array, "B W"],
    draft_BWV: Float[Array, "B W V"],
    target_BWV: Float[Array, "B W V"],
    verification: Verification,
    bonus: tuple[Float[Array, "B V"], Slot] | None = None,
) -> Verdict:
    """Returns how far a draft is accepted, and the token behind it.

    `draft` and `target` are log-probabilities; tokens were drawn from softmax(draft), and target's column w holds the law given the
    tokens before w. slot.where marks the columns that count, a contiguous stretch of each row; slot.position names their draws.
    `bonus` is the target's law behind the last column that counts, and the one slot a row of the token that is drawn from it where all are
    accepted.
    The residual is the law proportional to max(0, scale x target - draft), with scale 1 in a chain and the weight of the accepted
    prefix in a block; where rounding leaves it empty, the target takes its place.
    """
    columns = tokens_BW.shape[1]
    ratio_BW = jnp.where(slot.where, log_ratio(tokens_BW, draft_BWV, target_BWV), 0)
    accept = slot._replace(purpose=Purpose.ACCEPT)
    if verification == "chain":
        scale_BW = jnp.zeros_like(ratio_BW)
        column_B, draws = first(draws, accept, jnp.minimum(ratio_BW, 0), outcome=False)
    else:
        scale_BW, log_h_BW = _block_tests(ratio_BW, draft_BWV, target_BWV, slot.where)
        flipped = accept._replace(position=accept.position[:, ::-1], where=accept.where[:, ::-1])
        from_right_B, draws = first(draws, flipped, log_h_BW[:, ::-1], outcome=True)  # the longest prefix is tried first
        start_B = jnp.argmax(slot.where, 1)
        column_B = jnp.where(from_right_B < columns, columns - from_right_B, start_B)
        stretch_end_B = columns - jnp.argmax(slot.where[:, ::-1], 1)
        column_B = jnp.where((column_B == stretch_end_B) | ~slot.where.any(1), columns, column_B)
    at_B1 = jnp.minimum(column_B, columns - 1)[:, None]
    law_BV = residual(
        *(jnp.take_along_axis(x, at_B1[:, :, None], 1)[:, 0] for x in (draft_BWV, target_BWV)), jnp.take_along_axis(scale_BW, at_B1, 1)
    )
    position_B1, where_B1 = jnp.take_along_axis(slot.position, at_B1, 1), (column_B < columns)[:, None]
    if bonus is not None:
        all_B, (bonus_BV, slot_B1) = column_B == columns, bonus
        law_BV = jnp.where(all_B[:, None], bonus_BV, law_BV)
        position_B1 = jnp.where(all_B[:, None], slot_B1.position, position_B1)
        where_B1 = jnp.where(all_B[:, None], slot_B1.where, where_B1)
    token_B1, draws = categorical(draws, Slot(Purpose.RESIDUAL, position_B1, slot.cycle, where_B1), law_BV[:, None])
    return Verdict(column_B.astype(jnp.int32), token_B1[:, 0], draws)


def log_ratio(tokens_BW: Int[Array, "B W"], draft_BWV: Float[Array, "B W V"], target_BWV: Float[Array, "B W V"]) -> Float[Array, "B W"]:
    """Returns log target - log draft of the drafted tokens. (A drafted token has positive draft probability.)"""
    take = lambda x: jnp.take_along_axis(x, tokens_BW[:, :, None], 2)[:, :, 0]
    return take(target_BWV) - take(draft_BWV)


def residual(draft_BV: Float[Array, "B V"], target_BV: Float[Array, "B V"], scale_B1: Float[Array, "B 1"]) -> Float[Array, "B V"]:
    """Returns the logits of max(0, exp(scale) target - draft), or the target where that is empty."""
    log_BV = _log_excess(target_BV + scale_B1, draft_BV)
    return jnp.where((log_BV > -jnp.inf).any(-1, keepdims=True), log_BV, target_BV)


def _log_excess(a: Array, b: Array) -> Array:
    """Returns log max(0, e^a - e^b)."""
    more = a > b
    return jnp.where(more, a + jnp.log(-jnp.expm1(jnp.where(more, b - a, -1))), -jnp.inf)


def _block_tests(ratio_BW: Array, draft_BWV: Array, target_BWV: Array, where_BW: Array) -> tuple[Array, Array]:
    """Returns ([B W] log weight of the prefix before each column, [B W] log-probability that the prefix up to a column passes).

    Weights: p_0 = 1, p_w = min(1, p_{w-1} ratio_w). With s_w the mass of max(0, p_w target_{w+1} - draft_{w+1}), the prefix up to w
    passes with s_w / (s_w + 1 - p_w), the whole stretch with its p_w (arXiv 2403.10444, equation 4).
    """
    # w -> min(c_w, . + r_w) is closed under composition; that avoids the inf - inf of a difference of sums.
    join = lambda x, y: (jnp.minimum(y[0], x[0] + y[1]), x[1] + y[1])
    cap, total = lax.associative_scan(join, (jnp.minimum(ratio_BW, 0), ratio_BW), axis=1)
    weight_BW = jnp.minimum(cap, total)
    before_BW = jnp.pad(weight_BW[:, :-1], ((0, 0), (1, 0)))
    last_BW = where_BW & ~jnp.pad(where_BW[:, 1:], ((0, 0), (0, 1)))
    excess_BW = jax.nn.logsumexp(_log_excess(target_BWV + before_BW[:, :, None], draft_BWV), -1)  # of column w, for the prefix before it
    excess_BW = jnp.pad(excess_BW[:, 1:], ((0, 0), (0, 1)), constant_values=-jnp.inf)
    missing_BW = jnp.log(-jnp.expm1(weight_BW))
    log_h_BW = jnp.where(weight_BW >= 0, 0, excess_BW - jnp.logaddexp(excess_BW, missing_BW))
    return before_BW, jnp.where(last_BW, weight_BW, log_h_BW)
