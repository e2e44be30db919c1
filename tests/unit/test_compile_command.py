"""`parallax compile`: targets, what is wrong with them, and a real build for a TPU that is not there."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from parallax.aot import builder, command
from parallax.aot.buffers import largest_buffers
from parallax.aot.builder import BuildError, Built
from parallax.aot.target import device_description, environment, missing, topology_name
from parallax.cli import main
from parallax.config import ConfigError, MeshChoice, read
from parallax.environment import GPU_FLAGS, GPU_SHARE, tune_gpus
from parallax.machine import load_machine
from parallax.plan.search import HEADROOM
from parallax.schedule import make_schedule, to_csv

ROOT = Path(__file__).parents[2]
RUN = """
[model]
name = "llama-tiny"
[parallel]
dp = 2
pp = 2
tp = 2
virtual_stages = 2
schedule = "interleaved"
[mesh]
name = "tpu-v5p"
[train]
steps = 10
seq_len = 128
global_batch_size = 16
[log]
dir = "runs/x"
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # those of emulated devices
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "own.csv").write_text(to_csv(make_schedule("1f1b", 2, 1, 8)))
    return "run.toml"


# Targets


@pytest.mark.parametrize(
    ("mesh", "devices", "name"),
    [
        ("tpu-v5p", 4, "v5p:2x2x1"),
        ("tpu-v5p", 8, "v5p:2x2x2"),
        ("tpu-v5p", 64, "v5p:4x4x4"),
        ("tpu-v5p", 128, "v5p:4x4x8"),
        ("tpu-v5e", 1, "v5e:1x1"),
        ("tpu-v5e", 8, "v5e:2x4"),
        ("tpu-v6e", 256, "v6e:16x16"),
        ("h100-sxm", 2, "1x1x2"),
        ("h100-sxm", 64, "1x8x8"),
        ("h100-sxm", 3072, "1x384x8"),
    ],
)
def test_topologies(mesh: str, devices: int, name: str):
    assert topology_name(load_machine(MeshChoice(name=mesh)), devices) == name


@pytest.mark.parametrize(
    ("mesh", "devices", "use"), [("tpu-v5p", 24, "16 or 32"), ("tpu-v5e", 512, "256"), ("h100-sxm", 12, "8 or 16")]
)
def test_no_such_topology(mesh: str, devices: int, use: str):
    with pytest.raises(
        ConfigError, match=rf"^parallel: {devices} devices make no {mesh} topology .*; use {use} devices$"
    ):
        topology_name(load_machine(MeshChoice(name=mesh)), devices)


def test_a_gpu_is_described_by_its_mesh_file():
    text = device_description(load_machine(MeshChoice(name="h100-sxm")))
    for part in (
        "core_count: 132",
        f"device_memory_size: {round(84929347584 * GPU_SHARE / 0.8)}",
        "major: 9 minor: 0",
        "NVIDIA H100 80GB HBM3",
    ):
        assert part in text
    assert "major: 10 minor: 0" in device_description(load_machine(MeshChoice(name="b200")))


def test_builds_beside_one_another_and_finds_no_metadata_server():
    variables = environment(load_machine(MeshChoice(name="tpu-v5p")), "dump")
    assert variables["ALLOW_MULTIPLE_LIBTPU_LOAD"] == variables["TPU_SKIP_MDS_QUERY"] == "1"
    assert "--xla_dump_to=dump" in variables["XLA_FLAGS"] and variables["JAX_PLATFORMS"] == "cpu"
    assert variables["JAX_ENABLE_X64"] == "0" and variables["PYTHONPATH"].split(":")[0] == str(ROOT)


