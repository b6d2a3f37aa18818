"""Messages as Apache Arrow columns: the schema, and the ways from the log, a queue or the index to it.

Owns the names and types of the columns and the making of Arrow arrays over the core's buffers, without a copy.  It never
decodes a record (`_columns.ArrowColumns` does that) and imports pyarrow only when columns are asked for.  A row equals the
`MessageExt` that the same place of the log gives.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rmqstore import _numpy as np
from rmqstore._columns import COLUMN_NAMES, ArrowColumns
from rmqstore._core import PRE_FILL_SIZE, Region, Verdict, check_record
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.commitlog.located import located
from rmqstore.commitlog.pieces import Pieces, ScanProgress
from rmqstore.consumequeue.batch_consume_queue import BatchConsumeQueue
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.consumequeue.unit_queue import NO_TAGS_CODE
from rmqstore.errors import CorruptionError, MissingDependencyError, OffsetOutOfRangeError, UnsupportedFormatError
from rmqstore.message import decompress_body, encode_java_utf8, host_from_bytes
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
# A scan on several threads cuts the log in pieces of so many bytes, longer ones for batches of many rows, so that few batches
# end with a piece; how far after that the next record is looked for, and how many threads decode at most.
_PIECE, _LONG_PIECE = 8 * 1024 * 1024, 32 * 1024 * 1024
_PIECE_BYTES_PER_ROW = 512
_PIECE_SEARCH = 256 * 1024
_THREADS = 4
# Where pieces have few of the rows that are asked for, batches are put together that have less than this part of the rows that
# a batch may have, and fewer bytes than this; what is put together has to be copied.
_FEW = 8
_JOINED_BYTES = 1024 * 1024
# Units of a queue that are looked at together.
_QUEUE_STEP = 8192
_INT64_MAX = 2**63 - 1


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
    """tuple of str: the names that `columns` asks for, in its order; `DEFAULT_COLUMNS` for None.

    Raises
    ------
    ValueError
        A name that no column has, or one that comes twice.
    """
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
    """frozenset of str: the columns that `read_dictionary` names; ValueError for one that cannot be a dictionary."""
    names = frozenset((read_dictionary,) if isinstance(read_dictionary, str) else read_dictionary)
    for name in names - DICTIONARY_COLUMNS:
        raise ValueError(f"column {name!r} cannot be a dictionary; {', '.join(sorted(DICTIONARY_COLUMNS))} can")
    return names


def scan_schema(
    columns: Iterable[str] | None = None, views: bool = False, read_dictionary: Iterable[str] = ()
) -> pa.Schema:
    """pyarrow.Schema: the names and types of these columns (docs/columns.md); without names those of a scan.

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
    # The type of each column before any becomes a dictionary: pyarrow makes new objects whenever a schema is asked.
    return tuple(field.type for field in _schema(names, views))


def _decompress(body: bytes, sys_flag: int) -> bytes | None:
    # Damage is a value in a column; a missing library is an error, as it would hide sound bodies.
    try:
        return decompress_body(body, sys_flag)
    except (CorruptionError, UnsupportedFormatError):
        return None


