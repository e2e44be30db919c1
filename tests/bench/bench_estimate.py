"""`make bench-estimate`: the estimator's prices beside measured steps, row by row and by set, and what each of its
constants is worth in error.

Megatron-LM's scheme, as the measurements are of it. Beside them a published figure of a trillion parameters, and what
interleaving gains. ARGS="steps.csv --json bench_estimate.json" names another table and writes all of it down.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from parallax.config import ConfigError, MeshChoice, Parallel, Train
from parallax.machine import MESHES, Efficiency, Machine, load_machine
from parallax.plan import measured, megatron
from parallax.plan.costs import Costs
from parallax.plan.layer import MEGATRON, LayerTimes
from parallax.plan.measured import Priced, Row, Score, by_source, calibration_half, price, read_rows, score
from parallax.plan.megatron import Switches, megatron_step
from parallax.plan.shapes import gpt_shape
from parallax.plan.show import measured_view, seconds, table
from parallax.text import layout

ROOT = Path(__file__).parents[2]
MEASURED = ROOT.parent / "shared" / "data" / "measured_steps.csv"
A100 = "a100-80gb"
FACTORS = (0.9, 1.1)
SINGLE, MULTI = "ground_truth_single.csv", "ground_truth_multi.csv"  # vTrain's files, as sources name them
NAMES = {  # a part of a source's name, and how it is called here
    SINGLE: "vTrain, one node",
    MULTI: "vTrain, several nodes",
    "Korthikanti": "Korthikanti et al. 2022, table 5",
    "SC21": "Narayanan et al. 2021, table 1",
    "megatron_readme_h100": "Megatron-LM's README, H100",
}
Machines = Mapping[str, Machine]


# Rows and sets


def price_rows(rows: Iterable[Row], machines: Machines) -> list[Priced]:
    return [Priced(row, price(row, machines[row.hardware])) for row in rows]


def sets(priced: Sequence[Priced]) -> dict[str, list[Priced]]:
    """By source; vTrain's single-node rows by half, its others by model and together."""
    found = {}
    for source, own in by_source(priced).items():
        if SINGLE in source:
            chosen = {row.line for row in calibration_half([p.row for p in own])}
            found[f"{short(source)}: calibration half"] = [p for p in own if p.row.line in chosen]
            found[f"{short(source)}: held out"] = [p for p in own if p.row.line not in chosen]
        elif MULTI in source:
            for group in dict.fromkeys(p.row.group for p in own):
                members = [p for p in own if p.row.group == group]
                found[f"{short(source)}: {model(members[0].row)} on {members[0].row.devices}"] = members
            found[f"{short(source)}: all"] = own
        else:
            found[short(source)] = own
    return found


def short(source: str) -> str:
    return next((name for part, name in NAMES.items() if part in source), source)


def model(row: Row) -> str:
    return f"{row.shape.parameters / 1e9:.1f}B"


def row_facts(p: Priced) -> dict[str, Any]:
    row = p.row
    return {
        "source": row.source,
        "line": row.line,
        "model": f"{len(row.shape.layers)} x {row.shape.width}, {model(row)}",
        "layout": layout(row.parallel) or "one device",
        "micro_batch": row.train.micro_batch_size if row.published_micro_batch else None,
        "global_batch": row.train.global_batch_size,
        "recomputation": row.train.remat,
        "recomputation_assumed": any(what.startswith("recomputation") for what in row.assumed),
        "measured_s": row.measured_s,
        "predicted_s": p.predicted_s,
        "error": p.error,
    }


def rows_view(priced: Sequence[Priced]) -> Any:
    columns = ("source", "model", "layout", "micro", "batch", "recomputation", "measured s", "predicted s", "error")
    shown = table(*columns, left=(0, 1, 2, 5))
    for facts in map(row_facts, priced):
        assumed = " (assumed)" * facts["recomputation_assumed"]
        shown.add_row(
            f"{short(facts['source'])}, line {facts['line']}",
            facts["model"],
            facts["layout"],
            "fastest" if facts["micro_batch"] is None else str(facts["micro_batch"]),
            str(facts["global_batch"]),
            facts["recomputation"] + assumed,
            *(seconds(facts[name], unit=False) for name in ("measured_s", "predicted_s")),
            f"{facts['error']:+.1%}",
        )
    return shown


# Constants


@dataclass(frozen=True)
class Constant:
    """`changed(factor)` is a context in which prices have it times `factor`; it gives the machines to price with."""

    name: str
    value: Any
    source: str
    changed: Callable[[float], contextlib.AbstractContextManager[Machines]]


