"""Space on disk: how much a writer takes, how often it asks, and that nothing is written where it did not ask.

Counts of calls of `mapped_file._allocate`, the only place that asks the system for space, and of blocks on disk.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from rmqstore import DiskFullError, Message, MessageStore, StoreConfig
from rmqstore.files import mapped_file
from rmqstore.store.writing import Writing

PAGE = 4096
#: Queue files have RocketMQ's size, 6 MB; segments and the index are small.
CONFIG = StoreConfig(
    mapped_file_size_commit_log=1 << 24,
    max_hash_slot_num=1000,
    max_index_num=100_000,
    flush_interval_commit_log=0,
    flush_interval_consume_queue=0,
    populate_ahead_size=0,
    clean_resource_interval=0,
)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="st_blocks of other systems say other things")


@pytest.fixture
def asked(monkeypatch) -> list[tuple[str, int, int]]:
    """The requests for space: path (at that time), begin, end."""
    calls: list[tuple[str, int, int]] = []
    reserve_range, allocate = mapped_file.MappedFile.reserve_range, mapped_file._allocate
    paths: list[str] = []

    def named(self, begin: int, end: int) -> None:
        paths.append(self.path)
        reserve_range(self, begin, end)

    def counted(fd: int, begin: int, end: int) -> None:
        calls.append((paths[-1], begin, end))
        allocate(fd, begin, end)

    monkeypatch.setattr(mapped_file.MappedFile, "reserve_range", named)
    monkeypatch.setattr(mapped_file, "_allocate", counted)
    return calls


def space(path: str | Path) -> int:
    return os.stat(path).st_blocks * 512


def queue_files(root: Path) -> list[Path]:
    return sorted(path for path in (root / "consumequeue").rglob("*") if path.is_file())


def bodies(store: MessageStore, queue_id: int = 0) -> list[bytes]:
    found: list[bytes] = []
    while messages := store.get_message("Orders", queue_id, len(found), 1000).messages:
        found += [message.body for message in messages]
    return found


@on_linux
def test_a_queue_of_few_messages_takes_a_page(tmp_path, asked):
    root = tmp_path / "store"
    with MessageStore.open(root, config=CONFIG) as store:
        for number in range(3):
            for queue_id in range(200):
                store.put_message(Message("Orders", b"%d" % number, keys="k"), queue_id)
    files = queue_files(root)
    assert len(files) == 200
    assert all(os.path.getsize(path) == 6_000_000 and space(path) == PAGE for path in files)
    # Once for each queue, before its file had a name; segment and index file are whole.
    assert sorted(end for _, _, end in asked) == [PAGE] * 200 + sorted(
        [CONFIG.index_file_size, CONFIG.mapped_file_size_commit_log]
    )
    assert not any("consumequeue" in path for path, _, _ in asked)
    with MessageStore.open(root, config=CONFIG, read_only=True) as store:
        assert all(len(store.get_message("Orders", queue_id).messages) == 3 for queue_id in range(200))


def test_a_queue_asks_a_few_times_and_only_for_what_follows(tmp_path, asked):
    root = tmp_path / "store"
    learned = []
    with MessageStore.open(root, config=CONFIG.replace(message_index_enable=False)) as store:
        note_ends = Writing.note_ends
        Writing.note_ends, previous = lambda *args: (learned.append(1), note_ends(*args))[1], note_ends
        try:
            for number in range(3000):
                store.put_message(Message("Orders", b"%d" % number))
                last = store.queues.find("Orders", 0).files.last()
                assert (number + 1) * 20 <= last.reserved <= max(PAGE, 2 * (number + 1) * 20 + PAGE)
        finally:
            Writing.note_ends = previous
        assert bodies(store) == [b"%d" % number for number in range(3000)]
        ranges = [each[1:] for each in asked if each[2] != CONFIG.mapped_file_size_commit_log]
        assert ranges == [(0, 4096), (4096, 12288), (12288, 28672), (28672, 61440)]
        # All other puts are one compiled call.
        assert len(learned) == len(ranges)
    # An opened file has not asked yet; then it goes on as before.
    asked.clear()
    with MessageStore.open(root, config=CONFIG.replace(message_index_enable=False)) as store:
        for number in range(3000, 3073):
            store.put_message(Message("Orders", b"%d" % number))
        assert [each[1:] for each in asked if "consumequeue" in each[0]] == [(0, 122880)]
        assert len(bodies(store)) == 3073


@on_linux
@pytest.mark.parametrize("queues", [1, 7])
def test_a_table_over_queues_that_fill_their_files(tmp_path, asked, queues):
    config = CONFIG.replace(message_index_enable=False, mapped_file_size_consume_queue=100_000)
    root = tmp_path / "store"
    table = pa.table(
        {
            "topic": ["Orders"] * 1400,
            "queue_id": pa.array([number % queues for number in range(1400)], pa.int32()),
            "body": [b"%d" % number for number in range(1400)],
        }
    )
    with MessageStore.open(root, config=config) as store:
        for _ in range(10):
            store.put_table(table)
            for queue_id in range(queues):
                files = store.queues.find("Orders", queue_id).files
                last = files.last()
                assert files.wrote_where - last.file_from_offset <= last.reserved <= space(last.path)
        assert bodies(store) == [b"%d" % number for _ in range(10) for number in range(0, 1400, queues)]
    files = queue_files(root)
    assert len(files) == (3 if queues == 1 else queues)
    assert len([each for each in asked if each[2] <= 100_000]) <= 4 * len(files)
    with MessageStore.open(root, config=config) as store:
        assert store.recovery_report.clean


@pytest.mark.parametrize("num", [1, 100, 5100], ids=["one", "many", "over files"])
@pytest.mark.parametrize("failing", range(4))
def test_each_growth_may_find_a_full_disk(tmp_path, monkeypatch, num, failing):
    config = CONFIG.replace(message_index_enable=False, mapped_file_size_consume_queue=100_000)
    allocate = mapped_file._allocate
    state = {"left": failing, "full": False, "failed": 0}

    def limited(fd: int, begin: int, end: int) -> None:
        if end <= 100_000 and (state["full"] or state["left"] == 0):
            state["full"] = True
            state["failed"] += 1
            allocate(fd, begin, (begin + end) // 2)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        state["left"] -= end <= 100_000
        allocate(fd, begin, end)

    root = tmp_path / "store"
    put: list[bytes] = []
    with MessageStore.open(root, config=config) as store:
        monkeypatch.setattr(mapped_file, "_allocate", limited)
        while len(put) < 11_000:
            made = [b"%d" % (len(put) + number) for number in range(num)]
            messages = [Message("Orders", body) for body in made]
            end = store.commit_log.max_offset
            try:
                store.put_message(messages[0]) if num == 1 else store.put_messages(messages)
            except DiskFullError as error:
                assert error.errno == errno.ENOSPC
                assert "rmqstore-allocating" in error.filename or "consumequeue" in error.filename
                assert store.commit_log.max_offset == end and store.max_queue_offset("Orders") == len(put)
                # It fails as long as the disk is full.
                with pytest.raises(DiskFullError, match="No space left"):
                    store.put_messages(messages)
                state.update(full=False, left=-1)
            else:
                put += made
        assert state["failed"] == 2
        assert bodies(store) == put
    with MessageStore.open(root, config=config) as store:
        assert store.recovery_report.clean and bodies(store) == put


def test_the_extension_grows_too(tmp_path, asked):
    config = CONFIG.replace(message_index_enable=False, enable_consume_queue_ext=True)
    root = tmp_path / "store"
    with MessageStore.open(root, config=config) as store:
        for number in range(30):
            store.put_messages([Message("Orders", b"%d" % number, tags="t")] * 50)
            last = store.queues.find("Orders", 0).ext.files.last()
            assert (number + 1) * 50 * 20 <= last.reserved <= 2 * (number + 1) * 50 * 20 + PAGE
        assert len(bodies(store)) == 1500
    [written] = [path for path in (root / "consumequeue_ext").rglob("*") if path.is_file()]
    assert os.path.getsize(written) == config.mapped_file_size_consume_queue_ext
    if sys.platform == "linux":
        assert space(written) <= 16 * PAGE
    assert len([each for each in asked if each[2] != config.mapped_file_size_commit_log]) <= 8
