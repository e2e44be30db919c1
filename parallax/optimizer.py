"""AdamW on float32 master weights, sharded over the replicas (ZeRO-1), in a map that is manual over every axis.

The pipeline leaves one partial sum of gradients a replica. Here they are reduced once (a reduce-scatter over dp, ep
and cp), clipped by their global norm, applied to the rank's shard of masters and moments, and the new weights are
gathered once. With tp left to XLA the reduce-scatter would gather its operand over tp first; so it is manual too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parallax.config import Optimizer
from parallax.layout import AXES, REPLICAS
from parallax.model import Model
from parallax.pipeline import partial_specs, weight_specs
from parallax.shape import Weight
from parallax.sharding import Layout, Leaf, Tree


class TrainState(NamedTuple):
    """`weights` are what the pipeline reads; `masters` and the Adam moments are float32 and sharded over replicas."""

    weights: Tree
    masters: Tree
    adam: Any  # optax.ScaleByAdamState
    skipped: Leaf  # int32: steps left out because a gradient was not finite


class UpdateMetrics(NamedTuple):
    grad_norm: Leaf  # before clipping
    learning_rate: Leaf
    finite: Leaf  # False: the step was left out


@dataclass(frozen=True)
class Shard:
    """How one weight is split over the replicas, a single layer at a time where it is stacked.

    `split` is the dimension (of a layer's weight) that every rank cuts in equal parts; -1 where none divides: then the
    rank's part is flattened and padded to `padded` elements; None where nothing is split (zero = 0)."""

    local: tuple[int, ...]  # shape on one rank before splitting
    split: int | None
    replicas: int

    @property
    def padded(self) -> int:
        return -(-math.prod(self.local) // self.replicas) * self.replicas

    def flat(self, x: jax.Array) -> jax.Array:
        return jnp.pad(x.reshape(-1), (0, self.padded - x.size)) if self.split == -1 else x

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """This rank's shard of the sum over replicas."""
        if self.split is None:
            return lax.psum(gradient, REPLICAS)
        dim = max(self.split, 0)
        return lax.psum_scatter(self.flat(gradient), REPLICAS, scatter_dimension=dim, tiled=True)

    def take(self, whole: jax.Array) -> jax.Array:
        """This rank's shard of an array that is equal on all replicas."""
        if self.split is None:
            return whole
        dim, flat = max(self.split, 0), self.flat(whole)
        size = flat.shape[dim] // self.replicas
        return lax.dynamic_slice_in_dim(flat, lax.axis_index(REPLICAS) * size, size, dim)

    def gather(self, shard: jax.Array) -> jax.Array:
        """The whole weight of this rank from the replicas' shards."""
        if self.split is None:
            return shard
        whole = lax.all_gather(shard, REPLICAS, axis=max(self.split, 0), tiled=True)
        return whole if self.split >= 0 else whole[: math.prod(self.local)].reshape(self.local)


def shard_of(weight: Weight, layout: Layout, zero: int) -> Shard:
    """The first dimension that divides is split; on TPU a flattened one would be reduced with an all-reduce."""
    local = layout.local(weight.shape, weight.axes)
    if zero == 0:
        return Shard(local, None, layout.replicas)
    return Shard(local, next((d for d, n in enumerate(local) if n % layout.replicas == 0), -1), layout.replicas)


def learning_rates(config: Optimizer, steps: int) -> optax.Schedule:
    """Learning rate by number of updates made: linear warm-up, then cosine, linear or constant to the last step."""
    peak, low = config.learning_rate, config.learning_rate * config.min_learning_rate_ratio
    rest = max(steps - config.warmup_steps, 1)
    decay = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, config.min_learning_rate_ratio),
        "linear": lambda: optax.linear_schedule(peak, low, rest),
        "constant": lambda: optax.constant_schedule(peak),
    }[config.schedule]()
    if not config.warmup_steps:
        return decay
    warmup = optax.linear_schedule(peak / config.warmup_steps, peak, max(config.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, decay], [config.warmup_steps])


