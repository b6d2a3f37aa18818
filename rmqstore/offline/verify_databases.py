"""Verify the queues and the index that a store keeps in RocksDB: compare them with the log.

Nothing is completed from the log.  Two things that a broker leaves are not findings: entries of records that the log no longer has,
and missing entries of records after the last indexed one, which a broker adds when it starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

from rmqstore import _numpy as np
from rmqstore._dispatch import RecordColumns
from rmqstore.commitlog.commit_log import CommitLog
from rmqstore.config import StoreConfig
from rmqstore.consumequeue.queue_folders import can_name_queue
from rmqstore.errors import CorruptionError, Finding, MissingDependencyError, StoreError, finding_of
from rmqstore.files.os_errors import is_unreadable
from rmqstore.message import SCHEDULE_TOPIC, MessageExt, decode_java_utf8
from rmqstore.offline.compared import unread_database
from rmqstore.rocksdb.database import may_be_database, queue_databases
from rmqstore.rocksdb.index import IndexDatabase, index_folder, keys_of_message, may_have_entries, parse_entry
from rmqstore.rocksdb.queues import QueueDatabase, Units
from rmqstore.spans import Span, without
from rmqstore.store.dispatch_rules import DeletedTopics, QueueLife, database_life, further_places, unit_rows

__all__ = ["has_index_database", "verify_index_database"]


def has_index_database(root: str) -> bool:
    """Return True if the store at `root` has its index in RocksDB, or if the database is too damaged to know."""
    if not may_be_database(index_folder(root)):
        return False
    try:
        with contextlib.closing(IndexDatabase(root)) as database:
            return database.has_entries
    except MissingDependencyError:
        return may_have_entries(root)
    except (StoreError, OSError):
        return True


def verify_index_database(commit_log: CommitLog, root: str, end: int) -> Iterator[Finding]:
    """Compare the index in RocksDB of the store at `root` with its log, which ends at phy offset `end`."""
    path = index_folder(root)
    if not may_be_database(path):
        return
    try:
        with contextlib.closing(IndexDatabase(root)) as database:
            if database.log_damage is not None:
                detail = f"the index in RocksDB: its log or MANIFEST is damaged ({database.log_damage}); later entries are missing"
                yield Finding(path, 0, "damaged_database", detail)
            if database.has_entries:
                yield from _Comparison(commit_log, database, end).run()
    except (StoreError, OSError) as error:
        if not isinstance(error, MissingDependencyError) or may_have_entries(root):
            yield unread_database(path, error, "the index in RocksDB")


class _Comparison:
    def __init__(self, commit_log: CommitLog, database: IndexDatabase, end: int):
        self.log, self.database = commit_log, database
        self.low, self.end = commit_log.min_offset, end
        # The last indexed record has all its entries; later ones may have some.
        self.last = min(database.last_offset, end - 1)

    def run(self) -> Iterator[Finding]:
        yield from self._lacking()
        for key, value in self.database.entries():
            detail = self._problem(key, value)
            if detail is not None:
                name = key.decode("utf-8", "backslashreplace")
                yield Finding(self.database.path, 0, "bad_index_entry", f"the entry {name!r} is wrong: {detail}")

    def _lacking(self) -> Iterator[Finding]:
        # One finding a run of records: an index that was switched on late lacks the entries of all older ones.
        first = last = -1
        missing = 0
        for message in self._records():
            keys = keys_of_message(message)
            lacking = sum(not self.database.has(key) for key in keys)
            if lacking:
                first = message.phy_offset if not missing else first
                last, missing = message.phy_offset, missing + lacking
            elif keys:
                yield from self._missing(first, last, missing)
                missing = 0
        yield from self._missing(first, last, missing)

    def _records(self) -> Iterator[MessageExt]:
        if self.last < self.low:
            return
        for page in self.log.pages(self.low, self.end):
            for message in page if isinstance(page, list) else ():
                if message.phy_offset > self.last:
                    return
                yield message

    def _problem(self, key: bytes, value: bytes) -> str | None:
        # Entries of deleted records stay for a while.
        entry = parse_entry(key, value)
        if entry is None:
            return "its bytes are not an entry's"
        if entry.phy_offset >= self.end:
            return f"it leads to phy offset {entry.phy_offset}, and the log ends at {self.end}"
        if entry.phy_offset < self.low:
            return None
        message = self.log.look_up(entry.phy_offset)
        if message is None:
            return f"no record begins at phy offset {entry.phy_offset}"
        if key not in keys_of_message(message):
            return f"the record at phy offset {entry.phy_offset} ({message.topic}) has no such entry"
        if entry.store_timestamp != message.store_timestamp:
            return f"it says store time {entry.store_timestamp}, the record {message.store_timestamp}"
        return None

    def _missing(self, first: int, last: int, number: int) -> Iterator[Finding]:
        if number:
            where = f"the record at phy offset {first}" if first == last else f"records from phy offset {first} to {last}"
            detail = f"{number} entries of {where} are missing; exact queries find them in the log only if they look there"
            yield Finding(self.database.path, 0, "missing_index_entry", detail)


_STRAY = "rocksdict-config.json"
# Units that are read at once.
_PIECE = 1 << 16


class QueueDatabaseCheck:
    """Compares the queues in RocksDB of the store at `root` with its records, in the order of the log."""

    def __init__(self, root: str, folders: tuple[str, ...], config: StoreConfig, commit_log: CommitLog):
        self.folders, self.path = folders, folders[0]
        self.commit_log = commit_log
        # Only records of a broker that dispatches to further queues name them.
        self.config = dataclasses.replace(config, enable_lmq=True, enable_multi_dispatch=True)
        self.findings: list[Finding] = []
        self.database: QueueDatabase | None = None
        try:
            self.database = QueueDatabase(self.path)
            if self.database.log_damage is not None:
                self._damaged(CorruptionError(f"the RocksDB database: {self.database.log_damage}", self.path))
        except CorruptionError as error:
            self._damaged(error)
        except MissingDependencyError:
            raise
        except StoreError as error:
            self.findings.append(finding_of(error, "not_checked", self.path))
        except OSError as error:
            if is_unreadable(error):
                self.findings.append(unread_database(self.path, error, "queues in RocksDB"))
            else:
                path = os.fsdecode(error.filename) if error.filename is not None else self.path
                text = f"the database is not checked, it cannot be read: {error.strerror or error}"
                self._damaged(CorruptionError(text, path))
        self._missing: dict[tuple[str, int], tuple[int, int, int]] = {}
        # The queue offsets of units that belong to a record, in runs.
        self._met: dict[tuple[str, int], list[Span]] = {}
        self._deleted = DeletedTopics(root, frozenset(topic for topic, _ in self.database.last) if self.database else ())
        self._lives: dict[tuple[str, int], QueueLife | None] = {}
        # By topic the phy offset of the last record of a queue that began again later.
        self._deleted_after: dict[str, int] = {}
        self._behind = 0
        self._behind_from = -1
        self._told: set[str] = set()

    @classmethod
    def of(cls, root: str, config: StoreConfig, commit_log: CommitLog) -> QueueDatabaseCheck | None:
        """Return a check of the store at `root`; None if it has no queues in RocksDB."""
        folders = queue_databases(root)
        return cls(root, folders, config, commit_log) if folders else None

    def close(self) -> None:
        """Close the database."""
        if self.database is not None:
            self.database.close()

    def _finding(self, kind: str, detail: str, num: int = 1) -> Finding:
        return Finding(self.path, 0, kind, detail, num=num)

    def _damaged(self, error: CorruptionError) -> None:
        finding = finding_of(error, "bad_database", self.path)
        if finding not in self.findings:
            self.findings.append(finding)

    def _taken(self) -> list[Finding]:
        # The findings since the last call.
        taken = [finding for finding in self.findings if finding.detail not in self._told]
        self._told |= {finding.detail for finding in taken}
        return taken

    def begin(self) -> Iterator[Finding]:
        """Check the files of the database by themselves."""
        if len(self.folders) > 1:
            detail = f"a broker with queues in {self.folders[0]} does not start while this is a database too; move it away"
            yield Finding(self.folders[1], 0, "second_database", detail)
        for folder in self.folders:
            stray = os.path.join(folder, _STRAY)
            if os.path.exists(stray):
                yield Finding(stray, 0, "file", "no part of the database: rocksdict left it when somebody looked; delete it")
        if self.database is not None:
            try:
                self.database.check()
            except CorruptionError as error:
                self._damaged(error)
        yield from self._taken()

    # ------------------------------------------------------------------------------------------------------ records

    def records(self, columns: RecordColumns) -> Iterator[Finding]:
        """Compare the units of these records."""
        if self.database is None or not columns.count:
            return
        # An inner batch has a unit like any record.
        rows = unit_rows(columns)
        groups, order = columns.by_queue(rows.queued.view(np.uint8))
        for number, start, end in groups:
            topic, queue_id = columns.topics.queues[number]
            name = decode_java_utf8(columns.topics.topics[topic])
            yield from self._compare(name, queue_id, columns, order[start:end])
        for row in rows.further.tolist():
            message = self.commit_log.look_up(int(columns.phy_offset[row]))
            if message is not None:
                for name, offset in further_places(message, self.config)[0]:
                    yield from self._compare(name, 0, columns, np.array([row]), np.array([offset], np.int64))
        yield from self._taken()

    def _compare(
        self, topic: str, queue_id: int, columns: RecordColumns, rows: np.ndarray, offsets: np.ndarray | None = None
    ) -> Iterator[Finding]:
        database = self.database
        assert database is not None
        offsets = columns.queue_offset[rows] if offsets is None else offsets
        of_this = self._of_this_queue((topic, queue_id), offsets, columns.phy_offset[rows])
        offsets, rows = offsets[of_this], rows[of_this]
        if not len(rows):
            return
        damage: list[CorruptionError] = []
        stored = database.units(topic, queue_id, int(offsets.min()), int(offsets.max()) + 1, damage)
        for error in damage:
            self._damaged(error)
        places = np.searchsorted(stored.queue_offsets, offsets)
        there = places < len(stored.queue_offsets)
        there[there] = stored.queue_offsets[places[there]] == offsets[there]
        # If a queue began again after the checkpoint, the database still has the old one.
        began = (columns.phy_offset[rows] >= database.checkpoint) & there
        began[began] = stored.phy_offsets[places[began]] < columns.phy_offset[rows[began]]
        there &= ~began
        self._note_met(topic, queue_id, offsets[there])
        if not damage:
            self._note_missing(topic, queue_id, offsets[~there], columns.phy_offset[rows[~there]])
        units = Units(stored.queue_offsets[places[there]], stored.values[places[there]])
        yield from self._wrong((topic, queue_id), columns, rows[there], units)

    def _of_this_queue(self, key: tuple[str, int], offsets: np.ndarray, phy_offsets: np.ndarray) -> np.ndarray:
        # False for records of a deleted topic, or of a deleted queue of this name.
        database = self.database
        assert database is not None
        if key not in database.last:
            return np.full(len(offsets), not self._deleted.is_deleted(key[0]))
        if key not in self._lives:
            self._lives[key] = database_life(self.commit_log, database, *key, self._damaged)
        life = self._lives[key]
        if life is None:
            return np.ones(len(offsets), bool)
        earlier = life.earlier(offsets, phy_offsets)
        if earlier.any():
            self._deleted_after[key[0]] = max(self._deleted_after.get(key[0], -1), int(phy_offsets[earlier].max()))
        return ~earlier

    def _note_met(self, topic: str, queue_id: int, offsets: np.ndarray) -> None:
        # Records come in order, so that most queues are one run.
        runs = self._met.setdefault((topic, queue_id), [])
        for run in np.split(offsets, np.flatnonzero(np.diff(offsets) != 1) + 1) if len(offsets) else ():
            begin, end = int(run[0]), int(run[-1]) + 1
            if runs and runs[-1][1] == begin:
                runs[-1] = runs[-1][0], end
            else:
                runs.append((begin, end))

    def _note_missing(self, topic: str, queue_id: int, offsets: np.ndarray, phy_offsets: np.ndarray) -> None:
        assert self.database is not None
        behind = phy_offsets >= self.database.checkpoint
        if behind.any():
            self._behind += int(behind.sum())
            if self._behind_from < 0:
                self._behind_from = int(phy_offsets[behind][0])
        if not behind.all():
            first, phy, num = self._missing.get((topic, queue_id), (int(offsets[0]), int(phy_offsets[0]), 0))
            self._missing[topic, queue_id] = first, phy, num + int((~behind).sum())

    def _wrong(
        self, key: tuple[str, int], columns: RecordColumns, rows: np.ndarray, units: Units
    ) -> Iterator[Finding]:
        topic, queue_id = key
        phy, sizes, codes, times = units.phy_offsets, units.sizes, units.tags_codes, units.store_timestamps
        wrong = (phy != columns.phy_offset[rows]) | (sizes != columns.size[rows])
        wrong |= times != columns.store_timestamp[rows]
        if not (topic == SCHEDULE_TOPIC and "message_delay_level" in self.config.assumed):
            wrong |= codes != columns.tags_code[rows]
        for i in np.flatnonzero(wrong).tolist():
            row = int(rows[i])
            needed = (columns.phy_offset[row], columns.size[row], columns.tags_code[row], columns.store_timestamp[row])
            detail = f"unit {units.queue_offsets[i]} of {topic}/{queue_id} is {phy[i]}:{sizes[i]}:{codes[i]}:{times[i]}, "
            detail += f"the record at phy offset {needed[0]} needs {':'.join(str(int(value)) for value in needed)}"
            yield self._finding("bad_unit", detail)

    # ---------------------------------------------------------------------------------------------------- the rest

    def finish(self, end: int) -> Iterator[Finding]:
        """Check what remains after the comparison of all records; `end` is the end of the log."""
        database = self.database
        if database is None:
            return
        for (topic, queue_id), (offset, phy, num) in sorted(self._missing.items()):
            if (topic, queue_id) not in database.last and phy <= self._deleted_after.get(topic, -1):
                continue
            detail = (
                f"{topic}/{queue_id} lacks {num} units in all, the first is {offset} of the record at phy offset {phy}: lost by a "
                "kill of the broker, or the topic was deleted; rebuild --what consumequeue makes queue files with them"
            )
            yield self._finding("missing_unit", detail)
        if self._behind:
            reached = f"ends at phy offset {database.checkpoint}" if database.checkpoint >= 0 else "is empty"
            detail = (
                f"the database {reached}, the log ends at {end}: {self._behind} units from the record at phy offset "
                f"{self._behind_from} on were not flushed; their broker is running, or was killed"
            )
            yield self._finding("queues_behind_log", detail)
        if database.checkpoint > end:
            detail = f"the checkpoint is {database.checkpoint}, the log ends at {end}; what was there is gone"
            yield self._finding("bad_checkpoint", detail)
        yield from self._stale(database, end)
        yield from self._not_met(database, end)
        yield from self._taken()

    def _not_met(self, database: QueueDatabase, end: int) -> Iterator[Finding]:
        # Units that point into the log, but to no record of their queue: for instance of a log that was restored from an older
        # copy and continued.  A unit that points into damage may be right.
        damage: np.ndarray | None = None
        low = self.commit_log.min_offset
        for (topic, queue_id), last in sorted(database.last.items()):
            num, first = 0, (0, 0)
            for begin, stop in without(0, last.queue_offset + 1, self._met.get((topic, queue_id), [])):
                for units in self._units_between(database, topic, queue_id, begin, stop):
                    odd = (units.phy_offsets >= low) & (units.phy_offsets < end)
                    if not odd.any():
                        continue
                    if damage is None:
                        damage = self._damaged_stretches(low, end)
                    if len(damage):
                        places = np.searchsorted(damage[:, 0], units.phy_offsets, "right") - 1
                        odd &= (places < 0) | (units.phy_offsets >= damage[places, 1])
                    chosen = np.flatnonzero(odd)
                    if len(chosen) and not num:
                        first = int(units.queue_offsets[chosen[0]]), int(units.phy_offsets[chosen[0]])
                    num += len(chosen)
            if num:
                detail = f"{num} units of {topic}/{queue_id} lead to no record of that queue, the first is {first[0]}, "
                detail += f"to phy offset {first[1]}: the log has others there; rebuild makes queues that fit it"
                yield self._finding("dangling_unit", detail, num)

    def _units_between(
        self, database: QueueDatabase, topic: str, queue_id: int, at: int, stop: int
    ) -> Iterator[Units]:
        # A damaged last unit may be 2**60 queue offsets after the one before it.
        try:
            while at < stop:
                following = database.at_or_after(topic, queue_id, at)
                if following is None or following.queue_offset >= stop:
                    return
                at = following.queue_offset
                yield database.units(topic, queue_id, at, min(at + _PIECE, stop))
                at += _PIECE
        except CorruptionError as error:
            self._damaged(error)

    def _damaged_stretches(self, begin: int, end: int) -> np.ndarray:
        stretches = self.commit_log.stretches(begin, end, check_crc=False)
        return np.array([(each.begin, each.end) for each in stretches if each.is_damage], np.int64).reshape(-1, 2)

    def _stale(self, database: QueueDatabase, end: int) -> Iterator[Finding]:
        # Units of deleted records are not findings: a broker deletes them when it compacts the database at night.
        try:
            for (topic, queue_id), num in database.beyond_last().items():
                last = database.last[topic, queue_id].queue_offset
                detail = f"{num} units of {topic}/{queue_id} lie beyond its last one, {last}; a truncation of the log left them"
                yield self._finding("stale_unit", detail)
            for (topic, queue_id), last_unit in database.last.items():
                if not can_name_queue(topic):
                    detail = f"{topic[:80]!r}/{queue_id} is not a name that a queue can have; its units are not read"
                    yield self._finding("bad_topic", detail)
                value = database.value(topic, queue_id, last_unit.queue_offset)
                if value is None or value[0] != last_unit.phy_offset:
                    detail = f"{topic}/{queue_id} is said to end with unit {last_unit.queue_offset} of the record at phy offset "
                    detail += f"{last_unit.phy_offset}, where the database has {'no unit' if value is None else value}"
                    yield self._finding("bad_unit", detail)
                elif last_unit.phy_offset >= end:
                    detail = f"the last unit of {topic}/{queue_id} leads to {last_unit.phy_offset}, the log ends at {end}"
                    yield self._finding("dangling_unit", detail)
        except CorruptionError as error:
            self._damaged(error)
