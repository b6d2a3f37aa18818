"""The rules of dispatching (RocketMQ 5.5.0): which units and index entries a record leaves.

Owns what the core's columns say of that, beyond `RecordColumns.queued`: inner batches, and the further queues that records name
(INNER_MULTI_DISPATCH, light queues).  Puts, recovery, rebuilds, verification and the completion of queues in RocksDB ask here.
It writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rmqstore import _numpy as np
from rmqstore._dispatch import RecordColumns
from rmqstore.config import StoreConfig
from rmqstore.consumequeue.queue_folders import can_name_queue
from rmqstore.message import RETRY_PREFIX, SCHEDULE_TOPIC, MessageExt, SysFlag

__all__ = [
    "UnitRows",
    "multi_dispatch_allowed",
    "multi_dispatch_places",
    "multi_dispatch_problem",
    "names_further_queue",
    "unit_rows",
    "without_unit",
]

_INNER_BATCH = SysFlag.INNER_BATCH.value
# An int64 has so many digits at most; more of them take Python long to make a number of.
_DIGITS = 19


class UnitRows(NamedTuple):
    """Which rows of columns leave units.

    Attributes
    ----------
    queued, batches : bool array, shape (count,)
        The records that leave a unit in their queue, and those of them that are inner batches.
    bad_batches, further : int64 array
        Row numbers of those with the flag of an inner batch and without a number of messages, so that one of the two is damaged,
        and of those that name further queues.
    """

    queued: np.ndarray
    batches: np.ndarray
    bad_batches: np.ndarray
    further: np.ndarray


def unit_rows(columns: RecordColumns) -> UnitRows:
    """Return which rows leave units; where `RecordColumns.queued` says that no row is odd, its first value is all of that."""
    n = columns.count
    queued = columns.queued()[0].view(np.bool_)
    flagged = queued & ((columns.sys_flag[:n] & _INNER_BATCH) != 0)
    batches = flagged & (columns.inner_num[:n] > 0)
    further = np.flatnonzero(queued & (columns.multi_dispatch[:n] != 0))
    return UnitRows(queued, batches, np.flatnonzero(flagged & ~batches), further)


def without_unit(damage: Iterable[tuple[int, int, str]]) -> frozenset[int]:
    """frozenset of int: phy offsets of those records among `damage`, a report's, that have no unit because they are misplaced."""
    return frozenset(phy_offset for phy_offset, _, kind in damage if kind in ("BAD_QUEUE_OFFSET", "BAD_TOPIC"))


def names_further_queue(message: MessageExt, name: str, number: int | None = None) -> bool:
    """bool: a record names this further queue, whatever the config says and wherever in it.

    See `multi_dispatch_places`.  With `number`: as its message of this queue offset, as far as the record says one for
    each queue, and each but once.
    """
    names, numbers = _further_lists(message)
    if name not in names or number is None:
        return name in names
    if len(numbers) != len(names) or names.count(name) > 1:
        return True
    stated = numbers[names.index(name)]
    return _is_place(name, stated) and int(stated) == number


def multi_dispatch_places(message: MessageExt, config: StoreConfig) -> list[tuple[str, int]]:
    """list of (str, int): the further queues that a record names, each with its queue offset there; the queue id is 0.

    Those that cannot be are left out: `multi_dispatch_problem` tells of them.
    """
    return [(name, int(number)) for name, number in _named_places(message, config) if _is_place(name, number)]


def multi_dispatch_problem(message: MessageExt, config: StoreConfig) -> str | None:
    """str or None: what is wrong with the further queues that a record names, as the end of a sentence about it."""
    places = _named_places(message, config)
    if not places and message.properties.get("INNER_MULTI_QUEUE_OFFSET") and _may_name_queues(message, config):
        return "names another number of further queues than it has queue offsets for"
    for name, number in places:
        if not _is_place(name, number):
            return f"names the further queue {name[:80]!r} with queue offset {number[:80]!r}, which cannot be"
    return None


def _may_name_queues(message: MessageExt, config: StoreConfig) -> bool:
    return config.enable_lmq and config.enable_multi_dispatch and multi_dispatch_allowed(message.topic)


def _named_places(message: MessageExt, config: StoreConfig) -> list[tuple[str, str]]:
    # As the record says it; nothing where the two lists do not go together.
    if not message.properties.get("INNER_MULTI_DISPATCH") or not _may_name_queues(message, config):
        return []
    names, numbers = _further_lists(message)
    return list(zip(names, numbers, strict=True)) if len(names) == len(numbers) else []


def _further_lists(message: MessageExt) -> tuple[list[str], list[str]]:
    # The names of further queues and the queue offsets there; one empty text each where the record says none.
    names, numbers = (
        message.properties.get(name, "") for name in ("INNER_MULTI_DISPATCH", "INNER_MULTI_QUEUE_OFFSET")
    )
    return names.split(","), numbers.split(",")


def _is_place(name: str, number: str) -> bool:
    return can_name_queue(name) and number.isascii() and number.isdigit() and len(number) <= _DIGITS


def multi_dispatch_allowed(topic: str) -> bool:
    """bool: records of `topic` may name further queues (RocketMQ 5.5.0 MultiDispatch)."""
    return not topic.startswith((RETRY_PREFIX, "rmq_sys_")) and topic != SCHEDULE_TOPIC
