"""Ask again where a file went while it was read: retention, a rebuild, or an upload took it.

Owns the one loop that tries something again, creating a file included.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

from rmqstore.errors import OffsetOutOfRangeError

__all__ = ["ask_again"]

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
