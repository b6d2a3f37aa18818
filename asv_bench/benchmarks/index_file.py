"""Index file at default geometry: put and select, one call and batch, cold and warm apart."""

import os

import numpy as np

from rmqstore import IndexFile

from . import _data


class _Index:
    timeout = 300
    n = 1_000_000

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


class PutCold(_Index):
    """A million puts into a file that was just made: the first touch of every page is in it."""

    number = 1
    repeat = (3, 5, 20.0)
    warmup_time = 0

    def setup(self):
        self.setup_file()

    def time_put_keys_list(self):
        self.index.put_keys(self.keys, self.phy_offsets, self.timestamps)


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
