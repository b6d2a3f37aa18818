"""Files of Arrow and Parquet as tables to put, with columns that agree with each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rmqstore.errors import InvalidMessageError, StoreError
from rmqstore.offline.import_bounds import bounded_parts, check_messages, parquet_batches
from rmqstore.offline.import_input import BOUNDS, Chunk, Input
from rmqstore.offline.import_rows import ALSO_IGNORED, ENCODINGS, decoded
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
