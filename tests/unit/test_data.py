"""Data: the split of the text, the order of the samples, and the bigram mark."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest

import parallax.config
from parallax.config import ConfigError
from parallax.data import Batch, Data, HeldOut, TrainStream, bigram_loss, open_data
from parallax.data.loader import Windows, check_fills_a_batch
from parallax.data.sources import Corpus, python_files, python_stdlib, synthetic
from parallax.data.tokens import InMemory

SEQ_LEN = 8
BATCH = 6


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return python_stdlib(valid_fraction=0.05)


@pytest.fixture
def numbered() -> Windows:
    """45 windows; token t is t, so that a window's first token tells which one it is."""
    return numbered_windows(45 * SEQ_LEN + 1)


def numbered_windows(tokens: int, seq_len: int = SEQ_LEN) -> Windows:
    return Windows(InMemory(np.arange(tokens, dtype=np.uint16), separator=-1), seq_len)


def stream(windows: Windows, seed: int = 0) -> TrainStream:
    return TrainStream([windows], [1.0], seed)


def held_out_of(windows: Windows, global_batch_size: int) -> HeldOut:
    return HeldOut([windows], [1.0], global_batch_size)


def _window_numbers(batches: list[Batch]) -> list[int]:
    return [int(first) // SEQ_LEN for batch in batches for first in batch.tokens_BS[:, 0]]


def _assert_same(left: Batch, right: Batch) -> None:
    np.testing.assert_array_equal(left[0], right[0])
    np.testing.assert_array_equal(left[1], right[1])


def _open(*, seq_len: int = 128, vocab_size: int = 256, **keys: Any) -> Data:
    config = parallax.config.Data(**keys)
    return open_data(config, seq_len=seq_len, global_batch_size=16, vocab_size=vocab_size, seed=0)


def _write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_documents_are_sorted_separated_and_split_by_name(tmp_path: Path):
    kept = {f"{folder}/m{i}.py": f"{folder} = {i}\n" for folder in ("b", "a") for i in range(20)}
    skipped = {
        f"{folder}/x.py": "no" for folder in ("site-packages", "a/test", "a/tests", "idle_test", "b/__pycache__")
    }
    _write_tree(tmp_path, kept | skipped | {"a/readme.txt": "no"})
    corpus = python_files(tmp_path, valid_fraction=0.3)

    held_out = {name for name in kept if zlib.crc32(name.encode()) / 2**32 < 0.3}
    assert 0 < len(held_out) < len(kept)
    for tokens, names in ((corpus.train, kept.keys() - held_out), (corpus.valid, held_out)):
        assert tokens.dtype == np.uint8
        assert tokens.tobytes().decode().split("\0") == [kept[name] for name in sorted(names)]
    assert (corpus.train_files, corpus.valid_files) == (len(kept) - len(held_out), len(held_out))


def test_a_new_file_moves_no_other_across_the_split(tmp_path: Path):
    _write_tree(tmp_path, {f"m{i}.py": f"{i}" for i in range(30)})
    before = python_files(tmp_path, 0.3).valid.tobytes().split(b"\0")
    _write_tree(tmp_path, {"another.py": "another", "a/m3.py": "nested"})
    after = python_files(tmp_path, 0.3).valid.tobytes().split(b"\0")
    assert set(before) == set(after) - {b"another", b"nested"}


def test_stdlib_split(stdlib: Corpus):
    assert stdlib.train.size + stdlib.valid.size > 8e6
    share = stdlib.valid_files / (stdlib.train_files + stdlib.valid_files)
    assert 0.03 < share < 0.07
    # Separators and nothing else: no file holds byte 0, so documents can be told apart.
    assert np.count_nonzero(stdlib.train == 0) == stdlib.train_files - 1
    assert np.count_nonzero(stdlib.valid == 0) == stdlib.valid_files - 1


def test_every_token_but_the_first_is_a_target_once(numbered: Windows):
    tokens = np.arange(45 * SEQ_LEN + 1)
    windows = [numbered[i].window_T for i in range(len(numbered))]
    assert {window.dtype for window in windows} == {np.dtype(np.int32)}
    np.testing.assert_array_equal(np.concatenate([w[1:] for w in windows]), tokens[1:])
    np.testing.assert_array_equal(np.concatenate([w[:-1] for w in windows]), tokens[:-1])
    assert [len(numbered_windows(n)) for n in (0, 1, 8, 9, 16, 17)] == [0, 0, 0, 1, 1, 2]


def test_batch_shapes(numbered: Windows):
    tokens_BS, targets_BS, starts_BS = stream(numbered).batch(3, BATCH)
    assert starts_BS is None
    assert tokens_BS.shape == targets_BS.shape == (BATCH, SEQ_LEN)
    assert tokens_BS.dtype == targets_BS.dtype == np.int32
    np.testing.assert_array_equal(tokens_BS + 1, targets_BS)


@pytest.mark.parametrize("start", [0, 5, 7, 1_000_003])
def test_iterating_equals_random_access(numbered: Windows, start: int):
    sizes = [BATCH, 1, 2, 45, *[BATCH] * 16]
    for size, batch in zip(sizes, stream(numbered, 3).iterate(start, sizes), strict=True):
        _assert_same(batch, stream(numbered, 3).batch(start, size))
        start += size


def test_the_order_of_a_seed_is_always_the_same(numbered: Windows):
    """Grain's batches over its shuffle, as this package made them before batches could change their size."""
    samples = grain.MapDataset.source(numbered).map(lambda sample: sample.window_T).shuffle(1926383459).repeat()
    assert np.random.SeedSequence(11).generate_state(1)[0] == 1926383459
    for step in (0, 3, 4, 100):
        batch = samples.batch(BATCH)[step]
        assert batch is not None
        np.testing.assert_array_equal(batch[:, :-1], stream(numbered, 11).batch(step * BATCH, BATCH).tokens_BS)


def test_reading_ahead_is_bounded_and_ends_with_the_iterator(numbered: Windows):
    asked = []
    sizes = (asked.append(i) or BATCH for i in itertools.count())
    batches = stream(numbered).iterate(0, sizes)
    for _ in range(5):
        next(batches)
    assert len(asked) <= 5 + 2
    assert any(thread.name.startswith("data") for thread in threading.enumerate())
    batches.close()
    assert not any(thread.name.startswith("data") for thread in threading.enumerate())


def test_what_a_reader_raises_comes_out_of_the_iterator():
    class Broken:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int):
            raise ConfigError([f"sample {index} is broken"])

    batches = TrainStream([Broken()], [1.0], 0).iterate(0, itertools.repeat(4))
    with pytest.raises(ConfigError, match="is broken"):
        next(batches)


