"""DETS tables of version 9: `recovery.dets`, with the recovery terms of a vhost's queues.

Owns the hash of keys (`phash2`), the buddy system that allocates the file's space, reading and writing.  Reading never
raises for damage: it reports problems and returns whole objects, first through the table's slots and, if these are
damaged, by trying every possible place of a collection of objects.  No place is read twice.

Source of all rules: Erlang/OTP 25 (`dets`), RabbitMQ 3.10.8 (docs/rabbitmq.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rmqstore.errors import CorruptionError
from rmqstore.files.durable import fsync_directory
from rmqstore.files.open_file import read_small_file
from rmqstore.rabbitmq import _term
from rmqstore.rabbitmq._term import Atom

__all__ = [
    "DetsProblem",
    "DetsTable",
    "encode",
    "parse",
    "phash2",
    "read",
    "recovery_object",
    "recovery_terms",
    "write_recovery_terms",
]

COOKIE = 0x00ABCDEF
ACTIVE = 0x12345678
FREE = 0x03ABCDEF
END_OF_FREE_LISTS = 12345
HEADER_SIZE = 312
# The first part of the array of segments; also the base of the buddy system during its layout.
FIRST = HEADER_SIZE + 4 * 256
PART_SLOTS = 512
SEGMENT_SLOTS = 256
SEGMENT_SIZE = 8 * SEGMENT_SLOTS
MAX_SLOTS = 256 * PART_SLOTS * SEGMENT_SLOTS
# Sizes of the buddy system: 2**0 to 2**31 bytes.
BUDDY_NUM = 32
COUNTERS = range(4, 32)
FREE_RECORD_SIZE = 4096

_M32 = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


# --------------------------------------------------------------------------------------------------------------- phash2


def _mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    # Bob Jenkins' mixing of three 32-bit numbers.
    a = (a - b - c & _M32) ^ c >> 13
    b = (b - c - a & _M32) ^ a << 8 & _M32
    c = (c - a - b & _M32) ^ b >> 13
    a = (a - b - c & _M32) ^ c >> 12
    b = (b - c - a & _M32) ^ a << 16 & _M32
    c = (c - a - b & _M32) ^ b >> 5
    a = (a - b - c & _M32) ^ c >> 3
    b = (b - c - a & _M32) ^ a << 10 & _M32
    c = (c - a - b & _M32) ^ b >> 15
    return a, b, c


def _pair(first: int, second: int, kind: int, number: int) -> int:
    constant = _GOLDEN * kind & _M32
    return _mix(constant + first & _M32, constant + second & _M32, number)[2]


def _block(data: bytes, start: int) -> int:
    a = b = _GOLDEN
    c = start
    whole = len(data) // 12 * 12
    for x, y, z in struct.iter_unpack("<III", data[:whole]):
        a, b, c = _mix(a + x & _M32, b + y & _M32, c + z & _M32)
    # The first byte of the last word is the length's.
    rest = data[whole:]
    x, y, z = struct.unpack("<III", rest[:8].ljust(8, b"\0") + (b"\0" + rest[8:]).ljust(4, b"\0"))
    return _mix(a + x & _M32, b + y & _M32, c + len(data) + z & _M32)[2]


def phash2(key: list[int] | bytes) -> int:
    """Return ``erlang:phash2(Key)``, 27 bits, of a binary or a text; TypeError for another kind of key."""
    if isinstance(key, bytes):
        number = 13 * _GOLDEN & _M32
        number = _block(key, number) if key else number
    elif not isinstance(key, list) or not all(type(byte) is int and 0 <= byte <= 255 for byte in key):
        raise TypeError(f"no hash of {key!r}")
    elif not key:
        number = 3468870702
    else:
        number = 0
        # Bytes are taken four at a time.
        for at in range(0, len(key), 4):
            number = _pair(int.from_bytes(key[at : at + 4], "big"), 0, 4, number)
        number = _pair(2, 0, 2, number)
    return number & (1 << 27) - 1


# -------------------------------------------------------------------------------------------------------------- Writing


class _Buddies:
    """Space of a file, allocated by halving: `free[i]` are the free places of 2**i bytes, in order."""

    def __init__(self, base: int):
        self.free: list[list[int]] = [[] for _ in range(BUDDY_NUM)]
        self.free[BUDDY_NUM - 1].append(base)

    def take(self, size: int) -> tuple[int, int]:
        """Allocate `size` bytes, at least 16: the place, and the logarithm of the allocated size."""
        wanted = max(size - 1, 15).bit_length()
        level = wanted
        while not self.free[level]:
            level += 1
        at = self.free[level].pop(0)
        while level > wanted:
            level -= 1
            self.free[level].insert(0, at + (1 << level))
        return at, wanted

    def lists(self) -> bytes:
        """Encode the free lists for the end of a file."""
        parts = []
        for level, places in enumerate(self.free):
            most = (FREE_RECORD_SIZE - 12) // 4
            for first in range(0, len(places), most):
                some = places[first : first + most]
                parts.append(struct.pack(f">III{len(some)}I", 12 + 4 * len(some), FREE, level + 1, *some))
        parts.append(struct.pack(">III", 12, FREE, END_OF_FREE_LISTS))
        return b"".join(parts)


def encode(objects: Iterable[tuple[Any, ...]]) -> bytes:
    """Make the file of a properly closed table of type set with these objects.

    Their first elements are the keys, lists of bytes or binaries: TypeError for another kind, ValueError for a second one.
    Up to 256 objects, the bytes are those of `dets` of OTP 25 after an insertion of all into a new table; a larger table
    has as many slots as it needs, as with `min_no_slots`.
    """
    rows = list(objects)
    slot_num = SEGMENT_SLOTS
    while slot_num < len(rows) and slot_num < PART_SLOTS * SEGMENT_SLOTS:
        slot_num *= 2
    slots: dict[int, list[tuple[bool, bytes, bytes]]] = {}
    for row in rows:
        key = row[0]
        same = slots.setdefault(phash2(key) % slot_num, [])
        # Erlang's order of terms: lists before binaries.
        order = isinstance(key, bytes), bytes(key)
        if any(order == each[:2] for each in same):
            raise ValueError(f"two objects have the key {key!r}")
        same.append((*order, _term.encode(row)))

    layout = _Buddies(FIRST)
    part, _ = layout.take(4 * PART_SLOTS)
    segments = [layout.take(SEGMENT_SIZE)[0] for _ in range(slot_num // SEGMENT_SLOTS)]
    base, _ = layout.take(16)
    data = bytearray(base)
    struct.pack_into(">I", data, HEADER_SIZE, part)
    struct.pack_into(f">{len(segments)}I", data, part, *segments)

    places = _Buddies(base)
    counters = dict.fromkeys(COUNTERS, 0)
    # A flush of the cache goes from the last slot to the first.
    for slot in sorted(slots, reverse=True):
        content = b"".join(struct.pack(">I", 4 + len(term)) + term for *_, term in sorted(slots[slot]))
        at, level = places.take(8 + len(content))
        counters[level] += 1
        if len(data) < at + 8 + len(content):
            data.extend(bytes(at + 8 + len(content) - len(data)))
        data[at : at + 8 + len(content)] = struct.pack(">II", 8 + len(content), ACTIVE) + content
        struct.pack_into(
            ">II", data, segments[slot // SEGMENT_SLOTS] + 8 * (slot % SEGMENT_SLOTS), 8 + len(content), at
        )

    digested = struct.pack(
        ">11I", 1, 9, slot_num, slot_num, 1, len(rows), len(rows), slot_num, MAX_SLOTS, 1, 0
    ) + struct.pack(">28I", *counters.values())
    head = struct.pack(">III", len(data), COOKIE, 1) + digested
    data[: HEADER_SIZE - 124] = head + hashlib.md5(digested, usedforsecurity=False).digest() + struct.pack(">I", base)
    data += places.lists()
    data += struct.pack(">I", len(data) + 4 - base)
    return bytes(data)


# -------------------------------------------------------------------------------------------------------------- Reading


class DetsProblem(NamedTuple):
    """Damage: a short name, the position, and a sentence."""

    kind: str
    pos: int
    detail: str


@dataclass
class DetsTable:
    """The contents of a table's file.

    `objects` in the order of the file, the `positions` of their collections, and `problems`, empty for a sound table.  A
    node repairs a table that was not closed, or whose slots are damaged, when it opens it.
    """

    objects: list[Any] = field(default_factory=list, repr=False)
    positions: list[int] = field(default_factory=list, repr=False)
    problems: list[DetsProblem] = field(default_factory=list)


def _collection(data: bytes, at: int) -> tuple[list[Any], int] | None:
    """Read objects and end of the collection at `at`; None if there is no collection."""
    if at < 0 or at + 8 > len(data):
        return None
    size, status = struct.unpack_from(">II", data, at)
    if status != ACTIVE or size < 8 + 4 + 2 or size > len(data) - at:
        return None
    found = []
    end = at + size
    at += 8
    while at < end:
        if end - at < 6:
            return None
        (taken,) = struct.unpack_from(">I", data, at)
        if not 6 <= taken <= end - at:
            return None
        try:
            value = _term.decode(data[at + 4 : at + taken])
        except CorruptionError:
            return None
        if not isinstance(value, tuple) or not value:
            return None
        found.append(value)
        at += taken
    return found, end


def _slots(data: bytes, table: DetsTable) -> list[tuple[int, int, int]]:
    """List place, size and slot of all used slots, in the order of the places."""
    found = []
    seen = set()
    for number in range(256):
        (part,) = struct.unpack_from(">I", data, HEADER_SIZE + 4 * number)
        if not part:
            continue
        if part in seen or part < FIRST or (part - FIRST) % 2048 or part + 4 * PART_SLOTS > len(data):
            table.problems.append(DetsProblem("bad_part", HEADER_SIZE + 4 * number, f"no part lies at {part}"))
            continue
        seen.add(part)
        for index, segment in enumerate(struct.unpack_from(f">{PART_SLOTS}I", data, part)):
            if not segment:
                continue
            if segment in seen or segment < FIRST or (segment - FIRST) % 2048 or segment + SEGMENT_SIZE > len(data):
                table.problems.append(DetsProblem("bad_segment", part + 4 * index, f"no segment lies at {segment}"))
                continue
            seen.add(segment)
            first = (number * PART_SLOTS + index) * SEGMENT_SLOTS
            values = struct.unpack_from(f">{2 * SEGMENT_SLOTS}I", data, segment)
            if any(values):
                for slot in range(SEGMENT_SLOTS):
                    size, at = values[2 * slot : 2 * slot + 2]
                    if size or at:
                        found.append((at, size, first + slot))
    return sorted(found)


def _scan(data: bytes, table: DetsTable) -> None:
    """Find collections without the slots, at steps of 16 bytes."""
    table.objects, table.positions = [], []
    seen = set()
    work = 16 * len(data) + (1 << 20)
    at = FIRST
    while at + 16 <= len(data):
        if struct.unpack_from(">I", data, at + 4)[0] == ACTIVE:
            taken = _collection(data, at)
            if taken is not None:
                for one in taken[0]:
                    key = _term.encode(one[0])
                    if key not in seen:
                        seen.add(key)
                        table.objects.append(one)
                        table.positions.append(at)
                at = FIRST + (taken[1] - FIRST + 15) // 16 * 16
                continue
            table.problems.append(DetsProblem("bad_collection", at, "a collection whose objects cannot be read"))
            # A failed attempt may walk over the rest of the file: a hostile file must not repeat that.
            work -= min(struct.unpack_from(">I", data, at)[0], len(data) - at)
            if work < 0:
                table.problems.append(DetsProblem("gave_up", at, "too many damaged collections; the rest was not read"))
                return
        at += 16


# For some of the header's 14 numbers: kind of the problem, index of the number, its right value.
_CHECKS = (
    ("bad_cookie", 1, COOKIE, "the file begins with {:#x}: no DETS table"),
    ("bad_version", 4, 9, "version {}, not 9"),
    ("bad_type", 3, 1, "type {}, not 1 (set)"),
    ("bad_hash_method", 12, 1, "hash method {}, not 1 (phash2)"),
    ("bad_keypos", 7, 1, "element {} is the key, not the first"),
)


def parse(data: bytes) -> DetsTable:
    """Read a table's bytes; never raises for damage."""
    data = bytes(data)
    table = DetsTable()
    problem = table.problems.append
    if len(data) < FIRST:
        problem(DetsProblem("short_header", len(data), f"the file has {len(data)} bytes, the header alone {FIRST}"))
        return table
    *header, base = struct.unpack_from(">14I112x16xI", data)
    for kind, number, wanted, detail in _CHECKS:
        if header[number] != wanted:
            problem(DetsProblem(kind, 4 * number, detail.format(header[number])))
    closed, slot_num, object_num, key_num, split_num = (header[number] for number in (2, 5, 8, 9, 13))
    if not slot_num:
        problem(DetsProblem("bad_slot_count", 20, "the table has no slots"))
    md5 = data[168:184]
    if any(md5) and md5 != hashlib.md5(data[12:168], usedforsecurity=False).digest():
        problem(DetsProblem("bad_header_md5", 168, "the header's checksum does not agree with the header"))
    (trailer,) = struct.unpack_from(">I", data, len(data) - 4)
    if closed != 1:
        problem(DetsProblem("not_closed", 8, "the table was not closed; a node repairs it"))
    elif trailer + base != len(data):
        problem(DetsProblem("bad_trailer", len(data) - 4, f"the file's end says {trailer + base} bytes"))
    sound = not table.problems
    used = astray = 0
    keys = set()
    for at, size, slot in _slots(data, table):
        taken = _collection(data, at) if at >= used and at >= FIRST and (at - FIRST) % 16 == 0 else None
        if taken is None or taken[1] - at != size:
            problem(DetsProblem("bad_slot", at, f"slot {slot} leads to {size} bytes at {at} that are not a collection"))
            sound = False
            continue
        used = taken[1]
        for one in taken[0]:
            if slot_num and _hashes_elsewhere(one[0], slot, slot_num, split_num):
                # A node looks a key up in its own slot, and does not find this one.
                problem(DetsProblem("wrong_slot", at, f"the object {one[0]!r} does not belong to slot {slot}"))
                astray += 1
                continue
            key = _term.encode(one[0])
            if key in keys:
                problem(DetsProblem("double_key", at, f"a second object has the key {one[0]!r}"))
            keys.add(key)
            table.objects.append(one)
            table.positions.append(at)
    sound = sound and len(table.problems) == astray
    if sound and not len(table.objects) + astray == object_num == key_num:
        counted = f"{object_num} objects with {key_num} keys"
        problem(DetsProblem("bad_count", 32, f"the header counts {counted}, there are {len(table.objects)}"))
        sound = False
    if not sound:
        _scan(data, table)
    return table


