"""The built-in schedules, made for lock step; and a schedule by its name. No jax.

The executor works in lock step: in one tick a rank runs at most one forward and then at most one backward, and what it
sends arrives in the next tick. The generators below are written for that rhythm: their orders reach p - 1 + m·v forward
ticks and as many backward ticks, which is the ideal.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from parallax.schedule.csv import read_csv
from parallax.schedule.op import MAX_OPS, Op, Schedule, ScheduleError


def groups(m: int, p: int) -> list[int]:
    """Sizes of the microbatch groups that pass the chunks of a rank together: ⌊m/p⌋ groups of at least p, sizes
    differing by at most one, larger first; one group where m < p."""
    count = max(m // p, 1)
    return [m // count + (i < m % count) for i in range(count)]


def _rank_ticks(p: int, v: int, m: int) -> list[tuple[int, int, int]]:
    """(tick, chunk, microbatch) of the forwards on rank 0: a group passes a chunk in max(size, p) ticks, for the
    ring needs p ticks to bring a microbatch back for its next chunk. Rank r is r ticks later; the backward is the
    mirror image, chunks and ranks counted from the other end."""
    sizes = groups(m, p)
    starts = [0, *accumulate(v * max(size, p) for size in sizes)]
    first = [0, *accumulate(sizes)]
    return [
        (start + chunk * max(size, p) + j, chunk, mb + j)
        for size, start, mb in zip(sizes, starts, first, strict=False)
        for chunk in range(v)
        for j in range(size)
    ]


def _schedule(name: str, p: int, v: int, m: int, first_backward: int | None) -> Schedule:
    """`first_backward` is the tick of the first backward, which the last rank runs; None leaves backwards out."""
    ticks = _rank_ticks(p, v, m)

    def order(rank: int) -> tuple[Op, ...]:
        timed = [(tick + rank, Op("F", chunk * p + rank, mb)) for tick, chunk, mb in ticks]
        if first_backward is not None:
            timed += [
                (first_backward + tick + p - 1 - rank, Op("B", (v - 1 - chunk) * p + rank, mb))
                for tick, chunk, mb in ticks
            ]
        return tuple(op for _, op in sorted(timed, key=lambda item: (item[0], item[1].kind == "B")))

    return Schedule(name, p, v, m, tuple(order(rank) for rank in range(p)))


def interleaved(p: int, v: int, m: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2): v chunks a rank, bubble (p-1)/(v·m)
    for every m ≥ p, (m + v·p - 1)/(v·m) - 1 for m < p. At most (v+1)·p - 1 chunks are in flight when p divides m."""
    return _schedule("interleaved", p, v, m, (v - 1) * max(groups(m, p)[0], p) + p - 1)


def one_f_one_b(p: int, v: int, m: int) -> Schedule:
    """1F1B in lock step: bubble (p-1)/m, and min(m, 2(p-r)-1) microbatches in flight at rank r."""
    _one_chunk("1f1b", v)
    return _schedule("1f1b", p, 1, m, p - 1)


def gpipe(p: int, v: int, m: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965): bubble (p-1)/m, m in flight."""
    _one_chunk("gpipe", v)
    return _schedule("gpipe", p, 1, m, m + p - 1)


def forward_only(p: int, v: int, m: int) -> Schedule:
    """The forwards alone, for evaluation."""
    return _schedule("forward", p, v, m, None)


def _one_chunk(name: str, v: int) -> None:
    if v != 1:
        raise ScheduleError(f"virtual_stages = {v} needs schedule = interleaved; {name} takes virtual_stages = 1")


GENERATORS: dict[str, Callable[[int, int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "gpipe": gpipe,
}


def make_schedule(name: str, pp: int, virtual_stages: int, microbatches: int) -> Schedule:
    """The named schedule, or that of a file whose name ends in .csv, for `pp` ranks, `virtual_stages` chunks a rank and
    `microbatches` microbatches a step. Raises ScheduleError where they do not fit."""
    sizes = {"pp": pp, "virtual_stages": virtual_stages, "microbatches": microbatches}
    if name.endswith(".csv"):
        schedule = read_csv(name)
        found = {key: getattr(schedule, key) for key in sizes}
        if found != sizes:
            raise ScheduleError(
                *(f"{name}: has {key} = {found[key]}, not {size}" for key, size in sizes.items() if found[key] != size)
            )
        return schedule
    if name not in GENERATORS:
        raise ScheduleError(f"schedule = {name} is not known; use {', '.join(GENERATORS)} or a .csv file")
    for key, value in sizes.items():
        if value < 1:
            raise ScheduleError(f"{key} = {value} must be at least 1")
    if virtual_stages > 1 and pp == 1:
        raise ScheduleError(f"virtual_stages = {virtual_stages} needs pp > 1; use virtual_stages = 1")
    if pp * virtual_stages * microbatches > MAX_OPS:
        raise ScheduleError(
            f"pp {pp} x virtual_stages {virtual_stages} x microbatches {microbatches} = "
            f"{pp * virtual_stages * microbatches} must be at most {MAX_OPS}; use smaller ones"
        )
    return GENERATORS[name](pp, virtual_stages, microbatches)
