"""Folders for stores that need a special place: in memory, or readable by every user of the machine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# Stores that are synced often are kept in memory if there is a file system for it: no waiting for the disk.
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def folder_for_everybody() -> str:
    """A folder that this process may write in and every user can reach: a private TMPDIR is closed to others."""
    for folder in (tempfile.gettempdir(), "/var/tmp", "/tmp", SCRATCH):
        if folder is not None and os.access(folder, os.W_OK):
            path = Path(folder).resolve()
            if all(each.stat().st_mode & 0o001 for each in (path, *path.parents)):
                return str(path)
    raise AssertionError("no folder for temporary files can be reached by every user; make /var/tmp or /tmp one")
