"""A file of offsets and its backup: reading one of them, and replacing it so that a whole one is there at every moment.

Owns what the two kinds of progress share.  It deletes no file but its own temporary ones, and read-only it changes nothing.
Invariants:

- The main file counts; its backup (`.bak`) is read only when the main file is missing, empty or damaged.
- At every moment of a `persist` the main file or the backup is whole and on disk, and only a main file that was whole
  takes the backup's place.
- What a file holds beyond the members known here is kept when it is written again.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any, TypeVar

from rmqstore.arguments import plain_text
from rmqstore.consumer.fastjson import Unknown, format_fastjson, parse_fastjson
from rmqstore.errors import CorruptionError, ReadOnlyError
from rmqstore.files.durable import fsync_directory, make_directories
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import NotCopied
from rmqstore.files.open_file import read_small_file
from rmqstore.files.os_errors import has_no_links
from rmqstore.message import decode_java_utf8, encode_java_utf8

__all__ = [
    "OffsetsFile",
    "checked_name",
    "checked_number",
    "java_order",
    "load_with_backup",
    "refuse_other_kind",
    "table_of",
    "text_key",
    "whole_number",
    "with_unknown",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The members that only files of one kind have, beside their data version.
_TIERED = ("commitLogFileSegmentTable", "consumeQueueFileSegmentTable", "indexFileSegmentTable", "topicMetadataTable")
_MEMBERS = {
    "topics.json": ("topicConfigTable",),
    "subscriptionGroup.json": ("subscriptionGroupTable", "forbiddenTable"),
    "consumerOffset.json": ("offsetTable", "pullOffsetTable", "lmqOffsetTable", "groupTopicMap"),
    "consumerFilter.json": ("filterDataByTopic",),
    "consumerOrderInfo.json": ("table", "orderInfoCount"),
    "tieredStoreMetadata.json": _TIERED,
    "timermetrics": ("timingCount",),
}


def _read_document(path: str) -> Any:
    """What the file holds; None when it is missing, or has no value in it."""
    data = read_small_file(path)
    return None if data is None else parse_fastjson(decode_java_utf8(data), path)


def refuse_other_kind(document: Any, name: str, path: str) -> None:
    """Raise CorruptionError for a document of the file `name` whose members are those of another file alone.

    One without any members is none: brokers write such files.
    """
    if not isinstance(document, dict) or any(member in document for member in _MEMBERS[name]):
        return
    for other, members in _MEMBERS.items():
        if any(member in document for member in members):
            raise CorruptionError(f"it holds what belongs into {other}, and nothing of {name}", path)


def load_with_backup(
    path: str, read_only: bool, decode: Callable[[Any, str], T], told: list[CorruptionError] | None = None
) -> tuple[T, str | None]:
    """Decode the main file or else its backup; also says which one it was, None when there is no data at all.

    Parameters
    ----------
    told : list of CorruptionError, optional
        Takes what is wrong with a main file that is passed over, or that is empty without a backup; else it is logged.
    """

    def tell(what: str, pos: int | None = None) -> None:
        if told is None:
            logger.warning("%s %s", path, what)
        else:
            told.append(CorruptionError(f"the file {what}", path, pos))

    backup = path + ".bak"
    problem: CorruptionError | None = None
    try:
        document = _read_document(path)
        if document is not None:
            return decode(document, path), path
    except CorruptionError as error:
        problem = error
    try:
        document = _read_document(backup)
        if document is not None:
            value = decode(document, backup)
    except CorruptionError as error:
        first = f"{path} is {'damaged' if problem else 'missing or empty'}"
        raise CorruptionError(
            f"{first} and its backup cannot be read either ({error.message}): repair one of them, "
            "or move both away to start without what it held",
            backup,
            error.pos,
        ) from None
    if document is None:
        if problem is not None:
            raise CorruptionError(
                f"{problem.message}; and there is no backup: repair the file, or move it away to start without what it "
                "held",
                problem.path,
                problem.pos,
            )
        if os.path.lexists(path):
            tell("is empty, or a link to nothing, and has no backup: put back what it held, or move it away")
        return decode(None, path), None
    if problem is not None:
        what = f"is damaged ({problem.message}), its backup is used, which may be older: put back what it held"
        tell(what, problem.pos)
    else:
        # As a broker leaves it that dies while it writes the file.
        logger.warning("%s is missing or empty, its backup is used", path)
    if problem is not None and not read_only:
        # Kept for whoever wants to know what happened to it; the next persist writes a new main file.
        os.replace(path, path + ".damaged")
    return value, backup


def table_of(document: Any, name: str, path: str) -> dict[Any, Any]:
    """The object `name` of a document, empty where it is missing; CorruptionError where it is something else."""
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise CorruptionError("not a file of offsets: it holds no object", path)
    table = document.get(name)
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise CorruptionError(f"{name} is not an object", path)
    return table


def whole_number(value: Any, what: str, path: str, bits: int = 64) -> int:
    """A number as fastjson takes it: also quoted, and cut off at the point."""
    if isinstance(value, str) and re.fullmatch("[ \t\n\v\f\r]*[+-]?[0-9]{1,20}[ \t\n\v\f\r]*", value):
        value = int(value)
    if isinstance(value, Decimal) and value.is_finite() and value.adjusted() < 20:
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
        return value
    raise CorruptionError(f"{what} is {value!r}: not a whole number of {bits} bits", path)


def text_key(key: Any, table: str, path: str) -> str:
    """A key of the table `table` as text; CorruptionError where it is an object."""
    if isinstance(key, tuple):
        raise CorruptionError(f"{table}: a name that is an object", path)
    return str(key)


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


def _link(path: str, name: str) -> bool:
    """Give the file at `path` a second name; False where the file system, or its owner's protection, has no links."""
    try:
        os.link(path, name)
    except OSError as error:
        if not has_no_links(error):
            raise
        return False
    return True


