"""Where tests put stores that are forced to disk again and again: in memory where there is some, so that nobody waits."""

from __future__ import annotations

import os

SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
