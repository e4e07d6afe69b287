"""Documents laid into rows of one length: prompts with their responses for a block-diffusion objective, and plain text end to end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Shaped

from dllm.core.types import UserError

Place = tuple[int, int]  # in a stream of documents: the document's number, and how many of its tokens come before


def pack(
    documents: Iterable[tuple[Sequence[int], Sequence[int]]], length: int, block: int, pad_id: int, train_padding: bool
) -> dict[str, Shaped[np.ndarray, "rows length"]]:
    """Returns {"tokens" int32, "segment" int32, "trained" bool}, each [rows, length]. A document is (ids of its prompt, of its response).

    A document starts at a multiple of `block`, where the grid of blocks starts anew, and is filled up to one with `pad_id`; it goes into
    the fullest row that has room for it. `segment` numbers a row's documents from 1, their padding included; 0 is what no document takes.
    `trained` holds for responses, and with `train_padding` for the padding of documents as well: then a decoder learns to fill a last
    block with `pad_id`, as SDAR's does, at the price of up to block - 1 easy tokens a document in the loss.

    A stop token is the response's last, put there by the caller. Raises UserError for a document that is longer than a row or has an
    empty response, and for a length that is no multiple of the block. Block 4, length 8, "ab" the prompt, padding untrained:

    tokens    a b C D E . . .   /   a C D . . . . .
    segment   1 1 1 1 1 1 1 1   /   1 1 1 1 0 0 0 0
    trained   . . x x x . . .   /   . x x . . . . .
    """
    if block < 1 or length < 1 or length % block:
        raise UserError(f"rows of {length} tokens can't be cut into blocks of {block}; make the length a multiple of the block")
    rows: list[list[tuple[np.ndarray, int, int]]] = []
    room: list[list[int]] = [[] for _ in range(length // block + 1)]  # by blocks left: the rows
    for number, (prompt, response) in enumerate(documents):
        ids, blocks = np.array([*prompt, *response], np.int32), -(-(len(prompt) + len(response)) // block)
        if len(response) == 0:
            raise UserError(f"document {number} has an empty response, so nothing to train on; leave it out")
        if blocks * block > length:
            raise UserError(f"document {number} has {len(ids)} tokens, and a row {length}; shorten it, or leave it out")
        left = next((n for n in range(blocks, len(room)) if room[n]), None)
        if left is None:
            rows.append([])
            row, left = len(rows) - 1, length // block
        else:
            row = room[left].pop()
        rows[row].append((ids, len(prompt), blocks * block))
        room[left - blocks].append(row)
    tokens, segment = np.full((len(rows), length), pad_id, np.int32), np.zeros((len(rows), length), np.int32)
    trained = np.zeros((len(rows), length), bool)
    for row, own in enumerate(rows):
        start = 0
        for number, (ids, prompt, size) in enumerate(own, 1):
            tokens[row, start : start + len(ids)] = ids
            segment[row, start : start + size] = number
            trained[row, start + prompt : start + (size if train_padding else len(ids))] = True
            start += size
    return {"tokens": tokens, "segment": segment, "trained": trained}


def stream(documents: Iterable[tuple[int, Shaped[np.ndarray, "_"]]], width: int, offset: int = 0) -> Iterator[tuple[np.ndarray, Place]]:
    """Yields (row [width], the place of the next row's first token) of documents, (number, ids) each, laid end to end and cut into rows.

    A place is (number of a document, tokens of it that earlier rows hold), so rows go on exactly where `documents` start at the first of
    the two and `offset` is the second. What doesn't fill a last row is left out.
    """
    held: list[np.ndarray] = []
    size, at = 0, offset
    for number, ids in documents:
        while size + len(ids) - at >= width:
            end = at + width - size
            row = np.concatenate([*held, ids[at:end]])
            held, size, at = [], 0, end
            yield row, (number, at)
        held.append(ids[at:])
        size, at = size + len(ids) - at, 0
