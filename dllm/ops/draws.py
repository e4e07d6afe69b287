"""The one door to randomness in samplers.

A draw is named by its *slot*: (purpose, request, position, cycle). `KeyedDraws` folds the slot into a key, so that a request's tokens
don't depend on its neighbours in the batch and no randomness is used twice. `ScriptedDraws` (tests) replays a written script in place
of chance, and notes the log-probability of what it replayed under the logits it was handed; `enumerate_scripts` walks through all
scripts. The law of a sampler is then the sum over scripts through the very program that production runs.

Both doors are pytrees that a sampler threads through its loop: each function returns (outcome, draws).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int


class Purpose(enum.IntEnum):
    ORDER = 0  # the order in which a sequence is revealed
    DRAFT = 1  # tokens of the draft
    ACCEPT = 2  # accept tests
    RESIDUAL = 3  # the token after a rejection
    TOKEN = 4  # tokens of samplers without a draft
    NOISE = 5  # what stands in rows that a draft is read from
    CLEAN = 6  # the target's own token before a draft


class Slot(NamedTuple):
    """The name of W draws in each of B rows. The request is known to the door. `where` is False at what is no draw: the door then
    returns something arbitrary there and takes no note."""

    purpose: Purpose
    position: Int[Array, "B W"]
    cycle: Int[Array, "B"]
    where: Bool[Array, "B W"]


@struct.dataclass
class KeyedDraws:
    """Chance, from a typed key and the request number of each row."""

    key: Any  # [] typed key
    request: Any  # [B] int32


@struct.dataclass
class ScriptedDraws:
    """A script of outcomes for B independent runs, and the record of how it went. P purposes, L positions, C cycles."""

    script: Any  # [B P L C] int32, the outcome of a slot; -1 where the script is silent: the likeliest outcome is then taken
    taken: Any  # [B P L C] int32, the outcome that the run got; -1 where it never asked
    uses: Any  # [B P L C] int32
    time: Any  # [B P L C] int32, when the slot was asked for, in the order in which outcomes may depend on each other
    law: Any  # [B P L C V] log-probabilities of the outcomes of a slot
    log_prob: Any  # [B] of all that was taken
    clock: Any  # [B] int32
    outside: Any  # [B] bool, a slot was beyond L or C


Draws = KeyedDraws | ScriptedDraws
WIDE = 128


def float32_at_least(x: Array) -> Array:
    """Returns x in float32, or in float64 if it was float64 (the tests' precision)."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def categorical(draws: Draws, slot: Slot, logits: Float[Array, "B W V"]) -> tuple[Int[Array, "B W"], Draws]:
    """Returns a draw from softmax(logits) for each slot.

    Gumbel noise of full range: JAX's default float32 noise never exceeds 16 or so, which biases events rarer than 1e-7. A vocabulary of
    WIDE or more is drawn from in two stages.
    """
    logits = float32_at_least(logits)
    if isinstance(draws, KeyedDraws):
        wide = logits.shape[-1] >= WIDE
        draw = _in_two_stages if wide else lambda key, row: jax.random.categorical(key, row, mode="high")
        return jax.vmap(jax.vmap(draw))(_keys(draws, slot), logits).astype(jnp.int32), draws
    return _replay(draws, slot, jax.nn.log_softmax(logits))


def uniform(draws: Draws, slot: Slot, count: int) -> tuple[Int[Array, "B W"], Draws]:
    """Returns a uniform draw from range(count) for each slot."""
    if isinstance(draws, KeyedDraws):
        return jax.vmap(jax.vmap(lambda key: jax.random.randint(key, (), 0, count, jnp.int32)))(_keys(draws, slot)), draws
    return _replay(draws, slot, jnp.full((*slot.position.shape, count), -jnp.log(float(count)), draws.log_prob.dtype))


def first(draws: Draws, slot: Slot, log_p: Float[Array, "B W"], outcome: bool) -> tuple[Int[Array, "B"], Draws]:
    """Returns the first column whose Bernoulli trial (success with probability exp(log_p)) ends in `outcome`, W where none does.

    Columns outside slot.where are passed over. Trials behind the column that is returned have no influence, and are no draws.
    """
    columns = log_p.shape[1]
    if isinstance(draws, KeyedDraws):
        noise = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (), log_p.dtype, mode="high")))(_keys(draws, slot))
        success = -jnp.exp(-noise) < log_p  # exp(-Gumbel) is Exponential(1), minus which is log U, of full range and never 0
        hit = slot.where & (success == outcome)
        return jnp.where(hit.any(1), hit.argmax(1), columns).astype(jnp.int32), draws
    law = jnp.stack([_log1mexp(log_p), log_p], -1)
    success, _ = _look(draws, slot, law)
    hit = slot.where & ((success == 1) == outcome)
    asked = slot.where & (jnp.cumsum(hit, 1) - hit == 0)
    _, draws = _replay(draws, slot._replace(where=asked), law)
    return jnp.where(hit.any(1), hit.argmax(1), columns).astype(jnp.int32), draws


def permutation(draws: Draws, length: int) -> Int[Array, "B L"]:
    """Returns a uniform order of `length` positions for each row."""
    if not isinstance(draws, KeyedDraws):
        raise TypeError("a scripted run needs its order handed to it")
    one = lambda request: jax.random.permutation(_fold(draws.key, request, Purpose.ORDER), length)
    return jax.vmap(one)(draws.request).astype(jnp.int32)


def _fold(key: Array, *names: Any) -> Array:
    for name in names:
        key = jax.random.fold_in(key, name)
    return key


