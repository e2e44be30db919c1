"""The command line: verbs, their options and exit statuses. Nothing here imports jax before a verb needs it.

Exit status: 0 done, 1 the run failed, 2 the input is wrong, 75 training was stopped by a signal (start it again), 130
or 143 another verb was, by SIGINT or SIGTERM, or any before its options were read.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NoReturn

from parallax.config import ConfigError, read
from parallax.environment import emulate_devices, keep_32_bits, tune_gpus
from parallax.machine import load_machine
from parallax.schedule.order import ScheduleError
from parallax.signals import first_signal
from parallax.validate import resolve
from parallax.version import version

FAILED, INPUT_IS_WRONG, START_AGAIN = 1, 2, 75

TRAIN_EXAMPLE = """\
examples:
  parallax train examples/demo.toml
  parallax train examples/demo.toml train.steps=400 parallel.pp=4 parallel.tp=1 --resume

exit status: 0 done, 1 the run failed, 2 the input is wrong, 75 stopped by Ctrl-C or SIGTERM, and it can be started
again: with --resume where a checkpoint was saved, or as it was where nothing was trained yet; the last line says which
"""


class Interrupted(BaseException):
    """SIGINT or SIGTERM came where there is nothing to save."""

    def __init__(self, number: signal.Signals):
        super().__init__(number.name)
        self.exit_status = 128 + number  # as shells have it


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as for run files."""

    def error(self, message: str) -> NoReturn:
        self.exit(INPUT_IS_WRONG, f"error: {_one_line(message)}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status. argparse exits by itself, with 2, on wrong options."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale may lack a character
    try:
        with first_signal(_interrupt), _not_swallowed():
            args = _parse(argv)
            return args.run(args)
    except (ConfigError, ScheduleError) as error:
        problems = error.problems
    except Interrupted as signaled:
        print("interrupted", file=sys.stderr)
        return signaled.exit_status
    for problem in problems:
        print(f"error: {_one_line(problem)}", file=sys.stderr)
    return INPUT_IS_WRONG


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if hasattr(args, "overrides") and not any(word.startswith("-") for word in rest):
        args.overrides += rest  # argparse takes no positional after an option that follows the first ones
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def _interrupt(number: signal.Signals) -> NoReturn:
    raise Interrupted(number)


@contextlib.contextmanager
def _not_swallowed() -> Iterator[None]:
    """Ends the program where a signal came in code whose exceptions Python ignores, such as jax's callback of the
    garbage collector."""
    before = sys.unraisablehook

    def hook(ignored: sys.UnraisableHookArgs) -> None:
        if not isinstance(ignored.exc_value, Interrupted):
            return before(ignored)
        os.write(2, b"interrupted\n")
        os._exit(ignored.exc_value.exit_status)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _one_line(text: str) -> str:
    """Line breaks and other control characters, written out."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", lambda found: repr(found[0])[1:-1], text)


def _parser() -> argparse.ArgumentParser:
    import parallax.aot.command as compile_command  # here, where Ctrl-C is listened to
    import parallax.checkpoint_command as checkpoint_command
    import parallax.data.command as tokenize_command
    import parallax.plan.command as plan_command
    import parallax.plan.estimate_command as estimate_command
    import parallax.schedule.command as schedule_command
    import parallax.translate.command as translate_command

    parser = Parser(
        prog="parallax",
        description="Train large language models in JAX: data, pipeline, tensor and context parallelism together.",
    )
    parser.add_argument("--version", action="version", version=f"parallax {version()}")
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
    for name, command, what in (
        ("schedule", schedule_command, "print, draw and measure a pipeline schedule"),
        ("checkpoint", checkpoint_command, "list the checkpoints of a run, or show what is in one"),
        ("tokenize", tokenize_command, "turn text into tokens on disk"),
        ("plan", plan_command, "choose a layout for a model on a machine, and say why"),
        ("estimate", estimate_command, "memory and step time of a run file, by formula"),
        ("compile", compile_command, "build the train step with XLA for a pod that is not there"),
        ("translate", translate_command, "turn a Megatron-LM command line into a run file"),
    ):
        verb = verbs.add_parser(name, help=what)
        command.add_arguments(verb)
        verb.set_defaults(run=partial(_print_results, command.run))
    return parser


class _Results(io.BytesIO):
    """What is to go to stdout; for those who ask, a terminal if that is one."""

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()


def _print_results(verb: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Prints nothing on stdout before the verb has ended well. Raises ConfigError where a file of it cannot be read or
    written."""
    results = _Results()
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    printed = io.TextIOWrapper(results, encoding, "replace", write_through=True)
    try:
        with contextlib.redirect_stdout(printed):
            status = verb(args)
    except OSError as error:
        raise ConfigError([f"{error.filename}: {error.strerror}" if error.filename else str(error)]) from error
    with _results():
        print(results.getvalue().decode(encoding), end="")
    return status


@contextlib.contextmanager
def _results() -> Iterator[None]:
    """For what prints to stdout: exits quietly where its reader has gone, in one line where it cannot be written."""
    try:
        yield
        if sys.stdout:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in the buffer
        if not isinstance(error, BrokenPipeError):
            print(f"error: stdout cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(FAILED)


def _train(args: argparse.Namespace) -> int:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # a model file may print
            _prepare_environment(args.run_file, args.overrides)
            resolved = resolve(args.run_file, args.overrides)
            from parallax.train import train

            result = train(resolved, resume=args.resume)
    except Interrupted as signaled:  # before the loop, which has a way of its own
        print(f"{signaled}: stopped before any training; start the same command again", file=sys.stderr)
        return START_AGAIN
    if args.json:
        with _results():
            print(json.dumps(dataclasses.asdict(result)))
    return result.exit_status


def _prepare_environment(run_file: str, overrides: Sequence[str]) -> None:
    """A first, light reading of the run file, for what must be set before the model file imports jax.

    What is wrong in it is left to `resolve`, which lists every problem."""
    keep_32_bits()
    try:
        config, _ = read(run_file, overrides)
        platform = load_machine(config.mesh).platform
    except ConfigError:
        return
    if platform == "cpu":
        emulate_devices(config.devices)
    elif platform == "gpu":
        tune_gpus()
