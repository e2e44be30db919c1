"""Simulated steps of small programs, against seconds worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from parallax.aot.roofline import Roofline, Work
from parallax.aot.simulate import simulate
from parallax.aot.timeline import timeline
from parallax.aot.turns import Turns
from parallax.config import MeshChoice
from parallax.hlo import Program
from parallax.machine import Efficiency, Machine, load_machine

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
MESH = {"dp": 2, "tp": 2}
KERNEL = dataclasses.replace(MACHINE, efficiency=dataclasses.replace(EXACT, kernel_s=0.5))
TPU = dataclasses.replace(MACHINE, platform="tpu")
NO_TURNS = Turns({})


def entry(*lines: str, computations: str = "") -> str:
    return computations + "ENTRY %main (p: s8[4]) -> s8[4] {\n" + "".join(f"  {line}\n" for line in lines) + "}\n"


def work(text: str, machine: Machine = MACHINE) -> Work:
    """Of the root of a program's entry"""
    program = Program(text)
    computation = program.computations[program.entry]
    return Roofline(program, machine).work(computation, computation.root)


# What an instruction costs


def test_a_product_with_batch_dimensions():
    """3 products [5, 7] x [7, 2]: 2·3·5·7·2 FLOPs; bytes 2·3·(35 + 14) read and 4·3·10 written"""
    found = work(
        entry(
            "%a = bf16[3,5,7]{2,1,0} parameter(0)",
            "%b = bf16[3,2,7]{2,1,0} parameter(1)",
            "ROOT %dot = f32[3,5,2]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
            "rhs_batch_dims={0}, rhs_contracting_dims={2}",
        )
    )
    assert (found.kind, found.flops, found.bytes, found.seconds) == ("matmul", 420, 2 * 3 * 49 + 4 * 30, 420)


def test_a_product_inside_a_fusion_of_a_fusion():
    computations = """\
%inner (a.1: bf16[5,7], b.1: bf16[7,2]) -> bf16[5,2] {
  %a.1 = bf16[5,7]{1,0} parameter(0)
  %b.1 = bf16[7,2]{1,0} parameter(1)
  ROOT %dot = bf16[5,2]{1,0} dot(%a.1, %b.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%outer (a.2: bf16[5,7], b.2: bf16[7,2]) -> bf16[5,2] {
  %a.2 = bf16[5,7]{1,0} parameter(0)
  %b.2 = bf16[7,2]{1,0} parameter(1)
  %product = bf16[5,2]{1,0} fusion(%a.2, %b.2), kind=kOutput, calls=%inner
  ROOT %negate = bf16[5,2]{1,0} negate(%product)
}

"""
    found = work(
        entry(
            "%a = bf16[5,7]{1,0} parameter(0)",
            "%b = bf16[7,2]{1,0} parameter(1)",
            "ROOT %f = bf16[5,2]{1,0} fusion(%a, %b), kind=kOutput, calls=%outer",
            computations=computations,
        ),
        KERNEL,
    )
    assert (found.kind, found.flops, found.bytes) == ("matmul", 140, 2 * (35 + 14 + 10))
    assert (found.seconds, found.total_s) == (140, 140.5)


@pytest.mark.parametrize(
    ("window", "labels", "shapes", "flops"),
    [
        ("", "bf_io->bf", ("5,7", "7,2", "5,2"), 2 * 5 * 7 * 2),
        # batches of 3 as a spatial dimension, in the two forms that TPUs use
        ("window={size=3 stride=2 lhs_dilate=3}, ", "0bf_0io->0bf", ("3,5,7", "3,7,2", "3,5,2"), 3 * 2 * 5 * 7 * 2),
        (
            "window={size=3 stride=3 pad=2_2 rhs_reversal=1}, ",
            "0bf_0io->0bf",
            ("3,5,7", "3,7,2", "3,5,2"),
            3 * 2 * 5 * 7 * 2,
        ),
        # a true convolution: 3 places of a kernel of 2 over an input of 4
        ("window={size=2}, ", "b0f_0io->b0f", ("5,4,7", "2,7,2", "5,3,2"), 3 * 2 * 2 * 5 * 7 * 2),
        # the same with one place of padding before: 4 outputs, of which one meets padding
        ("window={size=2 pad=1_0}, ", "b0f_0io->b0f", ("5,4,7", "2,7,2", "5,4,2"), (4 * 2 - 1) * 2 * 5 * 7 * 2),
    ],
)
def test_a_product_as_a_convolution(window: str, labels: str, shapes: tuple[str, str, str], flops: int):
    lhs, rhs, out = shapes
    found = work(
        entry(
            f"%a = bf16[{lhs}] parameter(0)",
            f"%b = bf16[{rhs}] parameter(1)",
            f"ROOT %c = bf16[{out}] convolution(%a, %b), {window}dim_labels={labels}",
        ),
        TPU,
    )
    assert (found.kind, found.flops) == ("matmul", flops)


