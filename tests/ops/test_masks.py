import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.ops import masks

# A root, two children, and a child of the first of these; a chain; a root and three children.
TREES = jnp.asarray(
    [
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]],
    ],
    bool,
)
PICTURES = [masks.full, masks.causal, masks.BlockCausal(2), masks.CleanNoisy(1, 2), masks.tail, masks.Ancestors(TREES)]


@pytest.mark.parametrize("mask", PICTURES, ids=lambda mask: type(mask).__name__)
def test_picture_in_the_docstring_is_what_show_draws(mask):
    assert "\n\n" + mask.show() in inspect.getdoc(type(mask))


def test_dense_against_numpy():
    np.testing.assert_array_equal(masks.causal.dense(3, 5), np.tri(3, 5, dtype=bool))
    np.testing.assert_array_equal(masks.full.dense(3, 5), np.ones((3, 5), bool))


@pytest.mark.parametrize("mask", [masks.full, masks.causal])
def test_allowed_broadcasts_its_indices(mask):
    """With a cache, queries stand at per-row indices: allowed(index [B Q 1], index [1 1 S]) is the rows of `dense` at these indices."""
    query_BQ1 = jnp.array([[0, 1], [2, 3]])[:, :, None]
    np.testing.assert_array_equal(
        mask.allowed(query_BQ1, jnp.arange(4)[None, None], query_BQ1 * 0), np.asarray(mask.dense(4, 4)).reshape(2, 2, 4)
    )


def test_static_through_jit_and_compared_by_value():
    traced = []

    @jax.jit
    def count(mask, x):
        traced.append(mask)
        return x + mask.dense(2, 2).sum()

    assert [int(count(m, 0)) for m in (masks.full, masks.Full(), masks.causal)] == [4, 4, 3]
    assert traced == [masks.full, masks.causal]


def block_diffusion_mask(length, block):
    """The training mask as BD3-LM and SDAR write it, over [noisy ; clean]: block diagonal, offset block causal, block causal."""
    at = np.arange(2 * length)
    clean, blocks = at >= length, at % length // block
    q, k = (slice(None), None), (None, slice(None))
    diagonal = (blocks[q] == blocks[k]) & (clean[q] == clean[k])
    offset = (blocks[q] > blocks[k]) & clean[k] & ~clean[q]
    causal = (blocks[q] >= blocks[k]) & clean[k] & clean[q]
    return diagonal | offset | causal


def uno_mask(length, block):
    """The same for a drafter of an autoregressive model: causal in a noisy block, causal among clean rows."""
    at = np.arange(2 * length)
    noisy, place = at < length, at % length
    blocks, q, k = place // block, (slice(None), None), (None, slice(None))
    own = noisy[q] & noisy[k] & (blocks[q] == blocks[k]) & (place[q] >= place[k])
    return own | (noisy[q] & ~noisy[k] & (blocks[q] > blocks[k])) | (~noisy[q] & ~noisy[k] & (place[q] >= place[k]))


def clean_first(mask):
    """A mask over [noisy ; clean] as one over [clean ; noisy]."""
    half = len(mask) // 2
    return np.roll(mask, (half, half), (0, 1))


@pytest.mark.parametrize("length, block", [(8, 1), (8, 2), (8, 4), (8, 8), (8, 16), (7, 3)])
def test_clean_noisy_is_the_published_training_mask(length, block):
    """https://github.com/JetAstra/SDAR/issues/11: a noisy row reads clean blocks before its own. A last partial block is shorter."""
    mask = np.asarray(masks.CleanNoisy(block, length).dense(2 * length, 2 * length))
    np.testing.assert_array_equal(mask, clean_first(block_diffusion_mask(length, block)))
    np.testing.assert_array_equal(mask[:length, :length], masks.BlockCausal(block).dense(length, length))
    if length % block == 0:
        assert mask.sum() == length**2 + length * block
    causal = np.asarray(masks.CleanNoisy(block, length, causal=True).dense(2 * length, 2 * length))
    np.testing.assert_array_equal(causal, clean_first(uno_mask(length, block)))


