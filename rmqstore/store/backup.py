"""Back up a store, also while another thread or process writes to it, into a folder that is a store itself.

Files that are full are hard links where both folders are in one file system, and copies elsewhere; of the others the written
part is copied.  The checkpoint, queues and index are copied before the end of the log is read, so that the log of a backup
contains everything that they point to; the first opening for writing dispatches the rest, as after a crash.  A later backup into
the same folder replaces what changed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rmqstore._core import IndexLayout
from rmqstore.config.places import refuse_dledger
from rmqstore.config.saved_options import BACKUP_FILE, BACKUP_PARTS, OPTIONS_FILE
from rmqstore.consumequeue.queue_folders import queue_directories
from rmqstore.errors import StoreError
from rmqstore.files.durable import fsync_directory, fsync_tree, make_directories, write_all
from rmqstore.files.listing import is_empty, listing
from rmqstore.files.mapped_file import offset_of_name
from rmqstore.files.open_file import open_regular, read_at, read_small_file, written_end
from rmqstore.files.os_errors import crosses_file_systems, has_no_links, naming_errors
from rmqstore.files.output_file import check_outside
from rmqstore.index.index_file import IndexFile
from rmqstore.store.opening import refuse_rocksdb

if TYPE_CHECKING:
    from rmqstore.config import StoreConfig
    from rmqstore.store.store_state import StoreState

__all__ = ["BackupReport", "back_up"]

_PIECE = 1 << 22
_HEADER_SIZE, _ENTRY_SIZE = int(IndexLayout.INDEX_HEADER_SIZE), int(IndexLayout.ENTRY_SIZE)
_TRIES = 100


@dataclass(slots=True)
class BackupReport:
    """What a backup did.

    Attributes
    ----------
    path : str
    linked, copied, kept, removed : int
        Numbers of files: hard links made, files copied, files that were there already, and files that the store has no more.
    copied_size : int
        Bytes copied.
    max_offset : int
        The end of the log in the backup, a phy offset.
    """

    path: str
    linked: int = 0
    copied: int = 0
    kept: int = 0
    removed: int = 0
    copied_size: int = 0
    max_offset: int = 0


def back_up(reader: StoreState, target: str | os.PathLike[str]) -> BackupReport:
    """Back up a store, which `reader` has open read-only, into the folder `target`, see `MessageStore.backup`."""
    root, queues = reader.path, reader.queues
    refuse_rocksdb(root)
    refuse_dledger(root)
    check_outside(target, root)
    job = _Backup(root, os.path.abspath(target))
    job.small_files()
    for kind in ("consumequeue", "batchconsumequeue"):
        for topic, queue_id, directory in queue_directories(root, kind):
            queue = queues.find(topic, queue_id)
            if queue is not None and queue.files.path == directory:
                job.stream(directory, queue.files.wrote_where)
    for _, _, directory in queue_directories(root, "consumequeue_ext"):
        job.stream(directory, None)
    if reader.index_service is not None:
        for name in reader.index_service.names:
            job.index_file(os.path.join(reader.index_service.path, name), reader.config)
    reader.refresh(uploads=True)
    job.report.max_offset = reader.commit_log.max_offset
    job.log(reader.commit_log.path, job.report.max_offset)
    job.finish()
    return job.report


class _Backup:
    def __init__(self, root: str, target: str):
        self.root, self.target = root, target
        self.report = BackupReport(target)
        if os.path.lexists(target) and not (os.path.isdir(target) and is_empty(target)):
            text = read_small_file(os.path.join(target, BACKUP_FILE))
            if text is None:
                raise StoreError("the folder is neither empty nor a backup; give the name of a new one", target)
            self.copies: dict[str, list[int]] = json.loads(text)["copies"]
        else:
            self.copies = {}
        make_directories(target)
        # The files that the backup consists of, by their path in it.
        self.named: set[str] = {BACKUP_FILE, "abort"}
        # Complete files that wait for the log, and their places; None: they get their places at once.
        self._later: list[tuple[str, str]] | None = None
        self._numbers = itertools.count()
        shutil.rmtree(os.path.join(target, BACKUP_PARTS), ignore_errors=True)
        os.mkdir(os.path.join(target, BACKUP_PARTS))
        self._save()
        # Each opening recovers it, also if this is interrupted.
        self._write("abort", b"0")
        self._later = []

    def _save(self) -> None:
        self._write(BACKUP_FILE, json.dumps({"format": 1, "copies": self.copies}).encode())

    def _write(self, name: str, data: bytes) -> None:
        with self._new(name) as fd:
            write_all(fd, data)

    def _part(self) -> str:
        return os.path.join(self.target, BACKUP_PARTS, str(next(self._numbers)))

    @contextlib.contextmanager
    def _new(self, name: str, part: str | None = None) -> Iterator[int]:
        # A file that replaces that of the same name when it is complete and on disk.
        part = part or self._part()
        with naming_errors(os.path.join(self.target, name)):
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                yield fd
                os.fsync(fd)
            finally:
                os.close(fd)
        self._put_in_place(part, name)

    def _put_in_place(self, part: str, name: str) -> None:
        self.named.add(name)
        if self._later is None:
            path = os.path.join(self.target, name)
            make_directories(os.path.dirname(path))
            os.replace(part, path)
        else:
            self._later.append((part, name))

    def log(self, directory: str, end: int) -> None:
        """Take the commit log up to phy offset `end`; only then what points into it takes its place."""
        later, self._later = self._later or [], None
        self.stream(directory, end)
        for part, name in later:
            self._put_in_place(part, name)

    def small_files(self) -> None:
        """Copy the checkpoint, the saved options and the files in ``config``."""
        names = ["checkpoint", OPTIONS_FILE]
        names += [os.path.join("config", entry.name) for entry in listing(os.path.join(self.root, "config"), os.DirEntry.is_file)]
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                with open(open_regular(os.path.join(self.root, name)), "rb") as file:
                    data = file.read()
                self._write(name, data)
                self._count(len(data))

    def stream(self, directory: str, end: int | None) -> None:
        """Take the files of a stream that begin before offset `end`; None = up to the last byte written."""
        files = listing(directory, lambda entry: offset_of_name(entry.name) is not None).existing()
        for number, path in enumerate(files.paths):
            base, size = offset_of_name(os.path.basename(path)) or 0, os.stat(path).st_size
            # The last file may be written to: a reader may know units of it that are not on disk yet.
            if number < len(files.paths) - 1 and (end is None or base + size <= end):
                self._full_file(path)
            elif end is None or base < end or number == 0:
                self._written_part(path, size, None if end is None else min(max(end - base, 0), size))

    def index_file(self, path: str, config: StoreConfig) -> None:
        """Take an index file, without entries that a writer has not finished."""
        with IndexFile.open(path, config, read_only=True) as index:
            is_full = index.is_full
        if is_full:
            self._full_file(path)
        else:
            self._index_part(path, config)

    def _index_part(self, path: str, config: StoreConfig) -> None:
        entries = _HEADER_SIZE + int(IndexLayout.SLOT_SIZE) * config.max_hash_slot_num
        name = os.path.relpath(path, self.root)
        fd = open_regular(path)
        try:
            # The fields of the header are written one after the other.
            for _ in range(_TRIES):
                header = os.pread(fd, _HEADER_SIZE, 0)
                count = int.from_bytes(header[int(IndexLayout.INDEX_COUNT) : _HEADER_SIZE], "big")
                last = os.pread(fd, 12, entries + _ENTRY_SIZE * max(count - 1, 0))
                at = int(IndexLayout.INDEX_END_PHY_OFFSET)
                if os.pread(fd, _HEADER_SIZE, 0) == header and (count < 2 or last[4:12] == header[at : at + 8]):
                    break
            else:
                # Recovery makes the entries again from the log.
                return
            part = self._part()
            with self._new(name, part) as new:
                os.ftruncate(new, config.index_file_size)
                write_all(new, header, 0)
                for pos in range(entries, entries + _ENTRY_SIZE * count, _PIECE):
                    write_all(new, read_at(fd, min(_PIECE, entries + _ENTRY_SIZE * count - pos), pos), pos)
                if count > 1:
                    self._relink(part, count, config)
        finally:
            os.close(fd)
        self._count(_HEADER_SIZE + _ENTRY_SIZE * count)

    def _relink(self, path: str, count: int, config: StoreConfig) -> None:
        # Slots may have been ahead of the entries that were copied.
        with IndexFile.open(path, config) as index:
            index.relink(count)
            index.flush()

    def _full_file(self, path: str) -> None:
        name, status = os.path.relpath(path, self.root), os.stat(path)
        copy = os.path.join(self.target, name)
        self.named.add(name)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(copy), status) or self.copies.get(name) == [status.st_size, status.st_mtime_ns]:
                self.report.kept += 1
                return
        part = self._part()
        try:
            os.link(path, part)
            self._put_in_place(part, name)
            self.copies.pop(name, None)
            self.report.linked += 1
        except OSError as error:
            if not (has_no_links(error) or crosses_file_systems(error)):
                raise
            with self._new(name) as fd, open(open_regular(path), "rb") as source, open(fd, "wb", closefd=False) as new:
                shutil.copyfileobj(source, new, _PIECE)
            self.copies[name] = [status.st_size, status.st_mtime_ns]
            self._count(status.st_size)

    def _written_part(self, path: str, size: int, end: int | None) -> None:
        name = os.path.relpath(path, self.root)
        fd = open_regular(path)
        try:
            stop = written_end(fd) if end is None else end
            with self._new(name) as new:
                os.ftruncate(new, size)
                for pos in range(0, stop, _PIECE):
                    write_all(new, read_at(fd, min(_PIECE, stop - pos), pos), pos)
        finally:
            os.close(fd)
        self.copies.pop(name, None)
        self._count(stop)

    def _count(self, size: int) -> None:
        self.report.copied += 1
        self.report.copied_size += size

    def finish(self) -> None:
        """Remove the files that the store no longer has, and make everything durable."""
        for folder, _, names in os.walk(self.target):
            for name in names:
                path = os.path.join(folder, name)
                if os.path.relpath(path, self.target) not in self.named:
                    os.unlink(path)
                    self.report.removed += 1
        self.copies = {name: mark for name, mark in self.copies.items() if name in self.named}
        self._save()
        os.rmdir(os.path.join(self.target, BACKUP_PARTS))
        fsync_tree(self.target)
        fsync_directory(os.path.dirname(self.target))
