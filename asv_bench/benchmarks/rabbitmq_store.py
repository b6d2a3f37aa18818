"""RabbitMQ's message store: scans of N.rdq files, the table of places, writing, reading, removing and merging.

Records of 41 bytes are as small as they get (a term of 16 bytes, which no node writes); those of 300 bytes are small messages
with `queue_index_embed_msgs_below` 0; 6 KB and 1 MiB are bodies that a node puts here by itself.
"""

import os

import numpy as np

from rmqstore._core import Region
from rmqstore.rabbitmq import _messages
from rmqstore.rabbitmq.clean_state import index_rows
from rmqstore.rabbitmq.message import Message
from rmqstore.rabbitmq.message_store import MessageStore, scan_file

from ._data import remove, scratch, sized


def _ids(n):
    return np.random.default_rng(1).integers(0, 256, (n, 16), np.uint8)


def _write_file(path, ids, size):
    # Records of `size` bytes; what is in a term does not matter to a scan from record to record.
    records = np.zeros((len(ids), size), np.uint8)
    records[:, :8] = np.frombuffer((size - 9).to_bytes(8, "big"), np.uint8)
    records[:, 8:24] = ids
    records[:, -1] = 255
    records.tofile(path)


def _region(path):
    with open(path, "rb") as file:
        return Region.map(file.fileno(), os.path.getsize(path))


class Scan:
    """A warm file of one size of records; bytes a call / time is the speed."""

    params = [[41, 300, 6196, 1048805]]
    param_names = ["record size"]

    def setup(self, size):
        self.folder = scratch()
        self.n = max(20, min(sized(1_000_000), sized(128 << 20) // size))
        self.ids = _ids(self.n)
        self.path = os.path.join(self.folder, "0.rdq")
        _write_file(self.path, self.ids, size)
        self.region = _region(self.path)

    def teardown(self, size):
        self.region.close()
        remove(self.folder)

    def time_columns(self, size):
        assert len(_messages.scan_messages(self.region)[0]) == self.n

    def time_locate(self, size):
        # The dirty scan of a store: every message is looked up and gets its place.
        table = _messages.LocationTable(self.n)
        table.refer(self.ids)
        assert table.scan(self.region, 0)[0] == self.n

    def time_bytewise(self, size):
        table = _messages.LocationTable(self.n)
        table.refer(self.ids)
        assert table.scan(self.region, 0, _messages.MessageScan.SCAN_BYTEWISE)[0] == self.n


class Salvage:
    """Records with real terms, found at every position without references."""

    params = [[100, 6000]]
    param_names = ["body size"]

    def setup(self, size):
        self.folder = scratch()
        n = (16 << 20) // (size + 200)
        messages = [Message(os.urandom(size), routing_keys=["q"]) for _ in range(n)]
        with MessageStore.open(self.folder, file_size_limit=1 << 40) as store:
            store.write_many([message.msg_id for message in messages], messages)
        self.n = n

    def teardown(self, size):
        remove(self.folder)

    def time_salvage(self, size):
        assert len(scan_file(os.path.join(self.folder, "0.rdq"), "salvage").pos) == self.n


class Table:
    """The table of places alone."""

    params = [[1_000_000]]
    param_names = ["messages"]

    def setup(self, n):
        self.ids = _ids(n)
        self.table = _messages.LocationTable()
        self.table.refer(self.ids)
        for row, msg_id in enumerate(self.ids[: n // 10]):
            self.table.put(msg_id.tobytes(), 1, 0, 300 * row, 300)
        self.items, _ = index_rows(self.table)

    def time_refer(self, n):
        _messages.LocationTable().refer(self.ids)

    def time_index_rows(self, n):
        index_rows(self.table)

    def time_load_ets_items(self, n):
        assert _messages.LocationTable(n // 10).load_ets_items(self.items, 0)[0] == n // 10


class Store:
    """10 000 messages of one size through a store, without forcing; files of 16 MiB."""

    params = [[300, 6000]]
    param_names = ["body size"]
    n = 10_000

    def setup(self, size):
        self.folder = scratch()
        self.messages = [Message(bytes(size), routing_keys=["q"]) for _ in range(self.n)]
        self.ids = [message.msg_id for message in self.messages]
        self.terms = [message.term for message in self.messages]
        self.number = 0
        self.store = MessageStore.open(os.path.join(self.folder, "read"))
        self.store.write_many(self.ids, self.terms)

    def teardown(self, size):
        self.store.close()
        remove(self.folder)

    def _new(self):
        self.number += 1
        return MessageStore.open(os.path.join(self.folder, str(self.number)))

    def time_write_one_by_one(self, size):
        store = self._new()
        for msg_id, term in zip(self.ids, self.terms):
            store.write(msg_id, term)
        store.abandon()

    def time_write_many(self, size):
        store = self._new()
        store.write_many(self.ids, self.terms)
        store.abandon()

    def time_read_term(self, size):
        read = self.store.read_term
        for msg_id in self.ids:
            read(msg_id)

    def time_write_remove_and_merge(self, size):
        store = self._new()
        store.write_many(self.ids, self.terms)
        store.remove_many([msg_id for i, msg_id in enumerate(self.ids) if i % 3])
        store.merge()
        store.abandon()
