"""The device mesh: axes pp, dp, ep, cp, tp, slowest link first, so that a tp group sits inside a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from parallax.config import Parallel
from parallax.layout import AXES


def make_mesh(parallel: Parallel, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a layout on the first of these jax devices (all there are) that it needs.

    On TPU the order follows the chips' topology. On GPU and CPU devices come in process order, hosts one after the
    other, which keeps the fastest axes inside a node. Raises ValueError where there are too few devices."""
    sizes = tuple(getattr(parallel, axis) for axis in AXES)
    count = int(np.prod(sizes))
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < count:
        product = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True))
        raise ValueError(f"parallel: {product} = {count} devices, but {len(devices)} are here")
    if devices[0].platform == "tpu" and len(devices) == count:
        grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    else:
        ordered = sorted(devices, key=lambda d: (d.process_index, d.id))[:count]
        grid = np.array(ordered, dtype=object).reshape(sizes)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
