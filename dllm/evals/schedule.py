"""Which interval of t trains a block-diffusion model with the least variance (BD3-LM, arXiv 2503.09573, section 5.2 and table 8).

[0, 1] is cut into cells of STEP. In each, losses with t drawn from it alone give the moments of a block's nats, Y = the sum over its masked
tokens of 1/t times their nats, and of a batch's gradient g. An interval is a run of cells, and the mean of theirs makes its variances:

    nelbo      E Y^2 - (E Y)^2                over blocks, texts and noise: what BD3-LM minimises
    gradient   mean of the cells' E |g - E g|^2   over batches of ROWS rows: t is stratified over a batch, so that what E g differs from
                                              cell to cell is the same in every batch, and no noise

All cells see the same texts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, Key

from dllm.core.types import UserError
from dllm.diffusion.block_diffusion import LOWEST, denoising_nats, stratified

STEP = 0.05
CELLS = 20
WIDTHS = (10, 12, 14, 16, 18, 20)  # in cells: .5 to .9, and all
ROWS = 8


@dataclass(frozen=True)
class Interval:
    """low, high as the objective wants them, and the variances."""

    low: float
    high: float
    nelbo: float
    gradient: float


def intervals(run: Any, tokens_BL: Integer[np.ndarray, "B L"], seed: int = 0) -> list[Interval]:
    """Returns every interval of WIDTHS with its variances, those of a trained block-diffusion `run` on chunks as long as its context.

    Raises UserError for a model without MASK, and for less than two batches of ROWS chunks.
    """
    if getattr(run.model_config, "mask_id", -1) < 0:
        raise UserError("the model has no MASK, so no noise to schedule: give the workdir of a block-diffusion run")
    batches = len(tokens_BL) // ROWS
    if batches < 2:
        raise UserError(f"a variance needs two batches of {ROWS} chunks at least, not {len(tokens_BL)} chunks; raise --num")
    first, second, gradient = np.zeros(CELLS), np.zeros(CELLS), np.zeros(CELLS)
    for cell in range(CELLS):
        low, high = max(cell * STEP, LOWEST), (cell + 1) * STEP
        moments, total = [], None
        for batch in range(batches):
            tokens_CL = jnp.asarray(tokens_BL[batch * ROWS : (batch + 1) * ROWS], jnp.int32)
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), batch), cell)
            moment, grads = _moments(run.model_module, run.model_config, run.variables, tokens_CL, key, low, high)
            moments.append(moment)
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        first[cell], second[cell], square = np.mean(jax.device_get(moments), axis=0, dtype=np.float64)
        gradient[cell] = (square - float(_square(total)) / batches**2) * batches / (batches - 1)
    found = []
    for width in WIDTHS:
        for start in range(CELLS - width + 1):
            own = slice(start, start + width)
            low, high = (round(STEP * edge, 2) for edge in (start, start + width))
            nelbo = second[own].mean() - first[own].mean() ** 2
            found.append(Interval(low or LOWEST, high, float(nelbo), float(gradient[own].mean())))
    return found


@jax.jit
def _square(tree: Any) -> Float[Array, ""]:
    return jax.tree.reduce(jnp.add, jax.tree.map(lambda x: jnp.sum(jnp.square(x.astype(jnp.float32))), tree))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _moments(
    module: Any, config: Any, variables: Any, tokens_CL: Int[Array, "C L"], key: Key[Array, ""], low: Array | float, high: Array | float
) -> tuple[tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]], Any]:
    """Returns (E Y and E Y^2 over blocks, |g|^2), and g itself, of the loss a token."""
    C, L = tokens_CL.shape
    rate_key, mask_key = jax.random.split(key)

    block = min(config.block, L)

    def loss(variables: Any) -> tuple[Array, Array]:
        functions = module.bind(config, variables)
        rate_CL = jnp.repeat(stratified(rate_key, (C, -(-L // block)), low, high), block, axis=1)[:, :L]
        masked_CL = jax.random.uniform(mask_key, (C, L)) < rate_CL
        nats_CL = denoising_nats(functions, tokens_CL, jnp.where(masked_CL, functions.mask_id, tokens_CL))
        weighted_CL = jnp.where(masked_CL, nats_CL / rate_CL, 0.0)
        return jnp.mean(weighted_CL), weighted_CL

    grads, weighted_CL = jax.grad(loss, has_aux=True)(variables)
    sums_CN = jnp.pad(weighted_CL, ((0, 0), (0, -L % block))).reshape(C, -1, block).sum(-1)
    return (jnp.mean(sums_CN), jnp.mean(sums_CN**2), _square(grads)), grads
