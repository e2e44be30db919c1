"""Checkpoints: what one layout saves, another restores bit for bit; what is kept, and what is chosen to resume from."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.canonical import Canonical
from parallax.checkpoint import FACTS, Checkpoints, check_data, check_identity, identity, optimizer_changes
from parallax.checkpoint_io import CheckpointError, CheckpointWriter, restore_state
from parallax.config import Checkpoint, ConfigError, Data, Log, MeshChoice, Optimizer, Parallel, RunConfig, Train
from parallax.config import Model as ModelChoice
from parallax.machine import load_machine
from parallax.mesh import make_mesh
from parallax.model import Model
from parallax.models import llama
from parallax.optimizer import Shard, TrainState
from parallax.program import Program
from parallax.validate import Resolved

pytestmark = pytest.mark.xdist_group("checkpoint")  # one worker compiles the conversions
ROOT = Path(__file__).parents[2]
# No dimension of width 36 or 24 divides by dp = 5, and none at all by 7: such weights are flattened and padded.
CONFIG = llama.Config(vocab_size=264, width=36, layers=4, heads=4, kv_heads=2, ff=60, head_size=6)
LAYOUTS = {
    "one device": Parallel(),
    "dp5 tp2": Parallel(dp=5, tp=2),
    "dp2 pp2 tp2 v2": Parallel(dp=2, pp=2, tp=2, virtual_stages=2, schedule="interleaved"),
    "dp7 pp2": Parallel(dp=7, pp=2),
    "dp2 pp4 zero 0": Parallel(dp=2, pp=4, zero=0),
}
PAIRS = [*zip(LAYOUTS, [*LAYOUTS][1:] + [*LAYOUTS][:1], strict=True)]


def run_config(parallel: Parallel, precision: Literal["bfloat16", "float32"] = "bfloat16") -> RunConfig:
    return RunConfig(
        model=ModelChoice(name="llama-tiny"),
        parallel=parallel,
        mesh=MeshChoice(),
        train=Train(steps=4, seq_len=16, global_batch_size=70, micro_batch_size=1, precision=precision),
        optimizer=Optimizer(),
        data=Data(),
        checkpoint=Checkpoint(),
        log=Log(dir="unused"),
    )


@cache
def program_of(layout: str) -> Program:
    parallel = LAYOUTS[layout]
    return Program(run_config(parallel), Model(llama, CONFIG, CONFIG.shape()), make_mesh(parallel))


@cache
def canonical_of(layout: str) -> Canonical:
    return Canonical(program_of(layout))


@cache
def filled(layout: str) -> TrainState:
    """A state in which no two weights, moments or layers are alike."""
    program, weights = program_of(layout), plain_weights()
    with jax.set_mesh(program.mesh):
        state = jax.jit(program.place, out_shardings=program.state_shardings)(weights)
    scaled = lambda factor: jax.tree.map(lambda w: w * factor, state.masters)
    adam = state.adam._replace(mu=scaled(0.5), nu=scaled(-2.0), count=state.adam.count + 7)
    return state._replace(adam=adam, skipped=state.skipped + 2)


def assert_equal(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).dtype == np.asarray(y).dtype and np.array_equal(x, y), jax.tree_util.keystr(path)


def test_layouts_cover_flattened_weights():
    splits = lambda layout: [shard.split for shard in jax.tree.leaves(
        program_of(layout).optimizer.shards, is_leaf=lambda x: isinstance(x, Shard)
    )]  # fmt: skip
    assert -1 in splits("dp5 tp2") and -1 in splits("dp7 pp2") and None in splits("dp2 pp4 zero 0")


@pytest.mark.parametrize(("saved_on", "restored_on"), PAIRS)
def test_bit_equal_over_layouts(tmp_path: Path, saved_on: str, restored_on: str):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    before, after = canonical_of(saved_on), canonical_of(restored_on)
    saved = before.from_state(filled(saved_on))
    with CheckpointWriter(checkpoints, Checkpoint(keep=1)) as writer:
        writer.save(7, saved, {})

    restored = after.to_state(restore_state(checkpoints, 7, after.target))
    assert_equal(restored, filled(restored_on))  # what was flattened is padded with zeros again
    canonical = after.from_state(restored)
    assert_equal(canonical, saved)
    # The canonical form is the plain model's: layers stacked in model order, true shapes.
    assert_equal(canonical["masters"], plain_weights())


@cache
def plain_weights():
    weights = jax.jit(Model(llama, CONFIG, CONFIG.shape()).init)(jax.random.key(0))
    return jax.tree.map(np.asarray, weights)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_initial_weights_are_the_same_on_every_layout(layout: str):
    """But for rounding: from jax 0.12, XLA for CPUs fuses multiply-adds in a loop's SIMD part and not in the rest, so
    that rows of 6 or 12 differ by 2 units in the last place with the way they are cut. Bit for bit before that."""
    program = program_of(layout)
    with jax.set_mesh(program.mesh):
        weights = canonical_of(layout).from_state(program.init(jax.random.key(0)))["masters"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-7), weights, plain_weights())


# The writer. A state here is a dictionary of arrays: the writer does not look inside.


def counted(step: int, size: int = 1000) -> dict[str, jax.Array]:
    return {"x": jnp.arange(size, dtype=jnp.float32) + step}


def facts_of(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "samples": 8 * step,
        "tokens": 64 * step,
        "train_steps": 9,
        "parameters": 4,
        "kept": False,
        "loss": 2.5,
        "valid_loss": None,
        "saved_at": "2026-01-02T03:04:05+00:00",
        "identity": {"train.seed": 0},
        "optimizer": {"beta1": 0.9},
        "weights": {"x": [4]},
        "data": {"sources": [{"name": "x", "tokens": 1000}], "separator": 0},
        "layout": {"parallel": {"dp": 2}, "mesh": "cpu", "precision": "bfloat16"},
        "versions": {"parallax": "0.1", "jax": "0.10"},
    }


def test_only_complete_checkpoints_count(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.steps() == [] and checkpoints.incomplete() == []
    with CheckpointWriter(checkpoints, Checkpoint(keep=2)) as writer:
        for step in (5, 10, 15):
            writer.save(step, counted(step), facts_of(step))
    assert checkpoints.steps() == [10, 15] and checkpoints.facts(15) == facts_of(15)
    (checkpoints.folder / "20.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (checkpoints.folder / "25").mkdir()
    (checkpoints.folder / "30" / "state").mkdir(parents=True)
    assert checkpoints.steps() == [10, 15]
    assert [path.name for path in checkpoints.incomplete()] == ["20.orbax-checkpoint-tmp", "25", "30"]
    with CheckpointWriter(checkpoints, Checkpoint(keep=2)) as writer:
        writer.save(30, counted(30), facts_of(30))  # not stopped by the half of one in its place
    assert checkpoints.steps() == [15, 30]
    assert not (checkpoints.folder / "20.orbax-checkpoint-tmp").exists()


def test_what_is_kept(tmp_path: Path):
    """The newest two, and for good those of the steps that 4 divides; also by a second writer, of a resumed run."""
    checkpoints = Checkpoints(tmp_path)
    for first, last, kept in ((1, 6, [4, 5, 6]), (7, 9, [4, 8, 9])):
        with CheckpointWriter(checkpoints, Checkpoint(keep=2, keep_every=4)) as writer:
            for step in range(first, last + 1):
                writer.save(step, counted(step), facts_of(step))
        assert checkpoints.steps() == kept and checkpoints.incomplete() == []
    restored = restore_state(checkpoints, 4, jax.eval_shape(lambda: counted(0)))  # not touched by what came after it
    assert np.array_equal(restored["x"], np.arange(1000, dtype=np.float32) + 4)


def test_the_state_may_change_while_it_is_written(tmp_path: Path):
    """Steps that use up the state they are given, as training's do, run on while its canonical form is written."""
    program, canonical = program_of("one device"), canonical_of("one device")
    state = jax.tree.map(lambda x: x + 0, filled("one device"))
    spoil = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 - 1, state), donate_argnums=0)
    saved = jax.tree.map(np.asarray, canonical.from_state(filled("one device")))
    with CheckpointWriter(Checkpoints(tmp_path), Checkpoint()) as writer, jax.set_mesh(program.mesh):
        writer.save(1, canonical.from_state(state), facts_of(1))
        for _ in range(3):
            state = spoil(state)
        jax.block_until_ready(state)
    assert_equal(restore_state(Checkpoints(tmp_path), 1, canonical.target), saved)


