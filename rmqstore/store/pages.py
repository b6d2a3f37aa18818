"""Messages a page at a time: of a key, of a topic's time range, of a queue.

A page costs about what it shows, whatever comes before or after it; but the first one of a time range reads the times of a topic,
which the store remembers.  A search that finds little pauses after a bounded number of steps.  Each message is released before
the next is read, so that a page of large messages needs the memory of one.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rmqstore import _numpy as np
from rmqstore._core import index_key_hash
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.consumequeue.unit_queue import Unit
from rmqstore.errors import OffsetOutOfRangeError
from rmqstore.index.index_file import IndexFile
from rmqstore.index.key_source import SoughtKeys
from rmqstore.index.log_index import LogIndex
from rmqstore.message import MessageExt
from rmqstore.selection import Selection
from rmqstore.spans import Span
from rmqstore.store.querying import LogSearch, Querying

if TYPE_CHECKING:
    from rmqstore.store.message_store import MessageStore

__all__ = ["BadCursorError", "Page", "current_queue", "key_page", "queue_page", "time_page"]

# The most records of index entries, or units, that one page reads; entries of other times cost next to nothing.
_STEPS = 100_000
_CHAIN_READ = 128
# The most bytes of the log scanned for a page because the index does not cover them.
_LOG_BYTES = 256 << 20
_UNITS_READ = 64

Row = dict[str, Any]
MakeRow = Callable[[MessageExt], Row]


class BadCursorError(ValueError):
    """A cursor that is not of a page, or whose place in the store is gone."""


@dataclass(slots=True)
class Page:
    """Rows, and the cursor of the next page; None at the end.  `stopped`: the search paused before the page was full.

    `uncovered`: ranges of the log (phy offsets) that were not searched.  `unread`: queues that cannot be read, each as topic,
    queue id and error.  `lost`: see `MessageStore.lost_log`.
    """

    rows: list[Row]
    following: str | None
    stopped: bool = False
    uncovered: tuple[tuple[int, int], ...] = ()
    unread: list[Row] = field(default_factory=list)
    lost: tuple[tuple[int, int], ...] = ()


# ---------------------------------------------------------------------------------------------------------------- by key


def key_page(store: MessageStore, selection: Selection, cursor: str | None, make_row: MakeRow) -> Page:
    """Messages of a topic with a key, newest first, each once and each compared with its message."""
    querying, lost = store._querying, store.lost_log
    if store.index_service is None:
        return Page([], None, uncovered=querying.whole_log(), lost=lost)
    start = _KeyCursor.parsed(cursor)
    missed: tuple[tuple[int, int], ...] = ()

    def ask(uncovered: tuple[tuple[int, int], ...]) -> Page:
        nonlocal start, missed
        page = _key_page(querying, selection, start, make_row)
        page.uncovered, page.lost = (*uncovered, *missed), lost
        if start.last >= 0:
            # If `ask` is called again, the search continues below the last row; rows above it that were hidden stay hidden.
            start, missed = _KeyCursor("log0", -1, start.last), ((start.last, store.commit_log.max_offset),)
        return page

    return querying.ask_trusted(ask, LogSearch(_LOG_BYTES), selection.index_type)


class _KeyCursor(NamedTuple):
    # The file, the next entry (-1: its newest), and the phy offset of the last row.
    name: str | None
    entry: int
    last: int

    @classmethod
    def parsed(cls, text: str | None) -> _KeyCursor:
        if not text:
            return cls(None, -1, -1)
        match = re.fullmatch(r"((?:log)?[0-9]{1,19})\.(-1|[0-9]{1,10})\.(-1|[0-9]{1,19})", text)
        if match is None:
            raise BadCursorError(f"{text!r} is not a cursor; start the search again")
        return cls(match[1], int(match[2]), int(match[3]))

    def __str__(self) -> str:
        return f"{self.name}.{self.entry}.{self.last}"


class _PhyStretch(NamedTuple):
    # Candidates by phy offset, and the place of what comes before them.
    phy_offsets: list[int]
    before: int
    is_last: bool

    def after(self, number: int, last: int) -> _KeyCursor | None:
        if number == len(self.phy_offsets) and self.is_last:
            return None
        return _KeyCursor("log0", -1, self.phy_offsets[number - 1] if number else self.before)


class _FileStretch(NamedTuple):
    # A part of a chain of an index file: its first entry, the entry after it, and the next file.
    phy_offsets: list[int]
    file: IndexFile
    key_hash: int
    times: Span
    begin: int
    end: int
    next_name: str | None

    def after(self, number: int, last: int) -> _KeyCursor | None:
        # The cursor after the first entries of the stretch; the last row is at `last`.
        name, entry = self.file.name, self.end
        if number < len(self.phy_offsets):
            entry = self.begin
            if number:
                entry = self.file.select_chain(self.key_hash, self.begin, number, *self.times)[1]
        if entry:
            return _KeyCursor(name, entry, last)
        return None if self.next_name is None else _KeyCursor(self.next_name, -1, last)


def _key_page(querying: Querying, selection: Selection, start: _KeyCursor, make_row: MakeRow) -> Page:
    rows: list[Row] = []
    last, seen, left = start.last, {start.last}, _STEPS
    for stretch in _stretches(querying, selection, start):
        messages = querying.compared(selection, stretch.phy_offsets)
        for number, (phy_offset, message) in enumerate(zip(stretch.phy_offsets, messages)):
            if message is None or phy_offset in seen:
                continue
            if len(rows) == selection.max_num:
                # The next page begins with this entry.
                return Page(rows, str(stretch.after(number, last)))
            rows.append(make_row(message))
            seen.add(phy_offset)
            last = phy_offset
        left -= max(len(stretch.phy_offsets), 1)
        if left <= 0:
            following = stretch.after(len(stretch.phy_offsets), last)
            return Page(rows, None if following is None else str(following), stopped=following is not None)
    return Page(rows, None)


def _stretches(querying: Querying, selection: Selection, start: _KeyCursor) -> Iterator[_PhyStretch | _FileStretch]:
    service = querying.index_service
    assert service is not None
    names = service.all_names[::-1]
    if querying.database.is_used():
        return _phy_stretches(querying, selection, start.last)
    if start.name is None or start.name in names:
        return _file_stretches(querying.files, selection, start)
    if start.name.startswith("log") and start.last >= 0:
        # These entries are in an index file now.  Offsets fall, so the next row is below the last.
        return _phy_stretches(querying, selection, start.last)
    raise BadCursorError("the index file of this page is gone; start the search again")


def _phy_stretches(querying: Querying, selection: Selection, last: int) -> Iterator[_PhyStretch]:
    # For any index: the cursor is the place of the last candidate.
    found = np.unique(next(querying.source.candidates(SoughtKeys.of(selection))).phy_offsets)
    below = (found[found < last] if last >= 0 else found)[::-1].tolist()
    for first in range(0, len(below), _CHAIN_READ):
        is_last = first + _CHAIN_READ >= len(below)
        yield _PhyStretch(below[first : first + _CHAIN_READ], below[first - 1] if first else last, is_last)


def _file_stretches(files: LogIndex, selection: Selection, start: _KeyCursor) -> Iterator[_FileStretch]:
    service = files.index_service
    key_hash = index_key_hash(selection.topic, selection.index_text)
    names = service.all_names[::-1]
    names = names if start.name is None else names[names.index(start.name) :]
    for name, next_name in zip(names, [*names[1:], None]):
        try:
            index = service.file(name)
        except (FileNotFoundError, OffsetOutOfRangeError):
            continue
        at = start.entry if name == start.name else -1
        times = files.times_in(index, selection.times)
        while at:
            begin = at
            try:
                phy_offsets, at = index.select_chain(key_hash, begin, _CHAIN_READ, *times)
            except OffsetOutOfRangeError:
                raise BadCursorError("the cursor leads to no entry; start the search again") from None
            yield _FileStretch(phy_offsets, index, key_hash, times, begin, at, next_name)


# --------------------------------------------------------------------------------------------------------------- by time


def time_page(
    store: MessageStore, selection: Selection, cursor: str | None, make_row: MakeRow, *, newest_first: bool
) -> Page:
    """Return messages of all queues of a topic within a time range, in the order of the log or against it.

    A queue that cannot be read is left out and named in `Page.unread`; an OSError if there is no other.
    """
    if cursor and not re.fullmatch("[0-9]{1,19}", cursor):
        raise BadCursorError(f"{cursor!r} is not a cursor; start the search again")
    walk = _TimeWalk(store, selection, int(cursor) if cursor else None, newest_first)
    page = Page([], None, lost=store.lost_log)
    low, high = selection.times
    last = -1
    for number, (unit, queue_id) in enumerate(walk.units()):
        if unit.phy_offset == last or not walk.continues_at(unit.phy_offset):
            continue
        if len(page.rows) == selection.max_num or number >= _STEPS:
            page.following, page.stopped = str(last) if last >= 0 else None, len(page.rows) < (selection.max_num or 0)
            break
        last = unit.phy_offset
        message = store.commit_log.look_up(last)
        if message is None:
            continue
        message.check_queue(selection.topic, queue_id, unit.queue_offset)
        if low <= message.store_timestamp <= high:
            page.rows.append(make_row(message))
    if walk.left_out and len(walk.left_out) == len(walk.queue_ids):
        raise next(iter(walk.left_out.values()))
    topic = selection.topic
    page.unread = [{"topic": topic, "queue_id": each, "error": error} for each, error in walk.left_out.items()]
    return page


class _TimeWalk:
    # The units of a topic's queues from the first to the last of the time range, beginning at the cursor's phy offset; some
    # between may have other times.

    def __init__(self, store: MessageStore, selection: Selection, behind: int | None, newest_first: bool):
        self.store, self.selection, self.behind, self.newest_first = store, selection, behind, newest_first
        self.queue_ids = store.queue_ids(selection.topic)
        self.left_out: dict[int, OSError] = {}

    def units(self) -> Iterator[tuple[Unit, int]]:
        parts = [zip(self._readable_units(queue_id), itertools.repeat(queue_id)) for queue_id in self.queue_ids]
        return heapq.merge(*parts, key=lambda each: each[0].phy_offset, reverse=self.newest_first)

    def continues_at(self, phy_offset: int) -> bool:
        if self.behind is None:
            return True
        return phy_offset < self.behind if self.newest_first else phy_offset > self.behind

    def _readable_units(self, queue_id: int) -> Iterator[Unit]:
        # Ends at a file that cannot be read.
        try:
            yield from self._units_of(queue_id)
        except OSError as error:
            self.store.queues.leave_out(self.selection.topic, queue_id, error)
            self.left_out[queue_id] = error

    def _units_of(self, queue_id: int) -> Iterator[Unit]:
        store, topic, behind = self.store, self.selection.topic, self.behind
        queue = store.queues.find(topic, queue_id)
        if queue is None:
            return
        low, high = store.min_queue_offset(topic, queue_id), store.max_queue_offset(topic, queue_id)
        if self.selection.begin is not None:
            low = max(low, store.offset_by_time(topic, queue_id, self.selection.begin))
        if self.selection.end is not None:
            high = min(high, store.offset_by_time(topic, queue_id, self.selection.end, "upper") + 1)
        if self.newest_first:
            high = high if behind is None else min(high, _first_at(queue, low, high, behind))
            yield from _descending(queue, low, high)
        else:
            low = low if behind is None else max(low, _first_at(queue, low, high, behind + 1))
            yield from _ascending(queue, low, high)


def _first_at(queue: AnyConsumeQueue, low: int, high: int, phy_offset: int) -> int:
    """Return the first queue offset from `low` to `high` whose record is at or after `phy_offset`."""
    while low < high:
        middle = (low + high) // 2
        unit = queue.unit(middle)
        # Queue offsets without a unit are before the first one.
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


def current_queue(store: MessageStore, topic: str, queue_id: int) -> AnyConsumeQueue | None:
    """Return a queue with all units that its writer has put; None for an unknown queue."""
    return store._state.queue(topic, queue_id)


def queue_page(store: MessageStore, selection: Selection, make_row: MakeRow) -> list[Row]:
    """Return the units of a queue in order, each with its message or None, beginning with the selection's first queue offset."""
    topic, queue_id = selection.topic, selection.queue_id
    queue = store.queues.find(topic, queue_id)
    if queue is None:
        return []
    rows: list[Row] = []
    units = _ascending(queue, max(selection.begin_queue_offset or 0, 0), queue.max_queue_offset)
    for unit in itertools.islice(units, selection.max_num):
        message = store.commit_log.look_up(unit.phy_offset, unit.size)
        if message is not None:
            message.check_queue(topic, queue_id, unit.queue_offset)
        rows.append({"unit": unit._asdict(), "message": None if message is None else make_row(message)})
    return rows
