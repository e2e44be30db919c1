"""Why a plan is as it is: the six steps of Megatron-LM's guidance, with this model's numbers. No jax.

The guidance (NVIDIA's parallelism guide, August 2026): does it fit on one device; tensor parallelism inside a node and
from a width of 4096; a pipeline only if it still does not fit, and from some 50 layers; context parallelism for
sequences of 8K and more; the rest to data parallelism; then the batch. Where a rule and the prices disagree, both are
said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from parallax.config import Parallel
from parallax.plan.estimate import GIB, Estimate, estimate
from parallax.plan.search import Candidate, Found, Request, lacking_gib
from parallax.plan.sharded import fully_sharded
from parallax.schedule.simulate import bubble_formula
from parallax.text import seconds

WIDTH_FOR_TENSOR = 4096
LAYERS_FOR_PIPELINE = 50
LONG_SEQUENCE = 8192
NOTABLE = 0.01  # share of the step time by which fully sharded weights must win to be named

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
    made = estimate(best.job(found.request))
    view = _View(found, best, made)
    middle = [_tensor(view), _pipeline(view), _context(view)]
    if any(kind.experts for kind, _ in found.request.shape.kinds):
        middle.append(_experts(view))
    return (_one_device(view), *middle, _data(view), _batch(view))


@dataclass(frozen=True)
class _View:
    found: Found
    best: Candidate
    estimate: Estimate

    @property
    def request(self) -> Request:
        return self.found.request

    @property
    def parallel(self) -> Parallel:
        return self.best.parallel

    def share(self, item: str) -> str:
        return f"{self.estimate.time.items[item] / self.estimate.step_time_s:.1%}" if self.estimate.time else ""

    def fastest(self, test: Test) -> Candidate | None:
        return next((c for c in self.found.fitting if test(c)), None)

    def leanest(self, test: Test) -> Candidate | None:
        """Of those that do not fit."""
        return next((c for c in self.found.too_large if test(c)), None)

    def slower(self, candidate: Candidate) -> str:
        """`6 % slower (65.2 s)`."""
        change = candidate.step_time_s / self.best.step_time_s - 1
        word = "slower" if change >= 0 else "faster"
        return f"{abs(change):.1%} {word} ({seconds(candidate.step_time_s)})"

    def instead(self, what: str, test: Test) -> str:
        """What another value would make of the step: its best configuration, or how much the leanest lacks."""
        if other := self.fastest(test):
            return f"{what}: {self.slower(other)} at best, as {describe(other)}"
        if other := self.leanest(test):
            lacks = lacking_gib(self.request, other)
            return f"{what} does not fit: its leanest, {describe(other)}, lacks {lacks:.1f} GiB"
        return f"{what} is not possible: {_why_not(self.request, what)}"

    def flip(self, axis: str) -> Iterator[str]:
        """The smallest change of memory that would decide an axis otherwise."""
        chosen = getattr(self.parallel, axis)
        others = (
            c
            for c in self.found.too_large
            if getattr(c.parallel, axis) != chosen and c.step_time_s < self.best.step_time_s * 0.995
        )
        if other := next(others, None):
            faster = 1 - other.step_time_s / self.best.step_time_s
            needs = lacking_gib(self.request, other)
            value = getattr(other.parallel, axis)
            yield (
                f"what would change it: with {needs:.1f} GiB more HBM, {axis} {value} would fit and be {faster:.1%} "
                f"faster ({describe(other)})"
            )
        else:
            yield f"what would change it: no amount of memory; of what was priced, no other {axis} is faster"


def describe(candidate: Candidate) -> str:
    """`dp2·pp4·tp4, v 2, micro batch 1, remat full`."""
    p, train = candidate.parallel, candidate.train
    parts = [
        "·".join(f"{axis}{n}" for axis in ("dp", "pp", "ep", "cp", "tp") if (n := getattr(p, axis)) > 1) or "one device"
    ]
    if p.virtual_stages > 1:
        parts.append(f"v {p.virtual_stages}")
    return ", ".join([*parts, f"micro batch {train.micro_batch_size}", f"remat {train.remat}"])


def _why_not(request: Request, what: str) -> str:
    axis, _, value = what.partition(" ")
    return f"no legal layout of {request.devices} devices has {axis} {value} for this model and batch"


# The steps


def _one_device(view: _View) -> Step:
    request, parameters = view.request, view.request.shape.parameters
    hbm, budget = request.machine.hbm_bytes, request.budget_bytes
    states = 18 * parameters
    reasons = [
        f"{parameters / 1e9:.1f} B parameters x 18 bytes (weights 2, float32 gradients 4, master weights 4, moments 8)"
        f" = {states / GIB:,.1f} GiB; x 16, with gradients in 16 bits, {16 * parameters / GIB:,.1f} GiB",
        f"each {request.machine.name} has {hbm / GIB:.1f} GiB, of which {budget / GIB:.1f} are planned with "
        f"({request.headroom:.0%} headroom)",
    ]
    if states <= budget:
        return Step("Does it fit on one device?", "yes, its weights and states do", (*reasons, _activations(view)))
    least = -(-states // int(budget))
    reasons.append(f"weights and states alone need {least:,} devices, if they were cut evenly")
    return Step("Does it fit on one device?", "no", tuple(reasons))


def _activations(view: _View) -> str:
    one = view.fastest(lambda c: c.complexity[0] == 0)
    if one:
        return f"so that data parallelism alone would do: {view.slower(one)} at best, as {describe(one)}"
    lean = view.leanest(lambda c: c.complexity[0] == 0)
    if lean:
        lacks = lacking_gib(view.request, lean)
        return f"with activations of a sequence of {view.request.seq_len:,} it lacks {lacks:.1f} GiB"
    return "the number of devices does not divide the batch, so that data parallelism alone is not legal"


def _tensor(view: _View) -> Step:
    request, tp, width = view.request, view.parallel.tp, view.request.shape.width
    node, platform = request.machine.devices_per_node, request.machine.platform
    reasons = []
    if tp > 1:
        reasons.append(f"its communication is {view.share('tp')} of the step; sequence parallelism comes with it")
        reasons.append(view.instead(f"tp {tp // 2}", lambda c: c.parallel.tp == tp // 2))
    if platform == "gpu" and tp >= node:
        reasons.append(f"it stops at the node: beyond {node} devices its traffic would leave NVLink for the network")
    else:
        reasons.append(view.instead(f"tp {2 * tp}", lambda c: c.parallel.tp == 2 * tp))
    rule = f"rule of thumb: worth it from a width of {WIDTH_FOR_TENSOR}, and this model's is {width}"
    if (width >= WIDTH_FOR_TENSOR) == (tp > 1):
        reasons.append(rule)
    elif tp > 1:
        reasons.append(f"{rule}: rule and prices disagree, since without it something else must give")
    else:
        reasons.append(f"{rule}: the rule would allow it, the prices find that it is not needed")
    return Step(
        "Tensor parallelism, inside a node?", f"tp {tp}" if tp > 1 else "no: tp 1", (*reasons, *view.flip("tp"))
    )


def _pipeline(view: _View) -> Step:
    p, layers = view.parallel, len(view.request.shape.layers)
    pp, v, m = p.pp, p.virtual_stages, view.estimate.job.microbatches
    reasons = []
    if pp == 1:
        reasons.append("it fits without: a pipeline would add a bubble")
        reasons.append(view.instead("pp 2", lambda c: c.parallel.pp == 2))
    else:
        without = view.fastest(lambda c: c.parallel.pp == 1)
        reasons.append(view.instead("pp 1", lambda c: c.parallel.pp == 1))
        if without:
            reasons.append("the guide takes a pipeline only where nothing else fits: rule and prices disagree")
        if pp > 2:
            smaller = max(d for d in range(1, pp) if pp % d == 0)
            reasons.append(view.instead(f"pp {smaller}", lambda c: c.parallel.pp == smaller))
        bubble = float(bubble_formula("interleaved", pp, v, m))
        text = f"bubble (p-1)/(v·m) = {pp - 1}/({v}·{m}) = {bubble:.1%} of the useful time"
        if v > 1:
            plain = float(bubble_formula("1f1b", pp, 1, m))
            text += f"; without interleaving it would be {plain:.1%}"
        reasons.append(text)
        if v > 1:
            reasons.append(view.instead("v 1", lambda c: c.sizes == view.best.sizes and c.parallel.virtual_stages == 1))
        padding = -(-layers // (pp * v)) * pp * v - layers
        per_stage = f"{layers} layers in {pp * v} stages"
        reasons.append(f"{per_stage}: {padding} places without a layer" if padding else f"{per_stage}, balanced")
    rule = f"rule of thumb: worth it from about {LAYERS_FOR_PIPELINE} layers, and this model has {layers}"
    if (layers >= LAYERS_FOR_PIPELINE) == (pp > 1):
        reasons.append(rule)
    else:
        reasons.append(f"{rule}: rule and prices disagree")
    answer = f"pp {pp}" + (f", interleaved with {v} chunks a rank" if v > 1 else "") if pp > 1 else "no: pp 1"
    return Step("A pipeline?", answer, (*reasons, *view.flip("pp")))


def _context(view: _View) -> Step:
    cp, seq_len = view.parallel.cp, view.request.seq_len
    reasons = []
    if cp > 1:
        how = "passed around a ring" if view.parallel.context == "ring" else "gathered"
        reasons.append(f"keys and values are {how}: {view.share('cp')} of the step")
        reasons.append(view.instead(f"cp {cp // 2}", lambda c: c.parallel.cp == cp // 2))
    reasons.append(view.instead(f"cp {2 * cp}", lambda c: c.parallel.cp == 2 * cp))
    rule = f"rule of thumb: for sequences of {LONG_SEQUENCE:,} and more, and these have {seq_len:,}"
    if (seq_len >= LONG_SEQUENCE) == (cp > 1):
        reasons.append(rule)
    else:
        reasons.append(f"{rule}: rule and prices disagree")
    return Step("Context parallelism?", f"cp {cp}" if cp > 1 else "no: cp 1", (*reasons, *view.flip("cp")))


def _experts(view: _View) -> Step:
    ep, kinds = view.parallel.ep, [kind for kind, _ in view.request.shape.kinds if kind.experts]
    reasons = [
        f"{kinds[0].experts} experts, {kinds[0].experts_per_token} a token; ep divides them and splits the batch"
    ]
    if ep > 1:
        reasons.append(f"its all-to-alls are {view.share('ep')} of the step")
        reasons.append(view.instead(f"ep {ep // 2}", lambda c: c.parallel.ep == ep // 2))
    if 2 * ep <= kinds[0].experts:
        reasons.append(view.instead(f"ep {2 * ep}", lambda c: c.parallel.ep == 2 * ep))
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
    sharded = fully_sharded(view.request) if view.request.devices > 1 else None
    if sharded and sharded.step_time_s < view.best.step_time_s * (1 - NOTABLE):
        gain = 1 - sharded.step_time_s / view.best.step_time_s
        axes = "·".join(f"{a}{n}" for a, n in (("dp", sharded.dp), ("cp", sharded.cp), ("tp", sharded.tp)) if n > 1)
        reasons.append(
            f"fully sharded weights (ZeRO-3, not built yet) would change the choice: {axes} without a pipeline, micro "
            f"batch {sharded.micro_batch_size}, remat {sharded.remat}, {sharded.memory_bytes / GIB:.1f} GiB, "
            f"{gain:.1%} faster"
        )
    elif sharded:
        slower = sharded.step_time_s / view.best.step_time_s - 1
        word = f"{slower:.1%} slower" if slower > 0 else f"only {-slower:.1%} faster"
        reasons.append(f"fully sharded weights (ZeRO-3, not built yet) would not change it: {word} at best")
    return Step("What is left for data parallelism?", f"dp {p.dp}", tuple(reasons))


def _batch(view: _View) -> Step:
    p, train, m = view.parallel, view.best.train, view.estimate.job.microbatches
    ranks = f"dp {p.dp}" + (f" x ep {p.ep}" if p.ep > 1 else "")
    batch = f"{train.global_batch_size} sequences = {ranks} x micro batch {train.micro_batch_size} x {m} microbatches"
    reasons = [batch]
    same = lambda c: c.sizes == view.best.sizes
    if p.pp > 1:
        reasons.append(f"m = {m} is {m / p.pp:.0f} times the pipeline's {p.pp} ranks; much more than once is wanted")
    larger = 2 * train.micro_batch_size
    reasons.append(
        view.instead(f"micro batch {larger}", lambda c: same(c) and c.train.micro_batch_size == larger)
        if m > 1
        else "no larger micro batch divides it"
    )
    if train.remat != "none":
        reasons.append(f"remat {train.remat}: computing again is {view.share('recompute')} of the step")
        leaner = view.leanest(lambda c: same(c) and c.train.remat == "none" and c.train.micro_batch_size == 1)
        if leaner:
            reasons.append(f"without it, this layout lacks {lacking_gib(view.request, leaner):.1f} GiB")
    else:
        reasons.append("remat none: every product is kept, nothing but norms and activations is computed again")
    reasons.append("then measure: MFU, peak memory and communication, and change one thing at a time")
    return Step(
        "Does the batch divide, and into what?",
        f"micro batch {train.micro_batch_size}, {m} microbatches",
        tuple(reasons),
    )


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
