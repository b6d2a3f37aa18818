"""A second reader and writer of RabbitMQ's classic queues, in plain Python, that shares no code with the package.

Owns what the tests hold to be true of the bytes: names, external terms, messages, journal, segments, message files, version 2,
DETS and ETS as far as they are needed, the journal in memory, the merge of journal and segment, and what a node makes of a
directory when it boots.  Section numbers are those of docs/rabbitmq.md.  Source of all rules: RabbitMQ 3.10.8 on OTP 25.2.3.

Never imports rmqstore; never writes to a disk; reads one only in `read_vhost`.  Favours the obvious over the fast.  A parser
returns what it could read, how far it came and why it stopped; what to think of that is the caller's.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

DEFAULT_SEGMENT_ENTRY_COUNT = 2048
LEGACY_SEGMENT_ENTRY_COUNT = 16384
MAX_JOURNAL_ENTRIES = 32768
FILE_SIZE_LIMIT = 16 * 2**20
EMBED_BELOW = 4096
V2_SEGMENT_ENTRY_COUNT = 4096

# ---------------------------------------------------------------------------------------------------------------
# Names (section 2) and small files (1.1, 1.2)


def base36(digest: bytes) -> str:
    """A 128-bit number in base 36, without leading zeros."""
    number, text = int.from_bytes(digest, "big"), ""
    while number:
        number, digit = divmod(number, 36)
        text = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"[digit] + text
    return text or "0"


def vhost_dir(vhost: bytes) -> str:
    """The name of a vhost's directory."""
    return base36(hashlib.md5(vhost).digest())


def queue_dir(vhost: bytes, queue: bytes, priority: int | None = None) -> str:
    """The name of the directory of a queue, or of one priority of it."""
    if priority is not None:
        queue += bytes((0, priority))
    return base36(hashlib.md5(b"queue" + vhost + queue).digest())


def parse_config(data: bytes) -> int | None:
    """The segment entry count that `.config` says, None where it says none."""
    text = re.sub(rb"%[^\n]*", b"", data)
    match = re.search(rb"\{\s*segment_entry_count\s*,\s*(-?\d+)\s*\}\s*\.", text)
    return int(match[1]) if match else None


def config_text(segment_entry_count: int) -> bytes:
    """`.config` as a node writes it."""
    return (
        b"%% This file is auto-generated! Edit at your own risk!\n"
        + b"{segment_entry_count, %d}." % segment_entry_count
    )


class QueueName(NamedTuple):
    """What `.queue_name` says."""

    vhost: bytes
    queue: bytes
    priority: int | None
    version: int


def parse_queue_name(data: bytes) -> QueueName | None:
    """The contents of a stub; None for another file."""
    match = re.fullmatch(rb"VHOST: (.*?)\nQUEUE: (.*?)\n(INDEX: v2\n)?", data, re.DOTALL)
    if not match:
        return None
    queue, priority = match[2], None
    if len(queue) > 1 and queue[-2] == 0:
        queue, priority = queue[:-2], queue[-1]
    return QueueName(match[1], queue, priority, 2 if match[3] else 1)


def queue_name_text(name: QueueName) -> bytes:
    """`.queue_name` as a node writes it."""
    queue = name.queue + (bytes((0, name.priority)) if name.priority is not None else b"")
    return b"VHOST: " + name.vhost + b"\nQUEUE: " + queue + b"\n" + (b"INDEX: v2\n" if name.version == 2 else b"")


# ---------------------------------------------------------------------------------------------------------------
# Erlang's external terms (section 5)


