"""Timers in RocksDB: family ``timer`` of ``rocksdbstore/``.

Owns the layout of its keys and values.  It says what the database holds, which lags behind the commit log.

A key is the time to fire (i64, ms since epoch) and the UNIQ_KEY; a value the size (i32) and the phy offset (i64) of the
record in ``rmq_sys_wheel_timer``.  Two more keys hold how far a broker came.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from rmqstore.errors import CorruptionError
from rmqstore.rocksdb.database import Database

__all__ = ["FAMILY", "StoredTimers", "read_timers"]

FAMILY = "timer"
_TIMELINE_CHECKPOINT, _SCAN_CHECKPOINT = b"timeline_checkpoint", b"sys_topic_scan_offset_checkpoint"
_TIME, _VALUE = struct.Struct(">q"), struct.Struct(">iq")
# Beyond every key that begins with a time of the next 200 million years.
_END = b"\x60"
# No broker says that it fired what is due in the year 2248.
_LATEST = 1 << 43


@dataclass
class StoredTimers:
    """What the database says of timers that have not fired.

    Attributes
    ----------
    timeline_checkpoint : int or None
        Everything that fires before it has been delivered, ms since epoch.
    scan_offset : int or None
        Queue offset of ``rmq_sys_wheel_timer``, queue 0, that is taken in next; None where no broker kept timers here.
    timers : dict of (int, str) to int
        Phy offset by time to fire and UNIQ_KEY.
    problems : list of CorruptionError
        Entries that are none.
    """

    timeline_checkpoint: int | None = None
    scan_offset: int | None = None
    timers: dict[tuple[int, str], int] = field(default_factory=dict)
    problems: list[CorruptionError] = field(default_factory=list)


def read_timers(database: Database) -> StoredTimers:
    """StoredTimers: what fires at or after the timeline checkpoint, all that is there without one.

    Raises
    ------
    CorruptionError
        The database is damaged.
    """
    found = StoredTimers()
    found.timeline_checkpoint = _special(database, _TIMELINE_CHECKPOINT, found, _LATEST)
    found.scan_offset = _special(database, _SCAN_CHECKPOINT, found, 1 << 63)
    for key, value in database.items(_END, family=FAMILY):
        if key not in (_TIMELINE_CHECKPOINT, _SCAN_CHECKPOINT):
            found.problems.append(_no_entry(database, key, value))
    begin = _TIME.pack(max(found.timeline_checkpoint or 0, 0))
    for key, value in database.items(begin, _END, family=FAMILY):
        if len(key) <= _TIME.size or len(value) != _VALUE.size:
            found.problems.append(_no_entry(database, key, value))
            continue
        unique_key = key[_TIME.size :].decode("utf-8", "replace")
        found.timers[_TIME.unpack_from(key)[0], unique_key] = _VALUE.unpack(value)[1]
    return found


def _no_entry(database: Database, key: bytes, value: bytes) -> CorruptionError:
    return CorruptionError(f"RocksDB timers: an entry with the key {key[:80]!r} and {len(value)} bytes", database.path)


def _special(database: Database, key: bytes, found: StoredTimers, end: int) -> int | None:
    value = database.get(key, family=FAMILY)
    if value is None:
        return None
    if len(value) != _TIME.size:
        found.problems.append(CorruptionError(f"RocksDB timers: {key.decode()} has {len(value)} bytes", database.path))
        return None
    number: int = _TIME.unpack(value)[0]
    if not 0 <= number < end:
        found.problems.append(CorruptionError(f"RocksDB timers: {key.decode()} is {number}, which cannot be", database.path))
        return None
    return number
