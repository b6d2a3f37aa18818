"""Bulk load: the bytes of one process that puts the same rows, however they are cut; what is refused leaves nothing.

All but the last section runs the tasks without Spark.
"""

import datetime
import functools
import itertools
import os
import random
import sys

import oracle
import pytest

import rmqstore
import rmqstore.spark.rebuild
from rmqstore import InvalidMessageError, Message, MessageStore, StoreConfig, StoreError
from rmqstore.spark.bulk_load import load_spooled, spool_rows, start_plan
from rmqstore.spark.mapper import Mapper

pa = pytest.importorskip("pyarrow")

T0 = 1700000000000
GEOMETRIES = {
    "small": StoreConfig(
        mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200, max_hash_slot_num=10, max_index_num=20
    ),
    "property CRC": StoreConfig(
        mapped_file_size_commit_log=5003,
        mapped_file_size_consume_queue=2000,
        max_hash_slot_num=7,
        max_index_num=300,
        enabled_append_prop_crc=True,
        index_tags=False,
    ),
    "extension": StoreConfig(
        mapped_file_size_commit_log=8192,
        mapped_file_size_consume_queue=400,
        max_hash_slot_num=100,
        max_index_num=50,
        enable_consume_queue_ext=True,
        mapped_file_size_consume_queue_ext=1024,
    ),
    "no index": StoreConfig(
        mapped_file_size_commit_log=1 << 16, mapped_file_size_consume_queue=200, message_index_enable=False
    ),
}
FILES = ("commitlog", "consumequeue", "consumequeue_ext", "index")


def table_of(num, seed=0):
    rnd = random.Random(seed)
    return pa.table(
        {
            "topic": [rnd.choice(["Orders", "Plain", "Other"]) for _ in range(num)],
            "queue_id": pa.array([rnd.randrange(3) for _ in range(num)], pa.int32()),
            "keys": [[f"k{rnd.randrange(50)}" for _ in range(rnd.randrange(3))] for _ in range(num)],
            "tags": [rnd.choice([None, "a", "BB"]) for _ in range(num)],
            "body": [bytes([i % 256]) * rnd.randrange(700) for i in range(num)],
            "properties": pa.array(
                [[("UNIQ_KEY", f"U{i:05}"), ("n", str(i))] if i % 3 else None for i in range(num)],
                pa.map_(pa.string(), pa.string()),
            ),
            "flag": pa.array(range(num), pa.int32()),
            "born_timestamp": pa.array([None if i % 5 == 0 else T0 - i for i in range(num)], pa.int64()),
            "store_timestamp": pa.array([T0 + i * 700 for i in range(num)], pa.timestamp("ms", "UTC")),
            "born_host": [None if i % 4 else f"10.0.0.{i % 7}:1234" for i in range(num)],
            "reconsume_times": pa.array([i % 3 for i in range(num)], pa.int32()),
        }
    )


def in_order(function, plan, tasks):
    return [function(plan, task) for task in tasks]


def twice_backwards(function, plan, tasks):
    first = [function(plan, task) for task in tasks[::-1]][::-1]
    again = [function(plan, task) for task in tasks]
    assert first == again
    return again


def loaded(work, table, config, cuts, mapper=in_order, parallelism=1, rows=100, keep_timestamps=True):
    """Load a table that is cut into partitions, each of batches of `rows` rows."""
    os.mkdir(work)
    plan = start_plan(str(work), config, keep_timestamps=keep_timestamps)
    bounds = [0, *cuts, table.num_rows]
    summaries = [
        spool_rows(plan, number, table.slice(first, end - first).combine_chunks().to_batches(max_chunksize=rows))
        for number, (first, end) in enumerate(itertools.pairwise(bounds))
    ]
    # In whatever order the tasks answer.
    return load_spooled(Mapper(mapper, parallelism), plan, summaries[::-1])


def files(root):
    return oracle.comparable(oracle.read_files(root), FILES)


@pytest.mark.parametrize("cuts", [(), (1, 2, 150, 150, 399), tuple(range(40, 400, 40))])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_byte_is_that_of_one_process(tmp_path, monkeypatch, name, cuts):
    monkeypatch.setattr(sys.modules["rmqstore.spark.rebuild"], "_SMALLEST_SPAN", 3)
    monkeypatch.setattr(sys.modules["rmqstore.spark.rebuild"], "_IDLE", 0)
    config, table = GEOMETRIES[name], table_of(400)
    with MessageStore.open(tmp_path / "one", config=config) as store:
        store.put_table(table, keep_timestamps=True)
    mapper = twice_backwards if cuts else in_order
    report = loaded(tmp_path / "many", table, config, cuts, mapper, parallelism=64, rows=17 if len(cuts) == 5 else 100)
    assert files(tmp_path / "many") == files(tmp_path / "one")
    checkpoints = [(tmp_path / each / "checkpoint").read_bytes() for each in ("one", "many")]
    assert checkpoints[0] == checkpoints[1]
    assert sorted(os.listdir(tmp_path / "many")) == sorted(os.listdir(tmp_path / "one"))
    assert report.records == 400 and report.segments == len(os.listdir(tmp_path / "many" / "commitlog"))
    assert list(rmqstore.verify(tmp_path / "many", config)) == []
    with MessageStore.open(tmp_path / "many", config=config) as store:
        assert store.recovery_report.clean
        assert store.commit_log.max_offset == report.log_bytes
        store.put_message(Message("Orders", b"more"))


