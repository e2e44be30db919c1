"""Training: from a resolved run file to a trained model. The loop, evaluation, checkpoints, and a clean way out."""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from parallax.canonical import Canonical
from parallax.checkpoint import identity
from parallax.config import ConfigError, show, to_toml
from parallax.data import Batch
from parallax.metrics import MetricsFile, ProgressLine, StepRecord, duration, model_flops_utilization, say
from parallax.optimizer import TrainState
from parallax.program import StepMetrics
from parallax.start import Start, lock, prepare
from parallax.validate import Resolved

STEPS_IN_FLIGHT = 2  # dispatched and not yet waited for; none on CPU, where queued collectives can lock each other up
EXIT_STATUS = {"done": 0, "failed": 1, "stopped": 75}


@dataclass(frozen=True)
class Result:
    """How a run ended. Losses are in nats a token; None where there is none, or it is not finite."""

    status: Literal["done", "failed", "stopped"]
    step: int
    tokens: int
    loss: float | None  # of the last step
    valid_loss: float | None  # of the last evaluation
    resumed_step: int | None
    resumed_valid_loss: float | None  # of the checkpoint, before any further step
    skipped: int
    tokens_per_s: float | None  # without compilation, evaluation and checkpoints
    mfu: float | None
    train_time_s: float
    compile_time_s: float
    parameters: int
    checkpoint: str | None
    log_dir: str

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.status]


def train(resolved: Resolved, *, resume: bool = False) -> Result:
    """Trains to `train.steps`, from the newest checkpoint of `log.dir` if `resume`. Reports on stderr.

    Raises ConfigError, before anything is compiled or changed, where the run cannot start: no data for a batch, other
    devices than the layout asks for, a `log.dir` that is in use, a checkpoint that is missing or of another run.
    """
    start = prepare(resolved, resume)
    say(start.summary())
    run = _Run(start)
    result = run.go()
    say(run.last_words(result))
    return result


# The loop


