"""The flat files of one kind of one queue: files of any length, named by their base offsets, as one stream of bytes.

Owns the directory: which files there are, which one holds an offset, and what the stream lacks, its holes: a file that is missing
or short, known from its neighbours and from the metadata, or that may not be read.  It never interprets bytes and changes
nothing.  A file is read at its real length, as far as the next one begins.

Facts (RocketMQ 5.5.0): a name is the first 8 hex digits of the MD5 of the base offset in decimal, and the base offset in 20
digits; base + length = the next base.  The first base is above 0 where older files were deleted.
"""

from __future__ import annotations

import hashlib
import os
import threading
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from rmqstore import _core
from rmqstore.errors import Finding, OffsetOutOfRangeError
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import MappedFile, MappedFilePool, NotCopied
from rmqstore.flatfile.metadata import FlatFileMetadata

__all__ = ["EXPIRED", "FlatFiles", "Hole", "flat_file_name", "name_prefix"]

EXPIRED = "expired"
"""The kind of a `Finding` about what went since it was listed while nothing older is there: retention, and no damage."""

_PREFIX, _DIGITS = 8, 20
_INT64_MAX = 2**63 - 1


def name_prefix(text: str) -> str:
    """str: the first 8 hex digits of the MD5 of `text`, which names of files and clusters begin with."""
    return hashlib.md5(text.encode("utf-8", "surrogateescape"), usedforsecurity=False).hexdigest()[:_PREFIX]


def flat_file_name(base_offset: int) -> str:
    """str: the name of the flat file that begins at `base_offset`."""
    return f"{name_prefix(str(base_offset))}{base_offset:0{_DIGITS}d}"


@dataclass(frozen=True, slots=True)
class Hole:
    """Offsets from `begin` to before `end` that no file holds; `finding` says which file lacks them."""

    begin: int
    end: int
    finding: Finding


