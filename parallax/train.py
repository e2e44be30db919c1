"""Training: from a resolved run file to a trained model. The loop, evaluation, checkpoints, and a clean way out."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from parallax.batch_size import batch_size, batch_sizes, samples_after
from parallax.canonical import Canonical
from parallax.checkpoint_io import CheckpointError, CheckpointWriter, restore_state
from parallax.config import ConfigError, show, to_toml
from parallax.echoes import leave_out_echoes
from parallax.metrics import (
    PLAIN_EVERY_S,
    EventFile,
    LogError,
    MetricsFile,
    ProgressLine,
    StepRecord,
    finite,
    model_flops_utilization,
    say,
    write_text,
)
from parallax.optimizer import TrainState
from parallax.program import StepMetrics
from parallax.signals import first_signal
from parallax.start import Start, check_still, lock, prepare
from parallax.summary import Result, closing, compiled_memory, opening
from parallax.text import duration
from parallax.validate import Resolved

STEPS_IN_FLIGHT = 2  # dispatched and not yet waited for; none on CPU, where queued collectives can lock each other up
STEPS_TO_FORESEE = 3  # before the time to go is said


def train(resolved: Resolved, *, resume: bool = False) -> Result:
    """Trains to `train.steps`, from the newest checkpoint of `log.dir` if `resume`. Reports on stderr.

    Raises ConfigError, before anything is compiled or changed, where the run cannot start: no data for a batch, other
    devices than the layout asks for, a `log.dir` that is in use, a checkpoint that is missing or of another run.
    """
    leave_out_echoes()
    start = prepare(resolved, resume)
    say(opening(start))
    run = _Run(start)
    with first_signal(run.stop.receive):
        result = run.go()
        say(closing(result, resolved.config, run.failures))
    return result


# The loop


class _StopRequest:
    """Set by SIGINT or SIGTERM, while the run listens."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def receive(self, number: signal.Signals) -> None:
        self.signal = number
        say(f"{number.name}: saving after this step; once more to stop at once")


class _InFlight(NamedTuple):
    """A step that was dispatched. `samples`: consumed up to its end; `size`: its own."""

    step: int
    samples: int
    size: int
    metrics: StepMetrics


