"""The two leaf modules that every network here is made of."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last axis, reckoned in float32 or wider (Zhang and Sennrich 2019)."""

    eps: float = 1e-6

    @nn.compact
    def __call__(self, x: Float[Array, "... K"]) -> Float[Array, "... K"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        return (y * jnp.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)


class Dense(nn.Module):
    """x @ kernel, without bias. Weights start normal with standard deviation gain / sqrt(fan in)."""

    features: int
    gain: float = 1.0

    @nn.compact
    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        fan_in = x.shape[-1]
        kernel = self.param("kernel", nn.initializers.normal(self.gain * fan_in**-0.5), (fan_in, self.features), jnp.float32)
        rows = x.reshape(-1, fan_in)  # the backward pass of a product with two row axes is twice as slow on XLA:CPU
        return (rows @ kernel.astype(x.dtype)).reshape(*x.shape[:-1], self.features)
