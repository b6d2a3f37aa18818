"""The flat files of one kind of one queue as one stream of bytes, the records in them, and the metadata.

The holes of the stream are files that are missing, short (known from their neighbours and from the metadata) or unreadable.  A file
is read at its real length, up to the begin of the next one.

Facts (RocketMQ 5.5.0): a name is the first 8 hex digits of the MD5 of the base offset in decimal, and the base offset in 20
digits; base + length = the next base.  The first base is above 0 where older files were deleted.  The records of a queue are back
to back, with the offset in this log at bytes 28 to 35 instead of the one that they had.  tieredStoreMetadata.json is in config/ of
the broker's local store, next to a ``.bak``; base offsets and queue ids are unquoted keys.  Queue bounds in it are -1 while the
broker runs, so they are not read.  A flat file may be longer than its size there, and is right then.
"""

from __future__ import annotations

import hashlib
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rmqstore import _core
from rmqstore import _numpy as np
from rmqstore._core import Verdict
from rmqstore.consumer.json_files import parse_fastjson
from rmqstore.errors import CorruptionError, Finding, OffsetOutOfRangeError
from rmqstore.files.listing import listing
from rmqstore.files.mapped_file import MappedFile, MappedFilePool, NotCopied
from rmqstore.files.open_file import read_small_file
from rmqstore.files.os_errors import is_unreadable
from rmqstore.message import MessageExt, _read
from rmqstore.sources import EXPIRED, Located, in_one_file, located

__all__ = [
    "METADATA_FILE",
    "FlatFiles",
    "FlatLog",
    "Hole",
    "TieredMetadata",
    "flat_file_name",
    "name_prefix",
]

METADATA_FILE = os.path.join("config", "tieredStoreMetadata.json")
"""The metadata below the root of the broker's local store."""

_TABLES = {
    "COMMIT_LOG": "commitLogFileSegmentTable",
    "CONSUME_QUEUE": "consumeQueueFileSegmentTable",
    "INDEX": "indexFileSegmentTable",
}
_BACKUP = ".bak"
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TieredMetadata:
    """The metadata of a broker's tiered storage.

    `sizes` has by kind ("COMMIT_LOG", "CONSUME_QUEUE", "INDEX") and place ("broker/topic/queue id") the size of each flat file in
    bytes by base offset; `topic_ids` the topics by the numbers in index files.
    """

    path: str
    sizes: dict[tuple[str, str], dict[int, int]] = field(default_factory=dict)
    topic_ids: dict[int, str] = field(default_factory=dict)

    @property
    def is_backup(self) -> bool:
        """bool: the file itself is missing or could not be read."""
        return self.path.endswith(_BACKUP)

    @property
    def brokers(self) -> set[str]:
        """set of str: the brokers whose files are listed."""
        return {path.partition("/")[0] for _, path in self.sizes}

    @classmethod
    def load(cls, store_path: str | os.PathLike[str]) -> TieredMetadata | None:
        """Return the metadata of the local store at `store_path`, None for none; CorruptionError if nothing can be read."""
        path = os.path.join(store_path, METADATA_FILE)
        failure: CorruptionError | None = None
        for each in (path, path + _BACKUP):
            try:
                data = read_small_file(each)
                if data is not None:
                    return cls._parse(data, each)
            except CorruptionError as error:
                failure = failure or error
            except OSError as error:
                if not is_unreadable(error):
                    raise
                failure = failure or CorruptionError(f"cannot be read: {error.strerror}", each, 0)
        if failure is not None:
            raise failure
        return None

    @classmethod
    def _parse(cls, data: bytes, path: str) -> TieredMetadata:
        try:
            document = parse_fastjson(data.decode("utf-8"), path)
        except UnicodeDecodeError as error:
            raise CorruptionError("damaged JSON: no UTF-8", path, error.start) from None
        document = _table(document, "the file", path)
        metadata = cls(path)
        for kind, name in _TABLES.items():
            for place, files in _table(document.get(name) or {}, name, path).items():
                listed = metadata.sizes.setdefault((kind, str(place)), {})
                for base, values in _table(files, f"{name} of {place}", path).items():
                    values = _table(values, f"{name} of {place}, {base}", path)
                    offset = _number(values.get("baseOffset", _as_int(base)), f"baseOffset of {place}", path)
                    listed[offset] = _number(values.get("size", 0), f"size of {place}, {base}", path)
        for name, values in _table(document.get("topicMetadataTable") or {}, "topicMetadataTable", path).items():
            values = _table(values, f"topicMetadataTable of {name}", path)
            metadata.topic_ids[_number(values.get("topicId"), f"topicId of {name}", path)] = str(name)
        return metadata


