"""`make demo`: trains examples/demo.toml, resumes it on another layout, and sums up what happened.

Both parts are plain `parallax train` commands, printed before they run. Ends with 0 if the held-out loss survived the
change of layout and fell below that of a bigram table.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from parallax.config import ConfigError, RunConfig, load
from parallax.data.bigram import bigram_loss
from parallax.data.sources import python_stdlib
from parallax.text import duration

ROOT = Path(__file__).parents[1]
RUN_FILE = "examples/demo.toml"
FIRST_STEPS = 150
OTHER_LAYOUT = ("parallel.pp=4", "parallel.tp=1")
LARGEST_CHANGE = 0.01  # nats a token, of the held-out loss at the change of layout: rounding of bfloat16
BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 24

console = Console(highlight=False)


def main() -> int:
    start = time.monotonic()
    config = load(ROOT / RUN_FILE)
    folder = ROOT / config.log.dir
    if not wipe(folder, config):
        console.print(f"error: {folder} holds something that is not a run of this demo; move it away")
        return 2
    first = parallax_train(f"train.steps={FIRST_STEPS}")
    second = parallax_train(*OTHER_LAYOUT, "--resume")
    corpus = python_stdlib(config.data.valid_fraction)
    bigram = bigram_loss(corpus.train, corpus.valid)
    losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]

    change = abs(second["resumed_valid_loss"] - first["valid_loss"])
    beaten = second["valid_loss"] < bigram
    layouts = layout(load(ROOT / RUN_FILE)), layout(load(ROOT / RUN_FILE, OTHER_LAYOUT))
    rows = Table.grid(padding=(0, 2))
    rows.add_row("[bold]loss", f"{losses[0]:.4f}", "step 1, in nats a byte")
    rows.add_row("", f"{losses[-1]:.4f}", f"step {len(losses)}  {curve(losses)}")
    rows.add_row("[bold]held out", f"{first['valid_loss']:.4f}", f"step {first['step']}, on {layouts[0]}")
    rows.add_row("", f"{second['resumed_valid_loss']:.4f}", f"the same step, restored on {layouts[1]}")
    rows.add_row("", f"{second['valid_loss']:.4f}", f"step {second['step']}, on {layouts[1]}")
    rows.add_row(
        "[bold]bigrams", f"{bigram:.4f}", "a table of byte pairs, " + ("[green]beaten" if beaten else "[red]not beaten")
    )
    rows.add_row(
        "[bold]speed",
        f"{first['tokens_per_s']:,.0f} tokens/s",
        f"then {second['tokens_per_s']:,.0f}, on emulated devices",
    )
    rows.add_row("[bold]run", config.log.dir, "run.toml, metrics.jsonl, checkpoints")
    rows.add_row("[bold]took", duration(time.monotonic() - start))
    console.print()
    console.print(rows)
    if change > LARGEST_CHANGE:
        console.print(f"[red]error: the held-out loss changed by {change:.4f} with the layout")
    return 0 if beaten and change <= LARGEST_CHANGE else 1


def wipe(folder: Path, config: RunConfig) -> bool:
    """Removes an earlier demo's run. False if the folder holds anything else."""
    if not folder.exists() or not any(folder.iterdir()):
        return True
    try:
        found = load(folder / "run.toml")
    except ConfigError:
        return False
    if (found.log, found.model) != (config.log, config.model):
        return False
    shutil.rmtree(folder)
    return True


def parallax_train(*words: str) -> dict[str, Any]:
    """Runs `parallax train` on the run file and returns its result. Ends the demo with its exit status if not 0."""
    command = ["parallax", "train", RUN_FILE, *words]
    console.print(f"\n[bold]$ {shlex.join(command)}")
    running = subprocess.Popen(
        [sys.executable, "-m", *command, "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the run too: it saves and ends
    output, _ = running.communicate()
    signal.signal(signal.SIGINT, handler)
    if running.returncode != 0:
        sys.exit(running.returncode)
    return json.loads(output)


def layout(config: RunConfig) -> str:
    """`dp2·pp2·tp2`"""
    sizes = {axis: getattr(config.parallel, axis) for axis in ("dp", "pp", "tp")}
    return "·".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)


def curve(losses: list[float]) -> str:
    """The losses as a row of bars, each the mean of its share of the steps."""
    width = min(CURVE_WIDTH, len(losses))
    bounds = [i * len(losses) // width for i in range(width + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    return "".join(BARS[round((mean - low) / (high - low or 1) * (len(BARS) - 1))] for mean in means)


if __name__ == "__main__":
    sys.exit(main())
