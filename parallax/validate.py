"""A run file read, checked against itself, its model and its machine, with every problem found (see `parallax.rules`).
No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

from parallax.config import SECTIONS, ConfigError, Model, RunConfig, build, either, read
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
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A run file whose every check has passed."""

    config: RunConfig
    model_module: ModuleType
    model_config: Any
    shape: ModelShape
    machine: Machine


class Parts(NamedTuple, Generic[T]):
    """A run file, its machine and what `load` makes of its [model]: None where `problems` says why not."""

    config: RunConfig
    machine: Machine | None
    model: T | None
    problems: list[str]
    by_key: dict[str, str]

    def with_rules(self, broken: Iterable[str]) -> list[str]:
        """All problems, with those of rules between keys. A wrong key was replaced by its default: what follows from
        that default is not the user's problem."""
        return [*self.problems, *(line for line in broken if not any(wrong in line for wrong in self.by_key))]


def read_parts(path: str | Path, overrides: Sequence[str], load: Callable[[Model], T]) -> Parts[T]:
    """Reads a run file and its machine, and loads its model. A ConfigError of machine or `load` is among the problems;
    one is raised where there is no run file to read."""
    config, by_key = read(path, overrides)
    problems, machine, model = list(by_key.values()), None, None
    try:
        machine = load_machine(config.mesh)
    except ConfigError as error:
        problems += error.problems
    if not {"model", "model.name", "model.file"} & by_key.keys():
        try:
            model = load(config.model)
        except ConfigError as error:
            problems += error.problems
    return Parts(config, machine, model, problems, by_key)


def resolve(path: str | Path, overrides: Sequence[str] = ()) -> Resolved:
    """Reads and checks a run file, its model file and its machine. Raises ConfigError with every problem found."""
    parts = read_parts(path, overrides, _model_of)
    config, machine, model = parts[:3]
    shape = model[2] if model else None
    broken = [
        *check_built(config),
        *check_layout(config),
        *check_schedule(config),
        *check_sources(config.data),
        *check_checkpoints(config),
        *check_log(config),
    ]
    if shape is not None:
        broken += check_model(config, shape)
    if machine is not None:
        broken += check_machine(config, machine)
    if machine is not None and machine.platform == "cpu":
        broken += check_devices(config, None, shape)
    problems = parts.with_rules(broken)
    if problems or machine is None or model is None:
        raise ConfigError(problems)
    return Resolved(config, *model, machine)


def _model_of(model: Model) -> tuple[ModuleType, Any, ModelShape]:
    module, model_config = load_model(model)
    return module, model_config, model_config.shape()


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