def test_order_does_not_depend_on_the_batch_size(numbered: Windows):
    by_batch = {
        size: _window_numbers([stream(numbered, 1).batch(k, size) for k in range(0, 90, size)]) for size in (1, 6, 45)
    }
    assert by_batch[1] == by_batch[6] == by_batch[45]


def test_each_sample_once_an_epoch_and_reshuffled(numbered: Windows):
    samples = stream(numbered)  # 45 windows in batches of 6: batches span two epochs
    seen = _window_numbers([samples.batch(k, BATCH) for k in range(0, 90, BATCH)])
    first, second = seen[:45], seen[45:]
    assert sorted(first) == sorted(second) == list(range(45))
    assert first != second
    assert list(range(45)) not in (first, second)


def test_epochs_of_neighbouring_seeds_differ(numbered: Windows):
    epochs = [
        tuple(_window_numbers([stream(numbered, seed).batch(start, 45)])) for seed in range(5) for start in (0, 45)
    ]
    assert len(set(epochs)) == len(epochs)


def test_held_out_batches_are_fixed_distinct_and_spread(numbered: Windows):
    held_out = held_out_of(numbered, 4)
    assert held_out.max_batches == 11
    batches = list(held_out.batches(11))
    for again, batch in zip(held_out.batches(5), batches, strict=False):
        _assert_same(again, batch)
    numbers = _window_numbers(batches)
    assert len(set(numbers)) == len(numbers) == 44


@pytest.mark.parametrize("windows", [1, 2, 3, 100, 1000, 1024, 1025, 2712])
def test_every_beginning_of_the_held_out_order_is_spread(windows: int):
    held_out = held_out_of(numbered_windows(windows + 1, seq_len=1), 1)
    order = [int(batch.tokens_BS[0, 0]) for batch in held_out.batches(windows)]
    assert sorted(order) == list(range(windows))
    for count in range(4, windows):
        gaps = np.diff([*sorted(order[:count]), windows])
        assert gaps.max() <= 2 * windows / count + 2


