"""text8: the first 100 million characters of a cleaned English Wikipedia (Mahoney, mattmahoney.net/dc/textdata), or a text in its image.

`data.path` is one of
    text8.zip, or `text8` itself, plain or .xz     split 90/5/5 in order: 90, 5 and 5 million characters, as in the literature; a file of
                                                   another size is split in the same proportions
    a folder of parts: train*, valid*, test*       plain, .xz or .zip; the splits as given, the parts of each in sorted order
    a folder that experiments/prepare.py wrote     rows of data.length characters, which don't overlap
    "" (nothing)                                   text8.zip is downloaded once into $DLLM_CACHE (default ~/.cache/dllm)
"""

from __future__ import annotations

import hashlib
import http.client
import io
import itertools
import lzma
import os
import sys
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from dllm.core.types import UserError
from dllm.data import shards
from dllm.data.corpus import ALPHABET, Corpus, DataConfig, Rows, encode, make_corpus
from dllm.data.documents import SPLITS
from dllm.data.packing import Place, stream

VOCAB = len(ALPHABET)
URL = "http://mattmahoney.net/dc/text8.zip"
SIZE = 100_000_000  # characters of the real text8
TRIES = 3


def load(config: DataConfig) -> Corpus:
    """Returns the corpus at `config.path` (see the module's head). Bad, missing, or cut-off files are UserErrors."""
    if not config.path:
        return make_corpus(config, *_split(_downloaded()))
    path = Path(config.path).expanduser()
    if shards.is_prepared(path):
        return shards.read(config)
    if path.is_dir():
        return make_corpus(config, *(_parts(path, split) for split in ("train", "valid", "test")))
    return make_corpus(config, *_split(_file(path)))


def recipe(path: str, length: int) -> shards.Recipe:
    """Returns the recipe for rows of `length` characters, of the text at `path`; what doesn't fill the last row of a split is left out."""
    corpus = load(DataConfig("text8", path, length))
    if isinstance(corpus.train, Rows):
        raise UserError(f"{path} is a prepared corpus itself; give --src a text8 file, or a folder of parts")

    def rows(split: str, place: Place) -> Iterator[tuple[np.ndarray, Place]]:
        return stream([(0, getattr(corpus, split))], length, place[1])

    sources = [[split, len(ids), hashlib.sha256(ids).hexdigest()] for split in SPLITS for ids in [getattr(corpus, split)]]
    about = {"data": "text8", "length": length, "vocab": VOCAB, "sources": sources}
    return shards.Recipe(about, dict.fromkeys(SPLITS, 1), rows, np.dtype(np.uint8))


def _split(ids: UInt8[np.ndarray, "n"]) -> list[np.ndarray]:
    """Returns the first 90 %, the next 5 % and the last 5 % of `ids`, as views."""
    return np.split(ids, [len(ids) * 90 // 100, len(ids) * 95 // 100])


def _parts(folder: Path, split: str) -> UInt8[np.ndarray, "n"]:
    """Returns the concatenated parts `folder/split*` in sorted order. None, or one part in two packings, is a UserError."""
    files = sorted(file for file in folder.iterdir() if file.name.startswith(split))
    if not files:
        raise UserError(f"{folder} has no {split} part; give data.path a folder with train*, valid* and test*, or one text8 file")
    for one, other in itertools.pairwise(files):
        if one.name.split(".")[0] == other.name.split(".")[0]:
            raise UserError(f"{folder} holds the same part as {one.name} and as {other.name}; keep one")
    return np.concatenate([_file(file) for file in files])


def _file(path: Path) -> UInt8[np.ndarray, "n"]:
    """Returns the ids in one file, whatever its packing (told by its first bytes, not its name)."""
    try:
        raw = path.read_bytes()
        if raw.startswith(b"PK\x03\x04"):
            with zipfile.ZipFile(io.BytesIO(raw)) as archive:
                members = [name for name in archive.namelist() if Path(name).name == "text8"] or archive.namelist()
                if len(members) != 1:
                    raise UserError(f"{path} holds {len(members)} files and none is text8; give data.path an archive of one text")
                raw = archive.read(members[0])  # checks the CRC
        elif raw.startswith(b"\xfd7zXZ\x00"):
            raw = lzma.decompress(raw)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give data.path a text8 file or a folder of parts") from error
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise UserError(f"{path} is damaged or cut off ({error}); fetch it again") from error
    return encode(raw, str(path))


def _downloaded() -> UInt8[np.ndarray, "n"]:
    """Returns the ids of the real text8, from the cache or from URL.

    Whatever is used has been unpacked and measured in this very call, the cached file too: a cut-off or damaged one is dropped and fetched
    anew, and only a whole one gets the final name.
    """
    folder = Path(os.environ.get("DLLM_CACHE") or "~/.cache/dllm").expanduser()
    whole, part = folder / "text8.zip", folder / "text8.zip.part"
    if whole.exists():
        try:
            return _real(whole)
        except UserError as error:
            print(f"dropped from the cache: {error}", file=sys.stderr)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.touch()
    except OSError as error:
        raise UserError(f"cannot write to the cache folder {folder}: {error.strerror}; set DLLM_CACHE to another") from error
    try:
        for _ in range(TRIES):
            try:
                reply = urllib.request.urlopen(URL, timeout=30)
            except (OSError, http.client.HTTPException) as error:
                raise UserError(f"cannot download {URL} ({error}); set data.path to a copy, or use data.name=pydocs") from error
            try:
                with reply:
                    _fetch(reply, part)
                ids = _real(part)
                os.replace(part, whole)
                return ids
            except (OSError, http.client.HTTPException, UserError) as error:
                failure = error
                print(f"dropped: {error}", file=sys.stderr)
    finally:
        part.unlink(missing_ok=True)
    raise UserError(f"{URL} did not arrive whole in {TRIES} tries ({failure}); set data.path to a copy, or use data.name=pydocs")


def _real(path: Path) -> UInt8[np.ndarray, "n"]:
    """Returns the ids in `path`, which must hold exactly SIZE characters (else UserError)."""
    ids = _file(path)
    if len(ids) != SIZE:
        raise UserError(f"{path} holds {len(ids)} characters and text8 has {SIZE}; fetch it again")
    return ids


def _fetch(reply: http.client.HTTPResponse, part: Path) -> None:
    """Returns nothing: writes the body to `part`, with a progress bar. Fewer bytes than Content-Length says is a UserError."""
    total = int(reply.headers.get("Content-Length") or 0)
    done = 0
    with part.open("wb") as file:
        while block := reply.read(1 << 18):
            file.write(block)
            done += len(block)
            bar = f"[{'#' * (40 * done // total):40}] of {total / 1e6:.1f} MB" if total else ""
            print(f"\rtext8.zip {done / 1e6:5.1f} MB {bar}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if total and done != total:
        raise UserError(f"{URL} was cut off after {done} of {total} bytes")
