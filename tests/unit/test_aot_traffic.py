"""Collectives by axis, against figures worked out by hand on a machine of round numbers."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest

from parallax.aot.timeline import timeline
from parallax.aot.traffic import Traffic, traffic
from parallax.aot.turns import Turns, turns
from parallax.config import Log, MeshChoice, Model, Parallel, RunConfig, Train
from parallax.hlo import Loop
from parallax.machine import Efficiency, load_machine
from parallax.mesh import make_mesh
from parallax.model import Model as Functions
from parallax.models import llama
from parallax.program import Batch, Program
from parallax.schedule.order import make_schedule
from parallax.schedule.table import tick_table

EXACT = Efficiency(
    **dict.fromkeys(("matmul", "attention", "memory", "link"), 1.0),
    **dict.fromkeys(("latency_inside_s", "latency_across_s", "kernel_s", "wave"), 0.0),
)
MACHINE = dataclasses.replace(  # a FLOP and a byte of memory take 1 s, a byte inside a node of four 2 s, outside 8 s
    load_machine(MeshChoice(name="h100-sxm")),
    efficiency=EXACT,
    peak_flops={"bfloat16": 1.0},
    hbm_bytes_per_s=1.0,
    devices_per_node=4,
    link_inside_bytes_per_s=1 / 2,
    link_across_bytes_per_s=1 / 8,
)
MESH = {"pp": 2, "dp": 2, "tp": 2}  # tp and dp inside a node, pp across

# Two ticks, of which one embeds; in each an all-gather beside a fusion that passes 10 + 10 bytes over memory.
TEXT = """\
%fused (a.1: s8[10]) -> s8[10] {
  %a.1 = s8[10]{0} parameter(0)
  ROOT %negate = s8[10]{0} negate(%a.1)
}

%embed (e: s8[64]) -> s8[64] {
  %e = s8[64]{0} parameter(0)
  ROOT %sum = s8[64]{0} all-reduce(%e), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add, \
metadata={op_name="jit(step)/ticks0/while/body/embed/while/body/psum"}
}

%tick (x: s8[10]) -> s8[10] {
  %x = s8[10]{0} parameter(0)
  %embedded = s8[64]{0} while(%x), condition=%some, body=%embed, \
metadata={op_name="jit(step)/ticks0/while/body/embed/while"}
  %gather = (s8[16]{0}, s8[32]{0}) all-gather-start(%x), replica_groups=[4,2]<=[8], dimensions={0}, \
metadata={op_name="jit(step)/ticks0/while/body/gather"}
  %beside = s8[10]{0} fusion(%x), kind=kLoop, calls=%fused
  %gather.done = s8[32]{0} all-gather-done(%gather)
  ROOT %same = s8[10]{0} bitcast(%beside)
}

%some (c: s8[10]) -> pred[] {
  ROOT %c = s8[10]{0} parameter(0)
}

