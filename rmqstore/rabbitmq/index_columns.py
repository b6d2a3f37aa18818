"""The values that reading a queue index gives: an entry as an object, entries and journal records as columns.

Owns `IndexEntry`, `IndexColumns` and `JournalColumns`.  It opens no file.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["IndexColumns", "IndexEntry", "JournalColumns", "cut_columns", "empty_columns"]

_SEGMENT_HEAD_AND_BODY = 34
_JOURNAL_HEAD_AND_BODY = 40


class IndexEntry(NamedTuple):
    """A message that is in the queue.

    Attributes
    ----------
    seq_id : int
    msg_id : bytes
        16 bytes.
    expiry : int or None
        When it expires, in ms since the epoch.
    size : int
        Bytes of the body.
    persistent : bool
    delivered : bool
        A node would hand it out as redelivered: its id is below `QueueIndex.next_deliver_seq_id`.
    message : bytes or None
        The external term of an embedded message; None: it lies in a message store.
    path, pos : str, int
        Where its publish record is.  Of an entry that is not written yet, where in the journal it will be.
    expiry_us : int
        As the file has it: microseconds, 0 = none.
    marked : bool
        It has a deliver record; since RabbitMQ 3.10 every entry gets one when it is published.
    """

    seq_id: int
    msg_id: bytes
    expiry: int | None
    size: int
    persistent: bool
    delivered: bool
    message: bytes | None
    path: str
    pos: int
    expiry_us: int = 0
    marked: bool = True


class IndexColumns(NamedTuple):
    """Entries as columns of `n` rows.

    Attributes
    ----------
    seq_id, size, expiry_us, segment, pos, term_size : ndarray (n,) of int64
        `expiry_us` in microseconds since the epoch, 0 = none; `segment` is the number of the file that has the publish
        record, -1 for the journal; `pos` is where that record begins; `term_size` is 0 for a message in a store.
    flags : ndarray (n,) of uint8
        Bits `ENTRY_PUBLISH`, `ENTRY_DELIVER`, `ENTRY_ACK`, `ENTRY_PERSISTENT`, `ENTRY_EMBEDDED`, `ENTRY_DAMAGED`.
    msg_id : ndarray (n, 16) of uint8
    """

    seq_id: np.ndarray
    size: np.ndarray
    flags: np.ndarray
    expiry_us: np.ndarray
    msg_id: np.ndarray
    segment: np.ndarray
    pos: np.ndarray
    term_size: np.ndarray

    @property
    def term_pos(self) -> np.ndarray:
        """ndarray (n,) of int64: where the embedded terms begin in their files."""
        return self.pos + np.where(self.segment < 0, _JOURNAL_HEAD_AND_BODY, _SEGMENT_HEAD_AND_BODY)


class JournalColumns(NamedTuple):
    """The records of a journal in their order.

    Attributes
    ----------
    type : ndarray (n,) of uint8
        0 publish of a persistent message, 1 of a transient one, 2 deliver, 3 ack.
    seq_id, pos, extent : ndarray (n,) of int64
        `extent`: bytes of the whole record.
    """

    type: np.ndarray
    seq_id: np.ndarray
    pos: np.ndarray
    extent: np.ndarray


def empty_columns(count: int) -> IndexColumns:
    """Columns with room for `count` entries, to be filled."""
    return IndexColumns(
        np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.uint8), np.empty(count, np.int64),
        np.empty((count, 16), np.uint8), np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64),
    )  # fmt: skip


def cut_columns(columns: IndexColumns, count: int) -> IndexColumns:
    """The first `count` rows of columns."""
    return columns if len(columns.seq_id) == count else IndexColumns(*(column[:count] for column in columns))
