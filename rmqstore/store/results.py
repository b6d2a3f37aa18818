"""The results of a put, a get and a query."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rmqstore._rows import PlacedRows
from rmqstore.message._read import GetMessageResult, QueryResult

if TYPE_CHECKING:
    # Python 3.15 evaluates the names of a dataclass's annotations, which would load NumPy.
    import numpy as np

__all__ = ["GetMessageResult", "GetMessageStatus", "PutResult", "PutResults", "PutTableResult", "QueryResult"]


# Lines that a notebook shows.
_SHOWN = 10


class GetMessageStatus(enum.Enum):
    """The status of a get; RocketMQ's names."""

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
    """The place of a message that was put: bytes, ordinals, ms since epoch; `msg_id` is the offset message id."""

    phy_offset: int
    queue_offset: int
    msg_id: str
    store_timestamp: int
    size: int

    def _repr_html_(self) -> str:
        return _puts_html([self], 1)


class PutResults(PlacedRows[PutResult], Sequence[PutResult]):
    """The places of messages that were put, in order: a `PutResult` for each, made on access.

    It equals, and is shown as, a list of the same; slicing and adding return a list.  ``list(puts)`` makes one.
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        return _puts_html([self[i] for i in range(min(len(self), _SHOWN))], len(self))


@dataclass(frozen=True, slots=True, eq=False)
class PutTableResult:
    """The places of the rows of a table that was put, in order.

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


def _puts_html(puts: Sequence[PutResult], num: int) -> str:
    from rmqstore.texts import format_time, html_table

    rows = [
        (put.phy_offset, put.queue_offset, put.msg_id, format_time(put.store_timestamp), put.size)
        for put in puts[:_SHOWN]
    ]
    caption = f"{num} messages put" + (f"; the first {_SHOWN}" if num > _SHOWN else "")
    return html_table(caption, ("phy offset", "queue offset", "message id", "stored", "size"), rows)