def test_a_library_product():
    """Its workspace is not written; dimensions stand in the settings."""
    settings = (
        'backend_config={"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":'
        '["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}'
    )
    found = work(
        entry(
            "%a = bf16[5,7]{1,0} parameter(0)",
            "%b = bf16[7,2]{1,0} parameter(1)",
            "ROOT %g = (bf16[5,2]{1,0}, s8[4096]{0}) custom-call(%a, %b), "
            f'custom_call_target="__cublas$lt$matmul", {settings}',
        )
    )
    assert (found.kind, found.flops, found.bytes) == ("matmul", 140, 2 * (35 + 14 + 10))


@pytest.mark.parametrize(
    ("target", "mask", "flops"),
    [
        ("__cudnn$fmhaSoftmax", "CAUSAL", 2 * (2 * 2 * 3 * 16 * 16 * 8) / 2),
        ("__cudnn$fmhaSoftmax", "NO_MASK", 2 * (2 * 2 * 3 * 16 * 16 * 8)),
        ("__cudnn$fmhaSoftmaxBackward", "CAUSAL", 5 * (2 * 2 * 3 * 16 * 16 * 8) / 2),
    ],
)
def test_attention_of_cudnn(target: str, mask: str, flops: float):
    """2 sequences of 16, 3 heads of 8: products of 2·2·3·16·16·8 FLOPs, two forward and five backward"""
    settings = (
        'backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16", '
        f'"dimensions": ["2", "3", "16", "16"]}}, "mask_type": "{mask}"}}}}'
    )
    q, k, v = (f"%{name} = bf16[2,16,3,8]{{3,2,1,0}} parameter({i})" for i, name in enumerate("qkv"))
    call = f'ROOT %a = (bf16[2,3,16,8]{{3,1,2,0}}, u8[0]{{0}}) custom-call(%q, %k, %v), custom_call_target="{target}"'
    found = work(entry(q, k, v, f"{call}, {settings}"))
    assert (found.kind, found.flops, found.seconds) == ("attention", flops, flops)


@pytest.mark.parametrize(
    ("name", "fused", "products"),
    [
        ("splash_mha_fwd_residuals", "false", 2),
        ("splash_mha_dq_no_residuals", "false", 3),
        ("splash_mha_dkv_no_residuals", "false", 4),
        ("splash_mha_dkv_no_residuals", "true", 5),
    ],
)
def test_attention_of_a_tpu_kernel(name: str, fused: str, products: int):
    """q [2, 3, 16, 8] sees the half of 32 keys: 2·2·3·16·32·8 / 2 FLOPs a product"""
    found = work(
        entry(
            "%mask = s8[1,2,2]{2,1,0} parameter(0)",
            "%q = bf16[2,3,16,8]{3,2,1,0} parameter(1)",
            "%k = bf16[2,3,32,8]{3,2,1,0} parameter(2)",
            f"ROOT %{name}.1 = (f32[2,8,8]{{2,1,0}}, bf16[2,3,16,8]{{3,2,1,0}}) custom-call(%mask, %q, %k, %k), "
            'custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={\n'
            f'"xprof_metadata":"{{\\"use_fused_bwd_kernel\\": {fused}}}"\n}}}}',
        ),
        TPU,
    )
    assert (found.kind, found.flops) == ("attention", products * 2 * 3 * 16 * 32 * 8)


SLICES = """\
%add_to_layer (total: f32[4,10], d: f32[1,10], at: s32[]) -> f32[4,10] {
  %total = f32[4,10]{1,0} parameter(0)
  %d = f32[1,10]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  %layer = f32[1,10]{1,0} dynamic-slice(%total, %at, %zero), dynamic_slice_sizes={1,10}
  %sum = f32[1,10]{1,0} add(%layer, %d)
  ROOT %put = f32[4,10]{1,0} dynamic-update-slice(%total, %sum, %at, %zero)
}

"""


def test_what_is_sliced_and_updated_in_place_counts_its_part():
    """One layer of four is read and written, and what is added is read: 3 · 40 bytes and the index"""
    lines = (
        "%g = f32[4,10]{1,0} parameter(0)",
        "%d.1 = f32[1,10]{1,0} parameter(1)",
        "%i = s32[] parameter(2)",
        "ROOT %f = f32[4,10]{1,0} fusion(%g, %d.1, %i), kind=kLoop, calls=%add_to_layer",
    )
    assert work(entry(*lines, computations=SLICES)).bytes == 3 * 40 + 4
    whole = SLICES.replace("%sum = f32[1,10]{1,0} add(%layer, %d)", "%sum = f32[1,10]{1,0} reduce(%total, %d)")
    assert work(entry(*lines, computations=whole)).bytes == 160 + 2 * 40 + 4


def test_what_is_on_a_tpus_chip_costs_no_pass():
    lines = ("%x = f32[10]{0:T(128)S(1)} parameter(0)", "ROOT %y = f32[10]{0:T(128)} copy(%x)")
    assert work(entry(*lines), TPU).bytes == 40
    assert work(entry(*lines)).bytes == 80  # a GPU's S(1) is in its memory


# How a step is walked


