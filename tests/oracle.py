"""An independent reader, writer and model of the RocketMQ broker store, in plain Python.

Owns a second opinion: it was written from the description of the format alone (facts seen on RocketMQ 5.3.3 and 5.5.0,
numbered like the sections of that description), with `struct` and `zlib`, and imports nothing of rmqstore.  It favours
plainness over speed and answers as the Java store does, quirks included, unless a docstring says "exact".  It never
touches a disk except in `read_files`; stores are dicts {relative path with "/": bytes}.

Geometry is a plain dict keyed by StoreConfig's field names; see `geometry`.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_I64 = 2**63 - 1
MAX_I32 = 2**31 - 1

MAGIC_V1 = 0xDAA320A7
MAGIC_V2 = 0xDAA320AB
MAGIC_BLANK = 0xCBD43194

TRANSACTION_MASK = 0xC
PREPARED = 0x4
COMMIT = 0x8
ROLLBACK = 0xC
BORN_HOST_V6 = 0x10
STORE_HOST_V6 = 0x20
NEED_UNWRAP = 0x40
INNER_BATCH = 0x80

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
PROP_CRC = "__CRC32#"
CRC_TAIL_SIZE = 20

DEFAULT_GEOMETRY: dict[str, Any] = {
    "mapped_file_size_commit_log": 1073741824,
    "mapped_file_size_consume_queue": 6000000,
    "mapped_file_size_consume_queue_ext": 50331648,
    "mapper_file_size_batch_consume_queue": 13800000,
    "max_hash_slot_num": 5000000,
    "max_index_num": 20000000,
    "message_delay_level": "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h",
    "index_tags": True,
    "enable_consume_queue_ext": False,
    "enabled_append_prop_crc": False,
    "enable_lmq": False,
    "enable_multi_dispatch": False,
    "message_index_enable": True,
    # Topics whose attribute queue.type is BatchCQ; a topic with an inner-batch record counts unnamed.
    "batch_topics": (),
}


def geometry(overrides: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Return RocketMQ's default geometry (tags indexed, as in 5.5.0) with some values replaced. Sizes are bytes."""
    return {**DEFAULT_GEOMETRY, **(overrides or {}), **more}


# ---------------------------------------------------------------------------------------------------------------
# Java strings (section 10)


@functools.lru_cache(maxsize=1 << 17)
def java_hash(text: str) -> int:
    """Return Java's `String.hashCode`: over UTF-16 code units, as a signed 32-bit number."""
    encoded = text.encode("utf-16-be", "surrogatepass")
    h = 0
    for unit in struct.unpack(f">{len(encoded) // 2}H", encoded):
        h = (31 * h + unit) & 0xFFFFFFFF
    return h - (1 << 32) if h & 0x80000000 else h


def index_hash(text: str) -> int:
    """Return the hash of an index key (`topic#key`): the absolute Java hash, 0 for -2^31."""
    h = abs(java_hash(text))
    return 0 if h > MAX_I32 else h


def java_length(text: str) -> int:
    """Return the number of UTF-16 code units."""
    return len(text.encode("utf-16-be", "surrogatepass")) // 2


_ENCODED_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?")


def java_decode(data: bytes) -> str:
    """Decode UTF-8 as `new String(bytes, UTF_8)` does: U+FFFD for each malformed part.

    Python differs only where surrogates were encoded (ED A0..BF xx): Java puts one U+FFFD for the whole sequence. That
    a cut sequence (ED A0 and then something else) also gives one is taken from JDK 17's decoder.
    """
    return _ENCODED_SURROGATE.sub(b"\xef\xbf\xbd", bytes(data)).decode("utf-8", "replace")


def java_encode(text: str) -> bytes:
    """Encode as `String.getBytes(UTF_8)` does: a lone surrogate becomes `?`."""
    joined = text.encode("utf-16-be", "surrogatepass").decode("utf-16-be", "surrogatepass")
    return joined.encode("utf-8", "replace")


def java_map_order(names: Iterable[str], table_size: int = 16) -> list[str]:
    """Return `names` in the order in which a Java HashMap of strings iterates (section 1.1).

    `table_size` is the table's first size: 16 for a map that a client made, 128 for one that a broker parsed.
    """
    names = list(dict.fromkeys(names))
    while len(names) > table_size * 3 // 4:
        table_size *= 2

    def bucket(name: str) -> int:
        h = java_hash(name) & 0xFFFFFFFF
        return (h ^ (h >> 16)) & (table_size - 1)

    return sorted(names, key=bucket)


# ---------------------------------------------------------------------------------------------------------------
# Parts of a record (section 2)


def masked_crc(data: bytes) -> int:
    """Return CRC-32 with the top bit cleared (sections 2.2); 0 for empty input."""
    return zlib.crc32(data) & 0x7FFFFFFF


def tags_hash(tags: str | None) -> int:
    """Return the tags code of a `TAGS` value: its signed Java hash, 0 without tags."""
    return java_hash(tags) if tags else 0


def encode_host(host: str) -> bytes:
    """Encode `ip:port` or `[v6]:port` as address plus i32 port: 8 or 20 bytes."""
    address, _, port = host.rpartition(":")
    return ipaddress.ip_address(address.strip("[]")).packed + struct.pack(">i", int(port))


def decode_host(data: bytes) -> str:
    """Decode 8 or 20 bytes into `ip:port` or `[v6]:port` (the short form of the address)."""
    address = ipaddress.ip_address(bytes(data[:-4]))
    (port,) = struct.unpack(">i", data[-4:])
    return f"{address}:{port}" if address.version == 4 else f"[{address}]:{port}"


def java_host(host: str) -> str:
    """Return `host` as Java's InetSocketAddress prints it: `/1.2.3.4:5`, `/[2001:db8:0:0:0:0:0:1]:5`."""
    raw = encode_host(host)
    if len(raw) == 8:
        return "/" + decode_host(raw)
    groups = ":".join(f"{group:x}" for group in struct.unpack(">8H", raw[:16]))
    return f"/[{groups}]:{struct.unpack('>i', raw[16:])[0]}"


def encode_properties(pairs: Iterable[tuple[str, str | None]]) -> bytes:
    """Encode properties in the order given (section 2.4): None values are skipped, empty ones written."""
    return java_encode("".join(f"{name}\x01{value}\x02" for name, value in pairs if value is not None))


def parse_properties(text: str) -> dict[str, str]:
    """Parse the text of the properties by Java's rules (section 2.4)."""
    found: dict[str, str] = {}
    start = 0
    while start < len(text):
        end = text.find("\x02", start)
        if end < 0:
            end = len(text)
        # Positions are compared only with each other, so code points do as well as UTF-16 units: a piece that passes
        # has a name, the separator and a value, hence three units or more either way.
        separator = text.find("\x01", start)
        if end - start >= 3 and start < separator < end - 1:
            found[text[start:separator]] = text[separator + 1 : end]
        start = end + 1
    return found


def split_keys(keys: str | None) -> list[str]:
    """Split a `KEYS` value at single spaces; empty pieces are dropped."""
    return [key for key in (keys or "").split(" ") if key]


def offset_message_id(store_host: str, phy_offset: int) -> str:
    """Return the broker's message id: upper-case hex of host and phy offset, 32 or 56 digits (section 2.5)."""
    return (encode_host(store_host) + struct.pack(">q", phy_offset)).hex().upper()


def decode_message_id(msg_id: str) -> tuple[str, int]:
    """Return (store host, phy offset) of an offset message id."""
    raw = bytes.fromhex(msg_id)
    if len(raw) not in (16, 28):
        raise ValueError(f"an offset message id has 32 or 56 hex digits, not {len(msg_id)}")
    return decode_host(raw[:-8]), struct.unpack(">q", raw[-8:])[0]


def property_crc_tail(record_before_tail: bytes) -> bytes:
    """Return the 20-byte `__CRC32#` property for the bytes before it; its ten digits are reversed (section 2.2)."""
    digits = f"{masked_crc(record_before_tail):010d}"[::-1]
    return f"{PROP_CRC}\x01{digits}\x02".encode()


