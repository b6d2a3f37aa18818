"""`MessageStore.consume`: order, at least once, waiting without a busy loop, and where progress is kept.

Owns what a consumer may rely on.  Whether it sleeps is seen from how often it asks the store, never from a clock.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from rmqstore import (
    Consumer,
    ConsumerOffsets,
    Message,
    MessageStore,
    ReadOnlyError,
    StoreClosedError,
    StoreConfig,
    StoreError,
)

SMALL = StoreConfig(
    mapped_file_size_commit_log=8192,
    mapped_file_size_consume_queue=400,
    max_hash_slot_num=20,
    max_index_num=60,
    flush_interval_commit_log=0,
    flush_interval_consume_queue=0,
    flush_consumer_offset_interval=0,
    clean_resource_interval=0,
)
PATIENCE = 240


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000_000

    def __call__(self) -> int:
        self.now += 10
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def store(root, clock):
    with MessageStore.open(root, config=SMALL.replace(clock=clock)) as opened:
        yield opened


def fill(store: MessageStore, count: int, *, first: int = 0, queue_id: int = 0, tags: str = "a", topic: str = "Orders"):
    for number in range(first, first + count):
        store.put_message(Message(topic, b"%d" % number, tags=tags), queue_id)


def numbers(messages) -> list[int]:
    return [int(message.body) for message in messages]


def take(consumer, count: int) -> list[int]:
    return [int(next(consumer).body) for _ in range(count)]


class Loop:
    """A consumer on a thread of its own; what it got, and how it ended."""

    def __init__(self, consumer: Consumer):
        self.got: list[int] = []
        self.error: BaseException | None = None
        self._news = threading.Condition()

        def run() -> None:
            try:
                for message in consumer:
                    with self._news:
                        self.got.append(int(message.body))
                        self._news.notify_all()
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def wait_for(self, count: int) -> list[int]:
        with self._news:
            assert self._news.wait_for(lambda: len(self.got) >= count or not self.thread.is_alive(), PATIENCE), self.got
        return self.got

    def end(self) -> None:
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "the consumer does not end"
        if self.error is not None:
            raise self.error


def wait_until_waiting(store: MessageStore, count: int = 1) -> None:
    deadline = time.monotonic() + PATIENCE
    while store._state.waiting < count:
        assert time.monotonic() < deadline, "the consumer does not wait"
        time.sleep(0.002)


# ------------------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("max_num", [1, 3, 32, 1000])
def test_all_messages_in_the_order_of_their_queue(store, max_num):
    fill(store, 100)
    consumer = store.consume("Orders", "group", timeout=0, max_num=max_num)
    assert isinstance(consumer, Consumer) and iter(consumer) is consumer
    assert numbers(consumer) == list(range(100))
    assert store.consumer_offsets.get("group", "Orders", 0) == 100
    # Nothing new: nothing to read.
    assert numbers(store.consume("Orders", "group", timeout=0)) == []
    fill(store, 5, first=100)
    assert numbers(store.consume("Orders", "group", timeout=0)) == list(range(100, 105))
    # Another group, and another topic, begin at their own places.
    assert numbers(store.consume("Orders", "other", timeout=0)) == list(range(105))
    assert numbers(store.consume("Nothing", "group", timeout=0)) == []


def test_several_queues_take_turns(store):
    for queue_id in range(3):
        fill(store, 50, first=queue_id * 1000, queue_id=queue_id)
    got = numbers(store.consume("Orders", "group", timeout=0, max_num=5))
    for queue_id in range(3):
        assert [number for number in got if number // 1000 == queue_id] == [queue_id * 1000 + i for i in range(50)]
    # None waits until another is empty.
    assert {number // 1000 for number in got[:15]} == {0, 1, 2}
    assert len(got) == 150
    assert store.consumer_offsets.list() == {("group", "Orders"): {0: 50, 1: 50, 2: 50}}


def test_only_the_queues_that_were_asked_for(store):
    for queue_id in range(3):
        fill(store, 10, first=queue_id * 1000, queue_id=queue_id)
    assert numbers(store.consume("Orders", "group", queue_ids=[2], timeout=0)) == list(range(2000, 2010))
    assert store.consumer_offsets.list() == {("group", "Orders"): {2: 10}}
    # The rest belongs to another member of the group; a queue that does not exist yet is no error.
    assert sorted(numbers(store.consume("Orders", "group", queue_ids=(0, 1, 7), timeout=0))) == [
        *range(10), *range(1000, 1010)
    ]  # fmt: skip


def test_queues_that_come_into_being_later(store):
    fill(store, 3)
    consumer = store.consume("Orders", "group", timeout=0, consume_from="last")
    assert numbers(consumer) == []
    fill(store, 3, first=10, queue_id=5)
    fill(store, 2, first=3)
    # A new queue is new as a whole, whatever was said about the ones that were there.
    assert sorted(numbers(consumer)) == [3, 4, 10, 11, 12]


def test_tags(store):
    for number in range(60):
        fill(store, 1, first=number, tags="abc"[number % 3])
    assert numbers(store.consume("Orders", "one", tags="b", timeout=0)) == list(range(1, 60, 3))
    both = [number for number in range(60) if number % 3 != 1]
    assert numbers(store.consume("Orders", "two", tags="a || c", timeout=0)) == both
    assert numbers(store.consume("Orders", "three", tags=iter(["c", "a"]), timeout=0)) == both
    assert numbers(store.consume("Orders", "none", tags="x", timeout=0)) == []
    # All of them are past messages with other tags.
    assert {offsets[0] for offsets in store.consumer_offsets.list().values()} == {60}


def test_progress_stays_before_what_was_not_handed_out(store):
    for number in range(12):
        fill(store, 1, first=number, tags="ab"[number % 2])
    consumer = store.consume("Orders", "group", tags="a", timeout=0, max_num=4)
    for expected in range(0, 12, 2):
        assert int(next(consumer).body) == expected
        # Everything before the message that is being worked on, and nothing of it.
        committed = store.consumer_offsets.get("group", "Orders", 0)
        assert committed == -1 if expected == 0 else expected - 1 <= committed <= expected
    assert list(consumer) == []
    assert store.consumer_offsets.get("group", "Orders", 0) == 12


def test_inner_batches_come_as_they_were_stored(root, clock):
    from rmqstore.message import SysFlag, encode_inner_batch

    with MessageStore.open(root, config=SMALL.replace(clock=clock)) as store:
        for number in range(10):
            packed = encode_inner_batch([Message("Packed", b"%d" % (number * 3 + i)) for i in range(3)])
            store.put_message(
                Message("Packed", packed, sys_flag=int(SysFlag.INNER_BATCH), properties={"INNER_NUM": "3"})
            )
        consumer = store.consume("Packed", "group", timeout=0, max_num=3)
        found = []
        for batch in consumer:
            found += numbers(batch.inner_messages())
        assert found == list(range(30))
        assert store.consumer_offsets.get("group", "Packed", 0) == 30


# ----------------------------------------------------------------------------------------------------- at least once


def test_a_message_counts_when_the_next_one_is_asked_for(store):
    fill(store, 10)
    consumer = store.consume("Orders", "group", timeout=0)
    assert take(consumer, 4) == [0, 1, 2, 3]
    assert store.consumer_offsets.get("group", "Orders", 0) == 3
    # The loop was left: its last message comes again.
    assert take(store.consume("Orders", "group", timeout=0), 2) == [3, 4]
    consumer = store.consume("Orders", "group", timeout=0)
    assert take(consumer, 2) == [4, 5]
    consumer.commit()
    assert store.consumer_offsets.get("group", "Orders", 0) == 6
    consumer.commit()
    assert take(consumer, 1) == [6]
    consumer.close()
    assert store.consumer_offsets.get("group", "Orders", 0) == 6
    # A closed consumer gives nothing more, and neither closing nor committing commits its last message.
    assert list(consumer) == []
    consumer.close()
    consumer.commit()
    assert numbers(store.consume("Orders", "group", timeout=0)) == [6, 7, 8, 9]


def test_a_loop_that_is_left_by_break_or_an_exception(store):
    fill(store, 10)
    for message in store.consume("Orders", "group", timeout=0):
        if message.body == b"2":
            break
    assert store.consumer_offsets.get("group", "Orders", 0) == 2
    with pytest.raises(ZeroDivisionError):
        for message in store.consume("Orders", "group", timeout=0):
            if message.body == b"5":
                1 / 0  # noqa: B018
    assert store.consumer_offsets.get("group", "Orders", 0) == 5
    with pytest.raises(ZeroDivisionError), store.consume("Orders", "group", timeout=0) as consumer:
        for message in consumer:
            if message.body == b"7":
                1 / 0  # noqa: B018
    assert store.consumer_offsets.get("group", "Orders", 0) == 7
    assert list(consumer) == []
    # The end of a block does not say that the last message was worked on.
    with store.consume("Orders", "group", timeout=0) as consumer:
        for message in consumer:
            if message.body == b"8":
                break
    assert store.consumer_offsets.get("group", "Orders", 0) == 8
    with store.consume("Orders", "group", timeout=0) as consumer:
        assert take(consumer, 1) == [8]
        consumer.commit()
    assert store.consumer_offsets.get("group", "Orders", 0) == 9


def test_progress_survives_closing(root, clock):
    config = SMALL.replace(clock=clock)
    with MessageStore.open(root, config=config) as store:
        fill(store, 10)
        assert take(store.consume("Orders", "group", timeout=0), 4) == [0, 1, 2, 3]
    with MessageStore.open(root, config=config) as store:
        assert take(store.consume("Orders", "group", timeout=0), 2) == [3, 4]
    assert ConsumerOffsets.load(root / "config" / "consumerOffset.json").get("group", "Orders", 0) == 4


CONSUMER = """
    import sys, time
    from rmqstore import MessageStore
    store = MessageStore.open(sys.argv[1])
    for message in store.consume("Orders", "group", timeout=0, max_num=7):
        print(message.body.decode(), flush=True)
        if message.body == b"25":
            store.flush()
        if message.body == b"40":
            time.sleep(600)
