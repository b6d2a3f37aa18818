"""verify compares queues in RocksDB with the log: what is missing, wrong, stale or damaged is named."""

from __future__ import annotations

import os
import shutil
import struct
import sys
from collections import Counter

import pytest
import rocksdb_stores

pytest.importorskip("rocksdict")

from rmqstore.config import StoreConfig
from rmqstore.errors import MissingDependencyError
from rmqstore.offline.verify import verify


def findings(root, **more):
    options = {"message_delay_level": "1s 2s 30m 1h", "message_index_enable": False, **more}
    return [
        finding
        for finding in verify(root, StoreConfig.infer(root, read_only=True, **options))
        # The index of these stores is in RocksDB, which is not looked at here.
        if "consumequeue" in finding.path or "commitlog" in finding.path
    ]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("store", {}),
        ("store.killed", {"queues_behind_log": 1}),
        ("lost", {"missing_unit": 12}),
        ("double", {}),
        ("double-separate-lmq", {}),
        ("compacted", {"missing_unit": 2}),
        ("batch", {}),
        ("killed-wal", {"queues_behind_log": 1}),
    ],
)
def test_what_the_real_broker_left(tmp_path, name, kinds):
    root = rocksdb_stores.unpack(name, tmp_path)
    found = findings(root)
    assert Counter(finding.kind for finding in found) == kinds, found
    units, _ = rocksdb_stores.stored_units(root / ("consumequeue_rocksdb" if "separate" in name else "consumequeue"))
    if name == "lost":
        missing = {
            (topic, queue_id): len(records) - sum(key[:2] == (topic, queue_id) for key in units)
            for (topic, queue_id), records in rocksdb_stores.queued(root).items()
        }
        for (topic, queue_id), num in missing.items():
            assert any(f"{topic}/{queue_id} lacks {num} units in all, the first is 0 " in each.detail for each in found)
        assert sum(missing.values()) == 6000 - 2674
    if name == "store.killed":
        assert "543 units from the record at phy offset 1684547 on" in found[0].detail


def changed(tmp_path, change):
    root = rocksdb_stores.unpack("store", tmp_path)
    old = root.parent / "database"
    (root / "consumequeue").rename(old)
    rocksdb_stores.copy_database(old, root / "consumequeue", change)
    return root


def place(units, topic, queue_id, queue_offset):
    key = rocksdb_stores.unit_key(topic, queue_id, queue_offset)
    return key, list(struct.unpack(">qiqq", units[key]))


@pytest.mark.parametrize("field", range(4))
def test_a_wrong_unit(tmp_path, field):
    def change(units, offsets):
        key, values = place(units, "Orders", 1, 40)
        values[field] += 1
        units[key] = struct.pack(">qiqq", *values)

    (found,) = findings(changed(tmp_path, change))
    assert found.kind == "bad_unit" and "unit 40 of Orders/1 is" in found.detail


def test_missing_and_stale_units(tmp_path):
    def change(units, offsets):
        for queue_offset in (50, 51, 70):
            del units[rocksdb_stores.unit_key("Orders", 2, queue_offset)]
        units[rocksdb_stores.unit_key("Orders", 0, 400)] = struct.pack(">qiqq", 1600000, 91, 0, 1)

    missing, stale = findings(changed(tmp_path, change))
    assert missing.kind == "missing_unit" and "Orders/2 lacks 3 units in all, the first is 50 " in missing.detail
    assert stale.kind == "stale_unit" and "1 units of Orders/0 lie beyond its last one, 316" in stale.detail


def test_a_last_unit_that_is_not_there(tmp_path):
    def change(units, offsets):
        offsets[rocksdb_stores.max_key("Pops", 0)] = struct.pack(">qq", 1678060, 9)
        key = rocksdb_stores.max_key("Pops", 1)
        offsets[key] = struct.pack(">qq", 5, struct.unpack(">qq", offsets[key])[1])

    found = findings(changed(tmp_path, change))
    assert [each.kind for each in found] == ["bad_unit", "bad_unit"] and "no unit" in found[0].detail


