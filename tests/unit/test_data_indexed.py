"""Megatron's indexed dataset, written here by hand from its format: what is read from it, and what is refused."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parallax.config
import parallax.data
from parallax.config import ConfigError
from parallax.data import Data, indexed, open_data
from parallax.data.indexed import find_prefix, open_indexed, write_indexed
from parallax.data.sources import split_indexed

CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "f8": 6, "f4": 7, "u2": 8}
# Documents of sequences of ids; an empty sequence and one-token documents among them.
DOCUMENTS = [[[1, 2, 3], [4, 0]], [[5, 0]], [[6, 7], [], [8, 0]], [[0]], [[100, 99, 98, 97, 0]]]
FLAT = [token for document in DOCUMENTS for sequence in document for token in sequence]


def write_pair(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "u2") -> None:
    sequences = [sequence for document in documents for sequence in document]
    itemsize = np.dtype(dtype).itemsize
    pointers = [itemsize * sum(map(len, sequences[:i])) for i in range(len(sequences))]
    indices = [0, *itertools.accumulate(map(len, documents))]
    flat = [token for sequence in sequences for token in sequence]
    prefix.with_suffix(".bin").write_bytes(np.array(flat, "<" + dtype).tobytes())
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(indices))
        + struct.pack(f"<{len(sequences)}i", *map(len, sequences))
        + struct.pack(f"<{len(sequences)}q", *pointers)
        + struct.pack(f"<{len(indices)}q", *indices)
    )


def open_pair(source: object, *, vocab_size: int = 256, seq_len: int = 4, batch: int = 1, **keys: Any) -> Data:
    config = parallax.config.Data(source=str(source), **keys)
    return open_data(config, seq_len=seq_len, global_batch_size=batch, vocab_size=vocab_size, seed=0)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_pair(tmp_path / "corpus", DOCUMENTS)
    return tmp_path / "corpus"


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "i8", "u2"])
def test_a_pair_is_read_token_for_token(tmp_path: Path, dtype: str):
    write_pair(tmp_path / "x", DOCUMENTS, dtype)
    opened = open_indexed(tmp_path / "x", vocab_size=101)
    assert opened.ids.tolist() == FLAT
    bounds = [opened.document_start(i) for i in range(opened.number_of_documents + 1)]
    read = [opened.ids[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    assert read == [[token for sequence in document for token in sequence] for document in DOCUMENTS]


def test_windows_of_any_place_and_their_documents(prefix: Path):
    split = split_indexed(prefix, 0.3, 256)
    sides = split.train, split.held_out
    assert [token for side in sides for token in side.read(0, len(side)).tolist()] == FLAT
    starts = {0, 5, 7, 11, 12}
    for side, begin in zip(sides, (0, len(split.train)), strict=True):
        for start, stop in itertools.combinations(range(len(side) + 1), 2):
            assert side.read(start, stop).tolist() == FLAT[begin + start : begin + stop]
            wanted = [at for at in range(start, stop) if begin + at in starts]
            assert side.document_starts(start, stop) == wanted


def test_the_last_documents_are_held_out(tmp_path: Path):
    lengths = np.random.default_rng(0).integers(1, 50, 400)
    write_pair(tmp_path / "x", [[[i % 200] * int(n)] for i, n in enumerate(lengths)])
    split = split_indexed(tmp_path / "x", 0.1, 256)
    assert abs(len(split.held_out) / lengths.sum() - 0.1) <= 25 / lengths.sum()  # to half a document
    ends = np.cumsum(lengths)
    assert len(split.train) in ends
    assert split.documents == 400


@pytest.mark.parametrize("fraction", [1e-6, 0.999999])
def test_each_side_has_a_document(prefix: Path, fraction: float):
    split = split_indexed(prefix, fraction, 256)
    assert (len(split.train), len(split.held_out)) == ((12, 5) if fraction < 0.5 else (5, 12))


def test_of_one_document_the_end_is_held_out(tmp_path: Path):
    write_pair(tmp_path / "x", [[list(range(100))]])
    split = split_indexed(tmp_path / "x", 0.2, 256)
    assert split.train.read(0, 80).tolist() == list(range(80))
    assert split.held_out.read(0, 20).tolist() == list(range(80, 100))


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_the_three_names_of_a_pair(prefix: Path, suffix: str):
    assert find_prefix(f"{prefix}{suffix}") == prefix
    data = open_pair(f"{prefix}{suffix}", valid_fraction=0.3)
    assert data.description == "corpus, 12 tokens and 5 held out"
    digest = hashlib.sha256(struct.pack(f"<{len(FLAT)}i", *FLAT)).hexdigest()
    assert data.fingerprint["sources"] == [
        {"name": "corpus", "share": 1.0, "tokens": 12, "held_out_tokens": 5, "documents": 5, "tokenizer": None}
        | {"sha256": digest}
    ]


def test_a_folder_or_file_of_the_prefix_s_name_comes_first(prefix: Path):
    prefix.mkdir()
    assert find_prefix(str(prefix)) is None


# What is refused


def edit(suffix: str, change: Callable[[bytearray], object]) -> Callable[[Path], None]:
    def apply(prefix: Path) -> None:
        data = bytearray(prefix.with_suffix(suffix).read_bytes())
        change(data)
        prefix.with_suffix(suffix).write_bytes(data)

    return apply


def put(at: int, form: str, *values: Any) -> Callable[[Path], None]:
    return edit(".idx", lambda data: struct.pack_into(form, data, at, *values))


SEQUENCES = 8
LENGTHS, POINTERS, INDICES = 34, 34 + 4 * SEQUENCES, 34 + 12 * SEQUENCES
SIZE = INDICES + 8 * 6
WRONG = {
    "magic": (put(0, "<B", 65), ".idx: byte 0: the magic is b'AMIDIDX"),
    "version": (put(9, "<Q", 2), ".idx: byte 9: the version is 2, not 1"),
    "unknown type": (put(17, "<B", 9), ".idx: byte 17: the type code 9 is not known; use 1 (uint8), 2 (int8)"),
    "floats": (put(17, "<B", 6), ".idx: byte 17: the type code 6 is float64, which holds no ids"),
    "no header": (edit(".idx", lambda d: d.__delitem__(slice(20, None))), ".idx is cut off at byte 20, in its header"),
    "no index": (edit(".idx", lambda d: d.clear()), ".idx: byte 0: the magic is b''"),
    "short index": (
        edit(".idx", lambda d: d.__delitem__(slice(-3, None))),
        f".idx is cut off at byte {SIZE - 3}: it has {SIZE - 3} bytes, but 8 sequences and 6 document indices make",
    ),
    "long index": (
        edit(".idx", lambda d: d.extend(b"12")),
        f".idx is too long at byte {SIZE}: it has {SIZE + 2} bytes",
    ),
    "huge count": (put(18, "<Q", 2**64 - 1), ".idx is cut off at byte"),
    "short ids": (
        edit(".bin", lambda d: d.__delitem__(slice(-1, None))),
        ".bin is cut off at byte 33: it has 33 bytes, but",
    ),
    "long ids": (edit(".bin", lambda d: d.extend(b"12")), ".bin is too long at byte 34: it has 36 bytes, but"),
    "empty ids": (edit(".bin", lambda d: d.clear()), ".bin is cut off at byte 0"),
    "negative length": (put(LENGTHS + 4, "<i", -2), f".idx: byte {LENGTHS + 4}: sequence 1 has length -2, below 0"),
    "other length": (put(LENGTHS, "<i", 4), f".idx: byte {POINTERS + 8}: sequence 1 is at byte 6, but the lengths"),
    "other pointer": (put(POINTERS + 16, "<q", 99), f".idx: byte {POINTERS + 16}: sequence 2 is at byte 99"),
    "first document": (put(INDICES, "<q", 1), f".idx: byte {INDICES}: document index 0 is 1, not 0"),
    "last document": (put(INDICES + 40, "<q", 7), f".idx: byte {INDICES + 40}: document index 5 is 7, not 8"),
    "falling documents": (put(INDICES + 16, "<q", 1), f".idx: byte {INDICES + 16}: document index 2 is 1, less than"),
    "no idx": (lambda prefix: prefix.with_suffix(".idx").unlink(), "corpus.idx is missing: "),
    "no bin": (lambda prefix: prefix.with_suffix(".bin").unlink(), "corpus.bin is missing: "),
    "no pair": (
        lambda prefix: [prefix.with_suffix(suffix).unlink() for suffix in (".bin", ".idx")],
        "corpus.bin nor ",
    ),
    "no sequences": (
        lambda prefix: write_pair(prefix, []),
        ".idx is empty: it has 0 sequences and 1 document indices; use one with at least 1 and 2",
    ),
    "no tokens": (lambda prefix: write_pair(prefix, [[[]]]), ".bin holds no token"),
    "negative id": (
        lambda prefix: write_pair(prefix, [[[1, 2, -3]]], "i2"),
        ".bin: token 2 is -3, which is not in 0 to",
    ),
    "facts that are not JSON": (
        lambda prefix: prefix.with_suffix(".json").write_text('{"format": "parallax-tokens-1"'),
        ".json is damaged; delete it",
    ),
    "facts without numbers": (
        lambda prefix: prefix.with_suffix(".json").write_text('{"format": "parallax-tokens-1"}'),
        ".json is damaged; delete it",
    ),
    "facts of other files": (
        lambda prefix: prefix.with_suffix(".json").write_text(
            '{"format": "parallax-tokens-1", "tokens": 3, "largest_token": 1, "largest_token_position": 0}'
        ),
        ".json counts 3 tokens, but ",
    ),
}


@pytest.mark.parametrize(
    "wrong",
    [{"tokenizer_hash": "ab"}, {"tokenizer": "x", "tokenizer_hash": 3}, {"tokenizer": None, "tokenizer_hash": "ab"}],
)
def test_facts_about_a_tokenizer_are_whole(prefix: Path, wrong: dict[str, Any]):
    facts = {"format": "parallax-tokens-1", "tokens": 17, "largest_token": 100, "largest_token_position": 12}
    prefix.with_suffix(".json").write_text(json.dumps(facts | wrong))
    with pytest.raises(ConfigError, match=r"corpus\.json is damaged; delete it"):
        open_pair(prefix)


def test_facts_that_are_nested_without_end(prefix: Path):
    prefix.with_suffix(".json").write_text('{"format": "parallax-tokens-1", "x": ' + "[" * 100_000)
    with pytest.raises(ConfigError, match=r"corpus\.json is damaged; delete it"):
        open_pair(prefix)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_facts_that_are_no_file_are_no_concern(prefix: Path, make: Callable[[Path], None]):
    make(prefix.with_suffix(".json"))
    assert open_indexed(prefix, 256).facts == {}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pair_is_refused(prefix: Path, name: str):
    spoil, fragment = WRONG[name]
    spoil(prefix)
    with pytest.raises(ConfigError) as error:
        open_pair(f"{prefix}.bin", valid_fraction=0.4)
    [problem] = error.value.problems
    assert str(prefix) in problem and fragment in problem
    assert "\n" not in problem and "; " in problem


def test_a_broken_link_is_a_missing_file(prefix: Path):
    prefix.with_suffix(".idx").unlink()
    prefix.with_suffix(".idx").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"corpus\.idx is missing"):
        open_pair(prefix)


def test_another_program_s_json_is_no_concern(prefix: Path):
    prefix.with_suffix(".json").write_text('{"tokens": 3}')
    assert open_indexed(prefix, 256).facts == {}


def test_ids_of_a_small_vocabulary_need_no_tokenizer(tmp_path: Path):
    """The default, "bytes", has 256 tokens; another may have no end of text. Neither makes a token here."""
    from tokenizers import Tokenizer, models

    write_pair(tmp_path / "x", [[[i % 60] * 9] for i in range(40)])
    assert open_pair(tmp_path / "x", vocab_size=60, separator="ignored").fingerprint["separator"] is None
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(90)}, unk_token="w0")).save(str(tmp_path / "t.json"))
    open_pair(tmp_path / "x", vocab_size=60, tokenizer=str(tmp_path / "t.json"))
    mixture: Any = {str(tmp_path / "x"): 1.0, "python-stdlib": 1.0}
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 60 is less than the 256 tokens of data\.tokenizer"):
        open_data(parallax.config.Data(source=mixture), seq_len=4, global_batch_size=1, vocab_size=60, seed=0)


def test_a_pair_is_one_source_of_a_mixture(prefix: Path):
    mixture: Any = {str(prefix): 1.0, f"{prefix}.idx": 2.0}
    with pytest.raises(ConfigError, match=r'corpus" and .*corpus\.idx" are one dataset; name it once'):
        open_data(parallax.config.Data(source=mixture), seq_len=4, global_batch_size=1, vocab_size=256, seed=0)


# Files that change


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("change", [-4096, 4096])
def test_a_file_that_changes_its_size_is_said(tmp_path: Path, suffix: str, change: int):
    write_pair(tmp_path / "x", [[[1] * 9] for _ in range(2000)])
    data = open_pair(tmp_path / "x", isolate_documents=True)
    path = tmp_path / f"x{suffix}"
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(ConfigError, match=rf"x\{suffix} was changed while it was in use: it had .* start again"):
        data.train.batch(0, 1000)


def test_other_ids_have_another_fingerprint(tmp_path: Path):
    """Of files of the same length: the beginning, the end, or a tenth of the middle."""
    ids = np.zeros(3 << 20, np.uint16)
    ids[5] = 100
    size = len(ids)

    def digest(name: str, changed: slice) -> str:
        other = ids.copy()
        other[changed] = 7
        write_indexed(tmp_path / name, np.dtype(np.uint16), [(other, True)], {})
        return open_pair(tmp_path / name, valid_fraction=0.01).fingerprint["sources"][0]["sha256"]

    changes = [slice(0), slice(1), slice(size - 1, size), slice(size // 2, size * 6 // 10)]
    assert len({digest(f"x{i}", changed) for i, changed in enumerate(changes)}) == len(changes)
    assert digest("a", changes[0]) == digest("b", changes[0])


# Ids beyond the vocabulary


def test_an_id_beyond_the_vocabulary_is_found_at_opening(prefix: Path):
    open_indexed(prefix, 101)
    with pytest.raises(ConfigError) as error:
        open_indexed(prefix, 100)
    [problem] = error.value.problems
    rule = "which is not in 0 to model.vocab_size - 1 = 99; use model.vocab_size = 101 or more"
    assert problem == f"{prefix}.bin: token 12 is 100, {rule}"


def test_an_id_beyond_the_vocabulary_is_known_from_the_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pieces = [(np.array([3, 700, 2]), True), (np.array([5, 6]), True)]
    write_indexed(tmp_path / "x", np.dtype(np.uint16), pieces, {})
    monkeypatch.setattr(indexed.Indexed, "check_ids", lambda *_: pytest.fail("ids were looked at"))
    with pytest.raises(ConfigError, match="token 1 is 700"):
        open_indexed(tmp_path / "x", 700)
    open_indexed(tmp_path / "x", 701)


def test_an_id_beyond_the_vocabulary_is_found_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of files too large to look through at opening: out of the threads that read ahead, and of held-out batches."""
    write_pair(tmp_path / "x", [[[1] * 50], [[1] * 50 + [300]], [[1, 1, 1, 1, 301]]])
    monkeypatch.setattr(indexed, "MAX_SCAN_BYTES", 10)
    monkeypatch.setattr(parallax.data, "content_hash", lambda *_: "")  # it would find them: these files are small
    data = open_pair(tmp_path / "x", valid_fraction=0.05)
    with pytest.raises(ConfigError, match=r"x\.bin: token 100 is 300"):
        list(data.train.iterate(0, [1] * 25))
    with pytest.raises(ConfigError, match=r"x\.bin: token 105 is 301"):
        list(data.held_out.batches(1))


