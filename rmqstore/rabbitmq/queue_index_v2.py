"""Queue indexes of version 2, read: N.qi with entries of fixed size, N.qs with the messages of one queue.

Owns these two files of one queue's directory and never writes them; version 1 in the same directory is `queue_index`'s, and
`both` puts the two together where a node was stopped while it converted one to the other.  Damage is a `Problem`, never an
exception: an entry whose message cannot be trusted keeps its place with `message` None.  Rules: RabbitMQ 3.10.8, and its source
up to 4.x (docs/rabbitmq.md); numbers like §11.1 are its sections.
"""

from __future__ import annotations

import contextlib
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from rmqstore.files.listing import listing
from rmqstore.files.open_file import open_regular
from rmqstore.rabbitmq import _messages, _term
from rmqstore.rabbitmq._core import ENTRY_EMBEDDED, ENTRY_PERSISTENT, ENTRY_PUBLISH, MAX_SEQ_ID
from rmqstore.rabbitmq.index_directory import (
    IndexColumns,
    IndexEntry,
    LiveIndex,
    bad_terms,
    count_problems,
    low_seq_id,
)
from rmqstore.rabbitmq.layout import map_file
from rmqstore.rabbitmq.problem import Problem, unreadable_file

__all__ = ["QueueIndexV2", "SegmentV2", "StoreV2", "both", "read_segment_v2", "read_store_v2", "unpadded"]

# `classic_queue_index_v2_segment_entry_count` of a node; a file says its own range in its head.
_DEFAULT_COUNT = 4096

#: Where the message of an entry is.
MEMORY, SHARED, PER_QUEUE = 0, 1, 2

_HEAD_SIZE = 64
_ENTRY_SIZE = 32
# Entries of one file, more than any node has: a damaged head may say any number.
_MAX_COUNT = 1 << 20
_VERSION = 2
_QI_MAGIC, _QS_MAGIC = 0x52435149, 0x52435153
_NAME = re.compile(r"(0|[1-9]\d{0,17})\.(qi|qs)")
_ENTRY = np.dtype(
    [
        ("status", "u1"),
        ("flags", "u1"),
        ("zero", "u1"),
        ("location", "u1"),
        ("offset", ">u8"),
        ("term_size", ">u4"),
        ("rest", ">u4"),
        ("size", ">u4"),
        ("expiry", ">u8"),
    ]
)
assert _ENTRY.itemsize == _ENTRY_SIZE
_VERDICTS = {
    _messages.QueueStoreVerdict.QUEUE_STORE_OUTSIDE: ("outside", "the message would lie outside the file"),
    _messages.QueueStoreVerdict.QUEUE_STORE_SIZE: ("size_mismatch", "index and record say different sizes"),
    _messages.QueueStoreVerdict.QUEUE_STORE_CRC: ("bad_crc", "the check sum does not agree with the message"),
}
# Problems of one kind in a file that are named.
_NAMED = 1000


class SegmentV2(NamedTuple):
    """The live entries of one N.qi, a row each, in the order of sequence ids.

    Attributes
    ----------
    first, end : int
        The range of sequence ids of the file, `end` exclusive.
    problems : list of Problem
    seq_id, size, expiry_us : numpy.ndarray
        (n,) int64; bytes of the body; microseconds since 1970, 0 for none.
    persistent : numpy.ndarray
        (n,) bool.
    location : numpy.ndarray
        (n,) uint8: 0 in the node's memory only, 1 in the shared message store, 2 in the N.qs.
    msg_id : numpy.ndarray
        (n, 16) uint8: of entries in the shared store; else other bytes.
    pos, term_size : numpy.ndarray
        (n,) int64: place of the record's head in the N.qs and bytes of its term, for `location` 2; else 0.
    verdict : numpy.ndarray
        (n,) uint8 of `QueueStoreVerdict`: of messages in the N.qs, once that was read.
    """

    first: int
    end: int
    problems: list[Problem]
    seq_id: np.ndarray
    persistent: np.ndarray
    location: np.ndarray
    msg_id: np.ndarray
    pos: np.ndarray
    term_size: np.ndarray
    size: np.ndarray
    expiry_us: np.ndarray
    verdict: np.ndarray

    @property
    def entry_pos(self) -> np.ndarray:
        """numpy.ndarray: (n,) int64, where the entries begin in the N.qi."""
        return _HEAD_SIZE + _ENTRY_SIZE * (self.seq_id - self.first)


