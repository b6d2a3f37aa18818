"""One fixed-size file of a store, mapped on demand, and the pool that bounds the number of mappings.

Owns creation (under a staging name), space on disk, mapping, flushing and removal of one file.  It never interprets bytes and never
changes a file's size (I2).  A read-only file is opened and mapped read-only (I7).

A new file is a hole.  Writers call `mark_dirty` or `reserve` with the end of what they write, so that a full disk is an error here
and no SIGBUS later.  A flush takes these notes while nobody writes and forces the bytes later: writers never wait for a disk.
Eviction and deletion only drop a reference, so that a `Region` in use stays.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import IO, NoReturn, SupportsIndex

from rmqstore._core import Region
from rmqstore.errors import (
    GeometryError,
    InferConfig,
    OffsetOutOfRangeError,
    ReadOnlyError,
    Sentence,
    StoreChangedError,
    StoreClosedError,
    StoreError,
)
from rmqstore.files.durable import force_data
from rmqstore.files.open_file import last_nonzero, open_regular, opened, written_extents
from rmqstore.files.os_errors import naming_errors

__all__ = ["STAGING_PREFIX", "MappedFile", "MappedFilePool", "MemoryFile", "NotCopied"]

logger = logging.getLogger(__name__)

STAGING_PREFIX = ".rmqstore-allocating-"
_PAGE = 4096
# The search for the last byte that is not zero releases its pages after this number of bytes.
_LOOK_SIZE = 8 << 20
_staging_numbers = itertools.count()


def _allocate(fd: int, begin: int, end: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, begin, end - begin)
        return
    # macOS: only written bytes have space on disk.  Nobody else writes to this range yet.
    status = os.fstat(fd)
    if status.st_blocks * 512 >= status.st_size:
        return
    while begin < end:
        begin += os.pwrite(fd, os.pread(fd, min(end - begin, 1 << 20), begin), begin)


class NotCopied:
    """A base of classes that own files, mappings or locks: neither `copy` nor `pickle` duplicates them."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        name = type(self).__name__
        raise TypeError(
            f"a {name} owns files or locks and cannot be copied or pickled: give its path, and open it again where it is needed"
        )