def test_a_write_that_fails_is_an_error(tmp_path: Path):
    """The system lets no file grow beyond 100,000 bytes: the write fails behind the back of the one who saves."""
    checkpoints = Checkpoints(tmp_path)
    with CheckpointWriter(checkpoints, Checkpoint()) as writer:
        writer.save(1, counted(1), facts_of(1))
    random = {"x": jax.random.normal(jax.random.key(0), (100_000,))}  # does not compress
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        writer = CheckpointWriter(checkpoints, Checkpoint())
        writer.save(2, random, facts_of(2))
        message = rf"^checkpoint {tmp_path}/2 could not be written: .*File too large"
        with pytest.raises(CheckpointError, match=message) as caught:
            writer.wait()
        assert "\n" not in str(caught.value)
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoints.steps() == [1]


DAMAGE = """
import shutil, sys
from pathlib import Path
import jax, jax.numpy as jnp
from parallax.checkpoint import Checkpoints
from parallax.checkpoint_io import CheckpointWriter, restore_state
from parallax.config import Checkpoint, ConfigError
from parallax.echoes import leave_out_echoes

leave_out_echoes()
good, bad = Path("good"), Path("bad")
state = {name: jax.random.normal(jax.random.key(0), (1000,)) for name in "xyz"}
with CheckpointWriter(Checkpoints(good), Checkpoint()) as writer:
    writer.save(1, state, {})
device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), state)
for path in [path.relative_to(good) for path in sorted((good / "1" / "state").rglob("*")) if path.is_file()]:
    for length in (0, 1, 2):
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        whole = (bad / path).read_bytes()
        (bad / path).write_bytes(whole[: len(whole) * length // 2] if length < 2 else whole + b"x")
        try:
            restore_state(Checkpoints(bad), 1, target)
        except ConfigError as error:
            print(error)
"""


