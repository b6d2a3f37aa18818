"""Every line that the real systems read from the golden stores, reproduced through the public API of a read-only store.

Owns the comparison with `tests/data`: bounds, records, blanks, queue units and index answers, and the client side's own
account of what it sent.  Each store is read once with the geometry inferred from its files and once with it given.
"""

from __future__ import annotations

import ipaddress
import struct
import zlib
from collections import Counter, defaultdict

import golden
import oracle
import pytest

from rmqstore import GetMessageStatus, MessageStore, StoreConfig
from rmqstore.commitlog.log_walk import Blank
from rmqstore.consumequeue.batch_consume_queue import BatchConsumeQueue
from rmqstore.message import MessageExt, host_to_bytes

HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"


@pytest.fixture(scope="module", params=["infer", "explicit"])
def opened(request, golden_store):
    """A function `opened(name) -> MessageStore`, read-only; the stores stay open for the module."""
    stores = {}

    def open_store(name):
        if name not in stores:
            config = None if request.param == "infer" else StoreConfig(**golden.geometry(name))
            stores[name] = MessageStore.open(golden_store(name), config=config, read_only=True)
        return stores[name]

    yield open_store
    for store in stores.values():
        store.close()


@pytest.fixture(scope="module")
def readers(golden_store):
    """A function `readers(name) -> oracle.StoreReader`: the second opinion on the same files."""
    found = {}

    def reader(name):
        if name not in found:
            found[name] = oracle.StoreReader(oracle.read_files(golden_store(name)), golden.geometry(name))
        return found[name]

    return reader


def java_host_bytes(text: str) -> bytes:
    """`/1.2.3.4:5` or `/[2001:db8:0:0:0:0:0:1]:5`, as Java prints an address, in the bytes of a record."""
    address, _, port = text.rpartition("/")[2].rpartition(":")
    return ipaddress.ip_address(address.strip("[]")).packed + struct.pack(">i", int(port))


def masked_crc(body: bytes) -> int:
    return zlib.crc32(body) & 0x7FFFFFFF


def line_of(message: MessageExt) -> dict:
    """The `msg` line of a message, but for the hosts."""
    line = {
        "type": "msg",
        "offset": message.phy_offset,
        "size": message.size,
        "topic": message.topic,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "flag": message.flag,
        "sysFlag": message.sys_flag,
        "born": message.born_timestamp,
        "store": message.store_timestamp,
        "reconsume": message.reconsume_times,
        "prepared": message.prepared_transaction_offset,
        "crc": message.crc,
        "bodyLen": len(message.body_stored),
        "bodyCrc": masked_crc(message.body_stored),
        "msgId": message.msg_id,
    }
    if message.properties:
        line["props"] = message.properties
    return line


def hosts_of(line: dict) -> tuple[bytes, bytes]:
    return java_host_bytes(line.pop("bornHost")), java_host_bytes(line.pop("storeHost"))


# ------------------------------------------------------------------------------------------------------ the records


@pytest.mark.parametrize("name", golden.STORES_WITH_LINES)
def test_bounds(opened, name):
    (line,) = golden.lines(name, "store")
    store = opened(name)
    assert (store.commit_log.min_offset, store.commit_log.max_offset) == (line["minPhy"], line["maxPhy"])


@pytest.mark.parametrize("name", golden.STORES_WITH_LINES)
def test_every_message_line(opened, name):
    store = opened(name)
    count = 0
    for line in golden.lines(name, "msg"):
        message = store.message_at(line["offset"])
        hosts = hosts_of(line)
        assert line_of(message) == line
        assert (host_to_bytes(message.born_host), host_to_bytes(message.store_host)) == hosts
        assert not message.corrupt
        assert store.message_by_id(line["msgId"]) == message
        count += 1
    assert count >= 41


@pytest.mark.parametrize("name", golden.STORES_WITH_LINES)
def test_the_log_is_records_and_blanks_and_nothing_else(opened, name):
    store = opened(name)
    entries = list(store.commit_log.entries())
    wanted = [(line["type"], line["offset"], line["size"]) for line in golden.lines(name, "msg", "blank")]
    assert [
        ("blank", entry.phy_offset, entry.size)
        if isinstance(entry, Blank)
        else ("msg", entry.phy_offset, entry.size)
        for entry in entries
    ] == wanted
    assert {type(entry) for entry in entries} == {Blank, MessageExt}
    assert list(store.messages()) == [entry for entry in entries if isinstance(entry, MessageExt)]