"""


def test_a_consumer_that_is_killed_gets_the_rest_again(root, clock):
    with MessageStore.open(root, config=SMALL.replace(clock=clock)) as store:
        fill(store, 60)
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(CONSUMER), root], stdout=subprocess.PIPE, text=True)
    try:
        got = [int(child.stdout.readline()) for _ in range(41)]
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(PATIENCE)
        child.stdout.close()
    assert got == list(range(41))
    with MessageStore.open(root, config=SMALL.replace(clock=clock)) as store:
        again = numbers(store.consume("Orders", "group", timeout=0))
    # The last flush took the progress before message 25 along; nothing is lost, some come twice.
    assert again == list(range(25, 60))


DURABLE = """
    import asyncio, os, sys
    from rmqstore import ConsumerOffsets, MessageStore
    path, how, name = sys.argv[1:]
    offsets = None if name == "-" else ConsumerOffsets.load(name, read_only=False)
    store = MessageStore.open(path, read_only=offsets is not None)
    with_each = dict(commit="each") if "each" in how else {}
    consumer = store.consume("Orders", "group", timeout=0, offsets=offsets, **with_each)
    def took(message):
        print(message.body.decode(), flush=True)
        if how == "durable":
            consumer.commit(durable=True)
        if message.body == b"40":
            os._exit(9)
    async def run():
        async for message in consumer:
            took(message)
    if how == "each, async":
        asyncio.run(run())
    for message in consumer:
        took(message)
