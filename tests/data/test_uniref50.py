"""UniRef50: ESM-2's ids, what is given and what is padding, crops, and letters that no model may write."""

from __future__ import annotations

import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.data import documents, shards, tokenizers, uniref50
from dllm.data.corpus import DataConfig
from dllm.data.uniref50 import CLS, EOS, FORBIDDEN, PAD, TOKENS, VOCAB
from tests.data.test_documents import written
from tests.data.test_tokenizers import shared

SEQUENCES = ["MKV", "MXKBZUOJ", "LAGVSERTIDPKQNFYMHWC", "XXX", "W" * 9]


def fasta(place, sequences=SEQUENCES):
    """Writes five sequences to train, and two each to the others."""
    place.mkdir()
    for name, own in (("train", sequences), ("valid", ["MA", "MC"]), ("test", ["MD", "ME"])):
        written(place / f"{name}.fasta.gz", "".join(f">{n}\n{text}\n" for n, text in enumerate(own)))
    return place


def recipe(place, cache, length=12, long="crop", seed=0):
    texts = documents.plan([str(place)], "drawn", 0, 0, seed, "text", cache / "counts.json", lambda line: None)
    return uniref50.recipe(texts, length, long, seed)


def corpus(tmp_path, made, length=12, size=3):
    for split in documents.SPLITS:
        shards.write(tmp_path, made, split, size, lambda *_: None)
    shards.finish(tmp_path, made, lambda line: None)
    return uniref50.load(DataConfig("uniref50", str(tmp_path), length))


def spelt(row):
    return "".join(TOKENS[i] for i in row)


def test_the_vocabulary_is_esm2s():
    assert tokenizers.read(shared("tokenizers", "esm2")).tokens == TOKENS


def test_what_is_forbidden():
    assert [TOKENS[i] for i in FORBIDDEN] == ["<cls>", "<pad>", "<eos>", "<unk>", *"XBUZO.-", "<null_1>", "<mask>"]
    np.testing.assert_array_equal(np.flatnonzero(uniref50.forbidden(np.arange(33))), FORBIDDEN)
    assert (VOCAB, CLS, PAD, EOS, len(TOKENS)) == (32, 0, 1, 2, 33)


def test_rows_are_sequences_with_what_goes_with_them(tmp_path):
    found = corpus(tmp_path, recipe(fasta(tmp_path / "src"), tmp_path, length=24), length=24)
    train = found.train.take(np.arange(len(found.train)))
    assert {name: x.dtype for name, x in train.items()} == {"tokens": np.int32, "given": np.bool_}
    rows = [spelt(row).rstrip("<pad>") for row in train["tokens"]]
    assert rows == [
        "<cls>MKV<eos",
        "<cls>MXKBZUOX<eos",
        "<cls>LAGVSERTIDPKQNFYMHWC<eos",
        "<cls>WWWWWWWWW<eos",
    ]  # XXX has no letter to learn
    np.testing.assert_array_equal((~train["given"]).sum(1), [3, 2, 20, 9])  # each sequence's own D
    assert [TOKENS[i] for i in train["tokens"][1][~train["given"][1]]] == ["M", "K"]
    assert (found.vocab, found.train.extras, found.train.length) == (32, ("given",), 24)
    np.testing.assert_array_equal(found.train.lengths, [5, 10, 22, 11])
    assert not found.train.holds(TOKENS.index("<mask>"))


@pytest.mark.parametrize("seed", [0, 1])
def test_long_sequences_are_cropped_where_a_draw_says(tmp_path, seed):
    rng = np.random.default_rng(3)
    long = ["".join(rng.choice(list(uniref50.STANDARD), 40)) for _ in range(200)]
    made = recipe(fasta(tmp_path / "src", long), tmp_path, seed=seed)
    rows = [spelt(row) for row, _ in made.rows("train", (0, 0))]
    assert all(row.startswith("<cls>") and row.endswith("<eos>") and len(row) == 10 + 10 for row in rows)
    starts = [text.index(row[5:15]) for text, row in zip(long, rows)]
    assert len(rows) == 200
    assert (min(starts), max(starts)) == (0, 30)  # either end is missed by 200 draws with probability 0.3 %: these seeds don't
    later = [spelt(row) for row, _ in made.rows("train", (150, 0))]
    assert later == rows[150:]
    assert rows != [spelt(row) for row, _ in recipe(tmp_path / "src", tmp_path, seed=seed + 2).rows("train", (0, 0))]


def test_long_sequences_can_be_left_out(tmp_path):
    made = recipe(fasta(tmp_path / "src"), tmp_path, length=11, long="drop")
    assert [(spelt(row)[5:-5], after) for row, after in made.rows("train", (0, 0))] == [
        ("MKV", (1, 0)),
        ("MXKBZUOX", (2, 0)),
        ("WWWWWWWWW", (5, 0)),
    ]
    assert [after for _, after in made.rows("train", (2, 0))] == [(5, 0)]


def test_bad_letters_and_lengths(tmp_path):
    place = fasta(tmp_path / "src", ["MKV", "MK*V"])
    with pytest.raises(UserError, match=r"sequence 1 of the train split has '\*' at residue 3"):
        list(recipe(place, tmp_path).rows("train", (0, 0)))
    with pytest.raises(UserError, match="--long is 'keep'"):
        recipe(place, tmp_path, long="keep")
    with pytest.raises(UserError, match="rows of 2 tokens have no room"):
        recipe(place, tmp_path, length=2)


def test_the_real_proteins(tmp_path):
    place = shared("proteins", "valid.fasta.xz")
    texts = documents.plan([str(place)], "drawn", 100, 50, 0, "text", tmp_path / "counts.json", lambda line: None)
    found = corpus(tmp_path, uniref50.recipe(texts, 1024, "crop", 0), 1024, 1000)
    assert [len(getattr(found, split)) for split in documents.SPLITS] == [2350, 100, 50]
    valid = found.valid.take(np.arange(100))
    np.testing.assert_array_equal((~valid["given"]).sum(1), found.valid.lengths - 2)  # the 20 standard letters alone
    assert 30 + 2 <= found.train.lengths.min() < found.train.lengths.max() <= 1024
