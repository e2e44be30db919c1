"""A pipeline schedule: for each rank, the order of its forwards and backwards; and what each waits for. No jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B"]
KINDS: tuple[Kind, Kind] = ("F", "B")
MAX_OPS = 1_000_000  # of one kind, in all: a longer schedule takes minutes to make


class ScheduleError(ValueError):
    """A schedule that is not complete, not in a possible order, or asked for with numbers that do not fit. `problems`
    has one line each."""

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class Op(NamedTuple):
    """One piece of work: the forward ("F") or the backward ("B") of one microbatch through one stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """`orders[r]` is what rank r does, in order. Stages are numbered 0 … pp·virtual_stages - 1; stage k is on rank
    k mod pp."""

    name: str
    pp: int
    virtual_stages: int
    microbatches: int
    orders: tuple[tuple[Op, ...], ...]

    @property
    def stages(self) -> int:
        return self.pp * self.virtual_stages

    @property
    def has_backward(self) -> bool:
        return any(op.kind == "B" for op in self.orders[0])


def needs(op: Op, stages: int) -> list[Op]:
    """The ops whose results `op` reads, of a schedule of that many stages."""
    kind, stage, mb = op
    if kind == "F":
        return [Op("F", stage - 1, mb)] if stage else []
    own = Op("F", stage, mb)
    return [own] if stage == stages - 1 else [own, Op("B", stage + 1, mb)]


def walk(schedule: Schedule) -> tuple[list[Op], list[Op]]:
    """→ (ran, stuck): the ops of all ranks, each after the one before it on its rank and after what it needs, as far
    as that goes; and for each rank that cannot finish, the op that it waits to run."""
    stages = schedule.stages
    queues = [list(reversed(order)) for order in schedule.orders]
    ran: list[Op] = []
    done: set[Op] = set()
    waiting: dict[Op, list[int]] = {}  # the op waited for → ranks
    awake = list(reversed(range(len(queues))))
    while awake:
        queue = queues[rank := awake.pop()]
        while queue:
            missing = next((need for need in needs(queue[-1], stages) if need not in done), None)
            if missing:
                waiting.setdefault(missing, []).append(rank)
                break
            op = queue.pop()
            ran.append(op)
            done.add(op)
            awake += waiting.pop(op, ())
    return ran, [queue[-1] for queue in queues if queue]


def sequence(schedule: Schedule) -> list[Op]:
    """All ops, each after the one before it on its rank and after what it needs. Raises ScheduleError where there is
    no such sequence, since ranks wait for each other."""
    ran, stuck = walk(schedule)
    if stuck:
        waits = ", ".join(f"rank {op.stage % schedule.pp} waits to run {op}" for op in stuck)
        raise ScheduleError(f"{schedule.name}: no rank can go on: {waits}")
    return ran
