"""What one broker has in tiered storage: its folders, its queues, and its messages by key.

Owns choosing the folder of the broker, opening queues at their first use, and the two ways to look a key up: exactly, and as
RocketMQ does.  It changes nothing and takes no lock.  An exact answer lacks nothing that is there: where index files are
missing, damaged or do not reach so far, the records themselves are gone over.  What cannot be read at all is told to
`on_damage`, and is an error without it.

Facts (RocketMQ 5.5.0): <path>/<8 hex of the MD5 of the cluster>_<cluster>/<broker>/<topic>/<queue id>/.  Index files have no
tags.  The real query asks only files that were made between begin and end, and never compares key texts.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator

from rmqstore.errors import CorruptionError, Finding, StoreClosedError, StoreError
from rmqstore.files.listing import ask_again, listing
from rmqstore.files.mapped_file import MappedFilePool, NotCopied
from rmqstore.files.open_file import is_directory
from rmqstore.flatfile.flat_files import EXPIRED, name_prefix
from rmqstore.flatfile.flat_index import FlatIndex, IndexItem, flat_index_hash
from rmqstore.flatfile.flat_queue import FlatQueue
from rmqstore.flatfile.metadata import FlatFileMetadata, TieredMetadata
from rmqstore.index.key_source import SoughtKeys
from rmqstore.message import MessageExt
from rmqstore.selection import Selection

__all__ = ["INDEX_TOPIC", "FlatStore"]

logger = logging.getLogger(__name__)

INDEX_TOPIC = "rmq_sys_INDEX"
"""The folder among the topics that has the index files."""

_NO_HASH = -(2**31)
# So many messages in a row without a key are read one by one; after more, a search looks for the next key.
_KEYLESS = 256
# Seconds.
_LOOK_INTERVAL = 1.0


class FlatStore(NotCopied):
    """The flat files of one broker, read-only.

    Parameters
    ----------
    path : path
        The root of tiered storage (RocketMQ's tieredStoreFilePath).
    store_path : path, optional
        The root of the broker's local store: its metadata say what should be there, and newest index files are in it.
    cluster, broker : str, optional
        Whose files; needed where there are several.
    on_damage : callable, optional
        Takes a `Finding` of each place that an answer cannot look at; without it such an answer is a `CorruptionError`.

    goes_on : bool
        As of `FlatFiles`; it may be set until the first queue is asked for.

    Attributes
    ----------
    folder : str
        The broker's folder.
    metadata : TieredMetadata or None
    index : FlatIndex

    Raises
    ------
    StoreError
        There is no such folder, or none or several brokers in it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        store_path: str | os.PathLike[str] | None = None,
        *,
        cluster: str | None = None,
        broker: str | None = None,
        on_damage: Callable[[Finding], object] | None = None,
        goes_on: bool = False,
    ):
        self.path = os.fspath(path)
        self.store_path = None if store_path is None else os.fspath(store_path)
        self.on_damage, self.goes_on = on_damage, goes_on
        self._warned_of: set[str] = set()
        self._pool = MappedFilePool(1024)
        self.metadata: TieredMetadata | None = None
        self._metadata_problem: Finding | None = None
        self._load_metadata()
        self.folder, self.cluster, self.broker = self._choose(cluster, broker)
        self._queues: dict[tuple[str, int], FlatQueue] = {}
        self._indexed_from: dict[tuple[str, int], int] = {}
        self._indexed_to: dict[tuple[str, int], int] = {}
        # Folders of topics that cannot be listed, by topic; of "" the broker's own.
        self._unlisted: dict[str, Finding] = {}
        self.closed = False
        self._loaded_at = time.monotonic()
        self.index = FlatIndex(
            os.path.join(self.folder, INDEX_TOPIC, "0", "INDEX"),
            self.store_path,
            self._pool,
            self.said("INDEX", INDEX_TOPIC, 0),
        )

    # ------------------------------------------------------------------------------------------------------ folders

    def _load_metadata(self) -> None:
        self.metadata, self._metadata_problem = None, None
        if self.store_path is None:
            return
        try:
            self.metadata = TieredMetadata.load(self.store_path)
        except CorruptionError as error:
            detail = f"{error.message}; sizes are taken from the files"
            self._metadata_problem = Finding(error.path or self.store_path, error.pos or 0, "bad_metadata", detail)

    def _choose(self, cluster: str | None, broker: str | None) -> tuple[str, str, str]:
        if not is_directory(self.path):
            raise StoreError(
                "tiered storage: there is no such directory; give the broker's tieredStoreFilePath", self.path
            )
        found = [
            (os.path.join(self.path, name, each), name[9:], each)
            for name in listing(self.path).checked().names
            if len(name) > 9 and name[8] == "_" and name[:8] == name_prefix(name[9:]) and cluster in (None, name[9:])
            for each in listing(os.path.join(self.path, name), os.DirEntry.is_dir).existing().names
            if broker in (None, each)
        ]
        if len(found) > 1 and broker is None and self.metadata is not None:
            found = [each for each in found if each[2] in self.metadata.brokers] or found
        if len(found) == 1:
            return found[0]
        if not found:
            raise StoreError(
                "there is no tiered storage of RocketMQ here, or none of this cluster and broker; give the broker's "
                "tieredStoreFilePath, the folder that holds <8 digits>_<cluster>/",
                self.path,
            )
        names = ", ".join(f"{name} of cluster {group}" for _, group, name in found)
        raise StoreError(f"several brokers keep their messages here: {names}; say which (broker, cluster)", self.path)

    def said(self, kind: str, topic: str, queue_id: int) -> dict[int, FlatFileMetadata] | None:
        """dict or None: what the metadata say of the files of one kind ("COMMIT_LOG", "CONSUME_QUEUE", "INDEX"), by base offset."""
        if self.metadata is None:
            return None
        return self.metadata.flat_files.get((kind, f"{self.broker}/{topic}/{queue_id}"))

    def keys(self, topic: str | None = None) -> list[tuple[str, int]]:
        """list of (str, int): topic and queue id of all queues, or of one topic's; those too of which only the metadata know."""
        self.check_open()
        found = {(each, int(name)) for each in self._topics(topic) for name in self._queue_folders(each)}
        if self.metadata is not None:
            for kind, path in self.metadata.flat_files:
                broker, _, rest = path.partition("/")
                each, _, name = rest.rpartition("/")
                if kind != "INDEX" and broker == self.broker and each and _is_queue_id(name) and topic in (None, each):
                    found.add((each, int(name)))
        return sorted(found)

    def _topics(self, topic: str | None) -> list[str]:
        if topic is not None:
            return [topic] if _is_topic(topic) else []
        return [each for each in self._listed("", self.folder) if _is_topic(each)]

    def _queue_folders(self, topic: str) -> list[str]:
        return [name for name in self._listed(topic, os.path.join(self.folder, topic)) if _is_queue_id(name)]

    def _listed(self, topic: str, path: str) -> list[str]:
        try:
            return listing(path, os.DirEntry.is_dir).existing().names
        except OSError as error:
            self._unlisted[topic] = Finding(path, 0, "file", f"cannot be listed: {error.strerror or error}")
            return []

    def report_unlisted(self, topics: Iterable[str] | None = None) -> None:
        """Report the folders that `keys` could not list, of all topics or of these: queues may be in there."""
        for topic, finding in self._unlisted.items():
            if topics is None or not topic or topic in topics:
                self.report(finding)

    def queue(self, topic: str, queue_id: int) -> FlatQueue | None:
        """FlatQueue or None: a queue; None where nothing of it is in tiered storage."""
        self.check_open()
        known = self._queues.get((topic, queue_id))
        if known is not None:
            return known
        if not _is_topic(topic):
            return None
        path = os.path.join(self.folder, topic, str(queue_id))
        log, units = self.said("COMMIT_LOG", topic, queue_id), self.said("CONSUME_QUEUE", topic, queue_id)
        if log is None and units is None and not _may_be_there(path):
            return None
        queue = FlatQueue(path, topic, queue_id, self._pool, self.report, log, units, goes_on=self.goes_on)
        return self._queues.setdefault((topic, queue_id), queue)

    def queues(self, topic: str | None = None) -> Iterator[FlatQueue]:
        """Every queue, or those of one topic, in the order of `keys`."""
        for name, queue_id in self.keys(topic):
            queue = self.queue(name, queue_id)
            if queue is not None:
                yield queue

    @property
    def notes(self) -> list[str]:
        """list of str: what is not known here, and what that means."""
        found = []
        if self.store_path is None:
            found.append("the broker's local store is not known: newest messages and index files may be there only")
        unnoticed = "sizes are those of the files, and a queue, or a first or last file, that is missing is not noticed"
        if self._metadata_problem is not None:
            found.append(f"the metadata in {self._metadata_problem.path} cannot be read: {unnoticed}")
        elif self.metadata is None:
            found.append(f"there are no metadata: {unnoticed}")
        elif self.metadata.is_backup:
            found.append(
                f"the metadata are those of {self.metadata.path}, as the file itself is missing or cannot be read: "
                "what was uploaded since and is missing is not noticed"
            )
        return found

    @property
    def problems(self) -> list[Finding]:
        """list of Finding: what is wrong with the metadata and with files as a whole, of queues and index."""
        own = [] if self._metadata_problem is None else [self._metadata_problem]
        of_queues = [each for queue in self.queues() for each in queue.problems]
        return [*own, *self._unlisted.values(), *of_queues, *self.index.problems]

    def report(self, finding: Finding) -> None:
        """Tell `on_damage`, or raise; what retention took meanwhile is said in a warning, once for each file."""
        if finding.kind == EXPIRED:
            if finding.path not in self._warned_of:
                self._warned_of.add(finding.path)
                logger.warning("%s: %s; what lay there is left out (retention)", finding.path, finding.detail)
            return
        if self.on_damage is None:
            raise CorruptionError(
                f"{finding.detail}; restore the file from a copy, or read around it (on_damage)",
                finding.path,
                finding.pos,
            )
        self.on_damage(finding)

    # --------------------------------------------------------------------------------------------------- key lookup

    def find_messages(self, selection: Selection) -> list[MessageExt]:
        """list of MessageExt: every message with one key and a store time in the range, newest first, each checked by its record.

        Parameters
        ----------
        selection : Selection
            One topic and one key, `index_type` and store times.  Tags are in no index file, so units are gone over for them.

        Raises
        ------
        CorruptionError
            A part cannot be looked at, and there is no `on_damage`.
        """
        self.check_open()
        self.refresh()
        low, high = selection.times
        found = ask_again(lambda: self._find_messages(selection.at_any_time()), self.load)
        return [message for message in found if low <= message.store_timestamp <= high]

    def _find_messages(self, selection: Selection) -> list[MessageExt]:
        topic, key, index_type = selection.topic, selection.key, selection.index_type
        found: dict[tuple[int, int], MessageExt] = {}

        def take(queue: FlatQueue, message: MessageExt) -> None:
            # A record that says it is another message than its unit is marked; what was uploaded twice counts once.
            number = queue.unit_of(message.phy_offset)[0]
            if number >= 0:
                message.check_queue(queue.topic, queue.queue_id, number)
            place = queue.queue_id, number if number >= 0 else message.queue_offset
            known = found.get(place)
            if known is None or known.phy_offset < message.phy_offset:
                found[place] = message

        key_hash = flat_index_hash(topic, key)
        sound = index_type != "T" and key_hash != _NO_HASH
        if sound:
            for item in self.index.items(key_hash):
                message = self._message_of(topic, item)
                queue = self.queue(topic, item.queue_id) if message is not None else None
                if queue and message and selection.has(message):
                    take(queue, message)
                elif not self._is_explained(topic, item, message, key_hash):
                    sound = False
            sound = sound and not self.index.problems
        sought = SoughtKeys.of(selection)
        queues = list(self.queues(topic))
        self.report_unlisted((topic,))
        for queue in queues:
            if queue.lacks_units is not None:
                self.report(queue.lacks_units)
            low, high = queue.min_queue_offset, queue.max_queue_offset
            parts = [(low, self.indexed_from(queue)), (self.indexed_to(queue), high)] if sound else [(low, high)]
            for begin, end in parts:
                for log_offset in queue.find_keys(sought, begin, end):
                    message = queue.log.look_up(log_offset)
                    if message is not None:
                        take(queue, message)
        return sorted(found.values(), key=lambda each: (-each.store_timestamp, each.queue_id, -each.queue_offset))

    def _message_of(self, topic: str, item: IndexItem) -> MessageExt | None:
        queue = self.queue(topic, item.queue_id) if item.queue_id >= 0 else None
        return None if queue is None or item.log_offset < 0 else queue.log.look_up(item.log_offset)

    def _is_explained(self, topic: str, item: IndexItem, message: MessageExt | None, key_hash: int) -> bool:
        # Why an item with the hash does not lead to a message with the key: another topic, another key, or retention.
        known = None if self.metadata is None else self.metadata.topic_ids.get(item.topic_id)
        if known is not None and known != topic:
            return True
        queue = self.queue(topic, item.queue_id) if item.queue_id >= 0 else None
        if queue is None:
            return known is None
        if message is None:
            # Without metadata it may be another topic's, unless a unit of this one leads there.
            expired = 0 <= item.log_offset < queue.log.min_offset
            return expired or (known is None and queue.unit_of(item.log_offset) == (-1, True))
        return any(flat_index_hash(message.topic, each) == key_hash for each in _keys_of(message))

    def indexed_to(self, queue: FlatQueue) -> int:
        """int: queue offset from which on messages of `queue` are in no index file that can be seen here.

        A queue's messages are indexed in order, so that the place is found by halves.
        """
        place = queue.topic, queue.queue_id
        known = self._indexed_to.get(place)
        if known is None:
            low, high = queue.min_queue_offset, queue.max_queue_offset
            middle = high - 1
            while low < high:
                at, indexed = middle, self._is_indexed(queue, middle)
                while indexed is None and at > low and middle - at < _KEYLESS:
                    # It has no key, and is in no index file wherever it lies.
                    at -= 1
                    indexed = self._is_indexed(queue, at)
                if indexed or (indexed is None and at == low):
                    low = middle + 1
                else:
                    high = at
                middle = (low + high) // 2
            known = self._indexed_to[place] = low
        return known

    def indexed_from(self, queue: FlatQueue) -> int:
        """int: queue offset before which messages of `queue` are in no index file; not above `indexed_to`.

        The oldest index file may expire, or be lost, before the log files that have its messages.
        """
        place = queue.topic, queue.queue_id
        known = self._indexed_from.get(place)
        if known is None:
            low, high = queue.min_queue_offset, self.indexed_to(queue)
            middle = low
            while low < high:
                at, indexed = middle, self._is_indexed(queue, middle, unread=None)
                while indexed is None and at + 1 < high and at - middle < _KEYLESS:
                    # It has no key, or cannot be read, and says nothing: the next one does.
                    at += 1
                    indexed = self._is_indexed(queue, at, unread=None)
                if indexed:
                    high = middle
                else:
                    low = at + 1
                middle = (low + high) // 2
            known = self._indexed_from[place] = low
        return known

    def _is_indexed(self, queue: FlatQueue, queue_offset: int, unread: bool | None = False) -> bool | None:
        # None for a message without a key; what cannot be read counts as not indexed, so that it is looked at and told.
        unit = queue.unit_at(queue_offset)
        message = None if unit is None else queue.log.look_up(unit[0], unit[1])
        if message is None:
            return unread
        keys = _keys_of(message)
        if not keys:
            return None
        return any(
            item.log_offset == message.phy_offset and item.queue_id == queue.queue_id
            for item in self.index.items(flat_index_hash(message.topic, keys[0]))
        )

    def like_java(self, topic: str, key: str, max_num: int, begin: int, end: int) -> list[MessageExt]:
        """list of MessageExt: what RocketMQ 5.5.0 finds in tiered storage, with all that it misses."""
        self.check_open()
        self.refresh()
        return ask_again(lambda: self._like_java(topic, key, max_num, begin, end), self.load)

    def _like_java(self, topic: str, key: str, max_num: int, begin: int, end: int) -> list[MessageExt]:
        key_hash = flat_index_hash(topic, key)
        chosen: dict[str, IndexItem] = {}
        for index in self.index.files:
            if not begin <= index.begin_timestamp <= end:
                continue
            for number, item in enumerate(index.like_java(key_hash, begin, end)):
                if len(chosen) < max_num and number < max_num:
                    chosen[f"{item.queue_id}-{item.log_offset:20d}"] = item
        ids = {} if self.metadata is None else self.metadata.topic_ids
        found = []
        for _, item in sorted(chosen.items())[:max_num]:
            if ids.get(item.topic_id, topic) == topic:
                message = self._message_of(topic, item)
                if message is not None and message.topic == topic:
                    found.append(message)
        return found

    # ------------------------------------------------------------------------------------------------ state, closing

    def load(self) -> None:
        """Look at all files again, where a broker wrote or deleted some meanwhile."""
        self.check_open()
        self._loaded_at = time.monotonic()
        self._load_metadata()
        for (topic, queue_id), queue in list(self._queues.items()):
            queue.load(self.said("COMMIT_LOG", topic, queue_id), self.said("CONSUME_QUEUE", topic, queue_id))
        self._indexed_from, self._indexed_to, self._unlisted = {}, {}, {}
        self.index.load(self.said("INDEX", INDEX_TOPIC, 0))

    def refresh(self) -> None:
        """As `load`, but not within a second of the last time: a broker uploads every 20 seconds."""
        if time.monotonic() - self._loaded_at >= _LOOK_INTERVAL:
            self.load()

    def check_open(self) -> None:
        """Raise StoreClosedError after `close`."""
        if self.closed:
            raise StoreClosedError("tiered storage was closed; open it again", self.path)

    def close(self) -> None:
        """Let go of the files; closing twice does nothing."""
        self.closed = True
        for queue in self._queues.values():
            queue.close()
        self.index.close()


def _may_be_there(path: str) -> bool:
    # What nobody may look at is no less there.
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:
        return True
    return os.path.isdir(path)


def _is_topic(name: str) -> bool:
    # It is a folder's name, and must not lead out of the broker's.
    return bool(name) and os.sep not in name and "\0" not in name and name not in (".", "..", INDEX_TOPIC)


def _is_queue_id(name: str) -> bool:
    # Python refuses to make a number of thousands of digits, which metadata may name.
    return re.fullmatch("0|[1-9][0-9]{0,9}", name) is not None and int(name) < 2**31


def _keys_of(message: MessageExt) -> list[str]:
    unique_key = message.unique_key
    return [*([unique_key] if unique_key else []), *message.keys]
