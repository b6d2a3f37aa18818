"""Messages: what goes into the log and what comes out of it, and the codecs of their parts.

Owns `Message` and `MessageExt`, the properties text, tags codes, message ids, hosts, `SysFlag`, body compression and
the client form of inner batches.  It never touches a file and never decodes a whole record (`_core` does that).
Invariants:

- Text is encoded and decoded as Java does (`encode_java_utf8`, `decode_java_utf8`), so that hashes and bytes agree.
- Every length that comes out of a body is checked before it is used, and no body grows beyond `MAX_BODY_SIZE`.
- A `MessageExt` keeps the record as it was decoded; everything else in it is computed from that on first use.

The layout facts are those of Apache RocketMQ 4.0 to 5.5.0.
"""

from __future__ import annotations

import base64
import codecs
import enum
import functools
import re
import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from rmqstore._core import MessageFields, StoredMessage, adopt, crc32, java_string_hash
from rmqstore.errors import (
    CorruptionError,
    InvalidMessageError,
    MissingDependencyError,
    StoreError,
    UnsupportedFormatError,
)

__all__ = [
    "MAX_BODY_SIZE",
    "MAX_PROPERTIES_SIZE",
    "NAME_VALUE_SEPARATOR",
    "PROPERTY_SEPARATOR",
    "CompressionType",
    "Message",
    "MessageExt",
    "SysFlag",
    "check_topic",
    "compress_body",
    "compression_flags",
    "decode_java_utf8",
    "decompress_body",
    "encode_inner_batch",
    "encode_java_utf8",
    "host_from_bytes",
    "host_to_bytes",
    "offset_message_id",
    "parse_message_id",
    "parse_properties",
    "properties_to_bytes",
    "properties_to_text",
    "tags_code",
]

NAME_VALUE_SEPARATOR = "\x01"
PROPERTY_SEPARATOR = "\x02"

MAX_PROPERTIES_SIZE = 32767
"""Largest properties text in bytes: its length is a signed 16-bit field."""

MAX_BODY_SIZE = 256 * 1024 * 1024
"""Largest body in bytes that decompression produces; a broker's own default limit for a body is 4 MiB."""

MAX_TOPIC_LENGTH = 127
MAX_RETRY_TOPIC_LENGTH = 255
_RETRY_PREFIXES = ("%RETRY%", "%DLQ%")
_TOPIC_CHARACTERS = re.compile(r"[%|a-zA-Z0-9_-]+")

_I16 = struct.Struct(">h")
_I32 = struct.Struct(">i")
_CLIENT_FORM = struct.Struct(">iiiii")  # size, magic 0, CRC 0, flag, body length
_INT32_RANGE = (-(2**31), 2**31 - 1)
_INT64_RANGE = (-(2**63), 2**63 - 1)


# ---------------------------------------------------------------------------------------------------------- flags


class SysFlag(enum.IntFlag):
    """Bits of a record's sysFlag field (RocketMQ's MessageSysFlag)."""

    COMPRESSED = 0x1
    MULTI_TAGS = 0x2
    TRANSACTION_PREPARED = 0x4
    TRANSACTION_COMMIT = 0x8
    TRANSACTION_ROLLBACK = 0xC
    TRANSACTION_MASK = 0xC
    BORN_HOST_V6 = 0x10
    STORE_HOST_V6 = 0x20
    NEED_UNWRAP = 0x40
    INNER_BATCH = 0x80
    COMPRESSION_MASK = 0x700


class CompressionType(enum.IntEnum):
    """Values of the three compression bits; 0 means ZLIB too, as writers before the field existed leave it."""

    LZ4 = 1
    ZSTD = 2
    ZLIB = 3


_COMPRESSION_SHIFT = 8


def compression_flags(type: CompressionType | int | str) -> int:
    """The sysFlag bits that say that a body is compressed as `type` (a `CompressionType`, its number or its name)."""
    return SysFlag.COMPRESSED.value | _compression_type(type) << _COMPRESSION_SHIFT


def _compression_type(type: CompressionType | int | str) -> CompressionType:
    try:
        return CompressionType[type.upper()] if isinstance(type, str) else CompressionType(type)
    except (KeyError, ValueError):
        raise ValueError(f"unknown compression type {type!r}: give LZ4, ZSTD or ZLIB") from None


# ----------------------------------------------------------------------------------------------------------- text


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


