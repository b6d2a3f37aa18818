"""Files of Arrow and Parquet as tables to put, and how much memory their rows take, before they take it.

A small file may stand for many gigabytes: a value that all rows share (a dictionary, a view, a run), and pages of zeros.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rmqstore import _numpy as np
from rmqstore.errors import InvalidMessageError, StoreError
from rmqstore.offline.import_rows import ALSO_IGNORED, BOUNDS, ENCODINGS, Bounds, Chunk, Input, decoded
from rmqstore.store.columns import import_pyarrow

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["arrow_chunks", "reconciled"]

# Which property holds a column.
_PROPERTIES = {"keys": "KEYS", "tags": "TAGS"}


def arrow_chunks(input: Input) -> Iterator[Chunk]:
    """Read a file of Arrow or Parquet, some rows at a time."""
    pa = import_pyarrow()
    first = 1
    try:
        for batch in _arrow_batches(pa, input):
            # What a file says of its own offsets is looked at before anything follows them.
            batch.validate(full=True)
            names = batch.schema.names
            if len({*names}) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise StoreError(f"column {twice!r} is in the file twice; leave one of them out", input.name)
            for start, part in bounded_parts(batch, BOUNDS, input.name, first):
                part = _with_bodies(pa, part, input, first + start)
                numbers = range(first + start, first + start + part.num_rows)
                yield Chunk(pa.Table.from_batches([part]), input.name, "row", numbers)
            first += batch.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        # Arrow says of damage what it says of a disk; only the system has numbers for its errors.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise StoreError(f"this cannot be read as a file of {input.format}: {what}", input.name) from None


class _Bounded:
    """A file that gives no more than it has: a plain one takes memory for all that is asked, and Arrow asks unseen numbers."""

    def __init__(self, input: Input):
        self._file, self._size = input.file, input.size

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._file.tell(), 0)
        return self._file.read(min(size, left) if size >= 0 else left)

    def seek(self, pos: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(pos, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        """Nothing: the input closes its file itself."""

    @property
    def closed(self) -> bool:
        return self._file.closed


def _arrow_batches(pa: Any, input: Input) -> Iterator[pa.RecordBatch]:
    input.file.seek(0)
    file = pa.PythonFile(_Bounded(input), mode="r")
    if input.format == "parquet":
        yield from parquet_batches(file, BOUNDS, input.name)
        return
    is_file = input.head().startswith(b"ARROW1")
    file.seek(8 if is_file else 0)
    check_messages(file, input.name)
    file.seek(0)
    if is_file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
    else:
        yield from pa.ipc.open_stream(file)


def _with_bodies(pa: Any, batch: pa.RecordBatch, input: Input, first: int) -> pa.RecordBatch:
    # Bodies that are text with their encoding beside become bytes again.
    names = batch.schema.names
    for name in ("body", "body_stored"):
        if names.count(f"{name}_encoding") == 1 == names.count(name):
            bodies = []
            pairs = zip(batch.column(name).to_pylist(), batch.column(f"{name}_encoding").to_pylist(), strict=True)
            for number, (value, encoding) in enumerate(pairs, first):
                try:
                    bodies.append(decoded(name, value, {f"{name}_encoding": encoding}))
                except (ValueError, TypeError) as error:
                    raise InvalidMessageError(f"{input.name}, row {number}: {error}") from None
            arrays = [pa.array(bodies, pa.large_binary()) if each == name else batch.column(each) for each in names]
            batch = pa.RecordBatch.from_arrays(arrays, names=names)
        elif "corrupt" in names and name in names and batch.column(name).null_count:
            row = batch.column(name).is_null().to_pylist().index(True)
            if not batch.column("corrupt")[row].as_py():
                raise InvalidMessageError(
                    f"{input.name}, row {first + row}: its body could not be decompressed when it was exported; leave such "
                    "rows out"
                )
    kept = [name for name in names if name not in ENCODINGS and name not in ALSO_IGNORED]
    return batch if len(kept) == len(names) else batch.select(kept)


def _is_text(pa: Any, kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def reconciled(table: pa.Table, literals: dict[str, Any]) -> pa.Table:
    """Leave one of what a table says twice, and what `literals` replace.

    Exported rows have keys and tags as columns and among the properties, which keep their order and their spaces.
    """
    pa = import_pyarrow()
    import pyarrow.compute as pc

    given = [name for name in table.column_names if name in literals]
    table = table.drop_columns(given) if given else table
    if "properties" not in table.column_names or not pa.types.is_map(table.schema.field("properties").type):
        return table
    kind = table.schema.field("properties").type
    place = table.column_names.index("properties")
    if not (_is_text(pa, kind.key_type) and _is_text(pa, kind.item_type)):
        kind = pa.map_(pa.large_string(), pa.large_string())
        try:
            table = table.set_column(place, "properties", table.column("properties").cast(kind))
        except pa.ArrowException:
            # The store refuses the column, and says why.
            return table
    replaced = {_PROPERTIES[name] for name in literals if name in _PROPERTIES}
    if replaced:
        rows = [
            None if row is None else [pair for pair in row if pair[0] not in replaced]
            for row in table.column("properties").to_pylist()
        ]
        table = table.set_column(place, "properties", pa.array(rows, kind))
    for name, property in _PROPERTIES.items():
        if name not in table.column_names:
            continue
        told = pc.map_lookup(table.column("properties"), pa.scalar(property, kind.key_type), "last").cast(
            pa.large_string()
        )
        column = table.column(name)
        texts = column
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            if not _is_text(pa, column.type.value_type):
                continue
            texts = pc.binary_join(column.cast(pa.large_list(pa.large_string())), pa.scalar(" ", pa.large_string()))
        elif not _is_text(pa, column.type):
            continue
        same = told
        if name == "keys":
            same = pc.utf8_trim(pc.replace_substring_regex(told, " +", " "), " ")
        agrees = pc.fill_null(pc.equal(same, texts.cast(pa.large_string())), False)
        place = table.column_names.index(name)
        table = table.set_column(place, name, pc.if_else(agrees, pa.scalar(None, column.type), column))
    return table


# What is unpacked at once without a question, and how many times its bytes in the file anything larger may be.
_UNPACKED = 256 << 20
_RATIO = 1000
# Bytes of a column of a row group whose values are gathered.
_SHARED = 16 << 20
# More values than the properties of a message can be.
_VALUES = 1 << 16
_ROW = 64


def _sizes(array: Any) -> np.ndarray:
    # Bytes of each value as plain Arrow.
    pa = import_pyarrow()
    types, kind, num = pa.types, array.type, len(array)
    if isinstance(kind, pa.BaseExtensionType):
        return _sizes(array.storage)
    if types.is_dictionary(kind):
        return _taken(_sizes(array.dictionary), array.indices)
    if types.is_run_end_encoded(kind):
        ends = np.asarray(array.run_ends.to_numpy(zero_copy_only=False), np.int64)
        runs = np.searchsorted(ends, np.arange(num) + array.offset, side="right")
        return np.asarray(_sizes(array.values)[runs])
    if types.is_string_view(kind) or types.is_binary_view(kind):
        views = np.frombuffer(array.buffers()[1], np.int32).reshape(-1, 4)
        return np.asarray(views[array.offset : array.offset + num, 0], np.int64) + 16
    if types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
        return _filled(_compute().binary_length(array)) + 8
    if types.is_fixed_size_binary(kind):
        return np.full(num, kind.byte_width, np.int64)
    if types.is_map(kind):
        return _in_lists(array, _sizes(array.keys) + _sizes(array.items))
    if types.is_list(kind) or types.is_large_list(kind):
        return _in_lists(array, _sizes(array.values))
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        begins, counts = (
            np.asarray(each.to_numpy(zero_copy_only=False), np.int64) for each in (array.offsets, array.sizes)
        )
        sums = np.concatenate([[0], np.cumsum(_sizes(array.values))])
        return np.asarray(sums[begins[:num] + counts[:num]] - sums[begins[:num]] + 8)
    if types.is_fixed_size_list(kind):
        values = array.values.slice(array.offset * kind.list_size, num * kind.list_size)
        return np.asarray(_sizes(values).reshape(num, kind.list_size).sum(axis=1)) + 8
    if types.is_struct(kind):
        return sum((_sizes(each) for each in array.flatten()), np.zeros(num, np.int64))
    return np.full(num, 16, np.int64)


def _compute() -> Any:
    import pyarrow.compute

    return pyarrow.compute


def _filled(numbers: Any) -> np.ndarray:
    return np.asarray(_compute().fill_null(numbers, 0).to_numpy(zero_copy_only=False), np.int64)


def _taken(sizes: np.ndarray, indices: Any) -> np.ndarray:
    places = _filled(indices)
    return sizes[places] + 4 if len(sizes) else np.zeros(len(places), np.int64)


def _in_lists(array: Any, sizes: np.ndarray) -> np.ndarray:
    ends = np.asarray(array.offsets.to_numpy(zero_copy_only=False), np.int64)
    sums = np.concatenate([[0], np.cumsum(sizes)])
    return np.asarray(sums[ends[1:]] - sums[ends[:-1]] + 8)


def bounded_parts(
    batch: pa.RecordBatch, bounds: Bounds, name: str, first: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Cut a validated batch into parts within the bounds as plain Arrow, each with the row at which it begins; a row is never cut.

    `name` and `first` are the file, and the number of the batch's first row in it.  InvalidMessageError for a row that is too
    large.
    """
    sizes = np.full(batch.num_rows, _ROW, np.int64)
    for column in batch.columns:
        sizes += _sizes(column)
    for row in np.flatnonzero(sizes > bounds.largest)[:1].tolist():
        raise InvalidMessageError(f"{name}, row {first + row}: it has {sizes[row]} bytes; a message has {bounds.largest} at most")
    ends = np.cumsum(sizes)
    start = 0
    while start < batch.num_rows:
        before = int(ends[start - 1]) if start else 0
        end = min(max(int(np.searchsorted(ends, before + bounds.size, side="right")), start + 1), start + bounds.rows)
        part = batch.slice(start, end - start)
        yield start, _with_columns(part, [_plain(column) for column in part.columns])
        start = end