def _judge_body(body: bytes, sys_flag: int) -> bytes | None:
    # As `_decompress` where no body is asked for: a missing library hides none, and is no reason to end a scan.
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
    """Which columns are decoded, and how their batches are made.

    Attributes
    ----------
    columns : iterable of str, optional
        Their names, checked by `chosen_columns`, which makes a tuple of them.
    batch_size : int
        Rows of a batch at most.
    views : bool
        Texts and bytes are views into the segments, which stay mapped for as long as a part of a batch lives.
    read_dictionary : iterable of str
        Columns of `DICTIONARY_COLUMNS` that become dictionaries; each batch has its own.
    byte_limit : int, optional
        Bytes of bodies and properties with which a batch ends; 64 MiB by default.
    decode : bool
        Look at the compression of bodies where ``body`` or ``corrupt`` is asked for.

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


def table_options(selection: Selection, columns: Iterable[str] | None, views: bool) -> ColumnOptions:
    """Return the options of a table of at most `selection.max_num` rows."""
    rows = 8192 if selection.max_num is None else min(max(selection.max_num, 1), 8192)
    return ColumnOptions(columns, rows, views)


class Columns:
    """Arrow record batches out of `ArrowColumns`.

    Parameters
    ----------
    options : ColumnOptions
    crc_check : int
        See `CommitLog.crc_check`.
    selection : Selection, optional
        Only rows of these topics, queues, tags and store times.
    by_place : bool
        See `Selection.choose`.
    """

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
        """pyarrow.RecordBatch: the rows that were filled in since the last one."""
        return self.pa.RecordBatch.from_arrays(self.take_arrays(), schema=self.schema)

    def take_arrays(self) -> list[pa.Array]:
        """list of pyarrow.Array: the columns of `take`."""
        arrays = self.out.take_arrays(self.pa.Array._import_from_c, self._stored_types)
        if self._encoded:
            return [
                self._dictionary(array) if name in self._encoded else array
                for name, array in zip(self.schema.names, arrays, strict=True)
            ]
        return arrays

    def _dictionary(self, texts: Any) -> Any:
        # Of plain strings even where these are views: fewer readers know dictionaries of views.
        found = texts.dictionary_encode()
        return self.pa.DictionaryArray.from_arrays(found.indices, found.dictionary.cast(self.pa.string()))


def scan_log(
    log: CommitLog, selection: Selection, options: ColumnOptions, *, use_threads: bool, refresh: bool
) -> pa.RecordBatchReader:
    """The chosen messages of a log, see `MessageStore.scan`.

    Parameters
    ----------
    refresh : bool
        Look first how far another process wrote.
    """

    def make() -> Columns:
        return Columns(options, log.crc_check, selection)

    made = make()
    if refresh:
        log.refresh()
    end = log.max_offset if selection.end_phy_offset is None else selection.end_phy_offset
    # What goes before it is read is missed from here on.
    begin = max(selection.begin_phy_offset or 0, log.min_offset)
    batches = record_batches(log, made, begin, end, make if use_threads else None)
    # Whoever iterates gets our exceptions; the reader holds the generator alone, so that its threads end with it.
    return made.pa.RecordBatchReader.from_batches(made.schema, batches)


def record_batches(
    log: CommitLog,
    columns: Columns,
    begin: int | None,
    end: int | None,
    more: Callable[[], Columns] | None = None,
) -> Iterator[pa.RecordBatch]:
    """The chosen records from `begin` to `end` as record batches, none of them empty.

    Parameters
    ----------
    begin, end : int, optional
        As of `CommitLog.entries`; what the log lacks between them is said in a warning.
    more : callable, optional
        Makes columns like `columns`, for threads that decode ahead of the caller where that is worth it; without it there
        are none.  The rows are the same, and so is their order.
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
            log.files, stop, more, size=size, search=_PIECE_SEARCH, threads=_THREADS, caller_works=True
        )
        if pieces.thread_num > 1:
            batches = _batches_of_pieces(log, pieces, columns, at, stop, size)
            try:
                yield from _without_small(batches, columns)
            finally:
                # Whoever holds on to the frames of an exception does not keep the threads.
                batches.close()
            return
    for _ in log.fill(columns.out, begin, end, partial(_passed_over, log)):
        if columns.out.count:
            yield columns.take()


