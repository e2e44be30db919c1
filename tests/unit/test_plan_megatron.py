"""Megatron-LM's scheme: memory against published figures, time against a step worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from parallax.config import MeshChoice, Parallel, Train
from parallax.machine import Efficiency, Machine, load_machine
from parallax.models import llama
from parallax.plan.costs import Costs
from parallax.plan.estimate import Job, estimate
from parallax.plan.layer import MEGATRON, LayerTimes, Software
from parallax.plan.megatron import (
    LOGIT_BYTES,
    STATE_BYTES,
    Switches,
    in_flight,
    layer_activations,
    megatron_memory,
    megatron_step,
    stage_layers,
)
from parallax.plan.shapes import gpt_shape
from parallax.plan.step import ITEMS
from parallax.shape import ModelShape

GIB = 2**30


def interleaved(v: int, **sizes: Any) -> Parallel:
    return Parallel(virtual_stages=v, schedule="interleaved" if v > 1 else "1f1b", **sizes)


# Memory

# Korthikanti et al. 2022 (arXiv 2205.05198), table 3 and figure 1: layers, width, heads, stages, virtual stages, micro
# batch, global batch; GiB of parameters and optimizer, of activations, and of these with what the paper proposes
FIGURE_1 = {
    "22B": (48, 6144, 64, 1, 1, 4, 4, 45.6, 59.3, 9.6),
    "175B": (96, 12_288, 96, 8, 3, 1, 64, 45.6, 66.8, 12.3),
    "530B": (105, 20_480, 128, 35, 3, 1, 280, 31.6, 114.0, 23.1),
    "1T": (128, 25_600, 160, 64, 1, 1, 512, 33.0, 131.3, 26.6),
}


@pytest.mark.parametrize("name", FIGURE_1)
def test_korthikanti_figure_1(name: str):
    layers, width, heads, pp, v, micro, batch, states, baseline, present = FIGURE_1[name]
    shape = gpt_shape(layers, width, heads, heads, 4 * width, 51_200, glu=False, positions=2048)
    cases: list[tuple[bool, Any, float]] = [(False, "none", baseline), (True, "selective", present)]
    for sequence_parallel, remat, activations in cases:
        parallel = interleaved(v, tp=8, pp=pp, sequence_parallel=sequence_parallel, zero=0)
        train = Train(steps=1, seq_len=2048, global_batch_size=batch, micro_batch_size=micro, remat=remat)
        first = megatron_memory(shape, parallel, train, scores=True, head=False)[0]
        held = sum(first[item] for item in ("weights", "masters", "moments", "gradients"))
        assert held / GIB == pytest.approx(states, rel=0.01)
        assert first["activations"] / GIB == pytest.approx(activations, rel=0.03)


@pytest.mark.parametrize("t", [1, 8])
def test_a_layers_activations(t: int):
    """Korthikanti et al. 2022, equations 1, 2 and 4, and the last row of table 2."""
    s, b, h, a = 2048, 2, 6144, 64
    shape = gpt_shape(48, h, a, a, 4 * h, 51_200, glu=False, positions=s)
    train = Train(steps=1, seq_len=s, global_batch_size=b)
    kept = lambda split, remat: layer_activations(shape.layers[0], shape, train, s * b, t, split, True, remat)
    assert kept(1, "none") == pytest.approx(s * b * h * (10 + 24 / t + 5 * a * s / (h * t)))
    assert kept(t, "none") == pytest.approx(s * b * h / t * (34 + 5 * a * s / h))
    assert kept(t, "selective") == pytest.approx(34 * s * b * h / t)


def test_llama3_70b_on_64_h100():
    """Megatron's guide has tp4 pp4 cp2 dp2, which needs the distributed optimizer and sequence parallelism to fit."""
    shape, machine = llama.PRESETS["llama3-70b"].shape(), load_machine(MeshChoice(name="h100-sxm"))
    train = Train(steps=1, seq_len=8192, global_batch_size=512, micro_batch_size=1, remat="selective")
    parallel = Parallel(tp=4, pp=4, cp=2, dp=2)
    bare = dataclasses.replace(parallel, zero=0, sequence_parallel=False)
    without = estimate(Job(shape, machine, bare, train), "megatron")
    assert without.fits is False
    assert max(range(4), key=without.stage_bytes.__getitem__) == 0
    # 18 bytes of a parameter: 20 layers, and the embedding; over tp
    layer = shape.layers[0].parameters
    expected = 18 * (20 * layer + 128_256 * 8192) / 4
    held = sum(without.stages[0][item] for item in ("weights", "masters", "moments", "gradients"))
    assert held == pytest.approx(expected, rel=1e-3)  # norms are whole on each device
    assert 76 < expected / GIB < 77 < machine.hbm_bytes / GIB < 90 < without.peak_bytes / GIB < 120

    with_both = estimate(Job(shape, machine, parallel, train), "megatron")
    assert with_both.fits is True
    held = sum(with_both.stages[0][item] for item in ("weights", "masters", "moments", "gradients"))
    assert held == pytest.approx(expected / 18 * (6 + 12 / 4), rel=1e-3)  # over dp and cp


