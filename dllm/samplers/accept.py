"""The accept/resample routine of all speculative samplers, in log space.

A draft of W columns is judged against a target. Either way of judging leaves the tokens up to and including the resampled one
distributed exactly as under the target:

- chain: columns are accepted one after the other with probability min(1, target/draft), up to the first rejection
  (Leviathan et al., arXiv 2211.17192).
- block: the longest prefix of the draft that passes its test is accepted, and the test of a prefix weighs all of its columns together;
  never fewer tokens in expectation (Sun et al., arXiv 2403.10444, Algorithm 2).

A tree (ops/trees.py) offers several tokens for a position. Two ways to judge it, which leave the same law:

- walk: from the root on, a token is drawn from the target at each node, and the child that holds it is next. The draft's law isn't asked
  for: whatever the tree, what comes out is drawn from the target. Of candidates that are no matter of chance no rule accepts more.
- walk_rejecting: children that were drawn from the draft without replacement are judged one after the other, each against what the target
  has left after the earlier ones' rejection (recursive rejection: SpecInfer, arXiv 2305.09781; without replacement: arXiv 2402.14160).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dllm.ops.draws import Draws, Purpose, Slot, categorical, first
from dllm.ops.trees import Tree, path_to

Verification = Literal["chain", "block"]


class Path(NamedTuple):
    """How far a tree of D depths is accepted. E = D + 1, the root among them."""

    nodes_BE: Int[Array, "B E"]  # the root and the accepted nodes; the root behind them. Their rows are the laws of the tokens behind them
    accepted_B: Int[Array, "B"]  # nodes behind the root
    judged_B: Int[Array, "B"]  # depths at which children were judged: all accepted ones, and one more if all children of a node weren't
    token_B: Int[Array, "B"]  # the token behind the last accepted node; meaningless where slot.where is False at its depth
    draws: Draws


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


def walk(draws: Draws, slot: Slot, tree: Tree, tokens_BN: Int[Array, "B N"], target_BNV: Float[Array, "B N V"]) -> Path:
    """Returns the path of tokens drawn from the target as far as the tree holds it, and the first that it doesn't hold.

    `tokens` and `target` are each node's token, and the law (log-probabilities) behind it. slot names the draw at each depth 0 ... D,
    for the token behind a node of that depth; only nodes on the path are drawn at. Where slot.where is False the path ends.
    """

    def visit(state):
        node_B1, live_B1, token_B1, draws = state
        asked_B1, at = _at(slot, tree, node_B1, live_B1)
        drawn_B1, draws = categorical(draws, at, _row(target_BNV, node_B1)[:, None])
        child_BN = tree.valid_BN & (tree.parent_BN == node_B1) & (tokens_BN == drawn_B1)
        on_B1 = asked_B1 & child_BN.any(1, keepdims=True)
        return jnp.where(on_B1, _index(child_BN), node_B1), on_B1, jnp.where(asked_B1, drawn_B1, token_B1), draws

    root_B1 = jnp.zeros((len(tokens_BN), 1), jnp.int32)
    state = lax.while_loop(lambda state: state[1].any(), visit, (root_B1, root_B1 == 0, root_B1, draws))
    return _path(slot, tree, state[0], state[2], state[3])


def walk_rejecting(
    draws: Draws,
    slot: Slot,
    tree: Tree,
    tokens_BN: Int[Array, "B N"],
    draft_BDV: Float[Array, "B D V"],
    target_BNV: Float[Array, "B N V"],
    children: int,
) -> Path:
    """Returns the path of accepted nodes, and the token behind it, of a tree whose candidates come from draw_candidates.

    With r = the target behind a node and q = its children's draft law, child after child: accepted with min(1, r/q) of its token; if not,
    r becomes the law of max(0, r - q), and q loses the token. When no child is left the token is drawn from r. By induction r is the law
    of what is still to come, whatever q. The arguments are those of walk and draw_candidates; accept tests are named by (position, cycle x
    children + rank), the last token by (position, cycle).
    """
    last = draft_BDV.shape[1] - 1

    def test(state):
        node_B1, rank_B1, live_B1, left_BV, draft_BV, draws = state
        children_BN = tree.valid_BN & (tree.parent_BN == node_B1) & (tree.rank_BN == rank_B1)
        asked_B1, at = _at(slot, tree, node_B1, live_B1 & children_BN.any(1, keepdims=True))
        child_B1 = _index(children_BN)
        token_B1 = jnp.take_along_axis(tokens_BN, child_B1, 1)
        ratio_B1 = jnp.where(asked_B1, log_ratio(token_B1, draft_BV[:, None], left_BV[:, None]), 0)
        at = at._replace(purpose=Purpose.ACCEPT, cycle=slot.cycle * children + rank_B1[:, 0])
        missed_B, draws = first(draws, at, jnp.minimum(ratio_B1, 0), outcome=True)
        on_B1 = asked_B1 & (missed_B == 0)[:, None]
        node_B1 = jnp.where(on_B1, child_B1, node_B1)
        depth_B1 = jnp.minimum(jnp.take_along_axis(tree.depth_BN, node_B1, 1), last)
        rejected_BV = jax.nn.log_softmax(residual(draft_BV, left_BV, jnp.zeros_like(ratio_B1)))
        left_BV = jnp.where(on_B1, _row(target_BNV, node_B1), jnp.where(asked_B1, rejected_BV, left_BV))
        draft_BV = jnp.where(on_B1, _row(draft_BDV, depth_B1), without(draft_BV, token_B1[:, 0]))
        return node_B1, jnp.where(on_B1, 0, rank_B1 + 1), asked_B1, left_BV, draft_BV, draws

    root_B1 = jnp.zeros((len(tokens_BN), 1), jnp.int32)
    state = (root_B1, root_B1, root_B1 == 0, target_BNV[:, 0], draft_BDV[:, 0], draws)
    node_B1, _, _, left_BV, _, draws = lax.while_loop(lambda state: state[2].any(), test, state)
    _, at = _at(slot, tree, node_B1, root_B1 == 0)
    token_B1, draws = categorical(draws, at._replace(purpose=Purpose.RESIDUAL), left_BV[:, None])
    return _path(slot, tree, node_B1, token_B1, draws)


def draw_candidates(
    draws: Draws, slot: Slot, draft_BDV: Float[Array, "B D V"], children: int
) -> tuple[Int[Array, "B D K"], Bool[Array, "B D K"], Draws]:
    """Returns K = `children` tokens a depth, drawn one after the other from the draft without replacement, where there is one (a law of
    fewer tokens runs out of them; and where slot.where), and draws. Candidate k is named by cycle x children + k."""

    def draw(k, state):
        law_BDV, tokens_BDK, there_BDK, draws = state
        there_BD = slot.where & (law_BDV > -jnp.inf).any(-1)
        drawn_BD, draws = categorical(draws, slot._replace(cycle=slot.cycle * children + k, where=there_BD), law_BDV)
        put = lambda x_BDK, x_BD: lax.dynamic_update_index_in_dim(x_BDK, x_BD, k, 2)
        return without(law_BDV, drawn_BD), put(tokens_BDK, drawn_BD), put(there_BDK, there_BD), draws

    none_BDK = jnp.zeros((*slot.where.shape, children), jnp.int32)
    return lax.fori_loop(jnp.int32(0), jnp.int32(children), draw, (draft_BDV, none_BDK, none_BDK > 0, draws))[1:]


def without(law: Float[Array, "*B V"], token: Int[Array, "*B"]) -> Float[Array, "*B V"]:
    """Returns the law (log-probabilities) given that it isn't `token`; no law, -inf throughout, where there is no other."""
    ids = jnp.arange(law.shape[-1]).reshape((1,) * token.ndim + (-1,))
    left = jnp.where(ids == token[..., None], -jnp.inf, law)
    return jnp.where((left > -jnp.inf).any(-1, keepdims=True), jax.nn.log_softmax(left), left)


