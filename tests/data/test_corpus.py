"""The alphabet and its codes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.data import corpus
from dllm.data.corpus import ALPHABET, DataConfig, decode, encode, frequent_words, make_corpus, normalize, restrict, words


def test_ids_are_places_in_the_alphabet():
    np.testing.assert_array_equal(encode(ALPHABET), np.arange(27, dtype=np.uint8))
    assert encode("abc z").dtype == np.uint8
    np.testing.assert_array_equal(encode(b"abc z"), [1, 2, 3, 0, 26])
    assert len(encode("")) == 0


@pytest.mark.parametrize("array", [np.uint8, np.int32, jnp.asarray], ids=["uint8", "int32", "jax"])
def test_decode_inverts_encode(array):
    assert decode(array(encode("the quick brown fox"))) == "the quick brown fox"


def test_decode_refuses_the_mask():
    with pytest.raises(IndexError):
        decode(np.array([1, 27]))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("plain Text", "'T' at offset 6"),
        ("caf\u00e9", "'\u00e9' at offset 3"),
        ("snow \u2603 3", "'\u2603' at offset 5"),
        (b"ab\n", r"b'\n' at offset 2"),
    ],
)
def test_a_foreign_character_is_named_with_its_offset(text, found):
    with pytest.raises(UserError) as error:
        encode(text, "a/file")
    assert str(error.value).startswith(f"a/file has {found}")
    assert "\n" not in str(error.value)


def test_normalize_follows_text8():
    assert normalize("In 1905, Einstein's\n\n\tE=mc\u00b2 \u2014 caf\u00e9!") == "in one nine zero five einstein s e mc caf"
    assert normalize("0123456789") == "zero one two three four five six seven eight nine"
    assert normalize(" ?! ") == ""


@pytest.mark.parametrize("piece", [1, 3, 7, 1000])
def test_words_are_those_of_split_wherever_the_pieces_end(monkeypatch, piece):
    monkeypatch.setattr(corpus, "_PIECE", piece)
    text = " to be or  not to be that is the question bee "
    assert words(encode(text)) == tuple(sorted(set(text.split())))


def test_a_split_shorter_than_a_sequence_is_named():
    long, short = encode("a" * 8), encode("a" * 7)
    assert make_corpus(DataConfig("text8", length=8), long, long, long).name == "text8"
    with pytest.raises(UserError, match=r"valid split of x/y has 7 characters.*data.length = 8"):
        make_corpus(DataConfig("text8", "x/y", 8), long, short, long)
    with pytest.raises(UserError, match=r"data.length is 0"):
        make_corpus(DataConfig("text8", length=0), long, long, long)


@pytest.mark.parametrize("piece", [1, 5, 1000])
def test_a_lexicon_keeps_the_frequent_words_of_the_training_text(monkeypatch, piece):
    monkeypatch.setattr(corpus, "_PIECE", piece)
    train, valid = encode(" b a c  a b a d c e "), encode("x a y b  z c b w")
    assert frequent_words(train, 3) == ("a", "b", "c")  # b and c are as frequent: the alphabet decides
    assert decode(restrict(valid, ("a", "b"))) == "a b b"
    made = make_corpus(DataConfig("text8", length=3, lexicon=2), train, valid, encode("d e b a"))
    assert [decode(ids) for ids in (made.train, made.valid, made.test)] == ["b a a b a", "a b b", "b a"[:3]]
    assert words(made.train) == ("a", "b")


def test_a_lexicon_that_cannot_be_had_is_an_error():
    text = encode("a b c a")
    for count, found in ((-1, "data.lexicon is -1"), (4, "only 3 different words")):
        with pytest.raises(UserError, match=found):
            make_corpus(DataConfig("text8", length=1, lexicon=count), text, text, text)
    with pytest.raises(UserError, match="valid split"):
        make_corpus(DataConfig("text8", length=1, lexicon=1), text, encode("b c"), text)
