"""A second reader of the tables of an orderly stop, DETS and ETS, written from the description of their files.

Owns what a whole table holds, what a search finds in a broken DETS table, the hash of its keys, and the rows that
RabbitMQ keeps in them.  Terms are the pairs of `term_oracle`.  It imports nothing of rmqstore, opens no file, and says
ValueError where a file is not what a node leaves: it never guesses.  Sections 9.1 and 9.3 of the format document;
Erlang/OTP 25.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import term_oracle

Value = tuple[str, Any]
M32 = 2**32 - 1

# ----------------------------------------------------------------------------------------------------------------- DETS

PARTS_AT, PLACES_FROM = 312, 312 + 4 * 256
COOKIE, ACTIVE = 0xABCDEF, 0x12345678
HEADER_FIELDS = (
    "free_lists", "cookie", "closed_properly", "type", "version", "m", "next", "keypos", "objects", "keys", "min_slots",
    "max_slots", "hash_method", "n",
)  # fmt: skip


class NoHashError(ValueError):
    """The hash of such a value is not told here."""


def _whole_term(data: bytes) -> Value:
    value, end = term_oracle.decode_at(data)
    if end != len(data):
        raise ValueError("something follows the term")
    return value


def collection(data: bytes, at: int) -> tuple[list[Value], int]:
    """The objects of the collection at `at`, and its end."""
    if len(data) - at < 8:
        raise ValueError("no room for a head")
    size, status = struct.unpack(">II", data[at : at + 8])
    end = at + size
    if status != ACTIVE or end > len(data):
        raise ValueError("no head of a collection")
    objects = []
    at += 8
    while at != end:
        if end - at < 4:
            raise ValueError("the collection ends within an object's size")
        (size,) = struct.unpack(">I", data[at : at + 4])
        if size < 4 or at + size > end:
            raise ValueError("an object goes beyond its collection")
        kind, parts = value = _whole_term(data[at + 4 : at + size])
        if kind != "tuple" or not parts:
            raise ValueError("an object is a tuple with a key")
        objects.append(value)
        at += size
    if not objects:
        raise ValueError("a collection of nothing")
    return objects, end


def dets_header(data: bytes) -> dict[str, int]:
    """The numbers of a header by name, as they stand there, `base` with them."""
    if len(data) < PLACES_FROM:
        raise ValueError("no whole header")
    header = dict(zip(HEADER_FIELDS, struct.unpack(">14I", data[:56]), strict=True))
    return header | {"base": int.from_bytes(data[184:188], "big")}


def _used_slots(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(place, size, number) of every slot that leads somewhere."""
    taken: set[int] = set()

    def numbers(at: int, count: int) -> tuple[int, ...]:
        # A half of a block begins at a multiple of its own size, and is in the file once.
        if at < PLACES_FROM or (at - PLACES_FROM) % 2048 or at + 4 * count > len(data) or at in taken:
            raise ValueError(f"no part of the table of slots at {at}")
        taken.add(at)
        return struct.unpack(f">{count}I", data[at : at + 4 * count])

    for number, part in enumerate(struct.unpack(">256I", data[PARTS_AT:PLACES_FROM])):
        for index, segment in enumerate(numbers(part, 512) if part else ()):
            slots = numbers(segment, 512) if segment else ()
            for slot in range(len(slots) // 2):
                if slots[2 * slot] or slots[2 * slot + 1]:
                    yield slots[2 * slot + 1], slots[2 * slot], (512 * number + index) * 256 + slot


def dets_objects(data: bytes) -> list[tuple[int, Value]]:
    """(place of its collection, object) of a table that a node opens without a repair, in the order of the places."""
    header = dets_header(data)
    wanted = {"cookie": COOKIE, "closed_properly": 1, "type": 1, "version": 9, "hash_method": 1, "keypos": 1}
    if {name: header[name] for name in wanted} != wanted or not header["m"]:
        raise ValueError(f"a header of another table: {header}")
    checksum = data[168:184]
    if any(checksum) and checksum != hashlib.md5(data[12:168]).digest():
        raise ValueError("the check sum of the header")
    if int.from_bytes(data[-4:], "big") + header["base"] != len(data):
        raise ValueError("the end of the file")
    found: list[tuple[int, Value]] = []
    before = PLACES_FROM
    for at, size, slot in sorted(_used_slots(data)):
        if at < before or (at - PLACES_FROM) % 16:
            raise ValueError("no place of a collection")
        objects, before = collection(data, at)
        if before - at != size:
            raise ValueError("a slot and its collection say other sizes")
        for each in objects:
            try:
                number = phash2(each[1][0])
            except (NoHashError, RecursionError):
                pass
            else:
                own = number % header["m"]
                if own < header["n"]:
                    own = number % (2 * header["m"])
                if own != slot:
                    raise ValueError("an object in the slot of another")
            found.append((at, each))
    keys = [each[1][0] for _, each in found]
    if any(key in keys[:number] for number, key in enumerate(keys)):
        raise ValueError("a set has a key once")
    if not len(keys) == header["objects"] == header["keys"]:
        raise ValueError("another number of objects")
    return found


def dets_search(data: bytes) -> list[tuple[int, Value]]:
    """(place, object) of what lies whole at the steps of 16 bytes, as a repair looks for it; of each key the first."""
    found: list[tuple[int, Value]] = []
    keys: list[Value] = []
    at = PLACES_FROM
    while at < len(data):
        try:
            objects, end = collection(data, at)
        except ValueError:
            at += 16
            continue
        for each in objects:
            if each[1][0] not in keys:
                keys.append(each[1][0])
                found.append((at, each))
        at += -(-(end - at) // 16) * 16
    return found


def recovery_terms(objects: list[Value]) -> tuple[dict[str, dict[str, Value]], int]:
    """{directory: {name: value}} of the objects of recovery.dets, and how many of them are no queue's."""
    found: dict[str, dict[str, Value]] = {}
    strange = 0
    for _, parts in objects:
        try:
            name, terms = _queue_terms(parts)
        except ValueError:
            strange += 1
            continue
        # The first of two that name one directory.
        strange += name in found
        found.setdefault(name, terms)
    return found, strange


def _queue_terms(parts: list[Value]) -> tuple[str, dict[str, Value]]:
    if len(parts) != 2 or parts[1][0] != "list":
        raise ValueError("an object is a directory and its terms")
    (kind, key), (_, pairs) = parts
    if kind == "list":
        key = bytes(_of_kind(each, "integer") for each in key)
    elif kind != "binary":
        raise ValueError("a directory is a text")
    terms = {}
    for pair in pairs:
        name, value = _of_kind(pair, "tuple")
        if terms.setdefault(_of_kind(name, "atom"), value) is not value:
            raise ValueError("a name comes twice")
    return key.decode("utf-8", "surrogateescape"), terms


def _of_kind(value: Value, kind: str) -> Any:
    if value[0] != kind:
        raise ValueError(f"{kind} is wanted")
    return value[1]


def repair_dets(data: bytearray) -> None:
    """Make check sum, counts and end of a table right again; sizes of the collections that its slots know, too."""
    if len(data) < PLACES_FROM + 4:
        return
    try:
        for at, size, _ in _used_slots(bytes(data)):
            if at + 8 <= len(data):
                data[at : at + 4] = struct.pack(">I", size)
                data[at + 4 : at + 8] = struct.pack(">I", ACTIVE)
        count = len(dets_search(bytes(data)))
        data[32:40] = struct.pack(">II", count, count)
    except ValueError:
        pass
    data[168:184] = hashlib.md5(data[12:168]).digest()
    base = int.from_bytes(data[184:188], "big")
    data[-4:] = struct.pack(">I", (len(data) - base) % 2**32)


# -------------------------------------------------------------------------------------------------------- erlang:phash2

#: What is done to each of three words in turn: its neighbour's bits go that far to the left before they are mixed in.
SHIFTS = (-13, 8, -13, -12, 16, -5, -3, 10, -15)
GOLDEN = 0x9E3779B9


def _mixed(*words: int) -> list[int]:
    mixed = [word & M32 for word in words]
    for step, shift in enumerate(SHIFTS):
        at, last = step % 3, mixed[(step + 2) % 3]
        moved = last << shift & M32 if shift > 0 else last >> -shift
        mixed[at] = (mixed[at] - mixed[(at + 1) % 3] - last & M32) ^ moved
    return mixed


def _of_two(first: int, second: int, kind: int, state: int) -> int:
    return _mixed(GOLDEN * kind + first, GOLDEN * kind + second, state)[2]


def _of_bytes(data: bytes, state: int) -> int:
    state = 13 * GOLDEN + state & M32
    if not data:
        return state
    words = [GOLDEN, GOLDEN, state]
    for at in range(0, len(data) - len(data) % 12, 12):
        words = _mixed(*(word + more for word, more in zip(words, struct.unpack_from("<III", data, at), strict=True)))
    rest = data[len(data) - len(data) % 12 :]
    # The lowest byte of the last word is the length's.
    more = (rest[:4], rest[4:8], b"\0" + rest[8:])
    words = [word + int.from_bytes(part, "little") for word, part in zip(words, more, strict=True)]
    return _mixed(words[0], words[1], words[2] + len(data))[2]


def phash2(value: Value) -> int:
    """``erlang:phash2`` of a binary or a list of bytes; NoHashError for kinds that no table of RabbitMQ has as keys."""
    kind, inner = value
    if kind == "binary":
        return _of_bytes(inner, 0) & 2**27 - 1
    if kind != "list" or not all(each[0] == "integer" and 0 <= each[1] < 256 for each in inner):
        raise NoHashError(kind)
    if not inner:
        return 3468870702 & 2**27 - 1
    state = 0
    # Bytes that follow one another are taken four at a time.
    for at in range(0, len(inner), 4):
        state = _of_two(int.from_bytes(bytes(each[1] for each in inner[at : at + 4]), "big"), 0, 4, state)
    return _of_two(2, 0, 2, state) & 2**27 - 1


# ------------------------------------------------------------------------------------------------------------------ ETS

HEAD = bytes.fromhex("01020304 63584d0b")
ITEM = bytes.fromhex("62574c41")
CHECKED_FROM = 65528


class Ets(NamedTuple):
    """A table's image; `end` is None if nothing follows the objects."""

    header: list[tuple[str, Value]]
    objects: list[Value]
    end: Value | None


def ets_items(data: bytes) -> Iterator[Value]:
    """The items of an image, one after the other."""
    if data[:8] != HEAD:
        raise ValueError("no image, or one that was not closed")
    at = 8
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] != ITEM:
            raise ValueError(f"no item at {at}")
        begin = at + 8
        if size >= CHECKED_FROM:
            begin += 16
            if data[at + 8 : begin] != hashlib.md5(data[at : at + 4]).digest():
                raise ValueError("the check sum of a size")
        at = begin + size
        if at > len(data):
            raise ValueError("an item goes beyond the file")
        yield _whole_term(data[begin:at])


def ets_table(data: bytes) -> Ets:
    """A table: its header, objects, and what stands at the end."""
    header, *objects = [*ets_items(data)] or [("nothing", None)]
    names = []
    for each in _of_kind(header, "tuple"):
        name, value = _two_of(each)
        names.append((_of_kind(name, "atom"), value))
    end = None
    if objects and objects[-1][0] == "list":
        _, last = objects.pop()
        if len(last) != 2 or last[0] != ("atom", "$end_of_table"):
            raise ValueError("another end")
        end = last[1]
    for each in objects:
        _of_kind(each, "tuple")
    if end is not None and end[0] == "list":
        for each in end[1]:
            if each[0] == "tuple" and each[1][:1] == [("atom", "count")]:
                if each[1][1:] != [("integer", len(objects))]:
                    raise ValueError("another number of objects")
                break
    return Ets(names, objects, end)


def _two_of(value: Value) -> tuple[Value, Value]:
    parts = _of_kind(value, "tuple")
    if len(parts) != 2:
        raise ValueError("a pair is wanted")
    return parts[0], parts[1]


def _rows(table: Ets, record: str, width: int) -> Iterator[list[Value]]:
    for each in table.objects:
        parts = _of_kind(each, "tuple")
        if len(parts) != width or parts[0] != ("atom", record):
            raise ValueError(f"no {record}")
        yield parts[1:]


def file_summaries(table: Ets) -> list[tuple[Any, ...]]:
    """(file, bytes in use, left, right, size, locked, readers) of each row."""
    found = []
    for file, valid, left, right, size, locked, readers in _rows(table, "file_summary", 8):
        sides = [None if side == ("atom", "undefined") else _of_kind(side, "integer") for side in (left, right)]
        if locked not in (("atom", "true"), ("atom", "false")):
            raise ValueError("locked or not")
        # 4.x counts no readers.
        counted = ("integer", 0) if readers == ("atom", "undefined") else readers
        numbers = [_of_kind(each, "integer") for each in (file, valid, size, counted)]
        found.append((*numbers[:2], *sides, numbers[2], locked == ("atom", "true"), numbers[3]))
    return found


def msg_locations(table: Ets) -> list[tuple[Any, ...]]:
    """(id, references, file, place, size) of each row."""
    found = []
    for msg_id, *numbers in _rows(table, "msg_location", 6):
        if len(_of_kind(msg_id, "binary")) != 16 or any(_of_kind(each, "integer") < 0 for each in numbers):
            raise ValueError("no place of a message")
        found.append((msg_id[1], *(each[1] for each in numbers)))
    return found


def repair_ets(data: bytearray) -> None:
    """Make the size of each item that of its term again, as far as terms can be read, and the check sums with them."""
    at = 8
    while data[at + 4 : at + 8] == ITEM:
        size = int.from_bytes(data[at : at + 4], "big")
        begin = at + 8 + 16 * (size >= CHECKED_FROM)
        try:
            size = term_oracle.decode_at(bytes(data[begin:]))[1]
        except (ValueError, RecursionError):
            return
        if (size >= CHECKED_FROM) == (begin > at + 8):
            data[at : at + 4] = size.to_bytes(4, "big")
            if begin > at + 8:
                data[at + 8 : begin] = hashlib.md5(data[at : at + 4]).digest()
        at = begin + size
