"""Puts in an event loop: order, errors, one flush for many, cancellation."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rmqstore import InvalidMessageError, Message, MessageStore, StoreClosedError, StoreConfig

CONFIG = StoreConfig.embedded(mapped_file_size_commit_log=1 << 20, flush_disk_type="SYNC_FLUSH")


@pytest.fixture
def store(tmp_path):
    with MessageStore.open(tmp_path / "store", config=CONFIG) as store:
        yield store


def bodies(store):
    return [message.body for message in store.messages()]


def test_concurrent_puts_share_flushes(store, monkeypatch):
    flushes, flush = [], store._flushing.flush_log
    monkeypatch.setattr(store._flushing, "flush_log", lambda *given: (flushes.append(1), flush(*given))[1])

    async def run():
        return await asyncio.gather(*(store.put_message_async(Message("Orders", b"%d" % i), i % 3) for i in range(200)))

    results = asyncio.run(run())
    assert bodies(store) == [b"%d" % i for i in range(200)]
    assert [result.queue_offset for result in results] == [i // 3 for i in range(200)]
    # The first puts go alone, those that came in the meantime together.
    assert len(flushes) < 20


def test_the_loop_goes_on_while_a_put_waits_for_the_disk(store, monkeypatch):
    reached, proceed, flush = threading.Event(), threading.Event(), store._flushing.wait_until_flushed

    def wait(end):
        reached.set()
        assert proceed.wait(60)
        flush(end)

    monkeypatch.setattr(store._flushing, "wait_until_flushed", wait)

    async def run():
        put = asyncio.create_task(store.put_message_async(Message("Orders", b"x")))
        while not reached.is_set():
            await asyncio.sleep(0)
        assert not put.done()
        proceed.set()
        return await put

    assert asyncio.run(run()).queue_offset == 0


def test_one_invalid_message_fails_alone(store):
    async def run():
        puts = [store.put_message_async(Message("a b" if i in (3, 40) else "Orders", b"%d" % i)) for i in range(64)]
        return await asyncio.gather(*puts, return_exceptions=True)

    results = asyncio.run(run())
    assert [i for i, result in enumerate(results) if isinstance(result, InvalidMessageError)] == [3, 40]
    assert bodies(store) == [b"%d" % i for i in range(64) if i not in (3, 40)]


def test_messages_in_order(store):
    async def run():
        results = await store.put_messages_async([Message("Orders", b"%d" % i) for i in range(5)], 2)
        with pytest.raises(InvalidMessageError):
            await store.put_messages_async([Message("", b"")])
        assert await store.put_messages_async([]) == []
        return results

    assert [(result.queue_offset, result.size > 0) for result in asyncio.run(run())] == [(i, True) for i in range(5)]
    assert store.queue_ids("Orders") == [2]


def test_a_cancelled_task_stops_no_other(store):
    async def run():
        puts = [asyncio.create_task(store.put_message_async(Message("Orders", b"%d" % i))) for i in range(10)]
        await asyncio.sleep(0)
        puts[4].cancel()
        return await asyncio.gather(*puts, return_exceptions=True)

    results = asyncio.run(run())
    assert [i for i, result in enumerate(results) if isinstance(result, BaseException)] == [4]
    assert set(bodies(store)) >= {b"%d" % i for i in range(10) if i != 4}


def test_several_loops_and_a_closed_store(store):
    def loop(number):
        async def run():
            await asyncio.gather(*(store.put_message_async(Message("Orders", b"%d" % i), number) for i in range(50)))

        asyncio.run(run())

    threads = [threading.Thread(target=loop, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [store.max_queue_offset("Orders", number) for number in range(4)] == [50] * 4
    store.close()
    with pytest.raises(StoreClosedError):
        asyncio.run(store.put_message_async(Message("Orders", b"x")))


def test_puts_go_on_after_the_task_that_puts_was_cancelled(store):
    async def run():
        put = asyncio.create_task(store.put_message_async(Message("Orders", b"x")))
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.gather(put, return_exceptions=True)
        return await asyncio.wait_for(store.put_message_async(Message("Orders", b"y")), 60)

    asyncio.run(run())
    assert bodies(store)[-1] == b"y" and store._waiting == {}


def test_consumers_in_all_threads_of_the_pool_keep_no_put_out(store):
    async def run():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        consumer = store.consume("Orders", "group", timeout=60)
        waiting = asyncio.create_task(asyncio.to_thread(next, consumer))
        await asyncio.sleep(0.01)
        await store.put_message_async(Message("Orders", b"x"))
        return await waiting

    assert asyncio.run(run()).body == b"x"
