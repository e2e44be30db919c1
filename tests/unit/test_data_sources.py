"""Text, jsonl, folders and mixtures: what is read, what is held out, where documents begin, what is refused."""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import parallax.config
from parallax.config import ConfigError
from parallax.data import Data, open_data
from parallax.data.files import find_files
from parallax.data.loader import HeldOut, Sample, TrainStream, Windows
from parallax.data.sources import Split, split_text
from parallax.data.tokenizer import open_tokenizer
from parallax.data.tokens import InMemory, Joined, Tokens

BYTES = open_tokenizer("bytes", "")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def split(path: Path, valid_fraction: float = 0.3) -> Split:
    return split_text(str(path), "data.source", BYTES, valid_fraction, "text", 256)


def text_of(tokens: Tokens) -> bytes:
    return tokens.read(0, len(tokens)).astype(np.uint8).tobytes()


def lines(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def write(root: Path, files: Mapping[str, bytes | str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


def open_source(source: Any, *, seq_len: int = 8, batch: int = 2, vocab_size: int = 256, **keys: Any) -> Data:
    source = {str(name): weight for name, weight in source.items()} if isinstance(source, dict) else str(source)
    config = parallax.config.Data(source=source, **keys)
    return open_data(config, seq_len=seq_len, global_batch_size=batch, vocab_size=vocab_size, seed=0)


# What is read, and what is held out


def test_a_text_file_is_its_bytes_and_a_separator(tmp_path: Path):
    text = bytes(range(256)) * 3  # no text at all in UTF-8
    opened = split(write(tmp_path, {"a.txt": text}) / "a.txt", 0.25)
    assert text_of(opened.train) == text[:576]
    assert text_of(opened.held_out) == text[576:] + b"\0"


def fitting(sizes: dict[str, int], fraction: float) -> set[str]:
    """Names that fit into a share of the tokens, tried by CRC-32"""
    left, names = fraction * sum(sizes.values()), set()
    for name in sorted(sizes, key=lambda name: zlib.crc32(name.encode())):
        if sizes[name] <= left:
            names.add(name)
            left -= sizes[name]
    return names


def test_a_folder_is_split_by_name_in_order_of_relative_path(tmp_path: Path):
    files = {f"{folder}f{i}.txt": f"{folder}{i}" * (i + 1) for folder in ("b/", "", "a/c/") for i in range(12)}
    write(tmp_path, files | {"empty.txt": "", ".hidden": "no", ".git/x.txt": "no"})
    opened = split(tmp_path)
    held_out = fitting({name: len(text) + 1 for name, text in files.items()}, 0.3)
    share = len(opened.held_out) / (len(opened.held_out) + len(opened.train))
    assert 0.28 < share <= 0.3
    for side, names in ((opened.train, files.keys() - held_out), (opened.held_out, held_out)):
        assert text_of(side).decode() == "".join(files[name] + "\0" for name in sorted(names))
    assert opened.documents == len(files)


def test_a_small_folder_leaves_no_side_empty(tmp_path: Path):
    write(tmp_path, {f"f{i}": f"{i}" * (9 - i) for i in range(4)})
    assert text_of(split(tmp_path, 1e-9).held_out) == b"333333\0"  # the smallest
    assert text_of(split(tmp_path, 0.999999999).train).count(b"\0") == 1


def test_jsonl_lines_are_documents_the_last_held_out(tmp_path: Path):
    texts = [f"text {i} ü" * (i % 5 + 1) for i in range(50)]
    values = [{"id": 1, "text": text} for text in texts]
    write(tmp_path, {"a.jsonl": "\n" + lines(*values[:20]) + "  \n" + lines({"text": ""}, *values[20:]).rstrip("\n")})
    opened = split(tmp_path / "a.jsonl", 0.2)
    assert (text_of(opened.train) + text_of(opened.held_out)).decode() == "".join(text + "\0" for text in texts)
    assert text_of(opened.train).endswith(b"\0")
    assert abs(len(opened.held_out) / sum(len(text.encode()) + 1 for text in texts) - 0.2) < 0.02


def test_a_folder_of_text_and_jsonl_is_split_by_name(tmp_path: Path):
    files = {f"f{i}.jsonl": lines({"text": f"{i}a"}, {"text": f"{i}b"}) for i in range(20)} | {"empty.jsonl": "\n"}
    files |= {f"g{i}.txt": f"text {i}" for i in range(20)}
    documents = {name: [json.loads(line)["text"] for line in text.split("\n") if line] for name, text in files.items()
                 if name.endswith("jsonl")}  # fmt: skip
    documents |= {name: [text] for name, text in files.items() if name.endswith("txt")}
    opened = split(write(tmp_path, files))
    sizes = {name: sum(len(text) + 1 for text in texts) for name, texts in documents.items() if texts}
    held_out = fitting(sizes, 0.3)
    for side, names in ((opened.train, files.keys() - held_out), (opened.held_out, held_out)):
        wanted = "".join(text + "\0" for name in sorted(names) for text in documents[name])
        assert text_of(side).decode() == wanted
    assert opened.documents == 60


def test_a_separator_of_one_s_own(tmp_path: Path):
    write(tmp_path, {"a": "aa", "b": "bb"})
    tokenizer = open_tokenizer("bytes", "\n")
    opened = split_text(str(tmp_path), "", tokenizer, 0.5, "text", 256)
    assert sorted([text_of(opened.train), text_of(opened.held_out)]) == [b"aa\n", b"bb\n"]


def test_more_files_than_a_process_may_open(tmp_path: Path):
    files = {f"f{i:04}": f"{i:04}" for i in range(1500)}
    opened = split(write(tmp_path, files), 0.5)
    texts = (text_of(opened.train) + text_of(opened.held_out)).decode().split("\0")[:-1]
    assert sorted(texts) == sorted(files.values())


def test_the_python_stdlib_with_another_separator_is_the_same_text():
    usual, other = open_source("python-stdlib"), open_source("python-stdlib", separator="\1")
    assert usual.corpus is not None and other.corpus is None
    [facts] = other.fingerprint["sources"]
    letters = sum(np.count_nonzero(side) for side in (usual.corpus.train, usual.corpus.valid))
    assert facts["tokens"] + facts["held_out_tokens"] - facts["documents"] == letters


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), max_size=12), max_size=8), st.data())
def test_joined_tokens_are_their_concatenation(parts: list[list[int]], data: st.DataObject):
    joined = Joined(InMemory(np.array(part, np.uint8), 1) for part in parts)
    flat = [token for part in parts for token in part]
    assert len(joined) == len(flat)
    if flat:
        start = data.draw(st.integers(0, len(flat) - 1))
        stop = data.draw(st.integers(start + 1, len(flat)))
        assert joined.read(start, stop).tolist() == flat[start:stop]


