"""The units of the timer log that have not fired, and where wheel, log and checkpoint disagree.

Owns the rule which units wait.  The timer log is the truth: a unit waits if its slot fires at or after the checkpoint's
last read time, even where the wheel, which lags, does not lead to it.  Chains and wheel are what the log is compared with.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np

from rmqstore.errors import CorruptionError
from rmqstore.timer.timer_files import MAGIC_DELETE, UNIT, TimerCheckpoint, TimerLog, TimerWheel

__all__ = ["WaitingUnits", "waiting_units"]

_TOLD = 20


@dataclass
class WaitingUnits:
    """What the files of a timer say about what waits.

    - `units`: those that have not fired, recalls among them, in the order of their positions.
    - `last_unit`: the last unit of the timer log, waiting or not.
    - `wheel`: the file of the wheel that was compared.
    - `present`: there is a timer log, a wheel or a checkpoint at all.
    - `problems`: files and places that cannot be read, or cannot be right.
    - `notes`: what differs without anything being lost.
    """

    units: np.ndarray
    checkpoint: TimerCheckpoint | None = None
    last_unit: np.void | None = None
    wheel: str | None = None
    present: bool = False
    problems: list[CorruptionError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def waiting_units(root: str | os.PathLike[str], from_time: int | None = None) -> WaitingUnits:
    """The units that wait in the timer files of the store at `root`.

    - `from_time`: units fire at or after it (ms since epoch); by default the checkpoint's last read time, 0 without a
      checkpoint.
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
    """Units put together by the time at which their slot fires, each slot in the order of positions."""

    def __init__(self, units: np.ndarray):
        # They come in the order of positions.
        order = np.argsort(units["time"], kind="stable")
        self.units = units[order]
        times = self.units["time"]
        self.is_first = np.ones(len(units), bool)
        self.is_first[1:] = times[1:] != times[:-1]
        self.starts = np.flatnonzero(self.is_first)
        self.ends = np.append(self.starts[1:], len(units))
        self.times = times[self.starts]

def _check_chains(slots: _Slots, log: TimerLog) -> None:
    # Each unit leads to the one before it in its slot, the first to none.
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
    known = (
        (place < len(slots.times))
        & (slots.times[np.minimum(place, max(len(slots.times) - 1, 0))] == live["time"] * precision)
        if len(slots.times)
        else np.zeros(len(live), bool)
    )
    for slot in live[~known][: _TOLD + 1]:
        told.append(
            (
                f"the slot of {int(slot['time']) * precision} leads to units from {int(slot['first'])} to "
                f"{int(slot['last'])}, and the timer log holds none that fires then",
                int(slot["index"]),
            )
        )
    live, place = live[known], place[known]
    _check_slots(slots, live, place, told, found)
    # A slot that the wheel does not have is newer than the wheel, or lost.
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
    # Slots count in it, and no file names it: what most of the slots agree with.  A broker takes these four.
    best, agreeing = 1000, -1
    for precision in (1000, 500, 200, 100):
        number = int(np.isin(used["time"] * precision, slots.times).sum())
        if number > agreeing:
            best, agreeing = precision, number
    if agreeing <= 0 and len(used):
        # Nothing waits in them: times in them are of our days by one of the four.
        best = max(
            (1000, 500, 200, 100), key=lambda precision: -abs(int(used["time"].max()) * precision - 1_800_000_000_000)
        )
    return best


def _check_slots(
    slots: _Slots, live: np.ndarray, place: np.ndarray, told: list[tuple[str, int]], found: WaitingUnits
) -> None:
    if not len(live):
        return
    units = slots.units
    starts, ends = slots.starts[place], slots.ends[place]
    # The last unit of each slot that the wheel knows of; units after it are newer than the wheel.
    last_place = _places_in(units["position"], starts, ends, live["last"])
    led = last_place >= 0
    wrong = ~led | (units["position"][starts] != live["first"]) | (live["magic"] != 0)
    for slot in live[wrong][: _TOLD + 1]:
        told.append(
            (
                f"the slot of the time {int(slot['time'])} leads from {int(slot['first'])} to {int(slot['last'])}, "
                f"magic {int(slot['magic'])}, which the timer log does not agree with",
                int(slot["index"]),
            )
        )
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


def _places_in(positions: np.ndarray, starts: np.ndarray, ends: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    # Where each wanted position stands between its start and end, -1 where it does not.  Positions ascend in each
    # stretch.
    low, high = starts.copy(), ends.copy()
    while (low < high).any():
        middle = (low + high) // 2
        open_ = low < high
        below = open_ & (positions[np.minimum(middle, len(positions) - 1)] < wanted)
        low = np.where(below, middle + 1, low)
        high = np.where(open_ & ~below, middle, high)
    there = (low < ends) & (positions[np.minimum(low, len(positions) - 1)] == wanted)
    return np.where(there, low, -1)
