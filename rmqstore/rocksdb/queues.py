"""Consume queues in RocksDB (``storeType=defaultRocksDB``): keys and values, reading the units of a queue, and a new database.

The family ``default`` has an entry for each unit; ``offset`` has the last unit of each queue and the end of the dispatched log.
Later units remain from before a truncation and are never returned.  Lengths in keys are checked (I4).  A new database has tables of
format 5, like RocketMQ's RocksDB.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rmqstore import _numpy as np
from rmqstore.errors import CorruptionError, StoreError
from rmqstore.message import decode_java_utf8
from rmqstore.rocksdb.database import Database, load_rocksdict

__all__ = ["VALUE_SIZE", "LastUnit", "QueueDatabase", "QueueDatabaseWriter", "Units"]

_CHECKPOINT = b"CHECKPOINT_TOPIC"
_SEPARATOR = 1
_LENGTH = struct.Struct(">i")
_OFFSET = struct.Struct(">q")
_LAST = struct.Struct(">qq")
_VALUE = struct.Struct(">qiqq")
VALUE_SIZE = _VALUE.size
_UNIT = [("phy_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8"), ("store_timestamp", ">i8")]
# The length of a key in `offset` without its topic.
_OFFSET_KEY = 14
_INT64_MAX = 2**63 - 1

Key = tuple[str, int]


class LastUnit(NamedTuple):
    """The last unit of a queue: the phy offset of its record, and its queue offset."""

    phy_offset: int
    queue_offset: int


class Units(NamedTuple):
    """Units as they are stored: `queue_offsets` (int64, ascending) and `values`, uint8 of shape (n, 28), big-endian.

    The first 20 bytes of a value are a unit of a queue file: phy offset, size, tags code; a store timestamp follows.
    """

    queue_offsets: np.ndarray
    values: np.ndarray

    @classmethod
    def of(
        cls,
        queue_offsets: np.ndarray,
        phy_offsets: np.ndarray,
        sizes: np.ndarray,
        tags_codes: np.ndarray,
        store_timestamps: np.ndarray,
    ) -> Units:
        """Return units from arrays of their fields; times in ms since epoch."""
        values = np.empty(len(queue_offsets), np.dtype(_UNIT))
        values["phy_offset"], values["size"], values["tags_code"] = phy_offsets, sizes, tags_codes
        values["store_timestamp"] = store_timestamps
        return cls(queue_offsets, values.view(np.uint8).reshape(-1, VALUE_SIZE))

    @property
    def phy_offsets(self) -> np.ndarray:
        """The phy offsets (int64)."""
        return np.ascontiguousarray(self.values[:, :8]).view(">i8").ravel().astype(np.int64)

    @property
    def sizes(self) -> np.ndarray:
        """The sizes (int32)."""
        return np.ascontiguousarray(self.values[:, 8:12]).view(">i4").ravel().astype(np.int32)

    @property
    def tags_codes(self) -> np.ndarray:
        """The tags codes (int64)."""
        return np.ascontiguousarray(self.values[:, 12:20]).view(">i8").ravel().astype(np.int64)

    @property
    def store_timestamps(self) -> np.ndarray:
        """The store times, ms since epoch (int64)."""
        return np.ascontiguousarray(self.values[:, 20:28]).view(">i8").ravel().astype(np.int64)


class QueueDatabase:
    """The database with the queues of a store, read-only; `checkpoint` is the phy offset after its records, or -1."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.path.abspath(os.fspath(path))
        self.last: dict[Key, LastUnit] = {}
        self.checkpoint = -1
        self._prefixes: dict[Key, bytes] = {}
        self._database = Database(self.path)
        self.log_damage = self._database.log_damage
        try:
            self._read_offsets()
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Close the files."""
        self._database.close()

    def _read_offsets(self) -> None:
        for key, value in self._database.items(family="offset"):
            topic, what, queue_id = _offset_key(key, self.path)
            if what != b"max":
                # A broker caches `min`, which may be old.
                continue
            if topic == _CHECKPOINT:
                if len(value) != _OFFSET.size:
                    raise _odd_value(value, "the checkpoint", self.path)
                self.checkpoint = _OFFSET.unpack(value)[0]
                continue
            if len(value) != _LAST.size:
                raise _odd_value(value, "a queue's last unit", self.path)
            phy_offset, queue_offset = _LAST.unpack(value)
            if phy_offset < 0 or not 0 <= queue_offset < _INT64_MAX // 32:
                raise CorruptionError(
                    f"a queue in the RocksDB database has the impossible end queue offset {queue_offset}, phy offset {phy_offset}; "
                    "rebuild the queues",
                    self.path,
                )
            name = decode_java_utf8(topic), queue_id
            self.last[name] = LastUnit(phy_offset, queue_offset)
            self._prefixes[name] = unit_prefix(topic, queue_id)

    def value(self, topic: str, queue_id: int, queue_offset: int) -> tuple[int, int, int, int] | None:
        """Return (phy offset, size, tags code, store timestamp) of one unit, None for none."""
        last = self.last.get((topic, queue_id))
        if last is None or not 0 <= queue_offset <= last.queue_offset:
            return None
        value = self._database.get(self._prefixes[topic, queue_id] + _OFFSET.pack(queue_offset))
        if value is None:
            return None
        if len(value) != VALUE_SIZE:
            raise _odd_value(value, "a unit", self.path)
        phy_offset, size, tags_code, store_timestamp = _VALUE.unpack(value)
        return phy_offset, size, tags_code, store_timestamp

    def at_or_after(self, topic: str, queue_id: int, queue_offset: int) -> LastUnit | None:
        """Return the first unit of a queue from `queue_offset`, None for none."""
        last, begin = self.last.get((topic, queue_id)), max(queue_offset, 0)
        if last is None or begin > last.queue_offset:
            return None
        prefix = self._prefixes[topic, queue_id]
        for key, value in self._database.items(prefix + _OFFSET.pack(begin), prefix + _OFFSET.pack(last.queue_offset + 1)):
            return self._unit(prefix, key, value)
        return None

    def at_or_before(self, topic: str, queue_id: int, queue_offset: int) -> LastUnit | None:
        """Return the last unit of a queue up to `queue_offset`, None for none."""
        last = self.last.get((topic, queue_id))
        if last is None or queue_offset < 0:
            return None
        prefix = self._prefixes[topic, queue_id]
        found = self._database.last(prefix + _OFFSET.pack(min(queue_offset, last.queue_offset) + 1))
        if found is None or not found[0].startswith(prefix):
            return None
        return self._unit(prefix, *found)

    def _unit(self, prefix: bytes, key: bytes, value: bytes) -> LastUnit:
        if len(key) != len(prefix) + 8 or len(value) != VALUE_SIZE:
            raise _odd_value(value, "a unit", self.path)
        return LastUnit(_OFFSET.unpack_from(value)[0], _OFFSET.unpack_from(key, len(prefix))[0])

    def units(
        self, topic: str, queue_id: int, begin: int, end: int, damage: list[CorruptionError] | None = None
    ) -> Units:
        """Return the units of a queue from `begin` up to but not including `end`; `damage` takes an error in them."""
        last = self.last.get((topic, queue_id))
        begin, end = max(begin, 0), -1 if last is None else min(end, last.queue_offset + 1)
        keys: list[bytes] = []
        values: list[bytes] = []
        try:
            if begin < end:
                prefix = self._prefixes[topic, queue_id]
                for key, value in self._database.items(prefix + _OFFSET.pack(begin), prefix + _OFFSET.pack(end)):
                    if len(key) != len(prefix) + 8 or len(value) != VALUE_SIZE:
                        raise _odd_value(value, "a unit", self.path)
                    keys.append(key[-8:])
                    values.append(value)
        except CorruptionError as error:
            if damage is None:
                raise
            damage.append(error)
        return Units(
            np.frombuffer(b"".join(keys), ">i8").astype(np.int64),
            np.frombuffer(b"".join(values), np.uint8).reshape(-1, VALUE_SIZE),
        )

    def beyond_last(self) -> Mapping[Key, int]:
        """Return the number of units of each queue after its last one, remains of a truncation of the log."""
        found = {}
        for name, last in self.last.items():
            prefix = self._prefixes[name]
            end = prefix + b"\x7f" + b"\xff" * 8
            count = sum(1 for _ in self._database.items(prefix + _OFFSET.pack(last.queue_offset + 1), end))
            if count:
                found[name] = count
        return found

    def check(self) -> int:
        """Return the number of entries, read one by one; CorruptionError for the first bad one."""
        return sum(1 for family in self._database.families for _ in self._database.items(family=family))


def unit_prefix(topic: bytes, queue_id: int) -> bytes:
    """Return the prefix of the keys of a queue's units in the family ``default``; the queue offset follows (i64)."""
    return _LENGTH.pack(len(topic)) + b"\x01" + topic + b"\x01" + _LENGTH.pack(queue_id) + b"\x01"


