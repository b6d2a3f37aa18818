"""Durability: the bytes on the disk when a call returns, the order of waiting threads, and the housekeeping thread.

Owns the proof that SYNC_FLUSH returns after the record's bytes were handed to the disk, that one flush serves many
threads, that no note of a write is lost, that the checkpoint never says more than what was forced, and that a failed
flush ends writing.  A `Disk` notes what was forced and can hold a flush open, so that nothing here depends on timing.
"""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from random import Random

import golden
import pyarrow as pa
import pytest

from rmqstore import (
    FlushDiskTimeoutError,
    IndexFile,
    Message,
    MessageStore,
    StoreClosedError,
    StoreConfig,
    StorePoisonedError,
    _core,
)
from rmqstore.files import mapped_file
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.files.mapped_file import STAGING_PREFIX, MappedFile
from rmqstore.index import index_service
from rmqstore.store import upkeep
from rmqstore.store.upkeep import Housekeeping, Task, Upkeep

#: Nothing happens by a timer, so that each test says itself when a flush is due.
QUIET = StoreConfig(
    mapped_file_size_commit_log=8192,
    mapped_file_size_consume_queue=2000,
    max_hash_slot_num=50,
    max_index_num=100,
    flush_interval_commit_log=0,
    flush_interval_consume_queue=0,
    flush_consumer_offset_interval=0,
    clean_resource_interval=0,
)
SYNC = QUIET.replace(flush_disk_type="SYNC_FLUSH")
PATIENCE = 240


def wait_until(is_so: Callable[[], object], what: str) -> None:
    """Wait for something that another thread will do; how long it takes does not matter."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.002)


class Gate:
    """Holds whoever comes by until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def wait_for_someone(self) -> None:
        assert self.reached.wait(PATIENCE), "nobody came to the gate"

    def open(self) -> None:
        self.opened.set()


