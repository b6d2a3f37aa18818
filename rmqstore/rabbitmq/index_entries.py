"""What callers say of the entries that they publish, deliver and ack, as the columns that the compiled module takes.

Owns the checks of these arguments and the words of their refusal.  It keeps no state and knows no queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rmqstore.errors import InvalidMessageError, OffsetOutOfRangeError
from rmqstore.rabbitmq._core import MAX_SEQ_ID, checked_ids

if TYPE_CHECKING:
    from rmqstore.rabbitmq.message import Message

__all__ = ["body_sizes", "expiry_field", "microseconds", "new_entries", "seq_id_column", "terms_of"]


class NewEntries(NamedTuple):
    """Entries that may be published: a row each; embedded ones in `terms`, or in `data` from `offsets`."""

    ids: np.ndarray
    sizes: np.ndarray
    expiries: np.ndarray
    persistent: np.ndarray
    terms: list[bytes] | None
    data: np.ndarray | None
    offsets: np.ndarray | None


def new_entries(messages: Any, msg_ids: Any, sizes: Any, expiries: Any, persistent: Any) -> NewEntries:
    """The arguments of `QueueIndex.publish_many` as columns; `expiries` are in microseconds.

    Raises
    ------
    InvalidMessageError
        One of the entries cannot be.
    """
    terms: list[bytes] | None = None
    size_column: np.ndarray | None = None
    data: np.ndarray | None = None
    offsets: np.ndarray | None = None
    ids = None if msg_ids is None else _as_ids(msg_ids)
    if messages is None:
        if ids is None or sizes is None:
            raise InvalidMessageError("a message that lies in a store needs its id and its size")
    else:
        if isinstance(messages, tuple) and len(messages) == 2 and not isinstance(messages[1], bytes):
            data = np.frombuffer(messages[0], np.uint8)
            offsets = np.ascontiguousarray(messages[1], dtype=np.int64)
            if offsets.ndim != 1 or not len(offsets):
                raise InvalidMessageError("offsets are an array of one integer more than there are messages")
            number = len(offsets) - 1
        else:
            terms = terms_of(messages)
            number = len(terms)
        if ids is not None and len(ids) != number:
            raise InvalidMessageError(f"{len(ids)} message ids for {number} messages")
        ids, found, flags = checked_ids(terms, data, offsets, ids)
        size_column = body_sizes(terms, found) if sizes is None else None
        persistent = flags if persistent is None else persistent
    count = len(ids)
    if size_column is None:
        size_column = _column(sizes, count, "sizes", 0, 0xFFFFFFFF)
    # The field has no sign; the column has its bits as they are.
    expiry_column = np.zeros(count, np.int64) if expiries is None else _column(
        expiries, count, "expiries", 0, (1 << 64) - 1)  # fmt: skip
    if persistent is None or isinstance(persistent, (bool, np.bool_)):
        flag_column = np.full(count, 1 if persistent is None else int(persistent), np.uint8)
    else:
        flag_column = np.ascontiguousarray(np.asarray(persistent, dtype=bool), dtype=np.uint8)
        if flag_column.shape != (count,):
            raise InvalidMessageError(f"persistent has shape {flag_column.shape} for {count} messages")
    return NewEntries(ids, size_column, expiry_column, flag_column, terms, data, offsets)


def microseconds(milliseconds: int | None) -> int:
    """An expiry as the files have it; 0 for None, which is never."""
    if milliseconds is None:
        return 0
    if not 0 < milliseconds <= (1 << 63) // 1000 - 1:
        raise InvalidMessageError(
            f"expiry {milliseconds} is not a time in ms since the epoch; None means that it never expires"
        )
    return milliseconds * 1000


def expiry_field(milliseconds: int | None, in_microseconds: int | None) -> int:
    """Return the bits of an entry's field, which has no sign, as a signed number; `in_microseconds` goes first."""
    if in_microseconds is None:
        in_microseconds = microseconds(milliseconds)
    elif not 0 <= in_microseconds < 1 << 64:
        raise InvalidMessageError(f"expiry_us is {in_microseconds}, which does not fit into 64 bits")
    return int(in_microseconds) - ((int(in_microseconds) >> 63) << 64)


def _as_ids(msg_ids: Any) -> np.ndarray:
    if isinstance(msg_ids, np.ndarray):
        if msg_ids.dtype != np.uint8 or msg_ids.ndim != 2 or msg_ids.shape[1] != 16:
            raise InvalidMessageError("msg_ids as an array is of shape (n, 16) and of uint8")
        return np.ascontiguousarray(msg_ids)
    ids = list(msg_ids)
    if any(len(msg_id) != 16 for msg_id in ids):
        raise InvalidMessageError("a message id has 16 bytes")
    return np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 16)


def seq_id_column(seq_ids: Any) -> np.ndarray:
    """Sequence ids as an int64 array; OffsetOutOfRangeError where one is none."""
    if isinstance(seq_ids, range):
        return np.arange(seq_ids.start, seq_ids.stop, seq_ids.step, dtype=np.int64)
    if isinstance(seq_ids, (int, np.integer)):
        seq_ids = [seq_ids]
    if type(seq_ids) is list and len(seq_ids) == 1 and type(seq_ids[0]) is int and 0 <= seq_ids[0] <= MAX_SEQ_ID:
        return np.array(seq_ids, np.int64)
    try:
        array = np.asarray(seq_ids if isinstance(seq_ids, (np.ndarray, list, tuple)) else list(seq_ids))
        if array.size == 0:
            return np.empty(0, np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu" or int(array.max()) > MAX_SEQ_ID:
            raise OverflowError
        return np.ascontiguousarray(array, dtype=np.int64)
    except OverflowError:
        raise OffsetOutOfRangeError("sequence ids are integers from 0 to 2**62 - 1") from None


def _column(values: Any, count: int, name: str, low: int, high: int) -> np.ndarray:
    try:
        array = np.asarray(values)
        if array.shape != (count,) or (count and array.dtype.kind not in "iu"):
            raise InvalidMessageError(f"{name} are {count} integers, not an array of {array.dtype} {array.shape}")
        if count and not (low <= int(array.min()) and int(array.max()) <= high):
            raise InvalidMessageError(f"one of {name} is not between {low} and {high}")
        return np.ascontiguousarray(array, dtype=np.int64)
    except OverflowError:
        raise InvalidMessageError(f"one of {name} is not between {low} and {high}") from None


def terms_of(messages: Sequence[Message | bytes]) -> list[bytes]:
    """The terms of messages, some of which may be terms already."""
    listed: list[Any] = messages if isinstance(messages, list) else list(messages)
    if set(map(type, listed)) <= {bytes}:
        return listed
    return [
        bytes(message) if isinstance(message, (bytes, bytearray, memoryview)) else message.term for message in listed
    ]


def body_sizes(terms: list[bytes] | None, found: np.ndarray) -> np.ndarray:
    """`found` with the sizes of bodies that the pass over the terms did not see (-1) filled in."""
    if len(found) and found.min() < 0:
        if terms is None:
            raise InvalidMessageError(
                "not every message in the buffer says its size plainly; give the sizes of the bodies"
            )
        from rmqstore.rabbitmq.message import Message

        for i in np.flatnonzero(found < 0).tolist():
            found[i] = len(Message.from_term(terms[i]).body)
    return found
