"""A corpus of token ids: whole rows, made beforehand by a tokenizer, by packing documents, or by sampling a model.

`data.path` is a folder with train.npz, valid.npz and test.npz, and in tokenizer/ the files of the tokenizer that the ids are of (without
it they are characters). Each npz holds

    tokens   [n, L] uint16 or int32, L = data.length (0, in a converted model's config: as long as they are)
    segment  [n, L], optional: the number of the document that a token belongs to, where a row holds several
    trained  [n, L] bool, optional: whether a token counts in the loss (prompts and padding don't)
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from dllm.core.types import UserError
from dllm.data import tokenizers
from dllm.data.corpus import Corpus, DataConfig, Rows


def load(config: DataConfig) -> Corpus:
    """Returns the corpus in the folder `config.path`. Missing, damaged or misshapen files are UserErrors."""
    if not config.path:
        raise UserError("data.name=tokens reads a folder of rows; set data.path to it")
    if config.lexicon:
        raise UserError(f"data.lexicon is {config.lexicon}, and tokens are no words; make it 0")
    folder = Path(config.path).expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; set data.path to one with train.npz, valid.npz and test.npz")
    tokenizer = tokenizers.beside(folder)
    splits = {split: _read(folder / f"{split}.npz", config.length, tokenizer.vocab) for split in ("train", "valid", "test")}
    for split, rows in splits.items():
        if rows.extras != splits["train"].extras:
            raise UserError(f"{folder / split}.npz has other fields than train.npz; make them alike")
    files = folder / tokenizers.FOLDER
    return Corpus(config.name, **splits, vocab=tokenizer.vocab, tokenizer=files if files.is_dir() else None)


def _read(path: Path, length: int, vocab: int) -> Rows:
    """Returns the rows of one split."""
    try:
        with open(path, "rb") as opened, np.load(opened) as file:  # np.load leaves a damaged file open
            fields = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise UserError(f"{path} is missing; a corpus of tokens has train.npz, valid.npz and test.npz") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, AttributeError) as e:
        raise UserError(f"{path} is damaged or no npz ({(str(e) or type(e).__name__).splitlines()[0][:80]}); make it again") from None
    tokens = fields.get("tokens")
    if tokens is None or tokens.ndim != 2 or tokens.dtype.kind not in "iu" or len(tokens) == 0:
        raise UserError(f"{path} needs an array `tokens` [n, L] of ids, with one row at least; make it again")
    for name, array in fields.items():
        if name not in ("tokens", "segment", "trained") or array.shape != tokens.shape or array.dtype.kind not in "iub":
            raise UserError(f"{path} has `{name}` {list(array.shape)}; it can have tokens, segment and trained, of one shape [n, L]")
    if tokens.shape[1] != (length or tokens.shape[1]):
        raise UserError(f"{path} has rows of {tokens.shape[1]} tokens, and data.length is {length}; make that {tokens.shape[1]}")
    if tokens.min() < 0 or tokens.max() >= vocab:
        bad = tokens.min() if tokens.min() < 0 else tokens.max()
        raise UserError(f"{path} holds the id {bad}, and its tokenizer has {vocab} ids; put the right one in {path.parent / 'tokenizer'}")
    return Rows(tokens, fields.get("segment"), fields.get("trained"))
