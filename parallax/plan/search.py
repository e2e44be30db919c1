"""Every layout of a model on a number of devices: legal, then in memory, then by time. No jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

from parallax.config import Parallel, Train
from parallax.layout import AXES
from parallax.machine import Machine
from parallax.plan.costs import Costs
from parallax.plan.estimate import GIB, Job, memory_of
from parallax.plan.layer import PARALLAX, LayerTimes
from parallax.plan.step import own_step
from parallax.schedule.op import MAX_OPS
from parallax.shape import ModelShape

HEADROOM = 0.08  # of the memory, left to the runtime, to fragments, and to what an estimate does not see
MICRO_BATCHES = (1, 2, 4, 8, 16)
REMATS = ("none", "selective", "full")
LEAST_CONTEXT = 1024  # tokens of a sequence that a context-parallel rank must hold
MOST_TENSOR = 16  # where nodes do not bound it (TPU)
MOST_STAGES_OF_A_RANK = 12
MOST_DEVICES_FOUND = 32_768  # where their number is to be found
FAR_TOO_LARGE = 1.5  # times the memory
NEAR = 0.005  # times this close are taken as equal, and the simpler layout is preferred


@dataclass(frozen=True)
class Request:
    """`pins` fixes keys of [parallel] and [train] that the search would choose."""

    shape: ModelShape
    machine: Machine
    devices: int
    seq_len: int
    global_batch_size: int
    precision: str = "bfloat16"
    headroom: float = HEADROOM
    pins: Mapping[str, Any] = field(default_factory=dict)

    @property
    def budget_bytes(self) -> float:
        """What a layout may use of a device's memory."""
        return self.machine.hbm_bytes * (1 - self.headroom)

    def allows(self, key: str, value: Any) -> bool:
        return self.pins.get(key, value) == value


@dataclass(frozen=True)
class Candidate:
    """A layout, what its fullest stage holds, and what its step takes."""

    parallel: Parallel
    train: Train
    memory_bytes: float
    step_time_s: float

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self.parallel, axis) for axis in AXES)

    @property
    def complexity(self) -> tuple[int, int, int]:
        """Fewer dimensions are simpler, then smaller ones but for dp, then fewer chunks."""
        p = self.parallel
        return sum(n > 1 for n in (p.pp, p.ep, p.cp, p.tp)), p.pp * p.ep * p.cp * p.tp, p.virtual_stages

    def job(self, request: Request) -> Job:
        return Job(request.shape, request.machine, self.parallel, self.train)


Prices = Mapping[tuple[Parallel, Train], Candidate]


@dataclass(frozen=True)
class Found:
    """`fitting` and `too_large` have every configuration that was priced, fastest and smallest first."""

    request: Request
    fitting: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]

    @cached_property
    def best(self) -> Candidate | None:
        """The fastest; of those that are as fast, the simplest."""
        if not self.fitting:
            return None
        as_fast = [c for c in self.fitting if c.step_time_s <= (1 + NEAR) * self.fitting[0].step_time_s]
        return min(as_fast, key=lambda c: (c.complexity, c.step_time_s))

    def layouts(self) -> list[Candidate]:
        """The best configuration of each layout, the choice first."""
        best: dict[tuple[int, ...], Candidate] = {}
        if self.best:
            best[self.best.sizes] = self.best
        for candidate in self.fitting:
            best.setdefault(candidate.sizes, candidate)
        return list(best.values())

    def nearest_infeasible(self) -> Candidate | None:
        """Of those that do not fit and would be faster than the choice, the one that lacks least; else the smallest."""
        faster = [c for c in self.too_large if self.best is None or c.step_time_s < self.best.step_time_s]
        return next(iter(faster or self.too_large), None)


