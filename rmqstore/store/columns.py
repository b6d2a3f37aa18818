"""Messages as Apache Arrow columns: names, types, and arrays over the buffers of the core without a copy.

A row equals the `MessageExt` at the same place of the log.  pyarrow is imported when columns are asked for.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rmqstore._columns import COLUMN_NAMES, ArrowColumns
from rmqstore._core import Region, Verdict
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.commitlog.pieces import Division, Pieces, ScanProgress
from rmqstore.errors import CorruptionError, MissingDependencyError, OffsetOutOfRangeError, UnsupportedFormatError
from rmqstore.message import decompress_body, host_from_bytes
from rmqstore.selection import Selection

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["DEFAULT_COLUMNS", "DICTIONARY_COLUMNS", "NULLABLE_COLUMNS", "ColumnOptions", "Columns", "scan_schema"]

DEFAULT_COLUMNS = tuple(name for name in COLUMN_NAMES if name not in ("unique_key", "body_stored"))
"""The columns of a scan that names none: all but those that repeat what another one holds."""
DICTIONARY_COLUMNS = frozenset({"topic", "tags", "born_host", "store_host"})
"""The columns that may be asked for as dictionaries: many rows share few values."""
NULLABLE_COLUMNS = frozenset({"tags", "unique_key"})
"""The columns that some rows have no value in; no other column of a scan holds a null."""

logger = logging.getLogger(__name__)

# Bodies and properties of one batch; far below the 2 GiB that Arrow's 32-bit offsets reach.
_BATCH_BYTES = 64 * 1024 * 1024
# Bytes of a piece of the log that one thread decodes: longer for batches of many rows, so that few batches end with a piece;
# bytes searched for the next record after it; and the most threads.
_PIECE, _LONG_PIECE = 8 * 1024 * 1024, 32 * 1024 * 1024
_PIECE_BYTES_PER_ROW = 512
_PIECE_SEARCH = 256 * 1024
_THREADS = 4
# Batches with less than this part of the rows allowed, and with fewer bytes than this, are joined, which copies them.
_FEW = 8
_JOINED_BYTES = 1024 * 1024


def import_pyarrow() -> Any:
    """Return the library pyarrow, which only columns need; raise MissingDependencyError if it is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise MissingDependencyError(
            "columns need the library pyarrow: install it with 'pip install rmqstore[arrow]'"
        ) from None
    return pyarrow


def _types(pa: Any, views: bool) -> dict[str, Any]:
    text, data = (pa.string_view(), pa.binary_view()) if views else (pa.string(), pa.binary())
    time = pa.timestamp("ms", tz="UTC")
    return {
        "topic": text,
        "queue_id": pa.int32(),
        "queue_offset": pa.int64(),
        "phy_offset": pa.int64(),
        "size": pa.int32(),
        "msg_id": text,
        "keys": pa.list_(text),
        "tags": text,
        "body": data,
        "properties": pa.map_(text, text),
        "born_timestamp": time,
        "store_timestamp": time,
        "born_host": text,
        "store_host": text,
        "flag": pa.int32(),
        "sys_flag": pa.int32(),
        "reconsume_times": pa.int32(),
        "prepared_transaction_offset": pa.int64(),
        "corrupt": pa.bool_(),
        "unique_key": text,
        "body_stored": data,
    }


def chosen_columns(columns: Iterable[str] | None) -> tuple[str, ...]:
    """Return the names in `columns`, in its order; `DEFAULT_COLUMNS` for None."""
    if columns is None or columns is DEFAULT_COLUMNS:
        return DEFAULT_COLUMNS
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    for i, name in enumerate(names):
        if name not in COLUMN_NAMES:
            raise ValueError(f"there is no column {name!r}; there are {', '.join(COLUMN_NAMES)}")
        if name in names[:i]:
            raise ValueError(f"column {name!r} is asked for twice")
    return names


def encoded_columns(read_dictionary: Iterable[str]) -> frozenset[str]:
    """Return the columns in `read_dictionary`; raise ValueError for one that cannot be a dictionary."""
    names = frozenset((read_dictionary,) if isinstance(read_dictionary, str) else read_dictionary)
    for name in names - DICTIONARY_COLUMNS:
        raise ValueError(f"column {name!r} cannot be a dictionary; {', '.join(sorted(DICTIONARY_COLUMNS))} can")
    return names


def scan_schema(
    columns: Iterable[str] | None = None, views: bool = False, read_dictionary: Iterable[str] = ()
) -> pa.Schema:
    """Return the names and types of these columns (docs/columns.md); without names those of a scan.

    With `views` texts are of type ``string_view`` and bytes of type ``binary_view``; columns of `read_dictionary` are
    dictionaries of ``string`` with int32 indices.

    Raises
    ------
    ValueError
        A name that no column has, or one that comes twice, or in `read_dictionary` one not in `DICTIONARY_COLUMNS`.
    MissingDependencyError
        pyarrow is not installed.
    """
    import_pyarrow()
    return _schema(chosen_columns(columns), views, encoded_columns(read_dictionary))


