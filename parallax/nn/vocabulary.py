"""Token embedding and cross-entropy with the vocabulary split over every pipeline and tensor rank.

Each of the pp · tp ranks holds V / (pp · tp) rows of the table and all of them work on every microbatch, so no stage
is heavier than another. The gradients are written by hand: what one rank computes is its own part, and no factor for
the ranks that share a loss appears. Without a layout the same functions are the plain ones.

A table's gradient is as large as the table, so where `added_in_place` is in force it is never an array of its own: what
a look-up or a chunk of the loss contributes goes straight into the running sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax.chunks import loss_chunks
from parallax.nn.weights import normal, weight
from parallax.sharding import Layout, Leaf, Tree, constrain, current, pmax, psum, tensor_map

_AXES = ("pp", "tp")  # which split the vocabulary
_MASKED = -1e30  # the logit of a row that pads the table
_sums: ContextVar[dict[int, jax.Array]] = ContextVar("sums")  # of tables, by their identity


class Embedding(nnx.Module):
    """A table [V, D]. Call it for a look-up; give it to `cross_entropy` for logits (tied or as an output matrix)."""

    def __init__(self, vocab_size: int, width: int, *, rngs: nnx.Rngs, std: float = 0.02):
        self.vocab_size = vocab_size
        self.table = weight(normal(rngs, (vocab_size, width), std), ("vocab", "embed"))

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        """tokens int32 [B, S] → [B, S, D]; on pipeline ranks the same everywhere, in the form between layers."""
        layout = current()
        table_VD = self.table[...]
        return table_VD[tokens_BS] if layout is None else _split_lookup(layout, table_VD, tokens_BS)


@contextmanager
def added_in_place(weights: Tree, sums: Tree) -> Iterator[Callable[[], Tree]]:
    """Inside the block, gradients of the tables among `weights` are added to their float32 `sums`, in place: `jax.vjp`
    gives zeros for them, which XLA leaves out where they are added. Yields a function that gives the sums.

    Tables are known by identity (the same tracer). One that a model makes another array of first, by a cast, say, has
    an ordinary gradient."""
    leaves, structure = jax.tree.flatten(weights)
    held = {id(leaf): total for leaf, total in zip(leaves, jax.tree.leaves(sums), strict=True)}
    token = _sums.set(held)
    try:
        yield lambda: structure.unflatten([held[id(leaf)] for leaf in leaves])
    finally:
        _sums.reset(token)


def _split_lookup(layout: Layout, table_VD, tokens_BS):
    """The gradient that comes in is the same on every pipeline rank."""
    split_sequence = layout.sequence_parallel and layout.tp > 1

    def rows(tokens, n):
        """Index into this rank's n rows, n where another rank holds the row."""
        local = tokens - _rank(layout) * n
        return jnp.where((local >= 0) & (local < n), local, n)

    def find(table, tokens):
        x = table.at[rows(tokens, len(table))].get(mode="fill", fill_value=0)
        x = lax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True) if split_sequence else psum(x, "tp")
        return psum(x, "pp")

    def collect(total, tokens, dx):
        dx = lax.all_gather(dx, "tp", axis=1, tiled=True) if split_sequence else dx
        return total.at[rows(tokens, len(total))].add(dx.astype(jnp.float32), mode="drop")

    @jax.custom_vjp
    def lookup(table, tokens):
        return tensor_map(find, (P("tp"), P()), layout.sequence)(table, tokens)

    def backward(kept, dx):
        table, tokens = kept
        dx = constrain(dx, layout.sequence)
        add = lambda total: tensor_map(collect, (P("tp"), P(), layout.sequence), P("tp"))(total, tokens, dx)
        sums, key = _sums.get({}), id(table)
        if key not in sums:
            return add(jnp.zeros(table.shape, jnp.float32)).astype(table.dtype), None
        sums[key] = add(sums[key])
        return None, None

    lookup.defvjp(lambda table, tokens: (lookup(table, tokens), (table, tokens)), backward)
    return lookup(table_VD, tokens_BS)


def cross_entropy(x_BSD: jax.Array, output: Embedding, targets_BS: jax.Array) -> jax.Array:
    """Mean over tokens of -log softmax(x · output)[target], in nats; the same number on every pipeline rank.

    `x_BSD` comes in the form between layers, and so does its gradient. Logits live for a chunk of tokens at a time,
    and where a gradient is wanted it is worked out beside them: each is computed once."""
    layout, vocab_size = current(), output.vocab_size

    @jax.custom_vjp
    def loss(x_BSD, table_VD, targets_BS):
        return _loss(layout, vocab_size, x_BSD, table_VD, targets_BS).nats

    def forward(x_BSD, table_VD, targets_BS):
        sums, key = _sums.get({}), id(table_VD)
        in_place = key in sums
        before_VD = sums[key] if in_place else jnp.zeros(table_VD.shape, jnp.float32)
        nats, dx_BSD, after_VD = _loss(layout, vocab_size, x_BSD, table_VD, targets_BS, before_VD)
        if in_place:
            sums[key] = after_VD
        dtable_VD = None if in_place else after_VD.astype(table_VD.dtype)
        return nats, (x_BSD, table_VD, targets_BS, dx_BSD, dtable_VD)

    def backward(kept, dloss):
        x_BSD, table_VD, targets_BS, dx_BSD, dtable_VD = kept
        dx_BSD = dx_BSD * dloss.astype(dx_BSD.dtype)
        if dtable_VD is not None:
            return dx_BSD, dtable_VD * dloss.astype(dtable_VD.dtype), None
        # The sum has the gradient of a loss that nothing multiplies, as XLA finds out where that is so; else the rest
        # is added.
        rest = lambda _, total_VD: _loss(layout, vocab_size, x_BSD, table_VD, targets_BS, total_VD, dloss - 1).total_VD
        sums, key = _sums.get({}), id(table_VD)
        sums[key] = lax.fori_loop(0, jnp.where(dloss == 1, 0, 1), rest, sums[key])
        return dx_BSD, None, None

    loss.defvjp(forward, backward)
    return loss(x_BSD, output.table[...], targets_BS)


