"""Names that users meet: no private class in what they catch or read, and one name a thing.

Owns the walk over every module of the package.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import rmqstore
from rmqstore.selection import Selection

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


# One name a thing: what these are called is written on the right.  The design names `size` of what was put, `begin`
# and `end` of a query; a header of an index file has the fields `begin_timestamp` and `end_timestamp`, which are
# attributes.
PARAMETERS = {"begin_timestamp": "begin", "end_timestamp": "end", "broker_name": "broker", "cluster_name": "cluster"}
ATTRIBUTES = {"store_size": "size", "to_dict": "as_dict", "is_clean": "clean", "size_bytes": "size"}


def public_functions() -> Iterator[tuple[str, object]]:
    """Every function and method of the package that has a public name, in modules with public names."""
    for module in list(modules()):
        name = module.__name__
        if any(part.startswith("_") for part in name.split(".")):
            continue
        for key, value in vars(module).items():
            if not key.startswith("_") and getattr(value, "__module__", None) == name and inspect.isfunction(value):
                yield f"{name}.{key}", value
    for kind in classes():
        if not private(kind):
            for key, value in vars(kind).items():
                function = getattr(value, "__func__", value)
                if not key.startswith("_") and inspect.isfunction(function):
                    yield f"{kind.__module__}.{kind.__qualname__}.{key}", function


def test_a_parameter_has_one_name():
    found = {where: set(inspect.signature(function).parameters) for where, function in public_functions()}
    assert {"columns", "begin", "end"} <= found["rmqstore.store.querying.LogQuestions.scan"] and len(found) > 1000
    assert {where: names & set(PARAMETERS) for where, names in found.items() if names & set(PARAMETERS)} == {}
    assert not {field.name for field in dataclasses.fields(Selection)} & set(PARAMETERS)
    # The words of a choice are those of the call that it stands for.
    assert {"begin", "end"} <= {field.name for field in dataclasses.fields(Selection)}


def test_an_attribute_has_one_name():
    found = {f"{kind.__module__}.{kind.__qualname__}": set(vars(kind)) for kind in classes() if not private(kind)}
    assert "size" in found["rmqstore.message._read.MessageExt"] and "size" in found["rmqstore.store.results.PutResult"]
    assert {where: names & set(ATTRIBUTES) for where, names in found.items() if names & set(ATTRIBUTES)} == {}
