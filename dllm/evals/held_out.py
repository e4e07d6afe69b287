"""The held-out text that a trained run is scored on: chunks as long as its context, of the text that its config names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Integer

from dllm.core.config import to_dataclass
from dllm.core.lookup import lookup
from dllm.core.types import UserError
from dllm.data import pipeline
from dllm.data.corpus import DataConfig, Rows


def held_out(
    config: Mapping[str, Any], path: str | None, split: str, limit: int = 0
) -> tuple[DataConfig, Integer[np.ndarray, "chunks length"]]:
    """Returns (what was read, at most `limit` chunks of a run's valid or test split, spread evenly; 0: all).

    `config` is the run's; `path` stands in for its data.path unless it is None. Raises UserError where the text isn't there.
    """
    data = to_dataclass(DataConfig, config["data"] | ({} if path is None else {"path": path}), "data")
    try:
        corpus = lookup("data", data.name).load(data)
    except UserError as e:
        raise UserError(f"{e}" + "; if the run's text lies elsewhere now, pass --data_path=PATH" * (path is None)) from None
    part = getattr(corpus, split)
    extras = set(part.extras) - {"given"} if isinstance(part, Rows) else ()  # `given` is told by the tokens
    if extras:
        raise UserError(f"{data.path} has the field {min(extras)}, which no metric reads; pass --data_path=FOLDER, rows of tokens alone")
    data = data if data.length else dataclasses.replace(data, length=part.tokens.shape[1])
    chunks_BL = pipeline.chunks(part, data.length)
    count = min(limit or len(chunks_BL), len(chunks_BL))
    return data, chunks_BL[np.arange(count) * len(chunks_BL) // count]


def given(run: Any, tokens_BL: Integer[np.ndarray, "B L"]) -> Bool[np.ndarray, "B L"] | None:
    """Returns the positions of held-out rows that are no part of the text, those of ids that the run's model never writes; None if it may
    write any."""
    forbidden = getattr(run.tokenizer, "forbidden", ())
    return np.isin(tokens_BL, forbidden) if forbidden else None
