"""Network passes, counted per row and by kind, and the two rules that turn them into one number."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Num


@struct.dataclass
class Passes:
    """Passes that each row took part in while it was unfinished: what the row would have needed alone."""

    noncausal: Any  # [B] int32, the non-causal layers of a hybrid
    causal: Any  # [B] the causal layers of a hybrid
    prefill: Any  # [B] reading a prompt
    denoise: Any  # [B] denoising a block; a fused commit is one of these
    commit: Any  # [B] writing a finished block into the cache
    draft: Any  # [B] drafting by the model that verifies
    verify: Any  # [B] verifying; a single-pass cycle is one of these
    ar: Any  # [B] one token of plain autoregression
    query_tokens: Any  # [B] query rows over all passes


KINDS = tuple(Passes.__dataclass_fields__)


def no_passes(batch: int) -> Passes:
    """Returns a zero count for `batch` rows."""
    return Passes(*jnp.zeros((len(KINDS), batch), jnp.int32))


def count(passes: Passes, kind: str, live: Bool[Array, "B"], queries: int) -> Passes:
    """Returns the count after one pass of `kind` over `queries` rows each, for the requests that are live."""
    one = live.astype(jnp.int32)
    return passes.replace(**{kind: getattr(passes, kind) + one, "query_tokens": passes.query_tokens + queries * one})


def nfe(passes: Passes) -> Num[Any, "*B"]:
    """Returns forwards of the main network: every pass but prefill and the hybrid's causal layers."""
    return passes.noncausal + passes.denoise + passes.commit + passes.draft + passes.verify + passes.ar


def nfe_weighted(passes: Passes, n_noncausal: int, n_causal: int) -> Num[Any, "*B"]:
    """Returns forwards weighted by layers: the hybrid's two parts count n_noncausal/n and n_causal/n, every other pass 1."""
    n = n_noncausal + n_causal
    return nfe(passes) - passes.noncausal + (n_noncausal * passes.noncausal + n_causal * passes.causal) / n


def mean_by_kind(passes: Passes) -> dict[str, float]:
    """Returns the mean over rows of each kind that occurred."""
    return {kind: float(jnp.mean(value)) for kind, value in zip(KINDS, jax.tree.leaves(passes), strict=True) if jnp.any(value != 0)}
