"""The index in RocksDB as the store's index: the phy offsets of a key, and the part of the log that it covers.

Owns when the database is opened and whether it is trusted.  It writes nothing (I7).  A broker may have enabled the index late, and
deletes entries by the hour, so the first records of each segment decide whether it is covered.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Iterator

from rmqstore import _numpy as np
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.errors import CorruptionError, MissingDependencyError, StoreError
from rmqstore.files.os_errors import is_unreadable
from rmqstore.index.key_source import Candidates, SoughtKeys
from rmqstore.rocksdb.database import may_be_database, state_of_files
from rmqstore.rocksdb.index import IndexDatabase, IndexKind, index_folder, keys_of_message, may_have_entries
from rmqstore.selection import Selection
from rmqstore.spans import joined

__all__ = ["DatabaseIndex"]

logger = logging.getLogger(__name__)

# The number of records of a segment that are searched for one that has entries.
_RECORDS_LOOKED_AT = 64


class DatabaseIndex:
    """The index of a store in RocksDB, if it has one, as a `KeySource`; the first search opens the database.

    - `damage`: the reason why the database is not used: it is damaged or unreadable.
    """

    def __init__(self, root: str, commit_log: CommitLog):
        self.root = root
        self.commit_log = commit_log
        self.damage: StoreError | None = None
        self.missing: MissingDependencyError | None = None
        self._database: IndexDatabase | None = None
        self._state: tuple[tuple[str, int, int], ...] | None = None
        self._covered: tuple[tuple[int, ...], list[tuple[int, int]]] | None = None
        # True for a segment whose first records have their entries.
        self._firsts: dict[int, bool] = {}
        self._lock = threading.RLock()

    def renew_lock(self) -> None:
        """Replace the lock after a fork."""
        self._lock = threading.RLock()

    # ------------------------------------------------------------------------------------------------ opening, trust

    def is_used(self) -> bool:
        """Return True if there is a readable database with entries."""
        with self._lock:
            return self._open() is not None

    @property
    def last_offset(self) -> int:
        """The phy offset of the last record with all entries in the database, -1 if it is not used."""
        with self._lock:
            database = self._open()
            return -1 if database is None else database.last_offset

    def look_again(self) -> None:
        """Close the database if its files changed; the next search opens it again."""
        with self._lock:
            if self._state is not None and self._state != self._files():
                self.close()

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            if self._database is not None:
                self._database.close()
            self._database = self._state = self._covered = self.damage = self.missing = None
            self._firsts = {}

    def _files(self) -> tuple[tuple[str, int, int], ...]:
        try:
            return state_of_files(index_folder(self.root))
        except OSError as error:
            if not is_unreadable(error):
                raise
            return (("", -1, -1),)

    def _open(self) -> IndexDatabase | None:
        if self._state is not None:
            return self._database if self.damage is None else None
        self._state = self._files()
        if not may_be_database(index_folder(self.root)):
            return None
        try:
            database = IndexDatabase(self.root)
        except MissingDependencyError as error:
            if not may_have_entries(self.root):
                # Every broker of 5.5.0 leaves an empty database there.
                return None
            self.missing = error
            logger.warning("the index in RocksDB is skipped, and the log is searched: %s", error)
            return None
        except StoreError as error:
            self.distrust(error)
            return None
        except OSError as error:
            path = os.fsdecode(error.filename) if error.filename is not None else index_folder(self.root)
            self.distrust(StoreError(f"it cannot be read: {error.strerror or error}", path))
            return None
        if database.has_entries:
            self._database = database
        else:
            database.close()
        return self._database

    def distrust(self, error: StoreError) -> None:
        """Stop using the database; the log is searched instead."""
        with self._lock:
            self.damage, self._covered = error, None
        logger.warning("the index in RocksDB is skipped, and the log is searched instead: %s", error)

    # -------------------------------------------------------------------------------------------------------- coverage

    def covered(self) -> list[tuple[int, int]]:
        """Return the ranges of phy offsets that the database covers, ascending."""
        with self._lock:
            database = self._open()
            if database is None:
                return []
            bases = tuple(self.commit_log.files.offsets)
            if self._covered is None or self._covered[0] != bases:
                try:
                    self._covered = bases, self._cover(database, bases)
                except CorruptionError as error:
                    self.distrust(error)
                    return []
            return self._covered[1]

    def _cover(self, database: IndexDatabase, bases: tuple[int, ...]) -> list[tuple[int, int]]:
        # The record at the last offset is in the database and is scanned again, like RocketMQ at its start.
        end = min(database.last_offset, self.commit_log.max_offset)
        inside = [base for base in bases if base < end]
        for base in inside:
            if base not in self._firsts:
                self._firsts[base] = self._has_first(database, base, end)
        spans = [
            (base, min(following, base + self.commit_log.segment_size))
            for base, following in zip(inside, [*inside[1:], end])
            if self._firsts[base] and self._firsts.get(following, True)
        ]
        return joined(spans)

    def _has_first(self, database: IndexDatabase, base: int, end: int) -> bool:
        # True if the first record with keys in a segment has its entries.  A record with keys but no unique key never has any, so
        # the database does not cover a segment with such records.
        first: bool | None = None
        messages = (each for page in self.commit_log.pages(base, end) if isinstance(page, list) for each in page)
        for message in itertools.islice(messages, _RECORDS_LOOKED_AT):
            keys = keys_of_message(message)
            if keys and first is None:
                first = database.has(keys[-1])
            if first is False or (not keys and message.keys and not message.unique_key):
                return False
        return True

    # --------------------------------------------------------------------------------------------------------- queries

    def candidates(self, sought: SoughtKeys, wanted: np.ndarray | None = None) -> Iterator[Candidates]:
        """Yield the database's candidates inside the log in one round, see `KeySource`; times are exact to the hour."""
        known: dict[tuple[str, str], list[int]] = {}
        numbers: list[int] = []
        phy_offsets: list[int] = []
        with self._lock:
            for number, pair in enumerate(sought.pairs()):
                if pair not in known:
                    known[pair] = self._phy_offsets(*pair, sought.selection)
                numbers += [number] * len(known[pair])
                phy_offsets += known[pair]
        yield Candidates.of(numbers, phy_offsets)

    def _phy_offsets(self, topic: str, text: str, selection: Selection) -> list[int]:
        # The newest first, each once.
        database, index_type = self._open(), selection.index_type
        if database is None:
            return []
        kinds: tuple[IndexKind, ...] = ("U", "K") if index_type is None else (index_type,)
        low, high = self.commit_log.min_offset, self.commit_log.max_offset
        found: set[int] = set()
        try:
            for kind in kinds:
                found.update(phy for phy in database.find(topic, kind, text, *selection.times) if low <= phy < high)
        except CorruptionError as error:
            self.distrust(error)
            return []
        return sorted(found, reverse=True)

    def doubt(self, sought: SoughtKeys, rejected: Candidates) -> None:
        """Stop using the database if one of these entries is its own and impossible, see `KeySource`."""
        wrong = rejected[~sought.at_any_time().matching(self.commit_log, rejected)[1]]
        own = next(self.candidates(sought)) if len(wrong) else wrong
        places = set(zip(own.numbers.tolist(), own.phy_offsets.tolist()))
        for number, phy_offset in zip(wrong.numbers.tolist(), wrong.phy_offsets.tolist()):
            # A record in a missing segment is unknown.
            if (number, phy_offset) in places and self.commit_log.region_of(phy_offset) is not None:
                text = f"an entry points to phy offset {phy_offset}, where no record has its key"
                self.distrust(CorruptionError(text, self.root))
                return
