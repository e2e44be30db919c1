"""Files that verbs write: what may stand there before, links, and several of which one cannot be written."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from parallax.output import output_problems, write_all, write_whole


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def left() -> dict[str, str]:
    return {path.name: path.read_text() for path in Path().iterdir()}


def test_what_is_no_file_is_refused():
    os.mkfifo("pipe")
    Path("to-null").symlink_to(os.devnull)
    Path("loop").symlink_to("loop")
    Path("to-nowhere").symlink_to("no/file")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        for name, what in {
            os.devnull: "is a device and is not written to; use the name of a new file",
            "to-null": "is a device and",
            "pipe": "is a named pipe and",
            "socket": "is a socket and",
            "loop": "is a loop of links and",
            "to-nowhere": f": the folder {Path('no').resolve()} does not exist; make it first",
            ".": "is a folder and cannot be written",
        }.items():
            (line,) = output_problems({"-o": name})
            assert line.startswith(f"-o {name}") and what in line, line


def test_what_may_be_written():
    Path("file").write_text("before")
    Path("link").symlink_to("new")
    assert output_problems({"-o": "file", "--html": "link", "--markdown": "other", "--svg": None}) == []


def test_a_link_leads_to_what_is_written():
    os.mkdir("far")
    Path("far/file").write_text("before")
    Path("link").symlink_to("far/file")
    write_whole(Path("link"), "after")
    assert os.path.islink("link") and Path("far/file").read_text() == "after"
    assert os.listdir("far") == ["file"]


def test_where_one_cannot_be_written_none_is():
    Path("one").write_text("before")
    long = "x" * 300
    with pytest.raises(OSError, match="File name too long") as caught:
        write_all({Path("one"): "after", Path(long): "new"})
    assert caught.value.filename == long
    assert left() == {"one": "before"}


def test_what_was_written_before_is_said(monkeypatch: pytest.MonkeyPatch):
    replace = os.replace

    def refuse(source: Path, target: str) -> None:
        if target.endswith("two"):
            raise PermissionError(1, "Operation not permitted", target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="Operation not permitted; written before: one"):
        write_all({Path("one"): "new", Path("two"): "new", Path("three"): "new"})
    assert left() == {"one": "new"}


def test_a_text_that_is_no_utf8_leaves_nothing():
    with pytest.raises(UnicodeEncodeError):
        write_all({Path("one"): "new", Path("two"): "\udc80"})
    assert left() == {}
