"""The page of a plan: well-formed, nothing fetched; what it says against the estimate, a brute-force front and WCAG."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallax.config import MeshChoice, Model, Parallel, Train
from parallax.machine import load_machine
from parallax.plan.estimate import Estimate, estimate
from parallax.plan.explain import Step
from parallax.plan.job import load_shape
from parallax.plan.page import drawn_size, layout_words, plan_page
from parallax.plan.page_style import COLOURS, MEMORY_NAMES, memory_scale, time_scale
from parallax.plan.scatter import MOST_POINTS, pareto_front, thinned
from parallax.plan.search import Candidate, Found, Request, search
from parallax.plan.show import NAMES
from parallax.schedule import bubble_formula, make_schedule, tick_table

GIB = 2**30
INK = "#10141c"
VOID = {"meta", "link", "br", "img", "hr", "input"}
STEPS = (
    Step("How far tensor parallelism?", "tp = 4, inside a node", ("tp = 8 would be 9.1% slower.", "Links are slower.")),
    Step("How many pipeline stages?", "pp = 8, 2 chunks on each", ("With pp = 4 it lacks 21.4 GiB.",)),
    Step("Context parallelism?", "none", ("A sequence of 8,192 tokens fits.",)),
    Step("Expert parallelism?", "none", ()),
    Step("What is recomputed?", "nothing", ("It leaves 8.4 GiB free.",)),
    Step("How large a microbatch?", "1 sequence", ("2 would lack 9.9 GiB.",)),
)
CASES = {  # model, machine, devices, seq_len, global_batch_size
    "llama3-70b": ("llama3-70b", "h100-sxm", 64, 8192, 512),
    "gpt-1t": ("gpt-1t", "a100-80gb", 3072, 2048, 3072),
    "llama3-8b": ("llama3-8b", "h100-sxm", 8, 8192, 256),
    "mixtral-8x7b": ("mixtral-8x7b", "h100-sxm", 64, 4096, 512),
    "llama-tiny": ("llama-tiny", "h100-sxm", 8, 128, 16),
    "one device": ("llama-tiny", "h100-sxm", 1, 128, 16),
}
every_case = pytest.mark.parametrize("case", CASES)


class Page(HTMLParser):
    """Elements in order, with their attributes and all the text inside them; fails where tags do not balance."""

    def __init__(self, html: str):
        super().__init__()
        self.elements: list[Element] = []
        self.open: list[Element] = []
        self.feed(html)
        self.close()
        assert not self.open, f"left open: {[e.tag for e in self.open]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"<{tag}> has an attribute twice: {attrs}"
        element = Element(tag, {key: value or "" for key, value in attrs}, [e.tag for e in self.open])
        self.elements.append(element)
        for around in self.open:
            around.inside.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1].tag == tag, f"</{tag}> closes {[e.tag for e in self.open]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.text += data

    def all(self, tag: str, kind: str = "") -> list[Element]:
        return [e for e in self.elements if e.tag == tag and e.has(kind)]

    def table(self, name: str) -> list[list[str]]:
        """Its rows without the head, as text."""
        [box] = [e for e in self.elements if e.attrs.get("aria-label") == name]
        rows = [e for e in box.inside if e.tag == "tr"]
        return [[cell.text for cell in row.inside if cell.tag in ("th", "td")] for row in rows[1:]]


class Element:
    def __init__(self, tag: str, attrs: dict[str, str], around: list[str]):
        self.tag, self.attrs, self.around = tag, attrs, around
        self.inside: list[Element] = []
        self.text = ""

    def has(self, kind: str) -> bool:
        return not kind or kind in self.attrs.get("class", "").split()

    @property
    def width(self) -> float:
        """Percent."""
        match = re.fullmatch(r"width:([0-9.]+)%", self.attrs["style"])
        assert match
        return float(match[1])


@cache
def plan(case: str) -> tuple[Found, Estimate, str]:
    model, machine, devices, seq_len, batch = CASES[case]
    shape, mesh = load_shape(Model(name=model)), load_machine(MeshChoice(name=machine))
    found = search(Request(shape, mesh, devices, seq_len, batch))
    assert found.best
    made = estimate(found.best.job(found.request))
    return found, made, plan_page(found, made, STEPS)


def candidate(memory_bytes: float, step_time_s: float) -> Candidate:
    return Candidate(Parallel(), Train(steps=1, seq_len=1, global_batch_size=1), memory_bytes, step_time_s)


def front_by_hand(points: list[tuple[float, float]]) -> set[tuple[float, float]]:
    return {(m, t) for m, t in points if not any((a <= m and b <= t) and (a, b) != (m, t) for a, b in points)}


@every_case
def test_it_is_well_formed_and_fetches_nothing(case: str):
    html = plan(case)[2]
    page = Page(html)
    assert html.startswith("<!doctype html>\n<html")
    for what in ("http", "//", "url(", "@import", "<script", "javascript"):
        assert what not in html.lower(), what
    assert not [e for e in page.elements if {"src", "srcset", "action"} & e.attrs.keys()]
    assert {e.attrs["href"] for e in page.elements if "href" in e.attrs} <= {"data:,", "#cross"}
    assert not [e for e in page.elements if any(name.startswith("on") for name in e.attrs)]
    ids = [e.attrs["id"] for e in page.elements if "id" in e.attrs]
    assert len(ids) == len(set(ids))
    assert [e.attrs["content"] for e in page.all("meta") if e.attrs.get("name") == "viewport"]
    assert len(page.all("h1")) == 1 and len(page.all("h2")) == 7
    assert len(html.encode()) < 400_000
    tables = page.all("table")
    assert tables and all(any(e in box.inside for box in page.all("div", "scroll")) for e in tables)


def test_text_is_escaped():
    """A name of the user's can hold anything, and a reason a comparison."""
    found, made, _ = plan("llama3-8b")
    shape = replace(found.request.shape, name="<b>&amp;</h1> \"tiny' 7B")
    machine = replace(found.request.machine, name="my\"><script>alert('x')</script>")
    renamed = replace(found, request=replace(found.request, shape=shape, machine=machine))
    made = replace(made, job=replace(made.job, shape=shape, machine=machine))
    step = Step("Is 1 < 2 & 3 > 2?", "<i>yes</i>", ("a </li> b",))
    page = Page(plan_page(renamed, made, [step]))
    title = f"{shape.name} on 8 x {machine.name}"
    assert page.all("h1")[0].text == title
    assert [e.text for e in page.all("title") if e.around == ["html", "head"]] == [title]
    [said] = [e for e in page.all("ol", "steps")[0].inside if e.tag == "p"]
    assert said.text == "Is 1 < 2 & 3 > 2? <i>yes</i>"
    assert [e.text for e in page.all("li") if e.around.count("ul") and e.around.count("ol")] == ["a </li> b"]
    assert not page.all("script")


