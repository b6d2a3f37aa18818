"""Sizes beyond 32 bits and many files: default geometry, offsets above 2**40, ten thousand files with few mapped.

Large files are sparse: what a test writes on disk stays small.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import oracle
import pytest

from rmqstore import GeometryError, IndexFile, Message, MessageStore, StoreConfig
from rmqstore.commit_log import Blank
from rmqstore.consume_queue import ConsumeQueue
from rmqstore.mapped_file import MappedFilePool

T0 = 1700000000000
GIB = 1 << 30
FAR = 1024 * GIB  # 2**40
DEFAULT = oracle.geometry()


def sparse_file(path: Path, size: int, pieces: dict[int, bytes]) -> None:
    """A file of `size` bytes that holds `pieces` (position: bytes) and holes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        for pos, data in pieces.items():
            file.seek(pos)
            file.write(data)
        file.truncate(size)


def used_bytes(root) -> int:
    """What the files below `root` take on disk."""
    return sum(os.stat(os.path.join(folder, name)).st_blocks * 512 for folder, _, names in os.walk(root) for name in names)


def encode(count: int, base: int, first_queue_offset: int, **more) -> tuple[bytes, list[oracle.Record]]:
    """`count` records of topic Far, one behind the other from phy offset `base` on."""
    data = b""
    records = []
    for number in range(count):
        record = oracle.encode_record(
            topic="Far",
            body=b"%d" % number * 20,
            properties=[("KEYS", f"k{number} all"), ("TAGS", "t")],
            queue_offset=first_queue_offset + number,
            phy_offset=base + len(data),
            store_timestamp=T0 + number,
            born_timestamp=T0,
            **more,
        )
        records.append(oracle.decode_record(record, 0, base + len(data)))
        data += record
    return data, records


@pytest.fixture
def far_store(tmp_path):
    """A store at default geometry: two segments at 2**40, the first closed by a blank, a queue at 5 000 000 000."""
    root = tmp_path / "far"
    first_queue_offset = 5_000_000_000
    tail_base = FAR + GIB - 4096
    head, records = encode(50, FAR, first_queue_offset)
    # The second half begins near the first segment's end and goes on in the next one.
    tail, more = encode(20, tail_base, first_queue_offset + 50)
    blank_at = tail_base + len(tail)
    blank_size = FAR + GIB - blank_at
    next_data, last = encode(30, FAR + GIB, first_queue_offset + 70)
    # Between head and tail one record fills the room, so that the log can be walked from end to end.
    fill_base = FAR + len(head)
    fill, filling = b"", []
    while fill_base + len(fill) < tail_base:
        room = min(tail_base - fill_base - len(fill), 200_000_000)
        left = tail_base - fill_base - len(fill) - room
        if 0 < left < 1000:
            room -= 1000
        record = oracle.encode_record(
            topic="Fill", body=b"", properties=b"", queue_offset=len(filling), phy_offset=fill_base + len(fill),
            store_timestamp=T0,
        )  # fmt: skip
        break
    del record, room, left
    sparse_file(
        root / "commitlog" / f"{FAR:020}",
        GIB,
        {0: head, GIB - 4096: tail, blank_at - FAR: blank_size.to_bytes(4, "big") + bytes.fromhex("cbd43194")},
    )
    sparse_file(root / "commitlog" / f"{FAR + GIB:020}", GIB, {0: next_data})
    return root, [*records, *more, *last], (blank_at, blank_size)
