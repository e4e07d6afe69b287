"""OpenWebText (Gokaslan and Cohen 2019), or a text in its image: documents as a byte-level BPE's tokens, packed into rows of one length.

    python experiments/prepare.py --data=openwebtext --src=FOLDER --dst=FOLDER --tokenizer=GPT2 [--packing=plain|wrapped]

Both packings lay the documents end to end, an end-of-text behind each, and cut that into rows; what doesn't fill the last row of a split is
left out. They are the published ones, and scores under the two can't be compared:

    plain     a row is `length` tokens of the text: MD4's (arXiv 2406.04329)
    wrapped   a row is BOS, `length` - 2 tokens of the text, EOS: MDLM's (arXiv 2406.07524); GPT-2's end-of-text is both
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from dllm.core.config import read_json
from dllm.core.types import UserError
from dllm.data import packing, shards, tokenizers
from dllm.data.corpus import Corpus, DataConfig
from dllm.data.documents import SEPARATOR, SPLITS, Documents

PACKINGS = ("plain", "wrapped")

_TOGETHER = 256  # documents that are tokenized in one call, on all cores


def load(config: DataConfig) -> Corpus:
    """Returns the corpus that experiments/prepare.py wrote to `config.path`; its rows are read as they are taken."""
    return shards.read(config)


def recipe(documents: Documents, tokenizer: Path, length: int, wrapping: str) -> shards.Recipe:
    """Returns the recipe for rows of `length` tokens; `tokenizer` is a folder of one, `wrapping` one of PACKINGS."""
    if wrapping not in PACKINGS:
        raise UserError(f"the packing is {wrapping!r}; it must be one of {', '.join(PACKINGS)}")
    own = tokenizers.read(tokenizer)
    if not isinstance(own, tokenizers.HuggingFace) or own.eos is None:
        raise UserError(f"{tokenizer} holds no tokenizer with an end-of-text; give GPT-2's files, or let one be trained with --vocab")
    wrapped = wrapping == "wrapped"
    width, bos = length - 2 * wrapped, own.eos if own.bos is None else own.bos
    if width < 1:
        raise UserError(f"rows of {length} tokens have no room for text; raise --length")

    def encoded(split: str, first: int) -> Iterator[tuple[int, np.ndarray]]:
        for batch in itertools.batched(documents.read(split, first), _TOGETHER):
            texts = own.inner.encode_batch([text for _, text in batch], add_special_tokens=False)
            for (number, _), text in zip(batch, texts):
                yield number, np.array([*text.ids, own.eos], np.int32)

    def rows(split: str, place: packing.Place) -> Iterator[tuple[np.ndarray, packing.Place]]:
        for row, after in packing.stream(encoded(split, place[0]), width, place[1]):
            yield (np.array([bos, *row, own.eos], np.int32) if wrapped else row), after

    about = {"data": "openwebtext", "length": length, "vocab": own.vocab, "packing": wrapping}
    sizes = {split: documents.size(split) for split in SPLITS}
    return shards.Recipe(about, sizes, rows, np.dtype("<u2" if own.vocab <= 2**16 else "<i4"))


def gpt2_files(folder: Path, wrapping: str) -> dict[str, bytes]:
    """Returns {name: contents} of the tokenizer's files in `folder`, under the names that `tokenizers.read` knows.

    GPT-2's own are encoder.json and vocab.bpe, and don't say that <|endoftext|> begins and ends a text. Whether a text begins with it is
    a matter of the packing.
    """
    renamed = {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}
    try:
        found = {new: (folder / old).read_bytes() for old, new in renamed.items() if (folder / old).is_file()}
    except OSError as e:
        raise UserError(f"cannot read {e.filename}: {e.strerror}") from None
    found |= tokenizers.files(folder)
    if not found:
        raise UserError(f"{folder} holds no tokenizer; give --tokenizer a folder with GPT-2's encoder.json and vocab.bpe")
    settings = read_json(folder / "tokenizer_config.json") if "tokenizer_config.json" in found else {}
    found["tokenizer_config.json"] = _settings(settings, wrapping)
    return found


def trained_files(texts: Iterable[str], vocab: int, wrapping: str) -> dict[str, bytes]:
    """Returns the files of a byte-level BPE of `vocab` ids, trained on `texts`: <|endoftext|>, the 256 bytes, then what merges make."""
    try:
        import tokenizers as package
    except ImportError:
        raise UserError("training a tokenizer needs a package: pip install -e '.[hf]'") from None
    if vocab <= 257:
        raise UserError(f"--vocab is {vocab}; bytes and end-of-text alone are 257, so make it larger")
    inner = package.Tokenizer(package.models.BPE())
    inner.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = package.decoders.ByteLevel()
    letters = sorted(package.pre_tokenizers.ByteLevel.alphabet())
    trainer = package.trainers.BpeTrainer(vocab_size=vocab, special_tokens=[SEPARATOR], initial_alphabet=letters, show_progress=False)
    inner.train_from_iterator(texts, trainer)
    if inner.get_vocab_size() != vocab:
        raise UserError(f"the text has words for {inner.get_vocab_size()} ids only, and --vocab is {vocab}; lower it, or give more text")
    return {"tokenizer_config.json": _settings({}, wrapping), "tokenizer.json": inner.to_str().encode()}


def _settings(settings: dict, wrapping: str) -> bytes:
    named = {"bos_token": SEPARATOR, "eos_token": SEPARATOR} | settings | {"add_bos_token": wrapping == "wrapped"}
    return (json.dumps(named, indent=1) + "\n").encode()