class Atom(str):
    """An atom; a binary is `bytes`, a tuple `tuple`, a list `list`, a map `dict`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"'{self}'"


class Opaque(bytes):
    """A process or a reference: the bytes of its term, tag included."""

    __slots__ = ()


class TermError(ValueError):
    """No well-formed external term."""


def decode(data: bytes) -> Any:
    """The value of a whole external term (131 ...).

    Raises
    ------
    TermError
        Another term, or bytes after it.
    """
    value, end = decode_prefix(data)
    if end != len(data):
        raise TermError(f"{len(data) - end} bytes follow the term")
    return value


def decode_prefix(data: bytes, begin: int = 0) -> tuple[Any, int]:
    """The value of the external term that begins at `begin`, and where it ends."""
    try:
        if data[begin] != 131:
            raise TermError(f"a term begins with 131, not {data[begin]}")
        if data[begin + 1] == 80:
            (size,) = struct.unpack_from(">I", data, begin + 2)
            inflate = zlib.decompressobj()
            inner = inflate.decompress(data[begin + 6 :])
            if len(inner) != size or not inflate.eof:
                raise TermError("the compressed term has another size")
            value, end = _term(inner, 0)
            if end != size:
                raise TermError("something follows the compressed term")
            return value, len(data) - len(inflate.unused_data)
        return _term(data, begin + 1)
    except (struct.error, IndexError, zlib.error, UnicodeDecodeError, RecursionError) as error:
        raise TermError(str(error)) from error


def _take(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    if size < 0 or at + size > len(data):
        raise TermError("the term is cut")
    return data[at : at + size], at + size


def _sequence(data: bytes, at: int, count: int) -> tuple[list[Any], int]:
    if count > len(data) - at:
        raise TermError("the term is cut")
    values = []
    for _ in range(count):
        value, at = _term(data, at)
        values.append(value)
    return values, at


def _term(data: bytes, at: int) -> tuple[Any, int]:
    tag, begin, at = data[at], at, at + 1
    if tag == 97:
        return data[at], at + 1
    if tag == 98:
        return struct.unpack_from(">i", data, at)[0], at + 4
    if tag == 70:
        return struct.unpack_from(">d", data, at)[0], at + 8
    if tag in (110, 111):
        size = data[at] if tag == 110 else struct.unpack_from(">I", data, at)[0]
        at += 1 if tag == 110 else 4
        negative = data[at]
        digits, at = _take(data, at + 1, size)
        number = int.from_bytes(digits, "little")
        return -number if negative else number, at
    if tag in (100, 118):
        text, at = _take(data, at + 2, struct.unpack_from(">H", data, at)[0])
        return Atom(text.decode("latin-1" if tag == 100 else "utf-8")), at
    if tag in (115, 119):
        text, at = _take(data, at + 1, data[at])
        return Atom(text.decode("latin-1" if tag == 115 else "utf-8")), at
    if tag == 109:
        return _take(data, at + 4, struct.unpack_from(">I", data, at)[0])
    if tag in (104, 105):
        count = data[at] if tag == 104 else struct.unpack_from(">I", data, at)[0]
        values, at = _sequence(data, at + (1 if tag == 104 else 4), count)
        return tuple(values), at
    if tag == 106:
        return [], at
    if tag == 107:
        text, at = _take(data, at + 2, struct.unpack_from(">H", data, at)[0])
        return list(text), at
    if tag == 108:
        values, at = _sequence(data, at + 4, struct.unpack_from(">I", data, at)[0])
        tail, at = _term(data, at)
        if tail != []:
            raise TermError("an improper list")
        return values, at
    if tag == 116:
        count = struct.unpack_from(">I", data, at)[0]
        values, at = _sequence(data, at + 4, 2 * count)
        return dict(zip(values[::2], values[1::2])), at
    if tag == 88:  # a process: node, id, serial, creation
        _, at = _term(data, at)
        _, at = _take(data, at, 12)
        return Opaque(data[begin:at]), at
    if tag == 90:  # a reference: number of words, node, creation, words
        words = struct.unpack_from(">H", data, at)[0]
        _, at = _term(data, at + 2)
        _, at = _take(data, at, 4 + 4 * words)
        return Opaque(data[begin:at]), at
    raise TermError(f"tag {tag} at {begin}")


def encode(value: Any) -> bytes:
    """The external term of a value as OTP 25 writes it."""
    return b"\x83" + _encoded(value)


def _encoded(value: Any) -> bytes:
    if isinstance(value, Opaque):
        return bytes(value)
    if isinstance(value, Atom):
        text = value.encode("latin-1")
        return struct.pack(">BH", 100, len(text)) + text
    if isinstance(value, bytes):
        return struct.pack(">BI", 109, len(value)) + value
    if isinstance(value, int):
        if 0 <= value < 256:
            return bytes((97, value))
        if -(2**31) <= value < 2**31:
            return struct.pack(">Bi", 98, value)
        digits = abs(value).to_bytes((abs(value).bit_length() + 7) // 8, "little")
        head = struct.pack(">BB", 110, len(digits)) if len(digits) < 256 else struct.pack(">BI", 111, len(digits))
        return head + bytes((value < 0,)) + digits
    if isinstance(value, float):
        return struct.pack(">Bd", 70, value)
    if isinstance(value, tuple):
        head = struct.pack(">BB", 104, len(value)) if len(value) < 256 else struct.pack(">BI", 105, len(value))
        return head + b"".join(map(_encoded, value))
    if isinstance(value, list):
        if not value:
            return b"\x6a"
        if len(value) < 65536 and all(type(one) is int and 0 <= one < 256 for one in value):
            return struct.pack(">BH", 107, len(value)) + bytes(value)
        return struct.pack(">BI", 108, len(value)) + b"".join(map(_encoded, value)) + b"\x6a"
    if isinstance(value, dict):
        pairs = b"".join(_encoded(key) + _encoded(one) for key, one in value.items())
        return struct.pack(">BI", 116, len(value)) + pairs
    raise TypeError(f"{type(value).__name__} is no term")


# ---------------------------------------------------------------------------------------------------------------
# AMQP 0-9-1 properties

PROPERTIES = (
    ("content_type", "s"),
    ("content_encoding", "s"),
    ("headers", "F"),
    ("delivery_mode", "B"),
    ("priority", "B"),
    ("correlation_id", "s"),
    ("reply_to", "s"),
    ("expiration", "s"),
    ("message_id", "s"),
    ("timestamp", "T"),
    ("type", "s"),
    ("user_id", "s"),
    ("app_id", "s"),
    ("cluster_id", "s"),
)
_FIXED = {
    "t": ">?",
    "b": ">b",
    "B": ">B",
    "s": ">h",
    "u": ">H",
    "I": ">i",
    "i": ">I",
    "l": ">q",
    "L": ">q",
    "f": ">f",
    "d": ">d",
    "T": ">Q",
}
#: Erlang's names of the types in a decoded table, by the letter that stands for them on the wire.
TYPE_NAMES = {
    "S": "longstr",
    "I": "signedint",
    "T": "timestamp",
    "V": "void",
    "b": "byte",
    "B": "unsignedbyte",
    "d": "double",
    "f": "float",
    "l": "long",
    "s": "short",
    "u": "unsignedshort",
    "i": "unsignedint",
    "t": "bool",
    "x": "binary",
    "D": "decimal",
    "F": "table",
    "A": "array",
}
_LETTERS = {name: letter for letter, name in TYPE_NAMES.items()}


class Typed(NamedTuple):
    """A value of a headers table and the letter of its type; tables are lists of (name, Typed), arrays of Typed."""

    letter: str
    value: Any


def _field(data: bytes, at: int) -> tuple[Typed, int]:
    letter, at = chr(data[at]), at + 1
    if letter in _FIXED:
        return Typed(letter, struct.unpack_from(_FIXED[letter], data, at)[0]), at + struct.calcsize(_FIXED[letter])
    if letter == "V":
        return Typed("V", None), at
    if letter == "D":
        return Typed("D", struct.unpack_from(">BI", data, at)), at + 5
    (size,) = struct.unpack_from(">I", data, at)
    content, at = _take(data, at + 4, size)
    if letter in "Sx":
        return Typed(letter, content), at
    if letter == "F":
        return Typed("F", _table(content)), at
    if letter == "A":
        values, inner = [], 0
        while inner < len(content):
            value, inner = _field(content, inner)
            values.append(value)
        return Typed("A", values), at
    raise TermError(f"no type of a table: {letter!r}")


def _table(content: bytes) -> list[tuple[bytes, Typed]]:
    rows, at = [], 0
    while at < len(content):
        name, at = _take(content, at + 1, content[at])
        value, at = _field(content, at)
        rows.append((name, value))
    return rows


def decode_properties(data: bytes) -> dict[str, Any]:
    """The properties that are there, from flags and list; texts are bytes, headers are a list of (name, Typed)."""
    (flags,) = struct.unpack_from(">H", data)
    if flags & 3:
        raise TermError("property flags that do not exist")
    found: dict[str, Any] = {}
    at = 2
    for bit, (name, kind) in enumerate(PROPERTIES):
        if not flags & 1 << (15 - bit):
            continue
        if kind == "s":
            found[name], at = _take(data, at + 1, data[at])
        elif kind == "F":
            content, at = _take(data, at + 4, struct.unpack_from(">I", data, at)[0])
            found[name] = _table(content)
        elif kind == "B":
            found[name], at = data[at], at + 1
        else:
            (found[name],) = struct.unpack_from(">Q", data, at)
            at += 8
    if at != len(data):
        raise TermError("something follows the properties")
    return found


def _erlang_value(kind: str, value: Any) -> Typed:
    letter = _LETTERS[kind]
    if letter == "F":
        value = [(name, _erlang_value(inner, one)) for name, inner, one in value]
    elif letter == "A":
        value = [_erlang_value(inner, one) for inner, one in value]
    elif letter == "t":
        value = value == "true"
    elif letter == "V":
        value = None
    elif letter in "Sx" and isinstance(value, list):
        value = bytes(value)
    return Typed(letter, value)


def erlang_properties(record: tuple[Any, ...]) -> dict[str, Any]:
    """The same of a decoded `P_basic` record."""
    if len(record) != 15 or record[0] != "P_basic":
        raise TermError("no P_basic record")
    found = {name: value for (name, _), value in zip(PROPERTIES, record[1:]) if value != "undefined"}
    if "headers" in found:
        found["headers"] = [(name, _erlang_value(kind, value)) for name, kind, value in found["headers"]]
    return found


# ---------------------------------------------------------------------------------------------------------------
# Messages (sections 5 and 11)


class Message(NamedTuple):
    """The parts of a message's term; texts are bytes, properties as from `decode_properties`."""

    body: bytes
    properties: dict[str, Any]
    exchange: bytes
    routing_keys: list[bytes]
    vhost: bytes
    msg_id: bytes
    persistent: bool

    @property
    def sha256(self) -> str:
        """Of the body, hexadecimal."""
        return hashlib.sha256(self.body).hexdigest()


