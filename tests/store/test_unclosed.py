"""Stores that are not closed: the warning, the orderly close when a program ends, and paths without a store.

Owns programs that end in every way with stores open, forgotten stores, forked children, ``create=False``, and classes
that say how they are opened.  That nothing of a forgotten store stays in memory is `test_lifetime`'s.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import warnings

import pytest

from rmqstore import IndexFile, Message, MessageStore, StoreConfig, StoreError
from rmqstore import rabbitmq as rabbit
from rmqstore.store.upkeep import Upkeep

CONFIG = StoreConfig(
    mapped_file_size_commit_log=4096,
    mapped_file_size_consume_queue=200,
    max_hash_slot_num=10,
    max_index_num=20,
)
HEAD = """
import atexit
closing = []
# Handlers that were registered before the import run after the stores were closed.
atexit.register(lambda: closing and print(closing))
import gc, os, sys, threading, time
from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.rabbitmq import Message as QueueMessage, MessageStore as QueueStore, QueueIndex
config = StoreConfig(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200, max_hash_slot_num=10,
                     max_index_num=20)
root = sys.argv[1]
def opened(name="store"):
    store = MessageStore.open(os.path.join(root, name), config=config)
    store.put_message(Message("Orders", b"first", keys=["k"]))
    store.consumer_offsets.commit("group", "Orders", 0, 1)
    return store
"""


def run(root: os.PathLike[str], program: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", HEAD + textwrap.dedent(program), os.fspath(root)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def bodies_of_a_closed_store(path: str) -> list[bytes]:
    """The bodies in a store, which must have been closed in order, consumer progress included."""
    assert not os.path.exists(os.path.join(path, "abort"))
    with MessageStore.open(path, config=CONFIG) as store:
        assert store.recovery_report.clean
        assert store.consumer_offsets.get("group", "Orders", 0) == 1
        return [message.body for message in store.messages()]


ENDS = {
    "end": ("store = opened()", 0),
    "exit": ("store = opened()\nsys.exit(7)", 7),
    "exception": ("store = opened()\nraise RuntimeError('the program failed')", 1),
    "in a function": ("def work():\n    store = opened()\nwork()", 0),
    "in a function that exits": ("def work():\n    store = opened()\n    sys.exit(7)\nwork()", 7),
    "without timers": ("config = config.replace(flush_interval_commit_log=0, flush_interval_consume_queue=0,\n"
                       "    flush_consumer_offset_interval=0, clean_resource_interval=0)\nopened()", 0),
    "garbage in a cycle": ("gc.disable()\nstore = opened()\nstore.itself = store\ndel store", 0),
    "a generator that is not at its end": ("store = opened()\nmessages = store.messages()\nnext(messages)", 0),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_open_store_is_closed_when_the_program_ends(tmp_path, name):
    program, code = ENDS[name]
    done = run(tmp_path, program, "-W", "always::ResourceWarning")
    assert done.returncode == code, done.stderr
    path = str(tmp_path / "store")
    (warning,) = [line for line in done.stderr.splitlines() if "ResourceWarning: unclosed" in line]
    assert f"MessageStore({path!r}, open)" in warning
    assert bodies_of_a_closed_store(path) == [b"first"]


def test_without_the_warning_nothing_is_said(tmp_path):
    done = run(tmp_path, "store = opened()")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = run(tmp_path, "with opened():\n    pass", "-X", "dev")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = run(tmp_path, "store = MessageStore.open(root + '/store', read_only=True)", "-X", "dev")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_warning_that_is_an_error_closes_all_the_same(tmp_path):
    done = run(tmp_path, "store = opened()", "-W", "error::ResourceWarning")
    assert done.returncode == 0 and "Traceback" not in done.stderr and "unclosed MessageStore" in done.stderr
    assert bodies_of_a_closed_store(str(tmp_path / "store")) == [b"first"]


def test_threads_and_functions_that_still_use_it_come_first(tmp_path):
    # A thread that is no daemon is waited for, and what the program registered itself runs before the stores are
    # closed.
    done = run(
        tmp_path,
        """
        store = opened()
        def late():
            time.sleep(0.3)
            store.put_message(Message("Orders", b"by a thread"))
        threading.Thread(target=late).start()
        atexit.register(lambda: store.put_message(Message("Orders", b"at exit")))
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert bodies_of_a_closed_store(str(tmp_path / "store")) == [b"first", b"by a thread", b"at exit"]


