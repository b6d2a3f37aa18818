"""Stores that cross over: written by rmqstore and read by RocketMQ, written by that and continued by rmqstore.

The Java side is the real store of `peer.py`.  A store counts as understood when every record, unit and query answer
that one side gives of it equals the other's.
"""

from __future__ import annotations

from collections import Counter

import golden
import oracle
import pytest
from answers import assert_same, differences, dump
from peer import copy_store

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.message import compress_body, compression_flags, encode_inner_batch

pytestmark = pytest.mark.java

T0 = 1700000000000
TINY = {
    "mapped_file_size_commit_log": 4096,
    "mapped_file_size_consume_queue": 200,
    "mapper_file_size_batch_consume_queue": 460,
    "max_hash_slot_num": 10,
    "max_index_num": 20,
}
LARGE = {
    "mapped_file_size_commit_log": 1 << 20,
    "mapped_file_size_consume_queue": 6000,
    "mapper_file_size_batch_consume_queue": 13800,
    "max_hash_slot_num": 1000,
    "max_index_num": 8000,
}
GEOMETRIES = {
    "tiny": TINY,
    "large": LARGE,
    "property CRC": {**TINY, "enabled_append_prop_crc": True},
    "property CRC verified": {**TINY, "enabled_append_prop_crc": True, "force_verify_prop_crc": True},
    "extension": {**TINY, "enable_consume_queue_ext": True, "mapped_file_size_consume_queue_ext": 1024},
    "light queues": {**TINY, "enable_lmq": True, "enable_multi_dispatch": True},
    "odd sizes": {**TINY, "mapped_file_size_commit_log": 5003, "max_hash_slot_num": 7, "max_index_num": 3},
}


class Clock:
    def __init__(self, now: int = T0):
        self.now = now

    def __call__(self) -> int:
        return self.now


# ------------------------------------------------------------------------------------------- rmqstore wrote, Java reads


def put_all_kinds(store: MessageStore, clock: Clock, rounds: int = 12, first: int = 0) -> None:
    """Messages of every kind that a store may hold."""
    light = store.config.enable_lmq
    for number in range(first, first + rounds):
        clock.now += 1 + number * 777 % 2500
        store.put_message(
            Message(
                "Orders", b"order %d" % number * 5, keys=[f"ORD-{number}", f"CUST-{number % 3}"], tags=f"t{number % 4}",
                properties={"UNIQ_KEY": f"U{number:04}", "k": "v"}, flag=number, born_timestamp=clock.now - 5,
                born_host="192.168.1.10:50000", reconsume_times=number % 3,
            ),
            number % 4,
        )  # fmt: skip
        store.put_messages(
            [
                Message("Orders", keys="Aa BB AaAa BBBB AaBB", tags="BB"),
                Message("AaTopic", b"x", keys=["BB"]),
                Message("BBTopic", b"y", keys=["Aa", "订单", "😀"], tags="取消"),
                Message("Plain", bytes(number)),
            ]
        )
        store.put_message_batch(
            [Message("Batches", b"b%d" % each, keys=[f"B{number}"], flag=each) for each in range(3)], 1
        )
        inner = [Message("Inner", b"i%d" % each, keys=[f"I{number}"]) for each in range(number % 3 + 1)]
        store.put_message(
            Message(
                "Inner", encode_inner_batch(inner), keys=[f"IB{number}"], properties={"INNER_NUM": str(len(inner))},
                sys_flag=0xC0,
            )
        )  # fmt: skip
        for kind in ("ZLIB", "LZ4", "ZSTD"):
            body = f"document {number} of {kind}; ".encode() * 30
            store.put_message(
                Message("Documents", compress_body(body, kind), keys=[kind], sys_flag=compression_flags(kind))
            )
        for sys_flag in (0x4, 0x8, 0xC):
            store.put_message(
                Message("Payments", b"tx", keys=[f"TX{sys_flag}"], sys_flag=sys_flag, prepared_transaction_offset=77)
            )
        store.put_message(
            Message(
                "SCHEDULE_TOPIC_XXXX", b"later", tags="TagA", keys=["later"],
                properties={"DELAY": str(number % 20 + 1), "REAL_TOPIC": "Orders", "REAL_QID": "0"},
            ),
            number % 18,
        )  # fmt: skip
        store.put_message(Message("%RETRY%".ljust(130 + number % 12, "g"), b"v2", keys=["long"]))
        store.put_message(
            Message("Six", b"v6", keys=["v6"], born_host="[2001:db8::1]:5", store_host="[2001:db8::2]:10911")
        )
        names = {"INNER_MULTI_DISPATCH": "%LMQ%a,%LMQ%b"} if light else {}
        store.put_message(Message("Parent", b"p", keys=["parent"], tags="TagL", properties=names))


