"""Data: `open_data` turns the [data] section of a run file into training and held-out batches."""

from __future__ import annotations

from dataclasses import dataclass

from parallax.data.bigram import bigram_loss
from parallax.data.loader import Batch, HeldOut, TrainStream, Windows, check_fills_a_batch
from parallax.data.sources import Corpus, python_stdlib, synthetic

__all__ = ["Batch", "Corpus", "Data", "HeldOut", "TrainStream", "bigram_loss", "open_data"]

_BYTES = 256


@dataclass(frozen=True, eq=False)
class Data:
    """An opened source. `corpus` is None if the source is not text."""

    train: TrainStream
    held_out: HeldOut
    corpus: Corpus | None


def open_data(
    *,
    source: str,
    valid_fraction: float,
    tokenizer: str,
    seq_len: int,
    global_batch_size: int,
    vocab_size: int,
    seed: int,
) -> Data:
    """Opens `source`, "python-stdlib" or "synthetic", and orders its samples by `seed`.

    `tokenizer` is "bytes"; it and `valid_fraction` do not concern "synthetic", whose tokens fill any vocabulary.
    Raises ValueError, each message naming value, rule and what would work: an unknown source or tokenizer, a
    vocabulary too small for the tokenizer, a split too short for one batch.
    """
    if source == "synthetic":
        train, valid = synthetic(vocab_size, seed, seq_len)
        return Data(TrainStream(train, global_batch_size, seed), HeldOut(valid, global_batch_size), None)
    if source != "python-stdlib":
        raise ValueError(f'data.source = "{source}" is not a known source; use "python-stdlib" or "synthetic"')
    if tokenizer != "bytes":
        raise ValueError(f'data.tokenizer = "{tokenizer}" is not a known tokenizer; use "bytes"')
    if vocab_size < _BYTES:
        raise ValueError(
            f'model.vocab_size = {vocab_size} is below the {_BYTES} tokens of data.tokenizer = "bytes"; '
            f"use {_BYTES} or more"
        )
    corpus = python_stdlib(valid_fraction)
    train, valid = Windows(corpus.train, seq_len), Windows(corpus.valid, seq_len)
    check_fills_a_batch(train, global_batch_size, "training")
    check_fills_a_batch(valid, global_batch_size, "held-out")
    return Data(TrainStream(train, global_batch_size, seed), HeldOut(valid, global_batch_size), corpus)
