"""verify looks at timers and transactions too: their files, their families in RocksDB, and where they lead."""

from __future__ import annotations

import os
import shutil
import struct

import golden
import pytest
import rocksdb_files
import rocksdb_stores
from pending_stores import UNIT, unpack

from rmqstore.config import StoreConfig
from rmqstore.offline.verify import verify

KINDS = {"bad_timer", "bad_transaction", "damaged_database", "not_checked"}


def found_in(root):
    config = StoreConfig.infer(root, read_only=True, message_delay_level="1s 2s 30m 1h")
    return [finding for finding in verify(root, config) if finding.kind in KINDS]


@pytest.mark.parametrize("name", ["store", "store.killed", "timer-files", "timer-snapshot", "killed-wal"])
def test_nothing_is_wrong_in_what_a_real_broker_left(tmp_path, name):
    pytest.importorskip("rocksdict")
    archive = name if name.startswith("store") else "variants"
    root = unpack(archive, tmp_path, "store" if archive == name else name)
    before = golden.tree(root)
    assert found_in(root) == []
    assert golden.tree(root) == before


def test_timer_files(tmp_path):
    root = unpack("variants", tmp_path, "timer-files")
    path = min((root / "timerlog").iterdir())
    data = path.read_bytes()
    # The first one that waits: of the five before it, each fired.
    at = next(at for at in range(0, len(data), UNIT.size) if UNIT.unpack_from(data, at)[5] > 2000)
    (_, _, _, _, _, phy_offset, size, *_) = UNIT.unpack_from(data, at)
    for pos, number, text in ((28, phy_offset + 1, "no record of rmq_sys_wheel_timer"), (36, size + 1, "no record of")):
        changed = bytearray(data)
        struct.pack_into(">q" if pos == 28 else ">i", changed, at + pos, number)
        path.write_bytes(changed)
        found = found_in(root)
        assert any(text in each.detail and f"at {at} " in each.detail and each.kind == "bad_timer" for each in found), found
    path.write_bytes(data[:-52])
    assert any(each.path == str(path) for each in found_in(root))
    path.unlink()
    os.mkfifo(path)
    assert any(each.path == str(path) and "not a regular file" in each.detail for each in found_in(root))


@pytest.fixture
def entries(tmp_path):
    """A copy of a real store, its index database as dicts by family, and writing it again."""
    pytest.importorskip("rocksdict")
    root = unpack("store", tmp_path)
    families = rocksdb_stores.raw_entries(root / "rocksdbstore")

    def write():
        shutil.rmtree(root / "rocksdbstore")
        rocksdb_files.write(root / "rocksdbstore", families)
        return found_in(root)

    return root, families, write


def test_entries_that_lead_nowhere(entries):
    _, families, write = entries
    assert write() == []
    timers, transactions = families["timer"], families["trans"]
    timer = max(key for key in timers if key < b"\x60")
    size, phy_offset = struct.unpack(">iq", timers[timer])
    timers[timer] = struct.pack(">iq", size, phy_offset - 1)
    half = min(key for key in transactions if key[:1] != b"l")
    transactions[struct.pack(">q", 1_048_576) + half[8:]] = transactions[half]
    transactions[struct.pack(">q", 5) + half[8:]] = transactions[half]
    details = sorted((each.kind, each.detail) for each in write())
    assert [kind for kind, _ in details] == ["bad_timer", "bad_transaction", "bad_transaction"]
    assert f"leads to phy offset {phy_offset - 1}, where no record of rmq_sys_wheel_timer is" in details[0][1]
    assert "1 pending ones point before the log, which begins at 1048576" in details[1][1]
    assert "leads to phy offset 1048576, where no record of RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC is" in details[2][1]


def test_entries_that_are_none(entries):
    _, families, write = entries
    families["timer"] |= {b"\xff" * 12: bytes(12), bytes(8): b"", b"timeline_checkpoint": struct.pack(">q", 2**62)}
    families["trans"] |= {b"x" * number: b"" for number in range(1, 30)}
    found = write()
    assert sum(each.kind == "bad_timer" for each in found) == 3 and any("timeline_checkpoint" in each.detail for each in found)
    told = [each.detail for each in found if each.kind == "bad_transaction"]
    assert len(told) == 21 and told[-1] == "9 more entries that cannot be read"


def test_damage_in_each_table(tmp_path):
    """Whichever table: a flipped bit in its data is told, also of a family that nothing else goes over."""
    pytest.importorskip("rocksdict")
    root = unpack("store", tmp_path)
    tables = sorted((root / "rocksdbstore").glob("*.sst"))
    assert len(tables) >= 3
    for table in tables:
        data = table.read_bytes()
        # Data blocks come first in a table.
        table.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
        assert "damaged_database" in {each.kind for each in found_in(root)}, table
        table.unlink()
        assert "damaged_database" in {each.kind for each in found_in(root)}, table
        table.write_bytes(data)


def test_without_rocksdict(tmp_path, monkeypatch):
    pytest.importorskip("rocksdict")
    import sys

    root = unpack("store", tmp_path)
    shutil.rmtree(root / "consumequeue")
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    assert "timers and transactions" in " ".join(each.detail for each in found_in(root) if each.kind == "not_checked")