@dataclass(frozen=True, eq=False)
class ShardedAdamW:
    """The optimizer of one model on one layout. Every method is to be called inside jit."""

    model: Model
    layout: Layout
    mesh: Mesh
    config: Optimizer
    steps: int
    zero: int
    dtype: Any  # of the weights that the pipeline reads

    # shardings

    def _over_weights(self, f: Callable[[Weight, tuple[str | None, ...]], Any]) -> Tree:
        """f(weight, leading entries of its spec) for every weight; the blocks are stacked [v, pp, layers, …]."""
        lead = {"blocks": (None, "pp", None)}
        return {
            part: jax.tree.map(lambda w, part=part: f(w, lead.get(part, ())), tree)
            for part, tree in self.model.weights.items()
        }

    @property
    def shards(self) -> Tree:
        return self._over_weights(lambda w, _: shard_of(w, self.layout, self.zero))

    @property
    def master_specs(self) -> Tree:
        def spec(weight: Weight, lead) -> P:
            split = shard_of(weight, self.layout, self.zero).split
            own = [self.layout.mesh_axes(axis) for axis in weight.axes]
            if split == -1:
                return P(*lead, (*self.layout.shards(weight.axes), *REPLICAS))
            if split is not None:
                own[split] = (*own[split], *REPLICAS)
            return P(*lead, *(axes or None for axes in own))

        return self._over_weights(spec)

    @property
    def state_specs(self) -> TrainState:
        masters = self.master_specs
        adam: Any = optax.ScaleByAdamState(count=P(), mu=masters, nu=masters)  # type: ignore[arg-type]
        return TrainState(weight_specs(self.model, self.layout), masters, adam, P())

    def shardings(self, specs: Tree) -> Tree:
        return jax.tree.map(lambda s: NamedSharding(self.mesh, s), specs)

    def _map(self, f, in_specs, out_specs):
        return jax.shard_map(f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _each(self, method: str, tree: Tree, cast=lambda x: x) -> Tree:
        """A method of `Shard` on every weight; stacked ones a layer at a time, so that temporaries are one layer's."""
        run = lambda shard, x: getattr(shard, method)(cast(x))
        if self.layout.replicas == 1:
            return jax.tree.map(run, self.shards, tree)
        shards, blocks = self.shards, tree["blocks"]
        layers = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), blocks)
        _, layers = lax.scan(lambda _, layer: (None, jax.tree.map(run, shards["blocks"], layer)), None, layers)
        blocks = jax.tree.map(lambda old, new: new.reshape(*old.shape[:3], *new.shape[1:]), blocks, layers)
        rest = _after(blocks, {part: tree[part] for part in ("embed", "head")})
        return {"blocks": blocks, **jax.tree.map(run, {part: shards[part] for part in rest}, rest)}

    # steps

    def reduce(self, loss: jax.Array, partials: Tree, microbatches: int) -> tuple[jax.Array, Tree]:
        """Partial sums of the pipeline → mean loss, and mean gradients, float32, sharded as the masters are."""
        specs = partial_specs(self.model, self.layout)
        partials = jax.tree.map(lax.with_sharding_constraint, partials, self.shardings(specs))
        scale = 1 / (microbatches * self.layout.replicas)

        def run(loss, partials):
            gradients = self._each("scatter", jax.tree.map(lambda g: g[0], partials))
            loss = lax.psum(_after(gradients, loss)[0], REPLICAS)
            return loss * scale, jax.tree.map(lambda g: g * scale, gradients)

        return self._map(run, (P(REPLICAS), specs), (P(), self.master_specs))(loss, partials)

    def init(self, weights: Tree) -> TrainState:
        """`weights` float32, stacked as the pipeline wants them (see `stack`)."""
        masters = self.split(weights)
        cast = jax.tree.map(lambda w: w.astype(self.dtype), weights)
        return TrainState(cast, masters, self._adam.init(masters), jnp.int32(0))

    def split(self, weights: Tree) -> Tree:
        """Whole arrays, shaped as the weights of the pipeline → sharded as the masters are."""
        specs = weight_specs(self.model, self.layout)
        return self._map(lambda w: self._each("take", w), (specs,), self.master_specs)(weights)

    def whole(self, masters: Tree) -> Tree:
        """The inverse of `split`: masters, moments or reduced gradients → arrays of the weights' shapes."""
        specs = weight_specs(self.model, self.layout)
        return self._map(lambda w: self._each("gather", w), (self.master_specs,), specs)(masters)

    @property
    def _adam(self) -> optax.GradientTransformation:
        return optax.scale_by_adam(self.config.beta1, self.config.beta2, self.config.epsilon)

    def update(self, state: TrainState, gradients: Tree) -> tuple[TrainState, UpdateMetrics]:
        """One AdamW step (Loshchilov & Hutter 2019, arXiv 1711.05101) on reduced gradients."""
        specs = self.state_specs
        return self._map(self._rank_update, (specs, specs.masters), (specs, UpdateMetrics(P(), P(), P())))(
            state, gradients
        )

    def _rank_update(self, state: TrainState, gradients: Tree) -> tuple[TrainState, UpdateMetrics]:
        norm = self._global_norm(gradients)
        finite = jnp.isfinite(norm)
        clip = self.config.clip_norm
        scale = jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-12)) if clip else 1.0
        gradients = jax.tree.map(lambda g: g * scale, gradients)

        learning_rate = jnp.asarray(learning_rates(self.config, self.steps)(state.adam.count))
        direction, adam = self._adam.update(gradients, state.adam)
        decay = self._over_weights(lambda w, _: self.config.weight_decay if w.decays else 0.0)
        masters = jax.tree.map(lambda w, d, rate: w - learning_rate * (d + rate * w), state.masters, direction, decay)
        keep = partial(jnp.where, finite)
        masters, adam = jax.tree.map(keep, (masters, adam), (state.masters, state.adam))
        weights = self._each("gather", masters, cast=lambda w: w.astype(self.dtype))
        skipped = state.skipped + jnp.where(finite, 0, 1)
        return TrainState(weights, masters, adam, skipped), UpdateMetrics(norm, learning_rate, finite)

    def _global_norm(self, gradients: Tree) -> jax.Array:
        """Every parameter counted once: squares are summed over the axes that split a weight, and no others."""
        sums: dict[tuple[str, ...], jax.Array] = {}
        for spec, g in zip(jax.tree.leaves(self.master_specs), jax.tree.leaves(gradients), strict=True):
            named = {a for entry in spec if entry for a in ((entry,) if isinstance(entry, str) else entry)}
            axes = tuple(a for a in AXES if a in named)
            sums[axes] = jnp.sum(g * g) + sums.get(axes, 0.0)
        squares = [lax.psum(total, axes) if axes else total for axes, total in sums.items()]
        return jnp.sqrt(jnp.sum(jnp.stack(squares)))


def _after(first: Tree, then: Tree) -> Tree:
    """`then`, made to wait for `first`.

    XLA's CPU runtime orders the collectives of one computation, but not those in a loop against those outside: devices
    would run them in different orders and wait for one another for ever. So the data says what comes first: a zero
    that XLA cannot see through is added to one element."""
    x = jax.tree.leaves(first)[0]
    zero = jnp.minimum(jnp.abs(x[(0,) * x.ndim]), 0)
    return jax.tree.map(lambda t: t.at[(0,) * t.ndim].add(zero.astype(t.dtype)), then)