def search(request: Request, known: Found | None = None) -> Found:
    """Prices every legal configuration, but for what cannot matter: a larger micro batch where a smaller one does not
    fit with everything recomputed, more recomputation where less fits, and layouts whose states alone are far too
    large. `known` has prices already, of a request that differs in its memory alone; then nothing is priced
    that does not fit."""
    times = LayerTimes(Costs(request.machine, request.precision), PARALLAX)
    prices = {(c.parallel, c.train): c for c in (*known.fitting, *known.too_large)} if known else None
    fitting: list[Candidate] = []
    too_large: list[Candidate] = []
    for layout in layouts(request):
        for v, context in product(chunk_counts(request, layout.pp), contexts(request, layout.cp)):
            parallel = in_chunks(request, layout, v, context)
            for micro in micro_batches(request, parallel):
                priced = [*_price_remats(request, times, prices, parallel, micro)]
                fit = [c for c in priced if c.memory_bytes <= request.budget_bytes]
                fitting += fit
                too_large += [c for c in priced if c.memory_bytes > request.budget_bytes]
                if not fit:
                    break
    fitting.sort(key=lambda c: (c.step_time_s, c.complexity, c.memory_bytes))
    too_large.sort(key=lambda c: (c.memory_bytes, c.step_time_s))
    return Found(request, tuple(fitting), tuple(too_large))


def _price_remats(
    request: Request, times: LayerTimes, prices: Prices | None, parallel: Parallel, micro: int
) -> Iterator[Candidate]:
    """Ways to recompute, from none on, up to the first that fits."""
    remats = ways_to_recompute(request)
    most = FAR_TOO_LARGE * request.machine.hbm_bytes if prices is None else request.budget_bytes
    for remat in remats:
        train = train_of(request, micro, remat)
        candidate = prices.get((parallel, train)) if prices else None
        memory = candidate.memory_bytes if candidate else memory_bytes(request, parallel, train)
        if memory > most and (prices is not None or remat != remats[-1]):
            continue
        if candidate is None:
            candidate = Candidate(parallel, train, memory, own_step(times, request.shape, parallel, train).total)
        yield candidate
        if memory <= request.budget_bytes:
            return


def memory_bytes(request: Request, parallel: Parallel, train: Train) -> float:
    """On the device that holds the most, with the attention kernel this machine would run."""
    return sum(memory_of(Job(request.shape, request.machine, parallel, train))[0].values())


def fits(request: Request) -> bool:
    """Whether any configuration fits: as `search` finds, by the memory of each layout's leanest."""
    remat = ways_to_recompute(request)[-1]
    for layout in layouts(request):
        for v, context in product(chunk_counts(request, layout.pp), contexts(request, layout.cp)):
            parallel = in_chunks(request, layout, v, context)
            for micro in micro_batches(request, parallel)[:1]:
                if memory_bytes(request, parallel, train_of(request, micro, remat)) <= request.budget_bytes:
                    return True
    return False


# What is legal


def is_legal(request: Request) -> bool:
    """Whether there is any configuration to price; where `devices` is 0, on any number of them that would be tried."""
    if not request.devices:
        return any(is_legal(dataclasses.replace(request, devices=count)) for count in device_counts(request))
    return any(
        micro_batches(request, dataclasses.replace(layout, virtual_stages=v))
        for layout in layouts(request)
        for v in chunk_counts(request, layout.pp)
    )


def ways_to_recompute(request: Request) -> list[str]:
    return [remat for remat in REMATS if request.allows("remat", remat)]


def in_chunks(request: Request, parallel: Parallel, v: int, context: Any) -> Parallel:
    """The layout with v chunks a rank."""
    schedule = request.pins.get("schedule", "interleaved" if v > 1 else "1f1b")
    return dataclasses.replace(parallel, virtual_stages=v, schedule=schedule, context=context)


def train_of(request: Request, micro: int, remat: str) -> Train:
    return Train(
        steps=1,
        seq_len=request.seq_len,
        global_batch_size=request.global_batch_size,
        micro_batch_size=micro,
        remat=remat,  # type: ignore[arg-type]
        precision=request.precision,  # type: ignore[arg-type]
    )


