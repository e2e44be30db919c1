"""Which attention kernel a run has: splash attention on TPU, cuDNN's on GPU, or the blockwise core where none serves.
No jax."""

from __future__ import annotations

from collections.abc import Iterator

from parallax.config import RunConfig
from parallax.shape import ModelShape

SPLASH, CUDNN, BLOCKWISE = "splash", "cudnn", "blockwise"
KERNELS = {"tpu": SPLASH, "gpu": CUDNN, "cuda": CUDNN}  # of jax's platforms
NAMES = {SPLASH: "splash attention", CUDNN: "cuDNN attention"}
LANES = 128  # of a TPU: splash attention works on blocks of a multiple of this


def kernel_of(platform: str, shape: ModelShape, config: RunConfig) -> tuple[str, str | None]:
    """The kernel that attention runs on a platform, and where a platform's own one does not serve, a line with every
    reason and what would change it."""
    kernel = KERNELS.get(platform, BLOCKWISE)
    if kernel == BLOCKWISE:
        return BLOCKWISE, None
    reasons = list(dict.fromkeys(_reasons(kernel, shape, config)))
    if not reasons:
        return kernel, None
    return BLOCKWISE, f"attention runs blockwise, slower than {NAMES[kernel]}, which does not serve: " + "; ".join(
        reasons
    )


def _reasons(kernel: str, shape: ModelShape, config: RunConfig) -> Iterator[str]:
    parallel, train = config.parallel, config.train
    for layer, _ in shape.kinds:
        if layer.value_head_size not in (0, layer.head_size):
            yield f"head sizes {layer.head_size} of keys and {layer.value_head_size} of values must be equal"
        elif why := _head_size(kernel, layer.head_size):
            yield why
    if kernel == CUDNN and train.precision == "float32":
        yield 'train.precision = "float32" is too wide for it; use "bfloat16"'
    if kernel == CUDNN and config.data.isolate_documents:
        yield "data.isolate_documents = true is more than its causal mask; use false"
    if parallel.cp > 1 and parallel.context == "ring":
        yield f'parallel.context = "ring" with parallel.cp = {parallel.cp} needs the blockwise core; use "all_gather"'
    chunk = LANES if kernel == SPLASH else 2  # tokens that one must be a multiple of
    step = chunk * 2 * parallel.cp if parallel.cp > 1 else chunk
    if train.seq_len % step and (kernel == SPLASH or parallel.cp > 1):
        below = train.seq_len // step * step
        use = f"{below} or {below + step}" if below else f"{step}"
        yield f"train.seq_len = {train.seq_len} is not a multiple of {step}; use {use}"


def _head_size(kernel: str, size: int) -> str | None:
    """Why a head size cannot be had."""
    wide = kernel == SPLASH and size % LANES == 0
    if size % 8 == 0 and size <= 128 or wide:
        return None
    rule = "a multiple of 8 up to 128" + (f" or a multiple of {LANES}" if kernel == SPLASH else "")
    below = min(size // 8 * 8, 128)
    return f"head size {size} is not {rule}"
