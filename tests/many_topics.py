"""A store of many topics, laid out in a moment: queue files that are mostly holes, over the records of one topic.

Owns no test.  A writer makes and forces three files a queue, which takes minutes for thousands; whoever only looks at queues
compares no unit with the topic of its record.
"""

from __future__ import annotations

import struct
from pathlib import Path

from rmqstore import Message, MessageStore, StoreConfig

UNIT = struct.Struct(">qiq")
CONFIG = StoreConfig(
    mapped_file_size_commit_log=1 << 20, max_hash_slot_num=100, max_index_num=400, clean_resource_interval=0,
    populate_ahead_size=0,
)  # fmt: skip


def make(path: Path, topics: int, units: int = 3, file_size: int = 6_000_000) -> Path:
    """A store with topics `Topic-00000` and so on, each of one queue, the n-th with `units` + n % 5 messages."""
    with MessageStore.open(path, config=CONFIG) as store:
        found = [(put.phy_offset, put.size) for put in store.put_messages([Message("Records", b"x" * 50)] * (units + 4))]
    for number in range(topics):
        folder = path / "consumequeue" / f"Topic-{number:05d}" / "0"
        folder.mkdir(parents=True)
        with open(folder / ("0" * 20), "wb") as file:
            file.write(b"".join(UNIT.pack(*each, 0) for each in found[: units + number % 5]))
            file.truncate(file_size)
    return path
