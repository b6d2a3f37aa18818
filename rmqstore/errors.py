"""The exceptions of the package under one root, `StoreError`; `Finding`, the same as a value; what to do about one, as data.

Absence is not an error: a key without messages is an empty result.  Corruption is a value while scanning, and an exception when
one thing was asked for.  A `Sentence` contains a `Remedy`: an operation of the package with its arguments.  `str()` spells it for
Python, `rmqstore.cli.errors` for the command line.
"""

from __future__ import annotations

import enum
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "ChecksumError", "CorruptionError", "DiskFullError", "Finding", "FlushDiskTimeoutError", "GeometryError",
    "IndexFileError", "InvalidMessageError", "LostLogError", "MissingDependencyError", "OffsetOutOfRangeError",
    "ReadOnlyError", "StoreChangedError", "StoreClosedError", "StoreError", "StoreLockedError", "StoreNotFoundError",
    "StorePoisonedError", "UnsupportedFormatError",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes
    ----------
    path : str
        The file or directory.
    pos : int
        Position in bytes in the file, 0 where it is about the file as a whole.
    kind : str
        A short name, stable between releases.
    detail : str
        The bytes found, and those expected; of several the first.
    num : int
        The number of things of this kind in a row, beginning at `pos`.
    """

    path: str
    pos: int
    kind: str
    detail: str
    num: int = field(default=1, kw_only=True)


def finding_of(error: StoreError | OSError, kind: str, path: str, what: str = "") -> Finding:
    """Return `error` as a finding, after `what`; about `path` if the error names none; an OSError is of kind "file"."""
    if isinstance(error, StoreError):
        return Finding(error.path or path, error.pos or 0, kind, f"{what}{error.message}" if what else error.message)
    named = path if error.filename is None else os.fsdecode(error.filename)
    return Finding(named, 0, "file", f"{what}{error.strerror or error}")


class Remedy:
    """An operation that helps, with its arguments."""

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
    """Drop the `num` units and entries that point outside the log, by a recovery or in the call that failed."""

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
    """A text made of texts, sentences, and parts that faces spell differently: `Remedy` objects and members of enums."""

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


class StoreError(Exception):
    """Root of every error that rmqstore raises about a store.

    `str()` of the error ends with the path and the position when they are known.

    Parameters
    ----------
    message : str
        The problem and its remedy; a `Sentence` if other faces spell parts of it differently.
    path : str or os.PathLike, optional
        The file or directory that it is about.
    pos : int, optional
        The position in bytes inside `path`.
    """

    def __init__(self, message: str, path: str | os.PathLike[str] | None = None, pos: int | None = None):
        super().__init__(message, path, pos)
        self.message = message
        self.path = None if path is None else os.fspath(path)
        self.pos = pos

    @property
    def what(self) -> str:
        """str: what is wrong, without what to do about it."""
        return self.message.what if isinstance(self.message, Sentence) else self.message

    @property
    def remedies(self) -> tuple[Remedy, ...]:
        """tuple of Remedy: what to do about it, as far as it is an operation of the package."""
        return self.message.remedies if isinstance(self.message, Sentence) else ()

    def __str__(self) -> str:
        return placed(self.message, self.path, self.pos)


def placed(text: str, path: str | None, pos: int | None) -> str:
    """Return `text` with the place that it is about, as far as that is known."""
    if path is None:
        return str(text) if pos is None else f"{text} [position {pos}]"
    return f"{text} [{path}]" if pos is None else f"{text} [{path}, position {pos}]"


class CorruptionError(StoreError):
    """Bytes that cannot be what the format says; nothing was changed on disk."""


class ChecksumError(CorruptionError):
    """A stored CRC-32 does not agree with the bytes that it covers."""


class LostLogError(StoreError):
    """Queue units or index entries point outside the commit log, and would be lost; nothing was changed on disk.

    Attributes
    ----------
    num : int
        Their number: give it as ``drop_units`` to drop them.
    """

    def __init__(self, message: str, path: str | os.PathLike[str] | None = None, pos: int | None = None, num: int = 0):
        super().__init__(message, path, pos)
        self.num = num


class UnsupportedFormatError(StoreError):
    """A whole and healthy structure of a kind or version that this release does not handle."""


class GeometryError(StoreError):
    """A file's size, name or contents do not fit the configured geometry."""


class StoreClosedError(StoreError):
    """The store, file or mapping was closed before or during the call."""


class ReadOnlyError(StoreError):
    """A write was asked of something that was opened read-only."""


class StoreChangedError(StoreError):
    """The writer cut or replaced files that a reader used; open the store again."""


class FlushDiskTimeoutError(StoreError, TimeoutError):
    """A message is stored, but whether it is on the disk was not known in time (RocketMQ's FLUSH_DISK_TIMEOUT)."""


class StoreNotFoundError(StoreError):
    """There is no store at the path yet: no such directory, or one without files of a store."""


class DiskFullError(StoreError, OSError):
    """The disk is full, or used above `disk_space_warning_level_ratio`; no writes until there is space; reads continue."""

    def __init__(self, message: str, path: str | os.PathLike[str] | None = None, pos: int | None = None):
        super().__init__(message, path, pos)
        self.errno, self.strerror, self.filename = errno.ENOSPC, str(message), self.path

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.path, self.pos)


class StoreLockedError(StoreError):
    """Another process, or this one, already has the store open for writing."""


class StorePoisonedError(StoreError):
    """An earlier failure made further writes unsafe; reads go on."""


class IndexFileError(StoreError):
    """An index file could not be created after all tries; the store refuses writes that need it."""


class OffsetOutOfRangeError(StoreError, IndexError):
    """An offset outside the range that the log, the queue or the file holds."""


class InvalidMessageError(StoreError, ValueError):
    """A message that the format cannot hold or that a broker would refuse; nothing was written."""


class MissingDependencyError(StoreError, ImportError):
    """An optional library is needed; the message names the extra that installs it."""
