"""Megatron-LM's scheme priced with the same costs: memory and time of each stage. No jax.

1F1B with as many microbatches in flight as stages follow, the embedding on the first stage and the head on the last
(Narayanan et al. 2021, arXiv 2104.04473), no, selective or full recomputation (Korthikanti et al. 2022, arXiv
2205.05198). Published measurements are of this scheme, and it is what a reader of its guides has in mind.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from parallax.config import Parallel, Train
from parallax.plan.costs import Costs
from parallax.plan.layer import NOTHING, LayerTime, LayerTimes
from parallax.plan.step import StepTime, device_sizes, microbatches, replica_groups, work_of
from parallax.shape import LayerShape, ModelShape

LOGIT_BYTES = 60  # a logit: contiguous 8, float32 6, maximum 4, subtract 8, exp 8, sum 4, divide 8; backward 14
STATE_BYTES = 66  # a parameter: gradient to float32 6, unscale 8, norm 4, clip 8, Adam 28, weight back 6, clear 6
SMOOTH = 2, 8  # see `_with_host`: with tensor parallelism, and without


@dataclass(frozen=True)
class Switches:
    """What Megatron-LM's options change. `reduces_fp32`: gradients cross the network in float32 (its default for
    bfloat16) and not in 16 bits; `overlaps_dp`: they do so beside the backward, and weights come beside the forward."""

    reduces_fp32: bool
    overlaps_dp: bool


# Memory


Kinds = tuple[tuple[LayerShape, int], ...]  # layers that differ, and how many of each


def stage_layers(shape: ModelShape, parallel: Parallel) -> tuple[Kinds, ...]:
    """The layers of each pipeline rank; where they do not divide, the first ranks hold one more."""
    base, more = divmod(len(shape.layers), parallel.pp)
    stops = list(accumulate(base + (rank < more) for rank in range(parallel.pp)))
    stages = [shape.layers[start:stop] for start, stop in pairwise([0, *stops])]
    return tuple(tuple(Counter(layers).items()) for layers in stages)


def in_flight(parallel: Parallel, m: int, rank: int) -> float:
    """Microbatches that a rank holds at most, in units of its whole stage: p - r, or with v chunks the warm-up of
    2(p - r - 1) + (v - 1)p chunks and one more."""
    pp, v = parallel.pp, parallel.virtual_stages
    if v == 1:
        return min(m, pp - rank)
    return min(m * v, 2 * (pp - rank - 1) + (v - 1) * pp + 1) / v


def megatron_memory(
    shape: ModelShape, parallel: Parallel, train: Train, scores: bool, head: bool = True
) -> tuple[dict[str, float], ...]:
    """Bytes on one device, by item, of each pipeline rank: bfloat16 weights, float32 gradients, masters and moments
    (18 bytes a parameter; 6 + 12/dp with the distributed optimizer, which `zero = 1` stands for), activations in
    flight, logits of the last stage. `scores`: attention keeps its scores, as without a fused kernel. `head = False`
    leaves embedding and head out, as Korthikanti et al. do in figure 1."""
    sizes, m, tp, pp = device_sizes(parallel, shape), microbatches(parallel, train), parallel.tp, parallel.pp
    n = train.micro_batch_size * train.seq_len // parallel.cp
    D, split = shape.width, parallel.tp if parallel.sequence_parallel else 1
    replicas = parallel.dp * parallel.ep * parallel.cp if parallel.zero else 1
    expert_replicas = parallel.dp * parallel.cp if parallel.zero else 1
    ranks = []
    for rank, layers in enumerate(stage_layers(shape, parallel)):
        dense = experts = 0.0
        for kind, count in layers:
            for weight in kind.weights:
                size = count * math.prod(sizes.local(weight.shape, weight.axes))
                dense, experts = (dense, experts + size) if "experts" in weight.axes else (dense + size, experts)
        if head:
            dense += _outer(shape, rank == 0, rank == pp - 1, pp) / tp
        kept = sum(count * layer_activations(kind, shape, train, n, tp, split, scores) for kind, count in layers)
        peak = 0.0
        if train.remat == "full":
            kept = sum(count for _, count in layers) * 2 * n * D / split
            peak = max(layer_activations(kind, shape, train, n, tp, split, scores, remat="none") for kind, _ in layers)
        sharded = dense / replicas + experts / expert_replicas
        ranks.append(
            {
                "weights": 2 * (dense + experts),
                "masters": 4 * sharded,
                "moments": 8 * sharded,
                "gradients": 4 * (dense + experts),
                "activations": in_flight(parallel, m, rank) * kept,
                "logits": 10.0 * n * shape.vocab_size / tp if head and rank == pp - 1 else 0.0,
                "workspace": peak + (4 * n * D / split * 2 if pp > 1 else 0.0),  # and what is sent and received
            }
        )
    return tuple(ranks)


@cache
def _outer(shape: ModelShape, first: bool, last: bool, pp: int) -> int:
    """Weights outside the layers on a stage; a tied output matrix has a copy on the last one."""
    embed, head = sum(w.size for w in shape.embed), sum(w.size for w in shape.head)
    copy = shape.vocab_size * shape.width if shape.tied and pp > 1 else 0
    return first * embed + last * (head + copy)


def layer_activations(
    layer: LayerShape, shape: ModelShape, train: Train, n: int, tp: int, split: int, scores: bool, remat: str = ""
) -> float:
    """Bytes that one layer keeps for its backward, 16-bit, of n tokens on a rank (Korthikanti et al. 2022, section 4,
    and the same count for grouped queries and SwiGLU). Without sequence parallelism (`split = 1`) the inputs of norms
    and column-parallel products, and dropout masks, are whole on every tensor-parallel rank: sbh(10 + 24/t) of sbh·34.
    Models of learned positions are taken to train with dropout, whose masks cost a byte."""
    dropout, D, C = shape.max_positions > 0, shape.width, layer.head_size
    Cv = layer.value_head_size or C
    F = layer.experts_per_token * layer.ff + layer.shared_ff if layer.experts else layer.ff
    whole = D * (8 + 2 * dropout)  # inputs of two norms and of two products, two masks
    parts = 2 * layer.heads * (C + Cv) + 2 * layer.kv_heads * (C + Cv)  # queries, attention's output, keys and values
    parts += (4 if layer.ff_matrices == 2 else 6) * F
    total = n * (whole / split + parts / tp)
    if scores and (remat or train.remat) == "none":
        total += n * layer.heads / tp * train.seq_len * (4 + dropout)  # softmax, its mask, and after dropout
    return total


# Time


def megatron_step(
    times: LayerTimes, switches: Switches, shape: ModelShape, parallel: Parallel, train: Train
) -> StepTime:
    """m times the slowest stage, and once the others (over v) to fill and drain the pipeline; then the reduction of
    gradients and the update."""
    costs, pp, v, tp, m = times.costs, parallel.pp, parallel.virtual_stages, parallel.tp, microbatches(parallel, train)
    sizes, work = device_sizes(parallel, shape), work_of(parallel, train, shape.width)
    n, item, D = work.batch * work.seq_len // parallel.cp, costs.item, shape.width
    kernel_s = costs.efficiency.kernel_s
    stages = stage_layers(shape, parallel)
    time_of = {kind: times(kind, sizes, work) for kind, _ in shape.kinds}
    waits = {kind: _wait(times.software.host_s, time, kernel_s, tp) for kind, time in time_of.items()}
    layers_s = [_over(layers, lambda kind: _seconds(time_of[kind], kernel_s) + waits[kind]) for layers in stages]

    replicas = sizes.replicas
    crosses = costs.members_inside(pp, replicas * tp) < pp
    send = costs.send(item * n * D / (tp if crosses or work.sequence_parallel else 1), not crosses) if pp > 1 else 0.0
    if pp > 1 and crosses and not work.sequence_parallel:  # sent in parts, gathered in the node (arXiv 2104.04473, 4.1)
        send += costs.gather(item * n * D, tp, 1)
    sends = 2 * v * send
    embed, head, shared = _ends(costs, shape, n, tp)
    ends = [embed * (rank == 0) + head * (rank == pp - 1) for rank in range(pp)]
    stage_s = [a + b + sends for a, b in zip(layers_s, ends, strict=True)]
    top = max(range(pp), key=stage_s.__getitem__)

    # In the pipeline's items, the slowest stage's work
    real, again = NOTHING, NOTHING
    for kind, count in stages[top]:
        real += (time_of[kind].forward + time_of[kind].backward).times(count * m)
        again += time_of[kind].again.times(count * m)
    hidden = m * _over(stages[top], lambda kind: time_of[kind].overlapped)
    dp, dp_exposed, optimizer = _update(costs, switches, shape, parallel, stages[0], layers_s[0])
    shares = shape.tied and pp > 1  # first and last stage each hold the matrix, and sum its gradients
    apart = costs.machine.devices_per_node if crosses else replicas * tp
    tied = costs.all_reduce(item * shape.vocab_size * D / tp, 2, apart) if shares else 0.0
    items = {
        "matmul": real.matmul,
        "attention": real.attention,
        "memory_bound": real.memory,
        "recompute": again.matmul + again.attention + again.memory,
        "tp": real.tp + again.tp - hidden,
        "cp": real.cp + again.cp,
        "ep": real.ep + again.ep,
        "pp": m * sends,
        "vocabulary": m * ends[top] + tied,
        "dp": dp_exposed,
        "bubble": (sum(stage_s) - stage_s[top]) / v,
        "padding": 0.0,
        "optimizer": optimizer,
        "launch": (real.kernels + again.kernels) * kernel_s + m * _over(stages[top], waits.__getitem__),
    }
    communication = {
        "tp": (real.tp + again.tp, items["tp"]),
        **{axis: (items[axis], items[axis]) for axis in ("cp", "ep", "pp")},
        "dp": (dp, dp_exposed),
        "vocabulary": (m * shared + tied, m * shared + tied),
    }
    return StepTime(items, communication)


def _over(layers: Kinds, seconds: Callable[[LayerShape], float]) -> float:
    return sum(count * seconds(kind) for kind, count in layers)


def _seconds(time: LayerTime, kernel_s: float) -> float:
    return (time.forward + time.backward + time.again).seconds(kernel_s) - time.overlapped


def _wait(host_s: float, time: LayerTime, kernel_s: float, tp: int) -> float:
    """Seconds of a layer in which the device waits for its host."""
    forward, backward = time.forward.seconds(kernel_s), _seconds(time, kernel_s) - time.forward.seconds(kernel_s)
    launches = time.forward.kernels, time.backward.kernels + time.again.kernels
    more = 2 * (tp > 1)  # of the collectives
    return sum(
        _with_host(device_s, (kernels + more) * host_s, tp) - device_s
        for device_s, kernels in zip((forward, backward), launches, strict=True)
    )


def _with_host(device_s: float, host_s: float, tp: int) -> float:
    """The longer of what the device and its host need, rounded off (a p-norm): kernels differ, and in some the device
    waits while in others the host is ahead. More so with tensor parallelism, where a rank that waits makes all wait."""
    power = SMOOTH[0] if tp > 1 else SMOOTH[1]
    return (device_s**power + host_s**power) ** (1 / power)


def _ends(costs: Costs, shape: ModelShape, n: int, tp: int) -> tuple[float, float, float]:
    """Seconds a microbatch of the embedding, of head and loss, and of the communication in both."""
    D, rows, item = shape.width, shape.vocab_size / tp, costs.item
    half = costs.gather(item * n * D, tp, 1)
    sums = 3 * costs.all_reduce(4 * n, tp, 1)  # maximum, target and sum of a token's logits
    products = costs.matmul(n, D, rows) + costs.matmul(n, rows, D) + costs.matmul(rows, n, D)
    head = products + costs.memory(LOGIT_BYTES * n * rows) + 2 * half + sums
    return costs.memory(16 * n * D) + 2 * half, head, 2 * half + sums


def _update(
    costs: Costs,
    switches: Switches,
    shape: ModelShape,
    parallel: Parallel,
    layers: Kinds,
    stage_s: float,
) -> tuple[float, float, float]:
    """Seconds of dp's communication, of its exposed part, and of the optimizer, on the first stage."""
    sizes = device_sizes(parallel, shape)
    dense = experts = 0.0
    for kind, count in layers:
        for weight in kind.weights:
            size = count * math.prod(sizes.local(weight.shape, weight.axes))
            dense, experts = (dense, experts + size) if "experts" in weight.axes else (dense + size, experts)
    dense += _outer(shape, True, parallel.pp == 1, parallel.pp) / parallel.tp
    reduced, item = 4 if switches.reduces_fp32 else 2, costs.item
    reduce = gather = 0.0
    for count, ranks, stride in replica_groups(parallel, dense, experts):
        reduce += costs.gather(reduced * count, ranks, stride)
        gather += costs.gather((item if parallel.zero else reduced) * count, ranks, stride)
    exposed = reduce + gather
    if switches.overlaps_dp:  # beside the last microbatch's backward and the first one's forward
        exposed = max(0.0, reduce - 2 / 3 * stage_s) + max(0.0, gather - 1 / 3 * stage_s)
    sharded = dense / sizes.replicas + experts / (parallel.dp * parallel.cp) if parallel.zero else dense + experts
    return reduce + gather, exposed, costs.memory(STATE_BYTES * sharded)
