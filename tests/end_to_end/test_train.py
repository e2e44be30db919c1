"""`parallax train` as a user runs it: one run, resumed on another layout, interrupted, and refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.xdist_group("train")  # one worker makes the run that the others read
ROOT = Path(__file__).parents[2]
RUN = """\
[model]
name = "llama-tiny"
layers = 4
width = 32
ff = 64

[parallel]
dp = 2
pp = 2

[train]
steps = 6
seq_len = 32
global_batch_size = 8
eval_every = 3
eval_batches = 2
precision = "float32"

[checkpoint]
every = 3
"""
OTHER_LAYOUT = (
    "parallel.dp=1",
    "parallel.tp=2",
    'parallel.schedule="interleaved"',
    "parallel.virtual_stages=2",
    "parallel.zero=0",
)
KEYS = {
    *("step", "loss", "grad_norm", "learning_rate", "tokens", "global_batch_size", "step_time_s", "data_wait_s"),
    *("tokens_per_s", "mfu", "skipped"),
}
ONE_DEVICE = ("parallel.dp=1", "parallel.pp=1", "model.layers=2", "train.eval_every=0", "train.eval_batches=1")
# What the command line has to set by itself.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS")}


@pytest.fixture(scope="module", autouse=True)
def each_program_is_compiled_once(tmp_path_factory):
    """By jax's cache of compiled programs: most of what these tests take is compilation."""
    ENVIRONMENT["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path_factory.mktemp("compiled"))
    ENVIRONMENT["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def command(folder: Path, *words: str) -> list[str]:
    (folder / "run.toml").write_text(f'{RUN}\n[log]\ndir = "{folder / "run"}"\n')
    return [sys.executable, "-m", "parallax", "train", str(folder / "run.toml"), *words]


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, *words), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def first(folder: Path) -> dict:
    """The result of the first run."""
    done = train(folder, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


def test_a_run(folder: Path, first: dict):
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line.keys() - {"valid_loss"} == KEYS for line in lines)
    assert [line["tokens"] for line in lines] == [256 * step for step in range(1, 7)]
    assert [line["step"] for line in lines if "valid_loss" in line] == [3, 6]
    assert all(line["mfu"] is None and line["skipped"] == 0 for line in lines)
    assert all(line["global_batch_size"] == 8 and 0 <= line["data_wait_s"] <= line["step_time_s"] for line in lines)
    assert lines[0]["loss"] == pytest.approx(5.55, abs=0.1)  # log 256, about what a new model has
    assert (first["status"], first["step"], first["valid_loss"]) == ("done", 6, lines[-1]["valid_loss"])
    assert (first["samples"], first["tokens"]) == (48, 48 * 32) and 0 <= first["data_wait_share"] <= 1
    facts = json.loads((folder / "run" / "checkpoints" / "3" / "facts" / "metadata").read_text())
    assert (facts["step"], facts["samples"], facts["tokens"]) == (3, 24, 24 * 32)
    assert (facts["loss"], facts["valid_loss"]) == (lines[2]["loss"], lines[2]["valid_loss"])
    assert facts["layout"]["parallel"]["dp"] == 2 and facts["versions"].keys() == {"parallax", "jax"}
    assert sorted(path.name for path in (folder / "run" / "checkpoints").iterdir()) == ["3", "6"]


def test_a_folder_in_use_is_refused(folder: Path, first: dict):
    before = files(folder)
    refused = train(folder)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: log.dir = ") and "is not empty; use --resume" in refused.stderr
    assert files(folder) == before


def test_another_run_is_not_resumed(folder: Path, first: dict):
    before = files(folder)
    refused = train(folder, "--resume", "--json", "train.seed=1", "model.ff=128", "train.global_batch_size=16")
    assert (refused.returncode, refused.stdout) == (2, "")
    lines = refused.stderr.splitlines()
    assert [line.split(" is not what the checkpoint")[0] for line in lines] == [
        "error: model.ff = 128",
        "error: train.global_batch_size = 16",
        "error: train.seed = 1",
    ]
    assert files(folder) == before


def test_nothing_to_resume(tmp_path: Path):
    refused = train(tmp_path, "--resume")
    assert (refused.returncode, "does not exist, so there is nothing to resume" in refused.stderr) == (2, True)
    assert not (tmp_path / "run").exists()


def test_resumed_on_another_layout(folder: Path, first: dict):
    """Last of the tests on `folder`, which it changes."""
    with (folder / "run" / "metrics.jsonl").open("a") as file:  # as a crash after the last checkpoint leaves them
        file.write('{"step": 7, "loss": 0.0}\n{"step": 8, "lo')
    done = train(folder, "--resume", "--json", "train.steps=9", *OTHER_LAYOUT)
    assert done.returncode == 0, done.stderr
    assert "warning: train.steps = 9 was 6" in done.stderr
    result, lines = json.loads(done.stdout), metrics(folder)
    assert (result["resumed_step"], result["step"]) == (6, 9)
    assert result["resumed_valid_loss"] == pytest.approx(first["valid_loss"], abs=1e-5)
    assert [line["step"] for line in lines] == [*range(1, 10)]
    assert lines[-1]["tokens"] == 256 * 9 and lines[-1]["valid_loss"] < first["valid_loss"]
    assert sorted(path.name for path in (folder / "run" / "checkpoints").iterdir()) == ["6", "9"]
    events = EventAccumulator(str(folder / "run" / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (line["step"], pytest.approx(line["loss"])) for line in lines
    ]
    assert [event.step for event in events.Scalars("eval/loss")] == [3, 6, 9]


def test_a_signal_saves(tmp_path: Path):
    running = subprocess.Popen(
        command(tmp_path, "train.steps=100000", "train.eval_every=0", "checkpoint.every=0"),
        cwd=ROOT,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    path, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not (path.exists() and path.read_text().count("\n") > 2):
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=120)
    assert running.returncode == 75, stderr
    step = metrics(tmp_path)[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / str(step)).is_dir()
    last = stderr.splitlines()[-1]
    assert f"checkpoints/{step}" in last and "--resume" in last


def test_a_damaged_checkpoint_is_named_and_half_of_one_is_passed_over(folder: Path, first: dict, tmp_path: Path):
    shutil.copytree(folder / "run", tmp_path / "run")
    newest = max((tmp_path / "run" / "checkpoints").iterdir(), key=lambda path: int(path.name))
    facts = newest / "facts" / "metadata"
    facts.write_text(facts.read_text()[:10])
    before = files(tmp_path)
    refused = train(tmp_path, "--resume", "train.steps=20")
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: checkpoint {newest} cannot be read: ")
    assert "move it away to resume from" in refused.stderr and refused.stderr.count("\n") == 1
    assert files(tmp_path) == before

    shutil.rmtree(newest / "facts")  # as a crash would leave it: the one before is the newest whole one
    (tmp_path / "run" / "metrics.jsonl").open("a").write('[]\n{"step": "x"}\n{"step": 3')
    step = int(newest.name)
    done = train(tmp_path, "--resume", f"train.steps={step}", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["resumed_step"] < step == json.loads(done.stdout)["step"]
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, step + 1))


def test_a_loss_that_is_not_finite_is_a_failure(tmp_path: Path):
    done = train(tmp_path, "train.steps=3", "optimizer.learning_rate=1e25", "optimizer.weight_decay=1e25")
    assert done.returncode == 1
    assert "error: step 3: the loss is not finite; stopped without saving" in done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_microbatches_without_a_pipeline_are_one_batch(tmp_path: Path):
    losses = []
    for micro_batch_size in (1, 8):
        folder = tmp_path / str(micro_batch_size)
        folder.mkdir()
        done = train(folder, *ONE_DEVICE, f"train.micro_batch_size={micro_batch_size}", "train.steps=4")
        assert done.returncode == 0, done.stderr
        losses.append([line["loss"] for line in metrics(folder)])
    assert len(losses[0]) == 4 and losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_resumed_in_the_middle_of_a_ramp(tmp_path: Path):
    """4 up to 16 samples, then 8. Resumed from step 3, the losses are the same bit for bit."""
    ramp = (*ONE_DEVICE, "train.rampup_batch_size=[4, 4, 16]")
    done = train(tmp_path, *ramp, "--json")
    assert done.returncode == 0, done.stderr
    lines, sizes = metrics(tmp_path), [4, 4, 4, 4, 8, 8]
    assert [line["global_batch_size"] for line in lines] == sizes
    assert [line["tokens"] for line in lines] == [32 * sum(sizes[:n]) for n in range(1, 7)]
    assert (json.loads(done.stdout)["samples"], json.loads(done.stdout)["tokens"]) == (32, 32 * 32)
    assert "step 5: global batch size 4 → 8, compiled in" in done.stderr

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    again = train(tmp_path, *ramp, "--resume", "--json")
    assert again.returncode == 0, again.stderr
    result, resumed = json.loads(again.stdout), metrics(tmp_path)
    assert (result["resumed_step"], result["samples"]) == (3, 32)
    for key in ("step", "loss", "grad_norm", "tokens", "global_batch_size", "learning_rate"):
        assert [line[key] for line in resumed] == [line[key] for line in lines]


def checkpoints(folder: Path) -> list[int]:
    """Steps of the checkpoints that have their final names."""
    where = folder / "run" / "checkpoints"
    return sorted(int(path.name) for path in where.iterdir() if path.name.isdecimal()) if where.is_dir() else []


def wait_for(running: subprocess.Popen, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert running.poll() is None and time.monotonic() < deadline, running.communicate()
        time.sleep(0.001)


def test_killed_while_a_checkpoint_is_written(tmp_path: Path):
    """By SIGKILL, then by two Ctrl-C: what was there before is good to resume from, and halves do not count."""
    heavy = (*ONE_DEVICE, "model.layers=1", "model.width=256", "model.ff=8192", "train.global_batch_size=1")
    words = (*heavy, "train.seq_len=8", "checkpoint.every=1", "train.steps=100000", "train.eval_every=0")
    being_written = lambda: [*(tmp_path / "run" / "checkpoints").glob("*-tmp")]

    def start(*more: str) -> subprocess.Popen:
        whole = command(tmp_path, *words, *more)
        return subprocess.Popen(whole, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)

    running = start()
    wait_for(running, lambda: checkpoints(tmp_path) and being_written())
    running.kill()
    running.communicate()
    steps, halves = checkpoints(tmp_path), being_written()
    assert steps and halves

    running = start("--resume")
    wait_for(running, lambda: (later := checkpoints(tmp_path)) and later[-1] > steps[-1] and being_written())
    running.send_signal(signal.SIGINT)
    assert running.stderr
    for line in running.stderr:
        if line.startswith("SIGINT: saving after this step"):
            break
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=60)
    assert running.returncode == -signal.SIGINT
    assert not set(halves) & set(being_written())  # the second run has cleared up after the first

    newest = checkpoints(tmp_path)[-1]
    last = train(tmp_path, *words, "--resume", "--json", f"train.steps={newest + 1}")
    assert last.returncode == 0, last.stderr
    result = json.loads(last.stdout)
    assert (result["resumed_step"], result["step"]) == (newest, newest + 1)
    assert [line["step"] for line in metrics(tmp_path)] == [*range(1, newest + 2)]
    assert being_written() == [] and checkpoints(tmp_path)[-1] == newest + 1


def limited(size: int, words: list[str]) -> list[str]:
    """The command, in a process whose files may not grow beyond `size` bytes"""
    limit = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)"
    return [sys.executable, "-c", f"{limit}; os.execv(sys.argv[2], sys.argv[2:])", str(size), *words]


