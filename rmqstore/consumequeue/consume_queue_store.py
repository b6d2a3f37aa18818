"""All consume queues of a store: their list and kinds, finding and creating one.

Owns the list of queues by topic and queue id.  A queue's files are opened at its first use, so a store with ten thousand queues
opens by listing names.  A topic has batch queues by their directory, by the broker's topics (attribute ``queue.type``) in
``config/topics.json`` or in RocksDB, or by its first record, if that is an inner batch.  It never reads the commit log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rmqstore import _numpy as np
from rmqstore._dispatch import RecordColumns
from rmqstore._shown import shows
from rmqstore.config import StoreConfig
from rmqstore.consumequeue.batch_consume_queue import BatchConsumeQueue
from rmqstore.consumequeue.consume_queue import ConsumeQueue
from rmqstore.consumequeue.queue_folders import queue_directories
from rmqstore.consumequeue.queue_look import (
    PlainQueue,
    QueueLook,
    ends_as,
    look_at_files,
    look_at_queue,
    plain_queue,
    unit_in_files,
)
from rmqstore.consumequeue.unit_queue import Unit
from rmqstore.errors import GeometryError, MissingDependencyError, OffsetOutOfRangeError, StoreError
from rmqstore.files.listing import is_empty
from rmqstore.files.mapped_file import MappedFile, MappedFilePool, NotCopied
from rmqstore.files.open_file import read_small_file
from rmqstore.files.os_errors import is_broken_link, is_unreadable, with_path
from rmqstore.message import decode_java_utf8
from rmqstore.rocksdb.database import queue_databases
from rmqstore.rocksdb.settings import SettingsDatabase, database_state, settings_layouts

__all__ = ["AnyConsumeQueue", "ConsumeQueueStore", "unseen_text"]

if TYPE_CHECKING:
    from rmqstore.commitlog.commit_log import CommitLog
    from rmqstore.consumequeue.database_queues import DatabaseQueues

logger = logging.getLogger(__name__)

AnyConsumeQueue = ConsumeQueue | BatchConsumeQueue


@shows(
    "config", "find", "keys", "read_only", "root",
)  # fmt: skip
class ConsumeQueueStore(NotCopied):
    """The queues below a store's root directory.

    Parameters
    ----------
    root : str
    config : StoreConfig
    pool : MappedFilePool
    read_only : bool

    Attributes
    ----------
    unseen : dict of str to OSError
        Unreadable folders and their errors (read-only use); their queues are unknown.
    unread : dict of (str, int) to OSError
        The errors that `leave_out` took, by topic and queue id.
    """

    _queues: dict[tuple[str, int], AnyConsumeQueue | None]

    def __init__(
        self,
        root: str,
        config: StoreConfig,
        pool: MappedFilePool,
        *,
        read_only: bool = False,
    ):
        self.root = root
        self.config = config
        self.pool = pool
        self.read_only = read_only
        self.unseen: dict[str, OSError] = {}
        self.unread: dict[tuple[str, int], OSError] = {}
        self._queues = {}
        # What is known of queues that are not open, from a look just before; each is used once.
        self.plain_queues: dict[tuple[str, int], PlainQueue] = {}
        self._batch_topics: set[str] = set()
        self._topics_state: tuple[Any, ...] = ()
        self._extended = False
        self._in_memory = False
        # Units of queues in RocksDB (read-only use).
        self.source: DatabaseQueues | None = None
        self._lock = threading.RLock()

    def renew_lock(self) -> None:
        """Replace the locks after a fork."""
        self._lock = threading.RLock()
        if self.source is not None:
            self.source.renew_lock()

    @property
    def lock(self) -> threading.RLock:
        """The lock for opening queues and adding units."""
        return self._lock

    def load(self) -> None:
        """Find the queues by their folders; the first use of a queue opens its files."""
        queues: dict[tuple[str, int], AnyConsumeQueue | None] = {}
        unseen: dict[str, OSError] | None = {} if self.read_only else None
        for topic, queue_id, _ in queue_directories(self.root, ConsumeQueue.kind, unseen):
            queues[topic, queue_id] = None
        for topic, queue_id, directory in queue_directories(self.root, BatchConsumeQueue.kind, unseen):
            if (topic, queue_id) in queues and not is_empty(directory):
                raise GeometryError(
                    f"topic {topic!r} has both simple and batch queues; move the directory away that does not belong to "
                    "it, then rebuild the queues",
                    directory,
                )
            queues[topic, queue_id] = None
            self._batch_topics.add(topic)
        for folder, error in (unseen or {}).items():
            if folder not in self.unseen:
                logger.warning("%s: %s", folder, unseen_text(error))
        self.unseen = unseen or {}
        if self.source is not None:
            for key in self.source.keys():
                queues.setdefault(key, None)
        # Open queues stay open.
        queues.update((key, queue) for key, queue in self._queues.items() if queue is not None)
        self._queues = queues
        self._extended = self.config.enable_consume_queue_ext or os.path.isdir(
            os.path.join(self.root, "consumequeue_ext")
        )
        self.load_topics(os.path.join(self.root, "config", "topics.json"))

    def load_topics(self, path: str) -> None:
        """Read the topics of queue type BatchCQ from a ``topics.json``, and from the store's RocksDB of topics.

        Missing and unreadable files are ignored; a writer without permission to read them gets the error.
        """
        self._batch_topics |= _batch_topics_of(path, self.read_only)
        root = os.path.dirname(os.path.dirname(path))
        state = database_state(root)
        if state != self._topics_state:
            # A reader lists the queues often, and opens only a changed database.
            self._topics_state = state
            self._batch_topics |= _batch_topics_in_databases(root)

    def keys(self) -> list[tuple[str, int]]:
        """Return topic and queue id of every queue, sorted."""
        with self._lock:
            return sorted(self._queues)

    @property
    def batch_topics(self) -> frozenset[str]:
        """The topics with batch queues."""
        return frozenset(self._batch_topics)

    def is_batch_topic(self, topic: str) -> bool:
        """Return True if the topic has batch queues."""
        return topic in self._batch_topics

    def add_batch_topic(self, topic: str) -> bool:
        """Note that `topic` has batch queues; False if it has simple ones."""
        with self._lock:
            if topic not in self._batch_topics and any(name == topic for name, _ in self._queues):
                return False
            self._batch_topics.add(topic)
            return True

    def find(self, topic: str, queue_id: int) -> AnyConsumeQueue | None:
        """Return the queue, None for none; OSError if its folder, or one that may contain it, is unreadable."""
        queue = self._queues.get((topic, queue_id))
        if queue is None and (topic, queue_id) in self._queues:
            with self._lock:
                queue = self._queues[topic, queue_id]
                if queue is None:
                    queue = self._open(topic, queue_id)
                    self._queues[topic, queue_id] = queue
        if queue is None and self.unseen:
            self.check_seen(topic)
        return queue

    def check_seen(self, topic: str | None = None) -> None:
        """Raise OSError if an `unseen` folder may contain queues of `topic` (of any topic by default)."""
        for folder, error in self.unseen_of(topic):
            raise with_path(error, folder)

    def unseen_of(self, topic: str | None = None) -> list[tuple[str, OSError]]:
        """Return the `unseen` folders that may contain queues of `topic` (of any topic by default)."""
        found = []
        for folder, error in self.unseen.items():
            # The folder of all queues, of a topic, or of one queue.
            names = folder[len(self.root) :].strip(os.sep).split(os.sep)
            if topic is None or len(names) == 1 or names[1] == topic:
                found.append((folder, error))
        return found

    def leave_out(self, topic: str, queue_id: int, error: OSError) -> None:
        """Note that an answer about many queues lacks this one, which is unreadable; raise any other error."""
        if not (self.read_only and is_unreadable(error)):
            raise error
        if (topic, queue_id) not in self.unread:
            where = self.root if error.filename is None else os.fsdecode(error.filename)
            logger.warning(
                "%s: queue %d of %s is left out, as this cannot be read (%s); let this user read it, or restore it "
                "from a copy if the disk fails",
                where, queue_id, topic, error.strerror or error,
            )  # fmt: skip
        self.unread[topic, queue_id] = error

    def _open(self, topic: str, queue_id: int) -> AnyConsumeQueue:
        source = self.source
        if source is not None and topic not in self._batch_topics and source.is_batch(topic, queue_id):
            self._batch_topics.add(topic)
        queue = self._make(topic, queue_id)
        plain = self.plain_queues.pop((topic, queue_id), None)
        if plain is None:
            queue.load()
        else:
            queue.files.take(plain.offsets, plain.end)
        return source.queue(queue) if source is not None and source.goes_beyond(queue) else queue

    def look_again(self, keys: Iterable[tuple[str, int]]) -> None:
        """Open these queues again at their next use: their source has new units (read-only use)."""
        with self._lock:
            for key in keys:
                self._queues[key] = None

    def find_or_create(self, topic: str, queue_id: int) -> AnyConsumeQueue:
        """Return the queue; a new one gets its first file with its first unit."""
        queue = self._find_or_create(topic, queue_id)
        if self._in_memory and not queue.in_memory:
            queue.in_memory = True
        return queue

    @contextlib.contextmanager
    def in_memory(self) -> Iterator[None]:
        """Put units into memory while this runs, until `forget_memory` (read-only use)."""
        self._in_memory = True
        try:
            yield
        finally:
            self._in_memory = False

    def forget_memory(self) -> None:
        """Forget the units that are in memory, and list the queues on disk again."""
        with self._lock:
            kept = {}
            for key, queue in self._queues.items():
                if queue is None or not queue.in_memory:
                    kept[key] = queue
                else:
                    # Other threads may still use it.
                    queue.let_go()
            self._queues = kept
            self.load()

    def _find_or_create(self, topic: str, queue_id: int) -> AnyConsumeQueue:
        queue = self.find(topic, queue_id)
        if queue is None:
            with self._lock:
                # It may have files, of an extension for instance.
                queue = self._make(topic, queue_id)
                queue.load()
                if not self.read_only:
                    queue.tidy()
                self._queues[topic, queue_id] = queue
        return queue

    def forget(self, topic: str, queue_id: int) -> None:
        """Remove a queue without a file from the list, and its folder."""
        with self._lock:
            queue = self._queues.get((topic, queue_id))
            if queue is not None and not len(queue.files):
                del self._queues[topic, queue_id]
                queue.close()
                if not self.read_only:
                    # A folder that stays is no reason to refuse the store.
                    with contextlib.suppress(OSError):
                        os.rmdir(queue.files.path)

    def forget_empty_batch_queues(self) -> None:
        """Remove batch queues without a file from the list, and their folders.

        RocketMQ 5.5.0 raises a NullPointerException for the first message of a batch queue with an empty folder
        (``BatchConsumeQueue.getMinMsgOffset``), and not without the folder.
        """
        with self._lock:
            for (topic, queue_id), queue in list(self._queues.items()):
                if isinstance(queue, BatchConsumeQueue) and not len(queue.files):
                    self.forget(topic, queue_id)

    def plain(self, topic: str, queue_id: int) -> PlainQueue | None:
        """Return the result of `plain_queue` for a queue that is not open; None for an open one."""
        if self._extended or topic in self._batch_topics or self._queues.get((topic, queue_id)) is not None:
            return None
        return plain_queue(self._plain_directory(topic, queue_id), self.config.consume_queue_file_size)

    def look(
        self, topic: str, queue_id: int, min_phy_offset: int, *, sizes: bool = False, offsets: Collection[int] = ()
    ) -> QueueLook | None:
        """Return the bounds and the last unit of a queue, None if there is no such queue.

        A queue that is not open is read from its files, if possible; `sizes` and `offsets` as for `look_at_files`.
        """
        if self._is_in_files(topic, queue_id):
            directory, file_size = self._plain_directory(topic, queue_id), self.config.consume_queue_file_size
            found = look_at_files(directory, file_size, min_phy_offset, sizes=sizes, offsets=offsets)
            if found is not None:
                return found
        queue = self.find(topic, queue_id)
        return None if queue is None else look_at_queue(queue, min_phy_offset, sizes=sizes)

    def ends_as(self, topic: str, queue_id: int, look: QueueLook) -> bool:
        """Return True if the queue is not open and still ends as this look found it."""
        if not self._is_in_files(topic, queue_id):
            return False
        return ends_as(self._plain_directory(topic, queue_id), self.config.consume_queue_file_size, look)

    def folder_mark(self, topic: str, queue_id: int) -> tuple[int, int] | None:
        """Return inode and change time of the folder with all files of a queue, None for no such folder."""
        if self._extended:
            return None
        try:
            status = os.stat(self._plain_directory(topic, queue_id))
        except OSError:
            return None
        return status.st_ino, status.st_ctime_ns

    def unit(self, topic: str, queue_id: int, queue_offset: int) -> Unit | None:
        """Return the unit that holds a queue offset, None for none; opens no queue if possible, like `look`."""
        if queue_offset >= 0 and self._is_in_files(topic, queue_id):
            directory = self._plain_directory(topic, queue_id)
            with contextlib.suppress(GeometryError):
                return unit_in_files(directory, self.config.consume_queue_file_size, queue_offset)
        queue = self.find(topic, queue_id)
        return None if queue is None else queue.unit(queue_offset)

    def dispatched_end(self, commit_log: CommitLog) -> int:
        """Return the phy offset of the end of the newest record if its queue has it, else -1.

        Records are dispatched in order, so all of them are in their queues then.
        """
        newest = commit_log.look_up(commit_log.last_record())
        if newest is None:
            return -1
        try:
            unit = self.unit(newest.topic, newest.queue_id, newest.queue_offset)
        except (OffsetOutOfRangeError, OSError):
            return -1
        return newest.phy_offset + newest.size if unit is not None and unit.phy_offset == newest.phy_offset else -1

    def _is_in_files(self, topic: str, queue_id: int) -> bool:
        # True for a listed simple queue that is not open and has all units in files.
        if self._extended or self.source is not None or topic in self._batch_topics:
            return False
        return self._queues.get((topic, queue_id), self) is None

    def plain_agrees(
        self, plain: PlainQueue, topic: str, queue_id: int, columns: RecordColumns, rows: np.ndarray
    ) -> bool | None:
        """Call `ConsumeQueue.agrees` for a queue that is not open; None for an open one, or if it must be opened."""
        if self._queues.get((topic, queue_id)) is not None:
            return None
        return plain.agrees(self._plain_directory(topic, queue_id), self.config.consume_queue_file_size, columns, rows)

    def _plain_directory(self, topic: str, queue_id: int) -> str:
        # The topic is the name of a listed directory.
        return os.sep.join((self.root, ConsumeQueue.kind, topic, str(queue_id)))

    def unit_num(self, topic: str, queue_id: int) -> int | None:
        """Return the number of units of an open queue, None for others."""
        queue = self._queues.get((topic, queue_id))
        return None if queue is None else queue.unit_num

    def set_aside(self, limit: int) -> None:
        """Close clean queues if there are more than `limit` queues, after a scan of all; nobody else may use one."""
        with self._lock:
            if len(self._queues) <= limit:
                return
            for key, queue in self._queues.items():
                if queue is None or queue.in_memory:
                    continue
                if not any(mapped_file in self.pool.dirty for mapped_file in queue.mapped_files()):
                    self._queues[key] = None
                    queue.close()

    def _make(self, topic: str, queue_id: int) -> AnyConsumeQueue:
        kind = BatchConsumeQueue if topic in self._batch_topics else ConsumeQueue
        return kind(self.root, topic, queue_id, self.config, self.pool, read_only=self.read_only)

    def refresh(self) -> None:
        """Find queues that another process created (read-only use)."""
        with self._lock:
            self.load()

    def __iter__(self) -> Iterator[AnyConsumeQueue]:
        for topic, queue_id in self.keys():
            queue = self.find(topic, queue_id)
            if queue is not None:
                yield queue

    def opened(self) -> list[AnyConsumeQueue]:
        """Return the open queues."""
        with self._lock:
            return [queue for queue in self._queues.values() if queue is not None]

    def take_config(self, config: StoreConfig) -> None:
        """Open all queues again with these sizes at their next use (read-only use)."""
        with self._lock:
            self.config = config
            self._queues = dict.fromkeys(self._queues)

    def take_dirty(self, least_pages: int = 0) -> list[MappedFile]:
        """Return the files that were written since the last call, see `MappedFileQueue.take_dirty`."""
        files: list[MappedFile] = []
        for queue in self.opened():
            files += queue.take_dirty(least_pages)
        return files

    def flush(self) -> None:
        """Force everything written to the disk."""
        for mapped_file in self.take_dirty():
            mapped_file.flush()

    def close(self) -> None:
        """Close every queue."""
        for queue in self.opened():
            queue.close()
        if self.source is not None:
            self.source.close()


def unseen_text(error: OSError) -> str:
    """Return the message about a folder of queues that is unreadable because of `error`."""
    return (
        f"this folder cannot be looked into ({error.strerror or error}), and which queues are in it is not known; "
        + ("restore the folder that it points to" if is_broken_link(error) else "let this user list and search it")
    )


def _batch_topics_of(path: str, read_only: bool) -> set[str]:
    import json

    # Directories and records decide if the file is unreadable.  Values that are nested too deeply raise RecursionError.
    try:
        table = json.loads(decode_java_utf8(read_small_file(path) or b"{}")).get("topicConfigTable", {})
        return {topic for topic, options in table.items() if _has_batch_queues(options)}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        if not read_only and isinstance(error, PermissionError):
            raise
        return set()


def _has_batch_queues(options: Any) -> bool:
    attributes = options.get("attributes") or {}
    return bool(attributes.get("queue.type", attributes.get("+queue.type")) == "BatchCQ")


def _batch_topics_in_databases(root: str) -> set[str]:
    import json

    found = set()
    for layout in settings_layouts(root, "topics"):
        try:
            with SettingsDatabase(root, layout, "topics") as database:
                for name, text in database.texts():
                    with contextlib.suppress(ValueError, AttributeError, TypeError, RecursionError):
                        if _has_batch_queues(json.loads(text)):
                            found.add(name)
        except (StoreError, OSError) as error:
            # The opening of queues in RocksDB reports missing rocksdict.
            if not isinstance(error, MissingDependencyError) or not queue_databases(root):
                logger.warning("which topics have batch queues is not known from the broker's settings: %s", error)
    return found
