"""Consumer progress: the broker's consumerOffset.json and the offsets.json of broadcasting consumers.

Owns the JSON dialect of fastjson (`parse_fastjson`, `format_fastjson`), `ConsumerOffsets` and `LocalOffsets`.  It deletes
no file but its own temporary ones, and read-only it changes nothing.  Invariants:

- The main file counts; its backup (`.bak`) is read only when the main file is missing, empty or damaged.
- At every moment of a `persist` the main file or the backup is whole and on disk, and only a main file that was whole
  takes the backup's place.
- What a file holds beyond the members known here is kept when it is written again.
- Text is hostile: depth and lengths of numbers are bounded, and an error says at which byte.

Facts: Apache RocketMQ 4.0 to 5.3.x write the layout of fastjson 1.2.83, 5.5.0 that of fastjson2; both are read by all of
them and by us.  The former is written.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import operator
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any, TypeVar

from rmqstore._core import java_string_hash
from rmqstore.errors import CorruptionError, ReadOnlyError
from rmqstore.mapped_file import fsync_directory, make_directories, open_regular
from rmqstore.message import decode_java_utf8, encode_java_utf8

__all__ = ["ConsumerOffsets", "LocalOffsets", "format_fastjson", "parse_fastjson"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_DEPTH = 64
_MAX_NUMBER_LENGTH = 64

_SPACE = re.compile(r"(?:[ \t\r\n\f\b\ufeff]+|/\*.*?\*/|//[^\n]*)+", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[LSBFD]?")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*")
_PLAIN = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}
_ESCAPED = {
    '"': '"', "'": "'", "\\": "\\", "/": "/", "b": "\b", "f": "\f", "F": "\f", "n": "\n", "r": "\r", "t": "\t",
    "v": "\v", **{str(digit): chr(digit) for digit in range(8)},
}  # fmt: skip


# -------------------------------------------------------------------------------------------------------- parsing


class _Parser:
    def __init__(self, text: str, path: str | None):
        self.text = text
        self.path = path
        self.pos = 0

    def error(self, what: str, pos: int | None = None) -> CorruptionError:
        pos = self.pos if pos is None else pos
        byte = len(self.text[:pos].encode("utf-8", "surrogatepass"))
        return CorruptionError(f"damaged JSON: {what}", self.path, byte)

    def skip(self) -> str:
        """Go to the next character that means something and return it; ``""`` at the end."""
        match = _SPACE.match(self.text, self.pos)
        if match:
            self.pos = match.end()
        if self.text.startswith("/*", self.pos):
            raise self.error("a comment does not end")
        return self.text[self.pos : self.pos + 1]

    def document(self) -> Any:
        if not self.skip():
            return None
        value = self.value(0)
        if self.skip():
            raise self.error("text follows the end")
        return value

    def value(self, depth: int) -> Any:
        char = self.skip()
        if char == "{":
            return self.object(depth + 1)
        if char == "[":
            return self.array(depth + 1)
        if char in ('"', "'") and char:
            return self.string(char)
        if char and char in "+-.0123456789":
            return self.number()
        match = _NAME.match(self.text, self.pos)
        if match and match.group() in _WORDS:
            self.pos = match.end()
            return _WORDS[match.group()]
        raise self.error("the text ends early" if not char else f"{char!r} begins no value")

    def number(self) -> int | Decimal:
        match = _NUMBER.match(self.text, self.pos)
        if not match:
            raise self.error("a sign without a number")
        text = match.group()
        if len(text) > _MAX_NUMBER_LENGTH:
            raise self.error(f"a number of {len(text)} characters")
        self.pos = match.end()
        text = text.rstrip("LSBFD")
        return int(text) if _INTEGER.fullmatch(text) else Decimal(text)

    def string(self, quote: str) -> str:
        begin = self.pos
        pos = begin + 1
        parts = []
        while True:
            match = _PLAIN[quote].match(self.text, pos)
            assert match is not None
            parts.append(match.group())
            pos = match.end()
            if pos >= len(self.text):
                raise self.error("a string does not end", begin)
            if self.text[pos] == quote:
                self.pos = pos + 1
                break
            code = self.text[pos + 1 : pos + 2]
            length = {"u": 4, "x": 2}.get(code, 0)
            if length:
                digits = self.text[pos + 2 : pos + 2 + length]
                if not re.fullmatch(f"[0-9a-fA-F]{{{length}}}", digits):
                    raise self.error(f"\\{code} needs {length} hex digits", pos)
                parts.append(chr(int(digits, 16)))
            elif code in _ESCAPED and code:
                parts.append(_ESCAPED[code])
            else:
                raise self.error(f"unknown escape \\{code}", pos)
            pos += 2 + length
        value = "".join(parts)
        # Characters beyond U+FFFF come as two escapes; a lone surrogate has no place in text.
        if any("\ud800" <= char <= "\udfff" for char in value):
            value = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return value

    def array(self, depth: int) -> list[Any]:
        self.check_depth(depth)
        self.pos += 1
        items: list[Any] = []
        separated = True
        while True:
            char = self.skip()
            if char == "]":
                self.pos += 1
                return items
            if char == ",":
                self.pos += 1
                separated = True
                continue
            if not separated:
                raise self.error("the text ends early" if not char else "a comma or ] is missing")
            items.append(self.value(depth))
            separated = False

    def object(self, depth: int) -> dict[Any, Any]:
        self.check_depth(depth)
        self.pos += 1
        members: dict[Any, Any] = {}
        separated = True
        while True:
            char = self.skip()
            if char == "}":
                self.pos += 1
                return members
            if char == ",":
                self.pos += 1
                separated = True
                continue
            if not separated:
                raise self.error("the text ends early" if not char else "a comma or } is missing")
            key = self.key(char, depth)
            if self.skip() != ":":
                raise self.error("a colon is missing after a name")
            self.pos += 1
            # The last of equal names counts, and stands where the first one stood.
            members[key] = self.value(depth)
            separated = False

    def key(self, char: str, depth: int) -> Any:
        if char == "{":
            return _freeze(self.object(depth + 1), self)
        if char in ('"', "'") and char:
            return self.string(char)
        if char and char in "+-0123456789":
            match = _INTEGER.match(self.text, self.pos)
            if not match or len(match.group()) > _MAX_NUMBER_LENGTH:
                raise self.error("a name that is no whole number")
            self.pos = match.end()
            return int(match.group())
        match = _NAME.match(self.text, self.pos)
        if not match:
            raise self.error("the text ends early" if not char else f"{char!r} begins no name")
        self.pos = match.end()
        return match.group()

    def check_depth(self, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise self.error(f"more than {_MAX_DEPTH} levels deep")


def _freeze(members: dict[Any, Any], parser: _Parser) -> tuple[tuple[Any, Any], ...]:
    for value in members.values():
        if isinstance(value, (dict, list)):
            raise parser.error("an object used as a name holds another object or an array")
    return tuple(members.items())


def parse_fastjson(text: str, path: str | None = None) -> Any:
    """Parse what fastjson writes and accepts.

    Beyond JSON: names that are whole numbers without quotes (an int key), words, or objects (a tuple of pairs as key);
    single quotes; commas too many; comments; a byte order mark.  Of equal names the last one counts.  Numbers with a
    fraction or an exponent give a `decimal.Decimal`.

    Returns
    -------
    dict, list, str, int, Decimal, bool or None
        None for a text without any value.

    Raises
    ------
    CorruptionError
        Not such a text, or over 64 levels deep; `path` and the position in bytes are named.
    """
    return _Parser(text, path).document()


# -------------------------------------------------------------------------------------------------------- writing

_TO_ESCAPE = re.compile('["\\\\\x00-\x1f\x7f-\x9f\u2028\u2029]')
_SHORT_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


class _Unknown:
    """A value that this module does not know and writes as it was read, members that are null included.

    Names that are whole numbers get quotes: fastjson2, the reader of RocketMQ 5.5.0, fails when it skips one without.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


