"""Lists: their order and their pages, the same for pages and API.

Owns what ``sort=`` may say and how rows are put in order by it: a column's name, with a minus in front for the greatest first.
A value that is not known comes last in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

__all__ = ["choices", "in_order", "other_way", "sums"]

Row = Mapping[str, Any]


def choices(columns: Iterable[str]) -> tuple[str, ...]:
    """tuple of str: what ``sort=`` may say for these columns, the first one first."""
    return tuple(each for name in columns for each in (name, f"-{name}"))


def other_way(name: str, sort: str, *, greatest_first: bool) -> str:
    """str: the order that a click on the head of column `name` asks for, where `sort` is the order now."""
    if sort.removeprefix("-") == name:
        return name if sort.startswith("-") else f"-{name}"
    return f"-{name}" if greatest_first else name


def in_order(
    rows: Iterable[Row], sort: str, value: Callable[[Row, str], Any] = lambda row, name: row.get(name)
) -> list[Any]:
    """list: the rows by a column; rows that are equal there stay as they come.

    Parameters
    ----------
    rows : iterable of mapping
    sort : str
        A column's name; with a minus in front the greatest first.
    value : callable
        Of a row and a column's name.
    """
    name = sort.removeprefix("-")
    known: list[tuple[Any, Row]] = []
    unknown: list[Row] = []
    for row in rows:
        found = value(row, name)
        unknown.append(row) if found is None else known.append((found, row))
    known.sort(key=lambda each: each[0], reverse=sort.startswith("-"))
    return [row for _, row in known] + unknown


def sums(rows: Sequence[Row], *names: str) -> dict[str, Any]:
    """dict: the sums of columns, of values that are known; None where none is."""
    found: dict[str, Any] = {}
    for name in names:
        values = [row[name] for row in rows if row.get(name) is not None]
        found[name] = sum(values) if values else None
    return found
