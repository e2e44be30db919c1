"""A machine: chip, node, links and compile target, read from meshes/*.toml or from the user's own file. No jax."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

from parallax.config import ConfigError, MeshChoice, build, key, read_toml, show, suggest

MESHES = Path(__file__).parent / "meshes"
PRECISIONS = ("bfloat16", "float32")


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What of the figures on paper is reached, and what small things cost: see `parallax.plan.costs` for the model."""

    matmul: float = key(MISSING, "share of the peak that large matrix products reach", above=0, at_most=1)
    attention: float = key(MISSING, "share of the peak that fused attention reaches", above=0, at_most=1)
    memory: float = key(MISSING, "share of the memory bandwidth that passes over memory reach", above=0, at_most=1)
    link: float = key(MISSING, "share of a link's bandwidth that a collective reaches", above=0, at_most=1)
    latency_inside_s: float = key(MISSING, "of a step of a collective inside a node", at_least=0)
    latency_across_s: float = key(MISSING, "of a step of a collective between nodes", at_least=0)
    kernel_s: float = key(MISSING, "start and tail of a kernel", at_least=0)
    wave: float = key(MISSING, "elements of a product's output that half a wave of tiles covers", at_least=0)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One kind of device and its network. Bandwidths are bytes a second of one device, in one direction."""

    name: str = key(MISSING, "as [mesh] name has it")
    platform: Literal["cpu", "gpu", "tpu"] = key(MISSING, "jax's name of the platform")
    hbm_bytes: int = key(MISSING, "memory of a device; 0: it shares the host's", at_least=0)
    hbm_bytes_per_s: float = key(MISSING, "memory bandwidth; 0: not known", at_least=0)
    devices_per_node: int = key(MISSING, "devices of a host (TPU: of a virtual machine)", at_least=1)
    link_inside_bytes_per_s: float = key(MISSING, "to devices of the same node; all links together", at_least=0)
    link_across_bytes_per_s: float = key(MISSING, "to other nodes (TPU: of the same slice)", at_least=0)
    link_across_slices_bytes_per_s: float = key(0.0, "TPU: to other slices; 0 elsewhere", at_least=0)
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
    lines += [f"{path}: {problem}" for problem in _peak_problems(machine.peak_flops)]
    if machine.peak_flops and machine.efficiency is None and "efficiency" not in table:
        lines.append(f"{path}: [efficiency] is missing; copy that of the nearest machine in meshes/")
    if lines:
        raise ConfigError(lines)
    return machine


def _peak_problems(peak_flops: dict[str, Any]) -> list[str]:
    lines = []
    for precision, flops in peak_flops.items():
        if precision not in PRECISIONS:
            use = suggest(precision, PRECISIONS)
            lines.append(f"peak_flops.{precision} = {show(flops)} is not a known precision; use {use}")
        elif flops <= 0:
            lines.append(f"peak_flops.{precision} = {show(flops)} must be greater than 0; leave it out if not known")
    return lines
