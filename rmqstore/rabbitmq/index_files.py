"""One segment or one journal, read alone: damaged or not, whatever the rest of the queue says.

Owns the names of a queue index's files, and how one is mapped and let go.  It never writes.  Damage becomes a `Problem`
and never an error.  The bytes belong to `rmqstore.rabbitmq._core`.
"""

from __future__ import annotations

import contextlib
import os
import re

import numpy as np

from rmqstore._core import Region
from rmqstore.errors import GeometryError, StoreError
from rmqstore.files.listing import listing
from rmqstore.files.open_file import open_regular
from rmqstore.rabbitmq._core import Findings, JournalMap, Segment, load_segment, scan_journal
from rmqstore.rabbitmq.directory import map_file, read_present
from rmqstore.rabbitmq.index_columns import IndexColumns, JournalColumns, cut_columns, empty_columns
from rmqstore.rabbitmq.layout import MAX_SEGMENT_ENTRY_COUNT, parse_queue_name
from rmqstore.rabbitmq.problem import Problem, problems_of

__all__ = [
    "JOURNAL",
    "SEGMENT_NAME",
    "check_entry_count",
    "check_version_1",
    "map_present",
    "read_journal",
    "read_segment",
    "release",
]

JOURNAL = "journal.jif"
SEGMENT_NAME = re.compile(r"(0|[1-9][0-9]{0,18})\.idx")
_VERSION_2 = re.compile(r"\d+\.q[is]")


def map_present(path: str) -> Region | bytes | None:
    """The file as a Region, empty bytes for an empty one, None where there is none."""
    try:
        return map_file(path) or b""
    except FileNotFoundError:
        return None


def release(source: Region | bytes | None) -> None:
    """Unmap what `map_present` gave."""
    if isinstance(source, Region):
        source.close()


def check_entry_count(segment_entry_count: int, path: str | None = None) -> None:
    """GeometryError where a segment cannot have so many entries."""
    if not 1 <= segment_entry_count <= MAX_SEGMENT_ENTRY_COUNT:
        raise GeometryError(
            f"segment_entry_count is {segment_entry_count}, not between 1 and {MAX_SEGMENT_ENTRY_COUNT}", path
        )


def check_version_1(folder: str) -> None:
    """Raise StoreError where a queue's directory is of version 2: a node reads nothing of version 1 there."""
    found = listing(folder)
    if found.error is not None:
        return  # of a missing one too, which a writer makes
    names = found.names
    stub = None
    if ".queue_name" in names:
        with contextlib.suppress(OSError), open(open_regular(os.path.join(folder, ".queue_name")), "rb") as file:
            stub = parse_queue_name(file.read(1 << 16))
    if any(map(_VERSION_2.fullmatch, names)) or (stub is not None and stub.index_version != 1):
        raise StoreError("the queue is of index version 2, which this version only reads; publish to a node", folder)


def read_segment(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview,
    segment_entry_count: int,
    *,
    number: int | None = None,
    check_terms: bool = True,
) -> tuple[IndexColumns, list[Problem]]:
    """Read one segment file, acked entries included; damage becomes problems and never an error.

    After a damaged stretch reading goes on at the next publish record that is certainly one: its term is well-formed for
    exactly its length and has the record's message id, or it has none and records follow to the end of the file.

    Parameters
    ----------
    source : path or bytes
    segment_entry_count : int
        As the vhost's `.config` says.
    number : int, optional
        Of the segment; without it that of the file's name, or 0.
    check_terms : bool
        Look at every embedded term; entries that fail are marked `ENTRY_DAMAGED`.

    Returns
    -------
    IndexColumns, list of Problem

    Raises
    ------
    GeometryError
        `segment_entry_count` is not between 1 and 16384.
    OSError
        The file cannot be read.
    """
    check_entry_count(segment_entry_count)
    path = ""
    data: Region | bytes | None
    if isinstance(source, (bytes, bytearray, memoryview)):
        data = bytes(source)
    else:
        path = os.fspath(source)
        data = map_file(path) or b""
        name = SEGMENT_NAME.fullmatch(os.path.basename(path))
        number = int(name[1]) if number is None and name else number
    try:
        findings, journal, segment = Findings(), JournalMap(segment_entry_count), Segment(number or 0)
        load_segment(data, segment, segment_entry_count, findings, check_terms)
        nothing = np.empty(0, np.int64)
        columns = empty_columns(segment_entry_count)
        count = journal.rows(segment, data, nothing, nothing, 0, columns, 0)
        return cut_columns(columns, count), problems_of(findings, lambda _: path)
    finally:
        release(data)


def read_journal(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview, *, check_terms: bool = True
) -> tuple[JournalColumns, list[Problem]]:
    """Read one journal: its records up to the first damage, and everything that is wrong.

    The problems are those of the journal alone; what does not fit the segments is said by `QueueIndex.problems`.

    Parameters
    ----------
    source : path or bytes
    check_terms : bool
        Look at every embedded term.

    Returns
    -------
    JournalColumns, list of Problem
    """
    path = ""
    if isinstance(source, (bytes, bytearray, memoryview)):
        data = bytes(source)
    else:
        path = os.fspath(source)
        data = read_present(path)
    findings = Findings()
    JournalMap(MAX_SEGMENT_ENTRY_COUNT).load(data, findings, check_terms)
    return JournalColumns(*scan_journal(data)), problems_of(findings, lambda _: path)
