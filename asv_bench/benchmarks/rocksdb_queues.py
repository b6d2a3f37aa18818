"""Queues in RocksDB: how fast their units are read, and how fast a database that lags is completed from the log."""

import os
import shutil

from rmqstore import MessageStore
from rmqstore.offline.rebuild_queue_database import rebuild_queue_database

from . import _data


class RocksDBQueues:
    """400 000 messages of 256 bytes in four queues, in the page cache; "behind" has nothing of them in the database."""

    timeout = 300
    number = 1
    repeat = (3, 10, 20.0)
    warmup_time = 0
    params = ["whole", "behind"]
    param_names = ["database"]
    n = _data.sized(400_000)

    def setup_cache(self):
        # asv runs this in a folder that it deletes afterwards.
        path = os.path.join(os.getcwd(), "store")
        config = _data.default_config()
        with MessageStore.open(path, config=config) as store:
            messages = _data.messages(self.n, 256)
            for i in range(0, self.n, 1000):
                store.put_messages(messages[i : i + 1000], queue_id=i // 1000 % 4)
        rebuild_queue_database(path, config)
        return path

    def setup(self, path, database):
        self.folder = _data.scratch()
        self.path = path
        if database == "behind":
            self.path = os.path.join(self.folder, "store")
            os.mkdir(self.path)
            os.symlink(os.path.join(path, "commitlog"), os.path.join(self.path, "commitlog"))
            os.mkdir(os.path.join(self.path, "empty"))
            with MessageStore.open(os.path.join(self.path, "empty"), config=_data.default_config()):
                pass
            rebuild_queue_database(os.path.join(self.path, "empty"), _data.default_config())
            source = os.path.join(self.path, "empty", "consumequeue")
            shutil.copytree(source, os.path.join(self.path, "consumequeue"))

    def time_open_and_read_units(self, path, database):
        with MessageStore.open(self.path, read_only=True, config=_data.default_config()) as store:
            num = 0
            for queue in store.queues:
                at, end = queue.bounds(store.commit_log.min_offset)
                while at < end:
                    count = len(queue.units(at, end)[0])
                    at, num = at + count, num + count
            assert num == self.n

    def teardown(self, path, database):
        _data.remove(self.folder)
