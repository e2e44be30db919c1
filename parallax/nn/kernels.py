"""The attention kernels of accelerators: splash attention (Pallas) on TPU, cuDNN's fused attention on GPU.

Each takes one device's queries, [B, S, H, C], and keys and values, [B, S, K, C], inside the map over tp: its own heads,
and under context parallelism its own two chunks of the sequence, which must be gathered (`context = "all_gather"`). A
backward finds the kernel's output and log-sum-exp where `train.remat` keeps `ATTENTION`, else the kernel runs again.
`parallax.kernels` says when a kernel serves.
"""

from __future__ import annotations

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as pallas_splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as pallas_mask
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import process_mask, process_mask_dkv

from parallax.kernels import LANES
from parallax.nn.weights import ATTENTION, keep
from parallax.sharding import Layout

BLOCK = 512  # queries and keys a step, at most: 1024 with a head size of 256 in float32 overflow a v5e's kernel memory
INTERPRET = False  # run the TPU kernel on a CPU, for tests

# Keys and values of all cp ranks


def _gather(layout: Layout, a: jax.Array) -> jax.Array:
    """A rank's part of a sequence, [B, S / cp, …], with those of the others, in the order of positions: [B, S, …]. Its
    gradients are summed over the ranks in float32."""
    if layout.cp == 1:
        return a

    @jax.custom_vjp
    def gather(a):
        return _whole(a)

    gather.defvjp(lambda a: (_whole(a), None), lambda _, d: (_part(layout.cp, d),))
    return gather(a)


def _whole(a: jax.Array) -> jax.Array:
    chunks = a.reshape(a.shape[0], 2, -1, *a.shape[2:])
    ranks = lax.all_gather(chunks, "cp")  # rank r holds chunks r and 2·cp - 1 - r
    ordered = jnp.concatenate([ranks[:, :, 0], ranks[::-1, :, 1]])
    return jnp.moveaxis(ordered, 0, 1).reshape(a.shape[0], -1, *a.shape[2:])


def _part(cp: int, d: jax.Array) -> jax.Array:
    """The transpose of `_whole`."""
    chunks = jnp.moveaxis(d.astype(jnp.float32).reshape(d.shape[0], 2 * cp, -1, *d.shape[2:]), 1, 0)
    ranks = jnp.stack([chunks[:cp], chunks[: cp - 1 : -1]], 2)
    mine = lax.psum_scatter(ranks, "cp")
    return mine.reshape(d.shape[0], -1, *d.shape[2:]).astype(d.dtype)


# TPU


def splash(layout: Layout, q_BSHC, k_BSKC, v_BSKC, starts_BS: jax.Array | None) -> jax.Array:
    """Causal attention by jax's splash attention kernel, whose keys and values are read by groups of queries as they
    are. `starts_BS`: where each token's document begins (`nn.Positions`); two tokens of one document share it."""
    S = q_BSHC.shape[1] * layout.cp
    kernel = _of_rank(layout, _splash_kernel(layout.cp, S, INTERPRET))
    heads_first = lambda a: a.swapaxes(1, 2)
    q = heads_first(q_BSHC / math.sqrt(q_BSHC.shape[-1]))
    k, v = (heads_first(_gather(layout, a)) for a in (k_BSKC, v_BSKC))
    documents = None
    if starts_BS is not None:
        everywhere = starts_BS if layout.cp == 1 else _whole(starts_BS)
        documents = pallas_splash.SegmentIds(starts_BS, everywhere)
    return heads_first(jax.vmap(kernel)(q, k, v, documents))


class _CausalMask(pallas_mask.CausalMask):
    """With queries in any order, at these positions. Blocks of which all or nothing is seen, most of a long sequence's,
    are told by their ends: compared token by token, 131,072 of them took minutes."""

    def __init__(self, positions: np.ndarray):
        super().__init__((positions.size, positions.size))
        self.q_sequence = positions

    def __getitem__(self, idx) -> np.ndarray:
        queries, keys = self.q_sequence[idx[0]], idx[1]
        if queries.max() < keys.start:
            return np.zeros((queries.size, keys.stop - keys.start), bool)
        if queries.min() >= keys.stop - 1:
            return np.ones((queries.size, keys.stop - keys.start), bool)
        return super().__getitem__(idx)


@cache
def _splash_kernel(cp: int, S: int, interpret: bool) -> pallas_splash.SplashAttentionKernel:
    """For a sequence of S tokens, all ranks' queries one after the other. Its arrays, numpy's here, say which blocks of
    keys each block of queries visits: those that it does not see are skipped."""
    chunk = S if cp == 1 else S // (2 * cp)
    positions = np.arange(S, dtype=np.int32).reshape(-1, chunk)
    if cp > 1:  # the order of `Layout.positions`
        positions = positions[[held for rank in range(cp) for held in (rank, 2 * cp - 1 - rank)]]
    block = max(size for size in range(LANES, BLOCK + 1, LANES) if chunk % size == 0)
    mask = pallas_mask.MultiHeadMask([_CausalMask(positions.reshape(-1))])  # for all heads
    by_queries, seen = process_mask(mask, (block, block), q_seq_shards=cp)
    by_keys, _ = process_mask_dkv(mask, (block, block), q_seq_shards=cp)
    sizes = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    return pallas_splash.SplashAttentionKernel(
        *(by_queries, by_queries, by_keys),
        block_sizes=pallas_splash.BlockSizes(**dict.fromkeys(sizes, block)),
        is_mqa=False,
        save_residuals=False,
        mask_value=pallas_splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=ATTENTION,
        mask_function=seen,
        interpret=interpret,
    )


