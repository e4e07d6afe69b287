"""Trees of drafted tokens: which candidates a verifying pass reads, several for one position, each behind the path that leads to it."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


class Tree(NamedTuple):
    """N nodes in the order in which they joined, a parent before its children. Node 0 is the root; those that are not valid are no part
    of the tree, and leaves. A node's children have ranks 0, 1, ... without gaps."""

    parent_BN: Int[Array, "B N"]  # -1 at the root, and where not valid
    depth_BN: Int[Array, "B N"]  # 0 at the root
    rank_BN: Int[Array, "B N"]  # which of its depth's candidates the node is
    ancestors_BNN: Bool[Array, "B N N"]  # row n: the path from the root to n, n among it
    valid_BN: Bool[Array, "B N"]


def best_first(log_weights_BDK: Float[Array, "B D K"], nodes: int) -> Tree:
    """Returns the tree that grows by the likeliest candidate, up to `nodes` nodes with the root.

    Every node of depth d may have the candidates of depth d + 1 as children, of log weight log_weights[:, d], in falling order; -inf
    where there is none. A path weighs the sum of its steps. Of equal candidates the one of lower depth goes first, then of lower rank,
    then of the parent that joined earlier. (Which tree it is has no influence on a verifier's law: it is made before that draws. Where
    children are judged as draws, their weights mustn't depend on which they are.)
    Source: arXiv 2609.04010, tree sampler; the best-first expansion is that of EAGLE-2 (arXiv 2406.16858).
    """
    (batch, depths, children), N = log_weights_BDK.shape, nodes
    flat_BC = log_weights_BDK.reshape(batch, depths * children)
    node_1N = jnp.arange(N, dtype=jnp.int32)[None]
    zero_BN = jnp.zeros((batch, N), jnp.int32)
    at_root = jnp.broadcast_to(node_1N == 0, (batch, N))
    ancestors_BNN = jnp.broadcast_to(jnp.eye(N, dtype=bool)[None], (batch, N, N))

    def grow(n, state):
        (parent_BN, depth_BN, rank_BN, ancestors_BNN, valid_BN), total_BN, next_BN = state
        # Each node offers its next child. They come in falling order, so the best of these is the best of all.
        place_BN = depth_BN * children + next_BN
        offers_BN = valid_BN & (depth_BN < depths) & (next_BN < children)
        step_BN = jnp.take_along_axis(flat_BC, jnp.where(offers_BN, place_BN, 0), 1)
        offer_BN = jnp.where(offers_BN, total_BN + step_BN, -jnp.inf)
        best_B1 = offer_BN.max(1, keepdims=True)
        order_BN = jnp.where(offer_BN == best_B1, place_BN * N + node_1N, jnp.iinfo(jnp.int32).max)
        found_B1, from_B1 = best_B1 > -jnp.inf, jnp.argmin(order_BN, 1).astype(jnp.int32)[:, None]
        take = lambda x_BN: jnp.take_along_axis(x_BN, from_B1, 1)
        path_B1N = jnp.take_along_axis(ancestors_BNN, from_B1[:, :, None], 1)
        new_BN = found_B1 & (node_1N == n)
        tree = Tree(
            jnp.where(new_BN, from_B1, parent_BN),
            jnp.where(new_BN, take(depth_BN) + 1, depth_BN),
            jnp.where(new_BN, take(next_BN), rank_BN),
            ancestors_BNN | (new_BN[:, :, None] & path_B1N),
            valid_BN | new_BN,
        )
        return tree, jnp.where(new_BN, best_B1, total_BN), next_BN + (found_B1 & (node_1N == from_B1))

    start = Tree(zero_BN - 1, zero_BN, zero_BN, ancestors_BNN, at_root), jnp.zeros((batch, N), flat_BC.dtype), zero_BN
    return lax.fori_loop(jnp.int32(1), jnp.int32(N), grow, start)[0]


def tokens_at(tree: Tree, root_B1: Int[Array, "B 1"], candidates_BDK: Int[Array, "B D K"]) -> Int[Array, "B N"]:
    """Returns the token of each node; the root's where it is not valid."""
    place_BN = (tree.depth_BN - 1) * candidates_BDK.shape[2] + tree.rank_BN
    drafted_BN = jnp.take_along_axis(candidates_BDK.reshape(len(root_B1), -1), jnp.maximum(place_BN, 0), 1)
    return jnp.where(tree.depth_BN > 0, drafted_BN, root_B1)


def path_to(tree: Tree, node_B1: Int[Array, "B 1"], depths: int) -> Int[Array, "B E"]:
    """Returns the nodes from the root to `node`, by depth 0 ... depths; the root behind it."""
    on_BN = jnp.take_along_axis(tree.ancestors_BNN, node_B1[:, :, None], 1)[:, 0]
    at_BEN = tree.depth_BN[:, None] == jnp.arange(depths + 1, dtype=jnp.int32)[None, :, None]
    return jnp.argmax(on_BN[:, None] & at_BEN, -1).astype(jnp.int32)
