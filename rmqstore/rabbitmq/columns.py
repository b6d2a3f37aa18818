"""Columns of messages as Arrow arrays, over the buffers that the compiled core filled.

Owns the Arrow types of what a message holds.  It opens no file and reads no term: `_term.message_columns` does.  Texts are
UTF-8 in Arrow; bytes that are none are replaced, value by value, in the columns where there are such.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rmqstore.errors import CorruptionError, MissingDependencyError
from rmqstore.rabbitmq import _term

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ARROW_COLUMNS", "arrow_arrays", "pyarrow"]

_BYTES = ("body", "properties")
# What can be asked for: the columns of messages but their status, which says of a row how much of it could be read.
ARROW_COLUMNS = tuple(_term.MESSAGE_COLUMNS)


def pyarrow() -> Any:
    """The module pyarrow.

    Raises
    ------
    MissingDependencyError
        It is not installed.
    """
    try:
        import pyarrow
    except ImportError:
        raise MissingDependencyError("this needs pyarrow: install it with pip install 'rmqstore[arrow]'") from None
    return pyarrow


def _validity(pa: Any, valid: np.ndarray) -> Any:
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _texts(offsets: np.ndarray, data: np.ndarray, valid: Any, count: int, utf8: bool) -> pa.Array:
    pa = pyarrow()
    array = pa.Array.from_buffers(pa.binary(), count, [valid, pa.py_buffer(offsets), pa.py_buffer(data)])
    if utf8:
        return array.view(pa.string())
    found = [None if value is None else value.decode("utf-8", "replace") for value in array.to_pylist()]
    return pa.array(found, pa.string())


def _header_texts(columns: _term.MessageColumns, text_of: Callable[[dict[str, Any]], str]) -> list[str | None]:
    offsets, data, valid = columns["headers"]
    content, ends = data.tobytes(), offsets.tolist()
    found: list[str | None] = []
    # Messages of one sender mostly have the same headers.
    known: dict[bytes, str | None] = {}
    for i, has in enumerate(valid.tolist()):
        if not has:
            found.append(None)
            continue
        table = content[ends[i] : ends[i + 1]]
        if table not in known:
            if len(known) >= 4096:
                known.clear()
            try:
                known[table] = text_of(_term.decode_table(table))
            except CorruptionError:
                known[table] = None
        found.append(known[table])
    return found


def arrow_arrays(
    columns: _term.MessageColumns,
    names: Sequence[str] | None = None,
    *,
    header_text: Callable[[dict[str, Any]], str] | None = None,
) -> dict[str, pa.Array]:
    """Arrow arrays of columns, most of them without a copy.

    Parameters
    ----------
    columns : MessageColumns
        As of `_term.message_columns`.
    names : sequence of str, optional
        Which; default: all that were filled.
    header_text : callable, optional
        Makes text (JSON, say) of a decoded table of headers; without it headers are the table's bytes.

    Returns
    -------
    dict of str to pyarrow.Array
        ``status``: uint8.  ``persistent``: bool.  ``msg_id``: fixed_size_binary[16].  ``routing_keys``: list<string>.
        ``delivery_mode``, ``priority``: uint8.  ``timestamp``: timestamp[s, UTC], null beyond 2**63 seconds.  ``body``,
        ``properties``: binary.  ``headers``: binary, or string with `header_text` (null where the table is damaged).  Others:
        string.

    Raises
    ------
    MissingDependencyError
        pyarrow is not installed.
    """
    pa = pyarrow()
    count = columns.count
    made: dict[str, Any] = {}
    for name in columns.columns if names is None else names:
        value = columns[name]
        if name == "status":
            made[name] = pa.array(value)
        elif name == "persistent":
            bits = pa.py_buffer(np.packbits(value, bitorder="little"))
            made[name] = pa.Array.from_buffers(pa.bool_(), count, [None, bits])
        elif name == "msg_id":
            ids, valid = value
            made[name] = pa.Array.from_buffers(pa.binary(16), count, [_validity(pa, valid), pa.py_buffer(ids)])
        elif name == "routing_keys":
            lists, offsets, data, valid = value
            keys = _texts(offsets, data, None, int(lists[-1]), columns.utf8[name])
            made[name] = pa.Array.from_buffers(
                pa.list_(pa.string()), count, [_validity(pa, valid), pa.py_buffer(lists)], children=[keys]
            )
        elif name == "timestamp":
            seconds, valid = value
            good = valid.astype(bool) & (seconds < 1 << 63)
            made[name] = pa.Array.from_buffers(
                pa.timestamp("s", "UTC"), count, [_validity(pa, good), pa.py_buffer(seconds.view(np.int64))]
            )
        elif name in ("delivery_mode", "priority"):
            numbers, valid = value
            made[name] = pa.Array.from_buffers(pa.uint8(), count, [_validity(pa, valid), pa.py_buffer(numbers)])
        elif name == "headers" and header_text is not None:
            made[name] = pa.array(_header_texts(columns, header_text), pa.string())
        else:
            offsets, data, valid = value
            bits = _validity(pa, valid)
            if name in _BYTES or name == "headers":
                made[name] = pa.Array.from_buffers(
                    pa.binary(), count, [bits, pa.py_buffer(offsets), pa.py_buffer(data)]
                )
            else:
                made[name] = _texts(offsets, data, bits, count, columns.utf8[name])
    return made
