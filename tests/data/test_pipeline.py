"""Batches: every crop possible, none favoured, the state exact, the processes' slices one whole; and chunks that don't overlap."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import orbax.checkpoint as ocp
import pytest
from grain.checkpoint import CheckpointRestore, CheckpointSave

from dllm.core.types import UserError
from dllm.data.pipeline import chunks, eval_batches, train_batches

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
