"""The leaf modules that every network here is made of."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last axis, reckoned in float32 or wider (Zhang and Sennrich 2019).

    style  "fused": the product with the scale is float32 too, then rounded to x's type, as fused kernels do. "eager": x / rms(x) is rounded
           first, as PyTorch code of the public models does. In float32 they are one; in bfloat16 a quarter of the values differ.
    """

    eps: float = 1e-6
    style: str = "fused"
    param_dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Float[Array, "... K"]) -> Float[Array, "... K"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.param_dtype)
        scale = jnp.expand_dims(scale, range(x.ndim - 1))
        y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        return y.astype(x.dtype) * scale.astype(x.dtype) if self.style == "eager" else (y * scale.astype(y.dtype)).astype(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean(x)) / std(x) * scale + bias over the last axis, reckoned in float32 or wider (Ba et al., arXiv 1607.06450)."""

    eps: float = 1e-5
    param_dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Float[Array, "... K"]) -> Float[Array, "... K"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],), self.param_dtype)
        y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        scale, bias = (jnp.expand_dims(p.astype(y.dtype), range(x.ndim - 1)) for p in (scale, bias))
        y = y - jnp.mean(y, -1, keepdims=True)
        y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        return (y * scale + bias).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Lora:
    """A low-rank adapter of the products named in `targets`: y + alpha / rank * (x a) b (Hu et al., arXiv 2106.09685)."""

    rank: int
    alpha: float
    targets: tuple[str, ...]


class Dense(nn.Module):
    """x @ kernel, plus a bias if there is one. Weights start normal with standard deviation gain / sqrt(fan in), a bias at 0.

    With `lora`, rows whose gate is open get the adapter's term, from the collection `lora`, float32: a [I, rank] starts uniform within
    1 / sqrt(I), b [rank, O] zero. A closed row has the bits of the product alone (`where`, not a factor: that keeps -0.0).
    Without the collection no such operation is in the program; with it, a call without a gate is an error.
    """

    features: int
    gain: float = 1.0
    param_dtype: str = "float32"
    lora: Lora | None = None
    bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "... I"], gate: Bool[Array, "..."] | None = None) -> Float[Array, "... O"]:
        fan_in = x.shape[-1]
        kernel = self.param("kernel", nn.initializers.normal(self.gain * fan_in**-0.5), (fan_in, self.features), self.param_dtype)
        rows = x.reshape(-1, fan_in)  # the backward pass of a product with two row axes is twice as slow on XLA:CPU
        y = rows @ kernel.astype(x.dtype)
        if self.bias:
            y = y + self.param("bias", nn.initializers.zeros, (self.features,), self.param_dtype).astype(x.dtype)[None]
        lora = self.lora
        if lora is not None and self.name in lora.targets and (self.has_variable("lora", "a") or self.has_rng("lora")):
            if gate is None:
                raise ValueError(f"{'/'.join(self.path)} has an adapter, so the call needs a gate")
            uniform = nn.initializers.uniform(2 * fan_in**-0.5)
            start = lambda: uniform(self.make_rng("lora"), (fan_in, lora.rank), jnp.float32) - fan_in**-0.5
            a = self.variable("lora", "a", start).value
            b = self.variable("lora", "b", jnp.zeros, (lora.rank, self.features), jnp.float32).value
            term = rows @ a.astype(x.dtype) @ b.astype(x.dtype)
            y = jnp.where(gate.reshape(-1, 1), y + lora.alpha / lora.rank * term, y)
        return y.reshape(*x.shape[:-1], self.features)
