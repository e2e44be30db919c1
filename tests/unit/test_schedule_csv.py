"""Schedules of the user's own: read from CSV, refused with the cell that is wrong, placed and priced as they are."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.config import SCHEDULES
from parallax.schedule import (
    GENERATORS,
    Op,
    Schedule,
    ScheduleError,
    bubble_formula,
    check_table,
    from_csv,
    lockstep_warning,
    make_schedule,
    read_csv,
    simulate,
    simulate_free,
    tick_table,
    timeline,
    timeline_svg,
    timeline_text,
    to_csv,
)

GOOD = ["0F0,0F1,0F2,0B0,0B1,0B2", "1F0,1B0,1F1,1B1,1F2,1B2"]


def orders(*rows: str) -> tuple[tuple[Op, ...], ...]:
    """Written anew, for ops of one digit: `0F1 0B1`."""
    return tuple(
        tuple(Op("F" if c[1] == "F" else "B", int(c[0]), int(c[2])) for c in row.replace(",", " ").split())
        for row in rows
    )


def problems(text: str) -> list[str]:
    with pytest.raises(ScheduleError) as caught:
        from_csv(text, "my/own.csv")
    assert str(caught.value).splitlines() == caught.value.problems
    assert all(line.startswith("my/own.csv: ") for line in caught.value.problems)
    return [line.removeprefix("my/own.csv: ") for line in caught.value.problems]


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(GOOD),
        "\n".join(GOOD) + "\n\n,,\n \n",  # lines at the end without cells
        "\r\n".join(GOOD) + "\r\n",  # as PyTorch's writer ends them
        "0F0,0F1,0F2,,0B0,,0B1,,0B2\n,1F0,1B0,1F1,1B1,1F2,1B2,,\n",  # waits
        ' 0F0, 0F1 ,"0F2",0B0,0B1,0B2\n\t1F0,1B0,1F1,1B1,1F2,01B02\n',
    ],
)
def test_what_is_read(text):
    assert from_csv(text, "my/own.csv") == Schedule("own", 2, 1, 3, orders(*GOOD))


def test_chunks(tmp_path: Path):
    path = tmp_path / "chunks.csv"
    path.write_text("0F0,2F0,2B0,0B0\n,1F0,3F0,3B0,1B0\n", encoding="utf-8-sig")
    schedule = read_csv(path)
    assert schedule == Schedule("chunks", 2, 2, 1, orders("0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0"))
    assert make_schedule(str(path), 2, 2, 1) == schedule
    with pytest.raises(ScheduleError) as caught:
        make_schedule(str(path), 2, 1, 8)
    ending = [f"{path}: has virtual_stages = 2, not 1", f"{path}: has microbatches = 1, not 8"]
    assert caught.value.problems == ending


@given(st.sampled_from(sorted(GENERATORS)), st.integers(1, 6), st.integers(1, 3), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_a_schedule_is_data(name, p, v, m):
    built = make_schedule(name, p, v if name == "interleaved" and p > 1 else 1, m)
    schedule = from_csv(to_csv(built), f"{name}.csv")
    assert schedule == built
    table, same = tick_table(schedule), tick_table(built)
    assert np.array_equal(table.cells, same.cells)
    assert (table.runs, table.buffers, table.tick_of) == (same.runs, same.buffers, same.tick_of)


def test_built_in_names():
    assert set(GENERATORS) == set(SCHEDULES)


# What is refused: the lines of the file, and all lines that are said.
V_SHAPED = ["0F0,3F0,3B0,0B0", "1F0,2F0,2B0,1B0"]
FEW = "with p = 2 lines stage k runs on rank k mod p"
HALVES = "I and W are the halves of a split backward, and this executor runs full backwards only"
COMMUNICATION = "is communication, which is derived from the order; leave it out (PyTorch's format compute_only)"
WRONG = {
    "nothing": (["", ",,"], ["holds no cell; write a line a rank, of cells such as 0F0 and 0B0"]),
    "no stage": (["F00,0B0"], ['line 1, column 1: "F00" names no stage; use 0F00 for the first one']),
    "no microbatch": (["0F0,0B"], ['line 1, column 2: "0B" names no microbatch; use 0B0 for the first one']),
    "unknown action": (
        ["0X0,0B0"],
        ['line 1, column 1: "0X0" has an unknown action X; use 0F0 (forward) or 0B0 (full backward)'],
    ),
    "lower case": (["0f0,0B0"], ['line 1, column 1: "0f0" is in lower case; use 0F0']),
    "other text": (
        ["rank 0,0F0", "-1F0"],
        [
            'line 1, column 1: "rank 0" is not stage, action and microbatch; use a cell such as 0F0 or 1B3',
            'line 2, column 1: "-1F0" is not stage, action and microbatch; use a cell such as 0F0 or 1B3',
        ],
    ),
    "semicolons": (
        ["0F0;0B0"],
        ['line 1, column 1: "0F0;0B0" holds 2 ops, and cells are parted by commas; use 0F0,0B0 and so on'],
    ),
    "split backward": (
        ["0F0,0I0,,0W0"],
        [
            f'line 1, column 2: "0I0" is not run: {HALVES}; use 0B0 in place of both',
            f'line 1, column 4: "0W0" is not run: {HALVES}; use 0B0 in place of both',
        ],
    ),
    "communication": (
        ["0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD"],
        [
            f'line 1, column {column}: "{text}" {COMMUNICATION}'
            for column, text in ((1, "0UNSHARD"), (3, "0SEND_F0"), (4, "0RECV_B0"), (6, "0REDUCE_GRAD"))
        ],
    ),
    "two in one": (
        ["0F0,(0F1;0B0)OVERLAP_F_B,0B1"],
        [
            'line 1, column 2: "(0F1;0B0)OVERLAP_F_B" is two ops in one, and a tick runs a forward and a backward '
            "anyway; use two cells: 0F1,0B0"
        ],
    ),
    "twice": (["0F0,,0F0,0B0"], ['line 1, column 3: "0F0" stands at line 1, column 1 already; remove one of them']),
    "twice, on two lines": (
        ["0F0,0B0", "1F0,0F0,1B0"],
        ['line 2, column 2: "0F0" stands at line 1, column 1 already; remove one of them'],
    ),
    "an empty line": (
        [GOOD[0], "", GOOD[1]],
        ["line 2 is empty, and each line is a rank; write the ops of rank 1, or remove the line"],
    ),
    "too long a number": (
        ["0F12345678,0B0"],
        [
            'line 1, column 1: "0F12345678" has a number of more than seven digits, and at most 1000000 forwards can '
            "be run; use smaller ones"
        ],
    ),
    "too large": (
        ["0F0,0F1000000,0B0"],
        [
            'line 1, column 2: "0F1000000" has too large a number: stages 0 to 0 x microbatches 0 to 1000000 are '
            "1000001, and at most 1000000 can run; use smaller ones"
        ],
    ),
    "v-shaped": (
        V_SHAPED,
        [
            'line 1, column 2: "3F0" is on rank 0, as in PyTorch\'s V-shaped placement, but here stage k runs on rank '
            "k mod p; move stage 3 to line 2, and so on for stages 2 to 3"
        ],
    ),
    "lines swapped": (
        GOOD[::-1],
        [
            f'line 1, column 1: "1F0" is on rank 0, but {FEW}; move stage 1 to line 2',
            f'line 2, column 1: "0F0" is on rank 1, but {FEW}; move stage 0 to line 1',
        ],
    ),
    "one op on another line": (
        [GOOD[0].replace("0F2", "1F2"), GOOD[1].replace("1F2", "0F2")],
        [
            f'line 1, column 3: "1F2" is on rank 0, but {FEW}; move stage 1 to line 2',
            f'line 2, column 5: "0F2" is on rank 1, but {FEW}; move stage 0 to line 1',
        ],
    ),
    "a line left out": (
        ["0F0,0B0", "1F0,1B0", "3F0,3B0"],
        ["has 3 lines, but stages as of 4 ranks, of which rank 2 has none; add its line, line 3, with stage 2"],
    ),
    "the last line left out": (
        ["0F0,3F0,3B0,0B0", "1F0,4F0,4B0,1B0"],
        ["has 2 lines, but stages as of 3 ranks, of which rank 2 has none; add its line, line 3, with stage 2"],
    ),
    "a stage left out": (
        ["0F0,4F0,4B0,0B0", "1F0,3F0,3B0,1B0"],
        ["has stage 4, but none of stage 2; number stages from 0 without gaps"],
    ),
    "not a multiple": (
        ["0F0,2F0,2B0,0B0", "1F0,1B0"],
        ["has 3 stages on 2 lines, which is not a multiple: use 2 or 4 stages"],
    ),
    "chunks on one rank": (
        ["0F0,1F0,1B0,0B0"],
        ["has 2 stages on one line, and chunks need two or more ranks; use stage 0 alone"],
    ),
    "a gap in microbatches": (
        ["0F0,0F2,0B0,0B2", "1F0,1F2,1B0,1B2"],
        ['line 1, column 2: "0F2", but no cell has microbatch 1; number microbatches from 0 without gaps'],
    ),
    "forwards only": (
        ["0F0,0F1", "1F0,1F1"],
        ["has no backward; add a cell such as 0B0 for each forward (evaluation has an order of its own)"],
    ),
    "one is missing": ([GOOD[0], GOOD[1].replace("1B1", "")], ["line 2 never runs 1B1; add it"]),
    "many are missing": (
        ["0F0,0F1,0F2", "1B0,1B1,1B2,1F0"],
        [
            "line 1 never runs 0B0, 0B1, 0B2; add them",
            "line 2 never runs 1F1, 1F2; add them",
            'line 2, column 1: "1B0" comes before its forward, in column 4; move it after that',
        ],
    ),
    "backward first": (
        ["0B0,0F0,0F1,0B1", "1F0,1B0,1B1,,1F1"],
        [
            'line 1, column 1: "0B0" comes before its forward, in column 2; move it after that',
            'line 2, column 3: "1B1" comes before its forward, in column 5; move it after that',
        ],
    ),
    "two wait for each other": (
        ["0F0,0B0,,0F1,0B1", "1F0,1F1,1B1,1B0"],
        [
            'ranks wait for each other for ever: line 1, column 2: "0B0" waits for 1B0 (line 2, column 4), but line 2, '
            'column 2: "1F1" waits for 0F1 (line 1, column 4); move one of these'
        ],
    ),
    "one of three only waits": (  # line 1 waits for line 2, which waits for line 3, and that for line 2
        ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1", "2F0,2F1,2B1,2B0"],
        [
            'ranks wait for each other for ever: line 2, column 2: "1B0" waits for 2B0 (line 3, column 4), but line 3, '
            'column 2: "2F1" waits for 1F1 (line 2, column 3); move one of these'
        ],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    lines, said = WRONG[name]
    assert problems("\n".join(lines) + "\n") == said


def test_no_more_than_ten_problems_are_listed():
    said = problems("0f0," * 25 + "\n")
    assert len(said) == 11
    assert said[-1] == "and 15 more problems"
    assert len(problems("0f0," * 10)) == 10


def test_files_that_cannot_be_read(tmp_path: Path):
    (tmp_path / "latin.csv").write_bytes(b"0F0,\xe9")
    cases = {
        tmp_path: "Is a directory; use the path of a CSV file",
        tmp_path / "none.csv": "No such file or directory; use the path of a CSV file",
        tmp_path / "latin.csv": "is not UTF-8 text; save it as CSV in UTF-8",
        tmp_path / "nul\0.csv": "is not the path of a file; use that of a CSV file",
    }
    for path, said in cases.items():
        with pytest.raises(ScheduleError) as caught:
            read_csv(path)
        assert caught.value.problems == [f"{path}: {said}"]
    long = '"' + "0" * 200_000 + '"'
    assert "is not CSV: field larger" in problems(long)[0]


@given(st.text(alphabet='0123FB,\n ;"\r\0fé', max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_or_refused(text):
    try:
        schedule = from_csv(text, "own.csv")
    except ScheduleError:
        return
    check_table(tick_table(schedule))


# Orders that nobody made for lock step.


@st.composite
def legal_orders(draw: st.DrawFn) -> Schedule:
    """What ranks do that each run, in a random sequence, ops that have all they need; some hurry to run backwards."""
    p, v, m = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 8))
    random, eager = draw(st.randoms(use_true_random=False)), draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    last = p * v - 1
    order: list[list[Op]] = [[] for _ in range(p)]
    ready = [Op("F", 0, mb) for mb in range(m)]
    while ready:
        backwards = [op for op in ready if op.kind == "B"]
        op = random.choice(backwards if backwards and random.random() < eager else ready)
        ready.remove(op)
        order[op.stage % p].append(op)
        kind, stage, mb = op
        if kind == "F":
            ready.append(Op("F", stage + 1, mb) if stage < last else Op("B", stage, mb))
        elif stage > 0:
            ready.append(Op("B", stage - 1, mb))
    return Schedule("random", p, v, m, tuple(map(tuple, order)))


def ticks_by_hand(schedule: Schedule) -> dict[Op, int]:
    """Tick by tick: on each rank the next forward and then the next backward, if what they need is there."""
    last, at, now = schedule.stages - 1, [0] * schedule.pp, 0
    ticks: dict[Op, int] = {}

    def there(op: Op) -> bool:
        kind, stage, mb = op
        if kind == "F":
            return stage == 0 or ticks.get(Op("F", stage - 1, mb), now) < now
        own = ticks.get(Op("F", stage, mb), now + 1) <= now
        return own and (stage == last or ticks.get(Op("B", stage + 1, mb), now) < now)

    while len(ticks) < 2 * schedule.stages * schedule.microbatches:
        for rank, order in enumerate(schedule.orders):
            for kind in "FB":
                if at[rank] < len(order) and (op := order[at[rank]]).kind == kind and there(op):
                    ticks[op] = now
                    at[rank] += 1
        now += 1
    return ticks


@given(legal_orders())
@settings(max_examples=150, deadline=None)
def test_any_legal_order(schedule):
    table = tick_table(schedule)
    check_table(table)
    assert table.tick_of == ticks_by_hand(schedule)
    assert len(table.runs) <= 3

    forwards = [tick for op, tick in table.tick_of.items() if op.kind == "F"]
    backwards = [tick for op, tick in table.tick_of.items() if op.kind == "B"]
    phases = 1 + max(forwards), table.ticks - min(backwards)
    costs = simulate(table)
    assert costs.total == Fraction(phases[0] + 2 * phases[1], schedule.virtual_stages)
    assert costs.bubble == costs.total / (3 * schedule.microbatches) - 1
    spans = timeline(table)
    assert max(span.stop for span in spans) == costs.total
    assert sum(span.stop - span.start for span in spans) == 3 * schedule.microbatches * schedule.pp
    assert simulate_free(schedule).total <= costs.total
    assert max(costs.peak_in_flight) <= table.buffers.stash
    if schedule.pp > 1 or schedule.virtual_stages == 1:
        assert from_csv(to_csv(schedule), "random.csv") == schedule


@given(legal_orders(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_a_swap_is_read_if_it_can_run(schedule, random: Random):
    """Two cells of a line change places: the reader refuses just what cannot be placed."""
    if schedule.pp == 1 < schedule.virtual_stages:
        return
    swapped = [list(order) for order in schedule.orders]
    row = random.choice(swapped)
    a, b = random.randrange(len(row)), random.randrange(len(row))
    row[a], row[b] = row[b], row[a]
    meant = Schedule("own", *(schedule.pp, schedule.virtual_stages, schedule.microbatches), tuple(map(tuple, swapped)))
    try:
        table = tick_table(meant)
    except ScheduleError:
        assert problems(to_csv(meant))
    else:
        check_table(table)
        assert from_csv(to_csv(meant), "own.csv") == meant


def megatron(p: int, m: int) -> str:
    """1F1B as free-running ranks have it, p - r - 1 forwards before the first backward of rank r."""
    lines = []
    for rank in range(p):
        forwards, backwards = ([f"{rank}{kind}{mb}" for mb in range(m)] for kind in "FB")
        warm = min(p - rank - 1, m)
        steady = [cell for pair in zip(forwards[warm:], backwards, strict=False) for cell in pair]
        lines.append(",".join([*forwards[:warm], *steady, *backwards[m - warm :]]))
    return "\n".join(lines)


def test_an_order_for_free_running_ranks():
    p, m = 4, 8
    schedule = from_csv(megatron(p, m), "megatron.csv")
    table = tick_table(schedule)
    check_table(table)
    free, locked = simulate_free(schedule), simulate(table)
    assert free.bubble == Fraction(p - 1, m)
    assert (table.ticks, locked.bubble, locked.peak_in_flight) == (19, 1, (4, 3, 2, 1))
    warning = lockstep_warning(table)
    assert warning is not None
    for part in ("megatron: lock step takes 45% longer", "(bubble 100.0%, not 37.5%)", "made for lock step"):
        assert part in warning
    with pytest.raises(ScheduleError, match="megatron has no bubble formula"):
        bubble_formula("megatron", p, 1, m)
    assert "megatron: p = 4" in timeline_svg(table)
    assert "rank 3 F" in timeline_text(table)


def test_a_poor_order():
    """A microbatch at a time, on two ranks: three ticks each, the forward phase idle in the third and the backward
    phase in the first, but both run from their first op to their last."""
    m = 5
    lines = [",".join(f"{rank}F{mb},{rank}B{mb}" for mb in range(m)) for rank in range(2)]
    table = tick_table(from_csv("\n".join(lines), "poor.csv"))
    check_table(table)
    assert (table.ticks, table.forward_ticks, table.backward_ticks) == (3 * m, 3 * m - 1, 3 * m - 1)
    assert simulate(table).total == 3 * (3 * m - 1)
    assert simulate_free(table.schedule).total == 6 * m
    assert [run[2:] for run in table.runs] == [(True, False, False), (True, True, True), (False, False, True)]


@pytest.mark.parametrize("args", [("1f1b", 4, 1, 8), ("gpipe", 4, 1, 2), ("interleaved", 4, 3, 9), ("1f1b", 8, 1, 3)])
def test_built_in_schedules_cost_nothing_in_lock_step(args):
    assert lockstep_warning(tick_table(make_schedule(*args))) is None


def test_orders_for_fewer_ranks_than_pp():
    with pytest.raises(ScheduleError, match="own: has orders for 1 ranks, not for pp = 2"):
        tick_table(Schedule("own", 2, 1, 1, orders("0F0 0B0")))
