"""Index files, consumer groups, and a broker's settings, as rows of lists."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rmqstore.console.rows import (
    Asked,
    Kept,
    NotFoundError,
    check_choice,
    error_text,
    file_name,
    in_order,
    sort_choices,
)
from rmqstore.errors import OffsetOutOfRangeError
from rmqstore.index.index_file import IndexFile
from rmqstore.offline.describe import Place, consumer_columns, consumer_places, group_sums, rows_of
from rmqstore.offline.settings import Settings, settings
from rmqstore.rocksdb.index import index_folder
from rmqstore.store.message_store import MessageStore

__all__ = [
    "CONSUMER_COLUMNS", "GROUP_COLUMNS", "INDEX_COLUMNS", "SETTINGS_COLUMNS", "ConsumerAnswers", "IndexAnswers",
    "SettingsAnswers",
]  # fmt: skip

INDEX_COLUMNS = ("name", "entries", "fill", "slots_used", "mean_chain", "begin_timestamp", "end_timestamp")
GROUP_COLUMNS = ("group", "queues", "lag", "age")
_PLACE_COLUMNS = ("group", "topic", "queue_id", "queue_offset")
_VALUE_COLUMNS = ("max_queue_offset", "lag", "waiting_since")
CONSUMER_COLUMNS = ("group", "topic", "queue_offset", *_VALUE_COLUMNS)
SETTINGS_COLUMNS = {
    "topics": ("topic", "readQueueNums", "writeQueueNums", "perm", "order"),
    "subscription_groups": ("group", "retryMaxTimes", "retryQueueNums", "consumeEnable", "consumeBroadcastEnable"),
    "consumer_offsets": ("group", "topic", "queue_id", "offset", "pull_offset"),
    "pop_records": ("topic", "group", "queue_id", "queue_offset", "visible_time"),
}
"""The sortable columns of each list, the default first."""

_Values = dict[Place, tuple[int | None, ...]]
# The values of a place that is newer than the survey.
_NO_VALUES = (None, None, None)
_ENTRIES_READ = 1 << 20
# Seconds for which settings are cached.
_SETTINGS_KEPT = 5.0
# The same for sums of groups, which are kept longer if they took long: a survey may use a tenth of the time.
_SUMS_KEPT, _KEPT_TIMES = 1.0, 10


class IndexAnswers:
    """Answers about the index of one store; histograms of chains are cached until their file has more entries."""

    def __init__(self) -> None:
        self._histograms: Kept[dict[str, Any]] = Kept()

    def index(self, store: MessageStore, asked: Asked) -> dict[str, Any]:
        """Return the index files, and the path and detail of each file or folder that cannot be read."""
        service, rows, problems = store.index_service, [], []
        if service is not None:
            service.load()
            for name in service.names:
                try:
                    rows.append(_index_row(service.file(name)))
                except (FileNotFoundError, OffsetOutOfRangeError):
                    continue
            problems = [(each.path or store.path, each.message) for each in service.passed_over.values()]
        damage = store.database_index.damage
        if damage is not None:
            problems.append((damage.path or index_folder(store.path), damage.message))
        return {
            "files": in_order(rows, asked["sort"]),
            "problems": [{"path": file_name(path, store.path), "detail": detail} for path, detail in problems],
        }

    def index_file(self, store: MessageStore, asked: Asked) -> dict[str, Any]:
        """Return the header, fill, and chain lengths of one index file."""
        service, name = store.index_service, asked["name"]
        if service is not None and name not in service.names:
            service.load()
        if service is None or name not in service.names:
            problem = None if service is None else service.passed_over.get(name) or service.passed_over.get("")
            raise problem or NotFoundError("this store has no index file of that name")
        index = service.file(name)
        return {**_index_row(index), "path": file_name(index.path, store.path), "chains": self._chains(index)}

    def _chains(self, index: IndexFile) -> dict[str, Any]:
        count = min(index.index_count, index.index_num)
        status = os.stat(index.path)
        key = (status.st_dev, status.st_ino, count)
        return self._histograms.get(key, lambda: _chain_lengths(index, count), math.inf)


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
    """Return the number of slots by the length of their chain, counted from the hashes of the entries."""
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


class ConsumerAnswers:
    """Answers about the consumer groups of one store; the survey of all rows is cached."""

    def __init__(self) -> None:
        self._kept: Kept[tuple[list[dict[str, Any]], _Values]] = Kept()

    def consumers(self, store: MessageStore, asked: Asked) -> dict[str, Any]:
        """Return a page of the progress of groups; only an order by a queue's values reads more than the page."""
        first, sort = asked["first"], asked["sort"]
        places = consumer_places(store, asked["group"] or None, asked["topic"] or None)
        name = sort.removeprefix("-")
        if name in _PLACE_COLUMNS:
            column = _PLACE_COLUMNS.index(name)
            ordered = in_order(places, sort, lambda place, _: place[column])
        else:
            column, values = _VALUE_COLUMNS.index(name), self._all(store)[1]
            ordered = in_order(places, sort, lambda place, _: values.get(place, _NO_VALUES)[column])
        errors: dict[tuple[str, int], str] = {}
        with store.commit_log.single_records():
            rows = rows_of(consumer_columns(store, ordered[first : first + asked["max_num"]], _recorder(errors)))
        for row in rows:
            row["error"] = errors.get((row["topic"], row["queue_id"]))
        return {"consumers": rows, "number": len(places), "first": first, "sort": sort}

    def groups(self, store: MessageStore, asked: Asked) -> dict[str, Any]:
        """Return a page of the sums of all groups."""
        rows, first, sort = self.sums(store, "", asked["sort"]), asked["first"], asked["sort"]
        return {"groups": rows[first : first + asked["max_num"]], "number": len(rows), "first": first, "sort": sort}

    def sums(self, store: MessageStore, group: str, sort: str) -> list[dict[str, Any]]:
        """Return `group_sums` of one group, or of all, with `age`: for how many ms the oldest message has waited."""
        if group:
            with store.commit_log.single_records():
                found = group_sums(consumer_columns(store, consumer_places(store, group), _recorder({})))
        else:
            found = self._all(store)[0]
        now = time.time_ns() // 1_000_000
        aged = ({**each, "age": each["waiting_since"] and now - each["waiting_since"]} for each in found)
        return in_order(aged, sort)

    def _all(self, store: MessageStore) -> tuple[list[dict[str, Any]], _Values]:
        return self._kept.get(store, lambda: _sums_and_values(store), _SUMS_KEPT, _KEPT_TIMES)


