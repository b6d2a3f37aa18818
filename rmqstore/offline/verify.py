"""verify: everything in a store that is not as a writer leaves it, as values.

Owns the comparison of the commit log with itself (lengths, offsets, CRCs) and of checkpoint and config files with the
log; `verify_units` and `verify_entries` compare queues and index with the records that pass here.  It only reads, keeps
a constant working set however long the log is, never stops at the first finding, and answers with `Finding` values
instead of exceptions.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from rmqstore import _core
from rmqstore import _numpy as np
from rmqstore._core import Verdict
from rmqstore._dispatch import RecordColumns
from rmqstore.commitlog.commit_log import CommitLog, check_store_root
from rmqstore.commitlog.log_walk import DAMAGE_KINDS, Stretch
from rmqstore.config import StoreConfig
from rmqstore.config.dledger import dledger_folders
from rmqstore.consumequeue.batch_consume_queue import BatchConsumeQueue
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.consume_queue_store import ConsumeQueueStore
from rmqstore.errors import (
    CorruptionError,
    Finding,
    GeometryError,
    MissingDependencyError,
    StoreError,
    finding_of,
)
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import MappedFilePool
from rmqstore.files.open_file import why_unreadable
from rmqstore.files.os_errors import is_unreadable
from rmqstore.files.unread import UnreadPart
from rmqstore.index.index_service import IndexService, is_index_name
from rmqstore.message import SCHEDULE_TOPIC, MessageExt, SysFlag, body_findings, decode_java_utf8, is_queued
from rmqstore.offline.verify_databases import has_index_database, verify_index_database
from rmqstore.offline.verify_entries import IndexCheck
from rmqstore.offline.verify_queue_database import QueueDatabaseCheck
from rmqstore.offline.verify_units import QueueCheck, unread_database, unread_file, unread_folder
from rmqstore.remedies import Sentence
from rmqstore.store.dispatch_rules import multi_dispatch_places, multi_dispatch_problem
from rmqstore.store.lost_log import end_of_known, units_outside
from rmqstore.store.opening import REBUILD_DIRECTORY, SWAPPING, is_swapping
from rmqstore.store.queue_lives import DeletedTopics, gone_text

if TYPE_CHECKING:
    from rmqstore.consumer.settings_sources import SettingsKind

__all__ = ["Finding", "verify"]

logger = logging.getLogger(__name__)

_INNER_BATCH, _COMPRESSED = SysFlag.INNER_BATCH.value, SysFlag.COMPRESSED.value


def verify(
    path: str | os.PathLike[str],
    config: StoreConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Finding]:
    """Look for everything that is wrong in the store at `path`; nothing is changed.

    Parameters
    ----------
    path : path
        The store's root.
    config : StoreConfig, optional
        Its geometry; by default `StoreConfig.infer`.  What cannot be told from the files alone (`config.assumed`: delay
        levels for instance) is not held against them.
    progress : callable, optional
        Called with (bytes of log done, bytes of log in all), now and then and at the end.

    Yields
    ------
    Finding
        In the order interrupted rebuild, log, queues and index (as the log goes on), index in RocksDB, what waits,
        checkpoint, settings.

    Raises
    ------
    StoreError
        There is no such directory.
    """
    root = check_store_root(path)
    if config is None:
        try:
            config = StoreConfig.infer(root, read_only=True)
        except (GeometryError, StoreError) as error:
            yield finding_of(error, "geometry", root)
            return
    checker = _Checker(root, config)
    checker.progress = progress
    try:
        yield from checker.run()
    finally:
        checker.close()


def verify_parts(
    log_root: str,
    parts_root: str,
    config: StoreConfig,
    *,
    queues: bool,
    index: bool,
    end: int | None = None,
    check_crc: bool = True,
    without_unit: frozenset[int] = frozenset(),
) -> Iterator[Finding]:
    """Compare queues and index below `parts_root` with the log below `log_root`; only what is wrong with the former.

    Used by a rebuild on what it built, so the log's own damage is not a finding here.

    Parameters
    ----------
    end : int, optional
        Where the log ends, if that is known.
    check_crc : bool
        Take a record whose CRC fails for damage.  Otherwise it is compared like every other.
    without_unit : frozenset of int
        Phy offsets of records whose queue offset or topic cannot be, so that they have no unit.
    """
    checker = _Checker(log_root, config, parts_root=parts_root, with_queues=queues, with_index=index)
    checker.check_crc, checker.without_unit = check_crc, without_unit
    try:
        for finding in checker.run_parts(end):
            if not finding.path.startswith(checker.commit_log.path):
                yield finding
    finally:
        checker.close()


def verify_records(
    commit_log: CommitLog,
    parts_root: str,
    config: StoreConfig,
    columns: RecordColumns,
    stretches: Iterable[Stretch],
    *,
    queues: bool,
    batch_topics: Iterable[str] = (),
    first_entry: int | None = None,
    without_unit: frozenset[int] = frozenset(),
    without_queue: frozenset[tuple[str, int]] = frozenset(),
) -> tuple[list[Finding], dict[tuple[str, int], int], int]:
    """Compare queues and index below `parts_root` with some of the records of a log.

    Parameters
    ----------
    columns : RecordColumns
        Filled by `stretches`.
    stretches : iterable of Stretch
        As of `CommitLog.stretches` without a look at CRCs.
    queues : bool
        Look at the units.
    batch_topics : iterable of str
        Topics with batch queues.
    first_entry : int, optional
        Number of the first record's first entry in the whole index, from 0 on; all files but the last are full.  None looks
        at no entries.
    without_unit : frozenset of int
        As of `verify_parts`.
    without_queue : frozenset of (str, int)
        Queues that have no unit, as their topic was deleted.

    Returns
    -------
    (list of Finding, dict of (str, int) to int, int)
        What is wrong, 100 findings at the most; units of each queue that belong to these records; number after the last
        entry.
    """
    checker = _Checker(
        parts_root, config, with_queues=queues, with_index=first_entry is not None, commit_log=commit_log
    )
    checker.without_unit, checker.without_queue, checker.is_built = without_unit, without_queue, True
    findings: list[Finding] = []
    try:
        for topic in batch_topics:
            checker.queues.add_batch_topic(topic)
        if first_entry is not None:
            findings += checker.load_index()
        entries = IndexCheck(checker.index_service, commit_log)
        per_file = config.max_index_num - 1
        entries.go_to((first_entry or 0) // per_file, (first_entry or 0) % per_file + 1)
        for stretch in stretches:
            if stretch.verdict is Verdict.RECORD:
                findings += checker.records(columns, lists=False)
                findings += entries.records(columns)
            if len(findings) >= 100:
                break
        for check in checker.queue_checks.values():
            findings += [*check.end_run(), *check.missing_queue()]
        covered = {key: check.covered for key, check in checker.queue_checks.items()}
        return findings, covered, entries.file_number * per_file + entries.entry - 1
    finally:
        checker.queues.close()
        checker.index_service.close()


def verify_index_file(
    commit_log: CommitLog, parts_root: str, config: StoreConfig, name: str, end: int
) -> list[Finding]:
    """Compare slots, chains and header of one index file below `parts_root` with its entries; `end` is the log's."""
    checker = _Checker(parts_root, config, with_queues=False, commit_log=commit_log)
    try:
        checker.index_service.take([name])
        return list(IndexCheck(checker.index_service, commit_log).begin(end))
    finally:
        checker.index_service.close()


