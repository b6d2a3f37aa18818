"""A message on disk, down to the bytes: its record, its queue units, its index entries.

Every walk is bounded, so that a hostile chain costs no more than a long one.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rmqstore._core import MAGIC_V2, IndexLayout, crc32, index_key_hash
from rmqstore.console.rows import error_text, file_name
from rmqstore.errors import OffsetOutOfRangeError, StoreError
from rmqstore.index.index_file import IndexFile
from rmqstore.index.index_service import IndexService
from rmqstore.message import MessageExt, host_from_bytes
from rmqstore.store.dispatch_rules import further_places
from rmqstore.store.message_store import MessageStore

__all__ = ["Field", "body_crc", "index_entries", "queue_units", "record_fields", "record_place"]

# Limits on the steps along one chain, and on the entries of one record.
_CHAIN_STEPS = 20_000
_ENTRIES_SHOWN = 200
_NEIGHBOURS_SHOWN = 8
_V6_FLAGS = (0x10, 0x20)


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a record: `pos` (in bytes from the start of the record), `size`, and its value as text."""

    name: str
    pos: int
    size: int
    value: str
    # "time", or a remark about the value.
    meaning: str = ""


def record_fields(read: Callable[[int, int], bytes], size: int, body_crc: int) -> list[Field]:
    """Return the fields of a record of `size` bytes, in order and without gaps.

    ``read(pos, size)`` returns bytes of the record; it is never called for the body, which may be large.  Raise `StoreError`
    if the lengths do not fit `size`.
    """
    fields: list[Field] = []
    pos = 0

    def part(name: str, length: int) -> bytes:
        if length < 0 or pos + length > size:
            raise StoreError(f"{name} of {length} bytes does not fit a record of {size} bytes")
        return read(pos, length) if length else b""

    def add(name: str, length: int, value: object, meaning: str = "") -> None:
        nonlocal pos
        fields.append(Field(name, pos, length, str(value), meaning))
        pos += length

    def number(name: str, form: str, meaning: str = "") -> int:
        length = struct.calcsize(form)
        (value,) = struct.unpack(form, part(name, length))
        add(name, length, value, meaning)
        return int(value)

    def host(name: str, flag: int) -> None:
        length = 20 if sys_flag & flag else 8
        add(name, length, host_from_bytes(part(name, length)))

    number("total size", ">i")
    (magic,) = struct.unpack(">i", part("magic", 4))
    add("magic", 4, f"0x{magic % 2**32:08X}", "version 2" if magic == MAGIC_V2 else "version 1")
    (crc,) = struct.unpack(">i", part("body CRC", 4))
    add("body CRC", 4, crc, "matches the body" if crc == body_crc else f"the body has {body_crc}")
    number("queue id", ">i")
    number("flag", ">i")
    number("queue offset", ">q")
    number("phy offset", ">q")
    (sys_flag,) = struct.unpack(">i", part("sysFlag", 4))
    add("sysFlag", 4, f"0x{sys_flag % 2**32:X}")
    number("born timestamp", ">q", "time")
    host("born host", _V6_FLAGS[0])
    number("store timestamp", ">q", "time")
    host("store host", _V6_FLAGS[1])
    number("reconsume times", ">i")
    number("prepared transaction offset", ">q")
    body_size = number("body length", ">i")
    if body_size < 0 or pos + body_size > size:
        raise StoreError(f"a body of {body_size} bytes does not fit a record of {size} bytes")
    add("body", body_size, f"{body_size} bytes")
    topic_size = number("topic length", ">h" if magic == MAGIC_V2 else ">b")
    add("topic", topic_size, part("topic", topic_size).decode("utf-8", "replace"))
    properties_size = number("properties length", ">h")
    part("properties", properties_size)
    add("properties", properties_size, f"{properties_size} bytes")
    if pos < size:
        add("not part of any field", size - pos, f"{size - pos} bytes")
    return fields


def record_place(store: MessageStore, message: MessageExt) -> tuple[str, int, Callable[[int, int], bytes]]:
    """Return the file of a message, the position in it, and ``read(pos, size)`` for bytes of the record."""
    segment = store.commit_log.segment(message.phy_offset)
    pos = message.phy_offset - segment.file_from_offset
    region = segment.region
    return segment.path, pos, lambda at, size: region.read(pos + at, size)


def body_crc(message: MessageExt) -> int:
    """Return the CRC of the body as in a record, with a clear top bit."""
    stored = message.body_stored
    return crc32(stored) & 0x7FFFFFFF if stored else 0


def queue_units(store: MessageStore, message: MessageExt) -> list[dict[str, Any]]:
    """Return the units that a message should have, one a queue, and whether each points to the message.

    A prepared or rolled-back half of a transaction has no unit.
    """
    if message.sys_flag & 0xC in (0x4, 0xC):
        return []
    places = [(message.topic, message.queue_id, message.queue_offset)]
    places += [(topic, 0, offset) for topic, offset in further_places(message, store.config)[0]]
    found = []
    for topic, queue_id, queue_offset in places:
        unit: dict[str, Any] = {"topic": topic, "queue_id": queue_id, "queue_offset": queue_offset}
        try:
            unit |= _unit(store, message, topic, queue_id, queue_offset)
        except (StoreError, OSError) as error:
            unit |= {"state": "unreadable", "detail": error_text(error)}
        found.append(unit)
    return found