def constants(machines: Machines) -> Iterator[Constant]:
    """Those of `Efficiency`, by the A100's mesh file and moved in every machine; then those of Megatron-LM, by its
    values before 2023 and moved in both its versions."""
    said = dict(re.findall(r"^(\w+) = \S+ +# (.*)$", (MESHES / f"{A100}.toml").read_text(), re.MULTILINE))
    efficiency = load_machine(MeshChoice(name=A100)).efficiency
    assert efficiency is not None
    for field in dataclasses.fields(Efficiency):
        yield Constant(field.name, getattr(efficiency, field.name), said[field.name], _efficiency(machines, field.name))
    counted = "counted in Megatron-LM's transformer layer"
    said = {
        "host_s": "[V]; of Megatron Core: what is usually said of a PyTorch operator",
        "pass_bytes": "two norms of 4 bytes, two fused bias, dropout and sum of 7 (arXiv 2205.05198, 4.2)",
        "kernels": counted,
        "gradient_bytes": "a 16-bit gradient read, its sum read and written",
    }
    for name, source in said.items():
        yield Constant(name, getattr(MEGATRON, name), source, _software(machines, name))
    said = {
        "LOGIT_BYTES": "passes of its cross-entropy over a logit, counted",
        "STATE_BYTES": "passes of unscaling, clipping and Adam over a parameter, counted",
        "SMOOTH": "chosen with host_s: powers of the norm of device and host time, with tensor parallelism and without",
    }
    for name, source in said.items():
        yield Constant(name, getattr(megatron, name), source, _module(machines, name))


def _efficiency(machines: Machines, name: str) -> Any:
    @contextlib.contextmanager
    def changed(factor: float) -> Iterator[Machines]:
        yield {
            hardware: dataclasses.replace(machine, efficiency=_times(machine.efficiency, name, factor))
            for hardware, machine in machines.items()
        }

    return changed


def _software(machines: Machines, name: str) -> Any:
    @contextlib.contextmanager
    def changed(factor: float) -> Iterator[Machines]:
        new = {which: _times(getattr(measured, which), name, factor) for which in ("MEGATRON", "MEGATRON_CORE")}
        with mock.patch.multiple(measured, **new):
            yield machines

    return changed


def _module(machines: Machines, name: str) -> Any:
    @contextlib.contextmanager
    def changed(factor: float) -> Iterator[Machines]:
        with mock.patch.object(megatron, name, _scaled(getattr(megatron, name), factor)):
            yield machines

    return changed


def _times(held: Any, name: str, factor: float) -> Any:
    return dataclasses.replace(held, **{name: _scaled(getattr(held, name), factor)})


def _scaled(value: Any, factor: float) -> Any:
    return tuple(factor * part for part in value) if isinstance(value, tuple) else factor * value


def sensitivity(rows: Sequence[Row], machines: Machines, base: Mapping[str, Score]) -> list[dict[str, Any]]:
    """Of each constant, the change of each set's mean error at each factor."""
    found = []
    for constant in constants(machines):
        changes = {}
        for factor in FACTORS:
            with constant.changed(factor) as changed:
                scores = {name: score(own) for name, own in sets(price_rows(rows, changed)).items()}
            changes[f"{factor - 1:+.0%}"] = {name: scores[name].mean - base[name].mean for name in base}
        found.append({"name": constant.name, "value": constant.value, "source": constant.source, "changes": changes})
    return found


def sensitivity_view(found: Sequence[dict[str, Any]], names: Sequence[str]) -> Any:
    """A line a constant: the change at -10 % and at +10 %, in percentage points, a column a set."""
    shown = table(
        "constant", "value", *(f"[{i}]" for i, _ in enumerate(names, start=1)), "source", left=(0, len(names) + 2)
    )
    for line in found:
        less, more = line["changes"].values()
        value = line["value"]
        parts = value if isinstance(value, tuple) else (value,)
        cells = (f"{_points(less[name])} {_points(more[name])}" for name in names)
        shown.add_row(
            line["name"], ", ".join(f"{part:g}" for part in parts), *cells, line["source"].replace("[", "\\[")
        )
    return shown


def _points(change: float) -> str:
    return f"{100 * change:+.1f}".replace("+0.0", "0").replace("-0.0", "0")


# Published figures beside


def megatron_seconds(
    sizes: tuple[int, int, int], parallel: Parallel, batch: int, remat: Any, machine: Machine
) -> float:
    """A step of a GPT of so many layers, width and heads on A100s, micro batch 1, sequence 2048, vocabulary 51,200."""
    layers, width, heads = sizes
    shape = gpt_shape(layers, width, heads, heads, 4 * width, 51_200, glu=False, positions=2048)
    train = Train(steps=1, seq_len=2048, global_batch_size=batch, remat=remat)
    times = LayerTimes(Costs(machine, "bfloat16"), MEGATRON)
    return megatron_step(times, Switches(reduces_fp32=False, overlaps_dp=False), shape, parallel, train).total