def _passed_over(log: CommitLog, begin: int, end: int, verdict: Verdict | None) -> None:
    # Damage in a segment is for `verify`; a segment that is not there may have been when the scan began.
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
    # The record batches of a scan from `at` to `stop`.  Those in front of the first piece of another thread, and of pieces that
    # did not come to their end, are made here.
    closing = threading.Event()
    told = partial(_passed_over, log)

    def decode(made: Columns, region: Region, begin: int, limit: int, base: int) -> tuple[list[pa.RecordBatch], int]:
        # The batches of a piece, and where the pass goes on: before its end, where compressed bodies became so large that no
        # more of them is to be held at once.
        batches: list[pa.RecordBatch] = []
        held, reached = 0, base + begin
        try:
            for goes_on in log.fill(made.out, base + begin, base + limit, told):
                reached = goes_on
                if made.out.count:
                    batches.append(made.take())
                    # Of views only what was copied is new memory, and little of a batch is.
                    held += 0 if made.views else batches[-1].nbytes
                if held >= _BATCH_BYTES or closing.is_set():
                    break
            return batches, reached
        finally:
            if made.out.count:
                # What was filled in before an error is not to be in front of the next piece.
                made.out.take()

    passed = ScanProgress(log.files)
    # The first batch is made before there is any thread: some want no more than that.
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
            # What went wrong in another thread goes wrong here again, or does not.
            began = at
            for goes_on in log.fill(columns.out, began, until if until >= 0 else min(began + size, stop), told):
                at = goes_on
                if columns.out.count:
                    yield columns.take()
                if is_first:
                    is_first = False
                    pieces.launch(decode)
            if at <= began:
                # The log was cut meanwhile.
                return
    finally:
        closing.set()
        pieces.close()


def _check_open(log: CommitLog, at: int) -> None:
    # What was decoded ahead is not given any more when the store was closed; that a segment expired is not an error.
    mapped_file = log.files.find(at)
    try:
        if mapped_file is not None:
            mapped_file.region  # noqa: B018
    except OffsetOutOfRangeError:
        pass


