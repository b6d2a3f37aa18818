"""Ctrl-C: an interrupt at any place of a call leaves a store that goes on, or says that it does not, and loses nothing.

Python asks for signals only after a call, at the begin of a function and where a loop goes back.  A tracer raises
KeyboardInterrupt at each of these places in turn, which is what a signal would do there, and nowhere else: between taking a lock
and the first step within it no signal comes.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import sys
import threading
import time

import pyarrow as pa
import pytest

import rmqstore
from rmqstore import Message, MessageStore, StoreConfig, StoreLockedError, StorePoisonedError
from rmqstore.errors import StoreClosedError

CONFIG = StoreConfig(
    mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=400, max_hash_slot_num=64, max_index_num=40
)
SYNC = CONFIG.replace(flush_disk_type="SYNC_FLUSH")
#: After these an interpreter looks for signals.
ASKED = {
    code
    for name, code in dis.opmap.items()
    if name.startswith("CALL") or name in ("RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
}
TABLE = pa.table({"topic": ["T", "U"] * 6, "body": [b"x" * 50] * 12, "keys": [[f"a{i}"] for i in range(12)]})


class Interrupt:
    """Raises KeyboardInterrupt at the place of this number in rmqstore's own code; `count` places went by."""

    def __init__(self, number: int):
        self.number, self.count, self.place = number, 0, None
        #: It came while an object was being cleared away, where Python prints it and goes on.
        self.lost = False
        self.before = {}

    def trace(self, frame, event, argument):
        if "/rmqstore/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "return":
            self.before.pop(frame, None)
        elif event == "opcode":
            before = self.before.get(frame)
            self.before[frame] = frame.f_lasti
            if before is not None and frame.f_code.co_code[before] in ASKED:
                self.count += 1
                if self.count == self.number:
                    self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                    self.end()
                    raise KeyboardInterrupt
        return self.trace

    def end(self):
        sys.settrace(None)
        self.before.clear()

    def note(self, unraisable):
        if unraisable.exc_type is KeyboardInterrupt:
            self.lost = True
        else:
            self.hook(unraisable)

    def __enter__(self):
        self.hook, sys.unraisablehook = sys.unraisablehook, self.note
        sys.settrace(self.trace)
        return self

    def __exit__(self, *exc_info):
        self.end()
        sys.unraisablehook = self.hook




#: What is interrupted: takes the store, gives what was put.
CALLS = {
    "put_message": lambda store: [store.put_message(Message("T", b"b" * 40, keys="k"))],
    "put_message the long way": lambda store: [
        store.put_message(Message("T", b"b" * 40, keys="k", properties={"A": "1", "UNIQ_KEY": "u"}))
    ],
    "put_message of a new topic": lambda store: [store.put_message(Message("New", b"b" * 40, keys="k"))],
    "put_messages": lambda store: store.put_messages([Message("T", b"m" * 30, keys=f"k{i}") for i in range(6)]),
    "put_message_batch": lambda store: store.put_message_batch([Message("T", b"m" * 30, keys=f"k{i}") for i in range(3)]),
    "put_table": lambda store: [(phy_offset,) for phy_offset in store.put_table(TABLE).phy_offset.tolist()],
    "flush": lambda store: store.flush() or [],
    "delete_expired_files": lambda store: store.delete_expired_files() and [],
    "close": lambda store: store.close() or [],
}


def filled(path, config):
    store = MessageStore.open(path, config=config)
    puts = store.put_messages([Message("T", b"b" * 40, keys=f"k{i}") for i in range(29)])
    return store, [put[0] for put in [*puts, store.put_message(Message("T", b"b" * 40, keys="k29"))]]


def goes_on(store, acknowledged, closing):
    """Put more, or be told that this store takes no more; then close it."""
    with contextlib.suppress(StorePoisonedError, *([StoreClosedError] if closing else [])):
        for _ in range(2):
            acknowledged.append(store.put_message(Message("T", b"after", keys="after"))[0])
            acknowledged.append(store.put_message(Message("V", b"after", keys="after", properties={"A": "1"}))[0])
        store.flush()
    store.close()


def check(path, config, acknowledged):
    """The store can be opened again in this process, has what was acknowledged, and nothing is wrong with it."""
    with MessageStore.open(path, config=config) as store:
        acknowledged.append(store.put_message(Message("T", b"again", keys="again"))[0])
    with MessageStore.open(path, read_only=True, config=config) as store:
        there = {message.phy_offset for message in store.messages()}
        for topic, queue_id in [(topic, 0) for topic in store.topics()]:
            offset, queued = store.min_queue_offset(topic, queue_id), set()
            while offset < store.max_queue_offset(topic, queue_id):
                result = store.get_message(topic, queue_id, offset)
                queued |= {message.phy_offset for message in result.messages}
                assert result.next_queue_offset > offset
                offset = result.next_queue_offset
            there -= queued
        assert not there, "messages that are in no queue"
        assert set(acknowledged) <= {message.phy_offset for message in store.messages()}
    assert list(rmqstore.verify(path, config)) == []


