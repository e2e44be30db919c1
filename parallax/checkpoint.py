"""A run's checkpoints on disk: which are complete, what is in them, and whether they are of the same run. No jax.

STEP/state   the canonical state (parallax.canonical), which any layout can read
STEP/facts   JSON (see `FACTS`): where the run stood, what made it, and the keys that must not change (`identity`)

`parallax.checkpoint_io` writes and restores the state.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallax.config import ConfigError, show
from parallax.validate import Resolved

ITEMS = ("state", "facts")
DELETED = "deleted"  # old checkpoints are moved into this folder before their files go, so that none is seen in halves
FACTS = {
    "step": "optimizer steps made",
    "samples": "sequences consumed: the whole position of the data",
    "tokens": "the same in tokens",
    "train_steps": "the run's train.steps",
    "loss": "of the last step, nats a token",
    "valid_loss": "held-out loss of this step; null where it was not evaluated",
    "saved_at": "UTC, ISO 8601",
    "kept": "whether checkpoint.keep_every keeps it for good",
    "identity": "keys that must not change, dotted",
    "data": "what the sources held (parallax.data.Data.fingerprint)",
    "weights": "shape of each weight",
    "parameters": "their number",
    "layout": "what it was trained on, which may change: section parallel, name of the mesh, precision",
    "versions": "of parallax and jax",
}


# What must stay the same


def identity(resolved: Resolved) -> dict[str, Any]:
    """The keys of a run that its checkpoints are bound to, dotted: model, data, seed and batch; never the layout.

    Files count by their names, without folders: a run goes on where they were moved."""
    config = resolved.config
    name = lambda path: Path(path).name
    model = dataclasses.asdict(resolved.model_config) | {"name": config.model.name, "file": name(config.model.file)}
    data = dataclasses.asdict(config.data)
    data |= {"source": _source_names(config.data.source), "tokenizer": name(config.data.tokenizer)}
    keys = {f"model.{key}": value for key, value in model.items()}
    keys |= {f"data.{key}": value for key, value in data.items()}
    of_train = ("seed", "seq_len", "global_batch_size", "rampup_batch_size")
    keys |= {f"train.{key}": getattr(config.train, key) for key in of_train}
    return json.loads(json.dumps(keys))


def _source_names(source: str | dict[str, float]) -> str | dict[str, float]:
    """Names of files and folders; of those that share a name, the paths below the folder that holds them all."""
    if isinstance(source, str):
        return Path(source).name
    names = {path: Path(path).name for path in source}
    if len(set(names.values())) < len(names):
        above = os.path.commonpath([Path(path).parent for path in source])
        names = {path: Path(path).relative_to(above).as_posix() for path in source}
    return {names[path]: weight for path, weight in source.items()}


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


def check_data(now: dict[str, Any], saved: dict[str, Any], where: Path) -> None:
    """Raises ConfigError where the sources hold other tokens than those that the checkpoint was trained on."""
    if now == saved:
        return
    was, are = (
        [f"{source['name']} with {source['tokens']:,} tokens" for source in data["sources"] if "tokens" in source]
        for data in (saved, now)
    )
    changed = f": it was {', '.join(was)}; it is {', '.join(are)}" if was != are else ""
    raise ConfigError(
        [f"data.source does not hold what the checkpoint {where} was trained on{changed}; use that, or another log.dir"]
    )


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
    """The checkpoints in `folder`. One is written beside its place and then renamed, and renamed again before it is
    deleted, so that one that is in its place is complete."""

    folder: Path

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return sorted(int(path.name) for path in self._folders() if self._is_complete(path))

    def incomplete(self) -> list[Path]:
        """What a write or a deletion that was cut off has left, and what is being written or deleted now."""
        halves = [path for path in self._folders() if not self._is_complete(path)]
        return sorted(path for path in halves if path.name != DELETED or any(path.iterdir()))

    def _folders(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if path.is_dir()] if self.folder.is_dir() else []

    def _is_complete(self, path: Path) -> bool:
        return path.name.isdecimal() and all((path / item).is_dir() for item in ITEMS)

    def path(self, step: int) -> Path:
        return self.folder / str(step)

    def facts(self, step: int) -> dict[str, Any]:
        """What was saved beside the state (see FACTS). Raises ConfigError where it cannot be read."""
        try:
            facts = json.loads((self.path(step) / "facts" / "metadata").read_text(encoding="utf-8"))
        except OSError as error:
            raise self.unreadable(step, f"{error.filename}: {error.strerror}") from error
        except ValueError as error:
            raise self.unreadable(step, f"its facts are not JSON: {error}") from error
        if not isinstance(facts, dict) or (missing := FACTS.keys() - facts.keys()):
            lacks = ", ".join(sorted(missing)) if isinstance(facts, dict) else "everything"
            raise self.unreadable(step, f"its facts lack {lacks}")
        return facts

    def unreadable(self, step: int, why: str) -> ConfigError:
        older = [s for s in self.steps() if s < step]
        rest = f"move it away to resume from {self.path(older[-1])}" if older else "there is none before it"
        return ConfigError([f"checkpoint {self.path(step)} cannot be read: {why}; {rest}"])
