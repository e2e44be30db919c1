"""Sizes, times and layouts as people read them, and aligned columns."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path

from parallax.config import Parallel

ORDER = ("dp", "pp", "ep", "cp", "tp")  # as layouts are spoken of


def duration(seconds: float) -> str:
    """`42 s`, `3 min 20 s`, `5 h 07 min`."""
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {s:02} s" if minutes else f"{s} s"


def seconds(s: float, unit: bool = True) -> str:
    """Three digits: `0.123 s`, `1.23 s`, `12.3 s`, `1,234 s`."""
    digits = 3 if s < 1 else 2 if s < 10 else 1 if s < 1000 else 0
    return f"{s:,.{digits}f}{' s' if unit else ''}"


def size(size_bytes: float) -> str:
    """`512 B`, `19.8 MiB`, `1.2 GiB`."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size_bytes /= 1024
        if size_bytes < 1023.95:
            return f"{size_bytes:.1f} {unit}"
    return f"{size_bytes / 1024:.1f} TiB"


def unit_of(size_bytes: float) -> tuple[str, int]:
    """The unit, and its bytes, in which a table of sizes up to this one is read best."""
    return ("GiB", 2**30) if size_bytes >= 1023.95 * 2**20 else ("MiB", 2**20)


def layout(parallel: Parallel) -> str:
    """`dp2·pp2·tp2, interleaved, 2 virtual stages, sequence parallel, zero 1`; empty for one device"""
    parts = [
        "·".join(f"{axis}{n}" for axis in ORDER if (n := getattr(parallel, axis)) > 1),
        Path(parallel.schedule).name if parallel.pp > 1 else "",
        f"{parallel.virtual_stages} virtual stages" if parallel.virtual_stages > 1 else "",
        f"context by {parallel.context}" if parallel.cp > 1 else "",
        "sequence parallel" if parallel.sequence_parallel and parallel.tp > 1 else "",
        f"zero {parallel.zero}" if parallel.dp * parallel.ep * parallel.cp > 1 else "",
    ]
    return ", ".join(filter(None, parts))


def columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> str:
    """Columns two spaces apart; those of `right` end at the same place, the others begin there."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        lines.append("  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(cells)).rstrip())
    return "\n".join(lines)
