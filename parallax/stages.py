"""Which layers each pipeline stage holds. No jax.

Stage k of the pp · v stages is chunk k // pp of rank k % pp. Every chunk has room for the same number of layers; where
layers do not divide, the first stages hold one more than the rest, whose last place is padding: computed (the program
is the same on every rank), its result discarded, never trained, and in no checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Stages:
    layers: int
    pp: int
    virtual_stages: int

    @property
    def count(self) -> int:
        return self.pp * self.virtual_stages

    @property
    def room(self) -> int:
        """Layers that a chunk has room for."""
        return -(-self.layers // self.count)

    @property
    def full(self) -> int:
        """Stages, counted from the first, whose room is all used."""
        return self.layers - (self.room - 1) * self.count

    @property
    def padding(self) -> int:
        """Places without a layer, over all stages."""
        return self.count * self.room - self.layers

    @property
    def places(self) -> np.ndarray:
        """Of each layer, its place in [virtual stage, pp, layer of a chunk], flattened: int [L]."""
        place = np.arange(self.count * self.room).reshape(self.count, self.room)
        return np.concatenate([row[: self.room - (stage >= self.full)] for stage, row in enumerate(place)])
