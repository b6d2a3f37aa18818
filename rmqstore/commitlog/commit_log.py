"""The commit log: the consecutive records of all messages of a store, in segments of fixed size.

Owns appending (a record that does not fit closes the segment with a blank record) and reading a record at its offset; its bases
scan the log (`log_walk`) and find its end (`log_end`).  It never decides the consequences of damage (recovery and verify do) and
never builds a queue or an index.  Bytes count as a record only if magic, lengths and its own physical offset agree.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from rmqstore import _core
from rmqstore import _numpy as np
from rmqstore._core import Verdict
from rmqstore._rows import RowBatch
from rmqstore._shown import shows
from rmqstore.commitlog.log_end import LogEnd
from rmqstore.config import AssumedSizes, StoreConfig, is_usual_size
from rmqstore.config.places import refuse_other_log
from rmqstore.errors import (
    ChecksumError,
    CorruptionError,
    InvalidMessageError,
    OffsetOutOfRangeError,
    Sentence,
    StoreError,
    StoreNotFoundError,
)
from rmqstore.files.mapped_file import MappedFile, MappedFilePool, NotCopied
from rmqstore.files.mapped_file_queue import Handling, MappedFileQueue
from rmqstore.files.open_file import is_directory
from rmqstore.message import MessageExt, _read
from rmqstore.sources import Located, in_one_file, located

__all__ = ["CommitLog", "check_store_root"]

logger = logging.getLogger(__name__)

_BLANK_SIZE = int(_core.RecordLayout.BLANK_SIZE)


@shows(
    "config", "entries", "last_store_timestamp", "look_up", "max_offset", "message_at", "min_offset", "pages",
    "path", "segment", "segment_size", "store_timestamp_at", "stretches", "times_of",
)  # fmt: skip
class CommitLog(NotCopied, LogEnd):
    """The commit log in the folder ``commitlog`` of a store's root.

    Parameters
    ----------
    root : path
    config : StoreConfig
        `mapped_file_size_commit_log` is the size of a segment in bytes.
    pool : MappedFilePool
    read_only : bool
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        config: StoreConfig,
        pool: MappedFilePool,
        *,
        read_only: bool = False,
    ):
        refuse_other_log(root, config.unknown)
        files = MappedFileQueue(
            os.path.join(root, "commitlog"),
            config.mapped_file_size_commit_log,
            pool,
            read_only=read_only,
            handling=Handling(root, lambda: is_usual_size(root, "commitlog", self.segment_size)),
        )
        super().__init__(files, config)

    def take_config(self, config: StoreConfig) -> None:
        """Use the size of a segment that was inferred from the first one, in place of an assumed size."""
        self.config = config
        self.files.mapped_file_size = config.mapped_file_size_commit_log

    def load(self) -> None:
        """List the segments; `find_end` and `set_end` follow."""
        self.files.load()
        path = self.files.path
        if not self.files.file_offsets and os.path.islink(path) and not os.path.exists(path):
            raise StoreError("the log's folder is a broken symlink; restore the folder that it points to (mount its disk)", path)

    def set_end(self, offset: int) -> None:
        """Set the end of the log."""
        self.files.wrote_where = offset

    def refresh(self) -> None:
        """Pick up records that another process appended (read-only use)."""
        if not self.files.file_offsets and "mapped_file_size_commit_log" in self.config.assumed:
            self.take_config(AssumedSizes(os.path.dirname(self.path)).learn(self.config))
        super().refresh()

    # ------------------------------------------------------------------------------------------------------ writing

    def append_rows(self, batch: RowBatch, *, together: bool = False) -> int:
        """Encode numbered rows at the end; with `together` all in one segment, like RocketMQ's classic batch."""
        last = self.files.last()
        room = last.file_from_offset + self.segment_size - self.files.wrote_where if last is not None else 0
        rolls, largest, left = batch.room(room, self.segment_size, together)
        if largest + _BLANK_SIZE > self.segment_size:
            raise InvalidMessageError(
                f"{'the batch' if together else 'the record'} takes {largest} bytes, a segment of {self.segment_size} "
                f"bytes holds at most {self.segment_size - _BLANK_SIZE}: shorten it, or use a store with larger segments",
                self.path,
            )
        # Segments are created before the first byte is written, so that a full disk leaves no partial write.
        end = self.space(self.segment_size - left + _BLANK_SIZE)
        if last is not None and room:
            last.reserve(self.segment_size if rolls else end)
        if rolls:
            self.files.prepared.prepare((rolls - 1) * self.segment_size + end)
        done = 0
        while done < batch.count:
            mapped_file = self.files.file_for_append()
            base = mapped_file.file_from_offset
            pos = self.files.wrote_where - base
            mapped_file.mark_dirty(pos)
            if not together or largest + _BLANK_SIZE <= self.segment_size - pos:
                done, pos = batch.encode(mapped_file.region, pos, base, done)
                self.files.wrote_where = base + pos
            if done < batch.count:
                if self.segment_size - pos >= _BLANK_SIZE:
                    _core.write_blank(mapped_file.region, pos)
                self.files.wrote_where = base + self.segment_size
        return self.files.wrote_where

    def space(self, end: int) -> int:
        """Return the bytes of a segment that get space on disk for a write up to position `end`."""
        growth = self.config.commit_log_growth_size
        return min(-(-end // growth) * growth, self.segment_size) if growth else self.segment_size

    # ------------------------------------------------------------------------------------------------------ reading

    def segment(self, phy_offset: int) -> MappedFile:
        """Return the segment that holds `phy_offset`; OffsetOutOfRangeError outside the log or in a missing segment."""
        if phy_offset >= self.max_offset and self.files.read_only:
            self.refresh()
        if phy_offset < 0 or phy_offset >= self.max_offset or phy_offset < self.min_offset:
            raise OffsetOutOfRangeError(
                f"phy offset {phy_offset} is outside the log, which holds {self.min_offset} to {self.max_offset}",
                self.path,
            )
        mapped_file = self.files.find(phy_offset)
        if mapped_file is None:
            raise OffsetOutOfRangeError(f"the segment that held phy offset {phy_offset} is missing", self.path)
        return mapped_file

    def message_at(self, phy_offset: int) -> MessageExt:
        """Return the message whose record begins at `phy_offset`.

        Raises OffsetOutOfRangeError outside the log, CorruptionError if no record begins there, and ChecksumError for a wrong CRC;
        `look_up` returns such a message.
        """
        known = self.look_up(phy_offset)
        if known is not None and known.crc_agrees:
            return known
        # The rest finds the error.
        mapped_file = self.segment(phy_offset)
        region = mapped_file.region
        pos = phy_offset - mapped_file.file_from_offset
        message = _read.read_message(region, pos, mapped_file.file_from_offset, self.crc_check)
        if isinstance(message, Verdict):
            raise CorruptionError(
                Sentence(
                    f"no record begins at phy offset {phy_offset} (", message, "); take offsets from a queue, the index or a scan"
                ),
                mapped_file.path,
                pos,
            )
        if not message.crc_agrees:
            text = f"the record at phy offset {phy_offset} does not agree with its CRC; get_message and scans mark it as corrupt"
            raise ChecksumError(text, mapped_file.path, pos)
        return message

    def look_up(self, phy_offset: int, size: int | None = None) -> MessageExt | None:
        """Return the message at `phy_offset`, marked as corrupt if its CRC is wrong; None for no record of this size."""
        known = _read.read_recent(self.files, phy_offset, self.crc_check)
        if known is not None:
            return known if size in (None, known.size) else None
        found = self.region_of(phy_offset)
        if found is None:
            return None
        region, base, _, _ = found
        message = _read.read_message(region, phy_offset - base, base, self.crc_check)
        if isinstance(message, Verdict) or size not in (None, message.size):
            return None
        return message

    def region_of(self, phy_offset: int) -> tuple[_core.Region, int, int, int] | None:
        """Return the mapped segment that holds `phy_offset`, the offset of its first byte, and the bounds of the log; or None."""
        files = self.files
        known = files.recent(phy_offset)
        if known is not None:
            return known
        offsets = files.file_offsets
        low, end = files.min_offset, files.wrote_where
        try:
            # Another process may have appended it: `segment` refreshes.
            mapped_file = files.find(phy_offset) if low <= phy_offset < end else self.segment(phy_offset)
            if mapped_file is None:
                return None
            region = mapped_file.region
            files.remember(region, mapped_file.file_from_offset, offsets)
            return region, mapped_file.file_from_offset, files.min_offset, files.wrote_where
        except OffsetOutOfRangeError:
            return None

    def store_timestamp_at(self, phy_offset: int, *, behind_end: bool = False) -> int:
        """Return the store time of the record at `phy_offset` in ms since epoch, -1 for no record.

        - `behind_end`: accept an offset after the end, which recovery does not know yet.
        """
        if not behind_end and not self.min_offset <= phy_offset < self.max_offset:
            return -1
        mapped_file = self.files.find(phy_offset)
        if mapped_file is None:
            return -1
        try:
            region = mapped_file.region
        except OffsetOutOfRangeError:
            return -1  # It expired.
        base = mapped_file.file_from_offset
        verdict, _, timestamp = _core.check_record(region, phy_offset - base, base, 0)
        return timestamp if verdict == Verdict.RECORD else -1

    def times_of(self, begin: int, end: int) -> tuple[int | None, int | None]:
        """Return the store times of the first whole records after `begin` and after `end`, ms since epoch.

        At the end of the log it is the time of the newest record, None for none.
        """

        def time_from(offset: int) -> int | None:
            known = self.store_timestamp_at(offset) if offset < self.max_offset else -1
            if known >= 0:
                return known
            found = (each.store_timestamp for each in self.entries(offset) if isinstance(each, MessageExt))
            return next(found, None) or self.last_store_timestamp()

        return time_from(begin), time_from(end)

    @contextlib.contextmanager
    def single_records(self) -> Iterator[None]:
        """Say that records far from each other are looked at in the ``with`` block: the system then reads nothing around them."""
        self.files.advise("random")
        try:
            yield
        finally:
            self.files.advise("normal")

    def located(self, phy_offsets: np.ndarray) -> Iterator[Located]:
        """Yield phy offsets in parts of few segments each, see `rmqstore.sources.LogSource`; log missing segments."""
        if not len(phy_offsets):
            return
        lowest, highest = int(phy_offsets.min()), int(phy_offsets.max())
        if self.files.read_only and highest >= self.max_offset:
            self.refresh()
        low, high, size = self.min_offset, self.max_offset, self.segment_size
        if low <= lowest and highest < high and lowest // size == highest // size:
            yield from in_one_file(len(phy_offsets), self._segment_at(lowest // size * size))
            return
        # Files are counted from the oldest segment.
        first = low // size
        inside = (phy_offsets >= low) & (phy_offsets < high)
        files = np.where(inside, phy_offsets // size - first, -1)
        yield from located(files, lambda number: self._segment_at((first + number) * size))

    def _segment_at(self, offset: int) -> tuple[_core.Region, int] | None:
        # The segment that begins there, for `located`.
        mapped_file = self.files.find(offset)
        try:
            if mapped_file is not None:
                return mapped_file.region, mapped_file.file_from_offset
        except OffsetOutOfRangeError:
            pass  # It expired in the meantime.
        self.warn_of_missing(offset, offset + self.segment_size)
        return None

    def flush(self) -> None:
        """Force everything written to the disk."""
        self.files.flush()

    def close(self) -> None:
        """Close the segments."""
        self.files.close()


def check_store_root(path: str | os.PathLike[str]) -> str:
    """Return `path` as str; StoreError if it is not a directory."""
    root = os.fspath(path)
    if not is_directory(root):
        kind = "is not a directory" if os.path.exists(root) else "does not exist"
        raise StoreNotFoundError(f"the store's directory {kind}; give the folder that holds commitlog/", root)
    return root