def test_in_flight():
    assert [in_flight(Parallel(pp=4), 16, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [in_flight(Parallel(pp=4), 2, rank) for rank in range(4)] == [2, 2, 2, 1]
    p, v = 8, 3
    assert in_flight(interleaved(v, pp=p), 64, 0) == pytest.approx(p * (1 + (p - 1) / (p * v)))  # Korthikanti, 4.2.3
    assert in_flight(interleaved(v, pp=p), 1, 0) == 1


def tiny(**keys: Any) -> ModelShape:
    """4 layers of width 64 with 4 heads and feed-forward width 256; 128 tokens, 32 positions."""
    return gpt_shape(**({"layers": 4, "width": 64, "heads": 4, "kv_heads": 4, "ff": 256} | keys), **REST)


REST: dict[str, Any] = {"vocab_size": 128, "glu": False, "positions": 32}


def test_memory_items_by_hand():
    """Two stages of tp 2: the embedding on one, a copy of it and the logits on the other."""
    n, D, V, t = 32, 64, 128, 2
    train = Train(steps=1, seq_len=n, global_batch_size=8, remat="full")
    first, last = megatron_memory(tiny(), Parallel(pp=2, tp=t, zero=0), train, scores=False)
    matrices = 12 * D * D / t
    whole = 6 * D  # two norms, and the biases of the products that are added up over tp
    split = (3 * D + 4 * D) / t
    layers = 2 * (matrices + whole + split)
    embed, head = (V * D + n * D) / t, (V * D + 2 * D) / t
    for stage, outside in ((first, embed), (last, head)):
        held = {item: size / (layers + outside) for item, size in list(stage.items())[:4]}
        assert held == {"weights": 2, "masters": 4, "moments": 8, "gradients": 4}
    kept = 2 * 2 * n * D / t  # inputs of two layers
    assert (first["activations"], last["activations"]) == (2 * kept, kept)
    assert (first["logits"], last["logits"]) == (0, 10 * n * V / t)
    # one layer without dropout's masks over tp, and four activations on their way
    again = n * D * (10 + 24) / t
    assert first["workspace"] == again + 2 * 4 * n * D / t


def test_stages():
    counts = lambda layers, pp: [
        sum(count for _, count in stage) for stage in stage_layers(tiny(layers=layers), Parallel(pp=pp))
    ]
    assert (counts(4, 2), counts(7, 3), counts(5, 4)) == ([2, 2], [3, 2, 2], [2, 1, 1, 1])


# Time

TOY = Machine(
    name="toy",
    platform="gpu",
    hbm_bytes=10**9,
    hbm_bytes_per_s=1e12,
    devices_per_node=2,
    link_inside_bytes_per_s=1e11,
    link_across_bytes_per_s=2e8,
    peak_flops={"bfloat16": 1e14},
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
TOYS = Software(3e-6, (20, 24), (10, 18), 8, scores=False, hides_tp=True)


def test_a_step_by_hand():
    """dp2·pp2·tp2 of two devices a node, so that tp alone stays in one; selective, sequence parallel, zero 1."""
    shape, parallel = tiny(), Parallel(dp=2, pp=2, tp=2)
    train = Train(steps=1, seq_len=32, global_batch_size=8, micro_batch_size=1, remat="selective")
    switches = Switches(reduces_fp32=True, overlaps_dp=True)
    step = megatron_step(LayerTimes(Costs(TOY, "bfloat16"), TOYS), switches, shape, parallel, train)

    n, D, H, C, F, V, t, m = 32, 64, 4, 16, 256, 128, 2, 4
    passes = lambda size: size / 0.8e12

    def product(rows: float, inner: float, columns: float) -> float:
        flops = 2 * rows * inner * columns / 0.5e14 * (1 + 1e4 / (rows * columns))
        return max(flops, passes(2 * (rows * inner + inner * columns + rows * columns)))

    columns, rows = [(D, H * C / t)] * 3 + [(D, F / t)], [(H * C / t, D), (F / t, D)]
    forward = sum(product(n, k, out) for k, out in columns + rows)
    inputs = sum(product(n, out, k) for k, out in columns + rows)
    weights = {kind: sum(product(k, n, out) for k, out in kinds) for kind, kinds in (("c", columns), ("r", rows))}
    attention = n * H / t * n * 2 * C / 0.25e14  # causal: half of 4 S^2 H C
    inner = n * 2 * (2 * F / t + 6 * H * C / t)
    elements = sum(k * out for k, out in columns + rows)
    over_memory = passes(20 * n * D / t + inner), passes(24 * n * D / t + 1.3 * inner + 8 * elements)
    half = 2 * n * D / 2 / 0.5e11 + 1e-6  # half of an activation, and one latency
    hidden = min(4 * half, weights["c"])
    kernels = 10, 18 + 5  # attention's once more
    device = (
        forward + attention + over_memory[0] + 4 * half + kernels[0] * 2e-6,
        inputs + sum(weights.values()) + (2.5 + 1) * attention + over_memory[1] + 4 * half - hidden + kernels[1] * 2e-6,
    )
    host = (kernels[0] + 2) * 3e-6, (kernels[1] + 2) * 3e-6
    layer_s = sum((a**2 + b**2) ** 0.5 for a, b in zip(device, host, strict=True))
    waits = layer_s - sum(device)

    send = 2 * n * D / t / 1e8 + 1e-5
    embed = passes(16 * n * D) + 2 * half
    sums = 3 * 2 * (4 * n / 2 / 0.5e11 + 1e-6)
    products = product(n, D, V / t) + product(n, V / t, D) + product(V / t, n, D)
    head = products + passes(LOGIT_BYTES * n * V / t) + 2 * half + sums
    first, last = (2 * layer_s + end + 2 * send for end in (embed, head))
    assert last > first
    tied = 2 * (2 * V * D / t / 2 / 1e8 + 1e-5)
    parameters = 2 * (12 * D * D / t + 6 * D + 7 * D / t) + (V * D + n * D) / t
    reduce, gather = (size * parameters / 2 / 1e8 + 1e-5 for size in (4, 2))
    exposed = max(0, reduce - 2 / 3 * 2 * layer_s) + max(0, gather - 2 * layer_s / 3)
    assert 0 < exposed < reduce + gather
    expected = {
        "matmul": m * 2 * (forward + inputs + sum(weights.values())),
        "attention": m * 2 * (attention + 2.5 * attention),
        "memory_bound": m * 2 * sum(over_memory),
        "recompute": m * 2 * attention,
        "tp": m * 2 * (8 * half - hidden),
        "cp": 0,
        "ep": 0,
        "pp": m * 2 * send,
        "vocabulary": m * head + tied,
        "dp": exposed,
        "bubble": first,
        "padding": 0,
        "optimizer": passes(STATE_BYTES * parameters / 2),
        "launch": m * 2 * (sum(kernels) * 2e-6 + waits),
    }
    assert tuple(expected) == ITEMS
    assert step.items == pytest.approx(expected, rel=1e-9)
    assert step.total == pytest.approx(m * last + first + tied + exposed + expected["optimizer"], rel=1e-9)
    assert step.communication["tp"] == pytest.approx((m * 2 * 8 * half, expected["tp"]))
    assert step.communication["dp"] == pytest.approx((reduce + gather, exposed))


@pytest.mark.parametrize(
    ("layers", "width", "heads", "pp", "m"), [(96, 12_288, 96, 8, 64), (105, 20_480, 128, 35, 280)]
)
def test_what_interleaving_gains(layers: int, width: int, heads: int, pp: int, m: int):
    """More than 3 %, and less than the bubble alone gives, as chunks send more often. The table's 175B and 530B."""
    shape = gpt_shape(layers, width, heads, heads, 4 * width, 51_200, glu=False, positions=2048)
    train = Train(steps=1, seq_len=2048, global_batch_size=m, remat="selective")
    times = LayerTimes(Costs(load_machine(MeshChoice(name="a100-80gb")), "bfloat16"), MEGATRON)
    step = lambda v: megatron_step(times, Switches(False, False), shape, interleaved(v, tp=8, pp=pp, zero=0), train)
    bubble = lambda v: m + (pp - 1) / v
    assert 1.03 < step(1).total / step(3).total < bubble(1) / bubble(3)


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_items_of_any_layout_are_a_step(remat: Any):
    """Each is at least 0, and what is exposed is part of what there is."""
    times = LayerTimes(Costs(TOY, "bfloat16"), TOYS)
    train = Train(steps=1, seq_len=32, global_batch_size=8, remat=remat)
    layouts = [
        *(Parallel(dp=2), Parallel(pp=2), Parallel(cp=2), Parallel(tp=2)),
        Parallel(dp=2, pp=4, tp=2, sequence_parallel=False, zero=0),
        interleaved(2, pp=2, cp=2, tp=2),
        Parallel(pp=3),
    ]
    for parallel in layouts:
        for overlaps in (False, True):
            step = megatron_step(times, Switches(overlaps, overlaps), tiny(), parallel, train)
            assert tuple(step.items) == ITEMS and all(s >= 0 for s in step.items.values())
            for total, exposed in step.communication.values():
                assert 0 <= exposed <= total
