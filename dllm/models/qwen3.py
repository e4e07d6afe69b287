"""A Qwen3-shaped language model: block-causal with a MASK token (SDAR, block diffusion), or autoregressive (Qwen3, Llama).

Row i of a block-diffusion model holds token i or MASK, and its logits are for token i: there is no shift. An autoregressive model, that is
one without a MASK id, reads token i in row i and predicts token i + 1. The weights have the same names and shapes either way.
"""

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
    """`length` is the longest sequence, the public models' max_position_embeddings.

    block    tokens that are denoised together; the grid of blocks starts at position 0 of a sequence
    mask_id  the id that stands for a hidden token, never written; -1: none, the model is autoregressive
    tied     the head is the embedding, transposed
    experts  of a sparse MLP, `experts_per_token` of them active, each `mlp` wide; 0: a dense MLP
    """

    vocab: int = 28
    length: int = 64
    width: int = 128
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 32
    mlp: int = 384
    experts: int = 0
    experts_per_token: int = 0
    block: int = 4
    mask_id: int = 27
    qk_norm: bool = True
    tied: bool = False
    theta: float = 1e4
    eps: float = 1e-6
    norm: str = "fused"
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: bool = True


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(length=32, width=64, layers=3, heads=2, kv_heads=1, head_width=32, mlp=192),
    "mini": dict(length=64, width=128, layers=6, heads=4, kv_heads=2, head_width=32, mlp=384),
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
    block: int
    mask_id: int
    lead: int = 0  # rows before that of the first token


def build(config: Config) -> decoder.Decoder:
    """Returns the module. Raises UserError where the config makes no model."""
    if config.head_width % 2:
        raise UserError(f"model.head_width is {config.head_width}; rotary pairs need an even one")
    if not 1 <= config.block <= max(config.length, 1):
        raise UserError(f"model.block is {config.block}; make it 1 to model.length = {config.length}")
    if not -1 <= config.mask_id < config.vocab:
        raise UserError(f"model.mask_id is {config.mask_id}; make it an id below model.vocab = {config.vocab}, or -1 for none")
    shared = {f.name: getattr(config, f.name) for f in dataclasses.fields(decoder.BlockConfig) if hasattr(config, f.name)}
    return decoder.Decoder(decoder.BlockConfig(**shared), config.layers, config.vocab, extra=0, theta=config.theta, tied=config.tied)


def init(config: Config, key: jax.Array) -> dict[str, Any]:
    """Returns fresh variables {"params": ...}."""
    return decoder.init(build(config), key)


def bind(config: Config, variables: Any) -> Functions:
    """Returns the model as plain functions. Call it inside the jitted function that uses them."""
    return Functions(*decoder.bind(build(config), variables), config.vocab, config.length, config.block, config.mask_id)
