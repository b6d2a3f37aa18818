"""Putting messages: the bytes that a store then holds, the results, and that everything put is found again.

The scripted messages of the golden stores must give those stores' bytes; what has no golden store is compared with the
oracle, which rebuilds queues and index from the log alone.
"""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import re
import sys
import threading
import types
from collections.abc import Sequence

import golden
import numpy as np
import oracle
import pytest

from rmqstore import (
    DiskFullError,
    GetMessageStatus,
    IndexFile,
    InvalidMessageError,
    Message,
    MessageStore,
    PutResult,
    PutResults,
    StoreConfig,
    StorePoisonedError,
    _rows,
)
from rmqstore.commitlog.log_walk import Blank
from rmqstore.files.mapped_file import MappedFile
from rmqstore.index import index_service
from rmqstore.message import SysFlag, compress_body, compression_flags, encode_inner_batch

T0 = 1700000000000
GEOMETRY = {
    "mapped_file_size_commit_log": 4096,
    "mapped_file_size_consume_queue": 200,
    "mapper_file_size_batch_consume_queue": 460,
    "max_hash_slot_num": 10,
    "max_index_num": 20,
}
LARGE = {**GEOMETRY, "mapped_file_size_commit_log": 1 << 18, "max_hash_slot_num": 100, "max_index_num": 1000}
# In `base` these three records came as one client batch, one after the other in queue 3.
BATCH_QUEUE = ("TopicTest", 3)


class Clock:
    """A clock that is set by hand."""

    def __init__(self, now: int = T0):
        self.now = now

    def __call__(self) -> int:
        return self.now


def open_store(path, geometry=GEOMETRY, **options) -> MessageStore:
    return MessageStore.open(path, config=StoreConfig(**geometry, **options))


def snapshot(store: MessageStore, keys=()) -> dict:
    """All that can be asked of a store, as plain values."""
    found = {
        "bounds": (store.commit_log.min_offset, store.commit_log.max_offset),
        "log": [
            (entry.phy_offset, entry.size) if isinstance(entry, Blank) else entry
            for entry in store.commit_log.entries()
        ],
        "topics": {topic: store.queue_ids(topic) for topic in store.topics()},
        "index": [(index.name, index.header) for index in store.index_service.files()],
    }
    for topic, queue_ids in found["topics"].items():
        for queue_id in queue_ids:
            queue = store.queues.find(topic, queue_id)
            low, high = store.min_queue_offset(topic, queue_id), store.max_queue_offset(topic, queue_id)
            units = [queue.unit(queue_offset) for queue_offset in range(low, high)]
            found["queue", topic, queue_id] = low, high, units, [queue.tags_code(unit) for unit in units]
            for time in (T0 - 1, T0, T0 + 1500, T0 + 10**9):
                for boundary in ("lower", "upper"):
                    found["time", topic, queue_id, time, boundary] = store.offset_by_time(
                        topic, queue_id, time, boundary
                    )
    for topic, key in keys:
        found["offsets", topic, key] = store.query_offsets(topic, key)
        found["exact", topic, key] = list(store.query_message(topic, key, 1000))
        found["compat", topic, key] = list(store.query_message(topic, key, compat=True))
    return found


def with_entries(files: dict[str, bytes]) -> dict[str, bytes]:
    """`files` without the index files that hold no entry; one test of its own is about these."""
    return {
        path: data
        for path, data in files.items()
        if not path.startswith("index/") or oracle.IndexHeader.decode(data).index_count > 1
    }


def assert_as_rebuilt(root, geometry) -> dict[str, bytes]:
    """Queues and index of the closed store are what the oracle makes of its log; gives back its files."""
    files = oracle.read_files(root)
    geo = oracle.geometry(geometry)
    rebuilt = with_entries(oracle.comparable(oracle.rebuild(files, geo), oracle.QUEUES_AND_INDEX))
    ours = with_entries(oracle.comparable(files, oracle.QUEUES_AND_INDEX))
    assert sorted(ours) == sorted(rebuilt)
    assert [path for path in ours if ours[path] != rebuilt[path]] == []
    return files


# ------------------------------------------------------------------------------------- the golden stores, put once more


def script(name: str, golden_root) -> list:
    """Return the puts that made golden store `name`: (clock, messages, queue id); a batch has three messages."""
    puts: list = []
    for record in oracle.records_of(oracle.segments(oracle.read_files(golden_root))):
        pairs = [pair.split("\x01") for pair in oracle.java_decode(record.properties_raw).split("\x02") if pair]
        message = Message(
            record.topic,
            record.body,
            properties={key: value for key, value in pairs if key != oracle.PROP_CRC},
            flag=record.flag,
            sys_flag=record.sys_flag & ~(oracle.BORN_HOST_V6 | oracle.STORE_HOST_V6),
            born_timestamp=record.born_timestamp,
            born_host=record.born_host,
            store_host=record.store_host,
            reconsume_times=record.reconsume_times,
            prepared_transaction_offset=record.prepared_transaction_offset,
        )
        if (record.topic, record.queue_id) == BATCH_QUEUE and puts and puts[-1][2] == record.queue_id:
            puts[-1][1].append(message)
        else:
            puts.append((record.store_timestamp, [message], record.queue_id))
    assert [len(messages) for _, messages, _ in puts].count(3) == 1
    assert sum(len(messages) for _, messages, _ in puts) == 41
    return puts


def replay(store: MessageStore, clock: Clock, puts: list) -> list:
    results = []
    for now, messages, queue_id in puts:
        clock.now = now
        if len(messages) > 1:
            results += store.put_message_batch(messages, queue_id)
        else:
            results.append(store.put_message(messages[0], queue_id))
    return results


@pytest.mark.parametrize("name", ["base", "propcrc", "ext"])
def test_the_scripted_messages_give_the_bytes_of_the_golden_store(golden_store, tmp_path, name):
    source = golden_store(name)
    clock = Clock()
    config = StoreConfig(**golden.geometry(name), clock=clock)
    with MessageStore.open(tmp_path / "store", config=config) as store:
        results = replay(store, clock, script(name, source))
    lines = list(golden.lines(name, "msg"))
    assert [(r.phy_offset, r.queue_offset, r.msg_id, r.store_timestamp, r.size) for r in results] == [
        (line["offset"], line["queueOffset"], line["msgId"], line["store"], line["size"]) for line in lines
    ]
    ours, theirs = oracle.read_files(tmp_path / "store"), oracle.read_files(source)
    wanted = oracle.comparable(theirs)
    got = oracle.comparable(ours)
    assert sorted(got) == sorted(wanted)
    assert [path for path in wanted if got[path] != wanted[path]] == []
    kinds = {path.split("/")[0] for path in wanted}
    assert kinds == {"commitlog", "consumequeue", "batchconsumequeue", "index"} | (
        {"consumequeue_ext"} if name == "ext" else set()
    )
    # 3 index files: two were rolled, the newest was rewritten from memory by Java's orderly shutdown.
    assert len([path for path in got if path.startswith("index/")]) == 3
    assert "abort" not in ours
    assert ours["lock"] == theirs["lock"] == b"lock"
    # The file of options is the only one that Java does not know.
    assert {path.split("/")[0] for path in ours} - {"rmqstore.json"} <= {path.split("/")[0] for path in theirs}


