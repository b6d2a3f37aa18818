"""Scanning tiered storage before the local log of the same store.

Owns the order (tiered storage queue by queue, then the local log) and that no message comes twice.  It decodes nothing:
`tiered_columns` and `columns` do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rmqstore.selection import Selection
from rmqstore.store.columns import ColumnOptions, scan_log
from rmqstore.store.store_state import StoreState
from rmqstore.store.tiered_columns import FlatScan
from rmqstore.store.tiered_reading import tiered_ranges

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["scan_both"]


def scan_both(
    state: StoreState, selection: Selection, options: ColumnOptions, *, use_threads: bool
) -> pa.RecordBatchReader:
    """The messages of a store and its tiered storage, each once, see `MessageStore.scan`."""
    state.refresh()
    # What only tiered storage has is settled now: what the local log loses meanwhile, it lacks in both.
    ranges = [each for flat_store in state.older for each in tiered_ranges(state, flat_store, selection)]
    scan = FlatScan(selection, options, state.commit_log.crc_check, state.check_open)
    older = scan.read(ranges, use_threads=use_threads)
    local = scan_log(state.commit_log, selection, options, use_threads=use_threads, refresh=False)

    def batches() -> Iterator[Any]:
        yield from older
        yield from local

    import pyarrow

    return pyarrow.RecordBatchReader.from_batches(older.schema, batches())
