"""Checkpoints in one canonical form, whatever layout wrote them: any run can be resumed on any layout.

    STEP/state   {"masters", "mu", "nu"}: trees {"blocks", "embed", "head"} of float32 weights in their true shapes,
                 blocks stacked [L, …] in model order; and the scalars "count" (updates made) and "skipped"
    STEP/facts   JSON: step, samples seen, and the keys of the run that must not change (`identity`)

Nothing in it depends on dp, pp, tp, virtual stages or zero. The weights that the pipeline reads are the masters, cast.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallax.config import ConfigError, show
from parallax.model import Weight
from parallax.optimizer import Shard, TrainState, shard_of
from parallax.program import Program
from parallax.sharding import Layout
from parallax.validate import Resolved

Tree = Any
ITEMS = ("state", "facts")


# Layout ↔ canonical form


@dataclass(frozen=True)
class _Form:
    """One weight's two forms, and how to get from one to the other inside jit."""

    weight: Weight
    shard: Shard
    master: P  # spec of the masters and moments, as the optimizer holds them
    layout: Layout
    mesh: jax.sharding.Mesh
    virtual_stages: int
    layers: int | None  # of the model, where the weight is stacked

    @property
    def stacked(self) -> bool:
        return self.layers is not None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape if self.layers is None else (self.layers, *self.weight.shape)

    @property
    def whole(self) -> P:
        """Spec of the weight in its true shape, as the pipeline stacks it; replicated over dp, ep and cp where the
        optimizer flattens it, else split as the optimizer does."""
        lead = (None, "pp", None) if self.stacked else ()
        return P(*lead, *self.layout.spec(self.weight.axes)) if self.shard.split == -1 else self.master

    @property
    def canonical(self) -> NamedSharding:
        return NamedSharding(self.mesh, P("pp", *self.whole[3:]) if self.stacked else self.whole)

    def to_canonical(self, x: jax.Array) -> jax.Array:
        if self.shard.split == -1:
            x = self._per_layer(self.shard.gather, self.master, self.whole)(x)
        return x.reshape(self.shape)

    def from_canonical(self, x: jax.Array) -> jax.Array:
        x = self.stack(x)
        return self._per_layer(self.shard.take, self.whole, self.master)(x) if self.shard.split == -1 else x

    def stack(self, x: jax.Array) -> jax.Array:
        """[L, …] → [virtual stage, pp, layer of a chunk, …]"""
        return x.reshape(self.virtual_stages, self.layout.pp, -1, *x.shape[1:]) if self.stacked else x

    def _per_layer(self, f, in_spec: P, out_spec: P):
        for _ in range(3 if self.stacked else 0):
            f = jax.vmap(f)
        return jax.shard_map(f, mesh=self.mesh, in_specs=(in_spec,), out_specs=out_spec, check_vma=False)


@dataclass(frozen=True, eq=False)
class Canonical:
    """The canonical form of a program's state: each array split over the devices wherever its form allows it."""

    program: Program

    @cached_property
    def _forms(self) -> Tree:
        """A `_Form` for each weight."""
        program, parallel = self.program, self.program.config.parallel
        specs = program.optimizer.master_specs

        def form(part: str, weight: Weight, spec: P) -> _Form:
            shard = shard_of(weight, program.layout, parallel.zero)
            layers = program.model.layers if part == "blocks" else None
            return _Form(weight, shard, spec, program.layout, program.mesh, parallel.virtual_stages, layers)

        return {
            part: jax.tree.map(lambda w, s, part=part: form(part, w, s), weights, specs[part])
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
            weights = jax.tree.map(lambda f, x: f.stack(x.astype(dtype)), forms, tree["masters"])
            masters, mu, nu = (
                jax.tree.map(_Form.from_canonical, forms, tree[name]) for name in ("masters", "mu", "nu")
            )
            return TrainState(weights, masters, optax.ScaleByAdamState(tree["count"], mu, nu), tree["skipped"])

        return jax.jit(convert, out_shardings=self.program.state_shardings)


# What must stay the same


def identity(resolved: Resolved) -> dict[str, Any]:
    """The keys of a run that its checkpoints are bound to, dotted: model, data, seed and batch; never the layout."""
    config = resolved.config
    model = dataclasses.asdict(resolved.model_config) | {"name": config.model.name}
    keys = {f"model.{name}": value for name, value in model.items()}
    keys |= {f"data.{name}": value for name, value in dataclasses.asdict(config.data).items()}
    keys |= {f"train.{name}": getattr(config.train, name) for name in ("seed", "seq_len", "global_batch_size")}
    return json.loads(json.dumps(keys))


def check_identity(resolved: Resolved, saved: dict[str, Any], where: Path) -> None:
    """Raises ConfigError with a line for each key that differs from the checkpoint's."""
    now = identity(resolved)
    lines = [
        f"{key} = {show(now[key]) if key in now else 'none'} is not what the checkpoint {where} was trained with; "
        f"use {key} = {show(saved[key]) if key in saved else 'none'}, or another log.dir"
        for key in sorted(now.keys() | saved.keys())
        if key not in now or key not in saved or now[key] != saved[key]
    ]
    if lines:
        raise ConfigError(lines)


# Files


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, in `folder`. A checkpoint is written beside its place and then renamed, so that one
    that is there is complete."""

    folder: Path
    keep: int

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        named = (path for path in self.folder.iterdir() if path.name.isdecimal())
        return sorted(int(path.name) for path in named if all((path / item).is_dir() for item in ITEMS))

    def path(self, step: int) -> Path:
        return self.folder / str(step)

    def facts(self, step: int) -> dict[str, Any]:
        with self._manager() as manager:
            return manager.restore(step, args=ocp.args.Composite(facts=ocp.args.JsonRestore()))["facts"]

    def save(self, step: int, state: Tree, facts: dict[str, Any]) -> Path:
        """Writes a canonical state; returns when it is complete, and older ones than the newest `keep` are gone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), facts=ocp.args.JsonSave(facts))
        with self._manager() as manager:
            manager.save(step, args=items, force=True)
        return self.path(step)

    def restore(self, step: int, target: Tree) -> Tree:
        """The canonical state, with the shapes and shardings of `target` (see `Canonical`)."""
        items = ocp.args.Composite(state=ocp.args.StandardRestore(target))
        with self._manager() as manager:
            return manager.restore(step, args=items)["state"]

    def _manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(max_to_keep=self.keep, create=False, enable_async_checkpointing=False)
        return ocp.CheckpointManager(self.folder.resolve(), item_names=ITEMS, options=options)
