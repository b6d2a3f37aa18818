"""Rows of lists and their order, paths below the store, and the errors that take an answer's place.

Owns the meaning of ``sort=``: a column's name, with a minus in front for descending.  A value that is not known comes last in
both directions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rmqstore.errors import StoreError

__all__ = ["BadQueryError", "NotFoundError", "error_text", "file_name", "in_order", "other_way", "sort_choices", "sums"]

Row = Mapping[str, Any]


class NotFoundError(LookupError):
    """There is nothing under that name or at that place; becomes status 404."""


class BadQueryError(ValueError):
    """A question with a wrong parameter, which the text names; becomes status 400."""


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
