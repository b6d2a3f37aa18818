"""A mapped file that another process cuts short: an operation raises an error that names the file, and the process continues.

Owns the proof of docs/mmap.md, "SIGBUS": every way of reading and writing meets pages that are gone, in a process of its
own, since what is wrong here ends it.  What views do, which others read, is part of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from rmqstore import Message, MessageStore, StoreConfig

PAGE = os.sysconf("SC_PAGESIZE")
CONFIG = StoreConfig(
    mapped_file_size_commit_log=16 * PAGE,
    mapped_file_size_consume_queue=PAGE * 20,
    max_hash_slot_num=2000,
    max_index_num=4000,
    populate_ahead_size=0,
)
PRELUDE = f"""
import faulthandler, os, signal, sys, threading
from rmqstore import IndexFile, Message, MessageStore, StoreChangedError, StoreConfig, StoreError, StorePoisonedError
PAGE, root = {PAGE}, sys.argv[1]
config = StoreConfig(
    mapped_file_size_commit_log=16 * PAGE, mapped_file_size_consume_queue=20 * PAGE,
    max_hash_slot_num=2000, max_index_num=4000, populate_ahead_size=0,
)
segment = os.path.join(root, "commitlog", "0" * 20)

def refused(what):
    try:
        what()
    except StoreChangedError as error:
        assert "cut short" in str(error) and root in str(error), error
    else:
        raise AssertionError("no error")
