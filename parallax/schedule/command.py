"""The verb `parallax schedule`: print, draw and measure a pipeline schedule. No jax."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from parallax.schedule.check import check_table
from parallax.schedule.csv import to_csv
from parallax.schedule.draw import timeline_svg, timeline_text
from parallax.schedule.order import GENERATORS, ScheduleError, make_schedule
from parallax.schedule.simulate import bubble_formula, simulate, simulate_free
from parallax.schedule.table import TickTable, tick_table

EXAMPLE = """\
example:
  parallax schedule --kind interleaved --pp 4 --virtual-stages 2 --microbatches 8 --svg timeline.svg
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print, draw and measure a pipeline schedule; a backward counts as long as two forwards."
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--kind", default="1f1b", help=f"{', '.join(GENERATORS)} (default: %(default)s)")
    parser.add_argument("--pp", type=int, required=True, metavar="P", help="pipeline ranks")
    parser.add_argument(
        "--virtual-stages", type=int, default=1, metavar="V", help="chunks a rank (default: 1; more with interleaved)"
    )
    parser.add_argument("--microbatches", type=int, required=True, metavar="M", help="microbatches a step")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the timeline to FILE")
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write the order of each rank in the form of PyTorch's pipelining"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """→ exit status 0. Raises ScheduleError where the numbers do not fit or a file cannot be written."""
    table = tick_table(make_schedule(args.kind, args.pp, args.virtual_stages, args.microbatches))
    check_table(table)
    if args.svg:
        _write_whole("--svg", args.svg, timeline_svg(table))
    if args.csv:
        _write_whole("--csv", args.csv, to_csv(table.schedule))
    facts = measure(table)
    if args.json:
        print(json.dumps(facts))
        return 0
    _print(table, facts)
    for path in filter(None, (args.svg, args.csv)):
        print(f"wrote {path}")
    return 0


def measure(table: TickTable) -> dict[str, Any]:
    """What `--json` prints: bubbles are idle time over useful time, `peak_in_flight` is in chunks by rank, `buffers`
    in slots a rank."""
    schedule = table.schedule
    costs = simulate(table)
    shape = schedule.pp, schedule.virtual_stages, schedule.microbatches
    return {
        "kind": schedule.name,
        "pp": schedule.pp,
        "virtual_stages": schedule.virtual_stages,
        "microbatches": schedule.microbatches,
        "ticks": table.ticks,
        "forward_ticks": table.forward_ticks,
        "backward_ticks": table.backward_ticks,
        "bubble": float(costs.bubble),
        "bubble_formula": float(bubble_formula(schedule.name, *shape)),
        "peak_in_flight": list(costs.peak_in_flight),
        "free_running_bubble": float(simulate_free(schedule).bubble),
        "buffers": table.buffers._asdict(),
    }


def _print(table: TickTable, facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    rows = Table.grid(padding=(0, 2))
    for name, text in (
        ("schedule", "{kind}: {pp} ranks, {virtual_stages} chunks a rank, {microbatches} microbatches"),
        ("ticks", "{ticks}: {forward_ticks} with forwards, {backward_ticks} with backwards"),
        ("bubble", "{bubble:.2%} simulated, {bubble_formula:.2%} by formula, {free_running_bubble:.2%} free running"),
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


def _write_whole(option: str, path: Path, text: str) -> None:
    """The file appears complete or not at all: it is written beside its place, then renamed."""
    if not path.parent.is_dir():
        raise ScheduleError(f"{option} = {path}: the folder {path.parent} does not exist; make it first")
    beside = path.parent / f".{path.name}.{os.getpid()}"
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ScheduleError(f"{option} = {path} cannot be written: {error.strerror}") from error
