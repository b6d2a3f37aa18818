"""The database of consume queues: units, last units and checkpoint as another reader finds them; odd lengths; damage."""

from __future__ import annotations

import random
import struct

import pytest
import rocksdb_stores

pytest.importorskip("rocksdict")

from rmqstore.errors import CorruptionError
from rmqstore.rocksdb.database import queue_databases
from rmqstore.rocksdb.queues import LastUnit, QueueDatabase, last_key, unit_prefix


@pytest.fixture(scope="module", params=["store", *rocksdb_stores.QUEUE_VARIANTS])
def root(request, tmp_path_factory):
    return rocksdb_stores.unpack(request.param, tmp_path_factory.mktemp("queues"))


def test_units_are_what_another_reader_finds(root):
    (folder,) = queue_databases(root)
    units, offsets = rocksdb_stores.stored_units(root / folder)
    database = QueueDatabase(folder)
    checkpoint = offsets.pop(("CHECKPOINT_TOPIC", 0, "max"), (-1,))
    assert database.checkpoint == checkpoint[0]
    assert database.last == {key[:2]: LastUnit(*value) for key, value in offsets.items() if key[2] == "max"}
    for topic, queue_id in database.last:
        wanted = {key[2]: value for key, value in units.items() if key[:2] == (topic, queue_id)}
        found = database.units(topic, queue_id, 0, 2**62)
        columns = (found.phy_offsets, found.sizes, found.tags_codes, found.store_timestamps)
        got = dict(zip(found.queue_offsets.tolist(), zip(*(each.tolist() for each in columns), strict=True), strict=True))
        assert got == wanted and found.queue_offsets.tolist() == sorted(wanted)
        low, high = min(wanted), max(wanted)
        middle = (low + high) // 2
        assert database.units(topic, queue_id, low + 1, middle).queue_offsets.tolist() == [
            offset for offset in sorted(wanted) if low + 1 <= offset < middle
        ]
        assert database.value(topic, queue_id, low) == wanted[low] and database.value(topic, queue_id, high + 1) is None
        assert database.value(topic, queue_id, -1) is None and database.at_or_before(topic, queue_id, low - 1) is None
        following = min(offset for offset in wanted if offset >= middle)
        assert database.at_or_after(topic, queue_id, middle) == LastUnit(wanted[following][0], following)
        before = max(offset for offset in wanted if offset <= middle)
        assert database.at_or_before(topic, queue_id, middle) == LastUnit(wanted[before][0], before)
        assert database.at_or_after(topic, queue_id, high + 1) is None
        assert database.at_or_before(topic, queue_id, 2**62) == LastUnit(wanted[high][0], high)
    assert len(database.units("absent", 0, 0, 9).queue_offsets) == 0 and database.value("absent", 0, 0) is None
    assert database.at_or_after("absent", 0, 0) is None and database.at_or_before("absent", 0, 0) is None
    assert database.beyond_last() == {} and database.check() >= len(units) + len(offsets)
    database.close()


def test_units_beyond_the_last_one_are_not_given(tmp_path):
    value = struct.pack(">qiqq", 100, 91, 0, 5)
    folder = rocksdb_stores.write_database(
        tmp_path / "db",
        {
            "default": {rocksdb_stores.unit_key("T", 0, offset): value for offset in range(5)},
            "offset": {rocksdb_stores.max_key("T", 0): struct.pack(">qq", 100, 2)},
        },
    )
    database = QueueDatabase(folder)
    assert database.units("T", 0, 0, 99).queue_offsets.tolist() == [0, 1, 2]
    assert database.value("T", 0, 3) is None and database.at_or_after("T", 0, 3) is None
    assert database.at_or_before("T", 0, 99) == LastUnit(100, 2)
    assert database.beyond_last() == {("T", 0): 2} and database.checkpoint == -1


