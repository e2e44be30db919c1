"""The canonical form of a training state: the same arrays, whatever layout trains it. What checkpoints hold.

    {"masters", "mu", "nu"}   trees {"blocks", "embed", "head"} of float32 weights in their true shapes, blocks stacked
                              [L, …] in model order
    "count", "skipped"        int32: updates made, steps left out

Nothing in it depends on dp, pp, tp, virtual stages or zero. The weights that the pipeline reads are the masters, cast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallax.model import Weight
from parallax.optimizer import Shard, TrainState, shard_of
from parallax.program import Program

Tree = Any


@dataclass(frozen=True, eq=False)
class Canonical:
    """The canonical form of a program's state: each array split over the devices wherever its form allows it."""

    program: Program

    @cached_property
    def _forms(self) -> Tree:
        """A `_Form` for each weight."""
        program = self.program

        def form(part: str, weight: Weight, master: P) -> _Form:
            shard = shard_of(weight, program.layout, program.config.parallel.zero)
            return _Form(program, weight, shard, master, stacked=part == "blocks")

        return {
            part: jax.tree.map(lambda w, s, part=part: form(part, w, s), weights, program.optimizer.master_specs[part])
            for part, weights in program.model.weights.items()
        }

    @cached_property
    def target(self) -> Tree:
        """Shapes, with shardings on the program's mesh."""
        scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=self.program.sharding(P()))
        weights = jax.tree.map(lambda f: jax.ShapeDtypeStruct(f.shape, jnp.float32, sharding=f.canonical), self._forms)
        return {"masters": weights, "mu": weights, "nu": weights, "count": scalar, "skipped": scalar}

    def from_state(self, state: TrainState) -> Tree:
        with jax.set_mesh(self.program.mesh):
            return self._from_state(state)

    def to_state(self, tree: Tree) -> TrainState:
        with jax.set_mesh(self.program.mesh):
            return self._to_state(tree)

    @cached_property
    def _from_state(self) -> Callable[[TrainState], Tree]:
        def convert(state: TrainState) -> Tree:
            trees = {"masters": state.masters, "mu": state.adam.mu, "nu": state.adam.nu}
            canonical = {name: jax.tree.map(_Form.to_canonical, self._forms, tree) for name, tree in trees.items()}
            return canonical | {"count": state.adam.count, "skipped": state.skipped}

        return jax.jit(convert, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, self.target))

    @cached_property
    def _to_state(self) -> Callable[[Tree], TrainState]:
        forms, dtype = self._forms, self.program.optimizer.dtype

        def convert(tree: Tree) -> TrainState:
            weights = jax.tree.map(lambda f, x: f.lay_out(x.astype(dtype)), forms, tree["masters"])
            masters, mu, nu = (
                jax.tree.map(_Form.from_canonical, forms, tree[name]) for name in ("masters", "mu", "nu")
            )
            return TrainState(weights, masters, optax.ScaleByAdamState(tree["count"], mu, nu), tree["skipped"])

        return jax.jit(convert, out_shardings=self.program.state_shardings)


@dataclass(frozen=True)
class _Form:
    """One weight's two forms, and how to get from one to the other inside jit."""

    program: Program
    weight: Weight
    shard: Shard
    master: P  # spec of the masters and moments, as the optimizer holds them
    stacked: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.program.model.layers, *self.weight.shape) if self.stacked else self.weight.shape

    @property
    def whole(self) -> P:
        """Spec of the weight in its true shape, as the pipeline stacks it; replicated over dp, ep and cp where the
        optimizer flattens it, else split as the optimizer does."""
        lead = (None, "pp", None) if self.stacked else ()
        return P(*lead, *self.program.layout.spec(self.weight.axes)) if self.shard.split == -1 else self.master

    @property
    def canonical(self) -> NamedSharding:
        """As the pipeline splits it; mesh axes that do not divide their dimension (layers of uneven stages, an odd
        vocabulary) split another one, if any divides."""
        spec = P("pp", *self.whole[3:]) if self.stacked else self.whole
        split: list[list[str]] = [[] for _ in self.shape]
        fits = lambda d, axes: self.shape[d] % self.program.layout.ranks((*split[d], *axes)) == 0
        for d, entry in enumerate(spec):
            axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
            place = next((other for other in (d, *range(len(split))) if fits(other, axes)), None)
            if axes and place is not None:
                split[place] += axes
        return self.program.sharding(P(*(tuple(axes) or None for axes in split)))

    def to_canonical(self, x: jax.Array) -> jax.Array:
        if self.shard.split == -1:
            x = self._per_layer(self.shard.gather, self.master, self.whole)(x)
        return self.program.take_out(self.weight, x, self.stacked)

    def from_canonical(self, x: jax.Array) -> jax.Array:
        x = self.lay_out(x)
        return self._per_layer(self.shard.take, self.whole, self.master)(x) if self.shard.split == -1 else x

    def lay_out(self, x: jax.Array) -> jax.Array:
        return self.program.lay_out(self.weight, x, self.stacked)

    def _per_layer(self, f, in_spec: P, out_spec: P):
        for _ in range(3 if self.stacked else 0):
            f = jax.vmap(f)
        return jax.shard_map(f, mesh=self.program.mesh, in_specs=(in_spec,), out_specs=out_spec, check_vma=False)
