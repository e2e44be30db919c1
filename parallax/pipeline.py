"""The pipeline: one program that scans a tick table on every rank, with the backward written by hand.

The program below runs in a shard_map that is manual over pp, dp, ep and cp and leaves tp to XLA. Control flow is the
same on every rank, since a collective inside a branch that some ranks skip would hang: an idle rank computes on what it
finds, and the table has marked the result as not valid. A tick is

    receive a gradient · forward phase · send the activation · loss phase · backward phase

Layers are differentiated one at a time. The forward runs `jax.vjp` of a layer and puts the residuals that are not
weights into a stash slot; the backward rebuilds the vjp from slot and weights, and adds weight gradients in place.
So a microbatch in flight costs its residuals (`train.remat` decides which) and never a copy of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from parallax.layout import BATCH, MANUAL, REPLICAS
from parallax.model import Model
from parallax.nn.attention import Positions
from parallax.nn.vocabulary import added_in_place
from parallax.schedule.table import Row, Run, TickTable
from parallax.sharding import Layout, Tree, between_layers, constrain, only, psum, ring_shift
from parallax.stages import Stages

BATCH_SPEC = P(None, BATCH, "cp")  # tokens, targets and starts [M, B, S]
CELLS_SPEC = P(None, "pp")  # TickTable.cells


class State(NamedTuple):
    """What a rank carries from tick to tick. Inboxes are [slot, B, S, D], the stash [slot, layer of a chunk, …]."""

    activation: jax.Array  # sent at the end of a tick's forward phase: what has arrived, on its way to the inbox
    gradient: jax.Array  # what the backward phase leaves, to be sent when the next tick begins
    activations: jax.Array  # inboxes
    gradients: jax.Array
    loss_gradients: jax.Array
    stash: list[jax.Array]
    block_gradients: Tree  # float32 sums over microbatches
    outer_gradients: Tree
    loss: jax.Array


def weight_specs(model: Model, layout: Layout) -> Tree:
    """PartitionSpecs of the weights. Those of the blocks are stacked [virtual stage, pp, layer of a chunk, …], which
    read in order is model order, since stage k is chunk k // pp of rank k % pp."""
    spec = {part: jax.tree.map(lambda w: layout.spec(w.axes), model.weights[part]) for part in model.weights}
    return spec | {"blocks": jax.tree.map(lambda s: P(None, "pp", None, *s), spec["blocks"])}


def partial_specs(model: Model, layout: Layout) -> Tree:
    """PartitionSpecs of what `loss_and_gradients` returns: a leading dimension holds each replica's partial sum."""
    return jax.tree.map(lambda s: P(REPLICAS, *s), weight_specs(model, layout))


def loss_and_gradients(model: Model, layout: Layout, mesh: Mesh, table: TickTable, skip_idle: bool = False) -> Callable:
    """→ f(weights, tokens_MBS, targets_MBS, starts_MBS, cells) = (loss, gradients).

    `starts_MBS` is None, or where the document of each token begins (`nn.Positions`). Under context parallelism the
    sequences come in the order of `Layout.positions`, rank after rank. Loss and gradients are float32 sums over a
    replica's microbatches, of mean nats a token and of its gradients, not yet reduced over dp, ep and cp: the loss and
    each leaf have a leading dimension of that many ranks. A table without backwards gives the loss alone (for
    evaluation). `skip_idle` branches around idle layers, where they hold no collective."""

    def rank(weights, tokens_MBS, targets_MBS, starts_MBS, cells):
        with layout.active():
            return _Rank(model, layout, table, skip_idle, weights, tokens_MBS, targets_MBS, starts_MBS).run(cells[:, 0])

    weights = jax.tree.map(lambda s: only(s, MANUAL), weight_specs(model, layout))
    partials = jax.tree.map(lambda s: only(s, MANUAL), partial_specs(model, layout))
    return jax.shard_map(
        rank,
        mesh=mesh,
        in_specs=(weights, BATCH_SPEC, BATCH_SPEC, BATCH_SPEC, CELLS_SPEC),
        out_specs=(P(REPLICAS), partials) if table.schedule.has_backward else P(REPLICAS),
        axis_names=set(MANUAL),
        check_vma=False,
    )


