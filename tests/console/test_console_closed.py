"""The console and the metrics of a store that this user may read in part, or in which something else stands for a file.

Every address answers what can be read and names what cannot; none is an error of the console, and none says that something
is not there where nobody looked.
"""

from __future__ import annotations

import logging
import os
import re
import shutil

import pytest
import small_store
from unprivileged import closed

from rmqstore import Message, MessageStore, StoreConfig

pytest.importorskip("prometheus_client")
testclient = pytest.importorskip("starlette.testclient")
console = pytest.importorskip("rmqstore.console")

GEOMETRY = {**small_store.SMALL, "mapped_file_size_consume_queue": 200}
CONFIG = StoreConfig(**GEOMETRY)
ADDRESSES = (
    "/", "/queues", "/messages", "/index", "/consumers", "/pending", "/settings", "/verify", "/metrics", "/metrics?pending=true",
    "/api/overview", "/api/timeline", "/api/largest", "/api/queues", "/api/index", "/api/consumers", "/api/settings",
    "/api/pending", "/api/verify", "/queues?topic=T", "/queues/T/0", "/queues/U/0", "/messages?topic=T", "/messages?topic=T&key=K3",
    "/api/queues?topic=T", "/api/queues/T/0", "/api/messages?topic=T", "/api/messages?topic=U&order=oldest",
    "/api/messages?topic=T&key=K3", "/message/0", "/message/0/body", "/message/0/record", "/api/message/0", "/index/1",
)  # fmt: skip


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "store"
    with MessageStore.open(path, config=CONFIG) as opened:
        for number in range(20):
            for topic in "TU":
                opened.put_message(Message(topic, b"%d" % number, keys=[f"K{number}"], tags="a"))
            opened.put_message(Message("T", b"1-%d" % number), 1)
        opened.consumer_offsets.commit("group", "T", 0, 3)
    return path


def client(store):
    # Its threads may do what this one may when the first request comes.
    return testclient.TestClient(console.app(store, config=CONFIG), base_url="http://localhost")


def get(asked, address, status=200):
    answer = asked.get(address)
    assert answer.status_code == status, (address, answer.text)
    return answer.json() if address.startswith("/api/") else answer.text


def metric(text, name):
    return [float(found) for found in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)]


@pytest.mark.parametrize("mode", [0, 0o444, 0o111], ids=oct)
@pytest.mark.parametrize("folder", ["consumequeue", "consumequeue/T", "consumequeue/T/0", "index", "config", "commitlog"])
def test_no_address_fails_or_denies_what_it_did_not_see(store, folder, mode):
    with closed(store / folder, mode):
        asked = client(store)
        for address in ADDRESSES:
            answer = asked.get(address)
            # Of an index whose folder may be listed all names are known.
            unknown = folder == "commitlog" or (folder == "index" and mode != 0o444)
            allowed = (200, 503) if address != "/index/1" or unknown else (404,)
            assert answer.status_code in allowed, (address, answer.text)
            assert "Traceback" not in answer.text and "Errno" not in answer.text
            if answer.status_code == 503:
                assert f"[{store / folder}" in answer.text and "Permission denied" in answer.text, (address, answer.text)
            if folder.startswith("consumequeue"):
                assert "has no queues yet" not in answer.text
            if folder == "index":
                assert "has no index files" not in answer.text and "No entry with" not in answer.text


def test_lists_say_which_folders_of_queues_nobody_saw(store):
    with closed(store / "consumequeue" / "T"):
        asked = client(store)
        for address in ("/", "/queues"):
            assert "consumequeue/T" in get(asked, address) and "U" in get(asked, address)
        for address in ("/api/overview", "/api/queues"):
            assert [each["path"] for each in get(asked, address)["unread"]] == ["consumequeue/T"]
        assert get(asked, "/api/queues")["complete"] is False
        assert get(asked, "/api/queues?topic=U")["complete"] is True
        health = {each["name"]: each["text"] for each in get(asked, "/api/overview")["health"]}
        assert health["queues"] == "the list is incomplete, because folders cannot be read: consumequeue/T"
        get(asked, "/api/queues?topic=NONE", 404)


