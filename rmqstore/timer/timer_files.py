"""The three files of a broker's timer: config/timercheck, timerlog/ and timerwheel, or a snapshot of it.

Owns their layouts, the search for units that fire at or after a time, and the choice among several wheels.  It reads files in
pieces, never maps them, and trusts no number in them: a damaged unit is a problem, and the rest is read.  A wheel lags behind
the timer log, by a second in the file and by ten in snapshots, so it is what the log is compared with, not the truth.
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rmqstore.errors import CorruptionError
from rmqstore.files.listing import listing
from rmqstore.files.open_file import open_regular, written_extents

__all__ = [
    "MAGIC_DEFAULT", "MAGIC_DELETE", "MAGIC_ROLL", "SLOT", "STORED", "UNIT", "UNIT_SIZE", "TimerCheckpoint",
    "TimerLog", "TimerWheel",
]  # fmt: skip

UNIT_SIZE = 52
MAGIC_DEFAULT, MAGIC_ROLL, MAGIC_DELETE = 1, 2, 4
_BLANK_MAGIC = 0xCBD43194 - (1 << 32)
STORED = np.dtype(
    [
        ("size", ">i4"), ("prev", ">i8"), ("magic", ">i4"), ("write_time", ">i8"), ("delay", ">i4"),
        ("phy_offset", ">i8"), ("record_size", ">i4"), ("topic_hash", ">i4"), ("reserved", ">i8"),
    ]
)  # fmt: skip
"""A unit as it lies on the disk."""
UNIT = np.dtype(
    [
        ("position", "i8"), ("prev", "i8"), ("magic", "i4"), ("time", "i8"), ("phy_offset", "i8"),
        ("record_size", "i4"), ("topic_hash", "i4"),
    ]
)  # fmt: skip
"""A unit as it is handed out: its position in the timer log, that of the unit before it in its slot (-1 = none), the
magic, when its slot fires (ms since epoch), phy offset and size of its record, Java's hash of the real topic."""

# Units that are read at once, and damaged units that are told one by one.
_PIECE = 1 << 18
_TOLD = 20


class _Piece(NamedTuple):
    # Units of one file as they are stored, with their positions in the timer log, in which the file begins at `base`.
    path: str
    base: int
    positions: np.ndarray
    stored: np.ndarray


