"""The shape of a model: its weights and layer widths, parameter and FLOP counts, as plain numbers. No jax.

`Config.shape()` of a model file returns a `ModelShape`; the run-file checks, the estimator and the planner read it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Weight:
    """One weight of a layer, or of the embedding or head: its shape and the logical name of each dimension (see
    `parallax.layout.LOGICAL`)."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Weight decay applies to matrices; norm gains and biases are vectors."""
        return len(self.shape) > 1


@dataclass(frozen=True)
class LayerShape:
    """One transformer layer.

    `weights` lists every weight, norms and biases included. `ff_matrices` is 3 for SwiGLU (gate, up, down) and 2 for a
    plain MLP. A mixture-of-experts layer has `experts` feed-forward blocks of width `ff`, whose weights have a
    dimension "experts" and of which a token visits `experts_per_token`, and `shared_ff` feed-forward width that every
    token visits; a dense layer has `experts = 0`. `value_head_size` is 0 where values are as wide as keys.
    """

    heads: int
    kv_heads: int
    head_size: int
    ff: int
    ff_matrices: int
    weights: tuple[Weight, ...]
    experts: int = 0
    experts_per_token: int = 0
    shared_ff: int = 0
    value_head_size: int = 0

    @cached_property
    def _hash(self) -> int:
        return hash((self.heads, self.head_size, self.ff, self.experts, self.weights))

    def __hash__(self) -> int:  # layers are keys of caches that a search looks into by the thousand
        return self._hash

    @cached_property
    def parameters(self) -> int:
        return sum(weight.size for weight in self.weights)

    @cached_property
    def active_parameters(self) -> int:
        """Those of the matrices that one token is multiplied with."""
        share = lambda weight: self.experts_per_token / self.experts if "experts" in weight.axes[:-2] else 1
        return round(sum(weight.size * share(weight) for weight in self.weights if weight.decays))

    def matmul_flops_per_token(self) -> int:
        """Forward FLOPs of the layer's weight matrix products for one token (2 a multiply-add)."""
        return 2 * self.active_parameters

    def attention_flops_per_token(self, seq_len: int) -> int:
        """Forward FLOPs of scores and weighted values for one token, causal: half of 4 S H C."""
        return seq_len * self.heads * (self.head_size + (self.value_head_size or self.head_size))


@dataclass(frozen=True)
class ModelShape:
    """A whole model. `embed` and `head` list the weights outside the layers; a tied output matrix is in `embed` alone.
    `max_positions` is 0 where positions are not learned."""

    name: str
    vocab_size: int
    width: int
    layers: tuple[LayerShape, ...]
    embed: tuple[Weight, ...]
    head: tuple[Weight, ...]
    tied: bool
    max_positions: int = 0

    @cached_property
    def kinds(self) -> tuple[tuple[LayerShape, int], ...]:
        """The layers that differ, and how many there are of each."""
        return tuple(Counter(self.layers).items())

    @cached_property
    def outer_parameters(self) -> int:
        return sum(weight.size for weight in (*self.embed, *self.head))

    @cached_property
    def expert_parameters(self) -> int:
        """Of all experts of all layers."""
        return sum(n * w.size for layer, n in self.kinds for w in layer.weights if "experts" in w.axes)

    @cached_property
    def dense_parameters(self) -> int:
        """Of the layers, without experts."""
        return sum(n * layer.parameters for layer, n in self.kinds) - self.expert_parameters

    @cached_property
    def parameters(self) -> int:
        return self.outer_parameters + self.dense_parameters + self.expert_parameters

    @cached_property
    def active_parameters(self) -> int:
        """As `parameters`, with as many experts as one token visits."""
        idle = sum(
            n * round(w.size * (1 - layer.experts_per_token / layer.experts))
            for layer, n in self.kinds
            for w in layer.weights
            if "experts" in w.axes
        )
        return self.parameters - idle

    def forward_flops_per_token(self, seq_len: int) -> int:
        """Model FLOPs of one token's forward pass: matrix products, causal attention and the output matrix."""
        layers = sum(
            n * (layer.matmul_flops_per_token() + layer.attention_flops_per_token(seq_len)) for layer, n in self.kinds
        )
        return layers + 2 * self.width * self.vocab_size

    def train_flops_per_token(self, seq_len: int) -> int:
        """Forward and backward, three times the forward; recomputation is not counted (model FLOPs, as MFU wants).

        Megatron-LM's formula for a training step, per token, with the causal half of attention."""
        return 3 * self.forward_flops_per_token(seq_len)
