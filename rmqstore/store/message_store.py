"""MessageStore: a directory that holds messages, opened for writing or only for reading.

Owns the life of a store (lock, abort file, recovery, checkpoint, orderly close) and the operations that users meet: put,
get, query, look up.  The bytes and files of each part belong to the modules below it.  Invariants:

- A read-only open creates nothing, locks nothing and maps read-only (I7); it works beside a running broker.
- A writable store is held by one process, and by one `MessageStore` in it: an exclusive POSIX lock on byte 0 of ``lock``,
  taken before recovery.  A Java broker and this store exclude each other.
- A message is dispatched to its queue and the index before the put returns, so what was put can be read at once.
- With SYNC_FLUSH a put returns after its record is on the disk; puts of many threads share one flush (group commit).
- After a failed write or flush no more writes are taken; ``abort`` then stays, and the next opening mends what is missing.
- Nobody waits for the disk while holding the append lock: what to flush is noted under it and forced outside.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import os
import random
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, TypeVar, overload

from rmqstore import _append, _core, _read
from rmqstore import _numpy as np
from rmqstore._append import Appender, FileEnd, RowBatch
from rmqstore._columns import RecordColumns
from rmqstore._core import KeyKind
from rmqstore._read import KeyQuery, KeySearch
from rmqstore.commitlog.commit_log import CommitLog, check_store_root
from rmqstore.config import StoreConfig
from rmqstore.consumequeue.consume_queue import BatchConsumeQueue, ConsumeQueue, Unit
from rmqstore.consumequeue.consume_queue_store import AnyConsumeQueue, ConsumeQueueStore
from rmqstore.errors import (
    DiskFullError,
    FlushDiskTimeoutError,
    GeometryError,
    InvalidMessageError,
    OffsetOutOfRangeError,
    ReadOnlyError,
    StoreChangedError,
    StoreClosedError,
    StoreError,
    StoreLockedError,
    StorePoisonedError,
)
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.files.mapped_file import (
    STAGING_PREFIX,
    MappedFilePool,
    NotCopied,
    fsync_directory,
    fsync_tree,
    make_directories,
    naming_errors,
    open_regular,
)
from rmqstore.files.store_lock import StoreLock
from rmqstore.index.index_file import IndexFile
from rmqstore.index.index_service import IndexService, QueryOffsetResult
from rmqstore.index.log_index import DEFAULT_LOG_BYTES, LogIndex
from rmqstore.message import (
    MAX_PROPERTIES_SIZE,
    MAX_RETRY_TOPIC_LENGTH,
    MAX_TOPIC_LENGTH,
    Message,
    MessageExt,
    SysFlag,
    decode_java_utf8,
    encode_java_utf8,
    host_to_bytes,
    offset_message_id,
    parse_message_id,
    properties_to_bytes,
    tags_code,
)
from rmqstore.store.columns import (
    Columns,
    chosen_columns,
    doubt_entries,
    key_table,
    queue_table,
    record_batches,
    time_range,
)
from rmqstore.store.dispatcher import CommitLogDispatcher, IndexProgress, multi_dispatch_allowed
from rmqstore.store.housekeeping import Housekeeping, Task
from rmqstore.store.populating import PopulateAhead
from rmqstore.store.recovery import RECOVERY_MODES, RecoveryReport, recover
from rmqstore.store.retention import DiskSpace, RetentionReport, delete_expired_files, used_ratio
from rmqstore.store.table_rows import TablePart, table_parts
from rmqstore.store.undispatched import Undispatched

if TYPE_CHECKING:
    import pyarrow as pa

    # Imported where they are used, as few programs use them.
    from rmqstore.consumer.consumer import Consumer
    from rmqstore.consumer.consumer_offset import ConsumerOffsets
    from rmqstore.consumer.local_offsets import LocalOffsets
    from rmqstore.store.stats import StoreStats

__all__ = [
    "GetMessageResult",
    "GetMessageStatus",
    "MessageStore",
    "PutResult",
    "PutResults",
    "PutTableResult",
    "QueryResult",
]

logger = logging.getLogger(__name__)

_INT64_MAX = 2**63 - 1
_INT64_MIN = -(2**63)
_UNIT_SIZE = int(_core.UnitLayout.UNIT_SIZE)
# RocketMQ 5.5.0 examines at most 16000 bytes of units in one get (MessageStoreConfig.maxFilterMessageSize).
_EXAMINED = 16000 // 20
_MAX_PULL_BYTES = 128 * 1024 * 1024
_MIN_PULL_BYTES = 100
# What a record may take beside its body (RocketMQ: maxMessageSize + 64 KiB).
_RECORD_OVERHEAD = 65536
_SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
# From so many messages on a put dispatches from the log in one pass instead of message by message.
_DISPATCH_BY_COLUMNS = 8
# Plain numbers: operations on the enum's members cost more than everything around them.
_TRANSACTION_MASK = int(SysFlag.TRANSACTION_MASK)
_TRANSACTION_COMMIT = int(SysFlag.TRANSACTION_COMMIT)
_TRANSACTION_ROLLBACK = int(SysFlag.TRANSACTION_ROLLBACK)
_INNER_BATCH = int(SysFlag.INNER_BATCH)
_NOTHING_INDEXED = IndexProgress()
_NO_TIMESTAMPS = array("q")
# What `RowBatch` says of a row that it does not take: its topic or queue is new to it.
_NEW_QUEUE = -2
_UNSOUND = -3
# Rows of a table that are put at once: their layout stays in the processor's cache, and other writers get their turn.
_TABLE_ROWS = 8192
_PAGE = 4096
# Files smaller than this are made when they are needed; larger ones beforehand, from this part of the one before on.
_PREPARE_FROM_SIZE = 1 << 20
_PREPARE_AT = 0.5
# RocketMQ 5.5.0 persists consumer progress for the first time after 10 s and looks for expired files after 60 s.
_FIRST_PERSIST = 10_000
_FIRST_CLEAN = 60_000
_HOLD_INTERVAL = 10_000
# A reader beside a writer looks so often (seconds) whether files that have its answer were replaced, or go further.
_LOOK_INTERVAL = 0.005
# So often a question is asked again when a file went meanwhile.
_TRIES = 3
_KEY_KINDS = {
    None: int(KeyKind.ANY_KEY),
    "U": int(KeyKind.UNIQUE_KEY),
    "K": int(KeyKind.KEYS_ONLY),
    "T": int(KeyKind.TAG),
}
_T = TypeVar("_T")
# A reader beside a writer looks for new messages at these pauses (seconds), longer while nothing comes.
_SHORTEST_POLL, _LONGEST_POLL = 0.01, 0.5

_open_stores: weakref.WeakSet[MessageStore] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # Locks that another thread of the parent held would never be given back here.
    for store in list(_open_stores):
        store._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class GetMessageStatus(enum.Enum):
    """How a get went; RocketMQ's names."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"


class PutResult(NamedTuple):
    """Where a message went: bytes, ordinals, ms since epoch; `msg_id` is the offset message id."""

    phy_offset: int
    queue_offset: int
    msg_id: str
    store_timestamp: int
    size: int


class PutResults(Sequence[PutResult]):
    """Where messages went, in their order: a `PutResult` for each, made when it is looked at.

    It equals a list of the same, shows as one, and gives one when it is sliced or something is added to it.  Where a list
    itself is needed, ``list(puts)`` makes it.
    """

    __slots__ = ("_made", "_num", "_placed")
    __hash__ = None  # type: ignore[assignment]  # As of a list.

    def __init__(self, results: Iterable[PutResult] = ()):
        self._made: list[PutResult] | None = list(results)
        self._num = len(self._made)
        self._placed = b""

    @classmethod
    def _of(cls, placed: bytes, num: int) -> PutResults:
        # What `RowBatch.placed` gave, of `num` rows.
        made = cls.__new__(cls)
        made._made, made._num, made._placed = None, num, placed
        return made

    def _all(self) -> list[PutResult]:
        made = self._made
        if made is None:
            made = self._made = _append.put_results(self._placed, PutResult, 0, self._num)
        return made

    def __len__(self) -> int:
        return self._num

    @overload
    def __getitem__(self, place: SupportsIndex) -> PutResult: ...

    @overload
    def __getitem__(self, place: slice) -> list[PutResult]: ...

    def __getitem__(self, place: SupportsIndex | slice) -> PutResult | list[PutResult]:
        if self._made is not None or isinstance(place, slice):
            return self._all()[place]
        # Whoever wants one of them, say the last, needs no others.
        number = range(self._num)[place]
        return _append.put_results(self._placed, PutResult, number, 1)[0]

    def __iter__(self) -> Iterator[PutResult]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, PutResults)):
            return NotImplemented
        return self._all() == (other._all() if isinstance(other, PutResults) else other)

    # There is no __radd__: Python would ask it for `some_list += puts` too, and make another list of it.
    def __add__(self, other: list[PutResult] | PutResults) -> list[PutResult]:
        return self._all() + list(other) if isinstance(other, (list, PutResults)) else NotImplemented

    def __repr__(self) -> str:
        return repr(self._all())

    def __reduce__(self) -> tuple[type[PutResults], tuple[list[PutResult]]]:
        return PutResults, (self._all(),)


@dataclass(frozen=True, slots=True, eq=False)
class PutTableResult:
    """Where the rows of a table went, in the table's order.

    Attributes
    ----------
    phy_offset, queue_offset, store_timestamp, size : numpy.ndarray of int64, shape (n,)
        Bytes, ordinals, ms since epoch, bytes.
    """

    phy_offset: np.ndarray
    queue_offset: np.ndarray
    store_timestamp: np.ndarray
    size: np.ndarray

    def __len__(self) -> int:
        return len(self.phy_offset)


@dataclass(frozen=True, slots=True, init=False)
class GetMessageResult:
    """What a get found.

    Attributes
    ----------
    status : GetMessageStatus
    messages : list of MessageExt
        In queue order.
    next_queue_offset : int
        Where to go on.
    min_queue_offset, max_queue_offset : int
        Bounds of the queue; max is the offset of the next message to come.
    """

    status: GetMessageStatus
    messages: list[MessageExt]
    next_queue_offset: int
    min_queue_offset: int
    max_queue_offset: int

    def __init__(
        self,
        status: GetMessageStatus,
        messages: list[MessageExt],
        next_queue_offset: int,
        min_queue_offset: int,
        max_queue_offset: int,
    ):
        # As the generated one, which looks every field up by its name.
        _set_status(self, status)
        _set_messages(self, messages)
        _set_next(self, next_queue_offset)
        _set_min(self, min_queue_offset)
        _set_max(self, max_queue_offset)

    def __iter__(self) -> Iterator[MessageExt]:
        return iter(self.messages)

    def __len__(self) -> int:
        return len(self.messages)


_FOUND = GetMessageStatus.FOUND
_set_status, _set_messages, _set_next, _set_min, _set_max = (
    vars(GetMessageResult)[name].__set__ for name in GetMessageResult.__slots__
)


class QueryResult(list[MessageExt]):
    """The messages that a query found.

    Attributes
    ----------
    truncated : bool
        There are more than `max_num`.
    """

    __slots__ = ("_uncovered", "truncated")

    def __init__(
        self, messages: Iterable[MessageExt] = (), truncated: bool = False, uncovered: tuple[tuple[int, int], ...] = ()
    ):
        list.__init__(self, messages)
        self.truncated = truncated
        self._uncovered = uncovered

    @property
    def uncovered(self) -> tuple[tuple[int, int], ...]:
        """tuple of (int, int): stretches of the log, begin and end in phy offsets, that nobody looked at; ascending."""
        # The core makes results without it, of what is covered.
        return getattr(self, "_uncovered", ())

    @property
    def complete(self) -> bool:
        """bool: all of the log was looked at, through the index or by itself; what is not here is not there."""
        return not self.uncovered

    @property
    def messages(self) -> list[MessageExt]:
        """The messages as a plain list, named as in other results."""
        return list(self)


