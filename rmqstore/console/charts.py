"""Pictures as plain numbers: where the bars of a chart stand, for the templates that write them as SVG.

Owns the geometry and the labels, never a text of SVG.  Places across are parts of the width in per cent, so that a picture is as
wide as the page and its letters stay as large; places down are pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rmqstore.texts import format_time

__all__ = ["bars", "columns", "time_columns"]

_NAME_SHOWN = 34
_COLUMN_HEIGHT = 120
_ROW_HEIGHT = 40


def columns(
    values: Sequence[float],
    names: Sequence[str],
    show: Callable[[Any], str] = str,
    *,
    ends: tuple[str, str] | None = None,
    logarithmic: bool = False,
    labelled: bool = False,
) -> dict[str, Any]:
    """dict: columns side by side, the first at the left.

    Parameters
    ----------
    values : sequence of numbers
        Not negative.
    names : sequence of str
        What each column stands for.
    show : callable
        Makes a text of a value.
    ends : (str, str), optional
        What stands below the first and the last column, instead of names below all.
    logarithmic : bool
        Heights by the logarithm: a few small values are what matters.
    labelled : bool
        Its value above every column, instead of the greatest one at the axis.
    """

    def height(value: float) -> float:
        return math.log10(value + 1) if logarithmic else float(value)

    greatest = max(values, default=0)
    highest = height(greatest) or 1.0
    step = 100 / max(len(values), 1)
    top = 24
    return {
        "height": top + _COLUMN_HEIGHT + 28,
        "axis": top + _COLUMN_HEIGHT,
        "top": top,
        "greatest": show(greatest),
        "ends": ends,
        "labelled": labelled,
        "columns": [
            {
                "x": round(number * step + step * 0.08, 3),
                "middle": round((number + 0.5) * step, 3),
                "width": round(step * 0.84, 3),
                "y": round(top + _COLUMN_HEIGHT * (1 - height(value) / highest), 1),
                "height": round(_COLUMN_HEIGHT * height(value) / highest, 1),
                "name": name,
                "value": show(value),
            }
            for number, (value, name) in enumerate(zip(values, names, strict=True))
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


def time_columns(bins: Sequence[dict[str, Any]], what: str, show: Callable[[Any], str] = str) -> dict[str, Any]:
    """dict: columns of a timeline's bins, with the times at its ends below."""
    ends = (format_time(bins[0]["begin"]), format_time(bins[-1]["end"])) if bins else ("", "")
    return columns([each[what] for each in bins], [format_time(each["begin"]) for each in bins], show, ends=ends)
