"""The verb `parallax tokenize`: text to an indexed dataset, which `data.source` and Megatron read. No jax."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from parallax.config import SOURCES, ConfigError, show
from parallax.data.files import find_files
from parallax.data.indexed import SUFFIXES, check_free, find_prefix
from parallax.data.tokenize import tokenize_files
from parallax.data.tokenizer import open_tokenizer

EXAMPLE = """\
example:
  parallax tokenize web.jsonl books/ -o corpus --tokenizer tokenizer.json
  parallax train run.toml data.source=corpus data.tokenizer=tokenizer.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write text as the ids of a tokenizer: PREFIX.bin and PREFIX.idx (Megatron's), and PREFIX.json."
    )
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="text files, .jsonl files, folders of them")
    parser.add_argument("-o", "--output", required=True, metavar="PREFIX", help="path of the new files, no suffix")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, or the path of a tokenizer.json (default: bytes)")
    parser.add_argument("--text-key", default="text", help="key of a .jsonl line that holds its text (default: text)")
    parser.add_argument(
        "--separator",
        default="",
        metavar="TOKEN",
        help="token that ends each document (default: end of text, or byte 0)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, PREFIX.json, and nothing else")


def run(args: argparse.Namespace) -> int:
    """→ exit status 0. Raises ConfigError where the text cannot be read or the files not written."""
    prefix = Path(args.output)
    problems, files = [*_output_problems(args.output, prefix)], []
    for source in args.sources:
        try:
            refused = _refuse(source)
            problems += refused
            files += [] if refused else find_files(source, f"SOURCE {show(source)}")
        except ConfigError as error:
            problems += error.problems
    try:
        tokenizer = open_tokenizer(args.tokenizer, args.separator, "--{}")
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from error
    if problems:
        raise ConfigError(problems)
    facts = tokenize_files(files, tokenizer, args.text_key, prefix)
    if args.json:
        print(json.dumps(facts))
        return 0
    rows = {
        "wrote": ", ".join(f"{prefix}{suffix}" for suffix in SUFFIXES),
        "documents": f"{facts['documents']:,}",
        "tokens": f"{facts['tokens']:,}, {tokenizer.dtype}, the largest {facts['largest_token']}",
        "tokenizer": f"{facts['tokenizer']}, {tokenizer.vocab_size:,} tokens",
        "separator": f"{show(tokenizer.separator)}, token {tokenizer.separator_id}",
    }
    print("\n".join(f"{name:11}{value}" for name, value in rows.items()))
    return 0


def _output_problems(output: str, prefix: Path) -> Iterator[str]:
    where = f"--output {show(output)}"
    if not prefix.name or "\0" in output or prefix.is_dir():
        yield f"{where} is not the name of new files; use one such as corpus"
    elif prefix.suffix in SUFFIXES:
        use = show(output.removesuffix(prefix.suffix))
        yield f"{where} has the suffix {prefix.suffix}, which is added by itself; use {use}"
    elif not prefix.parent.is_dir():
        yield f"{where}: the folder {prefix.parent} does not exist; make it first"
    else:
        try:
            check_free(prefix)
        except ConfigError as error:
            yield from error.problems


def _refuse(source: str) -> list[str]:
    """What a run file may name, but holds no text to tokenize."""
    use = "use text files, .jsonl files or folders of them"
    if source in SOURCES and not Path(source).exists():
        return [f"SOURCE {show(source)} is not a path; {use}"]
    return [f"SOURCE {show(source)} holds tokens already; {use}"] if find_prefix(source) else []