@functools.lru_cache(64)
def _schema(names: tuple[str, ...], views: bool, encoded: frozenset[str] = frozenset()) -> pa.Schema:
    pa = import_pyarrow()
    types = _types(pa, views) | {name: pa.dictionary(pa.int32(), pa.string()) for name in encoded}
    return pa.schema([pa.field(name, types[name]) for name in names])


@functools.lru_cache(64)
def _stored_types(names: tuple[str, ...], views: bool) -> tuple[Any, ...]:
    # The types before columns become dictionaries: a schema makes new objects for each call.
    return tuple(field.type for field in _schema(names, views))


def _decompress(body: bytes, sys_flag: int) -> bytes | None:
    # Damage is a value in a column; a missing library is an error, as it would hide sound bodies.
    try:
        return decompress_body(body, sys_flag)
    except (CorruptionError, UnsupportedFormatError):
        return None


def _judge_body(body: bytes, sys_flag: int) -> bytes | None:
    # Like `_decompress` if no body is asked for: a missing library hides none, and does not end a scan.
    try:
        return b"" if decompress_body(body, sys_flag) is not None else None
    except (CorruptionError, UnsupportedFormatError):
        return None
    except MissingDependencyError as error:
        _warn_once(error.message)
        return b""


@functools.lru_cache(16)
def _warn_once(missing: str) -> None:
    logger.warning("compressed bodies are not checked: %s", missing)


@dataclass(frozen=True)
class ColumnOptions:
    """The columns to decode, and the limits of their batches.

    Attributes
    ----------
    columns : iterable of str, optional
        Their names; `chosen_columns` checks them.
    batch_size : int
        The most rows of a batch.
    views : bool
        Texts and bytes are views into the segments, which stay mapped while a part of a batch exists.
    read_dictionary : iterable of str
        Columns of `DICTIONARY_COLUMNS` that become dictionaries; each batch has its own.
    byte_limit : int, optional
        Bytes of bodies and properties with which a batch ends; 64 MiB by default.
    decode : bool
        Decompress bodies if ``body`` or ``corrupt`` is asked for.

    Raises
    ------
    ValueError
        A column that `scan_schema` refuses.
    """

    columns: Iterable[str] | None = None
    batch_size: int = 8192
    views: bool = False
    read_dictionary: Iterable[str] = ()
    byte_limit: int | None = None
    decode: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", chosen_columns(self.columns))
        object.__setattr__(self, "read_dictionary", encoded_columns(self.read_dictionary))

    @property
    def names(self) -> tuple[str, ...]:
        """tuple of str: the columns, in the order of the result."""
        return self.columns  # type: ignore[return-value]

    @property
    def schema(self) -> pa.Schema:
        """pyarrow.Schema: of the batches."""
        return _schema(self.names, self.views, self.read_dictionary)  # type: ignore[arg-type]


class Columns:
    """Arrow record batches out of `ArrowColumns`."""

    def __init__(
        self, options: ColumnOptions, crc_check: int, selection: Selection | None = None, *, by_place: bool = False
    ):
        self.pa = import_pyarrow()
        names = options.names
        self._encoded = options.read_dictionary
        self.schema = options.schema
        self.views = options.views
        self._stored_types = _stored_types(names, options.views)
        self.out = ArrowColumns(
            names,
            capacity=options.batch_size,
            byte_limit=_BATCH_BYTES if options.byte_limit is None else options.byte_limit,
            check_crc=crc_check,
            decompress=None if not options.decode else _decompress if "body" in names else _judge_body,
            host_text=host_from_bytes,
            views=options.views,
        )
        if selection is not None:
            selection.choose(self.out, by_place=by_place)

    def take(self) -> pa.RecordBatch:
        """Return the rows that were filled in since the last call."""
        return self.pa.RecordBatch.from_arrays(self.take_arrays(), schema=self.schema)

    def take_arrays(self) -> list[pa.Array]:
        """Return the columns of `take`."""
        arrays = self.out.take_arrays(self.pa.Array._import_from_c, self._stored_types)
        if self._encoded:
            return [
                self._dictionary(array) if name in self._encoded else array
                for name, array in zip(self.schema.names, arrays, strict=True)
            ]
        return arrays

    def _dictionary(self, texts: Any) -> Any:
        # Of plain strings even if these are views: fewer readers support dictionaries of views.
        found = texts.dictionary_encode()
        return self.pa.DictionaryArray.from_arrays(found.indices, found.dictionary.cast(self.pa.string()))


def scan_log(
    log: CommitLog, selection: Selection, options: ColumnOptions, *, use_threads: bool
) -> pa.RecordBatchReader:
    """Return the chosen messages of a log, see `MessageStore.scan`."""

    def make() -> Columns:
        return Columns(options, log.crc_check, selection)

    made = make()
    end = log.max_offset if selection.end_phy_offset is None else selection.end_phy_offset
    # From here on the scan reports segments that retention deletes.
    begin = max(selection.begin_phy_offset or 0, log.min_offset)
    batches = record_batches(log, made, begin, end, make if use_threads else None)
    # The reader alone holds the generator, so that its threads end with it.
    return made.pa.RecordBatchReader.from_batches(made.schema, batches)


