"""Prepared corpora: rows of tokens in ArrayRecord files, of any size, written once and read in any order.

A folder of one holds manifest.json, the files that it names, the tokenizer's in tokenizer/, and, where rows differ in length,
SPLIT.lengths.npy. A record is a row: its ids, little-endian, without padding. experiments/prepare.py writes them; a data module's
`recipe` says what.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from jaxtyping import Bool, Int, Integer, Shaped

from dllm.core.config import read_json, write_atomic
from dllm.core.types import UserError
from dllm.data import tfds_builders, tokenizers
from dllm.data.corpus import Corpus, DataConfig, Rows
from dllm.data.documents import SPLITS, reason
from dllm.data.packing import Place

MANIFEST = "manifest.json"

_READ = 1024  # records at a time, where all are read
Fields = Callable[[Int[np.ndarray, "B L"]], dict[str, Shaped[np.ndarray, "B L"]]]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a corpus is made: what is written into its manifest, and its rows.

    about     whatever tells it from another: `data`, the module that reads it, `length`, `vocab`, and the module's own
    documents of each split
    rows      (split, place) -> Iterator of (row, place of the next), the same ones at every call, from that place on
    dtype     of the ids in a record
    ragged    rows differ in length
    """

    about: dict[str, Any]
    documents: dict[str, int]
    rows: Callable[[str, Place], Iterator[tuple[Integer[np.ndarray, "l"], Place]]]
    dtype: np.dtype
    ragged: bool = False


class Stored(Rows):
    """A split whose rows lie in files: `take` reads those that are asked for.

    records   a row's ids, or their bytes in `dtype`, by its index
    pad       fills rows up to `length`
    unused    the ids below `vocab` that no row has
    fields    makes what fields go with tokens [B, L]
    lengths   of the rows, where they differ
    """

    def __init__(
        self,
        where: str,
        records: Any,
        length: int,
        vocab: int,
        unused: Sequence[int],
        dtype: np.dtype,
        pad: int = 0,
        fields: Fields | None = None,
        lengths: Integer[np.ndarray, "n"] | None = None,
    ):
        self.where, self.records, self.length, self.vocab, self.unused = where, records, length, vocab, frozenset(unused)
        self.dtype, self.pad, self.fields, self.lengths = dtype, pad, fields or (lambda tokens_BL: {}), lengths

    def __len__(self) -> int:
        return len(self.records)

    @property
    def tokens(self) -> Int[np.ndarray, "n L"]:
        """All tokens, read anew at every use: of a corpus larger than memory use `len`, `length`, `holds` and `take`."""
        return self.take(np.arange(len(self)))["tokens"]

    @property
    def extras(self) -> tuple[str, ...]:
        return tuple(self.fields(np.zeros((0, self.length), np.int32)))

    def take(self, index: Integer[np.ndarray, "B"]) -> dict[str, np.ndarray]:
        """Returns the fields of these rows, [B, L], padded; int32 and bool. A record that can't be read is a UserError with its index."""
        tokens_BL = np.full((len(index), self.length), self.pad, np.int32)
        for row_L, i in zip(tokens_BL, index):
            try:
                record = self.records[int(i)]
            except Exception as e:  # whatever the library raises
                raise UserError(f"record {i} of {self.where} is damaged ({reason(e)}); fetch the file again, or prepare it anew") from None
            ids = np.frombuffer(record, self.dtype) if isinstance(record, bytes) else record
            row_L[: len(ids)] = ids
        return {"tokens": tokens_BL, **self.fields(tokens_BL)}

    def holds(self, token: int) -> bool:
        return 0 <= token < self.vocab and token not in self.unused


