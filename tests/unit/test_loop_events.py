"""TensorBoard's events, read back by TensorBoard's own reader."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from parallax.metrics import EventFile, StepRecord


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
    with pytest.raises(OSError, match="closed"):
        events.write(record(2, 1.0))
