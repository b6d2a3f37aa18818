"""Crash test: whatever moment a process dies at, the next opening has everything that was acknowledged.

Owns three ways to die.  *Every step*: a tracer looks at the files before every line that rmqstore runs (puts, rolls,
flushes, close, recovery) and keeps every state that the disk was in; each is opened.  *Between the bytes*: the states
inside one compiled call, made from the bytes before and after it.  *kill -9* of a real child at random moments.  And what
a machine may lose on top: pages that were not flushed, in any combination.

What holds after each opening: every acknowledged message is in the log, in its queue and under every key, nothing is
doubled, queues and index equal byte for byte what the log alone gives, and a second opening changes nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time

import oracle
import pytest
from scratch import SCRATCH
from test_model import content, content_of_record

import rmqstore
from rmqstore import CorruptionError, Message, MessageStore, StoreConfig, StoreError
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.files.mapped_file import MappedFile
from rmqstore.index.index_file import IndexFile
from rmqstore.store import recovery as store_recovery

NOW = 1_700_000_000_000
SEGMENT = 1024
#: Pages are of 4096 bytes on a real disk; files this small need smaller ones.
PAGE = 64
PACKAGE = os.path.dirname(rmqstore.__file__)
GEOMETRIES = {
    "plain": {},
    "propcrc-ext": {
        "enabled_append_prop_crc": True,
        "force_verify_prop_crc": True,
        "enable_consume_queue_ext": True,
    },
}


def geometry(name: str) -> dict:
    return oracle.geometry(
        mapped_file_size_commit_log=SEGMENT,
        mapped_file_size_consume_queue=80,
        mapper_file_size_batch_consume_queue=138,
        mapped_file_size_consume_queue_ext=100,
        max_hash_slot_num=4,
        max_index_num=10,
        **GEOMETRIES[name],
    )


def config_of(geo: dict, clock=lambda: NOW) -> StoreConfig:
    return StoreConfig(**{name: value for name, value in geo.items() if name != "batch_topics"}, clock=clock)


@pytest.fixture
def scratch():
    path = tempfile.mkdtemp(prefix="rmqstore-crash-", dir=SCRATCH)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def write_files(root: str, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        full = os.path.join(root, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "wb") as file:
            file.write(data)


def changes(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


# ------------------------------------------------------------------------------------------------- what is being put


class Writer:
    """Puts a fixed script of messages; `acknowledged` holds what was returned so far."""

    def __init__(self, store: MessageStore, clock: list[int]):
        self.store = store
        self.clock = clock
        self.acknowledged: list[tuple] = []

    def put(self, kind: str, messages: list[Message], queue_id: int, step: int = 700) -> None:
        self.clock[0] += step
        if kind == "one":
            answers = [self.store.put_message(messages[0], queue_id)]
        elif kind == "batch":
            answers = self.store.put_message_batch(messages, queue_id)
        else:
            answers = self.store.put_messages(messages, queue_id)
        for message, answer in zip(messages, answers, strict=True):
            keys = (*message.keys, *([message.unique_key] if message.unique_key else ()))
            self.acknowledged.append(
                (message.topic, queue_id, answer.queue_offset, answer.phy_offset, keys, message.tags, message.body)
            )

    def tell(self, descriptor: int) -> None:
        """Write down, for `kill_soon`, what was acknowledged since the last time; a pipe takes so few bytes at once."""
        os.write(descriptor, "".join(json.dumps([*each[:6], each[6].hex()]) + "\n" for each in self.acknowledged).encode())
        self.acknowledged.clear()

    def run(self, script) -> None:
        for step in script:
            if step == "flush":
                self.store.flush()
            else:
                self.put(*step)


def script(number: int = 18) -> list:
    steps: list = []
    for n in range(number):
        topic = ("Orders", "Pay")[n % 2]
        messages = [
            Message(topic, b"%d.%d" % (n, i), keys=[f"k{n % 3}", f"u{n}.{i}"], tags=f"T{n % 2}" if n % 3 else None)
            for i in range(3 if n % 5 in (2, 3) else 1)
        ]
        if n % 7 == 6:
            messages = [
                Message("Inner", b"inner", sys_flag=0xC0, keys=[f"u{n}.0"], properties={"INNER_NUM": "2"}),
            ]
        kind = "one" if len(messages) == 1 else ("batch" if n % 5 == 2 else "many")
        steps.append((kind, messages, n % 4 // 2))
        if n == 8:
            steps.append("flush")
    return steps


def check_recovered(root: str, geo: dict, acknowledged: list[tuple], *, refusal_allowed: bool = False) -> str:
    """Open the store for writing and hold everything that a recovery promises; what opening said."""
    config = config_of(geo)
    before = oracle.read_files(root)
    with MessageStore.open(root, config=config, read_only=True) as store:
        list(store.messages())
    assert not changes(before, oracle.read_files(root))
    try:
        store = MessageStore.open(root, config=config)
    except CorruptionError as error:
        assert refusal_allowed, f"refused: {error}"
        assert error.path
        assert error.pos is not None
        changed = changes(before, oracle.read_files(root))
        assert not changed, f"refused, but changed {changed}"
        return "refused"
    with store:
        report = store.recovery_report
        # No `abort` file: the process died before it changed anything, or after it had closed in order.
        assert report.clean == ("abort" not in before)
        check_readable(store, acknowledged)
        log = oracle.segments(oracle.read_files(root))
        records = oracle.records_of(log)
        assert [content(message) for message in store.messages()] == [content_of_record(each) for each in records]
        assert report.end == store.commit_log.max_offset
        # The next put goes to the right place.
        put = store.put_message(Message("Orders", b"after", keys=["after"]))
        offsets = [each.queue_offset for each in records if (each.topic, each.queue_id) == ("Orders", 0)]
        assert put.queue_offset == len(offsets)
        assert offsets == list(range(len(offsets)))
        assert [hit.phy_offset for hit in store.query_message("Orders", "after")] == [put.phy_offset]
    check_bytes(root, geo)
    before = oracle.read_files(root)
    for number in range(2):
        check_reopening(root, config, acknowledged)
        changed = changes(before, oracle.read_files(root))
        # The first of them may note the last record in the checkpoint, as RocketMQ's recovery does.
        assert changed == [] or (changed == ["checkpoint"] and number == 0), f"opening again changed {changed}"
        before = oracle.read_files(root)
    return "recovered"


def check_reopening(root: str, config: StoreConfig, acknowledged: list[tuple]) -> None:
    with MessageStore.open(root, config=config) as store:
        report = store.recovery_report
        assert report.clean
        assert (report.bytes_cut, report.segments_deleted, report.units_cut, report.index_entries_cut) == (0, 0, 0, 0)
        assert (report.units_written, report.units_mended, report.index_entries_written) == (0, 0, 0)
        check_readable(store, acknowledged)


def check_readable(store: MessageStore, acknowledged: list[tuple]) -> None:
    for topic, queue_id, queue_offset, phy_offset, keys, tags, body in acknowledged:
        message = store.message_at(phy_offset)
        assert (message.topic, message.queue_id, message.body) == (topic, queue_id, body)
        got = store.get_message(topic, queue_id, queue_offset, 1)
        assert got.messages, f"{topic}/{queue_id} {queue_offset}: {got}"
        assert got.messages[0].phy_offset == phy_offset
        for key in keys:
            hits = [hit.phy_offset for hit in store.query_message(topic, key, 1000)]
            assert hits.count(phy_offset) == 1, f"{topic}#{key}: {hits}, wanted {phy_offset}"
            assert store.query_offsets(topic, key).count(phy_offset) == 1
        if tags:
            assert phy_offset in [hit.phy_offset for hit in store.query_message(topic, tags, 1000, index_type="T")]


def check_bytes(root: str, geo: dict) -> None:
    files = oracle.read_files(root)
    got = oracle.comparable(files, oracle.QUEUES_AND_INDEX)
    if not oracle.records_of(oracle.segments(files)):
        # The first index file keeps its place when everything was cut; it then says what a new one says.
        got = {path: data for path, data in got.items() if any(data[:36]) or any(data[40:])}
    expected = oracle.comparable(oracle.rebuild(files, geo), oracle.QUEUES_AND_INDEX)
    changed = changes(expected, got)
    assert not changed, f"not what the log gives: {changed}"


# ----------------------------------------------------------------------------------------------------- every step


@dataclasses.dataclass
class State:
    """What was on disk at one moment, what had been acknowledged by then, and where the program stood."""

    files: dict[str, bytes]
    acknowledged: list[tuple]
    where: str


class Camera:
    """A trace function that keeps every state of the files of a store while rmqstore runs."""

    MODULES = (
        "durable.py", "prepared_files.py", "mapped_file.py", "mapped_file_queue.py", "commit_log.py", "unit_queue.py",
        "consume_queue.py",
        "consume_queue_ext.py", "batch_consume_queue.py", "consume_queue_store.py",
        "index_file.py", "index_service.py", "dispatcher.py", "recovery.py", "checkpoint.py", "message_store.py",
    )  # fmt: skip

    def __init__(self, root: str, acknowledged: list[tuple]):
        self.root = root
        self.acknowledged = acknowledged
        self.states: list[State] = []
        self.last: dict[str, bytes] = {}
        #: Folder: what it said of its last change, and what it held then.
        self.listings: dict[str, tuple] = {}
        #: Path: inode and descriptor.
        self.opened: dict[str, tuple[int, int]] = {}

    def look(self, where: str) -> None:
        files = self.files()
        if files != self.last:
            self.last = files
            self.states.append(State(files, list(self.acknowledged), where))

    def files(self) -> dict[str, bytes]:
        """What `oracle.read_files` gives, at a small part of its cost: there are over ten thousand looks in a film."""
        found: dict[str, bytes] = {}
        folders = [self.root]
        for folder in folders:
            files, below = self._listing(folder)
            folders += below
            for path, name in files:
                found[name] = self._content(path, name)
        return found

    def _listing(self, folder: str) -> tuple[list[tuple[str, str]], list[str]]:
        """The files of a folder, as (path, name below the root), and its folders."""
        try:
            status = os.stat(folder)
        except FileNotFoundError:
            # The store is still to be made.
            return [], []
        mark = status.st_ino, status.st_mtime_ns
        if folder in self.listings and self.listings[folder][0] == mark:
            return self.listings[folder][1]
        now = time.time_ns()
        files, below = [], []
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    below.append(entry.path)
                    continue
                files.append((entry.path, os.path.relpath(entry.path, self.root).replace(os.sep, "/")))
                if entry.path in self.opened and self.opened[entry.path][0] != entry.inode():
                    os.close(self.opened.pop(entry.path)[1])
        # The clock of a file system ticks every few milliseconds: within one tick a folder may change again and say the same time.
        if now - status.st_mtime_ns > 50_000_000:
            self.listings[folder] = mark, (files, below)
        return files, below

    def _content(self, path: str, name: str) -> bytes:
        if path not in self.opened:
            descriptor = os.open(path, os.O_RDONLY)
            self.opened[path] = os.fstat(descriptor).st_ino, descriptor
        descriptor = self.opened[path][1]
        last = self.last.get(name, b"")
        data = os.pread(descriptor, len(last) + 1, 0)
        if len(data) > len(last):
            data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        # The same object again makes the comparison of two looks quick.
        return last if data == last else data

    def trace(self, frame, event, arg):
        folder, name = os.path.split(frame.f_code.co_filename)
        if not folder.startswith(PACKAGE) or name not in self.MODULES:
            return None
        self.look(f"{name}:{frame.f_lineno} in {frame.f_code.co_name}")
        return self.trace

    def __enter__(self) -> Camera:
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *exc_info) -> None:
        sys.settrace(self.before)
        # The cheap look missed nothing that the plain one sees.
        assert not changes(self.files(), oracle.read_files(self.root))
        for _, descriptor in self.opened.values():
            os.close(descriptor)
        self.opened.clear()


@pytest.fixture
def some_of(request):
    """Of many states all with `--slow`, else every `stride`-th."""

    def chosen(states: list, stride: int) -> list:
        return states if request.config.getoption("--slow") else states[::stride]

    return chosen


def film(root: str, geo: dict, steps: list) -> list[State]:
    """Every state from the making of a store to its orderly close."""
    clock = [NOW]
    acknowledged: list[tuple] = []
    with Camera(root, acknowledged) as camera:
        store = MessageStore.open(root, config=config_of(geo, lambda: clock[0]))
        writer = Writer(store, clock)
        writer.acknowledged = acknowledged
        writer.run(steps)
        store.close()
        camera.look("closed")
    return camera.states


@pytest.fixture(scope="module")
def filmed():
    """A function that gives the film of a geometry, which is made once: its states are only read."""
    films: dict[str, list[State]] = {}

    def film_of(name: str) -> list[State]:
        if name not in films:
            with tempfile.TemporaryDirectory(prefix="rmqstore-crash-", dir=SCRATCH) as folder:
                films[name] = film(os.path.join(folder, "filmed"), geometry(name), script(14))
        return films[name]

    return film_of


@pytest.mark.parametrize("name", GEOMETRIES)
def test_killed_at_every_step(scratch, name, some_of, filmed):
    geo = geometry(name)
    states = filmed(name)
    assert len(states) > 120
    for number, state in enumerate(some_of(states, 1 if name == "plain" else 3)):
        root = os.path.join(scratch, str(number))
        os.mkdir(root)
        write_files(root, state.files)
        try:
            check_recovered(root, geo, state.acknowledged)
        except Exception as error:
            raise AssertionError(f"killed at {state.where}, {len(state.acknowledged)} acknowledged: {error}") from error
        shutil.rmtree(root)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_killed_during_recovery(scratch, name, some_of, filmed):
    # Recoveries of a store that has lost all it can lose; each of their states is a store to recover.
    geo = geometry(name)
    states = filmed(name)
    half = states[len(states) * 2 // 3]
    kept = {path: data for path, data in half.files.items() if path.split("/")[0] in ("commitlog", "lock", "abort")}
    zeroed = {
        path: data if path in kept else bytes(len(data)) for path, data in half.files.items() if path != "checkpoint"
    }
    for number, files in enumerate((half.files, kept, zeroed)):
        root = os.path.join(scratch, f"recovering{number}")
        os.mkdir(root)
        write_files(root, files)
        with Camera(root, half.acknowledged) as camera:
            MessageStore.open(root, config=config_of(geo)).close()
        for step, state in enumerate(some_of(camera.states, 5 if name == "plain" else 11)):
            copy = os.path.join(scratch, f"{number}.{step}")
            os.mkdir(copy)
            write_files(copy, state.files)
            try:
                check_recovered(copy, geo, state.acknowledged)
            except Exception as error:
                raise AssertionError(f"recovery {number} killed at {state.where}: {error}") from error
            shutil.rmtree(copy)


def steps_between(before: bytes, after: bytes, order: list[tuple[int, int]]) -> list[bytes]:
    """The states between two contents of a file when the stretches of `order` are written one after another."""
    states, now = [], bytearray(before)
    for begin, end in order:
        now[begin:end] = after[begin:end]
        if bytes(now) not in states and bytes(now) != before:
            states.append(bytes(now))
    return states


def record_num(segment: bytes) -> int:
    return sum(segment.count(magic) for magic in (b"\xda\xa3\x20\xa7", b"\xda\xa3\x20\xab"))


def orders_within(path: str, old: bytes, new: bytes, geo: dict) -> list[list[tuple[int, int]]]:
    """The orders in which a call may have written what differs in a file, as stretches of it."""
    folder = path.split("/")[0]
    differ = [i for i in range(len(old)) if old[i] != new[i]]
    if folder == "commitlog":
        # One record after another; within each the parts come in two orders, size and magic last.
        orders: list[list[tuple[int, int]]] = [[], []]
        base = int(path.split("/")[1])
        for record in oracle.walk_commit_log({base: new}):
            begin, end = record.phy_offset - base, record.end - base
            if begin <= differ[-1] and end > differ[0]:
                middle = (begin + end) // 2
                orders[0] += [(middle, end), (begin + 8, middle), (begin, begin + 4), (begin + 4, begin + 8)]
                orders[1] += [(begin + 8, middle), (middle, end), (begin + 4, begin + 8), (begin, begin + 4)]
        return orders
    if folder == "index":
        table = 40 + 4 * geo["max_hash_slot_num"]
        # Entry, slot, where the file begins, count, used slots, where it ends.
        return [[(table, len(old)), (40, table), (16, 24), (0, 8), (36, 40), (32, 36), (24, 32), (8, 16)]]
    if folder in ("consumequeue", "batchconsumequeue"):
        size = 20 if folder == "consumequeue" else 46
        unit = differ[0] - differ[0] % size
        return [[(unit, unit + 8), (unit + 12, unit + size), (unit + 8, unit + 12)]]
    return []


@pytest.mark.parametrize("name", GEOMETRIES)
def test_killed_inside_a_compiled_call(scratch, name, some_of, filmed):
    # A record is published by its size and magic, a unit by its size, an entry by entry, slot and count, in this order;
    # a state in between is one in which only the earlier ones are there.
    geo = geometry(name)
    states = filmed(name)
    tried: collections.Counter[str] = collections.Counter()
    # Of every kind of step some, however many states the film has.
    steps: dict[frozenset[str], list] = {}
    for before, after in itertools.pairwise(states):
        if before.files.keys() == after.files.keys() and (changed := changes(before.files, after.files)):
            steps.setdefault(frozenset(path.split("/")[0] for path in changed), []).append((before, after))
    stride = 2 if name == "plain" else 5
    for before, after in itertools.chain.from_iterable(some_of(kind, stride) for kind in steps.values()):
        # One call may write all three: the record, then its unit, then its entries.
        files = dict(before.files)
        for path in changes(before.files, after.files):
            for order in orders_within(path, files[path], after.files[path], geo):
                for data in steps_between(files[path], after.files[path], order):
                    tried[path.split("/")[0]] += 1
                    root = os.path.join(scratch, str(tried.total()))
                    os.mkdir(root)
                    write_files(root, {**files, path: data})
                    try:
                        check_recovered(root, geo, before.acknowledged)
                    except Exception as error:
                        raise AssertionError(f"killed inside {before.where}, {path}: {error}") from error
                    shutil.rmtree(root)
            files[path] = after.files[path]
    assert all(tried[kind] > 5 for kind in ("commitlog", "consumequeue", "index")), tried


# ------------------------------------------------------------------------------------------------------- kill -9


def run_child(root: str, geo: dict, seed: int) -> list[tuple]:
    """Let a child put messages, kill it at a random moment; what it had been told is stored."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        # Nothing of the parent's may run here: only the store, then death.
        try:
            os.close(reader)
            dice = random.Random(seed)
            clock = [NOW]
            store = MessageStore.open(root, config=config_of(geo, lambda: clock[0]))
            acknowledging = Writer(store, clock)
            for number in range(100_000):
                topic = dice.choice(("Orders", "Pay"))
                count = dice.choice((1, 1, 1, 2, 3))
                messages = [
                    Message(
                        topic, dice.randbytes(dice.randrange(40)), keys=[f"u{number}.{i}", f"k{number % 3}"], tags="T"
                    )
                    for i in range(count)
                ]
                acknowledging.put("one" if count == 1 else dice.choice(("batch", "many")), messages, dice.randrange(2))
                acknowledging.tell(writer)
                if dice.random() < 0.02:
                    store.flush()
        finally:
            os._exit(1)
    os.close(writer)
    return kill_soon(child, reader, seed, 6000)


