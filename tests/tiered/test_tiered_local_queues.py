"""Local queues that are damaged, beside tiered storage: each message that either side has still comes once.

Owns the promise that no unit of a local queue makes a message vanish or come twice.  The store is the golden one, whose
local log has the newer part of what tiered storage has.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from dataclasses import replace

import pytest
import tiered_oracle as oracle_tiered

from rmqstore import MessageStore
from rmqstore.offline.export import ExportOptions, export
from rmqstore.selection import Selection
from rmqstore.spark.batches import ReadJob, piece_batches, spark_arrow_schema
from rmqstore.spark.options import ReadOptions
from rmqstore.spark.plan import LogPlan
from rmqstore.spark.tiered import tiered_piece_batches, tiered_pieces
from rmqstore.store import tiered as tiered_store

pytest.importorskip("pyarrow")

COLUMNS = ["topic", "queue_id", "queue_offset"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return oracle_tiered.unpack("store", tmp_path_factory.mktemp("tiered"))


@pytest.fixture
def root(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


def units_of(root, number):
    return root / "store" / "consumequeue" / "Orders" / "2" / f"{6000 * number:020d}"


def swap(root):
    units_of(root, 1).rename(root / "x")
    units_of(root, 2).rename(units_of(root, 1))
    (root / "x").rename(units_of(root, 2))


def damage_first_record(root):
    # Of queue 2 the local log begins with queue offset 558 or so: its unit is whole, and no record is there any more.
    with MessageStore.open(root / "store", read_only=True) as store:
        place = store.get_message("Orders", 2, store.min_queue_offset("Orders", 2), 1).messages[0].phy_offset
    with open(root / "store" / "commitlog" / "00000000000001048576", "r+b") as file:
        file.seek(place - 1048576)
        file.write(bytes(8))


DAMAGE = {
    "two files swapped": swap,
    "oldest file is noise": lambda root: units_of(root, 1).write_bytes(random.Random(1).randbytes(6000)),
    "oldest file is zeros": lambda root: units_of(root, 1).write_bytes(bytes(6000)),
    "oldest file lost": lambda root: units_of(root, 1).unlink(),
    "newest file lost": lambda root: units_of(root, 3).unlink(),
    "newest file is noise": lambda root: units_of(root, 3).write_bytes(random.Random(2).randbytes(6000)),
    "all lost": lambda root: shutil.rmtree(units_of(root, 1).parent),
}


def place_of(row):
    return row["topic"], row["queue_id"], row["queue_offset"]


def scanned(root):
    with MessageStore.open(root / "store", read_only=True, tiered=root / "tiered") as store:
        return Counter(map(place_of, store.scan(COLUMNS).read_all().to_pylist()))


@pytest.mark.parametrize("damage", DAMAGE)
def test_each_message_comes_once(whole, root, tmp_path, damage):
    expected = scanned(whole)
    assert len(expected) == 3007 and set(expected.values()) == {1}
    DAMAGE[damage](root)
    assert scanned(root) == expected
    export(root / "store", tmp_path / "out.jsonl", options=ExportOptions(tiered=root / "tiered"))
    assert Counter(place_of(json.loads(line)) for line in open(tmp_path / "out.jsonl")) == expected
    plan, options = LogPlan.of(root / "store"), ReadOptions(str(root / "store"), tiered=str(root / "tiered"))
    batches = []
    for piece in tiered_pieces(plan, replace(options, partition_bytes=1 << 30)):
        batches += tiered_piece_batches(ReadJob.of(plan, options, spark_arrow_schema(COLUMNS)), piece)
    for piece in plan.pieces():
        batches += piece_batches(ReadJob.of(plan, options, spark_arrow_schema(COLUMNS)), piece)
    assert Counter(place_of(row) for batch in batches for row in batch.to_pylist()) == expected


@pytest.mark.parametrize("damage", DAMAGE)
def test_queries_and_gets_have_it_too(whole, root, tmp_path, damage):
    with MessageStore.open(whole / "store", read_only=True, tiered=whole / "tiered") as store:
        rows = store.scan(["queue_offset", "keys"], topic="Orders", queue_id=2).read_all().to_pylist()
    keys = {row["queue_offset"]: row["keys"][0] for row in rows if row["keys"]}
    high = 1 + max(row["queue_offset"] for row in rows)
    DAMAGE[damage](root)
    with MessageStore.open(root / "store", read_only=True, tiered=root / "tiered") as store:
        for offset in (0, 299, 302, 420, 557, 560, 599, 600, 650, 899, 901, high - 1):
            hits = store.query_message("Orders", keys[offset], 1000)
            found = [each.queue_offset for each in hits if each.queue_id == 2]
            assert found.count(offset) == 1 and len(found) == len(set(found)), offset
            (message,) = store.get_message("Orders", 2, offset, 1).messages
            assert (message.queue_offset, message.corrupt) == (offset, False)
        offsets = store.get_table("Orders", 2, columns=["queue_offset"])["queue_offset"].to_pylist()
        assert offsets == list(range(high))
        some = store.get_table("Orders", 2, 550, 20, columns=["queue_offset"])["queue_offset"].to_pylist()
        assert some == list(range(550, 570))
        for offset in (100, 558, 700, high - 1):
            (message,) = store.get_message("Orders", 2, offset, 1).messages
            for boundary in ("lower", "upper"):
                at = store.offset_by_time("Orders", 2, message.store_timestamp, boundary)
                assert store.get_message("Orders", 2, at, 1).messages[0].store_timestamp == message.store_timestamp
    selection = Selection(("Orders",), (2,), begin_queue_offset=290, end_queue_offset=940)
    export(root / "store", tmp_path / "out.jsonl", selection, ExportOptions(tiered=root / "tiered"))
    found = Counter(json.loads(line)["queue_offset"] for line in open(tmp_path / "out.jsonl"))
    assert found == Counter(range(290, 940))


def test_a_message_that_the_local_log_lost_comes_from_tiered_storage(whole, root, tmp_path):
    expected = scanned(whole)
    damage_first_record(root)
    assert scanned(root) == expected
    report = export(
        root / "store", tmp_path / "out.jsonl", options=ExportOptions(corrupt="skip", tiered=root / "tiered")
    )
    assert report.messages == 3007 and report.damaged_stretches == 1


def test_a_whole_store_is_not_gone_over_twice(whole, monkeypatch):
    monkeypatch.setattr(tiered_store, "_scan_for", lambda *_: pytest.fail("the log was gone over for nothing"))
    assert len(scanned(whole)) == 3007
    monkeypatch.undo()
    # A lost file of units is not noticed by the units alone.
    gone_over = []
    monkeypatch.setattr(tiered_store, "_scan_for", lambda log, until, wanted: gone_over.append((until, list(wanted))))
    copy = whole.parent / "without"
    shutil.copytree(whole, copy)
    os.remove(units_of(copy, 1))
    scanned(copy)
    ((until, wanted),) = gone_over
    assert wanted == [(b"Orders", 2)] and 1048576 < until < 1048576 + (1 << 20)