def record_batches(
    log: CommitLog, columns: Columns, begin: int | None, end: int | None, more: Callable[[], Columns] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the chosen records from `begin` to `end` as record batches, none of them empty.

    `more` makes columns like `columns`, for threads that decode ahead of the caller; rows and their order are the same.
    """
    low = log.min_offset
    at = low if begin is None else max(begin, low)
    stop = log.max_offset if end is None else min(end, log.max_offset)
    if begin is not None and begin < min(at, stop):
        log.warn_of_missing(begin, min(at, stop))
    size = min(max(_PIECE_BYTES_PER_ROW * columns.out.capacity, _PIECE), max(_LONG_PIECE, _PIECE), log.segment_size)
    # Without columns a batch has no rows that could be counted.
    if more is not None and size >= _PIECE and stop - at >= 2 * size and columns.out.columns:
        pieces: Pieces[Columns, tuple[list[pa.RecordBatch], int]] = Pieces(
            log.files, stop, more, Division(size, _PIECE_SEARCH, _THREADS, caller_works=True)
        )
        if pieces.thread_num > 1:
            batches = _batches_of_pieces(log, pieces, columns, at, stop, size)
            try:
                yield from _without_small(batches, columns)
            finally:
                # The frames of an exception do not keep the threads.
                batches.close()
            return
    for _ in log.fill(columns.out, begin, end, partial(_passed_over, log)):
        if columns.out.count:
            yield columns.take()


def _passed_over(log: CommitLog, begin: int, end: int, verdict: Verdict | None) -> None:
    # Only `verify` reports damage; a segment that is missing may have existed when the scan began.
    if verdict is None:
        log.warn_of_missing(begin, end)


def _batches_of_pieces(
    log: CommitLog,
    pieces: Pieces[Columns, tuple[list[pa.RecordBatch], int]],
    columns: Columns,
    at: int,
    stop: int,
    size: int,
) -> Generator[pa.RecordBatch, None, None]:
    # The record batches of a scan from `at` to `stop`.  This thread makes those before the first piece of another thread, and
    # those of pieces that did not come to their end.
    closing = threading.Event()
    told = partial(_passed_over, log)

    def decode(made: Columns, region: Region, begin: int, limit: int, base: int) -> tuple[list[pa.RecordBatch], int]:
        # The batches of a piece, and where the scan continues: before the end of the piece if decompressed bodies are so large
        # that no more of them may be held.
        batches: list[pa.RecordBatch] = []
        held, reached = 0, base + begin
        try:
            for goes_on in log.fill(made.out, base + begin, base + limit, told):
                reached = goes_on
                if made.out.count:
                    batches.append(made.take())
                    # Views take little new memory.
                    held += 0 if made.views else batches[-1].nbytes
                if held >= _BATCH_BYTES or closing.is_set():
                    break
            return batches, reached
        finally:
            if made.out.count:
                # The next piece must not begin with rows of this one.
                made.out.take()

    passed = ScanProgress(log.files)
    # The first batch is made before any thread starts: some callers need only that.
    is_first = True
    try:
        while at < stop:
            passed.reach(at)
            _check_open(log, at)
            piece = pieces.come_to(at)
            until = pieces.end_behind(at)
            if not is_first:
                pieces.launch(decode)
            result = None if piece is None else pieces.result_of(piece)
            if piece is not None and result is not None:
                pieces.put_back(piece.job)
                batches, reached = result
                batches.reverse()
                while batches:
                    _check_open(log, at)
                    yield batches.pop()
                at = reached
                continue
            # An error of another thread is raised here again, or is gone.
            began = at
            for goes_on in log.fill(columns.out, began, until if until >= 0 else min(began + size, stop), told):
                at = goes_on
                if columns.out.count:
                    yield columns.take()
                if is_first:
                    is_first = False
                    pieces.launch(decode)
            if at <= began:
                # The log was cut.
                return
    finally:
        closing.set()
        pieces.close()


def _check_open(log: CommitLog, at: int) -> None:
    # After `close` batches that were decoded ahead are not returned; a segment that expired is no error.
    mapped_file = log.files.find(at)
    try:
        if mapped_file is not None:
            mapped_file.region  # noqa: B018
    except OffsetOutOfRangeError:
        pass


def _without_small(batches: Iterator[pa.RecordBatch], columns: Columns) -> Iterator[pa.RecordBatch]:
    # The same rows; batches of few rows are joined with the ones after them.
    capacity, room = columns.out.capacity, columns.out.byte_limit
    few, little = capacity // _FEW, min(_JOINED_BYTES, room // _FEW)
    held: list[pa.RecordBatch] = []
    rows = size = 0

    def joined() -> pa.RecordBatch:
        nonlocal held, rows, size
        found, held, rows, size = held, [], 0, 0
        return found[0] if len(found) == 1 else columns.pa.concat_batches(found)

    for batch in batches:
        num, more = batch.num_rows, 0 if columns.views else batch.nbytes
        if held and (rows + num > capacity or size + more > min(_FEW * little, room)):
            yield joined()
        held.append(batch)
        rows, size = rows + num, size + more
        if rows >= few or size >= little:
            yield joined()
    if held:
        yield joined()
