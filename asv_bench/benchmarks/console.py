"""The web console and the metrics over a store of many topics: what an operator waits for when much is wrong.

Answers are asked of the application in this process, without a network; the store is opened before.
"""

import os
import struct

import numpy as np

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.offline import metrics
from rmqstore.offline.timeline import timeline

from ._data import TIME, remove, scratch, sized

_UNIT = struct.Struct(">qiq")


def store_of_many_topics(path, topics, queues=1, units=3, file_size=6_000_000):
    """A store with `topics` topics whose queues have `units` messages each, in files that are mostly holes.

    The records are those of one topic: a store that makes ten thousand files in order takes minutes, and nothing that is
    measured here compares a unit with the topic of its record.
    """
    clock = iter(range(TIME, TIME + 10**9, 1000)).__next__
    with MessageStore.open(path, config=StoreConfig(clock=clock, clean_resource_interval=0)) as store:
        number = min(topics * queues * units, 50_000)
        found = [(put.phy_offset, put.size) for put in store.put_messages([Message("Records", b"body")] * number)]
    at = 0
    for topic in range(topics):
        for queue_id in range(queues):
            folder = os.path.join(path, "consumequeue", f"Topic-{topic:05d}", str(queue_id))
            os.makedirs(folder)
            with open(os.path.join(folder, "0" * 20), "wb") as file:
                begin = at % (number - units + 1)
                file.write(b"".join(_UNIT.pack(*found[i], 0) for i in range(begin, begin + units)))
                file.truncate(file_size)
            at += units
    return path


class Topics:
    """A store of 10 000 topics."""

    timeout = 600

    def setup_cache(self):
        return store_of_many_topics(os.path.join(scratch(), "store"), sized(10_000))

    def setup(self, path):
        from starlette.testclient import TestClient

        from rmqstore.console import app

        self.client = TestClient(app(path), base_url="http://localhost")
        assert self.client.get("/healthz").status_code == 200

    def teardown(self, path):
        self.client.close()

    def time_overview_first(self, path):
        """The first page after the start: the store is opened for it."""
        from starlette.testclient import TestClient

        from rmqstore.console import app

        assert TestClient(app(path), base_url="http://localhost").get("/").status_code == 200

    def time_overview_again(self, path):
        """Another page of the list, soon after."""
        assert self.client.get("/?first=200").status_code == 200

    def time_metrics_first(self, path):
        """The first scrape after the start: the store is opened for it."""
        from starlette.testclient import TestClient

        from rmqstore.console import app

        answer = TestClient(app(path), base_url="http://localhost").get("/metrics")
        assert answer.content.count(b"\nrmqstore_topic_messages{") == sized(10_000) + 1

    def time_metrics(self, path):
        """A scrape by itself."""
        assert b"rmqstore_topic_messages" in metrics.text(metrics.collect(path))


class Timeline:
    """Messages and bytes over time, of a log that is too long to be gone over."""

    def setup(self):
        self.folder = scratch()
        path = os.path.join(self.folder, "store")
        bodies = [bytes(np.random.default_rng(1).integers(0, 256, 1000, np.uint8))] * 1000
        with MessageStore.open(path) as store:
            for _ in range(sized(200)):
                store.put_messages([Message("Orders", body) for body in bodies])
        self.store = MessageStore.open(path, read_only=True)

    def teardown(self):
        self.store.close()
        remove(self.folder)

    def time_timeline(self):
        timeline(self.store)