def write(folder: Path, recipe: Recipe, split: str, size: int, report: Callable[[int, int], None]) -> None:
    """Writes a split's rows, `size` a file; goes on behind the last whole file of an earlier call, to the same files.

    `report` is called with (documents done, rows done) of the split. A file gets its name when it is whole, and then a JSON beside it: its
    rows, tokens and hash, and the place of the next row.
    """
    done = _done(folder, split)
    place = tuple(done[-1]["next"]) if done else (0, 0)
    total = sum(shard["rows"] for shard in done)
    rows = recipe.rows(split, place)
    for number in itertools.count(len(done)):
        path = folder / f"{split}-{number:05d}.array_record"
        part = path.with_suffix(".part")
        digest, count, tokens = hashlib.sha256(), 0, 0
        with _writing(part) as put:
            for row, place in itertools.islice(rows, size):
                record = row.astype(recipe.dtype).tobytes()
                put(record)
                digest.update(record)
                count, tokens = count + 1, tokens + len(row)
                report(place[0], total + count)
        if count == 0:
            part.unlink()
            return
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        total += count
        about = {"file": path.name, "rows": count, "tokens": tokens, "bytes": part.stat().st_size, "sha256": digest.hexdigest()}
        os.replace(part, path)
        write_atomic(path.with_suffix(".json"), json.dumps(about | {"next": place}) + "\n")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[Callable[[bytes], None]]:
    """Yields what writes a record to a new file. Raises UserError where the place doesn't take it."""
    writer = ArrayRecordWriter(str(path), "group_size:1")  # what random access wants

    def attempt(act: Callable[..., None], *record: bytes) -> None:
        try:
            act(*record)
        except RuntimeError as e:
            path.unlink(missing_ok=True)
            raise UserError(f"cannot write {path} ({reason(e)}); make room and run the same command again") from None

    try:
        yield functools.partial(attempt, writer.write)
    finally:
        attempt(writer.close)


def finish(folder: Path, recipe: Recipe, report: Callable[[str], None]) -> None:
    """Writes the manifest: every record that `write` wrote is read back and compared.

    Raises UserError for a file that has other records than it was given, and for a split without rows.
    """

    def read_back(split: str, used: Bool[np.ndarray, "V"]) -> tuple[list[int], list[dict[str, Any]]]:
        done = _done(folder, split)
        lengths = [length for shard in done for length in _checked(folder / shard["file"], shard, recipe.dtype, used)]
        return lengths, [{name: value for name, value in shard.items() if name != "next"} for shard in done]

    write_manifest(folder, recipe, read_back, report)
    for path in folder.glob("*-*.json"):
        path.unlink()


def write_manifest(folder: Path, recipe: Recipe, read_back: Callable[..., tuple[list[int], Any]], report: Callable[[str], None]) -> None:
    """Writes the manifest of what `read_back`(split, used) finds: the rows' lengths, and the split's files; ids are marked in `used`."""
    manifest = recipe.about | {"dtype": recipe.dtype.str, "ragged": recipe.ragged, "splits": {}}
    for split in SPLITS:
        used = np.zeros(recipe.about["vocab"], bool)
        lengths, found = read_back(split, used)
        if not lengths:
            raise UserError(f"the {split} split has no row of {recipe.about['length']} tokens; give more text, or hold out more of it")
        if recipe.ragged:
            buffer = io.BytesIO()
            np.save(buffer, np.array(lengths, np.int32))
            write_atomic(folder / f"{split}.lengths.npy", buffer.getvalue())
        whole = {"rows": len(lengths), "tokens": sum(lengths), "documents": recipe.documents[split]}
        report(f"{split:5} {whole['rows']:12,} rows, {whole['tokens']:15,} tokens, of {whole['documents']:,} documents; read back")
        manifest["splits"][split] = whole | {"unused": np.flatnonzero(~used).tolist(), "shards": found}
    write_atomic(folder / MANIFEST, json.dumps(manifest) + "\n")


def _done(folder: Path, split: str) -> list[dict[str, Any]]:
    """Returns what is known of the whole files of a split, in order, up to the first that is missing."""
    paths = (folder / f"{split}-{number:05d}.array_record" for number in itertools.count())
    whole = itertools.takewhile(lambda path: path.is_file() and path.with_suffix(".json").is_file(), paths)
    return [read_json(path.with_suffix(".json")) for path in whole]


