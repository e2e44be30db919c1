"""Writes checkpoints while training goes on, and restores them: the state by orbax, in files that any layout can read.

A state is copied to host memory while the run waits, and written while it goes on. The next save waits for the one
before, and so does the end of the run.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSteps, LatestN

from parallax.checkpoint import DELETED, ITEMS, Checkpoints
from parallax.config import Checkpoint
from parallax.sharding import Tree

MEMORY_OR_SYSTEM = (MemoryError, OSError, jax.errors.JaxRuntimeError)  # errors that say nothing about the files


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. The message is one line."""


def restore_state(checkpoints: Checkpoints, step: int, target: Tree) -> Tree:
    """The canonical state, with the shapes and shardings of `target` (see `Canonical`).

    Raises ConfigError where it cannot be read."""
    options = ocp.CheckpointManagerOptions(create=False, enable_async_checkpointing=False)
    try:
        with ocp.CheckpointManager(checkpoints.folder.resolve(), item_names=ITEMS, options=options) as manager:
            return manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))["state"]
    except Exception as error:  # orbax and tensorstore raise what they like for a damaged file
        damaged = "" if isinstance(error, MEMORY_OR_SYSTEM) else "its state is damaged: "
        raise checkpoints.unreadable(step, f"{damaged}{_reason(error)}") from error


class CheckpointWriter:
    """Writes the checkpoints of one run, which has the folder for itself. The newest `config.keep` are kept, and for
    good those of the steps that `config.keep_every` divides."""

    def __init__(self, checkpoints: Checkpoints, config: Checkpoint):
        # orbax logs an error's traceback ten times, then raises it
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self._checkpoints = checkpoints
        self._config = config
        self._manager: ocp.CheckpointManager | None = None
        self._writing: int | None = None  # the step
        self._emptying: threading.Thread | None = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(self, step: int, state: Tree, facts: dict[str, Any]) -> None:
        """Returns when the canonical `state` has been copied; its arrays must be of no other use, and not be donated.

        Raises CheckpointError, also for the save before this one, which it waits for."""
        self.wait()
        if self._emptying:
            self._emptying.join()
        jax.block_until_ready(state)  # on CPU no collective may be queued when the next step is
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), facts=ocp.args.JsonSave(facts))
        self._writing = step
        try:
            self._manager = self._manager or self._open()
            self._manager.save(step, args=items, force=True)
        except Exception as error:
            raise self._failed(error) from error

    def check(self) -> None:
        """Raises CheckpointError if a write behind the run's back has failed. Does not wait."""
        if self._manager and self._writing is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Returns when what is being written is complete. Raises CheckpointError."""
        if self._manager is None or self._writing is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # orbax and tensorstore raise what they like for a full disk
            raise self._failed(error) from error
        if self._writing not in self._checkpoints.steps():
            raise self._failed(RuntimeError("it is not in its place"))
        self._writing = None
        self._empty()

    def close(self) -> None:
        """Waits for all that is pending. Raises CheckpointError."""
        try:
            self.wait()
        finally:
            if self._manager:
                self._manager.close()
                self._manager = None
            if self._emptying:
                self._emptying.join()

    def _open(self) -> ocp.CheckpointManager:
        folder = self._checkpoints.folder
        folder.mkdir(parents=True, exist_ok=True)
        self._empty()
        for path in self._checkpoints.incomplete():
            if path.name.isdecimal():  # orbax would count it, and not write over it
                path.rename(path.with_suffix(f".broken-{time.time_ns()}"))
        for_good = [EveryNSteps(self._config.keep_every)] if self._config.keep_every else []
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(self._config.keep), *for_good]),
            cleanup_tmp_directories=True,
            todelete_subdir=DELETED,
            create=False,
        )
        return ocp.CheckpointManager(folder.resolve(), item_names=ITEMS, options=options)

    def _empty(self) -> None:
        """Deletes, behind the run's back, what orbax has moved away."""
        where = self._checkpoints.folder / DELETED
        if where.exists():
            self._emptying = threading.Thread(target=shutil.rmtree, args=(where, True))
            self._emptying.start()

    def _failed(self, error: Exception) -> CheckpointError:
        path, self._writing = self._checkpoints.path(self._writing or 0), None
        return CheckpointError(f"checkpoint {path} could not be written: {_reason(error)}")


def _reason(error: BaseException) -> str:
    """The most telling part in one line: of the error that was the first, without tensorstore's descriptions of its
    files; its middle left out where it is long: the system's reason stands at the end."""
    while error.__cause__:
        error = error.__cause__
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    line = re.sub(r'Error opening "\w+" driver: ', "", line)
    line = re.split(r" \[\w+(?:\[\d+\])?='|[.;] See full TensorStore details|\. Truncating/padding", line)[0]
    if isinstance(error, KeyError):
        line = f"{line} is missing"
    return line if len(line) <= 300 else f"{line[:100]} ... {line[-200:]}"
