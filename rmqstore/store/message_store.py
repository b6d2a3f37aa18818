"""MessageStore: a directory of messages, opened for writing or only for reading.

- A read-only open creates nothing, locks nothing and maps read-only (I7); it works next to a running broker.
- A writable store is held by one process, and by one `MessageStore` in it: an exclusive POSIX lock on byte 0 of ``lock``,
  taken before recovery.  A Java broker and this store exclude each other.
- Locks are taken in this order: closing, flushing, appending; the append lock is never held while waiting for a flush.
"""

from __future__ import annotations

import datetime
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rmqstore.arguments import Moment, Recovery, given_tags, one_text, whole_number, whole_numbers
from rmqstore.commitlog.commit_log import check_store_root
from rmqstore.config import StoreConfig
from rmqstore.config.places import refuse_dledger, refuse_other_log
from rmqstore.errors import ReadOnlyError, StoreError
from rmqstore.files.durable import make_directories
from rmqstore.files.mapped_file import NotCopied
from rmqstore.files.store_lock import ClosedAtExit, StoreLock
from rmqstore.message import Message, MessageExt
from rmqstore.store.async_puts import AsyncPuts
from rmqstore.store.condition import StoreCondition
from rmqstore.store.flushing import Flushing
from rmqstore.store.opening import (
    Closing,
    check_has_store,
    close_forgotten,
    config_to_read,
    config_to_write,
    is_swapping,
    older_of,
    recover_state,
    refuse_rocksdb,
    save_changed,
    wait_for_store,
    warn_of_dledger,
    warn_of_swapping,
)
from rmqstore.store.querying import LogQuestions, Querying
from rmqstore.store.reading import QueueQuestions, queue_gets
from rmqstore.store.recovery import RECOVERY_MODES, RecoveryReport
from rmqstore.store.results import PutResult, PutResults, PutTableResult
from rmqstore.store.retention import RetentionReport
from rmqstore.store.store_state import StoreState
from rmqstore.store.table_writing import TableWriting
from rmqstore.store.upkeep import Upkeep
from rmqstore.store.writing import Writing

if TYPE_CHECKING:
    # Imported where they are used, as few programs use them.
    from rmqstore.consumer.consumer import Consumer
    from rmqstore.consumer.consumer_offset import ConsumerOffsets
    from rmqstore.flatfile.flat_store import FlatStore

__all__ = ["MessageStore"]