class MappedFilePool(NotCopied):
    """The mapped files of a store; beyond a bound the least recently used ones are unmapped (second chance).

    At most `max_mapped_files` are mapped for reading.  The newest file of each written queue stays mapped as long as the operating
    system allows (`vm.max_map_count`): mapping it for each put takes a hundred times as long as the put.

    - `dirty`: the files that were written since the last flush.
    - `on_create`: called after a queue created a file.
    """

    def __init__(self, max_mapped_files: int = 1024):
        if max_mapped_files < 1:
            raise ValueError(f"max_mapped_files is {max_mapped_files}, it must be at least 1")
        self.max_mapped_files = max_mapped_files
        self.lock = threading.RLock()
        self.dirty: set[MappedFile] = set()
        self.on_create: Callable[[], object] | None = None
        # By last use; each file is in one of them.
        self._read: OrderedDict[MappedFile, None] = OrderedDict()
        self._appended: OrderedDict[MappedFile, None] = OrderedDict()
        self._warned = False

    def __len__(self) -> int:
        return len(self._read) + len(self._appended)

    def admit(self, mapped_file: MappedFile) -> None:
        """Count `mapped_file`, which is mapped, and unmap others while there are too many."""
        with self.lock:
            self.forget(mapped_file)
            (self._appended if mapped_file.appended else self._read)[mapped_file] = None
            self._evict(self._read, self.max_mapped_files, mapped_file)
            if not self._appended:
                return
            if self._evict(self._appended, self.max_appended_files, mapped_file) and not self._warned:
                self._warned = True
                logger.warning(
                    "more than %d queues are written, and only as many of their files stay mapped: a put may have to map "
                    "its file first, which is slow; raise vm.max_map_count (sysctl) and open the store again",
                    self.max_appended_files,
                )

    def _evict(self, kept: OrderedDict[MappedFile, None], limit: int, newest: MappedFile | None = None) -> bool:
        # True if a file left `kept`.  Two rounds at most: each file may have been used since the last round.
        begin = len(kept)
        for _ in range(2 * begin):
            if len(kept) <= limit:
                break
            oldest, _none = kept.popitem(last=False)
            if oldest.appended and kept is self._read:
                self._appended[oldest] = None
            elif oldest is newest or oldest.used:
                oldest.used = False
                kept[oldest] = None
            else:
                oldest.let_go()
        return len(kept) < begin

    def let_half_go(self) -> bool:
        """Unmap half of the files, as the operating system refuses another mapping; False if none could be unmapped."""
        with self.lock:
            before = len(self)
            self.max_appended_files = max(len(self._appended) // 2, 1)
            self._evict(self._read, len(self._read) // 2)
            self._evict(self._appended, self.max_appended_files)
            return len(self) < before

    @functools.cached_property
    def max_appended_files(self) -> int:
        """The number of written files that stay mapped; a quarter of what Linux allows is left to others."""
        try:
            with open("/proc/sys/vm/max_map_count", encoding="ascii") as file:
                return max(int(file.read()) * 3 // 4, 1)
        except (OSError, ValueError):
            return 49_152

    def forget(self, mapped_file: MappedFile) -> None:
        """Stop counting `mapped_file`."""
        with self.lock:
            self._read.pop(mapped_file, None)
            self._appended.pop(mapped_file, None)

    def let_go(self) -> None:
        """Drop every mapping: the store is closed."""
        with self.lock:
            for kept in (self._read, self._appended):
                for mapped_file in kept:
                    mapped_file.let_go()
                kept.clear()


class MappedFile(NotCopied):
    """One file of fixed size.

    - `size`: bytes; the file on disk must have this length, unless it is `padded`.
    - `file_from_offset`: offset of the file's first byte in its queue of files, bytes.
    - `padded`: read a file of another length too (read-only): a missing end reads as zeros, and bytes after `size` are ignored.
    - `advice`: the access pattern, see `Region.advise`; set before the first access.
    - `appended`: the queue writes to this file.
    - `reserved`: the position up to which `reserve` allocated space on disk; 0 in a newly opened file.
    """

    __slots__ = (
        "__weakref__", "_closed", "_deleted", "_inode", "_region", "_taken", "advice", "appended", "file_from_offset",
        "padded", "path", "pool", "read_only", "reserved", "size", "used",
    )  # fmt: skip

    def __init__(
        self,
        path: str | os.PathLike[str],
        size: int,
        *,
        file_from_offset: int = 0,
        read_only: bool = False,
        padded: bool = False,
        pool: MappedFilePool | None = None,
    ):
        self.path = os.fspath(path)
        self.size = size
        self.padded = padded
        self.advice = "normal"
        self.file_from_offset = file_from_offset
        self.read_only = read_only
        self.pool = pool if pool is not None else MappedFilePool(1)
        self.used = self.appended = False
        self._region: Region | None = None
        self._closed = False
        self._deleted = False
        self._inode = (0, 0)
        self._taken = False
        self.reserved = 0

    @classmethod
    def stage(cls, directory: str | os.PathLike[str], size: int, reserved: int) -> MappedFile:
        """Create a file of `size` zero bytes under a name that no store reads, with space on disk for the first `reserved`."""
        temporary = os.path.join(os.fspath(directory), f"{STAGING_PREFIX}{os.getpid()}-{next(_staging_numbers)}")
        staged = cls(temporary, size)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            with naming_errors(temporary):
                os.ftruncate(fd, size)
                staged.reserve(reserved)
                os.fsync(fd)
        except BaseException:
            os.unlink(temporary)
            raise
        finally:
            os.close(fd)
        return staged

    @property
    def region(self) -> Region:
        """The mapping; created at the first use, and again after eviction."""
        region = self._region
        if region is None:
            region = self._map()
        self.used = True
        return region

    def _map(self) -> Region:
        with self.pool.lock:
            if self._deleted:
                raise OffsetOutOfRangeError("the file was deleted and is not part of the store any more", self.path)
            if self._closed:
                raise StoreClosedError("the file is closed; open the store again", self.path)
            if self._region is not None:
                return self._region
            try:
                fd = open_regular(self.path, os.O_RDONLY if self.read_only else os.O_RDWR)
            except FileNotFoundError:
                text = "another process deleted the file; it is not part of the store any more"
                raise OffsetOutOfRangeError(text, self.path) from None
            try:
                status = os.fstat(fd)
                length = status.st_size
                self._inode = (status.st_dev, status.st_ino)
                if length != self.size and not self.padded:
                    raise wrong_size(self.path, length, self.size)
                with naming_errors(self.path):
                    region = self._mapping(fd)
                    region.path = self.path
                if self.advice != "normal":
                    region.advise(self.advice)
            finally:
                os.close(fd)
            self._region = region
            self.pool.admit(self)
            return region

    def _mapping(self, fd: int) -> Region:
        try:
            return Region.map(fd, self.size, not self.read_only, self.padded)
        except OSError as error:
            # The process has as many mappings as the operating system allows.
            if error.errno != errno.ENOMEM or not self.pool.let_half_go():
                raise
            return Region.map(fd, self.size, not self.read_only, self.padded)

    def is_current(self) -> bool:
        """Return True if the file that was mapped last still has its name, and lost no mapped page."""
        region = self._region
        if region is not None and region.lost:
            return False
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return False
        return (status.st_dev, status.st_ino) == self._inode

    @property
    def mapped(self) -> bool:
        """True if the file is mapped."""
        return self._region is not None

    @property
    def was_mapped(self) -> bool:
        """True if the file is or was mapped, so that `is_current` knows its inode."""
        return self._region is not None or self._inode != (0, 0)

    def advise(self, how: str) -> None:
        """Set `advice`, also for the current mapping."""
        region, self.advice = self._region, how
        if region is not None:
            # Another thread may close it.
            with contextlib.suppress(StoreClosedError):
                region.advise(how)

    def let_go(self) -> None:
        """Drop the mapping; the next use maps the file again.  Written bytes stay in the page cache or on disk."""
        self._region = None

    def last_nonzero(self, pos: int = 0) -> int:
        """Return the position after the last byte from `pos` that is not zero, or `pos` for none.

        Holes and unwritten space are not read.  If the file system does not report them, the file is read by `pread`: a mapped
        hole would take a page of a file system in memory, and a full one raises SIGBUS.
        """
        region = self.region
        if pos >= self.size:
            return pos
        with opened(self.path) as fd:
            extents = written_extents(fd, pos, self.size)
            if extents is None:
                with naming_errors(self.path):
                    return last_nonzero(fd, pos, self.size)
        for start, end in reversed(extents):
            for at in range(start + (end - 1 - start) // _LOOK_SIZE * _LOOK_SIZE, start - 1, -_LOOK_SIZE):
                last = region.last_nonzero(at, min(_LOOK_SIZE, end - at))
                if last > at:
                    return last
                # A segment of written zeros would otherwise stay in this process's memory, up to a gigabyte.
                region.release_pages(at, min(_LOOK_SIZE, end - at))
        return pos

    def zero_from(self, pos: int) -> int:
        """Zero the bytes from `pos` to the last one that is not zero, and return their number."""
        last = self.last_nonzero(pos)
        if last > pos:
            self.mark_dirty(last)
            self.region.zero(pos, last - pos)
        return last - pos

    def hold(self, pos: int = 0, size: int | None = None) -> memoryview:
        """Return a read-only view of the file's bytes; it keeps the mapping until it is released."""
        region = self.region
        return region.view(pos, region.size - pos if size is None else size)

    def mark_dirty(self, end: int) -> None:
        """Note that bytes before `end` will be written, so that `flush` forces the file; `reserve` them."""
        if end > self.reserved:
            self.reserve(end)
        self.pool.dirty.add(self)

    def adopt(self) -> None:
        """Make the next flush force the file, which a dead process may not have forced."""
        self.pool.dirty.add(self)

    def reserve(self, end: int) -> None:
        """Allocate the bytes before `end` on disk: a write into a hole of a full disk would be a SIGBUS.

        A Java store leaves holes, and so does a power cut.  Raises OSError if the disk is full, and StoreChangedError if another
        process cut the file short.
        """
        end = min(-(-end // _PAGE) * _PAGE, self.size)
        if end > self.reserved and not self.read_only:
            self.reserve_range(self.reserved, end)
            self.reserved = end

    def reserve_range(self, begin: int, end: int) -> None:
        """Allocate the pages of the bytes from `begin` to `end`; errors as for `reserve`."""
        with opened(self.path, os.O_RDWR) as fd:
            length = os.fstat(fd).st_size
            if length < self.size:
                # Allocating would extend it again, with zeros in place of messages.
                raise StoreChangedError(
                    f"another process cut the file to {length} bytes while the store was open; close the store and restore the "
                    "file, or open the store again",
                    self.path,
                    length,
                )
            with naming_errors(self.path):
                _allocate(fd, begin // _PAGE * _PAGE, min(-(-end // _PAGE) * _PAGE, self.size))

    def populate(self, pos: int, size: int) -> bool:
        """Prepare pages for a writer, see `Region.populate`; False if some of them are not mapped or not `reserved`."""
        region = self._region
        size = min(size, self.size - pos)
        ready = min(size, self.reserved - pos)
        if region is None or self.read_only or ready <= 0:
            return False
        try:
            region.populate(pos, ready)
        except StoreError:
            # Another thread closed it.
            return False
        return ready == size

    def take_dirty(self) -> bool:
        """Return True if anything was written that was not flushed; call it while nobody writes, then `flush`."""
        if self in self.pool.dirty:
            self.pool.dirty.discard(self)
            self._taken = True
        return self._taken

    def flush(self) -> None:
        """Force what was written to the disk.  Writers may go on, if `take_dirty` was called before."""
        if not (self._taken or self.take_dirty()):
            return
        if self.read_only:
            raise ReadOnlyError("a read-only file cannot be flushed", self.path)
        self._taken = False
        region = self._region
        if self._deleted:
            return
        try:
            with naming_errors(self.path):
                if region is not None:
                    region.flush()
                else:
                    with opened(self.path, os.O_RDWR) as fd:
                        force_data(fd)
        except BaseException:
            # A deleted file needs no flush.
            self._taken = not self._deleted
            if self._taken:
                raise

    def close(self) -> None:
        """Refuse new uses; the memory goes with the last view.  Closing twice does nothing."""
        with self.pool.lock:
            self._closed = True
            region, self._region = self._region, None
            self.pool.forget(self)
            self.pool.dirty.discard(self)
        if region is not None:
            region.close()

    def mark_deleted(self) -> None:
        """Refuse new uses, as for a missing file; current uses go on."""
        with self.pool.lock:
            self._deleted = True
            self._closed = True
            self._region = None
            self.pool.forget(self)
            self.pool.dirty.discard(self)

    def destroy(self) -> None:
        """Delete the file; current readers and views go on."""
        if self.read_only:
            raise ReadOnlyError("a file that was opened read-only is not deleted", self.path)
        self.mark_deleted()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def __repr__(self) -> str:
        return f"MappedFile({self.path!r}, size={self.size})"


def wrong_size(path: str, length: int, size: int) -> GeometryError:
    """Return the error about a file of `length` bytes in a store whose configuration says `size`."""
    text = f"the file has {length} bytes where the configuration says {size}; open the store with the sizes of its files"
    return GeometryError(Sentence(text, InferConfig()), path, min(length, size))


def offset_of_name(name: str) -> int | None:
    """Return the offset in a 20-digit file name, None for another name."""
    if len(name) == 20 and name.isascii() and name.isdigit():
        offset = int(name)
        return offset if offset < 2**63 else None
    return None


def name_of_offset(offset: int) -> str:
    """Return the name of the file that begins at `offset`: 20 decimal digits."""
    if not 0 <= offset < 2**63:
        raise StoreError(f"no file can begin at offset {offset}; offsets are 0 to 2**63 - 1")
    return f"{offset:020d}"


class MemoryFile(MappedFile):
    """A file in this process's memory, for results of a reader; `size` bytes, zero at first.  Unwritten pages take no memory."""

    __slots__ = ()

    def __init__(self, path: str, size: int, *, file_from_offset: int = 0, content: bytes | memoryview = b""):
        super().__init__(path, size, file_from_offset=file_from_offset)
        with _memory() as file:
            os.ftruncate(file.fileno(), size)
            region = Region.map(file.fileno(), size, True)
        if len(content):
            region.write(0, content)
        self._region = region

    def let_go(self) -> None:
        """Keep the bytes: no file has them."""

    def is_current(self) -> bool:
        """Return True: nobody else can replace it."""
        return True

    def mark_dirty(self, end: int) -> None:
        """Do nothing: no disk has it."""

    def reserve(self, end: int) -> None:
        """Do nothing: it takes no disk."""


def _memory() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("rmqstore", os.MFD_CLOEXEC), "w+b", 0)
    # macOS.  Imported where it is needed, as it loads much.
    import tempfile

    return tempfile.TemporaryFile()
