"""Directory listings with their errors, unread entries, and retries when another process deletes a file.

Owns every listing of a directory: the error is part of the result, and each caller chooses which errors it accepts.  Owns the one
retry loop for files that retention, a rebuild or an upload deletes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from rmqstore.errors import OffsetOutOfRangeError
from rmqstore.files.os_errors import is_missing, is_unreadable

__all__ = ["Listing", "UnreadPart", "ask_again", "is_empty", "listing", "names_in", "unread_parts"]


class Listing:
    """The entries of a directory, sorted by name.

    - `error`: why the directory could not be listed; there are no entries then.
    """

    __slots__ = ("entries", "error")

    def __init__(self, entries: list[os.DirEntry[str]], error: OSError | None = None):
        self.entries, self.error = entries, error

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def names(self) -> list[str]:
        """The name of each entry, sorted."""
        return [entry.name for entry in self.entries]

    @property
    def paths(self) -> list[str]:
        """The path of each entry, sorted."""
        return [entry.path for entry in self.entries]

    @property
    def problem(self) -> OSError | None:
        """The error, None for a missing directory."""
        return None if isinstance(self.error, FileNotFoundError) else self.error

    @property
    def unreadable(self) -> OSError | None:
        """The error of an unreadable directory, else None."""
        return self.error if self.error is not None and is_unreadable(self.error) else None

    def checked(self, *passed: Callable[[OSError], bool]) -> Listing:
        """Return this listing; raise its error unless one of `passed` is True of it."""
        if self.error is not None and not any(passes(self.error) for passes in passed):
            raise self.error
        return self

    def existing(self, unreadable: bool = False) -> Listing:
        """Return this listing; raise its error unless no directory is there, or with `unreadable` one that cannot be read."""
        return self.checked(is_missing, is_unreadable) if unreadable else self.checked(is_missing)


def listing(path: str | os.PathLike[str], keep: Callable[[os.DirEntry[str]], bool] | None = None) -> Listing:
    """Return what a directory contains.

    - `keep`: chooses entries, such as `os.DirEntry.is_dir`, which follows links.  An OSError that it raises is the listing's
      error.
    """
    try:
        with os.scandir(os.fspath(path)) as found:
            entries = list(found) if keep is None else [entry for entry in found if keep(entry)]
    except OSError as error:
        return Listing([], error)
    entries.sort(key=lambda entry: entry.name)
    return Listing(entries)


def names_in(path: str) -> list[str]:
    """Return the names in a directory, sorted; for callers that list many directories and need no entries."""
    return sorted(os.listdir(path))


def is_empty(path: str | os.PathLike[str]) -> bool:
    """Return True if a directory contains nothing."""
    return not os.listdir(path)


T = TypeVar("T")


def ask_again(
    ask: Callable[[], T],
    refresh: Callable[[], object] = lambda: None,
    gone: type[Exception] | tuple[type[Exception], ...] = OffsetOutOfRangeError,
    tries: int = 3,
    on_failure: Callable[[int, Exception], object] = lambda number, error: None,
) -> T:
    """Return what `ask` returns; after an error of the kinds `gone` call `refresh` and ask again, `tries` times at most.

    `on_failure` takes the number of the call, from 1, and its error, of the last call as well.
    """
    for number in itertools.count(1):
        try:
            return ask()
        except gone as error:
            on_failure(number, error)
            if number > tries:
                raise
        refresh()
    raise AssertionError("unreachable")


class UnreadPart(NamedTuple):
    """An entry of a directory that is not read: its path, the number of files below it, and the sum of their lengths in bytes."""

    path: str
    files: int
    size: int

    @classmethod
    def of(cls, path: str) -> UnreadPart:
        """Return the part at `path`, a file or a folder."""
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
    """Return the entries of `directory` for whose names `is_read` returns False, sorted, without empty ones.

    An unlisted folder counts with no files.  The reader of `directory` reports its own errors.
    """
    found = []
    for entry in listing(directory):
        if not is_read(entry.name):
            part = UnreadPart.of(entry.path)
            if part.size or not os.access(entry.path, os.R_OK):
                found.append(part)
    return found