@pytest.mark.parametrize("name", ["base", "propcrc", "ext"])
def test_the_checkpoint_of_a_replayed_store(golden_store, tmp_path, name):
    source = golden_store(name)
    clock = Clock()
    with MessageStore.open(tmp_path / "store", config=StoreConfig(**golden.geometry(name), clock=clock)) as store:
        replay(store, clock, script(name, source))
    data = (tmp_path / "store" / "checkpoint").read_bytes()
    ours, theirs = oracle.Checkpoint.decode(data), oracle.Checkpoint.decode((source / "checkpoint").read_bytes())
    (bounds,) = golden.lines(name, "store")
    assert len(data) == oracle.CHECKPOINT_SIZE
    assert data == ours.encode()
    assert ours.logics_msg_timestamp == theirs.logics_msg_timestamp == T0 + 49000
    assert ours.master_flushed_offset == theirs.master_flushed_offset == 0
    assert ours.confirm_phy_offset == theirs.confirm_phy_offset == 0
    # Java lags behind here (physic: last thorough flush; index: last full file; no sixth field before 5.4.0); ours say
    # what is on disk after an orderly close, which keeps Java from deleting the newest index file (section 6.6, 5).
    assert theirs.physic_msg_timestamp <= ours.physic_msg_timestamp == T0 + 49000
    assert theirs.index_msg_timestamp <= ours.index_msg_timestamp == T0 + 49000
    assert (theirs.logics_physical_offset, ours.logics_physical_offset) == (0, bounds["maxPhy"])


@pytest.mark.parametrize("name", ["base", "propcrc", "ext"])
def test_a_replay_in_several_sessions_gives_the_same_bytes(golden_store, tmp_path, name):
    source = golden_store(name)
    clock = Clock()
    config = StoreConfig(**golden.geometry(name), clock=clock)
    puts = script(name, source)
    for start in range(0, len(puts), 7):
        with MessageStore.open(tmp_path / "store", config=config) as store:
            replay(store, clock, puts[start : start + 7])
            assert store.recovery_report.units_cut == store.recovery_report.units_written == 0
            assert store.recovery_report.index_entries_cut == store.recovery_report.index_entries_written == 0
    wanted = oracle.comparable(oracle.read_files(source))
    got = oracle.comparable(oracle.read_files(tmp_path / "store"))
    assert sorted(got) == sorted(wanted)
    assert [path for path in wanted if got[path] != wanted[path]] == []


def test_the_same_messages_with_tags_indexed(golden_store, tmp_path):
    geometry = {**golden.geometry("base"), "index_tags": True}
    clock = Clock()
    with MessageStore.open(tmp_path / "store", config=StoreConfig(**geometry, clock=clock)) as store:
        replay(store, clock, script("base", golden_store("base")))
        for tags in ("TagA", "标签", "polygenelubricants", "Tag1"):
            hits = store.query_message("TopicTest", tags, 1000, index_type="T")
            wanted = [
                line["offset"]
                for line in golden.lines("base", "msg")
                if line["topic"] == "TopicTest" and line.get("props", {}).get("TAGS") == tags
            ]
            assert [hit.phy_offset for hit in hits] == wanted[::-1] != []
        # Its only record of tag TagT that is not rolled back.
        assert {hit.phy_offset for hit in store.query_message("TopicTest", "TagT", index_type="T")} == {1160, 1282}
    files = assert_as_rebuilt(tmp_path / "store", geometry)
    source = oracle.read_files(golden_store("base"))
    for path, data in oracle.comparable(source, ("commitlog", "consumequeue", "batchconsumequeue")).items():
        assert files[path] == data


# ------------------------------------------------------------------------------------------------- results and reading


def test_results_say_where_the_message_is(tmp_path):
    clock = Clock(T0 + 5)
    with open_store(tmp_path, clock=clock, store_host="10.1.2.3:10911") as store:
        put = store.put_message(Message("Orders", b"paid", keys=["A-1001"], tags="EU"), queue_id=3)
        assert put == (0, 0, f"0A01020300002A9F{0:016X}", T0 + 5, store.message_at(0).size)
        second = store.put_message(Message("Orders", b""), 3)
        assert (second.phy_offset, second.queue_offset) == (put.size, 1)
        assert store.commit_log.max_offset == second.phy_offset + second.size
        message = store.message_by_id(second.msg_id)
        assert (message.msg_id, message.queue_offset, message.store_timestamp) == second[2:3] + second[1:2] + (T0 + 5,)
        assert message.born_timestamp == T0 + 5
        assert message.born_host == message.store_host == "10.1.2.3:10911"


def test_what_was_put_can_be_read_at_once(tmp_path):
    with open_store(tmp_path) as store:
        for number in range(60):
            body = os.urandom(number)
            put = store.put_message(Message("T", body, keys=[f"k{number}"], tags=f"t{number % 3}"), number % 4)
            message = store.message_at(put.phy_offset)
            assert message.body == body
            got = store.get_message("T", number % 4, put.queue_offset, 10)
            assert (got.status, got.messages) == (GetMessageStatus.FOUND, [message])
            assert got.next_queue_offset == got.max_queue_offset == put.queue_offset + 1
            assert store.query_message("T", f"k{number}") == [message]
            assert store.query_message("T", f"t{number % 3}", 1, index_type="T") == [message]
    assert_as_rebuilt(tmp_path, GEOMETRY)


def test_put_messages_mixes_topics_and_queues(tmp_path):
    clock = Clock()
    with open_store(tmp_path, clock=clock) as store:
        messages = [Message(f"T{number % 3}", b"%d" % number, keys=[f"k{number}"]) for number in range(50)]
        queue_ids = [number % 2 for number in range(50)]
        puts = store.put_messages(messages, queue_ids)
        assert len(puts) == 50
        assert {put.store_timestamp for put in puts} == {T0}
        assert [store.message_at(put.phy_offset).body for put in puts] == [b"%d" % number for number in range(50)]
        offsets: dict = {}
        for message, queue_id, put in zip(messages, queue_ids, puts, strict=True):
            key = message.topic, queue_id
            assert put.queue_offset == offsets.setdefault(key, 0)
            offsets[key] += 1
            assert store.query_message(message.topic, message.keys[0])[0].phy_offset == put.phy_offset
        assert store.topics() == ["T0", "T1", "T2"]
        assert store.put_messages([]) == []
        assert store.put_messages(iter([Message("T0")]), 1)[0].queue_offset == offsets["T0", 1]
        assert store.put_messages([Message("T0")], np.array([1]))[0].queue_offset == offsets["T0", 1] + 1
    assert_as_rebuilt(tmp_path, GEOMETRY)


