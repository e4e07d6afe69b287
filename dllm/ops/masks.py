"""Attention masks as small static specs: which key a query may read, told by their indices in the sequence, never by rotary positions.

A spec holds no array and is registered static, so it goes through jit, scan and remat as an argument and is part of their cache key.
Ancestors is the exception: a tree is data, so that it holds an array, of the pass's own rows alone, and is a pytree.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int

Ranges = tuple[tuple[int, int], ...]
ALL = 2**31 - 1  # behind every key


@dataclasses.dataclass(frozen=True)
class Mask:
    """What all masks share: pictures. A kind of mask adds

    allowed(query_index, key_index, start) -> bool, in the shape that the index arrays broadcast to
    ranges(first, last) -> ((low, high), ...)

    where `start` is the index of the forward pass's first row: what lies before it is in the cache. Ranges are the keys low..high-1 that
    the queries first..last read in a pass without a cache, ascending and apart, by arithmetic on whole numbers: a kernel visits what
    meets them, and nothing else. They may go beyond the last key.
    """

    def dense(self, queries: int, keys: int) -> Bool[Array, "Q S"]:
        """Returns the mask of query rows 0..Q-1 over key columns 0..S-1, of a batch's first row. For tests and pictures only."""
        allowed = self.allowed(jnp.arange(queries)[None, :, None], jnp.arange(keys)[None, None], jnp.zeros((1, 1, 1), jnp.int32))
        return jnp.broadcast_to(allowed[0], (queries, keys))

    def show(self, queries: int = 4, keys: int = 4) -> str:
        """Returns the picture: a line for each query, `x` where it reads the key of that column."""
        return "\n".join(" ".join("x" if allow else "." for allow in row) for row in self.dense(queries, keys).tolist())


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """Every query reads every key.

    x x x x
    x x x x
    x x x x
    x x x x
    """

    def allowed(self, query_index: Int[Array, "..."], key_index: Int[Array, "..."], start: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Returns True everywhere."""
        return jnp.ones(jnp.broadcast_shapes(query_index.shape, key_index.shape), bool)

    def ranges(self, first: int, last: int) -> Ranges:
        """Returns all keys."""
        return ((0, ALL),)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """A query reads the keys up to and including its own index.

    x . . .
    x x . .
    x x x .
    x x x x
    """

    def allowed(self, query_index: Int[Array, "..."], key_index: Int[Array, "..."], start: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Returns key <= query."""
        return key_index <= query_index

    def ranges(self, first: int, last: int) -> Ranges:
        """Returns the keys up to the last query."""
        return ((0, last + 1),)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class BlockCausal(Mask):
    """A query reads its own block of `block` indices and all earlier ones (SDAR; block 1 is Causal, block >= L is Full). Block 2:

    x x . .
    x x . .
    x x x x
    x x x x

    With a cache that ends on a block's edge it is also the mask of a fused commit, [finished block ; next block's masks]: the first half
    reads the cache and itself, the second all of that and itself.
    """

    block: int

    def allowed(self, query_index: Int[Array, "..."], key_index: Int[Array, "..."], start: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Returns block of key <= block of query; blocks are counted from index 0."""
        return _blocks(key_index, self.block) <= _blocks(query_index, self.block)

    def ranges(self, first: int, last: int) -> Ranges:
        """Returns the keys up to the end of the last query's block."""
        return ((0, (last // self.block + 1) * self.block),)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class CleanNoisy(Mask):
    """Rows [clean ; noisy], `length` of each, the second half standing at the positions of the first. Block 1, length 2:

    x . . .
    x x . .
    . . x .
    x . . x

    A clean row reads clean ones block-causally (with `causal`: up to itself), and what is in the cache. A noisy row reads the clean rows
    of earlier blocks, and the noisy ones of its own (with `causal`: up to itself). So one forward gives, at every noisy row, what denoising
    its block on a clean prefix gives (BD3-LM, arXiv 2503.09573, section 4; it writes the halves the other way round. Clean first, the
    clean rows' keys lie where the cache wants them, and accepted drafts are kept by moving its frontier).
    """

    block: int
    length: int
    causal: bool = False
    frozen: bool = False  # no gradient goes through the clean rows' attention: nothing that is trained moves them

    def allowed(self, query_index: Int[Array, "..."], key_index: Int[Array, "..."], start: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Returns the rule above. With a cache, `start` is a multiple of `block`."""
        noisy, at = self._place(query_index, start)
        first = _blocks(at, self.block) * self.block
        # As two ranges of keys for each query: the arithmetic is by the row, a score costs three comparisons, and TPUs don't select bools.
        upto = jnp.minimum(at + 1 if self.causal else first + self.block, start + self.length)
        clean = key_index < jnp.where(noisy, first, upto)
        own = (key_index >= jnp.where(noisy, first + self.length, ALL)) & (key_index < upto + self.length)
        return clean | own

    def ranges(self, first: int, last: int) -> Ranges:
        """Returns the clean keys that clean and noisy queries among them read, and the noisy ones."""
        clean, noisy = min(last, self.length - 1), (max(first - self.length, 0), last - self.length)
        behind = lambda at: at + 1 if self.causal else min((at // self.block + 1) * self.block, self.length)
        upto = behind(clean) if first <= clean else 0
        if noisy[1] < 0:
            return ((0, upto),)
        upto = max(upto, noisy[1] // self.block * self.block)
        own = self.length + noisy[0] // self.block * self.block, self.length + behind(noisy[1])
        return ((0, upto), own) if upto else (own,)

    def _place(self, index: Array, start: Array) -> tuple[Array, Array]:
        noisy = index >= start + self.length
        return noisy, jnp.where(noisy, index - self.length, index)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Tail(Mask):
    """The first row reads what lies before it and itself, the rows behind it read everything: a settled token, and a draft behind it.

    x . . .
    x x x x
    x x x x
    x x x x
    """

    def allowed(self, query_index: Int[Array, "..."], key_index: Int[Array, "..."], start: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Returns key <= query, or any key where the query is behind the first row."""
        return (key_index <= query_index) | (query_index > start)

    def ranges(self, first: int, last: int) -> Ranges:
        """Returns all keys, or the first where the first query is alone."""
        return ((0, ALL if last else 1),)


@struct.dataclass
class Ancestors(Mask):
    """Row n reads what lies before the pass, and the rows m of the pass where ancestors[:, n, m]. Of a root, two children, and a child of
    the first of these:

    x . . .
    x x . .
    x . x .
    x x . x

    So one pass runs every path of a tree as a sequence of its own (arXiv 2305.09781, tree attention), if a row's rotary position is its
    depth behind the cache. A row that may read no other still reads itself.
    """

    ancestors_BNN: Any  # [B N N] bool, each row itself among them (ops/trees.py)

    def allowed(self, query_index: Int[Array, "..."], key_index: Int[Array, "..."], start: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Returns the rule above, [B Q S]; the indices are [B or 1, Q, 1] and [B or 1, 1, S], start [B or 1, 1, 1], rows N at most."""
        row_BQ1, column_B1S = query_index - start, key_index - start
        (batch, nodes, _), queries = self.ancestors_BNN.shape, query_index.shape[1]
        path_BQN = jnp.take_along_axis(self.ancestors_BNN, jnp.broadcast_to(row_BQ1, (batch, queries, 1)), 1)
        # A product with a one-hot in place of a gather of single bits, which is slow on accelerators.
        here_BNS = jnp.broadcast_to(column_B1S, (batch, *column_B1S.shape[1:])) == jnp.arange(nodes)[None, :, None]
        own_BQS = jnp.einsum("bqn,bns->bqs", path_BQN.astype(jnp.float32), here_BNS.astype(jnp.float32)) > 0
        return own_BQS | (column_B1S < 0)

    def ranges(self, first: int, last: int) -> Ranges:
        """Returns all rows: the tree is data."""
        return ((0, ALL),)


def _blocks(index: Array, block: int) -> Array:
    return lax.div(index, jnp.asarray(block, index.dtype))  # `//` rounds towards minus infinity, which takes more instructions


full = Full()
causal = Causal()
tail = Tail()
