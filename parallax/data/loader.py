"""From tokens to batches: windows, the shuffled training stream and the fixed held-out batches.

What a step reads depends on the seed and on the number of samples before it, and on nothing else: not on the layout,
the hosts, or how the run got there. So the number of samples seen is the whole position of the data, and a run
resumes at any step without replaying the ones before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import grain
import numpy as np


class Batch(NamedTuple):
    """Arrays int32 [batch size, seq_len]; a target is the token after."""

    tokens_BS: np.ndarray
    targets_BS: np.ndarray
    starts_BS: np.ndarray | None = None


_PREFETCHED_BATCHES = 2

WindowSource = grain.sources.RandomAccessDataSource[np.ndarray]
"""Random access to samples, each int32 [seq_len + 1]."""


@dataclass(frozen=True, eq=False)
class Windows:
    """`tokens` [tokens] cut into windows of `seq_len` + 1 at stride `seq_len`, so that each token is a target once.

    The first token is no target, nor are those of a last, incomplete window.
    """

    tokens: np.ndarray
    seq_len: int

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.seq_len

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self.seq_len
        return self.tokens[start : start + self.seq_len + 1].astype(np.int32)


def check_fills_a_batch(windows: Windows, global_batch_size: int, split: str) -> None:
    """Raises ValueError if the split, called `split` in the message, has too few windows for one batch."""
    if len(windows) >= global_batch_size:
        return
    largest = {
        "train.global_batch_size": len(windows),
        "train.seq_len": max(len(windows.tokens) - 1, 0) // global_batch_size,
    }
    remedies = [f"a {key} of at most {value}" for key, value in largest.items() if value > 0]
    raise ValueError(
        f"train.global_batch_size = {global_batch_size} needs as many windows of train.seq_len = {windows.seq_len}, "
        f"but the {split} text ({len(windows.tokens)} tokens) has {len(windows)}; "
        f"use {' or '.join([*remedies, f'more {split} text (data.valid_fraction)'])}"
    )


class TrainStream:
    """The training samples, reshuffled every epoch, without end; an epoch holds each sample once.

    A batch is the samples after a number of others; it may span two epochs.
    """

    def __init__(self, windows: WindowSource, global_batch_size: int, seed: int):
        # Grain shuffles epoch e with seed + e: without spreading, seed 1 would begin with the second epoch of seed 0.
        spread_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._samples = grain.MapDataset.source(windows).shuffle(spread_seed).repeat()
        self._prefetched = _PREFETCHED_BATCHES * global_batch_size

    def batch(self, start: int, size: int) -> Batch:
        """`size` samples from sample `start` on, counted from 0."""
        return next(self.iterate(start, [size]))

    def iterate(self, start: int, sizes: Iterable[int]) -> Iterator[Batch]:
        """Batches of `sizes`, the first from sample `start` on, read ahead by a thread."""
        ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=self._prefetched)
        samples = iter(self._samples[start:].to_iter_dataset(ahead))
        try:
            for size in sizes:
                yield _inputs_and_targets(np.stack([*islice(samples, size)]))
        finally:
            samples.close()


class HeldOut:
    """The held-out samples in one fixed order, of which every beginning is spread evenly over the text."""

    def __init__(self, windows: WindowSource, global_batch_size: int):
        self._windows = windows
        self._global_batch_size = global_batch_size

    @property
    def max_batches(self) -> int:
        """Number of batches without a repeated sample."""
        return len(self._windows) // self._global_batch_size

    def batches(self, count: int) -> Iterator[Batch]:
        """The first `count` batches, the same at every call. Raises ValueError above `max_batches`."""
        if not 1 <= count <= self.max_batches:
            raise ValueError(
                f"{count} held-out batches of {self._global_batch_size} windows cannot be had from "
                f"{len(self._windows)} windows; use 1 to {self.max_batches}"
            )
        order = _spread_order(len(self._windows))
        samples = (self._windows[index] for index in order)
        return (_inputs_and_targets(np.stack([*islice(samples, self._global_batch_size)])) for _ in range(count))


def _spread_order(count: int) -> Iterator[int]:
    """Each of 0 .. `count` - 1 once, every beginning spread evenly: the van der Corput sequence in base 2."""
    bits = (count - 1).bit_length()
    for i in range(2**bits):
        reversed_i = int(f"{i:0{bits}b}"[::-1], 2)
        if reversed_i < count:
            yield reversed_i


def _inputs_and_targets(windows_BT: np.ndarray) -> Batch:
    """Windows [B, S + 1] to inputs [B, S] and targets [B, S]."""
    return Batch(windows_BT[:, :-1], windows_BT[:, 1:])
