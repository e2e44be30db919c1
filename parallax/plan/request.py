"""The options of `parallax plan` as a `Request`; what is wrong in them, at once. No jax."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, get_type_hints

from parallax.config import (
    INT_MAX,
    SCHEDULES,
    ConfigError,
    Log,
    MeshChoice,
    Model,
    Parallel,
    RunConfig,
    Train,
    brief,
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
    MOST_DEVICES_FOUND,
    Request,
    device_counts,
    divisors,
    expert_sizes,
    is_legal,
    layouts,
    tensor_sizes,
)
from parallax.rules import check_model
from parallax.schedule.op import MAX_OPS
from parallax.shape import ModelShape

AXES = ("dp", "pp", "ep", "cp", "tp")
PINS = {  # keys that the search chooses, and that can be fixed: key, section
    **dict.fromkeys((*AXES, "virtual_stages", "schedule", "sequence_parallel", "zero", "context"), "parallel"),
    **dict.fromkeys(("micro_batch_size", "remat"), "train"),
}
SIZES = (*AXES, "virtual_stages", "micro_batch_size")  # of these, numbers that a layout is made of
MOST_DEVICES = 131_072
MOST_TRIED = 64  # values, where those that work are to be named


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
        problems += _shape_problems(model, shape)
        if 0 < shape.max_positions < numbers["seq_len"] <= INT_MAX:
            model, shape = _with_positions(model, shape, numbers["seq_len"], notes)
    except ConfigError as error:
        problems += _as_options(error.problems)
    if problems or machine is None or shape is None:
        raise ConfigError(problems)
    request = Request(shape, machine, precision=args.precision, pins=pins, **numbers)
    if problems := [*_layout_problems(request)]:
        raise ConfigError(problems)
    return request, model, mesh, notes


def _path(name: str | None) -> str:
    return str(Path(name).expanduser().resolve()) if name else ""


def _shape_problems(model: Model, shape: ModelShape) -> Iterator[str]:
    """What is wrong with the model itself, before it is laid out."""
    train = Train(steps=1, seq_len=1, global_batch_size=1)
    yield from check_model(RunConfig(model=model, train=train, log=Log(dir="runs")), shape)


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
        elif dotted in ("model.name", "model.file"):
            option = "--model" if name == "name" else "--model-file"
            problems.append(f"{dotted} = {brief(text)} is given by an option; use {option} {brief(text)}")
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
        problems.append(f"--headroom {cut(args.headroom)} {rule}; use for example 8")
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
        problems.append(f"{option} {brief(text)} is not an integer; use for example {use}")
    elif text.startswith("-") or not text.strip("0"):
        problems.append(f"{option} {cut(text)} must be at least 1; use 1 or more")
    elif len(text.lstrip("0")) > len(str(most)) or int(text) > most:  # Python reads at most 4,300 digits
        problems.append(f"{option} {cut(text)} must be at most {most}; use {most} or less")
    else:
        return int(text)
    return 1


def cut(text: str) -> str:
    """An option's value in a message, its middle left out where it is long."""
    return brief(text)[1:-1]


def _number(option: str, text: str, problems: list[str]) -> float | None:
    try:
        return float(text)
    except ValueError:
        problems.append(f"{option} {brief(text)} is not a number; use for example 8")
        return None


def tokens_of(text: str) -> float:
    """`2T`, `300B`, `1e12`: a number of tokens. Raises ValueError."""
    match = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)([KMBT]?)", text, re.IGNORECASE)
    if not match or not 0 < (count := float(match[1]) * 1000 ** " KMBT".index(match[2].upper() or " ")) < 1e18:
        raise ValueError(f"--tokens {brief(text)} is not a number of tokens; use for example 2T or 300B")
    return count


def _speed_problems(machine: Machine, precision: str) -> Iterator[str]:
    if machine.efficiency is None or not machine.hbm_bytes:
        yield f"--mesh {machine.name} has no memory and speed of its own to plan with; use a machine such as h100-sxm"
    elif precision not in machine.peak_flops:
        known = either(machine.peak_flops) if machine.peak_flops else "a --mesh-file that gives it"
        yield f"--precision {precision} has no peak FLOP/s in the mesh {machine.name}; use {known}"


# Whether any layout is legal


def _layout_problems(request: Request) -> Iterator[str]:
    """Where no layout is legal: each pin that no number of devices allows, the number of devices where it allows
    nothing, else each pin that these devices do not allow, else the pins together. What is named for use was tried."""
    if is_legal(request):
        return
    pinned = [key for key in SIZES if key in request.pins]
    wrong = [key for key in pinned if not is_legal(_alone(request, key, devices=0))]
    possible = is_legal(_alone(request))
    if not wrong and possible and request.devices:
        wrong = [key for key in pinned if not is_legal(_alone(request, key))]
    for key in wrong:
        works = _that_work(_alone(request, key), key) or _that_work(_alone(request, key, devices=0), key)
        use = works or "another batch, or another sequence"
        yield f"{PINS[key]}.{key} = {request.pins[key]} {_rule(request, key)}; use {use}"
    if not possible:
        yield _devices_problem(request)
    elif not wrong:
        yield _together_problem(request, pinned)


def _alone(request: Request, *keys: str, **changes: Any) -> Request:
    """The request with the pins of those keys alone, beside those that are no sizes."""
    pins = {key: value for key, value in request.pins.items() if key in keys or key not in SIZES}
    return dataclasses.replace(request, pins=pins, **changes)


