"""Queues in RocksDB as a Spark DataFrame: of a broker that was closed and of one that was killed, against one scan."""

from __future__ import annotations

import pytest

pytest.importorskip("rocksdict")

import rocksdb_stores

from rmqstore import MessageStore

pytestmark = [pytest.mark.spark, pytest.mark.java]

COLUMNS = ["topic", "queue_id", "queue_offset", "phy_offset"]


@pytest.mark.parametrize("name", ["store", "store.killed"])
def test_every_message_once(spark, tmp_path, name):
    path = rocksdb_stores.unpack(name, tmp_path)
    with MessageStore.open(path, read_only=True) as store:
        expected = sorted(tuple(row.values()) for row in store.scan(COLUMNS).read_all().to_pylist())
        queues = {(topic, queue_id) for topic, queue_id in store.queues.keys()}
    for mode in ("commitlog", "queue"):
        frame = spark.read.format("rocketmq-store").options(mode=mode, partition_bytes="64k").load(str(path))
        rows = sorted(tuple(row) for row in frame.select(*COLUMNS).collect())
        if mode == "queue":
            # What no queue leads to, as a message that was rolled back, is in the log alone.
            missing = set(expected) - set(rows)
            assert set(rows) <= set(expected) and len(rows) == len(set(rows))
            assert {row[:2] for row in rows} == queues and len(missing) < len(expected) // 10
        else:
            assert rows == expected
        some = frame.where("topic = 'Orders' and queue_id = 1").select("queue_offset").collect()
        assert sorted(row.queue_offset for row in some) == [row[2] for row in expected if row[:2] == ("Orders", 1)]
