"""Layers on one device against their definitions."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from parallax import chunks, nn
from parallax.models import gpt, llama
from parallax.nn.rotary import frequencies
from parallax.nn.vocabulary import added_in_place


def plain_attention(q, k, v):
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], 2) for a in (k, v))
    s = jnp.einsum("bqhc,bkhc->bhqk", q, k) / np.sqrt(q.shape[-1])
    s = jnp.where(np.tril(np.ones(s.shape[-2:], bool)), s, -jnp.inf)
    return jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(s, -1), v)


@pytest.mark.parametrize("block", [16, 24, 512])  # four blocks of keys, three of 22 with two places to fill, and one
def test_attention_and_its_gradients(block, monkeypatch):
    monkeypatch.setattr(importlib.import_module("parallax.nn.attention"), "BLOCK", block)
    shapes = {"q": (2, 64, 6, 8), "k": (2, 64, 3, 8), "v": (2, 64, 3, 8), "dout": (2, 64, 6, 8)}
    q, k, v, dout = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate(shapes.values()))
    got, vjp = jax.vjp(lambda q, k, v: nn.attention(q, k, v, nn.Positions(jnp.arange(64))), q, k, v)
    want, plain_vjp = jax.vjp(plain_attention, q, k, v)
    for a, b in zip((got, *vjp(dout)), (want, *plain_vjp(dout)), strict=True):
        assert float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) < 1e-6


def plain_cross_entropy(x, table, targets):
    logp = jax.nn.log_softmax(x @ table.T, -1)
    return -jnp.mean(jnp.take_along_axis(logp, targets[..., None], -1))


def cross_entropy(x, table, targets):
    output = nn.Embedding(*table.shape, rngs=nnx.Rngs(0))
    return nn.cross_entropy(x, nnx.merge(nnx.graphdef(output), {"table": table}), targets)


X, TABLE = jax.random.normal(jax.random.key(1), (2, 8, 16)), 0.4 * jax.random.normal(jax.random.key(0), (50, 16))
TARGETS = jax.random.randint(jax.random.key(2), (2, 8), 0, 50)


@pytest.mark.parametrize(("least", "count"), [(1024, 1), (8, 2), (3, 4)])
def test_cross_entropy_and_its_gradients(least, count, monkeypatch):
    monkeypatch.setattr(chunks, "LEAST", least)
    assert chunks.loss_chunks(16, 16, 50) == count
    got, want = (jax.value_and_grad(f, (0, 1))(X, TABLE, TARGETS) for f in (cross_entropy, plain_cross_entropy))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("tokens", "width", "rows", "count"),
    [
        (8192, 4096, 16_032, 4),  # 2048 · 16,032 logits are no more than 8192 · 4096; twice as many are
        (8192, 4096, 4096, 1),  # no more logits than activations
        (8192, 2048, 32_064, 8),  # 16 would leave 512 tokens
        (6 * 1024, 64, 128_256, 4),  # 3 · 2^11 tokens: 8 would leave 768
        (3 * 1001, 64, 128_256, 1),  # odd
    ],
)
def test_chunks_of_the_loss(tokens, width, rows, count):
    assert chunks.loss_chunks(tokens, width, rows) == count


@pytest.mark.parametrize("factor", [1, 0.25])
def test_gradients_of_a_table_are_added_to_its_sum(factor, monkeypatch):
    """Also where the model multiplies its loss, which costs the loss once more; nothing multiplies it in models/."""
    monkeypatch.setattr(chunks, "LEAST", 8)

    @jax.jit
    def step(weights, sums, x):
        loss = lambda weights, x: factor * cross_entropy(x, weights["table"], TARGETS)
        with added_in_place(weights, sums) as added:
            value, vjp = jax.vjp(loss, weights, x)
            d_weights, dx = vjp(jnp.ones_like(value))
        return value, dx, added(), d_weights

    table, sums = {"table": TABLE}, {"table": jnp.full(TABLE.shape, 0.5)}
    value, dx, added, left = step(table, sums, X)
    want, (want_dx, want_dtable) = jax.value_and_grad(plain_cross_entropy, (0, 1))(X, TABLE, TARGETS)
    np.testing.assert_allclose(value, factor * want, rtol=2e-5)
    np.testing.assert_allclose(dx, factor * want_dx, rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(added["table"], 0.5 + factor * want_dtable, rtol=1e-6, atol=1e-7)
    assert not left["table"].any()
    products = str(step.lower(table, sums, X).compile().as_text()).count(" dot(")
    assert products == (3 if factor == 1 else 5)  # of the second time the gradient of x is not wanted


def test_a_loss_without_gradient_is_one_product():
    text = str(jax.jit(cross_entropy).lower(X, TABLE, TARGETS).compile().as_text())
    assert text.count(" dot(") == 1


def test_rotary_scaling_of_llama_31():
    """Long waves are stretched by the factor, short ones kept, as Llama 3.1's published reference does"""
    scaling = nn.RotaryScaling(8.0, 1.0, 4.0, 8192)
    plain, scaled = frequencies(128, 500_000.0, None), frequencies(128, 500_000.0, scaling)
    wavelength = 2 * np.pi / plain
    np.testing.assert_allclose(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8)
    between = (wavelength > 8192 / 4) & (wavelength < 8192)
    smooth = (8192 / wavelength[between] - 1) / (4 - 1)
    np.testing.assert_allclose(scaled[between], (1 - smooth) * plain[between] / 8 + smooth * plain[between])


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (llama.PRESETS["llama2-7b"], 6.738),  # published: 6.74 B
        (llama.PRESETS["llama3-8b"], 8.030),  # 8.03 B
        (llama.PRESETS["llama3-70b"], 70.554),  # 70.6 B
        (llama.PRESETS["llama3.1-405b"], 405.853),  # 405.85 B
        (gpt.PRESETS["gpt3-175b"], 174.6),  # Narayanan et al. 2021, table 1: 174.6 B
        (gpt.PRESETS["gpt-530b"], 529.6),  # 529.6 B
        (gpt.PRESETS["gpt-1t"], 1008.0),  # 1008.0 B
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_published_parameter_counts(config, billions):
    assert config.shape().parameters / 1e9 == pytest.approx(billions, rel=2e-4)


@pytest.mark.parametrize(("module", "name"), [(llama, "llama-tiny"), (gpt, "gpt-tiny")])
def test_the_shape_counts_what_the_modules_hold(module, name):
    config = module.PRESETS[name]
    count = lambda cls: sum(
        x.size for x in jax.tree.leaves(nnx.state(nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0)))))
    )
    shape = config.shape()
    assert count(module.Block) == shape.layers[0].parameters
    assert count(module.Embed) == sum(weight.size for weight in shape.embed)
    assert count(module.Head) == sum(weight.size for weight in shape.head)


def test_flops_of_a_step_are_megatrons_formula():
    """3 · 2 · [Σ h(q + 2kv) + q h + n h ffn] + h V, and 6 L q s for causal attention, a token"""
    config, s = llama.PRESETS["llama3-70b"], 8192
    h, q, kv, L = config.width, config.heads * config.C, config.kv_heads * config.C, config.layers
    products = 6 * (L * (h * (q + 2 * kv) + q * h + 3 * h * config.ff) + h * config.vocab_size)
    assert config.shape().train_flops_per_token(s) == products + 6 * L * q * s