@pytest.mark.parametrize("name", ["base", "ext", "propcrc", "compaction", "broker"])
def test_a_killed_store_holds_the_records_of_the_closed_one(opened, name):
    # For these stores there are no lines of their own, or fewer; what both hold must be the same.
    other = "broker.killed" if name == "broker" else f"{name}.running"
    closed = opened(name)
    (first, *_), killed = closed.messages(), list(opened(other).messages())
    assert killed[0] == first
    assert killed == list(closed.messages(None, killed[-1].phy_offset + 1))
    if name != "broker":
        assert len(killed) == 41


# ------------------------------------------------------------------------------------------------------- the queues


@pytest.mark.parametrize("name", golden.STORES_WITH_LINES)
def test_every_queue_line(opened, name):
    store = opened(name)
    named = []
    for line in golden.lines(name, "queue"):
        topic, queue_id = line["topic"], line["queueId"]
        named.append((topic, queue_id))
        assert store.min_queue_offset(topic, queue_id) == line["min"]
        assert store.max_queue_offset(topic, queue_id) == line["max"]
        queue = store.queues.find(topic, queue_id)
        assert ("BatchCQ" if isinstance(queue, BatchConsumeQueue) else "SimpleCQ") == line["kind"]
        units = [queue.unit(queue_offset) for queue_offset in range(line["min"], line["max"])]
        assert [f"{unit.queue_offset}:{unit.phy_offset}:{unit.size}:{queue.tags_code(unit)}" for unit in units] == line[
            "units"
        ]
        assert queue.unit(line["max"]) is None
        assert queue.unit(line["min"] - 1) is None
    assert set(store.queues.keys()) == set(named)
    assert store.topics() == sorted({topic for topic, _ in named})
    for topic in store.topics():
        assert store.queue_ids(topic) == sorted(queue_id for other, queue_id in named if other == topic)


@pytest.mark.parametrize("name", golden.STORES_WITH_LINES)
def test_every_queue_read_by_get_message(opened, name):
    store = opened(name)
    for line in golden.lines(name, "queue"):
        wanted = list(dict.fromkeys(int(unit.split(":")[1]) for unit in line["units"]))
        got = []
        queue_offset = line["min"]
        while queue_offset < line["max"]:
            result = store.get_message(line["topic"], line["queueId"], queue_offset, 1000)
            assert result.status is GetMessageStatus.FOUND
            assert result.next_queue_offset > queue_offset
            got += [message.phy_offset for message in result]
            queue_offset = result.next_queue_offset
        assert got == wanted
        assert queue_offset == line["max"]


# -------------------------------------------------------------------------------------------------------- the index


def boundary_of_java_recovery(store) -> int | None:
    """Phy offset of the record that Java indexes twice when it opens this store, None when it does not.

    After an unclean exit Java keeps the index files that end no later than the checkpoint's index time and dispatches
    the log again.  It passes over records below the kept end offset; the record *at* it is not below, so all its keys
    are put a second time.  rmqstore shows what is on disk, where they stand once.
    """
    kept = [
        header
        for header in (index.header for index in store.index_service.files())
        if header.end_timestamp <= store.checkpoint.index_msg_timestamp
    ]
    return kept[0].end_phy_offset if kept else None


@pytest.mark.parametrize("name", golden.STORES_WITH_LINES)
def test_every_query_line(opened, name):
    store = opened(name)
    differing = {}
    count = 0
    for line in golden.lines(name, "query"):
        got = store.query_offsets(line["topic"], line["key"])
        count += 1
        if got != line["offsets"]:
            differing[line["topic"], line["key"]] = got, line["offsets"]
    assert count >= 41
    if name not in golden.RECOVERED_BY_JAVA:
        assert differing == {}
        return
    boundary = boundary_of_java_recovery(store)
    record = store.message_at(boundary)
    keys = {*record.keys, record.unique_key} - {None}
    assert set(differing) == {(record.topic, key) for key in keys}
    for got, answered in differing.values():
        once = list(dict.fromkeys(answered))
        assert got == once
        assert Counter(answered) - Counter(got) == {boundary: 1}