def _with_columns(batch: pa.RecordBatch, arrays: list[Any]) -> pa.RecordBatch:
    pa = import_pyarrow()
    if all(array.type == field.type for array, field in zip(arrays, batch.schema, strict=True)):
        return batch
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def _plain(array: Any) -> Any:
    # Without the dictionaries that `parquet_batches` asks for.
    pa = import_pyarrow()
    kind = array.type
    if pa.types.is_dictionary(kind):
        return array.dictionary_decode()
    if pa.types.is_map(kind) and (pa.types.is_dictionary(kind.key_type) or pa.types.is_dictionary(kind.item_type)):
        begin, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        keys, items = (_plain(each.slice(begin, end - begin)) for each in (array.keys, array.items))
        offsets = _compute().subtract(array.offsets, begin)
        return pa.MapArray.from_arrays(_masked(pa, offsets, array), keys, items)
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_dictionary(kind.value_type):
        begin, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        offsets = _compute().subtract(array.offsets, begin)
        values = _plain(array.values.slice(begin, end - begin))
        return type(array).from_arrays(_masked(pa, offsets, array), values)
    return array


def _masked(pa: Any, offsets: Any, array: Any) -> Any:
    # A null in the offsets is a null in the list.
    if not array.null_count:
        return offsets
    absent = np.append(array.is_null().to_numpy(zero_copy_only=False), False)
    return pa.array(offsets.to_numpy(zero_copy_only=False), offsets.type, mask=absent)