def _checked(path: Path, shard: dict[str, Any], dtype: np.dtype, used: Bool[np.ndarray, "V"]) -> list[int]:
    """Returns the lengths of a file's rows, and marks their ids in `used`."""
    digest, lengths = hashlib.sha256(), []
    try:
        reader = ArrayRecordReader(str(path))
        count = reader.num_records()
        for first in range(0, count, _READ):
            records = reader.read(first, min(first + _READ, count))
            digest.update(whole := b"".join(records))
            used[np.frombuffer(whole, dtype)] = True
            lengths += [len(record) // dtype.itemsize for record in records]
        reader.close()
    except (ValueError, RuntimeError, IndexError, OSError) as e:
        raise UserError(f"{path} is damaged ({reason(e)}); delete it and run the same command again") from None
    if (len(lengths), digest.hexdigest()) != (shard["rows"], shard["sha256"]):
        raise UserError(f"{path} hasn't the {shard['rows']} records that were written; delete it and run the same command again")
    return lengths


def is_prepared(place: str | Path) -> bool:
    """Returns whether `place` is the folder of a whole prepared corpus."""
    return (Path(place).expanduser() / MANIFEST).is_file()


def read(config: DataConfig, pad: int = 0, fields: Fields | None = None) -> Corpus:
    """Returns the prepared corpus in `config.path`; rows that differ in length are padded with `pad`.

    Raises UserError for a folder that holds none, or one of another data module or length, and for missing and cut-off files.
    """
    if not config.path:
        raise UserError(f"data.name={config.name} reads a folder that experiments/prepare.py wrote; set data.path to it")
    if config.lexicon:
        raise UserError(f"data.lexicon is {config.lexicon}, and tokens are no words; make it 0")
    folder = Path(config.path).expanduser()
    if not is_prepared(folder):
        raise UserError(f"{folder} holds no whole prepared corpus; make it, or go on with it, with experiments/prepare.py")
    manifest = read_json(folder / MANIFEST)
    try:
        name, length, vocab, ragged = manifest["data"], manifest["length"], manifest["vocab"], manifest["ragged"]
        parts, dtype = {split: manifest["splits"][split] for split in SPLITS}, np.dtype(manifest["dtype"])
    except (KeyError, TypeError) as e:
        raise UserError(f"{folder / MANIFEST} is no manifest of a corpus ({e}); restore it, or prepare the corpus anew") from None
    if name != config.name:
        raise UserError(f"{folder} holds a corpus of {name}; set data.name to that")
    if config.length < length if ragged else config.length != length:
        raise UserError(f"{folder} has rows of {length} tokens, and data.length is {config.length}; make that {length}")
    splits = {}
    for split, about in parts.items():
        lengths = _lengths(folder / f"{split}.lengths.npy", about["rows"]) if ragged else None
        where, records = f"the {split} split in {folder}", _records(folder, split, about)
        splits[split] = Stored(where, records, config.length, vocab, about["unused"], dtype, pad, fields, lengths)
    files = folder / tokenizers.FOLDER
    return Corpus(config.name, **splits, vocab=vocab, tokenizer=files if files.is_dir() else None)


def _records(folder: Path, split: str, about: dict[str, Any]) -> Any:
    """Returns the records of a split by index; a file is opened when its first record is read."""
    if about["shards"] is None:
        return tfds_builders.open_split(folder, split, about["rows"])
    for shard in about["shards"]:
        path = folder / shard["file"]
        size = path.stat().st_size if path.is_file() else -1
        if size != shard["bytes"]:
            found = f"has {size} bytes, and its manifest says {shard['bytes']}" if size >= 0 else "is missing"
            raise UserError(f"{path} {found}; fetch it again, or prepare the corpus anew")
    return ArrayRecordDataSource([f"{folder / shard['file']}[0:{shard['rows']}]" for shard in about["shards"]])


def _lengths(path: Path, rows: int) -> Int[np.ndarray, "rows"]:
    try:
        lengths = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        raise UserError(f"{path} is missing or damaged; fetch it again, or prepare the corpus anew") from None
    if lengths.shape != (rows,):
        raise UserError(f"{path} has {lengths.shape} lengths, and there are {rows} rows; fetch it again, or prepare the corpus anew")
    return lengths
