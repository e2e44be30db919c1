"""Layers for model files. They know logical axes and what must be gathered or split, never a mesh axis by name."""

from parallax.nn.attention import Positions, attention
from parallax.nn.linear import Linear
from parallax.nn.norm import LayerNorm, RMSNorm
from parallax.nn.rotary import RotaryScaling, RotaryTables, rotary_tables, rotate
from parallax.nn.vocabulary import Embedding, cross_entropy
from parallax.nn.weights import normal, weight
from parallax.sharding import gather_sequence

__all__ = [
    "Embedding",
    "LayerNorm",
    "Linear",
    "Positions",
    "RMSNorm",
    "RotaryScaling",
    "RotaryTables",
    "attention",
    "cross_entropy",
    "gather_sequence",
    "normal",
    "rotary_tables",
    "rotate",
    "weight",
]
