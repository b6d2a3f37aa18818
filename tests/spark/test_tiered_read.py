"""Tiered storage as a Spark DataFrame: option ``tiered`` of the source, against one scan of the store."""

from __future__ import annotations

import shutil

import pytest
import tiered_oracle as oracle_tiered

from rmqstore import MessageStore

pytestmark = [pytest.mark.spark, pytest.mark.java]

COLUMNS = ["topic", "queue_id", "queue_offset", "phy_offset"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return oracle_tiered.unpack("store", tmp_path_factory.mktemp("tiered"))


@pytest.mark.parametrize("mode", ["commitlog", "queue"])
def test_every_message_once(spark, root, mode):
    with MessageStore.open(root / "store", read_only=True, tiered=root / "tiered") as store:
        expected = [tuple(row.values()) for row in store.scan(COLUMNS).read_all().to_pylist()]
    reader = spark.read.format("rocketmq-store").options(tiered=f"file://{root / 'tiered'}", mode=mode, partition_bytes="64k")
    frame = reader.load(str(root / "store"))
    assert frame.count() == len(expected) == 3007
    rows = [tuple(row) for row in frame.select(*COLUMNS).collect()]
    assert sorted(rows) == sorted(expected)
    some = reader.option("topic", "Orders").option("queue_id", "1").load(str(root / "store"))
    assert sorted(row.queue_offset for row in some.collect()) == list(range(956))


def test_a_stream_has_no_tiered_storage(spark, root):
    frame = spark.readStream.format("rocketmq-store").options(tiered=str(root / "tiered")).load(str(root / "store"))
    with pytest.raises(Exception, match="leave option tiered out"):
        frame.writeStream.format("memory").queryName("tiered").start().processAllAvailable()


@pytest.mark.parametrize("kind", ["COMMIT_LOG", "CONSUME_QUEUE"])
def test_what_its_broker_deletes_after_the_plan_is_damage(spark, root, tmp_path, kind):
    copy = shutil.copytree(root, tmp_path / "copy")
    frames = {}
    for corrupt in ("fail", "skip", "report"):
        reader = spark.read.format("rocketmq-store").options(tiered=str(copy / "tiered"), corrupt=corrupt)
        frame = reader.options(topic="Orders", queue_id="0").load(str(copy / "store"))
        assert frame.count() == 960
        frames[corrupt] = frame
    min((copy / "tiered").glob(f"*/golden/Orders/0/{kind}/*"), key=lambda path: path.name[8:]).unlink()
    left = 960 - (208 if kind == "COMMIT_LOG" else 200)
    assert frames["skip"].count() == left
    with pytest.raises(Exception, match="option corrupt=skip passes over it"):
        frames["fail"].count()
    rows = frames["report"].select("topic", "queue_id", "_corrupt", "queue_offset").collect()
    assert sum(row._corrupt is None for row in rows) == left
    assert {(row.topic, row.queue_id, row.queue_offset) for row in rows if row._corrupt} == {("Orders", 0, None)}
