"""The dialect of JSON that fastjson, RocketMQ's library, writes and reads: keys may be numbers or objects.

Text is hostile: depth and lengths of numbers are bounded, and an error says at which byte.

Facts: Apache RocketMQ 4.0 to 5.3.x write the layout of fastjson 1.2.83, 5.5.0 that of fastjson2; both are read by all of
them and by us.  The former is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from rmqstore.errors import CorruptionError

__all__ = ["Unknown", "format_fastjson", "parse_fastjson"]

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
        try:
            return int(text) if _INTEGER.fullmatch(text) else Decimal(text)
        except InvalidOperation:
            # Java's BigDecimal refuses such an exponent too.
            raise self.error("a number whose exponent is too large", match.start()) from None

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
                raise self.error("a name that is not a whole number")
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


class Unknown:
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
    if isinstance(value, Unknown):
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
