"""A table model for block diffusion, and the laws of its decoders by direct enumeration: written from the definitions, not from the code.

The tables hold the conditionals of known joint laws, so every deviation of what comes out is the decoder's.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct


def make_joint(seed: int, vocab: int, length: int, scale: float) -> np.ndarray:
    """The joint laws of the spec's section 6: a softmax of normal logits, [V] * length."""
    logits = np.random.default_rng(seed).normal(size=(vocab,) * length) * scale
    p = np.exp(logits - logits.max())
    return p / p.sum()


def conditional(p: np.ndarray, state: tuple[int, ...], position: int) -> np.ndarray:
    """The law of `position` given the tokens of `state`, where p.shape[0] is MASK."""
    kept = p[tuple(slice(None) if token == len(p) or i == position else slice(token, token + 1) for i, token in enumerate(state))]
    law = kept.sum(tuple(i for i in range(p.ndim) if i != position))
    return law / law.sum()


def make_table(p: np.ndarray) -> np.ndarray:
    """[(V + 1)^L, L, V + 1] logits by state and position. That of MASK is the largest: whoever doesn't suppress it, draws it."""
    vocab, length = len(p), p.ndim
    table = np.full(((vocab + 1) ** length, length, vocab + 1), 5.0)
    for state in itertools.product(range(vocab + 1), repeat=length):
        for position in range(length):
            table[code(state, vocab), position, :vocab] = np.log(conditional(p, state, position))
    return table


def code(state, vocab: int) -> int:
    return sum(token * (vocab + 1) ** i for i, token in enumerate(state))


@struct.dataclass
class TokenCache:
    """In place of keys and values: the tokens of the rows that were written."""

    tokens: Any  # [B S]
    lengths_B: Any

    def write(self, tokens_BQ):
        slot_BQ = self.lengths_B[:, None] + jnp.arange(tokens_BQ.shape[1])[None]
        return self.replace(tokens=self.tokens.at[jnp.arange(len(slot_BQ))[:, None], slot_BQ].set(tokens_BQ, mode="drop"))


@dataclasses.dataclass(frozen=True)
class Functions:
    """The seam of a block-diffusion model, served from a table: a row reads the tokens of the keys that its mask allows."""

    table: Any  # [J (V + 1)^L L V + 1]
    block: int
    which_B: Any = None  # the joint law of each row; None: the first

    @property
    def mask_id(self):
        return self.table.shape[-1] - 1

    @property
    def vocab(self):
        return self.table.shape[-1]

    @property
    def length(self):
        return self.table.shape[2]

    def empty_cache(self, batch, slots):
        return TokenCache(jnp.full((batch, slots), -1, jnp.int32), jnp.zeros((batch,), jnp.int32))

    def forward(self, cache, tokens_BQ, positions_BQ, mask, at_BW=None, segment_BQ=None):
        cache = cache.write(tokens_BQ)
        start_B11, (batch, queries), slots = cache.lengths_B[:, None, None], tokens_BQ.shape, cache.tokens.shape[1]
        key_11S = jnp.arange(slots)[None, None]
        allow_BQS = mask.allowed(start_B11 + jnp.arange(queries)[None, :, None], key_11S, start_B11) & (key_11S < start_B11 + queries)
        state_BQS = jnp.where(allow_BQS, cache.tokens[:, None], self.mask_id)[:, :, : self.length]
        code_BQ = (state_BQS * (self.vocab ** jnp.arange(self.length))[None, None]).sum(-1)
        which_B = jnp.zeros((batch,), jnp.int32) if self.which_B is None else self.which_B
        logits_BQV = jnp.asarray(self.table)[which_B[:, None], code_BQ, jnp.minimum(positions_BQ, self.length - 1)]
        return (logits_BQV if at_BW is None else jnp.take_along_axis(logits_BQV, at_BW[:, :, None], 1)), cache


def choose(options, laws: dict[int, np.ndarray], drawn: dict[int, int]) -> list[int]:
    """The positions that a pass settles, of those that are open. `random` isn't here: it is a mixture."""
    entropy = {i: -sum(x * math.log(x) for x in law if x > 0) for i, law in laws.items()}
    read = {
        "max": lambda i: max(laws[i]),
        "sampled": lambda i: laws[i][drawn[i]],
        "margin": lambda i: sorted(laws[i])[-1] - sorted(laws[i])[-2],
        "neg_entropy": lambda i: -entropy[i],
    }[options.confidence]
    best = sorted(laws, key=lambda i: (-read(i), i))
    if options.select == "sequential":
        return sorted(laws)[: options.n]
    if options.select == "static":
        return best[: options.n]
    if options.select == "dynamic":
        sure = [i for i in laws if read(i) > options.tau or options.inclusive and read(i) == options.tau]
        if len(sure) >= min(options.n, len(laws)):
            return sure
        return (sorted(laws) if options.fallback == "leftmost" else best)[: options.n]
    if options.select == "entropy_bounded":
        least = sorted(laws, key=lambda i: (entropy[i], i))
        return [i for k, i in enumerate(least) if k == 0 or sum(entropy[j] for j in least[: k + 1]) < options.gamma]
    settled = best[:1]
    while len(settled) < len(best) and (len(settled) + 2) * (1 - read(best[len(settled)])) < options.factor:
        settled.append(best[len(settled)])
    return settled


def law_of_blocks(p: np.ndarray, block: int, options, prompt: tuple[int, ...] = ()) -> tuple[dict, float]:
    """(the law of the texts behind a prompt, the expected number of denoising passes)."""
    vocab, length = len(p), p.ndim
    waiting, out, passes = {prompt + (vocab,) * (length - len(prompt)): 1.0}, defaultdict(float), 0.0
    while waiting:
        after = defaultdict(float)
        for state, weight in waiting.items():
            if vocab not in state:
                out[state] += weight
                continue
            passes += weight
            first = state.index(vocab) // block * block
            laws = {i: conditional(p, state, i) for i in range(first, min(first + block, length)) if state[i] == vocab}
            for tokens in itertools.product(range(vocab), repeat=len(laws)):
                drawn = dict(zip(laws, tokens, strict=True))
                settled = choose(options, laws, drawn)
                new = tuple(drawn[i] if i in settled else token for i, token in enumerate(state))
                after[new] += weight * math.prod(laws[i][token] for i, token in drawn.items())
        waiting = after
    return dict(out), passes


def exact(p: np.ndarray, prompt: tuple[int, ...] = ()) -> dict:
    """The joint law behind a prompt."""
    texts = {prompt + rest: p[prompt + rest] for rest in itertools.product(range(len(p)), repeat=p.ndim - len(prompt))}
    total = sum(texts.values())
    return {text: x / total for text, x in texts.items()}


def variation(a: dict, b: dict) -> float:
    """Total variation distance."""
    return 0.5 * sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys())
