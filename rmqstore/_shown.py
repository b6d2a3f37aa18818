"""What completion offers of an object: the names for its users, not those for the package's own parts.

Owns one decorator.  Nothing is taken away: who asks for another name gets it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["shows"]

_T = TypeVar("_T")


def shows(*names: str) -> Callable[[type[_T]], type[_T]]:
    """A decorator of a class: ``dir()`` of its instances, and so completion, has these names and the private ones."""
    shown = frozenset(names)

    def decorate(kind: type[_T]) -> type[_T]:
        def listed(self: _T) -> list[str]:
            return [name for name in object.__dir__(self) if name.startswith("_") or name in shown]

        kind.__dir__ = listed  # type: ignore[assignment]
        return kind

    return decorate
