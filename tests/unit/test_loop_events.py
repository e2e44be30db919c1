"""TensorBoard's events, read back by TensorBoard's own reader; and a log that cannot be written."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from parallax.metrics import EventFile, LogError, MetricsFile, StepRecord, write_text


def record(step: int, loss: float, mfu: float | None = None, valid_loss: float | None = None) -> StepRecord:
    return StepRecord(
        step=step,
        loss=loss,
        grad_norm=2.0,
        learning_rate=0.5,
        tokens=100 * step,
        global_batch_size=4,
        step_time_s=0.5,
        data_wait_s=0.125,
        tokens_per_s=200.0,
        mfu=mfu,
        skipped=0,
        valid_loss=valid_loss,
    )


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def test_scalars(tmp_path: Path):
    events = EventFile(tmp_path, 0)
    events.write(record(1, 3.0))
    events.write(record(2, 2.5, mfu=0.25, valid_loss=2.75))
    events.close()
    both = lambda value: [(1, value), (2, value)]
    assert read(tmp_path) == {
        "train/loss": [(1, 3.0), (2, 2.5)],
        "train/grad_norm": both(2.0),
        "train/learning_rate": both(0.5),
        "train/global_batch_size": both(4.0),
        "eval/loss": [(2, 2.75)],
        "perf/tokens_per_s": both(200.0),
        "perf/step_time_s": both(0.5),
        "perf/mfu": [(2, 0.25)],
        "data/wait_share": both(0.25),
    }


def test_a_resumed_run_shows_each_step_once(tmp_path: Path):
    """A run that went on to step 5 after its checkpoint of step 3, resumed twice."""
    for first, last in ((0, 5), (3, 6), (3, 4)):
        events = EventFile(tmp_path, first)
        for step in range(first + 1, last + 1):
            events.write(record(step, 10.0 * first + step))
        events.close()
    assert len(list(tmp_path.iterdir())) == 3
    assert read(tmp_path)["train/loss"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 34.0)]


def test_a_loss_that_is_not_finite_is_written(tmp_path: Path):
    events = EventFile(tmp_path, 0)
    events.write(record(1, math.nan))
    events.flush()
    ((step, loss),) = read(tmp_path)["train/loss"]
    assert step == 1 and math.isnan(loss)
    events.close()
    with pytest.raises(LogError, match="closed"):
        events.write(record(2, 1.0))


# Files that cannot be written


@contextmanager
def no_file_beyond(size_bytes: int) -> Iterator[None]:
    """As a full disk does, but for the reason that the system gives."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_metrics_that_cannot_be_written(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    metrics.write(record(1, 3.0))
    with (
        no_file_beyond(path.stat().st_size + 10),
        pytest.raises(LogError, match=f"^{path} cannot be.* too large"),
    ):
        metrics.write(record(2, 3.0))
    metrics.close()
    assert path.read_text().count("\n") == 1
    before = path.read_text()
    with no_file_beyond(10), pytest.raises(LogError, match="File too large"):
        MetricsFile(path, 1)
    assert path.read_text() == before and [*tmp_path.iterdir()] == [path]
    MetricsFile(path, 1).close()  # what was cut off is dropped
    assert json.loads(path.read_text())["step"] == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_events_that_cannot_be_written(tmp_path: Path):
    events = EventFile(tmp_path, 0)
    with no_file_beyond(10), pytest.raises(LogError, match=f"^{tmp_path} cannot be written: File too large$"):
        events.write(record(1, 3.0))
        events.flush()
    events.close()


def test_folders_and_files_in_each_others_places(tmp_path: Path):
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "tensorboard").touch()
    with pytest.raises(LogError, match=r"/metrics\.jsonl cannot be written: Is a directory$"):
        MetricsFile(tmp_path / "metrics.jsonl", 0)
    with pytest.raises(LogError, match=r"/tensorboard cannot be written: File exists$"):
        EventFile(tmp_path / "tensorboard", 0)
    with pytest.raises(LogError, match=r"/metrics\.jsonl cannot be written: Is a directory$"):
        write_text(tmp_path / "metrics.jsonl", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]
