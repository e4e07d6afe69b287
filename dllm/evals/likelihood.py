"""The sampler's own likelihood on held-out chunks, with standard errors: bits a character, and the passes that the text would take.

`elbo_bpc` bounds -log p(x) of self-speculative sampling with the run's (or the command line's) window, rate and n_verify, orders being
uniform: log p(x) >= E_sigma log p(x | sigma), where log p(x | sigma) is exact (dllm.diffusion.likelihood). It is not the draft bound of
dllm.evals.bound, which is that of another sampler, one draft a pass.

`passes_given_x` is E[passes | the sampler drew x]: the sampler's own mean only if x are its samples. On held-out text it says how fast the
sampler would write this text, not how fast it writes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Integer, Key

from dllm.core.types import UserError
from dllm.diffusion.likelihood import Likelihood, likelihood
from dllm.evals.stats import Context, Metric, mean_metric
from dllm.ops.windows import window_table

NEEDS = ("run", "options")  # of the Context
ORDERS = 2  # a chunk; each costs one forward of as many rows as the chunk has characters
ESTIMATOR = (
    f"mean over chunks and {ORDERS} uniform orders sigma a chunk, keys fixed by seed and chunk number, of the exact -log2 p(x | sigma) / D "
    "of self-speculative sampling (temperature 1, chain); passes are those expected given x, not those of the sampler's own samples"
)


def evaluate(tokens_BL: Integer[np.ndarray, "B L"], lengths_B: Integer[np.ndarray, "B"], context: Context) -> dict[str, Metric]:
    """Returns `elbo_bpc`, `passes_given_x` (non-causal), `causal_passes_given_x` and `tokens_per_pass_given_x`, by chunk.

    `tokens_BL`: held-out chunks, whole. `context.options` are those of the sampler self_speculative. Keys depend on the seed and the
    chunk's number alone. Raises UserError for a run without causal layers, and for block verification, whose law is another.
    """
    run, options = context.need("run", "likelihood"), context.need("options", "likelihood")
    if not getattr(run.model_config, "n_causal", 0):
        raise UserError("the eval likelihood needs a hybrid run with n_causal > 0, for self_speculative to sample; use --evals=bound")
    if options.verification != "chain":
        raise UserError(f"the eval likelihood is that of chain verification, not {options.verification}: pass --option.verification=chain")
    if options.n_verify < 1:
        raise UserError(f"n_verify must be 1 or more, got {options.n_verify}")
    count, length = tokens_BL.shape
    static = (run.model_module, run.model_config, tuple(window_table(options.window, length, options.rate).tolist()), options.n_verify)
    tokens_BL, key = jnp.asarray(tokens_BL, jnp.int32), jax.random.key(context.seed)
    scores = [_score(static, run.variables, tokens_BL[number], jnp.int32(number), key) for number in range(count)]
    mean = jax.tree.map(lambda *x_R: np.stack(x_R).astype(np.float64).mean(axis=1), *jax.device_get(scores))
    return {
        "elbo_bpc": mean_metric(-mean.log_p / (length * np.log(2))),
        "passes_given_x": mean_metric(mean.noncausal),
        "causal_passes_given_x": mean_metric(mean.causal),
        "tokens_per_pass_given_x": Metric(np.full(count, float(length)), mean.noncausal),
    }


def text_likelihood(
    functions: Any, tokens_L: Int[Array, "L"], order_L: Int[Array, "L"], table: Integer[np.ndarray, "L"], n_verify: int
) -> Likelihood:
    """Returns the sampler's Likelihood of a text (in sequence order) revealed in the given order: one forward of its L prefixes."""
    L = len(table)
    ranked_L = tokens_L[order_L]
    rows = lambda x_L: jnp.broadcast_to(x_L[None], (L, L))
    logits = functions.both(rows(ranked_L), rows(order_L), jnp.arange(L, dtype=jnp.int32))
    true = lambda x_LLV: jnp.take_along_axis(jax.nn.log_softmax(x_LLV), rows(ranked_L)[:, :, None], 2)[:, :, 0]
    draft_LL, target_LL = map(true, logits)
    return likelihood(draft_LL, target_LL, table, n_verify)


@functools.partial(jax.jit, static_argnums=0)
def _score(static: tuple[Any, ...], variables: Any, tokens_L: Int[Array, "L"], number: Int[Array, ""], key: Key[Array, ""]) -> Likelihood:
    """Returns the Likelihood [ORDERS] of a chunk, one order after the other: the rows of one fill a pass."""
    module, config, table, n_verify = static
    functions = module.bind(config, variables)

    def one(key: Key[Array, ""]) -> Likelihood:
        order_L = jax.random.permutation(key, len(table)).astype(jnp.int32)
        return text_likelihood(functions, tokens_L, order_L, np.asarray(table), n_verify)

    return jax.lax.map(one, jax.random.split(jax.random.fold_in(key, number), ORDERS))
