"""A plain autoregressive character model: the baseline, and the judge of `gen_nll`. Its id `vocab` is the beginning of a sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from dllm.core.types import UserError
from dllm.models import decoder
from dllm.models.cache import Cache

RULES = decoder.RULES


@dataclasses.dataclass(frozen=True)
class Config:
    """`length` counts tokens of text; the sequence that the model reads is BOS and all of them but the last."""

    vocab: int = 27
    length: int = 64
    width: int = 128
    layers: int = 6
    heads: int = 4
    mlp: int = 384
    theta: float = 1e4
    dtype: str = "float32"
    remat: bool = True


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(length=32, width=64, layers=3, heads=2, mlp=192, remat=True),
    "mini": dict(length=64, width=128, layers=6, heads=4, mlp=384, remat=True),
    "paper": dict(length=256, width=768, layers=12, heads=12, mlp=2048, dtype="bfloat16", remat=True),
}


class Functions(NamedTuple):
    """What a bound model offers.

    forward(cache, tokens_BQ, positions_BQ, mask) -> (logits_BQV, cache)     cache may be None: nothing is read or kept
    empty_cache(batch, slots) -> cache
    """

    forward: Callable[..., Any]
    empty_cache: Callable[[int, int], Cache]
    vocab: int
    length: int
    lead: int = 1  # rows before that of the first token


def build(config: Config) -> decoder.Decoder:
    """Returns the module."""
    if config.width % (2 * config.heads):
        raise UserError(f"model.width is {config.width}; it must be a multiple of 2 x heads = {2 * config.heads}")
    block = decoder.BlockConfig(
        config.width, config.heads, config.heads, config.width // config.heads, config.mlp, dtype=config.dtype, remat=config.remat
    )
    return decoder.Decoder(block, config.layers, config.vocab, extra=1, theta=config.theta)


def init(config: Config, key: jax.Array) -> dict[str, Any]:
    """Returns fresh variables {"params": ...}."""
    return decoder.init(build(config), key)


def bind(config: Config, variables: Any) -> Functions:
    """Returns the model as plain functions. Call it inside the jitted function that uses them."""
    return Functions(*decoder.bind(build(config), variables), config.vocab, config.length)
