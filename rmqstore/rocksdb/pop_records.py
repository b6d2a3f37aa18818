"""Pop records: messages that were handed out by pop consumption and are not acknowledged yet (``kvStore``).

Owns the keys and values of the family ``popState``; it looks at no message.  An entry that cannot be one is a finding and hides
no other.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from rmqstore.errors import CorruptionError, Finding
from rmqstore.rocksdb.database import Database, lost_log_text, unlisted_text
from rmqstore.rocksdb.places import may_be_database

__all__ = ["PopRecord", "has_pop_records", "pop_records"]

_FOLDER = "kvStore"
_FAMILY = "popState"
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
    """A message that was handed out and is neither acknowledged nor given to somebody else.

    Attributes
    ----------
    group, topic : str
        As the record has them; `retry` says of which topic the message is.
    queue_id, queue_offset : int
    retry : int
        0 = the message lies in the topic itself, 1 and 2 = in the group's retry topic (of the old and of the new name).
    pop_time, invisible_time : int
        When it was handed out (ms since epoch), and for how long (ms).
    visible_time : int
        When it is given to somebody else (ms since epoch).
    attempt_times : int
    attempt_id : str
    suspend : bool
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
    """bool: the store at `root` has the database of pop records."""
    return may_be_database(os.path.join(root, _FOLDER))


def pop_records(root: str | os.PathLike[str], findings: list[Finding]) -> Iterator[PopRecord]:
    """The pop records of the store at `root`, by the time when each becomes visible again.

    Parameters
    ----------
    findings : list of Finding
        Takes what cannot be read.

    Raises
    ------
    CorruptionError, FileNotFoundError, MissingDependencyError, PermissionError
        As of `Database`.
    """
    path = os.path.join(root, _FOLDER)
    with Database(path, skip_damaged=True) as database:
        if database.log_damage is not None:
            detail = f"its log or MANIFEST is damaged, or torn by a kill ({database.log_damage}); its newest entries may be missing"
            findings.append(Finding(path, 0, "damaged_database", detail))
        if database.lost_log is not None:
            findings.append(Finding(path, 0, "damaged_database", lost_log_text(database.lost_log)))
        if database.unlisted:
            findings.append(Finding(path, 0, "damaged_database", unlisted_text(database.unlisted)))
        try:
            for key, value in database.items(family=_FAMILY):
                record = _record(key, value)
                if isinstance(record, PopRecord):
                    yield record
                else:
                    name = key.decode("utf-8", "backslashreplace")
                    detail = f"the pop record {name!r} cannot be read ({record}); the others are"
                    findings.append(Finding(path, 0, "bad_pop_record", detail))
        except CorruptionError as error:
            detail = f"{error.message}; pop records that follow the damage are not known"
            findings.append(Finding(path, 0, "damaged_database", detail))


def _record(key: bytes, value: bytes) -> PopRecord | str:
    # The record, or why it cannot be one.
    import json

    if len(key) < _VISIBLE.size + _TAIL.size:
        return f"a key of {len(key)} bytes"
    (visible,) = _VISIBLE.unpack_from(key)
    first, queue_id, second, offset = _TAIL.unpack_from(key, len(key) - _TAIL.size)
    if first != b"@" or second != b"@":
        return "the parts of its key are not set apart by @"
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
    if (queue_id, offset, visible) != (
        members["queueId"], members["offset"], members["popTime"] + members["invisibleTime"],
    ):  # fmt: skip
        return "its key names another queue, offset or time than its value"
    return PopRecord(
        group, topic, queue_id, offset, members["retryFlag"], members["popTime"], members["invisibleTime"], visible,
        members["attemptTimes"], str(members.get("attemptId") or ""), bool(members.get("suspend")),
    )  # fmt: skip