@contextlib.contextmanager
def _opened(source: str | os.PathLike[str] | bytes) -> Iterator[memoryview]:
    """The bytes of a file, for as long as the context lasts; a sparse file takes no memory."""
    region = None if isinstance(source, bytes) else map_file(os.fspath(source))
    if region is None:
        yield memoryview(source if isinstance(source, bytes) else b"")
        return
    try:
        with region.view(0, region.size) as data:
            yield data
    finally:
        region.close()


def _head(data: bytes | memoryview, magic: int) -> tuple[int, int] | str:
    # The range of sequence ids, or what is wrong.
    if len(data) < _HEAD_SIZE:
        return f"the file has {len(data)} bytes, fewer than its head"
    if int.from_bytes(data[:4], "big") != magic:
        return "the file does not begin as one of version 2"
    if data[4] != _VERSION:
        return f"the file says version {data[4]}, not {_VERSION}"
    first, end = int.from_bytes(data[5:13], "big"), int.from_bytes(data[13:21], "big")
    if not first < end < 1 << 62 or end - first > _MAX_COUNT:
        return f"the file says sequence ids from {first} to {end}"
    return first, end


def read_segment_v2(source: str | os.PathLike[str] | bytes, number: int | None = None) -> SegmentV2:
    """Read an N.qi; never raises for damage.

    With `number`, by default that of the file's name, an unreadable head is replaced by the usual range.
    """
    path = "" if isinstance(source, bytes) else os.fspath(source)
    match = _NAME.fullmatch(os.path.basename(path))
    if number is None and match is not None:
        number = int(match[1])
    if isinstance(source, bytes):
        return _segment_of(source, len(source), path, number)
    with open(open_regular(path), "rb") as file:
        # No more than a file has: a sparse one may say any length.
        data = file.read(_HEAD_SIZE + _ENTRY_SIZE * _MAX_COUNT)
        return _segment_of(data, os.fstat(file.fileno()).st_size, path, number)