def layouts(request: Request) -> Iterator[Parallel]:
    """Every pp, dp, ep, cp and tp whose product is the devices and that the model, the machine and the batch allow."""
    for tp in tensor_sizes(request):
        for cp in context_sizes(request, tp):
            rest, left = divmod(request.devices, tp * cp)
            for ep in expert_sizes(request) if not left else ():
                for pp in divisors(rest):
                    dp, left = divmod(rest, pp * ep)
                    legal = not left and pp <= len(request.shape.layers) and request.global_batch_size % (dp * ep) == 0
                    if legal and request.allows("pp", pp) and request.allows("dp", dp):
                        yield Parallel(
                            dp=dp,
                            pp=pp,
                            ep=ep,
                            cp=cp,
                            tp=tp,
                            schedule=request.pins.get("schedule", "1f1b"),
                            sequence_parallel=request.pins.get("sequence_parallel", True),
                            zero=request.pins.get("zero", 1),
                        )


def tensor_sizes(request: Request) -> list[int]:
    """Sizes that divide heads and feed-forward width, divide or are divided by key/value heads, and stay in a node.
    `devices` 0: any."""
    kinds = set(request.shape.layers)
    most = request.machine.devices_per_node if request.machine.platform == "gpu" else MOST_TENSOR
    sizes = divisors(math.gcd(*(size for kind in kinds for size in (kind.heads, kind.ff))))
    return [
        tp
        for tp in sizes
        if tp <= most
        and request.devices % tp == 0
        and (request.machine.platform != "gpu" or most % tp == 0)
        and not any(kind.kv_heads % tp and tp % kind.kv_heads for kind in kinds)
        and (request.seq_len % tp == 0 or request.pins.get("sequence_parallel") is False)
        and request.allows("tp", tp)
    ]


