"""Pictures of a tick table: a text timeline for the terminal, an SVG for documents and talks. No jax."""

from __future__ import annotations

from colorsys import hls_to_rgb
from fractions import Fraction
from html import escape
from itertools import accumulate
from string import ascii_lowercase

from parallax.schedule.op import Op
from parallax.schedule.simulate import simulate, timeline
from parallax.schedule.table import Run, TickTable

TITLES = {"1f1b": "1F1B", "interleaved": "Interleaved 1F1B", "gpipe": "GPipe", "forward": "Forward only"}


def timeline_text(table: TickTable, width: int | None = None) -> str:
    """One row a rank (its forwards over its backwards), one column a tick, and a legend. Where that is wider than
    `width` characters, ticks in the middle are left out, and counted."""
    schedule, p = table.schedule, table.schedule.pp
    op_at = {(tick, op.stage % p, op.kind): op for op, tick in table.tick_of.items()}
    runs = {"F": _ticks_with(table, "forward"), "B": _ticks_with(table, "backward")}
    margin = len(f"rank {p - 1} F")
    cell = 1 + max(len(str(table.ticks - 1)), *(len(_label(table, op)) for op in table.tick_of))

    shown: list[int | None] = list(range(table.ticks))  # None is the gap
    fit = table.ticks if width is None else max((width - margin) // cell, 3)
    if fit < table.ticks:
        head, tail = fit // 2, table.ticks - (fit - 1 - fit // 2)
        shown[head:tail] = [None]

    def text(tick: int, rank: int, kind: str) -> str:
        if op := op_at.get((tick, rank, kind)):
            return _label(table, op)
        return "·" if tick in runs[kind] else ""

    def line(start: str, cells: list[str]) -> str:
        return (f"{start:>{margin}}" + "".join(f"{c:>{cell}}" for c in cells)).rstrip()

    lines = [line("tick  ", ["…" if t is None else str(t) for t in shown])]
    for rank in range(p):
        for kind in "FB" if schedule.has_backward else "F":
            start = f"rank {rank} F" if kind == "F" else kind
            lines.append(line(start, ["…" if t is None else text(t, rank, kind) for t in shown]))
    lines.append("")
    if None in shown:
        lines.append(f"… {table.ticks - len(shown) + 1} of {table.ticks} ticks are left out")
    lines.append("F forward, then B backward of the microbatch with that number")
    if schedule.virtual_stages > 1:
        names = [f"{_chunk(c)} stages {c * p}–{c * p + p - 1}" for c in range(schedule.virtual_stages)]
        lines.append("chunks: " + ", ".join(names))
    lines.append("· idle while other ranks work; blank where nobody does")
    return "\n".join(lines) + "\n"


def _ticks_with(table: TickTable, phase: str) -> set[int]:
    return {tick for run in table.runs if getattr(run, phase) for tick in range(run.start, run.stop)}


def _label(table: TickTable, op: Op) -> str:
    v = table.schedule.virtual_stages
    return f"{op.microbatch}{_chunk(op.stage // table.schedule.pp)}" if v > 1 else str(op.microbatch)


def _chunk(chunk: int) -> str:
    return ascii_lowercase[chunk] if chunk < len(ascii_lowercase) else f".{chunk}"


# Sizes in pixels. Blue and orange stay apart for every kind of colour vision.
LEFT, RIGHT, TOP, BELOW, LANE, PITCH = 72, 104, 118, 84, 32, 38
INK, QUIET, RULE, IDLE = "#1f2430", "#5d6575", "#b9c0cc", "#eef0f4"
HUES = {"F": 0.595, "B": 0.085}
FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


def timeline_svg(table: TickTable) -> str:
    """The lock-step timeline as a self-contained SVG: a lane for each rank, a box for each op, labelled by microbatch.

    A backward takes twice its forward; a tick lasts, for all ranks, as long as the phases that any of them uses."""
    schedule, p, v = table.schedule, table.schedule.pp, table.schedule.virtual_stages
    costs, boxes = simulate(table), timeline(table)
    box = min(max(1120 / float(costs.total * v), 16), 40)  # the forward of one chunk
    plot = float(costs.total) * v * box
    width, floor = max(LEFT + plot + RIGHT, 760), TOP + p * PITCH

    def x(time: Fraction) -> float:
        return LEFT + float(time) * v * box

    def y(rank: int) -> int:
        return TOP + rank * PITCH

    out = [_text(LEFT, 36, _title(table), size=20, weight=600), _text(LEFT, 59, _summary(table, costs.bubble), QUIET)]

    # Lanes, cut at the ticks; what no box covers is idle.
    edges = _tick_edges(table)
    for rank in range(p):
        out.append(_rect(LEFT, y(rank), plot, LANE, IDLE))
        out.append(_text(LEFT - 12, y(rank) + 21, f"rank {rank}", anchor="end"))
        out.append(_text(LEFT + plot + 40, y(rank) + 21, str(costs.peak_in_flight[rank]), anchor="middle"))
    out.append(_text(LEFT + plot + 40, TOP - 26, "peak in", QUIET, size=11, anchor="middle"))
    out.append(_text(LEFT + plot + 40, TOP - 12, "flight", QUIET, size=11, anchor="middle"))
    out += [_rule(x(edge), TOP, x(edge), floor - PITCH + LANE, "#ffffff") for edge in edges[1:-1]]

    # Boxes, then their numbers, for each kind and chunk.
    size = min(13, 0.72 * box, 1.44 * box / len(str(schedule.microbatches - 1)))
    for kind in "FB" if schedule.has_backward else "F":
        for chunk in range(v):
            spans = [span for span in boxes if span.op.kind == kind and span.op.stage // p == chunk]
            fill, ink = _colours(kind, chunk, v)
            out.append(f'<g fill="{fill}">')
            for rank, start, stop, op in spans:
                what = f"{op}: tick {table.tick_of[op]}, rank {rank}"
                out.append(_rect(x(start) + 0.5, y(rank), x(stop) - x(start) - 1, LANE, radius=3, tip=what))
            out.append(f'</g><g fill="{ink}" font-size="{size:.1f}" text-anchor="middle">')
            for rank, start, stop, op in spans:
                out.append(f'<text x="{(x(start) + x(stop)) / 2:.1f}" y="{y(rank) + 21}">{op.microbatch}</text>')
            out.append("</g>")

    # Phases above the lanes.
    for run in table.runs:
        left, right = x(edges[run.start]), x(edges[run.stop])
        out.append(_rule(left + 2, TOP - 10, right - 2, TOP - 10, RULE, stroke=2))
        out.append(_text((left + right) / 2, TOP - 18, _phase(run, table.runs), QUIET, size=12, anchor="middle"))
        if run.start:
            out.append(_rule(left, TOP - 22, left, floor, RULE, dash="3 3"))

    # Time axis below, with at most thirteen numbers.
    step = next(s for e in range(9) for n in (1, 2, 5) if costs.total / (s := n * 10**e) <= 12)
    for time in range(0, int(costs.total) + 1, step):
        at = x(Fraction(time))
        out.append(_rule(at, floor + 2, at, floor + 7, RULE))
        out.append(_text(at, floor + 21, str(time), QUIET, size=11, anchor="middle"))
    out.append(_rule(LEFT, floor + 2, LEFT + plot, floor + 2, RULE))
    out.append(_text(LEFT + plot + 12, floor + 21, "time", QUIET, size=11))

    out += _legend(table, floor + 44)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{floor + BELOW}" '
        f'viewBox="0 0 {width:.0f} {floor + BELOW}" font-family="{FONT}" font-size="13">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *out, "</svg>"]) + "\n"


def _title(table: TickTable) -> str:
    schedule = table.schedule
    name = TITLES.get(schedule.name, schedule.name)
    return f"{name}: p = {schedule.pp}, v = {schedule.virtual_stages}, m = {schedule.microbatches}"


def _summary(table: TickTable, bubble: Fraction) -> str:
    ticks = f"{table.ticks} tick{'s' * (table.ticks > 1)} in lock step"
    return f"{ticks} · bubble {bubble} = {float(bubble):.1%} (simulated, a backward as long as two forwards)"


def _phase(run: Run, runs: tuple[Run, ...]) -> str:
    if run.forward and run.backward:
        return "steady"
    if any(r.forward and r.backward for r in runs):
        return "warm-up" if run.forward else "cool-down"
    return "forwards" if run.forward else "backwards"


def _tick_edges(table: TickTable) -> list[Fraction]:
    """When each tick starts, and when the last one ends."""
    v = table.schedule.virtual_stages
    lengths = [Fraction(run.forward + 2 * run.backward, v) for run in table.runs for _ in range(run.ticks)]
    return list(accumulate(lengths, initial=Fraction(0)))


def _legend(table: TickTable, top: int) -> list[str]:
    v = table.schedule.virtual_stages
    out, left = [], float(LEFT)

    def entry(fills: list[str], text: str) -> None:
        nonlocal left
        for fill in fills:
            out.append(_rect(left, top, 18, 18, fill, radius=3))
            left += 20
        out.append(_text(left + 5, top + 14, text, QUIET, size=12))
        left += 30 + 6.6 * len(text)

    chunks = f", chunks 0 to {v - 1}" if v > 1 else ""
    entry([_colours("F", chunk, v)[0] for chunk in range(v)], "forward" + chunks)
    if table.schedule.has_backward:
        entry([_colours("B", chunk, v)[0] for chunk in range(v)], "backward" + chunks)
    entry([IDLE], "idle")
    out.append(_text(left, top + 14, "number: microbatch · time 1: forward of a whole stage", QUIET, size=12))
    return out


def _colours(kind: str, chunk: int, v: int) -> tuple[str, str]:
    """Fill and ink of a box: later chunks are darker."""
    depth = (chunk + 0.5) / v
    lightness = 0.80 - 0.40 * depth
    return _hex(HUES[kind], lightness, 0.72), "#ffffff" if lightness < 0.52 else _hex(HUES[kind], 0.16, 0.80)


def _hex(hue: float, lightness: float, saturation: float) -> str:
    return "#" + "".join(f"{round(255 * c):02x}" for c in hls_to_rgb(hue, lightness, saturation))


def _text(
    x: float, y: float, text: str, fill: str = INK, size: int = 13, anchor: str = "start", weight: int = 400
) -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y}" fill="{fill}" {style}>{escape(text)}</text>'


def _rect(x: float, y: float, w: float, h: float, fill: str | None = None, radius: int = 0, tip: str = "") -> str:
    style = (f' fill="{fill}"' if fill else "") + (f' rx="{radius}"' if radius else "")
    box = f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{h}"{style}'
    return f"{box}><title>{escape(tip)}</title></rect>" if tip else f"{box}/>"


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str, stroke: int = 1, dash: str = "none") -> str:
    ends = f'x1="{x1:.1f}" y1="{y1}" x2="{x2:.1f}" y2="{y2}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{stroke}" stroke-dasharray="{dash}"/>'
