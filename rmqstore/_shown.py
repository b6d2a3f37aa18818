"""Limit tab completion to public names.  All other attributes still work."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["shows"]

_T = TypeVar("_T")


def shows(*names: str) -> Callable[[type[_T]], type[_T]]:
    """Decorate a class so that ``dir()`` of its instances, and so completion, has these names and the private ones."""
    shown = frozenset(names)

    def decorate(kind: type[_T]) -> type[_T]:
        def listed(self: _T) -> list[str]:
            return [name for name in object.__dir__(self) if name.startswith("_") or name in shown]

        kind.__dir__ = listed  # type: ignore[assignment]
        return kind

    return decorate
