"""A plan as one HTML page: no script, nothing fetched, light and dark, from a phone's width up. No jax."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from parallax.config import SCHEDULES, Parallel
from parallax.plan.estimate import HFU_FLOPS, MFU_FLOPS, Estimate, Job
from parallax.plan.explain import Step
from parallax.plan.search import NEAR, Candidate, Found, Request
from parallax.plan.show import NAMES
from parallax.schedule.draw import TITLES, timeline_svg
from parallax.schedule.order import make_schedule
from parallax.schedule.simulate import bubble_formula
from parallax.schedule.table import tick_table
from parallax.stages import Stages
from parallax.text import duration, layout

ROWS = 10  # of the table of layouts
MOST_POINTS = 300  # drawn that are not on the front
MOST_RANKS = 16  # drawn of a pipeline
MOST_WORK = 48  # chunk-microbatches and ranks that a timeline of readable numbers has room for
SMALL = 0.1  # of the memory: bars of less have their own scale
SIZES = tuple(2.0**i for i in range(60))  # bytes, and seconds below: steps of axes over decades
TIMES = tuple(n * 10.0**e for e in range(-6, 6) for n in (1, 2, 5))
WIDE = 0.04  # of a bar: a part that has room for its number

MEMORY_NAMES = {
    "weights": "weights",
    "masters": "float32 masters of the weights",
    "moments": "Adam's moments",
    "gradients": "gradients, summed in float32",
    "stash": "stash: activations kept for the backward",
    "activations": "activations kept for the backward",
    "inboxes": "inboxes: activations between stages",
    "logits": "logits and loss",
    "workspace": "workspace of the fullest moment",
}
LIMITS = tuple(f'<line class="{kind}" x1="13" y1="-1" x2="13" y2="15"/>' for kind in ("limit budget", "limit"))
SAID = {"memory": MEMORY_NAMES, "time": NAMES}
# States violet, activations green; work blue, communication orange, idle grey. Every ink on them is near black.
COLOURS = {
    "memory": {
        "weights": "#8f82d8",
        "masters": "#b0a5e6",
        "moments": "#d0c9f3",
        "gradients": "#d79ad0",
        "stash": "#4fae86",
        "activations": "#4fae86",
        "inboxes": "#8fd3b1",
        "logits": "#c3dc7e",
        "workspace": "#e3ecb5",
    },
    "time": {
        "matmul": "#5f97dd",
        "attention": "#93bcec",
        "memory_bound": "#c2daf6",
        "recompute": "#7fc7d9",
        "tp": "#e08d45",
        "cp": "#f1b37a",
        "ep": "#d98a72",
        "pp": "#f7d3a8",
        "dp": "#e3bd4f",
        "vocabulary": "#e5a3b8",
        "optimizer": "#f3c9d5",
        "bubble": "#a9b0bd",
        "padding": "#ccd1da",
        "launch": "#dfe3ea",
    },
}
STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1f2430; --quiet: #5d6575; --rule: #d5dae2; --track: #eef0f4;
  --front: #1763b6; --lost: #9a5b13; --choice: #b3261e }
@media (prefers-color-scheme: dark) { :root { --paper: #14171d; --ink: #e4e7ec; --quiet: #a2a9b6; --rule: #3a414d;
  --track: #232830; --front: #7fb4f0; --lost: #e0a35a; --choice: #ff8a80 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); overflow-wrap: anywhere;
  font: 16px/1.5 system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px }
h1 { font-size: 1.75rem; line-height: 1.25; margin: 0 0 4px }
h2 { font-size: 1.2rem; margin: 44px 0 10px; padding-top: 14px; border-top: 1px solid var(--rule) }
p { margin: 8px 0; max-width: 76ch }
.quiet, .key, figcaption { color: var(--quiet); font-size: .875rem }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 18px 28px; margin: 22px 0 }
.figures dt { color: var(--quiet); font-size: .875rem }
.figures dd { margin: 0; font-size: 1.45rem; line-height: 1.3; font-weight: 600 }
.figures small { display: block; font-size: .875rem; font-weight: 400; color: var(--quiet) }
.words { display: grid; grid-template-columns: max-content 1fr; gap: 5px 24px; margin: 12px 0 }
.words dt { font-weight: 600 }
.words dd { margin: 0 }
.steps { margin: 0; padding: 0; list-style: none; counter-reset: step }
.steps > li { counter-increment: step; margin: 0 0 16px; padding-left: 36px; position: relative }
.steps > li::before { content: counter(step); position: absolute; left: 0; top: 2px; width: 24px; line-height: 22px;
  border: 1px solid var(--rule); border-radius: 50%; text-align: center; font-size: .8rem; color: var(--quiet) }
.steps p { margin: 0 }
.steps ul { margin: 2px 0 0; padding-left: 18px; color: var(--quiet); font-size: .9375rem; max-width: 82ch }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; grid-auto-flow: dense; gap: 8px 14px;
  align-items: center; margin: 14px 0 8px; font-variant-numeric: tabular-nums }
.bars .end { grid-column: 3; text-align: right }
.bars .bar { grid-column: 2 }
.bar { position: relative; display: flex; height: 28px; background: var(--track) }
.bar span { flex: none; overflow: hidden; text-align: center; font-size: 11px; line-height: 28px; color: #10141c;
  box-shadow: inset 0 0 0 .5px rgb(0 0 0 / .3) }
.bar i, .mini i { position: absolute; top: -4px; bottom: -4px; border-left: 2px solid var(--ink) }
.bar i.budget, .mini i { border-left-style: dashed }
.mini { position: relative; display: block; min-width: 110px; height: 10px; background: var(--track) }
.mini b { display: block; height: 10px; background: var(--quiet) }
.mini i { top: -3px; bottom: -3px }
.key { display: flex; flex-wrap: wrap; gap: 4px 20px; padding: 0; margin: 6px 0; list-style: none }
.key li { display: flex; gap: 6px }
.key svg { flex: none; width: 26px; height: 14px; margin-top: 3px; overflow: visible }
.scroll { overflow-x: auto; margin: 12px 0 }
table { border-collapse: collapse; overflow-wrap: normal; font-size: .9375rem; font-variant-numeric: tabular-nums }
th, td { padding: 5px 18px 5px 0; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--rule) }
thead th { font-size: .8125rem; color: var(--quiet); vertical-align: bottom }
tbody th { font-weight: 400 }
tbody small { display: block; font-size: .8125rem; font-weight: 400; color: var(--quiet) }
.number { text-align: right }
tr.total > *, tr.choice > * { font-weight: 600 }
.item { display: flex; align-items: baseline; gap: 10px }
.swatch { flex: none; width: 24px; text-align: center; font-size: 11px;
  line-height: 18px; font-weight: 400; color: #10141c; box-shadow: inset 0 0 0 .5px rgb(0 0 0 / .3) }
figure { margin: 12px 0 }
figcaption { max-width: 90ch }
.plot { padding: 26px 16px 44px 60px }
.plot svg { display: block; width: 100%; height: 380px; overflow: visible }
.plot text { font-size: 12px; fill: var(--quiet) }
.grid { stroke: var(--rule) }
.limit { stroke: var(--ink); stroke-width: 1.5 }
.budget { stroke-dasharray: 5 4 }
.fits { fill: var(--front); opacity: .5 }
.lost { stroke: var(--lost); fill: none; stroke-width: 1.3; opacity: .65 }
.best { opacity: 1 }
.front { stroke: var(--front); fill: none; stroke-width: 1.5 }
.ring { stroke: var(--choice); fill: none; stroke-width: 2.5 }
.plot .chosen { fill: var(--choice); font-weight: 600; paint-order: stroke; stroke: var(--paper); stroke-width: 4px }
.drawing { border: 1px solid var(--rule) }
.drawing svg { display: block; width: 100%; height: auto }
@media (prefers-color-scheme: dark) { .drawing svg { filter: invert(.92) hue-rotate(180deg) } }
@media (max-width: 640px) {
  main { padding: 20px 16px 48px }
  h1 { font-size: 1.4rem }
  .figures { grid-template-columns: 1fr 1fr }
  .figures dd { font-size: 1.2rem }
  .words { display: block }
  .words dd { margin: 0 0 8px }
  .bars { grid-template-columns: 1fr max-content }
  .bars .end { grid-column: 2 }
  .bars .bar { grid-column: 1 / -1; margin-bottom: 8px }
  th, td { padding-right: 16px }
  thead th { white-space: normal }
  tbody th { white-space: normal; min-width: 150px }
  .plot { padding: 26px 8px 44px 52px }
  .plot svg { height: 320px }
}
"""


