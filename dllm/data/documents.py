"""Documents out of files, one after the other: what a corpus is prepared from.

    .jsonl               one object a line, the document under a key (`text`, unless told otherwise)
    .txt                 documents with a line <|endoftext|> between them
    .fasta, .fa, .faa    protein sequences; headers are dropped, a sequence's lines joined, its letters made capital, a last * left out
    .parquet             a column of documents (needs pyarrow: extra `parquet`)

Each but parquet also as .gz or .xz. Documents without a visible character are left out, here and in every count.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from dllm.core.config import read_json, write_atomic
from dllm.core.types import UserError

SEPARATOR = "<|endoftext|>"
SPLITS = ("train", "valid", "test")

_OPENERS = {".gz": gzip.open, ".xz": lzma.open}
_PACKED = (OSError, EOFError, lzma.LZMAError, zlib.error)  # what reading a packed file may raise


class _DamageError(Exception):
    """Where in a file, and what is wrong there."""


def files(place: str | Path) -> list[Path]:
    """Returns the files of documents that `place` is, or holds, sorted by name. None, or of several kinds, is a UserError."""
    place = Path(place).expanduser()
    if place.is_dir():
        found = sorted(file for file in place.iterdir() if _kind(file))
    elif place.is_file():
        found = [place] if _kind(place) else []
    else:
        raise UserError(f"{place} is no file and no folder; give a file of documents, or a folder of them")
    endings = ", ".join(_READERS)
    if not found:
        raise UserError(f"{place} holds no documents; they come in files that end in one of {endings}, all but parquet also .gz or .xz")
    kinds = sorted({_kind(file) for file in found})
    if len(kinds) > 1:
        raise UserError(f"{place} holds files {kinds[0]} and {kinds[1]}; keep one kind in it, or name one file")
    return found


def read(file: Path, key: str = "text") -> Iterator[str]:
    """Yields the documents of a file; `key` is the name of theirs in JSON and parquet.

    Raises UserError, with the document's index (from 0) and line, where a record is damaged or the file cut off.
    """
    number = 0
    try:
        for text in _READERS[_kind(file)](file, key):
            if text and not text.isspace():
                yield text
                number += 1
    except _DamageError as e:
        raise UserError(f"{file}: document {number} (counted from 0), {e}; mend it, or fetch the file again") from None


def reason(error: Exception) -> str:
    """Returns the first words of what a library raised."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0][:100]


def _kind(file: Path) -> str:
    """Returns the ending that tells how a file is read, "" if it is none of ours."""
    ending = Path(file.name.removesuffix(file.suffix)).suffix if file.suffix in _OPENERS else file.suffix
    packed_twice = file.suffix in _OPENERS and ending == ".parquet"
    return ending if ending in _READERS and not packed_twice else ""


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yields (number from 1, line without its end)."""
    number, line = 0, b""
    try:
        with _OPENERS.get(file.suffix, open)(file, "rb") as opened:
            for number, line in enumerate(opened, 1):
                yield number, line.decode().rstrip("\r\n")
    except UnicodeDecodeError as e:
        raise _DamageError(f"line {number}: {line[e.start : e.start + 1]!r} at byte {e.start} is no UTF-8") from None
    except _PACKED as e:
        raise _DamageError(f"behind line {number}: the file can't be read on ({reason(e)})") from None


def _jsonl(file: Path, key: str) -> Iterator[str]:
    for number, line in _lines(file):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as e:
            raise _DamageError(f"line {number} is no JSON ({e})") from None
        text = record.get(key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise _DamageError(f"line {number} has no text under the key {key!r}")
        yield text


def _text(file: Path, key: str) -> Iterator[str]:
    held: list[str] = []
    for _, line in _lines(file):
        if line == SEPARATOR:
            yield "\n".join(held)
            held = []
        else:
            held.append(line)
    yield "\n".join(held)


def _fasta(file: Path, key: str) -> Iterator[str]:
    name, begun, held = None, 0, []

    def sequence() -> str:
        text = "".join(held).upper().removesuffix("*")
        if not text:
            raise _DamageError(f"line {begun}: {name!r} has no residues")
        return text

    for number, line in _lines(file):
        if line.startswith(">"):
            if name is not None:
                yield sequence()
            name, begun, held = line[1:].split(" ")[0], number, []
        elif line.strip():
            if name is None:
                raise _DamageError(f"line {number}: residues before the first header, a line that begins with >")
            if bad := re.search(r"[^A-Za-z.*-]", line.strip()):
                raise _DamageError(f"line {number}: {bad.group()!r} in {name!r} is no residue")
            held.append(line.strip())
    if name is not None:
        yield sequence()


def _parquet(file: Path, key: str) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{file} is parquet, which needs a package: pip install -e '.[parquet]'") from None
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            if key not in opened.schema_arrow.names:
                raise _DamageError(f"it has no column {key!r}, only {', '.join(opened.schema_arrow.names)}")
            for batch in opened.iter_batches(1024, columns=[key]):
                for text in batch.column(0).to_pylist():
                    if not isinstance(text, str):
                        raise _DamageError(f"row {row} has no text in the column {key!r}")
                    yield text
                    row += 1
    except (pyarrow.ArrowException, OSError) as e:
        raise _DamageError(f"behind row {row}: the file can't be read on ({reason(e)})") from None


_READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".jsonl": _jsonl,
    ".txt": _text,
    ".fasta": _fasta,
    ".fa": _fasta,
    ".faa": _fasta,
    ".parquet": _parquet,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """The documents of some files, and which split each is in."""

    files: tuple[Path, ...]
    counts: tuple[int, ...]  # documents a file
    hashes: tuple[str, ...]  # of each file's documents
    split: UInt8[np.ndarray, "documents"]  # its index in SPLITS
    key: str = "text"

    def size(self, split: str) -> int:
        """Returns the number of documents in a split."""
        return int(np.count_nonzero(self.split == SPLITS.index(split)))

    def read(self, split: str, first: int = 0) -> Iterator[tuple[int, str]]:
        """Yields (number in the split, document) from number `first` on. Raises UserError where a file isn't any more what was counted."""
        number, begin = 0, 0
        for file, count in zip(self.files, self.counts):
            mine = self.split[begin : begin + count] == SPLITS.index(split)
            begin, inside = begin + count, int(np.count_nonzero(mine))
            if inside == 0 or number + inside <= first:
                number += inside
                continue
            at = -1
            for at, text in enumerate(read(file, self.key)):
                if at == count:
                    break
                if mine[at]:
                    if number >= first:
                        yield number, text
                    number += 1
            if at + 1 != count:
                more = "more documents" if at == count else f"{at + 1} documents"
                raise UserError(f"{file} has {more} now, and had {count} when they were counted; start anew with another --dst")


