"""Argument checks: store times, numbers, texts and enumerated strings.  It knows no store."""

from __future__ import annotations

import datetime
import operator
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

__all__ = ["Boundary", "IndexType", "Moment", "Recovery", "milliseconds"]

Moment: TypeAlias = "int | float | datetime.datetime"
"""A store time: ms since epoch, or a datetime (aware, or naive as local time)."""

DEFAULT_LOG_BYTES = 1 << 30
"""The greatest part of the log that is scanned for a question, unless it states another."""

Recovery = Literal["strict", "truncate", "skip"]
"""The treatment of a log that is damaged before whole records, see `MessageStore.open`."""

IndexType = Literal["U", "K", "T"]
"""The kind of a key: unique key, key, or tag of a message."""

Boundary = Literal["lower", "upper"]
"""The side of a store time, see `MessageStore.offset_by_time`."""


KEY_BITS = {None: 3, "U": 1, "K": 2, "T": 4}
"""The bits of each `IndexType` for `_columns.ArrowColumns.fill_matching`."""


def check_timeout(timeout: float | None) -> None:
    """Raise ValueError for a NaN, TypeError for a value that is not a number."""
    if timeout is not None:
        _check_number(timeout, f"timeout is {shown(timeout)}; give seconds, or None to wait without an end")


def _check_number(value: Any, text: str) -> None:
    try:
        is_number = value < 1 or value >= 1
    except (TypeError, ValueError):
        raise TypeError(text) from None
    except ArithmeticError:
        # A NaN of the module decimal is compared with nothing.
        is_number = False
    if not is_number:
        raise ValueError(text)


def plain_text(text: str) -> str:
    """Return a numpy.str_, or a member of a StrEnum, as a plain str: the core takes no other."""
    return str.__str__(text) if isinstance(text, str) else text


def one_text(value: str, name: str) -> str:
    """Return a text as a plain str; TypeError, with the parameter's name, for another type."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {shown(value)}; give a text")
    return plain_text(value)


def texts(value: str | Iterable[str] | None, name: str) -> list[str] | None:
    """Return one text, or several, as a list; None stays None.  TypeError, with the parameter's name, for other values."""
    if value is None:
        return None
    if isinstance(value, str):
        return [plain_text(value)]
    given: list[Any] = list(value) if _is_several(value) else [value]
    for each in given:
        if not isinstance(each, str):
            raise TypeError(f"{name} is {shown(value)}; give a text, or several")
    return [plain_text(each) for each in given]


def whole_number(value: int, name: str, low: int | None = None, high: int | None = None) -> int:
    """Return a whole number, also NumPy's or a whole float, as an int.

    TypeError for other values, ValueError below `low` or above `high`; `name` is the parameter's.
    """
    try:
        number = operator.index(int(value) if value % 1 == 0 else value)
    except (TypeError, ValueError, ArithmeticError):
        raise TypeError(f"{name} is {shown(value)}; give an int") from None
    if (low is not None and number < low) or (high is not None and number > high):
        raise ValueError(f"{name} is {number}; give an int from {_bound(low)} to {_bound(high)}")
    return number


def one_queue(topic: str, queue_id: int) -> tuple[str, int]:
    """Return a topic and a queue id, see `one_text` and `whole_number`."""
    if type(topic) is not str:
        topic = one_text(topic, "topic")
    if type(queue_id) is not int:
        queue_id = whole_number(queue_id, "queue_id")
    return topic, queue_id


def given_tags(tags: str | Iterable[str] | None) -> str | list[str] | None:
    """Return tags as given, see `texts`; several in one text stay one."""
    return tags if isinstance(tags, str) else texts(tags, "tags")


def whole_numbers(value: int | Iterable[int] | None, name: str, low: int, high: int) -> list[int] | None:
    """Return one whole number, or several, as a list, see `whole_number`; None stays None."""
    if value is None:
        return None
    given: Any = value if _is_several(value) else (value,)
    return [whole_number(each, name, low, high) for each in given]


def _is_several(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray))


def shown(value: object) -> str:
    """Return at most 80 characters of a value, for an error."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _bound(number: int | None) -> str:
    # 2**31 - 1 is easier to read than its digits.
    for bits in (30, 31, 63):
        for power, text in ((2**bits, f"2**{bits}"), (2**bits - 1, f"2**{bits} - 1"), (-(2**bits), f"-2**{bits}")):
            if number == power:
                return text
    return str(number)


def check_index_type(index_type: str | None) -> None:
    """Raise ValueError unless it is an `IndexType` or None."""
    if index_type not in (None, "U", "K", "T"):
        raise ValueError(f"index_type is {index_type!r}; give None, 'U' (unique key), 'K' (key) or 'T' (tag)")


def check_boundary(boundary: str) -> None:
    """Raise ValueError unless it is a `Boundary`."""
    if boundary not in ("lower", "upper"):
        raise ValueError(f"boundary is {boundary!r}; give 'lower' or 'upper'")


_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_MILLISECOND = datetime.timedelta(milliseconds=1)
# Seconds since the epoch from 2001 to 2065; as milliseconds they would all be times in January and February 1970.
_SECONDS_FROM, _SECONDS_TO = 1_000_000_000, 3_000_000_000
_NO_ENDS = (float("-inf"), float("inf"))


def milliseconds(moment: Moment, name: str, *, up: bool = False) -> int | float:
    """Return ms since epoch of a store time that was given as such, or as a `datetime` (aware, or naive as local time).

    - `name`: the parameter, for the error.
    - `up`: a `datetime` between two milliseconds becomes the later one, not the earlier one.

    ValueError for a number that looks like seconds (2001 to 2065), a NaN, and a `datetime` that the local zone does not know;
    TypeError for a value of another type.
    """
    check_moment(moment, name)
    return exact_milliseconds(moment, name, up=up)


def exact_milliseconds(moment: Moment, name: str, *, up: bool = False) -> int | float:
    """Return ms since epoch, like `milliseconds`, of a computed time, which may be any number."""
    if isinstance(moment, datetime.datetime):
        try:
            since = moment.astimezone(datetime.timezone.utc) - _EPOCH
        except (OverflowError, ValueError, OSError):
            raise ValueError(f"{name} is {moment!r}, which no local zone knows: give it a tzinfo") from None
        return -(-since // _MILLISECOND) if up else since // _MILLISECOND
    return float(moment) if moment in _NO_ENDS else moment


def check_moment(moment: Moment, name: str) -> None:
    """Raise the TypeError or ValueError of `milliseconds` for a value that is not a `Moment`."""
    if isinstance(moment, datetime.datetime):
        return
    _check_number(moment, f"{name} is {shown(moment)}; give ms since epoch, or a datetime")
    if _SECONDS_FROM <= moment < _SECONDS_TO:
        raise ValueError(f"{name} is {moment!r}, which looks like seconds: give ms since epoch, or a datetime")
