"""What one instruction of a scheduled program costs on a device: FLOPs, bytes and seconds. No jax.

The seconds are those of `parallax.plan.costs`, from the mesh file's peaks and efficiencies:

- a product (dot, convolution, a library's or Triton's gemm, also inside a fusion) takes its FLOPs' time, and what it
  reads and writes takes its own; the longer counts;
- fused attention takes its causal FLOPs at the attention's efficiency: 2 products forward, 5 backward (TPU: 3 for the
  queries' gradient, 4 for that of keys and values, 5 where one kernel makes both);
- everything else takes its pass over memory; of what a fusion slices or updates in place, the slice or the update;
- what is in a TPU's on-chip memory, S(1) in the text, costs no pass;
- a kernel takes `kernel_s` beside that, a TPU's scalar nothing.

Not modelled: caches (a GPU's L2 makes small passes faster), conversions and elementwise work, sorts, the memory
bandwidth that a collective takes from a kernel beside it, and what deciding a loop's next turn costs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from parallax.hlo import Array, Collective, Instruction, Program
from parallax.hlo.program import Computation
from parallax.machine import Machine
from parallax.plan.costs import Costs

FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id", "after-all"),
    *("add-dependency", "opt-barrier", "domain", "custom-call-update", "call-update", "async-update"),
}
_MARKS = ("AllocateBuffer", "AssumeGatherIndicesInBound", "Sharding", "annotate_device_placement")  # do no work
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_ATTENTION = re.compile(r"splash|flash|attention|mha")
_ON_CHIP = 1  # TPU: the space of its vector memory


class Product(NamedTuple):
    """`batch` products [n, k] x [k, m]"""

    n: int
    k: int
    m: int
    batch: int
    dtype: str

    @property
    def flops(self) -> int:
        return 2 * self.n * self.k * self.m * self.batch


@dataclass(frozen=True)
class Work:
    """Of one instruction on one device. `kind` is matmul, attention or memory; `seconds` leaves out `kernel_s`."""

    kind: str
    flops: float
    bytes: int
    seconds: float
    kernel_s: float
    unknown: str = ""  # a custom call whose work is not known: its target

    @property
    def total_s(self) -> float:
        return self.seconds + self.kernel_s


NOTHING = Work("memory", 0.0, 0, 0.0, 0.0)


class Roofline:
    """Costs of a program's instructions on `machine`."""

    def __init__(self, program: Program, machine: Machine):
        self.program, self.machine = program, machine
        self.costs = cache(lambda precision: Costs(machine, precision))
        self.usual = self.costs(next(iter(machine.peak_flops)))
        self._on_chip = _ON_CHIP if machine.platform == "tpu" else None

    def work(self, computation: Computation, instruction: Instruction) -> Work:
        target = _TARGET.search(instruction.attributes) if instruction.op == "custom-call" else None
        if instruction.op in FREE or (target and target.group(1) in _MARKS):
            return NOTHING
        kernel_s = self.usual.efficiency.kernel_s
        if self.machine.platform == "tpu" and all(not array.dims for array in instruction.arrays):
            kernel_s = 0.0
        size = self._bytes(computation, instruction)
        memory_s = self.usual.memory(size)
        if target and (flops := _attention_flops(computation, instruction, target.group(1))):
            return Work("attention", flops, size, max(self.usual.attention(flops), memory_s), kernel_s)
        products = list(self._products(computation, instruction))
        if products:
            flops_s = sum(self._precision(p.dtype).matmul(p.n, p.k, p.m, p.batch) for p in products)
            return Work("matmul", sum(p.flops for p in products), size, max(flops_s, memory_s), kernel_s)
        return Work("memory", 0.0, size, memory_s, kernel_s, target.group(1) if target else "")

    def copy_s(self, computation: Computation, start: Instruction) -> float:
        """What is started beside the compute and is no collective: its result is read and written, but for what is on
        the chip."""
        done = computation.done(start)
        moved = done.arrays if done else start.arrays[:1]
        source = [_arrays(computation, name)[0].space for name in start.operands[:1]]
        passes = sum(space != self._on_chip for space in (*source, *(array.space for array in moved[:1])))
        return self.usual.memory(passes * sum(array.bytes for array in moved))

    def collective_s(self, one: Collective) -> float:
        """Time at the mesh file's bandwidth (see `parallax.plan.costs`)."""
        if one.kind == "collective-permute":
            return self.usual.send(one.bytes, in_one_node(one, self.machine))
        ranks = len(one.groups[0])
        node = self.machine.devices_per_node
        together = max(np.bincount(np.array(group) // node).max() for group in one.groups)
        stride = max(1, node // int(together))  # of a group of which so many share a node
        if one.kind == "all-to-all":
            return self.usual.all_to_all(one.bytes, ranks, stride)
        if one.kind == "all-reduce":
            return self.usual.all_reduce(one.bytes, ranks, stride)
        return self.usual.gather(one.bytes * (ranks if one.kind == "reduce-scatter" else 1), ranks, stride)

    def read(self, computation: Computation, user: Instruction, place: int) -> int:
        """What an instruction reads of one of its operands, by the place of that."""
        if user.op == "fusion":
            return self._read(self.program.computations[user.called[0]], place)
        if user.op in ("dynamic-slice", "slice", "gather") and place == 0:
            return user.bytes
        return self._size(_arrays(computation, user.operands[place]))

    def holds(self, user: Instruction, place: int, op: str) -> bool:
        """Whether an instruction is an `op` of the operand in that place, or a fusion that holds one."""
        if user.op != "fusion":
            return user.op == op and place == 0
        inner = self.program.computations[user.called[0]]
        names = [inner.parameters[place].name]
        for name in names:
            for instruction in inner.users[name]:
                if instruction.op == "bitcast":
                    names.append(instruction.name)
                elif self.holds(instruction, instruction.operands.index(name), op):
                    return True
        return False

    def _precision(self, dtype: str) -> Costs:
        return self.costs("float32") if dtype == "f32" and "float32" in self.machine.peak_flops else self.usual

    # products

    def _products(self, computation: Computation, instruction: Instruction) -> Iterator[Product]:
        inside = [(computation, instruction)]
        if instruction.op == "fusion":
            inside = self.program.within(instruction)
        for where, i in inside:
            if i.op == "dot" or (i.op == "custom-call" and "__cublas$" in i.attributes):
                yield _dot(where, i)
            elif i.op == "convolution":
                yield _convolution(where, i)

    # bytes

    def _bytes(self, computation: Computation, instruction: Instruction) -> int:
        """What it reads from and writes to main memory."""
        arrays = [_arrays(computation, name) for name in instruction.operands]
        if instruction.op == "fusion":
            inner = self.program.computations[instruction.called[0]]
            read = sum(self._read(inner, number) for number in range(len(arrays)))
            return read + sum(self._written(inner, root) for root in _roots(inner, inner.root))
        if instruction.op in ("dynamic-slice", "slice", "gather"):
            return 2 * self._size(instruction.arrays)
        if (update := _update(instruction)) is not None:
            return 2 * self._size(arrays[update])
        results = instruction.arrays
        if instruction.op == "custom-call":  # a library's result comes with its workspace
            results = [a for a in results if a.dtype not in ("s8", "u8")] or results
        return self._size(results) + sum(map(self._size, arrays))

    def _size(self, arrays) -> int:
        return sum(array.bytes for array in arrays if array.space != self._on_chip)

    def _read(self, computation: Computation, number: int) -> int:
        """What a fusion reads of one of its parameters."""
        parameter = computation.parameters.get(number)
        if parameter is None or not (whole := self._size(parameter.arrays)):
            return 0
        names, read = [parameter.name], 0
        for name in names:
            for user in computation.users[name]:
                place = user.operands.index(name)
                if user.op == "bitcast":
                    names.append(user.name)
                elif user.op in ("dynamic-slice", "slice", "gather") and place == 0:
                    read += user.bytes
                elif _update(user) is not None and place == 0:
                    continue
                elif user.op == "fusion":
                    read += self._read(self.program.computations[user.called[0]], place)
                else:
                    return whole
        return min(read, whole)

    def _written(self, computation: Computation, root: Instruction) -> int:
        """What a fusion writes of one of its results."""
        update = _update(root)
        if update is not None and _source(computation, root.operands[0]).op == "parameter":
            updates = _arrays(computation, root.operands[update])
            return 0 if self._size(root.arrays) == 0 else sum(array.bytes for array in updates)
        if root.op == "fusion":
            inner = self.program.computations[root.called[0]]
            return sum(self._written(inner, i) for i in _roots(inner, inner.root))
        return self._size(root.arrays)


def in_one_node(one: Collective, machine: Machine) -> bool:
    """Whether all groups of a collective stay in one node: devices are numbered node after node."""
    node = machine.devices_per_node
    return all(len({member // node for member in group}) == 1 for group in one.groups)


def _arrays(computation: Computation, name: str) -> tuple[Array, ...]:
    found = computation.by_name.get(name)
    return found.arrays if found else ()


def _source(computation: Computation, name: str) -> Instruction:
    """What an instruction's operand is, looked up through bitcasts."""
    found = computation.by_name[name]
    return _source(computation, found.operands[0]) if found.op == "bitcast" else found


def _roots(computation: Computation, root: Instruction) -> Iterator[Instruction]:
    """What a fusion returns, an instruction for each result."""
    if root.op == "tuple":
        for name in root.operands:
            yield _source(computation, name)
    else:
        yield _source(computation, root.name)


def _update(instruction: Instruction) -> int | None:
    """The operand of an update in place that holds what is written."""
    return {"dynamic-update-slice": 1, "scatter": 2}.get(instruction.op)


def _listed(text: str, name: str) -> list[int]:
    """The numbers of an attribute: name={0,1} in HLO, "name":["0","1"] in a backend's settings"""
    match = re.search(rf'\b{name}"?[=:]\s*[{{\[]([^}}\]]*)[}}\]]', text)
    return [int(n) for n in re.findall(r"\d+", match.group(1))] if match else []


def _dot(computation: Computation, instruction: Instruction) -> Product:
    """A dot, or a cuBLAS call, whose settings name their dimensions in full."""
    full = "dimensions" if instruction.op == "custom-call" else "dims"
    lhs, rhs = (_arrays(computation, name)[0] for name in instruction.operands[:2])
    contracted = {side: _listed(instruction.attributes, f"{side}_contracting_{full}") for side in ("lhs", "rhs")}
    batched = {side: _listed(instruction.attributes, f"{side}_batch_{full}") for side in ("lhs", "rhs")}
    rows = lambda array, side: math.prod(
        n for d, n in enumerate(array.dims) if d not in (*contracted[side], *batched[side])
    )
    k = math.prod(lhs.dims[d] for d in contracted["lhs"])
    return Product(rows(lhs, "lhs"), k, rows(rhs, "rhs"), math.prod(lhs.dims[d] for d in batched["lhs"]), lhs.dtype)


def _convolution(computation: Computation, instruction: Instruction) -> Product:
    """A product as TPUs write it. Batch dimensions stand as spatial ones, of which padding and dilation leave one
    pair of input and kernel for each output; counted here pair by pair."""
    match = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert match, instruction.attributes[:200]
    lhs, rhs = (_arrays(computation, name)[0] for name in instruction.operands[:2])
    of_lhs, of_rhs, of_out = (
        dict(zip(labels, dims, strict=True))
        for labels, dims in zip(match.groups(), (lhs.dims, rhs.dims, instruction.arrays[0].dims), strict=True)
    )
    spatial = sorted(label for label in of_out if label.isdigit())
    pairs = math.prod(
        _pairs(instruction.attributes, d, of_lhs[label], of_rhs[label], of_out[label])
        for d, label in enumerate(spatial)
    )
    return Product(of_out["b"], of_rhs["i"], of_out["f"], pairs, lhs.dtype)


def _pairs(attributes: str, dimension: int, lhs: int, rhs: int, out: int) -> int:
    """(output, kernel) places of one spatial dimension that meet an element of the input"""

    def window(name: str, otherwise: str) -> str:
        match = re.search(rf"window=\{{[^}}]*\b{name}=([\w\-]+)", attributes)
        return match.group(1).split("x")[dimension] if match else otherwise

    place = np.arange(out)[:, None] * int(window("stride", "1"))
    place = place + np.arange(rhs) * int(window("rhs_dilate", "1")) - int(window("pad", "0_0").split("_")[0])
    dilate = int(window("lhs_dilate", "1"))
    return int(((place % dilate == 0) & (place >= 0) & (place < (lhs - 1) * dilate + 1)).sum())


def _attention_flops(computation: Computation, instruction: Instruction, target: str) -> float:
    """Causal FLOPs of a fused attention; 0 if it is none."""
    name = f"{instruction.name} {instruction.op_name}"
    operands = [array for name in instruction.operands for array in _arrays(computation, name)]
    if target.startswith("__cudnn$fmha"):
        scores = math.prod(_listed(instruction.attributes, "dimensions"))  # of its intermediate tensor [B, H, S, T]
        products = 5 if "Backward" in target else 2
        share = 0.5 if "CAUSAL" in instruction.attributes else 1.0
        return products * 2 * scores * operands[0].dims[-1] * share
    floats = [array for array in operands if len(array.dims) >= 3 and array.dtype in ("bf16", "f16", "f32")]
    if not _ATTENTION.search(name) or len(floats) < 3:
        return 0.0
    queries, keys = floats[:2]  # [.., head, S, C]
    if "dkv" in name:
        products = 5 if re.search(r"use_fused_bwd_kernel\W+true", instruction.attributes) else 4
    else:
        products = 3 if "_dq" in name else 2
    return products * queries.elements * keys.dims[-2]  # 2 FLOPs, half of the scores
