"""Slots of a built-in schedule's ring buffers by formula, to price layouts by the thousand. No jax."""

from __future__ import annotations

from functools import cache

from parallax.schedule.table import Buffers


@cache
def buffers(kind: str, pp: int, v: int, m: int) -> Buffers:
    """`TickTable.buffers` of "1f1b", "interleaved" or "gpipe", without making the table.

    From the ticks of `parallax.schedule.order`: a group of microbatches passes a chunk of a rank in as many ticks as it
    has members, or pp where that is more. Rank 0 has most in flight: the forwards of the ticks up to its first
    backward, or all m·v, and then one slot more for the masked writes of the ticks that follow. A microbatch of a group
    of more than pp comes round before its next chunk is due. And where a group is smaller than the first, whose size
    sets the tick of the first backward, its microbatches reach the loss ahead of their backwards, by a tick a chunk.
    """
    count = max(m // pp, 1)  # of groups, sizes differing by at most one
    smallest, longest, shortest = m // count, max(-(-m // count), pp), max(m // count, pp)
    if kind == "gpipe":
        first_backward = m + pp - 2  # on the last rank, in the tick of its last forward
        losses = m
    else:
        first_backward = (v - 1) * longest + pp - 1
        losses = min(smallest, 1 + (v - 1) * (longest - shortest))
    inbox = 1 + (longest - pp if v > 1 else 0)
    return Buffers(min(m * v + 1, first_backward + pp), inbox, inbox, losses)
