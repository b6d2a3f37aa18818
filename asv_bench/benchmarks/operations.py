"""The public operations of a store: by size and distribution of what is stored, and by memory.

Warm, at a geometry whose files are quickly made where the operation does not depend on it.
"""

import os

import rmqstore
from rmqstore import Message, MessageStore, StoreConfig
from rmqstore._dispatch import RecordColumns
from rmqstore.message import compress_body, compression_flags

from . import _data


def _config():
    """Segments of 128 MiB and an index of 400 000 entries."""
    return StoreConfig(
        mapped_file_size_commit_log=128 << 20,
        max_hash_slot_num=200_000,
        max_index_num=400_000,
        flush_interval_commit_log=0,
    )


def _text(size):
    """`size` bytes that compress to about a third, as text does."""
    words = b" ".join(b"%s-%d" % (word, i * 7919 % 1000) for i in range(200) for word in (b"order", b"paid", b"item"))
    return (words * (size // len(words) + 1))[:size]


class _Store:
    timeout = 300
    number = 1
    repeat = (3, 10, 10.0)
    warmup_time = 0

    def make(self):
        self.folder = _data.scratch()
        self.path = os.path.join(self.folder, "store")
        self.store = MessageStore.open(self.path, config=_config())

    def teardown(self, *params):
        self.store.close()
        _data.remove(self.folder)


class Bodies(_Store):
    """Puts and reads of 500 messages by the size of their bodies."""

    params = [[0, 64, 1024, 16 << 10, 64 << 10]]
    param_names = ["body size"]
    n = 500

    def setup(self, size):
        self.make()
        body = _text(size)
        self.messages = [Message("Orders", body, keys=[f"ORD-{i:08d}"], tags="paid") for i in range(self.n)]
        self.store.put_messages(self.messages)

    def time_put_messages_500(self, size):
        self.store.put_messages(self.messages)

    def time_put_message_500(self, size):
        put = self.store.put_message
        for message in self.messages:
            put(message)

    def time_get_message_500(self, size):
        at = 0
        while at < self.n:
            page = self.store.get_message("Orders", 0, at, max_num=32)
            for message in page.messages:
                message.body  # noqa: B018
            at = page.next_queue_offset


class Compressed(_Store):
    """500 messages with bodies of 8 KiB that are compressed: put, read and scanned."""

    params = [["none", "zlib", "lz4", "zstd"]]
    param_names = ["compression"]
    n = 500

    def setup(self, kind):
        self.make()
        self.kind = kind
        self.bodies = [b"%08d " % i + _text(8 << 10) for i in range(self.n)]
        self.store.put_messages(self.made())

    def made(self):
        if self.kind == "none":
            return [Message("Orders", body) for body in self.bodies]
        flag = compression_flags(self.kind)
        return [Message("Orders", compress_body(body, self.kind), sys_flag=flag) for body in self.bodies]

    def time_compress_and_put_messages(self, kind):
        self.store.put_messages(self.made())

    def time_get_message_and_decompress(self, kind):
        at = 0
        while at < self.n:
            page = self.store.get_message("Orders", 0, at, max_num=32)
            for message in page.messages:
                message.body  # noqa: B018
            at = page.next_queue_offset

    def time_scan_bodies(self, kind):
        for _ in self.store.scan(["body"], end_phy_offset=self.store.commit_log.max_offset, use_threads=False):
            pass


class Put(_Store):
    """10 000 messages of 256 bytes, by the way in which they are given."""

    n = 10_000

    def setup(self):
        import pyarrow

        self.make()
        self.messages = _data.messages(self.n, 256)
        self.table = pyarrow.table(
            {
                "body": pyarrow.array([message.body for message in self.messages], pyarrow.binary()),
                "keys": pyarrow.array([message.keys for message in self.messages], pyarrow.list_(pyarrow.string())),
                "tags": pyarrow.array([message.tags for message in self.messages]),
            }
        )
        self.store.put_messages(self.messages)

    def time_put_table(self):
        self.store.put_table(self.table, topic="Orders")

    def time_put_messages_1000(self):
        for i in range(0, self.n, 1000):
            self.store.put_messages(self.messages[i : i + 1000])

    def time_put_message_batch_100(self):
        for i in range(0, self.n, 100):
            self.store.put_message_batch(self.messages[i : i + 100])

    def time_put_message(self):
        put = self.store.put_message
        for message in self.messages:
            put(message)

    def peakmem_put_table(self):
        self.store.put_table(self.table, topic="Orders")

    def peakmem_put_messages(self):
        self.store.put_messages(self.messages)


class LookUp(_Store):
    """2000 look-ups in a store of 100 000 messages in four queues, one call each, and tables."""

    n = 100_000
    asked = 2000

    def setup(self):
        self.make()
        puts = []
        messages = _data.messages(self.n, 256)
        for i in range(0, self.n, 1000):
            puts += self.store.put_messages(messages[i : i + 1000], queue_id=i // 1000 % 4)
        chosen = puts[:: self.n // self.asked]
        self.places = [put.phy_offset for put in chosen]
        self.ids = [put.msg_id for put in chosen]
        self.first, self.last = (self.store.message_at(put.phy_offset).store_timestamp for put in (puts[0], puts[-1]))
        self.keys = [f"ORD-{i:08d}" for i in range(0, self.n, self.n // self.asked)]
        self.missing = [f"NO-{i:08d}" for i in range(self.asked)]

    def time_message_at(self):
        message_at = self.store.message_at
        for place in self.places:
            message_at(place)

    def time_message_by_id(self):
        message_by_id = self.store.message_by_id
        for msg_id in self.ids:
            message_by_id(msg_id)

    def time_offset_by_time(self):
        span = self.last - self.first + 1
        for i in range(self.asked):
            self.store.offset_by_time("Orders", i % 4, self.first + i * span // self.asked)

    def time_max_queue_offset(self):
        for i in range(self.asked):
            self.store.max_queue_offset("Orders", i % 4)

    def time_query_message_hit(self):
        query = self.store.query_message
        for key in self.keys:
            query("Orders", key)

    def time_query_message_miss(self):
        query = self.store.query_message
        for key in self.missing:
            query("Orders", key)

    def time_query_offsets(self):
        query = self.store.query_offsets
        for key in self.keys:
            query("Orders", key)

    def time_query_table(self):
        self.store.query_table(self.keys, "Orders")


class Read(_Store):
    """Reads of 100 000 messages of 256 bytes in one queue."""

    n = 100_000

    def setup(self):
        self.make()
        messages = _data.messages(self.n, 256)
        for i in range(0, self.n, 1000):
            self.store.put_messages(messages[i : i + 1000])

    def pages(self, **options):
        at = 0
        while at < self.n:
            page = self.store.get_message("Orders", 0, at, max_num=32, **options)
            yield page
            at = page.next_queue_offset

    def time_get_message_by_32(self):
        for _ in self.pages():
            pass

    def time_get_message_by_32_and_fields(self):
        for page in self.pages():
            for message in page.messages:
                message.body, message.keys, message.topic, message.queue_offset  # noqa: B018

    def time_get_message_by_32_with_tags(self):
        for _ in self.pages(tags="paid"):
            pass

    def time_get_message_one_10000(self):
        for at in range(10_000):
            self.store.get_message("Orders", 0, at, max_num=1)

    def time_scan_crc_decode(self):
        for _ in self.store.messages():
            pass

    def time_scan_crc_columns(self):
        columns = RecordColumns()
        log = self.store.commit_log
        for _ in log.stretches(log.min_offset, log.max_offset, columns, resume=False):
            pass


class WholeStore(_Store):
    """Answers about a whole store of 50 000 messages, and its repair."""

    n = 50_000

    def setup(self):
        self.make()
        messages = _data.messages(self.n, 256)
        for i in range(0, self.n, 1000):
            self.store.put_messages(messages[i : i + 1000], queue_id=i // 1000 % 4)
        self.store.close()

    def time_describe(self):
        rmqstore.describe(self.path, _config())

    def time_verify(self):
        for _ in rmqstore.verify(self.path, _config()):
            pass

    def time_rebuild(self):
        rmqstore.rebuild(self.path, config=_config())

    def time_open_close(self):
        MessageStore.open(self.path, config=_config()).close()

    def time_open_close_read_only(self):
        MessageStore.open(self.path, config=_config(), read_only=True).close()


class Memory:
    """The most memory of a process that does one thing with a store of 100 000 messages (38 MB), and makes none of it."""

    timeout = 300
    n = 100_000

    def setup_cache(self):
        # asv runs this in another process and in a folder that it deletes afterwards.
        path = os.path.join(os.getcwd(), "store")
        with MessageStore.open(path, config=_config()) as store:
            messages = _data.messages(self.n, 256)
            for i in range(0, self.n, 1000):
                store.put_messages(messages[i : i + 1000], queue_id=i // 1000 % 4)
        return path

    def opened(self, path):
        return MessageStore.open(path, config=_config(), read_only=True)

    def peakmem_open_read_only(self, path):
        self.opened(path).close()

    def peakmem_open(self, path):
        MessageStore.open(path, config=_config()).close()

    def peakmem_messages(self, path):
        with self.opened(path) as store:
            for _ in store.messages():
                pass

    def peakmem_get_message(self, path):
        with self.opened(path) as store:
            at = 0
            while at < self.n // 4:
                at = store.get_message("Orders", 0, at).next_queue_offset

    def peakmem_query_message_2000(self, path):
        with self.opened(path) as store:
            for i in range(0, self.n, 50):
                store.query_message("Orders", f"ORD-{i:08d}")

    def peakmem_scan(self, path):
        with self.opened(path) as store:
            for _ in store.scan(use_threads=False):
                pass

    def peakmem_get_table(self, path):
        with self.opened(path) as store:
            store.get_table("Orders", 0)

    def peakmem_query_table_2000(self, path):
        with self.opened(path) as store:
            store.query_table([f"ORD-{i:08d}" for i in range(0, self.n, 50)], "Orders")

    def peakmem_describe(self, path):
        rmqstore.describe(path, _config())

    def peakmem_verify(self, path):
        for _ in rmqstore.verify(path, _config()):
            pass

    def peakmem_rebuild(self, path):
        rmqstore.rebuild(path, config=_config())


class Consume(_Store):
    """A group that reads a topic of four queues, and the progress of many groups."""

    n = 20_000
    groups = 200

    def setup(self):
        self.make()
        messages = _data.messages(self.n, 256)
        for i in range(0, self.n, 1000):
            self.store.put_messages(messages[i : i + 1000], queue_id=i // 1000 % 4)
        self.offsets = self.store.consumer_offsets
        for group in range(self.groups):
            self.offsets.commit(f"group-{group}", "Orders", 0, 0)
        self.offsets.persist()
        self.at = 0

    def time_consume(self):
        self.at += 1
        with self.store.consume("Orders", f"reader-{self.at}", timeout=0) as consumer:
            for _ in consumer:
                pass

    def time_commit_2000(self):
        self.at += 1
        commit = self.offsets.commit
        for i in range(2000):
            commit(f"group-{i % self.groups}", "Orders", i % 4, self.at + i)

    def time_persist(self):
        self.at += 1
        self.offsets.commit("persisted", "Orders", 0, self.at)
        self.offsets.persist()
