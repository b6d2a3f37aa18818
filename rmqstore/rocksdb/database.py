"""One RocksDB database, read as it is on the disk; and the folders of a store that hold databases.

rocksdict writes a file into the directory that it opens, even read-only, so it gets a directory of symbolic links, and the store's
own stays untouched (I7).  Its `items` end at damage silently, so every iteration here ends with the iterator's status.  RocksDB
shows an older state if the end of the MANIFEST is unreadable, and loops at impossible types of log records, so both are checked.
rocksdict is imported at the first opening; every opening of a store imports this module.

Layout of a log, and of the MANIFEST (RocksDB, `db/log_format.h`): blocks of 32 KiB; a record has a masked CRC-32C of type and
content, a length of two bytes and a type, little-endian, and is cut where a block ends.  Types 1 to 4 are a whole record, a
first, a middle and a last part; 5 to 8 and 11 the same in a file that is used again, with the file's number after the type.  0
pads a block.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import time
import weakref
from collections.abc import Iterator
from typing import Any

from rmqstore.errors import CorruptionError, MissingDependencyError, StoreClosedError, StoreError
from rmqstore.files.listing import ask_again, is_empty, listing
from rmqstore.files.os_errors import is_unreadable, missing_file, says_full, with_path

__all__ = [
    "BLOCK", "FIRST", "FOLDERS", "HEAD", "LAST", "PLACES", "Database", "check_queue_databases", "closed_databases",
    "closed_folder", "is_database", "load_rocksdict", "may_be_database", "queue_databases", "state_of_files", "wrong_types",
]  # fmt: skip

PLACES = ("consumequeue", "consumequeue_rocksdb")
"""The folders of a store for a broker's database of queues."""
FOLDERS = {
    "consumequeue_rocksdb": "queues in RocksDB",
    "rocksdbstore": "the index, timers and transactions in RocksDB",
    "kvStore": "pop records",
    "config": "its settings",
    "config/topics": "topics in RocksDB",
    "config/subscriptionGroups": "subscription groups in RocksDB",
    "config/consumerOffsets": "consumer progress in RocksDB",
    "config/metadata": "its settings in RocksDB",
    "config/rdb": "its settings in RocksDB",
}
"""The folders of a store that are a broker's databases or hold some, and what is in them."""

BLOCK = 1 << 15
HEAD = struct.Struct("<IHB")
FIRST, LAST = 2, 4
_OF_FILES_USED_AGAIN = (5, 6, 7, 8, 11)
_CRC_MASK = 0xA282EAD8
# Opening a database needs these, CURRENT and the MANIFEST, not OPTIONS, IDENTITY and LOCK.
_SUFFIXES = (".sst", ".log")
# A flush or a compaction of a broker deletes files between the listing and the opening.
_TRIES = 5
# Tries while the MANIFEST is behind the tables, and seconds between.
_LOOKS = 4
_PAUSE = 0.02


def is_database(path: str | os.PathLike[str]) -> bool:
    """Return True if the directory holds a RocksDB database, also without its file ``CURRENT``."""
    if os.path.isfile(os.path.join(path, "CURRENT")):
        return True
    # A directory of that name is a topic.
    return bool(listing(path, lambda entry: entry.name.startswith("MANIFEST-") and not entry.is_dir()))


def may_be_database(path: str | os.PathLike[str]) -> bool:
    """Return True for a database, and for a folder that cannot be read: opening it raises why."""
    return is_database(path) or closed_folder(path) is not None


def closed_folder(path: str | os.PathLike[str]) -> OSError | None:
    """Return why the folder at `path` is unreadable; None if it is readable, or not there."""
    try:
        listing(path).checked()
        os.stat(os.path.join(path, "CURRENT"))
    except OSError as error:
        # An entry of an unreadable folder may be missing.
        if is_unreadable(error) and os.path.lexists(path):
            return with_path(error, os.fspath(path))
    return None


def state_of_files(path: str | os.PathLike[str]) -> tuple[tuple[str, int, int], ...]:
    """Return name, length and time of the files that change when a broker writes into the database at `path`."""
    found = []
    for entry in listing(path, lambda entry: entry.name == "CURRENT" or entry.name.endswith((".sst", ".log"))).existing():
        # A broker deletes files while this runs.
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat()
            found.append((entry.name, status.st_size, status.st_mtime_ns))
    return tuple(found)


