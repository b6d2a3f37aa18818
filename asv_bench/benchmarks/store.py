"""The store at default geometry: append, get, query, scan with CRC and decode, rebuild, open."""

import os

import numpy as np

import rmqstore
from rmqstore import MessageStore, StoreConfig
from rmqstore._dispatch import RecordColumns

from . import _data


class _Store:
    timeout = 300

    def open(self):
        self.folder = _data.scratch()
        self.store = MessageStore.open(os.path.join(self.folder, "store"), config=_data.default_config())

    def teardown(self, *params):
        self.store.close()
        _data.remove(self.folder)


class Append(_Store):
    """Appends with dispatch to queue and index done; the first touch of the pages is in it."""

    params = [256, 1024]
    param_names = ["body size"]
    number = 1
    repeat = (3, 10, 20.0)
    warmup_time = 0
    n = 20_000

    def setup(self, size):
        self.open()
        self.messages = _data.messages(self.n, size)

    def time_put_messages_20000(self, size):
        for i in range(0, self.n, 1000):
            self.store.put_messages(self.messages[i : i + 1000])

    def time_put_message_20000(self, size):
        put = self.store.put_message
        for message in self.messages:
            put(message)


class Read(_Store):
    """Reads of 100 000 messages of 256 bytes that lie in the page cache."""

    number = 1
    repeat = (3, 10, 20.0)
    n = 100_000

    def setup(self):
        self.open()
        messages = _data.messages(self.n, 256)
        for i in range(0, self.n, 1000):
            self.store.put_messages(messages[i : i + 1000])
        self.sample = [f"ORD-{i:08d}" for i in np.random.default_rng(1).integers(0, self.n, 10_000)]

    def time_get_message_by_32(self):
        at = 0
        while at < self.n:
            at = self.store.get_message("Orders", 0, at, max_num=32).next_queue_offset

    def time_get_message_by_32_and_fields(self):
        at = 0
        while at < self.n:
            page = self.store.get_message("Orders", 0, at, max_num=32)
            for message in page.messages:
                message.body, message.keys, message.topic, message.queue_offset  # noqa: B018
            at = page.next_queue_offset

    def time_get_message_by_32_with_tags(self):
        at = 0
        while at < self.n:
            at = self.store.get_message("Orders", 0, at, max_num=32, tags="paid").next_queue_offset

    def time_get_message_one_10000(self):
        for at in range(10_000):
            self.store.get_message("Orders", 0, at, max_num=1)

    def time_query_message_miss_10000(self):
        for key in self.sample:
            self.store.query_message("Elsewhere", key)

    def time_query_message_10000(self):
        for key in self.sample:
            self.store.query_message("Orders", key)

    def time_scan_crc_decode(self):
        for _ in self.store.messages():
            pass

    def time_scan_crc_columns(self):
        columns = RecordColumns()
        log = self.store.commit_log
        for _ in log.stretches(log.min_offset, log.max_offset, columns, resume=False):
            pass


class Rebuild:
    """Queues and index of 200 000 messages from the log alone, verification included."""

    timeout = 300
    number = 1
    repeat = (3, 5, 30.0)
    warmup_time = 0
    n = 200_000

    def setup(self):
        self.folder = _data.scratch()
        self.path = os.path.join(self.folder, "store")
        self.config = StoreConfig(mapped_file_size_commit_log=256 * 1024 * 1024)
        with MessageStore.open(self.path, config=self.config) as store:
            messages = _data.messages(self.n, 256)
            for i in range(0, self.n, 1000):
                store.put_messages(messages[i : i + 1000], queue_id=i // 1000 % 4)

    def teardown(self):
        _data.remove(self.folder)

    def time_rebuild(self):
        rmqstore.rebuild(self.path, config=self.config)

    def time_verify(self):
        for _ in rmqstore.verify(self.path, self.config):
            pass

    def time_open_read_only(self):
        MessageStore.open(self.path, config=self.config, read_only=True).close()

    def peakmem_scan(self):
        with MessageStore.open(self.path, config=self.config, read_only=True) as store:
            for _ in store.messages():
                pass
