"""The test vectors T1 to T17 (`tests/data/vectors.json`, produced by the real Java classes) through the public classes.

Vectors of one module alone are checked next to it: T11 in test_checkpoint, T14 in test_consumer_offset.
"""

from __future__ import annotations

import json

import golden
import pytest

from rmqstore import IndexFile, Message, MessageStore, StoreConfig
from rmqstore._dispatch import TopicTable
from rmqstore._rows import RowBatch
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.commitlog.log_walk import Blank
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.unit_queue import Unit
from rmqstore.files.mapped_file import MappedFilePool, name_of_offset, offset_of_name
from rmqstore.message import host_to_bytes, offset_message_id, parse_message_id, parse_properties, properties_to_bytes

SMALL = {"mapped_file_size_commit_log": 4096, "mapped_file_size_consume_queue": 200}
TINY_INDEX = {"max_hash_slot_num": 10, "max_index_num": 20}


@pytest.fixture(scope="module")
def base_store(golden_store):
    with MessageStore.open(golden_store("base"), read_only=True) as store:
        yield store


def row_of(fields: dict) -> tuple:
    """The row of `RowBatch.take_prepared` for the fields of a record vector."""
    return (
        fields["topic"].encode(), fields["body"].encode(), properties_to_bytes(dict(fields["properties"])),
        host_to_bytes(fields["born_host"]), host_to_bytes(fields["store_host"]),
        fields["queue_id"], fields["flag"], fields["sys_flag"], fields["reconsume_times"], fields["version"],
        fields["queue_offset"], fields["born_timestamp"], fields["store_timestamp"],
        fields["prepared_transaction_offset"],
    )  # fmt: skip


def check_fields(message, fields: dict) -> None:
    for name in (
        "version", "queue_id", "flag", "queue_offset", "phy_offset", "sys_flag", "born_timestamp", "born_host",
        "store_timestamp", "store_host", "reconsume_times", "prepared_transaction_offset", "topic",
    ):  # fmt: skip
        assert getattr(message, name) == fields[name], name
    assert message.properties == dict(fields["properties"])
    if "body" in fields:
        assert message.body == fields["body"].encode()


def test_t1_index_hash_and_slot(vectors, tmp_path):
    config = StoreConfig(max_hash_slot_num=5_000_000, max_index_num=100)
    with IndexFile.create(tmp_path / "20231114221320000", config) as index:
        for number, row in enumerate(vectors["T1"], 1):
            assert index.put_key(row["string"], 1000 + number, 1700000000000)
            assert index.read_entry(number)[:2] == (row["index_hash"], 1000 + number)
            assert index.read_slot(row["slot_of_5000000"]) == number
            assert 1000 + number in index.select_phy_offset(row["string"])


def test_t1_tags_code_of_units(vectors, tmp_path):
    # A lone surrogate cannot be stored: the record holds a question mark and its unit the hash of that.
    rows = [row for row in vectors["T1"] if row["string"] and row["string"].isprintable()]
    assert len(vectors["T1"]) - len(rows) == 3
    with MessageStore.open(tmp_path, config=StoreConfig(**SMALL, **TINY_INDEX)) as store:
        store.put_messages([Message("T", tags=row["string"]) for row in rows])
        queue = store.queues.find("T", 0)
        codes = [queue.unit(queue_offset).tags_code & 2**64 - 1 for queue_offset in range(len(rows))]
        assert [f"{code:016x}" for code in codes] == [row["tags_code"] for row in rows]


def test_t2_body_crc(vectors, tmp_path):
    with MessageStore.open(tmp_path, config=StoreConfig(**SMALL, **TINY_INDEX)) as store:
        for row in vectors["T2"]:
            put = store.put_message(Message("T", (row["body"] or "").encode()))
            assert f"{store.message_at(put.phy_offset).crc:08x}" == row["stored"]


@pytest.mark.parametrize("name", ["T3", "T4", "T5", "T6"])
def test_t3_to_t6_records_written_and_read(vectors, tmp_path, name):
    vector = vectors[name]
    config = StoreConfig(**SMALL, **TINY_INDEX)
    log = CommitLog(tmp_path, config, MappedFilePool())
    log.load()
    batch = RowBatch(TopicTable(), bytes(8), {}, 0)
    batch.take_prepared([row_of(vector["fields"])])
    assert log.append_rows(batch) == vector["length"]
    assert bytes(log.segment(0).hold(0, vector["length"])).hex() == vector["hex"]
    log.close()
    with MessageStore.open(tmp_path, config=config, read_only=True) as store:
        check_fields(store.message_at(0), vector["fields"])
        assert store.commit_log.max_offset == vector["length"]


