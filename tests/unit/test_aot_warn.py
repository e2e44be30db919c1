"""What a compiled step should not do, in small programs written by hand."""

from __future__ import annotations

import pytest

from parallax.aot.timeline import timeline
from parallax.aot.turns import Turns
from parallax.aot.warn import warnings
from parallax.config import MeshChoice
from parallax.machine import load_machine

MACHINE = load_machine(MeshChoice(name="h100-sxm"))
MESH = {"pp": 2, "dp": 2, "cp": 2, "tp": 2}  # pp crosses the nodes of eight

COMPUTATIONS = """\
%my_part (whole: f32[128,256], rank: s32[]) -> f32[64,256] {
  %whole = f32[128,256]{1,0} parameter(0)
  %rank = s32[] parameter(1)
  %flat = f32[128,256]{1,0} bitcast(%whole)
  ROOT %part = f32[64,256]{1,0} dynamic-slice(%flat, %rank, %rank), dynamic_slice_sizes={64,256}
}

%first_half (both: f32[128,256]) -> f32[64,256] {
  %both = f32[128,256]{1,0} parameter(0)
  ROOT %half = f32[64,256]{1,0} slice(%both), slice={[0:64], [0:256]}
}

%add_rows (table: f32[128,256], rows: s32[4], d: f32[4,256]) -> f32[128,256] {
  %table = f32[128,256]{1,0} parameter(0)
  %rows = s32[4]{0} parameter(1)
  %d = f32[4,256]{1,0} parameter(2)
  ROOT %scattered = f32[128,256]{1,0} scatter(%table, %rows, %d), to_apply=%add
}

%tick (t: f32[128,256]) -> f32[128,256] {
  %t = f32[128,256]{1,0} parameter(0)
  ROOT %TICK
}

%some (c: f32[128,256]) -> pred[] {
  ROOT %c = f32[128,256]{1,0} parameter(0)
}

"""
TP, DP = "replica_groups=[8,2]<=[16]", "replica_groups=[8,2]<=[2,2,4]T(0,2,1)"


def found(*lines: str, tick: str = "", mesh=MESH, log: str = "", stacked=()) -> list[str]:
    """Warnings of an entry computation, or of a tick"""
    text = COMPUTATIONS.replace("ROOT %TICK", tick) + "ENTRY %main (p: f32[128,256]) -> f32[128,256] {\n"
    text += "  %p = f32[128,256]{1,0} parameter(0)\n  %i = s32[] parameter(1)\n"
    if tick:
        text += "  %ticks = f32[128,256]{1,0} while(%p), condition=%some, body=%tick, "
        text += 'metadata={op_name="jit(step)/ticks0/while"}, backend_config={"known_trip_count":{"n":"3"}}\n'
    text += "".join(f"  {line}\n" for line in lines) + "}\n"
    return warnings(timeline(text, mesh, MACHINE, Turns({})), MACHINE, log, stacked)


def test_nothing_to_say():
    """A gather of a layer's input, a reduction of gradients once a step, and a loss that crosses everything"""
    assert not found(
        f"%gather = f32[128,256]{{1,0}} all-gather(%p), {TP}, dimensions={{0}}",
        f"%scatter = f32[64,256]{{1,0}} reduce-scatter(%p), {DP}, dimensions={{0}}",
        "%loss = f32[] all-reduce(%i), replica_groups={}, to_apply=%add",
        "ROOT %use = f32[128,256]{1,0} add(%gather, %p)",
    )


@pytest.mark.parametrize(("use", "warned"), [("my_part", True), ("first_half", False)])
def test_an_all_reduce_of_which_a_rank_keeps_its_part(use: str, warned: bool):
    arguments = "%done, %i" if warned else "%done"
    lines = found(
        f"%sum = f32[128,256]{{1,0}} all-reduce-start(%p), {TP}, to_apply=%add",
        "%done = f32[128,256]{1,0} all-reduce-done(%sum)",
        f"ROOT %mine = f32[64,256]{{1,0}} fusion({arguments}), kind=kLoop, calls=%{use}",
    )
    expected = (
        "over tp, 131,072 bytes once a step, sum: every use takes a slice of it; a reduce-scatter would move half"
    )
    assert lines == ([f"all-reduce {expected}"] if warned else [])


