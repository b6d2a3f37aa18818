"""Tables that `ets:tab2file` wrote, and `clean.dot`: what a message store leaves when it is stopped in order.

Owns the image of a table in a log of `disk_log`, and the rows of `file_summary.ets` and `msg_store_index.ets`.  It writes no
file by itself.  Reading is strict: a node does not use a damaged table either, and scans its files.

Source of all rules: Erlang/OTP 25 (`ets`, `disk_log`), RabbitMQ 3.10.8 (docs/rabbitmq.md).
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rmqstore.errors import CorruptionError
from rmqstore.files.open_file import open_regular
from rmqstore.rabbitmq import _term
from rmqstore.rabbitmq._term import Atom
from rmqstore.rabbitmq.term import consult, format_term, is_list, is_tuple

__all__ = [
    "EtsTable",
    "FileSummary",
    "MsgLocation",
    "clean_dot",
    "clean_dot_values",
    "encode",
    "file_summaries",
    "file_summary_table",
    "make_table",
    "msg_locations",
    "msg_store_index_table",
    "parse",
    "parse_clean_dot",
    "read",
]

MAGIC = bytes.fromhex("01020304")
CLOSED = bytes.fromhex("63584d0b")
ITEM = 0x62574C41
# Items of this size on have the checksum of their length before them.
CHECKSUM_FROM = 65528

_UNDEFINED = Atom("undefined")
INDEX_MODULE = "rabbit_msg_store_ets_index"


class EtsTable:
    """A table's image.

    Attributes
    ----------
    header : list of (str, value)
        What the table was, in the file's order: name, size, node, type, keypos and others.
    objects : list of tuple
    end : list or None
        What stands after the objects: ``[(count, n)]`` or a checksum; None where nothing does.
    """

    def __init__(self, header: Iterable[tuple[str, Any]], objects: Iterable[tuple[Any, ...]], end: Any = None):
        self.header = list(header)
        self.objects = list(objects)
        self.end = end

    def __getitem__(self, name: str) -> Any:
        return dict(self.header)[name]

    def __repr__(self) -> str:
        return f"<EtsTable {dict(self.header).get('name')} of {len(self.objects)} objects>"


def parse(data: bytes, *, path: str | None = None) -> EtsTable:
    """Read a table's bytes.

    Raises
    ------
    CorruptionError
        They are not such an image, were not closed, or hold not as many objects as they say.
    """
    data = bytes(data)
    if data[:4] != MAGIC:
        raise CorruptionError("no image of a table: it does not begin with 01 02 03 04", path, 0)
    if data[4:8] != CLOSED:
        raise CorruptionError("the image of the table was not closed", path, 4)
    at = 8
    items = []
    while at < len(data):
        if len(data) - at < 8:
            raise CorruptionError("an item ends before its size", path, at)
        size, magic = struct.unpack_from(">II", data, at)
        if magic != ITEM:
            raise CorruptionError("no item begins here", path, at)
        begin = at + 8
        if size >= CHECKSUM_FROM:
            if data[begin : begin + 16] != hashlib.md5(data[at : at + 4], usedforsecurity=False).digest():
                raise CorruptionError("the checksum of an item's size does not agree with it", path, begin)
            begin += 16
        if size > len(data) - begin:
            raise CorruptionError(f"an item of {size} bytes goes beyond the file", path, at)
        try:
            # A node compresses no term here, and one that is could fill memory.
            items.append(_term.decode(data[begin : begin + size], max_size=0))
        except CorruptionError as error:
            raise CorruptionError(error.message, path, begin + (error.pos or 0)) from None
        at = begin + size
    if not items:
        raise CorruptionError("the image has no header", path, 8)
    header = header_of(items[0], path)
    objects, end = items[1:], None
    last = objects[-1] if objects else None
    if is_list(last) and last and last[0] == "$end_of_table":
        if len(last) != 2:
            raise CorruptionError("the end of the image is not as Erlang writes it", path, at)
        end = last[1]
        objects.pop()
    if not all(is_tuple(one) for one in objects):
        raise CorruptionError("an object of the image is not a tuple", path, 8)
    counts = [one[1:] for one in end if is_tuple(one) and one and one[0] == "count"] if is_list(end) else []
    if counts and not _says(counts[0], len(objects)):
        raise CorruptionError(f"the image says {counts[0]} objects and holds {len(objects)}", path, at)
    return EtsTable(header, objects, end)


def _says(values: tuple[Any, ...], number: int) -> bool:
    return len(values) == 1 and type(values[0]) is int and values[0] == number


def header_of(item: Any, path: str | None) -> list[tuple[str, Any]]:
    """The names and values of an image's first item; CorruptionError if it has something else."""
    if not is_tuple(item) or not all(is_tuple(one) and len(one) == 2 and isinstance(one[0], Atom) for one in item):
        raise CorruptionError("the header of the image is not a list of names and values", path, 8)
    return [(str(name), value) for name, value in item]


