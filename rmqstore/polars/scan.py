"""A store's messages as a LazyFrame: which call of `MessageStore` answers what a query asks.

Owns the choice between the index, a queue and the log, and the schema.  The rows are always those that a scan of the
log and the filter give, in the order of the log; where another way may not have them all, the log is scanned.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rmqstore import _numpy as np
from rmqstore.config import StoreConfig
from rmqstore.errors import InvalidMessageError, MissingDependencyError, OffsetOutOfRangeError
from rmqstore.files.os_errors import is_unreadable
from rmqstore.message import is_light_queue, parse_message_id
from rmqstore.offline.describe import consumer_columns, consumer_places, queue_rows
from rmqstore.polars.predicate import Limit, limits_of
from rmqstore.selection import Selection
from rmqstore.store.columns import DEFAULT_COLUMNS, ColumnOptions, import_pyarrow, scan_schema
from rmqstore.store.message_store import MessageStore

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

__all__ = ["Reading", "import_polars", "scan_store", "scan_tables"]

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
        "queues": of(queues, lambda store: [_columns_of_rows(list(queues), queue_rows(store))]),
        "index_entries": of(entries, _index_entries),
        "consumers": of(
            consumers, lambda store: [_readable(consumer_columns(store, consumer_places(store)))]
        ),
    }


def _columns_of_rows(names: list[str], rows: Iterable[dict[str, Any]]) -> dict[str, Sequence[Any]]:
    listed = list(rows)
    return _readable({name: [row[name] for row in listed] for name in names})


def _readable(columns: dict[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    return {name: _plain_texts(values) for name, values in columns.items()}


def _plain_texts(values: Sequence[Any]) -> Sequence[Any]:
    # A folder's name that is not UTF-8 has surrogates, which Polars takes in no text.  Many rows have few names.
    if not values or not isinstance(values[0], str):
        return values
    texts = {value: value.encode("utf-8", "backslashreplace").decode() for value in set(values)}
    return [texts[value] for value in values]


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


_working: set[Reading] = set()
_changed = threading.Condition()
_over = False


class Reading:
    """The frames that one query reads from a store; an iterator."""

    def __init__(
        self,
        source: str | os.PathLike[str] | MessageStore,
        config: StoreConfig | None,
        frames: Callable[[MessageStore], Iterator[pl.DataFrame]],
    ):
        self.store: MessageStore | None = None
        if isinstance(source, MessageStore):
            self.store, self._frames = source, frames(source)
        else:
            self._frames = self._opened(source, config, frames)

    def _opened(
        self,
        source: str | os.PathLike[str],
        config: StoreConfig | None,
        frames: Callable[[MessageStore], Iterator[pl.DataFrame]],
    ) -> Iterator[pl.DataFrame]:
        with MessageStore.open(source, config=config, read_only=True) as self.store:
            yield from frames(self.store)

    def __iter__(self) -> Reading:
        return self

    def __next__(self) -> pl.DataFrame:
        with _changed:
            if _over:
                raise StopIteration
            _working.add(self)
        try:
            return next(self._frames)
        finally:
            with _changed:
                _working.discard(self)
                _changed.notify_all()


def _end_all() -> None:
    global _over
    with _changed:
        _over = True
        while _working:
            for each in _working:
                # A batch may take minutes, but not of a store that is closed.
                if each.store is not None:
                    with contextlib.suppress(Exception):
                        each.store.close()
            # A store that is being opened now is closed the next time.
            _changed.wait(0.1)


def _after_fork_in_child() -> None:
    # The threads are the parent's.
    global _changed
    _changed = threading.Condition()
    _working.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_end_all)


# Rows of a batch at most; Polars asks for about as many.
_BATCH = 65536
# More places, queues or pairs of topic and key than these, and one pass over the log is the better way.
_PLACES, _QUEUES, _QUESTIONS = 256, 64, 65536
# Rows that are taken out of a queue; of more, most of the log is wanted anyway, and a table is held as a whole.
_QUEUE_ROWS = 1 << 20
_INT32 = range(-(2**31), 2**31)
_INT64_MAX = 2**63 - 1


def import_polars(what: str = "a LazyFrame needs", extra: str = "polars") -> Any:
    """The library polars, which only this package needs; MissingDependencyError says what for and how to install it."""
    try:
        import polars
        import polars.io.plugins
    except ImportError:
        raise MissingDependencyError(
            f"{what} the library polars: install it with 'pip install rmqstore[{extra}]'"
        ) from None
    import_pyarrow()
    return polars


def scan_store(
    source: str | os.PathLike[str] | MessageStore,
    columns: Iterable[str] | None = None,
    *,
    config: StoreConfig | None = None,
) -> pl.LazyFrame:
    """The messages of a store as a Polars LazyFrame, oldest first; nothing is read before it is collected.

    Only the columns that a query needs are decoded, and no more rows than a limit without a filter asks for.  Of a
    filter these parts choose what is read; Polars applies the whole of it to what was read:

    - ``keys`` (``list.contains``, or SQL's ``'k' = any(keys)``) and ``unique_key``: the index, best with a topic.  The
      log is read only where no index file covers it.
    - ``phy_offset`` and ``msg_id``: these places of the log.
    - ``queue_offset`` from 1 on with one topic, best with a queue: the queues that have the first of the range.
    - ``topic``, ``queue_id``, ``tags``, ``store_timestamp``, ranges of ``phy_offset``: the scan of the log.

    A message that a transaction rolled back is in no index, and without a topic the index is asked for the topics that
    have a queue, so that a key may then lead to fewer messages than the log has.

    They may be compared with literals by ``==``, ``<``, ``<=``, ``>``, ``>=`` (numbers and times), `is_in` and
    `is_between`, and be joined by ``&`` and ``|``.

    Parameters
    ----------
    source : path or MessageStore
        A store's root directory, which is opened read-only whenever the frame is collected, so that each answer is of
        that time and a running broker is not disturbed; or an open store, which has to stay open until then.
    columns : iterable of str, optional
        As of `MessageStore.scan`; by default the same ones, and ``unique_key``.
    config : StoreConfig, optional
        As of `MessageStore.open`, where `source` is a path.

    Returns
    -------
    polars.LazyFrame
        Columns of the types that docs/columns.md has: times are ``Datetime("ms", "UTC")``.  All integers are ``Int64``, as
        Polars sums others in their own size, and sizes soon sum to more than 2 GiB.  Texts and bodies of a scan
        are not copied: a frame that is collected from it keeps the segments mapped that they lie in, also after
        retention deleted their files (docs/mmap.md).  Errors of the store are raised as themselves when it is
        collected; Polars before 2.0 raises `ComputeError` with their text.

    Raises
    ------
    ValueError
        A column that does not exist, or one that comes twice.
    MissingDependencyError
        polars or pyarrow is not installed.
    """
    polars = import_polars()
    names = (
        (*DEFAULT_COLUMNS, "unique_key")
        if columns is None
        else (columns,)
        if isinstance(columns, str)
        else tuple(columns)
    )
    # Polars sums 32-bit numbers in 32 bits.
    wide = {polars.Int32: polars.Int64}
    schema = polars.from_arrow(scan_schema(names).empty_table()).cast(wide).schema

    def read(
        with_columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, batch_size: int | None
    ) -> Reading:
        chosen = list(names) if with_columns is None else with_columns
        # A filter may be about columns that nobody wants to see.
        more = [] if predicate is None else [name for name in predicate.meta.root_names() if name not in chosen]
        # A limit that comes with a filter counts the rows in front of the filter.
        limits = limits_of(predicate) if predicate is not None and n_rows is None else {}
        rows = min(batch_size or _BATCH, _BATCH) if n_rows is None else max(min(n_rows, _BATCH), 1)

        def frames(store: MessageStore) -> Iterator[pl.DataFrame]:
            left = _INT64_MAX if n_rows is None else n_rows
            for batch in _batches(store, list(dict.fromkeys([*chosen, *more])), limits, rows):
                frame: pl.DataFrame = polars.from_arrow(batch).head(left).cast(wide)
                left -= frame.height
                if predicate is not None:
                    frame = frame.filter(predicate)
                yield frame.select(chosen)
                if left <= 0:
                    break

        return Reading(source, config, frames)

    lazy: pl.LazyFrame = polars.io.plugins.register_io_source(read, schema=schema)
    return lazy


def _batches(
    store: MessageStore, names: list[str], limits: dict[str, Limit], rows: int
) -> Iterator[pa.RecordBatch | pa.Table]:
    # All rows that are within the limits, in the order of the log, and maybe others.
    if any(limit.is_empty for limit in limits.values()):
        return
    # A scan refuses these; nothing that the others find has such a topic.
    is_light = "topic" in limits and any(map(is_light_queue, _texts(limits, "topic") or ()))
    places = None if is_light else _places(limits)
    if places is not None:
        for place in places:
            yield from store.scan(names, begin_phy_offset=place, end_phy_offset=place + 1, use_threads=False)
        return
    for found in () if is_light else (_by_key(store, names, limits), _by_queue(store, names, limits)):
        if found is not None:
            yield found
            return
    # Polars' own texts are views too, so that nothing is copied on the way.
    yield from store.scan_selected(_selected(limits), ColumnOptions(names, rows, views=True))


def _places(limits: dict[str, Limit]) -> list[int] | None:
    # Where in the log the rows lie, if the filter says so.
    places = limits["phy_offset"].values if "phy_offset" in limits else None
    ids = limits["msg_id"].values if "msg_id" in limits else None
    if ids is not None:
        named = set()
        for msg_id in ids:
            # No message has an id that is none.
            with contextlib.suppress(InvalidMessageError):
                named.add(parse_message_id(msg_id)[1])
        places = frozenset(named) if places is None else places & named
    if places is None or len(places) > _PLACES:
        return None
    return sorted(place for place in places if 0 <= place < _INT64_MAX)


def _by_key(store: MessageStore, names: list[str], limits: dict[str, Limit]) -> pa.Table | None:
    # What the index leads to; None where there is no key, or no index.
    name = next((name for name in ("unique_key", "keys") if name in limits), None)
    if name is None or store.index_service is None:
        return None
    if store.read_only:
        store.refresh()
    keys = _texts(limits, name)
    topics = _texts(limits, "topic") if "topic" in limits else store.topics()
    if keys is None or not topics or len(keys) * len(topics) > _QUESTIONS:
        return None
    if "topic" not in limits and store.unserved is not None:
        # There may be topics that no queue tells of.
        return None
    begin, end = _times(limits)
    table = store.query_table(
        [key for key in keys for _ in topics],
        topics * len(keys),
        list(dict.fromkeys([*names, "phy_offset"])),
        _INT64_MAX,
        begin,
        end,
        index_type="K" if name == "keys" else "U",
        max_log_bytes=None,
    )
    return _in_log_order(table, names)


def _by_queue(store: MessageStore, names: list[str], limits: dict[str, Limit]) -> pa.Table | None:
    # What the queues of one topic lead to; None where that might not be all that the log holds.
    try:
        return _by_readable_queue(store, names, limits)
    except OSError as error:
        if not is_unreadable(error):
            raise
        return None


def _by_readable_queue(store: MessageStore, names: list[str], limits: dict[str, Limit]) -> pa.Table | None:
    topics = _texts(limits, "topic") if "topic" in limits else None
    if topics is None or len(topics) != 1 or "queue_offset" not in limits or store.unserved is not None:
        return None
    (topic,) = topics
    if store.read_only:
        store.refresh()
    queue_ids = store.queue_ids(topic)
    if not queue_ids or len(queue_ids) > _QUEUES:
        return None
    if "queue_id" in limits:
        queue_ids = [each for each in queue_ids if not Limit(frozenset({each})).and_(limits["queue_id"]).is_empty]
    pa = import_pyarrow()
    import pyarrow.compute as pc

    asked = list(dict.fromkeys([*names, "phy_offset", "queue_offset", "corrupt"]))
    tables, total = [], 0
    for queue_id in queue_ids:
        low, high = store.min_queue_offset(topic, queue_id), store.max_queue_offset(topic, queue_id)
        for begin, end in _runs(limits["queue_offset"]):
            # What lies in front of a queue's first unit may be in the log all the same, where a file of the queue is
            # lost, and so may be all of a queue that ends before.  Records of transactions that are in no queue say 0.
            if begin is None or begin <= 0 or not low <= begin < high:
                return None
            first, behind = begin, high if end is None else min(end + 1, high)
            total += behind - first
            if total > _QUEUE_ROWS:
                return None
            table = store.get_table(topic, queue_id, first, behind - first, columns=asked)
            # Each unit leads to its own message, or the log is asked: batches, damage.
            offsets = table.column("queue_offset").to_numpy()
            if len(table) != behind - first or pc.any(table.column("corrupt")).as_py():
                return None
            if offsets[0] != first or offsets[-1] != behind - 1:
                return None
            tables.append(table)
    return _in_log_order(pa.concat_tables(tables), names) if tables else None


def _runs(limit: Limit) -> list[tuple[int | None, int | None]]:
    # The ranges of a limit, both ends included.
    if limit.values is None:
        return [(limit.low, limit.high)]
    runs: list[tuple[int, int]] = []
    for value in sorted(limit.values):
        if runs and runs[-1][1] == value - 1:
            runs[-1] = (runs[-1][0], value)
        else:
            runs.append((value, value))
    return list(runs)


def _in_log_order(table: pa.Table, names: list[str]) -> pa.Table:
    # Each message once, where several keys lead to it.
    places = np.unique(table.column("phy_offset").to_numpy(), return_index=True)[1]
    return table.select(names).take(places) if len(places) else table.select(names)


def _texts(limits: dict[str, Limit], name: str) -> list[str] | None:
    # Texts that records can be compared with as bytes; U+FFFD may stand for bytes that are not text.
    values = limits[name].values
    if values is None or any("\ufffd" in text for text in values):
        return None
    return sorted(values)


def _times(limits: dict[str, Limit]) -> tuple[int | None, int | None]:
    limit = limits.get("store_timestamp", Limit())
    if limit.values is not None:
        return min(limit.values), max(limit.values)
    return limit.low, limit.high


def _selected(limits: dict[str, Limit]) -> Selection:
    # What a scan can choose by, of the limits.
    begin, end = _times(limits)
    topics, tags = (_texts(limits, name) if name in limits else None for name in ("topic", "tags"))
    # "" and "*" are not tags to a subscription.
    tags = None if tags is None or {"", "*"} & set(tags) else tags
    queue_ids: Iterable[int] | None = None
    if "queue_id" in limits:
        limit = limits["queue_id"]
        if limit.values is not None:
            queue_ids = limit.values
        elif limit.low is not None and limit.high is not None and limit.high - limit.low < _QUEUES:
            queue_ids = range(limit.low, limit.high + 1)
    places = limits.get("phy_offset", Limit())
    low, high = (places.low, places.high) if places.values is None else (min(places.values), max(places.values))
    return Selection(
        topics=None if topics is None else tuple(topics),
        queue_ids=None if queue_ids is None else tuple(each for each in queue_ids if each in _INT32),
        tags=None if tags is None else tuple(tags),
        begin=begin,
        end=end,
        begin_phy_offset=None if low is None else min(max(low, 0), _INT64_MAX),
        end_phy_offset=None if high is None else min(max(high + 1, 0), _INT64_MAX),
    )
