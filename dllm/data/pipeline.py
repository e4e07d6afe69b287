"""Batches of sequences: random crops of a text to train on, non-overlapping chunks to evaluate on; or whole rows of a corpus of them.

Of a prepared corpus (`dllm.data.shards`) training goes through all rows, in an order drawn anew, before it sees one again: its epochs.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import grain
import numpy as np
from jaxtyping import Int64, Integer, UInt8

from dllm.core.types import UserError
from dllm.data.corpus import Rows, check_length
from dllm.data.shards import Stored

_ROUNDS = 8
_Places = Callable[[int], tuple[np.ndarray, int]]


def train_batches(
    source: UInt8[np.ndarray, "n"] | Rows,
    length: int,
    batch: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    buckets: tuple[int, ...] = (),
) -> grain.DatasetIterator:
    """Returns an endless iterator of {"tokens": int32 [batch / process_count, length]}: crops of a text, every start equally likely; or
    rows of a corpus of these with what fields they have (`Rows.take`), each equally likely, or of a prepared one in epochs.

    `buckets` are lengths below `length`: rows of one batch are those that fit into the same bucket and not into a shorter one, and are
    padded to that only, so as many programs are compiled as there are lengths. Each bucket has epochs of its own, and so many batches that
    they are about as long as the others'.

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
    if buckets and (not isinstance(source, Stored) or source.lengths is None):
        raise UserError(f"the buckets {buckets} are for rows that differ in length, as prepared proteins do; drop them")
    rows = batch // process_count
    mine = slice(process_index * rows, (process_index + 1) * rows)
    columns = np.arange(length)
    if isinstance(source, Stored):
        places = _epochs(source, length, batch, seed, buckets)
    else:
        count = len(source) if whole else len(source) - length + 1
        places = lambda step: (np.random.default_rng((seed, step)).integers(count, size=batch), length)

    def sequences(step: int) -> dict[str, np.ndarray]:
        at, width = places(step)
        if whole:
            return {name: x_BL[:, :width] for name, x_BL in source.take(at[mine]).items()}
        return {"tokens": source[at[mine][:, None] + columns].astype(np.int32)}

    steps = grain.MapDataset.range(sys.maxsize).map(sequences)
    return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def _epochs(source: Stored, length: int, batch: int, seed: int, buckets: tuple[int, ...]) -> _Places:
    """Returns step -> (the rows of its global batch, the length that they are padded to).

    Each bucket's rows are laid end to end without end, shuffled anew each time, and cut into batches. Which bucket's turn it is is shuffled
    too, in rounds of about an epoch, that give each bucket its share of turns.
    """
    edges = (*buckets, length)
    if any(edge < 1 for edge in edges) or any(b <= a for a, b in itertools.pairwise(edges)):
        raise UserError(f"the buckets {buckets} must grow, and lie below data.length = {length}")
    if not buckets:
        return lambda step: (shuffled(np.arange(step * batch, (step + 1) * batch), len(source), (seed, 0)), length)
    bucket_N = np.searchsorted(edges, source.lengths)
    kept = [b for b in range(len(edges)) if (bucket_N == b).any()]
    rows = [np.flatnonzero(bucket_N == b) for b in kept]
    turns = np.array([max(1, round(len(own) / batch)) for own in rows])
    before, around = np.cumsum(turns) - turns, int(turns.sum())

    def places(step: int) -> tuple[np.ndarray, int]:
        turn = int(shuffled(np.array([step]), around, (seed, len(rows)))[0])
        own = int(np.searchsorted(before, turn, side="right")) - 1
        first = (step // around * int(turns[own]) + turn - int(before[own])) * batch
        return rows[own][shuffled(np.arange(first, first + batch), len(rows[own]), (seed, own))], edges[kept[own]]

    return places


def shuffled(places: Int64[np.ndarray, "n"], count: int, seed: tuple[int, ...]) -> Int64[np.ndarray, "n"]:
    """Returns what stands at these places of 0..count - 1 laid end to end without end, each time in an order of its own.

    The order is a Feistel network on the even number of bits that hold `count`, walked on from what lies outside (Black and Rogaway 2002),
    so a place costs the same wherever it is, and nothing is kept.
    """
    half = max(1, -(-(count - 1).bit_length() // 2))
    low, found = np.uint64(2**half - 1), np.empty_like(places)
    for epoch in np.unique(places // count):
        keys = np.random.SeedSequence((*seed, int(epoch))).generate_state(_ROUNDS, np.uint64)

        def walk(x: np.ndarray, keys: np.ndarray = keys) -> np.ndarray:
            left, right = x >> np.uint64(half), x & low
            for key in keys:
                mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)
                mixed = (mixed ^ mixed >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
                left, right = right, left ^ (mixed >> np.uint64(32)) & low
            return left << np.uint64(half) | right

        own = places // count == epoch
        x = walk((places[own] % count).astype(np.uint64))
        while (outside := x >= count).any():
            x[outside] = walk(x[outside])
        found[own] = x
    return found


def chunks(source: UInt8[np.ndarray, "n"] | Rows, length: int) -> Integer[np.ndarray, "chunks length"]:
    """Returns a text cut into non-overlapping sequences, [n // length, length], a view; the last n % length characters are left out.

    Of rows, their tokens, all of them in memory.
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
    count = len(rows) // batch
    if count == 0:
        kind = "tokens" if isinstance(source, Rows) else "characters"
        raise UserError(f"the evaluation text has {len(rows)} sequences of {length} {kind}, not one batch of {batch}; use a smaller batch")
    count = min(count, limit or count)
    picked = np.arange(count * batch) * len(rows) // (count * batch)
    return [rows.take(own) for own in picked.reshape(count, process_count, batch // process_count)[:, process_index]]
