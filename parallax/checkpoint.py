"""A run's checkpoints: written, listed, restored, and checked to be of the same run.

STEP/state   the canonical state (parallax.canonical), which any layout can read
STEP/facts   JSON: step, samples seen, and the keys of the run that must not change (`identity`)
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from parallax.config import ConfigError, show
from parallax.validate import Resolved

Tree = Any
ITEMS = ("state", "facts")


# What must stay the same


def identity(resolved: Resolved) -> dict[str, Any]:
    """The keys of a run that its checkpoints are bound to, dotted: model, data, seed and batch; never the layout."""
    config = resolved.config
    model = dataclasses.asdict(resolved.model_config) | {"name": config.model.name}
    keys = {f"model.{name}": value for name, value in model.items()}
    keys |= {f"data.{name}": value for name, value in dataclasses.asdict(config.data).items()}
    keys |= {f"train.{name}": getattr(config.train, name) for name in ("seed", "seq_len", "global_batch_size")}
    return json.loads(json.dumps(keys))


def check_identity(resolved: Resolved, saved: dict[str, Any], where: Path) -> None:
    """Raises ConfigError with a line for each key that differs from the checkpoint's."""
    now = identity(resolved)
    lines = [
        f"{key} = {show(now[key]) if key in now else 'none'} is not what the checkpoint {where} was trained with; "
        f"use {key} = {show(saved[key]) if key in saved else 'none'}, or another log.dir"
        for key in sorted(now.keys() | saved.keys())
        if key not in now or key not in saved or now[key] != saved[key]
    ]
    if lines:
        raise ConfigError(lines)


def check_weights(now: dict[str, list[int]], saved: dict[str, list[int]], where: Path) -> None:
    """Raises ConfigError with a line for each weight that the model file and the checkpoint do not share."""
    lines = [
        f"model: {name} has shape {now.get(name, 'none')}, and {saved.get(name, 'none')} in the checkpoint {where}; "
        "use the model file that it was trained with, or another log.dir"
        for name in sorted(now.keys() | saved.keys())
        if now.get(name) != saved.get(name)
    ]
    if lines:
        raise ConfigError(lines)


# Files


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, in `folder`. A checkpoint is written beside its place and then renamed, so that one
    that is there is complete."""

    folder: Path
    keep: int

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        whole = (path for path in self._numbered() if all((path / item).is_dir() for item in ITEMS))
        return sorted(int(path.name) for path in whole)

    def _numbered(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if path.name.isdecimal()] if self.folder.is_dir() else []

    def path(self, step: int) -> Path:
        return self.folder / str(step)

    def facts(self, step: int) -> dict[str, Any]:
        """What was saved beside the state. Raises ConfigError where it cannot be read."""
        facts = self._read(step, ocp.args.Composite(facts=ocp.args.JsonRestore()))["facts"]
        if missing := {"identity", "train_steps", "weights"} - facts.keys():
            raise self._unreadable(step, f"its facts lack {', '.join(sorted(missing))}")
        return facts

    def save(self, step: int, state: Tree, facts: dict[str, Any]) -> Path:
        """Writes a canonical state; returns when it is complete, and older ones than the newest `keep` are gone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self._numbered():
            if int(path.name) not in self.steps():  # half of one: orbax would count it, and not write over it
                path.rename(path.with_suffix(f".broken-{time.time_ns()}"))
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), facts=ocp.args.JsonSave(facts))
        with self._manager() as manager:
            manager.save(step, args=items, force=True)
        return self.path(step)

    def restore(self, step: int, target: Tree) -> Tree:
        """The canonical state, with the shapes and shardings of `target` (see `Canonical`).

        Raises ConfigError where it cannot be read."""
        return self._read(step, ocp.args.Composite(state=ocp.args.StandardRestore(target)))["state"]

    def _read(self, step: int, items: ocp.args.Composite) -> Any:
        try:
            with self._manager() as manager:
                return manager.restore(step, args=items)
        except Exception as error:  # orbax and tensorstore raise what they like for a damaged file
            raise self._unreadable(step, str(error).strip().splitlines()[0]) from error

    def _unreadable(self, step: int, why: str) -> ConfigError:
        older = [s for s in self.steps() if s < step]
        rest = f"move it away to resume from {self.path(older[-1])}" if older else "there is none before it"
        return ConfigError([f"checkpoint {self.path(step)} cannot be read: {why}; {rest}"])

    def _manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(max_to_keep=self.keep, create=False, enable_async_checkpointing=False)
        return ocp.CheckpointManager(self.folder.resolve(), item_names=ITEMS, options=options)