# Where documents begin


def slow_starts(documents: Iterable[bytes], seq_len: int) -> list[list[int]]:
    """By counting, position by position, over all windows."""
    begin = [at for document in documents for at in [True] + [False] * len(document)]
    windows = []
    for window in range((len(begin) - 1) // seq_len):
        row, last = [], 0
        for position in range(seq_len):
            last = position if begin[window * seq_len + position] else last
            row.append(last)
        windows.append(row)
    return windows


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=st.lists(st.binary(min_size=1, max_size=20).map(lambda text: text.replace(b"\0", b"x")), min_size=2),
    seq_len=st.integers(1, 12),
    kind=st.sampled_from(["folder", "jsonl", "memory"]),
)
def test_starts_against_counting(
    tmp_path_factory: pytest.TempPathFactory, documents: list[bytes], seq_len: int, kind: str
):
    root = tmp_path_factory.mktemp("text")
    texts = [document.decode("latin-1") for document in documents]
    if kind == "folder":
        opened = split(write(root, {f"f{i:03}": text for i, text in enumerate(documents)}), 1e-12)
    elif kind == "jsonl":
        opened = split(write(root, {"a.jsonl": lines(*({"text": text} for text in texts))}) / "a.jsonl", 1e-12)
        documents = [text.encode() for text in texts]
    else:
        tokens = InMemory(np.frombuffer(b"".join(document + b"\0" for document in documents[:-1]), np.uint8), 0)
        opened = Split(tokens, tokens, 1, None)
    windows = Windows(opened.train, seq_len, isolate_documents=True)
    starts = [windows[i].starts_S for i in range(len(windows))]
    out = documents.index(min(documents, key=len)) if kind == "folder" else len(documents) - 1  # held out
    documents = documents[:out] + documents[out + 1 :]
    assert [row.tolist() for row in starts if row is not None] == slow_starts(documents, seq_len)