def context_sizes(request: Request, tp: int) -> list[int]:
    """Powers of two, each rank with two chunks of the sequence and tokens enough to work on."""
    split = tp if request.pins.get("sequence_parallel", True) else 1
    sizes = [1, *(2**i for i in range(1, 11))]
    if "cp" in request.pins:
        sizes = [request.pins["cp"]]
    return [
        cp
        for cp in sizes
        if cp == 1
        or (
            request.seq_len % math.lcm(2 * cp, split * cp) == 0
            and (request.seq_len // cp >= LEAST_CONTEXT or "cp" in request.pins)
        )
    ]


def expert_sizes(request: Request) -> list[int]:
    counts = {kind.experts for kind in request.shape.layers if kind.experts}
    sizes = divisors(math.gcd(*counts)) if counts else [1]
    return [ep for ep in sizes if request.allows("ep", ep)]


def micro_batches(request: Request, parallel: Parallel) -> list[int]:
    """Those that divide a replica's share of the batch, and make no schedule too long to run."""
    share, stages = request.global_batch_size // (parallel.dp * parallel.ep), parallel.pp * parallel.virtual_stages
    sizes = [request.pins["micro_batch_size"]] if "micro_batch_size" in request.pins else MICRO_BATCHES
    return [micro for micro in sizes if share % micro == 0 and stages * (share // micro) <= MAX_OPS]


def chunk_counts(request: Request, pp: int) -> list[int]:
    """Chunks of a rank: those that leave no more places without a layer than one chunk does, at most a few."""
    if "virtual_stages" in request.pins:
        v = request.pins["virtual_stages"]
        return [v] if v == 1 or (pp > 1 and pp * v <= len(request.shape.layers)) else []
    if pp == 1 or request.pins.get("schedule", "interleaved") != "interleaved":
        return [1]
    layers = len(request.shape.layers)
    places = -(-layers // pp)
    most = min(layers // pp, MOST_STAGES_OF_A_RANK)
    return [v for v in range(1, most + 1) if -(-layers // (pp * v)) * v == places]


def contexts(request: Request, cp: int) -> tuple[str, ...]:
    if cp == 1:
        return ("ring",)
    return tuple(how for how in ("ring", "all_gather") if request.allows("context", how))


def divisors(n: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


# The other way round


def pinned_devices(request: Request) -> int:
    """What the number of devices must be a multiple of."""
    return math.prod(request.pins.get(axis, 1) for axis in AXES)


def between(request: Request, failed: int, done: int, most: int = 15) -> list[int]:
    """Whole nodes, or multiples of what is pinned, between two numbers of devices: evenly, at most so many."""
    node, pinned = request.machine.devices_per_node, pinned_devices(request)
    unit = node if done > node and node % pinned == 0 else pinned
    counts = range((failed // unit + 1) * unit, done, unit)
    step = -(-len(counts) // most) if counts else 1
    return [*counts[::step]]


def device_counts(request: Request, least: int = 1, most: int = MOST_DEVICES_FOUND) -> list[int]:
    """Parts of a node, then nodes by steps of at most a half: 1, 2, 3, 4, 6, 8, 12, ...; where sizes are pinned,
    multiples of their product by such steps too."""
    node, pinned = request.machine.devices_per_node, pinned_devices(request)
    steps = [n for i in range(most.bit_length()) for n in (2**i, 3 * 2**i)]
    counts = {*divisors(node), *(node * n for n in steps if n > 1), *(pinned * n for n in steps if pinned > 1)}
    return sorted(n for n in counts if least <= n <= most and n % pinned == 0)


def smallest_count(request: Request) -> int | None:
    """The fewest devices on which some layout fits, of `device_counts` and of what lies between the last two tried."""
    states = 6 * request.shape.parameters / request.budget_bytes  # weights and gradients are never shared by dp
    return _smallest(request, math.floor(states), lambda count: fits(dataclasses.replace(request, devices=count)))


def smallest_that_fits(request: Request) -> Found | None:
    """What `search` finds on so many."""
    count = smallest_count(request)
    return search(dataclasses.replace(request, devices=count)) if count else None


def smallest_that_is_fast(request: Request, tokens: float, days: float) -> Found | None:
    """The fewest devices that train on so many tokens in so many days, likewise."""
    tried: dict[int, Found] = {}

    def is_fast(count: int) -> bool:
        tried[count] = found = search(dataclasses.replace(request, devices=count))
        return found.best is not None and training_days(found, tokens) <= days

    count = _smallest(request, math.floor(device_days(request, tokens) / days), is_fast)
    return tried[count] if count else None


def device_days(request: Request, tokens: float) -> float:
    """Days of one device, at its full peak, that so many tokens take."""
    flops = tokens * request.shape.train_flops_per_token(request.seq_len)
    return flops / (86_400 * request.machine.peak_flops[request.precision])


def _smallest(request: Request, least: int, enough: Callable[[int], bool]) -> int | None:
    failed = max(0, least - 1)
    for count in device_counts(request, max(1, least)):
        if enough(count):
            return next(filter(enough, between(request, failed, count)), count)
        failed = count
    return None


def training_days(found: Found, tokens: float) -> float:
    assert found.best is not None
    per_step = found.request.global_batch_size * found.request.seq_len
    return tokens / per_step * found.best.step_time_s / 86_400


def lacking_gib(request: Request, candidate: Candidate) -> float:
    """GiB by which a configuration is over the budget, what is planned with; negative where it is under."""
    return (candidate.memory_bytes - request.budget_bytes) / GIB


def with_memory_for(request: Request, candidate: Candidate) -> Request:
    """The request on a machine with memory enough, in tenths of a GiB, that the candidate fits, headroom and all."""
    lacks = candidate.memory_bytes / (1 - request.headroom) - request.machine.hbm_bytes
    more = math.ceil(math.ceil(10 * lacks / GIB + 1e-6) / 10 * GIB)
    machine = dataclasses.replace(request.machine, hbm_bytes=request.machine.hbm_bytes + more)
    return dataclasses.replace(request, machine=machine)
