"""Pages ahead of the writer: `Region.populate`, what is made of it for files and index files, and the thread of a store.

What is resident is read from /proc/self/smaps, which counts the pages that a mapping can use without a fault.  A few pages
more than asked for may be there, because the system brings them in larger pieces; so bounds have slack.
"""

from __future__ import annotations

import gc
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rmqstore import IndexFile, Message, MessageStore, StoreConfig
from rmqstore._core import Region
from rmqstore.errors import OffsetOutOfRangeError, ReadOnlyError, StoreClosedError
from rmqstore.files.mapped_file import MappedFile, MappedFilePool
from rmqstore.files.mapped_file_queue import Handling, MappedFileQueue
from rmqstore.files.prepared_files import PreparedFiles
from rmqstore.store.upkeep import Housekeeping, PopulateAhead, Task

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGESIZE")
PATIENCE = 240
SLACK = 2 * MIB
CONFIG = StoreConfig(
    mapped_file_size_commit_log=32 * MIB,
    mapped_file_size_consume_queue=2 * MIB // 20 * 20,
    max_hash_slot_num=100_000,
    max_index_num=400_000,
    populate_ahead_size=8 * MIB,
    flush_interval_commit_log=0,
    flush_interval_consume_queue=0,
    clean_resource_interval=0,
)


