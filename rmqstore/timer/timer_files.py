"""The three files of a broker's timer: config/timercheck, timerlog/ and timerwheel, or a snapshot of it.

A unit of the timer log is pending if its slot fires at or after the checkpoint's last read time.  Chains and wheel are only
compared with the log: a wheel lags behind it, by a second in the file and by ten in snapshots.  Files are read in pieces and never
mapped.  No number in them is trusted: a damaged unit is a problem, and the rest is read.
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rmqstore.errors import CorruptionError
from rmqstore.files.listing import listing
from rmqstore.files.open_file import open_regular, written_extents

__all__ = [
    "MAGIC_DEFAULT", "MAGIC_DELETE", "MAGIC_ROLL", "SLOT", "STORED", "UNIT", "UNIT_SIZE", "TimerCheckpoint", "TimerLog",
    "TimerWheel", "WaitingUnits", "waiting_units",
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
"""A unit on disk."""
UNIT = np.dtype(
    [
        ("position", "i8"), ("prev", "i8"), ("magic", "i4"), ("time", "i8"), ("phy_offset", "i8"),
        ("record_size", "i4"), ("topic_hash", "i4"),
    ]
)  # fmt: skip
"""A unit in memory: its position in the timer log, the position of the one before it in its slot (-1 for none), the magic, the time
at which its slot fires (ms since epoch), phy offset and size of its record, Java's hash of the real topic."""

# Units that are read at once, and damaged units that are reported one by one.
_PIECE = 1 << 18
_TOLD = 20


class _Piece(NamedTuple):
    # Units of one file as they are stored, with their positions in the timer log; the file begins at position `base`.
    path: str
    base: int
    positions: np.ndarray
    stored: np.ndarray


