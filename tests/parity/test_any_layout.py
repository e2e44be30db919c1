"""A checkpoint of any layout goes on in any other: the same state bit for bit, and the same losses."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from parallax.canonical import Canonical
from parallax.checkpoint import Checkpoints
from parallax.checkpoint_io import CheckpointWriter, restore_state
from parallax.config import Checkpoint, Log, Optimizer, Parallel, RunConfig, Train
from parallax.config import Model as ModelChoice
from parallax.data import Batch
from parallax.mesh import make_mesh
from parallax.model import Model
from parallax.models import llama
from parallax.optimizer import TrainState
from parallax.program import Program

pytestmark = pytest.mark.xdist_group("any layout")  # one worker compiles the programs
# 7 layers divide by no pp but 1, a vocabulary of 263 by nothing, and the gains of norms not by 3 replicas
CONFIG = llama.Config(vocab_size=263, width=40, layers=7, heads=4, kv_heads=2, ff=60, rope_theta=10_000.0)
LAYOUTS: dict[str, Parallel] = {
    "dp8": Parallel(dp=8),
    "pp4-tp2": Parallel(pp=4, tp=2),
    "dp2-pp2-tp2": Parallel(dp=2, pp=2, tp=2, virtual_stages=2, schedule="interleaved"),
    "tp4-cp2": Parallel(tp=4, cp=2),
    "pp2": Parallel(pp=2),
    "one device": Parallel(),
    "dp3-pp2": Parallel(dp=3, pp=2),
}
NAMES = [*LAYOUTS]
# each layout once as the source of its neighbour's run, and five longer ways
PAIRS = [*zip(NAMES, NAMES[1:] + NAMES[:1], strict=True), *((NAMES[i], NAMES[(i + 3) % 7]) for i in range(5))]
BEFORE, AFTER = 3, 5


@cache
def program_of(layout: str) -> Program:
    parallel = LAYOUTS[layout]
    micro = max(24 // parallel.dp // 6, 1)
    train = Train(steps=10, seq_len=32, global_batch_size=24, micro_batch_size=micro, precision="float32", remat="none")
    config = RunConfig(
        model=ModelChoice(name="llama"),
        parallel=parallel,
        train=train,
        optimizer=Optimizer(learning_rate=1e-3, warmup_steps=2, epsilon=1e-5),
        log=Log(dir="unused"),
    )
    return Program(config, Model(llama, CONFIG, CONFIG.shape(), "none"), make_mesh(parallel))


@cache
def canonical_of(layout: str) -> Canonical:
    return Canonical(program_of(layout))


@cache
def batches() -> list[Batch]:
    rows = np.random.default_rng(3).integers(0, CONFIG.vocab_size, (BEFORE + AFTER, 24, 33), dtype=np.int32)
    return [Batch(row[:, :-1], row[:, 1:]) for row in rows]


def steps(layout: str, state: TrainState, which: range) -> tuple[TrainState, list[float]]:
    program, losses = program_of(layout), []
    with jax.set_mesh(program.mesh):
        for i in which:
            state, metrics = program.train_step(state, program.batch(batches()[i]))
            losses.append(float(metrics.loss))
    return state, losses


@cache
def run_of(layout: str) -> tuple[Any, list[float]]:
    """The canonical state after BEFORE steps, on the host, and the losses of the AFTER steps that follow"""
    program = program_of(layout)
    with jax.set_mesh(program.mesh):
        state = program.init(jax.random.key(0))
    state, _ = steps(layout, state, range(BEFORE))
    saved = jax.tree.map(np.asarray, canonical_of(layout).from_state(state))
    assert_equal(saved["masters"], weights_of(layout, state))  # in float32 they are the same numbers
    _, losses = steps(layout, state, range(BEFORE, BEFORE + AFTER))
    return saved, losses


def weights_of(layout: str, state: TrainState) -> Any:
    """What the pipeline reads, in the canonical tree"""
    program = program_of(layout)
    return jax.tree.map(np.asarray, program.over_weights(program.take_out, state.weights))


def assert_equal(a, b) -> None:
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y, jax.tree_util.keystr(path))


@pytest.mark.parametrize(("source", "target"), PAIRS + [(name, name) for name in NAMES])
def test_goes_on(tmp_path: Path, source: str, target: str):
    saved, losses = run_of(source)
    checkpoints = Checkpoints(tmp_path)
    with CheckpointWriter(checkpoints, Checkpoint()) as writer:
        writer.save(BEFORE, saved, {})
    canonical = canonical_of(target)
    state = canonical.to_state(restore_state(checkpoints, BEFORE, canonical.target))
    assert_equal(canonical.from_state(state), saved)  # masters, both moments, counts
    assert_equal(weights_of(target, state), saved["masters"])
    _, after = steps(target, state, range(BEFORE, BEFORE + AFTER))
    if source == target:
        assert after == losses
    else:
        np.testing.assert_allclose(after, losses, rtol=1e-5)


@pytest.mark.parametrize("layout", NAMES)
def test_padding_is_no_parameter(layout: str):
    """Places without a layer and rows beyond the vocabulary: never trained, in no checkpoint"""
    program, (saved, _) = program_of(layout), run_of(layout)
    count = CONFIG.shape().parameters
    assert sum(x.size for x in jax.tree.leaves(saved["masters"])) == count
    canonical = canonical_of(layout)
    shardings = jax.tree.map(lambda t: t.sharding, canonical.target)
    state = canonical.to_state(jax.device_put(saved, shardings))
    state, _ = steps(layout, state, range(2))
    held = jax.tree.map(np.asarray, state.weights)
    stages, rows = program.stages, program.layout.padded((263,), ("vocab",))[0]
    assert held["embed"]["tokens"]["table"].shape[0] == rows
    assert held["blocks"]["gate"]["kernel"].shape[:3] == (stages.virtual_stages, stages.pp, stages.room)
    padding = sum(x.size for x in jax.tree.leaves(held)) - count
    layer = CONFIG.shape().layers[0].parameters
    assert padding == stages.padding * layer + (rows - 263) * 40 * 2
    assert not held["embed"]["tokens"]["table"][263:].any()
    flat = held["blocks"]["gate"]["kernel"].reshape(-1, 40, 60)
    assert [bool(w.any()) for w in flat] == [i in stages.places for i in range(len(flat))]
