"""One message file, read alone: the records that are in it, damaged or not, and what is wrong with them.

Owns the scan of an N.rdq or N.rdt in its four modes, the words for what stops one, and copying out of one.  It never
raises for damage and knows no other file.  The bytes belong to `rmqstore.rabbitmq._messages`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from rmqstore._core import Region
from rmqstore.files.os_errors import failed_read
from rmqstore.rabbitmq import _messages
from rmqstore.rabbitmq.layout import map_file
from rmqstore.rabbitmq.problem import Problem

__all__ = ["FileScan", "copy_bytes", "refer", "scan_file", "stop_problem"]

_COPY_SIZE = 1 << 20


class FileScan(NamedTuple):
    """What a message file holds, a row for each record, in the order of the file.

    Attributes
    ----------
    msg_id : numpy.ndarray
        (n, 16) uint8.
    pos : numpy.ndarray
        (n,) int64: where the record begins, bytes.
    size : numpy.ndarray
        (n,) int64: bytes of the term; negative where the record is too short for an id.
    flags : numpy.ndarray
        (n,) uint8 of `MessageFlag`.
    end : int
        Where the scan ended.
    problems : list of Problem
    """

    msg_id: np.ndarray
    pos: np.ndarray
    size: np.ndarray
    flags: np.ndarray
    end: int
    problems: list[Problem]


def stop_problem(path: str, region: Region, end: int, stop: int) -> Problem | None:
    """What the end of a scan means, if it is not the end of the file."""
    if stop == _messages.MessageStop.STOP_END:
        return None
    left = region.size - end
    if stop == _messages.MessageStop.STOP_WORK:
        return Problem(path, end, "overlapping_records", "more overlapping records than a real file has", None)
    if stop == _messages.MessageStop.STOP_ZERO:
        if region.last_nonzero(end, left) == end:
            return Problem(path, end, "zero_tail", f"the last {left} bytes are zero; they hold nothing", None)
        return Problem(
            path, end, "zero_size", f"a size of zero; a node up to 3.12 reads none of the {left} bytes from here", None
        )
    return Problem(
        path, end, "torn_record", f"a record that does not fit; a node up to 3.12 reads none of the {left} bytes", None
    )


def refer(table: _messages.LocationTable, references: Mapping[bytes, int] | np.ndarray) -> None:
    """Count who refers to what in `table`: {id: count}, or ids (n, 16) uint8 of which each row counts one."""
    if isinstance(references, np.ndarray):
        table.reserve(len(table) + len(references))
        table.refer(np.ascontiguousarray(references, np.uint8))
        return
    table.reserve(len(table) + len(references))
    ids, counts = [], []
    for msg_id, count in references.items():
        if len(msg_id) != 16:
            raise ValueError(f"a message id has 16 bytes, not {len(msg_id)}: {msg_id!r}")
        ids.append(msg_id)
        counts.append(count)
        if len(ids) == 65536:
            table.refer(np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 16), np.array(counts, np.int64))
            ids, counts = [], []
    if ids:
        table.refer(np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 16), np.array(counts, np.int64))


def scan_file(
    path: str | os.PathLike[str],
    mode: str = "sequential",
    *,
    references: Mapping[bytes, int] | np.ndarray | None = None,
    check_terms: bool = False,
) -> FileScan:
    """Read the records of one message file, damaged or not; never raises for damage.

    Parameters
    ----------
    path : str or os.PathLike
        An N.rdq or N.rdt.
    mode : str
        "sequential": as RabbitMQ up to 3.12 does, from record to record (§8.1); a record without its mark is a row without
        `MESSAGE_WRITTEN`.  "bytewise": as 3.13 and later (§11), which needs `references`.  "salvage": at every position
        a record whose term is well-formed, of exactly its length, and holds the record's id.  "auto": sequential as far as it
        goes, and if it meets damage, with what salvage finds besides.
    references : mapping of bytes to int, or numpy.ndarray
        Ids (n, 16) uint8, or as keys of a mapping; for "bytewise" only.
    check_terms : bool
        Look at every term as well: whether it is well-formed and holds the id of its record (`MESSAGE_TERM_OK`).  Not for
        "bytewise".

    Returns
    -------
    FileScan

    Raises
    ------
    OSError
        The file cannot be read.
    """
    path = os.fspath(path)
    problems: list[Problem] = []
    none = (np.empty((0, 16), np.uint8), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint8))
    if mode not in ("sequential", "bytewise", "salvage", "auto"):
        raise ValueError(f"mode is {mode!r}, not sequential, bytewise, salvage or auto")
    if mode == "bytewise" and references is None:
        raise ValueError("a bytewise scan accepts what is referred to: give references, or take mode='salvage'")
    region = map_file(path)
    if region is None:
        return FileScan(*none, 0, problems)
    try:
        if mode == "bytewise":
            table = _messages.LocationTable()
            refer(table, references if references is not None else {})
            end = table.scan(region, 0, _messages.MessageScan.SCAN_BYTEWISE)[5]
            ids, _, _, pos, size = table.columns(0)
            order = np.argsort(pos, kind="stable")
            flags = np.full(len(pos), _messages.MessageFlag.MESSAGE_WRITTEN, np.uint8)
            return FileScan(
                ids[order],
                pos[order],
                size[order] - _messages.MessageRecordLayout.MESSAGE_RECORD_EXTRA,
                flags,
                end,
                problems,
            )
        first = _messages.MessageScan.SCAN_SALVAGE if mode == "salvage" else _messages.MessageScan.SCAN_SEQUENTIAL
        ids, pos, size, flags, end, stop = _messages.scan_messages(region, 0, first, check_terms)
        problem = stop_problem(path, region, end, stop)
        if problem is not None:
            problems.append(problem)
        damaged = stop != _messages.MessageStop.STOP_END or not (flags & _messages.MessageFlag.MESSAGE_WRITTEN).all()
        if mode == "auto" and damaged:
            more = _messages.scan_messages(region, 0, _messages.MessageScan.SCAN_SALVAGE)
            end = more[4]
            new = ~np.isin(more[1], pos)
            order = np.argsort(np.concatenate((pos, more[1][new])), kind="stable")
            ids, pos = np.concatenate((ids, more[0][new]))[order], np.concatenate((pos, more[1][new]))[order]
            size, flags = np.concatenate((size, more[2][new]))[order], np.concatenate((flags, more[3][new]))[order]
    finally:
        region.close()
    for row in np.flatnonzero(flags & _messages.MessageFlag.MESSAGE_WRITTEN == 0)[:1000]:
        problems.append(
            Problem(path, int(pos[row]), "unwritten_record", "a record without its mark; this message is lost", None)
        )
    if check_terms:
        good = _messages.MessageFlag.MESSAGE_WRITTEN | _messages.MessageFlag.MESSAGE_TERM_OK
        for row in np.flatnonzero(flags & good == _messages.MessageFlag.MESSAGE_WRITTEN)[:1000]:
            detail = "the message's term is damaged, or holds another id than its record; a node fails when it reads it"
            problems.append(Problem(path, int(pos[row]), "bad_term", detail, None))
    for row in np.flatnonzero(flags & _messages.MessageFlag.MESSAGE_TOO_SHORT)[:1000]:
        problems.append(
            Problem(path, int(pos[row]), "short_record", "a record too short for an id; a node may stop here", None)
        )
    return FileScan(ids, pos, size, flags, end, problems)


def copy_bytes(source: Any, begin: int, size: int, destination: Any) -> None:
    """Copy a stretch of one open file to where the other one is; OSError where it ends before."""
    source.seek(begin)
    while size > 0:
        data = source.read(min(size, _COPY_SIZE))
        if not data:
            raise failed_read(source.name, "the file is shorter than its records")
        destination.write(data)
        size -= len(data)
