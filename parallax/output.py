"""Files that a verb writes: checked before any work, and written whole or not at all. No jax."""

from __future__ import annotations

import contextlib
import json
import os
import stat
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
        elif name is not None and (what := _not_a_file(name)):
            lines.append(f"{option} {name} is {what} and is not written to; use the name of a new file")
        elif name is not None and not os.path.isdir(folder := Path(os.path.realpath(name)).parent):
            folder = folder if os.path.islink(name) else Path(name).parent
            lines.append(f"{option} {name}: the folder {folder} does not exist; make it first")
        elif name is not None and not os.access(folder, os.W_OK):
            lines.append(f"{option} {name}: the folder {folder} cannot be written to; use another")
    for (one, name), (other, same) in combinations({**(inputs or {}), **outputs}.items(), 2):
        if name and same and os.path.realpath(name) == os.path.realpath(same):
            lines.append(f"{one} and {other} both name {name}; use two files")
    return lines


def _example(option: str) -> str:
    return {"-o": "run.toml", "--markdown": "plan.md", "--html": "plan.html"}.get(option, f"timeline.{option[2:]}")


def _not_a_file(name: str) -> str | None:
    """What is there, where it is neither a regular file nor nothing. Links are followed."""
    try:
        mode = os.stat(name).st_mode
    except OSError:
        return "a loop of links" if os.path.islink(os.path.realpath(name)) else None
    kinds = {"a device": stat.S_ISCHR, "a block device": stat.S_ISBLK, "a named pipe": stat.S_ISFIFO}
    kind = next((kind for kind, is_one in kinds.items() if is_one(mode)), "a socket")
    return None if stat.S_ISREG(mode) else kind


def write_whole(path: Path, content: str | bytes) -> None:
    """What was there stays, or is replaced by all of `content`. Raises OSError, of `path`."""
    write_all({path: content})


def write_all(contents: Mapping[Path, str | bytes]) -> None:
    """Writes every content beside its file, or the file that a link leads to, then renames: where one cannot be
    written, all that was there stays. Raises OSError, of the path that failed."""
    beside = {path: _beside(path) for path in contents}
    done: list[Path] = []
    path = Path()
    try:
        for path, content in contents.items():
            beside[path].write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        for path in contents:
            os.replace(beside[path], os.path.realpath(path))
            done.append(path)
    except OSError as error:
        written = f"; written before: {', '.join(map(str, done))}" if done else ""
        raise OSError(error.errno, f"{error.strerror}{written}", str(path)) from error
    finally:
        for left in beside.values():
            with contextlib.suppress(OSError):
                left.unlink()


def _beside(path: Path) -> Path:
    target = Path(os.path.realpath(path))
    return target.with_name(f".{target.name}.{os.getpid()}")
