"""PartitionSpecs of weights, and the constraints that the layers ask for by name.

Layers never name a mesh axis: they ask for `gather_sequence`, `scatter_sequence` or `split_last`, which do what the
`Layout` in force says, and nothing where none is (the plain single-device program).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax.kernels import BLOCKWISE
from parallax.layout import Sizes

Leaf = Any  # an array, or what stands in its place in a tree of specs, shardings or shapes
Tree = Any  # of arrays


@dataclass(frozen=True)
class Layout(Sizes):
    """How one run is laid out: the size of each mesh axis, what is replicated after all, and how activations lie."""

    sequence_parallel: bool = True
    context: str = "ring"  # how attention sees the other cp ranks' keys and values; or "all_gather"
    kernel: str = BLOCKWISE  # what computes attention (`parallax.kernels`)

    def spec(self, axes: tuple[str, ...]) -> P:
        """The PartitionSpec of a weight whose dimensions have these logical names."""
        return P(*(self.mesh_axes(axis) or None for axis in axes))

    def positions(self, rank: int | jax.Array, count: int) -> jax.Array:
        """The positions in a sequence of the `count` tokens that a cp rank holds, int32.

        The sequence is cut in 2·cp chunks, of which a rank holds one from either end: under a causal mask a token has
        work in proportion to its position, and so all ranks have the same."""
        if self.cp == 1:
            return jnp.arange(count)
        half = count // 2
        chunks = jnp.stack([jnp.asarray(rank), 2 * self.cp - 1 - rank])
        return (chunks[:, None] * half + jnp.arange(half)).reshape(-1)

    @property
    def sequence(self) -> P:
        """A [B, S, D] activation between layers: split along S over tp under sequence parallelism, else whole."""
        return P(None, "tp", None) if self.sequence_parallel else P(None, None, None)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this layout the one that layers traced inside the block follow."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)


_active: ContextVar[Layout | None] = ContextVar("layout", default=None)


def current() -> Layout | None:
    """The layout in force, or None in a plain single-device program."""
    return _active.get()


def only(spec: P, keep: tuple[str, ...]) -> P:
    """A PartitionSpec with all mesh axes but `keep` left out."""

    def part(entry):
        names = tuple(a for a in ((entry,) if isinstance(entry, str) else entry or ()) if a in keep)
        return names or None

    return P(*(part(entry) for entry in spec))


def constrain(x: jax.Array, spec: P) -> jax.Array:
    """Pin the tp sharding of an activation inside the pipeline; nothing in a plain program."""
    layout = current()
    return x if layout is None or layout.tp == 1 else lax.with_sharding_constraint(x, spec)


def between_layers(x_BSD: jax.Array) -> jax.Array:
    """Pin an activation to the form that it has between layers."""
    layout = current()
    return x_BSD if layout is None else constrain(x_BSD, layout.sequence)


def split_last(x: jax.Array, logical: str) -> jax.Array:
    """Pin the last dimension of a column-parallel product, named `logical`, to tp; whole where the layout says so."""
    layout = current()
    if layout is None:
        return x
    axis = "tp" if "tp" in layout.mesh_axes(logical) else None
    return constrain(x, P(*(None,) * (x.ndim - 1), axis))


def gather_sequence(x_BSD: jax.Array) -> jax.Array:
    """Whole sequence on every tp rank; its gradient is summed and split along the sequence again.

    The pair gather/scatter (Korthikanti et al. 2022, arXiv 2205.05198, g and ḡ of figure 5). Their gradients are
    written out, since with plain constraints XLA gathers the incoming gradient twice."""
    layout = current()
    return x_BSD if layout is None or layout.tp == 1 else _reshard(x_BSD, P(None, None, None), layout.sequence)


def scatter_sequence(x_BSD: jax.Array) -> jax.Array:
    """Partial sums of a row-parallel product, summed over tp and split along the sequence; its gradient is gathered."""
    layout = current()
    return x_BSD if layout is None or layout.tp == 1 else _reshard(x_BSD, layout.sequence, P(None, None, None))


def _reshard(x: jax.Array, forward: P, backward: P) -> jax.Array:
    @jax.custom_vjp
    def move(x):
        return lax.with_sharding_constraint(x, forward)

    move.defvjp(lambda x: (move(x), None), lambda _, dx: (lax.with_sharding_constraint(dx, backward),))
    return move(x)


def psum(x: jax.Array, axes: str | tuple[str, ...]) -> jax.Array:
    """Sum over mesh axes of the layout in force; a group of one is left alone (XLA's partitioner rejects it)."""
    axes = _several(axes)
    return lax.psum(x, axes) if axes else x


def pmax(x: jax.Array, axes: str | tuple[str, ...]) -> jax.Array:
    """Maximum over mesh axes of the layout in force."""
    axes = _several(axes)
    return lax.pmax(x, axes) if axes else x


def _several(axes: str | tuple[str, ...]) -> tuple[str, ...]:
    layout = current()
    axes = (axes,) if isinstance(axes, str) else axes
    return tuple(a for a in axes if layout is not None and layout.sizes[a] > 1)


def ring_shift(x: Tree, axis: str, step: int) -> Tree:
    """Every member of a mesh axis sends to the next (step 1) or the previous (-1) one, the last to the first."""
    layout = current()
    assert layout is not None
    n = layout.sizes[axis]
    return x if n == 1 else lax.ppermute(x, axis, [(i, (i + step) % n) for i in range(n)])


def tensor_map(f, in_specs, out_specs):
    """`f` mapped by hand over tp inside the pipeline (where pp, dp, ep and cp are by hand already)."""
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names={"tp"}, check_vma=False)