def _of_rank(layout: Layout, kernel: pallas_splash.SplashAttentionKernel) -> pallas_splash.SplashAttentionKernel:
    """The kernel for this rank's queries: its part of arrays [head, block of queries, block of keys] and [query]"""

    def part(a):
        axis = 1 if a.ndim == 3 else 0
        size = a.shape[axis] // layout.cp
        return lax.dynamic_slice_in_dim(jnp.asarray(a), lax.axis_index("cp") * size, size, axis)

    return kernel if layout.cp == 1 else jax.tree.map(part, kernel)


# GPU


def cudnn(layout: Layout, q_BSHC, k_BSKC, v_BSKC) -> jax.Array:
    """Causal attention by cuDNN. Its causal mask is for as many queries as keys. A chunk of queries further down the
    sequence goes with the keys up to its own last one, and with the mask written out: 2 bytes for each query and key,
    and as many for a gradient that nobody reads. How many keys there are depends on the rank, which takes one branch
    of cp (they hold no collective).

    Checked: builds for H100, and on a CPU, with a stand-in for the custom call, all that is around it. Not checked, for
    want of a GPU: the call's own numbers."""

    def by_rank(f, *operands):
        branches = [partial(f, layout.cp, rank) for rank in range(layout.cp)]
        return lax.switch(lax.axis_index("cp"), branches, *operands) if layout.cp > 1 else branches[0](*operands)

    @jax.custom_vjp
    def core(q, k, v):
        return forward(q, k, v)[0]

    def forward(q, k, v):
        out, lse = by_rank(_cudnn_forward, q, k, v)
        out, lse = keep(out, ATTENTION), keep(lse, ATTENTION)
        return out, (q, k, v, out, lse)

    def backward(kept, dout):
        return by_rank(_cudnn_backward, *kept, dout)

    core.defvjp(forward, backward)
    return core(q_BSHC, _gather(layout, k_BSKC), _gather(layout, v_BSKC))


def _cudnn_forward(cp: int, rank: int, q, k, v):
    """→ out, and the log-sum-exp of the scores, float32 [B, H, S]"""
    pieces = [_fused(q[:, mine], k[:, :end], v[:, :end])[:2] for mine, end in _pieces(cp, rank, q.shape[1])]
    out, lse = zip(*pieces, strict=True)
    return jnp.concatenate(out, 1), jnp.concatenate(lse, 2)


def _cudnn_backward(cp: int, rank: int, q, k, v, out, lse, dout):
    dq, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for mine, end in _pieces(cp, rank, q.shape[1]):
        *_, backward = _fused(q[:, mine], k[:, :end], v[:, :end])
        d_mine, d_keys, d_values = backward(out[:, mine], lse[:, :, mine], dout[:, mine])
        dq.append(d_mine)
        dk, dv = dk.at[:, :end].add(d_keys), dv.at[:, :end].add(d_values)
    return jnp.concatenate(dq, 1), dk.astype(k.dtype), dv.astype(v.dtype)


def _pieces(cp: int, rank: int, count: int) -> list[tuple[slice, int]]:
    """A rank's chunks among its `count` queries, and up to where the keys are that each sees."""
    if cp == 1:
        return [(slice(0, count), count)]
    chunk = count // 2
    return [(slice(0, chunk), (rank + 1) * chunk), (slice(chunk, count), (2 * cp - rank) * chunk)]


def _fused(q, k, v):
    """Queries that are the last of the tokens whose keys and values these are → out, log-sum-exp, and a function from
    these two and the gradient of out to those of q, k and v. Where only that is used, XLA drops the forward."""
    T, S = q.shape[1], k.shape[1]
    seen = None if T == S else (jnp.arange(S - T, S)[:, None] >= jnp.arange(S))[None, None]
    attend = lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, mask=seen, is_causal=seen is None, implementation="cudnn"
    )
    out, vjp = jax.vjp(attend, q, k, v)
    leaves, structure = jax.tree.flatten(vjp)
    (lse,) = [leaf for leaf in leaves if leaf.dtype == jnp.float32]

    def backward(kept_out, kept_lse, dout):
        kept = lambda leaf: kept_out if leaf is out else kept_lse if leaf is lse else leaf
        return structure.unflatten(map(kept, leaves))(dout)

    return out, lse, backward
