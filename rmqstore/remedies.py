"""What to do about an error, as data: operations of the package with their arguments, and sentences that contain them.

`str()` spells a remedy for Python; `rmqstore.cli.errors` has the spellings of the command line.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

__all__ = [
    "ChooseRecovery", "DeclareQueue", "DropUnits", "GiveOptions", "InferConfig", "OpenReadOnly", "Recover", "Remedy",
    "Sentence", "UseBrokerConf",
]  # fmt: skip


class Remedy:
    """An operation that helps, with its arguments; a part of a `Sentence`."""

    __slots__ = ()


@dataclass(frozen=True)
class OpenReadOnly(Remedy):
    """Open `what` read-only instead; spelled with the word that joins it to another remedy."""

    what: str = "it"

    def __str__(self) -> str:
        return f", or open {self.what} with read_only=True"


@dataclass(frozen=True)
class ChooseRecovery(Remedy):
    """Read past the damage in a log, or open the store with a recovery mode that goes on after it or cuts there."""

    def __str__(self) -> str:
        return (
            '; nothing was changed. Open it read-only to get out what is whole, with recovery="skip" to go on after the damage, '
            'or with recovery="truncate" to cut the log there as RocketMQ does, which deletes everything after it'
        )


@dataclass(frozen=True)
class Recover(Remedy):
    """Open the store with this recovery mode."""

    mode: str

    def __str__(self) -> str:
        return f"recovery={self.mode!r}"


@dataclass(frozen=True)
class DropUnits(Remedy):
    """Drop for good the `num` units and entries that lead outside the log, by a recovery or in the call that failed."""

    num: int
    recovery: bool

    def __str__(self) -> str:
        return f"MessageStore.open(path, drop_units={self.num})" if self.recovery else f"drop_units={self.num}"


@dataclass(frozen=True)
class GiveOptions(Remedy):
    """Give options of `StoreConfig`, each as ``name=value``, in the call or to `StoreConfig.infer`."""

    options: tuple[str, ...]
    infer: bool = True

    def __str__(self) -> str:
        return f"config=StoreConfig.infer(path, {', '.join(self.options)})" if self.infer else " and ".join(self.options)


@dataclass(frozen=True)
class UseBrokerConf(Remedy):
    """Take the options from the broker's broker.conf."""

    def __str__(self) -> str:
        return "StoreConfig.from_properties('broker.conf')"


@dataclass(frozen=True)
class InferConfig(Remedy):
    """Have the options found from the store's files; spelled with the word that joins it to another remedy."""

    def __str__(self) -> str:
        return ", or StoreConfig.infer(path)"


@dataclass(frozen=True)
class DeclareQueue(Remedy):
    """Vouch that the RabbitMQ node knows the queue."""

    def __str__(self) -> str:
        return "declared=True"


class Sentence(str):
    """A text with parts that faces spell differently: remedies, and members of enums.

    Parameters
    ----------
    *parts
        Texts, sentences, `Remedy` objects and members of enums, in their order.
    """

    parts: tuple[object, ...]

    def __new__(cls, *parts: object) -> Sentence:
        flat = tuple(each for part in parts for each in (part.parts if isinstance(part, Sentence) else (part,)))
        self = super().__new__(cls, "".join(part.name if isinstance(part, enum.Enum) else str(part) for part in flat))
        self.parts = flat
        return self

    def __reduce__(self) -> tuple[type[Sentence], tuple[object, ...]]:
        return Sentence, self.parts

    @property
    def what(self) -> Sentence:
        """Sentence: what is wrong, without the remedies and what follows them."""
        places = [place for place, part in enumerate(self.parts) if isinstance(part, Remedy)]
        return Sentence(*self.parts[: places[0]]) if places else self

    @property
    def remedies(self) -> tuple[Remedy, ...]:
        """tuple of Remedy: what to do, as data."""
        return tuple(part for part in self.parts if isinstance(part, Remedy))

    def spelled(self, spell: Callable[[object], str]) -> str:
        """Return the text of another face, which spells each part that is not a text."""
        return "".join(part if isinstance(part, str) else spell(part) for part in self.parts)
