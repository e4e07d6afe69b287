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
from jaxtyping import Array, Bool, Int, Integer, Key

from dllm.core.types import UserError
from dllm.diffusion.likelihood import Likelihood, likelihood
from dllm.evals.held_out import given
from dllm.evals.stats import Context, Metric, mean_metric
from dllm.ops.windows import window_table, window_tables
from dllm.samplers.self_speculative import Options

NEEDS = ("run", "options")  # of the Context
ORDERS = 2  # a chunk; each costs one forward of as many rows as the chunk has characters
ESTIMATOR = (
    f"mean over chunks and {ORDERS} uniform orders sigma a chunk, keys fixed by seed and chunk number, of the exact -log2 p(x | sigma) / D "
    "of self-speculative sampling (temperature 1, chain); passes are those expected given x, not those of the sampler's own samples"
)


def evaluate(tokens_BL: Integer[np.ndarray, "B L"], lengths_B: Integer[np.ndarray, "B"], context: Context) -> dict[str, Metric]:
    """Returns `elbo_bpc`, `passes_given_x` (non-causal), `causal_passes_given_x` and `tokens_per_pass_given_x`, by chunk.

    Texts of several lengths count by their own. `tokens_BL`: held-out chunks, whole. `context.options` are those of the sampler
    self_speculative. Keys depend on the seed and the chunk's number alone. Raises UserError for a run without causal layers,
    and for block verification, whose law is another.
    """
    run, options = context.need("run", "likelihood"), context.need("options", "likelihood")
    if not getattr(run.model_config, "n_causal", 0):
        raise UserError("the eval likelihood needs a hybrid run with n_causal > 0, for self_speculative to sample; use --evals=bound")
    if options.verification != "chain":
        raise UserError(f"the eval likelihood is that of chain verification, not {options.verification}: pass --option.verification=chain")
    if options.n_verify < 1:
        raise UserError(f"n_verify must be 1 or more, got {options.n_verify}")
    count, length = tokens_BL.shape
    given_BL = given(run, tokens_BL)
    D_B = np.full(count, length) if given_BL is None else (~given_BL).sum(1)
    static = (run.model_module, run.model_config, getattr(run.tokenizer, "forbidden", ()), options)
    tokens_BL, key = jnp.asarray(tokens_BL, jnp.int32), jax.random.key(context.seed)
    of = lambda number: None if given_BL is None else jnp.asarray(given_BL[number])
    scores = [_score(static, run.variables, tokens_BL[number], of(number), jnp.int32(number), key) for number in range(count)]
    mean = jax.tree.map(lambda *x_R: np.stack(x_R).astype(np.float64).mean(axis=1), *jax.device_get(scores))
    return {
        "elbo_bpc": Metric(-mean.log_p / np.log(2), D_B.astype(np.float64)),
        "passes_given_x": mean_metric(mean.noncausal),
        "causal_passes_given_x": mean_metric(mean.causal),
        "tokens_per_pass_given_x": Metric(D_B.astype(np.float64), mean.noncausal),
    }


def text_likelihood(
    functions: Any,
    tokens_L: Int[Array, "L"],
    order_L: Int[Array, "L"],
    options: Options,
    given_L: Bool[Array, "L"] | None = None,
    forbidden: tuple[int, ...] = (),
) -> Likelihood:
    """Returns the sampler's Likelihood of a text (in sequence order) revealed in the given order: one forward of its L prefixes.

    `given` positions are first in the order, and no part of the text; what is `forbidden` is never drawn.
    """
    L = len(tokens_L)
    ranked_L = tokens_L[order_L]
    rows = lambda x_L: jnp.broadcast_to(x_L[None], (L, L))
    first = jnp.int32(0) if given_L is None else given_L.sum(dtype=jnp.int32)
    logits = functions.both(rows(ranked_L), rows(order_L), jnp.maximum(jnp.arange(L, dtype=jnp.int32), first))
    never_V = jnp.zeros((functions.vocab,), bool).at[jnp.asarray(forbidden, jnp.int32)].set(True, mode="drop")
    law = lambda x_LLV: jax.nn.log_softmax(jnp.where(never_V[None, None], -jnp.inf, x_LLV))
    true = lambda x_LLV: jnp.take_along_axis(law(x_LLV), rows(ranked_L)[:, :, None], 2)[:, :, 0]
    draft_LL, target_LL = map(true, logits)
    if given_L is None:
        return likelihood(draft_LL, target_LL, window_table(options.window, L, options.rate), options.n_verify)
    tables = window_tables(options.window, L, options.rate)
    at_L = jnp.arange(L) - first
    table_L = jnp.where(at_L >= 0, jnp.asarray(tables)[L - first, jnp.maximum(at_L, 0)], 1)
    return likelihood(draft_LL, target_LL, table_L, options.n_verify, first, int(tables.max()))


@functools.partial(jax.jit, static_argnums=0)
def _score(
    static: tuple[Any, ...],
    variables: Any,
    tokens_L: Int[Array, "L"],
    given_L: Bool[Array, "L"] | None,
    number: Int[Array, ""],
    key: Key[Array, ""],
) -> Likelihood:
    """Returns the Likelihood [ORDERS] of a chunk, one order after the other: the rows of one fill a pass."""
    module, config, forbidden, options = static
    functions = module.bind(config, variables)

    def one(key: Key[Array, ""]) -> Likelihood:
        order_L = jax.random.permutation(key, len(tokens_L)).astype(jnp.int32)
        if given_L is not None:
            order_L = order_L[jnp.argsort(~given_L[order_L], stable=True)]
        return text_likelihood(functions, tokens_L, order_L, options, given_L, forbidden)

    return jax.lax.map(one, jax.random.split(jax.random.fold_in(key, number), ORDERS))