@dataclass(frozen=True)
class Scale:
    """One unit for all numbers of a table, so that they compare at a glance."""

    unit: str
    per: float  # of the unit, in bytes or seconds
    digits: int  # after the point

    def show(self, value: float) -> str:
        if 0 < value / self.per < 0.5 * 10**-self.digits:
            return f"< {10**-self.digits:.{self.digits}f}"
        return f"{value / self.per:,.{self.digits}f}"

    def name(self, value: float) -> str:
        return f"{self.show(value)} {self.unit}"


def memory_scale(most: float) -> Scale:
    """For sizes of at most `most` bytes: three digits or more of it."""
    return _scale(most, (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1)))


def time_scale(most: float) -> Scale:
    """For times of at most `most` seconds."""
    return _scale(most, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)))


def _scale(most: float, units: Sequence[tuple[str, float]]) -> Scale:
    unit, per = next((found for found in units if most >= found[1]), units[-1])
    return Scale(unit, per, 2 if most / per < 10 else 1)


def plan_page(found: Found, estimate: Estimate, steps: Sequence[Step]) -> str:
    """A self-contained HTML page: the choice of `found` and its `estimate`, why (`steps`), memory and time by item, the
    other layouts, memory against time, and the pipeline's timeline."""
    assert found.best is not None and estimate.time is not None, "a plan has a choice, on a machine with a speed"
    job = estimate.job
    title = escape(f"{job.shape.name} on {job.devices:,} x {job.machine.name}")
    sections = (
        ("Layout", _layout(job)),
        ("Why", _steps(steps)),
        ("Memory of a device", _memory(found.request, estimate)),
        ("Time of a step", _time(estimate)),
        ("Best layouts", _layouts(found)),
        ("Memory against time", _scatter(found)),
        ("Pipeline", _pipeline(job)),
    )
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<title>{title}</title>\n<link rel="icon" href="data:,">\n<style>{STYLE}{_colour_rules()}</style>',
            f"</head>\n<body>\n<main>\n<h1>{title}</h1>",
            _figures(found.request, estimate),
            *(f"<section>\n<h2>{name}</h2>\n{html}\n</section>" for name, html in sections),
            "</main>\n</body>\n</html>\n",
        ]
    )


