"""Documents out of files: each format and packing, damage named by record and line, and which split a document is in."""

from __future__ import annotations

import gzip
import json
import lzma

import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.data import documents
from tests.data.test_tokenizers import shared

TEXTS = ["One line.", "Two\nlines, naïve.", "three"]
FASTA = ">P1 first\nMKV\nLAG\n\n>P2\nmxx*\n"


def jsonl(*records) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def written(file, text, encoding="utf-8"):
    """Returns the file, packed as its name says."""
    data = text if isinstance(text, bytes) else text.encode(encoding)
    file.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(file.suffix, lambda x: x)(data))
    return file


@pytest.mark.parametrize("packed", ["", ".gz", ".xz"])
@pytest.mark.parametrize(
    "name, text, expected",
    [
        ("a.jsonl", jsonl(*({"text": text, "n": 1} for text in [*TEXTS[:1], "  \n", *TEXTS[1:]])) + "\n", TEXTS),
        ("a.txt", "\n<|endoftext|>\n".join(TEXTS), TEXTS),
        ("a.txt", "\n<|endoftext|>\r\n".join(TEXTS) + "\n<|endoftext|>\n\n<|endoftext|>\n", TEXTS),
        ("a.fasta", FASTA, ["MKVLAG", "MXX"]),
        ("a.fa", "", []),
    ],
)
def test_documents_of_each_format(tmp_path, name, text, expected, packed):
    file = written(tmp_path / f"{name}{packed}", text)
    assert list(documents.read(file)) == expected


def test_another_key(tmp_path):
    file = written(tmp_path / "a.jsonl", jsonl({"sequence": "MKV"}))
    assert list(documents.read(file, "sequence")) == ["MKV"]
    with pytest.raises(UserError, match=r"document 0 \(counted from 0\), line 1 has no text under the key 'text'"):
        list(documents.read(file))


@pytest.mark.parametrize(
    "name, text, says",
    [
        (
            "a.jsonl",
            jsonl({"text": "a"}, {"text": " "}, {"text": "b"}) + '{"text": "c\n',
            r"document 2 \(counted from 0\), line 4 is no JSON",
        ),
        ("a.jsonl", jsonl({"text": "a"}, {"text": 3}), r"document 1 .*line 2 has no text"),
        ("a.jsonl", jsonl(["text"]), r"document 0 .*line 1 has no text"),
        ("a.txt", b"one\n<|endoftext|>\ntwo\n\xff\n", r"document 1 .*line 4: b'\\xff' at byte 0 is no UTF-8"),
        ("a.fasta", "MKV\n>P1\nMKV\n", r"document 0 .*line 1: residues before the first header"),
        ("a.fasta", ">P1\nMKV\n>P2\nMK7\n", r"document 1 .*line 4: '7' in 'P2' is no residue"),
        ("a.fasta", ">P1\nMKV\n>P2 x\n>P3\nMKV\n", r"document 1 .*line 3: 'P2' has no residues"),
        ("a.fasta", ">P1\nMKV\n>P2\n", r"document 1 .*line 3: 'P2' has no residues"),
    ],
)
def test_a_damaged_record_is_named(tmp_path, name, text, says):
    file = written(tmp_path / name, text)
    with pytest.raises(UserError, match=rf"{file}: {says}"):
        list(documents.read(file))


@pytest.mark.parametrize("packed", [".gz", ".xz"])
def test_a_cut_off_file_is_named_with_what_was_read(tmp_path, packed):
    texts = [f"{n} " + np.random.default_rng(n).bytes(300).hex() for n in range(2000)]
    whole = written(tmp_path / f"a.jsonl{packed}", jsonl(*({"text": text} for text in texts)))
    whole.write_bytes(whole.read_bytes()[:-9000])
    found, read = documents.read(whole), []
    with pytest.raises(UserError, match=rf"{whole}: document (\d+) .*behind line \1: the file can't be read on") as caught:
        read.extend(found)
    assert f"behind line {len(read)}:" in str(caught.value)
    assert read == texts[: len(read)] != []


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `parquet` isn't installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": TEXTS, "n": [1, 2, 3]}), file)
    assert list(documents.read(file)) == TEXTS
    with pytest.raises(UserError, match="no column 'body', only text, n"):
        list(documents.read(file, "body"))
    parquet.write_table(pyarrow.table({"text": ["a", None]}), file)
    with pytest.raises(UserError, match=r"document 1 .*row 1 has no text"):
        list(documents.read(file))
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"document 0 .*behind row 0: the file can't be read on"):
        list(documents.read(file))


def test_which_files_are_read(tmp_path):
    for name in ("b.txt", "a.txt.xz", "notes.md", "LICENSE", "c.parquet.gz"):
        (tmp_path / name).touch()
    assert [file.name for file in documents.files(tmp_path)] == ["a.txt.xz", "b.txt"]
    assert documents.files(tmp_path / "b.txt") == [tmp_path / "b.txt"]
    (tmp_path / "c.jsonl").touch()
    for place, says in (("", "holds files .jsonl and .txt"), ("notes.md", "holds no documents"), ("no", "is no file and no folder")):
        with pytest.raises(UserError, match=says):
            documents.files(tmp_path / place)