def interrupted_call(path, config, name, number):
    """One life with the interrupt of this number; how many places the call has if that is more than it has."""
    store, acknowledged = filled(path, config)
    ended = True
    with Interrupt(number) as interrupt:
        try:
            acknowledged += [put[0] for put in CALLS[name](store)]
        except KeyboardInterrupt:
            ended = False
    assert ended == (interrupt.place is None or interrupt.lost), f"{interrupt.place}: the interrupt was swallowed"
    try:
        goes_on(store, acknowledged, name == "close")
        check(path, config, acknowledged)
    except Exception as error:
        raise AssertionError(f"interrupted at {interrupt.place}") from error
    return interrupt.count


def interrupted_opening(path, config, how, number):
    acknowledged = []
    if how != "new":
        store, acknowledged = filled(path, config)
        store.close()
        if how == "not closed in order":
            (path / "abort").write_text("1", encoding="ascii")
    store, ended = None, True
    with Interrupt(number) as interrupt:
        try:
            store = MessageStore.open(path, config=config)
        except KeyboardInterrupt:
            ended = False
    assert ended == (interrupt.place is None or interrupt.lost), f"{interrupt.place}: the interrupt was swallowed"
    try:
        if store is not None:
            goes_on(store, acknowledged, False)
        check(path, config, acknowledged)
    except Exception as error:
        raise AssertionError(f"interrupted at {interrupt.place}") from error
    return interrupt.count


def at_places(tmp_path, places, live):
    """`live(path, number)` at so many places, all of them where 0, spread evenly over what a life without an interrupt has."""
    count = live(tmp_path / "whole", 0)
    for number in range(1, count + 1, max(1, count // places) if places else 1):
        live(tmp_path / f"at {number}", number)
    return count


def is_compiled(name):
    """Return True if the call has no place for a signal: on Python 3.15 a plain put is one compiled call."""
    return name == "put_message" and sys.version_info >= (3, 15)


def threads_of_stores():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rmqstore-")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    until = time.monotonic() + 240
    while threads_of_stores():
        assert time.monotonic() < until, threads_of_stores()
        time.sleep(0.01)


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_call_loses_nothing(tmp_path, name):
    count = at_places(tmp_path, 8, lambda path, number: interrupted_call(path, CONFIG, name, number))
    assert count or is_compiled(name)


@pytest.mark.parametrize("name", ["put_message", "put_messages"])
def test_an_interrupted_wait_for_the_disk_keeps_nobody_waiting(tmp_path, name):
    assert at_places(tmp_path, 8, lambda path, number: interrupted_call(path, SYNC, name, number))


@pytest.mark.parametrize("how", ["new", "closed", "not closed in order"])
def test_an_interrupted_opening_leaves_a_store_that_can_be_opened(tmp_path, how):
    assert at_places(tmp_path, 8, lambda path, number: interrupted_opening(path, CONFIG, how, number))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_interrupted_at_every_place_loses_nothing(tmp_path, name):
    count = at_places(tmp_path, 0, lambda path, number: interrupted_call(path, CONFIG, name, number))
    assert count or is_compiled(name)


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("how", ["new", "closed", "not closed in order"])
def test_an_opening_interrupted_at_many_places_can_be_done_again(tmp_path, how, part):
    assert at_places(tmp_path, 100, lambda path, number: interrupted_opening(path, CONFIG, how, number and number + part))


def test_a_close_that_was_interrupted_is_finished_by_the_next(tmp_path, monkeypatch):
    store, _ = filled(tmp_path, CONFIG)
    monkeypatch.setattr(store.commit_log, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.close()
    monkeypatch.undo()
    store.close()
    with MessageStore.open(tmp_path) as again:
        assert again.put_message(Message("T", b"again")).queue_offset == 30


def test_what_an_interrupt_stopped_says_so(tmp_path, monkeypatch):
    store, _ = filled(tmp_path, CONFIG)
    monkeypatch.setattr(store._writing.dispatcher, "dispatch_columns", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.put_messages([Message("T", b"1"), Message("T", b"2")])
    with pytest.raises(StorePoisonedError, match="an earlier write was interrupted; close the store and open it again"):
        store.put_message(Message("T", b"3"))
    with pytest.raises(StoreLockedError):
        MessageStore.open(tmp_path)
    store.close()
    with MessageStore.open(tmp_path) as again:
        assert again.max_queue_offset("T") == 32


def interrupted(*arguments, **options):
    raise KeyboardInterrupt
