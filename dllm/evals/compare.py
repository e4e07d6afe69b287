"""How many times fewer passes one curve needs than another for the same quality, with a bootstrap interval.

A curve is a handful of sampler settings, each measured on sequences of its own: (log of the mean passes, pooled quality). The question "at
quality q, how many passes?" inverts the curve, so it is first made monotone: pool-adjacent-violators (the least-squares monotone fit,
weighted by 1 / stderr^2; unlike a running maximum it isn't pulled up by noise), then linear in log NFE between the points.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from dllm.core.types import UserError
from dllm.evals.stats import Metric, bootstrap_ratios, bootstrap_weights


@dataclass(frozen=True)
class Point:
    """One setting of a sampler: passes of each sequence, and its quality."""

    nfe_B: np.ndarray
    quality: Metric


@dataclass(frozen=True)
class Comparison:
    """Ratios of passes, baseline over other (above 1: the other is cheaper), at quality levels inside the overlap of the two curves."""

    levels: np.ndarray
    ratio: np.ndarray
    low: np.ndarray
    high: np.ndarray
    mean: float
    mean_low: float
    mean_high: float


def monotone(values: Float[np.ndarray, "P"], weights: Float[np.ndarray, "P"]) -> Float[np.ndarray, "P"]:
    """Returns the weighted least-squares non-decreasing fit (pool adjacent violators). 3 1 2, equal weights -> 2 2 2."""
    blocks: list[list[float]] = []  # (mean, weight, members)
    for value, weight in zip(values, weights, strict=True):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            v, w, n = blocks.pop()
            u, x, m = blocks[-1]
            blocks[-1] = [(u * x + v * w) / (x + w), x + w, m + n]
    return np.concatenate([np.full(int(n), v) for v, _, n in blocks])


def nfe_at(levels: Float[np.ndarray, "Q"], log_nfe_P: np.ndarray, quality_P: np.ndarray, weights_P: np.ndarray) -> Float[np.ndarray, "Q"]:
    """Returns log NFE where the monotone curve reaches each level; levels beyond its ends get the end's log NFE."""
    order = np.argsort(log_nfe_P)
    fit = monotone(quality_P[order], weights_P[order])
    # The tilt breaks ties of pooled points: inside a flat stretch the inverse is the stretch's line instead of a jump.
    tilt = 1e-9 * max(float(np.abs(fit).max()), 1e-9) * np.arange(len(fit))
    return np.interp(levels, fit + tilt, log_nfe_P[order])


def compare(
    baseline: list[Point], other: list[Point], higher_is_better: bool = True, *, levels: int = 5, replicates: int = 1000, seed: int = 0
) -> Comparison:
    """Returns NFE(baseline) / NFE(other) at `levels` qualities, and the geometric mean over the band between the first and the last.

    The band is the overlap of the two monotone curves, less a tenth at each end (there a replicate often runs out of curve). Each
    replicate draws the sequences of every point anew, with replacement, and so moves passes and quality together; low and high are the
    percentile interval of 95 %.
    Raises UserError when the two curves share no quality.
    """
    if len(baseline) < 2 or len(other) < 2:
        raise UserError("a comparison needs at least two points on each curve: add settings to the sweep")
    sign = 1.0 if higher_is_better else -1.0
    rng = np.random.default_rng(seed)
    curves = [_replicates(points, sign, replicates, rng) for points in (baseline, other)]
    fits = [monotone(q[0][np.argsort(x[0])], w[np.argsort(x[0])]) for x, q, w in curves]
    bottom, top = max(f[0] for f in fits), min(f[-1] for f in fits)
    if not bottom < top:
        raise UserError("the two curves share no quality level: sweep settings with fewer or more passes")
    grid = np.linspace(bottom + 0.1 * (top - bottom), top - 0.1 * (top - bottom), 8 * (levels - 1) + 1)
    # Row 0 of every array is the measured curve, the rest are replicates.
    base, mine = (np.stack([nfe_at(grid, x[r], q[r], w) for r in range(replicates + 1)]) for x, q, w in curves)
    log_ratio, tails = base - mine, [2.5, 97.5]
    low, high = np.exp(np.percentile(log_ratio[1:, ::8], tails, axis=0))
    mean = log_ratio.mean(axis=1)
    mean_low, mean_high = np.exp(np.percentile(mean[1:], tails))
    return Comparison(sign * grid[::8], np.exp(log_ratio[0, ::8]), low, high, float(np.exp(mean[0])), float(mean_low), float(mean_high))


def _replicates(points: list[Point], sign: float, replicates: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns log NFE [R+1, P], signed quality [R+1, P] (row 0 as measured) and the weights [P] of the monotone fit."""
    log_nfe, quality = [], []
    for p in points:
        batch = len(p.nfe_B)
        weights_RB = np.concatenate([np.ones((1, batch)), bootstrap_weights(rng, replicates, batch)])
        log_nfe.append(np.log(weights_RB @ p.nfe_B / batch))
        quality.append(sign * bootstrap_ratios(p.quality, weights_RB))
    stderr_P = np.array([p.quality.stderr for p in points])
    # A point without spread (stderr 0, or nan for one sequence) would weigh infinitely or not at all.
    stderr_P = np.where(stderr_P > 0, stderr_P, max(np.nanmax(stderr_P, initial=0.0), 1e-12))
    return np.stack(log_nfe, axis=1), np.stack(quality, axis=1), 1.0 / stderr_P**2


def shortfall(baseline: list[Point], other: list[Point], higher_is_better: bool = True) -> float:
    """Returns by how many standard errors the other curve lies below the baseline where it does so most; negative: it is above everywhere.

    Each point of the other curve against the baseline interpolated in log NFE (no monotone fit), where that reaches; the stderr is of the
    difference, the baseline's interpolated like its values. nan when the two curves share no range of passes.
    """
    sign = 1.0 if higher_is_better else -1.0
    table = lambda ps: np.array(sorted((np.log(p.nfe_B.mean()), sign * p.quality.value, p.quality.stderr) for p in ps)).T
    (base_x, base_y, base_e), (x, y, e) = table(baseline), table(other)
    inside = (x >= base_x[0]) & (x <= base_x[-1])
    if not inside.any():
        return float("nan")
    x, y, e = x[inside], y[inside], e[inside]
    return float(((np.interp(x, base_x, base_y) - y) / np.hypot(e, np.interp(x, base_x, base_e))).max())