@pytest.mark.parametrize("name", golden.STORES_WITH_LINES)
def test_query_message_compat_is_javas_query_message(opened, readers, name):
    store, reader = opened(name), readers(name)
    for number, line in enumerate(golden.lines(name, "query")):
        topic, key = line["topic"], line["key"]
        wanted = [record.phy_offset for record in reader.query_message(topic, key)]
        assert [message.phy_offset for message in store.query_message(topic, key, compat=True)] == wanted
        if name not in golden.RECOVERED_BY_JAVA:
            assert wanted == sorted(line["offsets"])
        if number % 25 == 0 and wanted:
            time = reader.record_at(wanted[-1]).store_timestamp
            for begin, end in ((time, time), (time - 999, time + 999), (0, time - 1), (time + 1, 2**63 - 1)):
                records = reader.query_message(topic, key, 64, begin, end)
                found = store.query_message(topic, key, 64, begin, end, compat=True)
                assert [message.phy_offset for message in found] == [record.phy_offset for record in records]


@pytest.mark.parametrize("name", golden.STORES_WITH_LINES)
def test_query_message_exact_is_what_the_records_say(opened, name):
    store = opened(name)
    by_key = defaultdict(set)
    for line in golden.lines(name, "msg"):
        if line["sysFlag"] & 0xC == 0xC:
            continue  # A rolled back record is not indexed.
        properties = line.get("props", {})
        keys = [key for key in properties.get("KEYS", "").split(" ") if key]
        for key in {*keys, properties.get("UNIQ_KEY")} - {None}:
            by_key[line["topic"], key].add(line["offset"])
    asked = set()
    for line in golden.lines(name, "query"):
        topic, key = line["topic"], line["key"]
        asked.add((topic, key))
        hits = store.query_message(topic, key, max_num=100_000)
        offsets = [message.phy_offset for message in hits]
        assert offsets == sorted(by_key[topic, key], reverse=True)
        assert not hits.truncated
        assert all(message.topic == topic for message in hits)
        if len(line["offsets"]) < 64:
            assert set(offsets) <= set(line["offsets"])
        if len(offsets) > 1:
            newest = store.query_message(topic, key, max_num=1)
            assert newest.truncated
            assert [message.phy_offset for message in newest] == offsets[:1]
    assert asked >= set(by_key)


@pytest.mark.parametrize("name", golden.BROKER_STORES)
def test_tags_are_indexed_since_5_4_0(opened, readers, name):
    store, reader = opened(name), readers(name)
    assert store.config.index_tags
    by_tag = defaultdict(list)
    for line in golden.lines(name, "msg"):
        tags = line.get("props", {}).get("TAGS")
        if tags:
            by_tag[line["topic"], tags].append(line["offset"])
    assert len(by_tag) > 5
    for (topic, tags), offsets in by_tag.items():
        raw = store.query_offsets(topic, tags, index_type="T")
        assert raw == reader.index.query(topic, tags, index_type="T").offsets
        hits = store.query_message(topic, tags, max_num=100_000, index_type="T")
        assert [message.phy_offset for message in hits] == offsets[::-1]
        assert {message.tags for message in hits} == {tags}


def test_tags_are_not_indexed_before_5_4_0(opened):
    store = opened("base")
    assert not store.config.index_tags
    assert store.query_offsets("TopicTest", "TagA", index_type="T") == []
    assert store.query_message("TopicTest", "TagA", index_type="T") == []


# ---------------------------------------------------------------------------------- what the producers had acknowledged


def single_sends():
    return [line for line in golden.sent() if line["kind"] != "batch"]


def same_body(message: MessageExt, line: dict) -> bool:
    return (len(message.body), masked_crc(message.body)) == (line["body_len"], line["body_crc"])


def topic_stored_in(line: dict) -> str:
    """Where a broker puts what a producer sent, until it is due or committed."""
    kind = line["kind"]
    if kind.startswith("tx-"):
        return HALF_TOPIC
    if kind.startswith("delay-"):
        return "SCHEDULE_TOPIC_XXXX"
    if kind.startswith("timer-"):
        return "rmq_sys_wheel_timer"
    return line["topic"]