def test_the_steps_are_there_in_order():
    lists = [e for e in Page(plan("llama3-70b")[2]).elements if e.tag == "ol"]
    items = [e for e in lists[0].inside if e.tag == "li" and e.around[-1] == "ol"]
    for item, step in zip(items, STEPS, strict=True):
        said, *reasons = [e.text for e in item.inside if e.tag in ("p", "li")]
        assert said == f"{step.question} {step.answer}"
        assert tuple(reasons) == step.reasons


@every_case
def test_key_figures(case: str):
    _, made, html = plan(case)
    values = [e.text for e in Page(html).all("dl", "figures")[0].inside if e.tag == "dd"]
    job, size = made.job, made.peak_bytes
    time = made.step_time_s
    tokens = job.train.seq_len * job.train.global_batch_size
    assert len(values) == 4
    assert float(values[0].split()[0]) == pytest.approx(time if time >= 1 else time * 1e3, rel=0.005)
    assert values[0].split()[1] == ("s" if time >= 1 else "ms")
    assert int(values[1].split()[0].replace(",", "")) == round(tokens / time)
    assert values[2].startswith(f"{made.mfu:.1%}")
    assert values[3].split()[0] == (f"{size / GIB:.1f}" if size > GIB else f"{size / 2**20:.1f}")


