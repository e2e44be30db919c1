"""What products, passes and collectives take, by hand; that nothing gets faster by being more; and parallax's step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parallax.config import MeshChoice, Parallel, Train
from parallax.machine import Efficiency, Machine, load_machine, machine_names
from parallax.models import llama
from parallax.plan.costs import Costs
from parallax.plan.estimate import Job, estimate
from parallax.plan.layer import PARALLAX, LayerTimes
from parallax.plan.shapes import SHAPES
from parallax.plan.step import ITEMS, own_step, replica_groups

TOY = Machine(
    name="toy",
    platform="gpu",
    hbm_bytes=10**12,
    hbm_bytes_per_s=1e12,
    devices_per_node=8,
    link_inside_bytes_per_s=3e11,
    link_across_bytes_per_s=1e10,
    peak_flops={"bfloat16": 1e14, "float32": 1e13},
    efficiency=Efficiency(
        matmul=0.5,
        attention=0.25,
        memory=0.8,
        link=0.5,
        latency_inside_s=1e-6,
        latency_across_s=1e-5,
        kernel_s=2e-6,
        wave=1e4,
    ),
    compile_target={"kind": "none"},
)
COSTS = Costs(TOY, "bfloat16")
REAL = [name for name in machine_names() if name != "cpu"]


# By hand


def test_products():
    """A product of large sides takes its FLOPs and half a wave of tiles; one of a short side its bytes."""
    assert COSTS.matmul(1000, 4000, 100) == pytest.approx(2 * 1000 * 4000 * 100 / 0.5e14 * 1.1)
    assert COSTS.matmul(1000, 4000, 100, batch=5) == pytest.approx(5 * 2 * 1000 * 4000 * 100 / 0.5e14 * 1.02)
    assert COSTS.matmul(1, 4000, 50_000) == pytest.approx(2 * (4000 + 4000 * 50_000 + 50_000) / 0.8e12)
    assert Costs(TOY, "float32").matmul(1, 4000, 10**6) == pytest.approx(4 * (4000 + 4001 * 10**6) / 0.8e12)


def test_the_roofline_turns_where_both_take_as_long():
    """Without waves, [n, k] x [k, n] of k much larger turns at n = the peak's FLOPs a byte, over 1 for 2 bytes."""
    costs = Costs(dataclasses.replace(TOY, efficiency=dataclasses.replace(COSTS.efficiency, wave=0)), "bfloat16")
    turn, k = 2 * 0.5e14 / 0.8e12, 10**9
    flops, size = lambda n: 2 * n * n * k / 0.5e14, lambda n: 2 * 2 * n * k / 0.8e12
    assert costs.matmul(2 * turn, k, 2 * turn) == pytest.approx(flops(2 * turn), rel=1e-6)
    assert costs.matmul(turn / 2, k, turn / 2) == pytest.approx(size(turn / 2), rel=1e-6)


def test_attention_and_passes():
    assert COSTS.attention(1e12) == pytest.approx(1e12 / 0.25e14)
    assert COSTS.memory(4e9) == pytest.approx(4e9 / 0.8e12)


@pytest.mark.parametrize(
    ("ranks", "stride", "bandwidth", "latency_s"),
    [
        (8, 1, 3e11, 1e-6),  # in a node
        (2, 4, 3e11, 1e-6),
        (16, 1, 8e10, 1e-5),  # eight adapters of a node
        (4, 4, 2e10, 1e-5),  # two
        (4, 8, 1e10, 1e-5),  # one
        (4, 64, 1e10, 1e-5),
    ],
)
def test_rings(ranks: int, stride: int, bandwidth: float, latency_s: float):
    size = 1e9
    ring = (ranks - 1) / ranks * size / (0.5 * bandwidth) + math.log2(ranks) * latency_s
    assert COSTS.gather(size, ranks, stride) == pytest.approx(ring)
    assert COSTS.all_reduce(size, ranks, stride) == pytest.approx(2 * ring)


def test_a_ring_over_nodes_is_never_faster_than_inside():
    machine = dataclasses.replace(TOY, link_across_bytes_per_s=2e11)
    assert Costs(machine, "bfloat16").gather(1e9, 16, 1) == pytest.approx(15 / 16 * 1e9 / 1.5e11 + 4e-5)


def test_members_of_a_node():
    found = {(ranks, stride): COSTS.members_inside(ranks, stride) for ranks in (2, 16) for stride in (1, 4, 8, 32)}
    assert found == {(2, 1): 2, (2, 4): 2, (2, 8): 1, (2, 32): 1, (16, 1): 8, (16, 4): 2, (16, 8): 1, (16, 32): 1}


def test_all_to_all():
    size = 1e9
    assert COSTS.all_to_all(size, 4, 2) == pytest.approx(size * 3 / 4 / 1.5e11 + 2e-6)
    near, far = size * 3 / 16 / 1.5e11, size * 12 / 16 / 0.5e10  # of sixteen parts four stay, its own among them
    assert COSTS.all_to_all(size, 16, 2) == pytest.approx(near + far + 4e-5)


