"""Create the files of a store ahead of their use in a staging folder, so that a new file is a rename."""

from __future__ import annotations

import contextlib
import logging
import os

from rmqstore.errors import StoreError
from rmqstore.files.durable import force_data, fsync_directory, make_directories, write_all
from rmqstore.files.mapped_file import MappedFile, MappedFilePool
from rmqstore.files.open_file import opened
from rmqstore.files.os_errors import has_no_links, naming_errors, with_path

__all__ = ["PreparedFiles"]

logger = logging.getLogger(__name__)


class PreparedFiles:
    """Files of `size` bytes in `folder` without their final names, the next one first.

    The folder must be in the file system of the files.  A real broker refuses strange names next to its segments, so stores
    prepare files in their root.
    """

    def __init__(self, folder: str | os.PathLike[str], size: int):
        self.folder, self.size = os.fspath(folder), size
        self._waiting: list[MappedFile] = []
        # The file whose head `populate` prepared.
        self._populated: MappedFile | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def prepare(self, size: int | None = None) -> None:
        """Allocate space on disk for `size` bytes in prepared files; default: one whole file."""
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
        """Create a file of zero bytes, preferably from a prepared one, and open it for writing.

        - `head`: the first bytes, which are on disk before the rename.
        - `reserved`: the number of bytes that are allocated before the rename.
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
                # A prepared file may have the head of a failed try.
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
        waited = self._waiting.pop(0) if self._waiting else None
        # Somebody may have cleaned the store's directory.
        return waited if waited is not None and os.path.exists(waited.path) else None

    def populate(self, size: int) -> None:
        """Prepare the first `size` bytes of the next file for a writer, once; never raise."""
        staged = self._waiting[0] if self._waiting else None
        if staged is not None and staged is not self._populated:
            self._populated = staged
            # Another thread may rename it; the pages stay in the page cache.
            with contextlib.suppress(OSError, StoreError):
                staged.region  # noqa: B018  (mapped now)
                staged.populate(0, size)
                staged.let_go()

    def forget(self) -> None:
        """Leave the files to the parent of this forked process."""
        self._waiting = []

    def delete(self) -> None:
        """Delete the unused files."""
        waiting, self._waiting = self._waiting, []
        for staged in waiting:
            # The next opening of the store deletes the rest.
            try:
                os.unlink(staged.path)
            except FileNotFoundError:
                pass
            except OSError as error:
                logger.warning("%s could not be deleted: %s", staged.path, error)


def _write_head(path: str, head: bytes) -> None:
    with opened(path, os.O_WRONLY) as descriptor, naming_errors(path):
        write_all(descriptor, head, 0)
        force_data(descriptor)


def _rename_without_replacing(source: str, target: str) -> None:
    # A link fails if a file exists, a rename would replace it; some file systems have no links.
    try:
        os.link(source, target)
    except FileExistsError as error:
        raise with_path(error, target) from None
    except OSError as error:
        if not has_no_links(error) or os.path.exists(target):
            raise
        os.rename(source, target)
    else:
        with contextlib.suppress(OSError):
            os.unlink(source)
