"""What the compiler made, as people read it in a terminal. No jax."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from parallax.aot.builder import Built
from parallax.aot.report import Report
from parallax.plan.estimate import Estimate
from parallax.plan.show import bar, fits_or_not, table
from parallax.text import layout, seconds, size, unit_of

_KINDS = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory": "memory-bound ops",
    "kernels": "kernel launches",
}
ARGUMENTS = ("weights", "masters", "moments")


def report_view(report: Report) -> RenderableType:
    """Head line; memory against HBM and beside the estimate; largest buffers; traffic; the simulated step; warnings."""
    built, predicted = report.built, report.predicted
    job, machine, train = predicted.job, predicted.job.machine, predicted.job.train
    title = f"{job.shape.name} for {job.devices:,} x {machine.name}, built in {seconds(built.compile_s)}\n"
    head = Text.assemble((title, "bold"))
    head.append(f"{layout(job.parallel) or 'one device'}; {job.microbatches} microbatches of ", "")
    head.append(f"{train.micro_batch_size} x {train.seq_len}, {train.precision}, remat {train.remat}", "")
    needs = f"{size(built.peak_bytes)} a device"
    verdict = fits_or_not(needs, built.peak_bytes, machine.hbm_bytes, machine.name)
    parts = [head, verdict, _memory(built, predicted), _buffers(built)]
    parts += [_traffic(report), _simulated(report), *(Text(f"warning: {line}", "yellow") for line in report.warnings)]
    spaced: list[RenderableType] = []
    for i, part in enumerate(parts):
        spaced += [part] if i < 2 or (isinstance(part, Text) and i > 6) else [Text(), part]
    return Group(*spaced)


def _memory(built: Built, predicted: Estimate) -> Table:
    """The compiler's count beside the estimate, item by item where both have it."""
    items = predicted.stages[0]
    arguments = sum(items[name] for name in ARGUMENTS)
    temporaries = sum(items.values()) - arguments
    unit, one = unit_of(built.peak_bytes)
    shown = table(f"{unit} a device", "compiled", "estimated", "difference", "of which", left=(0, 4), wrapped=(4,))
    rows = (
        ("arguments", built.arguments_bytes, arguments, ARGUMENTS),
        ("temporaries", built.temporaries_bytes, temporaries, [name for name in items if name not in ARGUMENTS]),
        ("outputs besides", built.outputs_bytes, 0.0, ()),
        ("total", built.peak_bytes, arguments + temporaries, ()),
    )
    for name, compiled, estimated, parts in rows:
        change = f"{estimated / compiled - 1:+.1%}" if compiled > 0.005 * one else ""
        of = ", ".join(f"{part} {items[part] / one:.1f}" for part in parts)
        shown.add_row(name, f"{compiled / one:.2f}", f"{estimated / one:.2f}", change, of)
    return shown


def _buffers(built: Built) -> Table:
    unit, one = unit_of(built.peak_bytes)
    shown = table("largest buffers", unit, "", "from", left=(0, 2, 3), wrapped=(2, 3))
    for buffer in built.buffers:
        name = buffer.name if buffer.what != "temporary" else "temporary"
        shown.add_row(buffer.shape, f"{buffer.size_bytes / one:.2f}", name, buffer.source)
    return shown


def _traffic(report: Report) -> RenderableType:
    shown = table("over", "kind", "", "a step", "moved", "exposed", "s", left=(0, 1, 2))
    tpu = report.predicted.job.machine.platform == "tpu"
    places = ("in a host", "in the slice") if tpu else ("in a node", "network")
    for row in report.traffic:
        exposed = f"{row.exposed_bytes / row.bytes:.0%}" if row.bytes else ""
        place = places[0] if row.inside else places[1]
        cells = [f"{row.count:,}", size(row.bytes), exposed, seconds(row.time_s, unit=False)]
        shown.add_row("·".join(row.axes), row.kind, place, *cells)
    return shown if shown.row_count else Text("no communication")


def _simulated(report: Report) -> RenderableType:
    """The scheduled program walked in order: what each kind of work takes, and what waits."""
    simulation, predicted = report.simulation, report.predicted
    mfu = f", MFU {simulation.mfu:.1%}" if simulation.mfu is not None else ""
    title = f"simulated step {seconds(simulation.step_time_s)}{mfu}"
    if predicted.time is not None:
        title += f"; estimated {seconds(predicted.step_time_s)}, {predicted.mfu:.1%}"
    shown = table("of which", "s", "share", "", left=(0, 3))
    most = max(simulation.time_s.values(), default=1.0)
    for name, s in sorted(simulation.time_s.items(), key=lambda item: -item[1]):
        if s >= 0.0005 * simulation.step_time_s:
            label = _KINDS.get(name, f"waiting for {name}")
            shown.add_row(label, seconds(s, False), f"{s / simulation.step_time_s:.1%}", bar(s / most))
    notes = [Text(f"note: {note}") for note in simulation.notes]
    return Group(Text(title), shown, *notes)
