"""What has a key, and what is in the log: questions that a store answers from the index and the commit log.

Owns the part of `MessageStore` that asks, with its words: each call makes a `Selection` of its arguments, which `Querying` or a
scan answers.  It changes nothing on disk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rmqstore._read import query_first
from rmqstore.arguments import IndexType, Moment, milliseconds, one_text, shown, whole_number
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.index.log_index import DEFAULT_LOG_BYTES
from rmqstore.message import MessageExt
from rmqstore.selection import INT64_MAX, Selection, of_key, of_scan
from rmqstore.store.columns import ColumnOptions
from rmqstore.store.light_queues import refuse_light_queues
from rmqstore.store.querying import LogLook, Querying
from rmqstore.store.results import QueryResult
from rmqstore.store.store_state import StoreState

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["LogQuestions"]


def _offset(offset: int | None, name: str) -> int | None:
    return None if offset is None else whole_number(offset, name)


class LogQuestions:
    """Answers questions about keys and about the log of one store; a base of `MessageStore`."""

    commit_log: CommitLog
    _state: StoreState
    _querying: Querying

    # ---------------------------------------------------------------------------------------------------- what has a key

    @query_first
    def query_message(
        self,
        topic: str,
        key: str,
        max_num: int = 64,
        begin: Moment | None = None,
        end: Moment | None = None,
        max_log_bytes: int | None = DEFAULT_LOG_BYTES,
        progress: Callable[[int, int], object] | None = None,
        *,
        index_type: IndexType | None = None,
        compat: bool = False,
    ) -> QueryResult:
        """Find messages by key: newest first, each once, every one checked against its topic and key.

        Index files are searched, the index in RocksDB (``indexRocksDBEnable``), and what of the log neither covers: an index
        file is lost or damaged, or the broker died before it indexed the newest records.  That part is scanned once while
        the store is open.  As RocksDB has no entry of a record without a unique key, segments that begin with such records are
        scanned, too.

        Parameters
        ----------
        topic, key : str
            A key, a unique key, or with ``index_type="T"`` a tag.
        max_num : int
            The greatest number of messages; any number.
        begin, end : int or datetime, optional
            Store time range, inclusive and exact: ms since epoch, or a `datetime` (aware, or naive as local time).
        max_log_bytes : int, optional
            Scan at most this part of the log that the index does not cover; None = all of it.  The result is not `complete`
            where a part was not scanned.
        progress : callable, optional
            Called with the number of bytes of it that were scanned, and that of all.
        index_type : {None, "U", "K", "T"}
            None: unique key or keys; "U" only the unique key, "K" only the keys, "T" the tag.
        compat : bool
            Answer like RocketMQ's ``queryMessage`` (5.5.0): at most 64, ascending offsets, with duplicates and messages with
            other keys of the same hash, times compared by whole seconds, without a scan.

        Raises
        ------
        ValueError
            A time looks like seconds (see `rmqstore.arguments.milliseconds`), or `index_type` is unknown.
        MissingDependencyError
            The index is in RocksDB, rocksdict is not installed, and the log alone has no answer.
        UnsupportedFormatError
            With `compat`: the index is in RocksDB, or a part of the messages is in tiered storage.
        """
        self._state.check_open()
        selection = of_key(topic, key, max_num, begin, end, index_type)
        look = LogLook(_offset(max_log_bytes, "max_log_bytes"), progress)
        return self._querying.like_java(selection) if compat else self._querying.query(selection, look)

    def query_offsets(
        self,
        topic: str,
        key: str,
        max_num: int = 64,
        begin: Moment = 0,
        end: Moment = INT64_MAX,
        *,
        index_type: IndexType | None = None,
    ) -> list[int]:
        """list of int: phy offsets as RocketMQ's index service (5.5.0) answers, newest first, quirks included.

        Parameters
        ----------
        begin, end : int or datetime
            As for `query_message`, compared by whole seconds.
        index_type : {None, "U", "K", "T"}
            "T" asks for a tag; unique keys and keys share one form.

        Raises
        ------
        UnsupportedFormatError
            As for `query_message` with `compat`.
        """
        self._state.check_open()
        for name, moment in (("begin", begin), ("end", end)):
            # None has no meaning here.
            milliseconds(moment, name)
        return self._querying.offsets(of_key(topic, key, max_num, begin, end, index_type)).phy_offsets

    def query_table(
        self,
        keys: Any,
        topic: str | Iterable[str],
        columns: Iterable[str] | None = None,
        max_num: int = 64,
        begin: Moment | None = None,
        end: Moment | None = None,
        *,
        index_type: IndexType | None = None,
        max_log_bytes: int | None = DEFAULT_LOG_BYTES,
        progress: Callable[[int, int], object] | None = None,
        views: bool = False,
    ) -> pa.Table:
        """Find the messages of many keys at once, each key like `query_message` does, as an Arrow table.

        Parameters
        ----------
        keys : sequence of str, or pyarrow array of strings
        topic : str or sequence of str
            The topic of all keys, or one for each.
        max_num : int
            The greatest number of rows for each key.
        begin, end, index_type, max_log_bytes, progress
            As for `query_message`.
        columns, views
            As for `scan`, whose errors are also raised here.

        Returns
        -------
        pyarrow.Table
            The columns ``key`` and ``key_number`` (its place among `keys`), then those asked for; in the order of the keys,
            and of each key the newest message first.  A message that several keys find has a row for each.

        Raises
        ------
        TypeError
            A key that is not text.
        """
        self._state.check_open()
        selection = Selection(
            begin=begin, end=end, index_type=index_type, max_num=min(whole_number(max_num, "max_num"), INT64_MAX)
        ).check_times()
        for name, given in (("keys", keys), ("topic", topic)):
            # What is in an array of Arrow is looked at where it is read.
            if not isinstance(given, Iterable) or isinstance(given, (bytes, bytearray)):
                raise TypeError(f"{name} is {shown(given)}; give a text, or several")
        look = LogLook(_offset(max_log_bytes, "max_log_bytes"), progress)
        return self._querying.table(keys, topic, selection, ColumnOptions(columns, views=views), look)

    # ------------------------------------------------------------------------------------------------ what is in the log

    def message_at(self, phy_offset: int) -> MessageExt:
        """Read the message whose record begins at `phy_offset`.

        Raises
        ------
        OffsetOutOfRangeError
            The offset is outside the log.
        CorruptionError
            No record begins there.
        ChecksumError
            A CRC does not agree.
        """
        self._state.check_open()
        if type(phy_offset) is not int:
            phy_offset = whole_number(phy_offset, "phy_offset")
        return self.commit_log.message_at(phy_offset)

    def message_by_id(self, msg_id: str, topic: str | None = None) -> MessageExt:
        """Read the message with this offset message id (32 or 56 hex digits), or with this producer's id (property UNIQ_KEY).

        Parameters
        ----------
        topic : str, optional
            Where a producer's id is looked for; by default in every topic that has a queue, as it is indexed by topic.

        Raises
        ------
        InvalidMessageError
            The text is not an offset message id, and no message has it as the producer's id.
        OffsetOutOfRangeError, CorruptionError, ChecksumError
            As for `message_at`, where no message has it as the producer's id.
        OSError
            It was not found, and a folder of queues cannot be read: it may be of a topic there.
        """
        self._state.check_open()
        topic = None if topic is None else one_text(topic, "topic")
        return self._querying.message_by_id(one_text(msg_id, "msg_id"), topic)

    def phy_offset_by_id(self, msg_id: str, topic: str | None = None) -> int:
        """int: phy offset of the message that `message_by_id` returns, damaged or not; parameters and errors are the same.

        Both kinds of id may have 32 hex digits.  A record at the place that an offset message id names must have that id;
        otherwise the id is looked for as a producer's, and counts as an offset message id again if no message has it (the
        broker's address may have changed).
        """
        self._state.check_open()
        topic = None if topic is None else one_text(topic, "topic")
        return self._querying.phy_offset_by_id(one_text(msg_id, "msg_id"), topic)

    def messages(self, begin_phy_offset: int | None = None, end_phy_offset: int | None = None) -> Iterator[MessageExt]:
        """Iterate over the messages of the log in order; damaged ranges are skipped (`verify` reports them).

        A segment that is missing, or that retention deletes while this runs, is named in a warning.
        """
        state, log = self._state, self.commit_log
        state.check_open()
        begin_phy_offset = _offset(begin_phy_offset, "begin_phy_offset")
        end_phy_offset = _offset(end_phy_offset, "end_phy_offset")
        if state.read_only:
            log.refresh()
        for page in log.pages(begin_phy_offset, end_phy_offset, on_missing=log.warn_of_missing):
            if isinstance(page, list):
                for message in page:
                    yield message
                    # The log reads ahead, and what it has read must not outlive the store.
                    if state.closed:
                        state.check_open()

    def scan(
        self,
        columns: Iterable[str] | None = None,
        *,
        topic: str | Iterable[str] | None = None,
        queue_id: int | Iterable[int] | None = None,
        tags: str | Iterable[str] | None = None,
        begin_phy_offset: int | None = None,
        end_phy_offset: int | None = None,
        begin: Moment | None = None,
        end: Moment | None = None,
        batch_size: int = 8192,
        use_threads: bool = True,
        views: bool = False,
        read_dictionary: Iterable[str] = (),
    ) -> pa.RecordBatchReader:
        """Read the messages of the log in order as Arrow record batches, in which only the columns asked for are decoded.

        docs/columns.md has the columns and their types.  Messages that are put after the call are left out.  A store with
        tiered storage reads first, queue by queue, what only that has; `phy_offset` counts in the tiered log of the queue there.

        Parameters
        ----------
        columns : iterable of str, optional
            Names, in the order of the result; by default `rmqstore.store.columns.DEFAULT_COLUMNS`.
        topic, queue_id : str, int, or iterables of them, optional
            Only these topics and queues.  Light queues (``%LMQ%...``) are refused: `get_table` reads them.
        tags : str or iterable of str, optional
            As for `get_message`.
        begin_phy_offset, end_phy_offset : int, optional
            Records that begin at or after the first and before the second; with either, only of the local log.
        begin, end : int or datetime, optional
            Store time range, both inclusive: ms since epoch, or a `datetime` (aware, or naive as local time).
        batch_size : int
            The greatest number of rows of a batch, 1 to 2**30; bodies and properties of a batch take at most 64 MiB.
        use_threads : bool
            Decode a log of more than a few MiB ahead of the caller, on up to four threads, which start after the first batch
            and end with the reader.  Rows and their order are the same; batches may end elsewhere.
        views : bool
            Do not copy texts and bytes: values of the types ``string_view`` and ``binary_view`` point into mapped segments,
            which stay mapped as long as a batch, or anything made of it without a copy, is there (docs/mmap.md).  Text that is
            not UTF-8, decompressed bodies, hosts and message ids are copied.
        read_dictionary : iterable of str
            Columns to encode as dictionaries, one for each batch: "topic", "tags", "born_host", "store_host".

        Returns
        -------
        pyarrow.RecordBatchReader
            For any library that reads Arrow streams; batches are not empty.  A record whose CRC does not agree is a row with
            ``corrupt`` set and its body as stored; damaged ranges are skipped (`verify` reports them).

        Raises
        ------
        ValueError
            An unknown column, a number out of range, or a time that looks like seconds.
        UnsupportedFormatError
            A topic is a light queue.
        MissingDependencyError
            pyarrow is not installed, or too old for `views`; while reading, the library of a compression is not.
        StoreClosedError
            The store was closed, also while reading.  Arrow's stream interface passes errors as text only: other libraries
            raise their own exception with that text.
        """
        state = self._state
        state.check_open()
        batch_size = whole_number(batch_size, "batch_size")
        if not 1 <= batch_size <= 1 << 30:
            raise ValueError(f"batch_size is {batch_size} rows; give 1 to 2**30")
        selection = dataclasses.replace(
            of_scan(topic, queue_id, tags, begin, end),
            begin_phy_offset=_offset(begin_phy_offset, "begin_phy_offset"),
            end_phy_offset=_offset(end_phy_offset, "end_phy_offset"),
        )
        refuse_light_queues(self.commit_log, state.queue, selection.topics)
        options = ColumnOptions(columns, batch_size, views, read_dictionary)
        return state.older.scan(selection, options, use_threads=use_threads)
