"""Schedules for all sizes: complete, checked by replay, priced by formula, drawn from the same object."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.schedule import (
    FIELDS,
    Op,
    Row,
    ScheduleError,
    TickTable,
    bubble_formula,
    check_table,
    forward_only,
    make_schedule,
    simulate,
    simulate_free,
    tick_table,
    timeline_svg,
    timeline_text,
    to_csv,
)

GOLDEN = Path(__file__).parent.parent / "golden"


@st.composite
def sizes(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """Kind, p ≤ 8, v ≤ 4, m ≤ 32; v > 1 with interleaved on more than one rank only."""
    name = draw(st.sampled_from(["interleaved", "interleaved", "1f1b", "gpipe"]))
    p = draw(st.integers(1, 8))
    v = draw(st.integers(1, 4)) if name == "interleaved" and p > 1 else 1
    return name, p, v, draw(st.integers(1, 32))


def all_ops(p: int, v: int, m: int) -> Counter[Op]:
    return Counter(op for stage in range(p * v) for mb in range(m) for op in (Op("F", stage, mb), Op("B", stage, mb)))


def change(table: TickTable, tick: int, rank: int, field: str, value: int) -> TickTable:
    cells = table.cells.copy()
    cells[tick, rank, FIELDS.index(field)] = value
    return replace(table, cells=cells)


@given(sizes())
@settings(max_examples=120, deadline=None)
def test_every_size(size):
    name, p, v, m = size
    schedule = make_schedule(name, p, v, m)
    table = tick_table(schedule)
    check_table(table)

    assert Counter(op for order in schedule.orders for op in order) == all_ops(p, v, m)
    ticks = m * v + p - 1 if m >= p else m + v * p - 1
    assert table.forward_ticks == table.backward_ticks == ticks
    bubble = Fraction(ticks, m * v) - 1
    if m >= p:
        assert bubble == Fraction(p - 1, v * m)
    costs = simulate(table)
    assert costs.bubble == bubble == bubble_formula(name, p, v, m)
    assert costs.total == 3 * m * (1 + bubble)
    assert simulate(table, Fraction(1, 3), 1).bubble == bubble
    assert simulate_free(schedule).bubble <= bubble

    peak = costs.peak_in_flight
    if name == "1f1b":
        assert peak == tuple(min(m, 2 * (p - r) - 1) for r in range(p))
    if name == "gpipe":
        assert peak == (m,) * p
    if name == "interleaved":
        largest = -(-m // max(m // p, 1))  # of the groups of microbatches
        assert peak[0] <= min(v * m, (v + 1) * p - 1 + (v - 1) * max(largest - p, 0))
        if m % p == 0 and m >= 2 * p:
            assert peak[0] == (v + 1) * p - 1
    # A rank that idles in the forward phase while all its chunks are in flight needs one slot to write to.
    assert max(peak) <= table.buffers.stash <= max(peak) + 1


@pytest.mark.parametrize(("name", "v", "m"), [("1f1b", 1, 64), ("interleaved", 2, 64), ("interleaved", 2, 67)])
def test_memory_does_not_grow_with_m(name, v, m):
    few, many = (tick_table(make_schedule(name, 4, v, n)).buffers for n in (m, m + 64))
    assert few == many


def test_known_numbers():
    table = tick_table(make_schedule("1f1b", 4, 1, 8))
    assert (table.ticks, table.forward_ticks, table.backward_ticks) == (14, 11, 11)
    assert simulate(table).peak_in_flight == (7, 5, 3, 1)
    assert (table.buffers.stash, table.buffers.losses) == (7, 1)
    assert simulate(table).bubble == Fraction(3, 8)
    assert simulate(tick_table(make_schedule("interleaved", 4, 2, 8))).peak_in_flight[0] == 11  # (v+1)p - 1


def test_forward_only():
    table = tick_table(forward_only(4, 2, 8))
    check_table(table)
    assert (table.ticks, table.backward_ticks, table.buffers.stash) == (19, 0, 1)
    assert simulate(table).bubble == bubble_formula("forward", 4, 2, 8) == Fraction(3, 16)
    assert simulate(table).peak_in_flight == (1, 1, 1, 1)


def slots_in_use(table: TickTable) -> list[tuple[int, int, str, int]]:
    """(tick, rank, field, slots) of each slot field whose value matters."""
    row = Row(*np.moveaxis(table.cells, -1, 0))
    forward, backward = row.f_valid == 1, row.b_valid == 1
    p, b = table.schedule.pp, table.buffers
    arrives = {
        kind: [
            (tick + 1, (op.stage + step) % p)
            for op, tick in table.tick_of.items()
            if op.kind == kind and 0 <= op.stage + step < table.schedule.stages
        ]
        for kind, step in (("F", 1), ("B", -1))
    }
    places = {
        "f_get": (np.argwhere(forward & (row.f_first == 0)), b.activations),
        "f_slot": (np.argwhere(forward), b.stash),
        "b_get": (np.argwhere(backward & (row.b_last == 0)), b.gradients),
        "b_slot": (np.argwhere(backward), b.stash),
        "b_loss_get": (np.argwhere(backward & (row.b_last == 1)), b.losses),
        "loss_put": ([(t, r) for t, r in np.argwhere(row.loss_valid) if r == p - 1], b.losses),
        "f_put": (arrives["F"], b.activations),
        "b_put": (arrives["B"], b.gradients),
    }
    return [(int(t), int(r), field, slots) for field, (where, slots) in places.items() for t, r in where]


@given(sizes(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_check_finds_a_wrong_slot(size, random: Random):
    table = tick_table(make_schedule(*size))
    tick, rank, field, slots = random.choice(slots_in_use(table))
    right = table.cells[tick, rank, FIELDS.index(field)]
    wrong = random.choice([slot for slot in range(-1, slots + 1) if slot != right])
    with pytest.raises(ScheduleError, match=rf"tick \d+, rank {rank}, [fb]_\w+ = |tick \d+, rank {rank}, loss_put = "):
        check_table(change(table, tick, rank, field, wrong))


@given(sizes(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_check_finds_a_wrong_op(size, random: Random):
    table = tick_table(make_schedule(*size))
    row = Row(*np.moveaxis(table.cells, -1, 0))
    phase = random.choice(["f", "b", "embed", "loss", "embed_grad"])
    tick, rank = random.choice(np.argwhere(getattr(row, f"{phase}_valid")).tolist())
    fields = {"f": ["f_chunk", "f_first"], "b": ["b_chunk", "b_last"]}.get(phase, [])
    field = random.choice([f"{phase}_valid", f"{phase}_microbatch", *fields])
    right = int(table.cells[tick, rank, FIELDS.index(field)])
    with pytest.raises(ScheduleError, match=rf"tick {tick}, rank {rank}, {field} = "):
        check_table(change(table, tick, rank, field, 1 - right if right < 2 else right - 1))


def test_check_finds_a_masked_write_on_a_value():
    table = tick_table(make_schedule("1f1b", 4, 1, 8))
    check_table(table)
    idle = 8  # rank 0 has run its forwards and holds six microbatches
    assert table.cells[idle, 0, FIELDS.index("f_valid")] == 0
    needed = table.cells[9, 0, FIELDS.index("b_slot")]
    with pytest.raises(ScheduleError, match=r"tick 9, rank 0, b_slot = \d: the slot holds nothing, and what 0F3 left"):
        check_table(change(table, idle, 0, "f_slot", int(needed)))


def test_check_finds_wrong_ticks_and_runs():
    table = tick_table(make_schedule("1f1b", 2, 1, 4))
    with pytest.raises(ScheduleError, match="0F1"):
        check_table(replace(table, tick_of={**table.tick_of, Op("F", 0, 1): 0}))
    with pytest.raises(ScheduleError, match="0F1 has no tick"):
        check_table(replace(table, tick_of={op: t for op, t in table.tick_of.items() if op != Op("F", 0, 1)}))
    with pytest.raises(ScheduleError, match="do not cover 6 ticks"):
        check_table(replace(table, runs=table.runs[:-1]))
    silent = tuple(run._replace(loss=False) for run in table.runs)
    with pytest.raises(ScheduleError, match="tick 1, rank 0, loss_valid = 1: 1F0 is meant, but the run"):
        check_table(replace(table, runs=silent))


def edited(edit):
    schedule = make_schedule("1f1b", 2, 1, 3)
    orders = [list(order) for order in schedule.orders]
    edit(orders)
    return replace(schedule, orders=tuple(map(tuple, orders)))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda o: o[1].remove(Op("F", 1, 2)), "rank 1 never runs 1F2"),
        (lambda o: o[0].append(Op("F", 0, 1)), "rank 0 runs 0F1 twice"),
        (lambda o: o[0].append(Op("F", 1, 1)), "rank 0 cannot run 1F1"),
        (lambda o: o[0].append(Op("F", 0, 3)), "rank 0 cannot run 0F3"),
        (lambda o: o[0].insert(0, o[0].pop()), "rank 0 waits to run 0B2, rank 1 waits to run 1F0"),
        (lambda o: o[1].reverse(), "rank 1 waits to run 1B2"),
    ],
)
def test_impossible_orders_name_the_op(edit, message):
    with pytest.raises(ScheduleError, match=message):
        tick_table(edited(edit))


def test_free_running_names_a_deadlock():
    with pytest.raises(ScheduleError, match="rank 1 waits to run 1B2"):
        simulate_free(edited(lambda o: o[1].reverse()))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("zigzag", 4, 1, 8), "schedule = zigzag is not known; use 1f1b, interleaved, gpipe"),
        (("1f1b", 4, 2, 8), "virtual_stages = 2 needs schedule = interleaved"),
        (("interleaved", 1, 2, 8), "virtual_stages = 2 needs pp > 1"),
        (("1f1b", 4, 1, 0), "microbatches = 0 must be at least 1"),
    ],
)
def test_numbers_that_do_not_fit(args, message):
    with pytest.raises(ScheduleError, match=message):
        make_schedule(*args)


@pytest.mark.parametrize(
    ("args", "golden"),
    [
        (("1f1b", 4, 1, 8), "timeline_1f1b_p4_m8.txt"),
        (("interleaved", 4, 2, 8), "timeline_interleaved_p4_v2_m8.txt"),
    ],
)
def test_golden_text(args, golden):
    assert timeline_text(tick_table(make_schedule(*args))) == (GOLDEN / golden).read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [20, 60, 80, 120])
def test_text_fits_the_width(width):
    table = tick_table(make_schedule("interleaved", 4, 2, 8))
    rows = [line for line in timeline_text(table, width).splitlines() if line.startswith(("  tick", "rank", "     "))]
    assert len(rows) == 9
    assert max(map(len, rows)) <= width
    assert ("ticks are left out" in timeline_text(table, width)) == (width < 87)


@pytest.mark.parametrize(
    "args",
    [("1f1b", 4, 1, 8), ("interleaved", 8, 2, 16), ("gpipe", 3, 1, 5), ("interleaved", 2, 3, 1), ("1f1b", 1, 1, 1)],
)
def test_pictures_show_each_op_once(args):
    table = tick_table(make_schedule(*args))
    _, p, v, m = args
    ops = all_ops(p, v, m)

    svg = ET.fromstring(timeline_svg(table))
    titles = [
        re.match(r"(\d+)([FB])(\d+): tick (\d+), rank (\d+)$", e.text or "") for e in svg.iter() if "title" in e.tag
    ]
    drawn = {Op(t[2], int(t[1]), int(t[3])): (int(t[4]), int(t[5])) for t in titles if t}  # pyright: ignore[reportArgumentType]
    assert len(titles) == len(drawn) == ops.total()
    assert drawn == {op: (table.tick_of[op], op.stage % p) for op in ops}
    labels = Counter(e.text for g in svg.iter() if g.get("text-anchor") == "middle" and "}g" in g.tag for e in g)
    assert labels == Counter(str(op.microbatch) for op in ops)

    text = timeline_text(table)
    letters = "abcdefgh" if v > 1 else ""
    rows = [line for line in text.splitlines() if re.match(r"(rank \d F| +B) ", line)]
    cells = Counter(cell for line in rows for cell in re.split(r"[FB] ", line)[1].split() if cell != "·")
    assert cells == Counter(f"{op.microbatch}{letters[op.stage // p : op.stage // p + 1]}" for op in ops)


def test_csv():
    lines = to_csv(make_schedule("1f1b", 2, 1, 3)).splitlines()
    assert lines == ["0F0,0F1,0F2,0B0,0B1,0B2", "1F0,1B0,1F1,1B1,1F2,1B2"]
    cells = to_csv(make_schedule("interleaved", 4, 2, 8)).replace("\n", ",").rstrip(",").split(",")
    assert Counter(cells) == Counter(map(str, all_ops(4, 2, 8)))


def test_no_jax():
    code = "import sys, parallax.schedule, parallax.schedule.command; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
