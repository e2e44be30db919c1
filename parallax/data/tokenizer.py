"""Tokenizers: a token a byte, or the tokenizer.json of the library `tokenizers`. No jax."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from parallax.config import ConfigError, either, show

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<｜end▁of▁sentence｜>")
"""Names under which tokenizers hold the token that ends a document."""

_SHOWN_TOKENS = 6


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """`hash` identifies what it does; `name` is as in the run file. `encode` turns a text into ids [tokens], `dtype`.

    Texts are bytes for the tokenizer "bytes", else strings. A special token that is written out in a text becomes that
    token; none is added. For text that it has no ids for, `encode` raises ValueError with the library's reason.
    """

    name: str
    hash: str
    vocab_size: int
    separator: str
    separator_id: int
    encode: Callable[[Sequence[str | bytes]], list[np.ndarray]]

    @property
    def is_bytes(self) -> bool:
        return self.hash == "bytes"

    @property
    def dtype(self) -> np.dtype:
        """The smallest of Megatron's types that holds every id: uint8 for bytes, uint16 or int32."""
        return np.dtype(np.uint8 if self.is_bytes else np.uint16 if self.vocab_size <= 1 << 16 else np.int32)


def open_tokenizer(name: str, separator: str, setting: str = "data.{} =") -> Tokenizer:
    """`name`: "bytes" or the path of a tokenizer.json; `separator` empty: its end-of-text token, or byte 0.

    `setting` is how messages name "tokenizer" and "separator". Raises ConfigError where the file is no tokenizer, or
    the separator no token of it.
    """
    where = f"{setting.format('tokenizer')} {show(name)}"
    where_separator = f"{setting.format('separator')} {show(separator)}"
    if name == "bytes":
        return _bytes(separator, where_separator)
    library, digest = _open_library(name, where)
    library.no_padding()  # both may be settings of the file: they are for inference
    library.no_truncation()
    vocabulary = library.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise ConfigError([f"{where} has no tokens; use a trained tokenizer"])
    if not separator:
        separator = next((token for token in END_OF_TEXT if token in vocabulary), "")
    if separator not in vocabulary:
        special = [token.content for token in library.get_added_tokens_decoder().values()][:_SHOWN_TOKENS]
        use = f"use for example {either(map(show, special))}" if special else "use a token of its vocabulary"
        if separator:
            raise ConfigError([f"{where_separator} is no token of {show(name)}; {use}"])
        what = f"{where_separator} leaves the end-of-text token to {show(name)}"
        raise ConfigError([f"{what}, which has none of {either(map(show, END_OF_TEXT))}; {use}"])
    vocab_size = max(vocabulary.values()) + 1
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.int32

    def encode(texts: Sequence[str | bytes]) -> list[np.ndarray]:
        try:
            encodings = library.encode_batch_fast(list(texts), add_special_tokens=False)  # type: ignore[arg-type]
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(str(error)) from error
        return [np.array(encoding.ids, dtype) for encoding in encodings]

    return Tokenizer(name, digest, vocab_size, separator, vocabulary[separator], encode)


def tokenizer_hash(name: str) -> str:
    """As `Tokenizer.hash`, of a tokenizer that tokenizes nothing and so needs no separator. Raises ConfigError where
    the file is no tokenizer."""
    return "bytes" if name == "bytes" else _open_library(name, f"data.tokenizer = {show(name)}")[1]


def _open_library(name: str, where: str) -> tuple[Library, str]:
    """The tokenizer of a tokenizer.json, and the file's SHA-256."""
    if not name or "\0" in name:
        raise ConfigError([f'{where} is not a path; use "bytes" or the path of a tokenizer.json'])
    try:
        if (path := Path(name)).exists() and not path.is_file():
            raise ConfigError([f'{where} is not a regular file; use "bytes" or the path of a tokenizer.json'])
        text = path.read_bytes()
    except OSError as error:
        message = f'{where} cannot be read: {error.strerror}; use "bytes" or the path of a tokenizer.json'
        raise ConfigError([message]) from error
    from tokenizers import Tokenizer as Library  # here: most runs need none

    try:
        return Library.from_buffer(text), hashlib.sha256(text).hexdigest()
    except Exception as error:  # the library raises nothing more precise
        reason = str(error).removeprefix("Cannot instantiate Tokenizer from buffer: ")
        raise ConfigError([f"{where} is not a tokenizer.json: {reason}; use one of the library tokenizers"]) from error


def _bytes(separator: str, where: str) -> Tokenizer:
    encoded = separator.encode(errors="surrogatepass") or b"\0"
    if len(encoded) > 1:
        rule = f'is {len(encoded)} bytes, but a token of "bytes" is one'
        raise ConfigError([f"{where} {rule}; use one ASCII character, or leave it empty for byte 0"])
    encode = lambda texts: [np.frombuffer(text, np.uint8) for text in texts]
    return Tokenizer("bytes", "bytes", 256, encoded.decode("latin-1"), encoded[0], encode)
