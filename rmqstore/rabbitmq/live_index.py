"""The live entries of a queue's index of any version: sequence ids, flags, and where each record is.

Owns `IndexEntry` and `IndexColumns`, the interface `LiveIndex` over them, the reading of embedded terms, and the check of
recovery terms.  The files themselves belong to `index_directory` (version 1) and `queue_index_v2`.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rmqstore._core import Region
from rmqstore.errors import StoreChangedError
from rmqstore.files.mapped_file import NotCopied
from rmqstore.rabbitmq._core import ENTRY_DELIVER, ENTRY_EMBEDDED, ENTRY_PERSISTENT, MAX_SEQ_ID, terms_at
from rmqstore.rabbitmq.layout import map_file
from rmqstore.rabbitmq.problem import Problem

__all__ = [
    "ENTRY_REDELIVERED",
    "IndexColumns",
    "IndexEntry",
    "JoinedIndex",
    "LiveIndex",
    "StatedTerms",
    "embedded_terms",
    "map_present",
    "release",
    "stated_terms",
]

#: In the flags of `IndexColumns`, next to those of the compiled module.
ENTRY_REDELIVERED = 64
_UNSIGNED = (1 << 64) - 1


class IndexEntry(NamedTuple):
    """A message that is in the queue.

    Attributes
    ----------
    seq_id : int
    msg_id : bytes
        16 bytes.
    expiry, expiry_us : int or None, int
        Expiry since the epoch: in ms, or None; in microseconds as in the file, 0 = none.
    size : int
        Bytes of the body.
    persistent : bool
    delivered : bool
        A node would deliver it as redelivered: its id is below `QueueIndex.next_deliver_seq_id`.
    message : bytes or None
        The external term of an embedded message; None: it is in a message store.
    path, pos : str, int
        The place of its publish record, in the journal also before it is written.
    marked : bool
        It has a deliver record; since RabbitMQ 3.10 each entry gets one with its publish.
    """

    seq_id: int
    msg_id: bytes
    expiry: int | None
    size: int
    persistent: bool
    delivered: bool
    message: bytes | None
    path: str
    pos: int
    expiry_us: int = 0
    marked: bool = True


class IndexColumns(NamedTuple):
    """Entries as columns of `n` rows.

    Attributes
    ----------
    seq_id, size, expiry_us, file, pos, term_pos, term_size : ndarray (n,) of int64
        `expiry_us` holds the 64 bits of the file, microseconds since the epoch, 0 = none.  `file` is the file of the
        record, for `LiveIndex.path_of`, and `pos` the record's position.  An embedded term is the `term_size` bytes at
        `term_pos`; the size is 0 for a message in a store, and for one that is lost.
    flags : ndarray (n,) of uint8
        Bits `ENTRY_PUBLISH`, `ENTRY_DELIVER`, `ENTRY_ACK`, `ENTRY_PERSISTENT`, `ENTRY_EMBEDDED`, `ENTRY_DAMAGED` and
        `ENTRY_REDELIVERED`.
    msg_id : ndarray (n, 16) of uint8
    """

    seq_id: np.ndarray
    size: np.ndarray
    flags: np.ndarray
    expiry_us: np.ndarray
    msg_id: np.ndarray
    file: np.ndarray
    pos: np.ndarray
    term_pos: np.ndarray
    term_size: np.ndarray

    @classmethod
    def join(cls, parts: Iterable[IndexColumns]) -> IndexColumns:
        """Put columns one after the other."""
        none = np.empty(0, np.int64)
        empty = cls(*[none] * len(cls._fields))._replace(flags=none.astype("u1"), msg_id=np.empty((0, 16), "u1"))
        return cls(*map(np.concatenate, zip(empty, *parts)))

    def rows(self, chosen: Any) -> IndexColumns:
        """Return the rows of an index, a mask or a slice."""
        return IndexColumns(*(column[chosen] for column in self))


def map_present(path: str) -> Region | bytes | None:
    """Map a file: a Region, empty bytes for an empty file, None if there is no file."""
    try:
        return map_file(path) or b""
    except FileNotFoundError:
        return None


def release(source: object) -> None:
    """Unmap what `map_present` returned."""
    if isinstance(source, Region):
        source.close()


def opened_source(files: Any, file: int) -> Any:
    """Return the bytes of a file of an index or a directory; StoreChangedError if it is gone."""
    source = files.source(file)
    if source is None:
        raise StoreChangedError("the file is gone; open the queue again", files.path_of(file))
    return source


def embedded_terms(files: Any, columns: IndexColumns) -> dict[int, bytes]:
    """Read the embedded terms of `columns`, by number of the row; StoreChangedError if a file has changed."""
    terms: dict[int, bytes] = {}
    for file in np.unique(columns.file[columns.term_size > 0]).tolist():
        rows = np.flatnonzero((columns.term_size > 0) & (columns.file == file))
        source = opened_source(files, file)
        try:
            terms.update(zip(rows.tolist(), terms_at(source, columns.term_pos[rows], columns.term_size[rows])))
        finally:
            release(source)
    return terms


class LiveIndex(NotCopied):
    """The live entries in a queue's directory `path`: the interface of an index of any version.

    `recovered_clean`: the recovery terms of an orderly stop were there and are used.  `location`: the kind of file that
    holds embedded messages, for `QueuedMessage.location`.
    """

    path: str
    location = "queue"
    recovered_clean: bool
    _lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

    def path_of(self, file: int) -> str:
        """Return the path of a file of `IndexColumns`."""
        raise NotImplementedError

    def source(self, file: int) -> Any:
        """Return the bytes of a file of `IndexColumns`, to be released; None if it is gone."""
        return map_present(self.path_of(file))

    def _parts(self) -> Sequence[list[int]]:
        """List the segments in the order of sequence ids, in groups that are read at once."""
        raise NotImplementedError

    def _columns_of(self, numbers: list[int]) -> IndexColumns:
        """Return the live entries of some segments."""
        raise NotImplementedError

    @property
    def next_seq_id(self) -> int:
        """int: the sequence id of the next message."""
        raise NotImplementedError

    @property
    def depth(self) -> int:
        """int: live entries."""
        raise NotImplementedError

    @property
    def segments(self) -> Mapping[int, Any]:
        """By number of the segment, ascending."""
        raise NotImplementedError

    @property
    def problems(self) -> list[Problem]:
        """list of Problem: damage that was met in the files."""
        raise NotImplementedError

    def columns(self) -> IndexColumns:
        """Return the live entries as columns, in the order of their sequence ids."""
        return IndexColumns.join(map(self._columns_of, self._parts()))

    def __iter__(self) -> Iterator[IndexEntry]:
        """Yield live entries in the order of their sequence ids, reading a segment or so at a time.

        `message` is None, and `msg_id` zeros, if the message should be in the queue's own files and is lost;
        `problems` has the reason.
        """
        for numbers in self._parts():
            with self._lock:
                entries = self._entries(self._columns_of(numbers))
            yield from entries

    def _entries(self, columns: IndexColumns) -> list[IndexEntry]:
        terms = embedded_terms(self, columns)
        paths = {file: self.path_of(file) for file in np.unique(columns.file).tolist()}
        ids = columns.msg_id.tobytes()
        rows = zip(
            columns.seq_id.tolist(), columns.size.tolist(), columns.flags.tolist(), columns.expiry_us.tolist(),
            columns.file.tolist(), columns.pos.tolist(),
        )  # fmt: skip
        return [
            IndexEntry(
                seq_id,
                ids[16 * i : 16 * i + 16],
                (expiry & _UNSIGNED) // 1000 if expiry else None,
                size,
                bool(flags & ENTRY_PERSISTENT),
                bool(flags & ENTRY_REDELIVERED),
                terms.get(i),
                paths[file],
                pos,
                expiry & _UNSIGNED,
                bool(flags & ENTRY_DELIVER),
            )
            for i, (seq_id, size, flags, expiry, file, pos) in enumerate(rows)
        ]

    @property
    def persistent_sizes(self) -> np.ndarray:
        """ndarray (n,) of int64: bytes of the bodies of persistent entries."""
        columns = self.columns()
        sizes: np.ndarray = columns.size[(columns.flags & ENTRY_PERSISTENT) != 0]
        return sizes

    def references(self) -> np.ndarray:
        """ndarray (n, 16) of uint8: message ids of live persistent entries that are in the message store, one an entry."""
        columns = self.columns()
        ids: np.ndarray = columns.msg_id[columns.flags & (ENTRY_PERSISTENT | ENTRY_EMBEDDED) == ENTRY_PERSISTENT]
        return ids


class JoinedIndex(LiveIndex):
    """The entries of all indexes of a directory: of one, or of two while a node converts the directory to version 2.

    A node converts a segment and then deletes the old one: an entry in both is one message, taken from the last index.
    """

    def __init__(self, indexes: Sequence[LiveIndex]):
        self.indexes = indexes

    def path_of(self, file: int) -> str:
        """Return the path of a file: the number counts the index first."""
        number, which = divmod(file, len(self.indexes))
        return self.indexes[which].path_of(number)

    def source(self, file: int) -> Any:
        """Return the bytes of a file."""
        number, which = divmod(file, len(self.indexes))
        return self.indexes[which].source(number)

    def _parts(self) -> Sequence[list[int]]:
        return [[]]

    def _columns_of(self, numbers: list[int]) -> IndexColumns:
        joined = IndexColumns.join(())
        for which, index in enumerate(self.indexes):
            columns = index.columns()
            kept = joined.rows(~np.isin(joined.seq_id, columns.seq_id))
            joined = IndexColumns.join((kept, columns._replace(file=len(self.indexes) * columns.file + which)))
        return joined.rows(np.argsort(joined.seq_id, kind="stable"))


# ------------------------------------------------------------------------------------------------------ recovery terms


class StatedTerms(NamedTuple):
    """The recovery terms of a queue, as far as an index goes by them; `counts` are live entries by segment."""

    next_seq_id: int
    next_deliver_seq_id: int
    counts: dict[int, int] | None
    redelivered: frozenset[int]
    persistent_ref: bytes | None


def _stated(terms: Mapping[str, Any] | Iterable[tuple[str, Any]], version: int) -> StatedTerms | str:
    """Parse recovery terms; the name of the first one that no node writes."""
    key = "next_seq_id"
    try:
        said = {str(name): value for name, value in (terms.items() if isinstance(terms, Mapping) else terms)}
        # 4.3 has another name for it, and takes the old one first.
        renamed = version == 2 and "next_deliver_seq_id" not in said
        numbers = []
        for key in ("next_seq_id", "redeliver_seq_id" if renamed else "next_deliver_seq_id"):
            # A node calculates with it, so that only an integer will do.
            numbers.append(operator.index(said[key]))
            if not 0 <= numbers[-1] <= MAX_SEQ_ID + 1:
                return key
        key = "delivery_count"
        redelivered = frozenset(map(operator.index, dict(said.get(key, {}))))
        key = "segments" if version == 1 else "v2_index_state"
        counts = None
        # A queue that was stopped under version 1 has no state of version 2.
        if version == 1 or key in said:
            stated = said[key]
            if version == 2:
                format_version, stated = said[key]
                if format_version != version:
                    return key
            counts = {operator.index(number): operator.index(count) for number, count in dict(stated).items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return key
    ref = said.get("persistent_ref")
    kept_ref = bytes(ref) if isinstance(ref, (bytes, bytearray)) else None
    return StatedTerms(numbers[0], numbers[1], counts, redelivered, kept_ref)


def stated_terms(
    index: Any,
    version: int,
    terms: Mapping[str, Any] | Iterable[tuple[str, Any]],
    live: Mapping[int, int] | None,
    highest: int,
    problems: list[Problem],
) -> StatedTerms | None:
    """Parse the recovery terms of an orderly stop; None, and a problem, if a node does not write such terms.

    Each number that the files contradict is a problem too: `live` are their entries by segment, None if not all were
    read; `highest` is their highest sequence id, -1 without entries.
    """
    found = _stated(terms, version)
    if isinstance(found, str):
        detail = f"the recovery terms lack or spoil {found!r}; the queue counts as dirty"
        problems.append(Problem(index.path, None, "bad_terms", detail))
        return None
    counts = found.counts if found.counts is not None and live is not None else live or {}
    live = counts if live is None else live
    for number in sorted(counts.keys() | live.keys()):
        if counts.get(number, 0) != live.get(number, 0):
            detail = f"the recovery terms say {counts.get(number, 0)} live entries, the files {live.get(number, 0)}"
            path = index.path_of(number if version == 1 else 2 * number)
            problems.append(Problem(path, None, "segment_count_mismatch", detail))
    if highest >= found.next_seq_id:
        detail = f"the recovery terms say that the next sequence id is {found.next_seq_id}, but {highest} is taken"
        problems.append(Problem(index.path, None, "next_seq_id_too_low", detail, highest))
    return found
