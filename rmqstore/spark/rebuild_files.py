"""How tasks of a rebuild write: a file of their own under its last name, or a range of a file that others share.

Owns both ways, and knows nothing of what is written.  A task that runs twice, or is killed, leaves whole files, or the
same bytes again.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PAGE = 4096


def write_named(path: str, data: Buffer) -> None:
    """Write a whole file that appears under its name when it is whole."""
    # Under a name of its own first, so that a second attempt, or a kill, leaves the whole file or none.
    temporary = f"{path}.{uuid.uuid4().hex}"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _runs(pos: int, data: memoryview) -> Iterator[tuple[int, memoryview]]:
    # Without the pages that are all zeros, which a file has as holes: where each run begins, and its bytes.
    starts = np.concatenate([[0], np.arange(_PAGE - pos % _PAGE, len(data), _PAGE)])
    written = np.flatnonzero(np.maximum.reduceat(np.frombuffer(data, np.uint8), starts))
    ends = np.append(starts[1:], len(data))
    for run in np.split(written, np.flatnonzero(np.diff(written) != 1) + 1):
        if len(run):
            begin, end = int(starts[run[0]]), int(ends[run[-1]])
            yield pos + begin, data[begin:end]


def write_at(path: str, size: int, pos: int, data: Buffer) -> None:
    """Write `data` at `pos` into a file of `size` bytes, which is made if it is missing; what is zero stays a hole."""
    # Through the file, not through a mapping: pages of a shared file are not this task's alone, and a full disk is an error.
    # Nobody else writes to the same bytes, unless the same ones, so that what is zero stays a hole.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        for at, view in _runs(pos, memoryview(data).cast("B")) if len(memoryview(data)) else ():
            while len(view):
                written = os.pwrite(fd, view, at)
                view, at = view[written:], at + written
    finally:
        os.close(fd)
