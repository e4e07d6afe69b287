"""Is what two samplers write one law? A permutation test of emitted sequences, for weights too large to enumerate.

Under "one law", who wrote which sequence is a coin toss: exchanging the names of sequences of the same prompt changes nothing but chance.
So a distance between the two sets is compared with the same distance after such exchanges, and the rank of the first among these is an
exact p-value, whatever the distance is and however the tokens of a sequence hang together. What the distance decides is the power.

Distances are Euclidean, between the two sets' pooled laws of a feature: tokens, pairs and triples of neighbours, tokens by their place
behind the prompt, lengths. (Frequent values weigh most, and carry most of what can be seen: where one token in twenty was replaced by the
likeliest, this found .90 of such pairs of sets, total variation .78, chi-square .55.) Where tokens' log-probabilities under the target are
given, the difference of their means is one more: nothing shows better that a sampler is too greedy. In which of these a lossy sampler
shows best can't be said before, so each is put on the scale of its own exchanges, (distance - mean) / deviation, and the largest counts,
for the exchanged sets alike.

The two sets must be independent: other keys, or other request numbers. Samplers that share a draw write the same sequences on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Integer

from dllm.core.types import UserError

WIDTH = 4096  # values of a feature, more are folded into these by a hash: that can hide a difference, never make one
FEATURES = ("tokens", "pairs", "triples", "places", "lengths")


class Texts(NamedTuple):
    """Sequences of one sampler. Those of the same `prompt` number are exchanged with each other's."""

    tokens: np.ndarray  # [R L] ids
    begin: np.ndarray  # [R] the first position that was written, behind the prompt
    lengths: np.ndarray  # [R] tokens that count, the prompt's among them
    prompt: np.ndarray  # [R]
    logprobs: np.ndarray | None = None  # [R L] of each token under the model that both samplers claim to sample


@dataclass(frozen=True)
class Feature:
    """One distance, what it is on average between exchanged sets, and how often these are no nearer."""

    distance: float
    floor: float
    p_value: float


@dataclass(frozen=True)
class Verdict:
    """`p_value` is small where the two laws differ: below a level with at most that probability where they don't.

    score     the largest of (distance - floor) / deviation over the features; `null` has the same of the exchanged sets
    features  {name: Feature}; their p-values are one test each, not corrected for being many
    """

    p_value: float
    score: float
    null: np.ndarray  # [P]
    features: dict[str, Feature]


def judge(a: Texts, b: Texts, permutations: int = 999, seed: int = 0) -> Verdict:
    """Returns whether the texts a and b can be of one law. Raises UserError where no exchange is possible, or a text is empty.

    The floor of a figure is the judgement of a sampler's texts against others of its own: `judge(plain, again)`.
    """
    if permutations < 1:
        raise UserError(f"permutations is {permutations}; make it 1 or more: the smallest p-value is 1 / (1 + permutations)")
    for name, texts in (("first", a), ("second", b)):
        if (np.asarray(texts.lengths) <= np.asarray(texts.begin)).any():
            raise UserError(f"a text of the {name} set has nothing behind its prompt; leave it out of both sets")
    mine_PR = _exchanges(np.asarray(a.prompt), np.asarray(b.prompt), permutations, np.random.default_rng(seed))
    length = max(a.tokens.shape[1], b.tokens.shape[1])
    wide = lambda x: np.pad(np.asarray(x), ((0, 0), (0, length - x.shape[1])))
    scored = a.logprobs is not None and b.logprobs is not None
    both = Texts(
        np.concatenate([wide(a.tokens), wide(b.tokens)]).astype(np.int64),
        *(np.concatenate(pair) for pair in zip(a[1:4], b[1:4])),
        np.concatenate([wide(a.logprobs), wide(b.logprobs)]) if scored else None,
    )
    found = {name: _distances(_counts(both, name), mine_PR) for name in FEATURES}
    found |= {"logprobs": _mean_difference(both, mine_PR)} if scored else {}
    scores = [(x_P - x_P.mean()) / x_P.std() for x_P in found.values() if x_P.std() > 0]
    score_P = np.max(scores, 0) if scores else np.zeros(1 + permutations)
    features = {name: Feature(float(x_P[0]), float(x_P[1:].mean()), _rank(x_P)) for name, x_P in found.items()}
    return Verdict(_rank(score_P), float(score_P[0]), score_P[1:], features)


def _rank(value_P: np.ndarray) -> float:
    """Returns the share of all that are at least the first, itself among them. (Rounding must not make equals differ.)"""
    return float((value_P >= value_P[0] - 1e-9).mean())


