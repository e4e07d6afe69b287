"""Standard errors, by simulation: the spread of the estimate over many samples is what the formula says from one."""

import math

import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.evals import entropy
from dllm.evals.stats import Context, Metric, bootstrap_ratios, bootstrap_weights, mean_metric


def clustered(rng, batch):
    """Words of a sequence share a level of quality, and better sequences have more words: both make a plain binomial stderr wrong."""
    level_B = rng.beta(2, 2, batch)
    words_B = 3 + rng.binomial(10, level_B)
    return Metric(rng.binomial(words_B, level_B).astype(float), words_B.astype(float))


def test_ratio_stderr_by_simulation():
    rng = np.random.default_rng(0)
    sums = [(m.numerator_B.sum(), m.denominator_B.sum()) for m in (clustered(rng, 200_000) for _ in range(5))]
    truth = sum(n for n, _ in sums) / sum(d for _, d in sums)
    metrics = [clustered(rng, 200) for _ in range(2000)]
    values, stderrs = np.array([m.value for m in metrics]), np.array([m.stderr for m in metrics])
    # 2000 repetitions: the spread is known to 1.6 %, coverage to 0.5 points; 4 standard errors on each.
    assert np.mean(stderrs) == pytest.approx(values.std(), rel=0.065)
    assert np.mean(np.abs(values - truth) < 1.96 * stderrs) == pytest.approx(0.95, abs=0.02)
    words = np.mean([m.denominator_B.sum() for m in metrics])
    assert np.mean(stderrs) > 1.3 * math.sqrt(truth * (1 - truth) / words)  # what counting words as independent would claim


def test_bootstrap_agrees_with_the_delta_method():
    rng = np.random.default_rng(1)
    metric = clustered(rng, 300)
    replicates = bootstrap_ratios(metric, bootstrap_weights(rng, 4000, 300))
    assert replicates.std() == pytest.approx(metric.stderr, rel=0.06)
    assert bootstrap_ratios(metric, np.ones((1, 300)))[0] == pytest.approx(metric.value)


def test_degenerate_samples_have_no_stderr():
    assert math.isnan(mean_metric(np.array([1.0])).stderr)
    nothing = Metric(np.zeros(3), np.zeros(3))
    assert math.isnan(nothing.value)
    assert math.isnan(nothing.stderr)


def test_entropy_by_hand():
    tokens_BL = np.array([[0, 0, 1, 1], [2, 2, 2, 2], [0, 1, 2, 3]])
    metrics = entropy.evaluate(tokens_BL, np.array([4, 4, 4]), Context())
    assert metrics["entropy"].numerator_B == pytest.approx([math.log(2), 0.0, math.log(4)])
    pooled = [3 / 12, 3 / 12, 5 / 12, 1 / 12]
    assert metrics["entropy_pooled"].value == pytest.approx(-sum(p * math.log(p) for p in pooled))
    short = entropy.evaluate(tokens_BL, np.array([2, 4, 1]), Context())  # columns behind the length are not read
    assert short["entropy"].numerator_B == pytest.approx([0.0, 0.0, 0.0])
    assert short["entropy_pooled"].denominator_B.tolist() == [2, 4, 1]


def test_pooled_entropy_stderr_by_simulation():
    rng = np.random.default_rng(2)

    def draw(batch):  # two kinds of sequences, so that their symbols aren't independent
        law_BV = np.where(rng.random(batch)[:, None] < 0.3, np.array([[0.7, 0.1, 0.1, 0.1]]), np.array([[0.2, 0.4, 0.3, 0.1]]))
        return (rng.random((batch, 24, 1)) > law_BV.cumsum(axis=1)[:, None, :-1]).sum(axis=2)

    mean_V = 0.3 * np.array([0.7, 0.1, 0.1, 0.1]) + 0.7 * np.array([0.2, 0.4, 0.3, 0.1])
    truth = -(mean_V * np.log(mean_V)).sum()
    metrics = [entropy.evaluate(draw(150), np.full(150, 24), Context())["entropy_pooled"] for _ in range(1000)]
    values, stderrs = np.array([m.value for m in metrics]), np.array([m.stderr for m in metrics])
    # 1000 repetitions: the spread is known to 2.2 %, coverage to 0.7 points; 4 standard errors on each.
    assert np.mean(stderrs) == pytest.approx(values.std(), rel=0.09)
    assert np.mean(np.abs(values - truth) < 1.96 * stderrs) == pytest.approx(0.95, abs=0.028)


def test_a_missing_ingredient_is_named():
    with pytest.raises(UserError, match="gen_nll needs a trained gpt run"):
        Context().need("judge", "gen_nll")
