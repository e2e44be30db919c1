"""The search: what is legal, what fits, what is fastest; against the rules of run files and a brute force."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from parallax.config import Log, MeshChoice, Model, Parallel, RunConfig, Train
from parallax.machine import Machine, load_machine
from parallax.models import llama
from parallax.plan.costs import Costs
from parallax.plan.job import job_problems, load_shape
from parallax.plan.layer import PARALLAX, LayerTimes
from parallax.plan.memory import own_memory
from parallax.plan.search import (
    NEAR,
    Found,
    Request,
    between,
    device_counts,
    fits,
    search,
    smallest_that_fits,
    smallest_that_is_fast,
    training_days,
    with_memory_for,
)
from parallax.plan.sharded import fully_sharded
from parallax.plan.step import own_step
from parallax.shape import ModelShape

H100 = load_machine(MeshChoice(name="h100-sxm"))
A100 = load_machine(MeshChoice(name="a100-80gb"))
TPU = load_machine(MeshChoice(name="tpu-v5p"))
# The guide's seven models, and the two of the mission: devices, sequence, batch
GUIDE = [
    ("llama3-8b", H100, 8, 8192, 512),
    ("llama3-70b", H100, 64, 8192, 512),
    ("llama3.1-405b", H100, 1024, 8192, 512),
    ("gpt3-175b", H100, 128, 2048, 512),
    ("mixtral-8x7b", H100, 64, 4096, 512),
    ("mixtral-8x22b", H100, 256, 4096, 512),
    ("deepseek-v3", H100, 1024, 4096, 512),
    ("gpt-1t", A100, 3072, 2048, 3072),
    ("llama3.1-405b", H100, 16_384, 8192, 2048),
]


def shape_of(name: str) -> ModelShape:
    return load_shape(Model(name=name))


def small(layers: int = 6, vocab_size: int = 1000) -> ModelShape:
    config = llama.Config(vocab_size=vocab_size, width=1024, layers=layers, heads=8, kv_heads=4, ff=3072)
    return config.shape()


def tight(machine: Machine, gib: float) -> Machine:
    return dataclasses.replace(machine, hbm_bytes=int(gib * 2**30))


def run_config(parallel: Parallel, train: Train) -> RunConfig:
    return RunConfig(model=Model(name="any"), parallel=parallel, train=train, log=Log(dir="runs/x"))


@pytest.mark.parametrize(("name", "machine", "devices", "seq_len", "batch"), GUIDE)
def test_the_guides_models_get_a_legal_layout_that_fits(name, machine, devices, seq_len, batch):
    request = Request(shape_of(name), machine, devices, seq_len, batch)
    found = search(request)
    assert found.best and found.best.memory_bytes <= request.budget_bytes < machine.hbm_bytes
    for candidate in (*found.layouts()[:20], *found.fitting[:20], *found.too_large[:20]):
        job = candidate.job(request)
        assert job.devices == devices
        assert not [*job_problems(run_config(candidate.parallel, candidate.train), request.shape, machine)]


@pytest.mark.parametrize("gib", [2.5, 4, 40])
def test_nothing_is_faster_that_fits_by_brute_force(gib: float):
    """Every legal configuration of a small model, priced one by one."""
    shape, machine = small(), tight(H100, gib)
    request = Request(shape, machine, 8, 2048, 16)
    times = LayerTimes(Costs(machine, "bfloat16"), PARALLAX)
    best = None
    sizes = [1, 2, 4, 8]
    for dp, pp, cp, tp in itertools.product(sizes, [1, 2, 4], [1, 2], sizes):
        for v, micro, remat, how in itertools.product(
            range(1, 7), [1, 2, 4, 8, 16], ["none", "selective", "full"], ["ring", "all_gather"]
        ):
            schedule = "interleaved" if v > 1 else "1f1b"
            parallel = Parallel(dp=dp, pp=pp, cp=cp, tp=tp, virtual_stages=v, schedule=schedule, context=how)  # type: ignore[arg-type]
            train = Train(steps=1, seq_len=2048, global_batch_size=16, micro_batch_size=micro, remat=remat)  # type: ignore[arg-type]
            legal = dp * pp * cp * tp == 8 and 16 % (dp * micro) == 0
            if not legal or [*job_problems(run_config(parallel, train), shape, machine)]:
                continue
            if sum(own_memory(shape, parallel, train)[0].values()) <= request.budget_bytes:
                time = own_step(times, shape, parallel, train).total
                best = min(best or time, time)
    found = search(request)
    if best is None:
        assert found.best is None
        return
    assert found.best and found.best.step_time_s <= best * (1 + NEAR) * (1 + 1e-12)
    assert found.fitting[0].step_time_s == pytest.approx(best, rel=1e-12)


def test_of_equals_the_simpler_is_chosen():
    found = search(Request(small(), H100, 8, 2048, 64))
    assert found.best and found.best.sizes == (1, 8, 1, 1, 1)  # a small model needs data parallelism alone


def test_pins_are_kept():
    request = Request(
        shape_of("llama3-70b"), H100, 64, 8192, 512, pins={"tp": 8, "remat": "full", "context": "ring", "zero": 0}
    )
    found = search(request)
    assert found.fitting
    for candidate in found.fitting:
        p = candidate.parallel
        assert (p.tp, p.zero, candidate.train.remat, p.context) == (8, 0, "full", "ring")


def test_less_headroom_never_makes_it_slower():
    shape = shape_of("llama3-70b")
    times = [
        search(Request(shape, H100, 64, 8192, 512, headroom=h)).fitting[0].step_time_s for h in (0.3, 0.15, 0.08, 0)
    ]
    assert times == sorted(times, reverse=True)


def test_the_nearest_that_does_not_fit():
    request = Request(shape_of("llama3-70b"), H100, 64, 8192, 512)
    found = search(request)
    nearest = found.nearest_infeasible()
    assert nearest and found.best
    assert nearest.memory_bytes > request.budget_bytes and nearest.step_time_s < found.best.step_time_s
    faster = [c for c in found.too_large if c.step_time_s < found.best.step_time_s]
    assert nearest.memory_bytes == min(c.memory_bytes for c in faster)


def test_tp_stays_in_a_node_of_gpus():
    wide = dataclasses.replace(shape_of("llama3-8b"))
    tps = {c.parallel.tp for c in search(Request(wide, H100, 64, 8192, 512)).fitting}
    assert tps == {1, 2, 4, 8}
    assert max(c.parallel.tp for c in search(Request(wide, TPU, 64, 8192, 512)).fitting) == 16


def test_counts_of_devices():
    request = Request(small(), H100, 0, 2048, 64)
    assert device_counts(request, most=64) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    on_tpu = dataclasses.replace(request, machine=TPU)
    assert device_counts(on_tpu, least=3, most=24) == [4, 8, 12, 16, 24]
    assert between(request, 16, 48) == [24, 32, 40] and between(request, 4, 8) == [5, 6, 7]


def test_counts_are_multiples_of_what_is_pinned():
    request = Request(small(), H100, 0, 2048, 64, pins={"pp": 7})
    assert device_counts(request, most=120) == [7, 14, 21, 28, 42, 56, 84, 112]
    assert between(request, 28, 56) == [35, 42, 49]
    request = dataclasses.replace(request, pins={"pp": 2, "tp": 2})
    assert device_counts(request, most=48) == [4, 8, 12, 16, 24, 32, 48] and between(request, 16, 48) == [24, 32, 40]


@pytest.mark.parametrize("pins", [{}, {"tp": 2}, {"remat": "none"}, {"micro_batch_size": 4}])
@pytest.mark.parametrize("gib", [0.5, 1, 1.5, 2, 3, 5])
def test_what_fits_is_what_the_search_finds(gib: float, pins: dict):
    request = Request(small(), tight(H100, gib), 8, 2048, 16, pins=pins)
    assert fits(request) == bool(search(request).fitting)


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_something_is_priced_however_large_it_is(remat: str):
    found = search(Request(shape_of("llama3-70b"), H100, 1, 8192, 512, pins={"remat": remat}))
    assert {c.train.remat for c in found.too_large} == {remat}


def test_no_schedule_is_longer_than_can_be_run():
    request = Request(small(), H100, 8, 2048, 4_000_000)
    found = search(request)
    assert found.fitting
    for c in (*found.fitting, *found.too_large):
        assert (
            c.parallel.pp * c.parallel.virtual_stages * (4_000_000 // c.parallel.dp) // c.train.micro_batch_size <= 1e6
        )
        assert not [*job_problems(run_config(c.parallel, c.train), request.shape, H100)]


def test_the_smallest_pod_that_fits():
    request = Request(shape_of("llama3-70b"), H100, 0, 8192, 512)
    found = smallest_that_fits(request)
    assert found and found.best
    fewer = [n for n in device_counts(request) if n < found.request.devices]
    for count in fewer[-2:]:
        assert not search(dataclasses.replace(request, devices=count)).fitting


def test_the_smallest_pod_that_is_fast_enough():
    request = Request(shape_of("llama3-8b"), H100, 0, 8192, 512)
    found = smallest_that_is_fast(request, tokens=1e12, days=30)
    assert found and found.best
    tokens_per_s = 512 * 8192 / found.best.step_time_s
    assert (
        training_days(found, 1e12) == pytest.approx(1e12 / tokens_per_s / 86_400) and training_days(found, 1e12) <= 30
    )
    fewer = max(n for n in device_counts(request) if n < found.request.devices)
    assert training_days(search(dataclasses.replace(request, devices=fewer)), 1e12) > 30
    assert smallest_that_is_fast(request, tokens=1e15, days=0.001) is None


def test_fully_sharded_weights_hold_their_share():
    """18 bytes a parameter over the replicas, two layers gathered, and what a microbatch leaves."""
    request = Request(small(), H100, 8, 2048, 64, pins={"tp": 1, "cp": 1, "micro_batch_size": 1, "remat": "none"})
    sharded = fully_sharded(request)
    assert sharded and (sharded.dp, sharded.tp, sharded.remat) == (8, 1, "none")
    train = Train(steps=1, seq_len=2048, global_batch_size=64, remat="none")
    items = own_memory(request.shape, Parallel(dp=8), train, "cudnn")[0]
    held = sum(items[name] for name in ("stash", "inboxes", "logits", "workspace"))
    states = 18 * request.shape.parameters / 8 + 12 * request.shape.parameters / 6
    assert sharded.memory_bytes - held == pytest.approx(states, rel=1e-3)


def test_found_without_anything():
    found = Found(Request(small(), H100, 8, 2048, 64), (), ())
    assert found.best is None and found.layouts() == [] and found.nearest_infeasible() is None


def test_known_prices_change_nothing():
    request = Request(small(), tight(H100, 3), 8, 2048, 16)
    known = search(dataclasses.replace(request, machine=tight(H100, 2)))
    assert search(request, known).fitting == search(request).fitting and not search(request, known).too_large


@pytest.mark.parametrize("headroom", [0, 0.08, 0.5])
def test_memory_for_what_does_not_fit(headroom: float):
    request = Request(shape_of("llama3-70b"), H100, 64, 8192, 512, headroom=headroom)
    candidate = search(request).too_large[3]
    roomier = with_memory_for(request, candidate)
    more = (roomier.machine.hbm_bytes - H100.hbm_bytes) / 2**30
    assert 0 < roomier.budget_bytes - candidate.memory_bytes <= 0.1001 * (1 - headroom) * 2**30
    assert more == pytest.approx(round(more, 1)) and candidate in search(roomier).fitting
