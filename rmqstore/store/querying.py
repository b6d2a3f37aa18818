"""Finding messages by key, by tag and by id.

Owns which indexes are asked, that they are asked again where one turns out to be damaged, and what is looked for in the log
because no index covers it.  It never says that a message is not there where nobody looked: `QueryResult.uncovered`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rmqstore import _numpy as np
from rmqstore import _read
from rmqstore._core import KeyKind
from rmqstore._read import KeyQuery
from rmqstore.arguments import exact_milliseconds, plain_text
from rmqstore.errors import InvalidMessageError, OffsetOutOfRangeError, UnsupportedFormatError
from rmqstore.index.index_service import QueryOffsetResult
from rmqstore.index.key_source import Candidates, KeySource, Merged, SoughtKeys
from rmqstore.index.log_index import DEFAULT_LOG_BYTES, LogIndex
from rmqstore.message import MessageExt, encode_java_utf8, parse_message_id
from rmqstore.selection import INT64_MAX, INT64_MIN, Selection
from rmqstore.spans import without
from rmqstore.store.columns import ColumnOptions
from rmqstore.store.key_columns import AskedKeys, first_places, key_table, newest_first
from rmqstore.store.results import QueryResult
from rmqstore.store.store_state import LOOK_INTERVAL, StoreState

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["LogLook", "Querying", "java_times"]

T = TypeVar("T")

_KEY_KINDS = {
    None: int(KeyKind.ANY_KEY),
    "U": int(KeyKind.UNIQUE_KEY),
    "K": int(KeyKind.KEYS_ONLY),
    "T": int(KeyKind.TAG),
}


class Querying:
    """Answers queries by key of one store, those that `KeyQuery` leaves to it."""

    def __init__(self, state: StoreState):
        self.state = state
        self.path, self.config, self.read_only = state.path, state.config, state.read_only
        self.commit_log, self.index_service = state.commit_log, state.index_service
        self.database = state.database_index
        # Bound once: every query by key takes it.
        self._region_of = self.commit_log.region_of
        if self.index_service is not None:
            state.key_query = KeyQuery(
                self.index_service,
                self._region_of,
                QueryResult,
                MessageExt,
                self.commit_log.crc_check,
                encode_java_utf8,
                self.commit_log.files,
                LOOK_INTERVAL if state.read_only else math.inf,
            )
            # It knows the local index alone.
            state.key_query.closed = not state.older.one_log

    def query(self, selection: Selection, look: LogLook) -> QueryResult:
        """Find messages by key, see `MessageStore.query_message`; those of the log first, which are newer."""
        return self.state.older.with_key(self._in_log(selection, look), selection)

    def _in_log(self, selection: Selection, look: LogLook) -> QueryResult:
        if self.index_service is None:
            return QueryResult(uncovered=self.whole_log())
        low, high = selection.times
        if (selection.max_num or 0) < 0 or low > high:
            return QueryResult()
        return self.until_trusted(
            lambda uncovered: self._exactly(selection, (*uncovered, *self.state.lost_log)), look, selection.index_type
        )

    def table(
        self, keys: Any, topic: str | Iterable[str], selection: Selection, options: ColumnOptions, look: LogLook
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
        return self.until_trusted(lambda uncovered: ask(), look, selection.index_type)

    @property
    def source(self) -> KeySource:
        """KeySource: the index as it is now."""
        return Merged(self.files, self.database) if self.database.is_used() else self.files

    @property
    def files(self) -> LogIndex:
        """LogIndex: the index files, and what the log has beyond them; only where the store has an index."""
        assert self.state.log_index is not None
        return self.state.log_index

    def until_trusted(
        self, ask: Callable[[tuple[tuple[int, int], ...]], T], look: LogLook, index_type: str | None
    ) -> T:
        """Return the answer of `ask`, which takes the parts of the log that no index covers.

        It is asked again where an index turns out to be damaged: the log has what that hides.
        """
        assert self.index_service is not None
        while True:
            uncovered = self.look_at_log(look, index_type)
            trusted = self.database.damage
            found = ask(uncovered)
            if not self.index_service.note_damage() and self.database.damage is trusted:
                if uncovered and self.database.missing is not None:
                    # What the log alone could not tell would be in the index that cannot be opened.
                    raise self.database.missing
                return found

    def offsets(self, selection: Selection) -> QueryOffsetResult:
        """What RocketMQ's index service answers, see `MessageStore.query_offsets`."""
        self.state.check_open()
        if self.index_service is None:
            return QueryOffsetResult([], 0, 0)
        self._follow_index()
        self._check_has_files()
        low, high = (int(max(min(each, INT64_MAX), INT64_MIN)) for each in java_times(selection))
        text = selection.index_text
        return self.index_service.query_offset(selection.topic, text, selection.max_num or 0, low, high)

    def _follow_index(self) -> None:
        # Entries show as they are put, new files do not.
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
        # Where no index file takes the next entries, what was put since is in the log alone.
        if not self.read_only or self.index_service is None:
            return
        with contextlib.suppress(FileNotFoundError, OffsetOutOfRangeError):
            if self.index_service.has_room():
                return
        self.commit_log.refresh()

    def _exactly(self, selection: Selection, uncovered: tuple[tuple[int, int], ...]) -> QueryResult:
        if _is_replaced(selection):
            return self.by_text(selection, uncovered)
        source, log, max_num = self.source, self.commit_log, min(selection.max_num or 0, INT64_MAX - 1)
        if source is self.files:
            assert self.index_service is not None
            found = _read.find_messages(
                self.index_service.newest_first(), self._region_of, selection.topic, selection.key,
                _KEY_KINDS[selection.index_type], *selection.times, max_num, QueryResult, MessageExt, log.crc_check,
                encode_java_utf8, log.files,
            )  # fmt: skip
            if found is not None:
                found._uncovered = uncovered
                return found
        places = first_places(log, source, SoughtKeys.of(selection), max_num + 1)
        found = QueryResult(truncated=len(places) > max_num, uncovered=uncovered)
        for phy_offset in newest_first(places[:max_num]).phy_offsets.tolist():
            message = log.look_up(phy_offset)
            if message is not None:
                found.append(message)
        return found

    def compared(self, selection: Selection, phy_offsets: list[int]) -> Iterator[MessageExt | None]:
        """Yield for each candidate its message, or None where the record does not have the key, or is of another time.

        The index is told of candidates that are wrong.
        """
        log, source = self.commit_log, self.source
        sought, candidates = SoughtKeys.of(selection), Candidates.of([0] * len(phy_offsets), phy_offsets)
        if _is_replaced(selection):
            messages = map(log.look_up, phy_offsets)
            taken = np.array([message is not None and selection.has(message) for message in messages], bool)
            self.files.doubt(sought, candidates[~taken])
        else:
            taken = sought.matching(log, candidates)[1]
            source.doubt(sought, candidates[~taken])
        for phy_offset, is_taken in zip(phy_offsets, taken.tolist()):
            yield log.look_up(phy_offset) if is_taken else None

    def _check_has_files(self) -> None:
        # Where a broker would answer from something else than index files, their answer would lack messages.
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
        """tuple of (int, int): the one stretch that is the log, or none."""
        low, high = self.commit_log.min_offset, self.commit_log.max_offset
        return ((low, high),) if low < high else ()

    def look_at_log(self, look: LogLook, index_type: str | None) -> tuple[tuple[int, int], ...]:
        """Make sure that exact questions are asked of the whole log; the stretches that stay out."""
        self._follow_index()
        self._follow_log()
        self.files.cover(*look)
        if self.database.is_used() and self.state.key_query is not None:
            # It knows the index files alone.
            self.state.key_query.closed = True
        if index_type == "T" and not self.config.index_tags:
            # No entry of a file says anything about tags.
            return tuple(without(self.commit_log.min_offset, self.commit_log.max_offset, self.database.covered()))
        return self.files.uncovered

    def by_text(self, selection: Selection, uncovered: tuple[tuple[int, int], ...] = ()) -> QueryResult:
        """As `query`, by decoded texts: one that was replaced while it was decoded cannot be compared as bytes."""
        low, high = selection.times
        result = QueryResult(uncovered=uncovered)
        sought, has_key = SoughtKeys.of(selection), selection.at_any_time().has
        for phy_offset in dict.fromkeys(self.source.candidates(sought).phy_offsets.tolist()):
            message = self.commit_log.look_up(phy_offset)
            if message is None or not has_key(message):
                self.files.doubt(sought, Candidates.of([0], [phy_offset]))
                continue
            if not low <= message.store_timestamp <= high:
                continue
            if len(result) >= (selection.max_num or 0):
                result.truncated = True
                break
            result.append(message)
        result.sort(key=lambda message: -message.phy_offset)
        return result

    def like_java(self, selection: Selection) -> QueryResult:
        """RocketMQ's queryMessage."""
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
            # A topic that a writer made since may have it.
            self.state.learn()
            self.state.queues.refresh()
        names = self.state.topics() if topic is None else [topic]
        for name in names:
            found = self._in_log(Selection((name,), keys=(msg_id,), index_type="U", max_num=1), LogLook())
            if found:
                return found[0].phy_offset
        if message is not None:
            return phy_offset
        if topic is None:
            # It may be of a topic that nobody sees.
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


class LogLook(NamedTuple):
    """How many bytes of the log that no index covers are searched (None for all), and who is told of the progress."""

    max_log_bytes: int | None = DEFAULT_LOG_BYTES
    progress: Callable[[int, int], object] | None = None


def java_times(selection: Selection) -> tuple[float, float]:
    """(float, float): the times of a question as RocketMQ is asked: from 0 on, without an end."""
    low = 0 if selection.begin is None else exact_milliseconds(selection.begin, "begin", up=True)
    return low, INT64_MAX if selection.end is None else exact_milliseconds(selection.end, "end")


def _is_replaced(selection: Selection) -> bool:
    # Text that was replaced while it was decoded cannot be compared as bytes.
    return "\ufffd" in selection.topic or "\ufffd" in selection.key