@dataclass(frozen=True)
class Record:
    """A commit-log record with the fields of the log. Times are ms since epoch, hosts `ip:port`."""

    phy_offset: int  # where it was found; `physical_offset` is what it says itself
    size: int
    version: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_timestamp: int
    born_host: str
    store_timestamp: int
    store_host: str
    reconsume_times: int
    prepared_transaction_offset: int
    body: bytes
    topic: str
    properties_raw: bytes
    raw: bytes = field(repr=False)

    @functools.cached_property
    def properties(self) -> dict[str, str]:
        return parse_properties(java_decode(self.properties_raw))

    @property
    def keys(self) -> list[str]:
        return split_keys(self.properties.get("KEYS"))

    @property
    def tags(self) -> str | None:
        return self.properties.get("TAGS")

    @property
    def unique_key(self) -> str | None:
        return self.properties.get("UNIQ_KEY")

    @property
    def transaction_type(self) -> int:
        return self.sys_flag & TRANSACTION_MASK

    @property
    def is_inner_batch(self) -> bool:
        return bool(self.sys_flag & INNER_BATCH)

    @property
    def batch_num(self) -> int:
        return int(self.properties.get("INNER_NUM", "1")) if self.is_inner_batch else 1

    @property
    def end(self) -> int:
        return self.phy_offset + self.size

    @property
    def msg_id(self) -> str:
        return offset_message_id(self.store_host, self.phy_offset)

    @property
    def body_is_sound(self) -> bool:
        return masked_crc(self.body) == self.body_crc

    @property
    def property_crc_is_sound(self) -> bool | None:
        """None without an appended property CRC, else whether it agrees with the record."""
        if not self.properties_raw[-CRC_TAIL_SIZE:].startswith(PROP_CRC.encode() + b"\x01"):
            return None
        return self.raw[-CRC_TAIL_SIZE:] == property_crc_tail(self.raw[:-CRC_TAIL_SIZE])


@dataclass(frozen=True)
class Blank:
    """The filler at the end of a finished segment; `size` bytes including its own 8."""

    phy_offset: int
    size: int

    @property
    def end(self) -> int:
        return self.phy_offset + self.size


def encode_record(
    *,
    topic: str,
    body: bytes = b"",
    properties: bytes | Iterable[tuple[str, str | None]] = b"",
    queue_id: int = 0,
    flag: int = 0,
    queue_offset: int = 0,
    phy_offset: int = 0,
    sys_flag: int = 0,
    born_timestamp: int = 0,
    born_host: str = "127.0.0.1:0",
    store_timestamp: int = 0,
    store_host: str = "127.0.0.1:10911",
    reconsume_times: int = 0,
    prepared_transaction_offset: int = 0,
    append_prop_crc: bool = False,
    in_classic_batch: bool = False,
    version: int | None = None,
) -> bytes:
    """Encode one record (section 2.1). The host bits of `sys_flag` follow the hosts; V2 for topics over 127 chars.

    `properties` are raw bytes, kept as they are, or (name, value) pairs in the order to write. With `append_prop_crc`
    the 20-byte tail is added; a missing separator is put before it, except in a classic batch (section 11.21).

    Raises ValueError when the topic or the properties do not fit their length field.
    """
    born, store = encode_host(born_host), encode_host(store_host)
    sys_flag &= ~(BORN_HOST_V6 | STORE_HOST_V6)
    sys_flag |= (BORN_HOST_V6 if len(born) == 20 else 0) | (STORE_HOST_V6 if len(store) == 20 else 0)
    if not isinstance(properties, bytes | bytearray | memoryview):
        pairs = list(properties)
        if append_prop_crc:
            pairs = [pair for pair in pairs if pair[0] != PROP_CRC]
        properties = encode_properties(pairs)
    raw_properties = bytes(properties)
    if append_prop_crc and raw_properties and not raw_properties.endswith(b"\x02") and not in_classic_batch:
        raw_properties += b"\x02"
    raw_topic = java_encode(topic)
    if version is None:
        version = 2 if java_length(topic) > 127 else 1
    properties_length = len(raw_properties) + (CRC_TAIL_SIZE if append_prop_crc else 0)
    if properties_length > 32767:
        raise ValueError(f"properties of {properties_length} bytes; at most 32767 fit")
    if not 0 < len(raw_topic) <= (127 if version == 1 else 32767):
        raise ValueError(f"topic of {len(raw_topic)} bytes does not fit a V{version} record")
    rest = struct.pack(">iiqqiq", queue_id, flag, queue_offset, phy_offset, sys_flag, born_timestamp) + born
    rest += struct.pack(">q", store_timestamp) + store
    rest += struct.pack(">iqi", reconsume_times, prepared_transaction_offset, len(body)) + bytes(body)
    rest += struct.pack(">b" if version == 1 else ">h", len(raw_topic)) + raw_topic
    rest += struct.pack(">h", properties_length) + raw_properties
    size = 12 + len(rest) + (CRC_TAIL_SIZE if append_prop_crc else 0)
    record = struct.pack(">iIi", size, MAGIC_V1 if version == 1 else MAGIC_V2, masked_crc(body)) + rest
    return record + property_crc_tail(record) if append_prop_crc else record


def decode_record(data: bytes, pos: int = 0, phy_offset: int | None = None) -> Record:
    """Decode the record that begins at `data[pos]`; `phy_offset` is its place in the log (default: `pos`).

    Raises ValueError when the bytes are not one whole V1 or V2 record whose parts add up to its size.
    """
    if phy_offset is None:
        phy_offset = pos
    try:
        size, magic, body_crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born_timestamp = (
            struct.unpack_from(">iIiiiqqiq", data, pos)
        )
        if magic not in (MAGIC_V1, MAGIC_V2):
            raise ValueError(f"no record at {phy_offset}: magic {magic:08x}")
        at = pos + 48
        born_size = 20 if sys_flag & BORN_HOST_V6 else 8
        store_size = 20 if sys_flag & STORE_HOST_V6 else 8
        born_host = bytes(data[at : at + born_size])
        at += born_size
        (store_timestamp,) = struct.unpack_from(">q", data, at)
        at += 8
        store_host = bytes(data[at : at + store_size])
        at += store_size
        reconsume_times, prepared, body_length = struct.unpack_from(">iqi", data, at)
        at += 16
        if body_length < 0:
            raise ValueError(f"record at {phy_offset}: body length {body_length}")
        body = bytes(data[at : at + body_length])
        at += body_length
        if magic == MAGIC_V1:
            (topic_length,) = struct.unpack_from(">b", data, at)
            at += 1
        else:
            (topic_length,) = struct.unpack_from(">h", data, at)
            at += 2
        if topic_length < 0:
            raise ValueError(f"record at {phy_offset}: topic length {topic_length}")
        topic = bytes(data[at : at + topic_length])
        at += topic_length
        (properties_length,) = struct.unpack_from(">h", data, at)
        at += 2
        if properties_length < 0:
            raise ValueError(f"record at {phy_offset}: properties length {properties_length}")
        properties = bytes(data[at : at + properties_length])
        at += properties_length
    except struct.error as error:
        raise ValueError(f"record at {phy_offset} is cut short") from error
    if at - pos != size or at > len(data):
        raise ValueError(f"record at {phy_offset}: parts add up to {at - pos} bytes, its size says {size}")
    return Record(
        phy_offset=phy_offset,
        size=size,
        version=1 if magic == MAGIC_V1 else 2,
        body_crc=body_crc,
        queue_id=queue_id,
        flag=flag,
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        sys_flag=sys_flag,
        born_timestamp=born_timestamp,
        born_host=decode_host(born_host),
        store_timestamp=store_timestamp,
        store_host=decode_host(store_host),
        reconsume_times=reconsume_times,
        prepared_transaction_offset=prepared,
        body=body,
        topic=java_decode(topic),
        properties_raw=properties,
        raw=bytes(data[pos : pos + size]),
    )


