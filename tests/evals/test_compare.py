import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.evals.compare import Point, compare, frontier, monotone, nfe_at, shortfall
from dllm.evals.stats import Metric

PASSES = (4, 6, 8, 12, 16, 24, 32)


def curve(rng, speed, batch=128, slope=0.15):
    """Quality is a + slope log(passes * speed): a curve `speed` times cheaper than one with speed 1, on its own noisy sequences."""
    points = []
    for passes in PASSES:
        words_B = rng.integers(6, 12, batch)
        level_B = np.clip(rng.normal(0.3 + slope * np.log(passes * speed / 4), 0.1, batch), 0, 1)
        quality = Metric(rng.binomial(words_B, level_B).astype(float), words_B.astype(float))
        points.append(Point(passes * np.exp(rng.normal(0, 0.1, batch)), quality))
    return points


def test_monotone_fit():
    assert monotone(np.array([1.0, 2.0, 3.0]), np.ones(3)).tolist() == [1, 2, 3]
    assert monotone(np.array([3.0, 1.0, 2.0]), np.ones(3)).tolist() == [2, 2, 2]
    assert monotone(np.array([1.0, 4.0, 2.0]), np.array([1.0, 3.0, 1.0])).tolist() == [1, 3.5, 3.5]


def test_inverse_of_a_curve():
    x, y = np.log([2.0, 4.0, 8.0]), np.array([0.2, 0.4, 0.6])
    assert np.exp(nfe_at(np.array([0.2, 0.3, 0.6, 0.9]), x, y, np.ones(3))) == pytest.approx([2, 8**0.5, 8, 8])
    order = [2, 0, 1]  # the points of a curve may come in any order
    assert nfe_at(np.array([0.5]), x[order], y[order], np.ones(3)) == pytest.approx(nfe_at(np.array([0.5]), x, y, np.ones(3)))


@pytest.mark.parametrize("higher", [True, False])
def test_a_known_ratio_is_recovered(higher):
    rng = np.random.default_rng(0)
    base, fast = curve(rng, 1.0, batch=4000), curve(rng, 2.0, batch=4000)
    if not higher:
        flip = lambda points: [Point(p.nfe_B, Metric(-p.quality.numerator_B, p.quality.denominator_B)) for p in points]
        base, fast = flip(base), flip(fast)
    c = compare([base], fast, higher, replicates=200)
    assert c.mean == pytest.approx(2.0, rel=0.03)
    assert c.ratio == pytest.approx(np.full(5, 2.0), rel=0.1)
    assert c.mean_low < 2.0 < c.mean_high
    assert (np.diff(c.levels) > 0).all() == higher
    assert shortfall([base], fast, higher) < -5
    assert shortfall([fast], base, higher) > 5


def test_the_intervals_cover():
    """120 repetitions at 95 %: fewer than 105 hits (87.5 %) has a chance of 1e-3. (Of 400: 94.0 %, and 95.8 % with batch=512.)"""
    rng, hits, widths = np.random.default_rng(1), 0, []
    for n in range(120):
        c = compare([curve(rng, 1.0)], curve(rng, 1.5), levels=3, replicates=200, seed=n)
        hits += c.mean_low <= 1.5 <= c.mean_high
        widths.append(c.mean_high / c.mean_low)
    assert hits >= 105
    assert np.median(widths) < 1.5  # and they say something


def test_curves_that_do_not_meet():
    rng = np.random.default_rng(2)
    low, high = curve(rng, 1.0, slope=0.01), curve(rng, 1e4, slope=0.01)
    far = [Point(p.nfe_B, Metric(p.quality.numerator_B + 2 * p.quality.denominator_B, p.quality.denominator_B)) for p in high]
    with pytest.raises(UserError, match="share no quality"):
        compare([low], far)
    with pytest.raises(UserError, match="two points"):
        compare([low, low[:1]], high)
    later = [Point(p.nfe_B * 1000, p.quality) for p in high]
    assert np.isnan(shortfall([low], later))


def exact(*points, entropy=None):
    """A curve without noise, of (passes, quality) pairs; its entropy is a function of passes."""
    constant = lambda x: Metric(np.full(3, float(x)), np.ones(3))
    return [Point(np.full(3, float(n)), constant(q), constant(entropy(n)) if entropy else None) for n, q in points]