def message_of(value: Any) -> Message:
    """The message that a decoded term is.

    Raises
    ------
    TermError
        It is something else.
    """
    try:
        if value[0] == "basic_message":
            # A node never looks at the kind of the resource.
            _, (resource, vhost, _, exchange), keys, content, msg_id, persistent = value
            if resource != "resource" or persistent not in ("true", "false"):
                raise TermError("no basic_message")
        elif value[0] == "mc":
            _, _, content, annotations = value
            exchange, keys, msg_id = (annotations[Atom(name)] for name in ("x", "rk", "id"))
            persistent, vhost = annotations.get(Atom("d"), "true"), b""
        else:
            raise TermError("no message")
        tag, class_id, decoded, binary, protocol, fragments = content
        if tag != "content" or class_id != 60 or len(msg_id) != 16:
            raise TermError("no message")
        # A node sends encoded properties as they are.
        encoded = decoded == "none" or (binary != "none" and protocol == "rabbit_framing_amqp_0_9_1")
        properties = decode_properties(binary) if encoded else erlang_properties(decoded)
        body = b"".join(reversed(fragments))
    except (ValueError, TypeError, KeyError, IndexError, struct.error) as error:
        raise TermError(f"no message: {error}") from error
    return Message(body, properties, exchange, keys, vhost, msg_id, persistent == "true")


def message_term(
    body: bytes,
    msg_id: bytes,
    *,
    properties: bytes = b"\x10\x00\x02",
    exchange: bytes = b"",
    routing_keys: Sequence[bytes] = (b"q",),
    vhost: bytes = b"/",
    persistent: bool = True,
    fragment: int = 131064,
) -> bytes:
    """The term of a message as 3.10.8 on OTP 25 writes it; `properties` are flags and list."""
    pieces = [body[at : at + fragment] for at in range(0, len(body), fragment)]
    return encode(
        (
            Atom("basic_message"),
            (Atom("resource"), vhost, Atom("exchange"), exchange),
            list(routing_keys),
            (Atom("content"), 60, Atom("none"), properties, Atom("rabbit_framing_amqp_0_9_1"), pieces[::-1]),
            msg_id,
            Atom("true" if persistent else "false"),
        )
    )


def embedded(body_size: int, properties_size: int, embed_below: int = EMBED_BELOW) -> bool:
    """Check that a message goes into the index (6.1)."""
    return body_size < embed_below and body_size + properties_size < embed_below


# ---------------------------------------------------------------------------------------------------------------
# Journal and segments (sections 3 and 4)


class Publish(NamedTuple):
    """A publish: `expiry` in microseconds since 1970 (0: none), `size` of the body, `term` empty if it is in the store."""

    seq: int
    msg_id: bytes
    expiry: int
    size: int
    persistent: bool
    term: bytes