def is_counted(end: Any, number: int) -> bool:
    """bool: what stands at the end of an image counts so many objects, and says nothing else."""
    only = end[0] if is_list(end) and len(end) == 1 else ()
    return is_tuple(only) and only[:1] == ("count",) and _says(only[1:], number)


def read(path: str | os.PathLike[str]) -> EtsTable:
    """Read the image at `path`; CorruptionError as of `parse`, OSError if the file cannot be read."""
    with open(open_regular(os.fspath(path)), "rb") as file:
        return parse(file.read(), path=os.fspath(path))


def encode(table: EtsTable) -> bytes:
    """bytes: the image of a table, closed; one that `parse` read is equal to what it was read from."""
    items: list[Any] = [tuple((Atom(name), value) for name, value in table.header), *table.objects]
    if table.end is not None:
        items.append([Atom("$end_of_table"), table.end])
    parts = [MAGIC, CLOSED]
    for item in items:
        term = _term.encode(item)
        size = struct.pack(">I", len(term))
        parts += [size, struct.pack(">I", ITEM)]
        if len(term) >= CHECKSUM_FROM:
            parts.append(hashlib.md5(size, usedforsecurity=False).digest())
        parts.append(term)
    return b"".join(parts)


def make_table(
    name: str, kind: str, objects: Sequence[tuple[Any, ...]], *, keypos: int = 2, node: str = "rabbit"
) -> EtsTable:
    """A table with the header that `ets:file2tab` needs.

    Parameters
    ----------
    name : str
    kind : {"set", "ordered_set"}
    objects : sequence of tuple
    keypos : int
        Which element is the key, from 1 on.
    node : str
        The name of the node; it is information only.
    """
    false = Atom("false")
    header = [
        ("decentralized_counters", false),
        ("read_concurrency", false),
        ("write_concurrency", false),
        ("compressed", false),
        ("name", Atom(name)),
        ("size", len(objects)),
        ("node", Atom(node)),
        ("named_table", false),
        ("type", Atom(kind)),
        ("keypos", keypos),
        ("protection", Atom("public")),
        ("major_version", 1),
        ("minor_version", 0),
        ("extended_info", [Atom("object_count")]),
    ]
    return EtsTable(header, objects, [(Atom("count"), len(objects))])


# ---------------------------------------------------------------------------------------------------------------------
# The tables of a message store


class FileSummary(NamedTuple):
    """A row of `file_summary.ets`: a message file.

    `valid_total_size` sums the records whose reference count is above 0; `left` and `right` are the neighbours' numbers.
    """

    file: int
    valid_total_size: int
    left: int | None
    right: int | None
    file_size: int
    locked: bool = False
    readers: int = 0


class MsgLocation(NamedTuple):
    """A row of `msg_store_index.ets`: where a message lies; `total_size` is that of its record, with size and marker."""

    msg_id: bytes
    ref_count: int
    file: int
    offset: int
    total_size: int