def test_starts_of_every_source(tmp_path: Path):
    write(tmp_path, {f"f{i}.txt": "x" * 5 for i in range(40)})
    pair = {"synthetic": 1.0, tmp_path: 1.0}
    data = open_source(pair, isolate_documents=True)
    for batch in (data.train.batch(0, 40), next(data.held_out.batches(1))):
        assert batch.starts_BS is not None and batch.starts_BS.dtype == np.int32
        assert batch.starts_BS.shape == batch.tokens_BS.shape
        assert not batch.starts_BS[::2].any()
        assert batch.starts_BS[1::2].any()
    assert open_source(pair).train.batch(0, 2).starts_BS is None


# Order and mixtures


class Numbers:
    """`count` samples that say which source and which sample they are."""

    def __init__(self, source: int, count: int):
        self.source, self.count = source, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        return Sample(np.array([self.source, index, 0], np.int32))


@pytest.mark.parametrize("weights", [[0.3, 0.7], [1, 2, 3], [0.07, 5, 1, 0.2], [1.0]])
def test_shares_of_a_mixture(weights: list[float]):
    stream = TrainStream([Numbers(i, 70_000 + i) for i in range(len(weights))], weights, 0)
    tokens_BS = np.concatenate([batch.tokens_BS for batch in stream.iterate(12_345, [1000] * 10)])
    counts = Counter(tokens_BS[:, 0].tolist())
    for source, weight in enumerate(weights):
        assert abs(counts[source] / 10_000 - weight / sum(weights)) < 0.01


