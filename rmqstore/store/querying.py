"""Finding messages by key, by tag and by id.

Owns which index files are asked, in which order, the index in RocksDB where there is one, the comparison of what they lead to,
and what is looked for in the log because no index covers it.  It never says that a message is not there where nobody looked:
`QueryResult.uncovered`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rmqstore import _core, _read
from rmqstore import _numpy as np
from rmqstore._core import KeyKind
from rmqstore._read import KeyQuery, KeySearch
from rmqstore.arguments import exact_milliseconds, plain_text
from rmqstore.errors import CorruptionError, InvalidMessageError, OffsetOutOfRangeError
from rmqstore.index.index_service import QueryOffsetResult
from rmqstore.index.log_index import DEFAULT_LOG_BYTES, chain_in_memory
from rmqstore.message import MessageExt, encode_java_utf8, parse_message_id
from rmqstore.selection import INT64_MAX, INT64_MIN, Selection
from rmqstore.store.columns import ColumnOptions, doubt_entries
from rmqstore.store.key_columns import key_table
from rmqstore.store.results import QueryResult
from rmqstore.store.store_state import LOOK_INTERVAL, StoreState

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["LogLook", "Querying", "java_times"]

T = TypeVar("T")

# Entries of a chain that is made in memory at once.
_CHAIN = 4096
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

    def query(self, selection: Selection, look: LogLook) -> QueryResult:
        """Find messages by key, see `MessageStore.query_message`."""
        if self.index_service is None:
            return QueryResult(uncovered=self.whole_log())
        low, high = selection.times
        if (selection.max_num or 0) < 0 or low > high:
            return QueryResult()
        return self._until_trusted(
            lambda uncovered: self._exactly(selection, (*uncovered, *self.state.lost_log)), look, selection.index_type
        )

    def table(
        self, keys: Any, topic: str | Iterable[str], selection: Selection, options: ColumnOptions, look: LogLook
    ) -> pa.Table:
        """Find the messages of many keys, see `MessageStore.query_table`."""

        def ask() -> pa.Table:
            more = self._entries_in_database(selection) if self.database.is_used() else None
            return key_table(self.commit_log, self.index_service, keys, topic, selection, options, more)

        if self.index_service is None:
            return self.state.settled(ask)
        return self._until_trusted(lambda uncovered: self.state.settled(ask), look, selection.index_type)

    def _until_trusted(
        self, ask: Callable[[tuple[tuple[int, int], ...]], T], look: LogLook, index_type: str | None
    ) -> T:
        # The answer to the parts of the log that no index covers.  Where an index turns out to be damaged meanwhile, the
        # log has what it hides.
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

    def _entries_in_database(
        self, selection: Selection
    ) -> Callable[[list[str | None], list[str | None]], tuple[np.ndarray, np.ndarray]]:
        def find(keys: list[str | None], topics: list[str | None]) -> tuple[np.ndarray, np.ndarray]:
            numbers, phy_offsets = [], []
            for number, (key, topic) in enumerate(zip(keys, itertools.cycle(topics), strict=False)):
                if key is not None and topic is not None:
                    found = self.database.phy_offsets(topic, key, selection.index_type, *selection.times)
                    phy_offsets += found
                    numbers += [number] * len(found)
            return np.array(numbers, np.int32), np.array(phy_offsets, np.int64)

        return find

    def offsets(self, selection: Selection) -> QueryOffsetResult:
        """What RocketMQ's index service answers, see `MessageStore.query_offsets`."""
        self.state.check_open()
        if self.index_service is None:
            return QueryOffsetResult([], 0, 0)
        self._follow_index()
        if self._asks_database():
            found = self._database_like_java(selection)
            return QueryOffsetResult([message.phy_offset for message in reversed(found)], 0, 0)
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
        index_service = self.index_service
        assert index_service is not None
        topic, key = selection.topic, selection.key
        if "\ufffd" in topic or "\ufffd" in key:
            # Text that was replaced while it was decoded cannot be compared as bytes.
            return self.by_text(selection, uncovered)
        log = self.commit_log
        if self.database.is_used():
            return self._with_database(selection, uncovered)
        found = _read.find_messages(
            index_service.newest_first(), self._region_of, topic, key, _KEY_KINDS[selection.index_type],
            *selection.times, _max_num(selection), QueryResult, MessageExt, log.crc_check, encode_java_utf8, log.files,
        )  # fmt: skip
        if found is not None:
            found._uncovered = uncovered
            return found
        result = QueryResult(uncovered=uncovered)
        search = self._search(selection, result)
        for index in index_service.newest_first():
            at = -1
            while at:
                at = search.walk(index, at, log.region_of)
            if search.truncated:
                break
        if not search.descending:
            result.sort(key=lambda message: -message.phy_offset)
        result.truncated = search.truncated
        return result

    def _search(self, selection: Selection, result: QueryResult) -> KeySearch:
        log = self.commit_log
        return KeySearch(
            selection.topic, selection.key, _KEY_KINDS[selection.index_type], *selection.times, _max_num(selection),
            result, MessageExt, log.crc_check, encode_java_utf8, log.files,
        )  # fmt: skip

    def _with_database(self, selection: Selection, uncovered: tuple[tuple[int, int], ...]) -> QueryResult:
        # What the index in RocksDB, the index files and the log's own entries lead to, as one chain in memory.
        log, result = self.commit_log, QueryResult(uncovered=uncovered)
        topic, text = selection.topic, selection.index_text
        in_database = self.database.phy_offsets(topic, selection.key, selection.index_type, *selection.times)
        search = self._search(selection, result)
        assert self.index_service is not None
        candidates = sorted({*in_database, *self.index_service.candidates(topic, text)}, reverse=True)
        key_hash = _core.index_key_hash(topic, text)
        damaged = False
        for begin in range(0, len(candidates), _CHAIN):
            chain = chain_in_memory(key_hash, candidates[begin : begin + _CHAIN])
            at = -1
            while at:
                at = search.walk(chain, at, log.region_of)
            damaged |= chain.damaged
            if search.truncated:
                break
        if damaged:
            self.doubt(selection, key_hash, in_database, candidates)
        result.truncated = search.truncated
        return result

    def doubt(self, selection: Selection, key_hash: int, in_database: list[int], candidates: list[int]) -> None:
        """Ask no index again whose entries lead to what cannot be; `in_database` are those of the one in RocksDB."""
        assert self.index_service is not None
        offsets = np.array(candidates, np.int64)
        doubt_entries(self.commit_log, self.index_service, np.full(len(offsets), key_hash, np.int32), offsets)
        has_key = _of_any_time(selection).has
        for phy_offset in in_database:
            message = self.commit_log.look_up(phy_offset)
            if message is None or not has_key(message):
                self.database.distrust(
                    CorruptionError(
                        f"an entry leads to phy offset {phy_offset}, where no record has its key", self.path
                    )
                )
                return

    def _asks_database(self) -> bool:
        # A broker asks the index in RocksDB where index files are not read; without any there is nothing else to ask.
        if self.index_service is None or self.index_service.names:
            return False
        database = self.database
        return database.is_used() or database.damage is not None or database.missing is not None

    def _database_like_java(self, selection: Selection) -> QueryResult:
        low, high = (int(max(min(each, INT64_MAX), INT64_MIN)) for each in java_times(selection))
        max_num = min(selection.max_num or 0, self.config.max_msgs_num_batch)
        found = self.database.like_java(
            selection.topic, selection.key, max_num, low, high, selection.index_type, self.config.clock()
        )
        messages = [self.commit_log.look_up(phy_offset) for phy_offset in found]
        return QueryResult([message for message in messages if message is not None])

    def whole_log(self) -> tuple[tuple[int, int], ...]:
        """tuple of (int, int): the one stretch that is the log, or none."""
        low, high = self.commit_log.min_offset, self.commit_log.max_offset
        return ((low, high),) if low < high else ()

    def without_database(self) -> tuple[tuple[int, int], ...]:
        """tuple of (int, int): the stretches of the log that the index in RocksDB does not cover."""
        found, at = [], self.commit_log.min_offset
        for begin, end in self.database.covered():
            found += [(at, begin)] if at < begin else []
            at = max(at, end)
        return (*found, *([(at, self.commit_log.max_offset)] if at < self.commit_log.max_offset else []))

    def look_at_log(self, look: LogLook, index_type: str | None) -> tuple[tuple[int, int], ...]:
        """Make sure that exact questions are asked of the whole log; the stretches that stay out."""
        assert self.state.log_index is not None
        self._follow_index()
        self._follow_log()
        self.state.log_index.cover(*look)
        if self.database.is_used() and self.state.key_query is not None:
            # It knows the index files alone.
            self.state.key_query.closed = True
        if index_type == "T" and not self.config.index_tags:
            # No entry of a file says anything about tags.
            return self.without_database()
        return self.state.log_index.uncovered

    def by_text(self, selection: Selection, uncovered: tuple[tuple[int, int], ...] = ()) -> QueryResult:
        """As `query`, by decoded texts: one that was replaced while it was decoded cannot be compared as bytes."""
        assert self.index_service is not None
        topic, text = selection.topic, selection.index_text
        low, high = selection.times
        result = QueryResult(uncovered=uncovered)
        seen: set[int] = set()
        candidates: Iterable[int] = self.index_service.candidates(topic, text)
        if self.database.is_used():
            in_database = self.database.phy_offsets(topic, selection.key, selection.index_type, low, high)
            candidates = sorted({*candidates, *in_database}, reverse=True)
        has_key = _of_any_time(selection).has
        for phy_offset in candidates:
            if phy_offset in seen:
                continue
            seen.add(phy_offset)
            message = self.commit_log.look_up(phy_offset)
            if message is None or not has_key(message):
                of_hash = np.array([_core.index_key_hash(topic, text)], np.int32)
                doubt_entries(self.commit_log, self.index_service, of_hash, np.array([phy_offset]))
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
        if self._asks_database():
            return self._database_like_java(selection)
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
            selection = Selection((name,), keys=(msg_id,), index_type="U", max_num=1)
            found = self.query(selection, LogLook())
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


def _max_num(selection: Selection) -> int:
    return min(selection.max_num or 0, INT64_MAX)


def _of_any_time(selection: Selection) -> Selection:
    return dataclasses.replace(selection, begin=None, end=None)
