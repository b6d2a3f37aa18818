"""Erlang terms: the external format under its public names, and terms as text, which is how `.config` and `clean.dot` hold them.

Owns the syntax of `file:consult` and the text that `io:format("~p")` gives for small terms.  Bytes are the compiled
`_term`'s.  It opens no file.  Every walk is bounded in depth, and text that is not a term is `CorruptionError` with its
position.
"""

from __future__ import annotations

import re
from typing import Any, TypeGuard

from rmqstore.errors import CorruptionError
from rmqstore.rabbitmq._term import (
    DEFAULT_MAX_SIZE,
    DEFAULT_MAX_VALUES,
    Atom,
    BitString,
    ImproperList,
    MapPairs,
    Opaque,
    TextFloat,
    check,
    decode,
    decode_at,
    encode,
)

__all__ = [
    "DEFAULT_MAX_SIZE",
    "DEFAULT_MAX_VALUES",
    "Atom",
    "BitString",
    "ImproperList",
    "MapPairs",
    "Opaque",
    "TextFloat",
    "check",
    "consult",
    "decode",
    "decode_at",
    "encode",
    "format_term",
    "is_list",
    "is_tuple",
]

# Deeper text is refused, as deeper terms are.
MAX_NESTING = 256
MAX_DIGITS = 4000

