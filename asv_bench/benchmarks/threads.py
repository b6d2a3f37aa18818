"""Two threads on one store: how much more two readers get done than one, and what a writer and a reader leave each other.

The figures are ratios within one run, for a machine with two idle cores: 2 is twice the work in the same time.  A share is
what a thread gets done beside the other one, as a part of what it gets done alone.
"""

import os
import threading
import time

import numpy as np

from rmqstore import IndexFile, MessageStore
from rmqstore._dispatch import RecordColumns

from . import _data


def _seconds(works):
    """Run each of `works` on a thread of its own; the time until the last one is done."""
    started = threading.Barrier(len(works) + 1)

    def run(work):
        started.wait()
        work()

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    started.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def _gain(works):
    """How much faster two of `works` run together than one after the other; the median of five."""
    gains = []
    for _ in range(5):
        alone = sum(_seconds([work]) for work in works)
        gains.append(alone / _seconds(works))
    return float(np.median(gains))


def _rounds(work, seconds):
    """How often `work` runs within so many seconds."""
    end = time.perf_counter() + seconds
    rounds = 0
    while time.perf_counter() < end:
        work()
        rounds += 1
    return rounds


class Readers:
    """Two threads that read the same files."""

    timeout = 600
    number = repeat = 1
    n = 1_000_000

    def setup_cache(self):
        # asv runs this in a folder that it deletes afterwards.
        folder = os.getcwd()
        index = IndexFile.create(os.path.join(folder, "20260101000000000"), _data.default_config())
        with index:
            phy_offsets, timestamps = _data.columns(self.n)
            for part in range(5):
                # Chains of five: the hashes of a part differ from those of another by a multiple of the number of slots.
                hashes = (np.arange(self.n, dtype=np.int64) * 5 + part * index.slot_num) % 2**31
                index.put_hashes(hashes.astype(np.int32), phy_offsets, timestamps)
        with MessageStore.open(os.path.join(folder, "store"), config=_data.default_config()) as store:
            messages = _data.messages(200_000, 256)
            for i in range(0, len(messages), 1000):
                store.put_messages(messages[i : i + 1000])
        return folder

    def setup(self, folder):
        self.index = IndexFile.open(os.path.join(folder, "20260101000000000"), _data.default_config(), read_only=True)
        self.store = MessageStore.open(os.path.join(folder, "store"), config=_data.default_config(), read_only=True)
        rng = np.random.default_rng(1)
        self.hashes = [(rng.integers(0, self.n, 500_000) * 5).astype(np.int32) for _ in range(2)]
        self.keys = [[f"Orders#{h}" for h in hashes.tolist()] for hashes in self.hashes]
        for hashes in self.hashes:
            self.index.select_hashes(hashes)
        self.scan()

    def teardown(self, folder):
        self.index.close()
        self.store.close()

    def scan(self):
        log, columns = self.store.commit_log, RecordColumns()
        for _ in log.stretches(log.min_offset, log.max_offset, columns, resume=False):
            pass

    def track_select_hashes(self, folder):
        return _gain([lambda hashes=hashes: self.index.select_hashes(hashes) for hashes in self.hashes])

    def track_select_phy_offsets(self, folder):
        return _gain([lambda keys=keys: self.index.select_phy_offsets(keys) for keys in self.keys])

    def track_scan_crc_columns(self, folder):
        return _gain([self.scan, self.scan])

    for _method in (track_select_hashes, track_select_phy_offsets, track_scan_crc_columns):
        _method.unit = "times the work of one thread"


class WriterAndReader:
    """A thread that puts and one that reads, each in a loop for half a second, alone and then together."""

    timeout = 600
    number = repeat = 1
    params = [["put_message", "put_messages_1000"], ["get_message", "query_message", "scan"], ["writer", "reader"]]
    param_names = ["writes", "reads", "share of"]
    seconds = 0.5

    def setup(self, writes, reads, side):
        self.folder = _data.scratch()
        self.store = store = MessageStore.open(os.path.join(self.folder, "store"), config=_data.default_config())
        self.messages = _data.messages(1000, 256)
        for _ in range(50):
            store.put_messages(self.messages)
        log, columns = store.commit_log, RecordColumns()
        end = log.max_offset

        def scan():
            for _ in log.stretches(0, end, columns, resume=False):
                pass

        self.write = {
            "put_message": lambda: store.put_message(self.messages[0]),
            "put_messages_1000": lambda: store.put_messages(self.messages),
        }[writes]
        self.read = {
            "get_message": lambda: store.get_message("Orders", 0, 1000, max_num=32),
            "query_message": lambda: store.query_message("Orders", "ORD-00000500", 1),
            "scan": scan,
        }[reads]

    def teardown(self, writes, reads, side):
        self.store.close()
        _data.remove(self.folder)

    def track_share(self, writes, reads, side):
        done = {}

        def loop(name, work):
            done[name] = _rounds(work, self.seconds)

        mine = self.write if side == "writer" else self.read
        alone = _rounds(mine, self.seconds)
        _seconds([lambda: loop("writer", self.write), lambda: loop("reader", self.read)])
        return done[side] / alone

    track_share.unit = "of what it does alone"
