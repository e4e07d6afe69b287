import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.data.packing import pack, stream

PAD = 9


def unpacked(rows, train_padding):
    """Returns the documents in the rows, (prompt, response), after checking what every row must hold."""
    found = []
    for tokens, segment, trained in zip(rows["tokens"], rows["segment"], rows["trained"]):
        assert (np.diff(segment[segment > 0]) >= 0).all()
        assert not trained[segment == 0].any()
        assert (tokens[segment == 0] == PAD).all()
        for number in range(1, segment.max() + 1):
            at = np.flatnonzero(segment == number)
            assert at[0] % 4 == 0
            assert len(at) % 4 == 0
            assert (np.diff(at) == 1).all()
            ids, own = tokens[at], trained[at]
            end = len(ids) - np.argmax(ids[::-1] != PAD)
            prompt = int(np.argmax(own))
            assert (own == (np.arange(len(ids)) >= prompt) & (np.arange(len(ids)) < (len(ids) if train_padding else end))).all()
            assert len(ids) - end < 4
            found.append((ids[:prompt].tolist(), ids[prompt:end].tolist()))
    return found


@pytest.mark.parametrize("train_padding", [False, True])
def test_every_document_comes_out_as_it_went_in(train_padding):
    rng = np.random.default_rng(0)
    documents = [(rng.integers(0, 9, rng.integers(0, 9)).tolist(), rng.integers(0, 9, rng.integers(1, 9)).tolist()) for _ in range(60)]
    rows = pack(documents, 16, 4, PAD, train_padding)
    assert sorted(unpacked(rows, train_padding)) == sorted(documents)
    blocks = sum(-(-(len(p) + len(r)) // 4) for p, r in documents)
    assert len(rows["tokens"]) <= 1.15 * blocks / 4  # rows are filled: a document a row would take 60
    assert {name: (rows[name].dtype, rows[name].shape[1]) for name in rows} == {
        "tokens": (np.int32, 16),
        "segment": (np.int32, 16),
        "trained": (np.bool_, 16),
    }


def test_the_picture_of_the_docstring():
    rows = pack([([1, 2], [3, 4, 5]), ([1], [3, 4])], 8, 4, PAD, train_padding=False)
    assert rows["tokens"].tolist() == [[1, 2, 3, 4, 5, 9, 9, 9], [1, 3, 4, 9, 9, 9, 9, 9]]
    assert rows["segment"].tolist() == [[1] * 8, [1] * 4 + [0] * 4]
    assert rows["trained"].astype(int).tolist() == [[0, 0, 1, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0]]
    padded = pack([([1], [3, 4])], 8, 4, PAD, train_padding=True)
    assert padded["trained"].astype(int).tolist() == [[0, 1, 1, 1, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    "documents, length, text",
    [
        ([([1], [2]), ([1] * 5, [2] * 4)], 8, "document 1 has 9 tokens"),
        ([([1], [])], 8, "document 0 has an empty response"),
        ([([1], [2])], 10, "blocks of 4"),
    ],
)
def test_what_does_not_fit_is_refused(documents, length, text):
    with pytest.raises(UserError, match=text):
        pack(documents, length, 4, PAD, False)


def test_a_stream_goes_on_from_any_place():
    """Documents of no token, of less than a row, of exactly one, and of several."""
    sizes = [3, 0, 4, 1, 13, 4, 0, 0, 2, 5]
    ends = np.cumsum(sizes)
    documents = [(n, np.arange(end - size, end)) for n, (size, end) in enumerate(zip(sizes, ends))]
    rows, places = zip(*stream(documents, 4))
    np.testing.assert_array_equal(rows, np.arange(32).reshape(8, 4))
    assert [int(ends[number] - sizes[number] + at) for number, at in places] == [*range(4, 33, 4)]
    for begin, (number, at) in enumerate(places, 1):
        again = list(stream(documents[number:], 4, at))
        assert len(again) == len(rows) - begin
        assert [after for _, after in again] == [*places[begin:]]
        assert all((row == other).all() for (row, _), other in zip(again, rows[begin:]))
    assert list(stream([], 4)) == []
