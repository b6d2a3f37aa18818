"""Messages: what goes into the log and what comes out of it.

Owns `Message` and `MessageExt`, and what a broker says of topics and keys.  It never touches a file and never decodes a whole
record (`_core` does that).  A `MessageExt` keeps the record as it was decoded; everything else in it is computed from that on
first use.

The layout facts are those of Apache RocketMQ 4.0 to 5.5.0.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from rmqstore._core import MessageFields, crc32
from rmqstore._read import StoredMessage, adopt
from rmqstore.arguments import milliseconds
from rmqstore.errors import (
    CorruptionError,
    Finding,
    InvalidMessageError,
    MissingDependencyError,
    StoreError,
    UnsupportedFormatError,
)
from rmqstore.message.body_text import BodyText, body_text
from rmqstore.message.compression import SysFlag, decompress_body
from rmqstore.message.hosts import host_from_bytes, host_to_bytes, offset_message_id
from rmqstore.message.inner_batch import split_client_form
from rmqstore.message.java_text import encode_java_utf8
from rmqstore.message.properties import (
    MAX_PROPERTIES_SIZE,
    NAME_VALUE_SEPARATOR,
    PROPERTY_SEPARATOR,
    parse_properties,
    properties_to_text,
)

__all__ = [
    "MAX_RETRY_TOPIC_LENGTH",
    "MAX_TOPIC_LENGTH",
    "OTHER_MESSAGE",
    "SCHEDULE_TOPIC",
    "Message",
    "MessageExt",
    "check_topic",
    "is_light_queue",
]

OTHER_MESSAGE = "its topic, queue or queue offset is not that of its queue unit"
"""What is wrong with a whole record that a queue unit does not mean."""

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
"""Where a broker keeps messages that are to be delivered later (RocketMQ's TopicValidator.RMQ_SYS_SCHEDULE_TOPIC)."""


def is_light_queue(topic: str) -> bool:
    """Return whether the name is that of a light queue: a further queue (RocketMQ's LMQ) of messages of other topics."""
    return topic.startswith("%LMQ%")



RETRY_PREFIX, DLQ_PREFIX = "%RETRY%", "%DLQ%"
"""What the topics begin with that hold a group's messages to consume again, and those that it gave up (MixAll of RocketMQ)."""

MAX_TOPIC_LENGTH = 127
MAX_RETRY_TOPIC_LENGTH = 255
_TOPIC_CHARACTERS = re.compile(r"[%|a-zA-Z0-9_-]+")

_INT32_RANGE = (-(2**31), 2**31 - 1)
_INT64_RANGE = (-(2**63), 2**63 - 1)


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
    limit = MAX_RETRY_TOPIC_LENGTH if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)) else MAX_TOPIC_LENGTH
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
    born_timestamp : int or datetime, optional
        Milliseconds since the epoch, or a `datetime` (aware, or naive as local time), of which the message keeps the
        milliseconds; the store takes its clock when it is None.
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
        born_timestamp: int | datetime.datetime | None = None,
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
            try:
                pairs = properties.items()
            except AttributeError:
                raise InvalidMessageError(f"properties is {properties!r}: give a mapping of names to texts") from None
            for name, value in pairs:
                if value is None:
                    continue
                if stored.get(name, value) != value:
                    raise InvalidMessageError(
                        f"property {name} is given twice, as {stored[name]!r} and as {value!r}: give it once"
                    )
                stored[name] = value
        if isinstance(born_timestamp, datetime.datetime):
            born_timestamp = int(milliseconds(born_timestamp, "born_timestamp"))
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

    def _repr_html_(self) -> str:
        # For notebooks; loaded here, as other programs have no use for it.
        from rmqstore.message.notebook import message_html, shown_body

        return message_html(self, f"Message of {self.topic}", (), shown_body(self.body))

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
    those of the compiled `_read.StoredMessage`.

    Attributes
    ----------
    topic : str
    queue_id : int
    queue_offset : int
        Its number in the queue.
    phy_offset : int
        Absolute position of the record in the commit log, bytes.
    store_timestamp, born_timestamp : int
        When the broker stored it and when the producer made it, ms since epoch.
    flag, sys_flag : int
        The producer's flag; what the broker knows of it (`SysFlag`).
    reconsume_times : int
        How often it was delivered again.
    prepared_transaction_offset : int
        Of a message that ends a transaction, where the half message lies.

    Notes
    -----
    It is made from a tuple, the 18 fields of `_core.decode_record`: total_size, version (1 or 2), body_crc, queue_id, flag,
    queue_offset, phy_offset, sys_flag, born_timestamp, born_host (8 or 20 bytes), store_timestamp, store_host (8 or 20
    bytes), reconsume_times, prepared_transaction_offset, body (as stored), topic, properties (bytes), crc_ok.
    """

    __slots__ = ()

    def _decompressed_body(self) -> bytes | tuple[type[StoreError], str]:
        # Of a body that is not what its flag says the error that `body` raises, which is kept like a body.
        try:
            return decompress_body(self.body_stored, self.sys_flag)
        except (CorruptionError, UnsupportedFormatError) as error:
            return type(error), error.message

    def _body_damage(self) -> str | None:
        try:
            self.body  # noqa: B018
        except (CorruptionError, UnsupportedFormatError) as error:
            return error.message.removeprefix(f"message at phy offset {self.phy_offset}: ")
        except MissingDependencyError:
            pass
        return None

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
    def damage(self) -> str | None:
        """str or None: what makes this message `corrupt`, None where it is not."""
        if not self.corrupt:
            return None
        if self.crc_agrees:
            return self._body_damage()
        stored = self.body_stored
        if (crc32(stored) & 0x7FFFFFFF if stored else 0) != self.crc:
            return "CRC"
        return OTHER_MESSAGE if self.properties_crc is None else f"CRC of its properties, or {OTHER_MESSAGE}"

    @property
    def transaction_type(self) -> SysFlag:
        """The transaction bits of the sysFlag; `SysFlag(0)` for an ordinary message."""
        return SysFlag(self.sys_flag & SysFlag.TRANSACTION_MASK.value)

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
        queue offset INNER_BASE + i (the record's own queue offset when the property is missing).  `size` is the
        size of its part of the body.

        Raises
        ------
        CorruptionError
            The record is corrupt, or a length in its body is impossible.
        """
        if not self.is_inner_batch:
            return [self]
        record = self._record
        if not self.crc_agrees:
            raise CorruptionError(f"the batch at phy offset {self.phy_offset} does not fit its CRC")
        base_text = self.properties.get("INNER_BASE", "")
        base = int(base_text) if re.fullmatch("[0-9]{1,18}", base_text) else record[_QUEUE_OFFSET]
        sys_flag = record[_SYS_FLAG] & ~(SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP | SysFlag.COMPRESSED).value & ~0x700
        messages: list[MessageExt] = []
        for size, flag, body, properties in split_client_form(self.body, self.phy_offset):
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

    def as_dict(self) -> dict[str, Any]:
        """All of the message as values that JSON can hold.

        `body` is text when it is UTF-8, else base64 with `body_encoding` = "base64".  A body that cannot be
        decompressed is given as it is stored, with the reason in `body_error`.
        """
        return {name: str(value) if type(value) is BodyText else value for name, value in self.json_row().items()}

    def json_row(self, form: str = "text") -> dict[str, Any]:
        """As `as_dict`, for `json_pieces`: the text of a large body is a `BodyText`.

        Parameters
        ----------
        form : {"text", "hex", "none"}
            How to show the body.
        """
        error = None
        try:
            body = self.body
        except (CorruptionError, UnsupportedFormatError, MissingDependencyError) as problem:
            body, error = self.body_stored, problem.message
        result: dict[str, Any] = {
            "topic": self.topic,
            "queue_id": self.queue_id,
            "queue_offset": self.queue_offset,
            "phy_offset": self.phy_offset,
            "size": self.size,
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
        if self.corrupt:
            result["damage"] = self.damage
        if error is not None:
            result["body_error"] = error
        result["body_size"] = len(body)
        if form != "none":
            result["body"], result["body_encoding"] = body_text(body, form)
        return result

    def __eq__(self, other: object) -> bool:
        return self._record == other._record if isinstance(other, MessageExt) else NotImplemented

    def __hash__(self) -> int:  # type: ignore[override]
        return hash((self.phy_offset, self.queue_offset, self.store_timestamp))

    def __reduce__(self) -> tuple[type[MessageExt], tuple[Record]]:
        return MessageExt, (self._record,)

    def _repr_html_(self) -> str:
        from rmqstore.message.notebook import message_html, shown_body
        from rmqstore.texts import format_time

        fields = [
            ("queue", self.queue_id),
            ("queue offset", self.queue_offset),
            ("phy offset", self.phy_offset),
            ("stored", format_time(self.store_timestamp)),
            ("size", f"{self.size} bytes"),
        ]
        # A look does not decompress.
        damage = "" if self.crc_agrees else f", corrupt: {self.damage}"
        body = shown_body(self.body_stored, self.sys_flag, not self.crc_agrees)
        return message_html(self, f"MessageExt of {self.topic}{damage}", fields, body)

    def __repr__(self) -> str:
        corrupt = "" if self.crc_agrees else ", corrupt"
        return (
            f"<MessageExt {self.topic}/{self.queue_id} queue_offset={self.queue_offset} phy_offset={self.phy_offset} "
            f"keys={self.keys!r} tags={self.tags!r} {len(self.body_stored)} bytes stored{corrupt}>"
        )


adopt(MessageExt)


def body_findings(message: MessageExt, path: str, pos: int, missing: set[str]) -> Iterator[Finding]:
    """Yield a finding if the body of the record at this place is not what its compression flag says.

    Parameters
    ----------
    missing : set of str
        Errors about missing libraries that were reported: each is one finding, and is added here.
    """
    try:
        message.body  # noqa: B018
    except MissingDependencyError as error:
        if error.message not in missing:
            missing.add(error.message)
            yield Finding(path, pos, "not_checked", f"compressed bodies from here on: {error.message}")
    except (CorruptionError, UnsupportedFormatError) as error:
        yield Finding(path, pos, "bad_body", error.message)
