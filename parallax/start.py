"""What is checked and opened before a run's first step: where it starts, its data, its devices and its programs."""

from __future__ import annotations

import dataclasses
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from parallax.checkpoint import Checkpoints, check_data, check_identity, check_weights, identity, optimizer_changes
from parallax.config import SCHEDULES, ConfigError, show
from parallax.data import Data, open_data
from parallax.mesh import make_mesh
from parallax.metrics import say
from parallax.model import Model
from parallax.program import Program
from parallax.schedule.simulate import lockstep_warning
from parallax.validate import Resolved, check_devices
from parallax.version import version


@dataclass(frozen=True, eq=False)
class Start:
    """A run that can start. `first` steps and `samples` samples are behind it already; `facts` are those of its
    checkpoints that no step changes (see `parallax.checkpoint.FACTS`)."""

    resolved: Resolved
    program: Program
    data: Data
    checkpoints: Checkpoints
    first: int
    samples: int
    resume: bool
    facts: dict[str, Any]


def prepare(resolved: Resolved, resume: bool) -> Start:
    """Compiles nothing and changes nothing. Raises ConfigError where the run cannot start (see `train`)."""
    config = resolved.config
    checkpoints = Checkpoints(Path(config.log.dir) / "checkpoints")
    model = Model(resolved.model_module, resolved.model_config, resolved.shape, config.train.remat)
    facts = {
        "identity": identity(resolved),
        "optimizer": dataclasses.asdict(config.optimizer),
        "weights": model.weight_shapes,
        "parameters": resolved.shape.parameters,
        "layout": {
            "parallel": dataclasses.asdict(config.parallel),
            "mesh": resolved.machine.name,
            "precision": config.train.precision,
        },
        "versions": {"parallax": version(), "jax": jax.__version__},
    }
    saved = _facts_to_resume(resolved, model, checkpoints) if resume else check_unused(config.log.dir, checkpoints)
    data = _open(resolved)
    if resume:
        check_data(data.fingerprint, saved["data"], checkpoints.path(saved["step"]))
    program = Program(config, model, _mesh(resolved))
    if config.parallel.schedule not in SCHEDULES and (warning := lockstep_warning(program.table)):
        say(f"warning: {warning}")
    if warning := program.kernel[1]:
        say(f"warning: {warning}")
    facts |= {"data": data.fingerprint}
    return Start(resolved, program, data, checkpoints, saved["step"], saved["samples"], resume, facts)


def check_unused(log_dir: str, checkpoints: Checkpoints) -> dict[str, Any]:
    """The facts of a run that begins. Raises ConfigError where `log_dir` holds another one."""
    folder, where = Path(log_dir), f"log.dir = {show(log_dir)}"
    if folder.exists() and not folder.is_dir():
        raise ConfigError([f"{where} is a file; use a folder that is empty or new"])
    if folder.is_dir() and _names(folder):
        whole = checkpoints.steps()
        way = "use --resume to go on from its checkpoint" if whole else "it has no checkpoint; delete it"
        raise ConfigError([f"{where} is not empty; {way}, or use another log.dir"])
    return {"step": 0, "samples": 0}


def _names(log_dir: Path) -> list[str]:
    try:
        return os.listdir(log_dir)
    except OSError as error:
        line = f"log.dir = {show(str(log_dir))} cannot be read: {error.strerror}; use another log.dir"
        raise ConfigError([line]) from error


def check_still(start: Start) -> None:
    """Once the folder is locked: raises ConfigError where another run has been in it since `prepare`."""
    log_dir = start.resolved.config.log.dir
    if not start.resume:
        check_unused(log_dir, start.checkpoints)
    elif (steps := start.checkpoints.steps())[-1:] != [start.first]:
        now = f"its newest checkpoint is {start.checkpoints.path(steps[-1])}" if steps else "its checkpoints are gone"
        line = f"log.dir = {show(log_dir)} was changed by another run meanwhile: {now}; start again"
        raise ConfigError([line])


def _nothing_to_resume(log_dir: str) -> str:
    """Why there is no complete checkpoint, and what to do."""
    folder, where = Path(log_dir), f"log.dir = {show(log_dir)}"
    if not folder.exists():
        return f"{where} does not exist, so there is nothing to resume; start without --resume, or use another log.dir"
    if not (names := _names(folder)):
        return f"{where} is empty, so there is nothing to resume; start without --resume, or use another log.dir"
    if "run.toml" in names:
        return f"{where} has no complete checkpoint to resume from; delete it and start without --resume"
    return f"{where} is not the folder of a run; use another log.dir"


def _facts_to_resume(resolved: Resolved, model: Model, checkpoints: Checkpoints) -> dict[str, Any]:
    """Of the newest complete checkpoint. Raises ConfigError where this run cannot go on from it."""
    config, steps = resolved.config, checkpoints.steps()
    if not steps:
        raise ConfigError([_nothing_to_resume(config.log.dir)])
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
    if changes := optimizer_changes(config.optimizer, facts["optimizer"]):
        say(f"warning: {changes}: from here on it is the new one that counts")
    return facts


def lock(folder: Path) -> int:
    """Keeps other runs out of a folder until this process ends. Raises ConfigError where another one is in it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError([f"log.dir = {show(str(folder))} cannot be read: {error.strerror}"]) from error
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