class Record(NamedTuple):
    """A record: kind "pub", "del", "ack" (journal) or "pub", "rel" (segment), sequence id, where it begins and ends."""

    kind: str
    seq: int
    begin: int
    end: int
    pub: Publish | None = None


class Parsed(NamedTuple):
    """Records, where the parser stopped, and why: "end" or the reason."""

    records: list[Record]
    used: int
    why: str


PUBLISH_HEAD = 40
SEGMENT_HEAD = 34


def parse_journal(data: bytes) -> Parsed:
    """The records of `journal.jif`; all that ends it early is silent in the node (section 3)."""
    records: list[Record] = []
    at = 0
    while at < len(data):
        if data[at : at + 40] == bytes(40):
            return Parsed(records, at, "zeros")
        if at + 8 > len(data):
            return Parsed(records, at, "short word")
        (word,) = struct.unpack_from(">Q", data, at)
        kind, seq = word >> 62, word & (2**62 - 1)
        if kind >= 2:
            records.append(Record("del" if kind == 2 else "ack", seq, at, at + 8))
            at += 8
            continue
        if at + 40 > len(data):
            return Parsed(records, at, "short publish")
        msg_id, expiry, size, embedded_size = struct.unpack_from(">16sQII", data, at + 8)
        end = at + 40 + embedded_size
        if end > len(data):
            return Parsed(records, at, "short publish")
        pub = Publish(seq, msg_id, expiry, size, kind == 0, bytes(data[at + 40 : end]))
        records.append(Record("pub", seq, at, end, pub))
        at = end
    return Parsed(records, at, "end")


def journal_publish(pub: Publish) -> bytes:
    """A publish in the journal."""
    word = (0 if pub.persistent else 1) << 62 | pub.seq
    return struct.pack(">Q16sQII", word, pub.msg_id, pub.expiry, pub.size, len(pub.term)) + pub.term


def journal_deliver(seq: int) -> bytes:
    """A deliver in the journal."""
    return struct.pack(">Q", 2 << 62 | seq)


def journal_ack(seq: int) -> bytes:
    """An ack in the journal."""
    return struct.pack(">Q", 3 << 62 | seq)


def encode_journal(records: Iterable[Record]) -> bytes:
    """The bytes of journal records."""
    parts = []
    for record in records:
        if record.kind == "pub":
            assert record.pub is not None
            parts.append(journal_publish(record.pub))
        else:
            parts.append(journal_deliver(record.seq) if record.kind == "del" else journal_ack(record.seq))
    return b"".join(parts)


def parse_segment(data: bytes, number: int, count: int) -> Parsed:
    """The records of segment `number`, with whole sequence ids; all that ends it early crashes the node, but for zeros.

    A file of zeros alone is "zeros", which the node deletes.  Order is checked too: a mark without its publish, a third mark
    and a number not below `count` end it.
    """
    records: list[Record] = []
    if data and not any(data):
        return Parsed(records, 0, "zeros")
    marks: dict[int, int] = {}
    at = 0
    while at < len(data):
        if at + 2 > len(data):
            return Parsed(records, at, "short head")
        (head,) = struct.unpack_from(">H", data, at)
        rel = head & 0x3FFF
        if head >> 14 == 0:
            return Parsed(records, at, "prefix 00")
        if rel >= count:
            return Parsed(records, at, "number beyond the segment")
        seq = number * count + rel
        if head >> 15:
            if at + 34 > len(data):
                return Parsed(records, at, "short publish")
            msg_id, expiry, size, embedded_size = struct.unpack_from(">16sQII", data, at + 2)
            end = at + 34 + embedded_size
            if end > len(data):
                return Parsed(records, at, "short publish")
            if rel in marks:
                return Parsed(records, at, "second publish")
            marks[rel] = 0
            pub = Publish(seq, msg_id, expiry, size, bool(head >> 14 & 1), bytes(data[at + 34 : end]))
            records.append(Record("pub", seq, at, end, pub))
            at = end
            continue
        if rel not in marks:
            return Parsed(records, at, "mark without publish")
        if marks[rel] == 2:
            return Parsed(records, at, "third mark")
        marks[rel] += 1
        records.append(Record("rel", seq, at, at + 2))
        at += 2
    return Parsed(records, at, "end")


def segment_publish(pub: Publish, count: int) -> bytes:
    """A publish in a segment."""
    head = 1 << 15 | pub.persistent << 14 | pub.seq % count
    return struct.pack(">H16sQII", head, pub.msg_id, pub.expiry, pub.size, len(pub.term)) + pub.term


def segment_mark(seq: int, count: int) -> bytes:
    """A deliver or an ack in a segment: the first is a deliver, the second an ack."""
    return struct.pack(">H", 1 << 14 | seq % count)


def encode_segment(records: Iterable[Record], count: int) -> bytes:
    """The bytes of segment records."""
    return b"".join(
        segment_publish(record.pub, count) if record.pub is not None else segment_mark(record.seq, count)
        for record in records
    )


# ---------------------------------------------------------------------------------------------------------------
# The journal in memory and its flush (6.3, 6.4)


class State(NamedTuple):
    """The state of a sequence id in journal or segment."""

    pub: Publish | None = None
    delivered: bool = False
    acked: bool = False


NOTHING = State()