def test_bigram_loss_counts_pairs():
    train, valid = b"abracadabra\0abba", b"cab\0abc"
    expected = 0.0
    for a, b in itertools.pairwise(valid):
        pairs = list(itertools.pairwise(train))
        expected -= math.log((pairs.count((a, b)) + 1) / (sum(p[0] == a for p in pairs) + 256))
    loss = bigram_loss(np.frombuffer(train, np.uint8), np.frombuffer(valid, np.uint8))
    assert loss == pytest.approx(expected / (len(valid) - 1), rel=1e-12)


def test_bigram_loss_counts_across_chunks(stdlib: Corpus, monkeypatch: pytest.MonkeyPatch):
    part = stdlib.train[:10_000]
    whole = bigram_loss(part, part)
    for chunk_tokens in (9_999, 1_000, 37):
        monkeypatch.setattr("parallax.data.bigram._CHUNK_TOKENS", chunk_tokens)
        assert bigram_loss(part, part) == whole


def test_bigram_loss_of_the_stdlib(stdlib: Corpus):
    assert 2.4 < bigram_loss(stdlib.train, stdlib.valid) < 2.8


def test_synthetic_depends_on_seed_and_index_alone():
    train, valid = synthetic(vocab_size=1000, seed=5, seq_len=64)
    again, _ = synthetic(vocab_size=1000, seed=5, seq_len=64)
    other, _ = synthetic(vocab_size=1000, seed=6, seq_len=64)
    _ = again[0]
    np.testing.assert_array_equal(train[123_456_789].window_T, again[123_456_789].window_T)
    first = [sample.window_T for sample in (train[0], train[1], other[0], valid[0])]
    assert all(window.dtype == np.int32 and window.shape == (65,) for window in first)
    assert all(window.min() >= 0 and window.max() < 1000 for window in first)
    assert len({window.tobytes() for window in first}) == len(first)


def test_open_data(stdlib: Corpus):
    text, random = _open(), _open(source="synthetic", vocab_size=50_000, tokenizer="ignored")
    assert text.corpus is not None
    assert random.corpus is None
    np.testing.assert_array_equal(text.corpus.train, stdlib.train)
    for data in (text, random):
        for tokens_BS, targets_BS, starts_BS in (data.train.batch(2, 16), next(data.held_out.batches(8))):
            assert starts_BS is None
            assert tokens_BS.shape == (16, 128)
            np.testing.assert_array_equal(tokens_BS[:, 1:], targets_BS[:, :-1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "c4"}, 'data.source = "c4" does not exist; use .* "python-stdlib" or "synthetic"'),
        ({"source": "python-stdlb"}, 'data.source = "python-stdlb" does not exist; use "python-stdlib"'),
        ({"tokenizer": "bpe"}, 'data.tokenizer = "bpe" cannot be read: No such .* use "bytes"'),
        ({"vocab_size": 255}, "model.vocab_size = 255 is less than the 256 .* use 256 or more"),
        ({"valid_fraction": 1.0}, "data.valid_fraction = 1.0 is not between 0 and 1"),
        ({"seq_len": 10**8}, "= 16 needs .* training text .* has 0; use a train.seq_len of at most"),
        (
            {"valid_fraction": 1e-9},
            r"held-out text of .*stdlib\" \(0 tokens\) has 0; use a larger data.valid_fraction or a longer text",
        ),
    ],
)
def test_errors_name_value_rule_and_remedy(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        _open(**changes)


def test_the_named_remedies_work_and_no_more_would(numbered: Windows):
    with pytest.raises(
        ValueError, match=r"but the training text of x .* of at most 45, a train.seq_len of at most 7, a sm"
    ):
        check_fills_a_batch(numbered, 46, "training", "x")
    check_fills_a_batch(numbered, 45, "training", "x")
    check_fills_a_batch(Windows(numbered.tokens, 7), 46, "training", "x")
    with pytest.raises(ValueError, match="use 1 to 11"):
        held_out_of(numbered, 4).batches(12)


def test_an_empty_folder_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no \*\.py file"):
        python_files(tmp_path, 0.1)


def test_reading_starts_no_jax_backend_and_no_process():
    program = """
import multiprocessing, sys
import parallax.config
from parallax.data import open_data
data = open_data(parallax.config.Data(), seq_len=128, global_batch_size=16, vocab_size=256, seed=0)
batches = data.train.iterate(5, [16] * 9)
next(batches), next(data.held_out.batches(1))
assert not multiprocessing.active_children()
assert "jax" not in sys.modules or not sys.modules["jax._src.xla_bridge"]._backends
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