def test_results_are_those_of_single_puts(tmp_path):
    hosts = {}, {"store_host": "10.1.2.3:4"}, {"store_host": "[2001:db8::2]:3"}, {"born_host": "[2001:db8::1]:1"}
    messages = [Message("T", b"x" * number, **hosts[number % 4]) for number in range(40)]
    clock = Clock()
    with open_store(tmp_path / "many", clock=clock) as store:
        # The queue becomes known, and so do the hosts: the long way and the other answer alike.
        first = store.put_messages(messages)
        second = store.put_messages(messages)
        third = store.put_message_batch([Message("T", b"x"), Message("T", b"y")])
        assert [store.message_by_id(put.msg_id) for put in second] == [store.message_at(put[0]) for put in second]
        sizes = [store.message_at(put.phy_offset).size for put in second]
    with open_store(tmp_path / "single", clock=clock) as store:
        singly = [store.put_message(message) for message in messages * 2]
        singly += store.put_message_batch([Message("T", b"x"), Message("T", b"y")])
    assert [*first, *second, *third] == singly
    assert [put.size for put in second] == sizes and {type(put) for put in singly} == {PutResult}


def test_results_are_as_a_list(tmp_path):
    with open_store(tmp_path) as store:
        store.put_message(Message("T"))
        made = [store.put_messages([Message("T", b"%d" % number) for number in range(5)]) for _ in range(4)]
        nothing = store.put_messages([])
    one, looked_at, copied, hidden = made
    listed = list(looked_at)
    assert listed == looked_at and looked_at == listed and repr(looked_at) == repr(listed)
    assert (
        looked_at == PutResults(listed) and looked_at != listed[:-1] and looked_at != tuple(listed) and looked_at != one
    )
    # Before they were all made, and then.
    for _ in range(2):
        assert [one[number] for number in range(5)] == [one[number - 5] for number in range(5)]
        assert one[np.int64(3)] == one[3] == one[-2] and len(one) == 5 and type(one[0]) is PutResult
        for place in (5, -6, 2**70):
            with pytest.raises(IndexError):
                one[place]
        with pytest.raises(TypeError):
            one["0"]
        assert one[1:4] == list(one)[1:4] and type(one[::-1]) is list
    assert isinstance(one, Sequence) and one[2] in one and one.index(one[2]) == 2 and one.count(one[0]) == 1
    assert list(reversed(one)) == one[::-1] and sorted(one, reverse=True) == one[::-1]
    assert one + looked_at == one + listed == list(one) + listed and type(one + listed) is list
    gathered = same = list(one)
    gathered += looked_at
    assert gathered is same and same == one + listed
    with pytest.raises(TypeError):
        one + (1,)
    with pytest.raises(TypeError):
        (1,) + one
    with pytest.raises(TypeError):
        hash(one)
    for other in (pickle.loads(pickle.dumps(copied)), copy.copy(copied), copy.deepcopy(copied)):
        assert type(other) is PutResults and other == copied
    assert one and not nothing and nothing == [] and repr(nothing) == "[]" and [*nothing] == nothing[:] == []
    first, *_, last = hidden
    assert (first, last) == (hidden[0], hidden[-1])


def test_results_from_bytes_that_nobody_wrote():
    assert _rows.PlacedRows.of(b"", PutResult, 0) == []
    row = bytes(32) + (8).to_bytes(4, sys.byteorder) + bytes(20)
    assert _rows.PlacedRows.of(row, PutResult, 1) == [PutResult(0, 0, "0" * 32, 0, 0)]
    for num in (2, -1, 2**62, 2**63 - 1):
        with pytest.raises(ValueError, match="rows"):
            _rows.PlacedRows.of(row, PutResult, num)
    for length in (-1, 21, 2**31 - 1):
        rows = _rows.PlacedRows.of(
            bytes(32) + length.to_bytes(4, sys.byteorder, signed=True) + bytes(20), PutResult, 1
        )
        with pytest.raises(ValueError, match="host"):
            rows[0]
    for kind in (tuple, list):
        with pytest.raises((TypeError, AttributeError)):
            _rows.PlacedRows.of(row, kind, 1)


def test_put_messages_is_all_or_nothing(tmp_path):
    with open_store(tmp_path) as store:
        store.put_message(Message("T", b"first"))
        before = snapshot(store)
        good = Message("T", b"good")
        for bad, queue_id in (
            ([good, Message("bad topic")], 0),
            ([good, Message("T", bytes(4096))], 0),
            ([good, Message("T", properties={"a": "x" * 40000})], 0),
            ([good, good], [0]),
            ([good, good], [0, -1]),
            ([good, good], [0, 2**31]),
            ([good, "no message"], 0),
        ):
            with pytest.raises(InvalidMessageError):
                store.put_messages(bad, queue_id)
            assert snapshot(store) == before
        assert store.put_message(good).queue_offset == 1


def test_a_message_that_was_read_is_put_as_it_was_sent(golden_store, tmp_path):
    with (
        MessageStore.open(golden_store("base"), read_only=True) as source,
        open_store(tmp_path, {**GEOMETRY, "max_index_num": 1000}) as store,
    ):
        for message in source.messages():
            put = store.put_message(message, message.queue_id)
            again = store.message_at(put.phy_offset)
            for name in (
                "topic", "body", "properties", "properties_stored", "queue_id", "flag", "born_timestamp", "born_host",
                "reconsume_times", "prepared_transaction_offset", "size", "crc", "version", "queue_offset",
            ):  # fmt: skip
                if name == "size" and message.store_host.startswith("["):
                    # The store's own address is IPv4 here.
                    assert again.size == message.size - 12
                    continue
                assert getattr(again, name) == getattr(message, name), name
            assert again.store_host == store.config.store_host
        assert store.max_queue_offset("TopicTest", 0) == 30
        assert store.max_queue_offset("BatchTopic", 0) == 6


def test_reopened_is_as_it_was_live(tmp_path):
    clock = Clock()
    keys = [("T", f"k{number}") for number in range(20)] + [("U", "k1"), ("Inner", "ib"), ("none", "k1")]
    config = StoreConfig(**GEOMETRY, clock=clock)
    with MessageStore.open(tmp_path, config=config) as store:
        for number in range(120):
            clock.now += number * 37 % 1400
            store.put_messages(
                [
                    Message("T", bytes(number), keys=[f"k{number % 20}"], tags=f"t{number % 5}"),
                    Message("U", keys=["k1"], sys_flag=(0, 4, 8, 12)[number % 4]),
                ],
                [number % 3, 0],
            )
            if number % 10 == 0:
                inner = encode_inner_batch([Message("Inner", b"a"), Message("Inner", b"b")])
                store.put_message(Message("Inner", inner, keys="ib", properties={"INNER_NUM": "2"}, sys_flag=0xC0))
        live = snapshot(store, keys)
        with MessageStore.open(tmp_path, config=config, read_only=True) as reader:
            assert snapshot(reader, keys) == live
        assert snapshot(store, keys) == live
    for options in ({"config": config}, {"config": config, "read_only": True}, {"read_only": True}, {}, {}):
        with MessageStore.open(tmp_path, **options) as store:
            assert snapshot(store, keys) == live
    with MessageStore.open(tmp_path) as store:
        report = store.recovery_report
        assert report.clean
        assert (report.bytes_cut, report.units_cut, report.units_written, report.index_entries_written) == (0, 0, 0, 0)
    assert_as_rebuilt(tmp_path, GEOMETRY)


