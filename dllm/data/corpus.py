"""Character corpora over 27 symbols: the alphabet, its codes, and what a data module's `load` returns.

A data module `dllm.data.<name>` has `load(config: DataConfig) -> Corpus`, and VOCAB if that doesn't depend on the data. Texts speak
text8's alphabet: space is id 0, a..z are 1..26. MASK belongs to the models (27 there) and never occurs in a corpus.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Array, Integer, Shaped, UInt8

from dllm.core.types import UserError

ALPHABET = " abcdefghijklmnopqrstuvwxyz"

_FOREIGN = 255
_PIECE = 1 << 22  # characters that `words` splits at a time: all words of text8 as Python objects would take a gigabyte
_LETTERS = np.frombuffer(ALPHABET.encode(), np.uint8)
_IDS = bytes(ALPHABET.find(chr(byte)) % 256 for byte in range(256))  # find gives -1 for a foreign byte: _FOREIGN
_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_DIGITS = {ord("0") + digit: f" {name} " for digit, name in enumerate(_NAMES)}


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The data section of a run: which module of dllm.data, the file or folder to read ("" = the module's own), symbols a sequence.

    buckets  lengths below `length` that rows of several lengths are padded to (`pipeline.train_batches`); (): all to `length`
    lexicon  K > 0 keeps only the K most frequent words of the training text, in all splits (`restrict`); 0 keeps the text as it is
    """

    name: str
    path: str = ""
    length: int = 64
    lexicon: int = 0
    buckets: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """A split that is made of sequences, and isn't cut into them. `dllm.data.tokens` says what the fields mean."""

    tokens: Integer[np.ndarray, "n L"]
    segment: Shaped[np.ndarray, "n L"] | None = None
    trained: Shaped[np.ndarray, "n L"] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def extras(self) -> tuple[str, ...]:
        """The fields besides `tokens`."""
        return tuple(name for name in ("segment", "trained") if getattr(self, name) is not None)

    def take(self, index: Integer[np.ndarray, "B"]) -> dict[str, np.ndarray]:
        """Returns the fields of these rows, [B, L]: int32, and bool for `trained`."""
        return {name: getattr(self, name)[index].astype(bool if name == "trained" else np.int32) for name in ("tokens", *self.extras)}

    def holds(self, token: int) -> bool:
        """Returns whether the id occurs in a row."""
        return bool((self.tokens == token).any())


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Three disjoint stretches of text as ids 0..26, or three sets of rows. Readers make no copies: crops are cut as they are needed."""

    name: str
    train: UInt8[np.ndarray, "train"] | Rows
    valid: UInt8[np.ndarray, "valid"] | Rows
    test: UInt8[np.ndarray, "test"] | Rows
    vocab: int = len(ALPHABET)  # ids are below it
    tokenizer: Path | None = None  # the folder of its files; None: ids are characters


def encode(text: str | bytes, where: str = "the text") -> UInt8[np.ndarray, "n"]:
    """Returns the ids [n] of `text`, read-only.

    A character outside a-z and space is a UserError that names `where`, the first such character, and its offset.
    """
    raw = text if isinstance(text, bytes) else text.encode("latin-1", "replace")  # one byte a character: an offset is an index into either
    ids = np.frombuffer(raw.translate(_IDS), np.uint8)
    if ids.max(initial=0) == _FOREIGN:
        at = int(np.argmax(ids == _FOREIGN))
        raise UserError(
            f"{where} has {text[at : at + 1]!r} at offset {at}, but only a-z and space are known; "
            "lower-case it, spell digits out, and turn all else into spaces (dllm.data.corpus.normalize does)"
        )
    return ids


def decode(ids: Integer[np.ndarray | Array, "n"]) -> str:
    """Returns the text of `ids` [n], any integer dtype, numpy or jax. An id over 26, such as the mask, is an IndexError."""
    return _LETTERS[np.asarray(ids)].tobytes().decode()


def normalize(text: str) -> str:
    """Returns `text` by text8's rules: lower case, digits spelt one by one, all else a space, no two in a row and none at the ends."""
    return re.sub("[^a-z]+", " ", text.lower().translate(_DIGITS)).strip()


def words(ids: UInt8[np.ndarray, "n"]) -> tuple[str, ...]:
    """Returns the distinct space-separated words of `ids`, sorted. 2 to 5 seconds for 90 million characters."""
    found: set[bytes] = set()
    for piece in _word_pieces(ids):
        found.update(piece)
    found.discard(b"")
    return tuple(word.decode() for word in sorted(found))


def frequent_words(ids: UInt8[np.ndarray, "n"], count: int) -> tuple[str, ...]:
    """Returns the `count` most frequent words of `ids`, the most frequent first, ties in alphabetical order.

    Fewer different words are a UserError. About 5 seconds for 90 million characters.
    """
    if count < 1:
        raise UserError(f"data.lexicon is {count}; give the number of words to keep, or 0 to keep them all")
    found: collections.Counter[bytes] = collections.Counter()
    for piece in _word_pieces(ids):
        found.update(piece)
    del found[b""]
    if len(found) < count:
        raise UserError(f"data.lexicon is {count}, but the training text has only {len(found)} different words; give a smaller number")
    return tuple(word.decode() for word in sorted(found, key=lambda word: (-found[word], word))[:count])


def restrict(ids: UInt8[np.ndarray, "n"], lexicon: tuple[str, ...]) -> UInt8[np.ndarray, "m"]:
    """Returns `ids` without the words that are not in `lexicon`: those left, in order, one space between them."""
    kept = frozenset(word.encode() for word in lexicon)
    pieces = (b" ".join(word for word in piece if word in kept) for piece in _word_pieces(ids))
    return encode(b" ".join(piece for piece in pieces if piece))


def _word_pieces(ids: UInt8[np.ndarray, "n"]) -> Iterator[list[bytes]]:
    """Yields the words of `ids`, some million characters at a time and none cut; doubled spaces give empty ones."""
    rest = b""
    for start in range(0, len(ids), _PIECE):
        *whole, rest = (rest + _LETTERS[ids[start : start + _PIECE]].tobytes()).split(b" ")
        yield whole
    yield [rest]


def check_length(ids: UInt8[np.ndarray, "n"], length: int, where: str) -> None:
    """Returns nothing; raises UserError where a sequence of `length` characters can't be cut from `ids`."""
    if length < 1:
        raise UserError(f"data.length is {length}; it must be at least 1")
    if len(ids) < length:
        raise UserError(
            f"{where} has {len(ids)} characters, not one sequence of data.length = {length}; give more text or a smaller length"
        )


def make_corpus(
    config: DataConfig, train: UInt8[np.ndarray, "train"], valid: UInt8[np.ndarray, "valid"], test: UInt8[np.ndarray, "test"]
) -> Corpus:
    """Returns the Corpus of three splits, restricted to `config.lexicon` words if that is set.

    Each split is checked to hold one sequence of `config.length` at least (else UserError).
    """
    splits = {"train": train, "valid": valid, "test": test}
    if config.lexicon:
        lexicon = frequent_words(train, config.lexicon)
        splits = {split: restrict(ids, lexicon) for split, ids in splits.items()}
    for split, ids in splits.items():
        check_length(ids, config.length, f"the {split} split of {config.path or config.name}")
    return Corpus(config.name, **splits)
