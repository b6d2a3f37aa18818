"""The checkpoint file: the times and offsets up to which a store was flushed.

Owns the six fields and their place in the 4096 bytes.  It never maps the file.  Invariants:

- A flush writes the whole 4096 bytes in place and returns after they are on disk.
- Bytes after the fields are kept, except for the last 32: a mark of this package while a store is open for writing, and zeros
  after an orderly close.  A change of the fields voids the mark.  It outlives the `abort` file.
- A checkpoint that was loaded read-only never writes; loading never creates the file.

Layout: Apache RocketMQ 4.0 to 5.5.0 (StoreCheckpoint); six i64 big-endian.  Versions before 5.0.0 have the first three
fields, 5.0.0 adds the fourth, 5.1.1 the fifth, 5.4.0 the sixth; older files have zeros there.
"""

from __future__ import annotations

import os
import struct
import zlib

from rmqstore._core import CheckpointLayout
from rmqstore.errors import GeometryError, ReadOnlyError
from rmqstore.files.durable import force_data, fsync_directory, write_all
from rmqstore.files.open_file import opened, read_at
from rmqstore.files.os_errors import is_not_a_file, is_unreadable, naming_errors
from rmqstore.files.store_lock import abort_mark, abort_process

__all__ = ["CHECKPOINT_SIZE", "SAFETY_MARGIN", "Checkpoint", "marked_end"]

CHECKPOINT_SIZE = int(CheckpointLayout.CHECKPOINT_SIZE)

_FIELDS = struct.Struct(">qqqqqq")
# Magic, phy offset up to which everything is on disk (-1: not known), the end of the log, process ids (low half: the writer, high
# half: the process whose mark it took over, or 0), CRC-32 of all fields and these.
_MARK = struct.Struct(">4sqqqI")
_MARK_MAGIC = b"RMQS"
_MARK_POS = CHECKPOINT_SIZE - _MARK.size
_CRC_SIZE = 4
_NAMES = (
    "physic_msg_timestamp",
    "logics_msg_timestamp",
    "index_msg_timestamp",
    "master_flushed_offset",
    "confirm_phy_offset",
    "logics_physical_offset",
)
SAFETY_MARGIN = 3000
"""Recovery after a crash starts this number of milliseconds before the times of the checkpoint."""


