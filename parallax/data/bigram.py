"""The loss a table of byte pairs reaches: the mark that a model which learns anything from context falls below."""

from __future__ import annotations

import numpy as np

_VOCAB = 256
_CHUNK_TOKENS = 1 << 22


def bigram_loss(train_tokens: np.ndarray, valid_tokens: np.ndarray) -> float:
    """Mean -log p(next byte | byte) over `valid_tokens`, in nats a byte.

    p is counted on `train_tokens` and smoothed by adding one to every count: p(b | a) = (n_ab + 1) / (n_a + 256).
    Both arguments are uint8 [tokens].
    """
    train_VV = _pair_counts(train_tokens)
    valid_VV = _pair_counts(valid_tokens)
    log_p_VV = np.log(train_VV + 1) - np.log(train_VV.sum(axis=1, keepdims=True) + _VOCAB)
    return float(-(valid_VV * log_p_VV).sum() / valid_VV.sum())


def _pair_counts(tokens: np.ndarray) -> np.ndarray:
    """How often byte b follows byte a: int64 [a, b]. In chunks, since `bincount` widens what it counts to int64."""
    counts = np.zeros(_VOCAB * _VOCAB, np.int64)
    for start in range(0, len(tokens) - 1, _CHUNK_TOKENS):
        chunk = tokens[start : start + _CHUNK_TOKENS + 1].astype(np.int64)
        counts += np.bincount(chunk[:-1] * _VOCAB + chunk[1:], minlength=len(counts))
    return counts.reshape(_VOCAB, _VOCAB)
