"""rebuild: rebuild the index and the consume queues of a store from its commit log alone.

The old files stay until the new ones are complete, verified and on disk; a killed rebuild begins again, or continues the swap.  The
bytes are those of the broker (RocketMQ 5.5.0, or before 5.4.0 with ``index_tags=False``), except for the names of index files.  A
database of queues (RocksDB) is moved aside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from rmqstore._core import Verdict
from rmqstore._dispatch import RecordColumns
from rmqstore.commitlog.commit_log import CommitLog, check_store_root
from rmqstore.config import StoreConfig
from rmqstore.config.places import refuse_dledger
from rmqstore.consumequeue.consume_queue_store import ConsumeQueueStore
from rmqstore.consumequeue.queue_folders import queue_directories
from rmqstore.consumequeue.queue_look import look_at_files
from rmqstore.errors import CorruptionError, Finding, GeometryError, GiveOptions, Sentence, StoreError, UseBrokerConf
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.files.durable import make_directories
from rmqstore.files.mapped_file import MappedFilePool
from rmqstore.files.output_file import check_outside, make_part
from rmqstore.files.store_lock import StoreLock, is_held
from rmqstore.index.index_service import IndexService
from rmqstore.message import SCHEDULE_TOPIC
from rmqstore.offline.compared import Compared
from rmqstore.offline.rebuild_swap import (
    FOLDERS,
    QUEUE_DATABASE,
    delete_tree,
    finish_swap,
    folders_of,
    mark_complete,
    move_built,
    moved_aside,
    swap,
    swap_database,
)
from rmqstore.offline.verify import verify_parts
from rmqstore.rocksdb.database import PLACES, check_queue_databases, queue_databases
from rmqstore.store.dispatch_rules import without_unit
from rmqstore.store.dispatcher import LogDispatcher, QueueKindError
from rmqstore.store.lost_log import end_of_known, refuse_loss
from rmqstore.store.opening import REBUILD_DIRECTORY, is_swapping, save_changed

__all__ = ["REBUILD_DIRECTORY", "RebuildJob", "RebuildReport", "check_config", "rebuild"]

# Verdicts on records whose lengths are whole.
_CORRUPT = (Verdict.BAD_BODY_CRC.name, Verdict.BAD_PROP_CRC.name)


@dataclass(slots=True)
class RebuildReport:
    """The result of a rebuild.

    `output` is the directory with the new files.  `damage` lists damaged stretches of the log (phy offset, size, verdict); of these
    only records that fail their CRC have units and entries.  `gone` counts records of deleted topics or queues by topic.  `resumed`
    is True if only the swap of an earlier rebuild was left.  `moved_aside` are the new names of the old folders of queues, if these
    are a database now or were one.
    """

    what: tuple[str, ...]
    output: str
    records: int = 0
    units: int = 0
    index_entries: int = 0
    damage: list[tuple[int, int, str]] = field(default_factory=list)
    gone: dict[str, int] = field(default_factory=dict)
    log_bytes: int = 0
    resumed: bool = False
    seconds: float = 0.0
    moved_aside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RebuildJob:
    """The arguments of `rebuild` for the store at `root`; with `as_database` the queues become a RocksDB database."""

    root: str
    kinds: tuple[str, ...]
    config: StoreConfig | None = None
    output: str | os.PathLike[str] | None = None
    drop_units: int = 0
    as_database: bool = False

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        what: Iterable[str] = ("index", "consumequeue"),
        config: StoreConfig | None = None,
        output: str | os.PathLike[str] | None = None,
        drop_units: int = 0,
    ) -> RebuildJob:
        """Check the arguments of `rebuild`."""
        return cls(check_store_root(path), kinds_of(what), config, output, drop_units)

    @property
    def known_config(self) -> StoreConfig:
        """StoreConfig: the geometry of a running job."""
        assert self.config is not None
        return self.config

    def run(self, build: Callable[[RebuildJob, str], RebuildReport], *, resumable: bool = False) -> RebuildReport:
        """Build the files next to the old ones, and put them in place.

        Parameters
        ----------
        build : callable
            Called with this job, its geometry known, and the directory to build in.
        resumable : bool
            `build` continues the work of an earlier run in that directory, so it stays after a failure.
        """
        started = time.perf_counter()
        if self.output is not None:
            report = self._run_to(self.output, build, resumable)
        else:
            with StoreLock(self.root):
                report = self._run_in_place(build, resumable)
        report.seconds = time.perf_counter() - started
        return report

    def _with_config(self) -> RebuildJob:
        return dataclasses.replace(self, config=known_config(self.root, self.config, self.kinds, self.as_database))

    def _run_to(
        self, output: str | os.PathLike[str], build: Callable[[RebuildJob, str], RebuildReport], resumable: bool
    ) -> RebuildReport:
        job = self._with_config()
        target = free_output(output, self.kinds, self.root)
        work = os.path.join(target, REBUILD_DIRECTORY) if resumable else make_part(target, "rebuild")
        if os.path.islink(work):
            raise StoreError("a link is where the rebuild keeps what it builds; remove it", work)
        with _deleted_on_failure(work, resumable):
            report = build(job, work)
            move_built(work, target, self.kinds)
        delete_tree(work, ignore_errors=True)
        report.output = target
        return report

    def _run_in_place(self, build: Callable[[RebuildJob, str], RebuildReport], resumable: bool) -> RebuildReport:
        root, kinds = self.root, self.kinds
        work = os.path.join(root, REBUILD_DIRECTORY)
        complete = finish_swap(root, work)
        if self.as_database and complete == (QUEUE_DATABASE,):
            return RebuildReport(kinds, root, resumed=True, moved_aside=moved_aside(root, ("rocksdb", "files")))
        if not self.as_database and complete and set(kinds) <= set(complete):
            return RebuildReport(complete, root, resumed=True, moved_aside=moved_aside(root))
        job = self._with_config()
        refuse_lost_log(root, job.known_config, kinds, self.drop_units)
        if not resumable:
            delete_tree(work, ignore_errors=True)
            make_directories(work)
        with _deleted_on_failure(work, resumable):
            report = build(job, work)
        if self.as_database:
            folders = queue_databases(root)
            place = os.path.basename(folders[0]) if folders else PLACES[0]
            mark_complete(work, (QUEUE_DATABASE, place))
            report.moved_aside = swap_database(root, work, place)
            return report
        mark_complete(work, kinds)
        swap(root, work, kinds)
        save_changed(root, job.known_config)
        if "consumequeue" in kinds:
            report.moved_aside = moved_aside(root)
        return report


@contextlib.contextmanager
def _deleted_on_failure(work: str, resumable: bool) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if not resumable:
            delete_tree(work, ignore_errors=True)
        raise


def rebuild(
    path: str | os.PathLike[str],
    what: Iterable[str] = ("index", "consumequeue"),
    config: StoreConfig | None = None,
    output: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    drop_units: int = 0,
) -> RebuildReport:
    """Rebuild index and queues from the commit log.

    Parameters
    ----------
    path : path
        The store's root.  No other process may write to it.
    what : iterable of {"index", "consumequeue"}
    config : StoreConfig, optional
        The geometry; by default `StoreConfig.infer`.  Values that would change bytes must not be assumed (`config.assumed`): slot
        and entry counts, queue file size, delay levels, whether tags are indexed.
    output : path, optional
        Build into this directory, which must not contain them already, and leave the store as it is.
    progress : callable, optional
        Called with (bytes of log done, bytes of log in all).
    drop_units : int
        Number of queue units and index entries that lead outside the log and may go, as the error says.

    Returns
    -------
    RebuildReport

    Raises
    ------
    LostLogError
        Segments that the old files lead to are missing; nothing was changed.
    GeometryError
        A needed value is only assumed; the message names the option.
    StoreLockedError
        A broker or another process has the store open.
    CorruptionError
        The new files do not agree with the log; the old files are untouched.
    """
    return RebuildJob.of(path, what, config, output, drop_units).run(
        lambda job, target: _Build(job, target, progress).run()
    )


def kinds_of(what: Iterable[str] | str) -> tuple[str, ...]:
    """Return "index", "consumequeue" or both, without repeats; ValueError for anything else."""
    kinds = tuple(dict.fromkeys([what] if isinstance(what, str) else what))
    for kind in kinds:
        if kind not in FOLDERS:
            raise ValueError(f"what holds {kind!r}; give 'index', 'consumequeue' or both")
    if not kinds:
        raise ValueError("what is empty; give 'index', 'consumequeue' or both")
    return kinds


def free_output(output: str | os.PathLike[str], kinds: Iterable[str], root: str) -> str:
    """Return the directory to build into, which is outside `root`; StoreError if it contains what is to be built."""
    target = os.fspath(output)
    check_outside(target, root)
    for folder in folders_of(kinds):
        if os.path.lexists(os.path.join(target, folder)):
            raise StoreError(f"{folder} exists in the output directory; give an empty one", target)
    make_directories(target)
    return target


def known_config(
    root: str, config: StoreConfig | None, kinds: tuple[str, ...], as_database: bool = False
) -> StoreConfig:
    """Return the geometry, by default `StoreConfig.infer`.

    Raises GeometryError if a value that would change bytes is only assumed; OSError for an unreadable database of queues.
    """
    refuse_dledger(root)
    if "consumequeue" in kinds:
        check_queue_databases(root)
    config = StoreConfig.infer(root) if config is None else config
    needed = []
    if as_database or ("consumequeue" in kinds and queue_databases(root)):
        # Only records of a broker that dispatches to further queues name them; no folder of a queue shows whether it does.
        config = dataclasses.replace(config, enable_lmq=True, enable_multi_dispatch=True)
    if "index" in kinds:
        needed += ["max_hash_slot_num", "max_index_num"]
    if "consumequeue" in kinds and not as_database:
        needed += ["mapped_file_size_consume_queue"]
        if config.enable_consume_queue_ext:
            needed += ["mapped_file_size_consume_queue_ext"]
    missing = [name for name in needed if name in config.assumed]
    if missing:
        if "index" in kinds and "index_tags" in config.assumed:
            missing.append("index_tags")
        defaults = tuple(f"{name}={getattr(StoreConfig(), name)}" for name in missing)
        tags = "; index_tags=False before RocketMQ 5.4.0" if "index_tags" in missing else ""
        raise GeometryError(
            Sentence(
                f"the store does not tell {', '.join(missing)}, and a wrong value would make files that its broker misreads; "
                "give them: ",
                UseBrokerConf(),
                ", or ",
                GiveOptions(defaults),
                f" where broker.conf has none, which are RocketMQ's defaults{tags}",
            ),
            root,
        )
    return config


def refuse_lost_log(root: str, config: StoreConfig, kinds: tuple[str, ...], drop_units: int) -> None:
    """Raise LostLogError unless `drop_units` is the number of units and entries that a rebuild from this log would lose."""
    with contextlib.closing(CommitLog(root, config, MappedFilePool(4), read_only=True)) as log:
        log.load()
        checkpoint = Checkpoint.load_or_zeros(os.path.join(root, "checkpoint"))
        clean = not os.path.lexists(os.path.join(root, "abort"))
        end = end_of_known(log, log.find_end_behind_damage(), checkpoint, clean)
        refuse_loss(log, end, kinds, drop_units)


def check_config(
    path: str | os.PathLike[str], what: Iterable[str], config: StoreConfig | None = None, drop_units: int = 0
) -> None:
    """Raise the GeometryError, LostLogError or StoreLockedError of `rebuild`, as far as the first records show it."""
    root = check_store_root(path)
    kinds = kinds_of(what)
    if is_held(root):
        # The error names the owner.
        with StoreLock(root):
            pass
    if is_swapping(root):
        # Only the swap is left, which needs no option.
        return
    config = known_config(root, config, kinds)
    refuse_lost_log(root, config, kinds, drop_units)
    with contextlib.closing(CommitLog(root, config, MappedFilePool(4), read_only=True)) as log:
        log.load()
        if "consumequeue" in kinds and "message_delay_level" in config.assumed:
            for topic, _, directory in queue_directories(root, "consumequeue"):
                if topic != SCHEDULE_TOPIC:
                    continue
                look = look_at_files(directory, config.consume_queue_file_size, log.min_offset)
                # A queue whose messages are deleted is not rebuilt.
                if look is not None and look.messages:
                    raise _needs_delay_levels(root)
        log.set_end(log.find_end())
        for stretch, columns in log.scans(log.min_offset, log.max_offset, check_crc=False):
            if stretch.verdict is Verdict.RECORD:
                refuse_assumed(columns, config, kinds, root)
                break


def dispatch_log(
    job: RebuildJob,
    log: CommitLog,
    dispatcher: LogDispatcher,
    report: RebuildReport,
    progress: Callable[[int, int], None] | None,
) -> int:
    """Dispatch all records of a loaded log, count them in `report`, and return the end of the log."""
    begin, end = log.min_offset, log.find_end_behind_damage()
    log.set_end(end)
    for stretch, columns in log.scans(begin, end, keys="index" in job.kinds):
        if stretch.verdict is Verdict.RECORD:
            refuse_assumed(columns, job.known_config, job.kinds, job.root)
        dispatcher.dispatch_stretch(stretch, columns)
        if stretch.is_damage:
            report.damage.append(stretch.as_damage)
        if progress is not None:
            progress(stretch.end - begin, end - begin)
    dispatcher.finish()
    counts = dispatcher.counts
    report.damage += counts.misplaced
    report.gone, report.records = counts.gone, counts.records
    report.units, report.index_entries = counts.units, counts.index_entries
    report.log_bytes = end - begin
    return end


class _Build:
    """Builds index and queues of one store below a directory, and compares them with the log."""

    def __init__(self, job: RebuildJob, target: str, progress: Callable[[int, int], None] | None):
        self.job, self.root, self.kinds, self.config = job, job.root, job.kinds, job.known_config
        self.target, self.progress = target, progress
        self.batch_topics = {topic for topic, _, _ in queue_directories(job.root, "batchconsumequeue")}
        self.report = RebuildReport(job.kinds, job.root)

    def run(self) -> RebuildReport:
        while True:
            self.report = RebuildReport(self.kinds, self.root)
            try:
                self._run()
            except QueueKindError as error:
                # The first records of the topic were single ones: begin again, knowing its kind.
                if error.topic in self.batch_topics:
                    raise
                self.batch_topics.add(error.topic)
                for folder in folders_of(self.kinds):
                    delete_tree(os.path.join(self.target, folder), ignore_errors=True)
            else:
                return self.report

    def _run(self) -> None:
        # Imported here because the command line imports this module for every command.
        from concurrent.futures import ThreadPoolExecutor

        report = self.report
        log_pool, pool = MappedFilePool(4), MappedFilePool(self.config.max_mapped_files)
        log = CommitLog(self.root, self.config, log_pool, read_only=True)
        queues = ConsumeQueueStore(self.target, self.config, pool) if "consumequeue" in self.kinds else None
        index_service = IndexService(self.target, self.config) if "index" in self.kinds else None
        parts: list[ConsumeQueueStore | IndexService] = [each for each in (queues, index_service) if each is not None]
        if index_service is not None:
            # Most of the new index files never grow.
            index_service.sparse = True
        try:
            log.load()
            if queues is not None:
                queues.load_topics(os.path.join(self.root, "config", "topics.json"))
                for topic in self.batch_topics:
                    queues.add_batch_topic(topic)
            dispatcher = LogDispatcher(self.root, log, queues, index_service)
            dispatcher.refuse_mixed_topics = True
            end = dispatch_log(self.job, log, dispatcher, report, self.progress)
            # All CRCs were compared above, and are again only if one of them was wrong.
            corrupt = any(verdict in _CORRUPT for _, _, verdict in report.damage)
            with ThreadPoolExecutor(1, "rmqstore-flush") as thread:
                flushed = thread.submit(lambda: [part.flush() for part in parts])
                self._verify(end, corrupt, without_unit(dispatcher.counts.misplaced))
                flushed.result()
        finally:
            for part in (log, *parts):
                part.close()
        for kind in self.kinds:
            # Without such records the folder is empty, so that the swap replaces the old one.
            make_directories(os.path.join(self.target, kind))

    def _verify(self, end: int, corrupt: bool, misplaced: frozenset[int]) -> None:
        log = CommitLog(self.root, self.config, MappedFilePool(self.config.max_mapped_files), read_only=True)
        compared = Compared(log, self.root, self.config, parts_root=self.target, kinds=self.kinds)
        compared.check_crc, compared.without_unit = corrupt, misplaced
        with contextlib.closing(log), contextlib.closing(compared):
            refuse_findings(verify_parts(compared, end))


def refuse_findings(findings: Iterable[Finding]) -> None:
    """Raise CorruptionError for the first finding about rebuilt files."""
    for finding in findings:
        raise CorruptionError(
            f"what was rebuilt does not agree with the log ({finding.kind}: {finding.detail}); nothing was swapped in, please "
            "report this",
            finding.path,
            finding.pos,
        )


def refuse_assumed(columns: RecordColumns, config: StoreConfig, kinds: tuple[str, ...], root: str) -> None:
    """Raise GeometryError if the records need delay levels or the tag switch, and those are only assumed."""
    if "consumequeue" in kinds and "message_delay_level" in config.assumed:
        topics = columns.topics.topics
        if SCHEDULE_TOPIC.encode() in topics:
            raise _needs_delay_levels(root)
    if "index" in kinds and "index_tags" in config.assumed and (columns.tags_code[: columns.count] != 0).any():
        raise GeometryError(
            Sentence(
                "the log holds tagged messages, and nothing tells whether the broker indexes tags; give ",
                GiveOptions(("index_tags=True",)),
                " for RocketMQ 5.4.0 and later, False before",
            ),
            root,
        )


def _needs_delay_levels(root: str) -> GeometryError:
    return GeometryError(
        Sentence(
            "the log holds delayed messages, whose queue units depend on the broker's delay levels; give message_delay_level as "
            "broker.conf has it; without one there it is ",
            GiveOptions((f"message_delay_level={StoreConfig().message_delay_level!r}",)),
        ),
        root,
    )
