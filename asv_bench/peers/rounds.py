"""Contenders in turns: what a round is, the statistics of many, and the table of them.

Owns the fairness of a comparison.  Invariants:

- In every round each contender does the whole work once, and the order moves on by one from round to round, so that no one
  always comes after the same other.
- A ratio is taken within a round and the median over the rounds, so that a slow minute of the machine falls on both sides.
- Contenders that say what the work came to must agree, else the comparison is refused: nobody is fast by doing less.

It never looks at how a contender does its work, and times nothing itself: a contender makes its data, then times the work.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """Seconds that the work took, and what it came to (names and numbers that others must agree on)."""

    seconds: float
    answer: Mapping[str, Any] = {}


class DifferentWorkError(Exception):
    """Two contenders did not do the same work."""


@dataclass
class Work:
    """Something that several can do.

    Attributes
    ----------
    part, name : str
        Where it belongs and what it is.
    unit, count :
        What is counted, and how many of them one round does.
    contenders : mapping of str to callable
        By name, in the order of the table; each call does the work once.
    base : str or sequence of str
        The peer to compare with; of several the fastest.
    others : sequence of str
        Contenders that are not ours either.
    goals : mapping of str to float
        How many times as fast as the base a contender is meant to be.
    skipped : mapping of str to str
        Contenders that cannot take part, and why.
    warm_up : int
        Rounds before the first one that counts.
    """

    part: str
    name: str
    unit: str
    count: int
    contenders: Mapping[str, Callable[[], Outcome]]
    base: str | Sequence[str] = "Java"
    others: Sequence[str] = ()
    goals: Mapping[str, float] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    warm_up: int = 1


def order_of_round(names: Sequence[str], number: int) -> list[str]:
    """The names, moved on by one for each round."""
    shift = number % len(names)
    return [*names[shift:], *names[:shift]]


def check_same(name: str, answers: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse answers that differ in a number that several give.

    Raises
    ------
    DifferentWorkError
        Names both contenders and both numbers.
    """
    known: dict[str, tuple[str, Any]] = {}
    for who, answer in answers.items():
        for what, value in answer.items():
            first, expected = known.setdefault(what, (who, value))
            if value != expected:
                raise DifferentWorkError(f"{name}: {what} is {expected} of {first}, but {value} of {who}")


def run(work: Work, rounds: int, on_round: Callable[[int, int], None] = lambda done, of: None) -> dict[str, Any]:
    """Let the contenders of `work` take turns; the result is what a JSON file keeps of it: the seconds of every round."""
    names = list(work.contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    total = work.warm_up + rounds
    for number in range(total):
        answers = {}
        for name in order_of_round(names, number):
            outcome = work.contenders[name]()
            answers[name] = outcome.answer
            if number >= work.warm_up:
                seconds[name].append(outcome.seconds)
        check_same(f"{work.part}, {work.name}", {name: answers[name] for name in names})
        on_round(number + 1, total)
    return {
        "part": work.part,
        "name": work.name,
        "unit": work.unit,
        "count": work.count,
        "base": [work.base] if isinstance(work.base, str) else list(work.base),
        "others": list(work.others),
        "goals": dict(work.goals),
        "skipped": dict(work.skipped),
        "seconds": seconds,
    }


class Spread(NamedTuple):
    """Median, lowest and highest of some numbers."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """That of `values`, of which there must be some."""
        numbers = list(values)
        return cls(statistics.median(numbers), min(numbers), max(numbers))


class Row(NamedTuple):
    """A line of the table: rates in units per second, and how many times as fast as the base (None without one)."""

    part: str
    work: str
    who: str
    unit: str
    rate: Spread | None
    ratio: Spread | None
    goal: float | None
    remark: str
    ours: bool


def base_of(result: Mapping[str, Any]) -> str | None:
    """The peer that a result is compared with: the one of its bases that took part and has the lowest median."""
    there = [name for name in result["base"] if result["seconds"].get(name)]
    return min(there, key=lambda name: statistics.median(result["seconds"][name])) if there else None


def rows(results: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    """The lines of the table of results, as `run` gives them."""
    for result in results:
        base = base_of(result)
        for who, seconds in result["seconds"].items():
            ratio = None
            if base is not None and who != base:
                ratio = Spread.of(theirs / ours for theirs, ours in zip(result["seconds"][base], seconds))
            yield Row(
                result["part"],
                result["name"],
                who,
                result["unit"],
                Spread.of(result["count"] / taken for taken in seconds),
                ratio,
                result["goals"].get(who),
                "base" if who == base else "",
                who not in result["base"] and who not in result["others"],
            )
        for who, why in result["skipped"].items():
            goal = result["goals"].get(who)
            yield Row(
                result["part"], result["name"], who, result["unit"], None, None, goal, why, who in result["goals"]
            )


def verdict(row: Row) -> str:
    """What the goal says to the ratio: "reached", "missed", or nothing without a goal."""
    if row.goal is None or row.ratio is None:
        return ""
    return "reached" if row.ratio.median >= row.goal else "missed"


def rate_text(rate: float) -> str:
    """A rate with three digits: 12.3 M, 456 k, 78.9."""
    for limit, sign in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if rate >= limit:
            return f"{digits(rate / limit)}{sign}"
    return digits(rate)


def digits(number: float) -> str:
    """A number with three digits, at least those before its point."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def cells(row: Row) -> list[str]:
    """The texts of a line: work, who, rate, its spread, ratio, its spread, goal, remark."""
    rate = spread = ratio = ratio_spread = ""
    if row.rate is not None:
        rate = f"{rate_text(row.rate.median)} {row.unit}/s"
        spread = f"{rate_text(row.rate.low)} – {rate_text(row.rate.high)}"
    if row.ratio is not None:
        ratio = digits(row.ratio.median)
        ratio_spread = f"{digits(row.ratio.low)} – {digits(row.ratio.high)}"
    goal = "" if row.goal is None else f"≥ {row.goal:g}"
    return [row.work, row.who, rate, spread, ratio, ratio_spread, goal, row.remark or verdict(row)]


HEADER = ["work", "who", "rate, median", "lowest – highest", "ratio", "lowest – highest", "goal", ""]
