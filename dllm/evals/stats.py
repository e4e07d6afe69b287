"""What every metric returns, and the two ways to say how sure it is: the delta method, and the bootstrap over sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from dllm.core.types import UserError


@dataclass(frozen=True)
class Metric:
    """A ratio of sums over sequences, value = sum_b numerator_b / sum_b denominator_b; a plain mean has denominator 1.

    Sequences are the sampling units: words of one sequence are not independent, so a stderr that counted words would be too small.
    """

    numerator_B: np.ndarray
    denominator_B: np.ndarray

    @property
    def value(self) -> float:
        """Returns the pooled ratio; nan when there is nothing in the denominator (no word at all)."""
        total = self.denominator_B.sum()
        return float(self.numerator_B.sum() / total) if total > 0 else float("nan")

    @property
    def stderr(self) -> float:
        """Returns the delta-method standard error of the ratio estimator (Cochran, Sampling Techniques, ch. 6); nan for one sequence.

        With residuals e_b = n_b - value * d_b:  stderr = sqrt(B / (B - 1) * sum_b e_b^2) / sum_b d_b.
        """
        batch, total = len(self.numerator_B), self.denominator_B.sum()
        if batch < 2 or total <= 0:
            return float("nan")
        residual_B = self.numerator_B - self.value * self.denominator_B
        return float(np.sqrt(batch / (batch - 1) * (residual_B**2).sum()) / total)


@dataclass(frozen=True)
class Context:
    """What metrics may need besides the tokens; a metric's module names in NEEDS what it takes from here.

    `run` and `judge` have model_module, model_config, variables, tokenizer, as `train.checkpoint.load_run` returns them.
    """

    words: frozenset[str] | None = None  # the vocabulary of the training split: spelling
    judge: Any = None  # a loaded run: an autoregressive one for gen_nll and text_nll, a masked model for protein
    tokenizer: Any = None  # of the tokens that are scored: text_nll, protein
    held_out: np.ndarray | None = None  # [n, L] tokens of real sequences: protein
    fold: str = ""  # the command that folds proteins; "": none
    run: Any = None  # the loaded run that is evaluated, with its objective: bound, likelihood
    objective: Any = None  # (module, config) of that run
    options: Any = None  # of the sampler self_speculative (its Options): likelihood
    seed: int = 0

    def need(self, field: str, metric: str) -> Any:
        """Returns the field; raises UserError when it is not there."""
        value = getattr(self, field)
        if value is None:
            judge = "a trained gpt run, or a converted autoregressive model: set `judge` to its workdir"
            hints = {"words": "words.txt.gz in the run's workdir", "judge": judge, "held_out": "held-out sequences"}
            raise UserError(f"the metric {metric} needs {hints.get(field, f'the {field} of a run')}")
        return value


def mean_metric(values_B: Shaped[np.ndarray, "B"]) -> Metric:
    """Returns the plain mean of one value a sequence as a Metric."""
    values_B = np.asarray(values_B, np.float64)
    return Metric(values_B, np.ones_like(values_B))


def exp_metric(metric: Metric) -> Metric:
    """Returns exp(value) as a Metric, whose stderr is the delta method's, exp(value) times that of the value."""
    value = np.exp(metric.value)
    linear_B = metric.denominator_B + metric.numerator_B - metric.value * metric.denominator_B
    return Metric(value * linear_B if np.isfinite(value) else metric.numerator_B, metric.denominator_B)


def bootstrap_ratios(metric: Metric, weights_RB: Shaped[np.ndarray, "R B"]) -> Float[np.ndarray, "R"]:
    """Returns the metric's value in each bootstrap replicate; `weights_RB` says how often each sequence was drawn."""
    return (weights_RB @ metric.numerator_B) / np.maximum(weights_RB @ metric.denominator_B, 1e-300)


def bootstrap_weights(rng: np.random.Generator, replicates: int, batch: int) -> Float[np.ndarray, "R B"]:
    """Returns how often each of `batch` sequences occurs in each replicate: rows of a multinomial, sum = batch."""
    return rng.multinomial(batch, np.full(batch, 1.0 / batch), size=replicates).astype(np.float64)
