"""Generative negative log-likelihood: what an autoregressive judge pays for the samples, in nats a symbol.

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
from dllm.samplers.loop import kind, lead

NEEDS = ("judge",)  # of the Context
BATCH = 128  # sequences a pass of the judge, fewer where these would have more than LOGITS logits
LOGITS = 2**28


def evaluate(tokens_BL: Integer[np.ndarray, "B L"], lengths_B: Integer[np.ndarray, "B"], context: Context) -> dict[str, Metric]:
    """Returns `gen_nll`: nats over symbols. The judge is a loaded autoregressive run on the same symbols, at least as long as the samples.

    A judge without a BOS of its own, a qwen3, doesn't score a sequence's first token, its BOS.
    """
    judge = context.need("judge", "gen_nll")
    if kind(judge.model_module, judge.model_config) != "autoregressive":
        raise UserError("the judge has no likelihood for gen_nll to read: set `judge` to a trained gpt run, or a qwen3 of mask_id=-1")
    tokens_BL, lengths_B = np.asarray(tokens_BL, np.int32), np.asarray(lengths_B)
    length, vocab = judge.model_config.length, judge.model_config.vocab
    if tokens_BL.shape[1] > length:
        raise UserError(f"the judge reads {length} symbols, samples have {tokens_BL.shape[1]}: use a longer judge")
    if tokens_BL.max(initial=0) >= vocab:
        raise UserError(f"the judge knows {vocab} symbols, not id {tokens_BL.max()}: use a judge of the same data")
    step = max(1, min(BATCH, len(tokens_BL), LOGITS // (tokens_BL.shape[1] * vocab)))
    padded_BL = np.concatenate([tokens_BL, np.zeros((-len(tokens_BL) % step, tokens_BL.shape[1]), np.int32)])
    score = functools.partial(_score, judge.model_module, judge.model_config)
    parts = [score(judge.variables, padded_BL[start : start + step]) for start in range(0, len(padded_BL), step)]
    nll_BL = np.concatenate(jax.device_get(parts)).astype(np.float64)
    valid_BL = np.arange(tokens_BL.shape[1])[None, :] < lengths_B[:, None]
    scored_B = np.maximum(lengths_B - (1 - lead(judge.model_config)), 0)
    return {"gen_nll": Metric(np.where(valid_BL, nll_BL[: len(tokens_BL)], 0.0).sum(axis=1), scored_B.astype(np.float64))}


def require_same_symbols(judge: Any, run: Any) -> None:
    """Raises UserError unless two loaded runs read text with the same tokenizer."""
    if judge.tokenizer != run.tokenizer:
        raise UserError("the judge has another tokenizer than the run: its ids mean other texts; use a judge of the same data")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _score(module: Any, config: Any, variables: Any, tokens_BL: Int[Array, "B L"]) -> Float[Array, "B L"]:
    """Returns -log p(x_l | x_<l) in nats; 0 where it isn't scored."""
    return -token_logprobs(module.bind(config, variables), tokens_BL)
