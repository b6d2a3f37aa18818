"""Consuming and waiting in an event loop: no thread for who waits, cancellation, closing, many waiters, other loops.

Owns `async for` over a consumer and `wait_for_messages_async`.  What a consumer commits is `test_consume`'s; here it
is seen that both ways of iterating agree.
"""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from rmqstore import ConsumerOffsets, Message, MessageStore, StoreClosedError, StoreConfig

CONFIG = StoreConfig(
    mapped_file_size_commit_log=1 << 16,
    mapped_file_size_consume_queue=2000,
    max_hash_slot_num=10,
    max_index_num=20,
)
PATIENCE = 240


@pytest.fixture
def store(tmp_path):
    with MessageStore.open(tmp_path / "store", config=CONFIG) as store:
        yield store


def put(store: MessageStore, *bodies: bytes, topic: str = "Orders", queue_id: int = 0) -> None:
    for body in bodies:
        store.put_message(Message(topic, body), queue_id)


def run(awaitable):
    async def limited():
        return await asyncio.wait_for(awaitable, PATIENCE)

    return asyncio.run(limited())


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def progress(store: MessageStore, group: str = "g") -> int:
    return store.consumer_offsets.get(group, "Orders", 0)


def test_async_for_takes_what_for_takes(store):
    put(store, *(b"%d" % number for number in range(100)))
    put(store, b"other", queue_id=3)

    async def work():
        async with store.consume("Orders", "async", timeout=0) as consumer:
            return [message.body async for message in consumer]

    with store.consume("Orders", "sync", timeout=0) as consumer:
        wanted = [message.body for message in consumer]
    assert run(work()) == wanted and len(wanted) == 101
    assert progress(store, "async") == progress(store, "sync") == 100


def test_a_put_wakes_who_waits_and_no_thread_waits(store):
    async def work():
        consumer = store.consume("Orders", "g")
        before = threading.active_count()
        waiting = asyncio.create_task(anext(consumer))
        await until(lambda: store._state.waiting == 1)
        assert threading.active_count() == before
        # On the loop's own thread, and on another.
        put(store, b"first")
        bodies = [(await waiting).body]
        waiting = asyncio.create_task(anext(consumer))
        await until(lambda: store._state.waiting == 1)
        thread = threading.Thread(target=put, args=(store, b"second"))
        thread.start()
        bodies.append((await waiting).body)
        thread.join()
        consumer.commit()
        await consumer.aclose()
        return bodies

    assert run(work()) == [b"first", b"second"]
    assert progress(store) == 2 and store._state.waiting == 0