_open_stores: weakref.WeakSet[MessageStore] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # Locks held by another thread of the parent are never released here.
    for store in list(_open_stores):
        store._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class MessageStore(QueueQuestions, LogQuestions, StoreCondition, AsyncPuts, ClosedAtExit, NotCopied):
    """An open store. Create it with `MessageStore.open` and close it, preferably with ``with``.

    A store that is open for writing and not closed is closed when the program ends, or, if it is garbage-collected before, by
    its own thread; a ResourceWarning names its path.

    Any number of threads may share it: reads run side by side, puts one after the other under the append lock.  `close` may
    be called at any moment; calls that it meets end or raise StoreClosedError.  Messages, batches and views outlive it.

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
        The index in RocksDB, where a broker keeps one.
    recovery_report : RecoveryReport or None
        The report of the recovery at opening for writing; None when read-only.
    older : Older
        The messages that the log no longer has.
    tiered : FlatStore or None
        The broker's tiered storage, where it was opened with one.
    """

    _state: StoreState

    def __init__(self, *arguments: object, **options: object) -> None:
        raise TypeError("a store is made by opening it: use MessageStore.open(path)")

    def _take(
        self, path: str, config: StoreConfig, *, read_only: bool, tiered: str | os.PathLike[str] | FlatStore | None
    ) -> None:
        # Makes the parts of an instance for `open`, which loads them.
        state = self._state = StoreState(path, config, read_only=read_only)
        self.path = path
        self.read_only = read_only
        self.recovery_report: RecoveryReport | None = None
        self.commit_log, self.queues, self.index_service = state.commit_log, state.queues, state.index_service
        self.database_index = state.database_index
        self._flushing = Flushing(state)
        self.older = state.older = older_of(state, tiered)
        self.tiered = self.older.flat_store
        state.queue_gets, self._querying = queue_gets(state), Querying(state)
        # Readers need no writing, nor the NumPy it imports.
        self._writing = None if read_only else Writing(state, self._flushing)
        self._closing = Closing(state, self._flushing)
        self._begin_async_puts()

    def _after_fork(self) -> None:
        self._begin_async_puts()
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
        reconfigure: bool = False,
        wait: float = 0,
        tiered: str | os.PathLike[str] | FlatStore | None = None,
    ) -> MessageStore:
        """Open the store in directory `path`; for writing it is recovered, or created if it does not exist.

        Parameters
        ----------
        path : path
            The store's root (RocketMQ's storePathRootDir).
        config : StoreConfig, optional
            By default the options that the store was made with (`StoreConfig.infer`), RocketMQ's defaults for a new store.
            Options left at their defaults, sizes excepted, take the saved values.
        read_only : bool
            Change nothing and lock nothing; works on a broker's store, also while the broker runs.
        create : bool
            With False a path without a store is an error, so that a mistyped one creates nothing.
        recovery : {"strict", "truncate", "skip"}
            What to do if the log is damaged before whole records, see `rmqstore.store.recovery.recover`.
        drop_units : int
            How many queue units and index entries that point outside the log may be dropped; the error has the number.
        reconfigure : bool
            Take over and save a `config` that differs from the saved one; sizes of files that exist cannot change.
        wait : float
            Seconds to wait for a writer to make the store (read-only).
        tiered : path, optional
            The broker's tieredStoreFilePath: what the local log no longer has is read from there, by queue, by key and in
            scans, as one store (docs/tiered.md).  Only read-only.

        Raises
        ------
        StoreLockedError
            Another process (maybe a broker), or this one, has it open for writing.
        GeometryError
            Files do not fit the config, or do not belong there; `config` contradicts the saved options.
        CorruptionError
            The log is damaged in the middle; nothing was changed.
        LostLogError
            Segments are missing that queues or index point to; nothing was changed.
        StoreNotFoundError
            There is no store, and this call creates none (``read_only=True`` or ``create=False``).
        UnsupportedFormatError
            The queues are in RocksDB (storeType=defaultRocksDB), which can only be read; or the commit log is DLedger's
            (enableDLegerCommitLog), of which only what is before it can be read.
        MissingDependencyError
            rocksdict is needed and not installed (``pip install rmqstore[rocksdb]``).
        """
        if recovery not in RECOVERY_MODES:
            raise ValueError(f"recovery is {recovery!r}; give one of {', '.join(RECOVERY_MODES)}")
        # Files are opened later, maybe after a change of the working directory.
        root = os.path.abspath(os.fspath(path))
        if wait and not read_only:
            raise ValueError("wait is for read_only=True; a writer creates the store")
        if reconfigure and read_only:
            raise ValueError("reconfigure is for writing; a reader changes nothing")
        if read_only:
            wait_for_store(root, wait, tiered)
            check_store_root(root)
            warn_of_swapping(root)
            store = cls.__new__(cls)
            store._take(root, config or config_to_read(root, tiered), read_only=True, tiered=tiered)
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
            config = config_to_write(root, config, reconfigure)
            store = cls.__new__(cls)
            store._take(root, config, read_only=False, tiered=tiered)
            store._closing.store_lock = store_lock
            try:
                store._state.load()
                store.recovery_report = recover_state(store._state, store._flushing, recovery, drop_units)
                if reconfigure:
                    save_changed(root, config)
                _open_stores.add(store)
                writing = store._for_writing()
                writing.enable_writes()
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
        """Force everything to the disk and release the store; closing twice does nothing.

        Raises
        ------
        OSError
            The last flush, or writing the consumer progress, failed.  As after every failed write, the ``abort`` file stays,
            and the next opening recovers.
        """
        try:
            self._closing.close()
        finally:
            # The next call, or the end of the program, finishes a close that was interrupted.
            if self._closing.done:
                self._end_async_puts()
                self._note_closed()

    def _when_forgotten(self) -> None:
        self._closing.forget()

    @property
    def _upkeep(self) -> Upkeep | None:
        return self._closing.upkeep

    @property
    def _store_lock(self) -> StoreLock | None:
        return self._closing.store_lock

    def __enter__(self) -> MessageStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._state.closed else "read-only" if self.read_only else "open"
        return f"MessageStore({self.path!r}, {state})"

    def _repr_html_(self) -> str:
        # For notebooks; it reads no file that is not open anyway.
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

    # ----------------------------------------------------------------------------------------------------------- disk

    def flush(self) -> None:
        """Force everything that was put to the disk: the log, queues and index, the checkpoint, consumer progress.

        Puts continue while this runs; what is put after the call began may or may not be forced.

        Raises
        ------
        OSError
            The operating system could not write; later writes are refused.
        """
        self._state.check_writable()
        with self._flushing.lock:
            self._state.check_writable()
            self._flushing.flush_all()
        self._state.progress.persist()

    def refresh(self) -> None:
        """Pick up changes made by other processes; a store that is open for writing is always up to date.

        A reader also does this by itself before it answers that there is nothing: at the end of the log or of a queue, for an
        unknown queue, and when an index file is full.  What a writer has only in its own memory (a broker with
        transientStorePoolEnable) is not seen before it is committed.

        Raises
        ------
        StoreChangedError
            Records that were read before are gone: the writer recovered and cut the log, or replaced it.
        """
        self._state.refresh(uploads=True)

    def delete_expired_files(self) -> RetentionReport:
        """Delete expired files now; a thread does so by itself in the hours of `delete_when`.

        Segments expire `file_reserved_time` hours after they were last written, the newest never.  Where the disk is used
        above `disk_space_clean_forcibly_ratio` the oldest ones are deleted whatever their age (unless
        `clean_file_forcibly_enable` is off).  Queue and index files follow when everything they point to is gone.  At most
        `delete_file_batch_max` segments a call.  The rules are RocketMQ's (5.5.0); ``clean_resource_interval=0`` switches the
        thread's part off.

        Raises
        ------
        OSError
            A file could not be deleted.
        """
        self._state.check_writable()
        assert self._upkeep is not None
        return self._upkeep.delete_expired_files(True, lambda milliseconds: True)

    # ------------------------------------------------------------------------------------------------------------ put

    def put_message(self, message: Message | MessageExt, queue_id: int = 0) -> PutResult:
        """Append a message; it can be read and found by its keys when this returns.

        Parameters
        ----------
        message : Message or MessageExt
            One that was read is put again as it was sent.
        queue_id : int
            Queue of the topic, 0 to 2**31 - 1.

        Raises
        ------
        InvalidMessageError
            The format cannot hold it or a broker would refuse it; nothing was written.
        DiskFullError, StorePoisonedError, ReadOnlyError, StoreClosedError
            Nothing was written.
        OSError
            A file could not be created (the disk is full, …) and nothing was written; or, with SYNC_FLUSH, the message is
            stored but the disk failed, and the store refuses writes from then on.
        FlushDiskTimeoutError
            With SYNC_FLUSH: the message is stored, but was not on the disk within `sync_flush_timeout`.
        IndexFileError
            The message is stored, but a new index file could not be created; the store refuses writes from then on.
        """
        appender = self._state.appender
        put: PutResult | None = None if appender is None else appender.put(message, queue_id)
        if put is not None:
            return put
        writing = self._for_writing()
        put = writing.put([message], queue_id)[0]
        writing.note_ends(message, queue_id)
        return put

    def put_messages(self, messages: Iterable[Message | MessageExt], queue_id: int | Sequence[int] = 0) -> PutResults:
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
            One of them cannot be stored; none was written.  Other errors as for `put_message`.
        """
        return self._for_writing().put(list(messages), queue_id)

    def put_message_batch(self, messages: Iterable[Message | MessageExt], queue_id: int = 0) -> PutResults:
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
            Columns named as in a scan (docs/columns.md): topic, queue_id, keys (list of strings, or one string that is split
            at spaces), tags, body, properties (map of strings), flag, born_timestamp (timestamp, or ms since epoch),
            store_timestamp, born_host, store_host, sys_flag, reconsume_times, prepared_transaction_offset.  What is missing or
            null has the default of `Message`, queue 0.  ``body_stored`` instead of body holds bodies as stored, compressed where
            `sys_flag` says so; without it these bits of `sys_flag` are ignored.  Columns that the store fills by itself
            (phy_offset, queue_offset, size, msg_id …) are ignored, so that a scanned table can be put; rows that are marked as
            corrupt are refused.
        topic, queue_id, keys, tags, properties, flag, born_timestamp
            One value for all rows, instead of a column.
        keep_timestamps : bool
            Take the store timestamps from the table; they must ascend, beginning with that of the store's last message.

        Raises
        ------
        InvalidMessageError
            A row cannot be stored, a column is unknown or missing; nothing was written.
        TypeError
            A column has a type that cannot hold it; nothing was written.
        DiskFullError, OSError, …
            As for `put_message`; earlier rows of a large table are stored then (8192 rows are put at once).
        MissingDependencyError
            pyarrow is not installed.
        """
        return TableWriting(self._for_writing()).put(
            table,
            {
                "topic": topic, "queue_id": queue_id, "keys": keys, "tags": tags, "properties": properties, "flag": flag,
                "born_timestamp": born_timestamp,
            },
            keep_timestamps=keep_timestamps,
        )  # fmt: skip

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
        """Check whether `put_table` would take this table now, without writing; parameters and errors are the same.

        Returns
        -------
        int
            Rows of the table, all of which can be stored.
        """
        return TableWriting(self._for_writing()).check(
            table,
            {
                "topic": topic, "queue_id": queue_id, "keys": keys, "tags": tags, "properties": properties, "flag": flag,
                "born_timestamp": born_timestamp,
            },
            keep_timestamps=keep_timestamps,
        )  # fmt: skip

    # -------------------------------------------------------------------------------------------------------- consume

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
        commit: Literal["each", "interval"] = "interval",
        offsets: ConsumerOffsets | None = None,
    ) -> Consumer:
        """Iterate over the messages of a topic from where the group stopped, and wait for new ones.

        A message counts as consumed when the next one is asked for, or at `Consumer.commit`; a consumer that dies before gets
        it again (at least once).  Iteration ends when the store is closed.  ``for`` waits in a thread, ``async for`` in an
        event loop (docs/asyncio.md).

        Parameters
        ----------
        queue_ids : sequence of int, optional
            Only these queues; by default all, also those that are created later.
        tags : str or iterable of str, optional
            As for `get_message`.
        max_num : int
            The number of messages to read at once.
        consume_from : {"first", "last", "progress"}, int or datetime
            The start of a group without progress: at the oldest message, after the newest, at a store time; or, with
            `offsets`, at the group's progress in the store (`consumer_offsets`), which is not changed, or else the oldest.
        timeout : float, optional
            Seconds after which iteration ends if there is no message; 0 = do not wait; by default it waits forever.
        commit : {"interval", "each"}
            Write progress to disk every `flush_consumer_offset_interval` ms, or at each message.  After a kill the messages
            since then come again: those of the interval, or the one that was being processed.
        offsets : ConsumerOffsets, optional
            The progress to use instead of `consumer_offsets`; a reader of a store that another process writes to needs one,
            opened with ``read_only=False``.  It is persisted every `flush_consumer_offset_interval` ms and at the end.

        Raises
        ------
        ReadOnlyError
            No `offsets` were given, and the store is read-only or its progress is kept in RocksDB.
        TypeError, ValueError
            A value of another kind, or out of range.
        """
        from rmqstore.consumer.consumer import Consumer, Wanted

        self._state.check_open()
        topic, group = one_text(topic, "topic"), one_text(group, "group")
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
        wanted = Wanted(chosen, given_tags(tags), whole_number(max_num, "max_num"), consume_from, timeout, commit)
        return Consumer(self, topic, group, wanted, offsets)
