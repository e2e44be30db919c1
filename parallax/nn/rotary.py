"""Rotary position embeddings, with the frequency scaling of Llama 3.1."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class RotaryScaling:
    """Llama 3.1's stretch of the low frequencies (as published with its weights: factor 8, 1, 4, 8192)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int


class RotaryTables(NamedTuple):
    """Cosines and sines, float32 [S, C/2]."""

    cos_SC: jax.Array
    sin_SC: jax.Array


def frequencies(head_size: int, theta: float, scaling: RotaryScaling | None) -> np.ndarray:
    """Radians a position for each of the C/2 pairs (Su et al. 2021, arXiv 2104.09864, equation 15)."""
    frequency = theta ** (-np.arange(0, head_size, 2) / head_size)
    if scaling is None:
        return frequency
    turns = scaling.original_positions * frequency / (2 * math.pi)  # in the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 1: kept, 0: stretched by the full factor
    return share * frequency + (1 - share) * frequency / scaling.factor


def rotary_tables(
    positions_S: jax.Array, head_size: int, theta: float, scaling: RotaryScaling | None = None
) -> RotaryTables:
    angle_SC = positions_S[:, None].astype(jnp.float32) * jnp.asarray(
        frequencies(head_size, theta, scaling), jnp.float32
    )
    return RotaryTables(jnp.cos(angle_SC), jnp.sin(angle_SC))


def rotate(x_BSHC: jax.Array, tables: RotaryTables) -> jax.Array:
    """Turn each pair (x[c], x[c + C/2]) by its angle, in float32."""
    cos, sin = tables.cos_SC[None, :, None], tables.sin_SC[None, :, None]
    a, b = jnp.split(x_BSHC.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x_BSHC.dtype)