def test_an_epoch_of_a_mixture_s_source_holds_each_sample_once_and_resumes_anywhere():
    sources, weights = [Numbers(0, 50), Numbers(1, 170)], [1.0, 3.0]
    whole = [b.tokens_BS for b in TrainStream(sources, weights, 5).iterate(0, [8] * 100)]
    rows = np.concatenate(whole).tolist()
    for source, count in ((0, 50), (1, 170)):
        of_source = [index for number, index in rows if number == source]
        for epoch in range(len(of_source) // count):
            assert sorted(of_source[epoch * count : (epoch + 1) * count]) == list(range(count))
    for start in (1, 37, 333):  # in the middle of an epoch, with other batches
        sizes = [5] * 20
        resumed = [b.tokens_BS for b in TrainStream(sources, weights, 5).iterate(start, sizes)]
        assert np.concatenate(resumed).tolist() == rows[start : start + 100]


def test_a_mixture_of_one_is_its_source(tmp_path: Path):
    write(tmp_path, {"a.txt": bytes(range(1, 200)) * 3})
    alone, table = open_source(tmp_path / "a.txt"), open_source({tmp_path / "a.txt": 7.0})
    np.testing.assert_array_equal(alone.train.batch(3, 50).tokens_BS, table.train.batch(3, 50).tokens_BS)
    assert alone.fingerprint == table.fingerprint and alone.description == table.description


def test_held_out_data_are_mixed_alike():
    held_out = HeldOut([Numbers(0, 2**31), Numbers(1, 30)], [0.75, 0.25], 8)
    assert held_out.max_batches == 15
    rows = np.concatenate([batch.tokens_BS for batch in held_out.batches(15)]).tolist()
    assert Counter(source for source, _ in rows) == {0: 90, 1: 30}
    assert sorted(index for source, index in rows if source == 1) == list(range(30))
    assert len({tuple(row) for row in rows}) == len(rows)


def test_a_mixture_of_everything(tmp_path: Path):
    write(tmp_path, {"a.txt": "letters " * 500, "b.jsonl": lines(*({"text": f"line {i}"} for i in range(300)))})
    sources = {"synthetic": 1, "python-stdlib": 2, tmp_path / "a.txt": 3, tmp_path / "b.jsonl": 4}
    data = open_source(sources, vocab_size=300)
    batch = data.train.batch(0, 1000)
    assert batch.tokens_BS.shape == (1000, 8)
    assert data.held_out.max_batches > 0
    facts = {source["name"]: source for source in data.fingerprint["sources"]}
    assert facts.keys() == {"synthetic", "python-stdlib", "a.txt", "b.jsonl"}
    assert [facts[name]["share"] for name in facts] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert json.loads(json.dumps(data.fingerprint)) == data.fingerprint
    assert str(tmp_path) not in json.dumps(data.fingerprint)
    assert "30.0% a.txt, 3,800 tokens and 201 held out" in data.description


# What is refused


def link_to_itself(root: Path) -> None:
    (root / "loop.txt").symlink_to("loop.txt")


NOT_JSON = 'a.jsonl, line 2 is not JSON: Expecting value at character 0; write an object a line: {"text": "..."}'
WRONG: dict[str, tuple[dict[str, bytes | str] | Callable[[Path], object], str, str]] = {
    "missing": ({"corpus.txt": "x"}, "corpus.text", 'does not exist; use "'),
    "empty file": ({"a.txt": ""}, "a.txt", "holds no text: every file is empty"),
    "empty folder": (lambda root: (root / "d").mkdir(), "d", "is a folder without files"),
    "folder of empty files": ({"a": "", "b": ""}, "", "holds no text: every file is empty"),
    "hidden files": ({".a": "x"}, "", "is a folder without files"),
    "unreadable file": (link_to_itself, "loop.txt", 'loop.txt" cannot be read: Too many levels of symbolic links'),
    "unreadable file in a folder": (link_to_itself, "", 'loop.txt" cannot be read: Too many levels of symbolic links'),
    "queue": (lambda root: os.mkfifo(root / "f"), "f", 'f" is not a regular file'),
    "packed": ({"a.jsonl.gz": "x"}, "a.jsonl.gz", 'a.jsonl.gz" is not text; unpack it'),
    "pair in a folder": ({"a.bin": "x", "b": "x"}, "", 'a.bin" is not text; name its pair by itself'),
    "not JSON": ({"a.jsonl": lines({"text": "x"}) + "nonsense\n"}, "a.jsonl", NOT_JSON),
    "nested JSON": ({"a.jsonl": "[" * 100_000}, "a.jsonl", "line 1 is nested too deeply"),
    "not an object": ({"a.jsonl": lines([1, 2])}, "a.jsonl", "line 1 is a list, not an object; write an object"),
    "no key": ({"a.jsonl": lines({"body": "x", "id": 1})}, "a.jsonl", 'line 1 has no key "text" (the text key); use'),
    "no key of many": (
        {"a.jsonl": lines({f"k{i}" * 100: 0 for i in range(100_000)})},
        "a.jsonl",
        "or one of 99995 more keys",
    ),
    "a long value": ({"a.jsonl": lines({"text": list(range(10**5))})}, "a.jsonl", 'the key "text" holds a list, not a'),
    "a long number": ({"a.jsonl": '{"text": ' + "1" * 10_000 + "}"}, "a.jsonl", 'the key "text" holds a number, not a'),
    "deep": ({"a.jsonl": "[" * 900 + "]" * 900}, "a.jsonl", "a.jsonl, line 1 is"),
    "several without text": ({"d/a.jsonl": "", "d/b.jsonl": " "}, "d", "a.jsonl and 1 more files hold no document"),
    "null": ({"a.jsonl": lines({"text": "x"}, {"text": None})}, "a.jsonl", 'line 2: the key "text" holds null, not a'),
    "number": ({"a.jsonl": lines({"text": 3})}, "a.jsonl", 'line 1: the key "text" holds a number, not a string'),
    "half a character": ({"a.jsonl": '{"text": "\\ud800"}\n'}, "a.jsonl", "line 1: \\ud800 is half of a surrogate"),
    "bad UTF-8": ({"a.jsonl": b'{"text": "x"}\n{"text": "\xff"}\n'}, "a.jsonl", "line 2: byte 10 of the line is not"),
    "no document": ({"a.jsonl": lines({"text": ""}) + "\n"}, "a.jsonl", "a.jsonl holds no document with text"),
    "wrong line in a folder": ({"d/a.jsonl": "3", "d/b": "x"}, "d", "a.jsonl, line 1 is a number, not an object"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_source_is_refused(tmp_path: Path, cache: Path, name: str):
    files, source, fragment = WRONG[name]
    root = tmp_path / "root"
    root.mkdir()
    files(root) if callable(files) else write(root, files)
    with pytest.raises(ConfigError) as error:
        open_source(root / source)
    [problem] = error.value.problems
    assert str(root / source) in problem and fragment in problem
    assert "\n" not in problem and "; " in problem and len(problem) < 2000
    assert not list(cache.glob("parallax/*"))


@pytest.mark.parametrize("keys", [{"source": "a\udcff"}, {"tokenizer": "\udcff"}, {"text_key": "\ud800"}])
def test_names_that_no_run_file_can_hold(keys: dict[str, str]):
    wanted: dict[str, Any] = {"source": "python-stdlib"} | keys
    with pytest.raises(ConfigError, match=r"data\.\w+: 'a?\\ud\w+' is not UTF-8, .*; use another name") as error:
        open_source(**wanted)
    str(error.value).encode()
    with pytest.raises(ConfigError, match="is not UTF-8"):
        open_source({"a\udcff": 1.0, "synthetic": 1.0})


@pytest.mark.parametrize("source", ["", "a\0b"])
def test_no_path_is_refused(source: str):
    with pytest.raises(ConfigError, match="is not a path; use a text file"):
        open_source(source)


def test_a_folder_with_many_wrong_files_is_said_in_a_few_lines(tmp_path: Path):
    write(tmp_path, {f"{i}.gz": "x" for i in range(20)})
    with pytest.raises(ConfigError) as error:
        open_source(tmp_path)
    assert len(error.value.problems) == 6
    assert error.value.problems[-1] == "15 more files cannot be read as text"


def test_a_path_spelled_twice_in_a_mixture_is_refused(tmp_path: Path):
    (tmp_path / "run.toml").write_text('[data]\nsource = {"t" = 0.5, "./t" = 0.5}')
    with pytest.raises(ConfigError, match=r'data\.source: "t" and "\./t" are both ".*/t"; name it once'):
        parallax.config.read(tmp_path / "run.toml")
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(ConfigError, match=r'"t" and ".*/t" are both'):
        parallax.config.read(tmp_path / "run.toml", [f'data.source={{"t"=1.0, "{Path.cwd()}/t"=1.0}}'])


def test_every_wrong_source_of_a_mixture_is_named(tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        open_source({tmp_path / "a": 1, tmp_path / "b": 1, "python-stdlib": 1})
    assert [str(tmp_path / name) in line for name, line in zip("ab", error.value.problems, strict=True)] == [True] * 2


@pytest.mark.parametrize(
    ("weights", "fragment"),
    [
        ({}, "data.source = {} names no source"),
        ({"synthetic": 0}, 'the weight 0 of "synthetic" must be finite and greater than 0'),
        ({"synthetic": 1, "python-stdlib": -1.0}, 'the weight -1.0 of "python-stdlib" must be finite'),
        ({"synthetic": float("nan")}, "the weight nan of"),
        ({"synthetic": float("inf")}, "the weight inf of"),
        ({"synthetic": 1, "python-stdlib": 1e-7}, "must be at least a millionth of the largest; use 1e-06 or more"),
    ],
)
def test_wrong_weights_are_refused(weights: dict[str, float], fragment: str):
    with pytest.raises(ConfigError) as error:
        open_source(weights)
    assert fragment in error.value.problems[0]


def test_too_short_for_its_share_of_a_batch(tmp_path: Path):
    write(tmp_path, {"a.txt": "x" * 100})
    with pytest.raises(ConfigError) as error:
        open_source({tmp_path / "a.txt": 1, "synthetic": 1}, batch=16, valid_fraction=0.1)
    [problem] = error.value.problems
    assert problem.startswith(
        "train.global_batch_size = 16 needs a share of 8 windows of train.seq_len = 8, but the held-"
    )
    assert "a.txt" in problem and "has 1; use a train.global_batch_size of at most 2, a" in problem
    open_source({tmp_path / "a.txt": 1, "synthetic": 1}, batch=2, valid_fraction=0.1)


@pytest.mark.parametrize("weights", [(0.3, 0.7), (1, 3), (1, 1e-3), (0.123, 0.456)])
@pytest.mark.parametrize("batch", [1, 2, 7, 10, 16])
def test_where_no_source_is_too_short_there_is_a_batch_of_held_out_data(
    tmp_path: Path, weights: tuple[float, float], batch: int
):
    for size in range(20, 1000, 20):
        write(tmp_path, {"a.txt": "x" * size})
        mixture = {tmp_path / "a.txt": weights[0], "synthetic": weights[1]}
        try:
            data = open_source(mixture, batch=batch, valid_fraction=0.5)
        except ConfigError as error:
            assert "needs a share of" in str(error)
        else:
            assert data.held_out.max_batches >= 1
            assert data.held_out.max_batches * batch * weights[0] / sum(weights) < size / 2 / 8 * 1.02
            list(data.held_out.batches(1))
            break
    else:
        pytest.fail("no size was enough")


@pytest.mark.parametrize("size", [0, 100, 2000])
def test_a_file_that_changes_while_it_is_used_is_said(tmp_path: Path, size: int):
    write(tmp_path, {"a.txt": "x" * 1000})
    data = open_source(tmp_path / "a.txt")
    write(tmp_path, {"a.txt": "x" * size})
    with pytest.raises(ConfigError, match=r"a\.txt was changed while it was in use; start again"):
        list(itertools.islice(data.train.iterate(0, itertools.repeat(2)), 1))


def test_other_text_of_the_same_length_has_another_fingerprint(tmp_path: Path):
    files = {f"f{i}.txt": f"text {i}" * 10 for i in range(20)}
    first = open_source(write(tmp_path / "a", files)).fingerprint
    same = open_source(write(tmp_path / "b", files)).fingerprint
    other = open_source(write(tmp_path / "c", files | {"f7.txt": "test 7" * 10})).fingerprint
    strip = lambda facts: [{**source, "name": "", "sha256": ""} for source in facts["sources"]]
    assert strip(first) == strip(same) == strip(other)
    digests = [facts["sources"][0]["sha256"] for facts in (first, same, other)]
    assert digests[0] == digests[1] != digests[2]
    assert "sha256" not in open_source("synthetic").fingerprint["sources"][0]


def test_links_to_folders_are_followed_and_loops_end(tmp_path: Path):
    write(tmp_path, {"root/a.txt": "a", "root/b/c.txt": "c", "elsewhere/d.txt": "d", "elsewhere/.hidden": "no"})
    (tmp_path / "root" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root" / "again").symlink_to("b")
    (tmp_path / "root" / "b" / "up").symlink_to("..")
    (tmp_path / "elsewhere" / "loop").symlink_to(tmp_path / "elsewhere")
    assert [file.name for file in find_files(str(tmp_path / "root"), "")] == ["a.txt", "b/c.txt", "link/d.txt"]


def test_a_byte_order_mark_of_a_jsonl_file(tmp_path: Path):
    for text in (lines({"text": "one"}, {"text": "two"}), "\n" + lines({"text": "one"}, {"text": "two"})):
        write(tmp_path, {"a.jsonl": b"\xef\xbb\xbf" + text.encode()})
        opened = split(tmp_path / "a.jsonl")
        assert text_of(opened.train) + text_of(opened.held_out) == b"one\0two\0"


def test_numbers_of_any_length_may_stand_beside_the_text(tmp_path: Path):
    write(tmp_path, {"a.jsonl": '{"id": ' + "7" * 10_000 + ', "text": "one"}\n{"text": "two"}'})
    assert split(tmp_path / "a.jsonl").documents == 2
