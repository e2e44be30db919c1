"""Reads the text of a compiled program: its loops, and its collectives by mesh axis. No jax.

Axes are not guessed from names: a replica group lists partition numbers, a partition number is a position in the mesh,
and the axes along which a group's members differ are the axes that the collective spans.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s32": 4, "u32": 4, "f32": 4, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\((.*)$")
_TPU_SCATTER = re.compile(r"= (.*?) fusion\(.*calls=%?(all-reduce-scatter[\w.\-]*)")
_WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"(?:calls|to_apply|called_computations|branch_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)\}?")
_EXPLICIT = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclass(frozen=True)
class Loop:
    """A while loop; `trips` is None where it depends on data (the pipeline's loops of one turn or none)."""

    body: str
    trips: int | None


@dataclass(frozen=True)
class Collective:
    """One instruction. `bytes` is the size of its result on a device; `loops` are those around it, outermost first."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    shapes: tuple[tuple[int, ...], ...]
    loops: tuple[Loop, ...]
    name: str  # the jax operation it came from

    @property
    def trips(self) -> int:
        """Times it runs in a step, loops that depend on data counted as one turn."""
        return math.prod(loop.trips or 1 for loop in self.loops)


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """The collectives of a compiled program's text, for a mesh of these axis sizes, slowest axis first.

    A collective within one device (a group of one) is left out."""
    program = _Program(text)
    found = []
    for line, around in program.walk():
        match = _COLLECTIVE.search(line)
        if scatter := _TPU_SCATTER.search(line):  # TPU: a fusion of an all-reduce and the slice that is kept
            inner = next(filter(None, map(_COLLECTIVE.search, program.lines[scatter.group(2)])))
            result, kind, start, rest = scatter.group(1), "reduce-scatter", None, inner.group(4)
        elif match:
            result, kind, start, rest = match.groups()
        else:
            continue
        axes = _axes(_groups(rest, math.prod(mesh.values())), mesh)
        if not axes:
            continue
        shapes = [(dtype, _numbers(dims)) for dtype, dims in _SHAPE.findall(result)]
        if start and kind != "all-reduce":  # a start op's result holds its operand too
            shapes = shapes[len(shapes) // 2 :] if kind != "collective-permute" else shapes[1:2]
        name = re.search(r'op_name="([^"]*)"', line)
        found.append(
            Collective(
                kind,
                axes,
                sum(_BYTES.get(dtype, 0) * math.prod(dims) for dtype, dims in shapes),
                tuple(dims for _, dims in shapes),
                around,
                name.group(1) if name else "",
            )
        )
    return found


class _Program:
    """The lines of each computation, and a walk through what the entry computation reaches."""

    def __init__(self, text: str):
        self.lines: dict[str, list[str]] = {}
        self.entry = name = ""
        for line in text.splitlines():
            if match := _COMPUTATION.match(line):
                name = match.group(2)
                self.lines[name] = []
                self.entry = name if match.group(1) else self.entry
            elif name and line.startswith("  "):
                self.lines[name].append(line)

    def walk(self) -> Iterator[tuple[str, tuple[Loop, ...]]]:
        """(line, loops around it) of every instruction that runs"""
        yield from self._visit(self.entry, ())

    def _visit(self, computation: str, around: tuple[Loop, ...]) -> Iterator[tuple[str, tuple[Loop, ...]]]:
        for line in self.lines.get(computation, ()):
            yield line, around
            if loop := self._loop(line):
                yield from self._visit(loop.body, (*around, loop))
            elif (called := _CALLED.search(line)) and " fusion(" not in line:
                for inner in called.group(1).replace("%", "").split(", "):
                    yield from self._visit(inner, around)

    def _loop(self, line: str) -> Loop | None:
        match = _WHILE.search(line)
        if not match:
            return None
        if trips := _TRIPS.search(line):
            return Loop(match.group(2), int(trips.group(1)))
        condition = "\n".join(self.lines.get(match.group(1), ()))  # where nothing is noted: i < constant
        bounds = re.findall(r"s32\[\]\S* constant\((\d+)\)", condition)
        return Loop(match.group(2), int(bounds[0]) if len(bounds) == 1 else None)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _groups(text: str, devices: int) -> np.ndarray:
    """Groups of partition numbers, one a row; a permute's source and target pairs likewise."""
    if match := _IOTA.search(text):
        shape, source, order = (_numbers(part or "") for part in match.groups())
        ids = np.arange(math.prod(source)).reshape(source)
        return (ids.transpose(order) if order else ids).reshape(shape)
    if match := _EXPLICIT.search(text):
        return np.array([_numbers(group) for group in re.findall(r"\{([\d,]+)\}", match.group(1))])
    return np.arange(devices)[None]


def _axes(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
    places = np.unravel_index(groups, tuple(mesh.values()))
    return tuple(axis for axis, place in zip(mesh, places, strict=True) if (place != place[:, :1]).any())
