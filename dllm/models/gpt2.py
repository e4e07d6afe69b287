"""GPT-2: an autoregressive model with learned positions, LayerNorm, biases and GELU (Radford et al. 2019). It samples, and it judges.

Like an autoregressive qwen3 it reads token i in row i and predicts token i + 1: it has no beginning of its own, but the one of its
vocabulary, end-of-text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax

from dllm.core.types import UserError
from dllm.models import decoder
from dllm.models.cache import Cache

RULES = decoder.RULES


@dataclasses.dataclass(frozen=True)
class Config:
    """`length` is the longest sequence: there are so many learned positions. The head is the embedding, transposed."""

    vocab: int = 50257
    length: int = 1024
    width: int = 768
    layers: int = 12
    heads: int = 12
    mlp: int = 3072
    eps: float = 1e-5
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: bool = True

    # What samplers and objectives ask of an autoregressive model: no MASK, and tokens one by one.
    mask_id: ClassVar[int] = -1
    block: ClassVar[int] = 1


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(vocab=28, length=32, width=64, layers=3, heads=2, mlp=256),
    "small": dict(width=768, layers=12, heads=12, mlp=3072),
    "medium": dict(width=1024, layers=24, heads=16, mlp=4096),
    "large": dict(width=1280, layers=36, heads=20, mlp=5120),
    "xl": dict(width=1600, layers=48, heads=25, mlp=6400),
}


class Functions(NamedTuple):
    """What a bound model offers.

    forward(cache, tokens_BQ, positions_BQ, mask, at_BW=None, segment_BQ=None) -> (logits_BWV, cache)
        cache may be None: nothing is read or kept. `at`: the rows whose logits are wanted, all by default
    empty_cache(batch, slots) -> cache
    """

    forward: Callable[..., Any]
    empty_cache: Callable[[int, int], Cache]
    vocab: int
    length: int
    lead: int = 0  # rows before that of the first token


def build(config: Config) -> decoder.Decoder:
    """Returns the module. Raises UserError where the config makes no model."""
    if config.width % config.heads:
        raise UserError(f"model.width is {config.width}; it must be a multiple of heads = {config.heads}")
    if config.length < 1:
        raise UserError(f"model.length is {config.length}; it must be at least 1")
    block = decoder.BlockConfig(
        width=config.width,
        heads=config.heads,
        kv_heads=config.heads,
        head_width=config.width // config.heads,
        mlp=config.mlp,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        remat=config.remat,
        qk_norm=False,
        eps=config.eps,
        norm="layer",
        mlp_form="gelu_tanh",
        bias=True,
    )
    return decoder.Decoder(block, config.layers, config.vocab, extra=0, theta=0.0, tied=True, positions=config.length)


def init(config: Config, key: jax.Array) -> dict[str, Any]:
    """Returns fresh variables {"params": ...}."""
    return decoder.init(build(config), key)


def bind(config: Config, variables: Any) -> Functions:
    """Returns the model as plain functions. Call it inside the jitted function that uses them."""
    return Functions(*decoder.bind(build(config), variables), config.vocab, config.length)
