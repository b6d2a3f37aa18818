"""Text, times and sizes as the command line, the console and notebooks show them; parsing of times.  It knows no store."""

from __future__ import annotations

import contextlib
import datetime
import re
import time
import unicodedata
from collections.abc import Iterable, Sequence

__all__ = ["escape", "format_size", "format_time", "harmless_cell", "html_table", "parse_time", "preview", "short_time"]

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_AGO_UNITS = {
    1: ("ms", "millisecond", "milliseconds"),
    1000: ("s", "sec", "secs", "second", "seconds"),
    60_000: ("m", "min", "mins", "minute", "minutes"),
    3_600_000: ("h", "hour", "hours"),
    86_400_000: ("d", "day", "days"),
    604_800_000: ("w", "week", "weeks"),
}
_AGO_SIZES = {name: size for size, names in _AGO_UNITS.items() for name in names}
_AGO = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s+ago\s*")
# A day by its word, a time of day, or both.
_OF_DAY = re.compile(r"(?:(today|yesterday)\s*)?([0-9]{1,2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,9})?)?)?")
# Seconds since the epoch, and a date without its hyphens: as ms since the epoch both would be times in 1970.
_NOT_MS = re.compile("[12][0-9]{9}|(?:19|20)[0-9]{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])")


def escape(text: str) -> str:
    """Return `text` on one line, with control and format characters and surrogates as \\x.. or \\u...."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or unicodedata.category(char) == "Zs" else _escaped(char) for char in text
    )


# Spreadsheets also accept wide forms, and formulas after white space.
_FORMULAS = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")


def harmless_cell(text: str) -> str:
    """Return a CSV cell that no spreadsheet runs as a formula: an apostrophe comes before a formula."""
    return f"'{text}" if text.startswith(_FORMULAS) else text


def _escaped(char: str) -> str:
    code = ord(char)
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char)
    return short or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def format_time(timestamp: int | None) -> str:
    """Return ms since epoch as ISO 8601 in the local zone; the bare number for years beyond the calendar."""
    if timestamp is None:
        return "-"
    try:
        moment = (_EPOCH + datetime.timedelta(milliseconds=timestamp)).astimezone()
    except (OverflowError, ValueError, OSError):
        return f"{timestamp} ms"
    return moment.isoformat(timespec="milliseconds")


def short_time(timestamp: int | None, now: datetime.datetime | None = None, timespec: str = "seconds") -> str:
    """Return ms since epoch in the local zone without what it shares with `now` (by default the clock's), for narrow places.

    ``05:32:39`` is of today, ``11-21 05:32:39`` of this year, ``2025-11-21 05:32`` of another; with the timespec "minutes" the
    latter two are ``11-21 05:32`` and ``2025-11-21``, with "milliseconds" all have milliseconds.
    """
    text = format_time(timestamp)
    if timestamp is None or "T" not in text:
        return text
    day, _, rest = text.partition("T")
    clock = rest[:12] if timespec == "milliseconds" else rest[:8]
    today = (datetime.datetime.now() if now is None else now).date().isoformat()
    if day == today:
        return clock
    if timespec == "minutes":
        return f"{day[5:]} {clock[:5]}" if day[:4] == today[:4] else day
    if day[:4] == today[:4]:
        return f"{day[5:]} {clock}"
    return f"{day} {clock}" if timespec == "milliseconds" else f"{day} {clock[:5]}"


def format_size(size: int) -> str:
    """Return a number of bytes for people, in units of 1024."""
    number = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024 or unit == "TiB":
            return f"{size} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError


# The most characters of a cell, and bytes of a body, that are shown.
_SHOWN = 80


def _cell(value: object) -> str:
    # Cut first: a text from a store may be long.
    text = str(value)
    return _safe(text[:_SHOWN]) + ("…" if len(text) > _SHOWN else "")


def _safe(text: str) -> str:
    # Loaded here, as few programs have a use for its table of entities.
    import html

    return html.escape(escape(text))


def preview(data: bytes) -> str:
    """Return the first bytes of a body, as text if they are UTF-8, else in hexadecimal, and its size if it is cut."""
    first = data[:_SHOWN]
    text = None
    # A cut may go through a character.
    for lost in range(4 if len(data) > _SHOWN else 1):
        with contextlib.suppress(UnicodeDecodeError):
            text = first[: len(first) - lost].decode()
            break
    shown = len(first)
    if text is None:
        shown = _SHOWN // 4
        text = first[:shown].hex(" ")
    return text if len(data) <= shown else f"{len(data)} bytes: {text}"


def html_table(caption: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a small table for a notebook, without markup from cells or caption.

    If `header` is empty, the first cell of each row is its head.
    """
    head = "".join(f"<th>{_cell(name)}</th>" for name in header)
    lines = []
    for row in rows:
        cells = [_cell(value) for value in row]
        first = f"<th>{cells[0]}</th>" if not header else f"<td>{cells[0]}</td>"
        lines.append(f"<tr>{first}{''.join(f'<td>{cell}</td>' for cell in cells[1:])}</tr>")
    top = f"<thead><tr>{head}</tr></thead>" if header else ""
    return f"<table><caption>{_safe(caption[:400])}</caption>{top}<tbody>{''.join(lines)}</tbody></table>"


def parse_time(text: str, *, end: bool = False) -> int:
    """Return ms since epoch of a time, by default in the local zone; ValueError for another text.

    It is ISO 8601, ms since epoch, ``2h ago``, ``now``, ``10:30`` (of today), ``yesterday 10:30``, or a day:
    ``2026-11-20``, ``today``, ``yesterday``.  A day is its first millisecond; with `end`, which is inclusive, its last one.
    """
    text = text.strip()
    if _NOT_MS.fullmatch(text):
        what = "seconds: write ms since epoch, 13 digits" if len(text) == 10 else "a date: write it with hyphens"
        raise ValueError(f"{text!r} is not a time: it looks like {what}")
    if re.fullmatch("-?[0-9]{1,19}", text):
        return int(text)
    if text == "now":
        return time.time_ns() // 1_000_000
    ago = _AGO.fullmatch(text)
    if ago and ago[2] in _AGO_SIZES:
        back = float(ago[1]) * _AGO_SIZES[ago[2]]
        if back >= 2**63:
            raise ValueError(f"{escape(text[:40])!r} is not a time: it does not fit 64 bits of ms")
        return time.time_ns() // 1_000_000 - round(back)
    try:
        day = _day(text)
        if day is not None:
            following = day + datetime.timedelta(days=1)
            return _first_of_day(following) - 1 if end else _first_of_day(day)
        return _milliseconds(_moment(text))
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            f"{text!r} is not a time: write 2026-11-21T05:32:39.596+00:00 (local zone without one), 2026-11-21, 10:30, "
            "today, yesterday, '2h ago', or ms since epoch"
        ) from None