def test_a_step_adds_up():
    """A loop of three turns, of each 20 s beside a collective that takes 32, then a kernel that waits for nobody"""
    text = entry(
        "%p = s8[10]{0} parameter(0)",
        '%loop = s8[10]{0} while(%p), condition=%some, body=%body, backend_config={"known_trip_count":{"n":"3"}}',
        "ROOT %last = s8[10]{0} fusion(%loop), kind=kLoop, calls=%fused",
        computations="""\
%fused (a.1: s8[10]) -> s8[10] {
  %a.1 = s8[10]{0} parameter(0)
  ROOT %negate = s8[10]{0} negate(%a.1)
}

%body (x: s8[10]) -> s8[10] {
  %x = s8[10]{0} parameter(0)
  %gather = (s8[16]{0}, s8[32]{0}) all-gather-start(%x), replica_groups=[2,2]<=[4], dimensions={0}
  %beside = s8[10]{0} fusion(%x), kind=kLoop, calls=%fused
  %gather.done = s8[32]{0} all-gather-done(%gather)
  ROOT %same = s8[10]{0} bitcast(%beside)
}

""",
    )
    found = simulate(timeline(text, MESH, MACHINE, NO_TURNS), MESH, MACHINE, model_flops=8 * 116.0)
    assert found.step_time_s == 3 * 32 + 20
    assert found.time_s == {"memory": 3 * 20 + 20, "kernels": 0, "tp": 3 * 12}
    assert found.communication_s == {"tp": 3 * 32}
    assert found.mfu == 8 / 4  # of four devices, at a FLOP a second
    assert found.notes == ()
    with_kernels = simulate(timeline(text, MESH, KERNEL, NO_TURNS), MESH, KERNEL, None)
    assert (with_kernels.step_time_s, with_kernels.mfu) == (3 * 32 + 20.5, None)  # three of them are hidden
    synchronous = text.replace("dimensions={0}", 'dimensions={0}, backend_config={"is_sync":true}')
    assert simulate(timeline(synchronous, MESH, MACHINE, NO_TURNS), MESH, MACHINE, None).step_time_s == 3 * 52 + 20


def test_streams():
    """Two collectives share a stream, a send has its own: 16 + 16 s after one another, beside 64 s."""
    text = entry(
        "%p = s8[16]{0} parameter(0)",
        "%one = (s8[8]{0}, s8[16]{0}) all-gather-start(%p), replica_groups=[2,2]<=[4], dimensions={0}",
        "%two = (s8[8]{0}, s8[16]{0}) all-gather-start(%p), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}",
        "%send = (s8[32]{0}, s8[32]{0}) collective-permute-start(%p), source_target_pairs={{0,2},{2,0},{1,3},{3,1}}",
        "%one.done = s8[16]{0} all-gather-done(%one)",
        "%two.done = s8[16]{0} all-gather-done(%two)",
        "ROOT %send.done = s8[32]{0} collective-permute-done(%send)",
    )
    found = simulate(timeline(text, MESH, MACHINE, NO_TURNS), MESH, MACHINE, None)
    assert found.step_time_s == 64
    assert found.time_s == {"tp": 16, "dp": 16 + 32}
    assert found.communication_s == {"tp": 16, "dp": 16 + 64}


def test_a_copy_to_the_chip_runs_beside():
    """10 bytes from memory beside a pass over 20 bytes, another 100 that are waited for"""
    text = entry(
        "%p = s8[10]{0} parameter(0)",
        "%q = s8[100]{0} parameter(1)",
        "%near = (s8[10]{0:S(1)}, s8[10]{0}, u32[]{:S(2)}) copy-start(%p)",
        "%k = s8[10]{0} negate(%p)",
        "%near.done = s8[10]{0:S(1)} copy-done(%near)",
        "%far = (s8[100]{0:S(1)}, s8[100]{0}, u32[]{:S(2)}) copy-start(%q)",
        "ROOT %far.done = s8[100]{0:S(1)} copy-done(%far)",
    )
    assert simulate(timeline(text, MESH, TPU, NO_TURNS), MESH, TPU, None).time_s == {"memory": 120, "kernels": 0}


def test_what_is_not_known_is_said():
    text = entry(
        "%p = s8[10]{0} parameter(0)",
        '%mark = s8[10]{0} custom-call(%p), custom_call_target="Sharding"',
        '%mine = s32[10]{0} custom-call(%p), custom_call_target="my_kernel"',
        "ROOT %loop = s8[10]{0} while(%p), condition=%some, body=%body",
        computations="%body (x: s8[10]) -> s8[10] {\n  ROOT %x = s8[10]{0} parameter(0)\n}\n\n"
        "%some (c: s8[10]) -> pred[] {\n  ROOT %c = s8[10]{0} parameter(0)\n}\n\n",
    )
    found = simulate(timeline(text, MESH, MACHINE, NO_TURNS), MESH, MACHINE, None)
    assert found.step_time_s == 10 + 40
    assert found.notes == (
        "my_kernel, a custom call (1 in the program), is not known: counted by its bytes",
        "the loop loop is not in the tick table: counted as one turn",
    )
