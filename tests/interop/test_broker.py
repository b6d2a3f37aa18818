"""A real broker, its producers and consumers on stores that rmqstore wrote, and rmqstore on what the broker left.

Every message that either side acknowledged is kept in `Sent`, and each reader is asked for all of them: by place in the
log, by queue, by key.  The broker is RocketMQ behind `peer.JavaBroker`; clients reach it through the network.
"""

from __future__ import annotations

import threading
import time

import pytest
from peer import PeerError

from rmqstore import (
    Message,
    MessageExt,
    MessageStore,
    StoreChangedError,
    StoreConfig,
    StoreLockedError,
    StorePoisonedError,
)

pytestmark = pytest.mark.java

GEOMETRY = {
    "mapped_file_size_commit_log": 32768,
    "mapped_file_size_consume_queue": 400,
    "max_hash_slot_num": 50,
    "max_index_num": 300,
}
CONFIGS = {
    "plain": GEOMETRY,
    "checked and extended": {
        **GEOMETRY,
        "enabled_append_prop_crc": True,
        "force_verify_prop_crc": True,
        "enable_consume_queue_ext": True,
        "mapped_file_size_consume_queue_ext": 1024,
        "flush_disk_type": "SYNC_FLUSH",
    },
}
# So that a hang ends as a failure, whatever the machine; nothing depends on it otherwise.
PATIENCE = 240


class Sent:
    """What was acknowledged, by whomever, in the order of the log."""

    def __init__(self):
        self.messages: list[dict] = []

    def by_rmqstore(self, store: MessageStore, messages: list[dict]) -> None:
        for message in messages:
            put = store.put_message(
                Message(
                    message["topic"], message["body"], keys=message["keys"].split(), tags=message["tags"],
                    properties={**message["properties"], "UNIQ_KEY": f"UNIQUE{message['properties']['number']}"},
                ),
                message["queueId"],
            )  # fmt: skip
            self.messages.append({**message, "offset": put.phy_offset, "queueOffset": put.queue_offset})

    def by_java(self, message: dict, answer: dict) -> None:
        assert answer["status"] == "SEND_OK"
        inner = [{**message, **each} for each in message.get("batch", [{}])]
        assert len(answer["offsets"]) == len(inner)
        for number, (each, phy_offset) in enumerate(zip(inner, answer["offsets"])):
            self.messages.append({**each, "offset": phy_offset, "queueOffset": answer["queueOffset"] + number})

    def of_queue(self, topic: str, queue_id: int, first: int = 0) -> list[dict]:
        return [
            message
            for message in self.messages
            if message["topic"] == topic and message["queueId"] == queue_id and message["queueOffset"] >= first
        ]

    def queues(self) -> set[tuple[str, int]]:
        return {(message["topic"], message["queueId"]) for message in self.messages}


def orders(first: int, count: int, topic: str = "Orders", queues: int = 4) -> list[dict]:
    """Messages of all sizes with keys, tags and properties, in turn to each queue."""
    return [
        {
            "topic": topic, "queueId": number % queues,
            "body": (b"%s %d " % (topic.encode(), number)) * (1 + number * 7 % 23),
            "keys": f"ORD-{number} CUST-{number % 5} 订单{number % 3}", "tags": f"t{number % 4}",
            "properties": {"number": str(number), "currency": "€"},
        }
        for number in range(first, first + count)
    ]  # fmt: skip


def batch(first: int, count: int) -> dict:
    """One client batch of the real producer."""
    parts = ("body", "keys", "tags", "properties")
    return {"topic": "Orders", "queueId": 1, "batch": [{n: each[n] for n in parts} for each in orders(first, count)]}


def said(message: dict) -> tuple:
    """What a message says, by whomever it was sent or received: place, body, keys, tags, own property."""
    properties = message.get("props", message.get("properties", {}))
    return (
        message["topic"], message["queueId"], message["queueOffset"], message["offset"], bytes(message["body"]),
        message.get("keys", properties.get("KEYS")), message.get("tags", properties.get("TAGS")), properties["number"],
    )  # fmt: skip


def ours(message: MessageExt) -> tuple:
    """`said` of a message that rmqstore read."""
    return (
        message.topic, message.queue_id, message.queue_offset, message.phy_offset, message.body,
        message.properties["KEYS"], message.tags, message.properties["number"],
    )  # fmt: skip


def received(messages: list[dict]) -> dict[tuple[str, int], list[tuple]]:
    """By queue, in the order of arrival."""
    queues: dict[tuple[str, int], list[tuple]] = {}
    for message in messages:
        queues.setdefault((message["topic"], message["queueId"]), []).append(said(message))
    return queues


