"""Consumer progress: the broker's consumerOffset.json and the offsets.json of broadcasting consumers.

Owns the JSON dialect of fastjson (`parse_fastjson`, `format_fastjson`), `ConsumerOffsets` and `LocalOffsets`.  It never
deletes a file, and read-only it changes nothing.  Invariants:

- The main file counts; its backup (`.bak`) is read only when the main file is missing, empty or damaged.
- Text is hostile: depth and lengths of numbers are bounded, and an error says at which byte.

Facts: Apache RocketMQ 4.0 to 5.3.x write the layout of fastjson 1.2.83, 5.5.0 that of fastjson2; both are read.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, TypeVar

from rmqstore.errors import CorruptionError
from rmqstore.message import decode_java_utf8

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


def _format(value: Any, depth: int) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, Decimal)):
        return str(value)
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_format(item, depth) for item in value)}]"
    if not isinstance(value, Mapping):
        raise TypeError(f"{type(value).__name__} has no place in a config file")
    members = [(key, item) for key, item in value.items() if item is not None]
    if not members:
        return "{}"
    inner = "\n" + "\t" * (depth + 1)
    texts = []
    for key, item in members:
        key_text = _format(dict(key) if isinstance(key, tuple) else key, depth + 1)
        newline = inner if isinstance(key, str) else ""
        texts.append(f"{newline}{key_text}:{_format(item, depth + 1)}")
    closing = "\n" + "\t" * depth
    return f"{{{','.join(texts)}{closing}}}"


# -------------------------------------------------------------------------------------------------------- loading


def _read_text(path: str) -> str | None:
    """The file's text; None when it is missing or empty."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return None
    return decode_java_utf8(data) if data else None


def _load_with_backup(path: str, read_only: bool, decode: Callable[[Any, str], T]) -> tuple[T, str | None]:
    """Decode the main file or else its backup; also says which one it was, None when there is no data at all."""
    backup = path + ".bak"
    try:
        text = _read_text(path)
        if text is not None:
            return decode(parse_fastjson(text, path), path), path
        problem: CorruptionError | None = None
    except CorruptionError as error:
        problem = error
    backup_text = _read_text(backup)
    if backup_text is None:
        if problem is not None:
            raise CorruptionError(
                f"{problem.message}; and there is no backup: repair the file, or move it away to start without offsets",
                problem.path,
                problem.pos,
            )
        if os.path.exists(path):
            logger.warning("%s is empty and has no backup: no offsets are known", path)
        return decode(None, path), None
    try:
        value = decode(parse_fastjson(backup_text, backup), backup)
    except CorruptionError as error:
        first = f"{path} is {'damaged' if problem else 'missing or empty'}"
        raise CorruptionError(
            f"{first} and its backup cannot be read either ({error.message}): repair one of them, "
            "or move both away to start without offsets",
            backup,
            error.pos,
        ) from None
    logger.warning("%s is %s, its backup is used", path, f"damaged ({problem})" if problem else "missing or empty")
    if problem is not None and not read_only:
        # The next persist renames the main file over the backup, so that the damaged one must not stay in its place.
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


def _queue_table(document: Any, name: str, path: str) -> dict[str, dict[int, int]]:
    result: dict[str, dict[int, int]] = {}
    for key, queues in _table(document, name, path).items():
        if not isinstance(queues, dict):
            raise CorruptionError(f"{name}: {key!r} is not an object", path)
        result[str(key)] = {
            _whole_number(queue_id, f"{name}: a queue id of {key!r}", path, 32): _whole_number(
                offset, f"{name}: the offset of queue {queue_id} of {key!r}", path
            )
            for queue_id, offset in queues.items()
        }
    return result


