"""A reader that opened before files told their sizes: it reads them when they come."""

from __future__ import annotations

import os
import shutil

import pytest

from rmqstore import GeometryError, Message, MessageStore, StoreConfig
from rmqstore.config import AssumedSizes

CONFIG = StoreConfig(
    mapped_file_size_commit_log=1 << 16,
    mapped_file_size_consume_queue=2000,
    mapper_file_size_batch_consume_queue=4600,
    max_hash_slot_num=20,
    max_index_num=80,
    clean_resource_interval=0,
)


@pytest.fixture
def writer(tmp_path):
    with MessageStore.open(tmp_path / "store", config=CONFIG) as store:
        store.put_messages([Message("Orders", b"%d" % number) for number in range(3)])
        # A broker does not save its options in the store.
        os.unlink(tmp_path / "store" / "rmqstore.json")
        yield store


def bodies(store):
    return [message.body for message in store.get_message("Orders").messages]


def without(folder):
    """Take a folder of the store away, as if its first file had not been made yet; return what brings it back."""
    os.rename(folder, f"{folder}-later")
    return lambda: os.rename(f"{folder}-later", folder)


@pytest.mark.parametrize("ask", ["get", "refresh", "topics", "table", "describe"])
def test_a_reader_that_opened_before_the_first_queue_file(writer, ask):
    come = without(os.path.join(writer.path, "consumequeue"))
    with MessageStore.open(writer.path, read_only=True) as reader:
        assert "mapped_file_size_consume_queue" in reader.config.assumed and reader.topics() == []
        come()
        if ask == "refresh":
            reader.refresh()
            assert reader.queues.look("Orders", 0, 0).max_queue_offset == 3
        elif ask == "topics":
            assert reader.max_queue_offset("Orders", 0) == 3
        elif ask == "table":
            assert reader.get_table("Orders", 0).num_rows == 3
        elif ask == "describe":
            assert sum(queue.max_queue_offset for queue in reader.stats().queues) == 3
        assert bodies(reader) == [b"0", b"1", b"2"]
        assert reader.config.mapped_file_size_consume_queue == 2000
        assert "mapped_file_size_consume_queue" not in reader.config.assumed
        assert not any("consumequeue" in (each.path or "") for each in reader.damaged_files())


def test_a_queue_file_that_has_no_length_yet(writer):
    come = without(os.path.join(writer.path, "consumequeue"))
    path = os.path.join(writer.path, "consumequeue", "Orders", "0", "0" * 20)
    os.makedirs(os.path.dirname(path))
    open(path, "wb").close()
    with MessageStore.open(writer.path, read_only=True) as reader:
        assert reader.get_message("Orders").messages == []
        os.unlink(path)
        os.removedirs(os.path.dirname(path))
        come()
        reader.refresh()
        assert bodies(reader) == [b"0", b"1", b"2"]


def test_a_reader_that_opened_before_the_first_key(writer):
    with MessageStore.open(writer.path, read_only=True) as reader:
        assert reader.query_offsets("Orders", "K") == []
        put = writer.put_message(Message("Orders", b"keyed", keys=["K"]))
        assert [message.body for message in reader.query_message("Orders", "K")] == [b"keyed"]
        assert reader.query_offsets("Orders", "K") == [put.phy_offset]
        assert (reader.config.max_hash_slot_num, reader.config.max_index_num) == (20, 80)
        assert not reader.damaged_files() and "max_index_num" not in reader.config.assumed


def test_a_reader_that_opened_before_the_first_batch_queue(writer):
    with MessageStore.open(writer.path, read_only=True) as reader:
        assert "mapper_file_size_batch_consume_queue" in reader.config.assumed
        writer.queues.add_batch_topic("Batches")
        writer.put_message(Message("Batches", b"one"))
        assert [message.body for message in reader.get_message("Batches").messages] == [b"one"]
        assert reader.config.mapper_file_size_batch_consume_queue == 4600


def test_messages_that_a_reader_served_from_the_log(writer):
    # No writer: the reader served what no queue had, and a rebuild brought the queues.
    writer.close()
    come = without(os.path.join(writer.path, "consumequeue"))
    with MessageStore.open(writer.path, read_only=True) as reader:
        assert bodies(reader) == [b"0", b"1", b"2"]
        come()
        reader.refresh()
        assert bodies(reader) == [b"0", b"1", b"2"] and reader.undispatched is None
        assert reader.config.mapped_file_size_consume_queue == 2000


def test_files_that_tell_nothing_are_asked_once(writer, monkeypatch):
    from rmqstore.config import infer

    config = StoreConfig.infer(writer.path, read_only=True)
    sizes = AssumedSizes(writer.path)
    assert sizes.learn(config) is config
    monkeypatch.setattr(infer, "_infer_index_geometry", None)
    assert sizes.learn(config) is config
    assert sizes.learn(CONFIG) is CONFIG


@pytest.fixture(params=["a writer", "an empty folder"])
def before_the_first_segment(request, tmp_path):
    """A store into which nothing was put, and what puts a message there."""
    path = tmp_path / "store"
    if request.param == "a writer":
        with MessageStore.open(path, config=CONFIG) as store:
            assert not os.listdir(path / "commitlog") if (path / "commitlog").exists() else True
            os.unlink(path / "rmqstore.json")
            yield path, lambda: store.put_message(Message("Orders", b"first", keys=["K"]))
        return
    (path / "commitlog").mkdir(parents=True)

    def put():
        with MessageStore.open(path, config=CONFIG) as store:
            store.put_message(Message("Orders", b"first", keys=["K"]))

    yield path, put


@pytest.mark.parametrize("ask", ["get", "refresh", "query", "scan", "message_at"])
def test_a_reader_that_opened_before_the_first_segment(before_the_first_segment, ask):
    path, put = before_the_first_segment
    with MessageStore.open(path, read_only=True) as reader:
        assert "mapped_file_size_commit_log" in reader.config.assumed
        assert reader.topics() == [] and reader.query_message("Orders", "K").messages == []
        assert bodies(reader) == [] and list(reader.messages()) == []
        put()
        if ask == "refresh":
            reader.refresh()
        elif ask == "query":
            assert [message.body for message in reader.query_message("Orders", "K")] == [b"first"]
        elif ask == "scan":
            assert reader.scan(["body"]).read_all()["body"].to_pylist() == [b"first"]
        elif ask == "message_at":
            assert reader.message_at(0).body == b"first"
        assert bodies(reader) == [b"first"]
        assert reader.config.mapped_file_size_commit_log == 1 << 16 == reader.commit_log.segment_size
        assert "mapped_file_size_commit_log" not in reader.config.assumed and not reader.damaged_files()


def test_a_store_that_lost_its_segments_is_not_taken_for_a_new_one(writer):
    writer.close()
    log = os.path.join(writer.path, "commitlog")
    for name in os.listdir(log):
        os.unlink(os.path.join(log, name))
    with pytest.raises(GeometryError, match="no commit log segment"):
        MessageStore.open(writer.path, read_only=True)
    # The checkpoint alone tells it.
    shutil.rmtree(os.path.join(writer.path, "consumequeue"))
    with pytest.raises(GeometryError, match="no commit log segment"):
        MessageStore.open(writer.path, read_only=True)
