"""Tokenizers, the verb `parallax tokenize` read back by this file's own reader, and the cache of a run."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, processors, trainers

import parallax.config
from parallax.cli import main
from parallax.config import ConfigError
from parallax.data import Data, files, open_data, tokenize
from parallax.data.command import add_arguments, run
from parallax.data.sources import split_text
from parallax.data.tokenizer import open_tokenizer

TEXTS = [f"def f{i}(x):\n    return x * {i} + {i * i}\n\n" * (i % 4 + 1) for i in range(60)] + ["café ≤ 東京\n"]
END = "<|endoftext|>"


def train_library(special: list[str], vocab_size: int = 300) -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(TEXTS, trainer)
    return library


@pytest.fixture(scope="module")
def library() -> Library:
    """With settings that are for inference and must not count: a token before each text, truncation and padding."""
    library = train_library([END, "<s>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.enable_truncation(8)
    library.enable_padding(length=16)
    return library


@pytest.fixture
def saved(tmp_path: Path, library: Library) -> Path:
    library.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "parallax"


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def encode(library: Library, text: str) -> list[int]:
    plain = Library.from_str(library.to_str())
    plain.no_truncation()
    plain.no_padding()
    return plain.encode(text, add_special_tokens=False).ids


def read_pair(prefix: Path) -> tuple[np.dtype, list[list[int]]]:
    """The dtype and the documents of PREFIX.bin and PREFIX.idx, by the format alone."""
    index, types = prefix.with_suffix(".idx").read_bytes(), {1: "<u1", 4: "<i4", 8: "<u2"}
    magic, version, code, sequences, indices = struct.unpack_from("<9sQBQQ", index)
    assert (magic, version) == (b"MMIDIDX\0\0", 1)
    lengths = struct.unpack_from(f"<{sequences}i", index, 34)
    pointers = struct.unpack_from(f"<{sequences}q", index, 34 + 4 * sequences)
    bounds = struct.unpack_from(f"<{indices}q", index, 34 + 12 * sequences)
    assert len(index) == 34 + 12 * sequences + 8 * indices
    dtype = np.dtype(types[code])
    ids = prefix.with_suffix(".bin").read_bytes()
    read = [np.frombuffer(ids, dtype, n, at).tolist() for n, at in zip(lengths, pointers, strict=True)]
    assert sum(lengths) * dtype.itemsize == len(ids)
    assert (bounds[0], bounds[-1]) == (0, sequences)
    return dtype, [[*itertools.chain(*read[a:b])] for a, b in itertools.pairwise(bounds)]


def call(*words: Any) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(word) for word in words]))


def open_source(source: Path, *, vocab_size: int = 300, **keys: Any) -> Data:
    config = parallax.config.Data(source=str(source), **keys)
    return open_data(config, seq_len=8, global_batch_size=2, vocab_size=vocab_size, seed=0)


def texts_of(source: Path, tokenizer: str) -> list[int]:
    split = split_text(str(source), "", open_tokenizer(tokenizer, ""), 0.2, "text", 300)
    return [*split.train.read(0, len(split.train)).tolist(), *split.held_out.read(0, len(split.held_out)).tolist()]


# The verb


def test_a_tokenizer_json(tmp_path: Path, library: Library, saved: Path, jsonl: Path, capsys):
    assert call(jsonl, "-o", tmp_path / "out", "--tokenizer", saved) == 0
    dtype, documents = read_pair(tmp_path / "out")
    assert dtype == np.uint16
    assert documents == [[*encode(library, text), 0] for text in TEXTS]
    facts = json.loads((tmp_path / "out.json").read_text())
    flat = [token for document in documents for token in document]
    wanted = {"tokenizer": "tokenizer.json", "vocab_size": 300, "separator": END, "separator_id": 0}
    wanted |= {"documents": len(TEXTS), "tokens": len(flat), "largest_token": max(flat)}
    assert facts | wanted == facts
    assert flat[facts["largest_token_position"]] == max(flat)
    out = capsys.readouterr().out
    assert f"{len(flat):,}, uint16, the largest {max(flat)}" in out and f'"{END}", token 0' in out


def test_bytes_of_several_sources(tmp_path: Path, jsonl: Path, capsys):
    (tmp_path / "folder" / "b").mkdir(parents=True)
    (tmp_path / "folder" / "b" / "x.txt").write_bytes(b"\xff\xfe any bytes")
    (tmp_path / "folder" / "a.md").write_text("a")
    (tmp_path / "folder" / "empty.txt").write_text("")
    assert call(tmp_path / "folder", jsonl, "-o", tmp_path / "out", "--json") == 0
    dtype, documents = read_pair(tmp_path / "out")
    assert dtype == np.uint8
    wanted = [b"a", b"\xff\xfe any bytes", *(text.encode() for text in TEXTS)]
    assert [bytes(document) for document in documents] == [text + b"\0" for text in wanted]
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads((tmp_path / "out.json").read_text())
    assert captured.err == ""


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path, jsonl: Path):
    words = {f"w{i}": i for i in range(70_000)} | {"</s>": 70_000}
    library = Library(models.WordLevel(words, unk_token="w3"))
    library.save(str(tmp_path / "words.json"))
    call(jsonl, "-o", tmp_path / "out", "--tokenizer", tmp_path / "words.json")
    dtype, documents = read_pair(tmp_path / "out")
    assert dtype == np.int32
    assert documents == [[3, 70_000]] * len(TEXTS)


def test_what_it_writes_is_what_training_reads(tmp_path: Path, saved: Path, jsonl: Path):
    call(jsonl, "-o", tmp_path / "out", "--tokenizer", saved)
    ahead = open_source(tmp_path / "out", tokenizer=str(saved))
    now = open_source(jsonl, tokenizer=str(saved))
    for batch, wanted in ((ahead.train.batch(7, 20), now.train.batch(7, 20)),
                          (next(ahead.held_out.batches(1)), next(now.held_out.batches(1)))):  # fmt: skip
        np.testing.assert_array_equal(batch.tokens_BS, wanted.tokens_BS)
    a, b = ahead.fingerprint["sources"][0], now.fingerprint["sources"][0]
    assert a | {"name": b["name"]} == b


@pytest.mark.parametrize("piece", [100, 1000])
def test_a_long_document_in_pieces_has_the_same_tokens(
    tmp_path: Path, library: Library, saved: Path, monkeypatch: pytest.MonkeyPatch, piece: int
):
    monkeypatch.setattr(files, "PIECE_CHARACTERS", piece)
    monkeypatch.setattr(files, "_READ_BYTES", 333)
    monkeypatch.setattr(tokenize, "_BATCH_CHARACTERS", 2 * piece)
    text = "".join(f"line {i} of café 東京;\n" for i in range(2000))
    (tmp_path / "long.txt").write_text(text)
    call(tmp_path / "long.txt", "-o", tmp_path / "out", "--tokenizer", saved)
    assert read_pair(tmp_path / "out")[1] == [[*encode(library, text), 0]]


def test_a_separator_of_one_s_own(tmp_path: Path, saved: Path, jsonl: Path):
    call(jsonl, "-o", tmp_path / "out", "--tokenizer", saved, "--separator", "<s>")
    assert {document[-1] for document in read_pair(tmp_path / "out")[1]} == {1}


def test_nothing_is_overwritten(tmp_path: Path, jsonl: Path):
    (tmp_path / "out.idx").write_text("mine")
    with pytest.raises(ConfigError, match=r"out\.idx exists already; use another name, or delete it"):
        call(jsonl, "-o", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"out.idx", "texts.jsonl"}
    assert (tmp_path / "out.idx").read_text() == "mine"


def test_a_wrong_line_leaves_nothing(tmp_path: Path, jsonl: Path):
    jsonl.write_text(jsonl.read_text() + "wrong\n")
    with pytest.raises(ConfigError, match=f"line {len(TEXTS) + 1} is not JSON"):
        call(jsonl, "-o", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]


def test_it_is_a_verb(tmp_path: Path, jsonl: Path, capsys):
    assert main(["tokenize", str(jsonl), "-o", str(tmp_path / "out")]) == 0
    assert main(["tokenize", str(jsonl), "synthetic", "-o", str(tmp_path / "out"), "--separator", "ab"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ")[:2] for line in lines] == [["error:", f"{tmp_path}/out.bin"], ["error:", "SOURCE"],
                                                      ["error:", "--separator"]]  # fmt: skip


@pytest.mark.parametrize(
    ("output", "fragment"),
    [
        ("", '--output "" is not the name of new files'),
        ("{tmp}", "is not the name of new files"),
        ("{tmp}/x.bin", "has the suffix .bin, which is added by itself; use "),
        ("{tmp}/no/x", "/no does not exist; make it first"),
    ],
)
def test_wrong_outputs(tmp_path: Path, jsonl: Path, output: str, fragment: str):
    with pytest.raises(ConfigError) as error:
        call(jsonl, "-o", output.format(tmp=tmp_path))
    assert fragment in error.value.problems[0]


def test_tokens_are_not_tokenized(tmp_path: Path, jsonl: Path):
    call(jsonl, "-o", tmp_path / "out")
    with pytest.raises(ConfigError, match=r'out.bin" holds tokens already; use text files'):
        call(tmp_path / "out.bin", "-o", tmp_path / "again")


# Tokenizers


def test_bad_utf8_is_named_with_its_place(tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "_READ_BYTES", 7)
    for text, at in ((b"x" * 100 + b"\xff" + b"y" * 100, 100), ("é".encode() * 50 + b"\xe6\x9d", 100)):
        (tmp_path / "bad.txt").write_bytes(text)
        with pytest.raises(ConfigError, match=rf"bad\.txt: byte {at} is not UTF-8") as error:
            open_source(tmp_path / "bad.txt", tokenizer=str(saved))
        assert len(error.value.problems) == 1
    assert bytes(texts_of(tmp_path / "bad.txt", "bytes")) == text + b"\0"


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("{}", "is not a tokenizer.json: Model missing"),
        ("nonsense", "is not a tokenizer.json: expected"),
        (None, "cannot be read: No such file or directory; use"),
        (Library(models.BPE()).to_str(), "has no tokens"),
    ],
)
def test_wrong_tokenizers(tmp_path: Path, jsonl: Path, text: str | None, fragment: str):
    path = tmp_path / "tokenizer.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as error:
        open_source(jsonl, tokenizer=str(path))
    [problem] = error.value.problems
    assert problem.startswith(f'data.tokenizer = "{path}" {fragment}')


def test_a_tokenizer_that_is_a_queue(tmp_path: Path, jsonl: Path):
    os.mkfifo(tmp_path / "queue")
    with pytest.raises(ConfigError, match=r'--tokenizer ".*queue" is not a regular file; use "bytes" or'):
        call(jsonl, "-o", tmp_path / "out", "--tokenizer", tmp_path / "queue")


UNKNOWN = {
    "WordLevel": (models.WordLevel({"</s>": 0, "one": 1}, unk_token="[UNK]"), "Missing [UNK] token"),
    "WordPiece": (models.WordPiece({"</s>": 0, "one": 1}, unk_token="[UNK]"), "Missing [UNK] token"),
    "Unigram": (
        models.Unigram([("</s>", -9.0), *((letter, -1.0) for letter in "one")], None, False),
        "`unk_id` is missing",
    ),
    "BPE": (models.BPE({"</s>": 0, "o": 1, "n": 2, "e": 3}, [], unk_token="<unk>"), "`<unk>` not found"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_text_that_a_tokenizer_has_no_ids_for(tmp_path: Path, cache: Path, name: str):
    model, reason = UNKNOWN[name]
    Library(model).save(str(tmp_path / "t.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "three"}\n')
    (tmp_path / "a.txt").write_text("three")
    for source, place in (("a.jsonl", "a.jsonl, line 3"), ("a.txt", "a.txt")):
        with pytest.raises(ConfigError) as error:
            call(tmp_path / source, "-o", tmp_path / "out", "--tokenizer", tmp_path / "t.json")
        [problem] = error.value.problems
        assert problem.startswith(f'{tmp_path}/{place}: the tokenizer "{tmp_path}/t.json" cannot encode it: ')
        assert reason in problem and problem.endswith("; use one with a token for unknown text")
    with pytest.raises(ConfigError, match="cannot encode it"):
        open_source(tmp_path / "a.jsonl", tokenizer=str(tmp_path / "t.json"))
    assert {path.name for path in tmp_path.iterdir()} == {"t.json", "a.jsonl", "a.txt"} and not list(cache.iterdir())


def test_separators(tmp_path: Path, saved: Path, jsonl: Path):
    with pytest.raises(ConfigError) as error:
        open_source(jsonl, tokenizer=str(saved), separator="<end>")
    [problem] = error.value.problems
    assert problem.startswith('data.separator = "<end>" is no token of ')
    assert problem.endswith(f'use for example "{END}" or "<s>"')
    with pytest.raises(ConfigError, match=r'data\.separator = "ab" is 2 bytes, but a token of "bytes" is one'):
        open_source(jsonl, separator="ab")
    train_library(["<pad>", "<stop>"]).save(str(tmp_path / "other.json"))
    with pytest.raises(ConfigError) as error:
        open_source(jsonl, tokenizer=str(tmp_path / "other.json"))
    [problem] = error.value.problems
    assert 'which has none of "<|endoftext|>", "<|end_of_text|>"' in problem
    assert problem.endswith('use for example "<pad>" or "<stop>"')
    for name in ("</s>", "<eos>", "<|end_of_text|>"):
        train_library(["<pad>", name]).save(str(tmp_path / "other.json"))
        assert open_tokenizer(str(tmp_path / "other.json"), "").separator_id == 1


def test_a_vocabulary_below_the_tokenizer_s(saved: Path, jsonl: Path, cache: Path):
    with pytest.raises(
        ConfigError, match=r"model.vocab_size = 299 is less than the 300 tokens of data.tokenizer = .*use 300"
    ):
        open_source(jsonl, tokenizer=str(saved), vocab_size=299)
    assert not cache.exists()


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path, saved: Path, jsonl: Path):
    call(jsonl, "-o", tmp_path / "ids", "--tokenizer", saved)
    call(jsonl, "-o", tmp_path / "raw")
    with pytest.raises(
        ConfigError, match=r'raw" holds tokens of "bytes" .* but data.tokenizer = .* tokenize both alike'
    ):
        open_source(tmp_path / "raw", tokenizer=str(saved))
    mixture: Any = {str(tmp_path / "raw"): 1.0, str(tmp_path / "ids"): 1.0}
    with pytest.raises(ConfigError, match=r'ids" holds tokens of "tokenizer.json"'):
        open_data(parallax.config.Data(source=mixture), seq_len=8, global_batch_size=2, vocab_size=300, seed=0)
    open_source(tmp_path / "ids")  # "bytes" is the default, and nothing here is made of bytes


# The cache


def test_text_is_tokenized_once(library: Library, saved: Path, jsonl: Path, cache: Path, capsys, monkeypatch):
    open_source(jsonl, tokenizer=str(saved))
    said = capsys.readouterr().err
    assert said.splitlines() == [
        f'tokenizing "{jsonl}" into {cache}, once',
        f"to do it ahead: parallax tokenize {jsonl} -o PREFIX --tokenizer {saved}, and data.source = PREFIX",
    ]
    [entry] = cache.iterdir()
    assert {path.name for path in entry.iterdir()} == {"tokens.bin", "tokens.idx", "tokens.json"}
    assert read_pair(entry / "tokens")[1] == [[*encode(library, text), 0] for text in TEXTS]
    monkeypatch.setattr(tokenize, "token_pieces", lambda *_: pytest.fail("tokenized again"))
    open_source(jsonl, tokenizer=str(saved))
    assert capsys.readouterr().err == ""


def test_other_text_is_tokenized_again(tmp_path: Path, saved: Path, jsonl: Path, cache: Path):
    open_source(jsonl)
    open_source(jsonl, tokenizer=str(saved))
    open_source(jsonl, tokenizer=str(saved), separator="<s>")
    assert len(list(cache.iterdir())) == 3
    jsonl.write_text('{"text": "%s"}\n' % ("new " * 100) * 3)
    assert bytes(texts_of(jsonl, "bytes")) == (b"new " * 100 + b"\0") * 3
    assert len(list(cache.iterdir())) == 4


def test_an_interrupted_cache_is_made_anew(jsonl: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tokenize, "token_pieces", interrupted)
        with pytest.raises(KeyboardInterrupt):
            open_source(jsonl)
    assert not list(cache.iterdir())
    open_source(jsonl)


SPOILED: dict[str, Callable[[Path], object]] = {
    "no ids": lambda entry: (entry / "tokens.bin").unlink(),
    "short ids": lambda entry: os.truncate(entry / "tokens.bin", 5),
    "no facts": lambda entry: (entry / "tokens.json").unlink(),
    "facts without files": lambda entry: spoil_facts(entry, "files", None),
    "facts of other files": lambda entry: spoil_facts(entry, "files", {"another": 61}),
    "other counts": lambda entry: spoil_facts(entry, "files", {"texts.jsonl": 60}),
    "counts that are none": lambda entry: spoil_facts(entry, "files", {"texts.jsonl": "61"}),
    "queue for facts": lambda entry: ((entry / "tokens.json").unlink(), os.mkfifo(entry / "tokens.json")),
    "empty": lambda entry: (shutil.rmtree(entry), entry.mkdir()),
    "file": lambda entry: (shutil.rmtree(entry), entry.write_text("")),
    "broken link": lambda entry: (shutil.rmtree(entry), entry.symlink_to("nowhere")),
}


def spoil_facts(entry: Path, key: str, value: Any) -> None:
    facts = json.loads((entry / "tokens.json").read_text())
    (entry / "tokens.json").write_text(json.dumps(facts | {key: value}))


@pytest.mark.parametrize("name", SPOILED)
def test_a_damaged_cache_is_made_anew(jsonl: Path, cache: Path, name: str):
    wanted = texts_of(jsonl, "bytes")
    [entry] = cache.iterdir()
    SPOILED[name](entry)
    assert texts_of(jsonl, "bytes") == wanted
    assert [*cache.iterdir()] == [entry]
    assert {path.name for path in entry.iterdir()} == {"tokens.bin", "tokens.idx", "tokens.json"}


def test_leftovers_of_killed_processes(jsonl: Path, cache: Path):
    """By the names of before, and of now; a day old, and not."""
    texts_of(jsonl, "bytes")
    [entry] = cache.iterdir()
    shutil.rmtree(entry)
    old, new = cache / f".{entry.name}.1", cache / f".{entry.name}.{os.getpid()}"
    busy = cache / f".{entry.name}.busy"
    for folder in (old, new, busy):
        (folder / "made").mkdir(parents=True)
        (folder / "made" / "tokens.bin").write_text("")
    long_ago = time.time() - 25 * 3600
    for path in (old / "made" / "tokens.bin", old / "made", old, busy / "made", busy):
        os.utime(path, (long_ago, long_ago))
    texts_of(jsonl, "bytes")
    assert {*cache.iterdir()} == {entry, new, busy}


def test_of_two_that_fill_the_cache_both_go_on(jsonl: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    wanted = [byte for text in TEXTS for byte in (*text.encode(), 0)]
    inner = tokenize.token_pieces

    def slower(*args: Any) -> Iterator[tuple[np.ndarray, bool]]:
        monkeypatch.setattr(tokenize, "token_pieces", inner)
        yield from inner(*args)
        assert texts_of(jsonl, "bytes") == wanted  # another process, from beginning to end

    monkeypatch.setattr(tokenize, "token_pieces", slower)
    assert texts_of(jsonl, "bytes") == wanted
    assert len([*cache.iterdir()]) == 1


def test_a_cache_that_cannot_be_written(tmp_path: Path, jsonl: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError) as error:
        open_source(jsonl)
    [problem] = error.value.problems
    assert f"{tmp_path}/file" in problem and "cannot be written: Not a directory; set XDG_CACHE_HOME" in problem


def test_ctrl_c_ends_the_verb_and_leaves_nothing(tmp_path: Path):
    """In a process of its own, in the middle of the ids."""
    program = f"""
import os, signal, sys
from parallax.cli import main
from parallax.data import tokenize
def pieces(*_):
    yield tokenize.np.arange(3), True
    os.kill(os.getpid(), signal.SIGINT)
    yield tokenize.np.arange(3), True
tokenize.token_pieces = pieces
sys.exit(main(["tokenize", {str(Path(__file__))!r}, "-o", {str(tmp_path / "out")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert not list(tmp_path.iterdir())
