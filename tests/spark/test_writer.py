"""Appending a DataFrame to a store: order, options, what is refused, and that a failed job leaves nothing."""

from __future__ import annotations

import os

import golden
import pytest
from stores import SEGMENT, make_store, scanned, small_config

from rmqstore import MessageStore, StoreError, verify

pytestmark = [pytest.mark.spark, pytest.mark.java]

GEOMETRY = {
    "mapped_file_size_commit_log": str(SEGMENT),
    "mapped_file_size_consume_queue": "400",
    "max_hash_slot_num": "50",
    "max_index_num": "200",
}


def append(frame, path, mode="append", **options):
    frame.write.format("rocketmq-store").mode(mode).options(**options).save(str(path))


def numbered(spark, num, partitions=4):
    """A frame whose partitions hold consecutive numbers; one of its partitions is empty."""
    from pyspark.sql import functions as F

    frame = spark.range(0, num, 1, partitions)
    return frame.select(
        F.encode(F.format_string("body %05d", "id"), "utf-8").alias("body"),
        F.array(F.format_string("K%d", "id"), F.lit("all")).alias("keys"),
        (F.col("id") % 2).cast("int").alias("queue_id"),
        F.create_map(F.lit("number"), F.col("id").cast("string")).alias("properties"),
        F.timestamp_millis(F.col("id") + 1_700_000_000_000).alias("born_timestamp"),
    )


def test_rows_are_appended_in_the_order_of_the_partitions(spark, tmp_path):
    path = tmp_path / "store"
    # A new store is made; topic and tags are the same in all rows.
    append(numbered(spark, 700), path, topic="Orders", tags="EU", **GEOMETRY)
    append(numbered(spark, 30), path, topic="Late")
    columns = ["topic", "queue_id", "queue_offset", "tags", "keys", "properties", "body", "born_timestamp"]
    rows = scanned(path, columns)
    assert len(rows) == 730
    for i, row in enumerate(rows):
        number = i if i < 700 else i - 700
        assert row["body"] == b"body %05d" % number
        assert (row["topic"], row["tags"]) == (("Orders", "EU") if i < 700 else ("Late", None))
        assert (row["queue_id"], row["queue_offset"]) == (number % 2, number // 2)
        assert row["keys"] == [f"K{number}", "all"] and ("number", str(number)) in row["properties"]
        assert row["born_timestamp"].timestamp() == 1_700_000_000 + number / 1000
    with MessageStore.open(path, read_only=True) as store:
        assert len(store.query_message("Orders", "K699")) == 1
    assert not [finding for finding in verify(path) if finding.level == "error"]
    assert not [name for name in os.listdir(path) if name.startswith(".rmqstore")]


def test_a_copy_of_a_store(spark, tmp_path):
    # The rows of a read store, with their times, make the same records.
    source = make_store(tmp_path / "source", 300)
    frame = (
        spark.read.format("rocketmq-store")
        .option("corrupt", "report")
        .option("partition_bytes", "5000")
        .load(str(source))
    )
    append(frame, tmp_path / "copy", keep_timestamps="true", **GEOMETRY)
    assert scanned(tmp_path / "copy") == scanned(source)
    for file in sorted(os.listdir(source / "commitlog")):
        assert (tmp_path / "copy" / "commitlog" / file).read_bytes() == (source / "commitlog" / file).read_bytes()


def tree(path):
    # Opening a store for writing and closing it leaves its mark in these two.
    return {name: value for name, value in golden.tree(path).items() if name not in ("lock", "checkpoint")}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"queue_id": "first"}, "queue_id is 'first'; give a whole number"),
        ({"queue_id": "-1"}, "queue_id is '-1'; give 0 or more"),
        ({"queue_id": "2147483648"}, "queue_id is '2147483648'; give 2147483647 or less"),
        ({"keep_timestamps": "yes"}, "keep_timestamps is 'yes'; give true or false"),
    ],
)
def test_options_of_a_writer_that_make_no_sense(tmp_path, options, message):
    from rmqstore.spark.reader import spark_schema
    from rmqstore.spark.source import StoreSource

    source = StoreSource({"path": str(tmp_path / "store"), "topic": "A", **options})
    with pytest.raises(StoreError, match=message):
        source.writer(spark_schema(["body"]), False)
    assert not os.listdir(tmp_path)


def test_what_is_refused_changes_nothing(spark, tmp_path):
    path = make_store(tmp_path / "store", 50)
    before = tree(path)
    frame = numbered(spark, 40, 2)
    for bad, mode, options, message in (
        (frame, "overwrite", {"topic": "A"}, "only ever appended to"),
        (frame, "append", {"topic": "A", "tag": "x"}, "there is no option 'tag'"),
        (frame, "append", {"topic": "A", "queue_id": "1"}, "queue_id is a column and an option"),
        (frame, "append", {}, "topic"),
        (frame.withColumn("price", frame.queue_id), "append", {"topic": "A"}, "price"),
        # The last row cannot be stored.
        (
            frame.selectExpr("body", "if(queue_id = 1 and keys[0] = 'K39', repeat('T', 300), 'A') as topic"),
            "append",
            {},
            "row 39",
        ),
        (
            frame.selectExpr("if(keys[0] = 'K39', assert_true(false), body) as body"),
            "append",
            {"topic": "A"},
            "USER_RAISED|false",
        ),
        (frame.selectExpr("body", "'x' as _corrupt"), "append", {"topic": "A"}, "marked in column _corrupt"),
    ):
        with pytest.raises(Exception) as info:
            append(bad, path, mode, **options)
        assert any(each in str(info.value) for each in message.split("|")), str(info.value)[-1500:]
        assert tree(path) == before, message
    with MessageStore.open(path, config=small_config()) as store:
        with pytest.raises(Exception, match="open for writing"):
            append(frame, path, topic="A")
        assert store.commit_log.max_offset
    assert not [name for name in os.listdir(path) if name.startswith(".rmqstore")]
    append(frame.where("false"), path, topic="A")
    assert len(scanned(path)) == 50