class _Run:
    """One run's state while it goes. `step` and `samples` count from the first of the run, dispatched ones too."""

    def __init__(self, start: Start):
        self.start = start
        self.resolved, self.program, self.data = start.resolved, start.program, start.data
        self.config, self.checkpoints = start.resolved.config, start.checkpoints
        self.canonical = Canonical(start.program)
        self.first, self.resume = start.first, start.resume
        self.step, self.samples = start.first, start.samples
        self.last_samples = samples_after(self.config.train, start.samples, self.config.train.steps - start.first)
        self.writer = CheckpointWriter(start.checkpoints, self.config.checkpoint)
        self.saved: int | None = start.first if start.resume else None
        self.failures: list[str] = []
        self.resumed_valid_loss: float | None = None
        self.loss: float | None = None  # of the last step that was waited for
        self.valid_loss: float | None = None
        self.evaluated: int | None = None  # the step of `valid_loss`
        self.skipped = self.skipped_before = 0
        self.in_flight: deque[_InFlight] = deque()
        self.compile_time_s = 0.0
        self.clock = _Clock()
        self.stop = _StopRequest()

    def go(self) -> Result:
        steps = self.config.train.steps
        self.progress = ProgressLine(self.first, steps)
        with self.progress:
            self.state = self._first_state()
            if self.step < steps and self.stop.signal is None:
                took = self._compile(batch_size(self.config.train, self.samples))
                self.progress.say(f"compiled in {took}{compiled_memory(self.train_step)}")
            self._open_log()  # not before: a model that does not compile leaves no folder behind
            if self.resume:
                self.resumed_valid_loss = self._evaluate()
                self.progress.say(f"resumed at step {self.first}: held-out loss {self.valid_loss:.4f}")
            try:
                with self.writer:
                    self._loop(steps)
            except (CheckpointError, LogError) as error:
                self.failures.append(str(error))
        for log in (self.events, self.metrics):
            try:
                log.close()
            except LogError as error:
                if not self.failures:  # else it is the same disk that is full
                    self.failures.append(str(error))
        os.close(self.lock)
        return self._result("failed" if self.failures else "done" if self.step == steps else "stopped")

    def _open_log(self) -> None:
        """Raises ConfigError, and leaves nothing behind that was not there, where the log cannot be written."""
        folder = Path(self.config.log.dir)
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _remove_empty(new)
            raise ConfigError([f"log.dir = {show(str(folder))} cannot be made: {error.strerror}"]) from error
        self.lock = lock(folder)
        was_there = os.listdir(folder)
        try:
            check_still(self.start)
            self.metrics = MetricsFile(folder / "metrics.jsonl", self.first)
            self.events = EventFile(folder / "tensorboard", self.first)
            write_text(folder / "run.toml", to_toml(self.config))
        except (ConfigError, LogError) as error:
            for path in folder.iterdir():
                if path.name not in was_there:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            _remove_empty(new)
            os.close(self.lock)
            raise ConfigError(error.problems if isinstance(error, ConfigError) else [str(error)]) from error

    def _first_state(self) -> TrainState:
        if self.resume:
            state = self.canonical.to_state(restore_state(self.checkpoints, self.first, self.canonical.target))
        else:
            with jax.set_mesh(self.program.mesh):
                state = self.program.init(jax.random.key(self.config.train.seed))
        self.skipped = self.skipped_before = int(state.skipped)
        return state

    def _loop(self, steps: int) -> None:
        """Trains up to `steps` or a signal, saves, and notes in `failures` why a run cannot go on."""
        config = self.config
        batches = self.data.train.iterate(self.samples, batch_sizes(config.train, self.samples))
        self.clock.restart()
        while self.step < steps and self.stop.signal is None:
            with self.clock.waiting():
                batch = next(batches)
            if (size := len(batch.tokens_BS)) != self.training.config.train.global_batch_size:
                self._change_batch_size(size)
            on_devices = self.training.batch(batch)
            with jax.set_mesh(self.program.mesh):
                self.state, metrics = self.train_step(self.state, on_devices)
            self.step, self.samples = self.step + 1, self.samples + size
            self.in_flight.append(_InFlight(self.step, self.samples, size, metrics))
            evaluates = self.step == steps or _every(config.train.eval_every, self.step)
            saves = _every(config.checkpoint.every, self.step)
            pauses = evaluates or saves
            self._settle(leave=0 if pauses or jax.default_backend() == "cpu" else STEPS_IN_FLIGHT, evaluates=evaluates)
            self.writer.check()
            if self.skipped - self.skipped_before > config.train.max_skipped:
                self.failures.append(
                    f"step {self.step}: {self.skipped - self.skipped_before} steps had gradients that are not finite, "
                    f"more than train.max_skipped = {config.train.max_skipped}; stopped without saving; try a lower "
                    "optimizer.learning_rate"
                )
                return
            if saves and _is_finite(self.loss):
                self._save()
                self.clock.restart()
            elif saves:
                self.progress.say(f"warning: step {self.step}: the loss is not finite; no checkpoint of it is kept")
        self._settle(leave=0, evaluates=False)
        if self.step == steps and not _is_finite(self.valid_loss):
            self.failures.append(
                f"step {steps}: the loss is not finite; stopped without saving; try a lower optimizer.learning_rate"
            )
            return
        if self.step == steps or self.loss is None or math.isfinite(self.loss):  # None where no step was made
            self._save()
            return
        self.writer.wait()
        if self.checkpoints.steps():
            self.progress.say(f"warning: step {self.step}: the loss is not finite; no checkpoint of it is kept")
        else:
            self.failures.append(
                f"step {self.step}: the loss is not finite; stopped without saving; try a lower optimizer.learning_rate"
            )

    def _compile(self, size: int) -> str:
        """Makes the train step of batches of `size`; the state is the same for all of them. → the time it took"""
        begun = time.monotonic()
        sized = dataclasses.replace(self.config.train, global_batch_size=size)
        of_size = dataclasses.replace(self.config, train=sized)
        self.training = self.program if of_size == self.config else dataclasses.replace(self.program, config=of_size)
        batch = self.training.batch(self.data.train.batch(self.samples, size))
        with jax.set_mesh(self.program.mesh):
            self.train_step = self.training.train_step.lower(self.state, batch).compile()
        took_s = time.monotonic() - begun
        self.compile_time_s += took_s
        return duration(took_s)

    def _change_batch_size(self, size: int) -> None:
        self._settle(leave=0, evaluates=False)
        before = self.training.config.train.global_batch_size
        took = self._compile(size)
        self.progress.say(f"step {self.step + 1}: global batch size {before} → {size}, compiled in {took}")
        self.clock.restart()

    def _settle(self, leave: int, evaluates: bool) -> None:
        """Waits for all but the newest `leave` steps and records them."""
        while len(self.in_flight) > leave:
            done = self.in_flight.popleft()
            done = done._replace(metrics=jax.device_get(done.metrics))
            self.clock.step(done.size)
            self.skipped += 0 if done.metrics.finite else 1
            self.loss = float(done.metrics.loss)
            valid_loss = self._evaluate() if evaluates and done.step == self.step else None
            if valid_loss is not None or _every(self.config.log.every, done.step):
                self._record(done, valid_loss)
            if valid_loss is not None:
                self.clock.restart()

    def _record(self, done: _InFlight, valid_loss: float | None) -> None:
        spent, seq_len = self.clock.take(), self.config.train.seq_len
        tokens_per_s = spent.samples * seq_len / spent.total_s
        record = StepRecord(
            step=done.step,
            loss=float(done.metrics.loss),
            grad_norm=float(done.metrics.grad_norm),
            learning_rate=float(done.metrics.learning_rate),
            tokens=done.samples * seq_len,
            global_batch_size=done.size,
            step_time_s=spent.total_s / spent.steps,
            data_wait_s=spent.wait_s / spent.steps,
            tokens_per_s=tokens_per_s,
            mfu=self._mfu(tokens_per_s),
            skipped=self.skipped,
            valid_loss=valid_loss,
        )
        self.metrics.write(record)
        self.events.write(record)
        left_s = (self.last_samples - done.samples) * seq_len / tokens_per_s
        self.progress.show(record, left_s)
        before, now = self.clock.spent.steps - spent.steps, self.clock.spent.steps
        if before < STEPS_TO_FORESEE <= now and left_s > PLAIN_EVERY_S:
            self.progress.say(f"about {duration(left_s)} to go at {tokens_per_s:,.0f} tokens/s")

    def _evaluate(self) -> float:
        """Mean nats a token over the first `train.eval_batches` held-out batches."""
        losses = []
        for batch in self.data.held_out.batches(self.config.train.eval_batches):
            on_devices = self.program.batch(batch, self.program.evaluation_table)
            with jax.set_mesh(self.program.mesh):
                losses.append(float(self.program.evaluate(self.state.weights, on_devices)))
        self.valid_loss, self.evaluated = sum(losses) / len(losses), self.step
        return self.valid_loss

    def _save(self) -> None:
        if self.saved == self.step:
            return
        self.events.flush()  # readers find every step up to the checkpoint
        self.writer.save(self.step, self.canonical.from_state(self.state), self._facts())
        self.saved = self.step

    def _facts(self) -> dict[str, Any]:
        """See `parallax.checkpoint.FACTS`."""
        config = self.config
        return self.start.facts | {
            "step": self.step,
            "samples": self.samples,
            "tokens": self.samples * config.train.seq_len,
            "train_steps": config.train.steps,
            "loss": finite(self.loss),
            "valid_loss": finite(self.valid_loss) if self.evaluated == self.step else None,
            "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "kept": _every(config.checkpoint.keep_every, self.step),
        }

    # what came of it

    def _mfu(self, tokens_per_s: float) -> float | None:
        train, peaks = self.config.train, self.resolved.machine.peak_flops
        flops = self.resolved.shape.train_flops_per_token(train.seq_len)
        return model_flops_utilization(flops, tokens_per_s, self.config.devices, peaks.get(train.precision))

    def _result(self, status: Literal["done", "failed", "stopped"]) -> Result:
        spent, steps, seq_len = self.clock.spent, self.checkpoints.steps(), self.config.train.seq_len
        tokens_per_s = spent.samples * seq_len / spent.total_s if spent.steps else None
        return Result(
            status=status,
            step=self.step,
            samples=self.samples,
            tokens=self.samples * seq_len,
            loss=finite(self.loss),
            valid_loss=finite(self.valid_loss),
            resumed_step=self.first if self.resume else None,
            resumed_valid_loss=finite(self.resumed_valid_loss),
            skipped=self.skipped,
            tokens_per_s=tokens_per_s,
            data_wait_share=spent.wait_s / spent.total_s if spent.steps else None,
            mfu=self._mfu(tokens_per_s) if tokens_per_s else None,
            train_time_s=spent.total_s,
            compile_time_s=self.compile_time_s,
            peak_memory_bytes=_peak_memory_bytes(),
            parameters=self.resolved.shape.parameters,
            checkpoint=str(self.checkpoints.path(steps[-1])) if steps else None,
            log_dir=self.config.log.dir,
        )


