"""Plain single-device Llama and GPT, to compare with: no parallax code, no pipeline, float32, `jax.grad` throughout.

Weights come in the canonical tree: {"blocks": {name: {...}} stacked [L, …], "embed", "head"}.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def attention(q, k, v, starts):
    """q [B, S, H, C]; k, v [B, S, K, C]; causal, from the start [B, S] of each query's document; scores in full"""
    groups = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
    scores = jnp.einsum("bqhc,bkhc->bhqk", q, k) / np.sqrt(q.shape[-1])
    S = q.shape[1]
    seen = np.tril(np.ones((S, S), bool)) & (np.arange(S) >= starts[:, :, None])
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(scores, axis=-1), v)


def rotary(x, theta):
    """Pairs as complex numbers turned by position · theta^(-2i/C)"""
    S, C = x.shape[1], x.shape[-1]
    angle = np.arange(S)[:, None] * theta ** (-np.arange(0, C, 2) / C)
    turned = (x[..., : C // 2] + 1j * x[..., C // 2 :]) * np.exp(1j * angle)[None, :, None]
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def rms_norm(w, x, epsilon):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + epsilon) * w["gain"]


def layer_norm(w, x, epsilon):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt(x.var(-1, keepdims=True) + epsilon) * w["gain"] + w["bias"]


def linear(w, x):
    return x @ w["kernel"] + w.get("bias", 0)


def llama_layer(config, w, x, starts):
    heads = lambda a: a.reshape(*a.shape[:2], -1, config.C)
    h = rms_norm(w["attention_norm"], x, config.norm_epsilon)
    q, k, v = (heads(linear(w[n], h)) for n in ("query", "key", "value"))
    a = attention(rotary(q, config.rope_theta), rotary(k, config.rope_theta), v, starts)
    x = x + linear(w["out"], a.reshape(*x.shape[:2], -1))
    h = rms_norm(w["ff_norm"], x, config.norm_epsilon)
    gate = linear(w["gate"], h)
    return x + linear(w["down"], gate / (1 + jnp.exp(-gate)) * linear(w["up"], h))


def gpt_layer(config, w, x, starts):
    heads = lambda a: a.reshape(*a.shape[:2], config.heads, -1)
    h = layer_norm(w["attention_norm"], x, config.norm_epsilon)
    q, k, v = (heads(linear(w[n], h)) for n in ("query", "key", "value"))
    a = attention(q, k, v, starts)
    x = x + linear(w["out"], a.reshape(x.shape))
    u = linear(w["up"], layer_norm(w["ff_norm"], x, config.norm_epsilon))
    gelu = 0.5 * u * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))
    return x + linear(w["down"], gelu)


def loss(family, config, weights, tokens, targets, starts=None):
    """Mean nats a token over tokens [B, S]; without `starts` each row is one document"""
    starts = jnp.zeros(tokens.shape, int) if starts is None else starts
    layer = {"llama": llama_layer, "gpt": gpt_layer}[family]
    norm = {"llama": rms_norm, "gpt": layer_norm}[family]
    table = weights["embed"]["tokens"]["table"]
    x = table[tokens]
    if family == "gpt":
        x = x + weights["embed"]["positions"][: tokens.shape[1]]
    x, _ = jax.lax.scan(lambda x, w: (layer(config, w, x, starts), None), x, weights["blocks"])
    x = norm(weights["head"]["norm"], x, config.norm_epsilon)
    output = weights["head"]["output"]["table"] if "output" in weights["head"] else table
    logp = jax.nn.log_softmax(x @ output.T, axis=-1)
    return -jnp.mean(jnp.take_along_axis(logp, targets[..., None], axis=-1))


def train(family, config, weights, batches, optimizer, learning_rates) -> tuple[list[float], Any, Any]:
    """AdamW with global-norm clipping by optax over batches (tokens, targets, starts): losses, first gradients, final
    weights."""
    vector = lambda path, w: w.ndim - (path[0].key == "blocks") > 1
    tx = optax.chain(
        optax.clip_by_global_norm(optimizer.clip_norm) if optimizer.clip_norm else optax.identity(),
        optax.adamw(
            lambda count: jnp.asarray(learning_rates)[count],
            optimizer.beta1,
            optimizer.beta2,
            optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
            mask=jax.tree_util.tree_map_with_path(vector, weights),
        ),
    )
    state = tx.init(weights)

    @jax.jit
    def step(weights, state, batch):
        value, gradients = jax.value_and_grad(lambda w: loss(family, config, w, *batch))(weights)
        updates, state = tx.update(gradients, state, weights)
        return value, gradients, optax.apply_updates(weights, updates), state

    losses, first = [], None
    for batch in batches:
        value, gradients, weights, state = step(weights, state, batch)
        losses.append(float(value))
        first = gradients if first is None else first
    return losses, first, weights