class ConsumerOffsets:
    """Progress of consumer groups as a broker keeps it in `config/consumerOffset.json`.

    An offset is the queue offset that the group consumes next.

    Attributes
    ----------
    offset_table : dict
        ``"topic@group"`` -> queue id -> offset.
    pull_offset_table : dict
        The same for what was pulled (5.4.0 and later).
    lmq_offset_table : dict
        ``"topic@group"`` -> offset, of light message queues.
    data_version : dict
        Counter, state version and timestamp (ms); empty before 5.0.0.
    path : str
    source : str or None
        The file that was read: the main file, its backup, or None when there was neither.
    """

    __slots__ = ("data_version", "lmq_offset_table", "offset_table", "path", "pull_offset_table", "read_only", "source")

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = True):
        self.path = os.fspath(path)
        self.read_only = read_only
        self.source: str | None = None
        self.offset_table: dict[str, dict[int, int]] = {}
        self.pull_offset_table: dict[str, dict[int, int]] = {}
        self.lmq_offset_table: dict[str, int] = {}
        self.data_version: dict[str, int] = {}

    @classmethod
    def load(cls, path: str | os.PathLike[str], read_only: bool = True) -> ConsumerOffsets:
        """Read the file at `path` (``.../config/consumerOffset.json``), or its ``.bak`` if the file is of no use.

        A missing file without a backup means that nothing was consumed yet.  With ``read_only=False`` a damaged main
        file whose backup is good is renamed to ``.damaged``, so that it can never replace the backup; nothing is
        deleted.

        Raises
        ------
        CorruptionError
            The file is damaged and the backup is missing or damaged too.
        OSError
            A file cannot be read.
        """
        offsets = cls(path, read_only=read_only)
        _, offsets.source = _load_with_backup(offsets.path, read_only, offsets._decode)
        return offsets

    def _decode(self, document: Any, path: str) -> None:
        offset_table = _queue_table(document, "offsetTable", path)
        pull_offset_table = _queue_table(document, "pullOffsetTable", path)
        lmq_offset_table = {
            str(key): _whole_number(offset, f"lmqOffsetTable: the offset of {key!r}", path)
            for key, offset in _table(document, "lmqOffsetTable", path).items()
        }
        data_version = {
            str(key): _whole_number(number, f"dataVersion: {key}", path)
            for key, number in _table(document, "dataVersion", path).items()
        }
        # All of it or nothing: a file that fails in its last table must not leave the first ones behind.
        self.offset_table, self.pull_offset_table = offset_table, pull_offset_table
        self.lmq_offset_table, self.data_version = lmq_offset_table, data_version

    def get(self, group: str, topic: str, queue_id: int) -> int:
        """Next offset that `group` consumes from a queue; -1 when it is unknown, as a broker answers."""
        key = f"{topic}@{group}"
        if key in self.lmq_offset_table and queue_id == 0:
            return self.lmq_offset_table[key]
        return self.offset_table.get(key, {}).get(queue_id, -1)

    def list(self) -> dict[tuple[str, str], dict[int, int]]:
        """All progress as (group, topic) -> queue id -> offset; a copy.

        A key is cut at its first ``@``, which no topic contains.
        """
        result: dict[tuple[str, str], dict[int, int]] = {}
        for key, queues in self.offset_table.items():
            topic, _, group = key.partition("@")
            result[group, topic] = dict(queues)
        for key, offset in self.lmq_offset_table.items():
            topic, _, group = key.partition("@")
            result.setdefault((group, topic), {})[0] = offset
        return result

    def __repr__(self) -> str:
        return f"<ConsumerOffsets {self.path!r} {len(self.offset_table)} of topic@group>"


class LocalOffsets:
    """Progress of one broadcasting consumer group, as its client keeps it in ``offsets.json``.

    Attributes
    ----------
    offset_table : dict
        (broker name, topic, queue id) -> queue offset to consume next.
    path, source
        As of `ConsumerOffsets`.
    """

    __slots__ = ("offset_table", "path", "source")

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self.source: str | None = None
        self.offset_table: dict[tuple[str, str, int], int] = {}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LocalOffsets:
        """Read ``<clientId>/<group>/offsets.json``, or its ``.bak``; nothing is ever changed.

        The keys may be objects, as fastjson writes them, or text that holds such an object.

        Raises
        ------
        CorruptionError
            As of `ConsumerOffsets.load`.
        """
        offsets = cls(path)
        offsets.offset_table, offsets.source = _load_with_backup(offsets.path, True, _local_table)
        return offsets

    def get(self, topic: str, queue_id: int, broker_name: str | None = None) -> int:
        """Next offset of a queue; -1 when it is unknown.  Without a broker name the only broker that has the queue.

        Raises
        ------
        ValueError
            Several brokers have the queue and no name was given.
        """
        if broker_name is not None:
            return self.offset_table.get((broker_name, topic, queue_id), -1)
        found = {key[0]: offset for key, offset in self.offset_table.items() if key[1:] == (topic, queue_id)}
        if len(found) > 1:
            raise ValueError(f"{topic}/{queue_id} is on several brokers ({', '.join(sorted(found))}): give broker_name")
        return next(iter(found.values()), -1)

    def list(self) -> dict[tuple[str, str, int], int]:
        """All offsets as (broker name, topic, queue id) -> offset; a copy."""
        return dict(self.offset_table)

    def __repr__(self) -> str:
        return f"<LocalOffsets {self.path!r} {len(self.offset_table)} queues>"


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
