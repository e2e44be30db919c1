"""The command line: one line an error, exit statuses, stdout for results alone; and the environment it sets."""

import subprocess
import sys
from pathlib import Path

import pytest

from parallax.cli import main
from parallax.environment import emulate_devices

ROOT = Path(__file__).parents[2]
SCHEDULE = ["schedule", "--pp", "4", "--microbatches", "8"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "error: the following arguments are required: VERB; see parallax --help"),
        (["schedule", "--pp", "x"], "error: argument --pp: invalid int value: 'x'; see parallax schedule --help"),
        (["train", "a.toml", "--nonsense"], "error: unrecognized arguments: --nonsense; see parallax --help"),
    ],
)
def test_wrong_options_are_one_line(capsys: pytest.CaptureFixture, words: list[str], line: str):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert capsys.readouterr() == ("", line + "\n")


def test_a_line_break_in_a_problem_is_written_out(capsys: pytest.CaptureFixture):
    assert main(["train", "no\nsuch.toml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no\\nsuch.toml: No such file")


def test_version(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("parallax ")


@pytest.mark.parametrize(
    ("redirection", "error"),
    [
        ("> /dev/full", "error: stdout cannot be written: No space left on device\n"),
        ("| true", ""),
    ],
)
def test_stdout_that_cannot_be_written(redirection: str, error: str):
    command = f"set -o pipefail; (sleep 0.5; {sys.executable} -m parallax {' '.join(SCHEDULE)}) {redirection}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, error)


def test_an_ascii_locale():
    environment = {"PYTHONIOENCODING": "ascii", "PATH": ""}
    done = subprocess.run([sys.executable, "-m", "parallax", *SCHEDULE], cwd=ROOT, capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")


def test_emulated_devices_and_what_the_user_has_set():
    environment = {"JAX_ENABLE_X64": "1", "NPROC": "4", "XLA_FLAGS": "--xla_a=1 --xla_disable_hlo_passes=dce"}
    emulate_devices(8, environment)
    assert environment["JAX_ENABLE_X64"] == "0" and environment["NPROC"] == "16"
    flags = environment["XLA_FLAGS"].split()
    assert flags[-2:] == ["--xla_disable_hlo_passes=dce,all-reduce-promotion", "--xla_a=1"]
    once = dict(environment)
    emulate_devices(8, environment)
    assert environment["XLA_FLAGS"].count("all-reduce-promotion") == 1 and environment["NPROC"] == once["NPROC"]
