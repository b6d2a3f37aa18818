"""Where tests put stores that need a special place: in memory, or where every user of the machine reaches them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# Stores that are forced to disk again and again lie in memory where there is some, so that nobody waits.
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def folder_for_everybody() -> str:
    """A folder that this process may write in and every user can reach: a private TMPDIR is closed to others."""
    for folder in (tempfile.gettempdir(), "/var/tmp", "/tmp", SCRATCH):
        if folder is not None and os.access(folder, os.W_OK):
            path = Path(folder).resolve()
            if all(each.stat().st_mode & 0o001 for each in (path, *path.parents)):
                return str(path)
    raise AssertionError("no folder for temporary files can be reached by every user; make /var/tmp or /tmp one")
