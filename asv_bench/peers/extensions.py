"""What a call costs in Python at least: an extension in C that does nothing, and ones that do what must be done and no more.

Owns their compiling and loading (`asv_bench/constant.c`, `c/messages.c`, `c/one_key.c`).  They have the store's calls by
their names, so that the same loop runs over both.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

from rmqstore import StoreConfig

from ..instructions import CONSTANT_SOURCE, build_extension
from . import data
from .loops import SOURCES

CONSTANT = "an extension in C that does nothing, one call"
OBJECTS = "an extension in C that makes the objects alone"
ONE_KEY = "an extension in C that checks nothing, one call"


def constant_of(folder: str, answer: object) -> Any:
    """An object whose calls give `answer` and do nothing, compiled below `folder`."""
    return _extension(folder, CONSTANT_SOURCE).Constant(answer)


def messages_of(folder: str, path: str) -> tuple[Any, str]:
    """The calls that make messages of the store at `path`, and their name in tables; None where they cannot be compiled.

    The store has one segment, one index file and of `data.TOPIC` a file for each queue.
    """
    (index,) = Path(path, "index").iterdir()
    queues = sorted(Path(path, "consumequeue", data.TOPIC).iterdir(), key=lambda queue: int(queue.name))
    names = [str(queue / f"{0:020d}") for queue in queues]
    segment = os.path.join(path, "commitlog", f"{0:020d}")
    try:
        extension = _extension(folder, SOURCES / "messages.c")
        crc = extension.take(segment, str(index), StoreConfig().max_hash_slot_num, data.TOPIC, *names)
    except (OSError, subprocess.CalledProcessError):
        return None, OBJECTS
    return extension, f"{OBJECTS}, CRC by {crc}"


def one_key(folder: str) -> Any:
    """The calls with one key on an index file; its `open` says which."""
    return _extension(folder, SOURCES / "one_key.c")


def _extension(folder: str, source: Path) -> ModuleType:
    path = os.path.join(folder, f"{source.stem}.so")
    if not os.path.exists(path):
        build_extension(source, Path(folder))
    spec = importlib.util.spec_from_file_location(source.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
