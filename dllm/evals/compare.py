"""How many times fewer passes one curve needs than others for the same quality, with a bootstrap interval.

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

LOWER_IS_BETTER = ("gen_nll", "text_nll", "pseudo_nll", "pseudo_perplexity", "composition_js", "kmer_js", "repeats")


@dataclass(frozen=True)
class Point:
    """One setting of a sampler: passes of each sequence, their quality, and their entropy (of dllm.evals.entropy) if it was measured."""

    nfe_B: np.ndarray
    quality: Metric
    entropy: Metric | None = None


@dataclass(frozen=True)
class Comparison:
    """Ratios of passes, baseline over other (above 1: the other is cheaper), at quality levels inside the overlap of the curves.

    The gaps are entropy of the other less that of the baseline, in nats, at the same levels, with bootstrap standard errors; nan where
    not all points have an entropy.
    """

    levels: np.ndarray
    ratio: np.ndarray
    low: np.ndarray
    high: np.ndarray
    mean: float  # geometric, over the band
    mean_low: float
    mean_high: float
    entropy_gap: np.ndarray
    entropy_gap_stderr: np.ndarray
    mean_entropy_gap: float  # over the band
    mean_entropy_gap_stderr: float


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
    x_P, fit_P = _fit(log_nfe_P, quality_P, weights_P)
    return np.interp(levels, fit_P, x_P)


def _fit(log_nfe_P: np.ndarray, quality_P: np.ndarray, weights_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns log NFE, rising, and the monotone quality there."""
    order = np.argsort(log_nfe_P)
    fit_P = monotone(quality_P[order], weights_P[order])
    # The tilt breaks ties of pooled points: inside a flat stretch the inverse is the stretch's line instead of a jump.
    return log_nfe_P[order], fit_P + 1e-9 * max(float(np.abs(fit_P).max()), 1e-9) * np.arange(len(fit_P))


def compare(
    baselines: list[list[Point]],
    other: list[Point],
    higher_is_better: bool = True,
    *,
    levels: int = 5,
    replicates: int = 1000,
    seed: int = 0,
) -> Comparison:
    """Returns NFE(baseline) / NFE(other) at `levels` qualities, and the geometric mean over the band between the first and the last.

    The baseline is the best of some curves: at a level, the least NFE of those that reach it. A curve whose cheapest point is already
    better counts with that point, one that ends below the level doesn't count. So the baseline spans the lowest begin to the highest end
    of its curves, and the band is its overlap with the other curve, less a tenth at each end (there a replicate often runs out of curve).
    Of curves that are about equal the least is a little too low, by noise, and so is the ratio (two equal ones of 7 points with 512
    sequences: 3 %); the interval errs to that side.

    Each replicate draws the sequences of every point anew, with replacement, and so moves passes, quality and entropy together, chooses
    the best curve anew, and goes on beyond the highest end as if reached; low and high are the percentile interval of 95 %.
    The entropies compared are those at the NFE where either curve reaches the level (of the baseline: on its best curve), linear in
    log NFE between points.
    Raises UserError when the curves share no quality.
    """
    if not baselines or min(map(len, [*baselines, other])) < 2:
        raise UserError("a comparison needs at least two points on each curve: add settings to the sweep")
    sign = 1.0 if higher_is_better else -1.0
    rng = np.random.default_rng(seed)
    curves = [_replicates(points, sign, replicates, rng) for points in [*baselines, other]]
    *base_ends, (first, last) = [_fit(c.log_nfe_RP[0], c.quality_RP[0], c.weights_P)[1][[0, -1]] for c in curves]
    bottom, top = max(min(end[0] for end in base_ends), first), min(max(end[1] for end in base_ends), last)
    if not bottom < top:
        raise UserError("the two curves share no quality level: sweep settings with fewer or more passes")
    grid = np.linspace(bottom + 0.1 * (top - bottom), top - 0.1 * (top - bottom), 8 * (levels - 1) + 1)
    # Row 0 of every array is the measured curve, the rest are replicates.
    *bases, mine = (c.at(grid) for c in curves)
    nfe_KRQ, entropy_KRQ, top_KR = (np.stack(parts) for parts in zip(*bases, strict=True))
    reached_KRQ = grid <= top_KR[:, :, None]
    reached_KRQ |= ~reached_KRQ.any(axis=0) & (top_KR == top_KR.max(axis=0))[:, :, None]
    best_1RQ = np.where(reached_KRQ, nfe_KRQ, np.inf).argmin(axis=0)[None]
    base_nfe_RQ, base_entropy_RQ = (np.take_along_axis(x, best_1RQ, axis=0)[0] for x in (nfe_KRQ, entropy_KRQ))
    log_ratio, gap, tails = base_nfe_RQ - mine[0], mine[1] - base_entropy_RQ, [2.5, 97.5]
    low, high = np.exp(np.percentile(log_ratio[1:, ::8], tails, axis=0))
    mean, mean_gap = log_ratio.mean(axis=1), gap.mean(axis=1)
    mean_low, mean_high = np.exp(np.percentile(mean[1:], tails))
    return Comparison(
        levels=sign * grid[::8],
        ratio=np.exp(log_ratio[0, ::8]),
        low=low,
        high=high,
        mean=float(np.exp(mean[0])),
        mean_low=float(mean_low),
        mean_high=float(mean_high),
        entropy_gap=gap[0, ::8],
        entropy_gap_stderr=gap[1:, ::8].std(axis=0),
        mean_entropy_gap=float(mean_gap[0]),
        mean_entropy_gap_stderr=float(mean_gap[1:].std()),
    )


