"""An autoregressive model with a gated adapter that drafts: Uno (arXiv 2609.04010).

The weights are those of a qwen3 with mask_id = -1, or of a gpt, frozen. The adapter, a LoRA, acts on *noise rows* alone: at a position
whose token isn't known yet, a row that holds noise predicts the token behind it, from the text before the draft. All other rows have the
bits of the frozen model, so one set of weights drafts and verifies. An ordinary, ungated use of the adapter is another model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dllm.core.types import UserError
from dllm.models import decoder, qwen3
from dllm.models.cache import Cache
from dllm.ops import masks
from dllm.ops.layers import Lora

RULES = decoder.RULES
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class Config(qwen3.Config):
    """The frozen model's shape, and

    begins       a sequence begins with the id `vocab`, as a gpt's does
    rank, alpha  of the adapter; its term is weighted by alpha / rank
    targets      the products that have one, of q,k,v,o,gate,up,down
    noise        what noise rows hold: "uniform", ids drawn from [noise_low, noise_high), noise_high = 0 being vocab; or "mask", the id
                 noise_mask, or the id that begins a sequence where that is -1
    block        noise rows that were trained together
    """

    mask_id: int = -1
    begins: bool = False
    rank: int = 8
    alpha: float = 128.0
    targets: str = ",".join(TARGETS)
    noise: Literal["uniform", "mask"] = "uniform"
    noise_low: int = 1
    noise_high: int = 0
    noise_mask: int = -1


class Functions(NamedTuple):
    """What a bound model offers.

    forward(cache, tokens_BQ, positions_BQ, mask, at_BW=None, segment_BQ=None, gate_BQ=None) -> (logits_BWV, cache)
        as a qwen3's. gate: the noise rows. Without it no row has the adapter, and it isn't in the program
    hidden(cache, tokens_BQ, positions_BQ, mask, segment_BQ=None, gate_BQ=None) -> (h_BQD, cache), and
    logits(h_BWD) -> logits_BWV
        the same in two parts, where the logits of all rows would be too large
    empty_cache(batch, slots) -> cache
    make_noise(ids_BW) -> tokens_BW, from uniform draws out of range(noise_range)
    """

    forward: Callable[..., Any]
    hidden: Callable[..., Any]
    logits: Callable[..., Any]
    empty_cache: Callable[[int, int], Cache]
    make_noise: Callable[[Any], Any]
    noise_range: int
    vocab: int
    length: int
    block: int
    lead: int  # rows before that of the first token


def build(config: Config) -> decoder.Decoder:
    """Returns the module. Raises UserError where the config makes no model."""
    targets = tuple(config.targets.split(","))
    if len(set(targets)) < len(targets):
        raise UserError(f"model.targets is {config.targets}; name each product once")
    if not math.isfinite(config.alpha):
        raise UserError(f"model.alpha is {config.alpha}; make it a finite number")
    for name in targets:
        if name not in TARGETS or (config.experts and name in ("gate", "up", "down")):
            raise UserError(f"model.targets names {name!r}; it can be of {','.join(TARGETS[:4] if config.experts else TARGETS)}")
    if config.rank < 1:
        raise UserError(f"model.rank is {config.rank}; make it 1 or more")
    if config.mask_id != -1:
        raise UserError(f"model.mask_id is {config.mask_id}; an adapter's frozen model is autoregressive: make it -1")
    low, high, ids = config.noise_low, config.noise_high or config.vocab, config.vocab + config.begins
    if not 0 <= low < high <= ids:
        raise UserError(f"model.noise_low and noise_high are {low} and {high}; make them 0 <= noise_low < noise_high <= {ids}")
    if config.noise == "mask" and not (0 <= config.noise_mask < ids or (config.noise_mask == -1 and config.begins)):
        raise UserError(f"model.noise_mask is {config.noise_mask}; with noise=mask make it an id below {ids}")
    base = qwen3.build(config)
    return base.clone(config=dataclasses.replace(base.config, lora=Lora(config.rank, config.alpha, targets)), extra=int(config.begins))


def init(config: Config, key: jax.Array) -> dict[str, Any]:
    """Returns fresh variables {"params": ...}: the frozen model's, and under "lora" the adapter's, with which it drafts as without."""
    tokens = jnp.zeros((1, 2), jnp.int32)

    def fresh(key):
        keys = dict(zip(("params", "lora"), jax.random.split(key)))
        variables = build(config).init(keys, None, tokens, tokens, masks.causal, None, None, tokens == 0)
        return {"params": {**variables["params"], "lora": variables["lora"]}}

    return jax.jit(fresh)(key)


def bind(config: Config, variables: Any) -> Functions:
    """Returns the model as plain functions. Call it inside the jitted function that uses them."""
    module = build(config)
    base = dict(variables.get("params", {}))
    lora = base.pop("lora", {})
    collections = lambda gate_BQ: {"params": base} if gate_BQ is None else {"params": base, "lora": lora}

    def forward(cache, tokens_BQ, positions_BQ, mask, at_BW=None, segment_BQ=None, gate_BQ=None):
        return module.apply(collections(gate_BQ), cache, tokens_BQ, positions_BQ, mask, at_BW, segment_BQ, gate_BQ)

    def hidden(cache, tokens_BQ, positions_BQ, mask, segment_BQ=None, gate_BQ=None):
        arguments = cache, tokens_BQ, positions_BQ, mask, segment_BQ, gate_BQ
        return module.apply(collections(gate_BQ), *arguments, method="hidden")

    def logits(h_BWD):
        return module.apply({"params": base}, h_BWD, method="logits")

    def empty_cache(batch, slots):
        return decoder.empty_cache(module.config, config.layers, batch, slots)

    masked = config.noise == "mask"
    mask_id = config.vocab if config.noise_mask < 0 else config.noise_mask

    def make_noise(ids: Int[Array, "..."]) -> Int[Array, "..."]:
        return jnp.full_like(ids, mask_id) if masked else config.noise_low + ids

    noise_range = 1 if masked else (config.noise_high or config.vocab) - config.noise_low
    lead = int(config.begins)
    return Functions(forward, hidden, logits, empty_cache, make_noise, noise_range, config.vocab, config.length, config.block, lead)
