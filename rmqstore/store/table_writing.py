"""Put the rows of an Arrow table, in parts: at once by the core if all rows of a part are plain, else as messages."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rmqstore import _numpy as np
from rmqstore._rows import ListColumn, NumberColumn, RowBatch, TableRows, TextColumn
from rmqstore.arguments import milliseconds, plain_text
from rmqstore.errors import InvalidMessageError
from rmqstore.message import Message, SysFlag, host_to_bytes
from rmqstore.store.columns import import_pyarrow
from rmqstore.store.results import PutResult, PutTableResult
from rmqstore.store.writing import NEW_QUEUE, V6_BITS, Writing

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["IGNORED_COLUMNS", "LONE_KEY", "TABLE_COLUMNS", "TablePart", "TableWriting", "lone_key", "table_parts"]

TABLE_COLUMNS = (
    "topic", "queue_id", "keys", "tags", "body", "properties", "flag", "born_timestamp", "store_timestamp", "born_host",
    "store_host", "sys_flag", "reconsume_times", "prepared_transaction_offset",
)  # fmt: skip
"""Columns of the messages to put, named as in a scan."""

IGNORED_COLUMNS = ("queue_offset", "phy_offset", "size", "msg_id", "unique_key", "corrupt", "key", "key_number")
"""Columns of a scan that the store sets itself, or whose values other columns have."""

LONE_KEY = (
    "column 'key' is not stored: it is the key that a query asked for, next to 'key_number' and 'keys' or 'properties'. "
    "A message's keys are the column 'keys': rename 'key', or drop it"
)


def lone_key(names: Collection[str]) -> bool:
    """Return True for a column ``key`` whose text would not be stored: no query made it, or no other column has the keys."""
    return "key" in names and not ("key_number" in names and ("keys" in names or "properties" in names))


_NUMBERS = ("queue_id", "flag", "sys_flag", "reconsume_times", "prepared_transaction_offset")
_TIMES = ("born_timestamp", "store_timestamp")
# A scanned table has plain bodies next to the flags of compressed ones.
_COMPRESSION_BITS = (SysFlag.COMPRESSED | SysFlag.COMPRESSION_MASK).value


def table_parts(table: Any, literals: Mapping[str, Any], *, keep_timestamps: bool, max_rows: int) -> list[TablePart]:
    """Cut a table into parts of at most `max_rows` rows whose columns have the types that the core reads.

    `literals` are values for all rows, by column.  InvalidMessageError and TypeError name the column that cannot be put.
    """
    pa = import_pyarrow()
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    elif not isinstance(table, pa.Table):
        if not hasattr(table, "__arrow_c_stream__") and not hasattr(table, "__arrow_c_array__"):
            raise TypeError(f"{type(table).__name__} is not an Arrow table; give a pyarrow.Table or a RecordBatch")
        table = pa.table(table)
    given = {name: _literal(name, value) for name, value in literals.items() if value is not None}
    names = table.column_names
    for name in names:
        if names.count(name) > 1 or name in given:
            raise InvalidMessageError(f"column {name!r} is given twice; give it once, in the table or by itself")
        if name not in TABLE_COLUMNS and name not in IGNORED_COLUMNS and name != "body_stored":
            raise InvalidMessageError(
                f"column {name!r} is not one that a message has; drop it, or put it into the properties. Known are "
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
    source = {name: table.column(name) for name in columns}
    if stored_bodies:
        source["body"] = table.column("body_stored")
    # Without another column this one has the number of rows.
    source.setdefault("body", pa.chunked_array([pa.nulls(table.num_rows)]))
    typed = pa.table({name: _checked(pa, name, column, _typed) for name, column in source.items()})
    return [
        TablePart(dict(zip(source, batch.columns, strict=True)), given, batch.num_rows, stored_bodies)
        for batch in typed.to_batches(max_chunksize=max_rows)
        if batch.num_rows
    ]


def _literal(name: str, value: Any) -> Any:
    # A value for all rows: a text, a list of keys, a list of pairs of properties, or an int.
    if name in ("topic", "tags"):
        return _checked_text(name, value)
    if name == "keys":
        keys = [key for key in value.split(" ") if key] if isinstance(value, str) else value
        return [_checked_text(name, key) for key in keys]
    if name == "properties":
        pairs = [(each, text) for each, text in value.items() if text is not None]
        return [(_checked_text(name, each), _checked_text(name, text)) for each, text in pairs]
    if isinstance(value, datetime.datetime):
        value = milliseconds(value, name)
    if not isinstance(value, (int, np.integer)):
        raise InvalidMessageError(f"{name} is {value!r}; give an int")
    if not -(2**63) <= value < 2**63:
        raise InvalidMessageError(f"{name} is {value}; give an int of 64 bits")
    return int(value)


def _checked_text(name: str, text: Any) -> str:
    if not isinstance(text, str):
        raise InvalidMessageError(f"{name} is {text!r}; give text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidMessageError(f"{name} is {text!r}, which UTF-8 cannot hold; replace the lone surrogate") from None
    return plain_text(text)


def _checked(pa: Any, name: str, column: pa.ChunkedArray, call: Callable[[Any, str, Any], Any]) -> Any:
    # Arrow's own errors name no column.
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
    types, kind = pa.types, column.type
    if types.is_dictionary(kind):
        column = pa.chunked_array([chunk.dictionary_decode() for chunk in column.chunks], kind.value_type)
        kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], kind.storage_type)
        kind = column.type

    def is_text(each: pa.DataType) -> bool:
        return bool(types.is_string(each) or types.is_large_string(each))

    if types.is_null(kind):
        return column
    if name in _NUMBERS or name in _TIMES:
        if types.is_integer(kind):
            return column.cast("int64")
        if name in _TIMES and types.is_timestamp(kind):
            # A part of a millisecond is cut off; seconds beyond what 64 bits hold of them are refused.
            return column.cast(pa.timestamp("ms", kind.tz), safe=kind.unit == "s").cast("int64")
    elif name == "properties":
        if types.is_map(kind) and is_text(kind.key_type) and is_text(kind.item_type):
            return column
        if types.is_map(kind):
            return column.cast(pa.map_(pa.large_string(), pa.large_string()))
        if types.is_struct(kind):
            # Pandas makes structs of dicts.
            rows = [None if row is None else list(row.items()) for row in column.to_pylist()]
            return pa.chunked_array([pa.array(rows, pa.map_(pa.large_string(), pa.large_string()))])
    elif is_text(kind) or (name == "body" and (types.is_binary(kind) or types.is_large_binary(kind))):
        return column
    elif types.is_string_view(kind):
        return column.cast("large_string")
    elif name == "body" and (types.is_binary_view(kind) or types.is_fixed_size_binary(kind)):
        return column.cast("large_binary")
    elif name == "keys":
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            is_read = not types.is_fixed_size_list(kind) and is_text(kind.value_type)
            return column if is_read else column.cast(pa.large_list(pa.large_string()))
        if types.is_list_view(kind) or types.is_large_list_view(kind):
            # Arrow's own cast (26.0) gives offsets that fall.
            return pa.chunked_array([pa.array(column.to_pylist(), pa.large_list(pa.large_string()))])
    raise _wrong_type(name, column)


def _first_true(pa: Any, name: str, column: pa.ChunkedArray) -> int:
    import pyarrow.compute as pc

    return int(pc.index(column.cast("bool"), True).as_py())


class TablePart:
    """Some rows of a table that is to be put."""

    def __init__(self, columns: dict[str, pa.Array], literals: dict[str, Any], num: int, stored_bodies: bool):
        self.columns = columns
        self.literals = literals
        self.num = num
        self.plain = True
        self._stored_bodies = stored_bodies

    # ------------------------------------------------------------------------------------------------- for the core

    def rows(self) -> TableRows:
        """Return the part as the core reads it."""
        hosts: list[bytes] = []
        born_host, store_host = self._hosts("born_host", hosts), self._hosts("store_host", hosts)
        keys, properties = self.columns.get("keys"), self.columns.get("properties")
        pairs = self.literals.get("properties", ())
        names = ListColumn(_text_list([name for name, _ in pairs]), num=len(pairs))
        values = _text_list([value for _, value in pairs])
        if properties is not None and properties.type.num_fields:
            names, values = _list_column(properties, properties.keys), _text_column(properties.items)
        return TableRows(
            self.num,
            topic=self._texts("topic"),
            body=self._texts("body"),
            tags=self._texts("tags"),
            keys=self._keys(keys),
            properties=names,
            values=values,
            **{name: self._numbers(name) for name in (*_NUMBERS, "born_timestamp")},
            hosts=hosts,
            born_host=born_host,
            store_host=store_host,
            keys_joined=keys is not None and not hasattr(keys, "values"),
        )

    def _texts(self, name: str) -> TextColumn:
        literal = self.literals.get(name)
        return _text_column(self.columns.get(name)) if literal is None else TextColumn(data=literal.encode())

    def _keys(self, column: pa.Array | None) -> ListColumn:
        if column is None or str(column.type) == "null":
            keys = self.literals.get("keys", ())
            return ListColumn(_text_list(keys), num=len(keys))
        if hasattr(column, "values"):
            return _list_column(column, column.values)
        # One text a row is the whole of its keys.
        return ListColumn(_text_column(column), np.arange(self.num + 1, dtype=np.int64), *_validity(column))

    def _numbers(self, name: str) -> NumberColumn:
        column = self.columns.get(name)
        if column is None:
            literal = self.literals.get(name)
            return NumberColumn(given=False) if literal is None else NumberColumn(literal)
        numbers, valid = _number_column(column, self.num)
        return NumberColumn(self._flags(name, numbers), valid)

    def _flags(self, name: str, numbers: Any) -> Any:
        if name != "sys_flag":
            return numbers
        # The hosts set the bits of their kinds.
        return numbers & ~(V6_BITS if self._stored_bodies else V6_BITS | _COMPRESSION_BITS)

    def _hosts(self, name: str, hosts: list[bytes]) -> NumberColumn:
        column = self.columns.get(name)
        if column is None or str(column.type) == "null":
            return NumberColumn(given=False)
        # The same few hosts come with every message.
        encoded = column.dictionary_encode()
        places, valid = _number_column(encoded.indices.cast("int64"), self.num)
        places = places + len(hosts)
        hosts += [host_to_bytes(host) for host in encoded.dictionary.to_pylist()]
        return NumberColumn(places, valid)

    def store_timestamps(self) -> np.ndarray:
        """Return the store times (int64, ms since epoch), one a row; none if the clock sets them."""
        if "store_timestamp" not in self.columns:
            return np.empty(0, np.int64)
        times, valid = _number_column(self.columns["store_timestamp"], self.num)
        if valid is not None:
            raise InvalidMessageError(f"row {int(np.argmin(valid))} has no store_timestamp; keep_timestamps needs one")
        return np.ascontiguousarray(times)

    # --------------------------------------------------------------------------------------------------- single rows

    def validate(self) -> None:
        """Check every offset and text: Arrow does not survive unsound ones when it reads single rows."""
        for name, column in self.columns.items():
            try:
                column.validate(full=True)
            except ValueError as error:
                raise InvalidMessageError(f"column {name!r} is not sound: {error}") from None

    def _value(self, name: str, i: int) -> Any:
        column = self.columns.get(name)
        return self.literals.get(name) if column is None else column[i].as_py()

    def queue_id(self, i: int) -> int:
        """Return the queue of row `i`, 0 where none is given."""
        return self._value("queue_id", i) or 0

    def topic(self, i: int) -> Any:
        """Return the topic of row `i`."""
        return self._value("topic", i)

    def message(self, i: int) -> Message:
        """Return row `i` as a message; errors as for `Message`, and InvalidMessageError for a property that is given twice."""
        pairs = self._value("properties", i) or []
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


def _validity(column: pa.Array) -> tuple[np.ndarray | None, int]:
    bitmap = column.buffers()[0] if column.null_count else None
    return (None if bitmap is None else np.frombuffer(bitmap, np.uint8)), column.offset


def _text_column(column: pa.Array | None) -> TextColumn:
    buffers: Any = () if column is None else column.buffers()
    if column is None or len(buffers) < 3 or buffers[1] is None or not len(column):
        # A column of the null type, or one without a row.
        return TextColumn()
    wide = str(column.type).startswith("large_")
    offsets = np.frombuffer(buffers[1], np.int64 if wide else np.int32)[column.offset : column.offset + len(column) + 1]
    data = b"" if buffers[2] is None else np.frombuffer(buffers[2], np.uint8)
    validity, first = _validity(column)
    return TextColumn(offsets, data, validity, first)


def _text_list(texts: Sequence[str]) -> TextColumn:
    pieces = [text.encode() for text in texts]
    return TextColumn(np.cumsum([0, *map(len, pieces)], dtype=np.int64), b"".join(pieces))


def _list_column(column: pa.Array, texts: pa.Array) -> ListColumn:
    offsets = np.ascontiguousarray(column.offsets.to_numpy(), dtype=np.int64)
    return ListColumn(_text_column(texts), offsets, *_validity(column))


def _number_column(column: pa.Array, num: int) -> tuple[np.ndarray, np.ndarray | None]:
    # The numbers and, where some are missing, which are there.
    if str(column.type) == "null":
        return np.zeros(num, np.int64), np.zeros(num, bool)
    if not column.null_count:
        return column.to_numpy(zero_copy_only=False), None
    return column.fill_null(0).to_numpy(zero_copy_only=False), column.is_valid().to_numpy(zero_copy_only=False)


# The reason of `RowBatch` for a row of an array whose offsets point outside.
_UNSOUND = -3
# The rows put at once: their layout stays in the processor's cache, and other writers get their turn.
_TABLE_ROWS = 8192


class TableWriting:
    """Puts tables into one store."""

    def __init__(self, writing: Writing):
        self.writing, self.state = writing, writing.state

    @staticmethod
    def _parts(table: Any, literals: dict[str, Any], keep_timestamps: bool) -> list[TablePart]:
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
        # `_check_parts` refuses times that fall.
        for times in (part.store_timestamps() for part in parts):
            if len(times):
                with self.state.lock:
                    too_old = self.writing.flushing.is_too_old(int(times[0]))
                if too_old:
                    self.writing.flushing.allow_for(int(times[0]))
                return

    def check(self, table: Any, literals: dict[str, Any], *, keep_timestamps: bool) -> int:
        """Check the rows and return their number, see `MessageStore.check_table`."""
        self.state.check_writable()
        parts = self._parts(table, literals, keep_timestamps)
        with self.state.lock if keep_timestamps else contextlib.nullcontext():
            self._check_parts(parts, True)
        return sum(part.num for part in parts)

    def _check_parts(self, parts: list[TablePart], rows: bool) -> None:
        # With `rows` every row is checked; otherwise putting them does that.
        first = 0
        last = self.state.last_store_timestamp
        for part in parts:
            times = part.store_timestamps()
            if len(times) and (times[0] < last or (times[1:] < times[:-1]).any()):
                raise InvalidMessageError(
                    f"store timestamps fall among rows {first} to {first + part.num}, or are before the store's last "
                    f"message ({last}); sort the table by store_timestamp"
                )
            last = int(times[-1]) if len(times) else last
            if rows:
                self._check_part(part, first)
            first += part.num

    def _check_part(self, part: TablePart, first: int) -> None:
        # Raises for the first row that cannot be put; sets `part.plain` if the core takes all rows.
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
                self.writing.long_way.prepare(message, part.queue_id(i))
            except InvalidMessageError as error:
                raise InvalidMessageError(f"row {first + i}: {error.message}", error.path) from None

    def _take_part(self, rows: RowBatch, part: TablePart, first: int) -> int:
        # Returns the number of the first row that the core does not take; the number of rows if it takes all.
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

    def _put_part(self, part: TablePart, first: int) -> tuple[np.ndarray, ...]:
        rows = self.writing.rows
        times = part.store_timestamps()
        if part.plain and rows is not None:
            with self.writing.at(0 if len(times) else None) as now:
                try:
                    if self._take_part(rows, part, first) == part.num:
                        self.writing.append_rows(rows, now, times)
                        return rows.columns()
                finally:
                    rows.clear()
            self._check_part(part, first)
        messages, queue_ids = [part.message(i) for i in range(part.num)], [part.queue_id(i) for i in range(part.num)]
        if len(times):
            puts: Sequence[PutResult] = [
                self.writing.put([message], queue_id, now=time)[0]
                for message, queue_id, time in zip(messages, queue_ids, times.tolist(), strict=True)
            ]
        else:
            puts = self.writing.put(messages, queue_ids)
        return tuple(np.array([(put[0], put[1], put[3], put[4]) for put in puts], np.int64).T)
