"""Memory by formula against what XLA built: its arguments, and the shapes of the tick loop, where tp splits."""

from __future__ import annotations

import math
import re
from collections import Counter

import jax
import pytest
from programs import compile_step, program

from parallax.config import Parallel
from parallax.plan.memory import own_memory
from parallax.program import Program

BYTES = {"f32": 4, "bf16": 2, "s32": 4}
Array = tuple[str, tuple[int, ...]]  # type and shape


def size(array: Array) -> int:
    return BYTES[array[0]] * math.prod(array[1])


def carried(text: str, slots: int, room: int) -> list[Counter[Array]]:
    """What each loop carries that has stash arrays [slot, layer of a chunk, …]"""
    loops = []
    for line in text.splitlines():
        result, found, _ = line.partition(" while(")
        arrays = [(kind, tuple(map(int, dims.split(",")))) for kind, dims in re.findall(r"(\w+)\[([\d,]+)\]", result)]
        if found and any(shape[:2] == (slots, room) for _, shape in arrays):
            loops.append(Counter(arrays))
    return loops


def gradients(built: Program) -> Counter[Array]:
    """One device's shards of the weights, as the pipeline accumulates their gradients: [chunk · layer, …]"""
    with jax.set_mesh(built.mesh):
        weights = jax.eval_shape(built.init, jax.random.key(0)).weights
    shards = jax.tree.map(lambda w, s: s.shard_shape(w.shape), weights, built.state_shardings.weights)
    shapes = lambda tree: jax.tree.leaves(tree, is_leaf=lambda shape: isinstance(shape, tuple))
    blocks = [(math.prod(shape[:3]), *shape[3:]) for shape in shapes(shards["blocks"])]
    return Counter(("f32", shape) for shape in (*blocks, *shapes([shards["embed"], shards["head"]])))


@pytest.mark.parametrize(
    ("parallel", "m", "remat", "sizes"),
    [
        (Parallel(dp=2, pp=2, cp=2, tp=2, virtual_stages=2, schedule="interleaved"), 4, "none", {}),
        (Parallel(pp=2, tp=2, sequence_parallel=False), 4, "selective", {"layers": 5, "vocab_size": 131}),
        (Parallel(dp=3, tp=4), 2, "none", {"kv_heads": 2}),
    ],
    ids=["dp2-pp2-cp2-tp2", "whole sequence", "dp3-tp4 and two key heads"],
)
def test_arguments_and_carry_to_the_byte(parallel, m, remat, sizes):
    sizes = {"layers": 4, "seq_len": 32, "width": 72, "heads": 4, "kv_heads": 4, "ff": 96, "vocab_size": 128} | sizes
    built = program(parallel, m, remat=remat, head_size=16, **sizes)
    compiled = compile_step(built)
    found = own_memory(built.model.shape, parallel, built.config.train)[0]

    tokens = m * built.config.train.micro_batch_size * built.config.train.seq_len // parallel.cp
    inputs = 4 * (2 * tokens + built.table.cells.size // parallel.pp)  # tokens and targets, cells
    state = found["weights"] + found["masters"] + found["moments"]
    assert compiled.memory_analysis().argument_size_in_bytes == state + inputs

    slots, room = built.table.buffers.stash, built.stages.room
    loops = carried(compiled.as_text(), slots, room)
    assert loops
    for arrays in loops:
        stash = [entry for entry in arrays.elements() if entry[1][:2] == (slots, room)]
        assert sum(map(size, stash)) == found["stash"]
    sums = gradients(built)
    assert sum(map(size, sums.elements())) == found["gradients"]
    assert any(sums <= arrays for arrays in loops)  # the loops with a backward