def _keys(draws: KeyedDraws, slot: Slot) -> Array:
    row = lambda request, cycle, position: jax.vmap(jax.random.fold_in, (None, 0))(_fold(draws.key, request, slot.purpose, cycle), position)
    return jax.vmap(row)(draws.request, slot.cycle, slot.position)


def _in_two_stages(key: Array, row: Array) -> Array:
    """Returns a draw from softmax(row): a group of about sqrt(V) ids by its mass, then an id in it.

    The same law, from some 2 sqrt(V) noises in place of V: of 151,936 ids, 13 ms of CPU time a draw become half a millisecond.
    """
    width = math.isqrt(len(row))
    row = jnp.pad(row, (0, -len(row) % width), constant_values=-jnp.inf).reshape(-1, width)
    group_key, key = jax.random.split(key)
    group = jax.random.categorical(group_key, jax.nn.logsumexp(row, -1), mode="high")
    return group * width + jax.random.categorical(key, row[group], mode="high")


def _log1mexp(x: Array) -> Array:
    """Returns log(1 - exp(x)) for x <= 0."""
    return jnp.log(-jnp.expm1(x))


def _index(draws: ScriptedDraws, slot: Slot) -> tuple[tuple[Array, ...], Array]:
    _, _, length, cycles = draws.script.shape
    cycle = jnp.broadcast_to(slot.cycle[:, None], slot.position.shape)
    inside = (slot.position >= 0) & (slot.position < length) & (cycle < cycles)
    row = jnp.broadcast_to(jnp.arange(len(slot.position))[:, None], slot.position.shape)
    return (row, jnp.full_like(row, slot.purpose), slot.position, cycle), inside


def _look(draws: ScriptedDraws, slot: Slot, law: Array) -> tuple[Array, Array]:
    at, inside = _index(draws, slot)
    scripted = draws.script.at[at].get(mode="clip")
    return jnp.where(scripted >= 0, scripted, law.argmax(-1)).astype(jnp.int32), inside


def _replay(draws: ScriptedDraws, slot: Slot, law: Array) -> tuple[Array, ScriptedDraws]:
    outcome, inside = _look(draws, slot, law)
    at, _ = _index(draws, slot)
    noted = slot.where & inside
    at = (jnp.where(noted, at[0], draws.script.shape[0]), *at[1:])  # out of range, hence dropped
    log_prob = jnp.where(slot.where, jnp.take_along_axis(law, outcome[:, :, None], 2)[:, :, 0], 0).sum(1)
    padded = jnp.full((*law.shape[:2], draws.law.shape[-1]), -jnp.inf, draws.law.dtype).at[:, :, : law.shape[-1]].set(law)
    time = draws.clock[:, None] + jnp.arange(slot.position.shape[1], dtype=jnp.int32)[None]
    return outcome, draws.replace(
        taken=draws.taken.at[at].set(outcome, mode="drop"),
        uses=draws.uses.at[at].add(1, mode="drop"),
        time=draws.time.at[at].set(time, mode="drop"),
        law=draws.law.at[at].set(padded, mode="drop"),
        log_prob=draws.log_prob + log_prob,
        clock=draws.clock + slot.position.shape[1],
        outside=draws.outside | (slot.where & ~inside).any(1),
    )


def scripted(scripts: np.ndarray, vocab: int, dtype: Any) -> ScriptedDraws:
    """Returns fresh ScriptedDraws for scripts [B P L C]; `vocab` is the largest number of outcomes of a slot, at least 2."""
    rows, silent = scripts.shape[0], np.full(scripts.shape, -1, np.int32)
    law = np.full((*scripts.shape, max(vocab, 2)), -np.inf, dtype)
    zero = np.zeros(rows, np.int32)
    return jax.tree.map(jnp.asarray, ScriptedDraws(scripts, silent, silent * 0, silent, law, np.zeros(rows, dtype), zero, zero > 0))


def enumerate_scripts(
    run: Callable[[ScriptedDraws], tuple[Any, ScriptedDraws]],
    *,
    length: int,
    cycles: int,
    vocab: int,
    rows: int = 256,
    dtype: Any = np.float64,
) -> Iterator[tuple[float, Any]]:
    """Yields (probability, output of the row) for every run that a sampler can make.

    `run` takes ScriptedDraws of `rows` rows and returns (arrays [rows, ...], the draws after the run); rows must not influence each other.
    A run with a silent script takes the likeliest outcome everywhere. Each slot that it asked for, with what went before it, is then
    a fork: one new script for every other outcome of positive probability. Every leaf of the tree is run once.

    Raises AssertionError on a slot used twice (reused noise) and on one beyond `length` or `cycles`.
    """
    purposes = len(Purpose)
    waiting = [np.full((purposes, length, cycles), -1, np.int32)]
    while waiting:
        batch, waiting = waiting[-rows:], waiting[:-rows]
        padded = np.stack(batch + [batch[0]] * (rows - len(batch)))
        output, draws = jax.device_get(run(scripted(padded, vocab, dtype)))
        assert not draws.outside.any(), "a draw beyond the given length or cycles"
        assert draws.uses.max() <= 1, "a slot was used twice: its noise would be reused"
        for row, script in enumerate(batch):
            yield float(np.exp(draws.log_prob[row])), jax.tree.map(lambda x, row=row: x[row], output)
            slots = np.argwhere(draws.uses[row] > 0)
            slots = slots[np.argsort(draws.time[row][tuple(slots.T)])]
            path = script.copy()
            for slot in map(tuple, slots):
                if script[slot] < 0:
                    for other in np.flatnonzero(draws.law[row][slot] > -np.inf):
                        if other != draws.taken[row][slot]:
                            fork = path.copy()
                            fork[slot] = other
                            waiting.append(fork)
                path[slot] = draws.taken[row][slot]
