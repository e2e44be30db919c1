"""`parallax checkpoint` on folders that are written here by hand."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from parallax.cli import main
from parallax.config import Parallel

ROOT = Path(__file__).parents[2]


def facts(step: int, valid_loss: float | None = None, kept: bool = False) -> dict[str, Any]:
    return {
        "step": step,
        "samples": 1024 * step,
        "tokens": 1024 * 128 * step,
        "train_steps": 30,
        "loss": 2.5,
        "valid_loss": valid_loss,
        "saved_at": "2026-01-02T03:04:05+00:00",
        "kept": kept,
        "identity": {"model.name": "llama-tiny", "model.head_size": 0, "data.separator": "", "train.seed": 0},
        "optimizer": {"beta1": 0.9},
        "data": {"sources": [], "separator": 0},
        "weights": {"blocks.gate.kernel": [4, 6], "head.norm.gain": [4]},
        "parameters": 28,
        "layout": {"parallel": asdict(Parallel(dp=2, tp=2)), "mesh": "cpu", "precision": "bfloat16"},
        "versions": {"parallax": "0.1", "jax": "0.10"},
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with checkpoints of steps 10 and 20, one that is damaged, and two halves."""
    folder = tmp_path / "checkpoints"
    for step, text in ((10, json.dumps(facts(10, 2.75, True))), (20, json.dumps(facts(20))), (25, '{"ste')):
        (folder / str(step) / "state").mkdir(parents=True)
        (folder / str(step) / "facts").mkdir()
        (folder / str(step) / "facts" / "metadata").write_text(text)
        (folder / str(step) / "state" / "data").write_bytes(bytes(2048 - len(text)))
    (folder / "15" / "state").mkdir(parents=True)
    (folder / "30.orbax-checkpoint-tmp").mkdir()
    (folder / "30.orbax-checkpoint-tmp" / "data").write_bytes(bytes(512))
    return tmp_path


def test_ls(run: Path, capsys: pytest.CaptureFixture):
    assert main(["checkpoint", "ls", str(run)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    header, *lines = out.splitlines()
    assert header.split() == ["step", "samples", "tokens", "loss", "held", "out", "size", "saved", "(UTC)"]
    assert " ".join(lines[0].split()) == "10 10,240 1,310,720 2.5000 2.7500 2.0 KiB 2026-01-02 03:04 kept for good"
    assert " ".join(lines[1].split()) == "20 20,480 2,621,440 2.5000 - 2.0 KiB 2026-01-02 03:04"
    assert lines[2].split()[:3] == ["25", "2.0", "KiB"] and "cannot be read: its facts are not JSON" in lines[2]
    assert [line.split()[-2:] for line in lines[3:]] == [
        [f"{run}/checkpoints/15:", "incomplete"],
        [f"{run}/checkpoints/30.orbax-checkpoint-tmp:", "incomplete"],
    ]
    assert main(["checkpoint", "ls", str(run / "checkpoints")]) == 0
    assert capsys.readouterr().out == out


def test_ls_json(run: Path, capsys: pytest.CaptureFixture):
    assert main(["checkpoint", "ls", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["folder"] == str(run / "checkpoints")
    assert [row["step"] for row in found["checkpoints"]] == [10, 20, 25]
    assert found["checkpoints"][0] == {
        "step": 10,
        "path": str(run / "checkpoints" / "10"),
        "error": None,
        "size_bytes": 2048,
        **{
            name: facts(10, 2.75, True)[name]
            for name in ("samples", "tokens", "loss", "valid_loss", "saved_at", "kept")
        },
    }
    assert "not JSON" in found["checkpoints"][2]["error"]
    assert [half["size_bytes"] for half in found["incomplete"]] == [0, 512]


def test_show(run: Path, capsys: pytest.CaptureFixture):
    assert main(["checkpoint", "show", str(run), "10"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        f"checkpoint {run}/checkpoints/10, 2.0 KiB, 2026-01-02 03:04 UTC",
        "step 10 of 30; 10,240 samples, 1,310,720 tokens",
        "loss 2.5000; held out 2.7500",
        "saved by parallax 0.1, jax 0.10",
        "trained on cpu, dp2·tp2, sequence parallel, zero 1, bfloat16",
        'model.name "llama-tiny"',
        "train.seed 0",
        "optimizer.beta1 0.9",
        "weights 28 parameters, float32, with two Adam moments each",
        "blocks.gate.kernel 4 x 6",
        "head.norm.gain 4",
    ]
    assert main(["checkpoint", "show", str(run), "20", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == facts(20) | {"path": str(run / "checkpoints" / "20"), "size_bytes": 2048}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["show", "{run}"], "error: checkpoint {run}/checkpoints/25 cannot be read: its facts are not JSON"),
        (["show", "{run}", "15"], "has no complete checkpoint of step 15; use 10, 20 or 25"),
        (["ls", "{run}/none"], 'error: "{run}/none" is not a folder; use a run'),
        (["ls", "{run}/checkpoints/10"], 'error: "{run}/checkpoints/10" has no checkpoints; use a run'),
    ],
)
def test_wrong(run: Path, capsys: pytest.CaptureFixture, words: list[str], line: str):
    assert main(["checkpoint", *(word.format(run=run) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and line.format(run=run) in err and err.count("\n") == 1


@pytest.mark.parametrize("damage", [{"loss": float("nan")}, {"samples": "x"}, {"layout": {}}, {"step": 4}])
def test_damaged_facts_spoil_one_line(run: Path, capsys: pytest.CaptureFixture, damage: dict[str, Any]):
    path = run / "checkpoints" / "20" / "facts" / "metadata"
    path.write_text(json.dumps(facts(20) | damage))
    assert main(["checkpoint", "ls", str(run), "--json"]) == 0
    not_json = pytest.fail  # NaN is not
    found = json.loads(capsys.readouterr().out, parse_constant=not_json)
    assert [bool(row["error"]) for row in found["checkpoints"]] == [False, True, True]
    assert main(["checkpoint", "ls", str(run)]) == 0
    assert "checkpoints/20 cannot be read: its facts are damaged: " in capsys.readouterr().out
    assert main(["checkpoint", "show", str(run), "20"]) == 2
    assert "error: checkpoint " in capsys.readouterr().err


def test_facts_of_another_version_are_shown(run: Path, capsys: pytest.CaptureFixture):
    path = run / "checkpoints" / "20" / "facts" / "metadata"
    whole = facts(20)
    whole["layout"]["parallel"] = {"dp": 2, "fsdp": 4, "tp": "two"}
    path.write_text(json.dumps(whole | {"more": 1}))
    assert main(["checkpoint", "show", str(run), "20"]) == 0
    assert "trained on" in capsys.readouterr().out


def test_a_folder_that_may_not_be_read(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    def refuse(path: object) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    for words in (["ls"], ["ls", "--json"], ["show"]):
        assert main(["checkpoint", *words, str(run)]) == 2
        assert capsys.readouterr() == ("", f"error: {run}/checkpoints cannot be read: Permission denied\n")


def test_an_empty_folder_of_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "checkpoints").mkdir()
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no checkpoints in {tmp_path / 'checkpoints'}\n"
    assert main(["checkpoint", "show", str(tmp_path)]) == 2
    assert "has no complete checkpoint" in capsys.readouterr().err


def test_no_backend_is_started(run: Path):
    """With a backend that does not exist, starting any would fail."""
    command = [sys.executable, "-m", "parallax", "checkpoint", "show", str(run), "20"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "nonexistent"}
    )
    assert (done.returncode, done.stderr) == (0, "")
