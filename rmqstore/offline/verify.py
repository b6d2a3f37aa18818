"""verify: everything in a store that is not as a writer leaves it, as values.

Owns the comparison of the commit log with itself (lengths, offsets, CRCs) and of queues, index, checkpoint and config
files with the log.  It only reads, keeps a constant working set however long the log is, never stops at the first
finding, and answers with `Finding` values instead of exceptions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from rmqstore import _core, _dispatch
from rmqstore import _numpy as np
from rmqstore._core import Verdict
from rmqstore._dispatch import RecordColumns
from rmqstore.commitlog.commit_log import CommitLog, check_store_root
from rmqstore.commitlog.log_walk import Stretch
from rmqstore.config import StoreConfig
from rmqstore.consumequeue.batch_consume_queue import BatchConsumeQueue
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue, ConsumeQueueStore
from rmqstore.errors import Finding, GeometryError, MissingDependencyError, OffsetOutOfRangeError, StoreError
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.files.mapped_file import MappedFilePool
from rmqstore.index.index_file import IndexFile
from rmqstore.index.index_service import IndexService
from rmqstore.message import SCHEDULE_TOPIC, MessageExt
from rmqstore.offline.verify_databases import has_index_database, verify_index_database
from rmqstore.offline.verify_queue_database import QueueDatabaseCheck
from rmqstore.store.dispatcher import multi_dispatch_places, multi_dispatch_problem

if TYPE_CHECKING:
    from rmqstore.consumer.settings_sources import SettingsKind

__all__ = ["Finding", "verify"]

_TRANSACTION_MASK = 0xC
_INNER_BATCH = 0x80
_KINDS = {
    Verdict.EMPTY: "missing_blank",
    Verdict.BAD_MAGIC: "bad_magic",
    Verdict.BAD_SIZE: "bad_size",
    Verdict.BAD_LENGTH: "bad_length",
    Verdict.BAD_PHY_OFFSET: "bad_phy_offset",
    Verdict.BAD_BODY_CRC: "bad_body_crc",
    Verdict.BAD_PROP_CRC: "bad_prop_crc",
}


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
        In the order log, queues and index (as the log goes on), index in RocksDB, checkpoint, settings.

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
            yield _of_error(error, "geometry", root)
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

    Used by a rebuild on what it built, so the log's own damage is no finding here.

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

    Returns
    -------
    (list of Finding, dict of (str, int) to int, int)
        What is wrong, 100 findings at the most; units of each queue that belong to these records; number after the last
        entry.
    """
    checker = _Checker(
        parts_root, config, with_queues=queues, with_index=first_entry is not None, commit_log=commit_log
    )
    checker.without_unit = without_unit
    findings: list[Finding] = []
    try:
        for topic in batch_topics:
            checker.queues.add_batch_topic(topic)
        if first_entry is not None:
            findings += checker._load_index()
        entries = _IndexCheck(checker)
        per_file = config.max_index_num - 1
        entries.go_to((first_entry or 0) // per_file, (first_entry or 0) % per_file + 1)
        for stretch in stretches:
            if stretch.verdict is Verdict.RECORD:
                findings += checker._records(columns, lists=False)
                findings += entries.records(columns)
            if len(findings) >= 100:
                break
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
    checker.end = end
    try:
        checker.index_service.take([name])
        return list(_IndexCheck(checker).begin())
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
        check = _QueueCheck(checker, topic, queue_id)
        check.covered = covered
        return list(check.finish())
    finally:
        checker.queues.close()


def _of_error(error: StoreError, kind: str, path: str) -> Finding:
    return Finding(error.path or path, error.pos or 0, kind, error.message)


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
        self.queues = ConsumeQueueStore(parts_root, config, self.pool, read_only=True)
        self.index_service = IndexService(parts_root, config, read_only=True)
        self.queue_checks: dict[tuple[str, int], _QueueCheck] = {}
        self.last_timestamp = 0
        self.end = 0
        self.progress: Callable[[int, int], None] | None = None
        self.check_crc = True
        self.without_unit: frozenset[int] = frozenset()
        # Of a store with queues in RocksDB; then only queues that have files are compared with those.
        self.database: QueueDatabaseCheck | None = None
        self.listed: frozenset[tuple[str, int]] = frozenset()

    def close(self) -> None:
        self.commit_log.close()
        self.queues.close()
        if self.database is not None:
            self.database.close()
        self.index_service.close()

    def run(self) -> Iterator[Finding]:
        self.database = QueueDatabaseCheck.of(self.root, self.config, self.commit_log)
        yield from self.run_parts()
        yield from verify_index_database(self.commit_log, self.root, self.end)
        yield from self._checkpoint()
        yield from self._config_files()

    def run_parts(self, end: int | None = None) -> Iterator[Finding]:
        """The log, queues and index."""
        problems: list[Finding] = []
        self.commit_log.queue.load(lambda error: problems.append(_of_error(error, "file", self.commit_log.path)))
        if self.with_queues:
            try:
                self.queues.load()
            except StoreError as error:
                problems.append(_of_error(error, "file", self.root))
            self.listed = frozenset(self.queues.keys())
        if self.with_index:
            problems += self._load_index()
        yield from problems
        self.end = self.commit_log.find_end_behind_damage() if end is None else end
        self.commit_log.set_end(self.end)
        entries = _IndexCheck(self)
        yield from entries.begin()
        if self.database is not None:
            yield from self.database.begin()
        yield from self._log(entries)
        yield from entries.finish()
        if self.with_queues:
            yield from self._queues()
        if self.database is not None:
            yield from self.database.finish(self.end)

    def _load_index(self) -> list[Finding]:
        problems: list[Finding] = []
        try:
            names = sorted(os.listdir(self.index_service.path))
        except FileNotFoundError:
            return problems
        good = []
        for name in names:
            path = os.path.join(self.index_service.path, name)
            if not (name.isascii() and name.isdigit()) or len(name) > 19 or not os.path.isfile(path):
                problems.append(Finding(path, 0, "file", "no part of the store; a directory here stops a real broker"))
                continue
            length = os.path.getsize(path)
            if length != self.config.index_file_size:
                problems.append(_of_error(self.index_service.of_length(length, path), "file", path))
                continue
            good.append(name)
        self.index_service.take(good)
        return problems

    # ----------------------------------------------------------------------------------------------------------- log

    def _log(self, entries: _IndexCheck) -> Iterator[Finding]:
        log = self.commit_log
        begin = log.min_offset
        for stretch, columns in log.scans(begin, self.end, check_crc=self.check_crc):
            if self.progress is not None:
                self.progress(stretch.begin - begin, self.end - begin)
            if stretch.verdict is Verdict.RECORD:
                yield from self._missing_crcs(columns, stretch.begin)
                yield from self._records(columns)
                yield from entries.records(columns)
                if self.database is not None:
                    yield from self.database.records(columns)
            else:
                yield from self._no_record(stretch)
                if stretch.verdict not in (Verdict.BLANK, None):
                    entries.pass_over_range(stretch.begin, stretch.end)
        if self.progress is not None:
            self.progress(self.end - begin, self.end - begin)
        yield from self._tail()

    def _no_record(self, stretch: Stretch) -> Iterator[Finding]:
        log, at, verdict = self.commit_log, stretch.begin, stretch.verdict
        mapped_file = log.queue.find(at)
        if mapped_file is None or verdict is None:
            yield Finding(log.path, 0, "missing_segment", f"no segment holds phy offsets {at} to {stretch.end}")
            return
        region, path, pos = mapped_file.region, mapped_file.path, at - mapped_file.file_from_offset
        if verdict == Verdict.BLANK:
            return
        if verdict == Verdict.BAD_SIZE and region.get_i32(pos + 4) == _core.MAGIC_BLANK:
            detail = f"the blank says {region.get_i32(pos)} bytes, {region.size - pos} are left; {stretch.end - at} are no record"
            yield Finding(path, pos, "bad_blank", detail)
        elif verdict in (Verdict.BAD_BODY_CRC, Verdict.BAD_PROP_CRC):
            record = _core.decode_record(region, pos)
            assert isinstance(record, tuple)  # Its lengths were found whole just before.
            what = "body" if verdict == Verdict.BAD_BODY_CRC else "property"
            detail = f"the record at phy offset {at} does not agree with its {what} CRC"
            yield Finding(path, pos, _KINDS[verdict], detail)
            if self.with_queues and record[7] & _TRANSACTION_MASK in (0, 0x8):
                self._check_of(record[15], record[3]).covered += 1
        else:
            detail = f"{stretch.end - at} bytes from phy offset {at} are no record ({verdict.name})"
            yield Finding(path, pos, _KINDS[verdict], detail)

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

    def _tail(self) -> Iterator[Finding]:
        for base in self.commit_log.queue.offsets:
            if base + self.commit_log.segment_size <= self.end:
                continue
            mapped_file = self.commit_log.queue.file(base)
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

    def _check_of(self, topic: str, queue_id: int) -> _QueueCheck:
        check = self.queue_checks.get((topic, queue_id))
        if check is None:
            check = self.queue_checks[topic, queue_id] = _QueueCheck(self, topic, queue_id)
        return check

    def _records(self, columns: RecordColumns, *, lists: bool = True) -> Iterator[Finding]:
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
            name = columns.topics.topics[topic].decode("utf-8", "rmqstore.java")
            if not lists:
                self.queues.find_or_create(name, queue_id)
            if self._is_elsewhere(name, queue_id):
                continue
            check = self._check_of(name, queue_id)
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
            for detail in self._further_queues(message):
                yield Finding(path, pos, "bad_multi_dispatch", detail)

    def _inner_batch(self, message: MessageExt, num: int, base: int) -> Iterator[str]:
        if not num:
            stated = message.properties.get("INNER_NUM")
            yield f"INNER_NUM is {stated if stated is None else stated[:80]!r}, an inner batch needs a number from 1 to 32767"
        if self._is_elsewhere(message.topic, message.queue_id):
            return
        if isinstance(self._check_of(message.topic, message.queue_id).queue, ConsumeQueue):
            return
        stated = message.properties.get("INNER_BASE")
        if stated != str(message.queue_offset) or base != message.queue_offset:
            said = stated if stated is None else stated[:80]
            yield f"INNER_BASE is {said!r}, the record's queue offset is {message.queue_offset}"

    def _further_queues(self, message: MessageExt) -> Iterator[str]:
        problem = multi_dispatch_problem(message, self.config)
        if problem is not None:
            yield f"the record {problem}"
        for name, number in multi_dispatch_places(message, self.config):
            if self._is_elsewhere(name, 0):
                continue
            check = self._check_of(name, 0)
            if check.problem is not None:
                continue
            queue = check.queue
            first = 0 if queue is None else queue.first_unit
            unit = queue.unit(number) if isinstance(queue, ConsumeQueue) and first <= number < queue.unit_num else None
            if (
                number >= first
                and not isinstance(queue, BatchConsumeQueue)
                and (unit is None or unit.phy_offset != message.phy_offset)
            ):
                yield f"the record says that it is number {number} of {name}/0, which has no such unit"

    def _queues(self) -> Iterator[Finding]:
        for topic, queue_id in self.queues.keys():
            yield from self._check_of(topic, queue_id).finish()

    # ------------------------------------------------------------------------------------------------ the other files

    def _checkpoint(self) -> Iterator[Finding]:
        path = os.path.join(self.root, "checkpoint")
        try:
            checkpoint = Checkpoint.load(path, read_only=True)
        except (StoreError, OSError) as error:
            yield Finding(path, 0, "bad_checkpoint", str(error))
            return
        for pos, name in (
            (0, "physic_msg_timestamp"),
            (8, "logics_msg_timestamp"),
            (16, "index_msg_timestamp"),
        ):
            value = getattr(checkpoint, name)
            if value < 0 or value > max(self.last_timestamp, 0):
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

    def _config_files(self) -> Iterator[Finding]:
        from rmqstore.consumer.settings_sources import settings_sources
        from rmqstore.rocksdb.pop_records import has_pop_records, pop_records

        kinds: tuple[SettingsKind, ...] = ("topics", "subscription_groups", "consumer_offsets")
        for kind in kinds:
            path = os.path.join(self.root, "config")
            try:
                for source in settings_sources(self.root, kind, quiet=True):
                    yield from source.findings
            except MissingDependencyError as error:
                yield Finding(path, 0, "not_checked", f"{kind}: {error.message}")
            except OSError as error:
                yield Finding(getattr(error, "filename", None) or path, 0, "file", f"{kind}: {error}")
        if has_pop_records(self.root):
            path = os.path.join(self.root, "kvStore")
            findings: list[Finding] = []
            try:
                for _ in pop_records(self.root, findings):
                    pass
            except MissingDependencyError as error:
                findings.append(Finding(path, 0, "not_checked", f"pop records: {error.message}"))
            except (StoreError, OSError) as error:
                findings.append(Finding(path, 0, "damaged_database", f"pop records: {error}"))
            yield from findings


class _QueueCheck:
    """Compares the units of one queue with the records as they come."""

    def __init__(self, checker: _Checker, topic: str, queue_id: int):
        self.checker = checker
        self.queue: AnyConsumeQueue | None = None
        self.covered = 0
        self.problem: Finding | None = None
        self.missing_reported = 0
        self.topic, self.queue_id = topic, queue_id
        self.seen: set[int] = set()
        try:
            self.queue = checker.queues.find(topic, queue_id)
        except (StoreError, OSError) as error:
            self.problem = Finding(
                getattr(error, "path", None) or checker.root, getattr(error, "pos", None) or 0, "file", str(error)
            )

    def records(self, columns: RecordColumns, rows: np.ndarray) -> Iterator[Finding]:
        queue = self.queue
        if self.problem is not None:
            return
        if queue is None:
            yield from self._missing(int(columns.queue_offset[rows[0]]), int(columns.phy_offset[rows[0]]), len(rows))
            return
        if not isinstance(queue, ConsumeQueue):
            yield from self._batch_records(columns, rows)
            return
        if queue.ext is None and queue.agrees(columns, rows):
            self.covered += len(rows)
            return
        # Something is to be told, or cannot be told at once.
        offsets = columns.queue_offset[rows]
        phy_offsets, sizes, tags = columns.phy_offset[rows], columns.size[rows], columns.tags_code[rows]
        checks_tags = queue.ext is None and not (
            self.topic == SCHEDULE_TOPIC and "message_delay_level" in self.checker.config.assumed
        )
        # A run of queue offsets that go on by one is compared at once.
        ends = [*(np.flatnonzero(np.diff(offsets) != 1) + 1).tolist(), len(rows)]
        done = 0
        while done < len(rows):
            first = int(offsets[done])
            while ends[0] <= done:
                del ends[0]
            run = ends[0]
            phy, size, code = (
                queue.units(first, run - done) if first >= queue.first_unit else queue.units(queue.unit_num, 0)
            )
            count = len(phy)
            if not count:
                yield from self._missing(first, int(phy_offsets[done]), 1)
                done += 1
                continue
            part = slice(done, done + count)
            differ = (phy != phy_offsets[part]) | (size != sizes[part])
            if checks_tags:
                differ |= code != tags[part]
            self.covered += count
            for i in np.flatnonzero(differ).tolist():
                mapped_file = queue.queue.find((first + i) * queue.unit_size)
                assert mapped_file is not None
                yield Finding(
                    mapped_file.path,
                    (first + i) * queue.unit_size - mapped_file.file_from_offset,
                    "bad_unit",
                    f"unit {first + i} is {int(phy[i])}:{int(size[i])}:{int(code[i])}, the record at phy offset "
                    f"{int(phy_offsets[done + i])} needs {int(phy_offsets[done + i])}:{int(sizes[done + i])}:"
                    f"{int(tags[done + i])}",
                )
            done += count

    def _missing(self, queue_offset: int, phy_offset: int, num: int) -> Iterator[Finding]:
        # The first says what is wrong; the rest is counted.
        self.missing_reported += num
        if self.missing_reported == num:
            queue = self.queue
            yield Finding(
                os.path.join(self.checker.root, "consumequeue", self.topic, str(self.queue_id))
                if queue is None
                else queue.queue.path,
                0,
                "missing_unit",
                f"{self.topic}/{self.queue_id} has no unit {queue_offset} for the record at phy offset {phy_offset}",
            )

    def _batch_records(self, columns: RecordColumns, rows: np.ndarray) -> Iterator[Finding]:
        queue = self.queue
        assert isinstance(queue, BatchConsumeQueue)
        for row in rows.tolist():
            base, phy, size = int(columns.inner_base[row]), int(columns.phy_offset[row]), int(columns.size[row])
            unit = queue.unit(base)
            if unit is None:
                yield from self._missing(base, phy, 1)
                continue
            self.covered += 1
            expected = (base, phy, size, int(columns.tags_code[row]), max(int(columns.inner_num[row]), 1))
            time, needed = queue.store_timestamp(base), int(columns.store_timestamp[row])
            if tuple(unit) != expected or time != needed:
                yield Finding(
                    queue.queue.path,
                    0,
                    "bad_unit",
                    f"the unit of batch {base} is {(*unit, time)}, the record needs {(*expected, needed)}",
                )

    def finish(self) -> Iterator[Finding]:
        if self.problem is not None:
            yield self.problem
            return
        yield from self._files()
        if self.missing_reported > 1:
            yield Finding(
                self.checker.root if self.queue is None else self.queue.queue.path,
                0,
                "missing_unit",
                f"{self.topic}/{self.queue_id} lacks {self.missing_reported} units in all",
            )
        queue = self.queue
        if queue is None:
            return
        log = self.checker.commit_log
        first = queue.first_unit_at_or_after(log.min_offset)
        yield from self._tail(queue)
        if queue.unit_num - first <= self.covered or not isinstance(queue, ConsumeQueue):
            return
        # More units than records: find the ones that lead nowhere.
        for number in range(first, queue.unit_num):
            unit = queue.unit(number)
            if unit is None:
                continue
            message = log.look_up(unit.phy_offset, unit.size)
            if message is not None and (
                (message.topic, message.queue_id, message.queue_offset) == (self.topic, self.queue_id, number)
                or self.topic in message.properties.get("INNER_MULTI_DISPATCH", "").split(",")
            ):
                continue
            mapped_file = queue.queue.find(number * queue.unit_size)
            assert mapped_file is not None
            yield Finding(
                mapped_file.path,
                number * queue.unit_size - mapped_file.file_from_offset,
                "dangling_unit",
                f"unit {number} says {unit.phy_offset}:{unit.size}, where no record of {self.topic}/{self.queue_id} lies",
            )

    def _files(self) -> Iterator[Finding]:
        queue = self.queue
        listed = [] if queue is None else [queue.queue]
        if isinstance(queue, ConsumeQueue) and queue.ext is not None:
            listed.append(queue.ext.queue)
        for files in listed:
            for problem in files.problems:
                yield _of_error(problem, "file", files.path)

    def _tail(self, queue: AnyConsumeQueue) -> Iterator[Finding]:
        end = queue.queue.wrote_where
        for base in queue.queue.offsets:
            mapped_file = queue.queue.file(base)
            pos = max(end - base, 0)
            if pos >= mapped_file.size:
                continue
            last = mapped_file.last_nonzero(pos)
            if last > pos:
                yield Finding(
                    mapped_file.path,
                    pos,
                    "gap_in_queue",
                    f"unit {end // queue.unit_size} was never written, but {last - pos} bytes from it on are not zero",
                )


class _IndexCheck:
    """Compares the entries of all index files, in order, with the keys of the records as they come."""

    def __init__(self, checker: _Checker):
        self.checker = checker
        self.names = list(checker.index_service.names)
        self.file_number = 0
        self.entry = 1
        self.index: IndexFile | None = None
        self.started = False
        self.skipped = 0
        self.missing = 0
        self.previous = -1
        self.previous_hashes: list[int] = []
        self.total = 0

    def begin(self) -> Iterator[Finding]:
        if not self.names:
            return
        end = self.checker.end
        listed, self.names = self.names, []
        for name in listed:
            try:
                index = self.checker.index_service.file(name)
            except (FileNotFoundError, OffsetOutOfRangeError):
                continue  # The store that is looked at is in use, and the file expired meanwhile.
            self.names.append(name)
            for pos, detail in index.check_links(end):
                yield Finding(index.path, pos, "bad_index", detail)
            yield from self._header(index)
        self._open(0)

    def _header(self, index: IndexFile) -> Iterator[Finding]:
        header = index.header
        if not 1 < header.index_count <= index.index_num:
            return
        log = self.checker.commit_log
        first, last = index.read_entry(1)[1], index.read_entry(header.index_count - 1)[1]
        for pos, name, stated, needed in (
            (0, "beginTimestamp", header.begin_timestamp, log.store_timestamp_at(first)),
            (8, "endTimestamp", header.end_timestamp, log.store_timestamp_at(last)),
            (16, "beginPhyOffset", header.begin_phy_offset, first),
            (24, "endPhyOffset", header.end_phy_offset, last),
        ):
            if stated != needed and needed >= 0:
                yield Finding(index.path, pos, "bad_index", f"{name} is {stated}, its entries' records need {needed}")

    def go_to(self, file_number: int, entry: int) -> None:
        """Begin at this entry, from 1 on, of this file, from 0 on, instead of at the first."""
        self._open(file_number)
        self.entry = entry

    def _open(self, number: int) -> None:
        self.file_number = number
        self.entry = 1
        self.index = self.checker.index_service.file(self.names[number]) if number < len(self.names) else None

    def _next(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        # Up to `count` entries from where the comparison stands, all of one file.
        while self.index is not None:
            left = min(self.index.index_count, self.index.index_num) - self.entry
            if left > 0:
                return self.index.read_entries(self.entry, min(count, left))
            self._open(self.file_number + 1)
        return np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int32)

    def _agreeing(self, columns: RecordColumns, total: int) -> int:
        # Passes over all entries of the columns' keys, or those up to the end of a file, if there is nothing to tell of them; how
        # many keys they are.
        done = 0
        while done < total and self.index is not None:
            left = min(self.index.index_count, self.index.index_num) - self.entry
            if left <= 0:
                self._open(self.file_number + 1)
                continue
            count = min(left, total - done)
            if _dispatch.agreeing_entries(self.index, self.entry, columns, done) < count:
                break
            done += count
            row = int(np.searchsorted(columns.key_start[: columns.count], done - 1, side="right")) - 1
            first, phy_offset = int(columns.key_start[row]), int(columns.phy_offset[row])
            self._passed(count, phy_offset, columns.key_hash[first:done], first, total)
        return done

    def _passed(self, count: int, phy_offset: int, hashes: np.ndarray, first: int, total: int) -> None:
        # `count` entries were right; the last is of the record at `phy_offset`, whose hashes begin at `first` of `total`.
        self.started = True
        self.entry += count
        self.previous = phy_offset
        if first or not self.previous_hashes or len(hashes) == total:
            self.previous_hashes = hashes.tolist()

    def records(self, columns: RecordColumns) -> Iterator[Finding]:
        n = columns.count
        self.total += int(columns.key_start[n])
        if not self.names or not n:
            return
        starts = columns.key_start[: n + 1]
        total = int(starts[n])
        done = self._agreeing(columns, total)
        if done == total:
            return
        hashes = columns.key_hash[:total].copy()
        counts = np.diff(starts)
        phy_offsets = np.repeat(columns.phy_offset[:n], counts)
        times = np.repeat(columns.store_timestamp[:n], counts)
        while done < total:
            got_hashes, got_phy, got_diffs = self._next(total - done)
            count = len(got_phy)
            if not count:
                # Nothing is indexed from here on.
                self.missing += total - done
                if self.missing == total - done:
                    yield Finding(
                        self.checker.index_service.path,
                        0,
                        "missing_entry",
                        f"the keys of the record at phy offset {int(phy_offsets[done])} and of later ones are not indexed",
                    )
                return
            part = slice(done, done + count)
            same = (got_hashes == hashes[part]) & (got_phy == phy_offsets[part])
            good = count if same.all() else int(np.argmin(same))
            if good:
                yield from self._times(times[done : done + good], got_diffs[:good])
                done += good
                phy_offset = int(phy_offsets[done - 1])
                first = int(np.searchsorted(phy_offsets, phy_offset, side="left"))
                self._passed(good, phy_offset, hashes[first:done], first, total)
                continue
            following = self._entry_after()
            if self._is_odd(int(got_phy[0]), following):
                yield from self._odd_entry(int(got_phy[0]))
                # It stands where the entry of this key should, unless that comes after it.
                done += following != (int(hashes[done]), int(phy_offsets[done]))
                self.entry += 1
                continue
            of_record = int(np.searchsorted(phy_offsets, int(got_phy[0]), side="right"))
            if int(got_phy[0]) == int(phy_offsets[done]) and int(got_hashes[0]) in hashes[done + 1 : of_record]:
                # Entries of the record's first keys are gone, as with the file before; this one is of a later key.
                yield from self._missing(int(hashes[done]), int(phy_offsets[done]), int(got_phy[0]))
                done += 1
                continue
            yield from self._disagreement(
                int(got_hashes[0]), int(got_phy[0]), int(hashes[done]), int(phy_offsets[done])
            )
            if int(got_phy[0]) < int(phy_offsets[done]) or (
                int(got_phy[0]) == self.previous and int(got_phy[0]) <= int(phy_offsets[done])
            ):
                self.entry += 1
            elif int(got_phy[0]) > int(phy_offsets[done]):
                done += 1
            else:
                self.entry += 1
                done += 1

    def _entry_after(self) -> tuple[int, int] | None:
        # Hash and phy offset of the entry after the one where the comparison stands, maybe in the next file.
        index, number = self.index, self.entry + 1
        assert index is not None
        if number >= min(index.index_count, index.index_num):
            if self.file_number + 1 >= len(self.names):
                return None
            index, number = self.checker.index_service.file(self.names[self.file_number + 1]), 1
            if min(index.index_count, index.index_num) <= 1:
                return None
        key_hash, phy_offset, _, _ = index.read_entry(number)
        return key_hash, phy_offset

    def _is_odd(self, phy_offset: int, following: tuple[int, int] | None) -> bool:
        # Whether an entry says an offset that none in its place can have: outside the log, or above the one after it where
        # that goes on from the one before.  It tells nothing of the entries and records that follow.
        if not 0 <= phy_offset < self.checker.commit_log.max_offset:
            return True
        return following is not None and self.previous <= following[1] < phy_offset

    def _odd_entry(self, got_phy: int) -> Iterator[Finding]:
        index = self.index
        assert index is not None
        detail = (
            f"entry {self.entry} says phy offset {got_phy}, which does not lie between those of the entries around it"
        )
        if not 0 <= got_phy < self.checker.commit_log.max_offset:
            detail = (
                f"entry {self.entry} says phy offset {got_phy}, the log ends at {self.checker.commit_log.max_offset}"
            )
        yield Finding(index.path, index.entry_pos(self.entry), "bad_entry", detail)

    def _disagreement(self, got_hash: int, got_phy: int, want_hash: int, want_phy: int) -> Iterator[Finding]:
        index = self.index
        assert index is not None
        pos = index.entry_pos(self.entry)
        if got_phy < want_phy:
            # RocketMQ indexes the boundary record again after an unclean exit, and entries of expired records stay.
            again = got_phy == self.previous and got_hash in self.previous_hashes
            if not again and got_phy >= self.checker.commit_log.min_offset:
                yield Finding(
                    index.path, pos, "bad_entry", f"entry {self.entry} says phy offset {got_phy}, {want_phy} comes next"
                )
        elif got_phy > want_phy:
            yield from self._missing(want_hash, want_phy, got_phy)
        else:
            yield Finding(
                index.path,
                pos,
                "bad_entry",
                f"entry {self.entry} for phy offset {got_phy} has hash {got_hash}, the record's key has {want_hash}",
            )

    def _missing(self, want_hash: int, want_phy: int, got_phy: int) -> Iterator[Finding]:
        # Only the first is named; the others are counted.
        index = self.index
        assert index is not None
        self.skipped += 1
        if self.skipped == 1:
            yield Finding(
                index.path,
                index.entry_pos(self.entry),
                "missing_entry",
                f"no entry with hash {want_hash} for the record at phy offset {want_phy}; entry {self.entry} is of {got_phy}"
                + ("" if self.started else ", so the index begins later than the log"),
            )

    def _times(self, times: np.ndarray, diffs: np.ndarray) -> Iterator[Finding]:
        index = self.index
        assert index is not None
        begin = index.read_header()[0]
        if begin <= 0:
            needed = np.zeros(len(times), np.int64)
        else:
            delta = times - begin
            needed = np.clip(np.where(delta < 0, 0, delta // 1000), 0, 0x7FFFFFFF)
        wrong = diffs != needed
        if self.entry == 1 and len(wrong):
            # The first entry of a rolled file holds the time since the file before (RocketMQ 5.5.0), elsewhere 0.
            wrong[0] = False
        for i in np.flatnonzero(wrong).tolist():
            yield Finding(
                index.path,
                index.entry_pos(self.entry + i) + int(_core.IndexLayout.ENTRY_TIME_DIFF),
                "bad_entry",
                f"entry {self.entry + i} is {int(diffs[i])} s after the file's begin, its record {int(needed[i])} s",
            )

    def pass_over_range(self, begin: int, end: int) -> None:
        """Step over the entries of records in a stretch that could not be read."""
        while True:
            _, got_phy, _ = self._next(4096)
            if not len(got_phy):
                return
            # An entry that leads outside the log is a finding of its own file.
            inside = (got_phy < end) | (got_phy >= self.checker.commit_log.max_offset)
            count = len(got_phy) if inside.all() else int(np.argmin(inside))
            self.entry += count
            if count < len(got_phy):
                return

    def finish(self) -> Iterator[Finding]:
        """What is left over."""
        checker = self.checker
        if (
            checker.with_index
            and not self.names
            and self.total
            and checker.config.message_index_enable
            and not has_index_database(checker.root)
        ):
            yield Finding(
                checker.index_service.path,
                0,
                "missing_index",
                f"there is no index file, but the log holds {self.total} keys to index; `rebuild` makes it again",
            )
        if self.missing > 1 or self.skipped > 1:
            yield Finding(
                self.checker.index_service.path,
                0,
                "missing_entry",
                f"{self.missing + self.skipped} entries are missing in all",
            )
        while self.names:
            _, got_phy, _ = self._next(4096)
            if not len(got_phy):
                return
            index = self.index
            assert index is not None
            strange = np.flatnonzero(got_phy != self.previous)
            if len(strange):
                yield Finding(
                    index.path,
                    index.entry_pos(self.entry + int(strange[0])),
                    "bad_entry",
                    f"{len(strange)} entries from number {self.entry + int(strange[0])} on are of no record in the log",
                )
            self.entry += len(got_phy)