def test_a_checkpoint_and_units_beyond_the_log(tmp_path):
    def change(units, offsets):
        offsets[rocksdb_stores.max_key("CHECKPOINT_TOPIC", 0)] = struct.pack(">q", 2**40)
        values = place(units, "Pops", 1, 5)[1]
        units[rocksdb_stores.unit_key("Pops", 1, 6)] = struct.pack(">qiqq", 2**39, *values[1:])
        offsets[rocksdb_stores.max_key("Pops", 1)] = struct.pack(">qq", 2**39, 6)

    assert {each.kind for each in findings(changed(tmp_path, change))} == {"bad_checkpoint", "dangling_unit"}


def test_damage_inside(tmp_path):
    root = rocksdb_stores.unpack("store", tmp_path)
    table = max((root / "consumequeue").glob("*.sst"), key=lambda path: path.stat().st_size)
    data = table.read_bytes()
    for position in range(100, 20000, 3001):
        table.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        found = findings(root)
        assert {each.kind for each in found} == {"bad_database"}, found
    table.unlink()
    (found,) = findings(root)
    assert found.kind == "bad_database" and table.name in found.detail and "rebuild" in found.detail


def test_a_database_that_may_not_be_read_does_not_stop_the_rest(tmp_path, monkeypatch):
    root = rocksdb_stores.unpack("store", tmp_path)
    allowed = os.access
    monkeypatch.setattr("os.access", lambda name, mode: "consumequeue" not in str(name) and allowed(name, mode))
    with open(next((root / "commitlog").iterdir()), "r+b") as file:
        file.seek(200)
        file.write(b"!")
    found = findings(root)
    assert {each.kind for each in found} == {"file", "bad_body_crc"}, found
    (unread,) = [each for each in found if each.kind == "file"]
    assert "not compared" in unread.detail and "/consumequeue/" in unread.path


def test_a_stray_file_and_a_second_database(tmp_path):
    root = rocksdb_stores.unpack("store", tmp_path)
    (root / "consumequeue" / "rocksdict-config.json").write_text("{}")
    (found,) = findings(root)
    assert found.kind == "file" and "delete it" in found.detail
    (root / "consumequeue" / "rocksdict-config.json").unlink()
    shutil.copytree(root / "consumequeue", root / "consumequeue_rocksdb")
    (found,) = findings(root)
    assert found.kind == "second_database" and found.path.endswith("consumequeue_rocksdb")


def test_without_rocksdict_nothing_is_said_to_be_right(tmp_path, monkeypatch):
    root = rocksdb_stores.unpack("store", tmp_path)
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    with pytest.raises(MissingDependencyError, match="rocksdb"):
        findings(root)


@pytest.mark.parametrize("where", ["another record", "nowhere", "damage"])
def test_units_that_lead_to_no_record_of_their_queue(tmp_path, where):
    """Like a log that was restored from an older copy and continued."""
    whole = rocksdb_stores.unpack("store", tmp_path / "whole")
    root = tmp_path / "store"
    shutil.copytree(whole, root)
    shutil.rmtree(root / "consumequeue")
    records = [each for queue in rocksdb_stores.queued(whole).values() for each in queue.values()]
    begin = 1_100_000 if where == "nowhere" else min(each["phy_offset"] for each in records)
    step = 7 if where == "nowhere" else 0

    def change(units, offsets):
        for number in range(40):
            value = struct.pack(">qiqq", begin + step * number, 300, 0, 1_795_423_800_000)
            units[rocksdb_stores.unit_key("Ghost", 0, number)] = value
        offsets[rocksdb_stores.max_key("Ghost", 0)] = struct.pack(">qq", begin + step * 39, 39)

    rocksdb_stores.copy_database(whole / "consumequeue", root / "consumequeue", change)
    if where == "damage":
        path = root / "commitlog" / f"{begin >> 20 << 20:020d}"
        with open(path, "r+b") as file:
            file.seek(begin - int(path.name))
            file.write(b"\xa5" * 50)
    found = [each for each in findings(root) if each.kind == "dangling_unit"]
    if where == "damage":
        assert found == []
    else:
        assert [each.num for each in found] == [40] and "Ghost/0" in found[0].detail
