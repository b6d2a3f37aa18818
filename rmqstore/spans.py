"""Spans: ranges of numbers, as offsets of the log or of a queue, each without its end."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Span", "joined", "without"]

Span = tuple[int, int]
"""The first number, and one after the last."""


def without(begin: int, end: int, spans: Iterable[Span]) -> list[Span]:
    """Return the parts of the range from `begin` to `end` that are in none of `spans`, ascending."""
    left = []
    for first, last in sorted(spans):
        if first > begin:
            left.append((begin, min(first, end)))
        begin = max(begin, last)
    left.append((begin, end))
    return [span for span in left if span[0] < span[1]]


def joined(spans: Iterable[Span]) -> list[Span]:
    """Return the same numbers in the fewest spans, ascending and apart; no span is empty."""
    found: list[Span] = []
    for first, last in sorted(span for span in spans if span[0] < span[1]):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found
