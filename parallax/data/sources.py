"""Where tokens come from: text of this machine, indexed datasets and synthetic samples, and which part is held out.

Held out is a share of about data.valid_fraction: of a folder the files that fit into it, in the order of the hashes of
their relative paths; of python-stdlib those whose hash lies below it; of a .jsonl file or an indexed dataset the last
documents; of a single document its end. No jax.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from parallax.config import SOURCES, ConfigError
from parallax.data.files import TextFile, find_files, text_files
from parallax.data.indexed import Indexed, IndexedTokens, open_indexed
from parallax.data.loader import Sample
from parallax.data.tokenize import open_tokenized
from parallax.data.tokenizer import Tokenizer
from parallax.data.tokens import InMemory, Joined, TextBytes, Tokens

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

    Raises ConfigError as `python_files` does.
    """
    return python_files(Path(sysconfig.get_paths()["stdlib"]), valid_fraction)


def python_files(root: Path, valid_fraction: float) -> Corpus:
    """The `*.py` files under `root`, installed packages and tests excepted, in order of relative path; a token a byte.

    A file is held out if the CRC-32 of its relative path, as a fraction of 2^32, lies below `valid_fraction`: the
    split of a file depends on its name alone, whatever else lies beside it. Raises ConfigError if `valid_fraction` is
    not between 0 and 1, or if there is no such file.
    """
    if not 0 < valid_fraction < 1:
        rule = "is not between 0 and 1, both excluded; use 0.02 to hold out about one file in fifty"
        raise ConfigError([f"data.valid_fraction = {valid_fraction} {rule}"])
    paths = _python_paths(root)
    train = [root / path for path in paths if not _is_held_out(path, valid_fraction)]
    valid = [root / path for path in paths if _is_held_out(path, valid_fraction)]
    return Corpus(_byte_tokens(train), _byte_tokens(valid), len(train), len(valid))


def _python_paths(root: Path) -> list[str]:
    """Paths relative to `root`, in order, with forward slashes on every system. Raises ConfigError if there is none."""
    if paths := sorted(_walk(root)):
        return paths
    use = "use a Python whose standard library is not zipped away"
    raise ConfigError([f"{root} holds no *.py file to read; {use}"])


def _walk(root: Path) -> Iterator[str]:
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

    A random-access source of samples. Sample i depends on (seed, indices[i]) alone. It has no documents: all `starts`
    are 0.
    """

    vocab_size: int
    seed: int
    seq_len: int
    indices: range
    isolate_documents: bool = False

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        rng = np.random.default_rng((self.seed, self.indices[index]))
        window_T = rng.integers(self.vocab_size, size=self.seq_len + 1, dtype=np.int32)
        return Sample(window_T, np.zeros(self.seq_len, np.int32) if self.isolate_documents else None)


def synthetic(vocab_size: int, seed: int, seq_len: int, isolate_documents: bool = False) -> tuple[Synthetic, Synthetic]:
    """Training and held-out sources that share no sample, each of 2^31 windows: more than any run reads."""
    half = 2**31
    return (
        Synthetic(vocab_size, seed, seq_len, range(half), isolate_documents),
        Synthetic(vocab_size, seed, seq_len, range(half, 2 * half), isolate_documents),
    )


# Sources with documents


@dataclass(frozen=True, eq=False)
class Split:
    """A source's two sides. `made_by` is the (name, hash) of the tokenizer that made the tokens, None if unknown."""

    train: Tokens
    held_out: Tokens
    documents: int
    made_by: tuple[str, str] | None
    corpus: Corpus | None = None


def split_stdlib(tokenizer: Tokenizer, valid_fraction: float, text_key: str, vocab_size: int) -> Split:
    """The standard library, a file a document. Raises ConfigError as `python_stdlib` and `split_text` do."""
    root = Path(sysconfig.get_paths()["stdlib"])
    if not tokenizer.is_bytes or tokenizer.separator_id != SEPARATOR[0]:
        files = text_files(root, _python_paths(root))
        return _split_files(files, tokenizer, valid_fraction, text_key, "python-stdlib", vocab_size)
    corpus = python_files(root, valid_fraction)
    train, held_out = InMemory(corpus.train, SEPARATOR[0]), InMemory(corpus.valid, SEPARATOR[0])
    documents = corpus.train_files + corpus.valid_files
    return Split(train, held_out, documents, (tokenizer.name, tokenizer.hash), corpus)


