"""What the keys of a run file mean for each other, for the model and for the machine. No jax.

A rule yields problems, a line each of three parts: the value, the rule, the nearest values that work. Keys are dotted.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from parallax.config import (
    SCHEDULES,
    Data,
    Parallel,
    RunConfig,
    brief,
    either,
    show,
)
from parallax.machine import Machine
from parallax.schedule.csv import read_csv
from parallax.schedule.op import MAX_OPS, ScheduleError
from parallax.shape import ModelShape

MAX_WEIGHT_RATIO = 1e6  # of two sources of a mixture


def check_layout(config: RunConfig) -> Iterator[str]:
    """Rules between the run file's own keys."""
    parallel, train, optimizer = config.parallel, config.train, config.optimizer
    v = parallel.virtual_stages
    if v > 1 and parallel.schedule in SCHEDULES and parallel.schedule != "interleaved":
        yield (
            f'parallel.virtual_stages = {v} needs parallel.schedule = "interleaved", not {show(parallel.schedule)}; '
            'use virtual_stages = 1 or schedule = "interleaved"'
        )
    if v > 1 and parallel.pp == 1:
        yield f"parallel.virtual_stages = {v} needs parallel.pp of 2 or more, not 1; use virtual_stages = 1 or pp = 2"
    for axis in ("tp", "cp"):
        if parallel.skip_idle and getattr(parallel, axis) > 1:
            yield (
                f"parallel.skip_idle = true needs parallel.{axis} = 1, not {getattr(parallel, axis)}: a branch must "
                f"hold no collective; use skip_idle = false or {axis} = 1"
            )
    if train.seq_len % (step := _sequence_step(parallel)):
        yield (
            f"train.seq_len = {train.seq_len} is not a multiple of {step}, as {_sequence_rules(parallel)}; "
            f"use {_nearest_multiples(train.seq_len, step)}"
        )
    ranks = parallel.dp * parallel.ep * train.micro_batch_size
    if train.global_batch_size % ranks:
        yield (
            f"train.global_batch_size = {train.global_batch_size} is not a multiple of parallel.dp {parallel.dp} x "
            f"parallel.ep {parallel.ep} x train.micro_batch_size {train.micro_batch_size} = {ranks}; "
            f"use {_nearest_multiples(train.global_batch_size, ranks)}"
        )
    elif parallel.pp * v <= MAX_OPS < (ops := parallel.pp * v * config.microbatches):
        most = MAX_OPS // (parallel.pp * v) * ranks
        yield (
            f"train.global_batch_size = {train.global_batch_size} makes {config.microbatches} microbatches x "
            f"parallel.pp {parallel.pp} x parallel.virtual_stages {v} = {ops}, which must be at most {MAX_OPS}; "
            f"use {most} or less"
        )
    else:
        yield from _rampup(config, ranks)
    if optimizer.warmup_steps > train.steps:
        yield (
            f"optimizer.warmup_steps = {optimizer.warmup_steps} must be at most train.steps = {train.steps}; "
            f"use {train.steps} or less"
        )


def check_built(config: RunConfig) -> Iterator[str]:
    """What can be priced and not yet trained."""
    if config.parallel.ep > 1:
        yield f"parallel.ep = {config.parallel.ep}: expert parallelism is not built yet; use 1"


