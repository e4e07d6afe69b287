"""What a request may ask of a sampler, one value a row, and the one function that turns logits into the law that is drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from dllm.core.types import UserError
from dllm.ops.draws import float32_at_least

UNLIMITED = np.iinfo(np.int32).max


@struct.dataclass
class Settings:
    """Settings per request. Ids are padded with -1."""

    temperature: Any  # [B] float32; 0 is argmax, ties to the lowest id
    top_k: Any  # [B] int32, keep the k likeliest; 0: all
    top_p: Any  # [B] float32, keep the smallest set of the likeliest tokens that holds this mass; 1: all
    min_p: Any  # [B] float32, keep what is at least this fraction of the likeliest; 0: all
    banned: Any  # [B T] int32, ids that never appear
    max_new: Any  # [B] int32, left-to-right samplers only
    stop: Any  # [B T] int32, ids that end a sequence; left-to-right samplers only
    filtered: bool = struct.field(pytree_node=False, default=False)  # static: whether any row uses top_k, top_p or min_p (they sort)


def make_settings(
    batch: int,
    vocab: int,
    *,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    banned: Sequence[int] = (),
    max_new: int | Sequence[int] | None = None,
    stop: Sequence[int] = (),
) -> Settings:
    """Returns Settings for `batch` rows; a single number serves all of them. Raises UserError that names the setting out of range."""
    row = lambda value, dtype: np.broadcast_to(np.asarray(value, dtype), (batch,))
    ids = lambda value: np.broadcast_to(np.asarray(value, np.int32).reshape(1, -1), (batch, len(value)))
    numbers = dict(
        temperature=row(temperature, np.float32), top_k=row(top_k, np.int32), top_p=row(top_p, np.float32), min_p=row(min_p, np.float32)
    )
    numbers["max_new"] = row(UNLIMITED if max_new is None else max_new, np.int32)
    lists = dict(banned=ids(banned), stop=ids(stop))
    ranges = {
        "temperature": ("0 or more", lambda x: (x >= 0) & np.isfinite(x)),
        "top_k": ("0 (off) or more", lambda x: x >= 0),
        "top_p": ("above 0, at most 1", lambda x: (x > 0) & (x <= 1)),
        "min_p": ("0 (off) or more, below 1", lambda x: (x >= 0) & (x < 1)),
        "max_new": ("1 or more, or left out for no limit", lambda x: x >= 1),
    }
    for name, (range_, ok) in ranges.items():
        if not ok(numbers[name]).all():
            raise UserError(f"setting {name} must be {range_}, got {numbers[name][~ok(numbers[name])][0]}")
    for name, value in lists.items():
        if ((value < 0) | (value >= vocab)).any():
            raise UserError(f"setting {name} holds an id outside the vocabulary of {vocab}")
    if len(set(banned)) >= vocab:
        raise UserError("setting banned leaves no token to draw")
    filtered = bool((numbers["top_k"] > 0).any() or (numbers["top_p"] < 1).any() or (numbers["min_p"] > 0).any())
    return Settings(**{k: jnp.asarray(v) for k, v in {**numbers, **lists}.items()}, filtered=filtered)


def shape_logits(logits: Float[Array, "B W V"], settings: Settings) -> Float[Array, "B W V"]:
    """Returns the log-probabilities of the law that a request asked for: banned ids out, temperature, then top-k, top-p, min-p.

    Draft and target both pass through here; a speculative sampler's law is that of the shaped target. At least float32.
    """
    logits = float32_at_least(logits)
    vocab = logits.shape[-1]
    row = lambda x: x[:, None, None]
    if settings.banned.shape[1]:
        banned_BV = (settings.banned[:, :, None] == jnp.arange(vocab)[None, None]).any(1)
        logits = jnp.where(banned_BV[:, None], -jnp.inf, logits)
    id_V = jnp.arange(vocab, dtype=jnp.int32)[None, None]
    highest = logits == logits.max(-1, keepdims=True)
    best = id_V == jnp.where(highest, id_V, vocab).min(-1, keepdims=True)  # argmax; XLA's own takes several times as long on CPU
    greedy = row(settings.temperature) == 0
    logits = logits / jnp.where(greedy, 1, row(settings.temperature)).astype(logits.dtype)
    logits = jnp.where(greedy, jnp.where(best, jnp.zeros_like(logits), -jnp.inf), logits)
    if settings.filtered:
        logits = _filter(logits, row(settings.top_k), row(settings.top_p), row(settings.min_p))
    return jax.nn.log_softmax(logits)


def _filter(logits: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    order = jnp.argsort(-logits, -1, stable=True)  # ties to the lowest id
    rank = jnp.argsort(order, -1)
    logits = jnp.where((top_k == 0) | (rank < top_k), logits, -jnp.inf)
    sorted_probs = jnp.take_along_axis(jax.nn.softmax(logits), order, -1)
    before = jnp.take_along_axis(jnp.cumsum(sorted_probs, -1) - sorted_probs, rank, -1)  # mass of the likelier ones
    logits = jnp.where((before < top_p) | (rank == 0) | (top_p == 1), logits, -jnp.inf)
    return jnp.where(logits >= logits.max(-1, keepdims=True) + jnp.log(min_p), logits, -jnp.inf)