class _Loss(NamedTuple):
    """Mean nats a token; and, where a sum of the table's gradients was given, x's gradient and the new sum."""

    nats: Leaf
    dx_BSD: Leaf
    total_VD: Leaf


def _loss(layout: Layout | None, vocab_size: int, x_BSD, table_VD, targets_BS, total_VD=None, scale=1.0) -> _Loss:
    """`scale` multiplies the gradients.

    Over tp, x is gathered and its gradient scattered once for all chunks: these are no larger than what a layer's
    backward holds several of, and a collective for each chunk would be waited for. Each chunk has a maximum and a sum
    over the ranks, of a number and of two a token."""
    if layout is None:
        return _loss_of_rank(vocab_size, 1, 0, x_BSD, table_VD, targets_BS, total_VD, scale)
    split_sequence = layout.sequence_parallel and layout.tp > 1

    def local(x_BSD, table_VD, targets_BS, total_VD, scale):
        x_BSD = lax.all_gather(x_BSD, "tp", axis=1, tiled=True) if split_sequence else x_BSD
        ranks, rank = layout.pp * layout.tp, _rank(layout)
        nats, dx_BSD, total_VD = _loss_of_rank(vocab_size, ranks, rank, x_BSD, table_VD, targets_BS, total_VD, scale)
        if dx_BSD is not None and split_sequence:
            dx_BSD = psum(lax.psum_scatter(dx_BSD, "tp", scatter_dimension=1, tiled=True), "pp")
        elif dx_BSD is not None:
            dx_BSD = psum(dx_BSD, _AXES)
        return _Loss(nats, dx_BSD, total_VD)

    table = P("tp")
    in_specs = (layout.sequence, table, P(), table, P())
    out_specs = _Loss(P(), layout.sequence, table)
    return tensor_map(local, in_specs, out_specs)(x_BSD, table_VD, targets_BS, total_VD, jnp.float32(scale))


def _rank(layout: Layout):
    """Which part of the vocabulary is here, inside a map over tp."""
    return lax.axis_index("pp") * layout.tp + lax.axis_index("tp")


def _loss_of_rank(vocab_size, ranks, rank, x_BSD, table_VD, targets_BS, total_VD, scale) -> _Loss:
    """With this rank's part of the table and the whole sequence. T: the tokens of a chunk."""
    tokens, (V, D) = targets_BS.size, table_VD.shape
    chunks, offset = loss_chunks(tokens, D, V), rank * V

    def chunk(total_VD, chunk):
        x_TD, targets_T = chunk
        logits_TV = jnp.einsum("td,vd->tv", x_TD, table_VD, preferred_element_type=jnp.float32)
        ids_TV = lax.broadcasted_iota(jnp.int32, logits_TV.shape, 1)
        if ranks * V > vocab_size:  # rows that pad the table to a size that divides
            logits_TV = jnp.where(ids_TV < vocab_size - offset, logits_TV, _MASKED)
        hit_TV = ids_TV == (targets_T - offset)[:, None]
        top_T = pmax(logits_TV.max(-1), _AXES)
        exp_TV = jnp.exp(logits_TV - top_T[:, None])
        sum_T, target_T = psum(jnp.stack([exp_TV.sum(-1), jnp.where(hit_TV, logits_TV, 0).sum(-1)]), _AXES)
        nats = (jnp.log(sum_T) + top_T - target_T).sum() / tokens
        if total_VD is None:
            return None, (nats, None)
        dlogits_TV = ((exp_TV / sum_T[:, None] - hit_TV) * (scale / tokens)).astype(x_TD.dtype)
        dx_TD = jnp.einsum("tv,vd->td", dlogits_TV, table_VD)
        dtable_VD = jnp.einsum("tv,td->vd", dlogits_TV, x_TD, preferred_element_type=jnp.float32)
        return total_VD + dtable_VD, (nats, dx_TD)

    cut = x_BSD.reshape(chunks, -1, D), targets_BS.reshape(chunks, -1)
    total_VD, (nats, dx) = lax.scan(chunk, total_VD, cut)
    return _Loss(nats.sum(), None if dx is None else dx.reshape(x_BSD.shape), total_VD)
