"""Files that a verb writes: checked before any work, and written whole or not at all. No jax."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path


def output_problems(outputs: Mapping[str, str | None], inputs: Mapping[str, str | None] | None = None) -> list[str]:
    """What is wrong with the names of files to write, by option, a line each; None: not asked for. No two may be the
    same file, nor one of `inputs`."""
    lines = []
    for option, name in outputs.items():
        if name in ("", "-"):
            lines.append(f"{option} {json.dumps(name)} is not the name of a file; use one such as {_example(option)}")
        elif name is not None and os.path.isdir(name):
            lines.append(f"{option} {name} is a folder and cannot be written; use the name of a file")
        elif name is not None and not os.path.isdir(Path(name).parent):
            lines.append(f"{option} {name}: the folder {Path(name).parent} does not exist; make it first")
    for (one, name), (other, same) in combinations({**(inputs or {}), **outputs}.items(), 2):
        if name and same and os.path.realpath(name) == os.path.realpath(same):
            lines.append(f"{one} and {other} both name {name}; use two files")
    return lines


def _example(option: str) -> str:
    return {"-o": "run.toml", "--markdown": "plan.md", "--html": "plan.html"}.get(option, f"timeline.{option[2:]}")


def write_whole(path: Path, text: str) -> None:
    """Writes beside `path`, then renames: what was there stays, or is replaced by all of `text`. Raises OSError, of
    `path`."""
    beside = path.parent / f".{path.name}.{os.getpid()}"
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