@pytest.mark.parametrize("name", GEOMETRIES)
def test_java_reads_what_rmqstore_wrote(java_store, tmp_path, name):
    clock = Clock()
    config = StoreConfig(**GEOMETRIES[name], clock=clock, store_host="10.0.0.1:10911")
    root = tmp_path / "store"
    with MessageStore.open(root, config=config) as store:
        put_all_kinds(store, clock)
        ours = dump(store)
    with MessageStore.open(root, config=config, read_only=True) as store:
        assert differences(dump(store), ours) == []
    copy = copy_store(root, tmp_path / "copy")
    assert_same(ours, java_store.dump(copy, config, in_place=True))
    # The same store as Java leaves it after an orderly close, opened by rmqstore again.
    with MessageStore.open(copy, config=config) as store:
        assert store.recovery_report.clean
        assert differences(dump(store), ours) == []
    before, after = (oracle.comparable(oracle.read_files(path)) for path in (root, copy))
    assert sorted(before) == sorted(after)
    assert [path for path in before if before[path] != after[path]] == []


def questions(store: MessageStore) -> list[dict]:
    """Gets, times and ranges that reach every rule of an answer."""
    asked: list[dict] = []
    for topic in ("Orders", "Inner", "Payments", "none"):
        for offset in (-1, 0, 1, 5, store.max_queue_offset(topic), store.max_queue_offset(topic) + 1):
            for max_num, sub in ((1, None), (7, None), (32, "t1 || BB"), (32, "*"), (5, "nothing")):
                asked.append(
                    {
                        "op": "get", "topic": topic, "queueId": 0, "offset": offset, "maxNum": max_num,
                        "maxBytes": 1 << 20, "sub": sub,
                    }
                )  # fmt: skip
    times = sorted({message.store_timestamp + delta for message in store.messages() for delta in (-1, 0, 1)})
    for time in times[::3]:
        for boundary in ("LOWER", "UPPER"):
            asked.append({"op": "time", "topic": "Plain", "queueId": 0, "timestamp": time, "boundary": boundary})
        for topic, key in (("Orders", "CUST-1"), ("AaTopic", "BB"), ("Documents", "LZ4")):
            for begin, end in ((0, time), (time, 2**63 - 1), (time - 3000, time + 3000)):
                asked.append({"op": "query", "topic": topic, "key": key, "maxNum": 64, "begin": begin, "end": end})
    return asked


@pytest.mark.parametrize("name", ["tiny", "extension"])
def test_both_answer_questions_alike(java_store, tmp_path, name):
    clock = Clock()
    config = StoreConfig(**GEOMETRIES[name], clock=clock)
    with MessageStore.open(tmp_path / "store", config=config) as store:
        put_all_kinds(store, clock)
    with MessageStore.open(tmp_path / "store", config=config, read_only=True) as store:
        asked = questions(store)
        assert len(asked) > 250
        for question, answer in zip(asked, java_store.ask(tmp_path / "store", config, asked), strict=True):
            if question["op"] == "get":
                got = store.get_message(
                    question["topic"], 0, question["offset"], question["maxNum"], tags=question["sub"],
                    max_bytes=question["maxBytes"],
                )  # fmt: skip
                assert got.status.name == answer["status"], question
                assert got.next_queue_offset == answer["next"], question
                assert (got.min_queue_offset, got.max_queue_offset) == (answer["min"], answer["max"]), question
                assert [message.phy_offset for message in got] == [r["offset"] for r in answer["records"]], question
            elif question["op"] == "time":
                boundary = question["boundary"].lower()
                assert store.offset_by_time("Plain", 0, question["timestamp"], boundary) == answer["queueOffset"], (
                    question
                )
            else:
                arguments = [question[part] for part in ("topic", "key", "maxNum", "begin", "end")]
                assert store.query_offsets(*arguments) == answer["offsets"], question
                found = store.query_message(*arguments, compat=True)
                assert [message.phy_offset for message in found] == answer["messages"], question


