"""The flat log of one queue in tiered storage: its COMMIT_LOG files as a log of records.

Owns finding records in these files, as `CommitLog` does in segments.

Facts (RocketMQ 5.5.0): the records of the queue are back to back, with the offset in this log at bytes 28 to 35 instead of the
one that they had.
"""

from __future__ import annotations

from collections.abc import Iterator

from rmqstore import _core
from rmqstore import _numpy as np
from rmqstore._core import Verdict
from rmqstore.flatfile.flat_files import FlatFiles
from rmqstore.message import MessageExt, _read
from rmqstore.sources import Located, in_one_file, located

__all__ = ["FlatLog"]


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
        # One list for all of it: a file that goes in the meantime leaves the log's.
        bases = np.array(self.bases, np.int64)
        lowest, highest = np.searchsorted(bases, [phy_offsets.min(), phy_offsets.max()], "right").tolist()
        if lowest == highest:
            yield from in_one_file(len(phy_offsets), self.region_if_there(int(bases[lowest - 1])) if lowest else None)
            return
        files = np.searchsorted(bases, phy_offsets, "right") - 1
        yield from located(files, lambda number: self.region_if_there(int(bases[number])))

    def release_pages(self, begin: int, end: int) -> None:
        """Let go of the pages of the bytes from `begin` to before `end`: a long pass keeps little memory."""
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
