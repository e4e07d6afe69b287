"""The permutation test of two samplers' texts: how often it errs where there is nothing, and what it finds where there is."""

from __future__ import annotations

import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.evals import lossless
from dllm.evals.lossless import Texts, judge

V, L, PROMPTS = 12, 24, 8
TABLE = np.random.default_rng(0).dirichlet(np.full(V, 0.5), V)


def write(rng, each=8, greedy=0.0, stop=None, prompts=PROMPTS, length=L):
    """Texts of a Markov chain, `each` from every prompt of one token; a share `greedy` of the tokens is the likeliest: a lossy sampler."""
    prompt = np.repeat(np.arange(prompts), each)
    tokens, logprobs = np.zeros((len(prompt), length), int), np.zeros((len(prompt), length))
    tokens[:, 0] = prompt
    for at in range(1, length):
        law = TABLE[tokens[:, at - 1]]
        drawn = (rng.random((len(prompt), 1)) > law.cumsum(1)[:, :-1]).sum(1)
        tokens[:, at] = np.where(rng.random(len(prompt)) < greedy, law.argmax(1), drawn)
        logprobs[:, at] = np.log(TABLE[tokens[:, at - 1], tokens[:, at]])
    lengths = np.full(len(prompt), length)
    if stop is not None:
        stopped = (tokens[:, 1:] == stop).any(1)
        lengths = np.where(stopped, (tokens[:, 1:] == stop).argmax(1) + 2, length)
    return Texts(tokens, np.ones(len(prompt), int), lengths, prompt, logprobs)


def p_values(trials, scored=True, **changes):
    """Of judging texts of the chain against others, written with `changes`."""
    found = []
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        a, b = write(rng), write(rng, **changes)
        if not scored:
            a, b = a._replace(logprobs=None), b._replace(logprobs=None)
        found.append(judge(a, b, 99, seed).p_value)
    return np.asarray(found)


def test_false_alarms():
    """Equal laws, 120 trials. The rates at levels .05 and .5 have standard errors .02 and .046; both are within 3 of them."""
    found = p_values(120)
    assert (found <= 0.05).mean() < 0.11
    assert 0.36 < (found <= 0.5).mean() < 0.64


def test_power():
    """A fifth of the tokens replaced by the likeliest, in 64 texts of 23 tokens: found nearly always, and in texts without scores too."""
    assert (p_values(20, greedy=0.2) <= 0.05).mean() >= 0.9
    assert (p_values(20, greedy=0.2, scored=False) <= 0.05).mean() >= 0.9


def test_the_verdict():
    """The p-value is the rank among the exchanged; distances stand out from their floors, that of equal texts doesn't."""
    rng = np.random.default_rng(0)
    a, again, other = write(rng), write(rng), write(rng, greedy=0.3)
    floor, found = judge(a, again, 199), judge(a, other, 199)
    assert found.p_value == 1 / 200
    assert (found.null < found.score).all()
    assert floor.p_value == np.mean([1.0, *(floor.null >= floor.score)])
    assert floor.p_value > 0.05
    assert found.features.keys() == {*lossless.FEATURES, "logprobs"}
    for name in ("tokens", "pairs", "logprobs"):
        assert found.features[name].distance > 2 * found.features[name].floor
        assert floor.features[name].distance < 2 * floor.features[name].floor
    assert found.features["lengths"].p_value == 1  # all are equal


def test_it_sees_what_differs_in_one_feature_only():
    """Lengths alone, and the order of tokens alone."""
    rng = np.random.default_rng(1)
    a, b = write(rng), write(rng)
    short = judge(a, b._replace(lengths=b.lengths - rng.integers(0, 3, len(b.lengths))), 99)
    assert short.features["lengths"].p_value == 0.01
    assert short.p_value == 0.01
    turned = b.tokens.copy()
    turned[:, 1:] = turned[:, :0:-1]
    order = judge(a, b._replace(tokens=turned, logprobs=None), 99)
    assert order.features["tokens"].p_value > 0.05
    assert order.features["pairs"].p_value == order.p_value == 0.01


def test_texts_are_exchanged_within_their_prompt_only():
    """Prompts whose texts differ a lot, with the same number of both sets in each: no set is told apart by them."""
    mine = lossless._exchanges(np.asarray([3, 3, 5, 9]), np.asarray([9, 5, 5, 3, 9]), 50, np.random.default_rng(0))
    prompt = np.asarray([3, 3, 5, 9, 9, 5, 5, 3, 9])
    np.testing.assert_array_equal(mine[0], [1] * 4 + [0] * 5)
    for number, count in ((3, 2), (5, 1), (9, 1)):
        assert (mine[:, prompt == number].sum(1) == count).all()
        assert (mine[1:, prompt == number].mean(0) > 0.1).all()


def test_stops_and_hashed_values(monkeypatch):
    """What lies behind a text's end isn't read; with few buckets the test still sees a difference."""
    rng = np.random.default_rng(2)
    a, b = write(rng, stop=0), write(rng, stop=0)
    spoilt = b.tokens.copy()
    spoilt[np.arange(L)[None] >= b.lengths[:, None]] = 7
    whole, cut = judge(a, b, 49), judge(a, b._replace(tokens=spoilt), 49)
    assert whole.features == cut.features
    monkeypatch.setattr(lossless, "WIDTH", 20)
    assert judge(write(rng), write(rng, greedy=0.4)._replace(logprobs=None), 99).features["triples"].p_value <= 0.02


def test_bad_input():
    rng = np.random.default_rng(0)
    a = write(rng)
    for b, words in (
        (a._replace(prompt=a.prompt + 100), "no prompt in common"),
        (a._replace(prompt=a.prompt + 1), "prompt 0 is in one set only"),
        (a._replace(lengths=a.begin), "the second set has nothing behind its prompt"),
    ):
        with pytest.raises(UserError, match=words):
            judge(a, b)
    with pytest.raises(UserError, match="permutations is 0"):
        judge(a, a, 0)
