"""Index file at default geometry: put and select, one call and batch, warm; `cold` has first touches."""

import os

import numpy as np

from rmqstore import IndexFile

from . import _data


class _Index:
    timeout = 300
    n = _data.sized(1_000_000)

    def setup_file(self):
        self.folder = _data.scratch()
        self.index = IndexFile.create(os.path.join(self.folder, "20260101000000000"), _data.default_config())
        self.keys = _data.keys(self.n)
        self.phy_offsets, self.timestamps = _data.columns(self.n)

    def empty(self):
        # The slots keep what they hold: entry numbers from before count as none, and the pages stay touched.
        self.index.write_header(0, 0, 0, 0, 0, 0)

    def teardown(self):
        self.index.close()
        _data.remove(self.folder)


class PutWarm(_Index):
    """A million puts into pages that were touched before."""

    number = 1
    repeat = (3, 10, 20.0)
    warmup_time = 0

    def setup(self):
        self.setup_file()
        self.index.put_keys(self.keys, self.phy_offsets, self.timestamps)
        self.empty()
        self.arrow = None
        try:
            import pyarrow

            self.arrow = pyarrow.array(self.keys)
        except ImportError:
            pass

    def time_put_keys_list(self):
        self.index.put_keys(self.keys, self.phy_offsets, self.timestamps)

    def time_put_keys_arrow(self):
        if self.arrow is None:
            raise NotImplementedError
        self.index.put_keys(self.arrow, self.phy_offsets, self.timestamps)

    def time_put_key(self):
        put_key = self.index.put_key
        for key in self.keys:
            put_key(key, 256, _data.TIME)


class SelectWarm(_Index):
    """Queries for a million keys that are there, in the order of the file and in random order."""

    number = 1
    repeat = (3, 10, 20.0)
    params = ["ordered", "random"]
    param_names = ["order"]

    def setup(self, order):
        self.setup_file()
        self.index.put_keys(self.keys, self.phy_offsets, self.timestamps)
        if order == "random":
            self.keys = [self.keys[i] for i in np.random.default_rng(1).permutation(self.n)]

    def teardown(self, order):
        super().teardown()

    def time_select_phy_offset(self, order):
        select = self.index.select_phy_offset
        for key in self.keys:
            select(key)

    def time_select_phy_offsets(self, order):
        self.index.select_phy_offsets(self.keys)


class KeyLengths(_Index):
    """A million puts and queries with whole keys of so many characters."""

    number = 1
    repeat = (3, 10, 20.0)
    warmup_time = 0
    params = [8, 16, 32, 64, 200]
    param_names = ["characters"]

    def setup(self, characters):
        self.setup_file()
        self.keys = [f"{i:08d}".rjust(characters, "T") for i in range(self.n)]
        self.index.put_keys(self.keys, self.phy_offsets, self.timestamps)

    def teardown(self, characters):
        super().teardown()

    def time_put_keys_list(self, characters):
        self.empty()
        self.index.put_keys(self.keys, self.phy_offsets, self.timestamps)

    def time_select_phy_offsets(self, characters):
        self.index.select_phy_offsets(self.keys)


class Chains(_Index):
    """200 000 queries in random order whose chains have so many entries, of which one or none has the key's hash."""

    number = 1
    repeat = (3, 10, 20.0)
    params = [[1, 2, 5, 20, 50], ["hit", "miss"]]
    param_names = ["entries", "key"]
    asked = 200_000

    def setup(self, entries, key):
        self.setup_file()
        index, slots = self.index, self.n // entries // 5 * 4
        # Entry after entry in other slots; the numbers of a chain differ by the number of slots.
        hashes = [(np.arange(slots, dtype=np.int64) + link * index.slot_num) % 2**31 for link in range(entries)]
        for each in hashes:
            index.put_hashes(each.astype(np.int32), *_data.columns(slots))
        chosen = np.random.default_rng(1).integers(0, slots, self.asked)
        wanted = hashes[-1][chosen] if key == "hit" else (chosen + (entries + 7) * index.slot_num) % 2**31
        self.hashes = wanted.astype(np.int32)
        self.numbers = self.hashes.tolist()

    def teardown(self, entries, key):
        super().teardown()

    def time_select_hash(self, entries, key):
        select = self.index.select_hash
        for key_hash in self.numbers:
            select(key_hash)

    def time_select_hashes(self, entries, key):
        self.index.select_hashes(self.hashes)


class SelectFull(_Index):
    """Queries for a million random keys of the twenty million that fill a file; every one misses the caches."""

    number = 1
    repeat = (3, 5, 60.0)
    timeout = 600

    def setup(self):
        self.setup_file()
        for first in range(0, self.index.index_num - 1, self.n):
            count = min(self.n, self.index.index_num - 1 - first)
            keys = [f"Orders#ORD-{i:08d}" for i in range(first, first + count)]
            self.index.put_keys(keys, self.phy_offsets[:count], self.timestamps[:count])
        chosen = np.random.default_rng(1).integers(0, self.index.index_num - 1, self.n)
        self.keys = [f"Orders#ORD-{i:08d}" for i in chosen.tolist()]

    def time_select_phy_offset(self):
        select = self.index.select_phy_offset
        for key in self.keys:
            select(key)

    def time_select_phy_offsets(self):
        self.index.select_phy_offsets(self.keys)
