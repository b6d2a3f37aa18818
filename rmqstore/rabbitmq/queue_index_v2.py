"""Queue indexes of version 2, read: N.qi with entries of fixed size, N.qs with the messages of one queue.

Owns these two files of one queue's directory and never writes them.  Damage is a `Problem`, never an exception: an entry
whose message cannot be trusted stays, without its message.  Rules: RabbitMQ 3.10.8, and its source up to 4.x
(docs/rabbitmq.md).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from rmqstore.files.listing import listing
from rmqstore.files.open_file import open_regular
from rmqstore.rabbitmq import _messages
from rmqstore.rabbitmq._core import ENTRY_EMBEDDED, ENTRY_PERSISTENT, ENTRY_PUBLISH, MAX_SEQ_ID
from rmqstore.rabbitmq.layout import map_file
from rmqstore.rabbitmq.live_index import ENTRY_REDELIVERED, IndexColumns, LiveIndex, stated_terms
from rmqstore.rabbitmq.problem import Problem, unreadable_file

__all__ = ["PER_QUEUE", "QueueIndexV2", "SegmentV2", "StoreV2", "read_segment_v2", "read_store_v2"]

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
# The 16 bytes from 4 on are the message id, or the place in the N.qs.
_ENTRY = np.dtype(
    {
        "names": ["status", "flags", "location", "msg_id", "offset", "term_size", "size", "expiry"],
        "formats": ["u1", "u1", "u1", ("u1", 16), ">u8", ">u4", ">u4", ">u8"],
        "offsets": [0, 1, 3, 4, 4, 12, 20, 24],
        "itemsize": _ENTRY_SIZE,
    }
)
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
    seq_id : numpy.ndarray
        (n,) int64.
    entries : numpy.ndarray
        (n,): the fields of the file.  `location` is 0 in the node's memory only, 1 in the shared message store, 2 in the
        N.qs; `msg_id` has 16 bytes for 1, `offset` and `term_size` are the place of a record's head and the bytes of its
        term for 2; `size` is of the body, `expiry` in microseconds since 1970 or 0.
    """

    first: int
    end: int
    problems: list[Problem]
    seq_id: np.ndarray
    entries: np.ndarray

    @property
    def places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows of messages in the N.qs, and (n,) int64 of their records: positions of the heads, bytes of the terms."""
        rows = np.flatnonzero(self.entries["location"] == PER_QUEUE)
        # No file is as large as the last positive number.
        offset = np.minimum(self.entries["offset"][rows], np.uint64(2**63 - 1)).astype(np.int64)
        return rows, offset, self.entries["term_size"][rows].astype(np.int64)


@contextlib.contextmanager
def _opened(source: str | os.PathLike[str] | bytes) -> Iterator[memoryview]:
    """Map a file for the duration of the context; a sparse file takes no memory."""
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
    entries = np.frombuffer(data, _ENTRY, rows, _HEAD_SIZE if rows else 0)
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
    return SegmentV2(first, end, problems, first + live.astype(np.int64), entries[live])


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

    `pos` and `term_size` (n,) int64: positions of the records' heads, and bytes of the terms, without zeros after them;
    `verdict` (n,) uint8 of `QueueStoreVerdict`.
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
        verdict, term_size, _ = _messages.check_queue_store(data, pos, term_size)
    for row in np.flatnonzero(verdict)[:_NAMED]:
        kind, detail = _VERDICTS[_messages.QueueStoreVerdict.QUEUE_STORE_CRC]
        problems.append(Problem(path, places[row], kind, detail, None))
    return StoreV2(pos, term_size, verdict, problems)


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
    _columns: dict[int, IndexColumns]
    # Sequence ids above `next_deliver_seq_id` that were delivered and came back, as 4.3 counts them.
    _redelivered: frozenset[int]

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, terms: Mapping[str, Any] | None = None) -> QueueIndexV2:
        """Read the index of a queue in directory `path`.

        `terms` are its recovery terms after an orderly stop.  OSError if the directory cannot be read; a file that cannot
        be read is a problem.
        """
        index = cls.__new__(cls)
        index.path = os.fspath(path)
        index._problems, index._segments, index._columns = [], {}, {}
        index._load()
        live = {number: len(segment.seq_id) for number, segment in index._segments.items()}
        index._leave_out_copies()
        columns = index._columns_of(list(index._columns))
        ends = [each.end for number, each in index._segments.items() if len(index._columns[number].seq_id)]
        index._next_seq_id = index.next_deliver_seq_id = max(ends, default=0)
        index._redelivered = frozenset()
        highest = int(columns.seq_id.max(initial=-1))
        said = None if terms is None else stated_terms(index, 2, terms, live, highest, index._problems)
        index.recovered_clean = said is not None
        if said is not None:
            index._next_seq_id, index.next_deliver_seq_id, _, index._redelivered, _ = said
        for each in index._columns.values():
            came_back = (each.seq_id < index.next_deliver_seq_id) | np.isin(each.seq_id, list(index._redelivered))
            each.flags[came_back] |= ENTRY_REDELIVERED
        return index

    def _load(self) -> None:
        matches = list(filter(None, map(_NAME.fullmatch, listing(self.path).checked().names)))
        stores, numbers = ({int(match[1]) for match in matches if match[2] == kind} for kind in ("qs", "qi"))
        for number in sorted(numbers):
            path = self.path_of(2 * number)
            try:
                segment = read_segment_v2(path)
            except OSError as error:
                # The others are read; the content of this one is not known.
                self._problems.append(unreadable_file(path, error))
                continue
            self._problems += segment.problems
            self._segments[number] = segment
            self._columns[number] = self._read_columns(number, segment)
        for number in sorted(stores - numbers):
            detail = f"there is no {number}.qi, so that no entry refers to its messages"
            self._problems.append(Problem(self.path_of(2 * number + 1), 0, "store_without_index", detail, None))

    def path_of(self, file: int) -> str:
        """Return the path of N.qi for 2 N, and of N.qs for 2 N + 1."""
        return os.path.join(self.path, f"{file // 2}.{'qs' if file % 2 else 'qi'}")

    def _leave_out_copies(self) -> None:
        # A queue has each message once: what a renamed file shares with another file is a copy, perhaps an old one.
        for number, segment in self._segments.items():
            if not any(problem.kind == "range_mismatch" for problem in segment.problems):
                continue
            others = {
                msg_id.tobytes(): other
                for other, columns in self._columns.items()
                for msg_id in columns.msg_id
                if other != number and msg_id.any()
            }
            same = next((each for each in map(bytes, self._columns[number].msg_id) if each in others), None)
            if same is None:
                continue
            other_path = self.path_of(2 * others[same])
            detail = f"{len(segment.seq_id)} entries left out: {other_path} also has {same.hex()}"
            self._problems.append(Problem(self.path_of(2 * number), 0, "copied_segment", detail, None))
            self._segments[number] = segment._replace(seq_id=segment.seq_id[:0], entries=segment.entries[:0])
            self._columns[number] = self._columns[number].rows(slice(0))

    def _read_columns(self, number: int, segment: SegmentV2) -> IndexColumns:
        """Return the entries of a file as columns, after the check of their messages in the N.qs."""
        entries, count, path = segment.entries, len(segment.seq_id), self.path_of(2 * number + 1)
        shared = entries["location"] == SHARED
        columns = IndexColumns(
            segment.seq_id,
            entries["size"].astype(np.int64),
            (ENTRY_PUBLISH + ENTRY_PERSISTENT * (entries["flags"] & 1) + ENTRY_EMBEDDED * ~shared).astype(np.uint8),
            entries["expiry"].astype(np.uint64).view(np.int64),
            entries["msg_id"] * shared[:, None],
            np.full(count, 2 * number),
            _HEAD_SIZE + _ENTRY_SIZE * (segment.seq_id - segment.first),
            np.zeros(count, np.int64),
            np.zeros(count, np.int64),
        )
        for row in np.flatnonzero(entries["location"] == MEMORY).tolist():
            detail = "the message was in the node's memory only, so it is lost"
            place = self.path_of(2 * number), int(columns.pos[row])
            self._problems.append(Problem(*place, "memory_only", detail, int(segment.seq_id[row])))
        own, offset, term_size = segment.places
        if not len(own):
            return columns
        try:
            with _opened(path) as data:
                head = _head(data, _QS_MAGIC)
                verdict, sizes, ids = _messages.check_queue_store(data, offset, term_size)
        except FileNotFoundError:
            detail = f"the file is missing, and with it the messages of {len(own)} entries"
            self._problems.append(Problem(path, 0, "missing_store", detail, int(segment.seq_id[own[0]])))
            return columns
        except OSError as error:
            self._problems.append(unreadable_file(path, error))
            # They are not known to be lost.
            columns.file[own], columns.pos[own] = 2 * number + 1, offset
            return columns
        if isinstance(head, str):
            self._problems.append(Problem(path, 0, "bad_head", head, None))
        for row in np.flatnonzero(verdict).tolist():
            kind, detail = _VERDICTS[_messages.QueueStoreVerdict(int(verdict[row]))]
            self._problems.append(Problem(path, int(offset[row]), kind, detail, int(segment.seq_id[own[row]])))
        whole = verdict == 0
        rows = own[whole]
        columns.file[rows], columns.pos[rows], columns.msg_id[rows] = 2 * number + 1, offset[whole], ids[whole]
        columns.term_pos[rows], columns.term_size[rows] = offset[whole] + 8, sizes[whole]
        return columns

    # ---------------------------------------------------------------------------------------------------------- reading

    @property
    def problems(self) -> list[Problem]:
        """list of Problem: damage that was met in the files."""
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

    def _parts(self) -> list[list[int]]:
        return [[number] for number in sorted(self._segments, key=lambda number: self._segments[number].first)]

    def _columns_of(self, numbers: list[int]) -> IndexColumns:
        return IndexColumns.join(self._columns[number] for number in numbers)
