"""A second reader of Erlang's external terms, plain `struct`, written from the description of the format.

Owns one function, which gives a term in a form that does not depend on anybody's classes: a pair of its kind and what it
holds.  It imports nothing of rmqstore.  Facts: Erlang/OTP, "External Term Format" (erts user's guide).
"""

from __future__ import annotations

import struct
from typing import Any

VERSION = 131
#: Tags of atoms: bytes of the length, and how the text is written.
ATOMS = {100: (2, "latin-1"), 115: (1, "latin-1"), 118: (2, "utf-8"), 119: (1, "utf-8")}
#: Processes, ports and references: bytes after the name of the node; None has a count before it.
IDENTITIES = {103: 9, 88: 12, 102: 5, 89: 8, 120: 12, 101: 5, 114: None, 90: None}


class _Bytes:
    def __init__(self, data: bytes, pos: int):
        self.data, self.pos = data, pos

    def take(self, size: int) -> bytes:
        part = self.data[self.pos : self.pos + size]
        if len(part) != size:
            raise ValueError("the data end within the term")
        self.pos += size
        return part

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")


def _atom(data: _Bytes, tag: int) -> str:
    size, code = ATOMS[tag]
    text = data.take(data.number(size)).decode(code)
    if len(text) > 255:
        raise ValueError("an atom has at most 255 characters")
    return text


def _identity(data: _Bytes, tag: int, begin: int) -> tuple[str, bytes]:
    more = IDENTITIES[tag]
    if more is None:
        count = data.number(2)
        if not 1 <= count <= 5:
            raise ValueError("a reference of too many words")
        more = 4 * count + (1 if tag == 114 else 4)
    node = data.number(1)
    if node not in ATOMS:
        raise ValueError("the name of a node is an atom")
    _atom(data, node)
    data.take(more)
    return "identity", data.data[begin : data.pos]


def _value(data: _Bytes) -> tuple[str, Any]:
    begin = data.pos
    tag = data.number(1)
    if tag == 97:
        return "integer", data.number(1)
    if tag == 98:
        return "integer", struct.unpack(">i", data.take(4))[0]
    if tag in (110, 111):
        size, sign = data.number(1 if tag == 110 else 4), data.number(1)
        whole = int.from_bytes(data.take(size), "little")
        return "integer", -whole if sign else whole
    if tag == 70:
        bits = data.take(8)
        if struct.unpack(">d", bits)[0] - struct.unpack(">d", bits)[0] != 0:
            raise ValueError("a float is a finite number")
        return "float", bits
    if tag in ATOMS:
        return "atom", _atom(data, tag)
    if tag == 109:
        return "binary", data.take(data.number(4))
    if tag == 77:
        size, bits = data.number(4), data.number(1)
        if not size or not 1 <= bits <= 8:
            raise ValueError("bits of no byte")
        return "bits", (data.take(size), bits)
    if tag in (104, 105):
        return "tuple", [_value(data) for _ in range(data.number(1 if tag == 104 else 4))]
    if tag == 106:
        return "list", []
    if tag == 107:
        return "list", [("integer", byte) for byte in data.take(data.number(2))]
    if tag == 108:
        items = [_value(data) for _ in range(data.number(4))]
        kind, tail = last = _value(data)
        if kind == "list":
            return "list", items + tail
        if kind == "improper list":
            return "improper list", (items + tail[0], tail[1])
        return ("improper list", (items, last)) if items else last
    if tag == 116:
        return "map", [(_value(data), _value(data)) for _ in range(data.number(4))]
    if tag in IDENTITIES:
        return _identity(data, tag, begin)
    raise ValueError(f"tag {tag}")


def decode_at(data: bytes, pos: int = 0) -> tuple[tuple[str, Any], int]:
    """Decode the term at `pos`, and return the position after it; ValueError if there is no term."""
    reader = _Bytes(data, pos)
    if reader.number(1) != VERSION:
        raise ValueError("no version")
    return _value(reader), reader.pos