def test_t7_appended_property_crc(vectors, tmp_path):
    vector = vectors["T7"]["record"]
    fields = vector["fields"]
    config = StoreConfig(**SMALL, **TINY_INDEX, enabled_append_prop_crc=True, clock=lambda: fields["store_timestamp"])
    with MessageStore.open(tmp_path, config=config) as store:
        put = store.put_message(
            Message(
                fields["topic"],
                fields["body"].encode(),
                properties=dict(fields["properties"]),
                born_timestamp=fields["born_timestamp"],
                born_host=fields["born_host"],
                store_host=fields["store_host"],
            ),
            fields["queue_id"],
        )
        assert bytes(store.commit_log.segment(0).hold(0, put.size)).hex() == vector["hex"]
        message = store.message_at(0)
        assert message.properties_crc == 142064868
        assert not message.corrupt
        assert message.properties_stored.endswith(b"__CRC32#\x018684602410\x02")


def test_t8_records_as_stored(vectors, base_store):
    for vector in [*vectors["T8"]["records"], vectors["T8"]["inner_batch"]]:
        fields = vector["fields"]
        message = base_store.message_at(fields["phy_offset"])
        assert message.size == vector["length"]
        check_fields(message, fields)
        mapped_file = base_store.commit_log.segment(fields["phy_offset"])
        pos = fields["phy_offset"] - mapped_file.file_from_offset
        assert bytes(mapped_file.hold(pos, vector["length"])).hex() == vector["hex"]
        # The properties in the order of the vector make the same text.
        assert properties_to_bytes(dict(fields["properties"])) == message.properties_stored
    for offset, msg_id in vectors["T8"]["msg_ids"].items():
        assert base_store.message_at(int(offset)).msg_id == msg_id
    blank = vectors["T8"]["blank"]
    entries = list(base_store.commit_log.entries(0, 4096))
    assert entries[-1] == Blank(blank["phy_offset"], blank["size"])
    assert bytes(base_store.commit_log.segment(0).hold(blank["phy_offset"], 8)).hex() == blank["hex"]


def test_t8_the_messages_of_an_inner_batch(vectors, base_store):
    fields = vectors["T8"]["inner_batch"]["fields"]
    batch = base_store.message_at(fields["phy_offset"])
    assert batch.is_inner_batch
    inner = batch.inner_messages()
    assert len(inner) == 3
    for number, (message, wanted) in enumerate(zip(inner, fields["batch"], strict=True)):
        assert (message.flag, message.body.decode()) == (wanted["flag"], wanted["body"])
        assert message.properties == dict(wanted["properties"])
        assert message.queue_offset == number


def test_t9_units(vectors, base_store, golden_store):
    t9 = vectors["T9"]
    for row in t9["units"]:
        queue = base_store.queues.find(row["topic"], row["queue_id"])
        unit = queue.unit(row["queue_offset"])
        assert unit == (row["queue_offset"], row["phy_offset"], row["size"], row["tags_code"], 1)
        assert bytes(queue.files.file(0).hold(20 * row["queue_offset"], 20)).hex() == row["hex"]
    batch = t9["batch_unit"]
    queue = base_store.queues.find("BatchTopic", 0)
    wanted = (batch["base_queue_offset"], batch["phy_offset"], batch["size"], batch["tags_code"], batch["batch_num"])
    assert queue.unit(1) == wanted
    assert bytes(queue.files.file(0).hold(0, 46)).hex() == batch["hex"]
    with MessageStore.open(golden_store("ext"), read_only=True) as store:
        queue = store.queues.find("TopicTest", 0)
        for number, (row, ext) in enumerate(zip(t9["ext_addressing_units"], t9["ext_units"], strict=True)):
            unit = queue.unit(number)
            assert (unit.phy_offset, unit.size) == (row["phy_offset"], row["size"])
            assert unit.tags_code == -(2**63) + row["ext_pos"]
            assert queue.ext.get(unit.tags_code) == (ext["tags_code"], ext["store_timestamp"], b"")
            assert queue.tags_code(unit) == ext["tags_code"]
            assert bytes(queue.files.file(0).hold(20 * number, 20)).hex() == row["hex"]
            assert bytes(queue.ext.files.file(0).hold(ext["pos"], 20)).hex() == ext["hex"]


