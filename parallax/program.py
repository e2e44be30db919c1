"""A run's programs: initialisation, train step and evaluation, built from a resolved run file for a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Wrapped

from parallax import data
from parallax.config import RunConfig
from parallax.kernels import kernel_of
from parallax.layout import axis_sizes, kept_whole
from parallax.model import Model
from parallax.optimizer import ShardedAdamW, TrainState
from parallax.pipeline import BATCH_SPEC, CELLS_SPEC, loss_and_gradients, weight_specs
from parallax.schedule.order import forward_only, make_schedule
from parallax.schedule.table import TickTable, tick_table
from parallax.shape import Weight
from parallax.sharding import Layout, Leaf, Tree
from parallax.stages import Stages


class Batch(NamedTuple):
    """A step's batch on the devices: int32 [M, B, S], along S in the order of `Layout.positions`, rank after rank.
    `starts` is None unless attention is kept inside documents; `cells` is the tick table that goes with them."""

    tokens: Leaf
    targets: Leaf
    starts: Leaf | None
    cells: Leaf


class StepMetrics(NamedTuple):
    loss: Leaf
    grad_norm: Leaf
    learning_rate: Leaf
    finite: Leaf


def layout_of(config: RunConfig, model: Model, kernel: str) -> Layout:
    """What the run file's [parallel] section means for this model, with attention by this kernel."""
    parallel = config.parallel
    whole = kept_whole(parallel, model.shape.layers)
    return Layout(axis_sizes(parallel), whole, parallel.sequence_parallel, parallel.context, kernel)