"""


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("how", "rest"), [("each", 40), ("each, async", 40), ("durable", 41), ("interval", 0)])
def test_durable_commits_outlive_a_kill(root, tmp_path, how, rest, own):
    # With "each" only the message that was being processed comes again.
    with MessageStore.open(root, config=SMALL.replace(flush_consumer_offset_interval=3_600_000)) as store:
        fill(store, 60)
    name = str(tmp_path / "own.json") if own else "-"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DURABLE), root, how, name], stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 9 and done.stdout.split() == [str(number) for number in range(41)]
    with MessageStore.open(root) as store:
        offsets = ConsumerOffsets.load(name, read_only=False) if own else None
        assert numbers(store.consume("Orders", "group", timeout=0, offsets=offsets)) == list(range(rest, 60))


def test_a_durable_commit_flushes_no_file_of_the_store(store, monkeypatch):
    fill(store, 3)
    consumer = store.consume("Orders", "group", timeout=0)
    next(consumer)
    flushed = []
    monkeypatch.setattr(store._flushing, "flush_all", lambda *given, **options: flushed.append(given))
    consumer.commit(durable=True)
    saved = ConsumerOffsets.load(os.path.join(store.path, "config", "consumerOffset.json"))
    assert saved.get("group", "Orders", 0) == 1 and flushed == []
    # Without a new message there is nothing to write.
    written = os.stat(saved.path).st_mtime_ns
    consumer.commit(durable=True)
    assert os.stat(saved.path).st_mtime_ns == written
    monkeypatch.undo()


@pytest.mark.parametrize(("topic", "group"), [("Orders", ""), ("", "group"), ("Or@ders", "group"), ("Orders", "\ud800")])
def test_names_that_progress_cannot_hold_fail_at_the_call(store, topic, group):
    with pytest.raises(ValueError, match=r"topic is|group is"):
        store.consume(topic, group)


def test_a_mode_of_committing_is_one_of_two(store):
    with pytest.raises(ValueError, match="commit is 'all': give 'each' or 'interval'"):
        store.consume("Orders", "group", commit="all")


def test_two_consumers_of_a_group_at_different_queues(store):
    for queue_id in range(2):
        fill(store, 30, first=queue_id * 1000, queue_id=queue_id)
    loops = [Loop(store.consume("Orders", "group", queue_ids=[queue_id])) for queue_id in range(2)]
    for queue_id, loop in enumerate(loops):
        assert loop.wait_for(30) == list(range(queue_id * 1000, queue_id * 1000 + 30))
    wait_until_waiting(store, 2)
    assert store.consumer_offsets.list() == {("group", "Orders"): {0: 30, 1: 30}}
    store.close()
    for loop in loops:
        loop.end()


# ----------------------------------------------------------------------------------------------------------- waiting


class Counted:
    """How often the methods of a store were called."""

    def __init__(self, store: MessageStore, monkeypatch: pytest.MonkeyPatch):
        self.calls = 0
        for name in ("get_message", "max_queue_offset", "queue_ids", "refresh"):
            self._count(store, name, monkeypatch)

    def _count(self, store, name, monkeypatch) -> None:
        real = getattr(store, name)

        def call(*args, **options):
            self.calls += 1
            return real(*args, **options)

        monkeypatch.setattr(store, name, call)


def test_waiting_asks_nothing_until_a_message_comes(store, monkeypatch):
    fill(store, 3)
    counted = Counted(store, monkeypatch)
    loop = Loop(store.consume("Orders", "group"))
    assert loop.wait_for(3) == [0, 1, 2]
    wait_until_waiting(store)
    # Looked at twice with a pause between: a loop that asks again and again would have asked thousands of times.
    time.sleep(0.05)
    before = counted.calls
    time.sleep(0.3)
    assert counted.calls == before
    for number in range(3, 8):
        fill(store, 1, first=number)
        assert loop.wait_for(number + 1)[-1] == number
        wait_until_waiting(store)
    assert counted.calls < before + 5 * 12
    store.close()
    loop.end()
    assert loop.got == list(range(8))


def test_a_put_of_another_topic_or_tag_wakes_nobody_up_for_long(store, monkeypatch):
    fill(store, 1)
    loop = Loop(store.consume("Orders", "group", tags="a"))
    loop.wait_for(1)
    wait_until_waiting(store)
    fill(store, 20, first=100, topic="Payments")
    fill(store, 20, first=100, tags="b")
    fill(store, 1, first=1)
    assert loop.wait_for(2) == [0, 1]
    store.close()
    loop.end()


def test_no_wake_up_is_lost(store):
    """Each message is put when the consumer asked for it just before: at any point of its way to sleep."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        loop = Loop(store.consume("Orders", "group", max_num=1))
        for number in range(300):
            fill(store, 1, first=number, queue_id=number % 2)
            assert len(loop.wait_for(number + 1)) >= number + 1
    finally:
        sys.setswitchinterval(before)
    store.close()
    loop.end()
    assert sorted(loop.got) == list(range(300))


