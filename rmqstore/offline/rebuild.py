"""rebuild: the index and the consume queues of a store, rebuilt from its commit log alone.

Owns building beside the old files, checking what was built against the log, and swapping it in by rename.  It never
changes the commit log, and the old files stay in place until the new ones are complete, verified and on disk.  The bytes
are those that the broker wrote (RocketMQ 5.5.0, or before 5.4.0 with ``index_tags=False``), file names of the index
aside.

A rebuild that was killed while building starts again; one that was killed while swapping goes on with the swap.  A database of
queues (RocksDB) is never deleted: it is moved aside, and queue files take its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from rmqstore import _core
from rmqstore._core import Verdict
from rmqstore._dispatch import RecordColumns
from rmqstore.commitlog.commit_log import CommitLog, check_store_root
from rmqstore.config import StoreConfig
from rmqstore.config.dledger import refuse_dledger
from rmqstore.consumequeue.consume_queue_store import ConsumeQueueStore
from rmqstore.consumequeue.queue_folders import queue_directories
from rmqstore.consumequeue.queue_look import look_at_files
from rmqstore.errors import CorruptionError, Finding, GeometryError, StoreError
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.files.durable import fsync_directory, make_directories
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import MappedFilePool
from rmqstore.files.open_file import open_regular
from rmqstore.files.os_errors import naming_errors
from rmqstore.files.output_file import check_outside, make_part
from rmqstore.files.store_lock import StoreLock, is_held
from rmqstore.index.index_service import IndexService
from rmqstore.message import SCHEDULE_TOPIC
from rmqstore.offline.verify import verify_parts
from rmqstore.remedies import GiveOptions, Sentence, UseBrokerConf
from rmqstore.rocksdb.database import is_database
from rmqstore.rocksdb.places import PLACES, check_queue_databases, queue_databases
from rmqstore.store.dispatch_rules import without_unit
from rmqstore.store.dispatcher import LogDispatcher, QueueKindError
from rmqstore.store.lost_log import end_of_known, refuse_loss
from rmqstore.store.opening import REBUILD_COMPLETE, REBUILD_DIRECTORY, is_swapping

__all__ = ["REBUILD_DIRECTORY", "RebuildJob", "RebuildReport", "check_config", "rebuild"]

logger = logging.getLogger(__name__)

QUEUE_DATABASE = "queue_database"
"""What is complete where it is a database of queues (`rebuild_queue_database`); the name of its place follows."""
# Verdicts on records whose lengths are whole.
_CORRUPT = (Verdict.BAD_BODY_CRC.name, Verdict.BAD_PROP_CRC.name)
_FOLDERS = {"index": ("index",), "consumequeue": ("consumequeue", "batchconsumequeue", "consumequeue_ext")}


@dataclass(slots=True)
class RebuildReport:
    """What a rebuild did.

    Attributes
    ----------
    what : tuple of str
        "index", "consumequeue" or both.
    output : str
        The directory that holds the new files: the store itself after a swap.
    records, units, index_entries : int
        Records read, queue units and index entries written.
    damage : list of (int, int, str)
        Stretches of the log that could not be read: phy offset, size, verdict.  Nothing was built of them, except of
        records that only fail their CRC.
    gone : dict of str to int
        By topic, the records that got no unit because their topic, or their queue of that name, was deleted.
    log_bytes : int
        Bytes of log that were read.
    resumed : bool
        An earlier rebuild was complete, only the swap was left.
    seconds : float
    moved_aside : tuple of str
        Folders that held the queues in RocksDB and were kept, as they are called now; also those with queue files
        where a database replaces them.
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
    """What is rebuilt, of which store, and where to.

    Attributes
    ----------
    root : str
        The store's directory.
    kinds : tuple of str
        "index", "consumequeue" or both.
    config, output, drop_units
        As for `rebuild`.
    """

    root: str
    kinds: tuple[str, ...]
    config: StoreConfig | None = None
    output: str | os.PathLike[str] | None = None
    drop_units: int = 0

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
        """StoreConfig: the geometry of a job that is being run."""
        assert self.config is not None
        return self.config

    def run(self, build: Callable[[RebuildJob, str], RebuildReport], *, resumable: bool = False) -> RebuildReport:
        """Have the files built next to the old ones, and put them in place.

        Parameters
        ----------
        build : callable
            Called with this job, its geometry known, and the directory to build in.
        resumable : bool
            `build` continues with what an earlier run left in that directory, so that it stays after a failure.
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
        return dataclasses.replace(self, config=known_config(self.root, self.config, self.kinds))

    def _run_to(
        self,
        output: str | os.PathLike[str],
        build: Callable[[RebuildJob, str], RebuildReport],
        resumable: bool,
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
        if complete and set(kinds) <= set(complete):
            return RebuildReport(complete, root, resumed=True, moved_aside=moved_aside(root))
        job = self._with_config()
        refuse_lost_log(root, job.known_config, kinds, self.drop_units)
        if not resumable:
            delete_tree(work, ignore_errors=True)
            make_directories(work)
        with _deleted_on_failure(work, resumable):
            report = build(job, work)
        mark_complete(work, kinds)
        swap(root, work, kinds)
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
        The store's root.  Nobody else may have it open for writing.
    what : iterable of {"index", "consumequeue"}
    config : StoreConfig, optional
        The geometry; by default `StoreConfig.infer`.  Values that would change bytes and that the store does not tell
        (`config.assumed`) must be given: slot and entry counts, queue file size, delay levels, whether tags are indexed.
    output : path, optional
        Build into this directory, which must not hold them already, and leave the store as it is.
    progress : callable, optional
        Called with (bytes of log done, bytes of log in all), now and then and at the end.
    drop_units : int
        How many queue units and index entries may go that lead outside the log; the error says how many there are.

    Returns
    -------
    RebuildReport

    Raises
    ------
    LostLogError
        Segments are missing that the files to be replaced lead to; nothing was changed.
    GeometryError
        A needed value is only assumed; the message names the option to give.
    StoreLockedError
        A broker or another process has the store open.
    CorruptionError
        What was built does not agree with the log; the old files are untouched.
    """
    return RebuildJob.of(path, what, config, output, drop_units).run(functools.partial(_build, progress=progress))


