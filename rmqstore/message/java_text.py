"""Text as Java encodes and decodes it, so that hashes and bytes agree with a broker's.

Nothing here fails: malformed bytes and lone surrogates are replaced as Java (8 to 21) replaces them.
"""

from __future__ import annotations

import codecs
import re

__all__ = ["decode_java_utf8", "encode_java_utf8"]


def _replace_like_java(error: UnicodeError) -> tuple[str, int]:
    # Python and Java cut malformed UTF-8 into the same parts, except for encoded surrogates (ED A0..BF, with or without
    # a third byte): Java takes all of it as one malformed part, Python every byte on its own.
    assert isinstance(error, UnicodeDecodeError)
    data, pos = error.object, error.start
    if data[pos] == 0xED and pos + 1 < len(data) and 0xA0 <= data[pos + 1] <= 0xBF:
        third_continues = pos + 2 < len(data) and data[pos + 2] & 0xC0 == 0x80
        return "\ufffd", pos + (3 if third_continues else 2)
    return "\ufffd", error.end


codecs.register_error("rmqstore.java", _replace_like_java)

_SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def decode_java_utf8(data: bytes) -> str:
    """Decode UTF-8 as Java's `new String(bytes, UTF_8)` does: every malformed part becomes U+FFFD, nothing fails."""
    return data.decode("utf-8", "rmqstore.java")


def encode_java_utf8(text: str) -> bytes:
    """Encode as Java's `getBytes(UTF_8)` does: surrogate pairs are joined, a lone surrogate becomes ``?``."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        joined = _SURROGATE_PAIR.sub(
            lambda pair: pair.group().encode("utf-16-le", "surrogatepass").decode("utf-16-le"), text
        )
        return joined.encode("utf-8", "replace")
