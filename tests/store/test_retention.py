"""Retention: which files go, when, and that nobody who reads is hurt by it.

Owns the rules of RocketMQ (5.5.0, DefaultMessageStore.CleanCommitLogService and CleanConsumeQueueService) as tests: hours,
age, disk space and its bounds, order and number; then what a store answers afterwards, to readers of every kind, on
other threads, after a crash in the middle, and to the real Java store.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
from mappings import mappings

from rmqstore import (
    DiskFullError,
    GetMessageStatus,
    Message,
    MessageStore,
    OffsetOutOfRangeError,
    ReadOnlyError,
    StoreConfig,
    StorePoisonedError,
    verify,
)
from rmqstore.files.mapped_file import MappedFile
from rmqstore.files.mapped_file_queue import MappedFileQueue
from rmqstore.message import SysFlag, encode_inner_batch
from rmqstore.store import retention, upkeep
from rmqstore.store.retention import DiskSpace, is_time_to_delete, used_ratio

HOUR = 3_600_000
#: Ten records of 400 bytes fill a segment; 30 units a queue file; nothing happens by a timer.
SMALL = StoreConfig(
    mapped_file_size_commit_log=4096,
    mapped_file_size_consume_queue=600,
    max_hash_slot_num=20,
    max_index_num=41,
    file_reserved_time=72,
    delete_when="04",
    delete_file_batch_max=100,
    flush_interval_commit_log=0,
    flush_interval_consume_queue=0,
    flush_consumer_offset_interval=0,
    clean_resource_interval=0,
)
#: A day on which no clock is changed anywhere; every hour of it exists once.
NOON = int(datetime.datetime(2026, 1, 15, 12, 30).timestamp() * 1000)
PATIENCE = 240


class Clock:
    def __init__(self, now: int = NOON):
        self.now = now

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(autouse=True)
def disk_used(monkeypatch):
    """A list whose item is the used part of the disk."""
    used = [0.10]
    monkeypatch.setattr(upkeep, "used_ratio", lambda path: used[0])
    return used


def body(number: int) -> bytes:
    return b"%04d" % number + b"x" * 290


def fill(store: MessageStore, count: int, *, first: int = 0, topic: str = "Orders", queues: int = 2) -> None:
    for number in range(first, first + count):
        store.put_message(
            Message(topic, body(number), keys=[f"k{number}"], tags="even" if number % 2 == 0 else "odd"),
            number % queues,
        )


def numbers(messages) -> list[int]:
    return [int(message.body[:4]) for message in messages]


def segments(root) -> list[str]:
    return sorted(os.listdir(os.path.join(root, "commitlog")))


def age(root, hours: float, names=None, now: int = NOON) -> None:
    """Set the times of segments to this number of hours ago."""
    for name in segments(root) if names is None else names:
        moment = (now - hours * HOUR) / 1000
        os.utime(os.path.join(root, "commitlog", name), (moment, moment))


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def store(root, clock):
    with MessageStore.open(root, config=SMALL.replace(clock=clock)) as opened:
        fill(opened, 100)
        opened.flush()
        age(root, 0)
        yield opened


def clean(store: MessageStore):
    """Do the work of the housekeeping thread at every `clean_resource_interval`."""
    return store._upkeep.delete_expired_files(False, lambda milliseconds: True)


# ------------------------------------------------------------------------------------------------------------- rules


def test_segments_expire_by_the_time_of_their_last_change(store, root):
    names = segments(root)
    assert len(names) == 11
    age(root, 73, names[:3])
    age(root, 72, names[3:4])
    age(root, 71.99, names[4:5])
    # Older ones behind one that is younger stay: the log has no gaps.
    age(root, 100, names[5:8])
    report = store.delete_expired_files()
    assert (report.segments, segments(root)) == (4, names[4:])
    assert store.delete_expired_files().segments == 0
    assert store.commit_log.min_offset == int(names[4])


@pytest.mark.parametrize("hours", [0, 1, 48, 24 * 365])
def test_the_reserved_time_is_an_option(root, clock, hours):
    with MessageStore.open(root, config=SMALL.replace(clock=clock, file_reserved_time=hours)) as store:
        fill(store, 50)
        store.flush()
        names = segments(root)
        age(root, hours, names[:2])
        age(root, hours - 0.01, names[2:])
        assert store.delete_expired_files().segments == 2
        assert segments(root) == names[2:]


def test_the_newest_segment_stays_however_old_it_is(store, root, disk_used):
    age(root, 10_000)
    newest = segments(root)[-1]
    assert store.delete_expired_files().segments == 10
    assert segments(root) == [newest]
    disk_used[0] = 0.99
    assert store.delete_expired_files().segments == 0
    assert segments(root) == [newest]


def test_at_most_so_many_segments_a_round(root, clock):
    with MessageStore.open(root, config=SMALL.replace(clock=clock, delete_file_batch_max=4)) as store:
        fill(store, 100)
        store.flush()
        names = segments(root)
        age(root, 100)
        for begin, count in ((4, 4), (8, 4), (10, 2), (10, 0)):
            assert store.delete_expired_files().segments == count
            assert segments(root) == names[begin:]


def test_the_hours_of_delete_when():
    def at(hour: int, minute: int = 0) -> int:
        return int(datetime.datetime(2026, 1, 15, hour, minute).timestamp() * 1000)

    for text, hours in {"04": {4}, "4": {4}, "00;23": {0, 23}, " 01 ; 13;": {1, 13}, "": set()}.items():
        config = SMALL.replace(delete_when=text)
        assert {hour for hour in range(24) if is_time_to_delete(config, at(hour, 59))} == hours
        assert {hour for hour in range(24) if is_time_to_delete(config, at(hour))} == hours
    for text in ("24", "x", "4-5", "-1"):
        with pytest.raises(ValueError, match="delete_when"):
            SMALL.replace(delete_when=text)


def test_the_timer_deletes_in_these_hours_only(store, root, clock):
    names = segments(root)
    age(root, 200)
    assert clean(store).segments == 0 and segments(root) == names
    clock.now += 16 * HOUR  # 04:30
    assert clean(store).segments == 10 and segments(root) == names[-1:]


@pytest.mark.parametrize(
    ("options", "levels"),
    [
        # RocketMQ's defaults, and what it makes of values that it does not believe.
        ({}, (0.90, 0.85, 0.75)),
        ({"disk_space_warning_level_ratio": 100}, (0.90, 0.85, 0.75)),
        ({"disk_space_warning_level_ratio": 0}, (0.35, 0.85, 0.75)),
        ({"disk_space_warning_level_ratio": 60}, (0.60, 0.85, 0.75)),
        ({"disk_space_clean_forcibly_ratio": 100}, (0.90, 0.85, 0.75)),
        ({"disk_space_clean_forcibly_ratio": 0}, (0.90, 0.30, 0.75)),
        ({"disk_space_clean_forcibly_ratio": 50}, (0.90, 0.50, 0.75)),
        ({"disk_max_used_space_ratio": 100}, (0.90, 0.85, 0.95)),
        ({"disk_max_used_space_ratio": 0}, (0.90, 0.85, 0.10)),
        ({"disk_max_used_space_ratio": 20}, (0.90, 0.85, 0.20)),
    ],
)
def test_the_ratios_and_their_bounds(options, levels):
    config = SMALL.replace(**options)
    warning, forcible, most = levels
    for percent in range(101):
        space = DiskSpace.judge(percent / 100, config)
        assert (space.full, space.delete_at_once, space.delete_expired) == (
            percent / 100 > warning, percent / 100 > forcible, percent / 100 > most,
        )  # fmt: skip
    # A missing directory asks for the deletion of what is expired.
    assert DiskSpace.judge(-1.0, config) == DiskSpace(-1.0, False, False, True)


def test_how_full_a_disk_is(tmp_path, monkeypatch):
    assert used_ratio(str(tmp_path / "missing")) == -1.0
    assert 0 < used_ratio(os.path.dirname(__file__)) <= 1
    # 1000 blocks, 300 free, 100 of them only for root: 700 of 900 are used, 77.8 %, rounded up.
    status = os.statvfs(tmp_path)
    fields = list(status)
    fields[2:5] = [1000, 300, 200]
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    assert used_ratio(str(tmp_path)) == 0.78


def test_above_the_maximum_what_is_expired_goes_at_any_hour(store, root, disk_used):
    names = segments(root)
    age(root, 80, names[:4])
    disk_used[0] = 0.75
    assert clean(store).segments == 0
    disk_used[0] = 0.76
    assert clean(store).segments == 4
    # The others are too young for that.
    assert clean(store).segments == 0 and segments(root) == names[4:]


def test_above_the_forcible_ratio_the_oldest_go_whatever_their_age(store, root, disk_used, caplog):
    names = segments(root)
    disk_used[0] = 0.85
    assert clean(store).segments == 0
    disk_used[0] = 0.86
    assert store.put_message(Message("Orders", body(100)))
    report = clean(store)
    assert (report.segments, report.used_ratio) == (10, 0.86) and segments(root) == names[-1:]
    caplog.clear()
    assert clean(store).segments == 0
    assert "no segment can be deleted" in caplog.text and str(root) in caplog.text


def test_forcible_deletion_goes_by_batches(root, clock, disk_used):
    with MessageStore.open(root, config=SMALL.replace(clock=clock, delete_file_batch_max=4)) as store:
        fill(store, 100)
        names = segments(root)
        disk_used[0] = 0.95
        assert clean(store).segments == 4 and segments(root) == names[4:]


def test_expired_files_go_above_the_forcible_ratio_also_where_force_is_switched_off(root, clock, disk_used):
    config = SMALL.replace(clock=clock, clean_file_forcibly_enable=False, disk_max_used_space_ratio=95)
    with MessageStore.open(root, config=config) as store:
        fill(store, 100)
        store.flush()
        names = segments(root)
        age(root, 80, names[:3])
        disk_used[0] = 0.85
        assert clean(store).segments == 0
        disk_used[0] = 0.86
        assert clean(store).segments == 3 and clean(store).segments == 0
        assert segments(root) == names[3:]


def test_a_full_disk_takes_no_writes_until_there_is_space_again(store, root, disk_used):
    assert not store.disk_full
    disk_used[0] = 0.90
    clean(store)
    assert not store.disk_full
    disk_used[0] = 0.91
    clean(store)
    assert store.disk_full
    end = store.commit_log.max_offset
    for attempt in (
        lambda: store.put_message(Message("Orders", b"")),
        lambda: store.put_messages([Message("Orders", b"")] * 20),
        lambda: store.put_message_batch([Message("Orders", b"")]),
    ):
        with pytest.raises(DiskFullError, match="disk_space_warning_level_ratio = 90 %") as caught:
            attempt()
        assert str(root) in str(caught.value)
    assert store.commit_log.max_offset == end
    # Reads, progress and flushes go on, and nothing is poisoned.
    low = store.min_queue_offset("Orders", 1)
    assert store.get_message("Orders", 1, low).status is GetMessageStatus.FOUND
    store.consumer_offsets.commit("group", "Orders", 1, low)
    store.flush()
    # Like in RocketMQ, the disk is full until the ratio is at most the forcible one.
    for percent, full in ((0.90, True), (0.86, True), (0.85, False), (0.88, False), (0.91, True), (0.10, False)):
        disk_used[0] = percent
        clean(store)
        assert store.disk_full is full, percent
    assert store.put_message(Message("Orders", b"again")).phy_offset == end


def test_a_manual_round_needs_a_store_that_can_be_written(store, root):
    with MessageStore.open(root, config=SMALL, read_only=True) as reader:
        with pytest.raises(ReadOnlyError):
            reader.delete_expired_files()
        assert not reader.disk_full
    age(root, 100)
    store._state.fail(OSError("broken"))
    with pytest.raises(StorePoisonedError):
        store.delete_expired_files()
    store._upkeep.clean()
    assert len(segments(root)) == 11


def test_the_thread_deletes_and_stops_between_two_segments(root, clock, monkeypatch):
    monkeypatch.setattr(upkeep, "_FIRST_CLEAN", 100)
    clock.now += 16 * HOUR  # 04:30
    begun = threading.Event()
    real = MappedFile.destroy

    def destroy(each: MappedFile) -> None:
        real(each)
        begun.set()

    config = SMALL.replace(clock=clock)
    with MessageStore.open(root, config=config) as store:
        fill(store, 100)
    names = segments(root)
    age(root, 200)
    monkeypatch.setattr(MappedFile, "destroy", destroy)
    config = config.replace(clean_resource_interval=5, delete_commit_log_files_interval=3_600_000)
    with MessageStore.open(root, config=config):
        assert begun.wait(PATIENCE)
        # It pauses for an hour now; closing does not wait for that.
    assert segments(root) == names[1:]
    config = config.replace(delete_commit_log_files_interval=1)
    with MessageStore.open(root, config=config):
        deadline = time.monotonic() + PATIENCE
        while len(segments(root)) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.002)


# ------------------------------------------------------------------------------------------------ queues and the index


def oldest_units(store: MessageStore) -> dict[tuple[str, int], int]:
    return {(queue.topic, queue.queue_id): queue.first_unit for queue in store.queues}


def test_queue_and_index_files_follow_the_log(store, root):
    assert oldest_units(store) == {("Orders", 0): 0, ("Orders", 1): 0}
    index_files = store.index_service.names
    # 100 messages, 2 entries each (key and tag), 40 entries a file.
    assert len(index_files) == 5
    for deleted in range(1, 11):
        names = segments(root)
        age(root, 100, names[:1])
        report = store.delete_expired_files()
        assert report.segments == 1
        low = store.commit_log.min_offset
        for queue in store.queues:
            # A file stays while its last unit leads to something, and the newest one always.
            for base in queue.files.offsets[:-1]:
                assert queue.unit(base // 20 + 29).phy_offset >= low
            directory = root / "consumequeue" / "Orders" / str(queue.queue_id)
            assert sorted(os.listdir(directory)) == [f"{base:020d}" for base in queue.files.offsets]
        for name in store.index_service.names[:-1]:
            assert store.index_service.file(name).header.end_phy_offset >= low
        assert sorted(os.listdir(root / "index")) == list(store.index_service.names)
        # None goes early: what is in the log is found.
        left = numbers(store.messages())
        assert left == list(range(100 - len(left), 100)) and len(left) <= 100 - deleted * 5
        for number in left:
            assert numbers(store.query_message("Orders", f"k{number}")) == [number]
        for queue_id in range(2):
            assert numbers(read(store, queue_id)) == [number for number in left if number % 2 == queue_id]
    assert oldest_units(store) == {("Orders", 0): 30, ("Orders", 1): 30}
    assert len(store.index_service.names) == 1
    assert not [finding for finding in verify(root) if finding.severity == "error"]


def read(store: MessageStore, queue_id: int, begin: int | None = None, topic: str = "Orders") -> list:
    """All messages of a queue, as somebody reads who asks again and again."""
    at = store.min_queue_offset(topic, queue_id) if begin is None else begin
    found = []
    while at < store.max_queue_offset(topic, queue_id):
        got = store.get_message(topic, queue_id, at, 7)
        found += got.messages
        assert got.next_queue_offset > at
        at = got.next_queue_offset
    return found


def test_what_an_earlier_round_did_not_come_to_is_done_later(store, root, monkeypatch):
    age(root, 100)
    with monkeypatch.context() as patched:
        patched.setattr(type(store.queues.find("Orders", 0)), "delete_before", lambda queue, low: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.delete_expired_files()
    assert len(segments(root)) == 1
    report = clean(store)
    assert report.segments == 0 and report.queue_files == 2 and report.index_files == 4


def test_answers_after_retention(store, root):
    names = segments(root)
    age(root, 100, names[:8])
    ends = {queue_id: store.max_queue_offset("Orders", queue_id) for queue_id in range(2)}
    gone = [message for message in store.messages() if message.phy_offset < int(names[8])]
    left = [message for message in store.messages() if message.phy_offset >= int(names[8])]
    assert len(gone) > 60 and left
    store.delete_expired_files()
    for queue_id in range(2):
        low, high = store.min_queue_offset("Orders", queue_id), store.max_queue_offset("Orders", queue_id)
        assert high == ends[queue_id]
        assert low == min(message.queue_offset for message in left if message.queue_id == queue_id)
        for offset in range(high + 2):
            got = store.get_message("Orders", queue_id, offset, 1)
            assert (got.min_queue_offset, got.max_queue_offset) == (low, high)
            if offset < low:
                assert (got.status, got.next_queue_offset) == (GetMessageStatus.OFFSET_TOO_SMALL, low)
            elif offset < high:
                assert (got.status, got.next_queue_offset) == (GetMessageStatus.FOUND, offset + 1)
            elif offset == high:
                assert (got.status, got.next_queue_offset) == (GetMessageStatus.OFFSET_OVERFLOW_ONE, high)
            else:
                assert (got.status, got.next_queue_offset) == (GetMessageStatus.OFFSET_OVERFLOW_BADLY, high)
        assert store.offset_by_time("Orders", queue_id, 0) == low
        assert store.offset_by_time("Orders", queue_id, NOON * 2) == high
    for message in gone:
        assert not store.query_message("Orders", message.keys[0])
        assert not store.query_message("Orders", message.keys[0], compat=True)
        for look_up in (
            lambda m=message: store.message_at(m.phy_offset),
            lambda m=message: store.message_by_id(m.msg_id),
        ):
            with pytest.raises(OffsetOutOfRangeError):
                look_up()
    for message in left:
        assert store.message_by_id(message.msg_id) == message
        assert list(store.query_message("Orders", message.keys[0])) == [message]
    # Asked for by place, a part that is gone is no error of the others.
    assert numbers(store.messages(0, store.commit_log.max_offset)) == numbers(left)
    assert numbers(store.query_message("Orders", "even", 100, index_type="T")) == [
        number for number in reversed(numbers(left)) if number % 2 == 0
    ]


def test_a_queue_of_which_nothing_is_left_keeps_its_offsets(root, clock):
    config = SMALL.replace(clock=clock)
    with MessageStore.open(root, config=config) as store:
        fill(store, 7, topic="Quiet", queues=1)
        fill(store, 60)
        store.flush()
        names = segments(root)
        age(root, 100, names[:5])
        store.delete_expired_files()
        assert (store.min_queue_offset("Quiet"), store.max_queue_offset("Quiet")) == (7, 7)
        assert store.get_message("Quiet", 0, 3).status is GetMessageStatus.OFFSET_TOO_SMALL
        assert store.get_message("Quiet", 0, 3).next_queue_offset == 7
        assert store.get_message("Quiet", 0, 7).status is GetMessageStatus.OFFSET_OVERFLOW_ONE
    for ended_in_order in (True, False):
        if not ended_in_order:
            (root / "abort").touch()
        with MessageStore.open(root, config=config) as store:
            assert store.recovery_report.clean is ended_in_order
            assert (store.min_queue_offset("Quiet"), store.max_queue_offset("Quiet")) == (7, 7)
            assert not store.recovery_report.units_cut
    with MessageStore.open(root, config=config) as store:
        assert store.put_message(Message("Quiet", body(7))).queue_offset == 7
        assert numbers(store.get_message("Quiet", 0, 7)) == [7]


def test_batch_queues_and_extensions_follow_too(root, clock):
    config = SMALL.replace(
        clock=clock,
        mapper_file_size_batch_consume_queue=46 * 10,
        enable_consume_queue_ext=True,
        mapped_file_size_consume_queue_ext=20 * 10 + 4,
    )
    with MessageStore.open(root, config=config) as store:
        for number in range(60):
            packed = encode_inner_batch([Message("Packed", body(number)[:100]), Message("Packed", b"")])
            store.put_message(
                Message("Packed", packed, sys_flag=int(SysFlag.INNER_BATCH), properties={"INNER_NUM": "2"})
            )
            store.put_message(Message("Orders", body(number), tags="t"))
        store.flush()
        age(root, 100)
        report = store.delete_expired_files()
        assert report.segments > 5 and report.queue_files > 3
        low = store.commit_log.min_offset
        for queue in store.queues:
            for base in queue.files.offsets[:-1]:
                last = base // queue.unit_size + queue.units_per_file - 1
                assert queue.files.file(base).region.get_i64((last * queue.unit_size) - base) >= low
        # An extension's file that no unit leads to any more is of no use.
        assert len(os.listdir(root / "consumequeue_ext" / "Orders" / "0")) < 5
        left = list(store.messages())
        packed = store.get_message("Packed", 0, store.min_queue_offset("Packed"), 1000)
        assert [m.phy_offset for m in packed] == [m.phy_offset for m in left if m.topic == "Packed"]
        assert [m.phy_offset for m in read(store, 0)] == [m.phy_offset for m in left if m.topic == "Orders"]
        assert [m.phy_offset for m in store.get_message("Orders", 0, store.min_queue_offset("Orders"), 100, "t")]
    with MessageStore.open(root, config=config) as store:
        assert store.recovery_report.clean and list(store.messages()) == left


# ------------------------------------------------------------------------------------------------------------ readers


def mapped_deleted(root) -> int:
    """How many files below `root` this process maps although they were deleted (Linux)."""
    return sum("(deleted)" in line for line in mappings(root))


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc/self/maps")


@needs_proc
def test_a_view_stays_readable_and_then_lets_the_space_go(store, root):
    first = store.commit_log.files.file(0)
    view = first.hold(0, 300)
    before = bytes(view)
    iterator = store.messages()
    message = next(iterator)
    age(root, 100)
    store.delete_expired_files()
    assert not os.path.exists(first.path)
    # The memory of others would be gone, or something else, by now.
    fill(store, 50, first=100)
    assert bytes(view) == before and message.body == body(0) and message.keys == ["k0"]
    assert mapped_deleted(root) == 1
    with pytest.raises(OffsetOutOfRangeError) as caught:
        first.region  # noqa: B018
    assert first.path in str(caught.value)
    # A scan that was on its way goes on with what there is.
    rest = numbers(iterator)
    assert rest[-1] == 99 and rest == sorted(rest)
    view.release()
    assert mapped_deleted(root) == 0


@needs_proc
def test_nothing_that_was_deleted_stays_mapped(store, root):
    for queue_id in range(2):
        read(store, queue_id)
    for number in range(0, 100, 7):
        store.query_message("Orders", f"k{number}")
    age(root, 100)
    store.delete_expired_files()
    assert mapped_deleted(root) == 0


@needs_proc
def test_a_reader_between_the_list_and_the_file(store, root, monkeypatch):
    """Retention takes the file out of the list when a reader has looked at the list already."""
    age(root, 100, segments(root)[:1])
    real_file, real_destroy = MappedFileQueue.file, MappedFile.destroy
    strikes = [True]
    first = store.commit_log.files.file(0)

    def destroy(each: MappedFile) -> None:
        # The reader comes again before the name is gone, and maps the file.
        if each is first:
            with contextlib.suppress(OffsetOutOfRangeError):
                real_file(store.commit_log.files, 0).region.read(0, 8)
        real_destroy(each)

    def find_then_delete(files: MappedFileQueue, offset: int) -> MappedFile:
        if files is store.commit_log.files and offset == 0 and strikes.pop() if strikes else False:
            store.delete_expired_files()
        return real_file(files, offset)

    monkeypatch.setattr(MappedFile, "destroy", destroy)
    with monkeypatch.context() as patched:
        patched.setattr(MappedFileQueue, "file", find_then_delete)
        store.commit_log.look_up(0)
    assert not strikes and not os.path.exists(first.path)
    assert mapped_deleted(root) == 0


@needs_proc
def test_a_query_between_the_list_and_the_index_file(store, root, monkeypatch):
    """A query that has the names already opens an index file that is out of the list and not deleted yet."""
    age(root, 100)
    real, met = MappedFile.destroy, []

    def destroy(each: MappedFile) -> None:
        if os.sep + "index" + os.sep in each.path:
            with contextlib.suppress(FileNotFoundError, OffsetOutOfRangeError):
                store.index_service.file(os.path.basename(each.path))
            met.append(each.path)
        real(each)

    monkeypatch.setattr(MappedFile, "destroy", destroy)
    assert store.delete_expired_files().index_files == len(met) == 4
    assert mapped_deleted(root) == 0
    # Nothing is wrong with the files of this store.
    fill(store, 10, first=100)
    store.flush()
    assert numbers(store.query_message("Orders", "k105")) == [105]


MEETINGS = [
    *[(call, "consumequeue/") for call in ("get", "min", "time", "consume")],
    *[(call, "commitlog/") for call in ("get", "time", "scan", "query", "query by id", "consume")],
    *[(call, "index/") for call in ("query", "query_offsets")],
]


@pytest.mark.parametrize(("call", "part"), MEETINGS)
def test_deletion_just_before_a_file_is_mapped(store, root, monkeypatch, call, part):
    """For a reader every file may go between being found and being mapped; only a look at one place says so."""
    gone = store.message_at(0)
    for files in (store.commit_log.files, *(each.files for each in store.queues)):
        for base in files.offsets:
            files.file(base).let_go()
        # Another list of the same files: the stream forgets the file that it was asked for last.
        files.file_offsets = list(files.file_offsets)
    store.index_service._open.clear()
    age(root, 100)
    real = MappedFile._map
    strikes = [True]

    def map_after_deletion(each: MappedFile):
        if strikes and part in each.path:
            strikes.clear()
            # On a thread of its own, as it happens; where this one holds a lock that keeps the file, it comes later.
            thread = threading.Thread(target=store.delete_expired_files)
            thread.start()
            thread.join(0.5 if part == "index/" else 60)
        return real(each)

    monkeypatch.setattr(MappedFile, "_map", map_after_deletion)
    if call == "get":
        got = store.get_message("Orders", 0, 0)
        assert got.status in (GetMessageStatus.OFFSET_TOO_SMALL, GetMessageStatus.MESSAGE_WAS_REMOVING)
        assert not got.messages and got.next_queue_offset > 0
    elif call == "min":
        assert 0 <= store.min_queue_offset("Orders", 0) <= 50
    elif call == "time":
        assert 0 <= store.offset_by_time("Orders", 0, NOON) <= 50
    elif call == "scan":
        found = numbers(store.messages())
        assert found == sorted(found) and found[-1] == 99
    elif call == "query":
        assert numbers(store.query_message("Orders", "k3")) in ([], [3])
    elif call == "query_offsets":
        assert len(store.query_offsets("Orders", "k3")) <= 1
    elif call == "query by id":
        with pytest.raises(OffsetOutOfRangeError):
            store.message_by_id(gone.msg_id)
    else:
        found = numbers(store.consume("Orders", "group", timeout=0))
        assert found and set(found) <= set(range(100)) and {98, 99} <= set(found)
    assert not strikes
    assert numbers(store.messages())[-1] == 99
    assert store.max_queue_offset("Orders", 0) == 50


def test_readers_on_other_threads_while_files_go(root):
    """Puts, retention and readers at the same time; no reader meets an exception that its documentation does not name."""
    config = SMALL.replace(file_reserved_time=0, max_mapped_files=8)
    store = MessageStore.open(root, config=config)
    fill(store, 60)
    failures: list[BaseException] = []
    done = threading.Event()
    rounds = [0]

    def run(work) -> threading.Thread:
        def body_of_thread() -> None:
            try:
                while not done.is_set():
                    work()
            except BaseException as error:
                failures.append(error)
                done.set()

        thread = threading.Thread(target=body_of_thread)
        thread.start()
        return thread

    def by_queue() -> None:
        for queue_id in range(2):
            at = store.min_queue_offset("Orders", queue_id)
            got = store.get_message("Orders", queue_id, at, 10)
            for message in got:
                assert not message.corrupt and int(message.body[:4]) % 2 == queue_id
            assert got.min_queue_offset <= got.max_queue_offset <= store.max_queue_offset("Orders", queue_id)

    def by_scan() -> None:
        found = numbers(store.messages())
        assert found == sorted(set(found))

    def by_key() -> None:
        newest = store.max_queue_offset("Orders", 0) * 2 - 2
        for number in (newest, max(newest - 40, 0), 0):
            assert numbers(store.query_message("Orders", f"k{number}")) in ([], [number])

    def by_place() -> None:
        low = store.commit_log.min_offset
        try:
            assert not store.message_at(low).corrupt
        except OffsetOutOfRangeError:
            assert store.commit_log.min_offset > low

    def by_time() -> None:
        assert 0 <= store.offset_by_time("Orders", 1, NOON) <= store.max_queue_offset("Orders", 1)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [run(work) for work in (by_queue, by_scan, by_key, by_place, by_time)]
        for number in range(60, 360, 10):
            fill(store, 10, first=number)
            rounds[0] += store.delete_expired_files().segments
            if done.is_set():
                break
        done.set()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a reader hangs"
    finally:
        sys.setswitchinterval(before)
    if failures:
        raise failures[0]
    assert rounds[0] > 20
    store.close()


def test_a_consumer_that_fell_behind(store, root, caplog):
    consumer = store.consume("Orders", "group", timeout=0, max_num=2)
    assert numbers([next(consumer), next(consumer)]) == [0, 2]
    age(root, 100, segments(root)[:8])
    store.delete_expired_files()
    left = set(numbers(store.messages()))
    found = numbers(consumer)
    # Those that it had fetched before, at most, and then what is left.
    assert left <= set(found) and len(found) == len(set(found))
    assert "was deleted before group group consumed it" in caplog.text
    for queue_id in range(2):
        assert store.consumer_offsets.get("group", "Orders", queue_id) == 50


# ----------------------------------------------------------------------------------------------------- crash, reopening


def test_a_crash_at_any_step_of_a_round(store, root, tmp_path, monkeypatch, clock):
    """The directory as it is after each deletion; each state opens, as after a kill, and holds what was not deleted."""
    # Queue and index files go in the same round.
    age(root, 100, segments(root)[:9])
    copies: list[Path] = []
    real = os.unlink

    def unlink(path, *args, **options) -> None:
        real(path, *args, **options)
        copies.append(Path(shutil.copytree(root, tmp_path / f"state-{len(copies)}")))

    monkeypatch.setattr(os, "unlink", unlink)
    report = store.delete_expired_files()
    monkeypatch.undo()
    assert len(copies) == report.segments + report.queue_files + report.index_files and report.queue_files
    config = SMALL.replace(clock=clock)
    for copy in copies:
        names = segments(copy)
        with MessageStore.open(copy, config=config) as reopened:
            assert not reopened.recovery_report.clean and not reopened.recovery_report.units_cut
            left = numbers(reopened.messages())
            assert left[-1] == 99 and reopened.commit_log.min_offset == int(names[0])
            for queue_id in range(2):
                assert numbers(read(reopened, queue_id)) == [number for number in left if number % 2 == queue_id]
                assert reopened.max_queue_offset("Orders", queue_id) == 50
            for number in range(100):
                assert numbers(reopened.query_message("Orders", f"k{number}")) == [number] * (number in left)
            # The next round ends what this one began.
            age(copy, 100, [name for name in names if int(name) < store.commit_log.min_offset])
            reopened.delete_expired_files()
            assert segments(copy) == segments(root)
            for folder in ("consumequeue/Orders/0", "consumequeue/Orders/1"):
                assert sorted(os.listdir(copy / folder)) == sorted(os.listdir(root / folder))
            assert reopened.put_message(Message("Orders", body(100))).queue_offset == 50
        assert not [finding for finding in verify(copy) if finding.severity == "error"]


@pytest.mark.parametrize("what", ["commitlog", "consumequeue"])
def test_a_file_that_the_system_does_not_delete_stays_with_all_that_leads_to_it(store, root, monkeypatch, clock, what):
    age(root, 100, segments(root)[:9])
    real = os.unlink

    def unlink(path, *args, **options) -> None:
        if f"{os.sep}{what}{os.sep}" in os.fspath(path) and len(gone) > 2:
            raise OSError(5, "Input/output error", path)
        gone.append(path)
        real(path, *args, **options)

    gone: list[object] = []
    monkeypatch.setattr(os, "unlink", unlink)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            store.delete_expired_files()
        assert store.commit_log.min_offset == int(segments(root)[0])
    left = numbers(store.messages())
    # A round that finds nothing to delete in the log deletes what an earlier one left.
    age(root, 0, segments(root))
    monkeypatch.undo()
    store.delete_expired_files()
    assert numbers(store.messages()) == left
    copy = shutil.copytree(root, root.parent / "copy")
    with MessageStore.open(copy, config=SMALL.replace(clock=clock)) as reopened:
        assert numbers(reopened.messages()) == left
        for queue_id in range(2):
            assert numbers(read(reopened, queue_id)) == [number for number in left if number % 2 == queue_id]
    assert not [finding for finding in verify(copy) if finding.severity == "error"]
    age(root, 100, segments(root)[:1])
    assert store.delete_expired_files().segments == 1


@pytest.mark.parametrize("in_order", [True, False])
def test_a_store_goes_on_after_retention_and_reopening(root, clock, in_order):
    config = SMALL.replace(clock=clock)
    next_number = 0
    for turn in range(4):
        with MessageStore.open(root, config=config) as store:
            assert store.recovery_report.clean is (in_order or turn == 0)
            fill(store, 60, first=next_number)
            next_number += 60
            store.flush()
            age(root, 100, segments(root)[:-3])
            assert store.delete_expired_files().segments > 3
            left = numbers(store.messages())
            assert len(segments(root)) == 3 and left == list(range(next_number - len(left), next_number))
            for queue_id in range(2):
                assert store.max_queue_offset("Orders", queue_id) == next_number // 2
                assert numbers(read(store, queue_id)) == [number for number in left if number % 2 == queue_id]
            for number in left:
                assert numbers(store.query_message("Orders", f"k{number}")) == [number]
        if not in_order:
            (root / "abort").touch()
    assert not [finding for finding in verify(root) if finding.severity == "error"]


def test_a_file_that_somebody_else_deleted(store, root):
    age(root, 100, segments(root)[:3])
    os.unlink(root / "commitlog" / segments(root)[0])
    # Whatever happens to it, the ones after it do not stay forever.
    for _ in range(2):
        try:
            store.delete_expired_files()
        except OSError as error:
            assert "commitlog" in str(error)
    assert len(segments(root)) == 8
    assert numbers(store.messages())[-1] == 99


@needs_proc
def test_the_names_are_forced_after_the_deletion(store, root, monkeypatch):
    events: list[tuple[str, str]] = []
    real_unlink, real_fsync = os.unlink, os.fsync
    monkeypatch.setattr(os, "unlink", lambda path: (real_unlink(path), events.append(("gone", os.path.dirname(path)))))
    monkeypatch.setattr(
        os, "fsync", lambda fd: (events.append(("forced", os.readlink(f"/proc/self/fd/{fd}"))), real_fsync(fd))
    )
    age(root, 100)
    store.delete_expired_files()
    folders = {folder for what, folder in events if what == "gone"}
    assert {os.path.relpath(folder, root).split(os.sep)[0] for folder in folders} == {
        "commitlog",
        "consumequeue",
        "index",
    }
    for folder in folders:
        assert ("forced", folder) in events[events.index(("gone", folder)) :]
    # The log first: a queue without its messages is repaired, messages without their queue would have to be found.
    first = {
        kind: next(i for i, each in enumerate(events) if kind in each[1]) for kind in ("commitlog", "consumequeue")
    }
    assert first["commitlog"] < first["consumequeue"]


def test_a_round_does_not_disturb_a_flush(store, root, monkeypatch):
    """A segment goes after a flush took note of it and before it is forced."""
    fill(store, 30, first=100)
    age(root, 100)
    real = MappedFile.flush
    strikes = [True]

    def flush(each: MappedFile) -> None:
        if strikes and "commitlog" in each.path:
            strikes.clear()
            assert store.delete_expired_files().segments
        real(each)

    monkeypatch.setattr(MappedFile, "flush", flush)
    store.flush()
    assert not strikes
    fill(store, 5, first=130)
    store.flush()
    assert numbers(store.messages())[-1] == 134


# --------------------------------------------------------------------------------------------------------------- Java


@pytest.mark.java
@pytest.mark.parametrize("killed", [False, True])
def test_java_opens_a_store_after_our_retention(root, clock, killed, tmp_path):
    interop = str(Path(__file__).resolve().parents[1] / "interop")
    sys.path.append(interop)
    try:
        from peer import JavaStore
    finally:
        sys.path.remove(interop)
    reason = JavaStore.unavailable_reason()
    if reason is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason} (required when CI=true)")
        pytest.skip(reason)
    config = SMALL.replace(clock=clock)
    store = MessageStore.open(root, config=config)
    fill(store, 7, topic="Quiet", queues=1)
    fill(store, 100, first=7)
    store.flush()
    age(root, 100, segments(root)[:8])
    assert store.delete_expired_files().segments == 8
    copy = tmp_path / "for Java"
    if killed:
        shutil.copytree(root, copy)
        store.close()
    else:
        store.close()
        shutil.copytree(root, copy)
    with MessageStore.open(root, config=config, read_only=True) as reader:
        left = list(reader.messages())
        bounds = {
            (topic, queue_id): (reader.min_queue_offset(topic, queue_id), reader.max_queue_offset(topic, queue_id))
            for topic in reader.topics()
            for queue_id in reader.queue_ids(topic)
        }
    requests = [
        {"op": "get", "topic": topic, "queueId": queue_id, "offset": low, "maxNum": 100, "maxBytes": 1 << 20}
        for (topic, queue_id), (low, _) in bounds.items()
    ]
    requests += [
        {"op": "query", "topic": "Orders", "key": f"k{number}", "maxNum": 64, "begin": 0, "end": 2**62}
        for number in (7, 50, 100, 106)
    ]
    answers = JavaStore().ask(copy, config, requests)
    for answer, ((topic, queue_id), (low, high)) in zip(answers, bounds.items(), strict=False):
        expected = [m.phy_offset for m in left if (m.topic, m.queue_id) == (topic, queue_id)]
        # The first of them: Java ends a walk with the queue file.
        assert [record["offset"] for record in answer["records"]] == expected[: len(answer["records"])]
        assert bool(answer["records"]) == bool(expected)
        assert (answer["min"], answer["max"]) == (low, high)
    for answer, number in zip(answers[len(bounds) :], (7, 50, 100, 106), strict=True):
        there = [m.phy_offset for m in left if m.keys == [f"k{number}"]]
        assert sorted(set(answer["messages"])) == there
    lines = JavaStore().dump(copy, config) if killed else []
    assert not killed or [line["offset"] for line in lines if line["type"] == "msg"] == [m.phy_offset for m in left]


def test_the_log_of_deletions(store, root, caplog):
    caplog.set_level("INFO", "rmqstore")
    names = segments(root)
    age(root, 100, names[:2])
    store.delete_expired_files()
    said = [record.message for record in caplog.records if record.name == retention.__name__]
    assert [name for name in names if any(name in text for text in said)] == names[:2]
    assert all("100.0 h ago" in text for text in said)


def test_verify_blames_no_checkpoint_of_messages_that_are_gone(tmp_path, clock):
    # The clock was set back; what was stored before that expired, and the checkpoint goes on to speak of its times.
    config = SMALL.replace(clock=clock)
    with MessageStore.open(tmp_path / "store", config=config) as store:
        for number in range(50):
            if number == 20:
                clock.now -= HOUR
            store.put_message(Message("Orders", bytes(300), keys=[f"k{number}"]))
        store.flush()
        folder = tmp_path / "store" / "commitlog"
        names = sorted(os.listdir(folder))
        for number, name in enumerate(names):
            written = clock.now / 1000 - (100 * HOUR / 1000 if number < 3 else 0)
            os.utime(folder / name, (written, written))
        assert store.delete_expired_files().segments == 3
    path = tmp_path / "store" / "checkpoint"
    clock.now = NOON
    assert list(verify(tmp_path / "store", config)) == []
    # A time that nobody's clock has reached yet is wrong whatever was deleted.
    data = bytearray(path.read_bytes())
    data[0:8] = (NOON + 24 * HOUR).to_bytes(8, "big")
    path.write_bytes(bytes(data))
    assert [finding.kind for finding in verify(tmp_path / "store", config)] == ["bad_checkpoint"]
