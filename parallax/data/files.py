"""The text files of a source: which they are, what they hold, and where that is not what it should be. No jax.

A text file is a document. A .jsonl file holds a JSON object a line, each a document. A folder stands for all files
under it, in order of relative path; names that begin with a dot are passed over. Links to folders are followed; a
folder that is reached twice is read once, so that a loop of links ends.
"""

from __future__ import annotations

import codecs
import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from parallax.config import ConfigError, brief, either, show

PIECE_CHARACTERS = 1 << 18  # of a document, handed to a tokenizer at once: bounds memory
_READ_BYTES = 1 << 20
_PACKED = frozenset((".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".parquet", ".arrow"))
_SHOWN_PROBLEMS, _SHOWN_KEYS = 5, 5
_JSON = json.JSONDecoder(parse_int=float)  # a number is no text: none is too long, as it would be for int


class Piece(NamedTuple):
    """A part of a document's text, and whether the document `ends` with it. `line` is that of a .jsonl file, else 0."""

    text: str | bytes
    ends: bool
    line: int = 0


@dataclass(frozen=True)
class TextFile:
    """A file as it was when its source was opened. `name` is its path in the source's folder, with forward slashes."""

    path: Path
    name: str
    size: int
    mtime_ns: int

    @property
    def is_jsonl(self) -> bool:
        return self.path.suffix == ".jsonl"


def find_files(source: str, where: str, words: Sequence[str] = ()) -> list[TextFile]:
    """The files of a text file's, a .jsonl file's or a folder's path. `where` names the source in messages;
    `words` may stand in the path's place.

    Raises ConfigError where there is no such path, no text under it, or a file of it that cannot be read as text.
    """
    path = Path(source)
    if not source or "\0" in source:
        raise ConfigError([f"{where} is not a path; use a text file, a .jsonl file, a folder or a .bin/.idx pair"])
    if not os.path.lexists(path):
        raise ConfigError([f"{where} does not exist; use {_nearest_path(path, words)}"])
    folder = path.is_dir()
    names = sorted(_walk(path, where)) if folder else [path.name]
    files = text_files(path if folder else path.parent, names)
    if not names:
        raise ConfigError([f"{where} is a folder without files; use one with text or .jsonl files"])
    if not any(file.size for file in files):
        raise ConfigError([f"{where} holds no text: every file is empty; use one with text"])
    return files


def text_files(folder: Path, names: list[str]) -> list[TextFile]:
    """The files of those names in `folder`. Raises ConfigError where one cannot be read as text."""
    files, problems = [], []
    for name in names:
        path = folder / name
        if problem := _problem(path):
            problems.append(f"{show(str(path))} {problem}")
            continue
        found = path.stat()
        files.append(TextFile(path, name, found.st_size, found.st_mtime_ns))
    if len(problems) > _SHOWN_PROBLEMS:
        problems[_SHOWN_PROBLEMS:] = [f"{len(problems) - _SHOWN_PROBLEMS} more files cannot be read as text"]
    if problems:
        raise ConfigError(problems)
    return files


def _problem(path: Path) -> str | None:
    """Why a file cannot be read as text."""
    try:
        path.stat()
    except OSError as error:
        return f"cannot be read: {error.strerror}; remove it or make it readable"
    if not path.is_file():
        return "is not a regular file; remove it, or use a text or .jsonl file"
    if not os.access(path, os.R_OK):
        return "cannot be read: Permission denied; remove it or make it readable"
    if path.suffix in _PACKED:
        return "is not text; unpack it to text or .jsonl files"
    if path.suffix in (".bin", ".idx"):
        return "is not text; name its pair by itself, in a mixture where there is more: {a = 1, b = 1}"
    return None


def _walk(folder: Path, where: str) -> Iterator[str]:
    """Paths relative to `folder`, with forward slashes on every system."""

    def refuse(error: OSError) -> NoReturn:
        raise ConfigError([f"{where}: the folder {error.filename} cannot be read: {error.strerror}; make it readable"])

    seen = {_identity(folder)}
    for parent, subfolders, files in os.walk(folder, onerror=refuse, followlinks=True):
        visible = [name for name in subfolders if not name.startswith(".")]
        subfolders.clear()
        for name in sorted(visible, key=lambda name: (os.path.islink(os.path.join(parent, name)), name)):
            try:
                identity = _identity(Path(parent, name))
            except OSError as error:
                refuse(error)
            if identity not in seen:
                seen.add(identity)
                subfolders.append(name)
        for name in files:
            if not name.startswith("."):
                yield Path(parent, name).relative_to(folder).as_posix()


def _identity(folder: Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_dev, found.st_ino


def _nearest_path(path: Path, words: Sequence[str]) -> str:
    """A name like the one that is missing, or what may stand there."""
    try:
        beside = {name: str(path.parent / name) for name in os.listdir(path.parent)}
    except OSError:
        beside = {}
    beside |= {word: word for word in words}
    if close := difflib.get_close_matches(path.name, beside, n=1):
        return show(beside[close[0]])
    return either(["the path of a text file", "of a .jsonl file", "of a folder", *map(show, words)])


# What they hold


def read_pieces(file: TextFile, text_key: str, decode: bool) -> Iterator[Piece]:
    """The documents of a file, one after the other, in pieces of about PIECE_CHARACTERS: str if `decode`, else bytes.

    Blank lines of a .jsonl file are no documents. Raises ConfigError, naming file and line or byte, for text that is
    not UTF-8 where it is decoded (any bytes of a text file may pass as bytes), and for a line that is not an object
    with a string as its `text_key`.
    """
    try:
        with file.path.open("rb") as opened:
            if file.is_jsonl:
                for number, line in enumerate(opened, 1):
                    line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                    if line.strip():
                        text = _line_text(line, f"{file.path}, line {number}", text_key)
                        yield from _cut(iter([text]), number) if decode else [Piece(text.encode(), True, number)]
                return
            chunks = iter(lambda: opened.read(_READ_BYTES), b"")
            if decode:
                yield from _cut(_decoded(chunks, file.path))
            else:
                yield from (Piece(chunk, False) for chunk in chunks)
                yield Piece(b"", True)
    except OSError as error:
        raise ConfigError([f"{file.path} cannot be read: {error.strerror}; make it readable"]) from error


def _line_text(line: bytes, where: str, text_key: str) -> str:
    object_a_line = f'write an object a line: {{{json.dumps(text_key)}: "..."}}'
    try:
        value = _JSON.decode(line.decode())
    except UnicodeDecodeError as error:
        raise ConfigError([f"{where}: byte {error.start} of the line is not UTF-8; write the file as UTF-8"]) from None
    except json.JSONDecodeError as error:
        raise ConfigError([f"{where} is not JSON: {error.msg} at character {error.pos}; {object_a_line}"]) from None
    except RecursionError:
        raise ConfigError([f"{where} is nested too deeply to be read; {object_a_line}"]) from None
    if not isinstance(value, dict):
        raise ConfigError([f"{where} is {_kind(value)}, not an object; {object_a_line}"])
    if text_key not in value:
        raise ConfigError([f"{where} has no key {brief(text_key)} (the text key); {_other_keys(value)}"])
    text = value[text_key]
    if not isinstance(text, str):
        rule = f"holds {_kind(text)}, not a string; write text or remove it"
        raise ConfigError([f"{where}: the key {brief(text_key)} {rule}"])
    if found := re.search("[\ud800-\udfff]", text):
        escape = f"\\u{ord(found[0]):x}"
        raise ConfigError([f"{where}: {escape} is half of a surrogate pair, which no text holds; remove or repair it"])
    return text


def _kind(value: Any) -> str:
    """What a JSON value is: not the value itself, which may be long or deep."""
    kinds = {dict: "an object", list: "a list", str: "a string", float: "a number", bool: "true or false"}
    return kinds.get(type(value), "null")


def _other_keys(value: dict[str, Any]) -> str:
    if not value:
        return "the object is empty"
    known = [*map(brief, islice(value, _SHOWN_KEYS))]
    if (more := len(value) - len(known)) > 0:
        known.append(f"one of {more} more keys")
    return f"use {either(known)}"


def _decoded(chunks: Iterator[bytes], path: Path) -> Iterator[str]:
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    for chunk, final in _with_final(chunks):
        begin = offset - len(decoder.getstate()[0])  # of what is decoded now: bytes that were left over come first
        try:
            yield decoder.decode(chunk, final)
        except UnicodeDecodeError as error:
            at = begin + error.start
            use = 'write it as UTF-8, or use the tokenizer "bytes"'
            raise ConfigError([f"{path}: byte {at} is not UTF-8 ({error.reason}); {use}"]) from None
        offset += len(chunk)


def _with_final(chunks: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    yield from ((chunk, False) for chunk in chunks)
    yield b"", True


def _cut(texts: Iterator[str], line: int = 0) -> Iterator[Piece]:
    """One document in pieces. A cut falls after a single line break between other characters where there is one: there
    tokenizers that part words at spaces give the same tokens with the cut as without."""
    kept = ""
    for text in texts:
        kept, begin = kept + text, 0
        while len(kept) - begin > PIECE_CHARACTERS:
            half, end = begin + PIECE_CHARACTERS // 2, begin + PIECE_CHARACTERS
            if breaks := list(re.finditer(r"\S\n(?=\S)", kept[half:end])):
                end = half + breaks[-1].end()
            yield Piece(kept[begin:end], False, line)
            begin = end
        kept = kept[begin:]
    yield Piece(kept, True, line)