def test_a_damaged_state_is_one_line(tmp_path: Path):
    """Each file of one emptied, cut in half and made longer, in a process of its own: threads must be silent, too."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", DAMAGE], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 8
    for line in lines:
        assert line.startswith("checkpoint bad/1 cannot be read: its state is damaged: ") and len(line) < 450
        assert not [word for word in ("{", "pybind11", "See full", "spec") if word in line]
    assert [line for line in lines if "is not valid for value of size 0" in line]


def write_facts(folder: Path, step: int, text: str) -> None:
    (folder / str(step) / "state").mkdir(parents=True)
    (folder / str(step) / "facts").mkdir()
    (folder / str(step) / "facts" / "metadata").write_text(text)


def changed(dotted: str, value: Any) -> str:
    """The facts of step 2 with another value; without the fact where it is `...`."""
    facts = facts_of(2)
    *above, name = dotted.split(".")
    table = facts[above[0]] if above else facts
    table[name] = value
    if value is ...:
        del table[name]
    return json.dumps(facts)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"step', "not JSON"),
        ("[]", r"damaged: \[\] is not a table"),
        ("[" * 100_000, "nested too deeply"),
        (changed("identity", json.loads("[" * 600 + "]" * 600)), "nested too deeply|damaged"),
        ('{"step": 2}', "damaged: samples is missing, and 16 more"),
        (changed("step", 4), "damaged: step = 4 in the folder of step 2"),
        (changed("step", True), "damaged: step = true is not an integer"),
        (changed("samples", "many"), 'damaged: samples = "many" is not an integer'),
        (changed("samples", -1), "damaged: samples = -1 is out of range"),
        (changed("loss", float("nan")), "damaged: loss = nan is not a finite number or null"),
        (changed("saved_at", 5), "damaged: saved_at = 5 is not a string"),
        (changed("weights", {"x": "4"}), "damaged: weights = .* is not a table"),
        (changed("identity", []), r"damaged: identity = \[\] is not a table"),
        (changed("layout.mesh", ...), "damaged: layout.mesh is missing"),
        (changed("layout", "cpu"), "damaged: layout.parallel is missing, and 2 more"),
        (changed("data.sources", [1]), "damaged: data.sources = .* is not a list"),
        (changed("versions.jax", None), "damaged: versions.jax = None is not a string"),
    ],
)
def test_facts_that_cannot_be_read(tmp_path: Path, text: str, why: str):
    write_facts(tmp_path, 1, json.dumps(facts_of(1)))
    write_facts(tmp_path, 2, text)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [1, 2] and checkpoints.facts(1) == facts_of(1)
    with pytest.raises(ConfigError, match=rf"2 cannot be read: .*({why}).*; move it away to resume from .*/1$"):
        checkpoints.facts(2)


def test_every_fact_is_looked_at(tmp_path: Path):
    """An object is of none of their types."""
    for step, dotted in enumerate(FACTS):
        facts = facts_of(step)
        *above, name = dotted.split(".")
        (facts[above[0]] if above else facts)[name] = {"x": {"y": None}} if dotted == "weights" else [[]]
        write_facts(tmp_path, step, json.dumps(facts))
        with pytest.raises(ConfigError, match=f"its facts are damaged: {dotted} = "):
            Checkpoints(tmp_path).facts(step)


@pytest.mark.parametrize("name", ["0006", "٦", "6" * 19, "6 ", "-6", "6.5"])
def test_names_that_are_no_steps(tmp_path: Path, name: str):
    write_facts(tmp_path, 5, json.dumps(facts_of(5)))
    for item in ("state", "facts"):
        (tmp_path / name / item).mkdir(parents=True)
    assert Checkpoints(tmp_path).steps() == [5]
    with CheckpointWriter(Checkpoints(tmp_path), Checkpoint(keep=2)) as writer:
        writer.save(6, counted(6), facts_of(6))
    assert Checkpoints(tmp_path).steps() == [5, 6]


def test_a_folder_that_may_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is not passed over: its steps may be the newest."""
    write_facts(tmp_path, 5, json.dumps(facts_of(5)))
    write_facts(tmp_path, 6, json.dumps(facts_of(6)))
    for name in ("is_dir", "read_text"):
        monkeypatch.setattr(Path, name, refusing(tmp_path / "6", getattr(Path, name)))
    assert Checkpoints(tmp_path).steps() == [5, 6]
    with pytest.raises(ConfigError, match=rf"6 cannot be read: .*Permission denied; .* {tmp_path}/5$"):
        Checkpoints(tmp_path).facts(6)
    monkeypatch.setattr(Path, "iterdir", refusing(tmp_path.parent, Path.iterdir))
    with pytest.raises(ConfigError, match=f"^{tmp_path} cannot be read: Permission denied$"):
        Checkpoints(tmp_path).steps()


