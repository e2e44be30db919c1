"""Text to ids on disk, once: for `parallax tokenize`, and for a run whose text is not read a token a byte. No jax."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parallax.config import SOURCES, ConfigError, show
from parallax.data.files import PIECE_CHARACTERS, TextFile, read_pieces
from parallax.data.indexed import FORMAT, Indexed, open_indexed, write_indexed
from parallax.data.tokenizer import Tokenizer

_BATCH_CHARACTERS = 4 * PIECE_CHARACTERS  # handed to the tokenizer at once, which spreads the pieces over its threads


def tokenize_files(
    files: Sequence[TextFile], tokenizer: Tokenizer, text_key: str, prefix: Path, documents: Counter[str] | None = None
) -> dict[str, Any]:
    """Writes PREFIX.bin, PREFIX.idx and PREFIX.json, and returns what the last holds; `documents` too, where given: it
    counts documents by the file's name.

    Raises ConfigError for text that cannot be read (see `read_pieces`), for none at all, and for a place that cannot
    be written.
    """
    facts: dict[str, Any] = {"tokenizer": Path(tokenizer.name).name, "tokenizer_hash": tokenizer.hash}
    facts |= {"vocab_size": tokenizer.vocab_size, "separator": tokenizer.separator}
    facts |= {"separator_id": tokenizer.separator_id} | ({} if documents is None else {"files": documents})
    counts = Counter() if documents is None else documents

    def pieces() -> Iterator[tuple[np.ndarray, bool]]:
        yield from token_pieces(files, tokenizer, text_key, counts)
        if not counts:
            more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
            raise ConfigError([f"{files[0].path}{more} hold no document with text; use files that do"])

    return write_indexed(prefix, tokenizer.dtype, pieces(), facts)


def token_pieces(
    files: Sequence[TextFile], tokenizer: Tokenizer, text_key: str, documents: Counter[str]
) -> Iterator[tuple[np.ndarray, bool]]:
    """Ids, and whether a document ends with them: then the last is the separator. Documents without a token are left
    out; the others are counted in `documents`, by the file's name."""
    inside = False
    for batch in _batches(files, tokenizer, text_key):
        encoded = tokenizer.encode([text for _, text, _ in batch])
        for (name, _, ends), ids in zip(batch, encoded, strict=True):
            inside = inside or len(ids) > 0
            if ends and inside:
                documents[name] += 1
                inside = False
                yield np.append(ids, ids.dtype.type(tokenizer.separator_id)), True
            elif inside:
                yield ids, False


def _batches(
    files: Sequence[TextFile], tokenizer: Tokenizer, text_key: str
) -> Iterator[list[tuple[str, str | bytes, bool]]]:
    """(name of the file, text, whether a document ends with it), about _BATCH_CHARACTERS at once."""
    batch, characters = [], 0
    for file in files:
        for text, ends in read_pieces(file, text_key, decode=not tokenizer.is_bytes):
            batch.append((file.name, text, ends))
            characters += len(text) + 1
            if characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    yield batch


# The cache of a run


def open_tokenized(
    files: Sequence[TextFile], tokenizer: Tokenizer, text_key: str, source: str, vocab_size: int
) -> tuple[Indexed, list[int]]:
    """The files' ids, and how many documents each file has; tokenized now if they are not in the cache.

    The cache is $XDG_CACHE_HOME/parallax, by default ~/.cache/parallax. An entry is found again while the files'
    paths, sizes and times, what the tokenizer does, the text key and the separator are the same; old ones stay until
    they are deleted. Raises ConfigError as `tokenize_files` does.
    """
    try:
        root = _cache_root()
        entry = root / _key(files, tokenizer, text_key)
        if not entry.exists():
            _fill(entry, files, tokenizer, text_key, source)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home
        reason = error.strerror if isinstance(error, OSError) else str(error)
        where = f"the cache of tokenized text cannot be written: {reason}"
        ahead = "set XDG_CACHE_HOME to a folder that can, or tokenize ahead with `parallax tokenize`"
        place = error.filename if isinstance(error, OSError) and error.filename else "~/.cache"
        raise ConfigError([f"{place}: {where}; {ahead}"]) from error
    indexed = open_indexed(entry / "tokens", vocab_size)
    counts = indexed.facts["files"]
    return indexed, [counts.get(file.name, 0) for file in files]


def _cache_root() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "parallax"


def _key(files: Sequence[TextFile], tokenizer: Tokenizer, text_key: str) -> str:
    stamps = [[str(file.path.absolute()), file.name, file.size, file.mtime_ns] for file in files]
    what = [FORMAT, stamps, tokenizer.hash, text_key, tokenizer.separator_id]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]


def _fill(entry: Path, files: Sequence[TextFile], tokenizer: Tokenizer, text_key: str, source: str) -> None:
    """The entry appears whole or not at all: a folder written beside it, then renamed."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    beside = entry.with_name(f".{entry.name}.{os.getpid()}")
    beside.mkdir()
    ahead = ["parallax", "tokenize", source, "-o", "PREFIX", "--tokenizer", tokenizer.name, "--text-key", text_key]
    hint = "" if source in SOURCES else f"; to do it ahead: {shlex.join(ahead)}, and data.source = PREFIX"
    print(f"tokenizing {show(source)} into {entry}, once{hint}", file=sys.stderr)
    try:
        tokenize_files(files, tokenizer, text_key, beside / "tokens", documents=Counter())
        try:
            beside.rename(entry)
        except OSError:
            if not entry.exists():  # else another process has made the same meanwhile
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
