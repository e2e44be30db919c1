"""Tokens in place: arrays that are never built, read a window at a time from memory and from files. No jax."""

from __future__ import annotations

import functools
import hashlib
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np

from parallax.config import ConfigError
from parallax.data.files import TextFile

_OPEN_FILES = 128  # at once: a process has about a thousand descriptors
_HASHED_ENDS, _HASHED_BLOCKS, _HASHED_BLOCK = 1 << 18, 64, 1 << 10  # tokens, blocks, tokens: 1 MiB and 4 KiB of int32


class Tokens(Protocol):
    """Documents one after the other, each ended by its separator."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids [stop - start], of an integer dtype. Raises ConfigError where a file does not hold them (any more)."""
        ...

    def document_starts(self, start: int, stop: int) -> list[int]:
        """The positions in [start, stop) at which a document begins, ascending."""
        ...


@dataclass(frozen=True, eq=False)
class InMemory:
    """`tokens` [tokens], in which each token `separator` ends a document."""

    tokens: np.ndarray
    separator: int

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.tokens[start:stop]

    def document_starts(self, start: int, stop: int) -> list[int]:
        after = np.flatnonzero(self.tokens[max(start - 1, 0) : max(stop - 1, 0)] == self.separator)
        return [0] * (start == 0 < stop) + [int(i) for i in after + max(start - 1, 0) + 1]


@dataclass(frozen=True, eq=False)
class TextBytes:
    """Bytes `start` to `stop` of a text file, a token a byte, and after the last byte of the file the separator."""

    file: TextFile
    separator: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start + (self.stop == self.file.size)

    def read(self, start: int, stop: int) -> np.ndarray:
        text = _read(self.file, self.start + start, min(self.start + stop, self.stop))
        separator = np.array([self.separator], np.uint8)
        return np.concatenate([text, separator]) if stop > self.stop - self.start else text

    def document_starts(self, start: int, stop: int) -> list[int]:
        return [0] * (start == 0 < stop)


class Joined:
    """Tokens one after the other."""

    def __init__(self, parts: Iterable[Tokens]):
        self._parts = tuple(parts)
        self._starts = [0, *accumulate(map(len, self._parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        pieces = [
            self._parts[i].read(max(start - begin, 0), min(stop - begin, len(self._parts[i])))
            for i, begin in self._overlapping(start, stop)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def document_starts(self, start: int, stop: int) -> list[int]:
        return [
            begin + at
            for i, begin in self._overlapping(start, stop)
            for at in self._parts[i].document_starts(max(start - begin, 0), min(stop - begin, len(self._parts[i])))
        ]

    def _overlapping(self, start: int, stop: int) -> Iterable[tuple[int, int]]:
        """The parts, and where each begins, that hold positions of [start, stop)."""
        first = bisect_right(self._starts, start) - 1
        last = bisect_left(self._starts, stop)
        return ((i, self._starts[i]) for i in range(first, last))


class _Opened:
    """A descriptor that is closed with its last reader: one thread may read what the cache lets go in another."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


def _read(file: TextFile, start: int, stop: int) -> np.ndarray:
    """Bytes `start` to `stop` of the file, uint8. Not mapped: to read what a file has lost since it was mapped kills
    the process."""
    try:
        opened = _open(file)
        size = os.fstat(opened.descriptor).st_size
        text = np.frombuffer(os.pread(opened.descriptor, stop - start, start), np.uint8)
    except OSError as error:
        raise ConfigError([f"{file.path} cannot be read: {error.strerror}; make it readable"]) from error
    if size != file.size or len(text) != stop - start:
        raise ConfigError([_changed(file)])
    return text


@functools.lru_cache(_OPEN_FILES)
def _open(file: TextFile) -> _Opened:
    opened = _Opened(os.open(file.path, os.O_RDONLY))
    found = os.fstat(opened.descriptor)
    if (found.st_size, found.st_mtime_ns) != (file.size, file.mtime_ns):
        raise ConfigError([_changed(file)])
    return opened


def _changed(file: TextFile) -> str:
    return f"{file.path} was changed while it was in use; start again"


def content_hash(*sides: Tokens) -> str:
    """A SHA-256 of some of the tokens, as int32: of each side the first and the last _HASHED_ENDS, and _HASHED_BLOCKS
    evenly spaced blocks of _HASHED_BLOCK, so that it takes no longer for more text. Raises ConfigError as `read`."""
    digest = hashlib.sha256()
    for tokens in sides:
        last = max(len(tokens) - _HASHED_BLOCK, 0)
        blocks = {last * i // (_HASHED_BLOCKS - 1) for i in range(_HASHED_BLOCKS)}
        ranges = [(0, _HASHED_ENDS), *((start, start + _HASHED_BLOCK) for start in sorted(blocks))]
        done = 0
        for start, stop in [*ranges, (len(tokens) - _HASHED_ENDS, len(tokens))]:
            start, stop = max(start, done), min(stop, len(tokens))  # no token twice
            if start < stop:
                digest.update(tokens.read(start, stop).astype("<i4").tobytes())
                done = stop
    return digest.hexdigest()
