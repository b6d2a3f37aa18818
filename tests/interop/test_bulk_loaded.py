"""A store that many tasks wrote is one to RocketMQ: it reads every record, unit and key, and leaves the files alone."""

from __future__ import annotations

import os

import oracle
import pytest
from answers import assert_same, dump
from peer import copy_store

from rmqstore import MessageStore, StoreConfig
from rmqstore.spark.bulk_load import load_spooled, spool_rows, start_plan
from rmqstore.spark.mapper import Mapper

pa = pytest.importorskip("pyarrow")

pytestmark = pytest.mark.java

T0 = 1700000000000


def test_java_opens_a_bulk_loaded_store(java_store, tmp_path):
    config = StoreConfig(
        mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200, max_hash_slot_num=10, max_index_num=20
    )
    table = pa.table(
        {
            "topic": [f"Topic{i % 2}" for i in range(120)],
            "queue_id": pa.array([i % 3 for i in range(120)], pa.int32()),
            "keys": [[f"KEY-{i}", "all"] for i in range(120)],
            "tags": [f"t{i % 4}" for i in range(120)],
            "body": [b"order %d " % i * (i % 9) for i in range(120)],
            "store_timestamp": pa.array([T0 + i * 777 for i in range(120)], pa.int64()),
        }
    )
    root = tmp_path / "store"
    os.mkdir(root)
    plan = start_plan(str(root), config, keep_timestamps=True)
    summaries = [spool_rows(plan, number, table.slice(number * 30, 30).to_batches()) for number in range(4)]

    def mapper(function, plan, tasks):
        return [function(plan, task) for task in tasks]

    load_spooled(Mapper(mapper, 2), plan, summaries)
    with MessageStore.open(root, config=config, read_only=True) as store:
        ours = dump(store)
    copy = copy_store(root, tmp_path / "copy")
    assert_same(ours, java_store.dump(copy, config, in_place=True))
    before, after = (oracle.comparable(oracle.read_files(path)) for path in (root, copy))
    assert sorted(before) == sorted(after)
    assert [path for path in before if before[path] != after[path]] == []
