"""Sources of messages: the shapes that every kind of queue and log has for its readers.

A reader asks a queue for `Places` and the queue's log for the records there, and depends on nothing else.  To add a kind
of queue, write a class with the methods of `QueueSource`, over a log with those of `LogSource`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rmqstore import _numpy as np
from rmqstore._columns import ArrowColumns
from rmqstore._core import PRE_FILL_SIZE, Region, Verdict
from rmqstore.errors import CorruptionError, Finding
from rmqstore.selection import INT64_MAX, Selection
from rmqstore.spans import Span

if TYPE_CHECKING:
    # Not imported at run time: Python 3.15 evaluates the annotations of fields.
    from numpy import ndarray

    from rmqstore.message import MessageExt

__all__ = [
    "EXPIRED",
    "MAX_REGIONS",
    "STEP",
    "DamagePolicy",
    "Joined",
    "Located",
    "LogSource",
    "Part",
    "Places",
    "Pulled",
    "QueueSource",
    "fill_from",
    "in_one_file",
    "located",
    "without_record",
]

STEP = 8192
"""The number of places that are read together."""
MAX_REGIONS = 64
"""The number of files that the core takes in one call."""

EXPIRED = "expired"
"""The kind of a `Finding` about a file that is gone since it was listed, with all older ones: retention, and no damage."""

logger = logging.getLogger(__name__)


class DamagePolicy:
    """The rule for places that cannot be read; sources and readers take it whole.

    Parameters
    ----------
    mode : {"fail", "skip", "report"}
        Raise CorruptionError, leave the place out, or leave it out and name it in `findings`.
    advice : str
        The end of the error's message.

    Attributes
    ----------
    findings : list of Finding
        The places that were left out, with "report".
    """

    def __init__(self, mode: str = "fail", advice: str = "restore the file from a copy, or read around it (damage)"):
        if mode not in ("fail", "skip", "report"):
            raise ValueError(f"mode is {mode!r}, not fail, skip or report")
        self.mode, self.advice = mode, advice
        self.findings: list[Finding] = []
        self.warned_of: set[str] = set()

    def finding(self, finding: Finding) -> None:
        """Apply the rule to a place of tiered storage; warn of a file that retention deleted, once for each."""
        if finding.kind != EXPIRED:
            if self.mode == "fail":
                raise CorruptionError(f"{finding.detail}; {self.advice}", finding.path, finding.pos)
            self.leave_out(finding)
        elif finding.path not in self.warned_of:
            self.warned_of.add(finding.path)
            logger.warning("%s: %s; its messages are left out (retention)", finding.path, finding.detail)

    def leave_out(self, finding: Finding) -> None:
        """Add a place that is left out to `findings`, if these are wanted."""
        if self.mode == "report":
            self.findings.append(finding)

    def units(self, queue: Any, begin: int, end: int) -> None:
        """Apply the rule to queue offsets that had units when they were chosen, and have none now."""
        raise NotImplementedError

    def stretch(self, begin: int, end: int, verdict: Verdict | None) -> None:
        """Apply the rule to phy offsets of the commit log without the record that a unit points to; None is a missing segment."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Places:
    """Places of records, as parallel arrays with a value for each unit of a queue: int64, sizes int32.

    `phy_offsets` are places in the log of the queue; `sizes` are 0 or less in units that were never written.
    """

    phy_offsets: ndarray
    queue_offsets: ndarray
    sizes: ndarray
    tags_codes: ndarray

    @classmethod
    def none(cls) -> Places:
        """Return no places."""
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.phy_offsets)

    def where(self, kept: np.ndarray) -> Places:
        """Return the places for which an array of bool is true."""
        return self if kept.all() else self[kept]

    def __getitem__(self, rows: slice | np.ndarray) -> Places:
        return Places(self.phy_offsets[rows], self.queue_offsets[rows], self.sizes[rows], self.tags_codes[rows])

    @property
    def are_real(self) -> np.ndarray:
        """array of bool: which units lead to a record; pre-fill units and those that were never written do not."""
        real: np.ndarray = (self.sizes > 0) & ((self.phy_offsets != 0) | (self.sizes != PRE_FILL_SIZE))
        return real


Located = tuple[slice, list[Region], "np.ndarray", "np.ndarray"]
"""A part of some offsets, the files that it is in, their base offsets, and for each offset the number of its file, -1 for none."""


class LogSource(Protocol):
    """A log: where the records of queues are.

    The commit log, or the flat log of a queue in tiered storage.
    """

    crc_check: int

    @property
    def min_offset(self) -> int:
        """int: offset of the first byte that is there."""

    @property
    def max_offset(self) -> int:
        """int: offset after the last record."""

    def look_up(self, phy_offset: int, size: int | None = None) -> MessageExt | None:
        """Return the message at an offset, marked if its CRC is wrong; None where no record of this size begins."""

    def located(self, phy_offsets: np.ndarray) -> Iterator[Located]:
        """Yield these offsets in parts that are in few files each, for the core; parts that no file holds are left out."""


