"""Going over a log in pieces that further threads scan ahead: the same records, whatever the pieces and threads."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import threading

import oracle
import pytest
from scratch import SCRATCH

import rmqstore
from rmqstore import Message, MessageStore, StoreConfig, _core
from rmqstore._core import Verdict
from rmqstore._dispatch import RecordColumns
from rmqstore.commitlog import log_walk, pieces
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.files.mapped_file import MappedFilePool
from rmqstore.store import recovery

SEGMENT = 32 * 1024
CONFIG = {
    "mapped_file_size_commit_log": SEGMENT,
    "mapped_file_size_consume_queue": 2000,
    "max_hash_slot_num": 50,
    "max_index_num": 300,
}
COLUMNS = (
    "phy_offset size queue_id queue_offset sys_flag store_timestamp tags_code inner_num multi_dispatch prop_crc".split()
)


def config() -> StoreConfig:
    return StoreConfig(**CONFIG)


def position(offset: int) -> tuple[str, int]:
    """The name of the segment and where in it."""
    return f"commitlog/{oracle.file_name(offset - offset % SEGMENT)}", offset % SEGMENT


def overwrite(root: str, offset: int, data: bytes) -> None:
    name, pos = position(offset)
    with open(os.path.join(root, name), "r+b") as file:
        file.seek(pos)
        file.write(data)


def records_of(root: str) -> list[oracle.Record]:
    return oracle.records_of(oracle.segments(oracle.read_files(root)))


def hide_record(root: str, outer: oracle.Record, copied: oracle.Record) -> None:
    """Put a whole record, with the right phy offset, into the body of `outer`."""
    at = outer.phy_offset + outer.raw.index(outer.body, 80) + 8
    inner = copied.raw[:28] + at.to_bytes(8, "big") + copied.raw[36:]
    body = outer.body[:8] + inner + outer.body[8 + len(inner) :]
    assert len(body) == len(outer.body)
    overwrite(root, at - 8, body)
    overwrite(root, outer.phy_offset + 8, _core.crc32(body).to_bytes(4, "big"))


@pytest.fixture(scope="module")
def made():
    """A store of six segments, in which some bodies hold whole records."""
    root = os.path.join(SCRATCH, f"rmqstore-scan-ahead-{os.getpid()}")
    draw = random.Random(5)
    with MessageStore.open(root, config=config()) as store:
        for n in range(500):
            body = draw.randbytes(draw.choice((0, 5, 100, 300, 900)))
            topic = draw.choice(("Orders", "Payments", "%RETRY%group"))
            store.put_message(Message(topic, body, keys=[f"k{n}", "again"], tags=draw.choice("ab")), draw.randrange(3))
    records = records_of(root)
    small = next(each for each in records if len(each.raw) < 300)
    for outer in [each for each in records if len(each.body) == 900][::3]:
        hide_record(root, outer, small)
    yield root
    shutil.rmtree(root)


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made, tmp_path / "store")


def log_of(root: str) -> CommitLog:
    log = CommitLog(root, config(), MappedFilePool(4), read_only=True)
    log.load()
    return log


def rows_of(columns: RecordColumns) -> list[tuple]:
    names = columns.topics.topics
    queues = [(names[topic], queue_id) for topic, queue_id in columns.topics.queues]
    return [
        (
            *(int(getattr(columns, name)[i]) for name in COLUMNS),
            names[columns.topic[i]],
            queues[columns.queue[i]],
            columns.key_hash[columns.key_start[i] : columns.key_start[i + 1]].tolist(),
        )
        for i in range(columns.count)
    ]


def gone_over(steps) -> tuple[list[tuple], list]:
    """The rows, and what lies between them."""
    rows, others = [], []
    for stretch, columns in steps:
        assert stretch.records == columns.count
        if stretch.verdict is Verdict.RECORD:
            assert (
                int(columns.phy_offset[0]) == stretch.begin
                and stretch.last_record == columns.phy_offset[columns.count - 1]
            )
            rows += rows_of(columns)
        else:
            others.append(stretch)
    return rows, others


def plainly(log: CommitLog, begin: int, end: int, **how: bool) -> tuple[list[tuple], list]:
    columns = RecordColumns(100)
    return gone_over((stretch, columns) for stretch in log.stretches(begin, end, columns, **how))


def set_pieces(monkeypatch, piece: int, search: int, rows: int, ahead: int, threads: int) -> None:
    for name, value in (
        ("_PIECE", piece), ("_PIECE_SEARCH", search), ("_PIECE_ROWS", rows), ("_PIECES_AHEAD", ahead), ("_THREADS", threads),
    ):  # fmt: skip
        monkeypatch.setattr(log_walk, name, value)
    monkeypatch.setattr(pieces, "usable_cpus", lambda: 8)


PIECES = list(itertools.product((100, 700, 5000, SEGMENT), (60, 2000), (1, 7, 1000)))


def damaged(root: str, kind: str) -> None:
    records = records_of(root)
    if kind == "missing segment":
        os.unlink(os.path.join(root, "commitlog", oracle.file_name(2 * SEGMENT)))
    for each in records[3::40] if kind != "whole" else []:
        if kind == "body":
            overwrite(root, each.phy_offset + len(each.raw) // 2, b"\xff\xfe")
        elif kind == "magic":
            overwrite(root, each.phy_offset + 4, b"\1")
        elif kind == "size":
            overwrite(root, each.phy_offset, (len(each.raw) + 1).to_bytes(4, "big"))
    if kind == "zeros":
        overwrite(root, SEGMENT + 900, bytes(7000))


@pytest.mark.parametrize("kind", ["whole", "body", "magic", "size", "zeros", "missing segment"])
def test_pieces_hold_what_a_plain_scan_finds(copy, monkeypatch, kind):
    end = records_of(copy)[-1].end
    damaged(copy, kind)
    log = log_of(copy)
    expected = plainly(log, 0, end)
    ways = [{}, {"check_crc": False}, {"keys": False}, {"resume": False}]
    wanted = [plainly(log, 0, end, **how) for how in ways]
    assert len(expected[0]) > 300 and (kind == "whole") == all(each.verdict is Verdict.BLANK for each in expected[1])
    for number, (piece, search, rows) in enumerate(PIECES):
        how = ways[number % len(ways)]
        found = []
        for threads, ahead in ((1, 1), (2, 1), (2, 3), (3, 8)):
            set_pieces(monkeypatch, piece, search, rows, ahead, threads)
            assert gone_over(log.scans(0, end, **how)) == wanted[number % len(ways)]
            found.append([stretch for stretch, _ in log.scans(0, end, **how)])
        # Nor does it matter to where a stretch ends.
        assert all(each == found[0] for each in found)
    log.close()


def test_a_scan_may_begin_and_end_anywhere(copy, monkeypatch):
    records = records_of(copy)
    log = log_of(copy)
    set_pieces(monkeypatch, 700, 2000, 9, 3, 2)
    for first, past in itertools.product(records[::83], records[1::97]):
        found = gone_over(log.scans(first.phy_offset, past.phy_offset))
        assert found == plainly(log, first.phy_offset, past.phy_offset)
        inside = [each for each in records if first.phy_offset <= each.phy_offset < past.phy_offset]
        assert len(found[0]) == len(inside)
    log.close()


def test_a_scan_ends_within_damage(copy, monkeypatch):
    # The next whole record is after the end, where no piece begins.
    hurt = records_of(copy)[3::40]
    damaged(copy, "magic")
    log = log_of(copy)
    for piece, record in itertools.product((100, 300, 700), hurt):
        set_pieces(monkeypatch, piece, 2000, 1000, 3, 2)
        for end in (record.phy_offset + 1, record.end - 1):
            found = gone_over(log.scans(0, end))
            assert found == plainly(log, 0, end)
            assert found[0][-1][0] < end
    log.close()


def test_what_goes_wrong_in_another_thread_is_done_again(copy, monkeypatch):
    end = records_of(copy)[-1].end
    log = log_of(copy)
    expected = plainly(log, 0, end)
    set_pieces(monkeypatch, 700, 2000, 1000, 3, 2)
    fill, failed = log_walk._ScanAhead.fill, []

    def fails_elsewhere(self, *args):
        if threading.current_thread() is not threading.main_thread() and len(failed) % 3 == 0:
            failed.append(args)
            raise MemoryError
        failed.append(())
        return fill(self, *args)

    monkeypatch.setattr(log_walk._ScanAhead, "fill", fails_elsewhere)
    assert gone_over(log.scans(0, end)) == expected
    assert any(failed)
    log.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_the_system_is_asked_for_the_log_ahead_of_the_pieces(copy, monkeypatch, threads):
    end = records_of(copy)[-1].end
    log = log_of(copy)
    set_pieces(monkeypatch, 700, 2000, 1000, 3, threads)
    monkeypatch.setattr(pieces, "_READ_AHEAD", 4000)
    monkeypatch.setattr(pieces, "_READ_AHEAD_STEP", 1000)
    asked, reached = [], 0

    def recorded(path, pos, size):
        begin = int(os.path.basename(path)) + pos
        assert size > 0 and pos + size <= SEGMENT and begin + size - reached <= 4000 + 4 * 2700
        asked.append((begin, begin + size))

    monkeypatch.setattr(pieces, "read_ahead", recorded)
    for stretch, _ in log.scans(0, end):
        reached = stretch.end
    log.close()
    assert reached == end and (threads > 1) == bool(asked)
    # All of it once, in order, but for the piece that the caller begins with.
    assert not asked or (asked[0][0] < 4000 and asked[-1][1] == end)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(asked))


def test_no_thread_stays_behind(copy, monkeypatch):
    end = records_of(copy)[-1].end
    log = log_of(copy)
    set_pieces(monkeypatch, 700, 2000, 1000, 3, 2)
    before = threading.active_count()
    scans = log.scans(0, end)
    next(scans)
    assert threading.active_count() > before
    scans.close()
    assert threading.active_count() == before
    for _ in log.scans(0, end):
        pass
    assert threading.active_count() == before
    # A log that is not worth it has none at all, nor has a processor alone.
    monkeypatch.setattr(pieces, "usable_cpus", lambda: 1)
    for _ in log.scans(0, end):
        assert threading.active_count() == before
    set_pieces(monkeypatch, end, 2000, 1000, 3, 2)
    for _ in log.scans(0, end):
        assert threading.active_count() == before
    log.close()


@pytest.mark.parametrize("kind", ["whole", "body"])
def test_rebuilding_and_opening_in_pieces_give_the_same_bytes(copy, tmp_path, monkeypatch, kind):
    damaged(copy, kind)
    plain, pieces = tmp_path / "plain", tmp_path / "pieces"
    reports = [rmqstore.rebuild(copy, config=config(), output=plain)]
    set_pieces(monkeypatch, 700, 2000, 50, 3, 2)
    monkeypatch.setattr(recovery, "_WORTH_A_THREAD", 0)
    reports.append(rmqstore.rebuild(copy, config=config(), output=pieces))
    for report in reports:
        report.output, report.seconds = "", 0
    assert reports[0] == reports[1]
    assert (kind == "whole") == (not reports[0].damage)

    def files(root) -> dict[str, bytes]:
        # The names of index files are times.
        found = sorted(oracle.read_files(root).items())
        return {name if "index" not in name else f"index {number}": data for number, (name, data) in enumerate(found)}

    assert files(plain) == files(pieces)
    assert list(rmqstore.verify(copy, config=config())) or kind == "whole"
    if kind != "whole":
        return
    shutil.rmtree(os.path.join(copy, "consumequeue"))
    shutil.rmtree(os.path.join(copy, "index"))
    with MessageStore.open(copy, config=config()) as store:
        assert store.recovery_report.records == 500
    for lost in ("checkpoint", None):
        with open(os.path.join(copy, "abort"), "w"):
            pass
        if lost:
            os.unlink(os.path.join(copy, lost))
        with MessageStore.open(copy, config=config()) as store:
            assert (store.recovery_report.units_written, store.recovery_report.units_mended) == (0, 0)
    assert not list(rmqstore.verify(copy, config=config()))


@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize(
    "damage", ["none", "magic in the middle", "magic near the end", "body of the last", "torn last"]
)
def test_a_rebuild_ends_where_the_log_ends(copy, tmp_path, damage, spare):
    records = records_of(copy)
    end = records[-1].end
    hurt = records[100] if damage == "magic in the middle" else records[-2 if damage == "magic near the end" else -1]
    if damage.startswith("magic"):
        overwrite(copy, hurt.phy_offset + 4, b"\1")
    elif damage == "body of the last":
        overwrite(copy, hurt.phy_offset + hurt.raw.index(hurt.body, 80), bytes([hurt.body[0] ^ 1]))
    elif damage == "torn last":
        overwrite(copy, hurt.phy_offset, bytes(4))
        end = hurt.phy_offset
    for n in range(spare):
        # Segments that were made in advance.
        with open(os.path.join(copy, "commitlog", oracle.file_name((end // SEGMENT + 1 + n) * SEGMENT)), "wb") as file:
            file.truncate(SEGMENT)
    told: list[tuple[int, int]] = []
    reports = [
        rmqstore.rebuild(copy, config=config(), output=tmp_path / "a"),
        rmqstore.rebuild(copy, config=config(), output=tmp_path / "b", progress=lambda *args: told.append(args)),
    ]
    for report in reports:
        report.output, report.seconds = "", 0
    assert reports[0] == reports[1]
    assert reports[0].log_bytes == end == told[-1][0] == told[-1][1]
    bad = {"magic in the middle": "BAD_MAGIC", "magic near the end": "BAD_MAGIC", "body of the last": "BAD_BODY_CRC"}
    assert reports[0].damage == ([(hurt.phy_offset, len(hurt.raw), bad[damage])] if damage in bad else [])
    lost = 0 if damage in ("none", "body of the last") else 1
    assert (reports[0].records, reports[0].units) == (500 - lost, 500 - lost)