def _colour_rules() -> str:
    return "".join(f".{kind}-{item} {{ background: {c} }}\n" for kind, of in COLOURS.items() for item, c in of.items())


def _figures(request: Request, estimate: Estimate) -> str:
    job, scale, time = estimate.job, memory_scale(estimate.peak_bytes), estimate.step_time_s
    hbm = request.machine.hbm_bytes
    whole, kept = memory_scale(hbm), hbm - request.budget_bytes
    figures = (
        ("step", time_scale(time).name(time), duration(time) if time >= 120 else f"{job.tokens:,} tokens"),
        ("tokens a second", f"{estimate.tokens_per_s:,.0f}", f"{estimate.tokens_per_s / job.devices:,.0f} a device"),
        ("MFU", f"{estimate.mfu:.1%}", f"HFU {estimate.hfu:.1%}"),
        (
            "memory of a device",
            scale.name(estimate.peak_bytes),
            f"of {whole.name(hbm)}; {whole.name(hbm - estimate.peak_bytes)} free, {whole.name(kept)} of it as headroom",
        ),
    )
    cells = "".join(f"<div><dt>{a}</dt><dd>{b} <small>{c}</small></dd></div>" for a, b, c in figures)
    about = f"{job.shape.parameters:,} parameters; {job.train.global_batch_size:,} sequences of "
    about += f"{job.train.seq_len:,} tokens a step; {job.train.precision}. All figures are estimates by formula."
    return f'<p>{escape(about)}</p>\n<dl class="figures">{cells}</dl>'


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"


