"""Megatron's indexed dataset: ids in PREFIX.bin, the bounds of sequences and documents in PREFIX.idx. No jax.

The index, little endian: 9 bytes of magic, uint64 version, uint8 code of the ids' type, uint64 number of sequences,
uint64 number of document indices; then int32 lengths of the sequences in tokens, int64 places of the sequences in
PREFIX.bin in bytes, and int64 document indices: the first sequence of each document, at last the number of sequences.
(Megatron-LM, megatron/core/datasets/indexed_dataset.py.) PREFIX.json, where `write_indexed` has left it, holds facts.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from parallax.config import ConfigError, either
from parallax.data.mapped import MappedFile

FORMAT = "parallax-tokens-1"
MAGIC = b"MMIDIDX\x00\x00"
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
SUFFIXES = (".bin", ".idx", ".json")
MAX_SCAN_BYTES = 2 << 30  # of ids whose largest is not known from PREFIX.json, looked through at opening
MAX_SEQUENCE = 2**31 - 1  # tokens: lengths are int32

_HEADER = struct.Struct("<9sQBQQ")
_OFFSETS = {"magic": 0, "version": 9, "dtype": 17}
_TOKENIZER_FACTS = ("tokenizer", "tokenizer_hash")  # both or neither
_CHUNK = 1 << 20


@dataclass(frozen=True, eq=False)
class Indexed:
    """A pair of `files`, mapped. `ids` [tokens]; `pointers` [sequences] in bytes; `documents` [documents + 1]."""

    prefix: Path
    files: tuple[MappedFile, MappedFile]
    ids: np.ndarray
    pointers: np.ndarray
    documents: np.ndarray
    facts: Mapping[str, Any]
    vocab_size: int

    @property
    def number_of_documents(self) -> int:
        return len(self.documents) - 1

    def check_files(self) -> None:
        """Raises ConfigError where one of the files has another size than when it was mapped."""
        for file in self.files:
            file.check()

    def document_start(self, document: int) -> int:
        """The position in `ids` of a document's first token; of the document after the last, the number of tokens."""
        sequence = int(self.documents[document])
        return len(self.ids) if sequence == len(self.pointers) else int(self.pointers[sequence]) // self.ids.itemsize

    def first_document_at(self, position: int) -> int:
        """The first document that begins at `position` or after it; the number of documents where none does."""
        return bisect_left(range(self.number_of_documents), position, key=self.document_start)

    def check_ids(self, start: int, ids: np.ndarray) -> None:
        """Raises ConfigError where one of `ids`, which begin at `start`, is no token of the vocabulary."""
        if ids.size == 0 or (int(ids.min()) >= 0 and int(ids.max()) < self.vocab_size):
            return
        at = int(np.flatnonzero((ids < 0) | (ids >= self.vocab_size))[0])
        raise ConfigError([_bad_id(self.prefix, start + at, int(ids[at]), self.vocab_size)])


@dataclass(frozen=True, eq=False)
class IndexedTokens:
    """Tokens `start` to `stop` of an indexed dataset, as they are: a separator is there only if the files hold it."""

    indexed: Indexed
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, start: int, stop: int) -> np.ndarray:
        self.indexed.check_files()
        ids = self.indexed.ids[self.start + start : self.start + stop]
        self.indexed.check_ids(self.start + start, ids)
        return ids

    def document_starts(self, start: int, stop: int) -> list[int]:
        self.indexed.check_files()
        first = self.indexed.first_document_at(self.start + start)
        last = self.indexed.first_document_at(self.start + stop)
        starts = [self.indexed.document_start(document) - self.start for document in range(first, last)]
        return [0, *starts] if start == 0 < stop and 0 not in starts[:1] else starts


def _bad_id(prefix: Path, at: int, found: int, vocab_size: int) -> str:
    use = f"use model.vocab_size = {found + 1} or more" if found >= 0 else "make it again"
    return f"{prefix}.bin: token {at} is {found}, which is not in 0 to model.vocab_size - 1 = {vocab_size - 1}; {use}"


# Reading


