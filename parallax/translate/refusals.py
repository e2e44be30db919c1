"""What Megatron-LM itself refuses in a command line, before any training (its validate_args and its configs). No jax.

A rule yields problems, a line each, that begin with the flag.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from parallax.config import either
from parallax.translate.command_line import CommandLine

REQUIRED = {"num-layers": 32, "hidden-size": 4096, "num-attention-heads": 32, "seq-length": 4096, "micro-batch-size": 1}
SIZES = (
    *REQUIRED,
    *("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"),
    *("expert-model-parallel-size", "global-batch-size", "train-iters", "train-samples", "ffn-hidden-size"),
    *("num-query-groups", "kv-channels", "max-position-embeddings", "vocab-size", "padded-vocab-size"),
    *("make-vocab-size-divisible-by", "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"),
    *("recompute-num-layers", "save-interval", "save-retain-interval", "log-interval"),
)
COUNTED_AS_LAYERS = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")
PLACED_LAYERS = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
MAX_DEVICES = 1 << 20


def size_refusals(line: CommandLine) -> list[str]:
    """Sizes that are missing or less than 1: without them no rule can be looked at."""
    missing = [name for name in REQUIRED if name not in line.given and f"--{name}" not in line.refused]
    small = [name for name in SIZES if line.given.get(name, 1) < 1]
    return [
        *(f"--{n} is missing and Megatron-LM has no default; use for example --{n} {REQUIRED[n]}" for n in missing),
        *(f"--{name} {line.get(name)} must be at least 1; use 1 or more" for name in small),
    ]


def rule_refusals(line: CommandLine) -> list[str]:
    """Rules between flags, of a command line with all its sizes."""
    return [*_layout(line), *_attention(line), *_batch(line), *_pipeline(line), *_options(line), *_training(line)]


def virtual_stages(line: CommandLine) -> int:
    """Chunks of layers on each pipeline rank."""
    if chunks := line.get("num-virtual-stages-per-pipeline-rank"):
        return chunks
    if each := line.get("num-layers-per-virtual-pipeline-stage"):
        return max(_layers(line) // line.get("pipeline-model-parallel-size") // each, 1)
    return 1


def _layers(line: CommandLine) -> int:
    """With what is counted as a layer."""
    return line.get("num-layers") + sum(name in line.given for name in COUNTED_AS_LAYERS)


def _layout(line: CommandLine) -> Iterator[str]:
    tp, cp, ep = (line.get(f"{axis}-parallel-size") for axis in ("tensor-model", "context", "expert-model"))
    if line.devices % line.model_parallel:
        names = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
        product = " x ".join(f"--{name} {line.get(name)}" for name in names)
        devices = f"--nnodes {line.nodes} x --nproc_per_node {line.devices_per_node} = {line.devices} devices"
        rule = f"cannot hold {product} = {line.model_parallel}, of which they must be a multiple"
        yield f"{devices} {rule}; use {_nodes(line)}"
    if line.get("sequence-parallel") and tp == 1:
        yield (
            "--sequence-parallel needs --tensor-model-parallel-size of 2 or more, not 1; leave it out, or use "
            "--tensor-model-parallel-size 2"
        )
    seq = line.get("seq-length")
    if cp > 1 and seq % (2 * cp):
        rule = f"is not a multiple of 2 x --context-parallel-size {cp} = {2 * cp}"
        yield f"--seq-length {seq} {rule}; use {_multiples(seq, 2 * cp)}"
    experts = line.get("num-experts") or 0
    if ep > 1 and not experts:
        yield f"--expert-model-parallel-size {ep} needs --num-experts; leave it out"
    elif experts % ep:
        rule = f"is not a multiple of --expert-model-parallel-size {ep}"
        yield f"--num-experts {experts} {rule}; use {_multiples(experts, ep)}"


def _nodes(line: CommandLine) -> str:
    """The two least numbers of nodes that hold the layout and divide the batch."""
    per_node, held, micro = line.devices_per_node, line.model_parallel, line.get("micro-batch-size")
    step, batch = held // math.gcd(held, per_node), line.get("global-batch-size")
    most = MAX_DEVICES if batch is None else min(batch // micro * held, MAX_DEVICES)
    works: list[int] = []
    for nodes in range(step, most // per_node + 1, step):
        if batch is None or batch % (nodes * per_node // held * micro) == 0:
            works.append(nodes)
        if len(works) == 2:
            break
    if not works:
        return f"--nnodes {step} with a --global-batch-size that {step * per_node // held * micro} divides"
    ranks = either(str(nodes * per_node // held) for nodes in works)
    return f"--nnodes {either(map(str, works))} (data parallel {ranks})"


def _attention(line: CommandLine) -> Iterator[str]:
    width, heads, tp = (line.get(n) for n in ("hidden-size", "num-attention-heads", "tensor-model-parallel-size"))
    groups = line.get("num-query-groups") if line.get("group-query-attention") else heads
    if "kv-channels" not in line.given and width % heads:
        rule = f"is not a multiple of --num-attention-heads {heads}"
        yield f"--hidden-size {width} {rule}; use {_multiples(width, heads)}, or give --kv-channels"
    if heads % tp:
        rule = f"is not a multiple of --tensor-model-parallel-size {tp}"
        yield f"--num-attention-heads {heads} {rule}; use --tensor-model-parallel-size {_near(tp, _divisors(heads))}"
    if heads % groups:
        rule = f"does not divide --num-attention-heads {heads}"
        yield f"--num-query-groups {groups} {rule}; use {_near(groups, _divisors(heads))}"
    elif groups % tp and tp % groups:
        works = [n for n in _divisors(heads) if groups % n == 0 or n % groups == 0]
        rule = f"is neither a multiple nor a divisor of --tensor-model-parallel-size {tp}"
        yield f"--num-query-groups {groups} {rule}; use --tensor-model-parallel-size {_near(tp, works)}"
    seq, positions = line.get("seq-length"), line.get("max-position-embeddings")
    if positions is not None and positions < seq:
        yield f"--max-position-embeddings {positions} is less than --seq-length {seq}; use {seq} or more"


def _batch(line: CommandLine) -> Iterator[str]:
    micro, dp, batch = line.get("micro-batch-size"), line.data_parallel, line.get("global-batch-size")
    whole = line.devices % line.model_parallel == 0  # otherwise there is no data parallel size yet
    if whole and batch is not None and batch % (micro * dp):
        rule = f"is not a multiple of --micro-batch-size {micro} x data parallel {dp} = {micro * dp}"
        yield f"--global-batch-size {batch} {rule}; use {_multiples(batch, micro * dp)}"
    if line.get("train-iters") and line.get("train-samples"):
        yield "--train-samples and --train-iters exclude each other; use one of them"
    words = line.get("rampup-batch-size")
    if words is None:
        return
    ramp = " ".join(["--rampup-batch-size", *words])
    if len(words) != 3 or not all(word.isdecimal() and int(word) for word in words):
        rule = "must be three integers of at least 1: start, increment, samples"
        yield f"{ramp} {rule}; use for example 16 16 100000"
    elif line.get("train-iters"):
        yield f"{ramp} is for training by samples; use --train-samples instead of --train-iters, or leave it out"
    elif batch is None:
        yield f"{ramp} needs --global-batch-size; give the size that it ends at"


def _pipeline(line: CommandLine) -> Iterator[str]:
    pp, total = line.get("pipeline-model-parallel-size"), _layers(line)
    by_layers, by_chunks = "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"
    each, chunks = line.get(by_layers), line.get(by_chunks)
    placed = [name for name in PLACED_LAYERS if name in line.given]
    if each and chunks:
        yield f"--{by_chunks} and --{by_layers} exclude each other; use one of them"
        return
    if each and placed:
        yield f"--{by_layers} {each} does not go with --{placed[0]}; use --{by_chunks}"
        return
    if not placed and total % pp:
        counted = [name for name in COUNTED_AS_LAYERS if name in line.given]
        plus = "".join(f" + 1 (--{name})" for name in counted)
        works = [n - len(counted) for n in (total // pp * pp, total // pp * pp + pp) if n > len(counted)]
        rule = f"is not a multiple of --pipeline-model-parallel-size {pp}"
        yield f"--num-layers {line.get('num-layers')}{plus} {rule}; use {either(map(str, works))}"
    elif not placed and (total // pp) % (each or chunks or 1):
        name, size = (by_layers, each) if each else (by_chunks, chunks)
        rule = f"does not divide the {total // pp} layers of a pipeline rank"
        yield f"--{name} {size} {rule}; use {_near(size, _divisors(total // pp))}"
    least = 3 if "no-overlap-p2p-communication" in line.given else 2
    if virtual_stages(line) > 1 and pp < least:
        given = f"--{by_layers} {each}" if each else f"--{by_chunks} {chunks}"
        also = ", with --no-overlap-p2p-communication," if least == 3 else ""
        rule = f"interleaves, which{also} needs --pipeline-model-parallel-size of {least} or more, not {pp}"
        yield f"{given} {rule}; leave it out, or use --pipeline-model-parallel-size {least}"


def _options(line: CommandLine) -> Iterator[str]:
    given = line.given.keys()
    needs = [name for name in ("use-distributed-optimizer", "overlap-grad-reduce") if name not in given]
    if "overlap-param-gather" in given and needs:
        yield f"--overlap-param-gather needs {' and '.join(f'--{name}' for name in needs)}; add it, or leave this out"
    if "tp-comm-overlap" in given and "sequence-parallel" not in given:
        yield "--tp-comm-overlap needs --sequence-parallel; add it, or leave this out"
    selective = line.get("recompute-activations") or line.get("recompute-granularity") == "selective"
    full = line.get("recompute-granularity") == "full" and not selective
    lacks = [name for name in ("recompute-method", "recompute-num-layers") if name not in given]
    if full and lacks:
        use = "use --recompute-method uniform --recompute-num-layers 1"
        yield f"--recompute-granularity full needs {' and '.join(f'--{name}' for name in lacks)}; {use}"
    for name in ("recompute-method", "recompute-num-layers"):
        if selective and name in given:
            rule = "is of --recompute-granularity full, not of selective"
            yield f"--{name} {line.get(name)} {rule}; leave it out"
    if line.get("bf16") and line.get("fp16"):
        yield "--fp16 and --bf16 exclude each other; use --bf16"


def _training(line: CommandLine) -> Iterator[str]:
    lr, least = line.get("lr"), line.get("min-lr")
    if lr is not None and least > lr:
        yield f"--min-lr {least} must be at most --lr {lr}; use {lr} or less"
    every, kept = line.get("save-interval"), line.get("save-retain-interval")
    if "save" in line.given and every is None:
        yield f"--save {line.get('save')} needs --save-interval; use for example --save-interval 1000"
    if every and kept and kept % every:
        rule = f"is not a multiple of --save-interval {every}"
        yield f"--save-retain-interval {kept} {rule}; use {_multiples(kept, every)}"
    others = [name for name in ("lr-warmup-iters", "lr-warmup-samples") if line.get(name)]
    if "lr-warmup-fraction" in line.given and others:
        yield f"--lr-warmup-fraction and --{others[0]} exclude each other; use one of them"
    if line.given.keys() & {"train-iters", "train-samples"}:
        by, other = ("samples", "iters") if line.get("train-samples") else ("iters", "samples")
        for name in (f"lr-warmup-{other}", f"lr-decay-{other}"):
            if line.get(name):
                yield f"--{name} {line.get(name)} does not go with --train-{by}; use --{name.replace(other, by)}"


def _divisors(n: int) -> list[int]:
    """All of them, of a size that a model has."""
    return [d for d in range(1, n + 1) if n % d == 0] if n <= 1 << 20 else [1, n]


def _near(given: int, works: list[int]) -> str:
    """The two values next to `given` that work, on either side."""
    return either(str(n) for n in [w for w in works if w < given][-2:] + [w for w in works if w > given][:2])


def _multiples(given: int, step: int) -> str:
    """The multiples of `step` next to `given`."""
    below = given // step * step
    return either(str(n) for n in (below, below + step) if n)
