"""describe and verify name the files of a store that are not read, with their size."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner
from small_store import SMALL, options_of

from rmqstore import Message, MessageStore, StoreConfig, describe, verify
from rmqstore.cli import main

CONFIG = StoreConfig(**SMALL, index_tags=True)


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "store"
    with MessageStore.open(path, config=CONFIG) as store:
        store.put_message(Message("T", b"x"))
    return path


def write(path, size):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))


def test_what_is_not_read_is_named_with_its_size(root):
    write(root / "compaction" / "compactionLog" / "T" / "0" / f"{0:020d}", 3000)
    write(root / "compaction" / "position-checkpoint", 10)
    write(root / "dledger-n0" / "data" / f"{0:020d}", 500)
    write(root / "commitlog2" / f"{4096:020d}", 4096)
    write(root / "commitlog2" / f"{8192:020d}", 4096)
    write(root / "backup.tar", 77)
    want = {"backup.tar": (1, 77), "commitlog2": (2, 8192), "compaction": (2, 3010), "dledger-n0": (1, 500)}
    description = describe(root, CONFIG)
    assert {part.path: part[1:] for part in description.unread} == {
        str(root / name): each for name, each in want.items()
    }
    findings = [finding for finding in verify(root, CONFIG) if finding.kind in ("not_read", "not_checked")]
    assert sorted(finding.path for finding in findings) == [str(root / name) for name in want]
    assert all(str(want[finding.path.rpartition("/")[2]][1]) in finding.detail for finding in findings)
    shown = CliRunner().invoke(main, ["info", str(root), *options_of(SMALL)], env={"COLUMNS": "1000"})
    lines = [line for line in shown.output.splitlines() if line.startswith("not read")]
    assert len(lines) == 4 and "8192 bytes in 2 files" in lines[1]
    shown = CliRunner().invoke(main, ["info", str(root), *options_of(SMALL), "--json"])
    assert [(part["files"], part["size"]) for part in json.loads(shown.stdout)["unread"]] == list(want.values())


def test_what_is_read_or_has_no_message_is_not_named(root):
    for name in ("compaction/position-checkpoint", "epochFileCheckpoint", "checkpoint.bak", "timerwheel.4096"):
        write(root / name, 9)
    write(root / "consumequeue.rocksdb-1" / "CURRENT", 9)
    write(root / "empty" / "nothing", 0)
    assert describe(root, CONFIG).unread == ()
    assert [finding.kind for finding in verify(root, CONFIG) if finding.kind == "not_read"] == []


STRAYS = (
    "commitlog/notes.txt", "commitlog/old", "index/notes.txt", "index/old", "timerlog/notes.txt", "consumequeue/notes.txt",
    "consumequeue/T/notes.txt", "consumequeue/T/backup", "consumequeue/T/00", "consumequeue/T/99999999999",
    "consumequeue/T/0/notes.txt", "consumequeue/T/0/old", "batchconsumequeue/notes.txt", "consumequeue_ext/T/0/notes.txt",
)  # fmt: skip


def test_what_lies_among_the_files_of_a_store_is_named(root):
    for name in STRAYS:
        write(root / name / f"{0:020d}" if "." not in name else root / name, 7)
    write(root / "consumequeue" / "U" / "3" / "empty", 0)
    wanted = sorted(str(root / name) for name in STRAYS)
    description = describe(root, CONFIG)
    assert sorted(part.path for part in description.unread) == wanted
    assert all(part[1:] == (1, 7) for part in description.unread)
    found = [finding.path for finding in verify(root, CONFIG) if finding.kind in ("not_read", "file")]
    assert sorted(path for path in found if path in wanted) == wanted
    shown = CliRunner().invoke(main, ["info", str(root), *options_of(SMALL)], env={"COLUMNS": "1000"})
    assert sum(line.startswith("not read") for line in shown.output.splitlines()) == len(STRAYS)


def test_files_of_a_database_of_queues_are_read(root):
    pytest.importorskip("rocksdict")
    from rmqstore.offline.rebuild_queue_database import rebuild_queue_database

    rebuild_queue_database(root, CONFIG.replace(message_delay_level="1s"))
    assert describe(root, CONFIG).unread == ()


@pytest.fixture
def without_defaults(tmp_path):
    """A closed store whose index file is not of RocketMQ's size, with one message, and that file's path."""

    def make(**fields):
        path = tmp_path / "store"
        with MessageStore.open(path, config=CONFIG) as store:
            store.put_message(Message("T", b"x", **fields))
        os.unlink(path / "rmqstore.json")
        (index,) = (path / "index").iterdir()
        return path, index

    return make


def test_an_index_file_without_an_entry_is_no_finding(without_defaults, caplog):
    # Its length fits many numbers of slots, and it has nothing that tells which.
    path, _ = without_defaults()
    for exit_code, *arguments in ((0, "verify", path), (0, "topics", path), (1, "query", path, "T", "--key", "k")):
        done = CliRunner().invoke(main, list(map(str, arguments)))
        assert (done.exit_code, "passed over" in done.stderr) == (exit_code, False), (arguments, done.output)
    assert not [record for record in caplog.records if "passed over" in record.message]


def test_an_index_file_that_lost_its_entries_is_a_finding(without_defaults):
    path, index = without_defaults(keys=["k"])
    index.write_bytes(bytes(index.stat().st_size))
    assert [each.kind for each in verify(path)] == ["missing_index"]
    with MessageStore.open(path, read_only=True) as store:
        assert [message.body for message in store.query_message("T", "k")] == [b"x"]
