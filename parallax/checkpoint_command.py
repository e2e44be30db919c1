"""The verb `parallax checkpoint`: what the checkpoints of a run are, and what is in one. No jax."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from parallax.checkpoint import Checkpoints
from parallax.config import ConfigError, Parallel, build, either, show
from parallax.text import columns, layout, size

EXAMPLE = """\
examples:
  parallax checkpoint ls runs/demo
  parallax checkpoint show runs/demo 150
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the checkpoints of a run, or show what is in one. Starts no devices."
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    ls = verbs.add_parser("ls", help="a line a checkpoint", description="List the checkpoints of a run.")
    one = verbs.add_parser("show", help="what is in one checkpoint", description="Show what is in one checkpoint.")
    for verb in (ls, one):
        verb.add_argument("dir", metavar="DIR", help="a run's log.dir, or its folder checkpoints/")
        verb.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    one.add_argument("step", nargs="?", type=int, metavar="STEP", help="its step (default: the newest)")
    ls.set_defaults(of_checkpoints=_ls)
    one.set_defaults(of_checkpoints=_show)


def run(args: argparse.Namespace) -> int:
    """→ exit status 0. Raises ConfigError where there is no such folder or checkpoint, or it cannot be read."""
    return args.of_checkpoints(args)


def _ls(args: argparse.Namespace) -> int:
    checkpoints = _open(args.dir)
    rows = [_row(checkpoints, step) for step in checkpoints.steps()]
    halves = [{"path": str(path), "size_bytes": _size_bytes(path)} for path in checkpoints.incomplete()]
    if args.json:
        print(json.dumps({"folder": str(checkpoints.folder), "checkpoints": rows, "incomplete": halves}))
        return 0
    header = ["step", "samples", "tokens", "loss", "held out", "size", "saved (UTC)", ""]
    table = [
        [str(row["step"]), "", "", "", "", size(row["size_bytes"]), "", row["error"]]
        if row["error"]
        else [
            *(f"{row[name]:,}" for name in ("step", "samples", "tokens")),
            *("-" if row[name] is None else f"{row[name]:.4f}" for name in ("loss", "valid_loss")),
            size(row["size_bytes"]),
            _minute(row["saved_at"]),
            "kept for good" if row["kept"] else "",
        ]
        for row in rows
    ]
    table += [["-"] * 5 + [size(half["size_bytes"]), "-", f"{half['path']}: incomplete"] for half in halves]
    print(columns([header, *table], right=range(6)) if table else f"no checkpoints in {checkpoints.folder}")
    return 0


def _row(checkpoints: Checkpoints, step: int) -> dict[str, Any]:
    """`error` says why the facts cannot be read; None where they can."""
    row: dict[str, Any] = {"step": step, "path": str(checkpoints.path(step)), "error": None}
    row["size_bytes"] = _size_bytes(checkpoints.path(step))
    try:
        facts = checkpoints.facts(step)
    except ConfigError as error:
        return row | {"error": error.problems[0]}
    return row | {name: facts[name] for name in ("samples", "tokens", "loss", "valid_loss", "saved_at", "kept")}


def _show(args: argparse.Namespace) -> int:
    checkpoints = _open(args.dir)
    steps = checkpoints.steps()
    if not steps:
        raise ConfigError([f"{checkpoints.folder} has no complete checkpoint; use the folder of another run"])
    if args.step is not None and args.step not in steps:
        near = sorted(steps, key=lambda step: abs(step - args.step))[:6]
        where = f"{checkpoints.folder} has no complete checkpoint of step {args.step}"
        raise ConfigError([f"{where}; use {either(map(str, sorted(near)))}"])
    step = steps[-1] if args.step is None else args.step
    facts, size_bytes = checkpoints.facts(step), _size_bytes(checkpoints.path(step))
    if args.json:
        print(json.dumps({"path": str(checkpoints.path(step)), "size_bytes": size_bytes} | facts))
        return 0
    held_out = "not evaluated" if facts["valid_loss"] is None else f"{facts['valid_loss']:.4f}"
    loss = "-" if facts["loss"] is None else f"{facts['loss']:.4f}"
    where, versions = facts["layout"], facts["versions"]
    parallel, _ = build(Parallel, where["parallel"])  # of another version, it may have other keys
    rows = [
        ["checkpoint", f"{checkpoints.path(step)}, {size(size_bytes)}, {_minute(facts['saved_at'])} UTC"],
        ["step", f"{step:,} of {facts['train_steps']:,}; {facts['samples']:,} samples, {facts['tokens']:,} tokens"],
        ["loss", f"{loss}; held out {held_out}"],
        ["saved by", f"parallax {versions['parallax']}, jax {versions['jax']}"],
        ["trained on", ", ".join(filter(None, [where["mesh"], layout(parallel), where["precision"]]))],
        *[[key, show(value)] for key, value in facts["identity"].items() if not _is_unset(key, value)],
        *[[f"optimizer.{key}", show(value)] for key, value in facts["optimizer"].items()],
        ["weights", f"{facts['parameters']:,} parameters, float32, with two Adam moments each"],
        *[[f"  {name}", " x ".join(map(str, shape))] for name, shape in facts["weights"].items()],
    ]
    print(columns(rows))
    return 0


def _open(name: str) -> Checkpoints:
    """Of a run's folder, or of the folder in it. Raises ConfigError where it is neither."""
    folder = Path(name)
    if (folder / "checkpoints").is_dir():
        return Checkpoints(folder / "checkpoints")
    if not folder.is_dir():
        raise ConfigError([f"{show(name)} is not a folder; use a run's log.dir, or its folder checkpoints/"])
    checkpoints = Checkpoints(folder)
    if not checkpoints.steps() and folder.name != "checkpoints":
        raise ConfigError([f"{show(name)} has no checkpoints; use a run's log.dir, or its folder checkpoints/"])
    return checkpoints


def _is_unset(key: str, value: Any) -> bool:
    """Left to its default; 0 in a model's Config, as head_size, follows from other keys."""
    return value in (None, "", []) or (key.startswith("model.") and type(value) is int and value == 0)


def _minute(saved_at: str) -> str:
    """`2026-11-30 14:05` of an ISO 8601 time."""
    return saved_at[:16].replace("T", " ")


def _size_bytes(folder: Path) -> int:
    """Of all files; not of those that go away meanwhile, or that may not be looked at."""
    sizes = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                sizes += os.lstat(os.path.join(where, name)).st_size
            except OSError:
                continue
    return sizes
