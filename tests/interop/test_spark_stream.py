"""A stream of Spark beside a real broker: what its producers got acknowledged comes once and in order, also past a kill.

It asks the stream's reader as Spark does, batch by batch, and needs pyspark, but no session.
"""

from __future__ import annotations

import pytest

from rmqstore import StoreConfig

pytestmark = pytest.mark.java

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

GEOMETRY = {
    "mapped_file_size_commit_log": 32768,
    "mapped_file_size_consume_queue": 400,
    "max_hash_slot_num": 50,
    "max_index_num": 300,
}
COLUMNS = ("phy_offset", "topic", "queue_id", "queue_offset", "keys", "body")


def orders(first: int, count: int) -> list[dict]:
    return [
        {
            "topic": "Orders", "queueId": number % 3, "body": b"order %d " % number * (1 + number * 7 % 40),
            "keys": f"ORD-{number}", "tags": f"t{number % 4}", "properties": {"number": str(number)},
        }
        for number in range(first, first + count)
    ]  # fmt: skip


class Follower:
    """The reader of a stream with what it gave so far, of the topic that the tests send to."""

    def __init__(self, path, **options):
        from rmqstore.spark.options import ReadOptions
        from rmqstore.spark.reader import StoreStreamReader, spark_schema

        raw = {
            "path": str(path),
            "topic": "Orders",
            "max_bytes_per_trigger": "20000",
            "partition_bytes": "7000",
            **options,
        }
        self.reader = StoreStreamReader(ReadOptions.parse(raw), spark_schema(COLUMNS), raw)
        self.at = self.reader.initialOffset()
        self.rows: list[dict] = []
        self.batches = 0

    def follow(self) -> None:
        while (end := self.reader.latestOffset(self.at, self.reader.getDefaultReadLimit())) != self.at:
            for partition in self.reader.partitions(self.at, end):
                for batch in self.reader.read(partition):
                    self.rows += batch.to_pylist()
            self.at = end
            self.batches += 1


def wanted(sent: list[tuple[dict, dict]]) -> list[tuple]:
    return [
        (answer["offsets"][0], message["queueId"], answer["queueOffset"], [message["keys"]], message["body"])
        for message, answer in sent
    ]


def got(rows: list[dict]) -> list[tuple]:
    return [(row["phy_offset"], row["queue_id"], row["queue_offset"], row["keys"], row["body"]) for row in rows]


def test_a_stream_beside_a_broker(java_broker, tmp_path):
    config = StoreConfig(**GEOMETRY)
    root = tmp_path / "store"
    sent: list[tuple[dict, dict]] = []
    with java_broker(root, config) as broker:
        broker.topic("Orders", 3)
        first = orders(0, 40)
        sent += zip(first, broker.produce(first), strict=True)
        follower = Follower(root)
        follower.follow()
        assert got(follower.rows) == wanted(sent)
        for message, answer in zip(more := orders(40, 300), broker.producing(more), strict=True):
            sent.append((message, answer))
            if len(sent) % 7 == 0:
                # All that was acknowledged is there, and maybe what the producer sent since.
                follower.follow()
                assert got(follower.rows)[: len(sent)] == wanted(sent)
        follower.follow()
        assert got(follower.rows) == wanted(sent)
        stream = orders(400, 200)
        for message, answer in zip(stream, broker.producing(stream)):
            sent.append((message, answer))
            if message is stream[60]:
                broker.kill()
        follower.follow()
    assert got(follower.rows)[: len(sent)] == wanted(sent)
    # At most the message under way when the broker died is there without an acknowledgement.
    assert len(follower.rows) - len(sent) <= 1 and follower.batches > 20
    with java_broker(root, config) as broker:
        # Its recovery keeps what was whole, so that the stream goes on where it was.
        broker.topic("Orders", 3)
        last = orders(700, 50)
        again = list(zip(last, broker.produce(last), strict=True))
        follower.follow()
        broker.shutdown()
    follower.follow()
    assert got(follower.rows[-50:]) == wanted(again)
    assert len({row["phy_offset"] for row in follower.rows}) == len(follower.rows)
    whole = Follower(root)
    whole.follow()
    assert whole.rows == follower.rows