def check_record(
    data: bytes, pos: int, end: int | None = None, *, phy_offset: int | None = None, check_crc: bool = True
) -> Record | Blank | None:
    """Return what begins at `data[pos]`, looking no further than `end`: a record, a blank, or None (section 6.3)."""
    end = len(data) if end is None else end
    if phy_offset is None:
        phy_offset = pos
    if end - pos <= 4:
        return None
    (size,) = struct.unpack_from(">i", data, pos)
    if size > end - pos or end - pos < 8:
        return None
    (magic,) = struct.unpack_from(">I", data, pos + 4)
    if magic == MAGIC_BLANK:
        return Blank(phy_offset, size)
    try:
        record = decode_record(data, pos, phy_offset)
    except ValueError:
        return None
    if check_crc and record.body and not record.body_is_sound:
        return None
    return record


def encode_client_messages(messages: Iterable[Mapping[str, Any]]) -> bytes:
    """Encode messages in the client's form (section 2.6), the body of an inner batch.

    Each message is a mapping with `body`, `properties` (bytes or pairs) and `flag`, all optional.
    """
    parts = []
    for message in messages:
        body = message.get("body", b"")
        properties = message.get("properties", b"")
        if not isinstance(properties, bytes):
            properties = encode_properties(properties)
        size = 22 + len(body) + len(properties)
        parts.append(struct.pack(">iiiii", size, 0, 0, message.get("flag", 0), len(body)) + body)
        parts.append(struct.pack(">h", len(properties)) + properties)
    return b"".join(parts)


def decode_client_messages(data: bytes) -> list[dict[str, Any]]:
    """Decode the body of an inner batch into dicts with `flag`, `body` and `properties` (raw bytes)."""
    messages = []
    at = 0
    while at < len(data):
        size, _, _, flag, body_length = struct.unpack_from(">iiiii", data, at)
        body = data[at + 20 : at + 20 + body_length]
        (properties_length,) = struct.unpack_from(">h", data, at + 20 + body_length)
        properties = data[at + 22 + body_length : at + 22 + body_length + properties_length]
        if size != 22 + body_length + properties_length:
            raise ValueError(f"inner message at {at}: size {size} is not the sum of its parts")
        messages.append({"flag": flag, "body": body, "properties": properties})
        at += size
    return messages


# ---------------------------------------------------------------------------------------------------------------
# Files and the commit log (sections 1, 2.7)


def file_name(offset: int) -> str:
    """Return the name of the segment that begins at `offset`: 20 digits."""
    return f"{offset:020d}"


def read_files(root: str | os.PathLike[str]) -> dict[str, bytes]:
    """Read every file below `root` into {relative path with "/": bytes}."""
    files = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            with open(path, "rb") as stream:
                files[os.path.relpath(path, root).replace(os.sep, "/")] = stream.read()
    return dict(sorted(files.items()))


def segments(files: Mapping[str, bytes], folder: str = "commitlog") -> dict[int, bytes]:
    """Return {first offset: bytes} of the 20-digit files directly in `folder`, ascending."""
    prefix = folder + "/"
    found = {
        int(path[len(prefix) :]): data
        for path, data in files.items()
        if path.startswith(prefix) and re.fullmatch(r"\d{20}", path[len(prefix) :])
    }
    return dict(sorted(found.items()))


def walk_commit_log(
    log: Mapping[int, bytes] | bytes, *, start: int | None = None, check_crc: bool = True
) -> Iterator[Record | Blank]:
    """Yield the records and blanks of a log in order, until the first place where neither begins.

    `log` is {first offset: bytes}, or the bytes of one segment at offset 0; `start` the segment to begin with.
    """
    if not isinstance(log, Mapping):
        log = {0: log}
    bases = sorted(base for base in log if start is None or base >= start)
    for i, base in enumerate(bases):
        data = log[base]
        pos = 0
        while pos < len(data):
            found = check_record(data, pos, phy_offset=base + pos, check_crc=check_crc)
            if found is None:
                return
            yield found
            if isinstance(found, Blank):
                break
            pos += found.size
        if i + 1 < len(bases) and bases[i + 1] != base + len(data):
            return


def records_of(log: Mapping[int, bytes] | bytes) -> list[Record]:
    """Return the records of a log, without the blanks."""
    return [found for found in walk_commit_log(log) if isinstance(found, Record)]


def log_end(log: Mapping[int, bytes]) -> int:
    """Return P of section 6.4: the end of the last good record, or the last blank when no segment follows it."""
    end = min(log, default=0)
    for found in walk_commit_log(log):
        if isinstance(found, Blank):
            following = found.phy_offset // len(log[min(log)]) * len(log[min(log)]) + len(log[min(log)])
            end = following if following in log else found.phy_offset
        else:
            end = found.end
    return end


# ---------------------------------------------------------------------------------------------------------------
# Units of the queues (section 3)

UNIT_SIZE = 20
BATCH_UNIT_SIZE = 46
PRE_FILL_UNIT = bytes.fromhex("00000000000000007fffffff0000000000000000")


@dataclass(frozen=True)
class Unit:
    """One unit of a simple consume queue. `tags_code` is what the unit holds, an extension address included."""

    phy_offset: int
    size: int
    tags_code: int

    def encode(self) -> bytes:
        return struct.pack(">qiq", self.phy_offset, self.size, self.tags_code)


@dataclass(frozen=True)
class BatchUnit:
    """One unit of a batch consume queue."""

    phy_offset: int
    size: int
    tags_code: int
    store_timestamp: int
    base_queue_offset: int
    batch_num: int

    def encode(self) -> bytes:
        return struct.pack(
            ">qiqqqhii",
            self.phy_offset,
            self.size,
            self.tags_code,
            self.store_timestamp,
            self.base_queue_offset,
            self.batch_num,
            -1,
            0,
        )


@dataclass(frozen=True)
class ExtUnit:
    """One unit of the consume-queue extension."""

    tags_code: int
    store_timestamp: int
    bit_map: bytes = b""

    def encode(self) -> bytes:
        return (
            struct.pack(">hqqh", 20 + len(self.bit_map), self.tags_code, self.store_timestamp, len(self.bit_map))
            + self.bit_map
        )


def decode_unit(data: bytes, pos: int = 0) -> Unit:
    return Unit(*struct.unpack_from(">qiq", data, pos))


def decode_batch_unit(data: bytes, pos: int = 0) -> BatchUnit:
    return BatchUnit(*struct.unpack_from(">qiqqqhii", data, pos)[:6])


def decode_ext_unit(data: bytes, pos: int = 0) -> ExtUnit:
    """Decode an extension unit; ValueError where none begins (0 or the -1 that closes a file)."""
    size, tags_code, store_timestamp, bit_map_size = struct.unpack_from(">hqqh", data, pos)
    if size < 20 or size != 20 + bit_map_size:
        raise ValueError(f"no extension unit at {pos}: size {size}")
    return ExtUnit(tags_code, store_timestamp, bytes(data[pos + 20 : pos + size]))


def is_ext_address(tags_code: int) -> bool:
    """Tell an extension address from a tags hash (section 3.5)."""
    return tags_code <= -(2**31) - 1


def ext_address(pos: int) -> int:
    return pos - 2**63


def delay_levels(text: str) -> dict[int, int]:
    """Parse `messageDelayLevel` into {level from 1: ms}."""
    units = {"s": 1000, "m": 60000, "h": 3600000, "d": 86400000}
    return {level: int(part[:-1]) * units[part[-1]] for level, part in enumerate(text.split(), 1)}


def tags_code(record: Record, geo: Mapping[str, Any]) -> int:
    """Return the tags code that the record's unit gets (section 3.1), before any extension address."""
    level = record.properties.get("DELAY")
    if record.topic == SCHEDULE_TOPIC and level is not None and int(level) > 0:
        levels = delay_levels(geo["message_delay_level"])
        return record.store_timestamp + levels.get(min(int(level), max(levels)), 1000)
    return tags_hash(record.tags)


@functools.lru_cache(maxsize=16)
def _zeros(size: int) -> bytes:
    return bytes(size)


