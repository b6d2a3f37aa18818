"""Queries by key over the index in RocksDB: goldens, as exact as ever, RocketMQ's quirks, damage, and what verify says."""

from __future__ import annotations

import os
import shutil
import struct
import sys
from pathlib import Path

import golden
import pytest
import rocksdb_files
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("rocksdict")

from rmqstore import Message, MessageStore, StoreConfig, rebuild, verify
from rmqstore.errors import MissingDependencyError, UnsupportedFormatError
from rmqstore.offline.verify_databases import verify_index_database
from rmqstore.rocksdb.index import HOUR, IndexDatabase, keys_of_record, parse_entry


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("index")
    return {
        "store": rocksdb_files.unpack("store", folder / "a"),
        "store.killed": rocksdb_files.unpack("store.killed", folder / "b"),
        "killed-wal": rocksdb_files.unpack("variants", folder / "c", "killed-wal"),
        "lost": rocksdb_files.unpack("variants", folder / "c", "lost"),
    }


def truth(store: MessageStore, topic: str, key: str, index_type: str | None, begin: int = 0, end: int = 2**63 - 1):
    """Phy offsets of the messages with the key, newest first, by scanning the log."""
    return [
        message.phy_offset
        for message in store.messages()
        if message.topic == topic
        and begin <= message.store_timestamp <= end
        and (
            (index_type == "T" and message.tags == key)
            or (index_type in (None, "K") and key in message.keys)
            or (index_type in (None, "U") and message.unique_key == key)
        )
    ][::-1]



def rebuilt(store: MessageStore, end: int = 2**63 - 1) -> dict[bytes, bytes]:
    """Every entry that the log's records need, up to the record at `end`."""
    found: dict[bytes, bytes] = {}
    for message in store.messages():
        if message.phy_offset <= end and message.sys_flag & 12 != 12:
            found |= rocksdb_files.index_entries(
                message.topic, message.properties.get("KEYS", ""), message.tags, message.unique_key, message.phy_offset,
                message.store_timestamp,
            )  # fmt: skip
    return found


@pytest.mark.parametrize("name", ["store", "store.killed", "killed-wal", "lost"])
def test_entries_are_those_of_the_description(name, stores):
    database = IndexDatabase(stores[name])
    with MessageStore.open(stores[name], read_only=True) as store:
        low = store.commit_log.min_offset
        there = {key: value for key, value in database.entries() if struct.unpack(">q", key[-8:])[0] >= low}
        needed = rebuilt(store)
        of_record = {}
        for message in store.messages():
            keys = keys_of_record(
                message.topic,
                message.keys,
                message.tags,
                message.unique_key,
                message.phy_offset,
                message.store_timestamp,
            )
            of_record |= dict.fromkeys(keys, struct.pack(">q", message.store_timestamp))
    assert of_record == needed
    assert there.items() <= needed.items()
    missing = [struct.unpack(">q", key[-8:])[0] for key in needed.keys() - there.keys()]
    assert all(phy > database.last_offset for phy in missing)
    if name == "killed-wal":
        # Entries beyond the last offset are there: 34 000 of 36 000.
        assert (len(there), len(needed), database.last_offset) == (34000, 36000, 2166848)
    assert bool(missing) == (name in ("store.killed", "killed-wal"))
    database.close()


# ------------------------------------------------------------------------------------------------------------ goldens


@pytest.mark.parametrize(("name", "answers"), [("store", "messages"), ("store.killed", "messages.killed")])
def test_golden_queries(name, answers, stores):
    before = golden.tree(stores[name])
    asked = 0
    with MessageStore.open(stores[name], read_only=True) as store:
        for line in rocksdb_files.lines(answers, "query"):
            asked += 1
            index_type, span = line.get("indexType"), (line["begin"], line["end"])
            exact = store.query_message(line["topic"], line["key"], line["max"], *span, index_type=index_type)
            needed = truth(store, line["topic"], line["key"], index_type, *span)
            assert [message.phy_offset for message in exact] == needed[: line["max"]], line
            assert exact.truncated == (len(needed) > line["max"]) and exact.complete
    assert asked == 64
    assert golden.tree(stores[name]) == before


def test_exact_where_the_real_one_is_not(stores):
    with MessageStore.open(stores["store"], read_only=True) as store:
        # RocketMQ finds texts that go on after an "@", and cuts the newest.
        exact = store.query_message("Orders", "user", index_type="K")
        assert [message.phy_offset for message in exact] == [1637751]
        exact = store.query_message("Orders", "CUST-7", 3)
        assert [message.phy_offset for message in exact] == [1579603, 1511091, 1444470] and exact.truncated
        with pytest.raises(ValueError, match="index_type"):
            store.query_message("Orders", "user", index_type="X")
        for ask in (
            lambda: store.query_message("Orders", "CUST-7", compat=True),
            lambda: store.query_offsets("Orders", "CUST-7"),
        ):
            with pytest.raises(UnsupportedFormatError, match="RocksDB"):
                ask()