def kinds_of(what: Iterable[str] | str) -> tuple[str, ...]:
    """tuple of str: "index", "consumequeue" or both, as asked for; ValueError for anything else."""
    kinds = tuple(dict.fromkeys([what] if isinstance(what, str) else what))
    for kind in kinds:
        if kind not in _FOLDERS:
            raise ValueError(f"what holds {kind!r}; give 'index', 'consumequeue' or both")
    if not kinds:
        raise ValueError("what is empty; give 'index', 'consumequeue' or both")
    return kinds


def free_output(output: str | os.PathLike[str], kinds: Iterable[str], root: str) -> str:
    """Return the directory to build into, made if it is missing; StoreError if it holds what is to be built.

    Parameters
    ----------
    root : str
        The store, which the directory must not be in.
    """
    target = os.fspath(output)
    check_outside(target, root)
    for folder in folders_of(kinds):
        if os.path.lexists(os.path.join(target, folder)):
            raise StoreError(f"{folder} exists in the output directory; give an empty one", target)
    make_directories(target)
    return target


def move_built(work: str, target: str, kinds: Iterable[str]) -> None:
    """Give the folders that were built in `work` their names in `target`; what has such a name by now is not replaced."""
    for folder in folders_of(kinds):
        if os.path.isdir(os.path.join(work, folder)):
            os.rename(os.path.join(work, folder), os.path.join(target, folder))
    fsync_directory(target)


def mark_complete(work: str, kinds: Iterable[str]) -> None:
    """Say that the folders in `work` are whole, so that only the swap is left: whole or not there at all, also after a
    power failure."""
    marker = os.path.join(work, REBUILD_COMPLETE)
    with naming_errors(marker + ".new"), open(marker + ".new", "w", encoding="ascii") as file:
        file.write(" ".join(kinds))
        file.flush()
        os.fsync(file.fileno())
    os.rename(marker + ".new", marker)
    fsync_directory(work)


def finish_swap(root: str, work: str) -> tuple[str, ...]:
    """tuple of str: what an earlier rebuild had made ready, which is swapped in now; empty if there is none.

    It is kinds as of `rebuild`, or `QUEUE_DATABASE` alone.
    """
    marker = os.path.join(work, REBUILD_COMPLETE)
    if not os.path.exists(marker):
        return ()
    with open(open_regular(marker), encoding="ascii") as file:
        complete = tuple(file.read().split())
    if complete[:1] == (QUEUE_DATABASE,):
        swap_database(root, work, complete[1])
        return complete[:1]
    swap(root, work, complete)
    return complete


