"""The verb `parallax translate`: a Megatron-LM command line, or a script that holds one, to a run file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

from parallax.config import ConfigError, brief
from parallax.output import output_problems, write_whole
from parallax.text import columns
from parallax.translate.translate import MESH, Translation, translate

EXAMPLE = """\
examples:
  parallax translate "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 4 ..." -o run.toml
  parallax translate train.sh checkpoints/ my/tokens -o run.toml    # with $1 and $2 of the script
  NNODES=8 parallax translate train.sh                              # with a variable that it does not set
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write the run file of a Megatron-LM command line: each flag is mapped, ignored with a reason, or refused."
    )
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", metavar="COMMAND", help="the command line in quotes, or the path of a shell script")
    parser.add_argument(
        "arguments", nargs="*", default=[], metavar="ARG", help="the script's own arguments: $1, $2, ..."
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the run file to FILE (default: to stdout)")
    parser.add_argument("--mesh", metavar="NAME", help=f"the machine, one of meshes/ (default: {MESH})")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """→ exit status 0, or 2 where `--json` prints what is refused. Raises ConfigError where anything else is wrong."""
    if problems := output_problems({"-o": args.output}):
        raise ConfigError(problems)
    folder = os.path.dirname(args.output) if args.output else ""
    translation = translate(_text(args), args.arguments, os.environ, args.mesh, folder)
    if args.json:
        print(json.dumps(dataclasses.asdict(translation)))
    if translation.run_toml is None:
        if not args.json:
            raise ConfigError(list(translation.refused.values()))
        for line in translation.refused.values():
            print(f"error: {line}", file=sys.stderr)
        return 2
    if args.output:
        write_whole(Path(args.output), translation.run_toml)
    if not args.json:
        print(_summary(translation), file=sys.stderr)
        print(f"wrote {args.output}" if args.output else translation.run_toml, end="\n" if args.output else "")
    return 0


def _text(args: argparse.Namespace) -> str:
    """The script, or the command line itself. Raises ConfigError where neither is there."""
    command = args.command
    if os.path.isfile(command):
        try:
            return Path(command).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError([f"{command} is not UTF-8 at byte {error.start}; give a shell script"]) from None
    if len(command.split()) < 2:
        raise ConfigError([f"{brief(command)} is no file and no command line; give a shell script, or one in quotes"])
    if args.arguments:
        rule = "only a script takes arguments; put the whole command line in quotes"
        raise ConfigError([f"{brief(args.arguments[0])} follows a command line, and {rule}"])
    return command


def _summary(translation: Translation) -> str:
    """Every flag, those of one key or one reason in a line, and every default and deviation."""
    mapped = {flag: ", ".join(keys) for flag, keys in translation.mapped.items()}
    rows = [["devices", str(translation.devices)]]
    rows += [["mapped", f"{flags} → {keys}"] for keys, flags in _by_value(mapped).items()]
    rows += [["default", f"no {flag}: {what}"] for flag, what in translation.defaults.items()]
    rows += [["ignored", f"{flags}: {reason}"] for reason, flags in _by_value(translation.ignored).items()]
    rows += [["deviates", what] for what in translation.deviations]
    return columns(rows)


def _by_value(table: dict[str, str]) -> dict[str, str]:
    """The names of each value, joined."""
    return {value: ", ".join(name for name in table if table[name] == value) for value in table.values()}
