"""A plan as one HTML page: no script, nothing fetched, light and dark, from a phone's width up. No jax."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from html import escape
from itertools import groupby

from parallax.config import SCHEDULES, Parallel
from parallax.plan.estimate import HFU_FLOPS, MFU_FLOPS, Estimate, Job
from parallax.plan.explain import Step
from parallax.plan.page_style import (
    LIMITS,
    SAID,
    STYLE,
    Scale,
    colour_rules,
    count,
    key,
    memory_scale,
    time_scale,
)
from parallax.plan.scatter import SMALL, scatter
from parallax.plan.search import Found, Request
from parallax.schedule.draw import TITLES, timeline_svg
from parallax.schedule.order import make_schedule
from parallax.schedule.simulate import bubble_formula
from parallax.schedule.table import tick_table
from parallax.stages import Stages
from parallax.text import duration, layout

ROWS = 10  # of the table of layouts
MOST_RANKS = 16  # drawn of a pipeline
MOST_WORK = 48  # chunk-microbatches and ranks that a timeline of readable numbers has room for
WIDE = 0.04  # of a bar: a part that has room for its number


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
        ("Memory against time", scatter(found)),
        ("Pipeline", _pipeline(job)),
    )
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<title>{title}</title>\n<link rel="icon" href="data:,">\n<style>{STYLE}{colour_rules()}</style>',
            f"</head>\n<body>\n<main>\n<h1>{title}</h1>",
            _figures(found.request, estimate),
            *(f"<section>\n<h2>{name}</h2>\n{html}\n</section>" for name, html in sections),
            "</main>\n</body>\n</html>\n",
        ]
    )


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
        batch = f"with {count(share // p.ep, 'sequence')} each"
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
    words.append(("microbatches", f"{job.microbatches:,} of {count(train.micro_batch_size, 'sequence')}{order}"))
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
        legend = f'<p class="quiet">The bar is what is used; a device has {more}.</p>'
    else:
        left = f"budget {whole.name(budget)}, which leaves {request.headroom:.1%} as headroom"
        legend = key(zip(LIMITS, (left, f"memory of {request.machine.name}, {whole.name(hbm)}"), strict=True))
    rows = [
        [_item(i, "memory", item), *(scale.show(items[item]) for _, items in groups)]
        for i, item in enumerate(estimate.stages[0])
    ]
    rows.append(["total", *(scale.show(_sum(items)) for _, items in groups)])
    head = [f"{scale.unit} a device", *names]
    table = _table("memory by item", head, rows, range(1, len(head)), {len(rows) - 1: "total"})
    return f'<div class="bars">{bars}</div>\n{legend}\n{table}'


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
    fitting = count(len(found.fitting), "configuration")
    said += f"In all, {fitting} fit; {len(found.too_large):,} that were priced do not."
    return f"<p>{said}</p>\n{_table('best layouts', head, rows, (1, 2, 3, 5), {0: 'choice'})}"


def _two_lines(parallel: Parallel) -> str:
    """Its sizes, and below them what else differs from layout to layout."""
    sizes = layout(parallel).partition(",")[0] or "one device"
    rest = [f"{parallel.virtual_stages} virtual stages"] if parallel.virtual_stages > 1 else []
    rest += [f"context by {parallel.context}"] if parallel.cp > 1 else []
    return f"{sizes} <small>{', '.join(rest)}</small>" if rest else sizes


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
