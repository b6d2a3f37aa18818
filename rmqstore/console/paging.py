"""Messages a page at a time: of a key, of a topic's time range, of a queue.

Owns the cursors that lead from one page to the next.  A page costs about what it shows, however much lies before it or
after it; but the first one of a time range reads the times of a topic, which the store remembers.  A search that finds
little ends after a bounded number of steps and can be gone on with.  Bodies are let go one by one, so that a page of large
messages needs the memory of one.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rmqstore._core import index_key_hash
from rmqstore.console.errors import error_text
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.consumequeue.unit_queue import Unit
from rmqstore.errors import OffsetOutOfRangeError
from rmqstore.index.index_service import IndexService
from rmqstore.message import MessageExt
from rmqstore.selection import Selection
from rmqstore.store.columns import doubt_entries
from rmqstore.store.message_store import MessageStore
from rmqstore.store.querying import LogLook

__all__ = ["BadCursorError", "Page", "key_page", "queue_page", "time_page"]

# Index entries, or units, that one page looks at before it hands on.
_STEPS = 100_000
_CHAIN_READ = 128
# Of what the index does not cover so much is gone over for a page.
_LOG_BYTES = 256 << 20
_UNITS_READ = 64

Row = dict[str, Any]
MakeRow = Callable[[MessageExt], Row]


class BadCursorError(ValueError):
    """A cursor that no page gave out, or that the store has outlived."""


@dataclass(slots=True)
class Page:
    """Rows, and the cursor of what follows; None at the end.  `stopped`: the search paused before the page was full.

    `uncovered`: stretches of the log, begin and end in phy offsets, that nobody looked at.  `unread`: queues that the system
    does not give out, each as topic, queue id and why.  `lost`: parts of the log that are lost, as of `MessageStore.lost_log`.
    """

    rows: list[Row]
    following: str | None
    stopped: bool = False
    uncovered: tuple[tuple[int, int], ...] = ()
    unread: list[Row] = field(default_factory=list)
    lost: tuple[tuple[int, int], ...] = ()


# ---------------------------------------------------------------------------------------------------------------- by key


def key_page(
    store: MessageStore,
    selection: Selection,
    cursor: str | None,
    size: int,
    make_row: MakeRow,
) -> Page:
    """Messages of a topic with a key, newest first, each once and each compared with its message.

    Parameters
    ----------
    cursor : str or None
        `Page.following` of the page before.
    size : int
        Rows at most.

    Raises
    ------
    BadCursorError
        The cursor is none, or leads to an index file that is gone.
    """
    service = store.index_service
    if service is None:
        return Page([], None, uncovered=store._querying.whole_log(), lost=store.lost_log)
    missed: tuple[tuple[int, int], ...] = ()
    while True:
        uncovered = store._querying.look_at_log(LogLook(_LOG_BYTES), selection.index_type)
        trusted = store.database_index.damage
        if store.database_index.is_used():
            page = _database_page(store, service, selection, cursor, size, make_row)
        else:
            page = _key_page(store, service, selection, cursor, size, make_row)
        if not service.note_damage() and store.database_index.damage is trusted:
            if uncovered and store.database_index.missing is not None:
                raise store.database_index.missing
            page.uncovered, page.lost = (*uncovered, *missed), store.lost_log
            return page
        last = _key_cursor(cursor)[2]
        if last >= 0:
            # The search goes on below the last row that was shown; what was hidden above it can no more be shown.
            cursor, missed = _key_text("log0", -1, last), ((last, store.commit_log.max_offset),)


def _database_page(
    store: MessageStore,
    service: IndexService,
    selection: Selection,
    cursor: str | None,
    size: int,
    make_row: MakeRow,
) -> Page:
    # The index in RocksDB and the others together, by phy offset: that of the last row is all that a cursor needs.
    topic, text = selection.topic, selection.index_text
    last = _key_cursor(cursor)[2]
    in_database = store.database_index.phy_offsets(topic, selection.key, selection.index_type)
    candidates = sorted({*in_database, *service.candidates(topic, text)}, reverse=True)
    rows: list[Row] = []
    others: list[int] = []
    left = _STEPS
    following = None
    for phy_offset in candidates:
        if 0 <= last <= phy_offset:
            continue
        if left == 0 or len(rows) == size:
            following = _key_text("log0", -1, last)
            break
        left -= 1
        message = store.commit_log.look_up(phy_offset)
        if message is None or not selection.has(message):
            others.append(phy_offset)
        else:
            rows.append(make_row(message))
        last = phy_offset
    if others and selection.begin is None and selection.end is None:
        wrong = [phy_offset for phy_offset in in_database if phy_offset in others]
        store._querying.doubt(selection, index_key_hash(topic, text), wrong, others)
    return Page(rows, following, stopped=following is not None and len(rows) < size)


def _key_page(
    store: MessageStore,
    service: IndexService,
    selection: Selection,
    cursor: str | None,
    size: int,
    make_row: MakeRow,
) -> Page:
    key_hash = index_key_hash(selection.topic, selection.index_text)
    name, at, last = _key_cursor(cursor)
    names = list(reversed(service.all_names))
    below: int | None = None
    if name in names:
        names = names[names.index(name) :]
    elif name is not None and name.startswith("log") and last >= 0:
        # What the log was searched for is in an index file now.  Rows go down, so the next is below the last that was shown.
        below = last
    elif name is not None:
        raise BadCursorError("the index file of this page is gone; start the search again")
    rows: list[Row] = []
    seen = {last}
    left = _STEPS
    for each in names:
        try:
            index = service.file(each)
        except (FileNotFoundError, OffsetOutOfRangeError):
            continue
        at = at if each == name else -1
        while at:
            start = at
            try:
                page, at = index.select_chain(key_hash, start, _CHAIN_READ)
            except OffsetOutOfRangeError:
                raise BadCursorError("the cursor leads to no entry; start the search again") from None
            left -= max(len(page), 1)
            others: list[int] = []
            for number, phy_offset in enumerate(page):
                if phy_offset in seen or (below is not None and phy_offset >= below):
                    continue
                message = store.commit_log.look_up(phy_offset)
                if message is None or not selection.has(message):
                    others.append(phy_offset)
                    continue
                if len(rows) == size:
                    # The next page begins with this entry: everything before it on this stretch was looked at.
                    after = index.select_chain(key_hash, start, number)[1] if number else start
                    return Page(rows, _key_text(each, after, last))
                rows.append(make_row(message))
                seen.add(phy_offset)
                last = phy_offset
            hashes = np.full(len(others), key_hash, np.int32)
            doubt_entries(store.commit_log, service, hashes, np.array(others, np.int64))
            if left <= 0:
                following = _key_text(each, at, last) if at else _key_text_after(names, each, last)
                return Page(rows, following, stopped=following is not None)
    return Page(rows, None)


def _key_cursor(cursor: str | None) -> tuple[str | None, int, int]:
    # File, entry to go on with (-1: its newest), phy offset of the last row.
    if not cursor:
        return None, -1, -1
    match = re.fullmatch(r"((?:log)?[0-9]{1,19})\.(-1|[0-9]{1,10})\.(-1|[0-9]{1,19})", cursor)
    if match is None:
        raise BadCursorError(f"{cursor!r} is not a cursor; start the search again")
    return match[1], int(match[2]), int(match[3])


def _key_text(name: str, entry: int, last: int) -> str:
    return f"{name}.{entry}.{last}"


def _key_text_after(names: list[str], name: str, last: int) -> str | None:
    number = names.index(name) + 1
    return _key_text(names[number], -1, last) if number < len(names) else None


# --------------------------------------------------------------------------------------------------------------- by time


def time_page(
    store: MessageStore,
    topic: str,
    begin: int | None,
    end: int | None,
    newest_first: bool,
    cursor: str | None,
    size: int,
    make_row: MakeRow,
) -> Page:
    """Messages of all queues of a topic within a time range, in the order of the log or against it.

    Parameters as of `key_page`; the cursor is a phy offset.  A queue that the system does not give out is left out and named,
    but where there is no other.

    Raises
    ------
    OSError
        No queue of the topic can be read.
    """
    behind: int | None = None
    if cursor:
        if not re.fullmatch("[0-9]{1,19}", cursor):
            raise BadCursorError(f"{cursor!r} is not a cursor; start the search again")
        behind = int(cursor)
    queue_ids = store.queue_ids(topic)
    left_out: dict[int, OSError] = {}
    parts = []
    for queue_id in queue_ids:
        units = _units_between(store, topic, queue_id, begin, end, newest_first, behind)
        parts.append(zip(_given_out(store, topic, queue_id, units, left_out), itertools.repeat(queue_id)))
    merged = heapq.merge(*parts, key=lambda each: each[0].phy_offset, reverse=newest_first)
    page = Page([], None, lost=store.lost_log)
    last = -1
    for number, (unit, queue_id) in enumerate(merged):
        phy_offset = unit.phy_offset
        if phy_offset == last or (
            behind is not None and (phy_offset >= behind if newest_first else phy_offset <= behind)
        ):
            continue
        if len(page.rows) == size or number >= _STEPS:
            page.following, page.stopped = str(last) if last >= 0 else None, len(page.rows) < size
            break
        last = phy_offset
        message = store.commit_log.look_up(phy_offset)
        if message is None:
            continue
        message.check_queue(topic, queue_id, unit.queue_offset)
        if (begin is None or message.store_timestamp >= begin) and (end is None or message.store_timestamp <= end):
            page.rows.append(make_row(message))
    if left_out and len(left_out) == len(queue_ids):
        raise next(iter(left_out.values()))
    page.unread = [
        {"topic": topic, "queue_id": queue_id, "error": error_text(error)} for queue_id, error in left_out.items()
    ]
    return page


def _units_between(
    store: MessageStore,
    topic: str,
    queue_id: int,
    begin: int | None,
    end: int | None,
    newest_first: bool,
    behind: int | None,
) -> Iterator[Unit]:
    # The units of one queue between the first and the last of the time range, beginning at the cursor's phy offset. Times
    # between these may fall.
    queue = store.queues.find(topic, queue_id)
    if queue is None:
        return
    low, high = store.min_queue_offset(topic, queue_id), store.max_queue_offset(topic, queue_id)
    if begin is not None:
        low = max(low, store.offset_by_time(topic, queue_id, begin))
    if end is not None:
        high = min(high, store.offset_by_time(topic, queue_id, end, "upper") + 1)
    if newest_first:
        high = high if behind is None else min(high, _first_at(queue, low, high, behind))
        yield from _descending(queue, low, high)
    else:
        low = low if behind is None else max(low, _first_at(queue, low, high, behind + 1))
        yield from _ascending(queue, low, high)


def _given_out(
    store: MessageStore, topic: str, queue_id: int, units: Iterator[Unit], left_out: dict[int, OSError]
) -> Iterator[Unit]:
    # The units up to a file that the system does not give out.
    try:
        yield from units
    except OSError as error:
        store.queues.leave_out(topic, queue_id, error)
        left_out[queue_id] = error


def _first_at(queue: AnyConsumeQueue, low: int, high: int, phy_offset: int) -> int:
    """int: the first queue offset from `low` on whose record lies at or after `phy_offset`."""
    while low < high:
        middle = (low + high) // 2
        unit = queue.unit(middle)
        # What has no unit lies before the first one.
        if unit is None or unit.phy_offset < phy_offset:
            low = middle + 1
        else:
            high = middle
    return low


def _ascending(queue: AnyConsumeQueue, low: int, high: int) -> Iterator[Unit]:
    at = low
    while at < high:
        following = at
        for unit in queue.read(at, _UNITS_READ):
            following = unit.queue_offset + max(unit.num, 1)
            if unit.queue_offset >= high:
                return
            yield unit
        at = following if following > at else max(queue.next_file_offset(at), at + 1)


def _descending(queue: AnyConsumeQueue, low: int, high: int) -> Iterator[Unit]:
    while low < high:
        start = max(low, high - _UNITS_READ)
        units = [unit for unit in _ascending(queue, start, high) if start <= unit.queue_offset]
        yield from reversed(units)
        high = start


# -------------------------------------------------------------------------------------------------------------- by queue


def queue_page(store: MessageStore, topic: str, queue_id: int, start: int, size: int, make_row: MakeRow) -> list[Row]:
    """The units of a queue from `start` on, in order, each with its message where there is one."""
    queue = store.queues.find(topic, queue_id)
    if queue is None:
        return []
    rows: list[Row] = []
    high = queue.max_queue_offset
    for unit in _ascending(queue, max(start, 0), high):
        if len(rows) == size:
            break
        message = store.commit_log.look_up(unit.phy_offset, unit.size)
        if message is not None:
            message.check_queue(topic, queue_id, unit.queue_offset)
        row: Row = {"unit": unit._asdict(), "message": None if message is None else make_row(message)}
        rows.append(row)
    return rows
