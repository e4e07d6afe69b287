"""Windows W(i): how many ranks may be revealed between one network pass and the next, when i are known."""

from __future__ import annotations

import numpy as np

from dllm.core.types import UserError

SHAPES = ("cosine", "linear", "constant")


def window_table(shape: str, length: int, rate: float) -> np.ndarray:
    """Returns W(0), ..., W(length - 1), int32, each between 1 and length - i.

    cosine: `rate` is delta_tau. The masked fraction follows cos(pi/2 tau); a window spans tau_i to tau_i + delta_tau, where
    tau_i = 2/pi arccos(1 - i/D): W(i) = ceil(D (1 - i/D - cos(pi/2 min(1, tau_i + delta_tau)))). A reconstruction of the window of
    "Self-Speculative Masked Diffusions" (arXiv 2510.03929): with D = 256 and delta_tau = .01 it gives the 80 passes that are reported.
    linear: `rate` is W_max, W(i) = ceil(W_max (i + 1) / D).  constant: `rate` is W.
    Raises UserError on an unknown shape or a rate outside its range.
    """
    i = np.arange(length)
    if shape == "cosine":
        if not 0 < rate <= 1:
            raise UserError(f"a cosine window needs 0 < rate <= 1 (delta_tau), got {rate}")
        tau = 2 / np.pi * np.arccos(1 - i / length)
        width = length * (1 - i / length - np.cos(np.pi / 2 * np.minimum(1, tau + rate)))
    elif shape in ("linear", "constant"):
        if not rate >= 1:  # nor nan
            raise UserError(f"a {shape} window needs rate >= 1 (ranks a pass), got {rate}")
        width = rate * (i + 1) / length if shape == "linear" else np.full(length, rate)
    else:
        raise UserError(f"no window shape {shape!r}; there are: {', '.join(SHAPES)}")
    return np.clip(np.ceil(width - 1e-9), 1, length - i).astype(np.int32)


def window_tables(shape: str, length: int, rate: float) -> np.ndarray:
    """Returns [length + 1, length]: row D is `window_table` of a text of D ranks; behind these, and in row 0, are zeros."""
    tables = np.zeros((length + 1, length), np.int32)
    for D in range(1, length + 1):
        tables[D, :D] = window_table(shape, D, rate)
    return tables
