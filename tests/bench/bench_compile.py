"""Builds the pods of examples/pods/ with the real compiler: compile time, memory, the estimate, host memory.

    make bench-compile [ARGS="--json out.json examples/pods/llama3-8b-8-h100.toml"]

A target whose plugin is not installed is left out, loudly. Then how program text and compile time grow with layers and
microbatches.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from parallax.text import columns  # noqa: E402

GROWTH = (("model.layers=16", "model.layers=80"), ("train.global_batch_size=32", "train.global_batch_size=512"))


def compiled(run_file: Path, *overrides: str) -> dict[str, Any] | None:
    """What `parallax compile --json` prints, with the size of the program's text and the host's memory; None where it
    says that it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        hlo = Path(folder) / "step.hlo"
        words = [sys.executable, "-m", "parallax", "compile", str(run_file), *overrides, "--json", "--hlo", str(hlo)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        if not done.stdout:
            print(f"LEFT OUT {run_file.stem}: {done.stderr.strip()}", file=sys.stderr)
            return None
        facts = json.loads(done.stdout)
        facts["text_bytes"] = hlo.stat().st_size
        facts["host_gib"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20  # of the largest so far
        return facts


def row(name: str, facts: dict[str, Any]) -> list[str]:
    memory, estimate = facts["memory_gib"], facts["estimate_gib"]
    arguments = sum(estimate[item] for item in ("weights", "masters", "moments"))
    temporaries = estimate["total"] - arguments
    return [
        name,
        f"{facts['compile_s']:.0f}",
        f"{memory['arguments']:.2f}",
        f"{memory['temporaries']:.2f}",
        f"{memory['peak']:.2f}",
        f"{facts['hbm_gib']:.1f}",
        "yes" if facts["fits"] else "NO",
        f"{estimate['total'] / memory['peak'] - 1:+.1%}",
        f"{temporaries / memory['temporaries'] - 1:+.1%}",
        f"{facts['host_gib']:.1f}",
        f"{facts['simulated']['step_time_s']:.1f}",
    ]


HEADINGS = ["pod", "compile s", "arguments", "temporaries", "peak", "HBM", "fits", "estimate", "of temporaries"]
HEADINGS += ["host GiB", "simulated s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_files", nargs="*", type=Path, default=sorted((ROOT / "examples" / "pods").glob("*.toml")))
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    found = {path.stem: facts for path in args.run_files if (facts := compiled(path))}
    if found:
        print(columns([HEADINGS, *(row(name, facts) for name, facts in found.items())], right=set(range(1, 11))))
    growth = {}
    base = ROOT / "examples" / "pods" / "llama3-70b-64-h100.toml"
    for small, large in GROWTH:
        few, many = compiled(base, small), compiled(base, large)
        if few and many:
            growth[f"{small} to {large}"] = {
                "text": many["text_bytes"] / few["text_bytes"] - 1,
                "compile": many["compile_s"] / few["compile_s"] - 1,
            }
    for name, change in growth.items():
        print(f"{name}: text {change['text']:+.2%}, compile time {change['compile']:+.0%}")
    if args.json:
        args.json.write_text(json.dumps({"pods": found, "growth": growth}, indent=1))


if __name__ == "__main__":
    main()
