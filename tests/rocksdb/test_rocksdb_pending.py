"""Entries of timers and transactions in RocksDB: those of a real broker, and hostile ones."""

from __future__ import annotations

import struct

import pytest
import rocksdb_files
from hypothesis import given, settings
from hypothesis import strategies as st
from pending_stores import answers, unpack

pytest.importorskip("rocksdict")

from rmqstore.errors import CorruptionError
from rmqstore.rocksdb.database import Database
from rmqstore.rocksdb.waiting import read_timers, read_transactions


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return unpack("store", tmp_path_factory.mktemp("entries"))


class Entries:
    """A database of given entries, as far as the readers ask one."""

    path = "entries"

    def __init__(self, entries):
        self.entries = dict(sorted(entries.items()))

    def get(self, key, *, family):
        return self.entries.get(key)

    def items(self, begin=b"", end=None, *, family):
        return ((key, value) for key, value in self.entries.items() if key >= begin and (end is None or key < end))


def test_a_real_brokers_timers(store):
    with Database(store / "rocksdbstore") as database:
        found = read_timers(database)
    (checkpoint,) = answers("messages", "timerCheckpoint")
    assert (found.timeline_checkpoint, found.scan_offset) == (checkpoint["timeline"], checkpoint["sysTopicScanOffset"])
    wanted = {(line["fires"], line["uniqKey"]): line["phy"] for line in answers("messages", "timer") if line["pending"]}
    assert found.timers == wanted and found.problems == []


def test_a_real_brokers_transactions(store):
    with Database(store / "rocksdbstore") as database:
        found = read_transactions(database)
    assert found.last_phy_offset == answers("messages", "timerCheckpoint")[0]["lastTransPhy"]
    assert found.check_times == {line["phy"]: line["checkTimes"] for line in answers("messages", "pendingTransaction")}
    assert found.problems == []


def test_every_flip_and_truncation_is_an_error_or_makes_no_difference(tmp_path, monkeypatch):
    monkeypatch.setattr("rmqstore.rocksdb.database._PAUSE", 0)
    time = 1_795_000_000_000
    timers = {struct.pack(">q", time + number) + b"ID%d" % number: struct.pack(">iq", 200, 9 * number) for number in range(6)}
    timers |= {b"timeline_checkpoint": struct.pack(">q", time), b"sys_topic_scan_offset_checkpoint": struct.pack(">q", 6)}
    halves = {struct.pack(">q", 7 * number) + b"@T@ID": struct.pack(">ii", number, 200) for number in range(6)}
    halves[b"lastOffsetPy"] = struct.pack(">q", 35)
    folder = rocksdb_files.write(tmp_path / "database", {"timer": timers, "trans": halves})

    def read():
        with Database(folder) as database:
            found = read_timers(database), read_transactions(database)
            return None if database.log_damage or found[0].problems or found[1].problems else found

    whole, told, num = read(), 0, 0
    assert len(whole[0].timers) == 6 and len(whole[1].check_times) == 6
    for path in sorted(folder.iterdir()):
        if path.suffix != ".sst" and not path.name.startswith(("MANIFEST", "CURRENT")):
            continue
        data = path.read_bytes()
        for position in range(0, len(data), 23):
            flipped = data[:position] + bytes([data[position] ^ 1 << position % 8]) + data[position + 1 :]
            for changed in (flipped, data[:position]) if position % 3 == 0 else (flipped,):
                path.write_bytes(changed)
                num += 1
                try:
                    assert read() in (whole, None), (path.name, position, len(changed))
                except CorruptionError:
                    told += 1
        path.write_bytes(data)
    assert read() == whole and num > 100 and told > num // 4


def test_entries_that_are_none_are_told():
    time = struct.pack(">q", 1_795_000_000_000)
    found = read_timers(
        Entries({time + b"A": bytes(12), time + b"B": bytes(11), time: bytes(12), b"timeline_checkpoint": b"x"})
    )
    assert list(found.timers) == [(1_795_000_000_000, "A")] and len(found.problems) == 3
    found = read_transactions(
        Entries({time + b"@T@A": bytes(8), time + b"T@B": bytes(8), time + b"@T@C": b"", b"lastOffsetPy": b"x"})
    )
    assert list(found.check_times) == [1_795_000_000_000] and len(found.problems) == 3 and found.last_phy_offset is None


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.binary(max_size=24), st.binary(max_size=14), max_size=20))
def test_hostile_entries_end_in_problems_at_most(entries):
    timers, transactions = read_timers(Entries(entries)), read_transactions(Entries(entries))
    assert len(timers.timers) + len(timers.problems) <= len(entries) + 2
    assert len(transactions.check_times) + len(transactions.problems) <= len(entries)
