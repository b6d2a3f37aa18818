"""Index files, consumer groups, and a broker's settings, as rows of lists.

Owns the columns of these lists, the sums of groups, and the histogram of an index file's chains.  `rmqstore.offline.settings`
decides which settings count.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from rmqstore.console.rows import NotFoundError, error_text, file_name, in_order
from rmqstore.consumequeue.queue_look import QueueLook
from rmqstore.consumer.settings_sources import group_kind, progress_kind
from rmqstore.errors import OffsetOutOfRangeError, StoreError
from rmqstore.index.index_file import IndexFile
from rmqstore.offline.settings import Settings, settings
from rmqstore.rocksdb.index import index_folder
from rmqstore.store.message_store import MessageStore

__all__ = [
    "CONSUMER_COLUMNS", "GROUP_COLUMNS", "INDEX_COLUMNS", "SETTINGS_COLUMNS", "IndexAnswers", "SettingsAnswers",
    "consumer_rows", "group_rows",
]  # fmt: skip

INDEX_COLUMNS = ("name", "entries", "fill", "slots_used", "mean_chain", "begin_timestamp", "end_timestamp")
GROUP_COLUMNS = ("group", "queues", "lag", "age")
CONSUMER_COLUMNS = ("group", "topic", "offset", "max_queue_offset", "lag", "waiting_since")
SETTINGS_COLUMNS = {
    "topics": ("topic", "readQueueNums", "writeQueueNums", "perm", "order"),
    "subscription_groups": ("group", "retryMaxTimes", "retryQueueNums", "consumeEnable", "consumeBroadcastEnable"),
    "consumer_offsets": ("group", "topic", "queue_id", "offset", "pull_offset"),
    "pop_records": ("topic", "group", "queue_id", "queue_offset", "visible_time"),
}
"""By list its sortable columns, the default first."""

_HISTOGRAMS_KEPT = 32
_ENTRIES_READ = 1 << 20
# Seconds for which settings that were read answer further requests.
_SETTINGS_KEPT = 5.0


class IndexAnswers:
    """Answers about the index of one store; histograms of chains are kept until their file has more entries."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._histograms: OrderedDict[tuple[Any, ...], dict[str, Any]] = OrderedDict()

    def index(self, store: MessageStore) -> list[dict[str, Any]]:
        """list of dict: the index files, oldest first."""
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
        """list of dict: path and detail of each index file, or folder of them, that cannot be read."""
        service = store.index_service
        passed_over = {} if service is None else service.passed_over
        found = [(each.path or store.path, each.message) for each in passed_over.values()]
        damage = store.database_index.damage
        if damage is not None:
            found.append((damage.path or index_folder(store.path), damage.message))
        return [{"path": file_name(path, store.path), "detail": detail} for path, detail in found]

    def index_file(self, store: MessageStore, name: str) -> dict[str, Any]:
        """dict: header, fill, and lengths of chains of one index file."""
        service = store.index_service
        if service is not None and name not in service.names:
            service.load()
        if service is None or name not in service.names:
            problem = None if service is None else service.passed_over.get(name) or service.passed_over.get("")
            raise problem or NotFoundError("there is no index file of that name in this store")
        index = service.file(name)
        return {**_index_row(index), "path": file_name(index.path, store.path), "chains": self._chains(index)}

    def _chains(self, index: IndexFile) -> dict[str, Any]:
        count = min(index.index_count, index.index_num)
        status = os.stat(index.path)
        # One at a time: it reads all entries, and others ask for the same.
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
    """The number of slots by the length of their chain, counted from the hashes of the entries."""
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
    # A look-up of a present key walks, on average, half of its chain.
    squares = float(np.dot(lengths.astype(np.float64), lengths.astype(np.float64)))
    return {
        "slots_used": used,
        "slots_empty": index.slot_num - used,
        "longest": longest,
        "mean": entries / used if used else 0.0,
        "mean_walk": squares / entries if entries > 0 else 0.0,
        "bins": bins,
    }


# ----------------------------------------------------------------------------------------------------------------- consumers


def consumer_rows(store: MessageStore) -> list[dict[str, Any]]:
    """list of dict: the progress of every group in every queue, by group, topic and queue id; opens no queue."""
    found = []
    looks: dict[tuple[str, int], QueueLook | Exception | None] = {}
    with store.commit_log.single_records():
        for (group, topic), offsets in sorted(store.consumer_offsets.list().items()):
            for queue_id, offset in sorted(offsets.items()):
                row: dict[str, Any] = {
                    "group": group, "topic": topic, "queue_id": queue_id, "offset": offset, "max_queue_offset": None,
                    "lag": None, "waiting_since": None, "last_store_timestamp": None,
                    "kind": progress_kind(group, topic),
                }  # fmt: skip
                key = topic, queue_id
                try:
                    if key not in looks:
                        looks[key] = _look(store, topic, queue_id)
                    look = looks[key]
                    if isinstance(look, Exception):
                        raise look
                    if look is not None:
                        row |= _progress(store, topic, queue_id, look, offset)
                except (StoreError, OSError) as error:
                    row["error"] = error_text(error)
                found.append(row)
    return found


