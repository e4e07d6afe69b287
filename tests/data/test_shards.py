"""Prepared corpora: what was interrupted goes on to the same files; rows read back by index; and files that are damaged or missing."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader

from dllm.core.types import UserError
from dllm.data import shards, text8, tokens
from dllm.data.corpus import DataConfig
from dllm.data.documents import SPLITS
from dllm.data.packing import stream
from tests.experiments.programs import files

LENGTH = 6
COUNTS = {"train": 40, "valid": 9, "test": 7}  # documents


def documents(split, first=0, smallest=0):
    """Yields (number, its 0 to 9 ids)."""
    for number in range(first, COUNTS[split]):
        rng = np.random.default_rng((SPLITS.index(split), number))
        yield number, rng.integers(200, size=rng.integers(smallest, 10))


def packed(split, place):
    return stream(documents(split, place[0]), LENGTH, place[1])


def apart(split, place):
    return ((ids[:LENGTH], (number + 1, 0)) for number, ids in documents(split, place[0], smallest=1))


def recipe(ragged=False):
    """Documents packed into rows or, `ragged`, a row each."""
    about = {"data": "text8", "length": LENGTH, "vocab": 300}
    return shards.Recipe(about, COUNTS, apart if ragged else packed, np.dtype("<u2"), ragged)


def prepared(folder, made=None, size=8):
    folder.mkdir(exist_ok=True)
    made = recipe() if made is None else made
    for split in SPLITS:
        shards.write(folder, made, split, size, lambda *_: None)
    shards.finish(folder, made, lambda line: None)
    return folder


def read(folder, length=LENGTH, **more):
    return shards.read(DataConfig("text8", str(folder), length), **more)


def records(path):
    reader = ArrayRecordReader(str(path))
    found = [np.frombuffer(record, "<u2").tolist() for record in reader.read_all()]
    reader.close()
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("whole") / "a")


def expected(split):
    ids = np.concatenate([ids for _, ids in documents(split)])
    return ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)


def test_rows_are_the_documents_end_to_end(whole):
    corpus = read(whole)
    for split in SPLITS:
        rows = getattr(corpus, split)
        np.testing.assert_array_equal(rows.tokens, expected(split))
        assert (len(rows), rows.length, rows.extras, rows.lengths) == (len(expected(split)), LENGTH, (), None)
    index = np.array([3, 0, 25, 3])  # of several files, and one twice
    taken = corpus.train.take(index)
    assert taken.keys() == {"tokens"}
    assert taken["tokens"].dtype == np.int32
    np.testing.assert_array_equal(taken["tokens"], expected("train")[index])
    assert [corpus.train.holds(token) for token in (-1, 299, 300)] == [False, False, False]
    assert all(corpus.train.holds(token) == (expected("train") == token).any() for token in range(200))
    assert (corpus.vocab, corpus.tokenizer) == (300, None)


def test_a_folder_says_what_is_in_it(whole):
    manifest = json.loads((whole / "manifest.json").read_text())
    assert {name: manifest[name] for name in ("data", "length", "vocab", "dtype", "ragged")} == recipe().about | {
        "dtype": "<u2",
        "ragged": False,
    }
    for split, about in manifest["splits"].items():
        rows = expected(split)
        assert (about["rows"], about["tokens"], about["documents"]) == (len(rows), rows.size, COUNTS[split])
        assert [shard["rows"] for shard in about["shards"]] == [8] * (len(rows) // 8) + [len(rows) % 8] * (len(rows) % 8 > 0)
        np.testing.assert_array_equal([row for shard in about["shards"] for row in records(whole / shard["file"])], rows)
    assert {path.name for path in whole.iterdir()} == {"manifest.json"} | {
        shard["file"] for about in manifest["splits"].values() for shard in about["shards"]
    }


@pytest.mark.parametrize("stop", [1, 7, 8, 9, 20])
def test_an_interrupted_run_goes_on_to_the_same(whole, tmp_path, stop):
    """Stopped at row `stop`, and every time a file further: in a file, behind its last row, in the middle of a document."""
    stops = iter(range(stop, 1000, 8))
    now, stopped = next(stops), 0

    def report(done, rows):
        if rows == now:
            raise KeyboardInterrupt

    while True:
        try:
            shards.write(tmp_path, recipe(), "train", 8, report)
            break
        except KeyboardInterrupt:
            now, stopped = next(stops), stopped + 1
            assert len(list(tmp_path.glob("train-*.array_record"))) == (now - 9) // 8
            with pytest.raises(UserError, match="holds no whole prepared corpus; make it, or go on with it"):
                read(tmp_path)
    assert stopped >= 2
    prepared(tmp_path)
    ours, theirs = files(tmp_path), files(whole)
    assert {path.relative_to(tmp_path): data for path, data in ours.items()} == {
        path.relative_to(whole): data for path, data in theirs.items()
    }


def test_rows_of_several_lengths_are_padded(tmp_path):
    folder = prepared(tmp_path, recipe(ragged=True))
    corpus = read(folder, length=LENGTH + 2, pad=250, fields=lambda tokens_BL: {"segment": (tokens_BL != 250).astype(np.int32)})
    rows = [row for row, _ in apart("valid", (0, 0))]
    np.testing.assert_array_equal(corpus.valid.lengths, [len(row) for row in rows])
    taken = corpus.valid.take(np.arange(len(rows)))
    np.testing.assert_array_equal(taken["tokens"], [[*row, *[250] * (LENGTH + 2 - len(row))] for row in rows])
    np.testing.assert_array_equal(taken["segment"], taken["tokens"] != 250)
    assert corpus.valid.extras == ("segment",)
    with pytest.raises(UserError, match=r"has rows of 6 tokens, and data.length is 5; make that 6"):
        read(folder, length=5)


def test_a_split_without_rows(tmp_path):
    empty = recipe()
    for split in SPLITS:
        shards.write(tmp_path, empty, split, 8, lambda *_: None)
    for path in tmp_path.glob("test-*"):
        path.unlink()
    with pytest.raises(UserError, match="the test split has no row of 6 tokens"):
        shards.finish(tmp_path, empty, print)


def test_what_was_written_is_read_back(tmp_path):
    for split in SPLITS:
        shards.write(tmp_path, recipe(), split, 8, lambda *_: None)
    path = tmp_path / "train-00001.array_record"
    good = path.read_bytes()
    path.write_bytes(good[:-5000])
    with pytest.raises(UserError, match=rf"{path} is damaged .*; delete it and run the same command again"):
        shards.finish(tmp_path, recipe(), print)
    shutil.copy(tmp_path / "train-00000.array_record", path)
    with pytest.raises(UserError, match=rf"{path} hasn't the 8 records that were written; delete it and run"):
        shards.finish(tmp_path, recipe(), print)
    path.unlink()
    prepared(tmp_path)
    assert path.read_bytes() == good


def test_damage_is_named(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "a")
    path = folder / "train-00001.array_record"
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:-1])
    with pytest.raises(UserError, match=rf"{path} has {len(data) - 1} bytes, and its manifest says {len(data)}"):
        read(folder)
    path.write_bytes(bytes(len(data)))
    corpus = read(folder)
    np.testing.assert_array_equal(corpus.train.take(np.array([7, 16]))["tokens"], expected("train")[[7, 16]])
    with pytest.raises(UserError, match=r"record 9 of the train split in .*/a is damaged"):
        corpus.train.take(np.array([7, 9]))
    path.unlink()
    with pytest.raises(UserError, match=rf"{path} is missing"):
        read(folder)
    with pytest.raises(UserError, match=r"set data.path to it"):
        shards.read(DataConfig("text8"))
    with pytest.raises(UserError, match=r"data.lexicon is 5"):
        shards.read(DataConfig("text8", str(whole), LENGTH, 5))
    with pytest.raises(UserError, match=r"holds a corpus of text8; set data.name"):
        shards.read(DataConfig("openwebtext", str(whole), LENGTH))
    with pytest.raises(UserError, match=r"has rows of 6 tokens, and data.length is 8; make that 6"):
        read(whole, length=8)
    (folder / "manifest.json").write_text('{"data": "text8"}')
    with pytest.raises(UserError, match=r"manifest.json is no manifest of a corpus \('length'\)"):
        read(folder)


def test_lengths_are_checked(tmp_path):
    folder = prepared(tmp_path, recipe(ragged=True))
    np.save(folder / "valid.lengths.npy", np.zeros(3, np.int32))
    with pytest.raises(UserError, match=r"valid.lengths.npy has \(3,\) lengths, and there are 9 rows"):
        read(folder)
    (folder / "valid.lengths.npy").unlink()
    with pytest.raises(UserError, match=r"valid.lengths.npy is missing or damaged"):
        read(folder)


def test_text8_in_rows(tmp_path):
    (tmp_path / "text8").write_text("the quick brown fox jumps over the lazy dog " * 10)
    text = text8.load(DataConfig("text8", str(tmp_path / "text8"), 7))
    folder = prepared(tmp_path / "a", text8.recipe(str(tmp_path / "text8"), 7))
    corpus = text8.load(DataConfig("text8", str(folder), 7))
    assert corpus.vocab == 27
    for split in SPLITS:
        ids = getattr(text, split)
        np.testing.assert_array_equal(getattr(corpus, split).tokens, ids[: len(ids) // 7 * 7].reshape(-1, 7))
    with pytest.raises(UserError, match="is a prepared corpus itself"):
        text8.recipe(str(folder), 7)
    with pytest.raises(UserError, match=r"train.npz is missing"):  # the other module's folder
        tokens.load(DataConfig("tokens", str(folder), 7))