def refusing(folder: Path, method: Callable[..., Any]) -> Callable[..., Any]:
    """As the system does where a folder lacks the right to be searched, also for tests that run as root."""

    def call(path: Path, *args: Any, **kwargs: Any) -> Any:
        if folder in path.parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return method(path, *args, **kwargs)

    return call


# The same run


def test_files_count_by_their_names():
    resolved = Resolved(run_config(Parallel()), llama, CONFIG, CONFIG.shape(), load_machine(MeshChoice()))

    def moved(source: str | dict[str, float], tokenizer: str, model_file: str = "") -> dict[str, Any]:
        data = Data(source=source, tokenizer=tokenizer)
        model = ModelChoice(name="llama-tiny", file=model_file)
        return identity(replace(resolved, config=replace(resolved.config, data=data, model=model)))

    assert moved("/a/text.jsonl", "/a/t.json", "/a/m.py") == moved("/b/c/text.jsonl", "/d/t.json", "/e/m.py")
    assert moved("/a/text.jsonl", "/a/t.json") != moved("/a/other.jsonl", "/a/t.json")
    mixture = moved({"/a/x.txt": 1.0, "/b/y.txt": 2.0}, "bytes")
    assert mixture == moved({"/c/x.txt": 1.0, "/c/y.txt": 2.0}, "bytes")
    assert mixture["data.source"] == {"x.txt": 1.0, "y.txt": 2.0}
    assert mixture != moved({"/a/x.txt": 1.0, "/b/y.txt": 3.0}, "bytes")
    same_name = moved({"/data/en/x.txt": 1.0, "/data/de/x.txt": 2.0}, "bytes")
    assert same_name["data.source"] == {"en/x.txt": 1.0, "de/x.txt": 2.0}
    with_built_in = moved(
        {"/data/en/x.txt": 1.0, "/data/de/x.txt": 2.0, "python-stdlib": 3.0, "synthetic": 4.0}, "bytes"
    )
    assert with_built_in["data.source"] == same_name["data.source"] | {"python-stdlib": 3.0, "synthetic": 4.0}
    like_one = moved({"/data/synthetic": 1.0, "synthetic": 2.0}, "bytes")
    assert like_one["data.source"] == {"./synthetic": 1.0, "synthetic": 2.0}
    assert moved("/data/synthetic", "bytes") != moved("synthetic", "bytes")


