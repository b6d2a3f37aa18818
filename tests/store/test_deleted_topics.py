"""Topics that were deleted, and deleted and created again: the log keeps their records, and no queue has them back.

Owns the comparison with the queues of a broker, as the oracle dispatches: verify, rebuild on one machine and by tasks, readers
without the queues, openings for writing, and queues in RocksDB.
"""

from __future__ import annotations

import json
import logging
import shutil
import struct
from pathlib import Path

import oracle
import pytest
import rocksdb_stores
from mapped_rebuild import in_order, rebuild_with

from rmqstore import MessageStore, StoreConfig, rebuild, verify
from rmqstore.offline.rebuild_queue_database import rebuild_queue_database

NOW = 1_700_000_000_000
GEOMETRY = {
    "mapped_file_size_commit_log": 4096,
    "mapped_file_size_consume_queue": 200,
    "mapper_file_size_batch_consume_queue": 460,
    "max_hash_slot_num": 20,
    "max_index_num": 400,
}
CONFIG = StoreConfig(**GEOMETRY)


class Broker:
    """The files of a broker: its log, and the queues of its present topics."""

    def __init__(self):
        self.log, self.records = b"", []
        self.dispatched = oracle.DispatchOracle(oracle.geometry(GEOMETRY))
        self.offsets: dict[tuple[str, int], int] = {}
        self.keys: dict[tuple[str, int], list[str]] = {}
        self.topics: set[str] = {"TBW102"}

    def put(self, topic: str, num: int = 1, queue_id: int = 0, batch: int = 0, queue_offset: int | None = None) -> None:
        """Messages of a topic; with `batch` each is an inner batch of this number."""
        self.topics.add(topic)
        for _ in range(num):
            offset = self.offsets.get((topic, queue_id), 0)
            self.offsets[topic, queue_id] = offset + (batch or 1)
            properties = [("KEYS", f"K{len(self.log)}")]
            self.keys.setdefault((topic, queue_id), []).append(properties[0][1])
            if batch:
                properties += [("INNER_NUM", str(batch)), ("INNER_BASE", str(offset))]
            values = {
                "topic": topic, "queue_id": queue_id, "properties": properties, "store_timestamp": NOW + len(self.log),
                "queue_offset": offset if queue_offset is None else queue_offset, "sys_flag": 0xC0 if batch else 0,
            }  # fmt: skip
            record = oracle.encode_record(phy_offset=len(self.log), **values)
            left = 4096 - len(self.log) % 4096
            if len(record) + 8 > left:
                self.log += struct.pack(">iI", left, oracle.MAGIC_BLANK).ljust(left, b"\0")
                record = oracle.encode_record(phy_offset=len(self.log), **values)
            decoded = oracle.decode_record(record, phy_offset=len(self.log))
            self.log += record
            self.records.append(decoded)
            self.dispatched.dispatch(decoded)

    def delete(self, topic: str) -> None:
        """Delete a topic: its queues go, the log keeps its records."""
        self.topics.discard(topic)
        for queues in (self.offsets, self.keys, self.dispatched.consume_queues, self.dispatched.batch_consume_queues):
            for key in [key for key in queues if key[0] == topic]:
                del queues[key]

    def write(self, root: Path, *, queues: bool = True, listed: bool = True, abort: bool = False) -> Path:
        """The store on disk, without queues as where their disk is lost."""
        files = {name: data for name, data in self.dispatched.files().items() if queues or name.startswith("index/")}
        for at in range(0, len(self.log), 4096):
            files[f"commitlog/{oracle.file_name(at)}"] = self.log[at : at + 4096].ljust(4096, b"\0")
        if listed:
            table = {topic: {"topicName": topic} for topic in sorted(self.topics)}
            files["config/topics.json"] = json.dumps({"topicConfigTable": table}).encode()
        if abort:
            files["abort"] = b""
        for name, data in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
        return root

    def queues(self) -> dict[str, bytes]:
        """The files of its queues."""
        return {name: data for name, data in self.dispatched.files().items() if not name.startswith("index/")}


def queues_of(root: Path) -> dict[str, bytes]:
    files = oracle.read_files(root)
    return {name: data for name, data in files.items() if name.startswith(("consumequeue", "batchconsumequeue"))}


def created_again(old: int, new: int, *, batch: int = 0, queues: int = 2) -> Broker:
    """A topic that was deleted and created again, with this number of messages in its first queue."""
    broker = Broker()
    for _ in range(old):
        for queue_id in range(queues):
            broker.put("Orders", queue_id=queue_id, batch=batch)
        broker.put("Other")
    broker.delete("Orders")
    for _ in range(new):
        broker.put("Orders", batch=batch)
        broker.put("Other")
    return broker


