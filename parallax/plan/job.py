"""A run file, or the options of a request, as a `Job` to price; what is wrong in them, at once. No jax."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from parallax.config import ConfigError, Model, RunConfig, either, show
from parallax.machine import Machine
from parallax.model_files import load_model
from parallax.plan.estimate import Job
from parallax.plan.shapes import SHAPES
from parallax.rules import check_experts, check_layout, check_machine, check_model, check_schedule
from parallax.shape import ModelShape
from parallax.validate import read_parts


def load_shape(model: Model) -> ModelShape:
    """Of a preset, of a file of the user's, or of a model that is here as data alone. Raises ConfigError."""
    if model.file or model.name not in SHAPES:
        try:
            return load_model(model)[1].shape()
        except ConfigError as error:
            if "is not a preset of models/" not in error.problems[0]:
                raise
            more = f"; estimates also know {either(SHAPES)}"
            raise ConfigError([error.problems[0] + more]) from None
    if model.overrides:
        given = ", ".join(f"model.{name} = {show(value)}" for name, value in model.overrides.items())
        raise ConfigError([f"{given}: {model.name} is here as data alone, without a model file; leave it out"])
    return SHAPES[model.name]


def read_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """The job of a run file. Raises ConfigError with every problem of what an estimate reads in it."""
    config, machine, shape, *_ = parts = read_parts(path, overrides, load_shape)
    problems = parts.with_rules(job_problems(config, shape, machine))
    if problems or shape is None or machine is None:
        raise ConfigError(problems)
    return Job(shape, machine, config.parallel, config.train)


def job_problems(config: RunConfig, shape: ModelShape | None, machine: Machine | None) -> Iterator[str]:
    """Rules between the keys that an estimate reads."""
    yield from check_layout(config)
    yield from check_schedule(config)
    if shape is not None:
        yield from check_model(config, shape)
        yield from check_experts(config, shape)
    if machine is not None:
        yield from check_machine(config, machine)
