"""Stores with RocksDB in which this user may not look into a folder, or a file, of a database: it is named, the rest is read.

Every mode that keeps a user out: neither listed nor searched (000), listed only (444), searched only (111).
"""

from __future__ import annotations

import json
import os

import pytest
import rocksdb_files
import rocksdb_stores
from click.testing import CliRunner
from unprivileged import closed

from rmqstore import MessageStore, UnsupportedFormatError, verify
from rmqstore.cli import main

pytest.importorskip("rocksdict")
pytest.importorskip("polars")

MODES = [0, 0o444, 0o111]
FOLDERS = ["consumequeue", "rocksdbstore", "kvStore", "config"]
FOLDERS += ["config/topics", "config/consumerOffsets", "config/subscriptionGroups"]


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


def json_lines(*args):
    return [json.loads(line) for line in run(*args).stdout.splitlines()]


@pytest.fixture
def store(tmp_path):
    return rocksdb_files.unpack("store", tmp_path)


@pytest.mark.parametrize("mode", MODES, ids=oct)
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_closed_database_is_named(store, folder, mode):
    with closed(store / folder, mode):
        found = list(verify(store))
        description = json.loads(run("info", store, "--json").stdout)
        metrics = run("metrics", store).stdout
    assert any(each["path"].startswith(str(store / folder)) for each in description["damaged_files"]), description
    # Queue files in a folder that may only be listed cannot be read either.
    assert "\nrmqstore_damaged_files 1.0\n" in metrics or (folder, mode) == ("consumequeue", 0o444)
    # Nothing is called missing.
    # Who may search a folder finds the files that have known names.
    assert found or (folder, mode) == ("config", 0o111)
    assert {finding.kind for finding in found} <= {"file", "bad_timer"}
    assert all(finding.path.startswith(str(store / folder)) and "Permission denied" in finding.detail for finding in found)


@pytest.mark.parametrize("mode", MODES, ids=oct)
@pytest.mark.parametrize("folder", FOLDERS)
def test_messages_do_not_need_a_closed_database(store, tmp_path, folder, mode):
    asked = [
        ["query", store, "Orders", "CUST-7", "--format", "%t %o"],
        ["tail", store, "Orders", "-n", 3, "--format", "%t %o"],
        ["sql", store, "select count(*) as n from messages where topic = 'Orders'", "--json"],
    ]
    before = [run(*command).stdout for command in asked]
    with closed(store / folder, mode):
        assert [run(*command).stdout for command in asked] == before and all(before)
        done = run("export", store, "-O", tmp_path / "o.jsonl", "--topic", "Orders")
    assert done.exit_code == 0 and len((tmp_path / "o.jsonl").read_bytes().splitlines()) == 1215, done.stderr


@pytest.mark.parametrize("mode", MODES, ids=oct)
def test_what_waits_in_a_closed_database_is_looked_for_in_the_log(store, mode):
    def waiting():
        done = run("pending", store, "--json")
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        return {(row["kind"], row["phy_offset"]) for row in rows if "phy_offset" in row}, done

    whole, _ = waiting()
    with closed(store / "rocksdbstore", mode):
        found, done = waiting()
    # Of a recalled message only the database tells.
    assert whole <= found and done.exit_code == 1 and str(store / "rocksdbstore") in done.stderr


def test_a_closed_file_of_a_database_is_as_a_closed_folder(store):
    for folder in ("consumequeue", "rocksdbstore"):
        name = next(name for name in sorted(os.listdir(store / folder)) if name.endswith(".sst"))
        with closed(store / folder / name):
            assert run("query", store, "Orders", "CUST-7").stdout.count("Orders/") == 7
            with MessageStore.open(store, read_only=True) as opened:
                list(opened.query_message("Orders", "CUST-7"))
                assert [str(store / folder) in (each.path or "") for each in opened.damaged_files()] == [True]
                assert opened.max_queue_offset("Orders", 0) == 317


@pytest.mark.parametrize("mode", MODES, ids=oct)
def test_queues_of_a_closed_database_are_made_from_the_log(tmp_path, mode):
    store = rocksdb_stores.unpack("double-separate-lmq", tmp_path)
    folder = store / "consumequeue_rocksdb"
    with MessageStore.open(store, read_only=True) as opened:
        whole = {key: opened.get_table(*key).column("phy_offset").to_pylist() for key in opened.queues.keys()}
    assert ("%LMQ%x", 0) in whole
    with closed(folder, mode):
        findings = list(verify(store))
        assert [(each.path.startswith(str(folder)), each.kind) for each in findings] == [(True, "file")]
        with MessageStore.open(store, read_only=True) as opened:
            found = {key: opened.get_table(*key).column("phy_offset").to_pylist() for key in opened.queues.keys()}
            assert found == whole
            assert [each.path.startswith(str(folder)) for each in opened.damaged_files()] == [True]
            assert "cannot be read (Permission denied)" in opened.queue_database.damage[0]
        assert str(folder) in run("info", store).stdout


@pytest.mark.parametrize("mode", MODES, ids=oct)
def test_a_writer_refuses_what_may_be_queues_in_rocksdb(tmp_path, mode):
    store = rocksdb_stores.unpack("double-separate-lmq", tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"topic":"T"}\n')
    before = sorted(os.listdir(store))
    folder = store / "consumequeue_rocksdb"
    with closed(folder, mode):
        commands = [["import", store, tmp_path / "rows.jsonl"], ["recover", store], ["rebuild", store, "--yes"]]
        for command in [*commands, ["rebuild", store, "--yes", "--what", "consumequeue"]]:
            done = run(*command)
            assert done.exit_code == 3 and f"Permission denied [{folder}" in done.stderr, (command, done.stderr)
        with pytest.raises(PermissionError):
            MessageStore.open(store)
    assert sorted(os.listdir(store)) == before
    with pytest.raises(UnsupportedFormatError):
        MessageStore.open(store)


def test_the_console_of_a_store_with_a_closed_database(store):
    testclient = pytest.importorskip("starlette.testclient")
    console = pytest.importorskip("rmqstore.console")
    for folder in FOLDERS:
        with closed(store / folder):
            asked = testclient.TestClient(console.app(store), base_url="http://localhost")
            health = asked.get("/api/overview").json()["health"]
            assert any(folder in each["text"] for each in health if each["state"] == "bad"), (folder, health)
            for address in ("/", "/queues", "/index", "/pending", "/settings", "/metrics", "/message/1653857"):
                answer = asked.get(address)
                assert answer.status_code == 200 and "Errno" not in answer.text, (folder, address, answer.text)
            assert "has no index file" not in asked.get("/index").text
            assert "No entry with" not in asked.get("/message/1653857").text
            found = asked.get("/api/messages?topic=Orders&key=CUST-7").json()
            assert found["complete"] and len(found["messages"]) == 7