class Disk:
    """The forced bytes by inode: those that a file had when the forcing began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.forced: dict[int, bytes] = {}
        self.events: list[tuple[str, str]] = []
        self.gates: list[tuple[str, Gate]] = []
        self.failures: list[tuple[str, OSError]] = []
        self.before_checkpoint: Callable[[Checkpoint], None] | None = None
        self._notes = threading.Lock()
        # macOS has no fdatasync.
        forces = [name for name in ("fsync", "fdatasync") if hasattr(os, name)]
        real = {name: getattr(os, name) for name in (*forces, "link", "rename", "mkdir")}
        real_flush, real_force, real_checkpoint = MappedFile.flush, IndexFile.force, Checkpoint.flush

        def flush(each: MappedFile) -> None:
            # Only a file that has something to force counts.
            if each._taken or each in each.pool.dirty:
                self.forcing(each.path)
            real_flush(each)

        def force(index: IndexFile) -> None:
            self.forcing(index.path)
            real_force(index)

        def of_descriptor(name: str) -> Callable[[int], None]:
            def force_descriptor(fd: int) -> None:
                self.forcing(os.readlink(f"/proc/self/fd/{fd}"))
                real[name](fd)

            return force_descriptor

        def naming(name: str) -> Callable[..., None]:
            def give_name(*paths, **options) -> None:
                real[name](*paths, **options)
                self.events.append(("name", os.path.abspath(paths[-1] if name != "mkdir" else paths[0])))

            return give_name

        def flush_checkpoint(checkpoint: Checkpoint) -> None:
            if self.before_checkpoint is not None:
                self.before_checkpoint(checkpoint)
            self._fail(checkpoint.path)
            real_checkpoint(checkpoint)

        monkeypatch.setattr(MappedFile, "flush", flush)
        monkeypatch.setattr(IndexFile, "force", force)
        monkeypatch.setattr(Checkpoint, "flush", flush_checkpoint)
        for name in forces:
            monkeypatch.setattr(os, name, of_descriptor(name))
        for name in ("link", "rename", "mkdir"):
            monkeypatch.setattr(os, name, naming(name))

    def forcing(self, path: str) -> None:
        """Note that `path` is forced now; waits at a gate and fails if the test wants it so."""
        if os.path.isfile(path):
            with open(path, "rb") as file:
                content, inode = file.read(), os.fstat(file.fileno()).st_ino
            with self._notes:
                self.forced[inode] = content
        self.events.append(("forced", os.path.abspath(path)))
        for part, gate in list(self.gates):
            if part in path and not gate.opened.is_set():
                gate.reached.set()
                assert gate.opened.wait(PATIENCE), "the gate was never opened"
        self._fail(path)

    def _fail(self, path: str) -> None:
        for part, error in self.failures:
            if part in path:
                raise error

    def hold(self, part: str) -> Gate:
        """Block every later forcing of a path with `part` in it."""
        gate = Gate()
        self.gates.append((part, gate))
        return gate

    def times(self, part: str) -> int:
        """How often a path with `part` in it was forced."""
        return sum(part in path for what, path in self.events if what == "forced")

    def has(self, path: str, pos: int, size: int) -> bool:
        """The bytes that the file has there now were forced."""
        with open(path, "rb") as file:
            content, inode = file.read(), os.fstat(file.fileno()).st_ino
        return self.forced.get(inode, b"")[pos : pos + size] == content[pos : pos + size]

    def has_record(self, store: MessageStore, put) -> bool:
        segment = store.commit_log.segment(put.phy_offset)
        return self.has(segment.path, put.phy_offset - segment.file_from_offset, put.size)

    def unsure_names(self, path: str, below: str) -> list[str]:
        """Names on the way from `below` to `path` that were given and whose directory was not forced since."""
        unsure = []
        while path != below:
            given = [at for at, event in enumerate(self.events) if event == ("name", path)]
            sure = [at for at, event in enumerate(self.events) if event == ("forced", os.path.dirname(path))]
            if given and (not sure or sure[-1] < given[-1]):
                unsure.append(path)
            path = os.path.dirname(path)
        return unsure


@pytest.fixture
def disk(monkeypatch):
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("looks into /proc for the file that is forced")
    made = Disk(monkeypatch)
    yield made
    for _, gate in made.gates:
        gate.open()


class Threads:
    """Threads whose results and errors the test looks at."""

    def __init__(self) -> None:
        self.running: list[threading.Thread] = []

    def start(self, work: Callable, *args) -> dict:
        outcome: dict = {}

        def run() -> None:
            try:
                outcome["result"] = work(*args)
            except BaseException as error:
                outcome["error"] = error

        thread = threading.Thread(target=run, daemon=True)
        self.running.append(thread)
        thread.start()
        return outcome

    def join(self) -> None:
        for thread in self.running:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a thread hangs"


@pytest.fixture
def threads():
    return Threads()


def small(number: int = 0) -> Message:
    return Message("Orders", b"order %d" % number, keys=[f"k{number}"])


# ------------------------------------------------------------------------------------------------------- SYNC_FLUSH


@pytest.mark.parametrize("way", ["put_message", "put_messages", "put_message_batch", "rolling"])
def test_a_sync_put_returns_after_its_bytes_were_forced(tmp_path, disk, way):
    with MessageStore.open(tmp_path / "store", config=SYNC) as store:
        for number in range(12):
            if way == "put_message":
                puts = [store.put_message(small(number))]
            elif way == "rolling":
                puts = store.put_messages([Message("Orders", bytes([number]) * 3000, keys=["k"]) for _ in range(5)])
            else:
                puts = getattr(store, way)([small(each) for each in range(10)])
            assert all(disk.has_record(store, put) for put in puts)
        if way == "rolling":
            assert len(store.commit_log.files) > 20


def test_a_reopened_store_forces_as_before(tmp_path, disk):
    for _ in range(3):
        with MessageStore.open(tmp_path / "store", config=SYNC) as store:
            for number in range(5):
                assert disk.has_record(store, store.put_message(small(number)))
    with MessageStore.open(tmp_path / "store", config=QUIET, reconfigure=True) as store:
        put = store.put_message(small())
        assert not disk.has_record(store, put)
        store.flush()
        assert disk.has_record(store, put)
        for queue in store.queues:
            newest = queue.files.last()
            assert disk.has(newest.path, 0, newest.size)
        newest = store.index_service.file(store.index_service.names[-1])
        assert disk.has(newest.path, 0, store.config.index_file_size)


def test_a_store_that_was_cut_forces_as_before(tmp_path, disk):
    root = tmp_path / "store"
    with MessageStore.open(root, config=SYNC) as store:
        puts = [store.put_message(Message("Orders", b"x" * 3000)) for _ in range(6)]
        path = store.commit_log.segment(puts[-1].phy_offset).path
        pos = puts[-1].phy_offset - store.commit_log.segment(puts[-1].phy_offset).file_from_offset
    (root / "abort").touch()
    with open(path, "r+b") as file:
        file.seek(pos + 2000)
        file.write(b"torn")
    with MessageStore.open(root, config=SYNC) as store:
        assert store.recovery_report.bytes_cut
        assert disk.has(path, 0, SYNC.mapped_file_size_commit_log)
        for number in range(3):
            assert disk.has_record(store, store.put_message(small(number)))


def test_an_async_put_waits_for_nothing(tmp_path, disk):
    with MessageStore.open(tmp_path / "store", config=QUIET) as store:
        store.put_message(small())
        before = disk.times("commitlog/")
        gate = disk.hold("commitlog/")
        put = store.put_message(small(1))
        assert disk.times("commitlog/") == before
        assert not disk.has_record(store, put)
        gate.open()


def test_one_flush_serves_all_who_wait(tmp_path, disk, threads):
    with MessageStore.open(tmp_path / "store", config=SYNC.replace(sync_flush_timeout=60_000)) as store:
        store.put_message(small())
        segment = store.commit_log.files.last().path
        before = disk.times(segment)
        gate = disk.hold("commitlog/")
        outcomes = [threads.start(store.put_message, small())]
        gate.wait_for_someone()
        # The record of the first is with the disk; these eight come later.
        seen = store.max_queue_offset("Orders")
        outcomes += [threads.start(store.put_message, small(number)) for number in range(1, 9)]
        wait_until(lambda: store.max_queue_offset("Orders") == seen + 8, "all eight appended")
        assert not any(outcomes)
        # Readers do not wait: what was put can be read before it is on the disk.
        assert len(store.get_message("Orders", 0, seen, 32).messages) == 8
        gate.open()
        threads.join()
        assert disk.times(segment) == before + 2
        assert all(disk.has_record(store, outcome["result"]) for outcome in outcomes)


def test_who_appends_while_a_flush_is_on_is_in_the_next_one(tmp_path, disk, threads):
    with MessageStore.open(tmp_path / "store", config=SYNC.replace(sync_flush_timeout=60_000)) as store:
        store.put_message(small())
        first = disk.hold("commitlog/")
        early = threads.start(store.put_message, small(1))
        first.wait_for_someone()
        late = threads.start(store.put_message, small(2))
        wait_until(lambda: store.max_queue_offset("Orders") == 3, "the late one appended")
        # The second flush is held as well: the late one must not return with the first.
        second = Gate()
        disk.gates.append(("commitlog/", second))
        first.open()
        second.wait_for_someone()
        wait_until(lambda: early, "the early one returned, or it waits at the gate as well")
        assert not late
        second.open()
        threads.join()
        assert disk.has_record(store, early["result"]) and disk.has_record(store, late["result"])


@pytest.mark.parametrize("text", ["false", "anything else"])
def test_a_message_that_does_not_wait(tmp_path, disk, threads, text):
    with MessageStore.open(tmp_path / "store", config=SYNC) as store:
        store.put_message(small())
        gate = disk.hold("commitlog/")
        waits = threads.start(store.put_message, small(1))
        gate.wait_for_someone()
        # In RocketMQ (5.5.0), too, every text but "true" means not to wait.
        quick = store.put_message(Message("Orders", b"quick", properties={"WAIT": text}))
        more = store.put_messages([Message("Orders", b"quick", properties={"WAIT": text})] * 3)
        assert not waits and not disk.has_record(store, quick)
        gate.open()
        threads.join()
        # One message that waits is enough for all of a put, and takes along what came before.
        puts = store.put_messages([Message("Orders", b"quick", properties={"WAIT": text}), small(2)])
        assert all(disk.has_record(store, put) for put in (quick, *more, *puts))
        assert disk.has_record(store, store.put_message(Message("Orders", b"waits", properties={"WAIT": "true"})))


def test_a_put_that_is_not_on_disk_in_time(tmp_path, disk, threads):
    with MessageStore.open(tmp_path / "store", config=SYNC.replace(sync_flush_timeout=30)) as store:
        store.put_message(small())
        gate = disk.hold("commitlog/")
        slow = threads.start(store.put_message, small(1))
        gate.wait_for_someone()
        with pytest.raises(FlushDiskTimeoutError) as caught:
            store.put_message(small(2))
        assert isinstance(caught.value, TimeoutError)
        assert "sync_flush_timeout = 30 ms" in str(caught.value) and str(tmp_path) in str(caught.value)
        # Stored it is.
        assert [message.body for message in store.get_message("Orders").messages][-1] == b"order 2"
        assert store.query_message("Orders", "k2")
        gate.open()
        threads.join()
        assert "error" not in slow
        # Nothing is poisoned, and the next flush takes it along.
        put = store.put_message(small(3))
        assert put.queue_offset == 3
        assert all(disk.has_record(store, each) for each in (put, slow["result"]))
        segment = store.commit_log.files.last()
        assert disk.has(segment.path, 0, store.commit_log.max_offset)


def test_no_timeout_for_what_another_thread_forced(tmp_path):
    """The thread whose turn it was forced this record too, and goes on with something else for longer than the put waits."""
    with MessageStore.open(tmp_path / "store", config=SYNC.replace(sync_flush_timeout=30)) as store:
        store.put_message(small())
        flushing, asked = store._flushing, []
        real = flushing._log_flushed

        class Busy:
            def wait_for(self, is_done, timeout: float = -1) -> bool:
                asked.append((is_done(), timeout))
                # The other thread's turn; it takes the lock, which the waiting put has given back.
                flushing._log_flushed, flushing._log_turn = real, None
                flushing._log_lock.release()
                flushing.flush_log()
                flushing._log_lock.acquire()
                return False

        flushing._log_flushed, flushing._log_turn = Busy(), object()
        assert store.put_message(small(1)).queue_offset == 1
        assert asked == [(False, 0.03)] and store._flushing._log_flushed is real


@pytest.mark.parametrize("part", ["consumequeue/", "index/", "checkpoint"])
def test_a_sync_put_does_not_wait_for_queues_and_index(tmp_path, disk, threads, part):
    with MessageStore.open(tmp_path / "store", config=SYNC.replace(sync_flush_timeout=60_000)) as store:
        store.put_message(small())
        gate = disk.hold(part)
        flushing = threads.start(store.flush)
        gate.wait_for_someone()
        put = store.put_message(small(1))
        assert disk.has_record(store, put) and not flushing
        gate.open()
        threads.join()
        assert flushing == {"result": None}


def test_a_flush_takes_no_note_of_later_writes(tmp_path, disk, threads):
    """Messages put during a flush are forced by the next one, in the log, the queues and the index."""
    with MessageStore.open(tmp_path / "store", config=QUIET) as store:
        store.put_message(small())
        store.flush()
        for part in ("commitlog/", "consumequeue/", "index/"):
            store.put_message(small(1))
            gate = disk.hold(part)
            flushing = threads.start(store.flush)
            gate.wait_for_someone()
            put = store.put_message(small(2))
            assert not flushing
            gate.open()
            threads.join()
            assert "error" not in flushing
            before = disk.times(part)
            store.flush()
            assert disk.times(part) == before + 1
            assert disk.has_record(store, put)
            for path in (
                store.commit_log.files.last().path,
                store.queues.find("Orders", 0).files.last().path,
                store.index_service.file(store.index_service.names[-1]).path,
            ):
                assert disk.has(path, 0, os.stat(path).st_size)
        # And with nothing new there is nothing to force.
        counts = [disk.times(part) for part in ("commitlog/", "consumequeue/", "index/")]
        store.flush()
        assert counts == [disk.times(part) for part in ("commitlog/", "consumequeue/", "index/")]


def test_a_file_that_the_pool_let_go_is_forced_all_the_same(system, tmp_path, disk):
    config = QUIET.replace(max_mapped_files=1, message_index_enable=False)
    with MessageStore.open(tmp_path / "store", config=config) as store:
        store._state.pool.max_appended_files = 1
        puts = [store.put_message(Message("Orders", b"x" * 2500), number % 3) for number in range(12)]
        store.flush()
        assert all(disk.has_record(store, put) for put in puts)
        for queue in store.queues:
            for base in queue.files.offsets:
                assert disk.has(queue.files.file(base).path, 0, queue.files.mapped_file_size)


# ---------------------------------------------------------------------------------------------------- failed flushes

FAILURES = {
    # What fails, and the call that meets it.
    "commit log": ("commitlog/", lambda store: store.put_message(small(1))),
    "queue": ("consumequeue/", lambda store: store.flush()),
    "index": ("index/", lambda store: store.flush()),
    "checkpoint": ("checkpoint", lambda store: store.flush()),
    "timer, log": ("commitlog/", lambda store: store._upkeep.flush_log()),
    "timer, queue": ("consumequeue/", lambda store: store._upkeep.flush()),
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_failed_flush_ends_writing(tmp_path, disk, what):
    root = tmp_path / "store"
    part, meet = FAILURES[what]
    config = SYNC.replace(flush_commit_log_thorough_interval=0, flush_consume_queue_thorough_interval=0)
    store = MessageStore.open(root, config=config)
    store.put_message(small())
    if what != "commit log":
        # Something that is not on the disk yet.
        store.put_message(Message("Orders", b"order 1", keys=["k1"], properties={"WAIT": "false"}))
    failure = OSError(errno.EIO, "the disk is broken")
    disk.failures.append((part, failure))
    with pytest.raises(OSError, match="the disk is broken"):
        meet(store)
    disk.failures.clear()
    # The disk is well again, but nobody knows what it holds.
    messages = [small(2)]
    for attempt in (
        lambda: store.put_message(messages[0]),
        lambda: store.put_messages(messages),
        lambda: store.put_message_batch(messages),
        store.flush,
        store.delete_expired_files,
    ):
        with pytest.raises(StorePoisonedError, match="the disk is broken") as caught:
            attempt()
        assert caught.value.__cause__ is failure
    # Reads go on; what was put is there.
    assert [message.body for message in store.get_message("Orders")] == [b"order 0", b"order 1"]
    assert [message.body for message in store.query_message("Orders", "k1")] == [b"order 1"]
    forced = len(disk.events)
    store.close()
    assert not [event for event in disk.events[forced:] if "commitlog" in event[1]]
    assert (root / "abort").exists()
    with MessageStore.open(root, config=SYNC) as store:
        assert not store.recovery_report.clean
        assert [message.body for message in store.get_message("Orders")] == [b"order 0", b"order 1"]
        assert store.put_message(small(2)).queue_offset == 2
    assert not (root / "abort").exists()


def test_all_who_wait_learn_of_a_failed_flush(tmp_path, disk, threads):
    store = MessageStore.open(tmp_path / "store", config=SYNC.replace(sync_flush_timeout=60_000))
    store.put_message(small())
    gate = disk.hold("commitlog/")
    first = threads.start(store.put_message, small(1))
    gate.wait_for_someone()
    others = [threads.start(store.put_message, small(number)) for number in range(2, 6)]
    wait_until(lambda: store.max_queue_offset("Orders") == 6, "all appended")
    disk.failures.append(("commitlog/", OSError(errno.EIO, "the disk is broken")))
    gate.open()
    threads.join()
    assert isinstance(first["error"], OSError)
    assert [type(outcome["error"]) for outcome in others] == [StorePoisonedError] * 4
    store.close()


def test_close_that_cannot_flush(tmp_path, disk):
    root = tmp_path / "store"
    store = MessageStore.open(root, config=QUIET)
    store.put_message(small())
    disk.failures.append(("commitlog/", OSError(errno.EIO, "the disk is broken")))
    with pytest.raises(OSError, match="the disk is broken"):
        store.close()
    disk.failures.clear()
    assert store.closed and (root / "abort").exists()
    assert not [thread for thread in threading.enumerate() if "housekeeping store" in thread.name]
    store.close()
    # The lock was given back.
    with MessageStore.open(root, config=QUIET) as store:
        assert [message.body for message in store.get_message("Orders")] == [b"order 0"]


def test_a_put_that_waits_while_the_store_is_closed(tmp_path, disk, threads):
    store = MessageStore.open(tmp_path / "store", config=SYNC.replace(sync_flush_timeout=60_000))
    store.put_message(small())
    gate = disk.hold("commitlog/")
    first = threads.start(store.put_message, small(1))
    gate.wait_for_someone()
    second = threads.start(store.put_message, small(2))
    wait_until(lambda: store.max_queue_offset("Orders") == 3, "the second appended")
    closing = threads.start(store.close)
    gate.open()
    threads.join()
    assert closing == {"result": None}
    # Their records were forced, by themselves or by the close.
    assert [outcome["result"].queue_offset for outcome in (first, second)] == [1, 2]
    with pytest.raises(StoreClosedError):
        store.put_message(small(3))
    with MessageStore.open(tmp_path / "store", config=SYNC) as store:
        assert store.recovery_report.clean and len(store.get_message("Orders").messages) == 3


# -------------------------------------------------------------------------------------------------------- checkpoint


def check_what_it_says(disk: Disk, store: MessageStore, checkpoint: Checkpoint) -> int:
    """All that the checkpoint vouches for was forced; how many records that are."""
    vouched = 0
    for message in list(store.messages()):
        segment = store.commit_log.segment(message.phy_offset)
        pos = message.phy_offset - segment.file_from_offset
        below = message.phy_offset < checkpoint.flushed_offset
        if below or message.store_timestamp <= checkpoint.physic_msg_timestamp:
            assert disk.has(segment.path, pos, message.size), f"the record at {message.phy_offset}"
            vouched += 1
        if (
            below
            or message.store_timestamp <= checkpoint.logics_msg_timestamp
            or message.phy_offset < checkpoint.logics_physical_offset
        ):
            file = store.queues.find(message.topic, message.queue_id).files.find(message.queue_offset * 20)
            pos = message.queue_offset * 20 - file.file_from_offset
            assert disk.has(file.path, pos, 20), f"the unit of the record at {message.phy_offset}"
    for name in store.index_service.names:
        index = store.index_service.file(name)
        for number in range(1, index.index_count):
            if index.read_entry(number)[1] < checkpoint.flushed_offset:
                pos = 40 + 4 * store.config.max_hash_slot_num + 20 * number
                assert disk.has(index.path, pos, 20), f"entry {number} of index file {name}"
        # Files up to this time are what a Java store keeps after a crash, as they are.
        if index.index_count > 1 and index.header.end_timestamp <= checkpoint.index_msg_timestamp:
            assert disk.has(index.path, 0, store.config.index_file_size), f"index file {name}"
    return vouched


@pytest.mark.parametrize("disk_type", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_the_checkpoint_is_never_ahead_of_the_disk(tmp_path, disk, threads, disk_type):
    numbers = itertools.count(1_700_000_000_000)
    config = QUIET.replace(
        clock=lambda: next(numbers),
        flush_disk_type=disk_type,
        flush_interval_commit_log=1,
        flush_commit_log_least_pages=0,
        flush_interval_consume_queue=2,
        flush_consume_queue_least_pages=1,
        flush_consume_queue_thorough_interval=20,
    )
    checked: list[int] = []
    failures: list[BaseException] = []
    store = MessageStore.open(tmp_path / "store", config=config)

    def check(checkpoint: Checkpoint) -> None:
        try:
            checked.append(check_what_it_says(disk, store, checkpoint))
        except BaseException as error:
            failures.append(error)

    disk.before_checkpoint = check

    def put(thread: int) -> None:
        for number in range(60):
            store.put_message(Message("Orders", b"x" * 300, keys=[f"{thread}.{number}"]), thread)
            if number % 20 == 10:
                store.flush()

    outcomes = [threads.start(put, thread) for thread in range(3)]
    threads.join()
    store.flush()
    disk.before_checkpoint = None
    store.close()
    assert not failures, failures[0]
    assert outcomes == [{"result": None}] * 3
    assert checked[-1] == 180 and len(store.index_service.names) == 2


def test_after_a_crash_the_checkpoint_waits_for_what_the_dead_process_wrote(tmp_path, disk):
    """Pages that a killed process wrote are in the memory of the system; nobody forced them yet."""
    numbers = itertools.count(1_700_000_000_000, 10_000)
    config = QUIET.replace(clock=lambda: next(numbers))
    store = MessageStore.open(tmp_path / "store", config=config)
    for number in range(150):
        store.put_message(Message("Orders", b"x" * 300, keys=[f"k{number}"]))
    shutil.copytree(tmp_path / "store", tmp_path / "killed")
    store.close()
    disk.forced.clear()
    checked = []

    opened = MessageStore._take

    def remember(each, *args, **options) -> None:
        opened(each, *args, **options)
        disk.before_checkpoint = lambda checkpoint: checked.append(check_what_it_says(disk, each, checkpoint))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MessageStore, "_take", remember)
        with MessageStore.open(tmp_path / "killed", config=config) as store:
            assert not store.recovery_report.clean
            assert checked, "the opening wrote no checkpoint"
            put = store.put_message(small())
            store.flush()
            assert disk.has_record(store, put)
    assert checked[-1] == 151


@pytest.mark.parametrize("closed", [False, True])
def test_what_the_checkpoint_says_of_times_after_a_clock_was_set_back(tmp_path, closed):
    # Java deletes index files that end after its time, and begins at the newest segment that is three seconds older.
    clock = [1_700_000_000_000]
    store = MessageStore.open(tmp_path / "store", config=QUIET.replace(clock=lambda: clock[0]))
    looked_at = 0
    for hours in (0, -1, -2, 3):
        clock[0] += hours * 3_600_000
        for number in range(150):
            clock[0] += 1
            store.put_message(small(number))
        store.flush()
        full = [index.header for index in store.index_service.files() if index.is_full]
        checkpoint = store.checkpoint
        assert checkpoint.index_msg_timestamp == max(header.end_timestamp for header in full)
        assert checkpoint.logics_physical_offset == full[0].end_phy_offset
        begun = {base: store.commit_log.store_timestamp_at(base) for base in store.commit_log.files.offsets}
        after = [timestamp for base, timestamp in begun.items() if base > full[0].end_phy_offset]
        assert not after or checkpoint.min_timestamp < min(after)
        looked_at += len(after)
    assert looked_at
    if closed:
        ends = [index.header.end_timestamp for index in store.index_service.files()]
        store.close()
        assert Checkpoint.load(tmp_path / "store" / "checkpoint").index_msg_timestamp == max(ends)
    else:
        store.close()


def lost_to_java(store):
    """Phy offsets from which on and up to which a Java store would lose keys, were the process killed now; or None."""
    checkpoint = Checkpoint.load(store.checkpoint.path)
    headers = [index.header for index in store.index_service.files() if index.index_count > 1][::-1]
    kept = [header for header in headers if header.end_timestamp <= checkpoint.index_msg_timestamp]
    deleted = [header for header in headers if header not in kept]
    times = {base: store.commit_log.store_timestamp_at(base) for base in store.commit_log.files.offsets}
    begin = max((base for base, timestamp in times.items() if 0 < timestamp <= checkpoint.min_timestamp), default=0)
    # It indexes again the records after the last file that it keeps.
    begin = max([begin, *(header.end_phy_offset for header in kept)])
    first = min((header.begin_phy_offset for header in deleted), default=begin)
    return None if first >= begin else (first, begin)


@pytest.mark.parametrize("way", ["put_message", "put_messages", "put_message_batch", "put_table"])
def test_a_kill_at_any_put_after_the_clock_was_set_back(tmp_path, way):
    # No flush is due in between: the put that sees the change has to.
    clock = [1_700_000_000_000]
    config = QUIET.replace(clock=lambda: clock[0])
    random = Random(4)
    with MessageStore.open(tmp_path / "store", config=config) as store:
        for number in range(400):
            if random.random() < 0.01:
                store.flush()
            clock[0] += 100 if random.random() < 0.97 else random.choice([-3600, 3600, 3600, -20, -4]) * 1000
            message = small(number)
            if way == "put_message":
                store.put_message(message)
            elif way == "put_messages":
                store.put_messages([message])
            elif way == "put_message_batch":
                store.put_message_batch([message])
            else:
                store.put_table(pa.table({"body": [message.body]}), topic=message.topic, keys=message.keys)
            assert lost_to_java(store) is None, f"after put {number}"


def test_a_flush_opens_no_old_index_file_again(tmp_path, monkeypatch):
    with MessageStore.open(tmp_path / "store", config=QUIET.replace(max_index_num=20)) as store:
        for number in range(100):
            store.put_message(small(number))
        store.flush()
        names, asked = store.index_service.names, []
        file = store.index_service.file
        monkeypatch.setattr(type(store.index_service), "file", lambda _, name: asked.append(name) or file(name))
        store.put_message(small())
        store.flush()
        assert len(names) > 4 and asked and set(asked) <= set(names[-2:]) | {store.index_service.names[-1]}
        monkeypatch.undo()


def test_a_flush_of_some_pages_does_not_speak_for_the_queues(tmp_path, disk):
    with MessageStore.open(tmp_path / "store", config=QUIET) as store:
        for number in range(30):
            store.put_message(small(number))
        before = store.checkpoint.flushed_offset, store.checkpoint.logics_msg_timestamp
        # 30 units of 20 bytes are not two pages, so that the queue waits for the thorough flush.
        store._upkeep.flush()
        assert (store.checkpoint.flushed_offset, store.checkpoint.logics_msg_timestamp) == before
        assert not disk.times("consumequeue/Orders/0/0")
        put = store.commit_log.message_at(0)
        assert store.checkpoint.physic_msg_timestamp >= put.store_timestamp
        assert disk.has(store.commit_log.files.last().path, 0, store.commit_log.max_offset)
        store.flush()
        assert store.checkpoint.flushed_offset == store.commit_log.max_offset
        assert disk.times("consumequeue/Orders/0/0") == 1


def test_the_timer_leaves_a_few_pages_for_the_next_time(tmp_path, disk):
    config = QUIET.replace(mapped_file_size_commit_log=1 << 17, flush_commit_log_least_pages=4)
    with MessageStore.open(tmp_path / "store", config=config) as store:
        store.put_message(Message("Orders", bytes(3 * 4096)))
        before = disk.times("commitlog/")
        store._upkeep.flush_log()
        assert disk.times("commitlog/") == before
        put = store.put_message(Message("Orders", bytes(4096)))
        store._upkeep.flush_log()
        assert disk.times("commitlog/") == before + 1 and disk.has_record(store, put)
        # After the long interval whatever there is goes.
        put = store.put_message(small())
        store._upkeep.flush_log()
        assert not disk.has_record(store, put)
        store._flushing._log_flush_time -= config.flush_commit_log_thorough_interval / 1000
        store._upkeep.flush_log()
        assert disk.has_record(store, put)


# ------------------------------------------------------------------------------------------- directories and new files


@pytest.mark.parametrize("disk_type", ["SYNC_FLUSH", "ASYNC_FLUSH"])
def test_the_names_of_new_files_are_forced(tmp_path, disk, disk_type):
    base = str(tmp_path)
    with MessageStore.open(tmp_path / "deep" / "store", config=QUIET.replace(flush_disk_type=disk_type)) as store:
        for number in range(60):
            store.put_message(Message(f"Topic{number % 3}", b"x" * 400, keys=["k"]), number % 2)
            if disk_type == "SYNC_FLUSH":
                for offset in store.commit_log.files.offsets:
                    assert not disk.unsure_names(store.commit_log.files.file(offset).path, base)
        store.flush()
        store.consumer_offsets.commit("group", "Topic0", 0, 1)
        store.flush()
        paths = [os.path.join(folder, name) for folder, _, names in os.walk(tmp_path) for name in names]
        assert any("consumerOffset.json" in path for path in paths) and len(paths) >= 15
        unsure = {name for path in paths if not path.endswith("/lock") for name in disk.unsure_names(path, base)}
        assert not unsure
        # Their length and place on the disk were forced before they got their names.
        for path in paths:
            if "commitlog" in path or "consumequeue" in path or "index" in path:
                named = disk.events.index(("name", path))
                assert any(STAGING_PREFIX in each for what, each in disk.events[:named] if what == "forced")


def sparse(path: str) -> None:
    """Make the file what a Java store leaves: as long as before, with holes where nothing was written."""
    with open(path, "rb") as file:
        content = file.read()
    os.unlink(path)
    with open(path, "wb") as file:
        file.write(content.rstrip(b"\0"))
        file.truncate(len(content))


def space(path: str) -> int:
    return os.stat(path).st_blocks * 512


@pytest.fixture(params=["linux", "macos"])
def system(request, monkeypatch):
    """This system, and then one whose Python lacks what macOS's does."""
    if request.param == "macos":
        for name in ("fdatasync", "posix_fallocate"):
            monkeypatch.delattr(os, name, raising=False)