def _quote(text: str) -> str:
    escaped = _TO_ESCAPE.sub(lambda char: _SHORT_ESCAPES.get(char.group()) or f"\\u{ord(char.group()):04X}", text)
    return f'"{escaped}"'


def format_fastjson(value: Any) -> str:
    """The pretty text of fastjson 1.2.83, byte for byte: tabs, no space after a colon, no newline at the end.

    A dict with text keys has a member per line; one with int keys, or with objects as keys (tuples of pairs), has its
    members on one line and only the closing brace on its own.  None members are left out.  Members keep their order.

    Raises
    ------
    TypeError
        A value that the dialect has no text for.
    """
    return _format(value, 0)


def _format(value: Any, depth: int, unknown: bool = False) -> str:
    if isinstance(value, _Unknown):
        return _format(value.value, depth, True)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, Decimal)):
        return str(value)
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_format(item, depth, unknown) for item in value)}]"
    if not isinstance(value, Mapping):
        raise TypeError(f"{type(value).__name__} has no place in a config file")
    members = [(key, item) for key, item in value.items() if unknown or item is not None]
    if not members:
        return "{}"
    inner = "\n" + "\t" * (depth + 1)
    texts = []
    for key, item in members:
        key = str(key) if unknown and isinstance(key, int) else key
        key_text = _format(dict(key) if isinstance(key, tuple) else key, depth + 1, unknown)
        newline = inner if isinstance(key, str) else ""
        texts.append(f"{newline}{key_text}:{_format(item, depth + 1, unknown)}")
    closing = "\n" + "\t" * depth
    return f"{{{','.join(texts)}{closing}}}"


