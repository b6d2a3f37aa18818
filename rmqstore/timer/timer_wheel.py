"""timerwheel: the slots of a broker's time wheel, of the file itself or of a snapshot of it.

Owns the layout of a slot and the choice among the files.  It reads only.  A wheel lags behind the timer log, by a
second in the file and by ten in snapshots, so it is what the log is compared with, not the truth.
"""

from __future__ import annotations

import os

import numpy as np

from rmqstore.errors import CorruptionError
from rmqstore.files.listing import listing
from rmqstore.files.open_file import open_regular, written_extents

__all__ = ["SLOT", "TimerWheel"]

_STORED = np.dtype([("time", ">i8"), ("first", ">i8"), ("last", ">i8"), ("number", ">i4"), ("magic", ">i4")])
SLOT = np.dtype([("index", "i8"), ("time", "i8"), ("first", "i8"), ("last", "i8"), ("number", "i4"), ("magic", "i4")])
"""A slot as it is handed out: its index in the wheel, its time in units of the precision, the first and the last
position in the timer log, messages less recalls, magic."""

_PIECE = 1 << 17
_NAME = "timerwheel"


class TimerWheel:
    """The used slots of a wheel.

    Attributes
    ----------
    path : str
    slot_num : int
        Slots of the wheel, used or not.
    slots : array of `SLOT`
        Those that are not all zero, in the order of the file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        found = []
        at = 0
        with open(open_regular(self.path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size or size % _STORED.itemsize:
                raise CorruptionError(f"a time wheel of {size} bytes: slots have {_STORED.itemsize}", self.path, 0)
            self.slot_num = size // _STORED.itemsize
            # Nearly all of a wheel is zeros, most of which were never written.
            for begin, end in written_extents(file.fileno(), 0, size) or ((0, size),):
                at, last = max(at, begin // _STORED.itemsize), -(-end // _STORED.itemsize)
                file.seek(at * _STORED.itemsize)
                while at < last and len(stored := np.fromfile(file, _STORED, min(_PIECE, last - at))):
                    used = np.flatnonzero(stored.view("u8").reshape(-1, 4).any(axis=1))
                    slots = np.empty(len(used), SLOT)
                    slots["index"] = at + used
                    for name in _STORED.names or ():
                        slots[name] = stored[name][used]
                    found.append(slots)
                    at += len(stored)
        self.slots = np.concatenate(found) if found else np.empty(0, SLOT)

    @property
    def end(self) -> int:
        """int: the last position in the timer log that a slot leads to, -1 without any."""
        return int(self.slots["last"].max(initial=-1))

    @classmethod
    def newest(cls, root: str | os.PathLike[str]) -> tuple[TimerWheel | None, list[CorruptionError]]:
        """The wheel of the store at `root` that counts, and what is wrong with others.

        With ``timerWheelSnapshotFlush`` a broker leaves ``timerwheel`` zero and writes ``timerwheel.<position>``, of
        which the largest position counts; the one that leads furthest into the timer log is taken.

        Returns
        -------
        (TimerWheel or None, list of CorruptionError)
            None where there is no wheel that can be read.
        """
        root = os.fspath(root)
        problems: list[CorruptionError] = []
        snapshots = []
        for name in listing(root).checked().names:
            stem, _, position = name.partition(".")
            if stem == _NAME and position.isascii() and position.isdigit() and len(position) < 20:
                snapshots.append((int(position), name))
        newest: TimerWheel | None = None
        for _, name in sorted(snapshots, reverse=True):
            newest = _read(os.path.join(root, name), problems)
            if newest is not None:
                break
        wheel = _read(os.path.join(root, _NAME), problems)
        if wheel is not None and (newest is None or wheel.end > newest.end):
            newest = wheel
        return newest, problems


def _read(path: str, problems: list[CorruptionError]) -> TimerWheel | None:
    try:
        return TimerWheel(path)
    except FileNotFoundError:
        return None
    except CorruptionError as error:
        problems.append(error)
    except OSError as error:
        problems.append(CorruptionError(f"the time wheel cannot be read: {error.strerror or error}", path, 0))
    return None
