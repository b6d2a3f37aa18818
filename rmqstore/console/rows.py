"""Rows of lists and their order, cached results, and the errors that become status 400 and 404.

``sort=`` is a column's name, with a minus for descending order.  Unknown values come last in both orders.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from rmqstore.errors import StoreError

__all__ = [
    "Asked", "BadQueryError", "Kept", "NotFoundError", "check_choice", "error_text", "file_name", "in_order", "other_way",
    "sort_choices", "sums",
]  # fmt: skip

Asked = dict[str, Any]
"""The parameters of a request, by name."""

_Value = TypeVar("_Value")
# Results kept at once.
_NUM_KEPT = 32


class NotFoundError(LookupError):
    """There is no such thing in the store; becomes status 404."""


class BadQueryError(ValueError):
    """A parameter has a wrong value; becomes status 400."""


class Kept(Generic[_Value]):
    """A cache by key.  One result is computed at a time, and requests that waited for it share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Hashable, tuple[float, _Value]] = {}

    def get(self, key: Hashable, make: Callable[[], _Value], seconds: float, times: float = 0) -> _Value:
        """Return the result of `make`, cached for `seconds`, or for `times` as long as it took to make if that is longer."""
        with self._lock:
            begun = time.monotonic()
            known = self._known.get(key)
            if known is None or begun >= known[0]:
                self._known = {each: kept for each, kept in self._known.items() if begun < kept[0]}
                if len(self._known) >= _NUM_KEPT:
                    self._known.clear()
                value, now = make(), time.monotonic()
                known = self._known[key] = now + max(seconds, times * (now - begun)), value
            return known[1]


def error_text(error: Exception) -> str:
    """Return the text of an error; for one of the operating system its reason and path, as on the command line."""
    if isinstance(error, OSError) and not isinstance(error, StoreError) and error.filename is not None:
        return f"{error.strerror or type(error).__name__} [{os.fsdecode(error.filename)}]"
    return str(error)


def file_name(path: str, root: str) -> str:
    """Return `path` relative to the store's root."""
    return os.path.relpath(path, root)


def check_choice(name: str, given: str, choices: tuple[str, ...]) -> str:
    """Return `given`, or the first of `choices` if it is empty; raise `BadQueryError` for any other text."""
    value = given or choices[0]
    if value not in choices:
        raise BadQueryError(f"{name} is {value[:40]!r}; give one of {', '.join(each for each in choices if each)}")
    return value


def sort_choices(columns: Iterable[str]) -> tuple[str, ...]:
    """Return the values of ``sort=`` for these columns, the default first."""
    return tuple(each for name in columns for each in (name, f"-{name}"))


def other_way(name: str, sort: str, *, greatest_first: bool) -> str:
    """Return the ``sort=`` of a link in the head of column `name`; `sort` is the current order."""
    if sort.removeprefix("-") == name:
        return name if sort.startswith("-") else f"-{name}"
    return f"-{name}" if greatest_first else name


def in_order(
    rows: Iterable[Any], sort: str, value: Callable[[Any, str], Any] = lambda row, name: row.get(name)
) -> list[Any]:
    """Return the rows ordered by a column; equal rows keep their order.  ``value(row, name)`` is what is compared."""
    name = sort.removeprefix("-")
    known: list[tuple[Any, Any]] = []
    unknown: list[Any] = []
    for row in rows:
        found = value(row, name)
        unknown.append(row) if found is None else known.append((found, row))
    known.sort(key=lambda each: each[0], reverse=sort.startswith("-"))
    return [row for _, row in known] + unknown


def sums(rows: Sequence[Mapping[str, Any]], *names: str) -> dict[str, Any]:
    """Return the sums of columns over the rows that have a value there."""
    return {name: sum(row.get(name) or 0 for row in rows) for name in names}