def kill_soon(child: int, reader: int, seed: int, most: int) -> list[tuple]:
    """Kill a child a moment after it wrote this number of bytes of acknowledgements; all of these messages are stored."""
    data = b""
    with open(reader, "rb", buffering=0) as stream:
        wanted = random.Random(seed).randrange(200, most)
        while len(data) < wanted:
            piece = stream.read(4096)
            assert piece, "the child ended by itself"
            data += piece
        time.sleep(random.Random(seed).random() * 0.003)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while piece := stream.read(65536):
            data += piece
    acknowledged = []
    for line in data.split(b"\n")[:-1]:
        topic, queue_id, queue_offset, phy_offset, keys, tags, body = json.loads(line)
        acknowledged.append((topic, queue_id, queue_offset, phy_offset, tuple(keys), tags, bytes.fromhex(body)))
    return acknowledged


@pytest.mark.parametrize("name", GEOMETRIES)
def test_kill_9(scratch, name):
    geo = geometry(name)
    for seed in range(8):
        root = os.path.join(scratch, str(seed))
        acknowledged = run_child(root, geo, seed)
        assert acknowledged
        if len(acknowledged) > 150:
            acknowledged = random.Random(seed).sample(acknowledged, 150)
        assert check_recovered(root, geo, without_crowded_keys(acknowledged)) == "recovered"
        shutil.rmtree(root)