def interleaved(v: int, **sizes: Any) -> Parallel:
    return Parallel(virtual_stages=v, schedule="interleaved" if v > 1 else "1f1b", zero=0, **sizes)


def trillion(machine: Machine) -> list[dict[str, Any]]:
    """1T parameters on 3,072 A100, tp8·pp64·dp6, global batch 3072, full recomputation: measured 502 PFLOP/s, v = 1"""
    l, h, s, V, B = 128, 25_600, 2048, 51_200, 3072
    flops = 96 * B * s * l * h**2 * (1 + s / (6 * h) + V / (16 * l * h))  # arXiv 2104.04473, equation 3
    rows = []
    for v in (1, 2):
        parallel = interleaved(v, tp=8, pp=64, dp=6, sequence_parallel=False)
        step_s = megatron_seconds((l, h, 160), parallel, B, "full", machine)
        rows.append({"virtual_stages": v, "step_s": step_s, "pflops": flops / step_s / 1e15})
    return rows


def interleaving(machine: Machine) -> list[dict[str, Any]]:
    """What 3 virtual stages gain over 1 (selective recomputation, sequence parallel) and the bubble alone would"""
    rows = []
    models = {"175B": ((96, 12_288, 96), 8, (8, 16, 32, 64)), "530B": ((105, 20_480, 128), 35, (35, 70, 140, 280))}
    for name, (sizes, pp, batches) in models.items():
        for m in batches:
            one, three = (megatron_seconds(sizes, interleaved(v, tp=8, pp=pp), m, "selective", machine) for v in (1, 3))
            bubble = (m + pp - 1) / (m + (pp - 1) / 3) - 1
            rows.append({"model": name, "layout": f"tp8·pp{pp}", "microbatches": m, "v1_s": one, "v3_s": three})
            rows[-1] |= {"gain": one / three - 1, "bubble_alone": bubble}
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-estimate", description=__doc__)
    parser.add_argument("measured", nargs="?", type=Path, default=MEASURED, help="a CSV file of measured steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that is printed there")
    args = parser.parse_args(argv)
    if not args.measured.exists():
        print(f"NOTHING WAS PRICED: there are no measured steps at {args.measured}", file=sys.stderr)
        print('give a CSV file of them: make bench-estimate ARGS="steps.csv" (docs/estimate.md)', file=sys.stderr)
        return 0
    try:
        rows = read_rows(args.measured)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2

    console = Console(width=280, highlight=False)
    machines = {name: load_machine(MeshChoice(name=name)) for name in dict.fromkeys(row.hardware for row in rows)}
    priced = price_rows(rows, machines)
    console.print(rows_view(priced))

    scores = {name: score(own) for name, own in sets(priced).items()}
    console.print(f"\nBy set, {len(priced)} rows: error of the predicted step time against the measured one")
    views = [(f"[{i}] {name}", *dataclasses.astuple(s)) for i, (name, s) in enumerate(scores.items(), start=1)]
    console.print(measured_view([(name.replace("[", "\\["), *rest) for name, *rest in views]))

    console.print(
        f"\nConstants: percentage points of mean error, by set, at {FACTORS[0] - 1:+.0%} and {FACTORS[1] - 1:+.0%}"
    )
    found = sensitivity(rows, machines, scores)
    console.print(sensitivity_view(found, list(scores)))

    a100 = load_machine(MeshChoice(name=A100))
    large = trillion(a100)
    console.print(f"\n{trillion.__doc__}")
    shown = table("v", "step s", "PFLOP/s", "of 502")
    for row in large:
        shown.add_row(
            str(row["virtual_stages"]),
            seconds(row["step_s"], False),
            f"{row['pflops']:.0f}",
            f"{row['pflops'] / 502 - 1:+.1%}",
        )
    console.print(shown)

    gains = interleaving(a100)
    console.print(f"\n{interleaving.__doc__}")
    shown = table("model", "layout", "m", "v 1 s", "v 3 s", "gain", "bubble alone", left=(0, 1))
    for row in gains:
        times = (seconds(row[name], False) for name in ("v1_s", "v3_s"))
        shares = (f"{row[name]:+.1%}" for name in ("gain", "bubble_alone"))
        shown.add_row(row["model"], row["layout"], str(row["microbatches"]), *times, *shares)
    console.print(shown)

    if args.json:
        facts = {"rows": [row_facts(p) for p in priced], "sets": {name: vars(s) for name, s in scores.items()}}
        facts |= {"constants": found, "trillion": large, "interleaving": gains}
        args.json.write_text(json.dumps(facts, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