def resident(path: str | os.PathLike[str]) -> int:
    """Return the bytes of the file at `path` that this process has mapped to a page."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(errors="surrogateescape").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.split(None, 5)[-1] == os.path.realpath(path)
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def can_populate() -> bool:
    # make test-portable: a build that does not ask for it
    if not os.path.exists("/proc/self/smaps") or os.environ.get("RMQSTORE_PORTABLE"):
        return False
    release = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
    return sys.platform == "linux" and release >= (5, 14)


populates = pytest.mark.skipif(not can_populate(), reason="needs Linux 5.14 or later")


def until(condition, what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def made(tmp_path, size: int, name: str = "file") -> MappedFile:
    return PreparedFiles(tmp_path, size).create(tmp_path / name)


def threads(word: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if word in thread.name]


def messages(num: int, size: int = 1000) -> list[Message]:
    return [Message("Orders", bytes(size), keys=[f"K{i}"]) for i in range(num)]


# ---------------------------------------------------------------------------------------------------------------
# Region, MappedFile, IndexFile


@populates
def test_populated_pages_are_there_and_no_others(tmp_path):
    mapped_file = made(tmp_path, 64 * MIB)
    region = mapped_file.region
    assert resident(mapped_file.path) == 0
    assert region.populate(8 * MIB + 1, 4 * MIB) is True
    assert 4 * MIB <= resident(mapped_file.path) <= 4 * MIB + SLACK
    assert region.read(8 * MIB, PAGE) == bytes(PAGE)
    assert region.populate(0, 0) is True and region.populate(64 * MIB, 0) is True
    # The last page, from its last byte.
    assert region.populate(64 * MIB - 1, 1) is True
    mapped_file.close()


@populates
def test_a_file_that_ends_within_a_page(tmp_path):
    mapped_file = made(tmp_path, 3 * PAGE + 7)
    assert mapped_file.region.populate(PAGE + 3, 2 * PAGE + 4) is True
    assert resident(mapped_file.path) >= 3 * PAGE
    assert mapped_file.region.read(0, mapped_file.size) == bytes(mapped_file.size)


def test_populate_checks_its_bounds(tmp_path):
    mapped_file = made(tmp_path, 4 * PAGE)
    region = mapped_file.region
    for pos, size in [(-1, 1), (0, -1), (0, 4 * PAGE + 1), (4 * PAGE, 1), (2**62, 2**62), (2**63 - 1, 1)]:
        with pytest.raises(OffsetOutOfRangeError):
            region.populate(pos, size)
    assert region.pins == 0
    with open(mapped_file.path, "rb") as file:
        read_only = Region.map(file.fileno(), 4 * PAGE)
    with pytest.raises(ReadOnlyError):
        read_only.populate(0, 1)
    assert read_only.pins == 0
    region.close()
    with pytest.raises(StoreClosedError):
        region.populate(0, 1)


def test_populate_changes_no_byte_under_a_writer(tmp_path):
    size = 16 * MIB
    mapped_file = made(tmp_path, size)
    region = mapped_file.region
    content = random.Random(1).randbytes(size)
    started = threading.Event()

    def write() -> None:
        started.set()
        for at in range(0, size, 1000):
            region.write(at, content[at : at + 1000])

    writer = threading.Thread(target=write)
    writer.start()
    started.wait()
    for _ in range(3):
        for at in range(0, size, MIB):
            region.populate(at, MIB)
    writer.join()
    assert region.read(0, size) == content
    region.populate(0, size)
    assert region.read(0, size) == content


def test_close_while_pages_are_made_ready(tmp_path):
    for number in range(5):
        mapped_file = made(tmp_path, 64 * MIB, str(number))
        region = mapped_file.region
        ended: list[object] = []

        def populate(region: Region = region, ended: list[object] = ended) -> None:
            try:
                ended.append(region.populate(0, 64 * MIB))
            except StoreClosedError as error:
                ended.append(error)

        thread = threading.Thread(target=populate)
        thread.start()
        time.sleep(0.002 * number)
        mapped_file.destroy()
        region.close()
        thread.join()
        assert len(ended) == 1 and region.closed and region.pins == 0


@populates
def test_only_files_with_space_on_disk_are_populated(tmp_path):
    path = tmp_path / "sparse"
    with open(path, "wb") as file:
        file.truncate(8 * MIB)
    mapped_file = MappedFile(path, 8 * MIB)
    blocks = os.stat(path).st_blocks
    assert mapped_file.populate(0, MIB) is False, "it is not mapped"
    region = mapped_file.region
    assert mapped_file.populate(0, MIB) is False, "it has holes"
    assert resident(path) == 0 and os.stat(path).st_blocks == blocks
    mapped_file.reserve(2 * MIB + 1)
    assert mapped_file.populate(MIB, 2 * MIB) is False, "a part has no space"
    assert MIB <= resident(path) <= MIB + PAGE + SLACK
    assert os.stat(path).st_blocks * 512 == 2 * MIB + PAGE
    mapped_file.reserve(8 * MIB)
    assert mapped_file.populate(7 * MIB, 8 * MIB) is True
    assert 2 * MIB <= resident(path) <= 2 * MIB + PAGE + SLACK
    for pos, size in [(8 * MIB, 1), (9 * MIB, 1), (0, 0), (0, -5)]:
        assert mapped_file.populate(pos, size) is False
    region.close()
    assert mapped_file.populate(0, 1) is False, "it is closed"
    mapped_file.destroy()
    assert mapped_file.populate(0, 1) is False, "it is deleted"


NO_SPACE = """
import os, sys
from rmqstore._core import Region

with open(sys.argv[1], "wb+") as file:
    file.truncate(1 << 20)
    region = Region.map(file.fileno(), 1 << 20, True)
    if sys.argv[2] == "short":
        # A hole on a full disk: a write to these pages ends the process with SIGBUS.
        os.ftruncate(file.fileno(), 4096)