def test_the_message_in_work_comes_again_after_a_cancellation(store):
    put(store, b"a", b"b", b"c")

    async def work(seen):
        async with store.consume("Orders", "g") as consumer:
            async for message in consumer:
                seen.append(message.body)
                if message.body == b"b":
                    await asyncio.sleep(PATIENCE)

    async def cancelled():
        seen = []
        task = asyncio.create_task(work(seen))
        await until(lambda: seen == [b"a", b"b"])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert progress(store) == 1
        # While it waits, nothing is in work: all that was handed out is done.
        seen = []
        task = asyncio.create_task(work(seen))
        await until(lambda: seen == [b"b"])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with store.consume("Orders", "g") as consumer:
            assert [(await anext(consumer)).body, (await anext(consumer)).body] == [b"b", b"c"]
            waiting = asyncio.create_task(anext(consumer))
            await until(lambda: store._state.waiting == 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert store._state.waiting == 0 and not store._state.arrived._futures
            put(store, b"d")
            assert (await anext(consumer)).body == b"d"

    run(cancelled())
    assert progress(store) == 3


def test_closing_ends_every_waiter(store):
    async def work():
        consumers = [store.consume("Orders", f"g{number}") for number in range(20)]
        tasks = [asyncio.create_task(anext(each, None)) for each in consumers]
        tasks.append(asyncio.create_task(store.wait_for_messages_async(lambda: False)))
        await until(lambda: store._state.waiting == 21)
        await asyncio.to_thread(store.close)
        return await asyncio.gather(*tasks)

    assert run(work()) == [None] * 20 + [False]
    with pytest.raises(StoreClosedError):
        run(store.wait_for_messages_async(lambda: True))


def test_many_waiters_each_get_every_message(store):
    # A thousand groups, a put now and then, and the same number of threads as before.
    groups, messages = 1000, 3

    async def one(number):
        bodies = []
        async with store.consume("Orders", f"g{number}", max_num=2) as consumer:
            async for message in consumer:
                bodies.append(message.body)
                if len(bodies) == messages:
                    return bodies

    async def work():
        before = threading.active_count()
        tasks = [asyncio.create_task(one(number)) for number in range(groups)]
        await until(lambda: store._state.waiting == groups)
        assert threading.active_count() == before
        for number in range(messages):
            put(store, b"%d" % number)
            await asyncio.sleep(0)
        return await asyncio.gather(*tasks)

    assert run(work()) == [[b"0", b"1", b"2"]] * groups
    assert store._state.waiting == 0 and not store._state.arrived._futures


def test_other_tasks_get_their_turn(store):
    put(store, *(b"%d" % number for number in range(64)))

    async def work():
        turns = 0

        async def other():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        async with store.consume("Orders", "g", max_num=4, timeout=0) as consumer:
            assert len([message async for message in consumer]) == 64
        task.cancel()
        return turns

    assert run(work()) >= 16


def test_a_timeout(store):
    async def work():
        started = time.monotonic()
        async with store.consume("Orders", "g", timeout=0.05) as consumer:
            assert [message async for message in consumer] == []
        assert await store.wait_for_messages_async(lambda: False, 0) is False
        assert await store.wait_for_messages_async(lambda: False, 0.05) is False
        assert await store.wait_for_messages_async(lambda: True, 0) is True
        with pytest.raises(ZeroDivisionError):
            await store.wait_for_messages_async(lambda: 1 / 0)
        return time.monotonic() - started

    assert 0.1 <= run(work()) < PATIENCE
    assert store._state.waiting == 0


def test_loops_and_threads_wait_side_by_side(store):
    answers = []

    def wait_in_a_thread():
        answers.append(store.wait_for_messages(lambda: store.max_queue_offset("Orders") > 0, PATIENCE))

    def wait_in_a_loop():
        answers.append(run(store.wait_for_messages_async(lambda: store.max_queue_offset("Orders") > 0)))

    threads = [threading.Thread(target=each) for each in (wait_in_a_thread, wait_in_a_loop, wait_in_a_loop)]
    for thread in threads:
        thread.start()
    while store._state.waiting < 3:
        time.sleep(0.001)
    put(store, b"x")
    for thread in threads:
        thread.join(PATIENCE)
    assert answers == [True] * 3


def test_a_loop_that_is_gone_harms_no_put(store):
    async def abandon():
        # Nobody ends this one: the loop is closed around it.
        store._state.waiting += 1
        store._state.arrived.future(asyncio.get_running_loop())

    asyncio.run(abandon())
    put(store, b"x")
    assert not store._state.arrived._futures
    store._state.waiting -= 1


def test_a_read_only_store_is_looked_at_after_pauses(store, tmp_path):
    put(store, b"before")
    path = tmp_path / "progress.json"

    async def work():
        with MessageStore.open(store.path, config=CONFIG, read_only=True) as reader:
            offsets = ConsumerOffsets.load(path, read_only=False)
            async with reader.consume("Orders", "g", offsets=offsets) as consumer:
                bodies = [(await anext(consumer)).body]
                waiting = asyncio.create_task(anext(consumer))
                await asyncio.sleep(0.03)
                put(store, b"after")
                bodies.append((await waiting).body)
                consumer.commit()
            waiting = asyncio.create_task(reader.wait_for_messages_async(lambda: False))
            await asyncio.sleep(0.03)
        # The reader is closed.
        return bodies, await waiting

    assert run(work()) == ([b"before", b"after"], False)
    assert ConsumerOffsets.load(path).get("g", "Orders", 0) == 2


def test_progress_of_its_own_is_not_written_on_the_loops_thread(store, tmp_path, monkeypatch):
    put(store, b"a", b"b")
    threads = []
    offsets = ConsumerOffsets.load(tmp_path / "progress.json", read_only=False)
    persist = offsets.persist

    def noted(self: ConsumerOffsets) -> None:
        threads.append(threading.current_thread())
        persist()

    monkeypatch.setattr(ConsumerOffsets, "persist", noted)

    async def work():
        async with store.consume("Orders", "g", offsets=offsets, timeout=0) as consumer:
            async for _ in consumer:
                consumer._persisted -= 3600

    run(work())
    assert len(threads) == 3 and threading.main_thread() not in threads
    assert ConsumerOffsets.load(tmp_path / "progress.json").get("g", "Orders", 0) == 2


def test_a_consumer_that_was_closed_ends(store):
    put(store, b"a", b"b")

    async def work():
        consumer = store.consume("Orders", "g")
        assert (await anext(consumer)).body == b"a"
        await consumer.aclose()
        await consumer.aclose()
        return [message async for message in consumer]

    # It was closed while its message was in work, which comes again.
    assert run(work()) == [] and progress(store) == -1