def test_sends():
    assert COSTS.send(1e9, inside=True) == pytest.approx(1e9 / 1.5e11 + 1e-6)
    assert COSTS.send(1e9, inside=False) == pytest.approx(1e9 / 0.5e10 + 1e-5)


def test_one_rank_says_nothing():
    assert COSTS.gather(1e9, 1, 1) == COSTS.all_reduce(1e9, 1, 1) == COSTS.all_to_all(1e9, 1, 1) == 0


@pytest.mark.parametrize(("dp", "ep", "cp", "tp"), [(4, 8, 1, 1), (4, 2, 1, 2), (2, 2, 2, 1), (2, 1, 4, 2)])
def test_copies_of_experts_are_not_neighbours(dp: int, ep: int, cp: int, tp: int):
    """Their replicas as ranks in the order pp, dp, ep, cp, tp, counted; and how many of them are in a node of 8."""
    groups = list(replica_groups(Parallel(dp=dp, ep=ep, cp=cp, tp=tp), 100.0, 10.0))
    assert [(count, ranks) for count, ranks, _ in groups] == [(100.0, dp * ep * cp), (10.0, dp * cp)]
    index = lambda d, e, c: ((d * ep + e) * cp + c) * tp
    members = (
        [index(d, e, c) for d in range(dp) for e in range(ep) for c in range(cp)],
        [index(d, 0, c) for d in range(dp) for c in range(cp)],
    )
    for (_, ranks, stride), devices in zip(groups, members, strict=True):
        assert COSTS.members_inside(ranks, stride) == sum(device < 8 for device in devices)
    assert len(list(replica_groups(Parallel(dp=dp, ep=ep), 100.0, 0.0))) == 1


# More is never faster

sizes = st.floats(1, 1e12)
ranks = st.sampled_from([1, 2, 4, 8, 16, 64, 512])
strides = st.sampled_from([1, 2, 4, 8, 64])
machines = st.sampled_from([TOY, *(load_machine(MeshChoice(name=name)) for name in REAL)])
collectives = st.sampled_from(["gather", "all_reduce", "all_to_all"])
MORE = settings(max_examples=200, deadline=None)


def takes(machine: Machine, collective: str, size: float, ranks: int, stride: int) -> float:
    return getattr(Costs(machine, "bfloat16"), collective)(size, ranks, stride)


@given(machines, collectives, sizes, sizes, ranks, strides)
@MORE
def test_more_bytes(machine: Machine, collective: str, a: float, b: float, ranks: int, stride: int):
    few, many = (takes(machine, collective, size, ranks, stride) for size in sorted((a, b)))
    assert few <= many


@given(machines, collectives, sizes, ranks, ranks, strides)
@example(load_machine(MeshChoice(name="tpu-v5e")), "all_to_all", 1e9, 4, 8, 1)  # links of a torus are not a node's
@MORE
def test_more_ranks(machine: Machine, collective: str, size: float, a: int, b: int, stride: int):
    few, many = (takes(machine, collective, size, ranks, stride) for ranks in sorted((a, b)))
    assert few <= many * (1 + 1e-12)


@given(machines, collectives, sizes, ranks, strides, strides)
@MORE
def test_ranks_further_apart(machine: Machine, collective: str, size: float, ranks: int, a: int, b: int):
    near, far = (takes(machine, collective, size, ranks, stride) for stride in sorted((a, b)))
    assert near <= far * (1 + 1e-12)


@given(machines, collectives, sizes, ranks, strides, st.sampled_from(["inside", "across"]), st.floats(0.01, 1))
@MORE
def test_slower_links(machine: Machine, collective: str, size: float, ranks: int, stride: int, link: str, part: float):
    name = f"link_{link}_bytes_per_s"
    slower = dataclasses.replace(machine, **{name: part * getattr(machine, name)})
    assert takes(machine, collective, size, ranks, stride) <= takes(slower, collective, size, ranks, stride)


@given(machines, *[st.floats(1, 1e6)] * 4)
@MORE
def test_larger_products(machine: Machine, n: float, k: float, m: float, more: float):
    costs = Costs(machine, "bfloat16")
    smaller = costs.matmul(n, k, m) * (1 - 1e-12)
    assert smaller <= min(costs.matmul(n + more, k, m), costs.matmul(n, k + more, m), costs.matmul(n, k, m + more))


