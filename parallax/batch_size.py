"""How many sequences a step has, by the samples before it: the batch-size ramp of `train.rampup_batch_size`. No jax.

The size depends on the number of samples consumed and on nothing else, so that a resumed run goes on with the sizes of
one that was never stopped.
"""

from __future__ import annotations

from collections.abc import Iterator

from parallax.config import Train


def batch_size(train: Train, samples: int) -> int:
    """Sequences in the step that follows `samples` samples.

    Without a ramp, `train.global_batch_size`. With [start, increment, over], start + increment · ⌊samples / (over / n)⌋
    up to the full size, where n = (full size - start) / increment (Megatron-LM's `--rampup-batch-size`)."""
    if not train.rampup_batch_size:
        return train.global_batch_size
    start, increment, over = train.rampup_batch_size
    increments = (train.global_batch_size - start) // increment
    return start + increment * min(samples * increments // over, increments)


def batch_sizes(train: Train, samples: int) -> Iterator[int]:
    """Sizes of the steps that follow `samples` samples, without end."""
    while True:
        size = batch_size(train, samples)
        yield size
        samples += size


def samples_after(train: Train, samples: int, steps: int) -> int:
    """Samples consumed when `steps` more steps have followed `samples`. Goes over the sizes, not over the steps."""
    while steps and (size := batch_size(train, samples)) != train.global_batch_size:
        start, increment, over = train.rampup_batch_size
        increments = (train.global_batch_size - start) // increment
        end = -(-((size - start) // increment + 1) * over // increments)  # the first number of samples of a larger size
        of_size = min(-((samples - end) // size), steps)
        samples, steps = samples + of_size * size, steps - of_size
    return samples + steps * train.global_batch_size