def last_key(topic: bytes, queue_id: int) -> bytes:
    """Return the key of a queue's last unit in the family ``offset``."""
    return _LENGTH.pack(len(topic)) + b"\x01" + topic + b"\x01max\x01" + _LENGTH.pack(queue_id)


def _offset_key(key: bytes, path: str) -> tuple[bytes, bytes, int]:
    # Topic, "max" or "min", and queue id.
    n = _LENGTH.unpack_from(key)[0] if len(key) >= _OFFSET_KEY else -1
    if (
        n < 0
        or len(key) != _OFFSET_KEY + n
        or not key[4] == key[5 + n] == key[9 + n] == _SEPARATOR
        or key[6 + n : 9 + n] not in (b"max", b"min")
    ):
        raise CorruptionError(
            f"the RocksDB database has an entry that belongs to no queue (key {key[:80]!r}); rebuild the queues", path
        )
    return key[5 : 5 + n], key[6 + n : 9 + n], _LENGTH.unpack_from(key, 10 + n)[0]


def _odd_value(value: bytes, what: str, path: str) -> CorruptionError:
    text = f"the RocksDB database has an impossible entry of {len(value)} bytes for {what}; rebuild the queues"
    return CorruptionError(text, path)


# RocketMQ 5.5.0 has RocksDB 8.4.4, which reads no later tables.
_FORMAT_VERSION = 5
_WRITE_BUFFER_SIZE = 128 << 20
# Files that RocksDB and rocksdict leave next to the database.
_LEFT = ("rocksdict-config.json", "LOG", "LOCK")