# ------------------------------------------------------------------------------------------------------ hosts, ids


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
    """Message id that a broker returns: upper-case hex of the store host (text or its 8 or 20 bytes) and the offset.

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


# ---------------------------------------------------------------------------------------------------- compression


def _missing(library: str, type: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"{type} bodies need the library {library}: install it with 'pip install rmqstore[compression]'"
    )


def compress_body(body: bytes, type: CompressionType | int | str, level: int | None = None) -> bytes:
    """Compress a body; the sysFlag bits that go with it are `compression_flags` of the same type.

    Parameters
    ----------
    body : bytes
    type : CompressionType, int or str
        LZ4 (one frame), ZSTD or ZLIB.
    level : int, optional
        The library's level; None takes RocketMQ's default of 5 for ZSTD and ZLIB.  Java's LZ4 takes no level; here it
        is that of the lz4 library, by default its fast mode.

    Raises
    ------
    MissingDependencyError
        The lz4 or zstandard library is not installed.
    """
    kind = _compression_type(type)
    if kind is CompressionType.ZLIB:
        return zlib.compress(body, 5 if level is None else level)
    if kind is CompressionType.LZ4:
        try:
            import lz4.frame
        except ImportError:
            raise _missing("lz4", "LZ4") from None
        # RocketMQ's reader (lz4-java) takes independent blocks only.
        return bytes(lz4.frame.compress(body, compression_level=level or 0, block_linked=False))
    try:
        import zstandard
    except ImportError:
        raise _missing("zstandard", "ZSTD") from None
    return bytes(zstandard.ZstdCompressor(level=5 if level is None else level).compress(body))


def decompress_body(body: bytes, sys_flag: int, max_size: int = MAX_BODY_SIZE) -> bytes:
    """The body as it was sent; the body itself when `sys_flag` does not say that it is compressed, or when it is empty.

    What follows a whole stream is treated as the libraries of RocketMQ's broker do: ZLIB ignores it; LZ4 takes further
    frames and refuses anything else; ZSTD takes further frames, ignores fewer than 4 bytes and refuses anything else.

    Raises
    ------
    CorruptionError
        The stream is damaged or cut short, or it holds more than `max_size` bytes.
    UnsupportedFormatError
        A compression type that no release of RocketMQ defines (4 to 7).
    MissingDependencyError
        The lz4 or zstandard library is not installed.
    """
    if not sys_flag & 0x1 or not body:
        return body
    kind = (sys_flag & 0x700) >> _COMPRESSION_SHIFT
    if kind in (0, CompressionType.ZLIB):
        return _decompress_zlib(body, max_size)
    if kind == CompressionType.LZ4:
        return _decompress_lz4(body, max_size)
    if kind == CompressionType.ZSTD:
        return _decompress_zstd(body, max_size)
    raise UnsupportedFormatError(f"RocketMQ does not define body compression type {kind} (sysFlag {sys_flag:#x})")


def _too_large(kind: str, max_size: int) -> CorruptionError:
    return CorruptionError(f"the {kind} body holds more than {max_size} bytes: too much to be a message")


def _broken(kind: str, error: object) -> CorruptionError:
    return CorruptionError(f"the {kind} body cannot be decompressed: {error}")


def _decompress_zlib(body: bytes, max_size: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        out = stream.decompress(body, max_size + 1)
    except zlib.error as error:
        raise _broken("ZLIB", error) from None
    if len(out) > max_size:
        raise _too_large("ZLIB", max_size)
    if not stream.eof:
        raise _broken("ZLIB", "the stream is cut short")
    return out


_LZ4_MAGIC = 0x184D2204
_SKIPPABLE_MAGIC = 0x184D2A50
_LZ4_PIECE = 256 * 1024


def _decompress_lz4(body: bytes, max_size: int) -> bytes:
    try:
        import lz4.frame
    except ImportError:
        raise _missing("lz4", "LZ4") from None
    out: list[bytes] = []
    size = 0
    frames = 0
    rest = bytes(body)
    while rest:
        magic = int.from_bytes(rest[:4], "little")
        if len(rest) < 4:
            raise _broken("LZ4", f"{len(rest)} bytes follow the last frame")
        if magic & 0xFFFFFFF0 == _SKIPPABLE_MAGIC:
            end = 8 + int.from_bytes(rest[4:8], "little")
            if len(rest) < end:
                raise _broken("LZ4", "a skippable frame is cut short")
            rest = rest[end:]
            continue
        if magic != _LZ4_MAGIC:
            raise _broken("LZ4", f"no frame begins with {magic:#010x}")
        frames += 1
        stream = lz4.frame.LZ4FrameDecompressor()
        data = rest
        try:
            # The output of a call is bounded, so that a small body cannot claim all the memory at once.
            while not stream.eof:
                piece = stream.decompress(data, max_length=_LZ4_PIECE)
                data = b""
                size += len(piece)
                if size > max_size:
                    raise _too_large("LZ4", max_size)
                out.append(piece)
                if not piece and not stream.eof and stream.needs_input:
                    raise _broken("LZ4", "the frame is cut short")
        except (RuntimeError, EOFError, MemoryError, ValueError) as error:
            if isinstance(error, StoreError):
                raise
            raise _broken("LZ4", error) from None
        rest = stream.unused_data or b""
    if not frames:
        raise _broken("LZ4", "it holds no frame")
    return b"".join(out)


# A block of 4 stored bytes may stand for 128 KiB, so that one step of the input gives 16 MiB at most.
_ZSTD_STEP = 512


def _decompress_zstd(body: bytes, max_size: int) -> bytes:
    try:
        import zstandard
    except ImportError:
        raise _missing("zstandard", "ZSTD") from None
    out: list[bytes] = []
    size = 0
    pos = 0
    decompressor = zstandard.ZstdDecompressor()
    view = memoryview(body)
    while pos < len(view):
        if pos and len(view) - pos < 4:
            break
        stream = decompressor.decompressobj()
        try:
            while not stream.eof:
                step = view[pos : pos + _ZSTD_STEP]
                if not step:
                    raise _broken("ZSTD", "the frame is cut short")
                piece = stream.decompress(step)
                pos += len(step)
                size += len(piece)
                if size > max_size:
                    raise _too_large("ZSTD", max_size)
                out.append(piece)
        except (zstandard.ZstdError, MemoryError) as error:
            raise _broken("ZSTD", error) from None
        pos -= len(stream.unused_data)
    return b"".join(out)


# -------------------------------------------------------------------------------------------------------- messages


def _join_keys(keys: Iterable[str] | str) -> str:
    if isinstance(keys, str):
        if keys and not keys.strip(" "):
            raise InvalidMessageError("the keys are only spaces: leave them out or give at least one key")
        return keys
    pieces = list(keys)
    for key in pieces:
        if not isinstance(key, str):
            raise InvalidMessageError(f"key {key!r} is not text: give keys as str")
        if not key:
            raise InvalidMessageError("an empty key cannot be stored: leave it out")
        if " " in key:
            raise InvalidMessageError(f"key {key!r} contains a space, which separates keys: replace it")
        if NAME_VALUE_SEPARATOR in key or PROPERTY_SEPARATOR in key:
            raise InvalidMessageError(f"key {key!r} contains \\x01 or \\x02, which separate properties: replace them")
    return " ".join(pieces)


@functools.lru_cache(maxsize=4096)
def check_topic(topic: str) -> None:
    """Raise InvalidMessageError for a topic that a broker refuses; a good one is looked at once."""
    if not topic:
        raise InvalidMessageError("the topic is empty: give a name")
    if not _TOPIC_CHARACTERS.fullmatch(topic):
        odd = sorted(set(_TOPIC_CHARACTERS.sub("", topic)))
        raise InvalidMessageError(
            f"topic {topic!r} has characters that a broker refuses ({' '.join(map(repr, odd))}): "
            "use letters, digits and % | _ -"
        )
    limit = MAX_RETRY_TOPIC_LENGTH if topic.startswith(_RETRY_PREFIXES) else MAX_TOPIC_LENGTH
    if len(topic) > limit:
        raise InvalidMessageError(
            f"topic {topic[:40]!r}... has {len(topic)} characters, at most {limit} are allowed: shorten it"
        )


_FIELDS = (
    "body", "born_host", "born_timestamp", "flag", "prepared_transaction_offset", "properties", "reconsume_times",
    "store_host", "sys_flag", "topic",
)  # fmt: skip
_NUMBER_RANGES = (
    ("flag", *_INT32_RANGE),
    ("sys_flag", *_INT32_RANGE),
    ("reconsume_times", *_INT32_RANGE),
    ("born_timestamp", *_INT64_RANGE),
    ("prepared_transaction_offset", *_INT64_RANGE),
)


class Message(MessageFields):
    """A message to put.

    Parameters
    ----------
    topic : str
    body : bytes-like
        Stored as bytes.
    keys : iterable of str, or str
        What the message can be found by; one string is split at spaces.
    tags : str, optional
        What consumers filter by; ``""`` counts as none.
    properties : mapping of str to str, optional
        Further properties.  The record holds KEYS, TAGS, then these in their order; KEYS or TAGS given in here (and not
        by `keys` or `tags`) keep their place.  None values are left out.
    flag : int
        32-bit flag for the application's use.
    born_timestamp : int, optional
        Milliseconds since the epoch; the store takes its clock when it is None.
    born_host, store_host : str, optional
        ``"ip:port"`` or ``"[v6]:port"``; the store takes its configured host when None.
    sys_flag : int
        `SysFlag` bits.
    reconsume_times : int
    prepared_transaction_offset : int

    Raises
    ------
    InvalidMessageError
        A body that is not bytes, keys that hold a separator, tags or properties that are not text.  Everything else is
        checked by `validate`, which the store calls before it writes.
    """

    __slots__ = ()

    def __init__(
        self,
        topic: str,
        body: bytes | bytearray | memoryview = b"",
        *,
        keys: Iterable[str] | str = (),
        tags: str | None = None,
        properties: Mapping[str, str | None] | None = None,
        flag: int = 0,
        born_timestamp: int | None = None,
        born_host: str | None = None,
        sys_flag: int = 0,
        reconsume_times: int = 0,
        prepared_transaction_offset: int = 0,
        store_host: str | None = None,
    ):
        if type(body) is not bytes:
            try:
                body = bytes(memoryview(body))
            except TypeError:
                raise InvalidMessageError(
                    f"the body is {type(body).__name__}, not bytes: encode it first, for example with .encode()"
                ) from None
        stored: dict[str, str] = {}
        joined = _join_keys(keys)
        if joined:
            stored["KEYS"] = joined
        if tags is not None and not isinstance(tags, str):
            raise InvalidMessageError(f"tags {tags!r} are not text: give one str")
        if tags:
            stored["TAGS"] = tags
        if properties:
            for name, value in properties.items():
                if value is None:
                    continue
                if stored.get(name, value) != value:
                    raise InvalidMessageError(
                        f"property {name} is given twice, as {stored[name]!r} and as {value!r}: give it once"
                    )
                stored[name] = value
        self.topic = topic
        self.body = body
        self.properties = stored
        self.flag = flag
        self.born_timestamp = born_timestamp
        self.born_host = born_host
        self.sys_flag = sys_flag
        self.reconsume_times = reconsume_times
        self.prepared_transaction_offset = prepared_transaction_offset
        self.store_host = store_host

    @property
    def keys(self) -> list[str]:
        """The pieces of the KEYS property, split at spaces."""
        return [key for key in self.properties.get("KEYS", "").split(" ") if key]

    @property
    def tags(self) -> str | None:
        """The TAGS property, None when there is none."""
        tags: str | None = self.properties.get("TAGS")
        return tags

    @property
    def unique_key(self) -> str | None:
        """The producer's id (property UNIQ_KEY), None when there is none."""
        unique_key: str | None = self.properties.get("UNIQ_KEY")
        return unique_key

    @property
    def delay_level(self) -> int:
        """The DELAY property as a number; 0 when it is absent or not a number."""
        try:
            return int(self.properties.get("DELAY", 0))
        except ValueError:
            return 0

    def validate(self) -> None:
        """Check everything that no configuration is needed for: the rules of RocketMQ 5.5.0's client and broker.

        Raises
        ------
        InvalidMessageError
            What is wrong and what to do; the message is unchanged.
        """
        topic = self.topic
        if not isinstance(topic, str):
            raise InvalidMessageError(f"topic {topic!r} is not text: give a str")
        check_topic(topic)
        if not isinstance(self.body, bytes):
            raise InvalidMessageError(f"the body is {type(self.body).__name__}, not bytes: encode it first")
        if self.properties:
            self._validate_properties()
        for name, low, high in _NUMBER_RANGES:
            number = getattr(self, name)
            if number is None and name == "born_timestamp":
                continue
            if not isinstance(number, int) or not low <= number <= high:
                raise InvalidMessageError(f"{name} is {number!r}: give an int from {low} to {high}")
        if self.born_host is not None:
            host_to_bytes(self.born_host)
        if self.store_host is not None:
            host_to_bytes(self.store_host)

    def _validate_properties(self) -> None:
        properties = self.properties
        for name, value in properties.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise InvalidMessageError(f"property {name!r} = {value!r} is not text: give name and value as str")
            if not name:
                raise InvalidMessageError(f"a property with value {value!r} has an empty name: give it a name")
            if (
                NAME_VALUE_SEPARATOR in name
                or PROPERTY_SEPARATOR in name
                or NAME_VALUE_SEPARATOR in value
                or PROPERTY_SEPARATOR in value
            ):
                raise InvalidMessageError(
                    f"property {name!r} = {value!r} contains \\x01 or \\x02, which separate properties: replace them"
                )
        text = properties_to_text(properties)
        # Text takes at most four bytes a character, so that short ones need no encoding to be sure.
        if len(text) * 4 > MAX_PROPERTIES_SIZE:
            size = len(encode_java_utf8(text))
            if size > MAX_PROPERTIES_SIZE:
                raise InvalidMessageError(
                    f"the properties take {size} bytes, a record holds at most {MAX_PROPERTIES_SIZE}: "
                    "move large values into the body"
                )
        keys = properties.get("KEYS")
        if keys is not None and not keys.strip(" "):
            raise InvalidMessageError("the KEYS property holds no key: leave it out or give at least one key")
        level = properties.get("DELAY")
        if level is not None and not re.fullmatch(r"[+-]?[0-9]{1,9}", level):
            raise InvalidMessageError(f"property DELAY is {level!r}: give the number of a delay level")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _FIELDS)

    __hash__ = None  # type: ignore[assignment]  # A message may be changed, so it has no hash.

    def __repr__(self) -> str:
        body = repr(self.body) if len(self.body) <= 32 else f"<{len(self.body)} bytes>"
        parts = [repr(self.topic), body]
        if self.properties:
            parts.append(f"properties={self.properties!r}")
        for name in ("flag", "sys_flag", "reconsume_times", "prepared_transaction_offset"):
            if getattr(self, name):
                parts.append(f"{name}={getattr(self, name)!r}")
        for name in ("born_timestamp", "born_host", "store_host"):
            if getattr(self, name) is not None:
                parts.append(f"{name}={getattr(self, name)!r}")
        return f"Message({', '.join(parts)})"


