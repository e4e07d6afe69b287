"""The two leaf modules that every network here is made of."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


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


class Dense(nn.Module):
    """x @ kernel, without bias. Weights start normal with standard deviation gain / sqrt(fan in)."""

    features: int
    gain: float = 1.0
    param_dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        fan_in = x.shape[-1]
        kernel = self.param("kernel", nn.initializers.normal(self.gain * fan_in**-0.5), (fan_in, self.features), self.param_dtype)
        rows = x.reshape(-1, fan_in)  # the backward pass of a product with two row axes is twice as slow on XLA:CPU
        return (rows @ kernel.astype(x.dtype)).reshape(*x.shape[:-1], self.features)