# What was chosen, and why


def _layout(job: Job) -> str:
    words = "".join(f"<dt>{escape(term)}</dt><dd>{escape(said)}</dd>" for term, said in layout_words(job))
    return f'<p><strong>{escape(layout(job.parallel) or "one device")}</strong></p>\n<dl class="words">{words}</dl>'


def layout_words(job: Job) -> list[tuple[str, str]]:
    """What each size of the layout means for this model: term and sentence."""
    p, train, shape = job.parallel, job.train, job.shape
    share, states = train.global_batch_size // p.dp, p.dp * p.ep * p.cp
    words = []
    if p.dp > 1:
        batch = f"each with {share:,} of the {train.global_batch_size:,} sequences of a step"
        words.append(("data parallel", f"{p.dp:,} copies of the model, {batch}"))
    if p.ep > 1:
        batch = f"with {_count(share // p.ep, 'sequence')} each"
        words.append(("expert parallel", f"{p.ep} ranks share each layer's experts, {batch}"))
    if p.pp > 1:
        stages = Stages(len(shape.layers), p.pp, p.virtual_stages)
        each = f"{stages.room}" if not stages.padding else f"at most {stages.room}"
        part = f"{p.virtual_stages} chunks of {each} on each" if p.virtual_stages > 1 else f"{each} on each"
        words.append(("pipeline parallel", f"{len(shape.layers)} layers on {p.pp} ranks, {part}"))
    if p.cp > 1:
        tokens = f"{train.seq_len // p.cp:,} tokens each; attention by {p.context}"
        words.append(("context parallel", f"{p.cp} ranks share each sequence, {tokens}"))
    if p.tp > 1:
        split = ", and the activations between layers along the sequence" if p.sequence_parallel else ""
        words.append(("tensor parallel", f"{p.tp} devices share each layer{split}"))
    order = ", one after the other" if job.microbatches > 1 else ""
    words.append(("microbatches", f"{job.microbatches:,} of {_count(train.micro_batch_size, 'sequence')}{order}"))
    if states > 1:
        how = f"sharded over {states:,} replicas" if p.zero else "whole on every replica"
        words.append(("optimizer states", f"{how} (zero {p.zero})"))
    recomputed = {
        "none": "nothing: all that the backward reads is kept",
        "selective": "attention; the products of the weights are kept",
        "full": "whole layers, from their input",
    }
    words.append(("recomputed", f"{recomputed[train.remat]} (remat {train.remat})"))
    return words


def _steps(steps: Sequence[Step]) -> str:
    items = []
    for step in steps:
        reasons = "".join(f"<li>{escape(reason)}</li>" for reason in step.reasons)
        said = f"<p>{escape(step.question)} <strong>{escape(step.answer)}</strong></p>"
        items.append(f"<li>{said}{f'<ul>{reasons}</ul>' if reasons else ''}</li>")
    return f'<ol class="steps">{"".join(items)}</ol>'


# Stacked bars


