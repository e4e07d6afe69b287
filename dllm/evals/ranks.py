"""What the causal half of a hybrid knows beyond its draft, by rank and window start: where self-speculative sampling gains, and how far.

Teacher-forced: held-out chunks, each in one uniform order; with the tokens of the first i ranks revealed, the draft predicts every rank
d >= i at once, and the target predicts it given the true tokens of the ranks i..d-1 as well. At each (i, d)

    gain        log2 target(x_d) - log2 draft(x_d)                 bits; its mean is the draft's cross-entropy less the target's
    acceptance  sum_v min(draft(v), target(v)) = 1 - TV            the chance that a chain accepts a draft of rank d

The averages of both over d >= i > 0 are `draft_ce - causal_ce` and `agreement` of diffusion.ssmd. A sampler's own acceptance differs in
one thing: it reads its own tokens instead of true ones.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, Key

from dllm.core.types import UserError
from dllm.diffusion.corruption import any_order
from dllm.diffusion.ssmd import cross_entropy
from dllm.evals.held_out import given

ROWS = 128  # rows of a pass, at least: chunks x starts


@dataclass(frozen=True)
class ByRank:
    """Gain (bits) and acceptance of each chunk at each window start and rank; nan at the ranks before the start, which are not drafted."""

    starts: tuple[int, ...]
    gain: np.ndarray  # [chunks, starts, ranks]
    acceptance: np.ndarray


def default_starts(length: int) -> tuple[int, ...]:
    """Returns 0, the powers of two, three quarters and the end: length 64 -> 0 1 2 4 8 16 32 48 63."""
    return tuple(sorted({0, 3 * length // 4, length - 1} | {2**k for k in range(length.bit_length()) if 2**k < length}))


def check(run: Any, starts: tuple[int, ...]) -> None:
    """Raises UserError on a model without causal layers, and on a start outside 0..L-1."""
    if not getattr(run.model_config, "n_causal", 0):
        raise UserError("the model has no causal layers, so no target to set beside its draft: give the workdir of a hybrid run")
    if bad := [i for i in starts if not 0 <= i < run.model_config.length]:
        raise UserError(f"a window can't start at rank {bad[0]}; ranks go from 0 to {run.model_config.length - 1}")


def by_rank(run: Any, tokens_BL: Integer[np.ndarray, "B L"], starts: tuple[int, ...], seed: int = 0) -> ByRank:
    """Returns gain and acceptance. `tokens_BL`: chunks as long as the model's context; a chunk's order depends on seed and number alone.

    `run`: a loaded hybrid. Raises UserError where `check` does.
    """
    check(run, starts)
    chunks = max(1, min(-(-ROWS // len(starts)), len(tokens_BL)))
    count = len(tokens_BL)
    padded_BL = tokens_BL[np.arange(count + -count % chunks) % count].astype(np.int32)
    parts, key, starts_S = [], jax.random.key(seed), jnp.asarray(starts, jnp.int32)
    for first in range(0, len(padded_BL), chunks):
        numbers_C = jnp.arange(first, first + chunks)
        own_CL = padded_BL[first : first + chunks]
        parts.append(_score(run.model_module, run.model_config, run.variables, own_CL, given(run, own_CL), numbers_C, starts_S, key))
    gain, acceptance = (np.concatenate(p)[:count].astype(np.float64) for p in zip(*jax.device_get(parts), strict=True))
    return ByRank(starts, gain, acceptance)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _score(
    module: ModuleType,
    config: Any,
    variables: Any,
    tokens_CL: Int[Array, "C L"],
    given_CL: Bool[Array, "C L"] | None,
    numbers_C: Int[Array, "C"],
    starts_S: Int[Array, "S"],
    key: Key[Array, ""],
) -> tuple[Float[Array, "C S L"], Float[Array, "C S L"]]:
    """Returns gain and acceptance of each chunk, in one pass over all chunks and starts. Given positions are no ranks."""
    (C, L), S = tokens_CL.shape, len(starts_S)
    no_text_CL = jnp.zeros((C, L), bool) if given_CL is None else given_CL
    one = lambda number, given_L: any_order(jax.random.fold_in(key, number), 1, L, given_L[None])[0][0]
    order_CL = jax.vmap(one)(numbers_C, no_text_CL)
    repeat = lambda x_CL: jnp.broadcast_to(x_CL[:, None], (C, S, L)).reshape(C * S, L)
    given_C = no_text_CL.sum(1, dtype=jnp.int32)
    revealed_B = jnp.minimum(given_C[:, None] + starts_S[None], L).reshape(C * S)
    ranked_BL, order_BL = repeat(jnp.take_along_axis(tokens_CL, order_CL, 1)), repeat(order_CL)
    gain_BL, acceptance_BL = compare_laws(*module.bind(config, variables).both(ranked_BL, order_BL, revealed_B), ranked_BL, revealed_B)
    at_CL = given_C[:, None] + jnp.arange(L, dtype=jnp.int32)[None]  # the text's ranks first; behind them, none
    own = lambda x_BL: jnp.take_along_axis(x_BL.reshape(C, S, L), at_CL[:, None], 2, mode="fill", fill_value=jnp.nan)
    return own(gain_BL), own(acceptance_BL)


def compare_laws(
    draft_BLV: Float[Array, "B L V"], target_BLV: Float[Array, "B L V"], ranked_BL: Int[Array, "B L"], revealed_B: Int[Array, "B"]
) -> tuple[Float[Array, "B L"], Float[Array, "B L"]]:
    """Returns (gain in bits, acceptance) at each rank, nan before `revealed`; at rank 0 the target is the draft by definition: 0 and 1."""
    rank_1L = jnp.arange(ranked_BL.shape[1])[None]
    draft_BLV = jax.nn.log_softmax(draft_BLV)
    target_BLV = jnp.where((rank_1L == 0)[:, :, None], draft_BLV, jax.nn.log_softmax(target_BLV))
    gain_BL = (cross_entropy(draft_BLV, ranked_BL) - cross_entropy(target_BLV, ranked_BL)) / jnp.log(2.0)
    acceptance_BL = jnp.exp(jnp.minimum(draft_BLV, target_BLV)).sum(-1)
    drafted_BL = rank_1L >= revealed_B[:, None]
    return jnp.where(drafted_BL, gain_BL, jnp.nan), jnp.where(drafted_BL, acceptance_BL, jnp.nan)


def offset_bins(length: int) -> list[tuple[int, int]]:
    """Returns ranges [a, b) of a rank's place in its window, d - i: 0, 1, 2-3, 4-7, ... , the last cut at `length`."""
    edges = [0, *(2**k for k in range(length.bit_length()) if 2**k < length), length]
    return list(itertools.pairwise(edges))