def wanted(sent: Sent, topic: str, committed: dict[int, int]) -> dict[tuple[str, int], list[tuple]]:
    """What a group with these committed offsets has still to get of a topic."""
    queues = {
        queue: [said(message) for message in sent.of_queue(*queue, committed.get(queue[1], 0))]
        for queue in sent.queues()
        if queue[0] == topic
    }
    return {queue: messages for queue, messages in queues.items() if messages}


def assert_broker_has(broker, sent: Sent, numbers: range) -> None:
    """Some messages by their keys and unique keys, through the admin client."""
    for number in numbers:
        (message,) = [each for each in sent.messages if each["keys"].startswith(f"ORD-{number} ")]
        found = broker.query(message["topic"], f"ORD-{number}")
        assert {said(each) for each in found} == {said(message)}, number
        unique_key = found[0]["props"]["UNIQ_KEY"]
        (again,) = {said(each) for each in broker.query(message["topic"], unique_key, unique=True)}
        assert again == said(message)
    assert broker.query("Orders", "no such key") == []


def assert_rmqstore_has(store: MessageStore, sent: Sent, unsure: int = 0) -> None:
    """All that was acknowledged by place, queue and key, and at most `unsure` messages more."""
    whole = [ours(message) for message in store.messages()]
    assert whole[: len(sent.messages)] == [said(message) for message in sent.messages]
    assert len(whole) - len(sent.messages) <= unsure
    assert {(topic, queue_id) for topic in store.topics() for queue_id in store.queue_ids(topic)} == sent.queues()
    for topic, queue_id in sent.queues():
        got = []
        while (result := store.get_message(topic, queue_id, len(got), 32)).messages:
            got += [ours(message) for message in result]
        assert got == [line for line in whole if line[:2] == (topic, queue_id)], (topic, queue_id)
        assert store.max_queue_offset(topic, queue_id) == len(got)
    for message in sent.messages:
        assert ours(store.message_at(message["offset"])) == said(message)
    by_key: dict[tuple[str, str], list[int]] = {}
    for message in sent.messages:
        for key in message["keys"].split():
            by_key.setdefault((message["topic"], key), []).append(message["offset"])
    end = sent.messages[-1]["offset"]
    for (topic, key), offsets in by_key.items():
        found = [each.phy_offset for each in store.query_message(topic, key, 1000)]
        assert [phy_offset for phy_offset in found[::-1] if phy_offset <= end] == offsets, (topic, key)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_broker_and_rmqstore_take_turns(java_broker, tmp_path, name):
    config = StoreConfig(**CONFIGS[name])
    root = tmp_path / "store"
    sent = Sent()
    progress = {0: 12, 1: 0, 2: 25, 3: 7}
    with MessageStore.open(root, config=config) as store:
        sent.by_rmqstore(store, orders(0, 100) + orders(100, 20, "Payments", 2))
        for queue_id, queue_offset in progress.items():
            store.consumer_offsets.commit("billing", "Orders", queue_id, queue_offset)

    with java_broker(root, config) as broker:
        broker.topic("Orders", 4)
        broker.topic("Payments", 2)
        # The progress that we wrote is where the group goes on; a group without progress begins at the beginning.
        assert broker.offsets("billing") == {"Orders": progress}
        assert received(broker.consume("billing", "Orders")) == wanted(sent, "Orders", progress)
        progress = broker.offsets("billing")["Orders"]
        assert progress == {queue_id: len(sent.of_queue("Orders", queue_id)) for queue_id in range(4)}
        assert received(broker.consume("audit", "Payments")) == wanted(sent, "Payments", {})
        assert broker.consume("audit", "Payments") == []
        tagged = [
            said(message) for message in sent.messages if message["topic"] == "Orders" and message["tags"] != "t2"
        ]
        got = broker.consume("tagged", "Orders", sub="t0 || t1||t3", count=len(tagged), more=True)
        assert sorted(map(said, got)) == sorted(tagged)

        new = [*orders(200, 30), batch(230, 8), *orders(240, 10, "Payments", 2)]
        for message, answer in zip(new, broker.produce(new), strict=True):
            sent.by_java(message, answer)
        first = broker.consume("billing", "Orders", count=11)
        assert len(first) == 11
        seen = broker.offsets("billing")["Orders"]
        for queue_id, messages in received(first).items():
            assert messages == wanted(sent, "Orders", progress)[queue_id][: len(messages)]
            progress[queue_id[1]] += len(messages)
        assert seen == progress
        broker.dispatched()
        assert_broker_has(broker, sent, range(0, 120, 13))
        assert_broker_has(broker, sent, range(200, 250, 7))
        broker.persist()

        # Killed while it takes messages: at most the one under way may be there without having been acknowledged.
        stream = orders(300, 400)
        for message, answer in zip(stream, broker.producing(stream)):
            sent.by_java(message, answer)
            if message is stream[40]:
                broker.kill()
        assert not broker.alive

    with MessageStore.open(root, config=config) as store:
        assert not store.recovery_report.clean
        assert_rmqstore_has(store, sent, unsure=1)
        unsure = list(store.messages())[len(sent.messages) :]
        for message in unsure:
            # It is the next one of the stream, whole, and counts from now on.
            (expected,) = [each for each in stream if each["properties"]["number"] == message.properties["number"]]
            sent.messages.append({**expected, "offset": message.phy_offset, "queueOffset": message.queue_offset})
        assert_rmqstore_has(store, sent)
        assert {
            queue_id: store.consumer_offsets.get("billing", "Orders", queue_id) for queue_id in range(4)
        } == progress
        assert [store.consumer_offsets.get("audit", "Payments", queue_id) for queue_id in range(2)] == [10, 10]
        sent.by_rmqstore(store, orders(800, 25))
        # Of one queue a consumer of ours takes some, from where the broker's consumer of the group stopped, and the
        # broker's consumer goes on from there.
        with store.consume("Orders", "billing", queue_ids=[2], timeout=0) as consumer:
            taken = [ours(next(consumer)) for _ in range(6)]
            consumer.commit()
        assert taken == [said(message) for message in sent.of_queue("Orders", 2, progress[2])][:6]
        progress[2] += 6
        assert_rmqstore_has(store, sent)

    with java_broker(root, config) as broker:
        assert broker.offsets("billing")["Orders"] == progress
        assert received(broker.consume("billing", "Orders")) == wanted(sent, "Orders", progress)
        new = orders(900, 5)
        for message, answer in zip(new, broker.produce(new), strict=True):
            sent.by_java(message, answer)
        assert {said(each) for each in broker.consume("billing", "Orders")} == {
            said(each) for each in sent.messages[-5:]
        }
        broker.dispatched()
        assert_broker_has(broker, sent, range(800, 825, 6))
        assert_broker_has(broker, sent, range(900, 905))
        broker.shutdown()

    assert not (root / "abort").exists()
    with MessageStore.open(root, config=config) as store:
        assert store.recovery_report.clean
        assert_rmqstore_has(store, sent)
        for queue_id in range(4):
            end = store.max_queue_offset("Orders", queue_id)
            assert store.consumer_offsets.get("billing", "Orders", queue_id) == end


