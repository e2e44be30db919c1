"""What a run reports while it goes: metrics.jsonl, TensorBoard's events, and the progress line on stderr."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from parallax.output import write_whole
from parallax.text import duration

FLUSH_EVENTS_S = 5
PLAIN_EVERY_S = 10.0  # between progress lines where stderr is no terminal


@dataclass(frozen=True)
class StepRecord:
    """A line of metrics.jsonl. `tokens` counts from the first step of the run; times are means since the last line,
    without evaluation and checkpoints. `mfu` is None on emulated devices, `valid_loss` where nothing was evaluated."""

    step: int
    loss: float  # nats a token
    grad_norm: float  # before clipping
    learning_rate: float
    tokens: int
    global_batch_size: int
    step_time_s: float
    data_wait_s: float  # of step_time_s, spent waiting for the batch
    tokens_per_s: float
    mfu: float | None
    skipped: int  # steps left out so far because a gradient was not finite
    valid_loss: float | None = None

    def to_json(self) -> str:
        fields = dataclasses.asdict(self)
        if self.valid_loss is None:
            del fields["valid_loss"]
        return json.dumps({name: finite(value) for name, value in fields.items()})


def finite(value: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None


def model_flops_utilization(
    flops_per_token: int, tokens_per_s: float, devices: int, peak_flops: float | None
) -> float | None:
    """Model FLOP/s over the dense peak of all devices (Chowdhery et al. 2022, arXiv 2204.02311, appendix B); None
    where the peak is not known."""
    return flops_per_token * tokens_per_s / (devices * peak_flops) if peak_flops else None


class LogError(RuntimeError):
    """A file of the log could not be written. The message is one line."""


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LogError(f"{path} cannot be written: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    """All of `text`, or what was there stays. Raises LogError."""
    with _writing(path):
        write_whole(path, text)


class MetricsFile:
    """Appends to metrics.jsonl. Lines after `step`, left by a run that went on after its last checkpoint, and a last
    line that is not whole are dropped: each step appears once. Its methods raise LogError."""

    def __init__(self, path: Path, step: int):
        self._path = path
        with _writing(path):
            kept = [line for line in _lines(path) if (found := _step_of(line)) is not None and found <= step]
        write_text(path, "".join(kept))
        with _writing(path):
            self._file = path.open("ab", buffering=0)  # nothing is left to be written when it is closed

    def write(self, record: StepRecord) -> None:
        line = f"{record.to_json()}\n".encode()
        with _writing(self._path):
            if (written := self._file.write(line)) != len(line):
                self._file.write(line[written:])  # the disk is full: raises why

    def close(self) -> None:
        with _writing(self._path):
            self._file.close()


class EventFile:
    """TensorBoard's events of one part of a run, in a file of their own, at the steps of metrics.jsonl.

    It begins with a mark (TensorFlow's SessionLog.START) at which readers drop the steps after `step` of earlier files,
    left by a run that went on after its last checkpoint. Its methods raise LogError."""

    def __init__(self, folder: Path, step: int):
        self._folder = folder
        mark = SessionLog(status=SessionLog.START)
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)  # TensorBoard's own says no reason
            self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_EVENTS_S)
            self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=mark))
            self._writer.flush()

    def write(self, record: StepRecord) -> None:
        scalars = {
            "train/loss": record.loss,
            "train/grad_norm": record.grad_norm,
            "train/learning_rate": record.learning_rate,
            "train/global_batch_size": record.global_batch_size,
            "eval/loss": record.valid_loss,
            "perf/tokens_per_s": record.tokens_per_s,
            "perf/step_time_s": record.step_time_s,
            "perf/mfu": record.mfu,
            "data/wait_share": record.data_wait_s / record.step_time_s,
        }
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items() if value is not None]
        with _writing(self._folder):
            self._writer.add_event(Event(wall_time=time.time(), step=record.step, summary=Summary(value=values)))

    def flush(self) -> None:
        with _writing(self._folder):
            self._writer.flush()

    def close(self) -> None:
        with _writing(self._folder):
            self._writer.close()


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.exists() else []


def _step_of(line: str) -> int | None:
    try:
        step = json.loads(line)["step"] if line.endswith("\n") else None
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None


class ProgressLine:
    """Step, loss, tokens/s, MFU and time left on stderr: a live line on a terminal, else one now and then."""

    def __init__(self, step: int, steps: int):
        self._steps = steps
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[text]}")
        self._live = Progress(*columns, console=self._console) if sys.stderr.isatty() else None
        self._printed = -math.inf
        if self._live:
            self._task = self._live.add_task("", total=steps, completed=step, text="compiling")

    def __enter__(self) -> ProgressLine:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False)

    def show(self, record: StepRecord, left_s: float) -> None:
        """`left_s`: the time that the rest will take."""
        text = self._text(record, left_s)
        if self._live:
            self._live.update(self._task, completed=record.step, text=text)
        if record.valid_loss is not None:
            self.say(f"step {record.step}/{self._steps}  {text}  held-out loss {record.valid_loss:.4f}")
        elif not self._live and time.monotonic() - self._printed >= PLAIN_EVERY_S:
            self.say(f"step {record.step}/{self._steps}  {text}")
        else:
            return
        self._printed = time.monotonic()

    def _text(self, record: StepRecord, left_s: float) -> str:
        parts = [f"loss {record.loss:.4f}", f"{record.tokens_per_s:,.0f} tokens/s"]
        if record.mfu is not None:
            parts.append(f"MFU {record.mfu:.1%}")
        return "  ".join([*parts, f"{duration(left_s)} left"])


def say(text: str) -> None:
    """A line on stderr; stdout is kept for results."""
    print(text, file=sys.stderr, flush=True)
