"""How much memory the rows of Arrow and Parquet files take, before they take it.

A small file may stand for many gigabytes: a value that all rows share (a dictionary, a view, a run), and pages of zeros.  Owns the
sizes of rows as they will be in memory, and the limits of what a file unpacks to.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rmqstore import _numpy as np
from rmqstore.errors import InvalidMessageError, StoreError
from rmqstore.store.columns import import_pyarrow

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Bounds", "bounded_parts", "check_messages", "parquet_batches"]

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


@dataclass(frozen=True)
class Bounds:
    """How much is held at once.

    Attributes
    ----------
    rows, size : int
        Rows and bytes of a part.
    largest : int
        Bytes that one row may have.
    """

    rows: int
    size: int
    largest: int


def bounded_parts(
    batch: pa.RecordBatch, bounds: Bounds, name: str, first: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Cut a batch that was validated into parts within the bounds as plain Arrow; a row is never cut.

    Parameters
    ----------
    name : str
        The file, and the number of the batch's first row in it.
    first : int

    Yields
    ------
    (int, pyarrow.RecordBatch)
        The row with which the part begins, and the part without dictionaries.

    Raises
    ------
    InvalidMessageError
        A row has more bytes than one may have.
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
    and there the size of its dictionary says how large values may be.

    Raises
    ------
    StoreError
        A row group unpacks to much more than a file of messages does.
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
    """Raise `StoreError` if a record batch of an Arrow stream unpacks to much more than its bytes.

    Parameters
    ----------
    source : pyarrow.NativeFile
        At the begin of the stream; a file of Arrow has one from its 8th byte on.
    """
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
