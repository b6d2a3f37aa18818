"""What else of a store is a table: its queues, the entries of its index files, the progress of its consumers.

Owns the columns of these tables.  Each is read when a query asks for it, and only then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rmqstore import _numpy as np
from rmqstore.config import StoreConfig
from rmqstore.errors import OffsetOutOfRangeError
from rmqstore.offline.describe import consumer_rows, queue_rows
from rmqstore.polars.reading import Reading
from rmqstore.polars.scan import import_polars, scan_store
from rmqstore.store.message_store import MessageStore

if TYPE_CHECKING:
    import polars as pl

__all__ = ["scan_tables"]

# Entries of an index file that are read at once.
_ENTRIES = 1 << 18


def scan_tables(
    source: str | os.PathLike[str] | MessageStore, *, config: StoreConfig | None = None
) -> dict[str, pl.LazyFrame]:
    """A store as tables, for a `polars.SQLContext` or by themselves; nothing is read before one is collected.

    ``messages`` is `scan_store`. ``queues`` has a row for each queue: ``topic``, ``queue_id``, ``kind``,
    ``min_queue_offset``, ``max_queue_offset``, ``messages``, ``files``, ``first_store_timestamp``,
    ``last_store_timestamp``. ``consumers`` has a row for each group and queue: ``group``, ``topic``, ``queue_id``,
    ``queue_offset`` (the next one to consume), ``max_queue_offset``, ``lag``, ``waiting_since`` (when that one was
    stored), ``kind`` ("system", "retry" or "dlq" where it is RocketMQ's own). ``index_entries`` has the entries of the
    index files as they lie on disk: ``file``, ``entry``, ``key_hash``, ``phy_offset``, ``store_timestamp`` (whole seconds
    after the file's first).

    Parameters
    ----------
    source, config
        As of `scan_store`.

    Returns
    -------
    dict of str to polars.LazyFrame
        Times are ``Datetime("ms", "UTC")``, all integers ``Int64``.

    Raises
    ------
    MissingDependencyError
        polars or pyarrow is not installed.
    """
    polars = import_polars()
    text, number, time = polars.String, polars.Int64, polars.Datetime("ms", "UTC")
    queues = {
        "topic": text, "queue_id": number, "kind": text, "min_queue_offset": number, "max_queue_offset": number,
        "messages": number, "files": number, "first_store_timestamp": time, "last_store_timestamp": time,
    }  # fmt: skip
    entries = {"file": text, "entry": number, "key_hash": number, "phy_offset": number, "store_timestamp": time}
    consumers = {
        "group": text, "topic": text, "queue_id": number, "queue_offset": number, "max_queue_offset": number,
        "lag": number, "waiting_since": time, "kind": text,
    }  # fmt: skip

    def of(schema: dict[str, Any], columns_of: Callable[[MessageStore], Iterable[dict[str, Any]]]) -> pl.LazyFrame:
        def read(
            with_columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, batch_size: int | None
        ) -> Reading:
            def frames(store: MessageStore) -> Iterator[pl.DataFrame]:
                left = n_rows
                for columns in columns_of(store):
                    frame: pl.DataFrame = polars.DataFrame(columns, schema=schema)
                    if left is not None:
                        frame = frame.head(left)
                        left -= frame.height
                    if predicate is not None:
                        frame = frame.filter(predicate)
                    yield frame if with_columns is None else frame.select(with_columns)
                    if left == 0:
                        break

            return Reading(source, config, frames)

        lazy: pl.LazyFrame = polars.io.plugins.register_io_source(read, schema=schema)
        return lazy

    return {
        "messages": scan_store(source, config=config),
        "queues": of(queues, lambda store: [_columns(list(queues), queue_rows(store))]),
        "index_entries": of(entries, _index_entries),
        "consumers": of(consumers, lambda store: [_columns(list(consumers), consumer_rows(store))]),
    }


def _columns(names: list[str], rows: Iterable[dict[str, Any]]) -> dict[str, list[Any]]:
    listed = list(rows)
    return {name: [_text(row[name]) for row in listed] for name in names}


def _text(value: Any) -> Any:
    # A folder's name that is not UTF-8 has surrogates, which Polars takes in no text.
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _index_entries(store: MessageStore) -> Iterator[dict[str, Any]]:
    service = store.index_service
    for name in () if service is None else service.names:
        assert service is not None
        try:
            index = service.file(name)
        except (FileNotFoundError, OffsetOutOfRangeError):
            # Retention deleted it since it was listed.
            continue
        header = index.header
        behind = min(header.index_count, index.index_num)
        for first in range(1, behind, _ENTRIES):
            num = min(_ENTRIES, behind - first)
            hashes, phy_offsets, seconds = index.read_entries(first, num)
            yield {
                "file": [name] * num,
                "entry": np.arange(first, first + num),
                "key_hash": hashes,
                "phy_offset": phy_offsets,
                "store_timestamp": header.begin_timestamp + 1000 * seconds.astype(np.int64),
            }
