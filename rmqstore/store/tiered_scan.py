"""Scanning tiered storage: by itself, or in front of the local log of the same store.

Owns the order (tiered storage queue by queue, then the local log) and that no message comes twice.  It decodes nothing:
`tiered_columns` and `columns` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rmqstore.selection import Selection
from rmqstore.store.columns import ColumnOptions, Columns, scan_log
from rmqstore.store.store_state import StoreState
from rmqstore.store.tiered_columns import FlatRange, flat_batches
from rmqstore.store.tiered_reading import tiered_ranges

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["scan_both", "scan_flat"]


def scan_flat(
    ranges: Iterable[FlatRange],
    selection: Selection,
    options: ColumnOptions,
    *,
    use_threads: bool,
    crc_check: int,
    check_open: Callable[[], object],
) -> pa.RecordBatchReader:
    """The chosen messages of these ranges, see `rmqstore.tiered.TieredStore.scan`."""

    def make() -> Columns:
        return made.pop() if made else Columns(options, crc_check, selection, by_place=True)

    # Errors of the arguments come at once.
    made = [Columns(options, crc_check, selection, by_place=True)]
    pa, schema = made[0].pa, made[0].schema
    batches = flat_batches(ranges, make, selection, use_threads=use_threads, check_open=check_open)
    return pa.RecordBatchReader.from_batches(schema, batches)


def scan_both(
    state: StoreState, selection: Selection, options: ColumnOptions, *, use_threads: bool
) -> pa.RecordBatchReader:
    """The messages of a store and its tiered storage, each once, see `MessageStore.scan`."""
    state.refresh()
    # What only tiered storage has is settled now: what the local log loses meanwhile, it lacks in both.
    ranges = [each for flat_store in state.older for each in tiered_ranges(state, flat_store, selection)]
    older = scan_flat(
        ranges,
        selection,
        options,
        use_threads=use_threads,
        crc_check=state.commit_log.crc_check,
        check_open=state.check_open,
    )
    local = scan_log(state.commit_log, selection, options, use_threads=use_threads, refresh=False)

    def batches() -> Iterator[Any]:
        yield from older
        yield from local

    import pyarrow

    return pyarrow.RecordBatchReader.from_batches(older.schema, batches())