@pytest.mark.parametrize("name", ["tiny", "extension"])
def test_java_recovers_what_rmqstore_left_open(java_store, tmp_path, name):
    # As a killed process leaves it: `abort` is there, the checkpoint is behind.
    clock = Clock()
    config = StoreConfig(**GEOMETRIES[name], clock=clock)
    with MessageStore.open(tmp_path / "store", config=config) as store:
        put_all_kinds(store, clock)
        ours = dump(store)
        copy = copy_store(tmp_path / "store", tmp_path / "killed")
    assert (copy / "abort").exists()
    theirs = java_store.dump(copy, config)
    # All but the index must be the same; Java deletes what the checkpoint does not vouch for and indexes the log again,
    # so that no key is lost, and only the record at a kept file's end may come twice.
    for mine, his in differences(ours, theirs):
        assert mine["type"] == his["type"] == "query"
        assert set(his["offsets"]) >= set(mine["offsets"][:64]) or len(his["offsets"]) == 64
        doubled = Counter(his["offsets"]) - Counter(mine["offsets"])
        assert len(doubled) <= 1, (mine, his)


# ----------------------------------------------------------------------------------------- Java wrote, rmqstore goes on


def java_script(first: int = 0, count: int = 40) -> list[dict]:
    """Messages for the peer to put."""
    script: list[dict] = []
    for number in range(first, first + count):
        common = {"queueId": number % 3, "storeTimestamp": T0 + number * 700, "bornTimestamp": T0}
        script.append(
            {
                **common, "topic": "Orders", "body": b"java %d" % number,
                "properties": {
                    "UNIQ_KEY": f"J{number:04}", "KEYS": f"ORD-{number} CUST-{number % 3}", "TAGS": f"t{number % 4}",
                },
            }
        )  # fmt: skip
        if number % 5 == 0:
            script.append({**common, "topic": "Plain", "body": b"no properties"})
        if number % 7 == 0:
            batch = [{"body": b"%d" % each, "properties": {"KEYS": f"B{number}", "WAIT": "true"}} for each in range(3)]
            script.append({**common, "topic": "Batches", "batch": batch})
        if number % 9 == 0:
            script.append(
                {**common, "topic": "Payments", "sysFlag": (4, 8, 12)[number % 3], "properties": {"KEYS": "TX"}}
            )
    return script


def entries_of(lines: list[dict]) -> dict[tuple, list[int]]:
    return {
        (line["topic"], line["key"], line.get("indexType")): line["offsets"]
        for line in lines
        if line["type"] == "query"
    }