@pytest.mark.parametrize("block", [1, 2, 4])
def test_block_causal_is_its_formula_and_a_slice_of_it_behind_a_cache(block):
    at = np.arange(12)
    whole = at[None] // block <= at[:, None] // block
    np.testing.assert_array_equal(masks.BlockCausal(block).dense(12, 12), whole)
    start = jnp.asarray([4, 8])[:, None, None]
    behind = masks.BlockCausal(block).allowed(start + jnp.arange(4)[None, :, None], jnp.arange(12)[None, None], start)
    np.testing.assert_array_equal(behind, np.stack([whole[4:8], whole[8:12]]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [1, 2, 4])
def test_clean_noisy_behind_a_cache(block, causal):
    """On top of s cached tokens, all rows read the cache as rows of the whole training mask read those clean tokens."""
    length, total = 4, 12
    whole = np.asarray(masks.CleanNoisy(block, total, causal).dense(2 * total, 2 * total))
    start = jnp.asarray([0, 4, 8])[:, None, None]
    query = start + jnp.arange(2 * length)[None, :, None]
    allowed = masks.CleanNoisy(block, length, causal).allowed(query, jnp.arange(total + length)[None, None], start)
    for s, got in zip((0, 4, 8), np.asarray(allowed), strict=True):
        here = [*range(s, s + length), *range(total + s, total + s + length)]  # where these rows are in the whole
        np.testing.assert_array_equal(got[:, : s + 2 * length], whole[np.ix_(here, [*range(s), *here])])


def test_ancestors_behind_a_cache():
    """All rows read what is cached, and of their own pass the path of their tree alone; in any order of rows."""
    start = jnp.asarray([0, 3, 5], jnp.int32)[:, None, None]
    rows = jnp.asarray([[0, 1, 2, 3], [3, 0, 2, 1], [2, 2, 3, 0]], jnp.int32)
    keys = jnp.arange(9, dtype=jnp.int32)[None, None]
    allowed = jax.jit(lambda mask: mask.allowed(start + rows[:, :, None], keys, start))(masks.Ancestors(TREES))
    want = np.zeros((3, 4, 9), bool)
    for b in range(3):
        s = int(start[b, 0, 0])
        want[b, :, :s] = True
        want[b, :, s : s + 4] = np.asarray(TREES)[b][np.asarray(rows)[b]]
    np.testing.assert_array_equal(allowed, want)
    part = masks.Ancestors(TREES).allowed(start + rows[:, :, None], keys[:, :, 4:7], start)
    np.testing.assert_array_equal(part, want[:, :, 4:7])


def test_a_chain_of_ancestors_is_causal():
    np.testing.assert_array_equal(masks.Ancestors(TREES[1:2]).dense(4, 4), masks.causal.dense(4, 4))


def test_a_mask_of_65536_rows_needs_no_array_of_them():
    """https://github.com/JetAstra/SDAR/issues/26: (2 L)^2 passes int32 above L = 23,170. Here a slice is reckoned from indices alone."""
    length, block = 32_768, 4
    mask = masks.CleanNoisy(block, length)
    queries = jnp.asarray([0, 5, length - 1, length, length + 5, 2 * length - 1], jnp.int32)

    @jax.jit
    def counts(queries):
        keys = jnp.arange(2 * length, dtype=jnp.int32)
        return mask.allowed(queries[:, None], keys[None], jnp.zeros((1, 1), jnp.int32)).sum(1)

    # a clean row reads the clean rows to its block's end; a noisy one those before its block, and its block
    assert counts(queries).tolist() == [4, 8, length, 4, 8, length]
    assert counts.lower(queries).compile().memory_analysis().temp_size_in_bytes < 2**22  # 6 x 65,536 entries, not 65,536^2


@pytest.mark.parametrize(
    "mask, queries",
    [
        (masks.full, 9),
        (masks.causal, 9),
        (masks.tail, 9),
        *((masks.BlockCausal(block), 9) for block in (1, 2, 4, 16)),
        *((masks.CleanNoisy(block, length), 2 * length) for block, length in ((1, 6), (2, 6), (8, 6), (3, 7))),
        *((masks.CleanNoisy(block, length, causal=True), 2 * length) for block, length in ((1, 6), (2, 6), (8, 6), (3, 7))),
    ],
    ids=str,
)
def test_ranges_are_exactly_what_queries_read(mask, queries):
    dense = np.asarray(mask.dense(queries, queries))
    for first in range(queries):
        for last in range(first, queries):
            ranges, got = mask.ranges(first, last), np.zeros(queries, bool)
            for low, high in ranges:
                got[low:high] = True
            np.testing.assert_array_equal(got, dense[first : last + 1].any(0), err_msg=f"{first}..{last}")
            ends = [end for bounds in ranges for end in bounds]
            assert ends == sorted(ends)
            assert all(low < high for low, high in ranges)


def test_every_mask_reads_all_that_is_cached():
    """What the decode form of attention rests on: it evaluates a mask over the pass's own rows only."""
    start, rows = jnp.full((3, 1, 1), 8), jnp.arange(4)[None, :, None]
    for mask in (*PICTURES, masks.CleanNoisy(2, 2), masks.CleanNoisy(1, 2, causal=True), masks.BlockCausal(4)):
        assert mask.allowed(start + rows, jnp.arange(8)[None, None], start).all(), mask
