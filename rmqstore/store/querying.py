"""Questions about keys and about the log: messages by key, by tag and by id, tables and scans.

An index that turns out to be damaged is asked again without the damaged part.  Records that no index covers are searched in the
log; `QueryResult.uncovered` has the ranges that were not searched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rmqstore._core import KeyKind
from rmqstore.arguments import (
    DEFAULT_LOG_BYTES,
    IndexType,
    Moment,
    exact_milliseconds,
    milliseconds,
    one_text,
    plain_text,
    shown,
    whole_number,
)
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.errors import InvalidMessageError, OffsetOutOfRangeError, UnsupportedFormatError
from rmqstore.index.index_service import QueryOffsetResult
from rmqstore.index.key_source import Candidates, KeySource, Merged, SoughtKeys, is_replaced
from rmqstore.index.log_index import LogIndex
from rmqstore.message import MessageExt, parse_message_id
from rmqstore.message._read import KeyQuery, KeyQuestions
from rmqstore.selection import INT64_MAX, INT64_MIN, Selection, of_key, of_scan
from rmqstore.spans import without
from rmqstore.store.columns import ColumnOptions
from rmqstore.store.local_queue import refuse_light_queues
from rmqstore.store.placed_columns import AskedKeys, first_places, key_table, newest_first
from rmqstore.store.results import QueryResult
from rmqstore.store.store_state import LOOK_INTERVAL, StoreState

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["LogQuestions", "LogSearch", "Querying", "java_times"]

T = TypeVar("T")

_KEY_KINDS = {
    None: int(KeyKind.ANY_KEY),
    "U": int(KeyKind.UNIQUE_KEY),
    "K": int(KeyKind.KEYS_ONLY),
    "T": int(KeyKind.TAG),
}


class Querying:
    """Answers the queries by key of one store that `KeyQuery` does not answer."""

    def __init__(self, state: StoreState):
        self.state = state
        self.path, self.config, self.read_only = state.path, state.config, state.read_only
        self.commit_log, self.index_service = state.commit_log, state.index_service
        self.database = state.database_index
        if self.index_service is not None:
            state.key_query = KeyQuery(
                self.index_service,
                self.commit_log.region_of,
                self.commit_log.crc_check,
                self.commit_log.files,
                LOOK_INTERVAL if state.read_only else math.inf,
            )
            # It reads only the local index.
            state.key_query.closed = not state.older.one_log

    def query(self, selection: Selection, look: LogSearch) -> QueryResult:
        """Find messages by key, see `MessageStore.query_message`; those in the log, which are newer, come first."""
        return self.state.older.with_key(self._in_log(selection, look), selection)

    def _in_log(self, selection: Selection, look: LogSearch) -> QueryResult:
        if self.index_service is None:
            return QueryResult(uncovered=self.whole_log())
        low, high = selection.times
        if (selection.max_num or 0) < 0 or low > high:
            return QueryResult()
        return self.ask_trusted(
            lambda uncovered: self._exactly(selection, (*uncovered, *self.state.lost_log)), look, selection.index_type
        )

    def table(
        self, keys: Any, topic: str | Iterable[str], selection: Selection, options: ColumnOptions, look: LogSearch
    ) -> pa.Table:
        """Find the messages of many keys, see `MessageStore.query_table`."""
        asked, older = AskedKeys(keys, topic, selection), self.state.older
        if not older.one_log:
            return older.table(asked, options, lambda selection: self._in_log(selection, look))

        def ask() -> pa.Table:
            source = None if self.index_service is None else self.source
            return self.state.settled(key_table, self.commit_log, source, asked, options)

        if self.index_service is None:
            return ask()
        return self.ask_trusted(lambda uncovered: ask(), look, selection.index_type)

    @property
    def source(self) -> KeySource:
        """KeySource: the present index."""
        return Merged(self.files, self.database) if self.database.is_used() else self.files

    @property
    def files(self) -> LogIndex:
        """LogIndex: the index files, and the records that only the log has; for a store with an index."""
        assert self.state.log_index is not None
        return self.state.log_index

    def ask_trusted(
        self, ask: Callable[[tuple[tuple[int, int], ...]], T], look: LogSearch, index_type: str | None
    ) -> T:
        """Return the answer of `ask`, which takes the parts of the log that no index covers; ask again after damage."""
        assert self.index_service is not None
        while True:
            uncovered = self.cover_log(look, index_type)
            trusted = self.database.damage
            found = ask(uncovered)
            if not self.index_service.note_damage() and self.database.damage is trusted:
                if uncovered and self.database.missing is not None:
                    # The messages may be in the index that cannot be opened.
                    raise self.database.missing
                return found

    def offsets(self, selection: Selection) -> QueryOffsetResult:
        """Return the answer of RocketMQ's index service, see `MessageStore.query_offsets`."""
        self.state.check_open()
        if self.index_service is None:
            return QueryOffsetResult([], 0, 0)
        self._follow_index()
        self._check_has_files()
        low, high = (int(max(min(each, INT64_MAX), INT64_MIN)) for each in java_times(selection))
        text = selection.index_text
        return self.index_service.query_offset(selection.topic, text, selection.max_num or 0, low, high)

    def _follow_index(self) -> None:
        # New entries are seen at once, new files are not.
        index_service, key_query = self.index_service, self.state.key_query
        if not self.read_only or index_service is None or key_query is None:
            return
        now = time.monotonic()
        try:
            up_to_date = index_service.has_room()
            if up_to_date and now - key_query.looked_at >= LOOK_INTERVAL:
                up_to_date = not index_service.was_replaced()
                key_query.looked_at = now
        except (FileNotFoundError, OffsetOutOfRangeError):
            up_to_date = False
        if not up_to_date:
            self.state.learn()
            index_service.load()

    def _follow_log(self) -> None:
        # If no index file has room, newer records may be only in the log.
        if not self.read_only or self.index_service is None:
            return
        with contextlib.suppress(FileNotFoundError, OffsetOutOfRangeError):
            if self.index_service.has_room():
                return
        self.commit_log.refresh()

    def _exactly(self, selection: Selection, uncovered: tuple[tuple[int, int], ...]) -> QueryResult:
        source, log, max_num = self.source, self.commit_log, min(selection.max_num or 0, INT64_MAX - 1)
        if source is self.files and not is_replaced(selection):
            assert self.index_service is not None and self.state.key_query is not None
            found = self.state.key_query.find(
                self.index_service.newest_first(), selection.topic, selection.key, _KEY_KINDS[selection.index_type],
                *selection.times, max_num,
            )  # fmt: skip
            if found is not None:
                found.uncovered = uncovered
                return found
        places = first_places(log, source, SoughtKeys.of(selection), max_num + 1)
        found = QueryResult(truncated=len(places) > max_num, uncovered=uncovered)
        for phy_offset in newest_first(places[:max_num]).phy_offsets.tolist():
            message = log.look_up(phy_offset)
            if message is not None:
                found.append(message)
        return found

    def compared(self, selection: Selection, phy_offsets: list[int]) -> Iterator[MessageExt | None]:
        """Yield for each candidate its message, or None where the record does not have the key, or is of another time."""
        log, source = self.commit_log, self.source
        sought, candidates = SoughtKeys.of(selection), Candidates.of([0] * len(phy_offsets), phy_offsets)
        taken = sought.matching(log, candidates)[1]
        source.doubt(sought, candidates[~taken])
        for phy_offset, is_taken in zip(phy_offsets, taken.tolist()):
            yield log.look_up(phy_offset) if is_taken else None

    def _check_has_files(self) -> None:
        # If a broker would not answer from index files, their answer would lack messages.
        database = self.database
        by_database = self.index_service is not None and not self.index_service.names
        if by_database and (database.is_used() or database.damage is not None or database.missing is not None):
            elsewhere = "the index of this store is in RocksDB"
        elif not self.state.older.one_log:
            elsewhere = "a part of the messages is in tiered storage"
        else:
            return
        raise UnsupportedFormatError(
            f"{elsewhere}: RocketMQ's own answer (compat=True, query_offsets) is given for index files alone; ask without it",
            self.path,
        )

    def whole_log(self) -> tuple[tuple[int, int], ...]:
        """Return the whole log as one range; nothing if it is empty."""
        low, high = self.commit_log.min_offset, self.commit_log.max_offset
        return ((low, high),) if low < high else ()

    def cover_log(self, look: LogSearch, index_type: str | None) -> tuple[tuple[int, int], ...]:
        """Cover the whole log for exact questions; return the ranges that are not covered."""
        self._follow_index()
        self._follow_log()
        self.files.cover(*look)
        if self.database.is_used() and self.state.key_query is not None:
            # It reads only index files.
            self.state.key_query.closed = True
        if index_type == "T" and not self.config.index_tags:
            # Index files have no entries of tags.
            return tuple(without(self.commit_log.min_offset, self.commit_log.max_offset, self.database.covered()))
        return self.files.uncovered

    def like_java(self, selection: Selection) -> QueryResult:
        """Return the answer of RocketMQ's queryMessage."""
        # RocketMQ 5.5.0 DefaultMessageStore.queryMessage: up to three rounds, each ending before the oldest hit so far.
        low, high = java_times(selection)
        self.state.check_open()
        self._follow_index()
        self._check_has_files()
        messages: list[MessageExt] = []
        for _ in range(3):
            offsets = self.offsets(dataclasses.replace(selection, begin=low, end=high)).phy_offsets
            if not offsets:
                break
            for number, phy_offset in enumerate(sorted(offsets)):
                message = self.commit_log.look_up(phy_offset)
                if message is None:
                    continue
                if number == 0:
                    high = message.store_timestamp
                messages.append(message)
            if messages or high < low:
                break
        return QueryResult(messages)

    def message_by_id(self, msg_id: str, topic: str | None = None) -> MessageExt:
        """See `MessageStore.message_by_id`."""
        try:
            return self.commit_log.message_at(self.phy_offset_by_id(msg_id, topic))
        except (InvalidMessageError, OffsetOutOfRangeError):
            for message in self.state.older.with_id(msg_id, self.state.topics() if topic is None else [topic]):
                return message
            raise

    def phy_offset_by_id(self, msg_id: str, topic: str | None = None) -> int:
        """See `MessageStore.phy_offset_by_id`."""
        self.state.check_open()
        msg_id = plain_text(msg_id)
        phy_offset, failure = -1, None
        try:
            phy_offset = parse_message_id(msg_id)[1]
            message = self.commit_log.look_up(phy_offset)
            if message is not None and message.msg_id == msg_id.upper():
                return phy_offset
        except InvalidMessageError as error:
            if not isinstance(msg_id, str):
                raise
            message, failure = None, error
        if self.read_only and topic is None:
            # A new topic may have it.
            self.state.learn()
            self.state.queues.refresh()
        names = self.state.topics() if topic is None else [topic]
        for name in names:
            found = self._in_log(Selection((name,), keys=(msg_id,), index_type="U", max_num=1), LogSearch())
            if found:
                return found[0].phy_offset
        if message is not None:
            return phy_offset
        if topic is None:
            # It may be of a topic that cannot be read.
            self.state.queues.check_seen()
        searched = f"nor has a message of {f'topic {topic}' if topic is not None else f'{len(names)} topics'} it as producer's id"
        if failure is not None:
            raise InvalidMessageError(f"{failure.message}; {searched}", failure.path, failure.pos)
        try:
            self.commit_log.message_at(phy_offset)
        except OffsetOutOfRangeError as error:
            raise OffsetOutOfRangeError(
                f"{msg_id} is not an offset message id of this store (phy offset {phy_offset} is outside the log), {searched}",
                self.path,
            ) from error
        return phy_offset


