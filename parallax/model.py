"""A model file as pure functions over trees of arrays: what the pipeline and the optimizer work on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import jax
from flax import nnx

from parallax.config import ConfigError
from parallax.layout import LOGICAL
from parallax.nn.attention import Positions
from parallax.nn.weights import ATTENTION, PRODUCT
from parallax.shape import ModelShape, Weight

REMAT = {  # what the forward keeps for the backward, besides a layer's input
    "none": jax.checkpoint_policies.save_only_these_names(PRODUCT, ATTENTION),
    "selective": jax.checkpoint_policies.save_only_these_names(PRODUCT),
    "full": jax.checkpoint_policies.nothing_saveable,
}


@dataclass(frozen=True, eq=False)
class Model:
    """`weights` is a tree {"blocks": one layer's, "embed", "head"} of `Weight`. The functions take trees of arrays of
    the same structure, a single layer's for `block`, in whatever dtype the products are to run.

    Raises ConfigError naming each weight whose axes are missing or unknown, and each weight in which `shape`
    and the modules differ."""

    module: ModuleType
    config: Any
    shape: ModelShape
    remat: str = "full"
    weights: dict = field(init=False)
    _graphs: dict = field(init=False)

    def __post_init__(self):
        graphs, weights, problems = {}, {}, []
        for part, cls in self._parts().items():
            graphs[part], state = nnx.split(nnx.eval_shape(lambda cls=cls: cls(self.config, rngs=nnx.Rngs(0))))
            described = []
            for path, variable in nnx.to_flat_state(state):
                axes = variable.get_metadata().get("axes", ())
                described.append(Weight(variable.get_value().shape, axes))
                if not axes or not set(axes) <= LOGICAL.keys():
                    where = f"{cls.__name__}.{'.'.join(map(str, path))}"
                    named = f"names the axes {axes}" if axes else "names no axes"
                    problems.append(f"model: weight {where} {named}; use parallax.nn.weight with {', '.join(LOGICAL)}")
            weights[part] = jax.tree.unflatten(jax.tree.structure(nnx.to_pure_dict(state)), described)
        problems += self._misdescribed(weights)
        if problems:
            raise ConfigError(problems)
        object.__setattr__(self, "_graphs", graphs)
        object.__setattr__(self, "weights", weights)

    def _misdescribed(self, weights: dict) -> list[str]:
        """The weights that `Config.shape()` lists and the modules do not hold, and the other way round."""
        lines = []
        said = {"blocks": self.shape.layers[0].weights, "embed": self.shape.embed, "head": self.shape.head}
        for part, cls in self._parts().items():
            listed, held = Counter(said[part]), Counter(jax.tree.leaves(weights[part]))
            for weight in {**listed, **held}:
                if listed[weight] != held[weight]:
                    count = f"Config.shape() lists {listed[weight]} weights {weight.shape} with axes {weight.axes}"
                    lines.append(f"model: {count} in {cls.__name__}, which holds {held[weight]}")
        return lines

    def _parts(self) -> dict[str, type]:
        return {"blocks": self.module.Block, "embed": self.module.Embed, "head": self.module.Head}

    @property
    def weight_shapes(self) -> dict[str, list[int]]:
        """`blocks.gate.kernel: [128, 384]` and so on, one layer's of the blocks."""
        named = jax.tree_util.tree_leaves_with_path(self.weights)
        return {".".join(str(key.key) for key in path): list(weight.shape) for path, weight in named}

    @property
    def layers(self) -> int:
        return len(self.shape.layers)

    def init(self, key: jax.Array) -> dict:
        """float32 weights, layers stacked [L, …] in model order; the same numbers on any layout."""
        keys = dict(zip(("embed", "head", "blocks"), jax.random.split(key, 3), strict=True))
        fresh = lambda part, key: nnx.to_pure_dict(
            nnx.state(self._parts()[part](self.config, rngs=nnx.Rngs(params=key)), nnx.Param)
        )
        blocks = jax.vmap(lambda key: fresh("blocks", key))(jax.random.split(keys["blocks"], self.layers))
        return {"blocks": blocks, "embed": fresh("embed", keys["embed"]), "head": fresh("head", keys["head"])}

    def context(self, positions: Positions):
        return self.module.context(self.config, positions)

    def embed(self, weights: dict, tokens_BS: jax.Array, positions_S: jax.Array) -> jax.Array:
        return nnx.merge(self._graphs["embed"], weights)(tokens_BS, positions_S)

    def block(self, weights: dict, x_BSD: jax.Array, context) -> jax.Array:
        """One layer, with `remat` deciding what its vjp keeps."""
        run = lambda weights, x_BSD, context: nnx.merge(self._graphs["blocks"], weights)(x_BSD, context)
        return jax.checkpoint(run, prevent_cse=False, policy=REMAT[self.remat])(weights, x_BSD, context)

    def loss(self, outer: dict, x_BSD: jax.Array, targets_BS: jax.Array) -> jax.Array:
        """Mean nats a token; `outer` holds "embed" and "head"."""
        embed = nnx.merge(self._graphs["embed"], outer["embed"])
        return nnx.merge(self._graphs["head"], outer["head"])(x_BSD, targets_BS, embed)
