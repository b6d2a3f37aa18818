"""A broker's consumerOffset.json: the progress of consumer groups.

Owns the members of that file: tables of offsets, of pulls and of light message queues, and a data version; and replacing the file
safely.  It knows no message and does not check that an offset is in its queue.  Invariants:

- Unknown members, of a broker of another version, are kept.
- A commit changes memory only; `persist` writes.
- At every moment of a `persist` a whole main file is on disk (without hard links, its backup, `.bak`), and only a whole main file
  becomes the backup.
- For reading, an unreadable group is a finding that hides no other; for writing it is an error and nothing is read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from rmqstore.arguments import one_text, plain_text
from rmqstore.config import system_clock
from rmqstore.consumer.json_files import load_with_backup, refuse_other_kind, table_of, whole_number
from rmqstore.errors import CorruptionError, Finding, ReadOnlyError
from rmqstore.files.durable import fsync_directory, make_directories
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import NotCopied
from rmqstore.files.os_errors import full_disk, has_no_links, is_full
from rmqstore.message import encode_java_utf8

__all__ = ["ConsumerOffsets", "progress_key"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MEMBERS = ("dataVersion", "groupTopicMap", "lmqOffsetTable", "offsetTable", "pullOffsetTable")
_VERSION_MEMBERS = ("counter", "stateVersion", "timestamp")


class _QueueIds(dict[str, int]):
    # Queue ids by their names in the file; `whole_number` reads names that no broker writes.
    def __missing__(self, name: str) -> int:
        if not (name.isascii() and name.isdecimal() and len(name) < 10):
            raise ValueError(name)
        self[name] = int(name)
        return self[name]


def _queue_table(document: Any, name: str, path: str, findings: list[Finding] | None) -> dict[str, dict[int, int]]:
    queue_ids = _QueueIds()

    def table(key: str, queues: Any) -> dict[int, int]:
        if not isinstance(queues, dict):
            raise CorruptionError(f"{name}: {key!r} is not an object", path)
        # A fast path for the text of brokers: a store may have millions of entries.
        offsets = queues.values()
        if not queues or ({*map(type, offsets)} == {int} and min(offsets) >= 0 and max(offsets) < 2**63):
            with contextlib.suppress(ValueError):
                return dict(zip([queue_ids[each] for each in queues], offsets))
        return {
            whole_number(queue_id, f"{name}: a queue id of {key!r}", path, 32): whole_number(
                offset, f"{name}: the offset of queue {queue_id} of {key!r}", path
            )
            for queue_id, offset in queues.items()
        }

    return _entries(document, name, path, findings, table)


def _entries(
    document: Any, name: str, path: str, findings: list[Finding] | None, value_of: Callable[[str, Any], T]
) -> dict[str, T]:
    # A table's entries; one that cannot be read is a finding, or where there is no list for these an error.
    result: dict[str, T] = {}
    for key, value in table_of(document, name, path).items():
        try:
            result[key] = value_of(key, value)
        except CorruptionError as error:
            if findings is None:
                raise
            findings.append(Finding(path, error.pos or 0, "bad_consumer_offset", f"{error.message}; the other groups are read"))
    return result


def _checked_number(value: int, what: str, bits: int) -> int:
    """Return `value`, a whole number from 0 that fits into `bits` bits with a sign; ValueError otherwise."""
    number = operator.index(value)
    if isinstance(value, bool) or not 0 <= number < 2 ** (bits - 1):
        raise ValueError(f"{what} is {value!r}: give a whole number from 0 to 2**{bits - 1} - 1")
    return number


def _checked_name(value: str, what: str, never: str) -> str:
    """Return `value`, a text that is not empty, has none of the characters `never` and can be UTF-8; ValueError otherwise."""
    if not isinstance(value, str) or not value or any(char in value for char in never):
        raise ValueError(
            f"{what} is {value!r}: give a text that is not empty" + (f" and has none of {never!r}" if never else "")
        )
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError(f"{what} is {value!r}: give a text without lone surrogates, which UTF-8 cannot hold")
    return plain_text(value)


def progress_key(topic: str, group: str) -> str:
    """Return the key of a topic and group in the file; ValueError for a name that it cannot hold."""
    return f"{_checked_name(topic, 'topic', '@')}@{_checked_name(group, 'group', '')}"


class ConsumerOffsets(NotCopied):
    """The progress of consumer groups in a broker's `config/consumerOffset.json`.

    An offset is the queue offset that the group consumes next.  All methods are thread-safe; `list` returns a copy of the tables.
    The constructor creates empty tables; `load` reads a file.

    Parameters
    ----------
    path : str or os.PathLike
        ``.../config/consumerOffset.json``, or ``lmqConsumerOffset.json`` of a broker with `enableLmq`.
    read_only : bool
        Refuse `commit`, `remove` and `persist`.
    version_step : int
        The number of commits per data version (`consumer_offset_update_version_step`).
    clock : callable, optional
        Returns the time in ms since the epoch, for the data version.

    Attributes
    ----------
    offset_table : dict
        ``"topic@group"`` -> queue id -> offset.
    pull_offset_table : dict
        The same for pulls (5.4.0 and later).
    lmq_offset_table : dict
        ``"topic@group"`` -> offset, of light message queues.
    data_version : dict
        Counter, state version and timestamp (ms); may be empty (before 5.0.0).
    source : str or None
        The file that was read: the main file, its backup, or None.
    passed_over : list of CorruptionError
        Problems of a main file that was replaced by its backup, or is empty and has none.
    findings : list of Finding
        Unreadable entries, each of a group in a topic (read-only use).
    refusal : str
        The reason why commits are refused, also with ``read_only=False``, or "".
    not_read : str or None
        A second file of progress in the store, for brokers with another ``enableLmq``.
    """

    __slots__ = (
        "_changes", "_clock", "_commits", "_has_lmq", "_lock", "_main_is_whole", "_persist_lock", "_persisted", "_pid",
        "_unknown", "_unknown_of_version", "_version_step", "data_version", "findings", "lmq_offset_table", "not_read",
        "offset_table", "passed_over", "path", "pull_offset_table", "read_only", "refusal", "source",
    )  # fmt: skip

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
        # Absolute: the working directory may change before a write.
        self.path = os.fspath(path) if read_only else os.path.abspath(os.fspath(path))
        self.read_only = read_only
        self.refusal = ""
        self.source: str | None = None
        self.passed_over: list[CorruptionError] = []
        self.offset_table: dict[str, dict[int, int]] = {}
        self.pull_offset_table: dict[str, dict[int, int]] = {}
        self.lmq_offset_table: dict[str, int] = {}
        self.data_version: dict[str, int] = {}
        self.findings: list[Finding] = []
        self.not_read: str | None = None
        self._version_step = version_step
        self._clock = system_clock if clock is None else clock
        self._has_lmq = os.path.basename(self.path) == "lmqConsumerOffset.json"
        # Unknown members of the file, and of its data version.
        self._unknown: dict[str, Any] = {}
        self._unknown_of_version: dict[str, Any] = {}
        self._main_is_whole = False
        self._pid = os.getpid()
        # `_lock` guards the tables; `_persist_lock` guards the file, and is taken first.
        self._lock = threading.Lock()
        self._persist_lock = threading.Lock()
        # The numbers of commits, of changes, and of changes in the file.
        self._commits = self._changes = self._persisted = 0

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        read_only: bool = True,
        *,
        version_step: int = 500,
        clock: Callable[[], int] | None = None,
    ) -> ConsumerOffsets:
        """Read the file at `path` (``.../config/consumerOffset.json``), or its ``.bak`` if the file is missing or damaged.

        Without both files there is no progress.  With ``read_only=False`` a damaged main file with a good backup is renamed to
        ``.damaged``, so that it never replaces the backup, and temporary files of a killed process are deleted.

        A file with an unreadable entry (a group whose offset is not a number) counts as damaged, like for a broker.  If the backup
        is unusable too, a reader gets the other entries, and the bad one is in `findings` and logged.  A writer gets the error:
        writing the file again would lose the entry.

        Raises CorruptionError if both files are unusable, without changing anything, and OSError.
        """
        offsets = cls(path, read_only=read_only, version_step=version_step, clock=clock)
        try:
            offsets._load(offsets._decode)
        except CorruptionError:
            if not read_only:
                raise
            offsets._load(lambda document, path: offsets._decode(document, path, whole=False))
        return offsets

    def _load(self, decode: Callable[[Any, str], None]) -> None:
        self.passed_over = []
        _, self.source = load_with_backup(self.path, self.read_only, decode, self.passed_over)
        for problem in self.passed_over:
            logger.warning("%s", problem)
        self._main_is_whole = self.source == self.path
        if not self.read_only:
            _remove_leftovers(self.path)
            # The next persist must write a main file next to a lone backup.
            self._changes += self.source not in (None, self.path)

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
            for name in _VERSION_MEMBERS
            if version_members.get(name) is not None
        }
        for finding in findings or ():
            logger.warning("%s: %s", finding.path, finding.detail)
        # All or nothing: a file that fails in its last table leaves no earlier one.
        self.offset_table, self.pull_offset_table = offset_table, pull_offset_table
        self.lmq_offset_table, self.data_version = lmq_offset_table, data_version
        self.findings = findings or []
        members = document or {}
        self._has_lmq = self._has_lmq or "lmqOffsetTable" in members
        self._unknown = {name: value for name, value in members.items() if name not in _MEMBERS}
        self._unknown_of_version = {
            name: value for name, value in version_members.items() if name not in _VERSION_MEMBERS
        }

    @property
    def dirty(self) -> bool:
        """True if `persist` has something to write."""
        return self._changes != self._persisted

    def check_writable(self) -> None:
        """Raise ReadOnlyError if commits are refused: the offsets were loaded read-only, or by the parent of this process."""
        if self.refusal:
            raise ReadOnlyError(self.refusal, self.path)
        if self._pid != os.getpid():
            raise ReadOnlyError(
                "the offsets were loaded by the parent of this process; a forked child must not save them", self.path
            )
        if self.read_only:
            raise ReadOnlyError(
                "the offsets were loaded read-only: load them with read_only=False to change them", self.path
            )

    def get(self, group: str, topic: str, queue_id: int) -> int:
        """Return the next offset that `group` consumes from a queue; -1 if it is unknown, like a broker."""
        group = one_text(group, "group")
        key = f"{topic}@{group}"
        with self._lock:
            if _is_lmq(group) and queue_id == 0 and key in self.lmq_offset_table:
                return self.lmq_offset_table[key]
            return self.offset_table.get(key, {}).get(queue_id, -1)

    def list(self) -> dict[tuple[str, str], dict[int, int]]:
        """Return all progress as (group, topic) -> queue id -> offset; a copy.

        The first ``@`` of a key ends the topic; a group may contain more (``group@broadcast`` in 5.5.0).
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

        A smaller offset replaces a larger one, like in a broker, and is logged.

        - `group`: may contain ``@`` (a broker notes broadcasting groups as ``group@broadcast``).  If the file has a table of light
          message queues, it takes groups that begin with ``%LMQ%``.
        - `topic`: without ``@``.
        - `queue_id`: 0 to 2**31 - 1; 0 for a light message queue.
        - `queue_offset`: 0 to 2**63 - 1.

        Raises ValueError for a value outside these bounds, and ReadOnlyError.
        """
        self.check_writable()
        key = progress_key(topic, group)
        queue_id = _checked_number(queue_id, "queue_id", 32)
        offset = _checked_number(queue_offset, "queue_offset", 64)
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
        """Forget the progress of a group, of all groups in a topic, or of one group in one topic, in all tables.

        Groups with an ``@`` are removed too; a broker's `cleanOffset` by topic skips them.  Returns the number of pairs of topic
        and group.  Raises ValueError without a group and a topic, and ReadOnlyError.
        """
        self.check_writable()
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
        """Write the file if the tables changed, and return True when it is on disk; the old file becomes ``.bak``.

        Brokers of all versions read the text.  Other threads may commit; their commits wait for the next time.  A missing
        ``config`` directory is created.  Raises OSError, with the `errno` of the cause, and the old files stay; and ReadOnlyError.
        """
        self.check_writable()
        with self._persist_lock:
            with self._lock:
                if not self.dirty:
                    return False
                changes, members = self._changes, self._document()
            data = encode_java_utf8(_text(members))
            try:
                _replace_file(self.path, data, keep=self._main_is_whole)
            except OSError as error:
                text = "the offsets could not be saved; they are kept, remove the cause and persist again"
                if is_full(error):
                    raise full_disk(self.path, error, text) from error
                raise OSError(error.errno, f"{error.strerror}: {text}", self.path) from error
            self._main_is_whole = True
            with self._lock:
                self._persisted = changes
        return True

    def _document(self) -> dict[str, Any]:
        # A copy of the content; the caller holds the lock of the tables.
        if "timestamp" not in self.data_version:
            self.data_version["timestamp"] = int(self._clock())
        document = {
            **self._unknown,
            "dataVersion": {**self._unknown_of_version, "counter": 0, "stateVersion": 0, **self.data_version},
            "groupTopicMap": _group_topic_map(self.offset_table),
            "offsetTable": {key: dict(queues) for key, queues in self.offset_table.items()},
        }
        if self._has_lmq or self.lmq_offset_table:
            document["lmqOffsetTable"] = dict(self.lmq_offset_table)
        if self.pull_offset_table:
            document["pullOffsetTable"] = {key: dict(queues) for key, queues in self.pull_offset_table.items()}
        return document

    def __repr__(self) -> str:
        return f"<ConsumerOffsets {self.path!r} {len(self.offset_table)} of topic@group>"


def _is_lmq(group: str) -> bool:
    return group.startswith("%LMQ%")


def _group_topic_map(offset_table: Iterable[str]) -> dict[str, list[str]]:
    # Group -> topics, of keys with two parts by Java's `split("@")`, which drops empty ends.
    topics: dict[str, list[str]] = {}
    for key in offset_table:
        parts = key.rstrip("@").split("@")
        if len(parts) == 2:
            topics.setdefault(parts[1], []).append(parts[0])
    return topics


def _text(document: Mapping[str, Any]) -> str:
    # Names in tables of queues have no quotes, like those of brokers; fastjson2 cannot skip such names elsewhere.
    texts = []
    for name, value in document.items():
        if name in ("offsetTable", "pullOffsetTable"):
            rows = [
                f"\t\t{_json(key)}:{{{','.join(f'{queue_id}:{offset}' for queue_id, offset in queues.items())}}}"
                for key, queues in value.items()
            ]
            value_text = "{\n" + ",\n".join(rows) + "\n\t}"
        else:
            value_text = _json(value)
        texts.append(f"\t{_json(name)}:{value_text}")
    return "{\n" + ",\n".join(texts) + "\n}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# ------------------------------------------------------------------------------------------------- replacing the file

_TEMPORARY = ".rmqstore-tmp-"


def _write_new_file(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_file(path: str, data: bytes, keep: bool) -> None:
    """Make `data` the file at `path`, durably; with `keep` the old file becomes ``.bak``.

    RocketMQ 5.5.0 renames the main file to ``.bak`` and then writes a new one.  Here the new text is on disk before any rename,
    and the old file gets a second name first: with hard links there always is a main file.  Both files are whole whichever rename a
    power cut undoes.  An error leaves the main file unchanged.
    """
    directory, backup = os.path.dirname(path), path + ".bak"
    make_directories(directory)
    token = os.urandom(8).hex()
    new, previous = path + _TEMPORARY + token, backup + _TEMPORARY + token
    try:
        _write_new_file(new, data)
        if not keep or not os.path.exists(path):
            os.replace(new, path)
        elif _link(path, previous):
            os.replace(new, path)
            _replace_or_undo(previous, backup, previous, path)
        else:
            os.replace(path, backup)
            _replace_or_undo(new, path, backup, path)
    finally:
        # They are gone after success, unless main file and backup were one file with two names.
        for name in (new, previous):
            with contextlib.suppress(OSError):
                os.unlink(name)
    fsync_directory(directory or ".")


def _link(path: str, name: str) -> bool:
    """Give the file at `path` a second name; False if the file system, or its protection, does not allow it."""
    try:
        os.link(path, name)
    except OSError as error:
        if not has_no_links(error):
            raise
        return False
    return True


def _replace_or_undo(source: str, target: str, undo_source: str, undo_target: str) -> None:
    try:
        os.replace(source, target)
    except OSError:
        with contextlib.suppress(OSError):
            os.replace(undo_source, undo_target)
        raise


def _remove_leftovers(path: str) -> None:
    """Delete the temporary files that killed processes left next to `path`."""
    directory, name = os.path.split(path)
    for entry in listing(directory or ".").existing():
        if entry.name.startswith((name + _TEMPORARY, name + ".bak" + _TEMPORARY)):
            try:
                os.unlink(entry.path)
            except OSError as error:
                logger.warning("%s was left behind and cannot be deleted: %s", entry.name, error)