class IndexModel:
    """A queue's index as the node keeps it: `journal` and `segments` are the bytes of its files.

    `publish`, `deliver` and `ack` do what the node does for one call each; a history that would crash the node raises
    AssertionError.  `flush` is also what hibernation does.  Segments without a file are not in `segments`.
    """

    def __init__(self, count: int, max_journal_entries: int = MAX_JOURNAL_ENTRIES):
        self.count = count
        self.max_journal_entries = max_journal_entries
        self.journal = bytearray()
        self.segments: dict[int, bytearray] = {}
        self.pending: dict[int, dict[int, State]] = {}
        self.unacked: dict[int, int] = {}
        self.dirty_count = 0
        self.flushes = 0

    def _at(self, seq: int) -> tuple[dict[int, State], int, int]:
        number, rel = divmod(seq, self.count)
        return self.pending.setdefault(number, {}), number, rel

    def _add(self, actions: int) -> None:
        self.dirty_count += actions
        if self.dirty_count > self.max_journal_entries:
            self.flush()

    def publish(self, pub: Publish) -> None:
        """Append a publish; the deliver that 3.10 writes at once is a call of its own."""
        pending, number, rel = self._at(pub.seq)
        assert rel not in pending, pub.seq
        pending[rel] = State(pub)
        self.unacked[number] = self.unacked.get(number, 0) + 1
        self.journal += journal_publish(pub)
        self._add(1)

    def deliver(self, seqs: Sequence[int]) -> None:
        """Append delivers, in one call."""
        for seq in seqs:
            pending, _, rel = self._at(seq)
            state = pending.get(rel, NOTHING)
            assert not state.delivered and not state.acked, (seq, state)
            pending[rel] = state._replace(delivered=True)
            self.journal += journal_deliver(seq)
        self._add(len(seqs))

    def ack(self, seqs: Sequence[int]) -> None:
        """Append acks, in one call."""
        for seq in seqs:
            pending, number, rel = self._at(seq)
            state = pending.get(rel, NOTHING)
            assert not state.acked and (state.delivered or state.pub is None), (seq, state)
            if state.pub is not None:
                del pending[rel]
            else:
                pending[rel] = state._replace(acked=True)
            self.unacked[number] -= 1
            self.journal += journal_ack(seq)
        self._add(len(seqs))

    def enqueue(self, pub: Publish) -> None:
        """A publish followed by its deliver, as 3.10 does for a persistent message."""
        self.publish(pub)
        self.deliver([pub.seq])

    def flush(self) -> None:
        """Write what is pending into the segments, delete those without an unacked entry, empty the journal."""
        for number in sorted(self.unacked):
            if self.unacked[number] == 0:
                self.segments.pop(number, None)
                del self.unacked[number]
            elif self.pending.get(number):
                blob = self.segments.setdefault(number, bytearray())
                for rel, state in sorted(self.pending[number].items(), reverse=True):
                    seq = number * self.count + rel
                    if state.pub is not None:
                        blob += segment_publish(state.pub, self.count)
                    blob += segment_mark(seq, self.count) * (state.delivered + state.acked)
        self.pending.clear()
        self.journal.clear()
        self.dirty_count = 0
        self.flushes += 1

    def files(self) -> dict[str, bytes]:
        """The files of the queue's directory, but for the stub."""
        return {"journal.jif": bytes(self.journal)} | {f"{n}.idx": bytes(data) for n, data in self.segments.items()}


# ---------------------------------------------------------------------------------------------------------------
# Reading back: the merge (7.1)


class Crash(NamedTuple):
    """Something that keeps the real node from booting."""

    file: str
    pos: int
    why: str


def journal_map(records: Iterable[Record]) -> tuple[dict[int, State], list[Crash]]:
    """Step 1: what the journal still says after the cancelling of publish, deliver and ack, and what the node dies of.

    Tolerant where the node is not: a second publish or deliver is dropped, an ack after an undelivered publish cancels it.
    """
    states: dict[int, State] = {}
    crashes = []
    for record in records:
        state = states.get(record.seq, NOTHING)
        crash = ""
        if record.kind == "pub":
            if state != NOTHING:
                crash = "second publish"
            else:
                state = State(record.pub)
        elif record.kind == "del":
            if state.delivered or state.acked:
                crash = "second deliver"
            else:
                state = state._replace(delivered=True)
        elif state.acked:
            crash = "second ack"
        elif state.pub is not None:
            crash = "" if state.delivered else "ack of an undelivered publish"
            state = NOTHING
        else:
            state = state._replace(acked=True)
        if crash:
            crashes.append(Crash("journal.jif", record.begin, crash))
        if state == NOTHING:
            states.pop(record.seq, None)
        else:
            states[record.seq] = state
    return states, crashes


def segment_map(records: Iterable[Record]) -> dict[int, State]:
    """Step 2: what a segment says."""
    states: dict[int, State] = {}
    for record in records:
        if record.pub is not None:
            states[record.seq] = State(record.pub)
        else:
            state = states[record.seq]
            states[record.seq] = state._replace(delivered=True, acked=state.delivered)
    return states


def merge(journal: State, segment: State) -> tuple[State, str]:
    """Step 3 and 4: what both say together, and why the node crashes ("" where it does not), by the table of 7.1."""
    kinds = {
        (False, False, False): "absent",
        (True, False, False): "pub",
        (True, True, False): "pub+del",
        (True, True, True): "pub+del+ack",
        (False, True, False): "del",
        (False, False, True): "ack",
        (False, True, True): "del+ack",
    }
    j = kinds[(journal.pub is not None, journal.delivered, journal.acked)]
    s = kinds[(segment.pub is not None, segment.delivered, segment.acked)]
    if j == "absent":
        return segment, ""
    if j.startswith("pub"):
        if s == "absent":
            return journal, ""
        if journal.pub != segment.pub:
            return segment, "another publish of the same number"
    acked = segment._replace(delivered=True, acked=True)
    table = {
        ("pub", "pub"): (segment, ""),
        ("pub", "pub+del"): (segment, "publish of what is delivered"),
        ("pub", "pub+del+ack"): (segment, "publish of what is acked"),
        ("pub+del", "pub"): (segment._replace(delivered=True), ""),
        ("pub+del", "pub+del"): (segment, ""),
        ("pub+del", "pub+del+ack"): (segment, "publish of what is acked"),
        ("pub+del+ack", "pub"): (acked, ""),
        ("pub+del+ack", "pub+del"): (acked, ""),
        ("pub+del+ack", "pub+del+ack"): (segment, ""),
        ("del", "absent"): (NOTHING, "deliver without publish"),
        ("del", "pub"): (segment._replace(delivered=True), ""),
        ("del", "pub+del"): (segment, ""),
        ("del", "pub+del+ack"): (segment, "deliver of what is acked"),
        ("ack", "absent"): (NOTHING, ""),
        ("ack", "pub"): (acked, "ack of an undelivered publish"),
        ("ack", "pub+del"): (acked, ""),
        ("ack", "pub+del+ack"): (segment, ""),
        ("del+ack", "absent"): (NOTHING, ""),
        ("del+ack", "pub"): (acked, ""),
        ("del+ack", "pub+del"): (acked, ""),
        ("del+ack", "pub+del+ack"): (segment, ""),
    }
    return table[(j, s)]


