"""The tick table: a schedule in the form that the executor scans. No jax.

`tick_table` places a schedule's ops into ticks (at the earliest tick that order and dependencies allow) and gives every
value that lives across ticks a buffer slot. The result is one int32 array [tick, rank, field]; `Row` names the fields.

A tick is, on every rank at once: receive what was sent in the tick before, forward phase, loss phase, backward phase.
A rank with nothing to do in a phase computes on what it finds and the result is masked; where it must write, the table
gives it a slot that nobody needs (`*_valid = 0`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from parallax.schedule.order import Op, Schedule, ScheduleError

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
    _check_complete(schedule)
    last = schedule.stages - 1
    tick_of: dict[Op, int] = {}
    todo = [list(reversed(order)) for order in schedule.orders]

    def ready(op: Op, now: int) -> bool:
        never = now + 1
        if op.kind == "F":
            return op.stage == 0 or tick_of.get(Op("F", op.stage - 1, op.microbatch), never) < now
        mine = tick_of.get(Op("F", op.stage, op.microbatch), never) <= now
        return mine and (op.stage == last or tick_of.get(Op("B", op.stage + 1, op.microbatch), never) < now)

    now = 0
    while any(todo):
        placed = len(tick_of)
        for queue in todo:
            for kind in "FB":
                if queue and queue[-1].kind == kind and ready(queue[-1], now):
                    tick_of[queue.pop()] = now
        if len(tick_of) == placed:
            stuck = ", ".join(f"rank {r} waits to run {queue[-1]}" for r, queue in enumerate(todo) if queue)
            raise ScheduleError(f"{schedule.name}: no rank can go on at tick {now}: {stuck}")
        now += 1
    return tick_of


def _check_complete(schedule: Schedule) -> None:
    kinds = "FB" if schedule.has_backward else "F"
    for rank, order in enumerate(schedule.orders):
        wanted = {
            Op(kind, stage, mb)
            for kind in kinds
            for stage in range(rank, schedule.stages, schedule.pp)
            for mb in range(schedule.microbatches)
        }
        seen: set[Op] = set()
        for op in order:
            if op not in wanted:
                raise ScheduleError(f"{schedule.name}: rank {rank} cannot run {op}")
            if op in seen:
                raise ScheduleError(f"{schedule.name}: rank {rank} runs {op} twice")
            seen.add(op)
        if seen != wanted:
            raise ScheduleError(f"{schedule.name}: rank {rank} never runs {min(wanted - seen)}")


class _Interval(NamedTuple):
    """A value that is written at tick `start` and read for the last time at tick `stop`."""

    key: Op
    start: int
    stop: int


def assign_slots(intervals: Iterable[_Interval], ticks: int) -> tuple[dict[Op, int], list[int], int]:
    """First-fit slots: no two values share a slot in a tick. → slot by key, spare slot by tick, number of slots.

    The spare slot of a tick is one that holds nothing in that tick; a masked write goes there."""
    free_from: list[int] = []  # slot → first tick at which it is free again
    busy: list[set[int]] = [set() for _ in range(ticks)]
    slot_of: dict[Op, int] = {}
    for key, start, stop in sorted(intervals, key=lambda i: i.start):
        slot = next((s for s, free in enumerate(free_from) if free <= start), len(free_from))
        if slot == len(free_from):
            free_from.append(0)
        free_from[slot] = stop + 1
        slot_of[key] = slot
        for tick in range(start, stop + 1):
            busy[tick].add(slot)
    spare = [next(s for s in range(len(taken) + 1) if s not in taken) for taken in busy]
    return slot_of, spare, len(free_from)


def tick_table(schedule: Schedule) -> TickTable:
    """Place a schedule's ops and name a buffer slot for everything that outlives a tick."""
    p, last = schedule.pp, schedule.stages - 1
    tick_of = place(schedule)
    ticks = 1 + max(tick_of.values())
    cells = np.zeros((ticks, p, len(FIELDS)), np.int32)
    view = Row(*np.moveaxis(cells, -1, 0))  # each field a writable [tick, rank] view
    stash = activations = gradients = 1

    for rank, order in enumerate(schedule.orders):
        forwards = [op for op in order if op.kind == "F"]
        backwards = [op for op in order if op.kind == "B"]
        pair = {op: Op("B", op.stage, op.microbatch) for op in forwards}
        idle_f = np.ones(ticks, bool)
        idle_f[[tick_of[op] for op in forwards]] = False

        live = [_Interval(op, tick_of[op], tick_of.get(pair[op], tick_of[op])) for op in forwards]
        slot, spare, n = assign_slots(live, ticks)
        stash = max(stash, n, 1 + max(np.asarray(spare)[idle_f], default=0))
        view.f_slot[:, rank] = spare

        arriving = {op: 1 + tick_of[Op("F", op.stage - 1, op.microbatch)] for op in forwards if op.stage}
        inbox, spare, n = assign_slots((_Interval(op, t, tick_of[op]) for op, t in arriving.items()), ticks)
        activations = max(activations, n, 1 + _top_spare(spare, arriving.values()))
        view.f_put[:, rank] = spare

        returning = {op: 1 + tick_of[Op("B", op.stage + 1, op.microbatch)] for op in backwards if op.stage < last}
        outbox, spare, n = assign_slots((_Interval(op, t, tick_of[op]) for op, t in returning.items()), ticks)
        gradients = max(gradients, n, 1 + _top_spare(spare, returning.values()))
        view.b_put[:, rank] = spare

        for op in forwards:
            t = tick_of[op]
            view.f_valid[t, rank], view.f_microbatch[t, rank], view.f_chunk[t, rank] = 1, op.microbatch, op.stage // p
            view.f_first[t, rank], view.f_slot[t, rank] = op.stage == 0, slot[op]
            if op in arriving:
                view.f_put[arriving[op], rank] = view.f_get[t, rank] = inbox[op]
        for op in backwards:
            t = tick_of[op]
            view.b_valid[t, rank], view.b_microbatch[t, rank], view.b_chunk[t, rank] = 1, op.microbatch, op.stage // p
            view.b_last[t, rank], view.b_slot[t, rank] = op.stage == last, slot[Op("F", op.stage, op.microbatch)]
            if op in returning:
                view.b_put[returning[op], rank] = view.b_get[t, rank] = outbox[op]

    losses = _shared_fields(schedule, tick_of, view, ticks)
    buffers = Buffers(int(stash), int(activations), int(gradients), losses)
    return TickTable(schedule, cells, _runs(view), buffers, tick_of)


