"""UniRef50 (Suzek et al. 2015), or proteins in its image: one sequence a row, in ESM-2's vocabulary.

    python experiments/prepare.py --data=uniref50 --src=FOLDER --dst=FOLDER [--long=crop|drop]

A row is <cls>, the residues, <eos>, and padding up to data.length. A sequence of more than length - 2 residues is cropped to that many at a
place drawn once, when it is prepared, by its number (DPLM crops to 1,022, anew in every epoch), or left out. <cls> and <eos> stand around
crops too.

The 20 standard letters are what a model writes. X (any), B (D or N), Z (E or Q), U and O (rare), a gap or a dot stay in a row as they are,
J (I or L) as X; but they are FORBIDDEN, as the specials are: `given`, so visible from the start, never drawn and never in the loss. A
sequence without a standard letter is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Int, Integer

from dllm.core.types import UserError
from dllm.data import shards
from dllm.data.corpus import Corpus, DataConfig
from dllm.data.documents import SPLITS, Documents
from dllm.data.packing import Place
from dllm.data.tokenizers import STANDARD

# Ids are places in it. The same as ESM-2's vocab.txt.
TOKENS = ("<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>")
CLS, PAD, EOS = (TOKENS.index(token) for token in ("<cls>", "<pad>", "<eos>"))
VOCAB = TOKENS.index("<mask>")  # ids of a row are below it: MASK belongs to the models
FORBIDDEN = tuple(i for i, token in enumerate(TOKENS) if token not in tuple(STANDARD))  # neither draft nor target ever gives them weight

_NEVER = np.isin(np.arange(len(TOKENS)), FORBIDDEN)
_IDS = np.full(256, 255, np.uint8)
_IDS[[ord(token) for token in TOKENS if len(token) == 1]] = [i for i, token in enumerate(TOKENS) if len(token) == 1]
_IDS[ord("J")] = TOKENS.index("X")


def load(config: DataConfig) -> Corpus:
    """Returns the corpus that experiments/prepare.py wrote to `config.path`; its rows are read as they are taken, with `fields`."""
    return shards.read(config, PAD, fields)


def fields(tokens_BL: Int[np.ndarray, "B L"]) -> dict[str, np.ndarray]:
    """Returns what goes with rows: `given`, the positions that are FORBIDDEN. A sequence's own D is the number of the others."""
    return {"given": forbidden(tokens_BL)}


def forbidden(tokens: Integer[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
    """Returns whether a token is one that no model may write."""
    return _NEVER[tokens]


def encode(sequence: str, where: str) -> np.ndarray:
    """Returns the ids [n], uint8, of a sequence of capital letters. Another character is a UserError that names `where`."""
    ids = _IDS[np.frombuffer(sequence.encode("latin-1", "replace"), np.uint8)]
    if ids.max(initial=0) == 255:
        at = int(np.argmax(ids == 255))
        raise UserError(f"{where} has {sequence[at]!r} at residue {at + 1}; the letters of proteins, X, a dot and - are known: mend it")
    return ids


def recipe(documents: Documents, length: int, long: str, seed: int) -> shards.Recipe:
    """Returns the recipe for rows of at most `length` tokens; `long` says whether longer sequences are "crop"ped or "drop"ped."""
    if long not in ("crop", "drop"):
        raise UserError(f"--long is {long!r}; it must be crop or drop")
    room = length - 2
    if room < 1:
        raise UserError(f"rows of {length} tokens have no room for residues; raise --length")

    def rows(split: str, place: Place) -> Iterator[tuple[np.ndarray, Place]]:
        for number, sequence in documents.read(split, place[0]):
            ids = encode(sequence.upper(), f"sequence {number} of the {split} split")
            if len(ids) > room and long == "drop":
                continue
            if len(ids) > room:
                draw = np.random.default_rng((seed, SPLITS.index(split), number))
                first = int(draw.integers(len(ids) - room + 1))
                ids = ids[first : first + room]
            if not forbidden(ids).all():
                yield np.array([CLS, *ids, EOS], np.uint8), (number + 1, 0)

    about = {"data": "uniref50", "length": length, "vocab": VOCAB, "long": long}
    return shards.Recipe(about, {split: documents.size(split) for split in SPLITS}, rows, np.dtype(np.uint8), ragged=True)
