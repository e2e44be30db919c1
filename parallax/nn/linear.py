"""Matrix products with a weight, column- or row-parallel by the names of its axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from parallax.nn.weights import PRODUCT, keep, normal, weight
from parallax.sharding import scatter_sequence, split_last


class Linear(nnx.Module):
    """y = x W + b, with W [inputs, outputs].

    `axes = ("embed", "ff")` is column-parallel: x is whole, y split along its last dimension. `("ff", "embed")` is
    row-parallel: x is split along its last dimension, y summed and split along the sequence.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        axes: tuple[str, str],
        *,
        rngs: nnx.Rngs,
        std: float = 0.02,
        bias: bool = False,
    ):
        self.output_axis = axes[1]
        self.kernel = weight(normal(rngs, (inputs, outputs), std), axes)
        self.bias = weight(jnp.zeros(outputs), axes[1:]) if bias else None

    def __call__(self, x_BSI: jax.Array) -> jax.Array:
        y_BSO = x_BSI @ self.kernel[...]
        y_BSO = keep(
            scatter_sequence(y_BSO) if self.output_axis == "embed" else split_last(y_BSO, self.output_axis), PRODUCT
        )
        return y_BSO if self.bias is None else y_BSO + self.bias[...]
