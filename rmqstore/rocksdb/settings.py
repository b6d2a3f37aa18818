"""Topics, subscription groups and consumer offsets of a broker that keeps its settings in RocksDB: keys and values.

The JSON in the values is returned as text; the reader decides which of several databases counts.  A bad entry is a finding and
hides no other; damaged blocks end an iteration with a finding.

Facts (RocketMQ 5.5.0): "separate" are three databases, "single" is one with a family for each kind (both
``configManagerVersion=v1``), "v2" is one with a key for each queue (``configManagerVersion=v2``).  The first write creates a
family, so a missing one is empty.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Literal

from rmqstore.errors import CorruptionError, Finding
from rmqstore.files.os_errors import is_unreadable
from rmqstore.rocksdb.database import Database, may_be_database, state_of_files

__all__ = ["Kind", "Layout", "SettingsDatabase", "database_state", "settings_layouts"]

Layout = Literal["separate", "single", "v2"]
Kind = Literal["topics", "subscription_groups", "forbidden", "consumer_offsets", "pull_offsets"]

# Folder below ``config``, family of the entries, family of the data version.
_PLACES: dict[tuple[str, str], tuple[str, str, str]] = {
    ("separate", "topics"): ("topics", "default", "kvDataVersion"),
    ("separate", "subscription_groups"): ("subscriptionGroups", "default", "kvDataVersion"),
    ("separate", "forbidden"): ("subscriptionGroups", "forbidden", "kvDataVersion"),
    ("separate", "consumer_offsets"): ("consumerOffsets", "default", "kvDataVersion"),
    ("single", "topics"): ("metadata", "topic", "topicVersion"),
    ("single", "subscription_groups"): ("metadata", "subscriptionGroup", "subscriptionGroupVersion"),
    ("single", "forbidden"): ("metadata", "forbidden", "subscriptionGroupVersion"),
    ("single", "consumer_offsets"): ("metadata", "consumerOffset", "consumerOffsetVersion"),
    ("v2", "topics"): ("rdb", "default", ""),
    ("v2", "subscription_groups"): ("rdb", "default", ""),
    ("v2", "consumer_offsets"): ("rdb", "default", ""),
    ("v2", "pull_offsets"): ("rdb", "default", ""),
}
_VERSION_KEY = b"kvDataVersionKey"
# v2: u8 1, i16 table, u8 kind of entry.
_TABLES = {"consumer_offsets": 1, "pull_offsets": 2, "topics": 3, "subscription_groups": 4}
_DATA_VERSION, _DATA = 1, 2
_JSON = b"\x01"
_HEAD = struct.Struct(">bhb")
_SHORT, _INT, _LONG = struct.Struct(">h"), struct.Struct(">i"), struct.Struct(">q")
_VERSION = struct.Struct(">qqq")


def settings_layouts(root: str | os.PathLike[str], kind: Kind) -> list[Layout]:
    """Return the layouts in which the store at `root` has a database for `kind`."""
    return [layout for layout in ("v2", "single", "separate") if _path(root, layout, kind) is not None]


def database_state(root: str | os.PathLike[str], kind: Kind = "topics") -> tuple[tuple[str, int, int], ...]:
    """Return name, length and time of the files of all databases of `kind`, to detect a change."""
    found = []
    for layout in settings_layouts(root, kind):
        try:
            files = state_of_files(_path(root, layout, kind) or "")
        except OSError as error:
            if not is_unreadable(error):
                raise
            continue
        found += [(f"{layout}/{name}", size, time) for name, size, time in files]
    return tuple(sorted(found))


def _path(root: str | os.PathLike[str], layout: str, kind: str) -> str | None:
    place = _PLACES.get((layout, kind))
    path = None if place is None else os.path.join(root, "config", place[0])
    return path if path is not None and may_be_database(path) else None


class SettingsDatabase:
    """The settings of one kind in one layout; `findings` has bad keys and values, and damaged blocks, found so far."""

    def __init__(self, root: str | os.PathLike[str], layout: Layout, kind: Kind):
        folder, self._family, self._version_family = _PLACES[layout, kind]
        self.layout: Layout = layout
        self.kind: Kind = kind
        self.path = os.path.join(root, "config", folder)
        # Like RocketMQ: a damaged record of the log hides no other.
        self._database = Database(self.path, skip_damaged=True)
        problems = self._database.problems()
        self.findings = [Finding(self.path, 0, "damaged_database", f"{kind}: {problem}") for problem in problems]

    def use(self, kind: Kind) -> SettingsDatabase:
        """Switch to another kind in the same database."""
        folder, self._family, self._version_family = _PLACES[self.layout, kind]
        assert os.path.basename(self.path) == folder
        self.kind = kind
        return self

    def close(self) -> None:
        """Close the files."""
        self._database.close()

    def __enter__(self) -> SettingsDatabase:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def data_version(self) -> dict[str, int] | str | None:
        """Return the data version of the kind as JSON text (v1) or numbers (v2), None without one."""
        try:
            if self.layout != "v2":
                value = self._database.get(_VERSION_KEY, family=self._version_family)
                return None if value is None else self._text(_VERSION_KEY, value)
            key = _HEAD.pack(1, _TABLES[self.kind], _DATA_VERSION) + b"data_version"
            value = self._database.get(key)
        except CorruptionError as error:
            self._damage(error)
            return None
        if value is None:
            return None
        if len(value) != _VERSION.size:
            self._finding(key, f"a data version of {len(value)} bytes, not {_VERSION.size}")
            return None
        state_version, timestamp, counter = _VERSION.unpack(value)
        return {"counter": counter, "stateVersion": state_version, "timestamp": timestamp}

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield name (topic, group, or ``topic@group``) and JSON value of each entry, without offsets of v2 (`offsets`)."""
        for key, value in self._entries():
            if self.layout != "v2":
                name, text = self._text(key, key), self._text(key, value)
            else:
                end = _name_end(key, _HEAD.size)
                if end != len(key):
                    self._finding(key, "not the key of a name")
                    continue
                if value[:1] != _JSON:
                    self._finding(key, f"its value is serialized as {value[:1].hex() or 'nothing'}; only JSON (01) is known")
                    continue
                name, text = self._text(key, key[_HEAD.size + _SHORT.size :]), self._text(key, value[1:])
            if name is not None and text is not None:
                yield name, text

    def offsets(self) -> Iterator[tuple[str, str, int, int]]:
        """Yield group, topic, queue id and the next queue offset to consume of each entry of v2."""
        for key, value in self._entries():
            names = _offset_key(key)
            if names is None:
                self._finding(key, "not the key of a consumer offset")
                continue
            group, topic = self._text(key, names[0]), self._text(key, names[1])
            if len(value) != _LONG.size:
                self._finding(key, f"an offset of {len(value)} bytes, not {_LONG.size}")
            elif group is not None and topic is not None:
                yield group, topic, names[2], _LONG.unpack(value)[0]

    def _entries(self) -> Iterator[tuple[bytes, bytes]]:
        begin, end = b"", None
        if self.layout == "v2":
            begin, end = (_HEAD.pack(1, _TABLES[self.kind], entry) for entry in (_DATA, _DATA + 1))
        try:
            yield from self._database.items(begin, end, family=self._family)
        except CorruptionError as error:
            self._damage(error)

    def _text(self, key: bytes, data: bytes) -> str | None:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            self._finding(key, f"byte {error.start} is not UTF-8")
            return None

    def _finding(self, key: bytes, what: str) -> None:
        name = key.decode("utf-8", "backslashreplace")
        detail = f"{self.kind}: the entry {name!r} cannot be read ({what}); the others are"
        self.findings.append(Finding(self.path, 0, "bad_settings", detail))

    def _damage(self, error: CorruptionError) -> None:
        detail = f"{self.kind}: {error.message}; entries that follow the damage are unknown"
        self.findings.append(Finding(self.path, 0, "damaged_database", detail))


def _name_end(key: bytes, at: int) -> int:
    # The end of a text after its length; -1 if the key is shorter.
    if at + _SHORT.size > len(key):
        return -1
    length = _SHORT.unpack_from(key, at)[0]
    end: int = at + _SHORT.size + length
    return end if 0 <= length and end <= len(key) else -1


def _offset_key(key: bytes) -> tuple[bytes, bytes, int] | None:
    # Group, topic and queue id: i16 n, group, 01, i16 m, topic, 01, i32 queue id.
    group_end = _name_end(key, _HEAD.size)
    if group_end < 0 or key[group_end : group_end + 1] != b"\x01":
        return None
    topic_end = _name_end(key, group_end + 1)
    if topic_end < 0 or key[topic_end : topic_end + 1] != b"\x01" or len(key) != topic_end + 1 + _INT.size:
        return None
    (queue_id,) = _INT.unpack_from(key, topic_end + 1)
    return key[_HEAD.size + _SHORT.size : group_end], key[group_end + 1 + _SHORT.size : topic_end], queue_id
