"""rebuild: rebuild the database of queues (RocksDB) of a broker with ``storeType=defaultRocksDB`` from its commit log alone.

It restores units that a kill of the broker lost.  `RebuildJob` puts it in place, and keeps the old one.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from rmqstore import _numpy as np
from rmqstore._core import Verdict
from rmqstore.commitlog.commit_log import CommitLog, check_store_root
from rmqstore.config import StoreConfig
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue
from rmqstore.consumequeue.database_queues import CollectedBatchQueue, CollectedQueue, CollectedQueues
from rmqstore.consumequeue.unit_queue import Unit
from rmqstore.errors import CorruptionError, StoreError
from rmqstore.files.durable import fsync_tree
from rmqstore.files.mapped_file import MappedFilePool
from rmqstore.message import encode_java_utf8
from rmqstore.offline.rebuild import RebuildJob, RebuildReport, dispatch_log
from rmqstore.offline.verify_databases import QueueDatabaseCheck
from rmqstore.rocksdb.queues import QueueDatabaseWriter, Units
from rmqstore.store.dispatcher import LogDispatcher

__all__ = ["rebuild_queue_database"]

_WHAT = ("consumequeue",)


def rebuild_queue_database(
    path: str | os.PathLike[str],
    config: StoreConfig | None = None,
    output: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    drop_units: int = 0,
) -> RebuildReport:
    """Rebuild the queues as a database that a broker with ``storeType=defaultRocksDB`` opens (RocketMQ 5.5.0).

    Parameters and errors are those of `rebuild`; also MissingDependencyError without rocksdict, and StoreError if the new database
    cannot be written.  With `output`, the database is ``consumequeue`` there.
    """
    job = RebuildJob(check_store_root(path), _WHAT, config, output, drop_units, as_database=True)
    return job.run(lambda known, work: _build(known, work, progress))


def _build(job: RebuildJob, work: str, progress: Callable[[int, int], None] | None) -> RebuildReport:
    root, config = job.root, job.known_config
    # In the store it gets the name of a folder of queues only when it takes its place.
    target = os.path.join(work, "queues" if job.output is None else "consumequeue")
    report = RebuildReport(_WHAT, root)
    commit_log = CommitLog(root, config, MappedFilePool(4), read_only=True)
    writer = QueueDatabaseWriter(target)
    try:
        commit_log.load()
        queues = _WrittenQueues(root, config, MappedFilePool(1), writer)
        queues.load_topics(os.path.join(root, "config", "topics.json"))
        dispatcher = LogDispatcher(root, commit_log, queues, None)
        end = dispatch_log(job, commit_log, dispatcher, report, progress)
        writer.finish(queues.last(), end)
        _compare(root, commit_log, target, config, bool(dispatcher.counts.misplaced))
    finally:
        writer.close()
        commit_log.close()
    fsync_tree(work)
    return report


def _compare(root: str, commit_log: CommitLog, target: str, config: StoreConfig, misplaced: bool) -> None:
    begin, end = commit_log.min_offset, commit_log.max_offset
    check = QueueDatabaseCheck(root, (target,), config, commit_log)
    try:
        findings = list(check.begin())
        for stretch, columns in commit_log.scans(begin, end, keys=False):
            if stretch.verdict is Verdict.RECORD:
                findings += check.records(columns)
        findings += check.finish(end)
    finally:
        check.close()
    # A record whose queue offset or topic cannot be has no unit.
    for finding in findings:
        if finding.kind == "not_checked":
            raise StoreError(f"{finding.detail}; the database that was built is not put in place", finding.path)
        if not (misplaced and finding.kind == "missing_unit"):
            raise CorruptionError(
                f"the database that was built does not agree with the log ({finding.kind}: {finding.detail}); nothing was put "
                "in place, please report this",
                finding.path,
            )


class _Written:
    # A queue whose units are written instead of collected.

    _last: Unit | None

    def __init__(self, topic: str, queue_id: int, writer: QueueDatabaseWriter):
        super().__init__(topic, queue_id)  # type: ignore[call-arg]
        self.writer = writer
        self.name, self.number = encode_java_utf8(topic), queue_id
        self.num = 0
        self._first: Unit | None = None

    def first_record(self) -> Unit | None:
        """Return the first unit that was written, None for none."""
        return self._first

    def begin_again(self) -> int:
        """Delete every unit, see `UnitQueue.begin_again`."""
        num, self.num, self._first, self._last = self.num, 0, None, None
        self.writer.delete(self.name, self.number)
        return num

    def _write(self, units: Units, first: Unit, last: Unit) -> int:
        num = len(units.queue_offsets)
        self.writer.put(self.name, self.number, units)
        self._first, self._last = self._first or first, last
        self.num += num
        return num


class _WrittenQueue(_Written, CollectedQueue):
    # A later record with the same queue offset replaces an earlier one.

    @property
    def unit_num(self) -> int:
        """int: queue offset after the last unit."""
        return 0 if self._last is None else self._last.queue_offset + 1

    def put_units(
        self,
        queue_offset: int,
        phy_offsets: np.ndarray,
        sizes: np.ndarray,
        tags_codes: np.ndarray,
        store_timestamps: np.ndarray,
    ) -> int:
        """Write consecutive units, see `ConsumeQueue.put_units`."""
        offsets = np.arange(queue_offset, queue_offset + len(phy_offsets), dtype=np.int64)
        units = Units.of(offsets, phy_offsets, sizes, tags_codes, store_timestamps)
        ends = (Unit(int(offsets[i]), int(phy_offsets[i]), int(sizes[i]), int(tags_codes[i])) for i in (0, -1))
        return self._write(units, *ends)


class _WrittenBatchQueue(_Written, CollectedBatchQueue):
    # RocketMQ 5.5.0 writes one unit for an inner batch, at its base.

    def put(self, unit: Unit, store_timestamp: int, *, extended: bool = True) -> bool:
        """Write one unit."""
        columns = [np.array([each], np.int64) for each in (*unit[:4], store_timestamp)]
        return self._write(Units.of(*columns), unit, unit) > 0


class _WrittenQueues(CollectedQueues):
    def __init__(self, root: str, config: StoreConfig, pool: MappedFilePool, writer: QueueDatabaseWriter):
        super().__init__(root, config, pool, read_only=True)
        self.writer = writer

    def _make(self, topic: str, queue_id: int) -> AnyConsumeQueue:
        if topic in self._batch_topics:
            return _WrittenBatchQueue(topic, queue_id, self.writer)
        return _WrittenQueue(topic, queue_id, self.writer)

    def last(self) -> dict[tuple[bytes, int], tuple[int, int]]:
        """Return phy offset and queue offset of the last unit of each queue."""
        found = {}
        for queue in self.opened():
            assert isinstance(queue, _WrittenQueue | _WrittenBatchQueue)
            unit = queue.last_record()
            if unit is not None:
                found[queue.name, queue.queue_id] = unit.phy_offset, unit.queue_offset
        return found