class _StopRequest:
    """Set by SIGINT or SIGTERM. A second signal does what it does to any program: it ends this one at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        watched = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._receive) for number in watched}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, _: object) -> None:
        self.signal = signal.Signals(number)
        for watched in (signal.SIGINT, signal.SIGTERM):
            signal.signal(watched, signal.SIG_DFL)
        say(f"{self.signal.name}: saving after this step; once more to stop at once")


class _Run:
    """One run's state while it goes. `step` counts finished or dispatched steps from the first of the run."""

    def __init__(self, start: Start):
        self.resolved, self.program, self.data = start.resolved, start.program, start.data
        self.config, self.checkpoints = start.resolved.config, start.checkpoints
        self.canonical = Canonical(start.program)
        self.first, self.step, self.resume = start.first, start.first, start.resume
        self.saved: int | None = start.first if start.resume else None
        self.resumed_valid_loss: float | None = None
        self.last: StepRecord | None = None
        self.valid_loss: float | None = None
        self.skipped = self.skipped_before = 0
        self.finite = True  # the loss of the last step
        self.in_flight: deque[tuple[int, StepMetrics]] = deque()
        self.compile_time_s = 0.0
        self.clock = _Clock()
        self.stop = _StopRequest()

    def go(self) -> Result:
        steps = self.config.train.steps
        self.progress = ProgressLine(self.first, steps)
        with self.stop.listening(), self.progress:
            self.state = self._first_state()
            if self.step < steps and self.stop.signal is None:
                self.train_step = self._compile(next(iter(self.data.held_out.batches(1))))
            self._open_log()  # not before: a model that does not compile leaves no folder behind
            if self.resume:
                self.resumed_valid_loss = self.valid_loss = self._evaluate()
                self.progress.say(f"resumed at step {self.first}: held-out loss {self.valid_loss:.4f}")
            failed = self.step < steps and not self._loop(steps)
            failed = failed or (self.step == steps and not math.isfinite(self.valid_loss or math.nan))
            if not failed:
                self._save()
        self.metrics.close()
        os.close(self.lock)
        status = "failed" if failed else "done" if self.step == steps else "stopped"
        return self._result(status)

    def _open_log(self) -> None:
        folder = Path(self.config.log.dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError([f"log.dir = {show(str(folder))} cannot be made: {error.strerror}"]) from error
        self.lock = lock(folder)
        (folder / "run.toml").write_text(to_toml(self.config), encoding="utf-8")
        self.metrics = MetricsFile(folder / "metrics.jsonl", self.first)

    def _first_state(self) -> TrainState:
        if self.resume:
            state = self.canonical.to_state(self.checkpoints.restore(self.first, self.canonical.target))
        else:
            with jax.set_mesh(self.program.mesh):
                state = self.program.init(jax.random.key(self.config.train.seed))
        self.skipped = self.skipped_before = int(state.skipped)
        return state

    def _loop(self, steps: int) -> bool:
        """Trains up to `steps` or a signal. False: too many steps had gradients that are not finite."""
        config = self.config
        batches = self.data.train.iterate(self.first)
        self.clock.restart()
        while self.step < steps and self.stop.signal is None:
            with jax.set_mesh(self.program.mesh):
                self.state, metrics = self.train_step(self.state, self.program.batch(*next(batches)))
            self.step += 1
            self.in_flight.append((self.step, metrics))
            evaluates = self.step == steps or _every(config.train.eval_every, self.step)
            saves = _every(config.checkpoint.every, self.step)
            pauses = evaluates or saves or self.step == steps
            self._settle(leave=0 if pauses or jax.default_backend() == "cpu" else STEPS_IN_FLIGHT, evaluates=evaluates)
            if self.skipped - self.skipped_before > config.train.max_skipped:
                return False
            if saves and self.finite:
                self._save()
                self.clock.restart()
            elif saves:
                self.progress.say(f"warning: step {self.step}: the loss is not finite; no checkpoint of it is kept")
        self._settle(leave=0, evaluates=False)
        return True

    def _compile(self, batch: Batch):
        start = time.monotonic()
        with jax.set_mesh(self.program.mesh):
            compiled = self.program.train_step.lower(self.state, self.program.batch(*batch)).compile()
        self.compile_time_s = time.monotonic() - start
        self.progress.say(f"compiled in {duration(self.compile_time_s)}")
        return compiled

    def _settle(self, leave: int, evaluates: bool) -> None:
        """Waits for all but the newest `leave` steps and records them."""
        while len(self.in_flight) > leave:
            step, metrics = self.in_flight.popleft()
            metrics = jax.device_get(metrics)
            self.clock.step()
            self.skipped += 0 if metrics.finite else 1
            self.finite = math.isfinite(metrics.loss)
            valid_loss = None
            if evaluates and step == self.step:
                valid_loss = self.valid_loss = self._evaluate()
            if valid_loss is not None or _every(self.config.log.every, step):
                self._record(step, metrics, valid_loss)
            if valid_loss is not None:
                self.clock.restart()

    def _record(self, step: int, metrics: StepMetrics, valid_loss: float | None) -> None:
        step_time_s = self.clock.take()
        tokens_per_s = self._tokens(1) / step_time_s
        self.last = StepRecord(
            step=step,
            loss=float(metrics.loss),
            grad_norm=float(metrics.grad_norm),
            learning_rate=float(metrics.learning_rate),
            tokens=self._tokens(step),
            step_time_s=step_time_s,
            tokens_per_s=tokens_per_s,
            mfu=self._mfu(tokens_per_s),
            skipped=self.skipped,
            valid_loss=valid_loss,
        )
        self.metrics.write(self.last)
        self.progress.show(self.last)

    def _evaluate(self) -> float:
        """Mean nats a token over the first `train.eval_batches` held-out batches."""
        losses = []
        for batch in self.data.held_out.batches(self.config.train.eval_batches):
            with jax.set_mesh(self.program.mesh):
                on_devices = self.program.batch(*batch, table=self.program.evaluation_table)
                losses.append(float(self.program.evaluate(self.state.weights, on_devices)))
        return sum(losses) / len(losses)

    def _save(self) -> None:
        if self.saved == self.step:
            return
        facts: dict[str, Any] = {
            "step": self.step,
            "samples": self.step * self.config.train.global_batch_size,
            "train_steps": self.config.train.steps,
            "identity": identity(self.resolved),
            "weights": self.program.model.weight_shapes,
        }
        self.checkpoints.save(self.step, self.canonical.from_state(self.state), facts)
        self.saved = self.step

    # what came of it

    def _tokens(self, steps: int) -> int:
        return steps * self.config.train.global_batch_size * self.config.train.seq_len

    def _mfu(self, tokens_per_s: float) -> float | None:
        train, peaks = self.config.train, self.resolved.machine.peak_flops
        flops = self.resolved.shape.train_flops_per_token(train.seq_len)
        return model_flops_utilization(flops, tokens_per_s, self.config.devices, peaks.get(train.precision))

    def _result(self, status: Literal["done", "failed", "stopped"]) -> Result:
        clock = self.clock
        tokens_per_s = self._tokens(clock.steps) / clock.total_s if clock.steps else None
        finite = lambda x: x if x is not None and math.isfinite(x) else None
        return Result(
            status=status,
            step=self.step,
            tokens=self._tokens(self.step),
            loss=finite(self.last and self.last.loss),
            valid_loss=finite(self.valid_loss),
            resumed_step=self.first if self.resume else None,
            resumed_valid_loss=finite(self.resumed_valid_loss),
            skipped=self.skipped,
            tokens_per_s=tokens_per_s,
            mfu=self._mfu(tokens_per_s) if tokens_per_s else None,
            train_time_s=clock.total_s,
            compile_time_s=self.compile_time_s,
            parameters=self.resolved.shape.parameters,
            checkpoint=str(self.checkpoints.path(self.saved)) if self.saved is not None else None,
            log_dir=self.config.log.dir,
        )

    def last_words(self, result: Result) -> str:
        """The lines printed at the end; the last says what to do next."""
        steps = self.config.train.steps
        newest = f"the newest checkpoint is {result.checkpoint or 'none'}; try a lower optimizer.learning_rate"
        if result.status == "failed":
            if result.step == steps:
                return f"error: step {steps}: the loss is not finite; stopped without saving\n{newest}"
            return (
                f"error: step {result.step}: {self.skipped - self.skipped_before} steps had gradients that are not "
                f"finite, more than train.max_skipped = {self.config.train.max_skipped}; stopped without saving\n"
                f"{newest}"
            )
        speed = f", {result.tokens_per_s:,.0f} tokens/s" if result.tokens_per_s else ""
        skipped = f", {result.skipped} skipped" if result.skipped else ""
        line = f"step {result.step} of {steps}: {duration(result.train_time_s)} of training{speed}{skipped}"
        if result.status == "stopped":
            return f"{line}\nstopped; saved {result.checkpoint}: run the same command with --resume to go on"
        return f"{line}\ndone; held-out loss {self.valid_loss:.4f}; saved {result.checkpoint}"


class _Clock:
    """Time spent in train steps: what lies between `restart` and the `step`s that follow."""

    def __init__(self) -> None:
        self.steps, self.total_s = 0, 0.0
        self._taken = (0, 0.0)
        self.restart()

    def restart(self) -> None:
        self._since = time.monotonic()

    def step(self) -> None:
        now = time.monotonic()
        self.steps, self.total_s, self._since = self.steps + 1, self.total_s + now - self._since, now

    def take(self) -> float:
        """Mean seconds of the steps since the last `take`."""
        steps, total_s = self._taken
        self._taken = (self.steps, self.total_s)
        return (self.total_s - total_s) / (self.steps - steps)


def _every(period: int, step: int) -> bool:
    return period > 0 and step % period == 0
