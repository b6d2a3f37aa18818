"""Files of Arrow and Parquet as tables to put, in parts whose size is known before they are decoded.

The rows of a small file may have many gigabytes: a value that all rows share (a dictionary, a view, a run).
"""

from __future__ import annotations

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


def _arrow_batches(pa: Any, input: Input) -> Iterator[pa.RecordBatch]:
    is_file = input.head().startswith(b"ARROW1")
    file = input.arrow_file()
    if input.format == "parquet":
        yield from parquet_batches(file, BOUNDS, input.name)
        return
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
        sizes, places = _sizes(array.dictionary), _filled(array.indices)
        return sizes[places] + 4 if len(sizes) else np.zeros(num, np.int64)
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
    # Numbers; what else there is, the store refuses.
    return np.full(num, 16, np.int64)


def _compute() -> Any:
    import pyarrow.compute

    return pyarrow.compute


def _filled(numbers: Any) -> np.ndarray:
    return np.asarray(_compute().fill_null(numbers, 0).to_numpy(zero_copy_only=False), np.int64)


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
        columns = [_plain(column) for column in part.columns]
        yield start, type(part).from_arrays(columns, names=part.schema.names)
        start = end


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


def parquet_batches(file: Any, bounds: Bounds, name: str) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a Parquet file: within the bounds, fewer rows where rows may be large.

    Texts come as dictionaries, so that a value that rows share is there once.  StoreError for a row group that unpacks to much more
    than a file of messages does.
    """
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(file)
    leaves = [metadata.schema.column(number) for number in range(metadata.num_columns)]
    texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    reader = pyarrow.parquet.ParquetFile(file, metadata=metadata, read_dictionary=texts)
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        weight = sum(max(leaf.length, 0) for leaf in leaves)
        for column, leaf in enumerate(leaves):
            chunk = group.column(column)
            packed, unpacked = chunk.total_compressed_size, chunk.total_uncompressed_size
            what = f"column {leaf.path} of row group {number}"
            if unpacked > max(_UNPACKED, _RATIO * packed):
                raise StoreError(
                    f"{what} unpacks to {unpacked} bytes from {packed}; write the file again in smaller row groups", name
                )
            if chunk.num_values > _VALUES * group.num_rows:
                raise StoreError(
                    f"{what} has {chunk.num_values} values in {group.num_rows} rows: too many for messages", name
                )
            weight += unpacked // max(group.num_rows, 1) + 8 * -(-chunk.num_values // max(group.num_rows, 1))
        yield from reader.iter_batches(max(min(bounds.rows, bounds.size // max(weight, 1)), 1), row_groups=[number])