def check_experts(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Rules between expert parallelism and the model's experts."""
    ep = config.parallel.ep
    if ep == 1:
        return
    counts = sorted({layer.experts for layer in shape.layers if layer.experts})
    if not counts:
        yield f"parallel.ep = {ep} needs a model with experts, which {shape.name} has not; use 1"
    for experts in counts:
        if experts % ep:
            use = _nearest(ep, _divisors(experts))
            yield f"parallel.ep = {ep} does not divide the model's {experts} experts; use {use}"


def check_schedule(config: RunConfig) -> Iterator[str]:
    """Whether the schedule is known; of a CSV file, whether it can be run and has the sizes of the run file."""
    parallel, train = config.parallel, config.train
    name = parallel.schedule
    where = f"parallel.schedule = {brief(name)}"
    if name in SCHEDULES:
        return
    if not name.endswith(".csv"):
        closest = sorted(SCHEDULES, key=lambda known: difflib.SequenceMatcher(None, known, name).ratio(), reverse=True)
        yield f"{where} is not a schedule; use {either([*map(show, closest), 'a .csv file'])}"
        return
    if train.rampup_batch_size:
        yield (
            f"train.rampup_batch_size = {show(train.rampup_batch_size)} changes the microbatches of a step, which "
            f"{where} fixes; use rampup_batch_size = [] or a schedule of {either(map(show, SCHEDULES))}"
        )
    try:
        schedule = read_csv(name)
    except ScheduleError as error:
        yield from (f"parallel.schedule: {problem}" for problem in error.problems)
        return
    for key, what in (("pp", "the number of its lines"), ("virtual_stages", "the number of stages on a line")):
        given, found = getattr(parallel, key), getattr(schedule, key)
        if given != found:
            yield f"parallel.{key} = {given}, but {where} is for {found}, {what}; use {key} = {found}"
    ranks = parallel.dp * parallel.ep * train.micro_batch_size
    m = schedule.microbatches
    if train.global_batch_size % ranks == 0 and config.microbatches != m:
        yield (
            f"train.global_batch_size = {train.global_batch_size} makes {config.microbatches} microbatches, but "
            f"{where} has {m}; use global_batch_size = {m * ranks}"
        )


def check_sources(data: Data) -> Iterator[str]:
    """Rules of a mixture's weights, and of what run.toml can hold. What sources hold is looked at at their opening."""
    names = [*data.source] if isinstance(data.source, dict) else [data.source]
    texts = [("source", name) for name in names]
    texts += [(key, getattr(data, key)) for key in ("tokenizer", "text_key", "separator")]
    for key, text in texts:
        if not text.isascii() and text.encode(errors="ignore").decode() != text:
            yield f"data.{key}: {text!a} is not UTF-8, which a run file must be; use another name"
    if not isinstance(data.source, dict):
        return
    if not data.source:
        yield 'data.source = {} names no source; use for example {"python-stdlib" = 1.0}'
    wrong = {name: weight for name, weight in data.source.items() if not 0 < weight < math.inf}
    for name, weight in wrong.items():
        rule = "must be finite and greater than 0; use for example 1.0, or leave the source out"
        yield f"data.source: the weight {weight} of {show(name)} {rule}"
    if not data.source or wrong:
        return
    least = min(data.source, key=data.source.__getitem__)
    bound = max(data.source.values()) / MAX_WEIGHT_RATIO
    if data.source[least] < bound:
        where = f"data.source: the weight {data.source[least]} of {show(least)}"
        yield f"{where} must be at least a millionth of the largest; use {bound} or more"


def _rampup(config: RunConfig, ranks: int) -> Iterator[str]:
    """Rules of the batch-size ramp, where the full size is a multiple of `ranks`: of dp x ep x micro_batch_size."""
    train, where = config.train, f"train.rampup_batch_size = {brief(config.train.rampup_batch_size)}"
    if not train.rampup_batch_size:
        return
    full = train.global_batch_size
    if len(train.rampup_batch_size) != 3 or min(train.rampup_batch_size) < 1:
        example = f"[{ranks}, {ranks}, {1000 * ranks}]" if ranks < full else "[]"
        yield f"{where} must be three integers of at least 1: start, increment, samples; use {example}"
        return
    start, increment, _ = train.rampup_batch_size
    product = (
        f"parallel.dp {config.parallel.dp} x parallel.ep {config.parallel.ep} x "
        f"train.micro_batch_size {train.micro_batch_size} = {ranks}"
    )
    if full == ranks:
        yield f"{where}: no size below train.global_batch_size = {full} is a multiple of {product}; use []"
        return
    if start >= full:
        below = [n for n in (full - 2 * ranks, full - ranks) if n > 0]
        use = either(map(str, below))
        yield f"{where}: the start {start} must be less than train.global_batch_size = {full}; use a start of {use}"
        return
    if start % ranks:
        use = either(str(n) for n in (start // ranks * ranks, (start // ranks + 1) * ranks) if 0 < n < full)
        yield f"{where}: the start {start} is not a multiple of {product}; use a start of {use}"
        return
    works = [d for d in _divisors(full - start) if d % ranks == 0]
    use = f"an increment of {_nearest(increment, works)}"
    if increment % ranks:
        yield f"{where}: the increment {increment} is not a multiple of {product}; use {use}"
    elif (full - start) % increment:
        to_grow = f"train.global_batch_size {full} - {start} = {full - start}"
        yield f"{where}: the increment {increment} does not divide {to_grow}; use {use}"


def check_checkpoints(config: RunConfig) -> Iterator[str]:
    every, keep_every = config.checkpoint.every, config.checkpoint.keep_every
    if keep_every and not every:
        yield (
            f"checkpoint.keep_every = {keep_every} needs checkpoints of such steps, but checkpoint.every = 0; "
            f"use checkpoint.every = {keep_every}, or keep_every = 0"
        )
    elif keep_every and keep_every % every:
        yield (
            f"checkpoint.keep_every = {keep_every} is not a multiple of checkpoint.every = {every}, so that some "
            f"are never written; use {_nearest_multiples(keep_every, every)}"
        )


def check_log(config: RunConfig) -> Iterator[str]:
    """Whether the folder of the run can be made."""
    where, path = f"log.dir = {show(config.log.dir)}", Path(config.log.dir)
    if not config.log.dir or "\0" in config.log.dir:
        yield f'{where} is not the name of a folder; use one that is empty or new, such as "runs/x"'
        return
    if config.log.dir.startswith("~"):
        yield f"{where} names the home of a user who is not known; use another place"
        return
    try:
        if long := [part for part in path.parts if len(part.encode()) > 255]:
            yield f"{where} has a name of {len(long[0].encode())} bytes; use at most 255"
            return
        place = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    except UnicodeEncodeError:
        yield f"{where} is not UTF-8; use another name"
        return
    if place == path and not place.is_dir():
        yield f"{where} is a file; use a folder that is empty or new"
    elif not place.is_dir():
        yield f"{where} is inside {place}, which is not a folder; use another place"
    elif not os.access(place, os.W_OK | os.X_OK):
        yield f"{where}: the folder {place} cannot be written; use another place"


def check_model(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Rules between the run file and the model. The names of the model's sizes are as in models/llama.py."""
    small = [f"model.{name} = {size} must be at least 1; use 1 or more" for name, size in _sizes(shape) if size < 1]
    if small:
        yield from small
        return
    parallel, train = config.parallel, config.train
    tp, layers = parallel.tp, len(shape.layers)
    works = _working_tp(config, shape)
    for heads, kv_heads in sorted({(layer.heads, layer.kv_heads) for layer in shape.layers}):
        if heads % kv_heads:
            use = _nearest(kv_heads, _divisors(heads))
            yield f"model.kv_heads = {kv_heads} does not divide model.heads = {heads}; use {use}"
        elif heads % tp:
            yield f"parallel.tp = {tp} does not divide model.heads = {heads}; use {_nearest(tp, works)}"
        elif kv_heads % tp and tp % kv_heads:
            rule = f"neither divides model.kv_heads = {kv_heads} nor is a multiple of it"
            yield f"parallel.tp = {tp} {rule}; use {_nearest(tp, works)}"
    for ff in sorted({layer.ff for layer in shape.layers}):
        if ff % tp:
            yield f"parallel.tp = {tp} does not divide model.ff = {ff}; use {_nearest(tp, works)}"
    pp, v = parallel.pp, parallel.virtual_stages
    if pp * v > layers:
        yield (
            f"parallel.pp {pp} x parallel.virtual_stages {v} = {pp * v} stages are more than model.layers = {layers}; "
            f"use a product of at most {layers}"
        )
    if 0 < shape.max_positions < train.seq_len:
        yield (
            f"train.seq_len = {train.seq_len} is more than the model's {shape.max_positions} learned positions; "
            f"use {shape.max_positions} or less"
        )


def check_machine(config: RunConfig, machine: Machine) -> Iterator[str]:
    """Rules between the run file and the machine."""
    if machine.platform == "cpu":
        return
    tp, per_node, precision = config.parallel.tp, machine.devices_per_node, config.train.precision
    if machine.platform == "gpu" and per_node % tp:
        yield (
            f"parallel.tp = {tp} does not divide the {per_node} devices of a node of {machine.name}: a tp group would "
            f"leave its node; use {_nearest(tp, _divisors(per_node))}"
        )
    if precision not in machine.peak_flops:
        yield (
            f"train.precision = {show(precision)} has no peak FLOP/s in the mesh {machine.name}, so no MFU; use "
            f"{either(map(show, machine.peak_flops)) if machine.peak_flops else 'a mesh.file that gives it'}"
        )


def _sizes(shape: ModelShape) -> list[tuple[str, int]]:
    """The sizes of a model that must be positive, each once."""
    names = ("heads", "kv_heads", "head_size", "ff")
    sizes = {(name, getattr(layer, name)) for layer in shape.layers for name in names}
    return [("layers", len(shape.layers)), ("width", shape.width), ("vocab_size", shape.vocab_size), *sorted(sizes)]


def _working_tp(config: RunConfig, shape: ModelShape) -> list[int]:
    """The sizes of parallel.tp that every layer and, where it is split, the sequence allow."""
    split = [size for layer in shape.layers for size in (layer.heads, layer.ff)]
    if config.parallel.sequence_parallel:
        split.append(config.train.seq_len // math.gcd(config.train.seq_len, config.parallel.cp))
    groups = {layer.kv_heads for layer in shape.layers}
    return [tp for tp in _divisors(math.gcd(*split)) if not any(kv % tp and tp % kv for kv in groups)]


def _sequence_step(parallel: Parallel) -> int:
    """What train.seq_len must be a multiple of."""
    tp = parallel.tp if parallel.sequence_parallel else 1
    return tp if parallel.cp == 1 else math.lcm(2 * parallel.cp, tp * parallel.cp)


def _sequence_rules(parallel: Parallel) -> str:
    """Why."""
    tp = f"parallel.tp = {parallel.tp} with sequence parallel" * (parallel.sequence_parallel and parallel.tp > 1)
    cp = f"parallel.cp = {parallel.cp} with two chunks a rank" * (parallel.cp > 1)
    return f"{' and '.join(filter(None, (cp, tp)))} needs"


def _divisors(n: int) -> list[int]:
    """1 alone where n is too large to look for others."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0] if n <= 10**12 else [1]
    return sorted({*low, *(n // d for d in low)})


def _nearest(given: int, works: Iterable[int]) -> str:
    """The values that work: all of up to six, else the two nearest below and above `given`."""
    works = list(works)
    if len(works) > 6:
        works = [w for w in works if w < given][-2:] + [w for w in works if w > given][:2]
    return either(map(str, works))


def _nearest_multiples(given: int, step: int, least: int = 1) -> str:
    """The multiples of `step` next to `given` that are at least `least`."""
    below = max(given, least) // step * step
    return either(str(n) for n in (below, below + step) if n >= least)
