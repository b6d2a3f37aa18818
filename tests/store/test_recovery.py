"""Recovery in detail: what it looks at, what it reports, and what it leaves alone.

Owns the decisions of `rmqstore.store.recovery` one by one, and the scan of the log under them.  That nothing acknowledged is
lost, whenever a process dies, is tested in test_crash.py; here stores are damaged at one known place.  Numbers as 11.9 name
what RocketMQ 5.5.0 does wrong; the tests state what is to happen instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import struct
import tempfile

import oracle
import pytest
from scratch import SCRATCH
from test_crash import (
    NOW,
    SEGMENT,
    Durable,
    Writer,
    changes,
    check_bytes,
    check_readable,
    check_recovered,
    closed_store,
    config_of,
    damage_body,
    geometry,
    make_unclean,
    overwrite,
    script,
    shutdown_files,
)

from rmqstore import CorruptionError, Message, MessageStore, OffsetOutOfRangeError, StoreConfig
from rmqstore._core import Verdict
from rmqstore._dispatch import RecordColumns
from rmqstore.commitlog import log_walk
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.files.mapped_file import MappedFilePool
from rmqstore.store import recovery
from rmqstore.store.dispatcher import CommitLogDispatcher


@pytest.fixture
def root():
    path = tempfile.mkdtemp(prefix="rmqstore-recovery-", dir=SCRATCH)
    yield os.path.join(path, "store")
    shutil.rmtree(path, ignore_errors=True)


def records_of(root: str) -> list[oracle.Record]:
    return oracle.records_of(oracle.segments(oracle.read_files(root)))


def set_checkpoint(root: str, **values: int) -> None:
    checkpoint = Checkpoint.load(os.path.join(root, "checkpoint"))
    for name, value in values.items():
        setattr(checkpoint, name, value)
    checkpoint.flush()


def crash(root: str, **values: int) -> None:
    """A crash, with this checkpoint."""
    make_unclean(root)
    set_checkpoint(root, **values)


# ------------------------------------------------------------------------------------------------------- the report


def test_the_report_says_what_was_scanned_cut_and_dispatched(root):
    geo = geometry("plain")
    closed_store(root, geo, script())
    records = records_of(root)
    make_unclean(root)
    # A torn record after the end, a queue without its last unit, an index without its last entry.
    end = records[-1].end
    segment = end - end % SEGMENT
    overwrite(root, f"commitlog/{oracle.file_name(segment)}", end - segment, b"\0\0\0\x70torn")
    last = [each for each in records if each.topic == "Orders"][-1]
    folder = f"consumequeue/Orders/{last.queue_id}"
    pos = last.queue_offset * 20
    overwrite(root, f"{folder}/{oracle.file_name(pos - pos % 80)}", pos % 80, bytes(20))
    names = sorted(os.listdir(os.path.join(root, "index")))
    with MessageStore.open(root, config=config_of(geo)) as store:
        report = store.recovery_report
    assert (report.mode, report.clean, report.damage) == ("strict", False, [])
    assert (report.began_at, report.end, report.bytes_scanned) == (0, end, end)
    assert (report.segments_scanned, report.segments_deleted) == (segment // SEGMENT + 1, 0)
    assert (report.records, report.bytes_cut) == (len(records), 8)
    assert 0 <= report.dispatched_from <= last.phy_offset
    assert (report.units_written, report.units_mended, report.index_entries_cut) == (1, 0, 0)
    assert (report.index_files_kept, report.index_files_deleted) == (len(names), 0)
    assert report.seconds > 0
    values = json.loads(json.dumps(report.as_dict()))
    assert list(values) == [each.name for each in dataclasses.fields(report)]
    assert values["units_written"] == 1
    for name in values:
        assert name in type(report).__doc__, f"{name} is not described"


def test_the_report_names_the_mode_and_the_damage(root):
    geo = geometry("plain")
    closed_store(root, geo, script())
    damaged = records_of(root)[5]
    make_unclean(root)
    damage_body(root, damaged)
    with MessageStore.open(root, config=config_of(geo), recovery="skip") as store:
        values = json.loads(json.dumps(store.recovery_report.as_dict()))
    assert values["mode"] == "skip"
    assert values["damage"] == [
        {"phy_offset": damaged.phy_offset, "size": damaged.size, "verdict": "BAD_BODY_CRC"},
    ]


def test_the_report_counts_segments_and_index_files_that_go(root):
    geo = geometry("plain")
    closed_store(root, geo, script())
    damaged = records_of(root)[2]
    make_unclean(root)
    damage_body(root, damaged)
    before = os.listdir(os.path.join(root, "index"))
    segments = os.listdir(os.path.join(root, "commitlog"))
    with MessageStore.open(root, config=config_of(geo), recovery="truncate") as store:
        report = store.recovery_report
    assert report.mode == "truncate"
    assert report.segments_deleted == len(segments) - len(os.listdir(os.path.join(root, "commitlog"))) > 0
    assert report.index_files_deleted + report.index_files_kept == len(before)
    assert report.index_files_deleted > 0
    check_bytes(root, geo)


# -------------------------------------------------------------------------------------------------- where it begins


def many_segments(root: str, geo: dict, number: int, clock: list[int], step: int = 700) -> list[tuple]:
    with MessageStore.open(root, config=config_of(geo, lambda: clock[0])) as store:
        writer = Writer(store, clock)
        for n in range(number):
            clock[0] += step - 700
            writer.put("one", [Message("Orders", b"%d" % n * 50, keys=[f"u{n}"], tags="T")], n % 2)
    return writer.acknowledged


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "unclean"])
@pytest.mark.parametrize("folder", ["index", "consumequeue"])
def test_nothing_is_given_up_because_it_is_old(root, clean, folder):
    # RocketMQ 5.5.0 looks at ten segments at most: what is lost of older ones never comes back (commitLogRecoverMaxNum).
    geo = {**geometry("plain"), "max_index_num": 40}
    acknowledged = many_segments(root, geo, 90, [NOW])
    assert len(os.listdir(os.path.join(root, "commitlog"))) > 12
    before = shutdown_files(root)
    shutil.rmtree(os.path.join(root, folder))
    if not clean:
        # Everything was flushed, says the checkpoint.
        with open(os.path.join(root, "abort"), "wb"):
            pass
    with MessageStore.open(root, config=config_of(geo)) as store:
        check_readable(store, acknowledged)
    assert not changes(before, shutdown_files(root))


def test_a_crash_looks_only_at_what_was_not_flushed(root):
    geo = {**geometry("plain"), "max_index_num": 400}
    clock = [NOW]
    many_segments(root, geo, 60, clock)
    records = records_of(root)
    end = records[-1].end
    # All files are as after the flush; the checkpoint is the flush's.
    with open(os.path.join(root, "abort"), "wb"):
        pass
    with MessageStore.open(root, config=config_of(geo)) as store:
        report = store.recovery_report
    assert not report.clean
    # The newest segment that began three seconds or more before the checkpoint's time.
    flushed = [each for each in records if each.phy_offset % SEGMENT == 0 and each.store_timestamp <= clock[0] - 3000]
    assert report.began_at == flushed[-1].phy_offset > 0
    assert report.records == len([each for each in records if each.phy_offset >= report.began_at])
    assert report.end == end


@pytest.mark.parametrize(
    "damage",
    [
        "address of the last unit", "place of the last unit", "extension", "extension, nothing newer", "unit",
        "unit, nothing newer", "nothing",
    ],
)  # fmt: skip
@pytest.mark.parametrize("fails", [False, True], ids=["one opening", "the first opening fails"])
def test_what_older_records_left_in_a_queue_is_there_after_a_crash(root, monkeypatch, damage, fails):
    # The log is judged from its newest segment on, as all was flushed; what a damaged unit takes along lies in front of that.
    geo = {**geometry("propcrc-ext"), "mapped_file_size_consume_queue": 800, "mapped_file_size_consume_queue_ext": 4000}
    written = os.path.join(os.path.dirname(root), "written")
    with MessageStore.open(written, config=config_of(geo)) as store:
        for n in range(20):
            store.put_message(Message("Orders", b"%d" % n, keys=[f"k{n}"], tags="t"))
        for n in range(60):
            store.put_message(Message("Other", b"%d" % n, keys=[f"o{n}"]))
        if "newer" not in damage:
            store.put_message(Message("Orders", b"the last", keys=["last"]))
        store.flush()
        shutil.copytree(written, root)
    records = [each for each in records_of(root) if each.topic == "Orders"]
    last = records[-1]
    queue, extension = (f"{folder}/Orders/0/{oracle.file_name(0)}" for folder in ("consumequeue", "consumequeue_ext"))
    wanted = len(records)
    if damage.endswith("of the last unit"):
        # Its record is lost, and so is a part of the unit.
        segment = last.phy_offset // SEGMENT * SEGMENT
        overwrite(root, f"commitlog/{oracle.file_name(segment)}", last.phy_offset - segment, bytes(64))
        overwrite(root, queue, 20 * 20 + (16 if damage.startswith("address") else 0), bytes(4 if "address" in damage else 8))
        wanted -= 1
    elif damage.startswith("extension"):
        overwrite(root, extension, 20 * 3, bytes(20))
    elif damage.startswith("unit"):
        overwrite(root, queue, 20 * 3, bytes(20))
    if fails:
        # The disk is full when the units are to be written again.
        def full(*_, **__) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(CommitLogDispatcher, "dispatch_columns", full)
        with contextlib.suppress(OSError):
            MessageStore.open(root, config=config_of(geo))
        monkeypatch.undo()
    with MessageStore.open(root, config=config_of(geo)) as store:
        report = store.recovery_report
        assert not report.clean and (fails or report.began_at > records[-2].phy_offset)
        assert store.max_queue_offset("Orders") == wanted
        got = store.get_message("Orders", 0, 0, 32).messages
        assert [each.phy_offset for each in got] == [each.phy_offset for each in records[:wanted]]
        assert [each.phy_offset for each in store.get_message("Orders", 0, 0, 32, "t").messages] == [
            each.phy_offset for each in records[:20]
        ]
    assert fails or report.units_cut == {
        "address of the last unit": 1, "place of the last unit": 1, "extension": 18, "extension, nothing newer": 17,
    }.get(damage, 0)  # fmt: skip
    check_bytes(root, geo)


@pytest.mark.parametrize("lost", [0, 2, 5, 9])
def test_a_unit_that_a_light_message_queue_lost_is_written_again(root, lost):
    geo = {**geometry("plain"), "enable_lmq": True, "enable_multi_dispatch": True}
    with MessageStore.open(root, config=config_of(geo)) as store:
        for n in range(10):
            properties = {"INNER_MULTI_DISPATCH": "%LMQ%a,%LMQ%b" if n % 2 else "%LMQ%a"}
            store.put_message(Message("Orders", b"%d" % n, keys=[f"k{n}"], properties=properties))
    files = shutdown_files(root)
    make_unclean(root)
    overwrite(root, f"consumequeue/%LMQ%a/0/{oracle.file_name(lost // 4 * 80)}", lost % 4 * 20, bytes(20))
    with MessageStore.open(root, config=config_of(geo)) as store:
        got = [each for n in range(0, 10, 4) for each in store.get_message("%LMQ%a", 0, n, 4).messages]
        assert [int(each.body) for each in got] == [*range(10)]
    assert shutdown_files(root) == files


@pytest.mark.parametrize("flushed", [0, 1, 4, 7])
def test_a_clock_that_stepped_back_hides_nothing_that_was_not_flushed(root, flushed):
    # By their times alone all segments after the step look older than the flush before it.
    geo = {**geometry("plain"), "max_index_num": 400}
    clock = [NOW]
    acknowledged = many_segments(root, geo, 60, clock, step=-10_000)
    records = records_of(root)
    offset = SEGMENT * flushed + 10
    # Of segment 5 on the units are lost in one queue: a whole scan finds out, a look at the last segment does not.
    lost = next(each for each in records if each.phy_offset >= 5 * SEGMENT and each.queue_id == 0)
    pos = lost.queue_offset * 20
    overwrite(root, f"consumequeue/Orders/0/{oracle.file_name(pos - pos % 80)}", pos % 80 + 4, b"\0\0\0\x01")
    crash(
        root,
        physic_msg_timestamp=NOW + 10_000,
        logics_msg_timestamp=NOW + 10_000,
        index_msg_timestamp=NOW + 10_000,
        logics_physical_offset=offset,
    )
    with MessageStore.open(root, config=config_of(geo)) as store:
        report = store.recovery_report
        if not flushed:
            return
        assert report.began_at <= flushed * SEGMENT
        if flushed <= 5:
            assert report.units_mended == 1
            check_readable(store, acknowledged)
    if flushed <= 5:
        check_bytes(root, geo)


@pytest.mark.parametrize("offset", [-1, -(2**63), 2**63 - 1, 1])
def test_a_checkpoint_of_lies_only_costs_time(root, offset):
    geo = geometry("plain")
    acknowledged = closed_store(root, geo, script())
    crash(root, physic_msg_timestamp=0, logics_physical_offset=offset)
    check_recovered(root, geo, acknowledged)


# --------------------------------------------------------------------------------------------- reading the log once


def test_what_agrees_is_read_once(root, monkeypatch):
    geo = {**geometry("plain"), "max_index_num": 400}
    acknowledged = many_segments(root, geo, 60, [NOW])
    records = records_of(root)
    monkeypatch.setattr(log_walk, "_PIECE_ROWS", 3)
    dispatched = []
    dispatch = CommitLogDispatcher.dispatch_columns

    def spy(self, columns, *args, **more):
        dispatched.extend(columns.phy_offset[: columns.count].tolist())
        return dispatch(self, columns, *args, **more)

    monkeypatch.setattr(CommitLogDispatcher, "dispatch_columns", spy)
    for number in (59, 58, 40, 21, 20, 1, 0, None):
        make_unclean(root)
        if number is not None:
            lost = records[number]
            pos = lost.queue_offset * 20
            path = f"consumequeue/Orders/{lost.queue_id}/{oracle.file_name(pos - pos % 80)}"
            overwrite(root, path, pos % 80 + 7, bytes([lost.phy_offset & 0xFF ^ 1]))
        dispatched.clear()
        with MessageStore.open(root, config=config_of(geo)) as store:
            report = store.recovery_report
            check_readable(store, acknowledged)
        assert report.records == 60
        # A last unit that points after the end is cut, any other one is repaired.
        assert report.units_mended + report.units_cut == (number is not None)
        # From the rows of the first difference on; without one only the last, whose entries may not be complete.
        first = records.index(next(each for each in records if each.phy_offset == report.dispatched_from))
        wanted = 59 if number is None else number
        assert wanted - 2 <= first <= wanted
        assert dispatched == [each.phy_offset for each in records[first:]]
        check_bytes(root, geo)


@pytest.mark.parametrize("rows", [1, 2, 5, 1000])
@pytest.mark.parametrize("name", ["plain", "propcrc-ext"])
def test_every_lost_unit_is_found_whatever_the_batches(root, monkeypatch, rows, name):
    geo = geometry(name)
    acknowledged = closed_store(root, geo, script())
    monkeypatch.setattr(log_walk, "_PIECE_ROWS", rows)
    original = root + ".original"
    shutil.copytree(root, original)
    units = [
        (path, pos)
        for path, data in oracle.read_files(root).items()
        if path.startswith("consumequeue/")
        for pos in range(0, len(data), 20)
        if any(data[pos : pos + 20])
    ]
    assert len(units) > 20
    for path, pos in units:
        # Without its size a unit does not exist, whatever follows.
        overwrite(root, path, pos + 8, bytes(4))
        make_unclean(root)
        with MessageStore.open(root, config=config_of(geo)) as store:
            check_readable(store, acknowledged)
            assert store.recovery_report.units_written + store.recovery_report.units_mended > 0
        check_bytes(root, geo)
        shutil.rmtree(root)
        shutil.copytree(original, root)


def test_units_that_agree_are_written_again_if_a_cut_takes_them(root, monkeypatch):
    # The damaged unit belongs to a record in front of the scanned part, the units that a cut at it takes to the scanned one.
    geo = {**geometry("plain"), "max_index_num": 400, "mapped_file_size_consume_queue": 2000}
    clock = [NOW]
    acknowledged = many_segments(root, geo, 60, clock)
    monkeypatch.setattr(log_walk, "_PIECE_ROWS", 4)
    overwrite(root, f"consumequeue/Orders/0/{oracle.file_name(0)}", 60, struct.pack(">q", 2**40))
    with open(os.path.join(root, "abort"), "wb"):
        pass
    with MessageStore.open(root, config=config_of(geo)) as store:
        report = store.recovery_report
        assert report.began_at > 0
        assert report.units_cut == report.units_written == 27
        check_readable(store, acknowledged)
    check_bytes(root, geo)


# -------------------------------------------------------------------------------------------------------- the index


def test_the_newest_index_file_survives_as_it_is(root):
    # 11.2: Java deletes it after every crash, and with it the keys of everything before the part that it scans.
    geo = geometry("plain")
    acknowledged = closed_store(root, geo, script())
    files = {path: data for path, data in oracle.read_files(root).items() if path.startswith("index/")}
    assert len(files) > 2
    inodes = {path: os.stat(os.path.join(root, path)).st_ino for path in files}
    make_unclean(root)
    with MessageStore.open(root, config=config_of(geo)) as store:
        report = store.recovery_report
        assert (report.index_files_kept, report.index_files_deleted) == (len(files), 0)
        assert (report.index_entries_cut, report.index_entries_written) == (0, 0)
        check_readable(store, acknowledged)
    assert {path: data for path, data in oracle.read_files(root).items() if path.startswith("index/")} == files
    assert {path: os.stat(os.path.join(root, path)).st_ino for path in files} == inodes


@pytest.mark.parametrize("retained", ["all", "but the first segment"])
def test_every_torn_last_entry_is_written_again(root, retained):
    # A page boundary may lie within the last entry: what is behind it never reached the disk.
    geo = {**geometry("plain"), "max_index_num": 400}
    acknowledged = many_segments(root, geo, 20, [NOW])
    (name,) = os.listdir(os.path.join(root, "index"))
    data = oracle.read_files(root)[f"index/{name}"]
    count = struct.unpack(">i", data[36:40])[0]
    entry = 40 + 4 * geo["max_hash_slot_num"] + 20 * (count - 1)
    assert struct.unpack(">i", data[entry + 12 : entry + 16])[0] > 0
    if retained != "all":
        # The record by whose time the entries count is gone.
        os.unlink(os.path.join(root, "commitlog", oracle.file_name(0)))
        acknowledged = []
    for kept in range(20):
        make_unclean(root)
        overwrite(root, f"index/{name}", entry + kept, bytes(20 - kept))
        with MessageStore.open(root, config=config_of(geo)) as store:
            report = store.recovery_report
            lost = data[entry + kept : entry + 20].strip(b"\0") != b""
            assert (report.index_entries_cut, report.index_entries_written) in ((1, 1), (0, 0))
            # The previous entry is found again from the others.
            assert report.index_entries_written == (lost and kept < 16)
            check_readable(store, acknowledged)
        assert oracle.read_files(root)[f"index/{name}"] == data


def test_an_entry_whose_hash_was_lost_is_written_again(root):
    # The page with its first four bytes is as at the last flush, the next page is newer.
    geo = {**geometry("plain"), "max_index_num": 400}
    acknowledged = many_segments(root, geo, 20, [NOW])
    (name,) = os.listdir(os.path.join(root, "index"))
    data = oracle.read_files(root)[f"index/{name}"]
    count = struct.unpack(">i", data[36:40])[0]
    for number in range(1, count):
        for lost in (4, 8, 12):
            make_unclean(root)
            overwrite(root, f"index/{name}", 40 + 4 * geo["max_hash_slot_num"] + 20 * number, bytes(lost))
            with MessageStore.open(root, config=config_of(geo)) as store:
                report = store.recovery_report
                assert report.index_entries_cut == report.index_entries_written == count - number
                check_readable(store, acknowledged)
            assert oracle.read_files(root)[f"index/{name}"] == data


def test_an_entry_that_cannot_be_is_where_the_index_ends(root):
    geo = {**geometry("plain"), "max_index_num": 4000, "max_hash_slot_num": 50}
    clock = [NOW]
    store = MessageStore.open(root, config=config_of(geo, lambda: clock[0]))
    writer = Writer(store, clock)
    for n in range(60):
        writer.put("one", [Message("Orders", b"x", keys=[f"k{n}"])], 0)
        if n == 40:
            store.flush()
    killed = root + ".killed"
    shutil.copytree(root, killed)
    store.close()
    (name,) = os.listdir(os.path.join(root, "index"))
    before = oracle.read_files(killed)
    entries = 40 + 4 * 50
    # One from before the flush and one of after it: the index ends there, and the log gives the rest again.
    for number, cut in ((5, 56), (50, 11)):
        copy = f"{root}.{number}"
        shutil.copytree(killed, copy)
        overwrite(copy, f"index/{name}", entries + 20 * number, b"\xff")
        with MessageStore.open(copy, config=config_of(geo)) as store:
            assert store.recovery_report.index_entries_cut == cut
            assert store.recovery_report.index_entries_written == cut
        after = oracle.read_files(copy)[f"index/{name}"]
        assert after == before[f"index/{name}"]


def test_what_lies_behind_the_last_entry_is_erased(root):
    # The page with the entry was written, the one with the header was not.
    geo = {**geometry("plain"), "max_index_num": 400}
    acknowledged = many_segments(root, geo, 20, [NOW])
    (name,) = os.listdir(os.path.join(root, "index"))
    before = oracle.read_files(root)[f"index/{name}"]
    make_unclean(root)
    overwrite(root, f"index/{name}", len(before) - 45, b"\1" * 20)
    with MessageStore.open(root, config=config_of(geo)) as store:
        check_readable(store, acknowledged)
    assert oracle.read_files(root)[f"index/{name}"] == before


# ------------------------------------------------------------------------------------------- as Java does it wrong


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "unclean"])
def test_a_gap_inside_a_queue_is_filled_from_the_log(root, clean):
    # 11.11: Java appends what comes next at the end and so shifts the queue.
    geo = geometry("plain")
    clock = [NOW]
    with MessageStore.open(root, config=config_of(geo, lambda: clock[0])) as store:
        writer = Writer(store, clock)
        for n in range(11):
            writer.put("one", [Message("Orders", b"%d" % n, keys=[f"k{n}"])], 0)
    before = shutdown_files(root)
    for first, number in ((5, 1), (0, 1), (2, 5), (10, 1)):
        for unit in range(first, first + number):
            pos = unit * 20
            overwrite(root, f"consumequeue/Orders/0/{oracle.file_name(pos - pos % 80)}", pos % 80, bytes(20))
        if not clean:
            make_unclean(root)
        with MessageStore.open(root, config=config_of(geo)) as store:
            assert store.recovery_report.clean == clean
            if not clean or first + number > 8:
                check_readable(store, writer.acknowledged)
        if clean:
            # A queue that was closed in order is not compared; verify and an unclean start do that.
            with open(os.path.join(root, "abort"), "wb"):
                pass
            os.unlink(os.path.join(root, "checkpoint"))
            MessageStore.open(root, config=config_of(geo)).close()
        assert not changes(before, shutdown_files(root))


@pytest.mark.parametrize("unit_size", [20, 40])
@pytest.mark.parametrize("name", ["plain", "propcrc-ext"])
@pytest.mark.parametrize("number", [0, 1, 7, 12])
def test_queue_files_of_one_unit_are_cut_with_their_extension(root, name, number, unit_size):
    # 11.23: Java loops forever in a queue file of one unit, and leaves the extension as it is.
    geo = {**geometry(name), "mapped_file_size_consume_queue": unit_size}
    acknowledged = closed_store(root, geo, script())
    damaged = records_of(root)[number]
    make_unclean(root)
    damage_body(root, damaged)
    with MessageStore.open(root, config=config_of(geo), recovery="truncate") as store:
        check_readable(store, [each for each in acknowledged if each[3] < damaged.phy_offset])
        put = store.put_message(Message("Orders", b"next", tags="next"))
        assert put.phy_offset == damaged.phy_offset
    check_bytes(root, geo)
    check_recovered(root, geo, [])


def test_torn_extension_units_are_mended(root):
    # The simple unit leads to a place where an extension unit begins, of which the rest never reached the disk.
    geo = geometry("propcrc-ext")
    acknowledged = closed_store(root, geo, script())
    original = root + ".original"
    shutil.copytree(root, original)
    before = shutdown_files(root)
    tried = 0
    for path, data in oracle.read_files(root).items():
        if not path.startswith("consumequeue_ext/"):
            continue
        for pos in range(0, len(data) - 20, 20):
            if not any(data[pos : pos + 2]) or data[pos : pos + 2] == b"\xff\xff":
                continue
            for begin, end in ((2, 20), (2, 10), (10, 18), (0, 20), (0, 2)):
                tried += 1
                overwrite(root, path, pos + begin, bytes(end - begin))
                make_unclean(root)
                with MessageStore.open(root, config=config_of(geo)) as store:
                    check_readable(store, acknowledged)
                    for topic, queue_id, queue_offset, phy_offset, _, tags, _ in acknowledged:
                        if tags and topic != "Inner":
                            got = store.get_message(topic, queue_id, queue_offset, 1, tags)
                            assert [each.phy_offset for each in got] == [phy_offset]
                assert not changes(before, shutdown_files(root))
                shutil.rmtree(root)
                shutil.copytree(original, root)
    assert tried > 50


def test_offset_zero_is_not_the_oldest_message(root):
    # 11.15: without its first segment Java answers offset 0 with the first bytes of the oldest one that is there.
    geo = geometry("plain")
    acknowledged = many_segments(root, geo, 30, [NOW])
    os.unlink(os.path.join(root, "commitlog", oracle.file_name(0)))
    for unclean in (False, True):
        if unclean:
            make_unclean(root)
        with MessageStore.open(root, config=config_of(geo)) as store:
            assert store.commit_log.min_offset == SEGMENT
            with pytest.raises(OffsetOutOfRangeError):
                store.message_at(0)
            assert store.commit_log.look_up(0) is None
            assert store.get_message("Orders", 0, 0).status.name == "OFFSET_TOO_SMALL"
            assert store.query_message("Orders", "u0") == []
            check_readable(store, [each for each in acknowledged if each[3] >= SEGMENT])


def test_the_checkpoint_never_says_more_than_is_on_disk(root, monkeypatch):
    # 11.22: Java raises the time of the queues before it flushes them.
    geo = geometry("propcrc-ext")
    durable = Durable(root, monkeypatch)
    stated = []
    flush = Checkpoint.flush

    def look(checkpoint):
        log = {}
        for path, data in durable.files.items():
            if path.startswith("commitlog/"):
                log[int(path.split("/")[1])] = data
        records = oracle.records_of(log)
        queued = {}
        for path, data in durable.files.items():
            if path.startswith("consumequeue/"):
                for pos in range(0, len(data), 20):
                    phy_offset, size = struct.unpack(">qi", data[pos : pos + 12])
                    if size > 0:
                        queued[phy_offset] = size
        simple = [each for each in records if not each.is_inner_batch]
        latest = max((each.store_timestamp for each in records), default=0)
        assert checkpoint.physic_msg_timestamp <= latest
        assert checkpoint.logics_physical_offset <= max((each.end for each in records), default=0)
        for each in simple:
            if each.phy_offset < checkpoint.logics_physical_offset:
                assert queued.get(each.phy_offset) == each.size
            if each.store_timestamp < checkpoint.logics_msg_timestamp:
                assert queued.get(each.phy_offset) == each.size
        stated.append(checkpoint.logics_physical_offset)
        flush(checkpoint)

    monkeypatch.setattr(Checkpoint, "flush", look)
    clock = [NOW]
    with MessageStore.open(root, config=config_of(geo, lambda: clock[0])) as store:
        writer = Writer(store, clock)
        for number, step in enumerate(script(30)):
            writer.run([step])
            if number % 3 == 0:
                store.flush()
    assert len(set(stated)) > 9
    assert stated[-1] == records_of(root)[-1].end


@pytest.mark.parametrize("mode", ["strict", "truncate", "skip"])
def test_a_closed_log_whose_last_record_is_damaged_is_refused(root, mode):
    # A unit leads to it, so it was whole once, and a record from before an old cut behind it is no proof of more.
    geo = geometry("plain")
    with MessageStore.open(root, config=config_of(geo)) as store:
        puts = [store.put_message(Message("Orders", b"number %d" % n, keys=[f"k{n}"])) for n in range(5)]
    records = records_of(root)
    stale = oracle.encode_record(
        topic="Orders", body=b"stale", queue_offset=9, phy_offset=records[-1].end + 16, store_timestamp=NOW - 9000
    )
    segment = f"commitlog/{oracle.file_name(0)}"
    overwrite(root, segment, records[-1].end + 16, stale)
    damage_body(root, records[-1])
    before = oracle.read_files(root)
    if mode == "strict":
        with pytest.raises(CorruptionError) as refused:
            MessageStore.open(root, config=config_of(geo))
        assert refused.value.pos == puts[-1].phy_offset
        assert not changes(before, oracle.read_files(root))
        return
    with MessageStore.open(root, config=config_of(geo), recovery=mode) as store:
        assert [message.body for message in store.messages()] == [b"number %d" % n for n in range(4)]
    check_bytes(root, geo)


# ----------------------------------------------------------------------------------------------- scanning the log


def log_of(root: str, geo: dict) -> CommitLog:
    log = CommitLog(root, config_of(geo), MappedFilePool(), read_only=True)
    log.load()
    return log


@pytest.mark.parametrize("name", ["plain", "propcrc-ext"])
@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_stretches_cover_the_log_without_a_gap(root, name, rows):
    geo = geometry(name)
    closed_store(root, geo, script())
    found = list(oracle.walk_commit_log(oracle.segments(oracle.read_files(root))))
    records = [each for each in found if isinstance(each, oracle.Record)]
    log = log_of(root, geo)
    end = records[-1].end
    columns = RecordColumns(rows)
    at, seen = 0, []
    for stretch in log.stretches(0, end, columns):
        assert stretch.begin == at < stretch.end
        at = stretch.end
        seen += columns.phy_offset[: columns.count].tolist()
        assert stretch.records == columns.count
        if stretch.verdict is Verdict.RECORD:
            assert stretch.last_record == seen[-1]
        else:
            assert (stretch.verdict, stretch.records, stretch.last_record) == (Verdict.BLANK, 0, -1)
    assert at == end
    assert seen == [each.phy_offset for each in records]
    walked = list(log.stretches(0, end))
    assert sum(each.records for each in walked) == len(records)
    assert [each for each in walked if each.verdict is Verdict.BLANK] == [
        each for each in log.stretches(0, end, columns) if each.verdict is Verdict.BLANK
    ]
    assert list(log.stretches(end, end)) == list(log.stretches(end, 0)) == []
    # From any record to any other one.
    for first in records[::3]:
        for past in records[1::4]:
            got = [each for each in log.stretches(first.phy_offset, past.phy_offset, columns)]
            number = sum(each.records for each in got)
            assert number == len([each for each in records if first.phy_offset <= each.phy_offset < past.phy_offset])
    log.close()


def test_stretches_go_on_behind_damage_if_asked(root):
    geo = geometry("plain")
    closed_store(root, geo, script())
    records = records_of(root)
    end = records[-1].end
    body, magic, whole = records[2], records[6], next(each for each in records if each.phy_offset == 2 * SEGMENT)
    damage_body(root, body)
    overwrite(
        root,
        f"commitlog/{oracle.file_name(magic.phy_offset // SEGMENT * SEGMENT)}",
        magic.phy_offset % SEGMENT + 4,
        b"\1",
    )
    os.unlink(os.path.join(root, "commitlog", oracle.file_name(2 * SEGMENT)))
    log = log_of(root, geo)
    missing = [each for each in records if whole.phy_offset <= each.phy_offset < whole.phy_offset + SEGMENT]
    lost = {body.phy_offset, magic.phy_offset, *(each.phy_offset for each in missing)}
    for columns in (None, RecordColumns(4), RecordColumns(1000)):
        at, damage, seen = 0, [], 0
        for stretch in log.stretches(0, end, columns):
            assert stretch.begin == at < stretch.end
            at = stretch.end
            seen += stretch.records
            if stretch.verdict not in (Verdict.RECORD, Verdict.BLANK):
                damage.append((stretch.begin, stretch.end, stretch.verdict))
                assert columns is None or columns.count == 0
        assert at == end
        assert seen == len(records) - len(lost)
        assert damage == [
            (body.phy_offset, body.end, Verdict.BAD_BODY_CRC),
            (magic.phy_offset, magic.end, Verdict.BAD_MAGIC),
            (2 * SEGMENT, 3 * SEGMENT, None),
        ]
        stopped = list(log.stretches(0, end, columns, resume=False))[-1]
        assert stopped == (body.phy_offset, body.phy_offset, Verdict.BAD_BODY_CRC, 0, -1)
        unchecked = list(log.stretches(0, end, columns, check_crc=False, resume=False))[-1]
        assert unchecked == (magic.phy_offset, magic.phy_offset, Verdict.BAD_MAGIC, 0, -1)
        stopped = list(log.stretches(2 * SEGMENT, end, columns, resume=False))
        assert stopped == [(2 * SEGMENT, 2 * SEGMENT, None, 0, -1)]
    log.close()


def test_store_times_behind_the_end_are_told_on_request(root):
    geo = geometry("plain")
    closed_store(root, geo, script())
    records = records_of(root)
    log = log_of(root, geo)
    middle = records[len(records) // 2]
    log.set_end(middle.phy_offset)
    for each in records:
        known = each.phy_offset < middle.phy_offset
        assert log.store_timestamp_at(each.phy_offset) == (each.store_timestamp if known else -1)
        assert log.store_timestamp_at(each.phy_offset, behind_end=True) == each.store_timestamp
        assert log.store_timestamp_at(each.phy_offset + 1, behind_end=True) == -1
    for offset in (-1, -(2**63), 2**63 - 1):
        assert log.store_timestamp_at(offset, behind_end=True) == log.store_timestamp_at(offset) == -1
    log.close()


def test_the_end_is_found_again_however_the_log_changed(tmp_path):
    """A log that was looked at is walked on from its last record only as long as that is there."""
    folder = tmp_path / "commitlog"
    folder.mkdir()
    path = folder / f"{0:020d}"

    def holding(*bodies: bytes) -> list[int]:
        data, ends = b"", [0]
        for body in bodies:
            data += oracle.encode_record(topic="T", body=body, phy_offset=len(data), born_host="127.0.0.1:1")
            ends.append(len(data))
        with open(path, "r+b" if path.exists() else "wb") as file:
            file.write(data.ljust(4096, b"\0"))
        return ends

    ends = holding(b"a", b"bb")
    config = StoreConfig(mapped_file_size_commit_log=4096)
    log = CommitLog(tmp_path, config, MappedFilePool(), read_only=True)
    log.load()
    for bodies in ([b"a", b"bb"], [b"a", b"bb", b"c"], [b"a"], [b"a", b"d" * 50], [b"a" * 60, b"b"], [], [b"x"] * 9):
        ends = holding(*bodies)
        for _ in range(2):
            assert log.find_end() == ends[-1]
            assert log.find_end_behind_damage() == ends[-1]
    log.close()


def test_the_last_store_time_is_found_behind_damage(tmp_path):
    folder = tmp_path / "commitlog"
    folder.mkdir()
    path = folder / f"{0:020d}"
    data, begins = b"", []
    for number in range(9):
        begins.append(len(data))
        data += oracle.encode_record(
            topic="T",
            body=b"x" * 9,
            phy_offset=len(data),
            born_host="127.0.0.1:1",
            store_timestamp=1_700_000_000_000 + number,
        )
    config = StoreConfig(mapped_file_size_commit_log=4096)
    for first, last in ((4, 4), (0, 7), (0, 0), (8, 8), (3, 8)):
        damaged = bytearray(data.ljust(4096, b"\0"))
        end = begins[last + 1] if last < 8 else len(data)
        damaged[begins[first] : end] = b"\xa5" * (end - begins[first])
        path.write_bytes(damaged)
        log = CommitLog(tmp_path, config, MappedFilePool(), read_only=True)
        log.load()
        log.follow()
        newest = 8 if last < 8 else first - 1
        assert log.last_store_timestamp() == 1_700_000_000_000 + newest, (first, last)
        log.close()


@pytest.mark.parametrize("where", ["another size", "the same size", "within a record"])
@pytest.mark.parametrize("kind", ["Orders", "%LMQ%a"])
def test_a_last_unit_that_leads_to_a_record_of_another_queue_is_cut(root, where, kind):
    """Lost power may bring a unit back that was cut, after the log had gone on with other messages."""
    geo = {**geometry("plain"), "enable_lmq": True, "enable_multi_dispatch": True}
    config = config_of(geo)
    with MessageStore.open(root, config=config) as store:
        store.put_message(Message("Orders", b"first", properties={"INNER_MULTI_DISPATCH": "%LMQ%a"}))
        other = store.put_message(Message("Pay", b"other"))
        end = store.commit_log.max_offset
    make_unclean(root)
    unit = {
        "another size": (other.phy_offset, other.size - 7),
        "the same size": (other.phy_offset, other.size),
        "within a record": (other.phy_offset + 8, 100),
    }[where]
    folder = os.path.join("consumequeue", kind, "0", oracle.file_name(0))
    overwrite(root, folder, 20, struct.pack(">qiq", *unit, 0))
    with MessageStore.open(root, config=config) as store:
        assert store.recovery_report.units_cut == 1 and store.commit_log.max_offset == end
        for topic, messages in (("Orders", 1), ("%LMQ%a", 1), ("Pay", 1)):
            assert store.max_queue_offset(topic, 0) == len(store.get_message(topic, 0, 0, 9).messages) == messages
        again = Message("Orders", b"second", properties={"INNER_MULTI_DISPATCH": "%LMQ%a"})
        assert store.put_message(again).queue_offset == 1
        assert store.get_message(kind, 0, 1, 1).messages[0].body == b"second"
    check_bytes(root, geo)


def test_a_last_unit_that_leads_into_damage_stays(root):
    """Its message is lost, and keeps its place."""
    geo = geometry("plain")
    with MessageStore.open(root, config=config_of(geo)) as store:
        lost = store.put_message(Message("Orders", b"lost"))
        store.put_message(Message("Pay", b"whole"))
    make_unclean(root)
    overwrite(root, os.path.join("commitlog", oracle.file_name(0)), lost.phy_offset + 4, bytes(4))
    with MessageStore.open(root, config=config_of(geo), recovery="skip") as store:
        assert store.recovery_report.units_cut == 0
        assert store.max_queue_offset("Orders", 0) == 1
        assert store.put_message(Message("Orders", b"next")).queue_offset == 1


def test_a_cut_goes_on_before_a_file_of_lost_units(root):
    """Power took all units of a batch queue's file, and the log is cut before what an older file leads to."""
    geo = {**geometry("plain"), "mapper_file_size_batch_consume_queue": 3 * 46}
    config = config_of(geo)
    with MessageStore.open(root, config=config) as store:
        inner = {"INNER_NUM": "2"}
        puts = [store.put_message(Message("Inner", b"%d" % n, sys_flag=0xC0, properties=inner)) for n in range(8)]
    make_unclean(root)
    overwrite(root, os.path.join("batchconsumequeue", "Inner", "0", oracle.file_name(138)), 0, bytes(138))
    overwrite(root, os.path.join("commitlog", oracle.file_name(0)), puts[2].phy_offset + 4, bytes(4))
    with MessageStore.open(root, config=config, recovery="truncate") as store:
        assert store.commit_log.max_offset == puts[2].phy_offset
        assert store.max_queue_offset("Inner", 0) == puts[2].queue_offset == 4
        assert store.put_message(Message("Inner", b"next", sys_flag=0xC0, properties=inner)).queue_offset == 4
        got = store.get_message("Inner", 0, 0, 32).messages
        assert [message.body for message in got] == [b"0", b"1", b"next"]
    check_bytes(root, geo)