def test_many_wait_and_all_are_woken_up(store):
    loops = [Loop(store.consume("Orders", f"group-{number}")) for number in range(6)]
    wait_until_waiting(store, 6)
    fill(store, 10)
    for loop in loops:
        assert loop.wait_for(10) == list(range(10))
    store.close()
    for loop in loops:
        loop.end()
    assert store._state.waiting == 0


def test_a_timeout_ends_the_iteration(store, monkeypatch):
    fill(store, 2)
    counted = Counted(store, monkeypatch)
    begin = time.monotonic()
    consumer = store.consume("Orders", "group", timeout=0.2)
    assert numbers(consumer) == [0, 1]
    assert time.monotonic() - begin >= 0.19
    assert counted.calls < 40
    # All was worked on, so all is committed; and one may ask again.
    assert store.consumer_offsets.get("group", "Orders", 0) == 2
    fill(store, 1, first=2)
    assert numbers(consumer) == [2]


def test_wait_for_messages(store):
    assert store.wait_for_messages(lambda: True) is True
    assert store.wait_for_messages(lambda: False, 0) is False
    assert store.wait_for_messages(lambda: False, 0.01) is False
    answer = []
    thread = threading.Thread(
        target=lambda: answer.append(store.wait_for_messages(lambda: store.max_queue_offset("Orders") == 3)),
        daemon=True,
    )
    thread.start()
    fill(store, 3)
    thread.join(PATIENCE)
    assert answer == [True]
    with pytest.raises(ZeroDivisionError):
        store.wait_for_messages(lambda: 1 / 0)
    assert store._state.waiting == 0
    store.close()
    with pytest.raises(StoreClosedError):
        store.wait_for_messages(lambda: True)


