"""What a Polars filter says of single columns.

Owns the reading of an expression through `Expr.meta`, the documented way: an expression is taken apart, and what it
does is known when the same thing, made again, is equal to it.  Polars' serialized expressions are never read, as they
change between releases.  What it finds is necessary and maybe not enough: every row that the filter keeps is within
the limits, and rows that it does not keep may be too.  What is not understood gives no limit.
"""

from __future__ import annotations

import datetime
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl

__all__ = ["ANY_OF", "Limit", "limits_of"]

ANY_OF = "keys"
"""The column of lists: its limit names texts of which a row's list has at least one."""
_TEXTS = frozenset({"topic", "tags", "unique_key", "msg_id", ANY_OF})
_NUMBERS = frozenset({"queue_id", "queue_offset", "phy_offset"})
_TIMES = frozenset({"store_timestamp"})
_COLUMNS = _TEXTS | _NUMBERS | _TIMES
# An expression that is nested deeper is not looked into: each level costs as much as all below it.
_DEPTH = 64
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_MILLISECOND = datetime.timedelta(milliseconds=1)
_SWAPPED: dict[Callable[..., Any], Callable[..., Any]] = {
    operator.eq: operator.eq,
    operator.lt: operator.gt,
    operator.le: operator.ge,
    operator.gt: operator.lt,
    operator.ge: operator.le,
}
_UP, _DOWN = (operator.gt, operator.ge), (operator.lt, operator.le)


@dataclass(frozen=True, slots=True)
class Limit:
    """What a column may hold: one of `values`, or if that is None, from `low` to `high`, both included; times in ms since epoch."""

    values: frozenset[Any] | None = None
    low: int | None = None
    high: int | None = None

    @property
    def is_empty(self) -> bool:
        """bool: no value is within it."""
        if self.values is not None:
            return not self.values
        return self.low is not None and self.high is not None and self.low > self.high

    def and_(self, other: Limit) -> Limit:
        """Limit: what is within both."""
        if self.values is not None and other.values is not None:
            return Limit(self.values & other.values)
        if self.values is not None:
            low, high = other.low, other.high
            return Limit(
                frozenset(
                    each for each in self.values if (low is None or each >= low) and (high is None or each <= high)
                )
            )
        if other.values is not None:
            return other.and_(self)
        lows = [each for each in (self.low, other.low) if each is not None]
        highs = [each for each in (self.high, other.high) if each is not None]
        return Limit(None, max(lows, default=None), min(highs, default=None))

    def or_(self, other: Limit) -> Limit:
        """Limit: what is within one of both, and what lies between where one is a range."""
        if self.is_empty:
            return other
        if other.is_empty:
            return self
        if self.values is not None and other.values is not None:
            return Limit(self.values | other.values)
        one, two = self._range(), other._range()
        return Limit(
            None,
            None if one.low is None or two.low is None else min(one.low, two.low),
            None if one.high is None or two.high is None else max(one.high, two.high),
        )

    def _range(self) -> Limit:
        return self if self.values is None else Limit(None, min(self.values), max(self.values))


def limits_of(predicate: pl.Expr) -> dict[str, Limit]:
    """dict of str to Limit: by column what all rows hold that `predicate` keeps; none for a column without a limit."""
    return _limits(predicate, 0)


def _limits(predicate: pl.Expr, depth: int) -> dict[str, Limit]:
    if depth > _DEPTH:
        return {}
    parts = predicate.meta.pop()
    if len(parts) == 2:
        for left, right in (parts, parts[::-1]):
            if predicate.meta.eq(left & right):
                return _of_both(_limits(left, depth + 1), _limits(right, depth + 1))
            if predicate.meta.eq(left | right):
                return _of_one(_limits(left, depth + 1), _limits(right, depth + 1))
        return _of_pair(predicate, parts)
    if len(parts) == 3:
        return _between(predicate, parts)
    return {}


def _of_both(one: dict[str, Limit], two: dict[str, Limit]) -> dict[str, Limit]:
    found = {**one, **two}
    for name in one.keys() & two.keys():
        if name == ANY_OF:
            # A list may hold a text of each: both limits are true, and the narrower one is worth more.
            found[name] = min(one[name], two[name], key=lambda limit: len(limit.values or ()))
        else:
            found[name] = one[name].and_(two[name])
    return found


def _of_one(one: dict[str, Limit], two: dict[str, Limit]) -> dict[str, Limit]:
    if any(limit.is_empty for limit in one.values()):
        return two
    if any(limit.is_empty for limit in two.values()):
        return one
    return {name: one[name].or_(two[name]) for name in one.keys() & two.keys()}