def test_a_broker_and_an_open_store_exclude_each_other(java_broker, tmp_path):
    config = StoreConfig(**GEOMETRY)
    root = tmp_path / "store"
    sent = Sent()
    with java_broker(root, config) as broker:
        broker.topic("Orders", 4)
        new = orders(0, 20)
        for message, answer in zip(new, broker.produce(new), strict=True):
            sent.by_java(message, answer)
        with pytest.raises(StoreLockedError):
            MessageStore.open(root, config=config)
        # The broker did not notice, and a reader is no rival.
        new = orders(20, 20)
        for message, answer in zip(new, broker.produce(new), strict=True):
            sent.by_java(message, answer)
        broker.dispatched()
        with MessageStore.open(root, config=config, read_only=True) as store:
            assert_rmqstore_has(store, sent)
        assert_broker_has(broker, sent, range(0, 40, 9))
        broker.shutdown()

    with MessageStore.open(root, config=config) as store:
        assert store.recovery_report.clean
        sent.by_rmqstore(store, orders(40, 150))
        with pytest.raises(PeerError, match="Lock failed"), java_broker(root, config):
            pass
        # RocketMQ recovers before it asks for the lock, under our feet: it deletes the index file that it takes for
        # unfinished and makes one of its own.  That is noticed, at the latest when the store is forced to the disk; the
        # store can be read on, takes no more writes, and the next opening repairs it.
        assert_rmqstore_has(store, sent)
        with pytest.raises((StoreChangedError, StorePoisonedError)):
            for message in orders(190, 150):
                sent.by_rmqstore(store, [message])
            store.flush()
        assert_rmqstore_has(store, sent)
    with MessageStore.open(root, config=config) as store:
        assert not store.recovery_report.clean
        assert_rmqstore_has(store, sent)
        sent.by_rmqstore(store, orders(400, 10))
    with java_broker(root, config) as broker:
        assert received(broker.consume("all", "Orders")) == wanted(sent, "Orders", {})
        assert_broker_has(broker, sent, range(0, 190, 20))


