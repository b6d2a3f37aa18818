"""verify: everything in a store that is not as a writer leaves it, as values; and the checks of the log itself.

`verify_units`, `verify_entries`, `verify_databases` and `verify_settings` check the other parts.  It keeps a constant working set,
and does not stop at a finding.
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
    """Look for everything that is wrong in the store at `path`; nothing is changed.

    Parameters
    ----------
    path : path
        The store's root.
    config : StoreConfig, optional
        Its geometry; by default `StoreConfig.infer`.  What depends on an assumed value (`config.assumed`) is no finding.
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
    """Compare queues and index that were built just now with some of the records of a log.

    `stretches`, of `CommitLog.stretches` without a look at CRCs, fill `columns`; `batch_topics` have batch queues; `first_entry` is
    the number of the first record's first entry in the whole index, from 0, of which all files but the last are full.

    Returns
    -------
    (list of Finding, dict of (str, int) to int, int)
        What is wrong, 100 findings at most; units of each queue that belong to these records; number after the last entry.
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
    """Look for what belongs to no record in one queue, of whose units `covered` do."""
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
        # Errors about missing libraries that were reported.
        self.missing: set[str] = set()
        self.queue_checks: dict[tuple[str, int], QueueCheck] = {}
        # By name of a further queue the number after the one that a record named last.
        self.further_numbers: dict[str, int] = {}
        self.last_timestamp = 0
        # Of a store with queues in RocksDB; then only queues that have files are compared with those.
        self.database: QueueDatabaseCheck | None = None
        self.listed: frozenset[tuple[str, int]] = frozenset()
        self.index_is_unread = False
        # Say how many records belong to no queue that is there; a rebuild says so itself.
        self.tells_gone = False

    def close(self) -> None:
        if self.database is not None:
            self.database.close()

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
        self.database = QueueDatabaseCheck.of(self.root, self.compared.config, self.commit_log)
        self.tells_gone = True
        yield from self.run_parts()
        yield from self._lost_end()
        yield from verify_index_database(self.commit_log, self.root, self.end)
        yield from verify_waiting(self.commit_log, self.root)
        yield from checkpoint_findings(self.compared, self.end, self.last_timestamp)
        yield from settings_findings(self.compared, queues_known=self.database is None)

    def _unread(self, named: set[str]) -> Iterator[Finding]:
        from rmqstore.offline.describe import unread_in

        for part in unread_in(self.root):
            if part.path not in named:
                yield Finding(part.path, 0, "not_read", f"{part.size} bytes in {part.files} files are not read, nor verified")

    def run_parts(self, end: int | None = None) -> Iterator[Finding]:
        """The log, queues and index."""
        problems: list[Finding] = []
        self.commit_log.files.load(lambda error: problems.append(finding_of(error, "file", self.commit_log.path)))
        problems += self._leave_out_unread()
        if self.compared.has_queues:
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
        if (
            self.compared.has_index
            and not entries.names
            and not self.index_is_unread
            and entries.total
            and self.compared.config.message_index_enable
            and not has_index_database(self.root)
        ):
            yield Finding(
                self.compared.index_service.path,
                0,
                "missing_index",
                f"no index file has an entry, but the log holds {entries.total} keys to index; `rebuild` makes the index from them",
            )

    # ----------------------------------------------------------------------------------------------------------- log

    def _log(self, entries: IndexCheck) -> Iterator[Finding]:
        begin, end = self.commit_log.min_offset, self.end
        for stretch, columns in self.commit_log.scans(begin, end, check_crc=self.compared.check_crc):
            if self.progress is not None:
                self.progress(stretch.begin - begin, end - begin)
            if stretch.verdict is Verdict.RECORD:
                yield from self._missing_crcs(columns, stretch.begin)
                yield from self._bodies(columns)
                yield from self.records(columns)
                yield from entries.records(columns)
                if self.database is not None:
                    yield from self.database.records(columns)
            elif stretch.verdict is None and self.compared.is_unread(stretch.begin, stretch.end):
                entries.pass_over_range(stretch.begin, stretch.end)
            else:
                yield from self._no_record(stretch)
                self._note_corrupt(stretch)
                if stretch.verdict not in (Verdict.BLANK, None):
                    entries.pass_over_range(stretch.begin, stretch.end)
        if self.progress is not None:
            self.progress(end - begin, end - begin)
        yield from self._tail()

    def _note_corrupt(self, stretch: Stretch) -> None:
        # The unit of a record that only fails its CRC is right.
        if self.compared.has_queues and stretch.verdict in (Verdict.BAD_BODY_CRC, Verdict.BAD_PROP_CRC):
            mapped_file = self.commit_log.segment(stretch.begin)
            record = _core.decode_record(mapped_file.region, stretch.begin - mapped_file.file_from_offset)
            assert isinstance(record, tuple)  # Its lengths were found whole just before.
            if is_queued(record[7]):
                self.check_of(record[15], record[3]).covered += 1

    def _leave_out_unread(self) -> list[Finding]:
        """Leave segments that cannot be read out of the log, and report them."""
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
        """Report a stretch of the log that is not a sound record."""
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
            what = "body" if verdict == Verdict.BAD_BODY_CRC else "property"
            detail = f"the record at phy offset {at} does not agree with its {what} CRC"
            yield Finding(path, pos, DAMAGE_KINDS.get(verdict, "missing_blank"), detail)
        else:
            detail = Sentence(f"{stretch.end - at} bytes from phy offset {at} are not a record (", verdict, ")")
            yield Finding(path, pos, DAMAGE_KINDS.get(verdict, "missing_blank"), detail)

    def _missing_crcs(self, columns: RecordColumns, begin: int) -> Iterator[Finding]:
        if not self.compared.config.enabled_append_prop_crc:
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
        """Look for bytes after the end of the log."""
        for mapped_file, pos, size in self.commit_log.files.written_after(self.end):
            yield Finding(
                mapped_file.path,
                pos,
                "stale_tail",
                f"{size} bytes after the end of the log (phy offset {self.end}) are not zero; a later recovery of "
                "a real broker may take old records among them for new ones",
            )

    def _lost_end(self) -> Iterator[Finding]:
        """Look for units and entries of records after the end of the log."""
        # What a rebuild refuses to lose.  A gap in the middle is a finding of its own; segments that cannot be read are there.
        if self.compared.unread:
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
                f"{sum(each.num for each in found)} queue units and index entries lead beyond the end of the log at phy offset "
                f"{self.end}, the first to {first.phy_offset} ({first.path}): its newest segments are missing",
            )

    # -------------------------------------------------------------------------------------------------------- queues

    def check_of(self, topic: str, queue_id: int) -> QueueCheck:
        check = self.queue_checks.get((topic, queue_id))
        if check is None:
            check = self.queue_checks[topic, queue_id] = QueueCheck(self.compared, topic, queue_id)
        return check

    def records(self, columns: RecordColumns, *, lists: bool = True) -> Iterator[Finding]:
        # Without lists of the directories a queue is looked for when its first record comes.
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
            if check.queue is None and check.problem is None and self.compared.deleted.is_deleted(name):
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
        units = self.check_of(message.topic, message.queue_id).units
        if units is not None and not units.by_base:
            return
        stated = message.properties.get("INNER_BASE")
        if stated != str(message.queue_offset) or base != message.queue_offset:
            said = stated if stated is None else stated[:80]
            yield f"INNER_BASE is {said!r}, the record's queue offset is {message.queue_offset}"

    def _further_queues(self, message: MessageExt, path: str, pos: int) -> Iterator[Finding]:
        places, problem = further_places(message, self.compared.config)
        if problem is not None:
            yield Finding(path, pos, "bad_multi_dispatch", f"the record {problem}")
        for name, number in places:
            if self._is_elsewhere(name, 0):
                continue
            # A number that follows no other cannot be told from one that somebody made up, which no rebuild writes.
            follows = number <= self.further_numbers.get(name, number)
            self.further_numbers[name] = number + 1
            check = self.check_of(name, 0)
            if check.problem is not None:
                continue
            if check.units is not None and check.units.by_base:
                continue
            unit = None if check.queue is None else check.queue.unit(number)
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