def final_topic(line: dict) -> str | None:
    """Where the message is in the end; None when it is still waiting or was rolled back."""
    if line["kind"] in ("tx-ROLLBACK_MESSAGE", "tx-UNKNOW", "delay-later", "timer-later"):
        return None
    return line["topic"]


def test_every_acknowledged_body_by_offset_message_id(opened):
    store = opened("broker")
    lines = [line for line in single_sends() if "offset_msg_id" in line]
    assert len(lines) > 1400
    for line in lines:
        message = store.message_by_id(line["offset_msg_id"])
        assert same_body(message, line)
        assert message.msg_id == line["offset_msg_id"]
        assert message.unique_key == line["msg_id"]
        assert message.topic == topic_stored_in(line)
        if message.topic == line["topic"]:
            assert (message.queue_id, message.queue_offset) == (line["queue_id"], line["queue_offset"])
        if "tags" in line:
            assert message.tags == line["tags"]
        assert message.keys == [key for key in line.get("keys", "").split(" ") if key]
    compressed = [line for line in lines if line["kind"].startswith("compressed")]
    for line in compressed:
        message = store.message_by_id(line["offset_msg_id"])
        assert message.sys_flag & 1
        assert message.body_stored != message.body
    assert Counter(line["kind"] for line in compressed) == {
        "compressed-LZ4": 60,
        "compressed-ZSTD": 60,
        "compressed-ZLIB": 60,
    }


def test_every_acknowledged_body_by_unique_key(opened):
    store = opened("broker")
    for line in single_sends():
        stored = store.query_message(topic_stored_in(line), line["msg_id"])
        assert stored, line
        assert any(same_body(message, line) for message in stored)
        assert {message.unique_key for message in stored} == {line["msg_id"]}
        assert stored == store.query_message(topic_stored_in(line), line["msg_id"], index_type="U")
        delivered = store.query_message(line["topic"], line["msg_id"])
        if final_topic(line) is None:
            assert delivered == []
        else:
            assert delivered and all(same_body(message, line) for message in delivered), line


def test_every_acknowledged_body_by_its_keys(opened):
    store = opened("broker")
    asked = 0
    for line in single_sends():
        for key in (key for key in line.get("keys", "").split(" ") if key):
            for topic in {topic_stored_in(line), final_topic(line)} - {None}:
                # The half topic's records and a waiting timer's are indexed like any other.
                hits = store.query_message(topic, key, max_num=10_000, index_type="K")
                assert any(message.unique_key == line["msg_id"] and same_body(message, line) for message in hits), line
                assert all(key in message.keys and message.topic == topic for message in hits)
                asked += 1
    assert asked > 1500


def test_every_acknowledged_body_by_its_tag(opened):
    store = opened("broker")
    found = {}
    asked = 0
    for line in single_sends():
        topic, tags = topic_stored_in(line), line.get("tags")
        if not tags:
            continue
        if (topic, tags) not in found:
            hits = store.query_message(topic, tags, max_num=100_000, index_type="T")
            assert all(message.tags == tags for message in hits)
            found[topic, tags] = {(message.unique_key, len(message.body), masked_crc(message.body)) for message in hits}
        assert (line["msg_id"], line["body_len"], line["body_crc"]) in found[topic, tags], line
        asked += 1
    assert asked > 1400


def test_every_acknowledged_client_batch(opened):
    store = opened("broker")
    batches = [line for line in golden.sent() if line["kind"] == "batch"]
    assert len(batches) == 200
    for line in batches:
        offset_ids, unique_keys = line["offset_msg_id"].split(","), line["msg_id"].split(",")
        assert len(offset_ids) == len(unique_keys) == line["count"]
        got = store.get_message(line["topic"], line["queue_id"], line["queue_offset"], line["count"])
        assert [message.msg_id for message in got][: line["count"]] == offset_ids[: len(got)]
        for number, (offset_id, unique_key) in enumerate(zip(offset_ids, unique_keys, strict=True)):
            message = store.message_by_id(offset_id)
            assert message.unique_key == unique_key
            assert (message.topic, message.queue_id) == (line["topic"], line["queue_id"])
            assert message.queue_offset == line["queue_offset"] + number
            assert store.query_message(line["topic"], unique_key) == [message]