def test_a_daemon_thread_that_goes_on_meets_a_closed_store(tmp_path):
    done = run(
        tmp_path,
        """
        store = opened()
        started = threading.Event()
        def forever():
            while True:
                try:
                    store.put_message(Message("Orders", b"more"))
                except Exception as error:
                    print(type(error).__name__, flush=True)
                    time.sleep(60)
                started.set()
        threading.Thread(target=forever, daemon=True).start()
        started.wait()
        """,
    )
    assert done.returncode == 0 and done.stdout in ("", "StoreClosedError\n") and done.stderr == ""
    bodies = bodies_of_a_closed_store(str(tmp_path / "store"))
    assert bodies[0] == b"first" and set(bodies[1:]) == {b"more"}


def test_all_are_closed_the_newest_first_though_one_fails(tmp_path):
    done = run(
        tmp_path,
        """
        first, second, third = opened("first"), opened("second"), opened("third")
        for store in (first, second, third):
            store.close = lambda store=store, close=store.close: (closing.append(os.path.basename(store.path)), close())
        second.close = lambda: (closing.append("second"), 1 / 0)
        """,
    )
    assert done.returncode == 0 and done.stdout == "['third', 'second', 'first']\n", done.stderr
    assert "second" in done.stderr and "could not be closed" in done.stderr and "Traceback" not in done.stderr
    for name in ("first", "third"):
        assert bodies_of_a_closed_store(str(tmp_path / name)) == [b"first"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_closes_nothing_and_warns_of_nothing(tmp_path):
    done = run(
        tmp_path,
        """
        import warnings
        # Python 3.12 and later warn of any fork beside a thread, which is not what this asks about.
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        store = opened()
        child = os.fork()
        if not child:
            sys.exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        child = os.fork()
        if not child:
            del store
            gc.collect()
            sys.exit(6)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
        assert os.path.exists(os.path.join(root, "store", "abort"))
        store.put_message(Message("Orders", b"after"))
        store.close()
        """,
        "-W",
        "always::ResourceWarning",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert bodies_of_a_closed_store(str(tmp_path / "store")) == [b"first", b"after"]


def test_a_forgotten_store_is_named(tmp_path):
    path = str(tmp_path / "store")
    store = MessageStore.open(path, config=CONFIG)
    with pytest.warns(ResourceWarning) as told:
        del store
        gc.collect()
    assert [f"MessageStore({path!r}, open)" in str(each.message) for each in told] == [True]
    # Its own thread closes it, and whoever opens it again waits for that.
    with MessageStore.open(path, config=CONFIG) as store:
        assert store.recovery_report.clean


def test_a_finalizer_waits_for_nothing(tmp_path, monkeypatch):
    # The collector may find a store on a thread that holds any lock, while its own thread waits for the same one.
    path = str(tmp_path / "store")
    busy, may_end = threading.Event(), threading.Event()

    def flush(upkeep: Upkeep) -> None:
        busy.set()
        assert may_end.wait(240)

    monkeypatch.setattr(Upkeep, "flush_log", flush)
    store = MessageStore.open(path, config=CONFIG.replace(flush_interval_commit_log=1))
    store.put_message(Message("Orders", b"paid"))
    thread = store._upkeep._housekeeping._thread
    assert busy.wait(240)
    with pytest.warns(ResourceWarning, match="forgotten"):
        del store
        gc.collect()
    assert thread.is_alive() and os.path.exists(os.path.join(path, "abort"))
    may_end.set()
    thread.join(240)
    assert not thread.is_alive() and not os.path.exists(os.path.join(path, "abort"))


def test_a_forgotten_store_that_cannot_be_closed_is_logged(tmp_path, monkeypatch, caplog):
    path = str(tmp_path / "store")
    store = MessageStore.open(path, config=CONFIG)
    thread = store._upkeep._housekeeping._thread

    def persist() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store._state.progress, "persist", persist)
    with pytest.warns(ResourceWarning, match="forgotten"):
        del store
        gc.collect()
    thread.join(240)
    assert f"{path} was forgotten, and could not be closed in order: " in caplog.text and "No space left" in caplog.text
    # It is closed anyway, and another process can open it.
    with MessageStore.open(path, config=CONFIG) as store:
        assert not store.recovery_report.clean


def test_what_was_closed_or_only_read_or_not_opened_is_not_warned_of(tmp_path):
    path = str(tmp_path / "store")
    with MessageStore.open(path, config=CONFIG) as store:
        store.put_message(Message("Orders", b"paid"))
    gc.collect()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        MessageStore.open(path, config=CONFIG).close()
        MessageStore.open(path, config=CONFIG, read_only=True)
        with pytest.raises(StoreError):
            MessageStore.open(path, config=CONFIG.replace(mapped_file_size_commit_log=8192))
        with pytest.raises(TypeError):
            MessageStore(path)
        gc.collect()
    assert told == []


def test_a_queue_index_and_a_message_store_of_rabbitmq(tmp_path):
    done = run(
        tmp_path,
        """
        index = QueueIndex.open(os.path.join(root, "queue"), segment_entry_count=2048, create=True)
        index.publish_many([QueueMessage(b"paid", routing_keys=["orders"])], deliver=True)
        store = QueueStore.open(os.path.join(root, "messages"))
        store.write(b"0123456789abcdef", QueueMessage(b"shared", msg_id=b"0123456789abcdef").term)
        """,
        "-W",
        "always::ResourceWarning",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ResourceWarning: unclosed") == 2
    assert str(tmp_path / "queue") in done.stderr and str(tmp_path / "messages") in done.stderr
    # Unforced bytes would be lost.
    with rabbit.QueueIndex.open(tmp_path / "queue", segment_entry_count=2048, read_only=True) as index:
        assert [rabbit.Message.from_term(entry.message).body for entry in index] == [b"paid"]
    for forgotten in (
        lambda: rabbit.QueueIndex.open(tmp_path / "queue", segment_entry_count=2048),
        lambda: rabbit.MessageStore.open(tmp_path / "messages"),
    ):
        with pytest.warns(ResourceWarning, match="unclosed"):
            forgotten()
            gc.collect()


# ------------------------------------------------------------------------------------------------ paths without a store


def test_create_false_makes_nothing(tmp_path):
    for path in (tmp_path / "ordres", tmp_path / "folder", tmp_path / "file"):
        if path.name == "folder":
            path.mkdir()
        elif path.name == "file":
            path.touch()
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(StoreError, match="the folder that holds commitlog/") as refused:
            MessageStore.open(path, create=False)
        assert refused.value.path == str(path)
        assert sorted(tmp_path.rglob("*")) == before
    with MessageStore.open(tmp_path / "orders", config=CONFIG):
        pass
    # An empty store is one.
    with MessageStore.open(tmp_path / "orders", config=CONFIG, create=False) as store:
        store.put_message(Message("Orders", b"paid"))
    with MessageStore.open(tmp_path / "orders", config=CONFIG, create=False) as store:
        assert [message.body for message in store.messages()] == [b"paid"]


@pytest.mark.parametrize(
    "kind",
    [MessageStore, IndexFile, rabbit.Vhost, rabbit.QueueIndex, rabbit.QueueIndexV2, rabbit.MessageStore],
)
def test_a_class_that_is_opened_says_so(kind):
    for arguments, options in (((), {}), (("m",), {}), (("m", 2), {"read_only": True})):
        with pytest.raises(TypeError, match=rf"use {kind.__name__}\.open\(path\)"):
            kind(*arguments, **options)