def _day(text: str) -> datetime.date | None:
    # None: it says more than a day, or something else.
    if text in ("today", "yesterday"):
        return datetime.date.today() - datetime.timedelta(days=text == "yesterday")
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        return None


def _first_of_day(day: datetime.date) -> int:
    # The first of two midnights.
    first = _milliseconds(datetime.datetime(day.year, day.month, day.day))
    if _local_day(first) == day:
        return first
    # The clocks skip midnight, or all of the day: it begins when they are changed.
    low, high = first - 93_600_000, first + 93_600_000
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _local_day(middle) >= day else (middle, high)
    return high


def _local_day(timestamp: int) -> datetime.date:
    return (_EPOCH + datetime.timedelta(milliseconds=timestamp)).astimezone().date()


def _moment(text: str) -> datetime.datetime:
    of_day = _OF_DAY.fullmatch(text)
    if of_day and of_day[2]:
        day = datetime.date.today() - datetime.timedelta(days=of_day[1] == "yesterday")
        text = f"{day.isoformat()}T{'0' if of_day[2][1] == ':' else ''}{of_day[2]}"
    # Python 3.10 knows neither Z nor fractions of other than 3 or 6 digits.
    fraction = re.compile(r"\.([0-9]{1,9})(?=$|[-+zZ])")
    iso = fraction.sub(lambda match: "." + match[1].ljust(6, "0")[:6], re.sub("[zZ]$", "+00:00", text))
    return datetime.datetime.fromisoformat(iso)


def _milliseconds(moment: datetime.datetime) -> int:
    return (moment.astimezone(datetime.timezone.utc) - _EPOCH) // datetime.timedelta(milliseconds=1)