def test_power_lost_after_the_last_flush_of_a_close_hides_nothing(tmp_path, monkeypatch):
    """`abort` is there again, though nothing else is lost: the mark says that what is older, behind damage, is of the log."""
    now = [1_700_000_000_000]
    config = StoreConfig(mapped_file_size_commit_log=16384, clock=lambda: now[0])
    with MessageStore.open(tmp_path / "store", config=config) as store:
        first, second = (store.put_message(Message("T", body)) for body in (b"first", b"second"))
        now[0] -= 3_600_000
        third = store.put_message(Message("T", b"third"))
    segment = tmp_path / "store" / "commitlog" / f"{0:020}"
    data = bytearray(segment.read_bytes())
    data[second.phy_offset + 4] ^= 1
    segment.write_bytes(data)
    unlink, root = os.unlink, tmp_path / "store"

    def unlinked(path, *arguments, **options):
        if os.path.basename(path) == "abort":
            shutil.copytree(root, tmp_path / "lost power")
        unlink(path, *arguments, **options)

    with MessageStore.open(root, config=config, recovery="skip") as store:
        fourth = store.put_message(Message("T", b"fourth"))
        monkeypatch.setattr(os, "unlink", unlinked)
    monkeypatch.undo()
    whole = [first.phy_offset, third.phy_offset, fourth.phy_offset]
    for path in (tmp_path / "lost power", root):
        assert (path / "abort").exists() == (path != root)
        assert any((path / "checkpoint").read_bytes()[-32:]) == (path != root)
        with MessageStore.open(path, config=config, read_only=True) as store:
            assert [message.phy_offset for message in store.messages()] == whole
        with MessageStore.open(path, config=config, recovery="skip") as store:
            assert [message.phy_offset for message in store.messages()] == whole