def split_text(
    source: str, where: str, tokenizer: Tokenizer, valid_fraction: float, text_key: str, vocab_size: int
) -> Split:
    """A text file, a .jsonl file or a folder. Text is read where it lies if a token is a byte, else from the cache.

    `where` names the source in messages. Raises ConfigError as `find_files` and `open_tokenized` do.
    """
    files = find_files(source, where, SOURCES)
    return _split_files(files, tokenizer, valid_fraction, text_key, source, vocab_size)


def split_indexed(prefix: Path, valid_fraction: float, vocab_size: int) -> Split:
    """An indexed dataset, its last documents held out. Raises ConfigError as `open_indexed` does."""
    indexed = open_indexed(prefix, vocab_size)
    made_by = (
        (indexed.facts["tokenizer"], indexed.facts["tokenizer_hash"]) if "tokenizer_hash" in indexed.facts else None
    )
    train, held_out = _ends(indexed, valid_fraction)
    return Split(train, held_out, indexed.number_of_documents, made_by)


def _split_files(
    files: Sequence[TextFile],
    tokenizer: Tokenizer,
    valid_fraction: float,
    text_key: str,
    source: str,
    vocab_size: int,
) -> Split:
    made_by = Path(tokenizer.name).name, tokenizer.hash
    if tokenizer.is_bytes and not any(file.is_jsonl for file in files):
        train, held_out = _byte_sides([file for file in files if file.size], tokenizer.separator_id, valid_fraction)
        return Split(train, held_out, sum(file.size > 0 for file in files), made_by)
    indexed, counts = open_tokenized(files, tokenizer, text_key, source, vocab_size)
    bounds = [indexed.document_start(document) for document in accumulate(counts, initial=0)]
    parts = [
        (file.name, IndexedTokens(indexed, start, stop))
        for file, (start, stop) in zip(files, pairwise(bounds), strict=True)
        if stop > start
    ]
    train, held_out = _sides(parts, valid_fraction) if len(parts) > 1 else _ends(indexed, valid_fraction)
    return Split(train, held_out, indexed.number_of_documents, made_by)


def _byte_sides(files: Sequence[TextFile], separator: int, valid_fraction: float) -> tuple[Tokens, Tokens]:
    whole = [(file.name, TextBytes(file, separator, 0, file.size)) for file in files]
    if len(whole) > 1:
        return _sides(whole, valid_fraction)
    [file] = files
    cut = _tail(file.size, valid_fraction)
    return TextBytes(file, separator, 0, cut), TextBytes(file, separator, cut, file.size)


def _is_held_out(name: str, valid_fraction: float) -> bool:
    return _hash(name) < valid_fraction * 2**32


def _hash(name: str) -> int:
    return zlib.crc32(os.fsencode(name))


def _sides(parts: Sequence[tuple[str, Tokens]], valid_fraction: float) -> tuple[Tokens, Tokens]:
    """Named files, at least two: held out are those that fit into the share, tried in the order of their names' hashes;
    the smallest one where none fits."""
    left = valid_fraction * sum(len(part) for _, part in parts)
    held_out: set[str] = set()
    for name, part in sorted(parts, key=lambda named: _hash(named[0])):
        if len(part) <= left and len(held_out) < len(parts) - 1:
            held_out.add(name)
            left -= len(part)
    held_out = held_out or {min(parts, key=lambda named: len(named[1]))[0]}
    return (
        Joined([part for name, part in parts if name not in held_out]),
        Joined([part for name, part in parts if name in held_out]),
    )


def _ends(indexed: Indexed, valid_fraction: float) -> tuple[Tokens, Tokens]:
    """The first and the last documents, or the beginning and the end of the only one."""
    documents, tokens = indexed.number_of_documents, len(indexed.ids)
    cut = _tail(tokens, valid_fraction)
    if documents > 1:
        cut = indexed.document_start(_first_held_out(documents, indexed.document_start, tokens, valid_fraction))
    return IndexedTokens(indexed, 0, cut), IndexedTokens(indexed, cut, tokens)


def _first_held_out(documents: int, start_of: Callable[[int], int], tokens: int, valid_fraction: float) -> int:
    """The document, of at least two and never the first, whose start is nearest to where the held-out share begins."""
    target = _tail(tokens, valid_fraction)
    after = bisect_left(range(documents), target, key=start_of)
    near = [document for document in (after - 1, after) if 1 <= document < documents]
    return min(near, key=lambda document: abs(start_of(document) - target), default=1)


def _tail(tokens: int, valid_fraction: float) -> int:
    """Where the last share of `tokens` begins: at least one is held out."""
    return tokens - max(1, round(tokens * valid_fraction))
