"""RabbitMQ's queue index, version 1: recovering a queue, parsing its segments, and its writer.

A real node of 3.10.8 needs about 5 microseconds a message to recover 1 000 000 embedded messages of 12 bytes after a
kill -9 (`asv_bench/peers/rabbitmq.py` has the two beside each other): both the node and `Recover` read 62 segments of 202 MB,
merge, and collect the references to the message store; the node also starts a process for the queue, so these are not the
same work.  All warm: the files are in the page cache.
"""

import os

import numpy as np

from rmqstore._core import Region
from rmqstore.rabbitmq import _core
from rmqstore.rabbitmq.queue_index import QueueIndex

from . import _data

ENTRY_COUNT = 16384
# What a node of 3.10.8 on OTP 25 keeps of a 12-byte message in the virtual host "/": 175 bytes with the id at 152.
_NAME = b"rabbit_framing_amqp_0_9_1"
_HEAD = (
    b"\x83h\x06d\x00\x0dbasic_messageh\x04d\x00\x08resourcem\x00\x00\x00\x01/d\x00\x08exchangem\x00\x00\x00\x00"
    b"l\x00\x00\x00\x01m\x00\x00\x00\x02qqjh\x06d\x00\x07contenta<d\x00\x04nonem\x00\x00\x00\x03\x10\x00\x02d\x00\x19"
)
_TERM = (
    _HEAD + _NAME + b"l\x00\x00\x00\x01m\x00\x00\x00\x0ctwelve bytesjm\x00\x00\x00\x10" + bytes(16) + b"d\x00\x04true"
)
_ID = len(_TERM) - 16 - 7


def terms(n):
    """`n` message terms that differ in their ids."""
    rows = np.tile(np.frombuffer(_TERM, np.uint8), (n, 1))
    rows[:, _ID : _ID + 16] = np.random.default_rng(1).integers(0, 256, (n, 16), dtype=np.uint8)
    data = rows.tobytes()
    return [data[i : i + len(_TERM)] for i in range(0, len(data), len(_TERM))]


def make(path, n):
    """A queue of `n` embedded messages, as a node leaves it that was killed after its last flush."""
    made = terms(n)
    with QueueIndex.open(path, create=True, segment_entry_count=ENTRY_COUNT) as index:
        for i in range(0, n, 1000):
            index.publish_many(made[i : i + 1000], deliver=True)
        index.flush()


class Recover:
    """1 000 000 messages of 12 bytes, 62 segments: load, merge, collect the references; and entries as columns."""

    timeout = 300
    n = _data.sized(1_000_000)

    def setup_cache(self):
        path = os.path.join(os.getcwd(), "queue")
        make(path, self.n)
        return path

    def setup(self, path):
        self.index = QueueIndex.open(path, read_only=True, segment_entry_count=ENTRY_COUNT)
        self.regions = []
        for number in self.index.segments:
            fd = os.open(os.path.join(path, f"{number}.idx"), os.O_RDONLY)
            self.regions.append((number, Region.map(fd, os.fstat(fd).st_size)))
            os.close(fd)

    def time_recover(self, path):
        with QueueIndex.open(path, read_only=True, segment_entry_count=ENTRY_COUNT) as index:
            index.references()

    def time_recover_without_looking_at_terms(self, path):
        with QueueIndex.open(path, read_only=True, segment_entry_count=ENTRY_COUNT, check_terms=False) as index:
            index.references()

    def time_parse_segments(self, path):
        """Two records a message; the files are mapped already."""
        findings = _core.Findings()
        for number, region in self.regions:
            _core.load_segment(region, _core.Segment(number), ENTRY_COUNT, findings)

    def time_columns(self, path):
        self.index.columns()

    def time_references(self, path):
        self.index.references()

    def time_iterate(self, path):
        """The first 100 000 entries as objects."""
        for _, _ in zip(self.index, range(self.n // 10)):
            pass


class Write:
    """Publish, deliver and ack of 100 000 messages in batches; what is not acked when a flush is due goes to disk."""

    timeout = 120
    params = [1, 10, 100, 1000]
    param_names = ["batch"]
    n = _data.sized(100_000)

    def setup(self, batch):
        self.folder = _data.scratch()
        self.terms = terms(self.n)
        self.index = QueueIndex.open(self.folder, segment_entry_count=ENTRY_COUNT)

    def teardown(self, batch):
        self.index.abandon()
        _data.remove(self.folder)

    def time_publish_deliver_ack(self, batch):
        index = self.index
        for i in range(0, self.n, batch):
            index.ack(index.publish_many(self.terms[i : i + batch], deliver=True))

    def time_publish_deliver(self, batch):
        """All of it reaches the segments."""
        index = self.index
        for i in range(0, self.n, batch):
            index.publish_many(self.terms[i : i + batch], deliver=True)
        index.flush()
