"""What a machine takes for a matrix product, a pass over memory and a collective. No jax.

One model for every chip and every row of measurements, with the few constants of `Efficiency`:

- a matrix product [n, k] x [k, m] takes the longer of its FLOPs at `matmul` of the peak and its bytes at `memory` of
  the memory's bandwidth. The first is stretched by `wave` / (n·m): the output is cut in tiles, a wave of tiles fills
  the chip, and on average half of the last wave is idle;
- fused attention takes its causal FLOPs at `attention` of the peak;
- a kernel takes `kernel_s` beside that: its start, its tail and the gap to the next;
- a collective of V bytes over n devices takes (n-1)/n V (all-gather, reduce-scatter, all-to-all) or twice that
  (all-reduce) over its bandwidth, and log2(n) latencies. Its bandwidth is `link` of the links inside a node; where the
  group leaves the node, of the network's, once for each of its members in a node (each has an adapter of its own), but
  never more than inside (Thakur et al. 2005, doi 10.1177/1094342005051521, for the volumes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from parallax.config import ConfigError
from parallax.machine import Efficiency, Machine

ITEM_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Costs:
    """Seconds on one device of `machine`, in `precision`."""

    machine: Machine
    precision: str

    @cached_property
    def efficiency(self) -> Efficiency:
        assert self.machine.efficiency is not None, "emulated devices have no speed"
        return self.machine.efficiency

    @cached_property
    def item(self) -> int:
        """Bytes of an element of weights and activations."""
        return ITEM_BYTES[self.precision]

    @cached_property
    def peak(self) -> float:
        """Dense FLOP/s."""
        return self.machine.peak_flops[self.precision]

    @cached_property
    def _matmul(self) -> float:
        return self.peak * self.efficiency.matmul

    @cached_property
    def _memory(self) -> float:
        return self._known("hbm_bytes_per_s") * self.efficiency.memory

    @cached_property
    def _inside(self) -> float:
        return self._known("link_inside_bytes_per_s")

    @cached_property
    def _across(self) -> float:
        return self._known("link_across_bytes_per_s")

    def _known(self, name: str) -> float:
        """A figure of the machine. Raises ConfigError where it is 0, for not known."""
        if speed := getattr(self.machine, name):
            return speed
        where = f"mesh {self.machine.name}: {name} = 0, for not known"
        raise ConfigError([f"{where}, and this layout's time cannot be priced without; use a mesh file that gives it"])

    def matmul(self, n: float, k: float, m: float, batch: float = 1) -> float:
        """`batch` products [n, k] x [k, m]."""
        outputs = n * m * batch
        flops_s = 2 * outputs * k / self._matmul * (1 + self.efficiency.wave / outputs)
        bytes_s = self.item * batch * (n * k + k * m + n * m) / self._memory
        return max(flops_s, bytes_s)

    def attention(self, flops: float) -> float:
        """Fused attention; the FLOPs are those of a causal mask."""
        return flops / (self.peak * self.efficiency.attention)

    def memory(self, size_bytes: float) -> float:
        """A pass that reads and writes so many bytes in all."""
        return size_bytes / self._memory

    def gather(self, size_bytes: float, ranks: int, stride: int) -> float:
        """An all-gather to, or a reduce-scatter of, arrays of `size_bytes` over `ranks` devices that are `stride` apart
        in the order of devices."""
        if ranks == 1:
            return 0.0
        bandwidth, latency_s = self._link(ranks, stride)
        return (ranks - 1) / ranks * size_bytes / bandwidth + math.log2(ranks) * latency_s

    def all_reduce(self, size_bytes: float, ranks: int, stride: int) -> float:
        return 2 * self.gather(size_bytes, ranks, stride)

    def all_to_all(self, size_bytes: float, ranks: int, stride: int) -> float:
        """Every rank holds `size_bytes`, of which it keeps its part. What stays in the node and what leaves it add up:
        on a torus both take the same links."""
        if ranks == 1:
            return 0.0
        efficiency, inside = self.efficiency, self.members_inside(ranks, stride)
        link = efficiency.link
        near = size_bytes * (inside - 1) / ranks / (self._inside * link) if inside > 1 else 0.0
        if inside == ranks:
            return near + math.log2(ranks) * efficiency.latency_inside_s
        far = size_bytes * (ranks - inside) / ranks / (self._across * link)
        return near + far + math.log2(ranks) * efficiency.latency_across_s

    def send(self, size_bytes: float, inside: bool) -> float:
        """To one other device, in the node or not."""
        efficiency, link = self.efficiency, self.efficiency.link
        if inside:
            return size_bytes / (self._inside * link) + efficiency.latency_inside_s
        return size_bytes / (self._across * link) + efficiency.latency_across_s

    def members_inside(self, ranks: int, stride: int) -> int:
        """Members of a group that share a node."""
        return min(ranks, max(1, self.machine.devices_per_node // stride))

    def _link(self, ranks: int, stride: int) -> tuple[float, float]:
        """Bandwidth, bytes a second, and latency of a group's ring."""
        efficiency, inside = self.efficiency, self.members_inside(ranks, stride)
        if inside == ranks:
            return self._inside * efficiency.link, efficiency.latency_inside_s
        alone = inside == 1 and not self.machine.link_inside_bytes_per_s
        bandwidth = self._across if alone else min(self._inside, inside * self._across)
        return bandwidth * efficiency.link, efficiency.latency_across_s