def _top_spare(spare: list[int], arrivals: Iterable[int]) -> int:
    taken = set(arrivals)
    return max((slot for tick, slot in enumerate(spare) if tick not in taken), default=0)


def _shared_fields(schedule: Schedule, tick_of: dict[Op, int], view: Row[np.ndarray], ticks: int) -> int:
    """Fill the fields that are the same on every rank; → slots of the loss inbox."""
    last = schedule.stages - 1
    leaving = [op for op in schedule.orders[last % schedule.pp] if op.kind == "F" and op.stage == last]
    back = {op: Op("B", last, op.microbatch) for op in leaving}
    live = [_Interval(op, tick_of[op], tick_of.get(back[op], tick_of[op])) for op in leaving]
    slot, _, n = assign_slots(live, ticks)
    for op in leaving:
        mb, first, t = op.microbatch, tick_of[Op("F", 0, op.microbatch)], tick_of[op]
        view.embed_valid[first], view.embed_microbatch[first] = 1, mb
        view.loss_valid[t], view.loss_microbatch[t], view.loss_put[t] = 1, mb, slot[op]
        if back[op] in tick_of:
            end = tick_of[Op("B", 0, mb)]
            view.b_loss_get[tick_of[back[op]]] = slot[op]
            view.embed_grad_valid[end], view.embed_grad_microbatch[end] = 1, mb
    return max(n, 1)


def _runs(view: Row[np.ndarray]) -> tuple[Run, ...]:
    """Stretches of equal kind. A phase runs in every tick between its first and its last op, so there are at most
    three kinds of ticks: forward only, both, backward only (or, for GPipe, forward then backward)."""
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
        for a, b in zip(edges, edges[1:], strict=False)
    )
