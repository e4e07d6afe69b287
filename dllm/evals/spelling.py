"""Spelling accuracy: the share of generated words that occur in the training text.

A word is a maximal run of letters between spaces. The vocabulary is that of the training split alone (never validation or test words), so
real text scores below 1: read a score between `floor` (shuffled characters) and `ceiling` (held-out text).
The measure is the one of Campbell et al., Self-Speculative Masked Diffusions (2025), text8; the paper does not say what happens to the two
words that the ends of a sequence cut, so both readings are here.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Integer

from dllm.core.types import UserError
from dllm.data import tokenizers
from dllm.data.corpus import decode
from dllm.evals.stats import Context, Metric

NEEDS = ("words",)  # of the Context


def evaluate(tokens_BL: Integer[np.ndarray, "B L"], lengths_B: Integer[np.ndarray, "B"], context: Context) -> dict[str, Metric]:
    """Returns `spelling` (all words) and `spelling_inner` (without those that touch an end of the sequence): correct / words.

    `tokens_BL`: ids of the 27 symbols, sequence order; columns from lengths_B on are not read.
    """
    words = context.need("words", "spelling")
    texts = [decode(tokens_L[:length]) for tokens_L, length in zip(np.asarray(tokens_BL), np.asarray(lengths_B), strict=True)]
    # The first and the last piece of a split touch an end, even when they are empty: "ab cd e" -> inner "cd", " cd e" -> inner "cd".
    return {"spelling": _count([t.split(" ") for t in texts], words), "spelling_inner": _count([t.split(" ")[1:-1] for t in texts], words)}


def _count(pieces: list[list[str]], words: frozenset[str]) -> Metric:
    """Returns correct words over words, by sequence; empty pieces (doubled spaces) are no words."""
    correct_B = np.array([sum(p in words for p in row if p) for row in pieces], np.float64)
    return Metric(correct_B, np.array([sum(map(bool, row)) for row in pieces], np.float64))


def read_words(workdir: str | Path) -> frozenset[str]:
    """Returns the training vocabulary that a training run left in its workdir. Raises UserError if it isn't there or is damaged."""
    path = Path(workdir) / "words.txt.gz"
    if (Path(workdir) / tokenizers.FOLDER).is_dir():
        raise UserError(f"spelling is for character models, and {workdir} has a tokenizer; drop it from the evals")
    try:
        return frozenset(gzip.decompress(path.read_bytes()).decode().split())
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        raise UserError(f"cannot read {path}: it is written when a training run starts; train again in that workdir") from None


def shuffle(
    tokens_BL: Integer[np.ndarray, "B L"], seed: int = 0, given_BL: Bool[np.ndarray, "B L"] | None = None
) -> Integer[np.ndarray, "B L"]:
    """Returns each chunk with its characters in random order, but those that are `given`: what a model of letter frequencies writes."""
    rng, tokens_BL = np.random.default_rng(seed), np.array(tokens_BL)
    if given_BL is None:
        return rng.permuted(tokens_BL, axis=1)
    for tokens_L, given_L in zip(tokens_BL, given_BL):
        tokens_L[~given_L] = rng.permutation(tokens_L[~given_L])
    return tokens_BL


def ceiling(tokens_BL: Integer[np.ndarray, "B L"], words: frozenset[str]) -> dict[str, Metric]:
    """Returns the scores of real held-out chunks: what a perfect model of the language reaches."""
    return evaluate(tokens_BL, _full(tokens_BL), Context(words=words))


def floor(tokens_BL: Integer[np.ndarray, "B L"], words: frozenset[str], seed: int = 0) -> dict[str, Metric]:
    """Returns the scores of the same chunks with their characters shuffled."""
    return evaluate(shuffle(tokens_BL, seed), _full(tokens_BL), Context(words=words))


def _full(tokens_BL: np.ndarray) -> np.ndarray:
    if len(tokens_BL) == 0:
        raise UserError("spelling needs at least one chunk of held-out text: give a longer text or a smaller data.length")
    return np.full(len(tokens_BL), tokens_BL.shape[1])
