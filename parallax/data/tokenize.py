"""Text to ids on disk, once: for `parallax tokenize`, and for a run whose text is not read a token a byte. No jax."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parallax.config import SOURCES, ConfigError, show
from parallax.data.files import PIECE_CHARACTERS, Piece, TextFile, read_pieces
from parallax.data.indexed import FORMAT, Indexed, open_indexed, write_indexed
from parallax.data.tokenizer import END_OF_TEXT, Tokenizer

_BATCH_CHARACTERS = 4 * PIECE_CHARACTERS  # handed to the tokenizer at once, which spreads the pieces over its threads
_LEFTOVER_S = 24 * 3600


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
            hold = f"and {len(files) - 1} more files hold" if len(files) > 1 else "holds"
            raise ConfigError([f"{files[0].path} {hold} no document with text; use files that do"])

    return write_indexed(prefix, tokenizer.dtype, pieces(), facts)


def token_pieces(
    files: Sequence[TextFile], tokenizer: Tokenizer, text_key: str, documents: Counter[str]
) -> Iterator[tuple[np.ndarray, bool]]:
    """Ids, and whether a document ends with them: then the last is the separator. Documents without a token are left
    out; the others are counted in `documents`, by the file's name."""
    inside = False
    for batch in _batches(files, tokenizer, text_key):
        for (file, piece), ids in zip(batch, _encode(batch, tokenizer), strict=True):
            inside = inside or len(ids) > 0
            if piece.ends and inside:
                documents[file.name] += 1
                inside = False
                yield np.append(ids, ids.dtype.type(tokenizer.separator_id)), True
            elif inside:
                yield ids, False


def _batches(files: Sequence[TextFile], tokenizer: Tokenizer, text_key: str) -> Iterator[list[tuple[TextFile, Piece]]]:
    """About _BATCH_CHARACTERS at once."""
    batch, characters = [], 0
    for file in files:
        for piece in read_pieces(file, text_key, decode=not tokenizer.is_bytes):
            batch.append((file, piece))
            characters += len(piece.text) + 1
            if characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    yield batch


def _encode(batch: Sequence[tuple[TextFile, Piece]], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Raises ConfigError that names the first piece of which the tokenizer can make no ids."""
    try:
        return tokenizer.encode([piece.text for _, piece in batch])
    except ValueError:
        for file, piece in batch:
            try:
                tokenizer.encode([piece.text])
            except ValueError as error:
                where = f"{file.path}, line {piece.line}" if piece.line else str(file.path)
                rule = f"the tokenizer {show(tokenizer.name)} cannot encode it: {error}"
                raise ConfigError([f"{where}: {rule}; use one with a token for unknown text"]) from error
        raise


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
        if (opened := _open_entry(entry, files, vocab_size)) is None:
            root.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(root)
            _fill(entry, files, tokenizer, text_key, source, vocab_size)
            opened = _open_entry(entry, files, vocab_size)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home
        reason = error.strerror if isinstance(error, OSError) else str(error)
        where = f"the cache of tokenized text cannot be written: {reason}"
        ahead = "set XDG_CACHE_HOME to a folder that can, or tokenize ahead with `parallax tokenize`"
        place = error.filename if isinstance(error, OSError) and error.filename else "~/.cache"
        raise ConfigError([f"{place}: {where}; {ahead}"]) from error
    if opened is None:
        raise ConfigError([f"{entry}, just made, cannot be read back; set XDG_CACHE_HOME to another folder"])
    return opened


def _open_entry(entry: Path, files: Sequence[TextFile], vocab_size: int) -> tuple[Indexed, list[int]] | None:
    """None where the entry is not there, or not whole."""
    try:
        indexed = open_indexed(entry / "tokens", vocab_size)
    except ConfigError:  # the vocabulary is large enough: it was compared with the tokenizer's
        return None
    documents = indexed.facts.get("files")
    if not isinstance(documents, dict) or not documents.keys() <= {file.name for file in files}:
        return None
    counts = [documents.get(file.name, 0) for file in files]
    if any(type(count) is not int or count < 0 for count in counts) or sum(counts) != indexed.number_of_documents:
        return None
    return indexed, counts


def _cache_root() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "parallax"


def _key(files: Sequence[TextFile], tokenizer: Tokenizer, text_key: str) -> str:
    stamps = [[str(file.path.absolute()), file.name, file.size, file.mtime_ns] for file in files]
    what = [FORMAT, stamps, tokenizer.hash, text_key, tokenizer.separator_id]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]


def _fill(
    entry: Path, files: Sequence[TextFile], tokenizer: Tokenizer, text_key: str, source: str, vocab_size: int
) -> None:
    """The entry appears whole or not at all: a folder written beside it, then renamed. One that is damaged gives way;
    one that another process has made meanwhile stays."""
    print(f"tokenizing {show(source)} into {entry.parent}, once", file=sys.stderr)
    if source not in SOURCES:
        print(f"to do it ahead: {_command(source, tokenizer, text_key)}, and data.source = PREFIX", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=f".{entry.name}.", dir=entry.parent, ignore_cleanup_errors=True) as beside:
        made = Path(beside, "made")
        made.mkdir()
        tokenize_files(files, tokenizer, text_key, made / "tokens", documents=Counter())
        if os.path.lexists(entry) and _open_entry(entry, files, vocab_size) is None:
            entry.rename(Path(beside, "damaged"))
        try:
            made.rename(entry)
        except OSError:
            if not entry.exists():  # else another process has made the same meanwhile
                raise


def _command(source: str, tokenizer: Tokenizer, text_key: str) -> str:
    words = ["parallax", "tokenize", source, "-o", "PREFIX", "--tokenizer", tokenizer.name]
    words += ["--text-key", text_key] if text_key != "text" else []
    words += ["--separator", tokenizer.separator] if tokenizer.separator not in ("\0", *END_OF_TEXT) else []
    return shlex.join(words)


def _remove_leftovers(root: Path) -> None:
    """Deletes the folders that killed processes left beside the entries, once nothing is written there for a day."""
    for folder in root.glob(".*.*"):
        with contextlib.suppress(OSError):
            newest = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
            if time.time() - newest > _LEFTOVER_S:
                shutil.rmtree(folder, ignore_errors=True)