def test_messages_of_a_topic_are_those_of_the_queues_that_can_be_read(store):
    with closed(store / "consumequeue" / "T" / "0"):
        asked = client(store)
        for order in ("newest", "oldest"):
            found, cursor = [], ""
            while cursor is not None:
                page = get(asked, f"/api/messages?topic=T&order={order}&max_num=7&cursor={cursor}")
                assert [(each["topic"], each["queue_id"]) for each in page["unread"]] == [("T", 0)]
                assert page["complete"] is False and "Permission denied" in page["unread"][0]["error"]
                found += [row["preview"] for row in page["messages"]]
                cursor = page["next_cursor"]
            assert sorted(found) == sorted(f"1-{number}" for number in range(20))
        assert "Skipped, because it cannot be read" in get(asked, "/messages?topic=T")
        topics = {each["topic"]: each["unread_queues"] for each in get(asked, "/api/overview")["topics"]}
        assert topics == {"T": 1, "U": 0} and "1 cannot be read" in get(asked, "/")
    # So it is where one file of a queue is closed.
    name = sorted(os.listdir(store / "consumequeue/T/0"))[0]
    with closed(store / "consumequeue/T/0" / name):
        page = get(client(store), "/api/messages?topic=T&max_num=100")
        assert page["unread"] and "1-0" in {row["preview"] for row in page["messages"]}


def test_an_index_that_nobody_saw_is_not_said_to_lack_entries(store):
    with closed(store / "index"):
        asked = client(store)
        assert [each["path"] for each in get(asked, "/api/index")["problems"]] == ["index"]
        assert "index" in get(asked, "/index") and "run <code>rmqstore rebuild" not in get(asked, "/index")
        entries = get(asked, "/api/message/0")["entries"]
        assert entries and all(each["state"] == "unread" and "index" in each["detail"] for each in entries)
        assert "Unknown whether there is an entry" in get(asked, "/message/0")
        health = {each["name"]: each["text"] for each in get(asked, "/api/overview")["health"]}
        assert health["index"].startswith("unreadable")
    names = sorted(os.listdir(store / "index"))
    with closed(store / "index" / names[0]):
        asked = client(store)
        answer = get(asked, "/api/index")
        assert [each["path"] for each in answer["problems"]] == [f"index/{names[0]}"]
        assert [each["name"] for each in answer["files"]] == names[1:]
        assert names[0] in get(asked, f"/index/{names[0]}", 503)


def test_metrics_say_that_something_was_not_read_and_give_no_sums_of_parts(store):
    whole = get(client(store), "/metrics")
    assert metric(whole, "rmqstore_damaged_files") == [0]
    with closed(store / "consumequeue" / "T" / "0"):
        text = get(client(store), "/metrics")
        assert metric(text, "rmqstore_damaged_files") == [1]
        assert metric(text, "rmqstore_log_behind_queues_bytes") == []
        sums = [name for name in ("rocketmq_producer_offset", "rmqstore_topic_messages", "rmqstore_queues")
                if f'{name}{{topic="T"}}' in text]  # fmt: skip
        assert sums == [] and 'rmqstore_queue_max_offset{queue_id="1",topic="T"} 20.0' in text
        assert 'rmqstore_topic_messages{topic="U"} 20.0' in text
    for folder in ("consumequeue", "index", "config"):
        with closed(store / folder):
            assert metric(get(client(store), "/metrics"), "rmqstore_damaged_files") == [1]


def in_place_of(path, what):
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(path.name if what == "loop" else "/nowhere/at/all")


@pytest.mark.parametrize("what", ["folder", "fifo", "link", "loop"])
@pytest.mark.parametrize("name", ["checkpoint", "commitlog", "consumequeue/T/0", "index"])
def test_what_stands_in_a_files_place_is_passed_and_named(store, name, what):
    path = store / name
    if path.is_dir():
        path = path / sorted(os.listdir(path))[-1]
    in_place_of(path, what)
    asked = client(store)
    if (name, what) == ("commitlog", "loop"):
        assert str(path) in get(asked, "/", 503)
        return
    for address in ADDRESSES[:-1]:
        answer = asked.get(address)
        # Only what is asked about the one queue that cannot be opened has no answer.
        refused = answer.status_code == 503 and "/queues/T/0" in address and str(path) in answer.text
        assert answer.status_code in (200, 404) or refused, (address, answer.text)
    overview = get(asked, "/api/overview")
    bad = [each["text"] for each in overview["health"] if each["state"] == "bad"]
    if name == "checkpoint":
        assert "unreadable, or without times; run verify for details" in bad
        assert overview["messages"] == 60
    else:
        assert any(path.name in each for each in bad), overview["health"]
        assert metric(get(asked, "/metrics"), "rmqstore_damaged_files") == [1]