class _Spent(NamedTuple):
    """Steps, their samples, the seconds they took, and those of them that were spent waiting for a batch."""

    steps: int
    samples: int
    total_s: float
    wait_s: float


class _Clock:
    """Time spent in train steps: what lies between `restart` and the `step`s that follow."""

    def __init__(self) -> None:
        self.spent = self._taken = _Spent(0, 0, 0.0, 0.0)
        self.restart()

    def restart(self) -> None:
        self._since = time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.spent = self.spent._replace(wait_s=self.spent.wait_s + time.monotonic() - begun)

    def step(self, samples: int) -> None:
        now, spent = time.monotonic(), self.spent
        self.spent = _Spent(spent.steps + 1, spent.samples + samples, spent.total_s + now - self._since, spent.wait_s)
        self._since = now

    def take(self) -> _Spent:
        """What was spent since the last `take`."""
        now, before, self._taken = self.spent, self._taken, self.spent
        steps, samples = now.steps - before.steps, now.samples - before.samples
        return _Spent(steps, samples, now.total_s - before.total_s, now.wait_s - before.wait_s)


def _peak_memory_bytes() -> int | None:
    """Of the fullest local device; None where the backend does not count."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return max((peak for peak in peaks if peak), default=None)


def _is_finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def _remove_empty(folders: list[Path]) -> None:
    """Of those from the innermost on that hold nothing."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _every(period: int, step: int) -> bool:
    return period > 0 and step % period == 0