def test_the_baseline_is_the_better_of_its_curves_at_each_quality():
    """In log2 of passes: a = 10 q + 1 up to q = .4; b, 5 q + 2.5 from q = .2 on, is dearer at first; the other curve is 5 q."""
    line = lambda offset, slope, *levels: exact(*((2 ** (offset + slope * q), q) for q in levels))
    a, b, other = line(1, 10, 0.0, 0.2, 0.4), line(2.5, 5, 0.2, 0.6), line(0, 5, -0.1, 0.1, 0.5)
    c = compare([a, b], other, levels=5, replicates=10)
    # The band is [0, .5] less a tenth. Below .2, b counts with its cheapest point, 3.5, and above .3 a is dearer than b; its end is .4.
    assert c.levels == pytest.approx([0.05, 0.15, 0.25, 0.35, 0.45])
    assert np.log2(c.ratio) == pytest.approx([1.5 - 0.25, 2.5 - 0.75, 3.5 - 1.25, 2.5, 2.5])
    assert np.log2([c.mean, c.mean_low, c.mean_high]) == pytest.approx([np.log2(c.mean)] * 3)
    assert 1.25 < np.log2(c.mean) < 2.5
    assert compare([b, a], other, replicates=10).ratio == pytest.approx(c.ratio)
    cheap = exact((2**0.5, 0.2), (2**9, 0.3))  # at .05 and .15 its cheapest point beats all of a
    c = compare([a, cheap], other, replicates=10)
    assert c.levels[:2] == pytest.approx([0.04, 0.12])
    assert np.log2(c.ratio)[:2] == pytest.approx([0.5 - 0.2, 0.5 - 0.6])


def test_the_shortfall_is_from_the_best_baseline():
    rng = np.random.default_rng(4)
    slow, fast, other = (curve(rng, speed, batch=500) for speed in (1.0, 3.0, 2.0))
    assert shortfall([slow, fast], other) == shortfall([fast], other) > 2
    assert shortfall([slow], other) < 0


def test_beyond_a_curves_end_the_other_baseline_counts_alone():
    short, long = exact((2, 0.0), (4, 0.2)), exact((8, 0.0), (64, 0.6))
    other = exact((1, 0.0), (2, 0.6))
    c = compare([short, long], other, levels=5, replicates=10)
    assert c.levels == pytest.approx([0.06, 0.18, 0.3, 0.42, 0.54])
    nfe = lambda q: 8 * 8 ** (q / 0.6)
    mine = 2 ** (c.levels / 0.6)
    assert c.ratio * mine == pytest.approx([2 * 2**0.3, 2 * 2**0.9, nfe(0.3), nfe(0.42), nfe(0.54)])


def test_entropies_are_compared_at_equal_quality():
    base = exact((4, 0.1), (8, 0.2), (16, 0.3), entropy=lambda n: 2 + 0.1 * np.log2(n))
    fast = exact((2, 0.1), (4, 0.2), (8, 0.3), entropy=lambda n: 2.03 + 0.1 * np.log2(n))
    c = compare([base], fast, replicates=10)
    assert c.entropy_gap == pytest.approx(np.full(5, 0.03 - 0.1))  # half the passes, .1 less
    assert (c.mean_entropy_gap, c.mean_entropy_gap_stderr) == pytest.approx((-0.07, 0.0), abs=1e-9)
    best = exact((3, 0.1), (4, 0.2), (12, 0.3), entropy=lambda n: 5.0)
    assert compare([base, best], fast, replicates=10).mean_entropy_gap < -2.5  # of the baseline's best curve
    assert np.isnan(compare([base, exact((3, 0.1), (12, 0.3))], fast, replicates=10).mean_entropy_gap)


def test_the_entropy_gaps_stderr():
    rng = np.random.default_rng(3)
    noisy = lambda points: [Point(p.nfe_B, p.quality, Metric(rng.normal(2.5, 0.1, len(p.nfe_B)), np.ones(len(p.nfe_B)))) for p in points]
    gaps = [compare([noisy(curve(rng, 1.0))], noisy(curve(rng, 1.5)), replicates=100, seed=n) for n in range(30)]
    z = np.array([c.mean_entropy_gap / c.mean_entropy_gap_stderr for c in gaps])
    assert abs(z.mean()) < 4 / 30**0.5
    assert 0.6 < z.std() < 1.6


def test_frontier():
    """In each of three bins of log x the setting that lies highest above the trend; by quality alone it would be 2, 5 and 7."""
    x = np.array([4.0, 5.0, 7.5, 8.1, 10.0, 15.0, 20.0, 32.0, 4.5])
    quality = 0.2 * np.log(x) + np.array([0, 0.02, 0, 0, 0.03, 0, 0.02, 0, -0.1])
    assert frontier(x, quality, 3) == [1, 4, 6]
    assert frontier(np.array([4.0, 64.0]), np.array([0.1, 0.2]), 9) == [0, 1]  # empty bins
    assert frontier(np.array([4.0, 4.0]), np.array([0.1, 0.2]), 3) == [1]
