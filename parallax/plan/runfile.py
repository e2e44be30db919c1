"""A plan as a run file, with its reasons as comments. No jax."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence

from parallax.config import MeshChoice, Model, Optimizer, show
from parallax.plan.estimate import GIB
from parallax.plan.explain import Step
from parallax.plan.search import Candidate, Request
from parallax.text import seconds

FIRST_LINE = "# Written by parallax plan"
STEPS = 1000


def run_file(
    request: Request, best: Candidate, model: Model, mesh: MeshChoice, steps: Sequence[Step], tokens: float | None
) -> str:
    """TOML that `train`, `estimate` and `compile` take. What a layout does not decide is left at its default."""
    p, train = best.parallel, best.train
    parallel = {axis: getattr(p, axis) for axis in ("dp", "pp", "ep", "cp", "tp") if getattr(p, axis) > 1}
    if p.pp > 1:
        parallel |= {"virtual_stages": p.virtual_stages, "schedule": p.schedule}
    if p.cp > 1:
        parallel |= {"context": p.context}
    parallel |= {key: value for key, value in request.pins.items() if hasattr(p, key)}
    count = steps_for(request, tokens) if tokens else STEPS
    sections = {
        "model": {"name": model.name} | ({"file": model.file} if model.file else {}) | model.overrides,
        "parallel": parallel,
        "mesh": {"file": mesh.file} if mesh.file else {"name": mesh.name},
        "train": {
            "steps": count,
            "seq_len": train.seq_len,
            "global_batch_size": train.global_batch_size,
            "micro_batch_size": train.micro_batch_size,
            "remat": train.remat,
            "precision": train.precision,
        },
        "optimizer": {"warmup_steps": min(count // 100, 2000)},
        "data": {"source": "synthetic"},
        "log": {"dir": f"runs/{model.name}"},
    }
    comments = {
        ("train", "steps"): f"{tokens:.3g} tokens" if tokens else "as long as you like",
        ("data", "source"): "put your tokens here (docs/training.md)",
        ("optimizer", "warmup_steps"): f"learning_rate is {Optimizer().learning_rate} unless given",
    }
    lines = [
        _one_line(f"{FIRST_LINE}: {request.shape.name} on {request.devices:,} x {request.machine.name}."),
        f"# Predicted: {seconds(best.step_time_s)} a step, {best.memory_bytes / GIB:.1f} GiB of "
        f"{request.machine.hbm_bytes / GIB:.1f} a device.",
        "#",
    ]
    for step in steps:
        lines += _wrapped(f"{step.question} {step.answer}")
        for reason in step.reasons:
            lines += _wrapped(f"- {reason}", indent="  ")
    for section, table in sections.items():
        lines += ["", f"[{section}]"]
        for key, value in table.items():
            comment = comments.get((section, key))
            lines.append(f"{key} = {show(value)}" + (f"  # {comment}" if comment else ""))
    return "\n".join(lines) + "\n"


def steps_for(request: Request, tokens: float) -> int:
    """Steps in which a run sees at least so many tokens."""
    return math.ceil(tokens / (request.global_batch_size * request.seq_len))


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        _one_line(text), 116, initial_indent=f"# {indent}", subsequent_indent=f"# {indent}{'  ' if indent else ''}"
    )


def _one_line(text: str) -> str:
    """A model file may name its model as it likes; a comment of TOML holds no control characters."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text)
