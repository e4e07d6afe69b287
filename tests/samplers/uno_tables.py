"""A table model for speculative samplers with a gated drafter, and the law of a sampler over it by all scripts.

The target's law of the next token is a table over texts; the draft's, one over (the text that is settled, the noise ids read so far). No
law is shared, and both have zeros. The model watches over what a row reads: see Functions.forward.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dllm.ops.draws import enumerate_scripts
from dllm.ops.settings import make_settings
from dllm.samplers import psi_spec
from dllm.samplers.loop import make_prompt


@struct.dataclass
class RowCache:
    """In place of keys and values: what the rows were."""

    tokens: Any  # [B S]
    positions: Any  # [B S]
    gates: Any  # [B S]
    lengths_B: Any

    def write(self, *rows):
        slot_BQ = self.lengths_B[:, None] + jnp.arange(rows[0].shape[1])[None]
        put = lambda into, row: into.at[jnp.arange(len(slot_BQ))[:, None], slot_BQ].set(row, mode="drop")
        return self.replace(**{name: put(getattr(self, name), row) for name, row in zip(("tokens", "positions", "gates"), rows)})


@dataclasses.dataclass(frozen=True)
class Functions:
    """The seam of an uno model, served from tables."""

    target: np.ndarray  # [texts V]
    draft: np.ndarray  # [texts noises V]
    length: int
    lead: int = 0
    noise_low: int = 1
    noise_range: int = 2
    block: int = 2

    @property
    def vocab(self):
        return self.target.shape[-1]

    @property
    def ids(self):
        return self.vocab + self.lead

    def make_noise(self, ids):
        return self.noise_low + ids

    def empty_cache(self, batch, slots):
        none = jnp.full((batch, slots), -1, jnp.int32)
        return RowCache(none, none, none, jnp.zeros((batch,), jnp.int32))

    def forward(self, cache, tokens_BQ, positions_BQ, mask, at_BW=None, segment_BQ=None, gate_BQ=None):
        """Returns (logits, cache). Logits are NaN, which no law survives, unless the rows that a row reads are one for each position up to
        its own, the first BOS if lead, then text, then noise; and of noise there is none but for a gated row, which is noise itself."""
        gate_BQ = jnp.zeros_like(tokens_BQ) if gate_BQ is None else gate_BQ.astype(jnp.int32)
        cache = cache.write(tokens_BQ, positions_BQ, gate_BQ)
        start_B11, queries, slots = cache.lengths_B[:, None, None], tokens_BQ.shape[1], cache.tokens.shape[1]
        key_11S = jnp.arange(slots)[None, None]
        read_BQS = mask.allowed(start_B11 + jnp.arange(queries)[None, :, None], key_11S, start_B11) & (key_11S < start_B11 + queries)
        token_B1S, at_B1S, noisy_B1S = (x[:, None] for x in (cache.tokens, cache.positions, cache.gates == 1))
        text_BQS, noise_BQS = read_BQS & ~noisy_B1S, read_BQS & noisy_B1S
        texts_BQ1 = text_BQS.sum(-1, keepdims=True)

        place = jnp.arange(slots)[None, None, :, None]
        each_BQP = (read_BQS[:, :, None] & (at_B1S[:, :, None] == place)).sum(-1)
        right = (each_BQP == (place[..., 0] <= positions_BQ[:, :, None])).all(-1)
        right &= (~text_BQS | (at_B1S < texts_BQ1)).all(-1)
        right &= jnp.where(gate_BQ == 1, noise_BQS.any(-1), ~noise_BQS.any(-1))
        right &= (~text_BQS | ((token_B1S == self.vocab) == (at_B1S < self.lead))).all(-1)

        weigh = lambda where, digit, base, most: jnp.where(
            where & (digit < most), (token_B1S + 1) * base ** jnp.clip(digit, 0, most), 0
        ).sum(-1)
        text_BQ = weigh(text_BQS & (at_B1S >= self.lead), at_B1S - self.lead, self.vocab + 1, self.length)
        noise_BQ = weigh(noise_BQS, at_B1S - texts_BQ1, self.ids + 1, self.block)
        law_BQV = jnp.where((gate_BQ == 1)[:, :, None], jnp.asarray(self.draft)[text_BQ, noise_BQ], jnp.asarray(self.target)[text_BQ])
        logits_BQV = jnp.where(right[:, :, None], jnp.log(law_BQV), jnp.nan)
        return (logits_BQV if at_BW is None else jnp.take_along_axis(logits_BQV, at_BW[:, :, None], 1)), cache

    def next(self, text):
        return self.target[code(text, self.vocab + 1)]

    def drafted(self, text, noise):
        return self.draft[code(text, self.vocab + 1), code(noise, self.ids + 1)]


def code(tokens, base):
    return sum((token + 1) * base**i for i, token in enumerate(tokens))


@functools.cache
def make_functions(vocab=3, length=4, drafts=2, lead=0, seed=0, good=0.5, zeros=0.1, mask=False):
    """Returns a model for texts of up to `length` tokens. The draft is `good` parts what a perfect one would know, the marginal of
    the token behind a text that isn't known; a part `zeros` of both tables is zero."""
    rng, ids = np.random.default_rng(seed), vocab + lead
    codes, noises = (vocab + 1) ** length, (ids + 1) ** drafts
    target, draft = rng.dirichlet(np.ones(vocab), codes), rng.dirichlet(np.ones(vocab), (codes, noises))
    keep = lambda law: sparse(law, rng.random(law.shape) < zeros)
    functions = Functions(keep(target), draft, length, lead, 1, 2, drafts)
    if mask:
        functions = dataclasses.replace(functions, noise_low=vocab if lead else 0, noise_range=1)
    for size in range(length):
        for text in itertools.product(range(vocab), repeat=size):
            for depth in range(1, min(drafts, length - size - 1) + 1):
                at = [code(noise, ids + 1) for noise in itertools.product(range(ids), repeat=depth)]
                mix = good * marginal(functions, text, depth) + (1 - good) * draft[code(text, vocab + 1), at]
                draft[code(text, vocab + 1), at] = mix
    return dataclasses.replace(functions, draft=keep(draft))


