import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.evals.compare import Point, compare, monotone, nfe_at, shortfall
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
    c = compare(base, fast, higher, replicates=200)
    assert c.mean == pytest.approx(2.0, rel=0.03)
    assert c.ratio == pytest.approx(np.full(5, 2.0), rel=0.1)
    assert c.mean_low < 2.0 < c.mean_high
    assert (np.diff(c.levels) > 0).all() == higher
    assert shortfall(base, fast, higher) < -5
    assert shortfall(fast, base, higher) > 5


def test_the_intervals_cover():
    """120 repetitions at 95 %: fewer than 105 hits (87.5 %) has a chance of 1e-3. (Of 400: 94.0 %, and 95.8 % with batch=512.)"""
    rng, hits, widths = np.random.default_rng(1), 0, []
    for n in range(120):
        c = compare(curve(rng, 1.0), curve(rng, 1.5), levels=3, replicates=200, seed=n)
        hits += c.mean_low <= 1.5 <= c.mean_high
        widths.append(c.mean_high / c.mean_low)
    assert hits >= 105
    assert np.median(widths) < 1.5  # and they say something


def test_curves_that_do_not_meet():
    rng = np.random.default_rng(2)
    low, high = curve(rng, 1.0, slope=0.01), curve(rng, 1e4, slope=0.01)
    far = [Point(p.nfe_B, Metric(p.quality.numerator_B + 2 * p.quality.denominator_B, p.quality.denominator_B)) for p in high]
    with pytest.raises(UserError, match="share no quality"):
        compare(low, far)
    with pytest.raises(UserError, match="two points"):
        compare(low[:1], high)
    later = [Point(p.nfe_B * 1000, p.quality) for p in high]
    assert np.isnan(shortfall(low, later))
