"""Files mapped into memory. No jax."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from parallax.config import ConfigError


class MappedFile:
    """The bytes of a file that has some, read as they are used, and held in no memory of this process.

    To read what a file has lost since it was mapped kills the process: call `check` before each read. Raises OSError
    where the file cannot be opened.
    """

    def __init__(self, path: Path):
        self._path = path
        with path.open("rb") as opened:
            self._bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._bytes)

    def array(self, dtype: np.typing.DTypeLike, offset: int = 0, count: int = -1) -> np.ndarray:
        """[count], mapped: that many numbers from byte `offset` on, by default all."""
        return np.frombuffer(self._bytes, dtype, count, offset)

    def check(self) -> None:
        """Raises ConfigError if the file's size is no longer what it was: one system call, on an open descriptor."""
        if (size := self._bytes.size()) != len(self._bytes):
            message = f"{self._path} was changed while it was in use: it had {len(self._bytes)} bytes, now {size}"
            raise ConfigError([f"{message}; start again"])