# -------------------------------------------------------------------------------------------------------- loading


def _read_text(path: str) -> str | None:
    """The file's text; None when it is missing or empty."""
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return None
    return decode_java_utf8(data) if data else None


def _read_document(path: str) -> Any:
    """What the file holds; None when it is missing, or has no value in it."""
    text = _read_text(path)
    return None if text is None else parse_fastjson(text, path)


def _load_with_backup(path: str, read_only: bool, decode: Callable[[Any, str], T]) -> tuple[T, str | None]:
    """Decode the main file or else its backup; also says which one it was, None when there is no data at all."""
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
            "or move both away to start without offsets",
            backup,
            error.pos,
        ) from None
    if document is None:
        if problem is not None:
            raise CorruptionError(
                f"{problem.message}; and there is no backup: repair the file, or move it away to start without offsets",
                problem.path,
                problem.pos,
            )
        if os.path.exists(path):
            logger.warning("%s is empty and has no backup: no offsets are known", path)
        return decode(None, path), None
    logger.warning("%s is %s, its backup is used", path, f"damaged ({problem})" if problem else "missing or empty")
    if problem is not None and not read_only:
        # Kept for whoever wants to know what happened to it; the next persist writes a new main file.
        os.replace(path, path + ".damaged")
    return value, backup


def _table(document: Any, name: str, path: str) -> dict[Any, Any]:
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


def _whole_number(value: Any, what: str, path: str, bits: int = 64) -> int:
    """A number as fastjson takes it: also quoted, and cut off at the point."""
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,20}\s*", value):
        value = int(value)
    if isinstance(value, Decimal) and value.is_finite() and value.adjusted() < 20:
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
        return value
    raise CorruptionError(f"{what} is {value!r}: not a whole number of {bits} bits", path)


def _text_key(key: Any, table: str, path: str) -> str:
    if isinstance(key, tuple):
        raise CorruptionError(f"{table}: a name that is an object", path)
    return str(key)