def file_summary_table(rows: Iterable[FileSummary], *, node: str = "rabbit") -> EtsTable:
    """The table `file_summary.ets` of a store; rows in any order."""
    objects = [
        (
            Atom("file_summary"),
            row.file,
            row.valid_total_size,
            _UNDEFINED if row.left is None else row.left,
            _UNDEFINED if row.right is None else row.right,
            row.file_size,
            Atom("true" if row.locked else "false"),
            row.readers,
        )
        for row in sorted(rows)
    ]
    return make_table("rabbit_msg_store_file_summary", "ordered_set", objects, node=node)


def msg_store_index_table(rows: Iterable[MsgLocation], *, node: str = "rabbit") -> EtsTable:
    """The table `msg_store_index.ets` of a store."""
    return make_table(INDEX_MODULE, "set", [(Atom("msg_location"), *row) for row in rows], node=node)


def _is(kind: type, *values: Any) -> bool:
    return all(isinstance(value, kind) and not isinstance(value, bool) for value in values)


def file_summaries(table: EtsTable) -> list[FileSummary]:
    """The rows of `file_summary.ets`; CorruptionError if an object is not such a row."""
    rows = []
    for one in table.objects:
        # 4.x counts no readers there.
        readers = one[7] if len(one) == 8 and one[7] != _UNDEFINED else 0
        if len(one) != 8 or one[0] != "file_summary" or not _is(int, one[1], one[2], one[5], readers):
            raise CorruptionError(f"{one!r} is not a row of file_summary.ets")
        left, right = (None if side == _UNDEFINED else side for side in one[3:5])
        if not all(side is None or _is(int, side) for side in (left, right)) or one[6] not in ("true", "false"):
            raise CorruptionError(f"{one!r} is not a row of file_summary.ets")
        rows.append(FileSummary(one[1], one[2], left, right, one[5], one[6] == "true", readers))
    return rows


def msg_locations(table: EtsTable) -> list[MsgLocation]:
    """The rows of `msg_store_index.ets`; CorruptionError if an object is not such a row."""
    rows = []
    for one in table.objects:
        whole = len(one) == 6 and one[0] == "msg_location" and _is(bytes, one[1]) and len(one[1]) == 16
        if not whole or not _is(int, *one[2:]) or min(one[2:]) < 0:
            raise CorruptionError(f"{one!r} is not a row of msg_store_index.ets")
        rows.append(MsgLocation(*one[1:]))
    return rows


def clean_dot(client_refs: Iterable[bytes]) -> bytes:
    """bytes: the contents of `clean.dot` for these references, in their order, as a node writes them."""
    terms = [(Atom("client_refs"), list(client_refs)), (Atom("index_module"), Atom(INDEX_MODULE))]
    return b"".join(format_term(term, numbers=True).encode("ascii") + b".\n" for term in terms)


def clean_dot_values(data: bytes, *, path: str | None = None) -> dict[str, Any]:
    """Return the values of a `clean.dot` by name; CorruptionError if it is damaged."""
    found: dict[str, Any] = {}
    for one in consult(data, path=path):
        if not isinstance(one, tuple) or len(one) != 2 or not isinstance(one[0], Atom):
            raise CorruptionError("clean.dot holds something else than names and values", path, 0)
        found[str(one[0])] = one[1]
    return found


def parse_clean_dot(data: bytes, *, path: str | None = None) -> list[bytes]:
    """The references that `clean.dot` holds.

    Raises
    ------
    CorruptionError
        It is damaged, or of a store with another index module; a node then scans its files.
    """
    found = clean_dot_values(data, path=path)
    refs = found.get("client_refs")
    if not isinstance(refs, list) or not all(isinstance(ref, bytes) for ref in refs):
        raise CorruptionError("clean.dot has no client_refs", path, 0)
    # 4.x has one module for the index, and does not name it.
    if found.get("index_module", INDEX_MODULE) != INDEX_MODULE:
        raise CorruptionError(f"clean.dot names the index module {found['index_module']}, not {INDEX_MODULE}", path, 0)
    return refs