def _at(slot: Slot, tree: Tree, node_B1: Array, live_B1: Array) -> tuple[Array, Slot]:
    """Returns (where there is something to draw behind the nodes, its slot)."""
    depth_B1 = jnp.take_along_axis(tree.depth_BN, node_B1, 1)
    asked_B1 = live_B1 & jnp.take_along_axis(slot.where, depth_B1, 1)
    return asked_B1, slot._replace(position=jnp.take_along_axis(slot.position, depth_B1, 1), where=asked_B1)


def _path(slot: Slot, tree: Tree, node_B1: Array, token_B1: Array, draws: Draws) -> Path:
    """Returns the path that ends at the nodes."""
    asked_B1, _ = _at(slot, tree, node_B1, node_B1 >= 0)
    more_B = (asked_B1 & tree.valid_BN & (tree.parent_BN == node_B1)).any(1)
    accepted_B = jnp.take_along_axis(tree.depth_BN, node_B1, 1)[:, 0]
    nodes_BE = path_to(tree, node_B1, slot.position.shape[1] - 1)
    return Path(nodes_BE, accepted_B, accepted_B + more_B, token_B1[:, 0], draws)


def _row(x_BNV: Array, at_B1: Array) -> Array:
    return jnp.take_along_axis(x_BNV, at_B1[:, :, None], 1)[:, 0]


def _index(where_BN: Array) -> Array:
    return jnp.argmax(where_BN, 1).astype(jnp.int32)[:, None]