class TimerLog:
    """The files of ``timerlog/``, in the order of their positions.

    `problems` is the damage found so far; the rest is read anyway.  `last` is the last unit (`UNIT`), once `units` has read it.
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
                # The broker may delete the oldest file.
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
        """Return True if there is a file."""
        return bool(self._files)

    @property
    def end(self) -> int:
        """int: position after the last file, 0 without any."""
        return self._files[-1][0] + self._files[-1][2] if self._files else 0

    def units(self, from_time: int) -> np.ndarray:
        """Return the units that fire at or after `from_time` (ms since epoch), by position, as an array of `UNIT`."""
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
            # A hole at the end of the file may be huge, and is not read.
            written = written_extents(file.fileno(), 0, size)
            if written is not None:
                rest = min(rest, -(-written[-1][1] // UNIT_SIZE) if written else 0)
            never_written = rest < size // UNIT_SIZE
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
                    # Zeros before a unit are lost units.
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
        # Check all units of a piece, and return those that fire late enough.
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
"""A slot in memory: its index in the wheel, its time in units of the precision, its first and last position in the timer log, the
number of messages minus the number of recalls, magic."""

# Slots that are read at once.
_SLOTS_READ = 1 << 17
_NAME = "timerwheel"


class TimerWheel:
    """The used slots of a wheel: `slots` has those that are not all zero, in the order of the file."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        found = []
        at = 0
        with open(open_regular(self.path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size or size % _STORED_SLOT.itemsize:
                raise CorruptionError(f"a time wheel of {size} bytes: slots have {_STORED_SLOT.itemsize}", self.path, 0)
            self.slot_num = size // _STORED_SLOT.itemsize
            # Most of a wheel is zeros that were never written.
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
        """int: the last position in the timer log that a slot points to, -1 for none."""
        return int(self.slots["last"].max(initial=-1))

    @classmethod
    def newest(cls, root: str | os.PathLike[str]) -> tuple[TimerWheel | None, list[CorruptionError]]:
        """Return the newest wheel of the store at `root`, None if none can be read, and the problems of the others.

        With ``timerWheelSnapshotFlush`` a broker leaves ``timerwheel`` zero and writes ``timerwheel.<position>``, of which the
        largest position counts; the one that points furthest into the timer log is the newest.
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
# The precisions that a broker takes (timerPrecisionMs); all its times are multiples of the smallest one.
_PRECISIONS = (1000, 500, 200, 100)
TIME_UNIT = 100


@dataclass(frozen=True, slots=True)
class TimerCheckpoint:
    """The fields of ``config/timercheck``.

    Everything that fires before `last_read_time` (ms since epoch) has fired.  The timer log was on disk up to byte
    `last_timer_log_flush_pos`.  `last_timer_queue_offset` and `master_timer_queue_offset` are the queue offsets of
    ``rmq_sys_wheel_timer`` that are read next, here and at the master.  `state_version`, `timestamp` (ms since epoch) and
    `counter` are the data version.
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
        """int: the queue offset up to which both this broker and its master have read."""
        return min(self.last_timer_queue_offset, self.master_timer_queue_offset)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TimerCheckpoint | None:
        """Return the checkpoint in the file at `path`; None without a file."""
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


@dataclass
class WaitingUnits:
    """The pending units of the files of a timer.

    `last_unit` is the last unit of the timer log, pending or not; `wheel` the file of the wheel that was compared.  `present` is
    True if there is a timer log, a wheel or a checkpoint.  `problems` are files and places that cannot be read, or cannot be
    right; `notes` are differences without a loss.
    """

    units: np.ndarray
    checkpoint: TimerCheckpoint | None = None
    last_unit: np.void | None = None
    wheel: str | None = None
    present: bool = False
    problems: list[CorruptionError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def waiting_units(root: str | os.PathLike[str], from_time: int | None = None) -> WaitingUnits:
    """Return the units in the timer files of the store at `root` that fire at or after `from_time` (ms since epoch).

    The default of `from_time` is the checkpoint's last read time, 0 without a checkpoint.
    """
    root = os.fspath(root)
    found = WaitingUnits(np.empty(0, UNIT))
    path = os.path.join(root, "config", "timercheck")
    try:
        found.checkpoint = TimerCheckpoint.load(path)
        found.present = found.checkpoint is not None
    except CorruptionError as error:
        found.problems.append(error)
    except OSError as error:
        found.problems.append(
            CorruptionError(f"the timer's checkpoint cannot be read: {error.strerror or error}", path, 0)
        )
    if from_time is None:
        from_time = 0 if found.checkpoint is None else found.checkpoint.last_read_time
    log = TimerLog(os.path.join(root, "timerlog"))
    found.units = log.units(from_time)
    found.last_unit = log.last
    if found.checkpoint is not None and log.end < found.checkpoint.last_timer_log_flush_pos:
        flushed = found.checkpoint.last_timer_log_flush_pos
        what = f"timer log: it ends at {log.end}, and the timer's checkpoint says that it was written up to {flushed}"
        found.problems.append(CorruptionError(what, log.folder))
    wheel, problems = TimerWheel.newest(root)
    found.problems += problems
    found.present |= bool(log) or wheel is not None or bool(found.problems)
    slots = _Slots(found.units)
    _check_chains(slots, log)
    if wheel is not None:
        found.wheel = wheel.path
        _check_wheel(slots, wheel, from_time, found)
    elif len(found.units):
        found.notes.append("there is no time wheel to compare the timer log with")
    found.problems += log.problems
    return found


class _Slots:
    """Units, given in the order of positions, grouped by the time at which their slot fires; each slot by position."""

    def __init__(self, units: np.ndarray):
        self.positions = units["position"]
        self.order = order = np.argsort(units["time"], kind="stable")
        self.units = units[order]
        times = self.units["time"]
        self.is_first = np.ones(len(units), bool)
        self.is_first[1:] = times[1:] != times[:-1]
        self.starts = np.flatnonzero(self.is_first)
        self.ends = np.append(self.starts[1:], len(units))
        self.times = times[self.starts]


def _check_chains(slots: _Slots, log: TimerLog) -> None:
    # Each unit points to the one before it in its slot, the first to none.
    units = slots.units
    expected = np.full(len(units), -1, np.int64)
    expected[1:] = units["position"][:-1]
    expected[slots.is_first] = -1
    wrong = np.flatnonzero(units["prev"] != expected)
    for place in wrong[:_TOLD].tolist():
        position, prev = int(units["position"][place]), int(units["prev"][place])
        text = f"the unit at {position} leads to {prev}; the one before it in its slot is at {int(expected[place])}"
        log.problems.append(CorruptionError(f"timer log: {text}", log.folder, position))
    if len(wrong) > _TOLD:
        text = f"timer log: {len(wrong) - _TOLD} more units lead elsewhere"
        log.problems.append(CorruptionError(text, log.folder, int(units["position"][wrong[_TOLD]])))


def _check_wheel(slots: _Slots, wheel: TimerWheel, from_time: int, found: WaitingUnits) -> None:
    used = wheel.slots
    told: list[tuple[str, int]] = []
    misplaced = used["time"] % wheel.slot_num != used["index"]
    for slot in used[misplaced][: _TOLD + 1]:
        told.append((f"the slot holds the time {int(slot['time'])}, which does not belong there", int(slot["index"])))
    used = used[~misplaced]
    precision = _precision(slots, used)
    live = used[used["time"] * precision >= from_time]
    place = np.searchsorted(slots.times, live["time"] * precision)
    known = np.isin(live["time"] * precision, slots.times)
    for slot in live[~known][: _TOLD + 1]:
        what = f"the slot of {int(slot['time']) * precision} leads to units from {int(slot['first'])} to {int(slot['last'])}"
        told.append((f"{what}, and the timer log holds none that fires then", int(slot["index"])))
    live, place = live[known], place[known]
    _check_slots(slots, live, place, told, found)
    # Slots that are missing in the wheel are newer than the wheel, or lost.
    without = np.ones(len(slots.times), bool)
    without[place] = False
    first = slots.units["position"][slots.starts[without]]
    lost = first <= wheel.end
    for time, position in zip(slots.times[without][lost][:_TOLD].tolist(), first[lost].tolist()):
        told.append((f"the wheel has no slot of {time}, to which the unit at {position} of the timer log belongs", 0))
    newer = np.count_nonzero(slots.units["position"] > wheel.end)
    if newer:
        found.notes.append(f"{newer} units of the timer log are newer than the time wheel, and counted")
    for what, index in told[:_TOLD]:
        found.problems.append(CorruptionError(f"time wheel: {what}", wheel.path, 32 * index))
    if len(told) > _TOLD:
        found.problems.append(CorruptionError("time wheel: more slots are damaged", wheel.path, 0))


def _precision(slots: _Slots, used: np.ndarray) -> int:
    # The unit of the slots' times, which no file contains: the one that most slots agree with.
    agreeing = {each: int(np.isin(used["time"] * each, slots.times).sum()) for each in _PRECISIONS}
    if any(agreeing.values()) or not len(used):
        return max(_PRECISIONS, key=lambda each: agreeing[each])
    # No slot has a pending unit: the one by which the newest time is nearest to the present.
    newest = int(used["time"].max())
    return min(_PRECISIONS, key=lambda each: abs(newest * each - 1_800_000_000_000))


def _check_slots(
    slots: _Slots, live: np.ndarray, place: np.ndarray, told: list[tuple[str, int]], found: WaitingUnits
) -> None:
    if not len(live):
        return
    units = slots.units
    starts, ends = slots.starts[place], slots.ends[place]
    # The last unit of each slot that is in the wheel; later units are newer than the wheel.
    rank = np.empty(len(units), np.int64)
    rank[slots.order] = np.arange(len(units))
    found_at = np.minimum(np.searchsorted(slots.positions, live["last"]), len(units) - 1)
    last_place = rank[found_at]
    led = (slots.positions[found_at] == live["last"]) & (last_place >= starts) & (last_place < ends)
    wrong = ~led | (units["position"][starts] != live["first"]) | (live["magic"] != 0)
    for slot in live[wrong][: _TOLD + 1]:
        what = f"the slot of the time {int(slot['time'])} leads from {int(slot['first'])} to {int(slot['last'])}"
        what += f", magic {int(slot['magic'])}, which the timer log does not agree with"
        told.append((what, int(slot["index"])))
    worth = np.where((units["magic"] & MAGIC_DELETE) != 0, -1, 1)
    total = np.concatenate([[0], np.cumsum(worth)])
    number = total[np.where(led, last_place + 1, starts)] - total[starts]
    differs = led & (number != live["number"])
    if differs.any():
        slot, counted = live[differs][0], int(number[differs][0])
        found.notes.append(
            f"{np.count_nonzero(differs)} slots of the time wheel count otherwise than the timer log (the first "
            f"{int(slot['number'])} instead of {counted}), as after a recovery of the broker; the timer log counts here"
        )