def plan(
    places: Sequence[str], held_out: str, valid: int, test: int, seed: int, key: str, cache: Path, report: Callable[[str], None]
) -> Documents:
    """Returns the documents of `places`, files or folders, with the split of each.

    A folder whose files' names all begin with train, valid or test, and not all alike, has its splits so. Of any other place `valid` and
    `test` documents are held out: with held_out = "last" the last ones, test before valid, and with "drawn" any, by `seed`.

    All files are read through once, which finds damaged records before hours of work; what is known of a file is kept in `cache` (JSON),
    so an interrupted count goes on with the next file. Raises UserError for damaged files and for more held-out documents than there are.
    """
    if held_out not in ("last", "drawn"):
        raise UserError(f"held_out is {held_out!r}; it must be last or drawn")
    known = read_json(cache) if cache.exists() else {}
    found: list[tuple[Path, dict]] = []
    splits: list[np.ndarray] = []
    for place in places:
        own = files(place)
        for number, file in enumerate(own, 1):
            stat = file.stat()
            same = {"size": stat.st_size, "changed": stat.st_mtime_ns, "key": key}
            entry = known.get(str(file))
            if not isinstance(entry, dict) or {name: entry.get(name) for name in same} != same:
                known[str(file)] = entry = same | _counted(file, key)
                write_atomic(cache, json.dumps(known, indent=1) + "\n")
            report(f"{entry['documents']:12,} documents in {file} ({number} of {len(own)})")
            found.append((file, entry))
        counts = [entry["documents"] for _, entry in found[-len(own) :]]
        named = [next((i for i, split in enumerate(SPLITS) if file.name.startswith(split)), -1) for file in own]
        if min(named) >= 0 and {SPLITS.index("train"), SPLITS.index("valid")} <= set(named):
            splits.append(np.repeat(np.array(named, np.uint8), counts))
        else:
            splits.append(_held_out(sum(counts), held_out, valid, test, seed, place))
    counts, hashes = (tuple(entry[name] for _, entry in found) for name in ("documents", "sha256"))
    return Documents(tuple(file for file, _ in found), counts, hashes, np.concatenate(splits), key)


def _counted(file: Path, key: str) -> dict[str, int | str]:
    """Returns how many documents a file holds, and a hash of them."""
    count, digest = 0, hashlib.sha256()
    for text in read(file, key):
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
        count += 1
    return {"documents": count, "sha256": digest.hexdigest()}


def _held_out(total: int, how: str, valid: int, test: int, seed: int, place: str) -> UInt8[np.ndarray, "total"]:
    """Returns the split of each of `total` documents."""
    if min(valid, test) < 0 or valid + test >= total:
        raise UserError(f"{place} has {total} documents, and {valid} + {test} are to be held out; hold out less with --valid and --test")
    split = np.zeros(total, np.uint8)
    if how == "last":
        split[total - valid - test : total - valid], split[total - valid :] = 2, 1
    else:
        drawn = np.random.default_rng(seed).choice(total, valid + test, replace=False)
        split[drawn[:valid]], split[drawn[valid:]] = 1, 2
    return split