def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path: Path):
    """The system lets no file grow beyond 64 kB. The run would have gone on for long."""
    words = command(tmp_path, *ONE_DEVICE, "train.steps=100000", "checkpoint.every=2", "log.every=1000", "--json")
    uncached = {k: v for k, v in ENVIRONMENT.items() if not k.startswith("JAX_")}
    done = subprocess.run(limited(64_000, words), cwd=ROOT, env=uncached, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert (result["status"], result["checkpoint"]) == ("failed", None) and 2 <= result["step"] < 100000
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "checkpoints/2 could not be written: " in error and "File too large" in error
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize(("every", "status"), [(0, 1), (1, 75)])
def test_stopped_where_the_loss_is_not_finite(tmp_path: Path, every: int, status: int):
    """The first step's loss is finite: its checkpoint is what there is to go on from, and is not pushed out."""
    words = ("optimizer.learning_rate=1e25", "optimizer.weight_decay=1e25", "train.max_skipped=1000000", *ONE_DEVICE)
    whole = command(tmp_path, *words, "train.steps=100000", f"checkpoint.every={every}", "checkpoint.keep=1", "--json")
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = subprocess.Popen(whole, cwd=ROOT, env=ENVIRONMENT, text=True, **streams)
    path = tmp_path / "run" / "metrics.jsonl"
    wait_for(running, lambda: path.exists() and '"loss": null' in path.read_text())
    running.send_signal(signal.SIGTERM)
    stdout, stderr = running.communicate(timeout=120)
    assert running.returncode == status, stderr
    result = json.loads(stdout)
    if every == 0:
        assert checkpoints(tmp_path) == [] and result["status"] == "failed"
        assert f"error: step {result['step']}: the loss is not finite; stopped without saving" in stderr
        return
    (saved,) = checkpoints(tmp_path)
    assert (
        saved < result["step"]
        and json.loads((tmp_path / "run" / "checkpoints" / str(saved) / "facts" / "metadata").read_text())["loss"]
    )
    assert "was not saved, the newest checkpoint is" in stderr.splitlines()[-1]


@pytest.mark.parametrize(("limit", "status", "line"), [(10, 2, "tensorboard"), (3000, 1, "cannot be written")])
def test_a_log_that_cannot_be_written_ends_the_run(tmp_path: Path, limit: int, status: int, line: str):
    """No file may grow beyond the limit: reached at the start, where nothing is left behind, or later."""
    words = command(tmp_path, *ONE_DEVICE, "train.steps=100000", "checkpoint.every=0")
    environment = {k: v for k, v in ENVIRONMENT.items() if not k.startswith("JAX_")}
    done = subprocess.run(limited(limit, words), cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    (error,) = (text for text in done.stderr.splitlines() if text.startswith("error: "))
    assert line in error and error.endswith("File too large") and "Traceback" not in done.stderr
    assert (tmp_path / "run").exists() == (status == 1)


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard"])
def test_a_log_that_is_something_else_is_refused(folder: Path, first: dict, tmp_path: Path, name: str):
    shutil.copytree(folder / "run", tmp_path / "run")
    path = tmp_path / "run" / name
    path.rename(tmp_path / "away")
    path.mkdir() if name == "metrics.jsonl" else path.touch()
    before = files(tmp_path)
    refused = train(tmp_path, "--resume", "train.steps=20", "optimizer.clip_norm=0.5")
    assert refused.returncode == 2, refused.stderr
    assert "warning: optimizer.clip_norm = 0.5 was 1.0: from here on" in refused.stderr
    (error,) = (text for text in refused.stderr.splitlines() if text.startswith("error: "))
    assert error.startswith(f"error: {path} cannot be written: ") and "Traceback" not in refused.stderr
    after = files(tmp_path)
    assert {name: after[name] for name in before} == before if name == "metrics.jsonl" else path.is_file()


def test_sources_of_one_name_and_a_built_in_one(tmp_path: Path):
    for language in ("en", "de"):
        (tmp_path / language).mkdir()
        (tmp_path / language / "x.txt").write_text(f"some text in {language} " * 2000)
    mixture = f'data.source={{ "{tmp_path}/en/x.txt" = 1.0, "{tmp_path}/de/x.txt" = 1.0, synthetic = 1.0 }}'
    done = train(tmp_path, *ONE_DEVICE, mixture, "train.steps=1")
    assert done.returncode == 0, done.stderr
    assert checkpoints(tmp_path) == [1] and "in one microbatch" not in done.stderr
    assert train(tmp_path, *ONE_DEVICE, mixture, "train.steps=1", "--resume").returncode == 0
