"""What a layout takes: memory of every stage and time of a step, by item, in one scheme or the other. No jax."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from parallax.config import Parallel, Train
from parallax.kernels import kernel_of
from parallax.layout import AXES
from parallax.machine import Machine
from parallax.plan.costs import Costs
from parallax.plan.layer import MEGATRON, MEGATRON_CORE, PARALLAX, LayerTimes
from parallax.plan.megatron import Switches, megatron_memory, megatron_step
from parallax.plan.memory import own_memory
from parallax.plan.step import StepTime, microbatches, own_step
from parallax.shape import ModelShape

FRAMEWORKS = ("parallax", "megatron")
GIB = 2**30
MFU_FLOPS = "3 x forward: 2 a weight and token, output matrix included, and causal attention; no recomputation"
HFU_FLOPS = "the same, and what the backward computes again (remat)"


@dataclass(frozen=True)
class Job:
    """What is to be trained, on what, and how."""

    shape: ModelShape
    machine: Machine
    parallel: Parallel
    train: Train

    @property
    def devices(self) -> int:
        parallel = self.parallel
        return parallel.pp * parallel.dp * parallel.ep * parallel.cp * parallel.tp

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.train.global_batch_size * self.train.seq_len

    @property
    def microbatches(self) -> int:
        return microbatches(self.parallel, self.train)


@dataclass(frozen=True)
class Estimate:
    """`stages` has the bytes of a device of each pipeline rank, by item. `time` is None where the machine has no speed
    (emulated devices) or is not asked for."""

    job: Job
    framework: str
    stages: tuple[dict[str, float], ...]
    time: StepTime | None

    @property
    def stage_bytes(self) -> tuple[float, ...]:
        return tuple(sum(items.values()) for items in self.stages)

    @property
    def peak_bytes(self) -> float:
        """Of the fullest stage."""
        return max(self.stage_bytes)

    @property
    def fits(self) -> bool | None:
        """None where the devices share the host's memory."""
        hbm = self.job.machine.hbm_bytes
        return self.peak_bytes <= hbm if hbm else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What slows a layout down without need."""
        job = self.job
        if self.framework != "parallax":
            return ()
        _, reason = kernel_of(job.machine.platform, job.shape, job.parallel, job.train)
        return (reason,) if reason else ()

    @property
    def step_time_s(self) -> float:
        assert self.time is not None
        return self.time.total

    @property
    def tokens_per_s(self) -> float:
        return self.job.tokens / self.step_time_s

    @property
    def mfu(self) -> float:
        return self._utilization(self.job.shape.train_flops_per_token(self.job.train.seq_len))

    @property
    def hfu(self) -> float:
        shape, seq_len, remat = self.job.shape, self.job.train.seq_len, self.job.train.remat
        again = sum(
            (remat == "full") * layer.matmul_flops_per_token()
            + (remat != "none") * layer.attention_flops_per_token(seq_len)
            for layer in shape.layers
        )
        return self._utilization(shape.train_flops_per_token(seq_len) + again)

    def _utilization(self, flops_per_token: float) -> float:
        peak = self.job.machine.peak_flops[self.job.train.precision]
        return flops_per_token * self.tokens_per_s / (peak * self.job.devices)


def uses_scores(machine: Machine) -> bool:
    """Whether Megatron-LM of the chip's time is meant that has no fused attention: that of the A100's publications."""
    return machine.name.startswith("a100")


def memory_of(job: Job, framework: str = "parallax") -> tuple[dict[str, float], ...]:
    if framework == "parallax":
        kernel, _ = kernel_of(job.machine.platform, job.shape, job.parallel, job.train)
        return own_memory(job.shape, job.parallel, job.train, kernel)
    return megatron_memory(job.shape, job.parallel, job.train, uses_scores(job.machine))


def time_of(job: Job, framework: str = "parallax") -> StepTime | None:
    if job.machine.efficiency is None:
        return None
    costs = Costs(job.machine, job.train.precision)
    if framework == "parallax":
        return own_step(LayerTimes(costs, PARALLAX), job.shape, job.parallel, job.train)
    old = uses_scores(job.machine)
    software, switches = MEGATRON if old else MEGATRON_CORE, Switches(reduces_fp32=not old, overlaps_dp=not old)
    return megatron_step(LayerTimes(costs, software), switches, job.shape, job.parallel, job.train)


def estimate(job: Job, framework: str = "parallax") -> Estimate:
    return Estimate(job, framework, memory_of(job, framework), time_of(job, framework))


def layout_facts(job: Job) -> dict[str, Any]:
    """The keys of [parallel] and [train] that a layout decides, for JSON."""
    parallel, train = job.parallel, job.train
    keys = (*AXES, "virtual_stages", "schedule", "sequence_parallel", "zero", "context")
    return {
        "parallel": {key: getattr(parallel, key) for key in keys},
        "train": {
            key: getattr(train, key)
            for key in ("seq_len", "global_batch_size", "micro_batch_size", "remat", "precision")
        },
    }


def to_json(estimate: Estimate) -> dict[str, Any]:
    """What `--json` prints. Times in seconds, memory in GiB of one device; `stages` are pipeline ranks."""
    job, time = estimate.job, estimate.time
    stages = [
        {
            "rank": rank,
            "total_gib": sum(items.values()) / GIB,
            **{f"{name}_gib": size / GIB for name, size in items.items()},
        }
        for rank, items in enumerate(estimate.stages)
    ]
    return {
        "model": job.shape.name,
        "parameters": job.shape.parameters,
        "mesh": job.machine.name,
        "framework": estimate.framework,
        "devices": job.devices,
        **layout_facts(job),
        "microbatches": job.microbatches,
        "step_time_s": time and time.total,
        "tokens_per_s": time and estimate.tokens_per_s,
        "mfu": time and estimate.mfu,
        "hfu": time and estimate.hfu,
        "mfu_flops": MFU_FLOPS,
        "hfu_flops": HFU_FLOPS,
        "fits": estimate.fits,
        "memory_gib": estimate.peak_bytes / GIB,
        "hbm_gib": job.machine.hbm_bytes / GIB if job.machine.hbm_bytes else None,
        "stages": stages,
        "time_s": time and time.items,
        "communication_s": time and {axis: {"total": a, "exposed": b} for axis, (a, b) in time.communication.items()},
        "notes": list(estimate.notes),
    }


def with_parallel(job: Job, **keys: Any) -> Job:
    return dataclasses.replace(job, parallel=dataclasses.replace(job.parallel, **keys))


def with_train(job: Job, **keys: Any) -> Job:
    return dataclasses.replace(job, train=dataclasses.replace(job.train, **keys))
