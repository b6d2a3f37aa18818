"""How much a read-only look at many queues brings into memory: pages that are asked for, nothing that is read around them."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from rmqstore import Message, MessageStore, StoreConfig, describe, rebuild
from rmqstore.files.mapped_file import MappedFile

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs posix_fadvise, to take pages out of memory")

if sys.platform != "linux":
    pytest.skip("other systems have another mincore", allow_module_level=True)

QUEUES = 30
PAGE = mmap.PAGESIZE
# Queue files of 6 MB of which a page is written, and a log in which the newest records of the queues lie far from each other.
CONFIG = StoreConfig(
    mapped_file_size_commit_log=64 << 20, max_hash_slot_num=100, max_index_num=400, clean_resource_interval=0,
    populate_ahead_size=0,
)  # fmt: skip


@pytest.fixture
def store(tmp_path) -> Path:
    root = tmp_path / "store"
    with MessageStore.open(root, config=CONFIG.replace(mapped_file_size_consume_queue=2000)) as opened:
        for number in range(QUEUES):
            opened.put_message(Message("Many", b"x", keys="k"), number)
            opened.put_message(Message("Filling", bytes(1 << 20)))
        opened.put_message(Message("Many", b"end", keys="k"), 0)
    rebuild(root, ("consumequeue",), config=CONFIG)
    return root


def files_of(root: Path, part: str) -> list[Path]:
    return [path for path in (root / part).rglob("*") if path.is_file()]


def resident(path: Path) -> int:
    """Pages of a file that are in memory."""
    size = path.stat().st_size
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
        held = np.frombuffer(mapped, np.uint8)
        pages = (ctypes.c_ubyte * (-(-size // PAGE)))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(held.ctypes.data), ctypes.c_size_t(size), pages) == 0
        del held
        return int(np.count_nonzero(np.frombuffer(pages, np.uint8) & 1))


def evict(paths: list[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def look_by_stats(root: Path) -> None:
    with MessageStore.open(root, config=CONFIG, read_only=True) as store:
        assert len(store.stats().queues) == QUEUES + 1


LOOKS = {"describe": lambda root: describe(root, CONFIG), "stats": look_by_stats}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_look_at_many_queues_reads_pages_and_nothing_around_them(store, look):
    queues = files_of(store, "consumequeue")
    assert len(queues) == QUEUES + 1
    evict(queues)
    if any(resident(path) for path in queues):
        pytest.skip("this file system keeps all of its pages in memory")
    look(store)
    assert max(resident(path) for path in queues) <= 4


def test_records_far_from_each_other_are_read_by_themselves(store):
    with MessageStore.open(store, config=CONFIG, read_only=True) as opened:
        log = files_of(store, "commitlog")
        places = [queue.last_record().phy_offset for queue in opened.queues]
        evict(log)
        opened.commit_log.files.forget_files()
        evict(log)
        if sum(map(resident, log)):
            pytest.skip("this file system keeps all of its pages in memory")
        with opened.commit_log.single_records():
            assert all(opened.commit_log.store_timestamp_at(place) > 0 for place in places)
        # A record's lengths stand around its body: head, topic and properties.
        assert sum(map(resident, log)) <= 6 * len(places)
        assert len(list(opened.messages())) == 2 * QUEUES + 1


def of_this_process(path: Path) -> int:
    """Bytes of a mapped file that count as this process's memory."""
    size, found = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split()[0]:
            found = line.endswith(str(path))
        elif found and line.startswith("Rss:"):
            size += int(line.split()[1]) * 1024
    return size


@pytest.mark.parametrize("last", [0, 20 << 20])
def test_a_segment_of_zeros_does_not_stay_in_memory(tmp_path, last):
    """The writer created the next segment ahead, of zeros: opening reads all of it to find the end of the log."""
    path = tmp_path / f"{0:020d}"
    size = 64 << 20
    data = bytearray(size)
    if last:
        data[last - 1] = 1
    path.write_bytes(data)
    mapped_file = MappedFile(path, size, read_only=True)
    assert mapped_file.last_nonzero() == last
    assert of_this_process(path) <= 10 << 20
    for pos in (1, last, size - 1, size):
        assert mapped_file.last_nonzero(pos) == max(last, pos)
    mapped_file.close()
