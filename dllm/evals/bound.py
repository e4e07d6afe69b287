"""The objective's own numbers on held-out chunks, with standard errors: the draft bound in bits a character, draft and causal CE.

The draft bound is the any-order evidence bound of masked diffusion (Hoogeboom et al. 2022, arXiv 2110.02037): with sigma uniform over
orders and i uniform over 0..D-1, E[D / (D - i) * sum_{d > i} -log p(x_sigma(d) | x_sigma(<=i))] is an upper bound of -log p(x). It
bounds the likelihood of drafting one token a pass, not that of the self-speculative sampler. A `gpt` run's `bpc` is exact.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, Key

from dllm.evals.held_out import given
from dllm.evals.stats import Context, Metric, mean_metric

NEEDS = ("run", "objective")  # of the Context
DRAWS = 16  # draws of (sigma, i) a chunk, i stratified over them
CHUNKS = 8  # chunks a pass: DRAWS * CHUNKS rows
ESTIMATOR = f"mean over chunks of the objective on {DRAWS} draws of (sigma, i), i stratified, keys fixed by seed and chunk number"


def evaluate(tokens_BL: Integer[np.ndarray, "B L"], lengths_B: Integer[np.ndarray, "B"], context: Context) -> dict[str, Metric]:
    """Returns a Metric for each scalar of the run's objective (`diffusion.<name>.loss`), by chunk; ESTIMATOR says how.

    Also `causal_gain` = draft_ce - causal_ce, whose stderr is that of the difference on the same tokens: much less than either's.

    Rows that have a length of their own count by it. `tokens_BL`: held-out chunks as long as the model's context. The stderr is over
    chunks, so it holds the noise of the draws as well. Keys depend on the seed and the chunk's number alone: two runs are
    scored on the same (sigma, i).
    """
    run, objective = context.need("run", "bound"), context.need("objective", "bound")
    tokens_BL = np.asarray(tokens_BL, np.int32)
    given_BL, count = given(run, tokens_BL), len(tokens_BL)
    padded_BL = tokens_BL[np.arange(count + -count % CHUNKS) % count]
    static, key, parts = (run.model_module, run.model_config, *objective), jax.random.key(context.seed), []
    for start in range(0, len(padded_BL), CHUNKS):
        numbers_C = jnp.arange(start, start + CHUNKS)
        chunk_CL = padded_BL[start : start + CHUNKS]
        parts.append(_score(static, run.variables, chunk_CL, given(run, chunk_CL), numbers_C, key))
    parts = jax.device_get(parts)
    values = {name: np.concatenate([p[name] for p in parts])[: len(tokens_BL)].astype(np.float64) for name in parts[0]}
    if "causal_ce" in values:
        values["causal_gain"] = values["draft_ce"] - values["causal_ce"]
    if given_BL is None:
        return {name: mean_metric(value_B) for name, value_B in values.items()}
    D_B = (~given_BL).sum(1).astype(np.float64)
    return {name: Metric(value_B * D_B, D_B) for name, value_B in values.items() if name != "tokens"}


@functools.partial(jax.jit, static_argnums=0)
def _score(
    static: tuple[Any, ...],
    variables: Any,
    tokens_CL: Int[Array, "C L"],
    given_CL: Bool[Array, "C L"] | None,
    numbers_C: Int[Array, "C"],
    key: Key[Array, ""],
) -> dict[str, Float[Array, "C"]]:
    """Returns the objective's metrics of each chunk. A chunk's draws are one batch of the objective, which stratifies i over its batch."""
    module, config, objective, objective_config = static

    def one(tokens_L: Array, given_L: Array | None, number: Array) -> dict[str, Array]:
        copies = lambda x_L: jnp.broadcast_to(x_L[None], (DRAWS, len(x_L)))
        own = {} if given_L is None else {"given_BL": copies(given_L)}
        return objective.loss(module.bind(config, variables), copies(tokens_L), jax.random.fold_in(key, number), objective_config, **own)[1]

    return jax.vmap(one)(tokens_CL, given_CL, numbers_C)
