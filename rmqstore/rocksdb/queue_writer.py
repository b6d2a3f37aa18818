"""Writing a new database of consume queues, as a broker with ``storeType=defaultRocksDB`` opens it.

Owns the bytes of such a database and what RocketMQ's RocksDB can read of them: tables of format 5, while rocksdict writes later
ones by default.  It writes into a directory of its own, never into one that is there; whether the broker's queues are replaced by
it is for others to decide.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from rmqstore.errors import StoreError
from rmqstore.rocksdb.database import load_rocksdict
from rmqstore.rocksdb.queues import VALUE_SIZE, Units, last_key, unit_prefix

__all__ = ["QueueDatabaseWriter"]

# RocketMQ 5.5.0 has RocksDB 8.4.4, which knows no later tables.
_FORMAT_VERSION = 5
_WRITE_BUFFER_SIZE = 128 << 20
# What RocksDB and rocksdict leave besides the database.
_LEFT = ("rocksdict-config.json", "LOG", "LOCK")


class QueueDatabaseWriter:
    """A new database of queues; `finish` makes it whole.

    Parameters
    ----------
    path : str or os.PathLike
        A directory that does not exist.

    Raises
    ------
    StoreError
        The directory exists, or it cannot be written to (the disk is full, for instance), which `put` and `finish`
        raise too.  What was written so far is of no use then.
    MissingDependencyError
        rocksdict is not installed.
    """

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
                f"the new database of queues cannot be written ({str(error).partition(chr(10))[0]}), and the queues "
                "that were there are as they were: make room where the disk is full, or mend what else this names, and "
                "rebuild again",
                self.path,
            ) from error

    def put(self, topic: bytes, queue_id: int, units: Units) -> None:
        """Write units of one queue; a unit that was written before is replaced."""
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
        """Write the last unit of each queue (phy offset, queue offset) and the checkpoint, and force all to the disk.

        Parameters
        ----------
        checkpoint : int
            Phy offset after the last record whose units are here.
        """
        with self._writing():
            offsets = self._rdict.get_column_family("offset")
            try:
                for (topic, queue_id), (phy_offset, queue_offset) in last.items():
                    value = phy_offset.to_bytes(8, "big", signed=True) + queue_offset.to_bytes(8, "big", signed=True)
                    offsets.put(last_key(topic, queue_id), value, self._no_log)
                offsets.put(last_key(b"CHECKPOINT_TOPIC", 0), checkpoint.to_bytes(8, "big", signed=True), self._no_log)
                self._rdict.flush()
                offsets.flush()
            finally:
                # Each holds the database's lock, which the next try in this process needs.
                offsets.close()
            rdict, self._rdict = self._rdict, None
            rdict.close()
            for name in _LEFT:
                path = os.path.join(self.path, name)
                if os.path.exists(path):
                    os.unlink(path)

    def close(self) -> None:
        """Let go of the files; without `finish` before, the database is not whole."""
        if self._rdict is not None:
            rdict, self._rdict = self._rdict, None
            # It flushes, and where that cannot be done, who could not write has been told.
            with contextlib.suppress(Exception):
                rdict.close()
