"""Stores of many queues and many segments: what opening them looks at, maps and keeps, counted rather than timed.

Owns also the agreement of the short look at a queue (`plain_queue`) with what loading, tidying and cutting it would do.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
from collections import Counter

import oracle
import pytest

from rmqstore import GeometryError, Message, MessageStore, StoreConfig
from rmqstore._core import Region
from rmqstore.commitlog import log_walk
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.queue_look import PlainQueue, plain_queue
from rmqstore.errors import LostLogError
from rmqstore.files import mapped_file, mapped_file_queue
from rmqstore.files.mapped_file import MappedFile, MappedFilePool

# Without (macOS, `make test-portable`) the short look gives up, and the queue is opened.
TELLS_HOLES = hasattr(os, "SEEK_DATA")
tells_holes = pytest.mark.skipif(not TELLS_HOLES, reason="the short look needs a system that tells holes")

CONFIG = StoreConfig(
    mapped_file_size_commit_log=4096,
    mapped_file_size_consume_queue=200,
    max_hash_slot_num=64,
    max_index_num=4096,
    max_mapped_files=8,
)
QUEUES = 60
FILE_SIZE = CONFIG.consume_queue_file_size
FAR = 2**63 - 1


@pytest.fixture
def mapped(monkeypatch):
    """The paths of newly mapped files."""
    paths: list[str] = []
    inner = MappedFile._map

    def counted(self):
        paths.append(self.path)
        return inner(self)

    monkeypatch.setattr(MappedFile, "_map", counted)
    return paths


@pytest.fixture
def store_path(tmp_path):
    """A closed store: one message in each of many queues, then as many in another one, over some twenty segments."""
    path = str(tmp_path / "store")
    with MessageStore.open(path, config=CONFIG) as store:
        for number in range(QUEUES):
            store.put_message(Message(f"Topic{number // 4}", b"first", keys=[f"k{number}"]), queue_id=number % 4)
        for number in range(300):
            store.put_message(Message("Busy", b"x" * 100, keys=[f"b{number}"]))
    return path


def folder_bytes(path: str) -> dict[str, bytes]:
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                found[os.path.relpath(os.path.join(folder, name), path)] = file.read()
    return found


@tells_holes
def test_opening_a_closed_store_maps_no_queue(store_path, mapped):
    with MessageStore.open(store_path, config=CONFIG) as store:
        assert not [path for path in mapped if f"{os.sep}consumequeue{os.sep}" in path]
        assert len(store.queues.keys()) == QUEUES + 1
        assert store.recovery_report.units_cut == store.recovery_report.units_written == 0
        # Queues that were not read exist too.
        for number in range(QUEUES):
            (message,) = store.get_message(f"Topic{number // 4}", number % 4, 0).messages
            assert message.keys == [f"k{number}"]
            assert store.max_queue_offset(f"Topic{number // 4}", number % 4) == 1


@tells_holes
def test_opening_after_a_kill_lists_no_queue_again(store_path, monkeypatch):
    before = folder_bytes(os.path.join(store_path, "consumequeue"))
    for name in ("checkpoint", "index"):
        # Nothing says what is on disk: all records are held against the queues.
        path = os.path.join(store_path, name)
        shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
    with open(os.path.join(store_path, "abort"), "w", encoding="ascii") as file:
        file.write("1")
    listed: list[str] = []
    inner = mapped_file_queue._stream_files
    monkeypatch.setattr(
        mapped_file_queue, "_stream_files", lambda path, *more: (listed.append(path), inner(path, *more))[1]
    )
    with MessageStore.open(store_path, config=CONFIG) as store:
        assert [os.path.basename(path) for path in listed] == ["commitlog"]
        assert store.recovery_report.records == QUEUES + 300
        assert store.recovery_report.units_cut == store.recovery_report.units_written == 0
        # It goes on where the look saw its end.
        assert store.put_message(Message("Topic3", b"next"), queue_id=1).queue_offset == 1
        assert store.get_message("Topic3", 1, 1).messages[0].body == b"next"
    after = folder_bytes(os.path.join(store_path, "consumequeue"))
    name = os.path.join("Topic3", "1", f"{0:020d}")
    assert after.pop(name)[:20] == before.pop(name)[:20] and after == before


def test_opening_maps_a_few_segments_of_many(store_path, mapped):
    assert len(os.listdir(os.path.join(store_path, "commitlog"))) >= 15
    for read_only in (False, True):
        del mapped[:]
        with MessageStore.open(store_path, config=CONFIG, read_only=read_only):
            assert len({path for path in mapped if f"{os.sep}commitlog{os.sep}" in path}) <= 2


@pytest.mark.parametrize("read_only", [True, False])
def test_opening_lists_the_segments_once_for_their_size_and_once_for_their_names(store_path, monkeypatch, read_only):
    listed: list[str] = []
    inner = os.scandir

    def counted(path):
        listed.append(os.fspath(path))
        return inner(path)

    monkeypatch.setattr(os, "scandir", counted)
    MessageStore.open(store_path, read_only=read_only, config=None).close()
    assert listed.count(os.path.join(store_path, "commitlog")) == 2
    assert listed.count(os.path.join(store_path, "consumequeue", "Topic3", "1")) <= (2 if TELLS_HOLES else 3)


def test_reading_maps_no_queue_at_opening(store_path, mapped):
    with MessageStore.open(store_path, config=CONFIG, read_only=True) as store:
        assert not [path for path in mapped if f"{os.sep}consumequeue{os.sep}" in path]
        assert not store.queues.opened()


@pytest.mark.parametrize(
    ("field", "value"), [(0, 1 << 20), (0, 1), (8, 7), (12, 5)], ids=["far", "near", "size", "tags code"]
)
@pytest.mark.parametrize("clean", [True, False])
def test_a_unit_that_says_something_else_is_found_in_a_queue_that_nobody_opened(store_path, field, value, clean):
    # The newest record of a queue other than the busy one, in the scanned part.
    with MessageStore.open(store_path, config=CONFIG) as store:
        for _ in range(3):
            put = store.put_message(Message("Topic3", b"again", tags="t"), queue_id=1)
    target = os.path.join(store_path, "consumequeue", "Topic3", "1", f"{0:020d}")
    with open(target, "r+b") as file:
        whole = file.read()
        file.seek(2 * 20 + field)
        file.write(struct.pack(">q" if field in (0, 12) else ">i", value))
    if not clean:
        with open(os.path.join(store_path, "abort"), "w"):
            pass
        os.unlink(os.path.join(store_path, "checkpoint"))
    with MessageStore.open(store_path, config=CONFIG) as store:
        report = store.recovery_report
        assert store.max_queue_offset("Topic3", 1) == put.queue_offset + 1
    # After an orderly exit only units that point past the end of the log count as wrong.
    cut = (field, value) == (0, 1 << 20)
    assert report.units_cut == (2 if cut else 0)
    assert report.units_written == (2 if cut else 0)
    assert report.units_mended == (0 if cut or clean else 1)
    with open(target, "rb") as file:
        assert (file.read() == whole) == (cut or not clean)


def test_opening_keeps_no_more_queues_than_may_be_mapped(tmp_path):
    path = str(tmp_path / "store")
    config = CONFIG.replace(mapped_file_size_commit_log=65536)
    with MessageStore.open(path, config=config) as store:
        for number in range(QUEUES):
            store.put_message(Message(f"Topic{number}", b"first"))
    # The log has one segment, so every queue is compared with it.
    with MessageStore.open(path, config=config) as store:
        assert len(store.queues.keys()) == QUEUES and not store.queues.opened()
        for number in range(QUEUES):
            assert store.put_message(Message(f"Topic{number}", b"second")).queue_offset == 1
        assert len(store.queues.opened()) == QUEUES
    with MessageStore.open(path, config=config, read_only=True) as store:
        for number in range(QUEUES):
            assert [m.body for m in store.get_message(f"Topic{number}", 0, 0).messages] == [b"first", b"second"]


def test_opening_a_closed_store_changes_nothing(store_path):
    before = folder_bytes(store_path)
    MessageStore.open(store_path, config=CONFIG).close()
    after = folder_bytes(store_path)
    assert {name: data for name, data in after.items() if name.startswith(("commitlog", "consumequeue", "index"))} == {
        name: data for name, data in before.items() if name.startswith(("commitlog", "consumequeue", "index"))
    }


@pytest.mark.parametrize("clean", [True, False])
def test_units_behind_the_end_of_the_log_are_cut_in_queues_that_nobody_opened(store_path, clean):
    # A log that is shorter than its queues say is refused unless the number of units that go is given.
    target = os.path.join(store_path, "consumequeue", "Topic3", "1", f"{0:020d}")
    with open(target, "r+b") as file:
        file.seek(20)
        file.write(struct.pack(">qiq", 1 << 40, 100, 0))
    if not clean:
        with open(os.path.join(store_path, "abort"), "w"):
            pass
    mode = "truncate" if clean else "strict"
    with pytest.raises(LostLogError, match="1 queue units"):
        MessageStore.open(store_path, config=CONFIG, recovery=mode)
    with MessageStore.open(store_path, config=CONFIG, recovery=mode, drop_units=1) as store:
        assert store.recovery_report.units_cut == 1
        assert store.max_queue_offset("Topic3", 1) == 1
    with open(target, "rb") as file:
        assert not file.read()[20:].strip(b"\0")


def test_bytes_behind_the_end_of_a_queue_are_erased_at_opening(store_path):
    target = os.path.join(store_path, "consumequeue", "Topic3", "1", f"{0:020d}")
    with open(target, "r+b") as file:
        file.seek(120)
        file.write(b"left over")
    with MessageStore.open(store_path, config=CONFIG) as store:
        assert store.max_queue_offset("Topic3", 1) == 1
    with open(target, "rb") as file:
        assert not file.read()[20:].strip(b"\0")


@pytest.mark.parametrize("name", ["notes.txt", f"{100:020d}", f"{10 * FILE_SIZE:020d}"])
def test_what_does_not_belong_to_a_queue_is_refused_at_opening(store_path, name):
    directory = os.path.join(store_path, "consumequeue", "Topic3", "1")
    with open(os.path.join(directory, name), "wb") as file:
        file.truncate(FILE_SIZE)
    with pytest.raises(GeometryError, match="Topic3"):
        MessageStore.open(store_path, config=CONFIG)


def unit(phy_offset: int, size: int = 100, tags_code: int = 0) -> bytes:
    return struct.pack(">qiq", phy_offset, size, tags_code)


UNITS = [unit(100 * number) for number in range(25)]
PRE_FILL = unit(0, 0x7FFFFFFF)
# Content of the newest file, and the expected result: None if the queue must be opened.
CASES = {
    "one unit": ([b"".join(UNITS[:1])], PlainQueue(100, 100, [0], 20)),
    "some units": ([b"".join(UNITS[:7])], PlainQueue(700, 700, [0], 140)),
    "zeros within": ([unit(100, 256) + unit(356, 1 << 24)], PlainQueue(356 + (1 << 24), 356 + (1 << 24), [0], 40)),
    "full": ([b"".join(UNITS[:10])], PlainQueue(1000, 1000, [0], 200)),
    "three files": (
        [b"".join(UNITS[:10]), b"".join(UNITS[10:20]), b"".join(UNITS[20:])],
        PlainQueue(2500, 2500, [0, FILE_SIZE, 2 * FILE_SIZE], 500),
    ),
    "not in order": ([UNITS[3] + UNITS[9] + UNITS[4]], PlainQueue(500, 1000, [0], 60)),
    "pre-filled": ([PRE_FILL * 3 + UNITS[5]], PlainQueue(600, 600, [0], 80)),
    "only pre-filled": ([PRE_FILL * 3], PlainQueue(-1, -1, [0], 60)),
    "empty": ([b""], None),
    "a gap": ([UNITS[0] + bytes(20) + UNITS[2]], None),
    "a unit without size": ([UNITS[0] + unit(100, 0)], None),
    "a unit of negative size": ([UNITS[0] + unit(100, -5)], None),
    "a negative offset": ([UNITS[0] + unit(-100)], None),
    "an offset beyond all logs": ([UNITS[0] + unit(FAR)], None),
    "half a unit behind": ([UNITS[0] + UNITS[1][:9]], None),
    "something at the end": ([UNITS[0] + bytes(FILE_SIZE - 21) + b"\1"], None),
    "an empty newest file": ([b"".join(UNITS[:10]), b""], None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_short_look_says_what_the_queue_says(tmp_path, name):
    if CASES[name][1] is not None and not TELLS_HOLES:
        pytest.skip("the short look needs a system that tells holes")
    files, expected = CASES[name]
    directory = tmp_path / "consumequeue" / "T" / "0"
    directory.mkdir(parents=True)
    for number, data in enumerate(files):
        # Bytes that were never written are a hole, as in a file that was only allocated.
        with open(directory / f"{number * FILE_SIZE:020d}", "wb") as file:
            file.write(data)
            file.truncate(FILE_SIZE)
    before = folder_bytes(str(directory))
    found = plain_queue(str(directory), FILE_SIZE)
    assert found == expected
    if found is None:
        return
    queue = ConsumeQueue(str(tmp_path), "T", 0, CONFIG, MappedFilePool(4))
    queue.load()
    last = queue.last_record()
    assert (tuple(found.offsets), found.end) == (queue.files.offsets, queue.files.wrote_where)
    assert found.last_end == (-1 if last is None else last.phy_offset + last.size)
    queue.tidy()
    if found.furthest_end >= 0:
        assert queue.cut(found.furthest_end) == 0
    assert folder_bytes(str(directory)) == before
    if found.furthest_end > 0:
        assert queue.cut(found.furthest_end - 1) > 0
    queue.close()


def test_the_short_look_gives_up_where_holes_are_not_told(tmp_path, monkeypatch):
    path = str(tmp_path / "store")
    with MessageStore.open(path, config=CONFIG) as store:
        put = store.put_message(Message("T", b"x"))
    monkeypatch.delattr(os, "SEEK_DATA", raising=False)
    with MessageStore.open(path, config=CONFIG) as store:
        assert store.queues.plain("T", 0) is None
        assert store.max_queue_offset("T", 0) == 1 and store.message_at(put.phy_offset).body == b"x"


def test_the_short_look_is_for_queues_without_an_extension(tmp_path):
    path = str(tmp_path / "store")
    config = CONFIG.replace(enable_consume_queue_ext=True)
    with MessageStore.open(path, config=config) as store:
        store.put_message(Message("T", b"x", tags="a"))
    with MessageStore.open(path, config=config) as store:
        assert store.queues.plain("T", 0) is None
        assert store.queues.find("T", 0).ext is not None


@tells_holes
@pytest.mark.parametrize("change", ["longer", "shorter", "missing"])
def test_the_short_look_refuses_files_that_are_not_whole(tmp_path, change):
    directory = tmp_path / "0"
    directory.mkdir()
    for number in range(3):
        (directory / f"{number * FILE_SIZE:020d}").write_bytes(b"".join(UNITS[:10]))
    assert plain_queue(str(directory), FILE_SIZE) is not None
    middle = directory / f"{FILE_SIZE:020d}"
    if change == "missing":
        middle.unlink()
    else:
        os.truncate(middle, FILE_SIZE + (1 if change == "longer" else -1))
    assert plain_queue(str(directory), FILE_SIZE) is None


def test_the_names_of_many_folders_are_forced_together(tmp_path, monkeypatch):
    from rmqstore.files import durable

    for i in range(300):
        (tmp_path / f"{i}").mkdir()
    forced = []
    monkeypatch.setattr(durable, "fsync_directory", forced.append)
    durable.fsync_tree(str(tmp_path))
    assert len(forced) in (0, 301)  # 0 where the system has syncfs
    # Otherwise, or with few folders, each is forced.
    monkeypatch.setattr(durable, "_sync_file_system", lambda path: False)
    forced.clear()
    durable.fsync_tree(str(tmp_path))
    assert len(forced) == 301
    monkeypatch.undo()
    durable.fsync_tree(str(tmp_path / "7"))


# -------------------------------------------------------------------------------------------------- many written queues


def put_into_each(store, laps):
    for lap in range(laps):
        for number in range(QUEUES):
            store.put_message(Message(f"Topic{number // 4}", b"%d" % lap), queue_id=number % 4)
        messages = [Message(f"Topic{number // 4}", b"%d" % lap) for number in range(QUEUES)]
        store.put_messages(messages, [number % 4 for number in range(QUEUES)])


def queue_files(paths):
    return [path for path in paths if "consumequeue" in path]


def test_written_queues_keep_their_newest_file_mapped(store_path, mapped):
    with MessageStore.open(store_path, config=CONFIG) as store:
        put_into_each(store, 1)
        mapped.clear()
        put_into_each(store, 2)
        assert QUEUES > CONFIG.max_mapped_files and queue_files(mapped) == []
        # Readers have the bound that they had before.
        for number in range(0, 300, 9):
            assert len(store.get_message("Busy", 0, number, 1).messages) == 1
        assert len(store._state.pool) <= QUEUES + 2 + CONFIG.max_mapped_files
        # A file that became full counts as read.
        put_into_each(store, 20)
        assert len(store._state.pool) <= QUEUES + 2 + CONFIG.max_mapped_files


def test_more_written_queues_than_may_be_mapped(store_path, mapped, caplog):
    with MessageStore.open(store_path, config=CONFIG) as store:
        pool = store._state.pool
        pool.max_appended_files = 10
        put_into_each(store, 3)
        assert len(pool) <= 10 + CONFIG.max_mapped_files and len(queue_files(mapped)) > QUEUES
        assert [record.message.count("vm.max_map_count") for record in caplog.records] == [1]
        for number in range(QUEUES):
            assert len(store.get_message(f"Topic{number // 4}", number % 4, 0, 32).messages) == 7


def test_a_system_without_room_for_a_mapping_leaves_fewer_mapped(store_path, monkeypatch):
    class FullRegion:
        @staticmethod
        def map(*arguments):
            if len(pool) >= 20:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            return Region.map(*arguments)

    with MessageStore.open(store_path, config=CONFIG) as store:
        pool = store._state.pool
        monkeypatch.setattr(mapped_file, "Region", FullRegion)
        put_into_each(store, 3)
        assert len(pool) <= 20
        for number in range(QUEUES):
            assert len(store.get_message(f"Topic{number // 4}", number % 4, 0, 32).messages) == 7
        # If nothing can be unmapped, it is an error.
        store.commit_log.files.let_go()
        for queue in store.queues:
            queue.files.let_go()
        monkeypatch.setattr(FullRegion, "map", staticmethod(no_room))
        with pytest.raises(OSError, match="Cannot allocate"):
            store.get_message("Topic0", 0, 0, 1)
        monkeypatch.undo()


def no_room(*arguments):
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


class Calls:
    """How often queues are asked one by one, and by which methods of `ConsumeQueue`."""

    def __init__(self, monkeypatch):
        self.num: Counter[str] = Counter()
        for name in ("put_units", "agrees", "repair", "file_end"):
            monkeypatch.setattr(ConsumeQueue, name, self._counted(name, getattr(ConsumeQueue, name)))

    def _counted(self, name, inner):
        def counted(*args):
            self.num[name] += 1
            return inner(*args)

        return counted


ROWS = 4000
MANY = CONFIG.replace(mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=20 * 4000)


def put_rounds(store: MessageStore, queues: int, batch: int) -> None:
    for first in range(0, ROWS, batch):
        numbers = [number % queues for number in range(first, first + batch)]
        store.put_messages(
            [Message(f"Topic{number // 4}", b"x" * 50, keys=[f"k{number}"]) for number in numbers],
            [number % 4 for number in numbers],
        )


@pytest.mark.parametrize("queues", [10, 100, 1000])
def test_puts_ask_a_queue_once_a_page(tmp_path, monkeypatch, queues):
    calls = Calls(monkeypatch)
    with MessageStore.open(str(tmp_path / "store"), config=MANY) as store:
        put_rounds(store, queues, 500)
        # The first units of a queue make its file, and each further page gets space on disk.
        pages = -(-ROWS // queues * 20 // 4096)
        assert calls.num["put_units"] == calls.num["file_end"] <= queues * pages
    check_queues(str(tmp_path / "store"))


@pytest.mark.parametrize("lost", [0, 7])
@pytest.mark.parametrize("queues", [10, 100, 1000])
def test_recovery_asks_a_queue_a_few_times_however_many_pieces(tmp_path, monkeypatch, mapped, queues, lost):
    path = str(tmp_path / "store")
    with MessageStore.open(path, config=MANY) as store:
        put_rounds(store, queues, 500)
    with open(os.path.join(path, "abort"), "w"):
        pass
    os.unlink(os.path.join(path, "checkpoint"))
    before = folder_bytes(os.path.join(path, "consumequeue"))
    for number in range(lost):
        # The last unit of a queue.
        name = os.path.join(path, "consumequeue", f"Topic{number // 4}", str(number % 4), f"{0:020d}")
        with open(name, "r+b") as file:
            file.seek((ROWS // queues - 1) * 20)
            file.write(bytes(20))
    del mapped[:]
    monkeypatch.setattr(log_walk, "_PIECE_ROWS", 100)
    calls = Calls(monkeypatch)
    with MessageStore.open(path, config=MANY) as store:
        report = store.recovery_report
        assert report.records == ROWS and report.units_written == lost and report.units_cut == 0
    assert folder_bytes(os.path.join(path, "consumequeue")) == before
    # Once where the log is judged, and once more where units are missing, which are found in one piece each.
    assert calls.num["agrees"] <= (2 if lost else 1) * queues + lost
    assert calls.num["file_end"] <= (2 if lost else 1) * queues + lost
    assert calls.num["put_units"] <= lost and not calls.num["repair"]
    # Each file is mapped once for all of it.
    opened = Counter(name for name in mapped if f"{os.sep}consumequeue{os.sep}" in name)
    assert len(opened) == queues and set(opened.values()) == {1}


def check_queues(path: str) -> None:
    """Compare the units on disk with those that a second writer makes of the log."""
    files = oracle.read_files(path)
    geo = oracle.geometry(mapped_file_size_consume_queue=20 * 4000, mapped_file_size_commit_log=1 << 20)
    expected = {name: data for name, data in oracle.rebuild(files, geo).items() if name.startswith("consumequeue")}
    assert expected == {name: data for name, data in files.items() if name.startswith("consumequeue")}
