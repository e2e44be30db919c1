"""Why a plan is as it is: the six steps of Megatron-LM's guidance, with this model's numbers. No jax.

The guidance (NVIDIA's parallelism guide, August 2026): does it fit on one device; tensor parallelism inside a node and
from a width of 4096; a pipeline only if it still does not fit, and from some 50 layers; context parallelism for
sequences of 8K and more; the rest to data parallelism; then the batch. Where a rule and the prices disagree, both are
said.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from parallax.config import Parallel
from parallax.layout import AXES
from parallax.plan.estimate import GIB, Estimate, estimate
from parallax.plan.search import (
    LEAST_CONTEXT,
    MICRO_BATCHES,
    MOST_TENSOR,
    NEAR,
    REMATS,
    Candidate,
    Found,
    Request,
    is_legal,
    lacking_gib,
    search,
    with_memory_for,
)
from parallax.plan.sharded import fully_sharded
from parallax.schedule.simulate import bubble_formula
from parallax.text import ORDER, seconds

WIDTH_FOR_TENSOR = 4096
LAYERS_FOR_PIPELINE = 50
LONG_SEQUENCE = 8192
PRICES_DECIDE = "the prices say otherwise, and decide"
NOTABLE = 0.01  # share of the step time by which fully sharded weights must win to be named
NOT_TRIED = f"context parallelism leaves each rank {LEAST_CONTEXT:,} tokens of a sequence or more"

Test = Callable[[Candidate], bool]


@dataclass(frozen=True)
class Step:
    """One decision: what is asked, what was decided, and the reasons, a sentence each."""

    question: str
    answer: str
    reasons: tuple[str, ...]


def explain(found: Found) -> tuple[Step, ...]:
    """The six steps of a plan that fits."""
    best = found.best
    assert best is not None
    request = found.request
    axes = {axis for axis in ORDER if axis in request.pins}
    free = search(dataclasses.replace(request, pins={})).best if axes else None
    view = _View(found, best, estimate(best.job(request)), free)
    middle = [_tensor(view), _pipeline(view), _context(view)]
    if any(kind.experts for kind, _ in found.request.shape.kinds):
        middle.append(_experts(view))
    return (_one_device(view), *middle, _data(view), _batch(view))


@dataclass(frozen=True)
class _View:
    found: Found
    best: Candidate
    estimate: Estimate
    free: Candidate | None  # the choice where nothing is fixed; None where nothing is
    said: set[Candidate] = field(default_factory=set)  # what `flip` has named already

    @property
    def request(self) -> Request:
        return self.found.request

    @property
    def parallel(self) -> Parallel:
        return self.best.parallel

    def share(self, item: str) -> str:
        assert self.estimate.time is not None
        share = self.estimate.time.items[item] / self.estimate.step_time_s
        return f"{share:.1%}" if share >= 0.0005 else "less than 0.1%"

    def fastest(self, test: Test) -> Candidate | None:
        return next((c for c in self.found.fitting if test(c)), None)

    def leanest(self, test: Test) -> Candidate | None:
        """Of those that do not fit."""
        return next((c for c in self.found.too_large if test(c)), None)

    def slower(self, candidate: Candidate) -> str:
        """`6.0% slower (65.2 s)`."""
        change = candidate.step_time_s / self.best.step_time_s - 1
        if abs(change) < 0.0005:
            return f"as fast ({seconds(candidate.step_time_s)})"
        return f"{abs(change):.1%} {'slower' if change > 0 else 'faster'} ({seconds(candidate.step_time_s)})"

    def instead(self, what: str, test: Test, **pins: Any) -> str:
        """What another value would make of the step: its best configuration, or how much the leanest is over what is
        planned with, or why none was priced. `pins`: the value, as a request would fix it."""
        if other := self.fastest(test):
            more = REMATS.index(other.train.remat) > REMATS.index(self.best.train.remat)
            why = ", as memory makes it compute more again" if more else ""
            return f"{what}: {self.slower(other)} at best{why}: {describe(other)}"
        if other := self.leanest(test):
            over = lacking_gib(self.request, other)
            return f"{what} does not fit: its leanest, {describe(other)}, is {over:.1f} GiB over what is planned with"
        if is_legal(dataclasses.replace(self.request, pins={**self.request.pins, **pins})):
            return f"{what} was not tried: {NOT_TRIED}"
        none = f"{what}: no such layout of {self.request.devices} devices is legal"
        if self.request.pins and is_legal(dataclasses.replace(self.request, pins=pins)):
            return f"{none} with what is fixed"
        return f"{none} for this model, batch and sequence"

    def fixed(self, axis: str) -> tuple[str, ...] | None:
        """What to say of an axis that the request fixes, in place of reasons."""
        if axis not in self.request.pins:
            return None
        if self.free is None or getattr(self.free.parallel, axis) == getattr(self.parallel, axis):
            return ("fixed by the request; the plan would choose it too",)
        change = self.best.step_time_s / self.free.step_time_s - 1
        return (
            f"fixed by the request; with nothing fixed the plan is {describe(self.free)}, "
            f"{seconds(self.free.step_time_s)}, which this is {change:.1%} behind",
        )

    def flip(self, axis: str) -> Iterator[str]:
        """The memory with which the plan would decide an axis otherwise: searched for again, so that it is true."""
        chosen, rival = getattr(self.parallel, axis), self.best.step_time_s
        faster = [c for c in self.found.too_large if c.step_time_s < self.best.step_time_s * (1 - NEAR)]
        if all(getattr(c.parallel, axis) == chosen for c in faster):
            more = f"more than {NEAR:.1%} faster"
            yield f"of what was priced, nothing with another {axis} is {more}, whether it fits or not"
            return
        other = None
        for candidate in faster:  # by memory: the first that is faster than all that would fit with it
            if getattr(candidate.parallel, axis) == chosen:
                rival = min(rival, candidate.step_time_s)
            elif candidate.step_time_s < rival * (1 - NEAR):
                other = candidate
                break
        if other is None:
            return
        roomier = with_memory_for(self.request, other)
        plan = search(roomier, self.found).best
        if plan is None or getattr(plan.parallel, axis) == chosen or plan in self.said:
            return
        self.said.add(plan)
        needs = (roomier.machine.hbm_bytes - self.request.machine.hbm_bytes) / GIB
        gain = 1 - plan.step_time_s / self.best.step_time_s
        yield (
            f"what would change it: with {needs:.1f} GiB more HBM a device{self._or_headroom(other, plan)}, the plan "
            f"would be {gain:.1%} faster: {describe(plan)}"
        )

    def _or_headroom(self, other: Candidate, plan: Candidate) -> str:
        """The headroom, a whole percentage, that makes room for `other`, if it leads to the plan too."""
        left = math.floor(100 * (1 - other.memory_bytes / self.request.machine.hbm_bytes))
        if left < 0 or search(dataclasses.replace(self.request, headroom=left / 100), self.found).best != plan:
            return ""
        return f" (or with --headroom {left})"


def describe(candidate: Candidate) -> str:
    """`dp2·pp4·cp2·tp4, v 2, micro batch 1, remat full, all_gather`."""
    p, train = candidate.parallel, candidate.train
    sizes = "·".join(f"{axis}{n}" for axis in ORDER if (n := getattr(p, axis)) > 1)
    chunks = f"v {p.virtual_stages}" if p.virtual_stages > 1 else ""
    context = p.context if p.cp > 1 else ""
    parts = [sizes or "one device", chunks, f"micro batch {train.micro_batch_size}", f"remat {train.remat}", context]
    return ", ".join(filter(None, parts))


# The steps


def _one_device(view: _View) -> Step:
    request, parameters = view.request, view.request.shape.parameters
    hbm, budget = request.machine.hbm_bytes, request.budget_bytes
    states = 18 * parameters
    reasons = [
        f"{parameters / 1e9:.1f} B parameters x 18 bytes (weights 2, float32 gradients 4, master weights 4, moments 8)"
        f" = {states / GIB:,.1f} GiB; x 16, with gradients in 16 bits, {16 * parameters / GIB:,.1f} GiB",
        f"each {request.machine.name} has {hbm / GIB:.1f} GiB, of which {budget / GIB:.1f} are planned with "
        f"({100 * request.headroom:g}% headroom)",
    ]
    if states <= budget:
        return Step("Does it fit on one device?", "yes, its weights and states do", (*reasons, _alone(view)))
    least = -(-states // int(budget))
    reasons.append(f"weights and states alone need {least:,} devices, if they were cut evenly")
    return Step("Does it fit on one device?", "no", (*reasons, _alone(view)))


def _alone(view: _View) -> str:
    """What data parallelism alone would make of it, which those who know DDP ask first."""
    if view.request.pins:
        return "data parallelism alone is not what is fixed" if view.best.complexity[0] else "it is data parallel alone"
    what = "data parallelism alone, optimizer states sharded"
    return view.instead(what, lambda c: c.complexity[0] == 0, pp=1, ep=1, cp=1, tp=1)


def _tensor(view: _View) -> Step:
    request, tp, width = view.request, view.parallel.tp, view.request.shape.width
    question = "Tensor parallelism, inside a node?"
    if fixed := view.fixed("tp"):
        return Step(question, f"tp {tp}", fixed)
    node, platform = request.machine.devices_per_node, request.machine.platform
    reasons = []
    if tp > 1:
        split = "comes with it" if view.parallel.sequence_parallel else "is fixed off"
        reasons.append(f"its communication is {view.share('tp')} of the step; sequence parallelism {split}")
        reasons.append(view.instead(f"tp {tp // 2}", lambda c: c.parallel.tp == tp // 2, tp=tp // 2))
    if platform == "gpu" and tp >= node:
        reasons.append(f"it stops at the node: beyond {node} devices its traffic would leave NVLink for the network")
    elif 2 * tp > MOST_TENSOR:
        reasons.append(f"tp beyond {MOST_TENSOR} was not tried")
    else:
        reasons.append(view.instead(f"tp {2 * tp}", lambda c: c.parallel.tp == 2 * tp, tp=2 * tp))
    rule = f"rule of thumb: worth it from a width of {WIDTH_FOR_TENSOR}, and this model's is {width}"
    reasons.append(rule if (width >= WIDTH_FOR_TENSOR) == (tp > 1) else f"{rule}; {PRICES_DECIDE}")
    return Step(question, f"tp {tp}" if tp > 1 else "no: tp 1", (*reasons, *view.flip("tp")))


def _pipeline(view: _View) -> Step:
    p, layers = view.parallel, len(view.request.shape.layers)
    pp, v, m = p.pp, p.virtual_stages, view.estimate.job.microbatches
    reasons = []
    fixed = view.fixed("pp")
    if fixed:
        reasons += fixed
    elif pp == 1:
        reasons.append("it fits without")
        reasons.append(view.instead("pp 2", lambda c: c.parallel.pp == 2, pp=2))
    else:
        without = view.fastest(lambda c: c.parallel.pp == 1)
        reasons.append(view.instead("pp 1", lambda c: c.parallel.pp == 1, pp=1))
        if without:
            reasons.append(f"rule of thumb: only where nothing else fits; {PRICES_DECIDE}")
        if pp > 2:
            smaller = max(d for d in range(1, pp) if pp % d == 0)
            reasons.append(view.instead(f"pp {smaller}", lambda c: c.parallel.pp == smaller, pp=smaller))
    if pp > 1:
        bubble = float(bubble_formula("interleaved", pp, v, m))
        text = f"bubble (p-1)/(v·m) = {pp - 1}/({v}·{m}) = {bubble:.1%} of the useful time"
        if v > 1:
            plain = float(bubble_formula("1f1b", pp, 1, m))
            text += f"; without interleaving it would be {plain:.1%}"
        reasons.append(text)
        if v > 1 and "virtual_stages" not in view.request.pins:
            reasons.append(view.instead("v 1", lambda c: c.sizes == view.best.sizes and c.parallel.virtual_stages == 1))
        padding = -(-layers // (pp * v)) * pp * v - layers
        per_stage = f"{layers} layers in {pp * v} stages"
        reasons.append(f"{per_stage}: {padding} places without a layer" if padding else f"{per_stage}, balanced")
    rule = f"rule of thumb: worth it from about {LAYERS_FOR_PIPELINE} layers, and this model has {layers}"
    if (layers >= LAYERS_FOR_PIPELINE) == (pp > 1):
        reasons.append(rule)
    else:
        reasons.append(f"{rule}; {PRICES_DECIDE}")
    answer = f"pp {pp}" + (f", interleaved with {v} chunks a rank" if v > 1 else "") if pp > 1 else "no: pp 1"
    return Step("A pipeline?", answer, (*reasons, *(() if fixed else view.flip("pp"))))


def _context(view: _View) -> Step:
    cp, seq_len = view.parallel.cp, view.request.seq_len
    if fixed := view.fixed("cp"):
        return Step("Context parallelism?", f"cp {cp}", fixed)
    reasons = []
    if cp > 1:
        how = "passed around a ring" if view.parallel.context == "ring" else "gathered"
        reasons.append(f"keys and values are {how}: {view.share('cp')} of the step")
        reasons.append(view.instead(f"cp {cp // 2}", lambda c: c.parallel.cp == cp // 2, cp=cp // 2))
    reasons.append(view.instead(f"cp {2 * cp}", lambda c: c.parallel.cp == 2 * cp, cp=2 * cp))
    rule = f"rule of thumb: for sequences of {LONG_SEQUENCE:,} and more, and these have {seq_len:,}"
    if (seq_len >= LONG_SEQUENCE) == (cp > 1):
        reasons.append(rule)
    else:
        reasons.append(f"{rule}; {PRICES_DECIDE}")
    return Step("Context parallelism?", f"cp {cp}" if cp > 1 else "no: cp 1", (*reasons, *view.flip("cp")))


def _experts(view: _View) -> Step:
    ep, kinds = view.parallel.ep, [kind for kind, _ in view.request.shape.kinds if kind.experts]
    if fixed := view.fixed("ep"):
        return Step("Expert parallelism?", f"ep {ep}", fixed)
    reasons = [
        f"{kinds[0].experts} experts, {kinds[0].experts_per_token} a token; ep divides them and splits the batch"
    ]
    if ep > 1:
        reasons.append(f"its all-to-alls are {view.share('ep')} of the step")
        reasons.append(view.instead(f"ep {ep // 2}", lambda c: c.parallel.ep == ep // 2, ep=ep // 2))
    if 2 * ep <= kinds[0].experts:
        reasons.append(view.instead(f"ep {2 * ep}", lambda c: c.parallel.ep == 2 * ep, ep=2 * ep))
    reasons.append("the states of experts are shared by dp and cp alone: 6 + 12/(dp·cp) bytes a parameter")
    return Step("Expert parallelism?", f"ep {ep}" if ep > 1 else "no: ep 1", (*reasons, *view.flip("ep")))


def _data(view: _View) -> Step:
    p, replicas = view.parallel, view.parallel.dp * view.parallel.ep * view.parallel.cp
    product = " x ".join(f"{axis} {n}" for axis in ("pp", "ep", "cp", "tp") if (n := getattr(p, axis)) > 1) or "1"
    reasons = [f"{view.request.devices:,} devices / ({product}) = {p.dp}"]
    if replicas > 1 and p.zero:
        reasons.append(
            f"optimizer states are shared by {replicas} replicas (distributed optimizer, ZeRO-1): 6 + 12/{replicas} = "
            f"{6 + 12 / replicas:.2f} bytes a parameter instead of 18"
        )
        reasons.append(f"reducing gradients and gathering weights, once a step, is {view.share('dp')} of it")
    reasons += _places(view)
    reasons += _sharded_weights(view)
    return Step("What is left for data parallelism?", f"dp {p.dp}", tuple(reasons))


def _sharded_weights(view: _View) -> Iterator[str]:
    """What fully sharded weights would make of the step."""
    if view.request.devices == 1 or view.request.pins:
        return
    if any(kind.experts for kind, _ in view.request.shape.kinds):
        yield "fully sharded weights (ZeRO-3, not built yet) were not priced: they are for models without experts"
        return
    sharded = fully_sharded(view.request)
    if sharded is None:
        return
    hidden, exposed = (t / view.best.step_time_s - 1 for t in (sharded.step_time_s, sharded.exposed_step_time_s))
    wins, same = hidden < -NOTABLE, view.best.sizes == (1, sharded.dp, 1, sharded.cp, sharded.tp)
    if same and not wins:
        return
    axes = "·".join(f"{a}{n}" for a, n in (("dp", sharded.dp), ("cp", sharded.cp), ("tp", sharded.tp)) if n > 1)
    where = "the same layout" if same else f"{axes} without a pipeline"
    changes = "would change the choice" if wins else "would not change it"
    memory = f"remat {sharded.remat}, {sharded.memory_bytes / GIB:.1f} GiB"
    yield (
        f"fully sharded weights (ZeRO-3, not built yet) {changes}: {where}, micro batch "
        f"{sharded.micro_batch_size}, {memory}: {hidden:+.1%} in time if all its gathers hide behind products that "
        f"can hide them, {exposed:+.1%} if, as in this plan, none do"
    )


def _places(view: _View) -> Iterator[str]:
    """Which axes stay inside a node."""
    node, stride = view.request.machine.devices_per_node, 1
    inside, across = [], []
    for axis in reversed(AXES):
        size = getattr(view.parallel, axis)
        stride *= size
        if size > 1:
            (inside if stride <= node else across).append(f"{axis} {size}")
    if view.request.machine.platform == "gpu" and across:
        yield f"inside a node of {node}: {', '.join(inside) or 'none'}; over the network: {', '.join(across)}"


def _batch(view: _View) -> Step:
    p, train, m = view.parallel, view.best.train, view.estimate.job.microbatches
    ranks = f"dp {p.dp}" + (f" x ep {p.ep}" if p.ep > 1 else "")
    batch = f"{train.global_batch_size} sequences = {ranks} x micro batch {train.micro_batch_size} x {m} microbatches"
    reasons = [batch]
    same = lambda c: c.sizes == view.best.sizes
    if p.pp > 1:
        reasons.append(f"m = {m} is {m / p.pp:.3g} times the pipeline's {p.pp} ranks; much more than once is wanted")
    reasons.append(_larger_micro_batch(view, m))
    if train.remat != "none":
        reasons.append(f"remat {train.remat}: computing again is {view.share('recompute')} of the step")
        leaner = view.leanest(lambda c: same(c) and c.train.remat == "none" and c.train.micro_batch_size == 1)
        if leaner:
            over = lacking_gib(view.request, leaner)
            reasons.append(f"without it, this layout is {over:.1f} GiB over what is planned with")
    else:
        reasons.append("remat none: every product is kept, nothing but norms and activations is computed again")
    reasons.append("then measure: MFU, peak memory and communication, and change one thing at a time")
    return Step(
        "Does the batch divide, and into what?",
        f"micro batch {train.micro_batch_size}, {m} microbatches",
        tuple(reasons),
    )


def _larger_micro_batch(view: _View, m: int) -> str:
    """What twice the micro batch would make of the chosen sizes."""
    larger = 2 * view.best.train.micro_batch_size
    if "micro_batch_size" in view.request.pins:
        return "the micro batch is fixed by the request"
    if m % 2:
        return f"with these sizes, a micro batch of {larger} does not divide a replica's share of the batch"
    if larger > MICRO_BATCHES[-1]:
        return f"micro batches beyond {MICRO_BATCHES[-1]} were not tried"
    chosen = lambda c: c.sizes == view.best.sizes and c.train.micro_batch_size == larger
    return view.instead(f"micro batch {larger} with these sizes", chosen, micro_batch_size=larger)


def reasons_of(candidate: Candidate, found: Found) -> list[str]:
    """Why a candidate stands where it stands, for JSON."""
    made = estimate(candidate.job(found.request))
    assert made.time is not None and found.best is not None
    free = (found.request.machine.hbm_bytes - candidate.memory_bytes) / GIB
    largest = sorted(((s, n) for n, s in made.time.items.items() if n not in ("matmul", "attention")), reverse=True)[:2]
    costs = ", ".join(f"{name} {s / made.step_time_s:.1%}" for s, name in largest)
    against = candidate.step_time_s / found.best.step_time_s - 1
    lines = [
        f"{candidate.memory_bytes / GIB:.1f} GiB a device, {free:.1f} free",
        f"largest costs beside products: {costs}",
    ]
    return ["the choice" if candidate is found.best else f"{against:+.1%} against the choice", *lines]
