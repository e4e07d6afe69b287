"""Batches of sequences: random crops of a text to train on, non-overlapping chunks to evaluate on; or whole rows of a corpus of them."""

from __future__ import annotations

import sys

import grain
import numpy as np
from jaxtyping import Integer, UInt8

from dllm.core.types import UserError
from dllm.data.corpus import Rows, check_length


def train_batches(
    source: UInt8[np.ndarray, "n"] | Rows, length: int, batch: int, seed: int, process_index: int = 0, process_count: int = 1
) -> grain.DatasetIterator:
    """Returns an endless iterator of {"tokens": int32 [batch / process_count, length]}: crops of a text, every start equally likely; or
    rows of a corpus of these, each equally likely, with what fields they have (`Rows.take`).

    Batch t is a function of (seed, t) alone: the places of the global batch are drawn, and process `process_index` takes its slice of the
    rows. So the state is t (`get_state`, `set_state`, or grain.checkpoint.CheckpointSave/Restore), and the run's text doesn't depend on the
    number of processes. The state knows neither `source` nor `seed`: whoever restores it compares those. One grain element is a whole
    batch, made in the caller's thread: cutting it takes less time than handing it over.
    """
    whole = isinstance(source, Rows)
    if not whole:
        check_length(source, length, "the training text")
    if batch < 1 or batch % process_count:
        raise UserError(f"train.batch = {batch} can't be shared by {process_count} processes; make it a positive multiple of that")
    rows = batch // process_count
    mine = slice(process_index * rows, (process_index + 1) * rows)
    columns = np.arange(length)
    places = len(source.tokens) if whole else len(source) - length + 1

    def sequences(step: int) -> dict[str, np.ndarray]:
        at = np.random.default_rng((seed, step)).integers(places, size=batch)[mine]
        return source.take(at) if whole else {"tokens": source[at[:, None] + columns].astype(np.int32)}

    steps = grain.MapDataset.range(sys.maxsize).map(sequences)
    return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def chunks(source: UInt8[np.ndarray, "n"] | Rows, length: int) -> Integer[np.ndarray, "chunks length"]:
    """Returns a text cut into non-overlapping sequences, [n // length, length], a view; the last n % length characters are left out.

    Of rows, their tokens.
    """
    if isinstance(source, Rows):
        return source.tokens
    check_length(source, length, "the evaluation text")
    count = len(source) // length
    return source[: count * length].reshape(count, length)


def eval_batches(
    source: UInt8[np.ndarray, "n"] | Rows, length: int, batch: int, limit: int = 0, process_index: int = 0, process_count: int = 1
) -> list[dict[str, np.ndarray]]:
    """Returns at most `limit` batches (0: all) of {"tokens": int32 [batch / process_count, length]}: non-overlapping chunks, or rows with
    their fields.

    The same on every call. A limit takes chunks spread evenly over the whole text; what doesn't fill a last batch is left out. A text of
    less than one batch is a UserError.
    """
    rows = source if isinstance(source, Rows) else Rows(chunks(source, length))
    if batch < 1 or batch % process_count:
        raise UserError(f"a batch of {batch} can't be shared by {process_count} processes; make it a positive multiple of that")
    count = len(rows.tokens) // batch
    if count == 0:
        kind = "tokens" if isinstance(source, Rows) else "characters"
        raise UserError(
            f"the evaluation text has {len(rows.tokens)} sequences of {length} {kind}, not one batch of {batch}; use a smaller batch"
        )
    count = min(count, limit or count)
    picked = np.arange(count * batch) * len(rows.tokens) // (count * batch)
    return [rows.take(own) for own in picked.reshape(count, process_count, batch // process_count)[:, process_index]]