def _look(store: MessageStore, topic: str, queue_id: int) -> QueueLook | Exception | None:
    try:
        return store.queues.look(topic, queue_id, store.commit_log.min_offset)
    except (StoreError, OSError) as error:
        return error


def _progress(store: MessageStore, topic: str, queue_id: int, look: QueueLook, offset: int) -> dict[str, Any]:
    log, high = store.commit_log, look.max_queue_offset
    waiting = store.queues.unit(topic, queue_id, offset) if offset < high else None
    since = -1 if waiting is None else log.store_timestamp_at(waiting.phy_offset)
    newest = -1 if look.last is None else log.store_timestamp_at(look.last.phy_offset)
    return {
        "max_queue_offset": high,
        "lag": high - offset,
        "waiting_since": since if since >= 0 else None,
        "last_store_timestamp": newest if newest >= 0 else None,
    }


def group_rows(rows: list[dict[str, Any]], sort: str = "group") -> list[dict[str, Any]]:
    """list of dict: by group the sums over its queues.

    `unknown` counts queues that are missing or end before the group's offset, `lag` is of the others; `waiting_since` is the
    store time of the oldest message that is next in a queue, `age` the ms since then.
    """
    now = time.time_ns() // 1_000_000
    groups: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = row["group"]
        total = groups.setdefault(
            name,
            {"group": name, "queues": 0, "lag": 0, "unknown": 0, "waiting_since": None, "kind": group_kind(name)},
        )
        total["queues"] += 1
        if row["lag"] is None or row["lag"] < 0:
            total["unknown"] += 1
        else:
            total["lag"] += row["lag"]
        since = row["waiting_since"]
        if since is not None and (total["waiting_since"] is None or since < total["waiting_since"]):
            total["waiting_since"] = since
    for total in groups.values():
        since = total["waiting_since"]
        total["age"] = None if since is None else now - since
    return in_order(groups.values(), sort)


# ------------------------------------------------------------------------------------------------------------------ settings


class SettingsAnswers:
    """Answers about the settings in one store's directory."""

    def __init__(self, path: str):
        self.path = path
        self._lock = threading.Lock()
        self._kept: tuple[float, Settings] | None = None

    def settings(self, what: str, first: int, max_num: int, sort: str, name: str) -> dict[str, Any]:
        """dict: rows of the list `what` with `name` in the name of their topic or group, and where settings were found."""
        found = self._settings()
        rows = _SETTINGS_ROWS[what](found)
        if name:
            wanted = name.lower()
            rows = [
                row for row in rows if any(wanted in str(row.get(each) or "").lower() for each in ("topic", "group"))
            ]
        ordered = in_order(rows, sort, _comparable)
        return {
            "what": what,
            "rows": ordered[first : first + max_num],
            "number": len(rows),
            "first": first,
            "sort": sort,
            "numbers": {each: len(make(found)) for each, make in _SETTINGS_ROWS.items()},
            "sources": [
                {**dataclasses.asdict(each), "path": file_name(each.path, self.path)} for each in found.sources
            ],
            "reasons": found.reasons,
            "findings": [
                {"path": file_name(each.path, self.path), "pos": each.pos, "kind": each.kind, "detail": each.detail}
                for each in found.findings
            ],
        }

    def _settings(self) -> Settings:
        # One at a time; requests that waited get what was just read.
        with self._lock:
            if self._kept is None or time.monotonic() - self._kept[0] > _SETTINGS_KEPT:
                self._kept = time.monotonic(), settings(self.path)
            return self._kept[1]


def _comparable(row: Any, name: str) -> Any:
    # A file may hold anything under a name: text is compared as text, after all numbers.
    value = row.get(name)
    if value is None:
        return None
    return (0, value, "") if isinstance(value, (int, float)) else (1, 0, str(value))


def _members(value: Any) -> dict[str, Any]:
    # The names are RocketMQ's; the value may be no object.
    members = dict(value) if isinstance(value, dict) else {"value": value}
    return {name: each for name, each in members.items() if name not in ("topic", "group")}


def _offset_rows(found: Settings) -> list[dict[str, Any]]:
    rows = []
    for key in sorted({*found.consumer_offsets, *found.pull_offsets}):
        offsets, pulled = found.consumer_offsets.get(key, {}), found.pull_offsets.get(key, {})
        for queue_id in sorted({*offsets, *pulled}):
            rows.append(
                {
                    "group": key[0],
                    "topic": key[1],
                    "queue_id": queue_id,
                    "offset": offsets.get(queue_id),
                    "pull_offset": pulled.get(queue_id),
                }
            )
    return rows


_SETTINGS_ROWS: dict[str, Callable[[Settings], list[dict[str, Any]]]] = {
    "topics": lambda found: [{"topic": name, **_members(value)} for name, value in found.topics.items()],
    "subscription_groups": lambda found: [
        {"group": name, **_members(value), "forbidden": found.forbidden.get(name) or {}}
        for name, value in found.subscription_groups.items()
    ],
    "consumer_offsets": _offset_rows,
    "pop_records": lambda found: [dataclasses.asdict(each) for each in found.pop_records],
}
