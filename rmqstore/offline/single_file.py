"""Read one file of a store alone: a segment, a queue file, an index file or a checkpoint, recognised by its path or contents.

The file may be from a backup or a crash report.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rmqstore import _core
from rmqstore import _numpy as np
from rmqstore._core import (
    EXT_ADDRESS_BASE,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    PRE_FILL_SIZE,
    BatchUnitLayout,
    ExtUnitLayout,
    RecordLayout,
    UnitLayout,
    Verdict,
)
from rmqstore.commitlog.log_walk import Blank, Damage
from rmqstore.config import StoreConfig
from rmqstore.errors import StoreError
from rmqstore.files.mapped_file import MappedFile, offset_of_name
from rmqstore.index.index_file import IndexFile
from rmqstore.message import MessageExt, _read

__all__ = ["KINDS", "StoreFile", "identify"]

#: The kinds of files, and their names.
KINDS = {
    "segment": "a segment of the commit log",
    "queue": "a file of a consume queue",
    "batch_queue": "a file of a batch consume queue",
    "queue_extension": "a file of a consume queue's extension",
    "index": "an index file",
    "checkpoint": "the checkpoint",
}
_MAGICS = (MAGIC_V1, MAGIC_V2, MAGIC_BLANK)
_QUEUE_FOLDERS = {
    "consumequeue": "queue", "batchconsumequeue": "batch_queue", "compactionCq": "batch_queue",
    "consumequeue_ext": "queue_extension",
}  # fmt: skip
_PIECE = 1 << 16
_UNIT = np.dtype([("phy_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
_BATCH_UNIT = np.dtype(
    [
        ("phy_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8"), ("store_timestamp", ">i8"),
        ("base_offset", ">i8"), ("num", ">i2"), ("compacted_offset", ">i4"), ("reserved", ">i4"),
    ]
)  # fmt: skip
assert _UNIT.itemsize == int(UnitLayout.UNIT_SIZE) and _BATCH_UNIT.itemsize == int(BatchUnitLayout.BATCH_UNIT_SIZE)


@dataclass(frozen=True, slots=True)
class StoreFile:
    """A recognised file, one of `KINDS`; `size` in bytes.

    `base` is the offset of its first byte in the log or extension, or the number of its first unit in the queue; None if it is
    unknown.  `topic` and `queue_id` are those of the path of a queue's file.
    """

    path: str
    kind: str
    size: int
    base: int | None = None
    topic: str | None = None
    queue_id: int | None = None

    def records(self) -> Iterator[MessageExt | Blank | Damage]:
        """Yield the contents of a segment, in order, without the zeros at its end that were never written."""
        if not self.size:
            return
        base = self.base or 0
        file = MappedFile(self.path, self.size, file_from_offset=base, read_only=True)
        try:
            region, at = file.region, 0
            written = file.last_nonzero()
            search: _core.RecordSearch | None = None
            while at < written:
                found = _read.read_message(region, at, base)
                if isinstance(found, MessageExt):
                    yield found
                    at += found.size
                elif found is Verdict.BLANK:
                    yield Blank(base + at, self.size - at)
                    return
                else:
                    if search is None:
                        search = _core.RecordSearch(region, base)
                    following = search.find(at + 1)
                    until = following if following >= 0 else written
                    yield Damage(base + at, until - at, found)
                    at = until
        finally:
            file.close()

    def units(self) -> Iterator[dict[str, Any]]:
        """Yield the units of a file of a queue, a batch queue or an extension, in order, up to the last written one."""
        if self.kind == "queue_extension":
            yield from self._extension_units()
            return
        dtype = _UNIT if self.kind == "queue" else _BATCH_UNIT
        number = 0
        with open(self.path, "rb") as file:
            while len(units := np.fromfile(file, dtype, _PIECE)):
                used = np.flatnonzero(units.view("u1").reshape(len(units), -1).any(axis=1))
                for at in used.tolist():
                    unit = {name: int(units[at][name]) for name in dtype.names or ()}
                    if unit["phy_offset"] == 0 and unit["size"] == PRE_FILL_SIZE:
                        # It fills the queue up to where its first message belongs.
                        continue
                    pos = (number + at) * dtype.itemsize
                    if self.kind == "queue":
                        place = {} if self.base is None else {"queue_offset": self.base + number + at}
                    else:
                        place = {"queue_offset": unit.pop("base_offset")}
                        unit.pop("reserved")
                    yield {"pos": pos, **place, **unit}
                number += len(units)

    def _extension_units(self) -> Iterator[dict[str, Any]]:
        if not self.size:
            return
        file = MappedFile(self.path, self.size, read_only=True)
        try:
            pos = 0
            while (unit := _core.read_ext_unit(file.region, pos)) is not None:
                tags_code, store_timestamp, bitmap = unit
                address = {} if self.base is None else {"address": EXT_ADDRESS_BASE + self.base + pos}
                yield {
                    "pos": pos, **address, "tags_code": tags_code, "store_timestamp": store_timestamp,
                    "bitmap": bitmap.hex(),
                }  # fmt: skip
                pos += int(ExtUnitLayout.EXT_UNIT_MIN_SIZE) + len(bitmap)
        finally:
            file.close()

    def index_file(self, overrides: Mapping[str, Any]) -> IndexFile:
        """Open the index file read-only, with the geometry of its contents and `overrides`.

        Raises
        ------
        GeometryError
            The geometry does not fit its length.
        """
        config = StoreConfig.infer(self.path, read_only=True, **overrides)
        return IndexFile.open(self.path, config, read_only=True)


def identify(path: str | os.PathLike[str]) -> StoreFile:
    """Recognise the file at `path` by its folders and name, otherwise by its first bytes; StoreError for an unknown file."""
    path = os.fspath(path)
    size = os.stat(path).st_size
    parts = os.path.abspath(path).split(os.sep)
    name = parts[-1]
    base = offset_of_name(name)
    with open(path, "rb") as file:
        head = file.read(64)
    if base is not None and len(parts) >= 4 and parts[-4] in _QUEUE_FOLDERS and parts[-2].isdigit():
        kind = _QUEUE_FOLDERS[parts[-4]]
        first = base // int(UnitLayout.UNIT_SIZE) if kind == "queue" else None if kind == "batch_queue" else base
        return StoreFile(path, kind, size, first, parts[-3], int(parts[-2]))
    if base is not None and len(parts) >= 2 and parts[-2] == "commitlog":
        return StoreFile(path, "segment", size, base)
    if name.isdigit() and len(parts) >= 2 and parts[-2] == "index":
        return StoreFile(path, "index", size)
    if name == "checkpoint":
        return StoreFile(path, "checkpoint", size)
    if len(head) >= 8 and struct.unpack_from(">i", head, 4)[0] in _MAGICS:
        at = int(RecordLayout.RECORD_PHY_OFFSET)
        if base is None and len(head) >= at + 8 and struct.unpack_from(">i", head, 4)[0] != MAGIC_BLANK:
            (base,) = struct.unpack_from(">q", head, at)
        return StoreFile(path, "segment", size, None if base is None or base < 0 else base)
    with contextlib.suppress(StoreError, ValueError):
        IndexFile.open(path, read_only=True).close()
        return StoreFile(path, "index", size)
    raise StoreError(
        "it is not a file of a store that is known, by its name or by what it holds; known files are segments, files of "
        "queues, index files and checkpoints",
        path,
    )