def _memory(request: Request, estimate: Estimate) -> str:
    """A bar for each stretch of equal stages, and a table of the items, a column a stretch."""
    hbm, budget, peak = request.machine.hbm_bytes, request.budget_bytes, estimate.peak_bytes
    scale, whole = memory_scale(peak), memory_scale(hbm)
    small = peak < SMALL * hbm
    length = peak if small else max(hbm, peak)
    limits = "" if small else _limit(budget / length, "budget") + _limit(hbm / length)
    groups = [
        ([rank for rank, _ in run], items) for items, run in groupby(enumerate(estimate.stages), key=lambda at: at[1])
    ]
    names = [_stages_name([*ranks], len(estimate.stages)) for ranks, _ in groups]
    bars = "".join(
        _bar(items, length, "memory", scale, name, limits) for name, (_, items) in zip(names, groups, strict=True)
    )
    if small:
        more = f"{whole.name(hbm)}, {hbm / peak:,.0f} times as much"
        key = f'<p class="quiet">The bar is what is used; a device has {more}.</p>'
    else:
        left = f"budget {whole.name(budget)}, which leaves {request.headroom:.1%} as headroom"
        key = _key(zip(LIMITS, (left, f"memory of {request.machine.name}, {whole.name(hbm)}"), strict=True))
    rows = [
        [_item(i, "memory", item), *(scale.show(items[item]) for _, items in groups)]
        for i, item in enumerate(estimate.stages[0])
    ]
    rows.append(["total", *(scale.show(_sum(items)) for _, items in groups)])
    head = [f"{scale.unit} a device", *names]
    table = _table("memory by item", head, rows, range(1, len(head)), {len(rows) - 1: "total"})
    return f'<div class="bars">{bars}</div>\n{key}\n{table}'


def _stages_name(ranks: Sequence[int], count: int) -> str:
    if len(ranks) == 1:
        return f"stage {ranks[0]}" if count > 1 else "every device"
    return f"stages {ranks[0]} to {ranks[-1]}"


def _time(estimate: Estimate) -> str:
    """The whole step as one bar, its longest item first, and the same as a table."""
    assert estimate.time is not None
    total = estimate.time.total
    scale, percent = time_scale(total), Scale("%", 0.01, 1)
    items = {name: s for name, s in sorted(estimate.time.items.items(), key=lambda item: -item[1]) if s > 0}
    bar = _bar(items, total, "time", scale, "step")
    rows = [
        [_item(i, "time", name), scale.show(s), f"{percent.show(s / total)}%"]
        for i, (name, s) in enumerate(items.items())
    ]
    rows.append(["total", scale.show(total), f"{percent.show(1)}%"])
    table = _table("time by item", ["", scale.unit, "share"], rows, (1, 2), {len(rows) - 1: "total"})
    hidden = sum(whole - exposed for whole, exposed in estimate.time.communication.values())
    notes = [f"Besides, {scale.name(hidden)} of communication run under other work."] if hidden > 0 else []
    notes += [f"MFU counts {MFU_FLOPS}.", f"HFU counts {HFU_FLOPS}."]
    quiet = "".join(f'<p class="quiet">{escape(note)}</p>' for note in notes)
    return f'<div class="bars">{bar}</div>\n{table}\n{quiet}'


def _sum(items: Mapping[str, float]) -> float:
    return sum(items.values())


def _bar(items: Mapping[str, float], length: float, kind: str, scale: Scale, name: str, limits: str = "") -> str:
    """A line of a `.bars` grid: parts side by side, numbered as in the table below, between their name and their sum.
    The whole width stands for `length`."""
    parts = "".join(
        f'<span class="{kind}-{item}" style="width:{100 * value / length:.3f}%" title="{SAID[kind][item]}: '
        f'{scale.name(value)}">{i + 1 if value >= WIDE * length else ""}</span>'
        for i, (item, value) in enumerate(items.items())
        if value > 0
    )
    end = scale.name(_sum(items))
    bar = f'<div class="bar" role="img" aria-label="{name}: {end}">{parts}{limits}</div>'
    return f'<div>{name}</div><div class="end">{end}</div>{bar}\n'


