"""Estimates and plans as people read them in a terminal. No jax."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from parallax.plan.estimate import GIB, HFU_FLOPS, MFU_FLOPS, Estimate
from parallax.plan.explain import Step
from parallax.plan.search import Found
from parallax.text import ORDER, layout, seconds, size, unit_of

BAR = 24  # characters
WIDE = 160  # characters of a line where stdout is no terminal
LEAST = 40  # and where it is one
NARROW = 110  # and of one below which tables lose columns
NAMES = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory_bound": "memory-bound ops",
    "recompute": "recomputation",
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "pp": "pipeline sends",
    "vocabulary": "embedding, output, loss",
    "dp": "gradients and weights",
    "bubble": "pipeline bubble",
    "padding": "padding layers",
    "optimizer": "optimizer",
    "launch": "kernel launches",
}


def gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f}"


def bar(share: float, width: int = BAR, style: str = "cyan") -> Text:
    """A horizontal bar in eighths of a character."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    full, rest = divmod(eighths, 8)
    return Text("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else ""), style=style)


def table(*columns: str, left: Iterable[int] = (0,), wrapped: Iterable[int] = ()) -> Table:
    """Aligned columns under plain headings, numbers to the right. Where a line is too short, texts of `wrapped` columns
    go on in the next."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    left, wrapped = set(left), set(wrapped)
    for i, name in enumerate(columns):
        made.add_column(name, justify="left" if i in left else "right", no_wrap=i not in wrapped)
    return made


def estimate_view(estimate: Estimate, width: int = WIDE) -> RenderableType:
    """Head line, memory by stage, time by item, communication by axis."""
    job, machine = estimate.job, estimate.job.machine
    scheme = "Megatron-LM's scheme" if estimate.framework == "megatron" else "parallax"
    where = layout(job.parallel) or "one device"
    head = Text.assemble((f"{job.shape.name} on {job.devices:,} x {machine.name} ({scheme})\n", "bold"))
    head.append(f"{where}; {job.microbatches} microbatches of {job.train.micro_batch_size} x {job.train.seq_len}, ", "")
    head.append(f"{job.train.precision}, remat {job.train.remat}\n", "")
    parts: list[RenderableType] = [head, _verdict(estimate), Text(), _stages(estimate, width)]
    parts += [Text(f"note: {note}", "yellow") for note in estimate.notes]
    if estimate.time is None:
        parts += [Text(), Text(f"no time: {machine.name} has no speed of its own; use a mesh of real devices")]
    else:
        parts += [Text(), _speed(estimate), Text(), _time(estimate.time.items), Text(), _communication(estimate)]
    return Group(*parts)


def _verdict(estimate: Estimate) -> Text:
    hbm, machine = estimate.job.machine.hbm_bytes, estimate.job.machine.name
    worst = max(range(len(estimate.stages)), key=estimate.stage_bytes.__getitem__)
    fullest = f"stage {worst}" if len(set(estimate.stage_bytes)) > 1 else "every stage"
    needs = f"{size(estimate.peak_bytes)} a device on {fullest}"
    if not hbm:
        return Text(f"{needs}; the devices share the host's memory")
    return fits_or_not(needs, estimate.peak_bytes, hbm, machine)


def fits_or_not(needs: str, peak_bytes: float, hbm_bytes: int, machine: str) -> Text:
    """By how much; `needs` says how much memory is needed, and where."""
    left = hbm_bytes - peak_bytes
    if left >= 0:
        return Text(f"fits: {needs} of {size(hbm_bytes)}, {size(left)} free", style="green")
    return Text(f"does not fit: {needs}, {size(-left)} more than the {size(hbm_bytes)} of {machine}", "red")


def _stages(estimate: Estimate, width: int) -> Table:
    """A line for each stretch of equal stages; where lines are short, a column."""
    names, (unit, one) = list(estimate.stages[0]), unit_of(estimate.peak_bytes)
    in_unit = lambda size_bytes: f"{size_bytes / one:.1f}"
    rows = []
    for _, group in groupby(enumerate(estimate.stages), key=lambda stage: stage[1]):
        ranks = [rank for rank, _ in group]
        label = f"stage {ranks[0]}" if len(ranks) == 1 else f"stages {ranks[0]} to {ranks[-1]}"
        items = estimate.stages[ranks[0]]
        rows.append([label, *(in_unit(items[name]) for name in names), in_unit(sum(items.values()))])
    columns = [[f"{unit} a device", *names, "total"], *rows]
    lines = columns if width >= NARROW else [*map(list, zip(*columns, strict=True))]
    shown = table(*lines[0])
    for line in lines[1:]:
        shown.add_row(*line)
    return shown


def _speed(estimate: Estimate) -> Text:
    return Text(
        f"step {seconds(estimate.step_time_s)}: {estimate.tokens_per_s:,.0f} tokens/s, "
        f"MFU {estimate.mfu:.1%}, HFU {estimate.hfu:.1%}\n"
        f"  MFU counts {MFU_FLOPS}\n  HFU counts {HFU_FLOPS}"
    )


def _time(items: dict[str, float]) -> Table:
    total, most = sum(items.values()), max(items.values())
    shown = table("time of a step", "s", "share", "", left=(0, 3))
    for name, s in sorted(items.items(), key=lambda item: -item[1]):
        if s >= 0.0005 * total:
            shown.add_row(NAMES[name], seconds(s, unit=False), f"{s / total:.1%}", bar(s / most))
    return shown


def _communication(estimate: Estimate) -> RenderableType:
    assert estimate.time is not None
    shown = table("communication", "s", "exposed", left=(0,))
    for name, (total, exposed) in estimate.time.communication.items():
        if total > 0:
            shown.add_row(
                "vocabulary" if name == "vocabulary" else NAMES[name], seconds(total, False), seconds(exposed, False)
            )
    return shown if shown.row_count else Text("no communication")


def measured_view(rows: Sequence[tuple[str, int, float, float, float, float, int, float | None]]) -> Table:
    """Errors by source: name, rows, mean, median, worst, bias, groups, regret."""
    shown = table("source", "rows", "mean", "median", "worst", "bias", "groups", "regret")
    for name, count, mean, median, worst, bias, groups, regret in rows:
        cells = [f"{mean:.1%}", f"{median:.1%}", f"{worst:.1%}", f"{bias:+.1%}", str(groups)]
        shown.add_row(name, str(count), *cells, "" if regret is None else f"{regret:.1%}")
    return shown


def print_view(view: Callable[[int], RenderableType]) -> None:
    """What `view` makes of a width, to what stdout is now: in colours where it is a terminal, and in lines as long as
    they are where it is not."""
    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, highlight=False, width=None if terminal else WIDE, force_terminal=terminal)
    if terminal:
        console.width = max(LEAST, console.width)  # COLUMNS may say 0
        console.print(view(console.width))
        return
    with console.capture() as capture:
        console.print(view(console.width))
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


# Plans


def plan_view(
    found: Found, made: Estimate, steps: Sequence[Step], lines: Sequence[str], top: int, width: int = WIDE
) -> RenderableType:
    """The choice, its reasons, and the best layouts."""
    request = found.request
    head = Text.assemble((f"{request.shape.name} on {request.devices:,} x {request.machine.name}", "bold"))
    parts: list[RenderableType] = [head, Text(_key_figures(found, made)), Text()]
    for number, step in enumerate(steps, start=1):
        line = Text(f"{number}. {step.question} ", style="bold")
        line.append(step.answer, style="bold cyan")
        parts.append(line)
        parts.append(_bullets(step.reasons))
    parts += [Text(), _candidates(found, top, width), Text(), *(Text(line) for line in lines)]
    return Group(*parts)


def _bullets(reasons: Sequence[str]) -> Table:
    """A line each, its continuations under its text."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=4, justify="right")
    grid.add_column()
    for reason in reasons:
        grid.add_row("-", Text(reason))
    return grid


def _key_figures(found: Found, made: Estimate) -> str:
    request, best = found.request, found.best
    assert best is not None
    assert made.time is not None
    train, items = best.train, made.time.items
    most = sorted(items, key=lambda name: -items[name])[:5]
    where = ", ".join(f"{NAMES[name]} {items[name] / made.step_time_s:.0%}" for name in most)
    free = f"{100 * request.headroom:g}% are left free"
    return (
        f"{layout(best.parallel) or 'one device'}; micro batch {train.micro_batch_size}, remat {train.remat}\n"
        f"{seconds(best.step_time_s)} a step, {made.tokens_per_s:,.0f} tokens/s, MFU {made.mfu:.1%}; "
        f"{gib(best.memory_bytes)} GiB of {gib(request.machine.hbm_bytes)} a device ({free}); "
        f"{len(found.fitting) + len(found.too_large):,} configurations priced\n"
        f"of a step: {where}\n"
        "by formula, not measured: half of 772 published steps are priced within 5% (docs/estimate.md); closer is a tie"
    )


def _rows(found: Found, top: int) -> Iterator[list[str]]:
    """Cells of the best layouts."""
    best = found.best
    assert best is not None
    for candidate in found.layouts()[:top]:
        p, train = candidate.parallel, candidate.train
        sizes = "·".join(f"{axis}{n}" for axis in ORDER if (n := getattr(p, axis)) > 1) or "one device"
        against = candidate.step_time_s / best.step_time_s - 1
        yield [
            sizes,
            str(p.virtual_stages),
            str(train.micro_batch_size),
            train.remat,
            p.context if p.cp > 1 else "",
            seconds(candidate.step_time_s, unit=False),
            "" if candidate is best else f"{against:+.1%}",
            gib(candidate.memory_bytes),
        ]


HEADINGS = ("layout", "v", "micro", "remat", "context", "step s", "", "GiB")


def _candidates(found: Found, top: int, width: int) -> Table:
    """With bars of the memory where lines are long enough."""
    wide = width >= NARROW
    shown = table(*HEADINGS, *(["of the memory"] if wide else []), left=(0, 3, 4, 8))
    for cells, candidate in zip(_rows(found, top), found.layouts(), strict=False):
        bars = [bar(candidate.memory_bytes / found.request.machine.hbm_bytes, 20)] if wide else []
        shown.add_row(*cells, *bars)
    return shown


def plan_markdown(found: Found, made: Estimate, steps: Sequence[Step], lines: Sequence[str], top: int) -> str:
    """The same as Markdown."""
    request = found.request
    text = [
        f"# {request.shape.name} on {request.devices:,} x {request.machine.name}",
        "",
        *_key_figures(found, made).splitlines(),
    ]
    for number, step in enumerate(steps, start=1):
        text += ["", f"## {number}. {step.question} {step.answer}", "", *(f"- {reason}" for reason in step.reasons)]
    text += ["", "## Best layouts", "", f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS)]
    text += [f"| {' | '.join(cells)} |" for cells in _rows(found, top)]
    return "\n".join([*text, "", *(f"- {line}" for line in lines)]) + "\n"
