"""Prices beside published steps: errors of the real table where it is there, and how any table is read and scored."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallax.cli import main
from parallax.config import ConfigError, MeshChoice, Parallel, Train
from parallax.machine import load_machine
from parallax.plan.costs import Costs
from parallax.plan.layer import MEGATRON, LayerTimes
from parallax.plan.measured import COLUMNS, Priced, Row, by_source, calibration_half, price_all, read_rows, score
from parallax.plan.megatron import Switches, megatron_step
from parallax.plan.shapes import gpt_shape

MEASURED = Path(__file__).parents[3] / "shared" / "data" / "measured_steps.csv"
needs_measured = pytest.mark.skipif(
    not MEASURED.is_file(), reason=f"published steps are not in the repository: no {MEASURED}"
)
A100 = "a100-80gb"


# The real table


@pytest.fixture(scope="module")
def priced() -> dict[str, list[Priced]]:
    """By source, the first word of whose name or file says which it is."""
    rows = price_all(read_rows(MEASURED))
    names = {"single": "single", "multi": "multi", "Korthikanti": "korthikanti", "SC21": "sc21", "megatron": "h100"}
    return {
        next(short for part, short in names.items() if part in source): own for source, own in by_source(rows).items()
    }


@needs_measured
def test_every_published_row_is_read(priced: dict[str, list[Priced]]):
    lines = MEASURED.read_text().splitlines()
    assert sum(map(len, priced.values())) == len(lines) - 1
    assert sorted(p.row.line for own in priced.values() for p in own) == list(range(2, len(lines) + 1))


@needs_measured
def test_errors(priced: dict[str, list[Priced]]):
    calibration = {row.line for row in calibration_half([p.row for p in priced["single"]])}
    held_out = [p for p in priced["single"] if p.row.line not in calibration]
    assert 0.4 < len(held_out) / len(priced["single"]) < 0.6
    groups = lambda rows: {p.row.group for p in rows}
    assert not groups(held_out) & groups(p for p in priced["single"] if p.row.line in calibration)
    errors = {name: score(own).mean for name, own in (priced | {"held out": held_out}).items()}
    assert errors["held out"] <= 0.15
    assert errors["multi"] <= 0.15
    assert errors["korthikanti"] <= 0.06
    assert errors["sc21"] <= 0.08


@needs_measured
def test_regret(priced: dict[str, list[Priced]]):
    single, multi = score(priced["single"]), score(priced["multi"])
    assert single.groups > 50 and single.regret is not None and single.regret <= 0.05
    assert multi.groups == 2 and multi.regret is not None and multi.regret <= 0.02


@needs_measured
def test_what_is_not_published_is_named(priced: dict[str, list[Priced]]):
    assumed = {name: {what for p in own for what in p.row.assumed} for name, own in priced.items()}
    assert assumed["sc21"] == assumed["korthikanti"] == set()
    assert assumed["single"] == {"vocabulary 51,200", "recomputation none"}
    assert assumed["multi"] == {"vocabulary 51,200", "recomputation full"}
    assert assumed["h100"] == {
        "recomputation none",
        "sequence parallel",
        "the micro batch that is predicted fastest",
        "the virtual stages that are predicted fastest",
    }


def test_a_trillion_parameters():
    """502 PFLOP/s on 3,072 A100 (Narayanan et al. 2021, arXiv 2104.04473, table 1), FLOPs by its equation 3."""
    l, h, s, V, B, devices = 128, 25_600, 2048, 51_200, 3072, 3072
    shape = gpt_shape(l, h, 160, 160, 4 * h, V, glu=False, positions=s)
    parallel = Parallel(tp=8, pp=64, dp=6, sequence_parallel=False, zero=0)
    assert parallel.tp * parallel.pp * parallel.dp == devices
    train = Train(steps=1, seq_len=s, global_batch_size=B, remat="full")
    times = LayerTimes(Costs(load_machine(MeshChoice(name=A100)), "bfloat16"), MEGATRON)
    step = megatron_step(times, Switches(reduces_fp32=False, overlaps_dp=False), shape, parallel, train)
    flops = 96 * B * s * l * h**2 * (1 + s / (6 * h) + V / (16 * l * h))
    assert flops / step.total == pytest.approx(502e15, rel=0.05)


# Tables of a test's own

GOOD = {
    "source": "mine",
    "hardware": A100,
    "recompute": "full",
    "layers": "8",
    "hidden": "1024",
    "heads": "16",
    "seq": "2048",
    "gpus": "8",
    "global_batch": "16",
    "micro_batch": "1",
    "tp": "2",
    "pp": "2",
    "sequence_parallel": "False",
    "vpp": "1",
    "iteration_s": "1.5",
}


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Path]:
    """Writes a table of rows that differ from GOOD in these cells."""

    def write(*rows: dict[str, str], without: str = "") -> Path:
        columns = [name for name in COLUMNS if name != without]
        lines = [",".join(columns), *(",".join((GOOD | row).get(name, "") for name in columns) for row in rows)]
        path = tmp_path / "steps.csv"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


WRONG: dict[str, tuple[dict[str, str], str, str]] = {  # cells, the value and its rule, what works
    "unknown hardware": ({"hardware": "a100"}, 'hardware = "a100" is not a machine of meshes/', "use a100-80gb, "),
    "emulated devices": ({"hardware": "cpu"}, 'hardware = "cpu" is not a machine', "that has a speed; use a100-80gb"),
    "zero": ({"layers": "0"}, 'layers = "0" must be an integer of at least 1', "use 1 or more"),
    "negative": ({"tp": "-2"}, 'tp = "-2" must be an integer of at least 1', "use 1 or more"),
    "text": ({"seq": "long"}, 'seq = "long" must be an integer', "use 1 or more"),
    "a fraction": ({"vpp": "1.5"}, 'vpp = "1.5" must be an integer', "use 1 or more, or leave it empty for 1"),
    "another digit": ({"pp": "²"}, 'pp = "²" must be an integer', "use 1 or more"),
    "too long": ({"gpus": "9" * 5000}, 'gpus = "999', "at most 12 digits"),
    "missing": ({"hidden": ""}, 'hidden = "" must be an integer', "use 1 or more"),
    "a truth value": ({"glu": "yes"}, 'glu = "yes" must be a truth value', "use True or False, or leave it empty"),
    "no time": ({"iteration_s": ""}, 'iteration_s = "" must be a number greater than 0', "use seconds a step"),
    "not a number": ({"iteration_s": "nan"}, 'iteration_s = "nan" must be a number', "use seconds a step"),
    "endless": ({"iteration_s": "inf"}, 'iteration_s = "inf" must be a number', "use seconds a step"),
    "negative time": ({"iteration_s": "-1"}, 'iteration_s = "-1" must be a number', "use seconds a step"),
    "devices": ({"gpus": "14"}, "gpus = 14 is not a multiple of tp 2 x pp 2 x cp 1 x ep 1 = 4", "use 12 or 16"),
    "batch": ({"global_batch": "15"}, "= 15 is not a multiple of dp 2 x ep 1 x micro_batch 1 = 2", "use 14 or 16"),
    "heads": ({"heads": "17", "hidden": "1088"}, "heads = 17 is not a multiple of tp = 2", "use 16 or 18"),
    "key/value heads": ({"kv_heads": "5"}, "heads = 16 is not a multiple of kv_heads = 5", "use 15 or 20"),
    "sequence": ({"cp": "2", "seq": "2047"}, "seq = 2047 is not a multiple of cp = 2", "use 2046 or 2048"),
    "stages": ({"vpp": "5"}, "pp 2 x vpp 5 = 10 stages are more than layers = 8", "use at most 8"),
    "layers": ({"layers": "9999999"}, "layers = 9999999 must be at most 10000", "use 10000 or less"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_is_named(table: Callable[..., Path], name: str):
    cells, problem, works = WRONG[name]
    path = table({}, cells)
    with pytest.raises(ConfigError) as caught:
        read_rows(path)
    (line,) = caught.value.problems
    assert line.startswith(f"--measured {path}, line 3: ")
    assert problem in line and works in line and "\n" not in line


def test_every_problem_is_listed_at_once(table: Callable[..., Path]):
    path = table({"tp": "x", "iteration_s": "0"}, {}, {"gpus": "6", "heads": "3"})
    with pytest.raises(ConfigError) as caught:
        read_rows(path)
    wheres = [problem.removeprefix(f"--measured {path}, ").split(" = ")[0] for problem in caught.value.problems]
    assert wheres == ["line 2: tp", "line 2: iteration_s", "line 4: gpus", "line 4: hidden", "line 4: heads"]


def test_lines_are_those_of_the_file(table: Callable[..., Path]):
    path = table({}, {"tp": "x"})
    head, first, second = path.read_text().splitlines()
    path.write_text("\n".join([head, "", first.replace("mine", '"my\nown"'), "", "", second]))
    with pytest.raises(ConfigError, match=r", line 7: tp = "):
        read_rows(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file or directory; give a CSV file of measured steps"),
        (b"\xff\xfe\x00", "'utf-8' codec can't decode byte 0xff"),
        (b"", "has no columns source, hardware, "),
        (",".join(COLUMNS).encode(), "has no rows; give a line a measured step"),
        (",".join(c for c in COLUMNS if c != "tp").encode(), "has no columns tp; use source, hardware, "),
    ],
    ids=["no file", "not UTF-8", "empty", "no rows", "no column"],
)
def test_a_file_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, problem: str):
    path = tmp_path / "steps.csv"
    if content is not None:
        path.write_bytes(content)
    assert main(["estimate", "--measured", str(path)]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == "" and line.startswith(f"error: --measured {path}: {problem}")


def test_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["estimate", "--measured", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err == f"error: --measured {tmp_path}: Is a directory; give a CSV file of measured steps\n"
    )


def test_assumptions(table: Callable[..., Path]):
    """Said where a cell is empty, and not where it is not."""
    empty = {"recompute": "", "sequence_parallel": "", "vpp": "", "micro_batch": ""}
    given, bare, one = read_rows(table({"vocab": "1024"}, empty, {"tp": "1", "pp": "1"} | empty))
    assert given.assumed == () and (given.shape.vocab_size, given.train.remat) == (1024, "full")
    assert set(bare.assumed) == {
        "vocabulary 51,200",
        "no sequence parallelism",
        "recomputation none",
        "the micro batch that is predicted fastest",
        "the virtual stages that are predicted fastest",
    }
    assert not any("sequence" in what or "stages" in what for what in one.assumed)
    (several_nodes,) = read_rows(table({"recompute": "", "gpus": "16"}))
    assert several_nodes.train.remat == "full" and "recomputation full" in several_nodes.assumed


def test_the_fastest_stands_for_what_is_not_published(table: Callable[..., Path]):
    prices = lambda *rows: [p.predicted_s for p in price_all(read_rows(table(*rows)))]
    each = prices(*({"micro_batch": b, "vpp": v} for b in ("1", "2", "4", "8") for v in ("1", "2", "4")))
    assert len(set(each)) == len(each)
    assert prices({"micro_batch": "", "vpp": ""}) == [min(each)]


def made_up(row: Row, **times: tuple[float, float]) -> list[Priced]:
    """Measured and predicted seconds, a row each."""
    return [Priced(dataclasses.replace(row, measured_s=a), b) for a, b in times.values()]


def test_score_by_hand(table: Callable[..., Path]):
    row, other = read_rows(table({}, {"global_batch": "32"}))
    four = made_up(row, a=(1.0, 1.1), b=(2.0, 1.0), c=(1.25, 0.9), d=(4.0, 4.0))  # c is picked, a is fastest
    three = made_up(other, a=(1.0, 2.0), b=(2.0, 1.0), c=(1.0, 1.0))  # too few to count
    errors = [0.1, -0.5, 0.9 / 1.25 - 1, 0.0, 1.0, -0.5, 0.0]
    found = score([*four, *three])
    assert (found.rows, found.groups, found.regret) == (7, 1, pytest.approx(0.25))
    assert found.mean == pytest.approx(sum(map(abs, errors)) / 7)
    assert found.median == pytest.approx(statistics.median(map(abs, errors)))
    assert (found.worst, found.bias) == (pytest.approx(1.0), pytest.approx(sum(errors) / 7))
    assert score(three).regret is None


def test_json(table: Callable[..., Path], capsys: pytest.CaptureFixture[str]):
    path = table({}, {"source": "yours", "vocab": "1024"})
    assert main(["estimate", "--measured", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    facts: dict[str, Any] = json.loads(out)
    assert err == "" and list(facts) == ["sources", "rows"] and list(facts["sources"]) == ["mine", "yours"]
    assert list(facts["sources"]["mine"]) == ["rows", "mean", "median", "worst", "bias", "groups", "regret"]
    assert facts["sources"]["mine"]["regret"] is None
    first, second = facts["rows"]
    assert list(first) == ["line", "source", "measured_s", "predicted_s", "error", "assumed"]
    assert (first["line"], second["line"], first["measured_s"]) == (2, 3, 1.5)
    assert first["error"] == pytest.approx(first["predicted_s"] / 1.5 - 1)
    assert (first["assumed"], second["assumed"]) == (["vocabulary 51,200"], [])


def test_text(table: Callable[..., Path], capsys: pytest.CaptureFixture[str]):
    path = table({}, {"source": "yours"})
    assert main(["estimate", "--measured", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["source", "rows", "mean", "median", "worst", "bias", "groups", "regret"]
    assert lines[1].split()[:2] == ["mine", "1"] and lines[2].split()[:2] == ["yours", "1"]
    assert lines[-2:] == [f"assumed for 1 rows of {name}: vocabulary 51,200" for name in ("mine", "yours")]
