"""`make bench`: step and compile times of layouts, paired in one run, and how memory and program text grow.

Every round runs one step of every layout, so that a busy machine slows all alike; what counts is the ratio to dp8.
Writes bench_steps.json and bench_memory.json in the working directory.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from parallax.environment import emulate_devices

emulate_devices(8)
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

import jax  # noqa: E402
import numpy as np  # noqa: E402
from programs import compile_step, program  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from parallax.config import Parallel  # noqa: E402
from parallax.data import Batch  # noqa: E402

ROUNDS = 7
GLOBAL_BATCH = 16
BENCH_MODEL = {"vocab_size": 1024, "width": 256, "heads": 8, "kv_heads": 8, "ff": 1024}

interleaved: dict[str, Any] = {"virtual_stages": 2, "schedule": "interleaved"}
LAYOUTS: dict[str, tuple[Parallel, int]] = {
    "dp8": (Parallel(dp=8), 1),
    "tp4-dp2": (Parallel(tp=4, dp=2), 1),
    "pp4-dp2": (Parallel(pp=4, dp=2), 8),
    "pp4-dp2 skip_idle": (Parallel(pp=4, dp=2, skip_idle=True), 8),
    "pp4-dp2 v2": (Parallel(pp=4, dp=2, **interleaved), 8),
    "pp4-dp2 v2 skip_idle": (Parallel(pp=4, dp=2, skip_idle=True, **interleaved), 8),
    "pp4-tp2": (Parallel(pp=4, tp=2), 8),
    "pp4-tp2 v2": (Parallel(pp=4, tp=2, **interleaved), 8),
}


def steps() -> list[dict]:
    """Llama of 8 layers, width 256, sequence 128, global batch 16, full remat, float32, 8 emulated devices"""
    runs = {}
    for name, (parallel, m) in LAYOUTS.items():
        micro_batch = GLOBAL_BATCH // (m * parallel.dp)
        built = program(parallel, m, micro_batch_size=micro_batch, **BENCH_MODEL)
        start = time.perf_counter()
        compiled = compile_step(built)
        compile_s = time.perf_counter() - start
        tokens = np.random.default_rng(0).integers(0, 1024, (GLOBAL_BATCH, 128), dtype=np.int32)
        with jax.set_mesh(built.mesh):
            runs[name] = [compiled, built.init(jax.random.key(0)), built.batch(Batch(tokens, tokens)), compile_s, []]
    for _ in range(ROUNDS + 1):
        for run in runs.values():
            start = time.perf_counter()
            run[1], _ = jax.block_until_ready(run[0](run[1], run[2]))
            run[4].append(time.perf_counter() - start)
    base = runs["dp8"][4][1:]
    return [
        {
            "layout": name,
            "microbatches": LAYOUTS[name][1],
            "step_s": statistics.median(times[1:]),
            "ratio_to_dp8": statistics.median(t / b for t, b in zip(times[1:], base, strict=True)),
            "trace_and_compile_s": compile_s,
        }
        for name, (_, _, _, compile_s, times) in runs.items()
    ]


def growth() -> list[dict]:
    """Temporaries and program text at pp4, a fixed micro batch, for more microbatches and for more layers"""
    rows = []
    for parallel in (Parallel(pp=4, tp=2), Parallel(pp=4, tp=2, **interleaved)):
        for remat in ("none", "selective", "full"):
            for label, a, b in (("m 8 → 64", (8, 8), (64, 8)), ("layers 16 → 64", (8, 16), (8, 64))):
                compiled = [compile_step(program(parallel, m, layers=layers, remat=remat)) for m, layers in (a, b)]
                memory = [c.memory_analysis().temp_size_in_bytes for c in compiled]
                text = [len(c.as_text()) for c in compiled]
                row: dict[str, Any] = {"schedule": parallel.schedule, "virtual_stages": parallel.virtual_stages}
                row |= {"remat": remat, "growth": label}
                row |= {"temporaries_bytes": memory, "text_growth": text[1] / text[0] - 1}
                rows.append(row | {"temporaries_growth": memory[1] / memory[0] - 1})
    return rows


def main() -> None:
    console = Console()
    rows = steps()
    table = Table("layout", "m", "step s", "ratio to dp8", "trace + compile s", title=str(steps.__doc__))
    for row in rows:
        cells = (f"{row['step_s']:.3f}", f"{row['ratio_to_dp8']:.2f}", f"{row['trace_and_compile_s']:.1f}")
        table.add_row(row["layout"], str(row["microbatches"]), *cells)
    console.print(table)
    Path("bench_steps.json").write_text(json.dumps(rows, indent=1))

    rows = growth()
    table = Table("schedule", "v", "remat", "from → to", "temporaries MiB", "growth", "text", title=str(growth.__doc__))
    for row in rows:
        memory = " → ".join(f"{b / 2**20:.2f}" for b in row["temporaries_bytes"])
        grows = f"{row['temporaries_growth']:+.2%}" if row["growth"].startswith("m") else "-"
        text = f"{row['text_growth']:+.2%}"
        table.add_row(row["schedule"], str(row["virtual_stages"]), row["remat"], row["growth"], memory, grows, text)
    console.print(table)
    Path("bench_memory.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
