"""The first touch of file pages: paid by the writer, by a thread ahead of it, or before the clock starts.

"cold": nobody touches the pages before the writer.  "ahead": a thread of the store makes them ready (its default).
"warm": every page was made ready before.  The thread needs a processor of its own; on a busy machine it comes late.
"""

import os
import resource
import time

from rmqstore import IndexFile, Message, MessageStore, StoreConfig

from . import _data


class FirstAppend:
    """128 MiB of messages into a new store of default geometry, dispatch to queue and index included."""

    timeout = 300
    params = [["cold", "ahead", "warm"], [256, 1024]]
    param_names = ["pages", "body size"]
    number = 1
    repeat = (3, 10, 30.0)
    warmup_time = 0
    size = 128 << 20

    def setup(self, pages, body_size):
        self.folder = _data.scratch()
        options = {} if pages == "ahead" else {"populate_ahead_size": 0}
        self.store = MessageStore.open(os.path.join(self.folder, "store"), config=StoreConfig(**options))
        self.messages = _data.messages(1000, body_size)
        # The first batch makes the files.
        self.store.put_messages(self.messages)
        if pages == "warm":
            self.store.commit_log.files.populate(0, 2 * self.size)
            queue = self.store.queues.find("Orders", 0).files
            queue.last().reserve(6_000_000)
            queue.populate(0, 6_000_000)
            self.store.index_service.newest().populate()

    def time_put_messages(self, pages, body_size):
        while self.store.commit_log.max_offset < self.size:
            self.store.put_messages(self.messages)

    def track_system_time(self, pages, body_size):
        # The writer's page faults, which hardly depend on what else the machine does.
        before, start = resource.getrusage(resource.RUSAGE_THREAD).ru_stime, self.store.commit_log.max_offset
        self.time_put_messages(pages, body_size)
        mebibytes = (self.store.commit_log.max_offset - start) / (1 << 20)
        return (resource.getrusage(resource.RUSAGE_THREAD).ru_stime - before) / mebibytes * 1e3

    track_system_time.unit = "ms per MiB of log"

    def teardown(self, pages, body_size):
        self.store.close()
        _data.remove(self.folder)


class PacedPut:
    """Messages of 1 KiB one at a time, some 30 MB/s with pauses between: how long the slowest puts take."""

    timeout = 300
    params = ["cold", "ahead"]
    param_names = ["pages"]
    n = 30_000

    def setup(self, pages):
        self.folder = _data.scratch()
        options = {} if pages == "ahead" else {"populate_ahead_size": 0}
        self.store = MessageStore.open(os.path.join(self.folder, "store"), config=StoreConfig(**options))

    def _percentile(self, part):
        message = Message("Orders", bytes(1024))
        nanoseconds = []
        for number in range(self.n):
            begin = time.perf_counter_ns()
            self.store.put_message(message, queue_id=0)
            nanoseconds.append(time.perf_counter_ns() - begin)
            if number % 400 == 399:
                time.sleep(0.01)
        nanoseconds.sort()
        return nanoseconds[int(self.n * part)] / 1e3

    def track_99(self, pages):
        return self._percentile(0.99)

    def track_999(self, pages):
        return self._percentile(0.999)

    track_99.unit = track_999.unit = "µs"

    def teardown(self, pages):
        self.store.close()
        _data.remove(self.folder)


class FirstPutKeys:
    """A million keys into a new index file of default geometry; "populated": `IndexFile.populate` is in the time."""

    timeout = 300
    params = ["cold", "populated", "warm"]
    param_names = ["pages"]
    number = 1
    repeat = (3, 10, 30.0)
    warmup_time = 0
    n = 1_000_000

    def setup(self, pages):
        self.folder = _data.scratch()
        self.index = IndexFile.create(os.path.join(self.folder, "20260101000000000"), _data.default_config())
        self.keys = _data.keys(self.n)
        self.phy_offsets, self.timestamps = _data.columns(self.n)
        if pages == "warm":
            self.index.populate(self.n)

    def time_put_keys(self, pages):
        if pages == "populated":
            self.index.populate(self.n)
        self.index.put_keys(self.keys, self.phy_offsets, self.timestamps)

    def teardown(self, pages):
        self.index.close()
        _data.remove(self.folder)
