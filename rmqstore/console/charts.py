"""Pictures as plain numbers: where the bars of a chart stand, for the templates that write them as SVG.

Owns the geometry and the labels, never a text of SVG.  Places across are parts of the width in per cent, so that a picture is as
wide as the page and its letters stay as large; places down are pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rmqstore.texts import format_time

__all__ = ["bars", "time_columns"]

_NAME_SHOWN = 34
_COLUMN_HEIGHT = 120
_TOP = 24
_ROW_HEIGHT = 40


def time_columns(bins: Sequence[dict[str, Any]], what: str, show: Callable[[Any], str] = str) -> dict[str, Any]:
    """dict: columns side by side, one for each bin of a timeline, with the times at its ends below.

    Parameters
    ----------
    bins : sequence of dict
        As of `TimelineBin`.
    what : str
        "messages" or "bytes".
    show : callable
        Makes a text of a value.
    """
    greatest = max((each[what] for each in bins), default=0)
    step = 100 / max(len(bins), 1)
    return {
        "height": _TOP + _COLUMN_HEIGHT + 28,
        "axis": _TOP + _COLUMN_HEIGHT,
        "top": _TOP,
        "greatest": show(greatest),
        "ends": (format_time(bins[0]["begin"]), format_time(bins[-1]["end"])) if bins else ("", ""),
        "columns": [
            {
                "x": round(number * step + step * 0.08, 3),
                "width": round(step * 0.84, 3),
                "y": round(_TOP + _COLUMN_HEIGHT * (1 - each[what] / (greatest or 1)), 1),
                "height": round(_COLUMN_HEIGHT * each[what] / (greatest or 1), 1),
                "name": format_time(each["begin"]),
                "value": show(each[what]),
            }
            for number, each in enumerate(bins)
        ],
    }


def bars(rows: Sequence[tuple[str, float, str]], *, whole: float | None = None) -> dict[str, Any]:
    """dict: bars below each other, each with its name above it at the left and its value at the right.

    Parameters
    ----------
    rows : sequence of (str, number, str)
        Name, value (not negative), and the value as text.
    whole : number, optional
        What a bar of the whole width stands for; by default the greatest value.
    """
    highest = whole if whole is not None else max((value for _, value, _ in rows), default=0)
    return {
        "height": _ROW_HEIGHT * len(rows),
        "rows": [
            {
                "text_y": _ROW_HEIGHT * number + 14,
                "y": _ROW_HEIGHT * number + 20,
                "width": round(min(100 * value / highest, 100), 2) if highest > 0 else 0,
                "name": name if len(name) <= _NAME_SHOWN else name[: _NAME_SHOWN - 1] + "…",
                "value": text,
            }
            for number, (name, value, text) in enumerate(rows)
        ],
    }
