"""Data: `open_data` turns the [data] section of a run file into training and held-out batches. No jax."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parallax.config
from parallax.config import SOURCES, ConfigError, show
from parallax.data.bigram import bigram_loss
from parallax.data.indexed import find_prefix
from parallax.data.loader import Batch, HeldOut, TrainStream, Windows, WindowSource, check_fills_a_batch, mixing_weights
from parallax.data.sources import Corpus, Split, split_indexed, split_stdlib, split_text, synthetic
from parallax.data.tokenizer import Tokenizer, open_tokenizer, tokenizer_hash
from parallax.data.tokens import content_hash
from parallax.rules import check_sources

__all__ = ["Batch", "Corpus", "Data", "HeldOut", "TrainStream", "bigram_loss", "open_data"]


@dataclass(frozen=True, eq=False)
class Data:
    """Opened sources.

    `description` is a line for people. `fingerprint` says, in what JSON can hold, what the data are, wherever they lie:
    numbers of tokens, and a hash of some of them (see `content_hash`).
    `corpus` is there only if the source is python-stdlib, a token a byte.
    """

    train: TrainStream
    held_out: HeldOut
    description: str
    fingerprint: dict[str, Any]
    corpus: Corpus | None


@dataclass(frozen=True, eq=False)
class _Source:
    """One source of a run, opened. `split` is None for "synthetic"."""

    name: str
    share: float
    split: Split | None
    train: WindowSource
    held_out: WindowSource


def open_data(
    config: parallax.config.Data, *, seq_len: int, global_batch_size: int, vocab_size: int, seed: int
) -> Data:
    """Opens `config.source`, or mixes several, and orders the samples by `seed`.

    Raises ConfigError, each line naming value, rule and what would work: sources and tokenizers that cannot be read, a
    vocabulary too small for the tokens, a split too short for one batch. What it writes is the cache alone (see
    `parallax.data.tokenize`).
    """
    if problems := [*check_sources(config)]:
        raise ConfigError(problems)
    weights = config.source if isinstance(config.source, dict) else {config.source: 1.0}
    if problems := [*_named_twice(weights)]:
        raise ConfigError(problems)
    tokenizer = None
    if any(_is_tokenized(name) for name in weights):
        tokenizer = open_tokenizer(config.tokenizer, config.separator)
        _check_vocabulary(config.tokenizer, tokenizer, vocab_size)
    splits = _open_all(list(weights), config, tokenizer, vocab_size)
    mixing = mixing_weights([*weights.values()])
    shares = {name: part / sum(mixing) for name, part in zip(weights, mixing, strict=True)}
    sources, problems = [], []
    for name, split in splits.items():
        train, held_out = synthetic(vocab_size, seed, seq_len, config.isolate_documents)
        if split is not None:
            train, held_out = (
                Windows(tokens, seq_len, config.isolate_documents) for tokens in (split.train, split.held_out)
            )
            for windows in (train, held_out):
                side = "training" if windows is train else "held-out"
                try:
                    check_fills_a_batch(windows, global_batch_size, side, _where(name), shares[name])
                except ConfigError as error:
                    problems += error.problems
        sources.append(_Source(name, shares[name], split, train, held_out))
    if problems:
        raise ConfigError(problems)
    only = sources[0].split if len(sources) == 1 else None
    return Data(
        TrainStream([source.train for source in sources], mixing, seed),
        HeldOut([source.held_out for source in sources], mixing, global_batch_size),
        "; ".join(map(_describe, sources)),
        _fingerprint(sources, tokenizer),
        only.corpus if only is not None else None,
    )


def _open_all(
    names: list[str], config: parallax.config.Data, tokenizer: Tokenizer | None, vocab_size: int
) -> dict[str, Split | None]:
    """Each source's split; None for "synthetic". Raises ConfigError with the problems of all."""
    splits, problems = {}, []
    for name in names:
        try:
            splits[name] = _open(name, config, tokenizer, vocab_size)
        except ConfigError as error:
            problems += error.problems
    if problems := problems or _tokenizer_problems(splits, config):
        raise ConfigError(problems)
    return splits


