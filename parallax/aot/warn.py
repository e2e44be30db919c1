"""What a compiled step does that it should not: one line each, with the operation and its bytes. No jax.

Found by the form of the program, so that a finding is a reason to look and not yet a fault; and what is hidden inside a
library's call is not seen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from parallax.aot.roofline import Roofline, in_one_node
from parallax.aot.timeline import Event, Timeline
from parallax.hlo import Array, Collective, Instruction, Program
from parallax.hlo.program import Computation
from parallax.machine import Machine
from parallax.text import seconds

SMALL = 1 << 16  # bytes: scalars (loss, norm) may cross any axes, and of norm weights the latency counts
AGAIN = 0.03  # of the step: less is not worth a line
_GRADIENTS = {"dp", "ep", "cp"}  # replicas: gradients are summed over them
_USUAL = ({"tp"}, {"pp"}, {"pp", "tp"})  # a layer, the pipeline, the vocabulary
_REMATERIALISED = re.compile(r"[Ii]nvoluntary full rematerialization.*?(?:operation:?\s+%?([\w.\-]+)|$)", re.MULTILINE)
_REMAT = re.compile(r"\.remat(\d*|_(un)?compressed)(\.|$)")
_TICKS = re.compile(r"/ticks\d+/")


def warnings(line: Timeline, machine: Machine, log: str = "", stacked: Sequence[tuple[int, ...]] = ()) -> list[str]:
    """`log` is what the compiler printed; `stacked` the shapes on one device of the weights (or gradients) that are
    stacked by layer, whose copies are looked for."""
    program, roofline = line.program, line.roofline
    places = {instruction.name: computation for computation, instruction, _ in program.walk()}
    lines = list(_rematerialised(log))
    collectives = [(e, e.collective) for e in line.events if e.collective]
    for event, one in collectives:
        computation = places[one.instruction]
        start = computation.by_name[one.instruction]
        result = computation.done(start) or start
        lines += _misplaced(event, one, machine)
        if one.kind == "all-reduce" and one.bytes > SMALL and _only_sliced(roofline, computation, result):
            lines.append(f"{_named(event, one)}: every use takes a slice of it; a reduce-scatter would move half")
        if one.kind == "all-gather" and one.bytes > SMALL and _scattered_into(roofline, computation, result):
            lines.append(
                f"{_named(event, one)}: gathers a whole buffer that is then scattered into, and not its shards"
            )
    lines += _copies(program, stacked)
    lines += _computed_again(line)
    return list(dict.fromkeys(lines))


def _named(event: Event, one: Collective) -> str:
    times = f"{int(event.turns):,} times a step" if event.turns != 1 else "once a step"
    of = f" ({one.name})" if one.name else ""
    return f"{one.kind} over {' and '.join(one.axes)}, {one.bytes:,} bytes {times}, {one.instruction}{of}"


def _rematerialised(log: str) -> Iterator[str]:
    """XLA's partitioner logs it, a line for each operation."""
    for operation in dict.fromkeys(match.group(1) for match in _REMATERIALISED.finditer(log)):
        what = operation or "an operation that the log does not name"
        yield f"{what}: involuntary rematerialisation, the partitioner makes it whole on every device to reshard it"


def _computed_again(line: Timeline) -> Iterator[str]:
    """By XLA's own rematerialisation, which names what it makes so, where the program comes near the memory's end."""
    again = [event for event in line.events if _REMAT.search(event.instruction.name)]
    spent = lambda event: float(event.turns) * event.exposed_s
    if (total := sum(map(spent, again))) > AGAIN * line.step_time_s:
        most = max(again, key=spent).instruction.name
        yield (
            f"{seconds(total)} of the step computes again what XLA could not keep, most of it {most}; "
            "a train.remat or a layout that needs less memory leaves room"
        )


def _misplaced(event: Event, one: Collective, machine: Machine) -> Iterator[str]:
    """A collective over axes, or in a place, where none should be."""
    if one.bytes <= SMALL:
        return
    axes = set(one.axes)
    if not axes <= _GRADIENTS and axes not in _USUAL:
        yield f"{_named(event, one)}: nothing of this size should cross these axes together"
    in_ticks = any(_TICKS.search(loop.name) for loop in one.loops) or _TICKS.search(one.name)
    if in_ticks and "dp" in axes:
        yield f"{_named(event, one)}: runs in every tick; gradients and weights should cross dp once a step"
    slower = machine.link_across_bytes_per_s < machine.link_inside_bytes_per_s
    if "tp" in axes and "pp" not in axes and slower and not in_one_node(one, machine):
        node = machine.devices_per_node
        yield f"{_named(event, one)}: crosses nodes of {node} devices; keep tp inside a node"


def _only_sliced(roofline: Roofline, computation: Computation, result: Instruction) -> bool:
    """Whether everything that uses a result takes a slice of it that differs by rank."""
    used = list(_uses(computation, result))
    return bool(used) and all(
        roofline.holds(user, place, "dynamic-slice") and roofline.read(computation, user, place) < result.bytes
        for user, place in used
    )


def _scattered_into(roofline: Roofline, computation: Computation, result: Instruction) -> bool:
    return any(roofline.holds(user, place, "scatter") for user, place in _uses(computation, result))


def _uses(computation: Computation, result: Instruction) -> Iterator[tuple[Instruction, int]]:
    """(instruction, which operand) of what uses a result, through bitcasts"""
    for user in computation.users[result.name]:
        if user.op == "bitcast":
            yield from _uses(computation, user)
        else:
            yield user, user.operands.index(result.name)


def _copies(program: Program, stacked: Sequence[tuple[int, ...]]) -> Iterator[str]:
    """Copies of a whole stack in main memory; the program carries it as [layer, …] and as [chunk, rank, layer, …]."""

    def is_stack(array: Array) -> bool:
        return array.space == 0 and any(
            array.elements == math.prod(shape) and array.dims[1 - len(shape) :] == shape[1:] for shape in stacked
        )

    for computation, instruction, loops in program.walk():
        if _copied(program, instruction) and is_stack(instruction.arrays[0]):
            place = "in every tick" if any(_TICKS.search(loop.name) for loop in loops) else "once a step"
            source = computation.by_name[instruction.operands[0]]
            whole = source.bytes == instruction.bytes  # and no part of something larger
            if whole and source.arrays[0].space == 0:
                yield (
                    f"{instruction.name}, {instruction.bytes:,} bytes {place}: a second copy of stacked weights or "
                    f"gradients{f' ({instruction.op_name})' if instruction.op_name else ''}"
                )


def _copied(program: Program, instruction: Instruction) -> bool:
    if instruction.op == "fusion":
        return all(
            inner.op in ("parameter", "bitcast", "copy", "transpose") for _, inner in program.within(instruction)
        )
    return instruction.op == "copy"
