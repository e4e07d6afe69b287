"""Trees: which nodes best-first growth takes, against a search written from the definition."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.ops import trees

grow = jax.jit(trees.best_first, static_argnums=1)


def search(log_weights, nodes):
    """[(parent, depth, rank, total)] by looking at every candidate of every node in each step."""
    depths, children = log_weights.shape
    tree = [(-1, 0, 0, 0.0)]
    while len(tree) < nodes:
        taken = {(parent, rank) for parent, _, rank, _ in tree[1:]}
        open_ = [
            (-(total + log_weights[depth, rank]), depth + 1, rank, node)
            for node, (_, depth, _, total) in enumerate(tree)
            for rank in range(children)
            if depth < depths and (node, rank) not in taken and log_weights[depth, rank] > -np.inf
        ]
        if not open_:
            break
        total, depth, rank, parent = min(open_)
        tree.append((parent, depth, rank, -total))
    return tree


def check(log_weights, nodes):
    tree = jax.device_get(grow(jnp.asarray(log_weights), nodes))
    for b, weights in enumerate(np.asarray(log_weights)):
        want = search(weights, nodes)
        n = len(want)
        assert tree.valid_BN[b].tolist() == [True] * n + [False] * (nodes - n)
        for name, column in (("parent_BN", 0), ("depth_BN", 1), ("rank_BN", 2)):
            assert getattr(tree, name)[b, :n].tolist() == [node[column] for node in want]
        assert (tree.parent_BN[b, n:] == -1).all()
        paths = [[0]]
        for node in range(1, n):
            paths.append([*paths[want[node][0]], node])
        paths += [[node] for node in range(n, nodes)]  # those that aren't valid read themselves alone
        for node, path in enumerate(paths):
            assert np.flatnonzero(tree.ancestors_BNN[b, node]).tolist() == path
    return tree


@pytest.mark.parametrize("depths, children, nodes", [(1, 1, 1), (1, 4, 3), (2, 3, 7), (3, 2, 15), (4, 3, 12), (7, 4, 32)])
def test_best_first_is_the_search_over_all_candidates(depths, children, nodes):
    law = np.random.default_rng(0).dirichlet(np.full(children, 0.6), (5, depths)).astype(np.float32)
    check(np.log(-np.sort(-law, -1)), nodes)


@pytest.mark.parametrize("nodes", range(1, 16))
def test_ties_go_to_lower_depth_then_rank_then_parent(nodes):
    """Halves: the child of depth 2 and rank 0 of the first child ties with the root's second child, and so on."""
    check(np.tile(-(np.arange(3.0, dtype=np.float32) + 1), (1, 3, 1)), nodes)
    check(np.zeros((1, 3, 2), np.float32), nodes)


def test_impossible_candidates_never_enter():
    """A depth without candidates ends all paths, and what room is left stays empty."""
    weights = np.log(np.full((2, 3, 2), 0.5, np.float32))
    weights[0, 1] = -np.inf
    weights[1, :, 1] = -np.inf
    tree = check(weights, 8)
    assert tree.valid_BN.sum(1).tolist() == [3, 4]
    assert (tree.depth_BN.max(1) == [1, 3]).all()


def test_one_child_makes_a_chain():
    tree = check(np.random.default_rng(1).normal(size=(2, 4, 1)).astype(np.float32), 5)
    np.testing.assert_array_equal(tree.ancestors_BNN, np.tri(5, dtype=bool)[None].repeat(2, 0))


def test_tokens_and_paths():
    tree = grow(jnp.log(jnp.asarray([[[0.6, 0.4], [0.9, 0.1], [0.5, 0.5]], [[0.9, 0.1], [0.2, 0.1], [0.1, 0.0]]])), 6)
    root, candidates = jnp.asarray([[7], [8]], jnp.int32), jnp.asarray([[[1, 2], [3, 4], [5, 6]]] * 2, jnp.int32)
    tokens = trees.tokens_at(tree, root, candidates).tolist()
    for b, node in itertools.product(range(2), range(6)):
        depth, rank = int(tree.depth_BN[b, node]), int(tree.rank_BN[b, node])
        assert tokens[b][node] == (int(candidates[b, depth - 1, rank]) if depth else [7, 8][b])
        path = trees.path_to(tree, jnp.full((2, 1), node, jnp.int32), 3)[b].tolist()
        want = np.flatnonzero(tree.ancestors_BNN[b, node]).tolist()
        assert path == want + [0] * (4 - len(want))


def test_no_array_grows_with_nodes_and_candidates_at_once():
    """The published largest tree, 15 depths of 32 candidates, 64 nodes: a few [N, N] arrays a row, not [N, D, K] ones."""
    weights = jax.ShapeDtypeStruct((4, 15, 32), jnp.float32)
    memory = grow.lower(weights, 64).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 15 * 32 * 64
