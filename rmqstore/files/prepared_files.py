"""Create the files of a store, which are made before they are needed, so that a new one is a rename.

Owns such files, which are out of sight in a staging folder, their first pages, and the rename that gives a file its
name: no half-made file is ever seen.
"""

from __future__ import annotations

import contextlib
import logging
import os

from rmqstore.errors import StoreError
from rmqstore.files.durable import force_data, fsync_directory, make_directories, write_all
from rmqstore.files.mapped_file import MappedFile, MappedFilePool
from rmqstore.files.os_errors import has_no_links, naming_errors, with_path

__all__ = ["PreparedFiles"]

logger = logging.getLogger(__name__)


class PreparedFiles:
    """Files of `size` bytes in `folder` that wait for their names, the next one first.

    The folder has to be in the file system of the files.  A real broker refuses strange names next to its segments, so
    stores prepare files in their root.
    """

    def __init__(self, folder: str | os.PathLike[str], size: int):
        self.folder, self.size = os.fspath(folder), size
        self._waiting: list[MappedFile] = []
        # The file whose head `populate` made ready.
        self._populated: MappedFile | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def prepare(self, size: int | None = None) -> None:
        """Make sure that the files that wait have space on disk for `size` bytes; default: one whole file."""
        left = self.size if size is None else size
        for staged in list(self._waiting):
            if left > 0:
                staged.reserve(min(left, self.size))
                left -= self.size
        while left > 0:
            self._waiting.append(MappedFile.stage(self.folder, self.size, min(left, self.size)))
            left -= self.size

    def create(
        self,
        path: str | os.PathLike[str],
        *,
        file_from_offset: int = 0,
        pool: MappedFilePool | None = None,
        head: bytes = b"",
        reserved: int = 0,
    ) -> MappedFile:
        """Make a file of zero bytes, from one that waits if there is one, and open it for writing.

        - `head`: the first bytes, which are on disk before the file has its name.
        - `reserved`: the number of bytes that have space on disk before the file has its name.
        """
        path = os.fspath(path)
        directory = os.path.dirname(path) or "."
        waited = self._take()
        try:
            make_directories(directory)
            staged = MappedFile.stage(self.folder, self.size, reserved) if waited is None else waited
            made = os.stat(staged.path)
            try:
                staged.reserve(reserved)
                # One that waited may have the head that it got for a try that failed.
                if head and (waited is not None or any(head)):
                    _write_head(staged.path, head)
                _rename_without_replacing(staged.path, path)
                fsync_directory(directory)
            except BaseException:
                # The caller may retry, even under another name.  An interrupt leaves the file with one name, or with both.
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.stat(path), made):
                        os.unlink(path)
                if waited is None:
                    with contextlib.suppress(OSError):
                        os.unlink(staged.path)
                raise
        except BaseException:
            if waited is not None:
                self._waiting.insert(0, waited)
            raise
        created = MappedFile(path, self.size, file_from_offset=file_from_offset, pool=pool)
        created.reserved = staged.reserved
        return created

    def _take(self) -> MappedFile | None:
        # Taken out first: what another thread prepares in the meantime is for the next time.
        waited = self._waiting.pop(0) if self._waiting else None
        # Somebody may have tidied up the store's directory.
        return waited if waited is not None and os.path.exists(waited.path) else None

    def populate(self, size: int) -> None:
        """Make the first `size` bytes of the next file ready for a writer, once; nothing that goes wrong raises."""
        staged = self._waiting[0] if self._waiting else None
        if staged is not None and staged is not self._populated:
            self._populated = staged
            # It may be renamed into its place meanwhile; the pages stay in the page cache.
            with contextlib.suppress(OSError, StoreError):
                staged.region  # noqa: B018  (mapped now)
                staged.populate(0, size)
                staged.let_go()

    def forget(self) -> None:
        """Leave the files to the parent of this forked process."""
        self._waiting = []

    def delete(self) -> None:
        """Delete what was not used."""
        waiting, self._waiting = self._waiting, []
        for staged in waiting:
            _delete(staged.path)


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
            write_all(descriptor, head, 0)
            force_data(descriptor)
    finally:
        os.close(descriptor)


def _rename_without_replacing(source: str, target: str) -> None:
    # A link fails where a file exists, a rename would replace it; some file systems have no links.
    try:
        os.link(source, target)
    except FileExistsError as error:
        raise with_path(error, target) from None
    except OSError as error:
        if not has_no_links(error) or os.path.exists(target):
            raise
        os.rename(source, target)
    else:
        # The file is in its place.
        _delete(source)
