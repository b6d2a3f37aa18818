"""The parts of a message as bytes, and back: texts, properties, hosts, message ids, inner batches.

Owns text as Java encodes and decodes it, so that hashes and bytes agree with a broker's: malformed bytes and lone surrogates
are replaced as Java (8 to 21) replaces them.  Every length of an inner batch is checked before it is used.
"""

from __future__ import annotations

import codecs
import functools
import re
import struct
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rmqstore._core import java_string_hash
from rmqstore.errors import CorruptionError, InvalidMessageError

if TYPE_CHECKING:
    from rmqstore.message.message import Message

__all__ = [
    "MAX_PROPERTIES_SIZE",
    "NAME_VALUE_SEPARATOR",
    "PROPERTY_SEPARATOR",
    "decode_java_utf8",
    "encode_inner_batch",
    "encode_java_utf8",
    "host_from_bytes",
    "host_to_bytes",
    "offset_message_id",
    "parse_message_id",
    "parse_properties",
    "properties_to_bytes",
    "properties_to_text",
    "split_client_form",
    "tags_code",
]

NAME_VALUE_SEPARATOR = "\x01"
PROPERTY_SEPARATOR = "\x02"

MAX_PROPERTIES_SIZE = 32767
"""Largest properties text in bytes: its length is a signed 16-bit field."""

_I16 = struct.Struct(">h")
_I32 = struct.Struct(">i")
_CLIENT_FORM = struct.Struct(">iiiii")  # size, magic 0, CRC 0, flag, body length


def _replace_like_java(error: UnicodeError) -> tuple[str, int]:
    # Python and Java cut malformed UTF-8 into the same parts, except for encoded surrogates (ED A0..BF, with or without
    # a third byte): Java takes all of it as one malformed part, Python every byte on its own.
    assert isinstance(error, UnicodeDecodeError)
    data, pos = error.object, error.start
    if data[pos] == 0xED and pos + 1 < len(data) and 0xA0 <= data[pos + 1] <= 0xBF:
        third_continues = pos + 2 < len(data) and data[pos + 2] & 0xC0 == 0x80
        return "\ufffd", pos + (3 if third_continues else 2)
    return "\ufffd", error.end


codecs.register_error("rmqstore.java", _replace_like_java)

_SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def decode_java_utf8(data: bytes) -> str:
    """Decode UTF-8 as Java's `new String(bytes, UTF_8)` does: every malformed part becomes U+FFFD, nothing fails."""
    return data.decode("utf-8", "rmqstore.java")


