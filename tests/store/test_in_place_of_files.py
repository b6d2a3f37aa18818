"""A reader of a store in which something else stands for a file or a folder: the rest is read, and it is named."""

from __future__ import annotations

import os
import shutil

import pytest
import small_store

from rmqstore import Message, MessageStore, StoreConfig, StoreError, verify

CONFIG = StoreConfig(**{**small_store.SMALL, "mapped_file_size_consume_queue": 200})
BODIES = [b"%d" % number for number in range(20)]


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "store"
    with MessageStore.open(path, config=CONFIG) as opened:
        for body in BODIES:
            for topic in "TU":
                opened.put_message(Message(topic, body, keys=["K" + body.decode()], properties={"p": "v" * 30}))
    return path


def put_instead(path, what):
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "file":
        path.write_text("")
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(path.name if what == "loop" else "/nowhere/at/all")


def bodies(opened, topic):
    return opened.get_table(topic, 0).column("body").to_pylist()


@pytest.mark.parametrize("what", ["folder", "fifo", "loop"])
def test_a_checkpoint_that_is_none_counts_as_zeros(store, what, caplog):
    put_instead(store / "checkpoint", what)
    with MessageStore.open(store, read_only=True, config=CONFIG) as opened:
        opened.refresh()
        assert bodies(opened, "T") == BODIES and not opened.checkpoint.physic_msg_timestamp
    assert str(store / "checkpoint") in caplog.text and "counts as zeros" in caplog.text
    with pytest.raises(OSError):
        MessageStore.open(store, config=CONFIG)


@pytest.mark.parametrize("what", ["folder", "fifo", "link"])
@pytest.mark.parametrize("part", ["commitlog", "consumequeue/T/0", "index"])
def test_what_has_a_files_name_is_damage(store, part, what):
    path = store / part / sorted(os.listdir(store / part))[-1]
    put_instead(path, what)
    with MessageStore.open(store, read_only=True, config=CONFIG) as opened:
        opened.refresh()
        first = opened.get_message("T", 0, 0).messages
        assert [message.body for message in first][:3] == BODIES[:3]
        assert [message.body for message in opened.query_message("T", "K3")] == [b"3"]
        assert [problem.path for problem in opened.damaged_files()] == [str(path)]
    assert any(finding.path == str(path) and finding.kind == "file" for finding in verify(store, CONFIG))


@pytest.mark.parametrize("what", ["link", "loop"])
@pytest.mark.parametrize("part", ["consumequeue/T", "consumequeue/T/0"])
def test_queues_behind_a_bad_link_are_not_said_to_be_missing(store, part, what):
    put_instead(store / part, what)
    with MessageStore.open(store, read_only=True, config=CONFIG) as opened:
        assert bodies(opened, "U") == BODIES
        assert [problem.path for problem in opened.damaged_files()] == [str(store / part)]
        with pytest.raises(OSError, match=str(store / part)):
            opened.get_message("T", 0, 0)
        assert opened.max_queue_offset("V", 0) == 0


@pytest.mark.parametrize("what", ["link", "loop", "file"])
def test_an_index_folder_that_is_none_is_passed_over(store, what):
    put_instead(store / "index", what)
    with MessageStore.open(store, read_only=True, config=CONFIG) as opened:
        assert [message.body for message in opened.query_message("T", "K3")] == [b"3"]
        assert [problem.path for problem in opened.damaged_files()] == [str(store / "index")]


def test_a_file_in_the_place_of_the_queues_leaves_the_log(store):
    put_instead(store / "consumequeue", "file")
    with MessageStore.open(store, read_only=True, config=CONFIG) as opened:
        assert bodies(opened, "T") == BODIES


def test_a_log_behind_a_bad_link_is_not_empty(store):
    put_instead(store / "commitlog", "link")
    with pytest.raises(StoreError, match="broken symlink"):
        MessageStore.open(store, read_only=True, config=CONFIG)
