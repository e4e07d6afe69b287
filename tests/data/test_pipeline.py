"""Batches: every crop possible, none favoured, the state exact, the processes' slices one whole; and chunks that don't overlap."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import orbax.checkpoint as ocp
import pytest
from grain.checkpoint import CheckpointRestore, CheckpointSave

from dllm.core.types import UserError
from dllm.data.corpus import Rows
from dllm.data.pipeline import chunks, eval_batches, shuffled, train_batches
from dllm.data.shards import Stored

IDS = np.arange(200, dtype=np.uint8)  # each id tells its place


def take(iterator, count) -> np.ndarray:
    return np.stack([next(iterator)["tokens"] for _ in range(count)])


def test_rows_are_crops_and_no_start_is_favoured():
    batches = take(train_batches(IDS[:20], length=5, batch=8, seed=1), 2000)
    assert batches.dtype == np.int32
    rows = batches.reshape(-1, 5)
    np.testing.assert_array_equal(rows, rows[:, :1] + np.arange(5))
    counts = np.bincount(rows[:, 0], minlength=16)
    assert len(counts) == 16  # the last start, 15, included, and none beyond it
    assert np.sum((counts - 1000) ** 2 / 1000) < 44.3  # chi square, 15 degrees: one seed in ten thousand would fail


def test_seeds_and_steps_differ():
    one, two = (take(train_batches(IDS, 4, 16, seed), 3) for seed in (0, 1))
    assert (one != two).any()
    assert (one[0] != one[1]).any()
    assert (one[1] != one[2]).any()


@pytest.mark.parametrize("stop", [0, 1, 7])
def test_a_restored_state_goes_on_exactly(tmp_path, stop):
    expected = take(train_batches(IDS, 8, 4, seed=3), 12)
    first = train_batches(IDS, 8, 4, seed=3)
    for _ in range(stop):
        next(first)
    second = train_batches(IDS, 8, 4, seed=3)
    second.set_state(first.get_state())
    np.testing.assert_array_equal(take(second, 12 - stop), expected[stop:])

    with ocp.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False)) as manager:
        manager.save(stop, args=ocp.args.Composite(data=CheckpointSave(first)))
        third = train_batches(IDS, 8, 4, seed=3)
        take(third, 2)
        manager.restore(stop, args=ocp.args.Composite(data=CheckpointRestore(third)))
    np.testing.assert_array_equal(take(third, 12 - stop), expected[stop:])


def test_the_processes_share_one_global_batch():
    whole = take(train_batches(IDS, 8, 6, seed=5), 3)
    slices = [take(train_batches(IDS, 8, 6, 5, index, 3), 3) for index in range(3)]
    assert slices[0].shape == (3, 2, 8)
    np.testing.assert_array_equal(np.concatenate(slices, axis=1), whole)
    evaluated = [eval_batches(IDS, 8, 6, 2, index, 3) for index in range(3)]
    for step, batch in enumerate(eval_batches(IDS, 8, 6, 2)):
        np.testing.assert_array_equal(np.concatenate([part[step]["tokens"] for part in evaluated]), batch["tokens"])


def test_a_batch_is_quick_and_copies_no_text():
    ids = np.zeros(8_000_000, np.uint8)
    iterator = train_batches(ids, 64, 64, seed=0)
    next(iterator)
    tracemalloc.start()
    take(iterator, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        next(iterator)
        seconds.append(time.perf_counter() - start)
    assert np.median(seconds) < 0.002


def test_chunks_cover_the_text_once():
    np.testing.assert_array_equal(chunks(IDS, 7).reshape(-1), IDS[:196])
    assert np.shares_memory(chunks(IDS, 7), IDS)
    batches = eval_batches(IDS, length=10, batch=4)
    assert len(batches) == 5
    assert all(batch["tokens"].dtype == np.int32 for batch in batches)
    np.testing.assert_array_equal(np.concatenate([batch["tokens"] for batch in batches]).reshape(-1), IDS)


def test_a_limit_takes_chunks_from_the_whole_text():
    batches = eval_batches(IDS, length=10, batch=2, limit=2)
    np.testing.assert_array_equal(np.concatenate([batch["tokens"] for batch in batches])[:, 0], [0, 50, 100, 150])
    assert len(eval_batches(IDS, length=10, batch=2, limit=1000)) == 10


def test_bad_sizes_are_named():
    with pytest.raises(UserError, match=r"training text has 3 characters"):
        train_batches(IDS[:3], 4, 2, 0)
    with pytest.raises(UserError, match=r"evaluation text has 3 characters"):
        chunks(IDS[:3], 4)
    with pytest.raises(UserError, match=r"train.batch = 4 can't be shared by 3"):
        train_batches(IDS, 4, 4, 0, 0, 3)
    with pytest.raises(UserError, match=r"4 can't be shared by 3"):
        eval_batches(IDS, 4, 4, 0, 0, 3)
    with pytest.raises(UserError, match=r"20 sequences of 10 characters, not one batch of 21"):
        eval_batches(IDS, 10, 21)


def stored(count, lengths=None, length=8):
    """Row n begins with n."""
    lengths = np.full(count, length) if lengths is None else np.asarray(lengths)
    records = [np.full(size, n) for n, size in enumerate(lengths)]
    return Stored("the rows", records, length, count, (), np.dtype(np.int32), pad=-1, lengths=lengths)


def shared_rows(source, batch, steps, processes=2, **more):
    """Returns the numbers of the rows of each batch that the processes read together."""
    parts = [take(train_batches(source, 8, batch, 0, index, processes, **more), steps) for index in range(processes)]
    return np.concatenate(parts, axis=1)[:, :, 0]


def test_an_epoch_of_two_processes_covers_each_record_once():
    rows = shared_rows(stored(24), batch=4, steps=18)
    epochs = rows.reshape(3, 24)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(24), (3, 1)))
    assert (epochs[0] != epochs[1]).any()
    assert (epochs[1] != epochs[2]).any()
    assert (epochs[0] != np.arange(24)).any()
    other = take(train_batches(stored(24), 8, 4, seed=1), 18)[:, :, 0].reshape(3, 24)
    assert all((epochs[i] != other[j]).any() for i in range(3) for j in range(3))


def test_epochs_that_batches_do_not_fill():
    """Batches run across the end of an epoch: of 10 rows, 7 batches of 4 hold two whole epochs and most of a third."""
    rows = shared_rows(stored(10), batch=4, steps=7).reshape(-1)
    for epoch in (rows[:10], rows[10:20]):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(10))
    assert len(set(rows[20:])) == 8
    assert (shared_rows(stored(1), batch=2, steps=3) == 0).all()


@pytest.mark.parametrize("count", [1, 2, 3, 8, 17, 1000, 2**31 - 1])
def test_an_order_is_a_permutation(count):
    size = min(count, 1000)
    first, second = (shuffled(np.arange(size) + epoch * count, count, (0, 1)) for epoch in (0, 1))
    for order in (first, second):
        assert len(np.unique(order)) == size
        assert 0 <= order.min() <= order.max() < count
    if count >= 17:
        assert (first != second).mean() > 0.7
        assert (first != shuffled(np.arange(size), count, (0, 2))).mean() > 0.7
    several = shuffled(np.arange(2 * size), size, (5,))  # places of two epochs at once
    np.testing.assert_array_equal(several[size:], shuffled(np.arange(size, 2 * size), size, (5,)))


@pytest.mark.parametrize("count", [5, 8])
def test_no_pair_of_places_is_favoured(count):
    """Of many epochs: which row is first, and which second, all pairs alike."""
    epochs = 1000
    pairs = shuffled((np.arange(epochs)[:, None] * count + np.arange(2)).reshape(-1), count, (3,)).reshape(-1, 2) @ [count, 1]
    counts = np.bincount(pairs, minlength=count**2)[~np.eye(count, dtype=bool).reshape(-1)]
    assert counts.sum() == epochs
    mean = epochs / len(counts)
    assert np.sum((counts - mean) ** 2 / mean) < {5: 49.4, 8: 100.9}[count]  # 19 and 55 degrees: one seed in ten thousand would fail


@pytest.mark.parametrize("buckets", [(), (3, 5)])
def test_epochs_go_on_from_a_step(buckets):
    source = stored(23, np.random.default_rng(0).integers(1, 9, 23))
    batches = lambda: train_batches(source, 8, 4, 7, buckets=buckets)
    whole = batches()
    expected = [next(whole)["tokens"] for _ in range(20)]
    for stop in (0, 5, 13):
        first, second = batches(), batches()
        for _ in range(stop):
            next(first)
        second.set_state(first.get_state())
        for tokens in expected[stop:]:
            np.testing.assert_array_equal(next(second)["tokens"], tokens)


def test_a_batch_is_of_one_bucket():
    """Of 16, 40 and 8 rows that fit into 3, 5 and 8 tokens, each comes once in the 16 batches of an epoch."""
    lengths = np.random.default_rng(0).permutation(np.repeat([2, 3, 4, 5, 8], [10, 6, 30, 10, 8]))
    source = stored(64, lengths)
    halves = [train_batches(source, 8, 4, 0, index, 2, buckets=(3, 5)) for index in range(2)]
    for _ in range(3):
        seen, widths = [], []
        for _ in range(16):
            batch = np.concatenate([next(half)["tokens"] for half in halves])
            own = lengths[batch[:, 0]]
            widths.append(batch.shape[1])
            assert widths[-1] == {2: 3, 3: 3, 4: 5, 5: 5, 8: 8}[own.max()]
            assert (own > {3: 0, 5: 3, 8: 5}[widths[-1]]).all()
            np.testing.assert_array_equal((batch >= 0).sum(1), own)
            seen.extend(batch[:, 0])
        np.testing.assert_array_equal(np.sort(seen), np.arange(64))
        assert [widths.count(width) for width in (3, 5, 8)] == [4, 10, 2]
        assert sorted(widths) != widths


def test_buckets_that_rows_do_not_fill():
    """13 and 6 rows in batches of 4: rounds of 3 + 2 turns. After whole rounds no row of a bucket is two ahead of another."""
    lengths = np.repeat([3, 7], [13, 6])
    batches = train_batches(stored(19, lengths), 8, 4, 0, buckets=(2, 4))  # no row is as short as 2
    counts = np.zeros(19, int)
    for step in range(1, 51):
        np.add.at(counts, next(batches)["tokens"][:, 0], 1)
        if step % 5 == 0:
            for own in (counts[:13], counts[13:]):
                assert own.max() - own.min() <= 1
            assert (counts[:13].sum(), counts[13:].sum()) == (12 * step // 5, 8 * step // 5)


def test_bad_buckets_are_named():
    ragged = stored(4, [2, 3, 4, 5])
    for source in (IDS, Rows(np.zeros((4, 8), np.int32))):
        with pytest.raises(UserError, match=r"the buckets \(4,\) are for rows that differ in length"):
            train_batches(source, 8, 2, 0, buckets=(4,))
    for buckets in ((4, 4), (8,), (0, 4), (5, 4)):
        with pytest.raises(UserError, match=r"must grow, and lie below data.length = 8"):
            train_batches(ragged, 8, 2, 0, buckets=buckets)


def test_stored_rows_are_evaluated_as_others():
    batches = eval_batches(stored(10, np.arange(10) % 8 + 1), 8, 2, limit=2)
    np.testing.assert_array_equal(np.concatenate([batch["tokens"] for batch in batches])[:, 0], [0, 2, 5, 7])
    assert chunks(stored(3), 8).shape == (3, 8)
    with pytest.raises(UserError, match="has 3 sequences of 8 tokens, not one batch of 4"):
        eval_batches(stored(3), 8, 4)
