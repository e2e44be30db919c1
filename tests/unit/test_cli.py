"""The command line: one line an error, exit statuses, stdout for results alone; and the environment it sets."""

import os
import signal
import subprocess
import sys
import time
import tomllib
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


@pytest.mark.parametrize(
    "words",
    [
        ["checkpoint", "ls", "{long}"],
        ["checkpoint", "show", "{long}"],
        ["checkpoint", "ls", "{long}", "--json"],
        ["tokenize", "{long}", "-o", "corpus"],
        ["tokenize", "a.txt", "-o", "{long}"],
        ["tokenize", "a.txt", "-o", "corpus", "--tokenizer", "{long}"],
        ["schedule", "--kind", "{long}.csv", "--pp", "2", "--microbatches", "4"],
    ],
)
def test_a_name_that_the_system_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, words: list[str]
):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    long = "x" * 300
    assert main([word.format(long=long) for word in words]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == "" and line.startswith("error: ") and long in line
    assert "File name too long" in line or "does not exist" in line
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_an_output_that_cannot_be_written_is_not_stdout(tmp_path: Path):
    (tmp_path / "a.txt").write_text("text " * 100_000)
    command = f"ulimit -f 100; {sys.executable} -m parallax tokenize {tmp_path}/a.txt -o {tmp_path}/corpus"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert line.startswith("error: ") and "File too large" in line and "stdout" not in line


SLEEPING = """
[model]
name = "mine"
file = "model.py"
[train]
steps = 1
seq_len = 8
global_batch_size = 1
[log]
dir = "run"
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_any_training(tmp_path: Path, number: signal.Signals):
    (tmp_path / "run.toml").write_text(SLEEPING)
    (tmp_path / "model.py").write_text("import time\nopen('begun', 'w').close()\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "parallax", "train", "run.toml"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "begun").exists():
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(number)
    _, stderr = running.communicate(timeout=60)
    line = f"{number.name}: stopped before any training; start the same command again\n"
    assert (running.returncode, stderr) == (75, line)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_another_verb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, number: signal.Signals
):
    before = signal.getsignal(number)
    monkeypatch.setattr("parallax.schedule.command.run", lambda args: os.kill(os.getpid(), number))
    assert main(SCHEDULE) == 128 + number
    assert capsys.readouterr() == ("", "interrupted\n")
    assert signal.getsignal(number) == before


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


@pytest.mark.parametrize(("mesh", "tuned"), [("h100-sxm", True), ("tpu-v5p", False), ("cpu", False)])
def test_a_run_on_gpus_asks_xla_for_what_it_needs(mesh: str, tuned: bool, tmp_path: Path, monkeypatch):
    called = []
    monkeypatch.setattr("parallax.cli.tune_gpus", lambda: called.append("gpu"))
    monkeypatch.setattr("parallax.cli.emulate_devices", lambda _: called.append("cpu"))
    (tmp_path / "run.toml").write_text(f'[mesh]\nname = "{mesh}"\n[model]\nname = "llama-tiny"\n')
    assert main(["train", str(tmp_path / "run.toml")]) == 2  # what else is wrong is said afterwards
    assert ("gpu" in called) is tuned


INTERRUPTED = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == "parallax.config":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.argv = ["parallax", "plan"]
"""


@pytest.mark.parametrize(
    "start",
    [
        'runpy.run_module("parallax", run_name="__main__")',
        "from parallax.__main__ import main; sys.exit(main())",  # as the console script does
    ],
)
def test_ctrl_c_while_modules_load(start: str):
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["parallax"]
    assert entry == "parallax.__main__:main"
    done = subprocess.run([sys.executable, "-c", INTERRUPTED + start], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


IGNORED = """
import os, signal, sys, parallax.schedule.command
from parallax.cli import main

class Collected:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

def verb(args):
    Collected()
    print("goes on")

parallax.schedule.command.run = verb
sys.exit(main(sys.argv[1:]))
"""


def test_a_signal_where_exceptions_are_ignored():
    command = [sys.executable, "-c", IGNORED, *SCHEDULE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "interrupted\n")
