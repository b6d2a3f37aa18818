"""Entries of RocksDB that wait: pop records (``kvStore``), timers and pending transactions (``rocksdbstore/``).

The databases may lack the newest records of the commit log.  A bad entry hides no other.

- A pop record is a message that a client received by pop consumption and has not acknowledged.
- The key of a timer is the time to fire (i64, ms since epoch) and the UNIQ_KEY; the value is the size (i32) and the phy offset
  (i64) of the record in ``rmq_sys_wheel_timer``.  Two more keys have a broker's progress.
- The key of a transaction is the phy offset of the half message (i64), ``@``, the real topic, ``@``, the transaction's id; the
  value is the number of checks (i32) and the record's size (i32).  A settlement deletes the key: every key is a pending
  transaction.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from rmqstore.errors import CorruptionError, Finding
from rmqstore.rocksdb.database import Database, may_be_database

__all__ = [
    "TIMER_FAMILY", "TRANSACTION_FAMILY", "PopRecord", "StoredTimers", "StoredTransactions", "has_pop_records",
    "pop_records", "read_timers", "read_transactions",
]  # fmt: skip

_POP_FOLDER = "kvStore"
_POP_FAMILY = "popState"
_VISIBLE = struct.Struct(">q")
# "@", i32 queue id, "@", i64 queue offset.
_TAIL = struct.Struct(">cicq")
# Member of the JSON, and the kind of its value.
_MEMBERS = {
    "popTime": int, "groupId": str, "topicId": str, "queueId": int, "retryFlag": int, "invisibleTime": int, "offset": int,
    "attemptTimes": int,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PopRecord:
    """A message that a client received by pop consumption and has not acknowledged.

    - `retry`: 0 = the message is in the topic itself, 1 and 2 = in the group's retry topic (with the old and the new name).
    - `pop_time`, `invisible_time`: the time at which a client received it (ms since epoch), the time until another may (ms).
    - `visible_time`: the sum of both (ms since epoch).
    """

    group: str
    topic: str
    queue_id: int
    queue_offset: int
    retry: int
    pop_time: int
    invisible_time: int
    visible_time: int
    attempt_times: int
    attempt_id: str
    suspend: bool


def has_pop_records(root: str | os.PathLike[str]) -> bool:
    """Return True if the store at `root` has the database of pop records."""
    return may_be_database(os.path.join(root, _POP_FOLDER))


def pop_records(root: str | os.PathLike[str], findings: list[Finding]) -> Iterator[PopRecord]:
    """Yield the pop records of the store at `root`, by the time at which each becomes visible again."""
    path = os.path.join(root, _POP_FOLDER)
    with Database(path, skip_damaged=True) as database:
        findings += [Finding(path, 0, "damaged_database", problem) for problem in database.problems()]
        try:
            for key, value in database.items(family=_POP_FAMILY):
                record = _record(key, value)
                if isinstance(record, PopRecord):
                    yield record
                else:
                    name = key.decode("utf-8", "backslashreplace")
                    detail = f"the pop record {name!r} cannot be read ({record}); the others are"
                    findings.append(Finding(path, 0, "bad_pop_record", detail))
        except CorruptionError as error:
            detail = f"{error.message}; pop records that follow the damage are unknown"
            findings.append(Finding(path, 0, "damaged_database", detail))


def _record(key: bytes, value: bytes) -> PopRecord | str:
    # The record, or the reason why it is bad.
    import json

    if len(key) < _VISIBLE.size + _TAIL.size:
        return f"a key of {len(key)} bytes"
    (visible,) = _VISIBLE.unpack_from(key)
    first, queue_id, second, offset = _TAIL.unpack_from(key, len(key) - _TAIL.size)
    if first != b"@" or second != b"@":
        return "the parts of its key are not separated by @"
    try:
        members = json.loads(value.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return f"its value is not JSON: {error}"
    if not isinstance(members, dict):
        return "its value is not a JSON object"
    for name, kind in _MEMBERS.items():
        if not isinstance(members.get(name), kind) or isinstance(members.get(name), bool):
            return f"{name} is {members.get(name)!r}"
    group, topic = members["groupId"], members["topicId"]
    if key[_VISIBLE.size : -_TAIL.size] != f"{group}@{topic}".encode("utf-8", "surrogatepass"):
        return "its key names another group or topic than its value"
    visible_time = members["popTime"] + members["invisibleTime"]
    if (queue_id, offset, visible) != (members["queueId"], members["offset"], visible_time):
        return "its key names another queue, offset or time than its value"
    return PopRecord(
        group, topic, queue_id, offset, members["retryFlag"], members["popTime"], members["invisibleTime"], visible,
        members["attemptTimes"], str(members.get("attemptId") or ""), bool(members.get("suspend")),
    )  # fmt: skip


TIMER_FAMILY = "timer"
_TIMELINE_CHECKPOINT, _SCAN_CHECKPOINT = b"timeline_checkpoint", b"sys_topic_scan_offset_checkpoint"
_TIME, _TIMER_VALUE = struct.Struct(">q"), struct.Struct(">iq")
# After every key that begins with a time of the next 200 million years.
_END = b"\x60"
# No broker fired timers of the year 2248.
_LATEST = 1 << 43


@dataclass
class StoredTimers:
    """The timers of a database that have not fired: `timers` has phy offsets by time to fire and UNIQ_KEY.

    Timers before `timeline_checkpoint` (ms since epoch) were delivered.  `scan_offset` is the next queue offset of
    ``rmq_sys_wheel_timer``, queue 0; None if no broker kept timers here.
    """

    timeline_checkpoint: int | None = None
    scan_offset: int | None = None
    timers: dict[tuple[int, str], int] = field(default_factory=dict)
    problems: list[CorruptionError] = field(default_factory=list)


def read_timers(database: Database) -> StoredTimers:
    """Return the timers that fire at or after the timeline checkpoint, or all without one."""
    found = StoredTimers()
    found.timeline_checkpoint = _special(database, _TIMELINE_CHECKPOINT, found, _LATEST)
    found.scan_offset = _special(database, _SCAN_CHECKPOINT, found, 1 << 63)
    for key, value in database.items(_END, family=TIMER_FAMILY):
        if key not in (_TIMELINE_CHECKPOINT, _SCAN_CHECKPOINT):
            found.problems.append(_no_entry(database, key, value))
    begin = _TIME.pack(max(found.timeline_checkpoint or 0, 0))
    for key, value in database.items(begin, _END, family=TIMER_FAMILY):
        if len(key) <= _TIME.size or len(value) != _TIMER_VALUE.size:
            found.problems.append(_no_entry(database, key, value))
            continue
        unique_key = key[_TIME.size :].decode("utf-8", "replace")
        found.timers[_TIME.unpack_from(key)[0], unique_key] = _TIMER_VALUE.unpack(value)[1]
    return found


def _no_entry(database: Database, key: bytes, value: bytes) -> CorruptionError:
    return CorruptionError(f"RocksDB timers: an entry with the key {key[:80]!r} and {len(value)} bytes", database.path)


def _special(database: Database, key: bytes, found: StoredTimers, end: int) -> int | None:
    value = database.get(key, family=TIMER_FAMILY)
    if value is None:
        return None
    if len(value) != _TIME.size:
        found.problems.append(CorruptionError(f"RocksDB timers: {key.decode()} has {len(value)} bytes", database.path))
        return None
    number: int = _TIME.unpack(value)[0]
    if not 0 <= number < end:
        found.problems.append(CorruptionError(f"RocksDB timers: {key.decode()} has the bad value {number}", database.path))
        return None
    return number


TRANSACTION_FAMILY = "trans"
_LAST_OFFSET = b"lastOffsetPy"
_OFFSET, _TRANSACTION_VALUE = struct.Struct(">q"), struct.Struct(">ii")


@dataclass
class StoredTransactions:
    """The transactions of a database: `check_times` has the number of checks by phy offset of the half message.

    `last_phy_offset` is the largest phy offset that was written; None if no broker kept transactions here.
    """

    last_phy_offset: int | None = None
    check_times: dict[int, int] = field(default_factory=dict)
    problems: list[CorruptionError] = field(default_factory=list)


def read_transactions(database: Database) -> StoredTransactions:
    """Return all transactions of the database."""
    found = StoredTransactions()
    for key, value in database.items(family=TRANSACTION_FAMILY):
        if key == _LAST_OFFSET and len(value) == _OFFSET.size:
            found.last_phy_offset = _OFFSET.unpack(value)[0]
        elif len(key) > 9 and key[8:9] == b"@" and len(value) == _TRANSACTION_VALUE.size:
            found.check_times[_OFFSET.unpack_from(key)[0]] = _TRANSACTION_VALUE.unpack(value)[0]
        else:
            text = f"RocksDB transactions: an entry with the key {key!r} and {len(value)} bytes"
            found.problems.append(CorruptionError(text, database.path))
    return found