_TOKEN = re.compile(
    r"""
      (?P<space>(?:\s+|%[^\n]*)+)
    | (?P<float>\d[\d_]*\.\d[\d_]*(?:[eE][-+]?\d+)?)
    | (?P<based>\d+\#[0-9a-zA-Z_]+)
    | (?P<char>\$(?:\\(?:x\{[0-9a-fA-F]{1,6}\}|x[0-9a-fA-F]{2}|[0-7]{1,3}|\^.|.)|[^\\]))
    | (?P<integer>\d[\d_]*)
    | (?P<atom>[a-z\u00df-\u00f6\u00f8-\u00ff][\w@]*)
    | (?P<quoted>'(?:[^'\\]|\\.)*')
    | (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<sign><<|>>|=>|\#\{|[-+{}\[\],|:/])
    | (?P<end>\.(?=\s|%|\Z))
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x\{([0-9a-fA-F]{1,6})\}|x([0-9a-fA-F]{2})|([0-7]{1,3})|\^(.)|(.))", re.DOTALL)
_ESCAPES = {"b": 8, "d": 127, "e": 27, "f": 12, "n": 10, "r": 13, "s": 32, "t": 9, "v": 11}
_PLAIN_ATOM = re.compile(r"[a-z\u00df-\u00f6\u00f8-\u00ff][0-9A-Za-z_@\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u00ff]*")
_RESERVED = frozenset(
    "after and andalso band begin bnot bor bsl bsr bxor case catch cond div end fun if let maybe not of or orelse receive rem "
    "try when xor".split()
)


def _unescape(match: re.Match[str]) -> str:
    wide, short, octal, control, plain = match.groups()
    if wide or short:
        return chr(int(wide or short, 16))
    if octal:
        return chr(int(octal, 8))
    if control:
        return chr(ord(control) & 31)
    return chr(_ESCAPES.get(plain, ord(plain)))


class _Terms:
    """The terms of a text, one after the other."""

    def __init__(self, text: str, path: str | None):
        self.text = text
        self.path = path
        self.pos = 0
        self.kind = ""
        self.token = ""
        self.begin = 0
        self.advance()

    def wrong(self, what: str) -> CorruptionError:
        return CorruptionError(what, self.path, self.begin)

    def advance(self) -> None:
        while True:
            self.begin = self.pos
            if self.pos == len(self.text):
                self.kind = self.token = ""
                return
            match = _TOKEN.match(self.text, self.pos)
            if match is None:
                raise self.wrong(f"{self.text[self.pos]!r} begins nothing that a term could hold")
            self.kind, self.token = str(match.lastgroup), match[0]
            self.pos = match.end()
            if self.kind != "space":
                return

    def takes(self, token: str) -> bool:
        if self.kind not in ("sign", "end") or self.token != token:
            return False
        self.advance()
        return True

    def expect(self, token: str) -> None:
        if not self.takes(token):
            raise self.wrong(f"{token!r} is missing before {self.token!r}" if self.kind else f"{token!r} is missing")

    def unquoted(self) -> str:
        try:
            return _ESCAPE.sub(_unescape, self.token[1:-1])
        except (ValueError, OverflowError):
            raise self.wrong("an escape that is not a character") from None

    def integer(self) -> int:
        digits = self.token.replace("_", "")
        if len(digits) > MAX_DIGITS:
            raise self.wrong(f"a number of more than {MAX_DIGITS} digits")
        try:
            if self.kind == "based":
                base, _, digits = digits.partition("#")
                if len(base) > 2 or not 2 <= int(base) <= 36:
                    raise ValueError
                return int(digits, int(base))
            if self.kind == "char":
                return ord(_ESCAPE.sub(_unescape, self.token[1:]))
            return int(digits)
        except (ValueError, OverflowError, TypeError):
            raise self.wrong(f"{self.token[:40]!r} is not a number") from None

    def number(self) -> int | float:
        if self.kind == "float":
            value = float(self.token.replace("_", ""))
            if value in (float("inf"), float("-inf")):
                raise self.wrong("a float that is too large")
            return value
        if self.kind in ("integer", "based", "char"):
            return self.integer()
        raise self.wrong("a number is missing")

    def term(self, depth: int = 0) -> Any:
        if depth > MAX_NESTING:
            raise self.wrong(f"terms are nested deeper than {MAX_NESTING} levels")
        if self.kind in ("integer", "based", "char", "float"):
            value = self.number()
            self.advance()
            return value
        if self.kind in ("atom", "quoted"):
            name = self.token if self.kind == "atom" else self.unquoted()
            if len(name) > 255:
                raise self.wrong("an atom of more than 255 characters")
            self.advance()
            return Atom(name)
        if self.kind == "string":
            characters: list[Any] = []
            # Strings that stand beside each other are one.
            while self.kind == "string":
                characters += map(ord, self.unquoted())
                self.advance()
            return characters
        if self.takes("-"):
            number = -self.number()
            self.advance()
            return number
        if self.takes("+"):
            number = self.number()
            self.advance()
            return number
        if self.takes("{"):
            items = []
            if not self.takes("}"):
                items.append(self.term(depth + 1))
                while self.takes(","):
                    items.append(self.term(depth + 1))
                self.expect("}")
            return tuple(items)
        if self.takes("["):
            return self.list(depth)
        if self.takes("#{"):
            return self.map(depth)
        if self.takes("<<"):
            return self.binary()
        raise self.wrong(f"{self.token!r} begins no term" if self.kind else "the text ends inside a term")

    def list(self, depth: int) -> list[Any]:
        items: list[Any] = []
        if self.takes("]"):
            return items
        items.append(self.term(depth + 1))
        while self.takes(","):
            items.append(self.term(depth + 1))
        if self.takes("|"):
            tail = self.term(depth + 1)
            self.expect("]")
            if isinstance(tail, ImproperList):
                return ImproperList(items + list(tail), tail.tail)
            return items + tail if isinstance(tail, list) else ImproperList(items, tail)
        self.expect("]")
        return items

    def map(self, depth: int) -> dict[Any, Any] | MapPairs:
        pairs = []
        if not self.takes("}"):
            while True:
                key = self.term(depth + 1)
                self.expect("=>")
                pairs.append((key, self.term(depth + 1)))
                if not self.takes(","):
                    break
            self.expect("}")
        try:
            made = dict(pairs)
        except TypeError:
            return MapPairs(pairs)
        return made if len(made) == len(pairs) else MapPairs(pairs)

    def binary(self) -> bytes | BitString:
        parts = bytearray()
        last_bits = 8
        if self.takes(">>"):
            return b""
        while True:
            if last_bits != 8:
                raise self.wrong("bits are followed by more than '>>'")
            if self.kind == "string":
                text = self.unquoted()
                self.advance()
                utf8 = False
                if self.takes("/"):
                    if self.kind != "atom" or self.token != "utf8":
                        raise self.wrong("of types in binaries only utf8 is understood")
                    utf8 = True
                    self.advance()
                try:
                    parts += text.encode("utf-8" if utf8 else "latin-1")
                except UnicodeEncodeError:
                    raise self.wrong("a character that does not fit into a byte") from None
            else:
                negative = self.takes("-")
                number = -self.integer() if negative else self.integer() if self.kind != "" else None
                if number is None or self.kind not in ("integer", "based", "char"):
                    raise self.wrong("a byte is missing")
                self.advance()
                if self.takes(":"):
                    last_bits = self.integer() if self.kind == "integer" else 0
                    if not 1 <= last_bits <= 8:
                        raise self.wrong("only sizes from 1 to 8 bits are understood in binaries")
                    self.advance()
                parts.append((number & (1 << last_bits) - 1) << (8 - last_bits))
            if not self.takes(","):
                break
        self.expect(">>")
        return BitString(parts, last_bits) if last_bits != 8 else bytes(parts)


def is_tuple(value: Any) -> TypeGuard[tuple[Any, ...]]:
    """bool: a tuple of Erlang's, and not the pairs of a map."""
    return isinstance(value, tuple) and not isinstance(value, MapPairs)


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """bool: a list of Erlang's that ends as one."""
    return isinstance(value, list) and not isinstance(value, ImproperList)


def consult(text: str | bytes, *, path: str | None = None) -> list[Any]:
    """Read the terms of a text as `file:consult` does: each followed by a full stop; comments begin with ``%``.

    Parameters
    ----------
    text : str or bytes
        Bytes are UTF-8, or Latin-1 if they are not UTF-8.
    path : str, optional
        The file that it is from, for errors.

    Returns
    -------
    list
        Values as of `decode`: a text in double quotes is a list of integers, ``<<"...">>`` is bytes.

    Raises
    ------
    CorruptionError
        Something else stands there; `pos` is the position in characters.
    """
    if isinstance(text, bytes):
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError:
            decoded = text.decode("latin-1")
    else:
        decoded = text
    reader = _Terms(decoded, path)
    found = []
    while reader.kind:
        found.append(reader.term())
        reader.expect(".")
    return found


def _escaped(text: str, quote: str) -> str:
    named = {8: "\\b", 127: "\\d", 27: "\\e", 12: "\\f", 10: "\\n", 13: "\\r", 9: "\\t", 11: "\\v", 92: "\\\\"}
    parts = []
    for character in text:
        number = ord(character)
        if number in named:
            parts.append(named[number])
        elif character == quote:
            parts.append("\\" + quote)
        elif number < 32 or 127 <= number < 160 or number > 255:
            parts.append(f"\\x{{{number:X}}}")
        else:
            parts.append(character)
    return "".join(parts)


def _format_atom(text: str) -> str:
    if _PLAIN_ATOM.fullmatch(text) and text not in _RESERVED:
        return text
    return "'" + _escaped(text, "'") + "'"


def _printable(numbers: Any) -> bool:
    return all(32 <= number < 127 or number in (8, 9, 10, 11, 12, 13, 27) for number in numbers)


def format_term(value: Any, *, numbers: bool = False, _depth: int = 0) -> str:
    """Text of a value that `consult` reads back, on one line, and without its full stop.

    Parameters
    ----------
    numbers : bool
        Write every binary and list of characters as numbers, as ``~w`` of Erlang does; otherwise printable ones as text.

    Raises
    ------
    TypeError, ValueError
        Text cannot say the value: an `Opaque`, or nesting beyond 256 levels.
    """
    if _depth > MAX_NESTING:
        raise ValueError(f"terms are nested deeper than {MAX_NESTING} levels")

    def inner(one: Any) -> str:
        return format_term(one, numbers=numbers, _depth=_depth + 1)

    if isinstance(value, Atom):
        return _format_atom(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        mantissa, mark, exponent = float.__repr__(value).partition("e")
        return mantissa + ("" if "." in mantissa else ".0") + mark + exponent
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
        if data and not numbers and _printable(data):
            return '<<"' + _escaped(data.decode("latin-1"), '"') + '">>'
        return "<<" + ",".join(map(str, data)) + ">>"
    if isinstance(value, BitString):
        last = value.data[-1] >> (8 - value.bits)
        return "<<" + ",".join([*map(str, value.data[:-1]), f"{last}:{value.bits}"]) + ">>"
    if isinstance(value, (dict, MapPairs)):
        pairs = value.items() if isinstance(value, dict) else value
        return "#{" + ",".join(f"{inner(key)} => {inner(one)}" for key, one in pairs) + "}"
    if isinstance(value, tuple):
        return "{" + ",".join(map(inner, value)) + "}"
    if isinstance(value, ImproperList):
        # Before a tail there may be nothing: then the list is the tail, as Erlang reads it too.
        return "[" + ",".join(map(inner, value)) + "|" + inner(value.tail) + "]" if value else inner(value.tail)
    if isinstance(value, list):
        plain = all(type(one) is int and 0 <= one < 128 for one in value)
        if value and not numbers and plain and _printable(value):
            return '"' + _escaped(bytes(value).decode("latin-1"), '"') + '"'
        return "[" + ",".join(map(inner, value)) + "]"
    raise TypeError(f"text cannot say a {type(value).__name__}")