@pytest.mark.parametrize("kill", [False, True], ids=["closed", "killed"])
@pytest.mark.parametrize("name", ["tiny", "large", "property CRC", "extension"])
def test_rmqstore_goes_on_where_java_stopped(java_store, tmp_path, name, kill):
    geometry = {**GEOMETRIES[name]}
    clock = Clock(T0 + 10**6)
    config = StoreConfig(**geometry, clock=clock)
    root = tmp_path / "store"
    root.mkdir()
    empty, answers, theirs = java_store.turn(root, config, java_script(), kill=kill)
    assert [line["type"] for line in empty] == ["store"]
    assert {answer["status"] for answer in answers} == {"PUT_OK"}
    assert (root / "abort").exists() == kill
    log_before = {path: data for path, data in oracle.read_files(root).items() if path.startswith("commitlog/")}

    # First only looked at, as it stands.
    with MessageStore.open(root, config=config, read_only=True) as store:
        seen = dump(store)
    assert_same(seen, theirs)

    # Then opened for writing, appended to, and closed.
    with MessageStore.open(copy_store(root, tmp_path / "ours"), config=config) as store:
        assert store.recovery_report.clean is not kill
        assert differences(dump(store), seen) == []
        end = store.commit_log.max_offset
        put_all_kinds(store, clock, 6, first=1000)
        new = store.put_message(Message("Orders", b"rmqstore", keys=["CUST-1", "NEW"]), 1)
        ours = dump(store)
        messages = list(store.messages())
    java_messages = [message for message in messages if message.phy_offset < end]
    assert sum(answer["count"] for answer in answers) == len(java_messages)
    for answer in answers:
        assert any(message.phy_offset == answer["offset"] for message in java_messages)
    # Java's bytes stand as they were.
    files = oracle.read_files(tmp_path / "ours")
    for path, data in log_before.items():
        base = int(path.rpartition("/")[2])
        keep = min(max(end - base, 0), len(data))
        assert files[path][:keep] == data[:keep] if keep else True

    # And Java again: nothing lost, nothing doubled.  The last message must be one that is queued: at every clean start Java
    # dispatches what lies behind the newest unit, so that a prepared record at the start of the newest segment is indexed
    # twice.
    theirs, more, last = java_store.turn(tmp_path / "ours", config, java_script(5001, 5))
    assert_same(ours, theirs)
    for (topic, key, index_type), offsets in entries_of(theirs).items():
        if (topic, key) == ("Orders", "NEW"):
            assert offsets == [new.phy_offset]
        wanted = [
            message.phy_offset
            for message in messages
            if message.topic == topic
            and message.transaction_type != 0xC
            and (message.tags == key if index_type else key in message.keys or key == message.unique_key)
        ]
        # Colliding hashes bring in others, each once for each of its keys with that hash.
        if key not in ("Aa", "BB", "AaAa", "BBBB", "AaBB"):
            assert offsets == wanted[::-1][:64], (topic, key)

    # Once more back.
    assert {answer["status"] for answer in more} == {"PUT_OK"}
    with MessageStore.open(tmp_path / "ours", config=config) as store:
        assert store.recovery_report.clean
        assert [message.body for message in store.query_message("Orders", "ORD-5003")] == [b"java 5003"]
        assert len(list(store.messages())) == len(messages) + sum(answer["count"] for answer in more)
        assert_same(dump(store), last)


@pytest.mark.parametrize("name", ["broker", "broker.killed", "base.running"])
def test_a_golden_store_continued_by_rmqstore(java_store, golden_copy, name):
    root = golden_copy(name)
    # 5.5.0 looks at ten segments at most when it starts; these stores have fewer.
    geometry = {**golden.geometry(name), "index_tags": True}
    config = StoreConfig(**geometry)
    with MessageStore.open(root, config=config) as store:
        before = {message.phy_offset: message for message in store.messages()}
        queues = {key: store.max_queue_offset(*key) for key in store.queues.keys()}
        puts = store.put_messages(
            [Message("Orders", b"%d" % number, keys=["NEW", f"NEW-{number}"]) for number in range(50)]
        )
        ours = dump(store)
    assert_same(ours, java_store.dump(root, config, in_place=True))
    with MessageStore.open(root, config=config) as store:
        assert differences(dump(store), ours) == []
        for phy_offset, message in before.items():
            assert store.message_at(phy_offset) == message
        for key, queue_offset in queues.items():
            assert store.max_queue_offset(*key) == queue_offset + (50 if key == ("Orders", 0) else 0)
        assert [m.phy_offset for m in store.query_message("Orders", "NEW", 100)] == [p.phy_offset for p in puts][::-1]
