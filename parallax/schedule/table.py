"""The tick table: a schedule in the form that the executor scans. No jax.

`tick_table` places a schedule's ops into ticks (at the earliest tick that order and dependencies allow) and gives every
value that lives across ticks a buffer slot. The result is one int32 array [tick, rank, field]; `Row` names the fields.

A tick is, on every rank at once: receive what was sent in the tick before, forward phase, loss phase, backward phase.
A rank with nothing to do in a phase computes on what it finds and the result is masked; where it must write, the table
gives it a slot that nobody needs (`*_valid = 0`).
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise, product
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from parallax.schedule.op import Op, Schedule, ScheduleError, needs, sequence

Cell = TypeVar("Cell")


class Row(NamedTuple, Generic[Cell]):
    """One rank's part of one tick. Slots index ring buffers; chunks and microbatches count from 0.

    The embed, loss and embed_grad fields are the same on every rank, since all ranks share the vocabulary's work.
    """

    # forward phase
    f_valid: Cell
    f_microbatch: Cell
    f_chunk: Cell
    f_first: Cell  # 1: stage 0, the input is the embedding
    f_put: Cell  # slot of the activation inbox where the arriving activation is put
    f_get: Cell  # slot of the activation inbox that holds this forward's input
    f_slot: Cell  # slot of the stash where the layers' residuals go
    embed_valid: Cell
    embed_microbatch: Cell
    # loss phase: a microbatch leaves the last stage
    loss_valid: Cell
    loss_microbatch: Cell
    loss_put: Cell  # slot of the loss inbox for the gradient of the last stage's output
    # backward phase
    b_valid: Cell
    b_microbatch: Cell
    b_chunk: Cell
    b_last: Cell  # 1: last stage, the gradient comes from the loss
    b_put: Cell  # slot of the gradient inbox where the arriving gradient is put
    b_get: Cell  # slot of the gradient inbox that holds this backward's gradient
    b_loss_get: Cell  # slot of the loss inbox
    b_slot: Cell  # slot of the stash
    embed_grad_valid: Cell
    embed_grad_microbatch: Cell


FIELDS = Row._fields


class Run(NamedTuple):
    """A stretch of ticks, `start` ≤ tick < `stop`, whose phases are the same: one scan of the executor."""

    start: int
    stop: int
    forward: bool
    loss: bool
    backward: bool

    @property
    def ticks(self) -> int:
        return self.stop - self.start


class Buffers(NamedTuple):
    """Slots of each ring buffer: residuals of a chunk, arriving activations, arriving gradients, loss gradients."""

    stash: int
    activations: int
    gradients: int
    losses: int


@dataclass(frozen=True, eq=False)
class TickTable:
    """`cells` is int32 [tick, rank, field]; `tick_of` says when each op of the schedule runs."""

    schedule: Schedule
    cells: np.ndarray
    runs: tuple[Run, ...]
    buffers: Buffers
    tick_of: dict[Op, int]

    @property
    def ticks(self) -> int:
        return len(self.cells)

    @property
    def forward_ticks(self) -> int:
        return sum(run.ticks for run in self.runs if run.forward)

    @property
    def backward_ticks(self) -> int:
        return sum(run.ticks for run in self.runs if run.backward)


def place(schedule: Schedule) -> dict[Op, int]:
    """The tick of each op: every rank follows its order and waits for what the op needs.

    Raises ScheduleError, naming the op, where an op is missing, doubled, on the wrong rank, or never becomes ready.
    """
    check_complete(schedule)
    tick_of: dict[Op, int] = {}
    before: list[Op | None] = [None] * schedule.pp  # the op before, by rank
    for op in sequence(schedule):
        rank = op.stage % schedule.pp
        ready = [tick_of[need] + (need.stage != op.stage) for need in needs(op, schedule.stages)]
        if last := before[rank]:  # a backward runs in the tick of a forward, but not the other way round
            ready.append(tick_of[last] + (last.kind == "B" or op.kind == "F"))
        tick_of[op] = max(ready, default=0)
        before[rank] = op
    return tick_of


def check_complete(schedule: Schedule) -> None:
    """Raise ScheduleError, naming the op, unless there is an order for every rank and in it each op of the rank's own
    stages exactly once."""
    if len(schedule.orders) != schedule.pp:
        raise ScheduleError(f"{schedule.name}: has orders for {len(schedule.orders)} ranks, not for pp = {schedule.pp}")
    kinds = "FB" if schedule.has_backward else "F"
    for rank, order in enumerate(schedule.orders):
        wanted = set(product(kinds, range(rank, schedule.stages, schedule.pp), range(schedule.microbatches)))
        seen = set()
        for op in order:
            if op not in wanted:
                raise ScheduleError(f"{schedule.name}: rank {rank} cannot run {op}")
            if op in seen:
                raise ScheduleError(f"{schedule.name}: rank {rank} runs {op} twice")
            seen.add(op)
        if seen != wanted:
            kind, stage, mb = min(wanted - seen)
            raise ScheduleError(f"{schedule.name}: rank {rank} never runs {stage}{kind}{mb}")


def assign_slots(starts: np.ndarray, stops: np.ndarray, ticks: int) -> tuple[np.ndarray, np.ndarray, int]:
    """First-fit slots for values written at ticks `starts` and last read at ticks `stops`: no two values share a slot
    in a tick. → slot of each value, spare slot of each tick, number of slots.

    The spare slot of a tick is the first that holds nothing in that tick; a masked write goes there."""
    values = sorted(zip(starts.tolist(), stops.tolist(), range(len(starts)), strict=True))
    slot_of = np.zeros(len(starts), np.int32)
    free: list[int] = []  # heap of slots
    taken: list[tuple[int, int]] = []  # heap of (last tick, slot)
    slots = 0
    for start, stop, i in values:
        while taken and taken[0][0] < start:
            heappush(free, heappop(taken)[1])
        if not free:
            free.append(slots)
            slots += 1
        slot_of[i] = slot = heappop(free)
        heappush(taken, (stop, slot))
    busy = np.zeros((slots + 1, ticks), bool)  # one more, never busy
    for start, stop, i in values:
        busy[slot_of[i], start : stop + 1] = True
    return slot_of, busy.argmin(axis=0), slots


def tick_table(schedule: Schedule) -> TickTable:
    """Place a schedule's ops and name a buffer slot for everything that outlives a tick."""
    p, last = schedule.pp, schedule.stages - 1
    tick_of = place(schedule)
    ticks = 1 + max(tick_of.values())
    cells = np.zeros((ticks, p, len(FIELDS)), np.int32)
    view = Row(*np.moveaxis(cells, -1, 0))  # each field a writable [tick, rank] view
    f_tick, b_tick, stash_slot = np.zeros((3, schedule.stages, schedule.microbatches), np.int32)
    for (kind, stage, mb), tick in tick_of.items():
        (f_tick if kind == "F" else b_tick)[stage, mb] = tick
    stash = activations = gradients = 1

    for rank, order in enumerate(schedule.orders):
        stage, mb = _columns(order, "F")
        t = f_tick[stage, mb]
        view.f_valid[t, rank], view.f_microbatch[t, rank], view.f_chunk[t, rank] = 1, mb, stage // p
        view.f_first[t, rank] = stage == 0

        slot, spare, n = assign_slots(t, b_tick[stage, mb] if schedule.has_backward else t, ticks)
        stash = max(stash, n, 1 + _top_spare(spare, t))
        stash_slot[stage, mb] = slot
        view.f_slot[:, rank] = spare
        view.f_slot[t, rank] = slot

        stage, mb = stage[stage > 0], mb[stage > 0]
        arrival = 1 + f_tick[stage - 1, mb]
        activations = max(activations, _inbox(arrival, f_tick[stage, mb], view.f_put[:, rank], view.f_get[:, rank]))

        stage, mb = _columns(order, "B")
        t = b_tick[stage, mb]
        view.b_valid[t, rank], view.b_microbatch[t, rank], view.b_chunk[t, rank] = 1, mb, stage // p
        view.b_last[t, rank], view.b_slot[t, rank] = stage == last, stash_slot[stage, mb]

        stage, mb = stage[stage < last], mb[stage < last]
        arrival = 1 + b_tick[stage + 1, mb]
        gradients = max(gradients, _inbox(arrival, b_tick[stage, mb], view.b_put[:, rank], view.b_get[:, rank]))

    # The fields that are the same on every rank.
    mb = np.arange(schedule.microbatches)
    first, leaving = f_tick[0], f_tick[last]
    view.embed_valid[first], view.embed_microbatch[first] = 1, mb[:, None]
    slot, _, losses = assign_slots(leaving, b_tick[last] if schedule.has_backward else leaving, ticks)
    view.loss_valid[leaving], view.loss_microbatch[leaving], view.loss_put[leaving] = 1, mb[:, None], slot[:, None]
    if schedule.has_backward:
        view.b_loss_get[b_tick[last]] = slot[:, None]
        view.embed_grad_valid[b_tick[0]], view.embed_grad_microbatch[b_tick[0]] = 1, mb[:, None]

    return TickTable(schedule, cells, _runs(view), Buffers(stash, activations, gradients, losses), tick_of)


