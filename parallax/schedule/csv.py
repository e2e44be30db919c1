"""A schedule as CSV, in the form of PyTorch's `torch.distributed.pipelining` (its `compute_only` format). No jax.

One line a rank, no header. A cell is stage, action ("F" forward, "B" full backward) and microbatch: `0F0`, `1B3`. An
empty cell is a wait and says nothing here: the order alone is read and written, since the ticks follow from it.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product, starmap
from pathlib import Path

from parallax.schedule.op import KINDS, MAX_OPS, Op, Schedule, ScheduleError, needs, walk

MOST_PROBLEMS = 10  # that are listed
OP = re.compile("0*([0-9]{1,7})([FB])0*([0-9]{1,7})")
LARGE = re.compile("[0-9]+[FB][0-9]+")
SPLIT_BACKWARD = re.compile("([0-9]+)[IW]([0-9]*)")
COMMUNICATION = re.compile("[0-9]+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")
OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def to_csv(schedule: Schedule) -> str:
    return "".join(",".join(map(str, order)) + "\n" for order in schedule.orders)


def read_csv(path: str | Path) -> Schedule:
    """The schedule of a file, named by the file's stem. Raises ScheduleError where there is no such file and where
    `from_csv` does."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ScheduleError(f"{path}: {error.strerror}; use the path of a CSV file") from None
    except UnicodeDecodeError:
        raise ScheduleError(f"{path}: is not UTF-8 text; save it as CSV in UTF-8") from None
    except ValueError:  # a NUL in the path
        raise ScheduleError(f"{path}: is not the path of a file; use that of a CSV file") from None
    return from_csv(text, path)


def from_csv(text: str, path: str | Path) -> Schedule:
    """The schedule of CSV text; `path` gives its name (the stem) and begins each line of a problem.

    Ranks are counted by lines, stages and microbatches by the cells. Raises ScheduleError, naming line and column from
    1 and the cell's text, unless every rank runs each op of its own stages once and the ranks can keep their orders.
    """
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text, newline=""))]
    except csv.Error as error:
        raise ScheduleError(f"{path}: is not CSV: {error}; write cells such as 0F0 with commas between") from None
    while rows and not any(rows[-1]):
        rows.pop()
    if not rows:
        raise ScheduleError(f"{path}: holds no cell; write a line a rank, of cells such as 0F0 and 0B0")
    sheet, problems = _parse(rows)
    rules = (_size, _placement, _completeness, _deadlock)  # each takes for granted what those before it found right
    problems = problems or next((found for rule in rules if (found := list(rule(sheet)))), [])
    if problems:
        more = len(problems) - MOST_PROBLEMS
        listed = [*problems[:MOST_PROBLEMS], *([f"and {more} more problems"] if more > 0 else [])]
        raise ScheduleError(*(f"{path}: {line}" for line in listed))
    return sheet.schedule(Path(path).stem)