class Checkpoint:
    """The checkpoint of a store; `load` reads one.

    Attributes
    ----------
    physic_msg_timestamp : int
        Store timestamp (ms) up to which the commit log is on disk.
    logics_msg_timestamp : int
        The same for the consume queues.
    index_msg_timestamp : int
        The latest end timestamp (ms) of a full index file that is on disk.
    master_flushed_offset : int
        For replication (5.0.0).
    confirm_phy_offset : int
        After a recovery the start of the last valid record (5.1.1).
    logics_physical_offset : int
        Phy offset up to which the consume queues are on disk (5.4.0).
    flushed_offset : int
        Part of the mark: log, queues and index are on disk up to this phy offset; -1 if unknown.  RocketMQ's fields may be lower,
        see `MessageStore`.
    log_end : int
        Part of the mark: the writer's end of the log as a phy offset; -1 if unknown.
    process_id, previous_process_id : int
        The process that wrote the mark, and the one whose mark it took over; 0 for none.
    path : str
    read_only : bool
    """

    __slots__ = (
        *_NAMES, "_rest", "_written", "flushed_offset", "log_end", "path", "previous_process_id", "process_id", "read_only",
    )  # fmt: skip

    physic_msg_timestamp: int
    logics_msg_timestamp: int
    index_msg_timestamp: int
    master_flushed_offset: int
    confirm_phy_offset: int
    logics_physical_offset: int

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False):
        self.path = os.fspath(path)
        self.read_only = read_only
        self._rest = bytes(CHECKPOINT_SIZE - _FIELDS.size)
        # The bytes that are on disk.
        self._written = b""
        self.flushed_offset = self.log_end = -1
        self.process_id = self.previous_process_id = 0
        for name in _NAMES:
            setattr(self, name, 0)

    @classmethod
    def load_or_zeros(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Load the file read-only; return zeros if it is unreadable or damaged.  Other OSErrors, such as EMFILE, are raised."""
        try:
            return cls.load(path, read_only=True)
        except (GeometryError, OSError) as error:
            if isinstance(error, OSError) and not (is_unreadable(error) or is_not_a_file(error)):
                raise
            return cls(path, read_only=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, read_only: bool = False) -> Checkpoint:
        """Read the checkpoint file at `path`; missing bytes read as zeros, also of a missing file.

        Raises GeometryError for a size over 4096 bytes or not of whole fields, and OSError for an unreadable file.
        """
        checkpoint = cls(path, read_only=read_only)
        try:
            with opened(checkpoint.path) as descriptor:
                size = os.fstat(descriptor).st_size
                if size > CHECKPOINT_SIZE or size % 8:
                    text = f"a checkpoint file has {CHECKPOINT_SIZE} bytes, this one {size}: it is damaged or something else; "
                    raise GeometryError(
                        text + "move it away, the store then recovers from the start of its log", checkpoint.path
                    )
                with naming_errors(checkpoint.path):
                    data = read_at(descriptor, size, 0)
        except FileNotFoundError:
            return checkpoint
        checkpoint._decode(data.ljust(CHECKPOINT_SIZE, b"\0"))
        return checkpoint

    def _decode(self, data: bytes) -> None:
        for name, value in zip(_NAMES, _FIELDS.unpack_from(data), strict=True):
            setattr(self, name, value)
        magic, flushed_offset, log_end, process_id, crc = _MARK.unpack_from(data, _MARK_POS)
        rest_end = CHECKPOINT_SIZE
        if magic == _MARK_MAGIC:
            rest_end = _MARK_POS
            if crc == zlib.crc32(data[_MARK_POS : -_CRC_SIZE], zlib.crc32(data[: _FIELDS.size])):
                self.flushed_offset, self.log_end = flushed_offset, log_end
                self.previous_process_id, self.process_id = divmod(process_id, 1 << 32)
        self._rest = data[_FIELDS.size : rest_end].ljust(CHECKPOINT_SIZE - _FIELDS.size, b"\0")

    def to_bytes(self) -> bytes:
        """Return the 4096 bytes of the file; ValueError if a field is not an int of 64 bits."""
        values = [getattr(self, name) for name in _NAMES]
        try:
            fields = _FIELDS.pack(*values)
            if self.flushed_offset < 0 and self.log_end < 0:
                return fields + self._rest
            processes = self.previous_process_id << 32 | self.process_id
            mark = _MARK.pack(_MARK_MAGIC, self.flushed_offset, self.log_end, processes, 0)[:-_CRC_SIZE]
            crc = zlib.crc32(mark, zlib.crc32(fields)).to_bytes(_CRC_SIZE, "big")
            return fields + self._rest[: -_MARK.size] + mark + crc
        except struct.error:
            raise ValueError(f"a checkpoint field is not a 64-bit int: {dict(zip(_NAMES, values, strict=True))}") from None

    @property
    def min_timestamp(self) -> int:
        """The time at which recovery after a crash starts, in ms: max(0, min(physic, logics) - 3000)."""
        return max(0, min(self.physic_msg_timestamp, self.logics_msg_timestamp) - SAFETY_MARGIN)

    def has_index(self, store_timestamp: int, phy_offset: int) -> bool:
        """Return True if the full index file whose last entry is of this record is on disk.

        The time alone does not decide: clocks are set back, offsets are not.
        """
        return store_timestamp <= self.index_msg_timestamp and not 0 < self.logics_physical_offset < phy_offset

    def is_of(self, process: int) -> bool:
        """Return True if the mark is valid for a store whose `abort` file names this process."""
        return process > 0 and process in (self.process_id, self.previous_process_id)

    def flush(self) -> None:
        """Write changed fields to the file, and create it if needed; return after they are on disk.

        Raises ReadOnlyError, ValueError for a field that is not an int of 64 bits, and OSError.
        """
        if self.read_only:
            raise ReadOnlyError("the checkpoint was loaded read-only and cannot be written", self.path)
        content = self.to_bytes()
        if content == self._written:
            return
        is_new = not os.path.exists(self.path)
        with opened(self.path, os.O_WRONLY | os.O_CREAT) as descriptor:
            with naming_errors(self.path):
                write_all(descriptor, content, 0)
                force_data(descriptor)
        if is_new:
            # The name of a new file is durable only after its directory is.
            fsync_directory(os.path.dirname(self.path) or ".")
        self._written = content

    def as_dict(self) -> dict[str, int]:
        """Return RocketMQ's six fields by name."""
        return {name: getattr(self, name) for name in _NAMES}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _NAMES)

    __hash__ = None  # type: ignore[assignment]  # The fields change.

    def __repr__(self) -> str:
        return f"Checkpoint({', '.join(f'{name}={getattr(self, name)}' for name in _NAMES)})"


def marked_end(root: str) -> int:
    """Return a phy offset that the log of the store at `root` certainly reached, or -1.

    If the store is open or was not closed in order, the mark has it.  Otherwise it is the last record that an opening found, by
    this package or by RocketMQ since 5.1.1.
    """
    try:
        checkpoint = Checkpoint.load_or_zeros(os.path.join(root, "checkpoint"))
        if abort_mark(root) is None:
            return checkpoint.confirm_phy_offset + 1 if checkpoint.confirm_phy_offset > 0 else -1
        return checkpoint.log_end if checkpoint.is_of(abort_process(root)) else -1
    except OSError:
        return -1
