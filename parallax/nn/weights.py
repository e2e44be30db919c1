"""Weights with logical axis names, and the names by which remat policies keep a layer's results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

PRODUCT = "product"  # the result of a weight matrix product
ATTENTION = "attention"  # the result of an attention core and its log-sum-exp


def weight(value: jax.Array, axes: tuple[str, ...]) -> nnx.Param:
    """A weight whose dimensions carry logical names (see parallax.layout.LOGICAL); no mesh needed to make one."""
    if len(axes) != value.ndim:
        raise ValueError(f"axes = {axes} must name each of the {value.ndim} dimensions of a weight {value.shape}")
    return nnx.Param(value, axes=axes)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> jax.Array:
    return std * jax.random.normal(rngs.params(), shape, jnp.float32)


def keep(x: jax.Array, name: str) -> jax.Array:
    """Give a result the name by which `train.remat` decides whether the backward finds it or computes it again."""
    return checkpoint_name(x, name)
