"""Values as callers give them: store times, and words of which there are few.

Owns how a time that was given becomes milliseconds, and the names of the choices.  It knows no store.
"""

from __future__ import annotations

import datetime
from typing import Literal, TypeAlias

__all__ = ["Boundary", "IndexType", "Moment", "Recovery", "milliseconds"]

Moment: TypeAlias = "int | float | datetime.datetime"
"""A store time: ms since epoch, or a datetime (aware, or naive as local time)."""

Recovery = Literal["strict", "truncate", "skip"]
"""What opening does where the log is damaged in front of whole records, see `MessageStore.open`."""

IndexType = Literal["U", "K", "T"]
"""What of a message is looked for: its unique key, its keys, or its tag."""

Boundary = Literal["lower", "upper"]
"""Which side of a store time a queue offset belongs to, see `MessageStore.offset_by_time`."""


KEY_BITS = {None: 3, "U": 1, "K": 2, "T": 4}
"""What a key is compared with for an `IndexType`: bits, as `_columns.ArrowColumns.fill_matching` takes them."""


def check_timeout(timeout: float | None) -> None:
    """ValueError for a NaN, with which nobody would ever stop waiting."""
    if timeout is not None and timeout != timeout:
        raise ValueError(f"timeout is {timeout!r}; give seconds, or None to wait without an end")


def plain_text(text: str) -> str:
    """str: the same as a plain one, which the core takes alone: not numpy.str_, nor a member of a StrEnum."""
    return str.__str__(text) if isinstance(text, str) else text


def check_index_type(index_type: str | None) -> None:
    """ValueError for what is no `IndexType`, nor None."""
    if index_type not in (None, "U", "K", "T"):
        raise ValueError(f"index_type is {index_type!r}; give None, 'U' (unique key), 'K' (key) or 'T' (tag)")


def check_boundary(boundary: str) -> None:
    """ValueError for what is no `Boundary`."""
    if boundary not in ("lower", "upper"):
        raise ValueError(f"boundary is {boundary!r}; give 'lower' or 'upper'")


_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_MILLISECOND = datetime.timedelta(milliseconds=1)
# Seconds since the epoch from 2001 to 2065; as milliseconds they would all be times in January and February 1970.
_SECONDS_FROM, _SECONDS_TO = 1_000_000_000, 3_000_000_000


def milliseconds(moment: Moment, name: str, *, up: bool = False) -> int | float:
    """ms since epoch of a store time that was given as such, or as a `datetime` (aware, or naive as local time).

    Parameters
    ----------
    moment : int, float or datetime
        A number stays what it is.
    name : str
        Of the parameter, for the error.
    up : bool
        A `datetime` between two milliseconds becomes the later one, not the earlier one.

    Raises
    ------
    ValueError
        It looks like seconds: a number from 1 000 000 000 on and below 3 000 000 000, which is 2001 to 2065 in seconds,
        and January and February 1970 in milliseconds.  Or it is a `datetime` that the local zone does not know.
    TypeError
        It is neither a number nor a `datetime`.
    """
    if isinstance(moment, datetime.datetime):
        try:
            since = moment.astimezone(datetime.timezone.utc) - _EPOCH
        except (OverflowError, ValueError, OSError):
            raise ValueError(f"{name} is {moment!r}, which no local zone knows: give it a tzinfo") from None
        return -(-since // _MILLISECOND) if up else since // _MILLISECOND
    try:
        is_seconds = _SECONDS_FROM <= moment < _SECONDS_TO
    except TypeError:
        raise TypeError(f"{name} is {moment!r}: give ms since epoch, or a datetime") from None
    if is_seconds:
        raise ValueError(f"{name} is {moment!r}, which looks like seconds: give ms since epoch, or a datetime")
    return moment
