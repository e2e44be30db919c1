"""A run file read, checked against itself, its model and its machine, with every problem found (see `parallax.rules`).
No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from parallax.config import SECTIONS, ConfigError, RunConfig, build, either, read
from parallax.layout import AXES
from parallax.machine import Machine, load_machine
from parallax.model_files import load_model
from parallax.rules import (
    check_built,
    check_checkpoints,
    check_layout,
    check_log,
    check_machine,
    check_model,
    check_schedule,
    check_sources,
)
from parallax.shape import ModelShape

MAX_EMULATED_DEVICES = 512


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A run file whose every check has passed."""

    config: RunConfig
    model_module: ModuleType
    model_config: Any
    shape: ModelShape
    machine: Machine


def resolve(path: str | Path, overrides: Sequence[str] = ()) -> Resolved:
    """Reads and checks a run file, its model file and its machine. Raises ConfigError with every problem found."""
    config, by_key = read(path, overrides)
    problems = list(by_key.values())
    machine = module = model_config = shape = None
    try:
        machine = load_machine(config.mesh)
    except ConfigError as error:
        problems += error.problems
    if not {"model", "model.name", "model.file"} & by_key.keys():
        try:
            module, model_config = load_model(config.model)
            shape = model_config.shape()
        except ConfigError as error:
            problems += error.problems
    across = [
        *check_built(config),
        *check_layout(config),
        *check_schedule(config),
        *check_sources(config.data),
        *check_checkpoints(config),
        *check_log(config),
    ]
    if shape is not None:
        across += check_model(config, shape)
    if machine is not None:
        across += check_machine(config, machine)
    if machine is not None and machine.platform == "cpu":
        across += check_devices(config, None, shape)
    # A wrong key was replaced by its default: what follows from that default is not the user's problem.
    problems += [line for line in across if not any(wrong in line for wrong in by_key)]
    if problems:
        raise ConfigError(problems)
    assert machine is not None and module is not None and shape is not None
    return Resolved(config, module, model_config, shape, machine)


def check(config: RunConfig, shape: ModelShape, machine: Machine) -> list[str]:
    """Every problem of a configuration, also of one that was built in Python and not read from a file."""
    keys = [
        problem
        for name, section in SECTIONS.items()
        for problem in build(section, dataclasses.asdict(getattr(config, name)), f"{name}.")[1].values()
    ]
    return keys or [
        *check_built(config),
        *check_layout(config),
        *check_schedule(config),
        *check_sources(config.data),
        *check_checkpoints(config),
        *check_log(config),
        *check_model(config, shape),
        *check_machine(config, machine),
    ]


def check_devices(config: RunConfig, available: int | None, shape: ModelShape | None = None) -> list[str]:
    """The device equation. `available` None: emulated devices, as many as the layout asks for, up to 512."""
    fits = (lambda n: n == available) if available is not None else (lambda n: n <= MAX_EMULATED_DEVICES)
    if fits(config.devices):
        return []
    product = " x ".join(f"{axis} {getattr(config.parallel, axis)}" for axis in AXES)
    limit = f"{available} are available" if available is not None else f"at most {MAX_EMULATED_DEVICES} are emulated"
    # A schedule from a file holds for its own pp and, with the batch as it is, dp.
    axes = ("tp",) if config.parallel.schedule.endswith(".csv") else ("dp", "pp", "tp")
    nearest = [
        f"parallel.{axis} = {size}"
        for axis in axes
        if (size := _nearest_size(config, axis, fits, available or MAX_EMULATED_DEVICES, shape))
    ]
    use = either(nearest) if nearest else f"sizes whose product is {available or MAX_EMULATED_DEVICES}"
    return [f"parallel: devices = {product} = {config.devices}, but {limit}; use {use}"]


def _nearest_size(
    config: RunConfig, axis: str, fits: Callable[[int], bool], most: int, shape: ModelShape | None
) -> int | None:
    """The size of one axis nearest to the given one that makes the devices fit and breaks no rule."""
    given = getattr(config.parallel, axis)
    for size in sorted(range(1, most + 1), key=lambda size: abs(size - given)):
        if fits(config.devices // given * size):
            parallel = dataclasses.replace(config.parallel, **{axis: size})
            candidate = dataclasses.replace(config, parallel=parallel)
            if not any(check_layout(candidate)) and not (shape and any(check_model(candidate, shape))):
                return size
    return None
