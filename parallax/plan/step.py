"""The time of a training step, item by item, of parallax's own program. No jax."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from parallax.chunks import loss_chunks
from parallax.config import SCHEDULES, Parallel, Train
from parallax.kernels import BLOCKWISE, kernel_of
from parallax.layout import Sizes, axis_sizes, kept_whole
from parallax.plan.costs import Costs
from parallax.plan.layer import NOTHING, LayerTime, LayerTimes, Work
from parallax.schedule.order import make_schedule
from parallax.schedule.table import tick_table
from parallax.shape import LayerShape, ModelShape
from parallax.stages import Stages

LOGIT_BYTES = 30  # float32 logits written, read for their maximum, turned into exponentials and summed, into gradients
SUM_BYTES = 8  # an element of the output's float32 gradients: a chunk of the loss reads the sum and writes it
STATE_BYTES = 40  # a parameter of a shard: gradient twice, weight and moments read and written, new weight
ITEMS = ("matmul", "attention", "memory_bound", "recompute", "tp", "cp", "ep", "pp", "vocabulary", "dp")
ITEMS += ("bubble", "padding", "optimizer", "launch")


@dataclass(frozen=True)
class StepTime:
    """`items` are the seconds of a step by kind; their sum is the step. `communication` has, by kind, seconds in all
    and those of them that no other work hides (and which alone are in `items`)."""

    items: dict[str, float]
    communication: dict[str, tuple[float, float]]

    @property
    def total(self) -> float:
        return sum(self.items.values())


def microbatches(parallel: Parallel, train: Train) -> int:
    return train.global_batch_size // (parallel.dp * parallel.ep * train.micro_batch_size)


def device_sizes(parallel: Parallel, shape: ModelShape) -> Sizes:
    return Sizes(axis_sizes(parallel), kept_whole(parallel, (kind for kind, _ in shape.kinds)))


def work_of(parallel: Parallel, train: Train, width: int, fused: bool = True) -> Work:
    sequence_parallel = parallel.sequence_parallel and parallel.tp > 1
    return Work(train.micro_batch_size, train.seq_len, width, train.remat, sequence_parallel, parallel.context, fused)


def own_step(times: LayerTimes, shape: ModelShape, parallel: Parallel, train: Train) -> StepTime:
    """Every rank runs the same ticks in lock step, masked where it is idle: m·v + p - 1 forward and as many backward
    phases (m + v·p - 1 where m < p), each as long as that of the fullest chunk (docs/pipeline.md). The vocabulary is
    shared by all ranks; gradients are reduced, states updated and weights gathered once, after the last tick."""
    costs, pp, v, m = times.costs, parallel.pp, parallel.virtual_stages, microbatches(parallel, train)
    fused = kernel_of(costs.machine.platform, shape, parallel, train)[0] != BLOCKWISE
    sizes, work = device_sizes(parallel, shape), work_of(parallel, train, shape.width, fused)
    kernel_s = costs.efficiency.kernel_s
    time_of = {kind: times(kind, sizes, work) for kind, _ in shape.kinds}
    real, again = NOTHING, NOTHING
    for kind, count in shape.kinds:
        time = time_of[kind]
        real += (time.forward + time.backward).times(count * m / pp)
        again += time.again.times(count * m / pp)
    useful = (real + again).seconds(kernel_s)
    fullest = max(
        sum(count * _layer_s(time_of[kind], kernel_s) for kind, count in chunk) for chunk in chunks(shape, pp, v)
    )

    ticks = _ticks(parallel.schedule, pp, v, m)
    n = work.batch * work.seq_len // parallel.cp
    between = costs.item * n * shape.width / (parallel.tp if work.sequence_parallel else 1)
    stride = sizes.replicas * parallel.tp
    sends = 2 * ticks * costs.send(between, costs.members_inside(pp, stride) == pp) if pp > 1 else 0.0
    vocabulary, shared = _vocabulary(costs, shape, sizes, n, between)
    dense, experts = local_elements(shape, sizes)
    sharded = dense / sizes.replicas + experts / (parallel.dp * parallel.cp) if parallel.zero else dense + experts
    items = {
        "matmul": real.matmul,
        "attention": real.attention,
        "memory_bound": real.memory,
        "recompute": again.matmul + again.attention + again.memory,
        "tp": real.tp + again.tp,
        "cp": real.cp + again.cp,
        "ep": real.ep + again.ep,
        "pp": sends,
        "vocabulary": m * vocabulary,
        "dp": _replicas(costs, parallel, dense, experts),
        "bubble": (ticks - m * v) * fullest,
        "padding": max(0.0, m * v * fullest - useful),
        "optimizer": costs.memory(STATE_BYTES * sharded + 8 * (dense + experts)),
        "launch": (real.kernels + again.kernels) * kernel_s,
    }
    shown = {axis: (items[axis], items[axis]) for axis in ("tp", "cp", "ep", "pp", "dp")}
    return StepTime(items, {**shown, "vocabulary": (m * shared, m * shared)})


def _layer_s(time: LayerTime, kernel_s: float) -> float:
    return time.forward.seconds(kernel_s) + time.backward.seconds(kernel_s) + time.again.seconds(kernel_s)


def chunks(shape: ModelShape, pp: int, v: int) -> frozenset[tuple[tuple[LayerShape, int], ...]]:
    """The layers of each stage, by kind; a place without a layer computes what the stage's first does."""
    if len(shape.kinds) == 1:
        return frozenset({((shape.layers[0], Stages(len(shape.layers), pp, v).room),)})
    return _mixed_chunks(shape.layers, pp, v)


