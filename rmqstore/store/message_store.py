"""MessageStore: a directory that holds messages, opened for writing or only for reading.

Owns what users meet: open and close, and every operation with its words; the work is done by the parts beside it.  Invariants:

- A read-only open creates nothing, locks nothing and maps read-only (I7); it works beside a running broker.
- A writable store is held by one process, and by one `MessageStore` in it: an exclusive POSIX lock on byte 0 of ``lock``,
  taken before recovery.  A Java broker and this store exclude each other.
- Locks are taken in this order: closing, flushing, appending; nobody who holds the append lock waits for a flush.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rmqstore._append import append_first
from rmqstore._core import StoreParts
from rmqstore._read import get_first, query_first
from rmqstore.arguments import (
    Boundary,
    IndexType,
    Moment,
    Recovery,
    given_tags,
    milliseconds,
    one_queue,
    one_text,
    shown,
    whole_number,
    whole_numbers,
)
from rmqstore.commitlog.commit_log import check_store_root
from rmqstore.config import StoreConfig
from rmqstore.config.dledger import refuse_dledger
from rmqstore.config.log_folder import refuse_other_log
from rmqstore.consumequeue.consume_queue_store import unseen_text
from rmqstore.errors import InvalidMessageError, OffsetOutOfRangeError, ReadOnlyError, StoreError
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.files.mapped_file import NotCopied, make_directories
from rmqstore.files.store_lock import StoreLock
from rmqstore.files.unclosed import ClosedAtExit
from rmqstore.index.log_index import DEFAULT_LOG_BYTES
from rmqstore.message import Message, MessageExt
from rmqstore.rocksdb.places import closed_databases
from rmqstore.selection import INT64_MAX, Selection, of_key, of_queue, of_scan, row_num
from rmqstore.store.closing import Closing, close_forgotten
from rmqstore.store.columns import ColumnOptions, scan_log, table_options
from rmqstore.store.flushing import Flushing
from rmqstore.store.light_queues import refuse_light_queues
from rmqstore.store.lost_log import is_named, lost_text
from rmqstore.store.opening import (
    check_has_store,
    has_store,
    is_swapping,
    recover_state,
    refuse_rocksdb,
    warn_of_dledger,
    warn_of_swapping,
)
from rmqstore.store.querying import LogLook, Querying
from rmqstore.store.reading import Reading
from rmqstore.store.recovery import RECOVERY_MODES, RecoveryReport
from rmqstore.store.results import (
    GetMessageResult,
    PutResult,
    PutResults,
    PutTableResult,
    QueryResult,
)
from rmqstore.store.retention import RetentionReport
from rmqstore.store.store_state import StoreState
from rmqstore.store.table_writing import TableWriting
from rmqstore.store.upkeep import Upkeep
from rmqstore.store.writing import Writing

if TYPE_CHECKING:
    import pyarrow as pa

    # Imported where they are used, as few programs use them.
    from rmqstore.consumer.consumer import Consumer
    from rmqstore.consumer.consumer_offset import ConsumerOffsets
    from rmqstore.consumer.local_offsets import LocalOffsets
    from rmqstore.flatfile.flat_store import FlatStore
    from rmqstore.store.completion import QueueDatabaseState
    from rmqstore.store.stats import StoreStats

__all__ = ["MessageStore"]


def _offset(offset: int | None, name: str) -> int | None:
    return None if offset is None else whole_number(offset, name)


def _flat_store(tiered: str | os.PathLike[str] | FlatStore | None, root: str) -> FlatStore | None:
    if tiered is None:
        return None
    from rmqstore.flatfile.flat_store import FlatStore

    return tiered if isinstance(tiered, FlatStore) else FlatStore(os.path.abspath(os.fspath(tiered)), root)


_open_stores: weakref.WeakSet[MessageStore] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # Locks that another thread of the parent held would never be given back here.
    for store in list(_open_stores):
        store._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class MessageStore(ClosedAtExit, NotCopied, StoreParts):
    """A store; made by `MessageStore.open`, to be closed, best by a ``with`` statement.

    One that is open for writing and not closed is closed when the program ends, or, if it was forgotten before, by its own
    thread; a ResourceWarning names its path.

    Attributes
    ----------
    path : str
    config : StoreConfig
    read_only : bool
    commit_log : CommitLog
    queues : ConsumeQueueStore
    index_service : IndexService or None
        None when the config says not to index.
    database_index : DatabaseIndex
        The index in RocksDB, where a broker keeps one; `query_message` asks it beside the index files.
    recovery_report : RecoveryReport or None
        What opening for writing did; None when read-only.
    tiered : FlatStore or None
        The broker's tiered storage, where it was opened with one.
    """

    _state: StoreState

    def __init__(self, *arguments: object, **options: object) -> None:
        raise TypeError("a store is made by opening it: use MessageStore.open(path)")

    def _take(self, path: str, config: StoreConfig, *, read_only: bool, tiered: FlatStore | None = None) -> None:
        # What `open` gives to an instance, which is nothing before its parts are loaded.
        state = self._state = StoreState(path, config, read_only=read_only)
        self.path = path
        self.read_only = read_only
        self.recovery_report: RecoveryReport | None = None
        self.commit_log, self.queues, self.index_service = state.commit_log, state.queues, state.index_service
        self.database_index = state.database_index
        self._flushing = Flushing(state)
        self.tiered = state.tiered = tiered
        if tiered is None:
            self._reading, self._querying = Reading(state), Querying(state)
        else:
            from rmqstore.store.tiered_reading import TieredQuerying, TieredReading

            self._reading, self._querying = TieredReading(state, tiered), TieredQuerying(state, tiered)
        # A store that is only read has no use for these, nor for the NumPy in them.
        self._writing = None if read_only else Writing(state, self._flushing)
        self._closing = Closing(state, self._flushing)

    def _after_fork(self) -> None:
        self._closing.renew_lock()
        self._flushing.renew_locks()
        self._state.after_fork()

    # ----------------------------------------------------------------------------------------------- opening, closing

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        config: StoreConfig | None = None,
        read_only: bool = False,
        create: bool = True,
        recovery: Recovery = "strict",
        drop_units: int = 0,
        tiered: str | os.PathLike[str] | FlatStore | None = None,
    ) -> MessageStore:
        """Open the store in directory `path`; a new one is made, unless `read_only` or `create` says otherwise.

        Parameters
        ----------
        path : path
            The store's root (RocketMQ's storePathRootDir).
        config : StoreConfig, optional
            By default what the files say (`StoreConfig.infer`), RocketMQ's defaults for a new store.
        read_only : bool
            Change nothing and lock nothing; works on a broker's store, also while the broker runs.
        create : bool
            Make a new store, and its directory, where there is none.  With False a path without a store is an error, so that
            a mistyped one makes none.  Read-only none is made anyway.
        recovery : {"strict", "truncate", "skip"}
            What to do where the log is damaged in front of whole records, see `rmqstore.store.recovery.recover`.
        drop_units : int
            How many queue units and index entries may go that lead outside the log; the error says how many there are.
        tiered : path, optional
            The broker's tieredStoreFilePath: what the local log no longer has is read from tiered storage then, by queue, by
            key and in scans, as one store (docs/tiered.md).  Only read-only.

        Raises
        ------
        StoreLockedError
            Another process (maybe a broker), or this one, has it open for writing.
        GeometryError
            Files do not fit the config, or do not belong there.
        CorruptionError
            The log is damaged in the middle; nothing was changed.
        LostLogError
            Segments are missing that queues or index lead to; nothing was changed.
        StoreError
            `read_only` and there is no such directory, or ``create=False`` and there is no store.
        UnsupportedFormatError
            The queues are in RocksDB (storeType=defaultRocksDB), which is read and not written; or the commit log is
            DLedger's (enableDLegerCommitLog), which is not read: read-only what lies in front of it is.
        MissingDependencyError
            They are, and rocksdict is not installed (``pip install rmqstore[rocksdb]``).
        """
        if recovery not in RECOVERY_MODES:
            raise ValueError(f"recovery is {recovery!r}; give one of {', '.join(RECOVERY_MODES)}")
        # Files are opened as they are needed, also after a change of the working directory.
        root = os.path.abspath(os.fspath(path))
        if tiered is not None and not read_only:
            raise ValueError("tiered storage is only read; open the store with read_only=True")
        if read_only:
            check_store_root(root)
            warn_of_swapping(root)
            if config is None:
                alone = tiered is not None and not os.path.isdir(os.path.join(root, "commitlog"))
                config = StoreConfig() if alone else StoreConfig.infer(root, read_only=True)
            store = cls.__new__(cls)
            store._take(root, config, read_only=True, tiered=_flat_store(tiered, root))
            store._state.load()
            warn_of_dledger(store._state)
            _open_stores.add(store)
            return store
        if not create:
            check_has_store(root)
        refuse_rocksdb(root)
        refuse_dledger(root)
        if config is not None:
            refuse_other_log(root, config.unknown)
        make_directories(os.path.abspath(root))
        close_forgotten(root)
        store_lock = StoreLock(root)
        try:
            if is_swapping(root):
                raise StoreError(
                    "a rebuild was interrupted while it swapped its files in; run the same rebuild again, which finishes it",
                    root,
                )
            if config is None:
                config = StoreConfig.infer(root) if has_store(root) else StoreConfig()
            store = cls.__new__(cls)
            store._take(root, config, read_only=False)
            store._closing.store_lock = store_lock
            try:
                store._state.load()
                store.recovery_report = recover_state(store._state, store._flushing, recovery, drop_units)
                _open_stores.add(store)
                writing = store._for_writing()
                writing.take_writes()
                store._closing.upkeep = Upkeep(store._state, store._flushing, writing, store_lock)
                store._closing.upkeep.start()
                store._closing.keep()
                store._note_open()
            except BaseException as error:
                store._note_closed()
                store._closing.abandon(error)
                raise
        except BaseException:
            store_lock.release()
            raise
        return store

    def close(self) -> None:
        """Force everything to the disk and give the store back; closing twice does nothing.

        After a failed write the ``abort`` file stays, and the next opening recovers.

        Raises
        ------
        OSError
            The last flush, or writing the consumer progress, failed; ``abort`` stays.
        """
        try:
            self._closing.close()
        finally:
            # One that was interrupted is finished by the next call, or at the end of the program.
            if self._closing.done:
                self._note_closed()

    def _when_forgotten(self) -> None:
        self._closing.forget()

    @property
    def _upkeep(self) -> Upkeep | None:
        return self._closing.upkeep

    @property
    def _store_lock(self) -> StoreLock | None:
        return self._closing.store_lock

    @property
    def closed(self) -> bool:
        """bool: `close` was called."""
        return self._state.closed

    def __enter__(self) -> MessageStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._state.closed else "read-only" if self.read_only else "open"
        return f"MessageStore({self.path!r}, {state})"

    def _repr_html_(self) -> str:
        # For notebooks; it looks at no file that is not open anyway.
        from rmqstore.texts import format_size, html_table

        rows: list[tuple[str, object]] = []
        if not self._state.closed:
            log, topics = self.commit_log, self._state.topics()
            rows = [
                ("log", f"{format_size(log.max_offset - log.min_offset)} in {len(log.files)} segments"),
                ("phy offsets", f"{log.min_offset} to {log.max_offset}"),
                ("topics", f"{len(topics)}: {', '.join(topics[:10])}" if topics else "none"),
                ("index files", "no index" if self.index_service is None else len(self.index_service.names)),
            ]
        return html_table(repr(self), (), rows)

    def _for_writing(self) -> Writing:
        if self._writing is None:
            self._state.check_writable()
        assert self._writing is not None
        return self._writing

    # --------------------------------------------------------------------------------------------- disk, state

    def flush(self) -> None:
        """Force everything that was put to the disk: the log, queues and index, the checkpoint, consumer progress.

        Puts go on meanwhile; what is put after the call began may or may not be forced.

        Raises
        ------
        OSError
            The system could not write; the store takes no more writes after that.
        """
        self._state.check_writable()
        with self._flushing.lock:
            self._state.check_writable()
            self._flushing.flush_all()
        self._state.progress.persist()

    def refresh(self) -> None:
        """Take in what another process did since; a store opened for writing is always up to date.

        A reader beside a writer (another process, or a Java broker on this host) also does so by itself, where an answer
        would otherwise be that there is nothing: at the end of the log or of a queue, for an unknown queue, and when an
        index file is full.  What the writer has only in its own memory (a broker with transientStorePoolEnable) cannot be
        seen before it is committed.

        Raises
        ------
        StoreChangedError
            What was seen before is gone: the writer recovered and cut the log, or replaced it.
        """
        self._state.check_open()
        self._state.refresh()

    def delete_expired_files(self) -> RetentionReport:
        """Delete now what is expired, at whatever hour; the housekeeping thread does so by itself in the hours of `delete_when`.

        Segments expire `file_reserved_time` hours after they were last written, the newest never; where the disk is used
        above `disk_space_clean_forcibly_ratio` the oldest ones go whatever their age (unless `clean_file_forcibly_enable`
        is off).  Queue and index files follow when everything they lead to is gone.  At most `delete_file_batch_max`
        segments a call.  The rules are RocketMQ's (5.5.0); ``clean_resource_interval=0`` switches the thread's part off.

        Raises
        ------
        OSError
            A file could not be deleted.
        """
        self._state.check_writable()
        assert self._upkeep is not None
        return self._upkeep.delete_expired_files(True, lambda milliseconds: True)

    @property
    def disk_full(self) -> bool:
        """bool: the disk is used above `disk_space_warning_level_ratio`, so that no writes are taken."""
        return self._state.disk_full

    @property
    def checkpoint(self) -> Checkpoint:
        """Checkpoint: what is known to be on the disk, as read when the store was opened and forced since."""
        return self._state.checkpoint

    @property
    def undispatched(self) -> tuple[int, int] | None:
        """tuple of (int, int) or None: begin and end of the part of the log that queues on disk do not lead to, or not wholly.

        None where there is nothing.  A broker that died may not have dispatched its newest records, or to some queues only,
        and queues may be gone.  A store that was opened read-only then serves them all the same, by units that it makes in
        memory.  It goes over the log for that from where everything surely was on disk, but no more than 1 GiB before the
        newest unit and 1 GiB after it; what lies further is `unserved`.  A database of queues in RocksDB lags also while its
        broker runs; all of that is served.
        """
        undispatched = self._state.undispatched
        served, left_out = undispatched.served, undispatched.left_out
        if served is None or left_out is None:
            return served or left_out
        return served[0], left_out[1]

    @property
    def unserved(self) -> tuple[int, int] | None:
        """tuple of (int, int) or None: begin and end of what is in no queue and is not served by queue either.

        Of a store that nobody closed, a queue of which cannot be read: of what may be in no queue.  All of the log
        where a folder of queues cannot be looked into.
        """
        return self._state.undispatched.left_out

    @property
    def lost_log(self) -> tuple[tuple[int, int], ...]:
        """tuple of (int, int): phy offsets, begin and end, that the log had once and lacks now.

        A segment in the middle, or what the checkpoint, the index or queues point to after the end.  No answer has the
        messages of these parts.  A store that is open for writing has none.
        """
        return self._state.lost_log

    @property
    def queue_database(self) -> QueueDatabaseState | None:
        """QueueDatabaseState or None: of the queues in RocksDB, if a store that is read has any (``storeType=defaultRocksDB``)."""
        completion = self._state.undispatched.completion
        return None if completion is None else completion.state

    def damaged_files(self) -> list[StoreError]:
        """list of StoreError: segments, index files, and files of queues asked for so far, that lack their length.

        Read-only they are read as far as they go, and index files passed over; a store with one does not open for writing.
        So are index files, folders of queues and queues that the system does not give out, a broker's databases that are
        damaged or closed, and the folder of its settings.
        """
        listed = [self.commit_log.files, *(queue.files for queue in self.queues.opened())]
        found: list[StoreError] = [problem for files in listed for problem in files.damaged()]
        named = {problem.path for problem in found}
        found += [
            StoreError(lost_text(begin, end), self.commit_log.path)
            for begin, end in self.lost_log
            if not is_named(self.commit_log, begin, end, named)
        ]
        found += [StoreError(unseen_text(error), folder) for folder, error in self.queues.unseen.items()]
        for (topic, queue_id), error in self.queues.unread.items():
            text = f"queue {queue_id} of {topic} cannot be read ({error.strerror or error}), and is left out"
            found.append(StoreError(text, None if error.filename is None else os.fsdecode(error.filename)))
        if self.index_service is not None:
            found += self.index_service.passed_over.values()
        databases: list[StoreError] = [*closed_databases(self.path)]
        completion = self._state.undispatched.completion
        databases += () if completion is None else completion.damage
        databases += () if self.database_index.damage is None else [self.database_index.damage]
        told = {problem.path for problem in found}
        for problem in databases:
            if problem.path not in told:
                told.add(problem.path)
                found.append(problem)
        return found

    def stats(self, *, refresh: bool = True) -> StoreStats:
        """Plain numbers of this store: sizes, bounds, queues, index files, consumer progress, how much is not flushed.

        They are read from the files when they are asked for; nothing is counted on the way of a message.  The cost grows with
        the number of queues (the ends of each, and the header of one record, are read), not with that of messages.

        Parameters
        ----------
        refresh : bool
            A read-only store takes in first what another process did, as by `refresh`.  False saves that right after the store
            was opened or refreshed: new queues and index files are then not seen, nor records after the known end of the log.

        Returns
        -------
        StoreStats
            What is put while it is taken may be in some of its numbers.

        Raises
        ------
        StoreChangedError
            As of `refresh`.
        OSError
            The store is gone.
        """
        from rmqstore.store.stats import take_stats

        state = self._state
        if refresh:
            self.refresh()
        else:
            state.check_open()

        def ask() -> StoreStats:
            own = not self.read_only
            # Of each queue the newest record is looked at, wherever in the log it lies.
            with self.commit_log.single_records() if self.read_only else contextlib.nullcontext():
                return taken(own)

        def taken(own: bool) -> StoreStats:
            stats = take_stats(
                self.path,
                self.commit_log,
                self.queues,
                self.index_service,
                state.checkpoint_now(),
                *self.consumer_progress(),
                timestamp=self.config.clock(),
                writable=own and state.poison is None,
                disk_full=state.disk_full,
                last_store_timestamp=state.last_store_timestamp or None if own else None,
                flushed_where=max(self._flushing.flushed_where, self.commit_log.min_offset) if own else None,
                undispatched=self.undispatched,
            )
            # Known when all queues were looked at.
            problems = self.damaged_files()
            config = os.path.join(self.path, "config")
            damaged = len(problems)
            # Where the folder is closed, that was counted.
            if stats.consumer_offsets_error is not None and not any(
                (each.path or "").startswith(config) for each in problems
            ):
                damaged += 1
            return dataclasses.replace(stats, damaged_files=damaged)

        return state.settled(ask)

    @property
    def config(self) -> StoreConfig:
        """StoreConfig: the options; of a reader those that it assumed are replaced when files tell them."""
        return self._state.config

    @property
    def consumer_offsets(self) -> ConsumerOffsets:
        """ConsumerOffsets: the progress of consumer groups, read when it is first asked for.

        Commits are persisted every `flush_consumer_offset_interval` ms, by `flush` and by `close`.  Progress that a broker
        keeps in RocksDB is read from there (`rmqstore.settings` says which source counts); commits are refused then, also
        where the store is open for writing: a file of progress beside the database would be one that the broker ignores.

        Raises
        ------
        CorruptionError
            Neither the file nor its backup can be read, or nothing of the database.
        MissingDependencyError
            The progress is in RocksDB, and rocksdict is not installed.
        """
        return self._state.progress.offsets

    def consumer_progress(self) -> tuple[dict[tuple[str, str], dict[int, int]], str | None]:
        """What `consumer_offsets` lists, for an answer that has more to say than that: a damaged file does not end it.

        Returns
        -------
        (dict, str or None)
            As of `ConsumerOffsets.list`, empty where nothing can be read; and what cannot be read: all, or some of it.
        """
        return self._state.progress.list()

    # --------------------------------------------------------------------------------------------------------- put

    @append_first
    def put_message(self, message: Message, queue_id: int = 0) -> PutResult:
        """Append a message; it can be read and found by its keys when this returns.

        Parameters
        ----------
        message : Message
        queue_id : int
            Queue of the topic, 0 to 2**31 - 1.

        Raises
        ------
        InvalidMessageError
            The format cannot hold it or a broker would refuse it; nothing was written.
        DiskFullError, StorePoisonedError, ReadOnlyError, StoreClosedError
            Nothing was written.
        OSError
            A file could not be made (the disk is full, …) and nothing was written; or, with SYNC_FLUSH, the message is
            stored but the disk failed, and the store takes no more writes.
        FlushDiskTimeoutError
            With SYNC_FLUSH: the message is stored, but was not on the disk within `sync_flush_timeout`.
        IndexFileError
            The message is stored, but a new index file could not be created; the store takes no more writes.
        """
        writing = self._for_writing()
        put = writing.put([message], queue_id, together=False)[0]
        writing.learn_end(message, queue_id)
        return put

    def put_messages(self, messages: Iterable[Message], queue_id: int | Sequence[int] = 0) -> PutResults:
        """Append messages in order under one lock and one store time; topics may be mixed.

        Parameters
        ----------
        messages : iterable of Message
        queue_id : int or sequence of int
            For all, or one for each.

        Returns
        -------
        PutResults
            A `PutResult` for each, in order.

        Raises
        ------
        InvalidMessageError
            One of them cannot be stored; none was written then.
        """
        return self._for_writing().put(list(messages), queue_id, together=False)

    def put_message_batch(self, messages: Iterable[Message], queue_id: int = 0) -> PutResults:
        """Append messages of one topic as a classic batch: in one segment, one after the other, in one queue.

        The rules are RocketMQ's for MessageExtBatch (5.5.0): one topic, no retry topic, no delay, no transaction.

        Raises
        ------
        InvalidMessageError
            The messages break these rules, or do not fit a segment together; nothing was written.
        """
        return self._for_writing().put_batch(list(messages), queue_id)

    def put_table(
        self,
        table: Any,
        *,
        topic: str | None = None,
        queue_id: int | None = None,
        keys: Iterable[str] | str | None = None,
        tags: str | None = None,
        properties: Mapping[str, str | None] | None = None,
        flag: int | None = None,
        born_timestamp: int | datetime.datetime | None = None,
        keep_timestamps: bool = False,
    ) -> PutTableResult:
        """Append the rows of an Arrow table in order, each as the message that its columns make.

        Parameters
        ----------
        table : pyarrow.Table, pyarrow.RecordBatch, or anything with Arrow's C stream interface
            Columns named as in a scan (docs/columns.md): topic, queue_id, keys (list of strings, or one string that is
            split at spaces), tags, body, properties (map of strings), flag, born_timestamp (timestamp, or ms since epoch),
            store_timestamp, born_host, store_host, sys_flag, reconsume_times, prepared_transaction_offset.  What is missing
            or null is as a `Message` has it by default, the queue is 0 then.  ``body_stored`` instead of (or beside) body has
            bodies as records hold them, compressed where `sys_flag` says so; without it these bits of `sys_flag` are left
            out.  Columns that the store gives by itself (phy_offset, queue_offset, size, msg_id …) are passed over, so that a
            scanned table can be put; rows that are marked as corrupt are refused.
        topic, queue_id, keys, tags, properties, flag, born_timestamp
            One value for all rows, instead of a column.
        keep_timestamps : bool
            Take the store timestamps from the table instead of the clock; they must not fall, and not lie before the last
            message of the store.

        Returns
        -------
        PutTableResult

        Raises
        ------
        InvalidMessageError
            A row cannot be stored, a column is unknown or missing; nothing was written then.
        TypeError
            A column of a type that cannot hold it; nothing was written.
        DiskFullError, OSError, …
            As of `put_message`; the rows of a large table before the one that it happened at are stored then (8192 rows
            are put at once).
        MissingDependencyError
            pyarrow is not installed.
        """
        if isinstance(born_timestamp, datetime.datetime):
            born_timestamp = int(milliseconds(born_timestamp, "born_timestamp"))
        literals = {
            "topic": topic, "queue_id": queue_id, "keys": keys, "tags": tags, "properties": properties, "flag": flag,
            "born_timestamp": born_timestamp,
        }  # fmt: skip
        return TableWriting(self._for_writing()).put(table, literals, keep_timestamps=keep_timestamps)

    def check_table(
        self,
        table: Any,
        *,
        topic: str | None = None,
        queue_id: int | None = None,
        keys: Iterable[str] | str | None = None,
        tags: str | None = None,
        properties: Mapping[str, str | None] | None = None,
        flag: int | None = None,
        born_timestamp: int | datetime.datetime | None = None,
        keep_timestamps: bool = False,
    ) -> int:
        """Look whether `put_table` would take this table now, and write nothing.

        Parameters
        ----------
        table, topic, queue_id, keys, tags, properties, flag, born_timestamp, keep_timestamps
            As of `put_table`.

        Returns
        -------
        int
            Rows of the table, all of which can be stored.

        Raises
        ------
        InvalidMessageError, TypeError, MissingDependencyError
            As of `put_table`.
        """
        if isinstance(born_timestamp, datetime.datetime):
            born_timestamp = int(milliseconds(born_timestamp, "born_timestamp"))
        literals = {
            "topic": topic, "queue_id": queue_id, "keys": keys, "tags": tags, "properties": properties, "flag": flag,
            "born_timestamp": born_timestamp,
        }  # fmt: skip
        return TableWriting(self._for_writing()).check(table, literals, keep_timestamps=keep_timestamps)

    # -------------------------------------------------------------------------------------------------- get, consume

    @get_first
    def get_message(
        self,
        topic: str,
        queue_id: int = 0,
        queue_offset: int = 0,
        max_num: int = 32,
        tags: str | Iterable[str] | None = None,
        *,
        max_bytes: int | None = None,
    ) -> GetMessageResult:
        """Read messages of a queue from `queue_offset` on.

        The walk is RocketMQ's (5.5.0): it ends with the queue file, so a result may be shorter than `max_num` although
        more follows; go on at `next_queue_offset`.  A record that is damaged, or that says it is another message than its
        unit, is marked as `corrupt`.  The first message is returned whatever the limits.  RocketMQ's limits
        for transfers from memory and disk are not applied.  A store that was opened read-only looks every 5 ms whether a
        writer went on or replaced files, and whenever it would come to the end otherwise: bounds may be as old as that.

        Parameters
        ----------
        tags : str or iterable of str, optional
            Tags to keep: ``"a || b"`` or a list; None, ``""`` and ``"*"`` keep all.  Compared as text.
        max_bytes : int, optional
            Stop before the records together take more, at least 100; 128 MiB by default.

        Returns
        -------
        GetMessageResult
        """
        self._state.check_open()
        max_bytes = None if max_bytes is None else whole_number(max_bytes, "max_bytes")
        selection = of_queue(topic, queue_id, queue_offset, whole_number(max_num, "max_num"), tags)
        return self._state.settled(self._reading.get, selection, max_bytes)

    def topics(self) -> list[str]:
        """list of str: topics that have a queue, sorted."""
        self._state.check_open()
        return self._state.topics()

    def queue_ids(self, topic: str) -> list[int]:
        """list of int: the queues of `topic`, ascending.

        Raises
        ------
        OSError
            None is seen, and the system does not give out a folder in which they may be.
        """
        self._state.check_open()
        topic = one_text(topic, "topic")
        found = [queue_id for name, queue_id in self._state.keys() if name == topic]
        if not found:
            self.queues.check_seen(topic)
        return found

    def min_queue_offset(self, topic: str, queue_id: int = 0) -> int:
        """int: queue offset of the first message that is still there, 0 for an unknown queue."""
        self._state.check_open()
        return self._state.settled(self._reading.bounds_of, *one_queue(topic, queue_id))[0]

    def max_queue_offset(self, topic: str, queue_id: int = 0) -> int:
        """int: queue offset of the next message to come, 0 for an unknown queue."""
        self._state.check_open()
        return self._state.settled(self._reading.bounds_of, *one_queue(topic, queue_id))[1]

    def offset_by_time(self, topic: str, queue_id: int, timestamp: Moment, boundary: Boundary = "lower") -> int:
        """int: queue offset that belongs to a store time.

        Parameters
        ----------
        timestamp : int or datetime
            ms since epoch, or a `datetime` (aware, or naive as local time).
        boundary : {"lower", "upper"}
            "lower": the first message stored at or after `timestamp`, the max offset if there is none; "upper": the last
            one stored at or before it, the min offset if there is none (RocketMQ 5.1.1 and later).  Where the clock went
            back, times fall along a queue, and messages between the two may be of other times.

        Notes
        -----
        The store times of messages are read one after the other until one is found, beginning with the oldest message for
        "lower" and the newest for "upper": half a second to a second for a GiB of log in memory.  Of messages that were read
        the open store remembers the least and the greatest time, 8192 at a time, and skips them by these.

        Raises
        ------
        ValueError
            `timestamp` looks like seconds, see `rmqstore.arguments.milliseconds`; or there is no such `boundary`.
        """
        self._state.check_open()
        timestamp = milliseconds(timestamp, "timestamp", up=boundary == "lower")
        return self._state.settled(self._reading.offset_by_time, *one_queue(topic, queue_id), timestamp, boundary)

    def consume(
        self,
        topic: str,
        group: str,
        *,
        queue_ids: Sequence[int] | None = None,
        tags: str | Iterable[str] | None = None,
        max_num: int = 32,
        consume_from: Literal["first", "last", "progress"] | Moment = "first",
        timeout: float | None = None,
        offsets: ConsumerOffsets | LocalOffsets | None = None,
        broker: str = "",
    ) -> Consumer:
        """The messages of a topic from where the group stopped, one by one; waits for new ones.

        A message counts as consumed when the next one is asked for, or at `Consumer.commit`; until
        then a consumer that dies gets it again (at least once).  Iteration ends when the store is closed.  ``for`` waits in
        a thread, ``async for`` in an event loop (docs/asyncio.md).

        Parameters
        ----------
        topic, group : str
        queue_ids : sequence of int, optional
            Only these queues; by default all, also those that come into being later.
        tags : str or iterable of str, optional
            As of `get_message`.
        max_num : int
            How many messages are fetched at once.
        consume_from : {"first", "last", "progress"}, int or datetime
            Where a group begins that has no progress yet: at the oldest message, after the newest, at a store time in ms
            since epoch or as a `datetime`; or with `offsets` of its own where the store's progress of the group stands
            (`consumer_offsets`), which stays as it is, at the oldest message of a queue where it has none.
        timeout : float, optional
            Seconds after which iteration ends if there is no message; 0 = do not wait; by default it waits for ever.
        offsets : ConsumerOffsets or LocalOffsets, optional
            Where progress is kept instead of the store's own `consumer_offsets`; a reader of a store that another process
            writes to needs one, opened with ``read_only=False``.  It is persisted every `flush_consumer_offset_interval`
            ms and when the consumer is closed.
        broker : str
            The broker's name, for `LocalOffsets`.

        Raises
        ------
        ReadOnlyError
            No `offsets` were given, and the store is read-only or its progress is kept in RocksDB.
        TypeError, ValueError
            A value of another kind, or out of range.
        """
        from rmqstore.consumer.consumer import Consumer, Progress, Wanted

        self._state.check_open()
        topic, group, broker = one_text(topic, "topic"), one_text(group, "group"), one_text(broker, "broker")
        chosen = whole_numbers(queue_ids, "queue_ids", -(2**31), 2**31 - 1)
        if offsets is None:
            if self.read_only:
                raise ReadOnlyError(
                    "a store that was opened read-only cannot keep progress; give offsets=ConsumerOffsets.load(a path of "
                    "yours, read_only=False)",
                    self.path,
                )
            self._state.check_writable()
            self.consumer_offsets.check_writable()
        wanted = Wanted(chosen, given_tags(tags), whole_number(max_num, "max_num"), consume_from, timeout)
        interval = None if offsets is None else self.config.flush_consumer_offset_interval
        progress = Progress(self.consumer_offsets if offsets is None else offsets, group, topic, broker, interval)
        return Consumer(self, wanted, progress)

    def wait_for_messages(self, is_there: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `is_there` says so; asked again after every put, or in a read-only store after pauses.

        Parameters
        ----------
        is_there : callable
            Without arguments; must not wait itself.
        timeout : float, optional
            Seconds.

        Returns
        -------
        bool
            False if the time is over or the store was closed.
        """
        self._state.check_open()
        return self._reading.wait_for_messages(is_there, timeout)

    async def wait_for_messages_async(self, is_there: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait in an event loop as `wait_for_messages` does in a thread; no thread waits (docs/asyncio.md).

        A put in any thread of this process wakes the loop; a read-only store is looked at after pauses.  Any number may wait, and
        each may be cancelled.

        Parameters
        ----------
        is_there : callable
            Without arguments, called in the loop's thread; must not wait itself.
        timeout : float, optional
            Seconds.

        Returns
        -------
        bool
            False if the time is over or the store was closed.

        Raises
        ------
        StoreClosedError
            The store was closed before.
        """
        return await self._reading.wait_for_messages_async(is_there, timeout)

    # --------------------------------------------------------------------------------------------- look up, query

    def message_at(self, phy_offset: int) -> MessageExt:
        """The message whose record begins at `phy_offset`.

        Raises
        ------
        OffsetOutOfRangeError
            The offset is outside the log.
        CorruptionError
            No record begins there.
        ChecksumError
            A CRC does not agree.
        """
        self._state.check_open()
        if type(phy_offset) is not int:
            phy_offset = whole_number(phy_offset, "phy_offset")
        return self.commit_log.message_at(phy_offset)

    def message_by_id(self, msg_id: str, topic: str | None = None) -> MessageExt:
        """The message with this offset message id (32 or 56 hex digits), or with this producer's id (property UNIQ_KEY).

        Parameters
        ----------
        topic : str, optional
            Where a producer's id is looked for; by default in every topic that has a queue, as it is indexed by topic.

        Raises
        ------
        InvalidMessageError
            The text is not an offset message id, and no message has it as the producer's id.
        OffsetOutOfRangeError, CorruptionError, ChecksumError
            As of `message_at`, where no message has it as the producer's id.
        OSError
            It was not found, and a folder of queues cannot be looked into: it may be of a topic there.
        """
        if self.tiered is None:
            return self.commit_log.message_at(self.phy_offset_by_id(msg_id, topic))
        try:
            return self.commit_log.message_at(self.phy_offset_by_id(msg_id, topic))
        except (InvalidMessageError, OffsetOutOfRangeError):
            for name in self.topics() if topic is None else [topic]:
                for message in self.tiered.find_messages(name, msg_id, "U"):
                    return message
            raise

    def phy_offset_by_id(self, msg_id: str, topic: str | None = None) -> int:
        """int: phy offset of the message that `message_by_id` gives, damaged or not; parameters and errors are the same.

        Both kinds of id have 32 hex digits.  A record at the place that an offset message id names must have that id;
        otherwise the id is looked for as a producer's, and counts as an offset message id again if no message has it (the
        broker's address may have been another when the id was made).
        """
        self._state.check_open()
        topic = None if topic is None else one_text(topic, "topic")
        return self._querying.phy_offset_by_id(one_text(msg_id, "msg_id"), topic)

    @query_first
    def query_message(
        self,
        topic: str,
        key: str,
        max_num: int = 64,
        begin: Moment | None = None,
        end: Moment | None = None,
        max_log_bytes: int | None = DEFAULT_LOG_BYTES,
        progress: Callable[[int, int], object] | None = None,
        *,
        index_type: IndexType | None = None,
        compat: bool = False,
    ) -> QueryResult:
        """Find messages by key.

        The index are index files, or RocksDB where a broker has it there (``indexRocksDBEnable``), or both: both are asked
        then.  What the index does not cover is looked for in the log: an index file is gone or damaged, or the broker died
        before it indexed the newest records.  That part of the log is gone over once while the store is open, and remembered.
        RocksDB has no entry of a record without a unique key: a segment with such records at its beginning is looked through.

        Parameters
        ----------
        topic, key : str
            A key, a unique key, or with ``index_type="T"`` a tag.
        max_num : int
            At most so many; any number.
        begin, end : int or datetime, optional
            Store time range, inclusive and exact: ms since epoch, or a `datetime` (aware, or naive as local time).
        index_type : {None, "U", "K", "T"}
            None: unique key or keys; "U" only the unique key, "K" only the keys, "T" the tag.
        compat : bool
            Answer as RocketMQ's ``queryMessage`` (5.5.0) does: at most 64, ascending offsets, duplicates and messages
            with other keys of the same hash included, times compared by whole seconds.  The log is not searched.  Where
            the index is in RocksDB alone: the oldest where there are more, keys that go on after an ``@`` included, nothing
            for more than 7 days, the last 7 days without `begin` or `end`; completed by what the log has beyond it, as by a
            broker's start.
        max_log_bytes : int, optional
            Go over at most so many bytes of the log that the index does not cover; None = all of them.
        progress : callable, optional
            Told how many bytes of these were gone over, and how many there are.

        Returns
        -------
        QueryResult
            Newest first, each once, every one checked against its topic and key; `truncated` when there are more, not
            `complete` where a part of the log was not looked at.

        Raises
        ------
        ValueError
            A time looks like seconds, see `rmqstore.arguments.milliseconds`; or there is no such `index_type`.
        MissingDependencyError
            The index is in RocksDB, rocksdict is not installed, and the log alone does not tell.
        """
        self._state.check_open()
        selection = of_key(topic, key, max_num, begin, end, index_type)
        max_log_bytes = None if max_log_bytes is None else whole_number(max_log_bytes, "max_log_bytes")
        if compat:
            return self._querying.like_java(selection)
        return self._querying.query(selection, LogLook(max_log_bytes, progress))

    def query_offsets(
        self,
        topic: str,
        key: str,
        max_num: int = 64,
        begin: Moment = 0,
        end: Moment = INT64_MAX,
        *,
        index_type: IndexType | None = None,
    ) -> list[int]:
        """list of int: what RocketMQ's index service (5.5.0) answers: phy offsets, newest first, quirks included.

        Parameters
        ----------
        begin, end : int or datetime
            Store time range as of `query_message`, compared by whole seconds.
        index_type : {None, "U", "K", "T"}
            "T" asks for a tag; unique keys and keys share one form.
        """
        self._state.check_open()
        for name, moment in (("begin", begin), ("end", end)):
            # None has no meaning here.
            milliseconds(moment, name)
        return self._querying.offsets(of_key(topic, key, max_num, begin, end, index_type)).phy_offsets

    # ------------------------------------------------------------------------------------------- the log, columns

    def messages(self, begin_phy_offset: int | None = None, end_phy_offset: int | None = None) -> Iterator[MessageExt]:
        """Every message of the log in order; damaged stretches are passed over (`verify` reports them).

        A segment that is missing, or that retention deletes meanwhile, is named in a warning.
        """
        state = self._state
        state.check_open()
        begin_phy_offset = _offset(begin_phy_offset, "begin_phy_offset")
        end_phy_offset = _offset(end_phy_offset, "end_phy_offset")
        if self.read_only:
            self.commit_log.refresh()
        log = self.commit_log
        for page in log.pages(begin_phy_offset, end_phy_offset, on_missing=log.warn_of_missing):
            if isinstance(page, list):
                for message in page:
                    yield message
                    # The log reads ahead, and what it has read must not outlive the store.
                    if state.closed:
                        state.check_open()

    def scan(
        self,
        columns: Iterable[str] | None = None,
        *,
        topic: str | Iterable[str] | None = None,
        queue_id: int | Iterable[int] | None = None,
        tags: str | Iterable[str] | None = None,
        begin_phy_offset: int | None = None,
        end_phy_offset: int | None = None,
        begin: Moment | None = None,
        end: Moment | None = None,
        batch_size: int = 8192,
        use_threads: bool = True,
        views: bool = False,
        read_dictionary: Iterable[str] = (),
    ) -> pa.RecordBatchReader:
        """The messages of the log in order, as Arrow record batches in which only the asked columns are decoded.

        A row equals the message that `messages` gives; docs/columns.md has the columns and their types.  What was put
        after the call is not in it.  The GIL is released for each batch.  A store with tiered storage gives first, queue by
        queue, what only that has; phy offsets of these rows count in the tiered log of their queue.

        Parameters
        ----------
        columns : iterable of str, optional
            Names, in the order of the result; by default `rmqstore.store.columns.DEFAULT_COLUMNS`.
        topic : str or iterable of str, optional
            Only these topics; likewise below.  A light queue (``%LMQ%...``) is none: `get_table` reads it.
        queue_id : int or iterable of int, optional
        tags : str or iterable of str, optional
            As of `get_message`.
        begin_phy_offset, end_phy_offset : int, optional
            Records that begin at or after the first and before the second; with either, of the local log alone.
        begin, end : int or datetime, optional
            Store time range, both inclusive: ms since epoch, or a `datetime` (aware, or naive as local time).
        batch_size : int
            Rows of a batch at most, 1 to 2**30; a batch ends earlier when its bodies and properties take 64 MiB.
        use_threads : bool
            Decode a log of more than a few MiB ahead of the caller, on as many processors as this process may use, at most
            four.  Rows and their order are those of one thread; where batches end may differ.  The threads start after
            the first batch and end with the rows, or when the reader is dropped.
        views : bool
            Do not copy texts and bytes: the types become ``string_view`` and ``binary_view``, and the values lead into the
            mapped segments.  A batch, and whatever is made of it without a copy, keeps its segments mapped for as long as
            it lives, also after `close` and after retention deleted the file (docs/mmap.md).  Text that is not UTF-8,
            decompressed bodies, hosts and message ids stand in memory of the batch.
        read_dictionary : iterable of str
            Columns that become dictionaries, as many rows share few values: of "topic", "tags", "born_host",
            "store_host".  Each batch has a dictionary of its own.

        Returns
        -------
        pyarrow.RecordBatchReader
            To iterate over, for `read_all`, and for whatever takes an Arrow stream: pandas, Polars, DuckDB.  No record
            batch of it is empty.  A record that does not agree with its CRC is a row with ``corrupt`` set and its body
            as it is stored; damaged stretches are passed over (`verify` reports them).  Its `close` does nothing.

        Raises
        ------
        ValueError
            A column that does not exist, a number out of range, or a time that looks like seconds.
        UnsupportedFormatError
            A topic is a light queue.
        MissingDependencyError
            pyarrow is not installed, or too old for `views`; while reading, the library that a body was compressed with is not.
        StoreClosedError
            The store was closed; also while reading.  Arrow's stream interface carries errors as text: a library that
            reads by it raises its own exception with that text.
        """
        state = self._state
        state.check_open()
        batch_size = whole_number(batch_size, "batch_size")
        if not 1 <= batch_size <= 1 << 30:
            raise ValueError(f"batch_size is {batch_size} rows; give 1 to 2**30")
        selection = dataclasses.replace(
            of_scan(topic, queue_id, tags, begin, end),
            begin_phy_offset=_offset(begin_phy_offset, "begin_phy_offset"),
            end_phy_offset=_offset(end_phy_offset, "end_phy_offset"),
        )
        refuse_light_queues(self.commit_log, state.queue, selection.topics)
        options = ColumnOptions(columns, batch_size, views, read_dictionary)
        if self.tiered is not None and selection.begin_phy_offset is None and selection.end_phy_offset is None:
            from rmqstore.store.tiered_scan import scan_both

            return scan_both(state, self.tiered, selection, options, use_threads=use_threads)
        return scan_log(self.commit_log, selection, options, use_threads=use_threads, refresh=self.read_only)

    def get_table(
        self,
        topic: str,
        queue_id: int = 0,
        queue_offset: int = 0,
        max_num: int | None = None,
        tags: str | Iterable[str] | None = None,
        columns: Iterable[str] | None = None,
        *,
        views: bool = False,
    ) -> pa.Table:
        """Messages of a queue from `queue_offset` on, in queue order, as an Arrow table.

        Parameters
        ----------
        queue_offset : int
            Where to begin; the oldest message that is still there, if this one is gone.
        max_num : int, optional
            At most so many rows; by default up to the end of the queue.
        tags : str or iterable of str, optional
            As of `get_message`.
        columns : iterable of str, optional
            As of `scan`.
        views : bool
            As of `scan`.

        Returns
        -------
        pyarrow.Table
            Fewer than `max_num` rows mean that the end of the queue was reached; otherwise go on after the last row's
            ``queue_offset``.  An unknown queue has no rows.  A record of an inner batch is one row.

        Raises
        ------
        ValueError, MissingDependencyError
            As of `scan`.
        """
        state = self._state
        state.check_open()
        selection = of_queue(topic, queue_id, queue_offset, row_num(max_num), tags)
        return state.settled(self._reading.table, selection, table_options(selection, columns, views))

    def query_table(
        self,
        keys: Any,
        topic: str | Iterable[str],
        columns: Iterable[str] | None = None,
        max_num: int = 64,
        begin: Moment | None = None,
        end: Moment | None = None,
        *,
        index_type: IndexType | None = None,
        max_log_bytes: int | None = DEFAULT_LOG_BYTES,
        progress: Callable[[int, int], object] | None = None,
        views: bool = False,
    ) -> pa.Table:
        """Find the messages of many keys at once, each key as by `query_message`, as an Arrow table.

        Parameters
        ----------
        keys : sequence of str, or pyarrow array of strings
            Keys, unique keys, or with ``index_type="T"`` tags.
        topic : str or sequence of str
            The topic of all keys, or one for each.
        columns : iterable of str, optional
            As of `scan`.
        max_num : int
            At most so many rows for each key.
        begin, end : int or datetime, optional
            Store time range, inclusive and exact, as of `query_message`.
        index_type : {None, "U", "K", "T"}
            As of `query_message`.
        views : bool
            As of `scan`.

        Returns
        -------
        pyarrow.Table
            The columns ``key`` (the text that was asked for) and ``key_number`` (its place among `keys`), then the asked
            ones.  Rows are ordered as the keys are, and of one key the newest message comes first, each once; a key
            without messages has no row, a message that several keys find has a row for each.

        Raises
        ------
        TypeError
            A key that is not text.
        ValueError, MissingDependencyError
            As of `scan`.
        """
        self._state.check_open()
        selection = Selection(
            begin=begin, end=end, index_type=index_type, max_num=min(whole_number(max_num, "max_num"), INT64_MAX)
        ).check_times()
        for name, given in (("keys", keys), ("topic", topic)):
            # What is in an array of Arrow is looked at where it is read.
            if not isinstance(given, Iterable) or isinstance(given, (bytes, bytearray)):
                raise TypeError(f"{name} is {shown(given)}; give a text, or several")
        max_log_bytes = None if max_log_bytes is None else whole_number(max_log_bytes, "max_log_bytes")
        options = ColumnOptions(columns, views=views)
        return self._querying.table(keys, topic, selection, options, LogLook(max_log_bytes, progress))
