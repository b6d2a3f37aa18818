"""One index file: the hash table of a store that finds records by key.

Owns creating, opening and describing an index file.  Its base class `_core.IndexRegion` reads and writes the bytes.  All state is
in the file: each use reads the counters from the header (I5).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from rmqstore import _core
from rmqstore import _numpy as np
from rmqstore._core import IndexRegion
from rmqstore._shown import shows
from rmqstore.config import StoreConfig
from rmqstore.config.infer import INDEX_HEADER
from rmqstore.errors import GeometryError, ReadOnlyError
from rmqstore.files.mapped_file import MappedFile, MappedFilePool, NotCopied
from rmqstore.files.os_errors import naming_errors
from rmqstore.files.prepared_files import PreparedFiles

__all__ = ["IndexFile", "IndexHeader"]

_PAGE = 4096


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """The header of an index file; timestamps are ms since epoch, offsets bytes in the commit log.

    `index_count` is the number of the next entry, 1 for an empty file; `hash_slot_count` the number of used slots
    (RocketMQ up to 4.7.0 counted every put).
    """

    begin_timestamp: int
    end_timestamp: int
    begin_phy_offset: int
    end_phy_offset: int
    hash_slot_count: int
    index_count: int


@shows(
    "close", "create", "damaged", "flush", "header", "index_count", "index_num", "is_full", "matches_time",
    "name", "open", "path", "populate", "put_hash", "put_hashes", "put_key", "put_keys", "read_entries",
    "read_entry", "read_header", "read_slot", "select_chain", "select_hash", "select_hashes",
    "select_phy_offset", "select_phy_offsets", "slot_num",
)  # fmt: skip
class IndexFile(NotCopied, IndexRegion):
    """A mapped index file.  Create one with `create` or `open`, and close it, preferably with ``with``.

    Methods of the compiled base class: `put_key`, `put_keys`, `select_phy_offset`, `select_phy_offsets`.
    """

    mapped_file: MappedFile
    # The header at the last `take_dirty`: every put changes it.
    _taken_header: tuple[int, ...] | None = None
    # The pages of a sparse file's hash slots that have space.
    _slot_pages: np.ndarray | None = None

    def __init__(self, *arguments: object, **options: object) -> None:
        raise TypeError("an index file is opened or made: use IndexFile.open(path) or IndexFile.create(path)")

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        config: StoreConfig | None = None,
        *,
        prepared: PreparedFiles | None = None,
        sparse: bool = False,
        previous: IndexFile | None = None,
    ) -> IndexFile:
        """Create an index file without an entry, allocated on disk; OSError if it exists, the disk is full, ….

        - `config`: gives `max_hash_slot_num` and `max_index_num`; RocketMQ's defaults make 420 000 040 bytes.
        - `prepared`: files of its size that are ready to be renamed into place.
        - `sparse`: all but the header is a hole; call `reserve_entries` before each put.
        - `previous`: the full file before it, whose end time and offset it has from the start: without them RocketMQ (5.5.0)
          takes the file for one that lacks everything, and puts all entries again.

        Raises FileExistsError, DiskFullError, OSError.
        """
        config = StoreConfig() if config is None else config
        pool = MappedFilePool(1)
        time = phy_offset = 0
        if previous is not None:
            header = previous.header
            time, phy_offset = max(header.end_timestamp, 0), max(header.end_phy_offset, 0)
        if prepared is None:
            prepared = PreparedFiles(os.path.dirname(os.fspath(path)) or ".", config.index_file_size)
        created = prepared.create(
            path,
            pool=pool,
            head=INDEX_HEADER.pack(time, time, phy_offset, phy_offset, 0, 0),
            reserved=int(_core.IndexLayout.INDEX_HEADER_SIZE) if sparse else config.index_file_size,
        )
        try:
            return cls.over(created, config)
        except BaseException:
            # An empty file among others would never be filled: the next try takes a new name.
            created.destroy()
            raise

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], config: StoreConfig | None = None, *, read_only: bool = False
    ) -> IndexFile:
        """Open an existing index file; GeometryError if its length does not fit `config`, or its geometry cannot be inferred.

        - `config`: its geometry; by default `StoreConfig.infer` finds it from the file.

        Raises FileNotFoundError, OSError.
        """
        path = os.fspath(path)
        length = os.stat(path).st_size
        if config is None:
            config = StoreConfig.infer(path)
        if length != config.index_file_size:
            raise GeometryError(
                f"the index file has {length} bytes, but {config.max_hash_slot_num} slots and {config.max_index_num} "
                f"entries make {config.index_file_size}; give the max_hash_slot_num and max_index_num that it was "
                "written with",
                path,
                min(length, config.index_file_size),
            )
        return cls.over(MappedFile(path, length, read_only=read_only), config)

    @classmethod
    def over(cls, mapped_file: MappedFile, config: StoreConfig) -> IndexFile:
        """Return the index file in `mapped_file`, with the geometry of `config`."""
        index = cls.__new__(cls)
        index.mapped_file = mapped_file
        index.attach(mapped_file.region, config.max_hash_slot_num, config.max_index_num)
        return index

    @property
    def path(self) -> str:
        """The file's path."""
        return self.mapped_file.path

    @property
    def name(self) -> str:
        """The file's name, which orders it among the others."""
        return os.path.basename(self.mapped_file.path)

    @property
    def header(self) -> IndexHeader:
        """The current header."""
        begin, end, begin_phy, end_phy, slots, count = self.read_header()
        return IndexHeader(begin, end, begin_phy, end_phy, slots, max(count, 1))

    @property
    def index_count(self) -> int:
        """The number of the next entry, 1 for an empty file."""
        return max(self.read_header()[5], 1)

    def matches_time(self, begin: int, end: int) -> bool:
        """Return True if RocketMQ (5.5.0) searches this file for the inclusive time range, ms since epoch."""
        header = self.read_header()
        first, last = header[0], header[1]
        return (begin < first and end > last) or first <= begin <= last or first <= end <= last

    def populate(self, num: int | None = None) -> None:
        """Prepare the pages of the hash slots and of the next `num` entries (default: all) for writing.

        The first write to a page of a new file costs many times what later ones do.  This takes about as long in all, but
        may run before the puts have to be fast (docs/performance.md).  The pages become dirty: 20 bytes an entry and 4 a
        slot.  A store does something similar by itself.  Raises OSError if a full disk has no space for holes (of a Java
        store's file), ReadOnlyError, StoreClosedError.
        """
        count = self.index_count
        left = self.index_num - count
        num = left if num is None else max(min(num, left), 0)
        if not self.region.writable:
            raise ReadOnlyError("the index file was opened read-only; no page of it will be written", self.path)
        self.mapped_file.reserve(self.mapped_file.size)
        self.region.populate(0, self.entry_pos(0))
        if num:
            self.region.populate(self.entry_pos(count), num * _core.IndexLayout.ENTRY_SIZE)

    def reserve_entries(self, hashes: np.ndarray) -> None:
        """Allocate the pages of a sparse file for entries with these index hashes (int32); OSError if the disk is full."""
        count = self.index_count
        num = min(len(hashes), self.index_num - count)
        if num <= 0:
            return
        self.mapped_file.reserve_range(self.entry_pos(count), self.entry_pos(count + num))
        layout = _core.IndexLayout
        if self._slot_pages is None:
            self._slot_pages = np.zeros(self.entry_pos(0) // _PAGE + 1, bool)
        slots = (hashes[:num] % np.int32(self.slot_num)).astype(np.int64)
        wanted = np.zeros(len(self._slot_pages), bool)
        wanted[(slots * int(layout.SLOT_SIZE) + int(layout.INDEX_HEADER_SIZE)) // _PAGE] = True
        wanted &= ~self._slot_pages
        pages = np.flatnonzero(wanted)
        # Neighbours get their space in one call.
        for run in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1):
            if len(run):
                self.mapped_file.reserve_range(int(run[0]) * _PAGE, (int(run[-1]) + 1) * _PAGE)
        self._slot_pages[pages] = True

    def adopt(self) -> None:
        """Make the next flush force the file even without a put."""
        self._taken_header = None

    def take_dirty(self) -> bool:
        """Return True if anything was put since the last call; call it while nobody puts, then `force`."""
        header = self.read_header()
        if header[5] < 1:
            # RocketMQ writes the count of an empty file, 1, with its first flush.
            self.write_header(*header[:5], 1)
            header = self.read_header()
        before, self._taken_header = self._taken_header, header
        return before != header

    def force(self) -> None:
        """Force the file to the disk while puts may go on; only what `take_dirty` saw is certain to be there."""
        with naming_errors(self.path):
            self.region.flush()

    def flush(self) -> None:
        """Force the file to the disk; OSError if that fails."""
        if not self.region.writable:
            raise ReadOnlyError("a read-only index file cannot be flushed", self.path)
        self.take_dirty()
        self.force()

    def let_go(self) -> None:
        """Leave the pool, which refers back to the file: the mapping goes with the last reference to this object."""
        self.mapped_file.pool.forget(self.mapped_file)

    def close(self) -> None:
        """Refuse further use; closing twice does nothing."""
        self.mapped_file.close()

    def __enter__(self) -> IndexFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"IndexFile({self.path!r})"
