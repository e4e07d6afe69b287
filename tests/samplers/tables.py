"""Table models, and the exact laws of the samplers over them by direct enumeration: written from the algorithms, not from the code.

Everything is in rank order. draft[i][code(x[:i])][d] is the draft law of rank d after i revealed; target[i][code(x[:d])][d] that of the
target. No law is shared between states, so nothing that a sampler could mix up gives the same numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Tables:
    draft: np.ndarray  # [D, V^D, D, V] probabilities
    target: np.ndarray

    @property
    def length(self) -> int:
        return self.draft.shape[0]

    @property
    def vocab(self) -> int:
        return self.draft.shape[-1]

    def code(self, tokens) -> int:
        return sum(t * self.vocab**r for r, t in enumerate(tokens))

    def p(self, prefix, d):
        return self.draft[len(prefix), self.code(prefix), d]

    def q(self, i, before):
        """The target of rank len(before) when i are revealed; the first rank of all has its draft for a target."""
        return self.p((), 0) if not before else self.target[i, self.code(before), len(before)]


def make_tables(vocab: int, length: int, seed: int = 0, sparse: bool = False) -> Tables:
    rng = np.random.default_rng(seed)
    shape = (length, vocab**length, length)
    draft, target = (rng.dirichlet(np.full(vocab, 0.7), shape) for _ in range(2))
    if sparse:  # the target forbids a token here and there
        target = np.where(rng.random(target.shape) < 0.25, 0, target) + 1e-300
        target /= target.sum(-1, keepdims=True)
    return Tables(draft, target)


@dataclasses.dataclass(frozen=True)
class Functions:
    """The seam of a hybrid model, served from tables."""

    tables: Tables
    target_is_draft: bool = False

    @property
    def vocab(self):
        return self.tables.vocab

    @property
    def length(self):
        return self.tables.length

    def _codes(self, tokens_BL):  # [B, L]: code of the tokens of ranks < d
        weighted = tokens_BL * (self.vocab ** jnp.arange(self.length))[None]
        return jnp.cumsum(weighted, 1) - weighted

    def draft(self, tokens_BL, order_BL, revealed_B, window):
        i_B1 = jnp.minimum(revealed_B, self.length - 1)[:, None]
        code_B1 = jnp.take_along_axis(self._codes(tokens_BL), i_B1, 1)
        rank_BW = jnp.minimum(revealed_B[:, None] + jnp.arange(window)[None], self.length - 1)
        logits_BWV = jnp.log(jnp.asarray(self.tables.draft)[i_B1, code_B1, rank_BW])
        return logits_BWV, logits_BWV

    def verify(self, hidden, tokens_BL, order_BL, start_B, window):
        if self.target_is_draft:
            return hidden
        rank_BW = jnp.minimum(start_B[:, None] + jnp.arange(window)[None], self.length - 1)
        code_BW = jnp.take_along_axis(self._codes(tokens_BL), rank_BW, 1)
        return jnp.log(jnp.asarray(self.tables.target)[jnp.minimum(start_B, self.length - 1)[:, None], code_BW, rank_BW])


def _judge_chain(tables, i, done, drafts):
    """Yields (probability, settled tokens, drafts behind them) of one chain verification."""
    reach = 1.0
    for t, token in enumerate(drafts):
        before = done + drafts[:t]
        p, q = tables.p(done[:i], len(before)), tables.q(i, before)
        accept = min(1.0, q[token] / p[token])
        excess = np.maximum(0, q - p)
        for v in range(tables.vocab):
            if accept < 1 and excess[v] > 0:
                yield reach * (1 - accept) * excess[v] / excess.sum(), (*before, v), drafts[t + 1 :]
        reach *= accept
    yield reach, done + drafts, ()


def _judge_block(tables, i, done, drafts):
    """Yields (probability, settled tokens) of one block verification."""
    n = len(drafts)
    p = [tables.p(done[:i], len(done) + t) for t in range(n)]
    q = [tables.q(i, done + drafts[:t]) for t in range(n)]
    weight = [1.0]
    for t in range(n):
        weight.append(min(1.0, weight[-1] * q[t][drafts[t]] / p[t][drafts[t]]))
    excess = [np.maximum(0, weight[t] * q[t] - p[t]) for t in range(n)]
    passes = [1.0]
    for t in range(1, n + 1):
        mass = excess[t].sum() if t < n else 0
        passes.append(weight[n] if t == n else 1.0 if weight[t] == 1 else mass / (mass + 1 - weight[t]))
    longer_fail = 1.0
    for t in range(n, -1, -1):
        reach, longer_fail = longer_fail * passes[t], longer_fail * (1 - passes[t])
        if t == n:
            yield reach, done + drafts
        elif reach > 0:
            law = excess[t] / excess[t].sum() if excess[t].sum() > 0 else q[t]
            for v in range(tables.vocab):
                yield reach * law[v], (*done, *drafts[:t], v)


def law_self_speculative(tables: Tables, window, n_verify: int, verification: str) -> dict:
    out = defaultdict(float)

    def drafts_from(i_prefix, first, end):
        laws = [tables.p(i_prefix, d) for d in range(first, end)]
        for drafts in itertools.product(range(tables.vocab), repeat=end - first):
            yield float(np.prod([law[v] for law, v in zip(laws, drafts, strict=True)])), drafts

    def outer(done, weight):
        if weight == 0:
            return
        if len(done) == tables.length:
            out[done] += weight
            return
        i, end = len(done), min(len(done) + window(len(done)), tables.length)
        for prob, drafts in drafts_from(done, i, end):
            inner(i, end, done, drafts, 0, weight * prob)

    def inner(i, end, done, drafts, n, weight):
        if weight == 0:
            return
        if len(done) == end or n == n_verify:
            outer(done, weight)
        elif verification == "chain":
            for prob, settled, behind in _judge_chain(tables, i, done, drafts):
                inner(i, end, settled, behind, n + 1, weight * prob)
        else:
            for prob, settled in _judge_block(tables, i, done, drafts):
                if n + 1 == n_verify:
                    inner(i, end, settled, (), n + 1, weight * prob)
                else:
                    for again, behind in drafts_from(done[:i], len(settled), end):
                        inner(i, end, settled, behind, n + 1, weight * prob * again)

    outer((), 1.0)
    return dict(out)


def law_of_target(tables: Tables, window) -> dict:
    """Windows drawn autoregressively from the target: the limit of many verifications."""
    out = {}
    for x in itertools.product(range(tables.vocab), repeat=tables.length):
        weight, i = 1.0, 0
        while i < tables.length:
            end = min(i + window(i), tables.length)
            for d in range(i, end):
                weight *= tables.q(i, x[:d])[x[d]]
            i = end
        out[x] = weight
    return out


def law_ancestral(tables: Tables, window) -> dict:
    out = {}
    for x in itertools.product(range(tables.vocab), repeat=tables.length):
        weight, i = 1.0, 0
        while i < tables.length:
            end = min(i + window(i), tables.length)
            for d in range(i, end):
                weight *= tables.p(x[:i], d)[x[d]]
            i = end
        out[x] = weight
    return out


def distance(a: dict, b: dict) -> float:
    """The largest difference of two laws."""
    return max(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys())
