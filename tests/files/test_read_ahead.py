"""Asking the system to read a file ahead: whatever lies at the path, and whatever the system lacks, nothing goes wrong."""

from __future__ import annotations

import os

import pytest

from rmqstore.files.open_file import read_ahead

SIZE = 1 << 20


@pytest.mark.parametrize("what", ["file", "empty", "missing", "FIFO", "folder", "link to nothing", "no such calls", "error"])
def test_nothing_is_lost_where_it_cannot_be_read_ahead(tmp_path, monkeypatch, what):
    path = tmp_path / "0.idx"
    if what == "FIFO":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "link to nothing":
        path.symlink_to("nothing")
    elif what != "missing":
        path.write_bytes(b"" if what == "empty" else bytes(10_000))
    if what == "no such calls":
        # Like macOS.
        for name in ("posix_fadvise", "POSIX_FADV_WILLNEED", "preadv", "RWF_NOWAIT"):
            monkeypatch.delattr(os, name, raising=False)
    elif what == "error":

        def refused(*_):
            raise OSError("refused")

        for name in ("posix_fadvise", "preadv"):
            monkeypatch.setattr(os, name, refused, raising=False)
    before = os.listdir("/dev/fd")
    read_ahead(str(path))
    assert os.listdir("/dev/fd") == before


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system reads nothing ahead")
@pytest.mark.parametrize(
    "stretch, asked_for",
    [((), (0, SIZE)), ((5,), (5, SIZE - 5)), ((5, SIZE - 10), (5, SIZE - 10)), ((0, 2 * SIZE), (0, 2 * SIZE))],
)
def test_what_is_not_in_memory_is_asked_for(tmp_path, monkeypatch, stretch, asked_for):
    # The operating system decides what it reads: it may keep pages, or be short of memory.
    path = tmp_path / "0.idx"
    path.write_bytes(b"#" * SIZE)
    asked = []

    def not_there(*_):
        raise BlockingIOError

    monkeypatch.setattr(os, "preadv", not_there, raising=False)
    monkeypatch.setattr(os, "posix_fadvise", lambda *request: asked.append(request[1:]))
    read_ahead(str(path), *stretch)
    assert asked == [(*asked_for, os.POSIX_FADV_WILLNEED)]


@pytest.mark.skipif(
    not hasattr(os, "RWF_NOWAIT") or not hasattr(os, "posix_fadvise"), reason="the system does not tell what is in memory"
)
def test_what_is_in_memory_is_not_asked_for(tmp_path, monkeypatch):
    path = tmp_path / "0.idx"
    path.write_bytes(b"#" * SIZE)
    with open(path, "rb") as file:
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except OSError as error:
            pytest.skip(f"nor does this file system: {error}")
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *request: asked.append(request))
    read_ahead(str(path))
    read_ahead(str(path), 5, 100)
    assert not asked
    # Bytes after the end cannot have been read.
    read_ahead(str(path), SIZE, 100)
    assert [request[1:3] for request in asked] == [(SIZE, 100)]
