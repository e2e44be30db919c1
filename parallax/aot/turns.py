"""How often the pipeline's loops turn whose trip count depends on data: as often as the tick table says. No jax."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from parallax.hlo import Loop
from parallax.schedule.table import Row, TickTable

# The scopes that `parallax.pipeline` puts around a run of ticks and around each of its loops of one turn or none.
_NAME = re.compile(r"/ticks(\d+)/.*/(embed|loss|embed_gradient|forward|backward)/while$")


@dataclass(frozen=True)
class Turns:
    """Turns a tick, on average over a run of ticks, by (its first tick, phase)."""

    a_tick: Mapping[tuple[int, str], Fraction]

    def of(self, loop: Loop) -> Fraction | None:
        """Turns of a loop each time that it is reached; None where neither the text nor the table says."""
        if loop.trips is not None:
            return Fraction(loop.trips)
        match = _NAME.search(loop.name)
        return self.a_tick.get((int(match.group(1)), match.group(2))) if match else None


def turns(table: TickTable) -> Turns:
    """Forward and backward count where any rank is busy (with parallel.skip_idle): a tick takes as long as its slowest
    rank."""
    view = Row(*np.moveaxis(table.cells, -1, 0))
    valid = {
        "embed": view.embed_valid,
        "loss": view.loss_valid,
        "embed_gradient": view.embed_grad_valid,
        "forward": view.f_valid,
        "backward": view.b_valid,
    }
    return Turns(
        {
            (run.start, phase): Fraction(int(cells[run.start : run.stop].any(axis=1).sum()), run.ticks)
            for run in table.runs
            for phase, cells in valid.items()
        }
    )