class SegmentedBytes:
    """Fixed-size files that are written once, end to end; only the written part is held."""

    def __init__(self, file_size: int):
        self.file_size = file_size
        self.written: dict[int, bytearray] = {}
        self.end: int | None = None

    def append(self, data: bytes, start: int | None = None) -> None:
        """Append within one file; `start` says where the very first byte goes."""
        if self.end is None:
            first = 0 if start is None else start
            base = first - first % self.file_size
            self.written[base] = bytearray(first - base)
            self.end = first
        if self.end % self.file_size == 0 and self.end not in self.written:
            self.written[self.end] = bytearray()
        self.written[self.end - self.end % self.file_size] += data
        self.end += len(data)

    def files(self, folder: str) -> dict[str, bytes]:
        return {
            f"{folder}/{file_name(base)}": bytes(data) + _zeros(self.file_size - len(data))
            for base, data in self.written.items()
        }


class ConsumeQueueOracle:
    """A simple consume queue as section 3.2 appends to it."""

    def __init__(self, file_size: int):
        self.file_size = (file_size + UNIT_SIZE - 1) // UNIT_SIZE * UNIT_SIZE
        self.store = SegmentedBytes(self.file_size)
        self.max_physic_offset = -1
        self.min_logic_offset = 0

    def put(self, phy_offset: int, size: int, code: int, queue_offset: int) -> bool:
        """Dispatch one record; True when a unit was written."""
        if phy_offset + size <= self.max_physic_offset:
            return False
        expected = queue_offset * UNIT_SIZE
        if self.store.end is None:
            base = expected - expected % self.file_size
            for _ in range(base, expected, UNIT_SIZE):
                self.store.append(PRE_FILL_UNIT, start=base)
            self.min_logic_offset = expected
            if self.store.end is None:
                self.store.append(b"", start=base)
        elif queue_offset != 0 and expected < self.store.end:
            return False
        self.max_physic_offset = phy_offset + size
        self.store.append(Unit(phy_offset, size, code).encode())
        return True

    @property
    def max_queue_offset(self) -> int:
        return (self.store.end or 0) // UNIT_SIZE