def _queue_table(document: Any, name: str, path: str) -> dict[str, dict[int, int]]:
    result: dict[str, dict[int, int]] = {}
    for key, queues in _table(document, name, path).items():
        if not isinstance(queues, dict):
            raise CorruptionError(f"{name}: {key!r} is not an object", path)
        result[_text_key(key, name, path)] = {
            _whole_number(queue_id, f"{name}: a queue id of {key!r}", path, 32): _whole_number(
                offset, f"{name}: the offset of queue {queue_id} of {key!r}", path
            )
            for queue_id, offset in queues.items()
        }
    return result


# ------------------------------------------------------------------------------------------------------ replacing

_TEMPORARY = ".rmqstore-tmp-"
_NO_HARD_LINKS = (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


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
        if error.errno not in _NO_HARD_LINKS:
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
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.listdir(directory or "."):
            if entry.startswith((name + _TEMPORARY, name + ".bak" + _TEMPORARY)):
                try:
                    os.unlink(os.path.join(directory, entry))
                except OSError as error:
                    logger.warning("%s was left behind and cannot be deleted: %s", entry, error)


def _java_order(keys: Iterable[T], capacity: int, hash_of: Callable[[T], int], concurrent: bool = True) -> list[T]:
    """`keys` as Java's ConcurrentHashMap (or else HashMap) with a table of `capacity` places to begin with lists them.

    Readers do not care; it makes the text the one that a broker writes, whatever the order of the commits.
    """
    keys = list(keys)
    while len(keys) >= capacity * 3 // 4 + (not concurrent):
        capacity *= 2

    def place(key: T) -> int:
        value = hash_of(key) & 0xFFFFFFFF
        return (value ^ value >> 16) & (capacity - 1)

    return sorted(keys, key=place)


def _with_unknown(known: Mapping[str, Any], loaded: Mapping[Any, Any]) -> dict[Any, Any]:
    """The members `known` at the places that they have in `loaded`, among the members that only `loaded` has."""
    names = list(loaded)
    for name in known:
        if name not in loaded:
            later = (at for at, other in enumerate(names) if isinstance(other, str) and other > name)
            names.insert(next(later, len(names)), name)
    return {name: known[name] if name in known else _Unknown(loaded[name]) for name in names}


def _now() -> int:
    return time.time_ns() // 1_000_000


def _checked_number(value: int, what: str, bits: int) -> int:
    number = operator.index(value)
    if isinstance(value, bool) or not 0 <= number < 2 ** (bits - 1):
        raise ValueError(f"{what} is {value!r}: give a whole number from 0 to 2**{bits - 1} - 1")
    return number


def _checked_name(value: str, what: str, never: str) -> str:
    if not isinstance(value, str) or not value or any(char in value for char in never):
        raise ValueError(
            f"{what} is {value!r}: give a text that is not empty" + (f" and has none of {never!r}" if never else "")
        )
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError(f"{what} is {value!r}: give a text without lone surrogates, which UTF-8 cannot hold")
    return value


class _OffsetsFile:
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
        "path",
        "read_only",
        "source",
    )

    def __init__(self, path: str | os.PathLike[str], read_only: bool):
        self.path = os.fspath(path)
        self.read_only = read_only
        self.source: str | None = None
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
        _, self.source = _load_with_backup(self.path, self.read_only, decode)
        self._main_is_whole = self.source == self.path
        if not self.read_only:
            _remove_leftovers(self.path)
            # With the backup alone there is no second chance; the next persist writes a main file again.
            self._changes += self.source not in (None, self.path)

    def _check_writable(self) -> None:
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
                f"{error.strerror}: the offsets could not be saved; they are kept, mend the cause and persist again",
                self.path,
            ) from error
        self._main_is_whole = True