# ----------------------------------------------------------------------------------------------------------- closing


def test_closing_the_store_ends_a_consumer_that_waits(store):
    fill(store, 2)
    loop = Loop(store.consume("Orders", "group"))
    loop.wait_for(2)
    wait_until_waiting(store)
    store.close()
    loop.end()
    assert loop.got == [0, 1]


def test_closing_that_fails_ends_a_consumer_that_waits(root, monkeypatch):
    store = MessageStore.open(root, config=SMALL)
    loop = Loop(store.consume("Orders", "group"))
    wait_until_waiting(store)

    def fail(*args, **options) -> None:
        raise OSError(5, "Input/output error")

    fill(store, 1)
    loop.wait_for(1)
    wait_until_waiting(store)
    monkeypatch.setattr(store._flushing, "flush_all", fail)
    with pytest.raises(OSError, match="Input/output error"):
        store.close()
    loop.end()


@pytest.mark.parametrize(
    "where", ["get_message", "queue_ids", "max_queue_offset", "min_queue_offset", "wait_for_messages"]
)
@pytest.mark.parametrize("read_only", [False, True])
def test_closing_at_any_moment_is_the_end_and_no_error(root, tmp_path, where, read_only):
    with MessageStore.open(root, config=SMALL) as writer:
        fill(writer, 3)
    for calls in range(1, 4):
        store = MessageStore.open(root, config=SMALL, read_only=read_only)
        offsets = ConsumerOffsets(tmp_path / f"{where}{calls}.json", read_only=False)
        consumer = store.consume("Orders", "group", offsets=offsets, max_num=1, timeout=0.01)
        assert take(consumer, 1) == [0]
        real, left, closing = getattr(store, where), [calls], threading.Thread(target=store.close)

        def close_first(*args, real=real, left=left, store=store, closing=closing, **options):
            left[0] -= 1
            if left[0] == 0:
                # By another thread, which may have to wait for this one when it wakes up those who wait.
                closing.start()
                deadline = time.monotonic() + PATIENCE
                while not store.closed:
                    assert time.monotonic() < deadline
                    time.sleep(0.001)
            return real(*args, **options)

        setattr(store, where, close_first)
        assert numbers(consumer) in ([], [1], [1, 2])
        assert list(consumer) == []
        consumer.close()
        assert 0 <= offsets.get("group", "Orders", 0) <= 3
        store.close()
        if closing.ident is not None:
            closing.join(PATIENCE)
            assert not closing.is_alive()


