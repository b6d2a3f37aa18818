"""A broker's settings as lists: topics, subscription groups, offsets, pop records, and the places that they come from.

Owns the columns of these lists; what is read, and which of several places counts, says `rmqstore.offline.settings`.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

from rmqstore.console.anatomy import file_name
from rmqstore.console.lists import in_order
from rmqstore.offline.settings import Settings, settings

__all__ = ["SETTINGS_COLUMNS", "SettingsAnswers"]

SETTINGS_COLUMNS = {
    "topics": ("topic", "readQueueNums", "writeQueueNums", "perm", "order"),
    "subscription_groups": ("group", "retryMaxTimes", "retryQueueNums", "consumeEnable", "consumeBroadcastEnable"),
    "consumer_offsets": ("group", "topic", "queue_id", "offset", "pull_offset"),
    "pop_records": ("topic", "group", "queue_id", "queue_offset", "visible_time"),
}
"""By list the columns that it can be sorted by, the first of them its usual order."""

_KEPT = 5.0


class SettingsAnswers:
    """Answers about the settings in one store's directory."""

    def __init__(self, path: str):
        self.path = path
        self._lock = threading.Lock()
        self._kept: tuple[float, Settings] | None = None

    def settings(self, what: str, first: int, max_num: int, sort: str, name: str) -> dict[str, Any]:
        """dict: one list of them, and the places where settings were found.

        Parameters
        ----------
        what : str
            A key of `SETTINGS_COLUMNS`.
        name : str
            Only rows that have it in the name of their topic or group.
        """
        found = self._settings()
        rows = _ROWS[what](found)
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
            "numbers": {each: len(make(found)) for each, make in _ROWS.items()},
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
        # One at a time, and what was just read serves those that waited.
        with self._lock:
            if self._kept is None or time.monotonic() - self._kept[0] > _KEPT:
                self._kept = time.monotonic(), settings(self.path)
            return self._kept[1]


def _comparable(row: Any, name: str) -> Any:
    # A file may hold anything under a name; what is not a number there is compared as text, after all numbers.
    value = row.get(name)
    if value is None:
        return None
    return (0, value, "") if isinstance(value, (int, float)) else (1, 0, str(value))


def _topics(found: Settings) -> list[dict[str, Any]]:
    return [{"topic": name, **_members(value)} for name, value in found.topics.items()]


def _groups(found: Settings) -> list[dict[str, Any]]:
    forbidden = found.forbidden
    return [
        {"group": name, **_members(value), "forbidden": forbidden.get(name) or {}}
        for name, value in found.subscription_groups.items()
    ]


def _members(value: Any) -> dict[str, Any]:
    # Their names are RocketMQ's; what is not an object has none.
    members = dict(value) if isinstance(value, dict) else {"value": value}
    return {name: each for name, each in members.items() if name not in ("topic", "group")}


def _offsets(found: Settings) -> list[dict[str, Any]]:
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


def _pop_records(found: Settings) -> list[dict[str, Any]]:
    return [dataclasses.asdict(each) for each in found.pop_records]


_ROWS = {
    "topics": _topics,
    "subscription_groups": _groups,
    "consumer_offsets": _offsets,
    "pop_records": _pop_records,
}