class FlatFiles(NotCopied):
    """Files of one directory as one stream.

    Parameters
    ----------
    path : path
        The directory; it need not exist.
    pool : MappedFilePool
    metadata : mapping of int to FlatFileMetadata, optional
        What the broker says of these files, by base offset.
    goes_on : bool
        A file that was deleted since it was listed is a hole from then on, and no error: for whoever goes over all of
        them, and tells what it did not come to.

    Attributes
    ----------
    holes : list of Hole
        Ascending.
    problems : list of Finding
        What is not as a broker leaves it, holes included.
    unreadable : Finding or None
        That the directory cannot be listed.
    min_offset, max_offset : int
        Where the stream begins and ends in bytes, with what is known to be missing.
    """

    read_only = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        pool: MappedFilePool,
        metadata: Mapping[int, FlatFileMetadata] | None = None,
        *,
        goes_on: bool = False,
    ):
        self.path, self.goes_on = os.fspath(path), goes_on
        self._pool = pool
        self._metadata = metadata or {}
        # Replaced as a whole, so that a reader on another thread sees one listing or the other.
        self._layout: tuple[list[int], list[int], dict[int, MappedFile]] = ([], [], {})
        self.holes: list[Hole] = []
        self.problems: list[Finding] = []
        self.unreadable: Finding | None = None
        # Files that may not be read: length, by base offset.
        self._refused: dict[int, int] = {}
        # Files that were deleted since they were listed: length, by base offset.
        self._lost: dict[int, int] = {}
        self._lock = threading.Lock()
        self.min_offset = self.max_offset = 0
        self.load(self._metadata)

    @property
    def bases(self) -> list[int]:
        """list of int: base offset of each file that is read, ascending."""
        return self._layout[0]

    def load(self, metadata: Mapping[int, FlatFileMetadata] | None = None) -> None:
        """List the directory, again where a broker wrote meanwhile; files that did not change stay mapped."""
        self._metadata = metadata or {}
        lengths: dict[int, int] = {}
        refused: dict[int, int] = {}
        self.problems, self.unreadable = [], None
        entries = listing(self.path)
        if (error := entries.problem) is not None:
            self.unreadable = Finding(self.path, 0, "file", f"cannot be listed: {error.strerror or error}")
            self.problems.append(self.unreadable)
        for entry in entries:
            base = _base_of(entry.name)
            try:
                if base is None or not entry.is_file():
                    detail = "no part of tiered storage, or its name was changed; it is not read"
                    self.problems.append(Finding(entry.path, 0, "file", detail))
                elif os.access(entry.path, os.R_OK):
                    lengths[base] = entry.stat().st_size
                else:
                    refused[base] = entry.stat().st_size
            except FileNotFoundError:
                continue  # Its broker deleted it meanwhile.
        with self._lock:
            self._refused, self._lost = refused, {}
            self._arrange(lengths)

    def lose(self, offset: int) -> None:
        """Take down that the file that holds `offset` was deleted since it was listed: it is a hole from now on."""
        with self._lock:
            mapped_file = self.find(offset)
            if mapped_file is None:
                return
            self._lost[mapped_file.file_from_offset] = mapped_file.size
            self.problems = [each for each in self.problems if all(each is not hole.finding for hole in self.holes)]
            files = self._layout[2].values()
            self._arrange({each.file_from_offset: each.size for each in files if each is not mapped_file})

    def _arrange(self, lengths: dict[int, int]) -> None:
        # A file that has no bytes yet is made before the first append: it holds nothing, and lacks nothing.
        bases = sorted(base for base, length in lengths.items() if length)
        ends = [
            min(base + lengths[base], bases[i + 1] if i + 1 < len(bases) else _INT64_MAX) for i, base in enumerate(bases)
        ]
        for base, end in zip(bases, ends):
            if end < base + lengths[base]:
                detail = f"{lengths[base]} bytes, but the next file begins {end - base} bytes after this one does"
                self.problems.append(Finding(self._path(base), end - base, "overlap", detail))
        sizes = {**{base: each.size for base, each in self._metadata.items()}, **self._refused, **self._lost}
        known = {base: base + size for base, size in sizes.items() if size and base + size <= _INT64_MAX}
        self.min_offset = min([*bases[:1], *known], default=0)
        self.max_offset = max([*ends[-1:], *known.values()], default=0)
        self.holes = []
        at = self.min_offset
        for base, end in [*zip(bases, ends), (self.max_offset, self.max_offset)]:
            while at < base:
                # Each missing file that the metadata know is a hole of its own.
                until = min([each for each in known if at < each < base], default=base)
                self.holes.append(Hole(at, until, self._lacking(at, until, bases, ends)))
                at = until
            at = max(at, end)
        self.problems += [hole.finding for hole in self.holes]
        files: dict[int, MappedFile] = {}
        for base, end in zip(bases, ends):
            same = self._layout[2].get(base)
            files[base] = (
                same
                if same is not None and same.size == end - base
                else MappedFile.of_any_length(self._path(base), end - base, file_from_offset=base, pool=self._pool)
            )
        gone = [each for base, each in self._layout[2].items() if files.get(base) is not each]
        self._layout = bases, ends, files
        for mapped_file in gone:
            # Whoever reads in it keeps its mapping.
            self._pool.forget(mapped_file)

    def _path(self, base: int) -> str:
        return os.path.join(self.path, flat_file_name(base))

    def _lacking(self, begin: int, end: int, bases: list[int], ends: list[int]) -> Finding:
        # Which file it is that does not hold `begin` although it should.
        if begin in self._refused:
            return Finding(self._path(begin), 0, "file", f"may not be read; it holds offsets {begin} to {end}")
        if begin in self._lost:
            # Retention begins with the oldest.
            kind = "missing_file" if any(base < begin for base in bases) else EXPIRED
            detail = f"was deleted since it was listed; it held offsets {begin} to {end}"
            return Finding(self._path(begin), 0, kind, detail)
        if self.unreadable is not None:
            return self.unreadable
        if begin in self._metadata:
            return Finding(self._path(begin), 0, "missing_file", f"is missing; it held offsets {begin} to {end}")
        place = bisect_right(bases, begin) - 1
        if place >= 0 and ends[place] == begin:
            base = bases[place]
            known = self._metadata.get(base)
            if known is not None and base + known.size > begin:
                detail = f"was cut short: it ends here, the metadata say after {known.size} bytes"
            else:
                detail = f"ends here and the next begins at offset {end}: it was cut short, or {flat_file_name(begin)} is missing"
            return Finding(self._path(base), begin - base, "missing_file", detail)
        return Finding(self._path(begin), 0, "missing_file", f"is missing; it held offsets {begin} to {end}")

    def find(self, offset: int) -> MappedFile | None:
        """MappedFile or None: the file that holds `offset`."""
        bases, ends, files = self._layout
        place = bisect_right(bases, offset) - 1
        return files[bases[place]] if place >= 0 and offset < ends[place] else None

    def hole_at(self, offset: int) -> Hole | None:
        """Hole or None: the one that `offset` lies in."""
        return next((hole for hole in self.holes if hole.begin <= offset < hole.end), None)

    def region_of(self, offset: int) -> tuple[_core.Region, int] | None:
        """(Region, int) or None: the mapped file that holds `offset`, and the file's base offset.

        Raises
        ------
        OffsetOutOfRangeError
            Its broker deleted the file since it was listed, and this does not go on.
        """
        mapped_file = self.find(offset)
        if mapped_file is None:
            return None
        try:
            return mapped_file.region, mapped_file.file_from_offset
        except OffsetOutOfRangeError:
            if not self.goes_on:
                raise
            self.lose(offset)
            return None

    def region_if_there(self, offset: int) -> tuple[_core.Region, int] | None:
        """(Region, int) or None: as `region_of`, for a pass over many files, which always goes on."""
        try:
            return self.region_of(offset)
        except OffsetOutOfRangeError:
            self.lose(offset)
            return None

    def place_of(self, offset: int) -> tuple[str, int]:
        """(str, int): path and position in bytes of `offset`, for an error that names them."""
        mapped_file = self.find(offset)
        if mapped_file is not None:
            return mapped_file.path, offset - mapped_file.file_from_offset
        hole = self.hole_at(offset)
        return (hole.finding.path, hole.finding.pos) if hole is not None else (self.path, 0)

    def __len__(self) -> int:
        return len(self.bases)

    def close(self) -> None:
        """Let go of the files."""
        for mapped_file in self._layout[2].values():
            mapped_file.close()


def _base_of(name: str) -> int | None:
    digits = name[_PREFIX:]
    if len(digits) != _DIGITS or not (digits.isascii() and digits.isdigit()):
        return None
    base = int(digits)
    return base if base <= _INT64_MAX and name == flat_file_name(base) else None
