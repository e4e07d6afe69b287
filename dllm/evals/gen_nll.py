"""Generative negative log-likelihood: what an autoregressive judge pays for the samples, in nats a character.

Publish it with the entropy: a sampler that repeats a likely phrase scores better than real text.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from dllm.core.types import UserError
from dllm.diffusion.next_token import token_logprobs
from dllm.evals.stats import Context, Metric

NEEDS = ("judge",)  # of the Context
BATCH = 128  # sequences a pass of the judge


def evaluate(tokens_BL: Integer[np.ndarray, "B L"], lengths_B: Integer[np.ndarray, "B"], context: Context) -> dict[str, Metric]:
    """Returns `gen_nll`: nats over characters. The judge is a loaded `gpt` run on the same symbols, at least as long as the samples."""
    judge = context.need("judge", "gen_nll")
    if not hasattr(judge.model_module.Functions, "forward"):
        raise UserError("the judge is no gpt run, so it has no likelihood for gen_nll to read: set `judge` to a trained gpt run")
    tokens_BL, lengths_B = np.asarray(tokens_BL, np.int32), np.asarray(lengths_B)
    if tokens_BL.shape[1] > judge.model_config.length:
        raise UserError(f"the judge reads {judge.model_config.length} characters, samples have {tokens_BL.shape[1]}: use a longer judge")
    if tokens_BL.max(initial=0) >= judge.model_config.vocab:
        raise UserError(f"the judge knows {judge.model_config.vocab} symbols, not id {tokens_BL.max()}: use a judge of the same data")
    step = min(BATCH, max(len(tokens_BL), 1))
    padded_BL = np.concatenate([tokens_BL, np.zeros((-len(tokens_BL) % step, tokens_BL.shape[1]), np.int32)])
    score = functools.partial(_score, judge.model_module, judge.model_config)
    parts = [score(judge.variables, padded_BL[start : start + step]) for start in range(0, len(padded_BL), step)]
    nll_BL = np.concatenate(jax.device_get(parts)).astype(np.float64)
    valid_BL = np.arange(tokens_BL.shape[1])[None, :] < lengths_B[:, None]
    return {"gen_nll": Metric(np.where(valid_BL, nll_BL[: len(tokens_BL)], 0.0).sum(axis=1), lengths_B.astype(np.float64))}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _score(module: Any, config: Any, variables: Any, tokens_BL: Int[Array, "B L"]) -> Float[Array, "B L"]:
    """Returns -log p(x_l | x_<l) in nats."""
    return -token_logprobs(module.bind(config, variables), tokens_BL)
