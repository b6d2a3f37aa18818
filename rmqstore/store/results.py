"""What a put, a get and a query answer with.

Owns these values and nothing else: no file, no store.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rmqstore._rows import PlacedRows
from rmqstore.message import MessageExt

if TYPE_CHECKING:
    # Python 3.15 evaluates the names of a dataclass's annotations, which would load NumPy.
    import numpy as np

__all__ = ["GetMessageResult", "GetMessageStatus", "PutResult", "PutResults", "PutTableResult", "QueryResult"]


# Lines that a notebook shows.
_SHOWN = 10


class GetMessageStatus(enum.Enum):
    """How a get went; RocketMQ's names."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"


class PutResult(NamedTuple):
    """Where a message went: bytes, ordinals, ms since epoch; `msg_id` is the offset message id."""

    phy_offset: int
    queue_offset: int
    msg_id: str
    store_timestamp: int
    size: int

    def _repr_html_(self) -> str:
        return _puts_html([self], 1)


class PutResults(PlacedRows[PutResult], Sequence[PutResult]):
    """Where messages went, in their order: a `PutResult` for each, made when it is looked at.

    It equals a list of the same, shows as one, and gives one when it is sliced or something is added to it.  Where a list
    itself is needed, ``list(puts)`` makes it.
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        return _puts_html([self[i] for i in range(min(len(self), _SHOWN))], len(self))


@dataclass(frozen=True, slots=True, eq=False)
class PutTableResult:
    """Where the rows of a table went, in the table's order.

    Attributes
    ----------
    phy_offset, queue_offset, store_timestamp, size : numpy.ndarray of int64, shape (n,)
        Bytes, ordinals, ms since epoch, bytes.
    """

    phy_offset: np.ndarray
    queue_offset: np.ndarray
    store_timestamp: np.ndarray
    size: np.ndarray

    def __len__(self) -> int:
        return len(self.phy_offset)

    def _repr_html_(self) -> str:
        columns = (self.phy_offset, self.queue_offset, self.store_timestamp, self.size)
        rows = zip(*(column[:_SHOWN].tolist() for column in columns), strict=True)
        return _puts_html([PutResult(each[0], each[1], "", each[2], each[3]) for each in rows], len(self))


@dataclass(frozen=True, slots=True)
class GetMessageResult:
    """What a get found.

    Attributes
    ----------
    status : GetMessageStatus
    messages : list of MessageExt
        In queue order.
    next_queue_offset : int
        Where to go on.
    min_queue_offset, max_queue_offset : int
        Bounds of the queue; max is the offset of the next message to come.
    """

    status: GetMessageStatus
    messages: list[MessageExt]
    next_queue_offset: int
    min_queue_offset: int
    max_queue_offset: int

    def __iter__(self) -> Iterator[MessageExt]:
        return iter(self.messages)

    def __len__(self) -> int:
        return len(self.messages)

    def _repr_html_(self) -> str:
        from rmqstore.message.notebook import messages_html

        caption = (
            f"{self.status.value}: {len(self.messages)} messages, next queue offset {self.next_queue_offset}, "
            f"the queue has {self.min_queue_offset} to {self.max_queue_offset}"
        )
        return messages_html(self.messages, caption)


class QueryResult(list[MessageExt]):
    """The messages that a query found.

    Attributes
    ----------
    truncated : bool
        There are more than `max_num`.
    """

    __slots__ = ("_uncovered", "truncated")

    def __init__(
        self, messages: Iterable[MessageExt] = (), truncated: bool = False, uncovered: tuple[tuple[int, int], ...] = ()
    ):
        list.__init__(self, messages)
        self.truncated = truncated
        self._uncovered = uncovered

    @property
    def uncovered(self) -> tuple[tuple[int, int], ...]:
        """tuple of (int, int): stretches of the log, begin and end in phy offsets, that nobody looked at, or that are lost."""
        # The core makes results without it, of what is covered.
        return getattr(self, "_uncovered", ())

    @property
    def complete(self) -> bool:
        """bool: all of the log was looked at, through the index or by itself; what is not here is not there."""
        return not self.uncovered

    @property
    def messages(self) -> list[MessageExt]:
        """The messages as a plain list, named as in other results."""
        return list(self)

    def _repr_html_(self) -> str:
        from rmqstore.message.notebook import messages_html

        notes = [f"{len(self)} messages", *(["there are more"] if self.truncated else [])]
        return messages_html(self, ", ".join(notes + ([] if self.complete else ["part of the log was not looked at"])))


def _puts_html(puts: Sequence[PutResult], num: int) -> str:
    from rmqstore.texts import format_time, html_table

    rows = [
        (put.phy_offset, put.queue_offset, put.msg_id, format_time(put.store_timestamp), put.size)
        for put in puts[:_SHOWN]
    ]
    caption = f"{num} messages put" + (f"; the first {_SHOWN}" if num > _SHOWN else "")
    return html_table(caption, ("phy offset", "queue offset", "message id", "stored", "size"), rows)