class _Rank:
    """One rank's program."""

    def __init__(self, model, layout, table, skip_idle, weights, tokens_MBS, targets_MBS, starts_MBS):
        self.model: Model = model
        self.layout: Layout = layout
        self.table: TickTable = table
        self.skip_idle: bool = skip_idle
        self.trains = table.schedule.has_backward
        self.stages = Stages(model.layers, table.schedule.pp, table.schedule.virtual_stages)
        self.layers = self.stages.room  # of a chunk
        self.blocks = jax.tree.map(lambda w: w.reshape(-1, *w.shape[3:]), weights["blocks"])  # [chunk · layer, …]
        self.outer = {"embed": weights["embed"], "head": weights["head"]}
        self.tokens_MBS, self.targets_MBS, self.starts_MBS = tokens_MBS, targets_MBS, starts_MBS
        _, B, S = tokens_MBS.shape
        self.positions_S = layout.positions(lax.axis_index("cp"), S)
        self.context = model.context(Positions(self.positions_S))
        self.zero_BSD = between_layers(jnp.zeros((B, S, model.shape.width), jax.tree.leaves(weights)[0].dtype))

    def run(self, cells):
        state = self._begin()
        for run in self.table.runs:
            tick = lambda state, cell, run=run: (self._tick(run, state, Row(*cell)), None)
            with jax.named_scope(f"ticks{run.start}"):  # the names are for parallax.aot, which reads them in the text
                state, _ = lax.scan(tick, state, cells[run.start : run.stop])
        return self._end(state)

    def _begin(self) -> State:
        buffers = self.table.buffers
        stash, blocks, outer = [], {}, {}
        if self.trains:
            _, kept = jax.eval_shape(self._layer_forward, self._layer_weights(0), self.zero_BSD, self._context_of(0))
            # Zeros of their own scalars: equal buffers would be made as one, and tp would split them alike.
            zeros = lax.optimization_barrier([jnp.zeros((), r.dtype) for r in kept])
            stash = [
                jnp.broadcast_to(zero, (buffers.stash, self.layers, *r.shape))
                for zero, r in zip(zeros, kept, strict=True)
            ]
            blocks = self._zero_gradients("blocks", self.blocks, stacked=(None,))
            outer = {part: self._zero_gradients(part, weights) for part, weights in self.outer.items()}
        inbox = lambda slots: jnp.broadcast_to(self.zero_BSD, (slots, *self.zero_BSD.shape))
        return State(
            activation=self.zero_BSD,
            gradient=self.zero_BSD,
            activations=inbox(buffers.activations),
            gradients=inbox(buffers.gradients),
            loss_gradients=inbox(buffers.losses),
            stash=stash,
            block_gradients=blocks,
            outer_gradients=outer,
            loss=jnp.float32(0),
        )

    def _zero_gradients(self, part: str, weights: Tree, stacked: tuple[None, ...] = ()) -> Tree:
        def zeros(described, weight):
            spec = P(*stacked, *only(self.layout.spec(described.axes), ("tp",)))
            return constrain(jnp.zeros(weight.shape, jnp.float32), spec)

        return jax.tree.map(zeros, self.model.weights[part], weights)

    def _end(self, state: State):
        loss = state.loss[None]
        if not self.trains:
            return loss
        chunks = lambda g: g.reshape(-1, 1, self.layers, *g.shape[1:])
        gradients = {"blocks": jax.tree.map(chunks, state.block_gradients), **state.outer_gradients}
        return loss, jax.tree.map(lambda g: g[None], gradients)

    # one tick

    def _tick(self, run: Run, state: State, row: Row[jax.Array]) -> State:
        if run.backward:
            state = self._receive_gradient(state, row)
        if run.forward:
            state, y_BSD = self._forward_phase(state, row)
            if run.loss:
                state = self._loss_phase(state, y_BSD, row)
        if run.backward:
            state = self._backward_phase(state, row)
        return state

    def _receive_gradient(self, state: State, row: Row[jax.Array]) -> State:
        """Sent here, at the start of the tick after the one that made it, so that the forward can hide it."""
        return state._replace(gradients=_put(state.gradients, ring_shift(state.gradient, "pp", -1), row.b_put))

    def _forward_phase(self, state: State, row: Row[jax.Array]) -> tuple[State, jax.Array]:
        activations = _put(state.activations, state.activation, row.f_put)
        tokens_BS = _at(self.tokens_MBS, row.embed_microbatch)
        embed = lambda _: between_layers(self.model.embed(self.outer["embed"], tokens_BS, self.positions_S))
        with jax.named_scope("embed"):
            embedded_BSD = _when(row.embed_valid, embed, self.zero_BSD)
        x_BSD = jnp.where(row.f_first, embedded_BSD, _at(activations, row.f_get))
        context = self._context_of(row.f_microbatch)
        forward = lambda carry: self._forward(carry, row.f_chunk, row.f_slot, context)
        with jax.named_scope("forward"):
            y_BSD, stash = self._unless_idle(row.f_valid, forward, (x_BSD, state.stash))
        state = state._replace(activation=ring_shift(y_BSD, "pp", +1), activations=activations, stash=stash)
        return state, y_BSD

    def _loss_phase(self, state: State, y_BSD: jax.Array, row: Row[jax.Array]) -> State:
        """Every rank works out its part of the vocabulary for the microbatch that leaves the last stage."""

        def add_loss(carry):
            loss, gradients, loss_gradients = carry
            x_BSD = self._from_rank(self.layout.pp - 1, y_BSD)
            nats = lambda outer, x_BSD: self.model.loss(outer, x_BSD, _at(self.targets_MBS, row.loss_microbatch))
            if not self.trains:
                return loss + nats(self.outer, x_BSD), gradients, loss_gradients
            with added_in_place(self.outer, gradients) as sums:
                value, vjp = jax.vjp(nats, self.outer, x_BSD)
                d_outer, dx_BSD = vjp(jnp.ones_like(value))
            loss_gradients = _put(loss_gradients, between_layers(dx_BSD), row.loss_put)
            return loss + value, _add(sums(), d_outer), loss_gradients

        with jax.named_scope("loss"):
            loss, gradients, loss_gradients = _when(
                row.loss_valid, add_loss, (state.loss, state.outer_gradients, state.loss_gradients)
            )
        return state._replace(loss=loss, outer_gradients=gradients, loss_gradients=loss_gradients)

    def _backward_phase(self, state: State, row: Row[jax.Array]) -> State:
        """An idle rank runs on a zero gradient, which adds nothing: dy is masked, not dw."""
        dy_BSD = jnp.where(row.b_last, _at(state.loss_gradients, row.b_loss_get), _at(state.gradients, row.b_get))
        dy_BSD = between_layers(jnp.where(row.b_valid, dy_BSD, 0))
        context = self._context_of(row.b_microbatch)
        backward = lambda carry: self._backward(carry, state.stash, row.b_chunk, row.b_slot, context)
        with jax.named_scope("backward"):
            dx_BSD, gradients = self._unless_idle(row.b_valid, backward, (dy_BSD, state.block_gradients))

        def add_embedding(outer):
            tokens_BS = _at(self.tokens_MBS, row.embed_grad_microbatch)
            embed = lambda weights: self.model.embed(weights, tokens_BS, self.positions_S)
            with added_in_place(self.outer["embed"], outer["embed"]) as sums:
                (d_embed,) = jax.vjp(embed, self.outer["embed"])[1](self._from_rank(0, dx_BSD))
            return outer | {"embed": _add(sums(), d_embed)}

        with jax.named_scope("embed_gradient"):
            outer = _when(row.embed_grad_valid, add_embedding, state.outer_gradients)
        return state._replace(gradient=dx_BSD, block_gradients=gradients, outer_gradients=outer)

    # one chunk of layers

    def _forward(self, carry, chunk, slot, context):
        """(x, stash) → (y, stash with the layers' residuals in the slot)"""

        def layer(carry, index):
            x_BSD, stash = carry
            weights = self._layer_weights(chunk * self.layers + index)
            y_BSD, kept = self._layer_forward(weights, x_BSD, context)
            y_BSD = self._unless_padding(chunk, index, y_BSD, x_BSD)
            stash = [_put(s, r, slot, index) for s, r in zip(stash, kept, strict=True)]
            return (y_BSD, stash), None

        return lax.scan(layer, carry, jnp.arange(self.layers))[0]

    def _backward(self, carry, stash, chunk, slot, context):
        """(dy, gradients) → (dx, gradients with those of the chunk's layers added)"""

        def layer(carry, index):
            dy_BSD, gradients = carry
            position = chunk * self.layers + index
            kept = [_at(s, slot, index) for s in stash]
            masked_BSD = self._unless_padding(chunk, index, dy_BSD, 0)
            d_weights, dx_BSD = self._layer_backward(self._layer_weights(position), kept, masked_BSD, context)
            dx_BSD = self._unless_padding(chunk, index, dx_BSD, dy_BSD)

            def add(total, d):  # the barrier keeps XLA from reading the layer's sum long before it adds to it
                at, d = lax.optimization_barrier((position, d))
                return total.at[at].add(d.astype(total.dtype))

            return (dx_BSD, jax.tree.map(add, gradients, d_weights)), None

        return lax.scan(layer, carry, jnp.arange(self.layers), reverse=True)[0]

    def _unless_padding(self, chunk, index, result, otherwise):
        """A layer's result, or what takes its place where this is a place without a layer (see parallax.stages). Such a
        place has weights of zeros, on which a block must stay finite."""
        if not self.stages.padding:
            return result
        stage = chunk * self.layout.pp + lax.axis_index("pp")
        return jnp.where((index < self.layers - 1) | (stage < self.stages.full), result, otherwise)

    # one layer

    def _context_of(self, microbatch):
        """What the layers share, with the microbatch's documents where attention is kept inside them."""
        if self.starts_MBS is None:
            return self.context
        return self.model.context(Positions(self.positions_S, _at(self.starts_MBS, microbatch)))

    def _layer_weights(self, position) -> Tree:
        return jax.tree.map(lambda w: _at(w, position), self.blocks)

    def _layer_vjp(self, weights, x_BSD, context):
        """→ y, the residuals to keep, and a function from such residuals to the layer's vjp.

        A residual that *is* a weight or a part of the context (the same tracer), or a constant, is not kept: it is
        there anyway."""
        y_BSD, vjp = jax.vjp(lambda w, x_BSD: self.model.block(w, x_BSD, context), weights, x_BSD)
        leaves, structure = jax.tree.flatten(vjp)
        at_hand = jax.tree.leaves((weights, context))
        kept: list[jax.Array] = []
        source = []  # of each leaf: an array at hand, or an index into `kept`
        for leaf in leaves:
            if isinstance(leaf, Tracer) and not any(leaf is a for a in (*at_hand, *kept)):
                kept.append(leaf)
            source.append(next((i for i, a in enumerate(kept) if a is leaf), leaf))
        matrices = {w.shape for w in jax.tree.leaves(weights) if w.ndim > 1}
        assert not any(residual.shape in matrices for residual in kept), "a residual has a weight's shape: a copy?"
        rebuild = lambda kept: structure.unflatten([kept[s] if isinstance(s, int) else s for s in source])
        return between_layers(y_BSD), kept, rebuild

    def _layer_forward(self, weights, x_BSD, context):
        y_BSD, kept, _ = self._layer_vjp(weights, x_BSD, context)
        return y_BSD, kept if self.trains else []

    def _layer_backward(self, weights, kept, dy_BSD, context):
        """The structure comes from a forward on zeros, of which nothing is used and XLA keeps nothing."""
        _, _, rebuild = self._layer_vjp(weights, self.zero_BSD, context)
        d_weights, dx_BSD = rebuild(kept)(dy_BSD)
        return d_weights, between_layers(dx_BSD)

    # between ranks

    def _from_rank(self, rank: int, x):
        """One pipeline rank's array on all of them."""
        return psum(jnp.where(lax.axis_index("pp") == rank, x, 0), "pp")

    def _unless_idle(self, valid, run, carry):
        return _when(valid, run, carry) if self.skip_idle else run(carry)


def _when(flag, update: Callable, carry):
    """`update(carry)` where flag is 1, `carry` where it is 0: a loop of one turn or none, since XLA updates a loop's
    carry in place and copies a branch's. The flag must be the same on all members of every collective inside."""
    return lax.fori_loop(0, flag, lambda _, carry: update(carry), carry)


def _at(array, *index):
    """array[index] for a traced index of one or two leading dimensions"""
    start = (*index, *(0,) * (array.ndim - len(index)))
    return lax.dynamic_slice(array, start, (1,) * len(index) + array.shape[len(index) :]).reshape(
        array.shape[len(index) :]
    )


def _put(array, value, *index):
    """array with array[index] = value, in place in a scan"""
    start = (*index, *(0,) * value.ndim)
    return lax.dynamic_update_slice(array, value.reshape((1,) * len(index) + value.shape), start)


def _add(totals: Tree, terms: Tree) -> Tree:
    return jax.tree.map(lambda total, term: total + term.astype(total.dtype), totals, terms)
