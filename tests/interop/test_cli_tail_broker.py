"""`rmqstore tail -f` beside a real broker: each acknowledged message is shown once, through a kill -9 and a new start."""

from __future__ import annotations

import pytest
from test_cli_tail import following

pytestmark = pytest.mark.java

GEOMETRY = {
    "mapped_file_size_commit_log": 32768,
    "mapped_file_size_consume_queue": 400,
    "max_hash_slot_num": 50,
    "max_index_num": 300,
}


def produce(broker, numbers):
    return broker.produce(
        {"topic": "Orders", "queueId": number % 3, "body": b"x" * 300, "keys": f"k{number}", "tags": f"t{number % 2}"}
        for number in numbers
    )


def test_a_broker_that_runs_is_killed_and_started_again(java_broker, tmp_path):
    path = tmp_path / "store"
    with java_broker(path, GEOMETRY) as broker:
        broker.topic("Orders", 3)
        produce(broker, range(5))
        with following(path, "Orders", "-n", 3) as every, following(path, "Orders", "-n", 1, "--tags", "t1") as odd:
            # Both are there before the next messages are.
            assert every.keys(3) == ["k2", "k3", "k4"] and odd.keys(1) == ["k3"]
            sent = produce(broker, range(5, 205))
            shown = every.take(200)
            assert [message["keys"] for message in shown] == [[f"k{number}"] for number in range(5, 205)]
            assert [message["phy_offset"] for message in shown] == [put["offsets"][0] for put in sent]
            assert len(list((path / "commitlog").iterdir())) > 2
            broker.kill()
            # A read beside the recovery of the broker that comes now.
            with java_broker(path, GEOMETRY) as again:
                again.topic("Orders", 3)
                produce(again, range(205, 260))
                assert every.keys(55) == [f"k{number}" for number in range(205, 260)]
                again.shutdown()
            wanted = [f"k{number}" for number in range(5, 260) if number % 2]
            assert odd.keys(len(wanted)) == wanted
            assert every.end()[0] == odd.end()[0] == 130