def test_a_whole_buffer_gathered_to_be_scattered_into():
    (line,) = found(
        f'%whole.1 = f32[128,256]{{1,0}} all-gather(%p), {TP}, dimensions={{0}}, metadata={{op_name="jit(f)/embed"}}',
        "ROOT %added = f32[128,256]{1,0} fusion(%whole.1, %i, %p), kind=kInput, calls=%add_rows",
    )
    assert line == (
        "all-gather over tp, 131,072 bytes once a step, whole.1 (jit(f)/embed): gathers a whole buffer that is then "
        "scattered into, and not its shards"
    )


def test_gradients_reduced_in_every_tick():
    (line,) = found(
        tick=f"%g = f32[128,256]{{1,0}} all-reduce(%t), {DP}, to_apply=%add\n  ROOT %u = f32[128,256] add(%g, %t)"
    )
    assert line == (
        "all-reduce over dp, 131,072 bytes 3 times a step, g: runs in every tick; gradients and weights should cross "
        "dp once a step"
    )


def test_axes_that_nothing_should_cross_together():
    (line,) = found(
        "%x = f32[128,256]{1,0} all-reduce(%p), replica_groups={}, to_apply=%add", "ROOT %y = f32[] add(%x, %x)"
    )
    assert line == (
        "all-reduce over pp and dp and cp and tp, 131,072 bytes once a step, x: nothing of this size should cross "
        "these axes together"
    )


def test_tp_across_nodes():
    gather = "%gather = f32[128,256]{1,0} all-gather(%p), replica_groups=[1,16]<=[16], dimensions={0}"
    (line,) = found(gather, "ROOT %use = f32[128,256]{1,0} add(%gather, %p)", mesh={"dp": 1, "tp": 16})
    assert line == (
        "all-gather over tp, 131,072 bytes once a step, gather: crosses nodes of 8 devices; keep tp inside a node"
    )


STACK, FAST = "f32[2,64,256]{2,1,0}", "f32[2,64,256]{2,1,0:S(1)}"


@pytest.mark.parametrize(
    ("source", "array", "said"),
    [
        (STACK, STACK, True),  # as [layer, …]
        (STACK, "f32[1,1,2,64,256]{4,3,2,1,0}", True),  # as [chunk, rank, layer, …]
        (STACK, "f32[128,256]{1,0}", False),  # one weight of that size
        (STACK, FAST, False),  # into fast memory
        (FAST, STACK, False),  # and out of it
        (STACK, "f32[2,32,512]{2,1,0}", False),  # something else of that size
        (STACK, "f32[1,64,256]{2,1,0}", False),  # a layer
    ],
)
def test_a_copy_of_stacked_weights(source: str, array: str, said: bool):
    copies = found(tick=f"%q = {source} bitcast(%t)\n  ROOT %again = {array} copy(%q)", stacked=[(2, 64, 256)])
    assert copies == ["again, 131,072 bytes in every tick: a second copy of stacked weights or gradients"] * said


def test_what_the_compiler_computes_again():
    product = "= f32[128,128]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}"
    assert not found(f"%dot.1 {product}", f"ROOT %dot.2 {product}")
    (line,) = found(f"%dot.1 {product}", f"ROOT %dot.1.remat2 {product}")
    assert line.endswith(
        " s of the step computes again what XLA could not keep, most of it dot.1.remat2; "
        "a train.remat or a layout that needs less memory leaves room"
    )
    large = "%large = f32[65536,65536]{1,0} broadcast(%i), dimensions={}"
    assert not found(large, f"%dot.1 {product}", f"ROOT %dot.1.remat2 {product}")  # too little of the step


def test_involuntary_rematerialisation_comes_from_the_log():
    """Twice the same operation, and an ordinary line"""
    line = (
        "E0000 spmd_partitioner.cc] [SPMD] Involuntary full rematerialization. The compiler cannot go from sharding "
        "{replicated} to {devices=[1,2]0,1} efficiently for HLO operation %reshape.7 = f32[8,8] reshape(%p). As the "
        "last resort, SPMD will replicate the tensor and then partition it."
    )
    assert found("ROOT %r = s32[] bitcast(%i)", log=f"{line}\nI0000 something else\n{line}\n") == [
        "reshape.7: involuntary rematerialisation, the partitioner makes it whole on every device to reshard it"
    ]
