"""What a neural drafter is to be measured against, in the very same sampler: tables as the floor, perfect marginals as the mark.

    psi_spec.sample(with_drafter(functions, draft), options, settings, draws, prompt)

`functions` is an uno model's. Its forwards without a gate stay as they are, so what is emitted keeps the frozen model's law; in a forward
with a gate the open rows have the logits of `draft`, whatever the noise in them. A draft is a function

    draft(cache, seed_B1, position_B1, width) -> logits_BWV

of the last row that isn't noise, the seed: its token and its position; the cache is filled up to that row, which a draft may run anew.
Column w is for the token w + 2 places behind the seed: the one between, the clean token, is drawn from the seed's own row, and no draft has
read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Integer

from dllm.core.types import UserError
from dllm.ops import masks
from dllm.ops.settings import Settings, shape_logits

Draft = Callable[[Any, Any, Any, int], Any]
LARGEST = 2**28  # numbers in a table
SALT = 2**32 - 1  # what the paths' keys are folded from first: no request's number, so no draw of the sampler's has such a key


def with_drafter(functions: Any, draft: Draft) -> Any:
    """Returns functions like `functions`, with `draft` in place of the adapter. Closed rows come first in every pass, one at least.

    The closed rows' keys and values are the frozen model's, as they are with the adapter; those of noise rows are, too, and are never read
    again, since samplers keep no noise row.
    """

    def forward(cache, tokens_BQ, positions_BQ, mask, at_BW=None, segment_BQ=None, gate_BQ=None):
        if gate_BQ is None:
            return functions.forward(cache, tokens_BQ, positions_BQ, mask, at_BW, segment_BQ)
        logits_BQV, after = functions.forward(cache, tokens_BQ, positions_BQ, mask)
        width = tokens_BQ.shape[1] - 1
        seed_B1 = (~gate_BQ).sum(1, keepdims=True, dtype=jnp.int32) - 1
        take = lambda x: jnp.take_along_axis(x, seed_B1, 1)
        before = after.replace(lengths_B=cache.lengths_B + seed_B1[:, 0])
        draft_BWV = draft(before, take(tokens_BQ), take(positions_BQ), width)
        column_BQ = jnp.clip(jnp.arange(width + 1, dtype=jnp.int32)[None] - seed_B1 - 1, 0, width - 1)
        draft_BQV = jnp.take_along_axis(draft_BWV, column_BQ[:, :, None], 1).astype(logits_BQV.dtype)
        logits_BQV = jnp.where(gate_BQ[:, :, None], draft_BQV, logits_BQV)
        return (logits_BQV if at_BW is None else jnp.take_along_axis(logits_BQV, at_BW[:, :, None], 1)), after

    return functions._replace(forward=forward)


# -- floors: tables


def unigrams(rows: Iterable[Integer[np.ndarray, "_"]], vocab: int, alpha: float = 1.0) -> Float[np.ndarray, "V"]:
    """Returns how often each id occurs in the rows, `alpha` added to every count, as probabilities."""
    counts = np.bincount(np.concatenate(_checked(rows, vocab)), minlength=vocab) + alpha
    return (counts / counts.sum()).astype(np.float32)


def skip_bigrams(rows: Iterable[Integer[np.ndarray, "_"]], vocab: int, depth: int, alpha: float = 1.0) -> Float[np.ndarray, "W I V"]:
    """Returns [depth, vocab + 1, vocab]: table w holds P(x_{t + 2 + w} | x_t), from pairs within a row, `alpha` added to every count.

    The last row of a table, of an id that begins a sequence and is no token, holds `unigrams`. Raises UserError for ids outside the
    vocabulary, and where the tables would be too large.
    """
    rows = _checked(rows, vocab)
    if depth * vocab**2 > LARGEST:
        raise UserError(f"{depth} tables of {vocab} x {vocab} are more than {LARGEST} numbers; skip bigrams are for smaller vocabularies")
    tables = np.empty((depth, vocab + 1, vocab), np.float32)
    for w in range(depth):
        skip = w + 2
        codes = np.concatenate([row[:-skip].astype(np.int64) * vocab + row[skip:] for row in rows if len(row) > skip] or [np.zeros(0, int)])
        counts = np.bincount(codes, minlength=vocab**2).reshape(vocab, vocab) + alpha
        tables[w, :vocab] = counts / counts.sum(1, keepdims=True)
    tables[:, vocab] = unigrams(rows, vocab, alpha)
    return tables


def _checked(rows: Iterable[np.ndarray], vocab: int) -> list[np.ndarray]:
    rows = [np.asarray(row) for row in rows]
    if not any(len(row) for row in rows):
        raise UserError("the corpus of a table is empty; give it rows of tokens")
    for n, row in enumerate(rows):
        if len(row) and not 0 <= row.min() <= row.max() < vocab:
            raise UserError(f"row {n} of a table's corpus holds ids from {row.min()} to {row.max()}, outside the vocabulary of {vocab}")
    return rows


def from_unigrams(law_V: Float[np.ndarray, "V"]) -> Draft:
    """Returns the draft that says the same everywhere."""

    def draft(cache, seed_B1, position_B1, width):
        return jnp.broadcast_to(jnp.log(jnp.asarray(law_V)), (len(seed_B1), width, len(law_V)))

    return draft


def from_skip_bigrams(tables_WIV: Float[np.ndarray, "W I V"]) -> Draft:
    """Returns the draft that reads the seed alone. It raises UserError where more columns are asked for than there are tables."""

    def draft(cache, seed_B1, position_B1, width):
        if width > len(tables_WIV):
            raise UserError(
                f"a draft of {width} tokens wants as many skip-bigram tables, and there are {len(tables_WIV)}; make more of them"
            )
        return jnp.swapaxes(jnp.log(jnp.asarray(tables_WIV[:width]))[:, seed_B1[:, 0]], 0, 1)

    return draft


# -- the ceiling


def perfect_marginals(functions: Any, settings: Settings, key: Array, request_B: Int[Array, "B"], paths: int) -> Draft:
    """Returns the draft whose column w has the frozen model's own marginal of that token given the settled text: what can be known of it
    before the tokens between are drawn.

    Estimated from `paths` continuations sampled from the model: the mean over paths of the conditional law behind each, which varies less
    than the tokens do. A draft costs width + 1 forwards of one row over paths times the batch, and while it lasts a cache that is so many
    times as large.

    No bound on accepted chains, though: a draft that leans to one of several continuations has more accepted, since the tokens of each hang
    together. So few paths, all of whose columns follow the same guess, aren't worse (stories260K, T = 1, 7 drafts: 1.27 accepted a cycle
    from one path, 1.18 from 16, standard errors .04).

    `settings` are the sampler's: paths are drawn under them, and the marginals handed back so that the sampler's temperature leaves them as
    they are (its filters cut them once more). The estimate is a function of key, request and text alone.
    """

    def draft(cache, seed_B1, position_B1, width):
        batch = len(seed_B1)
        each = lambda x: jnp.repeat(x, paths, 0)
        path_R = jnp.tile(jnp.arange(paths, dtype=jnp.int32), batch)
        keys_R = jax.vmap(_fold, (None, 0, 0, 0))(key, each(request_B), each(position_B1[:, 0]), path_R)
        wide = cache.replace(k=jnp.repeat(cache.k, paths, 1), v=jnp.repeat(cache.v, paths, 1), lengths_B=each(cache.lengths_B))
        settings_R, start_R1 = jax.tree.map(each, settings), each(position_B1)

        def step(carry, number):
            cache, token_R1 = carry
            logits_R1V, cache = functions.forward(cache, token_R1, start_R1 + number, masks.causal)
            law_RV = shape_logits(logits_R1V, settings_R)[:, 0]
            token_R1 = jax.vmap(jax.random.categorical)(jax.vmap(jax.random.fold_in, (0, None))(keys_R, number), law_RV)[:, None]
            marginal_BV = jnp.exp(law_RV).reshape(batch, paths, -1).mean(1)
            return (cache.replace(lengths_B=cache.lengths_B + 1), token_R1.astype(jnp.int32)), marginal_BV

        _, marginal_QBV = lax.scan(step, (wide, each(seed_B1)), jnp.arange(width + 1, dtype=jnp.int32))
        warm_B11 = jnp.where(settings.temperature > 0, settings.temperature, 1)[:, None, None]
        return jnp.log(jnp.swapaxes(marginal_QBV[1:], 0, 1)) * warm_B11.astype(marginal_QBV.dtype)

    return draft


def _fold(key: Array, *names: Any) -> Array:
    for name in (SALT, *names):
        key = jax.random.fold_in(key, name)
    return key