def _table(value: Any, what: str, path: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise CorruptionError(f"damaged metadata: {what} is not an object", path, 0)
    return value


def _as_int(value: Any) -> Any:
    # `int` refuses thousands of digits.
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20 else value


def _number(value: Any, what: str, path: str) -> int:
    if type(value) is not int or not 0 <= value <= _INT64_MAX:
        raise CorruptionError(f"damaged metadata: {what} is {value!r}, no number that it can be", path, 0)
    return value


_PREFIX, _DIGITS = 8, 20


def name_prefix(text: str) -> str:
    """Return the first 8 hex digits of the MD5 of `text`, with which names of files and clusters begin."""
    return hashlib.md5(text.encode("utf-8", "surrogateescape"), usedforsecurity=False).hexdigest()[:_PREFIX]


def flat_file_name(base_offset: int) -> str:
    """Return the name of the flat file that begins at `base_offset`."""
    return f"{name_prefix(str(base_offset))}{base_offset:0{_DIGITS}d}"


@dataclass(frozen=True, slots=True)
class Hole:
    """Offsets from `begin` up to but not including `end` that no file has; `finding` names the file that lacks them."""

    begin: int
    end: int
    finding: Finding


class FlatFiles(NotCopied):
    """Files of one directory as one stream of bytes, from `min_offset` to `max_offset`, known missing files included.

    `sizes` are those of the metadata.  With `goes_on`, a file that was deleted since it was listed is a hole and not an error.
    `problems` are findings of everything that is not as a broker leaves it, holes included.
    """

    read_only = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        pool: MappedFilePool,
        sizes: Mapping[int, int] | None = None,
        *,
        goes_on: bool = False,
    ):
        self.path, self.goes_on = os.fspath(path), goes_on
        self._pool = pool
        # Replaced as a whole, so that a reader on another thread sees one listing or the other.
        self._layout: tuple[list[int], list[int], dict[int, MappedFile]] = ([], [], {})
        self.holes: list[Hole] = []
        self.problems: list[Finding] = []
        self.unreadable: Finding | None = None
        # Lengths of files that this user may not read, by base offset.
        self._refused: dict[int, int] = {}
        # Lengths of files that were deleted since they were listed, by base offset.
        self._lost: dict[int, int] = {}
        self._lock = threading.Lock()
        self.min_offset = self.max_offset = 0
        self.load(sizes)

    @property
    def bases(self) -> list[int]:
        """list of int: base offset of each file that is read, ascending."""
        return self._layout[0]

    def load(self, sizes: Mapping[int, int] | None = None) -> None:
        """List the directory; files that did not change stay mapped."""
        self._sizes = sizes or {}
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
                continue  # The broker deleted it.
        with self._lock:
            self._refused, self._lost = refused, {}
            self._arrange(lengths)

    def lose(self, offset: int) -> None:
        """Note that the file with `offset` was deleted since it was listed: it becomes a hole."""
        with self._lock:
            mapped_file = self.find(offset)
            if mapped_file is None:
                return
            self._lost[mapped_file.file_from_offset] = mapped_file.size
            self.problems = [each for each in self.problems if all(each is not hole.finding for hole in self.holes)]
            files = self._layout[2].values()
            self._arrange({each.file_from_offset: each.size for each in files if each is not mapped_file})

    def _arrange(self, lengths: dict[int, int]) -> None:
        # A file is created before its first append; without bytes it is ignored.
        bases = sorted(base for base, length in lengths.items() if length)
        ends = [
            min(base + lengths[base], bases[i + 1] if i + 1 < len(bases) else _INT64_MAX)
            for i, base in enumerate(bases)
        ]
        for base, end in zip(bases, ends):
            if end < base + lengths[base]:
                detail = f"{lengths[base]} bytes, but the next file begins {end - base} bytes after this one does"
                self.problems.append(Finding(self._path(base), end - base, "overlap", detail))
        sizes = {**self._sizes, **self._refused, **self._lost}
        known = {base: base + size for base, size in sizes.items() if size and base + size <= _INT64_MAX}
        self.min_offset = min([*bases[:1], *known], default=0)
        self.max_offset = max([*ends[-1:], *known.values()], default=0)
        self.holes = []
        at = self.min_offset
        for base, end in [*zip(bases, ends), (self.max_offset, self.max_offset)]:
            while at < base:
                # Each missing file in the metadata is a hole of its own.
                until = min([each for each in known if at < each < base], default=base)
                self.holes.append(Hole(at, until, self._lacking(at, until, bases, ends)))
                at = until
            at = max(at, end)
        self.problems += [hole.finding for hole in self.holes]
        files: dict[int, MappedFile] = {}
        before = self._layout[2]
        for base, end in zip(bases, ends):
            same, size = before.get(base), end - base
            if same is None or same.size != size:
                same = MappedFile(self._path(base), size, file_from_offset=base, pool=self._pool, read_only=True, padded=True)
            files[base] = same
        self._layout = bases, ends, files
        for base, mapped_file in before.items():
            if files.get(base) is not mapped_file:
                # Readers keep its mapping.
                self._pool.forget(mapped_file)

    def _path(self, base: int) -> str:
        return os.path.join(self.path, flat_file_name(base))

    def _lacking(self, begin: int, end: int, bases: list[int], ends: list[int]) -> Finding:
        # The finding about the file that should contain `begin`.
        if begin in self._refused:
            return Finding(self._path(begin), 0, "file", f"may not be read; it holds offsets {begin} to {end}")
        if begin in self._lost:
            # Retention begins with the oldest.
            kind = "missing_file" if any(base < begin for base in bases) else EXPIRED
            detail = f"was deleted since it was listed; it held offsets {begin} to {end}"
            return Finding(self._path(begin), 0, kind, detail)
        if self.unreadable is not None:
            return self.unreadable
        place = bisect_right(bases, begin) - 1
        if begin in self._sizes or place < 0 or ends[place] != begin:
            return Finding(self._path(begin), 0, "missing_file", f"is missing; it held offsets {begin} to {end}")
        base = bases[place]
        known = self._sizes.get(base)
        if known is not None and base + known > begin:
            detail = f"was cut short: it ends here, the metadata say after {known} bytes"
        else:
            detail = f"ends here and the next begins at offset {end}: it was cut short, or {flat_file_name(begin)} is missing"
        return Finding(self._path(base), begin - base, "missing_file", detail)

    def find(self, offset: int) -> MappedFile | None:
        """Return the file that contains `offset`; None for none."""
        bases, ends, files = self._layout
        place = bisect_right(bases, offset) - 1
        return files[bases[place]] if place >= 0 and offset < ends[place] else None

    def hole_at(self, offset: int) -> Hole | None:
        """Return the hole that contains `offset`; None for none."""
        return next((hole for hole in self.holes if hole.begin <= offset < hole.end), None)

    def region_of(self, offset: int) -> tuple[_core.Region, int] | None:
        """Return the mapped file with `offset`, and its base offset; OffsetOutOfRangeError if it was deleted, see `goes_on`."""
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
        """Return the same as `region_of` with `goes_on`."""
        try:
            return self.region_of(offset)
        except OffsetOutOfRangeError:
            self.lose(offset)
            return None

    def place_of(self, offset: int) -> tuple[str, int]:
        """Return path and position in bytes of `offset`, for an error."""
        mapped_file = self.find(offset)
        if mapped_file is not None:
            return mapped_file.path, offset - mapped_file.file_from_offset
        hole = self.hole_at(offset)
        return (hole.finding.path, hole.finding.pos) if hole is not None else (self.path, 0)

    def __len__(self) -> int:
        return len(self.bases)

    def close(self) -> None:
        """Close the files."""
        for mapped_file in self._layout[2].values():
            mapped_file.close()


