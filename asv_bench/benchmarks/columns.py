"""Arrow columns out of a store of default geometry, warm: scans by what is asked for, and with filters."""

import os

import numpy as np

from rmqstore import Message, MessageStore

from . import _data

COLUMNS = {
    "all": None,
    "handful": ["topic", "queue_id", "queue_offset", "keys", "tags", "store_timestamp", "body", "corrupt"],
    "no body": ["topic", "queue_id", "queue_offset", "keys", "tags", "store_timestamp"],
    "numbers": ["queue_id", "queue_offset", "phy_offset", "size", "store_timestamp"],
    "corrupt": ["corrupt"],
}


class _Store:
    """200 000 messages with records of 363 bytes: three in four of them of one topic."""

    timeout = 300
    number = 1
    repeat = (3, 10, 20.0)
    n = _data.sized(200_000)

    def setup(self, *params):
        self.folder = _data.scratch()
        self.store = MessageStore.open(os.path.join(self.folder, "store"), config=_data.default_config())
        body = bytes(i * 7 % 251 for i in range(197))
        for first in range(0, self.n, 1000):
            messages = [
                Message(
                    "Stock" if i % 4 == 3 else "Orders",
                    body,
                    keys=[f"ORD-{i:08d}"],
                    tags=("created", "paid", "shipped")[i % 3],
                    properties={"UNIQ_KEY": f"7F0000010001{i:020X}", "WAIT": "true"},
                )
                for i in range(first, first + 1000)
            ]
            self.store.put_messages(messages, queue_id=first // 1000 % 4)
        for _ in self.store.scan(["corrupt"]):
            pass

    def teardown(self, *params):
        self.store.close()
        _data.remove(self.folder)


class Scan(_Store):
    """The whole log, 200 000 messages, CRCs included where ``corrupt`` is asked for, on one thread and on several."""

    params = [list(COLUMNS), [8192, 65536]]
    param_names = ["columns", "batch size"]

    def time_scan(self, columns, batch_size):
        for _ in self.store.scan(COLUMNS[columns], batch_size=batch_size, use_threads=False):
            pass

    def time_scan_threads(self, columns, batch_size):
        for _ in self.store.scan(COLUMNS[columns], batch_size=batch_size):
            pass

    def peakmem_scan(self, columns, batch_size):
        for _ in self.store.scan(COLUMNS[columns], batch_size=batch_size, use_threads=False):
            pass

    def peakmem_scan_threads(self, columns, batch_size):
        for _ in self.store.scan(COLUMNS[columns], batch_size=batch_size):
            pass


class Filter(_Store):
    """The handful of columns of the messages that a filter keeps, on one thread and on several."""

    def time_topic(self):
        for _ in self.store.scan(COLUMNS["handful"], topic="Stock", use_threads=False):
            pass

    def time_topic_threads(self):
        for _ in self.store.scan(COLUMNS["handful"], topic="Stock"):
            pass

    def time_tags(self):
        for _ in self.store.scan(COLUMNS["handful"], tags="paid", use_threads=False):
            pass

    def time_tags_threads(self):
        for _ in self.store.scan(COLUMNS["handful"], tags="paid"):
            pass

    def time_nothing_found(self):
        for _ in self.store.scan(COLUMNS["handful"], topic="NoSuchTopic", use_threads=False):
            pass

    def time_nothing_found_threads(self):
        for _ in self.store.scan(COLUMNS["handful"], topic="NoSuchTopic"):
            pass


class Views(_Store):
    """The whole log with views instead of copies."""

    params = ["all", "handful"]
    param_names = ["columns"]

    def time_scan(self, columns):
        for _ in self.store.scan(COLUMNS[columns], use_threads=False, views=True):
            pass

    def time_scan_threads(self, columns):
        for _ in self.store.scan(COLUMNS[columns], views=True):
            pass


class LazyFrame(_Store):
    """What a Polars query costs: an aggregation over the log, and a key, for which no log is read."""

    def setup(self):
        super().setup()
        import polars

        from rmqstore.polars import scan_store

        frame = scan_store(self.store)
        self.lengths = frame.group_by("topic").agg(polars.col("body").bin.size().sum())
        self.key = frame.filter(polars.col("topic") == "Orders", polars.col("keys").list.contains("ORD-00000100"))

    def time_lengths_by_topic(self):
        self.lengths.collect()

    def time_key(self):
        assert len(self.key.collect()) == 1


class Table(_Store):
    """Tables of a queue and of keys."""

    def setup(self):
        super().setup()
        chosen = np.random.default_rng(1).integers(0, self.n // 4, 20_000) * 4
        self.keys = [f"ORD-{i:08d}" for i in chosen]

    def time_get_table(self):
        for queue_id in range(4):
            self.store.get_table("Orders", queue_id, columns=COLUMNS["handful"])

    def time_query_table_20000(self):
        self.store.query_table(self.keys, "Orders", COLUMNS["handful"])

    def time_query_table_20000_missing(self):
        self.store.query_table(self.keys, "Stock", COLUMNS["handful"])
