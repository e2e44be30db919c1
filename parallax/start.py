"""What is checked and opened before a run's first step: where it starts, its data, its devices and its programs."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from parallax.checkpoint import Checkpoints, check_identity, check_weights
from parallax.config import ConfigError, show
from parallax.data import Data, open_data
from parallax.mesh import make_mesh
from parallax.metrics import say
from parallax.model import Model
from parallax.program import Program
from parallax.validate import Resolved, check_devices

ORDER = ("dp", "pp", "ep", "cp", "tp")  # as layouts are spoken of


@dataclass(frozen=True, eq=False)
class Start:
    """A run that can start. `first` is the number of steps that are behind it already."""

    resolved: Resolved
    program: Program
    data: Data
    checkpoints: Checkpoints
    first: int
    resume: bool

    def summary(self) -> str:
        """The block printed before the loop."""
        config, shape, machine = self.resolved.config, self.resolved.shape, self.resolved.machine
        parallel, train = config.parallel, config.train
        layout = [
            "·".join(f"{axis}{size}" for axis in ORDER if (size := getattr(parallel, axis)) > 1),
            parallel.schedule if parallel.pp > 1 else "",
            f"{parallel.virtual_stages} virtual stages" if parallel.virtual_stages > 1 else "",
            "sequence parallel" if parallel.sequence_parallel and parallel.tp > 1 else "",
            f"zero {parallel.zero}",
        ]
        tokens = train.global_batch_size * train.seq_len
        emulated = "emulated " if machine.platform == "cpu" else ""
        corpus = self.data.corpus
        sizes = f", {len(corpus.train):,} tokens and {len(corpus.valid):,} held out" if corpus else ""
        m = config.microbatches
        rows = {
            "model": f"{config.model.name}, {len(shape.layers)} layers, {shape.parameters:,} parameters",
            "devices": f"{config.devices} {emulated}{machine.name}: {', '.join(filter(None, layout))}",
            "data": f"{config.data.source}{sizes}",
            "step": f"{train.global_batch_size} x {train.seq_len} = {tokens:,} tokens, in {m} microbatches",
            "steps": f"{self.first} to {train.steps}, {train.precision}, remat {train.remat}",
            "run": config.log.dir,
        }
        return "\n".join(f"{name:9}{value}" for name, value in rows.items())


def prepare(resolved: Resolved, resume: bool) -> Start:
    """Compiles nothing and changes nothing. Raises ConfigError where the run cannot start (see `train`)."""
    config = resolved.config
    checkpoints = Checkpoints(Path(config.log.dir) / "checkpoints", config.checkpoint.keep)
    model = Model(resolved.model_module, resolved.model_config, resolved.shape, config.train.remat)
    first = _first_step(resolved, model, checkpoints, resume)
    data = _open(resolved)
    return Start(resolved, Program(config, model, _mesh(resolved)), data, checkpoints, first, resume)


def _first_step(resolved: Resolved, model: Model, checkpoints: Checkpoints, resume: bool) -> int:
    """The number of steps that are behind us already."""
    config, folder = resolved.config, Path(resolved.config.log.dir)
    where = f"log.dir = {show(config.log.dir)}"
    if not resume:
        if folder.exists() and not folder.is_dir():
            raise ConfigError([f"{where} is a file; use a folder that is empty or new"])
        if folder.is_dir() and any(folder.iterdir()):
            way = (
                "use --resume to go on from its checkpoint"
                if checkpoints.steps()
                else "it has no checkpoint; delete it"
            )
            raise ConfigError([f"{where} is not empty; {way}, or use another log.dir"])
        return 0
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
    return step


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
