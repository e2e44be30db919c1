"""Causal attention with grouped queries: a blockwise reference that runs anywhere.

The backward is written by hand from the saved output and log-sum-exp (Dao et al. 2022, arXiv 2205.14135, algorithm 4):
memory is linear in the sequence, and `train.remat = none` keeps two small arrays and not the scores.
Query head h reads key/value head h // G, with H = K · G. The core works on q [B, K, G, S, C] and k, v [B, K, T, C].
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax.nn.weights import ATTENTION, keep
from parallax.sharding import current, tensor_map

BLOCK = 512  # keys and values a step
_MASKED = -1e30  # not -inf: a fully masked block must not give NaN


def attention(q_BSHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, positions_S: jax.Array) -> jax.Array:
    """softmax(q kᵀ / √C, causal by position) v → [B, S, H, C].

    Inside the pipeline this runs in a map over tp by hand, so that a kernel sees its own heads only. Where tp exceeds
    the number of key/value heads these are whole on every rank, and a rank picks the one that its queries read."""
    layout = current()
    if layout is None:
        return _causal(q_BSHC, k_BSKC, v_BSKC, positions_S)
    kv_whole = "kv_heads" in layout.replicated
    kv_heads = k_BSKC.shape[2]

    def local(q, k, v, positions):
        if kv_whole:
            mine = lax.axis_index("tp") * kv_heads // layout.tp
            k, v = (lax.dynamic_slice_in_dim(a, mine, 1, axis=2) for a in (k, v))
        return _causal(q, k, v, positions)

    heads = P(None, None, "tp", None)
    kv = P() if kv_whole else heads
    return tensor_map(local, (heads, kv, kv, P()), heads)(q_BSHC, k_BSKC, v_BSKC, positions_S)


def _causal(q_BSHC, k_BSKC, v_BSKC, positions_S):
    B, S, H, C = q_BSHC.shape
    K = k_BSKC.shape[2]
    q_BKGSC = q_BSHC.reshape(B, S, K, H // K, C).transpose(0, 2, 3, 1, 4)
    k_BKTC, v_BKTC = k_BSKC.transpose(0, 2, 1, 3), v_BSKC.transpose(0, 2, 1, 3)
    out_BKGSC = _core(q_BKGSC, k_BKTC, v_BKTC, positions_S)
    return out_BKGSC.transpose(0, 3, 1, 2, 4).reshape(B, S, H, C)


@jax.custom_vjp
def _core(q, k, v, positions):
    return _forward(q, k, v, positions)[0]


def _core_forward(q, k, v, positions):
    out, lse = _forward(q, k, v, positions)
    out, lse = keep(out, ATTENTION), keep(lse, ATTENTION)
    return out, (q, k, v, positions, out, lse)


def _core_backward(kept, dout):
    q, k, v, positions, out, lse = kept
    return *_backward(q, k, v, positions, out, lse, dout), None


_core.defvjp(_core_forward, _core_backward)

_einsum = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _blocks(x, axis: int):
    """Cut `axis` into blocks of at most BLOCK and put the block index in front."""
    size = math.gcd(x.shape[axis], BLOCK) if x.shape[axis] > BLOCK else x.shape[axis]
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


def _scores(q, k, q_positions, k_positions):
    """float32 [B, K, G, S, T], masked"""
    s = _einsum("bkgsc,bktc->bkgst", q, k) / math.sqrt(q.shape[-1])
    return jnp.where(q_positions[:, None] >= k_positions, s, _MASKED)


def _forward(q, k, v, positions):
    """→ out [B, K, G, S, C] and the log-sum-exp of the scores, float32 [B, K, G, S]"""

    def block(carry, kvp):
        total, top, out = carry
        k, v, k_positions = kvp
        s = _scores(q, k, positions, k_positions)
        new_top = jnp.maximum(top, s.max(-1))
        p, shrink = jnp.exp(s - new_top[..., None]), jnp.exp(top - new_top)
        out = out * shrink[..., None] + _einsum("bkgst,bktc->bkgsc", p.astype(v.dtype), v)
        return (total * shrink + p.sum(-1), new_top, out), None

    zeros = jnp.zeros(q.shape[:-1], jnp.float32)
    start = (zeros, zeros + _MASKED, jnp.zeros(q.shape, jnp.float32))
    (total, top, out), _ = lax.scan(block, start, (_blocks(k, 2), _blocks(v, 2), _blocks(positions, 0)))
    return (out / total[..., None]).astype(q.dtype), top + jnp.log(total)


def _backward(q, k, v, positions, out, lse, dout):
    """Gradients of q, k and v; probabilities are computed again from the scores and their log-sum-exp."""
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), -1)
    scale = 1 / math.sqrt(q.shape[-1])

    def block(dq, kvp):
        k, v, k_positions = kvp
        p = jnp.exp(_scores(q, k, positions, k_positions) - lse[..., None])
        dv = _einsum("bkgst,bkgsc->bktc", p.astype(dout.dtype), dout)
        dp = _einsum("bkgsc,bktc->bkgst", dout, v)
        ds = (p * (dp - delta[..., None]) * scale).astype(q.dtype)
        dk = _einsum("bkgst,bkgsc->bktc", ds, q)
        return dq + _einsum("bkgst,bktc->bkgsc", ds, k), (dk.astype(k.dtype), dv.astype(v.dtype))

    start = jnp.zeros(q.shape, jnp.float32)
    dq, (dk, dv) = lax.scan(block, start, (_blocks(k, 2), _blocks(v, 2), _blocks(positions, 0)))
    joined = lambda x: jnp.moveaxis(x, 0, 2).reshape(k.shape)
    return dq.astype(q.dtype), joined(dk), joined(dv)