def sparse(law, zero):
    """The law without some of its tokens, but for the likeliest."""
    law = np.where(zero & (law < law.max(-1, keepdims=True)), 0, law)
    return law / law.sum(-1, keepdims=True)


def marginal(functions, text, depth):
    """The target's law of the token behind `depth` unknown ones."""
    law = functions.next(text)
    return law if not depth else sum(p * marginal(functions, (*text, token), depth - 1) for token, p in enumerate(law))


def shaped(law, temperature=1.0, top_k=0, top_p=1.0, banned=()):
    """What the settings make of a law, from their definition."""
    law = np.where(np.isin(np.arange(len(law)), banned), 0, law)
    order = np.argsort(-law, kind="stable")
    if temperature == 0:
        return np.eye(len(law))[order[0]]
    law = law ** (1 / temperature)
    law[order[top_k or len(law) :]] = 0
    law = law / law.sum()
    before = np.cumsum(law[order]) - law[order]
    law[order[before >= top_p]] = 0
    return law / law.sum()


def autoregressive_law(functions, prefix, stop=(), max_new=None, **shape):
    """{text: probability} token by token."""
    end = min(functions.length, len(prefix) + (max_new or functions.length))

    def walk(text, weight):
        if len(text) == end or (len(text) > len(prefix) and text[-1] in stop):
            return {text: weight}
        law = shaped(functions.next(text), **shape)
        return {k: p for token in np.flatnonzero(law) for k, p in walk((*text, int(token)), weight * law[token]).items()}

    return walk(tuple(prefix), 1.0)


