"""Attention kernels against the blockwise core, which test_nn compares with the definition. The TPU kernel runs in
interpret mode. cuDNN's has a stand-in here, so that what is around it runs: its own numbers are not in question."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

from parallax import nn, program
from parallax.config import Data, Log, Model, Parallel, RunConfig, Train
from parallax.kernels import kernel_of
from parallax.mesh import make_mesh
from parallax.model import REMAT
from parallax.models import llama
from parallax.nn import kernels
from parallax.sharding import Layout
from parallax.start import prepare
from parallax.validate import resolve

B, H, TP = 2, 4, 2
TOLERANCE = {"float32": 1e-5, "bfloat16": 6e-3}  # relative L2


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "INTERPRET", True)
    monkeypatch.setattr(kernels, "BLOCK", 128)  # several blocks of a short sequence


def mapped(layout: Layout, f, outputs: int):
    """`f` of arrays [B, S, …] in a map over cp by hand, as the pipeline runs layers; they come and go in the order of
    positions."""

    def run(*arrays):
        cp, S = layout.cp, arrays[0].shape[1]
        order = np.concatenate([np.asarray(layout.positions(rank, S // cp)) for rank in range(cp)])

        def rank(*arrays):
            with layout.active():
                positions = layout.positions(jax.lax.axis_index("cp"), S // cp)
                return f(positions, *arrays)

        split = P(None, "cp")
        mesh = make_mesh(Parallel(cp=cp, tp=TP))
        names: set[str] = {"pp", "dp", "ep", "cp"}
        program = jax.shard_map(
            rank, mesh=mesh, in_specs=split, out_specs=(split,) * outputs, axis_names=names, check_vma=False
        )
        results = jax.jit(program)(*(a[:, order] for a in arrays))
        return [np.asarray(a[:, np.argsort(order)], np.float32) for a in results]

    return run


def compare(kernel: str, cp: int, dtype: str, head_size: int, kv_heads: int, documents: bool):
    """Output and gradients of q, k and v, relative L2 to the blockwise core in float32"""
    S = cp * (256 if kernel == "splash" else 64)
    whole = frozenset({"kv_heads"}) if kv_heads % TP else frozenset()
    layout = Layout({"cp": cp, "tp": TP}, whole, context="all_gather", kernel=kernel)
    heads = (H, kv_heads, kv_heads, H)
    q, k, v, dout = (
        jax.random.normal(jax.random.key(i), (B, S, n, head_size)).astype(dtype) for i, n in enumerate(heads)
    )
    starts = np.stack([np.where(np.arange(S) < cut, 0, cut) for cut in (S // 3, S - 10)]) if documents else None
    given = () if starts is None else (jnp.asarray(starts),)

    def attend(positions, q, k, v, dout, *starts):
        out, vjp = jax.vjp(lambda q, k, v: nn.attention(q, k, v, nn.Positions(positions, *starts)), q, k, v)
        return out, *vjp(dout)

    got = mapped(layout, attend, 4)(q, k, v, dout, *given)
    exact = (a.astype(jnp.float32) for a in (q, k, v, dout))
    want = jax.jit(attend)(jnp.arange(S), *exact, *given)
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(a - b) / np.linalg.norm(b) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("cp", "dtype", "head_size", "kv_heads", "documents"),
    [
        (1, "float32", 64, 4, False),
        (2, "bfloat16", 128, 1, True),  # fewer key/value heads than tp
        (4, "float32", 64, 2, False),
    ],
)
def test_splash(cp, dtype, head_size, kv_heads, documents):
    compare("splash", cp, dtype, head_size, kv_heads, documents)


def stand_in(q, k, v, *, mask=None, is_causal=False, implementation=None):
    """What cuDNN's custom call computes, with the same residuals: output and log-sum-exp, float32 [B, H, S]"""
    assert implementation == "cudnn"
    assert (mask is None) == is_causal == (q.shape[1] == k.shape[1])

    def scores(q, k):
        k = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
        s = jnp.einsum("bqhc,bkhc->bhqk", q, k, preferred_element_type=jnp.float32) / np.sqrt(q.shape[-1])
        return jnp.where(np.tril(np.ones(s.shape[-2:], bool)) if mask is None else mask, s, -jnp.inf)

    def forward(q, k, v):
        s = scores(q, k)
        lse = jax.nn.logsumexp(s, -1)
        out = jnp.einsum("bhqk,bkhc->bqhc", jnp.exp(s - lse[..., None]), jnp.repeat(v, q.shape[2] // v.shape[2], 2))
        return (out := out.astype(q.dtype)), (q, k, v, lse, out)

    def backward(kept, dout):
        """From the output and the log-sum-exp that are given, as FlashAttention-2 does (arXiv 2307.08691, algorithm
        2)"""
        q, k, v, lse, out = kept
        groups = q.shape[2] // k.shape[2]
        p = jnp.exp(scores(q, k) - lse[..., None])
        dp = jnp.einsum("bqhc,bkhc->bhqk", dout, jnp.repeat(v, groups, 2), preferred_element_type=jnp.float32)
        delta = jnp.einsum("bqhc,bqhc->bhq", dout, out, preferred_element_type=jnp.float32)
        ds = p * (dp - delta[..., None]) / np.sqrt(q.shape[-1])
        ungroup = lambda a: a.reshape(*a.shape[:2], -1, groups, a.shape[-1]).sum(3)
        dq = jnp.einsum("bhqk,bkhc->bqhc", ds, jnp.repeat(k, groups, 2))
        dk, dv = jnp.einsum("bhqk,bqhc->bkhc", ds, q), jnp.einsum("bhqk,bqhc->bkhc", p, dout)
        return dq.astype(q.dtype), ungroup(dk).astype(k.dtype), ungroup(dv).astype(v.dtype)

    attend: Any = jax.custom_vjp(lambda q, k, v: forward(q, k, v)[0])
    attend.defvjp(forward, backward)
    return attend(q, k, v)


@pytest.mark.parametrize(("cp", "kv_heads"), [(1, 4), (2, 2)])
def test_around_cudnn(cp, kv_heads, monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    compare("cudnn", cp, "bfloat16", 64, kv_heads, documents=False)


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize("kernel", ["splash", "cudnn"])
def test_remat_none_keeps_what_spares_the_kernel_a_second_run(kernel, remat, monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    layout, x = Layout({}), jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    attend = {
        "splash": lambda q, k, v: kernels.splash(layout, q, k, v, None),
        "cudnn": partial(kernels.cudnn, layout),
    }
    kept = []

    def differentiate(*qkv):
        _, vjp = jax.vjp(jax.checkpoint(attend[kernel], policy=REMAT[remat]), *qkv)
        tracers = [leaf for leaf in jax.tree.leaves(vjp) if isinstance(leaf, Tracer)]
        kept.extend(leaf.shape for leaf in tracers if not any(leaf is a for a in qkv))

    jax.eval_shape(differentiate, x, x, x)
    out = (1, 2, 128, 64) if kernel == "splash" else (1, 128, 2, 64)
    assert sorted(kept) == ([(1, 2, 128), out] if remat == "none" else [])


def test_the_mask_of_a_long_sequence_is_the_causal_one_in_the_order_of_the_ranks():
    layout, S = Layout({"cp": 4}), 4096
    kernel = kernels._splash_kernel(4, S, True)
    positions = np.concatenate([np.asarray(layout.positions(rank, S // 4)) for rank in range(4)])
    np.testing.assert_array_equal(kernel.fwd_mask_info.q_sequence, positions)
    causal = (positions[:, None] >= np.arange(S)).reshape(S // 128, 128, S // 128, 128)
    want = np.where(causal.all((1, 3)), 2, causal.any((1, 3)))  # 2: all is seen, 1: a part, 0: nothing
    mask: Any = kernel.fwd_mask_info.block_mask
    # blocks that are not visited are left out, and what remains of a row stands first
    for row, wanted in zip(mask[0], want, strict=True):
        assert [block for block in row if block] == [block for block in wanted if block]


def config(**sections: Any) -> RunConfig:
    train = Train(steps=1, seq_len=4096, global_batch_size=8)
    return replace(RunConfig(model=Model(name="llama"), train=train, log=Log(dir="unused")), **sections)


def shape(head_size: int = 128, value_head_size: int = 0):
    whole = llama.Config(vocab_size=256, width=64, layers=2, heads=4, kv_heads=2, ff=64, head_size=head_size).shape()
    return replace(whole, layers=tuple(replace(layer, value_head_size=value_head_size) for layer in whole.layers))


RING, GATHER = Parallel(cp=4), Parallel(cp=4, context="all_gather")
FLOAT32 = Train(steps=1, seq_len=4096, global_batch_size=8, precision="float32")


def kernel(platform, shape, config):
    return kernel_of(platform, shape, config.parallel, config.train, config.data.isolate_documents)


@pytest.mark.parametrize(
    ("platform", "own"), [("cpu", "blockwise"), ("tpu", "splash"), ("gpu", "cudnn"), ("cuda", "cudnn")]
)
def test_the_kernel_of_a_platform(platform, own):
    assert kernel(platform, shape(), config()) == (own, None)
    assert kernel(platform, shape(64), config(parallel=GATHER)) == (own, None)


def test_what_only_splash_attention_can():
    for given in (config(train=FLOAT32), config(data=Data(isolate_documents=True))):
        assert kernel("tpu", shape(), given) == ("splash", None)
        assert kernel("gpu", shape(), given)[0] == "blockwise"
    assert kernel("tpu", shape(256), config()) == ("splash", None)


@pytest.mark.parametrize(
    ("platform", "shape", "config", "reason"),
    [
        ("gpu", shape(160), config(), "the head size 160 must be a multiple of 8 up to 128; use 128"),
        ("gpu", shape(100), config(), "the head size 100 must be a multiple of 8 up to 128; use 96 or 104"),
        (
            *("tpu", shape(160), config()),
            "the head size 160 must be a multiple of 8 up to 128 or of 128 up to 512; use 128 or 256",
        ),
        ("gpu", shape(192, 128), config(), "the head size 192 of keys must be that of values, 128"),
        ("gpu", shape(), config(train=FLOAT32), 'train.precision = "float32" is not for it; use "bfloat16"'),
        (
            *("gpu", shape(), config(data=Data(isolate_documents=True))),
            "data.isolate_documents = true is not for it, whose mask is causal and no more; use false",
        ),
        ("gpu", shape(), config(parallel=RING), 'parallel.context = "ring" is not for it; use "all_gather"'),
        ("tpu", shape(), config(parallel=RING), 'parallel.context = "ring" is not for it; use "all_gather"'),
        (
            *("tpu", shape(), config(train=replace(FLOAT32, seq_len=1500))),
            "train.seq_len = 1500 must be a multiple of 128; use 1408 or 1536",
        ),
        (
            *("tpu", shape(), config(parallel=GATHER, train=replace(FLOAT32, seq_len=512))),
            "train.seq_len = 512 must be a multiple of 1024; use 1024",
        ),
        (
            *("gpu", shape(160), config(parallel=RING)),
            'the head size 160 must be a multiple of 8 up to 128; use 128; parallel.context = "ring" is not for it; '
            'use "all_gather"',
        ),
    ],
)
def test_why_attention_runs_blockwise(platform, shape, config, reason):
    name = {"gpu": "cuDNN attention", "tpu": "splash attention"}[platform]
    assert kernel(platform, shape, config) == (
        "blockwise",
        f"attention runs blockwise, slower than {name}: {reason}",
    )


def test_a_run_says_why_when_it_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program, "kernel_of", lambda *_: ("blockwise", "attention runs blockwise, and why"))
    run = tmp_path / "run.toml"
    run.write_text(
        'model.name = "llama-tiny"\ndata.source = "synthetic"\n'
        "train = {steps = 1, seq_len = 16, global_batch_size = 1}\n"
        f'log.dir = "{tmp_path}/run"\n'
    )
    prepare(resolve(run), resume=False)
    assert capsys.readouterr().err == "warning: attention runs blockwise, and why\n"


def test_head_sizes_that_differ_run_blockwise():
    """Values narrower than keys: as if they were padded with zeros to the size of keys"""
    k = jax.random.normal(jax.random.key(0), (1, 64, 2, 24))
    q, v, positions = k[:, ::-1], k[..., :16] + 1, nn.Positions(jnp.arange(64))

    @jax.jit
    def gradients(v):
        return jax.value_and_grad(lambda v: jnp.sum(nn.attention(q, k, v, positions) ** 2))(v)

    narrow, d_narrow = gradients(v)
    wide, d_wide = gradients(jnp.pad(v, [(0, 0), (0, 0), (0, 0), (0, 8)]))
    np.testing.assert_allclose(narrow, wide, rtol=1e-6)
    np.testing.assert_allclose(d_narrow, d_wide[..., :16], rtol=1e-5, atol=1e-6)