class QueueSource(Protocol):
    """A queue: which places it has, and in which log its records are."""

    @property
    def topic(self) -> str:
        """str: the topic of the queue."""

    @property
    def queue_id(self) -> int:
        """int: the number of the queue in its topic."""

    @property
    def log(self) -> LogSource:
        """LogSource: has the records of the queue."""

    def places(self, begin: int, end: int, step: int = STEP) -> Iterator[Places]:
        """Yield the places from queue offset `begin` up to but not including `end`, at most `step` at a time.

        Queue offsets that should have a unit and have none are reported.
        """

    def resolved_codes(self, codes: np.ndarray) -> np.ndarray:
        """Return tags codes, with codes from an extension in place of addresses in it."""

    def report_unread(self, places: Places) -> None:
        """Report that no record of the queue begins at these places."""

    def read(self, selection: Selection, end: int, max_bytes: int) -> Pulled:
        """Read messages for one get, by `begin_queue_offset`, `max_num` and tags of `selection`, up to the end of this part.

        It stops before the records together take more than `max_bytes`; the first message is returned whatever the limits.
        """

    def find_in_times(self, begin: int, end: int, times: Span, *, newest: bool) -> int | None:
        """Return the queue offset of the first message stored in a range of times; of the last with `newest`; None for none.

        Searched are queue offsets from `begin` up to but not including `end`; times are ms since epoch, both included.
        """


class Pulled(NamedTuple):
    """Messages of a queue in order, the queue offset to continue at, and the name of the status if there is no message."""

    messages: list[MessageExt]
    following: int
    nothing: str = "NO_MATCHED_MESSAGE"


class Part(NamedTuple):
    """The messages of a queue from queue offset `begin` up to but not including `end`; with `goes_on`, later ones too."""

    queue: QueueSource
    begin: int
    end: int
    goes_on: bool = False


class Joined:
    """A queue whose messages are in several sources: parts in a row, in which each queue offset is once.

    An empty part says where the queue ended.  `on_gap` is called with queue offsets that no part has, where a reading passes them.
    """

    __slots__ = ("on_gap", "parts")

    def __init__(self, parts: Sequence[Part], on_gap: Callable[[int, int], object] = lambda begin, end: None):
        self.parts = parts if len(parts) < 2 else sorted(parts, key=lambda part: part.begin)
        self.on_gap = on_gap

    @property
    def bounds(self) -> Span:
        """(int, int): queue offset of the first message that is there, and of the one to come; 0 and 0 for no part."""
        if len(self.parts) == 1:
            return self.parts[0][1:3]
        filled = [part for part in self.parts if part.begin < part.end] or self.parts
        return (filled[0].begin, max(part.end for part in self.parts)) if filled else (0, 0)

    def part_at(self, queue_offset: int) -> Part | None:
        """Return the part that has this queue offset."""
        return next((part for part in self.parts if part.begin <= queue_offset < part.end), None)

    def following(self, queue_offset: int) -> int:
        """Return where the first part after this queue offset begins; the end of the queue for none."""
        return next((part.begin for part in self.parts if part.begin > queue_offset), self.bounds[1])

    def between(self, begin: int, end: int = INT64_MAX) -> Iterator[Part]:
        """Yield the parts from queue offset `begin` up to but not including `end`, cut to these."""
        at = max(begin, self.bounds[0])
        for part in self.parts:
            # New messages come after the last part.
            until = end if part.goes_on and part is self.parts[-1] else min(part.end, end)
            if until <= at or part.begin >= part.end:
                continue
            if part.begin > at:
                self.on_gap(at, part.begin)
            yield Part(part.queue, max(part.begin, at), until)
            at = until

    def find_in_times(self, times: Span, *, newest: bool) -> int | None:
        """Return the queue offset of the first message stored in a range of times, see `QueueSource.find_in_times`."""
        for queue, begin, end, _ in reversed(self.parts) if newest else self.parts:
            found = queue.find_in_times(begin, end, times, newest=newest)
            if found is not None:
                return found
        return None


def located(files: np.ndarray, region_of: Callable[[int], tuple[Region, int] | None]) -> Iterator[Located]:
    """Yield offsets in parts as `LogSource.located` does, by the numbers of their files; -1 where the log has none.

    `region_of` returns the file with a number and its base offset; None for one that is gone.
    """
    used = np.flatnonzero(np.bincount(files + 1)[1:])
    step = max(len(files), 1) if len(used) <= MAX_REGIONS else MAX_REGIONS
    for first in range(0, len(files), step):
        part = slice(first, first + step)
        here = files[part]
        if step < len(files):
            used = np.flatnonzero(np.bincount(here + 1)[1:])
        # The last one is for -1.
        numbers = np.full((int(used[-1]) if len(used) else -1) + 2, -1, np.int32)
        regions: list[Region] = []
        bases: list[int] = []
        for file in used.tolist():
            found = region_of(file)
            if found is not None:
                numbers[file] = len(regions)
                regions.append(found[0])
                bases.append(found[1])
        if regions:
            yield part, regions, np.array(bases, np.int64), numbers[here]


def in_one_file(num: int, found: tuple[Region, int] | None) -> Iterator[Located]:
    """Yield `num` offsets that are in one file, as `located` does; nothing if the file is gone."""
    if found is not None:
        yield slice(0, num), [found[0]], np.array(found[1:], np.int64), np.zeros(num, np.int32)


def fill_from(log: LogSource, places: Places, out: ArrowColumns) -> np.ndarray:
    """Fill `out` with the records at places; return as an array of bool which places have a record of their size."""
    taken = np.zeros(len(places), np.uint8)
    for part, regions, bases, numbers in log.located(places.phy_offsets):
        out.fill_at(regions, bases, numbers, places.phy_offsets[part], places.sizes[part], taken[part])
    return taken.view(np.bool_)


def without_record(log: LogSource, places: Places) -> np.ndarray:
    """Return the numbers of the places at which no record of its size begins."""
    return np.flatnonzero(~fill_from(log, places, ArrowColumns((), 1 << 30)))
