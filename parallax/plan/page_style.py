"""What the parts of a plan's page share: names and colours of items, the style sheet, units. No jax."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from parallax.plan.show import NAMES

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


def count(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"


def key(entries: Iterable[tuple[str, str]]) -> str:
    """What a mark (SVG, 26 by 14) stands for."""
    lines = "".join(f'<li><svg aria-hidden="true">{svg}</svg>{escape(said)}</li>' for svg, said in entries)
    return f'<ul class="key">{lines}</ul>'


def colour_rules() -> str:
    return "".join(f".{kind}-{item} {{ background: {c} }}\n" for kind, of in COLOURS.items() for item, c in of.items())