"""


@pytest.fixture
def root(tmp_path):
    path = str(tmp_path / "store")
    with MessageStore.open(path, config=CONFIG) as store:
        store.put_messages(
            [Message("Orders", bytes([65 + i % 26]) * 300, keys=[f"K-{i}"], tags="T") for i in range(400)]
        )
    return path


def run(program, root, code=0, **environment):
    """Run a program with the prelude and return its output; it must exit with `code`."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(program), root],
        env={**os.environ, "PYTHONFAULTHANDLER": "", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done


WAYS = {
    "get_message": "store.get_message('Orders', 0, 0, max_num=400)",
    "query_message": "store.query_message('Orders', 'K-100')",
    "message_at": "store.message_at(last)",
    "messages": "list(store.messages())",
    "scan": "store.scan(use_threads=False).read_all()",
    "scan on threads": "store.scan().read_all()",
    "scan of views": "store.scan(views=True).read_all()",
    "get_table": "store.get_table('Orders', 0)",
    "query_table": "store.query_table(['K-100'], 'Orders')",
}


@pytest.mark.parametrize("way", WAYS)
def test_reading_a_segment_that_is_cut_short(root, way):
    run(
        f"""
        store = MessageStore.open(root, config=config, read_only=True)
        assert len(list(store.messages())) == 400
        last = store.get_message("Orders", 0, 100).messages[0].phy_offset
        os.truncate(segment, PAGE)
        refused(lambda: {WAYS[way]})
        # The first page is there, but what was read from this mapping once is not to be believed.
        refused(lambda: store.message_at(0))
        store.close()
        with MessageStore.open(root, config=config, read_only=True) as again:
            assert 250 < len(list(again.messages())) < 300
        """,
        root,
    )


@pytest.mark.parametrize("grows", [False, True], ids=["stays short", "grows again"])
def test_what_the_system_does_not_tell_of(root, grows):
    # docs/mmap.md says so: zeros in the page in which the file ends now, or in all of a file that grew again.
    run(
        f"""
        from rmqstore import verify

        size = os.path.getsize(segment)
        store = MessageStore.open(root, config=config, read_only=True)
        places = [message.phy_offset for message in store.messages()]
        assert len(places) == 400
        segments = os.listdir(os.path.join(root, "commitlog"))
        assert len(segments) > 1
        last = max(place for place in places if place < size)
        # The newest message of the segment loses its body, and no page is gone as a whole.
        os.truncate(segment, last + 100)
        assert (last + 100) // PAGE == (size - 1) // PAGE
        if {grows}:
            os.truncate(segment, size)
        assert [message.phy_offset for message in store.messages() if not message.corrupt] == [
            place for place in places if place != last
        ]
        store.close()
        with MessageStore.open(root, config=config, read_only=True) as again:
            assert [problem.path for problem in again.damaged_files()] == ([] if {grows} else [segment])
        findings = [finding for finding in verify(root, config) if finding.path == segment]
        assert findings and ({grows} or findings[0].kind == "file"), findings
        """,
        root,
    )


def test_queues_and_index_that_are_cut_short(root):
    run(
        """
        queue = os.path.join(root, "consumequeue", "Orders", "0", "0" * 20)
        index = os.path.join(root, "index", os.listdir(os.path.join(root, "index"))[0])
        for path, what in (
            (queue, lambda store: store.get_message("Orders", 0, 300)),
            (index, lambda store: store.query_message("Orders", "K-1")),
            (index, lambda store: next(store.index_service.files()).select_phy_offset("Orders#K-1")),
        ):
            size = os.path.getsize(path)
            content = open(path, "rb").read()
            store = MessageStore.open(root, config=config, read_only=True)
            assert store.query_message("Orders", "K-1") and store.get_message("Orders", 0, 300).messages
            os.truncate(path, 0)
            refused(lambda: what(store))
            # Only that file is lost.
            assert store.message_at(0).body
            store.close()
            with open(path, "wb") as file:
                file.write(content)
        """,
        root,
    )


@pytest.mark.parametrize("is_new", [True, False], ids=["one that this store made", "one that was there"])
def test_writing_a_segment_that_is_cut_short(root, is_new):
    run(
        f"""
        store = MessageStore.open(root, config=config)
        while {is_new} and store.put_message(Message("Orders", b"x" * 3000)).phy_offset % (16 * PAGE):
            pass
        log = os.path.join(root, "commitlog")
        newest = os.path.join(log, max(os.listdir(log)))
        os.truncate(newest, 0)
        for put in (
            lambda: store.put_message(Message("Orders", b"x")),
            lambda: store.put_messages([Message("Orders", b"x" * 100)] * 10),
        ):
            try:
                put()
            except (StoreChangedError, StorePoisonedError) as error:
                assert root in str(error) and "again" in str(error), error
            else:
                raise AssertionError("a message was stored in pages that are gone")
        try:
            store.close()
        except StoreError:
            pass
        # Nothing pretends that the file is whole: the mark of a crash stays where something was written after it.
        assert os.path.getsize(newest) == 0
        assert os.path.exists(os.path.join(root, "abort")) or not {is_new}
        """,
        root,
    )


def test_twelve_threads_at_once(root):
    run(
        """
        store = MessageStore.open(root, config=config, read_only=True)
        list(store.messages())
        os.truncate(segment, 2 * PAGE)
        bad = []
        begin = threading.Barrier(12)

        def read():
            begin.wait()
            for offset in range(30, 120):
                try:
                    got = store.get_message("Orders", 0, offset, max_num=1).messages
                except StoreChangedError:
                    continue
                bad.extend(m for m in got if set(m.body) == {0} or not m.body)

        threads = [threading.Thread(target=read) for _ in range(12)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert not bad, bad
        """,
        root,
    )


def test_a_view_that_others_read_ends_the_process(root):
    # Nobody could tell them: zeros would be an answer that is wrong.
    program = """
        store = MessageStore.open(root, config=config, read_only=True)
        view = store.commit_log.files.file(0).hold()
        assert view[-1] == 0
        os.truncate(segment, PAGE)
        print(view[0], flush=True)
        view[10 * PAGE]
        """
    assert run(program, root, -signal.SIGBUS).stdout


def test_views_do_not_take_the_error_from_an_operation(root):
    run(
        """
        store = MessageStore.open(root, config=config, read_only=True)
        view = store.commit_log.files.file(0).hold()
        last = store.get_message("Orders", 0, 100).messages[0].phy_offset
        os.truncate(segment, PAGE)
        refused(lambda: store.message_at(last))
        assert bytes(view[:4]) != bytes(4)
        """,
        root,
    )


FOREIGN = """
import mmap
path = os.path.join(root, "foreign")
with open(path, "wb") as file:
    file.truncate(4 * PAGE)
with open(path, "rb") as file:
    foreign = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
os.truncate(path, 0)
"""


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_the_handler_of_others_gets_what_is_theirs(root, first):
    enable = "faulthandler.enable()\n"
    opened = "store = MessageStore.open(root, config=config, read_only=True); list(store.messages())\n"
    order = opened + enable if first == "ours" else enable + opened
    done = run(order + "store.refresh()\n" + textwrap.dedent(FOREIGN) + "foreign[0]", root, -signal.SIGBUS)
    assert "Bus error" in done.stderr


def test_a_signal_that_somebody_sends_ends_the_process(root):
    run(
        "store = MessageStore.open(root, config=config, read_only=True); os.kill(os.getpid(), signal.SIGBUS)",
        root,
        -signal.SIGBUS,
    )


def test_who_wants_no_handler_gets_none(root):
    program = """
        store = MessageStore.open(root, config=config, read_only=True)
        list(store.messages())
        os.truncate(segment, PAGE)
        list(store.messages())
        """
    run(program, root, -signal.SIGBUS, RMQSTORE_SIGBUS="default")


def test_a_fork_keeps_the_handler(root):
    run(
        """
        store = MessageStore.open(root, config=config, read_only=True)
        list(store.messages())
        os.truncate(segment, PAGE)
        child = os.fork()
        if child == 0:
            try:
                refused(lambda: list(store.messages()))
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """,
        root,
    )


def test_many_mappings_come_and_go(tmp_path):
    # More than one block of the list of mappings, taken out in another order than put in.
    (tmp_path / "file").write_bytes(b"x" * 3 * PAGE)
    run(
        """
        import random
        from rmqstore._core import Region
        path = os.path.join(root, "file")
        random.seed(1)
        with open(path, "rb") as file:
            regions = [Region.map(file.fileno(), 3 * PAGE) for _ in range(900)]
        random.shuffle(regions)
        while len(regions) > 300:
            regions.pop().close()
        os.truncate(path, PAGE)
        for region in regions:
            assert region.read(0, 1) == b"x" and not region.lost
            try:
                region.read(PAGE, 1)
            except StoreChangedError:
                assert region.lost
            else:
                raise AssertionError
        """,
        str(tmp_path),
    )