@dataclass(frozen=True, eq=False)
class Program:
    """Everything of a run that is compiled. All functions here run under jit on `mesh`."""

    config: RunConfig
    model: Model
    mesh: Mesh

    @cached_property
    def kernel(self) -> tuple[str, str | None]:
        """The attention kernel of the mesh's devices, and why it is not their own (see `kernel_of`)."""
        config, platform = self.config, self.mesh.devices.flat[0].platform
        return kernel_of(platform, self.model.shape, config.parallel, config.train, config.data.isolate_documents)

    @cached_property
    def layout(self) -> Layout:
        return layout_of(self.config, self.model, self.kernel[0])

    @cached_property
    def table(self) -> TickTable:
        parallel = self.config.parallel
        return tick_table(
            make_schedule(parallel.schedule, parallel.pp, parallel.virtual_stages, self.config.microbatches)
        )

    @cached_property
    def evaluation_table(self) -> TickTable:
        parallel = self.config.parallel
        return tick_table(forward_only(parallel.pp, parallel.virtual_stages, self.config.microbatches))

    @cached_property
    def optimizer(self) -> ShardedAdamW:
        config = self.config
        dtype = jnp.dtype(config.train.precision)
        return ShardedAdamW(
            self.model, self.layout, self.mesh, config.optimizer, config.train.steps, config.parallel.zero, dtype
        )

    def sharding(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    @cached_property
    def state_shardings(self) -> TrainState:
        return self.optimizer.shardings(self.optimizer.state_specs)

    @cached_property
    def batch_shardings(self) -> Batch:
        data = self.sharding(BATCH_SPEC)
        starts = data if self.config.data.isolate_documents else None
        return Batch(data, data, starts, self.sharding(CELLS_SPEC))

    @cached_property
    def stages(self) -> Stages:
        return Stages(self.model.layers, self.layout.pp, self.config.parallel.virtual_stages)

    def lay_out(self, weight: Weight, x: jax.Array, stacked: bool) -> jax.Array:
        """A canonical array (true shape; `stacked`: [L, …] in model order) as the pipeline holds it: stacked [virtual
        stage, pp, layer of a chunk, …], with zeros where there is no layer, and beyond the vocabulary."""
        padded = self.layout.padded(weight.shape, weight.axes)
        x = jnp.pad(x, [(0, 0)] * stacked + [(0, to - n) for n, to in zip(weight.shape, padded, strict=True)])
        if not stacked:
            return x
        stages = self.stages
        if stages.padding:
            x = jnp.zeros((stages.count * stages.room, *padded), x.dtype).at[stages.places].set(x)
        return x.reshape(stages.virtual_stages, stages.pp, stages.room, *padded)

    def take_out(self, weight: Weight, x: jax.Array, stacked: bool) -> jax.Array:
        """The inverse of `lay_out`."""
        if stacked:
            x = x.reshape(-1, *x.shape[3:])
            x = x[self.stages.places] if self.stages.padding else x
        return x[(slice(None),) * stacked + tuple(map(slice, weight.shape))]

    def over_weights(self, f: Callable[[Weight, jax.Array, bool], Any], tree: Tree) -> Tree:
        """f(weight, array, whether it is stacked) for every weight of a tree {"blocks", "embed", "head"}."""
        return {
            part: jax.tree.map(lambda w, x, part=part: f(w, x, part == "blocks"), weights, tree[part])
            for part, weights in self.model.weights.items()
        }

    def place(self, weights: Tree) -> TrainState:
        """The first state from float32 weights in the canonical tree (blocks stacked [L, …] in model order)."""
        weights = self.over_weights(self.lay_out, weights)
        specs = self.optimizer.shardings(weight_specs(self.model, self.layout))
        return self.optimizer.init(jax.tree.map(jax.lax.with_sharding_constraint, weights, specs))

    @cached_property
    def init(self) -> Callable[[jax.Array], TrainState]:
        """key → the first state, made in place on its devices; the same numbers on any layout."""
        return jax.jit(lambda key: self.place(self.model.init(key)), out_shardings=self.state_shardings)

    def gradients(self, weights: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
        """Mean loss and mean gradients, reduced once over the replicas and sharded as the masters are."""
        run = loss_and_gradients(self.model, self.layout, self.mesh, self.table, self.config.parallel.skip_idle)
        loss, partials = run(weights, *batch)
        return self.optimizer.reduce(loss, partials, self.config.microbatches)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """The train step, not yet jitted: forward, backward, one reduction, AdamW, one gather."""
        loss, gradients = self.gradients(state.weights, batch)
        state, update = self.optimizer.update(state, gradients)
        return state, StepMetrics(loss, *update)

    @cached_property
    def train_step(self) -> Wrapped:
        """(state, batch) → (state, metrics), jitted; the state that is given is used up."""
        shardings = (self.state_shardings, self.batch_shardings)
        replicated = StepMetrics(*(self.sharding(P()),) * len(StepMetrics._fields))
        return jax.jit(
            self.step, in_shardings=shardings, out_shardings=(self.state_shardings, replicated), donate_argnums=0
        )

    @cached_property
    def evaluate(self) -> Callable[[Tree, Batch], jax.Array]:
        """(weights, batch) → mean nats a token."""
        loss = loss_and_gradients(
            self.model, self.layout, self.mesh, self.evaluation_table, self.config.parallel.skip_idle
        )
        return jax.jit(
            lambda weights, batch: jnp.mean(loss(weights, *batch)) / self.config.microbatches,
            in_shardings=(self.state_shardings.weights, self.batch_shardings),
            out_shardings=self.sharding(P()),
        )

    @cached_property
    def order_S(self) -> np.ndarray:
        """The positions of a sequence in the order in which the cp ranks hold them."""
        cp, S = self.layout.cp, self.config.train.seq_len
        return np.concatenate([np.asarray(self.layout.positions(rank, S // cp)) for rank in range(cp)])

    def batch(self, batch: data.Batch, table: TickTable | None = None) -> Batch:
        """Global arrays [global batch, S] on the host → a step's batch on the devices."""
        arrange = lambda x_BS: x_BS[:, self.order_S].reshape(self.config.microbatches, -1, len(self.order_S))
        starts = arrange(batch.starts_BS) if self.config.data.isolate_documents else None
        host = Batch(arrange(batch.tokens_BS), arrange(batch.targets_BS), starts, (table or self.table).cells)
        return jax.device_put(host, self.batch_shardings)