def without_crowded_keys(acknowledged: list[tuple]) -> list[tuple]:
    # RocketMQ's own answer holds 64 at most, so that shared keys cannot be counted on in a longer log.
    return [
        (*each[:4], tuple(key for key in each[4] if not key.startswith("k")), None, each[6]) for each in acknowledged
    ]


def put_on(store: MessageStore, clock: list[int], dice: random.Random, thread: int, writer: int) -> None:
    """Put messages of one thread in every way, and write down what was acknowledged, until the process dies."""
    acknowledging = Writer(store, clock)
    for number in range(100_000):
        topic, queue_id, count = dice.choice(("Orders", "Pay")), dice.randrange(2), dice.choice((1, 1, 1, 2, 3, 5))
        messages = [
            Message(topic, dice.randbytes(dice.randrange(40)), keys=[f"u{thread}.{number}.{i}"], tags="T") for i in range(count)
        ]
        kind = "one" if count == 1 else dice.choice(("batch", "many"))
        acknowledging.put(kind, messages, queue_id, dice.choice((0, 1, 700)))
        acknowledging.tell(writer)
        if dice.random() < 0.02:
            store.flush()


def put_by_threads(root: str, geo: dict, flush: str, seed: int, writer: int) -> None:
    """Open the store, and let six threads `put_on`."""
    # A put that fails is no kill: the parent misses the others then.
    threading.excepthook = lambda failure: (sys.__excepthook__(*failure[:3]), os._exit(1))
    sys.setswitchinterval(1e-5)
    clock = [NOW]
    config = config_of(geo, lambda: clock[0]).replace(
        flush_disk_type=flush, flush_interval_commit_log=5, flush_interval_consume_queue=5
    )
    store = MessageStore.open(root, config=config)
    threads = [
        threading.Thread(target=put_on, args=(store, clock, random.Random(10 * seed + each), each, writer)) for each in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("flush", ["SYNC_FLUSH", "ASYNC_FLUSH"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_kill_9_while_threads_put(scratch, name, flush):
    """Six threads, group commit, and a housekeeping thread that flushes all the time."""
    geo = {**geometry(name), "mapped_file_size_commit_log": 4096, "max_index_num": 100}
    for seed in range(4):
        root = os.path.join(scratch, str(seed))
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                put_by_threads(root, geo, flush, seed, writer)
            finally:
                os._exit(1)
        os.close(writer)
        acknowledged = kill_soon(child, reader, seed, 40_000)
        assert acknowledged and len({each[3] for each in acknowledged}) == len(acknowledged)
        assert len({each[:3] for each in acknowledged}) == len(acknowledged)
        some = random.Random(seed).sample(acknowledged, min(len(acknowledged), 80))
        assert check_recovered(root, geo, some) == "recovered"
        shutil.rmtree(root)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_kill_9_many_times(scratch, name):
    geo = geometry(name)
    for seed in range(1000, 1400):
        root = os.path.join(scratch, str(seed))
        acknowledged = run_child(root, geo, seed)
        acknowledged = random.Random(seed).sample(acknowledged, min(len(acknowledged), 60))
        assert check_recovered(root, geo, without_crowded_keys(acknowledged)) == "recovered"
        shutil.rmtree(root)


# ---------------------------------------------------------------------------------------------------- lost pages


class Durable:
    """Follows what is surely on disk: a file's bytes at its last flush, zeros for one that was only made."""

    def __init__(self, root: str, monkeypatch):
        self.root = root
        self.files: dict[str, bytes] = {}
        for owner, method in ((MappedFile, "flush"), (IndexFile, "force"), (Checkpoint, "flush")):
            self._follow(owner, method, monkeypatch)

    def _follow(self, owner, method, monkeypatch):
        original = getattr(owner, method)

        def flush(file, *args):
            original(file, *args)
            with open(file.path, "rb") as stream:
                self.files[os.path.relpath(file.path, self.root)] = stream.read()

        monkeypatch.setattr(owner, method, flush)

    def torn(self, killed: dict[str, bytes], dice: random.Random, loss: float) -> dict[str, bytes]:
        """The files at the kill with every page, by the dice, as it was at the file's last flush."""
        found = {}
        for path, data in killed.items():
            flushed = self.files.get(path, data if path in ("lock", "abort", "checkpoint") else bytes(len(data)))
            pieces = []
            for at in range(0, len(data), PAGE):
                source = flushed if dice.random() < loss else data
                pieces.append(source[at : at + PAGE])
            found[path] = b"".join(pieces)
        return found


@pytest.mark.parametrize("name", GEOMETRIES)
def test_lost_pages(scratch, name, monkeypatch):
    geo = geometry(name)
    root = os.path.join(scratch, "killed")
    durable = Durable(root, monkeypatch)
    clock = [NOW]
    store = MessageStore.open(root, config=config_of(geo, lambda: clock[0]))
    writer = Writer(store, clock)
    writer.run(script(9))
    store.flush()
    flushed_num = len(writer.acknowledged)
    flushed_end = store.commit_log.max_offset
    writer.run(script(18)[10:])
    killed = oracle.read_files(root)
    killed_records = {record.phy_offset: record.raw for record in oracle.records_of(oracle.segments(killed))}
    whole = {message.phy_offset: content(message) for message in store.messages()}
    monkeypatch.undo()
    store.close()
    outcomes, kept_more = [], 0
    for seed in range(60):
        dice = random.Random(seed)
        files = durable.torn(killed, dice, dice.choice((0.02, 0.1, 0.5, 0.9)))
        # Return the records of the log by the oracle, up to the first place without one.
        left = list(
            itertools.takewhile(
                lambda record: record.property_crc_is_sound or not geo["enabled_append_prop_crc"],
                oracle.records_of(oracle.segments(files)),
            )
        )
        assert len(left) >= flushed_num
        if any(record.raw != killed_records[record.phy_offset] for record in left):
            # A page with nothing but properties is lost, which the format without property CRC cannot tell.
            assert not geo["enabled_append_prop_crc"]
            continue
        acknowledged = [each for each in writer.acknowledged if each[3] in {record.phy_offset for record in left}]
        copy = os.path.join(scratch, f"torn{seed}")
        os.mkdir(copy)
        write_files(copy, files)
        try:
            outcome = check_recovered(copy, geo, acknowledged, refusal_allowed=True)
        except Exception as error:
            raise AssertionError(f"pages lost by dice {seed}: {type(error).__name__}: {error}") from error
        outcomes.append(outcome)
        if outcome == "refused":
            # There are records after the hole: both other modes keep what they promise.
            for recovery in ("truncate", "skip"):
                other = os.path.join(scratch, f"torn{seed}.{recovery}")
                os.mkdir(other)
                write_files(other, files)
                with MessageStore.open(other, config=config_of(geo), recovery=recovery) as opened:
                    there = {m.phy_offset: content(m) for m in opened.messages() if not m.corrupt}
                    check_readable(opened, acknowledged)
                    if recovery == "truncate":
                        assert sorted(there) == [record.phy_offset for record in left]
                    else:
                        # Nothing whole may lie behind where only units or later segments say that there was more.
                        assert set(there) >= {record.phy_offset for record in left}
                        if len(there) > len(left):
                            kept_more += 1
                            assert opened.recovery_report.damage
                    for phy_offset, what in there.items():
                        # Without property CRC only the body of what lies behind a hole is sure.
                        same = whole[phy_offset] == what if geo["enabled_append_prop_crc"] else True
                        assert same and whole[phy_offset][12] == what[12], (whole[phy_offset], what)
                    assert opened.commit_log.max_offset >= flushed_end
                with MessageStore.open(other, config=config_of(geo), recovery=recovery) as opened:
                    # Records that were kept once stay.
                    assert sorted(m.phy_offset for m in opened.messages() if not m.corrupt) == sorted(there)
                shutil.rmtree(other)
        shutil.rmtree(copy)
    assert outcomes.count("recovered") > 1
    assert outcomes.count("refused") > 5
    assert kept_more


# ------------------------------------------------------------------------------------------- damage in the middle


def closed_store(root: str, geo: dict, steps: list) -> list[tuple]:
    clock = [NOW]
    with MessageStore.open(root, config=config_of(geo, lambda: clock[0])) as store:
        writer = Writer(store, clock)
        writer.run(steps)
    return writer.acknowledged


def make_unclean(root: str) -> None:
    """A crash before the first flush: `abort` exists, the checkpoint does not."""
    with open(os.path.join(root, "abort"), "wb") as file:
        file.write(b"1")
    os.unlink(os.path.join(root, "checkpoint"))


def overwrite(root: str, path: str, pos: int, data: bytes) -> None:
    with open(os.path.join(root, path), "r+b") as file:
        file.seek(pos)
        file.write(data)


def damage_body(root: str, record: oracle.Record) -> tuple[str, int]:
    base = record.phy_offset - record.phy_offset % SEGMENT
    path = f"commitlog/{oracle.file_name(base)}"
    pos = record.phy_offset - base + record.raw.index(record.body, 80)
    overwrite(root, path, pos, bytes([record.body[0] ^ 1]))
    return path, record.phy_offset - base


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("number", [0, 3, 9])
def test_damage_in_the_middle_of_the_log(scratch, name, number):
    geo = geometry(name)
    root = os.path.join(scratch, "store")
    acknowledged = closed_store(root, geo, script())
    records = oracle.records_of(oracle.segments(oracle.read_files(root)))
    make_unclean(root)
    path, pos = damage_body(root, records[number])
    before = oracle.read_files(root)
    damaged = records[number].phy_offset

    with MessageStore.open(root, config=config_of(geo), read_only=True) as store:
        assert [m.phy_offset for m in store.messages() if not m.corrupt] == [
            record.phy_offset for record in records if record.phy_offset != damaged
        ]
    assert not changes(before, oracle.read_files(root))

    with pytest.raises(CorruptionError) as refused:
        MessageStore.open(root, config=config_of(geo))
    assert refused.value.path == os.path.join(root, path)
    assert refused.value.pos == pos
    assert str(damaged) in str(refused.value)
    assert not changes(before, oracle.read_files(root))

    skipped = os.path.join(scratch, "skipped")
    shutil.copytree(root, skipped)
    others = [each for each in acknowledged if each[3] != damaged]
    for _ in range(2):
        with MessageStore.open(skipped, config=config_of(geo), recovery="skip") as store:
            check_readable(store, others)
            assert [m.phy_offset for m in store.messages() if not m.corrupt] == [
                record.phy_offset for record in records if record.phy_offset != damaged
            ]
            if _ == 0:
                assert store.recovery_report.damage == [(damaged, records[number].size, "BAD_BODY_CRC")]
                # The log goes on behind what was there, and nothing of it is written over.
                assert store.recovery_report.end == records[-1].end
    after = oracle.read_files(skipped)
    assert [name for name in changes(before, after) if name.startswith("commitlog/")] == []

    with MessageStore.open(root, config=config_of(geo), recovery="truncate") as store:
        assert store.recovery_report.end == damaged
        assert store.recovery_report.bytes_cut > 0
        check_readable(store, [each for each in acknowledged if each[3] < damaged])
        assert [m.phy_offset for m in store.messages()] == [record.phy_offset for record in records[:number]]
    check_bytes(root, geo)
    # No record is left after the cut that could come back.
    log = oracle.segments(oracle.read_files(root))
    assert not any(b"".join(log.values())[damaged:])


def test_a_record_that_ends_in_zeros_is_found_behind_damage(scratch):
    # Without properties the last bytes of a record are zero, like those after the end of the log.
    geo = geometry("plain")
    root = os.path.join(scratch, "store")
    with MessageStore.open(root, config=config_of(geo)) as store:
        store.put_message(Message("Orders", b"first"))
        last = store.put_message(Message("Orders", b"last"))
    records = oracle.records_of(oracle.segments(oracle.read_files(root)))
    assert records[-1].raw.endswith(b"\0\0")
    for unclean in (False, True):
        copy = os.path.join(scratch, f"copy{unclean}")
        shutil.copytree(root, copy)
        damage_body(copy, records[0])
        if unclean:
            make_unclean(copy)
            # No unit points to it either.
            overwrite(copy, f"consumequeue/Orders/0/{oracle.file_name(0)}", 20, bytes(20))
        before = oracle.read_files(copy)
        with pytest.raises(CorruptionError):
            MessageStore.open(copy, config=config_of(geo))
        assert not changes(before, oracle.read_files(copy))
        for _ in range(2):
            with MessageStore.open(copy, config=config_of(geo), recovery="skip") as store:
                assert store.message_at(last.phy_offset).body == b"last"
                assert [m.body for m in store.get_message("Orders", 0, 1)] == [b"last"]


def test_a_torn_last_record_is_no_damage(scratch):
    # The newest record may be half written: nobody was told that it is there.
    geo = geometry("plain")
    root = os.path.join(scratch, "store")
    acknowledged = closed_store(root, geo, script(8))
    records = oracle.records_of(oracle.segments(oracle.read_files(root)))
    make_unclean(root)
    damage_body(root, records[-1])
    check_recovered(root, geo, [each for each in acknowledged if each[3] < records[-1].phy_offset])


# ------------------------------------------------------------------------------------------ as Java does it wrong


def shutdown_files(root: str) -> dict[str, bytes]:
    return oracle.comparable(oracle.read_files(root))


def test_cut_records_do_not_rise_again(scratch):
    # 11.10: Java leaves old records after a cut.  A new record that ends where an old one begins brings it back.
    geo = geometry("plain")
    root = os.path.join(scratch, "store")
    with MessageStore.open(root, config=config_of(geo)) as store:
        puts = [store.put_message(Message("Orders", b"number %d" % n, keys=[f"k{n}"])) for n in range(5)]
    records = oracle.records_of(oracle.segments(oracle.read_files(root)))
    make_unclean(root)
    damage_body(root, records[2])
    store = MessageStore.open(root, config=config_of(geo, lambda: NOW + 10_000), recovery="truncate")
    put = store.put_message(Message("Orders", b"number 9", keys=["k9"]))
    assert (put.phy_offset, put.size, put.queue_offset) == (puts[2].phy_offset, puts[2].size, 2)
    # The process dies here: record 3 began where the new one ends.
    killed = os.path.join(scratch, "killed")
    shutil.copytree(root, killed)
    store.close()
    for path in (killed, root):
        with MessageStore.open(path, config=config_of(geo)) as store:
            assert [message.body for message in store.messages()] == [b"number 0", b"number 1", b"number 9"]
            assert store.max_queue_offset("Orders") == 3
        check_bytes(path, geo)


@pytest.mark.parametrize("recovery", ["strict", "truncate", "skip"])
def test_a_stale_tail_that_java_left_is_the_end(scratch, recovery):
    # Old whole records after the end, with a hole between, are older than the newest record and in no queue.
    geo = geometry("plain")
    root = os.path.join(scratch, "store")
    with MessageStore.open(root, config=config_of(geo)) as store:
        puts = [store.put_message(Message("Orders", b"number %d" % n, keys=[f"k{n}"])) for n in range(5)]
    # As Java leaves it that cut behind record 1, put a shorter record, and died.
    new = oracle.encode_record(
        topic="Orders", body=b"new", properties=[("KEYS", "k9")], queue_offset=2, phy_offset=puts[2].phy_offset,
        born_timestamp=NOW + 9000, store_timestamp=NOW + 9000, born_host="127.0.0.1:10911",
    )  # fmt: skip
    overwrite(root, f"commitlog/{oracle.file_name(0)}", puts[2].phy_offset, new + bytes(8))
    overwrite(root, f"consumequeue/Orders/0/{oracle.file_name(0)}", 40, bytes(40))
    os.unlink(os.path.join(root, f"consumequeue/Orders/0/{oracle.file_name(80)}"))
    shutil.rmtree(os.path.join(root, "index"))
    make_unclean(root)
    for _ in range(2):
        with MessageStore.open(root, config=config_of(geo), recovery=recovery) as store:
            assert [message.body for message in store.messages()] == [b"number 0", b"number 1", b"new"]
            assert store.max_queue_offset("Orders") == 3
    check_bytes(root, geo)
    assert not any(oracle.read_files(root)[f"commitlog/{oracle.file_name(0)}"][puts[2].phy_offset + len(new) :])


@pytest.mark.parametrize(
    "state",
    [
        "closed", "killed", "killed, and no unit is left", "a broker had it since", "closed, then an opening was killed",
        "killed, then an opening was killed",
    ],
)  # fmt: skip
def test_older_records_behind_damage_are_messages_where_our_writer_had_them(scratch, state):
    # The clock was set back within what is damaged now, so that all that follows looks like what Java leaves behind a cut.
    geo = {**geometry("plain"), "mapped_file_size_commit_log": 16384}
    root = os.path.join(scratch, "store")
    clock = [NOW]
    ours = state != "a broker had it since"
    store = MessageStore.open(root, config=config_of(geo, lambda: clock[0]))
    for n in range(9):
        clock[0] = NOW if n < 4 else NOW - 5000
        store.put_message(Message("Orders", b"number %d" % n, keys=[f"k{n}"]))
    store.flush()
    killed = os.path.join(scratch, "killed")
    shutil.copytree(root, killed)
    store.close()
    # Of a store that is closed the checkpoint says which record its last opening found last.
    MessageStore.open(root, config=config_of(geo)).close()
    if not state.startswith("closed"):
        root = killed
    records = oracle.records_of(oracle.segments(oracle.read_files(root)))
    overwrite(root, f"commitlog/{oracle.file_name(0)}", records[4].phy_offset, b"#" * 40)
    if not ours:
        # The state after a broker's flush.
        overwrite(root, "checkpoint", 0, (NOW + 60_000).to_bytes(8, "big"))
    if "no unit" in state:
        shutil.rmtree(os.path.join(root, "consumequeue"))
    if "an opening was killed" in state:
        # After its abort file is there, before its checkpoint is.
        child = os.fork()
        if not child:
            store_recovery._cut_log = lambda *args: os._exit(7)
            MessageStore.open(root, config=config_of(geo), recovery="skip")
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    wanted = [f"number {n}".encode() for n in range(9) if n != 4][: None if ours else 4]
    with MessageStore.open(root, config=config_of(geo), read_only=True) as store:
        assert [message.body for message in store.messages() if not message.corrupt] == wanted
        assert store.commit_log.max_offset == (records[-1].end if ours else records[3].end)
        if ours:
            assert [each.body for each in store.get_message("Orders", 0, 5, 3).messages] == wanted[4:7]
        else:
            assert not store.get_message("Orders", 0, 5, 3).messages
    assert ("stale_tail" in {finding.kind for finding in rmqstore.verify(root, config_of(geo))}) is not ours
    if ours:
        with pytest.raises(CorruptionError, match="whole records follow"):
            MessageStore.open(root, config=config_of(geo))
        with MessageStore.open(root, config=config_of(geo), recovery="skip") as store:
            assert [message.body for message in store.messages() if not message.corrupt] == wanted
            with MessageStore.open(root, config=config_of(geo), read_only=True) as reader:
                assert [each.body for each in reader.get_message("Orders", 0, 5, 3).messages] == wanted[4:7]


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "unclean"])
def test_an_empty_last_queue_file_is_no_unit(scratch, clean):
    # 11.12: Java gains a unit (0, 0, 0) from it, or does not start.
    geo = geometry("plain")
    root = os.path.join(scratch, "store")
    with MessageStore.open(root, config=config_of(geo)) as store:
        for n in range(4):
            store.put_message(Message("Orders", b"%d" % n, keys=[f"k{n}"]))
    before = shutdown_files(root)
    path = os.path.join(root, "consumequeue/Orders/0", oracle.file_name(80))
    assert not os.path.exists(path)
    with open(path, "wb") as file:
        file.write(bytes(80))
    if not clean:
        make_unclean(root)
    with MessageStore.open(root, config=config_of(geo), read_only=True) as store:
        assert store.max_queue_offset("Orders") == 4
    with MessageStore.open(root, config=config_of(geo)) as store:
        assert store.max_queue_offset("Orders") == 4
    assert not changes(before, shutdown_files(root))
    with MessageStore.open(root, config=config_of(geo)) as store:
        assert store.put_message(Message("Orders", b"4")).queue_offset == 4
    check_bytes(root, geo)


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "unclean"])
def test_a_queue_of_pre_fill_units_takes_the_next_message(scratch, clean):
    # 11.13: Java thinks that such a queue reaches to 2 GiB, so that the next message never gets into it.
    geo = geometry("plain")
    root = os.path.join(scratch, "store")
    with MessageStore.open(root, config=config_of(geo)) as store:
        store.put_message(Message("Pay", b"other", keys=["k"]))
    folder = os.path.join(root, "consumequeue/Orders/0")
    os.makedirs(folder)
    with open(os.path.join(folder, oracle.file_name(80)), "wb") as file:
        file.write(oracle.PRE_FILL_UNIT * 2 + bytes(40))
    if not clean:
        make_unclean(root)
    for n in range(2):
        with MessageStore.open(root, config=config_of(geo)) as store:
            put = store.put_message(Message("Orders", b"%d" % n, keys=[f"n{n}"]))
            assert put.queue_offset == 6 + n
            assert store.min_queue_offset("Orders") == 6
            assert [m.body for m in store.get_message("Orders", 0, 6)] == [b"%d" % i for i in range(n + 1)]
            assert store.get_message("Orders", 0, 4).status.name == "OFFSET_TOO_SMALL"


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "unclean"])
@pytest.mark.parametrize("units", [1, 2, 3, 4, 5, 9])
def test_zeroed_last_units_are_written_again(scratch, clean, units):
    # 11.9 and 11.11: Java loses the message, gives its offset to the next one, or shifts the queue.
    geo = geometry("plain")
    root = os.path.join(scratch, "store")
    clock = [NOW]
    acknowledged = []
    with MessageStore.open(root, config=config_of(geo, lambda: clock[0])) as store:
        writer = Writer(store, clock)
        for n in range(11):
            writer.put("one", [Message("Orders", b"%d" % n, keys=[f"k{n}"])], 0)
        acknowledged = writer.acknowledged
    before = shutdown_files(root)
    for number in range(11 - units, 11):
        base = number * 20 - number * 20 % 80
        overwrite(root, f"consumequeue/Orders/0/{oracle.file_name(base)}", number * 20 - base, bytes(20))
    if not clean:
        make_unclean(root)
    with MessageStore.open(root, config=config_of(geo)) as store:
        check_readable(store, acknowledged)
        assert store.max_queue_offset("Orders") == 11
        assert store.recovery_report.units_written == units
    assert not changes(before, shutdown_files(root))


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "unclean"])
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize(
    "folders",
    [("consumequeue", "consumequeue_ext", "batchconsumequeue"), ("index",), oracle.QUEUES_AND_INDEX],
    ids=["queues", "index", "both"],
)
def test_deleted_queues_and_index_come_back(scratch, clean, name, folders):
    # 11.4: Java rebuilds the queues, but indexes the last record twice, and never rebuilds the index.
    geo = geometry(name)
    root = os.path.join(scratch, "store")
    acknowledged = closed_store(root, geo, script())
    before = shutdown_files(root)
    for folder in folders:
        shutil.rmtree(os.path.join(root, folder), ignore_errors=True)
    if not clean:
        make_unclean(root)
    with MessageStore.open(root, config=config_of(geo)) as store:
        check_readable(store, acknowledged)
    assert not changes(before, shutdown_files(root))


def test_refused_openings_of_a_broken_log_say_where(scratch):
    # A hole in the chain of segments is refused for writing and readable read-only.
    geo = geometry("plain")
    root = os.path.join(scratch, "store")
    acknowledged = closed_store(root, geo, script())
    os.unlink(os.path.join(root, "commitlog", oracle.file_name(SEGMENT)))
    before = oracle.read_files(root)
    for recovery in ("strict", "truncate", "skip"):
        with pytest.raises(StoreError) as refused:
            MessageStore.open(root, config=config_of(geo), recovery=recovery)
        assert oracle.file_name(2 * SEGMENT) in str(refused.value)
        assert not changes(before, oracle.read_files(root))
    with MessageStore.open(root, config=config_of(geo), read_only=True) as store:
        there = {message.phy_offset for message in store.messages()}
    assert there == {each[3] for each in acknowledged if not SEGMENT <= each[3] < 2 * SEGMENT}
