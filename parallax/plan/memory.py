"""The memory of a device in parallax's own scheme, by item, from a model's shape and a run file's numbers. No jax.

Every rank runs the same program, so all hold the same buffers: what differs by rank is which slots are in use. Names:
T tokens of a microbatch on a rank (B · S / cp), D width, F feed-forward, H heads, K key/value heads, C head size, V
vocabulary, each the part of one device; e is the bytes of an element of weights and activations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import NamedTuple

from parallax.chunks import loss_chunks
from parallax.config import SCHEDULES, Parallel, Train
from parallax.kernels import BLOCKWISE, CUDNN
from parallax.layout import Sizes, kept_whole
from parallax.schedule.buffers import buffers
from parallax.schedule.order import make_schedule
from parallax.schedule.table import Buffers, tick_table
from parallax.shape import LayerShape, ModelShape, Weight
from parallax.stages import Stages

BYTES = {"bfloat16": 2, "float32": 4}
KEYS = 512  # that attention scores at a time: parallax.nn.attention.BLOCK


@dataclass(frozen=True, eq=False)
class _Kind:
    """A layer that several places hold, and its own key in a cache: to hash a LayerShape is to hash all its weights."""

    layer: LayerShape


Layers = tuple[tuple[_Kind, int], ...]  # runs of equal layers, in model order


class _Split(NamedTuple):
    """How one device's part of a layer is cut."""

    ep: int
    tp: int
    cp: int
    sequence: int  # parts of the sequence between layers: tp under sequence parallelism, else 1
    whole: frozenset[str]  # logical axes that tp does not split
    context: str
    kernel: str  # of attention

    def local(self, weight: Weight, pp: int = 1) -> tuple[int, ...]:
        return _local(weight, pp, self.ep, self.tp, self.whole)


class _Work(NamedTuple):
    """A microbatch as one rank sees it."""

    batch: int
    seq_len: int  # of the rank's part
    width: int
    element: int  # bytes
    remat: str

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len


