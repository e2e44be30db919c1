"""What a build says, read: memory beside the estimate, traffic by mesh axis, a simulated step, warnings. No jax."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from parallax.aot.builder import Built
from parallax.aot.simulate import Simulation, simulate
from parallax.aot.timeline import timeline
from parallax.aot.traffic import Traffic, traffic
from parallax.aot.turns import turns
from parallax.aot.warn import warnings
from parallax.environment import GPU_SHARE
from parallax.layout import AXES, Sizes, axis_sizes, kept_whole
from parallax.machine import Machine
from parallax.plan.estimate import GIB, Estimate, layout_facts
from parallax.schedule.order import make_schedule
from parallax.schedule.table import tick_table
from parallax.stages import Stages
from parallax.text import size


@dataclass(frozen=True)
class Report:
    built: Built
    predicted: Estimate
    traffic: tuple[Traffic, ...]
    simulation: Simulation
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.built.peak_bytes <= self.predicted.job.machine.hbm_bytes


def read(built: Built, predicted: Estimate, reason: str | None = None) -> Report:
    """`reason` is why attention does not run on the machine's own kernel, where that is so. Raises ValueError where the
    program's text cannot be read."""
    job = predicted.job
    parallel, mesh = job.parallel, {axis: axis_sizes(job.parallel)[axis] for axis in AXES}
    schedule = make_schedule(parallel.schedule, parallel.pp, parallel.virtual_stages, job.microbatches)
    line = timeline(built.program, mesh, job.machine, turns(tick_table(schedule)))
    flops = job.shape.train_flops_per_token(job.train.seq_len) * job.tokens
    return Report(
        built,
        predicted,
        tuple(traffic(line, mesh, job.machine)),
        simulate(line, mesh, job.machine, flops),
        (
            *filter(None, [reason]),
            *_tight(built, job.machine),
            *warnings(line, job.machine, built.log, _stacked(predicted)),
        ),
    )


def _tight(built: Built, machine: Machine) -> Iterator[str]:
    has = GPU_SHARE * machine.hbm_bytes
    if machine.platform == "gpu" and has < built.peak_bytes <= machine.hbm_bytes:
        needs = math.ceil(100 * built.peak_bytes / machine.hbm_bytes) / 100
        yield (
            f"{size(built.peak_bytes)} is more than the {size(has)} that a run takes of a GPU's memory; set "
            f"XLA_PYTHON_CLIENT_MEM_FRACTION={min(needs, 1):g}, or use a layout that needs less"
        )


def _stacked(predicted: Estimate) -> list[tuple[int, ...]]:
    """Shapes on one device of the stacked weight matrices."""
    job = predicted.job
    sizes = Sizes(axis_sizes(job.parallel), kept_whole(job.parallel, (kind for kind, _ in job.shape.kinds)))
    stages = Stages(len(job.shape.layers), job.parallel.pp, job.parallel.virtual_stages)
    places = stages.virtual_stages * stages.room
    return [
        (places, *sizes.local(weight.shape, weight.axes))
        for kind, _ in job.shape.kinds
        for weight in kind.weights
        if weight.decays
    ]


def to_json(report: Report) -> dict[str, Any]:
    """What `--json` prints: memory in GiB of one device, bytes and seconds of a step."""
    built, predicted, simulation = report.built, report.predicted, report.simulation
    return {
        "model": predicted.job.shape.name,
        "mesh": predicted.job.machine.name,
        "devices": predicted.job.devices,
        **layout_facts(predicted.job),
        "compile_s": built.compile_s,
        "memory_gib": {
            "arguments": built.arguments_bytes / GIB,
            "outputs": built.outputs_bytes / GIB,
            "temporaries": built.temporaries_bytes / GIB,
            "peak": built.peak_bytes / GIB,
        },
        "hbm_gib": predicted.job.machine.hbm_bytes / GIB,
        "fits": report.fits,
        "estimate_gib": {
            **{name: item / GIB for name, item in predicted.stages[0].items()},
            "total": predicted.peak_bytes / GIB,
        },
        "estimated_step_time_s": predicted.step_time_s if predicted.time is not None else None,
        "collectives": [
            {
                "axes": list(row.axes),
                "kind": row.kind,
                "count": row.count,
                "bytes": row.bytes,
                "exposed_bytes": row.exposed_bytes,
                "inside_node": row.inside,
                "time_s": row.time_s,
            }
            for row in report.traffic
        ],
        "simulated": {
            "step_time_s": simulation.step_time_s,
            "mfu": simulation.mfu,
            "time_s": simulation.time_s,
            "communication_s": simulation.communication_s,
            "notes": list(simulation.notes),
        },
        "buffers": [
            {"gib": b.size_bytes / GIB, "shape": b.shape, "name": b.name, "what": b.what, "source": b.source}
            for b in built.buffers
        ],
        "warnings": list(report.warnings),
    }
