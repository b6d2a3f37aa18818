"""The library of tests/faults under this very process.

Owns building it and starting the process again with it preloaded, with one seed for Python's hashes.  Children that are forked
arm it for themselves; the parent never does.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile

import faults

#: What the simulator makes that stays: the library, and plans that failed.
FOLDER = os.path.join(os.path.dirname(os.path.dirname(faults.HERE)), "build", "simulator")
_LIBRARY = "RMQSTORE_SIMULATOR_LAYER"


def build() -> str:
    """Compile tests/faults/faults.c into build/simulator, once for each state of the source; the library's path."""
    source = os.path.join(faults.HERE, "faults.c")
    with open(source, "rb") as file:
        mark = hashlib.sha256(file.read()).hexdigest()[:16]
    os.makedirs(FOLDER, exist_ok=True)
    library = os.path.join(FOLDER, f"faults-{mark}.so")
    if not os.path.exists(library):
        made = os.path.join(FOLDER, f"faults-{os.getpid()}.so")
        compiler = os.environ.get("CC", "").split() or [found for found in map(shutil.which, ("cc", "gcc", "clang")) if found]
        if not sys.platform.startswith("linux") or not compiler:
            raise SystemExit("the simulator needs Linux (LD_PRELOAD) and a C compiler: install gcc or clang")
        command = [compiler[0], "-O1", "-Wall", "-shared", "-fPIC", "-pthread", "-o", made, source, "-ldl"]
        subprocess.run(command, check=True)
        os.replace(made, library)
    return library


def environment() -> dict[str, str]:
    """The environment in which a process has the layer and its hashes are always the same."""
    library = build()
    # A sanitizer that is preloaded wants to be the first.
    preload = " ".join(filter(None, (os.environ.get("LD_PRELOAD"), library)))
    return {**os.environ, "LD_PRELOAD": preload, _LIBRARY: library, "PYTHONHASHSEED": "0"}


def start_under_it(arguments: list[str]) -> None:
    """Replace this process by one that has the layer, unless it has it already."""
    if _LIBRARY not in os.environ:
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulator", *arguments], environment())


class Layer:
    """The calls of faults.c that a simulator makes."""

    def __init__(self) -> None:
        self._library = library = ctypes.CDLL(os.environ[_LIBRARY])
        library.faults_arm.argtypes = [
            ctypes.c_char_p, ctypes.c_uint32, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_char_p,
            ctypes.c_int,
        ]  # fmt: skip
        library.faults_set_clock.argtypes = [ctypes.c_ulong]
        for name in ("faults_count", "faults_hits", "faults_clock", "faults_sees_stores"):
            getattr(library, name).restype = ctypes.c_long
        self.sees_stores = bool(library.faults_sees_stores())

    def arm(
        self, root: str, names: tuple[str, ...], number: int, action: str, error: int, lasts: bool, log: str | None
    ) -> None:
        """As `faults_arm`; with `log` everything that is forced is written there."""
        bits = sum(1 << faults.NAMES.index(name) for name in names)
        path = None if log is None else os.fsencode(log)
        code = faults.ACTIONS[action]
        self._library.faults_arm(os.fsencode(root), bits, number, code, error, int(lasts), path, int(log is not None))

    def disarm(self) -> None:
        """See nothing from now on, in a process that was forked from one that is armed."""
        self.arm("/nothing/lies/here", (), 0, "nothing", 0, False, None)

    def heal(self) -> None:
        """No call fails from now on."""
        self._library.faults_heal()

    def photo(self) -> None:
        """Log what every mapping holds now."""
        self._library.faults_photo()

    @property
    def hits(self) -> int:
        """How many calls failed so far."""
        return self._library.faults_hits()

    def set_clock(self, now: int) -> None:
        """Go on where the clock of an earlier process stood."""
        self._library.faults_set_clock(now)


@contextlib.contextmanager
def scratch_folder():
    """A folder in memory, where there is some, that goes at the end."""
    from scratch import SCRATCH

    with tempfile.TemporaryDirectory(prefix="rmqstore-simulator-", dir=SCRATCH) as folder:
        yield os.path.realpath(folder)
