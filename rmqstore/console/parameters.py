"""What an address and its query say, as values; what cannot be meant is said.

Owns how numbers, times, choices and names are read from a request.  A wrong one is a `BadQueryError`, which becomes status 400.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Sequence

from starlette.requests import Request

from rmqstore.console.errors import BadQueryError, NotFoundError
from rmqstore.selection import INT64_MAX, Selection
from rmqstore.texts import parse_time

__all__ = [
    "INT64_MAX", "KEY_TYPES", "asked_messages", "choice", "name_of", "place_of", "queue_of", "some_number", "time_of",
    "whole_number",
]  # fmt: skip

KEY_TYPES = {"": None, "any": None, "unique": "U", "key": "K", "tag": "T"}


def whole_number(request: Request, name: str, default: int | None, low: int = 0, high: int = INT64_MAX) -> int | None:
    """int: a parameter of the address; `default` where it is missing or empty.

    Raises
    ------
    BadQueryError
        It is not a whole number, or out of range.
    """
    text = request.query_params.get(name, "").strip()
    if not text:
        return default
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 19 and low <= int(text) <= high):
        raise BadQueryError(f"{name} is {text[:40]!r}: give a whole number from {low} to {high}")
    return int(text)


def some_number(request: Request, name: str, default: int, low: int, high: int) -> int:
    """int: as `whole_number`, which has a default."""
    value = whole_number(request, name, default, low, high)
    assert value is not None
    return value


def time_of(request: Request, name: str) -> int | None:
    """int: a time of the address in ms since epoch, None where it is missing or empty."""
    text = request.query_params.get(name, "").strip()
    if not text:
        return None
    try:
        value = parse_time(text[:100])
    except ValueError as error:
        raise BadQueryError(f"{name}: {error}") from None
    if not -INT64_MAX <= value <= INT64_MAX:
        raise BadQueryError(f"{name} is out of range")
    return value


def choice(request: Request, name: str, choices: Sequence[str]) -> str:
    """str: one of `choices`, of which the first is the default."""
    value = request.query_params.get(name, "") or choices[0]
    if value not in choices:
        raise BadQueryError(f"{name} is {value[:40]!r}: give one of {', '.join(each for each in choices if each)}")
    return value


def asked_messages(request: Request, max_num: int) -> Selection:
    """Selection: at most `max_num` messages by topic, key and its type, and store time, as the address says."""
    query = request.query_params
    key, kind = query.get("key", ""), choice(request, "type", tuple(KEY_TYPES))
    return Selection(
        (query.get("topic", ""),),
        keys=(key,) if key else None,
        begin=time_of(request, "begin"),
        end=time_of(request, "end"),
        index_type=KEY_TYPES[kind],  # type: ignore[arg-type]
        max_num=max_num,
    )


def place_of(request: Request) -> int:
    """int: the phy offset in the address."""
    phy_offset = request.path_params["phy_offset"]
    if phy_offset > INT64_MAX:
        raise NotFoundError("no log is that long")
    return int(phy_offset)


def _raw_path(request: Request) -> str:
    """str: the path below the console's root, with stray bytes kept as file names have them."""
    raw = request.scope.get("raw_path")
    if raw is None:
        path: str = request.scope["path"]
    else:
        path = urllib.parse.unquote(raw.decode("latin-1").partition("?")[0], errors="surrogateescape")
    return path.removeprefix(request.scope.get("root_path", ""))


def queue_of(request: Request) -> tuple[str, int]:
    """(str, int): topic and queue id in the address."""
    match = re.fullmatch("(?:/api)?/queues/(.+)/(-?[0-9]{1,10})", _raw_path(request), re.DOTALL)
    if match is None:
        raise NotFoundError("a queue's address is its topic and its number")
    return match[1], int(match[2])


def name_of(request: Request, before: str) -> str:
    """str: the last part of the address, after `before`; it may hold slashes."""
    return _raw_path(request).partition(before)[2]