def test_a_model_whose_config_no_checkpoint_can_keep():
    @dataclass(frozen=True)
    class Config:
        dtype: Any = jnp.bfloat16
        width: int = 36

    resolved = Resolved(run_config(Parallel()), llama, Config(), CONFIG.shape(), load_machine(MeshChoice()))
    with pytest.raises(ConfigError) as caught:
        identity(resolved)
    (line,) = caught.value.problems
    assert line.startswith("model.dtype = ") and "cannot be kept in a checkpoint; use a number" in line


def test_what_changed_in_the_optimizer():
    saved = {"learning_rate": 3e-4, "clip_norm": 1.0, "beta1": 0.9, "schedule": "cosine"}
    assert optimizer_changes(Optimizer(), saved) == ""
    assert optimizer_changes(Optimizer(learning_rate=1e-3, schedule="constant"), saved) == (
        'optimizer.learning_rate = 0.001 was 0.0003, optimizer.schedule = "constant" was "cosine"'
    )


def test_what_must_not_change():
    resolved = Resolved(run_config(Parallel()), llama, CONFIG, CONFIG.shape(), load_machine(MeshChoice()))
    saved = identity(resolved)
    other_layout = replace(resolved, config=run_config(LAYOUTS["dp2 pp2 tp2 v2"], "float32"))
    check_identity(other_layout, saved, Path("x"))
    config = replace(resolved.config, train=replace(resolved.config.train, seed=1, seq_len=32))
    wrong = replace(resolved, config=config, model_config=replace(CONFIG, width=48))
    with pytest.raises(ConfigError) as caught:
        check_identity(wrong, saved, Path("x"))
    was = "is not what the checkpoint x was trained with"
    assert caught.value.problems == [
        f"model.width = 48 {was}; use model.width = 36, or another log.dir",
        f"train.seed = 1 {was}; use train.seed = 0, or another log.dir",
        f"train.seq_len = 32 {was}; use train.seq_len = 16, or another log.dir",
    ]


def test_other_data_are_refused():
    held = {"sources": [{"name": "web.txt", "share": 1.0, "tokens": 1000}], "separator": 0}
    check_data(held, held, Path("x"))
    grown = {"sources": [{"name": "web.txt", "share": 1.0, "tokens": 1200}], "separator": 0}
    with pytest.raises(ConfigError) as caught:
        check_data(grown, held, Path("x"))
    (line,) = caught.value.problems
    assert "it was web.txt with 1,000 tokens; it is web.txt with 1,200 tokens; use that, or another log.dir" in line
