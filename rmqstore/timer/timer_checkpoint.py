"""config/timercheck: how far a broker's timer came.

Owns the layout of that file; it reads only.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

from rmqstore.errors import CorruptionError
from rmqstore.files.open_file import open_regular

__all__ = ["TimerCheckpoint"]

_FIELDS = struct.Struct(">7q")
# No broker says that it fired what is due in the year 2248.
_LATEST = 1 << 43
# Every precision that a broker takes (timerPrecisionMs: 100, 200, 500, 1000) is a multiple of it, so that all its times
# are.
TIME_UNIT = 100


@dataclass(frozen=True, slots=True)
class TimerCheckpoint:
    """The fields of ``config/timercheck``.

    Attributes
    ----------
    last_read_time : int
        Everything that fires before it has fired, ms since epoch.
    last_timer_log_flush_pos : int
        How far the timer log was on the disk, bytes.
    last_timer_queue_offset, master_timer_queue_offset : int
        The queue offset of ``rmq_sys_wheel_timer`` that is taken in next, here and at the master.
    state_version, timestamp, counter : int
        The data version; `timestamp` in ms since epoch.
    """

    last_read_time: int
    last_timer_log_flush_pos: int
    last_timer_queue_offset: int
    master_timer_queue_offset: int
    state_version: int = 0
    timestamp: int = 0
    counter: int = 0

    @property
    def taken_in(self) -> int:
        """int: the queue offset up to which both this broker and its master took records in."""
        return min(self.last_timer_queue_offset, self.master_timer_queue_offset)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TimerCheckpoint | None:
        """TimerCheckpoint or None: of the file at `path`; None where there is none.

        Raises
        ------
        CorruptionError
            It is too short, or holds what no broker writes.
        OSError
            It cannot be read, or is not a regular file.
        """
        path = os.fspath(path)
        try:
            with open(open_regular(path), "rb") as file:
                data = file.read(_FIELDS.size)
        except FileNotFoundError:
            return None
        if len(data) < _FIELDS.size:
            raise CorruptionError(
                f"the timer's checkpoint has {len(data)} bytes instead of {_FIELDS.size} or more", path, 0
            )
        found = cls(*_FIELDS.unpack(data))
        for number, name in enumerate(cls.__slots__[:4]):
            if getattr(found, name) < 0:
                raise CorruptionError(f"{name} of the timer's checkpoint is {getattr(found, name)}", path, 8 * number)
        if found.last_read_time % TIME_UNIT or found.last_read_time >= _LATEST:
            what = f"no multiple of {TIME_UNIT} ms" if found.last_read_time < _LATEST else "which cannot be"
            raise CorruptionError(
                f"last_read_time of the timer's checkpoint is {found.last_read_time}, {what}", path, 0
            )
        return found
