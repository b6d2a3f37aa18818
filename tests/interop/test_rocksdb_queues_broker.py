"""A real broker that keeps its queues in RocksDB, killed while clients send; rmqstore on what it left, and the broker on the queue
files that rmqstore makes of it.

The database has no log and is flushed rarely, so that a killed broker's queues are in its commit log alone.
"""

from __future__ import annotations

import os
import time

import pytest
from peer import copy_store
from test_broker import CONFIGS, GEOMETRY, Sent, orders, ours, received, said, wanted

pytest.importorskip("rocksdict")

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.errors import UnsupportedFormatError
from rmqstore.offline.rebuild import rebuild
from rmqstore.offline.rebuild_queue_database import rebuild_queue_database
from rmqstore.offline.verify import verify
from rmqstore.rocksdb.database import queue_databases

pytestmark = pytest.mark.java

ROCKSDB = {"storeType": "defaultRocksDB"}
assert CONFIGS["plain"] is GEOMETRY


def assert_has(store, sent, unsure=0):
    """Every queue holds, in order, what was acknowledged, and at most `unsure` messages more in all."""
    more = 0
    for topic, queue_id in sent.queues():
        got, at = [], store.min_queue_offset(topic, queue_id)
        while at < store.max_queue_offset(topic, queue_id):
            result = store.get_message(topic, queue_id, at, 32)
            got += [ours(message) for message in result]
            at = result.next_queue_offset
        acknowledged = [said(message) for message in sent.of_queue(topic, queue_id)]
        assert got[: len(acknowledged)] == acknowledged, (topic, queue_id)
        more += len(got) - len(acknowledged)
    assert more <= unsure


def assert_served(got, sent):
    """A broker handed out all that was acknowledged, in order, and at most the one message that was on its way at the kill."""
    expected = wanted(sent, "Orders", {})
    assert sum(map(len, expected.values())) == len(sent.messages) and len(expected) == 4
    for queue, messages in expected.items():
        assert got[queue][: len(messages)] == messages
    assert sum(map(len, got.values())) - sum(map(len, expected.values())) <= 1


@pytest.mark.parametrize("place", ["consumequeue", "consumequeue_rocksdb"])
def test_a_killed_broker_with_queues_in_rocksdb(java_broker, tmp_path, place):
    config = StoreConfig(**GEOMETRY)
    root = tmp_path / "store"
    sent = Sent()
    extra = {**ROCKSDB, "useSeparateStorePathForRocksdbCQ": place == "consumequeue_rocksdb"}
    with java_broker(root, config, extra=extra) as broker:
        broker.topic("Orders", 4)
        new = orders(0, 150)
        for message, answer in zip(new, broker.produce(new), strict=True):
            sent.by_java(message, answer)
        broker.dispatched()
        broker.shutdown()
    assert queue_databases(root) == (str(root / place),)
    with MessageStore.open(root, read_only=True, config=config) as store:
        assert_has(store, sent)
        assert store.undispatched is None and store.queue_database.completed == ()

    with java_broker(root, config, extra=extra) as broker:
        broker.topic("Orders", 4)
        with MessageStore.open(root, read_only=True, config=config) as follower:
            stream = orders(150, 400, queues=4)
            for message, answer in zip(stream, broker.producing(stream)):
                sent.by_java(message, answer)
                if message is stream[100]:
                    # Beside the live broker, whose database has nothing of it and which may have sent more by now.
                    broker_has = follower.queue_database.checkpoint
                    follower.refresh()
                    assert_has(follower, sent, unsure=len(stream))
                    assert follower.undispatched[0] >= broker_has
                if message is stream[250]:
                    broker.kill()
        assert not broker.alive
    assert len(sent.messages) >= 400

    with MessageStore.open(root, read_only=True, config=config) as store:
        assert_has(store, sent, unsure=1)
        begin, end = store.undispatched
        assert begin < end == store.commit_log.max_offset
        assert store.queue_database.damage == ()
    assert "queues_behind_log" in {finding.kind for finding in verify(root, config)}
    with pytest.raises(UnsupportedFormatError, match="RocksDB"):
        MessageStore.open(root, config=config)

    # The broker with queues in RocksDB on the database that rmqstore rebuilds.
    again = copy_store(root, tmp_path / "again")
    rebuild_queue_database(again, config)
    with java_broker(again, config, extra=extra) as broker:
        broker.topic("Orders", 4)
        assert_served(received(broker.consume("all", "Orders")), sent)
        broker.shutdown()

    report = rebuild(root, config=config)
    assert [os.path.basename(path) for path in report.moved_aside] == [f"{place}.rocksdb-1"]
    copied = copy_store(root, tmp_path / "copy")
    with MessageStore.open(copied, config=config) as store:
        assert_has(store, sent, unsure=1)
        end = store.max_queue_offset("Orders", 0)
        assert store.put_message(Message("Orders", b"one more")).queue_offset == end

    # The broker with storeType=default on the queue files: every message is there, and it goes on.
    with java_broker(root, config) as broker:
        broker.topic("Orders", 4)
        got = received(broker.consume("all", "Orders"))
        assert_served(got, sent)
        (answer,) = broker.produce(orders(900, 1))
        assert answer["status"] == "SEND_OK" and answer["queueOffset"] == len(got["Orders", 0])
        broker.shutdown()


def test_units_that_a_restart_does_not_bring_back(java_broker, tmp_path):
    """More segments than a recovery looks at: the restarted broker hands out what is left, and rmqstore all of it."""
    config = StoreConfig(**{**GEOMETRY, "mapped_file_size_commit_log": 16384})
    root = tmp_path / "store"
    sent = Sent()
    extra = {**ROCKSDB, "commitLogRecoverMaxNum": 3}
    with java_broker(root, config, extra=extra) as broker:
        broker.topic("Orders", 4)
        new = orders(0, 600)
        for message, answer in zip(new, broker.produce(new), strict=True):
            sent.by_java(message, answer)
        broker.dispatched()
        time.sleep(0.5)
        broker.kill()
    with java_broker(root, config, extra=extra) as broker:
        lost = len(sent.messages) - len(broker.consume("all", "Orders"))
        broker.shutdown()
    with MessageStore.open(root, read_only=True, config=config) as store:
        assert_has(store, sent)
        assert bool(store.queue_database.completed) == bool(lost)
    kinds = {finding.kind for finding in verify(root, config)}
    assert ("missing_unit" in kinds) == bool(lost)
    assert lost > 100

    # The database with all units again: the broker goes on as before, now with what the kill took.
    copied = copy_store(root, tmp_path / "copy")
    report = rebuild_queue_database(copied, config)
    assert report.units == 600
    with java_broker(copied, config, extra=ROCKSDB) as broker:
        broker.topic("Orders", 4)
        assert received(broker.consume("everything", "Orders")) == wanted(sent, "Orders", {})
        (answer,) = broker.produce(orders(900, 1))
        assert answer["status"] == "SEND_OK" and answer["queueOffset"] == 150
        broker.shutdown()
    with MessageStore.open(copied, read_only=True, config=config) as store:
        assert store.undispatched is None and store.max_queue_offset("Orders", 0) == 151

    rebuild(root, config=config)
    with java_broker(root, config) as broker:
        broker.topic("Orders", 4)
        assert received(broker.consume("everything", "Orders")) == wanted(sent, "Orders", {})
        broker.shutdown()
