import numpy as np
import pytest

from dllm.kernels.block_attention import arg_specs, tpu
from dllm.kernels.block_attention.tiles import FIRST, LAST, VISITED, WHOLE, behind, steps, transposed, visits, whole
from dllm.ops import masks

MASKS = [
    masks.full,
    masks.causal,
    masks.tail,
    *(masks.BlockCausal(block) for block in (1, 4, 7, 100)),
    *(masks.CleanNoisy(block, length, causal) for block, length in ((1, 32), (4, 32), (5, 29), (64, 32)) for causal in (False, True)),
]
TILES = [(8, 8), (16, 8), (8, 32), (24, 7), (128, 128)]


def by_tile(dense, tile_q, tile_k, of):
    """Returns [lines, tiles]: `of` (any or all) over the entries of each tile."""
    Q, S = dense.shape
    return np.array([[of(dense[q : q + tile_q, s : s + tile_k]) for s in range(0, S, tile_k)] for q in range(0, Q, tile_q)])


def as_square(some, tiles):
    square = np.zeros((len(some.count_T), tiles), bool)
    for line, (tile_W, count) in enumerate(zip(some.tile_TW, some.count_T, strict=True)):
        assert (np.diff(tile_W[:count]) > 0).all()
        assert (tile_W[count:] == (tile_W[count - 1] if count else 0)).all()
        square[line, tile_W[:count]] = True
    return square


@pytest.mark.parametrize("tile_q, tile_k", TILES)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_visited_are_exactly_the_tiles_that_hold_an_allowed_score(mask, tile_q, tile_k):
    lengths = (2 * mask.length,) * 2 if isinstance(mask, masks.CleanNoisy) else (61, 50)
    dense = np.asarray(mask.dense(*lengths))
    some, want = visits(mask, *lengths, tile_q, tile_k), by_tile(dense, tile_q, tile_k, np.any)
    np.testing.assert_array_equal(as_square(some, want.shape[1]), want)
    np.testing.assert_array_equal(as_square(transposed(some, want.shape[1]), want.shape[0]), want.T)
    assert some.total == want.sum()

    inside = np.pad(dense, [(0, -n % size) for n, size in zip(lengths, (tile_q, tile_k), strict=True)])
    np.testing.assert_array_equal(whole(mask, *lengths, tile_q, tile_k), by_tile(inside, tile_q, tile_k, np.all))


@pytest.mark.parametrize("tile, want", [(128, 1088), (256, 288), (512, 80)])
@pytest.mark.parametrize("causal", [False, True])
def test_clean_noisy_at_8192_rows(tile, want, causal):
    mask, tiles = masks.CleanNoisy(4, 4096, causal), 8192 // tile
    some = visits(mask, 8192, 8192, tile, tile)
    assert some.total == want
    assert transposed(some, tiles).total == want
    n = 4096 // tile  # clean over clean and noisy over clean: below the diagonal whole, on it cut; noisy over its own: cut
    assert whole(mask, 8192, 8192, tile, tile).sum() == n * (n - 1)


def test_steps_are_the_visits_in_a_row():
    mask = masks.CleanNoisy(4, 32, frozen=True)
    some = behind(visits(mask, 64, 64, 16, 16), 2)
    walk = steps(some, whole(mask, 64, 64, 16, 16))
    assert walk.line.tolist() == [0, 1, 2, 2, 3, 3, 3]
    assert walk.tile.tolist() == [0, 0, 0, 2, 0, 1, 3]
    alone = FIRST | LAST
    assert walk.flags.tolist() == [alone, alone, FIRST | VISITED, LAST | VISITED, FIRST | VISITED | WHOLE, VISITED, LAST | VISITED]


def test_a_tree_is_data_so_that_all_is_visited_and_nothing_is_whole():
    mask = arg_specs.tree(1, 20)
    assert visits(mask, 20, 20, 8, 8).total == 9
    assert not whole(mask, 20, 20, 8, 8).any()


@pytest.mark.parametrize("spec", arg_specs.TRAINING, ids=lambda spec: spec.name)
def test_the_chosen_tiles_waste_little(spec):
    """Scores in visited tiles, of those that the mask allows: 1.5 at 2k, 1.25 at 4k, 1.13 at 8k. Smaller tiles would be the more steps."""
    tiles = tpu.choose(spec.queries, spec.keys, spec.heads // spec.kv_heads, spec.head_width, 2)
    some = visits(spec.mask, spec.queries, spec.keys, tiles.query, tiles.key)
    length, block = spec.queries // 2, spec.mask.block
    least = length * (length + 1 if spec.mask.causal else length + block)
    assert tiles.query == tiles.key == 512
    assert least <= some.total * 512 * 512 <= (1 + 2 * 512 / length) * least