def plan(tmp_path, *places, held_out="last", valid=2, test=1, seed=0):
    said = []
    return documents.plan(
        [str(place) for place in places], held_out, valid, test, seed, "text", tmp_path / "counts.json", said.append
    ), said


def numbered(file, first, count):
    return written(file, jsonl(*({"text": f"{n}"} for n in range(first, first + count))))


def texts(found, split, first=0):
    return [text for _, text in found.read(split, first)]


def test_the_last_documents_of_a_source_are_held_out(tmp_path):
    (tmp_path / "src").mkdir()
    numbered(tmp_path / "src" / "a.jsonl", 0, 6), numbered(tmp_path / "src" / "b.jsonl.xz", 6, 1), numbered(tmp_path / "c.jsonl", 7, 4)
    found, said = plan(tmp_path, tmp_path / "src", tmp_path / "c.jsonl")
    assert texts(found, "valid") == ["5", "6", "9", "10"]
    assert texts(found, "test") == ["4", "8"]
    assert list(found.read("train")) == [(0, "0"), (1, "1"), (2, "2"), (3, "3"), (4, "7")]
    assert list(found.read("train", 3)) == [(3, "3"), (4, "7")]
    assert [found.size(split) for split in documents.SPLITS] == [5, 4, 2]
    assert "(2 of 2)" in said[1]


def test_drawn_documents_are_held_out_once_each(tmp_path):
    file = numbered(tmp_path / "a.jsonl", 0, 50)
    found = plan(tmp_path, file, held_out="drawn", valid=10, test=5)[0]
    parts = [texts(found, split) for split in documents.SPLITS]
    assert [len(part) for part in parts] == [35, 10, 5]
    assert sorted((text for part in parts for text in part), key=int) == [f"{n}" for n in range(50)]
    assert parts[1] != [f"{n}" for n in range(40, 50)]
    again, other = (plan(tmp_path, file, held_out="drawn", valid=10, test=5, seed=seed)[0] for seed in (0, 1))
    assert texts(again, "valid") == parts[1] != texts(other, "valid")


def test_files_named_as_splits_are_those(tmp_path):
    (tmp_path / "src").mkdir()
    for name, first in (("test", 8), ("train_00", 0), ("train_01", 4), ("validation", 6)):
        numbered(tmp_path / "src" / f"{name}.jsonl", first, 2)
    found = plan(tmp_path, tmp_path / "src")[0]
    assert [texts(found, split) for split in documents.SPLITS] == [["0", "1", "4", "5"], ["6", "7"], ["8", "9"]]
    for name in ("test", "validation"):
        (tmp_path / "src" / f"{name}.jsonl").unlink()
    assert texts(plan(tmp_path, tmp_path / "src", valid=1)[0], "valid") == ["5"]  # train files alone are a source to be split


def test_counts_are_kept_and_changes_seen(tmp_path, monkeypatch):
    file = numbered(tmp_path / "a.jsonl", 0, 9)
    found = plan(tmp_path, file)[0]
    read = documents.read
    monkeypatch.setattr(documents, "read", lambda *args: pytest.fail("read again"))
    assert plan(tmp_path, file)[0].hashes == found.hashes
    monkeypatch.setattr(documents, "read", read)
    numbered(file, 0, 8)
    with pytest.raises(UserError, match=r"has 8 documents now, and had 9"):
        texts(found, "train")
    numbered(file, 0, 10)
    with pytest.raises(UserError, match=r"has more documents now, and had 9"):
        texts(found, "valid")
    assert plan(tmp_path, file)[0].hashes != found.hashes


def test_what_can_not_be_held_out(tmp_path):
    file = numbered(tmp_path / "a.jsonl", 0, 3)
    with pytest.raises(UserError, match=r"has 3 documents, and 2 \+ 1 are to be held out"):
        plan(tmp_path, file)
    with pytest.raises(UserError, match="must be last or drawn"):
        plan(tmp_path, file, held_out="first")


def test_the_real_files():
    """Counts of ../shared/data's README; the first words of what is known."""
    counts = {("proteins", "valid.fasta.xz"): 2500, ("proteins", "test.fasta.xz"): 2500, ("cased", "valid.txt.xz"): 214}
    for names, count in counts.items():
        assert sum(1 for _ in documents.read(shared(*names))) == count
    assert next(documents.read(shared("cased", "valid.txt.xz"))).startswith("Marvel Noir\n\nMarvel Noir is a 2009-2010")
    assert sum(len(text) for text in documents.read(shared("gov", "us_gov_web_prose.jsonl.xz"))) > 13_000_000
