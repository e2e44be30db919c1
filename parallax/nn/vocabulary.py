"""Token embedding and cross-entropy with the vocabulary split over every pipeline and tensor rank.

Each of the pp · tp ranks holds V / (pp · tp) rows of the table and all of them work on every microbatch, so no stage
is heavier than another. The gradients are written by hand: what one rank computes is its own part, and no factor for
the ranks that share a loss appears. Without a layout the same functions are the plain ones.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax.nn.weights import normal, weight
from parallax.sharding import Layout, constrain, current, gather_sequence, pmax, psum, split_last, tensor_map

_MASKED = -1e30  # the logit of a row that pads the table


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


def _split_lookup(layout: Layout, table_VD, tokens_BS):
    """The gradient that comes in is the same on every pipeline rank."""
    split_sequence = layout.sequence_parallel and layout.tp > 1

    def rows(tokens, n):
        """Index into this rank's n rows, n where another rank holds the row."""
        local = tokens - (lax.axis_index("pp") * layout.tp + lax.axis_index("tp")) * n
        return jnp.where((local >= 0) & (local < n), local, n)

    def find(table, tokens):
        x = table.at[rows(tokens, len(table))].get(mode="fill", fill_value=0)
        x = lax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True) if split_sequence else psum(x, "tp")
        return psum(x, "pp")

    def collect(table, tokens, dx):
        dx = lax.all_gather(dx, "tp", axis=1, tiled=True) if split_sequence else dx
        zeros = jnp.zeros(table.shape, jnp.float32)
        return zeros.at[rows(tokens, len(table))].add(dx.astype(jnp.float32), mode="drop").astype(table.dtype)

    @jax.custom_vjp
    def lookup(table, tokens):
        return tensor_map(find, (P("tp"), P()), layout.sequence)(table, tokens)

    def backward(kept, dx):
        table, tokens = kept
        dx = constrain(dx, layout.sequence)
        return tensor_map(collect, (P("tp"), P(), layout.sequence), P("tp"))(table, tokens, dx), None

    lookup.defvjp(lambda table, tokens: (lookup(table, tokens), (table, tokens)), backward)
    return lookup(table_VD, tokens_BS)


def logits(x_BSD: jax.Array, table_VD: jax.Array) -> jax.Array:
    """float32 [B, S, V]; on a rank of a layout, its part of V."""
    logits_BSV = jnp.einsum("bsd,vd->bsv", gather_sequence(x_BSD), table_VD, preferred_element_type=jnp.float32)
    return split_last(logits_BSV, "vocab")


def cross_entropy(x_BSD: jax.Array, output: Embedding, targets_BS: jax.Array) -> jax.Array:
    """Mean over tokens of -log softmax(x · output)[target], in nats; the same number on every pipeline rank.

    `x_BSD` comes in the form between layers, and so does its gradient."""
    layout, vocab_size = current(), output.vocab_size

    @jax.custom_vjp
    def loss(x_BSD, table_VD, targets_BS):
        return _softmax(vocab_size, x_BSD, table_VD, targets_BS)[0]

    def forward(x_BSD, table_VD, targets_BS):
        loss, exp_BSV, sum_BS, hit_BSV = _softmax(vocab_size, x_BSD, table_VD, targets_BS)
        dlogits_BSV = (exp_BSV / sum_BS[..., None] - hit_BSV) / targets_BS.size
        return loss, (x_BSD, table_VD, dlogits_BSV.astype(x_BSD.dtype))

    def backward(kept, dloss):
        x_BSD, table_VD, dlogits_BSV = kept
        dlogits_BSV = dlogits_BSV * dloss.astype(dlogits_BSV.dtype)
        dtable_VD = jnp.einsum("bsd,bsv->vd", gather_sequence(x_BSD), dlogits_BSV)
        dx_BSD = jnp.einsum("bsv,vd->bsd", dlogits_BSV, table_VD)
        if layout is not None:
            dx_BSD = psum(constrain(dx_BSD, layout.sequence), "pp")
        return dx_BSD, dtable_VD, None

    loss.defvjp(forward, backward)
    return loss(x_BSD, output.table[...], targets_BS)


def _softmax(vocab_size, x_BSD, table_VD, targets_BS):
    """Loss, exponentials, their sum over the whole vocabulary, and where in this rank's part the target is."""
    logits_BSV = logits(x_BSD, table_VD)
    layout, ids_BSV = current(), lax.broadcasted_iota(jnp.int32, logits_BSV.shape, 2)
    ranks, rank = (1, 0) if layout is None else (layout.pp, lax.axis_index("pp"))
    offset = rank * logits_BSV.shape[-1]
    if ranks * logits_BSV.shape[-1] > vocab_size:  # rows that pad the table to a size that divides
        logits_BSV = jnp.where(ids_BSV < vocab_size - offset, logits_BSV, _MASKED)
    hit_BSV = ids_BSV == (targets_BS - offset)[..., None]
    top_BS = pmax(logits_BSV.max(-1), "pp")
    exp_BSV = jnp.exp(logits_BSV - top_BS[..., None])
    sum_BS = psum(exp_BSV.sum(-1), "pp")
    target_BS = psum(jnp.where(hit_BSV, logits_BSV, 0).sum(-1), "pp")
    return jnp.mean(jnp.log(sum_BS) + top_BS - target_BS), exp_BSV, sum_BS, hit_BSV
