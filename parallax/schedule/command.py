"""The verb `parallax schedule`: print, draw and measure a pipeline schedule. No jax."""

from __future__ import annotations

import argparse
import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

from parallax.output import output_problems, write_whole
from parallax.schedule.check import check_table
from parallax.schedule.csv import read_csv, to_csv
from parallax.schedule.draw import timeline_svg, timeline_text
from parallax.schedule.op import MAX_OPS, Schedule, ScheduleError
from parallax.schedule.order import GENERATORS, make_schedule
from parallax.schedule.simulate import bubble_formula, lockstep_warning, simulate, simulate_free
from parallax.schedule.table import TickTable, tick_table

EXAMPLE = """\
examples:
  parallax schedule --kind interleaved --pp 4 --virtual-stages 2 --microbatches 8 --svg timeline.svg
  parallax schedule --kind mine.csv --svg timeline.svg
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print, draw and measure a pipeline schedule; a backward counts as long as two forwards."
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--kind",
        default="1f1b",
        help=f"{', '.join(GENERATORS)}, or a .csv file, which has its own sizes (default: %(default)s)",
    )
    parser.add_argument("--pp", type=int, metavar="P", help="pipeline ranks")
    parser.add_argument(
        "--virtual-stages", type=int, metavar="V", help="chunks a rank (default: 1; more with interleaved)"
    )
    parser.add_argument("--microbatches", type=int, metavar="M", help="microbatches a step")
    parser.add_argument("--svg", metavar="FILE", help="draw the timeline to FILE")
    parser.add_argument(
        "--csv", metavar="FILE", help="write the order of each rank in the form of PyTorch's pipelining"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """→ exit status 0. Raises ScheduleError where the numbers do not fit or a file cannot be read, OSError where one
    cannot be written."""
    built_in = args.kind in GENERATORS
    if problems := [*(_size_problems(args) if built_in else []), *_file_problems(args)]:
        raise ScheduleError(*problems)
    if built_in:
        schedule = make_schedule(args.kind, args.pp, args.virtual_stages or 1, args.microbatches)
    else:
        schedule = read_csv(args.kind)
        if problems := _disagreements(args, schedule):
            raise ScheduleError(*problems)
    table = tick_table(schedule)
    check_table(table)
    if args.svg:
        write_whole(Path(args.svg), timeline_svg(table))
    if args.csv:
        write_whole(Path(args.csv), to_csv(table.schedule))
    shape = schedule.pp, schedule.virtual_stages, schedule.microbatches
    facts = measure(table, bubble_formula(schedule.name, *shape) if built_in else None)
    if not built_in and (warning := lockstep_warning(table)):
        print(f"warning: {warning}", file=sys.stderr)
    if args.json:
        print(json.dumps(facts))
        return 0
    _print(table, facts)
    for path in filter(None, (args.svg, args.csv)):
        print(f"wrote {path}")
    return 0


def _size_problems(args: argparse.Namespace) -> list[str]:
    """What is wrong with the sizes of a built-in schedule, a line each."""
    pp, v, m = args.pp, 1 if args.virtual_stages is None else args.virtual_stages, args.microbatches
    lines = [
        f"{option} is missing, and --kind {args.kind} needs it; use for example {option} {example}"
        if value is None
        else f"{option} {value} must be at least 1; use 1 or more"
        for option, value, example in (("--pp", pp, 4), ("--virtual-stages", v, 1), ("--microbatches", m, 8))
        if value is None or value < 1
    ]
    if lines:
        return lines
    if v > 1 and args.kind != "interleaved":
        lines.append(f"--virtual-stages {v} needs --kind interleaved, not {args.kind}; use --virtual-stages 1")
    elif v > 1 and pp == 1:
        lines.append(f"--virtual-stages {v} needs --pp of 2 or more; use --virtual-stages 1")
    elif pp * v * m > MAX_OPS:
        product = f"--pp {pp} x --virtual-stages {v} x --microbatches {m} = {pp * v * m}"
        lines.append(f"{product} must be at most {MAX_OPS}; use smaller ones")
    return lines


def _disagreements(args: argparse.Namespace, schedule: Schedule) -> list[str]:
    """The sizes that were given and are not those of the CSV file, a line each."""
    return [
        f"--{size.replace('_', '-')} {given} is not that of {args.kind}, which has {found}; use {found} or leave it out"
        for size in ("pp", "virtual_stages", "microbatches")
        if (given := getattr(args, size)) not in (None, found := getattr(schedule, size))
    ]


def _file_problems(args: argparse.Namespace) -> list[str]:
    """What is wrong with the names of files, and of the schedule, a line each."""
    lines = []
    if args.kind not in GENERATORS and not args.kind.endswith(".csv"):
        lines.append(f"--kind {json.dumps(args.kind)} is not known; use {', '.join(GENERATORS)} or a .csv file")
    read = {"--kind": args.kind if args.kind.endswith(".csv") else None}
    lines += output_problems({"--svg": args.svg, "--csv": args.csv}, read)
    return lines


def measure(table: TickTable, formula: Fraction | None) -> dict[str, Any]:
    """What `--json` prints: bubbles are idle time over useful time, `peak_in_flight` is in chunks by rank, `buffers`
    in slots a rank. `formula` is the bubble by formula, which a schedule of one's own has not."""
    schedule = table.schedule
    costs = simulate(table)
    return {
        "kind": schedule.name,
        "pp": schedule.pp,
        "virtual_stages": schedule.virtual_stages,
        "microbatches": schedule.microbatches,
        "ticks": table.ticks,
        "forward_ticks": table.forward_ticks,
        "backward_ticks": table.backward_ticks,
        "bubble": float(costs.bubble),
        "bubble_formula": None if formula is None else float(formula),
        "peak_in_flight": list(costs.peak_in_flight),
        "free_running_bubble": float(simulate_free(schedule).bubble),
        "buffers": table.buffers._asdict(),
    }


def _print(table: TickTable, facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if console.width < 1:  # COLUMNS=0
        console.width = 80
    rows = Table.grid(padding=(0, 2))
    formula = "" if facts["bubble_formula"] is None else " {bubble_formula:.2%} by formula,"
    for name, text in (
        ("schedule", "{kind}: {pp} ranks, {virtual_stages} chunks a rank, {microbatches} microbatches"),
        ("ticks", "{ticks}: {forward_ticks} with forwards, {backward_ticks} with backwards"),
        ("bubble", f"{{bubble:.2%}} simulated,{formula} {{free_running_bubble:.2%}} free running"),
    ):
        rows.add_row(f"[bold]{name}", text.format_map(facts))
    rows.add_row("[bold]peak in flight", " ".join(map(str, facts["peak_in_flight"])) + " chunks, by rank")
    rows.add_row("[bold]buffer slots", ", ".join(f"{name} {slots}" for name, slots in facts["buffers"].items()))
    with console.capture() as captured:
        console.print(rows)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), end="\n\n")
    width = console.width if console.is_terminal else None  # whole where it goes to a file or a pipe
    timeline = Text(timeline_text(table, width), no_wrap=True)
    timeline.highlight_regex(r"(?m)^rank +\d+ F.*$", "blue")
    timeline.highlight_regex(r"(?m)^ +B .*$", "dark_orange")
    console.print(timeline, end="", soft_wrap=True)
