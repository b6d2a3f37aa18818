"""The properties of a message as the text that a record holds, and the tags code that follows from one of them."""

from __future__ import annotations

from collections.abc import Mapping

from rmqstore._core import java_string_hash
from rmqstore.message.java_text import decode_java_utf8, encode_java_utf8

__all__ = [
    "MAX_PROPERTIES_SIZE",
    "NAME_VALUE_SEPARATOR",
    "PROPERTY_SEPARATOR",
    "parse_properties",
    "properties_to_bytes",
    "properties_to_text",
    "tags_code",
]

NAME_VALUE_SEPARATOR = "\x01"
PROPERTY_SEPARATOR = "\x02"

MAX_PROPERTIES_SIZE = 32767
"""Largest properties text in bytes: its length is a signed 16-bit field."""


def properties_to_text(properties: Mapping[str, str | None]) -> str:
    """Properties as the text that a record holds, in the mapping's order.

    A pair is ``name 0x01 value 0x02``, the last one included (RocketMQ 4.0 to 4.9.0 and since 5.2.0).  None values are
    left out; empty values are written, although no reader gives them back.
    """
    return "".join(
        [
            f"{name}{NAME_VALUE_SEPARATOR}{value}{PROPERTY_SEPARATOR}"
            for name, value in properties.items()
            if value is not None
        ]
    )


def properties_to_bytes(properties: Mapping[str, str | None]) -> bytes:
    """`properties_to_text` in UTF-8 as Java encodes it."""
    return encode_java_utf8(properties_to_text(properties))


def parse_properties(data: bytes) -> dict[str, str]:
    """Parse a record's properties with exactly the rules of Java's MessageDecoder.string2messageProperties.

    The text is cut at 0x02; the last separator may be missing.  In a piece the first 0x01 ends the name, so the value
    may hold more of them.  A piece without 0x01, with an empty name or with an empty value is dropped.  Of equal names
    the last one wins.  Malformed UTF-8 gives U+FFFD and never fails.
    """
    # Cutting the bytes and then decoding the pieces would give the same: no malformed part of UTF-8 ever takes in a
    # byte below 0x80, so both separators survive decoding.  One decoding of the whole is faster.
    properties = {}
    for piece in decode_java_utf8(data).split(PROPERTY_SEPARATOR):
        name, _, value = piece.partition(NAME_VALUE_SEPARATOR)
        if name and value:
            properties[name] = value
    return properties


def tags_code(tags: str | None) -> int:
    """Tags code of a consume-queue unit: the signed 32-bit Java hash of the whole text; 0 for None and ``""``."""
    return java_string_hash(tags) if tags else 0
