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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import NotCopied
from rmqstore.files.open_file import open_regular
from rmqstore.rabbitmq import _messages, _term
from rmqstore.rabbitmq._core import MAX_SEQ_ID
from rmqstore.rabbitmq.directory import map_file
from rmqstore.rabbitmq.index_columns import IndexEntry
from rmqstore.rabbitmq.problem import Problem, unreadable_file

__all__ = [
    "DEFAULT_SEGMENT_ENTRY_COUNT_V2",
    "QueueIndexV2",
    "SegmentV2",
    "StoreV2",
    "both",
    "read_segment_v2",
    "read_store_v2",
]

#: `classic_queue_index_v2_segment_entry_count` of a node; a file says its own range in its head.
DEFAULT_SEGMENT_ENTRY_COUNT_V2 = 4096

#: Where the message of an entry is.
MEMORY, SHARED, PER_QUEUE = 0, 1, 2

_HEAD_SIZE = 64
# Entries of one file, more than anybody configures: a damaged head may say any number.
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
assert _ENTRY.itemsize == 32


class SegmentV2(NamedTuple):
    """The live entries of one N.qi, a row each, in the order of sequence ids.

    Attributes
    ----------
    first, end : int
        The range of sequence ids that the head says, `end` exclusive.
    seq_id : numpy.ndarray
        (n,) int64.
    persistent : numpy.ndarray
        (n,) bool.
    location : numpy.ndarray
        (n,) uint8: 0 in the node's memory only, 1 in the shared message store, 2 in the N.qs.
    msg_id : numpy.ndarray
        (n, 16) uint8: of entries in the shared store; else what else stands there.
    pos, term_size : numpy.ndarray
        (n,) int64: place of the record's head in the N.qs and bytes of its term, for `location` 2; else 0.
    size : numpy.ndarray
        (n,) int64: bytes of the body.
    expiry_us : numpy.ndarray
        (n,) int64: microseconds since 1970, as the file has it; 0 for none.
    problems : list of Problem
    """

    first: int
    end: int
    seq_id: np.ndarray
    persistent: np.ndarray
    location: np.ndarray
    msg_id: np.ndarray
    pos: np.ndarray
    term_size: np.ndarray
    size: np.ndarray
    expiry_us: np.ndarray
    problems: list[Problem]


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

    Parameters
    ----------
    source : str, os.PathLike or bytes
        The file, or what is in it.
    number : int, optional
        The N of the name; taken from the name of a file.  With it an unreadable head is replaced by the usual range.

    Returns
    -------
    SegmentV2

    Raises
    ------
    OSError
        The file cannot be read.
    """
    if isinstance(source, bytes):
        path, data, size = "", source, len(source)
    else:
        path = os.fspath(source)
        with open(open_regular(path), "rb") as file:
            # No more than a file has: a sparse one may say any length.
            size = os.fstat(file.fileno()).st_size
            data = file.read(_HEAD_SIZE + 32 * _MAX_COUNT)
        match = _NAME.fullmatch(os.path.basename(path))
        if number is None and match is not None:
            number = int(match[1])
    problems: list[Problem] = []
    head = _head(data, _QI_MAGIC)
    if isinstance(head, str):
        problems.append(Problem(path, 0, "bad_head", head, None))
        first = (number or 0) * DEFAULT_SEGMENT_ENTRY_COUNT_V2
        end = first + DEFAULT_SEGMENT_ENTRY_COUNT_V2
    else:
        first, end = head
        count = end - first
        if number is not None and first != number * count:
            # A node finds a file by its name, and reads no range from it.
            count = count if first % count == 0 else DEFAULT_SEGMENT_ENTRY_COUNT_V2
            says = f"the file says sequence ids from {first} to {end}, its name from {number * count} on"
            problems.append(Problem(path, 5, "range_mismatch", f"{says}; the name counts, as for a node", None))
            first, end = number * count, (number + 1) * count
    if end > MAX_SEQ_ID:
        problems.append(Problem(path, 0, "bad_name", "no sequence id is as high as this name says", None))
        first, end = 0, 0
    # The file may end early: what is not there was never an entry.
    rows = min(max(len(data) - _HEAD_SIZE, 0) // 32, end - first)
    over = size - _HEAD_SIZE - 32 * rows
    if over > 0:
        kind, what = ("torn_entry", "part of an entry") if over < 32 else ("beyond_range", "more than the head's range")
        problems.append(Problem(path, _HEAD_SIZE + 32 * rows, kind, f"the last {over} bytes are {what}", None))
    entries = np.frombuffer(data, _ENTRY, rows, _HEAD_SIZE) if rows else np.empty(0, _ENTRY)
    ids = (
        np.frombuffer(data, np.uint8, 32 * rows, _HEAD_SIZE).reshape(-1, 32)[:, 4:20]
        if rows
        else np.empty((0, 16), "u1")
    )
    status = entries["status"]
    for row in np.flatnonzero(status > 1)[:1000]:
        problems.append(
            Problem(
                path, _HEAD_SIZE + 32 * int(row), "bad_status", f"status {status[row]}, not 0 or 1", first + int(row)
            )
        )
    live = np.flatnonzero(status == 1)
    strange = live[entries["location"][live] > PER_QUEUE]
    for row in strange[:1000]:
        detail = f"location {entries['location'][row]}, not 0, 1 or 2"
        problems.append(Problem(path, _HEAD_SIZE + 32 * int(row), "bad_location", detail, first + int(row)))
    entries = entries[live]
    own = entries["location"] == PER_QUEUE
    # Beyond 2**63 nothing lies: -1 is not a place in a file.
    offset = np.where(entries["offset"] >> np.uint64(63), np.uint64(2**63 - 1), entries["offset"]).astype(np.int64)
    return SegmentV2(
        first,
        end,
        first + live.astype(np.int64),
        (entries["flags"] & 1).astype(bool),
        entries["location"].copy(),
        ids[live],
        np.where(own, offset, 0),
        np.where(own, entries["term_size"].astype(np.int64), 0),
        entries["size"].astype(np.int64),
        np.minimum(entries["expiry"], np.uint64(2**63 - 1)).astype(np.int64),
        problems,
    )


class StoreV2(NamedTuple):
    """The messages of one N.qs, whether an entry refers to them or not, a row each, in the order of the file.

    Attributes
    ----------
    pos : numpy.ndarray
        (n,) int64: where the head of the record begins, bytes.
    term_size : numpy.ndarray
        (n,) int64: bytes of the term, with the zeros that 4.x may put after it.
    verdict : numpy.ndarray
        (n,) uint8 of `QueueStoreVerdict`.
    terms : list of bytes
        The terms without such zeros.  What else stands behind a term stays, so that it is seen not to be one.
    problems : list of Problem
    """

    pos: np.ndarray
    term_size: np.ndarray
    verdict: np.ndarray
    terms: list[bytes]
    problems: list[Problem]


def read_store_v2(source: str | os.PathLike[str] | bytes) -> StoreV2:
    """Read an N.qs by itself, for what is left when its N.qi is lost; never raises for damage.

    Parameters
    ----------
    source : str, os.PathLike or bytes
        The file, or what is in it.

    Returns
    -------
    StoreV2

    Raises
    ------
    OSError
        The file cannot be read.
    """
    if isinstance(source, bytes):
        return _store_of(memoryview(source), "")
    path = os.fspath(source)
    with _mapped(path) as data:
        return _store_of(data, path)


@contextlib.contextmanager
def _mapped(path: str) -> Iterator[memoryview]:
    """The bytes of a file, for as long as the context lasts; a sparse file takes no memory."""
    region = map_file(path)
    if region is None:
        yield memoryview(b"")
        return
    try:
        with region.view(0, region.size) as data:
            yield data
    finally:
        region.close()


def _store_of(data: memoryview, path: str) -> StoreV2:
    problems: list[Problem] = []
    head = _head(data, _QS_MAGIC)
    if isinstance(head, str):
        problems.append(Problem(path, 0, "bad_head", head, None))
    places: list[int] = []
    sizes: list[int] = []
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
    for row in np.flatnonzero(verdict)[:1000]:
        detail = "the check sum does not agree with the message"
        problems.append(Problem(path, places[row], "bad_crc", detail, None))
    terms = [_unpadded(bytes(data[at + 8 : at + 8 + size])) for at, size in zip(places, sizes, strict=True)]
    return StoreV2(pos, term_size, verdict, terms, problems)


class QueueIndexV2(NotCopied):
    """The live entries of a queue's directory of version 2, read-only; made by `open`.

    Attributes
    ----------
    path : str
        The directory.
    problems : list of Problem
        What was wrong with the files.
    segments : dict of int to SegmentV2
        By the number of the file, ascending.
    next_seq_id : int
        The sequence id of the next message: of the recovery terms, or, after a crash, after the highest live entry's file.
    next_deliver_seq_id : int
        Everything below was delivered at least once.  After a crash that is everything.  4.3 names each other one.
    recovered_clean : bool
        The recovery terms were there and are taken; without them, and where one of them is not what a node writes (then
        `problems` says which), the numbers are those of after a crash.
    """

    def __init__(self, *arguments: object, **options: object) -> None:
        raise TypeError("a queue index is opened, not made: use QueueIndexV2.open(path)")

    path: str
    problems: list[Problem]
    segments: dict[int, SegmentV2]
    next_seq_id: int
    next_deliver_seq_id: int
    recovered_clean: bool
    # Sequence ids above `next_deliver_seq_id` that were delivered and came back, as 4.3 counts them.
    _redelivered: frozenset[int]
    _verdicts: dict[int, np.ndarray]
    # Numbers of the N.qs that cannot be read: what their entries lead to is not known to be lost.
    _unreadable: set[int]

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        terms: Mapping[str, Any] | None = None,
        is_stored: Callable[[bytes], bool] | None = None,
    ) -> QueueIndexV2:
        """Read the index of a queue.

        Parameters
        ----------
        path : str or os.PathLike
            The queue's directory.
        terms : mapping, optional
            The queue's recovery terms after an orderly stop; None after a crash.
        is_stored : callable, optional
            Tells of an id whether the shared store has its message.  Entries that it has not are left out, as a node drops
            them, with a problem each.

        Returns
        -------
        QueueIndexV2

        Raises
        ------
        FileNotFoundError
            There is no such directory.
        OSError
            The directory cannot be read; of a file of it, that is a problem.
        """
        index = cls.__new__(cls)
        index.path = os.fspath(path)
        index.problems = []
        index.segments = {}
        index._redelivered = frozenset()
        index._verdicts = {}
        index._unreadable = set()
        stores: set[int] = set()
        numbers: set[int] = set()
        live: dict[int, int] = {}
        for name in listing(index.path).checked().names:
            match = _NAME.fullmatch(name)
            if match is not None:
                (numbers if match[2] == "qi" else stores).add(int(match[1]))
        for number in sorted(numbers):
            path = index._file(number, "qi")
            try:
                segment = read_segment_v2(path)
            except OSError as error:
                # The others are read; what this one has, nobody can tell.
                index.problems.append(unreadable_file(path, error))
                continue
            index.problems += segment.problems
            live[number] = len(segment.seq_id)
            if is_stored is not None:
                segment = index._drop_lost(number, segment, is_stored)
            index.segments[number] = segment
            index._check_store(number, segment)
        for number in sorted(stores - numbers):
            detail = f"there is no {number}.qi, so nobody refers to what is in it"
            index.problems.append(Problem(index._file(number, "qs"), 0, "store_without_index", detail, None))
        index.next_seq_id = index.next_deliver_seq_id = 0
        index._leave_out_copies()
        ends = [segment.end for segment in index.segments.values() if len(segment.seq_id)]
        index.next_seq_id = index.next_deliver_seq_id = max(ends, default=0)
        index.recovered_clean = terms is not None and index._take_terms(terms, live)
        return index

    def _take_terms(self, terms: Mapping[str, Any], live: Mapping[int, int]) -> bool:
        """Go by recovery terms, with a problem for each that the files contradict; False where they are not terms."""
        said = {str(key): value for key, value in terms.items()}
        numbers: list[int] = []
        stated = dict(live)
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
            detail = f"the recovery terms lack or spoil {key!r}; the queue counts as dirty"
            self.problems.append(Problem(self.path, None, "bad_terms", detail))
            return False
        self.next_seq_id, self.next_deliver_seq_id = numbers
        self._redelivered = redelivered
        for number in sorted(stated.keys() | live.keys()):
            if stated.get(number, 0) != live.get(number, 0):
                detail = f"the recovery terms say {stated.get(number, 0)} entries, the file {live.get(number, 0)}"
                self.problems.append(Problem(self._file(number, "qi"), None, "segment_count_mismatch", detail))
        lasts = [int(segment.seq_id[-1]) for segment in self.segments.values() if len(segment.seq_id)]
        highest = max(lasts, default=-1)
        if highest >= self.next_seq_id:
            detail = f"the recovery terms say that the next sequence id is {self.next_seq_id}, but {highest} is taken"
            self.problems.append(Problem(self.path, None, "next_seq_id_too_low", detail, highest))
        return True

    def _file(self, number: int, kind: str) -> str:
        return os.path.join(self.path, f"{number}.{kind}")

    def _drop_lost(self, number: int, segment: SegmentV2, is_stored: Callable[[bytes], bool]) -> SegmentV2:
        keep = np.ones(len(segment.seq_id), bool)
        for row in np.flatnonzero(segment.location == SHARED):
            msg_id = segment.msg_id[row].tobytes()
            if not is_stored(msg_id):
                keep[row] = False
                seq_id = int(segment.seq_id[row])
                pos = _HEAD_SIZE + 32 * (seq_id - segment.first)
                detail = f"the message store has no message {msg_id.hex()}; a node drops the entry"
                self.problems.append(Problem(self._file(number, "qi"), pos, "missing_message", detail, seq_id))
        if keep.all():
            return segment
        columns = {name: getattr(segment, name)[keep] for name in SegmentV2._fields[2:-1]}
        return segment._replace(**columns)

    def _leave_out_copies(self) -> None:
        # A queue has each message once: what a file that was renamed has of another one is a copy, which may be old.
        renamed = [
            number
            for number, segment in self.segments.items()
            if any(problem.kind == "range_mismatch" for problem in segment.problems)
        ]
        for number in renamed:
            rest = self._entries(self.segments.keys() - {number})
            others = {entry.msg_id: entry.path for entry in rest if any(entry.msg_id)}
            same = next((entry for entry in self._entries([number]) if entry.msg_id in others), None)
            if same is None:
                continue
            segment, path = self.segments[number], self._file(number, "qi")
            detail = f"{len(segment.seq_id)} entries left out: {others[same.msg_id]} also has {same.msg_id.hex()}"
            self.problems.append(Problem(path, 0, "copied_segment", detail, None))
            columns = {name: getattr(segment, name)[:0] for name in SegmentV2._fields[2:-1]}
            self.segments[number] = segment._replace(**columns)
            self._verdicts[number] = self._verdicts[number][:0]

    def _check_store(self, number: int, segment: SegmentV2) -> None:
        own = np.flatnonzero(segment.location == PER_QUEUE)
        verdicts = np.zeros(len(segment.seq_id), np.uint8)
        self._verdicts[number] = verdicts
        for row in np.flatnonzero(segment.location == MEMORY):
            seq_id = int(segment.seq_id[row])
            detail = "the message was in the node's memory only, so it is lost"
            self.problems.append(
                Problem(
                    self._file(number, "qi"), _HEAD_SIZE + 32 * (seq_id - segment.first), "memory_only", detail, seq_id
                )
            )
        if not len(own):
            return
        path = self._file(number, "qs")
        try:
            with _mapped(path) as data:
                head = _head(data, _QS_MAGIC)
                verdicts[own] = _messages.check_queue_store(data, segment.pos[own], segment.term_size[own])
        except FileNotFoundError:
            verdicts[own] = _messages.QueueStoreVerdict.QUEUE_STORE_OUTSIDE
            detail = f"the file is missing, and with it the messages of {len(own)} entries"
            self.problems.append(Problem(path, 0, "missing_store", detail, int(segment.seq_id[own[0]])))
            return
        except OSError as error:
            verdicts[own] = _messages.QueueStoreVerdict.QUEUE_STORE_OUTSIDE
            self._unreadable.add(number)
            self.problems.append(unreadable_file(path, error))
            return
        if isinstance(head, str):
            self.problems.append(Problem(path, 0, "bad_head", head, None))
        kinds = {
            _messages.QueueStoreVerdict.QUEUE_STORE_OUTSIDE: ("outside", "the message would lie outside the file"),
            _messages.QueueStoreVerdict.QUEUE_STORE_SIZE: ("size_mismatch", "index and record say different sizes"),
            _messages.QueueStoreVerdict.QUEUE_STORE_CRC: ("bad_crc", "the check sum does not agree with the message"),
        }
        for row in own[verdicts[own] != 0]:
            kind, detail = kinds[_messages.QueueStoreVerdict(int(verdicts[row]))]
            self.problems.append(Problem(path, int(segment.pos[row]), kind, detail, int(segment.seq_id[row])))

    @property
    def depth(self) -> int:
        """int: live entries."""
        return sum(len(segment.seq_id) for segment in self.segments.values())

    def __len__(self) -> int:
        return self.depth

    def __iter__(self) -> Iterator[IndexEntry]:
        """The live entries in the order of their sequence ids.

        `message` is the term of a message in the N.qs; None where it lies in the shared store (then `msg_id` says which), or
        cannot be trusted (then `problems` says why, and `msg_id` is 16 zero bytes).  `path` is the N.qi, but the N.qs
        of a message in it that is given, or that cannot be read.
        """
        return self._entries(self.segments)

    def _entries(self, numbers: Iterable[int]) -> Iterator[IndexEntry]:
        chosen = [(number, self.segments[number]) for number in numbers]
        for number, segment in sorted(chosen, key=lambda item: item[1].first):
            source: contextlib.AbstractContextManager[memoryview] = contextlib.nullcontext(memoryview(b""))
            if np.any((segment.location == PER_QUEUE) & (self._verdicts[number] == 0)):
                source = _mapped(self._file(number, "qs"))
            with source as data:
                yield from self._rows(number, data)

    def _rows(self, number: int, data: memoryview) -> Iterator[IndexEntry]:
        segment, verdicts = self.segments[number], self._verdicts[number]
        qi_path, qs_path = self._file(number, "qi"), self._file(number, "qs")
        for row in range(len(segment.seq_id)):
            seq_id = int(segment.seq_id[row])
            location = int(segment.location[row])
            path, pos, message = qi_path, _HEAD_SIZE + 32 * (seq_id - segment.first), None
            msg_id = segment.msg_id[row].tobytes() if location == SHARED else bytes(16)
            if location == PER_QUEUE and number in self._unreadable:
                path, pos = qs_path, int(segment.pos[row])
            elif location == PER_QUEUE and verdicts[row] == 0:
                path, pos = qs_path, int(segment.pos[row])
                message = _unpadded(bytes(data[pos + 8 : pos + 8 + int(segment.term_size[row])]))
                msg_id = _term.message_id_of(message) or bytes(16)
            yield IndexEntry(
                seq_id=seq_id,
                msg_id=msg_id,
                expiry=int(segment.expiry_us[row]) // 1000 or None,
                size=int(segment.size[row]),
                persistent=bool(segment.persistent[row]),
                delivered=seq_id < self.next_deliver_seq_id or seq_id in self._redelivered,
                message=message,
                path=path,
                pos=pos,
                expiry_us=int(segment.expiry_us[row]),
                marked=False,
            )

    def references(self) -> np.ndarray:
        """numpy.ndarray: (n, 16) uint8, ids of the persistent live entries in the shared store, for `MessageStore.open`."""
        parts = [s.msg_id[(s.location == SHARED) & s.persistent] for s in self.segments.values()]
        return np.concatenate(parts) if parts else np.empty((0, 16), np.uint8)


def _unpadded(term: bytes) -> bytes:
    # 4.x reserves the estimated size of a term and fills the rest with zeros; anything else is not padding.
    size = _term.extent(term)
    return term[:size] if size > 0 and not any(term[size:]) else term


def both(version_1: Iterable[IndexEntry], version_2: Iterable[IndexEntry]) -> Iterator[IndexEntry]:
    """The live entries of a directory that holds files of both versions, in the order of sequence ids.

    A node converts segment by segment: it writes the new one and then deletes the old one.  An entry that is in both is the
    same message; the one of version 2 is given, which nobody could have acknowledged before the conversion ended.
    """
    entries = {entry.seq_id: entry for entry in version_1}
    entries.update((entry.seq_id, entry) for entry in version_2)
    return iter([entries[seq_id] for seq_id in sorted(entries)])
