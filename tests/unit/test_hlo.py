"""Texts of compiled programs, written by hand in the form of each backend, and one that is built here."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from parallax.hlo import Array, Collective, Loop, Program, collectives

MESH = {"pp": 2, "dp": 2, "tp": 2}

# GPU: every collective is a pair, and what a start returns holds its operands.
GPU = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(bf16[4,8]{1,0})->bf16[4,8]{1,0}}

%body (arg: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %arg = (s32[], bf16[4,8]{1,0}) parameter(0)
  %x = bf16[4,8]{1,0} get-tuple-element(%arg), index=1
  %ag = ((bf16[4,8]{1,0}, bf16[4,8]{1,0}), (bf16[8,8]{1,0}, bf16[8,8]{1,0})) all-gather-start(%x, %x), \
replica_groups=[4,2]<=[8], dimensions={0}, metadata={op_name="jit(step)/while/body/gather"}
  %ag.done = (bf16[8,8]{1,0}, bf16[8,8]{1,0}) all-gather-done(%ag)
  ROOT %out = (s32[], bf16[4,8]{1,0}) tuple(%i, %x)
}

%condition (arg.1: (s32[], bf16[4,8])) -> pred[] {
  ROOT %less = pred[] parameter(0)
}

ENTRY %main (p: bf16[4,8]) -> bf16[4,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  %send = ((bf16[4,8]{1,0}, f32[2]{0}), (bf16[4,8]{1,0}, f32[2]{0})) collective-permute-start(%p, %q), \
source_target_pairs={{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}
  %send.done = (bf16[4,8]{1,0}, f32[2]{0}) collective-permute-done(%send)
  %loop = (s32[], bf16[4,8]{1,0}) while(%init), condition=%condition, body=%body, \
metadata={op_name="jit(step)/while"}, backend_config={"known_trip_count":{"n":"3"}}
  %rs = ((f32[6]{0}), f32[3]{0}) reduce-scatter-start(%g), replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}
  %rs.done = f32[3]{0} reduce-scatter-done(%rs)
  %ar = f32[] all-reduce-start(%n), replica_groups={{0,1,4,5},{2,3,6,7}}, to_apply=%add
  %ar.done = f32[] all-reduce-done(%ar)
  %alone = f32[8]{0} all-reduce(%n), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  ROOT %all = f32[8]{0} all-reduce(%n), replica_groups={}, to_apply=%add
}
"""

