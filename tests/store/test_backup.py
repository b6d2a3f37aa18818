"""Backups of a store that is in use: what is in them, what they share with the store, and that opening one restores it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
from click.testing import CliRunner

from rmqstore import Message, MessageStore, StoreConfig, StoreError, verify
from rmqstore.cli import main
from rmqstore.store import backup

CONFIG = StoreConfig(
    mapped_file_size_commit_log=1 << 16,
    mapped_file_size_consume_queue=4000,
    max_hash_slot_num=50,
    max_index_num=500,
    clean_resource_interval=0,
)


def put(store, first, num):
    store.put_messages(
        [Message("Orders", b"%d" % i, keys=f"key-{i}", tags="t") for i in range(first, first + num)],
        [i % 3 for i in range(first, first + num)],
    )


def check(path, least, tmp_path, most=None):
    """Restore a copy of a backup; return how many messages it has, which are the first ones of those that were put."""
    copy = tmp_path / "restored"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy)
    with MessageStore.open(copy, read_only=True) as store:
        seen = [int(message.body) for message in store.messages()]
    with MessageStore.open(copy) as store:
        bodies = [int(message.body) for message in store.messages()]
        assert bodies == seen == list(range(len(bodies))) and least <= len(bodies) <= (most or len(bodies))
        for queue_id in range(3):
            table = store.get_table("Orders", queue_id)
            assert [int(body) for body in table["body"].to_pylist()] == bodies[queue_id::3]
        for number in {0, len(bodies) // 2, len(bodies) - 1} if bodies else ():
            assert [message.body for message in store.query_message("Orders", f"key-{number}")] == [b"%d" % number]
    assert list(verify(copy)) == []
    with MessageStore.open(copy) as store:
        put(store, len(bodies), 10)
        assert [message.body for message in store.query_message("Orders", f"key-{len(bodies)}")] == [b"%d" % len(bodies)]
    return len(bodies)


def contents(root):
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                found[os.path.relpath(os.path.join(folder, name), root)] = file.read()
    return found


@pytest.fixture
def store(tmp_path):
    with MessageStore.open(tmp_path / "store", config=CONFIG) as store:
        yield store


@pytest.mark.parametrize("num", [0, 1, 700, 5000])
def test_a_backup_is_the_store(store, tmp_path, num):
    for first in range(0, num, 100):
        put(store, first, min(100, num - first))
    store.consumer_offsets.commit("group", "Orders", 1, 3)
    report = store.backup(tmp_path / "backup")
    assert report.max_offset == store.commit_log.max_offset and (report.linked > 0) == (num > 500)
    assert check(tmp_path / "backup", num, tmp_path, num) == num
    with MessageStore.open(tmp_path / "backup", read_only=True) as restored:
        assert restored.consumer_offsets.get("group", "Orders", 1) == 3 and restored.config == CONFIG


def test_a_later_backup_copies_what_changed(store, tmp_path):
    put(store, 0, 3000)
    first = store.backup(tmp_path / "backup")
    put(store, 3000, 10)
    second = store.backup(tmp_path / "backup")
    assert second.linked == 0 and second.kept == first.linked and second.copied_size < first.copied_size + 10_000
    put(store, 3010, 3000)
    third = store.backup(tmp_path / "backup")
    assert third.linked > 0 and third.kept == first.linked
    assert check(tmp_path / "backup", 6010, tmp_path) == 6010
    # Full files are shared with the store.
    full = sorted(os.listdir(os.path.join(store.path, "commitlog")))[0]
    assert os.path.samefile(os.path.join(store.path, "commitlog", full), tmp_path / "backup" / "commitlog" / full)


def test_files_that_the_store_deleted_leave_the_backup(tmp_path):
    now = [1_700_000_000_000]
    config = CONFIG.replace(clock=lambda: now[0], file_reserved_time=1)
    with MessageStore.open(tmp_path / "store", config=config) as store:
        put(store, 0, 3000)
        store.backup(tmp_path / "backup")
        old = 1_600_000_000
        for name in sorted(os.listdir(os.path.join(store.path, "commitlog")))[:3]:
            os.utime(os.path.join(store.path, "commitlog", name), (old, old))
        assert store.delete_expired_files().segments == 3
        report = store.backup(tmp_path / "backup")
        assert report.removed >= 3
        assert sorted(os.listdir(tmp_path / "backup" / "commitlog")) == sorted(os.listdir(os.path.join(store.path, "commitlog")))
        begin = store.commit_log.min_offset
    with MessageStore.open(tmp_path / "backup", read_only=True) as restored:
        assert restored.commit_log.min_offset == begin > 0


def test_another_file_system_gets_copies(store, tmp_path, monkeypatch):
    own_link = os.link

    def link(source, target, **options):
        if os.fspath(target).startswith(str(tmp_path / "backup")):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        own_link(source, target, **options)

    put(store, 0, 3000)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link)
        first = store.backup(tmp_path / "backup")
        put(store, 3000, 3000)
        second = store.backup(tmp_path / "backup")
    assert first.linked == second.linked == 0 and second.kept > 10
    shared = [path for path in (tmp_path / "backup").rglob("*") if path.is_file() and path.stat().st_nlink > 1]
    assert shared == [] and check(tmp_path / "backup", 6000, tmp_path) == 6000


@pytest.mark.parametrize("from_another_process", [False, True])
def test_a_backup_while_messages_are_put(tmp_path, from_another_process):
    root, target, done = tmp_path / "store", tmp_path / "backup", threading.Event()
    acknowledged = [0]

    def write(store):
        # Bounded, so that a slow machine does not check ever larger stores.
        while not done.is_set() and acknowledged[0] < 20_000:
            put(store, acknowledged[0], 37)
            acknowledged[0] += 37
            time.sleep(0.001)

    with MessageStore.open(root, config=CONFIG) as store:
        writer = threading.Thread(target=write, args=(store,))
        writer.start()
        try:
            for _ in range(4):
                least = acknowledged[0]
                if from_another_process:
                    done_by = [sys.executable, "-m", "rmqstore", "backup", str(root), str(target)]
                    subprocess.run(done_by, check=True, stdout=subprocess.DEVNULL)
                else:
                    store.backup(target)
                check(target, least, tmp_path)
        finally:
            done.set()
            writer.join()
    assert list(verify(root)) == []


def test_an_interrupted_backup_is_a_store(store, tmp_path, monkeypatch):
    put(store, 0, 2000)
    store.backup(tmp_path / "backup")
    put(store, 2000, 1500)
    steps = 0
    taken, part = backup._Backup._full_file, backup._Backup._written_part

    def fail_at(number):
        left = [number]

        def step(take):
            def counted(*given):
                left[0] -= 1
                if not left[0]:
                    raise KeyboardInterrupt
                return take(*given)

            return counted

        monkeypatch.setattr(backup._Backup, "_full_file", step(taken))
        monkeypatch.setattr(backup._Backup, "_written_part", step(part))

    for number in range(1, 200, 9):
        again = tmp_path / "again"
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(tmp_path / "backup", again)
        fail_at(number)
        try:
            store.backup(again)
            break
        except KeyboardInterrupt:
            steps += 1
        finally:
            monkeypatch.undo()
        with MessageStore.open(again) as restored:
            assert len(list(restored.messages())) >= 2000
        with monkeypatch.context():
            store.backup(again)
        assert check(again, 3500, tmp_path) >= 3500
    assert steps > 3


def test_folders_that_are_no_place_for_a_backup(store, tmp_path):
    put(store, 0, 3)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("x")
    for target in (tmp_path / "full", os.path.join(store.path, "backup"), store.path):
        before = contents(tmp_path / "full")
        with pytest.raises(StoreError):
            store.backup(target)
        assert contents(tmp_path / "full") == before and not os.path.exists(os.path.join(store.path, "backup"))
    store.close()
    with pytest.raises(StoreError):
        store.backup(tmp_path / "backup")


def test_a_backup_changes_nothing_in_the_store(store, tmp_path):
    put(store, 0, 2000)
    store.close()
    before = contents(store.path)
    with MessageStore.open(store.path, read_only=True) as reader:
        reader.backup(tmp_path / "backup")
    with MessageStore.open(tmp_path / "backup") as restored:
        put(restored, 2000, 100)
    assert contents(store.path) == before


def test_the_command(store, tmp_path):
    put(store, 0, 2000)
    result = CliRunner().invoke(main, ["backup", store.path, str(tmp_path / "backup")])
    assert result.exit_code == 0 and "files" in result.output, result.output
    result = CliRunner().invoke(main, ["backup", store.path, str(tmp_path / "backup"), "--json"])
    assert result.exit_code == 0 and '"kept"' in result.output
    assert CliRunner().invoke(main, ["backup", store.path, store.path]).exit_code == 3
    assert check(tmp_path / "backup", 2000, tmp_path) == 2000
