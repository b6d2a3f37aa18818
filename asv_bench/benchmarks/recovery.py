"""Opening a store: after a crash with all of the log to look at, and after an orderly close.

The same beside RocketMQ's own store, with ten times as many messages: `asv_bench/peers/recovery.py`.
"""

import os
import shutil

from rmqstore import MessageStore

from . import _data


class Open:
    """200 000 messages of 256 bytes in the page cache; "lost" is without queues and index, all of which is dispatched."""

    timeout = 300
    number = 1
    repeat = (3, 10, 20.0)
    warmup_time = 0
    params = ["closed", "killed", "lost"]
    param_names = ["end before"]
    n = _data.sized(200_000)

    def setup_cache(self):
        # asv runs this in a folder that it deletes afterwards.
        path = os.path.join(os.getcwd(), "store")
        with MessageStore.open(path, config=_data.default_config()) as store:
            messages = _data.messages(self.n, 256)
            for i in range(0, self.n, 1000):
                store.put_messages(messages[i : i + 1000], queue_id=i // 1000 % 4)
        return path

    def setup(self, path, end):
        self.folder = _data.scratch()
        self.path = os.path.join(self.folder, "store")
        shutil.copytree(path, self.path, copy_function=_data.copy_sparse)
        if end != "closed":
            with open(os.path.join(self.path, "abort"), "w"):
                pass
            os.unlink(os.path.join(self.path, "checkpoint"))
        if end == "lost":
            shutil.rmtree(os.path.join(self.path, "consumequeue"))
            shutil.rmtree(os.path.join(self.path, "index"))
        # Otherwise the first fsync of the opening waits for the copy.
        os.sync()
        self.store = None

    def time_open(self, path, end):
        self.store = MessageStore.open(self.path, config=_data.default_config())

    def teardown(self, path, end):
        if self.store is not None:
            self.store.close()
        _data.remove(self.folder)
