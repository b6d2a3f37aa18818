"""What every part gets: where to write, how much to do, and the Java peer if there is one.

Owns the scratch folder's habits: what was written is forced to the disk between rounds, so that no one waits for the pages of
the one before.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import memory
from .jvm import Java
from .rounds import Outcome


@dataclass
class Setting:
    """Where and how much."""

    scratch: str
    quick: bool
    java: Java | None
    no_java: str = ""

    def size(self, full: int, quick: int) -> int:
        """How many of something."""
        return quick if self.quick else full

    def folder(self, name: str) -> str:
        """A new, empty folder of the scratch folder."""
        return tempfile.mkdtemp(prefix=f"{name}-", dir=self.scratch)

    def warm_up(self, full: int) -> int:
        """Rounds before the first that counts: none where nothing is to be measured."""
        return 0 if self.quick else full

    def settle(self) -> None:
        """Wait until what was written is on the disk, so that the next contender does not wait for it."""
        if not self.quick:
            os.sync()

    def of_java(self, name: str, contender: Callable[[Java], Outcome]) -> dict[str, Callable[[], Outcome]]:
        """A contender of the Java peer, if it is there."""
        java = self.java
        return {} if java is None else {name: lambda: contender(java)}

    def without_java(self, *names: str) -> dict[str, str]:
        """The reason why the Java peer does not take part, if it is not there."""
        return {} if self.java is not None else {name: self.no_java for name in names}


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that a call took, and its value; free memory is provided before."""
    memory.provide()
    begin = time.perf_counter_ns()
    value = work()
    return (time.perf_counter_ns() - begin) / 1e9, value


def remove(path: str) -> None:
    """Delete a folder."""
    shutil.rmtree(path, ignore_errors=True)


def copy_sparse(source: str, target: str) -> str:
    """Copy a folder and keep the holes of its files; the copy is in the page cache."""
    remove(target)
    subprocess.run(["cp", "-a", "--sparse=always", source, target], check=True)
    return target
