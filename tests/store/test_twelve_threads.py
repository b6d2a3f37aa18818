"""Twelve threads on one store and one index file, a while: what each reads is whole, and at the end all is there.

Owns the program that ThreadSanitizer watches (`make sanitize-threads`); without it these are tests of the answers.  Some
of the calls let go of the GIL: batches, tables, scans, many keys at once.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import numpy as np
import pytest

from rmqstore import IndexFile, Message, MessageStore, StoreConfig

pa = pytest.importorskip("pyarrow")

CONFIG = StoreConfig(
    mapped_file_size_commit_log=4 << 20,
    mapped_file_size_consume_queue=6000 * 20,
    max_hash_slot_num=500,
    max_index_num=20_000,
)
T0 = 1_700_000_000_000
WATCHED = os.environ.get("RMQSTORE_SANITIZE") == "thread"
# Every step is some thirty times as slow where it is watched.
SECONDS = 12.0 if WATCHED else 1.5
BATCH = 2500  # messages of a batch that lets go of the GIL


@pytest.fixture(autouse=True)
def _switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Crew:
    """Threads that do their work again and again until the time is over, or one of them failed."""

    def __init__(self, seconds):
        self.until = time.monotonic() + seconds
        self.failures = []
        self.turns = {}
        self.threads = []

    def start(self, work):
        def run():
            turn = 0
            try:
                while time.monotonic() < self.until and not self.failures:
                    work(turn)
                    turn += 1
            except BaseException as error:
                self.failures.append(error)
            self.turns[work.__name__] = self.turns.get(work.__name__, 0) + turn

        self.threads.append(threading.Thread(target=run))

    def run(self):
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join(240)
            assert not thread.is_alive(), "a thread hangs"
        if self.failures:
            raise self.failures[0]
        assert all(self.turns.values()), self.turns


def test_twelve_threads_on_one_store_and_one_index_file(tmp_path):
    store = MessageStore.open(tmp_path / "store", config=CONFIG)
    index = IndexFile.create(tmp_path / "index", StoreConfig(max_hash_slot_num=4000, max_index_num=2_000_000))
    crew = Crew(SECONDS)
    put_num = [0] * 4  # each thread that puts counts its own
    entry_num = [0]
    hashes = (np.arange(BATCH * 8, dtype=np.int32) * 7919) % 100_003
    columns = ["topic", "keys", "tags", "body", "queue_offset", "phy_offset", "properties", "born_host", "corrupt"]

    def body(thread, turn):
        return f"{thread}.{turn}".encode() * 8

    def put_first(turn):
        store.put_message(Message("Orders", body(0, turn), keys=[f"first-{turn}", "same"], tags="EU"), 0)
        put_num[0] = turn + 1

    def put_second(turn):
        store.put_message(Message("Orders", body(1, turn), keys=[f"second-{turn}"], tags="US"), 1)
        put_num[1] = turn + 1

    def put_batches(turn):
        store.put_messages([Message("Batches", body(2, i), keys=[f"batch-{turn}-{i}"]) for i in range(BATCH)])
        put_num[2] = (turn + 1) * BATCH

    def put_tables(turn):
        keys = [[f"table-{turn}-{i}"] for i in range(BATCH)]
        store.put_table(
            pa.table({"body": [body(3, i) for i in range(BATCH)], "keys": keys}), topic="Tables", queue_id=0
        )
        put_num[3] = (turn + 1) * BATCH

    def get_oldest(turn):
        known = put_num[0]
        first = max(known - 40, 0)
        got = store.get_message("Orders", 0, first, 32)
        # As in RocketMQ, one answer is of one file of the queue.
        units = store.config.consume_queue_file_size // 20
        assert len(got.messages) >= min(known - first, 32, units - first % units)
        for message in got.messages:
            assert not message.corrupt and message.body == body(0, message.queue_offset)

    def get_newest(turn):
        known = put_num[1]
        if known:
            (message,) = store.get_message("Orders", 1, known - 1, 1).messages
            assert not message.corrupt and message.body == body(1, known - 1)
            assert store.message_at(message.phy_offset).body == message.body

    def query(turn):
        known = put_num[0]
        if known:
            (hit,) = store.query_message("Orders", f"first-{known - 1}")
            assert hit.body == body(0, known - 1)
            assert store.query_offsets("Orders", f"first-{known - 1}") == [hit.phy_offset]
        assert min(10, known) <= len(store.query_message("Orders", "same", 10)) <= 10

    def scan(turn):
        last = -1
        for batch in store.scan(columns=columns, views=turn % 2 == 0):
            offsets = batch.column("phy_offset").to_numpy()
            assert offsets[0] > last and (np.diff(offsets) > 0).all()
            last = offsets[-1]
            assert not any(batch.column("corrupt").to_pylist())

    def get_tables(turn):
        known = put_num[3]
        if known:
            begin = max(known - 3000, 0)
            table = store.get_table("Tables", 0, begin, 3000, columns=["body", "queue_offset"], views=turn % 2 == 0)
            assert len(table) >= min(known, 3000)
            assert table["body"][0].as_py() == body(3, begin % BATCH)

    def put_entries(turn):
        first = entry_num[0]
        if first + len(hashes) < index.index_num:
            offsets = np.arange(first, first + len(hashes), dtype=np.int64)
            assert index.put_hashes(hashes, offsets, np.full(len(hashes), T0 + turn * 1000)) == len(hashes)
            entry_num[0] = first + len(hashes)
        else:
            time.sleep(0.01)

    def select_entries(turn):
        known = entry_num[0]
        if known:
            found = index.select_hash(int(hashes[turn % len(hashes)]), 64)
            assert found == sorted(found, reverse=True) and found
            keys = [f"key-{i}" for i in range(500)]
            offsets, rows = index.select_phy_offsets(keys, 16)
            assert len(rows) == 501 and rows[-1] == len(offsets)

    def walk_entries(turn):
        known = entry_num[0]
        assert index.read_header()[5] > known or known == 0
        if known:
            chain, _ = index.select_chain(int(hashes[turn % len(hashes)]))
            assert chain == sorted(chain, reverse=True) and chain and not index.damaged

    for work in (
        put_first, put_second, put_batches, put_tables, get_oldest, get_newest, query, scan, get_tables, put_entries,
        select_entries, walk_entries,
    ):  # fmt: skip
        crew.start(work)
    assert len(crew.threads) == 12
    crew.run()
    for (topic, queue_id), num in zip((("Orders", 0), ("Orders", 1), ("Batches", 0), ("Tables", 0)), put_num):
        assert store.max_queue_offset(topic, queue_id) == num
    assert index.read_header()[5] == entry_num[0] + 1
    assert index.check_links(2**62) == []
    index.close()
    store.close()
    with MessageStore.open(tmp_path / "store", config=CONFIG) as store:
        assert store.recovery_report.clean
        assert sum(len(batch) for batch in store.scan(columns=["phy_offset"])) == sum(put_num)