def _exchanges(a: np.ndarray, b: np.ndarray, permutations: int, rng: np.random.Generator) -> np.ndarray:
    """Returns [1 + P, R] of 0 and 1: which texts are the first set's, as they are and after random exchanges within each prompt."""
    prompt_R, mine_R = np.concatenate([a, b]), np.arange(len(a) + len(b)) < len(a)
    if not set(a) & set(b):
        raise UserError("the two sets have no prompt in common, so nothing can be exchanged; write both from the same prompts")
    if lone := sorted(set(a) ^ set(b)):
        raise UserError(f"prompt {lone[0]} is in one set only; write both sets from the same prompts")
    order_R = np.argsort(prompt_R, kind="stable")  # grouped by prompt; then a random order within each group
    key_PR = prompt_R[order_R][None] + np.concatenate([np.zeros((1, len(order_R))), rng.random((permutations, len(order_R)))])
    into_PR = np.argsort(key_PR, 1, kind="stable")
    found_PR = np.empty((1 + permutations, len(order_R)), np.float32)
    found_PR[:, order_R] = mine_R[order_R][into_PR]
    return found_PR


def _counts(texts: Texts, feature: str) -> Float[np.ndarray, "R F"]:
    """Returns how often each value of the feature occurs in each text."""
    rows, length = texts.tokens.shape
    at_RL = np.broadcast_to(np.arange(length)[None], (rows, length))
    new_RL = (at_RL >= texts.begin[:, None]) & (at_RL < texts.lengths[:, None])
    if feature == "lengths":
        value_RL, counted_RL = (texts.lengths - texts.begin)[:, None], np.ones((rows, 1), bool)
    elif feature == "places":
        value_RL, counted_RL = texts.tokens * length + at_RL - texts.begin[:, None], new_RL
    else:
        reach, value_RL = FEATURES.index(feature), texts.tokens
        for back in range(1, reach + 1):  # the last token is a written one; those before it may be the prompt's
            before_RL = np.pad(texts.tokens[:, : length - back], ((0, 0), (back, 0)))
            value_RL = value_RL * (texts.tokens.max() + 1) + before_RL
        counted_RL = new_RL & (at_RL >= reach)
    values, code = np.unique(value_RL[counted_RL], return_inverse=True)
    if len(values) > WIDTH:
        code = _hash(values)[code]
    row = np.broadcast_to(np.arange(rows)[:, None], counted_RL.shape)[counted_RL]
    width = min(len(values), WIDTH)
    return np.bincount(row * width + code, minlength=rows * width).reshape(rows, width).astype(np.float32)


def _hash(values: Integer[np.ndarray, "_"]) -> Integer[np.ndarray, "_"]:
    """Returns a bucket below WIDTH for each value (multiplicative hashing; Knuth, vol. 3, 6.4)."""
    return ((values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)).astype(np.int64) % WIDTH


def _distances(counts_RF: Float[np.ndarray, "R F"], mine_PR: Float[np.ndarray, "P R"]) -> Float[np.ndarray, "P"]:
    """Returns the distance between the pooled laws of the two sets, for each way to tell them apart."""
    total_F, distance_P = counts_RF.sum(0), np.empty(len(mine_PR))
    for start in range(0, len(mine_PR), 256):  # it bounds the memory
        mine_PF = mine_PR[start : start + 256] @ counts_RF
        theirs_PF = total_F[None] - mine_PF
        law = lambda x_PF: x_PF / np.maximum(x_PF.sum(1, keepdims=True), 1)
        distance_P[start : start + 256] = np.sqrt(((law(mine_PF) - law(theirs_PF)) ** 2).sum(1, dtype=np.float64))
    return distance_P


def _mean_difference(texts: Texts, mine_PR: Float[np.ndarray, "P R"]) -> Float[np.ndarray, "P"]:
    """Returns how far the two sets' mean log-probabilities of a token are apart, for each way to tell them apart."""
    at_1L = np.arange(texts.tokens.shape[1])[None]
    new_RL = (at_1L >= texts.begin[:, None]) & (at_1L < texts.lengths[:, None])
    sum_R, count_R = np.where(new_RL, texts.logprobs, 0).sum(1, dtype=np.float64), new_RL.sum(1).astype(np.float64)
    mine_PR = mine_PR.astype(np.float64)
    mean = lambda who_PR: who_PR @ sum_R / (who_PR @ count_R)
    return np.abs(mean(mine_PR) - mean(1 - mine_PR))
