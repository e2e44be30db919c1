"""Where tokens come from: text on this machine as a `Corpus`, and synthetic samples of any size. No jax."""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SEPARATOR = b"\0"
"""Stands between documents. Byte 0 occurs in no Python source file: the interpreter refuses it."""

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True, eq=False)
class Corpus:
    """Text as tokens, split by document. `train` and `valid` have shape [tokens] and an unsigned integer dtype."""

    train: np.ndarray
    valid: np.ndarray
    train_files: int
    valid_files: int


def python_stdlib(valid_fraction: float) -> Corpus:
    """The standard library of the running interpreter: some 12 MB (Python 3.11) of real text on every machine.

    Raises ValueError as `python_files` does.
    """
    return python_files(Path(sysconfig.get_paths()["stdlib"]), valid_fraction)


def python_files(root: Path, valid_fraction: float) -> Corpus:
    """The `*.py` files under `root`, installed packages and tests excepted, in order of relative path; a token a byte.

    A file is held out if the CRC-32 of its relative path, as a fraction of 2^32, lies below `valid_fraction`: the
    split of a file depends on its name alone, whatever else lies beside it. Raises ValueError if `valid_fraction` is
    not between 0 and 1, or if there is no such file.
    """
    if not 0 < valid_fraction < 1:
        raise ValueError(
            f"data.valid_fraction = {valid_fraction} is not between 0 and 1, both excluded; "
            "use 0.02 to hold out about one file in fifty"
        )
    paths = sorted(_python_paths(root))
    if not paths:
        raise ValueError(f"{root} holds no *.py file to read; use a Python whose standard library is not zipped away")
    held_out = {path for path in paths if zlib.crc32(path.encode()) < valid_fraction * 2**32}
    train = [root / path for path in paths if path not in held_out]
    valid = [root / path for path in paths if path in held_out]
    return Corpus(_byte_tokens(train), _byte_tokens(valid), len(train), len(valid))


def _python_paths(root: Path) -> Iterator[str]:
    """Paths relative to `root`, with forward slashes on every system."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        for name in files:
            if name.endswith(".py"):
                yield Path(folder, name).relative_to(root).as_posix()


def _byte_tokens(paths: list[Path]) -> np.ndarray:
    """The files' bytes with `SEPARATOR` between files: uint8 [tokens]."""
    return np.frombuffer(SEPARATOR.join(path.read_bytes() for path in paths), np.uint8)


@dataclass(frozen=True)
class Synthetic:
    """Random tokens, drawn evenly from the vocabulary, so that the best loss is log(vocab_size).

    A random-access source of windows, int32 [seq_len + 1]. Sample i depends on (seed, indices[i]) alone.
    """

    vocab_size: int
    seed: int
    seq_len: int
    indices: range

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> np.ndarray:
        rng = np.random.default_rng((self.seed, self.indices[index]))
        return rng.integers(self.vocab_size, size=self.seq_len + 1, dtype=np.int32)


def synthetic(vocab_size: int, seed: int, seq_len: int) -> tuple[Synthetic, Synthetic]:
    """Training and held-out sources that share no sample, each of 2^31 windows: more than any run reads."""
    half = 2**31
    return (
        Synthetic(vocab_size, seed, seq_len, range(half)),
        Synthetic(vocab_size, seed, seq_len, range(half, 2 * half)),
    )
