"""The options of `parallax plan` as a `Request`; what is wrong in them, at once. No jax."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from parallax.config import (
    INT_MAX,
    SCHEDULES,
    ConfigError,
    MeshChoice,
    Model,
    Parallel,
    Train,
    either,
    keys_of,
    parse,
    show,
    suggest,
    value_problem,
)
from parallax.machine import Machine, load_machine
from parallax.model_files import load_model
from parallax.plan.job import load_shape
from parallax.plan.search import (
    Request,
    chunk_counts,
    context_sizes,
    device_counts,
    divisors,
    expert_sizes,
    layouts,
    micro_batches,
    tensor_sizes,
)
from parallax.shape import ModelShape

AXES = ("dp", "pp", "ep", "cp", "tp")
PINS = {  # keys that the search chooses, and that can be fixed: key, section
    **dict.fromkeys((*AXES, "virtual_stages", "schedule", "sequence_parallel", "zero", "context"), "parallel"),
    **dict.fromkeys(("micro_batch_size", "remat"), "train"),
}
MOST_DEVICES = 131_072


def read_request(args: argparse.Namespace) -> tuple[Request, Model, MeshChoice, list[str]]:
    """The request, the model and machine as a run file names them, and what was changed to make it possible. `devices`
    is 0 where they are to be found. Raises ConfigError with every problem of the options."""
    pins, overrides, problems = _pins(args.overrides)
    numbers, wrong = _numbers(args)
    problems += wrong
    machine = shape = None
    mesh = MeshChoice(name=args.mesh, file=_path(args.mesh_file))
    model = Model(name=args.model or "", file=_path(args.model_file), overrides=overrides)
    try:
        machine = load_machine(mesh)
        problems += _speed_problems(machine, args.precision)
    except ConfigError as error:
        problems += _as_options(error.problems)
    notes: list[str] = []
    try:
        shape = load_shape(model)
        if 0 < shape.max_positions < numbers["seq_len"] <= INT_MAX:
            model, shape = _with_positions(model, shape, numbers["seq_len"], notes)
    except ConfigError as error:
        problems += _as_options(error.problems)
    if problems or machine is None or shape is None:
        raise ConfigError(problems)
    request = Request(shape, machine, precision=args.precision, pins=pins, **numbers)
    if request.devices and (problems := [*_layout_problems(request)]):
        raise ConfigError(problems)
    return request, model, mesh, notes


def _path(name: str | None) -> str:
    return str(Path(name).expanduser().resolve()) if name else ""


def _as_options(problems: list[str]) -> list[str]:
    """Problems of run-file keys, in the words of the options."""
    names = {"model.name": "--model", "model.file": "--model-file", "mesh.name": "--mesh", "mesh.file": "--mesh-file"}
    for key, option in names.items():
        problems = [re.sub(rf"^{re.escape(key)} = ", f"{option} ", line).replace(key, option) for line in problems]
    return problems


def _with_positions(model: Model, shape: ModelShape, seq_len: int, notes: list[str]) -> tuple[Model, ModelShape]:
    """The model with as many learned positions as the sequence is long, where its Config has a key for them."""
    longer = Model(name=model.name, file=model.file, overrides={**model.overrides, "max_positions": seq_len})
    rule = f"--seq-len {seq_len} is more than the {shape.max_positions} learned positions of {shape.name}"
    try:
        made = load_model(longer)[1].shape()
    except ConfigError:
        raise ConfigError([f"{rule}; use {shape.max_positions} or less"]) from None
    notes.append(f"{rule}; planned with model.max_positions = {seq_len}")
    return longer, made


def _pins(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Fixed keys, the model's overrides, and problems."""
    pins: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    problems = []
    for word in words:
        dotted, equals, text = (part.strip() for part in word.partition("="))
        section, _, name = dotted.partition(".")
        if not equals or not name or not text:
            problems.append(f"{show(word)} is not key=value; use for example parallel.tp=4")
        elif section == "model":
            overrides[name] = parse(text)
        elif PINS.get(name) != section:
            known = [f"{home}.{key}" for key, home in PINS.items()]
            use = f"{suggest(dotted, known)}, or a key of the model: model.layers"
            problems.append(f"{dotted} cannot be fixed here; use {use}")
        elif problem := _pin_problem(section, name, value := parse(text)):
            problems.append(problem)
        else:
            pins[name] = value
    if pins.get("virtual_stages", 1) > 1 and pins.get("schedule", "interleaved") != "interleaved":
        chunks = f"parallel.virtual_stages = {pins['virtual_stages']}"
        problems.append(f"{chunks} needs parallel.schedule = interleaved; leave one of them out")
    return pins, overrides, problems