def deleted(batch: int = 2) -> Broker:
    broker = Broker()
    broker.put("Gone", 3, batch=batch)
    broker.put("Gone too", 30)
    broker.put("Orders", 40)
    broker.put("Gone too", 30)
    for topic in ("RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_wheel_timer"):
        broker.put(topic, 2)
        broker.topics.discard(topic)
    broker.delete("Gone")
    broker.delete("Gone too")
    return broker


def twice() -> Broker:
    broker = created_again(6, 9)
    broker.delete("Orders")
    broker.put("Orders", 4)
    return broker


BROKERS = {
    "fewer": lambda: created_again(30, 12),
    "more": lambda: created_again(12, 70),
    "one before": lambda: created_again(1, 3, queues=1),
    "one since": lambda: created_again(20, 1, queues=1),
    "batches": lambda: created_again(5, 9, batch=3),
    "twice": twice,
    "deleted": deleted,
}


@pytest.fixture(params=BROKERS)
def broker(request):
    return BROKERS[request.param]()


def test_verify_finds_a_healthy_store_healthy(broker, tmp_path, caplog):
    root = broker.write(tmp_path / "store")
    with caplog.at_level(logging.WARNING, "rmqstore"):
        assert not list(verify(root, CONFIG))
    assert "belong to no queue" in caplog.text


@pytest.mark.parametrize("tasks", [False, True], ids=["one process", "tasks"])
def test_a_rebuild_makes_the_queues_of_the_broker(broker, tmp_path, tasks):
    root = broker.write(tmp_path / "store")
    if tasks:
        report = rebuild_with(in_order, root, config=CONFIG, output=tmp_path / "new")
    else:
        report = rebuild(root, config=CONFIG, output=tmp_path / "new")
    assert not report.damage and report.gone
    assert queues_of(tmp_path / "new") == broker.queues()


@pytest.mark.parametrize("abort", [False, True], ids=["closed in order", "killed"])
def test_an_opening_brings_nothing_back(broker, tmp_path, abort):
    root = broker.write(tmp_path / "store", abort=abort)
    before = queues_of(root)
    for read_only in (True, False, True):
        with MessageStore.open(root, config=CONFIG, read_only=read_only) as store:
            assert_has(store, broker)
    assert queues_of(root) == before


def test_lost_queues_come_back_as_the_broker_had_them(broker, tmp_path):
    root = broker.write(tmp_path / "store", queues=False)
    for read_only in (True, False, True):
        with MessageStore.open(root, config=CONFIG, read_only=read_only) as store:
            assert_has(store, broker)
            if not read_only:
                assert store.recovery_report.gone
    assert queues_of(root) == broker.queues()
    assert not list(verify(root, CONFIG))


def assert_has(store: MessageStore, broker: Broker) -> None:
    """Every queue has the messages that the broker has there, and there is no other queue."""
    assert set(store.topics()) == {topic for topic, _ in broker.offsets}
    for (topic, queue_id), end in broker.offsets.items():
        keys, at = [], 0
        while at < end:
            got = store.get_message(topic, queue_id, at, 1000)
            keys += [message.keys[0] for message in got.messages]
            at = got.next_queue_offset
        assert (at, got.max_queue_offset) == (end, end)
        assert keys == broker.keys[topic, queue_id]


@pytest.mark.parametrize("dispatched", [0, 1, 5])
def test_messages_that_were_not_dispatched_follow_those_of_the_new_queue(tmp_path, dispatched):
    broker = created_again(12, 5)
    broker.topics.add("Orders")
    root = broker.write(tmp_path / "store", abort=True)
    expected = queues_of(root)
    (file,) = (root / "consumequeue" / "Orders" / "0").iterdir()
    if dispatched:
        file.write_bytes(file.read_bytes()[: 20 * dispatched].ljust(200, b"\0"))
    else:
        shutil.rmtree(root / "consumequeue" / "Orders")
    for read_only in (True, False):
        with MessageStore.open(root, config=CONFIG, read_only=read_only) as store:
            assert_has(store, broker)
    assert queues_of(root) == expected


def test_without_a_list_of_topics_a_queue_that_is_not_there_is_lost(tmp_path):
    root = deleted().write(tmp_path / "store", listed=False)
    found = [each for each in verify(root, CONFIG) if "Gone" in each.path]
    assert [each.kind for each in found] == ["missing_unit"] * 2
    assert all("the topic was deleted, or its queue is lost" in each.detail for each in found)
    assert not rebuild(root, ("consumequeue",), CONFIG).gone
    assert {name.split("/")[1] for name in queues_of(root)} >= {"Gone", "Gone too"}
    assert not list(verify(root, CONFIG))


