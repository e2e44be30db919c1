"""The verb `parallax estimate`: memory and time of a run file by formula, or measured steps beside their prices."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parallax.config import ConfigError, show
from parallax.plan.estimate import FRAMEWORKS, Job, estimate, to_json
from parallax.plan.job import read_job
from parallax.plan.measured import Priced, by_source, price_all, read_rows, score
from parallax.plan.show import estimate_view, measured_view, print_view

EXAMPLE = """\
examples:
  parallax estimate run.toml
  parallax estimate run.toml parallel.tp=8 train.remat=selective --json
  parallax estimate run.toml --framework megatron
  parallax estimate --measured steps.csv

exit status: 0 done, 1 it does not fit, 2 the input is wrong
"""
DOES_NOT_FIT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Memory of every stage and time of a step, by formula; no backend is started."
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run_file", nargs="?", metavar="RUN.toml", help="the run file (docs/config.md)")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="keys to change: parallel.tp=4")
    parser.add_argument(
        "--framework",
        choices=FRAMEWORKS,
        default="parallax",
        help="whose scheme is priced: this project's, or Megatron-LM's (default: %(default)s)",
    )
    parser.add_argument("--measured", metavar="FILE.csv", help="price measured steps instead (docs/estimate.md)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """→ exit status. Raises ConfigError where the input is wrong."""
    if (args.run_file is None) == (args.measured is None):
        raise ConfigError(["give either RUN.toml or --measured FILE.csv; see parallax estimate --help"])
    if args.measured is not None:
        return _measured(Path(args.measured), args.json)
    with contextlib.redirect_stdout(sys.stderr):  # a model file may print
        job = read_job(args.run_file, args.overrides)
    if args.framework == "megatron" and (problems := list(_not_of_megatron(job))):
        raise ConfigError(problems)
    made = estimate(job, args.framework)
    if args.json:
        print(json.dumps(to_json(made)))
    else:
        print_view(lambda width: estimate_view(made, width))
    return DOES_NOT_FIT if made.fits is False else 0


def _not_of_megatron(job: Job) -> Iterator[str]:
    """What its formulas have no place for."""
    schedule, precision = job.parallel.schedule, job.train.precision
    if schedule not in ("1f1b", "interleaved"):
        yield f'parallel.schedule = {show(schedule)} is not of --framework megatron; use "1f1b" or "interleaved"'
    if precision != "bfloat16":
        yield f'train.precision = {show(precision)} is not of --framework megatron; use "bfloat16"'


def _measured(path: Path, as_json: bool) -> int:
    priced = price_all(read_rows(path))
    scores = {source: score(rows) for source, rows in by_source(priced).items()}
    if as_json:
        rows = [
            {"line": p.row.line, "source": p.row.source, "measured_s": p.row.measured_s, "predicted_s": p.predicted_s}
            | {"error": p.error, "assumed": list(p.row.assumed)}
            for p in priced
        ]
        print(json.dumps({"sources": {name: vars(s) for name, s in scores.items()}, "rows": rows}))
        return 0
    print_view(lambda _: measured_view([(name, *_cells(s)) for name, s in scores.items()]))
    print("\nerror: of the predicted step time against the measured one; bias: its mean with its sign")
    print("regret: how much slower the layout predicted fastest is than the measured fastest, over groups of 4 or more")
    for line in assumptions(priced):
        print(line)
    return 0


def _cells(s: Any) -> tuple[Any, ...]:
    return s.rows, s.mean, s.median, s.worst, s.bias, s.groups, s.regret


def assumptions(priced: list[Priced]) -> list[str]:
    """What was not published and had to be assumed, by source."""
    counts = Counter((p.row.source, what) for p in priced for what in p.row.assumed)
    return [f"assumed for {count} rows of {source}: {what}" for (source, what), count in counts.items()]