def folders_of(kinds: Iterable[str]) -> list[str]:
    """list of str: the folders of a store that these kinds are in."""
    return [folder for kind in kinds for folder in _FOLDERS[kind]]


def known_config(root: str, config: StoreConfig | None, kinds: tuple[str, ...]) -> StoreConfig:
    """The geometry, by default `StoreConfig.infer`; GeometryError where a value that would change bytes is only assumed.

    OSError where queues may be in a database that this user may not look into: it would be moved aside unseen.
    """
    refuse_dledger(root)
    if "consumequeue" in kinds:
        check_queue_databases(root)
    config = StoreConfig.infer(root) if config is None else config
    needed = []
    if "consumequeue" in kinds and queue_databases(root):
        # No folder of a queue tells whether a broker dispatches to further queues; only one that does says in a record which.
        config = dataclasses.replace(config, enable_lmq=True, enable_multi_dispatch=True)
    if "index" in kinds:
        needed += ["max_hash_slot_num", "max_index_num"]
    if "consumequeue" in kinds:
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
    log = CommitLog(root, config, MappedFilePool(4), read_only=True)
    try:
        log.load()
        checkpoint = Checkpoint.load_or_zeros(os.path.join(root, "checkpoint"))
        clean = not os.path.lexists(os.path.join(root, "abort"))
        end = end_of_known(log, log.find_end_behind_damage(), checkpoint, clean)
        refuse_loss(log, end, kinds, drop_units)
    finally:
        log.close()


def check_config(
    path: str | os.PathLike[str], what: Iterable[str], config: StoreConfig | None = None, drop_units: int = 0
) -> None:
    """Say at once, before anybody is asked or anything is built, which option a rebuild would refuse to work without.

    The names of queues and the first records tell most of it.  What only a later record needs, the rebuild itself says.

    Raises
    ------
    GeometryError, LostLogError, StoreLockedError
        As of `rebuild`.
    """
    root = check_store_root(path)
    kinds = kinds_of(what)
    if is_held(root):
        # Says by whom.
        with StoreLock(root):
            pass
    if is_swapping(root):
        # Only the swap is left, which needs no option.
        return
    config = known_config(root, config, kinds)
    refuse_lost_log(root, config, kinds, drop_units)
    log = CommitLog(root, config, MappedFilePool(config.max_mapped_files), read_only=True)
    try:
        log.load()
        if "consumequeue" in kinds and "message_delay_level" in config.assumed:
            for topic, _, directory in queue_directories(root, "consumequeue"):
                if topic != SCHEDULE_TOPIC:
                    continue
                look = look_at_files(directory, config.consume_queue_file_size, log.min_offset)
                # Of one whose messages are deleted nothing is written.
                if look is not None and look.messages:
                    raise _needs_delay_levels(root)
        log.set_end(log.find_end())
        for stretch, columns in log.scans(log.min_offset, log.max_offset, check_crc=False):
            if stretch.verdict is Verdict.RECORD:
                refuse_assumed(columns, config, kinds, root)
                break
    finally:
        log.close()


def _build(job: RebuildJob, target: str, progress: Callable[[int, int], None] | None) -> RebuildReport:
    batch_topics = {topic for topic, _, _ in queue_directories(job.root, "batchconsumequeue")}
    while True:
        try:
            return _build_once(job, target, progress, batch_topics)
        except QueueKindError as error:
            # The first records of the topic were single ones: begin again, knowing its kind.
            if error.topic in batch_topics:
                raise
            batch_topics.add(error.topic)
            _remove(target, job.kinds)


def delete_tree(path: str, ignore_errors: bool = False) -> None:
    """Delete a directory and all that is in it."""
    # Imported here because it brings the compression libraries along, which no other module of a plain import needs.
    import shutil

    shutil.rmtree(path, ignore_errors=ignore_errors)


def _remove(target: str, kinds: tuple[str, ...]) -> None:
    for folder in folders_of(kinds):
        delete_tree(os.path.join(target, folder), ignore_errors=True)