def test_t9_units_as_we_write_them(vectors, tmp_path):
    t9 = vectors["T9"]
    config = StoreConfig(**SMALL)
    queue = ConsumeQueue(str(tmp_path), "TopicTest", 0, config, MappedFilePool())
    rows = [row for row in t9["units"] if row["topic"] == "TopicTest"]
    for row in rows:
        assert queue.put(Unit(row["queue_offset"], row["phy_offset"], row["size"], row["tags_code"]), 0)
    assert bytes(queue.files.file(0).hold(0, 80)).hex() == "".join(row["hex"] for row in rows)
    queue.close()
    # A queue that begins late is filled up from its file's start with units that readers skip.
    late = ConsumeQueue(str(tmp_path), "Late", 0, config, MappedFilePool())
    assert late.put(Unit(13, 4096, 300, 5), 0)
    assert late.files.offsets == (200,)
    assert bytes(late.files.file(200).hold(0, 60)).hex() == t9["pre_fill"] * 3
    assert late.min_queue_offset(0) == 13
    assert late.max_queue_offset == 14
    assert late.unit(12) is None
    assert late.unit(13) == (13, 4096, 300, 5, 1)
    late.close()


def test_t10_an_index_file_step_by_step(vectors, tmp_path):
    t10 = vectors["T10"]
    config = StoreConfig(**TINY_INDEX)
    with IndexFile.create(tmp_path / "1", config) as index:
        data = index.mapped_file.hold()
        assert len(data) == t10["file_size"]
        assert not any(data)
        for key, phy_offset, time in t10["puts"]:
            assert index.put_key(key, phy_offset, time)
        assert bytes(data[:40]).hex() == t10["header"]
        assert bytes(data[40:80]).hex() == t10["slots"]
        for number, entry in enumerate(t10["entries"]):
            assert bytes(data[80 + 20 * number : 100 + 20 * number]).hex() == entry
        for row in t10["selections"]:
            assert index.select_phy_offset(row["key"], 64, row["begin"], row["end"]) == row["offsets"]
        fill = t10["fill"]
        for i in range(fill["refused_at"]):
            taken = index.put_key(
                f"{fill['key_prefix']}{i}", fill["first_phy_offset"] + i, fill["first_store_timestamp"] + i
            )
            assert taken == (i < fill["taken"])
        assert index.is_full
        assert bytes(data[:40]).hex() == fill["header"]
        assert bytes(data[40:80]).hex() == fill["slots"]
        with IndexFile.create(tmp_path / "2", config, previous=index) as following:
            new = following.mapped_file.hold()
            assert bytes(new[:40]).hex() == t10["rolled"]["header"]
            for key, phy_offset, time in t10["rolled"]["puts"]:
                assert following.put_key(key, phy_offset, time)
            assert bytes(new[:40]).hex() == t10["rolled"]["header_after"]
            for number, entry in t10["rolled"]["entries"].items():
                at = 80 + 20 * int(number)
                assert bytes(new[at : at + 20]).hex() == entry
            new.release()
        data.release()


def test_t10_the_first_index_file_of_a_store(vectors, base_store):
    head = vectors["T10"]["base_first_file"]
    index = base_store.index_service.file(base_store.index_service.names[0])
    data = index.mapped_file.hold()
    assert bytes(data[:80]).hex() == head["header"] + head["slots"]
    for number, entry in head["entries"].items():
        assert bytes(data[80 + 20 * int(number) : 100 + 20 * int(number)]).hex() == entry


def test_t12_ids_and_names(vectors):
    for row in vectors["T12"]["ids"]:
        assert offset_message_id(row["store_host"], row["phy_offset"]) == row["msg_id"]
        assert parse_message_id(row["msg_id"]) == (row["store_host"], row["phy_offset"])
    for offset, name in vectors["T12"]["file_names"]:
        assert name_of_offset(offset) == name
        assert offset_of_name(name) == offset


