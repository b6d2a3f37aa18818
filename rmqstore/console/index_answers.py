"""Index files: what their headers say, and how long their chains are.

Owns the histogram of the chain lengths, which goes over all entries of a file once, and keeps some of them.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from rmqstore.console.anatomy import file_name
from rmqstore.console.errors import NotFoundError
from rmqstore.errors import OffsetOutOfRangeError
from rmqstore.index.index_file import IndexFile
from rmqstore.rocksdb.index import index_folder
from rmqstore.store.message_store import MessageStore

__all__ = ["INDEX_COLUMNS", "IndexAnswers"]

INDEX_COLUMNS = ("name", "entries", "fill", "slots_used", "mean_chain", "begin_timestamp", "end_timestamp")
_HISTOGRAMS_KEPT = 32
_ENTRIES_READ = 1 << 20


class IndexAnswers:
    """Answers about the index of one store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._histograms: OrderedDict[tuple[Any, ...], dict[str, Any]] = OrderedDict()

    def index(self, store: MessageStore) -> list[dict[str, Any]]:
        """The index files, oldest first."""
        service = store.index_service
        if service is None:
            return []
        service.load()
        found = []
        for name in service.names:
            try:
                found.append(_index_row(service.file(name)))
            except (FileNotFoundError, OffsetOutOfRangeError):
                continue
        return found

    def problems(self, store: MessageStore) -> list[dict[str, str]]:
        """The index files that are passed over, or their folder: path and detail of each."""
        service = store.index_service
        passed_over = {} if service is None else service.passed_over
        found = [(each.path or store.path, each.message) for each in passed_over.values()]
        if store.database_index.damage is not None:
            damage = store.database_index.damage
            found.append((damage.path or index_folder(store.path), damage.message))
        return [{"path": file_name(path, store.path), "detail": detail} for path, detail in found]

    def index_file(self, store: MessageStore, name: str) -> dict[str, Any]:
        """One index file: its header, fill, and how long its chains are."""
        service = store.index_service
        if service is not None and name not in service.names:
            service.load()
        if service is not None and name not in service.names and (problem := service.passed_over.get(name)):
            raise problem
        if service is None or name not in service.names:
            if service is not None and (problem := service.passed_over.get("")):
                raise problem
            raise NotFoundError("there is no index file of that name in this store")
        index = service.file(name)
        row = _index_row(index)
        return {**row, "path": file_name(index.path, store.path), "chains": self._chains(index)}

    def _chains(self, index: IndexFile) -> dict[str, Any]:
        count = min(index.index_count, index.index_num)
        status = os.stat(index.path)
        # One at a time: it goes over all entries, and others ask for the same.
        with self._lock:
            key = (status.st_dev, status.st_ino, count)
            known = self._histograms.get(key)
            if known is None:
                known = _chain_lengths(index, count)
                self._histograms[key] = known
                while len(self._histograms) > _HISTOGRAMS_KEPT:
                    self._histograms.popitem(last=False)
            self._histograms.move_to_end(key)
            return known


def _index_row(index: IndexFile) -> dict[str, Any]:
    header = index.header
    entries = min(header.index_count, index.index_num) - 1
    return {
        "name": index.name,
        "size": index.mapped_file.size,
        "entries": entries,
        "capacity": index.index_num - 1,
        "fill": entries / max(index.index_num - 1, 1),
        "slots": index.slot_num,
        "slots_used": header.hash_slot_count,
        "mean_chain": entries / header.hash_slot_count if header.hash_slot_count > 0 and entries > 0 else None,
        "begin_timestamp": header.begin_timestamp,
        "end_timestamp": header.end_timestamp,
        "begin_phy_offset": header.begin_phy_offset,
        "end_phy_offset": header.end_phy_offset,
    }


def _chain_lengths(index: IndexFile, count: int) -> dict[str, Any]:
    """How many slots have chains of which length, told by the hashes of the entries; block by block."""
    lengths = np.zeros(index.slot_num, np.int32)
    for first in range(1, count, _ENTRIES_READ):
        hashes = index.read_entries(first, min(_ENTRIES_READ, count - first))[0]
        slots = np.remainder(hashes, index.slot_num)
        lengths += np.bincount(slots, minlength=index.slot_num).astype(np.int32)
    longest = int(lengths.max(initial=0))
    used = int(np.count_nonzero(lengths))
    bins = []
    low = 1
    while low <= max(longest, 1):
        # 1, 2, 3, 4, then doubling.
        high = low if low <= 4 else 2 * (low - 1)
        bins.append({"from": low, "to": high, "slots": int(np.count_nonzero((lengths >= low) & (lengths <= high)))})
        low = high + 1
    entries = count - 1
    # What a look-up of a key that is there walks, on average: half of its chain.
    squares = float(np.dot(lengths.astype(np.float64), lengths.astype(np.float64)))
    return {
        "slots_used": used,
        "slots_empty": index.slot_num - used,
        "longest": longest,
        "mean": entries / used if used else 0.0,
        "mean_walk": squares / entries if entries > 0 else 0.0,
        "bins": bins,
    }
