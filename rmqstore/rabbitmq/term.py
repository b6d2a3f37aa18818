"""Erlang terms: the external format under its public names, and terms as text, the format of a node's small files.

Owns the syntax of `file:consult` in ``.config``, ``clean.dot`` and the ``config`` of a quorum queue.  It opens no file.
Nesting is bounded, and other text is `CorruptionError` with its position.
"""

from __future__ import annotations

import re
from typing import Any

from rmqstore.errors import CorruptionError
from rmqstore.rabbitmq._term import Atom, Opaque, decode, encode

__all__ = ["Atom", "Opaque", "consult", "decode", "encode"]

# Deeper text is refused, as deeper terms are.
MAX_NESTING = 256
MAX_DIGITS = 4000

_TOKEN = re.compile(
    r"""
      (?P<space>(?:\s+|%[^\n]*)+)
    | (?P<float>[-+]?\d+\.\d+(?:[eE][-+]?\d+)?)
    | (?P<integer>[-+]?\d+)
    | (?P<atom>[a-z\u00df-\u00f6\u00f8-\u00ff][\w@]*)
    | (?P<quoted>'(?:[^'\\]|\\.)*')
    | (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<sign><<|>>|=>|\#\{|[{}\[\],]|/utf8)
    | (?P<end>\.(?=\s|%|\Z))
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x\{([0-9a-fA-F]{1,6})\}|x([0-9a-fA-F]{2})|([0-7]{1,3})|\^(.)|(.))", re.DOTALL)
_ESCAPES = {"b": 8, "d": 127, "e": 27, "f": 12, "n": 10, "r": 13, "s": 32, "t": 9, "v": 11}


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
        self.kind = "space"
        while self.kind == "space":
            self.begin = self.pos
            if self.pos == len(self.text):
                self.kind = self.token = ""
                return
            match = _TOKEN.match(self.text, self.pos)
            if match is None:
                raise self.wrong(f"{self.text[self.pos]!r} begins nothing that a term could hold")
            self.kind, self.token = str(match.lastgroup), match[0]
            self.pos = match.end()

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
            text = _ESCAPE.sub(_unescape, self.token[1:-1])
        except (ValueError, OverflowError):
            raise self.wrong("an escape that is not a character") from None
        self.advance()
        return text

    def number(self) -> int | float:
        if len(self.token) > MAX_DIGITS:
            raise self.wrong(f"a number of more than {MAX_DIGITS} digits")
        value = float(self.token) if self.kind == "float" else int(self.token)
        if value in (float("inf"), float("-inf")):
            raise self.wrong("a float that is too large")
        self.advance()
        return value

    def term(self, depth: int = 0) -> Any:
        if depth > MAX_NESTING:
            raise self.wrong(f"terms are nested deeper than {MAX_NESTING} levels")
        if self.kind in ("integer", "float"):
            return self.number()
        if self.kind in ("atom", "quoted"):
            begin, name = self.begin, self.token
            if self.kind == "quoted":
                name = self.unquoted()
            else:
                self.advance()
            if len(name) > 255:
                raise CorruptionError("an atom of more than 255 characters", self.path, begin)
            return Atom(name)
        if self.kind == "string":
            return list(map(ord, self.unquoted()))
        if self.takes("{"):
            return tuple(self.terms("}", depth))
        if self.takes("["):
            return self.terms("]", depth)
        if self.takes("#{"):
            begin = self.begin
            try:
                return dict(self.terms("}", depth, pairs=True))
            except TypeError:
                raise CorruptionError("a key of a map that is not understood", self.path, begin) from None
        if self.takes("<<"):
            return self.binary()
        raise self.wrong(f"{self.token!r} begins no term" if self.kind else "the text ends inside a term")

    def terms(self, end: str, depth: int, pairs: bool = False) -> list[Any]:
        items: list[Any] = []
        if self.takes(end):
            return items
        while not items or self.takes(","):
            item = self.term(depth + 1)
            if pairs:
                self.expect("=>")
                item = (item, self.term(depth + 1))
            items.append(item)
        self.expect(end)
        return items

    def binary(self) -> bytes:
        parts = bytearray()
        if self.takes(">>"):
            return b""
        while True:
            if self.kind == "string":
                text = self.unquoted()
                code = "utf-8" if self.takes("/utf8") else "latin-1"
                try:
                    parts += text.encode(code)
                except UnicodeEncodeError:
                    raise self.wrong("a character that does not fit into a byte") from None
            elif self.kind == "integer":
                parts.append(int(self.number()) & 255)
            else:
                raise self.wrong("a byte is missing")
            if not self.takes(","):
                self.expect(">>")
                return bytes(parts)


def consult(text: str | bytes, *, path: str | None = None) -> list[Any]:
    """Read the terms of a text as `file:consult` does: each followed by a full stop; comments begin with ``%``.

    Bytes are UTF-8, or Latin-1 if they are not UTF-8.  Values are those of `decode`: a text in double quotes is a list of
    integers, ``<<"...">>`` is bytes.  CorruptionError, with `path` and `pos` in characters, for anything else.
    """
    if isinstance(text, str):
        reader = _Terms(text, path)
    else:
        try:
            reader = _Terms(text.decode("utf-8"), path)
        except UnicodeDecodeError:
            reader = _Terms(text.decode("latin-1"), path)
    found = []
    while reader.kind:
        found.append(reader.term())
        reader.expect(".")
    return found
