"""Entries of timers and transactions in RocksDB: those of a real broker, and hostile ones."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pending_stores import answers, unpack

pytest.importorskip("rocksdict")

from rmqstore.rocksdb.database import Database
from rmqstore.rocksdb.timers import read_timers
from rmqstore.rocksdb.transactions import read_transactions


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
