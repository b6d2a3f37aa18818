"""Searches by key: the protocol of every index, several indexes as one, and the comparison of records with keys.

An index only has candidates: places at which a record may have a key.  `SoughtKeys.matching` compares the records there with the
keys, for messages and for columns.  A new kind of index is a class with the methods of `KeySource`, which
`rmqstore.store.querying` uses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rmqstore import _numpy as np
from rmqstore._columns import ArrowColumns, KeyTexts
from rmqstore.arguments import KEY_BITS
from rmqstore.message import encode_java_utf8
from rmqstore.selection import INT64_MAX, Selection
from rmqstore.sources import LogSource
from rmqstore.spans import Span, joined

if TYPE_CHECKING:
    # See `rmqstore.sources`.
    from numpy import ndarray

__all__ = ["Candidates", "KeySource", "Merged", "SoughtKeys"]


@dataclass(frozen=True)
class Candidates:
    """Places at which records may have keys, as parallel arrays: the number of the key (int32, ascending), the phy offset (int64).

    With `falling`, the phy offsets of each key fall, so that no place comes twice; otherwise the newest entry is first.
    """

    numbers: ndarray
    phy_offsets: ndarray
    falling: bool = True

    @classmethod
    def of(cls, numbers: list[int], phy_offsets: list[int]) -> Candidates:
        """Return candidates with falling phy offsets."""
        return cls(np.array(numbers, np.int32), np.array(phy_offsets, np.int64))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, rows: slice | np.ndarray) -> Candidates:
        return Candidates(self.numbers[rows], self.phy_offsets[rows], self.falling)


def is_replaced(selection: Selection) -> bool:
    """Return True if topic or key contains text that was replaced while it was decoded: it cannot be compared as bytes."""
    return "\ufffd" in selection.topic or "\ufffd" in selection.key


class SoughtKeys:
    """Keys that are searched together, each in its topic.

    - `texts`: keys and topics as they are stored.
    - `selection`: the kind of the keys (`index_type`) and the store times.
    - `pairs`: returns topics and keys as text, for an index that needs them.
    """

    def __init__(self, texts: KeyTexts, selection: Selection, pairs: Callable[[], Iterable[tuple[str, str]]]):
        self.texts, self.selection, self.pairs = texts, selection, pairs
        # See `is_replaced`.
        self.by_text = False

    @classmethod
    def of(cls, selection: Selection) -> SoughtKeys:
        """Return the one key of a selection."""
        sought = cls.of_pairs([(selection.topic, selection.key)], selection)
        sought.by_text = is_replaced(selection)
        return sought

    @classmethod
    def of_pairs(cls, pairs: list[tuple[str, str]], selection: Selection) -> SoughtKeys:
        """Return keys that are given as topic and text."""
        texts = KeyTexts(*_laid_out(key for _, key in pairs), *_laid_out(topic for topic, _ in pairs))
        return cls(texts, selection, lambda: pairs)

    @functools.cached_property
    def hashes(self) -> np.ndarray:
        """The hash of each key in index files (int32)."""
        return self.texts.hashes(self.selection.index_type == "T")

    def at_any_time(self) -> SoughtKeys:
        """Return the same keys, whatever the store time."""
        sought = SoughtKeys(self.texts, self.selection.at_any_time(), self.pairs)
        sought.by_text = self.by_text
        return sought

    def matching(
        self,
        log: LogSource,
        candidates: Candidates,
        max_num: int = INT64_MAX,
        out: ArrowColumns | None = None,
        take: Callable[[], list[Any]] | None = None,
    ) -> tuple[list[list[Any]], np.ndarray]:
        """Compare the records at candidates with the keys and the store times, at most `max_num` of each key.

        `out` gets the rows, and `take` takes full batches out of it.  Returns these batches, and a mask of the matching candidates.
        """
        batches = []
        numbers, phy_offsets = candidates.numbers, candidates.phy_offsets
        if self.by_text:
            messages = map(log.look_up, phy_offsets.tolist())
            has_key = np.array([message is not None and self.selection.has(message) for message in messages], bool)
            has_key[np.flatnonzero(has_key)[max_num:]] = False
            return [], has_key
        taken = np.zeros(len(candidates), np.uint8)
        out = ArrowColumns((), 1 << 30) if out is None else out
        low, high = self.selection.times
        out.choose(begin_timestamp=low, end_timestamp=high)
        for part, regions, bases, places in log.located(phy_offsets):
            at, num = 0, len(places)
            while at < num:
                first = part.start + at
                # The first row of this key; earlier parts may hold some of its rows.
                run = int(np.searchsorted(numbers, numbers[first])) if first else 0
                at = out.fill_matching(
                    regions, bases, places, phy_offsets[part], taken[part], numbers[part], self.texts,
                    KEY_BITS[self.selection.index_type], max_num, at, int(np.count_nonzero(taken[run:first])),
                )  # fmt: skip
                if at < num and take is not None:
                    batches.append(take())
        if out.count and take is not None:
            batches.append(take())
        return batches, taken.view(np.bool_)


class KeySource(Protocol):
    """An index by key."""

    def candidates(self, sought: SoughtKeys, wanted: ndarray | None = None) -> Iterator[Candidates]:
        """Yield the places of records that may have the keys, in rounds; the first round has the newest entries of each key.

        They include every record with a key in the `covered` parts, and may include records with other keys or times.  `wanted`
        is the number of missing records of each key (int64): the caller lowers it between rounds, and the rounds end when no key
        wants more.  None = all candidates in one round.
        """

    def covered(self) -> list[Span]:
        """Return the parts of the log of which the index has every entry: phy offsets, ascending and apart."""

    def doubt(self, sought: SoughtKeys, rejected: Candidates) -> None:
        """Judge candidates whose records lack the key or have another time.

        An entry may point to another key of the same hash, or to an expired record.  If an entry is impossible, the index is
        damaged and may lack others: `covered` then leaves them out.
        """


class Merged:
    """Several indexes as one `KeySource`: a search finds what any of them has."""

    def __init__(self, *sources: KeySource):
        self.sources = sources

    def candidates(self, sought: SoughtKeys, wanted: ndarray | None = None) -> Iterator[Candidates]:
        """Yield the candidates of all in one round, each once, by falling phy offsets for each key."""
        parts = [part for source in self.sources for part in source.candidates(sought)]
        numbers = np.concatenate([part.numbers for part in parts])
        phy_offsets = np.concatenate([part.phy_offsets for part in parts])
        order = np.lexsort((-phy_offsets, numbers))
        numbers, phy_offsets = numbers[order], phy_offsets[order]
        first = np.ones(len(numbers), bool)
        first[1:] = (numbers[1:] != numbers[:-1]) | (phy_offsets[1:] != phy_offsets[:-1])
        yield Candidates(numbers[first], phy_offsets[first])

    def covered(self) -> list[Span]:
        """Return the parts of the log that one of them covers."""
        return joined(span for source in self.sources for span in source.covered())

    def doubt(self, sought: SoughtKeys, rejected: Candidates) -> None:
        """Let each index judge these candidates."""
        for source in self.sources:
            source.doubt(sought, rejected)


def _laid_out(texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    parts = [encode_java_utf8(text) for text in texts]
    data = b"".join(parts)
    offsets = np.cumsum([0, *map(len, parts)]).astype(np.int32)
    return offsets, np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)