def allocated(path: str) -> bool:
    return space(path) >= os.stat(path).st_size


@pytest.fixture
def sparse_store(tmp_path):
    root = tmp_path / "store"
    config = QUIET.replace(
        mapped_file_size_commit_log=1 << 18, mapped_file_size_consume_queue=100_000, max_index_num=5000
    )
    with MessageStore.open(root, config=config) as store:
        # One unit more, and the queue needs a second page.
        store.put_messages([small(number) for number in range(4096 // 20)])
    files = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names if name[:2].isdigit()]
    files = {os.path.relpath(path, root).split(os.sep)[0]: path for path in files}
    for path in files.values():
        sparse(path)
        if allocated(path):
            pytest.skip("this file system has no holes")
    return root, config, files


def test_files_with_holes_get_space_before_the_first_write(system, sparse_store, monkeypatch):
    root, config, files = sparse_store
    looked: dict[str, bool] = {}

    def has_space(kind: str) -> bool:
        return space(files[kind]) >= (2 * 4096 if kind == "consumequeue" else os.stat(files[kind]).st_size)

    def watch(owner, name: str, kind: str) -> None:
        real = getattr(owner, name)

        def call(*args):
            looked.setdefault(kind, has_space(kind))
            return real(*args)

        monkeypatch.setattr(owner, name, call)

    class Watched:
        """The store's rows; says when they are encoded."""

        def __init__(self, rows):
            self.rows = rows

        def __getattr__(self, name):
            return getattr(self.rows, name)

        def encode(self, *args):
            looked.setdefault("commitlog", has_space("commitlog"))
            return self.rows.encode(*args)

    watch(_core, "write_units", "consumequeue")
    watch(IndexFile, "put_hashes", "index")
    with MessageStore.open(root, config=config) as store:
        store._writing.rows = Watched(store._writing.rows)
        assert space(files["consumequeue"]) == 4096
        store.put_message(small(204))
        assert looked == {"commitlog": True, "consumequeue": True, "index": True}
        assert [message.body for message in store.get_message("Orders", 0, 203)] == [b"order 203", b"order 204"]


@pytest.mark.parametrize("kind", ["commitlog", "consumequeue", "index"])
def test_a_full_disk_under_a_file_with_holes_is_an_error_before_anything_is_written(sparse_store, monkeypatch, kind):
    root, config, files = sparse_store
    real = mapped_file._allocate

    def no_space(fd: int, begin: int, end: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == files[kind]:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, begin, end)

    with MessageStore.open(root, config=config) as store:
        end = store.commit_log.max_offset
        with monkeypatch.context() as patched:
            patched.setattr(mapped_file, "_allocate", no_space)
            with pytest.raises(OSError) as caught:
                store.put_message(small(1))
            assert caught.value.errno == errno.ENOSPC
        assert store.commit_log.max_offset == end
        assert store.put_message(small(205)).queue_offset == 204
        assert [message.body for message in store.get_message("Orders", 0, 203)] == [b"order 203", b"order 205"]


def contents(root) -> dict[str, bytes]:
    return {
        os.path.join(folder, name): open(os.path.join(folder, name), "rb").read()
        for folder, _, names in os.walk(root)
        for name in names
    }


FULL = {
    # What does not fit any more, and a put that needs it.
    "segment": lambda store: store.put_message(Message("Orders", b"x" * 5000)),
    "segments": lambda store: store.put_messages([Message("Orders", b"x" * 5000)] * 5),
    "queue file": lambda store: store.put_messages([small(number) for number in range(100)]),
    "new queue": lambda store: store.put_message(small(), 1),
    "new topic": lambda store: store.put_message(Message("Payments", b"")),
    "extension": lambda store: store.put_message(small()),
    "extensions": lambda store: store.put_messages([small(number) for number in range(30)]),
}


@pytest.mark.parametrize("what", FULL)
def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path, monkeypatch, what):
    root = tmp_path / "store"
    config = QUIET.replace(message_index_enable=False)
    if what == "queue file":
        config = config.replace(mapped_file_size_commit_log=1 << 17)
    if what.startswith("extension"):
        # Ten units of 20 bytes and what must stay behind them; there is room enough in log and queue.
        config = config.replace(
            mapped_file_size_commit_log=1 << 17,
            enable_consume_queue_ext=True,
            mapped_file_size_consume_queue_ext=10 * 20 + 4 + 19,
        )

    real = mapped_file._allocate

    def no_space(fd: int, begin: int, end: int) -> None:
        # Like an operating system: a part is allocated before the disk is full.
        real(fd, begin, (begin + end) // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    with MessageStore.open(root, config=config) as store:
        store.put_message(Message("Orders", b"y" * 5000))
        if what == "extension":
            store.put_messages([small()] * 9)
        there = store.max_queue_offset("Orders")
        before, end = contents(root), store.commit_log.max_offset
        for _ in range(3):
            with monkeypatch.context() as patched:
                patched.setattr(mapped_file, "_allocate", no_space)
                with pytest.raises(OSError) as caught:
                    FULL[what](store)
            assert caught.value.errno == errno.ENOSPC
            assert contents(root) == before
            assert store.commit_log.max_offset == end
            assert len(store.get_message("Orders").messages) == there
            assert store.topics() == ["Orders"] and store.queue_ids("Orders") == [0]
        # There is space again.
        FULL[what](store)
        FULL[what](store)
        bodies = [message.body for message in store.messages()]
    with MessageStore.open(root, config=config) as store:
        assert store.recovery_report.clean and not store.recovery_report.units_written
        assert [message.body for message in store.messages()] == bodies
        assert sum(store.max_queue_offset(t, q) for t in store.topics() for q in store.queue_ids(t)) == len(bodies)


def test_a_topic_whose_first_message_found_no_room(tmp_path, monkeypatch):
    """There was space for its queue, but not for a segment."""
    root = tmp_path / "store"
    real = mapped_file._allocate

    def no_space(fd: int, begin: int, end: int) -> None:
        if end == QUIET.mapped_file_size_commit_log:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, begin, end)

    with MessageStore.open(root, config=QUIET) as store:
        store.put_message(Message("Orders", b"y" * 5000))
        with monkeypatch.context() as patched:
            patched.setattr(mapped_file, "_allocate", no_space)
            for topic in ("Payments", "Refunds"):
                with pytest.raises(OSError, match="No space left"):
                    store.put_message(Message(topic, b"y" * 5000))
        assert store.topics() == ["Orders"] and store.max_queue_offset("Payments") == 0
        assert store.put_message(Message("Payments", b"y" * 5000)).queue_offset == 0
        assert store.topics() == ["Orders", "Payments"]
    assert not staged(root)
    assert sorted(os.listdir(root / "consumequeue")) == ["Orders", "Payments"]


# ------------------------------------------------------------------------------------------------------ housekeeping


def housekeepers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rmqstore-housekeeping")]


@pytest.fixture(autouse=True)
def _no_thread_stays():
    gc.collect()
    before = set(housekeepers())
    yield
    gc.collect()
    # Those of stores that a failed test left open end when the store is collected.
    left = set(housekeepers()) - before
    for thread in left:
        thread.join(0.1)


def test_the_thread_has_a_name_and_ends_with_the_store(tmp_path):
    before = len(housekeepers())
    store = MessageStore.open(tmp_path / "orders", config=QUIET)
    [thread] = [each for each in housekeepers() if each.name == "rmqstore-housekeeping orders"]
    assert thread.daemon
    with MessageStore.open(tmp_path / "orders", config=QUIET, read_only=True):
        assert len(housekeepers()) == before + 1
    store.close()
    assert not thread.is_alive() and len(housekeepers()) == before


def test_the_thread_ends_when_the_store_is_forgotten(tmp_path):
    config = QUIET.replace(flush_interval_commit_log=5, flush_interval_consume_queue=5)
    store = MessageStore.open(tmp_path / "forgotten", config=config)
    store.put_message(small())
    [thread] = [each for each in housekeepers() if each.name == "rmqstore-housekeeping forgotten"]
    gone = weakref.ref(store)
    del store
    wait_until(lambda: gc.collect() is not None and gone() is None, "the store is collected")
    thread.join(PATIENCE)
    assert not thread.is_alive()
    # The thread closed it in order, and nobody holds its lock.
    assert not (tmp_path / "forgotten" / "abort").exists()
    with MessageStore.open(tmp_path / "forgotten", config=config) as store:
        assert store.recovery_report.clean and len(store.get_message("Orders").messages) == 1


def test_a_store_that_is_collected_while_another_one_is_opened(tmp_path):
    """The collector may run at any allocation, also while the list of the held stores is locked."""
    script = textwrap.dedent(
        """
        import faulthandler, fcntl, gc, sys
        faulthandler.dump_traceback_later(30, exit=True)
        from rmqstore import MessageStore
        store = MessageStore.open(sys.argv[1] + "/one")
        store.itself = store
        gc.disable()
        del store
        lockf = fcntl.lockf
        def lock(*args):
            gc.collect()
            return lockf(*args)
        fcntl.lockf = lock
        MessageStore.open(sys.argv[1] + "/two").close()
        MessageStore.open(sys.argv[1] + "/one").close()
        print("fine")
        """
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.stdout == "fine\n", done.stderr


def test_the_thread_flushes(tmp_path, disk):
    config = QUIET.replace(
        flush_interval_commit_log=5,
        flush_commit_log_thorough_interval=0,
        flush_interval_consume_queue=5,
        flush_consume_queue_thorough_interval=0,
    )
    with MessageStore.open(tmp_path / "store", config=config) as store:
        for number in range(3):
            put = store.put_message(small(number))
            wait_until(lambda put=put: disk.has_record(store, put), "the log is forced")
            queue, names = store.queues.find("Orders", 0).files.last(), store.index_service.names
            wait_until(lambda queue=queue: disk.has(queue.path, 0, queue.size), "the queue is forced")
            path = store.index_service.file(names[-1]).path
            wait_until(lambda path=path: disk.has(path, 0, config.index_file_size), "the index is forced")

            def is_written(end=store.commit_log.max_offset) -> bool:
                return Checkpoint.load(tmp_path / "store" / "checkpoint").flushed_offset == end

            wait_until(is_written, "the checkpoint is written")


def test_the_thread_persists_consumer_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(upkeep, "_FIRST_PERSIST", 0)
    path = tmp_path / "store" / "config" / "consumerOffset.json"
    with MessageStore.open(tmp_path / "store", config=QUIET.replace(flush_consumer_offset_interval=5)) as store:
        for offset in (3, 5):
            store.consumer_offsets.commit("group", "Orders", 1, offset)
            wait_until(lambda offset=offset: path.exists() and f"1:{offset}" in path.read_text(), "it is persisted")
        modified = path.stat().st_mtime_ns
        store._state.progress.persist()
        assert path.stat().st_mtime_ns == modified


def staged(root) -> list[str]:
    return sorted(name for name in os.listdir(root) if name.startswith(STAGING_PREFIX))


PREPARING = QUIET.replace(mapped_file_size_commit_log=1 << 16, flush_interval_commit_log=5)


@pytest.fixture
def prepare_small_files(monkeypatch):
    monkeypatch.setattr(upkeep, "_PREPARE_FROM_SIZE", 1000)


def test_the_thread_prepares_the_next_segment_and_index_file(system, tmp_path, prepare_small_files):
    root = tmp_path / "store"
    with MessageStore.open(root, config=PREPARING) as store:
        store.put_message(small())
        first = store.commit_log.files.last().path
        assert not staged(root)
        store.put_message(Message("Orders", bytes(40_000)))
        wait_until(lambda: store.commit_log.files.prepared, "a segment is prepared")
        [name] = staged(root)
        status = os.stat(root / name)
        assert status.st_size == 1 << 16 and allocated(root / name)
        # A roll only gives it its name.
        store.put_message(Message("Orders", bytes(40_000)))
        second = store.commit_log.files.last().path
        assert second != first and os.stat(second).st_ino == status.st_ino
        wait_until(lambda: store.commit_log.files.prepared, "the next one is prepared")
        for number in range(60):
            store.put_message(Message("Orders", b"", keys=[f"k{number}"]))
        wait_until(lambda: store.index_service.prepared, "an index file is prepared")
        [index] = [name for name in staged(root) if os.stat(root / name).st_size == PREPARING.index_file_size]
        inode = os.stat(root / index).st_ino
        for number in range(60):
            store.put_message(Message("Orders", b"", keys=[f"l{number}"]))
        assert len(store.index_service.names) == 2
        assert os.stat(root / "index" / store.index_service.names[1]).st_ino == inode
        for number in range(60):
            assert store.query_message("Orders", f"k{number}") and store.query_message("Orders", f"l{number}")
    assert not staged(root)
    with MessageStore.open(root, config=PREPARING) as store:
        assert store.recovery_report.clean and len(list(store.messages())) == 123


def test_an_index_file_that_is_prepared_while_one_is_made_is_no_rubbish(tmp_path, monkeypatch):
    """The thread is still allocating when the current file is full and a put makes the next one by itself."""
    root = tmp_path / "store"
    threads = Threads()
    store = MessageStore.open(root, config=QUIET)
    store.put_message(small())
    stage, create = MappedFile.stage, IndexFile.create
    made, may_return = threading.Event(), threading.Event()
    outcome: dict = {}

    def slow_stage(directory, size, reserved):
        staged = stage(directory, size, reserved)
        if threading.current_thread() in threads.running:
            made.set()
            assert may_return.wait(PATIENCE)
        return staged

    def create_meanwhile(*args, **options):
        may_return.set()
        threads.join()
        return create(*args, **options)

    monkeypatch.setattr(MappedFile, "stage", slow_stage)
    monkeypatch.setattr(index_service.IndexFile, "create", create_meanwhile)
    outcome = threads.start(store.index_service.prepared.prepare)
    assert made.wait(PATIENCE)
    for number in range(300):
        store.put_message(small(number))
    assert outcome == {"result": None} and len(store.index_service.names) == 4
    store.close()
    assert not staged(root)


def test_what_a_killed_process_prepared_is_deleted(tmp_path, prepare_small_files):
    root = tmp_path / "store"
    with MessageStore.open(root, config=PREPARING) as store:
        store.put_message(Message("Orders", bytes(40_000)))
        wait_until(lambda: store.commit_log.files.prepared, "a segment is prepared")
        shutil.copytree(root, tmp_path / "killed")
    assert staged(tmp_path / "killed")
    MessageStore.open(tmp_path / "killed", config=PREPARING, read_only=True).close()
    assert staged(tmp_path / "killed")
    with MessageStore.open(tmp_path / "killed", config=PREPARING.replace(flush_interval_commit_log=0)) as store:
        assert not staged(tmp_path / "killed")
        assert store.put_message(Message("Orders", bytes(40_000))).queue_offset == 1


def test_a_full_disk_while_preparing_is_only_logged(tmp_path, prepare_small_files, monkeypatch, caplog):
    root = tmp_path / "store"
    real = mapped_file._allocate
    tries = threading.Semaphore(0)

    def no_space(fd: int, begin: int, end: int) -> None:
        tries.release()
        raise OSError(errno.ENOSPC, "No space left on device")

    with MessageStore.open(root, config=PREPARING) as store:
        store.put_message(small())
        monkeypatch.setattr(mapped_file, "_allocate", no_space)
        with caplog.at_level(logging.ERROR, "rmqstore"):
            store.put_message(Message("Orders", bytes(40_000)))
            for _ in range(4):
                assert tries.acquire(timeout=PATIENCE)
        assert [("free space" in record.message, str(root) in record.message) for record in caplog.records] == [
            (True, True)
        ]
        wait_until(lambda: not staged(root), "nothing is left of a try that failed")
        # Puts go on as long as the segment has room, and what does not fit is an error before it is written.
        store.put_message(small(1))
        with pytest.raises(OSError, match="No space left"):
            store.put_message(Message("Orders", bytes(40_000)))
        monkeypatch.setattr(mapped_file, "_allocate", real)
        wait_until(lambda: store.commit_log.files.prepared, "a segment is prepared as soon as there is space")
        assert store.put_message(Message("Orders", bytes(40_000))).queue_offset == 3


def test_small_segments_are_not_prepared(tmp_path):
    with MessageStore.open(tmp_path / "store", config=PREPARING) as store:
        store.put_message(Message("Orders", bytes(60_000)))
        store._upkeep.flush_log()
        assert not staged(tmp_path / "store")


def test_a_task_that_fails_is_tried_again(tmp_path, monkeypatch, caplog):
    calls = threading.Semaphore(0)

    def fail(upkeep: Upkeep) -> None:
        calls.release()
        raise ValueError("the task is broken")

    flushed = threading.Semaphore(0)
    monkeypatch.setattr(Upkeep, "flush_log", fail)
    monkeypatch.setattr(Upkeep, "flush", lambda store: flushed.release())
    config = QUIET.replace(flush_interval_commit_log=2, flush_interval_consume_queue=2)
    with MessageStore.open(tmp_path / "store", config=config) as store:
        for _ in range(3):
            assert calls.acquire(timeout=PATIENCE)
            # The other tasks go on.
            assert flushed.acquire(timeout=PATIENCE)
        # And the store is as it was.
        store.put_message(small())
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert "rmqstore-housekeeping store: flush of the commit log failed: the task is broken" in errors


def test_close_waits_for_the_task_that_runs(tmp_path, monkeypatch, threads):
    """Also the second of two that close: nothing is done to a store whose lock was given back."""
    running, may_end = threading.Event(), threading.Event()
    seen: list[bool] = []

    def slow(upkeep: Upkeep) -> None:
        if not seen:
            running.set()
            assert may_end.wait(PATIENCE)
            seen.append(upkeep.state.closed)

    monkeypatch.setattr(Upkeep, "flush_log", slow)
    store = MessageStore.open(tmp_path / "store", config=QUIET.replace(flush_interval_commit_log=2))
    store.put_message(small())
    assert running.wait(PATIENCE)
    first = threads.start(store.close)
    # The first is on its way, as far as one can tell from outside.
    wait_until(lambda: store._upkeep._housekeeping is None or store._upkeep._housekeeping._stopping.is_set(), "closing began")
    second = threads.start(store.close)
    for thread in threads.running:
        thread.join(0.05)
    assert not first and not second and not store.closed
    may_end.set()
    threads.join()
    assert first == second == {"result": None} and seen == [False]
    assert not (tmp_path / "store" / "abort").exists()


class Owner:
    pass


def test_housekeeping_runs_tasks_when_they_are_due():
    owner, ran, never = Owner(), threading.Semaphore(0), []
    owners: list[object] = []

    def run(each: object) -> None:
        owners.append(each is owner)
        ran.release()

    tasks = [
        Task("often", 1, run),
        Task("switched off", 0, never.append),
        Task("at once, then never again", 3_600_000, lambda each: ran.release(), 0),
        Task("much later", 3_600_000, never.append),
    ]
    keeper = Housekeeping(owner, tasks, "housekeeping of a test")
    assert keeper.alive and keeper._thread.name == "housekeeping of a test"
    for _ in range(5):
        assert ran.acquire(timeout=PATIENCE)
    keeper.stop()
    assert not keeper.alive and not never and all(owners)
    keeper.stop()


def test_housekeeping_stops_between_tasks_and_wakes_who_pauses():
    owner, pausing, after = Owner(), threading.Event(), []
    paused: list[bool] = []
    keeper: list[Housekeeping] = []
    may_begin = threading.Event()

    def pause(each: object) -> None:
        assert may_begin.wait(PATIENCE)
        pausing.set()
        paused.append(keeper[0].pause(3_600_000))

    keeper.append(Housekeeping(owner, [Task("pauses", 1, pause), Task("after", 1, after.append, 3_600_000)], "pausing"))
    may_begin.set()
    assert pausing.wait(PATIENCE)
    keeper[0].stop()
    assert paused == [False] and not after and not keeper[0].alive


def test_a_task_may_close_the_store_itself(tmp_path, monkeypatch):
    closed, is_open = threading.Event(), threading.Event()

    def close(upkeep: Upkeep) -> None:
        assert is_open.wait(PATIENCE)
        store.close()
        closed.set()

    monkeypatch.setattr(Upkeep, "flush_log", close)
    store = MessageStore.open(tmp_path / "store", config=QUIET.replace(flush_interval_commit_log=2))
    thread = store._upkeep._housekeeping._thread
    is_open.set()
    assert closed.wait(PATIENCE) and store.closed
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_stores_of_java_take_part(golden_copy, disk):
    """A store that a real broker wrote: what is put is forced, and the checkpoint is not ahead."""
    root = golden_copy("broker")
    config = StoreConfig.infer(root).replace(
        flush_disk_type="SYNC_FLUSH", flush_interval_commit_log=0, flush_interval_consume_queue=0
    )
    assert config.mapped_file_size_commit_log == golden.geometry("broker")["mapped_file_size_commit_log"]
    with MessageStore.open(root, config=config) as store:
        for number in range(3):
            assert disk.has_record(store, store.put_message(small(number)))