def find_prefix(source: str) -> Path | None:
    """PREFIX, if `source` is PREFIX.bin, PREFIX.idx, or names no file or folder itself but such a pair."""
    if source.endswith((".bin", ".idx")):
        return Path(source[:-4])
    if source and "\0" not in source and not os.path.lexists(source):
        return Path(source) if any(os.path.lexists(source + suffix) for suffix in (".bin", ".idx")) else None
    return None


def open_indexed(prefix: Path, vocab_size: int) -> Indexed:
    """Raises ConfigError, naming file and offset, where the pair is not whole or holds ids beyond the vocabulary.

    Ids are all looked at if there is no PREFIX.json and PREFIX.bin has at most 2 GiB; else as they are read.
    """
    bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    for path, partner in ((bin_path, idx_path), (idx_path, bin_path)):
        if not path.is_file():
            message = f"{path} is missing: {partner} needs it beside it; put both there"
            if not partner.is_file():
                message = f"neither {bin_path} nor {idx_path} is there; use the path of such a pair"
            raise ConfigError([message])
    try:
        bin_size, idx_size = bin_path.stat().st_size, idx_path.stat().st_size
        dtype, sequences, indices = _read_header(idx_path, idx_size)
        index = MappedFile(idx_path)
        lengths, pointers, documents = _index_arrays(index, sequences, indices)
        tokens = _check_index(idx_path, lengths, pointers, documents, dtype.itemsize)
        if bin_size != tokens * dtype.itemsize:
            what = "is cut off" if bin_size < tokens * dtype.itemsize else "is too long"
            raise ConfigError(
                [
                    f"{bin_path} {what} at byte {min(bin_size, tokens * dtype.itemsize)}: it has {bin_size} bytes, "
                    f"but {idx_path} names {tokens} tokens of {dtype.itemsize} bytes; make the pair again"
                ]
            )
        if tokens == 0:
            raise ConfigError([f"{bin_path} holds no token; use a pair that does"])
        ids = MappedFile(bin_path)
        facts = _read_facts(prefix, tokens)
        indexed = Indexed(prefix, (ids, index), ids.array(dtype), pointers, documents, facts, vocab_size)
    except OSError as error:
        raise ConfigError([f"{error.filename} cannot be read: {error.strerror}; make it readable"]) from error
    _check_vocabulary(indexed)
    return indexed


def _read_header(path: Path, size: int) -> tuple[np.dtype, int, int]:
    """The ids' dtype and the numbers of sequences and document indices."""
    again = "use an index that Megatron or `parallax tokenize` made"
    with path.open("rb") as opened:
        header = opened.read(_HEADER.size)
    if header[: len(MAGIC)] != MAGIC[: len(header)] or not header:
        raise ConfigError([f"{path}: byte 0: the magic is {header[: len(MAGIC)]!r}, not {MAGIC!r}; {again}"])
    if len(header) < _HEADER.size:
        raise ConfigError([f"{path} is cut off at byte {size}, in its header of {_HEADER.size} bytes; {again}"])
    _, version, code, sequences, indices = _HEADER.unpack(header)
    if version != 1:
        raise ConfigError([f"{path}: byte {_OFFSETS['version']}: the version is {version}, not 1; {again}"])
    known = {code: np.dtype(dtype) for code, dtype in DTYPES.items()}
    if code not in known or known[code].kind == "f":
        what = f"is {known[code]}, which holds no ids" if code in known else "is not known"
        use = either(f"{number} ({dtype})" for number, dtype in known.items() if dtype.kind != "f")
        raise ConfigError([f"{path}: byte {_OFFSETS['dtype']}: the type code {code} {what}; use {use}"])
    expected = _HEADER.size + 12 * sequences + 8 * indices
    if size != expected:
        what = "is cut off" if size < expected else "is too long"
        raise ConfigError(
            [
                f"{path} {what} at byte {min(size, expected)}: it has {size} bytes, but {sequences} sequences and "
                f"{indices} document indices make {expected}; {again}"
            ]
        )
    if sequences == 0 or indices < 2:
        numbers = f"{sequences} sequences and {indices} document indices"
        raise ConfigError([f"{path} is empty: it has {numbers}; use one with at least 1 and 2"])
    return known[code].newbyteorder("<"), sequences, indices


