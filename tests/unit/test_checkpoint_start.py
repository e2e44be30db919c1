"""Whether a run may begin in `log.dir`, or go on there: what is said, and what another run does meanwhile."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parallax.checkpoint import Checkpoints
from parallax.cli import main
from parallax.config import ConfigError
from parallax.start import check_still, check_unused, lock

ROOT = Path(__file__).parents[2]
RUN = """
[model]
name = "llama-tiny"
[train]
steps = 1
seq_len = 8
global_batch_size = 1
"""


def complete(folder: Path, step: int) -> None:
    for item in ("state", "facts"):
        (folder / "checkpoints" / str(step) / item).mkdir(parents=True)


def make(folder: Path, what: str) -> None:
    if what != "nothing":
        folder.mkdir()
    if what in ("run", "other"):
        (folder / {"run": "run.toml", "other": "photo.jpg"}[what]).touch()


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("nothing", "does not exist, so there is nothing to resume; start without --resume, or use another log.dir"),
        ("empty", "is empty, so there is nothing to resume; start without --resume, or use another log.dir"),
        ("run", "has no complete checkpoint to resume from; delete it and start without --resume"),
        ("other", "is not the folder of a run; use another log.dir"),
    ],
)
def test_nothing_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture, what: str, line: str):
    make(tmp_path / "x", what)
    (tmp_path / "run.toml").write_text(RUN)
    assert main(["train", str(tmp_path / "run.toml"), f"log.dir={tmp_path}/x", "--resume"]) == 2
    assert capsys.readouterr().err == f'error: log.dir = "{tmp_path}/x" {line}\n'


@pytest.mark.parametrize("resume", [[], ["--resume"]])
@pytest.mark.parametrize("refused", ["x", "x/checkpoints"])
def test_folders_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, resume: list[str], refused: str
):
    """As the system says it, also to tests that run as root."""

    def listing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".") -> Any:
            if Path(path) == tmp_path / refused:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return function(path)

        return call

    (tmp_path / "x" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.setattr(os, "listdir", listing(os.listdir))
    assert main(["train", str(tmp_path / "run.toml"), f"log.dir={tmp_path}/x", *resume]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line.startswith("error: ") and f"{tmp_path}/{refused}" in line and "cannot be read: Permission denied" in line
    )


def start_of(folder: Path, first: int, resume: bool) -> Any:
    config = SimpleNamespace(log=SimpleNamespace(dir=str(folder)))
    resolved, checkpoints = SimpleNamespace(config=config), Checkpoints(folder / "checkpoints")
    return SimpleNamespace(resolved=resolved, checkpoints=checkpoints, first=first, resume=resume)


def test_a_folder_that_another_run_has_filled_meanwhile(tmp_path: Path):
    new = start_of(tmp_path / "new", 0, False)
    check_unused(str(tmp_path / "new"), new.checkpoints)
    (tmp_path / "new").mkdir()
    check_still(new)
    complete(tmp_path / "new", 3)
    with pytest.raises(ConfigError, match="is not empty; use --resume"):
        check_still(new)

    resumed = start_of(tmp_path / "new", 3, True)
    check_still(resumed)
    complete(tmp_path / "new", 4)
    with pytest.raises(ConfigError, match=r"was changed by another run meanwhile: .* is .*/checkpoints/4; start again"):
        check_still(resumed)


def test_the_lock_keeps_other_processes_out(tmp_path: Path):
    held = lock(tmp_path)
    code = f"from pathlib import Path; from parallax.start import lock; lock(Path({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "is in use by another run" in done.stderr
    os.close(held)
    os.close(lock(tmp_path))
