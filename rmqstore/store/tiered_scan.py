"""Scanning tiered storage: by itself, or in front of the local log of the same store.

Owns the order (tiered storage queue by queue, then the local log) and that no message comes twice.  It decodes nothing:
`tiered_columns` and `columns` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rmqstore.flatfile.flat_store import FlatStore
from rmqstore.store.columns import chosen_columns, encoded_columns, scan_log, tag_texts
from rmqstore.store.store_state import StoreState
from rmqstore.store.tiered_columns import FlatRange, chosen, flat_batches
from rmqstore.store.tiered_reading import tiered_ranges

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["scan_both", "scan_flat"]


def scan_flat(
    ranges: Iterable[FlatRange],
    columns: Iterable[str] | None,
    wanted: dict[int, set[str]] | None,
    times: tuple[int, int],
    batch_size: int,
    use_threads: bool,
    views: bool,
    read_dictionary: Iterable[str],
    crc_check: int,
    check_open: Callable[[], object],
) -> pa.RecordBatchReader:
    """The chosen messages of these ranges, see `rmqstore.tiered.TieredStore.scan`; parameters as of `scan_log`."""
    names = chosen_columns(columns)
    encoded = encoded_columns(read_dictionary)
    tags = tag_texts(wanted)
    make = chosen(names, batch_size, crc_check, views, encoded, tags, times)
    made = make()
    batches = flat_batches(ranges, _first(made, make), tags, use_threads=use_threads, check_open=check_open)
    return made.pa.RecordBatchReader.from_batches(made.schema, batches)


def _first(made: Any, make: Callable[[], Any]) -> Callable[[], Any]:
    spare = [made]
    return lambda: spare.pop() if spare else make()


def scan_both(
    state: StoreState,
    flat_store: FlatStore,
    columns: Iterable[str] | None,
    topic: str | Iterable[str] | None,
    queue_id: int | Iterable[int] | None,
    wanted: dict[int, set[str]] | None,
    times: tuple[int, int],
    batch_size: int,
    use_threads: bool,
    views: bool,
    read_dictionary: Iterable[str],
) -> pa.RecordBatchReader:
    """The messages of a store and its tiered storage, each once, see `MessageStore.scan`."""
    names = chosen_columns(columns)
    topics = None if topic is None else [topic] if isinstance(topic, str) else list(topic)
    numbers = None if queue_id is None else [queue_id] if isinstance(queue_id, int) else list(queue_id)
    encoded = encoded_columns(read_dictionary)
    state.refresh()
    # What only tiered storage has is settled now: what the local log loses meanwhile, it lacks in both.
    ranges = tiered_ranges(state, flat_store, topics, numbers)
    older = scan_flat(
        ranges, names, wanted, times, batch_size, use_threads, views, encoded, state.commit_log.crc_check,
        state.check_open,
    )  # fmt: skip
    local = scan_log(
        state.commit_log, names, topics, numbers, wanted, None, None, times, batch_size, use_threads, views, encoded,
        refresh=False,
    )  # fmt: skip

    def batches() -> Iterator[Any]:
        yield from older
        yield from local

    import pyarrow

    return pyarrow.RecordBatchReader.from_batches(older.schema, batches())
