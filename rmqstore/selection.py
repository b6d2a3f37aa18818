"""The conditions of a question about messages: `Selection`.

It is made from keyword arguments, options, console parameters and predicates, and passed on whole to the place where records are
compared with it.  Tags are parsed and hashed here and nowhere else.  It knows no store.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rmqstore import _numpy as np
from rmqstore._core import EXT_ADDRESS_MAX
from rmqstore.arguments import (
    IndexType,
    Moment,
    check_index_type,
    check_moment,
    exact_milliseconds,
    given_tags,
    one_text,
    texts,
    whole_number,
    whole_numbers,
)
from rmqstore.message import MessageExt, encode_java_utf8, is_light_queue, tags_code

if TYPE_CHECKING:
    from rmqstore._columns import ArrowColumns

__all__ = ["Selection"]

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
ANY_TIME = INT64_MIN, INT64_MAX
# The light queues of a message, and its place in each; parted by commas (RocketMQ 5.5.0 MultiDispatch).
_LIGHT = ("INNER_MULTI_DISPATCH", "INNER_MULTI_QUEUE_OFFSET")
_OFFSETS = ("begin_phy_offset", "end_phy_offset", "begin_queue_offset", "end_queue_offset")


def _compared(code: Any) -> Any:
    # The part of a tags code, or of an array of them, that RocketMQ 5.5.0 compares.
    return code & 0xFFFFFFFF


@dataclass(frozen=True)
class Selection:
    """The conditions that a message must meet, all of them; None is no condition.

    Attributes
    ----------
    topics : tuple of str or None
    queue_ids : tuple of int or None
    tags : tuple of str or None
        Given as one tag, as ``"a || b"``, or as several; ``""`` and ``"*"`` are no condition (RocketMQ 5.5.0 SubscriptionData).
    keys : tuple of str or None
        Messages that have one of these; see `index_type`.
    begin, end : int, datetime or None
        Store time, both inclusive: ms since epoch, or a `datetime` (aware, or naive as local time).
    begin_phy_offset, end_phy_offset : int or None
        Records that begin at or after the first and before the second.
    begin_queue_offset, end_queue_offset : int or None
        Likewise for the place in the queue.  These, and light queues (``%LMQ%...``), whose messages have other topics, are
        read through queues.
    index_type : {None, "U", "K", "T"}
        The kind of `keys`: unique keys or keys, unique keys, keys, or tags.
    max_num : int or None
        The greatest number of messages.

    Raises
    ------
    TypeError, ValueError
        A value of another kind or out of range; the error names it.
    """

    topics: tuple[str, ...] | None = None
    queue_ids: tuple[int, ...] | None = None
    tags: str | tuple[str, ...] | None = None
    keys: tuple[str, ...] | None = None
    begin: Moment | None = None
    end: Moment | None = None
    begin_phy_offset: int | None = None
    end_phy_offset: int | None = None
    begin_queue_offset: int | None = None
    end_queue_offset: int | None = None
    index_type: IndexType | None = None
    max_num: int | None = None

    def __post_init__(self) -> None:
        change = functools.partial(object.__setattr__, self)
        for name in ("topics", "keys"):
            if getattr(self, name) is not None:
                change(name, tuple(texts(getattr(self, name), name) or ()))
        if self.queue_ids is not None:
            change("queue_ids", tuple(whole_numbers(self.queue_ids, "queue_ids", -(2**31), 2**31 - 1) or ()))
        if self.tags is not None:
            change("tags", _tag_names(self.tags))
        for name in _OFFSETS:
            if getattr(self, name) is not None:
                change(name, whole_number(getattr(self, name), name))
        if self.index_type is not None:
            check_index_type(self.index_type)
        if self.by_queue_offset and not self.topics:
            raise ValueError("a range of queue offsets needs a topic: give one")

    def check_times(self) -> Selection:
        """Return this selection; raise TypeError or ValueError for a value that is not a time, or that looks like seconds."""
        for name, moment in (("begin", self.begin), ("end", self.end)):
            if moment is not None:
                check_moment(moment, name)
        self.times  # noqa: B018
        return self

    @property
    def by_queue_offset(self) -> bool:
        """bool: there is a range of queue offsets."""
        return self.begin_queue_offset is not None or self.end_queue_offset is not None

    @functools.cached_property
    def has_light_queue(self) -> bool:
        """bool: one of the topics is a light queue."""
        return any(map(is_light_queue, self.topics or ()))

    @property
    def by_queue(self) -> bool:
        """bool: the messages are read through queues: there is a range of queue offsets, or a light queue."""
        return self.by_queue_offset or self.has_light_queue

    # ------------------------------------------------------------------------------------- questions about one of each

    @property
    def topic(self) -> str:
        """str: the only topic."""
        assert self.topics is not None
        return self.topics[0]

    @property
    def queue_id(self) -> int:
        """int: the only queue id."""
        assert self.queue_ids is not None
        return self.queue_ids[0]

    @property
    def key(self) -> str:
        """str: the only key."""
        assert self.keys is not None
        return self.keys[0]

    @property
    def index_text(self) -> str:
        """str: the key after ``topic#`` in the index (RocketMQ 5.4.0 and later mark tags)."""
        return "T#" + self.key if self.index_type == "T" else self.key

    def at_any_time(self) -> Selection:
        """Return the same selection, whatever the store time."""
        return self if self.begin is None and self.end is None else replace(self, begin=None, end=None)

    def has_queue(self, topic: str, queue_id: int) -> bool:
        """Return True if the selection includes this queue."""
        return (self.topics is None or topic in self.topics) and (self.queue_ids is None or queue_id in self.queue_ids)

    # ------------------------------------------------------------------------------------------------------- compiled

    @functools.cached_property
    def times(self) -> tuple[int, int]:
        """(int, int): whole milliseconds of store time, both inclusive; (1, 0) where no time is between them."""
        # Times between two milliseconds are rounded inwards.
        begin = None if self.begin is None else exact_milliseconds(self.begin, "begin", up=True)
        end = None if self.end is None else exact_milliseconds(self.end, "end")
        if (begin is not None and begin > INT64_MAX) or (end is not None and end < INT64_MIN):
            return 1, 0
        low = INT64_MIN if begin is None else math.ceil(max(begin, INT64_MIN))
        high = INT64_MAX if end is None else math.floor(min(end, INT64_MAX))
        return (low, high) if low <= high else (1, 0)

    @functools.cached_property
    def tag_codes(self) -> frozenset[int] | None:
        """frozenset of int or None: the low 32 bits of the tags codes, which RocketMQ 5.5.0 compares; None for all."""
        return None if self.tags is None else frozenset(_compared(tags_code(name)) for name in self.tags)

    def may_have_code(self, code: int | None) -> bool:
        """Return True if the message of a unit with this tags code may have one of the tags; None is a lost code."""
        return self.tag_codes is None or code is None or _compared(code) in self.tag_codes

    def may_have_codes(self, codes: np.ndarray) -> np.ndarray:
        """Return as an array of bool whose messages may have one of the tags; lost codes and addresses in the extension may."""
        if self.tag_codes is None:
            return np.ones(len(codes), bool)
        wanted = np.array(sorted(self.tag_codes), np.int64)
        found: np.ndarray = np.isin(_compared(codes), wanted) | (codes <= EXT_ADDRESS_MAX)
        return found

    def choose(self, out: ArrowColumns, *, by_place: bool = False) -> None:
        """Have `out` take the messages of these topics, queues, tags and store times.

        With `by_place` the rows are named by their places, and topics and queues are not compared.
        """
        topics = None if by_place else _stored(self.topics)
        out.choose(
            topics,
            None if by_place or self.queue_ids is None else list(self.queue_ids),
            _stored(self.tags),
            *self.times,
        )

    def has(self, message: MessageExt) -> bool:
        """Return True if this message meets all conditions."""
        low, high = self.times
        return (
            any(self._has_place(*place) for place in self._places_of(message))
            and low <= message.store_timestamp <= high
            and (self.begin_phy_offset is None or message.phy_offset >= self.begin_phy_offset)
            and (self.end_phy_offset is None or message.phy_offset < self.end_phy_offset)
            and (self.tags is None or message.tags in self.tags)
            and (self.keys is None or self._has_key(message))
        )

    def _places_of(self, message: MessageExt) -> Iterator[tuple[str, int, int, int]]:
        # Topic, queue id, the first place in the queue, and the one after the last.
        yield message.topic, message.queue_id, message.queue_offset, _queue_end(message)
        if self.has_light_queue:
            names, offsets = (message.properties.get(name, "").split(",") for name in _LIGHT)
            for name, offset in zip(names, offsets):
                if offset.isascii() and offset.isdigit():
                    yield name, 0, int(offset), int(offset) + 1

    def _has_place(self, topic: str, queue_id: int, first: int, end: int) -> bool:
        return (
            self.has_queue(topic, queue_id)
            and (self.begin_queue_offset is None or end > self.begin_queue_offset)
            and (self.end_queue_offset is None or first < self.end_queue_offset)
        )

    def _has_key(self, message: MessageExt) -> bool:
        assert self.keys is not None
        if self.index_type == "T":
            return message.tags in self.keys
        return (self.index_type != "K" and message.unique_key in self.keys) or (
            self.index_type != "U" and any(key in self.keys for key in message.keys)
        )


