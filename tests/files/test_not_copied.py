"""Owners of files, mappings or locks cannot be copied: `copy`, `deepcopy` and `pickle` raise."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from rmqstore import ConsumerOffsets, IndexFile, Message, MessageStore, StoreConfig
from rmqstore import rabbitmq as rabbit
from rmqstore.rabbitmq.layout import format_config, queue_directory
from rmqstore.rabbitmq.queue_index_v2 import QueueIndexV2

WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps}
CONFIG = StoreConfig(
    mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200, max_hash_slot_num=10, max_index_num=20
)


def refused(owner: object, way) -> None:
    with pytest.raises(TypeError, match=f"a {type(owner).__name__} owns files or locks and cannot be copied or pickled"):
        way(owner)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_no_part_of_a_store_is_copied(tmp_path, way, read_only):
    with MessageStore.open(tmp_path / "store", config=CONFIG) as store:
        store.put_message(Message("T", b"b", keys="k"))
    with MessageStore.open(tmp_path / "store", config=CONFIG, read_only=read_only) as store:
        index = store.index_service.file(store.index_service.names[0])
        queue = next(iter(store.queues))
        segment = store.commit_log.files.last()
        for owner in (
            store, store.commit_log, store.commit_log.files, store.queues, queue, queue.files, store.index_service, index,
            segment, store._state.pool, store.consumer_offsets, *([] if read_only else [store._store_lock]),
        ):  # fmt: skip
            refused(owner, way)
        # It is as it was, and what holds only values is copied as ever.
        (message,) = store.query_message("T", "k")
        assert copy.copy(message).body == pickle.loads(pickle.dumps(message)).body == b"b"
        assert copy.deepcopy(store.config) == store.config
        if not read_only:
            assert store.put_message(Message("T", b"c")).queue_offset == 1
    path = tmp_path / "store" / "index" / index.name
    with IndexFile.open(path, CONFIG, read_only=True) as alone:
        refused(alone, way)
    refused(ConsumerOffsets.load(tmp_path / "consumerOffset.json"), way)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_no_part_of_a_vhost_is_copied(tmp_path, way):
    path = tmp_path / "vhost"
    (path / "queues").mkdir(parents=True)
    (path / ".vhost").write_text("/")
    (path / ".config").write_bytes(format_config(2048))
    directory = Path(path / "queues" / queue_directory("/", "orders"))
    index = rabbit.QueueIndex.open(directory, create=True)
    index.publish(message=rabbit.Message(b"paid", properties={"delivery_mode": 2}))
    refused(index, way)
    index.close()
    store = rabbit.MessageStore.open(path / "msg_store_persistent")
    refused(store, way)
    store.close()
    (path / "queues" / "second").mkdir()
    refused(QueueIndexV2.open(path / "queues" / "second"), way)
    (path / "queues" / "second").rmdir()
    with rabbit.Vhost.open(path) as vhost:
        (queue,) = vhost.queues()
        for owner in (vhost, queue, queue.directories[0]):
            refused(owner, way)
        assert [message.body for message in queue.messages()] == [b"paid"]