def _replace_file(path: str, data: bytes, keep: bool) -> None:
    """Make `data` the file at `path`, durably; with `keep` the file that is there becomes ``.bak``.

    RocketMQ 5.5.0 renames the main file to ``.bak`` and then writes a new one.  Here the new text is on disk before
    anything is renamed, and the old file gets a second name first, so that there is a main file at every moment and a
    reader, of whichever system, finds the old or the new one.  Whichever of the renames a power loss undoes, both files
    are whole.  After an error both are what they were; only without hard links the old backup may be gone.
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
        # After success they are gone already, except when main file and backup were one file under two names.
        for name in (new, previous):
            with contextlib.suppress(OSError):
                os.unlink(name)
    fsync_directory(directory or ".")


def _replace_or_undo(source: str, target: str, undo_source: str, undo_target: str) -> None:
    try:
        os.replace(source, target)
    except OSError:
        with contextlib.suppress(OSError):
            os.replace(undo_source, undo_target)
        raise


def _remove_leftovers(path: str) -> None:
    """Delete the temporary files that killed processes left beside `path`."""
    directory, name = os.path.split(path)
    for entry in listing(directory or ".").existing():
        if entry.name.startswith((name + _TEMPORARY, name + ".bak" + _TEMPORARY)):
            try:
                os.unlink(entry.path)
            except OSError as error:
                logger.warning("%s was left behind and cannot be deleted: %s", entry.name, error)


def java_order(keys: Iterable[T], capacity: int, hash_of: Callable[[T], int], concurrent: bool = True) -> list[T]:
    """`keys` as Java's ConcurrentHashMap (or else HashMap) with a table of `capacity` places to begin with lists them.

    Readers do not care; it makes the text the one that a broker writes, whatever the order of the commits.
    """
    keys = list(keys)
    while len(keys) >= capacity * 3 // 4 + (not concurrent):
        capacity *= 2

    def place(key: T) -> int:
        value = hash_of(key) % 2**32
        return (value ^ value >> 16) & (capacity - 1)

    return sorted(keys, key=place)


def with_unknown(known: Mapping[str, Any], loaded: Mapping[Any, Any]) -> dict[Any, Any]:
    """The members `known` at the places that they have in `loaded`, among the members that only `loaded` has."""
    names = list(loaded)
    for name in known:
        if name not in loaded:
            later = (at for at, other in enumerate(names) if isinstance(other, str) and other > name)
            names.insert(next(later, len(names)), name)
    return {name: known[name] if name in known else Unknown(loaded[name]) for name in names}


def checked_number(value: int, what: str, bits: int) -> int:
    """int: `value`, a number from 0 on that fits into `bits` bits with a sign; ValueError otherwise."""
    number = operator.index(value)
    if isinstance(value, bool) or not 0 <= number < 2 ** (bits - 1):
        raise ValueError(f"{what} is {value!r}: give a whole number from 0 to 2**{bits - 1} - 1")
    return number


def checked_name(value: str, what: str, never: str) -> str:
    """str: `value`, a text that is not empty, has none of the characters `never` and can be UTF-8; ValueError otherwise."""
    if not isinstance(value, str) or not value or any(char in value for char in never):
        raise ValueError(
            f"{what} is {value!r}: give a text that is not empty" + (f" and has none of {never!r}" if never else "")
        )
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError(f"{what} is {value!r}: give a text without lone surrogates, which UTF-8 cannot hold")
    return plain_text(value)


class OffsetsFile(NotCopied):
    """What both kinds of offsets share: the file, whether it is behind the tables, and who may touch them.

    `_lock` guards the tables; `_persist_lock` makes those who write the file wait for each other, and is taken first.
    `_changes` counts the changes of the tables, `_persisted` is how many of them the file has.
    """

    __slots__ = (
        "_changes",
        "_lock",
        "_main_is_whole",
        "_persist_lock",
        "_persisted",
        "_pid",
        "passed_over",
        "path",
        "read_only",
        "refusal",
        "source",
    )

    def __init__(self, path: str | os.PathLike[str], read_only: bool):
        # It is written again later, also after a change of the working directory.
        self.path = os.fspath(path) if read_only else os.path.abspath(os.fspath(path))
        self.read_only = read_only
        # Why nobody may change this progress, also with another way of opening it.
        self.refusal = ""
        self.source: str | None = None
        # What is wrong with the main file, where it is there and was not read.
        self.passed_over: list[CorruptionError] = []
        self._main_is_whole = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._persist_lock = threading.Lock()
        self._changes = self._persisted = 0

    @property
    def dirty(self) -> bool:
        """Whether there is something for `persist` to write."""
        return self._changes != self._persisted

    def _load(self, decode: Callable[[Any, str], None]) -> None:
        self.passed_over = []
        _, self.source = load_with_backup(self.path, self.read_only, decode, self.passed_over)
        for problem in self.passed_over:
            logger.warning("%s", problem)
        self._main_is_whole = self.source == self.path
        if not self.read_only:
            _remove_leftovers(self.path)
            # With the backup alone there is no second chance; the next persist writes a main file again.
            self._changes += self.source not in (None, self.path)

    def persist(self) -> bool:
        """Write the file if there is something new in the tables; whether it was written."""
        self._check_writable()
        with self._persist_lock:
            with self._lock:
                if not self.dirty:
                    return False
                changes, noted = self._changes, self._note()
            # Commits of other threads are not held up meanwhile.
            self._replace(self._document(noted))
            with self._lock:
                self._settle(noted)
                self._persisted = changes
        return True

    def _note(self) -> Any:
        # A copy of what is to be written; the caller holds the lock of the tables.
        raise NotImplementedError

    def _document(self, noted: Any) -> dict[str, Any]:
        # The members of the file, of what was noted.
        raise NotImplementedError

    def _settle(self, noted: Any) -> None:
        # What was noted is on the disk; the caller holds the lock of the tables.
        pass

    def check_writable(self) -> None:
        """Raise where nothing can be committed, as `commit` does.

        Raises
        ------
        ReadOnlyError
            The offsets were loaded read-only, or by the parent of this process.
        """
        self._check_writable()

    def _check_writable(self) -> None:
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

    def _replace(self, document: dict[Any, Any]) -> None:
        data = encode_java_utf8(format_fastjson(document))
        try:
            _replace_file(self.path, data, keep=self._main_is_whole)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}: the offsets could not be saved; they are kept, remove the cause and persist again",
                self.path,
            ) from error
        self._main_is_whole = True
