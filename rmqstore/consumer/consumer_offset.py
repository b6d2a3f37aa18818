"""A broker's consumerOffset.json: the progress of consumer groups.

Owns the members of that file: a table of offsets, one of pulls, one of light message queues, and a data version; how a
file is read and replaced is `offsets_file`'s.  It knows no message and does not check that an offset lies in its
queue.  Invariants:

- What a broker of another version wrote beside these members is kept.
- A commit changes memory only; `persist` writes, in the order in which a broker writes.
- For reading, a group that cannot be read is a finding and the others are there; for writing it is an error and
  nothing is taken.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from rmqstore._core import java_string_hash
from rmqstore.arguments import one_text
from rmqstore.config import system_clock
from rmqstore.consumer.offsets_file import (
    OffsetsFile,
    checked_name,
    checked_number,
    java_order,
    refuse_other_kind,
    table_of,
    text_key,
    whole_number,
    with_unknown,
)
from rmqstore.errors import CorruptionError, Finding

__all__ = ["ConsumerOffsets"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


def _queue_table(document: Any, name: str, path: str, findings: list[Finding] | None) -> dict[str, dict[int, int]]:
    def table(key: Any, queues: Any) -> dict[int, int]:
        if not isinstance(queues, dict):
            raise CorruptionError(f"{name}: {key!r} is not an object", path)
        return {
            whole_number(queue_id, f"{name}: a queue id of {key!r}", path, 32): whole_number(
                offset, f"{name}: the offset of queue {queue_id} of {key!r}", path
            )
            for queue_id, offset in queues.items()
        }

    return _entries(document, name, path, findings, table)


def _entries(
    document: Any, name: str, path: str, findings: list[Finding] | None, value_of: Callable[[Any, Any], T]
) -> dict[str, T]:
    # A table's entries; one that cannot be read is a finding, or where there is no list for these an error.
    result: dict[str, T] = {}
    for key, value in table_of(document, name, path).items():
        try:
            result[text_key(key, name, path)] = value_of(key, value)
        except CorruptionError as error:
            if findings is None:
                raise
            findings.append(Finding(path, error.pos or 0, "bad_consumer_offset", f"{error.message}; the other groups are read"))
    return result


class ConsumerOffsets(OffsetsFile):
    """Progress of consumer groups as a broker keeps it in `config/consumerOffset.json`.

    An offset is the queue offset that the group consumes next.  All methods may be called from several threads; the
    tables change meanwhile, so take `list` for a copy of them.  The constructor gives empty tables and reads nothing: a file
    that exists wants `load`.

    Parameters
    ----------
    path : str or os.PathLike
        ``.../config/consumerOffset.json``, or ``lmqConsumerOffset.json`` where a broker with `enableLmq` keeps it.
    read_only : bool
        Whether `commit`, `remove` and `persist` are refused.
    version_step : int
        Commits after which the data version goes up by one (`consumer_offset_update_version_step`).
    clock : callable, optional
        Gives the time in ms since the epoch, for the data version.

    Attributes
    ----------
    offset_table : dict
        ``"topic@group"`` -> queue id -> offset.
    pull_offset_table : dict
        The same for what was pulled (5.4.0 and later).
    lmq_offset_table : dict
        ``"topic@group"`` -> offset, of light message queues.
    data_version : dict
        Counter, state version and timestamp (ms); empty as long as the file has none (before 5.0.0).
    path : str
    read_only : bool
    source : str or None
        The file that was read: the main file, its backup, or None when there was neither.
    passed_over : list of CorruptionError
        What is wrong with a main file in whose place the backup was read, or that is empty and has none.
    findings : list of Finding
        Entries that cannot be read, each of a group in a topic; the others are (read-only use).
    refusal : str
        Why nothing may be committed, also with ``read_only=False``; "" where nothing speaks against it.
    not_read : str or None
        A second file of progress in the store, which a broker with another ``enableLmq`` uses.
    """

    __slots__ = (
        "_clock",
        "_commits",
        "_has_lmq",
        "_members",
        "_version_members",
        "_version_step",
        "data_version",
        "findings",
        "lmq_offset_table",
        "not_read",
        "offset_table",
        "pull_offset_table",
    )

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        read_only: bool = True,
        version_step: int = 500,
        clock: Callable[[], int] | None = None,
    ):
        if version_step < 1:
            raise ValueError(f"version_step is {version_step}: give the number of commits, 1 or more")
        super().__init__(path, read_only)
        self.offset_table: dict[str, dict[int, int]] = {}
        self.pull_offset_table: dict[str, dict[int, int]] = {}
        self.lmq_offset_table: dict[str, int] = {}
        self.data_version: dict[str, int] = {}
        self.findings: list[Finding] = []
        self.not_read: str | None = None
        self._version_step = version_step
        self._clock = system_clock if clock is None else clock
        self._commits = 0
        self._has_lmq = os.path.basename(self.path) == "lmqConsumerOffset.json"
        # The members of the file and of its data version, for their order and for those that are unknown here.
        self._members: dict[Any, Any] = {}
        self._version_members: dict[Any, Any] = {}

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        read_only: bool = True,
        *,
        version_step: int = 500,
        clock: Callable[[], int] | None = None,
    ) -> ConsumerOffsets:
        """Read the file at `path` (``.../config/consumerOffset.json``), or its ``.bak`` if the file is of no use.

        A missing file without a backup means that nothing was consumed yet.  With ``read_only=False`` a damaged main
        file whose backup is good is renamed to ``.damaged``, so that it can never replace the backup, and temporary
        files of a killed process are deleted.

        A file with an entry that cannot be read (a group whose offset is not a number) counts as damaged, as it does for a
        broker.  Where the backup is of no use either, such an entry hides no other one from who only reads: it is in
        `findings`, and logged.  A writer gets the error: writing the file again would lose the entry.

        Raises
        ------
        CorruptionError
            The file is damaged and the backup is missing or damaged too; nothing was changed.
        OSError
            A file cannot be read.
        """
        offsets = cls(path, read_only=read_only, version_step=version_step, clock=clock)
        try:
            offsets._load(offsets._decode)
        except CorruptionError:
            if not read_only:
                raise
            offsets._load(lambda document, path: offsets._decode(document, path, whole=False))
        return offsets

    def _decode(self, document: Any, path: str, whole: bool = True) -> None:
        findings: list[Finding] | None = None if whole else []
        refuse_other_kind(document, "consumerOffset.json", path)
        offset_table = _queue_table(document, "offsetTable", path, findings)
        pull_offset_table = _queue_table(document, "pullOffsetTable", path, findings)
        lmq_offset_table = _entries(
            document,
            "lmqOffsetTable",
            path,
            findings,
            lambda key, offset: whole_number(offset, f"lmqOffsetTable: the offset of {key!r}", path),
        )
        version_members = table_of(document, "dataVersion", path)
        data_version = {
            name: whole_number(version_members[name], f"dataVersion: {name}", path)
            for name in ("counter", "stateVersion", "timestamp")
            if version_members.get(name) is not None
        }
        for finding in findings or ():
            logger.warning("%s: %s", finding.path, finding.detail)
        # All of it or nothing: a file that fails in its last table must not leave the first ones behind.
        self.offset_table, self.pull_offset_table = offset_table, pull_offset_table
        self.lmq_offset_table, self.data_version = lmq_offset_table, data_version
        self.findings = findings or []
        self._members, self._version_members = document or {}, version_members
        self._has_lmq = self._has_lmq or "lmqOffsetTable" in self._members
        for name in ("dataVersion", "groupTopicMap", "lmqOffsetTable", "offsetTable", "pullOffsetTable"):
            if name in self._members:
                self._members[name] = None

    def get(self, group: str, topic: str, queue_id: int) -> int:
        """Next offset that `group` consumes from a queue; -1 when it is unknown, as a broker answers."""
        group = one_text(group, "group")
        key = f"{topic}@{group}"
        with self._lock:
            if _is_lmq(group) and queue_id == 0 and key in self.lmq_offset_table:
                return self.lmq_offset_table[key]
            return self.offset_table.get(key, {}).get(queue_id, -1)

    def list(self) -> dict[tuple[str, str], dict[int, int]]:
        """All progress as (group, topic) -> queue id -> offset; a copy.

        A key is cut at its first ``@``, which no topic contains; the group may (``group@broadcast`` in 5.5.0).
        """
        result: dict[tuple[str, str], dict[int, int]] = {}
        with self._lock:
            for key, queues in self.offset_table.items():
                topic, _, group = key.partition("@")
                result[group, topic] = dict(queues)
            for key, offset in self.lmq_offset_table.items():
                topic, _, group = key.partition("@")
                if _is_lmq(group):
                    result.setdefault((group, topic), {})[0] = offset
        return result

    def commit(self, group: str, topic: str, queue_id: int, queue_offset: int) -> None:
        """Note that `group` consumes `queue_offset` of a queue next; `persist` makes it durable.

        A smaller offset than the one that is known replaces it too, as in a broker; that is logged.

        Parameters
        ----------
        group : str
            May contain ``@`` (a broker notes broadcasting groups as ``group@broadcast``).  Where the file has a table of
            light message queues, groups that begin with ``%LMQ%`` go there.
        topic : str
            Without ``@``.
        queue_id : int
            0 to 2**31 - 1; 0 for a light message queue.
        queue_offset : int
            0 to 2**63 - 1.

        Raises
        ------
        ValueError
            A value outside these bounds.
        ReadOnlyError
            The offsets were loaded read-only.
        """
        self._check_writable()
        key = f"{checked_name(topic, 'topic', '@')}@{checked_name(group, 'group', '')}"
        queue_id = checked_number(queue_id, "queue_id", 32)
        offset = checked_number(queue_offset, "queue_offset", 64)
        lmq = self._has_lmq and _is_lmq(group)
        if lmq and queue_id:
            raise ValueError(f"queue_id is {queue_id}: a light message queue has only queue 0")
        with self._lock:
            if lmq:
                # A broker advances the data version for its plain table alone.
                before = self.lmq_offset_table.get(key)
                self.lmq_offset_table[key] = offset
            else:
                queues = self.offset_table.setdefault(key, {})
                before = queues.get(queue_id)
                queues[queue_id] = offset
                self._commits += 1
                if self._commits % self._version_step == 0:
                    self._next_version()
            self._changes += before != offset
        if before is not None and offset < before:
            logger.warning("the offset of %s, queue %d, goes back from %d to %d", key, queue_id, before, offset)

    def _next_version(self) -> None:
        # The counter is a Java long.
        counter = (self.data_version.get("counter", 0) + 1 + 2**63) % 2**64 - 2**63
        self.data_version |= {"counter": counter, "timestamp": int(self._clock())}
        self._changes += 1

    def remove(self, group: str | None = None, topic: str | None = None) -> int:
        """Forget the progress of a group, or of all groups in a topic, or with both names of one group in one topic.

        In all tables.  A broker's `cleanOffset` by topic passes over groups with an ``@`` in them; here they are removed.

        Returns
        -------
        int
            The number of pairs of topic and group that were forgotten.

        Raises
        ------
        ValueError
            Neither a group nor a topic was given.
        ReadOnlyError
            The offsets were loaded read-only.
        """
        self._check_writable()
        if group is None and topic is None:
            raise ValueError("give a group, a topic or both")

        def meant(key: str) -> bool:
            key_topic, _, key_group = key.partition("@")
            return group in (None, key_group) and topic in (None, key_topic)

        tables: tuple[dict[str, Any], ...] = (self.offset_table, self.pull_offset_table, self.lmq_offset_table)
        with self._lock:
            keys = {key for table in tables for key in table if meant(key)}
            for table in tables:
                for key in keys:
                    table.pop(key, None)
            self._changes += bool(keys)
        if keys:
            logger.info("offsets forgotten: %s", ", ".join(sorted(keys)))
        return len(keys)

    def persist(self) -> bool:
        """Write the file if there is something new in the tables; the one that was there becomes ``.bak``.

        The text is what a broker of 5.0.0 to 5.3.x writes, which those of other versions read too.  Commits of other
        threads meanwhile are not held up and wait for the next time.  A missing ``config`` directory is created.

        Returns
        -------
        bool
            Whether the file was written; True means that it is on disk.

        Raises
        ------
        OSError
            It could not be written, with the `errno` of the cause; the files on disk are what they were, and another
            `persist` tries again.
        ReadOnlyError
            The offsets were loaded read-only.
        """
        return super().persist()

    def _note(self) -> Any:
        if "timestamp" not in self.data_version:
            self.data_version["timestamp"] = int(self._clock())
        return (
            {"counter": 0, "stateVersion": 0} | self.data_version,
            {key: dict(queues) for key, queues in self.offset_table.items()},
            {key: dict(queues) for key, queues in self.pull_offset_table.items()},
            dict(self.lmq_offset_table),
        )

    def _document(self, noted: Any) -> dict[str, Any]:
        version, offset_table, pull_offset_table, lmq_offset_table = noted
        offset_table = _in_java_order(offset_table)
        known: dict[str, Any] = {
            "dataVersion": with_unknown(version, self._version_members),
            "groupTopicMap": _group_topic_map(offset_table),
            "offsetTable": offset_table,
        }
        if self._has_lmq or lmq_offset_table:
            keys = java_order(lmq_offset_table, 1024, java_string_hash)
            known["lmqOffsetTable"] = {key: lmq_offset_table[key] for key in keys}
        if pull_offset_table or "pullOffsetTable" in self._members:
            known["pullOffsetTable"] = _in_java_order(pull_offset_table)
        return with_unknown(dict(sorted(known.items())), self._members)

    def __repr__(self) -> str:
        return f"<ConsumerOffsets {self.path!r} {len(self.offset_table)} of topic@group>"


def _is_lmq(group: str) -> bool:
    return group.startswith("%LMQ%")


def _in_java_order(table: dict[str, dict[int, int]]) -> dict[str, dict[int, int]]:
    return {
        key: {queue_id: table[key][queue_id] for queue_id in java_order(table[key], 64, int)}
        for key in java_order(table, 1024, java_string_hash)
    }


def _group_topic_map(offset_table: Iterable[str]) -> dict[str, list[str]]:
    """Group -> topics, of the keys that Java's `split("@")`, which drops empty ends, cuts into two."""
    topics: dict[str, dict[str, None]] = {}
    for key in offset_table:
        parts = key.rstrip("@").split("@")
        if len(parts) == 2:
            topics.setdefault(parts[1], {})[parts[0]] = None
    return {
        group: java_order(topics[group], 8, java_string_hash, concurrent=False)
        for group in java_order(topics, 128, java_string_hash, concurrent=False)
    }
