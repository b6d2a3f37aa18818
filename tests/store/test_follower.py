"""Several users: a reader next to a writer, processes that race for a store, forked children, many threads.

Owns what a reader may believe of a store that another process writes to, that nothing of a reader is seen by the writer,
and that the right to write is one process's.  Children talk over pipes, so that no step depends on timing; only the
long runs have a length, which says how much is tried and never decides.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import re
import select
import shutil
import stat
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from mappings import MAPS, mappings

from rmqstore import (
    GetMessageStatus,
    Message,
    MessageStore,
    StoreChangedError,
    StoreClosedError,
    StoreConfig,
    StoreLockedError,
    StorePoisonedError,
    describe,
    verify,
)
from rmqstore._core import FileStream
from rmqstore.commitlog import log_end
from rmqstore.files.mapped_file_queue import MappedFileQueue
from rmqstore.files.store_lock import StoreLock
from rmqstore.store import upkeep

CONFIG_TEXT = (
    "StoreConfig(mapped_file_size_commit_log=8192, mapped_file_size_consume_queue=400, max_hash_slot_num=20, "
    "max_index_num=60, enable_consume_queue_ext=False)"
)
CONFIG = eval(CONFIG_TEXT, {"StoreConfig": StoreConfig})
QUIET = CONFIG.replace(
    flush_interval_commit_log=0,
    flush_interval_consume_queue=0,
    flush_consumer_offset_interval=0,
    clean_resource_interval=0,
)
PATIENCE = 240
needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux about locks and open files")


@pytest.fixture
def lock_held_by_hand(monkeypatch):
    """Keep the thread of a store from taking a lost lock again, which it does every ten seconds."""
    monkeypatch.setattr(upkeep, "_HOLD_INTERVAL", 3_600_000)


class Child:
    """A Python process that reads lines and answers with lines; ended with the ``with`` block."""

    PRELUDE = f"""
        import contextlib, faulthandler, itertools, json, os, sys, threading, time
        from rmqstore import *
        CONFIG = {CONFIG_TEXT}
        def say(*words):
            print(*words, flush=True)
        def hear():
            return sys.stdin.readline().strip()
    """

    def __init__(self, script: str, *arguments: object):
        text = textwrap.dedent(self.PRELUDE) + textwrap.dedent(script)
        self.process = subprocess.Popen(
            [sys.executable, "-c", text, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._rest = b""

    def say(self, text: str = "") -> None:
        self.process.stdin.write(text.encode() + b"\n")

    def hear(self, patience: float = PATIENCE) -> str:
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self.process.stdout], [], [], patience)
            assert ready, "the child says nothing"
            piece = self.process.stdout.read(65536)
            assert piece, f"the child ended with {self.process.wait(PATIENCE)}"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def says_something(self) -> bool:
        return b"\n" in self._rest or bool(select.select([self.process.stdout], [], [], 0)[0])

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(0 if exc_info[0] else PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            if exc_info[0] is None:
                raise
        self.process.stdout.close()


class Other:
    """Another process that opens and closes a store, or says who holds its lock, when it is told to."""

    SCRIPT = """
        import fcntl, struct
        store = None
        for line in sys.stdin:
            what, _, root = line.strip().partition(" ")
            if what == "open":
                try:
                    store = MessageStore.open(root, config=CONFIG)
                    store.put_message(Message("Orders", b"%d:" % os.getpid()))
                    say("open")
                except StoreLockedError as error:
                    say("refused", error)
            elif what == "close":
                if store is not None:
                    store.close()
                store = None
                say("closed")
            else:
                with open(os.path.join(root, "lock"), "r+b") as file:
                    asked = struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 1, 0)
                    kind, _, _, _, process = struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_GETLK, asked))
                say(0 if kind == fcntl.F_UNLCK else process)
    """

    def __init__(self, child: Child):
        self.child = child
        self.pid = child.process.pid

    def open(self, root) -> str:
        self.child.say(f"open {root}")
        return self.child.hear()

    def close(self) -> None:
        self.child.say("close")
        assert self.child.hear() == "closed"

    def lock_holder(self, root) -> int:
        self.child.say(f"holder {root}")
        return int(self.child.hear())


@pytest.fixture(scope="module")
def others():
    """Three other processes."""
    with contextlib.ExitStack() as stack:
        yield [Other(stack.enter_context(Child(Other.SCRIPT))) for _ in range(3)]


@pytest.fixture
def other(others):
    yield others[0]
    others[0].close()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


def fill(
    store: MessageStore, count: int, *, first: int = 0, topic: str = "Orders", queues: int = 2, size: int = 0
) -> None:
    for number in range(first, first + count):
        store.put_message(Message(topic, b"%d:" % number + b"x" * size, keys=[f"k{number}"], tags="t"), number % queues)


def number_of(message) -> int:
    return int(message.body.partition(b":")[0])


def numbers(messages) -> list[int]:
    return [number_of(message) for message in messages]


class Follower:
    """Reads a queue from its start, each message once, as a consumer does; checks what it is told on the way."""

    def __init__(self, store: MessageStore, topic: str, queue_id: int):
        self.store, self.topic, self.queue_id = store, topic, queue_id
        self.at = self.high = 0

    def read(self, max_num: int = 50) -> list:
        got = self.store.get_message(self.topic, self.queue_id, self.at, max_num)
        assert got.status in (
            GetMessageStatus.FOUND, GetMessageStatus.OFFSET_OVERFLOW_ONE, GetMessageStatus.NO_MESSAGE_IN_QUEUE,
        ), got.status  # fmt: skip
        # Ends only go forward, and a queue that had messages has them.
        assert got.max_queue_offset >= max(self.high, self.at)
        assert got.status is not GetMessageStatus.NO_MESSAGE_IN_QUEUE or self.at == 0 == self.high
        self.high = got.max_queue_offset
        for message in got.messages:
            assert not message.corrupt
            assert (message.topic, message.queue_id, message.queue_offset) == (self.topic, self.queue_id, self.at)
            self.at += 1
        assert got.next_queue_offset == self.at
        return got.messages


# ------------------------------------------------------------------------------------------------- next to a writer


def test_what_was_put_is_seen_at_once_without_refresh(root):
    """Rolls of the log, of queues and of the index, new queues and topics: all while the reader stays open."""
    with (
        MessageStore.open(root, config=QUIET) as writer,
        MessageStore.open(root, config=QUIET, read_only=True) as reader,
    ):
        assert reader.get_message("Orders").status is GetMessageStatus.NO_MESSAGE_IN_QUEUE
        followers: dict[tuple[str, int], Follower] = {}
        for number in range(300):
            topic, queue_id = f"Topic{number // 100}", number % 3
            put = writer.put_message(
                Message(topic, b"%d:" % number + b"x" * (number % 300), keys=[f"k{number}"]), queue_id
            )
            follower = followers.setdefault((topic, queue_id), Follower(reader, topic, queue_id))
            assert numbers(follower.read()) == [number]
            assert follower.read() == []
            assert number_of(reader.message_at(put.phy_offset)) == number
            assert number_of(reader.message_by_id(put.msg_id)) == number
            assert numbers(reader.query_message(topic, f"k{number}")) == [number]
            assert reader.query_offsets(topic, f"k{number}") == [put.phy_offset]
            assert reader.max_queue_offset(topic, queue_id) == put.queue_offset + 1
        assert len(writer.commit_log.files) > 5 and len(writer.index_service.names) == 6
        assert len(writer.queues.find("Topic1", 0).files) == 2
        reader.refresh()
        assert numbers(reader.messages()) == list(range(300))
        assert reader.topics() == writer.topics() and reader.queue_ids("Topic2") == [0, 1, 2]
        assert numbers(reader.query_message("Topic0", "k7")) == [7]


def test_times_of_what_was_put_are_seen_at_once_without_refresh(root):
    """A queue is looked at more often than the log: a unit of what was put since is no lost message."""
    clock = iter(range(1_700_000_000_000, 1_700_000_000_999))
    with MessageStore.open(root, config=QUIET.replace(clock=lambda: next(clock))) as writer:
        writer.put_message(Message("Orders", b"0"))
        with MessageStore.open(root, config=QUIET, read_only=True) as reader:
            for number in range(1, 60):
                assert reader.max_queue_offset("Orders") == number
                put = writer.put_message(Message("Orders", b"%d" % number))
                assert reader.offset_by_time("Orders", 0, put.store_timestamp) == number
                assert reader.offset_by_time("Orders", 0, put.store_timestamp, "upper") == number
                assert reader.stats().last_store_timestamp == put.store_timestamp


@pytest.mark.parametrize("passed_over", ["no entry yet", "garbage"])
def test_keys_that_no_index_file_takes_are_seen_at_once_without_refresh(root, passed_over):
    """A small index file without entries does not tell its geometry, a damaged one nothing: the log has the keys."""
    with MessageStore.open(root, config=QUIET) as writer:
        writer.put_message(Message("Orders", b"no key"))
        if passed_over == "garbage":
            writer.put_message(Message("Orders", b"-1:", keys=["k-1"]))
            (path,) = (root / "index").iterdir()
            path.write_bytes(b"\xff" * path.stat().st_size)
        with MessageStore.open(root, read_only=True) as reader:
            for number in range(20):
                writer.put_message(Message("Orders", b"%d:" % number, keys=[f"k{number}"]))
                found = reader.query_message("Orders", f"k{number}")
                assert numbers(found) == [number] or not found.complete
                assert reader.query_table([f"k{number}"], "Orders", ["body"]).num_rows == 1


def test_messages_and_ids_of_what_was_put_are_seen_at_once_without_refresh(root):
    with (
        MessageStore.open(root, config=QUIET) as writer,
        MessageStore.open(root, config=QUIET, read_only=True) as reader,
    ):
        for number in range(20):
            key = f"7F0000010000518C{number:016X}"
            put = writer.put_message(Message(f"Topic{number}", b"%d:" % number, properties={"UNIQ_KEY": key}))
            assert numbers(reader.messages(put.phy_offset)) == [number]
            assert number_of(reader.message_by_id(key)) == number


def open_and_close(root):
    MessageStore.open(root, read_only=True).close()


@pytest.mark.parametrize("look", [StoreConfig.infer, describe, open_and_close])
def test_a_file_that_goes_while_a_store_is_looked_at_is_not_missed(root, look, monkeypatch):
    """Retention deletes what was listed a moment ago."""
    with MessageStore.open(root, config=QUIET) as writer:
        for number in range(60):
            writer.put_message(Message("Orders", b"x" * 300, keys=[f"k{number}"]))
    real, left = os.open, [3]

    def gone(path, *arguments, **more):
        if left[0] and re.search(r"/(commitlog|index|consumequeue)/", os.fspath(path)):
            left[0] -= 1
            raise FileNotFoundError(2, "No such file or directory", path)
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, "open", gone)
    look(root)
    assert left == [0]


def test_a_batch_that_rolls_is_seen_whole(root):
    with (
        MessageStore.open(root, config=QUIET) as writer,
        MessageStore.open(root, config=QUIET, read_only=True) as reader,
    ):
        follower, seen = Follower(reader, "Orders", 0), []
        for turn in range(10):
            writer.put_messages(
                [Message("Orders", b"%d:" % (turn * 40 + i) + b"x" * 250, keys=["same"]) for i in range(40)]
            )
            while messages := follower.read(1000):
                seen += numbers(messages)
            assert seen == list(range((turn + 1) * 40))
            assert len(reader.query_message("Orders", "same", 10_000)) == len(seen)


WRITER = """
    import random
    dice = random.Random(int(sys.argv[2]))
    store = MessageStore.open(sys.argv[1], config=CONFIG)
    say("open")
    rate = int(sys.argv[4])
    begun = time.monotonic()
    until = begun + float(sys.argv[3])
    n = first = 0
    while time.monotonic() < until or n < first + 300:
        count = dice.choice((1, 1, 1, 2, 30))
        messages = [
            Message(f"Topic{(n + i) % 4}", b"%d:" % (n + i) + b"x" * dice.randrange(400), keys=[f"k{n + i}"], tags="t")
            for i in range(count)
        ]
        store.put_messages(messages, [(n + i) // 4 % 2 for i in range(count)])
        n += count
        while rate and n - first > rate * (time.monotonic() - begun):
            time.sleep(0.01)
        if dice.random() < 0.1:
            time.sleep(0.002)
        if dice.random() < 0.01:
            store.flush()
    say(n)
    hear()
    store.close()
"""


def check_message(message) -> int:
    number = number_of(message)
    assert (message.topic, message.queue_id) == (f"Topic{number % 4}", number // 4 % 2)
    assert message.queue_offset == number // 8
    assert message.keys == [f"k{number}"] and message.tags == "t"
    assert not message.body.partition(b":")[2].strip(b"x")
    return number


def follow_a_writer(root, seconds: float, threads: int = 1, rate: int = 0) -> None:
    # A long run would fill thousands of the smallest files, and every query looks into all of the index.
    text = CONFIG_TEXT if seconds < 10 else CONFIG_TEXT.replace("8192", "65536").replace("=60", "=20000")
    config = eval(text, {"StoreConfig": StoreConfig})
    failures: list[BaseException] = []
    seen: list[set[int]] = []
    ended = threading.Event()
    os.mkdir(root)
    with (
        Child(WRITER.replace("CONFIG", text), root, 7, seconds, rate) as writer,
        MessageStore.open(root, config=config, read_only=True) as reader,
    ):

        def follow(mine: set[int], dice: random.Random, scans: bool) -> None:
            followers = [Follower(reader, f"Topic{topic}", queue_id) for topic in range(4) for queue_id in range(2)]
            scanned = 0
            while True:
                last = ended.is_set()
                news = 0
                for follower in followers:
                    for message in follower.read(dice.choice((1, 10, 200))):
                        number = check_message(message)
                        assert number not in mine
                        mine.add(number)
                        news += 1
                # A record's entries come after its unit, so the newest may not be found yet; those of an earlier put are.
                if max(mine, default=0) > 60:
                    number = dice.randrange(max(mine) - 60)
                    if number in mine:
                        assert numbers(reader.query_message(f"Topic{number % 4}", f"k{number}")) == [number]
                if scans and dice.random() < 0.05:
                    # Whole records one after the other, up to an end that never goes back.
                    reader.refresh()
                    begin = max(reader.commit_log.max_offset // config.mapped_file_size_commit_log - 8, 0)
                    begin *= config.mapped_file_size_commit_log
                    found = [check_message(message) for message in reader.messages(begin)]
                    assert found == list(range(found[0], found[-1] + 1)) if found else not scanned
                    assert (found[-1] if found else 0) >= scanned
                    scanned = found[-1] if found else 0
                if last and not news:
                    return

        def run(*args) -> None:
            try:
                follow(*args)
            except BaseException as error:
                failures.append(error)

        assert writer.hear() == "open"
        crew = []
        for number in range(threads):
            seen.append(set())
            crew.append(threading.Thread(target=run, args=(seen[-1], random.Random(number), number == 0), daemon=True))
        for thread in crew:
            thread.start()
        count = int(writer.hear(seconds + PATIENCE))
        ended.set()
        for thread in crew:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a reader hangs"
        if failures:
            raise failures[0]
        # Every message, each once: nothing lost, nothing invented.
        assert all(mine == set(range(count)) for mine in seen) and count > 100
        reader.refresh()
        assert [check_message(message) for message in reader.messages()] == list(range(count))
        writer.say()
    assert not [finding for finding in verify(root) if finding.severity == "error"]


def test_a_reader_beside_a_writing_process(root):
    follow_a_writer(root, 2.0)


def test_readers_on_several_threads_of_one_store(root):
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        follow_a_writer(root, 1.5, threads=4)
    finally:
        sys.setswitchinterval(before)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("threads", [1, 4])
def test_a_reader_beside_a_writing_process_for_a_minute(root, threads):
    # Messages a second at which readers on several threads keep up.
    follow_a_writer(root, 60, threads, 1000)


def test_no_end_is_shown_that_is_none(root, monkeypatch):
    """Other threads may look at any moment of a refresh: no end of the log or of a queue is beyond what was written."""
    config = QUIET.replace(delete_file_batch_max=1000)
    # The core moves the ends of a writer's streams itself, so that they are asked for where they are kept.
    kept = FileStream.wrote_where
    written: dict[str, MappedFileQueue] = {}
    checked = [0]
    failures: list[str] = []

    def set_end(queue: MappedFileQueue, end: int) -> None:
        kept.__set__(queue, end)
        if not queue.read_only:
            written[queue.path] = queue
        elif following and any(queue is each for each in shown()):
            checked[0] += 1
            real = kept.__get__(written[queue.path]) if queue.path in written else 0
            if end > real:
                failures.append(f"{end} of {real} in {queue.path}")

    def shown() -> list[MappedFileQueue]:
        # Those that another thread can get hold of; a queue is loaded before it is shown.
        return [reader.commit_log.files, *(each.files for each in reader.queues._queues.values() if each is not None)]

    following = False
    monkeypatch.setattr(MappedFileQueue, "wrote_where", property(kept.__get__, set_end), raising=False)
    with (
        MessageStore.open(root, config=config) as writer,
        MessageStore.open(root, config=config, read_only=True) as reader,
    ):
        following = True
        for turn in range(3):
            topic = f"Topic{turn}"
            # Asked for before it is there, and before its first file is.
            assert reader.max_queue_offset(topic) == 0
            fill(writer, 30, topic=topic, queues=1, size=300)
            assert reader.max_queue_offset(topic) == 30
            assert len(reader.get_message(topic, 0, 0).messages) == 20
            reader.refresh()
            assert len(list(reader.messages()))
            # Nothing that the reader knows is left.
            fill(writer, 60, topic=topic, queues=1, size=300)
            delete_all_but_the_newest(writer)
            reader.refresh()
            assert reader.max_queue_offset(topic) == 90
    assert checked[0] > 20
    assert not failures, failures[0]


# ------------------------------------------------------------------------------------------------ half-written records

RECORDS = {
    "properties": (QUIET, Message("Orders", b"body of the record", keys=["k"], tags="t")),
    "no properties": (QUIET, Message("Orders", b"body of the record")),
    "no body": (QUIET, Message("Orders", b"", keys=["k"])),
    "body ends in zeros": (QUIET, Message("Orders", b"body" + bytes(20), keys=["k"])),
    "property CRC": (QUIET.replace(enabled_append_prop_crc=True), Message("Orders", b"body", keys=["k"])),
    "property CRC verified": (
        QUIET.replace(enabled_append_prop_crc=True, force_verify_prop_crc=True),
        Message("Orders", b"body", keys=["k"]),
    ),
    "IPv6": (QUIET.replace(store_host="[2001:db8::2]:10911"), Message("Orders", b"body", keys=["k"])),
}


@pytest.mark.parametrize("what", RECORDS)
def test_a_record_that_is_being_written_is_not_seen(root, what, monkeypatch):
    """A Java broker copies a record from its first byte to its last; a reader may look at every step of that."""
    config, message = RECORDS[what]
    with MessageStore.open(root, config=config) as store:
        fill(store, 3)
        put = store.put_message(message)
    # The broker runs, and its copy takes as long as this test.
    (root / "abort").write_bytes(b"")
    monkeypatch.setattr(log_end, "_COPIED_WITHIN", 1 << 62)
    path = root / "commitlog" / f"{0:020d}"
    content = path.read_bytes()
    record = content[put.phy_offset : put.phy_offset + put.size]
    with open(path, "r+b", buffering=0) as file:

        def write(pos: int, data: bytes) -> None:
            file.seek(put.phy_offset + pos)
            file.write(data)

        write(0, bytes(put.size))
        with MessageStore.open(root, config=config, read_only=True) as reader:
            for length in range(put.size + 1):
                write(0, record[:length])
                whole = not record[length:].strip(b"\0")
                reader.refresh()
                assert len(list(reader.messages())) == (4 if whole else 3), f"{length} of {put.size} bytes"
                # A new reader sees the same.
                with MessageStore.open(root, config=config, read_only=True) as other:
                    assert other.commit_log.max_offset == reader.commit_log.max_offset, f"{length} of {put.size} bytes"
                    assert len(list(other.messages())) == (4 if whole else 3)
        # Our own writer gives magic and size last.
        write(0, bytes(put.size))
        with MessageStore.open(root, config=config, read_only=True) as reader:
            for length in range(8, put.size + 1):
                write(8, record[8:length])
                reader.refresh()
                assert len(list(reader.messages())) == 3
            write(4, record[4:8])
            reader.refresh()
            assert len(list(reader.messages())) == 3
            write(0, record[:4])
            reader.refresh()
            assert [each.body for each in reader.messages()][3:] == [message.body]
            assert reader.message_at(put.phy_offset).queue_offset == put.queue_offset


@pytest.mark.parametrize("writer", ["closed", "killed", "idle"])
def test_a_newest_record_that_ends_in_zeros_is_seen(root, writer):
    # Brokers 4.9.1 to 5.1.4 write properties like this.
    clock = time.time_ns() // 1_000_000 - (0 if writer == "closed" else 6000)
    with MessageStore.open(root, config=QUIET.replace(clock=lambda: clock)) as store:
        fill(store, 3)
        put = store.put_message(Message("Orders", b"9", keys=["k"], properties={"last": "zeros\0"}))
    path = root / "commitlog" / f"{0:020d}"
    content = bytearray(path.read_bytes())
    # Our own encoding ends in a separator.
    content[put.phy_offset + put.size - 1] = 0
    path.write_bytes(content)
    if writer != "closed":
        (root / "abort").write_bytes(b"")
    with MessageStore.open(root, config=QUIET, read_only=True) as reader:
        assert [each.body for each in reader.messages()][3:] == [b"9"]
        assert reader.commit_log.max_offset == put.phy_offset + put.size
        reader.refresh()
        assert reader.scan(["body"]).read_all().num_rows == 4
        if writer == "idle":
            # One that comes while a reader follows.
            path.write_bytes(bytes(content[: put.phy_offset]).ljust(len(content), b"\0"))
    if writer == "idle":
        with MessageStore.open(root, config=QUIET, read_only=True) as reader:
            assert len(list(reader.messages())) == 3
            path.write_bytes(content)
            reader.refresh()
            assert len(list(reader.messages())) == 4


def test_a_unit_without_size_is_not_seen(root):
    with MessageStore.open(root, config=QUIET) as store:
        fill(store, 25, queues=1)
    path = root / "consumequeue" / "Orders" / "0" / f"{400:020d}"
    content = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:
        file.write(bytes(100))
        with MessageStore.open(root, config=QUIET, read_only=True) as reader:
            # The file is there and holds nothing yet; the log is ahead of its queue, as in a broker.
            follower = Follower(reader, "Orders", 0)
            assert numbers(follower.read(100)) == list(range(20)) and follower.read() == []
            for number in range(20, 25):
                at = (number - 20) * 20
                for length, seen in ((8, False), (12, True), (20, True)):
                    file.seek(at)
                    file.write(content[at : at + length])
                    assert reader.max_queue_offset("Orders", 0) == number + seen
                assert numbers(follower.read()) == [number] and follower.read() == []


def test_a_file_that_has_no_length_yet(root, tmp_path):
    """A Java broker makes a file and then extends it; a reader may come in between."""
    with MessageStore.open(root, config=QUIET) as store:
        fill(store, 40, queues=1)
        names = {
            "commitlog": f"{len(store.commit_log.files) * 8192:020d}",
            "consumequeue/Orders/0": f"{800:020d}",
            "index": "29991231235959999",
        }
    with MessageStore.open(root, config=QUIET, read_only=True) as reader:
        follower = Follower(reader, "Orders", 0)
        assert len(follower.read()) == 20
        for folder, name in names.items():
            (root / folder / name).touch()
            reader.refresh()
            assert numbers(reader.messages()) == list(range(40))
            assert numbers(reader.query_message("Orders", "k39")) == [39]
        assert len(follower.read()) == 20 and follower.read() == []
        with MessageStore.open(root, config=QUIET, read_only=True) as other:
            assert numbers(other.messages()) == list(range(40))
            assert numbers(other.query_message("Orders", "k39")) == [39]
            assert len(other.get_message("Orders", 0, 20).messages) == 20
        for folder, name in names.items():
            (root / folder / name).unlink()
        with MessageStore.open(root, config=QUIET) as store:
            fill(store, 40, first=40, queues=1)
            assert numbers(follower.read()) + numbers(follower.read()) == list(range(40, 80))


# ----------------------------------------------------------------------------------------------------------- retention


def delete_all_but_the_newest(writer: MessageStore) -> int:
    for name in os.listdir(os.path.join(writer.path, "commitlog")):
        os.utime(os.path.join(writer.path, "commitlog", name), (0, 0))
    return writer.delete_expired_files().segments


def mapped_deleted(root) -> list[str]:
    return [line for line in mappings(root) if "(deleted)" in line]


@pytest.fixture
def two(root):
    """A writer and a reader that has seen the first hundred messages."""
    config = QUIET.replace(delete_file_batch_max=1000)
    with MessageStore.open(root, config=config) as writer:
        fill(writer, 100, size=300)
        with MessageStore.open(root, config=config, read_only=True) as reader:
            assert numbers(reader.messages()) == list(range(100))
            yield writer, reader


def test_retention_by_the_writer(two, root):
    writer, reader = two
    followers = [Follower(reader, "Orders", queue_id) for queue_id in range(2)]
    for follower in followers:
        while follower.read():
            pass
    for number in range(100):
        reader.query_message("Orders", f"k{number}")
    # Whoever keeps up notices nothing.
    for number in range(100, 150):
        fill(writer, 1, first=number, size=300)
        if number % 10 == 0:
            delete_all_but_the_newest(writer)
        assert [each for follower in followers for each in numbers(follower.read())] == [number]
    assert delete_all_but_the_newest(writer) or writer.commit_log.min_offset > 20_000
    reader.refresh()
    left = numbers(writer.messages())
    assert numbers(reader.messages()) == left and left[-1] == 149
    assert reader.commit_log.min_offset == writer.commit_log.min_offset > 0
    for queue_id in range(2):
        assert reader.min_queue_offset("Orders", queue_id) == writer.min_queue_offset("Orders", queue_id) > 0
        got = reader.get_message("Orders", queue_id, 0)
        assert got.status is GetMessageStatus.OFFSET_TOO_SMALL
        assert got.next_queue_offset == writer.min_queue_offset("Orders", queue_id)
    for number in range(150):
        assert numbers(reader.query_message("Orders", f"k{number}")) == [number] * (number in left)
    # The space of what is gone is free again, although this process read it.
    if MAPS.exists():
        assert not mapped_deleted(root)


@pytest.mark.parametrize("looked", [True, False])
def test_a_reader_that_slept_through_it(root, looked):
    config = QUIET.replace(delete_file_batch_max=1000)
    with MessageStore.open(root, config=config) as writer:
        fill(writer, 100, size=300)
        with MessageStore.open(root, config=config, read_only=True) as reader:
            if looked:
                assert len(list(reader.messages())) == 100 and reader.query_message("Orders", "k1")
                for queue_id in range(2):
                    reader.get_message("Orders", queue_id, 0, 100)
            # Nothing of what it knew is left: neither segments nor queue or index files.
            fill(writer, 200, first=100, size=300)
            delete_all_but_the_newest(writer)
            left = numbers(writer.messages())
            assert left[0] > 200
            for queue_id in range(2):
                at, found = 0, []
                while (got := reader.get_message("Orders", queue_id, at)).next_queue_offset > at:
                    found += numbers(got.messages)
                    at = got.next_queue_offset
                # It may still read mapped files; the rest are the existing records, in order.
                assert found == sorted(set(found)) and found[-1] == 298 + queue_id
                assert [number for number in left if number % 2 == queue_id] == [n for n in found if n >= left[0]]
            for number in (0, 99, 150, left[0], left[-1]):
                hits = numbers(reader.query_message("Orders", f"k{number}"))
                assert hits == [number] if number in left else hits in ([], [number])
            assert len(reader.query_offsets("Orders", f"k{left[-1]}")) == 1
            reader.refresh()
            assert numbers(reader.messages()) == left


def test_files_that_go_while_they_are_listed(two, root, monkeypatch):
    """Retention in the other process strikes between listing a directory and looking at its entries."""
    writer, reader = two
    fill(writer, 50, first=100, size=300)
    real, strikes = os.scandir, []

    def scandir(path="."):
        with real(path) as entries:
            listed = list(entries)
        if strikes and strikes[0] in os.fspath(path):
            strikes.clear()
            assert delete_all_but_the_newest(writer)
        return contextlib.closing(Listed(listed))

    class Listed:
        def __init__(self, entries):
            self._entries = iter(entries)

        def __iter__(self):
            return self._entries

        def close(self) -> None:
            pass

    class Scan(Listed):
        def __enter__(self):
            return self

        def __exit__(self, *exc_info: object) -> None:
            pass

        def __next__(self):
            return next(self._entries)

    def scan(path="."):
        closing = scandir(path)
        return Scan(closing.thing._entries)

    monkeypatch.setattr(os, "scandir", scan)
    number = 150
    for folder in ("commitlog", "consumequeue/Orders/0", "index"):
        for look in ("refresh", "open"):
            fill(writer, 60, first=number, size=300)
            number += 60
            strikes.append(folder)
            if look == "refresh":
                reader.refresh()
            else:
                with MessageStore.open(root, config=QUIET, read_only=True) as other:
                    other.get_message("Orders", 0, 0)
                    assert number_of(list(other.messages())[-1]) == number - 1
                assert not strikes, f"{folder} was not listed"
            strikes.clear()
            reader.refresh()
            assert number_of(list(reader.messages())[-1]) == number - 1


# ------------------------------------------------------------------------------------------------- cut and replaced logs


def agree_or_say(reader: MessageStore, writer: MessageStore) -> bool:
    """The reader sees what the writer has, or says that it cannot; False if it said so."""
    try:
        reader.refresh()
    except StoreChangedError as error:
        assert "open it again" in str(error) and "commitlog" in str(error)
        with pytest.raises(StoreChangedError):
            reader.refresh()
        return False
    assert numbers(reader.messages()) == numbers(writer.messages())
    for queue_id in range(2):
        found = numbers(reader.get_message("Orders", queue_id, 0, 1000))
        assert found == numbers(writer.get_message("Orders", queue_id, 0, 1000))
    return True


@pytest.mark.parametrize("looked", ["at open", "after refresh", "while following"])
def test_a_cut_after_a_crash(root, tmp_path, looked):
    """The writer is killed in the middle of a record; the next one cuts it and goes on there."""
    with MessageStore.open(root, config=QUIET) as store:
        fill(store, 9)
        if looked == "while following":
            crashed = tmp_path / "crashed"
            shutil.copytree(root, crashed)
            reader = MessageStore.open(crashed, config=QUIET, read_only=True)
            assert len(list(reader.messages())) == 9
        put = store.put_message(Message("Orders", b"9:" + b"torn" * 50, keys=["k9"]), 1)
        segment = root / "commitlog" / f"{0:020d}"
        if looked == "while following":
            for folder in ("commitlog", "consumequeue/Orders/1", "index"):
                for name in os.listdir(root / folder):
                    # Into the same file, as a writer does.
                    with open(crashed / folder / name, "r+b") as file:
                        file.write((root / folder / name).read_bytes())
        else:
            crashed = tmp_path / "crashed"
            shutil.copytree(root, crashed)
        assert segment.exists()
    # Header and end are there, a page between them is not.
    with open(crashed / "commitlog" / f"{0:020d}", "r+b") as file:
        file.seek(put.phy_offset + 150)
        file.write(bytes(60))
    if looked != "while following":
        reader = MessageStore.open(crashed, config=QUIET, read_only=True)
    if looked != "at open":
        reader.refresh()
    with reader, MessageStore.open(crashed, config=QUIET) as writer:
        assert writer.commit_log.max_offset == put.phy_offset
        # Shorter than the torn record, so that a remembered end is after it.
        fill(writer, 1, first=9)
        agree_or_say(reader, writer)
        fill(writer, 5, first=10, size=100)
        agree_or_say(reader, writer)
    with MessageStore.open(crashed, config=QUIET, read_only=True) as reader:
        assert numbers(reader.messages()) == list(range(15))


@pytest.mark.parametrize("looked", ["at open", "after refresh"])
@pytest.mark.parametrize("more", [0, 1, 30])
def test_records_that_were_seen_and_cut(root, looked, more):
    """The user lets the damaged log be cut, and whole records with it; a reader that saw them says so."""
    with MessageStore.open(root, config=QUIET) as store:
        fill(store, 60, size=300)
        assert len(store.commit_log.files) == 4
    with MessageStore.open(root, config=QUIET, read_only=True) as reader:
        if looked == "after refresh":
            reader.refresh()
        assert len(list(reader.messages())) == 60
        (root / "abort").touch()
        with open(root / "commitlog" / f"{8192:020d}", "r+b") as file:
            file.seek(3000)
            file.write(bytes(300))
        with MessageStore.open(root, config=QUIET, recovery="truncate") as writer:
            kept = len(list(writer.messages()))
            assert 20 < kept < 30
            fill(writer, more, first=1000, size=299)
            with pytest.raises(StoreChangedError) as caught:
                reader.refresh()
            assert str(root) in str(caught.value) and "open it again" in str(caught.value)
            with MessageStore.open(root, config=QUIET, read_only=True) as again:
                assert agree_or_say(again, writer)


def test_a_recovery_that_cuts_nothing_is_not_noticed(root):
    with MessageStore.open(root, config=QUIET) as store:
        fill(store, 30, size=300)
    with MessageStore.open(root, config=QUIET, read_only=True) as reader:
        reader.refresh()
        follower = Follower(reader, "Orders", 0)
        for turn in range(1, 4):
            (root / "abort").touch()
            with MessageStore.open(root, config=QUIET) as writer:
                assert not writer.recovery_report.clean
                fill(writer, 30, first=turn * 30, size=300)
                assert agree_or_say(reader, writer)
        seen = []
        while messages := follower.read():
            seen += numbers(messages)
        assert seen == list(range(0, 120, 2))


@pytest.mark.parametrize("again", [True, False])
def test_a_next_segment_that_is_made_once_more(root, again):
    """A broker makes the next segment early; its recovery deletes that, and creates it again. No record that was read changed."""
    with MessageStore.open(root, config=QUIET) as store:
        fill(store, 10, size=300)
        end = store.commit_log.max_offset
    base = end - end % QUIET.mapped_file_size_commit_log + QUIET.mapped_file_size_commit_log
    path = root / "commitlog" / f"{base:020d}"

    def make_it() -> None:
        with open(path, "xb") as file:
            file.truncate(QUIET.mapped_file_size_commit_log)

    make_it()
    with MessageStore.open(root, config=QUIET, read_only=True) as reader:
        reader.refresh()
        assert reader.commit_log.files.file(base).mapped
        path.unlink()
        if again:
            make_it()
        reader.refresh()
        assert len(list(reader.messages())) == 10
        if again:
            path.unlink()
        with MessageStore.open(root, config=QUIET) as store:
            fill(store, 40, first=10, size=300)
        reader.refresh()
        assert numbers(reader.messages()) == list(range(50))


def test_a_writer_that_was_killed_and_came_back(root):
    """Really killed, again and again, with a reader that stays."""
    MessageStore.open(root, config=CONFIG).close()
    seen: list[int] = []
    with MessageStore.open(root, config=CONFIG, read_only=True) as reader:
        follower = Follower(reader, "Topic0", 0)
        for turn in range(2):
            # Nothing but whole records was published, so the recovery cuts nothing that was seen.
            with Child(
                WRITER.replace("first = 0", f"first = {len(list(reader.messages()))}", 1), root, turn, 600, 0
            ) as writer:
                assert writer.hear() == "open"
                wanted = len(seen) + 20
                deadline = time.monotonic() + PATIENCE
                while len(seen) < wanted:
                    assert time.monotonic() < deadline
                    seen += [check_message(message) for message in follower.read()]
                writer.process.kill()
                writer.process.wait(PATIENCE)
            with MessageStore.open(root, config=CONFIG) as recovered:
                assert not recovered.recovery_report.clean
                recovered.flush()
            while messages := follower.read():
                seen += [check_message(message) for message in messages]
            reader.refresh()
            everything = [check_message(message) for message in reader.messages()]
            assert everything == list(range(len(everything)))
            assert seen == [number for number in everything if number % 8 == 0]


# --------------------------------------------------------------------------------------------------------- no trace


def traces(root) -> dict[str, tuple]:
    """All that a reader could change: names, contents' times, sizes, places, links."""
    found = {}
    for folder, _, files in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            status = os.stat(path)
            found[path] = (
                stat.S_IFMT(status.st_mode), status.st_size, status.st_blocks, status.st_ino, status.st_nlink,
                status.st_mtime_ns, status.st_ctime_ns,
            )  # fmt: skip
    return found


@needs_linux
def test_a_reader_leaves_no_trace(root, other):
    with MessageStore.open(root, config=CONFIG) as store:
        fill(store, 100, size=200)
        store.consumer_offsets.commit("group", "Orders", 0, 3)
    before, threads = traces(root), set(threading.enumerate())
    descriptors = len(os.listdir("/proc/self/fd"))
    with MessageStore.open(root, config=CONFIG, read_only=True) as reader:
        for _ in range(3):
            reader.refresh()
            assert len(list(reader.messages())) == 100
            assert reader.get_message("Orders", 1).messages and reader.query_message("Orders", "k5")
            assert reader.get_message("Nothing").status is GetMessageStatus.NO_MESSAGE_IN_QUEUE
            assert reader.consumer_offsets.get("group", "Orders", 0) == 3
            assert reader.wait_for_messages(lambda: False, 0.02) is False
        assert set(threading.enumerate()) == threads
        assert traces(root) == before
        # No lock: a writer comes and goes as it likes.
        assert other.open(root) == "open"
        other.close()
        reader.refresh()
        assert len(list(reader.messages())) == 101
    assert len(os.listdir("/proc/self/fd")) == descriptors


# ------------------------------------------------------------------------------------------------------- who may write


@needs_linux
def test_processes_that_race_for_a_store(tmp_path, others):
    won: list[int] = []
    for turn in range(40):
        # A new store every few rounds: also making one is a race.
        root = tmp_path / f"store-{turn // 4}"
        for racer in others[turn % 3 :] + others[: turn % 3]:
            racer.child.say(f"open {root}")
        said = {racer.pid: racer.child.hear() for racer in others}
        winners = [pid for pid, text in said.items() if text == "open"]
        assert len(winners) == 1, said.values()
        won += winners
        for pid, text in said.items():
            if pid not in winners:
                assert text.startswith(f"refused process {winners[0]} (") and "has the store open" in text, text
                assert str(root / "lock") in text
        for racer in others:
            racer.close()
        if turn % 4 == 3:
            with MessageStore.open(root, config=QUIET) as store:
                assert store.recovery_report.clean
                assert numbers(store.messages()) == won[-4:]


@needs_linux
def test_a_lock_that_was_lost_is_taken_again(root, other, lock_held_by_hand):
    with MessageStore.open(root, config=QUIET) as store:
        assert other.lock_holder(root) == os.getpid()
        # Read all files like a backup of the directory, within this process.
        with open(root / "lock", "rb") as file:
            file.read()
        assert other.lock_holder(root) == 0
        store._upkeep.hold_lock()
        assert other.lock_holder(root) == os.getpid()
        fill(store, 3)
        # Holding it twice does no harm.
        store._store_lock.hold()
        assert other.lock_holder(root) == os.getpid()
    assert other.lock_holder(root) == 0


@needs_linux
def test_a_lock_that_was_lost_to_somebody_else(root, others, lock_held_by_hand):
    other, third = others[:2]
    store = MessageStore.open(root, config=QUIET)
    fill(store, 3)
    store.flush()
    with open(root / "lock", "rb") as file:
        file.read()
    assert other.open(root) == "open"
    with pytest.raises(StoreLockedError) as caught:
        store._upkeep.hold_lock()
    assert f"process {other.pid} (" in str(caught.value) and "lost the lock" in str(caught.value)
    # From here on the other one writes, and this one does not.
    for attempt in (lambda: fill(store, 1), store.flush, store.delete_expired_files):
        with pytest.raises(StorePoisonedError, match="lost the lock"):
            attempt()
    assert numbers(store.messages())[:3] == [0, 1, 2]
    store.close()
    assert third.lock_holder(root) == other.pid
    assert (root / "abort").exists()
    other.close()
    with MessageStore.open(root, config=QUIET) as store:
        assert numbers(store.messages()) == [0, 1, 2, other.pid]


def test_a_store_lock_by_itself(tmp_path):
    with StoreLock(str(tmp_path)) as lock:
        assert lock.path == str(tmp_path / "lock")
        # Also under another name of the same directory.
        os.symlink(tmp_path, tmp_path / "alias")
        for name in (tmp_path, tmp_path / "alias", tmp_path / "." / "alias"):
            with pytest.raises(StoreLockedError, match=f"this process \\({os.getpid()}\\)"):
                StoreLock(str(name))
    lock.release()
    lock.hold()
    with StoreLock(str(tmp_path / "alias")):
        pass
    assert (tmp_path / "lock").read_bytes() == b"lock"


def test_two_threads_that_race_for_a_store(root):
    for _ in range(20):
        barrier, won, lost = threading.Barrier(4), [], []

        def race(barrier=barrier, won=won, lost=lost) -> None:
            barrier.wait(PATIENCE)
            try:
                won.append(MessageStore.open(root, config=QUIET))
            except StoreLockedError as error:
                lost.append(str(error))

        threads = [threading.Thread(target=race) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert len(won) == 1 and len(lost) == 3
        assert all(f"this process ({os.getpid()}) has the store open" in text for text in lost)
        won[0].close()


# --------------------------------------------------------------------------------------------------------------- fork

FORK = """
    import signal, tempfile
    from rmqstore.store import upkeep
    upkeep._PREPARE_FROM_SIZE = 1000
    root, how = sys.argv[1:3]
    # Nothing may hang, as a lock would that nobody gives back: the alarm then ends it and says where.
    faulthandler.register(signal.SIGALRM, chain=True)
    busy = how == "busy"
    config = CONFIG.replace(
        flush_interval_commit_log=1 if busy else 0, flush_interval_consume_queue=1 if busy else 0,
        flush_commit_log_thorough_interval=0, flush_consume_queue_thorough_interval=0,
        flush_disk_type="SYNC_FLUSH" if busy else "ASYNC_FLUSH",
    )
    parent = os.getpid()
    store = MessageStore.open(root, config=config)
    store.consumer_offsets.commit("group", "Orders", 0, 1)
    store.flush()
    offsets = store.consumer_offsets
    for n in range(20):
        store.put_message(Message("Orders", b"%d:" % n + bytes(300), keys=[f"k{n}"]))
    reader = MessageStore.open(root, config=config, read_only=True)
    numbers = itertools.count(20)
    done, lock, acknowledged = threading.Event(), threading.Lock(), []

    def put():
        while not done.is_set():
            with lock:
                n = next(numbers)
            result = store.put_message(Message("Orders", b"%d:" % n + bytes(200), keys=[f"k{n}"]))
            acknowledged.append((n, result.queue_offset))
            list(reader.get_message("Orders", 0, max(result.queue_offset - 3, 0)))

    def everything_with_a_lock():
        # All locks of the store and of its parts, whatever they are called.
        found = []
        for part in (store, store._state.pool, store.queues, store.commit_log, store.index_service, store.consumer_offsets,
                     reader, reader._state.pool, reader.queues, reader.commit_log, reader.index_service):
            names = list(getattr(part, "__dict__", ())) + [
                name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())
            ]
            for name in dict.fromkeys(names):
                value = getattr(part, name, None)
                if hasattr(value, "acquire"):
                    found.append(value)
        return found

    def expect(kind, text, work):
        try:
            work()
        except kind as error:
            assert text in str(error), str(error)
            return
        raise AssertionError(f"no {kind.__name__}")

    def child(turn):
        signal.alarm(30)
        expect(StoreError, "opened by the parent", lambda: store.put_message(Message("Orders", b"child")))
        expect(StoreError, "opened by the parent", lambda: store.put_messages([Message("Orders", b"child")] * 3))
        expect(StoreError, "opened by the parent", store.flush)
        expect(StoreError, "opened by the parent", store.delete_expired_files)
        expect(StoreError, "opened by the parent", lambda: store.consume("Orders", "group"))
        # Reading what it has inherited is no harm.
        assert store.get_message("Orders").messages[0].body.startswith(b"0:")
        assert reader.get_message("Orders").messages[0].body.startswith(b"0:")
        assert len(store.query_message("Orders", "k1")) == 1 == len(reader.query_message("Orders", "k1"))
        assert len(list(store.messages())) >= 20
        assert store.consumer_offsets.get("group", "Orders", 0) == 1
        # Progress is the parent's as well, whether the child asks now or has it from before.
        for each in (store.consumer_offsets, offsets):
            with contextlib.suppress(StoreError):
                each.commit("group", "Orders", 0, 99)
                each.persist()
        expect(StoreLockedError, f"process {parent} (", lambda: MessageStore.open(root, config=config))
        if turn % 3 != 2:
            store.close()
            reader.close()
            expect(StoreClosedError, "closed", lambda: store.get_message("Orders"))
            expect(StoreLockedError, f"process {parent} (", lambda: MessageStore.open(root, config=config))
        with MessageStore.open(root, config=config, read_only=True) as mine:
            assert len(list(mine.messages())) >= 20
        # And a store of its own is one like any other.
        with tempfile.TemporaryDirectory() as own, MessageStore.open(own, config=config) as mine:
            assert mine.put_message(Message("Orders", b"mine")).queue_offset == 0

    def fork(turn):
        pid = os.fork()
        if pid:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        code = 1
        try:
            child(turn)
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            if turn % 3 == 1:
                # Exit like a program without a special case for forks: finalizers run.
                sys.stdout.flush()
                sys.exit(code) if code == 0 else os._exit(code)
            os._exit(code)

    threads = []
    if busy:
        threads = [threading.Thread(target=put, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
    rounds = 9 if busy else 4
    for turn in range(rounds):
        if busy:
            seen = len(acknowledged)
            while len(acknowledged) < seen + 5:
                time.sleep(0.001)
            code = fork(turn)
        else:
            # A segment is prepared, and another thread holds every lock there is.
            while not store.commit_log.files.prepared:
                store.put_message(Message("Orders", b"%d:" % next(numbers) + bytes(300)))
                store._upkeep.prepare_next_files()
            holding, may_go = threading.Event(), threading.Event()
            def hold():
                held = everything_with_a_lock()
                for each in held:
                    each.acquire()
                holding.set()
                may_go.wait()
                for each in reversed(held):
                    each.release()
            holder = threading.Thread(target=hold, daemon=True)
            holder.start()
            assert holding.wait(240)
            code = fork(turn)
            may_go.set()
            holder.join()
        assert code == 0, f"the child of round {turn} ended with {code}"
        assert os.path.exists(os.path.join(root, "abort"))
        say("look")
        assert hear() == "go on"
        # Rolls, with what was prepared before the fork.
        for n in range(40 if not busy else 0):
            store.put_message(Message("Orders", b"%d:" % next(numbers) + bytes(400)))
    done.set()
    for thread in threads:
        thread.join()
    store.flush()
    reader.close()
    store.close()
    say("done", next(numbers))
    assert hear() == "end"
"""


@needs_linux
@pytest.mark.parametrize("how", ["busy", "all locks held"])
def test_a_forked_child_cannot_harm_the_store(root, how):
    rounds = 0
    with Child(FORK, root, how) as child:
        while (said := child.hear()) == "look":
            # The parent still has the lock.
            with pytest.raises(StoreLockedError, match=f"process {child.process.pid} "):
                MessageStore.open(root, config=CONFIG)
            rounds += 1
            child.say("go on")
        count = int(said.partition(" ")[2])
        child.say("end")
    assert child.process.returncode == 0
    assert rounds == (9 if how == "busy" else 4)
    with MessageStore.open(root, config=CONFIG) as store:
        assert store.recovery_report.clean
        assert sorted(numbers(store.messages())) == list(range(count))
        assert store.max_queue_offset("Orders") == count
        assert store.consumer_offsets.get("group", "Orders", 0) == 1
        assert not [name for name in os.listdir(root) if name.startswith(".rmqstore-allocating")]
    assert not [finding for finding in verify(root) if finding.severity == "error"]


def test_a_child_that_outlives_its_parent(root):
    """The lock goes with the parent; the child's copy of the store stays what it was: not to be written."""
    script = """
        store = MessageStore.open(sys.argv[1], config=CONFIG)
        store.put_message(Message("Orders", b"0:"))
        if os.fork():
            say("parent")
            os._exit(0)
        hear()
        try:
            store.put_message(Message("Orders", b"1:"))
        except StoreError as error:
            say("refused", error)
        store.close()
        # Now it may open it like anybody else.
        with MessageStore.open(sys.argv[1], config=CONFIG) as mine:
            assert not mine.recovery_report.clean
            mine.put_message(Message("Orders", b"1:"))
        say("done")
    """
    with Child(script, root) as child:
        assert child.hear() == "parent"
        child.process.wait(PATIENCE)
        child.say()
        assert child.hear().startswith("refused the store was opened by the parent of this process")
        assert child.hear() == "done"
    with MessageStore.open(root, config=CONFIG) as store:
        assert store.recovery_report.clean and numbers(store.messages()) == [0, 1]


# ------------------------------------------------------------------------------------------------------- many threads


def eight_and_eight(root, seconds: float) -> None:
    config = CONFIG.replace(
        mapped_file_size_commit_log=1 << 16,
        mapped_file_size_consume_queue=2000,
        max_index_num=2000,
        flush_interval_commit_log=5,
        flush_interval_consume_queue=20,
        flush_consume_queue_thorough_interval=50,
    )
    store = MessageStore.open(root, config=config)
    done = threading.Event()
    failures: list[BaseException] = []
    puts: list[list] = [[] for _ in range(8)]
    topics = ("Orders", "Payments")

    def write(writer: int) -> None:
        dice = random.Random(writer)
        for turn in itertools.count():
            if done.is_set():
                return
            topic, queue_id = dice.choice(topics), dice.randrange(2)
            count = dice.choice((1, 1, 1, 12))
            messages = [
                Message(topic, f"{writer}.{turn}.{i}".encode(), keys=[f"w{writer}.{turn}.{i}"], tags=f"t{i % 2}")
                for i in range(count)
            ]
            put = store.put_message_batch if dice.random() < 0.3 else store.put_messages
            answers = put(messages, queue_id)
            puts[writer] += [
                (topic, queue_id, message, answer) for message, answer in zip(messages, answers, strict=True)
            ]
            if dice.random() < 0.01:
                store.flush()

    def follow(number: int) -> None:
        # Every message once, in the order of its queue, the messages of one writer in the order of its puts.
        topic, queue_id = topics[number % 2], number // 2
        follower, last = Follower(store, topic, queue_id), {}
        while True:
            ending = done.is_set() and not any(thread.is_alive() for thread in writers)
            messages = follower.read(100)
            for message in messages:
                writer, turn, i = map(int, message.body.split(b"."))
                assert last.get(writer, (-1, -1)) < (turn, i)
                last[writer] = (turn, i)
            if ending and not messages:
                assert follower.at == store.max_queue_offset(topic, queue_id)
                return

    def look_up(number: int) -> None:
        dice = random.Random(100 + number)
        while not done.is_set():
            known = puts[dice.randrange(8)]
            if not known:
                continue
            # Whatever was acknowledged is there, by every way.
            topic, queue_id, message, answer = known[dice.choice((-1, dice.randrange(len(known))))]
            found = store.message_at(answer.phy_offset)
            assert (found.topic, found.queue_id, found.body, found.keys) == (
                topic,
                queue_id,
                message.body,
                message.keys,
            )
            assert (found.queue_offset, found.store_timestamp) == (answer.queue_offset, answer.store_timestamp)
            assert store.message_by_id(answer.msg_id) == found
            assert store.get_message(topic, queue_id, answer.queue_offset, 1).messages == [found]
            assert list(store.query_message(topic, message.keys[0])) == [found]
            assert answer.phy_offset in store.query_offsets(topic, message.keys[0])
            assert (
                store.min_queue_offset(topic, queue_id)
                == 0
                <= answer.queue_offset
                < store.max_queue_offset(topic, queue_id)
            )

    def scan(number: int) -> None:
        while not done.is_set():
            begin = store.commit_log.max_offset // 65536 * 65536
            at = -1
            for message in store.messages(begin):
                assert not message.corrupt and message.phy_offset > at
                at = message.phy_offset
            hits = store.query_message("Orders", "t1", 20, index_type="T")
            assert len(hits) <= 20 and all(hit.tags == "t1" for hit in hits)
            assert 0 <= store.offset_by_time("Orders", 0, 0) <= store.max_queue_offset("Orders", 0)

    def guarded(work, number: int) -> threading.Thread:
        def run() -> None:
            try:
                work(number)
            except BaseException as error:
                failures.append(error)
                done.set()

        return threading.Thread(target=run, daemon=True)

    writers = [guarded(write, number) for number in range(8)]
    readers = [guarded(follow, number) for number in range(4)]
    readers += [guarded(look_up, number) for number in range(2)] + [guarded(scan, number) for number in range(2)]
    for thread in writers + readers:
        thread.start()
    # At least so long, and until there is something to judge.
    while not done.wait(seconds) and sum(map(len, puts)) < 300:
        seconds = 0.1
    done.set()
    for thread in writers + readers:
        thread.join(PATIENCE * 2)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]
    everything = [each for part in puts for each in part]
    assert len(everything) >= 300
    for topic in topics:
        for queue_id in range(2):
            offsets = sorted(each[3].queue_offset for each in everything if each[:2] == (topic, queue_id))
            assert offsets == list(range(store.max_queue_offset(topic, queue_id)))
    ends = sorted((answer.phy_offset, answer.size) for _, _, _, answer in everything)
    assert all(a[0] + a[1] <= b[0] for a, b in itertools.pairwise(ends))
    assert [message.phy_offset for message in store.messages()] == [phy_offset for phy_offset, _ in ends]
    store.close()
    with MessageStore.open(root, config=config) as store:
        report = store.recovery_report
        assert report.clean and not report.units_written and not report.index_entries_written
        assert {message.phy_offset: message.body for message in store.messages()} == {
            answer.phy_offset: message.body for _, _, message, answer in everything
        }
        for _, _, message, answer in everything[:: max(len(everything) // 200, 1)]:
            assert [hit.phy_offset for hit in store.query_message(message.topic, message.keys[0])] == [
                answer.phy_offset
            ]
    assert not [finding for finding in verify(root) if finding.severity == "error"]


def test_eight_writers_and_eight_readers(root):
    eight_and_eight(root, 2.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_writers_and_eight_readers_for_a_minute(root):
    eight_and_eight(root, 60)


def test_closing_beside_readers_and_writers(root):
    """A store that is closed while others use it: they are told so, and nothing else."""
    for turn in range(6):
        store = MessageStore.open(root, config=CONFIG)
        begun, failures = threading.Barrier(5), []

        def run(work, begun=begun, failures=failures) -> None:
            begun.wait(PATIENCE)
            try:
                while True:
                    work()
            except StoreClosedError:
                pass
            except BaseException as error:
                failures.append(error)

        works = [
            lambda store=store: fill(store, 1, size=200),
            lambda store=store: [number_of(message) for message in store.messages()],
            lambda store=store: store.get_message("Orders", 0, 0, 10),
            lambda store=store: store.query_message("Orders", "k0"),
        ]
        threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
        for thread in threads:
            thread.start()
        begun.wait(PATIENCE)
        time.sleep(turn * 0.003)
        store.close()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a thread hangs"
        assert not failures, failures[0]
    with MessageStore.open(root, config=CONFIG) as store:
        assert store.recovery_report.clean
        assert set(numbers(store.messages())) == {0}
    assert not [finding for finding in verify(root) if finding.severity == "error"]


def test_the_lock_file_is_the_one_that_java_takes(root):
    with MessageStore.open(root, config=QUIET) as store:
        fill(store, 1)
        assert (root / "lock").read_bytes() == b"lock"
        # Byte 0, length 1, of the whole file system's kind: flock does not know of it.
        with open(root / "lock", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        store._upkeep.hold_lock()
