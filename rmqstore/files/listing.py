"""The entries of a directory, and why it cannot be listed.

Owns every listing of a directory: an error is part of the answer, so that each caller says in one word which errors it passes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from rmqstore.files.os_errors import is_missing, is_unreadable

__all__ = ["Listing", "is_empty", "listing"]


class Listing:
    """The entries of a directory, sorted by name.

    Attributes
    ----------
    entries : list of os.DirEntry
    error : OSError or None
        Why the directory could not be listed; there are no entries then.
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
        """list of str: the name of each entry, sorted."""
        return [entry.name for entry in self.entries]

    @property
    def paths(self) -> list[str]:
        """list of str: the path of each entry, sorted."""
        return [entry.path for entry in self.entries]

    @property
    def problem(self) -> OSError | None:
        """OSError or None: the error, unless it is that nothing is there."""
        return None if isinstance(self.error, FileNotFoundError) else self.error

    @property
    def unreadable(self) -> OSError | None:
        """OSError or None: the error, if a directory exists that cannot be read."""
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

    Parameters
    ----------
    keep : callable, optional
        Chooses entries, such as `os.DirEntry.is_dir`, which follows links.  An OSError that it raises is the listing's error.
    """
    try:
        with os.scandir(os.fspath(path)) as found:
            entries = list(found) if keep is None else [entry for entry in found if keep(entry)]
    except OSError as error:
        return Listing([], error)
    entries.sort(key=_name)
    return Listing(entries)


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def is_empty(path: str | os.PathLike[str]) -> bool:
    """Return True if a directory contains nothing.

    Raises
    ------
    OSError
        It cannot be listed.
    """
    return not os.listdir(path)
