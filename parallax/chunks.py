"""In how many chunks of tokens the loss works through a microbatch. No jax."""

from __future__ import annotations

LEAST = 1024  # tokens of a chunk, where there are as many


def loss_chunks(tokens: int, width: int, rows: int) -> int:
    """A power of two that divides `tokens`, a rank's part of a microbatch; `rows` is its part of the vocabulary.

    As few as leave a chunk no more logits than the microbatch has activations, tokens · width. But every chunk reads
    and writes the whole float32 sum of the table's gradient, so that chunks stay large enough for the product that is
    added to it to take as long: 2 · 1024 operations for 8 bytes are 256 a byte, about what chips have of both."""
    chunks = 1
    while rows > chunks * width and tokens % (2 * chunks) == 0 and tokens >= 2 * chunks * LEAST:
        chunks *= 2
    return chunks
