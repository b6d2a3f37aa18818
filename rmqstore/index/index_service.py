"""The index service: the index files of a store as one index.

Owns the list of index files, their names and order, the roll to a new file, and searches over all files.  A read-write lock
guards the list, not the entries.  Hits are offsets: the store compares the records.  File names strictly increase, also within a millisecond and
when the clock goes back (RocketMQ 5.5.0 overwrites the older file then).
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from rmqstore import _numpy as np
from rmqstore._columns import entries_by_key
from rmqstore._core import OpenedIndexes, chain_entries, index_key_hash
from rmqstore._shown import shows
from rmqstore.config import StoreConfig, is_usual_size
from rmqstore.errors import (
    DiskFullError,
    GeometryError,
    GiveOptions,
    IndexFileError,
    InferConfig,
    OffsetOutOfRangeError,
    ReadOnlyError,
    Sentence,
    StoreClosedError,
    StoreError,
)
from rmqstore.files.durable import fsync_directory
from rmqstore.files.listing import ask_again, listing
from rmqstore.files.mapped_file import NotCopied
from rmqstore.files.open_file import why_unreadable
from rmqstore.files.os_errors import is_full, is_missing, is_unreadable
from rmqstore.files.prepared_files import PreparedFiles
from rmqstore.index.index_file import IndexFile
from rmqstore.selection import ANY_TIME, INT64_MAX
from rmqstore.spans import Span

__all__ = ["IndexService", "QueryOffsetResult", "ReadWriteLock", "index_name_after", "is_index_name"]

logger = logging.getLogger(__name__)

_CREATE_TRIES = 3
_CREATE_PAUSE = 1.0  # seconds, as in RocketMQ
# The number of entries of a later round, for all keys that go on together.
_ROUND = 65_536


def is_index_name(name: str) -> bool:
    """Return True for the name of an index file: digits that fit 64 bits."""
    # RocketMQ takes whatever parses as a 64-bit number.
    return name.isascii() and name.isdigit() and len(name) <= 19


class ReadWriteLock:
    """Many readers or one writer; a waiting writer goes before new readers."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._readers = self._writers_waiting = 0
        self._writing = False

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """Hold the lock together with other readers."""
        with self._condition:
            while self._writing or self._writers_waiting:
                self._condition.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                if not self._readers:
                    self._condition.notify_all()

    @contextlib.contextmanager
    def write(self) -> Iterator[None]:
        """Hold the lock alone."""
        with self._condition:
            self._writers_waiting += 1
            while self._writing or self._readers:
                self._condition.wait()
            self._writers_waiting -= 1
            self._writing = True
        try:
            yield
        finally:
            with self._condition:
                self._writing = False
                self._condition.notify_all()


class QueryOffsetResult(NamedTuple):
    """The answer of RocketMQ's index service: offsets newest first, the newest file's end time (ms) and end offset."""

    phy_offsets: list[int]
    index_last_update_timestamp: int
    index_last_update_phy_offset: int


def index_name_after(last: str | None, now: int) -> str:
    """Return a 17-digit name for the time `now` (ms since epoch, local time zone) that is larger than `last`."""
    moment = datetime.datetime.fromtimestamp(now / 1000)
    name = moment.strftime("%Y%m%d%H%M%S") + f"{now % 1000:03d}"
    if last is None or int(name) > int(last):
        return name
    try:
        following = datetime.datetime.strptime(last[:14], "%Y%m%d%H%M%S") + datetime.timedelta(
            milliseconds=int(last[14:]) + 1
        )
        name = following.strftime("%Y%m%d%H%M%S") + f"{following.microsecond // 1000:03d}"
    except (ValueError, OverflowError):
        name = ""
    # A name that is not a time is still a number to RocketMQ.
    return name if name and int(name) > int(last) else f"{int(last) + 1:017d}"


