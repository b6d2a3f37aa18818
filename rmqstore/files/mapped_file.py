"""One fixed-size file of a store, mapped on demand, and the pool that bounds how many are mapped at once.

Owns creation (under a staging name, so that no half-made file is ever seen), space on disk, mapping, flushing and
removal of one file.  It never looks at what the bytes mean and never changes a file's size (I2).  A read-only file is
opened and mapped read-only (I7).

A file is a hole at first.  Every writer of a mapping calls `mark_dirty` or `reserve` with the end of what it writes, so
that a full disk is an error here and never a SIGBUS later.

Eviction from the pool, and deletion, only drop the reference: whoever works with a `Region` keeps it until done.
What is written is noted first (`mark_dirty`); a flush takes these notes while nobody writes and forces the bytes later,
so that writers never wait for a disk.
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
from rmqstore.files.open_file import last_nonzero, open_regular, written_extents
from rmqstore.files.os_errors import naming_errors

__all__ = ["STAGING_PREFIX", "MappedFile", "MappedFilePool", "MemoryFile", "NotCopied"]

logger = logging.getLogger(__name__)

STAGING_PREFIX = ".rmqstore-allocating-"
_PAGE = 4096
# Bytes that the search for the last byte that is not zero looks at before it lets go of them.
_LOOK_SIZE = 8 << 20
_staging_numbers = itertools.count()


def _allocate(fd: int, begin: int, end: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, begin, end - begin)
        return
    # macOS: only written bytes have space on disk.  Nobody else writes to this range before it has space, so each byte stays.
    status = os.fstat(fd)
    if status.st_blocks * 512 >= status.st_size:
        return
    while begin < end:
        begin += os.pwrite(fd, os.pread(fd, min(end - begin, 1 << 20), begin), begin)


class NotCopied:
    """What owns files, mappings or locks: a copy would share them with the original and write beside it.

    Neither `copy` nor `pickle` makes a second one; where another is needed, it is opened by its path.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        name = type(self).__name__
        raise TypeError(
            f"a {name} owns files or locks and cannot be copied or pickled: give its path, and open it again where it is needed"
        )