def test_a_follower_sees_what_a_running_broker_takes(java_broker, tmp_path):
    config = StoreConfig(**GEOMETRY)
    root = tmp_path / "store"
    sent = Sent()
    with MessageStore.open(root, config=config) as store:
        sent.by_rmqstore(store, orders(0, 30))
    stream = orders(100, 240)
    caught_up = threading.Semaphore(0)
    finished = threading.Event()
    failures: list[BaseException] = []

    with java_broker(root, config) as broker:
        broker.topic("Orders", 4)
        with MessageStore.open(root, config=config, read_only=True) as store:

            def produce() -> None:
                try:
                    for message, answer in zip(stream, broker.producing(stream), strict=True):
                        sent.by_java(message, answer)
                        # The answers are read only as fast as the follower sees the messages.
                        if len(sent.messages) % 40 == 0:
                            assert caught_up.acquire(timeout=PATIENCE)
                except BaseException as error:
                    failures.append(error)
                finally:
                    finished.set()

            log: list[tuple] = []
            queues: dict[tuple[str, int], list[tuple]] = {("Orders", queue_id): [] for queue_id in range(4)}
            position = 0

            def look() -> None:
                nonlocal position
                store.refresh()
                for message in store.messages(position):
                    position = message.phy_offset + message.size
                    log.append(ours(message))
                for (topic, queue_id), got in queues.items():
                    while (result := store.get_message(topic, queue_id, len(got), 32)).messages:
                        got += [ours(message) for message in result]
                        # What is in a queue is in the log.
                        assert got[-1][3] < store.commit_log.max_offset
                if log:
                    # The newest one may not be indexed yet; what is found is it, alone.
                    found = store.query_message("Orders", log[-1][5].split()[0])
                    assert [ours(message) for message in found] in ([], log[-1:])

            thread = threading.Thread(target=produce)
            thread.start()
            deadline = time.monotonic() + PATIENCE
            steps = 0
            try:
                while not finished.wait(0.002) and time.monotonic() < deadline:
                    look()
                    while len(log) >= (steps + 1) * 40:
                        steps += 1
                        caught_up.release()
            finally:
                broker.kill() if not finished.is_set() else None
                thread.join(PATIENCE)
            assert failures == [] and steps >= 6
            broker.dispatched()
            look()
            assert log == [said(message) for message in sent.messages]
            assert {queue: got for queue, got in queues.items()} == received(sent.messages)
            assert_rmqstore_has(store, sent)
            # Killed or not, a reader does not mind.
            broker.kill()
            look()
            assert len(log) == len(sent.messages)
            assert_rmqstore_has(store, sent)


def test_a_broker_delivers_delayed_messages_that_rmqstore_wrote(java_broker, tmp_path):
    config = StoreConfig(**GEOMETRY)
    root = tmp_path / "store"
    with MessageStore.open(root, config=config) as store:
        for number in range(6):
            # As a broker puts a delayed message: in the queue of its level, the true destination among the properties.
            properties = {"DELAY": "1", "REAL_TOPIC": "Later", "REAL_QID": str(number % 2), "number": str(number)}
            store.put_message(
                Message(
                    "SCHEDULE_TOPIC_XXXX", b"later %d" % number, keys=[f"L-{number}"], tags="t", properties=properties
                ),
                0,
            )
    with java_broker(root, config) as broker:
        broker.topic("Later", 2)
        got = broker.consume("late", "Later", count=6, more=True)
        assert sorted((each["queueId"], each["props"]["number"], each["body"]) for each in got) == [
            (number % 2, str(number), b"later %d" % number) for number in (0, 2, 4, 1, 3, 5)
        ]
        broker.shutdown()
    with MessageStore.open(root, config=config) as store:
        for number in range(6):
            # Twice in the log, under its key in each topic.
            (waiting,) = store.query_message("SCHEDULE_TOPIC_XXXX", f"L-{number}")
            (delivered,) = store.query_message("Later", f"L-{number}")
            assert waiting.body == delivered.body == b"later %d" % number
            assert delivered.queue_id == number % 2
        assert [store.max_queue_offset("Later", queue_id) for queue_id in (0, 1)] == [3, 3]
