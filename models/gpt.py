"""GPT: learned positions, LayerNorm, GELU, biases, output matrix tied to the embedding.

See models/llama.py for what a model file is. Names end in their dims: B batch, S sequence, D width, H heads,
C head size, F feed-forward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
from flax import nnx

from parallax import nn
from parallax.shape import LayerShape, ModelShape, Weight


@dataclass(frozen=True)
class Config:
    vocab_size: int
    width: int
    layers: int
    heads: int
    max_positions: int = 2048
    ff: int = 0  # 0: 4 · width
    norm_epsilon: float = 1e-5
    name: str = "gpt"

    @property
    def C(self) -> int:
        return self.width // self.heads

    @property
    def F(self) -> int:
        return self.ff or 4 * self.width

    def shape(self) -> ModelShape:
        """Raises ValueError where the sizes do not make a model."""
        if self.norm_epsilon <= 0:
            raise ValueError(f"norm_epsilon = {self.norm_epsilon} must be greater than 0")
        if self.width % self.heads:
            below = self.width // self.heads * self.heads
            use = " or ".join(str(width) for width in (below, below + self.heads) if width)
            raise ValueError(f"width = {self.width} is not a multiple of heads = {self.heads}; use model.width = {use}")
        D, F = self.width, self.F
        vector = Weight((D,), ("embed",))
        layer = LayerShape(
            heads=self.heads,
            kv_heads=self.heads,
            head_size=self.C,
            ff=F,
            ff_matrices=2,
            weights=(
                *(vector,) * 4,  # gain and bias of two norms
                *(Weight((D, D), ("embed", "heads")), Weight((D,), ("heads",))) * 3,
                *(Weight((D, D), ("heads", "embed")), vector),
                *(Weight((D, F), ("embed", "ff")), Weight((F,), ("ff",))),
                *(Weight((F, D), ("ff", "embed")), vector),
            ),
        )
        return ModelShape(
            name=self.name,
            vocab_size=self.vocab_size,
            width=D,
            layers=(layer,) * self.layers,
            embed=(
                Weight((self.vocab_size, D), ("vocab", "embed")),
                Weight((self.max_positions, D), ("position", "embed")),
            ),
            head=(vector, vector),
            tied=True,
            max_positions=self.max_positions,
        )


class Context(NamedTuple):
    """What every layer needs and no layer owns."""

    positions: nn.Positions


def context(config: Config, positions: nn.Positions) -> Context:
    return Context(positions)


class Embed(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.tokens = nn.Embedding(config.vocab_size, config.width, rngs=rngs)
        self.positions = nn.weight(nn.normal(rngs, (config.max_positions, config.width), 0.02), ("position", "embed"))

    def __call__(self, tokens_BS: jax.Array, positions_S: jax.Array) -> jax.Array:
        return self.tokens(tokens_BS) + self.positions[...][positions_S]


class Block(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        D, F = config.width, config.F
        linear = partial(nn.Linear, rngs=rngs, bias=True)
        out_std = 0.02 / math.sqrt(2 * config.layers)
        self.head_size = config.C
        self.attention_norm = nn.LayerNorm(D, config.norm_epsilon)
        self.query = linear(D, D, ("embed", "heads"))
        self.key = linear(D, D, ("embed", "heads"))
        self.value = linear(D, D, ("embed", "heads"))
        self.out = linear(D, D, ("heads", "embed"), std=out_std)
        self.ff_norm = nn.LayerNorm(D, config.norm_epsilon)
        self.up = linear(D, F, ("embed", "ff"))
        self.down = linear(F, D, ("ff", "embed"), std=out_std)

    def __call__(self, x_BSD: jax.Array, context: Context) -> jax.Array:
        x_BSD = x_BSD + self.attend(nn.gather_sequence(self.attention_norm(x_BSD)), context)
        h_BSD = nn.gather_sequence(self.ff_norm(x_BSD))
        return x_BSD + self.down(jax.nn.gelu(self.up(h_BSD)))

    def attend(self, h_BSD: jax.Array, context: Context) -> jax.Array:
        heads = lambda a: a.reshape(*a.shape[:2], -1, self.head_size)
        q_BSHC, k_BSHC, v_BSHC = (heads(linear(h_BSD)) for linear in (self.query, self.key, self.value))
        a_BSHC = nn.attention(q_BSHC, k_BSHC, v_BSHC, context.positions)
        return self.out(a_BSHC.reshape(*h_BSD.shape[:2], -1))


class Head(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.norm = nn.LayerNorm(config.width, config.norm_epsilon)

    def __call__(self, x_BSD: jax.Array, targets_BS: jax.Array, embed: Embed) -> jax.Array:
        return nn.cross_entropy(self.norm(x_BSD), embed.tokens, targets_BS)


# Brown et al. 2020 (arXiv 2005.14165, table 2.1), Smith et al. 2022 (arXiv 2201.11990), Narayanan et al. 2021
# (arXiv 2104.04473, table 1); vocabulary 51,200 as there
PRESETS = {
    "gpt-tiny": Config(vocab_size=256, width=128, layers=8, heads=4, max_positions=512, name="gpt-tiny"),
    "gpt3-175b": Config(vocab_size=51_200, width=12_288, layers=96, heads=96, name="gpt3-175b"),
    "gpt-530b": Config(vocab_size=51_200, width=20_480, layers=105, heads=128, name="gpt-530b"),
    "gpt-1t": Config(vocab_size=51_200, width=25_600, layers=128, heads=160, name="gpt-1t"),
}
