"""Batches of sequences from a text: random crops to train on, non-overlapping chunks to evaluate on."""

from __future__ import annotations

import sys

import grain
import numpy as np
from jaxtyping import UInt8

from dllm.core.types import UserError
from dllm.data.corpus import check_length


def train_batches(
    ids: UInt8[np.ndarray, "n"], length: int, batch: int, seed: int, process_index: int = 0, process_count: int = 1
) -> grain.DatasetIterator:
    """Returns an endless iterator of {"tokens": int32 [batch / process_count, length]}: crops of `ids`, every start equally likely.

    Batch t is a function of (seed, t) alone: the offsets of the global batch are drawn, and process `process_index` cuts its slice of the
    rows. So the state is t (`get_state`, `set_state`, or grain.checkpoint.CheckpointSave/Restore), and the run's text doesn't depend on the
    number of processes. The state knows neither `ids` nor `seed`: whoever restores it compares those. One grain element is a whole batch,
    made in the caller's thread: cutting it takes less time than handing it over.
    """
    check_length(ids, length, "the training text")
    if batch < 1 or batch % process_count:
        raise UserError(f"train.batch = {batch} can't be shared by {process_count} processes; make it a positive multiple of that")
    rows = batch // process_count
    mine = slice(process_index * rows, (process_index + 1) * rows)
    columns = np.arange(length)

    def crops(step: int) -> dict[str, np.ndarray]:
        starts = np.random.default_rng((seed, step)).integers(len(ids) - length + 1, size=batch)[mine]
        return {"tokens": ids[starts[:, None] + columns].astype(np.int32)}

    steps = grain.MapDataset.range(sys.maxsize).map(crops)
    return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def chunks(ids: UInt8[np.ndarray, "n"], length: int) -> UInt8[np.ndarray, "chunks length"]:
    """Returns `ids` cut into non-overlapping sequences, [n // length, length], a view; the last n % length characters are left out."""
    check_length(ids, length, "the evaluation text")
    count = len(ids) // length
    return ids[: count * length].reshape(count, length)


def eval_batches(
    ids: UInt8[np.ndarray, "n"], length: int, batch: int, limit: int = 0, process_index: int = 0, process_count: int = 1
) -> list[dict[str, np.ndarray]]:
    """Returns at most `limit` batches (0: all) of {"tokens": int32 [batch / process_count, length]}: non-overlapping chunks.

    The same on every call. A limit takes chunks spread evenly over the whole text; what doesn't fill a last batch is left out. A text of
    less than one batch is a UserError.
    """
    all_chunks = chunks(ids, length)
    if batch < 1 or batch % process_count:
        raise UserError(f"a batch of {batch} can't be shared by {process_count} processes; make it a positive multiple of that")
    count = len(all_chunks) // batch
    if count == 0:
        raise UserError(
            f"the evaluation text has {len(all_chunks)} sequences of {length} characters, not one batch of {batch}; use a smaller batch"
        )
    count = min(count, limit or count)
    picked = np.arange(count * batch) * len(all_chunks) // (count * batch)
    rows = batch // process_count
    return [{"tokens": all_chunks[own].astype(np.int32)} for own in picked.reshape(count, process_count, rows)[:, process_index]]