def verify_queue(
    commit_log: CommitLog,
    parts_root: str,
    config: StoreConfig,
    topic: str,
    queue_id: int,
    covered: int,
    *,
    batch: bool,
) -> list[Finding]:
    """Look for what belongs to no record in one queue below `parts_root`, of whose units `covered` do."""
    checker = _Checker(parts_root, config, with_index=False, commit_log=commit_log)
    try:
        if batch:
            checker.queues.add_batch_topic(topic)
        checker.queues.find_or_create(topic, queue_id)
        check = checker.check_of(topic, queue_id)
        check.covered = covered
        return list(check.finish())
    finally:
        checker.queues.close()


def _may_be_file(path: str) -> bool:
    # Where a folder may be listed and not searched, nobody knows what a name stands for; reading it says so.
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        return is_unreadable(error)


class _Checker:
    def __init__(
        self,
        root: str,
        config: StoreConfig,
        *,
        parts_root: str | None = None,
        with_queues: bool = True,
        with_index: bool = True,
        commit_log: CommitLog | None = None,
    ):
        self.root = root
        self.config = config
        self.with_queues = with_queues
        self.with_index = with_index
        parts_root = root if parts_root is None else parts_root
        self.pool = MappedFilePool(config.max_mapped_files)
        self.commit_log = CommitLog(root, config, self.pool, read_only=True) if commit_log is None else commit_log
        self.queues = ConsumeQueueStore(parts_root, config, self.pool, read_only=True, pass_over=True)
        self.index_service = IndexService(parts_root, config, read_only=True)
        self.queue_checks: dict[tuple[str, int], QueueCheck] = {}
        # By name of a further queue the number after the one that a record named last.
        self.further_numbers: dict[str, int] = {}
        self.last_timestamp = 0
        self.end = 0
        self.progress: Callable[[int, int], None] | None = None
        self.check_crc = True
        self.without_unit: frozenset[int] = frozenset()
        self.without_queue: frozenset[tuple[str, int]] = frozenset()
        self.deleted = DeletedTopics(root)
        # Of a store with queues in RocksDB; then only queues that have files are compared with those.
        self.database: QueueDatabaseCheck | None = None
        self.listed: frozenset[tuple[str, int]] = frozenset()
        # Phy offsets, begin and end, of segments that cannot be read; ascending.
        self.unread: list[tuple[int, int]] = []
        self.index_is_unread = False
        self.is_built = False
        # Say how many records belong to no queue that is there; a rebuild says so itself.
        self.tells_gone = False
        # Errors about missing libraries that were reported.
        self.missing: set[str] = set()

    def close(self) -> None:
        self.commit_log.close()
        self.queues.close()
        if self.database is not None:
            self.database.close()
        self.index_service.close()

    def run(self) -> Iterator[Finding]:
        named = set(dledger_folders(self.root))
        for finding in self._compared():
            named.add(finding.path)
            yield finding
        yield from self._unread(named)

    def _compared(self) -> Iterator[Finding]:
        if is_swapping(self.root):
            yield Finding(os.path.join(self.root, REBUILD_DIRECTORY), 0, "interrupted_rebuild", SWAPPING)
        for folder in dledger_folders(self.root):
            yield Finding(
                folder,
                0,
                "not_checked",
                "the commit log is DLedger's, or goes on there (enableDLegerCommitLog=true), which this package does not "
                f"read: what leads there is called dangling. It has {UnreadPart.of(folder).size} bytes",
            )
        self.database = QueueDatabaseCheck.of(self.root, self.config, self.commit_log)
        self.tells_gone = True
        yield from self.run_parts()
        yield from self._lost_end()
        yield from verify_index_database(self.commit_log, self.root, self.end)
        # It brings NumPy along.
        from rmqstore.offline.verify_waiting import verify_waiting

        yield from verify_waiting(self.commit_log, self.root)
        yield from self._checkpoint()
        yield from self._config_files()

    def _unread(self, named: set[str]) -> Iterator[Finding]:
        from rmqstore.offline.layout import unread_in

        for part in unread_in(self.root):
            if part.path not in named:
                yield Finding(part.path, 0, "not_read", f"{part.size} bytes in {part.files} files are not read, nor verified")

    def run_parts(self, end: int | None = None) -> Iterator[Finding]:
        """The log, queues and index."""
        problems: list[Finding] = []
        self.commit_log.files.load(lambda error: problems.append(finding_of(error, "file", self.commit_log.path)))
        problems += self._leave_out_unread()
        if self.with_queues:
            try:
                self.queues.load()
            except StoreError as error:
                problems.append(finding_of(error, "file", self.root))
            databases = () if self.database is None else self.database.folders
            problems += [
                unread_folder(folder, error)
                for folder, error in self.queues.unseen.items()
                if folder not in databases
            ]
            self.listed = frozenset(self.queues.keys())
        if self.with_index:
            problems += self.load_index()
        yield from problems
        # A newest segment that cannot be read may be full.
        unread_to = max((last for _, last in self.unread), default=0)
        self.end = max(self.commit_log.find_end_behind_damage(), unread_to) if end is None else end
        self.commit_log.set_end(self.end)
        entries = IndexCheck(self.index_service, self.commit_log)
        yield from entries.begin(self.end)
        if self.database is not None:
            yield from self.database.begin()
        yield from self._log(entries)
        yield from self._missing_index(entries)
        yield from entries.finish()
        if self.with_queues:
            yield from self._queues()
        if self.database is not None:
            yield from self.database.finish(self.end)

    def _leave_out_unread(self) -> list[Finding]:
        problems: list[Finding] = []
        files = self.commit_log.files
        good = []
        for base in files.offsets:
            path = files.file(base).path
            error = why_unreadable(path)
            if error is None:
                good.append(base)
                continue
            problems.append(unread_file(path, error, "what leads to its records is not compared with them"))
            self.unread.append((base, base + self.commit_log.segment_size))
        if problems:
            files.take(good, files.wrote_where)
        return problems

    def _is_unread(self, stretch: Stretch) -> bool:
        # All that no segment holds there lies in segments that cannot be read.
        if stretch.verdict is not None:
            return False
        at = stretch.begin
        for begin, end in self.unread:
            if begin <= at < end:
                at = end
        return at >= stretch.end

    def load_index(self) -> list[Finding]:
        """What is wrong with the names and lengths of index files; the others are taken."""
        problems: list[Finding] = []
        found = listing(self.index_service.path)
        if found.unreadable is not None:
            self.index_is_unread = True
            path = self.index_service.path
            return [finding_of(self.index_service.folder_not_given_out(found.unreadable), "file", path)]
        if found.problem is not None:
            raise found.problem
        good = []
        for name, path in zip(found.names, found.paths):
            if not is_index_name(name) or not _may_be_file(path):
                problems.append(Finding(path, 0, "file", "no part of the store; a directory here stops a real broker"))
                continue
            error = why_unreadable(path)
            if error is not None:
                self.index_is_unread = True
                problems.append(finding_of(self.index_service.not_given_out(error, path), "file", path))
                continue
            length = os.path.getsize(path)
            if length != self.config.index_file_size:
                problems.append(finding_of(self.index_service.of_length(length, path), "file", path))
                continue
            good.append(name)
        self.index_service.take(good)
        return problems

    def _missing_index(self, entries: IndexCheck) -> Iterator[Finding]:
        if (
            self.with_index
            and not entries.names
            and not self.index_is_unread
            and entries.total
            and self.config.message_index_enable
            and not has_index_database(self.root)
        ):
            yield Finding(
                self.index_service.path,
                0,
                "missing_index",
                f"there is no index file, but the log holds {entries.total} keys to index; `rebuild` makes it again",
            )

    # ----------------------------------------------------------------------------------------------------------- log

    def _log(self, entries: IndexCheck) -> Iterator[Finding]:
        log = self.commit_log
        begin = log.min_offset
        for stretch, columns in log.scans(begin, self.end, check_crc=self.check_crc):
            if self.progress is not None:
                self.progress(stretch.begin - begin, self.end - begin)
            if stretch.verdict is Verdict.RECORD:
                yield from self._missing_crcs(columns, stretch.begin)
                yield from self._bodies(columns)
                yield from self.records(columns)
                yield from entries.records(columns)
                if self.database is not None:
                    yield from self.database.records(columns)
            elif self._is_unread(stretch):
                entries.pass_over_range(stretch.begin, stretch.end)
            else:
                yield from self._no_record(stretch)
                if stretch.verdict not in (Verdict.BLANK, None):
                    entries.pass_over_range(stretch.begin, stretch.end)
        if self.progress is not None:
            self.progress(self.end - begin, self.end - begin)
        yield from self._tail()

    def _no_record(self, stretch: Stretch) -> Iterator[Finding]:
        log, at, verdict = self.commit_log, stretch.begin, stretch.verdict
        mapped_file = log.files.find(at)
        if mapped_file is None or verdict is None:
            yield Finding(log.path, 0, "missing_segment", f"no segment holds phy offsets {at} to {stretch.end}")
            return
        region, path, pos = mapped_file.region, mapped_file.path, at - mapped_file.file_from_offset
        if verdict == Verdict.BLANK:
            return
        if verdict == Verdict.BAD_SIZE and region.get_i32(pos + 4) == _core.MAGIC_BLANK:
            detail = (
                f"the blank says {region.get_i32(pos)} bytes, {region.size - pos} are left; {stretch.end - at} are not a "
                "record"
            )
            yield Finding(path, pos, "bad_blank", detail)
        elif verdict in (Verdict.BAD_BODY_CRC, Verdict.BAD_PROP_CRC):
            record = _core.decode_record(region, pos)
            assert isinstance(record, tuple)  # Its lengths were found whole just before.
            what = "body" if verdict == Verdict.BAD_BODY_CRC else "property"
            detail = f"the record at phy offset {at} does not agree with its {what} CRC"
            yield Finding(path, pos, DAMAGE_KINDS.get(verdict, "missing_blank"), detail)
            if self.with_queues and is_queued(record[7]):
                self.check_of(record[15], record[3]).covered += 1
        else:
            detail = Sentence(f"{stretch.end - at} bytes from phy offset {at} are not a record (", verdict, ")")
            yield Finding(path, pos, DAMAGE_KINDS.get(verdict, "missing_blank"), detail)

    def _lost_end(self) -> Iterator[Finding]:
        # What a rebuild refuses to lose.  A gap in the middle is a finding of its own; segments that cannot be read are there.
        if self.unread:
            return
        checkpoint = Checkpoint.load_or_zeros(os.path.join(self.root, "checkpoint"))
        clean = not os.path.lexists(os.path.join(self.root, "abort"))
        end = end_of_known(self.commit_log, self.end, checkpoint, clean)
        found = list(units_outside(self.commit_log, end, ("consumequeue", "index"), replaced=False))
        if found:
            first = min(found, key=lambda each: each.phy_offset)
            yield Finding(
                self.commit_log.path,
                0,
                "missing_segment",
                f"{sum(each.num for each in found)} queue units and index entries lead behind the end of the log at phy offset "
                f"{self.end}, the first to {first.phy_offset} ({first.path}): its newest segments are missing",
            )

    def _missing_crcs(self, columns: RecordColumns, begin: int) -> Iterator[Finding]:
        if not self.config.enabled_append_prop_crc:
            return
        mapped_file = self.commit_log.segment(begin)
        path, base = mapped_file.path, mapped_file.file_from_offset
        for row in np.flatnonzero(columns.prop_crc[: columns.count] == 0).tolist():
            phy_offset = int(columns.phy_offset[row])
            yield Finding(
                path,
                phy_offset - base,
                "missing_prop_crc",
                f"the record at phy offset {phy_offset} has no property CRC, which a broker with enabledAppendPropCRC always "
                "writes; only its body is protected",
            )

    def _bodies(self, columns: RecordColumns) -> Iterator[Finding]:
        for phy_offset in columns.phy_offset[: columns.count][columns.sys_flag[: columns.count] & _COMPRESSED != 0].tolist():
            message = self.commit_log.look_up(phy_offset)
            if message is not None:
                mapped_file = self.commit_log.segment(phy_offset)
                pos = phy_offset - mapped_file.file_from_offset
                yield from body_findings(message, mapped_file.path, pos, self.missing)

    def _tail(self) -> Iterator[Finding]:
        for base in self.commit_log.files.offsets:
            if base + self.commit_log.segment_size <= self.end:
                continue
            mapped_file = self.commit_log.files.file(base)
            pos = max(self.end - base, 0)
            last = mapped_file.last_nonzero(pos)
            if last > pos:
                yield Finding(
                    mapped_file.path,
                    pos,
                    "stale_tail",
                    f"{last - pos} bytes after the end of the log (phy offset {self.end}) are not zero; a later recovery of "
                    "a real broker may take old records among them for new ones",
                )

    # -------------------------------------------------------------------------------------------------------- queues

    def check_of(self, topic: str, queue_id: int) -> QueueCheck:
        check = self.queue_checks.get((topic, queue_id))
        if check is None:
            check = self.queue_checks[topic, queue_id] = QueueCheck(
                self.root, self.config, self.commit_log, self.queues, topic, queue_id
            )
            check.unread, check.is_built = self.unread, self.is_built
        return check

    def records(self, columns: RecordColumns, *, lists: bool = True) -> Iterator[Finding]:
        # Without lists of the directories a queue is looked for when its first record comes.
        n = columns.count
        if not n or not self.with_queues:
            return
        self.last_timestamp = max(self.last_timestamp, int(columns.store_timestamp[:n].max()))
        queued, odd = columns.queued()
        if odd and lists:
            yield from self._odd_records(columns, queued)
        if self.without_unit:
            queued &= ~np.isin(columns.phy_offset[:n], list(self.without_unit))
        groups, order = columns.by_queue(queued)
        for number, start, end in groups:
            topic, queue_id = columns.topics.queues[number]
            name = decode_java_utf8(columns.topics.topics[topic])
            if not lists:
                self.queues.find_or_create(name, queue_id)
            if self._is_elsewhere(name, queue_id) or (name, queue_id) in self.without_queue:
                continue
            check = self.check_of(name, queue_id)
            if lists:
                yield from check.files()
            if check.queue is None and check.problem is None and self.deleted.is_deleted(name):
                check.gone += end - start
                continue
            yield from check.records(columns, order[start:end])

    def _is_elsewhere(self, topic: str, queue_id: int) -> bool:
        # Its units are in RocksDB, and it has no files.
        return self.database is not None and (topic, queue_id) not in self.listed

    def _odd_records(self, columns: RecordColumns, queued: np.ndarray) -> Iterator[Finding]:
        # What an inner batch and further queues need stands in properties that nothing else protects.
        log, n = self.commit_log, columns.count
        odd = ((columns.sys_flag[:n] & _INNER_BATCH) != 0) | (columns.multi_dispatch[:n] != 0)
        for row in np.flatnonzero(odd & (queued != 0)).tolist():
            phy = int(columns.phy_offset[row])
            message = log.look_up(phy)
            if message is None:
                continue
            path, pos = log.segment(phy).path, phy % log.segment_size
            if message.is_inner_batch:
                for detail in self._inner_batch(message, int(columns.inner_num[row]), int(columns.inner_base[row])):
                    yield Finding(path, pos, "bad_inner_batch", detail)
            yield from self._further_queues(message, path, pos)

    def _inner_batch(self, message: MessageExt, num: int, base: int) -> Iterator[str]:
        if not num:
            stated = message.properties.get("INNER_NUM")
            yield f"INNER_NUM is {stated if stated is None else stated[:80]!r}, an inner batch needs a number from 1 to 32767"
        if self._is_elsewhere(message.topic, message.queue_id):
            return
        if isinstance(self.check_of(message.topic, message.queue_id).queue, ConsumeQueue):
            return
        stated = message.properties.get("INNER_BASE")
        if stated != str(message.queue_offset) or base != message.queue_offset:
            said = stated if stated is None else stated[:80]
            yield f"INNER_BASE is {said!r}, the record's queue offset is {message.queue_offset}"

    def _further_queues(self, message: MessageExt, path: str, pos: int) -> Iterator[Finding]:
        problem = multi_dispatch_problem(message, self.config)
        if problem is not None:
            yield Finding(path, pos, "bad_multi_dispatch", f"the record {problem}")
        for name, number in multi_dispatch_places(message, self.config):
            if self._is_elsewhere(name, 0):
                continue
            # A number that follows no other cannot be told from one that somebody made up, which no rebuild writes.
            follows = number <= self.further_numbers.get(name, number)
            self.further_numbers[name] = number + 1
            check = self.check_of(name, 0)
            if check.problem is not None:
                continue
            queue = check.queue
            if isinstance(queue, BatchConsumeQueue):
                continue
            unit = None if queue is None else queue.unit(number)
            if unit is None and follows:
                yield from check.missing(number, message.phy_offset, 1)
            elif unit is None or unit.phy_offset != message.phy_offset:
                detail = f"the record says that it is number {number} of {name}/0, which has no such unit"
                yield Finding(path, pos, "bad_multi_dispatch", detail)

    def _queues(self) -> Iterator[Finding]:
        for topic, queue_id in self.queues.keys():
            yield from self.check_of(topic, queue_id).finish()
        checks = sorted(self.queue_checks.items())
        deleted_after: dict[str, int] = {}
        for (topic, _), check in checks:
            deleted_after[topic] = max(deleted_after.get(topic, -1), check.deleted_after)
        gone: dict[str, int] = {}
        for (topic, _), check in checks:
            yield from check.missing_queue(deleted_after[topic])
            if check.gone:
                gone[topic] = gone.get(topic, 0) + check.gone
        if gone and self.tells_gone:
            logger.warning("note: %s", gone_text(gone))

    # ------------------------------------------------------------------------------------------------ the other files

    def _checkpoint(self) -> Iterator[Finding]:
        path = os.path.join(self.root, "checkpoint")
        try:
            checkpoint = Checkpoint.load(path, read_only=True)
        except (StoreError, OSError) as error:
            if is_unreadable(error):
                yield unread_file(path, error, "its times and offsets are not compared with the log")
            else:
                yield Finding(path, 0, "bad_checkpoint", str(error))
            return
        newest = max(self.last_timestamp, 0)
        if self.commit_log.min_offset > 0 or self.unread:
            # Where the clock was set back, what retention deleted may have been stored later than all that is left; so
            # may what cannot be read.
            newest = max(newest, self.config.clock())
        for pos, name in (
            (0, "physic_msg_timestamp"),
            (8, "logics_msg_timestamp"),
            (16, "index_msg_timestamp"),
        ):
            value = getattr(checkpoint, name)
            if value < 0 or value > newest:
                yield Finding(
                    path,
                    pos,
                    "bad_checkpoint",
                    f"{name} is {value}, but the newest record was stored at {self.last_timestamp}; a recovery that trusts it "
                    "skips what it should look at",
                )
        for pos, name in ((32, "confirm_phy_offset"), (40, "logics_physical_offset")):
            value = getattr(checkpoint, name)
            if value < 0 or value > self.end:
                yield Finding(path, pos, "bad_checkpoint", f"{name} is {value}, the log ends at {self.end}")

    def _delay_offsets(self) -> Iterator[Finding]:
        # It brings NumPy along.
        from rmqstore.offline.pending_queues import check_delay_offsets

        path = os.path.join(self.root, "config", "delayOffset.json")
        try:
            offsets, problems = check_delay_offsets(self.root)
            for problem in problems:
                yield finding_of(problem, "bad_settings", path)
            for level, offset in sorted(offsets.items()):
                end = self._end_of_queue(SCHEDULE_TOPIC, level - 1)
                if 0 < end < offset:
                    text = (
                        f"delayOffset.json: the offset {offset} of level {level} is after the end of its queue, {end}: a broker "
                        "goes on at the end, and delivers none of the messages before it"
                    )
                    yield Finding(path, 0, "bad_settings", text)
        except CorruptionError as error:
            yield finding_of(error, "bad_settings", path)
        except OSError as error:
            where = path if error.filename is None else os.fsdecode(error.filename)
            yield Finding(where, 0, "file", f"progress of delay levels is not known: {error.strerror or error}")

    def _end_of_queue(self, topic: str, queue_id: int) -> int:
        # 0 where there is none, or it was not looked at or cannot be read, which is said elsewhere.
        if not self.with_queues or self.database is not None:
            return 0
        with contextlib.suppress(StoreError, OSError):
            look = self.queues.look(topic, queue_id, self.commit_log.min_offset)
            return 0 if look is None else look.max_queue_offset
        return 0

    def _config_files(self) -> Iterator[Finding]:
        from rmqstore.consumer.settings_sources import settings_sources
        from rmqstore.rocksdb.pop_records import has_pop_records, pop_records

        kinds: tuple[SettingsKind, ...] = ("topics", "subscription_groups", "consumer_offsets")
        for kind in kinds:
            path = os.path.join(self.root, "config")
            try:
                for source in settings_sources(self.root, kind, quiet=True):
                    yield from source.findings
            except (StoreError, OSError) as error:
                yield Finding(path, 0, "not_checked", f"{kind}: {error}")
        yield from self._delay_offsets()
        if has_pop_records(self.root):
            path = os.path.join(self.root, "kvStore")
            findings: list[Finding] = []
            try:
                for _ in pop_records(self.root, findings):
                    pass
            except MissingDependencyError as error:
                findings.append(Finding(path, 0, "not_checked", f"pop records: {error.message}"))
            except CorruptionError as error:
                findings.append(Finding(path, 0, "damaged_database", f"pop records: {error.message}"))
            except (StoreError, OSError) as error:
                findings.append(unread_database(path, error, "pop records"))
            yield from findings
