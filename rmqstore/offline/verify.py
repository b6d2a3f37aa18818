"""verify: report everything in a store that is not as a writer leaves it; this module checks the log itself.

`verify_units`, `verify_entries`, `verify_databases` and `verify_settings` check the other parts.  Memory stays constant, and no
finding ends the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator

from rmqstore import _core
from rmqstore import _numpy as np
from rmqstore._core import Verdict
from rmqstore._dispatch import RecordColumns
from rmqstore.commitlog.commit_log import CommitLog, check_store_root
from rmqstore.commitlog.log_walk import DAMAGE_KINDS, Stretch
from rmqstore.config import StoreConfig
from rmqstore.config.places import dledger_folders
from rmqstore.errors import Finding, GeometryError, Sentence, StoreError, finding_of
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.files.listing import UnreadPart
from rmqstore.files.mapped_file import MappedFilePool
from rmqstore.files.open_file import why_unreadable
from rmqstore.message import MessageExt, SysFlag, body_findings, decode_java_utf8, is_queued
from rmqstore.offline.compared import Compared, unread_file, unread_folder
from rmqstore.offline.verify_databases import QueueDatabaseCheck, has_index_database, verify_index_database
from rmqstore.offline.verify_entries import IndexCheck, load_index
from rmqstore.offline.verify_settings import checkpoint_findings, settings_findings, verify_waiting
from rmqstore.offline.verify_units import QueueCheck
from rmqstore.store.dispatch_rules import further_places, gone_text
from rmqstore.store.lost_log import end_of_known, units_outside
from rmqstore.store.opening import REBUILD_DIRECTORY, SWAPPING, is_swapping

__all__ = ["Finding", "verify"]

logger = logging.getLogger(__name__)

_INNER_BATCH, _COMPRESSED = SysFlag.INNER_BATCH.value, SysFlag.COMPRESSED.value


def verify(
    path: str | os.PathLike[str],
    config: StoreConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Finding]:
    """Report everything that is wrong in the store at `path`; nothing is changed.

    Parameters
    ----------
    path : path
        The store's root.
    config : StoreConfig, optional
        Its geometry; by default `StoreConfig.infer`.  A difference that depends on an assumed value (`config.assumed`) is not a
        finding.
    progress : callable, optional
        Called with (bytes of log done, bytes of log in all), repeatedly and at the end.

    Yields
    ------
    Finding
        In the order interrupted rebuild, log, queues and index (in the order of the log), index in RocksDB, pending messages,
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
    log = CommitLog(root, config, MappedFilePool(config.max_mapped_files), read_only=True)
    with contextlib.closing(log), contextlib.closing(Compared(log, root, config)) as compared:
        with contextlib.closing(_Checker(compared, progress)) as checker:
            yield from checker.run()


def verify_parts(compared: Compared, end: int) -> Iterator[Finding]:
    """Compare queues and index, which a rebuild wrote, with a log that ends at `end`; damage of the log is no finding."""
    for finding in _Checker(compared).run_parts(end):
        if not finding.path.startswith(compared.commit_log.path):
            yield finding