@dataclass(frozen=True)
class _Replicates:
    """A curve as measured (row 0) and in each bootstrap replicate; quality is signed, so that more is better."""

    log_nfe_RP: np.ndarray
    quality_RP: np.ndarray
    entropy_RP: np.ndarray
    weights_P: np.ndarray  # of the monotone fit

    def at(self, levels_Q: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns log NFE [R Q] where each replicate reaches the levels, the entropy [R Q] there, and the quality [R] of its upper end."""
        nfe, entropy, top = [], [], []
        for log_nfe_P, quality_P, entropy_P in zip(self.log_nfe_RP, self.quality_RP, self.entropy_RP, strict=True):
            x_P, fit_P = _fit(log_nfe_P, quality_P, self.weights_P)
            nfe.append(np.interp(levels_Q, fit_P, x_P))
            entropy.append(np.interp(nfe[-1], x_P, entropy_P[np.argsort(log_nfe_P)]))
            top.append(fit_P[-1])
        return np.stack(nfe), np.stack(entropy), np.array(top)


def _replicates(points: list[Point], sign: float, replicates: int, rng: np.random.Generator) -> _Replicates:
    """Returns the curve's replicates; the entropy of all is nan if that of one point is not known."""
    log_nfe, quality, entropy = [], [], []
    for p in points:
        batch = len(p.nfe_B)
        weights_RB = np.concatenate([np.ones((1, batch)), bootstrap_weights(rng, replicates, batch)])
        log_nfe.append(np.log(weights_RB @ p.nfe_B / batch))
        quality.append(sign * bootstrap_ratios(p.quality, weights_RB))
        entropy.append(bootstrap_ratios(p.entropy, weights_RB) if p.entropy else np.full(replicates + 1, np.nan))
    stderr_P = np.array([p.quality.stderr for p in points])
    # A point without spread (stderr 0, or nan for one sequence) would weigh infinitely or not at all.
    stderr_P = np.where(stderr_P > 0, stderr_P, max(np.nanmax(stderr_P, initial=0.0), 1e-12))
    entropy_RP = np.stack(entropy, axis=1)
    entropy_RP = entropy_RP if all(p.entropy for p in points) else np.full_like(entropy_RP, np.nan)
    return _Replicates(np.stack(log_nfe, axis=1), np.stack(quality, axis=1), entropy_RP, 1.0 / stderr_P**2)


def shortfall(baselines: list[list[Point]], other: list[Point], higher_is_better: bool = True) -> float:
    """Returns by how many standard errors the other curve lies below a baseline where it does so most; negative: it is above all of them.

    Each point of the other curve against a baseline interpolated in log NFE (no monotone fit), where that reaches; the stderr is of the
    difference, the baseline's interpolated like its values. nan when no baseline shares a range of passes.
    """
    sign, worst = 1.0 if higher_is_better else -1.0, float("nan")
    table = lambda ps: np.array(sorted((np.log(p.nfe_B.mean()), sign * p.quality.value, p.quality.stderr) for p in ps)).T
    x, y, e = table(other)
    for base_x, base_y, base_e in map(table, baselines):
        inside = (x >= base_x[0]) & (x <= base_x[-1])
        z = (np.interp(x, base_x, base_y) - y) / np.hypot(e, np.interp(x, base_x, base_e))
        worst = float(np.fmax.reduce(z[inside], initial=worst))
    return worst


def frontier(x_P: Float[np.ndarray, "P"], quality_P: Float[np.ndarray, "P"], bins: int) -> list[int]:
    """Returns, by rising x, the index of the best setting in each of `bins` equal bins of log x; empty bins give none.

    The best lies highest above a trend, quadratic in log x, fitted to all and then twice to the best ones: by quality alone, the dearest
    setting of a bin would often win. They are to be measured anew, with another seed: the quality that chose them is too good.
    """
    log_x = np.log(x_P)
    centred = log_x - log_x.mean()
    edges = np.linspace(log_x.min(), log_x.max(), bins + 1)
    bin_P = np.clip(np.searchsorted(edges, log_x, side="right") - 1, 0, bins - 1)
    best = np.arange(len(x_P))
    for _ in range(3):
        degree = min(2, len(np.unique(log_x[best])) - 1)
        above_P = quality_P - np.polyval(np.polyfit(centred[best], quality_P[best], degree), centred)
        best = np.array([max(np.flatnonzero(bin_P == b), key=lambda i: above_P[i]) for b in np.unique(bin_P)])
    return best.tolist()
