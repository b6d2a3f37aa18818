"""Put the rows of an Arrow table, in parts: at once by the core if all rows of a part are plain, else as messages."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rmqstore import _numpy as np
from rmqstore._rows import ListColumn, NumberColumn, RowBatch, TableRows, TextColumn
from rmqstore.arguments import milliseconds
from rmqstore.errors import InvalidMessageError
from rmqstore.message import Message, SysFlag, host_to_bytes
from rmqstore.store.columns import import_pyarrow
from rmqstore.store.results import PutResult, PutTableResult
from rmqstore.store.writing import NEW_QUEUE, Writing

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["IGNORED_COLUMNS", "LONE_KEY", "TABLE_COLUMNS", "TablePart", "TableWriting", "lone_key", "table_parts"]

TABLE_COLUMNS = (
    "topic", "queue_id", "keys", "tags", "body", "properties", "flag", "born_timestamp", "store_timestamp", "born_host",
    "store_host", "sys_flag", "reconsume_times", "prepared_transaction_offset",
)  # fmt: skip
"""Columns that say something about the messages to put, named as in a scan."""

IGNORED_COLUMNS = ("queue_offset", "phy_offset", "size", "msg_id", "unique_key", "corrupt", "key", "key_number")
"""Columns of a scan that the store gives again, or that others hold already."""

LONE_KEY = (
    "column 'key' is not stored: it is the key that a query asked for, and stands beside 'key_number' and 'keys' or 'properties'. "
    "A message's keys are the column 'keys': rename 'key', or drop it"
)


def lone_key(names: Collection[str]) -> bool:
    """bool: there is a column ``key`` whose text would not be stored: no query gave it, or nothing else holds the keys."""
    return "key" in names and not ("key_number" in names and ("keys" in names or "properties" in names))


_NUMBERS = ("queue_id", "flag", "sys_flag", "reconsume_times", "prepared_transaction_offset")
# Whoever put a scanned table back would otherwise say of plain bodies that they are compressed.
_COMPRESSION_BITS = (SysFlag.COMPRESSED | SysFlag.COMPRESSION_MASK).value
_V6_BITS = (SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6).value


def table_parts(table: Any, literals: Mapping[str, Any], *, keep_timestamps: bool, max_rows: int) -> list[TablePart]:
    """Cut a table into parts of at most `max_rows` rows whose columns have the types that the core reads.

    `literals` are columns with one value for all rows.  InvalidMessageError and TypeError name the column that cannot be put.
    """
    pa = import_pyarrow()
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    elif not isinstance(table, pa.Table):
        if not hasattr(table, "__arrow_c_stream__") and not hasattr(table, "__arrow_c_array__"):
            raise TypeError(f"{type(table).__name__} is not an Arrow table; give a pyarrow.Table or a RecordBatch")
        table = pa.table(table)
    given = {name: value for name, value in literals.items() if value is not None}
    names = table.column_names
    for name in names:
        if names.count(name) > 1 or name in given:
            raise InvalidMessageError(f"column {name!r} is given twice; give it once, in the table or by itself")
        if name not in TABLE_COLUMNS and name not in IGNORED_COLUMNS and name != "body_stored":
            raise InvalidMessageError(
                f"column {name!r} is none that a message has; drop it, or put it into the properties. Known are "
                f"{', '.join(TABLE_COLUMNS)}"
            )
    if lone_key(names):
        raise InvalidMessageError(LONE_KEY)
    if "topic" not in names and "topic" not in given:
        raise InvalidMessageError("the table has no column 'topic'; give topic=… for all rows")
    if keep_timestamps and "store_timestamp" not in names:
        raise InvalidMessageError("keep_timestamps needs the column 'store_timestamp'")
    if "unique_key" in names and "properties" not in names:
        raise InvalidMessageError("the table has unique keys, but no properties to hold them; add them as UNIQ_KEY")
    if "corrupt" in names and (marked := _checked(pa, "corrupt", table.column("corrupt"), _first_true)) >= 0:
        raise InvalidMessageError(f"row {marked} is marked as corrupt; leave such rows out, or drop the column")
    columns = [name for name in names if name in TABLE_COLUMNS and (keep_timestamps or name != "store_timestamp")]
    stored_bodies = "body_stored" in names
    if stored_bodies and "body" not in columns:
        columns.append("body")
    source = {name: table.column("body_stored" if stored_bodies and name == "body" else name) for name in columns}
    typed = pa.table({name: _checked(pa, name, column, _typed) for name, column in source.items()})
    # A table without a column that counts has rows all the same.
    if not columns:
        return [
            TablePart({}, given, min(max_rows, table.num_rows - first), keep_timestamps, stored_bodies)
            for first in range(0, table.num_rows, max_rows)
        ]
    return [
        TablePart(dict(zip(columns, batch.columns, strict=True)), given, batch.num_rows, keep_timestamps, stored_bodies)
        for batch in typed.to_batches(max_chunksize=max_rows)
        if batch.num_rows
    ]


def _checked(pa: Any, name: str, column: pa.ChunkedArray, call: Callable[[Any, str, Any], Any]) -> Any:
    # What `call` makes of a column; Arrow's own errors name no column.
    try:
        return call(pa, name, column)
    except pa.ArrowInvalid as error:
        what = (str(error).splitlines() or ["unknown"])[0]
        raise InvalidMessageError(
            f"column {name!r} ({column.type}) has a value that it cannot hold ({what}); see the schema of a scan"
        ) from None
    except pa.ArrowException:
        raise _wrong_type(name, column) from None


def _wrong_type(name: str, column: pa.ChunkedArray) -> TypeError:
    return TypeError(f"column {name!r} is {column.type}, which cannot hold it; see the schema of a scan")


def _typed(pa: Any, name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    # One of the few types that `TablePart` hands to the core.
    types = pa.types
    if types.is_dictionary(column.type):
        column = pa.chunked_array([chunk.dictionary_decode() for chunk in column.chunks], column.type.value_type)
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], kind.storage_type)
        kind = column.type
    if types.is_null(kind):
        return column

    def fits(*checks: Any) -> bool:
        return any(check(kind) for check in checks)

    if name in _NUMBERS and fits(types.is_integer):
        return column.cast(pa.int64())
    if name in ("born_timestamp", "store_timestamp"):
        if fits(types.is_timestamp):
            # A part of a millisecond is cut off; seconds beyond what 64 bits hold of them are refused.
            safe = kind.unit == "s"
            return column.cast(pa.timestamp("ms", kind.tz), safe=safe).cast(pa.int64())
        if fits(types.is_integer):
            return column.cast(pa.int64())
    if name in ("topic", "tags", "born_host", "store_host", "keys"):
        if fits(types.is_string, types.is_large_string):
            return column
        if fits(types.is_string_view):
            return column.cast(pa.large_string())
    if name == "body":
        if fits(types.is_binary, types.is_large_binary, types.is_string, types.is_large_string):
            return column
        if fits(types.is_binary_view, types.is_fixed_size_binary):
            return column.cast(pa.large_binary())
        if fits(types.is_string_view):
            return column.cast(pa.large_string())

    def is_text(each: pa.DataType) -> bool:
        return bool(types.is_string(each) or types.is_large_string(each))

    if name == "keys" and fits(types.is_list, types.is_large_list) and is_text(kind.value_type):
        return column
    if name == "keys" and fits(types.is_list, types.is_large_list, types.is_fixed_size_list):
        return column.cast(pa.large_list(pa.large_string()))
    if name == "keys" and fits(types.is_list_view, types.is_large_list_view):
        # Arrow's own cast (26.0) gives offsets that fall.
        return pa.chunked_array([_list_of_view(pa, chunk) for chunk in column.chunks], pa.large_list(pa.large_string()))
    if name == "properties":
        if fits(types.is_map) and is_text(kind.key_type) and is_text(kind.item_type):
            return column
        if fits(types.is_map):
            return column.cast(pa.map_(pa.large_string(), pa.large_string()))
        if fits(types.is_struct):
            # What pandas makes of dicts.
            rows = [None if row is None else list(row.items()) for row in column.to_pylist()]
            return pa.chunked_array([pa.array(rows, pa.map_(pa.large_string(), pa.large_string()))])
    raise _wrong_type(name, column)


def _first_true(pa: Any, name: str, column: pa.ChunkedArray) -> int:
    import pyarrow.compute as pc

    return int(pc.index(column.cast("bool"), True).as_py())


def _list_of_view(pa: Any, chunk: pa.Array) -> pa.Array:
    import pyarrow.compute as pc

    lengths = pc.list_value_length(chunk).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
    texts = pc.list_flatten(chunk).cast(pa.large_string())
    return pa.LargeListArray.from_arrays(offsets, texts, mask=chunk.is_null())


class TablePart:
    """Some rows of a table that is to be put."""

    def __init__(
        self,
        columns: dict[str, pa.Array],
        literals: Mapping[str, Any],
        num: int,
        keep_timestamps: bool,
        stored_bodies: bool,
    ):
        self.columns = columns
        self.literals = literals
        self.num = num
        self.plain = True
        self._keep_timestamps = keep_timestamps
        self._stored_bodies = stored_bodies

    # ------------------------------------------------------------------------------------------------- for the core

    def rows(self) -> TableRows:
        """The part as the core reads it."""
        hosts: list[bytes] = []
        born_host, store_host = self._hosts("born_host", hosts), self._hosts("store_host", hosts)
        keys = self.columns.get("keys")
        properties = self.columns.get("properties")
        names, values = self._literal_properties()
        if properties is not None and properties.type.num_fields:
            names, values = _map_columns(properties)
        return TableRows(
            self.num,
            topic=self._texts("topic"),
            body=self._texts("body"),
            tags=self._texts("tags"),
            keys=self._keys(keys),
            properties=names,
            values=values,
            queue_id=self._numbers("queue_id"),
            flag=self._numbers("flag"),
            sys_flag=self._numbers("sys_flag"),
            reconsume_times=self._numbers("reconsume_times"),
            prepared_transaction_offset=self._numbers("prepared_transaction_offset"),
            born_timestamp=self._numbers("born_timestamp"),
            hosts=hosts,
            born_host=born_host,
            store_host=store_host,
            keys_joined=keys is not None and not hasattr(keys, "values"),
        )

    def _texts(self, name: str) -> TextColumn:
        column = self.columns.get(name)
        if column is not None:
            return _text_column(column)
        literal = self.literals.get(name)
        if literal is None:
            return TextColumn()
        return TextColumn(data=literal if isinstance(literal, bytes) else _encoded(name, literal))

    def _keys(self, column: pa.Array | None) -> ListColumn:
        if column is None:
            literal = self.literals.get("keys")
            if literal is None:
                return ListColumn(TextColumn())
            keys = [key for key in literal.split(" ") if key] if isinstance(literal, str) else list(literal)
            return ListColumn(_text_list("keys", keys), num=len(keys))
        if str(column.type) == "null":
            return ListColumn(TextColumn())
        validity, first = _validity(column)
        if hasattr(column, "values"):
            return ListColumn(_text_column(column.values), _offsets(column), validity, first)
        # One text a row is the whole of its keys.
        return ListColumn(_text_column(column), np.arange(self.num + 1, dtype=np.int64), validity, first)

    def _literal_properties(self) -> tuple[ListColumn, TextColumn]:
        literal = {name: value for name, value in (self.literals.get("properties") or {}).items() if value is not None}
        names, values = _text_list("properties", literal.keys()), _text_list("properties", literal.values())
        return ListColumn(names, num=len(literal)), values

    def _numbers(self, name: str) -> NumberColumn:
        column = self.columns.get(name)
        if column is None:
            literal = self.literals.get(name)
            if literal is None:
                return NumberColumn(given=False)
            if not isinstance(literal, (int, np.integer)):
                raise InvalidMessageError(f"{name} is {literal!r}; give an int")
            if not -(2**63) <= literal < 2**63:
                raise InvalidMessageError(f"{name} is {literal}; give an int of 64 bits")
            return NumberColumn(self._flags(name, int(literal)))
        numbers, valid = _number_column(column, self.num)
        return NumberColumn(self._flags(name, numbers), valid)

    def _flags(self, name: str, numbers: Any) -> Any:
        if name != "sys_flag":
            return numbers
        # The kinds of the hosts follow from the hosts.
        return numbers & ~(_V6_BITS if self._stored_bodies else _V6_BITS | _COMPRESSION_BITS)

    def _hosts(self, name: str, hosts: list[bytes]) -> NumberColumn:
        column = self.columns.get(name)
        if column is None:
            literal = self.literals.get(name)
            if literal is None:
                return NumberColumn(given=False)
            hosts.append(host_to_bytes(literal))
            return NumberColumn(len(hosts) - 1)
        if not hasattr(column, "dictionary_encode") or str(column.type) == "null":
            return NumberColumn(given=False)
        # The same few hosts come with every message.
        encoded = column.dictionary_encode()
        places, valid = _number_column(encoded.indices.cast("int64"), self.num)
        places = places + len(hosts)
        hosts += [host_to_bytes(host) for host in encoded.dictionary.to_pylist()]
        return NumberColumn(places, valid)

    def store_timestamps(self) -> np.ndarray:
        """int64 array: store times in ms since epoch, one a row, or none if the store gives them."""
        if not self._keep_timestamps:
            return np.empty(0, np.int64)
        times, valid = _number_column(self.columns["store_timestamp"], self.num)
        if valid is not None:
            raise InvalidMessageError(f"row {int(np.argmin(valid))} has no store_timestamp; keep_timestamps needs one")
        return np.ascontiguousarray(times)

    # --------------------------------------------------------------------------------------------------- single rows

    def validate(self) -> None:
        """Look at every offset and text; Arrow itself, which reads single rows, does not survive unsound ones."""
        for name, column in self.columns.items():
            try:
                column.validate(full=True)
            except ValueError as error:
                raise InvalidMessageError(f"column {name!r} is not sound: {error}") from None

    def _value(self, name: str, i: int) -> Any:
        column = self.columns.get(name)
        return self.literals.get(name) if column is None else column[i].as_py()

    def queue_id(self, i: int) -> int:
        """int: the queue of row `i`, 0 where none is given."""
        value = self._value("queue_id", i)
        return 0 if value is None else value

    def topic(self, i: int) -> Any:
        """str: the topic of row `i`."""
        return self._value("topic", i)

    def message(self, i: int) -> Message:
        """Row `i` as a message; errors as of `Message`, and InvalidMessageError for a property that is given twice."""
        pairs = self._value("properties", i) or []
        if isinstance(pairs, Mapping):
            pairs = list(pairs.items())
        properties = {name: value for name, value in pairs if value is not None}
        if len(properties) < sum(value is not None for _, value in pairs):
            raise InvalidMessageError("a property is given twice: give it once")
        body = self._value("body", i)
        numbers = {name: self._value(name, i) or 0 for name in _NUMBERS if name != "queue_id"}
        numbers["sys_flag"] = self._flags("sys_flag", numbers["sys_flag"])
        return Message(
            self.topic(i),
            body.encode() if isinstance(body, str) else body or b"",
            keys=self._value("keys", i) or (),
            tags=self._value("tags", i),
            properties=properties,
            born_timestamp=self._value("born_timestamp", i),
            born_host=self._value("born_host", i),
            store_host=self._value("store_host", i),
            **numbers,
        )

    def messages(self) -> Iterator[Message]:
        """Every row as a message."""
        for i in range(self.num):
            yield self.message(i)


def _encoded(name: str, text: Any) -> bytes:
    if not isinstance(text, str):
        raise InvalidMessageError(f"{name} is {text!r}; give text")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidMessageError(f"{name} is {text!r}, which UTF-8 cannot hold; replace the lone surrogate") from None


def _text_list(name: str, texts: Iterable[str]) -> TextColumn:
    pieces = [_encoded(name, text) for text in texts]
    return TextColumn(np.cumsum([0, *map(len, pieces)], dtype=np.int64), b"".join(pieces))


def _validity(column: pa.Array) -> tuple[np.ndarray | None, int]:
    bitmap = column.buffers()[0] if column.null_count else None
    return (None if bitmap is None else np.frombuffer(bitmap, np.uint8)), column.offset


def _text_column(column: pa.Array) -> TextColumn:
    buffers = column.buffers()
    if len(buffers) < 3 or buffers[1] is None or not len(column):
        # A column of the null type, or one without a row.
        return TextColumn()
    wide = str(column.type).startswith("large_")
    offsets = np.frombuffer(buffers[1], np.int64 if wide else np.int32)[column.offset : column.offset + len(column) + 1]
    data = b"" if buffers[2] is None else np.frombuffer(buffers[2], np.uint8)
    validity, first = _validity(column)
    return TextColumn(offsets, data, validity, first)


def _offsets(column: pa.Array) -> np.ndarray:
    return np.ascontiguousarray(column.offsets.to_numpy(), dtype=np.int64)


def _map_columns(column: pa.Array) -> tuple[ListColumn, TextColumn]:
    validity, first = _validity(column)
    return ListColumn(_text_column(column.keys), _offsets(column), validity, first), _text_column(column.items)


def _number_column(column: pa.Array, num: int) -> tuple[np.ndarray, np.ndarray | None]:
    # The numbers and, where some are missing, which are there.
    if str(column.type) == "null":
        return np.zeros(num, np.int64), np.zeros(num, bool)
    if not column.null_count:
        return column.to_numpy(zero_copy_only=False), None
    return column.fill_null(0).to_numpy(zero_copy_only=False), column.is_valid().to_numpy(zero_copy_only=False)


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