def _too_much(name: str, what: str, unpacked: int, packed: int) -> StoreError:
    return StoreError(
        f"{what} unpacks to {unpacked} bytes from {packed}; write the file again in smaller batches or row groups", name
    )


def parquet_batches(file: Any, bounds: Bounds, name: str) -> Iterator[pa.RecordBatch]:
    """The record batches of a Parquet file: within the bounds, fewer rows where rows are or may be large.

    Texts of a small row group come as dictionaries.  In a large one the library would gather all values of the group for that,
    and there the size of its dictionary says how large values may be.  StoreError for a row group that unpacks to much more than
    a file of messages does.
    """
    import pyarrow.parquet

    opened = pyarrow.parquet.ParquetFile(file)
    metadata, schema = opened.metadata, opened.schema
    leaves = [schema.column(number) for number in range(len(schema.names))]
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        shared = []
        weight, most = sum(max(leaf.length, 0) for leaf in leaves), bounds.rows
        for column, leaf in enumerate(leaves):
            chunk = group.column(column)
            packed, unpacked = chunk.total_compressed_size, chunk.total_uncompressed_size
            what = f"column {leaf.path} of row group {number}"
            if unpacked > max(_UNPACKED, _RATIO * packed):
                raise _too_much(name, what, unpacked, packed)
            if chunk.num_values > _VALUES * group.num_rows:
                raise StoreError(
                    f"{what} has {chunk.num_values} values in {group.num_rows} rows: too many for messages", name
                )
            values = -(-chunk.num_values // max(group.num_rows, 1))
            weight += unpacked // max(group.num_rows, 1) + 8 * values
            if leaf.physical_type != "BYTE_ARRAY":
                continue
            if unpacked <= _SHARED:
                shared.append(leaf.path)
            else:
                most = min(most, _UNPACKED // max(_dictionary_size(file, chunk) * values, 1))
        reader = pyarrow.parquet.ParquetFile(file, metadata=metadata, read_dictionary=shared)
        yield from reader.iter_batches(max(min(most, bounds.size // max(weight, 1)), 1), row_groups=[number])


def _dictionary_size(file: Any, chunk: Any) -> int:
    # Bytes of the dictionary of a column of a row group, 0 without one: its page is the first.
    begin = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < begin:
        begin = chunk.dictionary_page_offset
    file.seek(max(begin, 0))
    kind, size = _page_header(file.read(16))
    return size if kind == 2 else 0


def _page_header(data: bytes) -> tuple[int, int]:
    # The first two fields of a page's header, 32-bit numbers in Thrift's compact form: its kind, and its bytes unpacked.
    found, pos = [0, 0], 0
    for field in range(2):
        if data[pos : pos + 1] != b"\x15":
            break
        pos += 1
        number = shift = 0
        while pos < len(data):
            number |= (data[pos] & 0x7F) << shift
            shift += 7
            pos += 1
            if data[pos - 1] < 0x80:
                break
        found[field] = number >> 1
    return found[0], found[1]


def check_messages(source: Any, name: str) -> None:
    """Raise `StoreError` if a record batch of an Arrow stream (a file has one from byte 8) unpacks to much more than its bytes."""
    pa = import_pyarrow()
    number = 0
    while True:
        try:
            message = pa.ipc.read_message(source)
        except EOFError:
            return
        body = message.body
        if body is not None and body.size:
            unpacked = _unpacked(memoryview(message.metadata), memoryview(body))
            if unpacked > max(_UNPACKED, _RATIO * body.size):
                raise _too_much(name, f"batch {number}", unpacked, body.size)
            number += 1


def _unpacked(metadata: memoryview, body: memoryview) -> int:
    # What the buffers of a batch say that they unpack to; the tables are those of Arrow's Message.fbs.
    try:
        message = _table(metadata, _number("<I", metadata, 0))
        kind = metadata[message[1]] if message[1] else 0
        batch = _follow(metadata, message[2])
        if kind == 2:
            batch = _follow(metadata, batch[1])
        elif kind != 3:
            return 0
        if not batch[3]:
            return len(body)
        vector = batch[2] + _number("<I", metadata, batch[2])
        total = 0
        for place in range(_number("<I", metadata, vector)):
            begin, length = struct.unpack_from("<qq", metadata, vector + 4 + 16 * place)
            stated = _number("<q", body, begin) if length >= 8 else 0
            total += max(stated, length)
        return total
    except (struct.error, IndexError, ValueError):
        # The library says what is wrong with it.
        return 0


def _number(form: str, data: memoryview, pos: int) -> int:
    if pos < 0:
        raise IndexError
    return int(struct.unpack_from(form, data, pos)[0])


def _table(data: memoryview, pos: int) -> list[int]:
    # Where its first fields are, 0 for one that is not there.
    fields = pos - _number("<i", data, pos)
    size = _number("<H", data, fields)
    found = [_number("<H", data, fields + at) if at < size else 0 for at in range(4, 12, 2)]
    return [pos + each if each else 0 for each in found]


def _follow(data: memoryview, pos: int) -> list[int]:
    return _table(data, pos + _number("<I", data, pos))