@dataclass(frozen=True)
class _Sheet:
    """The ops of a file, in its order. `place` is the line and column of each, from 1."""

    pp: int
    place: dict[Op, tuple[int, int]]

    @cached_property
    def stages(self) -> int:
        return 1 + max(op.stage for op in self.place)

    @cached_property
    def microbatches(self) -> int:
        return 1 + max(op.microbatch for op in self.place)

    def cell(self, op: Op) -> str:
        return _cell(*self.place[op], str(op))

    def schedule(self, name: str) -> Schedule:
        orders: list[list[Op]] = [[] for _ in range(self.pp)]
        for op, (line, _) in self.place.items():
            orders[line - 1].append(op)
        return Schedule(name, self.pp, self.stages // self.pp, self.microbatches, tuple(map(tuple, orders)))


def _cell(line: int, column: int, text: str) -> str:
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    return f"line {line}, column {column}: {json.dumps(shown, ensure_ascii=False)}"


def _parse(rows: list[list[str]]) -> tuple[_Sheet, list[str]]:
    """The ops of the cells; and a problem for each cell that is no op, op that stands twice, and line without any."""
    place: dict[Op, tuple[int, int]] = {}
    problems: list[str] = []
    for line, row in enumerate(rows, 1):
        if not any(row):
            use = f"write the ops of rank {line - 1}, or remove the line"
            problems.append(f"line {line} is empty, and each line is a rank; {use}")
        for column, text in enumerate(row, 1):
            if not text:
                continue
            op = _op(text)
            if op is None:
                problems.append(f"{_cell(line, column, text)} {_malformed(text)}")
            elif op in place:
                first = "line {}, column {}".format(*place[op])
                problems.append(f"{_cell(line, column, text)} stands at {first} already; remove one of them")
            else:
                place[op] = line, column
    return _Sheet(len(rows), place), problems


def _op(text: str) -> Op | None:
    match = OP.fullmatch(text)
    return Op("F" if match[2] == "F" else "B", int(match[1]), int(match[3])) if match else None


def _malformed(text: str) -> str:
    """Why a cell is no op, and what to write."""
    if OP.fullmatch(text.upper()):
        return f"is in lower case; use {text.upper()}"
    if LARGE.fullmatch(text):
        return f"has a number of more than seven digits, and at most {MAX_OPS} forwards can be run; use smaller ones"
    if split := SPLIT_BACKWARD.fullmatch(text):
        halves = "I and W are the halves of a split backward, and this executor runs full backwards only"
        return f"is not run: {halves}; use {split[1]}B{split[2]} in place of both"
    if COMMUNICATION.fullmatch(text):
        return "is communication, which is derived from the order; leave it out (PyTorch's format compute_only)"
    if overlap := OVERLAP.fullmatch(text):
        both = overlap[1].replace(";", ",")
        return f"is two ops in one, and a tick runs a forward and a backward anyway; use two cells: {both}"
    words = re.split(r"[;|\s]+", text)
    if len(words) > 1 and all(map(_op, words)):
        return f"holds {len(words)} ops, and cells are parted by commas; use {words[0]},{words[1]} and so on"
    if re.fullmatch("[0-9]+[FB]", text):
        return f"names no microbatch; use {text}0 for the first one"
    if re.fullmatch("[FB][0-9]+", text):
        return f"names no stage; use 0{text} for the first one"
    if action := re.fullmatch("([0-9]+)([A-Za-z_]+)([0-9]+)", text):
        stage, name, mb = action.groups()
        return f"has an unknown action {name}; use {stage}F{mb} (forward) or {stage}B{mb} (full backward)"
    return "is not stage, action and microbatch; use a cell such as 0F0 or 1B3"


def _size(sheet: _Sheet) -> Iterator[str]:
    """No more ops than can be scheduled."""
    stages, m = sheet.stages, sheet.microbatches
    if stages * m > MAX_OPS:
        largest = max(sheet.place, key=lambda op: max(op.stage, op.microbatch))
        rule = f"stages 0 to {stages - 1} x microbatches 0 to {m - 1} are {stages * m}, and at most {MAX_OPS} can run"
        yield f"{sheet.cell(largest)} has too large a number: {rule}; use smaller ones"


def _placement(sheet: _Sheet) -> Iterator[str]:
    """Stage k is on rank k mod p, and no stage is left out."""
    p, stages = sheet.pp, sheet.stages
    held: dict[tuple[int, int], Op] = {}  # line and stage → the first op
    for op, (line, _) in sheet.place.items():
        held.setdefault((line, op.stage), op)
    wrong = {(line, stage): op for (line, stage), op in held.items() if stage % p != line - 1}
    # Whether the lines are those of p + 1 ranks, without line `gap`.
    fits = lambda gap: all(stage % (p + 1) == line - (line < gap) for line, stage in held)
    if wrong and stages == 2 * p and all(line - 1 in (stage, stages - 1 - stage) for line, stage in held):
        op = next(iter(wrong.values()))
        yield (
            f"{sheet.cell(op)} is on rank {sheet.place[op][0] - 1}, as in PyTorch's V-shaped placement, but here stage "
            f"k runs on rank k mod p; move stage {op.stage} to line {op.stage % p + 1}, and so on for stages {p} to "
            f"{stages - 1}"
        )
    elif wrong and (gap := next(filter(fits, range(1, p + 2)), None)):
        yield (
            f"has {p} lines, but stages as of {p + 1} ranks, of which rank {gap - 1} has none; add its line, line "
            f"{gap}, with stage {gap - 1}"
        )
    elif wrong:
        for (line, stage), op in wrong.items():
            rule = f"with p = {p} lines stage k runs on rank k mod p"
            yield f"{sheet.cell(op)} is on rank {line - 1}, but {rule}; move stage {stage} to line {stage % p + 1}"
    elif lacking := sorted(set(range(stages)) - {stage for _, stage in held}):
        yield f"has stage {stages - 1}, but none of stage {_some(lacking)}; number stages from 0 without gaps"
    elif stages % p:
        below, above = stages // p * p, stages // p * p + p
        yield f"has {stages} stages on {p} lines, which is not a multiple: use {below} or {above} stages"
    elif p == 1 and stages > 1:
        yield f"has {stages} stages on one line, and chunks need two or more ranks; use stage 0 alone"


def _completeness(sheet: _Sheet) -> Iterator[str]:
    """Every op is there, each backward after its forward."""
    place = sheet.place
    if not any(op.kind == "B" for op in place):
        yield "has no backward; add a cell such as 0B0 for each forward (evaluation has an order of its own)"
        return
    numbers = {op.microbatch for op in place}
    if gaps := sorted(set(range(sheet.microbatches)) - numbers):
        op = next(op for op in place if op.microbatch > gaps[0])
        yield f"{sheet.cell(op)}, but no cell has microbatch {_some(gaps)}; number microbatches from 0 without gaps"
    for rank in range(sheet.pp):
        wanted = product(KINDS, range(rank, sheet.stages, sheet.pp), sorted(numbers))
        if missing := [op for op in starmap(Op, wanted) if op not in place]:
            yield f"line {rank + 1} never runs {_some(missing)}; add {'it' if len(missing) == 1 else 'them'}"
    for op, (_, column) in place.items():
        forward = Op("F", op.stage, op.microbatch)
        if op.kind == "B" and forward in place and place[forward][1] > column:
            yield f"{sheet.cell(op)} comes before its forward, in column {place[forward][1]}; move it after that"


def _some(things: Sequence[Op | int]) -> str:
    """The first three, and how many more."""
    return ", ".join(map(str, things[:3])) + (f" and {len(things) - 3} more" if len(things) > 3 else "")


def _deadlock(sheet: _Sheet) -> Iterator[str]:
    """No ranks wait for each other. The first ring of those that do is said."""
    ran, stuck = walk(sheet.schedule(""))
    if not stuck:
        return
    done = set(ran)
    head = {op.stage % sheet.pp: op for op in stuck}
    waits_for: dict[Op, Op] = {}
    op = stuck[0]
    while op not in waits_for:
        waits_for[op] = need = next(need for need in needs(op, sheet.stages) if need not in done)
        op = head[need.stage % sheet.pp]
    ring = list(waits_for.items())[list(waits_for).index(op) :]
    waits = ", but ".join(
        "{} waits for {} (line {}, column {})".format(sheet.cell(op), need, *sheet.place[need]) for op, need in ring
    )
    yield f"ranks wait for each other for ever: {waits}; move one of these"
