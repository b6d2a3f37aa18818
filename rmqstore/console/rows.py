"""Rows of lists and their order, results that are kept, paths below the store, and errors in place of an answer.

Owns the meaning of ``sort=``: a column's name, with a minus in front for descending.  A value that is not known comes last in
both directions.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from rmqstore.errors import StoreError

__all__ = ["BadQueryError", "Kept", "NotFoundError", "error_text", "file_name", "in_order", "other_way", "sort_choices", "sums"]

Row = Mapping[str, Any]
_Value = TypeVar("_Value")
# Results of different keys that are kept.
_NUM_KEPT = 32


class NotFoundError(LookupError):
    """There is nothing under that name or at that place; becomes status 404."""


class BadQueryError(ValueError):
    """A question with a wrong parameter, which the text names; becomes status 400."""


class Kept(Generic[_Value]):
    """Results by key, each kept for some seconds; one is made at a time, and requests that waited get it too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Hashable, tuple[float, _Value]] = {}

    def get(self, key: Hashable, make: Callable[[], _Value], seconds: float, times: float = 0) -> _Value:
        """The result of `make`, kept for `seconds`, or for `times` as long as it took to make if that is longer."""
        with self._lock:
            begun = time.monotonic()
            known = self._known.get(key)
            if known is None or begun >= known[0]:
                # Results that nobody may get any more take memory; so do those of many questions.
                self._known = {each: kept for each, kept in self._known.items() if begun < kept[0]}
                if len(self._known) >= _NUM_KEPT:
                    self._known.clear()
                value, now = make(), time.monotonic()
                known = self._known[key] = now + max(seconds, times * (now - begun)), value
            return known[1]


def error_text(error: Exception) -> str:
    """str: the error's text; of an error of the operating system its reason and path, as on the command line."""
    if isinstance(error, OSError) and not isinstance(error, StoreError) and error.filename is not None:
        return f"{error.strerror or type(error).__name__} [{os.fsdecode(error.filename)}]"
    return str(error)


def file_name(path: str, root: str) -> str:
    """str: `path` relative to the store's root."""
    return os.path.relpath(path, root)


def sort_choices(columns: Iterable[str]) -> tuple[str, ...]:
    """tuple of str: values of ``sort=`` for these columns, the default first."""
    return tuple(each for name in columns for each in (name, f"-{name}"))


def other_way(name: str, sort: str, *, greatest_first: bool) -> str:
    """str: the order for a click on the head of column `name`, where `sort` is the order now."""
    if sort.removeprefix("-") == name:
        return name if sort.startswith("-") else f"-{name}"
    return f"-{name}" if greatest_first else name


def in_order(
    rows: Iterable[Any], sort: str, value: Callable[[Any, str], Any] = lambda row, name: row.get(name)
) -> list[Any]:
    """list: the rows ordered by a column; equal rows keep their order.

    Parameters
    ----------
    rows : iterable
        Mappings, or what else `value` takes.
    sort : str
        A column's name; with a minus in front descending.
    value : callable
        The value of a row in a column.
    """
    name = sort.removeprefix("-")
    known: list[tuple[Any, Any]] = []
    unknown: list[Any] = []
    for row in rows:
        found = value(row, name)
        unknown.append(row) if found is None else known.append((found, row))
    known.sort(key=lambda each: each[0], reverse=sort.startswith("-"))
    return [row for _, row in known] + unknown


def sums(rows: Sequence[Row], *names: str) -> dict[str, Any]:
    """dict: the sums of columns over the rows that have a value there."""
    return {name: sum(row.get(name) or 0 for row in rows) for name in names}