class TimerLog:
    """The files of ``timerlog/``, in the order of their positions.

    - `folder`: it need not exist.
    - `problems`: what was found damaged so far; the rest is read all the same.
    - `last`: the last unit, of type `UNIT`, as soon as `units` came over it.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = os.fspath(folder)
        self.problems: list[CorruptionError] = []
        self.last: np.void | None = None
        self._files: list[tuple[int, str, int]] = []
        entries = listing(self.folder)
        if (error := entries.problem) is not None:
            self._tell(f"the folder cannot be read: {error.strerror or error}", self.folder, 0)
        for entry in entries:
            if len(entry.name) == 20 and entry.name.isascii() and entry.name.isdigit():
                if not entry.is_file():
                    self._tell("this is not a regular file where one of the timer log is expected", entry.path, 0)
                    continue
                # A broker deletes the oldest file meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    base, size = int(entry.name), entry.stat().st_size
                    if base + size < 1 << 63:
                        self._files.append((base, entry.path, size))
                    else:
                        text = "by its name the file goes beyond all positions that there are; move it away"
                        self._tell(text, entry.path, 0)
        for (base, path, size), (following, _, _) in zip(self._files, self._files[1:]):
            if base + size != following:
                self._tell(f"the file ends at {base + size} and the next one begins at {following}", path, size)

    def __bool__(self) -> bool:
        """bool: there is a file."""
        return bool(self._files)

    @property
    def end(self) -> int:
        """int: position after the last file, 0 without any."""
        return self._files[-1][0] + self._files[-1][2] if self._files else 0

    def units(self, from_time: int) -> np.ndarray:
        """Array of `UNIT`: those that fire at or after `from_time` (ms since epoch), in the order of positions."""
        found = []
        for number, (base, path, size) in enumerate(self._files):
            if size < UNIT_SIZE:
                if size or number < len(self._files) - 1:
                    self._tell(f"a file of {size} bytes has no room for a unit", path, 0)
                continue
            try:
                found += self._of_file(base, path, size, from_time)
            except OSError as error:
                self._tell(f"the file cannot be read: {error.strerror or error}", path, 0)
        return np.concatenate(found) if found else np.empty(0, UNIT)

    def _of_file(self, base: int, path: str, size: int, from_time: int) -> list[np.ndarray]:
        found, rest, is_last = [], size // UNIT_SIZE, base == self._files[-1][0]
        zeros_from: int | None = None
        with open(path, "rb") as file:
            at = 0
            # What was never written at the end is not read: it may be more than anybody has the time for.
            written = written_extents(file.fileno(), 0, size)
            if written is not None:
                rest = min(rest, -(-written[-1][1] // UNIT_SIZE) if written else 0)
            never_written = rest < size // UNIT_SIZE
            # Asking moved it.
            file.seek(0)
            while rest:
                stored = np.fromfile(file, STORED, min(rest, _PIECE))
                if not len(stored):
                    break
                rest -= len(stored)
                magic, sizes = stored["magic"].astype("i4"), stored["size"].astype("i4")
                there = (magic != 0) | (sizes != 0)
                positions = base + at + UNIT_SIZE * np.arange(len(stored), dtype=np.int64)
                at += UNIT_SIZE * len(stored)
                used = np.flatnonzero(there)
                if len(used):
                    # Zeros in front of a unit are units that were lost.
                    gaps = np.flatnonzero(~there[: used[-1]])
                    if zeros_from is not None or len(gaps):
                        first = zeros_from if zeros_from is not None else int(positions[gaps[0]])
                        self._tell("zeros stand where units were", path, first - base)
                    zeros_from = int(positions[used[-1]]) + UNIT_SIZE if used[-1] + 1 < len(stored) else None
                elif zeros_from is None:
                    zeros_from = int(positions[0]) if len(positions) else None
                blank = magic == _BLANK_MAGIC
                for place in np.flatnonzero(blank).tolist():
                    left = size - (int(positions[place]) - base)
                    if sizes[place] != left or stored["prev"][place] != 0 or is_last or left >= 2 * UNIT_SIZE:
                        self._tell(
                            f"an end mark of {sizes[place]} bytes where the file has {left} left", path, size - left
                        )
                found += self._taken(_Piece(path, base, positions, stored), there & ~blank, from_time)
        if never_written and zeros_from is None:
            zeros_from = base + at
        ended = zeros_from is None or (not is_last and size - (zeros_from - base) < UNIT_SIZE + 16)
        if not is_last and not ended and zeros_from is not None:
            self._tell("the file ends with zeros although another follows", path, zeros_from - base)
        return found

    def _taken(self, piece: _Piece, there: np.ndarray, from_time: int) -> list[np.ndarray]:
        # The units of a piece that fire late enough, after all of those that are there were checked.
        if not there.any():
            return []
        path, base, positions, stored = piece
        magic, sizes = stored["magic"].astype("i4"), stored["size"].astype("i4")
        with np.errstate(over="ignore"):
            time = stored["write_time"].astype("i8") + stored["delay"].astype("i8")
        prev = stored["prev"].astype("i8")
        known = MAGIC_DEFAULT | MAGIC_ROLL | MAGIC_DELETE
        odd = there & (
            (sizes != UNIT_SIZE)
            | ((magic & MAGIC_DEFAULT) == 0)
            | ((magic & ~known) != 0)
            | (stored["reserved"] != 0)
            | (time % TIME_UNIT != 0)
            | (time < 0)
            | (stored["write_time"].astype("i8") % TIME_UNIT != 0)
            | (prev < -1)
            | (prev >= positions)
            | (stored["phy_offset"].astype("i8") < 0)
        )
        for number, place in enumerate(np.flatnonzero(odd).tolist()):
            if number == _TOLD:
                self._tell(f"{np.count_nonzero(odd) - _TOLD} more damaged units", path, int(positions[place]) - base)
                break
            self._tell(f"a damaged unit: {_shown(stored[place])}", path, int(positions[place]) - base)
        last = int(np.flatnonzero(there)[-1])
        chosen = np.flatnonzero(there & (time >= from_time))
        if not len(chosen) or chosen[-1] != last:
            chosen = np.append(chosen, last)
        units = np.empty(len(chosen), UNIT)
        units["position"], units["prev"], units["time"] = positions[chosen], prev[chosen], time[chosen]
        units["magic"] = magic[chosen]
        for name in ("phy_offset", "record_size", "topic_hash"):
            units[name] = stored[name][chosen]
        self.last = units[-1].copy()
        return [units if time[last] >= from_time else units[:-1]]

    def _tell(self, what: str, path: str, pos: int) -> None:
        self.problems.append(CorruptionError(f"timer log: {what}", path, pos))


def _shown(unit: np.void) -> str:
    return ", ".join(f"{name} {int(unit[name])}" for name in STORED.names or ())


_STORED_SLOT = np.dtype([("time", ">i8"), ("first", ">i8"), ("last", ">i8"), ("number", ">i4"), ("magic", ">i4")])
SLOT = np.dtype([("index", "i8"), ("time", "i8"), ("first", "i8"), ("last", "i8"), ("number", "i4"), ("magic", "i4")])
"""A slot as it is handed out: its index in the wheel, its time in units of the precision, the first and the last
position in the timer log, messages less recalls, magic."""

# Slots that are read at once.
_SLOTS_READ = 1 << 17
_NAME = "timerwheel"


class TimerWheel:
    """The used slots of a wheel.

    - `slot_num`: slots of the wheel, used or not.
    - `slots`: those that are not all zero, in the order of the file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        found = []
        at = 0
        with open(open_regular(self.path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size or size % _STORED_SLOT.itemsize:
                raise CorruptionError(f"a time wheel of {size} bytes: slots have {_STORED_SLOT.itemsize}", self.path, 0)
            self.slot_num = size // _STORED_SLOT.itemsize
            # Nearly all of a wheel is zeros, most of which were never written.
            for begin, end in written_extents(file.fileno(), 0, size) or ((0, size),):
                at, last = max(at, begin // _STORED_SLOT.itemsize), -(-end // _STORED_SLOT.itemsize)
                file.seek(at * _STORED_SLOT.itemsize)
                while at < last and len(stored := np.fromfile(file, _STORED_SLOT, min(_SLOTS_READ, last - at))):
                    used = np.flatnonzero(stored.view("u8").reshape(-1, 4).any(axis=1))
                    slots = np.empty(len(used), SLOT)
                    slots["index"] = at + used
                    for name in _STORED_SLOT.names or ():
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

        - Returns (TimerWheel or None, list of CorruptionError): None where there is no wheel that can be read.
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


_FIELDS = struct.Struct(">7q")
# No broker says that it fired what is due in the year 2248.
_LATEST = 1 << 43
# Every precision that a broker takes (timerPrecisionMs: 100, 200, 500, 1000) is a multiple of it, so that all its times
# are.
TIME_UNIT = 100


@dataclass(frozen=True, slots=True)
class TimerCheckpoint:
    """The fields of ``config/timercheck``.

    - `last_read_time`: everything that fires before it has fired, ms since epoch.
    - `last_timer_log_flush_pos`: how far the timer log was on the disk, bytes.
    - `last_timer_queue_offset`, `master_timer_queue_offset`: the queue offset of ``rmq_sys_wheel_timer`` that is taken in next,
      here and at the master.
    - `state_version`, `timestamp`, `counter`: the data version; `timestamp` in ms since epoch.
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
        """TimerCheckpoint or None: of the file at `path`; None where there is none."""
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
