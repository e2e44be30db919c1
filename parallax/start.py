"""What is checked and opened before a run's first step: where it starts, its data, its devices and its programs."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from parallax.checkpoint import Checkpoints, check_data, check_identity, check_weights
from parallax.config import SCHEDULES, ConfigError, show
from parallax.data import Data, open_data
from parallax.mesh import make_mesh
from parallax.metrics import say
from parallax.model import Model
from parallax.program import Program
from parallax.schedule.simulate import lockstep_warning
from parallax.validate import Resolved, check_devices


@dataclass(frozen=True, eq=False)
class Start:
    """A run that can start. `first` steps and `samples` samples are behind it already."""

    resolved: Resolved
    program: Program
    data: Data
    checkpoints: Checkpoints
    first: int
    samples: int
    resume: bool


def prepare(resolved: Resolved, resume: bool) -> Start:
    """Compiles nothing and changes nothing. Raises ConfigError where the run cannot start (see `train`)."""
    config = resolved.config
    checkpoints = Checkpoints(Path(config.log.dir) / "checkpoints")
    model = Model(resolved.model_module, resolved.model_config, resolved.shape, config.train.remat)
    facts = _facts_to_resume(resolved, model, checkpoints) if resume else _check_unused(resolved, checkpoints)
    data = _open(resolved)
    if resume:
        check_data(data.fingerprint, facts["data"], checkpoints.path(facts["step"]))
    program = Program(config, model, _mesh(resolved))
    if config.parallel.schedule not in SCHEDULES and (warning := lockstep_warning(program.table)):
        say(f"warning: {warning}")
    return Start(resolved, program, data, checkpoints, facts["step"], facts["samples"], resume)


def _check_unused(resolved: Resolved, checkpoints: Checkpoints) -> dict[str, Any]:
    """The facts of a run that begins. Raises ConfigError where `log.dir` holds another one."""
    folder, where = Path(resolved.config.log.dir), f"log.dir = {show(resolved.config.log.dir)}"
    if folder.exists() and not folder.is_dir():
        raise ConfigError([f"{where} is a file; use a folder that is empty or new"])
    if folder.is_dir() and any(folder.iterdir()):
        whole = checkpoints.steps()
        way = "use --resume to go on from its checkpoint" if whole else "it has no checkpoint; delete it"
        raise ConfigError([f"{where} is not empty; {way}, or use another log.dir"])
    return {"step": 0, "samples": 0}


def _facts_to_resume(resolved: Resolved, model: Model, checkpoints: Checkpoints) -> dict[str, Any]:
    """Of the newest complete checkpoint. Raises ConfigError where this run cannot go on from it."""
    config, where = resolved.config, f"log.dir = {show(resolved.config.log.dir)}"
    steps = checkpoints.steps()
    if not steps:
        raise ConfigError([f"{where} has no complete checkpoint to resume from; delete it and start without --resume"])
    step, path = steps[-1], checkpoints.path(steps[-1])
    facts = checkpoints.facts(step)
    check_identity(resolved, facts["identity"], path)
    check_weights(model.weight_shapes, facts["weights"], path)
    if config.train.steps < step:
        raise ConfigError([f"train.steps = {config.train.steps} is less than the {step} of {path}; use {step} or more"])
    if config.train.steps != facts["train_steps"] and config.optimizer.schedule != "constant":
        say(
            f"warning: train.steps = {config.train.steps} was {facts['train_steps']}: from here on the learning rate "
            f"follows the {config.optimizer.schedule} schedule to the new end"
        )
    return facts


def lock(folder: Path) -> int:
    """Keeps other runs out of a folder until this process ends. Raises ConfigError where another one is in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        message = f"log.dir = {show(str(folder))} is in use by another run; wait for it, or use another log.dir"
        raise ConfigError([message]) from error
    return descriptor


def _open(resolved: Resolved) -> Data:
    train = resolved.config.train
    data = open_data(
        resolved.config.data,
        seq_len=train.seq_len,
        global_batch_size=train.global_batch_size,
        vocab_size=resolved.shape.vocab_size,
        seed=train.seed,
    )
    most = data.held_out.max_batches
    if train.eval_batches > most:
        raise ConfigError([f"train.eval_batches = {train.eval_batches} is more than are held out; use {most} or less"])
    return data


def _mesh(resolved: Resolved) -> Mesh:
    config, machine = resolved.config, resolved.machine
    try:
        platform = jax.default_backend()
    except RuntimeError as error:  # JAX_PLATFORMS names what is not there
        raise ConfigError([f"jax finds no devices: {str(error).splitlines()[0]}"]) from error
    if platform != machine.platform:
        where = f"mesh.name = {show(machine.name)} has {machine.platform} devices, but jax finds {platform} here"
        raise ConfigError([f'{where}; use mesh.name = "cpu" to emulate them, or run there'])
    available = jax.device_count()
    if machine.platform == "cpu":  # more emulated devices than asked for do no harm
        available = min(available, config.devices)
    if problems := check_devices(config, available, resolved.shape):
        raise ConfigError(problems)
    return make_mesh(config.parallel)
