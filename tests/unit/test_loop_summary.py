"""What a run says at its start about memory, by the bytes of each parameter; and what it says at its end."""

from __future__ import annotations

import math
from typing import Literal

import pytest

from parallax.config import Log, Parallel, RunConfig, Train
from parallax.config import Model as ModelChoice
from parallax.mesh import make_mesh
from parallax.model import Model
from parallax.models import llama
from parallax.program import Program
from parallax.summary import Result, closing, state_bytes
from parallax.text import layout

CONFIG = llama.Config(vocab_size=256, width=32, layers=4, heads=4, kv_heads=2, ff=64)


def run_config(parallel: Parallel, precision: Literal["bfloat16", "float32"] = "bfloat16") -> RunConfig:
    train = Train(steps=300, seq_len=16, global_batch_size=8, precision=precision)
    return RunConfig(model=ModelChoice(name="llama-tiny"), parallel=parallel, train=train, log=Log(dir="unused"))


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_memory_of_the_state(zero: Literal[0, 1], precision: Literal["bfloat16", "float32"]):
    """Blocks are split over pp 2, tables over pp and tp, kernels over tp 2; norm gains are on both tp ranks."""
    parallel = Parallel(dp=2, pp=2, tp=2, zero=zero)
    model = Model(llama, CONFIG, CONFIG.shape())
    local = 0
    for name, shape in model.weight_shapes.items():
        copies = CONFIG.layers // 2 if name.startswith("blocks.") else 1
        ways = {"gain": 1, "kernel": 2, "table": 4}[name.split(".")[-1]]
        local += copies * math.prod(shape) // ways
    count = 4  # Adam's number of updates, an int32
    weight = {"bfloat16": 2, "float32": 4}[precision]
    program = Program(run_config(parallel, precision), model, make_mesh(parallel))
    assert state_bytes(program) == (weight * local, 4 * local, 12 * local // (2 if zero else 1) + count)


def result(**changes) -> Result:
    found = {
        "status": "done",
        "step": 300,
        "samples": 2400,
        "tokens": 38400,
        "loss": 2.5,
        "valid_loss": 2.75,
        "resumed_step": None,
        "resumed_valid_loss": None,
        "skipped": 0,
        "tokens_per_s": 3200.4,
        "data_wait_share": 0.0123,
        "mfu": None,
        "train_time_s": 12.0,
        "compile_time_s": 65.0,
        "peak_memory_bytes": None,
        "parameters": 10,
        "checkpoint": "runs/x/checkpoints/300",
        "log_dir": "runs/x",
    }
    return Result(**(found | changes))


def test_the_end_of_a_run():
    config = run_config(Parallel())
    assert closing(result(), config, []).splitlines() == [
        "steps  300 of 300, 38,400 tokens",
        "time   12 s of training, 1 min 05 s of compilation",
        "speed  3,200 tokens/s; 1.2% of the time waiting for data",
        "loss   2.5000, held out 2.7500",
        "saved  runs/x/checkpoints/300",
        "done; to go on, the same command with --resume and more train.steps",
    ]
    stop = {"status": "stopped", "step": 200, "valid_loss": None}
    more = result(**stop, checkpoint="runs/x/checkpoints/200", mfu=0.4123, skipped=2, peak_memory_bytes=3 * 2**30)
    lines = closing(more, config, []).splitlines()
    assert lines[0] == "steps    200 of 300, 38,400 tokens"
    assert lines[2:6] == [
        "speed    3,200 tokens/s, MFU 41.2%; 1.2% of the time waiting for data",
        "loss     2.5000",
        "skipped  2 steps, of gradients that were not finite",
        "memory   3.0 GiB at most on a device",
    ]
    assert lines[-1] == "stopped; saved runs/x/checkpoints/200: run the same command with --resume to go on"
    unsaved = closing(result(**stop, checkpoint="runs/x/checkpoints/150"), config, []).splitlines()[-1]
    assert unsaved.startswith(
        "stopped; step 200 was not saved, the newest checkpoint is runs/x/checkpoints/150: run the"
    )


def test_layouts_in_words():
    assert layout(Parallel()) == ""
    assert layout(Parallel(pp=2)) == "pp2, 1f1b"
    assert layout(Parallel(cp=2)) == "cp2, context by ring, zero 1"
    assert layout(Parallel(dp=2, tp=2, zero=0)) == "dp2·tp2, sequence parallel, zero 0"


def test_the_end_of_a_run_that_failed():
    failed = result(
        status="failed", tokens_per_s=None, data_wait_share=None, loss=None, valid_loss=None, checkpoint=None
    )
    assert closing(failed, run_config(Parallel()), ["step 3: why", "and why"]).splitlines()[1:] == [
        "time   12 s of training, 1 min 05 s of compilation",
        "error: step 3: why",
        "error: and why",
        "there is no checkpoint",
    ]
    failed = result(status="failed")
    assert closing(failed, run_config(Parallel()), ["why"]).splitlines()[-2:] == [
        "error: why",
        "the newest checkpoint is runs/x/checkpoints/300; --resume goes on from it",
    ]