def _pin_problem(section: str, name: str, value: Any) -> str | None:
    cls = {"parallel": Parallel, "train": Train}[section]
    if name == "schedule":
        wrong = f"parallel.schedule = {show(value)} cannot be planned with; use {either(SCHEDULES)}"
        return None if value in SCHEDULES else wrong
    key = next(key for key in keys_of(cls) if key.name == name)
    return value_problem(f"{section}.{name}", value, get_type_hints(cls)[name], key.default, key.metadata["bounds"])


def _numbers(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Devices (0: to be found), sequence length, batch, headroom."""
    problems = []
    values: dict[str, Any] = {"devices": 0, "seq_len": 1, "global_batch_size": 1, "headroom": 0.0}
    for name, example in (("seq_len", 8192), ("global_batch_size", 512)):
        option, text = f"--{name.replace('_', '-')}", getattr(args, name)
        values[name] = _whole(option, text, example, problems)
    if args.devices != "auto":
        values["devices"] = _whole("--devices", args.devices, 64, problems, most=MOST_DEVICES, other="auto")
    percent = _number("--headroom", args.headroom, problems)
    if percent is not None and not 0 <= percent < 100:
        rule = "must be a percentage of at least 0 and less than 100"
        problems.append(f"--headroom {args.headroom} {rule}; use for example 8")
    values["headroom"] = (percent or 0.0) / 100
    return values, problems


def _whole(
    option: str, text: str | None, example: int, problems: list[str], most: int = INT_MAX, other: str = ""
) -> int:
    """An integer of at least 1; 1 where it is none."""
    use = f"{example}" + (f" or {other}" if other else "")
    if text is None:
        problems.append(f"{option} is missing; use for example {option} {use}")
    elif not re.fullmatch(r"-?\d+", text):
        problems.append(f"{option} {show(text)} is not an integer; use for example {use}")
    elif int(text) < 1:
        problems.append(f"{option} {text} must be at least 1; use 1 or more")
    elif int(text) > most:
        problems.append(f"{option} {text} must be at most {most}; use {most} or less")
    else:
        return int(text)
    return 1


def _number(option: str, text: str, problems: list[str]) -> float | None:
    try:
        return float(text)
    except ValueError:
        problems.append(f"{option} {show(text)} is not a number; use for example 8")
        return None


def tokens_of(text: str) -> float:
    """`2T`, `300B`, `1e12`: a number of tokens. Raises ValueError."""
    match = re.fullmatch(r"([0-9.]+(?:e[+-]?\d+)?)([KMBT]?)", text, re.IGNORECASE)
    if not match or not 0 < (count := float(match[1]) * 1000 ** " KMBT".index(match[2].upper() or " ")) < 1e18:
        raise ValueError(f"--tokens {show(text)} is not a number of tokens; use for example 2T or 300B")
    return count


def _speed_problems(machine: Machine, precision: str) -> Iterator[str]:
    if machine.efficiency is None or not machine.hbm_bytes:
        yield f"--mesh {machine.name} has no memory and speed of its own to plan with; use a machine such as h100-sxm"
    elif precision not in machine.peak_flops:
        known = either(machine.peak_flops)
        yield f"--precision {precision} has no peak FLOP/s in the mesh {machine.name}; use {known}"


# Whether any layout is legal


def _layout_problems(request: Request) -> Iterator[str]:
    """Where no layout is legal: the pin, or the number, that is in the way."""
    if next(iter(layouts(request)), None) is not None:
        yield from _chunk_problems(request)
        return
    free = dataclasses.replace(request, pins={k: v for k, v in request.pins.items() if k not in AXES})
    sizes = {"tp": tensor_sizes(free), "ep": expert_sizes(free), "cp": context_sizes(free, 1)}
    found = False
    for axis, works in sizes.items():
        pinned = request.pins.get(axis)
        if pinned is not None and pinned not in works:
            found = True
            why = {
                "tp": "must divide the devices, the model's heads and widths, and a node",
                "ep": "must divide the model's experts" if len(works) > 1 else "needs a model with experts",
                "cp": f"must cut a sequence of {request.seq_len} in two equal chunks a rank",
            }[axis]
            yield f"parallel.{axis} = {pinned} {why}; use {either(map(str, works))}"
    pp = request.pins.get("pp", 1)
    if pp > len(request.shape.layers):
        found = True
        yield f"parallel.pp = {pp} is more than the model's {len(request.shape.layers)} layers; use that or less"
    if found:
        return
    pinned = {axis: n for axis, n in request.pins.items() if axis in AXES}
    if pinned and next(iter(layouts(free)), None) is not None:
        product = " x ".join(f"{axis} {n}" for axis, n in pinned.items())
        ways = sorted({tuple(getattr(p, axis) for axis in pinned) for p in layouts(free)})
        ways.sort(key=lambda way: _far(way, pinned))
        use = either(" x ".join(f"{a} {n}" for a, n in zip(pinned, way, strict=True)) for way in ways[:3])
        yield (
            f"parallel: {product} leaves no legal layout of {request.devices} devices for a batch of "
            f"{request.global_batch_size}; use {use}"
        )
        return
    whole_node = dataclasses.replace(free, devices=request.machine.devices_per_node)
    yield (
        f"--devices {request.devices}: no product dp x pp x ep x cp x tp of it is legal for --global-batch-size "
        f"{request.global_batch_size} and {request.shape.name} (dp x ep divides the batch, pp is at most "
        f"{len(request.shape.layers)} layers, tp one of {either(map(str, tensor_sizes(whole_node)))}); use "
        f"{either(map(str, _near_devices(request)))} devices"
    )


def _chunk_problems(request: Request) -> Iterator[str]:
    """Pins that every layout rules out: chunks, micro batches, the context's way."""
    legal = [*layouts(request)]
    if "virtual_stages" in request.pins and not any(chunk_counts(request, p.pp) for p in legal):
        v, layers = request.pins["virtual_stages"], len(request.shape.layers)
        yield (
            f"parallel.virtual_stages = {v} needs a pipeline of at least 2 ranks and at most {layers} // {v} = "
            f"{layers // v}; use 1"
        )
    if "micro_batch_size" in request.pins and not any(micro_batches(request, p.dp * p.ep) for p in legal):
        micro = request.pins["micro_batch_size"]
        shares = {request.global_batch_size // (p.dp * p.ep) for p in legal}
        works = sorted({d for share in shares for d in divisors(share)}, key=lambda d: abs(d - micro))
        yield (
            f"train.micro_batch_size = {micro} does not divide any replica's share of --global-batch-size "
            f"{request.global_batch_size}; use {either(map(str, sorted(works[:4])))}"
        )


def _far(way: tuple[int, ...], pinned: Mapping[str, int]) -> float:
    return sum(abs(n / p - 1) for n, p in zip(way, pinned.values(), strict=True))


def _near_devices(request: Request) -> list[int]:
    """The nearest numbers of devices, below and above, that have a legal layout."""
    legal = lambda n: next(iter(layouts(dataclasses.replace(request, devices=n))), None) is not None
    below = next((n for n in range(request.devices - 1, max(0, request.devices - 512), -1) if legal(n)), None)
    above = next((n for n in range(request.devices + 1, request.devices + 512) if legal(n)), None)
    return [n for n in (below, above) if n] or [n for n in device_counts(request.machine) if legal(n)][-1:]