def verify_records(
    compared: Compared,
    columns: RecordColumns,
    stretches: Iterable[Stretch],
    *,
    batch_topics: Iterable[str] = (),
    first_entry: int = 0,
) -> tuple[list[Finding], dict[tuple[str, int], int], int]:
    """Compare newly built queues and index with some of the records of a log.

    `stretches`, of `CommitLog.stretches` without checks of CRCs, fill `columns`; `batch_topics` have batch queues; `first_entry`
    is the number (from 0) of the first record's first entry in the whole index, all files of which but the last are full.

    Returns
    -------
    (list of Finding, dict of (str, int) to int, int)
        The findings, at most 100; the number of units of each queue that belong to these records; the number after the last entry.
    """
    compared.is_built = True
    checker = _Checker(compared)
    findings: list[Finding] = []
    for topic in batch_topics:
        compared.queues.add_batch_topic(topic)
    if compared.has_index:
        findings += load_index(compared.index_service)[0]
    entries = IndexCheck(compared.index_service, compared.commit_log)
    per_file = compared.config.max_index_num - 1
    entries.go_to(first_entry // per_file, first_entry % per_file + 1)
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


def verify_index_file(compared: Compared, name: str, end: int) -> list[Finding]:
    """Compare slots, chains and header of one index file with its entries; `end` is the log's."""
    compared.index_service.take([name])
    return list(IndexCheck(compared.index_service, compared.commit_log).begin(end))


def verify_queue(compared: Compared, topic: str, queue_id: int, covered: int, *, batch: bool) -> list[Finding]:
    """Report the units of one queue that belong to no record; `covered` units belong to one."""
    if batch:
        compared.queues.add_batch_topic(topic)
    compared.queues.find_or_create(topic, queue_id)
    check = QueueCheck(compared, topic, queue_id)
    check.covered = covered
    return list(check.finish())


class _Checker:
    def __init__(self, compared: Compared, progress: Callable[[int, int], None] | None = None):
        self.compared, self.progress = compared, progress
        self.commit_log, self.queues, self.root = compared.commit_log, compared.queues, compared.root
        self.end = 0
        # Missing libraries that were reported.
        self.missing: set[str] = set()
        self.queue_checks: dict[tuple[str, int], QueueCheck] = {}
        # By name of a further queue, the number after the last one in a record.
        self.further_numbers: dict[str, int] = {}
        self.last_timestamp = 0
        # The queues in RocksDB, if there are any; then only listed queues are compared with files.
        self.database: QueueDatabaseCheck | None = None
        self.listed: frozenset[tuple[str, int]] = frozenset()
        self.index_is_unread = False
        # Log how many records belong to no queue; a rebuild logs that itself.
        self.tells_gone = False

    def close(self) -> None:
        if self.database is not None:
            self.database.close()

    def run(self) -> Iterator[Finding]:
        from rmqstore.offline.describe import unread_in

        named = set(dledger_folders(self.root))
        for finding in self._all_compared():
            named.add(finding.path)
            yield finding
        for part in unread_in(self.root):
            if part.path not in named:
                yield Finding(part.path, 0, "not_read", f"{part.size} bytes in {part.files} files are not read, nor verified")

    def _all_compared(self) -> Iterator[Finding]:
        if is_swapping(self.root):
            yield Finding(os.path.join(self.root, REBUILD_DIRECTORY), 0, "interrupted_rebuild", SWAPPING)
        for folder in dledger_folders(self.root):
            detail = (
                "the commit log is DLedger's, or goes on there (enableDLegerCommitLog=true), which this package does not "
                f"read: what leads there is called dangling. It has {UnreadPart.of(folder).size} bytes"
            )
            yield Finding(folder, 0, "not_checked", detail)
        self.database = QueueDatabaseCheck.of(self.root, self.compared.config, self.commit_log)
        self.tells_gone = True
        yield from self.run_parts()
        yield from self._lost_end()
        yield from verify_index_database(self.commit_log, self.root, self.end)
        yield from verify_waiting(self.commit_log, self.root)
        yield from checkpoint_findings(self.compared, self.end, self.last_timestamp)
        yield from settings_findings(self.compared, queues_known=self.database is None)

    def run_parts(self, end: int | None = None) -> Iterator[Finding]:
        """Check the log, the queues and the index."""
        problems: list[Finding] = []
        self.commit_log.files.load(lambda error: problems.append(finding_of(error, "file", self.commit_log.path)))
        problems += self._leave_out_unread()
        if self.compared.has_queues:
            try:
                self.queues.load()
            except StoreError as error:
                problems.append(finding_of(error, "file", self.root))
            databases = () if self.database is None else self.database.folders
            unseen = [each for each in self.queues.unseen.items() if each[0] not in databases]
            problems += [unread_folder(folder, error) for folder, error in unseen]
            self.listed = frozenset(self.queues.keys())
        if self.compared.has_index:
            found, self.index_is_unread = load_index(self.compared.index_service)
            problems += found
        yield from problems
        # A newest segment that cannot be read may be full.
        unread_to = max((last for _, last in self.compared.unread), default=0)
        end = max(self.commit_log.find_end_behind_damage(), unread_to) if end is None else end
        self.commit_log.set_end(end)
        self.end = end
        entries = IndexCheck(self.compared.index_service, self.commit_log)
        yield from entries.begin(end)
        if self.database is not None:
            yield from self.database.begin()
        yield from self._log(entries)
        yield from self._missing_index(entries)
        yield from entries.finish()
        if self.compared.has_queues:
            yield from self._queues()
        if self.database is not None:
            yield from self.database.finish(end)

    def _missing_index(self, entries: IndexCheck) -> Iterator[Finding]:
        needed = entries.total and self.compared.has_index and self.compared.config.message_index_enable
        if needed and not (entries.names or self.index_is_unread or has_index_database(self.root)):
            detail = f"no index file has an entry, but the log holds {entries.total} keys to index; "
            detail += "`rebuild` makes the index from them"
            yield Finding(self.compared.index_service.path, 0, "missing_index", detail)

    # ----------------------------------------------------------------------------------------------------------- log

    def _log(self, entries: IndexCheck) -> Iterator[Finding]:
        begin, end = self.commit_log.min_offset, self.end
        progress = self.progress or (lambda done, whole: None)
        for stretch, columns in self.commit_log.scans(begin, end, check_crc=self.compared.check_crc):
            progress(stretch.begin - begin, end - begin)
            if stretch.verdict is Verdict.RECORD:
                yield from self._missing_crcs(columns)
                yield from self._bodies(columns)
                yield from self.records(columns)
                yield from entries.records(columns)
                if self.database is not None:
                    yield from self.database.records(columns)
            elif stretch.verdict is None and self.compared.is_unread(stretch.begin, stretch.end):
                entries.pass_over_range(stretch.begin, stretch.end)
            else:
                yield from self._no_record(stretch)
                if stretch.verdict not in (Verdict.BLANK, None):
                    entries.pass_over_range(stretch.begin, stretch.end)
        progress(end - begin, end - begin)
        for mapped_file, pos, size in self.commit_log.files.written_after(self.end):
            detail = (
                f"{size} bytes after the end of the log (phy offset {self.end}) are not zero; a later recovery of "
                "a real broker may take old records among them for new ones"
            )
            yield Finding(mapped_file.path, pos, "stale_tail", detail)

    def _leave_out_unread(self) -> list[Finding]:
        # Leave segments that cannot be read out of the log, and report them.
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
            self.compared.unread.append((base, base + self.commit_log.segment_size))
        if problems:
            files.take(good, files.wrote_where)
        return problems

    def _no_record(self, stretch: Stretch) -> Iterator[Finding]:
        # Report a stretch of the log that is not a sound record.
        log, at, verdict = self.commit_log, stretch.begin, stretch.verdict
        mapped_file = log.files.find(at)
        if mapped_file is None or verdict is None:
            yield Finding(log.path, 0, "missing_segment", f"no segment holds phy offsets {at} to {stretch.end}")
            return
        if verdict == Verdict.BLANK:
            return
        region, pos, kind = mapped_file.region, at - mapped_file.file_from_offset, DAMAGE_KINDS.get(verdict, "missing_blank")
        detail: str = Sentence(f"{stretch.end - at} bytes from phy offset {at} are not a record (", verdict, ")")
        if verdict == Verdict.BAD_SIZE and region.get_i32(pos + 4) == _core.MAGIC_BLANK:
            kind = "bad_blank"
            detail = f"the blank says {region.get_i32(pos)} bytes, {region.size - pos} are left; "
            detail += f"{stretch.end - at} are not a record"
        elif verdict in (Verdict.BAD_BODY_CRC, Verdict.BAD_PROP_CRC):
            what = "body" if verdict == Verdict.BAD_BODY_CRC else "property"
            detail = f"the record at phy offset {at} does not agree with its {what} CRC"
            message = log.look_up(at)
            if self.compared.has_queues and message is not None and is_queued(message.sys_flag):
                # Its lengths are right, so its unit is right too.
                self.check_of(message.topic, message.queue_id).covered += 1
        yield Finding(mapped_file.path, pos, kind, detail)

    def _place_of(self, phy_offset: int) -> tuple[str, int]:
        return self.commit_log.segment(phy_offset).path, phy_offset % self.commit_log.segment_size

    def _missing_crcs(self, columns: RecordColumns) -> Iterator[Finding]:
        if not self.compared.config.enabled_append_prop_crc:
            return
        for phy_offset in columns.phy_offset[: columns.count][columns.prop_crc[: columns.count] == 0].tolist():
            detail = (
                f"the record at phy offset {phy_offset} has no property CRC, which a broker with enabledAppendPropCRC always "
                "writes; only its body is protected"
            )
            yield Finding(*self._place_of(phy_offset), "missing_prop_crc", detail)

    def _bodies(self, columns: RecordColumns) -> Iterator[Finding]:
        for phy_offset in columns.phy_offset[: columns.count][columns.sys_flag[: columns.count] & _COMPRESSED != 0].tolist():
            message = self.commit_log.look_up(phy_offset)
            if message is not None:
                yield from body_findings(message, *self._place_of(phy_offset), self.missing)

    def _lost_end(self) -> Iterator[Finding]:
        # Report units and entries of records after the end of the log, which a rebuild refuses to lose.  A gap before the end is
        # a finding of its own; segments that cannot be read are not lost.
        if self.compared.unread:
            return
        checkpoint = Checkpoint.load_or_zeros(os.path.join(self.root, "checkpoint"))
        clean = not os.path.lexists(os.path.join(self.root, "abort"))
        end = end_of_known(self.commit_log, self.end, checkpoint, clean)
        found = list(units_outside(self.commit_log, end, ("consumequeue", "index"), replaced=False))
        if found:
            first = min(found, key=lambda each: each.phy_offset)
            detail = (
                f"{sum(each.num for each in found)} queue units and index entries lead beyond the end of the log at phy offset "
                f"{self.end}, the first to {first.phy_offset} ({first.path}): its newest segments are missing"
            )
            yield Finding(self.commit_log.path, 0, "missing_segment", detail)

    # -------------------------------------------------------------------------------------------------------- queues

    def check_of(self, topic: str, queue_id: int) -> QueueCheck:
        check = self.queue_checks.get((topic, queue_id))
        if check is None:
            check = self.queue_checks[topic, queue_id] = QueueCheck(self.compared, topic, queue_id)
        return check

    def records(self, columns: RecordColumns, *, lists: bool = True) -> Iterator[Finding]:
        # Without `lists`, directories are not listed: each queue is opened when its first record comes.
        n = columns.count
        if not n or not self.compared.has_queues:
            return
        self.last_timestamp = max(self.last_timestamp, int(columns.store_timestamp[:n].max()))
        queued, odd = columns.queued()
        if odd and lists:
            yield from self._odd_records(columns, queued)
        if self.compared.without_unit:
            queued &= ~np.isin(columns.phy_offset[:n], list(self.compared.without_unit))
        groups, order = columns.by_queue(queued)
        for number, start, end in groups:
            topic, queue_id = columns.topics.queues[number]
            name = decode_java_utf8(columns.topics.topics[topic])
            if not lists:
                self.queues.find_or_create(name, queue_id)
            if self._is_elsewhere(name, queue_id) or (name, queue_id) in self.compared.without_queue:
                continue
            check = self.check_of(name, queue_id)
            if lists:
                yield from check.files()
            if check.queue is None and not check.problems and self.compared.deleted.is_deleted(name):
                check.gone += end - start
                continue
            yield from check.records(columns, order[start:end])

    def _is_elsewhere(self, topic: str, queue_id: int) -> bool:
        # Its units are in RocksDB, and it has no files.
        return self.database is not None and (topic, queue_id) not in self.listed

    def _odd_records(self, columns: RecordColumns, queued: np.ndarray) -> Iterator[Finding]:
        # Inner batches and records of further queues; nothing else protects the properties that they need.
        n = columns.count
        odd = ((columns.sys_flag[:n] & _INNER_BATCH) != 0) | (columns.multi_dispatch[:n] != 0)
        for row in np.flatnonzero(odd & (queued != 0)).tolist():
            phy_offset = int(columns.phy_offset[row])
            message = self.commit_log.look_up(phy_offset)
            if message is None:
                continue
            place = self._place_of(phy_offset)
            if message.is_inner_batch:
                for detail in self._inner_batch(message, int(columns.inner_num[row]), int(columns.inner_base[row])):
                    yield Finding(*place, "bad_inner_batch", detail)
            yield from self._further_queues(message, place)

    def _inner_batch(self, message: MessageExt, num: int, base: int) -> Iterator[str]:
        if not num:
            stated = message.properties.get("INNER_NUM")
            yield f"INNER_NUM is {stated if stated is None else stated[:80]!r}, an inner batch needs a number from 1 to 32767"
        if self._is_elsewhere(message.topic, message.queue_id):
            return
        check = self.check_of(message.topic, message.queue_id)
        if check.queue is not None and not check.by_base:
            return
        stated = message.properties.get("INNER_BASE")
        if stated != str(message.queue_offset) or base != message.queue_offset:
            said = stated if stated is None else stated[:80]
            yield f"INNER_BASE is {said!r}, the record's queue offset is {message.queue_offset}"

    def _further_queues(self, message: MessageExt, place: tuple[str, int]) -> Iterator[Finding]:
        places, problem = further_places(message, self.compared.config)
        if problem is not None:
            yield Finding(*place, "bad_multi_dispatch", f"the record {problem}")
        for name, number in places:
            if self._is_elsewhere(name, 0):
                continue
            # A number that follows no other may be damage, and no rebuild writes it.
            follows = number <= self.further_numbers.get(name, number)
            self.further_numbers[name] = number + 1
            check = self.check_of(name, 0)
            if check.problems or check.by_base:
                continue
            unit = None if check.queue is None else check.queue.unit(number)
            if unit is None and follows:
                yield from check.missing(number, message.phy_offset, 1)
            elif unit is None or unit.phy_offset != message.phy_offset:
                detail = f"the record says that it is number {number} of {name}/0, which has no such unit"
                yield Finding(*place, "bad_multi_dispatch", detail)

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