@shows(
    "config", "distrusted", "entries", "file", "files", "index_error", "names", "newest",
    "passed_over", "path", "query_offset", "read_only", "root",
)  # fmt: skip
class IndexService(NotCopied, OpenedIndexes):
    """The index below a store's root directory.

    Parameters
    ----------
    root : path
        The store's root, which has the folder ``index``.
    config : StoreConfig
    read_only : bool

    Attributes
    ----------
    path : str
        The folder of the files.
    index_error : bool
        A file could not be created; nothing more is indexed until the store is opened again.
    flush_on_roll : bool
        Force a file to the disk as soon as it is full; False if the store flushes it later.
    sparse : bool
        Only what `put_hashes` writes gets space on disk.
    opened_files : tuple of IndexFile, or None
        All files, newest first, while all are open.
    passed_over : dict of str to StoreError
        The damaged and unreadable files that `load` skipped (read-only use), by name; "" is the folder itself.
    distrusted : set of str
        Names of the files in which a search met an impossible entry, so that they may hide others.
    """

    opened_files: tuple[IndexFile, ...] | None

    def __init__(self, root: str | os.PathLike[str], config: StoreConfig, *, read_only: bool = False):
        # Files are made as they are needed, also after a change of the working directory.
        self.root = os.fspath(root) if read_only else os.path.abspath(os.fspath(root))
        self.path = os.path.join(self.root, "index")
        self.config = config
        self.read_only = read_only
        self.index_error = False
        self.passed_over: dict[str, StoreError] = {}
        # Inode and change time of the files that could be read, by name.
        self._readable: dict[str, tuple[int, int]] = {}
        self.distrusted: set[str] = set()
        self.create_pause = _CREATE_PAUSE
        self._names: list[str] = []
        self._open: OrderedDict[str, IndexFile] = OrderedDict()
        self.lock = ReadWriteLock()
        self._open_lock = threading.RLock()
        # The file that was used last, while it is in `_open`: most searches read the newest.
        self._recent: tuple[str, IndexFile] | None = None
        self.opened_files = None
        # Changes whenever files come or go.
        self.version = 0
        self._log_files: dict[str, IndexFile] = {}
        # Ranges of phy offsets that `log_index` scanned and could not read.
        self.log_damage: tuple[tuple[int, int], ...] = ()
        # All names, oldest first, with the files made from the log; None until these are known.
        self._order: list[str] | None = None
        self._covers = True
        self._noted = False
        self._closed = False
        self.prepared = PreparedFiles(self.root, config.index_file_size)
        self.flush_on_roll = True
        self.sparse = False

    def renew_locks(self) -> None:
        """Replace the locks after a fork."""
        self.lock = ReadWriteLock()
        self._open_lock = threading.RLock()

    def load(self) -> None:
        """List the index files; skip a name that is not a decimal number, like RocketMQ."""
        entries = listing(self.path, lambda entry: is_index_name(entry.name))
        passed_over: dict[str, StoreError] = {}
        # A broken link, to a disk that is not mounted for instance, is more than a missing folder.
        closed = entries.error if self.read_only and os.path.islink(self.path) else entries.problem
        if closed is not None:
            if not (self.read_only and (is_unreadable(closed) or is_missing(closed))):
                raise closed
            passed_over[""] = self.unreadable_folder(closed)
        newest = max((entry.name for entry in entries), key=int, default=None)
        names = []
        readable: dict[str, tuple[int, int]] = {}
        for entry in entries:
            try:
                if self._counts(entry, entry.name == newest, readable):
                    names.append(entry.name)
            except FileNotFoundError:
                continue  # Another process deleted it.
            except OSError as error:
                if not (self.read_only and is_unreadable(error)):
                    raise
                passed_over[entry.name] = self.unreadable_file(error, entry.path)
            except GeometryError as error:
                if not self.read_only or (entry.is_file() and not self._is_usual_size()):
                    raise
                passed_over[entry.name] = error
        for name, problem in passed_over.items():
            # `StoreConfig.infer` has warned of numbers that are only assumed.
            told = isinstance(problem, GeometryError) and "max_index_num" in self.config.assumed
            if name not in self.passed_over and not told:
                logger.warning("%s: %s", problem.path, problem.message)
        self.passed_over, self._readable = passed_over, readable
        self.take(names)

    def _counts(self, entry: os.DirEntry[str], is_newest: bool, readable: dict[str, tuple[int, int]]) -> bool:
        # True for an index file; raises if it is unusable.
        if not entry.is_file():
            text = "a directory is among the index files; move it away"
            if entry.is_symlink() and not os.path.exists(entry.path):
                text = "an index file is a broken symlink; restore the file that it points to"
            raise GeometryError(text, entry.path, 0)
        status = entry.stat()
        if self.read_only and status.st_size == 0 and is_newest:
            # A Java store makes a file and then extends it.
            return False
        file = status.st_ino, status.st_ctime_ns
        if file != self._readable.get(entry.name) and (failure := why_unreadable(entry.path)) is not None:
            raise failure
        readable[entry.name] = file
        if status.st_size != self.config.index_file_size:
            raise self.wrong_length(status.st_size, entry.path)
        return True

    def _is_usual_size(self) -> bool:
        # Assumed numbers prove nothing about a file.
        return "max_index_num" in self.config.assumed or is_usual_size(self.root, "index", self.config.index_file_size)

    @staticmethod
    def unreadable_file(error: OSError, path: str) -> StoreError:
        """Return the error about an index file that cannot be read because of `error`."""
        text = (
            f"the index file cannot be read ({error.strerror or error}); the log is searched instead. Let this user read it, or "
            "restore it from a copy if the disk fails; without a copy, move it away and run rebuild"
        )
        return StoreError(text, path, 0)

    def unreadable_folder(self, error: OSError) -> StoreError:
        """Return the error about the folder, which cannot be listed because of `error`."""
        reason, advice = error.strerror or error, "Let this user list and search it"
        if isinstance(error, FileNotFoundError):
            reason, advice = "it is a broken symlink", "Restore the folder that it points to"
        elif is_missing(error):
            reason, advice = "it is no folder", "Move it away"
        text = f"the folder of the index cannot be listed ({reason}); the log is searched instead. {advice}"
        return StoreError(text, self.path, 0)

    def wrong_length(self, length: int, path: str) -> GeometryError:
        """Return the error about an index file of `length` bytes, which is not the length of the others."""
        config = self.config
        text: str | Sentence = f"the index file has {length} bytes, but max_hash_slot_num={config.max_hash_slot_num} and "
        text += f"max_index_num={config.max_index_num} make {config.index_file_size}"
        if "max_index_num" in config.assumed:
            give = GiveOptions(("max_hash_slot_num=...", "max_index_num=..."), infer=False)
            text = Sentence(f"the index file has {length} bytes, its numbers of slots and entries are unknown; give ", give)
        elif self._is_usual_size():
            text += ": it is damaged and skipped. To write, restore the file from a copy, or run rebuild"
        else:
            text = Sentence(f"{text}; open the store with the numbers that it was written with", InferConfig())
        return GeometryError(text, path, min(length, config.index_file_size))

    def take(self, names: list[str]) -> None:
        """Use exactly these files instead of what `load` would list."""
        with self._open_lock:
            ordered = sorted(names, key=lambda name: (int(name), name))
            gone = [name for name, index in self._open.items() if name not in names or not index.mapped_file.is_current()]
            if ordered != self._names or gone:
                self._list_changed()
            self._names = ordered
            for name in gone:
                # Another process deleted or rebuilt it; a running search goes on.
                self._open.pop(name).let_go()
                self.distrusted.discard(name)

    def invalidate(self) -> None:
        """Make the next exact search look again for parts of the log that no file covers."""
        with self._open_lock:
            self._list_changed()

    def _list_changed(self) -> None:
        self._recent = self.opened_files = self._order = None
        self.version += 1

    def take_log_files(self, order: list[tuple[str, IndexFile | None]], covers: bool, version: int) -> bool:
        """Let exact searches use files in memory too, which `log_index` made from the log; False if the list changed.

        - `order`: every name, oldest first; None for a file on disk.
        - `covers`: together they cover the whole log.
        - `version`: the `version` before the names were read.
        """
        with self._open_lock:
            if version != self.version:
                return False
            self.opened_files = None
            self._log_files = {name: index for name, index in order if index is not None}
            self._order, self._covers = [name for name, _ in order], covers
            return True

    @property
    def has_log_files(self) -> bool:
        """True if `take_log_files` was called since the list changed."""
        return self._order is not None

    @property
    def names(self) -> tuple[str, ...]:
        """The file names, oldest first."""
        return tuple(self._names)

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of the files on disk and in memory, oldest first."""
        return tuple(self._names if self._order is None else self._order)

    def file(self, name: str) -> IndexFile:
        """Return the index file of that name, opened."""
        recent = self._recent
        if recent is not None and recent[0] == name:
            return recent[1]
        with self._open_lock:
            if self._closed:
                raise StoreClosedError("the store is closed; open it again", self.path)
            # A finalizer on this thread may enter the lock and close the service between any two lines.
            opened = self._open
            index = opened.get(name)
            if index is None and name in self._log_files:
                return self._log_files[name]
            if index is None:
                if name not in self._names:
                    raise OffsetOutOfRangeError(
                        "the index file was deleted since it was listed", os.path.join(self.path, name)
                    )
                index = IndexFile.open(os.path.join(self.path, name), self.config, read_only=self.read_only)
                index.is_distrusted = name in self.distrusted
                opened[name] = index
                self._let_go_of_others(name, opened)
            else:
                opened.move_to_end(name)
            if self._closed:
                index.close()  # type: ignore[unreachable]
                raise StoreClosedError("the store is closed; open it again", self.path)
            self._recent = name, index
            return index

    def _let_go_of_others(self, name: str, opened: OrderedDict[str, IndexFile]) -> None:
        # Only the reference goes: a running search keeps its file.
        while len(opened) > max(2, self.config.max_mapped_files):
            oldest = next(each for each in opened if each not in (name, self._names[-1]))
            if opened[oldest].region.writable:
                opened[oldest].flush()
            self._recent = self.opened_files = None
            index = opened.pop(oldest)
            self._take_note(oldest, index)
            index.let_go()

    def files(self) -> Iterator[IndexFile]:
        """Yield the index files, newest first."""
        for name in reversed(self._names):
            yield self.file(name)

    # ------------------------------------------------------------------------------------------------------ building

    def current(self) -> IndexFile:
        """Return the file for the next entry: the newest, or a new one if it is full or none exists."""
        newest = self.newest()
        if newest is not None and not newest.is_full:
            # A Java store's file has holes: a full disk must be an error here and no SIGBUS later.
            if not self.sparse:
                newest.mapped_file.reserve(newest.mapped_file.size)
            return newest
        if self.read_only:
            raise ReadOnlyError("the store was opened read-only", self.path)
        if self.index_error:
            raise IndexFileError(
                "an earlier failure to create an index file stopped indexing; reopen the store", self.path
            )

        def warn(number: int, error: Exception) -> None:
            logger.warning("try %d of %d to create an index file failed: %s", number, _CREATE_TRIES, error)

        try:
            created = ask_again(
                lambda: self._create(newest), lambda: time.sleep(self.create_pause), OSError, _CREATE_TRIES - 1, warn
            )
        except OSError as failure:
            self.index_error = True
            kind = DiskFullError if is_full(failure) else IndexFileError
            raise kind(
                f"an index file of {self.config.index_file_size} bytes could not be created in {_CREATE_TRIES} tries "
                f"({failure}); free space or repair the directory, then open the store again: what is not indexed yet is "
                "indexed then",
                self.path,
            ) from failure
        if newest is not None and self.flush_on_roll:
            newest.flush()
        return created

    def newest(self) -> IndexFile | None:
        """Return the newest file, None for none."""
        return self.file(self._names[-1]) if self._names else None

    def opened_newest(self) -> IndexFile | None:
        """Return the newest file if it is open, else None."""
        names = self._names
        return self._open.get(names[-1]) if names else None

    def has_room(self) -> bool:
        """Return True if the newest file exists and is not full."""
        names = self._names
        return bool(names) and not self.file(names[-1]).is_full

    def was_replaced(self) -> bool:
        """Return True if another process replaced the newest file (read-only use)."""
        return bool(self._names) and not self.file(self._names[-1]).mapped_file.is_current()

    def is_whole(self) -> bool:
        """Return True if the folder contains exactly the files that were listed or created."""
        with self._open_lock:
            found = listing(self.path, lambda entry: is_index_name(entry.name))
            if found.problem is not None:
                raise found.problem
            return set(self._names) == set(found.names) and all(index.mapped_file.is_current() for index in self._open.values())

    def adopt(self, is_on_disk: Callable[[int, int], bool]) -> None:
        """Make the next flush force each file that a dead process may not have forced, see `Checkpoint.has_index`."""
        for index in self.files():
            if is_on_disk(index.header.end_timestamp, index.header.end_phy_offset):
                break
            index.adopt()

    def reserve(self) -> None:
        """Allocate the newest file on disk: a Java store leaves holes."""
        newest = self.newest()
        if newest is not None:
            newest.mapped_file.reserve(self.config.index_file_size)

    @property
    def fill(self) -> float:
        """The used part of the newest file's entries, 0 to 1; 0 if there is no file."""
        newest = self.newest()
        return 0.0 if newest is None else (newest.index_count - 1) / max(newest.index_num - 1, 1)

    def _create(self, newest: IndexFile | None) -> IndexFile:
        name = index_name_after(self._names[-1] if self._names else None, time.time_ns() // 1_000_000)
        index = IndexFile.create(
            os.path.join(self.path, name), self.config, prepared=self.prepared, sparse=self.sparse, previous=newest
        )
        with self.lock.write(), self._open_lock:
            self._list_changed()
            self._names.append(name)
            self._open[name] = index
            self._let_go_of_others(name, self._open)
        return index

    def put_hashes(self, hashes: np.ndarray, phy_offsets: np.ndarray, store_timestamps: np.ndarray) -> None:
        """Put entries in order, rolling to new files as they fill."""
        done = 0
        while done < len(hashes):
            index = self.current()
            if self.sparse:
                index.reserve_entries(hashes[done:])
            done += index.put_hashes(hashes[done:], phy_offsets[done:], store_timestamps[done:])

    # ------------------------------------------------------------------------------------------------------ querying

    def query_offset(self, topic: str, key: str, max_num: int, begin: int, end: int) -> QueryOffsetResult:
        """Answer like RocketMQ's ``IndexService.queryOffset`` (5.5.0), quirks included.

        - `key`: for a tag, ``T#`` and the tag.
        - `max_num`: the number of offsets at most, and never more than `max_msgs_num_batch` (64).
        - `begin`, `end`: ms since epoch, inclusive.
        """
        max_num = min(max_num, self.config.max_msgs_num_batch)
        key_hash = index_key_hash(topic, key)
        phy_offsets: list[int] = []
        last_time = last_phy = 0
        with self.lock.read():
            for number, name in enumerate(reversed(self._names)):
                try:
                    index = self.file(name)
                except (FileNotFoundError, OffsetOutOfRangeError):
                    break  # It expired, and so did older ones.
                header = index.read_header()
                if number == 0:
                    last_time, last_phy = header[1], header[3]
                if index.matches_time(begin, end):
                    phy_offsets += index.select_hash(key_hash, max_num - len(phy_offsets), begin, end)
                if header[0] < begin or len(phy_offsets) >= max_num:
                    break
        return QueryOffsetResult(phy_offsets, last_time, last_phy)

    def newest_first(self) -> Iterable[IndexFile]:
        """Return the current files, newest first, opened one by one; one that expires is skipped."""
        return self.opened_files or self._open_in_turn()

    def _open_in_turn(self) -> Iterator[IndexFile]:
        with self._open_lock:
            names, log_files = self.all_names[::-1], self._log_files
        for name in names:
            index = self._opened(name, log_files)
            if index is not None:
                yield index
        with self._open_lock:
            known = {**self._open, **self._log_files}
            # A search of these alone is complete only if they cover the log.
            complete = self._order is not None and self._covers and names == self.all_names[::-1]
            if complete and all(name in known for name in names):
                self.opened_files = tuple(known[name] for name in names)

    def _opened(self, name: str, log_files: dict[str, IndexFile]) -> IndexFile | None:
        # None if the file expired.
        with contextlib.suppress(FileNotFoundError, OffsetOutOfRangeError):
            return log_files.get(name) or self.file(name)
        return None

    def note_damage(self) -> bool:
        """Return True if a search met damage in a trusted file: search again, as `log_index` covers it now."""
        with self._open_lock:
            before = len(self.distrusted)
            for name, index in self._open.items():
                self._take_note(name, index)
            noted, self._noted = self._noted or len(self.distrusted) > before, False
            return noted

    def _take_note(self, name: str, index: IndexFile) -> None:
        if not index.damaged or index.is_distrusted:
            return
        index.is_distrusted = True
        if name not in self.distrusted:
            self.distrusted.add(name)
            self._list_changed()
            self._noted = True
            logger.warning(
                "index file %s has an entry that points outside the log or to another message; the log is searched instead "
                "(rmqstore verify reports more, rmqstore rebuild --what index rebuilds it)",
                os.path.join(self.path, name),
            )

    def distrust_entry(self, key_hash: int, phy_offset: int) -> None:
        """Make the next `note_damage` name the files in which an entry with this hash points to `phy_offset`."""
        for name in self.names:
            with contextlib.suppress(FileNotFoundError, OffsetOutOfRangeError):
                index, at = self.file(name), -1
                while at:
                    page, at = index.select_chain(key_hash, at)
                    index.damaged |= phy_offset in page

    def entries(
        self,
        hashes: np.ndarray,
        wanted: np.ndarray | None = None,
        times_in: Callable[[IndexFile], Span] = lambda index: ANY_TIME,
    ) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
        """Yield the entries with these index hashes (int32) in rounds, each continuing the last one.

        - `wanted`: the number of entries of each hash in the first round (int64); the caller lowers it between rounds.  Later
          rounds have more entries of the hashes that still want some.  None = all entries in one round.
        - `times_in`: returns the store times by which entries of a file are chosen.
        - Yields (int32 array, int64 array, bool), like `_columns.entries_by_key`: number of the hash and phy offset of each
          entry, by number, newest first within one; and True if the phy offsets of every number fall.
        """
        with self._open_lock:
            names, log_files = self.all_names[::-1], self._log_files
        left = np.full(len(hashes), INT64_MAX) if wanted is None else wanted.copy()
        cursors, first, growth = np.zeros(len(hashes), np.int64), 0, 1
        while True:
            parts = []
            for number, name in enumerate(names[first:], first):
                if not left.any():
                    break
                index = self._opened(name, log_files)
                if index is None:
                    cursors[cursors >> 32 == number] = number + 1 << 32
                else:
                    parts.append(chain_entries(index, hashes, cursors, left, number, *times_in(index)))
            yield entries_by_key(parts, len(hashes))
            if wanted is None:
                return
            goes_on = (wanted > 0) & (cursors >> 32 < len(names))
            num = np.count_nonzero(goes_on)
            if not num:
                return
            first = int((cursors[goes_on] >> 32).min())
            # Other keys with the same hash may fill a chain, so later rounds are larger, within a bound.
            growth = min(4 * growth, _ROUND)
            left = np.maximum(wanted, np.minimum(np.minimum(wanted, _ROUND) * growth, _ROUND // num)) * goes_on

    # -------------------------------------------------------------------------------------------------------- upkeep

    def delete_expired(self, min_phy_offset: int) -> int:
        """Delete the files whose last record is below `min_phy_offset`, oldest first, never the newest; return their number."""
        deleted = 0
        while len(self._names) > 1:
            index = self.file(self._names[0])
            if index.read_header()[3] >= min_phy_offset:
                break
            self.remove(self._names[0])
            deleted += 1
        return deleted

    def remove(self, name: str) -> None:
        """Delete one file."""
        index = self.file(name)
        with self.lock.write(), self._open_lock:
            self._list_changed()
            self._names.remove(name)
            self._open.pop(name, None)
        index.mapped_file.destroy()
        fsync_directory(self.path)

    def take_dirty(self) -> list[IndexFile]:
        """Return the files that changed since the last call, for `IndexFile.force`; call it while nobody puts."""
        with self._open_lock:
            return [index for index in self._open.values() if index.region.writable and index.take_dirty()]

    def flush(self) -> None:
        """Force to the disk what was put since the last flush."""
        for index in self.take_dirty():
            index.force()

    def close(self) -> None:
        """Close every file; none is opened again."""
        with self._open_lock:
            self._closed = True
            self._recent = self.opened_files = None
            # A thread that iterates the dictionaries keeps the old ones and meets closed files.
            opened, self._open = self._open, OrderedDict()
            log_files, self._log_files = self._log_files, {}
            for index in [*opened.values(), *log_files.values()]:
                index.close()
        self.prepared.delete()