def _of_pair(predicate: pl.Expr, parts: list[pl.Expr]) -> dict[str, Limit]:
    # A column and a literal, in either order.
    for subject, literal in (parts, parts[::-1]):
        name = _column(subject)
        if name is None or not literal.meta.is_literal():
            continue
        if name == ANY_OF:
            if any(predicate.meta.eq(each) for each in _containing(subject, literal)):
                values = _values(name, literal)
                return {} if values is None or len(values) != 1 else {name: Limit(values)}
            return {}
        for compare, swapped in _SWAPPED.items():
            if predicate.meta.eq(compare(subject, literal)):
                return _compared(name, compare, literal)
            if predicate.meta.eq(compare(literal, subject)):
                return _compared(name, swapped, literal)
        if any(predicate.meta.eq(each) for each in _among(subject, literal)):
            values = _values(name, literal)
            return {} if values is None else {name: Limit(values)}
    return {}


def _between(predicate: pl.Expr, parts: list[pl.Expr]) -> dict[str, Limit]:
    for subject, low, high in (parts, parts[::-1]):
        name = _column(subject)
        if name is None or name not in _NUMBERS | _TIMES or not (low.meta.is_literal() and high.meta.is_literal()):
            continue
        for closed in ("both", "left", "right", "none"):
            if predicate.meta.eq(subject.is_between(low, high, closed=closed)):
                # A bound that does not belong to it is taken in: a limit may be too wide.
                return _of_both(_compared(name, operator.ge, low), _compared(name, operator.le, high))
    return {}


def _column(expression: pl.Expr) -> str | None:
    # The name of a column, also of one that is only made wider.
    import polars as pl

    if not expression.meta.is_column():
        inner = expression.meta.pop()
        if len(inner) != 1 or not inner[0].meta.is_column():
            return None
        if not any(expression.meta.eq(inner[0].cast(pl.Int64, strict=strict)) for strict in (True, False)):
            return None
        name = inner[0].meta.output_name()
        return name if name in _NUMBERS else None
    name = expression.meta.output_name()
    return name if name in _COLUMNS else None


def _among(subject: pl.Expr, literal: pl.Expr) -> Iterator[pl.Expr]:
    yield subject.is_in(literal)
    yield subject.is_in(literal, nulls_equal=True)


def _containing(subject: pl.Expr, literal: pl.Expr) -> Iterator[pl.Expr]:
    for nulls_equal in (True, False):
        yield subject.list.contains(literal, nulls_equal=nulls_equal)
        yield literal.is_in(subject, nulls_equal=nulls_equal)


def _literals(literal: pl.Expr) -> list[Any]:
    # What a literal holds: one value, or those of a list or series; None stands for what Python has no value for.
    import polars as pl

    values = pl.select(literal).to_series()
    try:
        return values.explode().to_list() if isinstance(values.dtype, (pl.List, pl.Array)) else values.to_list()
    except (ValueError, OverflowError):
        # A time after the year 9999.
        return [None]


def _values(name: str, literal: pl.Expr) -> frozenset[Any] | None:
    # The values of a literal as the column has them; None where one of them is of another kind, or null.
    found = set()
    for value in _literals(literal):
        exact = _exact(name, value)
        if exact is None or exact[0] != exact[1]:
            return None
        found.add(exact[0])
    return frozenset(found)


def _compared(name: str, compare: Callable[..., Any], literal: pl.Expr) -> dict[str, Limit]:
    values = _literals(literal)
    exact = _exact(name, values[0]) if len(values) == 1 else None
    if exact is None or (name in _TEXTS and compare is not operator.eq):
        return {}
    below, above = exact
    if below != above:
        # A part of a millisecond: whether Polars cuts it off is its own affair.
        return {name: Limit(None, None if compare in _DOWN else below, None if compare in _UP else above)}
    if compare is operator.eq:
        return {name: Limit(frozenset({below}))}
    if compare in _UP:
        return {name: Limit(None, below + (compare is operator.gt), None)}
    return {name: Limit(None, None, below - (compare is operator.lt))}


def _exact(name: str, value: Any) -> tuple[Any, Any] | None:
    # The nearest values that the column may have, not above and not below `value`; None for what is of another kind.
    if name in _TEXTS:
        return (value, value) if isinstance(value, str) else None
    if name in _NUMBERS:
        return (value, value) if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        since = value - _EPOCH
        return since // _MILLISECOND, -(-since // _MILLISECOND)
    return None