def _limit(share: float, name: str = "") -> str:
    return f'<i class="{name}" style="left:calc({100 * share:.3f}% - 1px)"></i>'


def _item(index: int, kind: str, item: str) -> str:
    """The number, colour and name of a part of a bar."""
    return f'<span class="item"><span class="swatch {kind}-{item}">{index + 1}</span>{SAID[kind][item]}</span>'


def _key(entries: Iterable[tuple[str, str]]) -> str:
    """What a mark (SVG, 26 by 14) stands for."""
    lines = "".join(f'<li><svg aria-hidden="true">{svg}</svg>{escape(said)}</li>' for svg, said in entries)
    return f'<ul class="key">{lines}</ul>'


def _table(
    name: str, head: Sequence[str], rows: Iterable[Sequence[str]], right: Container[int], marked: Mapping[int, str]
) -> str:
    """Cells are HTML; columns of `right` hold numbers; `marked` has the classes of rows. It scrolls in its own box."""

    def cell(tag: str, column: int, html: str, scope: str = "") -> str:
        number = ' class="number"' if column in right else ""
        return f"<{tag}{scope}{number}>{html}</{tag}>"

    top = "".join(cell("th", i, html, ' scope="col"') for i, html in enumerate(head))
    lines = []
    for r, row in enumerate(rows):
        cells = "".join(cell("td" if i else "th", i, html, "" if i else ' scope="row"') for i, html in enumerate(row))
        lines.append(f'<tr class="{marked[r]}">{cells}</tr>' if r in marked else f"<tr>{cells}</tr>")
    table = f"<table><thead><tr>{top}</tr></thead><tbody>\n" + "\n".join(lines) + "\n</tbody></table>"
    return f'<div class="scroll" role="region" aria-label="{name}" tabindex="0">{table}</div>'


# Other layouts


def _layouts(found: Found) -> str:
    assert found.best is not None
    all_layouts, best, request = found.layouts(), found.best, found.request
    shown = all_layouts[:ROWS]
    most = max(c.memory_bytes for c in shown)
    memory, time = memory_scale(most), time_scale(max(c.step_time_s for c in shown))
    small = most < SMALL * request.machine.hbm_bytes
    length = most if small else request.machine.hbm_bytes
    tick = "" if small else _limit(request.budget_bytes / length)
    rows = [
        [
            _two_lines(c.parallel),
            time.show(c.step_time_s),
            "chosen" if c is best else f"{c.step_time_s / best.step_time_s - 1:+.1%}",
            memory.show(c.memory_bytes),
            f'<span class="mini"><b style="width:{100 * c.memory_bytes / length:.3f}%"></b>{tick}</span>',
            str(c.train.micro_batch_size),
            c.train.remat,
        ]
        for c in shown
    ]
    head = ["layout", f"step, {time.unit}", "slower", f"memory, {memory.unit}", "", "micro batch", "remat"]
    said = f"The fastest configuration of each layout; {len(shown)} of {len(all_layouts):,} layouts that fit"
    said += ". " if small else "; the dashed line is the budget, and the whole bar the memory. "
    count = _count(len(found.fitting), "configuration")
    said += f"In all, {count} fit; {len(found.too_large):,} that were priced do not."
    return f"<p>{said}</p>\n{_table('best layouts', head, rows, (1, 2, 3, 5), {0: 'choice'})}"


def _two_lines(parallel: Parallel) -> str:
    """Its sizes, and below them what else differs from layout to layout."""
    sizes = layout(parallel).partition(",")[0] or "one device"
    rest = [f"{parallel.virtual_stages} virtual stages"] if parallel.virtual_stages > 1 else []
    rest += [f"context by {parallel.context}"] if parallel.cp > 1 else []
    return f"{sizes} <small>{', '.join(rest)}</small>" if rest else sizes


