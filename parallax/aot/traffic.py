"""The collectives of a step by mesh axis: how many, how many bytes, how long, how much of it exposed. No jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parallax.aot.roofline import in_one_node
from parallax.aot.timeline import Event, Timeline
from parallax.machine import Machine


@dataclass(frozen=True)
class Traffic:
    """Of one kind over one set of axes, a device and step.

    `bytes` are those of the operations' results, times their turns. With n devices in a group, a ring puts on the wire
    (n-1)/n of that for an all-gather and an all-to-all, twice that for an all-reduce, n-1 times that for a
    reduce-scatter, and just that for a collective-permute. `exposed_bytes` is the share of them, by time, that the
    compute stream waits for. `time_s` is at the mesh file's bandwidth, whether exposed or not."""

    axes: tuple[str, ...]  # that a group spans, in mesh order
    kind: str
    count: int  # operations a step
    bytes: int
    exposed_bytes: int
    inside: bool  # each group stays in one node
    time_s: float
    names: tuple[str, ...]  # the jax operations that they came from, or the compiler's own name


def traffic(line: Timeline, mesh: Mapping[str, int], machine: Machine) -> list[Traffic]:
    """Of a step on a mesh of these axis sizes, slowest axis first; in mesh order of axes, largest first."""
    rows: dict[tuple[tuple[str, ...], str, bool], list[Event]] = {}
    for event in line.events:
        if one := event.collective:
            rows.setdefault((one.axes, one.kind, in_one_node(one, machine)), []).append(event)
    order = list(mesh)
    table = [_row(*key, events) for key, events in rows.items()]
    return sorted(table, key=lambda row: ([order.index(axis) for axis in row.axes], -row.bytes, row.kind))


def _row(axes: tuple[str, ...], kind: str, inside: bool, events: list[Event]) -> Traffic:
    held = [(event, event.collective) for event in events if event.collective]
    return Traffic(
        axes=axes,
        kind=kind,
        count=int(sum(event.turns for event in events)),
        bytes=int(sum(event.turns * one.bytes for event, one in held)),
        exposed_bytes=round(sum(float(event.turns) * one.bytes * _exposed(event) for event, one in held)),
        inside=inside,
        time_s=sum(float(event.turns) * event.seconds for event in events),
        names=tuple(dict.fromkeys(one.name or one.instruction for _, one in held)),
    )


def _exposed(event: Event) -> float:
    """Share of its time that holds up the compute stream; what it waits for an earlier one is not its own."""
    return min(1.0, event.exposed_s / event.seconds) if event.seconds else 0.0
