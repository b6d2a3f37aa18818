"""The space of a rebuild on disk: the written pages and few more; RocketMQ's files have holes there.

A store of many queues with a message each: full files would be 6 MB a queue and 420 MB of index.  The bytes are compared
with those of the single-process rebuild elsewhere; here it is where they have space, and that nobody writes into a hole.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path

import pytest

from rmqstore import Message, MessageStore, StoreConfig, rebuild, verify

# Elsewhere (macOS, `make test-portable`) a page of a file gets its space by writing the whole file's zeros: nothing stays a hole.
pytestmark = pytest.mark.skipif(
    not (hasattr(os, "posix_fallocate") and hasattr(os, "SEEK_DATA")), reason="this system allocates whole files only"
)

if sys.platform != "linux":
    pytest.skip("st_blocks of other systems say other things", allow_module_level=True)

QUEUES = 40
CONFIG = StoreConfig(mapped_file_size_commit_log=1 << 20, populate_ahead_size=0, clean_resource_interval=0)
FOLDERS = ("consumequeue", "batchconsumequeue", "consumequeue_ext", "index")
PAGE = 4096


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    # Small files while it is written, which keeps the test quick; the rebuild gets RocketMQ's sizes.
    root = tmp_path_factory.mktemp("many") / "store"
    small = CONFIG.replace(mapped_file_size_consume_queue=2000, max_hash_slot_num=100, max_index_num=400)
    with MessageStore.open(root, config=small) as opened:
        for number in range(QUEUES):
            opened.put_message(Message("Many", b"body", keys=f"k{number}", tags="t"), number)
    return root


def spread(store: Path, out: Path) -> None:
    from mapped_rebuild import in_order, rebuild_with

    rebuild_with(in_order, store, config=CONFIG, output=out)


WAYS = {"rebuild": lambda store, out: rebuild(store, config=CONFIG, output=out), "spark": spread}


def files_of(root: Path) -> list[Path]:
    return [path for folder in FOLDERS for path in (root / folder).rglob("*") if path.is_file()]


def pages_needed(path: Path) -> int:
    """Pages of a file that hold a byte that is not zero."""
    num = 0
    with open(path, "rb") as file:
        end = path.stat().st_size
        at = 0
        while at < end:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA) // PAGE * PAGE
            except OSError:
                break
            num += any(os.pread(file.fileno(), PAGE, at))
            at += PAGE
    return num


@pytest.mark.parametrize("way", WAYS)
def test_holes_stay_holes(store, tmp_path, way):
    WAYS[way](store, tmp_path)
    files = files_of(tmp_path)
    assert len(files) == QUEUES + 1
    for path in files:
        status = path.stat()
        assert status.st_size in (6_000_000, CONFIG.index_file_size)
        assert status.st_blocks * 512 <= (pages_needed(path) + 2) * PAGE, path


@pytest.mark.parametrize("way", WAYS)
def test_a_writer_that_goes_on_reserves_space_first(store, tmp_path, way):
    WAYS[way](store, tmp_path / "new")
    root = tmp_path / "store"
    shutil.copytree(store / "commitlog", root / "commitlog")
    for folder in ("consumequeue", "index"):
        os.rename(tmp_path / "new" / folder, root / folder)
    assert list(verify(root, CONFIG)) == []
    with MessageStore.open(root, config=CONFIG) as opened:
        opened.put_message(Message("Many", b"more", keys="again"), 3)
        written = root / "consumequeue" / "Many" / "3" / f"{0:020}"
        assert written.stat().st_blocks * 512 == PAGE
        opened.put_messages([Message("Many", b"more")] * 300, 3)
        assert 2 * PAGE <= written.stat().st_blocks * 512 <= 4 * PAGE
        index = next((root / "index").iterdir())
        assert index.stat().st_blocks * 512 >= index.stat().st_size
        assert opened.query_message("Many", "k3")[0].body == b"body"
    full = {path for path in files_of(root) if path.stat().st_blocks * 512 >= path.stat().st_size}
    assert full == {index}


def test_a_full_disk_is_an_error_and_leaves_the_store(store, tmp_path, monkeypatch):
    # Space is asked for before each write into a hole: whichever request fails, nothing was swapped in.
    real, calls = os.posix_fallocate, []

    def counted(fd, begin, size):
        calls.append((begin, size))
        real(fd, begin, size)

    monkeypatch.setattr(os, "posix_fallocate", counted)
    rebuild(store, config=CONFIG, output=tmp_path / "whole")
    assert len(calls) >= QUEUES + 2 and max(size for _, size in calls) <= 16 * PAGE
    before = {path: path.read_bytes() for path in files_of(store)}
    for failing in (0, 1, QUEUES // 2, len(calls) - 1):
        left = [failing]

        def full(fd, begin, size, left=left):
            if left[0] == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            left[0] -= 1
            real(fd, begin, size)

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=r"No space left|could not be created"):
            rebuild(store, config=CONFIG)
        assert {path: path.read_bytes() for path in files_of(store)} == before
        assert not (store / ".rmqstore-rebuild").exists()


def test_no_page_of_a_full_queue_is_missing(tmp_path):
    # Files that roll, gaps, and an extension: what is written lies in pages that were asked for.
    config = CONFIG.replace(mapped_file_size_consume_queue=40_000, enable_consume_queue_ext=True)
    config = config.replace(mapped_file_size_consume_queue_ext=8192, max_hash_slot_num=5000, max_index_num=3000)
    with MessageStore.open(tmp_path / "store", config=config) as opened:
        for start in range(0, 9000, 500):
            opened.put_messages([Message("T", b"", keys=f"k{start + i}") for i in range(500)])
    rebuild(tmp_path / "store", config=config)
    assert list(verify(tmp_path / "store", config)) == []
    for path in files_of(tmp_path / "store"):
        assert path.stat().st_blocks * 512 <= (pages_needed(path) + 2) * PAGE, path
