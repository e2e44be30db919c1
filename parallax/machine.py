"""A machine: chip, node, links and compile target, read from meshes/*.toml or from the user's own file. No jax."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

from parallax.config import ConfigError, MeshChoice, build, key, keys_of, read_toml, show, suggest

MESHES = Path(__file__).parent / "meshes"
PRECISIONS = ("bfloat16", "float32")
SLOWEST, FASTEST = 1e6, 1e18  # bytes or FLOP a second: beyond, it is a mistake of units
SHARE: dict[str, float] = {"at_least": 0.001, "at_most": 1}
TARGETS: dict[str, dict[str, str | float]] = {  # the keys of [compile_target], each with an example
    "cpu": {"kind": "cpu"},
    "tpu": {"kind": "tpu", "topology": "v5p"},
    "gpu": {
        "kind": "cuda",
        "description": "NVIDIA H100 80GB HBM3",
        "capability": "9.0",
        "cores": 132.0,
        "fpus_per_core": 128.0,
        "clock_ghz": 1.98,
        "l2_bytes": 52428800.0,
        "shared_memory_per_core": 233472.0,
        "shared_memory_per_block": 232448.0,
    },
}
FORMS = {"kind": "cpu|tpu|cuda", "topology": "v5e|v5p|v6e", "capability": r"\d+\.\d+", "description": r'[^"\\]+'}
WORDS = {"kind": "cpu, tpu or cuda", "topology": "v5e, v5p or v6e", "capability": "two numbers with a point between"}
PAUSE_S: dict[str, float] = {"at_least": 0, "at_most": 1}
SPEED: dict[str, float] = {"at_least": 0, "at_most": FASTEST}


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What of the figures on paper is reached, and what small things cost: see `parallax.plan.costs` for the model."""

    matmul: float = key(MISSING, "share of the peak that large matrix products reach", **SHARE)
    attention: float = key(MISSING, "share of the peak that fused attention reaches", **SHARE)
    memory: float = key(MISSING, "share of the memory bandwidth that passes over memory reach", **SHARE)
    link: float = key(MISSING, "share of a link's bandwidth that a collective reaches", **SHARE)
    latency_inside_s: float = key(MISSING, "of a step of a collective inside a node", **PAUSE_S)
    latency_across_s: float = key(MISSING, "of a step of a collective between nodes", **PAUSE_S)
    kernel_s: float = key(MISSING, "start and tail of a kernel", **PAUSE_S)
    wave: float = key(
        MISSING, "elements of a product's output that half a wave of tiles covers", at_least=0, at_most=1e9
    )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One kind of device and its network. Bandwidths are bytes a second of one device, in one direction."""

    name: str = key(MISSING, "as [mesh] name has it")
    platform: Literal["cpu", "gpu", "tpu"] = key(MISSING, "jax's name of the platform")
    hbm_bytes: int = key(MISSING, "memory of a device; 0: it shares the host's", at_least=0, at_most=10**15)
    hbm_bytes_per_s: float = key(MISSING, "memory bandwidth; 0: not known", **SPEED)
    devices_per_node: int = key(MISSING, "devices of a host (TPU: of a virtual machine)", at_least=1, at_most=4096)
    link_inside_bytes_per_s: float = key(MISSING, "to devices of the same node; all links together", **SPEED)
    link_across_bytes_per_s: float = key(MISSING, "to other nodes (TPU: of the same slice)", **SPEED)
    link_across_slices_bytes_per_s: float = key(0.0, "TPU: to other slices; 0 elsewhere", **SPEED)
    peak_flops: dict[str, float] = key(MISSING, "dense peak by precision; none for emulated devices")  # noqa: RUF009
    efficiency: Efficiency | None = key(None, "for estimates; none for emulated devices")  # noqa: RUF009
    compile_target: dict[str, str | float] = key(MISSING, "kind, and the TPU topology or what XLA asks of a GPU")  # noqa: RUF009


def machine_names() -> list[str]:
    """The machines that come with parallax."""
    return sorted(path.stem for path in MESHES.glob("*.toml"))


def load_machine(choice: MeshChoice) -> Machine:
    """The machine of a run file's [mesh]. Raises ConfigError with every problem of its file."""
    path = Path(choice.file) if choice.file else MESHES / f"{choice.name}.toml"
    if not choice.file and choice.name not in machine_names():
        use = suggest(choice.name, machine_names())
        raise ConfigError([f"mesh.name = {show(choice.name)} is not a machine of meshes/; use {use} or a mesh.file"])
    table, unreached = read_toml(path), {}
    if isinstance(table.get("efficiency"), dict):
        table["efficiency"], unreached = build(Efficiency, table["efficiency"], f"{path}: efficiency.")
    machine, problems = build(Machine, table, f"{path}: ")
    lines = [line.replace(f"use {path}: ", "use ") for line in (*problems.values(), *unreached.values())]
    rules = [*_speed_problems(machine), *_peak_problems(machine.peak_flops)]
    if not {f"{path}: platform", f"{path}: compile_target"} & problems.keys():
        rules += _target_problems(machine.platform, machine.compile_target)
    lines += [f"{path}: {problem}" for problem in rules]
    if machine.peak_flops and machine.efficiency is None and "efficiency" not in table:
        lines.append(f"{path}: [efficiency] is missing; copy that of the nearest machine in meshes/")
    if lines:
        raise ConfigError(lines)
    return machine


def _target_problems(platform: str, target: dict[str, Any]) -> Iterator[str]:
    """Of [compile_target], which has other keys for each platform."""
    usual = TARGETS[platform]
    for name, value in target.items():
        if name not in usual:
            yield f"compile_target.{name} = {show(value)} is not a key of a {platform}'s; use {suggest(name, usual)}"
    for name, example in usual.items():
        said, number = f"compile_target.{name}", isinstance(example, float)
        if name not in target:
            yield f"{said} is missing; copy that of the nearest machine in meshes/"
            continue
        value = target[name]
        if number and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**40):
            yield f"{said} = {show(value)} must be a number greater than 0; use for example {example:g}"
        elif not number and not (isinstance(value, str) and re.fullmatch(FORMS.get(name, ".+"), value)):
            yield f"{said} = {show(value)} must be {WORDS.get(name, 'a text')}; use for example {show(example)}"


def _speed_problems(machine: Machine) -> list[str]:
    speeds = {f.name: getattr(machine, f.name) for f in keys_of(Machine) if f.name.endswith("_per_s")}
    return [
        f"{name} = {show(speed)} must be 0, for not known, or at least {SLOWEST}; use {SLOWEST} or more"
        for name, speed in speeds.items()
        if 0 < speed < SLOWEST
    ]


def _peak_problems(peak_flops: dict[str, Any]) -> list[str]:
    lines = []
    for precision, flops in peak_flops.items():
        if precision not in PRECISIONS:
            use = suggest(precision, PRECISIONS)
            lines.append(f"peak_flops.{precision} = {show(flops)} is not a known precision; use {use}")
        elif flops <= 0:
            lines.append(f"peak_flops.{precision} = {show(flops)} must be greater than 0; leave it out if not known")
        elif not SLOWEST <= flops <= FASTEST:
            rule = f"must be at least {SLOWEST} and at most {FASTEST}"
            use = f"{SLOWEST} or more" if flops < SLOWEST else f"{FASTEST} or less"
            lines.append(f"peak_flops.{precision} = {show(flops)} {rule}; use {use}")
    return lines