def test_nothing_is_handed_out_after_the_store_was_closed(store):
    fill(store, 10)
    consumer = store.consume("Orders", "group")
    assert take(consumer, 2) == [0, 1]
    store.close()
    # The other eight were fetched already; but who works on them could not say so any more.
    assert list(consumer) == []


# ------------------------------------------------------------------------------------------------- where to begin


def test_where_a_new_group_begins(store, clock):
    fill(store, 5)
    middle = clock.now + 1
    fill(store, 5, first=5)
    assert numbers(store.consume("Orders", "first", timeout=0)) == list(range(10))
    assert numbers(store.consume("Orders", "last", timeout=0, consume_from="last")) == []
    assert numbers(store.consume("Orders", "time", timeout=0, consume_from=middle)) == list(range(5, 10))
    assert numbers(store.consume("Orders", "epoch", timeout=0, consume_from=0)) == list(range(10))
    assert numbers(store.consume("Orders", "future", timeout=0, consume_from=2**62)) == []
    fill(store, 1, first=10)
    # A group that has been there is not new any more, also if it got nothing yet.
    for group in ("first", "last", "time", "future"):
        assert numbers(store.consume("Orders", group, timeout=0, consume_from="first")) == [10]


def test_values_out_of_range(store):
    for options, text in (
        ({"max_num": 0}, "max_num is 0"),
        ({"consume_from": "middle"}, "consume_from is 'middle'"),
        ({"consume_from": -1}, "consume_from is -1"),
        ({"consume_from": True}, "consume_from is True"),
    ):
        with pytest.raises(ValueError, match=text):
            store.consume("Orders", "group", **options)
    with pytest.raises(ValueError, match="topic"):
        fill(store, 1)
        list(store.consume("Or@ders", "group", timeout=0, queue_ids=[0], consume_from="last"))
    store.close()
    with pytest.raises(StoreClosedError):
        store.consume("Orders", "group")


def test_progress_beyond_the_end_goes_on_at_the_end(root, clock, caplog):
    """After a power cut, consumed messages are gone from the log, and new ones get their queue offsets."""
    config = SMALL.replace(clock=clock)
    with MessageStore.open(root, config=config) as store:
        fill(store, 5)
        store.consumer_offsets.commit("group", "Orders", 0, 9)
    with MessageStore.open(root, config=config) as store:
        consumer = store.consume("Orders", "group", timeout=0)
        assert list(consumer) == []
        assert "consumed Orders/0 up to 9, but the queue ends at 5" in caplog.text and str(root) in caplog.text
        fill(store, 4, first=5)
        assert numbers(consumer) == [5, 6, 7, 8]


def test_a_gap_that_retention_left(root, clock, caplog):
    config = SMALL.replace(
        clock=clock, file_reserved_time=0, mapped_file_size_commit_log=2048, delete_file_batch_max=50
    )
    with MessageStore.open(root, config=config) as store:
        for number in range(100):
            store.put_message(Message("Orders", b"%d" % number, properties={"fill": "x" * 200}))
        assert take(store.consume("Orders", "group", timeout=0), 5) == list(range(5))
        for name in os.listdir(root / "commitlog"):
            os.utime(root / "commitlog" / name, (0, 0))
        assert store.delete_expired_files().segments
        low = store.min_queue_offset("Orders")
        assert low > 50
        assert numbers(store.consume("Orders", "group", timeout=0)) == list(range(low, 100))
        assert f"Orders/0 from 4 to {low} was deleted before group group consumed it" in caplog.text


# ---------------------------------------------------------------------------------------------- other places for progress


WRITER = """
    import sys, time
    from rmqstore import Message, MessageStore
    store = MessageStore.open(sys.argv[1])
    count = int(sys.argv[2])
    for number in range(10, count):
        store.put_message(Message("Orders", b"%d" % number), number % 3)
        if number % 20 == 0:
            time.sleep(0.005)
    print("done", flush=True)
    sys.stdin.read()
    store.close()
"""


