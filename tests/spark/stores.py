"""Small stores for the Spark tests, and what one process reads from them.

Owns making stores with known contents, and damaging copies of them.  What is expected of Spark is what one scan gives.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rmqstore import Message, MessageStore, StoreConfig
from rmqstore.spark.plan import LogPlan

SEGMENT = 16384
START = 1_700_000_000_000


def small_config(**changes: Any) -> StoreConfig:
    """Segments of 16 KiB, small queues and index files, and a clock that advances by a second with each put."""
    ticks = iter(range(START, START + 10**9, 1000))
    return StoreConfig(
        **{
            "mapped_file_size_commit_log": SEGMENT,
            "mapped_file_size_consume_queue": 400,
            "max_hash_slot_num": 50,
            "max_index_num": 200,
            "clock": lambda: next(ticks),
            **changes,
        }
    )


def messages(num: int, first: int = 0) -> Iterator[tuple[Message, int]]:
    """`num` messages of two topics, four queues and three tags, with their queues; numbered in their bodies."""
    for i in range(first, first + num):
        topic = ("Orders", "Stock")[i % 3 == 0]
        yield (
            Message(
                topic,
                b"message %06d " % i + b"x" * (i * 37 % 300),
                keys=[f"K{i}", f"G{i % 7}"],
                tags=("EU", "US", None)[i % 3],
                properties={"number": str(i)},
                born_timestamp=START + i,
            ),
            i % 2,
        )


def make_store(path: Path, num: int = 400, **changes: Any) -> Path:
    """A store with `num` messages, closed in order."""
    with MessageStore.open(path, config=small_config(**changes)) as store:
        for message, queue_id in messages(num):
            store.put_message(message, queue_id)
    return path


def overwrite(path: Path, phy_offset: int, data: bytes) -> None:
    """Change bytes of the log at an absolute offset."""
    base = phy_offset - phy_offset % SEGMENT
    with open(path / "commitlog" / f"{base:020d}", "r+b") as file:
        file.seek(phy_offset - base)
        file.write(data)


def look_alike(phy_offset: int, size: int, *, topic: bytes = b"Orders", queue_offset: int = 0, total: int = 0) -> bytes:
    """A record of `size` bytes that is right in every detail for a reader at `phy_offset`: magic, lengths, offset, CRC.

    With `total` it says that it has so many; what follows its body must then be written by somebody else.
    """
    from rmqstore._core import MAGIC_V1, crc32

    body = b"L" * (size - 91 - len(topic))
    parts = [
        struct.pack(">iiiiiqqi", total or size, MAGIC_V1, crc32(body) & 0x7FFFFFFF, 0, 0, queue_offset, phy_offset, 0),
        struct.pack(">q4siq4siiq", START, bytes(4), 1, START, bytes(4), 1, 0, 0),
        struct.pack(">i", len(body)) + body + bytes([len(topic)]) + topic + b"\0\0",
    ]
    record = b"".join(parts)
    assert len(record) == size
    return record


def scanned(
    path: str | os.PathLike[str], columns: list[str] | None = None, config: StoreConfig | None = None, **choice: Any
) -> list[dict[str, Any]]:
    """The rows of one scan of the whole log, to its end behind damage."""
    plan = LogPlan.of(path, config)
    with MessageStore.open(path, config=config, read_only=True) as store:
        store.commit_log.set_end(plan.end)
        return [row for batch in store.scan(columns, **choice) for row in batch.to_pylist()]