def _columns(order: tuple[Op, ...], kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Stages and microbatches of the ops of one kind."""
    stages, microbatches = np.array([op[1:] for op in order if op.kind == kind], np.int32).reshape(-1, 2).T
    return stages, microbatches


def _inbox(arrival: np.ndarray, use: np.ndarray, put: np.ndarray, get: np.ndarray) -> int:
    """Write the slots of values that wait in an inbox, from tick `arrival` to tick `use`, into one rank's columns `put`
    and `get`; → slots needed."""
    slot, spare, n = assign_slots(arrival, use, len(put))
    put[:] = spare
    put[arrival] = get[use] = slot
    return max(n, 1 + _top_spare(spare, arrival))


def _top_spare(spare: np.ndarray, used: np.ndarray) -> int:
    """The highest slot that a masked write goes to; in the ticks `used` the write is not masked."""
    return int(np.delete(spare, used).max(initial=0))


def _runs(view: Row[np.ndarray]) -> tuple[Run, ...]:
    """Stretches of equal kind. A phase runs in every tick between its first and its last op, also where no rank uses
    it, since what was sent in one of its ticks arrives in the next. A schedule begins with a forward and ends with a
    backward, if it has any, so there are at most three stretches: forward only, both (not in GPipe), backward only."""
    ticks = len(view.f_valid)

    def between(valid: np.ndarray) -> np.ndarray:
        used = np.flatnonzero(valid.any(axis=1))
        inside = np.zeros(ticks, bool)
        if used.size:
            inside[used[0] : used[-1] + 1] = True
        return inside

    forward, backward = between(view.f_valid), between(view.b_valid)
    edges = [0, *(1 + np.flatnonzero((np.diff(forward) != 0) | (np.diff(backward) != 0))), ticks]
    return tuple(
        Run(int(a), int(b), bool(forward[a]), bool(view.loss_valid[a:b].any()), bool(backward[a]))
        for a, b in pairwise(edges)
    )