def test_an_index_file_is_not_believed_full_by_a_time_of_before_the_clock_was_set_back(root, monkeypatch):
    """An orderly close speaks for an index file that is not full; two processes later it is, and nothing of that was forced."""
    geo = {**geometry("plain"), "mapped_file_size_commit_log": 65536, "max_index_num": 100}
    clock = [NOW]

    def put(store, number):
        acknowledging = Writer(store, clock)
        for each in range(number):
            acknowledging.put("one", [Message("Orders", b"body", keys=[f"{clock[0]}.{each}"])], 0)
        return acknowledging.acknowledged

    with MessageStore.open(root, config=config_of(geo, lambda: clock[0])) as store:
        acknowledged = put(store, 10)
    with monkeypatch.context() as patch:
        # Dies when its abort file is there.
        patch.setattr(recovery, "_cut_log", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            MessageStore.open(root, config=config_of(geo))
    clock[0] -= 3_600_000
    with MessageStore.open(root, config=config_of(geo, lambda: clock[0])) as store:
        assert not store.recovery_report.clean
        acknowledged += put(store, 120)
        killed = f"{root}.killed"
        shutil.copytree(root, killed)
    full, _ = sorted(os.listdir(os.path.join(killed, "index")))
    # A page within it is lost.
    overwrite(killed, f"index/{full}", 40 + 4 * geo["max_hash_slot_num"] + 20 * 50, bytes(20 * 5))
    with MessageStore.open(killed, config=config_of(geo)) as store:
        check_readable(store, acknowledged)
    check_bytes(killed, geo)
