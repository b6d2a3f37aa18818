"""Files that are allocated before they are needed, so that beginning a new one is a rename.

Owns the paths of such files, which lie out of sight in a staging folder, and their first pages.  It never gives a file its
name: whoever takes one does.
"""

from __future__ import annotations

import contextlib
import os

from rmqstore.files.mapped_file import MappedFile, delete_staged

__all__ = ["PreparedFiles"]


class PreparedFiles:
    """Files of `size` bytes in `folder` that wait for their names, the next one first."""

    def __init__(self, folder: str, size: int):
        self.folder, self.size = folder, size
        self._paths: list[str] = []
        # The file whose head `populate` made ready.
        self._populated: str | None = None

    def __len__(self) -> int:
        return len(self._paths)

    def prepare(self, count: int = 1) -> None:
        """Allocate files until `count` wait.

        Raises
        ------
        OSError
            The disk is full, …; what waited before still does.
        """
        while len(self._paths) < count:
            self._paths.append(MappedFile.allocate(self.folder, self.size))

    def take(self) -> str | None:
        """str or None: the path of the next file, which does not wait any more; None if there is none."""
        path = self._paths.pop(0) if self._paths else None
        # Somebody may have tidied up the store's directory.
        return path if path is not None and os.path.exists(path) else None

    def give_back(self, path: str | None) -> None:
        """Let a file wait again that was taken and is not used."""
        if path is not None:
            self._paths.insert(0, path)

    def populate(self, size: int) -> None:
        """Make the first `size` bytes of the next file ready for a writer, once; nothing that goes wrong raises."""
        path = self._paths[0] if self._paths else None
        if path is not None and path != self._populated:
            self._populated = path
            # It may be renamed into its place meanwhile.
            with contextlib.suppress(OSError):
                MappedFile.populate_allocated(path, size, self.size)

    def forget(self) -> None:
        """Leave the files to the parent of this forked process."""
        self._paths = []

    def delete(self) -> None:
        """Delete what was not used."""
        paths, self._paths = self._paths, []
        for path in paths:
            delete_staged(path)