def test_keys_are_those_of_the_format():
    assert unit_prefix(b"Pops", 0).hex() == "00000004" "01" "506f7073" "01" "00000000" "01"
    assert unit_prefix(b"Pops", 3) + (9).to_bytes(8, "big") == rocksdb_stores.unit_key("Pops", 3, 9)
    assert last_key(b"Pops", 3) == rocksdb_stores.max_key("Pops", 3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"", bytes(16)),
        (b"\0\0\0\4", bytes(16)),
        (struct.pack(">i", -1) + b"\1T\1max\1" + bytes(4), bytes(16)),
        (struct.pack(">i", 2**31 - 1) + b"\1T\1max\1" + bytes(4), bytes(16)),
        (struct.pack(">i", 2) + b"\1T\1max\1" + bytes(4), bytes(16)),
        (struct.pack(">i", 1) + b"\1T\1mox\1" + bytes(4), bytes(16)),
        (struct.pack(">i", 1) + b"\1T\2max\1" + bytes(4), bytes(16)),
        (rocksdb_stores.max_key("T", 0), bytes(15)),
        (rocksdb_stores.max_key("T", 0), bytes(17)),
        (rocksdb_stores.max_key("T", 0), struct.pack(">qq", 0, -1)),
        (rocksdb_stores.max_key("T", 0), struct.pack(">qq", 0, 2**63 - 1)),
        (rocksdb_stores.max_key("T", 0), struct.pack(">qq", -1, 0)),
        (rocksdb_stores.max_key("CHECKPOINT_TOPIC", 0), bytes(16)),
    ],
)
def test_odd_entries_of_last_units_are_errors(tmp_path, key, value):
    folder = rocksdb_stores.write_database(tmp_path / "db", {"default": {}, "offset": {key: value}})
    with pytest.raises(CorruptionError, match="rebuild") as caught:
        QueueDatabase(folder)
    assert caught.value.path == str(folder)


@pytest.mark.parametrize("odd", ["value", "key"])
def test_odd_units_are_errors(tmp_path, odd):
    value = struct.pack(">qiqq", 100, 91, 0, 5)
    units = {rocksdb_stores.unit_key("T", 0, offset): value for offset in range(4)}
    units[rocksdb_stores.unit_key("T", 0, 2) + (b"" if odd == "value" else b"x")] = value[:-1] if odd == "value" else value
    offset = {rocksdb_stores.max_key("T", 0): struct.pack(">qq", 100, 3)}
    database = QueueDatabase(rocksdb_stores.write_database(tmp_path / "db", {"default": units, "offset": offset}))
    with pytest.raises(CorruptionError):
        database.units("T", 0, 0, 9)
    damage: list[CorruptionError] = []
    found = database.units("T", 0, 0, 9, damage)
    assert len(damage) == 1 and found.queue_offsets.tolist() == [0, 1, 2][: 2 if odd == "value" else 3]
    if odd == "value":
        with pytest.raises(CorruptionError):
            database.value("T", 0, 2)
        with pytest.raises(CorruptionError):
            database.at_or_after("T", 0, 2)


def test_flipped_bits_are_errors_or_make_no_difference(tmp_path):
    root = rocksdb_stores.unpack("store", tmp_path)
    (folder,) = queue_databases(root)

    def everything():
        database = QueueDatabase(folder)
        try:
            found = {}
            for key in database.last:
                units = database.units(*key, 0, 2**62)
                found[key] = units.queue_offsets.tolist(), units.values.tobytes()
            return database.checkpoint, database.last, found
        finally:
            database.close()

    whole = everything()
    chosen = random.Random(5)
    errors = 0
    for table in sorted((root / "consumequeue").glob("*.sst")):
        data = table.read_bytes()
        for _ in range(25):
            position = chosen.randrange(len(data))
            table.write_bytes(data[:position] + bytes([data[position] ^ 1 << chosen.randrange(8)]) + data[position + 1 :])
            try:
                assert everything() == whole
            except CorruptionError:
                errors += 1
        for cut in (0, len(data) // 2, len(data) - 1):
            table.write_bytes(data[:cut])
            with pytest.raises(CorruptionError):
                everything()
        table.write_bytes(data)
    assert errors > 20
