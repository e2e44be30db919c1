"""Too long for `make test`: 120 fresh processes (some 10 minutes), and 600 steps of training (some 5)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import reference
from cases import covering_array

from parallax.config import Log, Optimizer, Parallel, RunConfig, Train
from parallax.config import Model as ModelChoice
from parallax.data import open_data
from parallax.mesh import make_mesh
from parallax.model import Model
from parallax.models import llama
from parallax.optimizer import learning_rates
from parallax.program import Program

PROCESSES = 20
STALL_S = 300
# all axes, both kinds of tp, pp without tp, dp alone, a width that dp does not divide, and 16 devices
LAYOUTS = ("dp2-pp2-tp2", "pp4-tp2", "tp8", "dp8", "dp3-pp2", "dp4-pp2-tp2")
SUBSET = [
    max((c for c in covering_array() if c.layout == layout), key=lambda c: (c.m, c.zero, str(c))) for layout in LAYOUTS
]

STEPS = """
import sys
import conftest, jax, cases, test_training
case = next(c for c in cases.covering_array() if str(c) == sys.argv[1])
program = test_training.build(case)
weights = test_training.initial_weights(case.family, case.depth, case.tied)
losses = []
with jax.set_mesh(program.mesh):
    state = jax.jit(program.place, out_shardings=program.state_shardings)(weights)
    for batch in test_training.batches(program, 10):
        state, metrics = program.train_step(state, program.batch(batch))
        losses.append(float(metrics.loss).hex())
print(*losses)
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", SUBSET, ids=str)
def test_fresh_processes_never_stall(case, tmp_path):
    """Emulated devices wait for one another in collectives: a wrong order hangs, or mixes up what they sum"""
    here = Path(__file__).parent
    environment = os.environ | {
        "PYTHONPATH": f"{here}:{here.parent}",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    for name in ("XLA_FLAGS", "NPROC"):
        environment.pop(name, None)
    outputs = set()
    for _ in range(PROCESSES):
        command = [sys.executable, "-c", STEPS, str(case)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=STALL_S)
        assert done.returncode == 0, done.stderr[-2000:]
        outputs.add(done.stdout)
    losses = [[float.fromhex(x) for x in output.split()] for output in outputs]
    np.testing.assert_allclose(losses, np.broadcast_to(losses[0], np.shape(losses)), rtol=1e-5)


def train_on_text(parallel: Parallel, precision: str, steps: int) -> list[float]:
    config = llama.PRESETS["llama-tiny"]
    run = run_config(parallel, precision, steps)
    program = Program(run, Model(llama, config, config.shape()), make_mesh(parallel))
    losses = []
    with jax.set_mesh(program.mesh):
        state = program.init(jax.random.key(0))
        for batch in text_batches(run):
            state, metrics = program.train_step(state, program.batch(batch))
            losses.append(float(metrics.loss))
    return losses


def run_config(parallel: Parallel, precision: str, steps: int) -> RunConfig:
    train = Train(steps=steps, seq_len=128, global_batch_size=16, micro_batch_size=2, precision=precision)  # type: ignore[arg-type]
    optimizer = Optimizer(learning_rate=1e-3, warmup_steps=20)
    return RunConfig(
        model=ModelChoice(name="llama-tiny"), parallel=parallel, train=train, optimizer=optimizer, log=Log(dir="unused")
    )


def text_batches(run: RunConfig):
    data = open_data(run.data, seq_len=128, global_batch_size=16, vocab_size=256, seed=0)
    return [data.train.batch(16 * step, 16) for step in range(run.train.steps)]


@pytest.mark.slow
def test_bfloat16_follows_float32(capsys):
    steps, last = 200, 10
    run = run_config(Parallel(), "float32", steps)
    config = llama.PRESETS["llama-tiny"]
    start = jax.jit(Model(llama, config, config.shape()).init)(jax.random.key(0))
    rates = [float(np.asarray(learning_rates(run.optimizer, steps)(i))) for i in range(steps)]
    wanted, _, _ = reference.train("llama", config, start, text_batches(run), run.optimizer, rates)
    composed = train_on_text(Parallel(dp=2, pp=2, tp=2, virtual_stages=2, schedule="interleaved"), "bfloat16", steps)
    other = train_on_text(Parallel(pp=4, tp=2), "bfloat16", steps)
    ends = [float(np.mean(losses[-last:])) for losses in (wanted, composed, other)]
    with capsys.disabled():
        print(f"\nmean loss of the last {last} of {steps} steps: float32 {ends[0]:.4f}, bfloat16 {ends[1:]}")
    assert abs(ends[1] / ends[0] - 1) <= 0.01
    assert abs(ends[2] / ends[1] - 1) <= 0.005
