"""Putting the rows of an Arrow table, in parts that the core takes at once where every row is plain.

Owns how a table is cut, checked before anything of it is written, and put.  A part whose rows are not all plain goes as
messages, by `Writing.put`.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Sequence
from typing import Any

from rmqstore import _numpy as np
from rmqstore._rows import RowBatch
from rmqstore.arguments import milliseconds
from rmqstore.errors import InvalidMessageError
from rmqstore.message import Message
from rmqstore.store.results import PutResult, PutTableResult
from rmqstore.store.table_rows import TablePart, table_parts
from rmqstore.store.writing import NEW_QUEUE, Writing

__all__ = ["TableWriting"]

# What `RowBatch` says of a row of an array whose offsets lead outside.
_UNSOUND = -3
# Rows of a table that are put at once: their layout stays in the processor's cache, and other writers get their turn.
_TABLE_ROWS = 8192


class TableWriting:
    """Puts tables into one store."""

    def __init__(self, writing: Writing):
        self.writing, self.state = writing, writing.state

    @staticmethod
    def _parts(table: Any, literals: dict[str, Any], keep_timestamps: bool) -> list[TablePart]:
        keys, born = literals.get("keys"), literals.get("born_timestamp")
        if keys is not None and not isinstance(keys, str):
            literals = {**literals, "keys": list(keys)}
        if isinstance(born, datetime.datetime):
            literals = {**literals, "born_timestamp": int(milliseconds(born, "born_timestamp"))}
        return table_parts(table, literals, keep_timestamps=keep_timestamps, max_rows=_TABLE_ROWS)

    def put(self, table: Any, literals: dict[str, Any], *, keep_timestamps: bool) -> PutTableResult:
        """Append the rows, see `MessageStore.put_table`; `literals` are values for all rows by their column."""
        self.state.check_writable()
        parts = self._parts(table, literals, keep_timestamps)
        if keep_timestamps:
            self._allow_for_times(parts)
        # Other writers come between the parts, unless the times of the table say what came before.
        with self.state.lock if keep_timestamps else contextlib.nullcontext():
            self._check_parts(parts, len(parts) > 1 or self.writing.rows is None)
            columns: list[tuple[np.ndarray, ...]] = [(np.empty(0, np.int64),) * 4]
            first = 0
            for part in parts:
                columns.append(self._put_part(part, first))
                first += part.num
        result = PutTableResult(*(np.concatenate(column) for column in zip(*columns, strict=True)))
        if len(result):
            if self.state.waiting or self.state.sync_flush:
                self.writing.after_put(int(result.phy_offset[-1] + result.size[-1]), (Message("any"),))
        return result

    def _allow_for_times(self, parts: list[TablePart]) -> None:
        # None of them lies before the first: `_check_parts`.
        for times in (part.store_timestamps() for part in parts):
            if len(times):
                with self.state.lock:
                    too_old = self.writing.flushing.is_too_old(int(times[0]))
                if too_old:
                    self.writing.flushing.allow_for(int(times[0]))
                return

    def check(self, table: Any, literals: dict[str, Any], *, keep_timestamps: bool) -> int:
        """Look whether `put` would take the rows, and how many there are, see `MessageStore.check_table`."""
        self.state.check_writable()
        parts = self._parts(table, literals, keep_timestamps)
        with self.state.lock if keep_timestamps else contextlib.nullcontext():
            self._check_parts(parts, True)
        return sum(part.num for part in parts)

    def _check_parts(self, parts: list[TablePart], rows: bool) -> None:
        # Raises for what cannot be put; the rows are looked at one by one unless putting them does that.
        first = 0
        last = self.state.last_store_timestamp
        for part in parts:
            times = part.store_timestamps()
            if len(times) and (times[0] < last or (times[1:] < times[:-1]).any()):
                raise InvalidMessageError(
                    f"store timestamps fall among rows {first} to {first + part.num}, or lie before the store's last "
                    f"message ({last}); sort the table by store_timestamp"
                )
            last = int(times[-1]) if len(times) else last
            if rows:
                self._check_part(part, first)
            first += part.num

    def _check_part(self, part: TablePart, first: int) -> None:
        # Raises for the first row that cannot be put, and notes whether the core takes them all.
        rows = self.writing.rows
        at = 0
        if rows is not None:
            with self.state.lock:
                try:
                    at = self._take_part(rows, part, first)
                finally:
                    rows.clear()
        part.plain = at == part.num and rows is not None
        if not part.plain:
            part.validate()
        for i in range(at, part.num):
            try:
                message = part.message(i)
                self.writing.long_way.prepare(message, part.queue_id(i), append_crc=True)
            except InvalidMessageError as error:
                raise InvalidMessageError(f"row {first + i}: {error.message}", error.path) from None

    def _take_part(self, rows: RowBatch, part: TablePart, first: int) -> int:
        # The number of the row that the core does not take, or how many there are.
        table = part.rows()
        at, why = rows.take_columns(table, 0)
        while why == NEW_QUEUE:
            try:
                part.message(at).validate()
            except InvalidMessageError as error:
                raise InvalidMessageError(f"row {first + at}: {error.message}", error.path) from None
            if not 0 <= part.queue_id(at) < 2**31:
                raise InvalidMessageError(
                    f"row {first + at}: queue_id is {part.queue_id(at)!r}; give an int from 0 to 2**31 - 1"
                )
            self.writing.queue_number(part.topic(at), part.queue_id(at))
            at, why = rows.take_columns(table, at)
        if why == _UNSOUND:
            raise InvalidMessageError(f"row {first + at}: an Arrow array leads outside itself; validate the table")
        return at

    def _put_part(self, part: TablePart, first: int, now: int | None = None) -> tuple[np.ndarray, ...]:
        rows = self.writing.rows
        times = part.store_timestamps()
        too_old = False
        if part.plain and rows is not None:
            with self.state.lock:
                self.writing.check_takes_writes()
                try:
                    if self._take_part(rows, part, first) == part.num:
                        if now is None:
                            now = 0 if len(times) else self.writing.now()
                        too_old = not len(times) and self.writing.flushing.is_too_old(now)
                        if not too_old:
                            self.writing.append_rows(rows, now, times)
                            return rows.columns()
                finally:
                    rows.clear()
            if too_old and now is not None:
                self.writing.flushing.allow_for(now)
                return self._put_part(part, first, now)
            self._check_part(part, first)
        messages, queue_ids = list(part.messages()), [part.queue_id(i) for i in range(part.num)]
        if len(times):
            puts: Sequence[PutResult] = [
                self.writing.put([message], queue_id, now=time)[0]
                for message, queue_id, time in zip(messages, queue_ids, times.tolist(), strict=True)
            ]
        else:
            puts = self.writing.put(messages, queue_ids)
        return tuple(np.array([(put[0], put[1], put[3], put[4]) for put in puts], np.int64).T)
