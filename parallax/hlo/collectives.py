"""The collectives of a compiled program by mesh axis. No jax.

Axes are not guessed from names: a replica group lists partition numbers, a partition number is a position in the mesh,
and the axes along which a group's members differ are the axes that the collective spans.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parallax.hlo.program import Computation, Instruction, Loop, Program

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_EXPLICIT = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]+)\] \{([^}]*)\}")
_SIZE = re.compile(r"([^=,]+)=(\d+)")
_PART = re.compile(r"([^:,]+)(?::\((\d+)\)(\d+))?")  # an axis, or of an axis what comes before the part and its size
_ALL = re.compile(r"replica_groups=\{\}|^(?!.*(?:replica_groups|source_target_pairs)=)", re.DOTALL)


@dataclass(frozen=True)
class Collective:
    """One instruction. `bytes` is the size of its result on a device; `loops` are those around it, outermost first;
    `groups` are the partition numbers of each group, of a permute the pairs (from, to)."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    shapes: tuple[tuple[int, ...], ...]
    loops: tuple[Loop, ...]
    name: str  # the jax operation it came from
    instruction: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def trips(self) -> int:
        """Times it runs in a step, loops that depend on data counted as one turn."""
        return math.prod(loop.trips or 1 for loop in self.loops)


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """The collectives of a compiled program's text, for a mesh of these axis sizes, slowest axis first.

    A collective within one device (a group of one) is left out."""
    program = Program(text)
    found = (collective(program, *place, mesh) for place in program.walk())
    return [one for one in found if one]


def collective(
    program: Program,
    computation: Computation,
    instruction: Instruction,
    loops: tuple[Loop, ...],
    mesh: Mapping[str, int],
) -> Collective | None:
    """The collective that an instruction is, starts, or holds (TPU: an all-reduce fused with the slice that is kept);
    None if it is none, or stays within each device. The instruction that waits for a `*-start` is none."""
    kind, inner, arrays = instruction.op.removesuffix("-start"), instruction, instruction.arrays
    if kind != instruction.op:  # what a start returns holds its operands too
        done = computation.done(instruction)
        arrays = done.arrays if done else arrays
    if kind in ("fusion", "async"):
        inner = next((i for _, i in program.within(instruction) if i.op in KINDS), instruction)
        kind = inner.op
        if kind == "all-reduce" and sum(array.bytes for array in arrays) < inner.bytes:
            kind = "reduce-scatter"
    if kind not in KINDS:
        return None
    groups = _groups(inner.attributes, math.prod(mesh.values()))
    axes = _axes(groups, mesh)
    if not axes:
        return None
    return Collective(
        kind=kind,
        axes=axes,
        bytes=sum(array.bytes for array in arrays),
        shapes=tuple(array.dims for array in arrays),
        loops=loops,
        name=instruction.op_name,
        instruction=instruction.name,
        groups=tuple(map(tuple, groups.tolist())),
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _groups(text: str, devices: int) -> np.ndarray:
    """Groups of partition numbers, one a row; a permute's source and target pairs likewise. Raises ValueError where
    they are written in a form that is not known."""
    if match := _IOTA.search(text):
        shape, source, order = (_numbers(part or "") for part in match.groups())
        ids = np.arange(math.prod(source)).reshape(source)
        return (ids.transpose(order) if order else ids).reshape(shape)
    if match := _EXPLICIT.search(text):
        groups = [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", match.group(1))]
        if len({len(group) for group in groups}) == 1:
            return np.array(groups)
    elif match := _MESH.search(text):
        groups = _along(_SIZE.findall(match.group(1)), _PART.findall(match.group(2)))
        if groups.size == devices:
            return groups
    elif _ALL.search(text):
        return np.arange(devices)[None]
    start = re.search("replica_groups=|source_target_pairs=", text)
    raise ValueError(f"groups of devices in an unknown form: {text[start.start() if start else 0 :][:100]}")


def _along(mesh: list[tuple[str, str]], parts: list[tuple[str, str, str]]) -> np.ndarray:
    """The groups that span these parts of a mesh's axes; devices are counted with the last axis fastest."""
    sizes: list[int] = []  # of the mesh, with each axis cut before and after every part that is spanned
    spanned: list[int] = []
    for name, size in mesh:
        whole, at = int(size), 1
        own = sorted((int(before or 1), int(part or size)) for of, before, part in parts if of == name)
        for before, part in own:
            sizes += [before // at, part]
            spanned.append(len(sizes) - 1)
            at = before * part
        sizes.append(whole // at)
    rest = [axis for axis in range(len(sizes)) if axis not in spanned]
    if len(spanned) < len(parts):
        return np.empty((0, 0), int)  # an axis that the mesh has not
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(rest + spanned).reshape(-1, math.prod(sizes[axis] for axis in spanned))


def _axes(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
    places = np.unravel_index(groups, tuple(mesh.values()))
    return tuple(axis for axis, place in zip(mesh, places, strict=True) if (place != place[:, :1]).any())