def encode_java_utf8(text: str) -> bytes:
    """Encode as Java's `getBytes(UTF_8)` does: surrogate pairs are joined, a lone surrogate becomes ``?``."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        joined = _SURROGATE_PAIR.sub(
            lambda pair: pair.group().encode("utf-16-le", "surrogatepass").decode("utf-16-le"), text
        )
        return joined.encode("utf-8", "replace")


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


def host_to_bytes(host: str) -> bytes:
    """Encode ``"ip:port"`` or ``"[v6]:port"`` as a record does: 4 or 16 address bytes, then the port as i32.

    Returns
    -------
    bytes
        8 bytes for IPv4, 20 for IPv6, big-endian.

    Raises
    ------
    InvalidMessageError
        The text is not a numeric address with a port of 0 to 65535.
    """
    if not isinstance(host, str):
        raise InvalidMessageError(f"host {host!r} is not text: write it as '10.0.0.1:10911' or '[2001:db8::1]:10911'")
    return _pack_host(host)


# The same few hosts come with every message.
@functools.lru_cache(maxsize=4096)
def _pack_host(host: str) -> bytes:
    import ipaddress

    try:
        address, colon, port_text = host.rpartition(":")
        if not colon or not port_text.isascii() or not port_text.isdigit():
            raise ValueError(host)
        port = int(port_text)
        if port > 65535:
            raise ValueError(host)
        if address.startswith("[") and address.endswith("]"):
            packed = ipaddress.IPv6Address(address[1:-1]).packed
        else:
            packed = ipaddress.IPv4Address(address).packed
    except ValueError:
        raise InvalidMessageError(
            f"host {host!r} is not a numeric address and a port: write it as '10.0.0.1:10911' or '[2001:db8::1]:10911'"
        ) from None
    return packed + _I32.pack(port)


def host_from_bytes(data: bytes) -> str:
    """Text of a host as a record holds it (8 or 20 bytes): ``"ip:port"`` or ``"[v6]:port"`` in compressed form.

    Raises
    ------
    CorruptionError
        The data is neither 8 nor 20 bytes long.
    """
    if len(data) == 8:
        return f"{data[0]}.{data[1]}.{data[2]}.{data[3]}:{_I32.unpack_from(data, 4)[0]}"
    if len(data) == 20:
        import ipaddress

        return f"[{ipaddress.IPv6Address(bytes(data[:16])).compressed}]:{_I32.unpack_from(data, 16)[0]}"
    raise CorruptionError(f"a stored host takes 8 or 20 bytes, not {len(data)}")


def offset_message_id(store_host: str | bytes, phy_offset: int) -> str:
    """Return the message id of a broker: upper-case hex of the store host (text or its 8 or 20 bytes) and the offset.

    32 digits for an IPv4 host, 56 for IPv6.
    """
    host = host_to_bytes(store_host) if isinstance(store_host, str) else bytes(store_host)
    return (host + phy_offset.to_bytes(8, "big", signed=True)).hex().upper()


def parse_message_id(msg_id: str) -> tuple[str, int]:
    """Store host and phy offset of an offset message id.

    Raises
    ------
    InvalidMessageError
        Not 32 or 56 hex digits, or a negative offset.
    """
    if not isinstance(msg_id, str) or len(msg_id) not in (32, 56) or not re.fullmatch("[0-9a-fA-F]+", msg_id):
        raise InvalidMessageError(
            f"{msg_id!r} is not an offset message id: it has 32 (IPv4) or 56 (IPv6) hex digits; "
            "a producer's unique key is looked up with query_message"
        )
    data = bytes.fromhex(msg_id)
    phy_offset = int.from_bytes(data[-8:], "big", signed=True)
    if phy_offset < 0:
        raise InvalidMessageError(f"message id {msg_id} holds a negative phy offset: it is a unique key or damaged")
    return host_from_bytes(data[:-8]), phy_offset


def encode_inner_batch(messages: Iterable[Message]) -> bytes:
    """Body of an inner batch: the messages in client form, one after the other.

    Client form: i32 size, i32 0, i32 0, i32 flag, i32 body length, body, i16 properties length, properties.

    Raises
    ------
    InvalidMessageError
        A message that `Message.validate` refuses, messages of several topics, or none at all.
    """
    parts: list[bytes] = []
    topic: str | None = None
    for message in messages:
        message.validate()
        if topic is not None and message.topic != topic:
            raise InvalidMessageError(
                f"a batch is of one topic, this one has {topic!r} and {message.topic!r}: put them in two"
            )
        topic = message.topic
        properties = properties_to_bytes(message.properties)
        size = _CLIENT_FORM.size + len(message.body) + _I16.size + len(properties)
        parts += (
            _CLIENT_FORM.pack(size, 0, 0, message.flag, len(message.body)),
            message.body,
            _I16.pack(len(properties)),
            properties,
        )
    if topic is None:
        raise InvalidMessageError("a batch needs at least one message")
    return b"".join(parts)


def split_client_form(data: bytes, phy_offset: int) -> Iterable[tuple[int, int, bytes, bytes]]:
    """The messages of an inner batch's body: bytes each takes, flag, body, properties as bytes.

    Raises
    ------
    CorruptionError
        The lengths do not fit together; names the batch and the byte of its body.
    """

    def broken(pos: int, what: str) -> CorruptionError:
        return CorruptionError(f"the batch at phy offset {phy_offset} is damaged at byte {pos} of its body: {what}")

    pos = 0
    while pos < len(data):
        rest = len(data) - pos
        if rest < _CLIENT_FORM.size + _I16.size:
            raise broken(pos, f"{rest} bytes are too few for a message")
        size, _, _, flag, body_size = _CLIENT_FORM.unpack_from(data, pos)
        if not _CLIENT_FORM.size + _I16.size <= size <= rest:
            raise broken(pos, f"a message of {size} bytes, {rest} are left")
        if not 0 <= body_size <= size - _CLIENT_FORM.size - _I16.size:
            raise broken(pos, f"a body of {body_size} bytes in a message of {size}")
        body_end = pos + _CLIENT_FORM.size + body_size
        (properties_size,) = _I16.unpack_from(data, body_end)
        if body_end + _I16.size + properties_size != pos + size:
            raise broken(pos, f"properties of {properties_size} bytes do not fill the message")
        body = data[pos + _CLIENT_FORM.size : body_end]
        yield size, flag, body, data[body_end + _I16.size : pos + size]
        pos += size