# Memory against time


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


def _scatter(found: Found) -> str:
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
    caption = f"{_count(len(front), 'configuration')} on the front, and {len(shown):,} of the {len(others):,} others"
    if outside := len(others) - len(inside):
        caption += f"; {outside:,} are larger or slower than the axes reach"
    if small:
        caption += f". A device has {whole.name(hbm)}, far to the right"
    return (
        f'<figure>{_scatter_key(None if small else (whole.name(budget), whole.name(hbm)))}<div class="plot">'
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


def _scatter_key(limits: tuple[str, str] | None) -> str:
    """`limits` are budget and memory; None where they are far off, and nothing is near them."""
    key = [
        ('<circle class="fits best" cx="13" cy="7" r="4"/>', "fits"),
        ('<path class="front" d="M0 4H13V10H26"/>', "Pareto front: least time for the memory"),
        ('<circle class="ring" cx="13" cy="7" r="6"/>', "chosen"),
    ]
    if limits:
        key.insert(1, ('<path class="lost best" d="M9 3 17 11M9 11 17 3"/>', "over the budget"))
        key += [(LIMITS[0], f"budget {limits[0]}"), (LIMITS[1], f"memory {limits[1]}")]
    return _key(key)


def _tip(c: Candidate) -> str:
    memory, time = memory_scale(c.memory_bytes).name(c.memory_bytes), time_scale(c.step_time_s).name(c.step_time_s)
    return f"{layout(c.parallel)}, micro batch {c.train.micro_batch_size}, remat {c.train.remat}: {memory}, {time}"


# The pipeline


def drawn_size(pp: int, v: int, m: int) -> tuple[int, int, int]:
    """Ranks, chunks and microbatches of a timeline that can be read: the plan's own ranks and chunks if possible, else
    fewer with two microbatches a rank, for a steady phase to show."""
    sizes = [
        (ranks, chunks, min(m, rounds * ranks))
        for chunks in (v, 4, 2)
        for ranks, rounds in ((pp, 2), (pp, 1), (8, 2), (4, 2))
        if chunks <= v and ranks <= min(pp, MOST_RANKS)
    ]
    return next((p, c, b) for p, c, b in sizes if max(b, p) * c + p <= MOST_WORK)


def _pipeline(job: Job) -> str:
    p, m = job.parallel, job.microbatches
    if p.pp == 1:
        return "<p>There is no pipeline: every device holds its part of all layers.</p>"
    own = (p.pp, p.virtual_stages, m)
    if p.schedule not in SCHEDULES:
        return f"<p>The pipeline runs in the order of {escape(p.schedule)}, which parallax schedule --kind draws.</p>"
    size = drawn_size(*own)
    table = tick_table(make_schedule(p.schedule, *size))
    svg = timeline_svg(table).replace(' xmlns="http://www.w3.org/2000/svg"', "")
    if size == own:
        said = "The whole step."
    else:
        said = f"Drawn, to be readable: {_sizes(*size)}. The plan itself has {_sizes(*own)}, "
        bubble = float(bubble_formula(p.schedule, *own))
        said += f"in the same kind of order, and a bubble of {bubble:.1%} (idle over useful time)."
    width = int(re.findall(r'width="(\d+)"', svg)[0])  # its own; much less and its numbers cannot be read
    return (
        f"<p>{TITLES[p.schedule]}. {said}</p>\n"
        f'<div class="scroll" role="region" aria-label="timeline of the pipeline" tabindex="0">'
        f'<div class="drawing" style="min-width:{0.8 * width:.0f}px">{svg}</div></div>'
    )


def _sizes(pp: int, v: int, m: int) -> str:
    chunks = f", {v} chunks on each" if v > 1 else ""
    return f"{pp} ranks{chunks}, {m:,} microbatch{'es' * (m > 1)}"
