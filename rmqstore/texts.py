"""Text, times and sizes for people, as the command line and the console show them; times as people write them.

Owns how a text from a store is made safe to look at (`escape`), how times and sizes are written, and what counts as a
time.  It knows no store, no terminal and no page.
"""

from __future__ import annotations

import datetime
import re
import time
import unicodedata

__all__ = ["escape", "format_size", "format_time", "parse_time"]

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_AGO = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|sec|m|min|h|d|w)\s+ago\s*")
_AGO_UNITS = {
    "ms": 1,
    "s": 1000,
    "sec": 1000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 604_800_000,
}


def escape(text: str) -> str:
    """str: `text` on one line, with what a terminal could obey or hide (control, format, surrogates) as \\x.. or \\u...."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or unicodedata.category(char) == "Zs" else _escaped(char) for char in text
    )


def _escaped(char: str) -> str:
    code = ord(char)
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char)
    return short or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def format_time(timestamp: int | None) -> str:
    """str: ms since epoch as ISO 8601 in the local zone; the bare number where no calendar reaches."""
    if timestamp is None:
        return "-"
    try:
        moment = (_EPOCH + datetime.timedelta(milliseconds=timestamp)).astimezone()
    except (OverflowError, ValueError, OSError):
        return f"{timestamp} ms"
    return moment.isoformat(timespec="milliseconds")


def format_size(size: int) -> str:
    """str: bytes for people, in units of 1024."""
    number = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024 or unit == "TiB":
            return f"{size} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError


def parse_time(text: str) -> int:
    """int: ms since epoch of an ISO time (local zone unless it names one), of ms since epoch, or of ``2h ago``.

    Raises
    ------
    ValueError
        It is none of them.
    """
    text = text.strip()
    if re.fullmatch("-?[0-9]{1,19}", text):
        return int(text)
    if text == "now":
        return time.time_ns() // 1_000_000
    ago = _AGO.fullmatch(text)
    if ago:
        return time.time_ns() // 1_000_000 - round(float(ago[1]) * _AGO_UNITS[ago[2]])
    # Python 3.10 knows neither Z nor fractions of other than 3 or 6 digits.
    fraction = re.compile(r"\.([0-9]{1,9})(?=$|[-+zZ])")
    iso = fraction.sub(lambda match: "." + match[1].ljust(6, "0")[:6], re.sub("[zZ]$", "+00:00", text))
    try:
        moment = datetime.datetime.fromisoformat(iso)
        return (moment.astimezone(datetime.timezone.utc) - _EPOCH) // datetime.timedelta(milliseconds=1)
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            f"{text!r} is no time: write 2026-11-21T05:32:39.596+00:00 (local zone without one), ms since epoch, or '2h ago'"
        ) from None
