"""A simulated step time of a scheduled program, and where the time goes. No jax.

`parallax.aot.timeline` says how the program is walked and `parallax.aot.roofline` what an instruction costs, and each
what it leaves out. The figures of a mesh file were not measured on its machine: the use is to compare programs, and to
find what a step waits for.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from parallax.aot.timeline import Timeline
from parallax.machine import Machine


@dataclass(frozen=True)
class Simulation:
    """`time_s` adds up to the step: by kind of work (matmul, attention, memory; kernels is their start and tail), and
    by axes of collectives ("tp", "pp+tp") what the compute waits for. `communication_s` is all of the collectives' time
    by axes, hidden or not."""

    step_time_s: float
    mfu: float | None
    time_s: dict[str, float]
    communication_s: dict[str, float]
    notes: tuple[str, ...]


def simulate(line: Timeline, mesh: Mapping[str, int], machine: Machine, model_flops: float | None) -> Simulation:
    """`model_flops` are those of a step on all devices; None leaves the MFU out, which is against the first peak of
    the mesh file (bfloat16)."""
    time_s: defaultdict[str, float] = defaultdict(float)
    communication_s: defaultdict[str, float] = defaultdict(float)
    unknown: Counter[str] = Counter()
    for event in line.events:
        times = float(event.turns)
        if one := event.collective:
            time_s["+".join(one.axes)] += times * event.exposed_s
            communication_s["+".join(one.axes)] += times * event.seconds
        elif event.instruction.op.endswith("-done"):
            time_s["memory"] += times * event.exposed_s
        else:
            time_s[event.work.kind] += times * event.work.seconds
            time_s["kernels"] += times * event.work.kernel_s
            if event.work.unknown:
                unknown[event.work.unknown] += 1
    notes = [
        f"{target}, a custom call ({count} in the program), is not known: counted by its bytes"
        for target, count in unknown.items()
    ]
    notes += [f"the loop {name} is not in the tick table: counted as one turn" for name in line.unknown_loops]
    peak = next(iter(machine.peak_flops.values()), None)
    mfu = None
    if model_flops is not None and peak:
        mfu = model_flops / (line.step_time_s * math.prod(mesh.values()) * peak)
    return Simulation(line.step_time_s, mfu, dict(time_s), dict(communication_s), tuple(notes))