# Places in the tuple that `_core.decode_record` returns.
_TOTAL_SIZE: Final = 0
_BODY_CRC: Final = 2
_FLAG: Final = 4
_QUEUE_OFFSET: Final = 5
_SYS_FLAG: Final = 7
_BODY: Final = 14
_PROPERTIES: Final = 16

_PROPERTIES_CRC = re.compile(rb"(?:\A|\x02)__CRC32#\x01([0-9]{10})\x02?\Z")

Record = tuple[
    int, int, int, int, int, int, int, int, int, bytes, int, bytes, int, int, bytes, str, bytes, bool
]  # fmt: skip


class MessageExt(StoredMessage, Message):  # Its fields are read-only, those of Message are not.
    """A message that was read from a store.  It cannot be changed.

    Sizes are in bytes, timestamps in milliseconds since the epoch.  The fields, and `keys`, `tags` and `unique_key`, are
    those of the compiled `_core.StoredMessage`.

    Notes
    -----
    It is made from a tuple, the 18 fields of `_core.decode_record`: total_size, version (1 or 2), body_crc, queue_id, flag,
    queue_offset, phy_offset, sys_flag, born_timestamp, born_host (8 or 20 bytes), store_timestamp, store_host (8 or 20
    bytes), reconsume_times, prepared_transaction_offset, body (as stored), topic, properties (bytes), crc_ok.
    """

    __slots__ = ()

    def _decompressed_body(self) -> bytes:
        try:
            return decompress_body(self.body_stored, self.sys_flag)
        except CorruptionError as error:
            raise CorruptionError(f"message at phy offset {self.phy_offset}: {error.message}") from None

    def _parsed_properties(self) -> dict[str, str]:
        return parse_properties(self.properties_stored)

    @property
    def properties_crc(self) -> int | None:
        """The CRC-32 that the record's last property `__CRC32#` states (top bit clear), None when there is none.

        It covers the record up to the 20 bytes of that property (RocketMQ since 5.2.0, enabledAppendPropCRC).
        """
        match = _PROPERTIES_CRC.search(self.properties_stored)
        # The ten digits are stored with the least significant one first.
        return int(match.group(1)[::-1]) if match else None

    @property
    def transaction_type(self) -> SysFlag:
        """The transaction bits of the sysFlag; `SysFlag(0)` for an ordinary message."""
        return SysFlag(self.sys_flag & 0xC)

    @property
    def born_host(self) -> str:
        """The producer's address, "ip:port" or "[v6]:port"."""
        return host_from_bytes(self._born_host_stored)

    @property
    def store_host(self) -> str:
        """The address of the broker that stored it, "ip:port" or "[v6]:port"."""
        return host_from_bytes(self._store_host_stored)

    @property
    def msg_id(self) -> str:
        """The offset message id."""
        return offset_message_id(self._store_host_stored, self.phy_offset)

    @property
    def is_inner_batch(self) -> bool:
        """True when the body holds the messages of an inner batch (a topic of queue type BatchCQ)."""
        return bool(self.sys_flag & SysFlag.INNER_BATCH.value)

    def inner_messages(self) -> list[MessageExt]:
        """The messages of an inner batch, in order; ``[self]`` when the record is not one.

        Each has the record's topic, queue, times, hosts and phy offset, its own body, flag and properties, and the
        queue offset INNER_BASE + i (the record's own queue offset when the property is missing).  `store_size` is the
        size of its part of the body.

        Raises
        ------
        CorruptionError
            The record is corrupt, or a length in its body is impossible.
        """
        if not self.is_inner_batch:
            return [self]
        record = self._record
        if self.corrupt:
            raise CorruptionError(f"the batch at phy offset {self.phy_offset} does not fit its CRC")
        base_text = self.properties.get("INNER_BASE", "")
        base = int(base_text) if re.fullmatch("[0-9]{1,18}", base_text) else record[_QUEUE_OFFSET]
        sys_flag = record[_SYS_FLAG] & ~(SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP | SysFlag.COMPRESSED).value & ~0x700
        messages: list[MessageExt] = []
        for size, flag, body, properties in _split_client_form(self.body, self.phy_offset):
            part = list(record)
            part[_TOTAL_SIZE] = size
            part[_BODY_CRC] = crc32(body) if body else 0
            part[_FLAG] = flag
            part[_QUEUE_OFFSET] = base + len(messages)
            part[_SYS_FLAG] = sys_flag
            part[_BODY] = body
            part[_PROPERTIES] = properties
            messages.append(MessageExt(tuple(part)))  # type: ignore[arg-type]
        return messages

    def to_dict(self) -> dict[str, Any]:
        """All of the message as values that JSON can hold.

        `body` is text when it is UTF-8, else base64 with `body_encoding` = "base64".  A body that cannot be
        decompressed is given as it is stored, with the reason in `body_error`.
        """
        result: dict[str, Any] = {
            "topic": self.topic,
            "queue_id": self.queue_id,
            "queue_offset": self.queue_offset,
            "phy_offset": self.phy_offset,
            "store_size": self.store_size,
            "msg_id": self.msg_id,
            "unique_key": self.unique_key,
            "keys": self.keys,
            "tags": self.tags,
            "properties": dict(self.properties),
            "born_timestamp": self.born_timestamp,
            "store_timestamp": self.store_timestamp,
            "born_host": self.born_host,
            "store_host": self.store_host,
            "flag": self.flag,
            "sys_flag": self.sys_flag,
            "reconsume_times": self.reconsume_times,
            "prepared_transaction_offset": self.prepared_transaction_offset,
            "version": self.version,
            "crc": self.crc,
            "corrupt": self.corrupt,
        }
        try:
            body = self.body
        except (CorruptionError, UnsupportedFormatError, MissingDependencyError) as error:
            body = self.body_stored
            result["body_error"] = error.message
        result["body_size"] = len(body)
        try:
            result["body"] = body.decode("utf-8")
            result["body_encoding"] = "utf-8"
        except UnicodeDecodeError:
            result["body"] = base64.b64encode(body).decode("ascii")
            result["body_encoding"] = "base64"
        return result

    def __eq__(self, other: object) -> bool:
        return self._record == other._record if isinstance(other, MessageExt) else NotImplemented

    def __hash__(self) -> int:  # type: ignore[override]
        return hash((self.phy_offset, self.queue_offset, self.store_timestamp))

    def __reduce__(self) -> tuple[type[MessageExt], tuple[Record]]:
        return MessageExt, (self._record,)

    def __repr__(self) -> str:
        corrupt = ", corrupt" if self.corrupt else ""
        return (
            f"<MessageExt {self.topic}/{self.queue_id} queue_offset={self.queue_offset} phy_offset={self.phy_offset} "
            f"keys={self.keys!r} tags={self.tags!r} {len(self.body_stored)} bytes stored{corrupt}>"
        )


adopt(MessageExt)


# --------------------------------------------------------------------------------------------------------- batches


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


def _split_client_form(data: bytes, phy_offset: int) -> Iterable[tuple[int, int, bytes, bytes]]:
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
