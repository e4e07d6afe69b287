"""Rows of tokens: batches by (seed, step), fields carried along, and files that are wrong."""

from __future__ import annotations

import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.data import tokens
from dllm.data.corpus import DataConfig
from dllm.data.pipeline import eval_batches, train_batches
from tests.data.files import rows_folder

FIELDS = {"segment": lambda x: np.ones_like(x), "trained": lambda x: (x > 3).astype(np.uint8)}


def load(folder, length=16, **changes):
    return tokens.load(DataConfig("tokens", str(folder), length, **changes))


def test_batches_are_rows_with_their_fields(tmp_path):
    corpus = load(rows_folder(tmp_path / "c", **FIELDS))
    assert (corpus.vocab, corpus.tokenizer, corpus.train.extras) == (27, None, ("segment", "trained"))
    batches = train_batches(corpus.train, 16, 8, seed=3)
    first, second = next(batches), next(batches)
    assert {name: (x.dtype, x.shape) for name, x in first.items()} == {
        "tokens": (np.int32, (8, 16)),
        "segment": (np.int32, (8, 16)),
        "trained": (np.bool_, (8, 16)),
    }
    known = {row.tobytes() for row in corpus.train.tokens.astype(np.int32)}
    assert all(row.tobytes() in known for row in first["tokens"])
    np.testing.assert_array_equal(first["trained"], first["tokens"] > 3)
    assert (first["tokens"] != second["tokens"]).any()
    again, later = (train_batches(corpus.train, 16, 8, seed=3) for _ in range(2))
    next(later)
    again.set_state(later.get_state())
    np.testing.assert_array_equal(next(again)["tokens"], second["tokens"])
    halves = [next(train_batches(corpus.train, 16, 8, 3, index, 2))["tokens"] for index in range(2)]
    np.testing.assert_array_equal(np.concatenate(halves), first["tokens"])


def test_no_row_is_favoured(tmp_path):
    corpus = load(rows_folder(tmp_path / "c", vocab=27))
    place = {row.tobytes(): n for n, row in enumerate(corpus.train.tokens.astype(np.int32))}
    batches = train_batches(corpus.train, 16, 64, seed=0)
    counts = np.bincount([place[row.tobytes()] for _ in range(200) for row in next(batches)["tokens"]], minlength=64)
    assert np.sum((counts - 200) ** 2 / 200) < 113.5  # chi square, 63 degrees: one seed in ten thousand would fail


def test_evaluation_takes_rows_from_the_whole(tmp_path):
    corpus = load(rows_folder(tmp_path / "c", **FIELDS))
    batches = eval_batches(corpus.valid, 16, 2, limit=2)
    np.testing.assert_array_equal(np.concatenate([b["tokens"] for b in batches]), corpus.valid.tokens[[0, 4, 8, 12]])
    assert batches[0].keys() == {"tokens", "segment", "trained"}
    with pytest.raises(UserError, match="16 sequences of 16 tokens, not one batch of 17"):
        eval_batches(corpus.valid, 16, 17)


def test_the_tokenizer_beside_the_rows(tmp_path):
    corpus = load(rows_folder(tmp_path / "c", vocab=263, tokenizer={"ab": -1.0}))
    assert (corpus.vocab, corpus.tokenizer) == (263, tmp_path / "c" / "tokenizer")


def test_what_is_wrong_is_named(tmp_path):
    folder = rows_folder(tmp_path / "c")
    with pytest.raises(UserError, match=r"rows of 16 tokens, and data.length is 8; make that 16"):
        load(folder, 8)
    with pytest.raises(UserError, match=r"set data.path"):
        tokens.load(DataConfig("tokens"))
    with pytest.raises(UserError, match="is no folder"):
        load(tmp_path / "no")
    with pytest.raises(UserError, match=r"data.lexicon is 3"):
        load(folder, lexicon=3)
    save = lambda **arrays: np.savez(folder / "valid.npz", **arrays)
    good = np.zeros((4, 16), np.int32)
    for arrays, message in [
        ({"ids": good}, "needs an array `tokens`"),
        ({"tokens": good.astype(float)}, "needs an array `tokens`"),
        ({"tokens": good[0]}, "needs an array `tokens`"),
        ({"tokens": good, "weight": good}, "has `weight`"),
        ({"tokens": good, "segment": good[:2]}, r"has `segment` \[2, 16\]"),
        ({"tokens": good, "segment": good}, "has other fields than train.npz"),
        ({"tokens": good + 27}, "holds the id 27, and its tokenizer has 27 ids"),
        ({"tokens": good - 1}, "holds the id -1"),
    ]:
        save(**arrays)
        with pytest.raises(UserError, match=message):
            load(folder)
    save(tokens=good)
    load(folder)
    (folder / "valid.npz").write_bytes((folder / "valid.npz").read_bytes()[:300])
    with pytest.raises(UserError, match=r"valid.npz is damaged"):
        load(folder)
    (folder / "valid.npz").unlink()
    with pytest.raises(UserError, match=r"valid.npz is missing"):
        load(folder)
