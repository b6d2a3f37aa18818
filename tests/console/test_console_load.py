"""Load on the console: 200 askers at the same time on an index that a writer goes on filling; every answer right, memory flat.

Owns the small version for every run and the full one, 20 000 000 index entries, for `--slow`.  How fast it is decides nothing
here; `python tests/console/console_load.py` measures that.
"""

from __future__ import annotations

import shutil
import threading
import time

import pytest
from console_load import (
    ENTRIES_PER_MESSAGE,
    MemoryWatch,
    Writer,
    key_questions,
    make_store,
    measure,
    newest_is_found,
    run_load,
)
from console_server import ConsoleServer, ask, connection

from rmqstore import MessageStore, StoreConfig

ASKERS = 200
# Index files of 20 000 entries, segments of 1 MiB: the writer rolls both while the askers ask.
CONFIG = StoreConfig(
    mapped_file_size_commit_log=1 << 20,
    mapped_file_size_consume_queue=20_000,
    max_hash_slot_num=5000,
    max_index_num=20_000,
    clean_resource_interval=0,
)
MESSAGES = 20_000


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    pytest.importorskip("pyarrow")
    return make_store(tmp_path_factory.mktemp("load") / "store", MESSAGES, CONFIG)


def test_two_hundred_ask_while_one_writes(small, tmp_path):
    path = tmp_path / "store"
    shutil.copytree(small, path)
    writer = Writer(path, MESSAGES)
    try:
        writer.wait_until(MESSAGES + 100)
        with ConsoleServer(path) as server:
            questions = key_questions(lambda: range(MESSAGES))
            warm = run_load(server, ASKERS, questions, each=5)
            assert not warm.wrong, warm.wrong[:5]
            before = server.anonymous_memory()
            files = server.open_files()
            with MemoryWatch(server) as memory:
                report = run_load(server, ASKERS, questions, each=10)
            assert not report.wrong, report.wrong[:5]
            assert report.answers == ASKERS * 10
            assert not newest_is_found(server, writer)
            # Ten times as many answers cost no more memory than the first: what grows with the store is mapped, not owned.
            assert max(memory.samples) - before < 48 << 20, [sample >> 20 for sample in memory.samples]
            end = time.monotonic() + 20
            while server.open_files() > files and time.monotonic() < end:
                time.sleep(0.1)
            assert server.open_files() <= files, "connections or files stay open"
            assert not server.tracebacks(), server.log
    finally:
        writer.stop()


def test_pages_of_all_kinds_at_once(small, start_console):
    """Costly pages (a histogram of a whole index, a verify) keep nobody from asking for a message."""
    server = start_console(small)
    with MessageStore.open(small, read_only=True) as store:
        assert store.index_service is not None
        names = store.index_service.names
    targets = ["/", "/index", "/consumers", "/messages?topic=Orders", "/queues/Orders/1", "/metrics", "/api/overview"]
    targets += [f"/index/{name}" for name in names]
    wrong: list[str] = []

    def look(number: int) -> None:
        link = connection(server.host, server.port)
        for target in targets[number % len(targets) :] + targets[: number % len(targets)]:
            answer = ask(link, target)
            if answer.status != 200:
                wrong.append(f"{target}: {answer.status} {answer.body[:200]!r}")
        link.close()

    threads = [threading.Thread(target=look, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    report = run_load(server, 20, key_questions(lambda: range(MESSAGES)), each=10)
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a page hangs"
    assert not wrong, wrong[:5]
    assert not report.wrong, report.wrong[:5]


def test_readers_that_leave_in_the_middle(small, start_console):
    """Connections that are cut while the answer comes cost the server nothing."""
    server = start_console(small)
    server.get("/messages?topic=Orders&max_num=500")
    files = server.open_files()
    for number in range(40):
        link = connection(server.host, server.port)
        link.putrequest("GET", f"/messages?topic=Orders&max_num=500&n={number}")
        link.endheaders()
        link.close()
    end = time.monotonic() + 30
    while server.open_files() > files + 2 and time.monotonic() < end:
        time.sleep(0.1)
    assert server.open_files() <= files + 2
    assert server.get("/").status == 200
    assert not server.tracebacks(), server.log


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_ask_on_twenty_million_entries(tmp_path):
    pytest.importorskip("pyarrow")
    entries = 20_000_000
    path = make_store(tmp_path / "store", entries // ENTRIES_PER_MESSAGE)
    figures = measure(path, entries // ENTRIES_PER_MESSAGE, ASKERS, 60)
    assert not figures["wrong"], figures
    assert figures["answers"] > ASKERS * 10, figures
    assert figures["memory_peak_mib"] - figures["memory_before_mib"] < 64, figures
