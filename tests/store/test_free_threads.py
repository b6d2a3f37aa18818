"""Threads that share objects without a common lock, as a free-threaded Python runs them: answers, closing, changed arguments.

Owns the rules of ARCHITECTURE.md, "Threads and processes": what is shared guards itself, a close in another thread ends in an
answer or `StoreClosedError`, and an argument that another thread changes never ends in a crash.  With a GIL the same tests
switch threads as often as Python can.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from rmqstore import IndexFile, Message, MessageStore, StoreClosedError, StoreConfig
from rmqstore.message import compress_body, compression_flags

CONFIG = StoreConfig(
    mapped_file_size_commit_log=1 << 18,
    mapped_file_size_consume_queue=2000 * 20,
    max_hash_slot_num=200,
    max_index_num=2000,
)
INDEX_CONFIG = StoreConfig(max_hash_slot_num=100, max_index_num=20_000)
T0 = 1_700_000_000_000
WRITERS = 2


@pytest.fixture(autouse=True)
def _switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def run(*works):
    """Run each work on a thread of its own; the first failure is the test's."""
    failures = []
    start = threading.Barrier(len(works))

    def guarded(work):
        try:
            start.wait(60)
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]


def until_closed(step):
    """A work that calls `step` with 0, 1, 2 … until what it uses is closed."""

    def work():
        turn = 0
        while True:
            try:
                step(turn)
            except StoreClosedError:
                return
            turn += 1

    return work


class Shared:
    """One store that writers fill, each a queue of its own, and what has been returned to each of them."""

    def __init__(self, root):
        self.store = MessageStore.open(root, config=CONFIG)
        self.puts = [[] for _ in range(WRITERS)]
        self.begun = [0] * WRITERS

    @staticmethod
    def body(writer, number):
        return f"{writer}.{number}.".encode() * (1 + number % 40)

    def message(self, writer, number):
        # A property outside of ASCII, a key of its own and one that all share.
        return Message(
            "Orders", self.body(writer, number), keys=[f"w{writer}-{number}", "same"], properties={"ort": "Zürich"}
        )

    def put_one(self, writer):
        number = self.begun[writer]
        self.begun[writer] += 1
        self.puts[writer].append(self.store.put_message(self.message(writer, number), writer))

    def put_many(self, writer):
        number = self.begun[writer]
        self.begun[writer] += 20
        messages = [self.message(writer, number + i) for i in range(20)]
        self.puts[writer].extend(self.store.put_messages(messages, writer))

    def writer(self, writer):
        return until_closed(lambda turn: self.put_many(writer) if turn % 16 == 15 else self.put_one(writer))

    def check(self, message):
        assert not message.corrupt
        assert message.body == self.body(message.queue_id, message.queue_offset)
        assert message.properties["ort"] == "Zürich"
        assert message.keys == [f"w{message.queue_id}-{message.queue_offset}", "same"]

    def known(self, writer, dice):
        """The number and answer of a put that has returned, or None."""
        puts = self.puts[writer]
        count = len(puts)
        if not count:
            return None
        number = dice.choice((count - 1, dice.randrange(count)))
        return number, puts[number]

    def get(self, seed):
        dice = random.Random(seed)

        def step(turn):
            writer = turn % WRITERS
            known = self.known(writer, dice)
            if known is None:
                return
            number, put = known
            assert put.queue_offset == number
            got = self.store.get_message("Orders", writer, number, 32)
            assert got.messages[0].phy_offset == put.phy_offset
            for each, message in enumerate(got.messages):
                assert message.queue_offset == number + each
                self.check(message)

        return until_closed(step)

    def query(self, seed):
        dice = random.Random(seed)

        def step(turn):
            writer = turn % WRITERS
            known = self.known(writer, dice)
            if known is None:
                return
            number, put = known
            (hit,) = self.store.query_message("Orders", f"w{writer}-{number}")
            assert hit.phy_offset == put.phy_offset
            self.check(hit)
            hits = self.store.query_message("Orders", "same", 10)
            assert [each.phy_offset for each in hits] == sorted({each.phy_offset for each in hits}, reverse=True)
            assert hits and not hits.uncovered
            assert self.store.query_message("Orders", "none") == []

        return until_closed(step)

    def scan(self):
        def step(turn):
            known = [len(puts) for puts in self.puts]
            found = [0] * WRITERS
            for message in self.store.messages():
                self.check(message)
                assert message.queue_offset == found[message.queue_id]
                found[message.queue_id] += 1
            if any(count < least for count, least in zip(found, known)):
                # A reading that a close ended is shorter; the next use of the store says so.
                self.store.get_message("Orders", 0, 0, 1)
                raise AssertionError(f"{found} messages where {known} were put")

        return until_closed(step)

    def close_after(self, seconds):
        def work():
            time.sleep(seconds)
            self.store.close()

        return work