class ConsumerOffsets(_OffsetsFile):
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
    """

    __slots__ = (
        "_clock",
        "_commits",
        "_has_lmq",
        "_members",
        "_version_members",
        "_version_step",
        "data_version",
        "lmq_offset_table",
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
        self._version_step = version_step
        self._clock = _now if clock is None else clock
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

        Raises
        ------
        CorruptionError
            The file is damaged and the backup is missing or damaged too; nothing was changed.
        OSError
            A file cannot be read.
        """
        offsets = cls(path, read_only=read_only, version_step=version_step, clock=clock)
        offsets._load(offsets._decode)
        return offsets

    def _decode(self, document: Any, path: str) -> None:
        offset_table = _queue_table(document, "offsetTable", path)
        pull_offset_table = _queue_table(document, "pullOffsetTable", path)
        lmq_offset_table = {
            _text_key(key, "lmqOffsetTable", path): _whole_number(
                offset, f"lmqOffsetTable: the offset of {key!r}", path
            )
            for key, offset in _table(document, "lmqOffsetTable", path).items()
        }
        version_members = _table(document, "dataVersion", path)
        data_version = {
            name: _whole_number(version_members[name], f"dataVersion: {name}", path)
            for name in ("counter", "stateVersion", "timestamp")
            if version_members.get(name) is not None
        }
        # All of it or nothing: a file that fails in its last table must not leave the first ones behind.
        self.offset_table, self.pull_offset_table = offset_table, pull_offset_table
        self.lmq_offset_table, self.data_version = lmq_offset_table, data_version
        self._members, self._version_members = document or {}, version_members
        self._has_lmq = self._has_lmq or "lmqOffsetTable" in self._members
        for name in ("dataVersion", "groupTopicMap", "lmqOffsetTable", "offsetTable", "pullOffsetTable"):
            if name in self._members:
                self._members[name] = None

    def get(self, group: str, topic: str, queue_id: int) -> int:
        """Next offset that `group` consumes from a queue; -1 when it is unknown, as a broker answers."""
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

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Note that `group` consumes `offset` of a queue next; `persist` makes it durable.

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
        offset : int
            0 to 2**63 - 1, a queue offset.

        Raises
        ------
        ValueError
            A value outside these bounds.
        ReadOnlyError
            The offsets were loaded read-only.
        """
        self._check_writable()
        key = f"{_checked_name(topic, 'topic', '@')}@{_checked_name(group, 'group', '')}"
        queue_id = _checked_number(queue_id, "queue_id", 32)
        offset = _checked_number(offset, "offset", 64)
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
        self._check_writable()
        with self._persist_lock:
            with self._lock:
                if not self.dirty:
                    return False
                changes = self._changes
                if "timestamp" not in self.data_version:
                    self.data_version["timestamp"] = int(self._clock())
                version = {"counter": 0, "stateVersion": 0} | self.data_version
                offset_table = {key: dict(queues) for key, queues in self.offset_table.items()}
                pull_offset_table = {key: dict(queues) for key, queues in self.pull_offset_table.items()}
                lmq_offset_table = dict(self.lmq_offset_table)
            offset_table = _in_java_order(offset_table)
            known: dict[str, Any] = {
                "dataVersion": _with_unknown(version, self._version_members),
                "groupTopicMap": _group_topic_map(offset_table),
                "offsetTable": offset_table,
            }
            if self._has_lmq or lmq_offset_table:
                keys = _java_order(lmq_offset_table, 1024, java_string_hash)
                known["lmqOffsetTable"] = {key: lmq_offset_table[key] for key in keys}
            if pull_offset_table or "pullOffsetTable" in self._members:
                known["pullOffsetTable"] = _in_java_order(pull_offset_table)
            self._replace(_with_unknown(dict(sorted(known.items())), self._members))
            self._persisted = changes
        return True

    def __repr__(self) -> str:
        return f"<ConsumerOffsets {self.path!r} {len(self.offset_table)} of topic@group>"


def _is_lmq(group: str) -> bool:
    return group.startswith("%LMQ%")


def _in_java_order(table: dict[str, dict[int, int]]) -> dict[str, dict[int, int]]:
    return {
        key: {queue_id: table[key][queue_id] for queue_id in _java_order(table[key], 64, int)}
        for key in _java_order(table, 1024, java_string_hash)
    }


def _group_topic_map(offset_table: Iterable[str]) -> dict[str, list[str]]:
    """Group -> topics, of the keys that Java's `split("@")`, which drops empty ends, cuts into two."""
    topics: dict[str, dict[str, None]] = {}
    for key in offset_table:
        parts = key.rstrip("@").split("@")
        if len(parts) == 2:
            topics.setdefault(parts[1], {})[parts[0]] = None
    return {
        group: _java_order(topics[group], 8, java_string_hash, concurrent=False)
        for group in _java_order(topics, 128, java_string_hash, concurrent=False)
    }