# ---------------------------------------------------------------------------------------------------------------
# Message files (section 8)


class Stored(NamedTuple):
    """A record of a message file: `whole` tells that its marker is right."""

    msg_id: bytes
    begin: int
    end: int
    term: bytes
    whole: bool


class ParsedFile(NamedTuple):
    """Records, where the scan stopped and why."""

    records: list[Stored]
    used: int
    why: str


def parse_rdq(data: bytes) -> ParsedFile:
    """The records of a message file by the rule of 3.12 and before."""
    records: list[Stored] = []
    at = 0
    while at < len(data):
        if at + 8 > len(data):
            return ParsedFile(records, at, "short size")
        (size,) = struct.unpack_from(">Q", data, at)
        end = at + size + 9
        if size == 0:
            return ParsedFile(records, at, "zero size")
        if end > len(data):
            return ParsedFile(records, at, "short record")
        if size < 16:
            return ParsedFile(records, at, "size below 16")
        records.append(Stored(data[at + 8 : at + 24], at, end, data[at + 24 : end - 1], data[end - 1] == 255))
        at = end
    return ParsedFile(records, at, "end")


def rdq_record(msg_id: bytes, term: bytes) -> bytes:
    """A record of a message file."""
    return struct.pack(">Q16s", 16 + len(term), msg_id) + term + b"\xff"


def encode_rdq(records: Iterable[Stored]) -> bytes:
    """The bytes of records."""
    return b"".join(rdq_record(record.msg_id, record.term) for record in records)


# ---------------------------------------------------------------------------------------------------------------
# Version 2 (section 11)


class EntryV2(NamedTuple):
    """An entry of `N.qi`: `place` 1 is the shared store, 2 the queue's own at `offset`."""

    seq: int
    persistent: bool
    place: int
    msg_id: bytes
    offset: int
    term_size: int
    size: int
    expiry: int


def parse_qi(data: bytes) -> tuple[int, int, list[EntryV2]]:
    """First and end of the sequence ids that the head says, and the live entries."""
    magic, version, first, end = struct.unpack_from(">IBQQ", data)
    if magic != 0x52435149 or version != 2:
        raise TermError("no index of version 2")
    return first, end, qi_entries(data, first)