def _base_of(name: str) -> int | None:
    digits = name[_PREFIX:]
    if len(digits) != _DIGITS or not (digits.isascii() and digits.isdigit()):
        return None
    base = int(digits)
    return base if base <= _INT64_MAX and name == flat_file_name(base) else None


class FlatLog(FlatFiles):
    """The records of one queue; parameters as for `FlatFiles`."""

    crc_check = 1

    def look_up(self, phy_offset: int, size: int | None = None) -> MessageExt | None:
        """Return the message at an offset of this log; None where no record of this size begins."""
        found = self.region_of(phy_offset)
        if found is None:
            return None
        region, base = found
        message = _read.read_message(region, phy_offset - base, base, self.crc_check)
        return None if isinstance(message, Verdict) or size not in (None, message.size) else message

    def verdict_at(self, phy_offset: int) -> tuple[Verdict, int] | None:
        """Return what begins at an offset of this log and its size, CRCs not compared; None where no file has it."""
        found = self.region_of(phy_offset)
        return None if found is None else _core.check_record(found[0], phy_offset - found[1], found[1], 0)[:2]

    def located(self, phy_offsets: np.ndarray) -> Iterator[Located]:
        """Yield offsets of this log in parts that are in few files each, see `rmqstore.sources.LogSource`."""
        if not len(phy_offsets):
            return
        # One list for all offsets: a file that is deleted while this runs leaves the log's.
        bases = np.array(self.bases, np.int64)
        lowest, highest = np.searchsorted(bases, [phy_offsets.min(), phy_offsets.max()], "right").tolist()
        if lowest == highest:
            yield from in_one_file(len(phy_offsets), self.region_if_there(int(bases[lowest - 1])) if lowest else None)
            return
        files = np.searchsorted(bases, phy_offsets, "right") - 1
        yield from located(files, lambda number: self.region_if_there(int(bases[number])))

    def release_pages(self, begin: int, end: int) -> None:
        """Release the pages of the bytes from `begin` up to but not including `end`, so that a long scan keeps little memory."""
        at = max(begin, self.min_offset)
        while at < min(end, self.max_offset):
            mapped_file = self.find(at)
            if mapped_file is None:
                return
            pos = at - mapped_file.file_from_offset
            size = min(end - at, mapped_file.size - pos)
            if mapped_file.mapped:
                mapped_file.region.release_pages(pos, size)
            at += size
