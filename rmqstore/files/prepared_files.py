"""Create the files of a store, which are allocated before they are needed, so that a new one is a rename.

Owns the paths of such files, which are out of sight in a staging folder, their first pages, and the rename that gives a file
its name: no half-made file is ever seen.
"""

from __future__ import annotations

import contextlib
import logging
import os

from rmqstore._core import Region
from rmqstore.files.durable import force_data, fsync_directory, make_directories
from rmqstore.files.mapped_file import MappedFile, MappedFilePool
from rmqstore.files.open_file import open_regular, write_at
from rmqstore.files.os_errors import has_no_links, naming_errors

__all__ = ["PreparedFiles"]

logger = logging.getLogger(__name__)


class PreparedFiles:
    """Files of `size` bytes in `folder` that wait for their names, the next one first.

    The folder has to be in the file system of the files.  A real broker refuses strange names next to its segments, so
    stores prepare files in their root.
    """

    def __init__(self, folder: str | os.PathLike[str], size: int):
        self.folder, self.size = os.fspath(folder), size
        self._paths: list[str] = []
        # The file whose head `populate` made ready.
        self._populated: str | None = None

    def __len__(self) -> int:
        return len(self._paths)

    def prepare(self, count: int = 1) -> None:
        """Allocate files until `count` wait."""
        while len(self._paths) < count:
            self._paths.append(MappedFile.allocate(self.folder, self.size))

    def create(
        self,
        path: str | os.PathLike[str],
        *,
        file_from_offset: int = 0,
        pool: MappedFilePool | None = None,
        head: bytes = b"",
    ) -> MappedFile:
        """Make a file of zero bytes, from one that waits if there is one, and open it for writing.

        It is allocated on disk unless it did not wait and `pool` is sparse.

        - `head`: the first bytes, which are on disk before the file has its name.
        """
        path = os.fspath(path)
        directory = os.path.dirname(path) or "."
        waited = self._take()
        sparse = waited is None and pool is not None and pool.sparse
        try:
            make_directories(directory)
            staged = MappedFile.allocate(self.folder, self.size, sparse=sparse) if waited is None else waited
            made = os.stat(staged)
            try:
                # One that waited may have the head that it got for a try that failed.
                if head and (waited is not None or any(head)):
                    _write_head(staged, head)
                _rename_without_replacing(staged, path)
                fsync_directory(directory)
            except BaseException:
                # The caller may retry, even under another name.  An interrupt leaves the file with one name, or with both.
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.stat(path), made):
                        os.unlink(path)
                if waited is None:
                    with contextlib.suppress(OSError):
                        os.unlink(staged)
                raise
        except BaseException:
            if waited is not None:
                self._paths.insert(0, waited)
            raise
        created = MappedFile(path, self.size, file_from_offset=file_from_offset, pool=pool)
        if not sparse:
            created.note_allocated()
        return created

    def _take(self) -> str | None:
        # Taken out first: what another thread prepares in the meantime is for the next time.
        path = self._paths.pop(0) if self._paths else None
        # Somebody may have tidied up the store's directory.
        return path if path is not None and os.path.exists(path) else None

    def populate(self, size: int) -> None:
        """Make the first `size` bytes of the next file ready for a writer, once; nothing that goes wrong raises."""
        path = self._paths[0] if self._paths else None
        if path is not None and path != self._populated:
            self._populated = path
            # It may be renamed into its place meanwhile; the pages stay in the page cache.
            with contextlib.suppress(OSError):
                fd = open_regular(path, os.O_RDWR)
                try:
                    region = Region.map(fd, self.size, True)
                finally:
                    os.close(fd)
                try:
                    region.populate(0, min(size, self.size))
                finally:
                    region.close()

    def forget(self) -> None:
        """Leave the files to the parent of this forked process."""
        self._paths = []

    def delete(self) -> None:
        """Delete what was not used."""
        paths, self._paths = self._paths, []
        for path in paths:
            _delete(path)


def _delete(path: str) -> None:
    # What cannot be deleted now is when the store is opened next.
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s could not be deleted: %s", path, error)


def _write_head(path: str, head: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        with naming_errors(path):
            write_at(descriptor, head, 0)
            force_data(descriptor)
    finally:
        os.close(descriptor)


def _rename_without_replacing(source: str, target: str) -> None:
    # A link fails where a file exists, a rename would replace it; some file systems have no links.
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError as error:
        if not has_no_links(error) or os.path.exists(target):
            raise
        os.rename(source, target)
    else:
        # The file is in its place.
        _delete(source)
