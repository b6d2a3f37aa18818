"""The extension of a simple queue (``consumequeue_ext``): units of any length, found by the address in a unit of the queue."""

from __future__ import annotations

from rmqstore import _core, _dispatch
from rmqstore import _numpy as np
from rmqstore._core import EXT_ADDRESS_BASE
from rmqstore.config import StoreConfig, is_usual_size
from rmqstore.consumequeue.queue_folders import queue_directory
from rmqstore.consumequeue.unit_queue import REPAIR
from rmqstore.files.mapped_file import MappedFilePool, NotCopied
from rmqstore.files.mapped_file_queue import Handling, MappedFileQueue

# The least length of the blank that ends a file (RocketMQ ConsumeQueueExt.END_BLANK_DATA_LENGTH).
_END_SIZE = 4


class ConsumeQueueExt(NotCopied):
    """The extension of a simple queue: tags code, store time and filter bitmap, addressed from the unit's tags code."""

    def __init__(
        self, root: str, topic: str, queue_id: int, config: StoreConfig, pool: MappedFilePool, *, read_only: bool
    ):
        self.files = MappedFileQueue(
            queue_directory(root, "consumequeue_ext", topic, queue_id),
            config.mapped_file_size_consume_queue_ext,
            pool,
            read_only=read_only,
            handling=Handling(
                root,
                lambda: is_usual_size(root, "consumequeue_ext", config.mapped_file_size_consume_queue_ext),
                repair=REPAIR,
            ),
        )

    def load(self) -> None:
        """Find the files and the end of the last one by stepping over its units."""
        self.files.load()
        if not self.files.offsets:
            return
        base = self.files.offsets[-1]
        region = self.files.file(base).region
        pos = 0
        while (unit := _core.read_ext_unit(region, pos)) is not None:
            pos += _core.ExtUnitLayout.EXT_UNIT_MIN_SIZE + len(unit[2])
        self.files.wrote_where = base + pos

    def get(self, address: int) -> tuple[int, int, bytes] | None:
        """Return (tags code, store timestamp, bitmap) at an address from a tags code, None for no whole unit."""
        offset = address - EXT_ADDRESS_BASE
        mapped_file = self.files.find(offset)
        if mapped_file is None:
            return None
        pos = offset - mapped_file.file_from_offset
        unit = _core.read_ext_unit(mapped_file.region, pos)
        if unit is None:
            return None
        for problem in self.files.damaged():
            # If a file was cut short, the rest of a unit reads as zeros.
            end = pos + int(_core.ExtUnitLayout.EXT_UNIT_MIN_SIZE) + len(unit[2])
            if problem.path == mapped_file.path and problem.pos is not None and problem.pos < end:
                return None
        return unit

    def agreeing(
        self, addresses: np.ndarray, tags_codes: np.ndarray | None = None, store_timestamps: np.ndarray | None = None
    ) -> int:
        """Return the number of leading addresses of whole units, with these tags codes and times if they are given."""
        done = 0
        while done < len(addresses):
            offset = int(addresses[done]) - EXT_ADDRESS_BASE
            mapped_file = self.files.find(offset)
            if mapped_file is None:
                break
            count = _dispatch.agreeing_ext_units(
                mapped_file.region,
                mapped_file.file_from_offset,
                addresses[done:],
                None if tags_codes is None else tags_codes[done:],
                None if store_timestamps is None else store_timestamps[done:],
            )
            if not count:
                break
            done += count
        return done

    def repair(self, address: int, tags_code: int, store_timestamp: int) -> bool:
        """Overwrite the whole unit at `address` if it differs, except for its bitmap; True if it was written."""
        unit, mapped_file = self.get(address), self.files.find(address - EXT_ADDRESS_BASE)
        if unit is None or mapped_file is None or unit[:2] == (tags_code, store_timestamp):
            return False
        pos = address - EXT_ADDRESS_BASE - mapped_file.file_from_offset
        mapped_file.mark_dirty(pos + int(_core.ExtUnitLayout.EXT_UNIT_MIN_SIZE))
        _core.write_ext_unit(mapped_file.region, pos, tags_code, store_timestamp, unit[2])
        return True

    def make_room(self, count: int) -> None:
        """Allocate space for `count` units without bitmap, see `MappedFileQueue.make_room`."""
        size = int(_core.ExtUnitLayout.EXT_UNIT_MIN_SIZE)
        # The longest end of a file without a unit.
        unused = size + _END_SIZE - 1
        ends = count // ((self.files.mapped_file_size - _END_SIZE) // size) + 1
        self.files.make_room(count * size + ends * unused)

    def put(self, tags_code: int, store_timestamp: int) -> int:
        """Append a unit without bitmap and return its address."""
        size = int(_core.ExtUnitLayout.EXT_UNIT_MIN_SIZE)
        while True:
            mapped_file = self.files.file_for_append()
            pos = self.files.wrote_where - mapped_file.file_from_offset
            mapped_file.mark_dirty(pos + size)
            if pos + size + _END_SIZE <= mapped_file.size:
                _core.write_ext_unit(mapped_file.region, pos, tags_code, store_timestamp)
                self.files.wrote_where += size
                return mapped_file.file_from_offset + pos + EXT_ADDRESS_BASE
            mapped_file.region.write(pos, b"\xff\xff")
            self.files.wrote_where = mapped_file.file_from_offset + mapped_file.size

    def truncate(self, address: int) -> None:
        """Cut the extension after the unit at `address`."""
        unit = self.get(address)
        if unit is not None:
            self.files.truncate(address - EXT_ADDRESS_BASE + _core.ExtUnitLayout.EXT_UNIT_MIN_SIZE + len(unit[2]))
