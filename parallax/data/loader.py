"""From tokens to batches: windows, the shuffled training stream and the fixed held-out batches.

What a step reads depends on the seed and on the number of samples before it, and on nothing else: not on the layout,
the hosts, or how the run got there. So the number of samples seen is the whole position of the data, and a run
resumes at any sample without replaying the ones before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple, Protocol

import numpy as np

from parallax.config import ConfigError, either
from parallax.data.tokens import Tokens

_READERS = 2  # threads
_BATCHES_AHEAD = 2


class Sample(NamedTuple):
    """`window_T` int32 [seq_len + 1]; `starts_S` as a row of `Batch.starts_BS`."""

    window_T: np.ndarray
    starts_S: np.ndarray | None = None


class Batch(NamedTuple):
    """All int32 [samples, seq_len]. A target is the token after.

    `starts_BS`, with data.isolate_documents alone: the position in the window of the first token of each input's
    document, 0 if the document began before the window. Attention that keeps to starts[i] <= j <= i stays inside.
    """

    tokens_BS: np.ndarray
    targets_BS: np.ndarray
    starts_BS: np.ndarray | None = None


class WindowSource(Protocol):
    """Random access to samples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


@dataclass(frozen=True, eq=False)
class Windows:
    """`tokens` cut into windows of `seq_len` + 1 at stride `seq_len`, so that each token is a target once.

    The first token is no target, nor are those of a last, incomplete window. A window may hold the end of one document
    and the beginning of the next; attention crosses from one to the other unless `isolate_documents`.
    """

    tokens: Tokens
    seq_len: int
    isolate_documents: bool = False

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.seq_len

    def __getitem__(self, index: int) -> Sample:
        start, stop = index * self.seq_len, (index + 1) * self.seq_len
        window_T = self.tokens.read(start, stop + 1).astype(np.int32)
        if not self.isolate_documents:
            return Sample(window_T)
        starts_S = np.zeros(self.seq_len, np.int32)
        for at in self.tokens.document_starts(start, stop):
            starts_S[at - start] = at - start
        return Sample(window_T, np.maximum.accumulate(starts_S))


def check_fills_a_batch(
    windows: Windows, global_batch_size: int, side: Literal["training", "held-out"], source: str, share: float = 1.0
) -> None:
    """Raises ConfigError if a side of a source, as `source` names it, has too few windows for its share of a batch."""
    needed = max(1, math.ceil(share * global_batch_size - 1e-6))
    if len(windows) >= needed:
        return
    tokens = len(windows.tokens)
    largest = {
        "train.global_batch_size": math.floor(len(windows) / share),
        "train.seq_len": max(tokens - 1, 0) // needed,
    }
    remedies = [f"a {key} of at most {value}" for key, value in largest.items() if value > 0]
    remedies += [f"a {'smaller' if side == 'training' else 'larger'} data.valid_fraction", "a longer text"]
    many = "as many windows" if share == 1 else f"a share of {needed} windows"
    raise ConfigError(
        [
            f"train.global_batch_size = {global_batch_size} needs {many} of train.seq_len = {windows.seq_len}, "
            f"but the {side} text of {source} ({tokens} tokens) has {len(windows)}; use {either(remedies)}"
        ]
    )


def mixing_weights(weights: Sequence[float]) -> list[int]:
    """Weights as hundredths of the smallest: these Grain keeps to exactly, others it rounds to such by itself."""
    return [round(100 * weight / min(weights)) for weight in weights]


class TrainStream:
    """The training samples without end; each source is reshuffled every epoch, which holds each of its samples once.

    Several sources are mixed by `weights`: every beginning of the stream holds their shares, to a sample or two.
    """

    def __init__(self, sources: Sequence[WindowSource], weights: Sequence[float], seed: int):
        import grain  # here: the command line reads this package without it

        # Grain shuffles epoch e with seed + e: without spreading, seed 1 would begin with the second epoch of seed 0.
        seeds = np.random.SeedSequence(seed).generate_state(len(sources))
        shuffled = [
            grain.MapDataset.source(source).shuffle(int(spread_seed)).repeat()
            for source, spread_seed in zip(sources, seeds, strict=True)
        ]
        self._samples = shuffled[0] if len(shuffled) == 1 else grain.MapDataset.mix(shuffled, weights)

    def batch(self, start: int, size: int) -> Batch:
        """Samples `start` to `start + size - 1` of the stream, counted from 0."""
        samples = [self._samples[index] for index in range(start, start + size)]
        return _stack([sample for sample in samples if sample is not None])  # None: dropped, as nothing here does

    def iterate(self, start: int, sizes: Iterable[int]) -> Generator[Batch, None, None]:
        """Batches of `sizes` from sample `start` on, read ahead by threads.

        What goes wrong in reading one is raised where that batch would have come.
        """
        readers = ThreadPoolExecutor(_READERS, thread_name_prefix="data")
        try:
            ahead: deque[Future[Batch]] = deque()
            for size in sizes:
                ahead.append(readers.submit(self.batch, start, size))
                start += size
                if len(ahead) > _BATCHES_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            readers.shutdown(cancel_futures=True)


class HeldOut:
    """The held-out samples in one fixed order, of which every beginning is spread evenly over the text.

    Several sources are mixed by `weights`, as in training.
    """

    def __init__(self, sources: Sequence[WindowSource], weights: Sequence[float], global_batch_size: int):
        import grain

        self._sources = sources
        self._global_batch_size = global_batch_size
        turns = [
            grain.MapDataset.range(len(source)).map(lambda _, number=number: number)
            for number, source in enumerate(sources)
        ]
        self._turns = turns[0] if len(turns) == 1 else grain.MapDataset.mix(turns, weights)  # whose sample is next

    @property
    def max_batches(self) -> int:
        """Number of batches without a repeated sample."""
        return len(self._turns) // self._global_batch_size

    def batches(self, count: int) -> Iterator[Batch]:
        """The first `count` batches, the same at every call. Raises ValueError above `max_batches`."""
        if not 1 <= count <= self.max_batches:
            raise ValueError(
                f"{count} held-out batches of {self._global_batch_size} windows cannot be had from "
                f"{len(self._turns)} windows; use 1 to {self.max_batches}"
            )
        samples = self._in_order()
        return (_stack([*islice(samples, self._global_batch_size)]) for _ in range(count))

    def _in_order(self) -> Iterator[Sample]:
        orders = [_spread_order(len(source)) for source in self._sources]
        for index in range(len(self._turns)):
            number = self._turns[index]
            assert number is not None  # no transformation drops a sample
            yield self._sources[number][next(orders[number])]


def _spread_order(count: int) -> Iterator[int]:
    """Each of 0 .. `count` - 1 once, every beginning spread evenly: the van der Corput sequence in base 2."""
    bits = (count - 1).bit_length()
    for i in range(2**bits):
        reversed_i = int(f"{i:0{bits}b}"[::-1], 2)
        if reversed_i < count:
            yield reversed_i


def _stack(samples: Sequence[Sample]) -> Batch:
    windows_BT = np.stack([sample.window_T for sample in samples])
    starts = [sample.starts_S for sample in samples if sample.starts_S is not None]
    return Batch(windows_BT[:, :-1], windows_BT[:, 1:], np.stack(starts) if starts else None)
