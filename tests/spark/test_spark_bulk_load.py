"""Bulk load: the bytes of one process that puts the same rows, however they are cut; what is refused leaves nothing."""

import datetime
import functools
import os
import random

import oracle
import pytest

import rmqstore
import rmqstore.spark
from rmqstore import InvalidMessageError, Message, MessageStore, StoreConfig, StoreError

pa = pytest.importorskip("pyarrow")
F = pytest.importorskip("pyspark.sql.functions")

pytestmark = [pytest.mark.spark, pytest.mark.java]

T0 = 1700000000000
GEOMETRIES = {
    "small": StoreConfig(
        mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200, max_hash_slot_num=10, max_index_num=20
    ),
    "extension": StoreConfig(
        mapped_file_size_commit_log=8192,
        mapped_file_size_consume_queue=400,
        max_hash_slot_num=100,
        max_index_num=50,
        enable_consume_queue_ext=True,
        enabled_append_prop_crc=True,
        mapped_file_size_consume_queue_ext=1024,
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


def files(root):
    return oracle.comparable(oracle.read_files(root), FILES)


@pytest.fixture
def three_partitions(spark, request):
    """The session, with several partitions however few rows there are."""
    for name, value in (("adaptive.coalescePartitions.enabled", "false"), ("shuffle.partitions", "3")):
        request.addfinalizer(
            functools.partial(spark.conf.set, f"spark.sql.{name}", spark.conf.get(f"spark.sql.{name}"))
        )
        spark.conf.set(f"spark.sql.{name}", value)
    return spark


def frame_of(spark, table):
    rows = table.to_pylist()
    random.Random(3).shuffle(rows)
    for row in rows:
        row["properties"] = None if row["properties"] is None else dict(row["properties"])
        assert isinstance(row["store_timestamp"], datetime.datetime)
    schema = (
        "topic string, queue_id int, keys array<string>, tags string, body binary, properties map<string,string>, "
        "flag int, born_timestamp long, store_timestamp timestamp, born_host string, reconsume_times int"
    )
    return spark.createDataFrame(rows, schema)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_byte_is_that_of_one_process(three_partitions, tmp_path, name):
    config, table = GEOMETRIES[name], table_of(300)
    with MessageStore.open(tmp_path / "one", config=config) as store:
        store.put_table(table, keep_timestamps=True)
    df = frame_of(three_partitions, table)
    assert df.orderBy("store_timestamp").mapInArrow(lambda batches: batches, df.schema).rdd.getNumPartitions() == 3
    report = rmqstore.spark.bulk_load(df, tmp_path / "many", config=config)
    assert files(tmp_path / "many") == files(tmp_path / "one")
    checkpoints = [(tmp_path / each / "checkpoint").read_bytes() for each in ("one", "many")]
    assert checkpoints[0] == checkpoints[1]
    assert sorted(os.listdir(tmp_path / "many")) == sorted(os.listdir(tmp_path / "one"))
    assert (report.path, report.records) == (str(tmp_path / "many"), 300)
    assert report.segments == len(os.listdir(tmp_path / "many" / "commitlog"))
    assert list(rmqstore.verify(tmp_path / "many", config)) == []
    with MessageStore.open(tmp_path / "many", config=config) as store:
        assert store.recovery_report.clean
        assert store.commit_log.max_offset == report.log_bytes
        store.put_message(Message("Orders", b"more"))


def test_what_is_refused_leaves_nothing(three_partitions, tmp_path):
    config, load = GEOMETRIES["small"], rmqstore.spark.bulk_load
    df = frame_of(three_partitions, table_of(30))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises(StoreError, match="there is something already"):
        load(df, tmp_path / "there", config=config)
    with pytest.raises(ValueError, match="no column nonsense"):
        load(df, tmp_path / "bad", config=config, order_by=("nonsense",))
    for change, order_by, message in [
        ({"body": "repeat(body, 9999)"}, ("store_timestamp",), r"row \d+"),
        ({"topic": "'a/b'"}, ("store_timestamp",), "row 0"),
        ({"topic": "topic"}, ("flag", "topic"), None),
        ({"flag": "-flag"}, ("flag",), "store timestamp"),
        ({"_corrupt": "'BAD_BODY_CRC'"}, ("store_timestamp",), "rows are marked"),
        ({"weight": "1.5d"}, ("store_timestamp",), "column 'weight' is not one that a message has"),
    ]:
        changed = df.withColumns({name: F.expr(text) for name, text in change.items()})
        if message is None:
            # In the order of another column that rises with the store time.
            assert load(changed, tmp_path / "good", config=config, order_by=order_by).records == 30
            continue
        with pytest.raises(InvalidMessageError, match=message):
            load(changed, tmp_path / "bad", config=config, order_by=order_by)
    assert sorted(os.listdir(tmp_path)) == ["good", "there"]


def test_without_store_times_and_without_rows(spark, tmp_path):
    config = GEOMETRIES["small"]
    df = frame_of(spark, table_of(5)).drop("store_timestamp")
    report = rmqstore.spark.bulk_load(df.where("false"), tmp_path / "empty", config=config, order_by=())
    assert (report.records, report.segments, report.log_bytes) == (0, 0, 0)
    assert rmqstore.spark.bulk_load(df, tmp_path / "now", config=config, order_by=("flag",)).records == 5
    with MessageStore.open(tmp_path / "now", config=config) as store:
        assert store.scan(["flag"]).read_all()["flag"].to_pylist() == list(range(5))
