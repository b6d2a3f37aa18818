"""Count the mappings of this process."""

from __future__ import annotations

import os
from pathlib import Path

MAPS = Path("/proc/self/maps")


def mappings(root: str | os.PathLike[str]) -> list[str]:
    """Return the lines of the mappings of `root` or of files below it.

    Another test of this process may have mapped a file whose name is in no encoding, so names are read as a file system gives them.
    """
    text = MAPS.read_text(encoding="utf-8", errors="surrogateescape")
    return [line for line in text.splitlines() if os.fspath(root) in line]