def _build_once(
    job: RebuildJob, target: str, progress: Callable[[int, int], None] | None, batch_topics: set[str]
) -> RebuildReport:
    # Imported here because the command line imports this module for every command.
    from concurrent.futures import ThreadPoolExecutor

    root, kinds, config = job.root, job.kinds, job.known_config
    report = RebuildReport(kinds, root)
    # Nobody writes to most of the files that are built, so that their holes may stay what they are.
    log_pool, pool = MappedFilePool(4), MappedFilePool(config.max_mapped_files, sparse=True)
    commit_log = CommitLog(root, config, log_pool, read_only=True)
    queues = ConsumeQueueStore(target, config, pool) if "consumequeue" in kinds else None
    index_service = IndexService(target, config) if "index" in kinds else None
    if index_service is not None:
        index_service.sparse = True
    try:
        commit_log.load()
        if queues is not None:
            queues.load_topics(os.path.join(root, "config", "topics.json"))
            for topic in batch_topics:
                queues.add_batch_topic(topic)
        dispatcher = LogDispatcher(root, commit_log, queues, index_service)
        dispatcher.refuse_mixed_topics = True
        begin = commit_log.min_offset
        if progress is None:
            # Whole records are what they are; where the log ends is asked only when something else comes.
            commit_log.set_end(max((base + commit_log.segment_size for base in commit_log.files.offsets), default=0))
            at, verdict = _dispatch_log(
                commit_log, dispatcher, report, begin, commit_log.max_offset, None, resume=False
            )
            end = commit_log.find_end_behind_damage(at if verdict is Verdict.EMPTY else -1)
        else:
            at, end = begin, commit_log.find_end_behind_damage()
        commit_log.set_end(end)
        _dispatch_log(commit_log, dispatcher, report, at, end, progress)
        dispatcher.finish()
        report.gone = dispatcher.counts.gone
        report.records = dispatcher.counts.records
        report.units, report.index_entries = dispatcher.counts.units, dispatcher.counts.index_entries
        # Every CRC was compared just now, and is only once more if one of them was wrong.
        corrupt = any(verdict in _CORRUPT for _, _, verdict in report.damage)
        report.damage += dispatcher.counts.misplaced
        report.log_bytes = end - begin
        with ThreadPoolExecutor(1, "rmqstore-flush") as thread:
            # The disk has time until the new files take their place.
            flushed = thread.submit(_flush, queues, index_service)
            misplaced = without_unit(dispatcher.counts.misplaced)
            wrong = verify_parts(
                root,
                target,
                config,
                queues=queues is not None,
                index=index_service is not None,
                end=end,
                check_crc=corrupt,
                without_unit=misplaced,
            )
            refuse_findings(wrong)
            flushed.result()
    finally:
        commit_log.close()
        if queues is not None:
            queues.close()
        if index_service is not None:
            index_service.close()
    for folder in folders_of(kinds):
        # A store without such records has the folder all the same, so that the swap takes the old one away.
        make_directories(os.path.join(target, folder)) if folder in kinds else None
    return report


def _dispatch_log(
    commit_log: CommitLog,
    dispatcher: LogDispatcher,
    report: RebuildReport,
    begin: int,
    end: int,
    progress: Callable[[int, int], None] | None,
    *,
    resume: bool = True,
) -> tuple[int, Verdict | None]:
    # Dispatches the records from `begin` to `end`, past damage or up to it; where it stopped, and what is there.
    for stretch, columns in commit_log.scans(begin, end, resume=resume):
        if stretch.verdict is Verdict.RECORD:
            refuse_assumed(columns, commit_log.config, report.what, report.output)
        elif stretch.verdict is not Verdict.BLANK and not resume:
            return stretch.begin, stretch.verdict
        dispatcher.dispatch_stretch(stretch, columns)
        if stretch.is_damage:
            report.damage.append(stretch.as_damage)
        if progress is not None:
            progress(stretch.end - begin, end - begin)
    return end, Verdict.LIMIT


def _flush(queues: ConsumeQueueStore | None, index_service: IndexService | None) -> None:
    if queues is not None:
        queues.flush()
    if index_service is not None:
        index_service.flush()


def refuse_findings(findings: Iterable[Finding]) -> None:
    """Raise CorruptionError for the first of what was found wrong in what was rebuilt."""
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