def start_writer(root, count: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), root, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_reader_beside_a_writer_keeps_its_own_progress(root, tmp_path):
    with MessageStore.open(root, config=SMALL) as store:
        fill(store, 10)
    path = tmp_path / "mine" / "consumerOffset.json"
    writer = start_writer(root, 300)
    try:
        with MessageStore.open(root, read_only=True) as reader:
            with pytest.raises(ReadOnlyError, match="offsets=ConsumerOffsets"):
                reader.consume("Orders", "group")
            got: list[int] = []
            # It begins again and again, as by a process that is restarted.
            while len(got) < 300:
                offsets = ConsumerOffsets.load(path, read_only=False)
                with reader.consume("Orders", "group", offsets=offsets, timeout=PATIENCE, max_num=5) as consumer:
                    got += take(consumer, min(30, 300 - len(got)))
                    consumer.commit()
            assert sorted(got) == list(range(300))
            for queue_id in range(3):
                part = [number for number in got if number >= 10 and number % 3 == queue_id]
                assert part == sorted(part)
            with reader.consume(
                "Orders", "group", offsets=ConsumerOffsets.load(path, read_only=False), timeout=0
            ) as rest:
                assert list(rest) == []
        # The store's own progress was not touched.
        assert not (root / "config" / "consumerOffset.json").exists()
    finally:
        writer.communicate("", PATIENCE)
    assert ConsumerOffsets.load(path).list() == {
        ("group", "Orders"): {
            queue_id: 10 * (queue_id == 0) + len(range(10 + (queue_id - 10) % 3, 300, 3)) for queue_id in range(3)
        }
    }


def test_a_reader_waits_with_pauses(root, tmp_path, monkeypatch):
    with MessageStore.open(root, config=SMALL) as store:
        fill(store, 3)
        with MessageStore.open(root, config=SMALL, read_only=True) as reader:
            counted = Counted(reader, monkeypatch)
            offsets = ConsumerOffsets(tmp_path / "offsets.json", read_only=False)
            loop = Loop(reader.consume("Orders", "group", offsets=offsets))
            assert loop.wait_for(3) == [0, 1, 2]
            time.sleep(0.6)
            before = counted.calls
            time.sleep(1.0)
            # Pauses of half a second by then; without them it would ask hundreds of thousands of times.
            assert counted.calls - before < 60
            fill(store, 3, first=3)
            fill(store, 2, first=6, queue_id=4)
            assert sorted(loop.wait_for(8)) == list(range(8))
            reader.close()
            loop.end()


def test_own_offsets_are_persisted_while_it_goes(root, tmp_path, monkeypatch):
    path = tmp_path / "offsets.json"
    now = [1000.0]
    monkeypatch.setattr("rmqstore.consumer.consumer.time.monotonic", lambda: now[0])
    with MessageStore.open(root, config=SMALL.replace(flush_consumer_offset_interval=5000)) as store:
        fill(store, 10)
        offsets = ConsumerOffsets(path, read_only=False)
        consumer = store.consume("Orders", "group", offsets=offsets, timeout=0)
        assert take(consumer, 3) == [0, 1, 2] and not path.exists()
        now[0] += 4.9
        assert take(consumer, 1) == [3] and not path.exists()
        now[0] += 0.2
        assert take(consumer, 1) == [4]
        assert ConsumerOffsets.load(path).get("group", "Orders", 0) == 4
        assert take(consumer, 2) == [5, 6]
        assert ConsumerOffsets.load(path).get("group", "Orders", 0) == 4
        consumer.close()
        assert ConsumerOffsets.load(path).get("group", "Orders", 0) == 6
        assert store.consumer_offsets.list() == {}


def test_progress_of_light_message_queues(root, clock):
    config = SMALL.replace(clock=clock, enable_lmq=True, enable_multi_dispatch=True)
    with MessageStore.open(root, config=config) as store:
        for number in range(10):
            store.put_message(Message("Orders", b"%d" % number, properties={"INNER_MULTI_DISPATCH": "%LMQ%mine"}))
        assert numbers(store.consume("%LMQ%mine", "%LMQ%group", timeout=0)) == list(range(10))
    with open(root / "config" / "lmqConsumerOffset.json", encoding="utf-8") as file:
        assert json.load(file)["lmqOffsetTable"] == {"%LMQ%mine@%LMQ%group": 10}


