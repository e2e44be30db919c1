"""RMSNorm and LayerNorm over the model width, computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from parallax.nn.weights import weight


class RMSNorm(nnx.Module):
    """x / rms(x) · gain (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, width: int, epsilon: float = 1e-5):
        self.epsilon = epsilon
        self.gain = weight(jnp.ones(width), ("embed",))

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        x = x_BSD.astype(jnp.float32)
        x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.epsilon)
        return x.astype(x_BSD.dtype) * self.gain[...]


class LayerNorm(nnx.Module):
    """(x - mean) / std · gain + bias (Ba et al. 2016, arXiv 1607.06450)."""

    def __init__(self, width: int, epsilon: float = 1e-5):
        self.epsilon = epsilon
        self.gain = weight(jnp.ones(width), ("embed",))
        self.bias = weight(jnp.zeros(width), ("embed",))

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        x = x_BSD.astype(jnp.float32)
        x = x - jnp.mean(x, -1, keepdims=True)
        x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.epsilon)
        return x.astype(x_BSD.dtype) * self.gain[...] + self.bias[...]
