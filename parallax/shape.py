"""The shape of a model: layer widths, parameter and FLOP counts, as plain numbers. No jax.

`Config.shape()` of a model file returns a `ModelShape`; the run-file checks and the planner read it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerShape:
    """One transformer layer.

    `ff_matrices` is 3 for SwiGLU (gate, up, down) and 2 for a plain MLP. `parameters` counts every weight of the
    layer, norms and biases included. A mixture-of-experts layer has `experts` feed-forward blocks of width `ff`, of
    which a token visits `experts_per_token`, and `shared_ff` feed-forward width that every token visits; a dense
    layer has `experts = 0`.
    """

    heads: int
    kv_heads: int
    head_size: int
    ff: int
    ff_matrices: int
    parameters: int
    experts: int = 0
    experts_per_token: int = 0
    shared_ff: int = 0

    def matmul_flops_per_token(self, width: int) -> int:
        """Forward FLOPs of the layer's weight matrix products for one token (2 a multiply-add)."""
        attention = 2 * width * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        active_ff = self.ff * self.experts_per_token + self.shared_ff if self.experts else self.ff
        router = 2 * width * self.experts
        return attention + 2 * self.ff_matrices * width * active_ff + router

    def attention_flops_per_token(self, seq_len: int) -> int:
        """Forward FLOPs of scores and weighted values for one token, causal: half of 4 S H C."""
        return 2 * seq_len * self.heads * self.head_size


@dataclass(frozen=True)
class ModelShape:
    """A whole model. `embed_parameters` and `head_parameters` count what lies outside the layers; a tied output
    matrix is counted once, in `embed_parameters`. `max_positions` is 0 where positions are not learned."""

    name: str
    vocab_size: int
    width: int
    layers: tuple[LayerShape, ...]
    embed_parameters: int
    head_parameters: int
    tied: bool
    max_positions: int = 0

    @property
    def parameters(self) -> int:
        return self.embed_parameters + self.head_parameters + sum(layer.parameters for layer in self.layers)

    def forward_flops_per_token(self, seq_len: int) -> int:
        """Model FLOPs of one token's forward pass: matrix products, causal attention and the output matrix."""
        layers = sum(
            layer.matmul_flops_per_token(self.width) + layer.attention_flops_per_token(seq_len) for layer in self.layers
        )
        return layers + 2 * self.width * self.vocab_size

    def train_flops_per_token(self, seq_len: int) -> int:
        """Forward and backward, three times the forward; recomputation is not counted (model FLOPs, as MFU wants).

        Megatron-LM's formula for a training step, per token, with the causal half of attention."""
        return 3 * self.forward_flops_per_token(seq_len)