def _index_arrays(index: MappedFile, sequences: int, indices: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths int32 [sequences], pointers int64 [sequences], document indices int64 [indices]. None is aligned: numpy
    would copy the whole of one to search it, so it is searched with `bisect`."""
    begin = _HEADER.size
    return (
        index.array("<i4", begin, sequences),
        index.array("<i8", begin + 4 * sequences, sequences),
        index.array("<i8", begin + 12 * sequences, indices),
    )


def _check_index(path: Path, lengths: np.ndarray, pointers: np.ndarray, documents: np.ndarray, itemsize: int) -> int:
    """The number of tokens. Raises ConfigError at the first number of the index that does not fit the others."""
    sequences, tokens = len(lengths), 0
    again = "make the index again"
    for start in range(0, sequences, _CHUNK):
        of_chunk = lengths[start : start + _CHUNK].astype(np.int64)
        if (of_chunk < 0).any():
            at = start + int(np.argmax(of_chunk < 0))
            place = _HEADER.size + 4 * at
            raise ConfigError([f"{path}: byte {place}: sequence {at} has length {lengths[at]}, below 0; {again}"])
        ends = tokens + np.cumsum(of_chunk)
        wrong = pointers[start : start + _CHUNK] != (ends - of_chunk) * itemsize
        if wrong.any():
            at = int(np.argmax(wrong))
            place = _HEADER.size + 4 * sequences + 8 * (start + at)
            raise ConfigError(
                [
                    f"{path}: byte {place}: sequence {start + at} is at byte {pointers[start + at]}, but the lengths "
                    f"before it make {(ends - of_chunk)[at] * itemsize}; {again}"
                ]
            )
        tokens = int(ends[-1])
    first = _HEADER.size + 12 * sequences
    for at, wanted in ((0, 0), (len(documents) - 1, sequences)):
        if documents[at] != wanted:
            raise ConfigError(
                [f"{path}: byte {first + 8 * at}: document index {at} is {documents[at]}, not {wanted}; {again}"]
            )
    for start in range(0, len(documents) - 1, _CHUNK):
        falls = np.diff(documents[start : start + _CHUNK + 1]) < 0
        if falls.any():
            at = start + int(np.argmax(falls)) + 1
            what = f"document index {at} is {documents[at]}, less than the {documents[at - 1]} before it"
            raise ConfigError([f"{path}: byte {first + 8 * at}: {what}; {again}"])
    return tokens


def _read_facts(prefix: Path, tokens: int) -> Mapping[str, Any]:
    """PREFIX.json if `write_indexed` made it; nothing if it is not there, or another program's."""
    path = Path(f"{prefix}.json")
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as opened:
            if FORMAT.encode() not in opened.read(64):
                return {}
        facts = json.loads(path.read_text(encoding="utf-8"))
        numbers = [facts[name] for name in ("tokens", "largest_token", "largest_token_position")]
        names = [facts[name] for name in _TOKENIZER_FACTS if name in facts]
        whole = all(type(number) is int for number in numbers) and all(type(name) is str for name in names)
        whole = whole and len(names) in (0, len(_TOKENIZER_FACTS))
    except (ValueError, TypeError, KeyError, RecursionError):
        whole, facts = False, {}
    if not whole:
        raise ConfigError([f"{path} is damaged; delete it, or make it again with `parallax tokenize`"])
    if facts["tokens"] != tokens:
        raise ConfigError(
            [f"{path} counts {facts['tokens']} tokens, but {prefix}.idx {tokens}: it is of other files; delete it"]
        )
    return facts


def _check_vocabulary(indexed: Indexed) -> None:
    facts, ids = indexed.facts, indexed.ids
    if facts:
        if facts["largest_token"] >= indexed.vocab_size:
            place, largest = facts["largest_token_position"], facts["largest_token"]
            raise ConfigError([_bad_id(indexed.prefix, place, largest, indexed.vocab_size)])
    elif ids.nbytes <= MAX_SCAN_BYTES and (ids.dtype.kind == "i" or np.iinfo(ids.dtype).max >= indexed.vocab_size):
        for start in range(0, len(ids), _CHUNK):
            indexed.check_files()
            indexed.check_ids(start, ids[start : start + _CHUNK])


# Writing


def write_indexed(
    prefix: Path, dtype: np.dtype, pieces: Iterable[tuple[np.ndarray, bool]], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes PREFIX.bin, PREFIX.idx and PREFIX.json, whole or not at all, and returns what PREFIX.json holds.

    `pieces` gives ids and whether a document ends with them; memory does not grow with their number. `facts` are
    written as they are after the last piece. Raises ConfigError where a file exists or cannot be written.
    """
    paths = [Path(prefix.parent, prefix.name + suffix) for suffix in SUFFIXES]
    claimed: list[Path] = []
    try:
        with tempfile.TemporaryDirectory(prefix=".tokenize-", dir=prefix.parent, ignore_cleanup_errors=True) as folder:
            ready = [Path(folder, path.name) for path in paths]
            with (
                ready[0].open("xb") as ids,
                ready[1].open("xb") as index,
                tempfile.TemporaryFile(dir=folder) as lengths,
                tempfile.TemporaryFile(dir=folder) as documents,
            ):
                counts = _write_ids(ids, lengths, documents, dtype, pieces)
                _write_index(index, lengths, documents, dtype)
            whole = {"format": FORMAT, **facts, **counts}
            ready[2].write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
            check_free(prefix)
            for path in paths:  # of two that write the same at once, one goes on
                path.touch(exist_ok=False)
                claimed.append(path)
            for source, path in zip(ready, paths, strict=True):
                os.replace(source, path)
            claimed.clear()
    except FileExistsError as error:
        raise ConfigError([_exists(error.filename)]) from error
    except OSError as error:
        raise ConfigError([f"{prefix}.bin cannot be written: {error.strerror}; use another place"]) from error
    finally:
        for path in claimed:
            with contextlib.suppress(OSError):
                path.unlink()
    return whole


def check_free(prefix: Path) -> None:
    """Raises ConfigError where one of the files that `write_indexed` would write is there."""
    for suffix in SUFFIXES:
        if os.path.lexists(f"{prefix}{suffix}"):
            raise ConfigError([_exists(f"{prefix}{suffix}")])


def _exists(path: str) -> str:
    return f"{path} exists already; use another name, or delete it"


def _write_ids(
    ids: BinaryIO, lengths: BinaryIO, documents: BinaryIO, dtype: np.dtype, pieces: Iterable[tuple[np.ndarray, bool]]
) -> dict[str, int]:
    """Ids to one file, lengths of sequences and document indices to two others. A document is one sequence, or more
    where it is longer than a length can say."""
    tokens = sequences = number = length = 0
    largest, largest_at = -1, 0
    documents.write(struct.pack("<q", 0))
    for piece, ends in pieces:
        if len(piece):
            if (top := int(piece.max())) > largest:
                largest, largest_at = top, tokens + int(piece.argmax())
            ids.write(piece.astype(dtype.newbyteorder("<")).tobytes())
            tokens += len(piece)
            length += len(piece)
        while length > MAX_SEQUENCE:
            lengths.write(struct.pack("<i", MAX_SEQUENCE))
            sequences, length = sequences + 1, length - MAX_SEQUENCE
        if ends:
            lengths.write(struct.pack("<i", length))
            sequences, length, number = sequences + 1, 0, number + 1
            documents.write(struct.pack("<q", sequences))
    return {
        "documents": number, "tokens": tokens, "largest_token": largest, "largest_token_position": largest_at
    }  # fmt: skip


def _write_index(index: BinaryIO, lengths: BinaryIO, documents: BinaryIO, dtype: np.dtype) -> None:
    code = next(code for code, known in DTYPES.items() if known == dtype)
    index.write(_HEADER.pack(MAGIC, 1, code, lengths.tell() // 4, documents.tell() // 8))
    for chunk in _chunks(lengths, "<i4"):
        index.write(chunk.tobytes())
    begin = 0
    for chunk in _chunks(lengths, "<i4"):
        ends = begin + np.cumsum(chunk, dtype=np.int64)
        index.write(((ends - chunk) * dtype.itemsize).astype("<i8").tobytes())
        begin = int(ends[-1])
    for chunk in _chunks(documents, "<i8"):
        index.write(chunk.tobytes())


def _chunks(numbers: BinaryIO, dtype: str) -> Iterator[np.ndarray]:
    numbers.seek(0)
    while chunk := numbers.read(_CHUNK * 8):
        yield np.frombuffer(chunk, dtype)
