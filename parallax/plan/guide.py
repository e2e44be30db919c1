"""The layouts that NVIDIA's parallelism guide gives for seven models (August 2026), beside this project's. No jax."""

from __future__ import annotations

import dataclasses

from parallax.plan.estimate import GIB
from parallax.plan.explain import describe
from parallax.plan.search import Found, Request, lacking_gib, search
from parallax.text import seconds

GUIDE = {  # model: (devices, tp, pp, cp, ep)
    "llama3-8b": (8, 1, 1, 2, 1),
    "llama3-70b": (64, 4, 4, 2, 1),
    "llama3.1-405b": (1024, 8, 8, 2, 1),
    "gpt3-175b": (None, 4, 8, 1, 1),  # 128 to 512
    "mixtral-8x7b": (64, 1, 4, 1, 8),
    "mixtral-8x22b": (256, 4, 4, 1, 8),
    "deepseek-v3": (1024, 2, 16, 1, 64),
}


def guide_pins(request: Request) -> dict[str, int] | None:
    """The sizes that NVIDIA's guide gives this model on this number of devices; None where it gives none."""
    devices, *sizes = GUIDE.get(request.shape.name, (0,))
    if not sizes or (devices is not None and devices != request.devices):
        return None
    return dict(zip(("tp", "pp", "cp", "ep"), sizes, strict=True))


def guide_line(found: Found) -> str | None:
    """What NVIDIA's guide's own layout costs, or why it is refused."""
    request = found.request
    pins = guide_pins(request)
    if pins is None or found.best is None or request.pins:
        return None
    named = "·".join(f"{axis.upper()}{n}" for axis, n in pins.items() if n > 1) or "one device"
    need = pins["tp"] * pins["pp"] * pins["cp"] * pins["ep"]
    if request.devices % need:
        product = " x ".join(str(n) for n in pins.values() if n > 1)
        return f"NVIDIA's guide, {named} is refused: {product} = {need} does not divide {request.devices:,} devices"
    theirs = search(dataclasses.replace(request, pins=pins))
    if best := theirs.best:
        if best.sizes == found.best.sizes:
            return f"NVIDIA's guide has this layout too: {named}"
        change = best.step_time_s / found.best.step_time_s - 1
        word = "slower" if change >= 0 else "faster"
        cost = f"{seconds(best.step_time_s)}, {abs(change):.1%} {word}, {best.memory_bytes / GIB:.1f} GiB"
        return f"NVIDIA's guide, {named}: {cost}, as {describe(best)}"
    if theirs.too_large:
        lean = theirs.too_large[0]
        lacks = f"is {lacking_gib(request, lean):.1f} GiB over what is planned with"
        return f"NVIDIA's guide, {named} is refused: its leanest, {describe(lean)}, {lacks}"
    return f"NVIDIA's guide, {named} is refused: no such layout is legal for this batch and sequence"