def test_a_gpu_build_has_the_flags_that_train_sets_and_the_users():
    trains = {"XLA_FLAGS": "--xla_gpu_theirs=1"}
    tune_gpus(trains)
    assert trains["XLA_FLAGS"].split() == [*GPU_FLAGS, "--xla_gpu_theirs=1"]
    assert float(trains["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == GPU_SHARE == 1 - HEADROOM
    builds = environment(load_machine(MeshChoice(name="h100-sxm")), "dump", {"XLA_FLAGS": "--xla_gpu_theirs=1"})
    assert builds["XLA_FLAGS"].startswith(trains["XLA_FLAGS"] + " --xla_dump_to=dump ")


def test_the_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("parallax.aot.target.find_spec", lambda name: None)
    assert "parallax-train[tpu-aot]" in (missing(load_machine(MeshChoice(name="tpu-v5p"))) or "")
    assert "parallax-train[cuda-aot]" in (missing(load_machine(MeshChoice(name="h100-sxm"))) or "")


# Broken targets and run files


def has(*names: str):
    """Makes the modules of plugins look installed, and no others."""
    return lambda name: name in names or None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--target h100", '--target "h100" is not a machine of meshes/; use h100-sxm'),
        ("--target cpu", 'mesh.name = "cpu" emulates its devices; use for example --target h100-sxm'),
        (
            "--target h100-sxm",
            "--target h100-sxm: h100-sxm needs jax's CUDA plugin, which is not installed",
        ),
        ("parallel.dp=3 train.global_batch_size=24", "parallel: 12 devices make no tpu-v5p topology"),
        ("train.global_batch_size=17", "train.global_batch_size = 17 is not a multiple of"),
        ("train.precision=float32", 'train.precision = "float32" has no peak FLOP/s in the mesh tpu-v5p'),
        ("parallel.ep=2", "parallel.ep = 2: expert parallelism is not built yet; use 1"),
        ("--hlo no/step.hlo", "--hlo no/step.hlo: the folder no does not exist; make it first"),
        ("--hlo run.toml", "RUN.toml and --hlo both name run.toml; use two files"),
        ("parallel.virtual_stages=1 parallel.schedule=own.csv --save own.csv", "own.csv; use two files"),
        ("--hlo same --save same", "--hlo and --save both name same; use two files"),
        ("model.name=llama-tny", 'model.name = "llama-tny" is not a preset of models/; use llama-tiny'),
    ],
)
def test_what_is_wrong_is_said_before_any_build(run_file, words: str, said: str, monkeypatch, capsys):
    monkeypatch.setattr("parallax.aot.target.find_spec", has("libtpu"))
    monkeypatch.setattr(builder, "_child", lambda *_: pytest.fail("a build was started"))
    assert main(["compile", run_file, *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and said in err, err


def child(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Stands a short program in for the build."""
    monkeypatch.setattr("parallax.aot.target.find_spec", has("libtpu"))
    real = builder.subprocess.Popen
    monkeypatch.setattr(
        builder.subprocess, "Popen", lambda words, **rest: real([sys.executable, "-c", code, words[-1]], **rest)
    )


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.abort()", "the compiler was killed by SIGABRT: it said nothing"),
        (
            "import os, sys; print('F1130 06:24:18.3 42 spmd_util.cc:7] Check failed: a == b', file=sys.stderr,"
            " flush=True); os.abort()",
            "the compiler was killed by SIGABRT: spmd_util.cc:7] Check failed: a == b",
        ),
        ("raise ValueError('no such thing')", "the compiler ended with status 1: ValueError: no such thing"),
        ("", "the compiler left no memory.json"),
    ],
)
def test_a_compiler_that_fails_is_one_line(run_file, code: str, said: str, monkeypatch, capsys):
    child(monkeypatch, code)
    assert main(["compile", run_file]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err == f"error: {said}\n"


@pytest.mark.parametrize(
    "said",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory: Used 105.20G of 95.74G hbm.",
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (105.20G) exceeds available HBM (95.74G). HLO module: jit_step.",
    ],
)
def test_what_does_not_fit_says_what_to_shrink_and_what_would(run_file, said: str, monkeypatch, capsys):
    child(monkeypatch, f"raise RuntimeError({said!r})")
    words = ["model.name=llama3-8b", "train.seq_len=8192", "train.global_batch_size=64", "train.micro_batch_size=2"]
    assert main(["compile", run_file, *words]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: the compiler ran out of memory: 105.20G of 95.74G"
    assert second.startswith(
        "error: it does not fit: 105.2 GiB a device, 10.2 GiB more than the 95.0 GiB of tpu-v5p; most is "
    )
    assert "; use pp2·tp4, v 2, micro batch 1" in second  # with room for what the estimate did not see


# Buffers

PROGRAM = """HloModule jit_step, is_scheduled=true

FileNames
1 "/x/parallax/pipeline.py"

FunctionNames
1 "_Rank._begin"

FileLocations
1 {file_name_id=1 function_name_id=1 line=120 end_line=120 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

ENTRY %main (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0), metadata={op_name="state.weights[\\'blocks\\'][\\'up\\']"}
  %stash = f32[16,16]{1,0} broadcast(%c), metadata={op_name="jit(step)/broadcast" stack_frame_id=1}
  ROOT %add = f32[4,8]{1,0} add(%p, %p), metadata={op_name="jit(step)/add"}
}
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 128, parameter 0, shape |f32[4,8]| at ShapeIndex {}, maybe-live-out:
 value: <1 add @0> (size=128,offset=0): f32[4,8]{1,0}
 value: <2 p @0> (size=128,offset=0): f32[4,8]{1,0}
allocation 1: size 1152, preallocated-temp:
 value: <3 stash @0> (size=1024,offset=128): f32[16,16]{1,0}
 value: <4 while.1{2} (phi) @0> (size=1024,offset=128): f32[16,16]{1,0}
 value: <5 add @0> (size=128,offset=0): f32[4,8]{1,0}

Total bytes used: 1280
"""


def test_the_largest_buffers_by_name_and_source():
    first, second, third = largest_buffers(ASSIGNMENT, PROGRAM)
    assert (first.size_bytes, first.shape, first.what, first.source) == (
        1024,
        "f32[16,16]",
        "temporary",
        "pipeline.py:120 _begin",
    )
    assert {(b.size_bytes, b.name) for b in (second, third)} == {(128, "state.weights.blocks.up"), (128, "add")}
    assert len(largest_buffers(ASSIGNMENT, PROGRAM, 1)) == 1


# A real build

needs_libtpu = pytest.mark.skipif(
    find_spec("libtpu") is None, reason="NOT RUN: libtpu is not installed (pip install parallax-train[tpu-aot])"
)


@needs_libtpu
def test_a_tpu_build_is_read(run_file, capsys, tmp_path: Path):
    words = ["--json", "--hlo", "step.hlo", "--save", "step.bin"]
    assert main(["compile", run_file, "model.vocab_size=512", *words]) == 0
    out, _ = capsys.readouterr()
    facts = json.loads(out)
    assert facts["fits"] and facts["memory_gib"]["peak"] == pytest.approx(
        sum(facts["memory_gib"][name] for name in ("arguments", "outputs", "temporaries"))
    )
    assert len(facts["buffers"]) == 10 and any("masters.blocks" in b["name"] for b in facts["buffers"])
    kinds = {(tuple(row["axes"]), row["kind"]) for row in facts["collectives"]}
    assert {(("pp",), "collective-permute"), (("tp",), "all-gather"), (("tp",), "reduce-scatter")} <= kinds
    assert 0 < facts["simulated"]["step_time_s"] < 1 and facts["simulated"]["mfu"] > 0
    assert facts["compile_s"] > 0 and facts["estimate_gib"]["total"] > 0
    assert (tmp_path / "step.hlo").read_text().startswith("HloModule jit_step") and (
        tmp_path / "step.bin"
    ).stat().st_size


TEXT = """ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} all-reduce(%p), replica_groups=GROUPS
}
"""


def built(monkeypatch: pytest.MonkeyPatch, groups: str, size_bytes: int) -> None:
    """Stands for a build with one collective."""
    monkeypatch.setattr("parallax.aot.target.find_spec", has("libtpu", "jax_plugins.xla_cuda13"))
    made = Built(1.0, size_bytes, 0, 0, TEXT.replace("GROUPS", groups), (), "")
    monkeypatch.setattr(command, "build", lambda *_: made)


def test_a_text_that_cannot_be_read_is_one_line(run_file, monkeypatch, capsys):
    built(monkeypatch, "torus{2}", 0)
    assert main(["compile", run_file]) == 1
    out, err = capsys.readouterr()
    said = "it is built, but its text could not be read: groups of devices in an unknown form: replica_groups=torus{2}"
    assert out == "" and err == f"error: {said}\n"


@pytest.mark.parametrize(
    ("gib", "said"),
    [
        (72, []),
        (
            75,
            [
                "75.0 GiB is more than the 72.8 GiB that a run takes of a GPU's memory; set "
                "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95, or use a layout that needs less"
            ],
        ),
    ],
)
def test_what_fits_but_not_in_what_a_run_takes(run_file, gib: int, said: list[str], monkeypatch, capsys):
    built(monkeypatch, "{}", gib * 2**30)
    assert main(["compile", run_file, "--target", "h100-sxm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == said


def test_a_build_error_carries_what_it_needs():
    assert BuildError("x", 1.0).needs_bytes == 1.0 and BuildError("x").needs_bytes is None
    assert Built(1.0, 2, 3, 4, "", (), "").peak_bytes == 9


@pytest.mark.slow  # the plugin and its libraries are 2.5 GB: `make test` does not install them
@pytest.mark.skipif(
    missing(load_machine(MeshChoice(name="h100-sxm"))) is not None,
    reason="NOT RUN: jax's CUDA plugin is not installed (pip install parallax-train[cuda-aot])",
)
@pytest.mark.parametrize("context", ["ring", "all_gather"])
def test_a_gpu_builds_traffic_is_what_the_sizes_say(run_file, context: str, capsys):
    """dp2·pp2·tp2·cp2 for 16 H100 with full recomputation: every row of the table, byte for byte, and no other row."""
    D, H, K, C, F, V, L = 512, 8, 4, 64, 1536, 1024, 8
    dp = pp = tp = cp = 2
    S, m = 1024, 4
    words = f"model.width={D} model.heads={H} model.kv_heads={K} model.ff={F} model.vocab_size={V} model.layers={L} "
    words += f"parallel.cp={cp} parallel.virtual_stages=1 parallel.schedule=1f1b parallel.context={context} "
    words += f"train.seq_len={S} train.global_batch_size={m * dp} train.remat=full --target h100-sxm --json"
    assert main(["compile", run_file, *words.split()]) == 0
    facts = json.loads(capsys.readouterr().out)
    found: dict[tuple[str, str], int] = {}
    for row in facts["collectives"]:
        key = "·".join(row["axes"]), row["kind"]
        found[key] = found.get(key, 0) + row["bytes"]

    tokens, bf16, f32 = S // cp, 2, 4
    whole, part = tokens * D * bf16, tokens // tp * D * bf16  # activations of a microbatch: all, and a rank's sequence
    ticks = m + pp - 1  # that a rank spends in forward, and as many in backward
    visits = ticks * L // pp  # of a rank to a layer
    kv = 2 * tokens * K // tp * C * bf16
    layer = D * H * C + 2 * D * K * C + H * C * D + 3 * D * F
    local = L // pp * (layer // tp + 2 * D) + 2 * V * D // (pp * tp) + D
    expected = {
        # activations one way, their gradients the other
        ("pp", "collective-permute"): 2 * ticks * part,
        # the embedding's sum, the head's input, the gradients of both
        ("pp", "all-reduce"): 4 * m * part,
        # of the softmax: largest, sum, the target's logit
        ("pp·tp", "all-reduce"): 3 * m * tokens * f32,
        # a float32 gradient of each weight and a 16-bit weight, once a step
        ("dp·cp", "reduce-scatter"): local * f32 // (dp * cp),
        ("dp·cp", "all-gather"): local * bf16,
        # the gradient norm, by what weights are cut along; the loss goes with the first
        ("dp·cp", "all-reduce"): 2 * f32,
        ("pp·dp·cp", "all-reduce"): f32,
        ("pp·dp·cp·tp", "all-reduce"): f32,
        # before attention and before the MLP: forward, computed again, and the gradient of what comes after; the head's
        # input and the embedding's gradient
        ("tp", "all-gather"): (6 * visits + 2 * m) * whole,
        # after attention and after the MLP, of which the last need not be computed again; the gradient of what comes
        # before; the embedding and the gradient of the head's input
        ("tp", "reduce-scatter"): (5 * visits + 2 * m) * part,
        # gradients of norms, that each rank has of its part of the sequence
        ("tp", "all-reduce"): (2 * visits + m) * D * bf16,
    }
    if context == "ring":
        # keys and values, forward and once for both halves of backward; their gradients, in float32 but on the way home
        hops = cp - 1
        expected["cp", "collective-permute"] = visits * (hops * kv + hops * kv + hops * kv * f32 // bf16 + kv)
    else:
        expected["cp", "all-gather"] = visits * 2 * cp * kv
        expected["cp", "reduce-scatter"] = visits * kv * f32 // bf16
    assert found == expected
    assert facts["warnings"] == []


@pytest.mark.slow  # a quarter of a minute to four minutes each
@pytest.mark.parametrize("pod", sorted((ROOT / "examples" / "pods").glob("*.toml")), ids=lambda path: path.stem)
def test_the_pods_of_examples_fit(pod: Path, capsys, monkeypatch):
    if lacks := missing(load_machine(read(pod)[0].mesh)):
        pytest.skip(f"NOT RUN: {lacks}")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert main(["compile", str(pod), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["fits"]
    blockwise = [line for line in facts["warnings"] if line.startswith("attention runs blockwise")]
    assert facts["warnings"] == blockwise and len(blockwise) == (pod.stem == "gpt-1t-3072-h100")  # a head size of 160
    assert facts["estimate_gib"]["total"] == pytest.approx(facts["memory_gib"]["peak"], rel=0.08)
