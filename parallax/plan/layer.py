"""The time of one layer on one device, forward and backward, by kind of work. No jax.

Every weight matrix of a layer is a product, column-parallel where tp splits its output and row-parallel where it splits
its input; the rest is attention, passes over memory and communication. Names: n tokens of a microbatch on a rank, D
width, F feed-forward, C head size, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from parallax.layout import Sizes
from parallax.plan.costs import Costs
from parallax.shape import LayerShape


class Parts(NamedTuple):
    """Seconds by kind of work; `kernels` counts kernels."""

    matmul: float
    attention: float
    memory: float
    kernels: float
    tp: float
    cp: float
    ep: float

    def __add__(self, other: Parts) -> Parts:  # type: ignore[override]
        return Parts(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Parts:
        return Parts(*(factor * a for a in self))

    def seconds(self, kernel_s: float) -> float:
        """All of it, one after the other."""
        return sum(self) - self.kernels + self.kernels * kernel_s


NOTHING = Parts(0, 0, 0, 0, 0, 0, 0)


class LayerTime(NamedTuple):
    """`again` is what a backward computes a second time; `overlapped` the seconds of tp's communication that products
    of the backward hide."""

    forward: Parts
    backward: Parts
    again: Parts
    overlapped: float


@dataclass(frozen=True)
class Software:
    """What runs the layer.

    `host_s` is what the host takes to launch a kernel: 0 where one program holds them all. `pass_bytes` are bytes read
    and written per token and element of the width by norms, residual sums and dropout, forward and backward; `kernels`
    the kernels of a layer, forward and backward; `gradient_bytes` those of adding a weight's gradient to its sum.
    `scores` says that attention writes its scores to memory (no fused kernel), and `hides_tp` that with sequence
    parallelism the backward's tp communication runs beside the weight gradients of column-parallel matrices."""

    host_s: float
    pass_bytes: tuple[float, float]
    kernels: tuple[int, int]
    gradient_bytes: float
    scores: bool
    hides_tp: bool


# One compiled program: norms and residual sums fused (a norm reads and writes; a sum reads two and writes one),
# attention fused, gradients written by the product and added in float32. Tensor-parallel communication of this
# project's program stands between its products (docs/estimate.md), so nothing of it is hidden.
PARALLAX = Software(0.0, (20, 24), (20, 40), 12, scores=False, hides_tp=False)
# Megatron-LM of 2021 to 2023: two norms (4 bytes each), two fused bias-dropout-sums (7 each); Korthikanti et al. 2022,
# section 4.2, for what it keeps and recomputes. Kernels counted in its transformer layer; the host's time a kernel is
# chosen on every second group of vTrain's single-node steps, as the constants of meshes/a100-80gb.toml.
MEGATRON = Software(35e-6, (22, 22), (30, 56), 6, scores=True, hides_tp=True)
# Megatron Core since 2023: attention is one kernel, gradients are added in float32 by the product itself; a launch
# costs what is usually said of a PyTorch operator.
MEGATRON_CORE = Software(10e-6, (20, 22), (22, 44), 8, scores=False, hides_tp=True)


class Work(NamedTuple):
    """A microbatch on one rank: `batch` sequences of `seq_len` tokens, of which the rank holds 1 / cp."""

    batch: int
    seq_len: int
    width: int
    remat: str
    sequence_parallel: bool
    context: str = "ring"
    fused: bool = True  # attention is one kernel, where the software has one


@dataclass(frozen=True, eq=False)
class LayerTimes:
    """`layer_time` of one chip and software, each layout of a layer worked out once."""

    costs: Costs
    software: Software
    _known: dict[tuple[object, ...], LayerTime] = field(default_factory=dict)

    def __call__(self, layer: LayerShape, sizes: Sizes, work: Work) -> LayerTime:
        key = (layer, sizes.tp, sizes.cp, sizes.ep, sizes.replicated, work)
        time = self._known.get(key)
        if time is None:
            time = self._known[key] = layer_time(self.costs, self.software, layer, sizes, work)
        return time


