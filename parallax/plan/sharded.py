"""What fully sharded weights (ZeRO-3, FSDP) would make of a model: priced, since not built, to say where it would win.
No jax."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from parallax.plan.costs import Costs
from parallax.plan.estimate import Job, memory_of
from parallax.plan.layer import PARALLAX, LayerTimes
from parallax.plan.search import REMATS, Request, layouts, micro_batches, train_of
from parallax.plan.step import device_sizes, local_elements, own_step, work_of


@dataclass(frozen=True)
class Sharded:
    """The fastest layout without a pipeline whose weights, gradients and states are all shared by the replicas.
    `exposed_step_time_s` is its time where nothing of its gathers and scatters hides."""

    dp: int
    cp: int
    tp: int
    micro_batch_size: int
    remat: str
    memory_bytes: float
    step_time_s: float
    exposed_step_time_s: float


def fully_sharded(request: Request) -> Sharded | None:
    """None where none fits. Every device holds its share of 18 bytes a parameter and two layers' gathered weights and
    gradients; in every microbatch a layer's weights are gathered for the forward and again for the backward, and its
    gradients scattered (Rajbhandari et al. 2020, arXiv 1910.02054), beside the layer before. What a layer's work does
    not hide is exposed."""
    dense = dataclasses.replace(request, pins={**request.pins, "pp": 1})
    times = LayerTimes(Costs(request.machine, request.precision), PARALLAX)
    costs, shape = times.costs, request.shape
    best: Sharded | None = None
    for parallel in layouts(dense):
        sizes, replicas = device_sizes(parallel, shape), parallel.dp * parallel.cp
        if parallel.ep > 1 or replicas == 1:
            continue
        elements = sum(local_elements(shape, sizes))
        layer = elements / len(shape.layers)
        gather = costs.gather(costs.item * layer, replicas, parallel.tp)
        scatter = costs.gather(4 * layer, replicas, parallel.tp)
        for micro in micro_batches(dense, parallel):
            for remat in REMATS:
                train = train_of(dense, micro, remat)
                items = memory_of(Job(shape, request.machine, parallel, train))[0]
                held = sum(items[name] for name in ("stash", "inboxes", "logits", "workspace"))
                memory = 18 * elements / replicas + 2 * (costs.item + 4) * layer + held
                if memory > request.budget_bytes:
                    continue
                work = work_of(parallel, train, shape.width)
                exposed, layers = 0.0, len(shape.layers)
                for kind, count in shape.kinds:
                    time, kernel_s = times(kind, sizes, work), costs.efficiency.kernel_s
                    backward = time.backward.seconds(kernel_s) + time.again.seconds(kernel_s)
                    hides = max(0.0, gather - time.forward.seconds(kernel_s)), max(0.0, gather + scatter - backward)
                    exposed += count * sum(hides)
                step = own_step(times, shape, parallel, train)
                m = request.global_batch_size // (parallel.dp * micro)
                work_s = step.total - step.items["dp"]
                total, slowest = work_s + m * exposed, work_s + m * layers * (2 * gather + scatter)
                if best is None or total < best.step_time_s:
                    best = Sharded(parallel.dp, parallel.cp, parallel.tp, micro, remat, memory, total, slowest)
                break
    return best