def _devices_problem(request: Request) -> str:
    batch, layers = f"--global-batch-size {request.global_batch_size}", len(request.shape.layers)
    near = _near_devices(request) or _near_devices(_alone(request))
    use = f"{either(map(str, near))} devices" if near else "another batch"
    tps = either(map(str, tensor_sizes(_alone(request, devices=0))))
    many = f", microbatches x stages are at most {MAX_OPS}" if request.global_batch_size > MAX_OPS else ""
    return (
        f"--devices {request.devices or 'auto'}: no product dp x pp x ep x cp x tp of it is legal for {batch}, "
        f"--seq-len {request.seq_len} and {request.shape.name} (dp x ep divides the batch, pp is at most {layers} "
        f"layers, tp one of {tps}{many}); use {use}"
    )


def _together_problem(request: Request, pinned: Sequence[str]) -> str:
    given = " x ".join(f"{key} {request.pins[key]}" for key in pinned)
    of = f"{request.devices} devices" if request.devices else f"any number of devices up to {MOST_DEVICES_FOUND:,}"
    works = {key: _that_work(request, key) for key in pinned}
    ways = [f"{key} {sizes}" for key, sizes in works.items() if sizes] or _nearest_ways(request)
    use = f"; use {either(ways)}" if ways else "; leave one of them out"
    return f"parallel: {given} leaves no legal layout of {of} for a batch of {request.global_batch_size}{use}"


def _rule(request: Request, key: str) -> str:
    """What a pinned size does not, if no layout has it."""
    size, shape, layers = request.pins[key], request.shape, len(request.shape.layers)
    batch = f"--global-batch-size {request.global_batch_size}"
    of = f" of {request.devices} devices" if request.devices else ""
    if key == "tp":
        if size in tensor_sizes(dataclasses.replace(request, pins={"sequence_parallel": False})):
            return f"must divide a sequence of {request.seq_len}, as sequence parallelism cuts it"
        return "must divide the devices, the model's heads and widths, and a node"
    if key == "ep":
        experts = any(kind.experts for kind in shape.layers)
        return f"must divide the model's experts, the devices and {batch}" if experts else "needs a model with experts"
    if key == "cp":
        return f"must cut a sequence of {request.seq_len} in two equal chunks a rank, and divide the devices"
    if key == "pp" and size > layers:
        return f"is more than the model's {layers} layers"
    if key == "virtual_stages":
        return f"needs a pipeline of at least 2 ranks and at most {layers} layers // 2 = {layers // 2} chunks on each"
    if key == "micro_batch_size" and request.global_batch_size % size:
        return f"does not divide any replica's share of {batch}"
    return f"leaves no legal layout{of} for {batch}"


def _that_work(request: Request, key: str) -> str:
    """Values of one pinned size that are legal with the other pins, the nearest few; empty where none was found."""
    layers, given, batch = len(request.shape.layers), request.pins[key], request.global_batch_size
    free = dataclasses.replace(request, pins={k: v for k, v in request.pins.items() if k != key})
    sizes = {
        "tp": lambda: tensor_sizes(free),
        "ep": lambda: expert_sizes(free),
        "cp": lambda: divisors(request.seq_len),
        "pp": lambda: range(1, layers + 1),
        "dp": lambda: divisors(batch),
        "virtual_stages": lambda: range(1, max(1, layers // 2) + 1),
        "micro_batch_size": lambda: divisors(batch),
    }[key]()
    sizes = [n for n in sizes if key not in AXES or request.devices % n == 0]
    nearest = sorted(sizes, key=lambda n: abs(math.log(n / given)))[:MOST_TRIED]
    works = (n for n in nearest if is_legal(dataclasses.replace(request, pins={**request.pins, key: n})))
    found = sorted(islice(works, 4))
    return either(map(str, found)) if found else ""


def _nearest_ways(request: Request) -> list[str]:
    """Up to three changes of the pinned axes, the nearest, that leave a legal layout."""
    axes = [axis for axis in AXES if axis in request.pins]
    free = dataclasses.replace(request, pins={k: v for k, v in request.pins.items() if k not in AXES})
    counts = [request.devices] if request.devices else device_counts(free)
    ways = {tuple(getattr(p, a) for a in axes) for n in counts for p in layouts(dataclasses.replace(free, devices=n))}
    far = lambda way: sum(abs(n / request.pins[axis] - 1) for axis, n in zip(axes, way, strict=True))
    nearest = [dict(zip(axes, way, strict=True)) for way in sorted(ways, key=far)[:MOST_TRIED]]
    works = (way for way in nearest if is_legal(dataclasses.replace(request, pins={**request.pins, **way})))
    return [" x ".join(f"{axis} {n}" for axis, n in way.items()) for way in islice(works, 3)]


def _near_devices(request: Request) -> list[int]:
    """The nearest numbers of devices, below and above, that have a legal layout."""
    if not request.devices:
        return []
    legal = lambda n: is_legal(dataclasses.replace(request, devices=n))
    below = next((n for n in range(request.devices - 1, max(0, request.devices - 512), -1) if legal(n)), None)
    above = next((n for n in range(request.devices + 1, request.devices + 512) if legal(n)), None)
    near = [n for n in (below, above) if n]
    return near or [n for n in device_counts(request) if legal(n)][-1:]