class BatchConsumeQueueOracle:
    """A batch consume queue (section 3.6)."""

    def __init__(self, file_size: int):
        self.store = SegmentedBytes((file_size + BATCH_UNIT_SIZE - 1) // BATCH_UNIT_SIZE * BATCH_UNIT_SIZE)
        self.max_physic_offset = -1

    def put(self, unit: BatchUnit) -> bool:
        if unit.phy_offset + unit.size <= self.max_physic_offset:
            return False
        self.max_physic_offset = unit.phy_offset + unit.size
        self.store.append(unit.encode())
        return True


class ConsumeQueueExtOracle:
    """The extension of one consume queue (section 3.5)."""

    def __init__(self, file_size: int):
        self.store = SegmentedBytes(file_size)

    def put(self, unit: ExtUnit) -> int:
        """Append a unit and return its address."""
        data = unit.encode()
        size = self.store.file_size
        end = self.store.end or 0
        if end % size + len(data) + 4 > size:
            # The file is closed by a -1 and counts as full.
            self.store.append(struct.pack(">h", -1) + bytes(size - end % size - 2))
            end = self.store.end
        self.store.append(data)
        return ext_address(end)


# ---------------------------------------------------------------------------------------------------------------
# Index (section 4)

INDEX_HEADER_SIZE = 40
INDEX_ENTRY_SIZE = 20


class EndlessWalk(Exception):
    """The chain of a corrupt index has a cycle; the Java store would hang here (section 11.1)."""


@dataclass
class IndexHeader:
    begin_timestamp: int = 0
    end_timestamp: int = 0
    begin_phy_offset: int = 0
    end_phy_offset: int = 0
    hash_slot_count: int = 0
    index_count: int = 0

    def encode(self) -> bytes:
        return struct.pack(
            ">qqqqii",
            self.begin_timestamp,
            self.end_timestamp,
            self.begin_phy_offset,
            self.end_phy_offset,
            self.hash_slot_count,
            self.index_count,
        )

    @classmethod
    def decode(cls, data: bytes) -> IndexHeader:
        return cls(*struct.unpack_from(">qqqqii", data))


def index_key(topic: str, key: str, index_type: str | None = None) -> str:
    """Return the text that is hashed: `topic#key`, or `topic#T#tag` for index type `T` (5.4.0 and later)."""
    return f"{topic}#{index_type}#{key}" if index_type else f"{topic}#{key}"


def index_file_size(slots: int, entries: int) -> int:
    return INDEX_HEADER_SIZE + 4 * slots + INDEX_ENTRY_SIZE * entries


class IndexOracle:
    """One index file, read and written as sections 4.2 to 4.5 say, quirks included.

    Parameters
    ----------
    slots, entries
        maxHashSlotNum and maxIndexNum.
    data
        The bytes of an existing file; without it the file is new.
    end_phy_offset, end_timestamp
        For a file that is created because the one before is full: that one's end values.
    """

    def __init__(
        self,
        slots: int,
        entries: int,
        data: bytes | None = None,
        *,
        end_phy_offset: int = 0,
        end_timestamp: int = 0,
    ):
        self.slots = slots
        self.entries = entries
        size = index_file_size(slots, entries)
        self._data = bytearray(size) if data is None else bytearray(data)
        if len(self._data) != size:
            raise ValueError(f"an index file of {slots} slots and {entries} entries has {size} bytes, not {len(data)}")
        self.header = IndexHeader.decode(self._data)
        if end_phy_offset > 0:
            self.header.begin_phy_offset = self.header.end_phy_offset = end_phy_offset
        if end_timestamp > 0:
            self.header.begin_timestamp = self.header.end_timestamp = end_timestamp
        self._data[:INDEX_HEADER_SIZE] = self.header.encode()
        # On disk an untouched file says 0, in memory counting starts at 1.
        if self.header.index_count <= 0:
            self.header.index_count = 1

    def bytes(self, flushed: bool = False) -> bytes:
        """Return the file's bytes; `flushed` as after a flush or orderly shutdown, which writes index count 1 for 0."""
        if flushed:
            return self.header.encode() + bytes(self._data[INDEX_HEADER_SIZE:])
        return bytes(self._data)

    @property
    def is_full(self) -> bool:
        return self.header.index_count >= self.entries

    def slot_value(self, slot: int) -> int:
        return struct.unpack_from(">i", self._data, INDEX_HEADER_SIZE + 4 * slot)[0]

    def entry(self, n: int) -> tuple[int, int, int, int]:
        """Return (hash, phy offset, seconds, previous entry) of entry `n`."""
        return struct.unpack_from(">iqii", self._data, INDEX_HEADER_SIZE + 4 * self.slots + INDEX_ENTRY_SIZE * n)

    def put_key(self, key: str, phy_offset: int, store_timestamp: int) -> bool:
        """Put `topic#key`; False when the file is full."""
        header = self.header
        if header.index_count >= self.entries:
            return False
        h = index_hash(key)
        slot = h % self.slots
        value = self.slot_value(slot)
        if value <= 0 or value > header.index_count:
            value = 0
        diff = 0
        if header.begin_timestamp > 0:
            span = store_timestamp - header.begin_timestamp
            diff = min(span // 1000, MAX_I32) if span > 0 else 0
        at = INDEX_HEADER_SIZE + 4 * self.slots + INDEX_ENTRY_SIZE * header.index_count
        struct.pack_into(">iqii", self._data, at, h, phy_offset, diff, value)
        struct.pack_into(">i", self._data, INDEX_HEADER_SIZE + 4 * slot, header.index_count)
        if header.index_count <= 1:
            header.begin_phy_offset = phy_offset
            header.begin_timestamp = store_timestamp
        if value == 0:
            header.hash_slot_count += 1
        header.index_count += 1
        header.end_phy_offset = phy_offset
        header.end_timestamp = store_timestamp
        self._data[:INDEX_HEADER_SIZE] = header.encode()
        return True

    def is_time_matched(self, begin: int, end: int) -> bool:
        first, last = self.header.begin_timestamp, self.header.end_timestamp
        return (begin < first and end > last) or first <= begin <= last or first <= end <= last

    def select_phy_offset(
        self, key: str, max_num: int = 64, begin: int = 0, end: int = MAX_I64, into: list[int] | None = None
    ) -> list[int]:
        """Return the offsets of `topic#key`, newest first, exactly as the Java store does. `into` is appended to.

        Raises EndlessWalk where the Java store would never return.
        """
        found = [] if into is None else into
        count = self.header.index_count
        h = index_hash(key)
        n = self.slot_value(h % self.slots)
        if n <= 0 or n > count or count <= 1:
            return found
        seen = set()
        while len(found) < max_num:
            if n in seen:
                raise EndlessWalk(f"entry {n} comes up again in the chain of {key!r}")
            seen.add(n)
            try:
                entry_hash, phy_offset, diff, previous = self.entry(n)
            except struct.error:
                break
            if diff < 0:
                break
            time = self.header.begin_timestamp + diff * 1000
            if entry_hash == h and begin <= time <= end:
                found.append(phy_offset)
            if previous <= 0 or previous > count or previous == n or time < begin:
                break
            n = previous
        return found


def index_keys_of(record: Record, index_tags: bool) -> list[str]:
    """Return the index keys that a record gets, in order (sections 4.6 and 0.1)."""
    if record.transaction_type == ROLLBACK:
        return []
    keys = [index_key(record.topic, record.unique_key)] if record.unique_key is not None else []
    keys += [index_key(record.topic, key) for key in record.keys]
    if index_tags and record.tags:
        keys.append(index_key(record.topic, record.tags, "T"))
    return keys


@dataclass(frozen=True)
class IndexAnswer:
    """Answer of the index service: offsets newest first, and the newest file's end values."""

    offsets: list[int]
    last_update_timestamp: int = 0
    last_update_phy_offset: int = 0


class IndexServiceOracle:
    """All index files of a store (section 4.6), oldest first."""

    def __init__(self, geo: Mapping[str, Any], files: Iterable[bytes] = ()):
        self.geo = geo
        self.files = [self._open(data) for data in files]

    def _open(self, data: bytes | None = None, **previous_end: int) -> IndexOracle:
        return IndexOracle(self.geo["max_hash_slot_num"], self.geo["max_index_num"], data, **previous_end)

    def current_file(self) -> IndexOracle:
        if not self.files:
            self.files.append(self._open())
        elif self.files[-1].is_full:
            header = self.files[-1].header
            self.files.append(self._open(end_phy_offset=header.end_phy_offset, end_timestamp=header.end_timestamp))
        return self.files[-1]

    def build(self, record: Record) -> None:
        """Index one dispatched record. The file is chosen, and if need be created, even for a record without keys."""
        if record.phy_offset < self.current_file().header.end_phy_offset:
            return
        for key in index_keys_of(record, self.geo["index_tags"]):
            while not self.current_file().put_key(key, record.phy_offset, record.store_timestamp):
                pass

    def query(
        self,
        topic: str,
        key: str,
        max_num: int = 64,
        begin: int = 0,
        end: int = MAX_I64,
        index_type: str | None = None,
        max_msgs_num_batch: int = 64,
    ) -> IndexAnswer:
        max_num = min(max_num, max_msgs_num_batch)
        found: list[int] = []
        for file in reversed(self.files):
            if file.is_time_matched(begin, end):
                file.select_phy_offset(index_key(topic, key, index_type), max_num, begin, end, found)
            if file.header.begin_timestamp < begin or len(found) >= max_num:
                break
        if not self.files:
            return IndexAnswer(found)
        newest = self.files[-1].header
        return IndexAnswer(found, newest.end_timestamp, newest.end_phy_offset)


def index_files(files: Mapping[str, bytes]) -> list[bytes]:
    """Return the index files of a store, oldest first by name; names that are no number are skipped."""
    names = [path for path in files if re.fullmatch(r"index/\d+", path)]
    return [files[path] for path in sorted(names)]


QUEUES_AND_INDEX = ("consumequeue", "consumequeue_ext", "batchconsumequeue", "index")


def comparable(
    files: Mapping[str, bytes], folders: Sequence[str] = ("commitlog", *QUEUES_AND_INDEX)
) -> dict[str, bytes]:
    """Return the files of some top folders so that two stores can be compared byte for byte.

    Index files are renamed by their order, as StoreOracle and `rebuild` name them. Commit-log segments that are all
    zero are left out: a store that is open, or was killed, has the next one allocated ahead.
    """
    kept = {}
    for path, data in sorted(files.items()):
        folder = path.split("/")[0]
        if folder not in folders or folder == "index" or (folder == "commitlog" and not any(data)):
            continue
        kept[path] = bytes(data)
    if "index" in folders:
        kept |= {f"index/{number:017d}": bytes(data) for number, data in enumerate(index_files(files), 1)}
    return kept


# ---------------------------------------------------------------------------------------------------------------
# Checkpoint (sections 6.1 and 0.2)

CHECKPOINT_SIZE = 4096


@dataclass(frozen=True)
class Checkpoint:
    physic_msg_timestamp: int = 0
    logics_msg_timestamp: int = 0
    index_msg_timestamp: int = 0
    master_flushed_offset: int = 0
    confirm_phy_offset: int = 0
    logics_physical_offset: int = 0  # since 5.4.0

    def encode(self) -> bytes:
        return struct.pack(
            ">qqqqqq",
            self.physic_msg_timestamp,
            self.logics_msg_timestamp,
            self.index_msg_timestamp,
            self.master_flushed_offset,
            self.confirm_phy_offset,
            self.logics_physical_offset,
        ) + bytes(CHECKPOINT_SIZE - 48)

    @classmethod
    def decode(cls, data: bytes) -> Checkpoint:
        """Decode a checkpoint; a missing or short file counts as zeros."""
        return cls(*struct.unpack_from(">qqqqqq", bytes(data) + bytes(48)))

    @property
    def min_timestamp(self) -> int:
        return max(0, min(self.physic_msg_timestamp, self.logics_msg_timestamp) - 3000)


# ---------------------------------------------------------------------------------------------------------------
# Dispatch (section 7), rebuild and recovery


class DispatchOracle:
    """Queues and index as dispatching records one after another leaves them."""

    def __init__(self, geo: Mapping[str, Any]):
        self.geo = geometry(geo)
        self.consume_queues: dict[tuple[str, int], ConsumeQueueOracle] = {}
        self.consume_queue_exts: dict[tuple[str, int], ConsumeQueueExtOracle] = {}
        self.batch_consume_queues: dict[tuple[str, int], BatchConsumeQueueOracle] = {}
        self.index = IndexServiceOracle(self.geo)
        self.batch_topics = set(self.geo["batch_topics"])

    def _consume_queue(self, topic: str, queue_id: int) -> ConsumeQueueOracle:
        key = topic, queue_id
        if key not in self.consume_queues:
            self.consume_queues[key] = ConsumeQueueOracle(self.geo["mapped_file_size_consume_queue"])
        return self.consume_queues[key]

    def dispatch(self, record: Record) -> None:
        if record.transaction_type in (0, COMMIT):
            self._put_unit(record)
        if self.geo["message_index_enable"]:
            self.index.build(record)

    def _put_unit(self, record: Record) -> None:
        key = record.topic, record.queue_id
        code = tags_code(record, self.geo)
        if record.is_inner_batch:
            self.batch_topics.add(record.topic)
        if record.topic in self.batch_topics:
            if key not in self.batch_consume_queues:
                self.batch_consume_queues[key] = BatchConsumeQueueOracle(
                    self.geo["mapper_file_size_batch_consume_queue"]
                )
            first = int(record.properties.get("INNER_BASE", record.queue_offset))
            self.batch_consume_queues[key].put(
                BatchUnit(record.phy_offset, record.size, code, record.store_timestamp, first, record.batch_num)
            )
            return
        queue = self._consume_queue(*key)
        unit_code = code
        if self.geo["enable_consume_queue_ext"] and record.end > queue.max_physic_offset:
            if key not in self.consume_queue_exts:
                self.consume_queue_exts[key] = ConsumeQueueExtOracle(self.geo["mapped_file_size_consume_queue_ext"])
            unit_code = self.consume_queue_exts[key].put(ExtUnit(code, record.store_timestamp))
        queue.put(record.phy_offset, record.size, unit_code, record.queue_offset)
        for name, offset in multi_dispatch_of(record, self.geo):
            self._consume_queue(name, 0).put(record.phy_offset, record.size, code, offset)

    def files(self, flushed: bool = True) -> dict[str, bytes]:
        """Return the files of queues and index; index names are just numbers in order (`index/00000000000000001`)."""
        found: dict[str, bytes] = {}
        for (topic, queue_id), queue in self.consume_queues.items():
            found |= queue.store.files(f"consumequeue/{topic}/{queue_id}")
        for (topic, queue_id), ext in self.consume_queue_exts.items():
            found |= ext.store.files(f"consumequeue_ext/{topic}/{queue_id}")
        for (topic, queue_id), queue in self.batch_consume_queues.items():
            found |= queue.store.files(f"batchconsumequeue/{topic}/{queue_id}")
        for number, file in enumerate(self.index.files, 1):
            found[f"index/{number:017d}"] = file.bytes(flushed)
        return found


def has_multi_dispatch(topic: str, properties: Mapping[str, str], geo: Mapping[str, Any]) -> bool:
    """Tell whether a record is also dispatched to light queues (section 3.7)."""
    return bool(
        geo.get("enable_lmq")
        and geo.get("enable_multi_dispatch")
        and properties.get("INNER_MULTI_DISPATCH")
        and not topic.startswith(("%RETRY%", "rmq_sys_"))
        and topic != SCHEDULE_TOPIC
    )


def multi_dispatch_of(record: Record, geo: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the (light queue, queue offset) pairs of a record; names with `/` are left out."""
    if not has_multi_dispatch(record.topic, record.properties, geo):
        return []
    names = record.properties["INNER_MULTI_DISPATCH"].split(",")
    offsets = record.properties.get("INNER_MULTI_QUEUE_OFFSET", "").split(",")
    if len(names) != len(offsets):
        return []
    return [(name, int(offset)) for name, offset in zip(names, offsets, strict=True) if "/" not in name]


def rebuild(
    log: Mapping[int, bytes] | Mapping[str, bytes], geo: Mapping[str, Any], *, flushed: bool = True
) -> dict[str, bytes]:
    """Make consumequeue, consumequeue_ext, batchconsumequeue and index files from the commit log alone.

    `log` is {first offset: bytes} or the files of a whole store. The result is that of a store that was never restarted
    uncleanly; index names only keep the order (section 0.6). `flushed` as after an orderly shutdown.
    """
    if any(isinstance(name, str) for name in log):
        log = segments(log)
    dispatcher = DispatchOracle(geo)
    records = records_of(log)
    dispatcher.batch_topics |= {record.topic for record in records if record.is_inner_batch}
    for record in records:
        dispatcher.dispatch(record)
    return dispatcher.files(flushed)


def java_recovered_index(
    files: Mapping[str, bytes], geo: Mapping[str, Any], *, recover_max_num: int | None = None
) -> IndexServiceOracle:
    """Return the index as Java has it after opening `files` (sections 4.6 and 6.5).

    After a clean exit that is what is on disk. After an unclean one (`abort` is there) index files that end later than
    the checkpoint's index time are deleted, and every record since the start segment is dispatched again; a record
    that is the last one in a kept file is then indexed twice. `recover_max_num` is 5.5.0's commitLogRecoverMaxNum.
    """
    geo = geometry(geo)
    if "abort" not in files:
        return IndexServiceOracle(geo, index_files(files))
    checkpoint = Checkpoint.decode(files.get("checkpoint", b""))
    kept = [
        data for data in index_files(files) if IndexHeader.decode(data).end_timestamp <= checkpoint.index_msg_timestamp
    ]
    service = IndexServiceOracle(geo, kept)
    log = segments(files)
    start = min(log, default=0)
    newest_first = sorted(log, reverse=True)
    if recover_max_num is not None:
        newest_first = newest_first[:recover_max_num]
        start = newest_first[-1] if newest_first else 0
    for base in newest_first:
        first = check_record(log[base], 0, phy_offset=base)
        if isinstance(first, Record) and 0 != first.store_timestamp <= checkpoint.min_timestamp:
            start = base
            break
    for found in walk_commit_log(log, start=start):
        if isinstance(found, Record):
            service.build(found)
    return service


# ---------------------------------------------------------------------------------------------------------------
# Reading a whole store (sections 3.3, 3.8, 4.7, 8.2)


@dataclass(frozen=True)
class GetAnswer:
    """Answer of a get: `queue_offsets` are the first queue offsets of the records returned."""

    status: str
    next_queue_offset: int
    min_queue_offset: int
    max_queue_offset: int
    records: list[Record] = field(default_factory=list)
    queue_offsets: list[int] = field(default_factory=list)
    count: int = 0

    @property
    def bytes(self) -> int:
        return sum(record.size for record in self.records)


@dataclass(frozen=True)
class QueuePosition:
    """A unit with its place in the queue; `batch_num` is 1 in a simple queue, `tags_code` resolved (None: unknown)."""

    queue_offset: int
    phy_offset: int
    size: int
    tags_code: int | None
    batch_num: int
    file_base: int


def subscribed_codes(subscription: str | None) -> set[int] | None:
    """Return the low 32 bits of the tag hashes of a subscription; None means every message (section 8.2)."""
    if not subscription or subscription == "*":
        return None
    tags = [tag.strip() for tag in subscription.split("||")]
    return {java_hash(tag) & 0xFFFFFFFF for tag in tags if tag}


class StoreReader:
    """Reads a store that is given as {relative path: bytes} and answers as the Java store does after a clean start."""

    def __init__(self, files: Mapping[str, bytes], geo: Mapping[str, Any], index: IndexServiceOracle | None = None):
        self.geo = geometry(geo)
        self.files = files
        self.log = segments(files)
        self.items = list(walk_commit_log(self.log))
        self.records = {item.phy_offset: item for item in self.items if isinstance(item, Record)}
        self.min_phy_offset = min(self.log, default=0)
        self.max_phy_offset = log_end(self.log)
        self.index = IndexServiceOracle(self.geo, index_files(files)) if index is None else index
        self._queues: dict[tuple[str, str, int], list[QueuePosition]] = {}

    # queues

    def queues(self) -> list[tuple[str, int, str]]:
        """Return (topic, queue id, "SimpleCQ" or "BatchCQ") of every queue that has files, sorted by topic and id."""
        found = set()
        for path in self.files:
            parts = path.split("/")
            if len(parts) == 4 and parts[0] in ("consumequeue", "batchconsumequeue"):
                found.add((parts[1], int(parts[2]), "SimpleCQ" if parts[0] == "consumequeue" else "BatchCQ"))
        return sorted(found)

    def _kind(self, topic: str) -> str:
        prefix = f"batchconsumequeue/{topic}/"
        return "batchconsumequeue" if any(path.startswith(prefix) for path in self.files) else "consumequeue"

    def positions(self, topic: str, queue_id: int) -> list[QueuePosition]:
        """Return the units of a queue in order, pre-fill units included, up to the log's end."""
        kind = self._kind(topic)
        key = kind, topic, queue_id
        if key not in self._queues:
            self._queues[key] = list(self._read_positions(kind, topic, queue_id))
        return self._queues[key]

    def _read_positions(self, kind: str, topic: str, queue_id: int) -> Iterator[QueuePosition]:
        unit_size = UNIT_SIZE if kind == "consumequeue" else BATCH_UNIT_SIZE
        ext = segments(self.files, f"consumequeue_ext/{topic}/{queue_id}")
        for base, data in segments(self.files, f"{kind}/{topic}/{queue_id}").items():
            for pos in range(0, len(data), unit_size):
                unit = decode_unit(data, pos) if unit_size == UNIT_SIZE else decode_batch_unit(data, pos)
                if unit.phy_offset < 0 or unit.size <= 0 or unit.phy_offset >= self.max_phy_offset:
                    return
                if isinstance(unit, BatchUnit):
                    yield QueuePosition(
                        unit.base_queue_offset, unit.phy_offset, unit.size, unit.tags_code, unit.batch_num, base
                    )
                else:
                    code = resolve_tags_code(unit.tags_code, ext)
                    yield QueuePosition((base + pos) // unit_size, unit.phy_offset, unit.size, code, 1, base)

    def max_queue_offset(self, topic: str, queue_id: int) -> int:
        positions = self.positions(topic, queue_id)
        return positions[-1].queue_offset + positions[-1].batch_num if positions else 0

    def min_queue_offset(self, topic: str, queue_id: int) -> int:
        """Return the min offset as correctMinOffset leaves it after loading (section 3.3)."""
        positions = self.positions(topic, queue_id)
        if not positions:
            return 0
        if positions[-1].phy_offset < self.min_phy_offset:
            return self.max_queue_offset(topic, queue_id)
        in_first_file = [p for p in positions if p.file_base == positions[0].file_base]
        for position in in_first_file:
            if position.phy_offset >= self.min_phy_offset:
                return position.queue_offset
        # Java keeps minLogicOffset, which is 0 at load (a batch queue starts at its first unit).
        return positions[0].queue_offset if self._kind(topic) == "batchconsumequeue" else 0

    # records

    def record_at(self, phy_offset: int) -> Record | None:
        """Look a record up as `lookMessageByOffset` does: any whole record that parses there; offset 0 quirk."""
        if phy_offset == 0:
            phy_offset = self.min_phy_offset
        if not self.min_phy_offset <= phy_offset < self.max_phy_offset:
            return None
        if phy_offset in self.records:
            return self.records[phy_offset]
        segment_size = len(self.log[self.min_phy_offset])
        base = phy_offset - phy_offset % segment_size
        found = check_record(self.log[base], phy_offset - base, phy_offset=phy_offset, check_crc=False)
        return found if isinstance(found, Record) else None

    def _store_time(self, phy_offset: int) -> int:
        record = self.record_at(phy_offset)
        return -1 if record is None else record.store_timestamp

    def query_message(
        self,
        topic: str,
        key: str,
        max_num: int = 64,
        begin: int = 0,
        end: int = MAX_I64,
        index_type: str | None = None,
    ) -> list[Record]:
        """Answer as Java's `queryMessage` (section 4.7): ascending offsets, duplicates and foreign hits included."""
        found: list[Record] = []
        for _ in range(3):
            offsets = sorted(self.index.query(topic, key, max_num, begin, end, index_type).offsets)
            if not offsets:
                break
            for number, offset in enumerate(offsets):
                record = self.record_at(offset)
                if record is None:
                    continue
                if number == 0:
                    end = record.store_timestamp
                found.append(record)
            if found or end < begin:
                break
        return found

    # get

    def get(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        max_num: int = 32,
        *,
        max_bytes: int = 1048576,
        subscription: str | None = None,
        on_disk: bool = False,
        travel_files: int = 1,
    ) -> GetAnswer:
        """Answer as section 8.2 says. `on_disk`: use the limits for records that are not in memory."""
        positions = self.positions(topic, queue_id)
        low, high = self.min_queue_offset(topic, queue_id), self.max_queue_offset(topic, queue_id)
        if high == 0:
            return GetAnswer("NO_MESSAGE_IN_QUEUE", 0, low, high)
        if queue_offset < low:
            return GetAnswer("OFFSET_TOO_SMALL", low, low, high)
        if queue_offset == high:
            return GetAnswer("OFFSET_OVERFLOW_ONE", queue_offset, low, high)
        if queue_offset > high:
            return GetAnswer("OFFSET_OVERFLOW_BADLY", high, low, high)
        ahead = [p for p in positions if p.queue_offset + p.batch_num > queue_offset]
        if ahead[0].queue_offset > queue_offset:
            return GetAnswer("OFFSET_FOUND_NULL", ahead[0].queue_offset, low, high)
        unit_size = BATCH_UNIT_SIZE if self._kind(topic) == "batchconsumequeue" else UNIT_SIZE
        max_examined = max(16000, max_num * unit_size)
        max_bytes = min(max(max_bytes, 100), 128 * 1024 * 1024)
        codes = subscribed_codes(subscription)
        status = "NO_MATCHED_MESSAGE"
        records: list[Record] = []
        offsets: list[int] = []
        count = total = 0
        next_offset = queue_offset
        skip_until = -1
        bases = list(dict.fromkeys(p.file_base for p in ahead))
        for base in bases[:travel_files]:
            stopped = False
            for position in (p for p in ahead if p.file_base == base):
                if (position.queue_offset - queue_offset) * unit_size >= max_examined or (
                    records and self._is_full(count, total, position, max_num, max_bytes, on_disk)
                ):
                    stopped = True
                    break
                next_offset = position.queue_offset + position.batch_num
                if position.phy_offset < skip_until:
                    continue
                code = position.tags_code
                if codes is not None and code is not None and code & 0xFFFFFFFF not in codes:
                    continue
                record = self.record_at(position.phy_offset)
                if record is None:
                    if not records:
                        status = "MESSAGE_WAS_REMOVING"
                    segment_size = self.geo["mapped_file_size_commit_log"]
                    skip_until = position.phy_offset - position.phy_offset % segment_size + segment_size
                    continue
                records.append(record)
                offsets.append(position.queue_offset)
                count += position.batch_num
                total += position.size
                status = "FOUND"
                skip_until = -1
            if stopped or records:
                break
        return GetAnswer(status, next_offset, low, high, records, offsets, count)

    @staticmethod
    def _is_full(count: int, total: int, position: QueuePosition, max_num: int, max_bytes: int, on_disk: bool) -> bool:
        if count + position.batch_num > max_num or total + position.size > max_bytes:
            return True
        return total + position.size > (65536 if on_disk else 262144) or count > (7 if on_disk else 31)

    # offset by time

    def offset_by_time(self, topic: str, queue_id: int, timestamp: int, boundary: str = "lower") -> int:
        """Return the queue offset of a time in ms (section 3.8); `boundary` is "lower" or "upper"."""
        low, high = self.min_queue_offset(topic, queue_id), self.max_queue_offset(topic, queue_id)
        if not self.positions(topic, queue_id):
            return 0
        found = self._offset_by_time(topic, queue_id, timestamp, boundary == "lower", low)
        return min(max(found, low), high)

    def _offset_by_time(self, topic: str, queue_id: int, timestamp: int, lower: bool, minimum: int) -> int:
        by_file: dict[int, list[QueuePosition]] = {}
        for position in self.positions(topic, queue_id):
            by_file.setdefault(position.file_base, []).append(position)
        files = list(by_file.values())
        if lower:
            chosen = next((f for f in files if self._store_time(f[-1].phy_offset) >= timestamp), files[-1])
        else:
            chosen = next((f for f in reversed(files) if self._store_time(f[0].phy_offset) <= timestamp), None)
            if chosen is None:
                return 0
        units = [p for p in chosen if p.queue_offset >= minimum]
        if not units:
            return 0
        if self._store_time(units[-1].phy_offset) < timestamp:
            return units[-1].queue_offset + (1 if lower else 0)
        if self._store_time(units[0].phy_offset) > timestamp:
            return chosen[0].queue_offset if lower else 0
        first, last = 0, len(units) - 1
        left = right = -1
        while first <= last:
            middle = (first + last) // 2
            if units[middle].phy_offset < self.min_phy_offset:
                first, left = middle + 1, middle
                continue
            time = self._store_time(units[middle].phy_offset)
            if time < 0:
                return 0
            if time == timestamp:
                step = -1 if lower else 1
                while (
                    0 <= middle + step < len(units) and self._store_time(units[middle + step].phy_offset) == timestamp
                ):
                    middle += step
                return units[middle].queue_offset
            if time > timestamp:
                last, right = middle - 1, middle
            else:
                first, left = middle + 1, middle
        return units[right if lower else left].queue_offset


def resolve_tags_code(code: int, ext: Mapping[int, bytes]) -> int | None:
    """Follow an extension address; None when the unit cannot be read, which lets the message pass every filter."""
    if not is_ext_address(code):
        return code
    pos = code + 2**63
    for base, data in ext.items():
        if base <= pos < base + len(data):
            try:
                return decode_ext_unit(data, pos - base).tags_code
            except (ValueError, struct.error):
                return None
    return None


# ---------------------------------------------------------------------------------------------------------------
# The model of a whole store


@dataclass(frozen=True)
class PutAnswer:
    phy_offset: int
    size: int
    queue_offset: int
    msg_id: str
    store_timestamp: int


class StoreOracle:
    """An in-memory model of a store that starts empty: what is put, byte for byte, and where it is found again.

    Records are dispatched at once. `files()` gives what an orderly shutdown leaves in commitlog, consumequeue,
    consumequeue_ext, batchconsumequeue and index; a file is there only once something was written into it (an index
    file: once a record was dispatched to it, keys or none).
    """

    def __init__(self, geo: Mapping[str, Any] | None = None, *, store_host: str = "127.0.0.1:10911"):
        self.geo = geometry(geo)
        self.store_host = store_host
        self.log = SegmentedBytes(self.geo["mapped_file_size_commit_log"])
        self.records: list[Record] = []
        self.blanks: list[Blank] = []
        self.next_queue_offsets: dict[tuple[str, int], int] = {}
        self.dispatcher = DispatchOracle(self.geo)

    @property
    def end(self) -> int:
        return self.log.end or 0

    def _make_room(self, size: int) -> None:
        segment_size = self.log.file_size
        if size + 8 > segment_size:
            raise ValueError(f"{size} bytes do not fit a segment of {segment_size} with its blank of 8")
        left = segment_size - self.end % segment_size
        if size + 8 > left:
            self.blanks.append(Blank(self.end, left))
            self.log.append(struct.pack(">iI", left, MAGIC_BLANK) + bytes(left - 8))

    def put(
        self,
        topic: str,
        body: bytes = b"",
        *,
        clock: int,
        queue_id: int = 0,
        properties: bytes | Iterable[tuple[str, str | None]] = b"",
        property_table_size: int | None = None,
        flag: int = 0,
        sys_flag: int = 0,
        born_timestamp: int = 0,
        born_host: str = "127.0.0.1:0",
        store_host: str | None = None,
        reconsume_times: int = 0,
        prepared_transaction_offset: int = 0,
    ) -> PutAnswer:
        """Append one message; `clock` becomes its store timestamp (ms).

        `properties` given as bytes are kept (they must then hold what the store adds); pairs are written in their order
        with INNER_BASE or INNER_MULTI_QUEUE_OFFSET replaced or added at the end, or, with `property_table_size`, all
        in the order of a Java HashMap of that first size. Raises ValueError when the record fits no segment.
        """
        transaction = sys_flag & TRANSACTION_MASK
        counts = transaction in (0, COMMIT)
        queue = topic, queue_id
        queue_offset = self.next_queue_offsets.get(queue, 0) if counts else 0
        if isinstance(properties, bytes):
            named = parse_properties(java_decode(properties))
            raw: bytes | list[tuple[str, str | None]] = properties
        else:
            ordered = {name: value for name, value in properties if value is not None}
            named = parse_properties(java_decode(encode_properties(ordered.items())))
            if sys_flag & INNER_BATCH:
                ordered["INNER_BASE"] = str(queue_offset)
            if has_multi_dispatch(topic, named, self.geo):
                names = named["INNER_MULTI_DISPATCH"].split(",")
                ordered["INNER_MULTI_QUEUE_OFFSET"] = ",".join(
                    str(self.next_queue_offsets.get((name, 0), 0)) for name in names
                )
            if property_table_size is not None:
                ordered = {name: ordered[name] for name in java_map_order(ordered, property_table_size)}
            raw = list(ordered.items())
        fields: dict[str, Any] = {
            "topic": topic,
            "body": body,
            "properties": raw,
            "queue_id": queue_id,
            "flag": flag,
            "queue_offset": queue_offset,
            "sys_flag": sys_flag,
            "born_timestamp": born_timestamp,
            "born_host": born_host,
            "store_timestamp": clock,
            "store_host": store_host or self.store_host,
            "reconsume_times": reconsume_times,
            "prepared_transaction_offset": prepared_transaction_offset,
            "append_prop_crc": self.geo["enabled_append_prop_crc"],
        }
        self._make_room(len(encode_record(**fields)))
        record = self._append(fields)
        if counts:
            self.next_queue_offsets[queue] = queue_offset + record.batch_num
        if has_multi_dispatch(topic, named, self.geo):
            for name in named["INNER_MULTI_DISPATCH"].split(","):
                self.next_queue_offsets[name, 0] = self.next_queue_offsets.get((name, 0), 0) + 1
        return self._dispatch([record])[0]

    def put_batch(
        self,
        topic: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        clock: int,
        queue_id: int = 0,
        sys_flag: int = 0,
        born_timestamp: int = 0,
        born_host: str = "127.0.0.1:0",
        store_host: str | None = None,
        reconsume_times: int = 0,
    ) -> list[PutAnswer]:
        """Append a classic batch (section 2.6): consecutive records in one segment, all or none.

        Each message is a mapping with `body`, `properties` (bytes or pairs) and `flag`, all optional.
        """
        first = self.next_queue_offsets.get((topic, queue_id), 0)
        all_fields = [
            {
                "topic": topic,
                "body": message.get("body", b""),
                "properties": message.get("properties", b""),
                "flag": message.get("flag", 0),
                "queue_id": queue_id,
                "queue_offset": first + number,
                "sys_flag": sys_flag,
                "born_timestamp": born_timestamp,
                "born_host": born_host,
                "store_timestamp": clock,
                "store_host": store_host or self.store_host,
                "reconsume_times": reconsume_times,
                "append_prop_crc": self.geo["enabled_append_prop_crc"],
                "in_classic_batch": True,
            }
            for number, message in enumerate(messages)
        ]
        self._make_room(sum(len(encode_record(**fields)) for fields in all_fields))
        records = [self._append(fields) for fields in all_fields]
        self.next_queue_offsets[topic, queue_id] = first + len(records)
        return self._dispatch(records)

    def _append(self, fields: Mapping[str, Any]) -> Record:
        phy_offset = self.end
        data = encode_record(**fields, phy_offset=phy_offset)
        record = decode_record(data, 0, phy_offset)
        self.log.append(data)
        self.records.append(record)
        return record

    def _dispatch(self, records: Iterable[Record]) -> list[PutAnswer]:
        answers = []
        for record in records:
            self.dispatcher.dispatch(record)
            answers.append(
                PutAnswer(record.phy_offset, record.size, record.queue_offset, record.msg_id, record.store_timestamp)
            )
        return answers

    def files(self, flushed: bool = True) -> dict[str, bytes]:
        """Return {relative path: bytes}; index names are just numbers in order."""
        return self.log.files("commitlog") | self.dispatcher.files(flushed)

    def reader(self) -> StoreReader:
        """Return a reader over the files of this moment."""
        return StoreReader(self.files(), self.geo)

    def query(
        self, topic: str, key: str, begin: int = 0, end: int = MAX_I64, *, index_type: str | None = None
    ) -> list[int]:
        """Exact answer: phy offsets, newest first, of the records stored in [begin, end] (ms) that have the key.

        The key is one of `KEYS` or the unique key; with index type `T` the whole `TAGS` value. Rolled back records are
        not indexed and so never found. No limit, no duplicates, no foreign hits.
        """
        found = []
        for record in self.records:
            if record.topic != topic or not begin <= record.store_timestamp <= end:
                continue
            if record.transaction_type == ROLLBACK:
                continue
            if key == record.tags if index_type == "T" else key in record.keys or key == record.unique_key:
                found.append(record.phy_offset)
        return found[::-1]
