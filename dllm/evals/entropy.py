"""Unigram entropy in nats, two readings that must not be mixed (they differ for short sequences).

The guard beside every quality score: a sampler that repeats itself scores well and has a low entropy.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Integer

from dllm.evals.stats import Context, Metric, mean_metric


def evaluate(tokens_BL: Integer[np.ndarray, "B L"], lengths_B: Integer[np.ndarray, "B"], context: Context) -> dict[str, Metric]:
    """Returns `entropy` (of each sequence's own frequencies, then the mean) and `entropy_pooled` (of the frequencies of all together).

    Per sequence: H_b = -sum_v f_bv log f_bv, f_bv = c_bv / n_b, the plug-in estimate (biased low by about (V - 1) / 2 n_b).
    Pooled: H = -sum_v f_v log f_v, f_v = sum_b c_bv / sum_b n_b. It is a ratio of sums over sequences, numerator_b = -sum_v c_bv log f_v,
    and as d(-f log f) summed over v is -log f df (the f's sum to 1), the ratio's delta-method stderr is the entropy's.
    """
    tokens_BL, lengths_B = np.asarray(tokens_BL), np.asarray(lengths_B)
    valid_BL = np.arange(tokens_BL.shape[1])[None, :] < lengths_B[:, None]
    own_B = [unigram(row[valid]) for row, valid in zip(tokens_BL, valid_BL, strict=True)]
    _, symbol, count = np.unique(tokens_BL[valid_BL], return_inverse=True, return_counts=True)  # of the symbols that occur: any vocabulary
    surprise_BL = np.zeros(tokens_BL.shape)
    surprise_BL[valid_BL] = -np.log(count / max(count.sum(), 1))[symbol]
    return {
        "entropy": mean_metric(np.array(own_B, np.float64)),
        "entropy_pooled": Metric(surprise_BL.sum(axis=1), lengths_B.astype(np.float64)),
    }


def unigram(tokens: Integer[np.ndarray, "n"]) -> float:
    """Returns -sum f log f over the symbols' frequencies; 0 for no symbols."""
    _, count = np.unique(tokens, return_counts=True)
    share = count / max(count.sum(), 1)
    return float(-(share * np.log(share)).sum())
