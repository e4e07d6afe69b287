"""The likelihood of held-out text under a block-diffusion model, as a bound; under its autoregressive parent exactly: on the same tokens.

    NELBO(x) = sum over blocks, sum over non-empty sets S of a block's b tokens, of
               1/(m C(b, m)) sum_{l in S} -log p(x_l | the block without S, the blocks before),   m = |S|

This is BD3-LM's bound (arXiv 2503.09573, eq. 8) with t integrated out: the mean over orders of the any-order chain rule. For blocks of one
token it is -log p(x) itself. The first token of a row is given and not scored, so that a parent without a beginning-of-text token is judged
on the same; tokens behind a row's length are hidden and not scored.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, Key

from dllm.core.types import UserError
from dllm.diffusion import next_token
from dllm.diffusion.block_diffusion import by_block, denoising_nats, unknown
from dllm.evals.stats import Context, Metric
from dllm.samplers.loop import kind

NEEDS = ("run",)  # of the Context
EXACT_BLOCK = 8  # 255 forwards of each row
DRAWS = 16  # forwards of each row, for longer blocks
ROWS = 8  # a forward, fewer where these would have more than LOGITS logits
LOGITS = 2**28
ESTIMATOR = (
    f"nats a token, without the first of a row. nelbo_exact (block <= {EXACT_BLOCK}): the bound itself, by enumeration of a block's masks; "
    f"nelbo_mc: unbiased, {DRAWS} masks a block, their sizes stratified over 1..b, keys fixed by seed and row; "
    "nll (a model without MASK): exact, by the chain rule"
)

Plan = Callable[[Int[Array, ""]], tuple[Array, Array]]  # number of a forward -> (masked [C, L], weight [C, L])


def evaluate(tokens_BL: Integer[np.ndarray, "B L"], lengths_B: Integer[np.ndarray, "B"], context: Context) -> dict[str, Metric]:
    """Returns `nelbo_exact`, `nelbo_mc` or `nll`, in nats a scored token; ESTIMATOR says what each is. The sampling unit is the row.

    Raises UserError for a hybrid.
    """
    run = context.need("run", "nelbo")
    family = kind(run.model_module, run.model_config)
    if family == "hybrid":
        raise UserError("the eval nelbo is for block-diffusion and autoregressive models; a hybrid's bound is --evals=bound")
    name = "nll" if family == "autoregressive" else "nelbo_exact" if run.model_config.block <= EXACT_BLOCK else "nelbo_mc"
    count, length = tokens_BL.shape
    step = max(1, min(ROWS, LOGITS // (length * run.model_config.vocab)))
    padding = -count % step
    tokens_BL = np.concatenate([tokens_BL, np.zeros((padding, length), tokens_BL.dtype)]).astype(np.int32)
    ends_B = np.concatenate([lengths_B, np.zeros(padding, lengths_B.dtype)]).astype(np.int32)
    nats, key = [], jax.random.key(context.seed)
    for start in range(0, count, step):
        rows = slice(start, start + step)
        numbers_C = jnp.arange(start, start + step)
        nats.append(_score(name, run.model_module, run.model_config, run.variables, tokens_BL[rows], ends_B[rows], numbers_C, key))
    nats_B = np.concatenate(jax.device_get(nats))[:count].astype(np.float64)
    return {name: Metric(nats_B, np.maximum(lengths_B - 1, 0).astype(np.float64))}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _score(
    name: str,
    module: Any,
    config: Any,
    variables: Any,
    tokens_CL: Int[Array, "C L"],
    lengths_C: Int[Array, "C"],
    numbers_C: Int[Array, "C"],
    key: Key[Array, ""],
) -> Float[Array, "C"]:
    """Returns the nats of each row."""
    functions = module.bind(config, variables)
    index_1L = jnp.arange(tokens_CL.shape[1])[None]
    scored_CL = (index_1L > 0) & (index_1L < lengths_C[:, None])
    if name == "nll":
        return jnp.sum(jnp.where(scored_CL, -next_token.token_logprobs(functions, tokens_CL), 0.0), 1)
    block = min(functions.block, tokens_CL.shape[1])
    if name == "nelbo_exact":
        passes, plan = 2**block - 1, every_mask(scored_CL, block)
    else:
        keys_C = jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers_C)
        passes, plan = DRAWS, drawn_masks(scored_CL, block, keys_C)
    never_CL = unknown(scored_CL, block)

    def add(nats_C: Array, number: Array) -> tuple[Array, None]:
        masked_CL, weight_CL = plan(number)
        noisy_CL = jnp.where(masked_CL | never_CL, functions.mask_id, tokens_CL)
        nats_CL = denoising_nats(functions, tokens_CL, noisy_CL)
        return nats_C + jnp.sum(jnp.where(masked_CL, weight_CL * nats_CL, 0.0), 1), None

    dtype = jax.eval_shape(lambda: denoising_nats(functions, tokens_CL, tokens_CL)).dtype
    return jax.lax.scan(add, jnp.zeros(len(tokens_CL), dtype), jnp.arange(passes))[0]


def every_mask(scored_CL: Array, block: int) -> Plan:
    """Returns the plan of 2^block - 1 forwards in which every block meets every mask of its scored tokens, weighed as the bound does.

    All blocks meet the same pattern of `block` bits at once. One of n < block scored tokens meets each of its masks 2^(block - n) times.
    """
    weights = np.zeros((block + 1, block + 1))  # by tokens scored, tokens masked
    for n in range(block + 1):
        for m in range(1, n + 1):
            weights[n, m] = 1.0 / (m * math.comb(n, m) * 2 ** (block - n))
    count_CL = by_block(scored_CL, block, _total)
    bit_1L = jnp.arange(scored_CL.shape[1])[None] % block

    def plan(number: Array) -> tuple[Array, Array]:
        masked_CL = scored_CL & ((number + 1) >> bit_1L & 1 > 0)
        return masked_CL, jnp.asarray(weights)[count_CL, by_block(masked_CL, block, _total)]

    return plan


def drawn_masks(scored_CL: Array, block: int, keys_C: Key[Array, "C"]) -> Plan:
    """Returns the plan of DRAWS forwards: a block of n scored tokens has m of them masked, uniform over 1..n and stratified over the
    forwards, and each of the C(n, m) masks is as likely. Weight n / (m DRAWS): the bound is n E_m E_S 1/m sum_S."""
    C, L = scored_CL.shape
    count_CL = by_block(scored_CL, block, _total)
    blocks = -(-L // block)

    def sizes(key: Array) -> Array:  # [DRAWS, blocks], uniform on [0, 1), one draw in each stratum
        place_key, jitter_key = jax.random.split(key)
        place = jax.random.permutation(place_key, jnp.broadcast_to(jnp.arange(DRAWS)[:, None], (DRAWS, blocks)), independent=True)
        return (place + jax.random.uniform(jitter_key, (DRAWS, blocks))) / DRAWS

    unit_CKN = jax.vmap(sizes)(keys_C)

    def plan(number: Array) -> tuple[Array, Array]:
        unit_CL = jnp.repeat(unit_CKN[:, number], block, axis=1)[:, :L]
        size_CL = jnp.minimum(1 + jnp.floor(unit_CL * count_CL).astype(jnp.int32), jnp.maximum(count_CL, 1))
        noise_CL = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, number), (L,)))(keys_C)
        noise_CL = jnp.pad(jnp.where(scored_CL, noise_CL, 2.0), ((0, 0), (0, -L % block)), constant_values=2.0)
        rank_CL = noise_CL.reshape(C, blocks, block).argsort(-1).argsort(-1).reshape(C, -1)[:, :L]
        masked_CL = scored_CL & (rank_CL < size_CL)
        return masked_CL, count_CL / (size_CL * DRAWS)

    return plan


def _total(x: Array, axis: int) -> Array:
    return jnp.sum(x, axis, keepdims=True)