class MappedFilePool(NotCopied):
    """Bounds the number of mapped files of a store; the least recently used ones are let go (second chance).

    Files that are read are at most `max_mapped_files`.  The newest file of each queue that is written stays mapped as long as
    the system allows (`vm.max_map_count`): mapping it for each put takes a hundred times as long as the put.

    - `dirty`: those that were written since a flush took note of it.
    - `on_create`: called when a queue of files got a new one.
    """

    def __init__(self, max_mapped_files: int = 1024):
        if max_mapped_files < 1:
            raise ValueError(f"max_mapped_files is {max_mapped_files}, it must be at least 1")
        self.max_mapped_files = max_mapped_files
        self.lock = threading.RLock()
        self.dirty: set[MappedFile] = set()
        self.on_create: Callable[[], object] | None = None
        # In the order of their last look; a file is in one of them.
        self._read: OrderedDict[MappedFile, None] = OrderedDict()
        self._appended: OrderedDict[MappedFile, None] = OrderedDict()
        self._warned = False

    def __len__(self) -> int:
        return len(self._read) + len(self._appended)

    def admit(self, mapped_file: MappedFile) -> None:
        """Count `mapped_file`, which is mapped, and let others go while there are too many."""
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
        # Whether a file left `kept`.  Twice round at most: the first round may find each used since it was last looked at.
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
        """Let half of the mapped files go, as the system refuses another; False if all are in use or only one is left."""
        with self.lock:
            before = len(self)
            self.max_appended_files = max(len(self._appended) // 2, 1)
            self._evict(self._read, len(self._read) // 2)
            self._evict(self._appended, self.max_appended_files)
            return len(self) < before

    @functools.cached_property
    def max_appended_files(self) -> int:
        """int: how many files that are written stay mapped; a quarter of what Linux allows is left to others."""
        try:
            with open("/proc/sys/vm/max_map_count", encoding="ascii") as file:
                return max(int(file.read()) * 3 // 4, 1)
        except (OSError, ValueError):
            return 49_152

    def forget(self, mapped_file: MappedFile) -> None:
        """Take `mapped_file` out of the count; nothing happens if it is not in it."""
        with self.lock:
            self._read.pop(mapped_file, None)
            self._appended.pop(mapped_file, None)

    def let_go(self) -> None:
        """Let every mapping go, those of files that no list has any more too: the store is closed."""
        with self.lock:
            for kept in (self._read, self._appended):
                for mapped_file in kept:
                    mapped_file.let_go()
                kept.clear()


class MappedFile(NotCopied):
    """One file of fixed size.

    - `size`: bytes; the file on disk must have exactly so many, unless it is `padded`.
    - `file_from_offset`: offset of the file's first byte in its queue of files, bytes.
    - `padded`: a file of another length is read anyway: it was cut short, and its missing end reads as zeros, or it is too
      long, and nothing after `size` is read.  Only read-only.
    - `advice`: how it will be read, as of `Region.advise`; told to the system before the first touch.
    - `appended`: it is the file that its queue writes to.
    - `reserved`: position up to which `reserve` made sure of space on disk; 0 in a file that was just opened.
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
        pool: MappedFilePool | None = None,
    ):
        self.path = os.fspath(path)
        self.size = size
        self.padded = False
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
    def of_any_length(
        cls, path: str | os.PathLike[str], size: int, *, file_from_offset: int = 0, pool: MappedFilePool | None = None
    ) -> MappedFile:
        """Return a file to read that is `padded`."""
        mapped_file = cls(path, size, file_from_offset=file_from_offset, read_only=True, pool=pool)
        mapped_file.padded = True
        return mapped_file

    @classmethod
    def stage(cls, directory: str | os.PathLike[str], size: int, reserved: int) -> MappedFile:
        """Make a file of `size` zero bytes under a name that no store reads, with space on disk for the first `reserved`."""
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
        """The mapping; made at the first use and again after the pool let it go."""
        region = self._region
        if region is None:
            region = self._map()
        self.used = True
        return region

    def _map(self) -> Region:
        with self.pool.lock:
            if self._deleted:
                raise OffsetOutOfRangeError(
                    "the file was deleted; what it held is not part of the store any more", self.path
                )
            if self._closed:
                raise StoreClosedError("the file is closed; open the store again", self.path)
            if self._region is not None:
                return self._region
            try:
                fd = open_regular(self.path, os.O_RDONLY if self.read_only else os.O_RDWR)
            except FileNotFoundError:
                raise OffsetOutOfRangeError(
                    "the file was deleted by another process since it was listed; what it held is not part of the store "
                    "any more",
                    self.path,
                ) from None
            try:
                status = os.fstat(fd)
                length = status.st_size
                self._inode = (status.st_dev, status.st_ino)
                if length != self.size and not self.padded:
                    raise GeometryError(
                        Sentence(
                            f"the file has {length} bytes where the configuration says {self.size}; open the store with "
                            "the sizes that it was written with",
                            InferConfig(),
                        ),
                        self.path,
                        min(length, self.size),
                    )
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
            # The process has as many mappings as the system allows.
            if error.errno != errno.ENOMEM or not self.pool.let_half_go():
                raise
            return Region.map(fd, self.size, not self.read_only, self.padded)

    def is_current(self) -> bool:
        """bool: the file that was mapped last still bears its name, and none of its mapped pages was found gone."""
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
        """bool: the file is mapped now."""
        return self._region is not None

    @property
    def was_mapped(self) -> bool:
        """bool: the file is mapped, or was before the pool let it go, so that `is_current` knows which it was."""
        return self._region is not None or self._inode != (0, 0)

    def advise(self, how: str) -> None:
        """Set `advice`, for the mapping that is there as well."""
        region, self.advice = self._region, how
        if region is not None:
            # It may be closed meanwhile.
            with contextlib.suppress(StoreClosedError):
                region.advise(how)

    def let_go(self) -> None:
        """Drop the mapping; it is made again at the next use.  What was written stays, in the page cache or on disk."""
        self._region = None

    def last_nonzero(self, pos: int = 0) -> int:
        """int: the position after the last byte from `pos` on that is not zero, or `pos` if none is.

        Holes, and space that was allocated but never written, are not read, so asking costs what was written.  Where the
        system does not tell them, the file is read by `pread`: looked at through a mapping, a hole takes a page of a file
        system in memory, and a full one has none, which is a SIGBUS.
        """
        region = self.region
        if pos >= self.size:
            return pos
        fd = open_regular(self.path)
        try:
            extents = written_extents(fd, pos, self.size)
            if extents is None:
                with naming_errors(self.path):
                    return last_nonzero(fd, pos, self.size)
        finally:
            os.close(fd)
        for start, end in reversed(extents):
            for at in range(start + (end - 1 - start) // _LOOK_SIZE * _LOOK_SIZE, start - 1, -_LOOK_SIZE):
                last = region.last_nonzero(at, min(_LOOK_SIZE, end - at))
                if last > at:
                    return last
                # A segment that was made of zeros would stay in this process's memory, a gigabyte of it.
                region.release_pages(at, min(_LOOK_SIZE, end - at))
        return pos

    def zero_from(self, pos: int) -> int:
        """int: how many bytes from `pos` to the last one that is not zero were made zero."""
        last = self.last_nonzero(pos)
        if last > pos:
            self.mark_dirty(last)
            self.region.zero(pos, last - pos)
        return last - pos

    def hold(self, pos: int = 0, size: int | None = None) -> memoryview:
        """memoryview: read-only bytes of the file without a copy; they keep the mapping until the view is released."""
        region = self.region
        return region.view(pos, region.size - pos if size is None else size)

    def mark_dirty(self, end: int) -> None:
        """Note that bytes before `end` will be written, so that `flush` has work to do; `reserve` them first."""
        if end > self.reserved:
            self.reserve(end)
        self.pool.dirty.add(self)

    def adopt(self) -> None:
        """Let the next flush force what a process that died may have left unforced."""
        self.pool.dirty.add(self)

    def reserve(self, end: int) -> None:
        """Make sure that the bytes before `end` have space on disk: a write into a hole of a full disk would be a SIGBUS.

        Files that a Java store made have holes (it only extends them), as have those that a power cut left.

        Raises
        ------
        OSError
            The disk is full.
        StoreChangedError
            The file was cut short.
        """
        end = min(-(-end // _PAGE) * _PAGE, self.size)
        if end > self.reserved and not self.read_only:
            self.reserve_range(self.reserved, end)
            self.reserved = end

    def reserve_range(self, begin: int, end: int) -> None:
        """Make sure that the pages of the bytes from `begin` to `end` have space on disk; errors as for `reserve`."""
        fd = open_regular(self.path, os.O_RDWR)
        try:
            length = os.fstat(fd).st_size
            if length < self.size:
                # Allocating would make it whole again, with zeros where there were messages.
                raise StoreChangedError(
                    f"the file was cut short to {length} bytes by somebody else while the store was open; close the store "
                    "and restore the file, or open the store again",
                    self.path,
                    length,
                )
            with naming_errors(self.path):
                _allocate(fd, begin // _PAGE * _PAGE, min(-(-end // _PAGE) * _PAGE, self.size))
        finally:
            os.close(fd)

    def populate(self, pos: int, size: int) -> bool:
        """Make pages ready for a writer, see `Region.populate`; False if that was not done for all of them.

        Only pages before `reserved` of a file that is mapped now: a hole would take space that nobody made sure of.
        """
        region = self._region
        size = min(size, self.size - pos)
        ready = min(size, self.reserved - pos)
        if region is None or self.read_only or ready <= 0:
            return False
        try:
            region.populate(pos, ready)
        except StoreError:
            # It was closed meanwhile.
            return False
        return ready == size

    def take_dirty(self) -> bool:
        """Whether anything was written since this was last asked; `flush` then forces it.  Ask while nobody writes."""
        if self in self.pool.dirty:
            self.pool.dirty.discard(self)
            self._taken = True
        return self._taken

    def flush(self) -> None:
        """Force what was written to the disk.  Writers may go on, if `take_dirty` was asked before."""
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
                    fd = open_regular(self.path, os.O_RDWR)
                    try:
                        force_data(fd)
                    finally:
                        os.close(fd)
        except BaseException:
            # A file that was deleted meanwhile needs no flush.
            self._taken = not self._deleted
            if self._taken:
                raise

    def close(self) -> None:
        """Refuse new uses; the memory goes when the last view does.  Closing twice does nothing."""
        with self.pool.lock:
            self._closed = True
            region, self._region = self._region, None
            self.pool.forget(self)
            self.pool.dirty.discard(self)
        if region is not None:
            region.close()

    def mark_deleted(self) -> None:
        """Refuse new uses, as for a file that is not there; who uses it goes on."""
        with self.pool.lock:
            self._deleted = True
            self._closed = True
            self._region = None
            self.pool.forget(self)
            self.pool.dirty.discard(self)

    def destroy(self) -> None:
        """Delete the file.  Whoever reads it or holds a view goes on; the memory goes with the last of them."""
        if self.read_only:
            raise ReadOnlyError("a file that was opened read-only is not deleted", self.path)
        self.mark_deleted()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def __repr__(self) -> str:
        return f"MappedFile({self.path!r}, size={self.size})"


def offset_of_name(name: str) -> int | None:
    """int or None: the offset that a 20-digit file name stands for, None if the name has another form."""
    if len(name) == 20 and name.isascii() and name.isdigit():
        offset = int(name)
        return offset if offset < 2**63 else None
    return None


def name_of_offset(offset: int) -> str:
    """str: the name of the file that begins at `offset`: decimal, 20 digits."""
    if not 0 <= offset < 2**63:
        raise StoreError(f"no file can begin at offset {offset}; offsets are 0 to 2**63 - 1")
    return f"{offset:020d}"


class MemoryFile(MappedFile):
    """A file of a store that is in this process's memory only: what a reader works out, and must not write to disk.

    - `size`: bytes, zero at first; pages that are not written take no memory.
    """

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
        """bool: True, as nobody else can replace it."""
        return True

    def mark_dirty(self, end: int) -> None:
        """Nothing: it never goes to a disk."""

    def reserve(self, end: int) -> None:
        """Nothing: it takes no disk."""


def _memory() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("rmqstore", os.MFD_CLOEXEC), "w+b", 0)
    # macOS.  Imported where it is needed, as it loads much.
    import tempfile

    return tempfile.TemporaryFile()
