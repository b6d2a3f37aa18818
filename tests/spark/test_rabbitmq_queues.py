"""RabbitMQ's queues through Spark: the rows are those of `Queue.batches`, however the queues are cut."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import golden_rabbitmq
import pytest

pytestmark = pytest.mark.spark

CASES = [
    "02-kill9-segment-plus-journal", "12-clean-msgstore", "13-clean-fanout-refcount", "17-clean-lazy-transient",
    "18-clean-priority", "19-clean-v2", "30-kill9-default-2048-segments", "32-kill9-gc-merged-files",
]  # fmt: skip


@pytest.fixture(scope="module")
def vhosts(tmp_path_factory):
    """A node's data directory with several vhosts in it."""
    from rmqstore.rabbitmq.layout import vhost_directory

    root = tmp_path_factory.mktemp("rabbitmq")
    for case in CASES:
        path = golden_rabbitmq.unpack(case, root / "unpacked" / case)
        name = (Path(path) / ".vhost").read_text()
        target = root / "data" / "msg_stores" / "vhosts" / vhost_directory(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)
    return root / "data"


def expected(root, columns) -> list[dict]:
    from rmqstore.rabbitmq import Vhost, find_vhosts

    rows = []
    for path in find_vhosts(root):
        with Vhost.open(path) as vhost:
            rows += [row for queue in vhost.queues() for batch in queue.batches(columns) for row in batch.to_pylist()]
    return rows


def key(row) -> tuple:
    return row["vhost"], row["queue"], row["level"] or 0, row["seq_id"]


@pytest.mark.parametrize("partition_bytes", [None, "4k"])
def test_rows_are_those_of_the_queues(spark, vhosts, partition_bytes):
    reader = spark.read.format("rabbitmq-queue")
    if partition_bytes is not None:
        reader = reader.option("partition_bytes", partition_bytes)
    frame = reader.load(os.fspath(vhosts))
    found = [row.asDict() for row in frame.collect()]
    wanted = expected(vhosts, frame.columns)
    assert len(found) == len(wanted) > 1000
    for row in wanted:
        for name in ("expiry", "timestamp"):
            # Spark gives times without a zone, as local ones.
            row[name] = None if row[name] is None else row[name].astimezone().replace(tzinfo=None)
    for row in found:
        row["msg_id"], row["body"] = bytes(row["msg_id"]), bytes(row["body"])
    assert sorted(found, key=key) == sorted(wanted, key=key)
    whole = spark.read.format("rabbitmq-queue").load(os.fspath(vhosts)).rdd.getNumPartitions()
    assert (frame.rdd.getNumPartitions() > whole) == (partition_bytes is not None)


def test_columns_queues_and_schemas(spark, vhosts):
    from rmqstore.errors import StoreError
    from rmqstore.rabbitmq import Vhost, find_vhosts

    path = find_vhosts(vhosts)[0]
    with Vhost.open(path) as vhost:
        queue = max(vhost.queues(), key=lambda each: each.depth)
        bodies = sorted(message.body for message in queue.messages())
    frame = spark.read.format("rabbitmq-queue").option("queue", queue.name).schema("body binary").load(path)
    assert sorted(bytes(row.body) for row in frame.collect()) == bodies
    frame = spark.read.format("rabbitmq-queue").option("columns", "queue,seq_id").load(path)
    assert frame.columns == ["queue", "seq_id"]
    assert frame.where(frame.queue == queue.name).count() == queue.depth
    for options, reason in (
        ({"queue": "nobody"}, "no queue 'nobody'"),
        ({"columns": "nope"}, "no column 'nope'"),
        ({"partition_bytes": "few"}, "partition_bytes"),
        ({"nope": "1"}, "no option 'nope'"),
        ({"segment_entry_count": "x"}, "segment_entry_count"),
    ):
        with pytest.raises(Exception, match=reason):
            spark.read.format("rabbitmq-queue").options(**options).load(path).collect()
    with pytest.raises(Exception, match="column body is binary"):
        spark.read.format("rabbitmq-queue").schema("body string").load(path).collect()
    with pytest.raises(Exception, match="holds a node"):
        spark.read.format("rabbitmq-queue").load(os.fspath(vhosts.parent)).collect()
    assert issubclass(StoreError, Exception)
