"""The largest buffers of a compiled program, by the source line that made them: from XLA's dumped buffer assignment.
No jax."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (?:color \d+, )?(?:page \d+, )?(.*):$")
_PARAMETER = re.compile(r"parameter (\d+), shape \|(.*?)\|")
_VALUE = re.compile(
    r"^ value: <\d+ (\S+?)(?:\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\w+\[[\d,]*\])"
)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_ARGUMENT = re.compile(r" parameter\((\d+)\).*op_name=\"([^\"]*)\"")
_ROW = re.compile(r"^(\d+) (?:\"(.*)\"|\{(.*)\})$")


@dataclass(frozen=True)
class Buffer:
    """`what` is an argument of the step or a temporary; `source` is `file.py:line function`, where that is known."""

    size_bytes: int
    shape: str
    name: str
    what: str
    source: str


def largest_buffers(assignment: str, program: str, count: int = 10) -> list[Buffer]:
    """Of the text of a buffer assignment and of its program, the largest first. Values that share a place at different
    times are one buffer, which goes by the value that is made first and fills it."""
    sources = _Sources(program)
    found: dict[tuple[int, int, int], Buffer] = {}
    allocation, what = -1, ""
    for line in assignment.splitlines():
        if match := _ALLOCATION.match(line):
            allocation += 1
            size, kind = int(match[1]), match[2]
            parameter = _PARAMETER.match(kind)
            what = f"argument {parameter[1]}" if parameter else "temporary"
            if parameter:
                name = sources.argument(int(parameter[1]))
                found[allocation, 0, size] = Buffer(size, parameter[2], name, what, "")
        elif (match := _VALUE.match(line)) and what == "temporary":
            name, size, offset, shape = match.groups()
            key = allocation, int(offset), int(size)
            if key not in found:
                found[key] = Buffer(int(size), shape, name, what, sources.of(name))
        elif line.startswith("Total bytes"):
            break
    return sorted(found.values(), key=lambda buffer: -buffer.size_bytes)[:count]


class _Sources:
    """Where the instructions of a program come from: its tables of files, functions, locations and stack frames."""

    def __init__(self, program: str):
        self._tables: dict[str, dict[int, str]] = {}
        self._lines: dict[str, str] = {}
        self._arguments: dict[int, str] = {}
        entry = False
        table: dict[int, str] | None = None
        for line in program.splitlines():
            if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                table = self._tables[line] = {}
            elif table is not None and (match := _ROW.match(line)):
                table[int(match[1])] = match[2] if match[2] is not None else match[3]
            else:
                table = None if line else table
                entry = line.startswith("ENTRY") or (entry and line != "}")
                if match := _INSTRUCTION.match(line):
                    self._lines[match[1]] = line
                if entry and (match := _ARGUMENT.search(line)):
                    self._arguments[int(match[1])] = re.sub(r"[\[\]'\\]+", ".", match[2]).strip(".")

    def argument(self, number: int) -> str:
        """`state.weights.blocks.down.kernel`"""
        return self._arguments.get(number, f"argument {number}")

    def of(self, name: str) -> str:
        """`pipeline.py:120 _Rank._begin`, or the name of jax's operation, or nothing."""
        line = self._lines.get(name, "")
        frame = re.search(r"stack_frame_id=(\d+)", line)
        if frame and (place := self._place(int(frame[1]))):
            return place
        operation = re.search(r'op_name="([^"]*)"', line)
        return operation[1] if operation else ""

    def _place(self, frame: int) -> str:
        location = self._numbers("StackFrames", frame).get("file_location_id", 0)
        fields = self._numbers("FileLocations", location)
        file = self._tables.get("FileNames", {}).get(fields.get("file_name_id", 0), "")
        function = self._tables.get("FunctionNames", {}).get(fields.get("function_name_id", 0), "")
        function = function.replace(".<locals>", "").removeprefix("_Rank.")
        return f"{PurePath(file).name}:{fields['line']} {function}" if file else ""

    def _numbers(self, table: str, key: int) -> dict[str, int]:
        return {name: int(n) for name, n in re.findall(r"(\w+)=(\d+)", self._tables.get(table, {}).get(key, ""))}