@pytest.mark.parametrize("text", ["{}", '{"topicConfigTable":{}}', "{", '{"topicConfigTable":{"Orders":1}}'])
def test_a_list_that_cannot_be_read_whole_deletes_no_topic(tmp_path, text):
    root = deleted().write(tmp_path / "store")
    (root / "config" / "topics.json").write_text(text)
    assert rebuild(root, ("consumequeue",), CONFIG).gone == {}
    with MessageStore.open(root, config=CONFIG, read_only=True) as store:
        assert {"Gone", "Gone too"} <= set(store.topics())


def test_a_topic_that_is_not_listed_keeps_the_queue_that_it_has(tmp_path):
    broker = deleted()
    broker.put("Orders", 2)
    broker.topics.discard("Orders")
    root = broker.write(tmp_path / "store")
    assert "Orders" not in rebuild(root, ("consumequeue",), CONFIG).gone
    assert queues_of(root) == broker.queues()


@pytest.mark.parametrize("place", [3, 16, 20])
def test_a_queue_offset_that_is_0_by_damage_takes_no_unit_away(tmp_path, place):
    broker = Broker()
    for number in range(40):
        broker.put("Orders", queue_offset=0 if number == place else None)
        broker.put("Orders", queue_id=1)
    root = broker.write(tmp_path / "store", queues=False)
    report = rebuild(root, ("consumequeue",), CONFIG, tmp_path / "new")
    assert report.gone == {} and report.units == 79


# ---------------------------------------------------------------------------------------------------------------------
# Queues in RocksDB


def flushed(broker: Broker) -> dict[str, dict[bytes, bytes]]:
    """The database of its queues as the broker has it now."""
    times = {record.phy_offset: record.store_timestamp for record in broker.records}
    units, offsets = {}, {rocksdb_stores.max_key("CHECKPOINT_TOPIC", 0): struct.pack(">q", len(broker.log))}
    for (topic, queue_id), queue in broker.dispatched.consume_queues.items():
        data = b"".join(data for _, data in sorted(queue.store.files("").items()))
        for number in range(queue.max_queue_offset):
            phy_offset, size, code = struct.unpack_from(">qiq", data, 20 * number)
            value = struct.pack(">qiqq", phy_offset, size, code, times[phy_offset])
            units[rocksdb_stores.unit_key(topic, queue_id, number)] = value
            offsets[rocksdb_stores.max_key(topic, queue_id)] = struct.pack(">qq", phy_offset, number)
    return {"default": units, "offset": offsets}


def in_rocksdb(broker: Broker, root: Path, families: dict[str, dict[bytes, bytes]]) -> Path:
    """The store with queues in RocksDB alone."""
    broker.write(root, queues=False)
    rocksdb_stores.write_database(root / "consumequeue", families)
    return root


@pytest.mark.parametrize("kind", ["fewer", "deleted without batches"])
def test_queues_in_rocksdb_of_topics_that_were_deleted(tmp_path, kind):
    pytest.importorskip("rocksdict")
    broker = BROKERS[kind]() if kind in BROKERS else deleted(batch=0)
    root = in_rocksdb(broker, tmp_path / "store", flushed(broker))
    assert not list(verify(root, CONFIG))
    with MessageStore.open(root, config=CONFIG, read_only=True) as store:
        assert_has(store, broker)
    report = rebuild_queue_database(root, CONFIG, tmp_path / "new")
    assert report.gone and not report.damage
    units, ends = rocksdb_stores.stored_units(tmp_path / "new" / "consumequeue")
    assert (units, ends) == rocksdb_stores.stored_units(root / "consumequeue")


@pytest.mark.parametrize("new", [1, 5, 40])
def test_a_database_that_was_flushed_before_the_topic_was_deleted(tmp_path, new):
    pytest.importorskip("rocksdict")
    broker = created_again(12, 0, queues=1)
    old = Broker()
    for _ in range(12):
        old.put("Orders")
        old.put("Other")
    families = flushed(old)
    for _ in range(new):
        broker.put("Orders")
    root = in_rocksdb(broker, tmp_path / "store", families)
    assert [each.kind for each in verify(root, CONFIG)] == ["queues_behind_log"]
    with MessageStore.open(root, config=CONFIG, read_only=True) as store:
        assert_has(store, broker)


def test_units_that_a_database_lost_are_not_those_of_a_deleted_topic(tmp_path):
    pytest.importorskip("rocksdict")
    broker = created_again(12, 30, queues=1)
    families = flushed(broker)
    for number in (2, 3, 20):
        del families["default"][rocksdb_stores.unit_key("Orders", 0, number)]
    root = in_rocksdb(broker, tmp_path / "store", families)
    (found,) = verify(root, CONFIG)
    assert "Orders/0 lacks 3 units in all" in found.detail
    with MessageStore.open(root, config=CONFIG, read_only=True) as store:
        assert_has(store, broker)