@pytest.mark.parametrize("what", ["link", "loop"])
@pytest.mark.parametrize("name", ["commitlog", "consumequeue", "consumequeue/T", "consumequeue/T/0", "index", "config"])
def test_a_folder_on_a_disk_that_is_not_mounted_is_named(store, name, what):
    in_place_of(store / name, what)
    asked = client(store)
    if name == "commitlog":
        assert str(store / name) in get(asked, "/", 503)
        return
    overview = get(asked, "/api/overview")
    if (name, what) == ("consumequeue", "link"):
        # As without it: the log tells all.
        assert overview["messages"] == 60
        return
    if (name, what) != ("config", "link"):
        assert any(name in each["text"] for each in overview["health"] if each["state"] == "bad"), overview["health"]
    if name.startswith("consumequeue/T"):
        # Nothing is said to be missing.
        get(asked, "/api/queues/T/0", 503)
        assert get(asked, "/api/queues/U/0")["max_queue_offset"] == 20


def test_what_goes_while_the_console_runs_is_no_error_of_the_console(store):
    for name in ("index", "consumequeue/T/0", "consumequeue/T", "config", "checkpoint", "consumequeue", "commitlog"):
        asked = client(store)
        for address in ADDRESSES:
            asked.get(address)
        path = store / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        for address in ADDRESSES:
            answer = asked.get(address)
            assert answer.status_code in (200, 404, 503), (name, address, answer.text)
            assert answer.status_code != 503 or str(store) in answer.text, (name, address, answer.text)


def test_a_topic_of_odd_bytes(store, caplog):
    # Its name is logged, and a report with a lone surrogate is more than pytest's workers take.
    caplog.set_level(logging.CRITICAL, "rmqstore")
    folder = os.fsencode(store) + b"/consumequeue/\xff\xfe%2F\n<b>"
    shutil.copytree(os.fsencode(store) + b"/consumequeue/T", folder)
    asked = client(store)
    for address in ("/", "/queues", "/metrics", "/api/overview", "/api/queues", "/api/queues/%FF%FE%252F%0A%3Cb%3E/0"):
        get(asked, address)
    os.chmod(folder, 0)
    try:
        with closed(store / "config", 0o755):
            get(client(store), "/")
            answer = get(client(store), "/api/queues")
            assert len(answer["unread"]) == 1 and answer["number"] == 3
            assert b"<b>" not in client(store).get("/queues").content.replace(b"<bdi>", b"")
    finally:
        os.chmod(folder, 0o755)


@pytest.mark.parametrize("part", ["middle", "newest"])
def test_a_lost_part_of_the_log_is_named(tmp_path, part):
    path = tmp_path / "store"
    with MessageStore.open(path, config=CONFIG) as opened:
        for number in range(40):
            opened.put_message(Message("T", bytes(400), keys=[f"K{number}"]))
    segments = sorted((path / "commitlog").iterdir())
    for segment in segments[1:2] if part == "middle" else segments[-2:]:
        segment.unlink()
    begin = int(segments[1 if part == "middle" else -2].name)
    asked = client(path)
    for address in ("/messages?topic=T", "/messages?topic=T&key=K10", "/messages?topic=T&key=K38", "/queues/T/0", "/"):
        text = get(asked, address)
        assert f"lacks phy offsets {begin} to" in text, address
        assert "has no messages in this time range." not in text and "has this key in this time range." not in text
    for address in ("/api/messages?topic=T", "/api/messages?topic=T&key=K10", "/api/queues/T/0"):
        answer = get(asked, address)
        assert answer["lost"][0][0] == begin and answer.get("complete", False) is False, address
