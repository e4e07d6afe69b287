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
    vocab = int(tokens_BL.max(initial=0)) + 1
    flat_BL = tokens_BL.astype(np.int64) + vocab * np.arange(len(tokens_BL))[:, None]
    counts_BV = np.bincount(flat_BL[valid_BL], minlength=vocab * len(tokens_BL)).reshape(len(tokens_BL), vocab).astype(np.float64)
    own_BV = counts_BV / np.maximum(lengths_B, 1)[:, None]
    pooled_V = counts_BV.sum(axis=0) / max(lengths_B.sum(), 1)
    return {
        "entropy": mean_metric(-(own_BV * _log(own_BV)).sum(axis=1)),
        "entropy_pooled": Metric(-counts_BV @ _log(pooled_V), lengths_B.astype(np.float64)),
    }


def _log(x: np.ndarray) -> np.ndarray:
    """Returns log x, 0 where x = 0 (there it is multiplied by 0)."""
    return np.log(np.where(x > 0, x, 1.0))