def _hashes_elsewhere(key: Any, slot: int, slot_num: int, split_num: int) -> bool:
    try:
        number = phash2(key)
    except TypeError:
        return False
    wanted = number % slot_num
    if wanted < split_num:
        # Slots below this number were split.
        wanted = number % (2 * slot_num)
    return wanted != slot


def read(path: str | os.PathLike[str]) -> DetsTable:
    """Read the table at `path`; never raises for damage, OSError if the file cannot be read."""
    os.stat(path)
    return parse(read_small_file(os.fspath(path)) or b"")


# -------------------------------------------------------------------------------------------------------- recovery.dets


def recovery_terms(table: DetsTable) -> dict[str, dict[str, Any]]:
    """Return the terms of the queues by their directories' names, from the objects of `recovery.dets`.

    Version 1 has ``segments`` (list of (number, count) tuples), ``next_seq_id``, ``next_deliver_seq_id``, ``persistent_ref``
    (bytes), ``persistent_count``, ``persistent_bytes``; version 2 ``v2_index_state`` instead of ``segments``.  An object of
    another shape is left out, and becomes a problem of the table.
    """
    found: dict[str, dict[str, Any]] = {}
    for at, one in zip(table.positions, table.objects):
        try:
            name, terms = _queue_terms(one)
            if name in found:
                raise ValueError("a second object of one queue")
        except (TypeError, ValueError):
            table.problems.append(DetsProblem("bad_object", at, "an object that is not a queue's terms"))
        else:
            found[name] = terms
    return found