class OwnIndex:
    """An index file of one thread, which another one reads and closes."""

    def __init__(self, path):
        self.path = path
        self.index = IndexFile.create(path, INDEX_CONFIG)
        self.done = 0

    @staticmethod
    def key(number):
        return f"Orders#k{number % 500}"

    def put(self, turn):
        if turn >= INDEX_CONFIG.max_index_num - 1:
            time.sleep(0.001)
            self.index.read_header()
            return
        assert self.index.put_key(self.key(turn), turn * 100, T0 + turn)
        self.done = turn + 1

    def expected(self, number, count):
        # No two of these keys have the same hash.
        return [each * 100 for each in range(number, count, 500)][::-1][:64]

    def select(self, turn):
        known, number = self.done, turn % 500
        found = self.index.select_phy_offset(self.key(number), 64)
        assert len(found) >= len(self.expected(number, known))
        assert found == self.expected(number, found[0] // 100 + 1 if found else 0)

    def check(self):
        with IndexFile.open(self.path, INDEX_CONFIG, read_only=True) as index:
            # A put that a close refused wrote nothing.
            assert max(index.read_header()[5], 1) == self.done + 1
            for number in range(0, 500, 7):
                assert index.select_phy_offset(self.key(number), 64) == self.expected(number, self.done)


@pytest.mark.parametrize("seed", range(6))
def test_answers_until_another_thread_closes(tmp_path, seed):
    dice = random.Random(seed)
    shared = Shared(tmp_path / "store")
    indexes = [OwnIndex(tmp_path / f"2026010100000000{number}") for number in range(2)]
    pause = dice.uniform(0.0, 0.3)

    def close_indexes():
        time.sleep(pause * dice.random())
        for each in indexes:
            each.index.close()

    run(
        *(shared.writer(writer) for writer in range(WRITERS)),
        shared.get(seed),
        shared.query(seed),
        shared.scan(),
        *(until_closed(each.put) for each in indexes),
        *(until_closed(each.select) for each in indexes),
        shared.close_after(pause),
        close_indexes,
    )
    for each in indexes:
        each.check()
    with MessageStore.open(tmp_path / "store", config=CONFIG) as store:
        assert store.recovery_report.clean
        there = {}
        for message in store.messages():
            shared.check(message)
            there[message.queue_id, message.queue_offset] = message.phy_offset
        # A put that a close refused wrote nothing.
        assert there == {
            (writer, number): put.phy_offset
            for writer in range(WRITERS)
            for number, put in enumerate(shared.puts[writer])
        }
        for writer, puts in enumerate(shared.puts):
            assert store.max_queue_offset("Orders", writer) == len(puts)


def test_puts_of_two_threads_into_one_index_file(tmp_path):
    num = 8000
    with IndexFile.create(tmp_path / "20260101000000000", INDEX_CONFIG) as index:

        def put(first):
            for number in range(first, num, 2):
                assert index.put_key(f"Orders#{number}", number, T0)

        run(lambda: put(0), lambda: put(1))
        assert index.read_header()[5] == num + 1
        for number in range(num):
            assert number in index.select_phy_offset(f"Orders#{number}")


def test_stores_of_their_own_do_not_meet(tmp_path):
    def put(number):
        with MessageStore.open(tmp_path / str(number), config=CONFIG) as store:
            for each in range(300):
                store.put_message(Message("Orders", b"%d.%d" % (number, each), keys=[f"k{each}"]), each % 3)
            for each in range(0, 300, 7):
                (hit,) = store.query_message("Orders", f"k{each}")
                assert hit.body == b"%d.%d" % (number, each)
            assert [message.body for message in store.messages()] == [b"%d.%d" % (number, each) for each in range(300)]

    run(*(lambda number=number: put(number) for number in range(4)))


def test_a_message_that_threads_read(tmp_path):
    body = bytes(range(256)) * 40
    with MessageStore.open(tmp_path / "store", config=CONFIG) as store:
        for number in range(100):
            store.put_message(
                Message(
                    "Orders",
                    compress_body(body, "zlib"),
                    sys_flag=compression_flags("zlib"),
                    keys=[f"k{number}"],
                    tags="EU",
                    properties={"ort": "Zürich"},
                )
            )
        messages = store.get_message("Orders", 0, 0, 32).messages + list(store.messages())

        def read():
            for message in messages:
                assert message.tags == "EU" and message.keys == [f"k{message.queue_offset}"]
                assert message.body == body and not message.corrupt
                assert message.properties["ort"] == "Zürich"

        run(read, read, read)
        assert all(message.properties is message.properties for message in messages)


def test_a_message_that_another_thread_changes(tmp_path):
    bodies = [b"a" * size for size in range(1, 200)]
    message = Message("Orders", bodies[0], keys=["k0"])
    done = threading.Event()

    def change():
        turn = 0
        while not done.is_set():
            turn += 1
            message.body = bytes(bodies[turn % len(bodies)])
            message.properties = {"KEYS": f"k{turn % 9}", f"name{turn % 7}": "ü" * (turn % 5)}
            message.properties[f"more{turn % 11}"] = "x" * (turn % 300)

    with MessageStore.open(tmp_path / "store", config=CONFIG) as store:
        store.put_message(Message("Orders", b"a"))

        def put():
            try:
                for turn in range(600):
                    if turn % 2:
                        store.put_message(message)
                    else:
                        store.put_messages([message] * 3)
            finally:
                done.set()

        run(change, put)
        found = list(store.messages())
        assert len(found) == 1 + 300 * 4
        for each in found:
            assert not each.corrupt and each.body == b"a" * len(each.body)
            assert set(each.properties) <= {"KEYS"} | {f"name{i}" for i in range(7)} | {f"more{i}" for i in range(11)}


def test_lists_that_another_thread_changes(tmp_path):
    keys = [f"Orders#{number}" for number in range(2000)]
    done = threading.Event()

    def change():
        turn = 0
        while not done.is_set():
            turn += 1
            keys[turn % len(keys)] = f"Orders#{turn % 4000}"
            if turn % 50 == 0:
                keys.append("".join(["Orders#", str(turn)]))
                del keys[turn % 1000]

    with IndexFile.create(tmp_path / "20260101000000000", INDEX_CONFIG) as index:
        index.put_keys(keys, range(2000), [T0] * 2000)

        def select():
            try:
                for _ in range(200):
                    # A list that became shorter while it was read is refused.
                    try:
                        offsets, rows = index.select_phy_offsets(keys)
                    except ValueError:
                        continue
                    assert len(rows) >= 2000 and rows[-1] == len(offsets)
            finally:
                done.set()

        run(change, select)


def test_nothing_is_printed_at_the_end_of_a_program(tmp_path):
    # A free-threaded Python clears modules before it calls the last finalizers.
    program = """
        import sys, threading
        from rmqstore import IndexFile, Message, MessageStore, StoreConfig

        config = StoreConfig(mapped_file_size_commit_log=65536, max_hash_slot_num=10, max_index_num=100)
        store = MessageStore.open(sys.argv[1], config=config)
        store.put_message(Message("Orders", b"1", keys=["k"]))
        messages = store.get_message("Orders", 0, 0).messages
        reading = iter(store.messages())
        next(reading)
        cycle = [store, messages, reading]
        cycle.append(cycle)
        kept = threading.local()
        kept.store = store
        sys.kept = MessageStore.open(sys.argv[1], config=config, read_only=True)
        if len(sys.argv) > 2:
            store.close()
    """
    for more in ([], ["close"]):
        ended = subprocess.run(
            [
                sys.executable,
                "-W",
                "ignore::ResourceWarning",
                "-c",
                textwrap.dedent(program),
                tmp_path / "store",
                *more,
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=os.environ,
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
