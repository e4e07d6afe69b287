"""OpenWebText: both packings from a reference that knows the whole text, a tokenizer of its own, and GPT-2's files."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.data import documents, openwebtext, shards, tokenizers
from dllm.data.corpus import DataConfig
from tests.data.test_documents import jsonl, written
from tests.data.test_tokenizers import shared

pytest.importorskip("tokenizers", reason="the extra `hf` isn't installed")
WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "moon", "and"]
VOCAB = 280


def text(number):
    rng = np.random.default_rng(number)
    return " ".join(rng.choice(WORDS, rng.integers(1, 30))).capitalize() + ("." if number % 3 else "\n\nIt's so!")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """300 documents in two files, and a tokenizer trained on them. No test changes it."""
    place = tmp_path_factory.mktemp("owt")
    (place / "src").mkdir()
    for part in range(2):
        written(place / "src" / f"{part}.jsonl.xz", jsonl(*({"text": text(n)} for n in range(part * 150, part * 150 + 150))))
    for wrapping in openwebtext.PACKINGS:
        (place / wrapping).mkdir()
        for name, data in openwebtext.trained_files(map(text, range(300)), VOCAB, wrapping).items():
            (place / wrapping / name).write_bytes(data)
    return place


def found(place, cache):
    return documents.plan([str(place / "src")], "last", 20, 10, 0, "text", cache / "counts.json", lambda line: None)


@pytest.mark.parametrize("wrapping", openwebtext.PACKINGS)
def test_rows_of_both_packings(place, tmp_path, wrapping):
    made = openwebtext.recipe(found(place, tmp_path), place / wrapping, 16, wrapping)
    own = tokenizers.read(place / wrapping)
    numbers = {"train": range(270), "test": range(270, 280), "valid": range(280, 300)}
    for split, documents_ in numbers.items():
        assert made.documents[split] == len(documents_)
        stream = [i for n in documents_ for i in [*own.encode(text(n)), own.eos]]
        width = 16 if wrapping == "plain" else 14
        expected = [stream[at : at + width] for at in range(0, len(stream) - width + 1, width)]
        if wrapping == "wrapped":
            expected = [[own.bos, *row, own.eos] for row in expected]
        rows, places = zip(*made.rows(split, (0, 0)))
        np.testing.assert_array_equal(rows, expected)
        for at in (0, len(rows) // 2, len(rows) - 2):
            again = list(made.rows(split, places[at]))
            np.testing.assert_array_equal([row for row, _ in again], expected[at + 1 :])
            assert [after for _, after in again] == list(places[at + 1 :])


def test_a_whole_corpus(place, tmp_path):
    made = openwebtext.recipe(found(place, tmp_path), place / "wrapped", 16, "wrapped")
    for split in documents.SPLITS:
        shards.write(tmp_path, made, split, 50, lambda *_: None)
    shards.finish(tmp_path, made, lambda line: None)
    (tmp_path / "tokenizer").symlink_to(place / "wrapped")
    corpus = openwebtext.load(DataConfig("openwebtext", str(tmp_path), 16))
    own = tokenizers.read(corpus.tokenizer)
    assert (corpus.vocab, own.vocab, own.begins, own.bos, own.eos) == (VOCAB, VOCAB, True, 0, 0)
    first = corpus.train.take(np.array([0]))["tokens"][0].tolist()
    assert text(0).startswith(own.decode(first[:-1]))
    assert not corpus.train.holds(VOCAB)


def test_a_tokenizer_is_trained(place):
    own = tokenizers.read(place / "plain")
    assert (own.vocab, own.bos, own.eos, own.begins) == (VOCAB, 0, 0, False)
    for sample in (text(0), "Ünknown \t bytes 你", ""):
        assert own.decode(own.encode(sample)) == sample
    assert len(own.encode(text(0))) < 0.6 * len(text(0).encode())
    assert 0 not in own.encode(text(1))
    with pytest.raises(UserError, match=r"bytes and end-of-text alone are 257"):
        openwebtext.trained_files(["a"], 257, "plain")
    with pytest.raises(UserError, match=r"words for \d+ ids only, and --vocab is 5000"):
        openwebtext.trained_files(["a b"], 5000, "plain")


def test_gpt2_files_get_their_names(tmp_path):
    """GPT-2's own names, and what its files don't say: that <|endoftext|> begins and ends a text."""
    for wrapping in openwebtext.PACKINGS:
        folder = tmp_path / wrapping
        folder.mkdir()
        for name, data in openwebtext.gpt2_files(shared("tokenizers", "gpt2"), wrapping).items():
            (folder / name).write_bytes(data)
        own = tokenizers.read(folder)
        assert own.encode("Hello world") == [15496, 995]
        assert (own.vocab, own.bos, own.eos, own.begins) == (50257, 50256, 50256, wrapping == "wrapped")
        assert openwebtext.gpt2_files(folder, wrapping) == tokenizers.files(folder)
    with pytest.raises(UserError, match="holds no tokenizer; give --tokenizer a folder with GPT-2's"):
        openwebtext.gpt2_files(tmp_path, "plain")


def test_gpt2_on_real_text(tmp_path):
    """The count of GPT-2 tokens in ../shared/data's README: 0.218 M of the validation articles."""
    for name, data in openwebtext.gpt2_files(shared("tokenizers", "gpt2"), "plain").items():
        (tmp_path / name).write_bytes(data)
    place = [str(shared("cased", "valid.txt.xz"))]
    texts = documents.plan(place, "last", 1, 1, 0, "text", tmp_path / "counts.json", lambda line: None)
    made = openwebtext.recipe(texts, tmp_path, 1024, "plain")
    rows = [row for row, _ in made.rows("train", (0, 0))]
    assert made.dtype == np.uint16
    assert 0.20e6 < 1024 * len(rows) < 0.22e6
    assert sum((row == 50256).sum() for row in rows) in (210, 211, 212)


def test_bad_tokenizers_and_lengths(place, tmp_path):
    texts = found(place, tmp_path)
    with pytest.raises(UserError, match="the packing is 'tight'; it must be one of plain, wrapped"):
        openwebtext.recipe(texts, place / "plain", 16, "tight")
    with pytest.raises(UserError, match="rows of 2 tokens have no room"):
        openwebtext.recipe(texts, place / "plain", 2, "wrapped")
    own = json.loads((place / "plain" / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer.json").write_bytes((place / "plain" / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own | {"eos_token": None}))
    with pytest.raises(UserError, match="holds no tokenizer with an end-of-text"):
        openwebtext.recipe(texts, tmp_path, 16, "plain")