def _unit(store: MessageStore, message: MessageExt, topic: str, queue_id: int, queue_offset: int) -> dict[str, Any]:
    queue = store.queues.find(topic, queue_id)
    if queue is None:
        return {"state": "missing", "detail": "the store has no such queue"}
    found = queue.place_of(queue_offset)
    if found is None:
        return {"state": "missing", "detail": "the queue has no unit at this queue offset"}
    (mapped_file, pos), size = found, queue.unit_size
    data = mapped_file.region.read(pos, size)
    phy_offset, record_size, code = struct.unpack_from(">qiq", data)
    agrees = (phy_offset, record_size) == (message.phy_offset, message.size)
    return {
        "state": "agrees" if agrees else "differs",
        "detail": "points to this record" if agrees else f"points to phy offset {phy_offset}, {record_size} bytes",
        "file": mapped_file.path,
        "pos": pos,
        "size": size,
        "bytes": data.hex(" "),
        "phy_offset": phy_offset,
        "record_size": record_size,
        "tags_code": code,
    }


def index_entries(store: MessageStore, message: MessageExt) -> list[dict[str, Any]]:
    """Return the index entry of each key of a message with its position, bytes and chain, or that there is no entry."""
    service = store.index_service
    if service is None:
        return []
    texts = [] if message.unique_key is None else [("unique key", message.unique_key, message.unique_key)]
    texts += [("key", key, key) for key in message.keys if key]
    if message.tags and store.config.index_tags:
        texts.append(("tag", message.tags, "T#" + message.tags))
    wanted = [(kind, key, index_key_hash(message.topic, text)) for kind, key, text in texts[:_ENTRIES_SHOWN]]
    by_hash: dict[int, list[dict[str, Any]]] = {}
    for name in reversed(service.names):
        try:
            index = service.file(name)
        except (FileNotFoundError, OffsetOutOfRangeError):
            continue
        header = index.header
        if not header.begin_phy_offset <= message.phy_offset <= header.end_phy_offset:
            continue
        for entry in _entries_of(index, message.phy_offset):
            by_hash.setdefault(entry["hash"], []).append(entry)
    unread = _unread_index(store, service)
    found = []
    for kind, key, key_hash in wanted:
        entries = by_hash.get(key_hash, [])
        # A key that a message has twice has two entries.
        found_entry = entries.pop(0) if len(entries) > 1 else entries[0] if entries else None
        row: dict[str, Any] = {
            "kind": kind,
            "key": key,
            "hash": key_hash,
            "state": "found" if found_entry else "missing" if unread is None else "unread",
        }
        if found_entry is None and unread is not None:
            row["detail"] = unread
        found.append(row | (found_entry or {}))
    return found


def _unread_index(store: MessageStore, service: IndexService) -> str | None:
    # The reason why an entry that was not found may exist.
    for problem in service.passed_over.values():
        return f"{file_name(problem.path or service.path, store.path)}: {problem.message}"
    if store.database_index.damage is not None:
        return f"the index in RocksDB: {store.database_index.damage.message}"
    return "the index is in RocksDB, which this page does not read" if store.database_index.is_used() else None


def _entries_of(index: IndexFile, phy_offset: int) -> Iterator[dict[str, Any]]:
    # Entries, numbered from 1, are in the order of their records.
    count = min(index.index_count, index.index_num)
    number = 1 + bisect_left(range(1, max(count, 1)), phy_offset, key=lambda at: index.read_entry(at)[1])
    for at in range(number, min(count, number + _ENTRIES_SHOWN)):
        key_hash, phy, seconds, previous = index.read_entry(at)
        if phy != phy_offset:
            break
        slot = key_hash % index.slot_num
        pos = index.entry_pos(at)
        yield {
            "file": index.name,
            "path": index.path,
            "entry": at,
            "pos": pos,
            "size": int(IndexLayout.ENTRY_SIZE),
            "bytes": index.region.read(pos, int(IndexLayout.ENTRY_SIZE)).hex(" "),
            "hash": key_hash,
            "seconds": seconds,
            "previous": previous,
            "slot": slot,
            "slot_pos": int(IndexLayout.INDEX_HEADER_SIZE) + slot * int(IndexLayout.SLOT_SIZE),
            "head": index.read_slot(slot),
            **_chain(index, at, slot, previous),
        }


def _chain(index: IndexFile, entry: int, slot: int, previous: int) -> dict[str, Any]:
    # The slot and its newer entries point here.  A chain strictly decreases: a step past the entry means damage.
    newer: int | None = 0
    at = index.read_slot(slot)
    for step in range(_CHAIN_STEPS):
        if at <= entry:
            newer = step if at == entry else None
            break
        following = index.read_entry(at)[3] if 0 < at < index.index_num else 0
        at = following if following < at else 0
    else:
        newer = None
    state = "reached" if newer is not None else "unreached" if at < entry else "long"
    older: list[dict[str, int]] = []
    below, at = entry, previous
    while 0 < at < below and at < index.index_num and len(older) < _NEIGHBOURS_SHOWN:
        key_hash, phy_offset, seconds, following = index.read_entry(at)
        older.append({"entry": at, "hash": key_hash, "phy_offset": phy_offset, "seconds": seconds})
        below, at = at, following
    return {"newer_in_chain": newer, "chain": state, "older": older, "older_more": 0 < at < below}
