"""Mesh axes, and which of them split each dimension of a weight. No jax.

A weight names its dimensions ("embed", "heads", "ff", "vocab", …); `LOGICAL` says which mesh axes split each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from parallax.config import Parallel
from parallax.shape import LayerShape

AXES = ("pp", "dp", "ep", "cp", "tp")  # slowest link first: tp varies fastest and stays inside a node
MANUAL = ("pp", "dp", "ep", "cp")  # what the pipeline handles by hand; tp is left to XLA
BATCH = ("dp", "ep")
REPLICAS = ("dp", "ep", "cp")  # dense weights are equal, and gradients summed, over these

LOGICAL: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "embed": (),  # model width
        "position": (),
        "latent": (),  # of low-rank attention projections
        "heads": ("tp",),
        "kv_heads": ("tp",),
        "ff": ("tp",),
        "router": (),
        "experts": ("ep",),
        "vocab": ("pp", "tp"),
    }
)


@dataclass(frozen=True)
class Sizes:
    """The size of each mesh axis, and which logical axes are whole on every rank after all."""

    sizes: Mapping[str, int]
    replicated: frozenset[str] = field(default_factory=frozenset)

    def __getattr__(self, axis: str) -> int:
        if axis in AXES:
            return self.sizes.get(axis, 1)
        raise AttributeError(axis)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same dense weights: dp · ep · cp."""
        return self.ranks(REPLICAS)

    def ranks(self, mesh_axes: tuple[str, ...]) -> int:
        """Members of a group that spans these mesh axes."""
        return math.prod(self.sizes.get(axis, 1) for axis in mesh_axes)

    def mesh_axes(self, logical: str) -> tuple[str, ...]:
        return () if logical in self.replicated else LOGICAL[logical]

    def shards(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """All mesh axes that split a weight with these logical axes."""
        return tuple(mesh_axis for axis in axes for mesh_axis in self.mesh_axes(axis))

    def padded(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, ...]:
        """The shape that this layout gives a weight: a dimension that its mesh axes do not divide (the vocabulary) is
        rounded up."""
        parts = [self.ranks(self.mesh_axes(axis)) for axis in axes]
        return tuple(-(-n // part) * part for n, part in zip(shape, parts, strict=True))

    def local(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, ...]:
        """The shape of one rank's part of a weight."""
        whole = self.padded(shape, axes)
        return tuple(n // self.ranks(self.mesh_axes(axis)) for n, axis in zip(whole, axes, strict=True))


def axis_sizes(parallel: Parallel) -> dict[str, int]:
    """The mesh axes of a run file's [parallel]."""
    return {axis: getattr(parallel, axis) for axis in AXES}


def kept_whole(parallel: Parallel, layers: Iterable[LayerShape]) -> frozenset[str]:
    """Logical axes that every rank holds whole: keys and values, where tp does not divide their heads."""
    split = all(layer.kv_heads % parallel.tp == 0 for layer in set(layers))
    return frozenset() if split else frozenset({"kv_heads"})
