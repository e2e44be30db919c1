"""Every parallel feature against a plain single-device program: loss, gradients, weights after three AdamW steps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import reference
from cases import CONTEXT_FACTORS, EXTRAS, FACTORS, Case, all_cases, covering_array, pairs

from parallax import chunks
from parallax.data import Batch
from parallax.mesh import make_mesh
from parallax.model import Model
from parallax.models import gpt, llama
from parallax.optimizer import learning_rates
from parallax.program import Program
from parallax.schedule import to_csv

TOLERANCE = 1e-5  # ‖a - b‖₂ / ‖b‖₂ of a leaf, float32
CASES = covering_array() + covering_array(CONTEXT_FACTORS)
NEWEST = {"dp3-pp2", "dp2-pp2-tp2", "tp8", "cp4"}  # layouts of the cases that `make test-newest` runs


def model_of(family: str, layers: int, remat: str, tied: bool, vocab_size: int = 256) -> Model:
    """Small, with widths that 3 replicas do not divide and fewer key/value heads than tp = 8"""
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "width": 64, "layers": layers, "heads": 8, "ff": 96}
    if family == "llama":
        config = llama.Config(**sizes, kv_heads=4, rope_theta=10_000.0, tied=tied)
        return Model(llama, config, config.shape(), remat)
    config = gpt.Config(**sizes, max_positions=136)
    return Model(gpt, config, config.shape(), remat)


def build(case: Case) -> Program:
    model = model_of(case.family, case.depth, case.remat, case.tied, case.vocab_size)
    return Program(case.run_config(), model, make_mesh(case.parallel()))


@cache
def initial_weights(family: str, layers: int, tied: bool = False, vocab_size: int = 256):
    """On the host, so that no program can donate them"""
    weights = jax.jit(model_of(family, layers, "full", tied, vocab_size).init)(jax.random.key(0))
    return jax.tree.map(np.asarray, weights)


def batches(program: Program, count: int = 3) -> list[Batch]:
    train = program.config.train
    rng = np.random.default_rng(7)
    rows = rng.integers(0, program.model.shape.vocab_size, (count, train.global_batch_size, train.seq_len + 1))
    rows = rows.astype(np.int32)
    if not program.config.data.isolate_documents:
        return [Batch(row[:, :-1], row[:, 1:]) for row in rows]
    begins = rng.random((count, train.global_batch_size, train.seq_len)) < 0.03  # a document every 33 tokens or so
    starts = np.maximum.accumulate(np.where(begins, np.arange(train.seq_len), 0), axis=-1).astype(np.int32)
    return [Batch(row[:, :-1], row[:, 1:], start) for row, start in zip(rows, starts, strict=True)]


def canonical(program: Program, tree):
    """Blocks stacked [L, …] in model order, on the host"""
    return jax.tree.map(np.asarray, program.over_weights(program.take_out, tree))


def relative(a, b) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def worst(got, wanted, skip=()) -> tuple[float, str]:
    """The largest relative error of a leaf, and its name"""
    named = [(jax.tree_util.keystr(path), a) for path, a in jax.tree_util.tree_leaves_with_path(got)]
    errors = [(relative(a, np.asarray(b)), name) for (name, a), b in zip(named, jax.tree.leaves(wanted), strict=True)]
    return max((e, name) for e, name in errors if name not in skip)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.newest] if c.layout in NEWEST else []) for c in CASES + EXTRAS], ids=str
)
def test_parity(case: Case):
    check_parity(case)


@pytest.mark.parametrize(
    "case",
    [
        Case("gpt", "dp2-pp2-tp2", "1f1b", 1, "full", "equal", 1, sequence_parallel=False, vocab_size=1003),
        Case("llama", "pp2-tp2-cp2", "interleaved", 2, "none", "equal", 1, seq_len=96, vocab_size=1003, documents=True),
        Case("llama", "pp4-tp2", "1f1b", 1, "full", "equal", 1, tied=True, vocab_size=1003),
    ],
    ids=str,
)
def test_parity_of_a_loss_in_chunks(case: Case, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunks, "LEAST", 8)
    train, parallel = case.run_config().train, case.parallel()
    tokens = train.micro_batch_size * train.seq_len // parallel.cp
    assert chunks.loss_chunks(tokens, 64, -(-case.vocab_size // (parallel.pp * parallel.tp))) == (2 if case.tied else 4)
    check_parity(case)


def check_parity(case: Case):
    program = build(case)
    data = batches(program)
    start = initial_weights(case.family, case.depth, case.tied, case.vocab_size)

    def step(state, batch):
        loss, gradients = program.gradients(state.weights, batch)
        state, _ = program.optimizer.update(state, gradients)
        return state, loss, program.optimizer.whole(gradients)

    with jax.set_mesh(program.mesh):
        state = jax.jit(program.place, out_shardings=program.state_shardings)(start)
        compiled = jax.jit(step, donate_argnums=0).lower(state, program.batch(data[0])).compile()
        losses, gradients = [], []
        for batch in data:
            state, loss, gradient = compiled(state, program.batch(batch))
            losses.append(float(loss))
            gradients.append(gradient)

    config = program.config
    rates = [float(np.asarray(learning_rates(config.optimizer, config.train.steps)(i))) for i in range(len(data))]
    want_losses, want_gradients, want_weights = reference.train(
        case.family, program.model.config, start, data, config.optimizer, rates
    )
    got = canonical(program, gradients[0])
    np.testing.assert_allclose(losses, want_losses, rtol=TOLERANCE)
    skip = ()
    if case.family == "gpt":  # softmax does not see a key bias: its gradient is zero but for rounding
        skip = ("['blocks']['key']['bias']",)
        bound = 1e-5 * np.abs(want_gradients["blocks"]["query"]["bias"]).max()
        assert np.abs(got["blocks"]["key"]["bias"]).max() <= bound
    error, name = worst(got, want_gradients, skip)
    assert error <= TOLERANCE, f"gradient of {name}: {error:.1e}"
    error, name = worst(canonical(program, state.weights), want_weights, skip)
    assert error <= TOLERANCE, f"weight {name} after {len(data)} steps: {error:.1e}"


def free_running_1f1b(p: int, m: int) -> str:
    """As Megatron-LM and PyTorch run it: rank r begins with p - r - 1 forwards more than backwards"""
    lines = []
    for r in range(p):
        warmup = min(p - r - 1, m)
        cells = [f"{r}F{i}" for i in range(warmup)]
        cells += [cell for i in range(m - warmup) for cell in (f"{r}F{warmup + i}", f"{r}B{i}")]
        lines.append(",".join(cells + [f"{r}B{i}" for i in range(m - warmup, m)]))
    return "\n".join(lines)


def test_parity_of_a_schedule_from_a_file(tmp_path: Path):
    path = tmp_path / "free.csv"
    case = Case("llama", "pp4-tp2", str(path), 1, "selective", "not a multiple", 1)
    path.write_text(free_running_1f1b(case.pp, case.m))
    check_parity(case)


@pytest.mark.parametrize(("schedule", "v"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_a_schedule_written_and_read_back_is_the_same_program(tmp_path: Path, schedule: str, v: int):
    def lowered(case: Case) -> tuple[str, np.ndarray]:
        program = build(case)
        with jax.set_mesh(program.mesh):
            state = jax.eval_shape(lambda: program.init(jax.random.key(0)))
            return program.train_step.lower(state, program.batch(batches(program, 1)[0])).as_text(), program.table.cells

    case = Case("llama", "pp4-tp2", schedule, v, "none", "not a multiple", 1)
    path = tmp_path / "own.csv"
    path.write_text(to_csv(build(case).table.schedule))
    text, cells = lowered(case)
    other_text, other_cells = lowered(replace(case, schedule=str(path)))
    assert other_text == text
    np.testing.assert_array_equal(other_cells, cells)


@pytest.mark.parametrize("factors", [FACTORS, CONTEXT_FACTORS], ids=["without cp", "with cp"])
def test_the_array_covers_every_legal_pair(factors):
    chosen = covering_array(factors)
    assert set(chosen) <= set(CASES)
    assert {p for c in chosen for p in pairs(c, factors)} == {p for c in all_cases(factors) for p in pairs(c, factors)}
