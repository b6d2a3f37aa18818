"""What is in a directory and is read by nobody: its names, its files and their sizes.

Owns the listing alone.  Which names a directory may have, its reader says.  Nothing is opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from rmqstore.files.listing import listing

__all__ = ["UnreadPart", "unread_parts"]


class UnreadPart(NamedTuple):
    """An entry of a directory that is not read: its path, the number of files below it, and the sum of their lengths in bytes."""

    path: str
    files: int
    size: int

    @classmethod
    def of(cls, path: str) -> UnreadPart:
        """UnreadPart: all that is at `path`, a file or a folder."""
        files = size = 0
        paths = [] if os.path.isdir(path) else [path]
        for folder, _, names in os.walk(path):
            paths += [os.path.join(folder, name) for name in names]
        for each in paths:
            try:
                size += os.stat(each).st_size
            except OSError:
                continue
            files += 1
        return cls(path, files, size)

    def __str__(self) -> str:
        return f"{self.path}: {self.size} bytes in {self.files} {'file' if self.files == 1 else 'files'}"


def unread_parts(directory: str | os.PathLike[str], is_read: Callable[[str], bool]) -> list[UnreadPart]:
    """list of UnreadPart: the entries of `directory` for whose names `is_read` is False, sorted; those without a byte are left out.

    A folder that cannot be listed is there with no files: nobody knows what it holds.

    Parameters
    ----------
    is_read : callable
        Whether somebody reads the entry with this name, or knows that it holds no message.
    """
    found = []
    # The reader of the directory reports that it cannot be listed.
    for entry in listing(directory):
        if not is_read(entry.name):
            part = UnreadPart.of(entry.path)
            if part.size or not os.access(entry.path, os.R_OK):
                found.append(part)
    return found