def check_queue_databases(root: str | os.PathLike[str]) -> None:
    """Raise OSError if the store at `root` may have queues in RocksDB in an unreadable folder."""
    for folder in queue_databases(root):
        closed = closed_folder(folder)
        if closed is not None:
            raise closed


def closed_databases(root: str | os.PathLike[str]) -> list[StoreError]:
    """Return an error for each unreadable folder of the store at `root` that may be a database, see `FOLDERS`."""
    found: dict[str, StoreError] = {}
    for name, what in FOLDERS.items():
        path = os.path.join(os.fspath(root), *name.split("/"))
        error = None if os.path.dirname(name) in found else closed_folder(path)
        if error is not None:
            text = f"this folder, for {what} of a broker, cannot be listed ({error.strerror}); let this user list and search it"
            found[name] = StoreError(text, path)
    return list(found.values())


def queue_databases(root: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the folders of the store at `root` that hold queues in RocksDB, see `PLACES`; a broker has at most one."""
    files, database = (os.path.join(os.fspath(root), name) for name in PLACES)
    # The first has queue files more often than not; the second is nothing but a database.
    found = [files] if is_database(files) else []
    return (*found, database) if may_be_database(database) else tuple(found)


class OpenRefusedError(Exception):
    """RocksDB refused to open the files; the text is the first line of its reason."""


class FilesChangedError(OpenRefusedError):
    """A flush or compaction of the broker changed the files since they were linked."""


class Database:
    """A RocksDB database, opened read-only; also while a broker runs and after a kill.

    It contains flushed entries, and those in the whole part of the write-ahead log.  Keys ascend as unsigned bytes.  A forked child
    may read it too, and must end by ``os._exit``: at an ordinary exit RocksDB waits for threads that the child does not have.

    - `skip_damaged`: read a write-ahead log after damage too, for independent entries.  A torn end counts as damage then.
    - `log_damage`: damage of the write-ahead log, so that entries are missing, or of the MANIFEST, so that the state is old.
    - `lost_log`: the reason why the write-ahead log is missing, so that newest entries may be missing.  It means nothing for
      queues: a topic there may have such a name.
    - `unlisted`: tables newer than the MANIFEST: a broker is writing, or the MANIFEST is too old.
    """

    def __init__(self, path: str | os.PathLike[str], *, skip_damaged: bool = False):
        self.path = os.path.abspath(os.fspath(path))
        self.log_damage: str | None = None
        self.lost_log: str | None = None
        self._skip_damaged = skip_damaged
        self._rdict: Any = None
        self._handles: dict[str, Any] = {}
        self.families = self._open()
        self.unlisted: tuple[str, ...] = ()
        with contextlib.suppress(FilesChangedError):
            ask_again(self._compare, self._reopen, FilesChangedError, _LOOKS - 1)
        if self._torn is not None:
            self.log_damage = self._torn if self.log_damage is None else f"{self.log_damage}; {self._torn}"

    def _compare(self) -> None:
        self._torn: str | None = _torn_manifest(self.path)
        self.unlisted = self._unlisted()
        self.lost_log = _lost_log(self.path)
        if self._torn is not None or self.unlisted or self.lost_log is not None:
            raise FilesChangedError("the MANIFEST is behind the tables, or there is no log")

    def _reopen(self) -> None:
        # A broker that writes both is done in a moment.
        self.close()
        time.sleep(_PAUSE)
        self.log_damage = None
        self.families = self._open()

    def _open(self) -> tuple[str, ...]:
        try:
            return ask_again(self._open_once, gone=FilesChangedError, tries=_TRIES - 1)
        except OpenRefusedError as refused:
            advice = "what it held is in the commit log: rebuild it, or restore the file from a backup"
            if isinstance(refused, FilesChangedError):
                advice = "its files changed at each of several tries, as its broker writes: try again"
            raise CorruptionError(
                f"the RocksDB database cannot be opened: {refused}; {advice}", self.path
            ) from refused.__cause__

    def _open_once(self) -> tuple[str, ...]:
        # RocksDB's default ends at the first damage of its log silently.  The first mode refuses it; the second reads the rest.
        modes = load_rocksdict().DBRecoveryMode
        strict = modes.absolute_consistency() if self._skip_damaged else modes.tolerate_corrupted_tail_records()
        try:
            families, told = self._open_linked(strict), []
        except OpenRefusedError as refused:
            lenient = modes.skip_any_corrupted_record() if self._skip_damaged else modes.point_in_time()
            families = self._open_linked(lenient)
            # Only the log can be what the strict mode refused.
            told = [] if "No such file" in str(refused) else [str(refused)]
        if told or self._wrong_types:
            self.log_damage = "; ".join([*self._wrong_types, *told])
        return families

    def _open_linked(self, mode: Any) -> tuple[str, ...]:
        # Imported here as it loads much that a store without a database does not need.
        import shutil

        rocksdict = load_rocksdict()
        links, linked = _new_directory(), frozenset[str]()
        self._wrong_types: list[str] = []
        try:
            linked = self._link(links)
            plain = rocksdict.Options(raw_mode=True)
            plain.set_wal_recovery_mode(mode)
            families = tuple(rocksdict.Rdict.list_cf(links, plain))
            self._rdict = rocksdict.Rdict(
                links,
                options=plain,
                column_families={name: rocksdict.Options(raw_mode=True) for name in families},
                access_type=rocksdict.AccessType.read_only(False),
            )
        except Exception as failed:  # rocksdict raises plain Exceptions, and OSErrors without a file
            shutil.rmtree(links, ignore_errors=True)
            if isinstance(failed, StoreError) or getattr(failed, "filename", None) is not None:
                raise
            if says_full(str(failed)):
                raise self._no_room(links, failed) from failed
            if isinstance(failed, OSError):
                raise
            # Try again if a flush or compaction ran in between.
            changed = "No such file" in str(failed) and self._names() != linked
            raise (FilesChangedError if changed else OpenRefusedError)(_first_line(failed, links)) from failed
        self._handles = {name: self._rdict.get_column_family(name) for name in families}
        self._finalizer = weakref.finalize(self, _remove, links, os.getpid())
        return families

    def _no_room(self, links: str, error: Exception) -> StoreError:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else _first_line(error, links)
        return StoreError(
            f"the RocksDB database was not read: the temporary folder {os.path.dirname(links)} has no room ({reason}); make "
            "room or free inodes there, or set TMPDIR to a folder that has both",
            self.path,
        )

    def _unlisted(self) -> tuple[str, ...]:
        listed = {os.path.basename(table["name"]) for table in self._rdict.live_files()}
        last = max(map(_number, listed), default=-1)
        tables = [name for name in listing(self._rdict.path()).checked().names if name.endswith(".sst") and _number(name) > last]
        return tuple(sorted(name for name in tables if name not in listed))

    def _names(self) -> frozenset[str]:
        return frozenset(listing(self.path, lambda entry: _is_read(entry.name) and not entry.is_dir()).checked().names)

    def _link(self, links: str) -> frozenset[str]:
        # The names of the files that were linked.
        for entry in listing(self.path).checked():
            if _is_read(entry.name) and _is_file(entry.path):
                self._link_one(entry.path, links)
        if not os.path.lexists(os.path.join(links, "CURRENT")):
            if not is_empty(links):
                raise CorruptionError(
                    "the RocksDB database cannot be opened: its file CURRENT is missing; what it held is in the commit log: "
                    "rebuild it, or restore the file from a backup",
                    self.path,
                )
            raise missing_file(self.path, "No RocksDB database is here: no file CURRENT")
        return frozenset(listing(links).checked().names)

    def _link_one(self, path: str, links: str) -> None:
        # RocksDB gets a corrected copy of a log with a type at which it would loop.
        name = os.path.basename(path)
        link = os.path.join(links, name)
        types: list[tuple[int, int]] = []
        if name.endswith(".log") or name.startswith("MANIFEST-"):
            # A broker may delete it: the opening names missing files.
            with contextlib.suppress(FileNotFoundError):
                types = wrong_types(path)
        try:
            if not types:
                os.symlink(path, link)
                return
            import shutil

            shutil.copyfile(path, link)
            with open(link, "r+b") as file:
                for pos, kind in types:
                    file.seek(pos)
                    file.write(bytes([kind]))
        except OSError as error:
            raise self._no_room(links, error) from error
        self._wrong_types.append(f"{name} has a damaged type of a record at byte {types[0][0]}")

    def get(self, key: bytes, *, family: str = "default") -> bytes | None:
        """Return the value of a key, None for no entry or family."""
        handle = self._handle(family)
        if handle is None:
            return None
        try:
            value: bytes | None = handle.get(key)
        except Exception as error:
            raise self._damage(family, error) from error
        return value

    def items(
        self, begin: bytes = b"", end: bytes | None = None, *, family: str = "default"
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield the entries with ``begin <= key < end``, ascending; `end` None = to the last."""
        handle = self._handle(family)
        if handle is None:
            return
        iterator = handle.iter()
        iterator.seek(begin)
        while iterator.valid():
            key = iterator.key()
            if end is not None and key >= end:
                return
            yield key, iterator.value()
            iterator.next()
        self._check(iterator, family)

    def _check(self, iterator: Any, family: str) -> None:
        try:
            iterator.status()
        except Exception as error:
            raise self._damage(family, error) from error

    def last(self, end: bytes | None = None, *, family: str = "default") -> tuple[bytes, bytes] | None:
        """Return the last entry with a key below `end` (None = of all), None for none; raises like `items`."""
        handle = self._handle(family)
        if handle is None:
            return None
        iterator = handle.iter()
        if end is None:
            iterator.seek_to_last()
        else:
            iterator.seek_for_prev(end)
            if iterator.valid() and iterator.key() == end:
                iterator.prev()
        if iterator.valid():
            return iterator.key(), iterator.value()
        self._check(iterator, family)
        return None

    def problems(self) -> list[str]:
        """Return the reasons for missing entries, for callers without a log that completes the database."""
        found = []
        if self.log_damage is not None:
            found.append(f"its log or MANIFEST is damaged, or torn by a kill ({self.log_damage}); newest entries may be missing")
        if self.lost_log is not None:
            found.append(f"{self.lost_log}: newest entries may be missing; restore the file from a backup of the folder")
        if self.unlisted:
            names = ", ".join(self.unlisted[:3]) + (", …" if len(self.unlisted) > 3 else "")
            text = "a broker is writing, or newest entries are missing"
            found.append(f"its MANIFEST does not have the newer tables {names}: {text}")
        return found

    def close(self) -> None:
        """Close the files."""
        if self._rdict is not None:
            self._handles = {}
            self._rdict.close()
            self._rdict = None
            self._finalizer()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _handle(self, family: str) -> Any:
        if self._rdict is None:
            raise StoreClosedError("the database is closed; open it again", self.path)
        return self._handles.get(family)

    def _damage(self, family: str, error: Exception) -> CorruptionError:
        return CorruptionError(
            f"the RocksDB database is damaged (family {family!r}): {_first_line(error, self._rdict.path())}; what it held is "
            "in the commit log: rebuild it",
            self.path,
        )


def _is_read(name: str) -> bool:
    return name == "CURRENT" or name.startswith("MANIFEST-") or name.endswith(_SUFFIXES)


def _is_file(path: str) -> bool:
    # False for a directory, which may be a topic.  RocksDB waits at a FIFO, and a device may have no end.
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        # A broken symlink is a missing file: the opening names it.
        return True
    if stat.S_ISDIR(mode):
        return False
    if not stat.S_ISREG(mode):
        raise CorruptionError("the RocksDB database cannot be opened: this is not a regular file; move it away", path)
    if not os.access(path, os.R_OK):
        raise PermissionError(13, "Permission denied", path)
    # Other errors come here, and not from RocksDB, where they count as damage.  A broker may delete the file.
    with contextlib.suppress(FileNotFoundError):
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    return True


def _new_directory() -> str:
    import tempfile

    try:
        return tempfile.mkdtemp(prefix="rmqstore-rocksdb-")
    except OSError as error:
        # No OSError: it is not about a file of the store.
        raise StoreError(
            f"reading a RocksDB database needs a temporary directory, and none can be created ({error.strerror or error}): "
            "set TMPDIR to a writable directory"
        ) from error


def _number(table: str) -> int:
    number = table.partition(".")[0]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 20 else -1


def _torn_manifest(path: str) -> str | None:
    """Return the place at which the MANIFEST ends within a record, which RocksDB takes for its end; None if it does not."""
    try:
        with open(os.path.join(path, "CURRENT"), "rb") as file:
            name = os.fsdecode(file.read(256).strip())
        with open(os.path.join(path, os.path.basename(name)), "rb") as file:
            at, begun = 0, None
            while block := file.read(BLOCK):
                pos = 0
                while pos + HEAD.size <= len(block):
                    _, length, kind = HEAD.unpack_from(block, pos)
                    if not kind and not any(block[pos:]):
                        pos = len(block)
                        continue
                    # Types 5 to 8 are the same four in a file that is used again: a number follows.  RocksDB judges others.
                    again = LAST < kind <= 2 * LAST
                    part = kind - LAST if again else kind
                    end = pos + HEAD.size + length + (4 if again else 0)
                    if end > len(block):
                        return _torn(name, at + pos)
                    if part == FIRST:
                        begun = at + pos
                    elif part == LAST:
                        begun = None
                    pos = end
                if len(block) < BLOCK and any(block[pos:]):
                    return _torn(name, at + pos)
                at += len(block)
            return None if begun is None else _torn(name, begun)
    except OSError:
        # Deleted since it was opened: a broker began another one.
        return None


def _lost_log(path: str) -> str | None:
    """Return the reason why the database has no write-ahead log, None if it has one."""
    logs = listing(path, lambda entry: entry.name.endswith(".log") and _number(entry.name) >= 0)
    if logs.error is not None:
        # Its broker deletes the folder.
        return None
    for entry in logs:
        if not entry.is_file():
            return f"its write-ahead log {entry.name} is not a file"
    return None if logs else "its write-ahead log (*.log) is gone"


def _torn(name: str, pos: int) -> str:
    return f"{name} is damaged or cut at byte {pos}: an older state is shown"


def _remove(links: str, pid: int) -> None:
    # A forked child must not delete the links of its parent.
    import shutil

    if os.getpid() == pid:
        shutil.rmtree(links, ignore_errors=True)


def _first_line(error: Exception | None, links: str) -> str:
    # RocksDB names files below the links; people need the store's own.
    return str(error).partition("\n")[0].replace(links.rstrip("/") + "/", "")


def load_rocksdict() -> Any:
    """Import rocksdict; MissingDependencyError, with the name of the extra, if it is not installed."""
    try:
        import rocksdict
    except ImportError:
        raise MissingDependencyError(
            "this store keeps data in RocksDB; to read it install rocksdict: pip install 'rmqstore[rocksdb]'"
        ) from None
    return rocksdict


def wrong_types(path: str | os.PathLike[str]) -> list[tuple[int, int]]:
    """Return the position of each impossible type of a record in this file, and the probable type.

    RocksDB (to 10.x) decides by the first record alone if a file is used again: it loops at a later record with such a type, and
    silently reads nothing if the first one is wrong.
    """
    found: list[tuple[int, int]] = []
    with open(path, "rb") as file:
        at = 0
        while block := file.read(BLOCK):
            pos = 0
            while pos + HEAD.size <= len(block):
                crc, length, kind = HEAD.unpack_from(block, pos)
                if not kind and not length:
                    break
                if kind in _OF_FILES_USED_AGAIN:
                    before = kind - LAST if kind <= 2 * LAST else 1
                    content = block[pos + HEAD.size : pos + HEAD.size + length]
                    if at == pos == 0 and crc != _masked_crc(bytes([before]) + content):
                        # This file is used again.
                        return []
                    found.append((at + pos + HEAD.size - 1, before))
                pos += HEAD.size + length
            at += len(block)
    return found


def _masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _CRC_MASK) % 2**32
