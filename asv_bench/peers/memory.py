"""The memory that a timed side finds free: touched just before, or cold.

A virtual machine gives memory that lay free for some seconds back to its host (free page reporting), and whoever touches it
next pays for getting it again: up to ten times as much as for a page that the machine still has.  Without this, which of two
peers gets warm pages is chance.  Owns that choice for the whole run; every timed side asks `provide` right before its clock
starts.
"""

from __future__ import annotations

import mmap
import time

STATES = ("touched", "cold", "as it is")
# As much as any timed side touches, and half as much again; how long memory lies free until the host has it.
_SIZE = 3 << 29
_WAIT = 4.0

state = "as it is"
"""What timed sides get: "touched", "cold", or memory as it happens to be."""


def provide() -> None:
    """Put free memory into the chosen state: touch it and let it go, or leave it alone until the host has taken it."""
    if state == "cold":
        time.sleep(_WAIT)
    elif state == "touched":
        populate = getattr(mmap, "MAP_POPULATE", 0)
        with mmap.mmap(-1, _SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | populate) as memory:
            if not populate:
                for at in range(0, _SIZE, mmap.PAGESIZE):
                    memory[at] = 1