class LogSearch(NamedTuple):
    """The most bytes of the log that are searched because no index covers them (None: all), and a progress callback."""

    max_log_bytes: int | None = DEFAULT_LOG_BYTES
    progress: Callable[[int, int], object] | None = None


def java_times(selection: Selection) -> tuple[float, float]:
    """Return the times of a question to RocketMQ: by default from 0, without an end."""
    low = 0 if selection.begin is None else exact_milliseconds(selection.begin, "begin", up=True)
    return low, INT64_MAX if selection.end is None else exact_milliseconds(selection.end, "end")


def _offset(offset: int | None, name: str) -> int | None:
    return None if offset is None else whole_number(offset, name)


class LogQuestions(KeyQuestions):
    """Answers questions about keys and about the log of one store; a base of `MessageStore`."""

    commit_log: CommitLog
    _state: StoreState
    _querying: Querying

    # ---------------------------------------------------------------------------------------------------- what has a key

    def _query_message(
        self,
        topic: str,
        key: str,
        max_num: int,
        begin: Moment | None,
        end: Moment | None,
        max_log_bytes: int | None,
        progress: Callable[[int, int], object] | None,
        index_type: IndexType | None,
        compat: bool,
    ) -> QueryResult:
        # The queries that `KeyQuery` does not answer.
        self._state.check_open()
        selection = of_key(topic, key, max_num, begin, end, index_type)
        look = LogSearch(_offset(max_log_bytes, "max_log_bytes"), progress)
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
        """Return the phy offsets that RocketMQ's index service (5.5.0) finds, newest first, quirks included.

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
            # None is refused.
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
            # Values of Arrow arrays are checked when they are read.
            if not isinstance(given, Iterable) or isinstance(given, (bytes, bytearray)):
                raise TypeError(f"{name} is {shown(given)}; give a text, or several")
        look = LogSearch(_offset(max_log_bytes, "max_log_bytes"), progress)
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
            The topic to search for a producer's id, which is indexed by topic; by default every topic that has a queue.

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
        """Return the phy offset of the message that `message_by_id` returns, damaged or not; parameters and errors are the same.

        Both kinds of id may have 32 hex digits.  The record at the place in an offset message id must have that id; otherwise the
        id is searched as a producer's.  If no message has it, the place counts (the broker's address may have changed).
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
        self._state.check_open()
        batch_size = whole_number(batch_size, "batch_size")
        if not 1 <= batch_size <= 1 << 30:
            raise ValueError(f"batch_size is {batch_size} rows; give 1 to 2**30")
        selection = dataclasses.replace(
            of_scan(topic, queue_id, tags, begin, end),
            begin_phy_offset=_offset(begin_phy_offset, "begin_phy_offset"),
            end_phy_offset=_offset(end_phy_offset, "end_phy_offset"),
        )
        return self.scan_selected(
            selection, ColumnOptions(columns, batch_size, views, read_dictionary), use_threads=use_threads
        )

    def scan_selected(
        self, selection: Selection, options: ColumnOptions, *, use_threads: bool = True
    ) -> pa.RecordBatchReader:
        """Read the messages of a selection as `scan` does; of it topics, queue ids, tags, store times and phy offsets."""
        self._state.check_open()
        refuse_light_queues(self.commit_log, self._state.queue, selection.topics)
        return self._state.older.scan(selection, options, use_threads=use_threads)