def _segment_of(data: bytes, size: int, path: str, number: int | None) -> SegmentV2:
    problems: list[Problem] = []
    first, end = _range_of(data, path, number, problems)
    # The file may end early: what is not there was never an entry.
    rows = min(max(len(data) - _HEAD_SIZE, 0) // _ENTRY_SIZE, end - first)
    over = size - _HEAD_SIZE - _ENTRY_SIZE * rows
    if over > 0:
        kind, what = ("torn_entry", "part of an entry") if over < 32 else ("beyond_range", "more than the head's range")
        problems.append(Problem(path, size - over, kind, f"the last {over} bytes are {what}", None))
    raw = np.frombuffer(data, np.uint8, _ENTRY_SIZE * rows, _HEAD_SIZE if rows else 0).reshape(-1, _ENTRY_SIZE)
    entries = raw.view(_ENTRY).reshape(-1)
    status, location = entries["status"], entries["location"]
    live = np.flatnonzero(status == 1)
    strange = live[location[live] > PER_QUEUE]
    for kind, found, column, wanted in (
        ("bad_status", np.flatnonzero(status > 1), status, "0 or 1"),
        ("bad_location", strange, location, "0, 1 or 2"),
    ):
        for row in found[:_NAMED].tolist():
            detail = f"{kind[4:]} {column[row]}, not {wanted}"
            problems.append(Problem(path, _HEAD_SIZE + _ENTRY_SIZE * row, kind, detail, first + row))
    entries = entries[live]
    own = entries["location"] == PER_QUEUE
    # No file is that large; -1 is not a place in it.
    offset = np.where(entries["offset"] >> np.uint64(63), np.uint64(2**63 - 1), entries["offset"]).astype(np.int64)
    return SegmentV2(
        first,
        end,
        problems,
        first + live.astype(np.int64),
        (entries["flags"] & 1).astype(bool),
        entries["location"].copy(),
        raw[live, 4:20],
        np.where(own, offset, 0),
        np.where(own, entries["term_size"].astype(np.int64), 0),
        entries["size"].astype(np.int64),
        np.minimum(entries["expiry"], np.uint64(2**63 - 1)).astype(np.int64),
        np.zeros(len(live), np.uint8),
    )


def _range_of(data: bytes, path: str, number: int | None, problems: list[Problem]) -> tuple[int, int]:
    head = _head(data, _QI_MAGIC)
    if isinstance(head, str):
        problems.append(Problem(path, 0, "bad_head", head, None))
        first = (number or 0) * _DEFAULT_COUNT
        end = first + _DEFAULT_COUNT
    else:
        first, end = head
        count = end - first
        if number is not None and first != number * count:
            # A node finds a file by its name, and reads no range from it.
            count = count if first % count == 0 else _DEFAULT_COUNT
            says = f"the file says sequence ids from {first} to {end}, its name from {number * count} on"
            problems.append(Problem(path, 5, "range_mismatch", f"{says}; the name counts, as for a node", None))
            first, end = number * count, (number + 1) * count
    if end > MAX_SEQ_ID:
        problems.append(Problem(path, 0, "bad_name", "no sequence id is as high as this name says", None))
        return 0, 0
    return first, end


class StoreV2(NamedTuple):
    """The messages of one N.qs, whether an entry refers to them or not, a row each, in the order of the file.

    `pos` and `term_size` (n,) int64: where the head of the record begins, and bytes of the term, with the zeros that 4.x
    may put after it; `verdict` (n,) uint8 of `QueueStoreVerdict`.
    """

    pos: np.ndarray
    term_size: np.ndarray
    verdict: np.ndarray
    problems: list[Problem]


def read_store_v2(source: str | os.PathLike[str] | bytes) -> StoreV2:
    """Read an N.qs by itself, for what is left when its N.qi is lost; never raises for damage."""
    path = "" if isinstance(source, bytes) else os.fspath(source)
    problems: list[Problem] = []
    places: list[int] = []
    sizes: list[int] = []
    with _opened(source) as data:
        head = _head(data, _QS_MAGIC)
        if isinstance(head, str):
            problems.append(Problem(path, 0, "bad_head", head, None))
        at = _HEAD_SIZE
        while at < len(data):
            size = int.from_bytes(data[at : at + 4], "big")
            if size == 0 or at + 8 + size > len(data):
                left = len(data) - at
                problems.append(Problem(path, at, "torn_record", f"the last {left} bytes are not a whole record", None))
                break
            places.append(at)
            sizes.append(size)
            at += 8 + size
        pos, term_size = np.array(places, np.int64), np.array(sizes, np.int64)
        verdict = _messages.check_queue_store(data, pos, term_size)
    for row in np.flatnonzero(verdict)[:_NAMED]:
        kind, detail = _VERDICTS[_messages.QueueStoreVerdict.QUEUE_STORE_CRC]
        problems.append(Problem(path, places[row], kind, detail, None))
    return StoreV2(pos, term_size, verdict, problems)


def unpadded(term: bytes) -> bytes:
    """The term without the zeros that 4.x may put after one; what else follows stays, so that it is seen not to be one."""
    # It reserves the estimated size of a term.
    size = _term.extent(term)
    return term[:size] if size > 0 and not any(term[size:]) else term


class QueueIndexV2(LiveIndex):
    """The live entries of a queue's directory of version 2, read-only; made by `open`.

    Attributes
    ----------
    path : str
        The directory.
    next_deliver_seq_id : int
        Everything below was delivered at least once; after a crash that is everything.
    recovered_clean : bool
        Good recovery terms were there and are used; else the numbers are those of after a crash.
    """

    def __init__(self, *arguments: object, **options: object) -> None:
        raise TypeError("a queue index is opened, not made: use QueueIndexV2.open(path)")

    next_deliver_seq_id: int
    _next_seq_id: int
    _problems: list[Problem]
    _segments: dict[int, SegmentV2]
    # Sequence ids above `next_deliver_seq_id` that were delivered and came back, as 4.3 counts them.
    _redelivered: frozenset[int]
    # Numbers of the N.qs that cannot be read: what their entries lead to is not known to be lost.
    _unreadable: set[int]

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, terms: Mapping[str, Any] | None = None) -> QueueIndexV2:
        """Read the index of a queue in directory `path`.

        `terms` are its recovery terms after an orderly stop.  OSError if the directory cannot be read; of a file, that is a
        problem.
        """
        index = cls.__new__(cls)
        index.path = os.fspath(path)
        index._problems, index._segments = [], {}
        index._redelivered, index._unreadable = frozenset(), set()
        # Not yet known, and asked for by `_leave_out_copies`.
        index.next_deliver_seq_id = 0
        live = index._load()
        index._leave_out_copies()
        ends = [segment.end for segment in index._segments.values() if len(segment.seq_id)]
        index._next_seq_id = index.next_deliver_seq_id = max(ends, default=0)
        index.recovered_clean = terms is not None and index._take_terms(terms, live)
        return index

    def _load(self) -> dict[int, int]:
        """Read the files; the live entries by number of the file."""
        matches = list(filter(None, map(_NAME.fullmatch, listing(self.path).checked().names)))
        stores, numbers = ({int(match[1]) for match in matches if match[2] == kind} for kind in ("qs", "qi"))
        for number in sorted(numbers):
            path = self._file(number, "qi")
            try:
                segment = read_segment_v2(path)
            except OSError as error:
                # The others are read; what this one has is not known.
                self._problems.append(unreadable_file(path, error))
                continue
            self._problems += segment.problems
            self._segments[number] = segment
            self._check_store(number, segment)
        for number in sorted(stores - numbers):
            detail = f"there is no {number}.qi, so nobody refers to what is in it"
            self._problems.append(Problem(self._file(number, "qs"), 0, "store_without_index", detail, None))
        return {number: len(segment.seq_id) for number, segment in self._segments.items()}

    def _take_terms(self, terms: Mapping[str, Any], live: dict[int, int]) -> bool:
        """Go by recovery terms, with a problem for each that the files contradict; False where they are not terms."""
        said = {str(key): value for key, value in terms.items()}
        numbers: list[int] = []
        stated = live
        try:
            # 4.3 has another name for it, and takes the old one first.
            deliver = "next_deliver_seq_id" if "next_deliver_seq_id" in said else "redeliver_seq_id"
            for key in ("next_seq_id", deliver):
                # An integer and nothing like it: a node calculates with what is there.
                numbers.append(operator.index(said[key]))
                if not 0 <= numbers[-1] <= MAX_SEQ_ID + 1:
                    raise ValueError
            key = "delivery_count"
            redelivered = frozenset(map(operator.index, dict(said.get(key, {}))))
            key = "v2_index_state"
            # A queue that was stopped under version 1 has none.
            if key in said:
                version, counts = said[key]
                stated = {operator.index(number): operator.index(count) for number, count in counts.items()}
                if version != _VERSION:
                    raise ValueError
        except (KeyError, TypeError, ValueError, AttributeError):
            self._problems.append(bad_terms(self.path, repr(key)))
            return False
        self._next_seq_id, self.next_deliver_seq_id = numbers
        self._redelivered = redelivered
        self._problems += count_problems(stated, live, lambda number: self._file(number, "qi"))
        highest = max((int(each.seq_id[-1]) for each in self._segments.values() if len(each.seq_id)), default=-1)
        if highest >= self._next_seq_id:
            self._problems.append(low_seq_id(self.path, self._next_seq_id, highest))
        return True

    def _file(self, number: int, kind: str) -> str:
        return os.path.join(self.path, f"{number}.{kind}")

    def _leave_out_copies(self) -> None:
        # A queue has each message once: what a file that was renamed has of another one is a copy, which may be old.
        for number, segment in self._segments.items():
            if not any(problem.kind == "range_mismatch" for problem in segment.problems):
                continue
            rest = self._entries(self._segments.keys() - {number})
            others = {entry.msg_id: entry.path for entry in rest if any(entry.msg_id)}
            same = next((entry for entry in self._entries([number]) if entry.msg_id in others), None)
            if same is None:
                continue
            detail = f"{len(segment.seq_id)} entries left out: {others[same.msg_id]} also has {same.msg_id.hex()}"
            self._problems.append(Problem(self._file(number, "qi"), 0, "copied_segment", detail, None))
            self._segments[number] = SegmentV2(*segment[:3], *(column[:0] for column in segment[3:]))

    def _check_store(self, number: int, segment: SegmentV2) -> None:
        for row in np.flatnonzero(segment.location == MEMORY).tolist():
            place = self._file(number, "qi"), int(segment.entry_pos[row]), "memory_only"
            detail = "the message was in the node's memory only, so it is lost"
            self._problems.append(Problem(*place, detail, int(segment.seq_id[row])))
        own = np.flatnonzero(segment.location == PER_QUEUE)
        if not len(own):
            return
        path = self._file(number, "qs")
        try:
            with _opened(path) as data:
                head = _head(data, _QS_MAGIC)
                segment.verdict[own] = _messages.check_queue_store(data, segment.pos[own], segment.term_size[own])
        except OSError as error:
            segment.verdict[own] = _messages.QueueStoreVerdict.QUEUE_STORE_OUTSIDE
            if isinstance(error, FileNotFoundError):
                detail = f"the file is missing, and with it the messages of {len(own)} entries"
                self._problems.append(Problem(path, 0, "missing_store", detail, int(segment.seq_id[own[0]])))
            else:
                self._unreadable.add(number)
                self._problems.append(unreadable_file(path, error))
            return
        if isinstance(head, str):
            self._problems.append(Problem(path, 0, "bad_head", head, None))
        for row in own[segment.verdict[own] != 0]:
            kind, detail = _VERDICTS[_messages.QueueStoreVerdict(int(segment.verdict[row]))]
            self._problems.append(Problem(path, int(segment.pos[row]), kind, detail, int(segment.seq_id[row])))

    # ---------------------------------------------------------------------------------------------------------- reading

    @property
    def problems(self) -> list[Problem]:
        """list of Problem: what was met in the files that no writer leaves there."""
        return list(self._problems)

    @property
    def next_seq_id(self) -> int:
        """int: that of the recovery terms; after a crash, after the highest file with a live entry."""
        return self._next_seq_id

    @property
    def segments(self) -> dict[int, SegmentV2]:
        """dict of int to SegmentV2: by the number of the file, ascending."""
        return self._segments

    @property
    def depth(self) -> int:
        """int: live entries."""
        return sum(len(segment.seq_id) for segment in self._segments.values())

    def __len__(self) -> int:
        return self.depth

    def columns(self) -> IndexColumns:
        """The live entries as columns, by number of the file.

        `pos` is the place of the entry in the N.qi, `ENTRY_EMBEDDED` set unless the message is in the shared store.
        """
        parts = [
            IndexColumns(
                each.seq_id,
                each.size,
                (ENTRY_PUBLISH + ENTRY_PERSISTENT * each.persistent + ENTRY_EMBEDDED * (each.location != SHARED)).astype("u1"),
                each.expiry_us,
                each.msg_id,
                np.full(len(each.seq_id), number),
                each.entry_pos,
                each.term_size,
            )
            for number, each in self._segments.items()
        ]
        return IndexColumns(*map(np.concatenate, zip(IndexColumns.empty(0), *parts)))

    def __iter__(self) -> Iterator[IndexEntry]:
        """The live entries in the order of their sequence ids.

        `message` is the term of a message in the N.qs; None where it is in the shared store, as `msg_id`, or cannot be trusted:
        then `problems` says why, and `msg_id` is zeros.  `path` is the N.qs of a message that is in it, else the N.qi.
        """
        return self._entries(self._segments)

    def _entries(self, numbers: Iterable[int]) -> Iterator[IndexEntry]:
        for number in sorted(numbers, key=lambda number: self._segments[number].first):
            segment = self._segments[number]
            has_terms = np.any((segment.location == PER_QUEUE) & (segment.verdict == 0))
            with _opened(self._file(number, "qs") if has_terms else b"") as data:
                yield from self._rows(number, segment, data)

    def _rows(self, number: int, segment: SegmentV2, data: memoryview) -> Iterator[IndexEntry]:
        qi_path, qs_path = self._file(number, "qi"), self._file(number, "qs")
        entry_pos = segment.entry_pos
        for row, seq_id in enumerate(segment.seq_id.tolist()):
            location = int(segment.location[row])
            path, pos, message = qi_path, int(entry_pos[row]), None
            msg_id = segment.msg_id[row].tobytes() if location == SHARED else bytes(16)
            trusted = segment.verdict[row] == 0
            if location == PER_QUEUE and (trusted or number in self._unreadable):
                path, pos = qs_path, int(segment.pos[row])
                if trusted:
                    message = unpadded(bytes(data[pos + 8 : pos + 8 + int(segment.term_size[row])]))
                    msg_id = _term.message_id_of(message) or msg_id
            expiry_us = int(segment.expiry_us[row])
            yield IndexEntry(
                seq_id,
                msg_id,
                expiry_us // 1000 or None,
                int(segment.size[row]),
                bool(segment.persistent[row]),
                seq_id < self.next_deliver_seq_id or seq_id in self._redelivered,
                message,
                path,
                pos,
                expiry_us,
                marked=False,
            )


def both(version_1: Iterable[IndexEntry], version_2: Iterable[IndexEntry]) -> Iterator[IndexEntry]:
    """The live entries of a directory with files of both versions, in the order of sequence ids.

    A node converts a segment and then deletes the old one: an entry in both is one message, taken from version 2.
    """
    entries = {entry.seq_id: entry for entry in version_1}
    entries.update((entry.seq_id, entry) for entry in version_2)
    return iter([entries[seq_id] for seq_id in sorted(entries)])