def test_a_consumer_is_told_when_the_store_cannot_be_written(store):
    consumer = store.consume("Orders", "group", timeout=0)
    assert repr(consumer).startswith("Consumer('Orders', 'group'")
    fill(store, 3)
    store._state.fail(OSError("broken"))
    # Reading goes on; a new consumer would promise what it cannot keep.
    assert numbers(consumer) == [0, 1, 2]
    with pytest.raises(StoreError, match="broken"):
        store.consume("Orders", "group")


# ----------------------------------------------------------------------------------------------------------- batches


def bodies_of(batches):
    return [[int(message.body) for message in batch] for batch in batches]


def test_batches_are_of_what_is_there(store):
    for queue_id in range(3):
        fill(store, 10, first=queue_id * 100, queue_id=queue_id)
    got = bodies_of(store.consume("Orders", "group", timeout=0, max_num=4).batches(7))
    assert [len(batch) for batch in got] == [7, 7, 7, 7, 2]
    assert sorted(itertools.chain.from_iterable(got)) == [queue_id * 100 + number for queue_id in range(3) for number in range(10)]
    assert store.consumer_offsets.list() == {("group", "Orders"): {0: 10, 1: 10, 2: 10}}


@pytest.mark.parametrize("commit", [False, True])
def test_a_batch_is_consumed_when_the_next_is_requested(store, commit):
    fill(store, 10)
    with store.consume("Orders", "group", timeout=0) as consumer:
        for batch in consumer.batches(4):
            if int(batch[0].body) == 4:
                if commit:
                    consumer.commit()
                break
    again = bodies_of(store.consume("Orders", "group", timeout=0).batches(100))
    assert again == [[8, 9] if commit else [4, 5, 6, 7, 8, 9]]


def test_batches_in_an_event_loop(store):
    import asyncio

    fill(store, 10)

    async def run():
        async with store.consume("Orders", "group", timeout=0) as consumer:
            return [[int(message.body) for message in batch] async for batch in consumer.batches(6)]

    assert asyncio.run(run()) == [list(range(6)), list(range(6, 10))]


@pytest.mark.parametrize("size", [0, -1, "x", None])
def test_a_batch_has_a_size(store, size):
    with pytest.raises((ValueError, TypeError), match="size is"):
        store.consume("Orders", "group", timeout=0).batches(size)


def test_other_tags_after_a_batch_commit_nothing_of_it(store):
    store.put_message(Message("Orders", b"0", tags="A"))
    store.put_messages([Message("Orders", b"1", tags="B") for _ in range(2000)])
    consumer = store.consume("Orders", "group", tags="A", timeout=0)
    assert bodies_of([next(consumer.batches(10))]) == [[0]] and store.consumer_offsets.get("group", "Orders", 0) <= 0
    consumer.close()
    assert numbers(store.consume("Orders", "group", tags="A", timeout=0)) == [0]
    assert store.consumer_offsets.get("group", "Orders", 0) == 2001


def test_an_error_in_a_batch_loses_no_message(store, monkeypatch):
    for queue_id in range(2):
        fill(store, 3, first=queue_id * 10, queue_id=queue_id)
    batches, get, failed = store.consume("Orders", "group", timeout=0).batches(10), store.get_message, []

    def fail(topic, queue_id, *given):
        if queue_id == 1 and not failed:
            failed.append(1)
            raise OSError(5, "Input/output error")
        return get(topic, queue_id, *given)

    monkeypatch.setattr(store, "get_message", fail)
    assert bodies_of(batches) == [[0, 1, 2], [10, 11, 12]] and failed


def test_a_closed_store_takes_no_commit(store):
    fill(store, 2)
    consumer = store.consume("Orders", "group", timeout=0)
    next(consumer)
    store.close()
    for durable in (False, True):
        with pytest.raises(StoreClosedError):
            consumer.commit(durable)
