"""Finding messages by key in a store and its tiered storage.

Owns which of both has which messages: those of the local log first, then older ones of tiered storage, each once.

Facts (RocketMQ 5.5.0, TieredMessageStore): below the oldest store time of the local log a query by key goes on in tiered
storage, with that time as its end, whatever end was asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rmqstore.errors import InvalidMessageError, OffsetOutOfRangeError
from rmqstore.flatfile.flat_store import FlatStore
from rmqstore.message import MessageExt
from rmqstore.selection import Selection
from rmqstore.store.columns import ColumnOptions
from rmqstore.store.key_columns import AskedKeys
from rmqstore.store.querying import LogLook, Querying, java_times
from rmqstore.store.results import QueryResult
from rmqstore.store.store_state import StoreState
from rmqstore.store.tiered_columns import key_rows_table

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["TieredQuerying"]


class TieredQuerying(Querying):
    """As `Querying`, of a store and its tiered storage."""

    def __init__(self, state: StoreState, flat_store: FlatStore):
        super().__init__(state)
        self.flat_store = flat_store
        if state.key_query is not None:
            # The short way knows the local index alone.
            state.key_query.closed = True

    def _older(self, local: QueryResult, selection: Selection) -> list[MessageExt]:
        # The messages that the local log did not give, whatever the units of its queues say.
        found = self.flat_store.find_messages(selection)
        known = {(message.queue_id, message.queue_offset) for message in local}
        return [message for message in found if (message.queue_id, message.queue_offset) not in known]

    def query(self, selection: Selection, look: LogLook) -> _BothResult:
        """See `MessageStore.query_message`; those of the local log first, which are newer."""
        local = super().query(selection, look)
        max_num = selection.max_num or 0
        if max_num < 0 or local.truncated:
            whole = _BothResult(local, local.truncated, local.uncovered)
            whole.local_num = len(local)
            return whole
        older = self._older(local, selection)
        room = max_num - len(local)
        found = _BothResult([*local, *older[:room]], len(older) > room, local.uncovered)
        found.local_num = len(local)
        return found

    def like_java(self, selection: Selection) -> QueryResult:
        """RocketMQ's TieredMessageStore.queryMessage."""
        log = self.commit_log
        earliest = log.store_timestamp_at(log.min_offset)
        if earliest <= 0:
            return super().like_java(selection)
        low, high = java_times(selection)
        found = QueryResult() if high < earliest else super().like_java(selection)
        max_num = selection.max_num or 0
        if len(found) < max_num and low < earliest:
            found.extend(
                self.flat_store.like_java(selection.topic, selection.key, max_num - len(found), int(low), earliest)
            )
        return found

    def message_by_id(self, msg_id: str, topic: str | None = None) -> MessageExt:
        """See `MessageStore.message_by_id`."""
        try:
            return super().message_by_id(msg_id, topic)
        except (InvalidMessageError, OffsetOutOfRangeError):
            for name in self.state.topics() if topic is None else [topic]:
                for message in self.flat_store.find_messages(Selection((name,), keys=(msg_id,), index_type="U")):
                    return message
            raise

    def table(
        self, keys: Any, topic: str | Iterable[str], selection: Selection, options: ColumnOptions, look: LogLook
    ) -> pa.Table:
        """See `MessageStore.query_table`; each key is asked for by itself."""
        asked = AskedKeys(keys, topic, selection)
        rows: list[tuple[int, tuple[str, int] | None, int]] = []
        for number, (name, text) in enumerate(asked.sought.pairs()):
            found = self.query(dataclasses.replace(selection, topics=(name,), keys=(text,)), look)
            for position, message in enumerate(found):
                place = (name, message.queue_id) if position >= found.local_num else None
                rows.append((number, place, message.phy_offset))
        return key_rows_table(self.commit_log, self.flat_store, rows, asked.column.to_pylist(), options)


class _BothResult(QueryResult):
    # How many of the messages are the local log's, which come first.
    __slots__ = ("local_num",)
    local_num: int