def test_one_time_for_all(tmp_path):
    config = StoreConfig(
        mapped_file_size_commit_log=4096,
        mapped_file_size_consume_queue=200,
        max_hash_slot_num=10,
        max_index_num=20,
        clock=lambda: T0,
    )
    table = table_of(60).drop_columns(["store_timestamp"])
    with MessageStore.open(tmp_path / "one", config=config) as store:
        store.put_table(table)
    loaded(tmp_path / "many", table, config, (7, 30), keep_timestamps=False)
    assert files(tmp_path / "many") == files(tmp_path / "one")


def test_nothing_to_load(tmp_path):
    report = loaded(tmp_path / "s", table_of(1).slice(0, 0), GEOMETRIES["small"], (0,))
    assert (report.records, report.segments, report.log_bytes) == (0, 0, 0)
    with MessageStore.open(tmp_path / "s", config=GEOMETRIES["small"]) as store:
        assert store.commit_log.max_offset == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"body": [b"x" * 5000]}, "a segment of 4096 bytes holds at most 4088"),
        ({"topic": ["a/b"]}, "row 0: "),
        ({"properties": pa.array([[("DELAY", "3")]], pa.map_(pa.string(), pa.string()))}, "row 0 is not a plain message"),
        ({"sys_flag": pa.array([4], pa.int32())}, "row 0 is not a plain message"),
        ({"store_timestamp": pa.array([5], pa.int64())}, "store timestamps fall"),
        ({"_corrupt": ["BAD_BODY_CRC"]}, "rows are marked"),
        ({"weight": [1.5]}, "column 'weight' is none that a message has"),
    ],
)
def test_what_is_refused(tmp_path, change, message):
    good = pa.table({"topic": ["T"], "body": [b"x"], "store_timestamp": pa.array([T0], pa.int64())})
    bad = good
    for name, values in change.items():
        bad = bad.drop_columns([name]) if name in bad.column_names else bad
        bad = bad.append_column(name, pa.array(values) if isinstance(values, list) else values)
    os.mkdir(tmp_path / "s")
    plan = start_plan(str(tmp_path / "s"), GEOMETRIES["small"], keep_timestamps=True)
    with pytest.raises(InvalidMessageError, match=message):
        summaries = [spool_rows(plan, 0, good.to_batches()), spool_rows(plan, 1, bad.to_batches())]
        load_spooled(Mapper(in_order), plan, summaries)


# -------------------------------------------------------------------------------------------------------------- on Spark


@pytest.mark.spark
@pytest.mark.java
def test_on_spark(spark, request, tmp_path):
    table = table_of(300)
    config = StoreConfig(
        mapped_file_size_commit_log=1 << 16,
        mapped_file_size_consume_queue=6000,
        max_hash_slot_num=50,
        max_index_num=200,
    )
    with MessageStore.open(tmp_path / "one", config=config) as store:
        store.put_table(table, keep_timestamps=True)
    rows = table.to_pylist()
    random.Random(3).shuffle(rows)
    for row in rows:
        row["properties"] = None if row["properties"] is None else dict(row["properties"])
        assert isinstance(row["store_timestamp"], datetime.datetime)
    schema = (
        "topic string, queue_id int, keys array<string>, tags string, body binary, properties map<string,string>, "
        "flag int, born_timestamp long, store_timestamp timestamp, born_host string, reconsume_times int"
    )
    # Several partitions, however few rows there are.
    for name, value in (("adaptive.coalescePartitions.enabled", "false"), ("shuffle.partitions", "3")):
        request.addfinalizer(
            functools.partial(spark.conf.set, f"spark.sql.{name}", spark.conf.get(f"spark.sql.{name}"))
        )
        spark.conf.set(f"spark.sql.{name}", value)
    df = spark.createDataFrame(rows, schema)
    assert df.orderBy("store_timestamp").mapInArrow(lambda batches: batches, df.schema).rdd.getNumPartitions() == 3
    report = rmqstore.spark.bulk_load(df, tmp_path / "many", config=config)
    assert files(tmp_path / "many") == files(tmp_path / "one")
    assert (report.path, report.records) == (str(tmp_path / "many"), 300)

    # There is a store already; a row that cannot be stored; an order that is none.
    with pytest.raises(StoreError, match="there is something already"):
        rmqstore.spark.bulk_load(df, tmp_path / "many", config=config)
    with pytest.raises(InvalidMessageError, match="not a plain message"):
        rmqstore.spark.bulk_load(df.selectExpr("*", "4 as sys_flag"), tmp_path / "bad", config=config)
    with pytest.raises(ValueError, match="no column nonsense"):
        rmqstore.spark.bulk_load(df, tmp_path / "bad", config=config, order_by=("nonsense",))
    assert sorted(os.listdir(tmp_path)) == ["many", "one"]
