"""Asking the system to read a file ahead: whatever lies at the path, and whatever the system lacks, nothing goes wrong."""

from __future__ import annotations

import os
import time

import pytest
from test_read_around import evict, resident

from rmqstore.files.mapped_file import read_ahead

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
        # As on macOS.
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


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs posix_fadvise, to take pages out of memory")
@pytest.mark.parametrize("stretch", [(), (5,), (5, SIZE - 10), (0, 2 * SIZE)])
def test_pages_come_into_memory(tmp_path, stretch):
    path = tmp_path / "0.idx"
    path.write_bytes(b"#" * SIZE)
    evict([path])
    read_ahead(str(path), *stretch)
    until = time.monotonic() + 240
    while resident(path) < SIZE // os.sysconf("SC_PAGESIZE"):
        assert time.monotonic() < until
        time.sleep(0.01)


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
    # Nobody can have read what lies behind the end.
    read_ahead(str(path), SIZE, 100)
    assert [request[1:3] for request in asked] == [(SIZE, 100)]