def qi_entries(data: bytes, first: int) -> list[EntryV2]:
    """The live entries after any head."""
    entries = []
    for rel in range((len(data) - 64) // 32):
        status, flags, _, place, location, size, expiry = struct.unpack_from(">BBBB16sIQ", data, 64 + 32 * rel)
        if status != 1:
            continue
        offset, term_size, _ = struct.unpack(">QII", location)
        entries.append(EntryV2(first + rel, bool(flags & 1), place, location, offset, term_size, size, expiry))
    return entries


def encode_qi(first: int, end: int, entries: Iterable[EntryV2], size: int) -> bytes:
    """The bytes of `N.qi`, `size` of them."""
    data = bytearray(size)
    struct.pack_into(">IBQQ", data, 0, 0x52435149, 2, first, end)
    for entry in entries:
        location = entry.msg_id if entry.place == 1 else struct.pack(">QII", entry.offset, entry.term_size, 0)
        at = 64 + 32 * (entry.seq - first)
        struct.pack_into(
            ">BBBB16sIQ", data, at, 1, entry.persistent, 0, entry.place, location, entry.size, entry.expiry
        )
    return bytes(data)


def parse_qs(data: bytes) -> tuple[int, int, list[tuple[int, bytes, int | None]]]:
    """First and end of the sequence ids that the head says, and (offset, term, low half of the CRC or None) of each record."""
    magic, version, first, end = struct.unpack_from(">IBQQ", data)
    if magic != 0x52435153 or version != 2:
        raise TermError("no store of version 2")
    found, at = [], 64
    while at < len(data):
        size, flags, crc, _ = struct.unpack_from(">IBHB", data, at)
        term, after = _take(data, at + 8, size)
        found.append((at, term, crc if flags & 1 else None))
        at = after
    return first, end, found


def qs_records(data: bytes) -> tuple[list[tuple[int, bytes, int | None]], int]:
    """Parse as `parse_qs`, with any head, up to a damaged record or one beyond the file; and its position."""
    found, at = [], 64
    while at + 8 < len(data):
        size, flags, crc, _ = struct.unpack_from(">IBHB", data, at)
        if not size or at + 8 + size > len(data):
            break
        found.append((at, data[at + 8 : at + 8 + size], crc if flags & 1 else None))
        at += 8 + size
    return found, at


def encode_qs(first: int, end: int, terms: Iterable[bytes]) -> bytes:
    """The bytes of `N.qs`, with CRCs."""
    head = struct.pack(">IBQQ", 0x52435153, 2, first, end)
    records = [struct.pack(">IBHB", len(term), 1, zlib.crc32(term) & 0xFFFF, 0) + term for term in terms]
    return head + bytes(43) + b"".join(records)


# ---------------------------------------------------------------------------------------------------------------
# Files of an orderly stop (section 9)

ACTIVE = 0x12345678


def parse_dets(data: bytes) -> list[Any]:
    """The objects of a DETS table that was closed properly, by its hash table."""
    header = struct.unpack_from(">14I", data)
    if header[1] != 0xABCDEF or header[4] != 9:
        raise TermError("no DETS table of version 9")
    objects = []
    for part in struct.unpack_from(">256I", data, 312):
        if not part:
            continue
        for segment in struct.unpack_from(">512I", data, part):
            if not segment:
                continue
            for slot in range(256):
                size, at = struct.unpack_from(">II", data, segment + 8 * slot)
                if not size:
                    continue
                used, status = struct.unpack_from(">II", data, at)
                assert status == ACTIVE
                objects += _collection(data, at + 8, at + used)
    return objects


def _collection(data: bytes, at: int, end: int) -> list[Any]:
    found = []
    while at < end:
        (size,) = struct.unpack_from(">I", data, at)
        value, after = decode_prefix(data[at + 4 : at + size])
        assert after == size - 4
        found.append(value)
        at += size
    return found


def recovery_terms(objects: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """{directory of a queue: its terms} of the objects of `recovery.dets`."""
    return {bytes(key).decode(): {str(name): value for name, value in terms} for key, terms in objects}


def parse_ets(data: bytes) -> list[Any]:
    """The items of a table that `tab2file` wrote: header, objects, end."""
    if data[:8] != bytes.fromhex("01020304") + bytes.fromhex("63584d0b"):
        raise TermError("no table of tab2file, or it was not closed")
    items, at = [], 8
    while at < len(data):
        size, magic = struct.unpack_from(">II", data, at)
        if magic != 0x62574C41:
            raise TermError(f"no item at {at}")
        at += 8
        if size >= 65528:
            checksum, at = _take(data, at, 16)
            assert checksum == hashlib.md5(struct.pack(">I", size)).digest()
        term, at = _take(data, at, size)
        items.append(decode(term))
    return items


def encode_ets(items: Iterable[Any]) -> bytes:
    """The bytes of a table of these items."""
    data = bytearray.fromhex("0102030463584d0b")
    for item in items:
        term = encode(item)
        data += struct.pack(">II", len(term), 0x62574C41)
        if len(term) >= 65528:
            data += hashlib.md5(struct.pack(">I", len(term))).digest()
        data += term
    return bytes(data)


def parse_clean(text: bytes) -> list[bytes]:
    """The references of `clean.dot`."""
    match = re.match(
        rb"\{client_refs,\s*\[(.*?)\]\}\.\s*\{index_module,\s*rabbit_msg_store_ets_index\}\.\s*$", text, re.DOTALL
    )
    if not match:
        raise TermError("no clean.dot")
    refs = []
    for inner in re.findall(rb"<<(.*?)>>", match[1], re.DOTALL):
        text_form = re.fullmatch(rb'\s*"(.*)"\s*', inner, re.DOTALL)
        refs.append(text_form[1] if text_form else bytes(int(number) for number in inner.split(b",")))
    return refs


# ---------------------------------------------------------------------------------------------------------------
# A whole vhost: what a node makes of it (7.2 to 7.4, 8.5)


@dataclass
class Entry:
    """A message that the node delivers after a boot; `expiry` in microseconds, `stored` in a message store."""

    seq: int
    msg_id: bytes
    size: int
    expiry: int
    persistent: bool
    delivered: bool
    redelivered: bool
    stored: bool
    message: Message
    term: bytes

    @property
    def sha256(self) -> str:
        """Of the body."""
        return self.message.sha256


@dataclass
class Queue:
    """A queue's directory: `entries` in order of sequence ids, `dropped` those that are gone or `transient`."""

    directory: str
    name: QueueName | None
    version: int
    clean: bool
    entries: list[Entry] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    transient: list[int] = field(default_factory=list)
    crashes: list[Crash] = field(default_factory=list)
    next_seq_id: int = 0
    next_deliver_seq_id: int = 0

    @property
    def seqs(self) -> set[int]:
        """Sequence ids of what is delivered."""
        return {entry.seq for entry in self.entries}


@dataclass
class Vhost:
    """All of a vhost: queues by directory, references by message id (non-embedded, persistent), located messages."""

    path: Path
    segment_entry_count: int
    clean: bool
    queues: dict[str, Queue] = field(default_factory=dict)
    references: dict[bytes, int] = field(default_factory=dict)
    located: dict[bytes, tuple[str, int, bytes]] = field(default_factory=dict)

    @property
    def crashes(self) -> bool:
        """True if the node does not boot on it."""
        return any(queue.crashes for queue in self.queues.values())

    def queue(self, name: bytes, priority: int | None = None) -> Queue:
        """The queue of that name."""
        for queue in self.queues.values():
            if queue.name is not None and (queue.name.queue, queue.name.priority) == (name, priority):
                return queue
        raise KeyError(name)


def load_index(files: Mapping[str, bytes], count: int) -> tuple[dict[int, State], list[Crash]]:
    """Journal and segments of a directory together: {sequence id: state}, and what the node dies of."""
    journal, crashes = journal_map(parse_journal(files.get("journal.jif", b"")).records)
    states: dict[int, State] = {}
    for name, data in files.items():
        match = re.fullmatch(r"(\d+)\.idx", name)
        if not match:
            continue
        parsed = parse_segment(data, int(match[1]), count)
        if parsed.why not in ("end", "zeros"):
            crashes.append(Crash(name, parsed.used, parsed.why))
        states.update(segment_map(parsed.records))
    for seq, state in journal.items():
        merged, crash = merge(state, states.get(seq, NOTHING))
        if crash:
            crashes.append(Crash("journal.jif", -1, f"{crash} ({seq})"))
        if merged != NOTHING:
            states[seq] = merged
    return dict(sorted(states.items())), crashes


def scan_store(folder: Path, wanted: Mapping[bytes, int] | None) -> dict[bytes, tuple[str, int, bytes]]:
    """{message id: (file, offset, term)} of the messages that are `wanted` (None: all); leftover `.rdt` are appended first."""
    located: dict[bytes, tuple[str, int, bytes]] = {}
    numbers = sorted(int(path.stem) for path in folder.glob("*.rdq"))
    for number in numbers:
        data = (folder / f"{number}.rdq").read_bytes()
        rest = folder / f"{number}.rdt"
        if rest.exists():
            data = data[: parse_rdq(data).used] + rest.read_bytes()
        for record in reversed(parse_rdq(data).records):
            if record.whole and record.msg_id not in located and (wanted is None or record.msg_id in wanted):
                located[record.msg_id] = (f"{number}.rdq", record.begin, record.term)
    return located


def read_vhost(path: str | os.PathLike[str]) -> Vhost:
    """List the messages that the node delivers after a boot on `path`, if it knows its queues; writes nothing.

    Expired messages are kept.  Where the node would crash, `crashes` of the queue says why, and the entries are what a
    tolerant reader finds: of a broken segment what comes before the break.
    """
    path = Path(path)
    try:
        count = parse_config((path / ".config").read_bytes()) or LEGACY_SEGMENT_ENTRY_COUNT
    except FileNotFoundError:
        count = LEGACY_SEGMENT_ENTRY_COUNT
    vhost = Vhost(path, count, False)
    terms: dict[str, dict[str, Any]] = {}
    try:
        terms = recovery_terms(parse_dets((path / "recovery.dets").read_bytes()))
    except (FileNotFoundError, TermError, struct.error, AssertionError):
        pass
    store = path / "msg_store_persistent"
    try:
        refs = sorted(parse_clean((store / "clean.dot").read_bytes()))
        vhost.clean = (
            refs == sorted(one["persistent_ref"] for one in terms.values())
            and (store / "file_summary.ets").exists()
            and (store / "msg_store_index.ets").exists()
            and not list(store.glob("*.rdt"))
        )
    except (FileNotFoundError, TermError):
        pass
    folders = sorted(one for one in (path / "queues").iterdir() if one.is_dir()) if (path / "queues").is_dir() else []
    indexes: dict[str, dict[int, State]] = {}
    for folder in folders:
        files = {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()}
        name = parse_queue_name(files.get(".queue_name", b""))
        version = 2 if any(one.endswith((".qi", ".qs")) for one in files) else 1
        own = terms.get(folder.name)
        queue = Queue(folder.name, name, version, vhost.clean and own is not None)
        vhost.queues[folder.name] = queue
        if version == 1:
            states, queue.crashes = load_index(files, count)
        else:
            states = load_index_v2(files)
        indexes[folder.name] = states
        for state in states.values():
            if state.pub is not None and not state.acked and state.pub.persistent and not state.pub.term:
                vhost.references[state.pub.msg_id] = vhost.references.get(state.pub.msg_id, 0) + 1
    vhost.located = scan_store(store, None if vhost.clean else vhost.references)
    for directory, states in indexes.items():
        _recover(vhost, vhost.queues[directory], states, terms.get(directory), count)
    return vhost


def load_index_v2(files: Mapping[str, bytes]) -> dict[int, State]:
    """The entries of a version 2 directory as publishes; all terms of its own store are embedded in them."""
    states = {}
    for name in files:
        if not name.endswith(".qi"):
            continue
        _, _, entries = parse_qi(files[name])
        store = files.get(name[:-1] + "s", b"")
        for entry in entries:
            term, msg_id = b"", entry.msg_id
            if entry.place == 2:
                term = store[entry.offset + 8 : entry.offset + 8 + entry.term_size]
                msg_id = message_of(decode(term)).msg_id
            pub = Publish(entry.seq, msg_id, entry.expiry, entry.size, entry.persistent, term)
            states[entry.seq] = State(pub)
    return dict(sorted(states.items()))


def _recover(vhost: Vhost, queue: Queue, states: dict[int, State], terms: dict[str, Any] | None, count: int) -> None:
    if terms is not None:
        queue.next_seq_id = terms["next_seq_id"]
        queue.next_deliver_seq_id = terms["next_deliver_seq_id"]
    for seq, state in states.items():
        pub = state.pub
        if pub is None or state.acked:
            continue
        if not pub.persistent:
            queue.transient.append(seq)
        if pub.term:
            try:
                message, term = message_of(decode(pub.term)), pub.term
            except TermError as error:
                queue.crashes.append(Crash("", -1, f"term of {seq}: {error}"))
                queue.dropped.append(seq)
                continue
            if message.msg_id != pub.msg_id:
                queue.crashes.append(Crash("", -1, f"message id of {seq} is another in its term"))
        elif pub.msg_id in vhost.located:
            term = vhost.located[pub.msg_id][2]
            try:
                message = message_of(decode(term))
            except TermError as error:
                # The node boots, and the queue's process ends when it comes to it.
                queue.crashes.append(Crash("", -1, f"term of {seq}: {error}"))
                queue.dropped.append(seq)
                continue
        else:
            queue.dropped.append(seq)
            continue
        if not pub.persistent or not message.persistent:
            queue.dropped.append(seq)
            continue
        queue.entries.append(
            Entry(
                seq,
                pub.msg_id,
                pub.size,
                pub.expiry,
                pub.persistent,
                state.delivered,
                False,
                not pub.term,
                message,
                term,
            )
        )
    if terms is None:
        span = count if queue.version == 1 else V2_SEGMENT_ENTRY_COUNT
        queue.next_seq_id = (queue.entries[-1].seq // span + 1) * span if queue.entries else 0
        queue.next_deliver_seq_id = queue.next_seq_id
    for entry in queue.entries:
        entry.redelivered = entry.seq < queue.next_deliver_seq_id
