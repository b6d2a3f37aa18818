"""The index in RocksDB as the store's index: what of the log it covers, and the phy offsets that a key has in it.

Owns when the database is opened and whether it is trusted.  It writes nothing (I7).
What of the log it covers is looked at by its segments: it was switched on at some time, and entries are deleted by the hour, so
the first records of each segment tell.
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
from rmqstore.message import MessageExt
from rmqstore.rocksdb.database import may_be_database, state_of_files
from rmqstore.rocksdb.index import IndexDatabase, IndexKind, index_folder, keys_of_message, may_have_entries
from rmqstore.selection import Selection

__all__ = ["DatabaseIndex"]

logger = logging.getLogger(__name__)

# So many records of a segment are looked at for one that has entries.
_RECORDS_LOOKED_AT = 64


class DatabaseIndex:
    """The index of a store in RocksDB, if it has one, as a `KeySource`; the database is opened at the first question.

    - `damage`: why the database is not asked any more: it is damaged, or cannot be read.
    """

    def __init__(self, root: str, commit_log: CommitLog):
        self.root = root
        self.commit_log = commit_log
        self.damage: StoreError | None = None
        self.missing: MissingDependencyError | None = None
        self._database: IndexDatabase | None = None
        self._state: tuple[tuple[str, int, int], ...] | None = None
        self._covered: tuple[tuple[int, ...], list[tuple[int, int]]] | None = None
        # By segment whether its first records have their entries.
        self._firsts: dict[int, bool] = {}
        self._lock = threading.RLock()

    def renew_lock(self) -> None:
        """Give up the lock that another thread of a parent process may have held at a fork."""
        self._lock = threading.RLock()

    # ------------------------------------------------------------------------------------------------ opening, trust

    def is_used(self) -> bool:
        """bool: there is a database with entries, and it can be read."""
        with self._lock:
            return self._open() is not None

    @property
    def last_offset(self) -> int:
        """int: phy offset of the last record that the database has as a whole, -1 where it is not used."""
        with self._lock:
            database = self._open()
            return -1 if database is None else database.last_offset

    def look_again(self) -> None:
        """Open the database again when it is next asked, if it changed on the disk since it was opened."""
        with self._lock:
            if self._state is not None and self._state != self._files():
                self._let_go()

    def close(self) -> None:
        """Let go of the files."""
        with self._lock:
            self._let_go()

    def _let_go(self) -> None:
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
                # Every broker of 5.5.0 leaves a database there that is empty.
                return None
            self.missing = error
            logger.warning("the index in RocksDB is passed over, and the log is searched: %s", error)
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
        """Ask the database no more; what it covers is looked for in the log."""
        with self._lock:
            self.damage, self._covered = error, None
        logger.warning("the index in RocksDB is passed over, and the log is searched instead: %s", error)

    # -------------------------------------------------------------------------------------------------------- coverage

    def covered(self) -> list[tuple[int, int]]:
        """list of (int, int): phy offsets, begin and end, of what of the log the database speaks for; ascending."""
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
        # The record at the last offset is there, and is gone over again: as RocketMQ does at its start.
        end = min(database.last_offset, self.commit_log.max_offset)
        inside = [base for base in bases if base < end]
        for base in inside:
            if base not in self._firsts:
                self._firsts[base] = self._has_first(database, base, end)
        there = [self._firsts[base] for base in inside]
        found: list[tuple[int, int]] = []
        for number, base in enumerate(inside):
            following = there[number + 1] if number + 1 < len(inside) else True
            until = min(inside[number + 1] if number + 1 < len(inside) else end, base + self.commit_log.segment_size)
            if there[number] and following:
                begin = found.pop()[0] if found and found[-1][1] == base else base
                found.append((begin, until))
        return found

    def _has_first(self, database: IndexDatabase, base: int, end: int) -> bool:
        # Whether the first record of a segment that has entries has them in the database.  One with keys and without a unique
        # key has none there, so that where these occur the database does not speak for the segment.
        first: bool | None = None
        for message in itertools.islice(self._records(base, end), _RECORDS_LOOKED_AT):
            keys = keys_of_message(message)
            if keys and first is None:
                first = database.has(keys[-1])
            if first is False or (not keys and message.keys and not message.unique_key):
                return False
        return True

    def _records(self, begin: int, end: int) -> Iterator[MessageExt]:
        for page in self.commit_log.pages(begin, end):
            if isinstance(page, list):
                yield from page

    # --------------------------------------------------------------------------------------------------------- queries

    def candidates(self, sought: SoughtKeys, wanted: np.ndarray | None = None) -> Iterator[Candidates]:
        """Yield where records have the keys by the database, without those outside the log, in one round; see `KeySource`.

        Records of the same hours as the store times that are asked for are among them.
        """
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
        # The last first, each once.
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
        """Ask the database no more if one of these entries is its own and cannot be true, see `KeySource`."""
        wrong = rejected[~sought.at_any_time().matching(self.commit_log, rejected)[1]]
        own = next(self.candidates(sought)) if len(wrong) else wrong
        places = set(zip(own.numbers.tolist(), own.phy_offsets.tolist()))
        for number, phy_offset in zip(wrong.numbers.tolist(), wrong.phy_offsets.tolist()):
            # The record of a segment that is missing is unknown.
            if (number, phy_offset) in places and self.commit_log.region_of(phy_offset) is not None:
                text = f"an entry leads to phy offset {phy_offset}, where no record has its key"
                self.distrust(CorruptionError(text, self.root))
                return
