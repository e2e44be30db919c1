"""The two blocks that a run prints on stderr: what it is about to do, and what came of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from parallax.batch_size import batch_size, samples_after
from parallax.config import Checkpoint, RunConfig
from parallax.program import Program
from parallax.sharding import Tree
from parallax.start import Start
from parallax.text import columns, duration, layout, size

EXIT_STATUS = {"done": 0, "failed": 1, "stopped": 75}


@dataclass(frozen=True)
class Result:
    """How a run ended. Losses are in nats a token; None where there is none, or it is not finite."""

    status: Literal["done", "failed", "stopped"]
    step: int
    samples: int
    tokens: int
    loss: float | None  # of the last step
    valid_loss: float | None  # of the last evaluation
    resumed_step: int | None
    resumed_valid_loss: float | None  # of the checkpoint, before any further step
    skipped: int
    tokens_per_s: float | None  # without compilation, evaluation and checkpoints
    data_wait_share: float | None  # of the training time, spent waiting for batches
    mfu: float | None
    train_time_s: float
    compile_time_s: float
    peak_memory_bytes: int | None  # of the fullest device, where the backend counts it
    parameters: int
    checkpoint: str | None
    log_dir: str

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.status]


# Before


def opening(start: Start) -> str:
    """What the run is about to do."""
    resolved, config, train = start.resolved, start.resolved.config, start.resolved.config.train
    emulated = "emulated " if resolved.machine.platform == "cpu" else ""
    tokens = (samples_after(train, start.samples, train.steps - start.first) - start.samples) * train.seq_len
    weights, gradients, optimizer = map(size, state_bytes(start.program))
    rows = {
        "model": f"{config.model.name}, {_layers(start.program)}, {resolved.shape.parameters:,} parameters",
        "devices": ": ".join(
            filter(None, [f"{config.devices} {emulated}{resolved.machine.name}", layout(config.parallel)])
        ),
        "memory": f"weights {weights}, gradients {gradients}, optimizer {optimizer} a device; activations not counted",
        "data": start.data.description + ", attention inside documents" * config.data.isolate_documents,
        "step": _step(config, start.samples),
        "steps": f"{start.first:,} to {train.steps:,}: {tokens:,} tokens, {train.precision}, remat {train.remat}",
        "saves": _saves(config.checkpoint),
        "run": config.log.dir,
    }
    return columns([*rows.items()])


def _layers(program: Program) -> str:
    stages = program.stages
    if not stages.padding:
        return f"{stages.layers} layers"
    share = stages.padding / (stages.count * stages.room)
    return f"{stages.layers} layers ({stages.count} stages of {stages.room}: {share:.1%} of their time is padding)"


def _step(config: RunConfig, samples: int) -> str:
    train = config.train
    tokens = train.global_batch_size * train.seq_len
    parts = f"{config.microbatches} microbatches" if config.microbatches > 1 else "one microbatch"
    text = f"{train.global_batch_size} x {train.seq_len} = {tokens:,} tokens, in {parts}"
    if (first := batch_size(train, samples)) == train.global_batch_size:
        return text
    _, increment, over = train.rampup_batch_size
    return f"{text}; begins with {first} and grows by {increment}, to be full at {over:,} samples"


def _saves(checkpoint: Checkpoint) -> str:
    if not checkpoint.every:
        return "at the end and on Ctrl-C"
    for_good = f", and one every {checkpoint.keep_every:,} steps for good" if checkpoint.keep_every else ""
    return f"every {checkpoint.every:,} steps; kept are the newest {checkpoint.keep}{for_good}"


def state_bytes(program: Program) -> tuple[int, int, int]:
    """Bytes on one device of the weights, of their float32 gradients, and of the optimizer's masters and moments."""
    with jax.set_mesh(program.mesh):
        state = jax.eval_shape(lambda: program.init(jax.random.key(0)))
    shardings = program.state_shardings
    weights = _shard_bytes(state.weights, shardings.weights)
    gradients = _shard_bytes(state.weights, shardings.weights, itemsize=4)
    return weights, gradients, _shard_bytes((state.masters, state.adam), (shardings.masters, shardings.adam))


def _shard_bytes(arrays: Tree, shardings: Tree, itemsize: int | None = None) -> int:
    """Bytes of the arrays' shards on one device; of `itemsize` bytes an element, where given."""
    each = lambda x, s: math.prod(s.shard_shape(x.shape)) * (itemsize or x.dtype.itemsize)
    return sum(jax.tree.leaves(jax.tree.map(each, arrays, shardings)))


def compiled_memory(compiled: Any) -> str:
    """What the compiler counts on one device; empty where it does not say."""
    memory = compiled.memory_analysis()
    if memory is None:
        return ""
    arguments = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    temporaries = memory.temp_size_in_bytes
    return f"; {size(arguments + temporaries)} a device, of which {size(temporaries)} are temporaries"


# After


def closing(result: Result, config: RunConfig, failures: list[str]) -> str:
    """What came of it. The last line says what to do next."""
    rows = {
        "steps": f"{result.step:,} of {config.train.steps:,}, {result.tokens:,} tokens",
        "time": f"{duration(result.train_time_s)} of training, {duration(result.compile_time_s)} of compilation",
        "speed": _speed(result),
        "loss": _losses(result),
        "skipped": f"{result.skipped} steps, of gradients that were not finite" if result.skipped else "",
        "memory": f"{size(result.peak_memory_bytes)} at most on a device" if result.peak_memory_bytes else "",
        "saved": (result.checkpoint or "") if result.status == "done" else "",
    }
    block = columns([(name, text) for name, text in rows.items() if text])
    newest = "there is no checkpoint"
    if result.checkpoint:
        newest = f"the newest checkpoint is {result.checkpoint}; --resume goes on from it"
    last = {
        "done": "done; to go on, the same command with --resume and more train.steps",
        "stopped": f"stopped; {_kept(result)}: run the same command with --resume to go on",
        "failed": "\n".join([*(f"error: {line}" for line in failures), newest]),
    }
    return f"{block}\n{last[result.status]}"


def _kept(result: Result) -> str:
    """The newest checkpoint, which is of the last step unless its loss was not finite."""
    if Path(result.checkpoint or "").name == str(result.step):
        return f"saved {result.checkpoint}"
    return f"step {result.step} was not saved, the newest checkpoint is {result.checkpoint}"


def _speed(result: Result) -> str:
    if result.tokens_per_s is None or result.data_wait_share is None:
        return ""
    mfu = f", MFU {result.mfu:.1%}" if result.mfu is not None else ""
    return f"{result.tokens_per_s:,.0f} tokens/s{mfu}; {result.data_wait_share:.1%} of the time waiting for data"


def _losses(result: Result) -> str:
    parts = [("", result.loss), ("held out ", result.valid_loss)]
    return ", ".join(f"{name}{loss:.4f}" for name, loss in parts if loss is not None)
