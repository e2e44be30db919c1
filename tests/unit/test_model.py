"""A model file that does not say what it should is refused by name."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from flax import nnx

from parallax import nn
from parallax.config import ConfigError
from parallax.model import Model
from parallax.models import llama
from parallax.shape import Weight

CONFIG = llama.PRESETS["llama-tiny"]


def with_head(head: type) -> SimpleNamespace:
    return SimpleNamespace(Embed=llama.Embed, Block=llama.Block, Head=head, context=llama.context)


class Nameless(llama.Head):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(3))


class Misnamed(llama.Head):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.scale = nn.weight(jnp.ones(3), ("mlp",))


@pytest.mark.parametrize(("head", "said"), [(Nameless, "names no axes"), (Misnamed, "names the axes ('mlp',)")])
def test_a_weight_needs_known_axes(head, said):
    with pytest.raises(ConfigError) as error:
        Model(with_head(head), CONFIG, CONFIG.shape())  # type: ignore[arg-type]
    first, second = error.value.problems
    assert f"{head.__name__}.scale {said}" in first and "embed, position, latent, heads, kv_heads, ff" in first
    assert "lists 0 weights (3,) with axes" in second and f"in {head.__name__}, which holds 1" in second


def test_a_wrong_count_is_named():
    table = Weight((7, 128), ("vocab", "embed"))
    with pytest.raises(ConfigError) as error:
        Model(llama, CONFIG, dataclasses.replace(CONFIG.shape(), embed=(table,)))
    assert [line[: line.index(" with")] for line in error.value.problems] == [
        "model: Config.shape() lists 1 weights (7, 128)",
        "model: Config.shape() lists 0 weights (256, 128)",
    ]
