"""Names that users meet: no private class in what they catch or read.

Owns the walk over every module of the package.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import rmqstore

# Modules that run something when they are imported.
PROGRAMS = {"rmqstore.__main__"}


def modules() -> Iterator[object]:
    """Every module of the package whose libraries are installed."""
    for found in pkgutil.walk_packages(rmqstore.__path__, "rmqstore."):
        if found.name not in PROGRAMS:
            try:
                yield importlib.import_module(found.name)
            except ModuleNotFoundError as error:
                # An extra that is not installed.
                assert error.name and not error.name.startswith("rmqstore"), found.name


def classes() -> set[type]:
    """Every class that the package defines, also within others and those that only a subclass list knows."""
    found: set[type] = set()
    for module in list(modules()):
        waiting = [value for value in vars(module).values() if isinstance(value, type)]
        while waiting:
            each = waiting.pop()
            if each.__module__.startswith("rmqstore") and each not in found:
                found.add(each)
                waiting += [value for value in vars(each).values() if isinstance(value, type)]
    return found


def private(kind: type) -> bool:
    return any(part.startswith("_") for part in kind.__qualname__.split("."))


def test_no_exception_has_a_private_name():
    found = {each for each in classes() if issubclass(each, BaseException)}
    assert {"StoreError", "GeometryError", "MissingDependencyError"} <= {each.__name__ for each in found}
    # A traceback and a log name the class.
    assert sorted(f"{each.__module__}.{each.__qualname__}" for each in found if private(each)) == []
