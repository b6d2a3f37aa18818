"""A look at a simple queue without mapping it: opening a store looks at all queues.

Owns what makes a queue plain, so that it needs neither loading nor tidying.  Whatever is not plain is `None` here, and
`ConsumeQueue` judges it.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from rmqstore import _core, _dispatch
from rmqstore import _numpy as np
from rmqstore._dispatch import RecordColumns
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import name_of_offset, offset_of_name
from rmqstore.files.open_file import open_regular, written_extents

_UNIT_SIZE = int(_core.UnitLayout.UNIT_SIZE)
# Beyond this no log ends; what is added to it does not overflow.
_FAR = 2**62


class PlainQueue(NamedTuple):
    """What `plain_queue` found: where the record of the last unit ends, and the furthest one of its file, -1 for none.

    `newest` is the offset of the newest file, in bytes of the queue.
    """

    last_end: int
    furthest_end: int
    newest: int

    def agrees(self, directory: str, file_size: int, columns: RecordColumns, rows: np.ndarray) -> bool | None:
        """bool: as `ConsumeQueue.agrees`, read from the newest file; None where the units lie in others."""
        number = int(columns.queue_offset[rows[0]])
        pos = number * _UNIT_SIZE - self.newest
        if pos < 0 or pos + len(rows) * _UNIT_SIZE > file_size:
            return None
        fd = open_regular(f"{directory}{os.sep}{name_of_offset(self.newest)}")
        try:
            data = os.pread(fd, len(rows) * _UNIT_SIZE, pos)
        finally:
            os.close(fd)
        if len(data) < len(rows) * _UNIT_SIZE:
            return False
        return _dispatch.agreeing_unit_bytes(data, columns, rows, number) == len(rows)


def files_in_a_row(directory: str, file_size: int, *, whole: bool = False) -> list[int] | None:
    """list of int: the offsets of a queue's files, ascending; None unless they are in a row, and nothing else is there.

    Parameters
    ----------
    directory : str
        The queue's.
    file_size : int
        Bytes of each file.
    whole : bool
        Also look at their lengths: None where one is not whole.
    """
    offsets = []
    try:
        for entry in listing(directory).checked():
            offset = offset_of_name(entry.name)
            if offset is None or offset % file_size or not entry.is_file():
                return None
            if whole and entry.stat().st_size != file_size:
                return None
            offsets.append(offset)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if offsets and offsets[0] + file_size * (len(offsets) - 1) != offsets[-1]:
        return None
    return offsets


def plain_queue(directory: str, file_size: int) -> PlainQueue | None:
    """Look at a simple queue without mapping it or keeping anything of it: opening a store looks at all of them.

    None unless it is plain: its files whole and in a row, all units of the newest one written without a gap, and nothing
    after them.  `ConsumeQueue.load` and `ConsumeQueue.tidy` then have nothing to refuse and nothing to do, if there is no
    extension.

    Parameters
    ----------
    directory : str
        The queue's.
    file_size : int
        Bytes of each file.
    """
    offsets = files_in_a_row(directory, file_size, whole=True)
    if not offsets:
        return None
    newest = offsets[-1]
    data = _written_start(f"{directory}{os.sep}{name_of_offset(newest)}", file_size)
    size = -(-_core.nonzero_size(data) // _UNIT_SIZE) * _UNIT_SIZE
    if not size:
        return None
    # A hole may begin within the last unit, whose tags code ends in zeros.
    ends = _core.unit_ends(memoryview(data.ljust(size, b"\0"))[:size], _FAR)
    return None if ends is None else PlainQueue(*ends, newest)


def _written_start(path: str, size: int) -> bytes:
    # What was written of a file of `size` bytes if it is one stretch from its start on; nothing if it is not, or if the file
    # system cannot tell.
    fd = open_regular(path)
    try:
        extents = written_extents(fd, 0, size) if os.fstat(fd).st_size == size else None
        if extents is None or len(extents) != 1 or extents[0][0] != 0:
            return b""
        data = os.pread(fd, extents[0][1], 0)
        return data if len(data) == extents[0][1] else b""
    except OSError:
        return b""
    finally:
        os.close(fd)
