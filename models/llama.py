"""Llama: grouped-query attention, rotary positions, RMSNorm, SwiGLU; output matrix tied to the embedding or not.

A model file says what the model computes: `Config`, `Embed`, `Block`, `Head`, `context` and `PRESETS`. Weights name
their axes; meshes, schedules and checkpoints are not its business. Copy it to make your own.
Names end in their dims: B batch, S sequence, D width, H heads, K key/value heads, C head size, F feed-forward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
from flax import nnx

from parallax import nn
from parallax.shape import LayerShape, ModelShape, Weight


@dataclass(frozen=True)
class Config:
    """`rope_factor = 1` leaves the rotary frequencies as they are; Llama 3.1 stretches them by 8."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    ff: int
    head_size: int = 0  # 0: width / heads
    norm_epsilon: float = 1e-5
    rope_theta: float = 500_000.0
    rope_factor: float = 1.0
    rope_low_frequency_factor: float = 1.0
    rope_high_frequency_factor: float = 4.0
    rope_original_positions: int = 8192
    tied: bool = False
    name: str = "llama"

    @property
    def C(self) -> int:
        return self.head_size or self.width // self.heads

    @property
    def rope_scaling(self) -> nn.RotaryScaling | None:
        if self.rope_factor == 1.0:
            return None
        return nn.RotaryScaling(
            self.rope_factor,
            self.rope_low_frequency_factor,
            self.rope_high_frequency_factor,
            self.rope_original_positions,
        )

    def shape(self) -> ModelShape:
        """Raises ValueError where the sizes do not make a model."""
        for name in ("norm_epsilon", "rope_theta", "rope_factor"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be greater than 0")
        if self.rope_factor != 1 and self.rope_low_frequency_factor >= self.rope_high_frequency_factor:
            raise ValueError("rope_low_frequency_factor must be less than rope_high_frequency_factor")
        if self.C % 2 or self.C == 0:
            use = f"{self.C - 1} or {self.C + 1}" if self.C > 1 else "2"
            raise ValueError(
                f"head_size = {self.C} must be even, as rotary positions need; use model.head_size = {use}"
            )
        D, F, C = self.width, self.ff, self.C
        norm, table = Weight((D,), ("embed",)), Weight((self.vocab_size, D), ("vocab", "embed"))
        layer = LayerShape(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_size=C,
            ff=F,
            ff_matrices=3,
            weights=(
                *(norm, norm),
                Weight((D, self.heads * C), ("embed", "heads")),
                *(Weight((D, self.kv_heads * C), ("embed", "kv_heads")),) * 2,
                Weight((self.heads * C, D), ("heads", "embed")),
                *(Weight((D, F), ("embed", "ff")),) * 2,
                Weight((F, D), ("ff", "embed")),
            ),
        )
        return ModelShape(
            name=self.name,
            vocab_size=self.vocab_size,
            width=D,
            layers=(layer,) * self.layers,
            embed=(table,),
            head=(norm,) if self.tied else (norm, table),
            tied=self.tied,
        )


class Context(NamedTuple):
    """What every layer needs and no layer owns."""

    positions: nn.Positions
    rotary: nn.RotaryTables


def context(config: Config, positions: nn.Positions) -> Context:
    tables = nn.rotary_tables(positions.positions_S, config.C, config.rope_theta, config.rope_scaling)
    return Context(positions, tables)


class Embed(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.tokens = nn.Embedding(config.vocab_size, config.width, rngs=rngs)

    def __call__(self, tokens_BS: jax.Array, positions_S: jax.Array) -> jax.Array:
        return self.tokens(tokens_BS)


class Block(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        D, F, C = config.width, config.ff, config.C
        out_std = 0.02 / math.sqrt(2 * config.layers)
        self.head_size = C
        self.attention_norm = nn.RMSNorm(D, config.norm_epsilon)
        self.query = nn.Linear(D, config.heads * C, ("embed", "heads"), rngs=rngs)
        self.key = nn.Linear(D, config.kv_heads * C, ("embed", "kv_heads"), rngs=rngs)
        self.value = nn.Linear(D, config.kv_heads * C, ("embed", "kv_heads"), rngs=rngs)
        self.out = nn.Linear(config.heads * C, D, ("heads", "embed"), rngs=rngs, std=out_std)
        self.ff_norm = nn.RMSNorm(D, config.norm_epsilon)
        self.gate = nn.Linear(D, F, ("embed", "ff"), rngs=rngs)
        self.up = nn.Linear(D, F, ("embed", "ff"), rngs=rngs)
        self.down = nn.Linear(F, D, ("ff", "embed"), rngs=rngs, std=out_std)

    def __call__(self, x_BSD: jax.Array, context: Context) -> jax.Array:
        x_BSD = x_BSD + self.attend(nn.gather_sequence(self.attention_norm(x_BSD)), context)
        h_BSD = nn.gather_sequence(self.ff_norm(x_BSD))
        return x_BSD + self.down(jax.nn.silu(self.gate(h_BSD)) * self.up(h_BSD))

    def attend(self, h_BSD: jax.Array, context: Context) -> jax.Array:
        heads = lambda a: a.reshape(*a.shape[:2], -1, self.head_size)
        q_BSHC = nn.rotate(heads(self.query(h_BSD)), context.rotary)
        k_BSKC = nn.rotate(heads(self.key(h_BSD)), context.rotary)
        a_BSHC = nn.attention(q_BSHC, k_BSKC, heads(self.value(h_BSD)), context.positions)
        return self.out(a_BSHC.reshape(*h_BSD.shape[:2], -1))


class Head(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.norm = nn.RMSNorm(config.width, config.norm_epsilon)
        self.output = None if config.tied else nn.Embedding(config.vocab_size, config.width, rngs=rngs)

    def __call__(self, x_BSD: jax.Array, targets_BS: jax.Array, embed: Embed) -> jax.Array:
        return nn.cross_entropy(self.norm(x_BSD), self.output or embed.tokens, targets_BS)


def _llama3(width: int, layers: int, heads: int, ff: int, name: str, rope_factor: float = 1.0) -> Config:
    return Config(
        vocab_size=128_256,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=8,
        ff=ff,
        rope_factor=rope_factor,
        name=name,
    )


# Touvron et al. 2023 (arXiv 2307.09288) and Llama Team 2024 (arXiv 2407.21783, table 3)
PRESETS = {
    "llama-tiny": Config(
        vocab_size=256,
        width=128,
        layers=8,
        heads=4,
        kv_heads=2,
        ff=384,
        rope_theta=10_000.0,
        name="llama-tiny",
    ),
    "llama2-7b": Config(
        vocab_size=32_000,
        width=4096,
        layers=32,
        heads=32,
        kv_heads=32,
        ff=11_008,
        rope_theta=10_000.0,
        name="llama2-7b",
    ),
    "llama3-8b": _llama3(4096, 32, 32, 14_336, "llama3-8b"),
    "llama3-70b": _llama3(8192, 80, 64, 28_672, "llama3-70b"),
    "llama3.1-405b": _llama3(16_384, 126, 128, 53_248, "llama3.1-405b", rope_factor=8.0),
}
