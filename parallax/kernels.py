"""Which attention kernel a run has: splash attention on TPU, cuDNN's on GPU, or the blockwise core where none serves.
No jax."""

from __future__ import annotations

from collections.abc import Iterator

from parallax.config import Parallel, Train, either
from parallax.shape import ModelShape

SPLASH, CUDNN, BLOCKWISE = "splash", "cudnn", "blockwise"
KERNELS = {"tpu": SPLASH, "gpu": CUDNN, "cuda": CUDNN}  # of jax's platforms
NAMES = {SPLASH: "splash attention", CUDNN: "cuDNN attention"}
LANES = 128  # of a TPU: splash attention works on blocks of a multiple of this
HEAD_SIZES = {CUDNN: range(8, 129, 8), SPLASH: (*range(8, 128, 8), *range(LANES, 513, LANES))}


def kernel_of(
    platform: str, shape: ModelShape, parallel: Parallel, train: Train, isolate_documents: bool = False
) -> tuple[str, str | None]:
    """The kernel of a run's attention on devices of a platform. Where it is not the platform's own, the second item is
    a line with every reason and what would change it."""
    kernel = KERNELS.get(platform, BLOCKWISE)
    reasons = (
        [] if kernel == BLOCKWISE else list(dict.fromkeys(_reasons(kernel, shape, parallel, train, isolate_documents)))
    )
    if not reasons:
        return kernel, None
    return BLOCKWISE, f"attention runs blockwise, slower than {NAMES[kernel]}: {'; '.join(reasons)}"


def _reasons(
    kernel: str, shape: ModelShape, parallel: Parallel, train: Train, isolate_documents: bool
) -> Iterator[str]:
    """Why a kernel does not serve, each with the nearest values that do."""
    for layer, _ in shape.kinds:
        if layer.value_head_size not in (0, layer.head_size):
            yield f"the head size {layer.head_size} of keys must be that of values, {layer.value_head_size}"
        elif (size := layer.head_size) not in HEAD_SIZES[kernel]:
            below, above = [n for n in HEAD_SIZES[kernel] if n < size], [n for n in HEAD_SIZES[kernel] if n > size]
            rule = "a multiple of 8 up to 128" + (f" or of {LANES} up to 512" if kernel == SPLASH else "")
            yield f"the head size {size} must be {rule}; use {either(map(str, below[-1:] + above[:1]))}"
    if kernel == CUDNN and train.precision == "float32":
        yield 'train.precision = "float32" is not for it; use "bfloat16"'
    if kernel == CUDNN and isolate_documents:
        yield "data.isolate_documents = true is not for it, whose mask is causal and no more; use false"
    if parallel.cp > 1 and parallel.context == "ring":
        yield 'parallel.context = "ring" is not for it; use "all_gather"'
    tokens = LANES if kernel == SPLASH else 2  # which divide a chunk of the sequence
    step = tokens * (2 * parallel.cp if parallel.cp > 1 else 1)
    if train.seq_len % step and (kernel == SPLASH or parallel.cp > 1):
        near = filter(None, (train.seq_len // step * step, (train.seq_len // step + 1) * step))
        yield f"train.seq_len = {train.seq_len} must be a multiple of {step}; use {either(map(str, near))}"
