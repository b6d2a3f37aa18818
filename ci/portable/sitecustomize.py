"""Remove from Python what macOS's lacks: `make test-portable` puts this folder on the path of every interpreter.

RMQSTORE_PORTABLE in setup.py does the same for compiled code.  The standard library works without each of these names.
"""

import os

for name in (
    "copy_file_range", "eventfd", "fdatasync", "getrandom", "memfd_create", "pidfd_open", "posix_fadvise", "posix_fallocate",
    "sched_getaffinity", "sched_setaffinity", "splice",
    "O_DIRECT", "O_NOATIME", "O_PATH", "O_TMPFILE", "POSIX_FADV_WILLNEED", "RWF_NOWAIT", "SEEK_DATA", "SEEK_HOLE",
):  # fmt: skip
    if hasattr(os, name):
        delattr(os, name)
