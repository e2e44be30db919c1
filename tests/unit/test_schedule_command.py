"""The verb `parallax schedule`, in process."""

import argparse
import json

import pytest

from parallax.schedule import ScheduleError, make_schedule, read_csv, tick_table, timeline_svg, to_csv
from parallax.schedule.command import add_arguments, run


def call(*words: str) -> int:
    parser = argparse.ArgumentParser(prog="parallax schedule")
    add_arguments(parser)
    return run(parser.parse_args(list(words)))


FREE = """\
0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3
1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3
"""  # 1F1B as free-running ranks have it
INTERLEAVED = ("--kind", "interleaved", "--pp", "4", "--virtual-stages", "2", "--microbatches", "8")


def test_prints(capsys):
    assert call("--pp", "4", "--microbatches", "8") == 0
    out = capsys.readouterr().out
    for part in ("14: 11 with forwards", "37.50% simulated, 37.50% by formula", "7 5 3 1 chunks", "rank 3 F"):
        assert part in out


def test_json(capsys):
    assert call(*INTERLEAVED, "--json") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert json.loads(captured.out) == {
        "kind": "interleaved",
        "pp": 4,
        "virtual_stages": 2,
        "microbatches": 8,
        "ticks": 26,
        "forward_ticks": 19,
        "backward_ticks": 19,
        "bubble": 3 / 16,
        "bubble_formula": 3 / 16,
        "peak_in_flight": [11, 9, 7, 5],
        "free_running_bubble": 3 / 16,
        "buffers": {"stash": 11, "activations": 1, "gradients": 1, "losses": 1},
    }


def test_files(tmp_path, capsys):
    svg, csv = tmp_path / "a.svg", tmp_path / "a.csv"
    svg.write_text("old")
    assert call(*INTERLEAVED, "--svg", str(svg), "--csv", str(csv), "--json") == 0
    json.loads(capsys.readouterr().out)
    schedule = make_schedule("interleaved", 4, 2, 8)
    assert svg.read_text(encoding="utf-8") == timeline_svg(tick_table(schedule))
    assert csv.read_text(encoding="utf-8") == to_csv(schedule)
    assert {path.name for path in tmp_path.iterdir()} == {"a.svg", "a.csv"}


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "1f1b.csv"  # the name of a built-in schedule, which it is not
    path.write_text(FREE)
    return path


def test_prints_a_schedule_from_a_file(mine, capsys):
    svg, csv = mine.with_name("a.svg"), mine.with_name("a.csv")
    assert call("--kind", str(mine), "--svg", str(svg), "--csv", str(csv)) == 0
    captured = capsys.readouterr()
    for part in ("1f1b: 2 ranks", "4 microbatches", "50.00% simulated, 25.00% free running", "2 1 chunks"):
        assert part in captured.out
    assert "by formula" not in captured.out
    assert captured.err.startswith("warning: 1f1b: lock step takes 20% longer than this order needs where ranks run ")
    assert csv.read_text() == FREE
    assert svg.read_text(encoding="utf-8") == timeline_svg(tick_table(read_csv(mine)))


def test_json_of_a_schedule_from_a_file(mine, capsys):
    assert call("--kind", str(mine), "--json", "--pp", "2", "--virtual-stages", "1", "--microbatches", "4") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kind"], facts["pp"], facts["virtual_stages"], facts["microbatches"]) == ("1f1b", 2, 1, 4)
    assert (facts["ticks"], facts["forward_ticks"], facts["backward_ticks"]) == (7, 6, 6)
    assert (facts["bubble"], facts["bubble_formula"], facts["free_running_bubble"]) == (1 / 2, None, 1 / 4)


def test_a_schedule_from_a_file_that_does_not_agree(mine, capsys):
    with pytest.raises(ScheduleError) as caught:
        call("--kind", str(mine), "--pp", "4", "--virtual-stages", "2", "--microbatches", "8", "--json")
    assert caught.value.problems == [
        f"{option} {given} is not that of {mine}, which has {found}; use {found} or leave it out"
        for option, given, found in (("--pp", 4, 2), ("--virtual-stages", 2, 1), ("--microbatches", 8, 4))
    ]
    with pytest.raises(ScheduleError, match=f"--kind and --csv both name {mine}; use two files"):
        call("--kind", str(mine), "--csv", str(mine))
    mine.write_text(FREE.replace("1B3", ""))
    with pytest.raises(ScheduleError, match=r"1f1b\.csv: line 2 never runs 1B3; add it"):
        call("--kind", str(mine))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("option", ["--svg", "--csv"])
@pytest.mark.parametrize(
    ("place", "message"), [("no/a", "does not exist; make it first"), ("dir", "cannot be written")]
)
def test_files_that_cannot_be_written(tmp_path, capsys, option, place, message):
    (tmp_path / "dir").mkdir()
    with pytest.raises(ScheduleError, match=message):
        call(*INTERLEAVED, option, str(tmp_path / place))
    assert [path.name for path in tmp_path.rglob("*")] == ["dir"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kind", "zigzag", "--pp", "4", "--microbatches", "8"), '--kind "zigzag" is not known'),
        (("--kind", "", "--pp", "4", "--microbatches", "8"), '--kind "" is not known'),
        (
            ("--kind", "gpipe", "--microbatches", "8"),
            "--pp is missing, and --kind gpipe needs it; use for example --pp 4",
        ),
        (("--pp", "4"), "--microbatches is missing, and --kind 1f1b needs it"),
        (("--pp", "4", "--virtual-stages", "2", "--microbatches", "8"), "--virtual-stages 2 needs --kind interleaved"),
        (("--pp", "0", "--microbatches", "8"), "--pp 0 must be at least 1; use 1 or more"),
        (("--pp", "1000", "--microbatches", "1001"), "= 1001000 must be at most 1000000"),
        ((*INTERLEAVED, "--svg", "-"), '--svg "-" is not the name of a file; use one such as timeline.svg'),
        ((*INTERLEAVED, "--csv", ""), '--csv "" is not the name of a file'),
        ((*INTERLEAVED, "--csv", "no_such", "--svg", "./no_such"), "both name ./no_such; use two files"),
    ],
)
def test_numbers_that_do_not_fit(words, message):
    with pytest.raises(ScheduleError, match=message):
        call(*words)


def test_columns_of_zero_print_a_whole_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    assert call("--pp", "4", "--microbatches", "8") == 0
    assert "37.50% simulated" in capsys.readouterr().out


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit, match="0"):
        call("--help")
    assert "parallax schedule --kind interleaved --pp 4" in capsys.readouterr().out