ENTRY %main (p: s8[10]) -> s8[10] {
  %p = s8[10]{0} parameter(0)
  %ticks = s8[10]{0} while(%p), condition=%some, body=%tick, metadata={op_name="jit(step)/ticks0/while"}, \
backend_config={"known_trip_count":{"n":"2"}}
  %send = (s8[8]{0}, s8[8]{0}) collective-permute-start(%p), \
source_target_pairs={{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}, backend_config={"is_sync":true}
  %send.done = s8[8]{0} collective-permute-done(%send)
  %scatter = s8[6]{0} reduce-scatter(%p), replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %r = s8[10]{0} bitcast(%ticks)
}
"""
ONE_OF_TWO = Turns({(0, "embed"): Fraction(1, 2)})


def test_a_table_by_hand():
    """Seconds: a ring of 2 moves half of an all-gather's result, of 32 bytes at 2 s each, of which 20 s are hidden;
    an all-reduce over pp moves its 64 bytes at 8 s each; a ring of 4 moves 3/4 of the 24 that are scattered."""
    assert traffic(timeline(TEXT, MESH, MACHINE, ONE_OF_TWO), MESH, MACHINE) == [
        Traffic(
            ("pp",), "all-reduce", 1, 64, 64, False, 64 * 8.0, ("jit(step)/ticks0/while/body/embed/while/body/psum",)
        ),
        Traffic(("pp",), "collective-permute", 1, 8, 8, False, 8 * 8.0, ("send",)),
        Traffic(("dp", "tp"), "reduce-scatter", 1, 6, 6, True, 18 * 2.0, ("scatter",)),
        Traffic(("tp",), "all-gather", 2, 64, 24, True, 2 * 16 * 2.0, ("jit(step)/ticks0/while/body/gather",)),
    ]


def test_a_group_with_several_members_in_a_node():
    """Four devices, two in each of two nodes: two adapters carry the ring, 8 / 2 seconds a byte."""
    text = TEXT.replace("replica_groups=[2,4]<=[8], dimensions={0}", "replica_groups={{0,1,4,5},{2,3,6,7}}")
    (row,) = [
        row for row in traffic(timeline(text, MESH, MACHINE, ONE_OF_TWO), MESH, MACHINE) if row.kind == "reduce-scatter"
    ]
    assert (row.axes, row.inside, row.time_s) == (("pp", "tp"), False, 18 * 4.0)


def test_a_loop_that_nobody_knows_counts_once():
    (row,) = [
        row for row in traffic(timeline(TEXT, MESH, MACHINE, Turns({})), MESH, MACHINE) if row.kind == "all-reduce"
    ]
    assert row.count == 2


@pytest.mark.parametrize(("kind", "v", "m"), [("1f1b", 1, 5), ("interleaved", 2, 8), ("gpipe", 1, 3)])
def test_every_microbatch_is_embedded_once(kind: str, v: int, m: int):
    table = tick_table(make_schedule(kind, 4, v, m))
    found = turns(table)
    for phase in ("embed", "loss", "embed_gradient"):
        assert sum(found.a_tick[run.start, phase] * run.ticks for run in table.runs) == m, phase
    layers = Loop("body", 2, "jit(step)/ticks0/while/body/forward/while")
    assert found.of(layers) == 2
    assert found.of(dataclasses.replace(layers, trips=None)) == 1  # skip_idle: some rank is busy in every tick
    assert found.of(Loop("body", None, "jit(step)/while")) is None


def test_the_pipeline_names_its_loops():
    """As `Turns` reads them; here before the compiler joins the names of a loop and of what is in it."""
    parallel, m = Parallel(pp=2), 3
    config = llama.Config(vocab_size=32, width=8, heads=2, kv_heads=2, ff=8, layers=2)
    train = Train(steps=1, seq_len=16, global_batch_size=m, micro_batch_size=1, precision="float32")
    run = RunConfig(model=Model(name="llama"), parallel=parallel, train=train, log=Log(dir="unused"))
    built = Program(run, Functions(llama, config, config.shape(), "none"), make_mesh(parallel))
    rows = jax.ShapeDtypeStruct((m, 1, 16), jnp.int32)
    cells = jax.ShapeDtypeStruct(built.table.cells.shape, jnp.int32)
    with jax.set_mesh(built.mesh):
        weights = jax.eval_shape(lambda: built.init(jax.random.key(0))).weights
        text = jax.jit(built.gradients).lower(weights, Batch(rows, rows, None, cells)).as_text("hlo", debug_info=True)
    names = Counter(re.findall(r" while\(.*op_name=\"(\w+)/while\"", text))
    runs = built.table.runs
    forward, backward = sum(run.forward for run in runs), sum(run.backward for run in runs)
    assert names == {f"ticks{run.start}": 1 for run in runs} | {
        "embed": forward,
        "forward": forward,
        "loss": sum(run.loss for run in runs),
        "backward": backward,
        "embed_gradient": backward,
    }
