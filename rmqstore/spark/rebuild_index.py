"""Passes 2 and 3 of a rebuild: the spooled entries become index files, each by one task or by several spans.

Owns which entry comes into which file, and the bytes of the files.  An earlier span's slot heads are what a later one
needs to know of it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rmqstore._core import IndexLayout, SlotHeads
from rmqstore.spark.rebuild_files import write_at, write_named
from rmqstore.spark.rebuild_plan import ENTRIES, RebuildPlan
from rmqstore.spark.rebuild_records import spool_path

_ENTRY_SIZE = int(IndexLayout.ENTRY_SIZE)
_HEADER_SIZE = int(IndexLayout.INDEX_HEADER_SIZE)


class EntryPlace(NamedTuple):
    """Where an index entry is spooled: the piece, and its number there from 0 on."""

    piece: int
    number: int


class Span(NamedTuple):
    """A run of entries of one index file, for one task.

    Attributes
    ----------
    file : int
        Number of the file, from 0 on.
    number, of : int
        Which span of the file, from 0 on, and how many it has.
    first : int
        Number of the first entry in the file, from 1 on.
    parts : tuple of (int, int, int)
        Where the entries are spooled: piece, number of the first there, how many.
    begin : EntryPlace
        The file's first entry.
    before : EntryPlace or None
        The last entry of the file before.
    """

    file: int
    number: int
    of: int
    first: int
    parts: tuple[tuple[int, int, int], ...]
    begin: EntryPlace
    before: EntryPlace | None


class _Spool:
    """The spooled entries of a piece, mapped."""

    def __init__(self, path: str):
        data = np.memmap(path, np.uint8, "r") if os.path.getsize(path) else np.empty(0, np.uint8)
        n = len(data) // 20
        self.phy_offsets = data[: 8 * n].view(np.int64)
        self.store_timestamps = data[8 * n : 16 * n].view(np.int64)
        self.hashes = data[16 * n :].view(np.int32)

    def entry(self, number: int) -> _Entry:
        return _Entry(int(self.phy_offsets[number]), int(self.store_timestamps[number]))


class _Entry(NamedTuple):
    phy_offset: int
    store_timestamp: int


def _entry(plan: RebuildPlan, place: EntryPlace) -> _Entry:
    # What is spooled there.
    return _Spool(spool_path(plan, place.piece)).entry(place.number)


def spans_of(plan: RebuildPlan, entry_nums: Sequence[int], span_size: int) -> list[Span]:
    """Say which entries come into which index file, and cut the files into spans of at most `span_size` entries."""
    per_file = plan.config.max_index_num - 1
    starts = np.concatenate([[0], np.cumsum(np.asarray(entry_nums, np.int64))])
    total = int(starts[-1])

    def place(number: int) -> EntryPlace:
        piece = int(np.searchsorted(starts, number, side="right")) - 1
        return EntryPlace(piece, number - int(starts[piece]))

    spans = []
    for file, begin in enumerate(range(0, total, per_file)):
        end = min(begin + per_file, total)
        of = -(-(end - begin) // span_size)
        bounds = [begin + (end - begin) * i // of for i in range(of + 1)]
        for number, (low, high) in enumerate(itertools.pairwise(bounds)):
            parts, at = [], low
            while at < high:
                piece, first = place(at)
                count = min(high, int(starts[piece + 1])) - at
                parts.append((piece, first, count))
                at += count
            before = place(begin - 1) if begin else None
            spans.append(Span(file, number, of, low - begin + 1, tuple(parts), place(begin), before))
    return spans


def _span_name(span: Span, number: int) -> str:
    # Of a span of the same file; a rebuild that is gone on with may cut it into another number of spans.
    return f"{span.file:010d}-{number:06d}-of-{span.of}"


def _heads_path(plan: RebuildPlan, span: Span, number: int) -> str:
    return os.path.join(plan.build, "heads", _span_name(span, number))


def note_heads(plan: RebuildPlan, span: Span) -> None:
    """Pass 2: the newest entry of every hash slot that the span uses, as a file."""
    plan.folder("heads")
    path = _heads_path(plan, span, span.number)
    if os.path.exists(path):
        return
    heads = SlotHeads(plan.config.max_hash_slot_num)
    at = span.first
    for piece, first, count in span.parts:
        heads.note(np.asarray(_Spool(spool_path(plan, piece)).hashes[first : first + count]), at)
        at += count
    write_named(path, np.stack(heads.used()).data)


def index_path(plan: RebuildPlan, file: int) -> str:
    """str: where the index file of that number, from 0 on, is built."""
    return os.path.join(plan.build, "files", f"{file:010d}")


def write_span(plan: RebuildPlan, span: Span) -> None:
    """Pass 3: the entries of a span into their place; the last span of a file writes slots and header as well."""
    plan.folder("files")
    plan.folder("written")
    mark = os.path.join(plan.build, "written", _span_name(span, span.number))
    if os.path.exists(mark):
        return
    config = plan.config
    heads = SlotHeads(config.max_hash_slot_num)
    for number in range(span.number):
        heads.merge(*np.fromfile(_heads_path(plan, span, number), np.int32).reshape(2, -1))
    begin = _entry(plan, span.begin)
    before = 0 if span.before is None else _entry(plan, span.before).store_timestamp
    path, size = index_path(plan, span.file), config.index_file_size
    entries_at = _HEADER_SIZE + 4 * config.max_hash_slot_num
    at = span.first
    for piece, first, count in span.parts:
        spool = _Spool(spool_path(plan, piece))
        for start in range(first, first + count, ENTRIES):
            part = slice(start, min(start + ENTRIES, first + count))
            hashes, phy_offsets = np.asarray(spool.hashes[part]), np.asarray(spool.phy_offsets[part])
            times = np.asarray(spool.store_timestamps[part])
            data = heads.encode(hashes, phy_offsets, times, at, begin.store_timestamp, before)
            write_at(path, size, entries_at + at * _ENTRY_SIZE, data.data)
            at += part.stop - part.start
    if span.number == span.of - 1:
        write_at(path, size, _HEADER_SIZE, heads.table().data)
        write_at(path, size, 0, _header(begin, spool.entry(part.stop - 1), heads.used_num, at))
    write_named(mark, b"")


def _header(first: _Entry, last: _Entry, used: int, count: int) -> bytes:
    numbers = np.array(
        [first.store_timestamp, last.store_timestamp, first.phy_offset, last.phy_offset], ">i8"
    ).tobytes()
    return numbers + np.array([used, count], ">i4").tobytes()


def write_empty_file(plan: RebuildPlan, task: tuple[int, EntryPlace | None]) -> None:
    """The file, without an entry, that RocketMQ makes for a record without keys; it begins where the one before ends."""
    plan.folder("files")
    file, before = task
    end = _Entry(0, 0) if before is None else _Entry(*(max(number, 0) for number in _entry(plan, before)))
    write_at(index_path(plan, file), plan.config.index_file_size, 0, _header(end, end, 0, 1))
