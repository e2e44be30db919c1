"""What a schedule costs: time, bubble and chunks in flight, in exact arithmetic, in lock step and free running. No jax.

Costs are those of one microbatch through a whole stage (all v chunks of a rank), in any unit; a chunk costs 1/v of it.
Only compute is counted: sends, head, embedding and optimizer are free.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import NamedTuple

from parallax.schedule.op import Op, Schedule, ScheduleError, needs, sequence
from parallax.schedule.order import GENERATORS
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


def simulate(table: TickTable, forward_cost: Cost = 1, backward_cost: Cost = 2) -> Simulation:
    """Lock step, as the executor runs: a tick lasts as long as the phases that any rank uses in it."""
    costs = Fraction(forward_cost), Fraction(backward_cost)
    total = table.forward_ticks * costs[0] + table.backward_ticks * costs[1]
    return _simulation(table.schedule, total / table.schedule.virtual_stages, *costs)


def timeline(table: TickTable, forward_cost: Cost = 1, backward_cost: Cost = 2) -> tuple[Span, ...]:
    """When `simulate` has each op run, rank by rank and in order."""
    v, p = table.schedule.virtual_stages, table.schedule.pp
    clock: list[dict[str, tuple[Fraction, Fraction]]] = []  # tick → start and stop of each phase
    now = Fraction(0)
    for run in table.runs:
        for _ in range(run.ticks):
            between = now + run.forward * Fraction(forward_cost) / v
            end = between + run.backward * Fraction(backward_cost) / v
            clock.append({"F": (now, between), "B": (between, end)})
            now = end
    ops = (op for order in table.schedule.orders for op in order)
    return tuple(Span(op.stage % p, *clock[table.tick_of[op]][op.kind], op) for op in ops)


def simulate_free(schedule: Schedule, forward_cost: Cost = 1, backward_cost: Cost = 2) -> Simulation:
    """The same orders where ranks do not wait for each other's ticks: an op starts when its rank is free and its inputs
    are there. Raises ScheduleError where no rank can go on."""
    forward, backward = Fraction(forward_cost), Fraction(backward_cost)
    unit = lcm(forward.denominator, backward.denominator)  # whole numbers are exact and fast
    cost = {"F": int(forward * unit), "B": int(backward * unit)}
    stages = schedule.stages
    stop: dict[Op, int] = {}
    free = [0] * schedule.pp
    for op in sequence(schedule):
        rank = op.stage % schedule.pp
        free[rank] = stop[op] = max([free[rank], *map(stop.__getitem__, needs(op, stages))]) + cost[op.kind]
    total = Fraction(max(free), unit * schedule.virtual_stages)
    return _simulation(schedule, total, forward, backward)


def lockstep_warning(table: TickTable) -> str | None:
    """One line where lock step takes more than 5 % longer than ranks that run free: what it costs and why."""
    locked, free = simulate(table), simulate_free(table.schedule)
    longer = locked.total / free.total - 1
    if longer <= Fraction(5, 100):
        return None
    return (
        f"{table.schedule.name}: lock step takes {float(longer):.0%} longer than this order needs where ranks run free "
        f"(bubble {float(locked.bubble):.1%}, not {float(free.bubble):.1%}): here a tick lasts, for all ranks, as long "
        "as a forward and a backward of any of them, and an order made for free-running ranks leaves more ticks half "
        "empty; 1f1b and interleaved are made for lock step"
    )


def bubble_formula(schedule_name: str, p: int, v: int, m: int) -> Fraction:
    """The bubble of a built-in schedule in lock step for uniform costs: (p-1)/(v·m) where m ≥ p (Narayanan et al. 2021,
    arXiv 2104.04473, section 2.2), else (m + v·p - 1)/(v·m) - 1, the wait for the ring; the same for v = 1."""
    if schedule_name not in {*GENERATORS, "forward"}:
        raise ScheduleError(f"schedule = {schedule_name} has no bubble formula; use {', '.join(GENERATORS)}")
    return Fraction(p - 1, v * m) if m >= p else Fraction(m + v * p - 1, v * m) - 1


def _simulation(schedule: Schedule, total: Fraction, forward_cost: Fraction, backward_cost: Fraction) -> Simulation:
    useful = schedule.microbatches * (forward_cost + schedule.has_backward * backward_cost)  # of each rank
    return Simulation(total, total / useful - 1, _peak_in_flight(schedule))


def _peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Chunks held by each rank; without backwards, a forward holds its chunk only while it runs."""

    def peak(order: tuple[Op, ...]) -> int:
        held = most = 0
        for op in order:
            held += 1 if op.kind == "F" else -1
            most = max(most, held)
        return most if schedule.has_backward else 1

    return tuple(peak(order) for order in schedule.orders)
