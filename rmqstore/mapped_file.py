"""One fixed-size file of a store, mapped on demand, and the pool that bounds how many are mapped at once.

Owns creation (allocated in full beside its place and renamed into it, so that no half-made file is ever seen, and a
full disk is an error here and never a SIGBUS later), mapping, flushing and removal of one file.  It never looks at
what the bytes mean and never changes a file's size (I2).  A read-only file is opened and mapped read-only (I7).

Eviction from the pool only drops the pool's reference: whoever works with a `Region` keeps it until done.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections import deque

from rmqstore._core import Region
from rmqstore.errors import GeometryError, ReadOnlyError, StoreClosedError, StoreError

__all__ = ["STAGING_PREFIX", "MappedFile", "MappedFilePool", "fsync_directory"]

STAGING_PREFIX = ".rmqstore-allocating-"
_staging_numbers = itertools.count()


def fsync_directory(path: str) -> None:
    """Make the names in directory `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _rename_without_replacing(source: str, target: str) -> None:
    # A link fails where a file exists, a rename would replace it; some file systems have no links.
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS) or os.path.exists(target):
            raise
        os.rename(source, target)
    else:
        os.unlink(source)


class MappedFilePool:
    """Bounds the number of mapped files of a store; the least recently used ones are let go (second chance).

    Parameters
    ----------
    max_mapped_files : int
        How many may be mapped at once, at least 1.
    """

    def __init__(self, max_mapped_files: int = 1024):
        if max_mapped_files < 1:
            raise ValueError(f"max_mapped_files is {max_mapped_files}, it must be at least 1")
        self.max_mapped_files = max_mapped_files
        self.lock = threading.RLock()
        self._mapped: deque[MappedFile] = deque()

    def __len__(self) -> int:
        return len(self._mapped)

    def admit(self, mapped_file: MappedFile) -> None:
        """Count `mapped_file`, which was just mapped, and let others go while there are too many."""
        with self.lock:
            self._mapped.append(mapped_file)
            # Twice round at most: the first round may find every file used since it was last looked at.
            for _ in range(2 * len(self._mapped)):
                if len(self._mapped) <= self.max_mapped_files:
                    return
                oldest = self._mapped.popleft()
                if oldest is mapped_file or oldest.used:
                    oldest.used = False
                    self._mapped.append(oldest)
                else:
                    oldest.let_go()

    def forget(self, mapped_file: MappedFile) -> None:
        """Take `mapped_file` out of the count; nothing happens if it is not in it."""
        with self.lock:
            try:
                self._mapped.remove(mapped_file)
            except ValueError:
                pass


class MappedFile:
    """One file of fixed size.

    Attributes
    ----------
    path : str
    size : int
        Bytes; the file on disk must have exactly so many.
    file_from_offset : int
        Offset of the file's first byte in its queue of files, bytes.
    used : bool
        Asked for since the pool last looked.
    """

    __slots__ = ("_closed", "_dirty", "_region", "file_from_offset", "path", "pool", "read_only", "size", "used")

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
        self.file_from_offset = file_from_offset
        self.read_only = read_only
        self.pool = pool if pool is not None else MappedFilePool(1)
        self.used = False
        self._region: Region | None = None
        self._closed = False
        self._dirty = False

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        size: int,
        *,
        file_from_offset: int = 0,
        pool: MappedFilePool | None = None,
        staging: str | os.PathLike[str] | None = None,
    ) -> MappedFile:
        """Make a file of `size` zero bytes, allocated on disk, and open it for writing.

        Parameters
        ----------
        staging : path, optional
            Directory on the same file system in which the file is made before it is renamed to `path`; by default the
            directory of `path`.  A real broker refuses strange names beside its segments, so stores stage in their root.

        Raises
        ------
        OSError
            The file exists already, the disk is full, …; nothing is left behind.
        """
        path = os.fspath(path)
        directory = os.path.dirname(path) or "."
        os.makedirs(directory, exist_ok=True)
        temporary = os.path.join(
            os.fspath(staging) if staging is not None else directory,
            f"{STAGING_PREFIX}{os.getpid()}-{next(_staging_numbers)}",
        )
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, size)
            else:
                os.ftruncate(fd, size)
            os.fsync(fd)
            _rename_without_replacing(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        finally:
            os.close(fd)
        fsync_directory(directory)
        return cls(path, size, file_from_offset=file_from_offset, pool=pool)

    @property
    def region(self) -> Region:
        """The mapping; made at the first use and again after the pool let it go.

        Raises
        ------
        StoreClosedError
            `close` was called.
        GeometryError
            The file's length is not `size`.
        """
        region = self._region
        if region is None:
            region = self._map()
        self.used = True
        return region

    def _map(self) -> Region:
        with self.pool.lock:
            if self._closed:
                raise StoreClosedError("the file is closed; open the store again", self.path)
            if self._region is not None:
                return self._region
            fd = os.open(self.path, (os.O_RDONLY if self.read_only else os.O_RDWR) | os.O_CLOEXEC)
            try:
                length = os.fstat(fd).st_size
                if length != self.size:
                    raise GeometryError(
                        f"the file has {length} bytes where the configuration says {self.size}; open the store with "
                        "the sizes that it was written with, or StoreConfig.infer(path)",
                        self.path,
                        min(length, self.size),
                    )
                region = Region.map(fd, self.size, not self.read_only)
            finally:
                os.close(fd)
            self._region = region
            self.pool.admit(self)
            return region

    @property
    def mapped(self) -> bool:
        """bool: the file is mapped now."""
        return self._region is not None

    @property
    def available(self) -> bool:
        """bool: `close` was not called."""
        return not self._closed

    def let_go(self) -> None:
        """Drop the mapping; it is made anew at the next use.  What was written stays, in the page cache or on disk."""
        self._region = None

    def last_nonzero(self, pos: int = 0) -> int:
        """int: the position after the last byte from `pos` on that is not zero, or `pos` if none is.

        Holes, and space that was allocated but never written, are not read, so asking costs what was written.
        """
        region = self.region
        if pos >= self.size:
            return pos
        for start, end in reversed(self._extents(pos)):
            last = region.last_nonzero(start, end - start)
            if last > start:
                return last
        return pos

    def _extents(self, pos: int) -> list[tuple[int, int]]:
        # Where the file system says that something was written; everything, if it does not tell.
        extents: list[tuple[int, int]] = []
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            at = pos
            while at < self.size and len(extents) < 100_000:
                try:
                    start = os.lseek(fd, at, os.SEEK_DATA)
                except OSError as error:
                    if error.errno == errno.ENXIO:
                        return extents
                    return [(pos, self.size)]
                if start >= self.size:
                    return extents
                at = min(os.lseek(fd, start, os.SEEK_HOLE), self.size)
                extents.append((start, at))
        except (OSError, AttributeError):
            return [(pos, self.size)]
        finally:
            os.close(fd)
        return extents if at >= self.size else [*extents, (at, self.size)]

    def zero_from(self, pos: int) -> int:
        """int: how many bytes from `pos` to the last one that is not zero were made zero."""
        last = self.last_nonzero(pos)
        if last > pos:
            self.region.zero(pos, last - pos)
            self.mark_dirty()
        return last - pos

    def hold(self, pos: int = 0, size: int | None = None) -> memoryview:
        """memoryview: read-only bytes of the file without a copy; they keep the mapping until the view is released."""
        region = self.region
        return region.view(pos, region.size - pos if size is None else size)

    def mark_dirty(self) -> None:
        """Note that something was written, so that `flush` has work to do."""
        self._dirty = True

    def flush(self, pos: int = 0, size: int | None = None) -> None:
        """Force `size` bytes from `pos` (default: everything) to the disk, if anything was written since.

        Raises
        ------
        OSError
            The system could not write.
        """
        if not self._dirty:
            return
        if self.read_only:
            raise ReadOnlyError("a read-only file cannot be flushed", self.path)
        region = self._region
        if region is not None:
            region.flush(pos, -1 if size is None else size)
        else:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)
        if size is None:
            self._dirty = False

    def close(self) -> None:
        """Refuse new uses; the memory goes when the last view does.  Closing twice does nothing."""
        with self.pool.lock:
            self._closed = True
            region, self._region = self._region, None
            self.pool.forget(self)
        if region is not None:
            region.close()

    def destroy(self) -> None:
        """Close and delete the file.  Views that are held stay readable until they are released."""
        if self.read_only:
            raise ReadOnlyError("a file that was opened read-only is not deleted", self.path)
        self.close()
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
    """str: the name of the file that begins at `offset`: decimal, 20 digits.

    Raises
    ------
    StoreError
        `offset` is negative or above 2**63 - 1.
    """
    if not 0 <= offset < 2**63:
        raise StoreError(f"no file can begin at offset {offset}; offsets are 0 to 2**63 - 1")
    return f"{offset:020d}"