# parallax's own step


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """A layout that the rules let pass, of a dense model or one of experts."""
    name = draw(st.sampled_from(["llama3-8b", "mixtral-8x7b", "deepseek-v3"]))
    shape = SHAPES.get(name) or llama.PRESETS[name].shape()
    pp, v = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (4, 3), (3, 1)]))
    parallel = Parallel(
        dp=draw(st.sampled_from([1, 2, 16])),
        pp=pp,
        ep=draw(st.sampled_from([1, 2, 8])) if name != "llama3-8b" else 1,
        cp=draw(st.sampled_from([1, 2])),
        tp=draw(st.sampled_from([1, 2, 4])),
        virtual_stages=v,
        schedule="interleaved" if v > 1 else draw(st.sampled_from(["1f1b", "gpipe"])),
        sequence_parallel=draw(st.booleans()),
        zero=draw(st.sampled_from([0, 1])),
        context=draw(st.sampled_from(["ring", "all_gather"])),
    )
    micro = draw(st.sampled_from([1, 2]))
    train = Train(
        steps=1,
        seq_len=4096,
        global_batch_size=parallel.dp * parallel.ep * micro * draw(st.integers(1, 40)),
        micro_batch_size=micro,
        remat=draw(st.sampled_from(["none", "selective", "full"])),
    )
    return Job(shape, load_machine(MeshChoice(name=draw(st.sampled_from(REAL)))), parallel, train)


@given(jobs())
@settings(max_examples=60, deadline=None)
def test_items_are_a_step(job: Job):
    """They add up to every rank's ticks, each as long as the fullest chunk's, and what comes beside; none is less than
    nothing, and nothing is more exposed than there is of it."""
    made = estimate(job)
    assert made.time is not None
    items = made.time.items
    assert tuple(items) == ITEMS and all(math.isfinite(s) and s >= 0 for s in items.values())
    assert made.step_time_s == pytest.approx(sum(items.values()))
    for total, exposed in made.time.communication.values():
        assert 0 <= exposed <= total
    assert made.hfu >= made.mfu > 0 and made.hfu < 1
    assert (made.hfu == made.mfu) == (job.train.remat == "none")
    assert made.tokens_per_s * made.step_time_s == pytest.approx(job.train.global_batch_size * 4096)


def test_mfu_of_llama3_8b():
    """FLOPs counted here from the published sizes: 32 layers of width 4096, 32 heads and 8 of keys and values, of size
    128, feed-forward 14,336, vocabulary 128,256."""
    machine = load_machine(MeshChoice(name="h100-sxm"))
    parallel, S, B = Parallel(dp=2, pp=2, tp=2), 8192, 64
    train = Train(steps=1, seq_len=S, global_batch_size=B, remat="full")
    made = estimate(Job(llama.PRESETS["llama3-8b"].shape(), machine, parallel, train))
    projections = 4096 * (2 * 32 + 2 * 8) * 128 + 3 * 4096 * 14_336
    causal = 2 * S * 4096 / 2  # multiply-adds of scores and weighted values
    forward = 2 * (32 * (projections + causal) + 4096 * 128_256)
    assert made.mfu == pytest.approx(3 * forward * B * S / made.step_time_s / (8 * 989.4e12))
    again = 2 * 32 * (projections + causal)
    assert made.hfu == pytest.approx((3 * forward + again) * B * S / made.step_time_s / (8 * 989.4e12))


def step(**keys: Any) -> Any:
    parallel = {"dp": 2, "pp": 4, "tp": 2, "sequence_parallel": True} | keys
    train = Train(steps=1, seq_len=4096, global_batch_size=parallel["dp"] * 16, remat="selective")
    return own_step(LayerTimes(COSTS, PARALLAX), llama.PRESETS["llama3-8b"].shape(), Parallel(**parallel), train)


def test_the_bubble_is_the_schedules():
    """(p - 1) of m·v ticks that are no one's, of all but what comes once a step or a microbatch of the vocabulary."""
    for v in (1, 2, 4):
        items = step(virtual_stages=v, schedule="interleaved" if v > 1 else "1f1b").items
        layers = sum(items[name] for name in ("matmul", "attention", "memory_bound", "recompute", "tp", "launch"))
        assert items["bubble"] / layers == pytest.approx(3 / (16 * v))
        assert items["padding"] == pytest.approx(0, abs=1e-9 * layers)


def test_layers_that_do_not_divide_are_padded():
    """32 layers over 5 ranks: 7 places on each, of which 6.4 hold a layer."""
    items = step(pp=5).items
    layers = sum(items[name] for name in ("matmul", "attention", "memory_bound", "recompute", "tp", "launch"))
    assert items["padding"] / layers == pytest.approx(7 / 6.4 - 1)
    assert items["bubble"] / (layers + items["padding"]) == pytest.approx(4 / 16)


def test_gradients_cross_once():
    """Float32 gradients and 16-bit weights of a rank's part, over replicas two apart; all float32 without zero."""
    parameters = (llama.PRESETS["llama3-8b"].shape().parameters - 65 * 4096) / 8  # but for norms
    for zero, size in ((1, 6), (0, 8)):
        found = step(dp=8, zero=zero).communication["dp"]
        assert found[0] == pytest.approx(size * parameters * 7 / 8 / (0.5 * 4e10) + 3e-5, rel=1e-3)
