"""How many entries a segment of index version 1 has: what ``.config`` says, or the segments show.

Owns the choice where the two do not agree: with another number than the segments were written with, marks of the
journal meet the wrong entries.  It only reads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rmqstore.errors import CorruptionError, GeometryError, StoreError
from rmqstore.files.listing import listing
from rmqstore.files.open_file import open_regular
from rmqstore.rabbitmq import layout, term
from rmqstore.rabbitmq.index_directory import SEGMENT_NAME, read_segment
from rmqstore.rabbitmq.problem import Problem

__all__ = ["SegmentCount", "find_segment_count"]


class SegmentCount(NamedTuple):
    """How many entries a segment has, and how that is known; `Vhost` says what `source` is."""

    entries: int
    source: str
    problems: list[Problem]


def find_segment_count(path: str, given: int | None, queues: Sequence[str]) -> SegmentCount:
    """Find how many entries a segment has.

    Parameters
    ----------
    path : str
        The vhost's directory.
    given : int, optional
        What the caller says.
    queues : sequence of str
        The names of the queues' directories.

    Raises
    ------
    GeometryError
        `given` is impossible.
    """
    if given is not None:
        if not 1 <= given <= layout.MAX_SEGMENT_ENTRY_COUNT:
            raise GeometryError(
                f"segment_entry_count is {given}, not between 1 and {layout.MAX_SEGMENT_ENTRY_COUNT}", path
            )
        return SegmentCount(given, "given", [])
    config = os.path.join(path, ".config")
    problems: list[Problem] = []

    def note(kind: str, detail: str) -> None:
        problems.append(Problem(config, 0, kind, detail, None))

    configured: int | None = None
    try:
        configured = layout.read_segment_entry_count(path)
        if configured is None and queues:
            note("missing_config", "there is no such file; a node takes 16384 entries a segment then")
    except (CorruptionError, GeometryError) as error:
        # What is not Erlang text a node takes for missing; what is one without the number ends its boot.
        note("bad_config" if _is_erlang(config) else "unreadable_config", error.message)
    except OSError as error:
        note("unreadable_config", f"it cannot be read: {error.strerror}")
    shown, full = _segments_show(path, queues)
    if configured is not None and shown < configured and full in (None, configured):
        return SegmentCount(configured, "config", problems)
    if configured is not None:
        note(
            "segment_entry_count_mismatch",
            f"it says {configured} entries a segment, but a segment has entry {shown}"
            if shown >= configured
            else f"it says {configured} entries a segment, but all segments with another after them end at entry {shown}",
        )
    if full is not None:
        return SegmentCount(full, "inferred", problems)
    # Without the file, what a node takes then, and what one before 3.8.17 meant.
    is_there = os.path.exists(config)
    if is_there and shown < layout.DEFAULT_SEGMENT_ENTRY_COUNT:
        return SegmentCount(layout.DEFAULT_SEGMENT_ENTRY_COUNT, "inferred", problems)
    inferred = is_there and shown < layout.LEGACY_SEGMENT_ENTRY_COUNT
    return SegmentCount(layout.LEGACY_SEGMENT_ENTRY_COUNT, "inferred" if inferred else "default", problems)


def _is_erlang(path: str) -> bool:
    try:
        with open(open_regular(path), "rb") as file:
            term.consult(file.read(1 << 16))
    except (StoreError, OSError):
        return False
    return True


def _segments_show(path: str, queues: Sequence[str]) -> tuple[int, int | None]:
    """The highest entry number in any segment, and the count if it can be told from segments with others after them.

    Segments that are not the last of their queue end at the same entry, if that is where a segment is full.  One is
    enough for the two counts that nodes use; for others there must be more, and a power of two.  Only entry numbers with a
    neighbour count: a single one is damage of that record.
    """
    highest, looked = -1, 0
    tops: list[int] = []
    for name in queues:
        folder = os.path.join(path, "queues", name)
        segments = sorted(filter(SEGMENT_NAME.fullmatch, listing(folder).names), key=lambda each: int(each[:-4]))
        for segment in segments[:4]:
            with contextlib.suppress(OSError):
                columns, _ = read_segment(
                    os.path.join(folder, segment), layout.MAX_SEGMENT_ENTRY_COUNT, number=0, check_terms=False
                )
                rels = np.unique(columns.seq_id)
                pairs = np.flatnonzero(rels[1:] == rels[:-1] + 1)
                if len(pairs):
                    top = int(rels[pairs[-1] + 1])
                    highest = max(highest, top)
                    if segment != segments[-1]:
                        tops.append(top)
            looked += 1
        if looked >= 64:
            break
    full = max(tops, default=-1) + 1
    usual = (layout.DEFAULT_SEGMENT_ENTRY_COUNT, layout.LEGACY_SEGMENT_ENTRY_COUNT)
    alike = bool(tops) and min(tops) == max(tops) and highest < full
    if alike and (full in usual or (len(tops) > 1 and full >= 16 and full & (full - 1) == 0)):
        return highest, full
    return highest, None
