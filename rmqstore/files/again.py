"""Asking again where a file went while it was read: retention, a rebuild, or an upload took it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rmqstore.errors import OffsetOutOfRangeError

__all__ = ["ask_again"]

T = TypeVar("T")


def ask_again(
    ask: Callable[[], T],
    refresh: Callable[[], object],
    gone: type[Exception] | tuple[type[Exception], ...] = OffsetOutOfRangeError,
    tries: int = 3,
) -> T:
    """Return what `ask` returns; after an error of the kinds `gone` call `refresh` and ask again, `tries` times at most."""
    for _ in range(tries):
        try:
            return ask()
        except gone:
            refresh()
    return ask()
