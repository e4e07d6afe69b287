"""What an autoregressive judge of any tokenizer pays for samples, read as text: nats a token of the judge's.

Samples are decoded, cut behind their first end-of-text, tokenized anew by the judge's own tokenizer, and scored in float32. Always beside
the unigram entropy of each sequence's tokens: a sampler that repeats a likely phrase scores better than real text.

(gen_nll is for a judge of the same symbols, in nats of these.)
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from dllm.core.types import UserError
from dllm.diffusion.next_token import token_logprobs
from dllm.evals import entropy
from dllm.evals.stats import Context, Metric, mean_metric
from dllm.samplers.loop import kind, lead

NEEDS = ("judge", "tokenizer")  # of the Context
WIDTH = 128  # texts are padded to a multiple of it, so that few programs are compiled
BATCH = 64  # texts a pass of the judge, fewer where these would have more than LOGITS logits
LOGITS = 2**27


def evaluate(tokens_BL: Integer[np.ndarray, "B L"], lengths_B: Integer[np.ndarray, "B"], context: Context) -> dict[str, Metric]:
    """Returns `text_nll`, nats a scored token; `text_tokens`, scored tokens a sequence; `text_entropy`, the unigram entropy of a sequence's
    tokens, in nats; `text_cut`, the share of sequences that were cut at the judge's context.

    The first token of a text is scored where the judge reads something before it: a BOS of its tokenizer, or of its own. The end-of-text
    is scored where the judge has a token so spelt. Raises UserError for a judge that is not autoregressive.
    """
    judge, own = context.need("judge", "text_nll"), context.need("tokenizer", "text_nll")
    config = judge.model_config
    if kind(judge.model_module, config) != "autoregressive":
        raise UserError("the judge of text_nll must be autoregressive: set `judge` to a gpt2, a gpt, or a qwen3 of mask_id=-1")
    texts = [own.decode(row[:length].tolist()) for row, length in zip(np.asarray(tokens_BL), lengths_B)]
    ids = [read(text, own, judge.tokenizer) for text in texts]
    room = config.length
    cut_B = np.array([len(row) > room for row in ids])
    ids = [row[:room] for row in ids]
    config = dataclasses.replace(config, dtype="float32")
    nll_B = np.zeros(len(ids))
    width_B = np.array([min(room, -(-max(len(row), 1) // WIDTH) * WIDTH) for row in ids])
    for width in np.unique(width_B).tolist():
        numbers = np.flatnonzero(width_B == width)
        step = max(1, min(BATCH, len(numbers), LOGITS // (width * config.vocab)))
        for some in np.array_split(numbers, -(-len(numbers) // step)):
            batch_BL, scored_BL = np.zeros((step, width), np.int32), np.zeros((step, width), bool)
            for b, number in enumerate(some):
                batch_BL[b, : len(ids[number])] = ids[number]
                scored_BL[b, 1 - lead(config) : len(ids[number])] = True
            nats_BL = jax.device_get(_score(judge.model_module, config, judge.variables, batch_BL)).astype(np.float64)
            nll_B[some] = np.where(scored_BL, nats_BL, 0.0).sum(1)[: len(some)]
    count_B = np.array([max(len(row) - (1 - lead(config)), 0) for row in ids], np.float64)
    return {
        "text_nll": Metric(nll_B, count_B),
        "text_tokens": mean_metric(count_B),
        "text_entropy": mean_metric(np.array([entropy.unigram(np.array(row, np.int64)) for row in ids])),
        "text_cut": mean_metric(cut_B),
    }


def read(text: str, own: Any, judge: Any) -> list[int]:
    """Returns the judge's ids of a text that another tokenizer wrote: up to its first end-of-text, leading ones left out.

    Ends are spelt as either of the two spells its own; the one that was met is kept if it is one token of the judge's.
    """
    ends = {t.decode([t.eos]) for t in (own, judge) if t.eos is not None} - {""}
    while head := next((end for end in ends if text.startswith(end)), ""):
        text = text.removeprefix(head)
    at, end = min(((at, end) for end in ends if (at := text.find(end)) >= 0), default=(len(text), ""))
    mark = judge.encode(end, "a sample") if end else []
    return [judge.bos] * judge.begins + judge.encode(text[:at], "a sample") + (mark if len(mark) == 1 else [])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _score(module: Any, config: Any, variables: Any, tokens_BL: Int[Array, "B L"]) -> Float[Array, "B L"]:
    """Returns -log p(x_l | x_<l) in nats; 0 where it isn't scored."""
    with jax.default_matmul_precision("float32"):  # accelerators would round the products' inputs
        return -token_logprobs(module.bind(config, variables), tokens_BL)
