"""What XLA built: ticks, collectives by mesh axis, sharded activations, and memory that does not grow with m."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec

import jax
import pytest
from programs import compile_step, program

from parallax.config import Parallel
from parallax.hlo import collectives
from parallax.program import Program


def sizes(built: Program) -> dict[str, int]:
    return dict(built.mesh.shape)


def tick_loops(text: str, mesh) -> dict[str, int | None]:
    """Outermost loops that send activations or gradients around the ring, and their trip counts"""
    return {
        c.loops[0].body: c.loops[0].trips for c in collectives(text, mesh) if c.kind == "collective-permute" and c.loops
    }


@pytest.mark.parametrize(
    ("schedule", "v", "m"),
    [("1f1b", 1, 8), ("interleaved", 2, 8), ("interleaved", 2, 6), ("gpipe", 1, 8), ("1f1b", 1, 3)],
)
def test_executed_ticks_are_the_formulas(schedule, v, m):
    p = 4
    built = program(Parallel(pp=p, virtual_stages=v, schedule=schedule), m, seq_len=16, width=32, ff=32)
    table, text = built.table, compile_step(built).as_text()
    forwards = backwards = m * v + p - 1 if m >= p else m + v * p - 1
    assert (table.forward_ticks, table.backward_ticks) == (forwards, backwards)
    # a run of ticks is a loop, but one of a single tick: XLA unrolls it
    assert sorted(trips or 0 for trips in tick_loops(text, sizes(built)).values()) == sorted(
        r.ticks for r in table.runs if r.ticks > 1
    )
    # each forward tick sends one activation and each backward tick one gradient; the unrolled tick of GPipe sees that
    # the gradient it is to send is the zero of the start, and sends nothing
    sends = [c for c in collectives(text, sizes(built)) if c.kind == "collective-permute"]
    assert sum(c.trips for c in sends) == forwards + backwards - (schedule == "gpipe")


@pytest.fixture(scope="module")
def composed():
    """dp2·pp2·tp2, interleaved"""
    built = program(Parallel(dp=2, pp=2, tp=2, virtual_stages=2, schedule="interleaved"), 4, remat="selective")
    return built, compile_step(built).as_text()


def test_one_gradient_reduction_a_step(composed):
    built, text = composed
    ticks = tick_loops(text, sizes(built))
    found = collectives(text, sizes(built))
    assert not [c for c in found if c.loops and c.loops[0].body in ticks and {"dp", "ep", "cp"} & set(c.axes)]

    leaves = jax.tree.leaves(built.model.weights["blocks"])
    outer = jax.tree.leaves((built.model.weights["embed"], built.model.weights["head"]))
    layers_a_rank = built.model.layers // built.layout.pp
    for kind in ("reduce-scatter", "all-gather"):  # of gradients, and of new weights
        over_replicas = Counter(c.trips for c in found if c.kind == kind and c.axes == ("dp",))
        assert over_replicas == {layers_a_rank: len(leaves), 1: len(outer)}, kind
    # what else crosses dp: the loss and the norm, scalars
    assert all(c.bytes <= 32 for c in found if c.kind == "all-reduce" and "dp" in c.axes)


def test_activations_between_layers_are_split_along_the_sequence(composed):
    built, text = composed
    train, width = built.config.train, built.model.shape.width
    sent = {c.shapes for c in collectives(text, sizes(built)) if c.kind == "collective-permute"}
    assert sent == {((1, train.seq_len // 2, width),)}
    # and so is what waits in the stash: inputs along the sequence, products along their features
    stash = built.table.buffers.stash, built.model.layers // built.table.schedule.stages, 1
    held = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)}
    held = {shape[3:] for shape in held if shape[:3] == stash}
    S, ff = train.seq_len, 256
    assert held == {(S // 2, width), (S, width // 2), (S, ff // 2)}


@pytest.mark.parametrize("parallel", [Parallel(pp=4, cp=4), Parallel(pp=4, tp=2, cp=2)], ids=["cp4", "tp2-cp2"])
def test_ring_traffic(parallel):
    """In blocks of keys and values, a layer and tick: cp - 1 forward; cp - 1 and cp of their gradients backward"""
    built = program(parallel, 8, remat="none")
    mesh, text, cp = sizes(built), compile_step(built).as_text(), parallel.cp
    found = [c for c in collectives(text, mesh) if "cp" in c.axes]
    train, heads, head_size, float32 = built.config.train, 4, 32, 4
    block = 2 * (train.seq_len // cp) * (heads // parallel.tp) * head_size * float32  # 2: keys and values
    ticks, layers = tick_loops(text, mesh), built.model.layers // parallel.pp
    in_ticks = [c for c in found if c.loops and c.loops[0].body in ticks]
    assert {(c.kind, c.axes) for c in in_ticks} == {("collective-permute", ("cp",))}
    blocks = Counter()
    for c in in_ticks:
        blocks[c.loops[0].body] += c.bytes * c.trips / (block * c.loops[0].trips * layers)
    assert sorted(blocks.values()) == [cp - 1, 2 * cp - 1, 3 * cp - 2]  # forward ticks, backward ticks, both
    # outside: gradients and new weights once a step, loss and norm
    outside = [c for c in found if c not in in_ticks]
    assert {c.kind for c in outside if c.bytes > 32} == {"reduce-scatter", "all-gather"}


def test_all_gathered_keys_and_values():
    """A layer gathers keys and values once forward and once backward, and scatters their gradients once"""
    built = program(Parallel(pp=4, cp=4, context="all_gather"), 8, remat="none")
    text = compile_step(built).as_text()
    ticks = tick_loops(text, sizes(built))
    found = [c for c in collectives(text, sizes(built)) if c.axes == ("cp",) and c.loops and c.loops[0].body in ticks]
    # forward and backward of a layer stand twice in the program: in the steady ticks, and in warm-up or cool-down
    assert Counter(c.kind for c in found) == {"all-gather": 2 * 2 * 2, "reduce-scatter": 2 * 2}


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize(("schedule", "v"), [("1f1b", 1), ("interleaved", 2)])
def test_neither_memory_nor_program_grows_with_microbatches(schedule, v, remat):
    def measure(m):
        built = compile_step(program(Parallel(pp=4, virtual_stages=v, schedule=schedule), m, remat=remat))
        return built.memory_analysis().temp_size_in_bytes, len(built.as_text())

    (memory, text), (more_memory, more_text) = measure(8), measure(64)
    assert more_memory <= 1.02 * memory
    assert more_text <= 1.02 * text


def test_the_program_does_not_grow_with_layers():
    texts = [len(compile_step(program(Parallel(pp=4, tp=2), 8, layers=n, seq_len=16)).as_text()) for n in (16, 64)]
    assert texts[1] <= 1.02 * texts[0]


TPU_BUILD = """
import json, re
from jax.experimental import topologies
from programs import compile_step, program
from parallax.config import Parallel
from parallax.hlo import collectives
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x2").devices
built = program(
    Parallel(dp=2, pp=2, tp=2, virtual_stages=2, schedule="interleaved"), 4, devices=devices, precision="bfloat16",
    seq_len=256, width=512, ff=1024,
)
text = compile_step(built).as_text()
found = [[c.kind, c.axes, [l.trips for l in c.loops]] for c in collectives(text, dict(built.mesh.shape))]
calls = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
print(json.dumps({"collectives": found, "kernels": [re.search(r"splash_mha_([a-z]+)", c).group(1) for c in calls]}))
"""


@pytest.mark.skipif(
    find_spec("libtpu") is None, reason="NOT RUN: libtpu is not installed (pip install parallax-train[tpu-aot])"
)
def test_tpu_build_gathers_and_scatters_over_tp_around_splash_attention():
    """In a process of its own: a TPU that is not there, and a partitioner that may abort"""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "PYTHONPATH": os.path.dirname(__file__),
    }
    done = subprocess.run([sys.executable, "-c", TPU_BUILD], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    built = json.loads(done.stdout)
    found = built["collectives"]
    layers = 2  # of a chunk: the trips of the innermost loops
    in_layers = Counter(kind for kind, axes, trips in found if axes == ["tp"] and trips[1:] == [layers])
    # forward and backward of a layer stand twice in the program: in the steady ticks, and in warm-up or cool-down
    assert (in_layers["all-gather"], in_layers["reduce-scatter"]) == (2 * 6, 2 * 5), in_layers
    assert not [kind for kind, axes, trips in found if "dp" in axes and len(trips) > 1]
    # likewise the kernels, and the forward's once more in the backward, as full remat has it
    assert Counter(built["kernels"]) == {"fwd": 2 * 2, "dq": 2, "dkv": 2}