def of_queue(
    topic: str, queue_id: int, queue_offset: int, max_num: int | None, tags: str | Iterable[str] | None
) -> Selection:
    """Select messages of one queue, beginning with `queue_offset`; a TypeError or ValueError names the parameter."""
    return Selection(
        topics=(one_text(topic, "topic"),),
        queue_ids=(whole_number(queue_id, "queue_id", -(2**31), 2**31 - 1),),
        tags=tags,  # type: ignore[arg-type]
        begin_queue_offset=whole_number(queue_offset, "queue_offset"),
        max_num=max_num,
    )


def of_key(
    topic: str, key: str, max_num: int, begin: Moment | None, end: Moment | None, index_type: IndexType | None
) -> Selection:
    """Select messages of a topic that have one key; a TypeError or ValueError names the parameter."""
    return Selection(
        topics=(one_text(topic, "topic"),),
        keys=(one_text(key, "key"),),
        begin=begin,
        end=end,
        index_type=index_type,
        max_num=whole_number(max_num, "max_num"),
    ).check_times()


def of_scan(
    topic: str | Iterable[str] | None,
    queue_id: int | Iterable[int] | None,
    tags: str | Iterable[str] | None,
    begin: Moment | None,
    end: Moment | None,
) -> Selection:
    """Select messages of some topics and queues; a TypeError or ValueError names the parameter."""
    topics, queue_ids = texts(topic, "topic"), whole_numbers(queue_id, "queue_id", -(2**31), 2**31 - 1)
    return Selection(
        topics=None if topics is None else tuple(topics),
        queue_ids=None if queue_ids is None else tuple(queue_ids),
        tags=tags,  # type: ignore[arg-type]
        begin=begin,
        end=end,
    ).check_times()


def row_num(max_num: int | None) -> int | None:
    """Return `max_num` within 64 bits; raise ValueError for a negative number."""
    if max_num is None:
        return None
    # More than a queue can have is all.
    max_num = min(whole_number(max_num, "max_num"), INT64_MAX)
    if max_num < 0:
        raise ValueError(f"max_num is {max_num}; give 0 or more, or None for all")
    return max_num


def _tag_names(tags: Any) -> tuple[str, ...] | None:
    given = given_tags(tags)
    parts: Iterable[str] = given.split("||") if isinstance(given, str) else given or ()
    names = [name for part in parts if (name := part.strip() if isinstance(given, str) else part)]
    return None if not names or "*" in names else tuple(dict.fromkeys(names))


def _stored(names: Iterable[str] | None) -> list[bytes] | None:
    return None if names is None else [encode_java_utf8(name) for name in names]


def _queue_end(message: MessageExt) -> int:
    # An inner batch has the places of all its messages.
    text = message.properties.get("INNER_NUM", "") if message.is_inner_batch else ""
    return message.queue_offset + (max(int(text), 1) if text.isascii() and text.isdigit() and len(text) < 10 else 1)