def by_offset(values_NSL: Float[np.ndarray, "N S L"], starts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (mean, stderr) [starts, bins] of the values in each of `offset_bins`, nan where a window doesn't reach.

    The chunk is the sampling unit: the stderr is over chunks' own means.
    """
    length = values_NSL.shape[2]
    bins = offset_bins(length)
    bin_NSK = np.full((len(values_NSL), len(starts), len(bins)), np.nan)
    for s, start in enumerate(starts):
        for k, (a, b) in enumerate(bins):
            if start + a < length:
                bin_NSK[:, s, k] = _mean(values_NSL[:, s, start + a : start + b], 1)
    return mean_and_stderr(bin_NSK)


def mean_and_stderr(values_NX: Float[np.ndarray, "N ..."]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean over the chunks that reach a place, and its standard error; nan for one chunk."""
    count_X, mean_X = (~np.isnan(values_NX)).sum(axis=0), _mean(values_NX, 0)
    square_X = _mean((values_NX - mean_X) ** 2, 0)
    return mean_X, np.where(count_X > 1, np.sqrt(square_X / np.maximum(count_X - 1, 1)), np.nan)


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    """Returns the mean of what isn't nan; nan of nothing: texts are of several lengths."""
    count = (~np.isnan(values)).sum(axis=axis)
    return np.where(count > 0, np.nansum(values, axis=axis) / np.maximum(count, 1), np.nan)
