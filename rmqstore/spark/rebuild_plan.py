"""What the tasks of a rebuild share: the plan, the pieces of a log, and what is known of them.

Owns `RebuildPlan`, which goes to every task, and `LogSummary`, which comes back from it.  It writes nothing but the
folders of the scratch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rmqstore import _core
from rmqstore._core import UnitLayout, Verdict
from rmqstore._dispatch import RecordColumns
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.commitlog.log_walk import Stretch
from rmqstore.config import StoreConfig
from rmqstore.errors import CorruptionError
from rmqstore.files.mapped_file import MappedFilePool
from rmqstore.spark.plan import Piece

SMALLEST_RECORD = int(_core.RecordLayout.RECORD_FIXED_SIZE)
UNIT_SIZE = int(UnitLayout.UNIT_SIZE)
DAMAGED_BODY = (Verdict.BAD_BODY_CRC, Verdict.BAD_PROP_CRC)
_WHOLE = (Verdict.RECORD, Verdict.BLANK, None, *DAMAGED_BODY)
# Records that are read at once, and entries or units that are made at once.
ROWS = 32768
ENTRIES = 1 << 20

QueueKey = tuple[str, int]


@dataclass(frozen=True)
class RebuildPlan:
    """What every task of a rebuild must know; it fits a few kilobytes whatever the size of the log.

    Attributes
    ----------
    root : str
        The store.
    work : str
        Where the finished folders come; below it `build` is the scratch of this plan.
    kinds : tuple of str
    config : StoreConfig
    begin, end : int
        The log, phy offsets in bytes.
    missing : tuple of (int, int)
        Where a segment is missing: begin and end.
    piece_size : int
        Bytes; a segment is cut at multiples of it.
    batch_topics : frozenset of str
        Topics that are known to have batch queues.
    direct : bool
        Units can be put into place by pass 1; with an extension every unit depends on those before it.
    by_queues : bool
        Units of the old queues may show the way to the first record of a piece.
    key : str
        Stands for all of this.
    """

    root: str
    work: str
    kinds: tuple[str, ...]
    config: StoreConfig
    begin: int
    end: int
    missing: tuple[tuple[int, int], ...]
    piece_size: int
    batch_topics: frozenset[str]
    direct: bool
    by_queues: bool
    key: str

    @property
    def build(self) -> str:
        """str: the scratch folder; a rebuild of another log, or of other options, has another."""
        return os.path.join(self.work, f"build-{self.key}")

    @property
    def piece_num(self) -> int:
        """int: how many pieces there are."""
        return sum(self._counts())

    def _counts(self) -> list[int]:
        # Pieces of every unbroken run of segments.
        per_segment = -(-self.config.mapped_file_size_commit_log // self.piece_size)
        counts = []
        for begin, end in self.runs():
            whole, rest = divmod(end - begin, self.config.mapped_file_size_commit_log)
            counts.append(whole * per_segment + -(-rest // self.piece_size))
        return counts

    def runs(self) -> list[tuple[int, int]]:
        """list of (int, int): the parts of the log between missing segments."""
        starts = [self.begin, *(end for _, end in self.missing)]
        ends = [*(begin for begin, _ in self.missing), self.end]
        return [(start, end) for start, end in zip(starts, ends, strict=True) if end > start]

    def piece(self, number: int) -> Piece:
        """The piece of that number, from 0 on."""
        size = self.config.mapped_file_size_commit_log
        per_segment = -(-size // self.piece_size)
        for (begin, end), count in zip(self.runs(), self._counts(), strict=True):
            if number < count:
                segment = begin + number // per_segment * size
                at = segment + number % per_segment * self.piece_size
                return Piece(at, min(at + self.piece_size, segment + size, end))
            number -= count
        raise IndexError("there is no such piece")

    def segment(self, phy_offset: int) -> int:
        """int: offset of the first byte of the segment that holds `phy_offset`."""
        return phy_offset - phy_offset % self.config.mapped_file_size_commit_log

    def folder(self, *names: str) -> str:
        """str: a folder in the scratch, made if it is missing; the scratch itself must be there."""
        path = self.build
        for name in names:
            path = os.path.join(path, name)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
        return path


@contextlib.contextmanager
def segments_of(plan: RebuildPlan, offsets: Iterable[int]) -> Iterator[CommitLog]:
    """CommitLog: a log of only these segments, closed at the end of the block; a task lists no directory."""
    log = CommitLog(plan.root, plan.config, MappedFilePool(4), read_only=True)
    try:
        log.files.take(offsets, plan.end)
        yield log
    finally:
        log.close()


def segment_offsets(plan: RebuildPlan) -> list[int]:
    """list of int: the phy offset at which each segment of the plan begins, ascending."""
    size = plan.config.mapped_file_size_commit_log
    return [base for begin, end in plan.runs() for base in range(begin, end, size)]


def stretches_of(
    log: CommitLog, begin: int, cut: int, end: int, columns: RecordColumns | None = None, **options: bool
) -> Iterator[Stretch]:
    """Stretches of the log, as of `CommitLog.stretches`, that begin before `cut`.

    Damage goes on to the record after it wherever in the segment that is, as it does for whoever reads all up to `end`.
    """
    at = begin
    while at < cut:
        for stretch in log.stretches(at, cut, columns, **options):
            at = stretch.end
            if at >= cut and stretch.verdict not in _WHOLE:
                mapped_file = log.files.find(stretch.begin)
                assert mapped_file is not None
                base, region = mapped_file.file_from_offset, mapped_file.region
                start, limit = stretch.begin - base + 1, min(end - base, region.size)
                if base + limit > cut:
                    found = _core.find_record(region, start, base, limit) if start < limit else -1
                    at = base + (found if found >= 0 else limit)
                stretch = stretch._replace(end=at)
            yield stretch


class PartsDoNotMeetError(CorruptionError):
    """One part of the log ends where the next does not begin."""


@dataclass
class LogSummary:
    """What is known of a part of the log: enough to say where everything in it goes, once it is known what lies before it.

    Attributes
    ----------
    first, reached : int
        Where its first record begins, and where the log goes on after its last one, phy offsets.
    records : int
    entry_nums : list of int
        Index entries of every piece.
    last_has_keys : bool or None
        Whether the last record has index entries; None without a record.
    queues : dict of (str, int) to list
        Per queue: offset and phy offset of its first unit, the same of its last, and how many units.
    fills : list of (str, int, int, int)
        Topic, queue id, and which units of the queue no record gives (begin, end).
    alone : set of (str, int)
        Queues whose units do not follow from the records one by one.
    batch_topics : set of str
        Topics of which inner batches were found.
    further : bool
        There are records with units in further queues.
    damage : list of (int, int, str)
        As `RebuildReport.damage`.
    """

    first: int
    reached: int
    records: int = 0
    entry_nums: list[int] = field(default_factory=list)
    last_has_keys: bool | None = None
    queues: dict[QueueKey, list[int]] = field(default_factory=dict)
    fills: list[tuple[str, int, int, int]] = field(default_factory=list)
    alone: set[QueueKey] = field(default_factory=set)
    batch_topics: set[str] = field(default_factory=set)
    further: bool = False
    damage: list[tuple[int, int, str]] = field(default_factory=list)

    def to_json(self) -> str:
        """str: itself as text."""
        values = dataclasses.asdict(self)
        values["queues"] = [[*key, *value] for key, value in self.queues.items()]
        values["alone"], values["batch_topics"] = sorted(self.alone), sorted(self.batch_topics)
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str | bytes) -> LogSummary:
        """What `to_json` wrote."""
        values = json.loads(text)
        values["queues"] = {(topic, queue_id): rest for topic, queue_id, *rest in values["queues"]}
        values["alone"] = {(topic, queue_id) for topic, queue_id in values["alone"]}
        values["batch_topics"] = set(values["batch_topics"])
        values["fills"] = [tuple(fill) for fill in values["fills"]]
        values["damage"] = [tuple(part) for part in values["damage"]]
        return cls(**values)

    def join(self, following: LogSummary, plan: RebuildPlan) -> None:
        """Take in the part that follows.

        Raises
        ------
        CorruptionError
            The parts do not meet.
        """
        if self.reached != following.first:
            if (self.reached, following.first) not in plan.missing:
                raise PartsDoNotMeetError(
                    f"one part of the log ends at phy offset {self.reached}, the next begins at {following.first}; the log "
                    "was changed while it was read: see to it that nobody writes, and start the rebuild again",
                    os.path.join(plan.root, "commitlog"),
                )
            self.damage.append((self.reached, following.first - self.reached, "missing segment"))
        self.reached = following.reached
        self.records += following.records
        self.entry_nums += following.entry_nums
        if following.last_has_keys is not None:
            self.last_has_keys = following.last_has_keys
        self.fills += following.fills
        self.alone |= following.alone
        self.batch_topics |= following.batch_topics
        self.further |= following.further
        self.damage += following.damage
        for key, place in following.queues.items():
            mine = self.queues.get(key)
            if mine is None:
                self.queues[key] = list(place)
                continue
            if not can_follow(*mine[2:4], *place[:2]):
                self.alone.add(key)
            elif place[0] > mine[2] + 1:
                self.fills.append((*key, mine[2] + 1, place[0]))
            mine[2:] = [*place[2:4], mine[4] + place[4]]


def can_follow(offset: int, phy_offset: int, next_offset: int, next_phy_offset: int) -> bool:
    """bool: a queue offset can be that of a later record: it rises, by no more than the log between has room for."""
    # What rises so from record to record no dispatcher finds implausible, however the records are put together.
    return 1 <= next_offset - offset <= (next_phy_offset - phy_offset) // SMALLEST_RECORD