def _without_small(batches: Iterator[pa.RecordBatch], columns: Columns) -> Iterator[pa.RecordBatch]:
    # The same rows, with batches of few rows put together with the ones after them.
    capacity, few = columns.out.capacity, columns.out.capacity // _FEW
    room = columns.out.byte_limit
    little = min(_JOINED_BYTES, room // _FEW)
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        num = batch.num_rows
        if not held and num >= few:
            yield batch
            continue
        more = 0 if columns.views else batch.nbytes
        is_small = num < few and more < little
        if held and (rows + num > capacity or size + more > min(_FEW * little, room)):
            yield from _put_together(columns, held)
            rows = size = 0
            held = []
        if not held and not is_small:
            yield batch
            continue
        held.append(batch)
        rows, size = rows + num, size + more
        if rows >= few or size >= little:
            yield from _put_together(columns, held)
            rows = size = 0
            held = []
    yield from _put_together(columns, held)


def _put_together(columns: Columns, batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    if len(batches) < 2:
        return batches
    return [columns.pa.concat_batches(batches)]


def rows_at(
    log: CommitLog,
    columns: Columns,
    phy_offsets: np.ndarray,
    sizes: np.ndarray | None = None,
    queue: AnyConsumeQueue | None = None,
    queue_offsets: np.ndarray | None = None,
) -> tuple[list[pa.RecordBatch], np.ndarray]:
    """(list of pyarrow.RecordBatch, array): the chosen records at these places, and the numbers of those that became rows.

    Where these are the places of a queue's units, a row whose record is another message is marked as corrupt.
    """
    topic = None if queue is None else encode_java_utf8(queue.topic)
    batches = []
    taken = np.zeros(len(phy_offsets), np.uint8)
    nowhere = np.empty(0, np.int32)
    for part, regions, bases, numbers in located(log, phy_offsets):
        first, num = 0, len(numbers)
        while first < num:
            first = columns.out.fill_at(
                regions,
                bases,
                numbers,
                phy_offsets[part],
                nowhere if sizes is None else sizes[part],
                taken[part],
                first,
                topic,
                0 if queue is None else queue.queue_id,
                None if queue_offsets is None else queue_offsets[part],
            )
            if first < num:
                batches.append(columns.take())
    if columns.out.count:
        batches.append(columns.take())
    return batches, np.flatnonzero(taken)


def queue_places(
    queue: AnyConsumeQueue,
    queue_offset: int,
    end: int = _INT64_MAX,
    on_gone: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """(arrays): phy offset, queue offset, size, tags code of the units from `queue_offset` to `end`, some at a time.

    `NO_TAGS_CODE` stands for a tags code that is lost, as where a file was cut short within the unit.

    Parameters
    ----------
    on_gone : callable, optional
        Who knows that there were units from `queue_offset` to `end` is told of those that are not there (any more): the
        first queue offset, and the one after the last.  Pre-fill units, and queue offsets that a batch queue has no
        place for, are not gone.  By default those that lie between others are said in a warning.
    """
    if isinstance(queue, BatchConsumeQueue):
        yield from _places_of_batches(queue, queue_offset, end, on_gone)
        return
    if on_gone is not None and queue.in_memory:
        # Of what went from the front of a database nothing is left, not even a gap between files.
        first = min(queue.first_unit_at_or_after(0), end)
        if queue_offset < first:
            on_gone(queue_offset, first)
            queue_offset = first
    tell = queue.warn_of_lost if on_gone is None else on_gone
    torn = queue.torn_units()
    while queue_offset < min(queue.max_queue_offset, end):
        phy_offsets, sizes, codes = _units(queue, queue_offset, min(_QUEUE_STEP, end - queue_offset), on_gone)
        if len(phy_offsets):
            if (sizes <= 0).any():
                # A file was cut short, or a page of it lost.
                edges = np.flatnonzero(np.diff(np.concatenate([[False], sizes <= 0, [False]])))
                for begin, until in edges.reshape(-1, 2).tolist():
                    tell(queue_offset + begin, queue_offset + until)
            queue_offsets = np.arange(queue_offset, queue_offset + len(phy_offsets))
            if torn:
                codes = np.where(np.isin(queue_offsets, torn), NO_TAGS_CODE, codes)
            yield phy_offsets, queue_offsets, sizes, codes
            queue_offset += len(phy_offsets)
        else:
            following = min(queue.next_file_offset(queue_offset), end)
            tell(queue_offset, following)
            queue_offset = following
    if on_gone is not None and queue_offset < end:
        on_gone(queue_offset, end)


def _units(
    queue: ConsumeQueue, queue_offset: int, count: int, on_gone: Callable[[int, int], None] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    try:
        return queue.units(queue_offset, count)
    except OffsetOutOfRangeError:
        # Its file was deleted since it was listed.
        if on_gone is None:
            raise
        return np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int64)


def _places_of_batches(
    queue: BatchConsumeQueue, queue_offset: int, end: int, on_gone: Callable[[int, int], None] | None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    # As `queue_places`.  Unit by unit, as a damaged one may say any queue offset.
    tell = queue.warn_of_lost if on_gone is None else on_gone
    at, number = queue_offset, queue.start_of(queue_offset)
    previous = number - 1 if queue.follows(number) else -2
    if on_gone is not None and number == 0:
        # Who knows of older ones is told.
        previous = -2
    reached: int | None = None
    while number < queue.unit_num and at < end:
        try:
            found = list(queue.numbered(number, _QUEUE_STEP, reached))
        except OffsetOutOfRangeError:
            if on_gone is None:
                raise
            # Its file was deleted since it was listed.
            number = queue.next_file_unit(number)
            previous = -2
            continue
        units = []
        for here, unit in found:
            behind = unit.queue_offset + max(unit.num, 1)
            if at < unit.queue_offset and here != previous + 1:
                tell(at, min(unit.queue_offset, end))
            if unit.queue_offset >= end:
                at = end
                break
            previous, at = here, max(at, behind)
            if behind > queue_offset:
                units.append(unit)
        if units:
            yield (
                np.array([unit.phy_offset for unit in units], np.int64),
                np.array([unit.queue_offset for unit in units], np.int64),
                np.array([unit.size for unit in units], np.int32),
                np.array([unit.tags_code for unit in units], np.int64),
            )
        last, unit = found[-1]
        reached = unit.queue_offset + max(unit.num, 1)
        number = next(queue.numbers(last + 1), queue.unit_num)
    if on_gone is not None and at < end:
        on_gone(at, end)


def may_match(queue: AnyConsumeQueue, selection: Selection, codes: np.ndarray) -> np.ndarray:
    """array of bool: which units with these tags codes may lead to a message with the selected tags."""
    return selection.may_have_codes(codes if selection.tags is None else queue.resolved_codes(codes))


def queue_table(
    log: CommitLog, queue: AnyConsumeQueue | None, columns: Columns, selection: Selection, low: int
) -> pa.Table:
    """Read messages of a queue, whose first queue offset is `low`, as a table; see `MessageStore.get_table`."""
    batches: list[pa.RecordBatch] = []
    num = 0
    limit = _INT64_MAX if selection.max_num is None else selection.max_num
    begin = max(selection.begin_queue_offset or 0, low)
    end = _INT64_MAX if selection.end_queue_offset is None else selection.end_queue_offset
    places = () if queue is None else queue_places(queue, begin, end)
    for phy_offsets, queue_offsets, sizes, unit_codes in places:
        if queue is not None and selection.tags is not None:
            kept = may_match(queue, selection, unit_codes)
            phy_offsets, queue_offsets, sizes = phy_offsets[kept], queue_offsets[kept], sizes[kept]
        else:
            phy_offsets, queue_offsets, sizes = (each[: limit - num] for each in (phy_offsets, queue_offsets, sizes))
        found, rows = rows_at(log, columns, phy_offsets, sizes, queue, queue_offsets)
        before = phy_offsets < log.min_offset
        if before.any():
            # The first unit that is asked for leads into the log.
            is_real = (sizes > 0) & ((phy_offsets != 0) | (sizes != PRE_FILL_SIZE))
            went = phy_offsets[is_real & before]
            if len(went):
                log.warn_of_missing(int(went.min()), log.min_offset)
        batches += found
        num += len(rows)
        if num >= limit:
            break
    return columns.pa.Table.from_batches(batches, schema=columns.schema).slice(0, selection.max_num)


def queue_batches(
    log: CommitLog,
    queue: AnyConsumeQueue,
    columns: Columns,
    selection: Selection,
    on_damage: Callable[[int, int, Verdict | None], None] | None = None,
    on_gone: Callable[[int, int], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    """The messages of the units of a queue between the queue offsets of `selection`, in queue order.

    Parameters
    ----------
    columns : Columns
        Of the same selection.
    on_damage : callable, optional
        Told of each unit that leads to no record of its size, as by `CommitLog.fill`.
    on_gone : callable, optional
        As of `queue_places`.
    """
    begin = selection.begin_queue_offset or 0
    end = queue.max_queue_offset if selection.end_queue_offset is None else selection.end_queue_offset
    for phy_offsets, queue_offsets, sizes, unit_codes in queue_places(queue, begin, end, on_gone):
        # What a queue was filled up with leads nowhere.
        kept = ((phy_offsets != 0) | (sizes != PRE_FILL_SIZE)) & may_match(queue, selection, unit_codes)
        if on_gone is not None:
            kept &= sizes > 0
        if selection.begin_phy_offset is not None:
            kept &= phy_offsets >= selection.begin_phy_offset
        if selection.end_phy_offset is not None:
            kept &= phy_offsets < selection.end_phy_offset
        phy_offsets, queue_offsets, sizes = phy_offsets[kept], queue_offsets[kept], sizes[kept]
        batches, rows = rows_at(log, columns, phy_offsets, sizes, queue, queue_offsets)
        if on_damage is not None and len(rows) < len(phy_offsets):
            for place in np.setdiff1d(np.arange(len(phy_offsets)), rows).tolist():
                phy_offset, size = int(phy_offsets[place]), int(sizes[place])
                verdict, found = _judge(log, phy_offset)
                if verdict != Verdict.RECORD or found != size:
                    wrong = Verdict.BAD_SIZE if verdict == Verdict.RECORD else verdict
                    on_damage(phy_offset, phy_offset + size, wrong)
        yield from batches


def _judge(log: CommitLog, phy_offset: int) -> tuple[Verdict | None, int]:
    # What begins there and its size; None where no segment holds it.
    try:
        mapped_file = log.segment(phy_offset)
        pos = phy_offset - mapped_file.file_from_offset
        return check_record(mapped_file.region, pos, mapped_file.file_from_offset, 0)[:2]
    except OffsetOutOfRangeError:
        return None, 0
