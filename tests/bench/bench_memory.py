"""The estimate of memory against what XLA allots, and of time against the simulated step, over builds spread over
models, layouts, remat modes and targets.

    make bench-memory [ARGS="--json out.json --only tpu"]

Arguments are weights and optimizer states; temporaries are all else. A target whose plugin is not installed is left
out, loudly.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from bench_compile import compiled

from parallax.text import columns

# model, mesh, devices; sequence, global batch; layout; micro batch, remat; what else
BUILDS = """
llama3-8b     h100-sxm  8192 128   dp=4 pp=2 virtual_stages=2      1 none
llama3-8b     h100-sxm  8192 128   dp=4 tp=2                       1 selective
llama3-8b     h100-sxm  8192 128   tp=8                            2 full
llama3-8b     h100-sxm  8192 128   dp=2 pp=2 cp=2                  1 none       parallel.context=all_gather
llama3-8b     h100-sxm  32768 32   cp=8                            1 full       parallel.context=ring
llama3-8b     h100-sxm  8192 128   pp=4 tp=2 virtual_stages=4      1 selective  parallel.zero=0
llama3-8b     h100-sxm  4096 128   dp=2 tp=4                       4 none       parallel.sequence_parallel=false
llama3-70b    h100-sxm  8192 512   dp=2 pp=4 cp=2 tp=4             1 none       parallel.context=all_gather
llama3-70b    h100-sxm  8192 512   dp=4 pp=4 tp=4 virtual_stages=10             1 none
llama3-70b    h100-sxm  8192 512   dp=4 pp=2 tp=8 virtual_stages=8 2 selective
llama3-70b    h100-sxm  8192 512   dp=8 tp=8                       2 full
gpt3-175b     h100-sxm  2048 512   dp=2 pp=8 tp=8 virtual_stages=3 2 selective
gpt3-175b     h100-sxm  2048 512   dp=4 pp=4 tp=8                  1 none
llama3.1-405b h100-sxm  8192 512   dp=8 pp=8 cp=2 tp=8             1 selective  parallel.context=all_gather
gpt-1t        h100-sxm  2048 3072  dp=6 pp=64 tp=8                 1 none
llama3-8b     tpu-v5p   8192 128   dp=4 pp=2 virtual_stages=2      1 none
llama3-8b     tpu-v5p   8192 128   dp=4 tp=2                       1 selective
llama3-8b     tpu-v5p   8192 128   tp=8                            2 full
llama3-8b     tpu-v5p   8192 128   dp=2 pp=2 cp=2                  1 none       parallel.context=all_gather
llama3-8b     tpu-v5p   32768 32   cp=8                            1 full       parallel.context=ring
llama3-8b     tpu-v5p   4096 128   dp=2 tp=4                       4 none       parallel.sequence_parallel=false
llama2-7b     tpu-v5p   4096 256   dp=4 pp=2                       4 selective
llama3-70b    tpu-v5p   8192 512   dp=4 pp=4 tp=4                  1 full
gpt3-175b     tpu-v5p   2048 512   dp=2 pp=4 tp=8 virtual_stages=3 1 selective
"""


def run_file(line: str, folder: Path) -> Path:
    model, mesh, sequence, batch, *rest = line.split()
    micro = next(i for i, word in enumerate(rest) if "=" not in word)
    sizes, (micro_batch, remat, *others) = rest[:micro], rest[micro:]
    sections: dict[str, list[str]] = {
        "model": [f'name = "{model}"'],
        "parallel": [word.replace("=", " = ") for word in sizes],
        "mesh": [f'name = "{mesh}"'],
        "train": ["steps = 1000", f"seq_len = {sequence}", f"global_batch_size = {batch}"],
        "log": ['dir = "runs/x"'],
    }
    sections["train"] += [f"micro_batch_size = {micro_batch}", f'remat = "{remat}"', 'precision = "bfloat16"']
    if any(word.startswith("virtual_stages") for word in sizes):
        sections["parallel"].append('schedule = "interleaved"')
    for other in others:
        key, value = other.split("=")
        section, name = key.split(".")
        sections[section].append(f"{name} = {value if value in ('0', 'false') else json.dumps(value)}")
    path = folder / "run.toml"
    path.write_text("".join(f"[{name}]\n" + "\n".join(lines) + "\n\n" for name, lines in sections.items()))
    return path


class Compared(NamedTuple):
    """GiB of arguments and temporaries as compiled; relative errors of the estimate: of both, of the temporaries, and
    of the step's time against the simulated."""

    arguments: float
    temporaries: float
    both: float
    beside: float
    time: float


def compared(facts: dict[str, Any]) -> Compared:
    memory, estimate = facts["memory_gib"], facts["estimate_gib"]
    arguments, temporaries = memory["arguments"], memory["temporaries"]
    beside = estimate["total"] - sum(estimate[item] for item in ("weights", "masters", "moments"))
    return Compared(
        arguments,
        temporaries,
        estimate["total"] / (arguments + temporaries) - 1,
        beside / temporaries - 1,
        facts["estimated_step_time_s"] / facts["simulated"]["step_time_s"] - 1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="builds whose line has this")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    rows: list[Compared] = []
    for line in BUILDS.strip().splitlines():
        if args.only not in line:
            continue
        with tempfile.TemporaryDirectory() as folder:
            facts = compiled(run_file(line, Path(folder)))
        if facts:
            name = " ".join(line.split())
            found[name] = facts
            rows.append(row := compared(facts))
            print(
                f"{name}: {facts['compile_s']:.0f} s, {row.both:+.1%}, temporaries {row.beside:+.1%}", file=sys.stderr
            )
            if args.json:
                args.json.write_text(json.dumps(found, indent=1))
    if not rows:
        return
    table = [["build", "arguments", "temporaries", "share", "estimate", "of temporaries", "of time"]]
    for name, row in zip(found, rows, strict=True):
        share = row.temporaries / (row.arguments + row.temporaries)
        errors = [f"{error:+.1%}" for error in (row.both, row.beside, row.time)]
        table.append([name, f"{row.arguments:.2f}", f"{row.temporaries:.2f}", f"{share:.0%}", *errors])
    print(columns(table, right={1, 2, 3, 4, 5, 6}))
    large = sum(row.temporaries >= 0.4 * (row.arguments + row.temporaries) for row in rows)
    print(f"{len(rows)} builds, {large} with temporaries at 40% or more")
    for name, errors in (
        ("arguments + temporaries", [abs(row.both) for row in rows]),
        ("temporaries alone", [abs(row.beside) for row in rows]),
        ("time against the simulated step", [abs(row.time) for row in rows]),
    ):
        middle, most = statistics.median(errors), max(errors)
        print(f"{name}: mean error {statistics.mean(errors):.1%}, median {middle:.1%}, worst {most:.1%}")


if __name__ == "__main__":
    main()
