"""Small files of the formats that data modules read."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np


def scored(folder: Path, pieces: dict[str, float]) -> Path:
    """Returns the folder with a llama2.c tokenizer in it: its 259 fixed ids, then " ", "a", "b", then `pieces` with their scores."""
    folder.mkdir(exist_ok=True)
    table = [(b"<unk>", 0.0), (b"\n<s>\n", 0.0), (b"\n</s>\n", 0.0), *((b"<0x%02X>" % byte, 0.0) for byte in range(256))]
    table += [(piece.encode(), score) for piece, score in ({" ": -50.0, "a": -60.0, "b": -70.0} | pieces).items()]
    data = b"".join(struct.pack("<fi", score, len(piece)) + piece for piece, score in table)
    (folder / "tok.bin").write_bytes(struct.pack("<i", 7) + data)
    return folder


def rows_folder(folder: Path, length: int = 16, vocab: int = 27, tokenizer: dict[str, float] | None = None, **fields: object) -> Path:
    """Returns a corpus of random rows; `fields` maps further names to functions of the tokens."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for split, count in (("train", 64), ("valid", 16), ("test", 16)):
        tokens = rng.integers(0, vocab, (count, length)).astype(np.uint16)
        np.savez(folder / f"{split}.npz", tokens=tokens, **{name: make(tokens) for name, make in fields.items()})
    if tokenizer is not None:
        scored(folder / "tokenizer", tokenizer)
    return folder