@cache
def _mixed_chunks(layers: tuple[LayerShape, ...], pp: int, v: int) -> frozenset[tuple[tuple[LayerShape, int], ...]]:
    stages, found, start = Stages(len(layers), pp, v), set(), 0
    for stage in range(stages.count):
        own = layers[start : start + stages.room - (stage >= stages.full)]
        start += len(own)
        found.add(tuple(Counter((*own, *own[:1] * (stages.room - len(own)))).items()))
    return frozenset(found)


def _ticks(schedule: str, pp: int, v: int, m: int) -> int:
    """Of the forward phase, and of the backward."""
    if schedule in SCHEDULES:
        return m * v + pp - 1 if m >= pp else m + v * pp - 1
    table = tick_table(make_schedule(schedule, pp, v, m))
    return max(table.forward_ticks, table.backward_ticks)


def _vocabulary(costs: Costs, shape: ModelShape, sizes: Sizes, n: int, between: float) -> tuple[float, float]:
    """Seconds of a microbatch's embedding, logits, loss and their gradients on each rank; and of communication alone.

    Over tp: the output's input is gathered and its gradient scattered, the embedding scattered and its gradient
    gathered; or two all-reduces, which are as much. Over pp: two activations and two gradients are handed to all ranks.
    A chunk's maximum and sums are left out, being a few bytes a token."""
    D, rows = shape.width, -(-shape.vocab_size // (sizes.pp * sizes.tp))
    products = costs.matmul(n, D, rows) + costs.matmul(n, rows, D) + costs.matmul(rows, n, D)
    sums = SUM_BYTES * loss_chunks(n, D, rows) * rows * D
    passes = costs.memory(LOGIT_BYTES * n * rows + sums + 12 * between)
    stride = sizes.replicas * sizes.tp
    shared = 4 * costs.gather(costs.item * n * D, sizes.tp, 1) + 4 * costs.all_reduce(between, sizes.pp, stride)
    return products + passes + shared, shared


def local_elements(shape: ModelShape, sizes: Sizes) -> tuple[float, float]:
    """Matrices' elements on one device: of those that all replicas share, and of experts."""
    blocks, outer = sizes.pp * sizes.tp, shape.outer_parameters / (sizes.pp * sizes.tp)
    return shape.dense_parameters / blocks + outer, shape.expert_parameters / (blocks * sizes.ep)


def replica_groups(parallel: Parallel, dense: float, experts: float) -> Iterator[tuple[float, int, int]]:
    """Elements on one device whose gradients are summed, over how many devices, and how far apart these are. Copies of
    an expert are ep · tp apart, or tp where they are of one cp group; the first says how many share a node."""
    dp, ep, cp, tp = parallel.dp, parallel.ep, parallel.cp, parallel.tp
    yield dense, dp * ep * cp, tp
    if experts:
        yield experts, dp * cp, ep * tp


def _replicas(costs: Costs, parallel: Parallel, dense: float, experts: float) -> float:
    """One reduction of float32 gradients, and with zero = 1 one gathering of the new weights."""
    element = 4 + costs.item if parallel.zero else 8
    groups = replica_groups(parallel, dense, experts)
    return sum(costs.gather(element * count, ranks, stride) for count, ranks, stride in groups)