class LocalOffsets(_OffsetsFile):
    """Progress of one broadcasting consumer group, as its client keeps it in ``offsets.json``.

    All methods may be called from several threads.

    Parameters
    ----------
    path : str or os.PathLike
        ``<directory>/<client id>/<group>/offsets.json``, see `path_of`.
    read_only : bool
        Whether `commit` and `persist` are refused.

    Attributes
    ----------
    offset_table : dict
        (broker name, topic, queue id) -> queue offset to consume next.
    path, read_only, source
        As of `ConsumerOffsets`.
    """

    __slots__ = ("_committed", "offset_table")

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = True):
        super().__init__(path, read_only)
        self.offset_table: dict[tuple[str, str, int], int] = {}
        # What was committed here and is not in the file yet; for all other queues the file knows better.
        self._committed: dict[tuple[str, str, int], int] = {}

    @classmethod
    def load(cls, path: str | os.PathLike[str], read_only: bool = True) -> LocalOffsets:
        """Read ``<client id>/<group>/offsets.json``, or its ``.bak`` if the file is of no use.

        The keys may be objects, as fastjson writes them, or text that holds such an object.  With ``read_only=False``
        damaged and temporary files are treated as by `ConsumerOffsets.load`.

        Raises
        ------
        CorruptionError, OSError
            As of `ConsumerOffsets.load`.
        """
        offsets = cls(path, read_only=read_only)
        offsets._load(offsets._decode)
        return offsets

    @staticmethod
    def path_of(directory: str | os.PathLike[str], client_id: str, group: str) -> str:
        """Where a client keeps the offsets of `group`: ``<directory>/<client id>/<group>/offsets.json``.

        Parameters
        ----------
        directory : str or os.PathLike
            ``~/.rocketmq_offsets`` unless the client's `rocketmq.client.localOffsetStoreDir` says otherwise.
        client_id : str
            ``<ip>@<instance name>``.

        Raises
        ------
        ValueError
            A client id or group that is no name of a directory.
        """
        for name, what in ((client_id, "client_id"), (group, "group")):
            _checked_name(name, what, "/\0")
            if name in (".", ".."):
                raise ValueError(f"{what} is {name!r}: give a name that can be a directory's")
        return os.path.join(os.fspath(directory), client_id, group, "offsets.json")

    def _decode(self, document: Any, path: str) -> None:
        self.offset_table = _local_table(document, path)

    def get(self, topic: str, queue_id: int, broker_name: str | None = None) -> int:
        """Next offset of a queue; -1 when it is unknown.  Without a broker name the only broker that has the queue.

        Raises
        ------
        ValueError
            Several brokers have the queue and no name was given.
        """
        with self._lock:
            if broker_name is not None:
                return self.offset_table.get((broker_name, topic, queue_id), -1)
            found = {key[0]: offset for key, offset in self.offset_table.items() if key[1:] == (topic, queue_id)}
        if len(found) > 1:
            raise ValueError(f"{topic}/{queue_id} is on several brokers ({', '.join(sorted(found))}): give broker_name")
        return next(iter(found.values()), -1)

    def list(self) -> dict[tuple[str, str, int], int]:
        """All offsets as (broker name, topic, queue id) -> offset; a copy."""
        with self._lock:
            return dict(self.offset_table)

    def commit(self, topic: str, queue_id: int, offset: int, broker_name: str) -> None:
        """Note that `offset` of a queue is consumed next; `persist` makes it durable.

        Raises
        ------
        ValueError
            An empty name, a queue id outside 0 to 2**31 - 1 or an offset outside 0 to 2**63 - 1.
        ReadOnlyError
            The offsets were loaded read-only.
        """
        self._check_writable()
        key = (
            _checked_name(broker_name, "broker_name", ""),
            _checked_name(topic, "topic", ""),
            _checked_number(queue_id, "queue_id", 32),
        )
        offset = _checked_number(offset, "offset", 64)
        with self._lock:
            if self.offset_table.get(key) != offset:
                self.offset_table[key] = self._committed[key] = offset
                self._changes += 1

    def persist(self) -> bool:
        """Write what was committed into the file, which becomes ``.bak``.

        The file is read again first: what it holds for queues that were not committed here since the last time
        survives, and is known here afterwards.  Missing directories are created.

        Returns
        -------
        bool
            Whether the file was written; True means that it is on disk.

        Raises
        ------
        CorruptionError
            The file and its backup were damaged meanwhile; nothing was changed.
        OSError
            As of `ConsumerOffsets.persist`.
        ReadOnlyError
            The offsets were loaded read-only.
        """
        self._check_writable()
        with self._persist_lock:
            with self._lock:
                if not self.dirty:
                    return False
                changes, known, committed = self._changes, dict(self.offset_table), dict(self._committed)
            (members, in_file), source = _load_with_backup(self.path, False, _local_document)
            self._main_is_whole = source == self.path
            table = {**known, **in_file, **committed}
            ordered = {_message_queue(key): table[key] for key in _java_order(table, 16, _message_queue_hash)}
            self._replace(_with_unknown({"offsetTable": ordered}, members))
            with self._lock:
                for key, offset in committed.items():
                    if self._committed.get(key) == offset:
                        del self._committed[key]
                self.offset_table = {**table, **self._committed}
                self._persisted = changes
        return True

    def __repr__(self) -> str:
        return f"<LocalOffsets {self.path!r} {len(self.offset_table)} queues>"


