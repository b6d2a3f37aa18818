"""The index by key in RocksDB (RIP-82, family ``default`` of ``rocksdbstore``): keys and values; it reads no record.

Facts (RocketMQ 5.5.0): a key is the store time in ms, rounded down to the hour (i64), then as text ``@topic@K@key@unique key@``
(K a key, T the tags, U without a third part the unique key), then the phy offset (i64); the value is the store time.  A record
without a unique key, and a rollback, has no entry.  The keys ``lastOffsetPy`` and ``lastStoreTimeStamp`` are not
entries: they hold phy offset and store time of the last record that is there as a whole; entries beyond it may be there.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Literal, NamedTuple

from rmqstore.files.listing import listing
from rmqstore.message import MessageExt, SysFlag, encode_java_utf8
from rmqstore.rocksdb.database import Database, is_database, may_be_database

__all__ = [
    "HOUR", "IndexDatabase", "IndexEntry", "IndexKind", "index_folder", "keys_of_message", "keys_of_record",
    "may_have_entries", "parse_entry",
]  # fmt: skip

IndexKind = Literal["K", "T", "U"]

HOUR = 3_600_000
_FOLDER = "rocksdbstore"
_SPECIAL = (b"lastOffsetPy", b"lastStoreTimeStamp")
_LONG = struct.Struct(">q")
_MAX = 2**63 - 1
_ROLLBACK = SysFlag.TRANSACTION_ROLLBACK.value


class IndexEntry(NamedTuple):
    """An entry: `text` is the key, the tags or the unique key; times in ms since epoch."""

    hour: int
    topic: str
    kind: str
    text: str
    unique_key: str
    phy_offset: int
    store_timestamp: int


def index_folder(root: str | os.PathLike[str]) -> str:
    """Return the folder of the database of the index, timers and transactions in the store at `root`."""
    return os.path.join(root, _FOLDER)


def may_have_entries(root: str | os.PathLike[str]) -> bool:
    """Return True if there is a database, and its files, unopened, may have entries."""
    path = index_folder(root)
    if not is_database(path):
        return may_be_database(path)
    found = listing(
        path,
        lambda entry: entry.name.endswith(".sst") or (entry.name.endswith(".log") and entry.stat().st_size > 0),
    )
    return isinstance(found.error, PermissionError) or bool(found.checked())


def keys_of_record(
    topic: str, keys: list[str], tags: str | None, unique_key: str | None, phy_offset: int, store_timestamp: int
) -> list[bytes]:
    """Return the keys of RocketMQ's entries for a record that is not a rollback; the values are its time."""
    if not unique_key:
        return []
    hour, phy = _LONG.pack(store_timestamp // HOUR * HOUR), _LONG.pack(phy_offset)
    texts = [f"@{topic}@K@{key}@{unique_key}@" for key in dict.fromkeys(keys) if key]
    if tags:
        texts.append(f"@{topic}@T@{tags}@{unique_key}@")
    return [hour + encode_java_utf8(text) + phy for text in [*texts, f"@{topic}@U@{unique_key}@"]]


def keys_of_message(message: MessageExt) -> list[bytes]:
    """Return the keys of RocketMQ's entries for a message, none for a rollback."""
    if message.sys_flag & _ROLLBACK == _ROLLBACK:
        return []
    return keys_of_record(
        message.topic, message.keys, message.tags, message.unique_key, message.phy_offset, message.store_timestamp
    )


def parse_entry(key: bytes, value: bytes) -> IndexEntry | None:
    """Parse an entry; None for impossible bytes."""
    if len(key) < 2 * _LONG.size or len(value) != _LONG.size:
        return None
    try:
        text = key[_LONG.size : -_LONG.size].decode("utf-8")
    except UnicodeDecodeError:
        return None
    if not text.startswith("@") or not text.endswith("@"):
        return None
    topic, _, rest = text[1:-1].partition("@")
    kind, _, rest = rest.partition("@")
    # Keys and tags may contain @, unique keys do not.
    middle, _, unique_key = rest.rpartition("@")
    if kind == "U" and not middle:
        middle = unique_key
    if kind not in ("K", "T", "U") or not unique_key:
        return None
    return IndexEntry(
        _LONG.unpack_from(key)[0], topic, kind, middle, unique_key, _LONG.unpack_from(key, len(key) - _LONG.size)[0],
        _LONG.unpack(value)[0],
    )  # fmt: skip


class IndexDatabase:
    """The entries of one database; `last_offset` is the phy offset of the last record with all entries, or -1."""

    def __init__(self, root: str | os.PathLike[str]):
        self.path = index_folder(root)
        self._database = Database(self.path)
        self.log_damage = self._database.log_damage
        try:
            value = self._database.get(_SPECIAL[0])
            self.last_offset = _LONG.unpack(value)[0] if value is not None and len(value) == _LONG.size else -1
            self.has_entries = next(self.entries(), None) is not None
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Close the files."""
        self._database.close()

    def has(self, key: bytes) -> bool:
        """Return True if an entry has this key."""
        return self._database.get(key) is not None

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield key and value of every entry, ascending; CorruptionError at a damaged block."""
        for key, value in self._database.items():
            if key not in _SPECIAL:
                yield key, value

    def find(self, topic: str, kind: IndexKind, text: str, begin: int = 0, end: int = _MAX) -> Iterator[int]:
        """Yield phy offsets of the entries with exactly this text, in whole hours from `begin` to `end` (ms, inclusive)."""
        prefix = encode_java_utf8(f"@{topic}@{kind}@{text}@")
        hour, last = max(begin, 0) // HOUR * HOUR, end // HOUR * HOUR
        while hour <= last:
            sought, following = _LONG.pack(hour) + prefix, b""
            for key, _ in self._database.items(sought):
                if not key.startswith(sought):
                    following = key
                    break
                # A longer text that begins with this one and @ has an @ in place of the unique key.
                if key.count(b"@", len(sought), -_LONG.size) == (kind != "U") and len(key) >= len(sought) + _LONG.size:
                    yield _LONG.unpack_from(key, len(key) - _LONG.size)[0]
            if len(following) < _LONG.size:
                return
            # The next hour with entries; its bytes may be anything.
            there = int.from_bytes(following[: _LONG.size], "big")
            hour = max(hour + HOUR, -(-there // HOUR) * HOUR)