@pytest.mark.parametrize("name", ["store", "store.killed", "killed-wal"])
def test_every_key_by_both_ways(name, stores):
    with MessageStore.open(stores[name], read_only=True) as store:
        by_key: dict[tuple[str, str], list[int]] = {}
        for message in store.messages():
            for key in {*message.keys, message.unique_key} - {None}:
                by_key.setdefault((message.topic, key), []).append(message.phy_offset)
        chosen = list(by_key.items())[:: max(1, len(by_key) // 150)]
        assert len(chosen) >= 100
        for (topic, key), phy_offsets in chosen:
            found = store.query_message(topic, key, 10000)
            assert [message.phy_offset for message in found] == phy_offsets[::-1], (topic, key)
            assert found.complete and not found.truncated
        pytest.importorskip("pyarrow")
        topics, keys = zip(*(pair for pair, _ in chosen), strict=True)
        table = store.query_table(list(keys), list(topics), ["phy_offset"], 10000)
        rows = list(zip(table["key_number"].to_pylist(), table["phy_offset"].to_pylist(), strict=True))
        assert rows == [(number, phy) for number, (_, found) in enumerate(chosen) for phy in found[::-1]]
        table = store.query_table(["paid", "paid", "no"], "Orders", ["phy_offset"], 5, index_type="T")
        newest = truth(store, "Orders", "paid", "T")[:5]
        assert table["phy_offset"].to_pylist() == newest * 2


def test_the_log_beyond_the_database(stores):
    with MessageStore.open(stores["killed-wal"], read_only=True) as store:
        assert store.database_index.last_offset == 2166848
        assert store.database_index.covered() == [(0, 2166848)]
        last = list(store.messages())[-1]
        assert store.query_message(last.topic, last.keys[0])[0].phy_offset == last.phy_offset
        assert store.message_by_id(last.unique_key, last.topic).phy_offset == last.phy_offset
        # Nothing is said of what nobody looked at.
        fresh = MessageStore.open(stores["killed-wal"], read_only=True)
        result = fresh.query_message(last.topic, last.keys[0], max_log_bytes=0)
        assert result.uncovered == ((2166848, store.commit_log.max_offset),) and last.phy_offset not in [
            each.phy_offset for each in result
        ]
        fresh.close()


def test_stale_entries_are_no_hits(stores):
    database = IndexDatabase(stores["store"])
    with MessageStore.open(stores["store"], read_only=True) as store:
        low = store.commit_log.min_offset
        stale = [parse_entry(*each) for each in database.entries() if struct.unpack(">q", each[0][-8:])[0] < low]
        assert len(stale) == 153
        for entry in stale:
            assert entry.phy_offset not in [
                message.phy_offset for message in store.query_message(entry.topic, entry.text, index_type=entry.kind)
            ]
    database.close()


# ----------------------------------------------------------------------------------------- stores of our own


CONFIG = StoreConfig(
    mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=2000, max_hash_slot_num=50, max_index_num=1000
)


def plain_store(path: Path, num: int = 60) -> None:
    with MessageStore.open(path, config=CONFIG) as store:
        for number in range(num):
            store.put_message(
                Message(
                    "T", b"x" * 60, keys=[f"K{number % 7}", "all"], tags=f"tag{number % 3}",
                    properties={"UNIQ_KEY": f"{number:032X}"},
                ),
                queue_id=0,
            )  # fmt: skip


def with_database(path: Path, choose=lambda message: True, last: int | None = None) -> None:
    """Give a store the index in RocksDB that a broker would have made of the chosen messages."""
    with MessageStore.open(path, config=CONFIG, read_only=True) as store:
        entries: dict[bytes, bytes] = {}
        for message in store.messages():
            if choose(message):
                entries |= rocksdb_files.index_entries(
                    message.topic, message.properties.get("KEYS", ""), message.tags, message.unique_key,
                    message.phy_offset, message.store_timestamp,
                )  # fmt: skip
                newest = message
    last = newest.phy_offset if last is None else last
    special = {
        b"lastOffsetPy": struct.pack(">q", last),
        b"lastStoreTimeStamp": struct.pack(">q", newest.store_timestamp),
    }
    rocksdb_files.write(path / "rocksdbstore", {"default": entries | special})


def asserts_exact(path: Path) -> None:
    with MessageStore.open(path, read_only=True) as store:
        for key, index_type in (("K3", None), ("all", "K"), ("tag1", "T"), (f"{5:032X}", "U"), ("none", None)):
            found = store.query_message("T", key, 1000, index_type=index_type)
            assert [message.phy_offset for message in found] == truth(store, "T", key, index_type), key
            few = store.query_message("T", key, 3, index_type=index_type)
            assert list(few) == list(found)[:3] and few.truncated == (len(found) > 3)


@pytest.mark.parametrize("files", ["kept", "gone", "half"])
@pytest.mark.parametrize("part", ["all", "old", "new", "middle"])
def test_what_only_one_of_two_indexes_has(files, part, tmp_path):
    path = tmp_path / "store"
    plain_store(path)
    low, high = {"all": (0, 1 << 60), "old": (0, 9000), "new": (9000, 1 << 60), "middle": (5000, 12000)}[part]
    with_database(path, lambda message: low <= message.phy_offset < high)
    if files == "gone":
        shutil.rmtree(path / "index")
    elif files == "half":
        # An index file that covers all, and lost every second chain.
        (name,) = (path / "index").iterdir()
        data = bytearray(name.read_bytes())
        for slot in range(0, 50, 2):
            data[40 + 4 * slot : 44 + 4 * slot] = bytes(4)
        name.write_bytes(data)
        if part != "all":
            return
    asserts_exact(path)


def test_a_database_that_was_switched_on_late(tmp_path):
    path = tmp_path / "store"
    plain_store(path)
    with_database(path, lambda message: message.phy_offset >= 9000)
    shutil.rmtree(path / "index")
    with MessageStore.open(path, config=CONFIG, read_only=True) as store:
        ((begin, end),) = store.database_index.covered()
        assert begin % 4096 == 0 and begin >= 9000 and end == list(store.messages())[-1].phy_offset
        findings = list(verify_index_database(store.commit_log, str(path), store.commit_log.max_offset))
    assert [finding.kind for finding in findings] == ["missing_index_entry"]
    assert "phy offset 0 to " in findings[0].detail
    asserts_exact(path)


def test_records_without_a_unique_key_are_looked_for_in_the_log(tmp_path):
    path = tmp_path / "store"
    with MessageStore.open(path, config=CONFIG) as store:
        for number in range(60):
            properties = {"UNIQ_KEY": f"{number:032X}"} if number % 2 else {}
            store.put_message(
                Message("T", b"x" * 60, keys=[f"K{number % 7}", "all"], properties=properties), queue_id=0
            )
    with_database(path)
    shutil.rmtree(path / "index")
    with MessageStore.open(path, config=CONFIG, read_only=True) as store:
        assert len(store.query_message("T", "all", 1000)) == 60 and store.database_index.covered() == []
    asserts_exact(path)


def test_a_writer_asks_the_database_too(tmp_path):
    path = tmp_path / "store"
    plain_store(path)
    with_database(path)
    shutil.rmtree(path / "index")
    with MessageStore.open(path, config=CONFIG) as store:
        store.put_message(Message("T", b"new", keys=["K3", "new"], properties={"UNIQ_KEY": "F" * 32}), queue_id=0)
        for key in ("K3", "new", "all"):
            found = store.query_message("T", key, 1000)
            assert [message.phy_offset for message in found] == truth(store, "T", key, None)
    asserts_exact(path)


def test_a_reader_follows_the_database(tmp_path):
    path = tmp_path / "store"
    plain_store(path)
    shutil.rmtree(path / "index")
    with_database(path, lambda message: message.phy_offset < 5000)
    with MessageStore.open(path, config=CONFIG, read_only=True) as store:
        assert len(store.query_message("T", "all", 1000)) == 60
        first = store.database_index.last_offset
        with_database(path)
        assert store.database_index.last_offset == first
        store.refresh()
        assert store.database_index.last_offset > first
        assert len(store.query_message("T", "all", 1000)) == 60


@pytest.mark.parametrize("wrong", ["other record", "no record", "beyond the end"])
def test_a_wrong_entry(wrong, tmp_path):
    path = tmp_path / "store"
    plain_store(path)
    shutil.rmtree(path / "index")
    with_database(path)
    with MessageStore.open(path, config=CONFIG, read_only=True) as store:
        messages = list(store.messages())
    message = messages[8]
    to = {"other record": messages[9].phy_offset, "no record": message.phy_offset + 1, "beyond the end": 1 << 30}[wrong]
    bad = struct.pack(">q", message.store_timestamp // HOUR * HOUR) + f"@T@K@K1@{message.unique_key}@".encode()
    rocksdb_files.write(
        path / "rocksdbstore", {"default": {bad + struct.pack(">q", to): struct.pack(">q", message.store_timestamp)}}
    )
    with MessageStore.open(path, config=CONFIG, read_only=True) as store:
        found = store.query_message("T", "K1", 1000)
        assert [each.phy_offset for each in found] == truth(store, "T", "K1", None)
        # An entry that leads to what cannot be makes the log count.
        assert (store.database_index.damage is not None) == (wrong != "beyond the end")
    findings = [finding for finding in verify(path, CONFIG) if finding.path.endswith("rocksdbstore")]
    assert [finding.kind for finding in findings] == ["bad_index_entry"] and "K1" in findings[0].detail
    pytest.importorskip("pyarrow")
    with MessageStore.open(path, config=CONFIG, read_only=True) as store:
        table = store.query_table(["K1", "K2"], "T", ["phy_offset"], 1000)
        assert table["phy_offset"].to_pylist() == [*truth(store, "T", "K1", None), *truth(store, "T", "K2", None)]
        assert (store.database_index.damage is not None) == (wrong != "beyond the end")


def test_missing_and_wrong_values(tmp_path):
    path = tmp_path / "store"
    plain_store(path)
    with_database(path)
    assert [finding for finding in verify(path, CONFIG) if "index" in finding.kind] == []
    with MessageStore.open(path, config=CONFIG, read_only=True) as store:
        messages = list(store.messages())
    with_database(path, lambda message: message.phy_offset not in (messages[3].phy_offset, messages[20].phy_offset))
    shutil.rmtree(path / "rocksdbstore")
    with_database(path, lambda message: message.phy_offset not in (messages[3].phy_offset, messages[20].phy_offset))
    (key,) = [
        key
        for key in rocksdb_files.index_entries(
            "T", "", None, messages[5].unique_key, messages[5].phy_offset, messages[5].store_timestamp
        )
    ]
    rocksdb_files.write(
        path / "rocksdbstore", {"default": {key: struct.pack(">q", 5), b"\0odd": b"?", key + b"x": b""}}
    )
    findings = [finding for finding in verify(path, CONFIG) if finding.path.endswith("rocksdbstore")]
    kinds = sorted(finding.kind for finding in findings)
    assert kinds == ["bad_index_entry"] * 3 + ["missing_index_entry"] * 2
    missing = [finding.detail for finding in findings if finding.kind == "missing_index_entry"]
    assert f"4 entries of the record at phy offset {messages[3].phy_offset}" in missing[0]
    assert any("it says store time 5" in finding.detail for finding in findings)


def test_verify_of_goldens(stores):
    for path in stores.values():
        kinds = {finding.kind for finding in verify(path)}
        assert not kinds & {"missing_index", "missing_index_entry", "bad_index_entry", "damaged_database"}, kinds


# ------------------------------------------------------------------------------------------------------------- damage


def test_a_missing_table_leaves_the_log(stores, tmp_path):
    path = tmp_path / "store"
    shutil.copytree(stores["lost"], path)
    for table in (path / "rocksdbstore").glob("*.sst"):
        table.unlink()
    with MessageStore.open(path, read_only=True) as store:
        message = list(store.messages())[100]
        found = store.query_message(message.topic, message.keys[0], 10000)
        assert [each.phy_offset for each in found] == truth(store, message.topic, message.keys[0], None)
        assert store.database_index.damage is not None
    assert "damaged_database" in {finding.kind for finding in verify(path)}


def test_a_database_that_may_not_be_read_leaves_the_log(stores, monkeypatch, caplog):
    path = stores["store"]
    with MessageStore.open(path, read_only=True) as store:
        wanted = [message.phy_offset for message in store.query_message("Orders", "CUST-7")]
    allowed = os.access
    monkeypatch.setattr("os.access", lambda name, mode: "rocksdbstore" not in str(name) and allowed(name, mode))
    with MessageStore.open(path, read_only=True) as store:
        found = store.query_message("Orders", "CUST-7")
        assert [message.phy_offset for message in found] == wanted and len(wanted) > 3
        assert "Permission denied" in caplog.text and "rocksdbstore" in caplog.text
    (finding,) = [each for each in verify(path) if "index in RocksDB" in each.detail]
    assert finding.kind == "file" and "Permission denied" in finding.detail


def test_flips_and_truncations_are_no_shorter_answer(tmp_path):
    path = tmp_path / "store"
    plain_store(path)
    shutil.rmtree(path / "index")
    with_database(path)
    told = 0
    for table in sorted((path / "rocksdbstore").glob("*.sst")):
        data = table.read_bytes()
        step = max(1, len(data) // 30)
        for at in range(0, len(data), step):
            for text in (data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :], data[:at]):
                table.write_bytes(text)
                with MessageStore.open(path, config=CONFIG, read_only=True) as store:
                    assert len(store.query_message("T", "K3", 1000)) == 9
                    assert len(store.query_message("T", "tag1", 1000, index_type="T")) == 20
                    told += store.database_index.damage is not None
        table.write_bytes(data)
    assert told > 20


def test_damage_that_only_a_query_meets(tmp_path):
    path = tmp_path / "store"
    plain_store(path, 400)
    shutil.rmtree(path / "index")
    with_database(path)
    (table,) = (path / "rocksdbstore").glob("*.sst")
    data = table.read_bytes()
    met = 0
    for at in range(0, len(data) * 3 // 4, max(1, len(data) // 25)):
        table.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with MessageStore.open(path, config=CONFIG, read_only=True) as store:
            first = store.database_index.is_used()
            assert len(store.query_message("T", "all", 1000)) == 400
            assert len(store.query_message("T", "tag1", 1000, index_type="T")) == 133
            met += first and store.database_index.damage is not None
        with MessageStore.open(path, config=CONFIG, read_only=True) as store:
            pytest.importorskip("pyarrow")
            assert len(store.query_table(["all", "K3"], "T", ["phy_offset"], 1000)) == 400 + 57
    assert met > 3


def test_without_rocksdict(stores, tmp_path, monkeypatch):
    path = tmp_path / "store"
    shutil.copytree(stores["store"], path)
    # Of this store no queue could be read either.
    config = StoreConfig.infer(path, mapped_file_size_consume_queue=6_000_000, message_delay_level="1s 2s 30m 1h")
    rebuild(path, what=("consumequeue",), config=config)
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    with MessageStore.open(path, read_only=True) as store:
        # The log tells it all.
        found = store.query_message("Orders", "CUST-7")
        assert [each.phy_offset for each in found] == truth(store, "Orders", "CUST-7", None) and found.complete
    with MessageStore.open(path, read_only=True) as store:
        with pytest.raises(MissingDependencyError, match=r"rmqstore\[rocksdb\]"):
            store.query_message("Orders", "CUST-7", max_log_bytes=1000)
    kinds = {finding.kind for finding in verify(path)}
    assert "not_checked" in kinds and "missing_index" not in kinds


def test_text_that_was_replaced(tmp_path):
    path = tmp_path / "store"
    plain_store(path, 3)
    with MessageStore.open(path, config=CONFIG) as store:
        store.put_message(Message("T", b"", keys=["a\ufffdb"], properties={"UNIQ_KEY": "F" * 32}), queue_id=0)
    shutil.rmtree(path / "index")
    with_database(path)
    with MessageStore.open(path, config=CONFIG, read_only=True) as store:
        (message,) = store.query_message("T", "a\ufffdb")
        assert message.unique_key == "F" * 32


@given(st.binary(max_size=60), st.binary(max_size=12))
def test_any_entry(key, value):
    entry = parse_entry(key, value)
    if entry is not None:
        text = (
            f"@{entry.topic}@{entry.kind}@" + (f"{entry.text}@" if entry.kind != "U" else "") + f"{entry.unique_key}@"
        )
        assert key[8:-8] == text.encode()


KEYS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=" \1\2"), min_size=1, max_size=5)


@given(
    st.text("TOPIC-_%|", min_size=1, max_size=4),
    st.lists(KEYS, max_size=3),
    st.none() | KEYS,
    st.text("0F", min_size=1, max_size=4),
)
def test_entries_of_any_keys(topic, keys, tags, unique_key):
    made = keys_of_record(topic, keys, tags, unique_key, 1234, 7 * HOUR + 5)
    assert dict.fromkeys(made, struct.pack(">q", 7 * HOUR + 5)) == rocksdb_files.index_entries(
        topic, " ".join(keys), tags, unique_key, 1234, 7 * HOUR + 5
    )
    for key in made:
        entry = parse_entry(key, struct.pack(">q", 7 * HOUR + 5))
        assert (entry.topic, entry.unique_key, entry.phy_offset, entry.hour) == (topic, unique_key, 1234, 7 * HOUR)
        assert {"K": keys, "T": [tags], "U": [unique_key]}[entry.kind].count(entry.text)
