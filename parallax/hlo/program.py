"""The instructions of a compiled program's text, computation by computation, in the order of its schedule. No jax."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_END = re.compile(r"^\}(, execution_thread=\S+)?$")
_INSTRUCTION = re.compile(r"^  (ROOT )?%?([\w.\-]+) = ")
_OP = re.compile(r" ([\w\-]+)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{[^{}]*?(?:S\((\d+)\)[^{}]*)?\})?")
_OPERAND = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"(?:calls|to_apply|called_computations|branch_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)\}?")
_LOOP = re.compile(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BOUND = re.compile(r"^\s*(\d+)\s*$")


@dataclass(frozen=True)
class Array:
    """A result on one device. `space` is the memory that it is in: 0 is the device's main memory."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        if self.dtype == "pred":
            return self.elements
        bits = re.search(r"\d+", self.dtype)  # f8e4m3fn: the first number; a token has none
        return self.elements * int(bits.group()) // 8 if bits else 0


@dataclass(frozen=True)
class Instruction:
    """One line of a computation. `arrays` are those of its result, from left to right where that is a tuple;
    `arguments` is what stands in its parentheses, `attributes` what follows."""

    name: str
    op: str
    arrays: tuple[Array, ...]
    arguments: str
    attributes: str
    root: bool

    @cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(_OPERAND.findall(self.arguments))

    @cached_property
    def called(self) -> tuple[str, ...]:
        """The computations that it calls, but for a loop's."""
        match = _CALLED.search(self.attributes)
        return tuple(match.group(1).replace("%", "").split(", ")) if match else ()

    @cached_property
    def op_name(self) -> str:
        """The jax operation that it came from, with the scopes around that; "" where the compiler made it."""
        match = _OP_NAME.search(self.attributes)
        return match.group(1) if match else ""

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)


@dataclass(frozen=True)
class Loop:
    """A while loop; `trips` is None where it depends on data (the pipeline's loops of one turn or none)."""

    body: str
    trips: int | None
    name: str = ""  # the jax operation that it came from


class Computation:
    """Instructions in their order, and by name."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.root), self.instructions[-1])

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(i.arguments): i for i in self.instructions if i.op == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Of each name, the instructions that have it as an operand."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.by_name}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return users

    def done(self, start: Instruction) -> Instruction | None:
        """The instruction that waits for a `*-start`."""
        return next((user for user in self.users[start.name] if user.op.endswith("-done")), None)


class Program:
    """The computations of a program's text, and a walk through what the entry computation reaches."""

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        inside: Computation | None = None
        pending: list[str] = []  # the lines of an instruction: its attributes may hold line ends
        for line in text.splitlines():
            if _INSTRUCTION.match(line) or _END.match(line) or _COMPUTATION.match(line):
                if pending and inside is not None:
                    inside.instructions.append(_instruction("\n".join(pending)))
                pending = []
            if _INSTRUCTION.match(line):
                pending = [line]
            elif _END.match(line):
                inside = None
            elif inside is None and (header := _COMPUTATION.match(line)):
                inside = self.computations[header.group(2)] = Computation()
                self.entry = header.group(2) if header.group(1) else self.entry
            elif pending:
                pending.append(line)

    def walk(self) -> Iterator[tuple[Computation, Instruction, tuple[Loop, ...]]]:
        """(its computation, instruction, loops around it, outermost first) of every instruction that runs"""
        yield from self._visit(self.entry, ())

    def _visit(
        self, name: str, around: tuple[Loop, ...]
    ) -> Iterator[tuple[Computation, Instruction, tuple[Loop, ...]]]:
        computation = self.computations.get(name) or Computation()
        for instruction in computation.instructions:
            yield computation, instruction, around
            if loop := self.loop(instruction):
                yield from self._visit(loop.body, (*around, loop))
            elif instruction.op in ("call", "conditional"):
                for inner in instruction.called:
                    yield from self._visit(inner, around)

    def loop(self, instruction: Instruction) -> Loop | None:
        match = _LOOP.search(instruction.attributes) if instruction.op == "while" else None
        if not match:
            return None
        condition, body = match.groups()
        if trips := _TRIPS.search(instruction.attributes):
            return Loop(body, int(trips.group(1)), instruction.op_name)
        constants = [  # where nothing is noted: i < constant
            int(bound.group(1))
            for i in self.computations[condition].instructions
            if i.op == "constant" and i.arrays[0] == Array("s32", ()) and (bound := _BOUND.match(i.arguments))
        ]
        return Loop(body, constants[0] if len(constants) == 1 else None, instruction.op_name)

    def within(self, fusion: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """What a fusion holds, and the fusions in it hold."""
        for name in fusion.called:
            computation = self.computations.get(name) or Computation()
            for instruction in computation.instructions:
                yield computation, instruction
                if instruction.op == "fusion":
                    yield from self.within(instruction)


def _instruction(text: str) -> Instruction:
    head = _INSTRUCTION.match(text)
    assert head
    start = head.end()
    end = _closing(text, start) if text[start] == "(" else text.index(" ", start)
    op = _OP.match(text, end)
    assert op, f"not an instruction: {text[:200]}"
    close = _closing(text, op.end() - 1)
    arrays = tuple(
        Array(dtype, tuple(int(n) for n in dims.split(",") if n), int(space or 0))
        for dtype, dims, space in _ARRAY.findall(text, start, end)
    )
    arguments = text[op.end() : close - 1]
    return Instruction(head.group(2), op.group(1), arrays, arguments, text[close:], bool(head.group(1)))


def _closing(text: str, start: int) -> int:
    """The place after the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r'"(?:[^"\\]|\\.)*"|[()]').finditer(text, start):
        depth += {"(": 1, ")": -1}.get(match.group(), 0)
        if not depth:
            return match.end()
    raise ValueError(f"a parenthesis stays open: {text[start : start + 200]}")
