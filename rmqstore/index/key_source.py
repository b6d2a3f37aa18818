"""Looking up keys, whatever holds the index: the shape of every index, several of them as one, and which records have the keys.

An index only has candidates: places at which a record may have a key. `SoughtKeys.matching` is the one place that compares the
records there with the keys, for messages and for columns alike. To add a kind of index, write a class with the methods of
`KeySource`, and have `rmqstore.store.querying` ask it.
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
    # As in `rmqstore.sources`.
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
    """Return True where topic or key has text that was replaced while it was decoded, and is no key's bytes."""
    return "\ufffd" in selection.topic or "\ufffd" in selection.key


class SoughtKeys:
    """Keys that are looked up together, each in its topic; `selection` has what they are (`index_type`), and the store times.

    `texts` are keys and topics as they are stored; `pairs` returns topic and key as text, for an index that needs them.
    """

    def __init__(self, texts: KeyTexts, selection: Selection, pairs: Callable[[], Iterable[tuple[str, str]]]):
        self.texts, self.selection, self.pairs = texts, selection, pairs
        # Text that was replaced while it was decoded cannot be compared as bytes.
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
        """array of int32: the hash of each key in index files."""
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

        `out` gets the rows, and `take` takes full batches out of it.  Returns these batches, and as an array of bool which
        candidates were taken.
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
                # How many rows the key has of which others were looked at before.
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
        """Yield where records may have the keys, in rounds; of each key, the newest entries are in the first one.

        Every record that has a key, and that `covered` includes, is among them; so may be records with other keys, and records
        of other times.  `wanted` is for each key the number of records that are still to be found (int64): the caller lowers it
        between rounds, and the rounds end when no key wants more.  None = all candidates in one round.
        """

    def covered(self) -> list[Span]:
        """Return the parts of the log of which the index has every entry: phy offsets, ascending and apart."""

    def doubt(self, sought: SoughtKeys, rejected: Candidates) -> None:
        """Judge the candidates whose records do not have their key, or not at the times that were asked for.

        An entry may lead to another key of the same hash, or to what retention deleted. If an entry cannot be true, the index is
        damaged and may lack others: from then on `covered` leaves out what it may lack.
        """


class Merged:
    """Several indexes as one, a `KeySource`: what one of them has is found."""

    def __init__(self, *sources: KeySource):
        self.sources = sources

    def candidates(self, sought: SoughtKeys, wanted: ndarray | None = None) -> Iterator[Candidates]:
        """Yield the candidates of all in one round, those of each key in the order of falling phy offsets, each once."""
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
        """Have each judge these candidates."""
        for source in self.sources:
            source.doubt(sought, rejected)


def _laid_out(texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    parts = [encode_java_utf8(text) for text in texts]
    data = b"".join(parts)
    offsets = np.cumsum([0, *map(len, parts)]).astype(np.int32)
    return offsets, np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)
