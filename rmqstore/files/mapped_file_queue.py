"""Files of one length in a directory that together hold one stream of bytes.

Owns the list of the files and of problems among them, the file that holds an offset, the end of the stream, and creating and
deleting files at its ends.  It never interprets bytes, maps a file at its first use only (a store of 10 000 files opens by listing
names), and changes nothing if it was opened read-only (I7).
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from rmqstore._core import FileStream
from rmqstore.errors import GeometryError, ReadOnlyError, Recover, Sentence, StoreClosedError
from rmqstore.files.durable import fsync_directory
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import (
    MappedFile,
    MappedFilePool,
    MemoryFile,
    NotCopied,
    name_of_offset,
    offset_of_name,
    wrong_size,
)
from rmqstore.files.prepared_files import PreparedFiles

__all__ = ["Handling", "Listed", "MappedFileQueue"]

logger = logging.getLogger(__name__)

_PAGE = 4096


class Handling(NamedTuple):
    """Properties of one kind of files.

    - `staging`: the directory in which files are created before they are renamed into place; None for their own.
    - `is_usual_size`: returns True if the store's files of this kind have the expected size: a file of another length is damaged
      then.  Otherwise the size is wrong, and no file can be read.
    - `repair`: the way to rebuild a file that was cut short and has no copy; "" for none.
    """

    staging: str | os.PathLike[str] | None = None
    is_usual_size: Callable[[], bool] | None = None
    advice: str = "normal"
    repair: str = ""


class Listed(NamedTuple):
    """A problem with the name or length of a file.

    - `harmless`: a reader can go on.
    - `damaged`: part of what the file held is gone.
    - `tidied`: a writer deletes it.
    """

    problem: GeometryError
    harmless: bool = True
    damaged: bool = False
    tidied: bool = False


def _stream_files(
    path: str, size: int, handling: Handling, read_only: bool
) -> tuple[list[int], str | None, list[Listed]]:
    # The offsets of the files of `size` bytes, ascending; the path of an empty last file; the problems.
    entries = listing(path)
    # A file in place of a parent folder: the directory does not exist.
    below_file = isinstance(entries.problem, NotADirectoryError) and not os.path.lexists(path)
    if entries.problem is not None and not (read_only and below_file):
        raise entries.problem
    offsets: list[int] = []
    zero_length = None
    found: list[Listed] = []
    sized: list[tuple[int, int, str]] = []
    for entry in entries:
        offset = offset_of_name(entry.name)
        if offset is None or not entry.is_file():
            if offset is not None and entry.is_symlink() and not os.path.exists(entry.path):
                detail = "a file of the store is a broken symlink; restore the file that it points to"
            else:
                kind = "file" if entry.is_file() else "directory"
                detail = f"a {kind} that is not part of the store is among its files; move it away"
            # A file of this name is missing.
            found.append(Listed(GeometryError(detail, entry.path, 0), damaged=offset is not None))
            continue
        with contextlib.suppress(FileNotFoundError):
            # Another process may delete it while this runs.
            sized.append((offset, entry.stat().st_size, entry.path))
    if sized and sized[-1][1] == 0:
        zero_length = sized.pop()[2]
        detail = (
            "the newest file has no bytes, as after a crash during its creation; opening the store for writing deletes it. If it "
            "had messages, restore it from a copy first"
        )
        found.append(Listed(GeometryError(detail, zero_length, 0), tidied=True))
    for offset, length, file in sized:
        if length != size:
            found.append(_of_length(length, file, size, handling))
            if not found[-1].harmless:
                continue
        if offset % size:
            detail = f"the name is not a multiple of the file size {size}; restore the name, or give the size of the store's files"
            found.append(Listed(GeometryError(detail, file, 0), damaged=True))
            continue
        if offsets and offset != offsets[-1] + size:
            detail = (
                f"the file before it begins at {offsets[-1]}, so one at {offsets[-1] + size} is missing; restore it, or open "
                "the store read-only to read the rest"
            )
            found.append(Listed(GeometryError(detail, file, 0)))
        offsets.append(offset)
    return offsets, zero_length, found


def _of_length(length: int, path: str, size: int, handling: Handling) -> Listed:
    if handling.is_usual_size is None or not handling.is_usual_size():
        return Listed(wrong_size(path, length, size), harmless=False)
    what = "it was cut short, and the lost part reads as zeros" if length < size else "what follows them is not read"
    repair = handling.repair or Sentence(
        f"truncate -s {size} FILE restores its size, and ", Recover("skip"), " skips the lost part"
    )
    detail = Sentence(
        f"the file has {length} bytes where the store's files have {size}: {what}. Read-only the rest can be read. To "
        "write, restore the file from a copy; without one, ",
        repair,
    )
    return Listed(GeometryError(detail, path, min(length, size)), damaged=True)


_AS_USUAL = Handling()


class MappedFileQueue(NotCopied, FileStream):
    """Files of `mapped_file_size` bytes, named by the offset of their first byte.

    - `read_only`: change nothing on disk; skip strange files (`verify` reports them) instead of refusing them.
    - `wrote_where`: offset after the last byte of the stream; later bytes of the last file are not part of it.
    - `problems`: the problems that the last listing accepted.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mapped_file_size: int,
        pool: MappedFilePool,
        *,
        read_only: bool = False,
        handling: Handling = _AS_USUAL,
    ):
        self.path = os.fspath(path)
        self.mapped_file_size = mapped_file_size
        self.pool = pool
        self.read_only = read_only
        self.problems: list[GeometryError] = []
        # A problem that no single file has.
        self.of_all_files: GeometryError | None = None
        self._damaged: list[GeometryError] = []
        self._handling = handling
        self._advice = handling.advice
        # Replaced as a whole when files leave its front, so that readers on other threads never see it shift.
        self.file_offsets = []
        self._files: dict[int, MappedFile] = {}
        self._zero_length: str | None = None
        self.prepared = PreparedFiles(self.path if handling.staging is None else handling.staging, mapped_file_size)
        self._taken_where = 0
        self._closed = False
        # Read-only: appended bytes go into memory; the files that are on no disk.
        self.in_memory = False
        self._memory_only: set[int] = set()

    def load(self, on_problem: Callable[[GeometryError], None] | None = None) -> None:
        """List the directory; `wrote_where` becomes the end of the last file.  Nothing is changed.

        A crash between creating and extending leaves a last file of zero bytes (RocketMQ 5.5.0 deletes it at load): it is
        skipped, and `tidy` deletes it.  Read-only, a file that was cut short is padded with zeros, and one that is too long ends
        where the next begins.

        - `on_problem`: takes each problem, which otherwise raises; unreadable files are left out.
        """
        self.relist(on_problem)
        self._taken_where = self.wrote_where = self.file_offsets[-1] + self.mapped_file_size if self.file_offsets else 0

    def take(self, offsets: Iterable[int], end: int) -> None:
        """Use these files without listing the directory or checking their lengths.

        - `offsets`: the first offset of each file, ascending multiples of `mapped_file_size`.
        """
        self.file_offsets = list(offsets)
        self._taken_where = self.wrote_where = end

    def relist(self, on_problem: Callable[[GeometryError], None] | None = None) -> None:
        """List the directory like `load`, and keep `wrote_where`, so that no reader sees a wrong end."""
        offsets, zero_length, found = _stream_files(self.path, self.mapped_file_size, self._handling, self.read_only)
        problems: list[GeometryError] = [] if self.of_all_files is None else [self.of_all_files]
        told = {problem.path for problem in self.problems}
        damaged: list[GeometryError] = []
        for listed in found:
            problem = listed.problem
            if on_problem is not None:
                on_problem(problem)
            elif not (listed.harmless if self.read_only else listed.tidied):
                raise problem
            elif listed.damaged and problem.path not in told:
                logger.warning("%s: %s", problem.path, problem.message)
            problems.append(problem)
            if listed.damaged:
                damaged.append(problem)
        self.file_offsets, self.problems, self._damaged = offsets, problems, damaged
        self._zero_length = zero_length

    def damaged(self) -> list[GeometryError]:
        """Return those `problems` that lost bytes, or were never part of the stream."""
        return list(self._damaged)

    def advise(self, how: str) -> None:
        """Set the access pattern of all files, see `Region.advise`."""
        self._advice = how
        for mapped_file in list(self._files.values()):
            mapped_file.advise(how)

    def tidy(self) -> None:
        """Delete the empty last file that `load` skipped."""
        if self._zero_length is not None:
            logger.warning(
                "deleted %s: it has no bytes, as a crash while it was being created leaves it", self._zero_length
            )
            os.unlink(self._zero_length)
            self._zero_length = None

    def __len__(self) -> int:
        return len(self.file_offsets)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first offset of every file, ascending."""
        return tuple(self.file_offsets)

    @property
    def min_offset(self) -> int:
        """The offset of the first byte, -1 if there is no file."""
        return self.file_offsets[0] if self.file_offsets else -1

    def file(self, offset: int) -> MappedFile:
        """Return the file that begins at `offset`, one of `offsets`."""
        mapped_file = self._files.get(offset)
        if mapped_file is None:
            with self.pool.lock:
                if self._closed:
                    raise StoreClosedError("the store is closed; open it again", self.path)
                mapped_file = self._files.get(offset)
                if mapped_file is None:
                    mapped_file = MappedFile(
                        self._path_of(offset), self.mapped_file_size, file_from_offset=offset, pool=self.pool,
                        read_only=self.read_only, padded=self.read_only,
                    )  # fmt: skip
                    mapped_file.advice = self._advice
                    at = bisect_right(self.file_offsets, offset) - 1
                    if at >= 0 and self.file_offsets[at] == offset:
                        self._files[offset] = mapped_file
                    else:
                        # It left the queue in the meantime and must not be mapped again.
                        mapped_file.mark_deleted()
        return mapped_file

    def find(self, offset: int) -> MappedFile | None:
        """Return the file that holds `offset`, None for none."""
        offsets = self.file_offsets
        at = bisect_right(offsets, offset) - 1
        if at < 0 or offset >= offsets[at] + self.mapped_file_size:
            return None
        return self.file(offsets[at])

    def written_after(self, offset: int) -> Iterator[tuple[MappedFile, int, int]]:
        """Yield each file with nonzero bytes after `offset`: file, first position, number of bytes to the last one."""
        for base in self.file_offsets:
            pos = max(offset - base, 0)
            if pos >= self.mapped_file_size:
                continue
            mapped_file = self.file(base)
            last = mapped_file.last_nonzero(pos)
            if last > pos:
                yield mapped_file, pos, last - pos

    def last(self) -> MappedFile | None:
        """Return the newest file, None for none."""
        return self.file(self.file_offsets[-1]) if self.file_offsets else None

    def file_for_append(self, start_offset: int = 0) -> MappedFile:
        """Return the file that holds `wrote_where`; a new one if the last is full or none exists.

        - `start_offset`: an offset in the first file of an empty queue.
        """
        if self.file_offsets:
            if self.wrote_where < self.file_offsets[-1] + self.mapped_file_size:
                if not self.in_memory:
                    last = self.file(self.file_offsets[-1])
                    last.appended = True
                    return last
                # A dead writer may have left empty files after it.
                held = self.find(self.wrote_where) or self.file(self.file_offsets[-1])
                return held if isinstance(held, MemoryFile) else self._in_memory(held)
            return self._append_file(self.file_offsets[-1] + self.mapped_file_size)
        return self._append_file(start_offset - start_offset % self.mapped_file_size)

    def _in_memory(self, mapped_file: MappedFile) -> MappedFile:
        # A copy of the file up to the end of the stream.
        base = mapped_file.file_from_offset
        copy = MemoryFile(
            mapped_file.path,
            self.mapped_file_size,
            file_from_offset=base,
            content=mapped_file.region.read(0, max(self.wrote_where - base, 0)),
        )
        with self.pool.lock:
            self._files[base] = copy
            # A new list object invalidates what compiled code remembers of these files.
            self.file_offsets = list(self.file_offsets)
        return copy

    @property
    def disk_num(self) -> int:
        """The number of files on disk."""
        return len(self.file_offsets) - len(self._memory_only)

    def is_memory_only(self, offset: int) -> bool:
        """Return True if the file that begins at `offset` is on no disk."""
        return offset in self._memory_only

    def _append_file(self, offset: int) -> MappedFile:
        if self._closed:
            raise StoreClosedError("the store is closed; open it again", self.path)
        if self.read_only and self.in_memory:
            created = MemoryFile(self._path_of(offset), self.mapped_file_size, file_from_offset=offset)
            with self.pool.lock:
                self._files[offset] = created
                self._memory_only.add(offset)
                self.file_offsets = [*self.file_offsets, offset]
            self.wrote_where = offset
            return created
        if self.read_only:
            raise ReadOnlyError("the store was opened read-only", self.path)
        full = self._files.get(self.file_offsets[-1]) if self.file_offsets else None
        mapped_file = self.prepared.create(self._path_of(offset), file_from_offset=offset, pool=self.pool)
        mapped_file.appended = True
        if full is not None and full.appended:
            full.appended = False
            if full.mapped:
                self.pool.admit(full)
        self._files[offset] = mapped_file
        self.file_offsets.append(offset)
        self.wrote_where = offset
        if self.pool.on_create is not None:
            self.pool.on_create()
        return mapped_file

    def populate(self, start: int, end: int) -> bool:
        """Prepare the pages from offset `start` to `end` for a writer, in the newest file and at the head of a prepared one.

        Any thread may call it at any time; it skips missing files and unallocated space, and never raises.
        """
        offsets = self.file_offsets
        if not offsets:
            return False
        base = offsets[-1]
        mapped_file = self._files.get(base)
        asked = False
        if mapped_file is not None and start < base + self.mapped_file_size:
            asked = mapped_file.populate(max(start - base, 0), end - max(start, base))
        beyond = end - base - self.mapped_file_size
        if beyond > 0:
            self.prepared.populate(beyond)
        return asked

    def make_room(self, size: int) -> None:
        """Allocate space on disk for `size` more bytes, also in new files; twice as much in the newest file, to call it rarely."""
        room = 0
        if self.file_offsets:
            last = self.file(self.file_offsets[-1])
            begin = self.wrote_where - last.file_from_offset
            room = last.size - begin
            end = begin + min(size, room)
            if room and end > last.reserved:
                last.reserve(2 * end)
        if size > room:
            self.prepared.prepare(size - room)

    def refresh(self) -> bool:
        """Pick up files that another process appended or deleted (read-only use); True if there are new ones."""
        with self.pool.lock:
            offsets, end = self.file_offsets, self.wrote_where
            gone = 0
            while gone < len(offsets) and not os.path.exists(self._path_of(offsets[gone])):
                gone += 1
            for offset in offsets[:gone]:
                # A reader must not keep the disk space of deleted files.
                forgotten = self._files.pop(offset, None)
                if forgotten is not None:
                    self.pool.forget(forgotten)
                    forgotten.let_go()
            offsets = offsets[gone:]
            before = len(offsets)
            if offsets:
                while self._is_whole(offsets[-1] + self.mapped_file_size):
                    offsets.append(offsets[-1] + self.mapped_file_size)
                self.file_offsets = offsets
            else:
                self.relist()
            # If all known files are gone, the stream begins with the oldest one.
            self.wrote_where = max(end, self.min_offset, 0)
            return len(self.file_offsets) > before

    def let_go(self) -> None:
        """Drop every mapping; the next use maps a file again, and files in memory stay."""
        with self.pool.lock:
            for mapped_file in self._files.values():
                self.pool.forget(mapped_file)
                mapped_file.let_go()

    def forget_files(self) -> None:
        """Drop every mapping, for files that another process replaced; `load` finds the new ones."""
        with self.pool.lock:
            self.let_go()
            self._files = {}

    def was_replaced(self) -> bool:
        """Return True if another process replaced or deleted the newest mapped file (read-only use)."""
        with self.pool.lock:
            for offset in reversed(self.file_offsets):
                mapped_file = self._files.get(offset)
                if mapped_file is not None and mapped_file.was_mapped:
                    if os.path.exists(mapped_file.path):
                        return not mapped_file.is_current()
                    # Retention deletes from the front: a file that goes before older ones was cut or rebuilt.  Unknown older files
                    # count, as a rebuild numbers the units of batches from 0 again.
                    found = listing(self.path)
                    if found.problem is not None:
                        raise found.problem
                    return any(older is not None and older < offset for older in map(offset_of_name, found.names))
        return False

    def forget_replaced_behind(self, offset: int) -> None:
        """Drop the files after the one that holds `offset` that another process deleted or replaced (read-only use).

        A broker creates the next file early, and its recovery after a crash creates it again.
        """
        with self.pool.lock:
            kept = bisect_right(self.file_offsets, offset)
            for base in self.file_offsets[kept:]:
                mapped_file = self._files.get(base)
                there = os.path.exists(self._path_of(base))
                if mapped_file is not None and not (there and (not mapped_file.mapped or mapped_file.is_current())):
                    self.pool.forget(mapped_file)
                    mapped_file.let_go()
                    del self._files[base]
                if not there:
                    break
                kept += 1
            if kept < len(self.file_offsets):
                self.file_offsets = self.file_offsets[:kept]

    def _path_of(self, offset: int) -> str:
        return os.path.join(self.path, name_of_offset(offset))

    def _is_whole(self, offset: int) -> bool:
        # A Java store creates a file and then extends it; a shorter file does not count yet.
        try:
            status = os.stat(self._path_of(offset))
            return stat.S_ISREG(status.st_mode) and status.st_size == self.mapped_file_size
        except OSError:
            return False

    def truncate(self, offset: int) -> int:
        """Cut the stream at `offset`: zero the rest of its file and delete later files, and return their number.

        The first file stays, so that the stream keeps its place.  A later recovery must not take old bytes for records (RocketMQ
        issue 10666).
        """
        deleted = 0
        while len(self.file_offsets) > 1 and self.file_offsets[-1] >= offset:
            last = self.file(self.file_offsets[-1])
            self.file_offsets = self.file_offsets[:-1]
            last.destroy()
            self._files.pop(last.file_from_offset, None)
            deleted += 1
        if self.file_offsets and offset < self.file_offsets[-1] + self.mapped_file_size:
            self.file(self.file_offsets[-1]).zero_from(max(offset - self.file_offsets[-1], 0))
        if deleted:
            fsync_directory(self.path)
        self.wrote_where = max(min(self.wrote_where, offset), self.min_offset, 0)
        return deleted

    def destroy(self) -> None:
        """Delete every file, the newest first, so that a kill leaves a shorter queue; with `in_memory` only forget them."""
        if self.in_memory:
            self.forget_files()
            self.file_offsets, self.wrote_where = [], 0
            self._memory_only.clear()
            return
        for offset in reversed(self.file_offsets):
            self.file(offset).destroy()
        if self.file_offsets:
            fsync_directory(self.path)
        self.file_offsets, self._files, self.wrote_where = [], {}, 0

    def delete_before(self, offset: int) -> int:
        """Delete the files that end at or below `offset`, oldest first, never the last; return their number."""
        deleted = 0
        while len(self.file_offsets) > 1 and self.file_offsets[0] + self.mapped_file_size <= offset:
            first = self.drop_first()
            try:
                first.destroy()
            except BaseException:
                self.take_back(first)
                raise
            deleted += 1
        if deleted:
            fsync_directory(self.path)
        return deleted

    def drop_first(self) -> MappedFile:
        """Take the oldest file out of the queue before its deletion: readers find it whole, or not at all."""
        with self.pool.lock:
            first = self.file(self.file_offsets[0])
            self.file_offsets = self.file_offsets[1:]
            self._files.pop(first.file_from_offset, None)
        return first

    def take_back(self, first: MappedFile) -> None:
        """Put back the file that `drop_first` took out: it could not be deleted."""
        with self.pool.lock:
            self.file_offsets = [first.file_from_offset, *self.file_offsets]

    def take_dirty(self, least_pages: int = 0) -> list[MappedFile]:
        """Return the files that were written since the last call, for `MappedFile.flush`; call it while nobody writes.

        - `least_pages`: return none if the stream grew by fewer pages of 4096 bytes (RocketMQ's flushLeastPages).
        """
        if not self.pool.dirty:
            return []
        # The end may be before the last one after a cut, or if it was not known.
        taken = min(self._taken_where, self.wrote_where)
        if least_pages and self.wrote_where // _PAGE - taken // _PAGE < least_pages:
            return []
        self._taken_where = self.wrote_where
        return [mapped_file for mapped_file in list(self._files.values()) if mapped_file.take_dirty()]

    def flush(self) -> None:
        """Force every file that was written since the last flush to the disk."""
        for mapped_file in self.take_dirty():
            mapped_file.flush()

    def close(self) -> None:
        """Close every file; none is mapped again.  Delete unused prepared files."""
        with self.pool.lock:
            self._closed = True
        self.prepared.delete()
        for mapped_file in list(self._files.values()):
            mapped_file.close()