@every_case
def test_memory_of_every_stage(case: str):
    found, made, html = plan(case)
    _check_memory(found, made, html)


def test_memory_of_stages_that_differ():
    """Megatron-LM's scheme, whose stages hold more the earlier they are; the layout does not fit then."""
    found, made, _ = plan("gpt-1t")
    other = estimate(made.job, "megatron")
    assert len(set(other.stage_bytes)) > 20 and other.peak_bytes > found.request.machine.hbm_bytes
    html = plan_page(found, other, STEPS)
    _check_memory(found, other, html)
    assert len(html.encode()) < 400_000


def _check_memory(found: Found, made: Estimate, html: str) -> None:
    """Bars add up to the stages' totals, stand for all stages, and agree with the table."""
    page, hbm = Page(html), found.request.machine.hbm_bytes
    grid = page.all("div", "bars")[0]
    bars = [e for e in grid.inside if e.has("bar")]
    names = [bar.attrs["aria-label"].partition(":")[0] for bar in bars]
    ranks: list[int] = []
    firsts = []
    for name in names:
        numbers = [int(n) for n in re.findall(r"\d+", name)] or [0]
        firsts.append(numbers[0])
        ranks += range(numbers[0], numbers[-1] + 1)
    assert ranks == list(range(made.job.parallel.pp))
    length = made.peak_bytes if made.peak_bytes < hbm / 10 else max(hbm, made.peak_bytes)
    for bar, first in zip(bars, firsts, strict=True):
        parts = [e for e in bar.inside if e.tag == "span"]
        assert sum(e.width for e in parts) == pytest.approx(100 * made.stage_bytes[first] / length, abs=0.01)
        assert [e.attrs["class"] for e in parts] == [f"memory-{item}" for item, b in made.stages[first].items() if b]
        lines = [e.attrs["style"] for e in bar.inside if e.tag == "i"]
        at = [100 * found.request.budget_bytes / length, 100 * hbm / length] if length >= hbm else []
        assert lines == [f"left:calc({share:.3f}% - 1px)" for share in at]

    rows = page.table("memory by item")
    unit = GIB if made.peak_bytes >= GIB else 2**20
    assert [row[0].lstrip("0123456789") for row in rows] == [*(MEMORY_NAMES[i] for i in made.stages[0]), "total"]
    for row, item in zip(rows, made.stages[0], strict=False):
        assert row[1:] == [_to_one_tenth(made.stages[first][item] / unit) for first in firsts]
    assert rows[-1][1:] == [_to_one_tenth(made.stage_bytes[first] / unit) for first in firsts]


def _to_one_tenth(value: float) -> str:
    return "< 0.1" if 0 < value < 0.05 else f"{value:,.1f}"


@every_case
def test_time_of_a_step(case: str):
    _, made, html = plan(case)
    assert made.time
    page = Page(html)
    bar = next(e for e in page.all("div", "bars")[1].inside if e.has("bar"))
    parts = [e for e in bar.inside if e.tag == "span"]
    assert sum(e.width for e in parts) == pytest.approx(100, abs=0.01)
    seconds = {e.attrs["class"].removeprefix("time-"): e.width / 100 * made.step_time_s for e in parts}
    expected = {item: s for item, s in made.time.items.items() if s > 0}
    assert seconds == pytest.approx(expected, abs=1e-5 * made.step_time_s)
    rows = page.table("time by item")
    shares = {row[0].lstrip("0123456789"): row[2] for row in rows[:-1]}
    assert shares.keys() == {NAMES[item] for item in expected}
    for item, s in expected.items():
        share = s / made.step_time_s
        assert shares[NAMES[item]] == ("< 0.1%" if share < 0.0005 else f"{share:.1%}")
    assert rows[-1][0] == "total" and rows[-1][2] == "100.0%"


