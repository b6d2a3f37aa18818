"""A broker's JSON files: fastjson's dialect, the backup of a file, and the values in it.

Only `load_with_backup` may change a file.  Text is hostile: depth and lengths of numbers are bounded, and an error has the position
in bytes.

Facts: Apache RocketMQ 4.0 to 5.3.x write the layout of fastjson 1.2.83, 5.5.0 that of fastjson2; all of them read both.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

from rmqstore._core import quoted_numbers
from rmqstore.errors import CorruptionError
from rmqstore.files.open_file import read_small_file
from rmqstore.message import decode_java_utf8

__all__ = ["load_with_backup", "parse_fastjson", "refuse_other_kind", "table_of", "whole_number"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

# ---------------------------------------------------------------------------------------------------------- dialect

_MAX_DEPTH = 64
# Python's limit for a whole number.
_MAX_NUMBER_LENGTH = 4300
# A run of blanks is one match and a comment has one end: a text is split in one way only, in linear time.
_BLANK = r"[ \t\r\n\f\b\ufeff]"
_SPACE = rf"(?:{_BLANK}+(?!{_BLANK})|/\*[^*]*\*+(?:[^/*][^*]*\*+)*/|//[^\n]*(?![^\n]))+"
# A token after space; before a colon it is a name.  Anything else matches without a token.
_TOKEN = re.compile(
    rf"""(?:{_SPACE})?
    (?P<token>"[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*'
    |[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?
    |[A-Za-z_$][A-Za-z0-9_$]*
    |[{{}}\[\]:,])
    (?:(?<=[0-9.])[LSBFD])?(?P<name>(?=(?:{_SPACE})?:))?|.""",
    re.DOTALL | re.VERBOSE,
)
_ONLY_SPACE = re.compile(rf"(?:{_SPACE})?", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {
    '"': '"', "'": "'", "\\": "\\", "/": "/", "b": "\b", "f": "\f", "F": "\f", "n": "\n", "r": "\r", "t": "\t",
    "v": "\v", **{str(digit): chr(digit) for digit in range(8)},
}  # fmt: skip


def parse_fastjson(text: str, path: str | None = None) -> Any:
    """Parse the JSON dialect of fastjson; return None for a text without a value.

    Beyond JSON: names that are whole numbers or words without quotes, single quotes, too many commas, comments, a byte order
    mark.  Names are always text.  The last of equal names counts.
    """
    try:
        # A quote that this adds within a string ends it before a digit, so that the text is no JSON.
        if "\\u" not in text:
            return _parse_json(quoted_numbers(text.encode()).decode())
    except (ValueError, RecursionError):
        pass
    parts = _json_parts(text, path)
    if not parts:
        return None
    try:
        return _parse_json(" ".join(part for _, part in parts))
    except json.JSONDecodeError as error:
        at, length = len(text), 0
        for match, part in parts:
            if error.pos < length + len(part):
                at = match.start("token")
                break
            length += len(part) + 1
        raise _damage(text, at, error.msg, path) from None


def _parse_json(text: str) -> Any:
    value = json.loads(text, parse_float=_finite, parse_constant=_finite, strict=False)
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(_MAX_DEPTH):
        members = chain.from_iterable(each.values() if isinstance(each, dict) else each for each in level)
        level = [each for each in members if isinstance(each, (dict, list))]
        if not level:
            return value
    raise RecursionError


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large")
    return number


def _damage(text: str, pos: int, what: str, path: str | None) -> CorruptionError:
    return CorruptionError(f"damaged JSON: {what}", path, len(text[:pos].encode("utf-8", "surrogatepass")))


def _json_parts(text: str, path: str | None) -> list[tuple[re.Match[str], str]]:
    # The text as JSON, in parts, each with its token in `text`.
    parts: list[tuple[re.Match[str], str]] = []
    end = depth = 0
    before = ""
    for match in _TOKEN.finditer(text):
        part = match["token"]
        if part is None:
            break
        begin, end = match.span()
        first, is_name = part[0], match["name"] is not None
        if first in "{[":
            depth += 1
            if depth > _MAX_DEPTH:
                raise _damage(text, match.start("token"), f"more than {_MAX_DEPTH} levels deep", path)
        elif first in "}]":
            depth -= 1
            if before == ",":
                parts.pop()
        elif first in ",:":
            if first == "," and before in ("{", "[", ","):
                continue
        elif first in "\"'":
            if first == "'" or "\\" in part:
                part = json.dumps(_unescaped(text, match.start("token"), part, path))
        elif first in "123456789" and end - begin < 19 and part.isdigit():
            part = f'"{part}"' if is_name else part
        elif first in "+-.0123456789":
            part = _number(text, match.start("token"), part, is_name, path)
        elif is_name:
            part = f'"{part}"'
        elif part not in ("true", "false", "null"):
            raise _damage(text, match.start("token"), f"{first!r} begins no value", path)
        parts.append((match, part))
        before = part
    space = _ONLY_SPACE.match(text, end)
    at = end if space is None else space.end()
    if at < len(text):
        what = "a string does not end" if text[at] in "\"'" else f"{text[at]!r} begins no value"
        raise _damage(text, at, what, path)
    return parts


def _number(text: str, pos: int, number: str, is_name: bool, path: str | None) -> str:
    # A quoted name, or a JSON number.
    if len(number) > _MAX_NUMBER_LENGTH:
        raise _damage(text, pos, f"a number of {len(number)} characters", path)
    if number.lstrip("+-").isdigit():
        return f'"{number}"' if is_name else str(int(number))
    if not math.isfinite(float(number)):
        raise _damage(text, pos, "a number whose exponent is too large", path)
    return repr(float(number))


def _unescaped(text: str, pos: int, part: str, path: str | None) -> str:
    def character(escape: re.Match[str]) -> str:
        code = escape[1] or escape[2]
        if code is not None:
            return chr(int(code, 16))
        if escape[3] not in _ESCAPED:
            raise _damage(text, pos + 1 + escape.start(), f"unknown escape \\{escape[3]}", path)
        return _ESCAPED[escape[3]]

    value = _ESCAPE.sub(character, part[1:-1])
    # Characters beyond U+FFFF are two escapes; a lone surrogate is replaced.
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


# ---------------------------------------------------------------------------------------------------------- loading

# The members of each kind of file, apart from the data version.
_MEMBERS = {
    "topics.json": ("topicConfigTable",),
    "subscriptionGroup.json": ("subscriptionGroupTable", "forbiddenTable"),
    "consumerOffset.json": ("offsetTable", "pullOffsetTable", "lmqOffsetTable", "groupTopicMap"),
    "consumerFilter.json": ("filterDataByTopic",),
    "consumerOrderInfo.json": ("table", "orderInfoCount"),
    "tieredStoreMetadata.json": (
        "commitLogFileSegmentTable", "consumeQueueFileSegmentTable", "indexFileSegmentTable", "topicMetadataTable",
    ),
    "timermetrics": ("timingCount",),
}  # fmt: skip


def refuse_other_kind(document: Any, name: str, path: str) -> None:
    """Raise CorruptionError if a document of the file `name` has only members of another file."""
    if not isinstance(document, dict) or any(member in document for member in _MEMBERS[name]):
        return
    for other, members in _MEMBERS.items():
        if any(member in document for member in members):
            raise CorruptionError(f"it holds what belongs into {other}, and nothing of {name}", path)


def _read_document(path: str) -> Any:
    # None for a missing file, or one without a value.
    data = read_small_file(path)
    return None if data is None else parse_fastjson(decode_java_utf8(data), path)


def load_with_backup(
    path: str, read_only: bool, decode: Callable[[Any, str], T], told: list[CorruptionError] | None = None
) -> tuple[T, str | None]:
    """Decode the main file, or its backup (`.bak`) if the main file is missing, empty or damaged.

    - `read_only`: if False, rename a damaged main file with a good backup to ``.damaged``.
    - `told`: takes the problem of an unused main file, or of an empty one without a backup, which is otherwise logged.
    - Returns (object, str or None): the result of `decode`, and the file that was read; None without data.
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
        text = f"{path} is {'damaged' if problem else 'missing or empty'} and its backup cannot be read either ({error.message}): "
        raise CorruptionError(
            text + "repair one of them, or move both away to start without them", backup, error.pos
        ) from None
    if document is None:
        if problem is not None:
            text = "; and there is no backup: repair the file, or move it away to start without it"
            raise CorruptionError(f"{problem.message}{text}", problem.path, problem.pos)
        if os.path.lexists(path):
            tell("is empty, or a broken symlink, and has no backup: restore it, or move it away")
        return decode(None, path), None
    if problem is None:
        # A broker that dies while it writes the file leaves it like this.
        logger.warning("%s is missing or empty, its backup is used", path)
        return value, backup
    tell(f"is damaged ({problem.message}), its backup is used, which may be older: restore the file", problem.pos)
    if not read_only:
        os.replace(path, path + ".damaged")
    return value, backup


def table_of(document: Any, name: str, path: str) -> dict[str, Any]:
    """Return the object `name` of a document, empty if it is missing; CorruptionError if it is no object."""
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
    """Return a whole number like fastjson: it may be quoted, and a fraction is cut off."""
    if isinstance(value, float) or (isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,20}\s*", value, re.ASCII)):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
        return value
    raise CorruptionError(f"{what} is {value!r}: not a whole number of {bits} bits", path)
