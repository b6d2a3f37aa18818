"""Lifetime test: a store may be closed at any moment, from anywhere, and nothing reads memory that is gone.

Owns the proof of I1 to I3: closing under a running iterator, in a finalizer, from another thread and by mere garbage
collection; views that outlive the store; no descriptors, maps or threads left behind; and a forked child that ends
without harm to its parent's store.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import weakref
from collections import OrderedDict

import pytest
from mappings import mappings
from scratch import SCRATCH

from rmqstore import (
    IndexFile,
    Message,
    MessageStore,
    ReadOnlyError,
    StoreClosedError,
    StoreConfig,
    StoreError,
    StoreLockedError,
)

CONFIG = StoreConfig(
    mapped_file_size_commit_log=4096,
    mapped_file_size_consume_queue=200,
    max_hash_slot_num=10,
    max_index_num=20,
)


@pytest.fixture
def root():
    scratch = tempfile.mkdtemp(prefix="rmqstore-lifetime-", dir=SCRATCH)
    yield os.path.join(scratch, "store")
    shutil.rmtree(scratch, ignore_errors=True)


def filled(root: str, number: int = 60) -> MessageStore:
    store = MessageStore.open(root, config=CONFIG)
    store.put_messages([Message("Orders", b"body %d" % n, keys=["same", f"k{n}"], tags="T") for n in range(number)])
    return store


def maps_of(root: str) -> int:
    """How many mappings of files below `root` this process has."""
    return len(mappings(root))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --------------------------------------------------------------------------------------------- close under a reader


def iterators(store: MessageStore) -> dict:
    return {
        "messages": store.messages(),
        "entries": store.commit_log.entries(),
        "files": store.index_service.files(),
        "read": store.queues.find("Orders", 0).read(0, 10),
    }


@pytest.mark.parametrize("name", ["messages", "entries", "files", "read"])
@pytest.mark.parametrize("read_only", [False, True])
def test_close_under_a_running_iterator(root, name, read_only):
    store = filled(root)
    if read_only:
        store.close()
        store = MessageStore.open(root, config=CONFIG, read_only=True)
    iterator = iterators(store)[name]
    taken = [next(iterator) for _ in range(3)]
    store.close()
    # Messages that were taken stay whole, and the iterator ends by an error or with what it had read ahead.
    if name == "messages":
        assert [message.body for message in taken] == [b"body 0", b"body 1", b"body 2"]
    try:
        rest = [each for each, _ in zip(iterator, range(1000), strict=False)]
    except StoreClosedError:
        rest = []
    assert len(rest) < 1000


def test_close_inside_the_loop(root):
    store = filled(root)
    with pytest.raises(StoreClosedError):
        for number, message in enumerate(store.messages()):
            if number == 5:
                store.close()
            last = message
    assert last.body == b"body 5"


OPERATIONS = {
    "put_message": lambda store: store.put_message(Message("Orders", b"x")),
    "put_messages": lambda store: store.put_messages([Message("Orders", b"x")]),
    "put_message_batch": lambda store: store.put_message_batch([Message("Orders", b"x")]),
    "get_message": lambda store: store.get_message("Orders", 0, 0),
    "query_message": lambda store: store.query_message("Orders", "same"),
    "query_message_compat": lambda store: store.query_message("Orders", "same", compat=True),
    "query_offsets": lambda store: store.query_offsets("Orders", "same"),
    "message_at": lambda store: store.message_at(0),
    "message_by_id": lambda store: store.message_by_id("7F00000100002A9F0000000000000000"),
    "offset_by_time": lambda store: store.offset_by_time("Orders", 0, 0),
    "messages": lambda store: next(store.messages()),
    "topics": lambda store: store.topics(),
    "queue_ids": lambda store: store.queue_ids("Orders"),
    "min_queue_offset": lambda store: store.min_queue_offset("Orders"),
    "max_queue_offset": lambda store: store.max_queue_offset("Orders"),
    "flush": lambda store: store.flush(),
    "refresh": lambda store: store.refresh(),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("read_only", [False, True])
def test_everything_after_close_is_refused(root, name, read_only):
    store = filled(root)
    store.close()
    if read_only:
        store = MessageStore.open(root, config=CONFIG, read_only=True)
    store.close()
    store.close()
    assert store.closed
    with pytest.raises(StoreClosedError) as refused:
        OPERATIONS[name](store)
    assert root in str(refused.value)


def test_parts_after_close_are_refused(root):
    store = filled(root)
    segment = store.commit_log.files.file(0)
    index = next(store.index_service.files())
    queue = store.queues.find("Orders", 0)
    region = segment.region
    store.close()
    for use in (
        lambda: segment.region,
        lambda: segment.hold(),
        lambda: region.get_i64(0),
        lambda: index.put_key("Orders#x", 1, 2),
        lambda: index.select_phy_offset("Orders#same"),
        lambda: index.header,
        lambda: queue.unit(0),
        lambda: list(queue.read(0, 10)),
        lambda: store.commit_log.message_at(0),
    ):
        with pytest.raises(StoreError):
            use()


def test_puts_through_a_read_only_store_are_refused(root):
    filled(root).close()
    with MessageStore.open(root, config=CONFIG, read_only=True) as store:
        for name in ("put_message", "put_messages", "put_message_batch", "flush"):
            with pytest.raises(ReadOnlyError):
                OPERATIONS[name](store)
        with pytest.raises(ReadOnlyError):
            next(store.index_service.files()).put_key("Orders#x", 1, 2)


# ------------------------------------------------------------------------------------------------ finalizers, garbage


class ClosesInItsFinalizer:
    """Garbage that closes a store, at whatever allocation the collector runs."""

    def __init__(self, store):
        self.store = store
        self.itself = self

    def __del__(self):
        self.store.close()


@pytest.mark.parametrize("name", ["put_messages", "get_message", "query_message", "messages"])
def test_close_in_a_finalizer(root, name, request):
    # With a threshold of 1 the collector runs inside nearly every allocation of the call.
    operation = {
        "put_messages": lambda store: store.put_messages([Message("Orders", b"x" * 50, keys=["k"])] * 20),
        "get_message": lambda store: store.get_message("Orders", 0, 0).messages[0].properties,
        "query_message": lambda store: store.query_message("Orders", "same"),
        "messages": lambda store: [message.body for message in store.messages()],
    }[name]
    before = gc.get_threshold()
    request.addfinalizer(gc.unfreeze)
    gc.collect()
    for delay in range(0, 400, 29):
        # Existing objects are frozen, as the collector would scan all of them at every allocation.
        gc.freeze()
        shutil.rmtree(root, ignore_errors=True)
        store = filled(root, 20)
        gc.collect()
        gc.freeze()
        garbage = ClosesInItsFinalizer(store)
        gc.set_threshold(delay + 1, 1, 1)
        try:
            del garbage
            for _ in range(10):
                operation(store)
        except StoreError as error:
            assert store.closed, error
        finally:
            gc.set_threshold(*before)
            gc.collect()
        assert store.closed
        # Whatever was acknowledged or not: what is there is whole.
        with MessageStore.open(root, config=CONFIG) as store:
            offsets = [message.queue_offset for message in store.messages()]
            assert offsets == list(range(len(offsets)))
            assert len(offsets) >= 20


class ClosesWhenAsked(OrderedDict):
    """The files that an index service has open; the first question closes the store, as a finalizer may."""

    closes = None

    def get(self, *arguments):
        found, closes = super().get(*arguments), self.closes
        self.closes = None
        if closes is not None:
            closes()
        return found


@pytest.mark.parametrize("is_open", [True, False], ids=["open already", "not open yet"])
def test_a_close_within_the_lookup_of_an_index_file(root, is_open):
    store = filled(root, 20)
    service = store.index_service
    service._recent, service._open = None, ClosesWhenAsked(service._open if is_open else {})
    service._open.closes = store.close
    with pytest.raises(StoreClosedError, match="open it again"):
        service.file(service.names[-1])
    assert store.closed
    assert service._open == {}


def test_garbage_without_close(root):
    filled(root).close()
    maps, opened = maps_of(root), descriptors()
    for read_only in (True, False, True):
        store = MessageStore.open(root, config=CONFIG, read_only=read_only)
        list(store.messages())
        store.query_message("Orders", "same")
        gone = weakref.ref(store)
        thread = None if read_only else store._upkeep._housekeeping._thread
        with contextlib.nullcontext() if read_only else pytest.warns(ResourceWarning, match="forgotten"):
            del store
            gc.collect()
        assert gone() is None
        if thread is not None:
            # A writer is closed by its own thread.
            thread.join(240)
            assert not thread.is_alive()
            del thread
        assert maps_of(root) == maps == 0
        assert descriptors() == opened


def test_a_writer_that_was_only_forgotten_can_be_opened_again(root):
    # Its own thread closes it in order, and the next opening waits for that.
    for cycle in (False, True):
        store = filled(root, 30)
        store.itself = store if cycle else None
        with pytest.warns(ResourceWarning, match="forgotten"):
            del store
            gc.collect()
        with MessageStore.open(root, config=CONFIG) as store:
            assert store.recovery_report.clean
    with MessageStore.open(root, config=CONFIG) as store:
        assert len(list(store.messages())) == 60


# ------------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("name", ["put_message", "get_message", "query_message", "messages", "mixed"])
def test_close_from_another_thread(root, name):
    wanted = ["put_message", "get_message", "query_message", "messages"] if name == "mixed" else [name] * 2
    for round_number in range(12):
        shutil.rmtree(root, ignore_errors=True)
        store = filled(root)
        failures: list[BaseException] = []
        acknowledged: list[int] = []
        started = threading.Barrier(len(wanted) + 1)

        def work(name, store=store, failures=failures, acknowledged=acknowledged, started=started):
            started.wait()
            try:
                for _ in range(1_000_000):
                    if name == "put_message":
                        acknowledged.append(store.put_message(Message("Orders", b"y" * 30, keys=["k"])).phy_offset)
                    elif name == "messages":
                        assert all(message.body for message in store.messages())
                    else:
                        OPERATIONS[name](store)
            except StoreClosedError:
                pass
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(each,)) for each in wanted]
        for thread in threads:
            thread.start()
        started.wait()
        time.sleep(0.002 * round_number)
        store.close()
        for thread in threads:
            thread.join(240)
            assert not thread.is_alive()
        assert not failures
        with MessageStore.open(root, config=CONFIG) as store:
            assert store.recovery_report.clean
            assert set(acknowledged) <= {message.phy_offset for message in store.messages()}


# --------------------------------------------------------------------------------------------------- views and maps


@pytest.mark.parametrize("read_only", [False, True])
def test_views_outlive_the_store(root, read_only):
    store = filled(root)
    store.close()
    with open(os.path.join(root, "commitlog", "0" * 20), "rb") as file:
        expected = file.read()
    store = MessageStore.open(root, config=CONFIG, read_only=read_only)
    view = store.commit_log.files.file(0).hold()
    part = store.commit_log.files.file(0).hold(8, 100)
    assert view.readonly
    store.close()
    del store
    gc.collect()
    assert bytes(view) == expected
    assert bytes(part) == expected[8:108]
    assert maps_of(root) == 1
    view.release()
    assert bytes(part) == expected[8:108]
    part.release()
    gc.collect()
    assert maps_of(root) == 0


def test_views_outlive_the_file(root):
    with filled(root) as store:
        expected = bytes(store.commit_log.files.file(0).hold())
        view = store.commit_log.files.file(0).hold()
    shutil.rmtree(root)
    assert bytes(view) == expected


def test_a_slice_of_a_view_keeps_the_map(root):
    store = filled(root)
    part = store.commit_log.files.file(0).hold()[4:8]
    store.close()
    del store
    gc.collect()
    assert part.hex() == "daa320a7"
    del part
    gc.collect()
    assert maps_of(root) == 0


def test_the_pool_bounds_what_is_mapped(root):
    config = CONFIG.replace(max_mapped_files=4)
    with MessageStore.open(root, config=config) as store:
        for n in range(400):
            store.put_message(Message("Orders", b"%d" % n * 20, keys=[f"k{n}"]))
        assert len(os.listdir(os.path.join(root, "commitlog"))) > 8
        assert len(os.listdir(os.path.join(root, "consumequeue", "Orders", "0"))) > 20
        assert len(os.listdir(os.path.join(root, "index"))) > 15
        # The newest file of the log and of the queue stay mapped besides.
        assert len(store._state.pool) <= 4 + 2
        # The index has a bound of its own.
        assert maps_of(root) <= 4 + 2 + 4 + 1
        for n in range(0, 400, 37):
            assert store.get_message("Orders", 0, n, 1).messages[0].body == b"%d" % n * 20
            assert len(store.query_message("Orders", f"k{n}")) == 1
            assert maps_of(root) <= 4 + 2 + 4 + 1
    assert maps_of(root) == 0


def test_a_region_that_is_worked_with_is_not_evicted(root):
    config = CONFIG.replace(max_mapped_files=1)
    with MessageStore.open(root, config=config) as store:
        store.put_messages([Message("Orders", b"%d" % n * 30) for n in range(200)])
        region = store.commit_log.files.file(0).region
        first = region.get_i64(0)
        list(store.messages())
        assert region.get_i64(0) == first


def test_many_cycles_leak_nothing(root):
    filled(root).close()

    def cycle(read_only):
        with MessageStore.open(root, config=CONFIG, read_only=read_only) as store:
            list(store.messages())
            store.get_message("Orders", 0, 3)
            store.query_message("Orders", "k3")
            if not read_only:
                store.put_message(Message("Orders", b"more", keys=["m"]))

    for _ in range(5):
        cycle(True)
        cycle(False)
    gc.collect()
    before = descriptors(), threading.active_count(), maps_of(root)
    for number in range(150):
        cycle(number % 3 != 0)
    gc.collect()
    assert (descriptors(), threading.active_count(), maps_of(root)) == before
    assert before[2] == 0


def test_refused_openings_leak_nothing(root):
    filled(root).close()
    before = None
    for number in range(60):
        with pytest.raises(StoreError):
            MessageStore.open(root, config=CONFIG.replace(mapped_file_size_commit_log=8192))
        with pytest.raises(StoreError):
            MessageStore.open(root, config=CONFIG.replace(max_index_num=21), read_only=True)
        with MessageStore.open(root, config=CONFIG), pytest.raises(StoreLockedError):
            MessageStore.open(root, config=CONFIG)
        if number == 5:
            gc.collect()
            before = descriptors(), maps_of(root)
    gc.collect()
    assert (descriptors(), maps_of(root)) == before


def test_index_file_on_its_own(root):
    os.makedirs(root)
    path = os.path.join(root, "20231114221320000")
    with IndexFile.create(path, CONFIG) as index:
        assert index.put_key("Orders#k", 100, 1_700_000_000_000)
        region = index.region
    with pytest.raises(StoreClosedError):
        index.put_key("Orders#k", 200, 1_700_000_000_000)
    with pytest.raises(StoreClosedError):
        region.get_i64(0)
    assert maps_of(root) == 0
    index = IndexFile.open(path, CONFIG, read_only=True)
    assert index.select_phy_offset("Orders#k") == [100]
    del index, region
    gc.collect()
    assert maps_of(root) == 0


# ---------------------------------------------------------------------------------------------------------- fork


def test_a_forked_child_does_not_harm_the_store(root):
    store = filled(root)
    before = store.put_message(Message("Orders", b"before", keys=["before"]))
    for way in ("_exit", "close", "garbage", "kill"):
        child = os.fork()
        if not child:
            try:
                if way == "close":
                    # A child may clean up what it inherited; the parent still works.
                    store.close()
                elif way == "garbage":
                    del store
                    gc.collect()
                elif way == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        put = store.put_message(Message("Orders", way.encode(), keys=[way]))
        assert store.message_at(put.phy_offset).body == way.encode()
        assert [hit.body for hit in store.query_message("Orders", way)] == [way.encode()]
        assert store.message_at(before.phy_offset).body == b"before"
        # The lock is still the parent's.
        assert is_locked(root)
    assert os.path.exists(os.path.join(root, "abort"))
    store.close()
    with MessageStore.open(root, config=CONFIG) as store:
        assert store.recovery_report.clean
        assert len(list(store.messages())) == 60 + 1 + 4


def is_locked(root: str) -> bool:
    """Return True if another process finds the store locked."""
    program = textwrap.dedent(
        """
        import sys
        from rmqstore import MessageStore, StoreLockedError
        try:
            MessageStore.open(sys.argv[1]).close()
        except StoreLockedError:
            sys.exit(7)
        """
    )
    return subprocess.run([sys.executable, "-c", program, root], timeout=240, check=False).returncode == 7