def test_many_threads_put_into_one_store(tmp_path):
    with open_store(tmp_path, LARGE) as store:
        failures = []

        def put(thread: int) -> None:
            try:
                for number in range(50):
                    store.put_message(Message("T", b"x" * number, keys=[f"k{thread}-{number}"]), thread % 2)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=put, args=(thread,)) for thread in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert [store.max_queue_offset("T", queue_id) for queue_id in (0, 1)] == [150, 150]
        for thread, number in itertools.product(range(6), range(50)):
            (message,) = store.query_message("T", f"k{thread}-{number}")
            assert len(message.body) == number
    assert_as_rebuilt(tmp_path, LARGE)


# ------------------------------------------------------------------------------------------------------------- segments


def test_segments_roll_with_a_blank_record(tmp_path):
    clock = Clock()
    model = oracle.StoreOracle(oracle.geometry(GEOMETRY))
    with open_store(tmp_path, clock=clock) as store:
        for number in range(200):
            clock.now += 7
            body = bytes([number]) * (number * 53 % 1900)
            put = store.put_message(Message("T", body, keys=[f"k{number % 9}"], tags="t"), number % 2)
            wanted = model.put(
                "T",
                body,
                clock=clock.now,
                queue_id=number % 2,
                properties=[("KEYS", f"k{number % 9}"), ("TAGS", "t")],
                born_timestamp=clock.now,
                born_host="127.0.0.1:10911",
            )
            assert put == (
                wanted.phy_offset, wanted.queue_offset, wanted.msg_id, wanted.store_timestamp, wanted.size,
            )  # fmt: skip
        entries = list(store.commit_log.entries())
        blanks = [(entry.phy_offset, entry.size) for entry in entries if isinstance(entry, Blank)]
        assert blanks == [(blank.phy_offset, blank.size) for blank in model.blanks]
        assert len(blanks) > 30
        assert all((offset + size) % 4096 == 0 for offset, size in blanks)
    assert oracle.comparable(oracle.read_files(tmp_path)) == oracle.comparable(model.files())


@pytest.mark.parametrize("spare", range(0, 20))
def test_a_record_that_just_fits(tmp_path, spare):
    # 91 bytes, topic T, no properties: `spare` bytes are left in the segment; a blank needs 8.
    with open_store(tmp_path) as store:
        first = store.put_message(Message("T", bytes(4096 - 92 - 300)))
        left = 4096 - first.size
        second = store.put_message(Message("T", bytes(left - 92 - spare)))
        third = store.put_message(Message("T", b"x"))
        if spare >= 8:
            assert second.phy_offset == first.size
        else:
            assert second.phy_offset == 4096
        assert third.phy_offset == (4096 if spare >= 8 else 4096 + second.size)
        assert [message.phy_offset for message in store.messages()] == [0, second.phy_offset, third.phy_offset]
        live = snapshot(store)
    with open_store(tmp_path) as store:
        assert snapshot(store) == live


def test_the_largest_record_of_a_segment(tmp_path):
    with open_store(tmp_path) as store:
        put = store.put_message(Message("T", bytes(4096 - 8 - 92)))
        assert put.size == 4088
        with pytest.raises(InvalidMessageError, match="at most 4088"):
            store.put_message(Message("T", bytes(4096 - 8 - 92 + 1)))
        assert store.commit_log.max_offset == 4088
        assert store.put_message(Message("T")).phy_offset == 4096