def layer_time(costs: Costs, software: Software, layer: LayerShape, sizes: Sizes, work: Work) -> LayerTime:
    """`sizes` holds ep, cp and tp, and the stride of each in the order of devices: tp, cp, ep."""
    tp, cp, ep = sizes.tp, sizes.cp, sizes.ep
    item, n, D = costs.item, work.batch * work.seq_len // cp, work.width
    matmul = costs.matmul

    forward_s = inputs_s = column_s = row_s = elements = experts = 0.0
    for weight in layer.weights:
        if not weight.decays:
            continue
        *batch, k, m = sizes.local(weight.shape, weight.axes)
        rows, count = n, 1
        if "experts" in weight.axes[:-2]:
            count = batch[0]
            rows = n * layer.experts_per_token / count
            experts += 1
        forward_s += matmul(rows, k, m, count)
        inputs_s += matmul(rows, m, k, count)
        weights_s = matmul(k, rows, m, count)
        if sizes.mesh_axes(weight.axes[-1]):
            column_s += weights_s
        else:
            row_s += weights_s
        elements += count * k * m

    heads, C, Cv = layer.heads / tp, layer.head_size, layer.value_head_size or layer.head_size
    if software.scores or not work.fused:
        scores = layer.heads * work.batch * work.seq_len**2 / (tp * cp)
        products = matmul(work.seq_len / cp, C, work.seq_len, work.batch * heads) + matmul(
            work.seq_len / cp, work.seq_len, Cv, work.batch * heads
        )
        # softmax with scale and mask (2 read, 2 written), dropout (2, 2 and a mask of 1); its backward reads one more.
        # Blockwise, as XLA fuses it: float32 scores written and read, exponentials written or read by products; in
        # the backward worked out anew, and as much again for their gradient.
        passes = (9, 11) if software.scores else (9, 22)
        again = 0 if software.scores else products
        attention = products + costs.memory(passes[0] * scores), 2 * products + again + costs.memory(passes[1] * scores)
    else:
        flops = layer.attention_flops_per_token(work.seq_len) * n / tp
        attention = costs.attention(flops), costs.attention(2.5 * flops)  # 5 products for 2 (arXiv 2307.08691, 3.1)

    split = tp if work.sequence_parallel else 1
    F = (layer.experts_per_token * layer.ff + layer.shared_ff if layer.experts else layer.ff) / tp
    between = n * D / split / 2 * item  # pass_bytes are of 2-byte elements
    inner = n * item * (layer.ff_matrices * F + 6 * heads * C)  # the activation function; rotary or split of heads
    passes = (
        costs.memory(software.pass_bytes[0] * between + inner),
        costs.memory(software.pass_bytes[1] * between + 1.3 * inner + software.gradient_bytes * elements),
    )

    # Communication: halves are all-gathers or reduce-scatters of a whole activation [n, D]
    half = costs.gather(item * n * D, tp, 1)
    if work.sequence_parallel and not software.hides_tp:
        halves_again = {"full": 3, "selective": 2, "none": 2}[work.remat]  # gathered inputs are not kept
        halves = 4, 4, halves_again
    else:  # two all-reduces, or as much in gathers and scatters
        halves = 4, 4, 4 if work.remat == "full" else 0
    exchange = costs.all_to_all(item * n * D * layer.experts_per_token / split, ep, cp * tp) if experts else 0.0
    keys = work.batch * work.seq_len // cp * max(1, layer.kv_heads // tp) * (C + Cv)  # keys and values of a rank
    ring = _context(costs, item * keys, 4 * keys, cp, tp, work.context)

    forward = Parts(forward_s, attention[0], passes[0], software.kernels[0], halves[0] * half, ring[0], 2 * exchange)
    backward = Parts(
        inputs_s + column_s + row_s,
        attention[1],
        passes[1],
        software.kernels[1],
        halves[1] * half,
        ring[1],
        2 * exchange,
    )
    again = {
        "full": forward._replace(tp=halves[2] * half),
        "selective": Parts(0, attention[0], 0, 5, halves[2] * half, ring[0], 0),
        "none": NOTHING._replace(tp=halves[2] * half),
    }[work.remat]
    hidden = min(halves[1] * half, column_s) if software.hides_tp and work.sequence_parallel else 0.0
    return LayerTime(forward, backward, again, hidden)


def _context(costs: Costs, keys: float, gradients: float, cp: int, tp: int, how: str) -> tuple[float, float]:
    """Forward and backward seconds of context parallelism, from the bytes of a rank's keys and values and of their
    float32 gradients: a ring passes cp - 1 blocks on, and cp of gradients, which end where they began."""
    if cp == 1:
        return 0.0, 0.0
    if how == "ring":
        inside = costs.members_inside(cp, tp) == cp
        step, back = costs.send(keys, inside), costs.send(gradients, inside)
        return (cp - 1) * step, (cp - 1) * step + cp * back
    gather = costs.gather(cp * keys, cp, tp)
    return gather, gather + costs.gather(cp * gradients, cp, tp)
