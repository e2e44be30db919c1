"""Memory against time: the Pareto front of what was priced, the choice and some of the others, as SVG. No jax."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from parallax.plan.page_style import LIMITS, count, key, memory_scale, time_scale
from parallax.plan.search import NEAR, Candidate, Found
from parallax.text import layout

MOST_POINTS = 300  # drawn that are not on the front
SMALL = 0.1  # of the memory: bars of less have their own scale
SIZES = tuple(2.0**i for i in range(60))  # bytes, and seconds below: steps of axes over decades
TIMES = tuple(n * 10.0**e for e in range(-6, 6) for n in (1, 2, 5))


def pareto_front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that no other beats in memory or time without losing in the other, smallest first; one of equals."""
    front, fastest = [], math.inf
    for candidate in sorted(candidates, key=lambda c: (c.memory_bytes, c.step_time_s)):
        if candidate.step_time_s < fastest:
            front.append(candidate)
            fastest = candidate.step_time_s
    return front


def thinned(candidates: Sequence[Candidate], most: int = MOST_POINTS) -> Sequence[Candidate]:
    """Every second, third, ... of them, so that at most `most` are left."""
    return candidates[:: max(1, -(-len(candidates) // most))]


@dataclass(frozen=True)
class _Axis:
    """Logarithmic, from `low` to `high`."""

    low: float
    high: float

    def share(self, value: float) -> float:
        """Percent of the way."""
        return 100 * math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self, unit: float, ladder: Sequence[float], apart: float) -> list[float]:
        """Round numbers of `unit`, or steps of the `ladder` where the axis spans a decade; so many percent from each
        other, for their text to have room, and none at the very end."""
        if self.high < 10 * self.low:
            span = (self.high - self.low) / unit
            step = unit * next(s for e in range(-9, 12) for n in (1, 2, 5) if span <= 6 * (s := n * 10.0**e))
            ladder = [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        kept: list[float] = []
        for tick in ladder:
            if 0 <= self.share(tick) < 97 and (not kept or self.share(tick) - self.share(kept[-1]) >= apart):
                kept.append(tick)
        return kept


def scatter(found: Found) -> str:
    """The front of all that was priced, the choice, and some of the others. Positions are shares of the plot, so that
    text and marks keep their size on any screen."""
    assert found.best is not None
    best, hbm, budget = found.best, found.request.machine.hbm_bytes, found.request.budget_bytes
    front = pareto_front((*found.fitting, *found.too_large))
    largest = max(front[-1].memory_bytes, best.memory_bytes)
    slowest, fastest = max(front[0].step_time_s, best.step_time_s), front[-1].step_time_s
    small = largest < SMALL * hbm
    x = _Axis(0.9 * front[0].memory_bytes, 1.1 * (largest if small else max(largest, hbm)))
    y = _Axis(fastest * (fastest / (1.2 * slowest)) ** 0.12, 1.2 * slowest)  # room for a word below
    on_front = set(map(id, front))
    others = [c for c in (*found.fitting, *found.too_large) if id(c) not in on_front]
    inside = [c for c in others if c.memory_bytes <= x.high and c.step_time_s <= y.high]
    shown = thinned(inside)

    def at(c: Candidate) -> tuple[float, float]:
        return x.share(c.memory_bytes), 100 - y.share(c.step_time_s)

    def mark(c: Candidate, kind: str = "") -> str:
        a, b = at(c)
        tip = f"<title>{escape(_tip(c))}</title>"
        if c.memory_bytes <= budget:
            return f'<circle class="fits{kind}" cx="{a:.2f}%" cy="{b:.2f}%" r="3.5">{tip}</circle>'
        return f'<use class="lost{kind}" href="#cross" x="{a:.2f}%" y="{b:.2f}%">{tip}</use>'

    drawn = [
        '<defs><path id="cross" d="M-3.5-3.5 3.5 3.5M-3.5 3.5 3.5-3.5"/></defs>',
        *_grid(x, y),
        *(mark(c) for c in shown),
        _stairs([at(c) for c in front]),
        *(mark(c, " best") for c in front),
        *((_upright("limit budget", x.share(budget)), _upright("limit", x.share(hbm))) if not small else ()),
        _ring(*at(best)),
    ]
    whole = memory_scale(hbm)
    caption = f"{count(len(front), 'configuration')} on the front, and {len(shown):,} of the {len(others):,} others"
    if outside := len(others) - len(inside):
        caption += f"; {outside:,} are larger or slower than the axes reach"
    if small:
        caption += f". A device has {whole.name(hbm)}, far to the right"
    return (
        f'<figure>{_marks(None if small else (whole.name(budget), whole.name(hbm)))}<div class="plot">'
        f'<svg role="img" aria-label="memory against time">{"".join(drawn)}</svg></div>'
        f"<figcaption>{caption}. Both axes are logarithmic. Of layouts that are as fast within {NEAR:.1%} the "
        "simplest is chosen, which may lie beside the front.</figcaption></figure>"
    )


def _grid(x: _Axis, y: _Axis) -> list[str]:
    out = []
    for tick in x.ticks(memory_scale(x.high).per, SIZES, 17):
        a, unit = x.share(tick), memory_scale(tick)
        out.append(_upright("grid", a))
        out.append(f'<text x="{a:.2f}%" y="100%" dy="18" text-anchor="middle">{tick / unit.per:.4g} {unit.unit}</text>')
    for tick in y.ticks(time_scale(y.high).per, TIMES, 8):
        b, unit = 100 - y.share(tick), time_scale(tick)
        out.append(f'<line class="grid" x1="0" y1="{b:.2f}%" x2="100%" y2="{b:.2f}%"/>')
        text = f"{tick / unit.per:.4g} {unit.unit}"
        out.append(f'<text x="0" y="{b:.2f}%" dx="-8" dy="4" text-anchor="end">{text}</text>')
    out.append('<text x="100%" y="100%" dy="36" text-anchor="end">memory of a device →</text>')
    return [*out, '<text x="-44" y="-12">↑ time of a step</text>']


def _upright(kind: str, at: float) -> str:
    return f'<line class="{kind}" x1="{at:.2f}%" y1="0" x2="{at:.2f}%" y2="100%"/>'


def _stairs(points: Sequence[tuple[float, float]]) -> str:
    """The least time for each memory: level from a point to above the next, then down to it."""
    corners = [points[0]]
    for a, b in points[1:]:
        corners += [(a, corners[-1][1]), (a, b)]
    line = " ".join(f"{a:.2f},{b:.2f}" for a, b in corners)
    return (
        '<svg viewBox="0 0 100 100" preserveAspectRatio="none" width="100%" height="100%">'
        f'<polyline class="front" vector-effect="non-scaling-stroke" points="{line}"/></svg>'
    )


def _ring(a: float, b: float) -> str:
    side = 'dx="-12" text-anchor="end"' if a > 50 else 'dx="12"'
    return (
        f'<circle class="ring" cx="{a:.2f}%" cy="{b:.2f}%" r="8"/>'
        f'<text class="chosen" x="{a:.2f}%" y="{b:.2f}%" dy="20" {side}>chosen</text>'
    )


def _marks(limits: tuple[str, str] | None) -> str:
    """`limits` are budget and memory; None where they are far off, and nothing is near them."""
    marks = [
        ('<circle class="fits best" cx="13" cy="7" r="4"/>', "fits"),
        ('<path class="front" d="M0 4H13V10H26"/>', "Pareto front: least time for the memory"),
        ('<circle class="ring" cx="13" cy="7" r="6"/>', "chosen"),
    ]
    if limits:
        marks.insert(1, ('<path class="lost best" d="M9 3 17 11M9 11 17 3"/>', "over the budget"))
        marks += [(LIMITS[0], f"budget {limits[0]}"), (LIMITS[1], f"memory {limits[1]}")]
    return key(marks)


def _tip(c: Candidate) -> str:
    memory, time = memory_scale(c.memory_bytes).name(c.memory_bytes), time_scale(c.step_time_s).name(c.step_time_s)
    return f"{layout(c.parallel)}, micro batch {c.train.micro_batch_size}, remat {c.train.remat}: {memory}, {time}"
