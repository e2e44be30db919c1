"""A run's programs: initialisation, train step and evaluation, built from a resolved run file for a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Wrapped

from parallax.config import RunConfig
from parallax.model import Model
from parallax.optimizer import ShardedAdamW, TrainState
from parallax.pipeline import BATCH_SPEC, CELLS_SPEC, loss_and_gradients, weight_specs
from parallax.schedule.order import forward_only, make_schedule
from parallax.schedule.table import TickTable, tick_table
from parallax.sharding import AXES, Layout, Leaf, Tree


class Batch(NamedTuple):
    """tokens and targets int32 [M, B, S]; `cells` is the tick table that goes with them."""

    tokens: Leaf
    targets: Leaf
    cells: Leaf


class StepMetrics(NamedTuple):
    loss: Leaf
    grad_norm: Leaf
    learning_rate: Leaf
    finite: Leaf


def layout_of(config: RunConfig, model: Model) -> Layout:
    """What the run file's [parallel] section means for this model."""
    parallel = config.parallel
    sizes = {axis: getattr(parallel, axis) for axis in AXES}
    kv_split = all(layer.kv_heads % parallel.tp == 0 for layer in model.shape.layers)
    return Layout(sizes, parallel.sequence_parallel, frozenset() if kv_split else frozenset({"kv_heads"}))


@dataclass(frozen=True, eq=False)
class Program:
    """Everything of a run that is compiled. All functions here run under jit on `mesh`."""

    config: RunConfig
    model: Model
    mesh: Mesh

    @cached_property
    def layout(self) -> Layout:
        return layout_of(self.config, self.model)

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
        return Batch(data, data, self.sharding(CELLS_SPEC))

    def stack(self, blocks: Tree) -> Tree:
        """[L, …] in model order → [virtual stage, pp, layer of a chunk, …] as the pipeline holds them."""
        v, p = self.config.parallel.virtual_stages, self.layout.pp
        return jax.tree.map(lambda w: w.reshape(v, p, -1, *w.shape[1:]), blocks)

    def unstack(self, blocks: Tree) -> Tree:
        return jax.tree.map(lambda w: w.reshape(-1, *w.shape[3:]), blocks)

    def place(self, weights: Tree) -> TrainState:
        """The first state from float32 weights in the canonical tree (blocks stacked [L, …] in model order)."""
        weights = weights | {"blocks": self.stack(weights["blocks"])}
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

    def batch(self, tokens_BS, targets_BS, table: TickTable | None = None) -> Batch:
        """Global arrays [global batch, S] on the host → a step's batch on the devices."""
        shape = (self.config.microbatches, -1, tokens_BS.shape[-1])
        host = Batch(tokens_BS.reshape(shape), targets_BS.reshape(shape), (table or self.table).cells)
        return jax.device_put(host, self.batch_shardings)
