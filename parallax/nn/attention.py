"""Causal attention with grouped queries and a split sequence: by the kernel of the platform (`parallax.nn.kernels`), or
by a blockwise core that runs anywhere and is the reference.

In that core the softmax runs over blocks of keys with running sums, and the backward is written by hand from the saved
output and log-sum-exp (Dao et al. 2022, arXiv 2205.14135, algorithms 1 and 4): memory is linear in the sequence, and
`train.remat = none` keeps two small arrays and not the scores.

Under context parallelism a rank holds two chunks of the sequence, one from either end (`Layout.positions`), so that all
have the same work. `ring` passes keys and values round (Liu et al. 2023, arXiv 2310.01889): what comes from an earlier
rank shows its first chunk to both of ours, what comes from a later one shows both of its chunks to our second.
`all_gather` collects them all at once. The core works on q [N, B, K, G, S, C] and k, v [N, B, K, T, C] of N chunks:
query head h = (k, g) reads key/value head k, with H = K · G.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax.kernels import CUDNN, SPLASH
from parallax.nn.kernels import cudnn, splash
from parallax.nn.weights import ATTENTION, keep
from parallax.sharding import Layout, current, ring_shift, tensor_map

BLOCK = 512  # keys and values a step
_MASKED = -1e30  # not -inf: a fully masked block must not give NaN

_einsum = partial(jnp.einsum, preferred_element_type=jnp.float32)


class Positions(NamedTuple):
    """Where the tokens at hand stand in their sequence, int32 [S], and where the document of each begins, int32 [B, S]
    (None: attention crosses documents). A query sees the keys from there up to itself."""

    positions_S: jax.Array
    starts_BS: jax.Array | None = None


def attention(q_BSHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, positions: Positions) -> jax.Array:
    """softmax(q kᵀ / √C, causal) v → [B, S, H, C], of the head size of v where that is another.

    Inside the pipeline this runs in a map over tp by hand, so that a kernel sees its own heads only. Where tp exceeds
    the number of key/value heads these are whole on every rank, and a rank picks the one that its queries read."""
    layout = current()
    if layout is None:
        return _blockwise(None, q_BSHC, k_BSKC, v_BSKC, positions)
    kv_whole = "kv_heads" in layout.replicated
    kv_heads = k_BSKC.shape[2]

    def local(q, k, v, positions):
        if kv_whole:
            mine = lax.axis_index("tp") * kv_heads // layout.tp
            k, v = (lax.dynamic_slice_in_dim(a, mine, 1, axis=2) for a in (k, v))
        if layout.kernel == SPLASH:
            return splash(layout, q, k, v, positions.starts_BS)
        if layout.kernel == CUDNN:
            return cudnn(layout, q, k, v)
        return _blockwise(layout if layout.cp > 1 else None, q, k, v, positions)

    heads = P(None, None, "tp", None)
    kv = P() if kv_whole else heads
    return tensor_map(local, (heads, kv, kv, P()), heads)(q_BSHC, k_BSKC, v_BSKC, positions)


def _blockwise(layout: Layout | None, q_BSHC, k_BSKC, v_BSKC, positions: Positions):
    """`layout` is None where this rank holds the whole sequence."""
    B, S, H, C = q_BSHC.shape
    K, N = k_BSKC.shape[2], 1 if layout is None else 2
    q = q_BSHC.reshape(B, N, S // N, K, H // K, C).transpose(1, 0, 3, 4, 2, 5)
    k, v = (a.reshape(B, N, S // N, K, -1).transpose(1, 0, 3, 2, 4) for a in (k_BSKC, v_BSKC))
    starts = positions.starts_BS
    chunks = Positions(
        positions.positions_S.reshape(N, -1),
        None if starts is None else starts.reshape(B, N, -1).swapaxes(0, 1),
    )
    return _core(layout, q, k, v, chunks).transpose(1, 0, 4, 2, 3, 5).reshape(B, S, H, -1)


def _core(layout: Layout | None, q, k, v, positions: Positions):
    @jax.custom_vjp
    def core(q, k, v, positions):
        return _forward(layout, q, k, v, positions)[0]

    def forward(q, k, v, positions):
        out, lse = _forward(layout, q, k, v, positions)
        out, lse = keep(out, ATTENTION), keep(lse, ATTENTION)
        return out, (q, k, v, positions, out, lse)

    def backward(kept, dout):
        q, k, v, positions, out, lse = kept
        return *_backward(layout, q, k, v, positions, out, lse, dout), None

    core.defvjp(forward, backward)
    return core(q, k, v, positions)


# Which keys meet which queries


class _Visit(NamedTuple):
    """Keys and values at hand, [N, B, K, T, C], their positions [N, T], and the pairs (chunk of queries, chunk of keys)
    that see one another. A chunk index may be traced."""

    k: jax.Array
    v: jax.Array
    positions: jax.Array
    pairs: tuple[tuple[int | jax.Array, int | jax.Array], ...]


def _visits(layout: Layout | None, k, v, positions_NS) -> Iterator[_Visit]:
    """Everything that this rank's queries see, this rank's own keys first."""
    if layout is None:
        yield _Visit(k, v, positions_NS, ((0, 0),))
    elif layout.context == "all_gather":
        everywhere = jnp.concatenate([layout.positions(rank, positions_NS.size) for rank in range(layout.cp)])
        yield _Visit(_gather(k), _gather(v), everywhere[None], ((0, 0), (1, 0)))
    else:
        rank, kv = lax.axis_index("cp"), (k, v)
        for step in range(layout.cp):
            # sent before it is used here, so that the sending hides behind the products
            ahead = ring_shift(kv, "cp", 1) if step < layout.cp - 1 else kv
            source = (rank - step) % layout.cp
            positions = layout.positions(source, positions_NS.size).reshape(positions_NS.shape)
            same = jnp.where(source < rank, 0, 1)
            yield _Visit(kv[0], kv[1], positions, ((1, 0), (same, same)) if step else ((0, 0), (1, 0), (1, 1)))
            kv = ahead


def _gather(a):
    """Chunks [N, B, K, T, C] of all cp ranks, joined: [1, B, K, cp · N · T, C]"""
    whole = lax.all_gather(a, "cp", axis=0, tiled=True)
    return jnp.moveaxis(whole, 0, 2).reshape(1, *a.shape[1:3], -1, a.shape[-1])


def _scatter(d, like):
    """The transpose of `_gather`."""
    d = d.reshape(*like.shape[1:3], -1, *like.shape[3:])
    return lax.psum_scatter(jnp.moveaxis(d, 2, 0), "cp", scatter_dimension=0, tiled=True)


# One chunk of queries, [B, K, G, S, C], and one of keys and values, [B, K, T, C], a block of these at a time


class _Sums(NamedTuple):
    """A softmax under way, float32: total and out relative to exp(top). [B, K, G, S], and `out` [B, K, G, S, C]"""

    total: jax.Array
    top: jax.Array
    out: jax.Array


def _blocks(k, v, k_positions):
    """Keys, values and their positions in blocks of at most BLOCK, the block index in front. The last block is filled
    up with keys that no query sees."""
    T = k.shape[2]
    count = -(-T // BLOCK)
    size = -(-T // count)
    fill = count * size - T
    k, v = (jnp.pad(a, [(0, 0), (0, 0), (0, fill), (0, 0)]) for a in (k, v))
    k_positions = jnp.pad(k_positions, (0, fill), constant_values=jnp.iinfo(jnp.int32).max)
    k, v = (jnp.moveaxis(a.reshape(*a.shape[:2], count, size, a.shape[-1]), 2, 0) for a in (k, v))
    return k, v, k_positions.reshape(count, size)


def _scores(q, k, positions: Positions, k_positions):
    """float32 [B, K, G, S, T], masked"""
    s = _einsum("bkgsc,bktc->bkgst", q, k) / math.sqrt(q.shape[-1])
    seen = positions.positions_S[:, None] >= k_positions
    if positions.starts_BS is not None:
        seen = seen & (positions.starts_BS[:, None, None, :, None] <= k_positions)
    return jnp.where(seen, s, _MASKED)


def _add_keys(sums: _Sums, q, k, v, positions: Positions, k_positions) -> _Sums:
    def block(sums, kvp):
        k, v, k_positions = kvp
        s = _scores(q, k, positions, k_positions)
        top = jnp.maximum(sums.top, s.max(-1))
        p, shrink = jnp.exp(s - top[..., None]), jnp.exp(sums.top - top)
        out = sums.out * shrink[..., None] + _einsum("bkgst,bktc->bkgsc", p.astype(v.dtype), v)
        return _Sums(sums.total * shrink + p.sum(-1), top, out), None

    return lax.scan(block, sums, _blocks(k, v, k_positions))[0]


def _gradients(q, k, v, positions: Positions, k_positions, lse, delta, dout):
    """→ dq, dk, dv, float32; probabilities are computed again from the scores and their log-sum-exp."""
    scale = 1 / math.sqrt(q.shape[-1])

    def block(dq, kvp):
        k, v, k_positions = kvp
        p = jnp.exp(_scores(q, k, positions, k_positions) - lse[..., None])
        dv = _einsum("bkgst,bkgsc->bktc", p.astype(dout.dtype), dout)
        dp = _einsum("bkgsc,bktc->bkgst", dout, v)
        ds = (p * (dp - delta[..., None]) * scale).astype(q.dtype)
        dk = _einsum("bkgst,bkgsc->bktc", ds, q)
        return dq + _einsum("bkgst,bktc->bkgsc", ds, k), (dk, dv)

    start = jnp.zeros(q.shape, jnp.float32)
    dq, (dk, dv) = lax.scan(block, start, _blocks(k, v, k_positions))
    joined = lambda x: jnp.moveaxis(x, 0, 2).reshape(*k.shape[:2], -1, x.shape[-1])[:, :, : k.shape[2]]
    return dq, joined(dk), joined(dv)


# All of them


def _forward(layout, q, k, v, positions: Positions):
    """→ out, as q, and the log-sum-exp of the scores, float32 [N, B, K, G, S]"""
    zeros = jnp.zeros(q.shape[:-1], jnp.float32)
    sums = _Sums(zeros, zeros + _MASKED, jnp.zeros((*q.shape[:-1], v.shape[-1]), jnp.float32))
    for visit in _visits(layout, k, v, positions.positions_S):
        for i, j in visit.pairs:
            mine, q_i, positions_i = jax.tree.map(lambda x, i=i: x[i], (sums, q, positions))
            mine = _add_keys(mine, q_i, visit.k[j], visit.v[j], positions_i, visit.positions[j])
            sums = jax.tree.map(lambda x, new, i=i: x.at[i].set(new), sums, mine)
    return (sums.out / sums.total[..., None]).astype(q.dtype), sums.top + jnp.log(sums.total)


def _backward(layout, q, k, v, positions: Positions, out, lse, dout):
    """Gradients of q, k and v. Those of keys and values are summed in float32 as they follow these round the ring,
    one hop behind, and one hop more brings them home."""
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), -1)
    dq, d_kv = jnp.zeros(q.shape, jnp.float32), []
    for visit in _visits(layout, k, v, positions.positions_S):
        here = [jnp.zeros(a.shape, jnp.float32) for a in (visit.k, visit.v)]
        for i, j in visit.pairs:
            of_queries = jax.tree.map(lambda x, i=i: x[i], (q, positions, lse, delta, dout))
            q_i, positions_i, *rest = of_queries
            dq_i, *d_j = _gradients(q_i, visit.k[j], visit.v[j], positions_i, visit.positions[j], *rest)
            dq = dq.at[i].add(dq_i)
            here = [total.at[j].add(d) for total, d in zip(here, d_j, strict=True)]
        d_kv = jax.tree.map(jnp.add, ring_shift(d_kv, "cp", 1), here) if d_kv else here
    if layout is not None:
        d_kv = ring_shift(d_kv, "cp", 1) if layout.context == "ring" else [_scatter(d, k) for d in d_kv]
    dk, dv = d_kv
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)