def _local_document(document: Any, path: str) -> tuple[dict[Any, Any], dict[tuple[str, str, int], int]]:
    table = _local_table(document, path)
    return document or {}, table


def _message_queue(key: tuple[str, str, int]) -> tuple[tuple[str, Any], ...]:
    broker_name, topic, queue_id = key
    # A file without a broker's name is read as an empty name.
    named = (("brokerName", broker_name),) if broker_name else ()
    return (*named, ("queueId", queue_id), ("topic", topic))


def _message_queue_hash(key: tuple[str, str, int]) -> int:
    """Java's `MessageQueue.hashCode`, not cut to 32 bits."""
    broker_name, topic, queue_id = key
    return ((31 + java_string_hash(broker_name)) * 31 + queue_id) * 31 + java_string_hash(topic)


def _local_table(document: Any, path: str) -> dict[tuple[str, str, int], int]:
    result: dict[tuple[str, str, int], int] = {}
    for key, offset in _table(document, "offsetTable", path).items():
        queue = key
        if isinstance(queue, str):
            queue = parse_fastjson(queue, path)
        queue = dict(queue) if isinstance(queue, tuple) else queue
        if not isinstance(queue, dict) or not isinstance(queue.get("topic"), str):
            raise CorruptionError(f"offsetTable: {key!r} is not a message queue", path)
        queue_id = _whole_number(queue.get("queueId"), "a queueId", path, 32)
        broker_name = str(queue.get("brokerName") or "")
        result[broker_name, queue["topic"], queue_id] = _whole_number(offset, f"the offset of {queue['topic']!r}", path)
    return result