def test_t13_properties_through_a_store(vectors, tmp_path):
    t13 = vectors["T13"]
    config = StoreConfig(**SMALL, **TINY_INDEX)
    with MessageStore.open(tmp_path, config=config) as store:
        put = store.put_message(Message("T", properties=dict(t13["pairs"])))
        message = store.message_at(put.phy_offset)
        assert message.properties_stored.hex() == t13["hex"]
        # An empty value is written, and lost when it is read: Java's parser drops it.
        assert message.properties == {"KEYS": "k1 k2", "TAGS": "TagA"}
    for row in t13["parse"]:
        assert parse_properties(row["text"].encode()) == row["properties"]


def test_t15_every_get(vectors, base_store):
    assert len(vectors["T15"]) == 22
    for row in vectors["T15"]:
        got = base_store.get_message(
            row["topic"],
            row["queue_id"],
            row["queue_offset"],
            row["max_num"],
            tags=row["subscription"],
            max_bytes=row["max_bytes"],
        )
        assert got.status.name == row["status"], row
        assert got.next_queue_offset == row["next_queue_offset"], row
        assert (got.min_queue_offset, got.max_queue_offset) == (row["min_queue_offset"], row["max_queue_offset"]), row
        assert [message.queue_offset for message in got] == row["queue_offsets"], row
        assert sum(message.size for message in got) == row["bytes"], row
        assert sum(int(message.properties.get("INNER_NUM", 1)) for message in got) == row["count"], row


@pytest.mark.parametrize("boundary", ["lower", "upper"])
def test_t16_offset_by_time(vectors, base_store, boundary):
    t16 = vectors["T16"]
    base, topic, queue_id = t16["base_time"], t16["topic"], t16["queue_id"]
    queue = base_store.queues.find(topic, queue_id)
    units = [queue.unit(number) for number in range(queue.max_queue_offset)]
    assert [base_store.message_at(unit.phy_offset).store_timestamp - base for unit in units] == t16["unit_times"]
    for row in t16["rows"]:
        assert base_store.offset_by_time(topic, queue_id, base + row["time"], boundary) == row[boundary], row
    assert base_store.offset_by_time("Nope", 0, base, boundary) == 0


def test_t17_light_queues(vectors, golden_copy):
    t17 = vectors["T17"]
    root = golden_copy("base")
    config = StoreConfig(**golden.geometry("base"), enable_lmq=True, enable_multi_dispatch=True)
    message = Message(
        t17["topic"],
        b"a body of 12",
        tags=t17["tags"],
        properties={"INNER_MULTI_DISPATCH": t17["inner_multi_dispatch"]},
        born_host="192.168.1.10:50000",
        store_host="10.0.0.1:10911",
    )
    with MessageStore.open(root, config=config) as store:
        puts = [store.put_message(message, t17["queue_id"]) for _ in t17["records"]]
        assert [{"phy_offset": put.phy_offset, "size": put.size} for put in puts] == t17["records"]
        first, second = (store.message_at(put.phy_offset).properties for put in puts)
        assert first["INNER_MULTI_QUEUE_OFFSET"] == t17["inner_multi_queue_offset_of_first"]
        assert second["INNER_MULTI_QUEUE_OFFSET"] == "1,1"
        for topic, queue_id in t17["queues"]:
            got = store.get_message(topic, queue_id, 0)
            assert [each.phy_offset for each in got] == [put.phy_offset for put in puts]
    for topic, queue_id in t17["queues"]:
        data = (root / "consumequeue" / topic / str(queue_id) / f"{0:020}").read_bytes()
        assert data[:40].hex() == t17["first_bytes"]
        assert not any(data[40:])


def test_t17_light_queues_need_both_options(vectors, tmp_path):
    t17 = vectors["T17"]
    message = Message(t17["topic"], properties={"INNER_MULTI_DISPATCH": t17["inner_multi_dispatch"]})
    for number, options in enumerate(({}, {"enable_lmq": True}, {"enable_multi_dispatch": True})):
        with MessageStore.open(tmp_path / str(number), config=StoreConfig(**SMALL, **TINY_INDEX, **options)) as store:
            store.put_message(message)
            assert store.topics() == [t17["topic"]]
            assert "INNER_MULTI_QUEUE_OFFSET" not in store.message_at(0).properties


def test_the_vectors_are_all_there(vectors):
    assert set(vectors) == {f"T{number}" for number in range(1, 18)}
    assert json.dumps(vectors)
