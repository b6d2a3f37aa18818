"""Threads: how much more several get done than one, and what a writer and a reader of one store leave each other.

The figures are ratios within one run, for a machine with an idle core for each thread: 2 is twice the work in the same time.
A share is the rate of a thread while the other one runs, divided by its rate alone.  `SingleCalls` is
for a free-threaded Python (`ci/pythons.sh 3.14t` makes an environment); with a GIL its figures stay at 1 or below.
"""

import os
import threading
import time

import numpy as np

from rmqstore import IndexFile, MessageStore, StoreConfig
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


class SingleCalls:
    """One, two and four threads that each make single calls in a loop; together, as a multiple of what one makes alone."""

    timeout = 600
    number = repeat = 1
    params = [
        ["get_message", "query_message", "put_key, a file each", "put_message, one store", "put_message, a store each"],
        [1, 2, 4],
    ]
    param_names = ["calls", "threads"]
    seconds = 0.25
    rounds = 3
    calls = 200  # between two looks at the clock
    n = 20_000
    # Room for all rounds, without a gibibyte a thread.
    config = StoreConfig(
        mapped_file_size_commit_log=256 << 20, max_hash_slot_num=1_000_000, max_index_num=_data.sized(8_000_000)
    )

    def setup(self, calls, threads):
        self.folder = _data.scratch()
        self.closing = []
        self.messages = _data.messages(self.n, 256)
        if calls == "put_key, a file each":
            self.works = [self.putting_keys(self.index(number)) for number in range(threads)]
        elif calls == "put_message, a store each":
            self.works = [self.putting(self.store(number), 0) for number in range(threads)]
        else:
            store = self.store(0)
            if calls != "put_message, one store":
                store.put_messages(self.messages)
            make = {
                "get_message": self.getting,
                "query_message": self.querying,
                "put_message, one store": self.putting,
            }[calls]
            self.works = [make(store, number) for number in range(threads)]

    def teardown(self, calls, threads):
        for each in self.closing:
            each.close()
        _data.remove(self.folder)

    def store(self, number):
        self.closing.append(MessageStore.open(os.path.join(self.folder, str(number)), config=self.config))
        return self.closing[-1]

    def index(self, number):
        path = os.path.join(self.folder, f"2026010100000000{number}")
        self.closing.append(IndexFile.create(path, self.config))
        return self.closing[-1]

    def getting(self, store, number):
        # Each thread in a part of its own.
        places = [(number * 5000 + i * 37) % (self.n - 32) for i in range(self.calls)]

        def work():
            for place in places:
                store.get_message("Orders", 0, place, 1)

        return work

    def querying(self, store, number):
        keys = [f"ORD-{(number * 5000 + i * 37) % self.n:08d}" for i in range(self.calls)]

        def work():
            for key in keys:
                store.query_message("Orders", key, 1)

        return work

    def putting(self, store, number):
        messages = self.messages[number * self.calls : (number + 1) * self.calls]

        def work():
            for message in messages:
                store.put_message(message, number)

        return work

    def putting_keys(self, index):
        keys = _data.keys(self.calls)

        def work():
            for key in keys:
                index.put_key(key, 0, _data.TIME)

        return work

    def track_gain(self, calls, threads):
        gains = []
        for work in self.works:
            work()
        for _ in range(self.rounds):
            alone = _rounds(self.works[0], self.seconds)
            done = []
            _seconds([lambda work=work, done=done: done.append(_rounds(work, self.seconds)) for work in self.works])
            gains.append(sum(done) / alone)
        return float(np.median(gains))

    track_gain.unit = "times the calls of one thread"
