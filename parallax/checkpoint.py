"""A run's checkpoints on disk: which are complete, what is in them, and whether they are of the same run. No jax.

STEP/state   the canonical state (parallax.canonical), which any layout can read
STEP/facts   JSON (see `FACTS`): where the run stood, what made it, and the keys that must not change (`identity`)

`parallax.checkpoint_io` writes and restores the state.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from parallax.config import SOURCES, ConfigError, Optimizer, brief, kind, matches, show
from parallax.validate import Resolved

ITEMS = ("state", "facts")
DELETED = "deleted"  # old checkpoints are moved into this folder before their files go, so that none is seen in halves
LOSS = float | None
FACTS: dict[str, tuple[Any, str]] = {  # dotted: the type, and what it is
    "step": (int, "optimizer steps made"),
    "samples": (int, "sequences consumed: the whole position of the data"),
    "tokens": (int, "the same in tokens"),
    "train_steps": (int, "the run's train.steps"),
    "loss": (LOSS, "of the last step, nats a token"),
    "valid_loss": (LOSS, "held-out loss of this step; null where it was not evaluated"),
    "saved_at": (str, "UTC, ISO 8601"),
    "kept": (bool, "whether checkpoint.keep_every keeps it for good"),
    "identity": (dict[str, Any], "keys that must not change, dotted"),
    "optimizer": (dict[str, Any], "section optimizer, which may change"),
    "data.sources": (list[dict[str, Any]], "what the sources held, and more (parallax.data.Data.fingerprint)"),
    "weights": (dict[str, list[int]], "shape of each weight"),
    "parameters": (int, "their number"),
    "layout.parallel": (dict[str, Any], "what it was trained on, which may change: section parallel,"),
    "layout.mesh": (str, "name of the mesh"),
    "layout.precision": (str, "of weights and activations"),
    "versions.parallax": (str, "of this program"),
    "versions.jax": (str, "of jax"),
}
MAX_DIGITS = 18  # of a step


# What must stay the same


def identity(resolved: Resolved) -> dict[str, Any]:
    """The keys of a run that its checkpoints are bound to, dotted: model, data, seed and batch; never the layout.

    Files count by their names, without folders: a run goes on where they were moved. Raises ConfigError where a model
    file's Config holds what no checkpoint can keep."""
    config = resolved.config
    name = lambda path: Path(path).name
    model = dataclasses.asdict(resolved.model_config) | {"name": config.model.name, "file": name(config.model.file)}
    data = dataclasses.asdict(config.data)
    data |= {"source": _source_names(config.data.source), "tokenizer": name(config.data.tokenizer)}
    keys = {f"model.{key}": value for key, value in model.items()}
    keys |= {f"data.{key}": value for key, value in data.items()}
    of_train = ("seed", "seq_len", "global_batch_size", "rampup_batch_size")
    keys |= {f"train.{key}": getattr(config.train, key) for key in of_train}
    problems = [
        f"{key} = {brief(value)} cannot be kept in a checkpoint; use a number, a string, true, false, a list or a table"
        for key, value in keys.items()
        if not _is_json(value)
    ]
    if problems:
        raise ConfigError(problems)
    return json.loads(json.dumps(keys))


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _source_names(source: str | dict[str, float]) -> str | dict[str, float]:
    """Names of files and folders; of those that share a name, the paths below the folder that holds them all."""
    if isinstance(source, str):
        return source if source in SOURCES else _below(Path(source).name)
    paths = [Path(path).absolute() for path in source if path not in SOURCES]
    above = ""
    if len({path.name for path in paths}) < len(paths):
        above = os.path.commonpath([path.parent for path in paths])
    name = lambda path: Path(path).absolute().relative_to(above).as_posix() if above else Path(path).name
    return {path if path in SOURCES else _below(name(path)): weight for path, weight in source.items()}


def _below(name: str) -> str:
    """Told from the word that stands for a built-in source."""
    return f"./{name}" if name in SOURCES else name


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
        [
            f"{source.get('name')} with {tokens:,} tokens"
            for source in data["sources"]
            if matches(tokens := source.get("tokens"), int)
        ]
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


def optimizer_changes(now: Optimizer, saved: dict[str, Any]) -> str:
    """The keys of [optimizer] that are not as they were, with both values; empty where all are."""
    return ", ".join(
        f"optimizer.{key} = {show(value)} was {brief(saved[key])}"
        for key, value in dataclasses.asdict(now).items()
        if key in saved and saved[key] != value
    )


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
        try:
            return [path for path in self.folder.iterdir() if path.is_dir()] if self.folder.is_dir() else []
        except OSError as error:
            raise ConfigError([f"{error.filename or self.folder} cannot be read: {error.strerror}"]) from error

    def _is_complete(self, path: Path) -> bool:
        if not (path.name.isascii() and path.name.isdecimal() and len(path.name) <= MAX_DIGITS):
            return False
        if str(int(path.name)) != path.name:
            return False
        try:
            return all((path / item).is_dir() for item in ITEMS)
        except OSError:  # not half of one: `facts` says why it cannot be read
            return True

    def path(self, step: int) -> Path:
        return self.folder / str(step)

    def facts(self, step: int) -> dict[str, Any]:
        """What was saved beside the state (see FACTS). Raises ConfigError where it cannot be read or is damaged."""
        try:
            facts = json.loads((self.path(step) / "facts" / "metadata").read_text(encoding="utf-8"))
            show(facts)  # not deeper than messages can write
        except OSError as error:
            raise self.unreadable(step, f"{error.filename}: {error.strerror}") from error
        except RecursionError as error:
            raise self.unreadable(step, "its facts are nested too deeply") from error
        except ValueError as error:
            raise self.unreadable(step, f"its facts are not JSON: {error}") from error
        if damage := [*_damage(facts, step)]:
            more = f", and {len(damage) - 1} more" if len(damage) > 1 else ""
            raise self.unreadable(step, f"its facts are damaged: {damage[0]}{more}")
        return facts

    def unreadable(self, step: int, why: str) -> ConfigError:
        older = [s for s in self.steps() if s < step]
        rest = f"move it away to resume from {self.path(older[-1])}" if older else "there is none before it"
        return ConfigError([f"checkpoint {self.path(step)} cannot be read: {why}; {rest}"])


def _damage(facts: Any, step: int) -> Iterator[str]:
    """What of FACTS is missing, or of a wrong type, or not of this step."""
    if not isinstance(facts, dict):
        yield f"{brief(facts)} is not a table"
        return
    for dotted, (hint, _) in FACTS.items():
        value = facts
        for name in dotted.split("."):
            value = value.get(name, MISSING) if isinstance(value, dict) else MISSING
        if value is MISSING:
            yield f"{dotted} is missing"
        elif not matches(value, hint):
            yield f"{dotted} = {brief(value)} is not {'a finite number or null' if hint == LOSS else kind(hint)}"
        elif isinstance(value, int) and not 0 <= value < 2**63:
            yield f"{dotted} = {brief(value)} is out of range"
        elif dotted == "step" and value != step:
            yield f"step = {value} in the folder of step {step}"