class QueueDatabaseWriter:
    """A new database of queues; `finish` completes it."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.path.abspath(os.fspath(path))
        self._rocksdict = load_rocksdict()
        if os.path.lexists(self.path):
            raise StoreError("the directory for the new database exists; give one that does not", self.path)
        self._rdict: Any = None
        with self._writing():
            self._rdict = self._rocksdict.Rdict(
                self.path,
                options=self._options(),
                column_families={"default": self._options(), "offset": self._options()},
            )
        self._no_log = self._rocksdict.WriteOptions()
        self._no_log.disable_wal = True

    def _options(self) -> Any:
        options = self._rocksdict.Options(raw_mode=True)
        tables = self._rocksdict.BlockBasedOptions()
        tables.set_format_version(_FORMAT_VERSION)
        tables.set_bloom_filter(16, False)
        options.set_block_based_table_factory(tables)
        options.set_compression_type(self._rocksdict.DBCompressionType.lz4())
        options.create_if_missing(True)
        options.create_missing_column_families(True)
        options.set_atomic_flush(True)
        options.set_write_buffer_size(_WRITE_BUFFER_SIZE)
        options.set_compaction_style(self._rocksdict.DBCompactionStyle.universal())
        return options

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # rocksdict raises plain Exceptions; others are mistakes of a program.
            if type(error) is not Exception and not isinstance(error, OSError):
                raise
            raise StoreError(
                f"the new database of queues cannot be written ({str(error).partition(chr(10))[0]}); the old queues stay. Fix "
                "this, or make room on a full disk, and rebuild again",
                self.path,
            ) from error

    def put(self, topic: bytes, queue_id: int, units: Units) -> None:
        """Write units of one queue, over older ones."""
        values, ends = units.values.tobytes(), units.queue_offsets.astype(">i8").tobytes()
        prefix = unit_prefix(topic, queue_id)
        batch = self._rocksdict.WriteBatch(raw_mode=True)
        for i in range(len(units.queue_offsets)):
            batch.put(prefix + ends[8 * i : 8 * i + 8], values[VALUE_SIZE * i : VALUE_SIZE * (i + 1)])
        with self._writing():
            self._rdict.write(batch, self._no_log)

    def delete(self, topic: bytes, queue_id: int) -> None:
        """Delete every unit of one queue that was put so far."""
        prefix = unit_prefix(topic, queue_id)
        batch = self._rocksdict.WriteBatch(raw_mode=True)
        batch.delete_range(prefix, prefix + b"\xff" * 9)
        with self._writing():
            self._rdict.write(batch, self._no_log)

    def finish(self, last: dict[tuple[bytes, int], tuple[int, int]], checkpoint: int) -> None:
        """Write the last unit of each queue (phy offset, queue offset) and the checkpoint, and force all to the disk."""
        with self._writing():
            offsets = self._rdict.get_column_family("offset")
            try:
                for (topic, queue_id), (phy_offset, queue_offset) in last.items():
                    offsets.put(last_key(topic, queue_id), _LAST.pack(phy_offset, queue_offset), self._no_log)
                offsets.put(last_key(_CHECKPOINT, 0), _OFFSET.pack(checkpoint), self._no_log)
                self._rdict.flush()
                offsets.flush()
            finally:
                # It holds the database's lock, which the next try in this process needs.
                offsets.close()
            rdict, self._rdict = self._rdict, None
            rdict.close()
            for name in _LEFT:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.path, name))

    def close(self) -> None:
        """Close the files; without `finish` the database is not complete."""
        if self._rdict is not None:
            rdict, self._rdict = self._rdict, None
            # The error of a failed write was raised before.
            with contextlib.suppress(Exception):
                rdict.close()
