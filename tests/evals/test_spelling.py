import gzip

import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.data.corpus import encode, words
from dllm.evals import spelling
from dllm.evals.stats import Context

WORDS = frozenset(["the", "cat", "sat", "on", "a", "mat"])


def score(*texts):
    width = max(map(len, texts))
    tokens_BL = np.stack([np.pad(encode(t), (0, width - len(t)), constant_values=1) for t in texts])
    return spelling.evaluate(tokens_BL, np.array([len(t) for t in texts]), Context(words=WORDS))


@pytest.mark.parametrize(
    ("text", "every", "inner"),
    [
        ("the cat sat", (3, 3), (1, 1)),  # "the" and "sat" touch the ends
        ("he cat sa", (1, 3), (1, 1)),  # cut words are wrong, and not counted inside
        (" the kat ", (1, 2), (1, 2)),  # spaces at the ends: both words are whole
        ("cat  xx  cat", (2, 3), (0, 1)),  # doubled spaces hold no word
        ("thecatsaton", (0, 1), (0, 0)),  # one word, and it touches both ends
        ("      ", (0, 0), (0, 0)),
    ],
)
def test_hand_made(text, every, inner):
    metrics = score(text)
    for name, (correct, total) in (("spelling", every), ("spelling_inner", inner)):
        assert (metrics[name].numerator_B.tolist(), metrics[name].denominator_B.tolist()) == ([correct], [total]), name


def test_pooled_over_words_not_over_sequences():
    metric = score("the cat sat on a mat", "xx" + " " * 18)["spelling"]
    assert metric.value == pytest.approx(6 / 7)  # the mean of the sequences' own ratios would be 1/2


def test_columns_behind_the_length_are_not_read():
    tokens_BL = np.stack([encode("the catzz")] * 2)
    metric = spelling.evaluate(tokens_BL, np.array([7, 9]), Context(words=WORDS))["spelling"]
    assert metric.numerator_B.tolist() == [2, 1]


def test_ceiling_and_floor():
    rng = np.random.default_rng(0)
    text = " ".join(rng.choice(sorted(WORDS), size=4000))
    chunks_BL = encode(text)[: len(text) // 32 * 32].reshape(-1, 32)
    vocabulary = frozenset(words(encode(text)))
    assert vocabulary == WORDS
    assert spelling.ceiling(chunks_BL, vocabulary)["spelling_inner"].value == 1.0
    assert 0.7 < spelling.ceiling(chunks_BL, vocabulary)["spelling"].value < 1.0
    assert spelling.floor(chunks_BL, vocabulary)["spelling"].value < 0.5
    shuffled_BL = spelling.shuffle(chunks_BL)
    assert (np.sort(shuffled_BL, axis=1) == np.sort(chunks_BL, axis=1)).all()
    assert not (shuffled_BL == chunks_BL).all(axis=1).any()


def test_missing_vocabulary_and_chunks_are_user_errors(tmp_path):
    with pytest.raises(UserError, match=r"words\.txt\.gz"):
        spelling.evaluate(np.zeros((1, 4), int), np.array([4]), Context())
    with pytest.raises(UserError, match="held-out"):
        spelling.ceiling(np.zeros((0, 4), np.uint8), WORDS)
    with pytest.raises(UserError, match=r"words\.txt\.gz"):
        spelling.read_words(tmp_path)
    whole = gzip.compress(b"a\nthe\n")
    (tmp_path / "words.txt.gz").write_bytes(whole)
    assert spelling.read_words(tmp_path) == {"a", "the"}
    (tmp_path / "words.txt.gz").write_bytes(whole[:-9])
    with pytest.raises(UserError, match=r"words\.txt\.gz"):
        spelling.read_words(tmp_path)
