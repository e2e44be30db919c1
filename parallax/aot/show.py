"""What the compiler made, as people read it in a terminal. No jax."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from parallax.aot.builder import Built
from parallax.plan.estimate import GIB, Estimate
from parallax.plan.show import gib, table
from parallax.text import layout, seconds

ARGUMENTS = ("weights", "masters", "moments")


def compiled_view(built: Built, predicted: Estimate) -> RenderableType:
    """Head line, memory against HBM and beside the estimate, the largest buffers."""
    job, machine = predicted.job, predicted.job.machine
    title = f"{job.shape.name} for {job.devices:,} x {machine.name}, built in {seconds(built.compile_s)}\n"
    head = Text(title, style="bold")
    head.append(f"{layout(job.parallel) or 'one device'}; {job.microbatches} microbatches of ", "")
    head.append(
        f"{job.train.micro_batch_size} x {job.train.seq_len}, {job.train.precision}, remat {job.train.remat}", ""
    )
    verdict = _verdict(built, machine.hbm_bytes, machine.name)
    return Group(head, verdict, Text(), _memory(built, predicted), Text(), _buffers(built))


def _verdict(built: Built, hbm: int, name: str) -> Text:
    left = hbm - built.peak_bytes
    needs = f"{gib(built.peak_bytes)} GiB a device"
    if left >= 0:
        return Text(f"fits: {needs} of {gib(hbm)}, {gib(left)} GiB free", style="green")
    return Text(f"does not fit: {needs}, {gib(-left)} GiB more than the {gib(hbm)} of {name}", "red")


def _memory(built: Built, predicted: Estimate) -> Table:
    """The compiler's count beside the estimate, item by item where both have it."""
    items = predicted.stages[0]
    arguments = sum(items[name] for name in ARGUMENTS)
    temporaries = sum(size for name, size in items.items() if name not in ARGUMENTS)
    shown = table("GiB a device", "compiled", "estimated", "difference", "of which", left=(0, 4))
    rows = (
        ("arguments", built.arguments_bytes, arguments, ARGUMENTS),
        ("temporaries", built.temporaries_bytes, temporaries, [name for name in items if name not in ARGUMENTS]),
        ("outputs besides", built.outputs_bytes, 0.0, ()),
        ("total", built.peak_bytes, arguments + temporaries, ()),
    )
    for name, compiled, estimated, parts in rows:
        change = f"{estimated / compiled - 1:+.1%}" if compiled > 0.005 * GIB else ""
        of = ", ".join(f"{part} {gib(items[part])}" for part in parts)
        shown.add_row(name, f"{compiled / GIB:.2f}", f"{estimated / GIB:.2f}", change, of)
    return shown


def _buffers(built: Built) -> Table:
    shown = table("largest buffers", "GiB", "", "from", left=(0, 2, 3))
    for buffer in built.buffers:
        name = buffer.name if buffer.what != "temporary" else "temporary"
        shown.add_row(buffer.shape, f"{buffer.size_bytes / GIB:.2f}", name, buffer.source)
    return shown
