"""AdamW with warm-up, cosine decay or none, clipping by the global norm, a regular expression for what is trained, and the EMA."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util

from dllm.core.config import require
from dllm.core.paths import select
from dllm.core.types import UserError

MATRICES = r"(kernel|embedding)$"  # what decays. Not by rank: the scales of a scanned stack are [N, D]


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """lr: the peak. warmup: steps. clip: of the global gradient norm, 0 = none. ema: the decay's limit, 0 = none.

    train_only: parameters in whose path this regular expression occurs are trained, the others are constants. "" trains all.
    decay: of the rate after the warm-up: "cosine" to 0, or "constant", none.
    lr_factor: what the rate is multiplied by for parameters in whose path the regular expression lr_factor_on occurs.
    """

    lr: float
    warmup: int
    b1: float
    b2: float
    weight_decay: float
    clip: float
    ema: float
    train_only: str
    decay: str = "cosine"
    lr_factor: float = 1.0
    lr_factor_on: str = "^(join|causal|gain)"

    def __post_init__(self):
        numbers = ("lr", "warmup", "weight_decay", "clip", "lr_factor")
        require(self, "optim", numbers, "0 or more", lambda x: x >= 0 and math.isfinite(x))
        require(self, "optim", ("b1", "b2"), "0 or more, below 1", lambda x: 0 <= x < 1)
        require(self, "optim", ("ema",), "between 0 and 1", lambda x: 0 <= x <= 1)
        if self.decay not in ("cosine", "constant"):
            raise UserError(f"optim.decay is {self.decay!r}; it can be 'cosine' or 'constant'")
        for key in ("train_only", "lr_factor_on"):
            try:
                re.compile(getattr(self, key))
            except re.error as e:
                raise UserError(f"optim.{key} is not a regular expression: {e}; correct it") from None


def learning_rate(config: OptimConfig, steps: int, step: jax.Array | int) -> jax.Array:
    """Returns the rate of update `step` (from 0): (step + 1) / warmup of the peak, then half a cosine that reaches 0 after `steps`, or
    the peak to the end."""
    rise = jnp.minimum((step + 1) / max(config.warmup, 1), 1.0)
    if config.decay == "constant":
        return config.lr * rise
    fall = jnp.clip((step - config.warmup) / max(steps - config.warmup, 1), 0.0, 1.0)
    return config.lr * rise * 0.5 * (1 + jnp.cos(jnp.pi * fall))


def optimizer(config: OptimConfig, steps: int) -> optax.GradientTransformation:
    """Returns the transformation of gradients into updates. It sees the trained parameters only."""
    adamw = optax.adamw(
        lambda step: learning_rate(config, steps, step),
        config.b1,
        config.b2,
        weight_decay=config.weight_decay,
        mask=lambda params: select(MATRICES, params),
    )
    parts = [optax.clip_by_global_norm(config.clip)] * bool(config.clip) + [adamw]
    if config.lr_factor != 1:
        parts += [optax.masked(optax.scale(config.lr_factor), lambda updates: select(config.lr_factor_on, updates))]
    return optax.chain(*parts)


def split(params: dict[str, Any], pattern: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (trained, frozen), two nested dicts that `merge` joins again. Raises UserError if nothing is left to train."""
    flat = traverse_util.flatten_dict(params, sep="/")
    trained = {name: leaf for name, leaf in flat.items() if re.search(pattern, name)}
    if not trained:
        raise UserError(f"optim.train_only={pattern!r} matches no parameter; there are: {', '.join(flat)}")
    frozen = {name: leaf for name, leaf in flat.items() if name not in trained}
    return traverse_util.unflatten_dict(trained, sep="/"), traverse_util.unflatten_dict(frozen, sep="/")


def merge(trained: dict[str, Any], frozen: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters that `split` took apart."""
    flat = traverse_util.flatten_dict(trained, sep="/") | traverse_util.flatten_dict(frozen, sep="/")
    return traverse_util.unflatten_dict(flat, sep="/")


def ema_update(config: OptimConfig, step: jax.Array, ema: Any, params: Any) -> Any:
    """Returns the moving average after update `step` (from 0), with decay min(ema, (1 + step) / (10 + step)): it soon forgets the start."""
    decay = jnp.minimum(config.ema, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda e, p: decay * e + (1 - decay) * p, ema, params)