def own_memory(
    shape: ModelShape, parallel: Parallel, train: Train, kernel: str = BLOCKWISE
) -> tuple[dict[str, float], ...]:
    """Bytes on one device, by item, of each pipeline rank; the ranks share one dictionary, being equal.

    - `weights`, in `train.precision`; float32 `masters` and `moments`, sharded over the replicas with zero = 1. In
      `moments` are 8 bytes of counters. A chunk's places without a layer count, as does a padded vocabulary.
    - `gradients`: float32 sums over microbatches, of whole local weights.
    - `stash`: what the layers of a chunk keep for their backward (see `_kept`), in each slot.
    - `inboxes`: activations, gradients and loss gradients in their slots, and the two that a tick hands to the next.
    - `logits`: what the loss phase holds (see `_loss_phase`).
    - `workspace`: what the fullest moment needs besides, so that the items add up to the peak. The loss phase, a
      layer's backward and the embedding's gradient use the same memory, one after the other; with more than one
      replica there are also the reduced gradients of the blocks and a copy of the embedding and head.

    `kernel` is that of attention (see `parallax.kernels`).

    Where layers differ, one program serves all ranks: a place of a chunk is as large as the largest that a rank puts
    there. Takes for granted that the layout is one that `parallax.rules` lets pass. Raises ScheduleError where a
    schedule's file does not fit it."""
    pp, v, ep, tp, cp = parallel.pp, parallel.virtual_stages, parallel.ep, parallel.tp, parallel.cp
    layers: Layers = tuple((_kind(layer), len(list(run))) for layer, run in groupby(shape.layers))
    split = _Split(ep, tp, cp, tp if parallel.sequence_parallel else 1, _whole(layers, tp), parallel.context, kernel)
    work = _Work(train.micro_batch_size, train.seq_len // cp, shape.width, BYTES[train.precision], train.remat)
    replicas = (parallel.dp * ep * cp, parallel.dp * cp)
    shards = replicas if parallel.zero else (1, 1)
    blocks, block_shards = _blocks(layers, pp, v, split, shards)
    outer, outer_shards = _elements(shape.embed + shape.head, split, shards, pp)

    slots = _slots(parallel.schedule, pp, v, train.global_batch_size // (parallel.dp * ep * train.micro_batch_size))
    between = work.tokens * shape.width // split.sequence * work.element  # an activation between layers
    loss = _loss_phase(shape.vocab_size, pp, split, work)
    fullest = max(loss, _layer_phase(layers, split, work), _embedding_phase(shape.embed, split, work))
    beside = 0
    if replicas[0] > 1:
        # XLA may allocate what the reduction writes before the ticks begin, and copies the tables that they read,
        # as the update writes to their buffers. The update itself needs less than the ticks, which are over by then.
        beside = 4 * block_shards + work.element * outer
    items: dict[str, float] = {
        "weights": work.element * (blocks + outer),
        "masters": 4 * (block_shards + outer_shards),
        "moments": 8 * (block_shards + outer_shards) + 8,
        "gradients": 4 * (blocks + outer),
        "stash": slots.stash * _chunk_kept(layers, pp * v, split, work),
        "inboxes": (slots.activations + slots.gradients + slots.losses + 2) * between,
        "logits": loss,
        "workspace": fullest - loss + beside,
    }
    return (items,) * pp


def _slots(schedule: str, pp: int, v: int, m: int) -> Buffers:
    if schedule in SCHEDULES:
        return buffers(schedule, pp, v, m)
    return tick_table(make_schedule(schedule, pp, v, m)).buffers


@cache
def _kind(layer: LayerShape) -> _Kind:
    return _Kind(layer)


@cache
def _whole(layers: Layers, tp: int) -> frozenset[str]:
    return kept_whole(Parallel(tp=tp), (kind.layer for kind, _ in layers))


# Weights


@cache
def _local(weight: Weight, pp: int, ep: int, tp: int, whole: frozenset[str]) -> tuple[int, ...]:
    return Sizes({"pp": pp, "ep": ep, "tp": tp}, whole).local(weight.shape, weight.axes)


@cache
def _elements(weights: tuple[Weight, ...], split: _Split, shards: tuple[int, int], pp: int = 1) -> tuple[int, int]:
    """Elements on one device of all weights, and of its shards of them: a weight that the replicas do not divide is
    padded. `shards` is among how many a dense weight is split, and an expert's."""
    dense, experts = shards
    local = sharded = 0
    for weight in weights:
        size = math.prod(split.local(weight, pp))
        local += size
        sharded += -(-size // (experts if "experts" in weight.axes else dense))
    return local, sharded


@cache
def _places(layers: Layers, pp: int, v: int) -> tuple[tuple[frozenset[_Kind], int], ...]:
    """The layers that meet in one place of the stacked blocks [v, pp, layer of a chunk], over ranks; and how many
    places hold such. Where all ranks have padding, any layer may stand for it."""
    order = [kind for kind, count in layers for _ in range(count)]
    stages = Stages(len(order), pp, v)
    at: list[set[_Kind]] = [set() for _ in range(v * stages.room)]
    for kind, place in zip(order, stages.places.tolist(), strict=True):
        stage, index = divmod(place, stages.room)
        at[stage // pp * stages.room + index].add(kind)
    return tuple(Counter(frozenset(met or order) for met in at).items())


def _over_places(layers: Layers, pp: int, v: int, size: Callable[[_Kind], int]) -> int:
    return sum(count * max(map(size, kinds)) for kinds, count in _places(layers, pp, v))


@cache
def _blocks(layers: Layers, pp: int, v: int, split: _Split, shards: tuple[int, int]) -> tuple[int, int]:
    """As `_elements`, of all blocks on a rank."""
    elements = lambda kind: _elements(kind.layer.weights, split, shards)
    local = _over_places(layers, pp, v, lambda kind: elements(kind)[0])
    return local, _over_places(layers, pp, v, lambda kind: elements(kind)[1])


# Residuals


@cache
def _chunk_kept(layers: Layers, stages: int, split: _Split, work: _Work) -> int:
    """Bytes of a stash slot. It serves every chunk of a rank, so that all stages meet in its places."""
    return _over_places(layers, stages, 1, lambda kind: _kept(kind, split, work))


@cache
def _kept(kind: _Kind, split: _Split, work: _Work) -> int:
    """Bytes that `jax.vjp` of a layer leaves: its input; under "selective" and "none" the products of its matrices, but
    for the last, which is only added; under "none" attention's output and its float32 log-sum-exp. Column-parallel
    products are whole along the sequence, row-parallel ones as between layers; an expert's are those of the tokens that
    visit, as many as `experts_per_token` times a rank's own."""
    T, D, e = work.tokens, work.width, work.element
    kept, layer = T * D // split.sequence * e, kind.layer
    if work.remat == "full":
        return kept
    for weight in layer.weights:
        if weight.decays and weight.axes[-1] != "embed":
            kept += T * _outputs(weight, layer, split) * e
        elif weight.decays and weight.axes[-2] != "ff":
            kept += T * D // split.sequence * e
    if work.remat == "none":
        kept += T * layer.heads // split.tp * ((layer.value_head_size or layer.head_size) * e + 4)
    return kept


def _outputs(weight: Weight, layer: LayerShape, split: _Split) -> int:
    """The width of a column-parallel product on one device, for a token and all experts that it visits."""
    return split.local(weight)[-1] * (layer.experts_per_token if "experts" in weight.axes else 1)


# Transients


def _loss_phase(vocab_size: int, pp: int, split: _Split, work: _Work) -> int:
    """A chunk's float32 logits and their gradient in e bytes (which, built for TPU, products work out as they read the
    logits); the layers' output and its gradient, whole [T, D] and as between layers. The product that makes the
    gradient of a table adds it to the sum in `gradients`."""
    T, D, e = work.tokens, work.width, work.element
    V = -(-vocab_size // (pp * split.tp))
    return (4 + e) * T // loss_chunks(T, D, V) * V + 2 * T * D * e + 2 * T * D // split.sequence * e


@cache
def _embedding_phase(embed: tuple[Weight, ...], split: _Split, work: _Work) -> int:
    """Whole gradients of the embedding's weights but the table; and what is added up in all of them, as it comes and in
    float32, [T, D]."""
    e = work.element
    others = [math.prod(split.local(weight)) for weight in embed if "vocab" not in weight.axes]
    return e * sum(others) + work.tokens * work.width * (e + 4)


@cache
def _layer_phase(layers: Layers, split: _Split, work: _Work) -> int:
    """The backward of the largest layer, at its fullest: in attention's. XLA leaves weight gradients to the end of a
    layer, so that what they read is all there: inputs and output gradients of the products, whole [T, D] or [T, F]."""
    return max(_layer_backward(kind.layer, split, work) for kind, _ in layers)


def _layer_backward(layer: LayerShape, split: _Split, work: _Work) -> int:
    T, D, e = work.tokens, work.width, work.element
    products = [weight for weight in layer.weights if weight.decays and weight.axes[-1] == "ff"]
    F = sum(_outputs(weight, layer, split) for weight in products)
    F *= 2 if work.remat == "full" else 1  # products and their gradients; or the stash holds the products
    return T * e * (F + 4 * D) + 2 * T * D // split.sequence * e + _attention_backward(layer, split, work)


def _attention_backward(layer: LayerShape, split: _Split, work: _Work) -> int:
    """Queries, output and its gradient; keys and values; float32 sums of the three gradients; and of one block of keys
    the scores in float32 and, as the products read them, in e bytes. Over cp: with "ring", the keys and values that
    arrive, the sums that travel with them, and those of one chunk before they are added; with "all_gather" keys,
    values and their sums for the whole sequence, and these once more as they come out of the loop over blocks."""
    T, e, cp = work.tokens, work.element, split.cp
    heads = layer.heads // split.tp
    kv_heads = 1 if "kv_heads" in split.whole else layer.kv_heads // split.tp
    C, C_v = layer.head_size, layer.value_head_size or layer.head_size
    q, out, kv = heads * C, heads * C_v, kv_heads * (C + C_v)
    if split.kernel != BLOCKWISE:
        return _kernel_backward(split, work, heads, q, out, kv)
    chunk = work.seq_len // (2 if cp > 1 else 1)
    keys = work.seq_len * cp if split.context == "all_gather" else chunk
    block = -(-keys // -(-keys // KEYS))
    scores = work.batch * heads * chunk * block * (4 + e)
    if cp == 1:
        held, summed = kv, q + kv
    elif split.context == "ring":
        held, summed = 2 * kv, (q + kv) * 3 // 2 + kv
    else:
        held, summed = (1 + cp) * kv, q + 2 * cp * kv
    return T * (e * (q + 2 * out + held) + 4 * summed) + scores


def _kernel_backward(split: _Split, work: _Work, heads: int, q: int, out: int, kv: int) -> int:
    """Of a fused kernel: queries, output and its gradient, keys and values, and the three gradients, in e bytes; two
    float32 a query and head (log-sum-exp, and the product of output and gradient). Gathered over cp, keys and values
    and their gradients of the whole sequence; and for cuDNN, whose mask is data there, two of a chunk of queries."""
    T, e, cp = work.tokens, work.element, split.cp
    whole = cp * kv if cp > 1 else 0
    mask = 2 * e * work.seq_len // 2 * work.seq_len * cp if split.kernel == CUDNN and cp > 1 else 0
    return T * (e * (2 * q + 2 * out + 2 * kv + 2 * whole) + 8 * heads) + mask
