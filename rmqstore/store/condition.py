"""The condition of an open store: what is damaged, lost or not dispatched, its numbers, and the progress of groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmqstore.config import StoreConfig
from rmqstore.errors import StoreError
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.store.flushing import Flushing
from rmqstore.store.store_state import StoreState

if TYPE_CHECKING:
    from rmqstore.consumer.consumer_offset import ConsumerOffsets
    from rmqstore.store.completion import QueueDatabaseState
    from rmqstore.store.stats import StoreStats

__all__ = ["StoreCondition"]


class StoreCondition:
    """Reports the condition of one store; a base of `MessageStore`."""

    _state: StoreState
    _flushing: Flushing

    @property
    def closed(self) -> bool:
        """bool: `close` was called."""
        return self._state.closed

    @property
    def config(self) -> StoreConfig:
        """StoreConfig: the options; read-only, assumed ones are replaced when files show their values."""
        return self._state.config

    @property
    def disk_full(self) -> bool:
        """bool: the disk is used above `disk_space_warning_level_ratio`, so that writes are refused."""
        return self._state.disk_full

    @property
    def checkpoint(self) -> Checkpoint:
        """Checkpoint: the extent of what is on the disk, read at opening and updated by flushes."""
        return self._state.checkpoint

    @property
    def undispatched(self) -> tuple[int, int] | None:
        """tuple of (int, int) or None: the range of the log that is not yet fully dispatched to the queues on disk.

        A broker that died may not have dispatched its newest records, and queues may be lost.  A store that is open
        read-only serves these records by units in memory: it scans the log from where everything surely was on disk, but at
        most 1 GiB before the newest unit and 1 GiB after it; the rest is `unserved`.  Queues in RocksDB also lag while their
        broker runs; all of their records are served.
        """
        served, left_out = self._state.undispatched.served, self._state.undispatched.left_out
        if served is None or left_out is None:
            return served or left_out
        return served[0], left_out[1]

    @property
    def unserved(self) -> tuple[int, int] | None:
        """tuple of (int, int) or None: the part of `undispatched` that no queue serves.

        If a queue of an unclosed store is unreadable: the range that may be in no queue.  If a folder of queues is: all of the log.
        """
        return self._state.undispatched.left_out

    @property
    def lost_log(self) -> tuple[tuple[int, int], ...]:
        """tuple of (int, int): ranges of phy offsets that the log had once and lacks now; empty for a writer.

        A missing segment, or a range after the end to which the checkpoint, the index or queues point.  Answers lack its messages.
        """
        return self._state.lost_log

    @property
    def queue_database(self) -> QueueDatabaseState | None:
        """QueueDatabaseState or None: of the queues in RocksDB, if a store that is read has any (``storeType=defaultRocksDB``)."""
        completion = self._state.undispatched.completion
        return None if completion is None else completion.state

    def damaged_files(self) -> list[StoreError]:
        """List errors for files and folders that are damaged or unreadable, of queues those that were read.

        Files that lack bytes are read as far as they go, damaged index files are skipped.  A store with files that lack bytes
        does not open for writing.
        """
        return self._state.damaged_files()

    def stats(self, *, refresh: bool = True) -> StoreStats:
        """Read the plain numbers of this store: sizes, bounds, queues, index files, consumer progress, what is not flushed.

        Nothing is counted while messages are put or read.  The cost grows with the number of queues (the ends of each and the
        header of one record are read), not with the number of messages.  While the log does not grow, the next call reads only
        queues whose folder changed and groups whose progress changed.

        Parameters
        ----------
        refresh : bool
            Pick up changes made by other processes first, as `refresh` does.  Without it new queues, index files and records
            are not seen.

        Returns
        -------
        StoreStats
            Messages put during the call may be in some of its numbers.

        Raises
        ------
        StoreChangedError
            As for `refresh`.
        OSError
            The store is gone.
        """
        # Few programs ask for numbers.
        from rmqstore.store.stats import take_stats

        self._state.check_open()
        if refresh:
            self._state.refresh()
        return self._state.settled(take_stats, self._state, self._flushing)

    @property
    def consumer_offsets(self) -> ConsumerOffsets:
        """ConsumerOffsets: the progress of consumer groups, read when it is first asked for.

        Commits are persisted every `flush_consumer_offset_interval` ms, by `flush` and by `close`.  Progress in RocksDB is
        only read, also by a writer: a broker would ignore a file of progress next to the database (`rmqstore.settings` reports
        which source counts).

        Raises
        ------
        CorruptionError
            Neither the file nor its backup can be read, or nothing of the database.
        MissingDependencyError
            The progress is in RocksDB, and rocksdict is not installed.
        """
        return self._state.progress.offsets

    def consumer_progress(self) -> tuple[dict[tuple[str, str], dict[int, int]], str | None]:
        """Read the progress of all groups, without an error where it is damaged.

        Returns
        -------
        (dict, str or None)
            The progress like `ConsumerOffsets.list`, empty if nothing can be read; and a text about damage.
        """
        return self._state.progress.list()
