"""Stores of brokers of 4.9.7, 5.1.4, 5.3.3 and 5.5.1: what is true of one version, and what it reads after rmqstore wrote.

The questions that every golden store is asked, these among them, are in `test_golden.py`, `test_oracle.py`,
`test_rebuild.py`, `test_reading.py`, `test_read_only.py`, `test_columns.py` and `test_config.py`.
"""

from __future__ import annotations

import appended
import golden
import oracle
import pytest
from test_oracle import msg_line, queue_line
from test_put import assert_as_rebuilt

import rmqstore
from rmqstore import ConsumerOffsets, MessageStore, StoreConfig
from rmqstore.consumer.json_files import parse_fastjson

WITH_5_3_3 = "5.3.3"
WITH_5_5_1 = "5.5.1"
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"


@pytest.fixture(scope="module", params=golden.VERSION_STORES)
def name(request):
    return request.param


@pytest.fixture
def store(golden_store, name):
    with MessageStore.open(golden_store(name), config=StoreConfig(**golden.geometry(name)), read_only=True) as opened:
        yield opened


# ------------------------------------------------------------------------------------------------- written to and read


def test_the_version_reads_what_was_appended(golden_copy, name):
    """Its own classes gave these lines for a store that `appended.append` had written to."""
    root = golden_copy(name)
    before = next(golden.lines(name, "store"))["maxPhy"]
    num = len(list(golden.lines(name, "msg")))
    count = appended.append(root, name)
    reader = oracle.StoreReader(oracle.read_files(root), golden.geometry(name))
    msgs, blanks = list(golden.lines(f"{name}.appended", "msg")), list(golden.lines(f"{name}.appended", "blank"))
    assert len(msgs) == num + count and msgs[num]["offset"] >= before
    assert [msg_line(item) for item in reader.items if not isinstance(item, oracle.Blank)] == msgs
    assert [(item.phy_offset, item.size) for item in reader.items if isinstance(item, oracle.Blank)] == [
        (line["offset"], line["size"]) for line in blanks
    ]
    (bounds,) = golden.lines(f"{name}.appended", "store")
    assert (reader.min_phy_offset, reader.max_phy_offset) == (bounds["minPhy"], bounds["maxPhy"])
    assert [queue_line(reader, *queue) for queue in reader.queues()] == list(golden.lines(f"{name}.appended", "queue"))
    queries = list(golden.lines(f"{name}.appended", "query"))
    assert len(queries) > len(list(golden.lines(name, "query")))
    for line in queries:
        assert reader.index.query(line["topic"], line["key"]).offsets == line["offsets"], line


def test_what_was_appended_is_found_verified_and_rebuilt(golden_copy, name):
    root = golden_copy(name)
    config = StoreConfig(**golden.geometry(name))
    before = oracle.read_files(root)
    count = appended.append(root, name)
    files = assert_as_rebuilt(root, golden.geometry(name))
    # Finished files stay as they were: all segments and index files but the last.
    for folder in ("commitlog/", "index/"):
        *finished, _ = sorted(path for path in before if path.startswith(folder))
        assert finished and all(files[path] == before[path] for path in finished)
    assert list(rmqstore.verify(root, config)) == []
    report = rmqstore.rebuild(root, config=config)
    assert report.damage == [] and report.records == count + len(list(golden.lines(name, "msg")))
    assert oracle.comparable(oracle.read_files(root), oracle.QUEUES_AND_INDEX) == oracle.comparable(
        files, oracle.QUEUES_AND_INDEX
    )
    with MessageStore.open(root, read_only=True) as store:
        newest, *_, oldest = store.query_message("Orders", "ORD-1000")
        assert (newest.body, oldest.body) == (b"appended 0", b"order 0 of golden store")
        (batch,) = store.query_message("Payments", "PAY-3", max_num=1)
        assert batch.body == b"of a batch 3"


# ------------------------------------------------------------------------------------------------------ what was sent


