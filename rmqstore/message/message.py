"""Messages to put.

Owns `Message`, and a broker's rules for topics and keys.  It never touches a file; `_read` has the messages that were read.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Iterable, Iterator, Mapping

from rmqstore._core import MessageFields
from rmqstore.arguments import milliseconds, shown
from rmqstore.errors import (
    CorruptionError,
    Finding,
    InvalidMessageError,
    MissingDependencyError,
    UnsupportedFormatError,
)
from rmqstore.message._read import MessageExt
from rmqstore.message.codec import (
    MAX_PROPERTIES_SIZE,
    NAME_VALUE_SEPARATOR,
    PROPERTY_SEPARATOR,
    encode_java_utf8,
    host_to_bytes,
    properties_to_text,
)
from rmqstore.message.shown import message_html, shown_body

__all__ = [
    "MAX_RETRY_TOPIC_LENGTH",
    "MAX_TOPIC_LENGTH",
    "SCHEDULE_TOPIC",
    "Message",
    "check_topic",
    "is_light_queue",
]

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
"""The topic of delayed messages (RocketMQ's TopicValidator.RMQ_SYS_SCHEDULE_TOPIC)."""


def is_light_queue(topic: str) -> bool:
    """Return True for the name of a light queue (RocketMQ's LMQ), a further queue of messages of other topics."""
    return topic.startswith("%LMQ%")



RETRY_PREFIX, DLQ_PREFIX = "%RETRY%", "%DLQ%"
"""Prefixes of a group's retry topic and dead-letter topic (RocketMQ's MixAll)."""

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
        Keys to query the message by; one string is split at spaces.
    tags : str, optional
        The tag that consumers filter by; ``""`` = no tag.
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
                if not isinstance(name, str) or not isinstance(value, str):
                    raise InvalidMessageError(f"property {name!r} has the value {shown(value)}: give texts")
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
        """The TAGS property, or None."""
        tags: str | None = self.properties.get("TAGS")
        return tags

    @property
    def unique_key(self) -> str | None:
        """The producer's id (property UNIQ_KEY), or None."""
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
        """Check the rules of RocketMQ 5.5.0's client and broker that need no configuration.

        Raises
        ------
        InvalidMessageError
            The message breaks a rule; it is unchanged.
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
            yield Finding(path, pos, "not_checked", f"this and later compressed bodies: {error.message}")
    except (CorruptionError, UnsupportedFormatError) as error:
        yield Finding(path, pos, "bad_body", error.message)