def _queue_terms(one: tuple[Any, ...]) -> tuple[str, dict[str, Any]]:
    key, terms = one
    # bytes() of a number would be zeros.
    if not isinstance(key, (list, bytes)) or not isinstance(terms, list):
        raise ValueError("no directory, or no list")
    pairs = [term for term in terms if isinstance(term, tuple) and len(term) == 2 and isinstance(term[0], Atom)]
    found = {str(term[0]): term[1] for term in pairs}
    if len(found) != len(terms):
        raise ValueError("something else than names and values, or a second value of a name")
    return bytes(key).decode("utf-8", "surrogateescape"), found


def recovery_object(directory: str, terms: Mapping[str, Any]) -> tuple[list[int], list[tuple[Atom, Any]]]:
    """Make the object of a queue, from the name of its directory and its terms in their order."""
    return list(directory.encode("utf-8", "surrogateescape")), [(Atom(name), value) for name, value in terms.items()]


def write_recovery_terms(path: str, terms: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace a `recovery.dets` by one with these terms, by the names of the queues' directories, atomically."""
    staged = path + ".unfinished"
    try:
        with open(staged, "wb") as file:
            file.write(encode(recovery_object(name, each) for name, each in terms.items()))
            file.flush()
            os.fsync(file.fileno())
        os.rename(staged, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(staged)
        raise
    fsync_directory(os.path.dirname(path))