def test_a_classic_batch_stays_together(tmp_path):
    clock = Clock()
    model = oracle.StoreOracle(oracle.geometry(GEOMETRY))
    with open_store(tmp_path, clock=clock) as store:
        for number in range(12):
            clock.now += 250
            bodies = [bytes(100 + 10 * each) for each in range(number % 7 + 1)]
            messages = [Message("T", body, keys=[f"k{number}"], flag=number) for body in bodies]
            puts = store.put_message_batch(messages, 2)
            wanted = model.put_batch(
                "T",
                [{"body": body, "properties": [("KEYS", f"k{number}")], "flag": number} for body in bodies],
                clock=clock.now,
                queue_id=2,
                born_timestamp=clock.now,
                born_host="127.0.0.1:10911",
            )
            assert [put.phy_offset for put in puts] == [put.phy_offset for put in wanted]
            assert [put.queue_offset for put in puts] == [put.queue_offset for put in wanted]
            assert len({put.phy_offset // 4096 for put in puts}) == 1
        before = snapshot(store)
        with pytest.raises(InvalidMessageError, match="the batch takes"):
            store.put_message_batch([Message("T", bytes(1500))] * 3)
        with pytest.raises(InvalidMessageError, match="one topic"):
            store.put_message_batch([Message("T"), Message("U")])
        with pytest.raises(InvalidMessageError, match="delayed"):
            store.put_message_batch([Message("T", properties={"DELAY": "3"})])
        with pytest.raises(InvalidMessageError, match="retry"):
            store.put_message_batch([Message("%RETRY%g")])
        with pytest.raises(InvalidMessageError, match="transactional"):
            store.put_message_batch([Message("T", sys_flag=4)])
        assert snapshot(store) == before
    assert oracle.comparable(oracle.read_files(tmp_path)) == oracle.comparable(model.files())


def test_inner_batches(tmp_path):
    with open_store(tmp_path, LARGE) as store:
        for number in range(30):
            inner = [Message("B", b"%d-%d" % (number, each), keys=[f"i{number}"]) for each in range(number % 4 + 1)]
            put = store.put_message(
                Message("B", encode_inner_batch(inner), properties={"INNER_NUM": str(len(inner))}, sys_flag=0xC0)
            )
            message = store.message_at(put.phy_offset)
            assert message.properties["INNER_BASE"] == str(put.queue_offset)
            assert [each.body for each in message.inner_messages()] == [each.body for each in inner]
            assert store.max_queue_offset("B") == put.queue_offset + len(inner)
        at, bodies = 0, []
        while (got := store.get_message("B", 0, at)).status is GetMessageStatus.FOUND:
            bodies += [each.body for message in got for each in message.inner_messages()]
            at = got.next_queue_offset
        assert at == store.max_queue_offset("B") == len(bodies)
        assert bodies[:4] == [b"0-0", b"1-0", b"1-1", b"2-0"]
        with pytest.raises(InvalidMessageError, match="INNER_NUM"):
            store.put_message(Message("B", b"", sys_flag=0xC0))
        with pytest.raises(InvalidMessageError, match="INNER_NUM"):
            store.put_message(Message("B", properties={"INNER_NUM": "2"}))
        store.put_message(Message("Simple"))
        with pytest.raises(InvalidMessageError, match="simple queues"):
            store.put_message(Message("Simple", b"", properties={"INNER_NUM": "1"}, sys_flag=0xC0))
    assert_as_rebuilt(tmp_path, LARGE)


# ----------------------------------------------------------------------------------------- what a message may look like


def test_keys_tags_and_unique_keys(tmp_path):
    with open_store(tmp_path, LARGE) as store:
        store.put_message(Message("T", keys=["a", "b"], tags="x y"))
        store.put_message(Message("T", keys="b c", properties={"UNIQ_KEY": "u1"}))
        store.put_message(Message("T", properties={"KEYS": "c  d ", "TAGS": "z"}))
        assert [len(store.query_message("T", key)) for key in ("a", "b", "c", "d", "u1", "x", "")] == [
            1, 2, 2, 1, 1, 0, 0,
        ]  # fmt: skip
        assert len(store.query_message("T", "x y", index_type="T")) == 1
        assert store.query_message("T", "x", index_type="T") == []
        assert len(store.query_message("T", "u1", index_type="U")) == 1
        assert store.query_message("T", "u1", index_type="K") == []
        assert store.query_message("T", "b", index_type="U") == []
        assert store.query_message("T", "T#z") == []
        with pytest.raises(ValueError, match="index_type"):
            store.query_message("T", "a", index_type="X")
    assert_as_rebuilt(tmp_path, LARGE)


@pytest.mark.parametrize("host", ["127.0.0.1:10911", "[2001:db8::1]:10911"])
def test_unique_keys_are_generated(tmp_path, host):
    with open_store(tmp_path, LARGE, generate_unique_key=True, store_host=host) as store:
        puts = store.put_messages([Message("T", keys=["k"]) for _ in range(200)])
        keys = [store.message_at(put.phy_offset).unique_key for put in puts]
        assert len(set(keys)) == 200
        assert all(re.fullmatch("[0-9A-F]{56}" if host.startswith("[") else "[0-9A-F]{32}", key) for key in keys)
        for put, key in zip(puts, keys, strict=True):
            assert [message.phy_offset for message in store.query_message("T", key)] == [put.phy_offset]
        given = store.put_message(Message("T", properties={"UNIQ_KEY": "mine"}))
        assert store.message_at(given.phy_offset).unique_key == "mine"
    with open_store(tmp_path / "other", LARGE) as store:
        assert store.message_at(store.put_message(Message("T")).phy_offset).unique_key is None
    assert_as_rebuilt(tmp_path, LARGE)


@pytest.mark.parametrize(("length", "version"), [(127, 1), (128, 2), (255, 2)])
def test_long_topics_take_a_v2_record(tmp_path, length, version):
    topic = "%RETRY%".ljust(length, "g")
    with open_store(tmp_path) as store:
        put = store.put_message(Message(topic, b"x", keys=["k"]), 1)
        message = store.message_at(put.phy_offset)
        assert (message.version, message.topic) == (version, topic)
        assert put.size == 91 + 1 + length + len("KEYS\x01k\x02") + version - 1
        assert store.query_message(topic, "k") == [message]
        assert list(store.get_message(topic, 1)) == [message]
    assert_as_rebuilt(tmp_path, GEOMETRY)


def test_ipv6_hosts(tmp_path):
    with open_store(tmp_path, store_host="[2001:db8::2]:10911") as store:
        v6 = store.put_message(Message("T", born_host="[2001:db8::1]:50000"))
        mixed = store.put_message(Message("T", born_host="10.0.0.9:1", store_host="10.0.0.1:10911"))
        born6 = store.put_message(Message("T", born_host="[::1]:65535", store_host="10.0.0.1:10911"))
        assert v6.msg_id == "20010DB800000000000000000000000200002A9F0000000000000000"
        assert mixed.msg_id == f"0A00000100002A9F{v6.size:016X}"
        assert (v6.size, mixed.size, born6.size) == (92 + 24, 92, 92 + 12)
        flags = SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6
        assert [store.message_at(put.phy_offset).sys_flag for put in (v6, mixed, born6)] == [
            flags, 0, SysFlag.BORN_HOST_V6,
        ]  # fmt: skip
        assert store.message_by_id(v6.msg_id).born_host == "[2001:db8::1]:50000"
        assert store.message_by_id(v6.msg_id).store_host == "[2001:db8::2]:10911"
        assert store.message_by_id(mixed.msg_id).born_host == "10.0.0.9:1"
        assert store.message_by_id(born6.msg_id).born_host == "[::1]:65535"
    assert_as_rebuilt(tmp_path, GEOMETRY)


@pytest.mark.parametrize("prop_crc", [False, True])
def test_properties_at_the_limit(tmp_path, prop_crc):
    room = 32767 - (20 if prop_crc else 0)
    with open_store(tmp_path, LARGE, enabled_append_prop_crc=prop_crc) as store:
        put = store.put_message(Message("T", b"x", properties={"p": "v" * (room - 3)}))
        message = store.message_at(put.phy_offset)
        assert len(message.properties_stored) == 32767
        assert message.properties["p"] == "v" * (room - 3)
        wide = store.put_message(Message("T", properties={"é": "订" * ((room - 4) // 3)}))
        assert store.message_at(wide.phy_offset).properties["é"] == "订" * ((room - 4) // 3)
        before = snapshot(store)
        with pytest.raises(InvalidMessageError, match="32767"):
            store.put_message(Message("T", b"x", properties={"p": "v" * (room - 2)}))
        assert snapshot(store) == before
    assert_as_rebuilt(tmp_path, {**LARGE, "enabled_append_prop_crc": prop_crc})


def test_odd_texts_come_back_as_java_would_store_them(tmp_path):
    with open_store(tmp_path, LARGE) as store:
        emoji = store.put_message(Message("T", keys=["😀键", "订单-1"], tags="标签"))
        # A lone surrogate is stored, and indexed, as a question mark.
        lone = store.put_message(Message("T", keys=["a\ud83dz"], tags="x\ud83d"))
        assert [message.phy_offset for message in store.query_message("T", "😀键")] == [emoji.phy_offset]
        assert [message.phy_offset for message in store.query_message("T", "标签", index_type="T")] == [0]
        assert [message.phy_offset for message in store.query_message("T", "a?z")] == [lone.phy_offset]
        assert store.message_at(lone.phy_offset).tags == "x?"
        assert [m.phy_offset for m in store.query_message("T", "x?", index_type="T")] == [lone.phy_offset]
        assert [m.phy_offset for m in store.get_message("T", tags="x?")] == [lone.phy_offset]
        # A client's own CRC property is dropped, an empty value is lost when it is read.
        put = store.put_message(Message("T", properties={"__CRC32#": "1", "e": "", "x": "1"}))
        assert store.message_at(put.phy_offset).properties == {"x": "1"}
    assert_as_rebuilt(tmp_path, LARGE)


@pytest.mark.parametrize("kind", ["ZLIB", "LZ4", "ZSTD"])
def test_compressed_bodies(tmp_path, kind):
    if kind != "ZLIB":
        pytest.importorskip({"LZ4": "lz4.frame", "ZSTD": "zstandard"}[kind])
    body = b"order placed, order paid, order shipped; " * 200
    stored = compress_body(body, kind)
    assert len(stored) < len(body)
    with open_store(tmp_path) as store:
        put = store.put_message(Message("T", stored, sys_flag=compression_flags(kind), keys=["k"]))
        message = store.message_at(put.phy_offset)
        assert message.body_stored == stored
        assert message.body == body
        assert message.crc == oracle.masked_crc(stored)
        assert put.size == 92 + len(stored) + len("KEYS\x01k\x02")
        assert store.query_message("T", "k")[0].body == store.get_message("T").messages[0].body == body
        again = store.put_message(message)
        assert store.message_at(again.phy_offset).body_stored == stored
        assert store.message_at(again.phy_offset).sys_flag == compression_flags(kind)


def test_transactions(tmp_path):
    with open_store(tmp_path) as store:
        store.put_message(Message("T", b"0", keys=["none"]))
        states = {"prepared": 0x4, "commit": 0x8, "rollback": 0xC}
        puts = {
            name: store.put_message(Message("T", keys=[name], sys_flag=flag, prepared_transaction_offset=77))
            for name, flag in states.items()
        }
        last = store.put_message(Message("T", keys=["none"]))
        assert {name: put.queue_offset for name, put in puts.items()} == {"prepared": 0, "commit": 1, "rollback": 0}
        assert last.queue_offset == 2
        assert [message.phy_offset for message in store.get_message("T")] == [
            0, puts["commit"].phy_offset, last.phy_offset,
        ]  # fmt: skip
        assert {name: len(store.query_message("T", name)) for name in states} == {
            "prepared": 1,
            "commit": 1,
            "rollback": 0,
        }
        for name, put in puts.items():
            message = store.message_at(put.phy_offset)
            assert message.transaction_type == states[name]
            assert message.prepared_transaction_offset == 77
    assert_as_rebuilt(tmp_path, GEOMETRY)


@pytest.mark.parametrize("levels", [golden.DEFAULT_DELAY_LEVEL, "2s 30m"])
def test_delayed_messages_carry_the_time_they_are_due(tmp_path, levels):
    clock = Clock()
    options = {"message_delay_level": levels}
    with open_store(tmp_path, clock=clock, **options) as store:
        delays = store.config.delay_levels
        for level in (1, 2, len(delays), len(delays) + 1, 99):
            clock.now += 1001
            put = store.put_message(
                Message("SCHEDULE_TOPIC_XXXX", tags="TagA", keys=["k"], properties={"DELAY": str(level)}), level
            )
            queue = store.queues.find("SCHEDULE_TOPIC_XXXX", level)
            due = clock.now + delays[min(level, len(delays)) - 1]
            assert queue.unit(put.queue_offset).tags_code == due
        for level in ("0", "-1"):
            put = store.put_message(Message("SCHEDULE_TOPIC_XXXX", tags="TagA", properties={"DELAY": level}))
            assert store.queues.find("SCHEDULE_TOPIC_XXXX", 0).unit(put.queue_offset).tags_code == 2598919
        put = store.put_message(Message("Other", tags="TagA", properties={"DELAY": "3"}))
        assert store.queues.find("Other", 0).unit(put.queue_offset).tags_code == 2598919
    assert_as_rebuilt(tmp_path, {**GEOMETRY, **options})


def test_filter_by_tags(tmp_path):
    with open_store(tmp_path, LARGE) as store:
        # Tags with one hash: the text decides, where a broker leaves it to the client.
        tags = ["AaAa", "BBBB", None, "AaBB", "x", ""]
        for number in range(9):
            for tag in tags:
                store.put_message(Message("T", b"%d" % number, tags=tag))

        def get(wanted, count=200):
            got, at = [], 0
            while (result := store.get_message("T", 0, at, count, tags=wanted)).next_queue_offset > at:
                got += result.messages
                at = result.next_queue_offset
                if at >= result.max_queue_offset:
                    break
            return [message.tags for message in got]

        assert get("AaAa") == ["AaAa"] * 9
        assert get("AaAa || x") == ["AaAa", "x"] * 9
        assert get(["BBBB", "AaBB"]) == ["BBBB", "AaBB"] * 9
        assert len(get(None)) == len(get("*")) == len(get("")) == 54
        assert get("none") == []


# ---------------------------------------------------------------------------------------------------------- exact query


def offsets(messages) -> list[int]:
    return [message.phy_offset for message in messages]


def test_a_range_inside_the_second_that_the_index_rounds_away(tmp_path):
    # Section 11.5: the index keeps whole seconds since the file's begin, so 2.000 s reads as 1.500 s.
    clock = Clock(T0 + 500)
    with open_store(tmp_path, clock=clock) as store:
        store.put_message(Message("T", keys=["other"]))
        clock.now = T0 + 2000
        put = store.put_message(Message("T", keys=["k"]))
        assert store.query_message("T", "k", begin=T0 + 2000, end=T0 + 2999, compat=True) == []
        assert offsets(store.query_message("T", "k", begin=T0 + 2000, end=T0 + 2999)) == [put.phy_offset]
        assert offsets(store.query_message("T", "k", begin=T0 + 2000, end=T0 + 2000)) == [put.phy_offset]
        assert store.query_message("T", "k", begin=T0 + 1500, end=T0 + 1999) == []
        assert store.query_message("T", "k", begin=T0 + 2001) == []
        assert store.query_message("T", "k", end=T0 + 1999) == []
        assert store.query_offsets("T", "k", begin=T0 + 1500, end=T0 + 1999) == [put.phy_offset]


def test_ranges_are_exact_to_the_millisecond(tmp_path):
    clock = Clock()
    times = {}
    with open_store(tmp_path, clock=clock) as store:
        for number in range(80):
            clock.now += (1, 250, 999, 1000, 1001, 40000)[number % 6]
            times[store.put_message(Message("T", keys=[f"k{number % 2}"])).phy_offset] = clock.now, number % 2
        assert len(store.index_service.names) > 4
        moments = sorted({time + delta for time, _ in times.values() for delta in (-1, 0, 1)})
        for begin in moments[::7]:
            for end in moments[::11]:
                wanted = [phy for phy, (time, which) in times.items() if which == 0 and begin <= time <= end]
                assert offsets(store.query_message("T", "k0", 1000, begin, end)) == wanted[::-1]


def test_a_clock_that_steps_back_hides_nothing(tmp_path):
    # Section 11.7: an entry from before the file's begin is stored with the begin's time and ends Java's walk.
    clock = Clock(T0 + 10_000)
    with open_store(tmp_path, clock=clock) as store:
        store.put_message(Message("T", keys=["other"]))
        clock.now = T0 + 20_000
        late = store.put_message(Message("T", keys=["k"]))
        clock.now = T0 + 5_000
        early = store.put_message(Message("T", keys=["k"]))
        clock.now = T0 + 30_000
        store.put_message(Message("T", keys=["other"]))
        begin, end = T0 + 15_000, T0 + 25_000
        assert store.query_message("T", "k", begin=begin, end=end, compat=True) == []
        assert offsets(store.query_message("T", "k", begin=begin, end=end)) == [late.phy_offset]
        assert offsets(store.query_message("T", "k", begin=T0 + 5_000, end=T0 + 5_000)) == [early.phy_offset]
        # Newest means last stored, not latest by the clock.
        assert offsets(store.query_message("T", "k")) == [early.phy_offset, late.phy_offset]
        live = snapshot(store, [("T", "k")])
    with MessageStore.open(tmp_path) as store:
        assert snapshot(store, [("T", "k")]) == live
    assert_as_rebuilt(tmp_path, GEOMETRY)


def test_the_first_entry_of_a_rolled_file_is_found_at_its_time(tmp_path):
    # Section 11.6: its difference counts from the file before, its begin is its own.
    clock = Clock()
    with open_store(tmp_path, {**GEOMETRY, "max_index_num": 4}, clock=clock) as store:
        for number in range(3):
            store.put_message(Message("T", keys=[f"k{number}"]))
        clock.now += 60_000
        put = store.put_message(Message("T", keys=["first"]))
        assert len(store.index_service.names) == 2
        begin, end = clock.now - 1000, clock.now + 1000
        assert store.query_message("T", "first", begin=begin, end=end, compat=True) == []
        assert offsets(store.query_message("T", "first", begin=begin, end=end)) == [put.phy_offset]
        assert offsets(store.query_message("T", "first", begin=clock.now, end=clock.now)) == [put.phy_offset]
    assert_as_rebuilt(tmp_path, {**GEOMETRY, "max_index_num": 4})


def test_colliding_hashes_across_topics_and_keys(tmp_path):
    with open_store(tmp_path, LARGE) as store:
        names = [("AaTopic", "BB"), ("BBTopic", "Aa"), ("AaTopic", "Aa"), ("T", "AaAa"), ("T", "BBBB"), ("T", "AaBB")]
        puts = {name: [] for name in names}
        for _ in range(40):
            for topic, key in names:
                puts[topic, key].append(store.put_message(Message(topic, keys=[key])).phy_offset)
        for (topic, key), wanted in puts.items():
            exact = store.query_message(topic, key, 1000)
            assert offsets(exact) == wanted[::-1]
            assert {message.topic for message in exact} == {topic}
            assert {tuple(message.keys) for message in exact} == {(key,)}
        foreign = store.query_offsets("AaTopic", "BB")
        assert len(foreign) == 64
        assert set(foreign) & set(puts["BBTopic", "Aa"])
    assert_as_rebuilt(tmp_path, LARGE)


def test_a_key_given_several_times_is_found_once(tmp_path):
    with open_store(tmp_path) as store:
        put = store.put_message(Message("T", properties={"KEYS": "k k k", "UNIQ_KEY": "k"}))
        assert store.query_offsets("T", "k") == [put.phy_offset] * 4
        assert len(store.query_message("T", "k", compat=True)) == 4
        exact = store.query_message("T", "k")
        assert offsets(exact) == [put.phy_offset]
        assert not exact.truncated


def test_more_than_64_hits(tmp_path):
    with open_store(tmp_path, LARGE) as store:
        puts = [put.phy_offset for put in store.put_messages([Message("T", keys=["k"])] * 300)]
        newest = puts[::-1]
        everything = store.query_message("T", "k", max_num=1000)
        assert (offsets(everything), everything.truncated) == (newest, False)
        assert store.query_message("T", "k", max_num=300).truncated is False
        some = store.query_message("T", "k", max_num=299)
        assert (offsets(some), some.truncated) == (newest[:299], True)
        default = store.query_message("T", "k")
        assert (offsets(default), default.truncated) == (newest[:64], True)
        assert store.query_offsets("T", "k", max_num=1000) == newest[:64]
        assert offsets(store.query_message("T", "k", max_num=1000, compat=True)) == puts[-64:]
        assert offsets(store.query_message("T", "k", max_num=5, compat=True)) == puts[-5:]
        none = store.query_message("T", "k", max_num=0)
        assert (list(none), none.truncated) == ([], True)
        assert store.query_message("T", "unknown").truncated is False


def test_without_an_index(tmp_path):
    with open_store(tmp_path, message_index_enable=False) as store:
        put = store.put_message(Message("T", keys=["k"]))
        assert store.query_message("T", "k") == []
        assert store.query_offsets("T", "k") == []
        assert store.query_message("T", "k", compat=True) == []
        assert offsets(store.get_message("T")) == [put.phy_offset]
    assert not (tmp_path / "index").exists()


# ---------------------------------------------------------------------------------------------------- offsets by time


def test_offset_by_time_of_our_own_store(tmp_path):
    clock = Clock()
    times = []
    with open_store(tmp_path, clock=clock) as store:
        assert store.offset_by_time("T", 0, T0) == 0
        for number in range(45):
            # Some share their time with others, also across the border of two queue files (10 units each).
            clock.now += (0, 0, 1, 1500)[number % 4] if number % 10 else 0
            store.put_message(Message("T"))
            times.append(clock.now)
        moments = {time + delta for time in times for delta in (-1, 0, 1)} | {0, -5, 2**63 - 1}
        for moment in sorted(moments):
            lower = next((number for number, time in enumerate(times) if time >= moment), 45)
            upper = max([number for number, time in enumerate(times) if time <= moment], default=0)
            assert store.offset_by_time("T", 0, moment) == lower
            assert store.offset_by_time("T", 0, moment, "upper") == upper
        with pytest.raises(ValueError, match="boundary"):
            store.offset_by_time("T", 0, 0, "middle")


# --------------------------------------------------------------------------------------------------- the index service


@pytest.fixture
def standing_clock(monkeypatch):
    """The wall clock from which index files get their names, set by hand."""
    clock = types.SimpleNamespace(now=T0, slept=[])
    monkeypatch.setattr(
        index_service,
        "time",
        types.SimpleNamespace(time_ns=lambda: clock.now * 1_000_000, sleep=clock.slept.append),
    )
    return clock


def test_index_names_increase_while_the_clock_stands_still(tmp_path, standing_clock):
    with open_store(tmp_path, {**GEOMETRY, "max_index_num": 2}) as store:
        for number in range(30):
            if number == 20:
                standing_clock.now -= 3_600_000  # The hour that summer time repeats.
            store.put_message(Message("T", keys=[f"k{number}"]))
        names = store.index_service.names
        assert len(names) == 30
        assert all(re.fullmatch("[0-9]{17}", name) for name in names)
        assert list(names) == sorted(set(names))
        assert [len(store.query_message("T", f"k{number}")) for number in range(30)] == [1] * 30
    assert sorted(os.listdir(tmp_path / "index")) == list(names)
    assert_as_rebuilt(tmp_path, {**GEOMETRY, "max_index_num": 2})


@pytest.mark.parametrize("last", [Message("T"), Message("T", keys=["z"], sys_flag=0xC)])
@pytest.mark.parametrize("entries", [0, 3])
def test_a_record_without_keys_makes_an_index_file_as_in_java(tmp_path, last, entries):
    # RocketMQ 5.5.0 takes the current index file, or makes the next one, before it looks for keys: seen with the real
    # store for a message without keys and for a rolled back one, as the first of all and behind a full file.
    geometry = {**GEOMETRY, "max_index_num": 4}
    with open_store(tmp_path, geometry) as store:
        if entries:
            store.put_message(Message("T", keys=["a", "b", "c"]))
        store.put_message(last)
        assert len(store.index_service.names) == (2 if entries else 1)
    files = oracle.read_files(tmp_path)
    rebuilt = oracle.comparable(oracle.rebuild(files, oracle.geometry(geometry)), ("index",))
    assert oracle.comparable(files, ("index",)) == rebuilt


def test_index_names_after_odd_ones():
    name_after = index_service.index_name_after
    assert name_after("99999999999999999", T0) == "100000000000000000"
    assert int(name_after("20231114221319999", 0)) > 20231114221319999
    # 23:59:59.999 is followed by the next day.
    assert name_after("20231231235959999", 0) == "20240101000000000"
    assert name_after("00000000000000007", 0) > "00000000000000007"


def failing_creation(monkeypatch, failures: int) -> list[str]:
    """Let the next `failures` creations of an index file fail as on a full disk; the list gets every attempt."""
    attempts: list[str] = []
    create = IndexFile.create.__func__

    def sometimes(cls, path, *arguments, **options):
        attempts.append(os.fspath(path))
        if len(attempts) <= failures:
            raise OSError(28, "No space left on device", os.fspath(path))
        return create(cls, path, *arguments, **options)

    monkeypatch.setattr(index_service.IndexFile, "create", classmethod(sometimes))
    return attempts


def test_an_index_file_is_created_at_the_third_try(tmp_path, monkeypatch, standing_clock):
    attempts = failing_creation(monkeypatch, 2)
    with open_store(tmp_path) as store:
        put = store.put_message(Message("T", keys=["k"]))
        assert len(attempts) == 3
        assert standing_clock.slept == [1.0, 1.0]
        assert not store.index_service.index_error
        assert offsets(store.query_message("T", "k")) == [put.phy_offset]
        assert store.put_message(Message("T", keys=["k"])).queue_offset == 1
        assert len(attempts) == 3
    assert_as_rebuilt(tmp_path, GEOMETRY)


def test_when_three_tries_fail_the_store_takes_no_more_writes(tmp_path, monkeypatch, standing_clock):
    geometry = {**GEOMETRY, "max_index_num": 5}
    store = open_store(tmp_path, geometry)
    for number in range(4):
        store.put_message(Message("T", b"%d" % number, keys=[f"k{number}"]))
    with monkeypatch.context() as patched:
        attempts = failing_creation(patched, 3)
        with pytest.raises(DiskFullError, match=r"3 tries .*No space left.*open the store again") as caught:
            store.put_message(Message("T", b"4", keys=["k4"]))
        assert caught.value.path == str(tmp_path / "index")
        assert len(attempts) == 3
        assert len(standing_clock.slept) == 2
        assert store.index_service.index_error
    # The disk has room again, but what was missed must be indexed first.
    for write in (
        lambda: store.put_message(Message("T")),
        lambda: store.put_messages([Message("T")]),
        lambda: store.put_message_batch([Message("T")]),
        store.flush,
    ):
        with pytest.raises(StorePoisonedError, match="open it again"):
            write()
    # Reads go on; the message itself is in the log and in its queue.
    assert [message.body for message in store.get_message("T")] == [b"0", b"1", b"2", b"3", b"4"]
    assert len(store.query_message("T", "k3")) == 1
    assert store.query_message("T", "k4") == []
    store.close()
    assert (tmp_path / "abort").exists()
    with open_store(tmp_path, geometry) as store:
        assert not store.recovery_report.clean
        assert store.recovery_report.index_entries_written == 1
        assert [message.body for message in store.query_message("T", "k4")] == [b"4"]
        assert store.put_message(Message("T", b"5", keys=["k5"])).queue_offset == 5
        assert [len(store.query_message("T", f"k{number}")) for number in range(6)] == [1] * 6
    assert not (tmp_path / "abort").exists()
    assert_as_rebuilt(tmp_path, geometry)


def test_a_record_half_indexed_is_completed(tmp_path, monkeypatch, standing_clock):
    # The file becomes full in the middle of a record's keys and the next cannot be made.
    geometry = {**GEOMETRY, "max_index_num": 5}
    store = open_store(tmp_path, geometry)
    with monkeypatch.context() as patched:
        store.put_message(Message("T", keys=["a", "b"]))
        failing_creation(patched, 3)
        with pytest.raises(DiskFullError):
            store.put_message(Message("T", keys=["c", "d", "e", "f"], tags="t"))
    store.close()
    with open_store(tmp_path, geometry) as store:
        assert store.recovery_report.index_entries_written == 3
        for key in "abcdef":
            assert len(store.query_offsets("T", key)) == 1
        assert len(store.query_offsets("T", "t", index_type="T")) == 1
    assert_as_rebuilt(tmp_path, geometry)


def test_no_writes_after_a_failed_flush(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    store.put_message(Message("T", b"0", keys=["k"]))
    with monkeypatch.context() as patched:

        def fail() -> None:
            raise OSError(5, "Input/output error")

        patched.setattr(MappedFile, "flush", lambda mapped_file: fail())
        with pytest.raises(OSError, match="Input/output"):
            store.flush()
    with pytest.raises(StorePoisonedError, match="Input/output"):
        store.put_message(Message("T", b"1"))
    assert [message.body for message in store.query_message("T", "k")] == [b"0"]
    store.close()
    assert (tmp_path / "abort").exists()
    with open_store(tmp_path) as store:
        assert store.put_message(Message("T", b"1")).queue_offset == 1
