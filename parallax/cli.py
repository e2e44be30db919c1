"""The command line: verbs, their options and exit statuses. Nothing here imports jax before a verb needs it.

Exit status: 0 done, 1 the run failed, 2 the input is wrong, 75 stopped by a signal after saving (start it again).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

import parallax.schedule.command as schedule_command
from parallax.config import ConfigError, read
from parallax.environment import emulate_devices
from parallax.machine import load_machine
from parallax.schedule.order import ScheduleError
from parallax.validate import resolve

INPUT_IS_WRONG = 2

TRAIN_EXAMPLE = """\
examples:
  parallax train examples/demo.toml
  parallax train examples/demo.toml train.steps=400 parallel.pp=4 parallel.tp=1 --resume

exit status: 0 done, 1 the run failed, 2 the input is wrong, 75 stopped by a signal after saving
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status. argparse exits by itself, with 2, on wrong options."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if hasattr(args, "overrides") and not any(word.startswith("-") for word in rest):
        args.overrides += rest  # argparse takes no positional after an option that follows the first ones
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return args.run(args)
    except ConfigError as error:
        problems = error.problems
    except ScheduleError as error:
        problems = str(error).splitlines()
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return INPUT_IS_WRONG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="parallax",
        description="Train large language models in JAX: data, pipeline and tensor parallelism in one program.",
    )
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    train = verbs.add_parser(
        "train",
        help="train the model of a run file",
        description="Train the model of a run file. Devices of the machine `cpu` are emulated.",
        epilog=TRAIN_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("run_file", metavar="RUN.toml", help="the run file (docs/config.md)")
    train.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="keys to change: parallel.tp=4")
    train.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in log.dir")
    train.add_argument("--json", action="store_true", help="print one JSON object, the result, and nothing else")
    train.set_defaults(run=_train)
    schedule = verbs.add_parser("schedule", help="print, draw and measure a pipeline schedule")
    schedule_command.add_arguments(schedule)
    schedule.set_defaults(run=schedule_command.run)
    return parser


def _train(args: argparse.Namespace) -> int:
    _prepare_environment(args.run_file, args.overrides)
    resolved = resolve(args.run_file, args.overrides)
    from parallax.train import train

    result = train(resolved, resume=args.resume)
    if args.json:
        print(json.dumps(dataclasses.asdict(result)))
    return result.exit_status


def _prepare_environment(run_file: str, overrides: Sequence[str]) -> None:
    """A first, light reading of the run file, for what must be set before the model file imports jax.

    What is wrong in it is left to `resolve`, which lists every problem."""
    try:
        config, _ = read(run_file, overrides)
        emulated = load_machine(config.mesh).platform == "cpu"
    except ConfigError:
        return
    if emulated:
        emulate_devices(config.devices)