def split(draws, batch):
    """The script of one run as that of a batch: stretch b of its positions is row b's."""
    rows = lambda x: jnp.moveaxis(x.reshape(x.shape[0], batch, -1, *x.shape[2:]), 1, 0)
    grids = ("script", "taken", "uses", "time", "law")
    other = {name: jnp.zeros((batch,), getattr(draws, name).dtype) for name in ("log_prob", "clock", "outside")}
    return draws.replace(**{name: rows(getattr(draws, name)) for name in grids}, **other)


def joined(draws):
    """The record of a batch as that of one run."""
    rows = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
    grids = {name: rows(getattr(draws, name)) for name in ("script", "taken", "uses", "time", "law")}
    return draws.replace(**grids, log_prob=draws.log_prob.sum(), clock=draws.clock.max(), outside=draws.outside.any())


def enumerated(functions, options, prefix=(), *, neighbour=None, rows=512, **settings):
    """The law of the texts by all scripts through the production loop. Their log-probabilities are checked against the target's.

    neighbour: (prefix, settings) of the other rows of the batch, as many as are enumerated.
    """
    mine = make_settings(rows, functions.vocab, **settings)
    prompt = make_prompt([list(prefix)] * rows, functions.length)
    if neighbour:
        theirs = make_settings(rows, functions.vocab, **neighbour[1])
        assert mine.stop.shape == theirs.stop.shape
        both = lambda a, b: jax.tree.map(lambda x, y: jnp.concatenate([x, y]), a, b)
        filtered = mine.filtered or theirs.filtered
        mine = both(mine.replace(filtered=filtered), theirs.replace(filtered=filtered))
        prompt = both(prompt, make_prompt([list(neighbour[0])] * rows, functions.length))

    @jax.jit
    def run(draws):
        if neighbour:
            draws = jax.tree.map(lambda x: jnp.concatenate([x, x[::-1]]), draws)
        samples = psi_spec.sample(functions, options, mine, draws, prompt)
        out = samples.tokens, samples.lengths, samples.logprobs
        return jax.tree.map(lambda x: x[:rows], (out, samples.draws))

    law = defaultdict(float)
    cycles = functions.length * options.steps
    shape = {k: v for k, v in settings.items() if k not in ("stop", "max_new")}
    for probability, (tokens, end, logprobs) in enumerate_scripts(
        run, length=functions.length, cycles=cycles, vocab=functions.ids, rows=rows
    ):
        text = tuple(tokens[: int(end)].tolist())
        expect = [shaped(functions.next(text[:i]), **shape)[text[i]] for i in range(len(prefix), len(text))]
        assert np.allclose(np.exp(logprobs[len(prefix) : len(text)]), expect, atol=1e-5), "wrong law, or its logprobs"
        law[text] += probability
    assert abs(sum(law.values()) - 1) < 1e-10, "wrong law, none at all: a row reads what it must not, or the law depends on what is no draw"
    return dict(law)


def enumerated_batch(functions, options, prefixes, *, cycles=None, rows=256, **settings):
    """{(text of each row): probability} of whole batches, for samplers whose rows may act on each other; and which numbers of query rows
    came about."""
    batch, per_row = len(prefixes), make_settings(len(prefixes), functions.vocab, **settings)
    prompt = make_prompt([list(prefix) for prefix in prefixes], functions.length)

    def one(draws):
        samples = psi_spec.sample(functions, options, per_row, split(draws, batch), prompt)
        return (samples.tokens, samples.lengths, samples.passes.query_tokens), joined(samples.draws)

    law, lengths, cycles = defaultdict(float), set(), cycles or functions.length * options.steps
    every = enumerate_scripts(jax.jit(jax.vmap(one)), length=batch * functions.length, cycles=cycles, vocab=functions.ids, rows=rows)
    for probability, (tokens, ends, queries) in every:
        law[tuple(tuple(row[: int(end)].tolist()) for row, end in zip(tokens, ends))] += probability
        lengths.add(tuple(queries.tolist()))
    assert abs(sum(law.values()) - 1) < 1e-10, "wrong law, none at all: a row reads what it must not, or the law depends on what is no draw"
    return dict(law), lengths


def distance(a, b):
    """Total variation."""
    return sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys()) / 2