def test_every_store_holds_what_the_clients_sent(store):
    orders = [message for message in store.messages() if message.topic == "Orders"]
    assert [message.body for message in orders] == [b"order %d of golden store" % number for number in range(60)]
    assert [message.tags for message in orders[:4]] == ["created", "paid", "shipped", "取消"]
    assert [message.queue_id for message in orders[:8]] == [0, 1, 2, 3] * 2
    assert orders[3].keys == ["ORD-1003", "CUST-3"]
    assert {message.properties["region"] for message in orders} == {"EU", "Ελλάδα"}
    for keys in (["Aa", "BB"], ["AaAa", "BBBB", "AaBB"], ["钥匙", "ключ"], ["😀-1", "𝒳"]):
        for key in keys:
            (found,) = store.query_message("Documents", key)
            assert (found.keys, found.body.decode()) == (keys, " ".join(keys))
    for type in ("ZLIB", "LZ4", "ZSTD"):
        (found,) = store.query_message("Documents", f"DOC-{type}")
        assert found.body.decode() == "".join(f"{type} compresses this {number % 13}\n" for number in range(400))
        assert found.sys_flag & 1 and len(found.body_stored) < 500
    for number in range(7):
        (found,) = store.query_message("Payments", f"PAY-{number}")
        assert found.body == b"one of seven %d" % number and found.queue_id == 1


def test_transactions_delays_and_a_retry_are_where_a_broker_puts_them(store):
    bodies = {(message.topic, *message.keys): message.body for message in store.messages()}
    for state in ("COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "UNKNOW"):
        assert bodies[HALF_TOPIC, f"TX-{state}"] == state.encode()
        assert bool(store.query_message("Payments", f"TX-{state}")) is (state == "COMMIT_MESSAGE")
    for level in range(1, 5):
        waiting = store.queues.find(SCHEDULE_TOPIC, level - 1).unit(0)
        assert store.message_at(waiting.phy_offset).keys == [f"DELAY-{level}"]
        assert bool(store.query_message("Payments", f"DELAY-{level}")) is (level < 3)
    retried = store.queues.find(SCHEDULE_TOPIC, 2).unit(1)
    message = store.message_at(retried.phy_offset)
    assert (message.keys, message.reconsume_times) == (["ORD-1007"], 1)


# -------------------------------------------------------------------------------------------- what differs by version


def test_the_last_separator_of_properties(golden_store, name):
    # 4.9.1 to 5.1.4 write none; the property CRC of 5.3.3 ends in one, and so does what is before it.
    records = list(oracle.records_of(oracle.segments(oracle.read_files(golden_store(name)))))
    ends = {record.properties_raw[-1:] == b"\x02" for record in records if record.properties_raw}
    assert ends == {name in (WITH_5_3_3, WITH_5_5_1)}
    assert {"WAIT" in record.properties for record in records[:60]} == {name != "4.9.7"}


def test_property_crc_and_extension_are_those_of_5_3_3(golden_store, store, name):
    files = oracle.read_files(golden_store(name))
    sound = {record.property_crc_is_sound for record in oracle.records_of(oracle.segments(files))}
    assert sound == ({True} if name == WITH_5_3_3 else {None})
    extension = [path for path in files if path.startswith("consumequeue_ext/")]
    assert (len(extension) > 13) is (name == WITH_5_3_3)
    assert (store.queues.find("Orders", 0).ext is not None) is (name == WITH_5_3_3)
    inferred = StoreConfig.infer(golden_store(name))
    assert (inferred.enable_consume_queue_ext, inferred.enabled_append_prop_crc) == (name == WITH_5_3_3,) * 2
    # By tag through the extension as through the unit; the queue has a file of ten units and another of five.
    assert [len(store.get_message("Orders", 3, begin, 100, "取消")) for begin in (0, 10)] == [10, 5]
    assert [len(store.get_message("Orders", 3, begin, 100, "paid")) for begin in (0, 10)] == [0, 0]


def test_tags_are_in_the_index_since_5_4_0(store, name):
    assert store.query_message("Orders", "created") == []
    num = 15 if name == WITH_5_5_1 else 0
    assert len(store.query_message("Orders", "created", index_type="T")) == num
    assert len(store.query_offsets("Orders", "created", index_type="T")) == num


def test_progress_and_config_files(golden_store, name):
    folder = golden_store(name) / "config"
    offsets = ConsumerOffsets.load(folder / "consumerOffset.json")
    assert [offsets.get("G-billing", "Orders", queue_id) for queue_id in range(4)] == [15] * 4
    texts = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    assert len(texts) >= 5
    parsed = {file: parse_fastjson(text, file) for file, text in texts.items()}
    # 4.x has nothing but the offsets.
    assert ("dataVersion" in parsed["consumerOffset.json"]) is (name != "4.9.7")
    assert ("dataVersion" in parsed["delayOffset.json"]) is (name != "4.9.7")
    assert {"Orders", "Payments", "Documents"} <= set(parsed["topics.json"]["topicConfigTable"])
