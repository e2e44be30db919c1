"""Replays a tick table as the executor would, and says where a value read is not the one meant. No jax."""

from __future__ import annotations

from itertools import pairwise
from typing import NoReturn

from parallax.schedule.op import Op, ScheduleError
from parallax.schedule.table import Row, Run, TickTable, check_complete

Values = list[Op | None]  # each value is named by the op that made it; None is what nobody meant


def check_table(table: TickTable) -> None:
    """Raise ScheduleError, naming tick, rank and field, unless running `table` runs its schedule: every op once, on its
    rank, in the schedule's order and at the tick that `tick_of` says; and every value that a phase reads is the one
    meant, after all writes, the masked ones of idle ranks included."""
    check_complete(table.schedule)
    _check_ticks(table)
    replay = _Replay(table)
    for run in table.runs:
        for tick in range(run.start, run.stop):
            replay.tick(tick, run)


def _check_ticks(table: TickTable) -> None:
    """`tick_of` keeps each rank's order, at most one forward and then one backward a tick; `runs` tile the ticks."""
    name, tick_of = table.schedule.name, table.tick_of
    for rank, order in enumerate(table.schedule.orders):
        for op in order:
            if not 0 <= tick_of.get(op, -1) < table.ticks:
                raise ScheduleError(f"{name}: rank {rank}: {op} has no tick")
        for before, op in pairwise(order):
            if (tick_of[before], before.kind == "B") >= (tick_of[op], op.kind == "B"):
                where = f"tick {tick_of[op]}, rank {rank}"
                raise ScheduleError(f"{name}: {where}: {op} must come after {before}, at tick {tick_of[before]}")
    edges = [0, *(edge for run in table.runs for edge in run[:2]), table.ticks]
    if edges[::2] != edges[1::2]:
        raise ScheduleError(f"{name}: runs {[run[:2] for run in table.runs]} do not cover {table.ticks} ticks in order")


class _Replay:
    """The buffers of all ranks, and what is on the ring, from one tick to the next."""

    def __init__(self, table: TickTable) -> None:
        self.table, self.p = table, table.schedule.pp
        self.plan = {(tick, op.stage % self.p, op.kind): op for op, tick in table.tick_of.items()}
        self.buffers: dict[str, list[Values]] = {
            name: [[None] * slots for _ in range(self.p)] for name, slots in table.buffers._asdict().items()
        }
        self.activations_sent: Values = [None] * self.p  # by sender
        self.gradients_sent: Values = [None] * self.p

    def tick(self, tick: int, run: Run) -> None:
        last = self.table.schedule.stages - 1
        forwards, backwards = ([self.plan.get((tick, rank, kind)) for rank in range(self.p)] for kind in "FB")
        embed, loss, embed_grad = _at(0, forwards[0]), _at(last, forwards[-1]), _at(0, backwards[0])
        self.now = tick
        for rank, (f, b, cells) in enumerate(zip(forwards, backwards, self.table.cells[tick].tolist(), strict=True)):
            self.rank = rank
            self.row: Row[int] = Row(*cells)
            self.expect_op("f", f, run.forward)
            self.expect_op("embed", embed, run.forward)
            self.expect_op("loss", loss, run.loss)
            self.expect_op("b", b, run.backward)
            self.expect_op("embed_grad", embed_grad, run.backward)

            if run.backward:
                self.put("gradients", "b_put", self.gradients_sent[(rank + 1) % self.p])
            if run.forward:
                self.put("activations", "f_put", self.activations_sent[rank - 1])
                if f:
                    self.expect("f_chunk", f.stage // self.p)
                    self.expect("f_first", int(f.stage == 0))
                    if f.stage > 0:
                        self.get("activations", "f_get", Op("F", f.stage - 1, f.microbatch))
                self.put("stash", "f_slot", f)
            if loss:
                self.put("losses", "loss_put", loss)
            if b:
                self.expect("b_chunk", b.stage // self.p)
                self.expect("b_last", int(b.stage == last))
                if b.stage < last:
                    self.get("gradients", "b_get", Op("B", b.stage + 1, b.microbatch))
                else:
                    self.get("losses", "b_loss_get", Op("F", last, b.microbatch))
                self.get("stash", "b_slot", Op("F", b.stage, b.microbatch))
        if run.forward:
            self.activations_sent = forwards
        if run.backward:
            self.gradients_sent = backwards

    def expect_op(self, phase: str, op: Op | None, runs: bool) -> None:
        """The row's `<phase>_valid` and `<phase>_microbatch` say `op`, and the phase runs in this tick."""
        self.expect(f"{phase}_valid", int(op is not None))
        if op:
            self.expect(f"{phase}_microbatch", op.microbatch)
            if not runs:
                self.fail(f"{phase}_valid", f"{op} is meant, but the run of this tick leaves the phase out")

    def expect(self, field: str, meant: int) -> None:
        if getattr(self.row, field) != meant:
            self.fail(field, f"{meant} is meant")

    def put(self, buffer: str, field: str, value: Op | None) -> None:
        self.slots(buffer, field)[getattr(self.row, field)] = value

    def get(self, buffer: str, field: str, meant: Op) -> None:
        found = self.slots(buffer, field)[getattr(self.row, field)]
        if found != meant:
            self.fail(field, f"the slot holds {found or 'nothing'}, and what {meant} left is meant")

    def slots(self, buffer: str, field: str) -> Values:
        slots = self.buffers[buffer][self.rank]
        if not 0 <= getattr(self.row, field) < len(slots):
            self.fail(field, f"{buffer} has {len(slots)} slots")
        return slots

    def fail(self, field: str, why: str) -> NoReturn:
        where = f"tick {self.now}, rank {self.rank}, {field} = {getattr(self.row, field)}"
        raise ScheduleError(f"{self.table.schedule.name}: {where}: {why}")


def _at(stage: int, op: Op | None) -> Op | None:
    return op if op and op.stage == stage else None
