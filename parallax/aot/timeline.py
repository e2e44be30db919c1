"""A step in time: the scheduled program walked in order, on one compute stream and the streams beside it. No jax.

Instructions run in the order of the schedule, each as long as `parallax.aot.roofline` says. A `*-start` begins on its
stream as soon as that is free and the compute stream reaches it; its `*-done` waits for it. There is a stream for sends
(collective-permute), one for all other collectives and one for what else is started (a TPU's copies to and from its
on-chip memory, and the gathers of its sparse cores, by the bytes of their results). A collective without a start, or
one that the compiler marks as synchronous, holds up the compute stream.

A loop's body is walked once, with streams that are free when it begins, and counts as often as it turns. What was
started before a loop runs on beside it. Of a conditional the longest branch counts, and no other. Every rank runs the
same program, so that one stands for all: no rank waits for another longer than the collectives take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from operator import itemgetter

from parallax.aot.roofline import FREE, NOTHING, Roofline, Work
from parallax.aot.turns import Turns
from parallax.hlo import Collective, Instruction, Loop, Program, collective
from parallax.hlo.program import Computation
from parallax.machine import Machine


@dataclass(frozen=True)
class Event:
    """An instruction, `turns` times a step. `seconds` of each turn, of which `exposed_s` hold up the compute stream:
    all of a kernel, and of a collective or copy what the compute after its start does not hide."""

    instruction: Instruction
    turns: Fraction
    seconds: float
    exposed_s: float
    work: Work = NOTHING
    collective: Collective | None = None


@dataclass(frozen=True)
class Timeline:
    program: Program
    roofline: Roofline
    step_time_s: float
    events: list[Event]
    unknown_loops: tuple[str, ...]  # neither the text nor the table says how often they turn: once was taken


def timeline(text: str, mesh: Mapping[str, int], machine: Machine, turns: Turns) -> Timeline:
    """Of a step of the program in `text`, compiled for a mesh of these axis sizes, slowest axis first."""
    walk = _Walk(Program(text), mesh, machine, turns)
    step_time_s = walk.computation(walk.program.entry, Fraction(1), ())
    return Timeline(walk.program, walk.roofline, step_time_s, walk.events, tuple(walk.unknown_loops))


@dataclass
class _Clock:
    """Where the streams are while a computation is walked, seconds from its beginning."""

    now: float = 0.0  # the compute stream
    free: dict[str, float] = field(default_factory=dict)  # when each other stream has nothing left to do
    running: dict[str, tuple[float, float, Collective | None]] = field(default_factory=dict)  # (end, seconds, which)


class _Walk:
    def __init__(self, program: Program, mesh: Mapping[str, int], machine: Machine, turns: Turns):
        self.program, self.mesh, self.turns = program, mesh, turns
        self.roofline = Roofline(program, machine)
        self.events: list[Event] = []
        self.unknown_loops: list[str] = []

    def computation(self, name: str, turns: Fraction, loops: tuple[Loop, ...]) -> float:
        """Seconds of one turn."""
        computation, clock = self.program.computations[name], _Clock()
        for instruction in computation.instructions:
            self._instruction(computation, instruction, clock, turns, loops)
        return clock.now  # of each start, the done comes in the same computation

    def _instruction(
        self,
        computation: Computation,
        instruction: Instruction,
        clock: _Clock,
        turns: Fraction,
        loops: tuple[Loop, ...],
    ) -> None:
        if loop := self.program.loop(instruction):
            times = self.turns.of(loop)
            if times is None:
                self.unknown_loops.append(instruction.name)
                times = Fraction(1)
            clock.now += float(times) * self.computation(loop.body, turns * times, (*loops, loop))
        elif one := collective(self.program, computation, instruction, loops, self.mesh):
            seconds = self.roofline.collective_s(one)
            if instruction.op.endswith("-start") and '"is_sync":true' not in instruction.attributes:
                stream = "sends" if one.kind == "collective-permute" else "collectives"
                self._start(instruction, clock, stream, seconds, one)
            else:
                clock.now += seconds
                self.events.append(Event(instruction, turns, seconds, seconds, collective=one))
        elif instruction.op.endswith("-start"):
            self._start(instruction, clock, "copies", self.roofline.copy_s(computation, instruction), None)
        elif instruction.op.endswith("-done"):
            self._done(instruction, clock, turns)
        elif instruction.op == "call":
            for inner in instruction.called:
                clock.now += self.computation(inner, turns, loops)
        elif instruction.op == "conditional":
            seconds, events = max(
                (self._branch(inner, turns, loops) for inner in instruction.called), key=itemgetter(0)
            )
            clock.now += seconds
            self.events += events
        elif instruction.op not in FREE:
            work = self.roofline.work(computation, instruction)
            clock.now += work.total_s
            self.events.append(Event(instruction, turns, work.total_s, work.total_s, work))

    def _branch(self, name: str, turns: Fraction, loops: tuple[Loop, ...]) -> tuple[float, list[Event]]:
        """Seconds of a branch and its events, which are not among all others yet."""
        before = len(self.events)
        seconds = self.computation(name, turns, loops)
        events = self.events[before:]
        del self.events[before:]
        return seconds, events

    def _start(
        self, instruction: Instruction, clock: _Clock, stream: str, seconds: float, one: Collective | None
    ) -> None:
        end = max(clock.now, clock.free.get(stream, 0.0)) + seconds
        clock.free[stream] = end
        clock.running[instruction.name] = end, seconds, one

    def _done(self, instruction: Instruction, clock: _Clock, turns: Fraction) -> None:
        running = clock.running.pop(instruction.operands[0], None)
        if running is None:
            return  # it was synchronous
        end, seconds, one = running
        waited = max(0.0, end - clock.now)
        clock.now += waited
        self.events.append(Event(instruction, turns, seconds, waited, collective=one))
