"""What a schedule costs: time, bubble and chunks in flight, in exact arithmetic, in lock step and free running. No jax.

Costs are those of one microbatch through a whole stage (all v chunks of a rank), in any unit; a chunk costs 1/v of it.
Only compute is counted: sends, head, embedding and optimizer are free.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import NamedTuple

from parallax.schedule.order import GENERATORS, Op, Schedule, ScheduleError
from parallax.schedule.table import TickTable

Cost = int | Fraction


class Span(NamedTuple):
    """One op on the clock, in the unit of the costs."""

    rank: int
    start: Fraction
    stop: Fraction
    op: Op


@dataclass(frozen=True)
class Simulation:
    """`bubble` is idle time over useful time; `peak_in_flight` is in chunks, by rank: a chunk is in flight from its
    forward until its backward has run."""

    total: Fraction
    bubble: Fraction
    peak_in_flight: tuple[int, ...]
    timeline: tuple[Span, ...]


def simulate(table: TickTable, forward_cost: Cost = 1, backward_cost: Cost = 2) -> Simulation:
    """Lock step, as the executor runs: a tick lasts as long as the phases that any rank uses in it."""
    v = table.schedule.virtual_stages
    clock: list[dict[str, tuple[Fraction, Fraction]]] = []  # tick → start and stop of each phase
    now = Fraction(0)
    for run in table.runs:
        for _ in range(run.ticks):
            between = now + run.forward * Fraction(forward_cost) / v
            end = between + run.backward * Fraction(backward_cost) / v
            clock.append({"F": (now, between), "B": (between, end)})
            now = end
    times = {op: clock[tick][op.kind] for op, tick in table.tick_of.items()}
    return _simulation(table.schedule, times)


def simulate_free(schedule: Schedule, forward_cost: Cost = 1, backward_cost: Cost = 2) -> Simulation:
    """The same orders where ranks do not wait for each other's ticks: an op starts when its rank is free and its inputs
    are there. Raises ScheduleError where no rank can go on."""
    forward, backward = Fraction(forward_cost), Fraction(backward_cost)
    unit = lcm(forward.denominator, backward.denominator)  # whole numbers are exact and fast
    cost = {"F": int(forward * unit), "B": int(backward * unit)}
    stop: dict[Op, int] = {}
    free = [0] * schedule.pp
    todo = [list(reversed(order)) for order in schedule.orders]
    while any(todo):
        done = len(stop)
        for rank, queue in enumerate(todo):
            while queue and stop.keys() >= (needs := _needs(schedule, queue[-1])):
                op = queue.pop()
                free[rank] = max([free[rank], *(stop[need] for need in needs)]) + cost[op.kind]
                stop[op] = free[rank]
        if len(stop) == done:
            stuck = ", ".join(f"rank {r} waits to run {queue[-1]}" for r, queue in enumerate(todo) if queue)
            raise ScheduleError(f"{schedule.name}: no rank can go on: {stuck}")
    unit *= schedule.virtual_stages
    times = {op: (Fraction(end - cost[op.kind], unit), Fraction(end, unit)) for op, end in stop.items()}
    return _simulation(schedule, times)


def bubble_formula(schedule_name: str, p: int, v: int, m: int) -> Fraction:
    """The bubble of a built-in schedule in lock step for uniform costs: (p-1)/(v·m) where m ≥ p (Narayanan et al. 2021,
    arXiv 2104.04473, section 2.2), else (m + v·p - 1)/(v·m) - 1, the wait for the ring; the same for v = 1."""
    if schedule_name not in {*GENERATORS, "forward"}:
        raise ScheduleError(f"schedule = {schedule_name} has no bubble formula; use {', '.join(GENERATORS)}")
    return Fraction(p - 1, v * m) if m >= p else Fraction(m + v * p - 1, v * m) - 1


def _needs(schedule: Schedule, op: Op) -> set[Op]:
    """The ops whose results `op` reads."""
    if op.kind == "F":
        return {Op("F", op.stage - 1, op.microbatch)} if op.stage else set()
    own = {Op("F", op.stage, op.microbatch)}
    return own if op.stage == schedule.stages - 1 else own | {Op("B", op.stage + 1, op.microbatch)}


def _simulation(schedule: Schedule, times: dict[Op, tuple[Fraction, Fraction]]) -> Simulation:
    timeline = tuple(Span(rank, *times[op], op) for rank, order in enumerate(schedule.orders) for op in order)
    total = max(span.stop for span in timeline)
    useful = sum((span.stop - span.start for span in timeline), Fraction(0)) / schedule.pp
    return Simulation(total, total / useful - 1, _peak_in_flight(schedule), timeline)


def _peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Chunks held by each rank; without backwards, a forward holds its chunk only while it runs."""

    def peak(order: tuple[Op, ...]) -> int:
        held = most = 0
        for op in order:
            held += 1 if op.kind == "F" else -1
            most = max(most, held)
        return most if schedule.has_backward else 1

    return tuple(peak(order) for order in schedule.orders)
