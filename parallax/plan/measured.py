"""Measured training steps beside this project's prices of them: error and regret, by source. No jax."""

from __future__ import annotations

import csv
import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from parallax.config import ConfigError, MeshChoice, Parallel, Train, brief, either
from parallax.machine import Machine, load_machine, machine_names
from parallax.plan.costs import Costs
from parallax.plan.layer import MEGATRON, MEGATRON_CORE, LayerTimes
from parallax.plan.megatron import Switches, megatron_step
from parallax.plan.shapes import gpt_shape
from parallax.shape import ModelShape

COLUMNS = (
    *("source", "hardware", "recompute", "sequence_parallel", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab"),
    *("glu", "seq", "gpus", "global_batch", "micro_batch", "tp", "pp", "vpp", "cp", "ep", "dp", "iteration_s"),
)
SIZES = ("layers", "hidden", "heads", "seq", "gpus", "global_batch", "tp", "pp")  # must be given
VOCAB_SIZE = 51_200  # GPT-2's, padded as Megatron-LM pads it
MICRO_BATCHES = (1, 2, 4, 8, 16)
DIGITS = 12  # of a number in a cell
MAX_LAYERS = 10_000
LEAST_GROUP = 4  # rows of a group whose regret is counted


@dataclass(frozen=True)
class Row:
    """One measured step, with what had to be assumed."""

    line: int
    source: str
    hardware: str
    shape: ModelShape
    parallel: Parallel
    train: Train
    published_micro_batch: bool
    published_chunks: bool
    measured_s: float
    assumed: tuple[str, ...]

    @property
    def devices(self) -> int:
        return math.prod(getattr(self.parallel, axis) for axis in ("pp", "dp", "ep", "cp", "tp"))

    @property
    def group(self) -> tuple[Any, ...]:
        """Rows of equal model, devices and batch: what one layout is chosen from."""
        return self.source, self.hardware, self.shape, self.devices, self.train.seq_len, self.train.global_batch_size


@dataclass(frozen=True)
class Priced:
    row: Row
    predicted_s: float

    @property
    def error(self) -> float:
        """Of the measured time; positive where the price is too high."""
        return self.predicted_s / self.row.measured_s - 1


def read_rows(path: Path) -> list[Row]:
    """Raises ConfigError naming each line that is not a measured step."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or ()
            lines = [(reader.line_num, cells) for cells in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError([f"--measured {path}: {why}; give a CSV file of measured steps"]) from None
    if missing := [name for name in COLUMNS if name not in names]:
        raise ConfigError([f"--measured {path}: has no columns {', '.join(missing)}; use {', '.join(COLUMNS)}"])
    if not lines:
        raise ConfigError([f"--measured {path}: has no rows; give a line a measured step"])
    rows, problems = [], []
    for number, cells in lines:
        try:
            rows.append(_row(number, {name: (cells[name] or "").strip() for name in COLUMNS}))
        except ConfigError as error:
            problems += [f"--measured {path}, line {number}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return rows


def _row(line: int, cells: dict[str, str]) -> Row:
    """Raises ConfigError with every problem of the row."""
    assumed: list[str] = []
    problems: list[str] = []

    def whole(name: str, default: int | None = None) -> int:
        text = cells[name]
        if not text and default is not None:
            return default
        if text.isdecimal() and len(text) <= DIGITS and int(text) > 0:
            return int(text)
        empty = "" if default is None else f", or leave it empty for {default}"
        rule = f"must be an integer of at least 1 and at most {DIGITS} digits"
        problems.append(f"{name} = {brief(text)} {rule}; use 1 or more{empty}")
        return 1

    def truth(name: str) -> bool:
        if cells[name].lower() not in ("", "true", "false"):
            problems.append(
                f"{name} = {brief(cells[name])} must be a truth value; use True or False, or leave it empty"
            )
        return cells[name].lower() == "true"

    if cells["hardware"] not in _machines():
        use = either(_machines())
        problems.append(
            f"hardware = {brief(cells['hardware'])} is not a machine of meshes/ that has a speed; use {use}"
        )
    sizes = {name: whole(name) for name in SIZES}
    layers, heads, tp, pp = sizes["layers"], sizes["heads"], sizes["tp"], sizes["pp"]
    cp, ep, micro, v = whole("cp", 1), whole("ep", 1), whole("micro_batch", 1), whole("vpp", 1)
    kv_heads, ff = whole("kv_heads", heads), whole("ffn", 4 * sizes["hidden"])
    vocab_size, glu, sequence_parallel = whole("vocab", VOCAB_SIZE), truth("glu"), truth("sequence_parallel")
    try:
        measured_s = float(cells["iteration_s"])
    except ValueError:
        measured_s = math.nan
    if not 0 < measured_s < math.inf:
        problems.append(
            f"iteration_s = {brief(cells['iteration_s'])} must be a number greater than 0; use seconds a step"
        )
    if problems:
        raise ConfigError(problems)

    product = tp * pp * cp * ep
    dp = max(1, sizes["gpus"] // product)
    ranks = dp * ep * micro
    divide = [  # what, of how much, must be a multiple of what
        ("gpus", sizes["gpus"], f"tp {tp} x pp {pp} x cp {cp} x ep {ep}", product),
        ("hidden", sizes["hidden"], "heads", heads),
        ("heads", heads, "kv_heads", kv_heads),
        ("heads", heads, "tp", tp),
        ("ffn", ff, "tp", tp),
        ("seq", sizes["seq"], "cp", cp),
    ]
    if sizes["gpus"] % product == 0:
        divide.append(("global_batch", sizes["global_batch"], f"dp {dp} x ep {ep} x micro_batch {micro}", ranks))
    for name, size, of, step in divide:
        if size % step:
            use = either(str(n) for n in (size // step * step, (size // step + 1) * step) if n)
            problems.append(f"{name} = {size} is not a multiple of {of} = {step}; use {use}")
    if layers < pp * v:
        problems.append(f"pp {pp} x vpp {v} = {pp * v} stages are more than layers = {layers}; use at most {layers}")
    if layers > MAX_LAYERS:
        problems.append(f"layers = {layers} must be at most {MAX_LAYERS}; use {MAX_LAYERS} or less")
    if problems:
        raise ConfigError(problems)

    fused = _fused(cells["hardware"])
    if not cells["vocab"]:
        assumed.append(f"vocabulary {VOCAB_SIZE:,}")
    if not cells["sequence_parallel"] and tp > 1:
        sequence_parallel = fused
        assumed.append("sequence parallel" if fused else "no sequence parallelism")
    remat = _recomputation(cells, sizes, assumed)
    if not cells["micro_batch"]:
        assumed.append("the micro batch that is predicted fastest")
    if not cells["vpp"] and pp > 1:
        assumed.append("the virtual stages that are predicted fastest")
    shape = gpt_shape(
        layers=layers,
        width=sizes["hidden"],
        heads=heads,
        kv_heads=kv_heads,
        ff=ff,
        vocab_size=vocab_size,
        glu=glu,
        positions=sizes["seq"],
    )
    parallel = Parallel(
        dp=dp,
        pp=pp,
        ep=ep,
        cp=cp,
        tp=tp,
        virtual_stages=v,
        schedule="interleaved" if v > 1 else "1f1b",
        sequence_parallel=sequence_parallel,
        zero=1 if fused else 0,
    )
    train = Train(
        steps=1,
        seq_len=sizes["seq"],
        global_batch_size=sizes["global_batch"],
        micro_batch_size=micro,
        remat=remat,
        precision="bfloat16",
    )
    return Row(
        line,
        cells["source"],
        cells["hardware"],
        shape,
        parallel,
        train,
        bool(cells["micro_batch"]),
        bool(cells["vpp"]),
        measured_s,
        tuple(assumed),
    )


@cache
def _machines() -> dict[str, Machine]:
    """Those of meshes/ that have a speed."""
    machines = {name: load_machine(MeshChoice(name=name)) for name in machine_names()}
    return {name: machine for name, machine in machines.items() if machine.efficiency}


def _recomputation(cells: dict[str, str], sizes: dict[str, int], assumed: list[str]) -> Any:
    """As published, or as a run of its kind would be: in one node without any, over several with all."""
    said = cells["recompute"].lower()
    if said.startswith("full"):
        return "full"
    if said.startswith("selective"):
        return "selective"
    if said.startswith("none") and "not stated" not in said:
        return "none"
    guess = "none" if sizes["gpus"] <= 8 or _fused(cells["hardware"]) else "full"
    assumed.append(f"recomputation {guess}")
    return guess


def _fused(hardware: str) -> bool:
    """Whether Megatron-LM of that chip's time is meant that has fused attention and overlaps its reductions."""
    return not hardware.startswith("a100")


def price(row: Row, machine: Machine) -> float:
    """Seconds of the step in Megatron-LM's scheme; where micro batch or virtual stages were not published, of the
    fastest of them."""
    fused = _fused(row.hardware)
    switches = Switches(reduces_fp32=fused, overlaps_dp=fused)
    times = LayerTimes(Costs(machine, row.train.precision), MEGATRON_CORE if fused else MEGATRON)
    per_rank = row.train.global_batch_size // (row.parallel.dp * row.parallel.ep)
    batches = [row.train.micro_batch_size]
    if not row.published_micro_batch:
        batches = [size for size in MICRO_BATCHES if per_rank % size == 0]
    chunks = [row.parallel.virtual_stages]
    if not row.published_chunks and row.parallel.pp > 1:
        per_stage = len(row.shape.layers) // row.parallel.pp
        chunks = [v for v in range(1, per_stage + 1) if per_stage % v == 0]
    return min(
        megatron_step(
            times,
            switches,
            row.shape,
            dataclasses.replace(row.parallel, virtual_stages=v),
            dataclasses.replace(row.train, micro_batch_size=batch),
        ).total
        for batch in batches
        for v in chunks
    )


def price_all(rows: Iterable[Row]) -> list[Priced]:
    return [Priced(row, price(row, _machines()[row.hardware])) for row in rows]


@dataclass(frozen=True)
class Score:
    """Errors are shares of the measured time; `regret` is how much slower the layout predicted fastest is than the
    measured fastest, averaged over `groups` of equal model, devices and batch with at least four rows."""

    rows: int
    mean: float
    median: float
    worst: float
    bias: float
    groups: int
    regret: float | None


def score(priced: Sequence[Priced]) -> Score:
    errors = [abs(p.error) for p in priced]
    groups: dict[Any, list[Priced]] = defaultdict(list)
    for p in priced:
        groups[p.row.group].append(p)
    regrets = [regret(group) for group in groups.values() if len(group) >= LEAST_GROUP]
    return Score(
        rows=len(priced),
        mean=statistics.fmean(errors),
        median=statistics.median(errors),
        worst=max(errors),
        bias=statistics.fmean(p.error for p in priced),
        groups=len(regrets),
        regret=statistics.fmean(regrets) if regrets else None,
    )


def regret(group: Sequence[Priced]) -> float:
    picked = min(group, key=lambda p: p.predicted_s)
    return picked.row.measured_s / min(p.row.measured_s for p in group) - 1


def by_source(priced: Sequence[Priced]) -> dict[str, list[Priced]]:
    sources: dict[str, list[Priced]] = defaultdict(list)
    for p in priced:
        sources[p.row.source].append(p)
    return dict(sources)


def calibration_half(rows: Sequence[Row]) -> list[Row]:
    """Of single-node rows, every second group in order of layers, width, devices and batch: what constants were chosen
    on. The other half is held out."""
    key = lambda row: (len(row.shape.layers), row.shape.width, row.devices, row.train.global_batch_size)
    chosen = set(sorted({key(row) for row in rows})[::2])
    return [row for row in rows if key(row) in chosen]