def swap(root: str, work: str, kinds: tuple[str, ...]) -> None:
    """Put the new folders in place of the old ones; each step may be the last before a kill, and is not done twice."""
    for folder in folders_of(kinds):
        new, place, old = (
            os.path.join(work, folder),
            os.path.join(root, folder),
            os.path.join(work, "old-" + folder),
        )
        if os.path.isdir(new):
            if is_database(place):
                _move_aside(root, folder, "rocksdb")
            if os.path.isdir(place) and not os.path.exists(old):
                os.rename(place, old)
            os.rename(new, place)
        elif (
            folder not in kinds
            and os.path.isdir(place)
            and not os.path.exists(old)
            and not _has_been_swapped(work, folder)
        ):
            # The log has no records for this kind of queue, so what lay there is stale.
            os.rename(place, old)
        with open(os.path.join(work, "swapped-" + folder), "w"):
            pass
        fsync_directory(work)
        fsync_directory(root)
    if "consumequeue" in kinds:
        for place in queue_databases(root):
            _move_aside(root, os.path.basename(place), "rocksdb")
        fsync_directory(root)
    if "index" in kinds:
        _raise_checkpoint(root)
    _clear(root, work)


def swap_database(root: str, work: str, folder: str) -> tuple[str, ...]:
    """Put the new database of queues in the place `folder`, as of `swap`; the folders that were moved aside."""
    new, place = os.path.join(work, "queues"), os.path.join(root, folder)
    aside = []
    if os.path.isdir(new):
        # A broker does not start while there is a database in the other place too.
        for old in dict.fromkeys((*queue_databases(root), place)):
            if os.path.isdir(old):
                aside.append(_move_aside(root, os.path.basename(old), "rocksdb" if is_database(old) else "files"))
        os.rename(new, place)
    fsync_directory(work)
    fsync_directory(root)
    _clear(root, work)
    return tuple(aside)


def _clear(root: str, work: str) -> None:
    # Without the marker what is left is only rubbish, in whatever order it goes.
    os.unlink(os.path.join(work, REBUILD_COMPLETE))
    fsync_directory(work)
    try:
        delete_tree(work)
    except OSError as error:
        logger.warning("%s is no longer needed, but could not be deleted: %s", work, error)
    fsync_directory(root)


def _move_aside(root: str, folder: str, kind: str) -> str:
    # Beside the other folders of the store, where a broker passes over it.
    number = 1
    while os.path.exists(aside := os.path.join(root, f"{folder}.{kind}-{number}")):
        number += 1
    os.rename(os.path.join(root, folder), aside)
    logger.info("what held queues in %s is called %s now", folder, aside)
    return aside


def moved_aside(root: str, kinds: tuple[str, ...] = ("rocksdb",)) -> tuple[str, ...]:
    """tuple of str: the folders of queues that rebuilds moved aside, of these kinds ("rocksdb", "files")."""
    found = []
    for name in listing(root).checked().names:
        folder, _, end = name.rpartition(".")
        kind, _, number = end.partition("-")
        path = os.path.join(root, name)
        if folder in PLACES and kind in kinds and number.isdigit() and (kind == "files" or is_database(path)):
            found.append(path)
    return tuple(sorted(found))


def _has_been_swapped(work: str, folder: str) -> bool:
    return os.path.exists(os.path.join(work, "swapped-" + folder))


def _raise_checkpoint(root: str) -> None:
    # A real broker that finds an abort file deletes index files newer than this time (RocketMQ 5.5.0).
    directory = os.path.join(root, "index")
    names = listing(directory, lambda entry: entry.name.isdigit()).existing().names
    try:
        checkpoint = Checkpoint.load(os.path.join(root, "checkpoint"))
    except GeometryError as error:
        # No writer opens the store with it, so that nobody trusts it; what was built is right all the same.
        logger.warning("%s", error)
        return
    if names:
        with open(open_regular(os.path.join(directory, names[-1])), "rb") as file:
            file.seek(int(_core.IndexLayout.INDEX_END_TIMESTAMP))
            end = int.from_bytes(file.read(8), "big", signed=True)
        checkpoint.index_msg_timestamp = max(checkpoint.index_msg_timestamp, end)
        checkpoint.flush()