# TPU: tiled layouts and memory spaces, a fusion of all-reduce and slice, a computation of another core, and attributes
# with line ends in them.
TPU = """\
HloModule jit_step, is_scheduled=true

%offloaded.1 (rows.1: bf16[256,512]) -> bf16[128,512] {
  %rows.1 = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %gathered = bf16[128,512]{1,0:T(8,128)(2,1)} custom-call(%rows.1), custom_call_target="tpu_custom_call"
}, execution_thread="sparsecore"

%all-reduce-scatter.1 (input.1: bf16[256,512]) -> bf16[128,512] {
  %input.1 = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.1 = bf16[256,512]{1,0:T(8,128)(2,1)} all-reduce(%input.1), replica_groups={{0,1},{2,3},{4,5},{6,7}}
  ROOT %kept = bf16[128,512]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.1, %rank, %zero)
}

ENTRY %main (p.1: bf16[256,512]) -> bf16[128,512] {
  %p.1 = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(0)
  %kernel = (f32[2,128]{1,0:T(8,128)}, /*index=1*/bf16[64]{0:T(256)(128)(2,1)S(1)}) custom-call(%p.1, /*index=1*/\
%p.1), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 128, \\"note\\": \\") {\\"}"
}}, metadata={op_name="jit(step)/kernel"}
  %send = (bf16[64]{0:T(256)(128)(2,1)S(1)}, bf16[64]{0:T(256)}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%x), source_target_pairs={{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}
  %send.done = bf16[64]{0:T(256)(128)(2,1)} collective-permute-done(%send)
  ROOT %fusion.1 = bf16[128,512]{1,0:T(8,128)(2,1)} fusion(%p.1), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def brief(one: Collective) -> tuple:
    return one.kind, one.axes, one.bytes, one.trips


def test_collectives_of_a_gpu_program():
    found = collectives(GPU, MESH)
    assert [brief(one) for one in found] == [
        ("collective-permute", ("pp",), 4 * 8 * 2 + 2 * 4, 1),  # two arrays in one operation
        ("all-gather", ("tp",), 2 * 8 * 8 * 2, 3),
        ("reduce-scatter", ("dp",), 3 * 4, 1),
        ("all-reduce", ("pp", "tp"), 4, 1),
        ("all-reduce", ("pp", "dp", "tp"), 8 * 4, 1),  # no groups: all of them; a group of one is none
    ]
    gather = found[1]
    assert gather.loops == (Loop("body", 3, "jit(step)/while"),)
    assert (gather.shapes, gather.name) == (((8, 8), (8, 8)), "jit(step)/while/body/gather")
    assert gather.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert found[2].groups == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_collectives_of_a_tpu_program():
    found = collectives(TPU, MESH)
    assert [brief(one) for one in found] == [
        ("collective-permute", ("pp",), 64 * 2, 1),
        ("reduce-scatter", ("tp",), 128 * 512 * 2, 1),
    ]


def test_instructions_of_a_tpu_program():
    program = Program(TPU)
    assert program.entry == "main"
    kernel = program.computations["main"].by_name["kernel"]
    assert kernel.arrays == (Array("f32", (2, 128), 0), Array("bf16", (64,), 1))
    assert kernel.operands == ("p.1", "p.1")
    assert kernel.op_name == "jit(step)/kernel"  # beyond the line ends
    assert program.computations["main"].root.name == "fusion.1"


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("pred", 6), ("bf16", 12), ("f32", 24), ("s64", 48), ("f8e4m3fn", 6), ("s4", 3), ("token", 0)],
)
def test_bytes(dtype: str, size: int):
    assert Array(dtype, (2, 3)).bytes == size


@pytest.mark.parametrize(("condition", "trips"), [("constant(7)", 7), ("get-tuple-element(%arg.1), index=2", None)])
def test_trips_that_are_not_noted(condition: str, trips: int | None):
    bound = f"  %bound = s32[] {condition}\n"
    text = GPU.replace("  ROOT %less", f"{bound}  ROOT %less").replace('"known_trip_count":{"n":"3"}', "")
    (gather,) = [one for one in collectives(text, MESH) if one.kind == "all-gather"]
    assert (gather.loops[0].trips, gather.trips) == (trips, trips or 1)


def test_a_program_built_here():
    """A sum in a loop of five turns and a gather after it, over the slower and the faster axis"""
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def f(x):
        x, _ = jax.lax.scan(lambda x, _: (jax.lax.psum(x * 2, "dp"), None), x, length=5)
        return jax.lax.all_gather(x, "tp")

    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=P(None, "tp"), check_vma=False)
    text = jax.jit(mapped).lower(jax.ShapeDtypeStruct((32,), jnp.float32)).compile().as_text()
    assert text
    found = collectives(text, {"dp": 2, "tp": 4})
    assert [brief(one) for one in found] == [
        ("all-reduce", ("dp",), 8 * 4, 5),
        ("all-gather", ("tp",), 4 * 8 * 4, 1),
    ]


@pytest.mark.parametrize(
    ("groups", "axes", "first"),
    [
        ("mesh['pp'=2,'dp'=2,'tp'=2] {'tp'}", ("tp",), (0, 1)),
        ("mesh['pp'=2,'dp'=2,'tp'=2] {'dp'}", ("dp",), (0, 2)),
        ("mesh['pp'=2,'dp'=2,'tp'=2] {'pp','tp'}", ("pp", "tp"), (0, 1, 4, 5)),
        ("mesh['a'=4,'b'=2] {'a':(1)2}", ("pp",), (0, 4)),
        ("mesh['a'=4,'b'=2] {'a':(2)2}", ("dp",), (0, 2)),
        ("mesh['a'=8] {'a'}", ("pp", "dp", "tp"), (0, 1, 2, 3, 4, 5, 6, 7)),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ("pp", "tp"), (0, 1, 4, 5)),
        ("mesh[a=4,b.c=2] {b.c}", ("tp",), (0, 1)),
    ],
)
def test_groups_by_the_axes_of_a_mesh(groups: str, axes: tuple[str, ...], first: tuple[int, ...]):
    """As newer compilers write them"""
    text = "ENTRY %main (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n"
    text += f"  ROOT %r = f32[8]{{0}} all-reduce(%p), replica_groups={groups}, use_global_device_ids=true\n}}\n"
    (one,) = collectives(text, MESH)
    assert (one.axes, one.groups[0]) == (axes, first)


@pytest.mark.parametrize(
    "groups",
    [
        "replica_groups=torus{2}",
        "replica_groups={{0,1},{2}}",
        "replica_groups=mesh['a'=8] {'b'}",
        "replica_groups=mesh['a'=4] {'a'}",
        "source_target_pairs=ring(8)",
    ],
)
def test_groups_of_an_unknown_form_are_not_guessed(groups: str):
    text = "ENTRY %main (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n"
    text += f"  ROOT %r = f32[8]{{0}} all-reduce(%p), {groups}, to_apply=%add\n}}\n"
    with pytest.raises(ValueError, match=re.escape(f"groups of devices in an unknown form: {groups}, to_apply")):
        collectives(text, MESH)