print(region.populate(0, 1), region.populate(0, 1 << 20), region.populate((1 << 20) - 1, 1), region.pins)
"""


@populates
@pytest.mark.parametrize("case", ["short", "full disk"])
def test_where_a_write_would_end_the_process_populate_says_false(tmp_path, case):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = case == "full disk"
    if mounted and (
        shutil.which("mount") is None
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", folder], capture_output=True).returncode
    ):
        assert not os.environ.get("RMQSTORE_MOUNTS")
        pytest.skip("a small file system cannot be mounted here")
    try:
        command = [sys.executable, "-c", NO_SPACE, folder / "file", case]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        assert (ran.returncode, ran.stdout.split()) == (0, ["True", "False", "False", "0"]), ran.stderr
    finally:
        if mounted:
            subprocess.run(["umount", folder], check=True)


def test_a_file_opened_read_only_is_never_populated(tmp_path):
    path = made(tmp_path, MIB).path
    mapped_file = MappedFile(path, MIB, read_only=True)
    assert mapped_file.region.read(0, 1) == b"\0"
    assert mapped_file.populate(0, MIB) is False


@populates
def test_index_file(tmp_path):
    config = StoreConfig(max_hash_slot_num=1_000_000, max_index_num=2_000_000)
    with IndexFile.create(tmp_path / "20260101000000000", config) as index:
        before = index.region.read(0, 100)
        index.populate(0)
        assert 4_000_000 <= resident(index.path) <= 4_000_040 + SLACK
        index.populate(100_000)
        assert 6_000_000 <= resident(index.path) <= 6_000_000 + 2 * SLACK
        assert index.put_keys(["a", "b"], np.array([1, 2]), np.array([1_700_000_000_000] * 2)) == 2
        index.populate(10**12)
        assert resident(index.path) >= config.index_file_size - PAGE
        assert index.select_phy_offset("b") == [2] and before == bytes(100)
        index.populate()
    with IndexFile.open(index.path, config, read_only=True) as read_only, pytest.raises(ReadOnlyError):
        read_only.populate()
    with pytest.raises(StoreClosedError):
        index.populate()


# ---------------------------------------------------------------------------------------------------------------
# The windows ahead of the ends, without the thread


def quiet_store(tmp_path, **options) -> tuple[MessageStore, PopulateAhead]:
    store = MessageStore.open(tmp_path / "store", config=CONFIG.replace(populate_ahead_size=0, **options))
    assert not threads("rmqstore-populating store")
    return store, PopulateAhead(store.commit_log.files, store.queues, store.index_service, 8 * MIB)


def segment(store: MessageStore, number: int = -1) -> str:
    files = store.commit_log.files
    return files.file(files.offsets[number]).path


@populates
def test_the_log_has_pages_ahead_in_proportion_to_its_growth(tmp_path):
    store, ahead = quiet_store(tmp_path)
    with store:
        assert ahead.look() == 26, "nothing is written, so that the next look is later"
        store.put_messages(messages(1))
        assert ahead.look() == 20, "a new file: more may come"
        assert resident(segment(store)) <= 512 << 10
        for interval in (26, 33, 42, 53, 67, 84, 106, 133, 160, 160):
            assert ahead.look() == interval
        store.put_messages(messages(10))
        assert ahead.look() == 20
        # A slow writer has no pages ahead, as a flush would force them with nothing in them.
        assert resident(segment(store)) <= 512 << 10
        before = store.commit_log.max_offset
        store.put_messages(messages(1000))
        grown = store.commit_log.max_offset - before
        assert ahead.look() == 20
        assert before + 5 * grown - PAGE <= resident(segment(store)) <= before + 5 * grown + SLACK
        for _ in range(5):
            store.put_messages(messages(3000))
            ahead.look()
        end = store.commit_log.max_offset
        assert end + 6 * MIB <= resident(segment(store)) <= end + 8 * MIB + SLACK


@populates
def test_queue_and_index_have_pages_ahead_where_they_grow(tmp_path):
    store, ahead = quiet_store(tmp_path)
    with store:
        store.put_messages(messages(8), 0)
        ahead.look()
        files = store.queues.find("Orders", 0).files
        index = store.index_service.newest()
        assert ahead._slots_ready is False
        store.put_messages(messages(5000, 10), 0)
        ahead.look()
        assert ahead._slots_ready is True
        # Limited by the space of the queue's file.
        assert resident(files.file(0).path) >= 2 * 100_160
        assert resident(index.path) >= 400_000 + 5 * 100_000 - 2 * PAGE
        assert resident(files.file(0).path) <= 2 * MIB
        store.put_message(Message("Orders", b""), 1)
        ahead.look()
        idle = store.queues.find("Orders", 1).files.file(0).path
        assert resident(idle) <= 256 << 10


@populates
def test_the_file_that_follows_is_ready_and_the_windows_go_on_there(tmp_path):
    store, ahead = quiet_store(tmp_path)
    with store:
        log = store.commit_log.files
        while store.commit_log.max_offset < 30 * MIB:
            store.put_messages(messages(1000))
            ahead.look()
        assert resident(segment(store)) == 32 * MIB
        log.prepared.prepare()
        [waiting] = log.prepared._waiting
        prepared = waiting.path
        blocks_free = os.stat(prepared).st_blocks
        store.put_messages(messages(1000))
        ahead.look()
        # The mapping is gone again, the pages are in the page cache.
        assert log.prepared._populated is waiting and resident(prepared) == 0
        assert os.stat(prepared).st_blocks == blocks_free and Path(prepared).read_bytes() == bytes(32 * MIB)
        while len(log) == 1:
            store.put_messages(messages(1000))
        ahead.look()
        end = store.commit_log.max_offset - 32 * MIB
        assert end + MIB // 2 <= resident(segment(store)) <= end + 8 * MIB + SLACK
        store.put_messages(messages(100))
        assert [message.body for message in store.get_message("Orders", 0, 0).messages][:1] == [bytes(1000)]


def test_what_went_meanwhile_is_left_alone(tmp_path):
    store, ahead = quiet_store(tmp_path)
    with store:
        log = store.commit_log.files
        while store.commit_log.max_offset < 31 * MIB:
            store.put_messages(messages(1000))
        log.prepared.prepare()
        os.unlink(log.prepared._waiting[0].path)
        store.index_service.prepared.prepare()
        os.unlink(store.index_service.prepared._waiting[0].path)
        ahead.look()
        log.populate(32 * MIB, 33 * MIB)
        store.index_service.prepared.populate(MIB)
        while len(log) == 1:
            store.put_messages(messages(1000))
        ahead.look()
        first = log.file(0)
        # Retention deletes the file while it is read.
        log.drop_first().destroy()
        assert first.populate(0, MIB) is False
        store.put_messages(messages(1000))
        ahead.look()
        assert store.message_at(log.min_offset).body == bytes(1000)
    # A look after the end finds nothing to do and says so by doing nothing.
    ahead.look()


def test_an_empty_and_a_cut_stream(tmp_path):
    files = MappedFileQueue(tmp_path / "files", MIB, MappedFilePool(), handling=Handling(tmp_path))
    files.load()
    files.populate(0, 10 * MIB)
    files.file_for_append().mark_dirty(MIB)
    files.wrote_where = 800_000
    store, _ = quiet_store(tmp_path)
    with store:
        ahead = PopulateAhead(files, store.queues, None, 8 * MIB)
        ahead.look()
        files.wrote_where = 900_000
        ahead.look()
        files.wrote_where = 100
        assert ahead.look() == 26
        files.wrote_where = 200
        assert ahead.look() == 20
    files.close()
    ahead.look()


def test_many_queues_are_left_alone(tmp_path, monkeypatch):
    store, ahead = quiet_store(tmp_path, mapped_file_size_consume_queue=2000)
    with store:
        for queue_id in range(70):
            store.put_message(Message("Orders", b""), queue_id)
        followed: list[MappedFileQueue] = []
        follow = PopulateAhead._follow
        monkeypatch.setattr(
            PopulateAhead, "_follow", lambda self, files, least: (followed.append(files), follow(self, files, least))[1]
        )
        ahead.look()
        assert followed == [store.commit_log.files]


# ---------------------------------------------------------------------------------------------------------------
# The thread


@populates
def test_the_thread_works_ahead_and_ends_with_the_store(tmp_path):
    with MessageStore.open(tmp_path / "store", config=CONFIG) as store:
        assert len(threads("rmqstore-populating store")) == 1

        def pages_are_ahead() -> bool:
            store.put_messages(messages(300))
            end = store.commit_log.max_offset % (32 * MIB)
            assert resident(segment(store)) <= end + 8 * MIB + SLACK
            return resident(segment(store)) >= min(end + 64 * 1024, 32 * MIB)

        until(pages_are_ahead, "the thread did nothing")
    assert not threads("rmqstore-populating store")
    with MessageStore.open(tmp_path / "store", config=CONFIG, read_only=True) as store:
        assert store.get_message("Orders", 0, 0).messages and not threads("rmqstore-populating store")


@populates
def test_a_store_that_was_opened_again_is_populated_after_its_first_put_only(tmp_path):
    with MessageStore.open(tmp_path / "store", config=CONFIG.replace(populate_ahead_size=0)) as store:
        store.put_messages(messages(10))
    store, ahead = quiet_store(tmp_path)
    with store:
        log = store.commit_log.files
        # It may have holes, as nobody has asked for its space yet.
        assert log.populate(0, MIB) is False
        ahead.look()
        store.put_messages(messages(300))
        ahead.look()
        assert log.populate(0, MIB) is True and resident(segment(store)) >= 1_200_000


def test_switched_off(tmp_path):
    for options in ({"populate_ahead_size": 0}, {"mapped_file_size_commit_log": MIB // 2}):
        with MessageStore.open(tmp_path / str(*options), config=CONFIG.replace(**options)) as store:
            store.put_messages(messages(10))
            assert not threads("rmqstore-populating")
    for value in (-1, 2**31, 1.5, "8m"):
        with pytest.raises((ValueError, TypeError), match="populate_ahead_size"):
            StoreConfig(populate_ahead_size=value)


def test_a_forgotten_store_ends_its_thread(tmp_path):
    store = MessageStore.open(tmp_path / "forgotten", config=CONFIG)
    store.put_messages(messages(10))
    [thread] = threads("rmqstore-populating forgotten")
    store._store_lock.release()
    del store
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_closes_without_the_thread(tmp_path):
    with MessageStore.open(tmp_path / "store", config=CONFIG) as store:
        store.put_messages(messages(500))
        child = os.fork()
        if child == 0:
            store.close()
            os._exit(0 if store.closed else 1)
        assert os.waitpid(child, 0)[1] == 0
        store.put_messages(messages(500))
        assert threads("rmqstore-populating store")
    assert not threads("rmqstore-populating store")


def test_a_failed_store_is_left_alone(tmp_path, monkeypatch):
    with MessageStore.open(tmp_path / "store", config=CONFIG.replace(populate_ahead_size=0)) as store:
        store._upkeep._populate_ahead = PopulateAhead(store.commit_log.files, store.queues, None, MIB)
        looked: list[int] = []
        monkeypatch.setattr(PopulateAhead, "look", lambda self: looked.append(1) or 10)
        assert store._upkeep.populate() == 10
        store._state.poison = OSError("broken")
        assert store._upkeep.populate() > 1000 and looked == [1]


def test_a_task_says_when_it_runs_again_and_wake_is_at_once():
    class Owner:
        pass

    ran = threading.Semaphore(0)
    intervals = iter([1, 1, 3_600_000, 3_600_000])

    def run(each: object) -> int:
        ran.release()
        return next(intervals, 3_600_000)

    owner = Owner()
    keeper = Housekeeping(owner, [Task("sets its interval", 3_600_000, run, 0)], "a test's")
    for _ in range(3):
        assert ran.acquire(timeout=PATIENCE)
    assert not ran.acquire(timeout=0.1)
    keeper.wake()
    assert ran.acquire(timeout=PATIENCE)
    assert not ran.acquire(timeout=0.05)
    keeper.stop()
    assert not keeper.alive
