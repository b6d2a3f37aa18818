"""Bodies as text: in JSON, in CSV and on a line.

A few stored bytes may be a large body, and a text of it may take six times its bytes (a zero is ``\\u0000`` in JSON).  So a large
body is made text in pieces, and the text as a whole is never in memory.
"""

from __future__ import annotations

import base64
import codecs
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["BodyText", "body_text", "json_pieces", "text_pieces"]

# Bytes of a body that is one text; of a piece of a longer one.  base64 codes three bytes at a time.
_WHOLE = 256 * 1024
_PIECE = 48 * 1024


class BodyText:
    """The text of a large body: iterate over its pieces.

    Parameters
    ----------
    body : bytes
    encoding : {"utf-8", "hex", "base64"}
    """

    def __init__(self, body: bytes, encoding: str):
        self._body, self._encoding = body, encoding

    def __iter__(self) -> Iterator[str]:
        if self._encoding == "utf-8":
            yield from text_pieces(self._body)
            return
        for first in range(0, len(self._body), _PIECE):
            piece = self._body[first : first + _PIECE]
            yield piece.hex() if self._encoding == "hex" else base64.b64encode(piece).decode("ascii")

    def __str__(self) -> str:
        return "".join(self)


def text_pieces(body: bytes, errors: str = "strict") -> Iterator[str]:
    """Decode UTF-8 piece by piece; `errors` as of `bytes.decode`."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    for first in range(0, len(body), _PIECE):
        yield decoder.decode(body[first : first + _PIECE], first + _PIECE >= len(body))


def _is_text(body: bytes) -> bool:
    try:
        for _ in text_pieces(body):
            pass
        return True
    except UnicodeDecodeError:
        return False


def body_text(body: bytes, form: str = "text", zeros: bool = True) -> tuple[str | BodyText, str]:
    """(text, encoding): a body as text.

    Parameters
    ----------
    body : bytes
    form : {"text", "hex", "base64"}
        With ``text`` a body that is not UTF-8 becomes base64.
    zeros : bool
        False: a body with zero bytes becomes base64 too.
    """
    if form == "text":
        encoding = "utf-8" if (zeros or b"\0" not in body) and _is_text(body) else "base64"
    else:
        encoding = form
    text = BodyText(body, encoding)
    return (str(text) if len(body) <= _WHOLE else text), encoding


def json_pieces(value: Mapping[str, Any], encode: Callable[[Any], str]) -> Iterator[str]:
    """The JSON text of an object, in pieces where it has a `BodyText`; `encode` makes JSON of everything else."""
    if not any(type(item) is BodyText for item in value.values()):
        yield encode(value)
        return
    lead = "{"
    for name, item in value.items():
        yield f"{lead}{encode(name)}:"
        lead = ","
        if type(item) is BodyText:
            yield '"'
            for piece in item:
                yield encode(piece)[1:-1]
            yield '"'
        else:
            yield encode(item)
    yield "}"