@dataclass(slots=True)
class _Prepared:
    """A validated message and the parts of its row that do not depend on its place."""

    message: Message
    queue_id: int
    topic: bytes
    body: bytes
    properties: dict[str, str]
    store_host: bytes
    born_host: bytes
    version: int
    tags_code: int
    inner_num: int = 1
    dispatch_names: list[str] = field(default_factory=list)


class MessageStore(NotCopied):
    """A store; made by `MessageStore.open`, to be closed, best by a ``with`` statement.

    Attributes
    ----------
    path : str
    config : StoreConfig
    read_only : bool
    commit_log : CommitLog
    queues : ConsumeQueueStore
    index_service : IndexService or None
        None when the config says not to index.
    recovery_report : RecoveryReport or None
        What opening for writing did; None when read-only.
    """

    def __init__(self, path: str, config: StoreConfig, *, read_only: bool):
        # Use MessageStore.open: an instance is nothing before its parts are loaded.
        self.path = path
        self.config = config
        self.read_only = read_only
        self.recovery_report: RecoveryReport | None = None
        self.pool = MappedFilePool(config.max_mapped_files)
        self.commit_log = CommitLog(path, config, self.pool, read_only=read_only)
        # Bound once: every query by key takes it.
        self._region_of = self.commit_log.region_of
        self.queues = ConsumeQueueStore(path, config, self.pool, read_only=read_only)
        self.index_service: IndexService | None = (
            IndexService(path, config, read_only=read_only) if config.message_index_enable else None
        )
        self._key_query: KeyQuery[QueryResult, MessageExt] | None = None
        if self.index_service is not None:
            self._key_query = KeyQuery(
                self.index_service,
                self._region_of,
                QueryResult,
                MessageExt,
                self.commit_log.crc_check,
                encode_java_utf8,
                self.commit_log.queue,
                time.monotonic,
                _LOOK_INTERVAL if read_only else math.inf,
            )
        self._undispatched = Undispatched(path, self.commit_log, self.queues)
        self._log_index = None if self.index_service is None else LogIndex(path, self.commit_log, self.index_service)
        self.checkpoint = Checkpoint(os.path.join(path, "checkpoint"), read_only=read_only)
        self._consumer_offsets: ConsumerOffsets | None = None
        # What was said of a file of them that cannot be read.
        self._progress_error = ""
        self._dispatcher = CommitLogDispatcher(self.commit_log, self.queues, self.index_service)
        if not read_only:
            # A store that is only read has no use for them, nor for the NumPy in them.
            self._columns = RecordColumns()
        self._renew_locks()
        self._store_lock: StoreLock | None = None
        self._housekeeping: Housekeeping | None = None
        self._populating: Housekeeping | None = None
        self._populate_ahead: PopulateAhead | None = None
        # The log is on the disk up to here, and everything else up to the second one.
        self._flushed_where = 0
        self._all_flushed_where = 0
        self._log_flush_time = self._queue_flush_time = time.monotonic()
        self._disk_full = False
        self._no_space: int | None = None
        self._waiting = 0
        self._closing = self._closed = False
        self._sync_flush = config.flush_disk_type == "SYNC_FLUSH"
        self._pid = os.getpid()
        self._poison: BaseException | None = None
        self._last_store_timestamp = 0
        self._host_bytes: dict[str, bytes] = {}
        self._unique_key_counter = random.randrange(0x10000)
        # Plain messages are checked and laid out in here, under the append lock.
        self._rows: RowBatch | None = None
        # Appends one plain message; None while the store takes no writes.
        self._appender: Appender | None = None

    def _renew_locks(self) -> None:
        # In this order; nobody who holds the append lock waits for a flush.
        self._close_lock = threading.RLock()
        self._flush_lock = threading.Lock()
        self._log_flushed = threading.Condition(threading.Lock())
        self._log_flushing = False
        self._lock = threading.RLock()
        self._offsets_lock = threading.Lock()
        self._arrived = threading.Condition(threading.Lock())
        self.pool.lock = threading.RLock()
        self.queues.renew_lock()
        self._undispatched.renew_lock()
        if self._log_index is not None:
            self._log_index.renew_lock()
        if self.index_service is not None:
            self.index_service.renew_locks()
        self.commit_log.renew_lock()

    def _after_fork(self) -> None:
        # What the parent prepared and committed stays the parent's.
        self._appender = None
        self._renew_locks()
        self._consumer_offsets = None
        self.commit_log.queue.forget_prepared()
        for queue in self.queues.opened():
            queue.forget_prepared()
        if self.index_service is not None:
            self.index_service.forget_prepared()

    # ----------------------------------------------------------------------------------------------- opening, closing

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        config: StoreConfig | None = None,
        read_only: bool = False,
        recovery: str = "strict",
    ) -> MessageStore:
        """Open the store in directory `path`; a new one is made unless `read_only`.

        Parameters
        ----------
        path : path
            The store's root (RocketMQ's storePathRootDir).
        config : StoreConfig, optional
            By default what the files say (`StoreConfig.infer`), RocketMQ's defaults for a new store.
        read_only : bool
            Change nothing and lock nothing; works on a broker's store, also while the broker runs.
        recovery : {"strict", "truncate", "skip"}
            What to do where the log is damaged in front of whole records, see `rmqstore.store.recovery.recover`.

        Raises
        ------
        StoreLockedError
            Another process (maybe a broker), or this one, has it open for writing.
        GeometryError
            Files do not fit the config, or do not belong there.
        CorruptionError
            The log is damaged in the middle; nothing was changed.
        StoreError
            `read_only` and there is no such directory.
        """
        if recovery not in RECOVERY_MODES:
            raise ValueError(f"recovery is {recovery!r}; give one of {', '.join(RECOVERY_MODES)}")
        root = os.fspath(path)
        if read_only:
            check_store_root(root)
            config = StoreConfig.infer(root, read_only=True) if config is None else config
            store = cls(root, config, read_only=True)
            store._load()
            _open_stores.add(store)
            return store
        make_directories(os.path.abspath(root))
        store_lock = StoreLock(root)
        try:
            if os.path.exists(os.path.join(root, ".rmqstore-rebuild", "complete")):
                raise StoreError(
                    "a rebuild was interrupted while it swapped its files in; run the same rebuild again, which finishes it",
                    root,
                )
            if config is None:
                config = StoreConfig.infer(root) if _has_store(root) else StoreConfig()
            store = cls(root, config, read_only=False)
            store._store_lock = store_lock
            try:
                store._load()
                store._recover(recovery)
                _open_stores.add(store)
                store._take_writes()
                store._start_housekeeping()
            except BaseException:
                store._close_files()
                raise
        except BaseException:
            store_lock.release()
            raise
        return store

    def _load(self) -> None:
        self.commit_log.load()
        self.queues.load()
        if self.index_service is not None:
            self.index_service.load()
            if not self.read_only:
                # The next thorough flush forces the file that became full, without holding up the put.
                self.index_service.flush_on_roll = False
        try:
            self.checkpoint = Checkpoint.load(self.checkpoint.path, read_only=self.read_only)
        except GeometryError as error:
            if not self.read_only:
                raise
            # Whoever only reads asks the files themselves.
            logger.warning("%s: %s", error.path, error.message)
        if self.read_only:
            self.commit_log.follow()
            self._undispatched.look()

    def _recover(self, mode: str) -> None:
        abort = os.path.join(self.path, "abort")
        clean = not os.path.exists(abort)
        if clean or self.checkpoint.process_id != _process_id_in(abort):
            # Somebody else had the store after the one who wrote the mark.
            self.checkpoint.flushed_offset = -1

        def before_writing() -> None:
            # From the first change on an interrupted opening counts as an unclean exit.
            with (
                naming_errors(abort),
                open(open_regular(abort, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), "w", encoding="ascii") as file,
            ):
                file.write(str(os.getpid()))
                file.flush()
                os.fsync(file.fileno())
            fsync_directory(self.path)
            if not clean:
                # The process that died may have made folders and files whose names it did not come to force.
                fsync_tree(self.path)
            for name in os.listdir(self.path):
                if name.startswith(STAGING_PREFIX):
                    os.unlink(os.path.join(self.path, name))

        self.recovery_report = recover(
            self.commit_log,
            self.queues,
            self.index_service,
            self.checkpoint,
            clean=clean,
            mode=mode,
            before_writing=before_writing,
        )
        last = self.checkpoint.confirm_phy_offset
        if self.commit_log.max_offset > self.commit_log.min_offset:
            self._last_store_timestamp = max(self.commit_log.store_timestamp_at(last), 0)
        self.checkpoint.process_id = os.getpid()
        if clean:
            self.flush()
            return
        # What recovery wrote is forced now.  What the process that died left in memory is forced by the next flushes; until
        # then the checkpoint must not speak for it.
        self.commit_log.flush()
        self.queues.flush()
        if self.index_service is not None:
            self.index_service.flush()
        self.checkpoint.flushed_offset = min(self.checkpoint.flushed_offset, self.commit_log.max_offset)
        self.checkpoint.flush()
        for base in self.commit_log.queue.offsets:
            if base + self.commit_log.segment_size > self.recovery_report.began_at:
                self.commit_log.queue.file(base).adopt()
        for queue in self.queues:
            for mapped_file in queue.files():
                mapped_file.adopt()
        if self.index_service is not None:
            self.index_service.adopt(self.checkpoint.index_msg_timestamp)
        self._flushed_where = self._all_flushed_where = -1

    # ---------------------------------------------------------------------------------------------------- durability

    def flush(self) -> None:
        """Force everything that was put to the disk: the log, queues and index, the checkpoint, consumer progress.

        Puts go on meanwhile; what is put after the call began may or may not be forced.

        Raises
        ------
        OSError
            The system could not write; the store takes no more writes after that.
        """
        self._check_writable()
        with self._flush_lock:
            self._check_writable()
            self._flush_all()
        self._persist_consumer_offsets()

    def _flush_all(self, queue_pages: int = 0, *, closing: bool = False) -> None:
        # The caller holds the flush lock.  With `queue_pages` queues that grew by less are left for the next time, and the
        # checkpoint then does not speak for them.
        index_files: list[IndexFile] = []
        with self._lock:
            self._check_own_files()
            queue_files = self.queues.take_dirty(queue_pages)
            if self.index_service is not None and not queue_pages:
                index_files = self.index_service.take_dirty()
            end, timestamp = self.commit_log.max_offset, self._last_store_timestamp
            index_end, index_timestamp = self._index_for_java(end, timestamp, closing)
        checkpoint = self.checkpoint
        self._flush_log()
        try:
            for mapped_file in queue_files:
                mapped_file.flush()
            for index in index_files:
                index.force()
            checkpoint.physic_msg_timestamp = max(checkpoint.physic_msg_timestamp, timestamp)
            if not queue_pages:
                checkpoint.flushed_offset = -1 if closing else end
                checkpoint.logics_physical_offset = index_end
                checkpoint.logics_msg_timestamp = min(timestamp, index_timestamp)
                checkpoint.index_msg_timestamp = index_timestamp
                self._all_flushed_where = end
                self._queue_flush_time = time.monotonic()
            checkpoint.flush()
        except BaseException as error:
            self._fail(error)
            raise

    def _index_for_java(self, end: int, timestamp: int, closing: bool) -> tuple[int, int]:
        # What the checkpoint may say of queues and index: phy offset and time.  A Java store (5.5.0) that finds `abort` deletes
        # every index file that ends after this time and dispatches from this offset on, so that while the store is open
        # they must not go beyond the newest full index file: all keys behind it are then indexed again.
        if self.index_service is None:
            return end, timestamp
        for index in self.index_service.files():
            if closing and index.index_count > 1:
                return end, index.header.end_timestamp
            if index.is_full:
                return min(end, index.header.end_phy_offset), index.header.end_timestamp
        return (end, timestamp) if closing else (0, 0)

    def _check_own_files(self) -> None:
        # A Java broker (5.5.0) recovers before it asks for the lock: when it is then refused, it has deleted the newest index
        # file and made one of its own.
        queue = self.commit_log.queue
        last = queue.last()
        ours = last is None or not last.mapped or last.is_current()
        if ours and self.index_service is not None:
            ours = self.index_service.is_whole()
        if not ours:
            error = StoreChangedError(
                "files of the index or the log were deleted or replaced by somebody else while this store was open (a broker "
                "that was started on it does so before the lock stops it); close it and open it again, which recovers it",
                self.path,
            )
            self._fail(error)
            raise error

    def _flush_log(self) -> None:
        with self._log_flushed:
            self._log_flushed.wait_for(lambda: not self._log_flushing)
            self._log_flushing = True
        self._force_log()

    def _force_log(self) -> None:
        # The caller has set the mark that the log is being flushed.
        try:
            self._force_dirty_segments()
        finally:
            with self._log_flushed:
                self._log_flushing = False
                self._log_flushed.notify_all()

    def _force_dirty_segments(self) -> None:
        with self._lock:
            files, end = self.commit_log.queue.take_dirty(), self.commit_log.max_offset
        try:
            for mapped_file in files:
                mapped_file.flush()
        except BaseException as error:
            self._fail(error)
            raise
        self._flushed_where = max(self._flushed_where, end)
        self._log_flush_time = time.monotonic()

    def _wait_until_flushed(self, end: int) -> None:
        # Group commit: whoever comes first forces what all have appended by then.  The others wake together and find that it
        # was done, while the first of those that came later forces the next lot.
        with self._log_flushed:
            done_or_free = self._log_flushed.wait_for(
                lambda: self._flushed_where >= end or not self._log_flushing, self.config.sync_flush_timeout / 1000
            )
            if self._flushed_where >= end:
                return
            if done_or_free:
                self._check_not_poisoned()
                self._log_flushing = True
        if not done_or_free:
            raise FlushDiskTimeoutError(
                f"the message is stored before phy offset {end}, but the disk did not take it within sync_flush_timeout = "
                f"{self.config.sync_flush_timeout} ms; it may be lost if the machine fails now. Look at the disk, then "
                "call flush()",
                self.path,
            )
        self._force_log()

    def _fail(self, error: BaseException) -> None:
        # From here on nobody knows what is on disk: the system reports a failed write once and may then forget it.
        self._appender = None
        if self._poison is None:
            self._poison = error
            logger.error("%s takes no more writes: %s", self.path, error)

    def _start_housekeeping(self) -> None:
        config = self.config
        self._housekeeping = Housekeeping(
            self,
            [
                Task("flush of the commit log", config.flush_interval_commit_log, MessageStore._flush_log_by_timer),
                Task("flush of queues and index", config.flush_interval_consume_queue, MessageStore._flush_by_timer),
                Task(
                    "persisting of consumer progress",
                    config.flush_consumer_offset_interval,
                    MessageStore._persist_consumer_offsets,
                    _FIRST_PERSIST,
                ),
                Task(
                    "deletion of expired files",
                    config.clean_resource_interval,
                    MessageStore._clean_by_timer,
                    _FIRST_CLEAN,
                ),
                Task("holding of the lock", _HOLD_INTERVAL, MessageStore._hold_lock),
            ],
            f"rmqstore-housekeeping {os.path.basename(os.path.realpath(self.path))}",
        )

        if config.populate_ahead_size and config.mapped_file_size_commit_log >= _PREPARE_FROM_SIZE:
            self._populate_ahead = PopulateAhead(
                self.commit_log.queue, self.queues, self.index_service, config.populate_ahead_size
            )
            self._populating = Housekeeping(
                self,
                [Task("populating", 1, MessageStore._populate_by_timer, 0)],
                f"rmqstore-populating {os.path.basename(os.path.realpath(self.path))}",
            )
            # A new file begins with pages that nobody touched.
            self.pool.on_create = self._populating.wake

    def _populate_by_timer(self) -> int:
        if self._populate_ahead is None or self._poison is not None:
            return _HOLD_INTERVAL
        return self._populate_ahead.look()

    def _flush_log_by_timer(self) -> None:
        # As RocketMQ's FlushRealTimeService: a few pages at once, or whatever there is after the longer interval.
        if self._poison is None:
            self._prepare_next_files()
            fresh = self.commit_log.max_offset - self._flushed_where
            thorough = (
                time.monotonic() - self._log_flush_time
            ) * 1000 >= self.config.flush_commit_log_thorough_interval
            if fresh > 0 and (thorough or fresh // _PAGE >= self.config.flush_commit_log_least_pages):
                self._flush_log()

    def _flush_by_timer(self) -> None:
        # As RocketMQ's FlushConsumeQueueService; the index and the checkpoint join the thorough flush.
        if self._poison is None and self.commit_log.max_offset > self._all_flushed_where:
            thorough = (
                time.monotonic() - self._queue_flush_time
            ) * 1000 >= self.config.flush_consume_queue_thorough_interval
            with self._flush_lock:
                self._flush_all(0 if thorough else max(self.config.flush_consume_queue_least_pages, 1))

    def _prepare_next_files(self) -> None:
        # The next segment and index file are allocated before they are needed: a put never waits for that, and a full
        # disk is known while there is still room.
        log, index_service = self.commit_log.queue, self.index_service
        try:
            if self.commit_log.segment_size >= _PREPARE_FROM_SIZE and log.offsets and not log.prepared:
                used = self.commit_log.max_offset - log.offsets[-1]
                if used >= self.commit_log.segment_size * _PREPARE_AT:
                    log.prepare()
            if (
                index_service is not None
                and self.config.index_file_size >= _PREPARE_FROM_SIZE
                and index_service.fill >= _PREPARE_AT
            ):
                index_service.prepare()
            self._no_space = None
        except OSError as error:
            # Once for a cause, not once a tick.
            if self._no_space != error.errno:
                self._no_space = error.errno
                logger.error(
                    "%s: the next file cannot be allocated (%s); puts fail when the current one is full: free space",
                    self.path,
                    error,
                )

    def _clean_by_timer(self) -> None:
        if self._poison is None:
            pause = None if self._housekeeping is None else self._housekeeping.pause
            self._delete_expired_files(False, pause or (lambda milliseconds: True))

    def _hold_lock(self) -> None:
        # A POSIX lock is lost as soon as this process closes any other descriptor of the file, as a backup of the
        # directory within this process does.
        if self._store_lock is not None and self._poison is None:
            try:
                self._store_lock.hold()
            except StoreLockedError as error:
                self._fail(error)
                raise

    @property
    def disk_full(self) -> bool:
        """bool: the disk is used above `disk_space_warning_level_ratio`, so that no writes are taken."""
        return self._disk_full

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
        self._check_writable()
        return self._delete_expired_files(True, lambda milliseconds: True)

    def _delete_expired_files(self, manually: bool, pause: Callable[[int], bool]) -> RetentionReport:
        space = DiskSpace.judge(used_ratio(self.path), self.config, self._disk_full)
        if space.full != self._disk_full:
            with self._lock:
                self._disk_full = space.full
                self._take_writes()
            if space.full:
                logger.error(
                    "%s takes no writes: its disk is used to %d %%; free space, or raise disk_space_warning_level_ratio",
                    self.path,
                    space.used_ratio * 100,
                )
            else:
                logger.info("%s takes writes again: its disk is used to %d %%", self.path, space.used_ratio * 100)
        return delete_expired_files(
            self.commit_log,
            self.queues,
            self.index_service,
            self._lock,
            space,
            now=self.config.clock(),
            manually=manually,
            pause=pause,
        )

    # ----------------------------------------------------------------------------------------------- closing, state

    def close(self) -> None:
        """Force everything to the disk and give the store back; closing twice does nothing.

        After a failed write the ``abort`` file stays, and the next opening recovers.

        Raises
        ------
        OSError
            The last flush, or writing the consumer progress, failed; ``abort`` stays.
        """
        with self._close_lock:
            if self._closed:
                return
            # A forked child only lets go: the store, its lock and its abort file are the parent's, as is the thread.
            own = self._pid == os.getpid()
            if self._housekeeping is not None and own:
                self._housekeeping.stop()
            if self._populating is not None and own:
                self._populating.stop()
            with self._lock:
                # From here on nothing is put; puts that wait for the disk get their flush.
                self._closing = True
                self._appender = None
            try:
                if not self.read_only and own:
                    with self._flush_lock:
                        self._close_in_order()
            finally:
                self._closed = True
                if self._key_query is not None:
                    self._key_query.closed = True
                try:
                    with self._lock:
                        self._close_files()
                finally:
                    if self._store_lock is not None:
                        self._store_lock.release()
                    with self._arrived:
                        self._arrived.notify_all()

    def _close_in_order(self) -> None:
        try:
            if self._poison is None:
                with contextlib.suppress(StoreChangedError):
                    # That was logged, and the next opening mends it.
                    self._flush_all(closing=True)
        finally:
            self._persist_consumer_offsets()
        if self._poison is None:
            abort = os.path.join(self.path, "abort")
            if os.path.exists(abort):
                os.unlink(abort)
                fsync_directory(self.path)

    def _close_files(self) -> None:
        self.commit_log.close()
        self.queues.close()
        if self.index_service is not None:
            self.index_service.close()

    @property
    def closed(self) -> bool:
        """bool: `close` was called."""
        return self._closed

    def __enter__(self) -> MessageStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "read-only" if self.read_only else "open"
        return f"MessageStore({self.path!r}, {state})"

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed; open it again", self.path)

    def _check_writable(self) -> None:
        self._check_open()
        if self._closing:
            raise StoreClosedError("the store is being closed; open it again", self.path)
        if self.read_only:
            raise ReadOnlyError("the store was opened read-only; open it with read_only=False to write", self.path)
        if self._pid != os.getpid():
            raise StoreError(
                "the store was opened by the parent of this process; a forked child must not write to it: open stores after "
                "the fork",
                self.path,
            )
        self._check_not_poisoned()

    def _check_not_poisoned(self) -> None:
        if self._poison is not None:
            raise StorePoisonedError(
                f"an earlier write failed ({self._poison}); close the store and open it again, which recovers it",
                self.path,
            ) from self._poison

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
        self._check_open()
        if self.read_only:
            if self._log_index is not None and self.commit_log.queue.was_replaced():
                self._log_index.forget()
            self.commit_log.refresh()
            self.queues.refresh()
            for queue in self.queues.opened():
                queue.refresh()
            self._undispatched.look()
            if self.index_service is not None:
                self.index_service.load()
            with self._offsets_lock:
                self._consumer_offsets = None

    def _queue(self, topic: str, queue_id: int, known_to: int = _INT64_MAX) -> AnyConsumeQueue | None:
        # A reader beside a writer looks at the files again; where units are known up to `known_to`, not at every call.
        queue = self.queues.find(topic, queue_id)
        if self.read_only:
            if queue is None:
                self.queues.refresh()
                queue = self.queues.find(topic, queue_id)
            else:
                now = time.monotonic()
                if known_to > queue.unit_num or now - queue.refreshed_at >= _LOOK_INTERVAL:
                    queue.refresh()
                    queue.refreshed_at = now
                    if not self._undispatched.is_current():
                        self._undispatched.look()
                        queue = self.queues.find(topic, queue_id)
        return queue

    def _follow_index(self) -> None:
        # Entries show as they are put, new files do not.
        index_service, key_query = self.index_service, self._key_query
        if not self.read_only or index_service is None or key_query is None:
            return
        now = time.monotonic()
        try:
            up_to_date = index_service.has_room()
            if up_to_date and now - key_query.looked_at >= _LOOK_INTERVAL:
                up_to_date = not index_service.was_replaced()
                key_query.looked_at = now
        except (FileNotFoundError, OffsetOutOfRangeError):
            up_to_date = False
        if not up_to_date:
            index_service.load()

    @property
    def undispatched(self) -> tuple[int, int] | None:
        """tuple of (int, int) or None: begin and end of what no queue on disk leads to; None where there is nothing.

        A broker that died may not have dispatched its newest records, and queues may be gone.  A store that was opened
        read-only then serves them all the same, by units that it makes in memory.  It goes over 1 GiB of the log for that;
        what lies further is `unserved`.
        """
        served, left_out = self._undispatched.served, self._undispatched.left_out
        if served is None or left_out is None:
            return served or left_out
        return served[0], left_out[1]

    @property
    def unserved(self) -> tuple[int, int] | None:
        """tuple of (int, int) or None: begin and end of what is in no queue and is not served by queue either."""
        return self._undispatched.left_out

    def stats(self) -> StoreStats:
        """Plain numbers of this store: sizes, bounds, queues, index files, consumer progress, how much is not flushed.

        They are read from the files when they are asked for; nothing is counted on the way of a message.  The cost grows with
        the number of queues (each is opened, and the header of one record read), not with that of messages.  A read-only
        store takes in first what another process did, as by `refresh`.

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

        self._check_open()
        self.refresh()

        def ask() -> StoreStats:
            own = not self.read_only
            # Of each queue the newest record is looked at, wherever in the log it lies.
            with self.commit_log.single_records() if self.read_only else contextlib.nullcontext():
                return taken(own)

        def taken(own: bool) -> StoreStats:
            return take_stats(
                self.path,
                self.commit_log,
                self.queues,
                self.index_service,
                self._checkpoint_now(),
                *self.consumer_progress(),
                timestamp=self.config.clock(),
                writable=own and self._poison is None,
                disk_full=self._disk_full,
                last_store_timestamp=self._last_store_timestamp or None if own else None,
                flushed_where=max(self._flushed_where, self.commit_log.min_offset) if own else None,
                undispatched=self.undispatched,
            )

        return self._settled(ask)

    def _checkpoint_now(self) -> Checkpoint:
        # A reader looks again; what cannot be one says nothing, as at the opening.
        with contextlib.suppress(GeometryError):
            return Checkpoint.load(self.checkpoint.path, read_only=True) if self.read_only else self.checkpoint
        return Checkpoint(self.checkpoint.path, read_only=True)

    @property
    def consumer_offsets(self) -> ConsumerOffsets:
        """ConsumerOffsets: the progress of consumer groups, read when it is first asked for.

        Commits are persisted every `flush_consumer_offset_interval` ms, by `flush` and by `close`.

        Raises
        ------
        CorruptionError
            Neither the file nor its backup can be read.
        """
        with self._offsets_lock:
            if self._consumer_offsets is None:
                from rmqstore.consumer.consumer_offset import ConsumerOffsets

                # Light message queues have a file of their own, which holds all progress then.
                name = "lmqConsumerOffset.json" if self.config.enable_lmq else "consumerOffset.json"
                self._consumer_offsets = ConsumerOffsets.load(
                    os.path.join(self.path, "config", name),
                    read_only=self.read_only or self._pid != os.getpid(),
                    version_step=self.config.consumer_offset_update_version_step,
                    clock=self.config.clock,
                )
            return self._consumer_offsets

    def damaged_files(self) -> list[GeometryError]:
        """list of GeometryError: segments, index files, and files of queues asked for so far, that lack their length.

        Read-only they are read as far as they go, and index files passed over; a store with one does not open for writing.
        """
        listed = [self.commit_log.queue, *(queue.queue for queue in self.queues.opened())]
        found = [problem for files in listed for problem in files.damaged()]
        if self.index_service is not None:
            found += self.index_service.passed_over.values()
        return found

    def consumer_progress(self) -> tuple[dict[tuple[str, str], dict[int, int]], str | None]:
        """What `consumer_offsets` lists, for an answer that has more to say than that: a damaged file does not end it.

        Returns
        -------
        (dict, str or None)
            As of `ConsumerOffsets.list`, empty where the file cannot be read; and why it cannot.
        """
        try:
            return self.consumer_offsets.list(), None
        except (StoreError, OSError) as error:
            if self._progress_error != str(error):
                logger.warning("the progress of consumer groups is not known: %s", error)
                self._progress_error = str(error)
            return {}, str(error)

    def _persist_consumer_offsets(self) -> None:
        offsets = self._consumer_offsets
        if offsets is not None and not self.read_only:
            offsets.persist()

    # --------------------------------------------------------------------------------------------------------- put

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
        appender = self._appender
        if appender is not None:
            with self._lock:
                try:
                    put: PutResult | None = appender.put(message, queue_id) if self._appender is appender else None
                except BaseException as error:
                    if appender.writing:
                        self._fail(error)
                    raise
                if put is not None and put[3] > self._last_store_timestamp:
                    self._last_store_timestamp = put[3]
            if put is not None:
                if self._waiting or self._sync_flush:
                    self._after_put(put.phy_offset + put.size, (message,))
                return put
        put = self._put([message], queue_id, together=False)[0]
        self._learn_end(message, queue_id)
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
        return self._put(list(messages), queue_id, together=False)

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
        born_timestamp: int | None = None,
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
        self._check_writable()
        parts = _table_parts(table, keep_timestamps, topic, queue_id, keys, tags, properties, flag, born_timestamp)
        # Other writers come between the parts, unless the times of the table say what came before.
        with self._lock if keep_timestamps else contextlib.nullcontext():
            self._check_parts(parts, len(parts) > 1 or self._rows is None)
            columns: list[tuple[np.ndarray, ...]] = [(np.empty(0, np.int64),) * 4]
            first = 0
            for part in parts:
                columns.append(self._put_part(part, first))
                first += part.num
        result = PutTableResult(*(np.concatenate(column) for column in zip(*columns, strict=True)))
        if len(result):
            if self._waiting or self._sync_flush:
                self._after_put(int(result.phy_offset[-1] + result.size[-1]), (Message("any"),))
        return result

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
        born_timestamp: int | None = None,
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
        self._check_writable()
        parts = _table_parts(table, keep_timestamps, topic, queue_id, keys, tags, properties, flag, born_timestamp)
        with self._lock if keep_timestamps else contextlib.nullcontext():
            self._check_parts(parts, True)
        return sum(part.num for part in parts)

    def _check_parts(self, parts: list[TablePart], rows: bool) -> None:
        # Raises for what cannot be put; the rows are looked at one by one unless putting them does that.
        first = 0
        last = self._last_store_timestamp
        for part in parts:
            times = part.store_timestamps()
            if len(times) and (times[0] < last or (times[1:] < times[:-1]).any()):
                raise InvalidMessageError(
                    f"store timestamps fall among rows {first} to {first + part.num}, or lie before the store's last "
                    f"message ({last}); sort the table by store_timestamp"
                )
            last = int(times[-1]) if len(times) else last
            if rows:
                self._check_part(part, first)
            first += part.num

    def _check_part(self, part: TablePart, first: int) -> None:
        # Raises for the first row that cannot be put, and notes whether the core takes them all.
        rows = self._rows
        at = 0
        if rows is not None:
            with self._lock:
                try:
                    at = self._take_part(rows, part, first)
                finally:
                    rows.clear()
        part.plain = at == part.num and rows is not None
        if not part.plain:
            part.validate()
        for i in range(at, part.num):
            try:
                message = part.message(i)
                self._prepare(message, part.queue_id(i), append_crc=True)
            except InvalidMessageError as error:
                raise InvalidMessageError(f"row {first + i}: {error.message}", error.path) from None

    def _take_part(self, rows: RowBatch, part: TablePart, first: int) -> int:
        # The number of the row that the core does not take, or how many there are.
        table = part.rows()
        at, why = rows.take_columns(table, 0)
        while why == _NEW_QUEUE:
            try:
                part.message(at).validate()
            except InvalidMessageError as error:
                raise InvalidMessageError(f"row {first + at}: {error.message}", error.path) from None
            if not 0 <= part.queue_id(at) < 2**31:
                raise InvalidMessageError(
                    f"row {first + at}: queue_id is {part.queue_id(at)!r}; give an int from 0 to 2**31 - 1"
                )
            self._queue_number(part.topic(at), part.queue_id(at))
            at, why = rows.take_columns(table, at)
        if why == _UNSOUND:
            raise InvalidMessageError(f"row {first + at}: an Arrow array leads outside itself; validate the table")
        return at

    def _put_part(self, part: TablePart, first: int) -> tuple[np.ndarray, ...]:
        rows = self._rows
        times = part.store_timestamps()
        if part.plain and rows is not None:
            with self._lock:
                self._check_takes_writes()
                try:
                    if self._take_part(rows, part, first) == part.num:
                        self._append_rows(rows, 0 if len(times) else self._now(), times)
                        return rows.columns()
                finally:
                    rows.clear()
            self._check_part(part, first)
        messages, queue_ids = list(part.messages()), [part.queue_id(i) for i in range(part.num)]
        if len(times):
            puts: Sequence[PutResult] = [
                self._put([message], queue_id, together=False, now=time)[0]
                for message, queue_id, time in zip(messages, queue_ids, times.tolist(), strict=True)
            ]
        else:
            puts = self._put(messages, queue_ids, together=False)
        return tuple(np.array([(put[0], put[1], put[3], put[4]) for put in puts], np.int64).T)

    def put_message_batch(self, messages: Iterable[Message], queue_id: int = 0) -> PutResults:
        """Append messages of one topic as a classic batch: in one segment, one behind the other, in one queue.

        The rules are RocketMQ's for MessageExtBatch (5.5.0): one topic, no retry topic, no delay, no transaction.

        Raises
        ------
        InvalidMessageError
            The messages break these rules, or do not fit a segment together; nothing was written.
        """
        batch = list(messages)
        if len({message.topic for message in batch}) > 1:
            raise InvalidMessageError("the messages of a batch must be of one topic; use put_messages")
        for message in batch:
            if message.delay_level > 0:
                raise InvalidMessageError("a delayed message cannot be part of a batch; use put_messages")
            if message.topic.startswith("%RETRY%"):
                raise InvalidMessageError("retry topics take no batches; use put_messages")
            if message.sys_flag & _TRANSACTION_MASK:
                raise InvalidMessageError("a transactional message cannot be part of a batch; use put_messages")
            if message.sys_flag & _INNER_BATCH:
                raise InvalidMessageError("an inner batch cannot be part of a batch; use put_message")
        return self._put(batch, queue_id, together=True)

    def _put(
        self, messages: list[Message], queue_id: int | Sequence[int], *, together: bool, now: int | None = None
    ) -> PutResults:
        self._check_writable()
        if isinstance(queue_id, (int, np.integer, str, bytes)) or not hasattr(queue_id, "__iter__"):
            given: Any = queue_id
        else:
            given = list(queue_id)
            if len(given) != len(messages):
                raise InvalidMessageError(f"{len(messages)} messages, but {len(given)} queue ids")
        if not messages:
            return PutResults()
        if not together and now is None and self._rows is not None:
            plain = self._put_plain(messages, given)
            if plain is not None:
                return plain
        queue_ids: list[int] = given if isinstance(given, list) else [given] * len(messages)
        prepared = [
            self._prepare(message, each, append_crc=not together)
            for message, each in zip(messages, queue_ids, strict=True)
        ]
        with self._lock:
            self._check_takes_writes()
            now = self._now() if now is None else now
            rows, queue_offsets = self._place(prepared, now)
            # Sizes are checked, and files made, before anything is written.
            wanted = self._make_room(prepared)
            before = self.commit_log.max_offset
            try:
                placed = self.commit_log.append(rows, together=together)
            except InvalidMessageError:
                self._forget_room(wanted)
                raise
            except BaseException as error:
                if isinstance(error, OSError) and self.commit_log.max_offset == before:
                    self._forget_room(wanted)
                else:
                    self._fail(error)
                raise
            self._last_store_timestamp = max(self._last_store_timestamp, now)
            try:
                if len(placed) < _DISPATCH_BY_COLUMNS:
                    self._dispatch(prepared, queue_offsets, placed, now)
                else:
                    end = placed[-1][0] + placed[-1][1]
                    for _, _ in self.commit_log.scan_columns(placed[0][0], end, self._columns, check_crc=False):
                        self._dispatcher.dispatch_columns(self._columns, _NOTHING_INDEXED)
            except BaseException as error:
                self._fail(error)
                raise
            end = self.commit_log.max_offset
        self._after_put(end, messages)
        return PutResults(
            PutResult(phy_offset, offset, offset_message_id(each.store_host, phy_offset), now, size)
            for each, offset, (phy_offset, size) in zip(prepared, queue_offsets, placed, strict=True)
        )

    def _now(self) -> int:
        now = self.config.clock()
        if not -_INT64_MAX - 1 <= now <= _INT64_MAX:
            raise InvalidMessageError(f"the clock says {now}, which does not fit 64 bits; mend config.clock")
        return now

    def _check_takes_writes(self) -> None:
        self._check_writable()
        if self._disk_full:
            raise DiskFullError(
                f"the disk is used above disk_space_warning_level_ratio = {self.config.disk_space_warning_level_ratio} %; "
                "free space, or open the store with another limit",
                self.path,
            )

    def _after_put(self, end: int, messages: Iterable[Message]) -> None:
        # Without the append lock: wakes who waits for messages, and waits for the disk itself where that was asked for.
        if self._waiting:
            with self._arrived:
                self._arrived.notify_all()
        if self._sync_flush and any(message.properties.get("WAIT", "true") == "true" for message in messages):
            self._wait_until_flushed(end)

    # ---------------------------------------------------------------------------------------------- plain messages

    def _take_writes(self) -> None:
        # Plain messages go through the core; where keys are to be generated every message goes the long way.
        if self._rows is None and not self.config.generate_unique_key:
            config = self.config
            max_topic = MAX_RETRY_TOPIC_LENGTH if config.auto_message_version_on_topic_len else MAX_TOPIC_LENGTH
            batches = [
                RowBatch(
                    self._columns.topics,
                    self._host(config.store_host),
                    self._host_bytes,
                    config.max_message_size,
                    max_topic,
                    config.enabled_append_prop_crc,
                )
                for _ in range(2)
            ]
            self._rows = batches[0]
            self._one = Appender(
                batches[1],
                Message,
                PutResult,
                config.clock,
                self.index_service is not None,
                config.index_tags,
                config.max_mapped_files,
            )
        taken = self._rows is not None and not self._disk_full and not self._closing and self._poison is None
        self._appender = self._one if taken else None

    def _learn_end(self, message: Message, queue_id: int) -> None:
        # After a message went the long way the next one of its queue need not.
        appender = self._appender
        if appender is None or type(message) is not Message:
            return
        with self._lock:
            queue = self.queues.find(message.topic, queue_id)
            ends = []
            for stream in [self.commit_log.queue, *([queue.queue] if isinstance(queue, ConsumeQueue) else [])]:
                last = stream.last()
                if last is not None:
                    last.reserve()
                    last.region  # noqa: B018  (mapped now, and marked as used)
                    ends.append(FileEnd(stream, last))
            index = None if self.index_service is None else self.index_service.newest()
            if len(ends) == 2 and isinstance(queue, ConsumeQueue) and queue.ext is None:
                appender.learn(ends[0], index, self._queue_number(message.topic, queue_id), ends[1])
            elif ends:
                appender.learn(ends[0], index)

    def _queue_number(self, topic: str, queue_id: int) -> int:
        topics = self._columns.topics
        return topics.add_queue(topics.add(topic.encode()), queue_id)

    def _put_plain(self, messages: list[Message], queue_ids: int | list[int]) -> PutResults | None:
        # None if any of them is not plain; nothing is written then.
        rows = self._rows
        assert rows is not None
        with self._lock:
            self._check_takes_writes()
            try:
                at, why = rows.take_messages(messages, queue_ids, 0, Message)
                while why == _NEW_QUEUE:
                    message = messages[at]
                    message.validate()
                    self._queue_number(message.topic, queue_ids if isinstance(queue_ids, int) else queue_ids[at])
                    at, why = rows.take_messages(messages, queue_ids, at, Message)
                if why:
                    return None
                end = self._append_rows(rows, self._now(), _NO_TIMESTAMPS)
                results = PutResults._of(rows.placed(), rows.count)
            finally:
                rows.clear()
        self._after_put(end, messages)
        return results

    def _append_rows(self, rows: RowBatch, now: int, timestamps: np.ndarray | array[int]) -> int:
        # Writes the rows, their units and their index entries; the end of the log then.  The caller holds the append lock.
        following: dict[int, int] = {}
        wanted: list[tuple[str, int]] = []
        topics = self._columns.topics
        before = self.commit_log.max_offset
        try:
            # Files are made before anything is written, so that a full disk is an error that changes nothing.
            for number, count in rows.queues():
                topic, queue_id = topics.queues[number]
                name = topics.topics[topic].decode()
                queue = self.queues.find_or_create(name, queue_id)
                wanted.append((name, queue_id))
                queue.make_room(count)
                following[number] = queue.max_queue_offset
            if self.index_service is not None:
                self.index_service.reserve()
            rows.number(following, now, timestamps)
            end = self.commit_log.append_rows(rows)
        except BaseException as error:
            if self.commit_log.max_offset == before and isinstance(error, (OSError, InvalidMessageError)):
                self._forget_room(wanted)
            elif self.commit_log.max_offset != before:
                self._fail(error)
            raise
        self._last_store_timestamp = max(self._last_store_timestamp, int(timestamps[-1]) if len(timestamps) else now)
        try:
            done = 0
            while done < rows.count:
                done = rows.fill_columns(self._columns, done, self.config.index_tags)
                self._dispatcher.dispatch_columns(self._columns, _NOTHING_INDEXED)
        except BaseException as error:
            self._fail(error)
            raise
        return end

    def _forget_room(self, wanted: Iterable[tuple[str, int]]) -> None:
        # A queue is there from its first message on.
        for topic, queue_id in wanted:
            self.queues.forget(topic, queue_id)

    def _make_room(self, prepared: list[_Prepared]) -> Collection[tuple[str, int]]:
        # Queue files that the puts will need, so that a full disk is an error before the record is written.
        wanted: dict[tuple[str, int], int] = {}
        for each in prepared:
            if each.message.sys_flag & _TRANSACTION_MASK in (0, _TRANSACTION_COMMIT):
                lights = [(name, 0) for name in each.dispatch_names if name and "/" not in name]
                for key in [(each.message.topic, each.queue_id), *lights]:
                    wanted[key] = wanted.get(key, 0) + 1
        try:
            for (topic, queue_id), count in wanted.items():
                self.queues.find_or_create(topic, queue_id).make_room(count)
            if self.index_service is not None:
                self.index_service.reserve()
        except BaseException:
            self._forget_room(wanted)
            raise
        return wanted.keys()

    def _prepare(self, message: Message, queue_id: int, *, append_crc: bool) -> _Prepared:
        if not isinstance(message, Message):
            raise InvalidMessageError(f"{type(message).__name__} is not a Message")
        if isinstance(message, MessageExt):
            message = _as_new(message)
        message.validate()
        if not isinstance(queue_id, (int, np.integer)) or not 0 <= queue_id <= 2**31 - 1:
            raise InvalidMessageError(f"queue_id is {queue_id!r}; give an int from 0 to 2**31 - 1")
        if len(message.body) > self.config.max_message_size:
            raise InvalidMessageError(
                f"the body has {len(message.body)} bytes, max_message_size allows {self.config.max_message_size}: shorten "
                "or compress it, or raise max_message_size"
            )
        properties = message.properties
        if self.config.generate_unique_key and "UNIQ_KEY" not in properties:
            properties = {**properties, "UNIQ_KEY": self._unique_key()}
        if "__CRC32#" in properties:
            properties = {name: value for name, value in properties.items() if name != "__CRC32#"}
        inner_num = self._inner_num(message)
        if inner_num is not None:
            # The value is set when the place is known; a given one keeps its place in the text.
            properties = properties if "INNER_BASE" in properties else {"INNER_BASE": "", **properties}
        names: list[str] = []
        if (
            self.config.enable_lmq
            and self.config.enable_multi_dispatch
            and properties.get("INNER_MULTI_DISPATCH")
            and multi_dispatch_allowed(message.topic)
        ):
            names = properties["INNER_MULTI_DISPATCH"].split(",")
            for name in names:
                if not name or name in (".", "..") or "\0" in name or len(name.encode("utf-8", "replace")) > 255:
                    raise InvalidMessageError(f"INNER_MULTI_DISPATCH names the queue {name!r}, which cannot be one")
            if "INNER_MULTI_QUEUE_OFFSET" not in properties:
                properties = {**properties, "INNER_MULTI_QUEUE_OFFSET": ""}
        version = 2 if len(message.topic) > 127 and self.config.auto_message_version_on_topic_len else 1
        topic = encode_java_utf8(message.topic)
        if version == 1 and len(topic) > 127:
            raise InvalidMessageError(
                "the topic has more than 127 bytes and auto_message_version_on_topic_len is off; shorten it"
            )
        return _Prepared(
            message,
            int(queue_id),
            topic,
            message.body,
            properties,
            self._host(message.store_host or self.config.store_host),
            self._host(message.born_host or message.store_host or self.config.store_host),
            version,
            tags_code(_as_stored(message.tags)),
            inner_num or 1,
            names,
        )

    def _inner_num(self, message: Message) -> int | None:
        is_inner = bool(message.sys_flag & _INNER_BATCH)
        text = message.properties.get("INNER_NUM")
        if not is_inner:
            if text is not None:
                raise InvalidMessageError(
                    "INNER_NUM is given, but sys_flag does not say INNER_BATCH; set it or leave it out"
                )
            return None
        if text is None or not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 32767:
            raise InvalidMessageError(f"an inner batch needs property INNER_NUM from 1 to 32767, not {text!r}")
        if not self.queues.add_batch_topic(message.topic):
            raise InvalidMessageError(
                f"topic {message.topic!r} has simple queues, which cannot hold an inner batch; use a topic of queue.type BatchCQ"
            )
        return int(text)

    def _host(self, host: str) -> bytes:
        found = self._host_bytes.get(host)
        if found is None:
            found = host_to_bytes(host)
            if len(self._host_bytes) < 10_000:
                self._host_bytes[host] = found
        return found

    def _unique_key(self) -> str:
        # RocketMQ's MessageClientIDSetter: address, process, a number of this class loader (here: of this store),
        # ms since the month began, a counter.
        moment = time.localtime()
        month = time.mktime((moment.tm_year, moment.tm_mon, 1, 0, 0, 0, 0, 0, -1))
        since = int(time.time() * 1000 - month * 1000) & 0xFFFFFFFF
        self._unique_key_counter = (self._unique_key_counter + 1) & 0xFFFF
        address = self._host(self.config.store_host)[:-4].hex().upper()
        number = id(self) >> 4 & 0xFFFFFFFF
        return f"{address}{os.getpid() & 0xFFFF:04X}{number:08X}{since:08X}{self._unique_key_counter:04X}"

    def _place(self, prepared: list[_Prepared], now: int) -> tuple[list[tuple[Any, ...]], list[int]]:
        # Gives every message its queue offset; nothing is written yet.
        following: dict[tuple[str, int], int] = {}

        def take(topic: str, queue_id: int, num: int) -> int:
            key = (topic, queue_id)
            if key not in following:
                queue = self.queues.find(topic, queue_id)
                following[key] = 0 if queue is None else queue.max_queue_offset
            offset = following[key]
            following[key] = offset + num
            return offset

        rows, queue_offsets = [], []
        for each in prepared:
            message = each.message
            transaction = message.sys_flag & _TRANSACTION_MASK
            queued = transaction in (0, _TRANSACTION_COMMIT)
            offset = take(message.topic, each.queue_id, each.inner_num) if queued else 0
            properties = each.properties
            if message.sys_flag & _INNER_BATCH:
                properties = {**properties, "INNER_BASE": str(offset)}
            if each.dispatch_names:
                numbers = ",".join(str(take(name, 0, 1)) for name in each.dispatch_names)
                properties = {**properties, "INNER_MULTI_QUEUE_OFFSET": numbers}
            text = properties_to_bytes(properties)
            size = len(text) + (_core.RecordLayout.PROP_CRC_SIZE if self.config.enabled_append_prop_crc else 0)
            if size > MAX_PROPERTIES_SIZE:
                raise InvalidMessageError(
                    f"the properties take {size} bytes, a record holds at most {MAX_PROPERTIES_SIZE}: move large values "
                    "into the body"
                )
            born = message.born_timestamp
            rows.append(
                (
                    each.topic, each.body, text, each.born_host, each.store_host,
                    each.queue_id, message.flag, message.sys_flag, message.reconsume_times, each.version,
                    offset, now if born is None else born, now, message.prepared_transaction_offset,
                )
            )  # fmt: skip
            queue_offsets.append(offset)
        return rows, queue_offsets

    def _dispatch(
        self,
        prepared: list[_Prepared],
        queue_offsets: list[int],
        placed: list[tuple[int, int]],
        now: int,
    ) -> None:
        for each, queue_offset, (phy_offset, size) in zip(prepared, queue_offsets, placed, strict=True):
            message = each.message
            transaction = message.sys_flag & _TRANSACTION_MASK
            code = each.tags_code
            if message.topic == _SCHEDULE_TOPIC and message.delay_level > 0:
                delays = self.commit_log.delays
                code = now + int(delays[min(message.delay_level, len(delays)) - 1]) if len(delays) else code
            if transaction in (0, _TRANSACTION_COMMIT):
                queue = self.queues.find_or_create(message.topic, each.queue_id)
                if isinstance(queue, BatchConsumeQueue):
                    queue.put(queue_offset, phy_offset, size, code, now, each.inner_num)
                else:
                    queue.put(queue_offset, phy_offset, size, code, now)
                if each.dispatch_names:
                    stored = self.commit_log.look_up(phy_offset)
                    if stored is not None:
                        self._dispatcher.dispatch_multi(stored, size, code)
            if self.index_service is not None and transaction == _TRANSACTION_ROLLBACK:
                self.index_service.current()
            elif self.index_service is not None:
                # A value that is empty is lost when the record is parsed, so it is not indexed either.
                properties = each.properties
                keys = properties.get("KEYS", "")
                self.index_service.build_index(
                    message.topic,
                    _as_stored(keys).split(" ") if keys else [],
                    _as_stored(properties.get("UNIQ_KEY")) or None,
                    _as_stored(message.tags),
                    phy_offset,
                    now,
                )

    # --------------------------------------------------------------------------------------------------------- get

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
        if self._closed:
            self._check_open()
        if tags is None and max_bytes is None:
            found = self._recently_read(topic, queue_id, queue_offset, max_num)
            if found is not None:
                return found
        wanted = None if tags is None else _subscription(tags)
        return self._settled(self._get_message, topic, queue_id, queue_offset, max_num, max_bytes, wanted)

    def _recently_read(self, topic: str, queue_id: int, queue_offset: int, max_num: int) -> GetMessageResult | None:
        # What `_read_queued` gives, where the files that were asked for last have it.
        queue = self.queues.find(topic, queue_id)
        if type(queue) is not ConsumeQueue or queue.min_for is None:
            return None
        units = queue.queue
        if self.read_only and (
            units.wrote_where < (queue_offset + max_num) * _UNIT_SIZE
            or time.monotonic() - queue.refreshed_at >= _LOOK_INTERVAL
        ):
            return None
        log = self.commit_log
        try:
            return _read.read_recent_queued(
                units, log.queue, queue.min_for, queue_offset, max_num if max_num > _EXAMINED else _EXAMINED, max_num,
                _MAX_PULL_BYTES, MessageExt, log.crc_check, GetMessageResult, _FOUND, topic, queue_id,
            )  # fmt: skip
        except OffsetOutOfRangeError:
            # A file is leaving just now.
            return None

    def _settled(self, ask: Callable[..., _T], *arguments: Any) -> _T:
        # A file may go while it is being read: retention.  What is there then gives the answer.
        for _ in range(_TRIES):
            try:
                return ask(*arguments)
            except OffsetOutOfRangeError:
                self._check_open()
                if self.read_only:
                    self.refresh()
        return ask(*arguments)

    def _get_message(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        max_num: int,
        max_bytes: int | None,
        wanted: dict[int, set[str]] | None,
    ) -> GetMessageResult:
        queue = self._queue(topic, queue_id, queue_offset + max_num)
        low, high = self._bounds(queue)
        status = GetMessageStatus.NO_MESSAGE_IN_QUEUE
        following = 0
        if queue is not None and high > 0:
            if queue_offset < low:
                status, following = GetMessageStatus.OFFSET_TOO_SMALL, low
            elif queue_offset == high:
                status, following = GetMessageStatus.OFFSET_OVERFLOW_ONE, queue_offset
            elif queue_offset > high:
                status, following = GetMessageStatus.OFFSET_OVERFLOW_BADLY, high
            elif isinstance(queue, ConsumeQueue) and (wanted is None or queue.ext is None):
                return self._read_queued(queue, queue_offset, max_num, max_bytes, wanted, low, high)
            else:
                return self._walk(queue, queue_offset, max_num, max_bytes, wanted, low, high)
        return GetMessageResult(status, [], following, low, high)

    def _read_queued(
        self,
        queue: ConsumeQueue,
        queue_offset: int,
        max_num: int,
        max_bytes: int | None,
        wanted: dict[int, set[str]] | None,
        low: int,
        high: int,
    ) -> GetMessageResult:
        # What `_walk` gives for a simple queue without an extension, or when all tags are wanted: one call for the units of
        # a segment.
        max_num = min(max(max_num, 0), _INT64_MAX)
        limit = _MAX_PULL_BYTES if max_bytes is None else min(max(max_bytes, _MIN_PULL_BYTES), _MAX_PULL_BYTES)
        log, messages = self.commit_log, []  # type: ignore[var-annotated]
        found = queue.region_of(queue_offset, max(_EXAMINED, max_num))
        codes = tags = None
        if wanted is not None:
            codes, tags = frozenset(wanted), frozenset().union(*wanted.values())
        at = size = 0
        following, missing, full, examined = queue_offset, False, False, False
        if found is not None:
            units, pos, num = found
            while at < num and not full:
                phy_offset = _core.read_unit(units, pos + at * _UNIT_SIZE)[0]
                segment = log.region_of(phy_offset)
                # What no segment holds is passed over, but not before the unit's limits and tags were looked at.
                region, base, first, end = (units, 0, 0, 0) if segment is None else segment
                done, last, size, full, gone = _read.read_queued(
                    units, pos + at * _UNIT_SIZE, num - at, region, base, first, end,
                    MessageExt, messages, size, max_num, limit, log.crc_check, codes, tags, queue.topic, queue.queue_id,
                    queue_offset + at,
                )  # fmt: skip
                missing |= gone
                if last >= 0:
                    examined, following = True, queue_offset + at + last + 1
                at += done
                if segment is None and not done and not full:
                    missing, examined, at = missing or not messages, True, at + 1
                    following = queue_offset + at
        if messages:
            status = GetMessageStatus.FOUND
        elif examined:
            status = GetMessageStatus.MESSAGE_WAS_REMOVING if missing else GetMessageStatus.NO_MATCHED_MESSAGE
        else:
            status, following = GetMessageStatus.OFFSET_FOUND_NULL, queue.next_file_offset(queue_offset)
        return GetMessageResult(status, messages, following, low, high)

    def _bounds_of(self, topic: str, queue_id: int) -> tuple[int, int]:
        return self._bounds(self._queue(topic, queue_id))

    def _bounds(self, queue: AnyConsumeQueue | None) -> tuple[int, int]:
        return (0, 0) if queue is None else queue.bounds(self.commit_log.min_offset)

    def _walk(
        self,
        queue: AnyConsumeQueue,
        queue_offset: int,
        max_num: int,
        max_bytes: int | None,
        wanted: dict[int, set[str]] | None,
        low: int,
        high: int,
    ) -> GetMessageResult:
        limit = _MAX_PULL_BYTES if max_bytes is None else min(max(max_bytes, _MIN_PULL_BYTES), _MAX_PULL_BYTES)
        examine = max(_EXAMINED, max_num)
        messages: list[MessageExt] = []
        taken = size = 0
        status = GetMessageStatus.NO_MATCHED_MESSAGE
        following = queue_offset
        examined = False
        for unit in queue.read(queue_offset, examine):
            if taken and (taken + unit.num > max_num or size + unit.size > limit):
                break
            examined = True
            following = unit.queue_offset + unit.num
            if not self._may_match(queue, unit, wanted):
                continue
            message = self.commit_log.look_up(unit.phy_offset, unit.size)
            if message is None:
                if not messages:
                    status = GetMessageStatus.MESSAGE_WAS_REMOVING
                continue
            message.check_queue(queue.topic, queue.queue_id, unit.queue_offset)
            if wanted is not None and not any(message.tags in texts for texts in wanted.values()):
                continue
            messages.append(message)
            taken += unit.num
            size += unit.size
        if messages:
            status = GetMessageStatus.FOUND
        elif not examined:
            status, following = GetMessageStatus.OFFSET_FOUND_NULL, queue.next_file_offset(queue_offset)
        return GetMessageResult(status, messages, following, low, high)

    def _may_match(self, queue: AnyConsumeQueue, unit: Unit, wanted: dict[int, set[str]] | None) -> bool:
        # As in RocketMQ the low 32 bits of the tags code are compared; an extension that cannot be read lets pass.
        if wanted is None:
            return True
        code = queue.tags_code(unit)
        return code is None or code & 0xFFFFFFFF in wanted

    def topics(self) -> list[str]:
        """list of str: topics that have a queue, sorted."""
        self._check_open()
        return sorted({topic for topic, _ in self.queues.keys()})

    def queue_ids(self, topic: str) -> list[int]:
        """list of int: the queues of `topic`, ascending."""
        self._check_open()
        return [queue_id for name, queue_id in self.queues.keys() if name == topic]

    def min_queue_offset(self, topic: str, queue_id: int = 0) -> int:
        """int: queue offset of the first message that is still there, 0 for an unknown queue."""
        self._check_open()
        return self._settled(self._bounds_of, topic, queue_id)[0]

    def max_queue_offset(self, topic: str, queue_id: int = 0) -> int:
        """int: queue offset of the next message to come, 0 for an unknown queue."""
        self._check_open()
        return self._settled(self._bounds_of, topic, queue_id)[1]

    def offset_by_time(self, topic: str, queue_id: int, timestamp: int, boundary: str = "lower") -> int:
        """int: queue offset that belongs to a store time (ms since epoch).

        Parameters
        ----------
        boundary : {"lower", "upper"}
            "lower": the first message stored at or after `timestamp`, the max offset if there is none; "upper": the last
            one stored at or before it, the min offset if there is none (RocketMQ 5.1.1 and later).
        """
        self._check_open()
        if boundary not in ("lower", "upper"):
            raise ValueError(f"boundary is {boundary!r}; give 'lower' or 'upper'")

        def ask() -> int:
            queue = self._queue(topic, queue_id)
            if queue is None:
                return 0
            return queue.offset_by_time(
                timestamp, boundary, self.commit_log.store_timestamp_at, self.commit_log.min_offset
            )

        return self._settled(ask)

    def consume(
        self,
        topic: str,
        group: str,
        *,
        queue_ids: Sequence[int] | None = None,
        tags: str | Iterable[str] | None = None,
        max_num: int = 32,
        consume_from: str | int = "first",
        timeout: float | None = None,
        offsets: ConsumerOffsets | LocalOffsets | None = None,
        broker_name: str = "",
    ) -> Consumer:
        """The messages of a topic from where the group stopped, one by one; waits for new ones.

        A message counts as consumed when the next one is asked for, or at `Consumer.commit` and `Consumer.close`; until
        then a consumer that dies gets it again (at least once).  Iteration ends when the store is closed.

        Parameters
        ----------
        topic, group : str
        queue_ids : sequence of int, optional
            Only these queues; by default all, also those that come into being later.
        tags : str or iterable of str, optional
            As of `get_message`.
        max_num : int
            How many messages are fetched at once.
        consume_from : {"first", "last"} or int
            Where a group begins that has no progress yet: at the oldest message, behind the newest, or at a store time
            in ms since epoch.
        timeout : float, optional
            Seconds after which iteration ends if there is no message; 0 = do not wait; by default it waits for ever.
        offsets : ConsumerOffsets or LocalOffsets, optional
            Where progress is kept instead of the store's own `consumer_offsets`; a reader of a store that another process
            writes to needs one, opened with ``read_only=False``.  It is persisted every `flush_consumer_offset_interval`
            ms and when the consumer is closed.
        broker_name : str
            For `LocalOffsets`.

        Raises
        ------
        ReadOnlyError
            The store is read-only and no `offsets` were given.
        ValueError
            A value out of range.
        """
        from rmqstore.consumer.consumer import Consumer

        self._check_open()
        if offsets is None:
            if self.read_only:
                raise ReadOnlyError(
                    "a store that was opened read-only cannot keep progress; give offsets=ConsumerOffsets.load(a path of "
                    "yours, read_only=False)",
                    self.path,
                )
            self._check_writable()
        return Consumer(
            self,
            topic,
            group,
            queue_ids=queue_ids,
            tags=tags,
            max_num=max_num,
            consume_from=consume_from,
            timeout=timeout,
            offsets=self.consumer_offsets if offsets is None else offsets,
            broker_name=broker_name,
            persist=offsets is not None,
        )

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
        self._check_open()
        if not self.read_only:
            with self._arrived:
                self._waiting += 1
                try:
                    return self._arrived.wait_for(lambda: self._closed or is_there(), timeout) and not self._closed
                finally:
                    self._waiting -= 1
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = _SHORTEST_POLL
        while not self._closed:
            self.refresh()
            if is_there():
                return True
            left = pause if deadline is None else min(pause, deadline - time.monotonic())
            if left <= 0:
                return False
            time.sleep(left)
            pause = min(pause * 2, _LONGEST_POLL)
        return False

    # ------------------------------------------------------------------------------------------------------- look up

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
        self._check_open()
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
            The text is no offset message id, and no message has it as the producer's id.
        OffsetOutOfRangeError, CorruptionError, ChecksumError
            As of `message_at`, where no message has it as the producer's id.
        """
        return self.commit_log.message_at(self.phy_offset_by_id(msg_id, topic))

    def phy_offset_by_id(self, msg_id: str, topic: str | None = None) -> int:
        """int: phy offset of the message that `message_by_id` gives, damaged or not; parameters and errors are the same.

        Both kinds of id have 32 hex digits.  A record at the place that an offset message id names must have that id;
        otherwise the id is looked for as a producer's, and counts as an offset message id again if no message has it (the
        broker's address may have been another when the id was made).
        """
        self._check_open()
        phy_offset, failure = -1, None
        try:
            phy_offset = parse_message_id(msg_id)[1]
            message = self.commit_log.look_up(phy_offset)
            if message is not None and message.msg_id == msg_id.upper():
                return phy_offset
        except InvalidMessageError as error:
            if not isinstance(msg_id, str):
                raise
            message, failure = None, error
        names = self.topics() if topic is None else [topic]
        for name in names:
            found = self.query_message(name, msg_id, 1, index_type="U")
            if found:
                return found[0].phy_offset
        if message is not None:
            return phy_offset
        searched = f"nor has a message of {f'topic {topic}' if topic is not None else f'{len(names)} topics'} it as producer's id"
        if failure is not None:
            raise InvalidMessageError(f"{failure.message}; {searched}", failure.path, failure.pos)
        try:
            self.commit_log.message_at(phy_offset)
        except OffsetOutOfRangeError as error:
            raise OffsetOutOfRangeError(
                f"{msg_id} is no offset message id of this store (phy offset {phy_offset} is outside the log), {searched}",
                self.path,
            ) from error
        return phy_offset

    def messages(self, begin_phy_offset: int | None = None, end_phy_offset: int | None = None) -> Iterator[MessageExt]:
        """Every message of the log in order; damaged stretches are passed over (`verify` reports them)."""
        self._check_open()
        for page in self.commit_log.pages(begin_phy_offset, end_phy_offset):
            if isinstance(page, list):
                for message in page:
                    yield message
                    # The log reads ahead, and what it has read must not outlive the store.
                    if self._closed:
                        self._check_open()

    # ------------------------------------------------------------------------------------------------------- columns

    def scan(
        self,
        columns: Iterable[str] | None = None,
        *,
        topic: str | Iterable[str] | None = None,
        queue_id: int | Iterable[int] | None = None,
        tags: str | Iterable[str] | None = None,
        begin_phy_offset: int | None = None,
        end_phy_offset: int | None = None,
        begin_timestamp: int | None = None,
        end_timestamp: int | None = None,
        batch_size: int = 8192,
        use_threads: bool = True,
    ) -> Iterator[pa.RecordBatch]:
        """The messages of the log in order, as Arrow record batches in which only the asked columns are decoded.

        A row equals the message that `messages` gives; docs/columns.md has the columns and their types.  What was put
        after the call is not in it.  The GIL is released for each batch.

        Parameters
        ----------
        columns : iterable of str, optional
            Names, in the order of the result; by default `rmqstore.store.columns.DEFAULT_COLUMNS`.
        topic : str or iterable of str, optional
            Only these topics; likewise below.
        queue_id : int or iterable of int, optional
        tags : str or iterable of str, optional
            As of `get_message`.
        begin_phy_offset, end_phy_offset : int, optional
            Records that begin at or after the first and before the second.
        begin_timestamp, end_timestamp : int, optional
            Store time range in ms since epoch, both inclusive.
        batch_size : int
            Rows of a batch at most, 1 to 2**30; a batch ends earlier when its bodies and properties take 64 MiB.
        use_threads : bool
            Decode a log of more than a few MiB ahead of the caller, on as many processors as this process may use, at most
            four.  Rows and their order are those of one thread; where batches end may differ.  The threads start behind
            the first batch and end with the iterator.

        Yields
        ------
        pyarrow.RecordBatch
            Never empty.  A record that does not agree with its CRC is a row with ``corrupt`` set and its body as it is
            stored; damaged stretches are passed over (`verify` reports them).

        Raises
        ------
        ValueError
            A column that does not exist, or a number out of range.
        MissingDependencyError
            pyarrow is not installed, or the library that a body was compressed with.
        """
        self._check_open()
        log = self.commit_log
        names = chosen_columns(columns)
        subscription = _subscription(tags)
        choice = (
            _texts(topic),
            None if queue_id is None else [queue_id] if isinstance(queue_id, int) else list(queue_id),
            None if subscription is None else _texts(text for texts in subscription.values() for text in texts),
            *time_range(begin_timestamp, end_timestamp),
        )

        def make() -> Columns:
            made = Columns(names, batch_size, log.crc_check)
            made.out.choose(*choice)
            return made

        made = make()
        if self.read_only:
            log.refresh()
        end = log.max_offset if end_phy_offset is None else end_phy_offset
        return record_batches(log, made, begin_phy_offset, end, make if use_threads else None)

    def get_table(
        self,
        topic: str,
        queue_id: int = 0,
        queue_offset: int = 0,
        max_num: int | None = None,
        tags: str | Iterable[str] | None = None,
        columns: Iterable[str] | None = None,
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

        Returns
        -------
        pyarrow.Table
            Fewer than `max_num` rows mean that the end of the queue was reached; otherwise go on behind the last row's
            ``queue_offset``.  An unknown queue has no rows.  A record of an inner batch is one row.

        Raises
        ------
        ValueError, MissingDependencyError
            As of `scan`.
        """
        self._check_open()
        if max_num is not None and max_num < 0:
            raise ValueError(f"max_num is {max_num}; give 0 or more, or None for all")
        subscription = _subscription(tags)
        texts = None if subscription is None else [text for each in subscription.values() for text in each]

        def ask() -> pa.Table:
            queue = self._queue(topic, queue_id)
            made = Columns(columns, 8192 if max_num is None else min(max(max_num, 1), 8192), self.commit_log.crc_check)
            made.out.choose(tags=_texts(texts))
            first = max(queue_offset, self._bounds(queue)[0])
            return queue_table(self.commit_log, queue, made, first, max_num, texts)

        return self._settled(ask)

    def query_table(
        self,
        keys: Any,
        topic: str | Iterable[str],
        columns: Iterable[str] | None = None,
        max_num: int = 64,
        begin: int | None = None,
        end: int | None = None,
        *,
        index_type: str | None = None,
        max_log_bytes: int | None = DEFAULT_LOG_BYTES,
        progress: Callable[[int, int], object] | None = None,
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
        begin, end : int, optional
            Store time range in ms since epoch, inclusive and exact.
        index_type : {None, "U", "K", "T"}
            As of `query_message`.

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
        self._check_open()
        if index_type not in (None, "U", "K", "T"):
            raise ValueError(f"index_type is {index_type!r}; give None, 'U' (unique key), 'K' (key) or 'T' (tag)")
        times = time_range(begin, end)

        def ask() -> pa.Table:
            return key_table(self.commit_log, self.index_service, keys, topic, columns, max_num, times, index_type)

        if self.index_service is None:
            return self._settled(ask)
        while True:
            self._look_at_log(max_log_bytes, progress, index_type)
            table = self._settled(ask)
            if not self.index_service.note_damage():
                return table

    # --------------------------------------------------------------------------------------------------------- query

    def query_offsets(
        self,
        topic: str,
        key: str,
        max_num: int = 64,
        begin: int = 0,
        end: int = _INT64_MAX,
        *,
        index_type: str | None = None,
    ) -> list[int]:
        """list of int: what RocketMQ's index service (5.5.0) answers: phy offsets, newest first, quirks included.

        Parameters
        ----------
        index_type : {None, "U", "K", "T"}
            "T" asks for a tag; unique keys and keys share one form.
        """
        return self._query_offset(topic, key, max_num, begin, end, index_type).phy_offsets

    def _query_offset(
        self, topic: str, key: str, max_num: int, begin: int, end: int, index_type: str | None
    ) -> QueryOffsetResult:
        self._check_open()
        text = _index_text(key, index_type)
        if self.index_service is None:
            return QueryOffsetResult([], 0, 0)
        self._follow_index()
        return self.index_service.query_offset(topic, text, max_num, begin, end)

    def query_message(
        self,
        topic: str,
        key: str,
        max_num: int = 64,
        begin: int | None = None,
        end: int | None = None,
        # Not keyword-only, which Python looks up one by one in a dict at every call.
        max_log_bytes: int | None = DEFAULT_LOG_BYTES,
        progress: Callable[[int, int], object] | None = None,
        *,
        index_type: str | None = None,
        compat: bool = False,
    ) -> QueryResult:
        """Find messages by key.

        What the index does not cover is looked for in the log: an index file is gone or damaged, or the broker died before it
        indexed the newest records.  That part of the log is gone over once while the store is open, and remembered.

        Parameters
        ----------
        topic, key : str
            A key, a unique key, or with ``index_type="T"`` a tag.
        max_num : int
            At most so many; any number.
        begin, end : int, optional
            Store time range in ms since epoch, inclusive and exact.
        index_type : {None, "U", "K", "T"}
            None: unique key or keys; "U" only the unique key, "K" only the keys, "T" the tag.
        compat : bool
            Answer as RocketMQ's ``queryMessage`` (5.5.0) does: at most 64, ascending offsets, duplicates and messages
            with other keys of the same hash included, times compared by whole seconds.  The log is not searched.
        max_log_bytes : int, optional
            Go over at most so many bytes of the log that the index does not cover; None = all of them.
        progress : callable, optional
            Told how many bytes of these were gone over, and how many there are.

        Returns
        -------
        QueryResult
            Newest first, each once, every one checked against its topic and key; `truncated` when there are more, not
            `complete` where a part of the log was not looked at.
        """
        quick = self._key_query
        if quick is not None and begin is None and end is None and index_type is None and not compat:
            # Most queries follow soon on another one, and ask for nothing unusual.
            answer = quick.find(topic, key, max_num)
            if answer is not None:
                return answer
        self._check_open()
        if compat:
            return self._query_like_java(topic, key, max_num, begin, end, index_type)
        text = key if index_type is None else _index_text(key, index_type)
        index_service = self.index_service
        if index_service is None:
            return QueryResult(uncovered=self._whole_log())
        if max_num < 0:
            return QueryResult()
        low, high = _INT64_MIN, _INT64_MAX
        if begin is not None or end is not None:
            # Whole milliseconds, as far as 64 bits go.
            low = low if begin is None else max(math.ceil(begin), low)
            high = high if end is None else min(math.floor(end), high)
            if low > high:
                return QueryResult()
        while True:
            uncovered = self._look_at_log(max_log_bytes, progress, index_type)
            found = self._query_exactly(topic, key, text, max_num, low, high, index_type, uncovered)
            # Where an index file turns out to be damaged, the log has what it hides.
            if not index_service.note_damage():
                return found

    def _query_exactly(
        self,
        topic: str,
        key: str,
        text: str,
        max_num: int,
        low: int,
        high: int,
        index_type: str | None,
        uncovered: tuple[tuple[int, int], ...],
    ) -> QueryResult:
        index_service = self.index_service
        assert index_service is not None
        if "\ufffd" in topic or "\ufffd" in key:
            # Text that was replaced while it was decoded cannot be compared as bytes.
            return self._query_by_text(topic, key, text, max_num, low, high, index_type, uncovered)
        if max_num > _INT64_MAX:
            max_num = _INT64_MAX
        log = self.commit_log
        found = _read.find_messages(
            index_service.newest_first(), self._region_of, topic, key, _KEY_KINDS[index_type], low, high, max_num,
            QueryResult, MessageExt, log.crc_check, encode_java_utf8, log.queue,
        )  # fmt: skip
        if found is not None:
            found._uncovered = uncovered
            return found
        result = QueryResult(uncovered=uncovered)
        search = KeySearch(
            topic, key, _KEY_KINDS[index_type], low, high, max_num, result, MessageExt, log.crc_check, encode_java_utf8,
            log.queue,
        )  # fmt: skip
        for index in index_service.newest_first():
            at = -1
            while at:
                at = search.walk(index, at, log.region_of)
            if search.truncated:
                break
        if not search.descending:
            result.sort(key=lambda message: -message.phy_offset)
        result.truncated = search.truncated
        return result

    def _whole_log(self) -> tuple[tuple[int, int], ...]:
        low, high = self.commit_log.min_offset, self.commit_log.max_offset
        return ((low, high),) if low < high else ()

    def _look_at_log(
        self, max_log_bytes: int | None, progress: Callable[[int, int], object] | None, index_type: str | None
    ) -> tuple[tuple[int, int], ...]:
        # Makes sure that exact questions are asked of the whole log; what of it stays out.
        assert self._log_index is not None
        self._follow_index()
        self._log_index.cover(max_log_bytes, progress)
        if index_type == "T" and not self.config.index_tags:
            # No entry says anything about tags.
            return self._whole_log()
        return self._log_index.uncovered

    def _query_by_text(
        self,
        topic: str,
        key: str,
        text: str,
        max_num: int,
        low: int,
        high: int,
        index_type: str | None,
        uncovered: tuple[tuple[int, int], ...] = (),
    ) -> QueryResult:
        assert self.index_service is not None
        result = QueryResult(uncovered=uncovered)
        seen: set[int] = set()
        for phy_offset in self.index_service.candidates(topic, text):
            if phy_offset in seen:
                continue
            seen.add(phy_offset)
            message = self.commit_log.look_up(phy_offset)
            if message is None or message.topic != topic or not _has_key(message, key, index_type):
                of_hash = np.array([_core.index_key_hash(topic, text)], np.int32)
                doubt_entries(self.commit_log, self.index_service, of_hash, np.array([phy_offset]))
                continue
            if not low <= message.store_timestamp <= high:
                continue
            if len(result) >= max_num:
                result.truncated = True
                break
            result.append(message)
        result.sort(key=lambda message: -message.phy_offset)
        return result

    def _query_like_java(
        self, topic: str, key: str, max_num: int, begin: int | None, end: int | None, index_type: str | None
    ) -> QueryResult:
        # RocketMQ 5.5.0 DefaultMessageStore.queryMessage: up to three rounds, each ending before the oldest hit so far.
        low = 0 if begin is None else begin
        high = _INT64_MAX if end is None else end
        messages: list[MessageExt] = []
        for _ in range(3):
            offsets = self._query_offset(topic, key, max_num, low, high, index_type).phy_offsets
            if not offsets:
                break
            for number, phy_offset in enumerate(sorted(offsets)):
                message = self.commit_log.look_up(phy_offset)
                if message is None:
                    continue
                if number == 0:
                    high = message.store_timestamp
                messages.append(message)
            if messages or high < low:
                break
        return QueryResult(messages)


def _process_id_in(path: str) -> int:
    # RocketMQ before 5.0.0 leaves the file empty.
    try:
        with open(open_regular(path), "rb") as file:
            text = file.read(32)
    except OSError:
        return -1
    return int(text) if text.isdigit() else -1


def _as_stored(text: str | None) -> str:
    # A lone surrogate becomes "?" in the record, and it is the record's text that is indexed.
    if not text:
        return ""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return decode_java_utf8(encode_java_utf8(text))


def _as_new(message: MessageExt) -> Message:
    # A message that was read is put again as it was sent.
    return Message(
        message.topic,
        message.body_stored,
        properties=message.properties,
        flag=message.flag,
        born_timestamp=message.born_timestamp,
        born_host=message.born_host,
        sys_flag=message.sys_flag & ~(SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6).value,
        reconsume_times=message.reconsume_times,
        prepared_transaction_offset=message.prepared_transaction_offset,
    )


def _table_parts(
    table: Any,
    keep_timestamps: bool,
    topic: str | None,
    queue_id: int | None,
    keys: Iterable[str] | str | None,
    tags: str | None,
    properties: Mapping[str, str | None] | None,
    flag: int | None,
    born_timestamp: int | None,
) -> list[TablePart]:
    literals = {
        "topic": topic, "queue_id": queue_id, "keys": keys, "tags": tags, "properties": properties, "flag": flag,
        "born_timestamp": born_timestamp,
    }  # fmt: skip
    if keys is not None and not isinstance(keys, str):
        literals["keys"] = list(keys)
    return table_parts(table, literals, keep_timestamps=keep_timestamps, max_rows=_TABLE_ROWS)


def _subscription(tags: str | Iterable[str] | None) -> dict[int, set[str]] | None:
    # Tag texts by the low 32 bits of their hash; None keeps all.
    if tags is None:
        return None
    names = [part.strip() for part in tags.split("||")] if isinstance(tags, str) else list(tags)
    names = [name for name in names if name]
    if not names or "*" in names:
        return None
    wanted: dict[int, set[str]] = {}
    for name in names:
        wanted.setdefault(tags_code(name) & 0xFFFFFFFF, set()).add(name)
    return wanted


def _texts(names: str | Iterable[str] | None) -> list[bytes] | None:
    if names is None:
        return None
    return [encode_java_utf8(name) for name in ([names] if isinstance(names, str) else names)]


def _index_text(key: str, index_type: str | None) -> str:
    if index_type is None:
        return key
    if index_type not in ("U", "K", "T"):
        raise ValueError(f"index_type is {index_type!r}; give None, 'U' (unique key), 'K' (key) or 'T' (tag)")
    return "T#" + key if index_type == "T" else key


def _has_key(message: MessageExt, key: str, index_type: str | None) -> bool:
    if index_type == "T":
        return message.tags == key
    return (index_type != "K" and message.unique_key == key) or (index_type != "U" and key in message.keys)


def _has_store(root: str) -> bool:
    return any(
        os.path.isdir(os.path.join(root, name)) and bool(os.listdir(os.path.join(root, name)))
        for name in ("commitlog", "consumequeue", "batchconsumequeue", "index")
    )
