"""Tiered storage beside a plain log with the same messages, warm: scans, gets and exact queries by key.

The plain scan is the peer: a flat file is a run of the same records, found by the units of its queue.
"""

import os
import shutil
import struct

from rmqstore import MessageStore
from rmqstore.flatfile.flat_files import flat_file_name, name_prefix
from rmqstore.flatfile.flat_index import flat_index_hash

from . import _data
from .columns import COLUMNS, _Store

_SLOTS = 500_000


def write_tiered(store, path):
    """Write what `store` has as flat files below `path`, one COMMIT_LOG and one CONSUME_QUEUE file a queue, and an index file."""
    base = os.path.join(path, f"{name_prefix('C')}_C", "B")
    chains = {}
    for topic in store.topics():
        for queue_id in store.queue_ids(topic):
            log, units, at = bytearray(), bytearray(), 0
            queue = store.queues.find(topic, queue_id)
            for unit in queue.read(0, queue.max_queue_offset):
                segment = store.commit_log.segment(unit.phy_offset)
                record = bytearray(segment.region.read(unit.phy_offset - segment.file_from_offset, unit.size))
                struct.pack_into(">q", record, 28, at)
                units += struct.pack(">qiq", at, unit.size, unit.tags_code)
                message = store.commit_log.look_up(unit.phy_offset)
                for key in (message.unique_key, *message.keys):
                    key_hash = flat_index_hash(topic, key)
                    item = struct.pack(">iiiqii", key_hash, 0, queue_id, at, unit.size, 0)
                    chains.setdefault(key_hash % _SLOTS, []).append(item)
                log += record
                at += unit.size
            for kind, data in (("COMMIT_LOG", log), ("CONSUME_QUEUE", units)):
                folder = os.path.join(base, topic, str(queue_id), kind)
                os.makedirs(folder)
                with open(os.path.join(folder, flat_file_name(0)), "wb") as file:
                    file.write(data)
    slots, items = bytearray(), bytearray()
    for slot in range(_SLOTS):
        chain = chains.get(slot, ())
        slots += struct.pack(">ii", 28 + 8 * _SLOTS + len(items), 28 * len(chain))
        items += b"".join(reversed(chain))
    folder = os.path.join(base, "rmq_sys_INDEX", "0", "INDEX")
    os.makedirs(folder)
    with open(os.path.join(folder, flat_file_name(0)), "wb") as file:
        file.write(struct.pack(">Iqqii", 0xBCC50285, 0, 0, len(chains), len(items) // 28) + slots + items)


class _Tiered(_Store):
    """The messages of `columns._Store`, in flat files and in a plain log."""

    def setup(self, *params):
        super().setup()
        self.path = os.path.join(self.folder, "tiered")
        write_tiered(self.store, self.path)
        self.tiered = MessageStore.open(self.path, read_only=True, tiered=self.path)
        for _ in self.tiered.scan(["corrupt"]):
            pass

    def teardown(self, *params):
        self.tiered.close()
        shutil.rmtree(self.path)
        super().teardown()


class Scan(_Tiered):
    """All 200 000 messages, on one thread and on several; the log is the peer."""

    params = [["tiered", "log"], list(COLUMNS), [False, True]]
    param_names = ["where", "columns", "threads"]

    def time_scan(self, where, columns, threads):
        store = self.tiered if where == "tiered" else self.store
        for _ in store.scan(COLUMNS[columns], use_threads=threads):
            pass


class Messages(_Tiered):
    """Messages of one queue in gets of 32, and exact queries by key."""

    params = [["tiered", "log"]]
    param_names = ["where"]
    keys = _data.sized(1000)

    def _store(self, where):
        return self.tiered if where == "tiered" else self.store

    def time_get(self, where):
        store, at = self._store(where), 0
        while len(found := store.get_message("Orders", 0, at)):
            at = found.next_queue_offset

    def time_query(self, where):
        store = self._store(where)
        for number in range(0, 4 * self.keys, 4):
            store.query_message("Orders", f"ORD-{number:08d}")
