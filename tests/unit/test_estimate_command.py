"""The verb `parallax estimate` of a run file, through the command line. Measured steps: test_plan_measured.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallax.cli import main
from parallax.machine import MESHES
from parallax.plan.step import ITEMS
from parallax.schedule import make_schedule, to_csv

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
RUN = """\
[model]
name = "llama3-70b"

[parallel]
dp = 2
pp = 4
cp = 2
tp = 4

[mesh]
name = "h100-sxm"

[train]
steps = 1
seq_len = 8192
global_batch_size = 512

[log]
dir = "runs/never"
"""
MIXTRAL = ("model.name=mixtral-8x7b", "parallel.cp=1", "parallel.tp=1")
MEGATRON = ("--framework", "megatron")
Facts = Callable[..., dict[str, Any]]


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


@pytest.fixture
def facts(run_file: Path, capsys: pytest.CaptureFixture[str]) -> Facts:
    """What `--json` prints of RUN with these overrides and options; `status` is what it must end with."""

    def call(*words: str, status: int = 0) -> dict[str, Any]:
        assert main(["estimate", str(run_file), *words, "--json"]) == status
        out, err = capsys.readouterr()
        assert err == "" and out.count("\n") == 1
        return json.loads(out)

    return call


def problems(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The lines of a refusal."""
    assert main(["estimate", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    return [line.removeprefix("error: ") for line in lines]


@pytest.mark.parametrize("framework", ["parallax", "megatron"])
def test_text(run_file: Path, capsys: pytest.CaptureFixture[str], framework: str):
    assert main(["estimate", str(run_file), "--framework", framework]) == 0
    out, err = capsys.readouterr()
    found = "".join(f"{line.rstrip()}\n" for line in out.splitlines())
    assert err == ""
    assert found == (GOLDEN / f"estimate_{framework}.txt").read_text(encoding="utf-8")


def test_nothing_is_written_and_no_jax_starts(run_file: Path):
    """A model that is here as data alone needs no model file, and so no jax."""
    code = "import sys; from parallax.cli import main; sys.exit(main(sys.argv[1:]) or 'jax' in sys.modules)"
    words = ["estimate", str(run_file), *MIXTRAL, "parallel.ep=8", "--json"]
    subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert [path.name for path in run_file.parent.iterdir()] == ["run.toml"]


def adds_up(found: dict[str, Any]) -> None:
    """Items are at least 0 and add up to the totals beside them."""
    for rank, stage in enumerate(found["stages"]):
        items = [size for name, size in stage.items() if name not in ("rank", "total_gib")]
        assert stage["rank"] == rank and all(size >= 0 for size in items)
        assert stage["total_gib"] == pytest.approx(sum(items))
    assert found["memory_gib"] == max(stage["total_gib"] for stage in found["stages"])
    if found["hbm_gib"] is not None:
        assert found["fits"] == (found["memory_gib"] <= found["hbm_gib"])
    if found["time_s"] is not None:
        assert tuple(found["time_s"]) == ITEMS and min(found["time_s"].values()) >= 0
        assert found["step_time_s"] == pytest.approx(sum(found["time_s"].values()))
        tokens = found["train"]["global_batch_size"] * found["train"]["seq_len"]
        assert found["tokens_per_s"] * found["step_time_s"] == pytest.approx(tokens)
        assert 0 < found["mfu"] <= found["hfu"] < 1
        for seconds in found["communication_s"].values():
            assert 0 <= seconds["exposed"] <= seconds["total"]


@pytest.mark.parametrize("words", [(), MEGATRON], ids=["parallax", "megatron"])
def test_json(facts: Facts, words: tuple[str, ...]):
    found = facts(*words)
    expected = "model parameters mesh framework devices parallel train microbatches step_time_s tokens_per_s mfu hfu "
    expected += "mfu_flops hfu_flops fits memory_gib hbm_gib stages time_s communication_s notes"
    assert list(found) == expected.split()
    assert (found["model"], found["mesh"], found["devices"]) == ("llama3-70b", "h100-sxm", 64)
    assert (found["microbatches"], len(found["stages"])) == (256, 4)
    assert found["parameters"] == pytest.approx(70.6e9, rel=1e-3)
    adds_up(found)


CASES: dict[str, tuple[str, ...]] = {  # overrides of RUN that can be priced
    "selective": ("train.remat=selective",),
    "interleaved": ("parallel.schedule=interleaved", "parallel.virtual_stages=5"),
    "interleaved, in Megatron's scheme": ("parallel.schedule=interleaved", "parallel.virtual_stages=5", *MEGATRON),
    "uneven layers": ("parallel.pp=3", "parallel.dp=4"),
    "uneven layers, in Megatron's scheme": ("parallel.pp=3", "parallel.dp=4", *MEGATRON),
    "zero 0": ("parallel.zero=0", "parallel.tp=8"),
    "gathered context": ("parallel.context=all_gather",),
    "one microbatch": ("train.global_batch_size=2",),
    "TPU": ("mesh.name=tpu-v5p",),
    "experts": (*MIXTRAL, "parallel.ep=8", "parallel.dp=4"),
    "experts of several nodes": (*MIXTRAL, "parallel.ep=8", "parallel.tp=4", "parallel.dp=4"),
    "experts, in Megatron's scheme": (*MIXTRAL, "parallel.ep=8", "parallel.dp=4", *MEGATRON),
}


@pytest.mark.parametrize("name", CASES)
def test_what_can_be_priced(facts: Facts, name: str):
    found = facts(*CASES[name])
    adds_up(found)
    assert found["fits"] is True


def test_experts_are_split_over_ep(facts: Facts):
    """Of Mixtral's 46.7 B parameters 45.1 B are in experts: more of ep is less of them, and exchanges."""
    alone, split = (facts(*MIXTRAL, f"parallel.ep={ep}", f"parallel.dp={16 // ep}") for ep in (2, 8))
    assert alone["parameters"] == split["parameters"] == pytest.approx(46.7e9, rel=1e-3)
    experts = 45.1e9 / 4 * 2 / 2**30  # of a stage, in 2 bytes
    weights = [found["stages"][0]["weights_gib"] for found in (alone, split)]
    assert weights[0] - weights[1] == pytest.approx(experts * (1 / 2 - 1 / 8), rel=0.01)
    assert 0 < alone["time_s"]["ep"] < split["time_s"]["ep"]
    dense = facts(*MIXTRAL, "parallel.ep=1", status=1)
    assert dense["time_s"]["ep"] == 0


def test_deepseek_v3(facts: Facts):
    """61 layers on 16 stages, 4 on the first 13. The first three of all have no experts, but a feed-forward width of
    18,432; the others a device's 4 of 256 experts, one shared, of width 2048, and a router. In parallax's scheme one
    program serves all ranks, and each has room for the largest."""
    words = ("model.name=deepseek-v3", "parallel.pp=16", "parallel.ep=64", "parallel.tp=2", "parallel.cp=1")
    words += ("parallel.dp=1", "train.seq_len=4096", "train.global_batch_size=1024")
    megatron, own = facts(*words, *MEGATRON), facts(*words)
    assert megatron["parameters"] == own["parameters"] == pytest.approx(671e9, rel=1e-3)
    for found in (megatron, own):
        assert (found["devices"], len(found["stages"])) == (2048, 16)
        adds_up(found)
    weights = [stage["weights_gib"] * 2**30 for stage in megatron["stages"]]
    assert len(set(weights[1:13])) == len(set(weights[13:15])) == 1
    dense = 3 * 7168 * 18_432 / 2
    experts = 3 * 7168 * 2048 * (4 + 1) / 2 + 7168 * 256
    assert weights[0] - weights[1] == pytest.approx(2 * (3 * (dense - experts) + 129_280 * 7168 / 2))
    assert len({stage["weights_gib"] for stage in own["stages"]}) == 1
    assert own["time_s"]["padding"] > 0


def test_emulated_devices_have_no_speed(facts: Facts, run_file: Path, capsys: pytest.CaptureFixture[str]):
    found = facts("mesh.name=cpu")
    assert [found[name] for name in ("step_time_s", "tokens_per_s", "mfu", "hfu", "time_s", "communication_s")] == [
        None
    ] * 6
    assert found["fits"] is found["hbm_gib"] is None
    assert found["stages"] == facts()["stages"]
    adds_up(found)
    assert main(["estimate", str(run_file), "mesh.name=cpu"]) == 0
    out = capsys.readouterr().out
    assert "the devices share the host's memory" in out and "no time: cpu has no speed of its own" in out


def test_schedules(facts: Facts, tmp_path: Path):
    """GPipe takes as long as 1F1B and holds every microbatch; an order from a file that is a built-in one's is that."""
    few = "train.global_batch_size=64"
    one, gpipe = facts(few), facts(few, "parallel.schedule=gpipe")
    assert gpipe["time_s"] == one["time_s"]
    stash = [found["stages"][0]["stash_gib"] for found in (one, gpipe)]
    assert stash[1] / stash[0] == pytest.approx((32 + 1) / (2 * 4 - 1), rel=0.1)
    (tmp_path / "mine.csv").write_text(to_csv(make_schedule("1f1b", 4, 1, 32)))
    mine = facts(few, "parallel.schedule=mine.csv")
    assert mine["parallel"].pop("schedule").endswith("mine.csv") and one["parallel"].pop("schedule") == "1f1b"
    assert mine == one


def test_what_does_not_fit_says_where_and_by_how_much(facts: Facts, run_file: Path, capsys: pytest.CaptureFixture[str]):
    bare = ("parallel.zero=0", "parallel.sequence_parallel=false", *MEGATRON)
    found = facts(*bare, status=1)
    assert found["fits"] is False
    assert found["memory_gib"] == found["stages"][0]["total_gib"] > 79.1
    assert facts(*MEGATRON)["fits"] is True
    assert main(["estimate", str(run_file), *bare]) == 1
    line = capsys.readouterr().out.splitlines()[3]
    said = re.fullmatch(
        r"does not fit: ([\d.]+) GiB a device on stage 0, ([\d.]+) GiB more than the 79\.1 GiB of h100-sxm", line
    )
    assert said is not None
    needs, lacks = said.groups()
    assert float(needs) == pytest.approx(found["memory_gib"], abs=0.05)
    assert float(lacks) == pytest.approx(found["memory_gib"] - found["hbm_gib"], abs=0.05)


WRONG: dict[str, tuple[tuple[str, ...], str]] = {  # overrides of RUN, and the one line
    "ep that does not divide": (
        (*MIXTRAL, "parallel.ep=3", "train.global_batch_size=504"),
        "parallel.ep = 3 does not divide the model's 8 experts; use 1, 2, 4 or 8",
    ),
    "ep of a dense model": (
        ("parallel.ep=2",),
        "parallel.ep = 2 needs a model with experts, which llama3-70b has not; use 1",
    ),
    "a field of a model without a file": (
        (*MIXTRAL, "model.layers=16"),
        "model.layers = 16: mixtral-8x7b is here as data alone, without a model file; leave it out",
    ),
    "float32 without a peak": (
        ("mesh.name=tpu-v5p", "train.precision=float32"),
        'train.precision = "float32" has no peak FLOP/s in the mesh tpu-v5p, so no MFU; use "bfloat16"',
    ),
    "GPipe in Megatron's scheme": (
        ("parallel.schedule=gpipe", *MEGATRON),
        'parallel.schedule = "gpipe" is not of --framework megatron; use "1f1b" or "interleaved"',
    ),
    "float32 in Megatron's scheme": (
        ("train.precision=float32", *MEGATRON),
        'train.precision = "float32" is not of --framework megatron; use "bfloat16"',
    ),
    "an unknown machine": (
        ("mesh.name=h100",),
        'mesh.name = "h100" is not a machine of meshes/; use h100-sxm or a mesh.file',
    ),
    "a batch that does not divide": (
        ("train.global_batch_size=511",),
        "train.global_batch_size = 511 is not a multiple of parallel.dp 2 x parallel.ep 1 x train.micro_batch_size 1 "
        "= 2; use 510 or 512",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_run_files_are_one_line(run_file: Path, capsys: pytest.CaptureFixture[str], name: str):
    words, line = WRONG[name]
    assert problems(capsys, str(run_file), *words, "--json") == [line]


@pytest.mark.parametrize(
    ("figure", "words"),
    [
        ("hbm_bytes_per_s", ()),
        ("link_inside_bytes_per_s", ("parallel.tp=2",)),
        ("link_across_bytes_per_s", ("parallel.dp=16", "train.global_batch_size=512")),
    ],
)
@pytest.mark.parametrize("framework", ["parallax", "megatron"])
def test_a_figure_of_the_mesh_that_is_not_known(
    run_file: Path, capsys: pytest.CaptureFixture[str], figure: str, words: tuple[str, ...], framework: str
):
    text = (MESHES / "h100-sxm.toml").read_text()
    Path("mine.toml").write_text(re.sub(rf"(?m)^{figure} = \S+", f"{figure} = 0", text))
    (line,) = problems(capsys, str(run_file), "mesh.file=mine.toml", *words, "--framework", framework)
    assert line.startswith(
        f"mesh h100-sxm: {figure} = 0, for not known, and this layout's time cannot be priced without"
    )


def test_an_unknown_model(run_file: Path, capsys: pytest.CaptureFixture[str]):
    (line,) = problems(capsys, str(run_file), "model.name=mixtral")
    assert line.startswith('model.name = "mixtral" is not a preset of models/')
    assert line.endswith("; estimates also know mixtral-8x7b, mixtral-8x22b or deepseek-v3")


def test_every_problem_is_listed_at_once(run_file: Path, capsys: pytest.CaptureFixture[str]):
    words = ("parallel.tp=3", "parallel.ep=2", "parallel.fsdp=1", "mesh.name=h100", "train.remat=some")
    lines = problems(capsys, str(run_file), *words)
    for key in (
        "parallel.tp = 3",
        "parallel.ep = 2",
        "parallel.fsdp = 1",
        'mesh.name = "h100"',
        'train.remat = "some"',
    ):
        assert any(line.startswith(key) for line in lines), key


@pytest.mark.parametrize("words", [(), ("run.toml", "--measured", "steps.csv")], ids=["neither", "both"])
def test_one_of_two(run_file: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]):
    expected = "give either RUN.toml or --measured FILE.csv; see parallax estimate --help"
    assert problems(capsys, *words) == [expected]
