"""A table model of block diffusion: the exact conditionals of a joint law, read through the attention mask that it is handed.

A row predicts the token at its position given the tokens of the keys that the mask (and the segment) lets it read, without MASK. So
whatever a caller lays out wrongly, a wrong mask, position, or leaked token, gives other numbers.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Joint:
    """law [V] * L; ids 0..V-1 are tokens, V is MASK. It is a model's Functions, and its own logits are worth `mask_logit` at MASK."""

    law: np.ndarray
    block: int
    mask_logit: float = 3.0

    @property
    def length(self) -> int:
        return self.law.ndim

    @property
    def mask_id(self) -> int:
        return self.law.shape[0]

    @property
    def vocab(self) -> int:
        return self.law.shape[0] + 1

    def conditionals(self) -> np.ndarray:
        """Returns [(V+1)^L, L, V]: the law of each token given what is known; digit l of the code is token l, or V for unknown."""
        V, L = self.law.shape[0], self.length
        table = np.empty(((V + 1) ** L, L, V))
        for code, known in enumerate(itertools.product(range(V + 1), repeat=L)):
            for l in range(L):
                given = self.law[tuple(slice(None) if k == V or i == l else slice(k, k + 1) for i, k in enumerate(known))]
                table[code, l] = given.sum(tuple(i for i in range(L) if i != l)).ravel()
        return table / table.sum(-1, keepdims=True)

    def forward(self, cache, tokens_BQ, positions_BQ, mask, at_BW=None, segment_BQ=None):
        B, Q = tokens_BQ.shape
        V, L = self.law.shape[0], self.length
        reads_BQQ = jnp.broadcast_to(mask.dense(Q, Q)[None], (B, Q, Q)) & (tokens_BQ != V)[:, None]
        if segment_BQ is not None:
            reads_BQQ &= segment_BQ[:, :, None] == segment_BQ[:, None]
        there_BQL = positions_BQ[:, :, None] == jnp.arange(L)[None, None]
        known_BQL = jnp.max(jnp.where((reads_BQQ[:, :, :, None] & there_BQL[:, None]), tokens_BQ[:, None, :, None], -1), 2)
        known_BQL = jnp.where(known_BQL < 0, V, known_BQL)
        code_BQ = jnp.sum(known_BQL * (V + 1) ** jnp.arange(L - 1, -1, -1)[None, None], -1)
        logits_BQV = jnp.log(jnp.asarray(self.conditionals())[code_BQ, jnp.minimum(positions_BQ, L - 1)])
        logits_BQV = jnp.concatenate([logits_BQV, jnp.full((B, Q, 1), self.mask_logit)], -1)
        return logits_BQV if at_BW is None else jnp.take_along_axis(logits_BQV, at_BW[:, :, None], 1), cache

    def texts(self) -> np.ndarray:
        """Returns all texts [V^L, L], in the order of `law.ravel()`."""
        return np.array(list(itertools.product(range(self.law.shape[0]), repeat=self.length)), np.int32)

    def entropy(self) -> float:
        return float(-(self.law * np.log(self.law)).sum())


def random_joint(vocab: int, length: int, block: int, seed: int = 0, scale: float = 1.0) -> Joint:
    law = np.exp(np.random.default_rng(seed).normal(0, scale, (vocab,) * length))
    return Joint(law / law.sum(), block)