def _sums_and_values(store: MessageStore) -> tuple[list[dict[str, Any]], _Values]:
    places = consumer_places(store)
    with store.commit_log.single_records():
        columns = consumer_columns(store, places, _recorder({}))
    return group_sums(columns), dict(zip(places, zip(*(columns[name] for name in _VALUE_COLUMNS))))


def _recorder(errors: dict[tuple[str, int], str]) -> Callable[[str, int, Exception], None]:
    def record(topic: str, queue_id: int, error: Exception) -> None:
        errors[topic, queue_id] = error_text(error)

    return record


# ------------------------------------------------------------------------------------------------------------------ settings


class SettingsAnswers:
    """Answers about the settings in one store's directory, which need no readable log."""

    def __init__(self, path: str):
        self.path = path
        self._kept: Kept[Settings] = Kept()

    def settings(self, asked: Asked) -> dict[str, Any]:
        """Return a page of the rows of one list, and the places where settings were found."""
        what, first, wanted = asked["what"], asked["first"], asked["name"].lower()
        sort = check_choice("sort", asked["sort"], sort_choices(SETTINGS_COLUMNS[what]))
        found = self._kept.get("all", lambda: settings(self.path), _SETTINGS_KEPT)
        rows = _SETTINGS_ROWS[what](found)
        if wanted:
            rows = [
                row for row in rows if any(wanted in str(row.get(each) or "").lower() for each in ("topic", "group"))
            ]
        ordered = in_order(rows, sort, _comparable)
        return {
            "what": what,
            "rows": ordered[first : first + asked["max_num"]],
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


def _comparable(row: Any, name: str) -> Any:
    # A member may have any type: text is compared as text, after all numbers.
    value = row.get(name)
    if value is None:
        return None
    return (0, value, "") if isinstance(value, (int, float)) else (1, 0, str(value))


def _members(value: Any) -> dict[str, Any]:
    # The value may have any type.
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
