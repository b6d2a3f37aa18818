"""What is wrong in the RocksDB index of a store, as findings: entries that are missing, entries that lead elsewhere, damage.

Owns the comparison of the index database with the log.  It only reads.  Both are read once, and compared entry by entry
only where their sums differ.  What a broker leaves itself is not a finding: entries of records that the log no longer has
(they go by the hour), and records beyond the last one that the database has, which a broker adds at its start.
"""

from __future__ import annotations

from collections.abc import Iterator

from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.errors import CorruptionError, Finding, MissingDependencyError, StoreError
from rmqstore.message import MessageExt
from rmqstore.offline.verify_unread import unread_database
from rmqstore.rocksdb.index import IndexDatabase, index_folder, keys_of_message, may_have_entries, parse_entry
from rmqstore.rocksdb.places import may_be_database

__all__ = ["has_index_database", "verify_index_database"]

_MASK = 2**64 - 1


def has_index_database(root: str) -> bool:
    """bool: the store at `root` has its index in RocksDB, or may have: a damaged database does not tell."""
    if not may_be_database(index_folder(root)):
        return False
    try:
        database = IndexDatabase(root)
    except MissingDependencyError:
        return may_have_entries(root)
    except (StoreError, OSError):
        return True
    try:
        return database.has_entries
    finally:
        database.close()


def verify_index_database(commit_log: CommitLog, root: str, end: int) -> Iterator[Finding]:
    """Compare the index in RocksDB of the store at `root` with its log, which ends at phy offset `end`.

    Yields
    ------
    Finding
        "missing_index_entry", "bad_index_entry", "damaged_database", or "not_checked" where it cannot be read, among others as
        rocksdict is not installed.
    """
    path = index_folder(root)
    if not may_be_database(path):
        return
    try:
        database = IndexDatabase(root)
    except MissingDependencyError as error:
        if not may_have_entries(root):
            return
        yield Finding(path, 0, "not_checked", f"the index in RocksDB: {error.message}")
        return
    except CorruptionError as error:
        yield Finding(error.path or path, error.pos or 0, "damaged_database", f"the index in RocksDB: {error.message}")
        return
    except (StoreError, OSError) as error:
        yield unread_database(path, error, "the index in RocksDB")
        return
    try:
        if database.log_damage is not None:
            detail = f"the index in RocksDB: its log or MANIFEST is damaged ({database.log_damage}); later entries are missing"
            yield Finding(path, 0, "damaged_database", detail)
        if database.has_entries:
            yield from _Comparison(commit_log, database, end).run()
    except CorruptionError as error:
        yield Finding(path, 0, "damaged_database", f"the index in RocksDB: {error.message}")
    finally:
        database.close()


class _Comparison:
    def __init__(self, commit_log: CommitLog, database: IndexDatabase, end: int):
        self.log, self.database = commit_log, database
        self.low, self.end = commit_log.min_offset, end
        # The record at the last offset has all its entries; later ones may have some.
        self.last = min(database.last_offset, end - 1)

    def run(self) -> Iterator[Finding]:
        entries = total = 0
        beyond: list[tuple[bytes, bytes]] = []
        for key, value in self.database.entries():
            phy = int.from_bytes(key[-8:], "big", signed=True)
            entry = parse_entry(key, value)
            if entry is None:
                yield self._bad(key, "its bytes are not an entry's")
            elif phy >= self.end:
                yield self._bad(key, f"it leads to phy offset {phy}, and the log ends at {self.end}")
            elif phy > self.last:
                beyond.append((key, value))
            elif phy >= self.low:
                entries += 1
                total += hash((key, value))
        for key, value in beyond:
            yield from self._entry(key, value)
        for message in self._records():
            value = message.store_timestamp.to_bytes(8, "big", signed=True)
            for key in keys_of_message(message):
                entries -= 1
                total -= hash((key, value))
        if entries or total & _MASK:
            yield from self._one_by_one()

    def _records(self) -> Iterator[MessageExt]:
        if self.last < self.low:
            return
        for page in self.log.pages(self.low, self.end):
            for message in page if isinstance(page, list) else ():
                if message.phy_offset > self.last:
                    return
                yield message

    def _one_by_one(self) -> Iterator[Finding]:
        # What is missing is told by runs of records: an index that was switched on late lacks all of the older ones.
        first = last = -1
        missing = 0
        for message in self._records():
            keys = keys_of_message(message)
            lacking = sum(not self.database.has(key) for key in keys)
            if lacking:
                first = message.phy_offset if not missing else first
                last, missing = message.phy_offset, missing + lacking
            elif keys and missing:
                yield self._missing(first, last, missing)
                missing = 0
        if missing:
            yield self._missing(first, last, missing)
        for key, value in self.database.entries():
            if self.low <= int.from_bytes(key[-8:], "big", signed=True) <= self.last:
                yield from self._entry(key, value)

    def _entry(self, key: bytes, value: bytes) -> Iterator[Finding]:
        # Whether an entry is one of the record that it leads to.
        entry = parse_entry(key, value)
        if entry is None:
            return
        message = self.log.look_up(entry.phy_offset)
        if message is None:
            yield self._bad(key, f"no record begins at phy offset {entry.phy_offset}")
        elif key not in keys_of_message(message):
            yield self._bad(key, f"the record at phy offset {entry.phy_offset} ({message.topic}) has no such entry")
        elif entry.store_timestamp != message.store_timestamp:
            detail = f"it says store time {entry.store_timestamp}, the record {message.store_timestamp}"
            yield self._bad(key, detail)

    def _missing(self, first: int, last: int, number: int) -> Finding:
        where = f"the record at phy offset {first}" if first == last else f"records from phy offset {first} to {last}"
        detail = f"{number} entries of {where} are missing; exact queries find them in the log only if they look there"
        return Finding(self.database.path, 0, "missing_index_entry", detail)

    def _bad(self, key: bytes, what: str) -> Finding:
        name = key.decode("utf-8", "backslashreplace")
        return Finding(self.database.path, 0, "bad_index_entry", f"the entry {name!r} is wrong: {what}")