# Writing


def test_a_document_longer_than_a_sequence_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(indexed, "MAX_SEQUENCE", 10)
    pieces = [(np.arange(7), False), (np.arange(7), False), (np.arange(11), True), (np.arange(3), True)]
    facts = write_indexed(tmp_path / "x", np.dtype(np.uint8), pieces, {})
    assert (facts["documents"], facts["tokens"]) == (2, 28)
    opened = open_indexed(tmp_path / "x", 256)
    assert len(opened.pointers) == 4
    assert opened.ids.tolist() == [*range(7), *range(7), *range(11), *range(3)]
    assert [opened.document_start(i) for i in range(3)] == [0, 25, 28]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ConfigError(["x"])])
def test_an_interrupted_writer_leaves_nothing(tmp_path: Path, error: Any):
    def pieces():
        yield np.arange(3), True
        raise error

    with pytest.raises((KeyboardInterrupt, ConfigError)):
        write_indexed(tmp_path / "x", np.dtype(np.uint8), pieces(), {})
    assert not list(tmp_path.iterdir())


def test_an_interrupt_between_the_files_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    replace = indexed.os.replace

    def interrupted(source: Path, target: Path) -> None:
        if target.suffix == ".idx":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(indexed.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_indexed(tmp_path / "x", np.dtype(np.uint8), [(np.arange(3), True)], {})
    assert not list(tmp_path.iterdir())


def test_of_two_writers_one_goes_on(tmp_path: Path):
    """Both begin before either ends. The other takes nothing away."""

    def pieces(token: int) -> Iterator[tuple[np.ndarray, bool]]:
        yield np.array([token] * 5), True
        if token == 1:
            write_indexed(tmp_path / "x", np.dtype(np.uint8), pieces(2), {})

    with pytest.raises(ConfigError, match=r"x\.bin exists already; use another name, or delete it"):
        write_indexed(tmp_path / "x", np.dtype(np.uint8), pieces(1), {})
    assert {path.name for path in tmp_path.iterdir()} == {"x.bin", "x.idx", "x.json"}
    assert open_indexed(tmp_path / "x", 256).ids.tolist() == [2] * 5


def test_a_file_that_appears_last_of_all_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(indexed, "check_free", lambda prefix: prefix.with_suffix(".idx").write_text("another's"))
    with pytest.raises(ConfigError, match=r"x\.idx exists already"):
        write_indexed(tmp_path / "x", np.dtype(np.uint8), [(np.arange(3), True)], {})
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x.idx", "another's")]


def test_the_process_s_number_names_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In containers it is the same for all."""
    (tmp_path / f".x.bin.{os.getpid()}").write_text("of another, or of one that was killed")
    write_indexed(tmp_path / "x", np.dtype(np.uint8), [(np.arange(3), True)], {})
    assert len(list(tmp_path.iterdir())) == 4


def test_facts_are_kept(tmp_path: Path):
    facts = write_indexed(tmp_path / "x", np.dtype(np.int32), [(np.array([9, 70_000]), True)], {"more": 1})
    assert facts == json.loads((tmp_path / "x.json").read_text())
    assert facts | {"more": 1, "largest_token": 70_000, "largest_token_position": 1, "tokens": 2} == facts