def _open(name: str, config: parallax.config.Data, tokenizer: Tokenizer | None, vocab_size: int) -> Split | None:
    if name == "synthetic":
        return None
    if name not in SOURCES and (prefix := find_prefix(name)):
        return split_indexed(prefix, config.valid_fraction, vocab_size)
    assert tokenizer is not None
    if name == "python-stdlib":
        return split_stdlib(tokenizer, config.valid_fraction, config.text_key, vocab_size)
    return split_text(name, _where(name), tokenizer, config.valid_fraction, config.text_key, vocab_size)


def _is_tokenized(name: str) -> bool:
    return name == "python-stdlib" or (name != "synthetic" and find_prefix(name) is None)


def _where(name: str) -> str:
    return f"data.source = {show(name)}"


def _named_twice(names: Iterable[str]) -> Iterator[str]:
    """Sources of a mixture that are one indexed dataset: PREFIX, PREFIX.bin and PREFIX.idx."""
    first: dict[Path, str] = {}
    for name in names:
        if name not in SOURCES and (prefix := find_prefix(name)) and (other := first.setdefault(prefix, name)) != name:
            yield f"data.source: {show(other)} and {show(name)} are one dataset; name it once, with the sum of weights"


def _check_vocabulary(name: str, tokenizer: Tokenizer, vocab_size: int) -> None:
    if vocab_size < tokenizer.vocab_size:
        least = tokenizer.vocab_size
        rule = f"is less than the {least} tokens of data.tokenizer = {show(name)}"
        raise ConfigError([f"model.vocab_size = {vocab_size} {rule}; use {least} or more"])


def _tokenizer_problems(splits: Mapping[str, Split | None], config: parallax.config.Data) -> list[str]:
    """Sources whose tokens mean different things. "bytes", the default, counts only where it made tokens."""
    made_by = {_where(name): split.made_by for name, split in splits.items() if split is not None and split.made_by}
    if config.tokenizer != "bytes" and any(split is not None for split in splits.values()):
        of_config = Path(config.tokenizer).name, tokenizer_hash(config.tokenizer)
        made_by = {f"data.tokenizer = {show(config.tokenizer)}": of_config} | made_by
    if not made_by:
        return []
    (first, wanted), *others = made_by.items()
    return [
        f"{name} holds tokens of {show(made[0])} ({made[1][:12]}), but {first} those of {show(wanted[0])} "
        f"({wanted[1][:12]}); tokenize both alike"
        for name, made in others
        if made[1] != wanted[1]
    ]


def _describe(source: _Source) -> str:
    """`web.txt, 11,772,139 tokens and 347,234 held out`; in a mixture, `70.0% web.txt, ...`"""
    share = "" if source.share == 1 else f"{source.share:.1%} "
    if source.split is None:
        return share + source.name
    train, held_out = len(source.split.train), len(source.split.held_out)
    return f"{share}{_base(source.name)}, {train:,} tokens and {held_out:,} held out"


def _base(name: str) -> str:
    """A source's name without the folders it lies in, and without the suffix of an indexed dataset."""
    if name in SOURCES:
        return name
    prefix = find_prefix(name)
    return (prefix or Path(name)).name


def _fingerprint(sources: list[_Source], tokenizer: Tokenizer | None) -> dict[str, Any]:
    of_sources = []
    for source in sources:
        facts: dict[str, Any] = {"name": _base(source.name), "share": source.share}
        if split := source.split:
            facts |= {"tokens": len(split.train), "held_out_tokens": len(split.held_out)}
            facts["sha256"] = content_hash(split.train, split.held_out)
            facts |= {"documents": split.documents, "tokenizer": split.made_by[1] if split.made_by else None}
        of_sources.append(facts)
    separator = None if tokenizer is None else tokenizer.separator_id
    return {"sources": of_sources, "separator": separator}