@every_case
def test_the_best_layouts(case: str):
    found, _, html = plan(case)
    assert found.best
    page, layouts = Page(html), found.layouts()
    rows = page.table("best layouts")
    assert len(rows) == min(10, len(layouts))
    assert [row[2] == "chosen" for row in rows] == [i == 0 for i in range(len(rows))]
    for row, c in zip(rows, layouts, strict=False):
        for axis in ("dp", "pp", "ep", "cp", "tp"):
            size = re.search(rf"{axis}(\d+)", row[0])
            assert (int(size[1]) if size else 1) == getattr(c.parallel, axis)
        assert row[5:] == [str(c.train.micro_batch_size), c.train.remat]
        if c is not found.best:
            assert float(row[2].rstrip("%")) == pytest.approx(
                100 * (c.step_time_s / found.best.step_time_s - 1), abs=0.06
            )
    bars = [e.width for e in page.all("b") if "td" in e.around]
    most = max(c.memory_bytes for c in layouts[:10])
    length = most if most < found.request.machine.hbm_bytes / 10 else found.request.machine.hbm_bytes
    assert bars == pytest.approx([100 * c.memory_bytes / length for c in layouts[:10]], abs=0.001)


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=60))
def test_the_front_is_that_of_brute_force(points: list[tuple[float, float]]):
    front = [(c.memory_bytes, c.step_time_s) for c in pareto_front([candidate(*p) for p in points])]
    assert front == sorted(front_by_hand(points))


@every_case
def test_the_front_is_drawn(case: str):
    found, _, html = plan(case)
    priced = [*found.fitting, *found.too_large]
    front = sorted(front_by_hand([(c.memory_bytes, c.step_time_s) for c in priced]))
    page = Page(html)
    marks = [e for e in page.all("circle") + page.all("use") if e.inside]  # a legend's have no tip
    best = [e for e in marks if e.has("best")]
    fit = [e.tag == "circle" for e in best]
    assert fit == [memory <= found.request.budget_bytes for memory, _ in front]
    others = [e for e in marks if (e.has("fits") or e.has("lost")) and not e.has("best")]
    assert len(others) <= MOST_POINTS
    caption = page.all("figcaption")[0].text
    assert [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", caption)[:3]] == [
        *(len(front), len(others), len(priced) - len(front))
    ]
    [line] = page.all("polyline", "front")
    corners = [tuple(map(float, point.split(","))) for point in line.attrs["points"].split()]
    assert len(corners) == 2 * len(front) - 1
    assert corners[1::2] == [(after[0], before[1]) for before, after in pairwise(corners[::2])]
    assert corners[::2] == sorted(corners[::2]) and all(0 <= n <= 100 for corner in corners for n in corner)
    at = [tuple(float(e.attrs.get(f"c{xy}") or e.attrs[xy]) for xy in "xy") for e in [_as_numbers(e) for e in best]]
    assert at == corners[::2]


def _as_numbers(e: Element) -> Element:
    return Element(e.tag, {key: value.rstrip("%") for key, value in e.attrs.items()}, e.around)


@given(st.integers(0, 5000), st.integers(1, 400))
def test_thinning(count: int, most: int):
    left = thinned([candidate(i + 1, 1) for i in range(count)], most)
    assert len(left) <= most and (len(left) == count or len(left) >= most / 2)
    steps = {b.memory_bytes - a.memory_bytes for a, b in pairwise(left)}
    assert len(steps) <= 1


@given(st.integers(2, 128), st.integers(1, 12), st.integers(1, 2000))
def test_a_timeline_of_any_pipeline_can_be_read(pp: int, v: int, m: int):
    p, chunks, shown = drawn_size(pp, v, m)
    assert 2 <= p <= min(pp, 16) and 1 <= chunks <= v and 1 <= shown <= m
    assert (chunks > 1) == (v > 1)
    assert shown * chunks + p <= 48 and 2 * p * chunks * shown <= 1100
    if pp <= 16 and v == 1:
        assert p == pp
    assert tick_table(make_schedule("interleaved" if chunks > 1 else "1f1b", p, chunks, shown)).ticks


