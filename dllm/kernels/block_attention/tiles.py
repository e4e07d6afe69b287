"""Which tiles of the square of queries and keys a kernel visits: by the mask's own arithmetic, never from a dense array."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from dllm.ops.masks import Mask

FIRST, LAST, VISITED, WHOLE = 1, 2, 4, 8  # of a step: it begins a line, ends one, has a tile to visit, and that is allowed as a whole


@dataclasses.dataclass(frozen=True)
class Visits:
    """Of each of T lines of tiles (of queries, or for the backward pass of keys), the W tiles to visit, ascending.

    A line with fewer than W repeats its last: a block that is there already isn't loaded again.
    """

    tile_TW: np.ndarray  # int32
    count_T: np.ndarray  # int32

    @property
    def total(self) -> int:
        """Tiles that are visited."""
        return int(self.count_T.sum())


@dataclasses.dataclass(frozen=True)
class Steps:
    """The visited tiles in a row, line by line. A line without one has a step nevertheless: its output wants zeros."""

    line: np.ndarray  # int32
    tile: np.ndarray  # int32
    flags: np.ndarray  # int32


def visits(mask: Mask, queries: int, keys: int, tile_q: int, tile_k: int) -> Visits:
    """Returns, for each tile of queries, the tiles of keys that hold one which a query of it reads."""
    lines = []
    for first in range(0, queries, tile_q):
        line = set()
        for low, high in mask.ranges(first, min(first + tile_q, queries) - 1):
            line |= {*range(low // tile_k, -(-min(high, keys) // tile_k))}
        lines.append(sorted(line))
    return _pack(lines)


def transposed(forward: Visits, key_tiles: int) -> Visits:
    """Returns, for each tile of keys, the tiles of queries that visit it."""
    lines = [[] for _ in range(key_tiles)]
    for query_tile, (line_W, count) in enumerate(zip(forward.tile_TW, forward.count_T)):
        for key_tile in line_W[:count]:
            lines[key_tile].append(query_tile)
    return _pack(lines)


def behind(some: Visits, line: int) -> Visits:
    """Returns the visits of that line and the later ones; those before it have none."""
    return Visits(some.tile_TW, np.where(np.arange(len(some.count_T)) < line, 0, some.count_T).astype(np.int32))


def steps(some: Visits, whole: np.ndarray) -> Steps:
    """Returns the visits as steps. whole[line, tile]: of that tile, the mask allows everything."""
    line, tile, flags = [], [], []
    for t, (tile_W, count) in enumerate(zip(some.tile_TW, some.count_T)):
        n = max(int(count), 1)
        line += [t] * n
        tile += tile_W[:n].tolist()
        flags += [(VISITED | WHOLE * bool(whole[t, s])) if count else 0 for s in tile_W[:n]]
        flags[-n] |= FIRST
        flags[-1] |= LAST
    return Steps(*(np.asarray(x, np.int32) for x in (line, tile, flags)))


def whole(mask: Mask, queries: int, keys: int, tile_q: int, tile_k: int) -> np.ndarray:
    """Returns [query tiles, key tiles] bool: the mask allows the whole tile, and it lies in the square. Never of a mask that holds data.

    What a single query reads is exactly its ranges; a tile is whole if one range of each of its queries covers it.
    """
    low = np.arange(-(-keys // tile_k)) * tile_k
    found = np.zeros((-(-queries // tile_q), len(low)), bool)
    if jax.tree.leaves(mask):
        return found
    for t in range(queries // tile_q):
        some = [mask.ranges(at, at) for at in range(t * tile_q, (t + 1) * tile_q)]
        most = max(map(len, some))
        first_QR1, end_QR1 = np.asarray([(*ranges, *[(0, 0)] * (most - len(ranges))) for ranges in some]).transpose(2, 0, 1)[..., None]
        found[t] = ((first_QR1 <= low) & (low + tile_k <= end_QR1)).any(1).all(0) & (low + tile_k <= keys)
    return found


def _pack(lines: list[list[int]]) -> Visits:
    width = max(1, *(len(line) for line in lines))
    packed = [(line or [0]) + [(line or [0])[-1]] * (width - max(len(line), 1)) for line in lines]
    return Visits(np.asarray(packed, np.int32), np.asarray([len(line) for line in lines], np.int32))