@every_case
def test_the_pipeline_that_is_shown_is_said(case: str):
    _, made, html = plan(case)
    parallel, m = made.job.parallel, made.job.microbatches
    page = Page(html)
    drawings = page.all("div", "drawing")
    if parallel.pp == 1:
        assert not drawings and "There is no pipeline" in html
        return
    p, v, shown = drawn_size(parallel.pp, parallel.virtual_stages, m)
    ops = [e for e in drawings[0].inside if e.tag == "rect" and e.inside]
    assert len(ops) == 2 * p * v * shown
    assert f"{p} ranks, {v} chunks on each, {shown} microbatches" in html
    if (p, v, shown) != (parallel.pp, parallel.virtual_stages, m):
        assert f"{parallel.pp} ranks, {parallel.virtual_stages} chunks on each, {m:,} microbatches" in html
        bubble = bubble_formula(parallel.schedule, parallel.pp, parallel.virtual_stages, m)
        assert f"bubble of {float(bubble):.1%}" in html


def test_words_of_a_layout():
    """On a mixture-of-experts model and all five axes."""
    found, made, _ = plan("mixtral-8x7b")
    parallel = Parallel(dp=2, pp=3, ep=4, cp=2, tp=8, virtual_stages=2, schedule="interleaved", zero=1)
    train = replace(made.job.train, global_batch_size=512, micro_batch_size=2, remat="full")
    words = dict(layout_words(replace(made.job, parallel=parallel, train=train)))
    assert words["data parallel"] == "2 copies of the model, each with 256 of the 512 sequences of a step"
    assert words["expert parallel"] == "4 ranks share each layer's experts, with 64 sequences each"
    assert words["pipeline parallel"] == "32 layers on 3 ranks, 2 chunks of at most 6 on each"
    assert words["context parallel"] == "2 ranks share each sequence, 2,048 tokens each; attention by ring"
    assert words["microbatches"] == "32 of 2 sequences, one after the other"
    assert words["optimizer states"] == "sharded over 16 replicas (zero 1)"
    assert words["recomputed"].startswith("whole layers")
    assert found.best and "tensor parallel" not in dict(layout_words(found.best.job(found.request)))


@pytest.mark.parametrize(
    ("most", "value", "text"),
    [
        (12 * 2**20, 12 * 2**20, "12.0 MiB"),
        (12 * 2**20, 2**10, "< 0.1 MiB"),
        (79 * GIB, 300 * 2**20, "0.3 GiB"),
        (700 * GIB, 700 * GIB, "700.0 GiB"),
        (5 * GIB, 0, "0.00 GiB"),
    ],
)
def test_sizes(most: float, value: float, text: str):
    assert memory_scale(most).name(value) == text


@pytest.mark.parametrize(
    ("most", "value", "text"),
    [(2.1e-3, 2.1e-3, "2.10 ms"), (0.3, 1e-6, "< 0.1 ms"), (63, 0.86, "0.9 s"), (1234, 1234, "1,234.0 s")],
)
def test_times(most: float, value: float, text: str):
    assert time_scale(most).name(value) == text


def test_every_item_has_a_name_and_a_colour_that_its_number_can_be_read_on():
    found, made, _ = plan("gpt-1t")
    assert found.best
    for framework in ("parallax", "megatron"):
        priced = estimate(made.job, framework)
        assert priced.time
        assert priced.stages[0].keys() <= COLOURS["memory"].keys() == MEMORY_NAMES.keys()
        assert priced.time.items.keys() <= COLOURS["time"].keys() == NAMES.keys()
    colours = Counter(colour for kind in COLOURS.values() for colour in kind.values())
    assert [c for c, n in colours.items() if n > 1] == [COLOURS["memory"]["stash"]]  # one thing, by two schemes
    assert all((luminance(c) + 0.05) / (luminance(INK) + 0.05) >= 4.5 for c in colours)


def luminance(colour: str) -> float:
    """Relative, of WCAG 2.2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
